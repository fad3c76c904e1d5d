"""Windows: the tokens from which batches are cut, in bounded memory.

A chunk is a range of a shard's tokens that is read at once. A window contains the tokens of
consecutive chunks, in random order if tokens are shuffled. While batches are cut from one window, a
thread fills the next window; the two windows together are the buffer. Shuffled tokens are copied to
random places in the window's memory, so that a batch is a slice of this memory. Later windows reuse
the memory. If tokens stay in order, the window keeps large blocks as they were read, and each batch
copies its tokens from these blocks.

The state of an iteration is a Position. It consists of the beginning of the window and the number
of tokens that were taken from the window. So a state contains only numbers: to restore it, the
window is filled again, and these tokens are skipped.
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from activation_extraction.dataset.token_batch import (
    Block,
    TokenBatch,
    copy_wanted_tokens,
    empty_batch,
)

# A block contains tokens that were read together. Its wanted tokens are the tokens that pass the
# filters. If tokens stay in order, a window either keeps the arrays of a block in memory, or copies
# the wanted tokens, so that the memory of the block can be freed. It keeps the block if at least
# the fraction MIN_WANTED_FRACTION of its tokens is wanted, and if the wanted tokens take at least
# MIN_HELD_BYTES in the block's largest array. Smaller blocks are copied, because the arrays of a
# block may be views of a larger buffer: files are read in whole MiB, and a small view would keep
# the whole buffer in memory.
MIN_WANTED_FRACTION = 0.75
MIN_HELD_BYTES = 2**20


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a shard, which are read together.

    Attributes:
        shard_index: Index of the shard among the shards of the run, from 0.
        start_token_index: Index of the first token among the tokens of the shard.
        stop_token_index: Index after the last token, among the tokens of the shard.
    """

    shard_index: int
    start_token_index: int
    stop_token_index: int

    def __len__(self) -> int:
        return self.stop_token_index - self.start_token_index


@dataclass(frozen=True)
class Position:
    """The position of an iteration over batches.

    A chunk is a range of a shard's tokens that is read at once. The tokens that pass the filters
    are divided into windows, chunk by chunk. All windows but the last have the same number of
    tokens, so a chunk may be divided between windows. Batches are cut from one window after the
    other. A saved state (`Batches.state`) contains the fields of a Position under their names.

    Attributes:
        window: Number of the window from which the next batch is cut, from 0.
        chunk: Index of the first chunk that is read for this window, in the list of all chunks.
        row: Index of the first token of this chunk that is not in an earlier window. Only tokens
            that pass the filters are counted.
        taken: Number of tokens of this window that earlier batches contain.
    """

    window: int = 0
    chunk: int = 0
    row: int = 0
    taken: int = 0


class Window(NamedTuple):
    """Tokens of consecutive chunks that pass the filters, and from which batches are cut.

    A chunk is a range of a shard's tokens that is read at once.

    Attributes:
        blocks_of_each_run: For each of the runs that are read side by side, a tuple of blocks. A
            `Block` contains the arrays of some tokens, and the indices of the tokens among them
            that belong to the window. Batches take these tokens in the order of the blocks, and in
            the order of the indices in each block. The tokens are the same in all runs.
        token_count: Number of tokens in the window, in each run.
        end: Position at which an iteration continues after this window.
    """

    blocks_of_each_run: list[tuple[Block, ...]]
    token_count: int
    end: Position


