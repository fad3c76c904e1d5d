"""Reads the rows of files: JSON Lines, JSON arrays, CSV, Parquet and Arrow, here or at a URL.

Each row comes with its position in its file. A row that cannot be used says so when it is read, and
the rows after it follow; a file whose rest cannot be read ends the run. All but one row, or one
batch of rows of Parquet or Arrow, stays in its file, however large that is; a JSON array is read
whole.
"""

import codecs
import csv
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from operator import itemgetter
from typing import IO, Any, AnyStr

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
from isal.isal_zlib import IsalError

from activation_extraction.common.errors import RunError, one_line
from activation_extraction.common.log import log
from activation_extraction.text.file_forms import (
    FORM_BYTES,
    REPLACE,
    check_form,
    content_of,
    open_file,
    packing_of,
    unpacked_name,
)
from activation_extraction.text.file_list import TextFile, kind_of
from activation_extraction.text.rows import Columns, Struct, UnusableRowError

LONGEST = 2**27  # characters of a line, or of a field of CSV
LARGEST_ARRAY = 2**30  # bytes
MAGIC = b"ARROW1"  # begins an IPC file; a stream has none
AS_BYTES = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
# What is raised for a damaged file; libraries that unpack one also raise OSErrors without a number.
DAMAGE: tuple[Any, ...] = (
    EOFError,
    UnicodeError,
    zlib.error,
    IsalError,
    lzma.LZMAError,
    pyarrow.ArrowException,
)
LONG_WINDOW = "Frame requires too much memory"  # as libzstd says of more than 128 MB
LINE_ENDS = ("\n", "\r", 10, 13)  # the last character of a line, or its last byte
CUT_ROW = "%s: its last row is not read: it was not complete when the run began"
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
NOT_DOUBLED = (
    "save it with doubled quotes in quoted fields, as RFC 4180 has them, or replace it by a whole "
    "one if it is cut off"
)

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


def file_rows(pieces: list[tuple[TextFile, int]], wanted: Columns) -> Iterator[FileRow]:
    """Yields the rows of pieces: a file and the number of a row group of Parquet, else 0.

    Rows are counted from 0 in their file or group; lines of JSON, from 1. Blank lines are no rows,
    nor is the header of CSV. A file that is .json by its name may also be an array.
    """
    for file, groups in groupby(pieces, itemgetter(0)):
        kind = kind_of(file.url)
        if kind == "Parquet":
            rows = _rows_of_groups(file, [number for _, number in groups], wanted)
        elif kind == "Arrow":
            rows = _rows_of_batches(file, wanted)
        else:
            rows = _below_header(file) if kind == "CSV" else _lines_or_elements(file)
        yield from _naming(file.url, rows)


def _naming(url: str, rows: Iterable[FileRow]) -> Iterator[FileRow]:
    """Yields the rows. Adds the names of the file and of the last row to whatever is raised."""
    last = None
    try:
        for row in rows:
            yield row
            last = row.where
    except Exception as error:
        so_far = f"; the last row before: {last.removeprefix(url).lstrip()}" if last else ""
        unpacking = isinstance(error, OSError) and error.errno is None
        remedy = getattr(error, "remedy", None)
        if LONG_WINDOW in str(error):
            remedy = "unpack it with zstd -d --long=31, or pack it again without --long"
        elif isinstance(error, DAMAGE) or unpacking:
            remedy = REPLACE
        # What is wrong with a local file stays wrong; other files may have come incomplete.
        recurs = remedy is not None and ("://" not in url or isinstance(error, RunError))
        told = f"{url}: {one_line(error)}{so_far}"
        raise RunError(told, remedy=remedy, recurs=recurs) from error


def _lines_or_elements(file: TextFile) -> Iterator[FileRow]:
    with content_of(file.url, file.read_to) as content:
        if unpacked_name(file.url).endswith(".json"):
            first = content.peek().removeprefix(codecs.BOM_UTF8).lstrip()
            if first.partition(b"\n")[0].strip() == b"{":  # an object over several lines
                raise RunError(
                    "expected an array of objects, or an object on every line",
                    remedy="convert it to one of these, for example with jq -c",
                )
            if first.startswith(b"["):
                for number, element in enumerate(_array(content)):
                    yield _numbered(file, number, partial(_object, element))
                return
        for number, line in enumerate(_limited(content, file), start=1):
            if line.strip():
                row = {"file": file.name, "line": number}
                yield FileRow(f"{file.url} line {number}", row, partial(_json_object, line))


