"""Writes a tensor that `torch.load(path, weights_only=True)` reads. Needs no PyTorch.

Such a file is a ZIP archive, not compressed: a pickle that names the tensor's dtype and shape, and
its values. See torch/serialization.py for the layout.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Iterable
from typing import Any

import numpy as np

FOLDER = "tensor"  # within the archive; any name will do


def write_tensor(file: Any, count: int, parts: Iterable[np.ndarray]) -> None:
    """Writes `count` int64 values, which come in parts, as a tensor of shape (count,)."""
    with zipfile.ZipFile(_Appending(file), "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "data.pkl", [_pickle(count)])
        _add(archive, "byteorder", [b"little"])
        _add(archive, "data/0", (part.astype("<i8").data for part in parts))
        _add(archive, "version", [b"3\n"])


class _Appending(io.RawIOBase):
    """A file that cannot seek, so that ZipFile only appends to it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def writable(self) -> bool:
        return True


def _add(archive: zipfile.ZipFile, name: str, parts: Iterable[Any]) -> None:
    info = zipfile.ZipInfo(f"{FOLDER}/{name}")  # dated 1980: the bytes depend on the values alone
    with archive.open(info, "w", force_zip64=True) as file:
        for part in parts:
            file.write(part)


def _pickle(count: int) -> bytes:
    """`_rebuild_tensor_v2(storage, 0, (count,), (1,), False, OrderedDict())`, where the storage is
    the persistent id ("storage", LongStorage, "0", "cpu", count)."""
    storage = [
        *(pickle.MARK, _text("storage"), _global("torch LongStorage"), _text("0"), _text("cpu")),
        *(_integer(count), pickle.TUPLE, pickle.BINPERSID),
    ]
    arguments = [
        *(pickle.MARK, *storage, _integer(0), _integer(count), pickle.TUPLE1),
        *(_integer(1), pickle.TUPLE1, pickle.NEWFALSE, _global("collections OrderedDict")),
        *(pickle.EMPTY_TUPLE, pickle.REDUCE, pickle.TUPLE),
    ]
    call = [_global("torch._utils _rebuild_tensor_v2"), *arguments, pickle.REDUCE, pickle.STOP]
    return b"".join([pickle.PROTO, b"\x02", *call])


def _global(name: str) -> bytes:
    module, attribute = name.split()
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


def _text(text: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(text)) + text.encode()


def _integer(value: int) -> bytes:
    return pickle.LONG1 + b"\x08" + struct.pack("<q", value)
