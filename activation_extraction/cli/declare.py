"""How a flag of the table is declared, and the parsers of what is typed after it.

The parsers are for argparse, and raise ArgumentTypeError.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from activation_extraction.common.choices import MESH_AXES

MOST = 10**9  # the largest whole number that any flag takes; more is a typo
MOST_LAYERS = 10_000


def text(typed: str) -> str:
    if not typed.strip():
        raise argparse.ArgumentTypeError("is empty (an unset variable?)")
    return typed


def integer(least: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers from `least` to MOST."""

    def parse(typed: str) -> int:
        value = int(typed)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        if value > MOST:
            raise argparse.ArgumentTypeError(f"{value} is more than {MOST}")
        return value

    parse.__name__ = "integer"
    return parse


def rows(typed: str) -> int | str:
    """Returns a number of rows, or "auto"."""
    return typed if typed == "auto" else integer(1)(typed)


rows.__name__ = "integer or auto"  # in messages of argparse


def token(typed: str) -> int | str:
    numbers = re.fullmatch("[-+]?[0-9]+(,[0-9]+)*", typed)
    return integer(0)(typed) if numbers else text(typed)


token.__name__ = "token id"


def layers(typed: str) -> tuple[int, ...] | str:
    """Returns the layers of a number or a range such as 1-3, which has both its ends; or "all"."""
    if typed == "all":
        return typed
    first, dash, last = typed.partition("-")
    parse = integer(0)
    if not dash or not first:
        return (parse(typed),)
    ends = parse(first), parse(last)
    if ends[0] > ends[1] or ends[1] > MOST_LAYERS:
        raise argparse.ArgumentTypeError(f"{typed} is not a range of layers such as 1-3")
    return tuple(range(ends[0], ends[1] + 1))


def sizes(typed: str) -> tuple[int, ...]:
    """Returns positive numbers that have commas between them."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", typed):
        raise argparse.ArgumentTypeError(f"{typed!r} is not a list of positive numbers such as 4,4")
    return tuple(map(int, typed.split(",")))


def axes(typed: str) -> tuple[str, ...]:
    """Returns different names of mesh axes that have commas between them."""
    names = tuple(typed.split(","))
    if len(set(names)) < len(names) or not set(names) <= set(MESH_AXES):
        raise argparse.ArgumentTypeError(
            f"{typed!r} is not a list of different names from {', '.join(MESH_AXES)}"
        )
    return names


def size_in_gb(typed: str) -> float:
    """Returns a positive size in 10^9 bytes."""
    value = float(typed)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{typed} is not a positive size in GB")
    return value


def free_size_in_gb(typed: str) -> float:
    """Returns a size in 10^9 bytes, which may be 0."""
    return size_in_gb(typed) if float(typed) else 0.0


def dollars(typed: str) -> tuple[float, ...]:
    """Returns one or two prices, positive numbers with a comma between them."""
    values = tuple(map(float, typed.split(",")))
    if len(values) > 2 or not all(0 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{typed!r} is not one or two prices such as 1.2,0.4")
    return values


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
    source, _, weight = typed.rpartition("=")
    try:
        value = float(weight)
    except ValueError:
        value = 0.0
    if not source.strip() or not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{typed!r} is not SOURCE=WEIGHT with a positive weight, such as texts.jsonl=0.7"
        )
    return source, value


size_in_gb.__name__ = free_size_in_gb.__name__ = "size in GB"


@dataclass(frozen=True)
class Flag:
    """What the table says of one flag besides its type and default.

    options: of argparse. needs: another flag without which this one means nothing, or several with
    " or " between them, of which one is enough. excludes: flags that cannot be given with this one.
    variables: environment variables that stand in for the flag; the first that is set counts.
    opposite: the name of the flag that means no, and its help.
    """

    options: dict[str, Any]
    needs: str = ""
    excludes: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    opposite: tuple[str, str] | None = None


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
    declared = Flag({"help": help, **options}, needs, excludes, variables)
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
    help, options = f"{help}; in units of 10^9 bytes", {"parse": size_in_gb} | options
    return flag(help, default, unit=" GB", metavar="GB", **options)
