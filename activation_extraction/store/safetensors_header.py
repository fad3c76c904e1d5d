"""What the header of any safetensors file says of its tensors, whoever wrote it.

The layout is described at https://huggingface.co/docs/safetensors: 8 bytes with the length of the
header, the header as JSON, and the tensors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
}
LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors library


@dataclass(frozen=True)
class Tensor:
    """Where a file keeps a tensor: its dtype, its shape, and its first byte in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], start: int) -> "Tensor":
        """From its entry in the header. start: the byte after the header.

        Raises KeyError, TypeError or ValueError for an entry that is damaged, or of a dtype that is
        not in DTYPES.
        """
        begin, end = entry["data_offsets"]
        tensor = cls(DTYPES[entry["dtype"]], tuple(entry["shape"]), start + begin)
        if type(begin) is not int or type(end) is not int or begin < 0:
            raise ValueError(f"data_offsets {begin!r:.40}, {end!r:.40}")
        if any(type(size) is not int or size < 0 for size in tensor.shape):
            raise ValueError(f"shape {tensor.shape}")
        if tensor.end != start + end:
            raise ValueError("a tensor's size does not follow from its shape")
        return tensor

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.offset + self.dtype.itemsize * math.prod(self.shape)
