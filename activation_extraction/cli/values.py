"""The parsers of what is typed after a flag.

Each parser takes the typed text and returns the value. It raises FlagValueError, or ValueError for
text that is no number at all. config.py hands the parsers to argparse, and common/positions.py has
the parser of --positions.
"""

import json
import os
import re
from collections.abc import Callable
from typing import Any

from activation_extraction.common.choices import BUCKET_PROTOCOLS, MESH_AXES
from activation_extraction.common.errors import FlagValueError

MOST = 10**9  # the largest whole number that a flag takes; a larger one is a typo
MOST_LAYERS = 10_000


def text(typed: str) -> str:
    """Returns the text as it is.

    Raises:
        FlagValueError: The text is empty, or has bytes that are not UTF-8, which JSON cannot hold.
    """
    if not typed.strip():
        raise FlagValueError("is empty (an unset variable?)")
    if re.search("[\ud800-\udfff]", typed):
        raise FlagValueError(f"is not UTF-8: {ascii(typed)}")
    return typed


def path(typed: str) -> str:
    """Returns a path with the home folder for ~.

    Raises:
        FlagValueError: There is no home folder. A folder called ~ would be made otherwise.
    """
    expanded = os.path.expanduser(text(typed))
    if expanded.startswith("~"):
        raise FlagValueError(
            f"{typed}: no home folder is known for {typed.split('/')[0]}; set HOME, or give a path "
            f"without ~ (./{typed} if this is its name)"
        )
    return expanded


def path_or_default(typed: str) -> str:
    return path(typed) if typed else ""


def integer(least: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers of at least `least` and at most MOST."""

    def parse(typed: str) -> int:
        value = int(typed)
        if not least <= value <= MOST:
            raise FlagValueError(f"{value} is not a number from {least} to {MOST}")
        return value

    parse.__name__ = "integer"  # in messages of argparse
    return parse


def rows(typed: str) -> int | str:
    return typed if typed == "auto" else integer(1)(typed)


rows.__name__ = "integer or auto"


def token(typed: str) -> int | str:
    numbers = re.fullmatch("[-+]?[0-9]+(,[0-9]+)*", typed)
    return integer(0)(typed) if numbers else text(typed)


token.__name__ = "token id"


def layers(typed: str) -> tuple[int, ...] | str:
    """Returns the layers of a number or of an inclusive range such as 1-3; "all" as it is."""
    if typed == "all":
        return typed
    if typed.startswith("-") or "--" in typed:
        raise FlagValueError(
            f"{typed}: layers are counted from 0, never from the end; expected a number, a range "
            "such as 1-3, or all"
        )
    first, dash, last = typed.partition("-")
    parse = integer(0)
    if not dash or not first:
        return (parse(typed),)
    start, end = parse(first), parse(last)
    if start > end or end > MOST_LAYERS:
        raise FlagValueError(f"{typed} is not a range of layers such as 1-3")
    return tuple(range(start, end + 1))


def sizes(typed: str) -> tuple[int, ...]:
    return tuple(map(integer(1), typed.split(",")))


def axes(typed: str) -> tuple[str, ...]:
    """Returns the names of mesh axes, which are separated by commas and all different."""
    names = tuple(typed.split(","))
    if len(set(names)) < len(names) or not set(names) <= set(MESH_AXES):
        raise FlagValueError(
            f"{typed!r} is not a list of different names from {', '.join(MESH_AXES)}"
        )
    return names


def address(typed: str) -> str:
    """Returns HOST:PORT. The host is a name, an IPv4 address, or an IPv6 address in brackets."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w-]+(?:\.[\w-]+)*):(\d+)", typed)
    if match is None or not 0 < int(match[2]) < 65536:
        raise FlagValueError(f"{typed}: expected HOST:PORT of host 0, such as 10.0.0.1:8476")
    return typed


def positive(typed: str) -> float:
    value = float(typed)
    if not 0 < value < float("inf"):
        raise FlagValueError(f"{typed} is not a positive number")
    return value


def positive_or_0(typed: str) -> float:
    return positive(typed) if float(typed) else 0.0


positive.__name__ = positive_or_0.__name__ = "number"


def dollars(typed: str) -> tuple[float, ...]:
    """Returns one price, or two that are separated by a comma."""
    if typed.count(",") > 1:
        raise FlagValueError(f"{typed!r} is not one or two prices such as 1.2,0.4")
    return tuple(map(positive, typed.split(",")))


def argument(typed: str) -> tuple[str, Any]:
    """Returns the name and the value of NAME=VALUE. A value that is no JSON is text.

    Python reads NaN, 1e999 and half of a surrogate pair as JSON, but metadata.json cannot hold
    them, so they are refused.
    """
    name, equals, text = typed.partition("=")
    if not equals or not name.isidentifier():
        raise FlagValueError(f"{typed!r} is not NAME=VALUE")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise FlagValueError(
            f"{typed!r} is not NAME=VALUE with a finite number, or with text in Unicode"
        ) from error
    return name, value


def weighted(typed: str) -> tuple[str, float]:
    """Returns the source and the weight of SOURCE=WEIGHT."""
    source, _, weight = text(typed).rpartition("=")
    try:
        return text(source), positive(weight)
    except ValueError as error:
        raise FlagValueError(
            f"{typed!r} is not SOURCE=WEIGHT with a positive weight, such as texts.jsonl=0.7"
        ) from error


def hook_and_path(typed: str) -> tuple[str, str]:
    """Returns the hook and the path of [HOOK=]PATH; the hook is "" if there is none.

    The name of a hook has no slash, so an = after a slash belongs to the path.
    """
    hook, equals, rest = text(typed).partition("=")
    if not equals or "/" in hook:
        return "", path(typed)
    if not hook:
        raise FlagValueError(f"{typed!r} is not [HOOK=]SAE")
    return hook, path(rest)


def in_bucket(typed: str) -> str:
    """Returns the path of a folder in a bucket.

    Raises:
        FlagValueError: Clients of buckets would interpret the path in another way or change it.
    """
    if re.search(r"[*?\[\]#;\\\s]|::", text(typed)) or not typed.isprintable():
        raise FlagValueError(
            f"{typed!r}: contains a space, a wildcard, a control character, '#', ';', '\\' or "
            "'::'; choose another name"
        )
    folders = typed.strip("/").split("/")
    if len(folders) > 1 and "" in folders or {".", ".."}.intersection(folders):
        raise FlagValueError(
            f"{typed}: has a folder without a name, or called . or ..; expected names with one / "
            "between them"
        )
    return typed


def bucket(typed: str) -> str:
    """Returns the name of a bucket, or the URL of a bucket or of a folder in it."""
    protocol, is_url, rest = typed.partition("://")
    in_bucket(rest or typed)
    if is_url and (protocol not in BUCKET_PROTOCOLS or not rest):
        raise FlagValueError(
            f"{typed}: is not the URL of a bucket; expected a name, or a URL such as s3://bucket, "
            f"which begins with one of {', '.join(BUCKET_PROTOCOLS)}"
        )
    if not is_url and "/" in typed.rstrip("/"):
        raise FlagValueError(
            f"{typed}: is a path; give only the bucket's name here, and the folder in it as "
            "--gcs_prefix"
        )
    return typed
