"""Writes files from which the libraries speculators and SpecForge train draft models.

Draft models are of the kinds EAGLE-3 and DFlash. The files contain whole samples, with a loss mask,
the outputs of some layers, and the last hidden state. The two libraries number the same tensors
differently. If the blocks (decoder layers) of a model are counted from 0, the output of block k has
the number k + 1 in speculators, as in `hidden_states` of the library transformers, and the number k
in SpecForge.
"""

import io
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from activation_extraction.common.choices import ROLES
from activation_extraction.common.encodings import LARGEST_E4M3, VALUE_DTYPE
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.visible import counted
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.token_batch import (
    ByHook,
    TokenBatch,
    as_tensor,
    concatenate_batches,
    piece_of,
)
from activation_extraction.inspect.arrow_files import ArrowFolder
from activation_extraction.inspect.export_format import Exported, ExportFormat

# Name of the tensor with a 1 for each token on which a draft model is trained, and a 0 for each
# other token, whose loss is ignored. A run may store a column of the data set with this name and
# content.
LOSS_MASK = "loss_mask"
# Indices in ROLES of the roles on whose tokens a draft model is trained. The loss of tokens with
# other roles is ignored.
TRAINED_ROLES = [ROLES.index(role) for role in ("assistant", "thinking")]
# Globs of the names of hooks in the residual stream, before or after a block.
RESIDUAL_STREAM_GLOBS = "blocks.*.hook_resid_pre", "blocks.*.hook_resid_post"
FINAL_NORM_HOOK = "ln_final.hook_out"
SAMPLES_PER_FOLDER = 2000  # number of samples that SpecForge stores in a folder
# Name of the tensor with the scales of float8 hidden states in files for the library speculators.
SCALES = "hidden_states_scales"
# Smallest scale, so that a token whose values are all zero causes no division by 0.
SMALLEST_SCALE = 1e-12
EAGLE3_LAYERS = 3  # number of layers whose outputs SpecForge's EAGLE-3 draft models read


