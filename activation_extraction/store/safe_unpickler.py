"""Unpickles a shard that somebody else may have written, without running any code in it.

It accepts plain containers and NumPy arrays of numbers, and refuses every other pickle.
"""

import math
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any, ClassVar

import ml_dtypes
import numpy as np

from activation_extraction.common.errors import RunError

# The opcodes that a shard's pickle may use: those for plain containers and arrays.
OPCODES = b"".join(
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
# The opcodes that make or keep an object, which takes up to about 100 bytes of memory. For each of
# them our own shards, even of samples without a token, have 3 bytes, or 1/16 of a byte if gzipped.
COUNTED_OPCODES = b"".join(
    (
        *(pickle.MEMOIZE, pickle.BINFLOAT, pickle.BININT, pickle.BININT2, pickle.LONG1),
        *(pickle.LONG4, pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
        *(pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8, pickle.TUPLE1, pickle.TUPLE2),
        *(pickle.TUPLE3, pickle.TUPLE, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.REDUCE),
    )
)
MIN_OBJECTS = 10_000
BYTES_PER_OBJECT, OBJECTS_PER_FILE_BYTE = 2, 32
MAX_DEPTH = 8  # marks that may be open at the same time; our own shards have at most 4
KEY_BITS = 63  # the most bits of a number that is a key: longer ones can all have the same hash
CHUNK_BYTES = 64 * 2**20  # read at once, or as much as has been read of the same value


class UnsafeError(RunError):
    """A shard contains something that this program does not write. None of it was run."""


def unpickle(stream: Any, limit: int, file_size: int) -> Any:
    """Reads a pickle of plain containers and NumPy arrays of numbers.

    file_size: the bytes of the file, which may be compressed. Raises UnsafeError for any other
    content, if it unpacks to more than `limit` bytes, or if it would take far more memory.
    """
    return _SafeUnpickler(_LimitedReader(stream, limit), file_size).load()


class _LimitedReader:
    """The unpickler's input, which refuses to unpack more than `limit` bytes."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self.bytes_read = 0

    def read(self, size: int) -> bytes:
        if size < 0 or size > self._limit - self.bytes_read:
            raise UnsafeError(f"unpacks to more than {self._limit} bytes")
        self.bytes_read += size
        if size <= CHUNK_BYTES:
            return self._stream.read(size)
        pieces, left = [], size
        while left and (piece := self._stream.read(min(left, max(CHUNK_BYTES, size - left)))):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def readline(self) -> bytes:
        raise UnsafeError("refused: holds a pickle instruction that no shard of ours has")


def _counted(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps the loader of an opcode that makes an object, and counts the objects."""

    def counted(unpickler: "_SafeUnpickler") -> None:
        unpickler.objects += 1
        if unpickler.objects > unpickler.max_objects:
            unpickler.check_objects()
        load(unpickler)

    return counted


class _SafeUnpickler(pickle._Unpickler):
    """Unpickles plain containers and NumPy arrays of numbers, and nothing else.

    The names in _ALLOWED_NAMES stand for our own functions, which make an empty array or a number
    type. Every other name is refused before anything is called, and so is every opcode that this
    program does not write. The base class is the unpickler in Python: in the one in C, six bytes
    can claim 64 GB, and a pickle can set attributes of the objects that it names.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED_NAMES:
            full_name = repr(f"{module}.{name}")
            raise UnsafeError(f"refused: would import {full_name:.80}; no shard of ours does")
        return _ALLOWED_NAMES[module, name]

    def __init__(self, reader: _LimitedReader, file_size: int) -> None:
        super().__init__(reader)  # type: ignore[arg-type]
        self._reader = reader
        self._file_size = file_size
        self._array_bytes = self.objects = self.max_objects = 0

    def _refuse(self) -> None:
        raise UnsafeError("refused: holds a pickle instruction that no shard of ours has")

    def _build(self) -> None:
        """Fills an array, or checks that a number type has the byte order of this machine."""
        state = self.stack.pop()  # type: ignore[attr-defined]
        built = self.stack[-1]  # type: ignore[attr-defined]
        if isinstance(built, _NumberType):
            order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
            if order not in ("<" if sys.byteorder == "little" else ">", "|", "="):
                raise UnsafeError("refused: an array in another byte order")
        elif isinstance(built, np.ndarray):
            self._fill(built, *state)
        else:
            raise UnsafeError(f"refused: would change a {type(built).__name__}")

    def _fill(self, array: np.ndarray, version: Any, shape: Any, kind: Any, *rest: Any) -> None:
        """Fills an array. Its size has to match its bytes, which no other array may share."""
        fortran, data = rest
        dtype = kind.dtype if isinstance(kind, _NumberType) else None
        if dtype is None or type(data) is not bytes or not _is_shape(shape):
            raise UnsafeError("refused: an array that NumPy would not have pickled so")
        self._array_bytes += len(data)
        size = dtype.itemsize * math.prod(shape)
        if size != len(data) or self._array_bytes > self._reader.bytes_read:
            raise UnsafeError(f"refused: an array of {size} bytes, of which {len(data)} are there")
        flat = shape if size else (0,)  # NumPy would allocate (10**9, 0) as if it were (10**9, 1)
        array.__setstate__((version, flat, dtype, fortran, data))
        if flat != shape:
            array.resize(shape, refcheck=False)

    def check_objects(self) -> None:
        """Raises UnsafeError if there are more objects than the bytes read so far can hold."""
        by_bytes = self._reader.bytes_read // BYTES_PER_OBJECT
        self.max_objects = MIN_OBJECTS + min(by_bytes, OBJECTS_PER_FILE_BYTE * self._file_size)
        if self.objects > self.max_objects:
            raise UnsafeError("refused: holds far more objects than a shard of its size")

    def _mark(self) -> None:
        if len(self.metastack) >= MAX_DEPTH:  # type: ignore[attr-defined]
            raise UnsafeError("refused: is nested deeper than any shard of ours")
        self.load_mark()  # type: ignore[attr-defined]

    def _set_item(self) -> None:
        *_, target, key, _value = self.stack  # type: ignore[attr-defined]
        _check_items(target, [key])
        self.load_setitem()  # type: ignore[attr-defined]

    def _set_items(self) -> None:
        _check_items(self.metastack[-1][-1], self.stack[::2])  # type: ignore[attr-defined]
        self.load_setitems()  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Any]] = {
        **dict.fromkeys(range(256), _refuse),
        **{code: pickle._Unpickler.dispatch[code] for code in OPCODES},
        **{code: _counted(pickle._Unpickler.dispatch[code]) for code in COUNTED_OPCODES},
        pickle.MARK[0]: _mark,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.BUILD[0]: _build,
    }


def _is_shape(shape: Any) -> bool:
    return type(shape) is tuple and all(type(size) is int and size >= 0 for size in shape)


def _check_items(target: Any, keys: Sequence[Any]) -> None:
    """Raises UnsafeError for keys that may take long to hash, such as deeply nested tuples."""
    if type(target) is not dict:
        raise UnsafeError(f"refused: would change a {type(target).__name__}")
    for key in keys:
        if type(key) is not str and (type(key) is not int or key.bit_length() > KEY_BITS):
            raise UnsafeError("refused: a key that is neither a name nor a number")


@dataclass(frozen=True)
class _NumberType:
    """A placeholder for a number type, or for a class that a pickle may name but not call."""

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
_ALLOWED_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _number_type,
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("ml_dtypes", "bfloat16"): _NumberType(np.dtype(ml_dtypes.bfloat16)),
}
