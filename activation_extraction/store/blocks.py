"""Blocks: how a shard's bytes are compressed by many threads, and come out in order.

Every block has the same size before compression, but for the last one, and becomes a gzip member of
its own. Members that follow each other are one gzip file. So the bytes depend on neither the number
of threads nor their timing. They do depend on the version of isal, and may depend on the family of
the processor, for which isal has code of its own.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from isal import isal_zlib

COMPRESSION_LEVEL = 1
BLOCK_BYTES = 4 * 2**20  # before compression
GZIP = 31  # what zlib calls `wbits`: a gzip header without a time, and a window of 32 KiB

T = TypeVar("T")
U = TypeVar("U")


def blocks_of(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Pieces of bytes, cut and gathered into blocks of BLOCK_BYTES; the last may be smaller."""
    block: list[memoryview] = []
    room = BLOCK_BYTES
    for piece in pieces:
        while piece.nbytes > room:
            yield [*block, piece[:room]]
            piece, block, room = piece[room:], [], BLOCK_BYTES
        block.append(piece)
        room -= piece.nbytes
    if block:
        yield block


def gzip_member(block: Sequence[memoryview]) -> list[bytes]:
    """A block as a gzip member, in pieces: to join them would hold the interpreter's lock."""
    packer = isal_zlib.compressobj(COMPRESSION_LEVEL, isal_zlib.DEFLATED, GZIP)
    return [*map(packer.compress, block), packer.flush()]


class Threads:
    """A pool of threads that compress, convert and add up blocks. count: of the threads."""

    def __init__(self, count: int) -> None:
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="store")
        self._ahead = 2 * count

    def in_order(self, function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """What a function returns for each item, in order. The threads call it, for a few more
        items than have been asked for."""
        waiting: deque[Future[U]] = deque()
        for item in items:
            waiting.append(self.pool.submit(function, item))
            if len(waiting) > self._ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def gzipped(pieces: Iterable[memoryview], threads: Threads) -> Iterator[bytes | memoryview]:
    """Pieces of bytes as gzip, which the threads compress."""
    for member in threads.in_order(gzip_member, blocks_of(pieces)):
        yield from member
