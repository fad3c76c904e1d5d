"""How a flag of the table is declared, and the parsers of what is typed after it.

The parsers are for argparse: they raise ArgumentTypeError, or ValueError for what is no number.
"""

import argparse
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from activation_extraction.common.choices import BUCKET_PROTOCOLS, MESH_AXES

MOST = 10**9  # the largest whole number that any flag takes; more is a typo
MOST_LAYERS = 10_000


def text(typed: str) -> str:
    """Returns what was typed. Bytes that are not UTF-8 are refused: JSON cannot hold them."""
    if not typed.strip():
        raise argparse.ArgumentTypeError("is empty (an unset variable?)")
    if re.search("[\ud800-\udfff]", typed):
        raise argparse.ArgumentTypeError(f"is not UTF-8: {ascii(typed)}")
    return typed


def path(typed: str) -> str:
    """Returns a path with the home folder for ~; without one, a folder called ~ would be made."""
    expanded = os.path.expanduser(text(typed))
    if expanded.startswith("~"):
        raise argparse.ArgumentTypeError(
            f"{typed}: no home folder is known for {typed.split('/')[0]}; set HOME, or give a path "
            f"without ~ (./{typed} if this is its name)"
        )
    return expanded


def path_or_default(typed: str) -> str:
    return path(typed) if typed else ""


def integer(least: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers from `least` to MOST."""

    def parse(typed: str) -> int:
        value = int(typed)
        if not least <= value <= MOST:
            raise argparse.ArgumentTypeError(f"{value} is not a number from {least} to {MOST}")
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
    """Returns the layers of a number or a range such as 1-3, which has both its ends; or "all"."""
    if typed == "all":
        return typed
    if typed.startswith("-") or "--" in typed:
        raise argparse.ArgumentTypeError(
            f"{typed}: layers are counted from 0, never from the end; expected a number, a range "
            "such as 1-3, or all"
        )
    first, dash, last = typed.partition("-")
    parse = integer(0)
    if not dash or not first:
        return (parse(typed),)
    ends = parse(first), parse(last)
    if ends[0] > ends[1] or ends[1] > MOST_LAYERS:
        raise argparse.ArgumentTypeError(f"{typed} is not a range of layers such as 1-3")
    return tuple(range(ends[0], ends[1] + 1))


def sizes(typed: str) -> tuple[int, ...]:
    return tuple(map(integer(1), typed.split(",")))


def axes(typed: str) -> tuple[str, ...]:
    """Returns different names of mesh axes that have commas between them."""
    names = tuple(typed.split(","))
    if len(set(names)) < len(names) or not set(names) <= set(MESH_AXES):
        raise argparse.ArgumentTypeError(
            f"{typed!r} is not a list of different names from {', '.join(MESH_AXES)}"
        )
    return names


def address(typed: str) -> str:
    """Returns HOST:PORT. The host may be a name, or an address of either kind."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w-]+(?:\.[\w-]+)*):(\d+)", typed)
    if found is None or not 0 < int(found[2]) < 65536:
        raise argparse.ArgumentTypeError(
            f"{typed}: expected HOST:PORT of host 0, such as 10.0.0.1:8476"
        )
    return typed


def positive(typed: str) -> float:
    value = float(typed)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{typed} is not a positive number")
    return value


def positive_or_0(typed: str) -> float:
    return positive(typed) if float(typed) else 0.0


positive.__name__ = positive_or_0.__name__ = "number"


def dollars(typed: str) -> tuple[float, ...]:
    """Returns one or two prices with a comma between them."""
    if typed.count(",") > 1:
        raise argparse.ArgumentTypeError(f"{typed!r} is not one or two prices such as 1.2,0.4")
    return tuple(map(positive, typed.split(",")))


def argument(typed: str) -> tuple[str, Any]:
    """Returns the name and the value of NAME=VALUE. The value is JSON, or else text.

    Python reads NaN, 1e999 and half of a surrogate pair, which metadata.json cannot hold.
    """
    name, equals, text = typed.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{typed!r} is not NAME=VALUE")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{typed!r} is not NAME=VALUE with a finite number, or with text in Unicode"
        ) from error
    return name, value


def weighted(typed: str) -> tuple[str, float]:
    """Returns the source and the weight of SOURCE=WEIGHT."""
    source, _, weight = text(typed).rpartition("=")
    try:
        return text(source), positive(weight)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{typed!r} is not SOURCE=WEIGHT with a positive weight, such as texts.jsonl=0.7"
        ) from error


def hook_and_path(typed: str) -> tuple[str, str]:
    """Returns the hook, "" if there is none, and the path of [HOOK=]PATH. A hook has no slash."""
    hook, equals, rest = text(typed).partition("=")
    if not equals or "/" in hook:
        return "", path(typed)
    if not hook:
        raise argparse.ArgumentTypeError(f"{typed!r} is not [HOOK=]SAE")
    return hook, path(rest)