class TrainingSample(NamedTuple):
    """A sample as the trainers of draft models read it.

    Attributes:
        token_ids: The token ids, int64 (tokens,).
        loss_mask: 1 for each token on which the draft model is trained, otherwise 0, int64
            (tokens,).
        values_by_hook: The activations by the name of the hook, (tokens, width) each.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    values_by_hook: ByHook[np.ndarray]


def training_samples(
    dataset: ActivationDataset, chunks: Iterable[TokenBatch]
) -> Iterator[TrainingSample]:
    """Yields the samples of a run as the trainers of draft models read them.

    Samples without tokens are left out.

    Args:
        dataset: The run.
        chunks: Batches that together contain all tokens of the run, in stored order. The tokens of
            a sample may be in several batches.

    Raises:
        RunError: If a column `loss_mask` does not contain a 0 or 1 for each token of its row.
    """
    chunk_iterator = iter(chunks)
    # Batches with tokens that were read, but not yielded yet.
    pending_batches: list[TokenBatch] = []
    for sample_index, sample_length in enumerate(dataset.samples["tokens"].to_pylist()):
        if not sample_length:
            continue
        while sum(map(len, pending_batches)) < sample_length:
            pending_batches.append(next(chunk_iterator))
        pending_tokens = concatenate_batches(pending_batches)
        sample_tokens = pending_tokens.map(itemgetter(slice(sample_length)))
        pending_batches = [pending_tokens.map(itemgetter(slice(sample_length, None)))]
        loss_mask = _loss_mask(dataset, sample_index, sample_tokens)
        yield TrainingSample(
            sample_tokens.token_ids.astype(np.int64), loss_mask, sample_tokens.activations
        )


def _loss_mask(
    dataset: ActivationDataset, sample_index: int, sample_tokens: TokenBatch
) -> np.ndarray:
    """Returns the loss mask of a sample: 1 for each token that is trained on, otherwise 0.

    If the run stores a column `loss_mask` of the data set, the mask is read from this column.
    Otherwise, if the run stores the roles of tokens, the mask is 1 for the roles in TRAINED_ROLES.
    If the run stores no roles, the mask is 1 for all tokens.

    Args:
        dataset: The run.
        sample_index: The index of the sample in `dataset.samples`.
        sample_tokens: The tokens of the sample.

    Returns:
        The mask, int64 (tokens,).

    Raises:
        RunError: If the column `loss_mask` does not contain a 0 or 1 for each token of the data
            set's row.
    """
    loss_mask: Any = np.ones(len(sample_tokens))
    if LOSS_MASK in dataset.identity.text.keep_columns:
        # The stored column contains the mask of the whole document, even if the sample is only a
        # piece of the document.
        loss_mask_of_document = dataset.samples[LOSS_MASK][sample_index].as_py()
        # A tuple of the number of the piece, the index of its first token in the document, and the
        # position of the row; None if the sample is no piece of a long document.
        piece_or_none = piece_of(dataset.samples["row"][sample_index].as_py())
        index_of_first_token = 0 if piece_or_none is None else piece_or_none[1]
        if not isinstance(loss_mask_of_document, list):
            loss_mask_of_document = []
        loss_mask = np.array(
            loss_mask_of_document[index_of_first_token : index_of_first_token + len(sample_tokens)]
        )
        if loss_mask.shape != (len(sample_tokens),) or not np.isin(loss_mask, (0, 1)).all():
            column_phrase = f"sample {sample_tokens.sample_idx[0]}: its column {LOSS_MASK}"
            raise RunError(f"{column_phrase}: expected a 0 or 1 for each of the row's tokens")
    elif sample_tokens.role is not None:
        loss_mask = np.isin(sample_tokens.role, TRAINED_ROLES)
    return loss_mask.astype(np.int64)


def last_residual_stream_hook(layer_count: int) -> str:
    """Returns the name of the hook for the last hidden state in files for the library speculators.

    The values at this hook are the output of the last block, before the final norm.

    Args:
        layer_count: Number of blocks (decoder layers) of the model.
    """
    return f"blocks.{layer_count - 1}.hook_resid_post"


def hooks_by_hidden_state_index(hooks: Iterable[str]) -> dict[int, str]:
    """Maps indices of hidden states to the hooks at which the residual stream has these states.

    The hidden state with index 0 is the embedding, and the hidden state with index k + 1 is the
    output of block k. `hidden_states` of the library transformers has the same indices, but
    contains the output of the last block after the final norm.

    Args:
        hooks: The names of hooks. Hooks that are not in the residual stream before or after a block
            are ignored.

    Returns:
        Index of a hidden state -> name of its hook, in ascending order of the indices. If two hooks
        have the same hidden state, the first of them is returned.
    """
    hook_name_by_hidden_state_index: dict[int, str] = {}
    for hook_name in hooks:
        if hook_name_match := re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|post)", hook_name):
            block_number, pre_or_post = hook_name_match.groups()
            hidden_state_index = (
                int(block_number) + 1 if pre_or_post == "post" else int(block_number)
            )
            hook_name_by_hidden_state_index.setdefault(hidden_state_index, hook_name)
    return dict(sorted(hook_name_by_hidden_state_index.items()))


def _empty_samples_phrase(dataset: ActivationDataset) -> tuple[str, ...]:
    """Describes how many samples have no tokens and are therefore left out of the export.

    Returns:
        A tuple with one phrase, such as "3 samples without tokens". An empty tuple if all samples
        of the run have tokens.
    """
    empty_sample_count = dataset.samples["tokens"].to_pylist().count(0)
    if not empty_sample_count:
        return ()
    return (f"{counted(empty_sample_count, 'sample')} without tokens",)


class DraftFormat(ExportFormat):
    """Files with which a draft model for speculative decoding is trained.

    They contain whole samples, with the hidden states after some layers of the run's model.

    Attributes:
        hook_globs: Globs of the names of the hooks that the format accepts.
    """

    needs_every_token = True
    hook_globs: ClassVar[tuple[str, ...]]

    def accepts(self, dataset: ActivationDataset, hook: str) -> bool:
        """Returns whether the hook matches one of `hook_globs` and its values are not codes."""
        if not dataset.shards.stored_hook_by_name[hook].values_are_array:
            return False
        return any(fnmatchcase(hook, hook_glob) for hook_glob in self.hook_globs)


class SpeculatorsFormat(DraftFormat):
    """The files from which the library speculators, version 0.9, trains draft models.

    An Arrow file contains a row with the token ids, the loss mask and the length of each sample.
    The file hidden_states/hs_i.safetensors belongs to row i of the Arrow file. Its tensor
    `hidden_states` has the shape (tokens, layers, width). The last layer is the output of the last
    block, before the final norm.

    If hidden states are stored as float8 (e4m3), the tensor `hidden_states_scales` contains a
    float32 scale for each token over all layers, (tokens, 1, 1). As in the library hs_connectors
    0.9, with which speculators reads the files, a hidden state is the float8 value times the scale,
    and the largest magnitude of a token becomes the largest float8 value.

    Args:
        export_dtype: "float8" to store hidden states as float8. None to store them as float8 if the
            run does, otherwise in the dtype of the run.
    """

    flag_value = "speculators"  # value of --export that selects this format
    needed_package = "datasets"
    hook_globs = RESIDUAL_STREAM_GLOBS
    accepted_hooks_phrase = " and ".join(hook_globs)

    def __init__(self, export_dtype: str | None = None) -> None:
        self._export_dtype = export_dtype

    def choose_hooks(self, dataset: ActivationDataset, chosen_hooks: Sequence[str]) -> list[str]:
        """Checks the hooks that the user has chosen, and returns their names in the run's order.

        Hooks that the format does not accept are left out, as in `ExportFormat.choose_hooks`.

        Args:
            dataset: The run.
            chosen_hooks: The names of the hooks that the user has chosen.

        Raises:
            InputError: If the output of the last block is not chosen, or no hook of another layer
                is chosen.
        """
        exported_hook_names = super().choose_hooks(dataset, chosen_hooks)
        layer_count = dataset.metadata.get("model", {}).get("num_hidden_layers", 0)
        last_hook_name = last_residual_stream_hook(layer_count)
        if last_hook_name not in exported_hook_names or len(exported_hook_names) < 2:
            raise InputError(
                f"--export speculators: needs the hooks {last_hook_name} and "
                "blocks.K.hook_resid_post of at least one other layer; it has "
                f"{', '.join(exported_hook_names)} of {dataset.url}"
            )
        return exported_hook_names

    def write(
        self,
        folder: Path,
        dataset: ActivationDataset,
        hooks: Sequence[str],
        chunks: Iterable[TokenBatch],
    ) -> Exported:
        """Writes an Arrow file with the samples, and a file for each sample with its hidden states.

        The Arrow file contains the token ids, the loss mask and the length of every sample.

        `ExportFormat.write` documents the arguments and the result.

        Raises:
            RunError: If the column `loss_mask` of the data set does not contain a 0 or 1 for each
                token of a sample.
        """
        import datasets
        from safetensors.numpy import save

        (folder / "hidden_states").mkdir()
        int64_type = datasets.Value("int64")
        int64_list_type = datasets.List(int64_type)
        type_by_column_name = {
            "input_ids": int64_list_type,
            LOSS_MASK: int64_list_type,
            "seq_len": int64_type,
        }
        arrow_folder = ArrowFolder(folder, type_by_column_name, "torch")
        hidden_state_hook_names = hooks_by_hidden_state_index(hooks).values()
        stores_float8 = self._stores_float8(dataset)
        written_token_count = 0
        sample_iterator = training_samples(dataset, chunks)
        for arrow_row_index, (token_ids, loss_mask, values_by_hook) in enumerate(sample_iterator):
            hidden_states = np.stack(
                [values_by_hook[hook_name] for hook_name in hidden_state_hook_names], axis=1
            )
            tensor_by_name = {"hidden_states": hidden_states, "token_ids": token_ids}
            if stores_float8:
                tensor_by_name["hidden_states"], tensor_by_name[SCALES] = quantize_tokens(
                    hidden_states
                )
            (folder / f"hidden_states/hs_{arrow_row_index}.safetensors").write_bytes(
                save(tensor_by_name)
            )
            arrow_folder.write(
                {"input_ids": [token_ids], LOSS_MASK: [loss_mask], "seq_len": [len(token_ids)]}
            )
            written_token_count += len(token_ids)
        arrow_folder.finalize()
        return Exported(written_token_count, _empty_samples_phrase(dataset))

    def usage_lines(
        self, folder: str, dataset: ActivationDataset, hooks: Sequence[str]
    ) -> list[str]:
        """Returns the lines of the shell command that trains a draft model with speculators.

        Args:
            folder: The path of the exported folder.
            dataset: The run.
            hooks: The names of the exported hooks.
        """
        layer_numbers_phrase = " ".join(map(str, [*hooks_by_hidden_state_index(hooks)][:-1]))
        backend_flag = "--hidden-states-backend fp8 " if self._stores_float8(dataset) else ""
        return [
            f"python -m speculators.train --data-path {shlex.quote(folder)} {backend_flag}"
            f"--verifier-name-or-path {shlex.quote(dataset.tokenizer_path)} "
            f"--target-layer-ids {layer_numbers_phrase} --on-missing raise"
        ]

    def _stores_float8(self, dataset: ActivationDataset) -> bool:
        """Returns whether the files of the export contain the hidden states as float8."""
        return "float8" in (self._export_dtype, dataset.identity.activation_dtype)


def quantize_tokens(hidden_states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes hidden states to float8 (e4m3) with a scale for each token.

    Args:
        hidden_states: Hidden states of any floating dtype, (tokens, layers, width).

    Returns:
        A tuple of the float8 values, (tokens, layers, width), and the scales, float32
        (tokens, 1, 1). A hidden state is the product of its float8 value and the scale.
    """
    float32_states = hidden_states.astype(np.float32)
    largest_magnitudes = np.abs(float32_states).max(axis=(1, 2), keepdims=True, initial=0)
    token_scales = np.maximum(largest_magnitudes / LARGEST_E4M3, SMALLEST_SCALE).astype(np.float32)
    return (float32_states / token_scales).astype(VALUE_DTYPE), token_scales


