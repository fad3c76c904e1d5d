"""Writes the files from which speculators and SpecForge train draft models (EAGLE-3, DFlash).

They contain whole samples with a loss mask, the residual streams of some layers, and the last
hidden state. The two trainers number the same tensors differently: the residual stream after block
k, counted from 0, is number k + 1 for speculators, as in transformers' `hidden_states`, and number
k for SpecForge.
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

LOSS_MASK = "loss_mask"  # kept column with a 0 or 1 per token of the row: 1 if its loss counts
LEARNED = [ROLES.index(role) for role in ("assistant", "thinking")]  # roles whose loss counts
STREAMS = "blocks.*.hook_resid_pre", "blocks.*.hook_resid_post"
NORMED = "ln_final.hook_out"
PER_FOLDER = 2000  # samples per folder, as SpecForge groups them
EAGLE3_LAYERS = 3  # SpecForge's EAGLE-3 draft models read the streams of exactly so many layers


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
    """Yields all samples of the run that have tokens.

    Args:
        dataset: The run.
        chunks: All tokens of the run, in stored order. A sample may lie in several chunks.

    Raises:
        RunError: A `loss_mask` is not a 0 or 1 for each token of its row.
    """
    upcoming = iter(chunks)
    pending: list[TokenBatch] = []  # tokens that were read, but not yielded yet
    for number, length in enumerate(dataset.samples["tokens"].to_pylist()):
        if not length:
            continue
        while sum(map(len, pending)) < length:
            pending.append(next(upcoming))
        tokens = concatenate_batches(pending)
        sample = tokens.map(itemgetter(slice(length)))
        pending = [tokens.map(itemgetter(slice(length, None)))]
        mask = _loss_mask(dataset, number, sample)
        yield TrainingSample(sample.token_ids.astype(np.int64), mask, sample.activations)


def _loss_mask(dataset: ActivationDataset, number: int, sample: TokenBatch) -> np.ndarray:
    """Returns the loss mask of a sample: 1 for each token whose loss counts, otherwise 0.

    It is read from the column `loss_mask` if the run kept one. Otherwise the loss counts for the
    assistant's tokens (and its thinking) in conversations, and for all tokens in other samples.

    Args:
        dataset: The run.
        number: The position of the sample in `dataset.samples`.
        sample: The tokens of the sample.

    Raises:
        RunError: The column is not a 0 or 1 for each token of its row.
    """
    mask: Any = np.ones(len(sample))
    if LOSS_MASK in dataset.identity.text.keep_columns:
        row_mask = dataset.samples[LOSS_MASK][number].as_py()
        piece = piece_of(dataset.samples["row"][number].as_py())
        start = 0 if piece is None else piece[1]
        mask = np.array(row_mask[start : start + len(sample)] if isinstance(row_mask, list) else [])
        if mask.shape != (len(sample),) or not np.isin(mask, (0, 1)).all():
            where = f"sample {sample.sample_idx[0]}: its column {LOSS_MASK}"
            raise RunError(f"{where}: expected a 0 or 1 for each of the row's tokens")
    elif sample.role is not None:
        mask = np.isin(sample.role, LEARNED)
    return mask.astype(np.int64)


def layer_ids(hooks: Iterable[str]) -> dict[int, str]:
    """Returns the residual-stream hooks, numbered as transformers numbers hidden states.

    Args:
        hooks: Names of hooks. Those of other tensors are ignored.

    Returns:
        A hook name by its number, ascending: number 0 is the embedding, and number k + 1 is the
        output of block k. Of two hooks that name the same tensor, the first one.
    """
    by_number: dict[int, str] = {}
    for hook in hooks:
        if match := re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|post)", hook):
            by_number.setdefault(int(match[1]) + (match[2] == "post"), hook)
    return dict(sorted(by_number.items()))


def specforge_config(folder: str, dataset: ActivationDataset, hooks: Iterable[str]) -> str:
    """Returns the configuration with which `specforge train` of SpecForge 0.2 reads an export.

    `max_length` is set because SpecForge cuts samples to 2,048 tokens by default.
    `aux_hidden_state_layer_ids` names the layers by SpecForge's numbers; the trained draft model
    later reads the residual streams of these layers.

    Args:
        folder: The folder of the export.
        dataset: The run that was exported.
        hooks: The names of the exported hooks.

    Returns:
        A JSON text.
    """
    lengths = dataset.samples["tokens"].to_pylist()
    layers = [number - 1 for number in layer_ids(hooks)]
    config = {
        "model": {
            "target_model_path": dataset.tokenizer_path,
            "aux_hidden_state_layer_ids": layers,
        },
        "data": {"hidden_states_path": folder, "max_length": max(lengths, default=1)},
    }
    return json.dumps(config)


def _empty_samples(dataset: ActivationDataset) -> tuple[str, ...]:
    """Returns the number of samples without tokens in words, or nothing if there are none."""
    empty = dataset.samples["tokens"].to_pylist().count(0)
    return (f"{counted(empty, 'sample')} without tokens",) if empty else ()


def write_speculators(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes the data set and the hidden states that speculators 0.9 trains on.

    `hidden_states/hs_i.safetensors` belongs to row i of the data set. Its tensor `hidden_states` is
    (tokens, layers, width); the last layer is the output of the last block, before the final norm.

    Args:
        folder: The folder of the export, which is empty.
        dataset: The run, which stores all tokens of its samples.
        hooks: The names of residual-stream hooks.
        chunks: All tokens of the run, in stored order.

    Returns:
        The number of tokens written, and the number of samples without tokens in words.

    Raises:
        InputError: `hooks` lacks the output of the last block, or has no other hook.
        RunError: A `loss_mask` is not a 0 or 1 for each token of its row.
    """
    import datasets
    from safetensors.numpy import save

    depth = dataset.metadata.get("model", {}).get("num_hidden_layers", 0)
    last = f"blocks.{depth - 1}.hook_resid_post"
    if last not in hooks or len(hooks) < 2:
        raise InputError(
            f"--export speculators: needs the hooks {last} and blocks.K.hook_resid_post of at "
            f"least one other layer; it has {', '.join(hooks)} of {dataset.url}"
        )
    (folder / "hidden_states").mkdir()
    integer = datasets.Value("int64")
    integers = datasets.List(integer)
    columns = {"input_ids": integers, LOSS_MASK: integers, "seq_len": integer}
    rows = ArrowFolder(folder, columns, "torch")
    layers = layer_ids(hooks).values()
    tokens = 0
    for number, (ids, mask, values) in enumerate(training_samples(dataset, chunks)):
        states = np.stack([values[hook] for hook in layers], axis=1)
        content = save({"hidden_states": states, "token_ids": ids})
        (folder / f"hidden_states/hs_{number}.safetensors").write_bytes(content)
        rows.write({"input_ids": [ids], LOSS_MASK: [mask], "seq_len": [len(ids)]})
        tokens += len(ids)
    rows.finalize()
    return Exported(tokens, _empty_samples(dataset))


