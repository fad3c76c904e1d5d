"""The tokens of a run in chunks: which chunks a worker reads, in which order, and their content."""

import hashlib
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.dataset.open_shards import OpenShards
from activation_extraction.dataset.token_batch import ByHook, TokenBatch, copy_rows, empty_batch
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


@dataclass(frozen=True)
class Position:
    """Where an iteration stands.

    window: number of the window in use; chunk and row: where it begins; taken: tokens handed out of
    it. `row` counts the tokens of the chunk that are left after filtering.
    """

    window: int = 0
    chunk: int = 0
    row: int = 0
    taken: int = 0


@dataclass(frozen=True)
class Window:
    """Tokens of a run. order: the rows of `memory`, as they are handed out. end: where the next
    window begins."""

    memory: TokenBatch
    order: np.ndarray
    end: Position

    def batch(self, start: int, stop: int, dtype: str | None) -> TokenBatch:
        """A copy of some tokens, with activations in this dtype; None: as they are stored."""
        rows = self.order[start:stop]
        found = empty_batch(self.memory, len(rows), dtype)
        copy_rows(self.memory, rows, found)
        return found


def windows_of(
    plan: Plan, most: int, seed: int | None, begin: Position
) -> Generator[Window, None, None]:
    """The windows from `begin` on, of `most` tokens; the last one may be shorter.

    A window's memory is used again when the next but one is asked for. seed: for shuffling; None
    keeps the order. No thread outlives the filling of a window, which ends early when the generator
    is closed or collected, or the program ends.
    """
    reader = _Reader(plan, min(most, sum(map(len, plan.chunks))), seed)
    try:
        upcoming = reader.start(begin)
        while (window := upcoming.result()) is not None:
            upcoming = reader.start(window.end)
            yield window
    finally:
        reader.stop()


class _Reader:
    """Fills windows of `most` tokens in a thread; others read the chunks."""

    def __init__(self, plan: Plan, most: int, seed: int | None) -> None:
        self._plan = plan
        self._most = most
        self._seed = seed
        self._stopped = False
        self._reading: dict[int, Future[Block]] = {}
        self._memory: list[TokenBatch] = []

    def start(self, begin: Position) -> Future[Window | None]:
        pool = ThreadPoolExecutor(1, "read-ahead")
        window = pool.submit(self._fill, begin)
        pool.shutdown(wait=False)  # when the window is filled
        return window

    def stop(self) -> None:
        """Takes no lock: the garbage collector may call this, in any thread."""
        self._stopped = True
        self._reading, self._memory = {}, []  # an error may keep this object for a while

    def _fill(self, begin: Position) -> Window | None:
        """The window that begins there; None if no tokens are left."""
        chunk, row, filled = begin.chunk, begin.row, 0
        with ThreadPoolExecutor(self._plan.requests, "read-ahead") as pool:
            while filled < self._most and chunk < len(self._plan.chunks) and not self._stopped:
                tokens, rows = self._read(chunk, pool)
                wanted = rows[row : row + self._most - filled]
                span = slice(filled, filled + len(wanted))
                memory = self._memory_like(tokens, begin.window)
                copy_rows(tokens, wanted, memory.map(itemgetter(span)))
                filled, row = span.stop, row + len(wanted)
                if row >= len(rows):
                    chunk, row = chunk + 1, 0
        if not filled:
            return None
        if self._seed is None:
            order = np.arange(filled)
        else:
            order = np.random.default_rng([self._seed, begin.window]).permutation(filled)
        return Window(memory, order, Position(begin.window + 1, chunk, row))

    def _read(self, chunk: int, pool: ThreadPoolExecutor) -> Block:
        """A chunk. Some of those that follow are read meanwhile.

        When the program ends, the pool raises RuntimeError, which ends the filling.
        """
        self._reading.pop(chunk - 1, None)
        for number in range(chunk, min(chunk + self._plan.requests, len(self._plan.chunks))):
            if number not in self._reading:
                self._reading[number] = pool.submit(self._plan.read, self._plan.chunks[number])
        return self._reading[chunk].result()

    def _memory_like(self, tokens: TokenBatch, window: int) -> TokenBatch:
        """The memory of a window: that of the window before the last one."""
        if not self._memory:
            self._memory = [empty_batch(tokens, self._most) for _ in range(2)]
        return self._memory[window % 2]
