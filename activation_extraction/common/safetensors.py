"""Parses, checks and writes the headers of safetensors files.

A file contains the length of its header in 8 bytes, the header, which is JSON, and the bytes of the
tensors, one tensor after the other. The header locates the bytes of each tensor. Shards
(store/safetensors_file.py) and weights (model/weight_files.py) are such files. These two modules
know the names of their tensors and read ranges of bytes from disks and buckets.

https://huggingface.co/docs/safetensors describes the format and the library, which is not used for
headers because it only reads and writes whole files.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from activation_extraction.common.encodings import VALUES
from activation_extraction.common.errors import InputError, RunError

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": VALUES,
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BOOL": np.dtype(bool),
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA_KEY = "__metadata__"  # the entry of a header that is not a tensor
LENGTH_BYTES = 8  # the length of the header, little-endian
FIRST_BYTES = 2**17  # the bytes to read of a file first; most headers are shorter
MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file: its dtype, its shape and the offset of its bytes.

    Attributes:
        dtype: The dtype of the values.
        shape: The shape, with at least one axis; a scalar has the shape (1,).
        offset: The offset of the first byte in the file.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """The bytes of a row, which is one index of the first axis."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def end(self) -> int:
        """The offset of the byte after the tensor."""
        return self.offset + self.dtype.itemsize * math.prod(self.shape)

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        """Returns where the bytes of consecutive rows are in the file.

        Args:
            start: The index of the first row.
            stop: The index after the last row.

        Returns:
            The offset of the first byte, and the offset after the last byte.
        """
        return self.offset + start * self.row_bytes, self.offset + stop * self.row_bytes


@dataclass(frozen=True)
class Header:
    """The checked header of a file.

    Attributes:
        tensors: The tensors by name, in the order of the header.
        metadata: The texts that the writer of the file added, by name.
        end: The offset of the byte after the header.
    """

    tensors: dict[str, Tensor]
    metadata: Mapping[str, Any]
    end: int


def read_header(
    read: Callable[[int, int], bytes],
    size: int,
    where: str,
    error: type[InputError] | type[RunError],
) -> Header:
    """Reads and checks the header of a file. A header's length is checked before it is read.

    Args:
        read: A function that takes a start and an end offset within the file and returns the
            bytes between them.
        size: The size of the file in bytes.
        where: The name of the file, for messages.
        error: The type of the exceptions to raise.

    Raises:
        InputError: If `error` is InputError: The file is no safetensors file, its size differs from
            the size that its header describes, or a tensor has a dtype that is not in DTYPES.
        RunError: The same, if `error` is RunError.
    """
    incomplete = f"{where}: not a complete safetensors file: has {size:,} bytes, its header"
    start = read(0, min(FIRST_BYTES, size))
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if not 0 < length <= min(size - LENGTH_BYTES, MOST_HEADER_BYTES):
        raise error(f"{incomplete} would have {length:,}")
    end = LENGTH_BYTES + length
    text = start[LENGTH_BYTES:end]
    if end > len(start):
        text += read(len(start), end)
    try:
        content = json.loads(text)
        metadata = content.pop(METADATA_KEY, {})
        if not isinstance(metadata, dict):
            raise ValueError(f"{METADATA_KEY} is {metadata!r:.40}")
        for name, entry in content.items():
            if entry["dtype"] not in DTYPES:
                raise error(f"{where}: tensor {name} is {entry['dtype']}, which is not read")
        tensors = {name: _parse_tensor(entry, end) for name, entry in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise error(f"{where}: not a safetensors file: {problem!r}") from problem
    described = max((tensor.end for tensor in tensors.values()), default=end)
    if described != size:
        raise error(f"{incomplete} describes {described:,}")
    return Header(tensors, metadata, end)


def _parse_tensor(entry: Mapping[str, Any], header_end: int) -> Tensor:
    """Returns the tensor that an entry of a header describes.

    Args:
        entry: The entry, whose dtype is in DTYPES.
        header_end: The offset of the byte after the header.

    Raises:
        KeyError: A field is missing.
        TypeError: A field is not a list.
        ValueError: A size is not a whole number from 0 on, or the offsets contradict the shape.
    """
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"]) or (1,)
    for number in (begin, end, *shape):
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r:.40} in its header, expected a whole number from 0 on")
    tensor = Tensor(DTYPES[entry["dtype"]], shape, header_end + begin)
    if tensor.end != header_end + end:
        raise ValueError("a tensor's size does not follow from its shape")
    return tensor


def pack_header(
    tensors: Mapping[str, tuple[np.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Returns the first bytes of a file: the length of the header and the header.

    The header is padded with spaces, so that the tensors begin at a multiple of 8 bytes.

    Args:
        tensors: The dtype and the shape of each tensor by name, in the order of their bytes.
        metadata: Texts to add, by name; empty for none.
    """
    content: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        content[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
