"""Encodes the activations of a shard that is stored as float8, and measures what that changes.

common/encodings.py has the formula. The errors of some tokens are measured, and the shard's JSON
records the mean and the largest error of each hook.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from activation_extraction.common.encodings import decode, encode, relative_errors
from activation_extraction.store.sealed_json import Count, Positive, kinds_of, object_of
from activation_extraction.store.shard import Key, Shard

MEASURED = 4096  # sinks of a shard, and as many other tokens, whose errors are measured


@dataclass(frozen=True)
class TokenErrors:
    """How many tokens were measured, and the mean and the largest of their relative errors.

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


InOrder = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


def encode_shard(
    shard: Shard, keys: Collection[Key], in_order: InOrder
) -> tuple[Shard, dict[Key, EncodingError]]:
    """Returns the shard with these hooks encoded, and the errors by key.

    in_order: maps a function over items, and may do so in threads.
    """
    slices, scales, found = dict(shard.slices), dict(shard.scales), {}
    if keys:
        measured, sinks = _measured(shard)
    for key in keys:
        pairs = list(in_order(encode, shard.slices[key]))
        slices[key], scales[key] = [list(each) for each in zip(*pairs, strict=True)]
        errors = np.concatenate(
            [
                relative_errors(x[some], decode(values[some], scale[some]))
                for x, (values, scale), some in zip(shard.slices[key], pairs, measured, strict=True)
            ]
        )
        found[key] = EncodingError(TokenErrors.of(errors[sinks]), TokenErrors.of(errors[~sinks]))
    return replace(shard, slices=slices, scales=scales), found


def _measured(shard: Shard) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns which tokens of each sample are measured, bool (tokens,), and which of these are
    sinks. They are MEASURED sinks and MEASURED others, evenly spaced, or all if there are fewer."""
    are_sinks = np.concatenate(shard.positions) == 0
    chosen = np.zeros(len(are_sinks), bool)
    for kind in (are_sinks, ~are_sinks):
        indices = np.flatnonzero(kind)
        chosen[indices[:: max(-(-len(indices) // MEASURED), 1)]] = True
    return np.split(chosen, shard.offsets[1:-1]), are_sinks[chosen]
