"""The pickle format of a shard: a dict from key (layer, or hook name) to a list of records.

`pickle.loads(gzip.open(path).read())` reads it. There is one record per sample, in order, a dict of
plain values and NumPy arrays:
  sample_idx, hook        the sample's number, and the hook's full name
  activation, shape       (tokens, width), and that shape
  ids, values, offsets,   of codes, in the place of `activation`: int32 and float32 (or bfloat16),
  error, norm             the active features of all tokens, one token after the other; int64
                          (tokens + 1,), where those of each token begin; float32 (tokens,) each,
                          see common/codes.py
  text_preview, doc_id    see SampleFacts, whose other fields are in the table of samples alone
  token_ids               int32 (tokens,), or None
  positions               int32 (tokens,), of the tokens in the sample
  role, turn              int32 (tokens,), where a run has labels
The bytes depend only on the content and, in an uncompressed file, on the id of the process that
wrote it: a string before the dict, which unpickling pushes on its stack and drops. Always read a
compressed file to its end, where its checksum is; `pickle.load` stops before it.
"""

import pickle
import struct
import sys
from collections.abc import Mapping
from pickle import PickleBuffer
from typing import IO, Any

import ml_dtypes
import numpy as np
from isal import igzip

from activation_extraction.common.allow_list import AllowListUnpickler
from activation_extraction.common.errors import RunError, one_line
from activation_extraction.store.hook_values import HookValues, Key
from activation_extraction.store.shard import LABELS, Shard, ShardSample
from activation_extraction.text.sample_facts import SampleFacts

Records = dict[Key, list[dict[str, Any]]]
PROTOCOL = 2  # bytes at the beginning of a pickle, which name the protocol


