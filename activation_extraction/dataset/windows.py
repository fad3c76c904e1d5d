"""Windows of tokens: what batches are taken from, in bounded memory.

A window is what was read of consecutive chunks, whose tokens are permuted and sliced. A thread
fills one window while the one before it is in use: both together are the buffer. Shuffled tokens
are copied to random places in memory that is used again by the windows that follow, so that a batch
is a slice of it; those in order go from what was read right into their batch. Where a window
begins and how many tokens were taken from it says exactly where an iteration stands, so nothing has
to be stored to restore it.
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from activation_extraction.dataset.token_batch import Block, TokenBatch, copy_rows, empty_batch

# Tokens in order are taken from a block if at least this share of it is wanted, and so many bytes
# of a hook: ranges are whole MiB.
MOSTLY, LEAST_HELD = 0.75, 2**20


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `stop` of shard number `shard`."""

    shard: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


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
    """The same tokens of each run. runs: the blocks of each. tokens: how many there are, over all
    blocks of a run, in the order in which they are handed out. end: where the next window begins.
    """

    runs: list[tuple[Block, ...]]
    tokens: int
    end: Position


@dataclass
class Windows:
    """Windows of `most` tokens; the last one may be shorter. seed: for shuffling; None keeps the
    order.

    read: returns a block of each run for one of the chunks. ahead: how many chunks are read at the
    same time. A thread fills a window, others read its chunks.
    """

    chunks: Sequence[Chunk]
    read: Callable[[Chunk], tuple[Block, ...]]
    ahead: int
    most: int
    seed: int | None

    def beginning(self, begin: Position) -> Generator[Window, None, None]:
        """Yields the windows from `begin` on.

        The filling ends early when the generator is closed or collected, or the program ends, and
        the threads end with it.
        """
        self._stopped = False
        self._reading: dict[int, Future[tuple[Block, ...]]] = {}
        self._memory: tuple[list[TokenBatch], ...] = [], []  # of every other window, of each run
        pool = ThreadPoolExecutor(1 + self.ahead, "read-ahead")
        try:
            upcoming = pool.submit(self._fill, begin, pool)
            while (window := upcoming.result()) is not None:
                upcoming = pool.submit(self._fill, window.end, pool)
                yield window
                del window  # and its memory, before the next one is waited for
        finally:  # without a lock: the garbage collector may come here, in any thread
            self._stopped = True

    def _fill(self, begin: Position, pool: ThreadPoolExecutor) -> Window | None:
        """The window that begins there; None if no tokens are left."""
        chunk = begin.chunk
        row = begin.row
        filled = 0
        memory, parts = self._memory[begin.window % 2], list[list[Block]]()
        places = np.arange(self.most)
        if self.seed is not None:
            np.random.default_rng([self.seed, begin.window]).shuffle(places)
        while filled < self.most and chunk < len(self.chunks) and not self._stopped:
            blocks = self._blocks(chunk, pool)
            stop = min(row + self.most - filled, len(blocks[0].rows))
            if row < stop:
                part = [Block(tokens, rows[row:stop]) for tokens, rows in blocks]
                if self.seed is not None or not all(map(_may_hold, blocks)):
                    memory += [empty_batch(tokens, self.most) for tokens, _ in part if not memory]
                    to = places[filled : filled + stop - row]
                    for block, tokens in zip(part, memory, strict=True):
                        copy_rows(block, to, tokens)
                    part = [Block(tokens, to) for tokens in memory]
                parts.append(part)
                filled, row = filled + stop - row, stop
            if row >= len(blocks[0].rows):
                chunk, row = chunk + 1, 0
        if not filled:
            return None
        if self.seed is not None:
            parts = [[Block(tokens, np.sort(places[:filled])) for tokens in memory]]
        return Window([*zip(*parts, strict=True)], filled, Position(begin.window + 1, chunk, row))

    def _blocks(self, chunk: int, pool: ThreadPoolExecutor) -> tuple[Block, ...]:
        """A chunk of each run. Some of those that follow are read meanwhile.

        When the program ends, the pool raises RuntimeError, which ends the filling.
        """
        self._reading.pop(chunk - 1, None)
        for number in range(chunk, min(chunk + self.ahead, len(self.chunks))):
            if number not in self._reading:
                self._reading[number] = pool.submit(self.read, self.chunks[number])
        return self._reading[chunk].result()


def _may_hold(block: Block) -> bool:
    """Whether batches can be taken from the block itself: it has little else in memory."""
    size = len(block.rows) * max(values[:1].nbytes for values in block.tokens.arrays)
    return size >= LEAST_HELD and len(block.rows) >= MOSTLY * len(block.tokens)


def cut(chunk: Chunk, size: float) -> list[Chunk]:
    """Returns a chunk in equal pieces, to a token, of about `size` tokens, and of at least one."""
    count = min(max(round(len(chunk) / size), 1), len(chunk))
    edges = [chunk.start + len(chunk) * n // count for n in range(count + 1)] if count else []
    return [Chunk(chunk.shard, start, stop) for start, stop in pairwise(edges)]


def shuffled(chunks: list[Chunk], seed: int | None, *within: int) -> list[Chunk]:
    """Returns the chunks in the order of a seed, and of what they are within; None keeps theirs."""
    if seed is None:
        return chunks
    return [chunks[i] for i in np.random.default_rng([seed, *within]).permutation(len(chunks))]


def share(chunks: list[Chunk], worker: int, workers: int) -> list[Chunk]:
    """Returns every n-th chunk; where there are too few chunks, they are cut."""
    if len(chunks) < workers:
        chunks = [piece for each in chunks for piece in cut(each, max(len(each) / workers, 1))]
    return chunks[worker::workers]
