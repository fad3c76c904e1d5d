"""Writes the files from which speculators and SpecForge train draft models (EAGLE-3, DFlash).

The files contain whole samples, with a loss mask, the residual streams of some layers, and the last
hidden state. The two trainers number the same tensors differently. Blocks are counted from 0 here.
The residual stream after block k is number k + 1 for speculators, as in `hidden_states` of
transformers, and number k for SpecForge.
"""

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.common.choices import ROLES
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
from activation_extraction.inspect.exported import Exported

# Name of the kept column and of the tensor that contain a 1 for each token whose loss counts, and a
# 0 for each other token.
LOSS_MASK = "loss_mask"
# Indices in ROLES of the roles whose tokens' loss counts.
TRAINED_ROLES = [ROLES.index(role) for role in ("assistant", "thinking")]
# Globs of the hooks for residual streams.
STREAM_GLOBS = "blocks.*.hook_resid_pre", "blocks.*.hook_resid_post"
FINAL_NORM_HOOK = "ln_final.hook_out"
SAMPLES_PER_FOLDER = 2000  # number of samples that SpecForge stores in a folder
EAGLE3_LAYERS = 3  # number of layers whose residual streams SpecForge's EAGLE-3 draft models read


class TrainingSample(NamedTuple):
    """A sample as the trainers of draft models read it.

    Attributes:
        token_ids: The token ids, int64 (tokens,).
        loss_mask: 1 for each token whose loss counts, otherwise 0, int64 (tokens,).
        values: The activations by hook, (tokens, width) each.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    values: ByHook[np.ndarray]


def training_samples(
    dataset: ActivationDataset, chunks: Iterable[TokenBatch]
) -> Iterator[TrainingSample]:
    """Yields the samples of the run, except samples without tokens.

    Args:
        dataset: The run.
        chunks: All tokens of the run, in stored order. A sample may lie in several chunks.

    Raises:
        RunError: A column `loss_mask` does not contain a 0 or 1 for each token of its row.
    """
    upcoming_chunks = iter(chunks)
    pending_batches: list[TokenBatch] = []  # tokens that were read but not yielded yet
    for sample_index, sample_length in enumerate(dataset.samples["tokens"].to_pylist()):
        if not sample_length:
            continue
        while sum(map(len, pending_batches)) < sample_length:
            pending_batches.append(next(upcoming_chunks))
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
    """Returns the loss mask of a sample: 1 for each token whose loss counts, otherwise 0.

    If the run kept a column `loss_mask`, the mask is read from it. Otherwise, all tokens count in
    samples without roles. In conversations, only the tokens of the assistant and of its thinking
    count.

    Args:
        dataset: The run.
        sample_index: The index of the sample in `dataset.samples`.
        sample_tokens: The tokens of the sample.

    Returns:
        The mask, int64 (tokens,).

    Raises:
        RunError: The column does not contain a 0 or 1 for each token of its row.
    """
    loss_mask: Any = np.ones(len(sample_tokens))
    if LOSS_MASK in dataset.identity.text.keep_columns:
        row_mask = dataset.samples[LOSS_MASK][sample_index].as_py()
        piece = piece_of(dataset.samples["row"][sample_index].as_py())
        first_token = 0 if piece is None else piece[1]
        if not isinstance(row_mask, list):
            row_mask = []
        loss_mask = np.array(row_mask[first_token : first_token + len(sample_tokens)])
        if loss_mask.shape != (len(sample_tokens),) or not np.isin(loss_mask, (0, 1)).all():
            sample_and_column = f"sample {sample_tokens.sample_idx[0]}: its column {LOSS_MASK}"
            raise RunError(f"{sample_and_column}: expected a 0 or 1 for each of the row's tokens")
    elif sample_tokens.role is not None:
        loss_mask = np.isin(sample_tokens.role, TRAINED_ROLES)
    return loss_mask.astype(np.int64)


def streams_by_number(hooks: Iterable[str]) -> dict[int, str]:
    """Returns the hooks of residual streams by the numbers of hidden states in transformers.

    Args:
        hooks: The names of hooks. Hooks of other tensors are ignored.

    Returns:
        The names of hooks by their numbers, in ascending order. Number 0 is the embedding, and
        number k + 1 is the output of block k. If two hooks have the same tensor, the first hook.
    """
    hooks_by_number: dict[int, str] = {}
    for hook in hooks:
        if match := re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|post)", hook):
            block, place = match.groups()
            number = int(block) + 1 if place == "post" else int(block)
            hooks_by_number.setdefault(number, hook)
    return dict(sorted(hooks_by_number.items()))


def specforge_config(folder: str, dataset: ActivationDataset, hooks: Iterable[str]) -> str:
    """Returns the configuration with which `specforge train` of SpecForge 0.2 reads an export.

    `max_length` is set because SpecForge cuts samples to 2,048 tokens by default.
    `aux_hidden_state_layer_ids` contains SpecForge's numbers of the exported layers. The trained
    draft model will read the residual streams of these layers.

    Args:
        folder: The folder of the export.
        dataset: The run that was exported.
        hooks: The names of the exported hooks.

    Returns:
        The configuration as a JSON text.
    """
    sample_lengths = dataset.samples["tokens"].to_pylist()
    layer_numbers = [number - 1 for number in streams_by_number(hooks)]
    config = {
        "model": {
            "target_model_path": dataset.tokenizer_path,
            "aux_hidden_state_layer_ids": layer_numbers,
        },
        "data": {"hidden_states_path": folder, "max_length": max(sample_lengths, default=1)},
    }
    return json.dumps(config)


def _empty_samples_in_words(dataset: ActivationDataset) -> tuple[str, ...]:
    """Returns a phrase about the samples without tokens, or an empty tuple if there are none."""
    empty_count = dataset.samples["tokens"].to_pylist().count(0)
    if not empty_count:
        return ()
    return (f"{counted(empty_count, 'sample')} without tokens",)


def write_speculators(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes the data set and the hidden states from which speculators 0.9 trains draft models.

    The file hidden_states/hs_i.safetensors belongs to row i of the data set. Its tensor
    `hidden_states` has the shape (tokens, layers, width). The last layer is the output of the last
    block, before the final norm.

    Args:
        folder: The folder of the export, which is empty.
        dataset: The run, which stores all tokens of its samples.
        hooks: The names of residual-stream hooks.
        chunks: All tokens of the run, in stored order.

    Returns:
        The number of tokens written, and a phrase about samples without tokens if there are any.

    Raises:
        InputError: `hooks` lacks the output of the last block, or has no other hook.
        RunError: A column `loss_mask` does not contain a 0 or 1 for each token of its row.
    """
    import datasets
    from safetensors.numpy import save

    depth = dataset.metadata.get("model", {}).get("num_hidden_layers", 0)
    last_hook = f"blocks.{depth - 1}.hook_resid_post"
    if last_hook not in hooks or len(hooks) < 2:
        raise InputError(
            f"--export speculators: needs the hooks {last_hook} and blocks.K.hook_resid_post of at "
            f"least one other layer; it has {', '.join(hooks)} of {dataset.url}"
        )
    (folder / "hidden_states").mkdir()
    integer_type = datasets.Value("int64")
    integers_type = datasets.List(integer_type)
    column_types = {"input_ids": integers_type, LOSS_MASK: integers_type, "seq_len": integer_type}
    arrow_folder = ArrowFolder(folder, column_types, "torch")
    stream_hooks = streams_by_number(hooks).values()
    written_tokens = 0
    for row, (token_ids, loss_mask, values_by_hook) in enumerate(training_samples(dataset, chunks)):
        hidden_states = np.stack([values_by_hook[hook] for hook in stream_hooks], axis=1)
        file_content = save({"hidden_states": hidden_states, "token_ids": token_ids})
        (folder / f"hidden_states/hs_{row}.safetensors").write_bytes(file_content)
        arrow_folder.write(
            {"input_ids": [token_ids], LOSS_MASK: [loss_mask], "seq_len": [len(token_ids)]}
        )
        written_tokens += len(token_ids)
    arrow_folder.finalize()
    return Exported(written_tokens, _empty_samples_in_words(dataset))


