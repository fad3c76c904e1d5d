"""The tokens of a run in chunks: which chunks a worker reads, in which order, and their content."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.dataset.batches import BatchOptions
from activation_extraction.dataset.hook_names import ByHook
from activation_extraction.dataset.shard_readers import OpenShards, ShardReader, read_by_ranges
from activation_extraction.dataset.token_batch import TokenBatch
from activation_extraction.dataset.windows import Block, Chunk, Plan
from activation_extraction.store.commit import Commit

CHUNK_BYTES = 8 * 2**20  # the most that is read at once
CHUNKS_IN_BUFFER = 64  # at least, so that the chunks on their way add little to the buffer
LEAST_CHUNK_BYTES, LEAST_CHUNKS = 2**18, 16  # but no smaller chunks, and yet so many in the buffer
REQUESTS = 4  # to a bucket at the same time


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
        """What one of a DataLoader's workers reads; (0, 1) stands for a process without them."""
        chunks = _share(self._chunks(options), options.worker, options.workers)
        by_ranges = all(map(read_by_ranges, self._commits))
        mapped = self.local and by_ranges
        # A pickle is unpacked while the one before it is in use.
        requests = 1 if mapped else REQUESTS if by_ranges else 2
        read, empty = partial(self._read, options), self._empty(options)
        return Plan(_share(chunks, part, parts), read, empty, requests, mapped)

    def _empty(self, options: BatchOptions) -> TokenBatch:
        """No tokens, in arrays like those of all others."""
        stored = self.shards.hooks
        hooks = ByHook({name: stored[name] for name in options.hooks}, stored.aliases)
        none = np.empty(0, np.int32)
        return TokenBatch(
            hooks.map(lambda hook: np.empty((0, hook.width), hook.dtype)),
            token_ids=none,
            sample_idx=none.astype(np.int64),
            position=none,
        )

    def _chunks(self, options: BatchOptions) -> list[Chunk]:
        """All chunks, in the order in which they are read. A pickle is one chunk."""
        row = self.shards.row_bytes(options.hooks)
        least = min(LEAST_CHUNK_BYTES // row, options.buffer // LEAST_CHUNKS)
        fitting = min(CHUNK_BYTES // row, max(options.buffer // CHUNKS_IN_BUFFER, least))
        fitting = max(fitting, 1)
        chunks: list[Chunk] = []
        for number, commit in enumerate(self._commits):
            size = fitting if read_by_ranges(commit) else max(commit.tokens, 1)
            chunks += _cut(Chunk(number, 0, commit.tokens), size)
        if options.shuffle is not None:
            order = np.random.default_rng(options.shuffle).permutation(len(chunks))
            chunks = [chunks[i] for i in order]
        return chunks

    def _read(self, options: BatchOptions, chunk: Chunk) -> list[Block]:
        """The tokens of a chunk that pass the filters.

        Those of a pickle come by sample, in a random order if they are to be shuffled: they are all
        in memory, and are copied no more often than necessary.
        """
        if read_by_ranges(self._commits[chunk.shard]):
            return [_filtered(_block(self.shards.get(chunk.shard), chunk, options.hooks), options)]
        reader = self.shards.open(chunk.shard, options.hooks)
        pieces = _by_sample(chunk, reader.samples.offsets)
        if options.shuffle is not None:
            chance = np.random.default_rng([options.shuffle, chunk.shard, chunk.start])
            pieces = [pieces[i] for i in chance.permutation(len(pieces))]
        return [_filtered(_block(reader, piece, options.hooks), options) for piece in pieces]


def _by_sample(chunk: Chunk, offsets: np.ndarray) -> list[Chunk]:
    """A chunk cut where its samples begin."""
    inside = np.unique(offsets[(offsets > chunk.start) & (offsets < chunk.stop)]).tolist()
    ends = [*inside, chunk.stop]
    return [Chunk(chunk.shard, *span) for span in zip([chunk.start, *inside], ends, strict=True)]


def _share(chunks: list[Chunk], worker: int, workers: int) -> list[Chunk]:
    """Every n-th chunk; where there are too few chunks, they are cut."""
    if len(chunks) < workers:
        sizes = [-(-(chunk.stop - chunk.start) // workers) for chunk in chunks]
        chunks = [
            piece for chunk, size in zip(chunks, sizes, strict=True) for piece in _cut(chunk, size)
        ]
    return chunks[worker::workers]


def _cut(chunk: Chunk, size: int) -> list[Chunk]:
    """A chunk in pieces of `size` tokens; the last one may be shorter."""
    starts = range(chunk.start, chunk.stop, size)
    return [Chunk(chunk.shard, at, min(at + size, chunk.stop)) for at in starts]


def _block(reader: ShardReader, chunk: Chunk, hooks: Sequence[str]) -> TokenBatch:
    """The tokens of a chunk. Activations are views of the file where that is possible."""
    span = chunk.start, chunk.stop
    try:
        token_ids, position = reader.tokens(*span)
        samples = np.searchsorted(reader.samples.offsets, np.arange(*span), "right") - 1
        return TokenBatch(
            ByHook({hook: reader.rows(hook, *span) for hook in hooks}),
            token_ids,
            reader.samples.sample_idx[samples],
            position,
        )
    except RunError as error:
        raise OSError(str(error)) from error


def _filtered(tokens: TokenBatch, options: BatchOptions) -> Block:
    keep = tokens.position >= options.skip_first
    for hook, limit in options.max_norm.items():
        norms = np.linalg.norm(tokens[hook].astype(np.float32), axis=1)
        keep = keep & (norms <= limit)
    return Block(tokens, np.flatnonzero(keep))
