"""The pickle format of a shard: a dict from key (layer, or hook name) to a list of records.

`pickle.loads(gzip.open(path).read())` reads it. There is one record per sample, in order; a record
is a dict of plain values and NumPy arrays (see `Record`). The bytes depend only on the content.
Always read a compressed file to its end, where its checksum is; `pickle.load` stops before it.
"""

import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import IO, Any, ClassVar, NotRequired, TypedDict

import ml_dtypes
import numpy as np
from isal import igzip

from activation_extraction.common.encodings import VALUES
from activation_extraction.common.errors import RunError, one_line
from activation_extraction.store.shard import LABELS, DocId, Key, SampleRow, Shard

MALFORMED = (KeyError, TypeError, AttributeError, ValueError, OverflowError)


class Record(TypedDict):
    """A sample at one hook.

    An activation that is encoded (common/encodings.py) is uint8, the bits of e4m3, so that
    unpickling needs no more than NumPy.
    """

    sample_idx: int
    hook: str  # its full name, such as blocks.12.hook_mlp_out
    activation: np.ndarray  # (tokens, width)
    scale: NotRequired[np.ndarray]  # (tokens, 1), of an encoded activation
    shape: tuple[int, ...]
    text_preview: str
    token_ids: np.ndarray | None  # int32 (tokens,)
    doc_id: DocId
    positions: NotRequired[np.ndarray]  # int32 (tokens,), where a run keeps some tokens only
    role: NotRequired[np.ndarray]  # int32 (tokens,), where a run has labels: one field for each
    turn: NotRequired[np.ndarray]


Records = dict[Key, list[Record]]


class _Pickler(pickle.Pickler):
    """Writes arrays in C order straight from memory; `pickle.dump` would keep copies of all of them
    until it ends.

    This needs protocol 5. But with protocol 5, NumPy would pickle arrays by internals that NumPy
    1.26 does not have, so everything except the protocol number is written as in protocol 4.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return NotImplemented
        reduced: Any = np.empty(0, value.dtype).__reduce__()
        rebuild, arguments, (version, _shape, dtype, fortran, _data) = reduced
        content = np.asarray(value, order="C").reshape(-1).view(np.uint8).data
        data = PickleBuffer(content.toreadonly())  # a writable buffer would become a bytearray
        return rebuild, arguments, (version, value.shape, dtype, fortran, data)


class _Pieces(list[memoryview]):
    """A list of everything that was written, without copies."""

    def write(self, data: bytes | PickleBuffer) -> int:
        self.append(memoryview(data).cast("B"))
        return self[-1].nbytes


def pickle_pieces(shard: Shard, names: Mapping[Key, str]) -> list[memoryview]:
    """Returns the bytes of a shard's pickle. Activations are not copied."""
    return pieces_of(records_of(shard, names))


def pieces_of(records: Records) -> list[memoryview]:
    """Returns the bytes of a pickle of records. Activations are not copied."""
    pieces = _Pieces()
    _Pickler(pieces, protocol=5).dump(records)
    return pieces


def records_of(shard: Shard, names: Mapping[Key, str]) -> Records:
    """Returns the records of a shard. names: the hooks' full names by key."""
    with_positions = shard.needs_positions

    def record_of(key: Key, number: int) -> Record:
        row, activation = shard.samples[number], shard.slices[key][number]
        record: Record = {
            "sample_idx": row.sample_idx,
            "hook": names[key],
            "activation": activation,
            "shape": activation.shape,
            "text_preview": row.text_preview or "",
            "token_ids": row.token_ids,
            "doc_id": row.doc_id,
        }
        if key in shard.scales:
            record["scale"] = shard.scales[key][number]
            record["activation"] = activation.view(np.uint8)
        if with_positions:
            record["positions"] = row.positions
        labels: Any = row.labels
        return {**record, **labels}

    numbers = range(len(shard.samples))
    return {key: [record_of(key, number) for number in numbers] for key in shard.slices}


def read_records(file: IO[bytes], where: str, limit: int) -> Records:
    """Reads a pickled shard without running pickled code.

    where: names the file in messages; it is gzipped if that ends in .gz. limit: the most bytes that
    it may unpack to. Raises UnsafeError for anything but plain containers and NumPy arrays of
    numbers, and for more than `limit` bytes; RunError for a damaged file.
    """
    stream: Any = igzip.IGzipFile(fileobj=file, mode="rb") if where.endswith(".gz") else file
    try:
        records = unpickle(stream, limit)
        if stream.read(1):  # reading to the end also makes gzip compare its checksum
            raise RunError("is damaged: bytes follow the end of its pickle")
    except RunError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:  # broken bytes may raise anything in gzip, pickle or NumPy
        raise RunError(f"{where}: cannot be read: {one_line(error):.200}") from error
    lists = records.values() if type(records) is dict else [None]
    if not all(type(each) is list and all(type(r) is dict for r in each) for each in lists):
        raise RunError(f"{where}: is not a shard: expected a dict of lists of records")
    return records


def read_pickle(file: IO[bytes], where: str, limit: int) -> Shard:
    """Reads a pickled shard, whose samples are those of its first hook.

    Raises what `read_records` raises, and RunError for records that lack fields.
    """
    records = read_records(file, where, limit)
    firsts: list[Any] = next(iter(records.values()), [])
    try:
        samples = [
            SampleRow(
                sample_idx=record["sample_idx"],
                token_ids=record["token_ids"],
                positions=np.asarray(
                    record.get("positions", np.arange(len(record["activation"]))), np.int32
                ),
                text_preview=record["text_preview"],
                doc_id=record["doc_id"],
                labels={name: record[name] for name in LABELS if name in record},
            )
            for record in firsts
        ]
        slices = {key: [_values_of(each) for each in of_hook] for key, of_hook in records.items()}
        scales = {
            key: [record["scale"] for record in of_hook]
            for key, of_hook in records.items()
            if any("scale" in record for record in of_hook)
        }
    except MALFORMED as error:
        raise RunError(f"{where}: its records cannot be read: {error!r:.200}") from error
    return Shard(samples, slices, scales=scales)


def _values_of(record: Record) -> np.ndarray:
    """Returns the activation of a record; in its own dtype if it is encoded."""
    values = record["activation"]
    return values.view(VALUES) if "scale" in record and values.dtype == np.uint8 else values


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
            version, shape, kind, fortran, data = state
            if not isinstance(kind, _NumberType) or kind.dtype is None:
                raise UnsafeError("refused: an array that NumPy would not have pickled so")
            # NumPy refuses data that is not as long as the array.
            built.__setstate__((version, shape, kind.dtype, fortran, data))
        else:
            raise UnsafeError(f"refused: would change a {type(built).__name__}")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        **dict.fromkeys(REFUSED, _refuse),
        pickle.BUILD[0]: _build,
    }


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
