"""The formats of shard files: their names, and how the bytes of a file are made.

A compressed shard is cut into blocks of equal size (the last may be smaller). Threads compress each
block to a gzip member, and the concatenated members are one gzip file. So the bytes depend on
neither the number of threads nor their timing. They do depend on the version of isal, and may
depend on the processor family, because isal has different code for some.

Every file contains the id of the process that wrote it, where readers ignore it (run_log.py says
why): a gzip file in the comment of its first header.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import NamedTuple

import numpy as np
from crc32c import crc32c
from isal import isal_zlib

from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import InputError
from activation_extraction.store.pickle_file import NUMBER_TYPES, pickle_pieces
from activation_extraction.store.safetensors_file import safetensors_pieces
from activation_extraction.store.shard import Shard

# A shard's number as this program writes it in file names; it never writes shard_00001.
SHARD_NUMBER = "(?!0000)(?:[0-9]{4}|[1-9][0-9]{4,})"
GZIP_BLOCK = 4 * 2**20  # bytes of a block before compression
MIB = 2**20
COMPRESSION_LEVEL = 1
GZIP = 31  # the `wbits` of zlib for a gzip header without a time, and a window of 32 KiB
COMMENT = 16  # the flag of a gzip header that is followed by a comment
GZIP_HEADER = 10  # bytes of a header, of which the fourth has the flags


def shard_name(number: int, suffix: str) -> str:
    """Returns the name of a file of a shard."""
    return f"shard_{number:04d}{suffix}"


def number_of(name: str) -> int:
    """Returns the number of the shard that a file belongs to, from the file's name."""
    return int(name.removeprefix("shard_").split(".")[0])


@dataclass(frozen=True)
class FileFacts:
    """The facts about a file of a shard that the shard's commit records.

    Attributes:
        bytes: Size of the file.
        sha256: SHA-256 of its content, in hexadecimal digits.
        version: The version that the store gave to the file. It holds only in the folder at the
            `url` of the commit. None if the store has no versions.
        crc32c: CRC-32C of every MiB of the activations, 8 hexadecimal digits each, concatenated;
            "" for the other files of a shard.
    """

    bytes: int
    sha256: str
    version: str | None = None
    crc32c: str = ""


def blocks_of(pieces: Iterable[memoryview], size: int = GZIP_BLOCK) -> Iterator[list[memoryview]]:
    """Regroups bytes into blocks of equal size.

    Args:
        pieces: The bytes, piece by piece.
        size: Bytes of a block.

    Yields:
        The pieces of a block, which are not copied. The last block may be smaller.
    """
    block: list[memoryview] = []
    room = size
    for piece in pieces:
        while piece.nbytes > room:
            yield [*block, piece[:room]]
            piece = piece[room:]
            block = []
            room = size
        block.append(piece)
        room -= piece.nbytes
    if block:
        yield block


def gzip_member(block: Sequence[memoryview]) -> list[bytes]:
    """Compresses a block of bytes to a gzip member.

    Returns:
        The member in pieces, because joining them would hold the GIL.
    """
    packer = isal_zlib.compressobj(COMPRESSION_LEVEL, isal_zlib.DEFLATED, GZIP)
    return [*map(packer.compress, block), packer.flush()]


def with_comment(member: Sequence[bytes], comment: str) -> list[bytes]:
    """Returns a gzip member with a comment in its header.

    Args:
        member: The member, in pieces.
        comment: The comment. Gzip stores it in Latin-1; other characters become question marks.
    """
    first, *later = filter(None, member)
    header = bytearray(first[:GZIP_HEADER])
    header[3] |= COMMENT
    after_header = first[GZIP_HEADER:]
    return [bytes(header), comment.encode("latin-1", "replace") + b"\0", after_header, *later]


class Packed(NamedTuple):
    """The file of a shard in memory.

    Attributes:
        parts: Content of the file, in pieces.
        facts: Facts about the file for the shard's commit, but for its version.
        unpacked: Bytes of the content before compression.
    """

    parts: list[bytes | memoryview]
    facts: FileFacts
    unpacked: int


@dataclass(frozen=True)
class ShardFormat:
    """A format of shard files.

    Attributes:
        suffix: The end of a file's name.
        pieces: Returns the uncompressed bytes of a shard, given the shard and the id of the process
            that writes it ("" to leave the id out).
        compressed: Whether the bytes are gzipped.
    """

    suffix: str
    pieces: Callable[[Shard, str], list[memoryview]]
    compressed: bool = False

    def pack(self, shard: Shard, threads: Executor, writer: str = "") -> Packed:
        """Returns the file of a shard.

        Args:
            shard: The shard, whose values are in the stored form.
            threads: The threads that compress.
            writer: The id of the process that writes the file; "" to leave it out.
        """
        pieces = self.pieces(shard, "" if self.compressed else writer)
        written: Iterable[bytes | memoryview] = pieces
        if self.compressed:
            members = iter(threads.map(gzip_member, blocks_of(pieces)))
            if writer:
                members = chain([with_comment(next(members), writer)], members)
            written = chain.from_iterable(members)
        parts: list[bytes | memoryview] = []
        digest = hashlib.sha256()
        for part in written:
            digest.update(part)
            parts.append(part)
        crcs = [
            reduce(lambda crc, piece: crc32c(piece, crc), block, 0)
            for block in blocks_of(map(memoryview, parts), MIB)
        ]
        size = sum(memoryview(part).nbytes for part in parts)
        crc_digits = "".join(f"{crc:08x}" for crc in crcs)
        facts = FileFacts(size, digest.hexdigest(), crc32c=crc_digits)
        return Packed(parts, facts, unpacked=sum(piece.nbytes for piece in pieces))


DTYPES = {np.dtype(code).name for code in NUMBER_TYPES}  # of values that are stored as they are
PICKLE = ShardFormat(".pkl", pickle_pieces)
GZIP_PICKLE = ShardFormat(".pkl.gz", pickle_pieces, compressed=True)
SAFETENSORS = ShardFormat(".safetensors", safetensors_pieces)
BY_SUFFIX = {format_.suffix: format_ for format_ in (PICKLE, GZIP_PICKLE, SAFETENSORS)}
SUFFIXES = "|".join(map(re.escape, BY_SUFFIX))
SHARD_FILE = re.compile(rf"shard_{SHARD_NUMBER}({SUFFIXES})")


def chosen_format(name: str, compress: bool) -> ShardFormat:
    """Returns the format in which a run stores its shards.

    Args:
        name: Value of --shard_format.
        compress: Whether to compress pickles with gzip. Safetensors are never compressed, because
            they are read by ranges.

    Raises:
        InputError: There is no format with this name.
    """
    if name not in SHARD_FORMATS:
        raise InputError(f"shard_format {name!r:.40}: expected {' or '.join(SHARD_FORMATS)}")
    if name == "safetensors":
        return SAFETENSORS
    return GZIP_PICKLE if compress else PICKLE


def format_of(file: str) -> ShardFormat | None:
    """Returns the format of a shard file, by its name; None for any other file."""
    match = SHARD_FILE.fullmatch(file)
    return BY_SUFFIX[match[1]] if match else None
