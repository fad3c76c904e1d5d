"""How a flag is declared: its help with its default, and the parsers of its value."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from activation_extraction.cli.defaults import DEFAULTS, ENVIRONMENT

LARGEST = 10**9  # whole number that any flag takes; more is a typo
MOST_LAYERS = 10_000
MESH_AXES = ("pipeline", "data", "fsdp", "expert", "model")


def text(typed: str) -> str:
    """Any text that is not blank."""
    if not typed.strip():
        raise argparse.ArgumentTypeError("is empty (an unset variable?)")
    return typed


def integer(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from `least` to LARGEST."""

    def parse(typed: str) -> int:
        value = int(typed)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        if value > LARGEST:
            raise argparse.ArgumentTypeError(f"{value} is more than {LARGEST}")
        return value

    parse.__name__ = "integer"
    return parse


def layers(typed: str) -> tuple[int, ...] | str:
    """A layer, a range such as 1-3 with both its ends, or "all"."""
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
    """Positive numbers with commas between them."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", typed):
        raise argparse.ArgumentTypeError(f"{typed!r} is not a list of positive numbers such as 4,4")
    return tuple(map(int, typed.split(",")))


def axes(typed: str) -> tuple[str, ...]:
    """Different names of mesh axes with commas between them."""
    names = tuple(typed.split(","))
    if len(set(names)) < len(names) or not set(names) <= set(MESH_AXES):
        raise argparse.ArgumentTypeError(
            f"{typed!r} is not a list of different names from {', '.join(MESH_AXES)}"
        )
    return names


def gigabytes(typed: str) -> float:
    """A positive size in 10^9 bytes."""
    value = float(typed)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{typed} is not a positive size in GB")
    return value


def free_gigabytes(typed: str) -> float:
    """A size in 10^9 bytes, or 0."""
    return gigabytes(typed) if float(typed) else 0.0


gigabytes.__name__ = free_gigabytes.__name__ = "size in GB"


def add(group: Any, name: str, help: str, unit: str = "", **options: Any) -> None:
    """Adds a flag with a value. Its help ends with the default and the default's unit."""
    if name in DEFAULTS and "(default" not in help:
        help += f" (default: {DEFAULTS[name]}{unit})"
    group.add_argument(f"--{name}", help=help, **options)


def add_switch(group: Any, name: str, help: str) -> None:
    """Adds a boolean flag that is false by default."""
    group.add_argument(f"--{name}", action="store_true", help=help)


def add_pair(
    group: Any, yes: str, no: str, yes_help: str, no_help: str, default: bool | None = True
) -> None:
    """Adds a boolean flag as a pair of names. It is true by default; None leaves that to the
    configuration."""
    pair = group.add_mutually_exclusive_group()
    pair.add_argument(
        f"--{yes}", action="store_true", default=default, help=f"{yes_help} (default)"
    )
    pair.add_argument(f"--{no}", dest=yes, action="store_false", help=no_help)


def variables(flag: str) -> str:
    """The environment variables that a flag is filled in from."""
    return " or ".join(ENVIRONMENT[flag])
