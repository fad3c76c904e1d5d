"""Sealed JSON: a JSON file that carries a checksum of its own content.

If the checksum does not match, the file is damaged and its content is never used.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from activation_extraction.common.errors import RunError

REPAIRS = "--repair repairs it"


class DamagedError(RunError):
    """A JSON file is not what was written."""


def digest_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of JSON content; the order of its keys does not matter."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def seal(content: Mapping[str, Any]) -> bytes:
    """Returns the bytes of the JSON file, checksum included. Raises ValueError for NaN."""
    sealed = {**content, "checksum": digest_of(content)}
    return (json.dumps(sealed, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """Returns the content of a sealed JSON file; `where` names it in messages.

    Raises DamagedError if even one byte differs from what was written.
    """
    try:
        content = json.loads(data)
        checksum = content.pop("checksum")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"{where}: is damaged, or was not written by this program"
        raise DamagedError(what, remedy=REPAIRS) from error
    try:
        intact = checksum == digest_of(content) and data == seal(content)
    except ValueError:  # NaN
        intact = False
    if not intact:
        what = f"{where}: is damaged: its checksum does not match its content"
        raise DamagedError(what, remedy=REPAIRS)
    return content


def is_sealed(data: bytes) -> bool:
    """Whether this is a whole sealed JSON file."""
    try:
        unseal(data, "")
    except DamagedError:
        return False
    return True
