"""Lists the export formats, and writes the files of SAELens.

An export format is one value of --export. It determines the files, which one other program reads.
draft_files.py writes the files for trainers of draft models, latent_files.py the files of delphi,
and nla_files.py the files of natural language autoencoders. Optional packages are imported inside
the functions that need them.
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
    FINAL_NORM_HOOK,
    STREAM_GLOBS,
    write_specforge,
    write_speculators,
)
from activation_extraction.inspect.exported import Exported
from activation_extraction.inspect.latent_files import ROW_TOKENS, write_delphi
from activation_extraction.inspect.nla_files import FILE_NAME, STREAM_PATTERN, write_nla

# A function that writes the files of an export format. It takes these arguments:
#
# - the folder of the export, which has an empty folder for each hook if `hook_folders` is true;
# - the run;
# - the names of the hooks to export;
# - all tokens of the run in chunks, each of which but the last has a multiple of `row` tokens.
Write = Callable[[Path, ActivationDataset, Sequence[str], Iterable[TokenBatch]], Exported]


class ExportFormat(NamedTuple):
    """An export format: one value of --export.

    Attributes:
        library: The name of the package that is needed to write the files.
        write: The function that writes the files; see `Write`.
        read_with: Lines of Python or shell that read the files, as a template for `str.format`. The
            fields are `folder`, `hook` (the first hook), `path` (the folder of this hook), `row`
            and, quoted for a shell, `quoted_folder`. Formats for draft models have further fields,
            quoted for a shell: `model` (the path of the model), `layers` (the numbers of all
            exported hidden states but the last, as transformers counts them) and `config` (from
            `specforge_config`).
        row: The number of tokens in a row of the files. Tokens that do not fill a row are left out.
        widened: The names of dtypes that the files cannot contain. Such values are written as
            float32.
        accepts_codes: Whether the format accepts hooks with codes instead of activations. Such a
            format needs all tokens of the samples.
        stream_globs: Globs of the hooks that a format for draft models accepts. Empty for other
            formats. A format for draft models needs all tokens of the samples.
        text_hook: The pattern of the single hook that is accepted by a format whose files contain
            the text before each token. The chunks then have the columns that `write_nla` needs.
            None for other formats.
    """

    library: str
    write: Write
    read_with: str
    row: int = 1
    widened: tuple[str, ...] = ()
    accepts_codes: bool = False
    stream_globs: tuple[str, ...] = ()
    text_hook: re.Pattern[str] | None = None

    @property
    def hook_folders(self) -> bool:
        """Whether the files of each hook are in a separate folder."""
        return not self.stream_globs and self.text_hook is None

    def dtype_of(self, dataset: ActivationDataset, hook: str) -> np.dtype:
        """Returns the dtype in which the files contain the values of a hook."""
        dtype = dataset.dtypes[hook]
        return np.dtype(np.float32) if dtype.name in self.widened else dtype

    def token_bytes(self, dataset: ActivationDataset, hook: str) -> int:
        """Returns an upper bound for the bytes of a token's values, in memory and in the files.

        Args:
            dataset: The run.
            hook: The name of the hook whose values are exported.
        """
        if self.accepts_codes:
            return 4 * dataset.shards.row_bytes([hook])
        return dataset.hooks[hook] * self.dtype_of(dataset, hook).itemsize


def write_sae_lens(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes cached activations for SAELens, as its CacheActivationsRunner does.

    Each hook has a folder that `datasets.load_from_disk` reads. A row may begin and end within a
    sample, as in the rows that SAELens itself makes, because SAELens mixes all tokens before it
    trains on them.

    Args:
        folder: The folder of the export, which has an empty folder for each hook.
        dataset: The run.
        hooks: The names of hooks with activations.
        chunks: All tokens of the run, in stored order. Each chunk but the last consists of whole
            rows.

    Returns:
        The number of tokens written.
    """
    import datasets

    export_format = EXPORT_FORMATS["sae_lens"]
    written_tokens = 0
    arrow_folders = {}
    for hook in hooks:
        row_shape = (export_format.row, dataset.hooks[hook])
        dtype = export_format.dtype_of(dataset, hook)
        column_types = {
            hook: datasets.Array2D(row_shape, dtype.name),
            "token_ids": datasets.List(datasets.Value("int32"), length=export_format.row),
        }
        arrow_folders[hook] = ArrowFolder(folder / hook, column_types)
    for batch in chunks:
        row_count = len(batch) // export_format.row
        row_tokens = row_count * export_format.row
        token_ids = batch.token_ids[:row_tokens].reshape(row_count, export_format.row)
        for hook, activations in batch.items():
            rows_of_hook = activations[:row_tokens].reshape(
                row_count, export_format.row, activations.shape[1]
            )
            rows_of_hook = rows_of_hook.astype(export_format.dtype_of(dataset, hook), copy=False)
            arrow_folders[hook].write({hook: rows_of_hook, "token_ids": token_ids})
        written_tokens += row_tokens
    for arrow_folder in arrow_folders.values():
        arrow_folder.finalize()
    return Exported(written_tokens)


EXPORT_FORMATS = {
    "sae_lens": ExportFormat(
        "datasets",
        write_sae_lens,
        "LanguageModelSAERunnerConfig(..., hook_name={hook!r}, context_size={row}, "
        "use_cached_activations=True, cached_activations_path={path!r})",
        row=128,  # SAELens's default context_size
        widened=("bfloat16",),
    ),
    "speculators": ExportFormat(
        "datasets",
        write_speculators,
        "python -m speculators.train --data-path {quoted_folder} --verifier-name-or-path {model} "
        "--target-layer-ids {layers} --on-missing raise",
        stream_globs=STREAM_GLOBS,
    ),
    "specforge": ExportFormat(
        "torch",
        write_specforge,
        "echo {config} > specforge.json\n  specforge train --config specforge.json",
        stream_globs=(*STREAM_GLOBS, FINAL_NORM_HOOK),
    ),
    "delphi": ExportFormat(
        "safetensors",
        write_delphi,
        "LatentDataset({folder!r}, SamplerConfig(), ConstructorConfig())",
        row=ROW_TOKENS,
        accepts_codes=True,
    ),
    "nla": ExportFormat(
        "transformers",
        write_nla,
        f"python -m nla.datagen.stage1_split --base {{quoted_folder}}/{FILE_NAME} "
        "--output-dir FOLDER",
        widened=("bfloat16", "float16"),
        text_hook=STREAM_PATTERN,
    ),
}
