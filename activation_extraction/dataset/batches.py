"""Batches of tokens: an iterator with an exact state, which can be copied to other processes.

A TokenSource has the tokens of a run in chunks, and says which of them a worker reads, in which
order. Batches are shuffled in bounded memory by windows of tokens out of many shards. A window is
filled with the tokens of consecutive chunks, permuted and sliced. A thread fills one window while
the one before it is in use: both together are the buffer, and their memory is used again by the
windows that follow. Where a window begins and how many tokens were taken from it says exactly where
an iteration stands, so nothing has to be stored to restore it.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
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

    def dtypes(self, options: BatchOptions) -> dict[str, str]:
        """Returns the dtype of the result, by hook, where it may not be as stored."""
        if options.dtype is None:
            return {}
        hooks = [name for name in options.hooks if not self.shards.hooks[name].integers]
        return dict.fromkeys(hooks, options.dtype)

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


class Window(NamedTuple):
    """Tokens of a run. order: the rows of `memory`, as they are handed out. end: where the next
    window begins."""

    memory: TokenBatch
    order: np.ndarray
    end: Position


class _Windows:
    """Windows of `most` tokens; the last one may be shorter. seed: for shuffling; None keeps the
    order.

    A thread fills a window, others read its chunks. A window's memory is used again when the next
    but one is asked for.
    """

    def __init__(self, plan: Plan, most: int, seed: int | None) -> None:
        self._plan = plan
        self._most = min(most, sum(map(len, plan.chunks)))
        self._seed = seed
        self._stopped = False
        self._reading: dict[int, Future[Block]] = {}
        self._memory: list[TokenBatch] = []

    def beginning(self, begin: Position) -> Generator[Window, None, None]:
        """Yields the windows from `begin` on.

        No thread outlives the filling of a window, which ends early when the generator is closed or
        collected, or the program ends.
        """
        try:
            upcoming = self._start(begin)
            while (window := upcoming.result()) is not None:
                upcoming = self._start(window.end)
                yield window
        finally:  # without a lock: the garbage collector may come here, in any thread
            self._stopped = True
            self._reading, self._memory = {}, []  # an error may keep this object for a while

    def _start(self, begin: Position) -> Future[Window | None]:
        pool = ThreadPoolExecutor(1, "read-ahead")
        window = pool.submit(self._fill, begin)
        pool.shutdown(wait=False)  # when the window is filled
        return window

    def _fill(self, begin: Position) -> Window | None:
        """The window that begins there; None if no tokens are left."""
        chunk, row, filled = begin.chunk, begin.row, 0
        with ThreadPoolExecutor(self._plan.requests, "read-ahead") as pool:
            while filled < self._most and chunk < len(self._plan.chunks) and not self._stopped:
                tokens, rows = self._read(chunk, pool)
                wanted = rows[row : row + self._most - filled]
                span = slice(filled, filled + len(wanted))
                if not self._memory:
                    self._memory = [empty_batch(tokens, self._most) for _ in range(2)]
                memory = self._memory[begin.window % 2]
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


class Batches(Iterator[TokenBatch]):
    """Batches of tokens; the last one may be shorter. `state` and `restore` are exact.

    It goes over the data once. A copy in another process starts where this one stands.
    """

    def __init__(
        self, source: TokenSource, options: BatchOptions, position: Position | None = None
    ) -> None:
        self._source = source
        self._options = options
        self._position = position or Position()
        self._windows: Generator[Window, None, None] | None = None
        self._window: Window | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Batches, (self._source, self._options, self._position)

    def state(self) -> dict[str, Any]:
        """Returns where the iteration stands, as plain JSON values."""
        return {**self._setting(), **asdict(self._position)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken.

        Raises ValueError when the state is of other data, or of batches with other arguments.
        """
        content = dict(state)
        for name, expected in self._setting().items():
            if (found := content.pop(name, None)) != expected:
                raise ValueError(
                    f"the state is of other batches: its {name} is {found!r}, not {expected!r}"
                )
        self.close()
        self._position = Position(**content)

    def _setting(self) -> dict[str, Any]:
        """Everything on which the order of the tokens depends."""
        part, parts = _loader_worker()
        options = json.loads(json.dumps(asdict(self._options)))
        return {"data": self._source.fingerprint, **options, "part": part, "parts": parts}

    def again(self) -> "Batches":
        """Returns the same batches from the start."""
        return Batches(self._source, self._options)

    def close(self) -> None:
        """Ends the reading ahead and frees the buffer."""
        if self._windows is not None:
            self._windows.close()
        self._windows = self._window = None

    def torch(self) -> Any:
        """Returns a PyTorch IterableDataset of the same batches as tensors, for a DataLoader or a
        loop.

        A loop in this process goes on where the batches stand. Give a DataLoader `batch_size=None`;
        each of its workers reads its own share of the data, from the start.
        """
        from torch.utils.data import IterableDataset, get_worker_info

        class TorchBatches(IterableDataset):
            def __init__(self, batches: Batches) -> None:
                self._batches = batches

            def __iter__(self) -> Iterator[TokenBatch]:
                own = self._batches if get_worker_info() is None else self._batches.again()
                return (batch.torch() for batch in own)

            def __reduce__(self) -> tuple[Any, ...]:  # such a class cannot be pickled by its name
                return Batches.torch, (self._batches,)

        return TorchBatches(self)

    def jax(self) -> Iterator[TokenBatch]:
        """Returns the same batches as JAX arrays."""
        return (batch.jax() for batch in self)

    def __next__(self) -> TokenBatch:
        if self._window is None:
            self._window = self._next_window()
        window, taken = self._window, self._position.taken
        rows = window.order[taken : taken + self._options.size]
        batch = empty_batch(window.memory, len(rows), self._source.dtypes(self._options))
        copy_rows(window.memory, rows, batch)
        taken += len(batch)
        if taken < len(window.order):
            self._position = replace(self._position, taken=taken)
        else:
            self._window, self._position = None, window.end
        return batch

    def _next_window(self) -> Window:
        """The window at the position. Raises StopIteration after the last one."""
        options = self._options
        if self._windows is None:
            plan = self._source.plan(options, *_loader_worker())
            most = options.buffer // 2 // options.size * options.size
            self._windows = _Windows(plan, most, options.shuffle).beginning(self._position)
        try:
            return next(self._windows)
        except BaseException:
            self.close()  # so that the next call tries again
            raise


def _loader_worker() -> tuple[int, int]:
    """Number and count of PyTorch's DataLoader workers; (0, 1) outside of them."""
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    return (0, 1) if info is None else (info.id, info.num_workers)
