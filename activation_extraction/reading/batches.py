"""Shuffled batches of tokens out of many shards, in bounded memory, with an exact state.

The tokens are cut into chunks, each a range of tokens in one shard. The order of the chunks is
shuffled once. Then windows of tokens are filled from consecutive chunks, and the tokens of a window
are shuffled before they are handed out. One window is in use while a thread fills the next; both
together are the buffer. Where a window begins and how many tokens were taken from it says exactly
where an iteration stands, so nothing has to be stored to restore it.
"""

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from activation_extraction.reading.reused_memory import ReusedMemory


@dataclass(frozen=True)
class TokenBatch:
    """Some tokens; row t of every array belongs to the same token.

    activations: hook -> (size, width). token_ids, position: int32 (size,); the position counts
    from 0 within the sample. sample_idx: int64 (size,).
    """

    activations: Mapping[str, Any]
    token_ids: Any
    sample_idx: Any
    position: Any

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, hook: str) -> Any:
        return self.activations[hook]

    def torch(self) -> "TokenBatch":
        """The same as PyTorch tensors, in the same memory."""
        return self.map(_to_torch)

    def jax(self) -> "TokenBatch":
        """The same as JAX arrays on JAX's default device; a CPU shares the memory.

        `sample_idx` stays a NumPy array: JAX would cut it to 32 bits.
        """
        import jax

        return replace(self.map(jax.device_put), sample_idx=self.sample_idx)

    def map(self, convert: Callable[[np.ndarray], Any]) -> "TokenBatch":
        """`convert` applied to every array."""
        return TokenBatch(
            {hook: convert(values) for hook, values in self.activations.items()},
            convert(self.token_ids),
            convert(self.sample_idx),
            convert(self.position),
        )


def _to_torch(values: np.ndarray) -> Any:
    import torch

    if values.dtype.name == "bfloat16":  # NumPy and PyTorch do not know each other's
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


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


@dataclass(frozen=True)
class Plan:
    """What one worker reads. requests: how many chunks are read at the same time."""

    chunks: Sequence[Chunk]
    read: Callable[[Chunk], TokenBatch]
    requests: int


class Source(Protocol):
    """What batches are made of."""

    @property
    def fingerprint(self) -> str:
        """The same only for the same data."""
        ...

    def plan(self, options: BatchOptions, part: int, parts: int) -> Plan: ...


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


class Batches(Iterator[TokenBatch]):
    """Batches of tokens; the last one may be shorter. `state` and `restore` are exact.

    It goes over the data once. A copy in another process starts where this one stands.
    """

    def __init__(self, source: Source, options: BatchOptions) -> None:
        self._source = source
        self._options = options
        self._position = Position()
        self._forget()

    def _forget(self) -> None:
        self._windows: Iterator[tuple[Position, TokenBatch]] | None = None
        self._current: TokenBatch | None = None
        self._order = np.empty(0, np.int64)
        self._memory = ReusedMemory(2 * (len(self._options.hooks) + 3))

    def __getstate__(self) -> tuple[Source, BatchOptions, Position]:
        return self._source, self._options, self._position

    def __setstate__(self, state: tuple[Source, BatchOptions, Position]) -> None:
        self._source, self._options, self._position = state
        self._forget()

    def state(self) -> dict[str, Any]:
        """Where the iteration stands, as plain JSON values."""
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
        options = self._options.to_json()
        return {"data": self._source.fingerprint, **options, "part": part, "parts": parts}

    def again(self) -> "Batches":
        """The same batches from the start."""
        return Batches(self._source, self._options)

    def close(self) -> None:
        """Ends the reading ahead and frees the buffer."""
        if self._windows is not None:
            self._windows.close()  # type: ignore[attr-defined]
        self._forget()

    def torch(self) -> Any:
        """A PyTorch IterableDataset of the same batches as tensors, for a DataLoader or a loop.

        Give a DataLoader `batch_size=None`. Each of its workers reads its own share of the data.
        """
        from activation_extraction.reading.torch_batches import TorchBatches

        return TorchBatches(self)

    def jax(self) -> Iterator[TokenBatch]:
        """The same batches as JAX arrays."""
        return (batch.jax() for batch in self)

    def __next__(self) -> TokenBatch:
        if self._windows is None:
            plan = self._source.plan(self._options, *_loader_worker())
            window = self._options.buffer // 2 // self._options.size * self._options.size
            self._windows = _ahead(_windows(plan, window, self._position))
        while self._current is None or self._position.taken >= len(self._current):
            self._next_window()
        assert self._current is not None
        start = self._position.taken
        stop = min(start + self._options.size, len(self._current))
        self._position = replace(self._position, taken=stop)
        return _take(self._current, self._order[start:stop], self._options.dtype, self._memory)

    def _next_window(self) -> None:
        """Raises StopIteration after the last window."""
        assert self._windows is not None
        restored = self._position.taken if self._current is None else 0
        begin, self._current = next(self._windows)
        self._position = replace(begin, taken=restored)
        self._order = np.arange(len(self._current))
        if self._options.shuffle is not None:
            chance = np.random.default_rng([self._options.shuffle, begin.window])
            self._order = chance.permutation(len(self._current))


