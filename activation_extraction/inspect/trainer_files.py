"""The forms of --export, and the files that trainers of autoencoders read. draft_files.py has those
of draft models.

A function for each form writes them. It gets a folder, which has an empty folder for each hook
unless the form is one for draft models, a run, the names of the hooks to export, and all tokens of
the run in chunks; every chunk but the last has a multiple of the form's `row` tokens. It returns
what it wrote and what it left out. The libraries are imported where they are needed.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.token_batch import TokenBatch
from activation_extraction.inspect.arrow_files import ArrowFolder
from activation_extraction.inspect.draft_files import (
    NORMED,
    STREAMS,
    write_specforge,
    write_speculators,
)
from activation_extraction.inspect.exported import Exported
from activation_extraction.inspect.latent_files import ROW, write_delphi

Write = Callable[[Path, ActivationDataset, Sequence[str], Iterable[TokenBatch]], Exported]


class ExportForm(NamedTuple):
    """One value of --export.

    Attributes:
        library: Package that is needed to write the files.
        write: Function that writes the files; see above.
        read_with: Lines with which the trainer reads the files. They are a format of `folder`,
            `hook`, `path` (the folder of the hook) and `row`; in commands also of `model` (the
            model's path), `layers` (numbers of all hidden states but the last, as transformers
            counts them) and `config` (specforge_config), all of which are quoted for a shell.
        row: Number of tokens in a row of the files. Tokens that do not fill a row are left out.
        has_bfloat16: Whether the files can hold bfloat16; otherwise float32 is written.
        of_codes: Whether the form takes codes, and no other hooks. Such a form needs all tokens of
            the samples.
        streams: Hooks that a form for draft models takes, as globs; empty for other forms. A form
            for draft models needs all tokens of the samples.
    """

    library: str
    write: Write
    read_with: str
    row: int = 1
    has_bfloat16: bool = True
    of_codes: bool = False
    streams: tuple[str, ...] = ()

    def dtype_of(self, dataset: ActivationDataset, hook: str) -> np.dtype:
        """Returns the dtype of a hook's values in the files."""
        dtype = dataset.dtypes[hook]
        return dtype if self.has_bfloat16 or dtype.name != "bfloat16" else np.dtype(np.float32)

    def token_bytes(self, dataset: ActivationDataset, hook: str) -> int:
        """Returns the most bytes of a token at a hook on the way to the files and in them."""
        if self.of_codes:
            return 4 * dataset.shards.row_bytes([hook])
        return dataset.hooks[hook] * self.dtype_of(dataset, hook).itemsize


