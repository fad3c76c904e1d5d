"""What others do with the same weights, documents and output; end_to_end.py runs it, one process
for each contender, in an interpreter of its own (benchmarks/requirements.txt). No JAX in here.

padded  the loop people write: batches padded to their longest document, attention mask,
        output_hidden_states, widened to float32, pickle and gzip at its default level
sorted  the same with documents sorted by length, and the quick gzip of isal
alone   one document at a time, so neither padding nor mask; values as they are, isal

Every one writes records {sample_idx, hook, activation, shape, text_preview, token_ids, doc_id} by
hook into shards of gzip and pickle, each synced to the disk. Hooks are the residual stream after a
layer and the numbers of a layer's chosen experts. The last line printed is one JSON object.
"""

import argparse
import gzip
import json
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from isal import igzip

# A batch of token ids -> for every hook asked for (documents, tokens, width).
Forward = Callable[[Sequence[Sequence[int]]], list[torch.Tensor]]
SHARD_BYTES = 10**9  # before compression, as the tool's default
FASTEST = 1  # isal's level


@dataclass(frozen=True)
class Way:
    """How documents are batched and written. batched: pad several into one batch."""

    batched: bool = False
    by_length: bool = False
    widen: bool = False
    quick_gzip: bool = True


WAYS = {
    "padded": Way(batched=True, widen=True, quick_gzip=False),
    "sorted": Way(batched=True, by_length=True, widen=True),
    "alone": Way(),
}


def batches(lengths: Sequence[int], way: Way, size: int, every: int) -> list[list[int]]:
    """Numbers of the documents in every batch; of `every` batches only the one in the middle."""
    order = list(range(len(lengths)))
    if way.by_length:
        order.sort(key=lambda number: lengths[number])
    size = size if way.batched else 1
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    return groups[min(every // 2, len(groups) - 1) :: every]


def load_transformers(folder: str, dtype: torch.dtype, hooks: Sequence[str]) -> Forward:
    """transformers' model without its head, with its fastest attention on this machine."""
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.eval()
    # hidden_states[-1] is the residual stream after the final norm; without one it is as the rest.
    model.norm = torch.nn.Identity()
    chosen: dict[int, torch.Tensor] = {}
    for layer in map(layer_of, filter(chooses, hooks)):

        def keep(_: Any, _inputs: Any, routed: Any, layer: int = layer) -> None:
            chosen[layer] = routed[2]  # after logits and weights

        model.layers[layer].mlp.gate.register_forward_hook(keep)

    def forward(documents: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        tokens, mask = pad(documents)
        found = model(tokens, attention_mask=mask, output_hidden_states=True, use_cache=False)
        return [
            chosen[layer_of(hook)].to(torch.int16).reshape(*tokens.shape, -1)
            if chooses(hook)
            else found.hidden_states[layer_of(hook) + 1]
            for hook in hooks
        ]

    return forward


def layer_of(hook: str) -> int:
    return int(hook.split(".")[1])


def chooses(hook: str) -> bool:
    """Whether it is the numbers of the experts; otherwise it is the residual stream."""
    return hook.endswith("mlp.hook_expert_indices")


def pad(documents: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token ids (documents, longest), and their mask; one document alone needs none."""
    if len(documents) == 1:
        return torch.tensor([documents[0]]), None
    longest = max(map(len, documents))
    tokens = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in documents])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in documents])
    return tokens, mask


def as_numpy(values: torch.Tensor, widen: bool) -> np.ndarray:
    """NumPy has no bfloat16: either everything becomes float32, or the bits are kept."""
    if not values.is_floating_point():
        return values.numpy()
    if widen or values.dtype == torch.float32:
        return values.float().numpy()
    return values.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


@dataclass
class Shards:
    """Writes records to shard_0001.pkl.gz, ... in a folder, as soon as one is full."""

    folder: Path
    hooks: Sequence[str]
    way: Way
    bytes: int = 0
    _count: int = 0
    _size: int = 0
    _shard: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, number: int, ids: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        """One document: its number, its token ids and, for every hook, (tokens, width)."""
        arrays = [as_numpy(value, self.way.widen) for value in values]
        size = sum(array.nbytes for array in arrays)
        if self._size and self._size + size > SHARD_BYTES:
            self.flush()
        for hook, array in zip(self.hooks, arrays, strict=True):
            record = {
                "sample_idx": number,
                "hook": hook,
                "activation": array,
                "shape": array.shape,
                "text_preview": "",
                "token_ids": np.array(ids, np.int32),
                "doc_id": None,
            }
            self._shard.setdefault(hook, []).append(record)
        self._size += size

    def flush(self) -> None:
        """Writes what has come together, and waits for the disk."""
        if not self._size:
            return
        self._count += 1
        path = self.folder / f"shard_{self._count:04d}.pkl.gz"
        with open(path, "wb") as file:
            with self._compressed(file) as stream:
                pickle.dump(self._shard, stream)
            file.flush()
            os.fsync(file.fileno())
        self.bytes += path.stat().st_size
        self._shard, self._size = {}, 0

    def _compressed(self, file: Any) -> Any:
        if self.way.quick_gzip:
            return igzip.IGzipFile(fileobj=file, mode="wb", compresslevel=FASTEST)
        return gzip.GzipFile(fileobj=file, mode="wb")  # level 9


@torch.inference_mode()
def run(
    forward: Forward,
    documents: Sequence[Sequence[int]],
    groups: Sequence[Sequence[int]],
    shards: Shards,
    written_every: int,
) -> dict[str, float]:
    """Computes all groups and writes every `written_every`-th document of them.

    Returns tokens and seconds of computing and of writing; both go on in turn, in one thread.
    """
    done = {"tokens": 0, "written_tokens": 0, "documents": 0, "compute_seconds": 0.0}
    began = time.perf_counter()
    for group in groups:
        at = time.perf_counter()
        values = forward([documents[number] for number in group])
        done["compute_seconds"] += time.perf_counter() - at
        for row, number in enumerate(group):
            ids = documents[number]
            done["tokens"] += len(ids)
            if done["documents"] % written_every == 0:
                shards.add(number, ids, [value[row, : len(ids)] for value in values])
                done["written_tokens"] += len(ids)
            done["documents"] += 1
    shards.flush()
    done["store_seconds"] = time.perf_counter() - began - done["compute_seconds"]
    return done | {"bytes": shards.bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--token_ids", type=Path, required=True, help="JSON: a list per document")
    parser.add_argument("--output", type=Path, required=True, help="folder of the shards, empty")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--hooks", nargs="+", required=True, help="by TransformerLens's names")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--every", type=int, default=1, help="compute one batch of so many")
    parser.add_argument(
        "--written_every", type=int, default=1, help="write one document of so many"
    )
    given = parser.parse_args()
    way, dtype = WAYS[given.way], getattr(torch, given.dtype)
    documents = json.loads(given.token_ids.read_text())
    began = time.perf_counter()
    forward = load_transformers(given.model, dtype, given.hooks)
    with torch.inference_mode():
        forward([documents[0][:16]])  # as compiling elsewhere: not part of the time
    loaded = time.perf_counter()
    groups = batches([len(ids) for ids in documents], way, given.batch_size, given.every)
    given.output.mkdir(parents=True, exist_ok=True)
    shards = Shards(given.output, given.hooks, way)
    done = run(forward, documents, groups, shards, given.written_every)
    versions = {name: version(name) for name in ("torch", "transformers", "isal")}
    print(json.dumps(done | {"load_seconds": loaded - began, "versions": versions}))


if __name__ == "__main__":
    main()