def in_bucket(typed: str) -> str:
    """Returns a folder in a bucket. Names are refused that clients would take for something else,
    or write in another way."""
    if re.search(r"[*?\[\]#;\\\s]|::", text(typed)) or not typed.isprintable():
        raise argparse.ArgumentTypeError(
            f"{typed!r}: contains a space, a wildcard, a control character, '#', ';', '\\' or "
            "'::'; choose another name"
        )
    folders = typed.strip("/").split("/")
    if len(folders) > 1 and "" in folders or {".", ".."}.intersection(folders):
        raise argparse.ArgumentTypeError(
            f"{typed}: has a folder without a name, or called . or ..; expected names with one / "
            "between them"
        )
    return typed


def bucket(typed: str) -> str:
    """Returns the name of a bucket, or a URL of a bucket and perhaps of a folder in it."""
    protocol, is_url, rest = typed.partition("://")
    in_bucket(rest or typed)
    if is_url and (protocol not in BUCKET_PROTOCOLS or not rest):
        raise argparse.ArgumentTypeError(
            f"{typed}: is not the URL of a bucket; expected a name, or a URL such as s3://bucket, "
            f"which begins with one of {', '.join(BUCKET_PROTOCOLS)}"
        )
    if not is_url and "/" in typed.rstrip("/"):
        raise argparse.ArgumentTypeError(
            f"{typed}: is a path; give only the bucket's name here, and the folder in it as "
            "--gcs_prefix"
        )
    return typed


@dataclass(frozen=True)
class Flag:
    """What the table says of one flag besides its type and default.

    options: of argparse. needs: another flag without which this one means nothing, or several with
    " or " between them, of which one is enough. excludes: flags that cannot be given with this one.
    variables: environment variables that stand in for the flag; the first that is set counts.
    opposite: the name of the flag that means no, and its help. collect: makes the value of a flag
    that takes several out of their list.
    """

    options: dict[str, Any]
    needs: str = ""
    excludes: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    opposite: tuple[str, str] | None = None
    collect: Callable[[list[Any]], Any] = tuple


def flag(
    help: str,
    default: Any = None,
    parse: Callable[[str], Any] = text,
    *,
    unit: str = "",
    default_is: str = "",
    needs: str = "",
    excludes: tuple[str, ...] = (),
    variables: tuple[str, ...] = (),
    collect: Callable[[list[Any]], Any] = tuple,
    **options: Any,
) -> Any:
    """Declares a flag that takes a value.

    default: None if there is none, or if config.py works it out. unit: that of the default.
    default_is: words for --help where the default's value does not say enough.
    """
    said = default_is or ("" if default is None else f"{default}{unit}")
    alternatives = [words for words in (" or ".join(variables), said) if words]
    if alternatives:
        help += f" (default: {', else '.join(alternatives)})"
    if "choices" not in options:
        options = {"type": parse, "metavar": "NAME", **options}
    declared = Flag({"help": help, **options}, needs, excludes, variables, collect=collect)
    return field(default=default, metadata={"flag": declared})


def switch(help: str, *, needs: str = "", excludes: tuple[str, ...] = ()) -> Any:
    """Declares a boolean flag that is false unless it is given."""
    declared = Flag({"help": help, "action": "store_true"}, needs, excludes)
    return field(default=False, metadata={"flag": declared})


def pair(help: str, opposite: str, opposite_help: str) -> Any:
    """Declares a boolean flag that is true by default, and the flag that makes it false."""
    options = {"help": f"{help} (default)", "action": "store_true"}
    declared = Flag(options, opposite=(opposite, opposite_help))
    return field(default=True, metadata={"flag": declared})


def each_once(values: list[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


def several(
    help: str, parse: Callable[[str], Any] = text, *, default_is: str = "none", **options: Any
) -> Any:
    """Declares a flag that takes one or more values; its default is an empty tuple."""
    return flag(help, (), parse, default_is=default_is, nargs="+", **options)


def number(
    help: str, default: int | None = None, *, least: int = 1, metavar: str = "N", **options: Any
) -> Any:
    """Declares a flag that takes a whole number from `least` on."""
    return flag(help, default, integer(least), metavar=metavar, **options)


def seconds(help: str, default: int) -> Any:
    """Declares a flag that takes a number of seconds, at least 1."""
    return number(help, default, unit=" s", metavar="SECONDS")


def gigabytes(help: str, default: float | None = None, **options: Any) -> Any:
    """Declares a flag that takes a size in GB."""
    help, options = f"{help}; in units of 10^9 bytes", {"parse": positive} | options
    return flag(help, default, unit=" GB", metavar="GB", **options)
