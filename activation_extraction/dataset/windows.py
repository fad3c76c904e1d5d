"""Windows: the tokens from which batches are cut, in bounded memory.

A window has the tokens of consecutive chunks, permuted if they are shuffled. A thread fills one
window while the window before it is in use, and both windows together are the buffer. Shuffled
tokens are copied to random rows of memory, so that a batch is a slice of this memory; later windows
use the same memory again. Tokens that stay in order are copied from the blocks that were read
directly into their batch. The state of an iteration is a Position: where the window begins, and how
many tokens were taken from it. Restoring a position therefore needs no stored tokens.
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from activation_extraction.dataset.token_batch import Block, TokenBatch, copy_rows, empty_batch

# A window of ordered tokens keeps a block in memory, instead of copying the wanted tokens of it, if
# the wanted tokens are at least the share MOSTLY of the block and have at least LEAST_HELD bytes at
# the widest hook. Ranges are read in whole MiB, so a small block may hold on to much other memory.
MOSTLY = 0.75
LEAST_HELD = 2**20


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a shard, which are read together.

    Attributes:
        shard: Number of the shard.
        start: First token.
        stop: Token after the last one.
    """

    shard: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Position:
    """The place at which an iteration over batches stands.

    Attributes:
        window: Number of the window in use.
        chunk: Index of the chunk in which the window begins.
        row: Number of tokens of this chunk before the window, among those that pass the filters.
        taken: Number of tokens of the window that are in earlier batches.
    """

    window: int = 0
    chunk: int = 0
    row: int = 0
    taken: int = 0


class Window(NamedTuple):
    """The tokens of consecutive chunks, from which batches are cut.

    Attributes:
        runs: Blocks of each run, whose rows are the tokens in the order of the batches. All runs
            have the same tokens.
        tokens: Number of tokens.
        end: Position at which the next window begins.
    """

    runs: list[tuple[Block, ...]]
    tokens: int
    end: Position


@dataclass
class Windows:
    """Makes the windows of some chunks. One thread fills a window, and others read its chunks.

    Attributes:
        chunks: Chunks to read, in order.
        read: Function that reads a chunk and returns a block for each run.
        ahead: Number of chunks that are read at the same time.
        most: Number of tokens in a window; the last window may have fewer.
        seed: Seed for shuffling. None to keep the order.
    """

    chunks: Sequence[Chunk]
    read: Callable[[Chunk], tuple[Block, ...]]
    ahead: int
    most: int
    seed: int | None

    def beginning(self, begin: Position) -> Generator[Window, None, None]:
        """Yields the windows, beginning at a position.

        When the generator is closed or collected, or the program ends, the window that is being
        filled is abandoned, and the threads end.

        Args:
            begin: Position at which the first window begins.
        """
        self._stopped = False
        self._reading: dict[int, Future[tuple[Block, ...]]] = {}
        # Memory for shuffled tokens, a batch of each run: for even windows, and for odd windows.
        self._memory: tuple[list[TokenBatch], ...] = [], []
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
        """Returns the window that begins at a position; None if no tokens are left."""
        chunk = begin.chunk
        row = begin.row
        filled = 0
        memory = self._memory[begin.window % 2]
        parts = list[list[Block]]()
        places = np.arange(self.most)
        if self.seed is not None:
            np.random.default_rng([self.seed, begin.window]).shuffle(places)
        while filled < self.most and chunk < len(self.chunks) and not self._stopped:
            blocks = self._blocks(chunk, pool)
            stop = min(row + self.most - filled, len(blocks[0].rows))
            if row < stop:
                part = [Block(tokens, rows[row:stop]) for tokens, rows in blocks]
                if self.seed is not None or not all(map(_may_hold, blocks)):
                    if not memory:
                        memory += [empty_batch(tokens, self.most) for tokens, _ in part]
                    to = places[filled : filled + stop - row]
                    for block, tokens in zip(part, memory, strict=True):
                        copy_rows(block, to, tokens)
                    part = [Block(tokens, to) for tokens in memory]
                parts.append(part)
                filled += stop - row
                row = stop
            if row >= len(blocks[0].rows):
                chunk += 1
                row = 0
        if not filled:
            return None
        if self.seed is not None:
            parts = [[Block(tokens, np.sort(places[:filled])) for tokens in memory]]
        return Window([*zip(*parts, strict=True)], filled, Position(begin.window + 1, chunk, row))

    def _blocks(self, chunk: int, pool: ThreadPoolExecutor) -> tuple[Block, ...]:
        """Returns the blocks of a chunk, and lets threads read the chunks after it.

        Args:
            chunk: Index of the chunk.
            pool: Pool of the threads that read chunks.

        Raises:
            RuntimeError: The program ends, so that the pool accepts no more work. The window is
                then abandoned.
        """
        self._reading.pop(chunk - 1, None)
        for number in range(chunk, min(chunk + self.ahead, len(self.chunks))):
            if number not in self._reading:
                self._reading[number] = pool.submit(self.read, self.chunks[number])
        return self._reading[chunk].result()


def _may_hold(block: Block) -> bool:
    """Returns whether a window may keep a block in memory instead of copying its wanted rows.

    It may if most tokens of the block are wanted and the block is large (MOSTLY, LEAST_HELD).
    """
    size = len(block.rows) * max(values[:1].nbytes for values in block.tokens.arrays)
    return size >= LEAST_HELD and len(block.rows) >= MOSTLY * len(block.tokens)


def cut(chunk: Chunk, size: float, block: int = 1) -> list[Chunk]:
    """Cuts a chunk into pieces of about the same length.

    Args:
        chunk: The chunk.
        size: Approximate number of tokens in a piece. A piece has at least one token.
        block: Number of tokens of which the length of each piece is a multiple, except for the last
            piece. Apart from it, lengths differ by at most this number.

    Returns:
        The pieces in order; none if the chunk is empty.
    """
    blocks = -(-len(chunk) // block)
    count = min(max(round(len(chunk) / size), 1), blocks)
    edges = [chunk.start + blocks * n // count * block for n in range(count)] if count else []
    return [Chunk(chunk.shard, start, stop) for start, stop in pairwise([*edges, chunk.stop])]


def shuffled(chunks: list[Chunk], seed: int | None, *within: int) -> list[Chunk]:
    """Returns chunks in a random order.

    Args:
        chunks: The chunks.
        seed: Seed of the order. None to keep the order.
        *within: Further numbers on which the order depends, such as the shard that is cut into
            these chunks.
    """
    if seed is None:
        return chunks
    return [chunks[i] for i in np.random.default_rng([seed, *within]).permutation(len(chunks))]


def share(chunks: list[Chunk], worker: int, workers: int) -> list[Chunk]:
    """Returns the chunks of one of several workers: every n-th chunk.

    Args:
        chunks: All chunks. If there are fewer than workers, they are cut into pieces first.
        worker: Number of the worker, from 0.
        workers: Number of workers.
    """
    if len(chunks) < workers:
        chunks = [piece for chunk in chunks for piece in cut(chunk, max(len(chunk) / workers, 1))]
    return chunks[worker::workers]
