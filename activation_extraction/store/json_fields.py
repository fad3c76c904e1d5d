"""Fields of the JSON files: which values each may have. Somebody else may have written them.

A table names the fields, with what each has to be; a new field is one line. Numbers are bounded, so
that nothing that is computed from them can overflow or take memory for itself.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from activation_extraction.store.sealed_json import DamagedError

LARGEST_COUNT = 2**53
SCALARS: tuple[type, ...] = (type(None), bool, int, float, str)  # what a plain value may be
MOST_PARTS = 64  # of an object, or a list, of plain values
LARGEST_WIDTH = 2**27  # of a hook
LARGEST_NUMBER = 1e100


class Kind(NamedTuple):
    """What a field has to be, in words, and whether a value is."""

    words: str
    fits: Callable[[Any], bool]


def integer(least: int, most: int) -> Kind:
    words = f"a whole number from {least} to {most}"
    return Kind(words, lambda value: type(value) is int and least <= value <= most)


def optional(kind: Kind) -> Kind:
    return Kind(f"{kind.words} or null", lambda value: value is None or kind.fits(value))


def any_of(*kinds: Kind) -> Kind:
    words = " or ".join(kind.words for kind in kinds)
    return Kind(words, lambda value: any(kind.fits(value) for kind in kinds))


def list_of(kind: Kind) -> Kind:
    def fits(value: Any) -> bool:
        return type(value) in (list, tuple) and all(map(kind.fits, value))

    return Kind(f"a list of which each is {kind.words}", fits)


def object_of(fields: Mapping[str, Kind], needed: Collection[str] = ()) -> Kind:
    """An object in which these fields, where it has them, fit; others may be anything."""

    def fits(value: Any) -> bool:
        if not isinstance(value, dict) or any(name not in value for name in needed):
            return False
        return all(kind.fits(value[name]) for name, kind in fields.items() if name in value)

    return Kind(f"an object with {', '.join(needed) or 'fields'}", fits)


COUNT = integer(0, LARGEST_COUNT)
NUMBER = Kind(
    "a number", lambda value: type(value) in (int, float) and abs(value) <= LARGEST_NUMBER
)
POSITIVE = Kind("a number, 0 or larger", lambda value: NUMBER.fits(value) and value >= 0)
TEXT = Kind("text", lambda value: type(value) is str)
FLAG = Kind("true or false", lambda value: type(value) is bool)
OBJECT = object_of({})
KEY = any_of(TEXT, integer(-LARGEST_COUNT, LARGEST_COUNT))
STATISTICS = {
    "tokens": COUNT,
    "values": COUNT,
    "mean": NUMBER,
    "variance": POSITIVE,
    "mean_norm": POSITIVE,
    "max_norm": POSITIVE,
}
HOOK = {
    "key": KEY,
    "name": TEXT,
    "aliases": list_of(TEXT),
    "width": integer(1, LARGEST_WIDTH),
    "dtype": TEXT,
    "scale": Kind("null: this version reads no others", lambda value: value is None),
    **STATISTICS,
}


def check_fields(content: Mapping[str, Any], fields: Mapping[str, Kind], where: str) -> None:
    """Raises DamagedError, naming file and field, for a value that does not fit.

    Whether fields are missing is for the caller to say.
    """
    for name, kind in fields.items():
        if name in content and not kind.fits(content[name]):
            found = ascii(content[name])
            raise DamagedError(f"{where}: {name} is {found:.80}, expected {kind.words}")
