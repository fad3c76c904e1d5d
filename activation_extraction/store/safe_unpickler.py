"""Unpickles a shard that somebody else may have written, without running any code in it.

A pickle runs code by naming a function or a class. Here the only names are those of NumPy's arrays
and of their number types, and functions of this module stand for them. Every other name is refused.
"""

import math
import pickle
import sys
from dataclasses import dataclass
from typing import IO, Any, ClassVar

import ml_dtypes
import numpy as np

from activation_extraction.common.errors import RunError

CHUNK_BYTES = 64 * 2**20  # read at once, or as much as has been read of the same value
# These opcodes bypass `find_class`, or take memory for as many bytes as the pickle claims to have.
REFUSED = b"".join((pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8))


class UnsafeError(RunError):
    """A shard contains something that this program does not write. None of it was run."""


def unpickle(stream: IO[bytes], limit: int) -> Any:
    """Reads a pickle of plain containers and NumPy arrays of numbers.

    Raises UnsafeError for any other content, and if it unpacks to more than `limit` bytes.
    """
    return _Unpickler(_LimitedReader(stream, limit)).load()


class _LimitedReader:
    """The unpickler's input, which refuses to unpack more than `limit` bytes."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._stream = stream
        self._limit = self._left = limit

    def read(self, size: int) -> bytes:
        """Reads large values in chunks: memory is taken for bytes that are there, not claimed."""
        if not 0 <= size <= self._left:
            raise UnsafeError(f"unpacks to more than {self._limit} bytes")
        self._left -= size
        if size <= CHUNK_BYTES:
            return self._stream.read(size)
        pieces, left = [], size
        while left and (piece := self._stream.read(min(left, max(CHUNK_BYTES, size - left)))):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def readline(self) -> bytes:
        raise UnsafeError("refused: holds a pickle instruction that no shard of ours has")


@dataclass(frozen=True)
class _NumberType:
    """A placeholder for a number type, or for a class that a pickle may name but not call."""

    dtype: np.dtype | None = None


class _Unpickler(pickle._Unpickler):
    """Unpickles plain containers and NumPy arrays of numbers, and nothing else.

    The base class is the unpickler in Python: in the one in C, six bytes can claim 64 GB.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED_NAMES:
            full_name = repr(f"{module}.{name}")
            raise UnsafeError(f"refused: would import {full_name:.80}; no shard of ours does")
        return _ALLOWED_NAMES[module, name]

    def _refuse(self) -> None:
        raise UnsafeError("refused: holds a pickle instruction that no shard of ours has")

    def _build(self) -> None:
        """Fills an array, or checks that a number type has the byte order of this machine.

        NumPy's own types would believe a state that makes them read foreign memory.
        """
        state = self.stack.pop()  # type: ignore[attr-defined]
        built = self.stack[-1]  # type: ignore[attr-defined]
        if isinstance(built, _NumberType):
            order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
            if order not in ("<" if sys.byteorder == "little" else ">", "|", "="):
                raise UnsafeError("refused: an array in another byte order")
        elif isinstance(built, np.ndarray):
            _fill(built, *state)
        else:
            raise UnsafeError(f"refused: would change a {type(built).__name__}")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        **dict.fromkeys(REFUSED, _refuse),
        pickle.BUILD[0]: _build,
    }


def _fill(array: np.ndarray, version: Any, shape: Any, kind: Any, fortran: Any, data: Any) -> None:
    """Fills an array, whose size has to match its bytes."""
    dtype = kind.dtype if isinstance(kind, _NumberType) else None
    sizes = shape if type(shape) is tuple else (None,)
    if (
        dtype is None
        or type(data) is not bytes
        or any(type(size) is not int or size < 0 for size in sizes)
    ):
        raise UnsafeError("refused: an array that NumPy would not have pickled so")
    size = dtype.itemsize * math.prod(shape)
    if size != len(data):
        raise UnsafeError(f"refused: an array of {size} bytes, of which {len(data)} are there")
    array.__setstate__((version, shape, dtype, fortran, data))


def _empty_array(kind: Any, shape: Any, _code: Any) -> np.ndarray:
    if kind is not _ARRAY or shape != (0,):
        raise UnsafeError("refused: an array that NumPy would not have pickled so")
    return np.empty((0,), np.int8)


def _number_type(code: Any, _align: Any = False, _copy: Any = True) -> _NumberType:
    if isinstance(code, str) and code in NUMBER_TYPES:
        return _NumberType(np.dtype(code))
    if isinstance(code, _NumberType) and code.dtype is not None:
        return code
    name = repr(code) if isinstance(code, str) else type(code).__name__
    raise UnsafeError(f"refused: an array of type {name:.80}")


NUMBER_TYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
_ARRAY = _NumberType()
_ALLOWED_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _number_type,
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("ml_dtypes", "bfloat16"): _NumberType(np.dtype(ml_dtypes.bfloat16)),
}
