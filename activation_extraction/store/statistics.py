"""Statistics of the values at hooks: their declarations, their computation, and the file of sums.

`Sums` contain sums for every dimension of a hook. `Statistics` are a few numbers per hook, which
the JSON files record. Both can be merged, so that the statistics of samples add up to those of
shards, hosts and runs. statistics_lines.py makes lines of text from `Statistics`.

The sums of all dimensions are too long for JSON. So each shard has a file of sums, such as
`shard_0001.npz`, which `numpy.savez` has written. Its arrays are named `HOOK/FIELD`, where HOOK is
the full name of a hook, and FIELD is a field of `Sums`. One more array, `writer`, contains the id
of the process that wrote the file.
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

SUMMED_BYTES = 4 * 2**20  # bytes of a block of float64 values, which fits into a core's caches
# Kinds of tokens: attention sinks and other tokens. These are the indices of axes of length 2.
SINK, OTHER = 0, 1


@dataclass(eq=False)
class Sums:
    """Sums over some tokens at one hook.

    Two objects with sums over disjoint sets of tokens can be merged into one. There are separate
    sums for attention sinks (at index 0) and other tokens (at index 1). The first token of a sample
    (position 0) counts as a sink, and no other token does, so that the kind of a token does not
    depend on other tokens. `width` is the number of values of a token.

    Attributes:
        counts: Number of tokens of each kind, int64 (2,).
        norms: Sum of the Euclidean norms of the tokens of each kind, float64 (2,).
        sums: Sum of the values in each dimension, by kind of token, float64 (2, width).
        squares: Sum of the squared values in each dimension, by kind of token, float64 (2, width).
        largest: Largest Euclidean norm of a token of either kind, float64 ().
    """

    counts: np.ndarray
    norms: np.ndarray
    sums: np.ndarray
    squares: np.ndarray
    largest: np.ndarray

    @classmethod
    def zeros(cls, width: int) -> "Sums":
        """Returns the sums over an empty set of tokens.

        Args:
            width: Number of values of a token.
        """
        return cls(
            counts=np.zeros(2, np.int64),
            norms=np.zeros(2),
            sums=np.zeros((2, width)),
            squares=np.zeros((2, width)),
            largest=np.zeros(()),
        )

    def merge(self, other: "Sums") -> "Sums":
        """Returns the sums over the tokens of `self` and of `other` together."""
        return Sums(
            self.counts + other.counts,
            self.norms + other.norms,
            self.sums + other.sums,
            self.squares + other.squares,
            np.maximum(self.largest, other.largest),
        )

    @property
    def statistics(self) -> "Statistics":
        """The statistics of the values over all tokens and dimensions."""
        token_count = int(self.counts.sum())
        if not token_count:
            return Statistics()
        value_count = token_count * self.sums.shape[1]
        # NaN and infinity raise no warning here, because `Statistics.finite` reports them.
        with np.errstate(invalid="ignore"):
            overall_mean = float(self.sums.sum()) / value_count
        return Statistics(
            tokens=token_count,
            values=value_count,
            overall_mean=overall_mean,
            overall_variance=max(
                0.0, float(self.squares.sum()) / value_count - overall_mean * overall_mean
            ),
            mean_norm=float(self.norms.sum()) / token_count,
            max_norm=float(self.largest),
        )


def sums_of(decode: Callable[[slice], np.ndarray], width: int, positions: np.ndarray) -> Sums:
    """Returns the sums from which the statistics of some tokens at one hook are computed.

    The class `Sums` lists them. They are computed in float64, from one block of tokens at a time.

    Args:
        decode: Function that takes a slice of the tokens, and returns their values,
            (tokens in the slice, width), of any real dtype.
        width: Number of values of a token.
        positions: Position of each token in its sample, int32 (tokens,). There are separate sums
            for the tokens at position 0, which count as attention sinks.
    """
    token_count = len(positions)
    sums_over_tokens = Sums.zeros(width)
    squared_norms = np.empty(token_count)
    tokens_per_block = max(1, SUMMED_BYTES // (8 * width))
    block_buffer = np.empty((min(tokens_per_block, token_count), width))
    # NaN and infinity raise no warning here, because `Statistics.finite` reports them.
    with np.errstate(invalid="ignore"):
        for block_start in range(0, token_count, tokens_per_block):
            block_slice = slice(block_start, block_start + tokens_per_block)
            block_values = decode(block_slice)
            float64_block = block_buffer[: len(block_values)]
            np.copyto(float64_block, block_values)
            sink_indices = np.flatnonzero(positions[block_slice] == 0)
            _add_rows(sums_over_tokens.sums, float64_block, sink_indices)
            np.multiply(float64_block, float64_block, out=float64_block)
            _add_rows(sums_over_tokens.squares, float64_block, sink_indices)
            np.add.reduce(float64_block, 1, out=squared_norms[block_slice])
    token_norms = np.sqrt(squared_norms)
    token_kinds = np.where(positions == 0, SINK, OTHER)
    sums_over_tokens.counts += np.bincount(token_kinds, minlength=2)
    sums_over_tokens.norms += np.bincount(token_kinds, token_norms, minlength=2)
    largest_norm = token_norms.max(initial=0.0)
    sums_over_tokens.largest = np.maximum(sums_over_tokens.largest, largest_norm)
    return sums_over_tokens


def _add_rows(sums: np.ndarray, block: np.ndarray, sink_indices: np.ndarray) -> None:
    """Adds the rows of a block to two sums, one over attention sinks and one over other tokens.

    Args:
        sums: The two sums, float64 (2, width), which are changed in place. `sums[SINK]` is the sum
            over attention sinks, and `sums[OTHER]` is the sum over other tokens.
        block: The rows, one for each token, float64 (tokens, width).
        sink_indices: Indices of the rows whose tokens are attention sinks.
    """
    sink_sum = np.add.reduce(block[sink_indices], 0)
    sums[SINK] += sink_sum
    sums[OTHER] += np.add.reduce(block, 0) - sink_sum


@dataclass(frozen=True)
class EncodingError:
    """Number, mean and maximum of the relative errors of tokens that are encoded as float8.

    Two objects for disjoint sets of tokens can be merged into one. The relative error of a token x
    is the Euclidean norm of x - decoded x, divided by the Euclidean norm of x.

    Attributes:
        tokens: Number of tokens whose error was measured.
        mean: Mean relative error of these tokens.
        worst: Largest relative error of these tokens.
    """

    tokens: int = 0
    mean: float = 0.0
    worst: float = 0.0

    @classmethod
    def of(cls, errors: np.ndarray) -> "EncodingError":
        """Summarises the errors of tokens: their number, their mean and the largest of them.

        Args:
            errors: Relative error of each token, float64 (tokens,).
        """
        if not len(errors):
            return cls()
        return cls(len(errors), float(np.mean(errors)), float(np.max(errors)))

    def merge(self, other: "EncodingError") -> "EncodingError":
        """Returns the errors over the tokens of `self` and of `other` together."""
        token_count = self.tokens + other.tokens
        error_sum = self.mean * self.tokens + other.mean * other.tokens
        return EncodingError(
            token_count, error_sum / max(token_count, 1), max(self.worst, other.worst)
        )


# Kind of token -> error of encoding values at one hook as float8. The keys are "sinks" for the
# first tokens of samples (position 0), which are often attention sinks, and "others" for all other
# tokens.
ErrorByTokenKind = dict[str, EncodingError]


@dataclass(frozen=True)
class CodeSums:
    """Sums over the codes of some tokens at one hook.

    Two objects with sums over disjoint sets of tokens can be merged into one.

    Attributes:
        tokens: Number of tokens.
        features: Number of active features that are stored, over all tokens.
        cut: Number of active features that are not stored because of --encode_most.
        cut_tokens: Number of tokens with active features that are not stored.
        error: Sum over tokens of the squared norm of the reconstruction error, which is the
            difference between the activation and its reconstruction from the stored features.
        square: Sum over tokens of the squared norm of the activation that is reconstructed.
    """

    tokens: int = 0
    features: int = 0
    cut: int = 0
    cut_tokens: int = 0
    error: float = 0.0
    square: float = 0.0

    @classmethod
    def of(cls, codes: Codes, token_mask: np.ndarray) -> "CodeSums":
        """Counts the active features of some tokens, and sums squared errors and norms.

        Args:
            codes: Codes of all tokens. If their field `active` is None, all active features count
                as stored.
            token_mask: Mask of the selected tokens, bool (tokens,).

        Returns:
            For the selected tokens: the number of tokens, of stored features, of active features
            that are not stored, and of tokens with such features; the sum of the squared norms of
            the reconstruction errors, and the sum of the squared norms of the activations.
        """
        stored_feature_counts_of_tokens = np.diff(codes.indptr)[token_mask]
        cut_feature_counts_of_tokens = np.zeros_like(stored_feature_counts_of_tokens)
        if codes.active is not None:
            cut_feature_counts_of_tokens = (
                codes.active[token_mask] - stored_feature_counts_of_tokens
            )
        return cls(
            tokens=len(stored_feature_counts_of_tokens),
            features=int(stored_feature_counts_of_tokens.sum()),
            cut=int(cut_feature_counts_of_tokens.sum()),
            cut_tokens=int((cut_feature_counts_of_tokens > 0).sum()),
            error=float(codes.error[token_mask].astype(np.float64).sum()),
            square=float(np.square(codes.norm)[token_mask].astype(np.float64).sum()),
        )

    def merge(self, other: "CodeSums") -> "CodeSums":
        """Returns the sums over the tokens of `self` and of `other` together."""
        return CodeSums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def explained(self) -> float:
        """The fraction of the activations' squared norms that the stored features explain.

        It is computed from the attributes as 1 - error / square. It is 1 for a perfect
        reconstruction, 0 for a reconstruction that is as bad as zeros, and negative for a worse
        one. It is NaN if all activations are zeros.
        """
        return 1 - self.error / self.square if self.square else float("nan")


@dataclass(frozen=True)
class SumsOfCodes:
    """Sums over the codes at one hook, separately for first and later tokens of samples.

    Two objects with sums over disjoint sets of tokens can be merged into one.

    Attributes:
        first_token_sums: Sums over the first tokens of samples (position 0).
        later_token_sums: Sums over all later tokens of samples.
    """

    first_token_sums: CodeSums
    later_token_sums: CodeSums

    def merge(self, other: "SumsOfCodes") -> "SumsOfCodes":
        """Returns the sums over the tokens of `self` and of `other` together."""
        return SumsOfCodes(
            self.first_token_sums.merge(other.first_token_sums),
            self.later_token_sums.merge(other.later_token_sums),
        )

    @property
    def statistics(self) -> "Statistics":
        """The sums of this object as a `Statistics`, in which only the field `codes` is set."""
        return Statistics(codes={"sinks": self.first_token_sums, "others": self.later_token_sums})


@dataclass(frozen=True)
class Statistics:
    """Statistics of the values of some tokens at a hook.

    Objects for different tokens at the same hook can be merged. At hooks with integers or codes,
    all fields that are numbers are 0, also the number of tokens.

    Attributes:
        tokens: Number of tokens.
        values: Number of values of these tokens, over all dimensions.
        overall_mean: Mean of all values. Its key in JSON files is "mean".
        overall_variance: Population variance of all values. Its key in JSON files is "variance".
        mean_norm: Mean Euclidean norm of the tokens.
        max_norm: Largest Euclidean norm of a token.
        error: Errors of storing the values as float8, by kind of token: "sinks" (first tokens of
            samples) or "others". Empty if the values are not stored as float8.
        codes: Sums over codes by kind of token: "sinks" (first tokens of samples) or "others".
            Empty if the values are not codes.
    """

    tokens: int = 0
    values: int = 0
    overall_mean: float = 0.0
    overall_variance: float = 0.0
    mean_norm: float = 0.0
    max_norm: float = 0.0
    error: ErrorByTokenKind = field(default_factory=dict)
    codes: dict[str, CodeSums] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        """Whether none of the values that these statistics describe is NaN or infinite."""
        numbers_that_should_be_finite = [self.max_norm]
        for code_sums in self.codes.values():
            numbers_that_should_be_finite.append(code_sums.error + code_sums.square)
        return all(map(math.isfinite, numbers_that_should_be_finite))

    def merge(self, other: "Statistics") -> "Statistics":
        """Returns the statistics over the tokens of `self` and of `other` together.

        Means and variances are merged by the pairwise update of Chan, Golub and LeVeque (1979).
        """
        if not (self.values or self.codes):
            return other
        if not (other.values or other.codes):
            return self
        weight_of_other = other.values / (self.values + other.values or 1)
        difference_of_means = other.overall_mean - self.overall_mean

        def weighted(own_number: float, other_number: float) -> float:
            return own_number * (1 - weight_of_other) + other_number * weight_of_other

        variance_between_means = (
            difference_of_means * difference_of_means * weight_of_other * (1 - weight_of_other)
        )
        return Statistics(
            tokens=self.tokens + other.tokens,
            values=self.values + other.values,
            overall_mean=self.overall_mean + difference_of_means * weight_of_other,
            overall_variance=weighted(self.overall_variance, other.overall_variance)
            + variance_between_means,
            mean_norm=weighted(self.mean_norm, other.mean_norm),
            max_norm=max(self.max_norm, other.max_norm),
            error={
                token_kind: encoding_error.merge(other.error[token_kind])
                for token_kind, encoding_error in self.error.items()
            },
            codes={
                token_kind: code_sums.merge(other.codes[token_kind])
                for token_kind, code_sums in self.codes.items()
            },
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the statistics as JSON, with the keys that the JSON files use.

        `error` and `codes` are left out if they are empty.
        """
        value_by_json_key = {
            json_key: getattr(self, field_name) for json_key, field_name in STATISTICS.items()
        }
        if self.error:
            value_by_json_key["error"] = {
                token_kind: asdict(encoding_error)
                for token_kind, encoding_error in self.error.items()
            }
        if self.codes:
            value_by_json_key["codes"] = {
                token_kind: asdict(code_sums) for token_kind, code_sums in self.codes.items()
            }
        return value_by_json_key

    @classmethod
    def from_json(cls, value_by_json_key: Mapping[str, Any]) -> "Statistics":
        """Makes Statistics from a JSON object with the keys that `to_json` uses.

        Args:
            value_by_json_key: The JSON object. "error" and "codes" may be missing. Other keys in it
                are ignored.
        """
        encoding_error_by_token_kind = {
            token_kind: EncodingError(**value_by_error_field)
            for token_kind, value_by_error_field in value_by_json_key.get("error", {}).items()
        }
        code_sums_by_token_kind = {
            token_kind: CodeSums(**sum_by_field)
            for token_kind, sum_by_field in value_by_json_key.get("codes", {}).items()
        }
        value_by_field_name = {
            field_name: value_by_json_key[json_key] for json_key, field_name in STATISTICS.items()
        }
        return cls(
            **value_by_field_name, error=encoding_error_by_token_kind, codes=code_sums_by_token_kind
        )


