"""The parsers of what is typed after a flag, for argparse: each raises ArgumentTypeError."""

import argparse
import re
from collections.abc import Callable

from activation_extraction.common.choices import MESH_AXES

LARGEST = 10**9  # whole number that any flag takes; more is a typo
MOST_LAYERS = 10_000


def text(typed: str) -> str:
    """Returns any text that is not blank."""
    if not typed.strip():
        raise argparse.ArgumentTypeError("is empty (an unset variable?)")
    return typed


def integer(least: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers from `least` to LARGEST."""

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


def gigabytes(typed: str) -> float:
    """Returns a positive size in 10^9 bytes."""
    value = float(typed)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{typed} is not a positive size in GB")
    return value


def free_gigabytes(typed: str) -> float:
    """Returns a size in 10^9 bytes, which may be 0."""
    return gigabytes(typed) if float(typed) else 0.0


gigabytes.__name__ = free_gigabytes.__name__ = "size in GB"
