"""Filters all text that the program prints to stdout and stderr, including the lines of the log.

Names and messages may come from files, servers and other people's runs. The filter replaces control
characters by escapes, so that a terminal does not obey them, and removes secrets from URLs.

`make_streams_safe` replaces stdout and stderr, so that a stream that is closed, full or not in
UTF-8 does not make the program fail. log.py sets up the log.
"""

import io
import os
import re
import select
import sys
from typing import Any

# A URL of fsspec, such as "https://user:secret@host/path?token=x": a scheme, an optional user
# before "@", the host and path, and an optional query. A URL ends before "::", because fsspec joins
# URLs with "::".
URL = re.compile(
    r"(?P<scheme>[a-zA-Z][\w+.-]*)://(?:(?P<user>[^\s/?#]*)@)?(?P<path>(?:(?!::)[^\s?#])*)"
    r"(?P<query>[?#](?:(?!::)[^\s'\"])*)?"
)
# Schemes of URLs in which the name before "@" is not secret, because it names a container or a
# repository.
NAMES_BEFORE_AT = {"abfs", "abfss", "az", "wasb", "wasbs", "adl", "hf"}
# A secret parameter of a URL's query. The pattern does not contain the rest of the URL, because
# libraries sometimes print only the end of a URL.
SECRET = re.compile(
    r"(?i)(?<=[?&])([\w.-]*(?:sig|token|secret|credential|passw|key)[\w.-]*)=[^&\s'\")]+"
)


def without_secrets(text: str) -> str:
    """Removes secrets from the URLs in a text: queries, and user names and passwords before "@".

    In the URL of a bucket, a "?" without a "=" after it is a wildcard, so it is not removed. A name
    before "@" is not removed if it is the name of a container or repository (see NAMES_BEFORE_AT).
    """
    if "://" in text:
        text = URL.sub(_stripped_url, text)
    return SECRET.sub(r"\1=...", text)


def plain_url(path: str) -> str:
    """Returns a URL without its secrets, to store or compare it. Returns other paths unchanged."""
    return without_secrets(path) if "://" in path else path


def _stripped_url(url: re.Match[str]) -> str:
    """Returns a URL without the parts that may be secret (see `without_secrets`).

    Args:
        url: A match of the pattern URL.
    """
    url_scheme = url["scheme"]
    user_and_password = url["user"]
    url_query = url["query"] or ""
    if user_and_password is None or ":" in user_and_password or url_scheme not in NAMES_BEFORE_AT:
        container_and_at_sign = ""
    else:
        container_and_at_sign = f"{user_and_password}@"
    if url_scheme in ("http", "https") or "=" in url_query:
        url_query = ""
    return f"{url_scheme}://{container_and_at_sign}{url['path']}{url_query}"


def visible(text: object) -> str:
    r"""Returns a text as one line that can be printed safely.

    The secrets in URLs, such as passwords, are removed (see `without_secrets`). Unprintable
    characters are replaced by escapes: for example, the escape character becomes `\x1b`, and the
    character that reverses the writing direction becomes `\u202e`. Letters of all scripts are
    printable.

    Args:
        text: The text, or an object whose text `str` returns.
    """
    return "".join(map(_escaped, without_secrets(str(text))))


def _escaped(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 sample" or "2,000 samples"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def say(*lines: object) -> None:
    """Prints lines to stdout, each without secrets and with escaped control characters."""
    print(*map(visible, lines), sep="\n")


def say_error(*lines: object) -> None:
    """Prints lines to stderr, each without secrets and with escaped control characters."""
    print(*map(visible, lines), sep="\n", file=sys.stderr, flush=True)


def make_streams_safe() -> None:
    """Replaces stdout and stderr by streams to which writing never fails.

    Output to a pipe without a reader, or to a stream that was closed at the start, is dropped. A
    character that the stream cannot encode becomes an escape.
    """
    for stream_name in ("stdout", "stderr"):
        output_stream = getattr(sys, stream_name)
        if output_stream is None:
            setattr(sys, stream_name, open(os.devnull, "w"))
            continue
        stream_without_errors = io.TextIOWrapper(
            io.BufferedWriter(_SafeFile(output_stream.fileno(), "w", closefd=False)),
            output_stream.encoding,
            "backslashreplace",
            line_buffering=output_stream.line_buffering or output_stream.write_through,
        )
        setattr(sys, stream_name, stream_without_errors)


class _SafeFile(io.FileIO):
    """A file whose method `write` raises no OSError; text that cannot be written is dropped.

    If stdout cannot be written, one message is printed to stderr.
    """

    _has_reported_failure = False

    def write(self, data: Any, /) -> int:
        try:
            num_written_bytes = super().write(data)
            # `write` returns None if the stream is non-blocking and full.
            while num_written_bytes is None:
                select.select([], [self], [])
                num_written_bytes = super().write(data)
            return num_written_bytes
        except BrokenPipeError:
            # The process that reads the pipe has ended, as `head` does after some lines. The text
            # is dropped, and counts as written, so that this process goes on.
            return len(data)
        except OSError as error:
            if self.fileno() == 1 and not self._has_reported_failure:
                self._has_reported_failure = True
                say_error(f"stdout cannot be written: {error.strerror}")
            return len(data)
