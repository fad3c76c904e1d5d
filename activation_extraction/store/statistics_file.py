"""The statistics of a shard for every dimension: `shard_0001.npz`, beside the shard.

It holds the sums of each hook (see `Sums`), as arrays `HOOK/FIELD` that `numpy.load` reads. They
are too long for the shard's JSON, which has their sha256. The bytes depend on the sums alone.
"""

import io
import os
import threading
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import fields

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.store.statistics import BUCKETS, Sums

UNREADABLE = (
    *(ValueError, KeyError, OSError, EOFError, RuntimeError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error),
)
DTYPES = ("<i8", "<f8", "<f8", "<f8", "<f8")  # of the fields
FIELDS = [field.name for field in fields(Sums)]

# numpy.load parses headers with `ast`. In CPython before 3.11.8 and 3.12.2 two threads that do so
# at a time now and then raise SystemError (python/cpython#106905). A fork waits for the lock, so
# that the child does not find it taken.
_one_parses = threading.Lock()
os.register_at_fork(
    before=_one_parses.acquire,
    after_in_parent=_one_parses.release,
    after_in_child=_one_parses.release,
)


def statistics_name(number: int) -> str:
    """Name of the file of shard `number`."""
    return f"shard_{number:04d}.npz"


def pack_sums(sums: Mapping[str, Sums]) -> bytes:
    """The content of the file. sums: by hook."""
    arrays = {f"{hook}/{name}": getattr(sums[hook], name) for hook in sums for name in FIELDS}
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpack_sums(data: bytes, hooks: Iterable[tuple[str, int]], where: str) -> dict[str, Sums]:
    """The inverse of `pack_sums`, for some of the hooks: name and width.

    Raises RunError when the data is not what was written. where: names the file.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive, _one_parses:
            entries = archive.infolist()
            if any(each.file_size != each.compress_size for each in entries):
                raise ValueError("it is compressed")
            if sum(each.file_size for each in entries) > len(data):
                raise ValueError("its arrays overlap")
            return {hook: _sums(archive, hook, width) for hook, width in hooks}
    except UNREADABLE as error:
        raise RunError(f"{where}: cannot be read: {error}") from error


def _sums(archive: zipfile.ZipFile, hook: str, width: int) -> Sums:
    shapes = [(BUCKETS,), (BUCKETS,), (2, width), (2, width), ()]
    return Sums(
        *(
            _array(archive.read(f"{hook}/{name}.npy"), shape, np.dtype(kind), f"{hook}/{name}")
            for name, shape, kind in zip(FIELDS, shapes, DTYPES, strict=True)
        )
    )


def _array(data: bytes, shape: tuple[int, ...], dtype: np.dtype, where: str) -> np.ndarray:
    """An array from the content of a .npy file. `numpy.load` would allocate whatever its header
    says before it looks for the values."""
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f"{where} is of an unknown version")
    found, fortran, kind = np.lib.format.read_array_header_1_0(file)
    if (found, kind, fortran and len(shape) > 1) != (shape, dtype, False):
        raise ValueError(f"{where} is {kind} {found}, expected {dtype} {shape}")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape).copy()
