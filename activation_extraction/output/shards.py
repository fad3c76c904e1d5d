"""What a shard file looks like: writing it, reading it without running what is in it, and how a
file comes to be complete under its final name.

`pickle.loads(gzip.open(path).read())` gives a dict: layer (int, or hook name) -> list of records,
one per sample, in order. A record is a dict of plain values and NumPy arrays, see `Record`. The
bytes depend on the records alone. Read the file to its end: the checksum of gzip comes last, and
`pickle.load` stops before it.
"""

import hashlib
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import PickleBuffer
from typing import IO, Any, ClassVar, TypedDict

import ml_dtypes
import numpy as np
from isal import igzip, igzip_threaded

from activation_extraction.cli.errors import RunError, one_line
from activation_extraction.output.commits import DamagedError, unseal

# The instructions of a shard's pickle: what plain containers and arrays need, see `_Pickler`.
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
WRITE_BEHIND = 32 * 2**20  # bytes of a file after which the disk is set to work
COMPRESSION_LEVEL = 1
# What a shard may unpack to when no JSON says it: activations hardly compress.
GENEROUS_BYTES, GENEROUS_RATIO = 64 * 2**20, 16
# One more than cores, as one of them waits at times. 8 is an estimate: more outrun the sha256.
COMPRESSION_THREADS = min((os.cpu_count() or 1) + 1, 8)


class Record(TypedDict):
    """One sample at one hook."""

    sample_idx: int
    hook: str  # its full name, such as blocks.12.hook_mlp_out
    activation: np.ndarray  # (tokens, width)
    shape: tuple[int, ...]
    text_preview: str
    token_ids: np.ndarray | None  # int32 (tokens,)
    doc_id: str | int | float | None


Shard = dict[int | str, list[Record]]


class _CountingFile:
    """A file for writing that keeps the sha256, the size and the seconds spent writing."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._handed_over = 0
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.seconds = 0.0

    def write(self, data: bytes | PickleBuffer) -> int:
        began = time.perf_counter()
        size = self._file.write(data)
        self.sha256.update(data)
        self.size += size
        if sys.platform == "linux" and self.size - self._handed_over >= WRITE_BEHIND:
            # Begins to write to the disk and does not wait for it: little is left to sync. What is
            # on the disk already stays in memory, for the upload: nothing is told of that again.
            part = self._handed_over, self.size - self._handed_over
            os.posix_fadvise(self._file.fileno(), *part, os.POSIX_FADV_DONTNEED)
            self._handed_over = self.size
        self.seconds += time.perf_counter() - began
        return size

    def flush(self) -> None:
        self._file.flush()


class Written(TypedDict):
    """What is known of a file that was written; bytes, and seconds of writing alone."""

    sha256: str
    bytes: int
    write_seconds: float


class WrittenShard(Written):
    """unpacked: the bytes of its pickle, before compression."""

    unpacked: int


def write_atomically(
    path: Path, write: Callable[[Any], None], outdated: Path | None = None
) -> Written:
    """Runs `write(file)` on a temporary file beside `path`, syncs it and renames it to `path`.

    outdated: deleted when nothing is left but the renaming, if it is there.
    Whenever the process or the machine dies, `path` is absent or whole. Raises OSError; the
    temporary file is then removed.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            counting = _CountingFile(file)
            write(counting)
            began = time.perf_counter()
            file.flush()
            os.fsync(file.fileno())
        if outdated is not None:
            outdated.unlink(missing_ok=True)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    seconds = counting.seconds + time.perf_counter() - began
    return {"sha256": counting.sha256.hexdigest(), "bytes": counting.size, "write_seconds": seconds}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a whole file atomically. Raises OSError."""
    write_atomically(path, lambda file: file.write(data))


class _Pickler(pickle.Pickler):
    """Writes arrays straight from their memory (those in C order); `pickle.dump` copies all of them
    and keeps the copies until its end.

    Protocol 5 allows that. NumPy's own form for it names internals that NumPy 1.26 does not have,
    so arrays keep the form of protocol 4, and but for its number so does the whole pickle.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return NotImplemented
        reduced: Any = np.empty(0, value.dtype).__reduce__()
        rebuild, arguments, (version, _shape, dtype, fortran, _data) = reduced
        content = np.asarray(value, order="C").reshape(-1).view(np.uint8).data
        data = PickleBuffer(content.toreadonly())  # what can be written to is no bytes
        return rebuild, arguments, (version, value.shape, dtype, fortran, data)


