"""Shuffled batches of tokens out of many shards, in bounded memory, with an exact state.

The tokens that are wanted are cut into chunks, each a run of samples in one shard. The order of
chunks is shuffled once. Then windows of tokens are filled from consecutive chunks, and the tokens
of a window are shuffled before they are handed out. One window is in use while a thread fills the
next, so both together are the buffer. Where a window begins, together with the number of tokens
taken from it, says exactly where an iteration stands: no token has to be stored to restore it.
"""

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np


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
        return self._as(_to_torch)

    def jax(self) -> "TokenBatch":
        """The same as JAX arrays, on JAX's default device."""
        import jax.numpy as jnp

        return self._as(jnp.asarray)

    def _as(self, convert: Callable[[np.ndarray], Any]) -> "TokenBatch":
        return TokenBatch(
            {hook: convert(values) for hook, values in self.activations.items()},
            convert(self.token_ids),
            convert(self.sample_idx),
            convert(self.position),
        )


def _to_torch(values: np.ndarray) -> Any:
    import torch

    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `stop` of shard number `shard`."""

    shard: int
    start: int
    stop: int


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
class Plan:
    """What an iteration does. window: its most tokens, a multiple of `size`; requests: how many
    chunks are read at the same time."""

    chunks: Sequence[Chunk]
    read: Callable[[Chunk], TokenBatch]
    requests: int
    size: int
    window: int
    shuffle: int | None
    dtype: Any


class Batches(Iterator[TokenBatch]):
    """Batches of `size` tokens; the last one may be shorter. `state` and `restore` are exact."""

    def __init__(self, plan_for: Callable[[int, int], Plan], arguments: dict[str, Any]) -> None:
        """plan_for(worker, workers): the plan of one PyTorch DataLoader worker; (0, 1) without."""
        self._plan_for = plan_for
        self._arguments = arguments
        self._position = Position()
        self._windows: Iterator[tuple[Position, TokenBatch]] | None = None
        self._plan: Plan | None = None
        self._current: TokenBatch | None = None
        self._order = np.empty(0, np.int64)

    def state(self) -> dict[str, Any]:
        """Where the iteration stands, as plain JSON values."""
        return {"arguments": self._arguments, "worker": list(_worker()), **asdict(self._position)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken. Raises ValueError when the arguments of the two
        iterations differ, or the dataset does."""
        content = dict(state)
        for name, here in (("arguments", self._arguments), ("worker", list(_worker()))):
            if (found := content.pop(name)) != here:
                raise ValueError(f"the state is of an iteration with {name} {found}, not {here}")
        self.close()
        self._position = Position(**content)

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        if self._windows is not None:
            self._windows.close()  # type: ignore[attr-defined]
        self._windows = self._current = None

    def __next__(self) -> TokenBatch:
        if self._plan is None:
            self._plan = self._plan_for(*_worker())
        if self._windows is None:
            self._windows = _ahead(_windows(self._plan, self._position))
        while self._current is None or self._position.taken >= len(self._current):
            self._next_window()
        assert self._current is not None
        start = self._position.taken
        stop = min(start + self._plan.size, len(self._current))
        self._position = replace(self._position, taken=stop)
        return _take(self._current, self._order[start:stop], self._plan.dtype)

    def _next_window(self) -> None:
        """Raises StopIteration when the last window is used up."""
        assert self._plan is not None and self._windows is not None
        restored = self._position.taken if self._current is None else 0
        begin, self._current = next(self._windows)
        self._position = replace(begin, taken=restored)
        self._order = np.arange(len(self._current))
        if self._plan.shuffle is not None:
            chance = np.random.default_rng([self._plan.shuffle, begin.window])
            self._order = chance.permutation(len(self._current))


def _worker() -> tuple[int, int]:
    """Number and count of PyTorch's DataLoader workers, if this process is one."""
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    return (0, 1) if info is None else (info.id, info.num_workers)


def _take(window: TokenBatch, rows: np.ndarray, dtype: Any) -> TokenBatch:
    def pick(values: np.ndarray) -> np.ndarray:
        return _bits(values).take(rows, axis=0).view(values.dtype)

    activations = {hook: pick(values) for hook, values in window.activations.items()}
    if dtype is not None:
        activations = {hook: values.astype(dtype) for hook, values in activations.items()}
    return TokenBatch(
        activations, pick(window.token_ids), pick(window.sample_idx), pick(window.position)
    )


def _windows(plan: Plan, begin: Position) -> Iterator[tuple[Position, TokenBatch]]:
    """Every window from `begin` on, with the position at which it begins.

    Two windows take turns: one is filled while the other is in use.
    """
    spaces: list[TokenBatch | None] = [None, None]
    number, at, row = begin.window, begin.chunk, begin.row
    blocks = _blocks(plan, at)
    block = next(blocks, None)
    while block is not None:
        start, filled = Position(number, at, row), 0
        space = spaces[number % 2] = spaces[number % 2] or _empty_like(block, plan.window)
        while block is not None and filled < plan.window:
            part = _slice(block, row, row + plan.window - filled)
            _copy(part, _slice(space, filled, filled + len(part)))
            filled, row = filled + len(part), row + len(part)
            if row >= len(block):
                at, row = at + 1, 0
                block = next(blocks, None)
        if filled:
            yield start, _slice(space, 0, filled)
        number += 1


def _blocks(plan: Plan, first: int) -> Iterator[TokenBatch]:
    """The chunks from `first` on, read a few at a time."""
    with ThreadPoolExecutor(plan.requests, "reader") as pool:
        reading: deque[Future[TokenBatch]] = deque()
        for chunk in plan.chunks[first:]:
            reading.append(pool.submit(plan.read, chunk))
            if len(reading) >= plan.requests:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()


def _slice(batch: TokenBatch, start: int, stop: int) -> TokenBatch:
    return batch._as(lambda values: values[start:stop])


def _empty_like(batch: TokenBatch, size: int) -> TokenBatch:
    return batch._as(lambda values: np.empty((size, *values.shape[1:]), values.dtype))


def _copy(source: TokenBatch, target: TokenBatch) -> None:
    for hook, values in source.activations.items():
        _bits(target[hook])[...] = _bits(values)
    for name in ("token_ids", "sample_idx", "position"):
        getattr(target, name)[...] = getattr(source, name)


def _bits(values: np.ndarray) -> np.ndarray:
    """Two-byte numbers as integers: NumPy is slow with those that it does not know itself."""
    return values.view(np.uint16) if values.dtype.itemsize == 2 else values


def _ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The items, of which a thread keeps one ready. Closing the iterator ends the thread."""
    ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(1)
    wanted = threading.Semaphore(1)  # how many items may be made
    closed = threading.Event()

    def run() -> None:
        try:
            while wanted.acquire() and not closed.is_set():
                ready.put((next(items), None))
        except BaseException as error:  # raised where the item is asked for, StopIteration too
            ready.put((None, error))

    threading.Thread(target=run, name="read-ahead", daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            wanted.release()
            yield item
    finally:
        closed.set()
        wanted.release()
