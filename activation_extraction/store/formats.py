"""The formats of shard files: their names, and the conversion of a shard in memory to bytes.

pickle_file.py and safetensors_file.py make the uncompressed bytes of the two formats; this module
compresses them and computes checksums. A compressed shard is cut into blocks of equal size, except
for the last block. Threads compress each block to a gzip member, and the concatenated members are
one gzip file. So the compressed bytes depend on neither the number of threads nor their timing. The
bytes depend on the version of isal, the library that compresses them, and perhaps on the processor
family, because isal contains different code for some families.

Every file contains the id of the process that wrote it, at a place that readers ignore. In a gzip
file, this is the comment in the first header. run_log.py explains why the id is needed.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from isal import isal_zlib

from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import InputError
from activation_extraction.store.pickle_file import NUMBER_TYPES, pickle_pieces
from activation_extraction.store.safetensors_file import (
    RangeChecksums,
    blocks_of,
    crc_digits,
    range_checksums,
    safetensors_pieces,
)
from activation_extraction.store.shard import Shard

# Regular expression for the number of a shard in a file name, such as "0012" or "12345": at least
# four digits, without more leading zeros than needed.
SHARD_NUMBER = "(?!0000)(?:[0-9]{4}|[1-9][0-9]{4,})"
GZIP_BLOCK_BYTES = 4 * 2**20  # bytes of a shard's content that one gzip member contains
MIB = 2**20
COMPRESSION_LEVEL = 1
GZIP_WINDOW_BITS = 31  # zlib's `wbits`: a gzip header without a time, 32 KiB window
COMMENT_FLAG = 16  # flag in a gzip header that announces a comment
GZIP_HEADER_BYTES = 10  # size of a gzip header; its fourth byte contains the flags


def shard_name(number: int, suffix: str) -> str:
    """Returns the name of a file of a shard, such as "shard_0007.json".

    Args:
        number: Number of the shard, from 1.
        suffix: End of the name, with the dot.
    """
    return f"shard_{number:04d}{suffix}"


def number_of(name: str) -> int:
    """Returns the number of the shard to which a file belongs.

    Args:
        name: Name of the file, such as "shard_0007.json".
    """
    return int(name.removeprefix("shard_").split(".")[0])


@dataclass(frozen=True)
class FileFacts:
    """The facts about a file of a shard that the shard's commit records.

    Attributes:
        bytes: Size of the file in bytes.
        sha256: SHA-256 of the file's content, in hexadecimal digits.
        version: Version that the store gave the file when it was written, such as its generation
            or ETag. It is valid only in the folder at the `url` of the commit, because a copy of
            the file in another folder gets another version. None if the store has no versions.
        crc32c: CRC-32C of every MiB of the file of activations, 8 hexadecimal digits each,
            concatenated. "" for the other files of a shard.
        ranges: Checksums of ranges of the file, with which a reader of a single range can check
            this range. None for files in other formats than safetensors, and for shards that older
            versions of this program have stored.
    """

    bytes: int
    sha256: str
    version: str | None = None
    crc32c: str = ""
    ranges: RangeChecksums | None = None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "FileFacts":
        """Returns the facts about one file from the JSON of its shard.

        Args:
            fields: JSON object about the file. Fields with unknown names are ignored.

        Raises:
            KeyError: If a field is missing.
            TypeError: If a field has a value of another type.
            ValueError: If a number in the field "ranges" cannot be read.
        """
        ranges_as_json = fields.get("ranges")  # older files lack this field
        return cls(
            bytes=fields["bytes"],
            sha256=fields["sha256"],
            version=fields["version"],
            crc32c=fields["crc32c"],
            ranges=None if ranges_as_json is None else RangeChecksums.from_json(ranges_as_json),
        )


def gzip_member(block_buffers: Sequence[memoryview]) -> list[bytes]:
    """Compresses a block of bytes to a gzip member.

    Args:
        block_buffers: Consecutive buffers of the block.

    Returns:
        Consecutive buffers of the member. They are not joined, because joining would hold the GIL.
    """
    compressor = isal_zlib.compressobj(COMPRESSION_LEVEL, isal_zlib.DEFLATED, GZIP_WINDOW_BITS)
    return [*map(compressor.compress, block_buffers), compressor.flush()]


def with_comment(member_buffers: Sequence[bytes], comment: str) -> list[bytes]:
    """Inserts a comment into the header of a gzip member.

    Args:
        member_buffers: Consecutive buffers of the member. The first buffer contains the whole
            header, which has no optional field yet.
        comment: Comment to insert. Gzip stores it in Latin-1, so characters that Latin-1 lacks
            become question marks.

    Returns:
        Consecutive buffers of the member with the comment.
    """
    first_buffer, *later_buffers = filter(None, member_buffers)
    gzip_header = bytearray(first_buffer[:GZIP_HEADER_BYTES])
    gzip_header[3] |= COMMENT_FLAG
    comment_field = comment.encode("latin-1", "replace") + b"\0"
    return [bytes(gzip_header), comment_field, first_buffer[GZIP_HEADER_BYTES:], *later_buffers]


class PackedFile(NamedTuple):
    """The content of a shard's file of activations, which is to be written.

    Attributes:
        buffers: Consecutive buffers of the content.
        facts_for_commit: Facts about the file that the shard's commit records. The version is None,
            because the file gets its version when it is written.
        num_uncompressed_bytes: Size of the content before compression, in bytes.
    """

    buffers: list[bytes | memoryview]
    facts_for_commit: FileFacts
    num_uncompressed_bytes: int


@dataclass(frozen=True)
class ShardFormat:
    """A format of a shard's file of activations: pickle, compressed pickle or safetensors.

    Attributes:
        suffix: End of the names of files in this format, such as ".pkl.gz".
        serialize: Function that takes a shard and the id of the process that writes the file, and
            returns consecutive buffers of the uncompressed file. If the id is "", the file contains
            no id.
        is_compressed: Whether the bytes are compressed with gzip.
        compute_range_checksums: Function that takes a shard and the buffers of its file, and
            returns the checksums of ranges of the file. None for a format whose files are always
            read as a whole.
    """

    suffix: str
    serialize: Callable[[Shard, str], list[memoryview]]
    is_compressed: bool = False
    compute_range_checksums: Callable[[Shard, Sequence[memoryview]], RangeChecksums] | None = None

    def pack(self, shard: Shard, threads: Executor, writer: str = "") -> PackedFile:
        """Makes the content of a shard's file of activations in memory, without writing it.

        Args:
            shard: Shard, whose values are in the stored form (stored_hook.py).
            threads: Threads that compress blocks of the file.
            writer: Id of the process that writes the file; "" to leave it out.
        """
        uncompressed_buffers = self.serialize(shard, "" if self.is_compressed else writer)
        unhashed_buffers: Iterable[bytes | memoryview] = uncompressed_buffers
        if self.is_compressed:
            gzip_members = iter(
                threads.map(gzip_member, blocks_of(uncompressed_buffers, GZIP_BLOCK_BYTES))
            )
            if writer:
                gzip_members = chain([with_comment(next(gzip_members), writer)], gzip_members)
            unhashed_buffers = chain.from_iterable(gzip_members)
        file_buffers: list[bytes | memoryview] = []
        file_digest = hashlib.sha256()
        for file_buffer in unhashed_buffers:
            file_digest.update(file_buffer)
            file_buffers.append(file_buffer)
        compute_range_checksums = self.compute_range_checksums
        file_facts = FileFacts(
            bytes=sum(memoryview(file_buffer).nbytes for file_buffer in file_buffers),
            sha256=file_digest.hexdigest(),
            crc32c=crc_digits(map(memoryview, file_buffers), MIB),
            ranges=compute_range_checksums(shard, uncompressed_buffers)
            if compute_range_checksums
            else None,
        )
        return PackedFile(
            file_buffers, file_facts, sum(buffer.nbytes for buffer in uncompressed_buffers)
        )


# Names of the dtypes of the values that shards can store without encoding them.
DTYPES = {np.dtype(type_code).name for type_code in NUMBER_TYPES}
PICKLE = ShardFormat(".pkl", pickle_pieces)
GZIP_PICKLE = ShardFormat(".pkl.gz", pickle_pieces, is_compressed=True)
SAFETENSORS = ShardFormat(
    ".safetensors", safetensors_pieces, compute_range_checksums=range_checksums
)
FORMAT_BY_SUFFIX = {
    shard_format.suffix: shard_format for shard_format in (PICKLE, GZIP_PICKLE, SAFETENSORS)
}
SUFFIXES = "|".join(map(re.escape, FORMAT_BY_SUFFIX))
SHARD_FILE = re.compile(rf"shard_{SHARD_NUMBER}({SUFFIXES})")


def chosen_format(name: str, compress: bool) -> ShardFormat:
    """Returns the format in which a run stores its shards.

    Args:
        name: Value of --shard_format, "pickle" or "safetensors".
        compress: Whether to compress pickles with gzip. Safetensors are never compressed, because
            readers read ranges of them.

    Raises:
        InputError: If there is no format with this name.
    """
    if name not in SHARD_FORMATS:
        raise InputError(f"shard_format {name!r:.40}: expected {' or '.join(SHARD_FORMATS)}")
    if name == "safetensors":
        return SAFETENSORS
    return GZIP_PICKLE if compress else PICKLE


def format_of(file_name: str) -> ShardFormat | None:
    """Returns the format of a file of activations, from its name; None for any other file."""
    name_match = SHARD_FILE.fullmatch(file_name)
    return FORMAT_BY_SUFFIX[name_match[1]] if name_match else None
