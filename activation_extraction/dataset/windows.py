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
                if tokens.labels.keys() != memory.labels.keys():
                    raise OSError("the shards of the run differ in the labels of their tokens")
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
