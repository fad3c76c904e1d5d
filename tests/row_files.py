"""Writes files of rows for tests to read."""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes each row as a line of JSON."""
    return write_lines(path, map(json.dumps, rows))


def write_lines(path: Path, lines: Iterable[str], end: str = "\n") -> Path:
    """Writes these lines, packed where the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed(path.name, end.join([*lines, ""]).encode()))
    return path


def packed(name: str, data: bytes) -> bytes:
    """Returns the data as a file of this name holds it."""
    return gzip.compress(data) if name.endswith(".gz") else data


def write_parquet(path: Path, row_group_size: int = 2, **columns: Any) -> Path:
    """Writes these columns."""
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
    return path
