"""The one way of text out of the program: to stdout, to stderr and, by log.py, into the log.

Names and messages come from strangers: files, servers, what others have stored. Control characters
in them are shown as escapes, so that a terminal does not obey them, and URLs lose their secrets.
"""

import re
import sys

# A URL of fsspec: its scheme, what stands in front of "@", the rest, a query. "::" ends one.
URL = re.compile(
    r"(?P<scheme>[a-zA-Z][\w+.-]*)://(?:(?P<user>[^\s/?#]*)@)?(?P<rest>(?:(?!::)[^\s?#])*)"
    r"(?P<query>[?#](?:(?!::)[^\s'\"])*)?"
)
# Here a name in front of "@" is no secret: a container, or a repository before its revision.
NAMES_BEFORE_AT = {"abfs", "abfss", "az", "wasb", "wasbs", "adl", "hf"}
# A parameter of a query, also where a library tells only the end of a URL.
SECRET = re.compile(
    r"(?i)(?<=[?&])([\w.-]*(?:sig|token|secret|credential|passw|key)[\w.-]*)=[^&\s'\")]+"
)


def without_secrets(text: str) -> str:
    """The text; URLs in it lose names and passwords in front of "@", and queries.

    A "?" without "=" after it is a wildcard in a bucket, and stays.
    """
    text = URL.sub(_stripped, text) if "://" in text else text
    return SECRET.sub(r"\1=...", text)


def plain_url(place: str) -> str:
    """A URL without secrets, as it is stored and compared; a path stays as it is."""
    return without_secrets(place) if "://" in place else place


def _stripped(url: re.Match[str]) -> str:
    scheme, user, query = url["scheme"], url["user"], url["query"] or ""
    named = user is not None and ":" not in user and scheme in NAMES_BEFORE_AT
    kept = "" if scheme in ("http", "https") or "=" in query else query
    return f"{scheme}://{f'{user}@' if named else ''}{url['rest']}{kept}"


def visible(text: object) -> str:
    """One line without secrets, in which characters that cannot be seen stand as escapes.

    Letters of any script stay; `\\x1b` stands for an escape, `\\u202e` for a change of direction.
    """
    return "".join(map(_shown, without_secrets(str(text))))


def _shown(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def counted(number: int, noun: str) -> str:
    """A number of things, as "1 sample" or "2,000 samples"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def say(*lines: object) -> None:
    """Prints lines to stdout."""
    print(*map(visible, lines), sep="\n")


def say_error(*lines: object) -> None:
    """Prints lines to stderr."""
    print(*map(visible, lines), sep="\n", file=sys.stderr, flush=True)
