"""Parses the values of flags.

Each parser takes the text after the flag and returns the value. It raises FlagValueError, or
ValueError for text that is no number at all. config.py passes the parsers to argparse. The parser
of --positions is in common/positions.py.
"""

import json
import os
import re
from collections.abc import Callable
from typing import Any

from activation_extraction.common.choices import BUCKET_PROTOCOLS, MESH_AXES
from activation_extraction.common.errors import FlagValueError

MOST = 10**9  # the largest whole number that a flag takes; a larger one is a typo
MOST_LAYERS = 10_000  # the largest end of a range of layers


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
    if expanded.startswith("~"):  # without a home folder; a folder called ~ would be made
        raise FlagValueError(
            f"{typed}: no home folder is known for {typed.split('/')[0]}; set HOME, or give a path "
            f"without ~ (./{typed} if this is its name)"
        )
    return expanded


def path_or_default(typed: str) -> str:
    """Returns a path, or "" for the default if nothing was typed."""
    return path(typed) if typed else ""


def integer(least: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers of at least `least` and at most MOST."""

    def parse(typed: str) -> int:
        number = int(typed)
        if not least <= number <= MOST:
            raise FlagValueError(f"{number} is not a whole number from {least} to {MOST}")
        return number

    parse.__name__ = "integer"  # in messages of argparse
    return parse


def rows(typed: str) -> int | str:
    """Returns a number of rows from 1 on, or "auto"."""
    return typed if typed == "auto" else integer(1)(typed)


rows.__name__ = "integer or auto"


def token(typed: str) -> int | str:
    """Returns a token id, or other text as the text of a token."""
    # Numbers with commas go to `integer`, too, which rejects them: ids are separated by spaces.
    numbers = re.fullmatch("[-+]?[0-9]+(,[0-9]+)*", typed)
    return integer(0)(typed) if numbers else text(typed)


token.__name__ = "token id"


def layers(typed: str) -> tuple[int, ...] | str:
    """Returns the layers of a number or of an inclusive range such as 1-3, or "all"."""
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
    """Returns sizes of mesh axes from a list with commas."""
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
    """Returns HOST:PORT. The host is a name, an IPv4 address or an IPv6 address in brackets."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w-]+(?:\.[\w-]+)*):(\d+)", typed)
    if match is None or not 0 < int(match[2]) < 65536:
        raise FlagValueError(f"{typed}: expected HOST:PORT of host 0, such as 10.0.0.1:8476")
    return typed


def positive(typed: str) -> float:
    """Returns a positive finite number."""
    number = float(typed)
    if not 0 < number < float("inf"):
        raise FlagValueError(f"{typed} is not a positive number")
    return number


def positive_or_0(typed: str) -> float:
    """Returns a finite number of at least 0."""
    return positive(typed) if float(typed) else 0.0


positive.__name__ = positive_or_0.__name__ = "number"


def dollars(typed: str) -> tuple[float, ...]:
    """Returns one price, or two that are separated by a comma."""
    if typed.count(",") > 1:
        raise FlagValueError(f"{typed!r} is not one or two prices such as 1.2,0.4")
    return tuple(map(positive, typed.split(",")))


def argument(typed: str) -> tuple[str, Any]:
    """Parses NAME=VALUE.

    Returns:
        The name, which is a Python identifier.
        The value: parsed if it is JSON, otherwise text.
    """
    name, equals, typed_value = typed.partition("=")
    if not equals or not name.isidentifier():
        raise FlagValueError(f"{typed!r} is not NAME=VALUE")
    try:
        parsed = json.loads(typed_value)
    except (ValueError, RecursionError):
        parsed = typed_value
    # Python parses NaN, 1e999 and half of a surrogate pair, but metadata.json cannot store them.
    try:
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise FlagValueError(
            f"{typed!r} is not NAME=VALUE with a finite number, or with text in Unicode"
        ) from error
    return name, parsed


def weighted(typed: str) -> tuple[str, float]:
    """Parses SOURCE=WEIGHT into the source and its positive weight."""
    source, _, weight = text(typed).rpartition("=")
    try:
        return text(source), positive(weight)
    except ValueError as error:
        raise FlagValueError(
            f"{typed!r} is not SOURCE=WEIGHT with a positive weight, such as texts.jsonl=0.7"
        ) from error


def hook_and_path(typed: str) -> tuple[str, str]:
    """Parses [HOOK=]PATH.

    Returns:
        The name of the hook, which contains no slash; "" if there is none.
        The path.
    """
    hook, equals, typed_path = text(typed).partition("=")
    if not equals or "/" in hook:
        return "", path(typed)
    if not hook:
        raise FlagValueError(f"{typed!r} is not [HOOK=]SAE")
    return hook, path(typed_path)


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
    protocol, is_url, name = typed.partition("://")
    in_bucket(name or typed)
    if is_url and (protocol not in BUCKET_PROTOCOLS or not name):
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
