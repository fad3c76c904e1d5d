"""Writes delphi's cache of latents: the files from which delphi explains features.

A latent of delphi is a feature of an autoencoder in this project. The codes of a run contain the
active features of each token with their values.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import counted
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.token_batch import TokenBatch
from activation_extraction.inspect.export_format import Exported, ExportFormat

ROW_TOKENS = 64  # number of tokens in a row; delphi shows examples of half a row
# Usual number of files per hook, the default of delphi's setting n_splits. There are more files if
# they would otherwise exceed FILE_BYTES, and fewer if the hook has fewer features.
USUAL_FILES = 5
FILE_BYTES = 2**30  # approximate largest number of bytes in a file
LARGEST_LEFT_OUT_VALUE = 1e-5  # values of at most this magnitude are left out, as in delphi
# Dtype of a file while it is being written. Each entry is the value of the feature with the id
# `latent` at the token with the index `token_in_row` in the row with the index `row`.
ENTRY = np.dtype([("row", "u4"), ("token_in_row", "u4"), ("latent", "u4"), ("value", "f4")])
# A range of features: the id of its first feature, and the id after the id of its last feature.
FeatureRange = tuple[int, int]


class DelphiFormat(ExportFormat):
    """The files from which delphi 0.1 reads active features (latents). Each hook has a folder.

    A row contains ROW_TOKENS consecutive tokens of one sample. Tokens at the end of a sample that
    do not fill a row are left out. A file START_END.safetensors covers the features START to END,
    inclusive, where START and END are feature ids. It contains these tensors:

    - `locations`: The location of each value, uint32 (values, 3), sorted by feature id. A location
      consists of the index of the row, the index of the token in the row, and the id of the feature
      minus START.
    - `activations`: The values, float32 (values,).
    - `tokens`: The token ids of all rows, (rows, ROW_TOKENS).
    """

    flag_value = "delphi"  # value of --export that selects this format
    needed_package = "safetensors"
    accepted_hooks_phrase = "codes, which --encode stores"
    needs_every_token = True
    tokens_per_row = ROW_TOKENS
    each_row_has_one_sample = True

    def accepts(self, dataset: ActivationDataset, hook: str) -> bool:
        """Returns whether a hook can be exported: its values must be codes.

        Args:
            dataset: The run.
            hook: The name of the hook.
        """
        return not dataset.shards.stored_hook_by_name[hook].values_are_array

    def choose_hooks(self, dataset: ActivationDataset, chosen_hooks: Sequence[str]) -> list[str]:
        """Returns the names of the hooks to export, in the run's order.

        Chosen hooks without codes are left out, and a message names them.

        Args:
            dataset: The run.
            chosen_hooks: The names of the hooks that the user has chosen.

        Raises:
            InputError: If none of the chosen hooks has codes, or if every sample has fewer than
                ROW_TOKENS tokens, so that there is no complete row to export.
        """
        exported_hook_names = super().choose_hooks(dataset, chosen_hooks)
        sample_lengths = dataset.samples["tokens"].to_numpy()
        if not (sample_lengths >= self.tokens_per_row).any():
            raise InputError(
                f"--export delphi: no sample of {dataset.url} has {self.tokens_per_row} tokens, "
                "which a row needs"
            )
        return exported_hook_names

    def token_bytes(self, dataset: ActivationDataset, hook: str) -> int:
        """Returns a number of bytes that a token's codes never exceed, in memory or in the files.

        Args:
            dataset: The run.
            hook: The name of the hook.
        """
        return 4 * dataset.shards.bytes_per_token([hook])

    def write(
        self,
        folder: Path,
        dataset: ActivationDataset,
        hooks: Sequence[str],
        chunks: Iterable[TokenBatch],
    ) -> Exported:
        """Writes a folder for each hook, with files of codes and delphi's file config.json.

        `ExportFormat.write` documents the arguments and the result.
        """
        from safetensors.numpy import save

        sample_lengths = dataset.samples["tokens"].to_numpy()
        # Index of each sample's first token among all tokens of the run. The last element is the
        # number of all tokens.
        token_bounds_of_samples = np.cumsum([0, *sample_lengths])
        num_read_tokens = 0  # number of tokens that were read so far
        # Number of tokens read so far that are exported. Only tokens in complete rows are exported.
        num_exported_tokens = 0
        # Name of a hook -> number of its values that are left out because their magnitude is at
        # most LARGEST_LEFT_OUT_VALUE.
        left_out_code_count_by_hook = dict.fromkeys(hooks, 0)
        token_ids_of_chunks: list[np.ndarray] = []
        # Name of a hook -> range of feature ids (first, stop) -> path of the file. While tokens
        # are read, a file contains values of the dtype ENTRY in the order of the tokens. After the
        # last token, the content of each file is replaced by the tensors that delphi expects.
        path_by_range_by_hook_name: dict[str, dict[FeatureRange, Path]] = {}
        for hook_name in hooks:
            (folder / hook_name).mkdir()
            path_by_range_by_hook_name[hook_name] = {}
            for first_feature_id, stop_feature_id in pairwise(
                _feature_boundaries(dataset, hook_name)
            ):
                file_name = f"{first_feature_id}_{stop_feature_id - 1}.safetensors"
                path_by_range_by_hook_name[hook_name][first_feature_id, stop_feature_id] = (
                    folder / hook_name / file_name
                )
        for token_batch in chunks:
            token_indices_in_run = np.arange(num_read_tokens, num_read_tokens + len(token_batch))
            sample_indices_of_tokens = (
                np.searchsorted(token_bounds_of_samples, token_indices_in_run, "right") - 1
            )
            exported_token_mask = (
                token_batch.position
                < sample_lengths[sample_indices_of_tokens]
                // self.tokens_per_row
                * self.tokens_per_row
            )
            # Index of each exported token of the chunk among all exported tokens of the run. The
            # elements for the other tokens of the chunk have no meaning, and are not used.
            indices_among_exported_tokens = num_exported_tokens + np.cumsum(exported_token_mask) - 1
            token_ids_of_chunks.append(token_batch.token_ids[exported_token_mask])
            for hook_name, hook_codes in token_batch.items():
                token_indices_of_values = np.repeat(
                    np.arange(len(token_batch)), np.diff(hook_codes.indptr)
                )
                small_value_mask = np.abs(hook_codes.data) <= LARGEST_LEFT_OUT_VALUE
                left_out_code_count_by_hook[hook_name] += int(
                    np.count_nonzero(
                        exported_token_mask[token_indices_of_values] & small_value_mask
                    )
                )
                kept_value_mask = exported_token_mask[token_indices_of_values] & ~small_value_mask
                exported_token_indices_of_values = indices_among_exported_tokens[
                    token_indices_of_values[kept_value_mask]
                ]
                row_indices_of_values, token_indices_in_rows = np.divmod(
                    exported_token_indices_of_values, self.tokens_per_row
                )
                columns_of_entries = [
                    row_indices_of_values,
                    token_indices_in_rows,
                    hook_codes.indices[kept_value_mask],
                    hook_codes.data[kept_value_mask],
                ]
                values_with_locations = np.rec.fromarrays(columns_of_entries, dtype=ENTRY)
                path_by_feature_range = path_by_range_by_hook_name[hook_name]
                for (first_feature_id, stop_feature_id), file_path in path_by_feature_range.items():
                    feature_ids_of_values = values_with_locations["latent"]
                    values_in_file_mask = (feature_ids_of_values >= first_feature_id) & (
                        feature_ids_of_values < stop_feature_id
                    )
                    with open(file_path, "ab") as codes_file:
                        values_with_locations[values_in_file_mask].tofile(codes_file)
            num_read_tokens += len(token_batch)
            num_exported_tokens += int(exported_token_mask.sum())
        token_ids_of_rows = np.concatenate(token_ids_of_chunks).reshape(-1, self.tokens_per_row)
        for hook_name in hooks:
            for (first_feature_id, _), file_path in path_by_range_by_hook_name[hook_name].items():
                entries_of_file = np.fromfile(file_path, ENTRY)
                # From here on, the entries are sorted by feature.
                entries_of_file = entries_of_file[
                    np.argsort(entries_of_file["latent"], kind="stable")
                ]
                entries_of_file["latent"] -= first_feature_id
                location_columns = [
                    entries_of_file["row"],
                    entries_of_file["token_in_row"],
                    entries_of_file["latent"],
                ]
                tensor_by_name = {
                    "locations": np.stack(location_columns, axis=1),
                    "activations": entries_of_file["value"].copy(),
                    "tokens": token_ids_of_rows,
                }
                file_path.write_bytes(save(tensor_by_name))
            delphi_settings = {
                "model_name": dataset.tokenizer_path,
                "dataset_repo": dataset.identity.data,
                "dataset_column": dataset.identity.text.text_column,
                "cache_ctx_len": self.tokens_per_row,
                "ctx_len": self.tokens_per_row,
                "n_tokens": token_ids_of_rows.size,
                "n_splits": len(path_by_range_by_hook_name[hook_name]),
            }
            (folder / hook_name / "config.json").write_text(json.dumps(delphi_settings, indent=2))
        omission_phrases = [
            f"{counted(left_out_code_count, 'code')} of at most {LARGEST_LEFT_OUT_VALUE:g} at "
            f"{hook_name}, as by delphi itself"
            for hook_name, left_out_code_count in left_out_code_count_by_hook.items()
            if left_out_code_count
        ]
        return Exported(token_ids_of_rows.size, tuple(omission_phrases))

    def usage_lines(
        self, folder: str, dataset: ActivationDataset, hooks: Sequence[str]
    ) -> list[str]:
        """Returns the lines of the Python expression with which the library delphi opens the files.

        Args:
            folder: The path of the exported folder.
            dataset: The run.
            hooks: The names of the exported hooks.
        """
        return [f"LatentDataset({folder!r}, SamplerConfig(), ConstructorConfig())"]


def _feature_boundaries(dataset: ActivationDataset, hook: str) -> list[int]:
    """Divides the features of a hook into the ranges that the hook's files contain.

    Args:
        dataset: The run.
        hook: The name of a hook with codes.

    Returns:
        The id of the first feature of each file, and as the last item the number of all features.
    """
    feature_count = dataset.hooks[hook]
    value_count_upper_bound = dataset.tokens * dataset.shards.stored_hook_by_name[hook].max_values
    num_full_files = -(-value_count_upper_bound * ENTRY.itemsize // FILE_BYTES)  # rounded up
    file_count = max(USUAL_FILES, num_full_files)
    return np.linspace(0, feature_count, min(file_count, feature_count) + 1).astype(int).tolist()
