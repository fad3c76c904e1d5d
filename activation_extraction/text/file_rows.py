"""Reads the rows of files: JSON Lines, JSON arrays, CSV, Parquet and Arrow, here or at a URL.

Each row comes with its position in its file. A row that cannot be used says so when it is read, and
the rows after it follow; a file whose rest cannot be read ends the run. All but one row, or one
batch of rows of Parquet or Arrow, stays in its file, however large that is.
"""

import csv
import gzip
import io
import json
import lzma
import re
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from operator import itemgetter
from pathlib import PurePath
from typing import IO, Any, AnyStr, TextIO

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from activation_extraction.common.errors import RunError, one_line
from activation_extraction.common.log import log
from activation_extraction.text.file_forms import (
    FORM_BYTES,
    REPLACE,
    UnreadableFileError,
    check_form,
    content_of,
    open_file,
    packing_of,
    unpacked_name,
)
from activation_extraction.text.file_list import TextFile, kind_of
from activation_extraction.text.rows import Columns, Struct, UnusableRowError

LONGEST = 2**27  # characters of a line, or of an element of an array
PIECE = 2**16  # characters that are read at a time
BLANK = r"[ \t\r\n]*"
OPENING = re.compile(rf"{BLANK}\[{BLANK}(\])?")  # what comes before the first element of an array
BETWEEN = re.compile(rf"{BLANK}(?:,{BLANK}|(\]))")  # before the next one
MAGIC = b"ARROW1"  # begins an IPC file; a stream has none
AS_BYTES = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
DAMAGE = (
    *(EOFError, UnicodeError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, csv.Error),
    pyarrow.ArrowException,
)
# Packages and modules that raise an OSError of their own for a damaged file.
UNPACKERS = {"pyarrow", "bz2", "_compression", "_streams"}
LINE_ENDS = ("\n", "\r", 10, 13)  # the last character of a line, or its last byte
CUT_ROW = "%s: its last row is not read: it was not complete when the run began"
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
NOT_DOUBLED = "save it with doubled quotes in quoted fields, as RFC 4180 has them"
# A quote in a field, which would end right behind it if quotes were escaped by backslashes.
AMBIGUOUS = re.compile(r'\\"(?=[,\r\n])')


@dataclass(frozen=True)
class FileRow:
    """A row of a file. `read` returns its columns, or raises UnusableRowError.

    where: its position, for messages. row: the same as it is stored with a sample.
    """

    where: str
    row: dict[str, Any]
    read: Callable[[], dict[str, Any]]


def file_rows(pieces: list[TextFile], wanted: Columns) -> Iterator[FileRow]:
    """Yields the rows of files that are not Parquet, counted from 0; lines of JSON, from 1.

    Blank lines are no rows, nor is the header of CSV. A file that is .json by its name may also be
    an array.
    """
    for file in pieces:
        kind = kind_of(file.url)
        if kind == "Arrow":
            rows = _rows_of_batches(file, wanted)
        elif kind == "CSV":
            rows = _below_header(file)
        elif unpacked_name(file.url).endswith(".json"):
            rows = _elements_or_lines(file)
        else:
            rows = _lines(file)
        yield from _naming(file.url, rows)


def parquet_rows(pieces: list[tuple[TextFile, int]], wanted: Columns) -> Iterator[FileRow]:
    """Yields the rows of row groups, each a file and a number. All are counted from 0."""
    for file, groups in groupby(pieces, itemgetter(0)):
        numbers = [number for _, number in groups]
        yield from _naming(file.url, _rows_of_groups(file, numbers, wanted))


def _naming(url: str, rows: Iterable[FileRow]) -> Iterator[FileRow]:
    """Yields the rows. Adds the names of the file and of the last row to whatever is raised."""
    last = None
    try:
        for row in rows:
            yield row
            last = row.where
    except Exception as error:
        so_far = f"; the last row before: {last.removeprefix(url).lstrip()}" if last else ""
        remedy = REPLACE if _is_damage(error) else getattr(error, "remedy", None)
        raise RunError(f"{url}: {one_line(error)}{so_far}", remedy=remedy) from error


def _is_damage(error: Exception) -> bool:
    """Whether a file is to blame. OSErrors are those of file systems, and of what unpacks files."""
    raised_in = PurePath(traceback.extract_tb(error.__traceback__)[-1].filename)
    unpacking = not UNPACKERS.isdisjoint((raised_in.stem, raised_in.parent.name))
    return isinstance(error, DAMAGE) or (isinstance(error, OSError) and unpacking)


def _lines(file: TextFile) -> Iterator[FileRow]:
    with content_of(file.url, file.read_to) as content:
        for number, line in enumerate(_limited(content, file), start=1):
            if line.strip():
                row = {"file": file.name, "line": number}
                yield FileRow(f"{file.url} line {number}", row, partial(_json_object, line))


def _json_object(line: bytes) -> dict[str, Any]:
    return _object(_json(line.rstrip(b"\r\n")))


