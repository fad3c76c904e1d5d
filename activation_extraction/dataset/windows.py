"""How batches come to be shuffled in bounded memory: windows of tokens out of many shards.

The tokens are cut into chunks, each a range of tokens in one shard. The order of the chunks is
shuffled once. Then windows of tokens are filled from consecutive chunks, and the tokens of a window
are shuffled: each is copied to its place in one of the window's batches. One window is in use while
a thread fills the next; both together are the buffer. Where a window begins and how many tokens
were taken from it says exactly where an iteration stands, so nothing has to be stored to restore
it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.dataset.batch_space import BatchSpace, Part, Slot
from activation_extraction.dataset.shared_work import THREADS, SharedWork
from activation_extraction.dataset.token_batch import TokenBatch

TOGETHER = 16  # chunks of mapped files that are copied at the same time


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `stop` of shard number `shard`."""

    shard: int
    start: int
    stop: int


class Block(NamedTuple):
    """Tokens that were read. rows: the numbers of those that are wanted, in ascending order."""

    tokens: TokenBatch
    rows: np.ndarray


@dataclass(frozen=True)
class Plan:
    """What one worker reads.

    read: the tokens of a chunk, in one or several blocks. empty: a batch like these, without any
    tokens. requests: how many chunks are read at the same time. mapped: whether what is read lies
    in mapped files, and so takes no memory.
    """

    chunks: Sequence[Chunk]
    read: Callable[[Chunk], list[Block]]
    empty: TokenBatch
    requests: int
    mapped: bool


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


@dataclass
class Window:
    """Tokens in the order in which they are handed out, from the position `begin` on."""

    begin: Position
    tokens: int
    space: BatchSpace
    slots: deque[Slot]  # with the batches that were not handed out yet

    def skip(self, tokens: int) -> None:
        """Leaves out the first batches, which have so many tokens."""
        for _ in range(-(-tokens // self.space.size)):
            self.slots.popleft()

    def next_batch(self, tokens: int, dtype: str | None) -> TokenBatch:
        return self.space.batch(self.slots.popleft(), tokens, dtype)


def windows_of(
    plan: Plan, size: int, batches: int, seed: int | None, begin: Position
) -> Iterator[Window]:
    """Every window from `begin` on, each of so many batches of `size` tokens.

    One is filled while the one before it is in use. seed: for shuffling; None keeps the order.
    """
    pieces = _pieces(plan, begin.chunk, begin.row)
    if (piece := next(pieces, None)) is None:
        return
    space, number = BatchSpace(plan.empty, size, batches), begin.window
    left = np.cumsum([chunk.stop - chunk.start for chunk in reversed(plan.chunks)])[::-1]
    with closing(SharedWork(THREADS if plan.mapped else 1)) as work:
        while piece is not None:
            start = Position(number, piece.chunk, piece.row)
            most = min(batches * size, int(left[piece.chunk]) - piece.row)
            filling = _Filling(space, work, start, most, seed)
            while piece is not None and filling.room:
                piece = filling.take(piece) or next(pieces, None)
            yield filling.finished()
            number += 1


class _Filling:
    """A window that is being filled with `most` tokens, or with fewer if some are filtered."""

    def __init__(
        self, space: BatchSpace, work: SharedWork, begin: Position, most: int, seed: int | None
    ) -> None:
        self._space = space
        self._work = work
        self._begin = begin
        self._seed = seed
        self._slots = space.reserve(-(-most // space.size))
        self._rows = space.rows_of(self._slots)[:most]
        self._places = np.empty_like(self._rows)
        self._places[self._order(most)] = self._rows
        self._parts: list[Part] = []
        self._together = 1 if work.threads == 1 else TOGETHER
        self._filled = 0

    @property
    def room(self) -> int:
        return len(self._rows) - self._filled

    def take(self, piece: "_Piece") -> "_Piece | None":
        """Takes as many tokens as there is room for. Returns the piece without them."""
        count = min(len(piece.rows), self.room)
        rows: Any = piece.rows[:count]
        if rows[-1] - rows[0] == count - 1:
            rows = slice(int(rows[0]), int(rows[-1]) + 1)  # needs no copy in between
        places = self._places[self._filled : self._filled + count]
        self._parts.append(Part(piece.tokens, rows, places))
        self._filled += count
        if len(self._parts) >= self._together:
            self._scatter()
        return piece.after(count)

    def finished(self) -> Window:
        """The window, when everything is copied that was taken."""
        self._scatter()
        self._work.finish()
        if self.room:
            # The order depends on how many tokens there are, which was not known before.
            order = self._order(self._filled)
            self._space.move(self._places[order], self._rows[: self._filled])
        slots = self._slots[: -(-self._filled // self._space.size)]
        return Window(self._begin, self._filled, self._space, deque(slots))

    def _scatter(self) -> None:
        self._work.begin(self._space.scatter(self._parts))
        self._parts = []

    def _order(self, tokens: int) -> np.ndarray:
        """The numbers of the tokens that go into the window, in the order of its batches."""
        if self._seed is None:
            return np.arange(tokens)
        return np.random.default_rng([self._seed, self._begin.window]).permutation(tokens)


@dataclass(frozen=True)
class _Piece:
    """Tokens of chunk number `chunk`, from its row `row` on. There is at least one."""

    chunk: int
    row: int
    tokens: TokenBatch
    rows: np.ndarray  # of `tokens`

    def after(self, count: int) -> "_Piece | None":
        """The piece without its first tokens; None when nothing is left."""
        if count >= len(self.rows):
            return None
        return _Piece(self.chunk, self.row + count, self.tokens, self.rows[count:])


def _pieces(plan: Plan, first: int, skip: int) -> Iterator[_Piece]:
    """The pieces of the chunks from `first` on, without the first `skip` tokens of that chunk."""
    for chunk, blocks in enumerate(_blocks(plan, first), first):
        row = 0
        blocks.reverse()
        while blocks:  # whose memory is free as soon as they are copied
            tokens, rows = blocks.pop()
            left = max(skip - row, 0) if chunk == first else 0
            row += len(rows)
            if left < len(rows):
                yield _Piece(chunk, row - len(rows) + left, tokens, rows[left:])
            del tokens


def _blocks(plan: Plan, first: int) -> Iterator[list[Block]]:
    """The chunks from `first` on, read a few at a time."""
    if plan.requests == 1:
        yield from map(plan.read, plan.chunks[first:])
        return
    pool = ThreadPoolExecutor(plan.requests, "reader")
    try:
        reading: deque[Future[list[Block]]] = deque()
        for chunk in plan.chunks[first:]:
            reading.append(pool.submit(plan.read, chunk))
            if len(reading) >= plan.requests:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def read_ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The items, of which a thread makes the next one while the last one is in use."""
    pool = ThreadPoolExecutor(1, "read-ahead")
    try:
        upcoming = pool.submit(next, items, None)
        while (item := upcoming.result()) is not None:
            upcoming = pool.submit(next, items, None)
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
