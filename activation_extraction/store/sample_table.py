"""The table of a shard's samples, `shard_0001.samples.parquet`, which is read without the shard.

The table contains a row for every sample, in the order of the shard. It has the following columns
(see also `SampleFacts`):

  sample_idx      number of the sample, which is unique in the run
  tokens          number of stored tokens
  doc_id          `id` of the sample's row in the data set
  text_preview    first 200 characters of the text
  row             position of the row in the data set, such as {"file": "a.jsonl", "line": 7}
  cut             number of tokens that were left out at the end of the document

It also contains the kept columns, under their own names: the columns of the data set that
--keep_columns names, or the `columns` that a program with a loop of its own passes to
`ActivationStorage.add_activation`.

The columns `sample_idx`, `tokens` and `cut` contain integers. Any other column has the type that
pyarrow infers from its values. If this type is a struct, readers leave out the fields of a value
that are null. A column contains JSON texts instead if a sample lacks the column, if pyarrow can
infer no type, if the type is too large (MAX_FIELDS) or contains an empty struct, or if the values
that are read from a column of this type would differ from the original values. Such a column
contains null for a sample that lacks it, and the metadata of its field in the Arrow schema contain
`encoding`: `JSON`.

Values are read back as they were before they were stored. The bytes of the file depend on the
content, on the version of pyarrow, and on the id of the process that wrote the file, which is
`writer` in the metadata of the Arrow schema.
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

# Name of the column that contains, for each sample, how many of its tokens are stored.
TOKENS = "tokens"
TO_CONTINUE = ["sample_idx", TOKENS, "row"]  # columns that are read when a run is continued
FIXED = {"sample_idx": pyarrow.int64(), "tokens": pyarrow.int32(), "cut": pyarrow.int64()}
JSON = {b"encoding": b"JSON"}  # metadata of a column that contains JSON texts
ABSENT = object()  # value of a sample that lacks a column; tables contain null for it
# Exceptions that pyarrow raises for large integers, lone surrogates, and names that are not text.
DOES_NOT_FIT = (pyarrow.ArrowException, OverflowError, ValueError, TypeError)
# Option of pyarrow with which concatenated columns get a type that can contain all values.
PROMOTED = "permissive"
# Largest number of lists and struct fields, counted together, in the type of a column. Every row
# needs memory for all of them, and deeply nested types have many of them.
MAX_FIELDS = 32


def pack_table(samples: Sequence[ShardSample], writer: str = "") -> bytes:
    """Returns the content of the file with the table of a shard's samples.

    Args:
        samples: Samples of the shard, by ascending `sample_idx`.
        writer: Id of the process that writes the file; "" to leave it out.

    Raises:
        StorageError: If a value does not fit into the table.
    """
    sample_table = _table(samples)
    if writer:
        sample_table = sample_table.replace_schema_metadata({"writer": writer})
    output_stream = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(sample_table, output_stream, compression="zstd")
    return output_stream.getvalue().to_pybytes()


def read_table(folder: Folder, commit: Commit) -> pyarrow.Table:
    """Reads the table of a shard's samples as it is stored.

    Columns with JSON texts are not decoded. `stored_samples` and `values_of` decode them.

    Args:
        folder: Folder of the shard.
        commit: Commit of the shard.

    Raises:
        RunError: If the table is missing, damaged or replaced, or lists other samples than its
            commit.
    """
    if not commit.count:
        return _table([])
    file_content, table_url = read_beside(folder, commit, commit.table_file)
    try:
        stored_table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(file_content)).read(
            use_threads=False
        )
    except (pyarrow.ArrowException, OSError) as error:
        raise RunError(f"{table_url}: cannot be read: {one_line(error):.200}") from error
    _check_against(commit, stored_table, table_url)
    return stored_table


def stored_samples(table: pyarrow.Table) -> list[StoredSample]:
    """Returns the samples in a table, in the order of its rows.

    Values that the table contains as JSON texts are decoded.

    Args:
        table: Table of samples, or some of its columns, which include `sample_idx` and `tokens`. A
            field of `SampleFacts` whose column is missing gets its default.
    """
    kept_value_by_column_of_samples: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    for column_name in table.column_names:
        if column_name not in SAMPLE_COLUMNS:
            for kept_value_by_column, column_value in zip(
                kept_value_by_column_of_samples, _decoded(table, column_name), strict=True
            ):
                if column_value is not ABSENT:
                    kept_value_by_column[column_name] = column_value
    sample_column_names = [
        column_name for column_name in SAMPLE_COLUMNS if column_name in table.column_names
    ]
    column_values_of_samples = zip(
        *(_decoded(table, column_name) for column_name in sample_column_names), strict=True
    )
    decoded_samples = []
    for column_values_of_sample, kept_value_by_column in zip(
        column_values_of_samples, kept_value_by_column_of_samples, strict=True
    ):
        value_by_column = dict(zip(sample_column_names, column_values_of_sample, strict=True))
        token_count = value_by_column.pop(TOKENS)
        sample_facts = SampleFacts(**value_by_column, columns=kept_value_by_column)
        decoded_samples.append(StoredSample(sample_facts, token_count))
    return decoded_samples


def samples_to_continue(table: pyarrow.Table) -> dict[int, StoredSample]:
    """Returns the samples in a table by `sample_idx`, with the facts that continuing a run needs.

    These facts are in the columns TO_CONTINUE. Text previews, and the columns of the data set that
    are stored with the samples, are left out, because they are large.

    Args:
        table: Table of samples.
    """
    samples_without_kept_columns = stored_samples(table.select(TO_CONTINUE))
    return {sample.facts.sample_idx: sample for sample in samples_without_kept_columns}


def values_of(table: pyarrow.Table, name: str) -> list[Any]:
    """Returns the decoded values of a column, as they were before they were stored.

    Args:
        table: Table of samples.
        name: Name of the column.

    Returns:
        A value for each sample; None for a sample that lacks the column.
    """
    if name not in table.column_names:
        return [None] * table.num_rows
    return [
        None if stored_value is ABSENT else stored_value for stored_value in _decoded(table, name)
    ]


def concatenate_tables(tables: Iterable[pyarrow.Table]) -> pyarrow.Table:
    """Returns one table with the samples of several tables.

    Columns with JSON texts are decoded if pyarrow has a type for all of their values.

    Args:
        tables: Tables, in the order of the samples. If there are no tables, the result has no rows.
    """
    tables_to_concatenate = list(tables) or [_table([])]
    column_names = dict.fromkeys(
        column_name for table in tables_to_concatenate for column_name in table.column_names
    )
    return pyarrow.table(
        {
            column_name: _concatenate_column(tables_to_concatenate, column_name)
            for column_name in column_names
        }
    )


def _table(samples: Sequence[ShardSample]) -> pyarrow.Table:
    facts_of_samples = [sample.facts for sample in samples]
    for sample_facts in facts_of_samples:
        _check_facts(sample_facts)
    values_by_column: dict[str, list[Any]] = {}
    for column_name in SAMPLE_COLUMNS:
        if column_name == TOKENS:
            values_by_column[column_name] = [len(sample.positions) for sample in samples]
        else:
            values_by_column[column_name] = [
                getattr(sample_facts, column_name) for sample_facts in facts_of_samples
            ]
    kept_column_names = dict.fromkeys(
        kept_column_name
        for sample_facts in facts_of_samples
        for kept_column_name in sample_facts.columns
    )
    for column_name in kept_column_names:
        values_by_column[column_name] = [
            sample_facts.columns.get(column_name, ABSENT) for sample_facts in facts_of_samples
        ]
    fields_and_columns = [
        _column_of(column_name, column_values)
        for column_name, column_values in values_by_column.items()
    ]
    arrow_schema = pyarrow.schema([column_field for column_field, _ in fields_and_columns])
    return pyarrow.table(
        [column_array for _, column_array in fields_and_columns], schema=arrow_schema
    )


def _column_of(name: str, values: list[Any]) -> tuple[pyarrow.Field, pyarrow.Array]:
    """Makes a column of a table from its values.

    Args:
        name: Name of the column.
        values: Value of each sample; ABSENT for a sample that lacks the column.

    Returns:
        A tuple of the column's field in the Arrow schema, and its values. A column in FIXED has the
        type that FIXED contains. Any other column has the type that pyarrow infers, if no sample
        lacks the column, and if the values that are read from a column of this type equal the
        original values. Otherwise it contains JSON texts, and null for a sample that lacks it.
    """
    if name in FIXED:
        return pyarrow.field(name, FIXED[name]), pyarrow.array(values, FIXED[name])
    if ABSENT not in values and (column_array := _array_or_none(values)) is not None:
        if json.dumps(_plain(column_array), sort_keys=True) == json.dumps(values, sort_keys=True):
            return pyarrow.field(name, column_array.type), column_array
    json_texts = [
        None if sample_value is ABSENT else json.dumps(sample_value) for sample_value in values
    ]
    column_array = pyarrow.array(json_texts, pyarrow.string())
    return pyarrow.field(name, column_array.type, metadata=JSON), column_array


def _array_or_none(values: Sequence[Any]) -> pyarrow.Array | None:
    """Converts the values of a column to an array of the type that pyarrow infers from them.

    Args:
        values: Value of each sample.

    Returns:
        The array. None if pyarrow cannot infer a type or convert the values to it, if the type is
        too large (its lists and struct fields together are more than MAX_FIELDS), or if it contains
        an empty struct, which Parquet cannot store.
    """
    with suppress(*DOES_NOT_FIT):
        arrow_type = pyarrow.infer_type(values)
        return pyarrow.array(values, arrow_type) if _has_few_fields(arrow_type) else None
    return None


def _has_few_fields(arrow_type: pyarrow.DataType) -> bool:
    type_text = str(arrow_type)
    # Parquet has no empty structs.
    return type_text.count(": ") <= MAX_FIELDS and "struct<>" not in type_text


def _is_json(table: pyarrow.Table, name: str) -> bool:
    column_metadata = table.schema.field(name).metadata or {}
    return column_metadata.items() >= JSON.items()


def _decoded(table: pyarrow.Table, name: str) -> list[Any]:
    """Returns the values of a column as they were before they were stored.

    Args:
        table: Table of samples.
        name: Name of one of the table's columns.

    Returns:
        The value of each sample. If the column contains JSON texts, null in the table means that
        the sample lacks the column, and becomes the constant ABSENT. In any other column, null
        becomes None.
    """
    stored_column = table[name].combine_chunks()
    if _is_json(table, name):
        return [
            ABSENT if json_text is None else json.loads(json_text)
            for json_text in stored_column.to_pylist()
        ]
    return _plain(stored_column)


def _plain(array: pyarrow.Array) -> list[Any]:
    """Returns the values of an array as Python objects, leaving out null fields of structs.

    If a struct of a column has a field, pyarrow adds it, with the value null, to all structs of the
    column that lack it.
    """
    if not pyarrow.types.is_struct(array.type):
        return array.to_pylist()
    return [None if struct is None else _without_nulls(struct) for struct in array.to_pylist()]


def _without_nulls(struct: dict[str, Any]) -> dict[str, Any]:
    return {
        field_name: field_value
        for field_name, field_value in struct.items()
        if field_value is not None
    }


def _concatenate_column(tables: Sequence[pyarrow.Table], name: str) -> pyarrow.ChunkedArray:
    """Returns one column with the values of a column in several tables.

    If Arrow has no type for all values, the values are converted to texts.

    Args:
        tables: Tables, in the order of the samples. The samples of a table that lacks the column
            get null.
        name: Name of the column.
    """
    tables_with_column = [table for table in tables if name in table.column_names]
    if not any(_is_json(table, name) for table in tables_with_column):
        single_column_tables = [
            pyarrow.table(
                {name: table[name] if name in table.column_names else pyarrow.nulls(len(table))}
            )
            for table in tables
        ]
        with suppress(pyarrow.ArrowException):
            common_schema = pyarrow.unify_schemas(
                [column_table.schema for column_table in single_column_tables],
                promote_options=PROMOTED,
            )
            if _has_few_fields(common_schema.field(name).type):
                return pyarrow.concat_tables(single_column_tables, promote_options=PROMOTED)[name]
    concatenated_values = [
        column_value for table in tables for column_value in values_of(table, name)
    ]
    if (column_array := _array_or_none(concatenated_values)) is None:
        column_array = pyarrow.array(
            [
                None if column_value is None else _as_text(column_value)
                for column_value in concatenated_values
            ]
        )
    return pyarrow.chunked_array([column_array])


def _as_text(value: Any) -> str:
    """Returns a value as text. Question marks replace characters that UTF-8 cannot encode."""
    value_text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return value_text.encode(errors="replace").decode()


def _check_facts(facts: SampleFacts) -> None:
    """Checks that the facts of a sample fit into a table.

    This is necessary because a program with a loop of its own may have made the facts.

    Args:
        facts: Facts of the sample.

    Raises:
        StorageError: If a fact is not a JSON value, or if the name of one of the further columns of
            the sample (`facts.columns`) is in SAMPLE_COLUMNS or contains a lone surrogate.
    """
    sample_phrase = f"sample {facts.sample_idx}"
    kept_value_by_column = facts.columns
    try:
        # Encoding raises UnicodeEncodeError, a ValueError, if a column's name contains a lone
        # surrogate. The values of columns may contain lone surrogates.
        " ".join(kept_value_by_column).encode()
        json.dumps(vars(facts))
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(
            f"{sample_phrase}: its id, row, text preview or columns are no JSON values: "
            f"{one_line(error)}"
        ) from error
    for column_name in SAMPLE_COLUMNS:
        if column_name in kept_value_by_column:
            raise StorageError(
                f"{sample_phrase}: a column that is kept cannot be called {column_name}"
            )


def _check_against(commit: Commit, table: pyarrow.Table, where: str) -> None:
    """Compares the samples in a table with the commit of the shard.

    Args:
        commit: Commit of the shard.
        table: Table of samples.
        where: URL of the table's file, for messages.

    Raises:
        RunError: If the numbers of samples or tokens, or the first or the last sample, differ.
    """
    sample_numbers = table["sample_idx"].to_pylist() or [None]
    expect(where, "number of samples", table.num_rows, commit.count)
    expect(where, "tokens", sum(table["tokens"].to_pylist()), commit.tokens)
    expect(where, "first sample", sample_numbers[0], commit.first)
    expect(where, "last sample", sample_numbers[-1], commit.last)