# Names of the fields of Statistics, by their keys in the JSON files.
STATISTICS = {
    statistics_field.name.removeprefix("overall_"): statistics_field.name
    for statistics_field in fields(Statistics)
    if statistics_field.name not in ("error", "codes")
}


@dataclass(frozen=True, eq=False)
class DimensionStatistics:
    """Statistics of every dimension of the values of some tokens at a hook.

    `width` is the number of values of a token. All numbers are NaN if there are no tokens.

    Attributes:
        tokens: Number of tokens.
        mean: Mean of every dimension, float64 (width,).
        variance: Population variance of every dimension, float64 (width,).
        mean_norm: Mean Euclidean norm of the tokens.
    """

    tokens: int
    mean: np.ndarray
    variance: np.ndarray
    mean_norm: float

    @classmethod
    def of(cls, sums: Sums, kinds: slice) -> "DimensionStatistics":
        """Returns the statistics of every dimension over the tokens of the selected kinds.

        Args:
            sums: Sums over attention sinks and over other tokens.
            kinds: Slice of the kinds of tokens, whose indices are SINK (attention sinks) and OTHER
                (all other tokens).
        """
        token_count = int(sums.counts[kinds].sum())
        with np.errstate(invalid="ignore"):
            dimension_means = sums.sums[kinds].sum(0) / token_count
            dimension_mean_squares = sums.squares[kinds].sum(0) / token_count
            mean_of_token_norms = sums.norms[kinds].sum() / token_count
        dimension_variances = np.maximum(
            dimension_mean_squares - dimension_means * dimension_means, 0
        )
        return cls(token_count, dimension_means, dimension_variances, float(mean_of_token_norms))


