"""Packed rows: the form in which encoded activations come to the store, and the errors in them.

common/encodings.py describes a row. The store writes its values and scales as separate arrays. Its
third part, the relative error of the token, is not stored; the mean and the largest error of each
hook are.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from activation_extraction.common.encodings import Encoding, encode, unpack
from activation_extraction.store.sealed_json import Count, Positive, kinds_of, object_of
from activation_extraction.store.shard import Key, Shard


@dataclass(frozen=True)
class TokenErrors:
    """How many tokens were encoded, and the mean and the largest of their relative errors.

    The error of a token x is the Euclidean norm of x - decoded x, divided by that of x.
    """

    tokens: Count = 0
    mean: Positive = 0.0
    worst: Positive = 0.0

    @classmethod
    def of(cls, errors: np.ndarray) -> "TokenErrors":
        """Summarises the errors of some tokens. errors: (tokens,)."""
        if not len(errors):
            return cls()
        return cls(len(errors), float(errors.mean(dtype=np.float64)), float(errors.max()))

    def merge(self, other: "TokenErrors") -> "TokenErrors":
        """Returns the summary of both together."""
        tokens = self.tokens + other.tokens
        total = self.mean * self.tokens + other.mean * other.tokens
        return TokenErrors(tokens, total / max(tokens, 1), max(self.worst, other.worst))


@dataclass(frozen=True)
class EncodingError:
    """The errors at one hook: of tokens at position 0, which are often attention sinks, and of all
    others."""

    sinks: TokenErrors = TokenErrors()
    others: TokenErrors = TokenErrors()

    def merge(self, other: "EncodingError") -> "EncodingError":
        """Returns the errors of both together."""
        return EncodingError(self.sinks.merge(other.sinks), self.others.merge(other.others))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "EncodingError":
        """Reads what `to_json` returned."""
        kinds = (content["sinks"], content["others"])
        return cls(*(TokenErrors(**{name: each[name] for name in TOKEN_ERRORS}) for each in kinds))


TOKEN_ERRORS = kinds_of(TokenErrors)
_ERRORS = object_of(TOKEN_ERRORS, tuple(TOKEN_ERRORS))
ENCODING_ERROR = object_of({"sinks": _ERRORS, "others": _ERRORS}, ("sinks", "others"))


def as_rows(activations: np.ndarray, encoding: Encoding | None) -> np.ndarray:
    """Returns activations (..., width) as the writer takes them.

    If there is an encoding, the writer takes packed rows (..., row): bytes (uint8) are such rows
    already, and other numbers are encoded here. Raises ValueError for bytes that are no such rows.
    """
    if encoding is None:
        return activations
    if activations.dtype != np.uint8:
        return encode(activations, encoding)
    encoding.width_of(activations.shape[-1])
    return activations


def unpacked(
    shard: Shard, encodings: Mapping[Key, Encoding]
) -> tuple[Shard, dict[Key, EncodingError]]:
    """Splits the packed rows of a shard; returns the shard with values and scales, and the errors.

    encodings: by key, of the hooks that are encoded.
    """
    slices, scales, found = dict(shard.slices), dict(shard.scales), {}
    if encodings:
        sinks = np.concatenate(shard.positions) == 0
    for key, encoding in encodings.items():
        parts = [unpack(rows, encoding) for rows in shard.slices[key]]
        slices[key], scales[key] = [part[0] for part in parts], [part[1] for part in parts]
        errors = np.concatenate([part[2] for part in parts])
        found[key] = EncodingError(TokenErrors.of(errors[sinks]), TokenErrors.of(errors[~sinks]))
    return replace(shard, slices=slices, scales=scales), found
