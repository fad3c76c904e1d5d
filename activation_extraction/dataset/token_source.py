"""The tokens of a run in chunks: which chunks a worker reads, in which order, and their content."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.dataset.hook_names import ByHook
from activation_extraction.dataset.open_shards import OpenShards
from activation_extraction.dataset.token_batch import TokenBatch
from activation_extraction.store.commit import Commit
from activation_extraction.store.shard_reader import ShardReader, read_by_ranges

CHUNK_BYTES = 8 * 2**20  # the most that is read at once
CHUNKS_IN_BUFFER = 64  # at least, so that the chunks on their way add little to the buffer
LEAST_CHUNK_BYTES, LEAST_CHUNKS = 2**18, 16  # but no smaller chunks, and yet so many in the buffer
REQUESTS = 4  # to a bucket at the same time


@dataclass(frozen=True)
class BatchOptions:
    """The arguments of `ActivationDataset.batches`, checked and complete."""

    size: int
    hooks: tuple[str, ...]
    shuffle: int | None
    buffer: int
    skip_first: int
    max_norm: Mapping[str, float]
    dtype: str | None
    worker: int
    workers: int

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `stop` of shard number `shard`."""

    shard: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Block(NamedTuple):
    """Tokens that were read. rows: the numbers of those that pass the filters, ascending."""

    tokens: TokenBatch
    rows: np.ndarray


@dataclass(frozen=True)
class Plan:
    """What one worker reads, and how. requests: how many chunks are read at the same time."""

    chunks: Sequence[Chunk]
    read: Callable[[Chunk], Block]
    requests: int


@dataclass(frozen=True)
class TokenSource:
    """What batches are made of: the shards of a run. local: whether they are files here."""

    shards: OpenShards
    local: bool

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what is stored."""
        files = "".join(f"{folder}/{commit.sha256}\n" for folder, commit in self.shards.shards)
        return hashlib.sha256(files.encode()).hexdigest()

    @property
    def _commits(self) -> list[Commit]:
        return [commit for _, commit in self.shards.shards]

    def plan(self, options: BatchOptions, part: int, parts: int) -> Plan:
        """What one of a DataLoader's workers reads; (0, 1) stands for a process without them.

        Workers share chunks, or whole pickles, which they then read in chunks as well.
        """
        size, seed = self._chunk_size(options), options.shuffle
        chunks = [Chunk(number, 0, commit.tokens) for number, commit in enumerate(self._commits)]
        by_ranges = all(map(read_by_ranges, self._commits))
        if by_ranges:
            chunks = _cut(chunks, size)
        chunks = _shuffled(chunks, seed)
        chunks = _share(chunks, options.worker, options.workers)
        chunks = _share(chunks, part, parts)
        if by_ranges:
            read = partial(self._read, options, self.shards.get)
            return Plan(chunks, read, 1 if self.local else REQUESTS)
        chunks = [piece for each in chunks for piece in _shuffled(_cut([each], size), seed, each)]
        unpack = lru_cache(1)(partial(self.shards.open, hooks=options.hooks))
        return Plan(chunks, partial(self._read, options, unpack), 1)

    def _chunk_size(self, options: BatchOptions) -> int:
        row = self.shards.row_bytes(options.hooks)
        least = min(LEAST_CHUNK_BYTES // row, options.buffer // LEAST_CHUNKS)
        fitting = min(CHUNK_BYTES // row, max(options.buffer // CHUNKS_IN_BUFFER, least))
        return max(fitting, 1)

    def _read(
        self, options: BatchOptions, opened: Callable[[int], ShardReader], chunk: Chunk
    ) -> Block:
        """The tokens of a chunk. Activations are views of the file where that is possible."""
        reader, span = opened(chunk.shard), (chunk.start, chunk.stop)
        try:
            token_ids, position = reader.tokens(*span)
            samples = np.searchsorted(reader.offsets, np.arange(*span), "right") - 1
            rows = {hook: reader.rows(hook, *span) for hook in options.hooks}
        except RunError as error:
            raise OSError(str(error)) from error
        activations = ByHook(rows, self.shards.hooks.aliases)
        tokens = TokenBatch(activations, token_ids, reader.sample_idx[samples], position)
        return Block(tokens, np.flatnonzero(_passing(tokens, options)))


def _passing(tokens: TokenBatch, options: BatchOptions) -> np.ndarray:
    """Whether each token passes the filters."""
    passing = tokens.position >= options.skip_first
    for hook, limit in options.max_norm.items():
        norms = np.linalg.norm(tokens[hook].astype(np.float32), axis=1)
        passing = passing & (norms <= limit)
    return passing


def _shuffled(chunks: list[Chunk], seed: int | None, within: Chunk | None = None) -> list[Chunk]:
    """The chunks in the order of a seed; None keeps theirs. within: what they are pieces of."""
    if seed is None:
        return chunks
    key = [seed] if within is None else [seed, within.shard, within.start]
    return [chunks[i] for i in np.random.default_rng(key).permutation(len(chunks))]


def _share(chunks: list[Chunk], worker: int, workers: int) -> list[Chunk]:
    """Every n-th chunk; where there are too few chunks, they are cut."""
    if len(chunks) < workers:
        chunks = [piece for each in chunks for piece in _cut([each], -(-len(each) // workers))]
    return chunks[worker::workers]


def _cut(chunks: Sequence[Chunk], size: int) -> list[Chunk]:
    """The chunks in pieces of `size` tokens; the last one of each may be shorter."""
    return [
        Chunk(chunk.shard, at, min(at + size, chunk.stop))
        for chunk in chunks
        for at in range(chunk.start, chunk.stop, size)
    ]
