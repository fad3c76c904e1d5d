"""Lists the export forms, and writes the files of SAELens.

An export form is one value of --export: the files that one other program reads. draft_files.py
writes the files for trainers of draft models, latent_files.py those of delphi, and nla_files.py
those of natural language autoencoders. Optional packages are imported inside the functions that
need them.
"""

import re
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
from activation_extraction.inspect.nla_files import FILE, STREAM, write_nla

# A function that writes the files of a form. Its arguments are the folder of the export, which has
# an empty folder for each hook if the form has `hook_folders`; the run; the names of the hooks to
# export; and all tokens of the run in chunks, of which all but the last have a multiple of the
# form's `row` tokens.
Write = Callable[[Path, ActivationDataset, Sequence[str], Iterable[TokenBatch]], Exported]


class ExportForm(NamedTuple):
    """An export form: one value of --export.

    Attributes:
        library: The package that is needed to write the files.
        write: The function that writes the files; see Write.
        read_with: The lines of Python or shell that read the files, a template for `str.format`
            with these fields: `folder`, `hook` (the first hook), `path` (its folder), `row` and,
            quoted for a shell, `quoted_folder`. In forms for draft models also, quoted for a shell:
            `model` (the path of the model), `layers` (the numbers of all exported hidden states but
            the last, as transformers counts them) and `config` (from specforge_config).
        row: The number of tokens in a row of the files. Tokens that do not fill a row are left out.
        widened: The dtypes that the files cannot contain; float32 is written instead.
        takes_codes: Whether the form takes codes instead of activations. Such a form needs all
            tokens of the samples.
        streams: Globs of the hooks that a form for draft models takes; empty for other forms. A
            form for draft models needs all tokens of the samples.
        text_hook: The pattern of the one hook that a form takes whose files contain the text before
            each token; None for other forms. Its chunks have the columns that write_nla needs.
    """

    library: str
    write: Write
    read_with: str
    row: int = 1
    widened: tuple[str, ...] = ()
    takes_codes: bool = False
    streams: tuple[str, ...] = ()
    text_hook: re.Pattern[str] | None = None

    @property
    def hook_folders(self) -> bool:
        """Whether each hook has a folder of its own."""
        return not self.streams and self.text_hook is None

    def dtype_of(self, dataset: ActivationDataset, hook: str) -> np.dtype:
        """Returns the dtype of a hook's values in the files."""
        dtype = dataset.dtypes[hook]
        return np.dtype(np.float32) if dtype.name in self.widened else dtype

    def token_bytes(self, dataset: ActivationDataset, hook: str) -> int:
        """Returns the larger of a token's size in memory and its size in the files, in bytes.

        For codes it is an upper bound of both.

        Args:
            dataset: The run.
            hook: The name of the hook whose values are exported.
        """
        if self.takes_codes:
            return 4 * dataset.shards.row_bytes([hook])
        return dataset.hooks[hook] * self.dtype_of(dataset, hook).itemsize


def write_sae_lens(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes SAELens's cached activations, as its CacheActivationsRunner does.

    Each hook has a folder that `datasets.load_from_disk` reads. As in the rows that SAELens itself
    makes, a row may begin and end within samples, because SAELens mixes all tokens before it trains
    on them.

    Args:
        folder: The folder of the export, which has an empty folder for each hook.
        dataset: The run.
        hooks: The names of hooks with activations.
        chunks: All tokens of the run, in stored order. All chunks but the last have whole rows.

    Returns:
        The number of tokens written.
    """
    import datasets

    form = EXPORT_FORMS["sae_lens"]
    tokens = 0
    writers = {}
    for hook in hooks:
        shape = (form.row, dataset.hooks[hook])
        dtype = form.dtype_of(dataset, hook)
        columns = {
            hook: datasets.Array2D(shape, dtype.name),
            "token_ids": datasets.List(datasets.Value("int32"), length=form.row),
        }
        writers[hook] = ArrowFolder(folder / hook, columns)
    for batch in chunks:
        rows = len(batch) // form.row
        row_tokens = rows * form.row
        token_ids = batch.token_ids[:row_tokens].reshape(rows, form.row)
        for hook, activations in batch.items():
            column = activations[:row_tokens].reshape(rows, form.row, activations.shape[1])
            column = column.astype(form.dtype_of(dataset, hook), copy=False)
            writers[hook].write({hook: column, "token_ids": token_ids})
        tokens += row_tokens
    for writer in writers.values():
        writer.finalize()
    return Exported(tokens)


EXPORT_FORMS = {
    "sae_lens": ExportForm(
        "datasets",
        write_sae_lens,
        "LanguageModelSAERunnerConfig(..., hook_name={hook!r}, context_size={row}, "
        "use_cached_activations=True, cached_activations_path={path!r})",
        row=128,  # SAELens's default context_size
        widened=("bfloat16",),
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
        takes_codes=True,
    ),
    "nla": ExportForm(
        "transformers",
        write_nla,
        f"python -m nla.datagen.stage1_split --base {{quoted_folder}}/{FILE} --output-dir FOLDER",
        widened=("bfloat16", "float16"),
        text_hook=STREAM,
    ),
}