def write_specforge(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes the files from which SpecForge trains EAGLE-3 draft models offline.

    Each sample has a file. Its tensor `aux_hidden_state` contains the concatenated residual streams
    of three layers, (1, tokens, 3 * width). `hidden_state` contains the output of the final norm,
    (1, tokens, width).

    Args:
        folder: The folder of the export, which is empty.
        dataset: The run, which stores all tokens of its samples.
        hooks: The names of the final norm's hook and of residual-stream hooks.
        chunks: All tokens of the run, in stored order.

    Returns:
        The number of tokens written, and a phrase about samples without tokens if there are any.

    Raises:
        InputError: `hooks` lacks the final norm's hook, contains the embedding, or does not contain
            the residual streams of exactly three layers.
        RunError: A column `loss_mask` does not contain a 0 or 1 for each token of its row.
    """
    import torch

    stream_hooks = streams_by_number(hooks)
    if FINAL_NORM_HOOK not in hooks or len(stream_hooks) != EAGLE3_LAYERS or 0 in stream_hooks:
        raise InputError(
            f"--export specforge: needs the hooks {FINAL_NORM_HOOK} and blocks.K.hook_resid_post "
            "of exactly three layers, which --hook_names can choose; it has "
            f"{', '.join(hooks)} of {dataset.url}"
        )
    written_tokens = 0
    samples = training_samples(dataset, chunks)
    for sample_number, (token_ids, loss_mask, values_by_hook) in enumerate(samples):
        first_of_folder = sample_number // SAMPLES_PER_FOLDER * SAMPLES_PER_FOLDER
        subfolder = folder / f"rows_{first_of_folder}-{first_of_folder + SAMPLES_PER_FOLDER}"
        subfolder.mkdir(exist_ok=True)
        streams = [values_by_hook[hook] for hook in stream_hooks.values()]
        concatenated_streams = np.concatenate(streams, axis=1)
        tensors = {
            "input_ids": as_tensor(token_ids),
            LOSS_MASK: as_tensor(loss_mask),
            "hidden_state": as_tensor(values_by_hook[FINAL_NORM_HOOK])[None],
            "aux_hidden_state": as_tensor(concatenated_streams)[None],
        }
        buffer = io.BytesIO()  # torch would raise a RuntimeError, not an OSError, on a full disk
        torch.save(tensors, buffer)
        (subfolder / f"data_{sample_number}.ckpt").write_bytes(buffer.getbuffer())
        written_tokens += len(token_ids)
    return Exported(written_tokens, _empty_samples_in_words(dataset))
