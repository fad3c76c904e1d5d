"""Extracts the activations of the same documents with transformers, in three ways.

end_to_end.py runs this script in one process per way, with the Python of a separate environment
(benchmarks/requirements.txt). It imports no JAX. The ways are:

padded  the usual loop: batches padded to their longest document, an attention mask,
        output_hidden_states, values widened to float32, pickle, and gzip at its default level
sorted  the same with documents sorted by length, and the faster gzip of isal
alone   one document at a time without padding and mask; values in the model's dtype; isal

Every way writes gzipped pickles that map each hook to a list of records {sample_idx, hook,
activation, shape, text_preview, token_ids, doc_id}, and syncs each file to the disk. A hook is the
residual stream after a layer or the numbers of a layer's chosen experts. The last line printed is
one JSON object.
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

# Computes a batch from the token ids of its documents; returns a tensor (documents, tokens, width)
# for each hook.
Forward = Callable[[Sequence[Sequence[int]]], list[torch.Tensor]]
SHARD_BYTES = 10**9  # before compression; the default of the tool's --shard_size_gb
FASTEST = 1  # the compression level of isal


@dataclass(frozen=True)
class Way:
    """A way to batch and write documents.

    Attributes:
        batched: Whether several documents are padded into one batch.
        by_length: Whether documents are sorted by length first.
        widen: Whether values are stored in float32 whatever the model's dtype.
        quick_gzip: Whether isal compresses, instead of Python's gzip.
    """

    batched: bool = False
    by_length: bool = False
    widen: bool = False
    quick_gzip: bool = True


WAYS = {
    "padded": Way(batched=True, widen=True, quick_gzip=False),
    "sorted": Way(batched=True, by_length=True, widen=True),
    "alone": Way(),
}


def batches(lengths: Sequence[int], way: Way, size: int, one_of: int) -> list[list[int]]:
    """Groups documents into batches, and keeps one of every `one_of` batches.

    Args:
        lengths: The number of tokens of each document.
        way: The way to batch them.
        size: The number of documents of a batch, if the way has batches.
        one_of: The number of successive batches of which only the middle one is kept.

    Returns:
        The numbers of the documents of each kept batch.
    """
    order = list(range(len(lengths)))
    if way.by_length:
        order.sort(key=lambda number: lengths[number])
    size = size if way.batched else 1
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    return groups[min(one_of // 2, len(groups) - 1) :: one_of]


def load_transformers(folder: str, dtype: torch.dtype, hooks: Sequence[str]) -> Forward:
    """Loads a model of transformers without its head, with scaled dot-product attention.

    Args:
        folder: The folder of the checkpoint.
        dtype: The dtype of weights and computation.
        hooks: The names of the hooks to return.

    Returns:
        The function that computes a batch.
    """
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.eval()
    # hidden_states[-1] is taken after the final norm. Without the norm it is the residual stream
    # after the last layer, like the other hidden states.
    model.norm = torch.nn.Identity()
    chosen: dict[int, torch.Tensor] = {}
    for layer in map(layer_of, filter(chooses, hooks)):

        def keep(_: Any, _inputs: Any, routed: Any, layer: int = layer) -> None:
            chosen[layer] = routed[2]  # routed: logits, weights, numbers of the chosen experts

        model.layers[layer].mlp.gate.register_forward_hook(keep)

    def forward(documents: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        tokens, mask = pad(documents)
        output = model(tokens, attention_mask=mask, output_hidden_states=True, use_cache=False)
        return [
            chosen[layer_of(hook)].to(torch.int16).reshape(*tokens.shape, -1)
            if chooses(hook)
            else output.hidden_states[layer_of(hook) + 1]
            for hook in hooks
        ]

    return forward


def layer_of(hook: str) -> int:
    return int(hook.split(".")[1])


def chooses(hook: str) -> bool:
    """Returns whether the hook is the numbers of the chosen experts, not the residual stream."""
    return hook.endswith("mlp.hook_expert_indices")


def pad(documents: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pads documents to the longest one.

    Returns:
        The token ids (documents, longest), and the attention mask of the same shape. The mask is
        None for a single document, which has no padding.
    """
    if len(documents) == 1:
        return torch.tensor([documents[0]]), None
    longest = max(map(len, documents))
    tokens = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in documents])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in documents])
    return tokens, mask