class SpecForgeFormat(DraftFormat):
    """The files from which the library SpecForge trains EAGLE-3 draft models offline.

    Each sample has a file. Its tensor `aux_hidden_state` contains the concatenated outputs of three
    layers, (1, tokens, 3 * width). `hidden_state` contains the output of the final norm,
    (1, tokens, width).
    """

    flag_value = "specforge"  # value of --export that selects this format
    needed_package = "torch"
    hook_globs = (*RESIDUAL_STREAM_GLOBS, FINAL_NORM_HOOK)
    accepted_hooks_phrase = " and ".join(hook_globs)

    def choose_hooks(self, dataset: ActivationDataset, chosen_hooks: Sequence[str]) -> list[str]:
        """Returns the names of the hooks to export, in the run's order.

        Args:
            dataset: The run.
            chosen_hooks: The names of the hooks that the user has chosen.

        Raises:
            InputError: If the chosen hooks are not the output of the final norm and the outputs of
                three different layers, which an EAGLE-3 draft model needs. The embedding does not
                count as a layer.
        """
        exported_hook_names = super().choose_hooks(dataset, chosen_hooks)
        hook_name_by_hidden_state_index = hooks_by_hidden_state_index(exported_hook_names)
        if (
            FINAL_NORM_HOOK not in exported_hook_names
            or len(hook_name_by_hidden_state_index) != EAGLE3_LAYERS
            or 0 in hook_name_by_hidden_state_index
        ):
            raise InputError(
                f"--export specforge: needs the hooks {FINAL_NORM_HOOK} and "
                "blocks.K.hook_resid_post of exactly three layers, which --hook_names can choose; "
                f"it has {', '.join(exported_hook_names)} of {dataset.url}"
            )
        return exported_hook_names

    def write(
        self,
        folder: Path,
        dataset: ActivationDataset,
        hooks: Sequence[str],
        chunks: Iterable[TokenBatch],
    ) -> Exported:
        """Writes, for each sample, a file with its token ids, loss mask and hidden states.

        `ExportFormat.write` documents the arguments and the result.

        Raises:
            RunError: If the column `loss_mask` of the data set does not contain a 0 or 1 for each
                token of a sample.
        """
        import torch

        layer_hook_names = hooks_by_hidden_state_index(hooks).values()
        written_token_count = 0
        sample_iterator = training_samples(dataset, chunks)
        for sample_index, (token_ids, loss_mask, values_by_hook) in enumerate(sample_iterator):
            first_sample_index_of_subfolder = (
                sample_index // SAMPLES_PER_FOLDER * SAMPLES_PER_FOLDER
            )
            stop_sample_index_of_subfolder = first_sample_index_of_subfolder + SAMPLES_PER_FOLDER
            subfolder = (
                folder / f"rows_{first_sample_index_of_subfolder}-{stop_sample_index_of_subfolder}"
            )
            subfolder.mkdir(exist_ok=True)
            concatenated_layer_outputs = np.concatenate(
                [values_by_hook[hook_name] for hook_name in layer_hook_names], axis=1
            )
            tensor_by_name = {
                "input_ids": as_tensor(token_ids),
                LOSS_MASK: as_tensor(loss_mask),
                "hidden_state": as_tensor(values_by_hook[FINAL_NORM_HOOK])[None],
                "aux_hidden_state": as_tensor(concatenated_layer_outputs)[None],
            }
            # The file is not written by torch, which raises RuntimeError instead of OSError on a
            # full disk.
            file_buffer = io.BytesIO()
            torch.save(tensor_by_name, file_buffer)
            (subfolder / f"data_{sample_index}.ckpt").write_bytes(file_buffer.getbuffer())
            written_token_count += len(token_ids)
        return Exported(written_token_count, _empty_samples_phrase(dataset))

    def usage_lines(
        self, folder: str, dataset: ActivationDataset, hooks: Sequence[str]
    ) -> list[str]:
        """Returns the lines of shell commands that configure SpecForge and train a draft model.

        Args:
            folder: The path of the exported folder.
            dataset: The run.
            hooks: The names of the exported hooks.
        """
        config_text = specforge_config(folder, dataset, hooks)
        return [
            f"echo {shlex.quote(config_text)} > specforge.json",
            "specforge train --config specforge.json",
        ]


def specforge_config(folder: str, dataset: ActivationDataset, hooks: Iterable[str]) -> str:
    """Returns the configuration with which `specforge train` of SpecForge 0.2 reads an export.

    `max_length` is set because SpecForge cuts samples to 2,048 tokens by default.
    `aux_hidden_state_layer_ids` contains SpecForge's numbers of the exported layers. The trained
    draft model will read the outputs of these layers.

    Args:
        folder: The folder of the export.
        dataset: The run that was exported.
        hooks: The names of the exported hooks.

    Returns:
        The configuration as a JSON text.
    """
    sample_lengths = dataset.samples["tokens"].to_pylist()
    layer_numbers = [
        hidden_state_index - 1 for hidden_state_index in hooks_by_hidden_state_index(hooks)
    ]
    specforge_settings = {
        "model": {
            "target_model_path": dataset.tokenizer_path,
            "aux_hidden_state_layer_ids": layer_numbers,
        },
        "data": {"hidden_states_path": folder, "max_length": max(sample_lengths, default=1)},
    }
    return json.dumps(specforge_settings)