@dataclass(frozen=True, kw_only=True)
class HookStatistics(Statistics):
    """Statistics of a hook over all stored tokens of a run: of all values and of every dimension.

    `mean`, `variance`, `all_tokens` and `without_first_token` are computed from files in which each
    shard stores sums over its tokens (shard_0001.npz, for example). The files are read when one of
    these properties is first used. This raises OSError if a file is damaged.

    The first token of a sample is often an attention sink, whose norm may be 100 times the norm of
    other tokens. So `without_first_token` has statistics without these tokens.

    Attributes:
        load: Function that reads the files of sums of all shards, and returns the sums over the
            tokens of all shards.
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
        """The statistics of every dimension over all tokens."""
        return DimensionStatistics.of(self.load(), slice(None))

    @cached_property
    def without_first_token(self) -> DimensionStatistics:
        """The statistics of every dimension over all tokens except the first of each sample."""
        return DimensionStatistics.of(self.load(), slice(OTHER, None))


FIELDS = [sum_field.name for sum_field in fields(Sums)]
# Lock, so that only one thread at a time reads a file of sums. NumPy parses the headers of arrays
# with `ast`, which may fail if two threads use it at the same time (python/cpython#106905).
PARSING_LOCK = threading.Lock()


def pack_sums(sums: Mapping[str, Sums], writer: str = "") -> bytes:
    """Returns the content of a shard's .npz file, which contains the sums over the shard's tokens.

    Args:
        sums: Full name of a hook -> the sums for every dimension of the hook.
        writer: Id of the process that writes the file; "" to leave it out.
    """
    array_by_name_in_file: dict[str, Any] = {}
    for hook_name, hook_sums in sums.items():
        for field_name in FIELDS:
            array_by_name_in_file[f"{hook_name}/{field_name}"] = getattr(hook_sums, field_name)
    if writer:
        array_by_name_in_file["writer"] = np.array(writer)
    npz_file = io.BytesIO()
    np.savez(npz_file, **array_by_name_in_file)
    return npz_file.getvalue()


def unpack_sums(npz_bytes: bytes, hooks: Iterable[str]) -> dict[str, Sums]:
    """Reads the sums over a shard's tokens from the shard's .npz file, which `pack_sums` has made.

    Args:
        npz_bytes: Content of the .npz file.
        hooks: Full names of the hooks whose sums are read.

    Returns:
        A dict: full name of a hook -> the sums for every dimension of the hook.
    """
    sums_by_hook_name = {}
    with PARSING_LOCK, np.load(io.BytesIO(npz_bytes)) as stored_arrays:
        for hook_name in hooks:
            array_by_field = {
                field_name: stored_arrays[f"{hook_name}/{field_name}"] for field_name in FIELDS
            }
            sums_by_hook_name[hook_name] = Sums(**array_by_field)
    return sums_by_hook_name
