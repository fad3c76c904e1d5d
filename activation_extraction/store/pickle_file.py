"""The pickle form of a shard: a dict from key (layer, or hook name) to a list of records.

`pickle.loads(gzip.open(path).read())` reads it. There is one record per sample, in order; a record
is a dict of plain values and NumPy arrays (see `Record`). The bytes depend only on the content.
Always read a compressed file to its end: its checksum is there, and `pickle.load` stops before it.
"""

import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import PickleBuffer
from typing import Any, NotRequired, TypedDict

import numpy as np
from isal import igzip

from activation_extraction.common.errors import RunError, one_line
from activation_extraction.store.labels import LABELS, wrong_role
from activation_extraction.store.safe_unpickler import unpickle
from activation_extraction.store.sealed_json import LARGEST_COUNT, MOST_PARTS, SCALARS
from activation_extraction.store.shard import DocId, Key, SampleRow, Shard

LARGEST_RATIO = 1032  # of what gzip unpacks to the size of its file
LONGEST_NUMBER = 14_000  # bits; Python prints no longer ones


class Record(TypedDict):
    """One sample at one hook."""

    sample_idx: int
    hook: str  # its full name, such as blocks.12.hook_mlp_out
    activation: np.ndarray  # (tokens, width)
    shape: tuple[int, ...]
    text_preview: str
    token_ids: np.ndarray | None  # int32 (tokens,)
    doc_id: DocId
    positions: NotRequired[np.ndarray]  # int32 (tokens,), where a run keeps some tokens only
    role: NotRequired[np.ndarray]  # int32 (tokens,), where a run has labels: one field for each
    turn: NotRequired[np.ndarray]


Records = dict[Key, list[Record]]
# The types of a record's fields. A field that is not here may have any scalar, a flat list, tuple
# or dict of them, or an array.
FIELDS: dict[str, tuple[type, ...]] = {
    "sample_idx": (int,),
    "hook": (str,),
    "activation": (np.ndarray,),
    "text_preview": (str,),
    "token_ids": (np.ndarray, type(None)),
    "doc_id": (str, int, float, type(None)),
    "positions": (np.ndarray,),
    **dict.fromkeys(LABELS, (np.ndarray,)),
}


class ContentError(RunError):
    """The records of a shard contradict one another, or the names of its hooks."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class _Pickler(pickle.Pickler):
    """Writes arrays in C order straight from memory; `pickle.dump` would copy all of them, and keep
    the copies until it ends.

    Protocol 5 makes this possible. But NumPy's own form of arrays in it names internals that NumPy
    1.26 does not have, so arrays, and all else but the protocol's number, are as in protocol 4.
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
    """Keeps what is written, without copying it."""

    def write(self, data: bytes | PickleBuffer) -> int:
        self.append(memoryview(data).cast("B"))
        return self[-1].nbytes


def pickle_pieces(shard: Shard, names: Mapping[Key, str]) -> list[memoryview]:
    """Returns the bytes of a shard's pickle, of which the activations are not copied."""
    return pieces_of(records_of(shard, names))


def pieces_of(records: Records) -> list[memoryview]:
    """Returns the bytes of a pickle of records, of which the activations are not copied."""
    pieces = _Pieces()
    _Pickler(pieces, protocol=5).dump(records)
    return pieces


def records_of(shard: Shard, names: Mapping[Key, str]) -> Records:
    """Returns the records of a shard. names: key of each hook -> its full name."""
    chosen = shard.needs_positions

    def record(hook: str, row: SampleRow, activation: np.ndarray) -> Record:
        made: Record = {
            "sample_idx": row.sample_idx,
            "hook": hook,
            "activation": activation,
            "shape": activation.shape,
            "text_preview": row.text_preview or "",
            "token_ids": row.token_ids,
            "doc_id": row.doc_id,
        }
        if chosen:
            made["positions"] = row.positions
        labels: Any = row.labels
        return {**made, **labels}

    return {
        key: [record(names[key], *each) for each in zip(shard.samples, slices, strict=True)]
        for key, slices in shard.slices.items()
    }


def positions_of(record: Record) -> np.ndarray:
    """Returns the position of every token of a record, int32."""
    every = np.arange(len(record["activation"]), dtype=np.int32)
    return np.asarray(record.get("positions", every), np.int32)


def _labels_of(record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: record[name] for name in LABELS if name in record}


