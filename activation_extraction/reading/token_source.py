"""The tokens of a run in chunks: which chunks a worker reads, in which order, and their content."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from activation_extraction.cli.errors import RunError
from activation_extraction.output.commits import Commit
from activation_extraction.reading.batches import BatchOptions, Chunk, Plan, TokenBatch, select
from activation_extraction.reading.shard_readers import OpenShards, ShardReader, read_by_ranges

CHUNK_BYTES = 8 * 2**20  # the most that is read at once
CHUNKS_IN_BUFFER = 64  # at least, so that the chunks on their way add little to the buffer
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
        requests = 1 if self.local else REQUESTS
        if not all(map(read_by_ranges, self._commits)):
            requests = 2  # a pickle is unpacked while the one before it is in use
        return Plan(_share(chunks, part, parts), partial(self._read, options), requests)

    def _chunks(self, options: BatchOptions) -> list[Chunk]:
        """All chunks, in the order in which they are read. A pickle is one chunk."""
        fitting = CHUNK_BYTES // self.shards.row_bytes(options.hooks)
        fitting = max(min(fitting, options.buffer // CHUNKS_IN_BUFFER), 1)
        chunks: list[Chunk] = []
        for number, commit in enumerate(self._commits):
            size = fitting if read_by_ranges(commit) else commit.tokens
            chunks += _cut(Chunk(number, 0, commit.tokens), size)
        if options.shuffle is not None:
            order = np.random.default_rng(options.shuffle).permutation(len(chunks))
            chunks = [chunks[i] for i in order]
        return chunks

    def _read(self, options: BatchOptions, chunk: Chunk) -> TokenBatch:
        """The tokens of a chunk that pass the filters.

        Those of a pickle are shuffled here, where all of them are in memory.
        """
        if read_by_ranges(self._commits[chunk.shard]):
            return _filtered(_block(self.shards.get(chunk.shard), chunk, options.hooks), options)
        reader = self.shards.open(chunk.shard, options.hooks)
        block = _filtered(_block(reader, chunk, options.hooks), options)
        if options.shuffle is None:
            return block
        chance = np.random.default_rng([options.shuffle, chunk.shard, chunk.start])
        order = chance.permutation(len(block))
        return block.map(lambda values: select(values, order))


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
            {name: reader.rows(name, *span) for name in hooks},
            token_ids,
            reader.samples.sample_idx[samples],
            position,
        )
    except RunError as error:
        raise OSError(str(error)) from error


def _filtered(block: TokenBatch, options: BatchOptions) -> TokenBatch:
    keep = block.position >= options.skip_first
    for hook, limit in options.max_norm.items():
        norms = np.linalg.norm(block[hook].astype(np.float32), axis=1)
        keep = keep & (norms <= limit)
    return block if keep.all() else block.map(lambda values: select(values, keep))