def _array(content: IO[bytes]) -> list[Any]:
    data = content.read(LARGEST_ARRAY + 1)
    if len(data) > LARGEST_ARRAY:
        raise RunError(
            f"is a JSON array of more than {LARGEST_ARRAY:,} bytes, expected an object on every "
            "line of so large a file",
            remedy="convert it, for example with jq -c '.[]'",
        )
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RunError(f"not a JSON array: {one_line(error)}", remedy=REPLACE) from error


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


def _below_header(file: TextFile) -> Iterator[FileRow]:
    csv.field_size_limit(LONGEST)  # for the whole process; it is 131,072 otherwise
    with content_of(file.url, file.read_to) as content:
        # Bytes that are not UTF-8 become lone surrogates, which their row alone has to answer for.
        text = io.TextIOWrapper(content, "utf-8-sig", errors="surrogateescape", newline="")
        rows = filter(None, _records(text, file))
        header = next(rows, [])
        for separator, words in SEPARATORS.items():
            if len(header) == 1 and separator in header[0]:
                raise RunError(
                    f"its header {header[0]!r:.80} has {words}, expected commas",
                    remedy="save it with commas between the fields",
                )
        for number, name in enumerate(header):
            if not name or name in header[:number]:
                raise RunError(
                    f"the header calls column {number + 1} {name!r}",
                    remedy="give each column a name of its own",
                )
        for number, fields in enumerate(rows):
            yield _numbered(file, number, partial(_csv_row, header, fields))


def _records(text: IO[str], file: TextFile) -> Iterator[list[str]]:
    try:
        yield from csv.reader(_limited(text, file), strict=True)
    except csv.Error as error:
        if "end of data" in str(error) and _byte_behind(file):
            log.warning(CUT_ROW, file.url)
            return
        why = one_line(error)
        if "expected after" in why or "end of data" in why:
            why += ": quotes in a quoted field are not doubled, or it has no end"
        raise RunError(why, remedy=NOT_DOUBLED) from error


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
            raise RunError(f"a line has {LONGEST:,} characters or more", remedy=REPLACE)
        if line[-1] not in LINE_ENDS and _byte_behind(file) not in (b"", b"\n", b"\r"):
            log.warning(CUT_ROW, file.url)
            return
        yield line


def _csv_row(header: list[str], fields: list[str]) -> dict[str, Any]:
    if len(fields) != len(header):
        raise UnusableRowError(
            f"expected {len(header)} fields as in the header, found {len(fields)}"
        )
    try:
        "".join(fields).encode()
    except UnicodeEncodeError as error:
        raise UnusableRowError("not UTF-8") from error
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
        except (UnusableRowError, OverflowError, ValueError) as error:  # as of a date after 9999
            raise UnusableRowError(f"column {name}: {one_line(error)}") from error
    return row


def _value(value: Any, kind: pyarrow.DataType) -> Any:
    """Returns what to_pylist made of a value of Arrow: JSON is decoded, and objects are Structs."""
    if value is None or not _holds_objects(kind):
        return value
    if isinstance(kind, pyarrow.JsonType):
        return _json(value)
    if isinstance(kind, pyarrow.StructType):
        return Struct({field.name: _value(value[field.name], field.type) for field in kind})
    if isinstance(kind, pyarrow.MapType):
        return [(key, _value(each, kind.item_type)) for key, each in value]
    return [_value(each, kind.value_type) for each in value]


@cache
def _holds_objects(kind: pyarrow.DataType) -> bool:
    """Whether values of a type hold JSON or objects; long lists of numbers are not walked."""
    if isinstance(kind, pyarrow.JsonType | pyarrow.StructType | pyarrow.MapType):
        return True
    of_list = getattr(kind, "value_type", None)
    return of_list is not None and _holds_objects(of_list)
