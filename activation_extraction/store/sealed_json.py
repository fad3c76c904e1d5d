"""Sealed JSON files, and what reading one raises.

A sealed JSON file carries a checksum of its own content. If it does not match, the file is damaged
and its content is never used. One constructor reads each kind of file, such as `Commit.from_json`,
and `reading` names the file if a field is missing or cannot be used.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from activation_extraction.common.errors import RunError

REPAIRS = "--repair repairs it"


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


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Raises DamagedError, which names the file, if a constructor finds that a field of a JSON is
    missing or has a value that it cannot use."""
    try:
        yield
    except KeyError as error:
        raise DamagedError(f"{where}: lacks {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{where}: cannot be read: {error}") from error
