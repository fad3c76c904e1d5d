"""Writes activations as SAELens caches them, so that SAELens trains autoencoders on them."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.token_batch import TokenBatch
from activation_extraction.inspect.arrow_files import ArrowFolder
from activation_extraction.inspect.export_format import Exported, ExportFormat


class SaeLensFormat(ExportFormat):
    """Cached activations, as SAELens's CacheActivationsRunner writes them.

    Each hook has a folder that `datasets.load_from_disk` reads. A row may begin and end within a
    sample, as in the rows that SAELens itself makes, because SAELens mixes all tokens before it
    trains on them. Arrow files cannot contain bfloat16, so such values are written as float32.
    """

    flag_value = "sae_lens"  # value of --export that selects this format
    needed_package = "datasets"
    accepted_hooks_phrase = "activations, no codes"
    tokens_per_row = 128  # the default of SAELens's setting context_size

    def accepts(self, dataset: ActivationDataset, hook: str) -> bool:
        """Returns whether a hook can be exported: its values must be an array, not codes.

        Args:
            dataset: The run.
            hook: The name of the hook.
        """
        return dataset.shards.stored_hook_by_name[hook].values_are_array

    def token_bytes(self, dataset: ActivationDataset, hook: str) -> int:
        """Returns the number of bytes of a token's activation in the dtype of the exported files.

        Args:
            dataset: The run.
            hook: The name of the hook.
        """
        return dataset.hooks[hook] * _file_dtype(dataset, hook).itemsize

    def write(
        self,
        folder: Path,
        dataset: ActivationDataset,
        hooks: Sequence[str],
        chunks: Iterable[TokenBatch],
    ) -> Exported:
        """Writes a data set of the package `datasets` for each hook, in a folder of its own.

        The folder has the hook's name. Each row of the data set contains the activations and the
        token ids of `tokens_per_row` consecutive tokens of the run. The last tokens of the run are
        left out if they do not fill a row. `ExportFormat.write` documents the arguments and the
        result.
        """
        import datasets

        written_token_count = 0
        folder_by_hook = {}
        for hook_name in hooks:
            (folder / hook_name).mkdir()
            row_shape = (self.tokens_per_row, dataset.hooks[hook_name])
            type_by_column_name = {
                hook_name: datasets.Array2D(row_shape, _file_dtype(dataset, hook_name).name),
                "token_ids": datasets.List(datasets.Value("int32"), length=self.tokens_per_row),
            }
            folder_by_hook[hook_name] = ArrowFolder(folder / hook_name, type_by_column_name)
        for token_batch in chunks:
            row_count = len(token_batch) // self.tokens_per_row
            num_tokens_in_rows = row_count * self.tokens_per_row
            token_id_rows = token_batch.token_ids[:num_tokens_in_rows].reshape(
                row_count, self.tokens_per_row
            )
            for hook_name, hook_activations in token_batch.items():
                width = hook_activations.shape[1]
                activation_rows = hook_activations[:num_tokens_in_rows].reshape(
                    row_count, self.tokens_per_row, width
                )
                activation_rows = activation_rows.astype(
                    _file_dtype(dataset, hook_name), copy=False
                )
                folder_by_hook[hook_name].write(
                    {hook_name: activation_rows, "token_ids": token_id_rows}
                )
            written_token_count += num_tokens_in_rows
        for arrow_folder in folder_by_hook.values():
            arrow_folder.finalize()
        return Exported(written_token_count)

    def usage_lines(
        self, folder: str, dataset: ActivationDataset, hooks: Sequence[str]
    ) -> list[str]:
        """Returns the lines of the Python call that makes SAELens train on the first hook.

        Args:
            folder: The path of the exported folder.
            dataset: The run.
            hooks: The names of the exported hooks.
        """
        hook_folder = os.path.join(folder, hooks[0])
        return [
            f"LanguageModelSAERunnerConfig(..., hook_name={hooks[0]!r}, "
            f"context_size={self.tokens_per_row}, use_cached_activations=True, "
            f"cached_activations_path={hook_folder!r})"
        ]


def _file_dtype(dataset: ActivationDataset, hook: str) -> np.dtype:
    """Returns the dtype in which the exported files contain the activations of a hook.

    It is the stored dtype, or float32 if the run stores bfloat16, which Arrow files cannot contain.

    Args:
        dataset: The run.
        hook: The name of the hook.
    """
    stored_dtype = dataset.dtypes[hook]
    return np.dtype(np.float32) if stored_dtype.name == "bfloat16" else stored_dtype
