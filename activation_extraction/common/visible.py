"""Filters all text that leaves the program: to stdout, to stderr and, through log.py, to the log.

Names and messages may come from files, servers and other people's runs. The filter shows control
characters as escapes, so that a terminal does not obey them, and removes secrets from URLs. A
stream that is closed, full or not in UTF-8 does not make the program fail.
"""

import io
import os
import re
import select
import sys
from typing import Any

# A URL of fsspec: a scheme, an optional user before "@", the host and path, and an optional query.
# "::" ends it, because fsspec joins URLs with "::".
URL = re.compile(
    r"(?P<scheme>[a-zA-Z][\w+.-]*)://(?:(?P<user>[^\s/?#]*)@)?(?P<path>(?:(?!::)[^\s?#])*)"
    r"(?P<query>[?#](?:(?!::)[^\s'\"])*)?"
)
# Schemes whose name before "@" is not secret: it is a container, or a repository with a revision.
NAMES_BEFORE_AT = {"abfs", "abfss", "az", "wasb", "wasbs", "adl", "hf"}
# A secret parameter of a query, also where a library prints only the end of a URL.
SECRET = re.compile(
    r"(?i)(?<=[?&])([\w.-]*(?:sig|token|secret|credential|passw|key)[\w.-]*)=[^&\s'\")]+"
)


def without_secrets(text: str) -> str:
    """Removes the queries of URLs in a text, and the user names and passwords before "@".

    The query of a bucket's URL stays if it contains no "=", because then "?" is a wildcard. The
    user stays if it is the name of a container or repository (see NAMES_BEFORE_AT).
    """
    text = URL.sub(_stripped, text) if "://" in text else text
    return SECRET.sub(r"\1=...", text)


def plain_url(path: str) -> str:
    """Returns a URL without secrets, for storing and comparing, or a path unchanged."""
    return without_secrets(path) if "://" in path else path


def _stripped(url: re.Match[str]) -> str:
    scheme = url["scheme"]
    user = url["user"]
    query = url["query"] or ""
    named = user is not None and ":" not in user and scheme in NAMES_BEFORE_AT
    kept = "" if scheme in ("http", "https") or "=" in query else query
    return f"{scheme}://{f'{user}@' if named else ''}{url['path']}{kept}"


def visible(text: object) -> str:
    r"""Returns the text as one line without secrets, with unprintable characters as escapes.

    Letters of all scripts stay. For example, the escape character becomes `\x1b`, and a change of
    the writing direction becomes `\u202e`.
    """
    return "".join(map(_shown, without_secrets(str(text))))


def _shown(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 sample" or "2,000 samples"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def say(*lines: object) -> None:
    """Prints filtered lines to stdout."""
    print(*map(visible, lines), sep="\n")


def say_error(*lines: object) -> None:
    """Prints filtered lines to stderr."""
    print(*map(visible, lines), sep="\n", file=sys.stderr, flush=True)


def make_streams_safe() -> None:
    """Replaces stdout and stderr by streams to which writing never fails.

    Output to a pipe without a reader, or to a stream that was closed at the start, is dropped. A
    character that the stream cannot encode becomes an escape.
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
    """A file whose writes never fail. If stdout cannot be written, a message goes to stderr."""

    _lost = False

    def write(self, data: Any, /) -> int:
        try:
            # A full stream that does not block returns None.
            while (written := super().write(data)) is None:
                select.select([], [self], [])
            return written
        except BrokenPipeError:  # the reader has ended, as `head` does early
            return len(data)
        except OSError as error:
            if self.fileno() == 1 and not self._lost:
                self._lost = True
                say_error(f"stdout cannot be written: {error.strerror}")
            return len(data)
