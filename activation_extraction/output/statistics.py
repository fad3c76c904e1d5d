"""Statistics of activations, which can be merged: per sample, shard, host, machine or run."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

BLOCK_BYTES = 2**20  # of values in float64, which stay in a core's caches


@dataclass(frozen=True)
class Statistics:
    """Statistics of activations (tokens, width): mean and (population) variance over all values,
    mean and largest Euclidean norm over tokens."""

    tokens: int = 0
    values: int = 0
    mean: float = 0.0
    variance: float = 0.0
    mean_norm: float = 0.0
    max_norm: float = 0.0

    @classmethod
    def of(cls, activation: np.ndarray) -> "Statistics":
        """Statistics of a (tokens, width) array of any float dtype, computed in float64."""
        squares, total = np.empty(len(activation)), 0.0
        tokens_at_once = max(1, BLOCK_BYTES // (8 * activation.shape[1]))
        for start in range(0, len(activation), tokens_at_once):
            block = slice(start, start + tokens_at_once)
            wide = activation[block].astype(np.float64)
            np.einsum("td,td->t", wide, wide, out=squares[block])
            with np.errstate(invalid="ignore"):  # see `finite`
                total += float(wide.sum())
        mean = total / activation.size
        norms = np.sqrt(squares)
        return cls(
            tokens=len(activation),
            values=activation.size,
            mean=mean,
            variance=max(0.0, float(squares.sum()) / activation.size - mean * mean),
            mean_norm=float(norms.mean()),
            max_norm=float(norms.max()),
        )

    @property
    def finite(self) -> bool:
        """False if any value was NaN or infinite."""
        return math.isfinite(self.max_norm)

    def merge(self, other: "Statistics") -> "Statistics":
        """Statistics of both together (Chan, Golub and LeVeque 1979, pairwise update)."""
        if not self.values or not other.values:
            return self if self.values else other
        share = other.values / (self.values + other.values)
        delta = other.mean - self.mean
        return Statistics(
            tokens=self.tokens + other.tokens,
            values=self.values + other.values,
            mean=self.mean + delta * share,
            variance=self.variance * (1 - share)
            + other.variance * share
            + delta * delta * share * (1 - share),
            mean_norm=(self.mean_norm * self.tokens + other.mean_norm * other.tokens)
            / (self.tokens + other.tokens),
            max_norm=max(self.max_norm, other.max_norm),
        )

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Statistics":
        """The inverse of `to_json`; ignores other keys."""
        return cls(**{field.name: content[field.name] for field in fields(cls)})


def merge_all(parts: Iterable[Statistics]) -> Statistics:
    """Statistics of all parts together, merged from left to right."""
    total = Statistics()
    for part in parts:
        total = total.merge(part)
    return total