def write_specforge(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes the files from which SpecForge trains EAGLE-3 draft models offline.

    Each sample has a file. `aux_hidden_state` contains the residual streams of three layers side by
    side, (1, tokens, 3 * width), and `hidden_state` the last hidden state after the final norm,
    (1, tokens, width).

    Args:
        folder: The folder of the export, which is empty.
        dataset: The run, which stores all tokens of its samples.
        hooks: The names of the final norm's hook and of residual-stream hooks.
        chunks: All tokens of the run, in stored order.

    Returns:
        The number of tokens written, and the number of samples without tokens in words.

    Raises:
        InputError: `hooks` lacks the final norm's hook, does not have exactly three layers, or has
            the embedding.
        RunError: A `loss_mask` is not a 0 or 1 for each token of its row.
    """
    import torch

    layers = layer_ids(hooks)
    if NORMED not in hooks or len(layers) != EAGLE3_LAYERS or 0 in layers:
        raise InputError(
            f"--export specforge: needs the hooks {NORMED} and blocks.K.hook_resid_post of exactly "
            f"three layers, which --hook_names can choose; it has {', '.join(hooks)} of "
            f"{dataset.url}"
        )
    tokens = 0
    for number, (ids, mask, values) in enumerate(training_samples(dataset, chunks)):
        first = number // PER_FOLDER * PER_FOLDER
        subfolder = folder / f"rows_{first}-{first + PER_FOLDER}"
        subfolder.mkdir(exist_ok=True)
        streams = np.concatenate([values[hook] for hook in layers.values()], axis=1)
        content = {
            "input_ids": as_tensor(ids),
            LOSS_MASK: as_tensor(mask),
            "hidden_state": as_tensor(values[NORMED])[None],
            "aux_hidden_state": as_tensor(streams)[None],
        }
        buffer = io.BytesIO()  # if torch wrote the file itself, a full disk would be a RuntimeError
        torch.save(content, buffer)
        (subfolder / f"data_{number}.ckpt").write_bytes(buffer.getbuffer())
        tokens += len(ids)
    return Exported(tokens, _empty_samples(dataset))
