"""The files that trainers of draft models read (EAGLE-3, DFlash): whole samples with a mask of the
loss, the stream of some layers, and the last hidden state.

Both trainers mean the same tensors by other numbers: the stream after block k, counted from 0, is
k + 1 for speculators, as in transformers' `hidden_states`, and k for SpecForge.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.common.choices import ROLES
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.token_batch import (
    ByHook,
    TokenBatch,
    as_tensor,
    concatenated,
    piece_of,
)
from activation_extraction.inspect.arrow_files import ArrowFolder

LOSS_MASK = "loss_mask"  # the name of a kept column: 1 for each token of the row that is learned
LEARNED = [ROLES.index(role) for role in ("assistant", "thinking")]
STREAM = re.compile(r"blocks\.(\d+)\.hook_resid_(pre|post)")
NORMED = "ln_final.hook_out"
PER_FOLDER = 2000  # samples, as SpecForge groups them


class Sample(NamedTuple):
    """token_ids, loss_mask: int64 (tokens,). values: (tokens, width), by hook."""

    token_ids: np.ndarray
    loss_mask: np.ndarray
    values: ByHook[np.ndarray]


def mask_columns(dataset: ActivationDataset) -> list[str]:
    """Returns the columns of the table of samples that a mask of the loss is made from."""
    return [LOSS_MASK, "row"] if LOSS_MASK in dataset.identity.keep_columns else []


def samples_in(chunks: Iterable[TokenBatch]) -> Iterator[Sample]:
    """Puts the samples together again; those without tokens are left out.

    The loss counts for the tokens that the kept column `loss_mask` names, else for those of the
    assistant, else for all. Raises RunError for a `loss_mask` that does not fit its row.
    """
    parts: list[TokenBatch] = []
    for chunk in chunks:
        changes = np.flatnonzero(np.diff(chunk.sample_idx)) + 1
        for start, stop in pairwise((0, *changes.tolist(), len(chunk))):
            if parts and parts[0].sample_idx[0] != chunk.sample_idx[start]:
                yield _sample(parts)
                parts = []
            parts.append(_rows(chunk, slice(start, stop)))
    if parts:
        yield _sample(parts)


def _rows(batch: TokenBatch, rows: slice) -> TokenBatch:
    columns = {name: values[rows] for name, values in batch.columns.items()}
    return replace(batch.map(lambda values: values[rows]), columns=columns)


def _sample(parts: Sequence[TokenBatch]) -> Sample:
    whole, columns = concatenated(parts), parts[0].columns
    mask: Any = np.ones(len(whole))
    if columns:
        piece = piece_of(columns["row"][0])
        start = 0 if piece is None else piece[1]
        given = columns[LOSS_MASK][0]
        mask = np.array(given[start : start + len(whole)] if isinstance(given, list) else [])
        if mask.shape != (len(whole),) or not np.isin(mask, (0, 1)).all():
            where = f"sample {whole.sample_idx[0]}: its column {LOSS_MASK}"
            raise RunError(f"{where}: expected a 0 or 1 for each of the row's tokens")
    elif whole.role is not None:
        mask = np.isin(whole.role, LEARNED)
    return Sample(whole.token_ids.astype(np.int64), mask.astype(np.int64), whole.activations)


def layer_ids(hooks: Iterable[str]) -> dict[int, str]:
    """Returns the hooks of the stream by transformers' numbers of hidden states, in their order:
    0 is the embedding, k + 1 what comes out of block k."""
    found: dict[int, str] = {}
    for hook in hooks:
        if match := STREAM.fullmatch(hook):
            found.setdefault(int(match[1]) + (match[2] == "post"), hook)
    return dict(sorted(found.items()))


def check_stream(form: str, dataset: ActivationDataset, hooks: Sequence[str]) -> None:
    """Raises InputError for hooks that a trainer of draft models cannot take: it takes the stream
    of some layers, and the last one before (speculators) or after (SpecForge) the final norm."""
    where, last = f"--export {form}", NORMED
    if form == "speculators":
        depth = dataset.metadata.get("model", {}).get("num_hidden_layers", 0)
        last = f"blocks.{depth - 1}.hook_resid_post"
    if last not in hooks:
        raise InputError(f"{where}: needs the hook {last}; {dataset.url} has {', '.join(hooks)}")
    others = [hook for hook in hooks if hook != last]
    for hook in others:
        if not STREAM.fullmatch(hook):
            expected = f"expected blocks.K.hook_resid_post beside {last}"
            raise InputError(f"{where}: cannot take the hook {hook}; {expected}: use --hook_names")
    if not others:
        raise InputError(f"{where}: needs blocks.K.hook_resid_post of at least one layer more")


def write_speculators(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> int:
    """Writes the data set and the hidden states that speculators 0.9 trains on.

    `hidden_states/hs_i.safetensors` belongs to row i of the data set: (tokens, layers, width), the
    last one before the final norm.
    """
    import datasets
    from safetensors.numpy import save

    (folder / "hidden_states").mkdir()
    of_tokens = datasets.List(datasets.Value("int64"))
    columns = {"input_ids": of_tokens, LOSS_MASK: of_tokens, "seq_len": datasets.Value("int64")}
    rows, layers, tokens = ArrowFolder(folder, columns, "torch"), layer_ids(hooks).values(), 0
    for number, (ids, mask, values) in enumerate(samples_in(chunks)):
        states = np.stack([values[hook] for hook in layers], axis=1)
        data = save({"hidden_states": states, "token_ids": ids})
        (folder / f"hidden_states/hs_{number}.safetensors").write_bytes(data)
        rows.write({"input_ids": [ids], LOSS_MASK: [mask], "seq_len": [len(ids)]})
        tokens += len(ids)
    rows.finalize()
    return tokens


def write_specforge(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> int:
    """Writes the files that SpecForge trains EAGLE-3 on offline: a file for each sample, with the
    stream of some layers side by side, and the last hidden state after the final norm."""
    import torch

    tokens = 0
    for number, (ids, mask, values) in enumerate(samples_in(chunks)):
        first = number // PER_FOLDER * PER_FOLDER
        place = folder / f"rows_{first}-{first + PER_FOLDER}"
        place.mkdir(exist_ok=True)
        stream = np.concatenate([values[hook] for hook in layer_ids(hooks).values()], axis=1)
        content = {
            "input_ids": as_tensor(ids),
            LOSS_MASK: as_tensor(mask),
            "hidden_state": as_tensor(values[NORMED])[None],
            "aux_hidden_state": as_tensor(stream)[None],
        }
        with open(place / f"data_{number}.ckpt", "wb") as file:  # which reports a full disk
            torch.save(content, file)
        tokens += len(ids)
    return tokens
