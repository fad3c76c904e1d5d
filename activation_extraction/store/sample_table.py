"""The table of a shard's samples, `shard_0001.samples.parquet`, which is read without the shard.

It has a row for every sample, in the order of the shard, and these columns:
  sample_idx, tokens      the number of the sample in the whole run; how many tokens are stored
  doc_id, text_preview    the `id` of its row in the data set; its first 200 characters
  row                     the row that it comes from, such as {"file": "a.jsonl", "line": 7}
  cut                     how many tokens were left out at the end of its document
and every column of the data set that is kept, under its own name. A column whose values all have
one plain type has this type, with null for None; `row` is a struct of such fields, of which those
that are null are no fields of the row. Any other column has texts of JSON, with null where a sample
lacks the column; the metadata of its field in the Arrow schema then says `encoding`: `JSON`.

What is read is what was given. The bytes depend on the content and on the version of pyarrow.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow
import pyarrow.parquet

from activation_extraction.common.choices import MAX_COLUMNS, SAMPLE_COLUMNS
from activation_extraction.common.errors import RunError, StorageError, one_line
from activation_extraction.store.commit import Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.shard import SampleRow
from activation_extraction.store.shard_reader import expect, read_beside
from activation_extraction.text.batch import DocId, StoredSample

NATIVE = {
    bool: pyarrow.bool_(),
    int: pyarrow.int64(),
    float: pyarrow.float64(),
    str: pyarrow.string(),
}
JSON = {b"encoding": b"JSON"}  # the metadata of a column that has texts of JSON
ABSENT = object()  # the value of a kept column that a sample lacks: null among texts of JSON
# What pyarrow raises for large integers, for lone surrogates, and for names that are not text.
DOES_NOT_FIT = (pyarrow.ArrowException, OverflowError, UnicodeEncodeError, TypeError)
MAX_SAMPLE_BYTES = 2**20  # of JSON, for all that the table says of a sample
MAX_FIELDS = 64  # of the `row` of a sample, or of the values of a column of several shards


@dataclass(frozen=True)
class TableRow:
    """A row of the table. tokens: how many are stored. The other fields are those of SampleRow."""

    sample_idx: int
    tokens: int
    doc_id: DocId
    row: Mapping[str, Any] | None
    cut: int
    text_preview: str
    columns: Mapping[str, Any] = field(default_factory=dict)


def pack_table(samples: Sequence[SampleRow]) -> bytes:
    """Returns the content of the table's file. Raises StorageError for values that do not fit."""
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(_table(samples), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def read_table(folder: Folder, commit: Commit) -> pyarrow.Table:
    """Returns the table of a shard's samples, in which JSON is still text.

    Raises RunError if it is missing or damaged, or has other samples than the shard.
    """
    if not commit.count:
        return _table([])
    data, where = read_beside(folder, commit, commit.table_file)
    try:
        table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data)).read(use_threads=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise RunError(f"{where}: cannot be read: {one_line(error):.200}") from error
    _check_against(commit, table, where)
    return table


def rows_of(table: pyarrow.Table) -> list[TableRow]:
    """Returns the rows of a table, with the values that were given."""
    columns: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    for name in table.column_names[len(SAMPLE_COLUMNS) :]:
        for values, value in zip(columns, _decoded(table, name), strict=True):
            if value is not ABSENT:
                values[name] = value
    fixed = (_decoded(table, name) for name in SAMPLE_COLUMNS)
    return [TableRow(*values) for values in zip(*fixed, columns, strict=True)]


def stored_in(table: pyarrow.Table) -> dict[int, StoredSample]:
    """Returns what a continued run has to know of the samples in a table, by `sample_idx`."""
    numbers, *facts = (_decoded(table, name) for name in ("sample_idx", "tokens", "row"))
    stored = (StoredSample(*each) for each in zip(*facts, strict=True))
    return dict(zip(numbers, stored, strict=True))


def values_of(table: pyarrow.Table, name: str) -> list[Any]:
    """Returns a column as it was given, with None for samples that lack it."""
    if name not in table.column_names:
        return [None] * table.num_rows
    return [None if value is ABSENT else value for value in _decoded(table, name)]


def concatenated(tables: Iterable[pyarrow.Table]) -> pyarrow.Table:
    """Returns one table of the samples of several tables, without texts of JSON where pyarrow has
    another type for the values of a column."""
    every = [*tables] or [_table([])]
    names = dict.fromkeys(name for table in every for name in table.column_names)
    return pyarrow.table({name: _concatenated(every, name) for name in names})


def _table(samples: Sequence[SampleRow]) -> pyarrow.Table:
    kept: dict[str, None] = {}
    for sample in samples:
        _check(sample)
        kept |= dict.fromkeys(sample.columns)
        if len(kept) > MAX_COLUMNS:
            raise StorageError(
                f"sample {sample.sample_idx}: with its columns, the shard has {len(kept)} "
                f"different ones, expected at most {MAX_COLUMNS}"
            )
    columns: dict[str, list[Any]] = {
        "sample_idx": [sample.sample_idx for sample in samples],
        "tokens": [len(sample.positions) for sample in samples],
        "doc_id": [sample.doc_id for sample in samples],
        "row": [sample.row for sample in samples],
        "cut": [sample.cut for sample in samples],
        "text_preview": [sample.text_preview or "" for sample in samples],
        **{name: [sample.columns.get(name, ABSENT) for sample in samples] for name in kept},
    }
    kinds = {name: _type_of(values) for name, values in columns.items()}
    kinds |= dict.fromkeys(("sample_idx", "cut"), pyarrow.int64())
    kinds |= {"tokens": pyarrow.int32(), "row": _struct_of(columns["row"])}
    packed = [_packed(name, values, kinds[name]) for name, values in columns.items()]
    fields, arrays = zip(*packed, strict=True)
    return pyarrow.table(list(arrays), schema=pyarrow.schema(fields))


def _type_of(values: Iterable[Any]) -> pyarrow.DataType | None:
    """Returns the one plain type that all values have but for None, if there is one."""
    kinds = {*map(type, values)} - {type(None)}
    if not kinds:
        return pyarrow.null()
    return NATIVE.get(kinds.pop()) if len(kinds) == 1 else None


def _struct_of(rows: Sequence[Mapping[str, Any] | None]) -> pyarrow.DataType | None:
    """Returns the type of a struct that holds these rows, if there is one: a null field of it says
    that a row lacks the field."""
    values: dict[str, list[Any]] = {}
    for row in filter(None, rows):
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    kinds = {name: None if None in found else _type_of(found) for name, found in values.items()}
    if not kinds:
        return pyarrow.null()
    with suppress(*DOES_NOT_FIT):
        if None not in kinds.values() and len(kinds) <= MAX_FIELDS:
            return pyarrow.struct(kinds)
    return None


def _packed(
    name: str, values: list[Any], kind: pyarrow.DataType | None
) -> tuple[pyarrow.Field, pyarrow.Array]:
    """Returns a column of this type, or of JSON if there is none or a value does not fit it."""
    if kind is not None:
        with suppress(*DOES_NOT_FIT):
            return pyarrow.field(name, kind), pyarrow.array(values, kind)
    texts = [None if value is ABSENT else json.dumps(value) for value in values]
    array = pyarrow.array(texts, pyarrow.string())
    return pyarrow.field(name, array.type, metadata=JSON), array


def _is_json(table: pyarrow.Table, name: str) -> bool:
    metadata = table.schema.field(name).metadata or {}
    return metadata.items() >= JSON.items()


def _decoded(table: pyarrow.Table, name: str) -> list[Any]:
    """Returns a column as it was given, with ABSENT for samples that lack it."""
    column = table[name].combine_chunks()
    if _is_json(table, name):
        return [ABSENT if text is None else json.loads(text) for text in column.to_pylist()]
    if not pyarrow.types.is_struct(column.type):
        return column.to_pylist()
    names = [each.name for each in column.type]
    fields = zip(*(each.to_pylist() for each in column.flatten()), strict=True)
    rows = [{n: v for n, v in zip(names, each, strict=True) if v is not None} for each in fields]
    is_none = column.is_null().to_pylist()
    return [None if none else row for none, row in zip(is_none, rows, strict=True)]


def _concatenated(tables: Sequence[pyarrow.Table], name: str) -> pyarrow.ChunkedArray:
    """Returns a column of all tables. Values become texts where they have no type in common."""
    if not any(_is_json(table, name) for table in tables if name in table.column_names):
        parts = [
            pyarrow.table({name: t[name] if name in t.column_names else pyarrow.nulls(len(t))})
            for t in tables
        ]
        with suppress(pyarrow.ArrowException):
            return pyarrow.concat_tables(parts, promote_options="permissive")[name]
    return pyarrow.chunked_array([_inferred([v for t in tables for v in values_of(t, name)])])


def _inferred(values: Sequence[Any]) -> pyarrow.Array:
    """Returns an array of the type that pyarrow finds for these values, or else of texts: also if
    the type has many fields, since there would be room for each of them in every row."""
    with suppress(*DOES_NOT_FIT, ValueError):
        kind = pyarrow.infer_type(values)
        if str(kind).count(": ") <= MAX_FIELDS:
            return pyarrow.array(values, kind)
    return pyarrow.array([None if value is None else _text(value) for value in values])


def _text(value: Any) -> str:
    """Returns a value as text, with question marks for what UTF-8 cannot encode."""
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return text.encode(errors="replace").decode()


def _check(sample: SampleRow) -> None:
    """Raises StorageError for values that another program gave, and that the table cannot have."""
    where, columns = f"sample {sample.sample_idx}", sample.columns
    try:
        " ".join(columns).encode()  # names may not have lone surrogates; values may
        size = len(json.dumps((sample.doc_id, sample.row, columns, sample.text_preview)))
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(
            f"{where}: its id, row, text preview or columns are no JSON values: {one_line(error)}"
        ) from error
    for name in SAMPLE_COLUMNS:
        if name in columns:
            raise StorageError(f"{where}: a column that is kept cannot be called {name}")
    if size > MAX_SAMPLE_BYTES:
        given, fewer = (", columns", " or keep fewer columns") if columns else ("", "")
        raise StorageError(
            f"{where}: its id, row{given} and text preview take {size:,} bytes; there is room for "
            f"{MAX_SAMPLE_BYTES:,}",
            remedy=f"shorten the row's id{fewer}, and start anew with --overwrite",
        )


def _check_against(commit: Commit, table: pyarrow.Table, where: str) -> None:
    """Raises RunError unless these are the samples that the shard's JSON describes."""
    numbers = table["sample_idx"].to_pylist() or [None]
    expect(where, "number of samples", table.num_rows, commit.count)
    expect(where, "tokens", sum(table["tokens"].to_pylist()), commit.tokens)
    expect(where, "first sample", numbers[0], commit.first)
    expect(where, "last sample", numbers[-1], commit.last)
