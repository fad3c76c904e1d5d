"""Statistics of activations, which can be merged: per sample, shard, host, machine or run.

`Sums` are what is added up, for every dimension; `Statistics` are the few numbers of a hook that
the JSON files record.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

BLOCK_BYTES = 4 * 2**20  # of values in float64, which stay in a core's caches
BUCKETS = 32  # of positions
SINK, OTHER = 0, 1


class Tokens:
    """What statistics need of tokens beside their activations, which is the same at every hook.

    count: how many there are. sinks: the numbers of the attention sinks among them. buckets,
    counts: the bucket of each token (see `Sums`), and how many are in each bucket.
    """

    def __init__(self, positions: Sequence[np.ndarray]) -> None:
        """positions: of the tokens in their documents, in any number of arrays."""
        every = np.concatenate(positions)
        self.count = len(every)
        self.sinks = np.flatnonzero(every == 0).tolist()
        self.buckets = np.frexp(every.astype(np.float64))[1]
        self.counts = np.bincount(self.buckets, minlength=BUCKETS)


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

    def add(self, activations: Sequence[np.ndarray], tokens: Tokens) -> None:
        """Adds tokens. activations: their arrays (tokens, width) of any float dtype, in order.

        The sums are those of the tokens: they do not depend on which arrays the tokens are in.
        """
        squares, sinks = np.empty(tokens.count), tokens.sinks
        rows = max(1, BLOCK_BYTES // (8 * self.sums.shape[1]))
        wide = np.empty((min(rows, tokens.count), self.sums.shape[1]))
        done = 0
        with np.errstate(invalid="ignore"):  # see `Statistics.finite`
            for block in _blocks(activations, wide):
                stop = done + len(block)
                here = sinks[bisect_left(sinks, done) : bisect_left(sinks, stop)]
                self._add_block(block, [at - done for at in here], squares[done:stop])
                done = stop
        norms = np.sqrt(squares)
        self.counts += tokens.counts
        self.norms += np.bincount(tokens.buckets, norms, minlength=BUCKETS)
        self.largest = np.maximum(self.largest, norms.max(initial=0.0))

    def _add_block(self, wide: np.ndarray, sinks: list[int], squares: np.ndarray) -> None:
        """Adds tokens (tokens, width) in float64, which it overwrites. sinks: which of them are
        attention sinks. Their squared norms go to `squares`."""
        for total in (self.sums, self.squares):
            others = np.add.reduce(wide, 0)
            if sinks:
                of_sinks = np.add.reduce(wide[sinks], 0)
                total[SINK] += of_sinks
                others -= of_sinks
            total[OTHER] += others
            if total is self.sums:
                np.multiply(wide, wide, out=wide)
        np.add.reduce(wide, 1, out=squares)

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


def _blocks(activations: Sequence[np.ndarray], wide: np.ndarray) -> Iterator[np.ndarray]:
    """The tokens of some arrays, in order, as float64 in the memory of `wide`: as many at a time as
    it has room for, and at last the rest."""
    filled = 0
    for activation in activations:
        start = 0
        while start < len(activation):
            count = min(len(activation) - start, len(wide) - filled)
            np.copyto(wide[filled : filled + count], activation[start : start + count])
            start, filled = start + count, filled + count
            if filled == len(wide):
                yield wide
                filled = 0
    if filled:
        yield wide[:filled]


def sums_of(activations: Sequence[np.ndarray], tokens: Tokens) -> Sums:
    """The sums of some tokens at one hook. activations: see `Sums.add`; at least one array."""
    total = Sums.zeros(activations[0].shape[1])
    total.add(activations, tokens)
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
        sums.add(
            [activation], Tokens([np.ones(len(activation), np.int32)])
        )  # any positions will do
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
