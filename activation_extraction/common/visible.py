"""All text leaves the program through this module: to stdout, to stderr and, by log.py, to the log.

Names and messages come from files, from servers and from what others have stored. Control
characters in them are shown as escapes, so that a terminal does not obey them, and URLs lose their
secrets. No stream that is closed, full or not in UTF-8 makes the program fail.
"""

import io
import os
import re
import select
import sys
from typing import Any

# An fsspec URL has a scheme, sometimes a name before "@", the rest and a query; "::" ends it.
URL = re.compile(
    r"(?P<scheme>[a-zA-Z][\w+.-]*)://(?:(?P<user>[^\s/?#]*)@)?(?P<rest>(?:(?!::)[^\s?#])*)"
    r"(?P<query>[?#](?:(?!::)[^\s'\"])*)?"
)
# The name before "@" is no secret here: it is a container, or a repository before its revision.
NAMES_BEFORE_AT = {"abfs", "abfss", "az", "wasb", "wasbs", "adl", "hf"}
# This also finds a query's parameter where a library prints only the end of a URL.
SECRET = re.compile(
    r"(?i)(?<=[?&])([\w.-]*(?:sig|token|secret|credential|passw|key)[\w.-]*)=[^&\s'\")]+"
)


def without_secrets(text: str) -> str:
    """Returns the text without the queries of its URLs and without names and passwords before "@".

    A "?" without "=" after it is a wildcard in a bucket, and stays.
    """
    text = URL.sub(_stripped, text) if "://" in text else text
    return SECRET.sub(r"\1=...", text)


def plain_url(path: str) -> str:
    """Returns a URL without secrets, as it is stored and compared; a path is returned unchanged."""
    return without_secrets(path) if "://" in path else path


def _stripped(url: re.Match[str]) -> str:
    scheme = url["scheme"]
    user = url["user"]
    query = url["query"] or ""
    named = user is not None and ":" not in user and scheme in NAMES_BEFORE_AT
    kept = "" if scheme in ("http", "https") or "=" in query else query
    return f"{scheme}://{f'{user}@' if named else ''}{url['rest']}{kept}"


def visible(text: object) -> str:
    """Returns the text as one line without secrets, with invisible characters as escapes.

    Letters of any script stay; `\\x1b` stands for an escape, `\\u202e` for a change of direction.
    """
    return "".join(map(_shown, without_secrets(str(text))))


def _shown(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def counted(number: int, noun: str) -> str:
    """Returns a number of things as words, such as "1 sample" or "2,000 samples"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def say(*lines: object) -> None:
    print(*map(visible, lines), sep="\n")


def say_error(*lines: object) -> None:
    print(*map(visible, lines), sep="\n", file=sys.stderr, flush=True)


def make_streams_safe() -> None:
    """Replaces stdout and stderr by streams to which writing never fails, whatever writes to them.

    What nobody reads any more is dropped, as is all that is written to a stream that was closed
    from the start. A character that the stream's encoding lacks becomes an escape.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))
            continue
        safe = io.TextIOWrapper(
            io.BufferedWriter(_SafeFile(stream.fileno(), "w", closefd=False)),
            stream.encoding,
            "backslashreplace",
            line_buffering=stream.line_buffering or stream.write_through,
        )
        setattr(sys, name, safe)


class _SafeFile(io.FileIO):
    """A stream's file, whose writes never fail; if stdout cannot be written, stderr says so."""

    _lost = False

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # it does not block, and is full
                select.select([], [self], [])
            return written
        except BrokenPipeError:  # the reader has seen enough, as `head` has
            return len(data)
        except OSError as error:
            if self.fileno() == 1 and not self._lost:
                self._lost = True
                say_error(f"stdout cannot be written: {error.strerror}")
            return len(data)
