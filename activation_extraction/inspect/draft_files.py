"""The files that trainers of draft models read (EAGLE-3, DFlash): whole samples with a mask of the
loss, the stream of some layers, and the last hidden state.

Both trainers mean the same tensors by other numbers: the stream after block k, counted from 0, is
k + 1 for speculators, as in transformers' `hidden_states`, and k for SpecForge.
"""

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

LOSS_MASK = "loss_mask"  # the name of a kept column: 1 for each token of the row that is learned
LEARNED = [ROLES.index(role) for role in ("assistant", "thinking")]
STREAMS = "blocks.*.hook_resid_pre", "blocks.*.hook_resid_post"
NORMED = "ln_final.hook_out"
PER_FOLDER = 2000  # samples, as SpecForge groups them
EAGLE3_LAYERS = 3  # layers whose streams SpecForge's draft models of EAGLE-3 read, no more or less


class Sample(NamedTuple):
    """A sample as the trainers read it.

    Attributes:
        token_ids: The token ids, int64 (tokens,).
        loss_mask: 1 for each token for which the loss counts, otherwise 0, int64 (tokens,).
        values: The activations by hook, (tokens, width) each.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    values: ByHook[np.ndarray]


def samples_in(dataset: ActivationDataset, chunks: Iterable[TokenBatch]) -> Iterator[Sample]:
    """Yields all samples that have tokens.

    Args:
        dataset: The run.
        chunks: All tokens of the run, in stored order. A sample may lie in several chunks.

    Raises:
        RunError: A `loss_mask` is not a 0 or 1 for each token of its row.
    """
    upcoming = iter(chunks)
    pending: list[TokenBatch] = []  # tokens that were read, but not yielded yet
    for number, length in enumerate(dataset.samples["tokens"].to_pylist()):
        while sum(map(len, pending)) < length:
            pending.append(next(upcoming))
        if length:
            read = concatenate_batches(pending)
            sample = read.map(itemgetter(slice(length)))
            pending = [read.map(itemgetter(slice(length, None)))]
            mask = _loss_mask(dataset, number, sample)
            yield Sample(sample.token_ids.astype(np.int64), mask, sample.activations)


def _loss_mask(dataset: ActivationDataset, number: int, sample: TokenBatch) -> np.ndarray:
    """Returns 1 for each token of a sample for which the loss counts, otherwise 0.

    If the run kept a column `loss_mask`, it says so; otherwise, in conversations, the loss counts
    for the tokens of the assistant, and in other samples for all tokens.
    """
    mask: Any = np.ones(len(sample))
    if LOSS_MASK in dataset.identity.text.keep_columns:
        of_row = dataset.samples[LOSS_MASK][number].as_py()
        piece = piece_of(dataset.samples["row"][number].as_py())
        start = 0 if piece is None else piece[1]
        mask = np.array(of_row[start : start + len(sample)] if isinstance(of_row, list) else [])
        if mask.shape != (len(sample),) or not np.isin(mask, (0, 1)).all():
            where = f"sample {sample.sample_idx[0]}: its column {LOSS_MASK}"
            raise RunError(f"{where}: expected a 0 or 1 for each of the row's tokens")
    elif sample.role is not None:
        mask = np.isin(sample.role, LEARNED)
    return mask.astype(np.int64)


def layer_ids(hooks: Iterable[str]) -> dict[int, str]:
    """Returns the hooks of the residual stream by transformers' numbers of hidden states.

    Number 0 is the embedding, and number k + 1 is the output of block k.
    """
    by_number: dict[int, str] = {}
    for hook in hooks:
        if match := re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|post)", hook):
            by_number.setdefault(int(match[1]) + (match[2] == "post"), hook)
    return dict(sorted(by_number.items()))


def specforge_config(folder: str, dataset: ActivationDataset, hooks: Iterable[str]) -> str:
    """Returns the JSON with which `specforge train` of SpecForge 0.2 reads an export.

    SpecForge would cut samples that are longer than 2,048 tokens. It counts the stream after block
    k as k, and the trained draft model later gets the streams of the layers that are named here.

    Args:
        folder: Folder of the export.
        dataset: The run that was exported.
        hooks: Names of the exported hooks.
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
    """Returns in words how many samples have no tokens, which no trainer reads."""
    empty = dataset.samples["tokens"].to_pylist().count(0)
    return (f"{counted(empty, 'sample')} without tokens",) if empty else ()


def write_speculators(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes the data set and the hidden states that speculators 0.9 trains on.

    `hidden_states/hs_i.safetensors` belongs to row i of the data set: (tokens, layers, width), the
    last one before the final norm.
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
    of_tokens = datasets.List(datasets.Value("int64"))
    columns = {"input_ids": of_tokens, LOSS_MASK: of_tokens, "seq_len": datasets.Value("int64")}
    rows = ArrowFolder(folder, columns, "torch")
    layers = layer_ids(hooks).values()
    tokens = 0
    for number, (ids, mask, values) in enumerate(samples_in(dataset, chunks)):
        states = np.stack([values[hook] for hook in layers], axis=1)
        data = save({"hidden_states": states, "token_ids": ids})
        (folder / f"hidden_states/hs_{number}.safetensors").write_bytes(data)
        rows.write({"input_ids": [ids], LOSS_MASK: [mask], "seq_len": [len(ids)]})
        tokens += len(ids)
    rows.finalize()
    return Exported(tokens, _empty_samples(dataset))


def write_specforge(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes the files that SpecForge trains EAGLE-3 on offline: a file for each sample, with the
    stream of three layers side by side, and the last hidden state after the final norm."""
    import torch

    layers = layer_ids(hooks)
    if NORMED not in hooks or len(layers) != EAGLE3_LAYERS or 0 in layers:
        raise InputError(
            f"--export specforge: needs the hooks {NORMED} and blocks.K.hook_resid_post of exactly "
            f"three layers, which --hook_names can choose; it has {', '.join(hooks)} of "
            f"{dataset.url}"
        )
    tokens = 0
    for number, (ids, mask, values) in enumerate(samples_in(dataset, chunks)):
        first = number // PER_FOLDER * PER_FOLDER
        place = folder / f"rows_{first}-{first + PER_FOLDER}"
        place.mkdir(exist_ok=True)
        stream = np.concatenate([values[hook] for hook in layers.values()], axis=1)
        content = {
            "input_ids": as_tensor(ids),
            LOSS_MASK: as_tensor(mask),
            "hidden_state": as_tensor(values[NORMED])[None],
            "aux_hidden_state": as_tensor(stream)[None],
        }
        with open(place / f"data_{number}.ckpt", "wb") as file:  # which reports a full disk
            torch.save(content, file)
        tokens += len(ids)
    return Exported(tokens, _empty_samples(dataset))
