"""Statistics of activations, which can be merged: per sample, shard, host, machine or run.

`Sums` are totals for every dimension; `Statistics` are the few numbers per hook that the JSON files
record. `shard_0001.npz`, beside the shard, holds the sums of each hook, which are too long for its
JSON, as arrays `HOOK/FIELD` that `numpy.load` reads. Its bytes depend on the sums and on the id of
the process that wrote the file, the text in the array `writer`.
"""

import io
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from activation_extraction.common.codes import Codes

SUMMED_BYTES = 4 * 2**20  # size of a block of float64 values that fits into a core's caches
SINK, OTHER = 0, 1  # kinds of tokens


@dataclass(eq=False)
class Sums:
    """Sums over tokens at one hook, which can be merged.

    There are separate sums for attention sinks (index SINK) and for other tokens (index OTHER). The
    first token of a sample (position 0) counts as a sink, and no other token does, so that the
    kind of a token does not depend on other tokens.

    Attributes:
        counts: Number of tokens of each kind, int64 (2,).
        norms: Sum of their Euclidean norms, float64 (2,).
        sums: Sum of their values, float64 (2, width).
        squares: Sum of the squares of their values, float64 (2, width).
        largest: Largest norm of a token of any kind, float64 ().
    """

    counts: np.ndarray
    norms: np.ndarray
    sums: np.ndarray
    squares: np.ndarray
    largest: np.ndarray

    @classmethod
    def zeros(cls, width: int) -> "Sums":
        """Returns the sums over no tokens."""
        sums, squares = np.zeros((2, width)), np.zeros((2, width))
        return cls(np.zeros(2, np.int64), np.zeros(2), sums, squares, np.zeros(()))

    def merge(self, other: "Sums") -> "Sums":
        """Returns the sums over the tokens of both."""
        return Sums(
            self.counts + other.counts,
            self.norms + other.norms,
            self.sums + other.sums,
            self.squares + other.squares,
            np.maximum(self.largest, other.largest),
        )

    @property
    def statistics(self) -> "Statistics":
        """The statistics over all tokens and dimensions."""
        tokens = int(self.counts.sum())
        if not tokens:
            return Statistics()
        values = tokens * self.sums.shape[1]
        with np.errstate(invalid="ignore"):  # see `Statistics.finite`
            mean = float(self.sums.sum()) / values
        return Statistics(
            tokens=tokens,
            values=values,
            overall_mean=mean,
            overall_variance=max(0.0, float(self.squares.sum()) / values - mean * mean),
            mean_norm=float(self.norms.sum()) / tokens,
            max_norm=float(self.largest),
        )


