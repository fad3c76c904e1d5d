"""All text leaves the program through this module: to stdout, to stderr and, by log.py, to the log.

Names and messages come from files, from servers and from what others have stored. Control
characters in them are shown as escapes, so that a terminal does not obey them, and URLs lose their
secrets.
"""

import re
import sys

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
    scheme, user, query = url["scheme"], url["user"], url["query"] or ""
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
    """Prints lines to stdout."""
    print(*map(visible, lines), sep="\n")


def say_error(*lines: object) -> None:
    """Prints lines to stderr."""
    print(*map(visible, lines), sep="\n", file=sys.stderr, flush=True)
