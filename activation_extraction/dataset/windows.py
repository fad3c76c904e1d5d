"""How batches come to be shuffled in bounded memory: windows of tokens out of many shards.

A window is read, permuted and sliced. It is filled with the tokens of consecutive chunks, whose
order was shuffled before. Its batches are copies of its rows, in a random order. A thread fills one
window while the one before it is in use: both together are the buffer, and their memory is used
again by the windows that follow. Where a window begins and how many tokens were taken from it says
exactly where an iteration stands, so nothing has to be stored to restore it.
"""

from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from activation_extraction.dataset.token_batch import TokenBatch, copy_rows, empty_batch
from activation_extraction.dataset.token_source import Block, Plan


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
