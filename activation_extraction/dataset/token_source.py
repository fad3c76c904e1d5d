"""TokenSource: the tokens of a run in chunks, and which of them a worker reads, in which order."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.common.choices import ROLES
from activation_extraction.common.errors import RunError
from activation_extraction.dataset.open_shards import OpenShards
from activation_extraction.dataset.options import BatchOptions
from activation_extraction.dataset.token_batch import ByHook, TokenBatch, copy_rows, empty_batch
from activation_extraction.dataset.windows import Block, Chunk, Plan
from activation_extraction.store.commit import Commit
from activation_extraction.store.shard_reader import ShardReader, read_by_ranges, read_rows

CHUNK_BYTES = 8 * 2**20  # the most that is read at once
CHUNKS_IN_BUFFER = 64  # at least, so that the chunks on their way add little to the buffer
LEAST_CHUNK_BYTES, LEAST_CHUNKS = 2**18, 16  # but no smaller chunks, and yet so many in the buffer
REQUESTS = 4  # to a bucket at the same time


class ChunkTokens(NamedTuple):
    """The tokens of a chunk, without activations. samples: the number of each one's sample in its
    shard. wanted: whether each passes the filters, but for its norm."""

    reader: ShardReader
    chunk: Chunk
    tokens: TokenBatch
    samples: np.ndarray
    wanted: np.ndarray


@dataclass(frozen=True)
class TokenSource:
    """What batches of one run are made of: its shards, and the complete options.

    local: whether the shards are files here. mask: bool (samples,), the samples that are wanted;
    None for all.
    """

    shards: OpenShards
    options: BatchOptions
    local: bool
    mask: np.ndarray | None = None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what is stored."""
        files = "".join(f"{folder}/{commit.sha256}\n" for folder, commit in self.shards.shards)
        return hashlib.sha256(files.encode()).hexdigest()

    @property
    def setting(self) -> dict[str, Any]:
        """All that the order of the tokens depends on."""
        return {"data": self.fingerprint, **self.options.setting}

    @property
    def filters(self) -> list[str]:
        """The arguments that leave out tokens."""
        return self.options.filters

    def columns(self, names: Sequence[str], sample_idx: np.ndarray) -> dict[str, np.ndarray]:
        """Returns columns of the table of samples for some samples, as objects. Raises OSError."""
        columns = self.shards.columns(dict.fromkeys(["sample_idx", *names]))
        indices, rows = self._ascending
        found = rows[np.searchsorted(indices, sample_idx)]
        return {name: columns[name][found] for name in names}

    @cached_property
    def _ascending(self) -> tuple[np.ndarray, np.ndarray]:
        """Every `sample_idx`, ascending, and the row of each in the table of all samples."""
        indices = self.shards.columns(["sample_idx"])["sample_idx"].astype(np.int64)
        rows = np.argsort(indices)
        return indices[rows], rows

    @cached_property
    def firsts(self) -> list[int]:
        """The number of samples before each shard, and that of all."""
        return [0, *accumulate(commit.count for commit in self._commits)]

    def of(self, samples: np.ndarray) -> "TokenSource":
        """Returns the same source, but only with tokens of the samples with these numbers."""
        mask = np.isin(np.arange(self.firsts[-1]), samples)
        return replace(self, mask=mask if self.mask is None else mask & self.mask)

    def mask_of(self, shard: int) -> np.ndarray | None:
        """Returns which samples of a shard are wanted; None for all."""
        return None if self.mask is None else self.mask[slice(*self.firsts[shard : shard + 2])]

    @property
    def _commits(self) -> list[Commit]:
        return [commit for _, commit in self.shards.shards]

    @property
    def by_ranges(self) -> bool:
        """Whether tokens are read without the rest of their shards."""
        return all(map(read_by_ranges, self._commits))

    def plan(self, part: int, parts: int) -> Plan:
        """What one of a DataLoader's workers reads; (0, 1) stands for a process without them."""
        return plan_of([self], part, parts, lambda chunk: (self._read(chunk),))

    def whole(self, shard: int) -> Chunk:
        """Returns all tokens of a shard."""
        return Chunk(shard, 0, self._commits[shard].tokens)

    def chunks(self) -> list[Chunk]:
        """Returns the shards that have samples which are wanted."""
        return [
            self.whole(shard)
            for shard in range(len(self._commits))
            if (mask := self.mask_of(shard)) is None or mask.any()
        ]

    def _read(self, chunk: Chunk) -> Block:
        """The tokens of a chunk that may be wanted, from the first to the last of them."""
        found = self.tokens(chunk)
        block = self.with_activations(found, np.flatnonzero(found.wanted))
        return Block(block.tokens, block.rows[self.are_small(block)])

    def tokens(self, chunk: Chunk) -> ChunkTokens:
        """Returns all tokens of a chunk, and which of them are wanted. Raises OSError."""
        try:
            reader, span = self.shards.get(chunk.shard), (chunk.start, chunk.stop)
            token_ids, position = reader.tokens(*span)
            labels = reader.labels(*span)
        except RunError as error:
            raise OSError(str(error)) from error
        samples = np.searchsorted(reader.offsets, np.arange(*span), "right") - 1
        wanted = position >= self.options.skip_first
        if (mask := self.mask_of(chunk.shard)) is not None:
            wanted &= mask[samples]
        if self.options.roles is not None:
            if "role" not in labels:
                folder, commit = self.shards.shards[chunk.shard]
                raise OSError(f"{self.shards.url}: {folder}/{commit.file} has no roles")
            numbers = [ROLES.index(role) for role in self.options.roles]
            wanted &= np.isin(labels["role"], numbers)
        hooks = ByHook[np.ndarray]({}, self.shards.hooks.aliases)
        shared = token_ids, reader.sample_idx[samples], position
        tokens = TokenBatch(hooks, *shared, labels.get("role"), labels.get("turn"))
        return ChunkTokens(reader, chunk, tokens, samples, wanted)

    def with_activations(self, found: ChunkTokens, rows: np.ndarray) -> Block:
        """Returns these tokens of a chunk with their activations. Raises OSError.

        Activations are views of the file where that is possible. Encoded ones are decoded to the
        dtype of the result.
        """
        first, stop = (int(rows.min()), int(rows.max()) + 1) if len(rows) else (0, 0)
        span = found.chunk.start + first, found.chunk.start + stop
        try:
            activations = {
                name: read_rows(
                    found.reader, name, self.shards.hooks[name], span, self.options.dtype
                )
                for name in self.options.hooks
            }
        except RunError as error:
            raise OSError(str(error)) from error
        tokens = found.tokens.map(itemgetter(slice(first, stop)))
        by_hook = ByHook(activations, tokens.activations.aliases)
        return Block(replace(tokens, activations=by_hook), rows - first)

    def are_small(self, block: Block) -> np.ndarray:
        """Returns whether the norms of each row of a block are within the limits."""
        small = np.ones(len(block.tokens), bool)
        for hook, limit in self.options.max_norm.items():
            small &= np.linalg.norm(block.tokens[hook].astype(np.float32), axis=1) <= limit
        return small[block.rows]

    def take(self, memory: tuple[TokenBatch, ...], rows: np.ndarray) -> TokenBatch:
        """Returns the tokens with these numbers as a batch of its own. Raises OSError."""
        (tokens,) = memory
        dtypes: dict[str, str] = {}
        if self.options.dtype is not None:
            floats = [name for name in self.options.hooks if self.shards.hooks[name].activations]
            dtypes = dict.fromkeys(floats, self.options.dtype)
        batch = empty_batch(tokens, len(rows), dtypes)
        copy_rows(tokens, rows, batch)
        if names := self.options.columns:
            batch = replace(batch, columns=self.columns(names, batch.sample_idx))
        return batch