def write_llamascopium(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes Llamascopium's cached activations, for its target `activations-1d`.

    There are files of chunks for each hook. There is no padding, so both masks are 1.
    """
    from safetensors.numpy import save

    tokens = 0
    for number, batch in enumerate(chunks):
        ones = np.ones(len(batch), np.int32)
        shared = {"mask": ones, "attention_mask": ones, "tokens": batch.token_ids.astype(np.int64)}
        for hook, values in batch.items():
            # `save_file` reports a full disk as an error of its own.
            data = save({**shared, "activation": values})
            (folder / hook / f"chunk-{number:08d}.safetensors").write_bytes(data)
        tokens += len(batch)
    return Exported(tokens)


def write_memmap(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes the activation cache of jkminder's dictionary_learning, which trains crosscoders.

    Each hook has a folder with config.json, with `shard_i.memmap` and `shard_i.meta` per chunk, and
    with the statistics of every dimension. Beside these folders are tokens.pt, and
    sequence_ranges.pt with the start of each sample and the end of the last one.
    """
    import torch

    scratch = folder / "tokens.bin"  # the ids of all tokens need not fit into memory
    tokens, shards, starts, sample = 0, [], [], None
    with open(scratch, "wb") as file:
        for number, batch in enumerate(chunks):
            batch.token_ids.astype(np.int64).tofile(file)
            changes = np.flatnonzero(np.diff(batch.sample_idx)) + 1
            first = [] if batch.sample_idx[0] == sample else [0]
            starts.append(tokens + np.array([*first, *changes], np.int64))
            for hook, values in batch.items():
                meta = {"shape": list(values.shape), "dtype": f"torch.{values.dtype.name}"}
                (folder / hook / f"shard_{number}.meta").write_text(json.dumps(meta))
                values.tofile(folder / hook / f"shard_{number}.memmap")
            tokens, sample = tokens + len(batch), batch.sample_idx[-1]
            shards.append(len(batch))
    token_ids = torch.from_file(str(scratch), False, tokens, dtype=torch.int64)
    ranges = torch.from_numpy(np.concatenate([*starts, [tokens]]))
    _save(folder, tokens=token_ids, sequence_ranges=ranges)
    scratch.unlink()
    for hook in hooks:
        config = {
            "d_model": dataset.hooks[hook],
            "shard_size": shards[0],
            "shard_count": len(shards),
            "total_size": tokens,
            "shuffle_shards": False,
            "io": "out",
            "store_tokens": True,
            "store_sequence_ranges": True,
        }
        (folder / hook / "config.json").write_text(json.dumps(config, indent=2))
        of_hook = dataset.statistics[hook].all_tokens
        if of_hook.tokens:  # hooks that hold no activations have no statistics
            # The cache calls the sum of the squared deviations M2 (RunningStatWelford).
            squares = of_hook.variance * of_hook.tokens
            std = np.sqrt(squares / max(of_hook.tokens - 1, 1))
            floats = {"mean": of_hook.mean, "std": std, "M2": squares}
            tensors = {name: torch.tensor(values).float() for name, values in floats.items()}
            _save(folder / hook, count=torch.tensor(of_hook.tokens), **tensors)
    return Exported(tokens)


def _save(folder: Path, **tensors: Any) -> None:
    """Writes tensors to files of their names for torch.load."""
    import torch

    for name, tensor in tensors.items():
        with open(folder / f"{name}.pt", "wb") as file:  # which reports a full disk as OSError
            torch.save(tensor, file)


def write_sae_lens(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes SAELens's cached activations, as its CacheActivationsRunner does.

    Each hook has a folder that `datasets.load_from_disk` reads. Like the rows that SAELens itself
    makes, a row may begin and end within samples: SAELens mixes all tokens before it trains on
    them.
    """
    import datasets

    form, tokens, writers = EXPORT_FORMS["sae_lens"], 0, {}
    for hook in hooks:
        shape, dtype = (form.row, dataset.hooks[hook]), form.dtype_of(dataset, hook).name
        ids = datasets.List(datasets.Value("int32"), length=form.row)
        columns = {hook: datasets.Array2D(shape, dtype), "token_ids": ids}
        writers[hook] = ArrowFolder(folder / hook, columns)
    for batch in chunks:
        rows = len(batch) // form.row
        whole = rows * form.row
        token_ids = batch.token_ids[:whole].reshape(rows, form.row)
        for hook, values in batch.items():
            column = values[:whole].reshape(rows, form.row, values.shape[1])
            column = column.astype(form.dtype_of(dataset, hook), copy=False)
            writers[hook].write({hook: column, "token_ids": token_ids})
        tokens += whole
    for writer in writers.values():
        writer.finalize()
    return Exported(tokens)


EXPORT_FORMS = {
    "memmap": ExportForm("torch", write_memmap, "ActivationCache({folder!r}, {hook!r})"),
    "llamascopium": ExportForm(
        "safetensors",
        write_llamascopium,
        "ActivationFactoryActivationsSource(path={folder!r}, name={hook!r})",
    ),
    "sae_lens": ExportForm(
        "datasets",
        write_sae_lens,
        "LanguageModelSAERunnerConfig(..., hook_name={hook!r}, context_size={row}, "
        "use_cached_activations=True, cached_activations_path={path!r})",
        row=128,  # as the contexts of SAELens by default
        has_bfloat16=False,
    ),
    "speculators": ExportForm(
        "datasets",
        write_speculators,
        "python -m speculators.train --data-path {quoted_folder} --verifier-name-or-path {model} "
        "--target-layer-ids {layers} --on-missing raise",
        streams=STREAMS,
    ),
    "specforge": ExportForm(
        "torch",
        write_specforge,
        "echo {config} > specforge.json\n  specforge train --config specforge.json",
        streams=(*STREAMS, NORMED),
    ),
    "delphi": ExportForm(
        "safetensors",
        write_delphi,
        "LatentDataset({folder!r}, SamplerConfig(), ConstructorConfig())",
        row=ROW,
        of_codes=True,
    ),
}
