"""Windows of tokens: what batches are taken from, in bounded memory.

A window is filled with the tokens of consecutive chunks, permuted and sliced. A thread fills one
window while the one before it is in use: both together are the buffer, and their memory is used
again by the windows that follow. Where a window begins and how many tokens were taken from it says
exactly where an iteration stands, so nothing has to be stored to restore it.
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from activation_extraction.dataset.token_batch import TokenBatch, copy_rows, empty_batch


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `stop` of shard number `shard`."""

    shard: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Block(NamedTuple):
    """Tokens that were read. rows: the numbers of those that pass the filters, ascending.

    Where several runs are read as one, each has its own block, and row i is of the same token. The
    rows of all are then in the order of the first run.
    """

    tokens: TokenBatch
    rows: np.ndarray


@dataclass(frozen=True)
class Plan:
    """What one worker reads, and how. read: returns a block of each run. requests: how many chunks
    are read at the same time."""

    chunks: Sequence[Chunk]
    read: Callable[[Chunk], tuple[Block, ...]]
    requests: int


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
    """The same tokens of each run. order: the rows of `memory`, as they are handed out. end: where
    the next window begins."""

    memory: tuple[TokenBatch, ...]
    order: np.ndarray
    end: Position


class Windows:
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
        self._reading: dict[int, Future[tuple[Block, ...]]] = {}
        self._memory: list[tuple[TokenBatch, ...]] = []

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
        memory: tuple[TokenBatch, ...] = ()
        with ThreadPoolExecutor(self._plan.requests, "read-ahead") as pool:
            while filled < self._most and chunk < len(self._plan.chunks) and not self._stopped:
                blocks = self._read(chunk, pool)
                left = len(blocks[0].rows) - row
                span = slice(filled, min(filled + left, self._most))
                if left > 0:
                    if not self._memory:
                        self._memory = [self._empty(blocks) for _ in range(2)]
                    memory = self._memory[begin.window % 2]
                    for (tokens, rows), target in zip(blocks, memory, strict=True):
                        wanted = rows[row : row + span.stop - filled]
                        copy_rows(tokens, wanted, target.map(itemgetter(span)))
                    filled, row = span.stop, row + span.stop - filled
                if row >= len(blocks[0].rows):
                    chunk, row = chunk + 1, 0
        if not filled:
            return None
        if self._seed is None:
            order = np.arange(filled)
        else:
            order = np.random.default_rng([self._seed, begin.window]).permutation(filled)
        return Window(memory, order, Position(begin.window + 1, chunk, row))

    def _empty(self, blocks: tuple[Block, ...]) -> tuple[TokenBatch, ...]:
        """Memory for a window of such blocks."""
        return tuple(empty_batch(tokens, self._most) for tokens, _ in blocks)

    def _read(self, chunk: int, pool: ThreadPoolExecutor) -> tuple[Block, ...]:
        """A chunk of each run. Some of those that follow are read meanwhile.

        When the program ends, the pool raises RuntimeError, which ends the filling.
        """
        self._reading.pop(chunk - 1, None)
        for number in range(chunk, min(chunk + self._plan.requests, len(self._plan.chunks))):
            if number not in self._reading:
                self._reading[number] = pool.submit(self._plan.read, self._plan.chunks[number])
        return self._reading[chunk].result()
