"""The formats of shard files: their names, and how a shard is written.

A compressed shard is cut into blocks of equal size (the last may be smaller). Threads compress each
block to a gzip member, and the concatenated members are one gzip file. So the bytes depend on
neither the number of threads nor their timing. They do depend on the version of isal, and may
depend on the processor family, because isal has different code for some.
"""

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, TypeVar

import numpy as np
from crc32c import crc32c
from isal import isal_zlib

from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.encodings import VALUES
from activation_extraction.common.errors import InputError
from activation_extraction.store.commit import SHARD_NUMBER, FileFacts, shard_name
from activation_extraction.store.pickle_file import NUMBER_TYPES, pickle_pieces
from activation_extraction.store.safetensors_file import DTYPES, safetensors_pieces
from activation_extraction.store.shard import Key, Shard

GZIP_BLOCK = 4 * 2**20  # before compression
MIB = 2**20
COMPRESSION_LEVEL = 1
GZIP = 31  # the `wbits` of zlib for a gzip header without a time, and a window of 32 KiB

T = TypeVar("T")
U = TypeVar("U")


class Threads:
    """A pool of `count` threads that compress, convert and sum blocks."""

    def __init__(self, count: int) -> None:
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="store")
        self._ahead = 2 * count

    def in_order(self, function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """Yields the results of a function for all items, in order. The threads work a few items
        ahead of what has been consumed."""
        waiting: deque[Future[U]] = deque()
        for item in items:
            waiting.append(self.pool.submit(function, item))
            if len(waiting) > self._ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def blocks_of(pieces: Iterable[memoryview], size: int = GZIP_BLOCK) -> Iterator[list[memoryview]]:
    """Regroups pieces of bytes into blocks of `size` bytes; the last may be smaller."""
    block: list[memoryview] = []
    room = size
    for piece in pieces:
        while piece.nbytes > room:
            yield [*block, piece[:room]]
            piece, block, room = piece[room:], [], size
        block.append(piece)
        room -= piece.nbytes
    if block:
        yield block


def gzip_member(block: Sequence[memoryview]) -> list[bytes]:
    """Compresses a block to a gzip member, returned in pieces: joining them would hold the GIL."""
    packer = isal_zlib.compressobj(COMPRESSION_LEVEL, isal_zlib.DEFLATED, GZIP)
    return [*map(packer.compress, block), packer.flush()]


def gzipped(pieces: Iterable[memoryview], threads: Threads) -> Iterator[bytes | memoryview]:
    """Compresses pieces of bytes on the threads, and yields the gzip members in pieces."""
    for member in threads.in_order(gzip_member, blocks_of(pieces)):
        yield from member


class Packed(NamedTuple):
    """A shard's file in memory. unpacked: the bytes before compression."""

    parts: list[bytes | memoryview]
    facts: FileFacts
    unpacked: int


@dataclass(frozen=True)
class ShardFormat:
    """A format of shard files.

    pieces: returns the uncompressed bytes of a shard, given the full names of its hooks by key.
    dtypes: the names of the dtypes that it stores without an encoding. compressed: whether the
    bytes are gzipped.
    """

    suffix: str
    pieces: Callable[[Shard, Mapping[Key, str]], list[memoryview]]
    dtypes: Set[str]
    compressed: bool = False

    def file_name(self, number: int) -> str:
        """Returns the name of the file of a shard."""
        return shard_name(number, self.suffix)

    def pack(self, shard: Shard, names: Mapping[Key, str], threads: Threads) -> Packed:
        """Returns the file of a shard. names: the hooks' full names by key."""
        pieces = self.pieces(shard, names)
        parts: list[bytes | memoryview] = []
        digest = hashlib.sha256()
        for data in gzipped(pieces, threads) if self.compressed else pieces:
            digest.update(data)
            parts.append(data)
        crcs = [
            reduce(lambda crc, piece: crc32c(piece, crc), block, 0)
            for block in blocks_of(map(memoryview, parts), MIB)
        ]
        size, unpacked = (sum(memoryview(p).nbytes for p in some) for some in (parts, pieces))
        return Packed(
            parts,
            FileFacts(size, digest.hexdigest(), crc32c="".join(f"{crc:08x}" for crc in crcs)),
            unpacked,
        )


PICKLE_DTYPES = {np.dtype(code).name for code in NUMBER_TYPES}
SAFETENSORS_DTYPES = {dtype.name for dtype in DTYPES.values()} - {VALUES.name}
PICKLE = ShardFormat(".pkl", pickle_pieces, PICKLE_DTYPES)
GZIP_PICKLE = ShardFormat(".pkl.gz", pickle_pieces, PICKLE_DTYPES, compressed=True)
SAFETENSORS = ShardFormat(".safetensors", safetensors_pieces, SAFETENSORS_DTYPES)
BY_SUFFIX = {each.suffix: each for each in (PICKLE, GZIP_PICKLE, SAFETENSORS)}
SUFFIXES = "|".join(map(re.escape, BY_SUFFIX))
SHARD_FILE = re.compile(rf"shard_{SHARD_NUMBER}({SUFFIXES})")


def chosen_format(name: str, compress: bool) -> ShardFormat:
    """Returns the format that --shard_format names. compress: whether to gzip pickles; safetensors
    are never compressed, because they are read by ranges. Raises InputError for another name."""
    if name not in SHARD_FORMATS:
        raise InputError(f"shard_format {name!r:.40}: expected {' or '.join(SHARD_FORMATS)}")
    if name == "safetensors":
        return SAFETENSORS
    return GZIP_PICKLE if compress else PICKLE


def format_of(file: str) -> ShardFormat | None:
    """Returns the format of a shard file, by its name; None for any other file."""
    match = SHARD_FILE.fullmatch(file)
    return BY_SUFFIX[match[1]] if match else None