def read_records(path: Path, limit: int) -> Records:
    """Reads a pickled shard without running pickled code. If its name ends in .gz, it is unpacked.

    limit: the most bytes that it may unpack to; it is never more than gzip can make of the file.
    Raises UnsafeError for anything but plain containers and NumPy arrays of numbers, and for more
    than `limit` bytes; RunError for a damaged file; OSError.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        stream: Any = igzip.IGzipFile(fileobj=file, mode="rb") if path.suffix == ".gz" else file
        try:
            records = unpickle(stream, min(limit, LARGEST_RATIO * max(size, 1)), size)
            if stream.read(1):  # reading on also makes gzip check its checksum
                raise RunError("is damaged: bytes follow the end of its pickle")
        except RunError as error:
            raise type(error)(f"{path.name}: {error}") from error
        except Exception as error:  # whatever broken bytes may raise in gzip, pickle or NumPy
            raise RunError(f"{path.name}: cannot be read: {one_line(error):.200}") from error
    if problem := _malformed(records):
        raise RunError(f"{path.name}: is not a shard: {problem}")
    return records


def _malformed(records: Any) -> str | None:
    """How what was unpickled differs in form from a shard; None if it has that form."""
    lists: list[Any] = list(records.values()) if type(records) is dict else [None]
    own = len({id(each) for each in lists}) == len(lists)  # or a few bytes would stand for many
    if not own or not all(type(each) is list for each in lists):
        return "expected a dict of lists of records"
    every = [record for each in lists for record in each]
    if len({id(record) for record in every}) != len(every):
        return "the same record stands in several places"
    if not all(type(record) is dict and len(record) <= MOST_PARTS for record in every):
        return f"expected records, dicts of at most {MOST_PARTS} fields"
    for name, value in (item for record in every for item in record.items()):
        kind = type(value)
        known = kind in FIELDS.get(name, (kind,))
        if not known or (kind is not np.ndarray and kind is not str and not _is_plain(value)):
            return f"the field {name!r:.80} of a record is a {kind.__name__}"
    return None


def _is_plain(value: Any) -> bool:
    """Whether a value of a record is a scalar, or a flat container of scalars."""
    parts = list(value) if type(value) in (tuple, list) else [value]
    if type(value) is dict:
        parts = list(value.values())
    return len(parts) <= MOST_PARTS and all(
        type(each) in SCALARS and (type(each) is not int or each.bit_length() < LONGEST_NUMBER)
        for each in parts
    )


def read_pickle(path: Path, names: Mapping[Key, str], limit: int) -> Shard:
    """Reads a pickled shard. names: key of each hook that it should have -> the hook's full name.

    Raises what `read_records` does, and ContentError if its records contradict one another.
    """
    records = read_records(path, limit)
    if list(records) != list(names):
        raise ContentError([f"has hooks {list(records)}, its JSON says {list(names)}"])
    try:
        for record in (record for each in records.values() for record in each):
            _check_possible(record)
        samples = [  # the first hook's records say what they are
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
        slices = {key: [each["activation"] for each in own] for key, own in records.items()}
        problems = [*_problems(records, samples, names)]
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ContentError([f"its records lack fields or are malformed: {error!r:.200}"]) from error
    if problems:
        raise ContentError(problems)
    return Shard(samples, slices)


def _check_possible(record: Record) -> None:
    """Raises ValueError for a number or an array that cannot be what it is said to be."""
    shape, index = record["activation"].shape, record["sample_idx"]
    ids, positions = record["token_ids"], record.get("positions")
    problem = None
    if not 0 <= index <= LARGEST_COUNT:
        problem = "no sample has this number"
    elif len(shape) != 2 or (shape[0] and not shape[1]):
        problem = f"an activation of shape {shape}"
    elif ids is not None and (ids.ndim != 1 or ids.dtype.kind != "i"):
        problem = f"token ids of dtype {ids.dtype}, shape {ids.shape}"
    elif positions is not None and (positions.ndim != 1 or positions.dtype != np.int32):
        problem = f"positions of dtype {positions.dtype}, shape {positions.shape}"
    for name, values in (labels := _labels_of(record)).items():
        if values.ndim != 1 or values.dtype != np.int32:
            problem = f"{name} of dtype {values.dtype}, shape {values.shape}"
    problem = problem or wrong_role(labels)
    if problem is not None:
        raise ValueError(f"sample {index!r:.40}: {problem}")


def _problems(
    records: Records, samples: list[SampleRow], names: Mapping[Key, str]
) -> Iterator[str]:
    """Where records disagree with the samples, or with the names of the hooks."""
    indices = [row.sample_idx for row in samples]
    firsts = next(iter(records.values()), [])
    if any(list(row.labels) != list(samples[0].labels) for row in samples):
        yield "its samples differ in the labels of their tokens"
    for key, each in records.items():
        if [record["sample_idx"] for record in each] != indices:
            yield f"hook {key}: its samples are not those of the first hook"
            continue
        for record, row, first in zip(each, samples, firsts, strict=True):
            shape, recorded = record["activation"].shape, tuple(record["shape"])
            where = f"hook {key}, sample {row.sample_idx}"
            if record.get("hook", names[key]) != names[key]:
                yield f"{where}: is of hook {record['hook']!r:.80}, expected {names[key]}"
            if recorded != shape:
                yield f"{where}: shape {shape}, its record says {recorded}"
            if record["token_ids"] is not row.token_ids and not np.array_equal(
                np.asarray(record["token_ids"]), np.asarray(row.token_ids)
            ):
                yield f"{where}: its token ids are not those of the first hook"
            positions = record.get("positions")
            if positions is not first.get("positions"):
                same = np.array_equal(positions_of(record), row.positions)
            else:
                same = positions is not None or len(row.positions) == shape[0]
            if not same:
                yield f"{where}: its positions are not those of the first hook"
            labels = _labels_of(record)
            if list(labels) != list(row.labels) or not all(
                labels[name] is values or np.array_equal(labels[name], values)
                for name, values in row.labels.items()
            ):
                yield f"{where}: the labels of its tokens are not those of the first hook"
