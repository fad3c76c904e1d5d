"""Writes a tensor for torch.load without PyTorch.

Such a file is an uncompressed ZIP archive of a pickle, which has the tensor's dtype and shape, and
of the tensor's values (see torch/serialization.py).
"""

import io
import math
import struct
import zipfile
from collections.abc import Iterable
from typing import Any

import numpy as np

STORAGES = {"int64": b"LongStorage", "float32": b"FloatStorage"}


def write_tensor(
    file: Any, dtype: str, shape: tuple[int, ...], parts: Iterable[np.ndarray]
) -> None:
    """Writes a tensor for torch.load(path, weights_only=True).

    dtype: a key of STORAGES. parts: the values in order, in any number of arrays, which are cast to
    it.
    """
    contents: dict[str, Iterable[Any]] = {
        "data.pkl": [_pickle(STORAGES[dtype], shape)],
        "byteorder": [b"little"],
        "data/0": (part.astype(np.dtype(dtype).newbyteorder("<")).data for part in parts),
        "version": [b"3\n"],
    }
    with zipfile.ZipFile(_Appending(file), "w", zipfile.ZIP_STORED) as archive:
        for name, pieces in contents.items():
            # ZipInfo dates it 1980, so the bytes depend on the values alone. Any folder name works.
            with archive.open(zipfile.ZipInfo(f"tensor/{name}"), "w", force_zip64=True) as entry:
                for piece in pieces:
                    entry.write(piece)


class _Appending(io.RawIOBase):
    """A file that cannot seek, so that ZipFile only appends to it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def writable(self) -> bool:
        return True


def _pickle(storage: bytes, shape: tuple[int, ...]) -> bytes:
    """Pickles `_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())`, where the
    storage is the persistent id ("storage", LongStorage, "0", "cpu", count)."""

    def integers(*values: int) -> bytes:
        return b"".join(b"\x8a\x08" + struct.pack("<q", value) for value in values)

    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    pieces = [
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((",  # protocol 2, the function, two marks
        b"X\7\0\0\0storagectorch\n" + storage + b"\nX\1\0\0\0" + b"0X\3\0\0\0cpu",
        *(integers(math.prod(shape)), b"tQ"),  # a tuple, which is a persistent id
        integers(0),  # the offset
        *(b"(", integers(*shape), b"t(", integers(*strides), b"t"),
        b"\x89ccollections\nOrderedDict\n)R",  # False, and an empty OrderedDict
        b"tR.",  # the arguments as a tuple; the call; stop
    ]
    return b"".join(pieces)