def _json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:  # its text adds a line number of its own
        raise UnusableRowError(f"not JSON: {error.msg}, column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableRowError(f"not JSON: {one_line(error)}") from error


def _object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UnusableRowError(f"expected a JSON object, found {type(row).__name__}")
    return row


def _numbered(file: TextFile, number: int, read: Callable[[], dict[str, Any]]) -> FileRow:
    return FileRow(f"{file.url} row {number} (from 0)", {"file": file.name, "row": number}, read)


@contextmanager
def _characters(file: TextFile) -> Iterator[TextIO]:
    """Opens a file for its text, in which bytes that are not UTF-8 are lone surrogates."""
    with content_of(file.url, file.read_to) as content:
        yield io.TextIOWrapper(content, "utf-8-sig", errors="surrogateescape", newline="")


def _is_utf8(texts: Iterable[str]) -> bool:
    try:
        "".join(texts).encode()
        return True
    except UnicodeEncodeError:
        return False


def _elements_or_lines(file: TextFile) -> Iterator[FileRow]:
    with _characters(file) as text:
        first = text.read(PIECE).lstrip(" \t\r\n").partition("\n")[0]
    if first.strip() == "{":  # an object over several lines
        raise UnreadableFileError("expected an array of objects, or an object on every line")
    if not first.startswith("["):
        yield from _lines(file)
        return
    with _characters(file) as text:
        for number, (value, source) in enumerate(_elements(text)):
            yield _numbered(file, number, partial(_element, value, source))


def _element(value: Any, source: str) -> dict[str, Any]:
    if not _is_utf8([source]):
        raise UnusableRowError("not UTF-8")
    return _object(value)


def _elements(text: TextIO) -> Iterator[tuple[Any, str]]:
    """Yields each element of a JSON array and its source. Raises UnreadableFileError where it ends.

    Whatever cannot be understood may only be cut off, so it is tried again with more of the text.
    """
    decode = json.JSONDecoder().raw_decode
    buffer, at, before = "", 0, OPENING
    while True:
        try:
            found = before.match(buffer, at)
            if not found:
                raise json.JSONDecodeError("expected a comma or the end of the array", buffer, at)
            if found[1]:
                break
            value, end = decode(buffer, found.end())
            if end == len(buffer):  # a number may go on
                raise json.JSONDecodeError("the array does not end", buffer, end)
        except json.JSONDecodeError as error:
            size = len(buffer) - at
            if size >= LONGEST:
                raise UnreadableFileError(
                    f"a row has {LONGEST:,} characters or more, or is not JSON: {error.msg}"
                ) from error
            more = text.read(max(PIECE, size))
            if not more:
                raise UnreadableFileError(f"not a JSON array: {error.msg}") from error
            buffer, at = buffer[at:] + more, 0
        except (ValueError, RecursionError) as error:
            raise UnreadableFileError(f"not JSON: {one_line(error)}") from error
        else:
            yield value, buffer[found.end() : end]
            at, before = end, BETWEEN
    behind = buffer[found.end() :]
    while behind:
        if behind.strip(" \t\r\n"):
            raise UnreadableFileError("there is more behind the array; expected one array")
        behind = text.read(PIECE)


def _below_header(file: TextFile) -> Iterator[FileRow]:
    csv.field_size_limit(LONGEST)  # for the whole process; it is 131,072 otherwise
    with _characters(file) as text:
        rows = filter(None, _records(text, file))
        header = next(rows, [])
        for separator, words in SEPARATORS.items():
            if len(header) == 1 and separator in header[0]:
                raise UnreadableFileError(
                    f"its header {header[0]!r:.80} has {words}, expected commas",
                    "save it with commas between the fields",
                )
        if "" in header:
            raise UnreadableFileError(f"column {header.index('') + 1} has no name in the header")
        column, times = next(iter(Counter(header).most_common(1)), ("", 0))
        if times > 1:
            raise UnreadableFileError(f"the header names {column!r} {times} times")
        if not _is_utf8(header):
            raise UnreadableFileError("the header is not UTF-8")
        for number, fields in enumerate(rows):
            yield _numbered(file, number, partial(_csv_row, header, fields))


def _records(text: TextIO, file: TextFile) -> Iterator[list[str]]:
    try:
        yield from csv.reader(_limited(text, file), strict=True)
    except csv.Error as error:
        if "expected after" in str(error):
            raise UnreadableFileError(
                f"{one_line(error)}: quotes in a quoted field are not doubled; they are bare, or "
                "escaped by backslashes",
                NOT_DOUBLED,
            ) from error
        if "end of data" in str(error):
            if _byte_behind(file):
                log.warning(CUT_ROW, file.url)
                return
            raise UnreadableFileError(
                f"{one_line(error)}: a quoted field has no end; the file is cut off, or quotes in "
                "it are not doubled",
                f"replace it by a whole one, or {NOT_DOUBLED}",
            ) from error
        raise


def _byte_behind(file: TextFile) -> bytes:
    """Returns what follows where a file is read to; b"" if it ends there, or is packed."""
    if file.read_to is None or packing_of(file.url):
        return b""
    with open_file(file.url) as opened:
        opened.seek(file.read_to)
        return opened.read(1)


def _limited(lines: IO[AnyStr], file: TextFile) -> Iterator[AnyStr]:
    """Yields the lines up to where a file may be read, except one that goes on behind that.

    A file without any end of a line must not fill the memory, nor a small one that unpacks to such
    a line.
    """
    while line := lines.readline(LONGEST):
        if len(line) == LONGEST:
            raise UnreadableFileError(f"a line has {LONGEST:,} characters or more")
        if line[-1] not in LINE_ENDS and _byte_behind(file) not in (b"", b"\n", b"\r"):
            log.warning(CUT_ROW, file.url)
            return
        yield line


def _csv_row(header: list[str], fields: list[str]) -> dict[str, Any]:
    if len(fields) != len(header):
        raise UnusableRowError(
            f"expected {len(header)} fields as in the header, found {len(fields)}"
        )
    if not _is_utf8(fields):
        raise UnusableRowError("not UTF-8")
    for name, text in zip(header, fields, strict=True):
        if '\\"' in text and text.count('"') == len(AMBIGUOUS.findall(text)):
            raise UnusableRowError(
                f'column {name}: a \\" before a comma or the end of a line ends the field where '
                "quotes are escaped by backslashes, and is in it where they are doubled"
            )
    return dict(zip(header, fields, strict=True))


def _rows_of_batches(file: TextFile, wanted: Columns) -> Iterator[FileRow]:
    """Yields the rows of an Arrow file, with the needed columns only."""
    number = 0
    with open_file(file.url) as opened:
        first = opened.read(FORM_BYTES)
        check_form(first)
        is_stream = not first.startswith(MAGIC)
        open_arrow = pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file
        opened.seek(0)
        names = open_arrow(opened).schema.names
        fields = [names.index(column) for column in wanted.among(names)]
        opened.seek(0)
        arrow = open_arrow(opened, options=pyarrow.ipc.IpcReadOptions(included_fields=fields))
        batches = arrow if is_stream else map(arrow.get_batch, range(arrow.num_record_batches))
        for batch in batches:
            for column in batch.columns:  # damage must not crash the process; bad text may pass
                as_bytes = AS_BYTES.get(column.type)
                (column.view(as_bytes) if as_bytes else column).validate(full=True)
            for at in range(len(batch)):
                yield _numbered(file, number, partial(_arrow_row, batch.slice(at, 1)))
                number += 1


def _rows_of_groups(file: TextFile, groups: list[int], wanted: Columns) -> Iterator[FileRow]:
    with open_file(file.url) as opened:
        parquet = pyarrow.parquet.ParquetFile(opened)
        columns = wanted.among(parquet.schema_arrow.names)
        for group in groups:
            number = 0
            for batch in parquet.iter_batches(256, row_groups=[group], columns=columns):
                for at in range(batch.num_rows):
                    where = f"{file.url} row group {group} row {number} (both from 0)"
                    row = {"file": file.name, "row_group": group, "row": number}
                    yield FileRow(where, row, partial(_arrow_row, batch.slice(at, 1)))
                    number += 1


def _arrow_row(batch: pyarrow.RecordBatch) -> dict[str, Any]:
    """Returns the only row. Each column is read by itself, to name the one that cannot be read."""
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            if column.type == pyarrow.time64("ns"):  # Python's times end at microseconds
                column = column.cast(pyarrow.string())
            row[name] = _value(column[0].as_py(), column.type)
        except UnicodeDecodeError as error:
            raise UnusableRowError(f"not UTF-8: {error}") from error
        except UnusableRowError as error:
            raise UnusableRowError(f"column {name}: {error}") from error
        except (OverflowError, ValueError) as error:  # such as a date after the year 9999
            raise UnusableRowError(f"column {name}: {one_line(error)}") from error
    return row


def _value(value: Any, kind: pyarrow.DataType) -> Any:
    """Returns what to_pylist made of a value of Arrow: JSON is decoded, and objects are Structs."""
    if value is None or not _holds_objects(kind):
        return value
    if isinstance(kind, pyarrow.JsonType):
        return _json(value)
    if pyarrow.types.is_struct(kind):
        return Struct({field.name: _value(value[field.name], field.type) for field in kind})
    if pyarrow.types.is_map(kind):
        return [(key, _value(each, kind.item_type)) for key, each in value]
    return [_value(each, kind.value_type) for each in value]


@cache
def _holds_objects(kind: pyarrow.DataType) -> bool:
    """Whether values of a type hold JSON or objects; long lists of numbers are not walked."""
    if isinstance(kind, pyarrow.JsonType) or pyarrow.types.is_struct(kind):
        return True
    if pyarrow.types.is_map(kind):
        return _holds_objects(kind.item_type)
    lists = pyarrow.ListType, pyarrow.LargeListType, pyarrow.FixedSizeListType
    views = pyarrow.ListViewType, pyarrow.LargeListViewType
    return isinstance(kind, (*lists, *views)) and _holds_objects(kind.value_type)
