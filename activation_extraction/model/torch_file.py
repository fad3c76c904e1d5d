"""Reads the tensors of a PyTorch file (.pt) as NumPy arrays, without PyTorch and without its code.

Such a file is a zip archive of a pickle and of the bytes of every storage, which are not
compressed. The unpickler knows a list of names, which stand for functions of this module; a pickle
with any other name is refused. Arrays are views of the file, which is mapped into memory.
"""

import io
import zipfile
from pathlib import Path
from typing import IO, Any

import ml_dtypes  # noqa: F401 (NumPy knows bfloat16 by it)
import numpy as np

from activation_extraction.common.allow_list import AllowListUnpickler
from activation_extraction.common.errors import InputError, one_line


def read_torch_file(path: Path, where: str) -> Any:
    """Returns what torch.save has stored: containers of plain values and NumPy arrays.

    where: names the file in messages. Raises InputError for a file that is no such archive, or
    that would import anything but tensors.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            return _Unpickler(file, archive).load()
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except Exception as error:  # broken bytes may raise anything
        raise InputError(
            f"{where}: not a file of PyTorch tensors: {one_line(error):.200}"
        ) from error


def _tensor(
    storage: tuple[str, np.ndarray], offset: int, shape: Any, strides: Any, *_: Any
) -> np.ndarray:
    """Stands for torch's function that makes a tensor of a storage; NumPy refuses one that does not
    fit it. offset, strides: in numbers."""
    dtype, data = np.dtype(storage[0]), storage[1]
    steps = [step * dtype.itemsize for step in strides]
    return np.ndarray(shape, dtype, data, offset * dtype.itemsize, steps)


def _parameter(tensor: np.ndarray, *_: Any) -> np.ndarray:
    return tensor


class _Unpickler(AllowListUnpickler):
    """Unpickles plain containers and tensors, and nothing else."""

    allowed = {
        "collections.OrderedDict": dict,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_parameter": _parameter,
        "torch.FloatStorage": "float32",
        "torch.DoubleStorage": "float64",
        "torch.HalfStorage": "float16",
        "torch.BFloat16Storage": "bfloat16",
        "torch.LongStorage": "int64",
        "torch.IntStorage": "int32",
    }
    error, why = InputError, "only tensors are read"

    def __init__(self, file: IO[bytes], archive: zipfile.ZipFile) -> None:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("it is compressed")
        (found,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        super().__init__(io.BytesIO(archive.read(found)))
        self._file, self._archive = file, archive
        self._root = found.removesuffix("data.pkl")

    def persistent_load(self, pid: Any) -> tuple[str, np.ndarray]:
        """Returns the dtype and the bytes of a storage. pid: "storage", its type, its name ..."""
        member = self._archive.getinfo(f"{self._root}data/{pid[2]}")
        with self._archive.open(member):  # which reads up to the bytes of the storage
            start = self._file.tell()
        return pid[1], np.memmap(self._file, np.uint8, "r", start, (member.file_size,))
