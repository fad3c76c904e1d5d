"""The pickle format of a shard: a dict from key (layer, or hook name) to a list of records.

`pickle.loads(gzip.open(path).read())` reads it. There is one record per sample, in order; a record
is a dict of plain values and NumPy arrays (see `Record`). The bytes depend only on the content.
Always read a compressed file to its end, where its checksum is; `pickle.load` stops before it.
"""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from pickle import PickleBuffer
from typing import Any, NotRequired, TypedDict

import numpy as np
from isal import igzip

from activation_extraction.common.encodings import VALUES
from activation_extraction.common.errors import RunError, one_line
from activation_extraction.store.labels import LABELS
from activation_extraction.store.safe_unpickler import unpickle
from activation_extraction.store.shard import MAX_GZIP_RATIO, DocId, Key, SampleRow, Shard

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


def positions_of(record: Record) -> np.ndarray:
    """Returns the position of every token of a record, int32."""
    all_positions = np.arange(len(record["activation"]), dtype=np.int32)
    return np.asarray(record.get("positions", all_positions), np.int32)


def _labels_of(record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: record[name] for name in LABELS if name in record}


def read_records(path: Path, limit: int) -> Records:
    """Reads a pickled shard without running pickled code; it is gzipped if its name ends in .gz.

    limit: the most bytes that it may unpack to, besides what gzip can make of the file's size.
    Raises UnsafeError for anything but plain containers and NumPy arrays of numbers, and for more
    than `limit` bytes; RunError for a damaged file; OSError.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        stream: Any = igzip.IGzipFile(fileobj=file, mode="rb") if path.suffix == ".gz" else file
        try:
            records = unpickle(stream, min(limit, MAX_GZIP_RATIO * max(size, 1)))
            if stream.read(1):  # reading to the end also makes gzip compare its checksum
                raise RunError("is damaged: bytes follow the end of its pickle")
        except RunError as error:
            raise type(error)(f"{path.name}: {error}") from error
        except Exception as error:  # broken bytes may raise anything in gzip, pickle or NumPy
            raise RunError(f"{path.name}: cannot be read: {one_line(error):.200}") from error
    lists = records.values() if type(records) is dict else [None]
    if not all(type(each) is list and all(type(r) is dict for r in each) for each in lists):
        raise RunError(f"{path.name}: is not a shard: expected a dict of lists of records")
    return records


def read_pickle(path: Path, limit: int) -> Shard:
    """Reads a pickled shard, whose samples are those of its first hook.

    Raises what `read_records` raises, and RunError for records that lack fields.
    """
    records = read_records(path, limit)
    try:
        samples = [
            SampleRow(
                sample_idx=record["sample_idx"],
                token_ids=record["token_ids"],
                positions=positions_of(record),
                text_preview=record["text_preview"],
                doc_id=record["doc_id"],
                labels=_labels_of(record),
            )
            for record in next(iter(records.values()), [])
        ]
        slices = {key: [_values_of(each) for each in of_hook] for key, of_hook in records.items()}
        scales = {
            key: [record["scale"] for record in of_hook]
            for key, of_hook in records.items()
            if any("scale" in record for record in of_hook)
        }
    except MALFORMED as error:
        raise RunError(f"{path.name}: its records cannot be read: {error!r:.200}") from error
    return Shard(samples, slices, scales=scales)


def _values_of(record: Record) -> np.ndarray:
    """Returns the activation of a record; in its own dtype if it is encoded."""
    values = record["activation"]
    return values.view(VALUES) if "scale" in record and values.dtype == np.uint8 else values
