"""Opens files for their bytes, here or at a URL, and knows what the forms of whole files look like.

Packed files are unpacked while they are read. A file of a form that is not read is named as what it
is: a pointer of Git LFS, UTF-16, an archive, a packing that its name does not say.
"""

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import fsspec
import pyarrow
from fsspec.compression import compr

from activation_extraction.common.visible import plain_url

BUFFER = 2**16  # bytes that are read at a time
# How the names of packed files end, and what fsspec calls the packing; pyarrow reads zstd, for
# which fsspec would need another package.
PACKINGS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
FORM_BYTES = 64  # of a file's beginning; they show its form
REPLACE = (
    "replace the damaged file by an intact one; if that has changed since the run began, the run "
    "needs --overwrite"
)


class UnreadableFileError(Exception):
    """A file, or its rest, cannot be read. The message says why; remedy: what to do about it."""

    def __init__(self, message: str, remedy: str = REPLACE) -> None:
        super().__init__(message)
        self.remedy = remedy


class FileForm(NamedTuple):
    """A form that a file's first bytes give away. end: of the names of files that may have it."""

    begins: bytes
    message: str
    remedy: str
    end: str = ""


ICONV = "convert it, for example with iconv -f {0} -t UTF-8"
FORMS = (
    FileForm(
        b"version https://git-lfs.github.com/",
        "is a Git LFS pointer instead of the data",
        "git lfs pull, in its repository, brings the data",
    ),
    *(
        FileForm(begins, f"is packed with {packing}", f"give it a name that ends in {end}", end)
        for begins, packing, end in (
            (b"\x1f\x8b\x08", "gzip", ".gz"),
            (b"\x28\xb5\x2f\xfd", "zstd", ".zst"),
            (b"BZh91AY&SY", "bzip2", ".bz2"),
            (b"\xfd7zXZ\x00", "xz", ".xz"),
        )
    ),
    FileForm(b"PK\x03\x04", "is a zip archive", "unpack it"),
    *(
        FileForm(begins, "is a web page instead of the data", "download the data again")
        for begins in (b"<!DOCTYPE html", b"<!doctype html", b"<html")
    ),
    *(
        FileForm(begins, f"is {code}, expected UTF-8", ICONV.format(code))
        for begins, code in (
            (codecs.BOM_UTF32_LE, "UTF-32"),
            (codecs.BOM_UTF32_BE, "UTF-32"),
            (codecs.BOM_UTF16_LE, "UTF-16"),
            (codecs.BOM_UTF16_BE, "UTF-16"),
        )
    ),
)
LONG_WINDOW = "Frame requires too much memory"  # as libzstd says it


def packing_of(url: str) -> str:
    """Returns how the name of a packed file ends, one of PACKINGS; "" if it is not packed."""
    name = plain_url(url).lower()
    return next((end for end in PACKINGS if name.endswith(end)), "")


def unpacked_name(url: str) -> str:
    """Returns a file's name in small letters, without the end that says how it is packed."""
    return plain_url(url).lower().removesuffix(packing_of(url))


def open_file(url: str) -> Any:
    """Opens a file for its bytes. In a local path, fsspec would take :: for a chain of URLs."""
    return fsspec.open(url, "rb") if "://" in url else open(url, "rb")


class Beginning(io.RawIOBase):
    """The first `size` bytes of a file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)


def check_form(first: bytes, end: str = "") -> None:
    """Raises UnreadableFileError if a file begins like one of another form. end: of its name."""
    for form in FORMS:
        if first.startswith(form.begins) and not (end and form.end == end):
            raise UnreadableFileError(form.message, form.remedy)


@contextmanager
def content_of(url: str, size: int | None = None) -> Iterator[io.BufferedReader]:
    """Opens a file of text for its bytes, which are unpacked. Raises UnreadableFileError.

    size: how many bytes of the file are read; None for all.
    """
    end = packing_of(url)
    with open_file(url) as file:
        raw = file if size is None else Beginning(file, size)
        content = io.BufferedReader(raw, BUFFER)
        if not end:
            yield _checked(content)
            return
        first = content.peek()
        check_form(first, end)
        if first[:1] in (b"{", b"["):
            raise UnreadableFileError(
                "is not packed, though its name says so", f"take {end} off it"
            )
        try:
            if end == ".zst":
                unpacked = pyarrow.CompressedInputStream(content, "zstd")
            else:
                unpacked = compr[PACKINGS[end]](content, mode="r")
            with unpacked:
                yield _checked(io.BufferedReader(unpacked, BUFFER))
        except OSError as error:
            if LONG_WINDOW not in str(error):
                raise
            raise UnreadableFileError(
                "is packed with zstd and a window of more than 128 MB",
                "unpack it with zstd -d --long=31, or pack it again without --long",
            ) from error


def _checked(content: io.BufferedReader) -> io.BufferedReader:
    """Returns the content of a file of text. Raises UnreadableFileError if its form is no UTF-8.

    Of two bytes of UTF-16 without a byte order mark, one is 0 where the letter is in ASCII.
    """
    first = content.peek()
    check_form(first)
    if len(first) > 1 and (first[0] == 0) != (first[1] == 0):
        raise UnreadableFileError("is UTF-16, expected UTF-8", ICONV.format("UTF-16"))
    return content
