"""Reads the rows of one file of a data set, which is local or at a URL.

The table KINDS at the end of this module declares the kinds of files, the extensions by which they
are recognised, and the functions that read their rows. Compressed files are decompressed while they
are read. If the format of a file does not fit its name, the error message names the format, such as
a Git LFS pointer or a zip archive.

Each row comes with its position in its file. If a row cannot be used, reading its columns raises an
error, and the rows after it can still be read. An error of the file itself ends the run. Only one
row, or one batch of rows of Parquet or Arrow, is in memory at a time, except that a JSON array is
read as a whole. file_list.py lists the files of a data set.
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
from activation_extraction.text.rows import RowSchema, SourceRow, UnusableRowError
from activation_extraction.text.structs import Struct

REPLACE_ADVICE = (
    "if the file is damaged, replace it by an intact one; if it has changed since the run began, "
    "the run needs --overwrite"
)
CUT_ROW_WARNING = "%s: its last row is not read: it was not complete when the run began"

# Exceptions that readers raise for damaged files. Decompressors also raise OSError for a damaged
# file, but OSError is not listed, because it may have other causes, such as a failure of the
# network. `file_rows` recognises the OSErrors of decompressors, because they have no errno.
DAMAGE_ERRORS: tuple[Any, ...] = (
    EOFError,
    UnicodeError,
    zlib.error,
    IsalError,
    lzma.LZMAError,
    pyarrow.ArrowException,
)
# libzstd's message for a file that needs a window of more than 128 MB.
WINDOW_TOO_LONG = "Frame requires too much memory"


@dataclass(frozen=True)
class DataFile:
    """A file of a data set.

    Attributes:
        url: Local path or URL of the file.
        name: Path of the file relative to a folder. If the data set is a folder, this is the folder
            of the data set. If the data set is a single file, it is the folder that contains the
            file. If the data set is a glob, it is the last folder before the first wildcard.
        byte_count: Size of the file in bytes.
        content_version: Version of the content. For a URL, this is the checksum or version that
            its store reports, or "" if it reports none. For a local file, it is the time of the
            last modification in nanoseconds.
    """

    url: str
    name: str
    byte_count: int
    content_version: str = ""

    @property
    def is_local(self) -> bool:
        """Whether the file is on this machine."""
        return "://" not in self.url

    @property
    def kind(self) -> "FileKind":
        """The kind of the file, which its name determines."""
        file_kind = kind_of(self.url)
        assert file_kind is not None  # because list_files lists only files with a kind
        return file_kind

    @property
    def may_grow(self) -> bool:
        """Returns whether rows may be appended to the file after the run has begun."""
        return self.is_local and self.kind.is_text

    @property
    def read_to(self) -> int | None:
        """The number of bytes that are read from the start of the file; None to read all bytes."""
        return self.byte_count if self.may_grow else None


@dataclass(frozen=True)
class FileKind:
    """A kind of data files.

    Attributes:
        name: Name of the kind, for messages.
        extensions: Extensions of the files in lower case. File names are compared
            case-insensitively.
        read_rows: Function that yields the rows of a file. Its arguments are the file, the number
            of a row group (0 for kinds without row groups), and the schema of the columns to read.
        is_text: Whether the files are text. Text files may be compressed, and rows may be appended
            to them during a run.
    """

    name: str
    extensions: tuple[str, ...]
    read_rows: Callable[[DataFile, int, RowSchema], Iterator[SourceRow]]
    is_text: bool = False


def kind_of(url: str) -> FileKind | None:
    """Returns the kind of a file by its name; None if the file is no data file.

    A file whose only extension is .zst contains JSON Lines, as the dumps of Reddit do.
    """
    url_without_compression_extension = uncompressed_name(url)
    compression_extension = compression_of(url)
    if (
        compression_extension == ".zst"
        and "." not in url_without_compression_extension.rpartition("/")[2]
    ):
        return JSON
    file_kind = next(
        (
            file_kind
            for file_kind in KINDS
            if url_without_compression_extension.endswith(file_kind.extensions)
        ),
        None,
    )
    if compression_extension and file_kind is not None and not file_kind.is_text:
        return None
    return file_kind


def count_row_groups(file: DataFile) -> int:
    """Returns the number of row groups of a file whose name ends in .parquet; 1 for other files.

    Raises:
        RunError: If the name ends in .parquet, but the content is in one of OTHER_FORMATS. The
            message names this format.
        ArrowException: If the file is damaged.
    """
    if file.kind is not PARQUET:
        return 1
    with open_file(file.url) as opened_file:
        try:
            return pyarrow.parquet.ParquetFile(opened_file).num_row_groups
        except pyarrow.ArrowException:
            opened_file.seek(0)
            refuse_other_formats(opened_file.read(FORMAT_BYTES))
            raise


def file_rows(file: DataFile, row_group: int, schema: RowSchema) -> Iterator[SourceRow]:
    """Yields the rows of a file.

    Rows are counted from 0 within their file or row group, but lines of JSON Lines are counted from
    1. Blank lines and the header of a CSV file are not rows.

    Args:
        file: The file.
        row_group: The number of the row group to read of a Parquet file; 0 for other files.
        schema: The columns to read of each row, and the `Reader`s of the row's content. Other
            columns of Parquet and Arrow files are not read.

    Raises:
        RunError: If the file cannot be read. The message names the file and the last row that was
            read.
    """
    location_of_last_row = None
    try:
        for source_row in file.kind.read_rows(file, row_group, schema):
            yield source_row
            location_of_last_row = source_row.location_phrase
    except Exception as error:
        last_row_phrase = ""
        if location_of_last_row:
            last_row_phrase = (
                f"; the last row before: {location_of_last_row.removeprefix(file.url).lstrip()}"
            )
        error_remedy = getattr(error, "remedy", None)
        is_decompression_error = isinstance(error, OSError) and error.errno is None
        if WINDOW_TOO_LONG in str(error):
            error_remedy = (
                "decompress it with zstd -d --long=31, or compress it again without --long"
            )
        elif isinstance(error, DAMAGE_ERRORS) or is_decompression_error:
            error_remedy = REPLACE_ADVICE
        # A damaged local file raises the error again at the next start. A file at a URL may have
        # been transferred wrongly only this time.
        does_error_recur = error_remedy is not None and (
            file.is_local or isinstance(error, RunError)
        )
        error_message = f"{file.url}: {one_line(error)}{last_row_phrase}"
        raise RunError(error_message, remedy=error_remedy, is_recurring=does_error_recur) from error


# The following functions open a file, from which other functions then read rows. They reject files
# in formats that this program cannot read.


class Compression(NamedTuple):
    """A compression of text files.

    Attributes:
        codec: Name of the codec in fsspec, and in messages. pyarrow decompresses zstd files, for
            which fsspec would need another package. fsspec decompresses all other files.
        magic: First bytes of a compressed file, by which the compression is recognised.
    """

    codec: str
    magic: bytes


# Extension of compressed files -> their compression.
COMPRESSIONS = {
    ".gz": Compression("gzip", b"\x1f\x8b\x08"),
    ".bz2": Compression("bz2", b"BZh91AY&SY"),
    ".xz": Compression("xz", b"\xfd7zXZ\x00"),
    ".zst": Compression("zstd", b"\x28\xb5\x2f\xfd"),
}


class OtherFormat(NamedTuple):
    """A file format that this program does not read.

    Attributes:
        description: Predicate that follows the name of a file in messages, such as "is a zip
            archive".
        remedy: Advice on what to do with the file, such as "extract it", for messages.
    """

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
# Formats of files that are not what their names say, for error messages: the first bytes of a file,
# compared case-insensitively -> the format and a remedy. UTF-32 precedes
# UTF-16, because the byte order mark of UTF-32 begins with the byte order mark of UTF-16.
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
FORMAT_BYTES = 64  # the number of bytes at the start of a file by which its format is recognised
BUFFER_BYTES = 2**16  # the size in bytes of the buffer for reading text files


def compression_of(url: str) -> str:
    """Returns the extension of a compressed file, such as ".gz", which is a key of COMPRESSIONS.

    Returns "" if the name of the file ends in no such extension.
    """
    lowercase_url = plain_url(url).lower()
    return next((extension for extension in COMPRESSIONS if lowercase_url.endswith(extension)), "")


def uncompressed_name(url: str) -> str:
    """Returns the path or URL of a file in lower case, without the extension of its compression.

    Secrets are removed from URLs.
    """
    return plain_url(url).lower().removesuffix(compression_of(url))


def open_file(url: str) -> Any:
    """Opens a local file or a URL for reading its bytes.

    Returns:
        A context manager, whose `with` block gets a binary file object.
    """
    # A local path is opened without fsspec, which would interpret :: in it as a chain of URLs.
    return fsspec.open(url, "rb") if "://" in url else open(url, "rb")


@contextmanager
def text_content(file: DataFile) -> Iterator[io.BufferedReader]:
    """Opens a text file for reading its decompressed bytes, in a `with` block.

    If rows may be appended to the file, only its first `file.read_to` bytes are read.

    Raises:
        RunError: If the format of the file does not fit its name.
    """
    compression_extension = compression_of(file.url)
    with ExitStack() as files_to_close:
        raw_file = files_to_close.enter_context(open_file(file.url))
        if file.read_to is not None:
            raw_file = FirstBytes(raw_file, file.read_to)
        buffered_file = io.BufferedReader(raw_file, BUFFER_BYTES)
        if compression_extension:
            refuse_other_formats(buffered_file.peek(), compression_extension)
            if compression_extension == ".zst":
                decompressed_file = pyarrow.CompressedInputStream(buffered_file, "zstd")
            else:
                decompressed_file = compr[COMPRESSIONS[compression_extension].codec](
                    buffered_file, mode="r"
                )
            buffered_file = io.BufferedReader(
                files_to_close.enter_context(decompressed_file), BUFFER_BYTES
            )
        first_bytes = buffered_file.peek()
        refuse_other_formats(first_bytes)
        # UTF-16 may have no byte order mark. Then it is recognised by an ASCII character at the
        # start, of whose two bytes exactly one is 0.
        if len(first_bytes) > 1 and (first_bytes[0] == 0) != (first_bytes[1] == 0):
            raise RunError(UTF16.description, remedy=UTF16.remedy)
        yield buffered_file


class FirstBytes(io.RawIOBase):
    """A file object that contains only the first bytes of another file."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        """Opens the first bytes of a file for reading.

        Args:
            file: The whole file, of which nothing has been read yet.
            max_bytes: The number of bytes at the start of the whole file that can be read.
        """
        self._source_file = file
        self._num_remaining_bytes = max_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        source_content = self._source_file.read(min(len(buffer), self._num_remaining_bytes))
        buffer[: len(source_content)] = source_content
        self._num_remaining_bytes -= len(source_content)
        return len(source_content)


def refuse_other_formats(first_bytes: bytes, compression: str = "") -> None:
    """Checks that the content of a file is in the format that its name says.

    Args:
        first_bytes: The first bytes of the file.
        compression: The key of COMPRESSIONS with which the name of the file ends. "" if the name
            ends in none of them, or if the bytes have been decompressed already.

    Raises:
        RunError: If the file is in one of OTHER_FORMATS, or is not compressed as its name says.
    """
    expected_magic = COMPRESSIONS[compression].magic if compression else None
    lowercase_first_bytes = first_bytes.lower()
    for unexpected_format_magic, unexpected_format in OTHER_FORMATS.items():
        if unexpected_format_magic != expected_magic and lowercase_first_bytes.startswith(
            unexpected_format_magic.lower()
        ):
            raise RunError(unexpected_format.description, remedy=unexpected_format.remedy)
    if compression and first_bytes[:1] in (b"{", b"["):
        renaming_remedy = f"remove {compression} from its name"
        raise RunError("is not compressed, though its name says so", remedy=renaming_remedy)


def _numbered_row(
    file: DataFile, number: int, read_columns: Callable[[], dict[str, Any]]
) -> SourceRow:
    """Returns a row of a file, whose position is the number of the row.

    Args:
        file: The file.
        number: The number of the row in the file, counted from 0.
        read_columns: The function that returns the columns of the row by name.
    """
    location_phrase = f"{file.url} row {number} (from 0)"
    return SourceRow(location_phrase, {"file": file.name, "row": number}, read_columns)


# The following functions read the rows of text files, which are JSON or CSV.

# Lines of at least this length are rejected, because long lines could fill the memory. The length
# is a number of bytes in JSON, and a number of characters in CSV. A CSV field, which may contain
# several lines, is rejected if it has more characters than this number.
MAX_LINE = 2**27
# The largest size in bytes of a file that is a JSON array, because the array is decoded as a whole.
MAX_ARRAY_BYTES = 2**30
# The characters that end a line, then their codes, because the elements of `bytes` are integers.
NEWLINES = ("\n", "\r", 10, 13)
# Separators that some CSV files contain instead of commas -> their names for messages.
OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
DOUBLE_QUOTES = (
    "save it with doubled quotes in quoted fields, as RFC 4180 has them, or replace it by a whole "
    "one if it is cut off"
)
# If a line of a CSV file begins with `"a\"",b`, it can be read in two ways. If the writer of the
# file escaped quotation marks with backslashes, the first field is `a"` and ends before the comma.
# If the writer doubled quotation marks, the text of the first field begins with `a\",b` and
# continues. Files are read in the second way. This pattern matches `\"` before a comma or the end
# of a line in the text of a field. Another quotation mark in the field would show that the second
# way is right. If the pattern matches all quotation marks in the field, either way may be right, so
# the row is not used.
AMBIGUOUS_QUOTE = re.compile(r'\\"(?=[,\r\n])')


def _json_rows(file: DataFile, row_group: int, schema: RowSchema) -> Iterator[SourceRow]:
    """Yields the rows of a JSON file.

    If the file is a .json file that contains one array, the rows are the elements of the array.
    Otherwise, the rows are the lines of the file.

    Args:
        file: The JSON file.
        row_group: 0, because a JSON file has no row groups.
        schema: The schema of the columns to read.
    """
    with text_content(file) as json_file:
        if uncompressed_name(file.url).endswith(".json"):
            first_bytes = json_file.peek().removeprefix(codecs.BOM_UTF8).lstrip()
            first_line = first_bytes.partition(b"\n")[0]
            if first_line.strip() == b"{":  # one object is written over several lines
                raise RunError(
                    "expected an array of objects, or an object on every line",
                    remedy="convert it to one of these, for example with jq -c",
                )
            if first_bytes.startswith(b"["):
                for row_number, json_element in enumerate(_elements_of_array(json_file)):
                    yield _numbered_row(file, row_number, partial(_checked_object, json_element))
                return
        for line_number, json_line in enumerate(_lines_to_read(json_file, file), start=1):
            if json_line.strip():
                location_phrase = f"{file.url} line {line_number}"
                row_position_fields = {"file": file.name, "line": line_number}
                yield SourceRow(
                    location_phrase, row_position_fields, partial(_object_of_line, json_line)
                )


def _elements_of_array(content: IO[bytes]) -> list[Any]:
    """Returns the elements of a JSON array that is the whole content of a file.

    Raises:
        RunError: If the array is not valid JSON, or has more than MAX_ARRAY_BYTES.
    """
    json_bytes = content.read(MAX_ARRAY_BYTES + 1)
    if len(json_bytes) > MAX_ARRAY_BYTES:
        raise RunError(
            f"is a JSON array of more than {MAX_ARRAY_BYTES:,} bytes, expected an object on every "
            "line of so large a file",
            remedy="convert it, for example with jq -c '.[]'",
        )
    try:
        return json.loads(json_bytes)
    except (ValueError, RecursionError) as error:
        raise RunError(f"not a JSON array: {one_line(error)}", remedy=REPLACE_ADVICE) from error


def _object_of_line(line: bytes) -> dict[str, Any]:
    return _checked_object(_decoded_json(line.rstrip(b"\r\n")))


def _decoded_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:  # str(error) would add a line number, which is always 1
        raise UnusableRowError(f"not JSON: {error.msg}, column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableRowError(f"not JSON: {one_line(error)}") from error


def _checked_object(element: Any) -> dict[str, Any]:
    """Returns a decoded JSON value if it is an object.

    Raises:
        UnusableRowError: If the value is not an object.
    """
    if not isinstance(element, dict):
        raise UnusableRowError(f"expected a JSON object, found {type(element).__name__}")
    return element


def _csv_rows(file: DataFile, row_group: int, schema: RowSchema) -> Iterator[SourceRow]:
    """Yields the rows of a CSV file below its header, which names the columns.

    Args:
        file: The CSV file.
        row_group: 0, because a CSV file has no row groups.
        schema: The schema of the columns to read.
    """
    csv.field_size_limit(MAX_LINE)  # the default, 131,072, is too small for texts
    with text_content(file) as csv_file:
        # Bytes that are not UTF-8 become lone surrogates, so that only their row is unusable.
        text_file = io.TextIOWrapper(csv_file, "utf-8-sig", errors="surrogateescape", newline="")
        csv_records = filter(None, _csv_records(text_file, file))
        header_fields = next(csv_records, [])
        for separator, separator_name in OTHER_SEPARATORS.items():
            if len(header_fields) == 1 and separator in header_fields[0]:
                raise RunError(
                    f"its header {header_fields[0]!r:.80} has {separator_name}, expected commas",
                    remedy="save it with commas between the fields",
                )
        for column_index, column_name in enumerate(header_fields):
            if not column_name or column_name in header_fields[:column_index]:
                raise RunError(
                    f"the header calls column {column_index + 1} {column_name!r}",
                    remedy="give each column a name of its own",
                )
        for row_number, record_fields in enumerate(csv_records):
            yield _numbered_row(
                file, row_number, partial(_csv_columns, header_fields, record_fields)
            )


def _csv_records(text_file: IO[str], file: DataFile) -> Iterator[list[str]]:
    """Yields the fields of the header and of each row; an empty list for a blank line.

    Args:
        text_file: The decompressed and decoded content of the file.
        file: Description of the file, for messages. It tells whether bytes were added to the file
            after the run began. These bytes are not read, so the last row may be incomplete.

    Raises:
        RunError: If the quotation marks of a field are not doubled or not closed.
    """
    try:
        yield from csv.reader(_lines_to_read(text_file, file), strict=True)
    except csv.Error as error:
        if "end of data" in str(error) and _byte_after(file):
            log.warning(CUT_ROW_WARNING, file.url)
            return
        error_message = one_line(error)
        if "expected after" in error_message or "end of data" in error_message:
            error_message += ": quotes in a quoted field are not doubled, or the field has no end"
        raise RunError(error_message, remedy=DOUBLE_QUOTES) from error


def _csv_columns(header: list[str], fields: list[str]) -> dict[str, Any]:
    if len(fields) != len(header):
        raise UnusableRowError(
            f"expected {len(header)} fields as in the header, found {len(fields)}"
        )
    try:
        "".join(fields).encode()
    except UnicodeEncodeError as error:
        raise UnusableRowError("not UTF-8") from error
    for column_name, field_text in zip(header, fields, strict=True):
        if '\\"' in field_text and field_text.count('"') == len(
            AMBIGUOUS_QUOTE.findall(field_text)
        ):
            raise UnusableRowError(
                f'column {column_name}: a \\" before a comma or the end of a line ends the field '
                "where quotes are escaped by backslashes, and is in it where they are doubled"
            )
    return dict(zip(header, fields, strict=True))


def _lines_to_read(content: IO[AnyStr], file: DataFile) -> Iterator[AnyStr]:
    """Yields the lines of a text file, except a last line that was incomplete when the run began.

    If the file has grown since, only its first `file.read_to` bytes are read. A line that continues
    after these bytes is left out.

    Args:
        content: The content of the file, as bytes or as text.
        file: The file.

    Raises:
        RunError: If a line is so long that it could fill the memory, for example because the file
            has no newlines.
    """
    while text_line := content.readline(MAX_LINE):
        if len(text_line) == MAX_LINE:
            raise RunError(f"a line has {MAX_LINE:,} characters or more", remedy=REPLACE_ADVICE)
        if text_line[-1] not in NEWLINES and _byte_after(file) not in (b"", b"\n", b"\r"):
            log.warning(CUT_ROW_WARNING, file.url)
            return
        yield text_line


def _byte_after(file: DataFile) -> bytes:
    """Returns the byte of a file after its first `file.read_to` bytes, which are the bytes to read.

    Args:
        file: The file.

    Returns:
        The byte. b"" if the file ends after the bytes to read, if all bytes are read
        (`file.read_to` is None), or if the file is compressed.
    """
    if file.read_to is None or compression_of(file.url):
        return b""
    with open_file(file.url) as opened_file:
        opened_file.seek(file.read_to)
        return opened_file.read(1)


# The following functions read the rows of Parquet and Arrow files with pyarrow.

ARROW_FILE_MAGIC = b"ARROW1"  # the first bytes of an Arrow file; an Arrow stream lacks them
# The number of rows of a row group that are decoded together. A whole row group might not fit in
# memory.
PARQUET_BATCH_ROWS = 256
# Arrow's types of text -> the types of the same values as bytes.
BYTES_TYPES = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}


def _parquet_rows(file: DataFile, row_group: int, schema: RowSchema) -> Iterator[SourceRow]:
    """Yields the rows of a row group of a Parquet file, with only the needed columns.

    Args:
        file: The Parquet file.
        row_group: The number of the row group, from 0.
        schema: The schema of the columns to read.
    """
    with open_file(file.url) as opened_file:
        parquet_file = pyarrow.parquet.ParquetFile(opened_file)
        column_names = schema.columns_among(parquet_file.schema_arrow.names)
        record_batches = parquet_file.iter_batches(
            PARQUET_BATCH_ROWS, row_groups=[row_group], columns=column_names
        )
        row_number = 0
        for record_batch in record_batches:
            for row_index_in_batch in range(record_batch.num_rows):
                location_phrase = f"{file.url} row group {row_group} row {row_number} (both from 0)"
                row_position_fields = {"file": file.name, "row_group": row_group, "row": row_number}
                read_columns = partial(_arrow_columns, record_batch.slice(row_index_in_batch, 1))
                yield SourceRow(location_phrase, row_position_fields, read_columns)
                row_number += 1


def _arrow_rows(file: DataFile, row_group: int, schema: RowSchema) -> Iterator[SourceRow]:
    """Yields the rows of an Arrow file or Arrow stream, with only the needed columns.

    Args:
        file: The Arrow file or Arrow stream.
        row_group: 0, because the file is read as a whole.
        schema: The schema of the columns to read.
    """
    with open_file(file.url) as opened_file:
        first_bytes = opened_file.read(FORMAT_BYTES)
        refuse_other_formats(first_bytes)
        is_arrow_stream = not first_bytes.startswith(ARROW_FILE_MAGIC)
        open_arrow = pyarrow.ipc.open_stream if is_arrow_stream else pyarrow.ipc.open_file
        opened_file.seek(0)
        column_names = open_arrow(opened_file).schema.names
        column_indices = [
            column_names.index(column_name) for column_name in schema.columns_among(column_names)
        ]
        read_options = pyarrow.ipc.IpcReadOptions(included_fields=column_indices)
        opened_file.seek(0)
        arrow_reader = open_arrow(opened_file, options=read_options)
        record_batches = (
            arrow_reader
            if is_arrow_stream
            else map(arrow_reader.get_batch, range(arrow_reader.num_record_batches))
        )
        row_number = 0
        for record_batch in record_batches:
            _validate(record_batch)
            for row_index_in_batch in range(record_batch.num_rows):
                read_columns = partial(_arrow_columns, record_batch.slice(row_index_in_batch, 1))
                yield _numbered_row(file, row_number, read_columns)
                row_number += 1


def _validate(batch: pyarrow.RecordBatch) -> None:
    """Checks the buffers of a batch, because reading damaged buffers could crash the process.

    Text is checked as if it were bytes, because text that is not UTF-8 makes only its row unusable.

    Raises:
        ArrowException: If a buffer is damaged.
    """
    for arrow_column in batch.columns:
        binary_type_of_text = BYTES_TYPES.get(arrow_column.type)
        if binary_type_of_text is not None:
            arrow_column = arrow_column.view(binary_type_of_text)
        arrow_column.validate(full=True)


def _arrow_columns(batch: pyarrow.RecordBatch) -> dict[str, Any]:
    """Returns the values of a row by the names of its columns.

    Args:
        batch: The row, as a batch that contains no other row.

    Raises:
        UnusableRowError: If a column cannot be read. The message names the column.
    """
    value_by_column = {}
    for column_name, arrow_column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            if arrow_column.type == pyarrow.time64("ns"):  # Python's times have no nanoseconds
                arrow_column = arrow_column.cast(pyarrow.string())
            value_by_column[column_name] = _python_value(arrow_column[0].as_py(), arrow_column.type)
        # A date after the year 9999, for example, raises an OverflowError or a ValueError.
        except (UnusableRowError, OverflowError, ValueError) as error:
            raise UnusableRowError(f"column {column_name}: {one_line(error)}") from error
    return value_by_column


def _python_value(value: Any, arrow_type: pyarrow.DataType) -> Any:
    """Converts a value of Arrow: decodes values of the type JSON, and turns structs into `Struct`s.

    The conversion includes nested values. structs.py explains `Struct`.

    Args:
        value: The value as `as_py` returns it.
        arrow_type: The type of the value in Arrow.
    """
    if value is None or not _contains_objects(arrow_type):
        return value
    if isinstance(arrow_type, pyarrow.JsonType):
        return _decoded_json(value)
    if isinstance(arrow_type, pyarrow.StructType):
        converted_struct = Struct()
        for arrow_field in arrow_type:
            converted_struct[arrow_field.name] = _python_value(
                value[arrow_field.name], arrow_field.type
            )
        return converted_struct
    if isinstance(arrow_type, pyarrow.MapType):
        return [
            (map_key, _python_value(map_value, arrow_type.item_type))
            for map_key, map_value in value
        ]
    return [_python_value(list_element, arrow_type.value_type) for list_element in value]


@cache
def _contains_objects(arrow_type: pyarrow.DataType) -> bool:
    """Returns whether an Arrow type is or contains JSON, a struct or a map.

    `_python_value` converts only values of these types. It returns other values, such as long lists
    of numbers, as they are.
    """
    if isinstance(arrow_type, pyarrow.JsonType | pyarrow.StructType | pyarrow.MapType):
        return True
    element_type = getattr(arrow_type, "value_type", None)
    return element_type is not None and _contains_objects(element_type)


JSON = FileKind("JSON", (".jsonl", ".ndjson", ".json"), _json_rows, is_text=True)
CSV = FileKind("CSV", (".csv",), _csv_rows, is_text=True)
PARQUET = FileKind("Parquet", (".parquet",), _parquet_rows)
ARROW = FileKind("Arrow", (".arrow",), _arrow_rows)
KINDS = (JSON, CSV, PARQUET, ARROW)
