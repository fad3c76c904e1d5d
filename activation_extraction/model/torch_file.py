"""Reads the tensors of a PyTorch file (.pt) as NumPy arrays, without importing PyTorch.

A .pt file is a zip archive without compression. It contains a pickle of the saved object, in which
each tensor refers to a storage, and the bytes of the storages. A storage is the flat memory of one
or more tensors. The unpickler replaces a few of PyTorch's functions and classes, which are named in
the pickle, by functions and dtypes of this module, and rejects all other names. The arrays are
views of the file, which is mapped into memory.
"""

import io
import zipfile
from pathlib import Path
from typing import IO, Any

import ml_dtypes  # noqa: F401 (registers bfloat16 with NumPy)
import numpy as np

from activation_extraction.common.allow_list import AllowListUnpickler
from activation_extraction.common.errors import InputError, one_line


def read_torch_file(path: Path, flag_with_value: str) -> Any:
    """Reads the object in a file that torch.save wrote.

    Args:
        path: The local path of the file.
        flag_with_value: The flag and its value, with which messages begin.

    Returns:
        The saved object: plain containers and values, with NumPy arrays in place of tensors.

    Raises:
        InputError: If the file was not written by torch.save, is damaged, or contains other objects
            than tensors and plain containers and values.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            return _Unpickler(file, archive).load()
    except InputError as error:
        raise InputError(f"{flag_with_value}: {error}") from error
    except Exception as error:  # a damaged file may raise exceptions of any type
        raise InputError(
            f"{flag_with_value}: not a file of PyTorch tensors: {one_line(error):.200}"
        ) from error


def _tensor(
    storage: tuple[str, np.ndarray], offset: int, shape: Any, strides: Any, *_: Any
) -> np.ndarray:
    """Makes an array from a storage, in place of torch._utils._rebuild_tensor_v2.

    A storage is the flat memory of one or more tensors.

    Args:
        storage: A tuple of the name of the dtype and the content of the storage, uint8 (bytes,), as
            `persistent_load` returns it.
        offset: The number of values in the storage before the tensor's first value.
        shape: The shape of the tensor.
        strides: The distance between neighbouring values along each axis, in values.
        _: Other arguments, which are ignored.

    Returns:
        The array, a view of the storage.

    Raises:
        ValueError: If the tensor exceeds the storage. NumPy checks this.
    """
    dtype_name, storage_content = storage
    dtype = np.dtype(dtype_name)
    byte_offset = offset * dtype.itemsize
    byte_strides = [stride * dtype.itemsize for stride in strides]
    return np.ndarray(shape, dtype, storage_content, byte_offset, byte_strides)


def _parameter(tensor: np.ndarray, *_: Any) -> np.ndarray:
    """Returns a parameter's array unchanged, in place of torch._utils._rebuild_parameter.

    Args:
        tensor: The array of the parameter's tensor.
        _: Other arguments, which are ignored.
    """
    return tensor


class _Unpickler(AllowListUnpickler):
    """Unpickles plain containers, plain values and tensors, and rejects everything else."""

    replacement_by_allowed_name = {
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
    # Type of the exception for a name in the pickle that `replacement_by_allowed_name` lacks.
    error_type = InputError
    refusal_reason = "only tensors are read"

    def __init__(self, file: IO[bytes], archive: zipfile.ZipFile) -> None:
        if any(
            archive_member.compress_type != zipfile.ZIP_STORED
            for archive_member in archive.infolist()
        ):
            raise ValueError("the archive is compressed")
        pickle_names = [
            member_name for member_name in archive.namelist() if member_name.endswith("data.pkl")
        ]
        (pickle_name,) = pickle_names
        super().__init__(io.BytesIO(archive.read(pickle_name)))
        self._file = file
        self._archive = archive
        self._name_prefix = pickle_name.removesuffix("data.pkl")

    def persistent_load(self, pid: Any) -> tuple[str, np.ndarray]:
        """Returns the storage that a persistent id in the pickle names, without reading its bytes.

        Args:
            pid: The persistent id: a tuple of "storage", the name of the storage's dtype (see
                `replacement_by_allowed_name`), the name of the storage in the archive, and other
                elements, which are ignored.

        Returns:
            A tuple of:
                The name of the dtype.
                The content of the storage, uint8 (bytes,), mapped from the file into memory.
        """
        _, dtype_name, storage_name, *_ = pid
        storage_entry = self._archive.getinfo(f"{self._name_prefix}data/{storage_name}")
        # Opening the entry moves the position of the file to the bytes of the entry.
        with self._archive.open(storage_entry):
            data_offset = self._file.tell()
        return dtype_name, np.memmap(
            self._file, np.uint8, "r", data_offset, (storage_entry.file_size,)
        )
