"""The table of a shard's samples, `shard_0001.samples.parquet`, which is read without the shard.

It has a row for every sample, in the order of the shard: how many of its tokens are stored, and the
fields of its SampleFacts, each in a column of the same name:
  sample_idx, tokens      the number of the sample in the whole run; how many tokens are stored
  doc_id, text_preview    the `id` of its row in the data set; its first 200 characters
  row                     the row that it comes from, such as {"file": "a.jsonl", "line": 7}
  cut                     how many tokens were left out at the end of its document
and every column of the data set that is kept, under its own name. A column has the type that
pyarrow finds for its values, where that gives all of them back; fields of a struct that are null
are no fields of the value. Any other column has texts of JSON, with null where a sample lacks the
column; the metadata of its field in the Arrow schema then says `encoding`: `JSON`.

Values are read back as they were before they were stored. The bytes depend on the content, on the
version of pyarrow, and on the id of the process that wrote the file, which is `writer` in the
metadata of the Arrow schema.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import pyarrow
import pyarrow.parquet

from activation_extraction.common.choices import SAMPLE_COLUMNS
from activation_extraction.common.errors import RunError, StorageError, one_line
from activation_extraction.store.folder import Folder
from activation_extraction.store.run_log import Commit
from activation_extraction.store.shard import ShardSample
from activation_extraction.store.shard_reader import expect, read_beside
from activation_extraction.text.sample_facts import SampleFacts, StoredSample

TOKENS = "tokens"  # the only column of every table that is no field of SampleFacts
TO_CONTINUE = ["sample_idx", TOKENS, "row"]  # the columns that a start needs to continue a run
FIXED = {"sample_idx": pyarrow.int64(), "tokens": pyarrow.int32(), "cut": pyarrow.int64()}
JSON = {b"encoding": b"JSON"}  # the metadata of a column that has texts of JSON
ABSENT = object()  # the value of a kept column that a sample lacks: null among texts of JSON
# Exceptions of pyarrow for large integers, lone surrogates, and names that are not text.
DOES_NOT_FIT = (pyarrow.ArrowException, OverflowError, ValueError, TypeError)
PROMOTED = "permissive"  # columns of several tables get a type that has room for all values
MAX_FIELDS = 32  # lists and fields of structs in a column: each row has room for all; few are deep


def pack_table(samples: Sequence[ShardSample], writer: str = "") -> bytes:
    """Returns the content of the table's file.

    Args:
        samples: The samples of the shard, in order.
        writer: The id of the process that writes the file; "" to leave it out.

    Raises:
        StorageError: A value does not fit into the table.
    """
    table, sink = _table(samples), pyarrow.BufferOutputStream()
    if writer:
        table = table.replace_schema_metadata({"writer": writer})
    pyarrow.parquet.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def read_table(folder: Folder, commit: Commit) -> pyarrow.Table:
    """Reads the table of a shard's samples as it is stored.

    Values that Parquet cannot hold are still texts of JSON; `stored_samples` and `values_of` decode
    them.

    Args:
        folder: Folder of the shard.
        commit: Commit of the shard.

    Raises:
        RunError: The table is missing, damaged or replaced, or lists other samples than its commit.
    """
    if not commit.count:
        return _table([])
    content, where = read_beside(folder, commit, commit.table_file)
    try:
        table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content)).read(use_threads=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise RunError(f"{where}: cannot be read: {one_line(error):.200}") from error
    _check_against(commit, table, where)
    return table


def stored_samples(table: pyarrow.Table) -> list[StoredSample]:
    """Returns the samples that a table lists, in its order, with their original values.

    Args:
        table: The table, or some of its columns, among them `sample_idx` and `tokens`. A fact whose
            column is left out has its default.
    """
    kept: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    for name in table.column_names:
        if name not in SAMPLE_COLUMNS:
            for columns, value in zip(kept, _decoded(table, name), strict=True):
                if value is not ABSENT:
                    columns[name] = value
    names = [name for name in SAMPLE_COLUMNS if name in table.column_names]
    values = zip(*(_decoded(table, name) for name in names), strict=True)
    samples = []
    for of_sample, columns in zip(values, kept, strict=True):
        facts = dict(zip(names, of_sample, strict=True))
        tokens = facts.pop(TOKENS)
        samples.append(StoredSample(SampleFacts(**facts, columns=columns), tokens))
    return samples


def samples_to_continue(table: pyarrow.Table) -> dict[int, StoredSample]:
    """Returns the samples that a table lists, by `sample_idx`, with the columns of TO_CONTINUE.

    Previews and kept columns are left out, because they are large and a start does not compare
    them.
    """
    samples = stored_samples(table.select(TO_CONTINUE))
    return {sample.facts.sample_idx: sample for sample in samples}


def values_of(table: pyarrow.Table, name: str) -> list[Any]:
    """Returns the values of a column as they were before they were stored.

    Args:
        table: Table of samples.
        name: Name of the column.

    Returns:
        A value for each sample; None for a sample that lacks the column.
    """
    if name not in table.column_names:
        return [None] * table.num_rows
    return [None if value is ABSENT else value for value in _decoded(table, name)]


def concatenate_tables(tables: Iterable[pyarrow.Table]) -> pyarrow.Table:
    """Returns one table with the samples of several tables.

    A column keeps its texts of JSON only if pyarrow has no other type for all of its values.

    Args:
        tables: The tables, in the order of the samples; without any, the result has no rows.
    """
    parts = list(tables) or [_table([])]
    names = dict.fromkeys(name for table in parts for name in table.column_names)
    return pyarrow.table({name: _concatenate_column(parts, name) for name in names})


def _table(samples: Sequence[ShardSample]) -> pyarrow.Table:
    all_facts = [sample.facts for sample in samples]
    for facts in all_facts:
        _check(facts)
    columns: dict[str, list[Any]] = {}
    for name in SAMPLE_COLUMNS:
        if name == TOKENS:
            columns[name] = [len(sample.positions) for sample in samples]
        else:
            columns[name] = [getattr(facts, name) for facts in all_facts]
    for name in dict.fromkeys(name for facts in all_facts for name in facts.columns):
        columns[name] = [facts.columns.get(name, ABSENT) for facts in all_facts]
    packed = [_packed(name, values) for name, values in columns.items()]
    schema = pyarrow.schema([field for field, _ in packed])
    return pyarrow.table([array for _, array in packed], schema=schema)


def _packed(name: str, values: list[Any]) -> tuple[pyarrow.Field, pyarrow.Array]:
    """Returns a column for the table: its field in the Arrow schema, and its values.

    Args:
        name: Name of the column.
        values: Values of the column; ABSENT for a sample that lacks it.

    Returns:
        A column of the type that pyarrow infers, if that gives all values back; otherwise a column
        of texts of JSON.
    """
    if name in FIXED:
        return pyarrow.field(name, FIXED[name]), pyarrow.array(values, FIXED[name])
    if ABSENT not in values and (array := _inferred(values)) is not None:
        if json.dumps(_plain(array), sort_keys=True) == json.dumps(values, sort_keys=True):
            return pyarrow.field(name, array.type), array
    texts = [None if value is ABSENT else json.dumps(value) for value in values]
    array = pyarrow.array(texts, pyarrow.string())
    return pyarrow.field(name, array.type, metadata=JSON), array


def _inferred(values: Sequence[Any]) -> pyarrow.Array | None:
    """Returns an array of the type that pyarrow finds for these values, if that has few fields."""
    with suppress(*DOES_NOT_FIT):
        kind = pyarrow.infer_type(values)
        return pyarrow.array(values, kind) if _has_few_fields(kind) else None
    return None


def _has_few_fields(kind: pyarrow.DataType) -> bool:
    text = str(kind)
    return text.count(": ") <= MAX_FIELDS and "struct<>" not in text  # which Parquet lacks


def _is_json(table: pyarrow.Table, name: str) -> bool:
    metadata = table.schema.field(name).metadata or {}
    return metadata.items() >= JSON.items()


def _decoded(table: pyarrow.Table, name: str) -> list[Any]:
    """Returns the values of a column as they were before they were stored.

    The value of a sample that lacks the column is ABSENT if the column has texts of JSON.
    """
    column = table[name].combine_chunks()
    if _is_json(table, name):
        return [ABSENT if text is None else json.loads(text) for text in column.to_pylist()]
    return _plain(column)


def _plain(array: pyarrow.Array) -> list[Any]:
    """Returns the values of an array, structs without their null fields.

    pyarrow adds such a field to every struct that lacks a field which another struct has.
    """
    if not pyarrow.types.is_struct(array.type):
        return array.to_pylist()
    return [None if struct is None else _without_nulls(struct) for struct in array.to_pylist()]


def _without_nulls(struct: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in struct.items() if value is not None}


def _concatenate_column(tables: Sequence[pyarrow.Table], name: str) -> pyarrow.ChunkedArray:
    """Returns a column of several tables as one.

    If its values have no type in common, they become texts.
    """
    with_column = [table for table in tables if name in table.column_names]
    if not any(_is_json(table, name) for table in with_column):
        parts = [
            pyarrow.table({name: t[name] if name in t.column_names else pyarrow.nulls(len(t))})
            for t in tables
        ]
        with suppress(pyarrow.ArrowException):
            together = pyarrow.unify_schemas([p.schema for p in parts], promote_options=PROMOTED)
            if _has_few_fields(together.field(name).type):
                return pyarrow.concat_tables(parts, promote_options=PROMOTED)[name]
    values = [value for table in tables for value in values_of(table, name)]
    if (array := _inferred(values)) is None:
        array = pyarrow.array([None if value is None else _text(value) for value in values])
    return pyarrow.chunked_array([array])


def _text(value: Any) -> str:
    """Returns a value as text, with question marks for what UTF-8 cannot encode."""
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return text.encode(errors="replace").decode()


def _check(facts: SampleFacts) -> None:
    """Checks that the table can hold the facts of a sample, which another program may have made.

    Raises:
        StorageError: A fact is no JSON value, or a kept column has the name of a fixed one.
    """
    where, columns = f"sample {facts.sample_idx}", facts.columns
    try:
        " ".join(columns).encode()  # names may not have lone surrogates; values may
        json.dumps(vars(facts))
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(
            f"{where}: its id, row, text preview or columns are no JSON values: {one_line(error)}"
        ) from error
    for name in SAMPLE_COLUMNS:
        if name in columns:
            raise StorageError(f"{where}: a column that is kept cannot be called {name}")


def _check_against(commit: Commit, table: pyarrow.Table, where: str) -> None:
    """Raises RunError unless the table lists the samples that the shard's JSON describes."""
    numbers = table["sample_idx"].to_pylist() or [None]
    expect(where, "number of samples", table.num_rows, commit.count)
    expect(where, "tokens", sum(table["tokens"].to_pylist()), commit.tokens)
    expect(where, "first sample", numbers[0], commit.first)
    expect(where, "last sample", numbers[-1], commit.last)