def as_numpy(values: torch.Tensor, widen: bool) -> np.ndarray:
    """Returns the values as a NumPy array.

    Torch cannot convert bfloat16 to NumPy, so it becomes float32 if `widen` is set, and else the
    same bits with the bfloat16 of ml_dtypes.
    """
    if not values.is_floating_point():
        return values.numpy()
    if widen or values.dtype == torch.float32:
        return values.float().numpy()
    return values.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


@dataclass
class Shards:
    """Collects records and writes them to shard_0001.pkl.gz, shard_0002.pkl.gz, ... of a folder.

    Attributes:
        folder: The folder of the shards.
        hooks: The names of the hooks, in the order of the values of `add`.
        way: The way to widen and compress values.
        bytes: The total size of the files written so far.
    """

    folder: Path
    hooks: Sequence[str]
    way: Way
    bytes: int = 0
    _count: int = 0
    _size: int = 0
    _shard: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, number: int, ids: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        """Adds one document, and writes a shard first if it would become too large.

        Args:
            number: The number of the document.
            ids: Its token ids.
            values: A tensor (tokens, width) for each hook.
        """
        arrays = [as_numpy(tensor, self.way.widen) for tensor in values]
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
        """Writes the collected records, if there are any, as a shard and waits for the disk."""
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
        return gzip.GzipFile(fileobj=file, mode="wb")  # level 9, its default


@torch.inference_mode()
def run(
    forward: Forward,
    documents: Sequence[Sequence[int]],
    groups: Sequence[Sequence[int]],
    shards: Shards,
    written_every: int,
) -> dict[str, float]:
    """Computes all batches and writes every `written_every`-th document of them.

    Computing and writing alternate in one thread.

    Args:
        forward: The function that computes a batch.
        documents: The token ids of each document.
        groups: The numbers of the documents of each batch.
        shards: The shards to write to.
        written_every: The number of documents of which one is written.

    Returns:
        tokens, documents: The computed tokens and documents.
        written_tokens, bytes: The written tokens, and the bytes of the files.
        compute_seconds, store_seconds: The seconds of computing and of writing.
    """
    done = {"tokens": 0, "written_tokens": 0, "documents": 0, "compute_seconds": 0.0}
    start_time = time.perf_counter()
    for group in groups:
        at = time.perf_counter()
        values = forward([documents[number] for number in group])
        done["compute_seconds"] += time.perf_counter() - at
        for row, number in enumerate(group):
            ids = documents[number]
            done["tokens"] += len(ids)
            if done["documents"] % written_every == 0:
                shards.add(number, ids, [hook_values[row, : len(ids)] for hook_values in values])
                done["written_tokens"] += len(ids)
            done["documents"] += 1
    shards.flush()
    done["store_seconds"] = time.perf_counter() - start_time - done["compute_seconds"]
    return done | {"bytes": shards.bytes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--token_ids", type=Path, required=True, help="JSON: a list per document")
    parser.add_argument("--output", type=Path, required=True, help="folder of the shards, empty")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--hooks", nargs="+", required=True, help="by TransformerLens's names")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument(
        "--every", type=int, default=1, help="compute one of every N batches (default: 1)"
    )
    parser.add_argument(
        "--written_every",
        type=int,
        default=1,
        help="write one of every N computed documents (default: 1)",
    )
    options = parser.parse_args()
    chosen_way = WAYS[options.way]
    dtype = getattr(torch, options.dtype)
    documents = json.loads(options.token_ids.read_text())
    start_time = time.perf_counter()
    forward = load_transformers(options.model, dtype, options.hooks)
    with torch.inference_mode():
        forward([documents[0][:16]])  # a warm-up, which is not measured, just as compiling is not
    loaded = time.perf_counter()
    groups = batches([len(ids) for ids in documents], chosen_way, options.batch_size, options.every)
    options.output.mkdir(parents=True, exist_ok=True)
    shards = Shards(options.output, options.hooks, chosen_way)
    done = run(forward, documents, groups, shards, options.written_every)
    versions = {name: version(name) for name in ("torch", "transformers", "isal")}
    print(json.dumps(done | {"load_seconds": loaded - start_time, "versions": versions}))


if __name__ == "__main__":
    main()