def sums_of(decode: Callable[[slice], np.ndarray], width: int, positions: np.ndarray) -> Sums:
    """Returns the sums over tokens at one hook. They do not depend on how tokens are grouped.

    Args:
        decode: A function that returns the values of some of the tokens, (tokens, width), of any
            floating-point dtype.
        width: The number of values of a token.
        positions: The positions of all tokens in their samples, int32 (tokens,).
    """
    tokens = len(positions)
    total, squares = Sums.zeros(width), np.empty(tokens)
    step = max(1, SUMMED_BYTES // (8 * width))
    buffer = np.empty((min(step, tokens), width))
    with np.errstate(invalid="ignore"):  # see `Statistics.finite`
        for start in range(0, tokens, step):
            rows = slice(start, start + step)
            values = decode(rows)
            block = buffer[: len(values)]
            np.copyto(block, values)
            sinks = np.flatnonzero(positions[rows] == 0)
            for sums in (total.sums, total.squares):
                of_sinks = np.add.reduce(block[sinks], 0)
                sums[SINK] += of_sinks
                sums[OTHER] += np.add.reduce(block, 0) - of_sinks
                if sums is total.sums:
                    np.multiply(block, block, out=block)
            np.add.reduce(block, 1, out=squares[rows])
    norms, kinds = np.sqrt(squares), np.where(positions == 0, SINK, OTHER)
    total.counts += np.bincount(kinds, minlength=2)
    total.norms += np.bincount(kinds, norms, minlength=2)
    total.largest = np.maximum(total.largest, norms.max(initial=0.0))
    return total


@dataclass(frozen=True)
class EncodingError:
    """Relative errors of encoded tokens, which can be merged.

    The error of a token x is the Euclidean norm of x - decoded x, divided by that of x.

    Attributes:
        tokens: Number of tokens that were measured.
        mean: Mean of their errors.
        worst: Largest of their errors.
    """

    tokens: int = 0
    mean: float = 0.0
    worst: float = 0.0

    @classmethod
    def of(cls, errors: np.ndarray) -> "EncodingError":
        """Summarises the errors of some tokens, float64 (tokens,)."""
        if not len(errors):
            return cls()
        return cls(len(errors), float(np.mean(errors)), float(np.max(errors)))

    def merge(self, other: "EncodingError") -> "EncodingError":
        """Returns the errors of both together."""
        tokens = self.tokens + other.tokens
        total = self.mean * self.tokens + other.mean * other.tokens
        return EncodingError(tokens, total / max(tokens, 1), max(self.worst, other.worst))


# The errors at one hook by kind of token: "sinks" are those at position 0, which are often
# attention sinks; "others" are all others.
Errors = dict[str, EncodingError]


@dataclass(frozen=True)
class CodeSums:
    """Sums over the codes of some tokens, which can be merged.

    Attributes:
        tokens: Number of tokens.
        features: Number of features that are stored.
        cut: Number of features that were active too, but are not stored (--encode_most).
        cut_tokens: Number of tokens with such features.
        error: Sum of the squared norms of what the stored features do not reconstruct.
        square: Sum of the squared norms of what is to be reconstructed.
    """

    tokens: int = 0
    features: int = 0
    cut: int = 0
    cut_tokens: int = 0
    error: float = 0.0
    square: float = 0.0

    @classmethod
    def of(cls, codes: Codes, chosen: np.ndarray) -> "CodeSums":
        """Returns the sums over the tokens that a mask chooses, bool (tokens,)."""
        kept = np.diff(codes.indptr)[chosen]
        cut = np.zeros(1, np.int64) if codes.active is None else codes.active[chosen] - kept
        return cls(
            tokens=len(kept),
            features=int(kept.sum()),
            cut=int(cut.sum()),
            cut_tokens=int((cut > 0).sum()),
            error=float(codes.error[chosen].astype(np.float64).sum()),
            square=float(np.square(codes.norm)[chosen].astype(np.float64).sum()),
        )

    def merge(self, other: "CodeSums") -> "CodeSums":
        """Returns the sums over the tokens of both."""
        return CodeSums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def explained(self) -> float:
        """The share of the squared norms that the stored features explain, 1 - error / square.

        Zeros in place of the features' reconstruction give 0, and a reconstruction that is worse
        than that gives less. NaN if all norms are 0.
        """
        return 1 - self.error / self.square if self.square else float("nan")


@dataclass(frozen=True)
class SumsOfCodes:
    """Sums over codes, which can be merged.

    Attributes:
        sinks: Sums over the first tokens of samples (position 0).
        others: Sums over all other tokens.
    """

    sinks: CodeSums
    others: CodeSums

    def merge(self, other: "SumsOfCodes") -> "SumsOfCodes":
        """Returns the sums over the tokens of both."""
        return SumsOfCodes(self.sinks.merge(other.sinks), self.others.merge(other.others))

    @property
    def statistics(self) -> "Statistics":
        """The statistics, which have nothing but these sums."""
        return Statistics(codes={"sinks": self.sinks, "others": self.others})


@dataclass(frozen=True)
class Statistics:
    """Statistics of the values at a hook, which can be merged.

    Attributes:
        tokens: Number of tokens. 0 for integers and codes.
        values: Number of values of these tokens.
        overall_mean: Mean of all values; `mean` in JSON files.
        overall_variance: Variance of all values, which are the population; `variance` in JSON
            files.
        mean_norm: Mean Euclidean norm of the tokens.
        max_norm: Largest Euclidean norm of a token.
        error: Errors of encoding, see `Errors`; empty for values that are not encoded.
        codes: Sums over the tokens of codes, by the kinds of tokens that Errors has; empty for
            other values.
    """

    tokens: int = 0
    values: int = 0
    overall_mean: float = 0.0
    overall_variance: float = 0.0
    mean_norm: float = 0.0
    max_norm: float = 0.0
    error: Errors = field(default_factory=dict)
    codes: dict[str, CodeSums] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        """Whether no value was NaN or infinite."""
        of_codes = (sums.error + sums.square for sums in self.codes.values())
        return all(map(math.isfinite, (self.max_norm, *of_codes)))

    def merge(self, other: "Statistics") -> "Statistics":
        """Merges two statistics by the pairwise update of Chan, Golub and LeVeque (1979)."""
        if not (self.values or self.codes) or not (other.values or other.codes):
            return self if self.values or self.codes else other
        share = other.values / (self.values + other.values or 1)
        delta = other.overall_mean - self.overall_mean

        def weighted(a: float, b: float) -> float:
            return a * (1 - share) + b * share

        return Statistics(
            tokens=self.tokens + other.tokens,
            values=self.values + other.values,
            overall_mean=self.overall_mean + delta * share,
            overall_variance=weighted(self.overall_variance, other.overall_variance)
            + delta * delta * share * (1 - share),
            mean_norm=weighted(self.mean_norm, other.mean_norm),
            max_norm=max(self.max_norm, other.max_norm),
            error={kind: error.merge(other.error[kind]) for kind, error in self.error.items()},
            codes={kind: sums.merge(other.codes[kind]) for kind, sums in self.codes.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the statistics as the JSON files contain them.

        `error` and `codes` are left out if they are empty.
        """
        content = {key: getattr(self, name) for key, name in STATISTICS.items()}
        for name in ("error", "codes"):
            if by_kind := getattr(self, name):
                content[name] = {kind: asdict(sums) for kind, sums in by_kind.items()}
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Statistics":
        """Returns the statistics in a JSON.

        Args:
            content: A result of `to_json`, perhaps with other items, which are ignored.
        """
        error = {kind: EncodingError(**sums) for kind, sums in content.get("error", {}).items()}
        codes = {kind: CodeSums(**sums) for kind, sums in content.get("codes", {}).items()}
        numbers = {name: content[key] for key, name in STATISTICS.items()}
        return cls(**numbers, error=error, codes=codes)


STATISTICS = {  # key in the JSON files -> name of the field of Statistics
    attribute.name.removeprefix("overall_"): attribute.name
    for attribute in fields(Statistics)
    if attribute.name not in ("error", "codes")
}


@dataclass(frozen=True, eq=False)
class DimensionStatistics:
    """Statistics of every dimension of some tokens.

    Attributes:
        tokens: Number of tokens.
        mean: Mean of every dimension, float64 (width,); NaN without tokens.
        variance: Population variance of every dimension, float64 (width,); NaN without tokens.
        mean_norm: Mean Euclidean norm of the tokens; NaN without tokens.
    """

    tokens: int
    mean: np.ndarray
    variance: np.ndarray
    mean_norm: float

    @classmethod
    def of(cls, sums: Sums, kinds: slice) -> "DimensionStatistics":
        """Returns the statistics of some kinds of tokens.

        Args:
            sums: Sums over tokens of both kinds.
            kinds: Slice of the kinds SINK and OTHER.
        """
        tokens = int(sums.counts[kinds].sum())
        totals = sums.sums[kinds].sum(0), sums.squares[kinds].sum(0), sums.norms[kinds].sum()
        with np.errstate(invalid="ignore"):
            mean, squares, norm = (total / tokens for total in totals)
        return cls(tokens, mean, np.maximum(squares - mean * mean, 0), float(norm))


@dataclass(frozen=True, kw_only=True)
class HookStatistics(Statistics):
    """Statistics of a hook over all stored tokens, including those of every dimension.

    `mean`, `variance`, `all_tokens` and `without_first_token` are read from the statistics files
    when they are first used, which raises OSError if a file is damaged. The first token of a
    sample is often an attention sink, whose norm may be 100 times that of other tokens.

    Attributes:
        load: Function that reads the sums over all shards.
    """

    load: Callable[[], Sums] = field(repr=False, compare=False)

    @property
    def mean(self) -> np.ndarray:
        """The mean of every dimension over all tokens, float64 (width,)."""
        return self.all_tokens.mean

    @property
    def variance(self) -> np.ndarray:
        """The population variance of every dimension over all tokens, float64 (width,)."""
        return self.all_tokens.variance

    @cached_property
    def all_tokens(self) -> DimensionStatistics:
        """The statistics of all tokens."""
        return DimensionStatistics.of(self.load(), slice(None))

    @cached_property
    def without_first_token(self) -> DimensionStatistics:
        """The statistics of all tokens except the first token of each sample."""
        return DimensionStatistics.of(self.load(), slice(OTHER, None))


FIELDS = [attribute.name for attribute in fields(Sums)]
# NumPy parses the headers of arrays by `ast`, which fails in two threads at once
# (python/cpython#106905).
PARSING = threading.Lock()


def pack_sums(sums: Mapping[str, Sums], writer: str = "") -> bytes:
    """Returns the content of the statistics file.

    Args:
        sums: The sums by hook.
        writer: The id of the process that writes the file; "" to leave it out.
    """
    arrays = {f"{hook}/{name}": getattr(sums[hook], name) for hook in sums for name in FIELDS}
    if writer:
        arrays["writer"] = np.array(writer)
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpack_sums(data: bytes, hooks: Iterable[str]) -> dict[str, Sums]:
    """Returns the sums in a statistics file.

    Args:
        data: Content of the file.
        hooks: Names of the hooks whose sums are read.
    """
    with PARSING, np.load(io.BytesIO(data)) as arrays:
        return {hook: Sums(*(arrays[f"{hook}/{name}"] for name in FIELDS)) for hook in hooks}
