"""Encodes the activations of a shard that is stored as float8, and measures what that changes.

common/encodings.py has the formula. The errors of some tokens are measured, and the shard's JSON
records the mean and the largest error of each hook.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np

from activation_extraction.common.encodings import decode, encode, relative_errors
from activation_extraction.store.shard import Key, Shard

MEASURED = 1024  # at most, of the sinks of a shard, and of its other tokens


@dataclass(frozen=True)
class TokenErrors:
    """How many tokens were measured, and the mean and the largest of their relative errors.

    The error of a token x is the Euclidean norm of x - decoded x, divided by that of x.
    """

    tokens: int = 0
    mean: float = 0.0
    worst: float = 0.0

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
        names = [each.name for each in fields(TokenErrors)]
        kinds = (content["sinks"], content["others"])
        return cls(*(TokenErrors(*(each[name] for name in names)) for each in kinds))


def encode_shard(
    shard: Shard, keys: Collection[Key], in_order: Callable[..., Iterable[Any]]
) -> tuple[Shard, dict[Key, EncodingError]]:
    """Returns the shard with these hooks encoded, and the errors by key.

    in_order: `map`, or a function that does the same in threads.
    """
    if not keys:
        return shard, {}
    slices, scales, found = dict(shard.slices), dict(shard.scales), {}
    offsets, positions = shard.offsets, np.concatenate(shard.positions)
    measured = _every_nth(positions == 0) | _every_nth(positions != 0)
    sinks = positions[measured] == 0

    def encode_group(item: tuple[Key, slice]) -> tuple[list[np.ndarray], ...]:
        key, group = item
        x = np.concatenate(shard.slices[key][group])
        values, scales = encode(x)
        first, *starts, stop = offsets[group.start : group.stop + 1]
        some = measured[first:stop]
        errors = relative_errors(x[some], decode(values[some], scales[some]))
        samples = np.array(starts, np.int64) - first
        return np.split(values, samples), np.split(scales, samples), [errors]

    for key in keys:
        groups = in_order(encode_group, [(key, group) for group in shard.groups(key)])
        parts = [list(chain.from_iterable(each)) for each in zip(*groups, strict=True)]
        slices[key], scales[key], errors = parts[0], parts[1], np.concatenate(parts[2])
        found[key] = EncodingError(TokenErrors.of(errors[sinks]), TokenErrors.of(errors[~sinks]))
    return replace(shard, slices=slices, scales=scales), found


def _every_nth(mask: np.ndarray) -> np.ndarray:
    """Returns a mask of every n-th element that is True, so that at most MEASURED are left."""
    indices = np.flatnonzero(mask)
    chosen = np.zeros(len(mask), bool)
    chosen[indices[:: max(-(-len(indices) // MEASURED), 1)]] = True
    return chosen
