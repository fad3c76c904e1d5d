"""Reads the rows of one file of a data set, a local one or one at a URL.

The table KINDS at the end of this module declares which kinds of files there are, by which
extensions they are recognised, and which function reads their rows. Compressed files are
decompressed while they are read. A file in another format than its name says is refused as what it
is, such as a Git LFS pointer or a zip archive.

Each row comes with its position in its file. A row that cannot be used raises its error when its
columns are read, and the rows after it follow; an error of the file itself ends the run. At most
one row, or one batch of rows of Parquet or Arrow, is in memory, however large the file is; but a
JSON array is read whole. file_list.py lists the files of a data set.
"""

import codecs
import csv
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import IO, Any, AnyStr, BinaryIO, NamedTuple

import fsspec
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
from fsspec.compression import compr
from isal.isal_zlib import IsalError

from activation_extraction.common.errors import RunError, one_line
from activation_extraction.common.log import log
from activation_extraction.common.visible import plain_url
from activation_extraction.text.rows import RowForm, SourceRow, UnusableRowError
from activation_extraction.text.structs import Struct

REPLACE = (
    "if the file is damaged, replace it by an intact one; if it has changed since the run began, "
    "the run needs --overwrite"
)
CUT_ROW = "%s: its last row is not read: it was not complete when the run began"

# What damaged files raise. Decompressors also raise OSErrors without a number.
DAMAGE: tuple[Any, ...] = (
    EOFError,
    UnicodeError,
    zlib.error,
    IsalError,
    lzma.LZMAError,
    pyarrow.ArrowException,
)
LONG_WINDOW = "Frame requires too much memory"  # libzstd's message for windows above 128 MB


@dataclass(frozen=True)
class DataFile:
    """A file of a data set.

    Attributes:
        url: Local path, or URL.
        name: Path relative to the folder of the data set, to the folder of a single file, or to the
            folder before the first wildcard of a glob.
        size: Size in bytes.
        version: Checksum or version that the store of a URL has for the content, "" if it has none;
            for a local file, the time of its last modification in nanoseconds.
    """

    url: str
    name: str
    size: int
    version: str = ""

    @property
    def local(self) -> bool:
        """Whether the file is on this machine."""
        return "://" not in self.url

    @property
    def kind(self) -> "FileKind":
        """The kind of the file. `list_files` lists no file without a kind."""
        kind = kind_of(self.url)
        assert kind is not None
        return kind

    @property
    def may_grow(self) -> bool:
        """Whether rows may be appended to the file after the run has begun."""
        return self.local and self.kind.is_text

    @property
    def read_to(self) -> int | None:
        """The number of bytes that are read from the start of the file; None for all."""
        return self.size if self.may_grow else None


@dataclass(frozen=True)
class FileKind:
    """A kind of files.

    Attributes:
        name: Name of the kind, for messages.
        extensions: Extensions of its files, in lower case; names are compared case-insensitively.
        rows: Function that yields the rows of a file. Its arguments are the file; the number of a
            row group, which is 0 for kinds without row groups; and the columns to read, with how.
        is_text: Whether files of this kind are text. Text files may be compressed, and rows may be
            appended to them.
    """

    name: str
    extensions: tuple[str, ...]
    rows: Callable[[DataFile, int, RowForm], Iterator[SourceRow]]
    is_text: bool = False


def kind_of(url: str) -> FileKind | None:
    """Returns the kind of a file by its name; None if the file is not data.

    A name with no other extension than .zst is JSON Lines, as in the dumps of Reddit.
    """
    name, compression = uncompressed_name(url), compression_of(url)
    if compression == ".zst" and "." not in name.rpartition("/")[2]:
        return JSON
    kind = next((kind for kind in KINDS if name.endswith(kind.extensions)), None)
    if compression and kind is not None and not kind.is_text:
        return None
    return kind


def count_row_groups(file: DataFile) -> int:
    """Returns the number of row groups of a Parquet file; 1 for any other file.

    Raises:
        RunError: If the file is in another format, which the message names.
        ArrowException: If the file is damaged.
    """
    if file.kind is not PARQUET:
        return 1
    with open_file(file.url) as opened:
        try:
            return pyarrow.parquet.ParquetFile(opened).num_row_groups
        except pyarrow.ArrowException:
            opened.seek(0)
            refuse_other_formats(opened.read(FORMAT_BYTES))
            raise


