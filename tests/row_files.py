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
    """Writes lines to a file, which is compressed if its name ends with .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed(path.name, "\n".join([*lines, ""]).encode()))
    return path


def packed(name: str, content: bytes) -> bytes:
    """Returns the bytes of a file of this name with this content."""
    return gzip.compress(content) if name.endswith(".gz") else content


def as_parquet(table: pyarrow.Table, row_group_size: int | None = None) -> bytes:
    """Returns the bytes of a Parquet file with this table."""
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink, row_group_size=row_group_size)
    return sink.getvalue()


def as_arrow(table: pyarrow.Table, new: Any = pyarrow.ipc.new_file, **options: Any) -> bytes:
    """Returns the bytes of an Arrow file, or of a stream if `new` opens one, with this table."""
    sink = io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table, **options)
    return sink.getvalue()


def write_parquet(path: Path, row_group_size: int = 2, **columns: Any) -> Path:
    """Writes a Parquet file with these columns."""
    path.write_bytes(as_parquet(pyarrow.table(columns), row_group_size))
    return path
