"""TokenSource: the tokens of a run in chunks, and which of them a worker reads, in which order."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.common.choices import ROLES
from activation_extraction.common.errors import RunError
from activation_extraction.common.visible import counted
from activation_extraction.dataset.open_shards import OpenShards, value_of
from activation_extraction.dataset.token_batch import ByHook, TokenBatch, copy_rows, empty_batch
from activation_extraction.dataset.windows import Block, Chunk, Plan
from activation_extraction.store.commit import Commit
from activation_extraction.store.shard import TableRow
from activation_extraction.store.shard_reader import ShardReader, read_by_ranges, read_rows

CHUNK_BYTES = 8 * 2**20  # the most that is read at once
CHUNKS_IN_BUFFER = 64  # at least, so that the chunks on their way add little to the buffer
LEAST_CHUNK_BYTES, LEAST_CHUNKS = 2**18, 16  # but no smaller chunks, and yet so many in the buffer
REQUESTS = 4  # to a bucket at the same time
BUFFER_BATCHES, BUFFER_BYTES = 64, 2**30  # the default buffer, whichever is less


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
    roles: tuple[str, ...] | None = None
    where: str | None = None  # a digest of the mask
    columns: tuple[str, ...] = ()
    others: "tuple[BatchOptions, ...] | None" = None  # of the other runs that are read as one

    @property
    def of_runs(self) -> "tuple[BatchOptions, ...]":
        """The options of each run, this one first."""
        return self, *(self.others or ())

    @property
    def filters(self) -> list[str]:
        """The arguments that leave out tokens."""
        given = {name: getattr(self, name) for name in ("skip_first", "max_norm", "roles")}
        found = [f"{name}={value!r}" for name, value in given.items() if value]
        return found + ["where"] * (self.where is not None)


class ChunkTokens(NamedTuple):
    """The tokens of a chunk, without activations. samples: the number of each one's sample in its
    shard. wanted: whether each passes the filters, but for its norm."""

    reader: ShardReader
    chunk: Chunk
    tokens: TokenBatch
    samples: np.ndarray
    wanted: np.ndarray


def default_buffer(size: int, row: int) -> int:
    """Returns how many tokens of `row` bytes are kept in memory for batches of `size`."""
    return max(min(BUFFER_BATCHES * size, BUFFER_BYTES // max(row, 1)), 2 * size)


def as_mask(mask: Any, samples: int) -> np.ndarray:
    """Returns a mask over so many samples as an array. Raises ValueError for anything else."""
    found = values = np.asarray(mask)
    if found.dtype == object or not found.size:  # of pandas or pyarrow, where null is possible
        values = np.array([v for v in found.flat if isinstance(v, bool | np.bool_)], bool)
    if values.dtype != bool or not values.shape == found.shape == (samples,):
        raise ValueError(
            f"where: {found.dtype}, shape {found.shape}: expected true or false, never null, for "
            f"each of {counted(samples, 'sample')}"
        )
    return values


def digest_of_mask(mask: np.ndarray) -> str:
    """Returns the SHA-256 of a mask."""
    return hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()


@dataclass(frozen=True)
class TokenSource:
    """What batches are made of: the shards of a run. local: whether they are files here. mask: bool
    (samples,), the samples that are wanted; None for all."""

    shards: OpenShards
    local: bool
    mask: np.ndarray | None = None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what is stored."""
        files = "".join(f"{folder}/{commit.sha256}\n" for folder, commit in self.shards.shards)
        return hashlib.sha256(files.encode()).hexdigest()

    @cached_property
    def _rows(self) -> tuple[np.ndarray, list[TableRow]]:
        """Every `sample_idx`, ascending, and the row of each in the table of samples."""
        rows = sorted(self.shards.rows(), key=attrgetter("sample_idx"))
        return np.array([row.sample_idx for row in rows], np.int64), rows

    def columns(self, names: Sequence[str], sample_idx: np.ndarray) -> dict[str, np.ndarray]:
        """Returns columns of the table of samples for some samples, as objects. Raises OSError."""
        indices, rows = self._rows
        found = np.searchsorted(indices, sample_idx).clip(max=len(indices) - 1)
        if (indices[found] != sample_idx).any():
            raise OSError(f"{self.shards.url}: a table of samples is of others than its shard")
        columns = {}
        for name in names:
            columns[name] = np.empty(len(found), object)
            columns[name][:] = [value_of(rows[number], name) for number in found]
        return columns

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

    def _dtypes(self, options: BatchOptions) -> dict[str, str]:
        """Returns the dtype of the result, by hook, where it may not be as stored."""
        if options.dtype is None:
            return {}
        hooks = [name for name in options.hooks if self.shards.hooks[name].activations]
        return dict.fromkeys(hooks, options.dtype)

    @property
    def _commits(self) -> list[Commit]:
        return [commit for _, commit in self.shards.shards]

    @property
    def by_ranges(self) -> bool:
        """Whether tokens are read without the rest of their shards."""
        return all(map(read_by_ranges, self._commits))

    def readers(self, options: BatchOptions) -> Callable[[int], ShardReader]:
        """Returns what opens shards by number; one pickle stays in memory."""
        if self.by_ranges:
            return self.shards.get
        return lru_cache(1)(partial(self.shards.open, hooks=options.hooks))

    def plan(self, options: BatchOptions, part: int, parts: int) -> Plan:
        """What one of a DataLoader's workers reads; (0, 1) stands for a process without them."""
        opened = self.readers(options)
        read = partial(self._read, options, opened)
        return plan_of([self], options, part, parts, lambda chunk: (read(chunk),))

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

    def _read(
        self, options: BatchOptions, opened: Callable[[int], ShardReader], chunk: Chunk
    ) -> Block:
        """The tokens of a chunk that may be wanted, from the first to the last of them."""
        found = self.tokens(options, opened, chunk)
        block = self.with_activations(options, found, np.flatnonzero(found.wanted))
        return Block(block.tokens, block.rows[are_small(block, options.max_norm)])

    def tokens(
        self, options: BatchOptions, opened: Callable[[int], ShardReader], chunk: Chunk
    ) -> ChunkTokens:
        """Returns all tokens of a chunk, and which of them are wanted. Raises OSError."""
        try:
            reader, span = opened(chunk.shard), (chunk.start, chunk.stop)
            token_ids, position = reader.tokens(*span)
            labels = reader.labels(*span)
        except RunError as error:
            raise OSError(str(error)) from error
        samples = np.searchsorted(reader.offsets, np.arange(*span), "right") - 1
        wanted = position >= options.skip_first
        if (mask := self.mask_of(chunk.shard)) is not None:
            wanted &= mask[samples]
        if options.roles is not None:
            if "role" not in labels:
                folder, commit = self.shards.shards[chunk.shard]
                raise OSError(f"{self.shards.url}: {folder}/{commit.file} has no roles")
            wanted &= np.isin(labels["role"], [ROLES.index(role) for role in options.roles])
        hooks = ByHook[np.ndarray]({}, self.shards.hooks.aliases)
        shared = token_ids, reader.sample_idx[samples], position
        tokens = TokenBatch(hooks, *shared, labels.get("role"), labels.get("turn"))
        return ChunkTokens(reader, chunk, tokens, samples, wanted)

    def with_activations(
        self, options: BatchOptions, found: ChunkTokens, rows: np.ndarray
    ) -> Block:
        """Returns these tokens of a chunk with their activations. Raises OSError.

        Activations are views of the file where that is possible. Encoded ones are decoded to the
        dtype of the result.
        """
        first, stop = (int(rows.min()), int(rows.max()) + 1) if len(rows) else (0, 0)
        span = found.chunk.start + first, found.chunk.start + stop
        try:
            activations = {
                name: read_rows(found.reader, name, self.shards.hooks[name], span, options.dtype)
                for name in options.hooks
            }
        except RunError as error:
            raise OSError(str(error)) from error
        tokens = found.tokens.map(itemgetter(slice(first, stop)))
        by_hook = ByHook(activations, tokens.activations.aliases)
        return Block(replace(tokens, activations=by_hook), rows - first)

    def take(
        self, memory: tuple[TokenBatch, ...], rows: np.ndarray, options: BatchOptions
    ) -> TokenBatch:
        """Returns the tokens with these numbers as a batch of its own. Raises OSError."""
        (tokens,) = memory
        batch = empty_batch(tokens, len(rows), self._dtypes(options))
        copy_rows(tokens, rows, batch)
        if names := options.columns:
            batch = replace(batch, columns=self.columns(names, batch.sample_idx))
        return batch


def plan_of(
    sources: Sequence[TokenSource],
    options: BatchOptions,
    part: int,
    parts: int,
    read: Callable[[Chunk], tuple[Block, ...]],
) -> Plan:
    """Returns what one worker reads, in chunks of the first run.

    Workers share chunks, or whole pickles, which they then read in chunks as well.
    """
    runs = zip(sources, options.of_runs, strict=True)
    row = sum(source.shards.row_bytes(each.hooks) for source, each in runs)
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


def are_small(block: Block, max_norm: Mapping[str, float]) -> np.ndarray:
    """Returns whether the norms of each row of a block are within the limits."""
    small = np.ones(len(block.tokens), bool)
    for hook, limit in max_norm.items():
        small &= np.linalg.norm(block.tokens[hook].astype(np.float32), axis=1) <= limit
    return small[block.rows]


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
