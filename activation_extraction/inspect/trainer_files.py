"""The forms of --export, and the files of one of them, SAELens. draft_files.py writes the files of
draft models, and latent_files.py those of delphi.

A function for each form writes its files. The function gets a folder, a run, the names of the hooks
to export, and all tokens of the run in chunks; every chunk but the last has a multiple of the
form's `row` tokens. The folder has an empty folder for each hook, unless the form is one for draft
models. The function returns what it wrote and what it left out. Libraries are imported where they
are needed.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

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


def write_sae_lens(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes SAELens's cached activations, as its CacheActivationsRunner does.

    Each hook has a folder that `datasets.load_from_disk` reads. Like the rows that SAELens itself
    makes, a row may begin and end within samples: SAELens mixes all tokens before it trains on
    them.
    """
    import datasets

    form = EXPORT_FORMS["sae_lens"]
    tokens = 0
    writers = {}
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
