"""Writes files of rows for tests to read."""

import gzip
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes each row as a line of JSON."""
    return write_lines(path, map(json.dumps, rows))


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    """Writes these lines, packed where the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed(path.name, "\n".join([*lines, ""]).encode()))
    return path


def packed(name: str, data: bytes) -> bytes:
    """Returns the data as a file of this name holds it."""
    return gzip.compress(data) if name.endswith(".gz") else data


def as_parquet(table: pyarrow.Table, row_group_size: int | None = None) -> bytes:
    """Returns the table as a Parquet file holds it."""
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink, row_group_size=row_group_size)
    return sink.getvalue()


def as_arrow(table: pyarrow.Table, new: Any = pyarrow.ipc.new_file, **options: Any) -> bytes:
    """Returns the table as an Arrow file, or stream, holds it."""
    sink = io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table, **options)
    return sink.getvalue()


def write_parquet(path: Path, row_group_size: int = 2, **columns: Any) -> Path:
    """Writes these columns."""
    path.write_bytes(as_parquet(pyarrow.table(columns), row_group_size))
    return path
