"""Opens files for their bytes, here or at a URL, and knows what the forms of whole files look like.

Packed files are unpacked while they are read. A file of a form that is not read is named as what it
is: a pointer of Git LFS, UTF-16, an archive, a packing that its name does not say.
"""

import codecs
import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO

import fsspec
import pyarrow
from fsspec.compression import compr

from activation_extraction.common.errors import RunError
from activation_extraction.common.visible import plain_url

BUFFER = 2**16  # bytes that are read at a time
# How the names of packed files end -> what fsspec calls the packing, and their first bytes. pyarrow
# reads zstd, for which fsspec would need another package.
PACKINGS = {
    ".gz": ("gzip", b"\x1f\x8b\x08"),
    ".bz2": ("bz2", b"BZh91AY&SY"),
    ".xz": ("xz", b"\xfd7zXZ\x00"),
    ".zst": ("zstd", b"\x28\xb5\x2f\xfd"),
}
FORM_BYTES = 64  # of a file's beginning; they show its form
REPLACE = (
    "if the file is damaged, replace it by an intact one; if it has changed since the run began, "
    "the run needs --overwrite"
)
WEB_PAGE = "is a web page instead of the data", "download the data again"
UTF16 = "is UTF-16, expected UTF-8", "convert it, for example with iconv -f UTF-16 -t UTF-8"
UTF32 = "is UTF-32, expected UTF-8", "convert it, for example with iconv -f UTF-32 -t UTF-8"
# The first bytes of files of other forms -> what such a file is, and what to do about it.
FORMS = {
    b"version https://git-lfs.github.com/": (
        "is a Git LFS pointer instead of the data",
        "git lfs pull, in its repository, brings the data",
    ),
    **{
        begins: (f"is packed with {packing}", f"give it a name that ends in {end}")
        for end, (packing, begins) in PACKINGS.items()
    },
    b"PK\x03\x04": ("is a zip archive", "unpack it"),
    b"<!doctype html": WEB_PAGE,
    b"<html": WEB_PAGE,
    codecs.BOM_UTF32_LE: UTF32,  # begins like that of UTF-16
    codecs.BOM_UTF32_BE: UTF32,
    codecs.BOM_UTF16_LE: UTF16,
    codecs.BOM_UTF16_BE: UTF16,
}


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
    """Raises RunError if a file begins like one of another form than its name's end says."""
    own, lower = PACKINGS[end][1] if end else None, first.lower()
    for begins, (what, remedy) in FORMS.items():
        if begins != own and lower.startswith(begins.lower()):
            raise RunError(what, remedy=remedy)
    if end and first[:1] in (b"{", b"["):
        raise RunError("is not packed, though its name says so", remedy=f"take {end} off it")


@contextmanager
def content_of(url: str, size: int | None = None) -> Iterator[io.BufferedReader]:
    """Opens a file of text for its bytes, which are unpacked. Raises RunError for another form.

    size: how many bytes of the file are read; None for all.
    """
    end = packing_of(url)
    with ExitStack() as opened:
        file = opened.enter_context(open_file(url))
        content = io.BufferedReader(file if size is None else Beginning(file, size), BUFFER)
        if end:
            check_form(content.peek(), end)
            if end == ".zst":
                unpacked = pyarrow.CompressedInputStream(content, "zstd")
            else:
                unpacked = compr[PACKINGS[end][0]](content, mode="r")
            content = io.BufferedReader(opened.enter_context(unpacked), BUFFER)
        first = content.peek()
        check_form(first)
        # Without a byte order mark, one of two bytes is 0 where the letter is in ASCII.
        if len(first) > 1 and (first[0] == 0) != (first[1] == 0):
            raise RunError(UTF16[0], remedy=UTF16[1])
        yield content