@dataclass
class Windows:
    """Makes windows of tokens from chunks. One thread fills a window; other threads read chunks.

    Attributes:
        chunks: Ranges of the tokens of shards to read, in order.
        read: Function that reads a chunk and returns a tuple of blocks (arrays of tokens), one for
            each of the runs that are read side by side.
        num_chunks_read_at_once: Number of chunks that are read at the same time.
        max_window_tokens: Number of tokens in a window; the last window may have fewer.
        seed: Seed for shuffling the tokens of a window. None to keep their order.
    """

    chunks: Sequence[Chunk]
    read: Callable[[Chunk], tuple[Block, ...]]
    num_chunks_read_at_once: int
    max_window_tokens: int
    seed: int | None

    def beginning(self, begin_position: Position) -> Generator[Window, None, None]:
        """Yields the windows (see `Window`), beginning at a position.

        While the caller uses a window, threads fill the next one. When the generator is closed or
        garbage-collected, or the program ends, the window that is being filled is abandoned, and
        the threads end.

        Args:
            begin_position: Position at which the first window begins.
        """
        self._is_stopped = False
        # Results of reading chunks in threads (a block for each run), by the index of the chunk.
        self._future_by_chunk_index: dict[int, Future[tuple[Block, ...]]] = {}
        # Memory to which tokens are copied: a list for even windows and a list for odd windows,
        # because one window is filled while batches are cut from the window before it. A list is
        # empty until it is needed, and then contains a batch for each run.
        self._batches_of_even_and_odd_windows: tuple[list[TokenBatch], ...] = [], []
        thread_pool = ThreadPoolExecutor(1 + self.num_chunks_read_at_once, "read-ahead")
        try:
            future_of_next_window = thread_pool.submit(self._fill, begin_position, thread_pool)
            while (window := future_of_next_window.result()) is not None:
                future_of_next_window = thread_pool.submit(self._fill, window.end, thread_pool)
                yield window
                del window  # frees its memory before the next window is waited for
        # The threads are not ended with `thread_pool.shutdown`, which takes the lock of the pool:
        # the garbage collector may close this generator in any thread, even in a thread that
        # already holds this lock.
        finally:
            self._is_stopped = True

    def _fill(self, begin_position: Position, thread_pool: ThreadPoolExecutor) -> Window | None:
        """Reads the tokens of one window into memory.

        Args:
            begin_position: Position in the data at which the window begins.
            thread_pool: Pool of the threads that read chunks.

        Returns:
            The window. None if there are no tokens after the position.
        """
        chunk_index = begin_position.chunk
        # The window contains a part of the wanted tokens of each chunk. If the wanted tokens of a
        # chunk are counted from 0, its part begins at token `part_start_in_wanted_tokens` and ends
        # before token `part_stop_in_wanted_tokens`.
        part_start_in_wanted_tokens = begin_position.row
        num_window_tokens = 0
        window_batches = self._batches_of_even_and_odd_windows[begin_position.window % 2]
        # A list for each chunk of which a part is in the window. It contains a block for each run,
        # whose wanted tokens are the tokens of this part.
        block_lists_of_chunk_parts = list[list[Block]]()
        # `window_batches` contains a batch for each run. Token i of the window is copied to the
        # index in element i, in the batch of every run. The index is i if tokens stay in order,
        # otherwise it comes from a random permutation. Tokens whose blocks stay in memory are not
        # copied.
        target_indices_of_window_tokens = np.arange(self.max_window_tokens)
        if self.seed is not None:
            random_generator = np.random.default_rng([self.seed, begin_position.window])
            random_generator.shuffle(target_indices_of_window_tokens)
        while (
            num_window_tokens < self.max_window_tokens
            and chunk_index < len(self.chunks)
            and not self._is_stopped
        ):
            # For each run, a block with the tokens of this chunk.
            chunk_blocks = self._blocks(chunk_index, thread_pool)
            part_stop_in_wanted_tokens = min(
                part_start_in_wanted_tokens + self.max_window_tokens - num_window_tokens,
                len(chunk_blocks[0].wanted_token_indices),
            )
            num_part_tokens = part_stop_in_wanted_tokens - part_start_in_wanted_tokens
            if num_part_tokens > 0:
                blocks_of_chunk_part = [
                    chunk_block._replace(
                        wanted_token_indices=chunk_block.wanted_token_indices[
                            part_start_in_wanted_tokens:part_stop_in_wanted_tokens
                        ]
                    )
                    for chunk_block in chunk_blocks
                ]
                if self.seed is not None or not all(map(_may_stay_in_memory, chunk_blocks)):
                    if not window_batches:
                        window_batches += [
                            empty_batch(part_block.token_batch, self.max_window_tokens)
                            for part_block in blocks_of_chunk_part
                        ]
                    target_indices_of_part_tokens = target_indices_of_window_tokens[
                        num_window_tokens : num_window_tokens + num_part_tokens
                    ]
                    for part_block, window_batch in zip(
                        blocks_of_chunk_part, window_batches, strict=True
                    ):
                        copy_wanted_tokens(part_block, target_indices_of_part_tokens, window_batch)
                    blocks_of_chunk_part = [
                        Block(window_batch, target_indices_of_part_tokens)
                        for window_batch in window_batches
                    ]
                block_lists_of_chunk_parts.append(blocks_of_chunk_part)
                num_window_tokens += num_part_tokens
                part_start_in_wanted_tokens = part_stop_in_wanted_tokens
            if part_start_in_wanted_tokens >= len(chunk_blocks[0].wanted_token_indices):
                chunk_index += 1
                part_start_in_wanted_tokens = 0
        if not num_window_tokens:
            return None
        if self.seed is not None:
            block_lists_of_chunk_parts = [
                [
                    Block(
                        window_batch, np.sort(target_indices_of_window_tokens[:num_window_tokens])
                    )
                    for window_batch in window_batches
                ]
            ]
        return Window(
            [*zip(*block_lists_of_chunk_parts, strict=True)],
            num_window_tokens,
            Position(begin_position.window + 1, chunk_index, part_start_in_wanted_tokens),
        )

    def _blocks(self, chunk_index: int, thread_pool: ThreadPoolExecutor) -> tuple[Block, ...]:
        """Returns the tokens of a chunk, and lets threads read the chunks after it.

        If several runs are read side by side, the same chunk is read from each of them.

        Args:
            chunk_index: Index of the chunk in `chunks`.
            thread_pool: Pool of the threads that read chunks.

        Returns:
            A block for each run, which contains the tokens of the chunk in this run.

        Raises:
            RuntimeError: If the program ends, so that the pool accepts no more work. The window is
                then abandoned.
        """
        self._future_by_chunk_index.pop(chunk_index - 1, None)
        for chunk_index_to_read in range(
            chunk_index, min(chunk_index + self.num_chunks_read_at_once, len(self.chunks))
        ):
            if chunk_index_to_read not in self._future_by_chunk_index:
                self._future_by_chunk_index[chunk_index_to_read] = thread_pool.submit(
                    self.read, self.chunks[chunk_index_to_read]
                )
        return self._future_by_chunk_index[chunk_index].result()