def file_rows(file: DataFile, row_group: int, form: RowForm) -> Iterator[SourceRow]:
    """Yields the rows of a file.

    Rows are counted from 0 within their file or row group; lines of JSON Lines from 1. Blank lines
    and the header of CSV are not rows.

    Args:
        file: The file.
        row_group: The number of the row group that is read of a Parquet file; 0 for other files.
        form: The columns to read of each row, and how. Of Parquet and Arrow files, only these
            columns are read.

    Raises:
        RunError: If the file cannot be read. The message names it and the last row before.
    """
    last = None
    try:
        for row in file.kind.rows(file, row_group, form):
            yield row
            last = row.where
    except Exception as error:
        progress = f"; the last row before: {last.removeprefix(file.url).lstrip()}" if last else ""
        remedy = getattr(error, "remedy", None)
        is_decompression_error = isinstance(error, OSError) and error.errno is None
        if LONG_WINDOW in str(error):
            remedy = "decompress it with zstd -d --long=31, or compress it again without --long"
        elif isinstance(error, DAMAGE) or is_decompression_error:
            remedy = REPLACE
        # A damaged local file stays damaged, but a file at a URL may have been transferred wrongly.
        recurs = remedy is not None and (file.local or isinstance(error, RunError))
        message = f"{file.url}: {one_line(error)}{progress}"
        raise RunError(message, remedy=remedy, recurs=recurs) from error


# Opening files, and refusing those in another format


class Compression(NamedTuple):
    """A compression of text files.

    Attributes:
        codec: Name of the fsspec codec that decompresses the files. zstd files are decompressed by
            pyarrow instead, because fsspec would need another package for them.
        magic: First bytes of a compressed file, by which it is recognised.
    """

    codec: str
    magic: bytes


COMPRESSIONS = {  # extension -> compression
    ".gz": Compression("gzip", b"\x1f\x8b\x08"),
    ".bz2": Compression("bz2", b"BZh91AY&SY"),
    ".xz": Compression("xz", b"\xfd7zXZ\x00"),
    ".zst": Compression("zstd", b"\x28\xb5\x2f\xfd"),
}


class OtherFormat(NamedTuple):
    """A format that is not read, and what to do with a file in it, for messages."""

    description: str
    remedy: str


LFS_POINTER = OtherFormat(
    "is a Git LFS pointer instead of the data", "git lfs pull, in its repository, brings the data"
)
WEB_PAGE = OtherFormat("is a web page instead of the data", "download the data again")
UTF16 = OtherFormat(
    "is UTF-16, expected UTF-8", "convert it, for example with iconv -f UTF-16 -t UTF-8"
)
UTF32 = OtherFormat(
    "is UTF-32, expected UTF-8", "convert it, for example with iconv -f UTF-32 -t UTF-8"
)
# First bytes of a file, case-insensitive -> its format. The byte order mark of UTF-32 begins like
# that of UTF-16, so it comes first.
OTHER_FORMATS = {
    b"version https://git-lfs.github.com/": LFS_POINTER,
    **{
        compression.magic: OtherFormat(
            f"is compressed with {compression.codec}", f"give it a name that ends in {extension}"
        )
        for extension, compression in COMPRESSIONS.items()
    },
    b"PK\x03\x04": OtherFormat("is a zip archive", "extract it"),
    b"<!doctype html": WEB_PAGE,
    b"<html": WEB_PAGE,
    codecs.BOM_UTF32_LE: UTF32,
    codecs.BOM_UTF32_BE: UTF32,
    codecs.BOM_UTF16_LE: UTF16,
    codecs.BOM_UTF16_BE: UTF16,
}
FORMAT_BYTES = 64  # the number of bytes at the start of a file that show its format
BUFFER_BYTES = 2**16  # the size of the buffer for reading text files


def compression_of(url: str) -> str:
    """Returns the extension of a compressed file, a key of COMPRESSIONS; "" for other files."""
    name = plain_url(url).lower()
    return next((extension for extension in COMPRESSIONS if name.endswith(extension)), "")


def uncompressed_name(url: str) -> str:
    """Returns the name of a file in lower case, without the extension of its compression."""
    return plain_url(url).lower().removesuffix(compression_of(url))


def open_file(url: str) -> Any:
    """Opens a local file or a URL for reading its bytes."""
    # fsspec is not used for local paths, in which it would take :: for a chain of URLs.
    return fsspec.open(url, "rb") if "://" in url else open(url, "rb")


