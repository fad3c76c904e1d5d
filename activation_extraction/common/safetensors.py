"""Parses, checks and writes the headers of safetensors files.

A file contains the length of its header in 8 bytes, the header, which is JSON, and the bytes of the
tensors, one tensor after the other. The header contains the dtype, the shape and the offsets of
each tensor. Shards (store/safetensors_file.py) and weights (model/weight_files.py) are such files.
These two modules know the names of their tensors and read ranges of bytes from disks and buckets.

https://huggingface.co/docs/safetensors describes the format and a library. The library is not used
here, because it only reads and writes whole files.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from activation_extraction.common.encodings import VALUE_DTYPE
from activation_extraction.common.errors import InputError, RunError

# Name of a dtype in a header -> the dtype. Numbers are little-endian.
DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": VALUE_DTYPE,
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BOOL": np.dtype(bool),
    **{f"F{8 * num_bytes}": np.dtype(f"<f{num_bytes}") for num_bytes in (2, 4, 8)},
    **{f"I{8 * num_bytes}": np.dtype(f"<i{num_bytes}") for num_bytes in (1, 2, 4, 8)},
    **{f"U{8 * num_bytes}": np.dtype(f"<u{num_bytes}") for num_bytes in (1, 2, 4, 8)},
}
DTYPE_NAMES = {dtype: dtype_name for dtype_name, dtype in DTYPES.items()}
# The key of the only entry of a header that does not describe a tensor.
METADATA_KEY = "__metadata__"
# A file begins with the length of its header, a number of this many bytes.
LENGTH_BYTES = 8
# The size in bytes of the first read of a file. Most headers are shorter.
FIRST_BYTES = 2**17
# The largest size in bytes of a header that the safetensors library accepts.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Tensor:
    """The description of a tensor in a file: its dtype, its shape and the offset of its bytes.

    Attributes:
        dtype: Dtype of the values.
        shape: Shape, with at least one axis. A scalar has the shape (1,).
        offset: Offset of the tensor's first byte in the file.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """The size of a row in bytes. A row contains all values with the same first index."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def end(self) -> int:
        """The offset in the file of the byte after the tensor."""
        return self.offset + self.dtype.itemsize * math.prod(self.shape)

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        """Returns the range of a file's bytes that contains consecutive rows of the tensor.

        Args:
            start: The index of the first row.
            stop: The index after the last row.

        Returns:
            A tuple of the offset of the first byte and the offset after the last byte.
        """
        start_offset = self.offset + start * self.row_bytes
        stop_offset = self.offset + stop * self.row_bytes
        return start_offset, stop_offset


@dataclass(frozen=True)
class Header:
    """The checked header of a file.

    Attributes:
        tensors: Name of a tensor -> its description, in the order of the header.
        metadata: Key -> text that the writer of the file added.
        end_offset: Offset in the file of the byte after the header.
    """

    tensors: dict[str, Tensor]
    metadata: Mapping[str, Any]
    end_offset: int


def read_header(
    read: Callable[[int, int], bytes],
    size: int,
    file_name: str,
    error_type: type[InputError] | type[RunError],
) -> Header:
    """Reads and checks the header of a file.

    The length of the header is checked before the header is read.

    Args:
        read: A function that takes a start and an end offset within the file and returns the
            bytes between them.
        size: The size of the file in bytes.
        file_name: The name of the file, for messages.
        error_type: The type of the exception for a file that is not valid. The file is not valid if
            it is no safetensors file, if its size differs from the size that its header describes,
            or if a tensor has a dtype that is not in DTYPES.

    Raises:
        InputError: If the file is not valid and `error_type` is InputError.
        RunError: If the file is not valid and `error_type` is RunError.
    """
    incomplete_file_message_start = (
        f"{file_name}: not a complete safetensors file: has {size:,} bytes, its header"
    )
    first_bytes = read(0, min(FIRST_BYTES, size))
    header_length = int.from_bytes(first_bytes[:LENGTH_BYTES], "little")
    if not 0 < header_length <= min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise error_type(f"{incomplete_file_message_start} would have {header_length:,}")
    header_end = LENGTH_BYTES + header_length
    header_json = first_bytes[LENGTH_BYTES:header_end]
    if header_end > len(first_bytes):
        header_json += read(len(first_bytes), header_end)
    try:
        header_entry_by_key = json.loads(header_json)
        metadata = header_entry_by_key.pop(METADATA_KEY, {})
        if not isinstance(metadata, dict):
            raise ValueError(f"{METADATA_KEY} is {metadata!r:.40}")
        tensor_by_name = {}
        for tensor_name, header_entry in header_entry_by_key.items():
            if header_entry["dtype"] not in DTYPES:
                raise error_type(
                    f"{file_name}: tensor {tensor_name} is {header_entry['dtype']}, which is not "
                    "read"
                )
            tensor_by_name[tensor_name] = _parse_tensor(header_entry, header_end)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise error_type(f"{file_name}: not a safetensors file: {error!r}") from error
    expected_file_bytes = max(
        (tensor.end for tensor in tensor_by_name.values()), default=header_end
    )
    if expected_file_bytes != size:
        raise error_type(f"{incomplete_file_message_start} describes {expected_file_bytes:,}")
    return Header(tensor_by_name, metadata, header_end)


def _parse_tensor(fields: Mapping[str, Any], header_end: int) -> Tensor:
    """Returns the description of a tensor in a header.

    Args:
        fields: The fields of the tensor in the JSON of the header. The caller has checked that the
            dtype is a key of DTYPES.
        header_end: The offset of the byte after the header.

    Raises:
        KeyError: If a field is missing.
        TypeError: If a field is not a list.
        ValueError: If a size or an offset is not a whole number of at least 0, or if the offsets
            contradict the shape.
    """
    start_offset, stop_offset = fields["data_offsets"]
    tensor_shape = tuple(fields["shape"]) or (1,)
    for size_or_offset in (start_offset, stop_offset, *tensor_shape):
        if type(size_or_offset) is not int or size_or_offset < 0:
            raise ValueError(
                f"{size_or_offset!r:.40} in its header, expected a whole number from 0 on"
            )
    tensor = Tensor(DTYPES[fields["dtype"]], tensor_shape, header_end + start_offset)
    if tensor.end != header_end + stop_offset:
        raise ValueError("a tensor's size does not follow from its shape")
    return tensor


def pack_header(
    tensors: Mapping[str, tuple[np.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Returns the first bytes of a safetensors file: the length of its header, and the header.

    The header is padded with spaces, so that the tensors begin at a multiple of 8 bytes.

    Args:
        tensors: Name of a tensor -> tuple of its dtype and its shape. The bytes of the tensors
            follow the header in this order.
        metadata: Key -> text to add to the header. Empty for none.
    """
    header_fields: dict[str, Any] = {}
    if metadata:
        header_fields[METADATA_KEY] = dict(metadata)
    tensor_start_offset = 0
    for tensor_name, (dtype, shape) in tensors.items():
        tensor_end_offset = tensor_start_offset + dtype.itemsize * math.prod(shape)
        header_fields[tensor_name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [tensor_start_offset, tensor_end_offset],
        }
        tensor_start_offset = tensor_end_offset
    header_json = json.dumps(header_fields, ensure_ascii=False, separators=(",", ":")).encode()
    header_json += b" " * (-len(header_json) % 8)
    return struct.pack("<Q", len(header_json)) + header_json