class _Pickler(pickle.Pickler):
    """A pickler that writes arrays without copying them.

    `pickle.dump` would keep a copy of every array until it ends. Writing buffers straight from
    memory needs protocol 5. With this protocol, however, NumPy would pickle arrays by a function
    that NumPy 1.26 lacks, so arrays are written as NumPy writes them in protocol 4.
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
    """A file for a pickler: a list of the buffers that were written, without copies."""

    def write(self, data: bytes | PickleBuffer) -> int:
        self.append(memoryview(data).cast("B"))
        return self[-1].nbytes


def pickle_pieces(shard: Shard, writer: str = "") -> list[memoryview]:
    """Returns the bytes of a shard's pickle. Activations are not copied.

    Args:
        shard: The shard, whose values are in the stored form.
        writer: The id of the process that writes the file; "" to leave it out.
    """
    pieces = _Pieces()
    _Pickler(pieces, protocol=5).dump(records_of(shard))
    if writer:
        text = writer.encode()
        dropped = pickle.BINUNICODE + struct.pack("<I", len(text)) + text + pickle.POP
        first = pieces[0]
        pieces[:1] = [first[:PROTOCOL], memoryview(dropped), first[PROTOCOL:]]
    return pieces


def records_of(shard: Shard) -> Records:
    """Returns the records of a shard, by the key of the hook.

    Args:
        shard: The shard, whose values are in the stored form.
    """

    def record_of(key: Key, hook: HookValues, number: int) -> dict[str, Any]:
        sample, values = shard.samples[number], shard.values[key][number]
        return {
            "sample_idx": sample.facts.sample_idx,
            "hook": hook.name,
            **hook.record(values),
            "shape": values.shape,
            "text_preview": sample.facts.text_preview,
            "token_ids": sample.token_ids,
            "positions": sample.positions,
            "doc_id": sample.facts.doc_id,
            **sample.labels,
        }

    numbers = range(len(shard.samples))
    return {
        key: [record_of(key, hook, number) for number in numbers]
        for key, hook in shard.hooks.items()
    }


def read_records(file: IO[bytes], where: str, limit: int) -> Records:
    """Reads the records of a pickled shard without running pickled code.

    Args:
        file: The file, open for reading.
        where: The name of the file, for messages. A name that ends in .gz means that the file is
            compressed by gzip.
        limit: The largest size in bytes to which the file may be decompressed.

    Raises:
        UnsafeError: The file contains anything but plain containers and NumPy arrays of numbers,
            or decompresses to more than `limit` bytes.
        RunError: The file is damaged.
    """
    stream: Any = igzip.IGzipFile(fileobj=file, mode="rb") if where.endswith(".gz") else file
    try:
        by_key = _Unpickler(_LimitedReader(stream, limit)).load()
        return {
            key: [{name: _plain(value) for name, value in record.items()} for record in records]
            for key, records in by_key.items()
        }
    except RunError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:  # broken bytes may raise anything in gzip, pickle or NumPy
        raise RunError(f"{where}: cannot be read: {one_line(error):.200}") from error


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, _Array) else value


def read_pickle(file: IO[bytes], where: str, limit: int, hooks: Mapping[Key, HookValues]) -> Shard:
    """Reads a pickled shard. Its samples are taken from the records of its first hook.

    Args:
        file: The file, open for reading.
        where: The name of the file, for messages. A name that ends in .gz means that the file is
            compressed by gzip.
        limit: The largest size in bytes to which the file may be decompressed.
        hooks: The hooks to read, by key. Hooks that the file lacks are left out of the result.

    Raises:
        UnsafeError: The file contains anything but plain containers and NumPy arrays of numbers,
            or decompresses to more than `limit` bytes.
        RunError: The file is damaged, or its records lack fields.
    """
    records = read_records(file, where, limit)
    stored = {key: hook for key, hook in hooks.items() if key in records}
    try:
        values = {
            key: [hook.from_record(record) for record in records[key]]
            for key, hook in stored.items()
        }
        samples = [
            ShardSample(
                SampleFacts(record["sample_idx"]),
                token_ids=record["token_ids"],
                positions=record["positions"],
                labels={name: record[name] for name in LABELS if name in record},
            )
            for record in next(iter(records.values()), [])
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RunError(f"{where}: its records cannot be read: {error!r:.200}") from error
    return Shard(samples, stored, values)


class UnsafeError(RunError):
    """A shard contains something that this program does not write, and that was not run."""


class _LimitedReader:
    """The input of the unpickler, which refuses to decompress more than `limit` bytes."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._stream = stream
        self._limit = self._left = limit

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self._left:
            raise UnsafeError(f"unpacks to more than {self._limit} bytes")
        self._left -= size
        return self._stream.read(size)

    def readline(self) -> bytes:
        raise UnsafeError("refused: holds a pickle instruction that no shard of ours has")


class _DType:
    """Stands for a dtype in a pickle.

    NumPy's own class accepts states with which it reads memory outside of an array. This class uses
    only the byte order of the state.
    """

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or code not in NUMBER_TYPES:
            raise UnsafeError(f"refused: an array of type {code!r:.80}")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<" if sys.byteorder == "little" else ">", "|", "="):
            raise UnsafeError("refused: an array in another byte order")


class _Array(np.ndarray):
    """An array of numbers in a pickle, which begins empty."""

    def __new__(cls, *_: Any) -> "_Array":
        return super().__new__(cls, 0, np.int8)

    def __setstate__(self, state: Any) -> None:
        version, shape, kind, fortran, data = state
        super().__setstate__((version, shape, kind.dtype, fortran, data))


NUMBER_TYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1", "bfloat16")
ALLOWED: dict[str, Any] = {
    "numpy.ndarray": _Array,
    "numpy.dtype": _DType,
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "ml_dtypes.bfloat16": ml_dtypes.bfloat16.__name__,
}


class _Unpickler(AllowListUnpickler):
    """Unpickles plain containers and NumPy arrays of numbers, and nothing else."""

    allowed_objects = ALLOWED
    error_type = UnsafeError
    error_reason = "no shard of ours does"