def plan_of(
    sources: Sequence[TokenSource],
    part: int,
    parts: int,
    read: Callable[[Chunk], tuple[Block, ...]],
) -> Plan:
    """Returns what one worker reads, in chunks of the first run.

    Workers share chunks, or whole pickles, which they then read in chunks as well.
    """
    options = sources[0].options
    row = sum(source.shards.row_bytes(source.options.hooks) for source in sources)
    size, seed = _chunk_size(max(row, 1), options.buffer), options.shuffle
    by_ranges = all(source.by_ranges for source in sources)
    chunks = sources[0].chunks()
    if by_ranges:
        chunks = _cut(chunks, size)
    chunks = _shuffled(chunks, seed)
    chunks = _share(chunks, options.worker, options.workers)
    chunks = _share(chunks, part, parts)
    if not by_ranges:
        chunks = [piece for each in chunks for piece in _shuffled(_cut([each], size), seed, each)]
    one_by_one = not by_ranges or all(source.local for source in sources)
    return Plan(chunks, read, 1 if one_by_one else REQUESTS)


def _chunk_size(row: int, buffer: int) -> int:
    """How many tokens of `row` bytes are read at once."""
    least = min(LEAST_CHUNK_BYTES // row, buffer // LEAST_CHUNKS)
    fitting = min(CHUNK_BYTES // row, max(buffer // CHUNKS_IN_BUFFER, least))
    return max(fitting, 1)


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
