"""Windows of tokens: what batches are taken from, in bounded memory.

A window is filled with the tokens of consecutive chunks, permuted and sliced. A thread fills one
window while the one before it is in use: both together are the buffer, and their memory is used
again by the windows that follow. Where a window begins and how many tokens were taken from it says
exactly where an iteration stands, so nothing has to be stored to restore it.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
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

    read: returns a block of each run for one of the chunks. ahead: how many chunks are read at the
    same time. A thread fills a window, others read its chunks. A window's memory is used again when
    the next but one is asked for.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        read: Callable[[Chunk], tuple[Block, ...]],
        ahead: int,
        most: int,
        seed: int | None,
    ) -> None:
        self._chunks, self._read, self._ahead = chunks, read, ahead
        self._most, self._seed = min(most, sum(map(len, chunks))), seed
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
        with ThreadPoolExecutor(self._ahead, "read-ahead") as pool:
            while filled < self._most and chunk < len(self._chunks) and not self._stopped:
                blocks = self._blocks(chunk, pool)
                left = len(blocks[0].rows) - row
                span = slice(filled, min(filled + left, self._most))
                if left > 0:
                    if not self._memory:
                        self._memory = [
                            tuple(empty_batch(tokens, self._most) for tokens, _ in blocks)
                            for _ in range(2)
                        ]
                    memory = self._memory[begin.window % 2]
                    for (tokens, rows), target in zip(blocks, memory, strict=True):
                        wanted = rows[row : row + span.stop - filled]
                        copy_rows(tokens, wanted, target.map(itemgetter(span)))
                    filled, row = span.stop, row + span.stop - filled
                if row >= len(blocks[0].rows):
                    chunk, row = chunk + 1, 0
        if not filled:
            return None
        order = np.arange(filled)
        if self._seed is not None:
            np.random.default_rng([self._seed, begin.window]).shuffle(order)
        return Window(memory, order, Position(begin.window + 1, chunk, row))

    def _blocks(self, chunk: int, pool: ThreadPoolExecutor) -> tuple[Block, ...]:
        """A chunk of each run. Some of those that follow are read meanwhile.

        When the program ends, the pool raises RuntimeError, which ends the filling.
        """
        self._reading.pop(chunk - 1, None)
        for number in range(chunk, min(chunk + self._ahead, len(self._chunks))):
            if number not in self._reading:
                self._reading[number] = pool.submit(self._read, self._chunks[number])
        return self._reading[chunk].result()


def cut(chunks: Iterable[Chunk], size: int) -> list[Chunk]:
    """Returns the chunks in pieces of `size` tokens; the last one of each may be shorter."""
    return [
        Chunk(chunk.shard, at, min(at + size, chunk.stop))
        for chunk in chunks
        for at in range(chunk.start, chunk.stop, size)
    ]


def shuffled(chunks: list[Chunk], seed: int | None, *within: int) -> list[Chunk]:
    """Returns the chunks in the order of a seed, and of what they are within; None keeps theirs."""
    if seed is None:
        return chunks
    return [chunks[i] for i in np.random.default_rng([seed, *within]).permutation(len(chunks))]


def share(chunks: list[Chunk], worker: int, workers: int) -> list[Chunk]:
    """Returns every n-th chunk; where there are too few chunks, they are cut."""
    if len(chunks) < workers:
        chunks = [piece for each in chunks for piece in cut([each], -(-len(each) // workers))]
    return chunks[worker::workers]
