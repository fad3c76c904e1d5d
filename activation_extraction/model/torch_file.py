"""Reads the tensors of a PyTorch file (.pt) as NumPy arrays, without PyTorch and without its code.

Such a file is a zip archive, without compression, of a pickle and of the bytes of every storage.
The unpickler knows the names of some of PyTorch's functions and classes, in whose place it uses
functions and dtypes of its own; a pickle with any other name is refused. Arrays are views of the
file, which is mapped into memory.
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
    """Returns the content of a file of torch.save: containers of plain values and NumPy arrays.

    Args:
        path: The local path of the file.
        where: The beginning of messages, which names the file for the user.

    Raises:
        InputError: The file is no such archive, or contains anything but tensors and plain
            containers.
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
    """Makes a tensor from a storage, in place of torch._utils._rebuild_tensor_v2.

    Args:
        storage: The name of its dtype, and its bytes.
        offset: The offset of the first value, in values.
        shape: The shape of the tensor.
        strides: The distance between two values along each axis, in values.

    Raises:
        ValueError: The tensor does not fit into the storage. NumPy raises it.
    """
    name, data = storage
    dtype = np.dtype(name)
    byte_strides = [stride * dtype.itemsize for stride in strides]
    return np.ndarray(shape, dtype, data, offset * dtype.itemsize, byte_strides)


def _parameter(tensor: np.ndarray, *_: Any) -> np.ndarray:
    """Returns the tensor of a parameter, in place of torch._utils._rebuild_parameter."""
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
        (pickle_name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        super().__init__(io.BytesIO(archive.read(pickle_name)))
        self._file = file
        self._archive = archive
        self._root = pickle_name.removesuffix("data.pkl")

    def persistent_load(self, pid: Any) -> tuple[str, np.ndarray]:
        """Returns the name of the dtype of a storage, and its bytes.

        Args:
            pid: A tuple of "storage", the type of the storage, which `allowed` maps to a dtype, the
                name of the storage in the archive, and more that is not needed.
        """
        _, dtype, name, *_ = pid
        member = self._archive.getinfo(f"{self._root}data/{name}")
        with self._archive.open(member):  # opening reads the header that is before the bytes
            start = self._file.tell()
        return dtype, np.memmap(self._file, np.uint8, "r", start, (member.file_size,))
