"""Reads the tensors of a PyTorch file (.pt) as NumPy arrays, without PyTorch and without its code.

Such a file is a zip archive of a pickle and of the bytes of every storage, which are not
compressed. The unpickler knows a list of names, which stand for functions of this module; a pickle
with any other name is refused. Arrays are views of the file, which is mapped into memory.
"""

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from activation_extraction.common.allow_list import AllowListUnpickler
from activation_extraction.common.errors import InputError, one_line

MOST_PICKLE = 2**20  # bytes of the pickle, which only describes the tensors
LOCAL_HEADER = 30  # bytes of a zip's local header, before the name and an extra field
STORAGES = {
    "FloatStorage": np.dtype("<f4"),
    "DoubleStorage": np.dtype("<f8"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
}


def read_torch_file(path: Path, where: str) -> Any:
    """Returns what torch.save has stored: containers of plain values and NumPy arrays.

    where: names the file in messages. Raises InputError for a file that is no such archive, or
    that would import anything but tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (found,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
            if archive.getinfo(found).file_size > MOST_PICKLE:
                raise ValueError("its pickle holds more than descriptions of tensors")
            data, root = archive.read(found), found.removesuffix("data.pkl")
            members = {each.filename.removeprefix(root): each for each in archive.infolist()}
        return _Unpickler(data, np.memmap(path, np.uint8, "r"), members).load()
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except Exception as error:  # broken bytes may raise anything
        raise InputError(
            f"{where}: not a file of PyTorch tensors: {one_line(error):.200}"
        ) from error


def _tensor(storage: np.ndarray, offset: int, shape: Any, strides: Any, *_: Any) -> np.ndarray:
    """Stands for torch's function that makes a tensor of a storage. strides: in numbers."""
    numbers = offset, *shape, *strides
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"a tensor of shape {shape} and strides {strides}")
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if math.prod(shape) > len(storage) or (0 not in shape and last >= len(storage)):
        raise ValueError(f"a tensor of shape {shape} does not fit its storage of {len(storage)}")
    steps = [step * storage.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)


def _parameter(tensor: np.ndarray, *_: Any) -> np.ndarray:
    return tensor


KNOWN: dict[str, Any] = {
    "collections.OrderedDict": dict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    **{f"torch.{name}": dtype for name, dtype in STORAGES.items()},
}


class _Unpickler(AllowListUnpickler):
    """Unpickles plain containers and tensors, and nothing else."""

    allowed, error, why = KNOWN, InputError, "only tensors are read"

    def __init__(
        self, data: bytes, content: np.ndarray, members: dict[str, zipfile.ZipInfo]
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._content, self._members = content, members

    def persistent_load(self, pid: Any) -> np.ndarray:
        """Returns a storage. pid: ("storage", its type, its name, a device, how many numbers)."""
        _, dtype, name, _, count = pid
        member = self._members[f"data/{name}"]
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"storage {name} is compressed")
        header = self._content[member.header_offset :][:LOCAL_HEADER].tobytes()
        lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        start = member.header_offset + LOCAL_HEADER + sum(lengths)
        size = int(count) * dtype.itemsize
        if not 0 <= size <= member.file_size or start + size > len(self._content):
            raise ValueError(f"storage {name} has {member.file_size} bytes, expected {size}")
        return self._content[start : start + size].view(np.ndarray).view(dtype)