class _Counter:
    """Passes on what is written, and counts the bytes."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.bytes = 0

    def write(self, data: bytes | PickleBuffer) -> int:
        self.bytes += memoryview(data).nbytes
        return self._file.write(data)


def pickle_shard(shard: Shard, file: Any) -> int:
    """Writes a shard to a file as it is uncompressed; returns the number of bytes."""
    counter = _Counter(file)
    _Pickler(counter, protocol=5).dump(shard)
    return counter.bytes


def write_shard(
    path: Path, shard: Shard, compress: bool, outdated: Path | None = None
) -> WrittenShard:
    """Writes a shard atomically, as gzip when `compress`, with nothing of time or place in it.

    outdated: see `write_atomically`.
    """
    unpacked = 0

    def write(file: IO[bytes]) -> None:
        nonlocal unpacked
        if not compress:
            unpacked = pickle_shard(shard, file)
            return
        # The number of threads does not show in the bytes, nor does the time.
        with igzip_threaded.open(
            file, "wb", compresslevel=COMPRESSION_LEVEL, threads=COMPRESSION_THREADS
        ) as stream:
            unpacked = pickle_shard(shard, stream)

    written = write_atomically(path, write, outdated)
    return {**written, "unpacked": unpacked}


class UnsafeError(RunError):
    """A shard holds what no shard of ours holds; nothing of it was run."""


def read_shard(path: str | Path, limit: int | None = None) -> Shard:
    """Reads a shard, compressed when its name ends in .gz, without running pickled code.

    limit: the most bytes that it may unpack to. By default it is what the shard's JSON says, if
    that lies beside it; else 64 MiB and 16 times the size of the file. Raises UnsafeError for
    anything but plain containers and NumPy arrays of numbers, and for more than `limit`; RunError
    for a damaged file.
    """
    path = Path(path)
    with open(path, "rb") as file:
        stream: Any = igzip.IGzipFile(fileobj=file, mode="rb") if path.suffix == ".gz" else file
        try:
            limited = _LimitedReader(stream, _announced(path) if limit is None else limit)
            shard = _SafeUnpickler(limited).load()
            if stream.read(1):  # nothing follows; reading on also makes gzip check its checksum
                raise RunError("is damaged: it goes on after its end")
        except RunError as error:
            raise type(error)(f"{path.name}: {error}") from error
        except Exception as error:  # whatever broken bytes may raise in gzip, pickle or NumPy
            raise RunError(f"{path.name}: cannot be read: {one_line(error):.200}") from error
    if not isinstance(shard, dict) or not all(isinstance(part, list) for part in shard.values()):
        raise RunError(f"{path.name}: is no shard: expected a dict of lists of records")
    return shard


def _announced(path: Path) -> int:
    """The bytes to which a shard unpacks as its JSON says, or a generous guess without it."""
    where = path.with_name(path.name.split(".")[0] + ".json")
    try:
        unpacked = unseal(where.read_bytes(), str(where)).get("unpacked")
    except (OSError, DamagedError):
        unpacked = None
    if isinstance(unpacked, int):
        return unpacked
    return GENEROUS_BYTES + GENEROUS_RATIO * path.stat().st_size


class _LimitedReader:
    """What the unpickler reads from; refuses to unpack more than `limit` bytes."""

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

    The names below stand for functions of ours that make an empty array or a number type;
    everything else that a pickle may ask to import is refused before anything is called, and so is
    every instruction that no shard of ours has. This is Python's own implementation: in the one in
    C six bytes can claim 64 GB, and a pickle can set attributes of what it names.
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
        """Gives an array its content, and a number type its byte order: that of this machine."""
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
    """Stands for a type of numbers, or for a class that a pickle may name and not call."""

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
