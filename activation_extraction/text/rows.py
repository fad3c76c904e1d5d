"""The rows of JSON Lines and Parquet files, each with its position for messages about it."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet

from activation_extraction.common.errors import RunError, one_line
from activation_extraction.common.visible import plain_url

OTHER_COLUMNS = ("id", "train", "test")
REPLACE = (
    "replace the damaged file by an intact one; if its size changes, the run cannot continue and "
    "needs --overwrite"
)
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, pyarrow.ArrowException)


class UnusableRowError(Exception):
    """A row has no text that can be read. The message says why."""


class MissingColumnError(UnusableRowError):
    """A row lacks the column of the text."""


@dataclass(frozen=True)
class FileRow:
    """A row of a file. `read` gives its columns, or raises UnusableRowError.

    where: its position, for messages. row: the same as it is stored with a sample.
    """

    where: str
    row: dict[str, Any]
    read: Callable[[], dict[str, Any]]


def parquet_rows(
    urls: list[str], names: list[str], groups: list[int], text_column: str
) -> Iterator[FileRow]:
    """The rows of some row groups: group `groups[i]` of file `urls[i]`, which is called `names[i]`.

    Rows and row groups are counted from 0.
    """
    for (url, name), pairs in groupby(zip(urls, names, groups, strict=True), itemgetter(0, 1)):
        with _naming(url), fsspec.open(url, "rb") as file:
            parquet = pyarrow.parquet.ParquetFile(file)
            columns = parquet.schema_arrow.names
            wanted = [c for c in (text_column, *OTHER_COLUMNS) if c in columns]
            if text_column not in columns and not {"train", "test"} <= set(columns):
                wanted = columns  # for the message, which names all of them
            for *_, group in pairs:
                number = 0
                for batch in parquet.iter_batches(256, row_groups=[group], columns=wanted):
                    for at in range(batch.num_rows):
                        where = f"{url} row group {group} row {number} (both from 0)"
                        row = {"file": name, "row_group": group, "row": number}
                        yield FileRow(where, row, partial(_arrow_row, batch.slice(at, 1)))
                        number += 1


def _arrow_row(batch: pyarrow.RecordBatch) -> dict[str, Any]:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        raise UnusableRowError(f"not UTF-8: {error}") from error


def json_lines(urls: list[str], names: list[str]) -> Iterator[FileRow]:
    """The lines of some files, except blank ones; lines are counted from 1."""
    for url, name in zip(urls, names, strict=True):
        compression = "gzip" if plain_url(url).endswith(".gz") else None
        with _naming(url), fsspec.open(url, "rb", compression=compression) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    row = {"file": name, "line": number}
                    yield FileRow(f"{url} line {number}", row, partial(_json_object, line))


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Adds the file's name to any error inside the block."""
    try:
        yield
    except Exception as error:  # whatever a file system or a file format may raise
        remedy = REPLACE if isinstance(error, DAMAGE) else None
        raise RunError(f"{url}: {one_line(error)}", remedy=remedy) from error


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.rstrip(b"\r\n"))
    except json.JSONDecodeError as error:  # its text adds a line number of its own
        raise UnusableRowError(f"not JSON: {error.msg}, column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableRowError(f"not JSON: {one_line(error)}") from error
    if not isinstance(row, dict):
        raise UnusableRowError(f"expected a JSON object, found {type(row).__name__}")
    return row
