"""Sealed JSON files, and the values that their fields may have.

A sealed JSON file carries a checksum of its own content. If it does not match, the file is damaged
and its content is never used. A stranger may have written a file whose checksum matches, so the
values that a field may have are declared with its type, as in `count: Count`. Numbers are bounded,
so that nothing that is computed from them can overflow or exhaust the memory.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, NamedTuple, get_type_hints

from activation_extraction.common.errors import RunError

REPAIRS = "--repair repairs it"
MAX_COUNT = 2**53
SCALARS: tuple[type, ...] = (type(None), bool, int, float, str)
MAX_FIELDS = 64  # the most scalars in an object or a list
MAX_WIDTH = 2**27  # the largest width of a hook
MAX_NUMBER = 1e100


class DamagedError(RunError):
    """A JSON file does not have the content that was written to it."""


def digest_of(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of JSON content; the order of its keys does not matter."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def seal(content: Mapping[str, Any]) -> bytes:
    """Returns the bytes of the JSON file, including its checksum. Raises ValueError for NaN."""
    sealed = {**content, "checksum": digest_of(content)}
    return (json.dumps(sealed, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """Returns the content of a sealed JSON file. where: names it in messages.

    Raises DamagedError if even a single byte was changed.
    """
    try:
        content = json.loads(data)
        checksum = content.pop("checksum")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"{where}: is damaged, or was not written by this program"
        raise DamagedError(message, remedy=REPAIRS) from error
    try:
        intact = checksum == digest_of(content) and data == seal(content)
    except ValueError:  # NaN
        intact = False
    if not intact:
        message = f"{where}: is damaged: its checksum does not match its content"
        raise DamagedError(message, remedy=REPAIRS)
    return content


def is_sealed(data: bytes) -> bool:
    """Returns whether this is an undamaged sealed JSON file."""
    try:
        unseal(data, "")
    except DamagedError:
        return False
    return True


class Kind(NamedTuple):
    """The values that a field may have. words: describes them. fits: tells whether one is valid."""

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

    return Kind(f"a list, in which every item is {kind.words}", fits)


def object_of(fields: Mapping[str, Kind], needed: Collection[str] = ()) -> Kind:
    """Returns the kind of an object whose `fields`, if present, fit; other fields are free."""

    def fits(value: Any) -> bool:
        if not isinstance(value, dict) or any(name not in value for name in needed):
            return False
        return all(kind.fits(value[name]) for name, kind in fields.items() if name in value)

    return Kind(f"an object with {', '.join(needed) or 'fields'}", fits)


COUNT = integer(0, MAX_COUNT)
NUMBER = Kind("a number", lambda value: type(value) in (int, float) and abs(value) <= MAX_NUMBER)
TEXT = Kind("text", lambda value: type(value) is str)
OBJECT = object_of({})
# The types of fields of dataclasses.
Count = Annotated[int, COUNT]
Number = Annotated[float, NUMBER]
Positive = Annotated[
    float, Kind("a number, 0 or larger", lambda value: NUMBER.fits(value) and value >= 0)
]
Text = Annotated[str, TEXT]
Flag = Annotated[bool, Kind("true or false", lambda value: type(value) is bool)]


def kinds_of(record: type) -> dict[str, Kind]:
    """Returns the kinds of the annotated fields of a dataclass."""
    hints = get_type_hints(record, include_extras=True)
    return {
        name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")
    }


def check_fields(content: Mapping[str, Any], fields: Mapping[str, Kind], where: str) -> None:
    """Raises DamagedError, naming file and field, for a value that does not fit.

    It does not look for missing fields.
    """
    for name, kind in fields.items():
        if name in content and not kind.fits(content[name]):
            value = ascii(content[name])
            raise DamagedError(f"{where}: {name} is {value:.80}, expected {kind.words}")