@contextmanager
def text_content(file: DataFile) -> Iterator[io.BufferedReader]:
    """Opens a text file for reading its bytes, decompressed, up to `file.read_to`.

    Raises:
        RunError: If the file is in another format.
    """
    extension = compression_of(file.url)
    with ExitStack() as stack:
        opened = stack.enter_context(open_file(file.url))
        raw = opened if file.read_to is None else Beginning(opened, file.read_to)
        content = io.BufferedReader(raw, BUFFER_BYTES)
        if extension:
            refuse_other_formats(content.peek(), extension)
            if extension == ".zst":
                decompressed = pyarrow.CompressedInputStream(content, "zstd")
            else:
                decompressed = compr[COMPRESSIONS[extension].codec](content, mode="r")
            content = io.BufferedReader(stack.enter_context(decompressed), BUFFER_BYTES)
        first = content.peek()
        refuse_other_formats(first)
        # UTF-16 without a byte order mark: one byte of an ASCII letter is 0.
        if len(first) > 1 and (first[0] == 0) != (first[1] == 0):
            raise RunError(UTF16.description, remedy=UTF16.remedy)
        yield content


class Beginning(io.RawIOBase):
    """The first bytes of a file, as a file of its own."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        """Takes the file, and the number of bytes."""
        self._file, self._left = file, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(min(len(buffer), self._left))
        buffer[: len(content)] = content
        self._left -= len(content)
        return len(content)


def refuse_other_formats(first: bytes, compression: str = "") -> None:
    """Checks that the content of a file is in the format that its name says.

    Args:
        first: The first bytes of the file.
        compression: The extension of its compression, a key of COMPRESSIONS; "" if its name has
            no such extension, or if the bytes have been decompressed already.

    Raises:
        RunError: If the file is in one of OTHER_FORMATS, or is not compressed as its name says.
    """
    expected = COMPRESSIONS[compression].magic if compression else None
    lower = first.lower()
    for magic, other in OTHER_FORMATS.items():
        if magic != expected and lower.startswith(magic.lower()):
            raise RunError(other.description, remedy=other.remedy)
    if compression and first[:1] in (b"{", b"["):
        remedy = f"take {compression} off it"
        raise RunError("is not compressed, though its name says so", remedy=remedy)


def _numbered_row(file: DataFile, number: int, read: Callable[[], dict[str, Any]]) -> SourceRow:
    """Returns row `number` of a file whose rows are counted from 0."""
    where = f"{file.url} row {number} (from 0)"
    return SourceRow(where, {"file": file.name, "row": number}, read)


# Text files: JSON and CSV

MAX_LINE = 2**27  # the largest number of characters of a line, or of a field of CSV
MAX_ARRAY_BYTES = 2**30  # the largest size of a JSON array
NEWLINES = ("\n", "\r", 10, 13)  # the last character of a line of text, or the last byte
# Separators that CSV files may have instead of commas, and their names for messages.
OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
DOUBLE_QUOTES = (
    "save it with doubled quotes in quoted fields, as RFC 4180 has them, or replace it by a whole "
    "one if it is cut off"
)
# A quote in a field that would end the field if quotes were escaped by backslashes.
AMBIGUOUS_QUOTE = re.compile(r'\\"(?=[,\r\n])')


def _json_rows(file: DataFile, row_group: int, form: RowForm) -> Iterator[SourceRow]:
    """Yields an object for each line, or for each element if a .json file is an array."""
    with text_content(file) as content:
        if uncompressed_name(file.url).endswith(".json"):
            first = content.peek().removeprefix(codecs.BOM_UTF8).lstrip()
            if first.partition(b"\n")[0].strip() == b"{":  # one object over several lines
                raise RunError(
                    "expected an array of objects, or an object on every line",
                    remedy="convert it to one of these, for example with jq -c",
                )
            if first.startswith(b"["):
                for number, element in enumerate(_array(content)):
                    yield _numbered_row(file, number, partial(_object, element))
                return
        for number, line in enumerate(_lines(content, file), start=1):
            if line.strip():
                where = f"{file.url} line {number}"
                position = {"file": file.name, "line": number}
                yield SourceRow(where, position, partial(_object_of_line, line))


def _array(content: IO[bytes]) -> list[Any]:
    """Returns the elements of a JSON array that is the whole content of a file."""
    encoded = content.read(MAX_ARRAY_BYTES + 1)
    if len(encoded) > MAX_ARRAY_BYTES:
        raise RunError(
            f"is a JSON array of more than {MAX_ARRAY_BYTES:,} bytes, expected an object on every "
            "line of so large a file",
            remedy="convert it, for example with jq -c '.[]'",
        )
    try:
        return json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise RunError(f"not a JSON array: {one_line(error)}", remedy=REPLACE) from error


def _object_of_line(line: bytes) -> dict[str, Any]:
    return _object(_decoded_json(line.rstrip(b"\r\n")))


def _decoded_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:  # str(error) adds a line number, always 1
        raise UnusableRowError(f"not JSON: {error.msg}, column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableRowError(f"not JSON: {one_line(error)}") from error


def _object(element: Any) -> dict[str, Any]:
    """Returns a decoded JSON value, or raises UnusableRowError if it is not an object."""
    if not isinstance(element, dict):
        raise UnusableRowError(f"expected a JSON object, found {type(element).__name__}")
    return element


def _csv_rows(file: DataFile, row_group: int, form: RowForm) -> Iterator[SourceRow]:
    """Yields the rows below the header, which names the columns."""
    csv.field_size_limit(MAX_LINE)  # for the whole process; it is 131,072 by default
    with text_content(file) as content:
        # Bytes that are not UTF-8 become lone surrogates, so that only their row is unusable.
        text = io.TextIOWrapper(content, "utf-8-sig", errors="surrogateescape", newline="")
        records = filter(None, _csv_records(text, file))
        header = next(records, [])
        for separator, name in OTHER_SEPARATORS.items():
            if len(header) == 1 and separator in header[0]:
                raise RunError(
                    f"its header {header[0]!r:.80} has {name}, expected commas",
                    remedy="save it with commas between the fields",
                )
        for number, column in enumerate(header):
            if not column or column in header[:number]:
                raise RunError(
                    f"the header calls column {number + 1} {column!r}",
                    remedy="give each column a name of its own",
                )
        for number, fields in enumerate(records):
            yield _numbered_row(file, number, partial(_csv_columns, header, fields))


def _csv_records(text: IO[str], file: DataFile) -> Iterator[list[str]]:
    """Yields the fields of each record, the header included; [] for a blank line."""
    try:
        yield from csv.reader(_lines(text, file), strict=True)
    except csv.Error as error:
        if "end of data" in str(error) and _byte_after(file):
            log.warning(CUT_ROW, file.url)
            return
        message = one_line(error)
        if "expected after" in message or "end of data" in message:
            message += ": quotes in a quoted field are not doubled, or it has no end"
        raise RunError(message, remedy=DOUBLE_QUOTES) from error


def _csv_columns(header: list[str], fields: list[str]) -> dict[str, Any]:
    if len(fields) != len(header):
        raise UnusableRowError(
            f"expected {len(header)} fields as in the header, found {len(fields)}"
        )
    try:
        "".join(fields).encode()
    except UnicodeEncodeError as error:
        raise UnusableRowError("not UTF-8") from error
    for name, text in zip(header, fields, strict=True):
        if '\\"' in text and text.count('"') == len(AMBIGUOUS_QUOTE.findall(text)):
            raise UnusableRowError(
                f'column {name}: a \\" before a comma or the end of a line ends the field where '
                "quotes are escaped by backslashes, and is in it where they are doubled"
            )
    return dict(zip(header, fields, strict=True))


def _lines(content: IO[AnyStr], file: DataFile) -> Iterator[AnyStr]:
    """Yields the lines of a text file, without a last line that continues after `file.read_to`.

    Raises:
        RunError: If a line is so long that it could fill the memory. That may be a file without
            newlines, or a small one that decompresses to such a line.
    """
    while line := content.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise RunError(f"a line has {MAX_LINE:,} characters or more", remedy=REPLACE)
        if line[-1] not in NEWLINES and _byte_after(file) not in (b"", b"\n", b"\r"):
            log.warning(CUT_ROW, file.url)
            return
        yield line


def _byte_after(file: DataFile) -> bytes:
    """Returns the byte after `file.read_to`; b"" if the file ends there or is compressed."""
    if file.read_to is None or compression_of(file.url):
        return b""
    with open_file(file.url) as opened:
        opened.seek(file.read_to)
        return opened.read(1)


# Files of Arrow's columns: Parquet and Arrow

ARROW_FILE_MAGIC = b"ARROW1"  # Arrow streams begin with other bytes
PARQUET_BATCH_ROWS = 256
AS_BYTES = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}


def _parquet_rows(file: DataFile, row_group: int, form: RowForm) -> Iterator[SourceRow]:
    """Yields the rows of a row group, with the needed columns only."""
    with open_file(file.url) as opened:
        parquet = pyarrow.parquet.ParquetFile(opened)
        columns = form.columns_among(parquet.schema_arrow.names)
        batches = parquet.iter_batches(PARQUET_BATCH_ROWS, row_groups=[row_group], columns=columns)
        number = 0
        for batch in batches:
            for index in range(batch.num_rows):
                where = f"{file.url} row group {row_group} row {number} (both from 0)"
                position = {"file": file.name, "row_group": row_group, "row": number}
                yield SourceRow(where, position, partial(_arrow_columns, batch.slice(index, 1)))
                number += 1


def _arrow_rows(file: DataFile, row_group: int, form: RowForm) -> Iterator[SourceRow]:
    """Yields the rows of an Arrow file or stream, with the needed columns only."""
    with open_file(file.url) as opened:
        first = opened.read(FORMAT_BYTES)
        refuse_other_formats(first)
        is_stream = not first.startswith(ARROW_FILE_MAGIC)
        open_arrow = pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file
        opened.seek(0)
        names = open_arrow(opened).schema.names
        fields = [names.index(column) for column in form.columns_among(names)]
        opened.seek(0)
        arrow = open_arrow(opened, options=pyarrow.ipc.IpcReadOptions(included_fields=fields))
        batches = arrow if is_stream else map(arrow.get_batch, range(arrow.num_record_batches))
        number = 0
        for batch in batches:
            _validate(batch)
            for index in range(batch.num_rows):
                columns = partial(_arrow_columns, batch.slice(index, 1))
                yield _numbered_row(file, number, columns)
                number += 1


def _validate(batch: pyarrow.RecordBatch) -> None:
    """Checks the buffers of a batch, since reading damaged ones could crash the process.

    Text is checked as bytes: text that is not UTF-8 makes only its row unusable.

    Raises:
        ArrowException: If a buffer is damaged.
    """
    for column in batch.columns:
        as_bytes = AS_BYTES.get(column.type)
        (column.view(as_bytes) if as_bytes else column).validate(full=True)


def _arrow_columns(batch: pyarrow.RecordBatch) -> dict[str, Any]:
    """Returns the columns of a batch of one row.

    Raises:
        UnusableRowError: If a column cannot be read; it is named.
    """
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            if column.type == pyarrow.time64("ns"):  # Python's times end at microseconds
                column = column.cast(pyarrow.string())
            row[name] = _python_value(column[0].as_py(), column.type)
        except (UnusableRowError, OverflowError, ValueError) as error:  # as of a date after 9999
            raise UnusableRowError(f"column {name}: {one_line(error)}") from error
    return row


def _python_value(value: Any, kind: pyarrow.DataType) -> Any:
    """Returns a value of Arrow with its JSON decoded and its objects as Structs.

    Args:
        value: The value as `as_py` returns it.
        kind: The type of the value in Arrow.
    """
    if value is None or not _contains_objects(kind):
        return value
    if isinstance(kind, pyarrow.JsonType):
        return _decoded_json(value)
    if isinstance(kind, pyarrow.StructType):
        return Struct({field.name: _python_value(value[field.name], field.type) for field in kind})
    if isinstance(kind, pyarrow.MapType):
        return [(key, _python_value(item, kind.item_type)) for key, item in value]
    return [_python_value(item, kind.value_type) for item in value]


@cache
def _contains_objects(kind: pyarrow.DataType) -> bool:
    """Returns whether values of a type contain JSON or objects.

    Other values need no conversion, such as long lists of numbers.
    """
    if isinstance(kind, pyarrow.JsonType | pyarrow.StructType | pyarrow.MapType):
        return True
    item_type = getattr(kind, "value_type", None)
    return item_type is not None and _contains_objects(item_type)


JSON = FileKind("JSON", (".jsonl", ".ndjson", ".json"), _json_rows, is_text=True)
CSV = FileKind("CSV", (".csv",), _csv_rows, is_text=True)
PARQUET = FileKind("Parquet", (".parquet",), _parquet_rows)
ARROW = FileKind("Arrow", (".arrow",), _arrow_rows)
KINDS = (JSON, CSV, PARQUET, ARROW)
