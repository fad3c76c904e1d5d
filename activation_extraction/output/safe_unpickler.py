"""Unpickles a shard that somebody else may have written, without running any code in it.

Knows plain containers and NumPy arrays of numbers, and refuses every other pickle.
"""

import pickle
import sys
from dataclasses import dataclass
from typing import IO, Any, ClassVar

import ml_dtypes
import numpy as np

from activation_extraction.cli.errors import RunError

# The instructions that a shard's pickle may use: those for plain containers and arrays.
INSTRUCTIONS = b"".join(
    (
        *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK),
        *(pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
        *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
        *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4),
        *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
        *(pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8),
        *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
        *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
        *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
        *(pickle.STACK_GLOBAL, pickle.REDUCE),
    )
)


class UnsafeError(RunError):
    """A shard contains something that none of ours contains; none of it was run."""


def unpickle(stream: Any, limit: int) -> Any:
    """Reads a pickle of plain containers and NumPy arrays of numbers.

    Raises UnsafeError for anything else, and if it unpacks to more than `limit` bytes.
    """
    return _SafeUnpickler(_LimitedReader(stream, limit)).load()


class _LimitedReader:
    """The unpickler's input, which refuses to unpack more than `limit` bytes."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._stream = stream
        self._limit = self._left = limit

    def _take(self, size: int) -> None:
        if size < 0 or size > self._left:
            raise UnsafeError(f"unpacks to more than {self._limit} bytes")
        self._left -= size

    def read(self, size: int = -1) -> bytes:
        self._take(size)
        return self._stream.read(size)

    def readinto(self, buffer: memoryview) -> int:
        self._take(len(buffer))
        view, done = memoryview(buffer), 0
        while done < len(view) and (count := self._stream.readinto(view[done:])):  # type: ignore
            done += count
        return done

    def readline(self) -> bytes:
        line = self._stream.readline(self._left + 1)
        self._take(len(line))
        return line


class _SafeUnpickler(pickle._Unpickler):
    """Knows how NumPy pickles arrays of numbers, and nothing else.

    The names in _KNOWN stand for our own functions, which make an empty array or a number type.
    Anything else that a pickle asks to import is refused before it is called, and so is every
    instruction that no shard of ours has. This derives from the unpickler in Python: in the one in
    C, six bytes can claim 64 GB, and a pickle can set attributes of what it names.
    """

    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if found is None:
            wanted = repr(f"{module}.{name}")
            raise UnsafeError(f"refused: would import {wanted:.80}; no shard of ours does")
        return found

    def _refuse(self) -> None:
        raise UnsafeError("refused: holds a pickle instruction that no shard of ours has")

    def _build(self) -> None:
        """Gives an array its content, and a number type its byte order: only this machine's."""
        state = self.stack.pop()  # type: ignore[attr-defined]
        built = self.stack[-1]  # type: ignore[attr-defined]
        if isinstance(built, _NumberType):
            order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
            if order not in ("<" if sys.byteorder == "little" else ">", "|", "="):
                raise UnsafeError("refused: an array in another byte order")
        elif isinstance(built, np.ndarray):
            version, shape, kind, fortran, data = state
            dtype = kind.dtype if isinstance(kind, _NumberType) else None
            if dtype is None or not isinstance(data, bytes):
                raise UnsafeError("refused: an array that NumPy would not have pickled so")
            built.__setstate__((version, shape, dtype, fortran, data))
        else:
            raise UnsafeError(f"refused: would change a {type(built).__name__}")

    dispatch: ClassVar[dict[int, Any]] = {
        **dict.fromkeys(range(256), _refuse),
        **{code: pickle._Unpickler.dispatch[code] for code in INSTRUCTIONS},
        pickle.BUILD[0]: _build,
    }


@dataclass(frozen=True)
class _NumberType:
    """Stands for a type of numbers, or for a class that a pickle may name but not call."""

    dtype: np.dtype | None = None


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
_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _number_type,
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("ml_dtypes", "bfloat16"): _NumberType(np.dtype(ml_dtypes.bfloat16)),
}