def _may_stay_in_memory(block: Block) -> bool:
    """Returns whether a window may use the arrays of a block as they were read.

    Otherwise, the wanted tokens of the block are copied, so that the memory of the block can be
    released. A block may stay in memory if its wanted tokens have at least MIN_HELD_BYTES bytes
    in its largest array, and are at least the fraction MIN_WANTED_FRACTION of all its tokens.
    """
    num_wanted_tokens = len(block.wanted_token_indices)
    wanted_bytes_in_largest_array = num_wanted_tokens * max(
        array[:1].nbytes for array in block.token_batch.arrays
    )
    min_num_wanted_tokens = MIN_WANTED_FRACTION * len(block.token_batch)
    return (
        wanted_bytes_in_largest_array >= MIN_HELD_BYTES
        and num_wanted_tokens >= min_num_wanted_tokens
    )


def cut_chunk(
    chunk: Chunk, tokens_per_part: float, tokens_per_indivisible_unit: int = 1
) -> list[Chunk]:
    """Cuts a chunk into smaller chunks of about the same length.

    A chunk consists of consecutive tokens of a shard.

    Args:
        chunk: The chunk to cut.
        tokens_per_part: Approximate number of tokens in a smaller chunk, which has at least one
            token.
        tokens_per_indivisible_unit: Number of tokens in a unit that is not cut, such as the tokens
            with a common checksum. Units are counted from the start of the chunk, and the last unit
            may be shorter. Every smaller chunk consists of whole units, and the numbers of their
            units differ by at most one.

    Returns:
        The smaller chunks in order; an empty list if the chunk is empty.
    """
    num_indivisible_units = -(-len(chunk) // tokens_per_indivisible_unit)
    part_count = min(max(round(len(chunk) / tokens_per_part), 1), num_indivisible_units)
    start_indices_of_parts = [
        chunk.start_token_index
        + num_indivisible_units * part_number // part_count * tokens_per_indivisible_unit
        for part_number in range(part_count)
    ]
    return [
        Chunk(chunk.shard_index, start_token_index, stop_token_index)
        for start_token_index, stop_token_index in pairwise(
            [*start_indices_of_parts, chunk.stop_token_index]
        )
    ]


def shuffled_chunks(chunks: list[Chunk], seed: int | None, *seed_numbers: int) -> list[Chunk]:
    """Returns chunks in a random order.

    Args:
        chunks: The chunks.
        seed: Seed of the order. None to keep the order.
        *seed_numbers: Further numbers on which the order depends, such as the number of the shard
            that was cut into these chunks.
    """
    if seed is None:
        return chunks
    return [
        chunks[i] for i in np.random.default_rng([seed, *seed_numbers]).permutation(len(chunks))
    ]


def chunks_of_worker(chunks: list[Chunk], worker_number: int, worker_count: int) -> list[Chunk]:
    """Returns the chunks that one of several workers reads.

    A worker is one of the processes among which the stored tokens are divided: one of the processes
    that `BatchOptions.workers` counts, or a worker process of a PyTorch DataLoader. Each worker
    reads every n-th chunk, where n is the number of workers.

    Args:
        chunks: Chunks (ranges of consecutive tokens) of all workers. If there are fewer chunks than
            workers, the chunks are cut first.
        worker_number: Number of the worker, from 0.
        worker_count: Number of workers.
    """
    if len(chunks) < worker_count:
        chunks = [
            chunk_part
            for chunk in chunks
            for chunk_part in cut_chunk(chunk, max(len(chunk) / worker_count, 1))
        ]
    return chunks[worker_number::worker_count]
