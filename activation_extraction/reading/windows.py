"""How batches come to be shuffled in bounded memory: windows of tokens out of many shards.

The tokens are cut into chunks, each a range of tokens in one shard. The order of the chunks is
shuffled once. Then windows of tokens are filled from consecutive chunks, and the tokens of a window
are shuffled before they are handed out. One window is in use while a thread fills the next; both
together are the buffer. Where a window begins and how many tokens were taken from it says exactly
where an iteration stands, so nothing has to be stored to restore it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from activation_extraction.reading.token_batch import TokenBatch, copy_into, empty_like, slice_of


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `stop` of shard number `shard`."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """What one worker reads. read: the tokens of a chunk, in one or several pieces. requests: how
    many chunks are read at the same time."""

    chunks: Sequence[Chunk]
    read: Callable[[Chunk], list[TokenBatch]]
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


def windows_of(plan: Plan, size: int, begin: Position) -> Iterator[tuple[Position, TokenBatch]]:
    """Every window of `size` tokens from `begin` on, with the position at which it begins.

    Two windows take turns: one is filled while the other is in use.
    """
    spaces: list[TokenBatch | None] = [None, None]
    number = begin.window
    pieces = _pieces(plan, begin.chunk, begin.row)
    piece = next(pieces, None)
    while piece is not None:
        start, filled = Position(number, piece.chunk, piece.row), 0
        space = spaces[number % 2] = spaces[number % 2] or empty_like(piece.tokens, size)
        while piece is not None and filled < size:
            part = slice_of(piece.tokens, 0, size - filled)
            copy_into(part, slice_of(space, filled, filled + len(part)))
            filled += len(part)
            piece = piece.after(len(part)) or next(pieces, None)
        yield start, slice_of(space, 0, filled)
        number += 1


@dataclass(frozen=True)
class _Piece:
    """Tokens of chunk number `chunk`, from its row `row` on. There is at least one."""

    chunk: int
    row: int
    tokens: TokenBatch

    def after(self, count: int) -> "_Piece | None":
        """The piece without its first tokens; None when nothing is left."""
        if count >= len(self.tokens):
            return None
        return _Piece(self.chunk, self.row + count, slice_of(self.tokens, count, len(self.tokens)))


def _pieces(plan: Plan, first: int, skip: int) -> Iterator[_Piece]:
    """The pieces of the chunks from `first` on, without the first `skip` tokens of that chunk."""
    for chunk, blocks in enumerate(_blocks(plan, first), first):
        row = 0
        blocks.reverse()
        while blocks:  # whose memory is free as soon as they are copied
            tokens = blocks.pop()
            left = skip - row if chunk == first else 0
            if left < len(tokens):
                part = slice_of(tokens, max(left, 0), len(tokens))
                yield _Piece(chunk, row + max(left, 0), part)
                del part
            row += len(tokens)
            del tokens


def _blocks(plan: Plan, first: int) -> Iterator[list[TokenBatch]]:
    """The chunks from `first` on, read a few at a time."""
    pool = ThreadPoolExecutor(plan.requests, "reader")
    try:
        reading: deque[Future[list[TokenBatch]]] = deque()
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