def _loader_worker() -> tuple[int, int]:
    """Number and count of PyTorch's DataLoader workers; (0, 1) outside of them."""
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    return (0, 1) if info is None else (info.id, info.num_workers)


def _take(
    window: TokenBatch, rows: np.ndarray, dtype: str | None, memory: ReusedMemory
) -> TokenBatch:
    """Copies of some rows of a window, the activations in the dtype that is wanted."""

    def pick(values: np.ndarray) -> np.ndarray:
        picked = memory.empty((len(rows), *values.shape[1:]), values.dtype)
        # "clip" keeps NumPy from making another copy; the rows are all there.
        _bits(values).take(rows, axis=0, out=_bits(picked), mode="clip")
        return picked

    def converted(values: np.ndarray) -> np.ndarray:
        if dtype is None or values.dtype == dtype:
            return pick(values)
        result = memory.empty((len(rows), *values.shape[1:]), np.dtype(dtype))
        np.copyto(result, pick(values), casting="unsafe")
        return result

    activations = {hook: converted(values) for hook, values in window.activations.items()}
    return TokenBatch(
        activations, pick(window.token_ids), pick(window.sample_idx), pick(window.position)
    )


def _windows(plan: Plan, size: int, begin: Position) -> Iterator[tuple[Position, TokenBatch]]:
    """Every window of `size` tokens from `begin` on, with the position at which it begins.

    Two windows take turns: one is filled while the other is in use.
    """
    spaces: list[TokenBatch | None] = [None, None]
    number, at, row = begin.window, begin.chunk, begin.row
    blocks = _blocks(plan, at)
    block = next(blocks, None)
    while block is not None:
        start, filled = Position(number, at, row), 0
        space = spaces[number % 2] = spaces[number % 2] or _empty_like(block, size)
        while block is not None and filled < size:
            part = _slice(block, row, row + size - filled)
            _copy(part, _slice(space, filled, filled + len(part)))
            filled, row = filled + len(part), row + len(part)
            if row >= len(block):
                at, row = at + 1, 0
                block = None  # a pickle's memory is free before the next one comes
                block = next(blocks, None)
        if filled:
            yield start, _slice(space, 0, filled)
        number += 1


def _blocks(plan: Plan, first: int) -> Iterator[TokenBatch]:
    """The chunks from `first` on, read a few at a time."""
    pool = ThreadPoolExecutor(plan.requests, "reader")
    try:
        reading: deque[Future[TokenBatch]] = deque()
        for chunk in plan.chunks[first:]:
            reading.append(pool.submit(plan.read, chunk))
            if len(reading) >= plan.requests:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _slice(batch: TokenBatch, start: int, stop: int) -> TokenBatch:
    return batch.map(lambda values: values[start:stop])


def _empty_like(batch: TokenBatch, size: int) -> TokenBatch:
    return batch.map(lambda values: np.empty((size, *values.shape[1:]), values.dtype))


def _copy(source: TokenBatch, target: TokenBatch) -> None:
    for hook, values in source.activations.items():
        _bits(target[hook])[...] = _bits(values)
    for name in ("token_ids", "sample_idx", "position"):
        getattr(target, name)[...] = getattr(source, name)


def select(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """A copy of some rows, given by their numbers or by a mask."""
    return _bits(values)[rows].view(values.dtype)


def _bits(values: np.ndarray) -> np.ndarray:
    """Two-byte numbers as integers: NumPy is slow with those that it does not know itself."""
    return values.view(np.uint16) if values.dtype.itemsize == 2 else values


def _ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The items, of which a thread makes the next one while the last one is in use."""
    pool = ThreadPoolExecutor(1, "read-ahead")
    try:
        upcoming = pool.submit(next, items, None)
        while (item := upcoming.result()) is not None:
            upcoming = pool.submit(next, items, None)
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
