"""Statistics of activations, which can be merged: per sample, shard, host, machine or run.

`Sums` are what is added up, for every dimension; `Statistics` are the few numbers of a hook that
the JSON files record.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from activation_extraction.store.shard import SampleRow

BLOCK_BYTES = 2**20  # of values in float64, which stay in a core's caches
BUCKETS = 32  # of positions
SINK, OTHER = 0, 1


@dataclass(eq=False)
class Sums:
    """Sums over tokens at one hook, in float64. Those of two sets of tokens add up.

    An attention sink is, here, the first token of a document (position 0): whether a token is one
    depends on nothing but the token.

    counts, norms: shape (BUCKETS,), the number of tokens and the sum of their Euclidean norms, by
    position: bucket 0 has position 0, bucket b the positions from 2^(b - 1) to 2^b - 1. sums,
    squares: shape (2, width), of the values and of their squares, for sinks and for other tokens.
    largest: shape (), the largest norm.
    """

    counts: np.ndarray
    norms: np.ndarray
    sums: np.ndarray
    squares: np.ndarray
    largest: np.ndarray

    @classmethod
    def zeros(cls, width: int) -> "Sums":
        """Those of no tokens."""
        each = np.zeros((2, width)), np.zeros((2, width))
        return cls(np.zeros(BUCKETS, np.int64), np.zeros(BUCKETS), *each, np.zeros(()))

    def add(self, activation: np.ndarray, positions: np.ndarray) -> None:
        """Adds the tokens of one document: (tokens, width) of any float dtype, and the position of
        each, in ascending order."""
        sinks = int(np.searchsorted(positions, 1))
        of_sinks = self._add_values(SINK, activation[:sinks])
        of_others = self._add_values(OTHER, activation[sinks:])
        norms = np.sqrt(np.concatenate([of_sinks, of_others]))
        bucket = np.frexp(positions.astype(np.float64))[1]
        self.counts += np.bincount(bucket, minlength=BUCKETS)
        self.norms += np.bincount(bucket, norms, minlength=BUCKETS)
        self.largest = np.maximum(self.largest, norms.max(initial=0.0))

    def _add_values(self, kind: int, activation: np.ndarray) -> np.ndarray:
        """Adds tokens that are all sinks or all others; returns their squared norms."""
        squares = np.empty(len(activation))
        tokens_at_once = max(1, BLOCK_BYTES // (8 * activation.shape[1]))
        for start in range(0, len(activation), tokens_at_once):
            block = slice(start, start + tokens_at_once)
            wide = activation[block].astype(np.float64)
            with np.errstate(invalid="ignore"):  # see `Statistics.finite`
                self.sums[kind] += np.add.reduce(wide, 0)
                np.multiply(wide, wide, out=wide)
                self.squares[kind] += np.add.reduce(wide, 0)
                np.add.reduce(wide, 1, out=squares[block])
        return squares

    def merge(self, other: "Sums") -> None:
        """Adds other sums."""
        for name in ("counts", "norms", "sums", "squares"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = np.maximum(self.largest, other.largest)

    def close_to(self, other: "Sums") -> bool:
        """Whether both are equal, but for rounding."""
        return bool((self.counts == other.counts).all()) and all(
            np.allclose(one, two, rtol=1e-6, atol=1e-6 * np.abs(two).max())
            for one, two in (
                (self.norms, other.norms),
                *zip(self.sums, other.sums, strict=True),
                *zip(self.squares, other.squares, strict=True),
                (self.largest, other.largest),
            )
        )

    @property
    def statistics(self) -> "Statistics":
        """Over all tokens and dimensions."""
        tokens = int(self.counts.sum())
        if not tokens:
            return Statistics()
        values = tokens * self.sums.shape[1]
        with np.errstate(invalid="ignore"):  # see `Statistics.finite`
            mean = float(self.sums.sum()) / values
        return Statistics(
            tokens=tokens,
            values=values,
            mean=mean,
            variance=max(0.0, float(self.squares.sum()) / values - mean * mean),
            mean_norm=float(self.norms.sum()) / tokens,
            max_norm=float(self.largest),
        )


def sums_of(activations: Iterable[np.ndarray], rows: Iterable[SampleRow]) -> Sums:
    """Those of the samples of a shard at one hook."""
    total: Sums | None = None
    for activation, row in zip(activations, rows, strict=True):
        total = total or Sums.zeros(activation.shape[1])
        total.add(activation, row.positions)
    assert total is not None
    return total


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
        sums = Sums.zeros(activation.shape[1])
        sums.add(activation, np.arange(1, len(activation) + 1))  # the result is that of any others
        return sums.statistics

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
        return {each.name: getattr(self, each.name) for each in fields(Statistics)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Statistics":
        """The inverse of `to_json`; ignores other keys."""
        return cls(**{field.name: content[field.name] for field in fields(cls)})
