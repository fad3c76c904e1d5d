"""Statistics of activations, which can be merged: per sample, shard, host, machine or run.

`Sums` are totals for every dimension; `Statistics` are the few numbers per hook that the JSON files
record. `shard_0001.npz`, beside the shard, holds the sums of each hook, which are too long for its
JSON, as arrays `HOOK/FIELD` that `numpy.load` reads. Its bytes depend on the sums alone.
"""

import io
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from activation_extraction.common.encodings import decode
from activation_extraction.common.errors import RunError
from activation_extraction.store.encode_shard import EncodingError
from activation_extraction.store.identity import Identity

BLOCK_BYTES = 4 * 2**20  # of float64 values, so that a block stays in a core's caches
BUCKETS = 32  # the number of position buckets
SINK, OTHER = 0, 1

UNREADABLE = (
    *(ValueError, KeyError, OSError, EOFError, RuntimeError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error),
)
DTYPES = ("<i8", "<f8", "<f8", "<f8", "<f8")  # the dtypes of the fields of Sums


@dataclass(eq=False)
class Sums:
    """Sums over tokens at one hook, in float64, which can be merged.

    Here the first token of a document (position 0) counts as an attention sink, so that it does not
    depend on other tokens whether a token is one.

    counts, norms: shape (BUCKETS,), the number of tokens and the sum of their Euclidean norms, by
    position: bucket 0 has position 0, bucket b the positions from 2^(b - 1) to 2^b - 1. sums,
    squares: shape (2, width), the sums of the values and of their squares, for sinks and for other
    tokens. largest: shape (), the largest norm.
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
        return cls(np.zeros(BUCKETS, np.int64), np.zeros(BUCKETS), sums, squares, np.zeros(()))

    def add(
        self,
        activations: Sequence[np.ndarray],
        positions: Sequence[np.ndarray],
        scales: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Adds tokens. activations: arrays (tokens, width) of any float dtype, in order. positions:
        the positions of the tokens in their documents, in any number of arrays. scales: of each
        array if they are encoded, and are decoded here.

        The result does not depend on how the tokens are distributed over arrays.
        """
        all_positions = np.concatenate(positions)
        squares, done = np.empty(len(all_positions)), 0
        rows = max(1, BLOCK_BYTES // (8 * self.sums.shape[1]))
        buffer = np.empty((min(rows, len(all_positions)), self.sums.shape[1]))
        with np.errstate(invalid="ignore"):  # see `Statistics.finite`
            for block in _blocks(activations, buffer, scales):
                stop = done + len(block)
                sinks = np.flatnonzero(all_positions[done:stop] == 0)
                for total in (self.sums, self.squares):
                    others = np.add.reduce(block, 0)
                    if len(sinks):
                        of_sinks = np.add.reduce(block[sinks], 0)
                        total[SINK] += of_sinks
                        others -= of_sinks
                    total[OTHER] += others
                    if total is self.sums:
                        np.multiply(block, block, out=block)
                np.add.reduce(block, 1, out=squares[done:stop])
                done = stop
        norms, buckets = np.sqrt(squares), np.frexp(all_positions.astype(np.float64))[1]
        self.counts += np.bincount(buckets, minlength=BUCKETS)
        self.norms += np.bincount(buckets, norms, minlength=BUCKETS)
        self.largest = np.maximum(self.largest, norms.max(initial=0.0))

    def merge(self, other: "Sums") -> None:
        """Adds other sums."""
        for name in ("counts", "norms", "sums", "squares"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = np.maximum(self.largest, other.largest)

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
            mean=mean,
            variance=max(0.0, float(self.squares.sum()) / values - mean * mean),
            mean_norm=float(self.norms.sum()) / tokens,
            max_norm=float(self.largest),
        )


def _blocks(
    activations: Sequence[np.ndarray], buffer: np.ndarray, scales: Sequence[np.ndarray] | None
) -> Iterator[np.ndarray]:
    """Yields the tokens of several arrays in order, as float64 views of the buffer. Each view but
    the last fills the buffer. scales: those of `Sums.add`."""
    filled = 0
    for number, activation in enumerate(activations):
        start = 0
        while start < len(activation):
            count = min(len(activation) - start, len(buffer) - filled)
            tokens = activation[start : start + count]
            if scales is not None:
                tokens = decode(tokens, scales[number][start : start + count])
            np.copyto(buffer[filled : filled + count], tokens)
            start, filled = start + count, filled + count
            if filled == len(buffer):
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def sums_of(
    activations: Sequence[np.ndarray],
    positions: Sequence[np.ndarray],
    scales: Sequence[np.ndarray] | None = None,
) -> Sums:
    """Returns the sums over tokens at one hook. The arguments are those of `Sums.add`."""
    total = Sums.zeros(activations[0].shape[1])
    total.add(activations, positions, scales)
    return total


def hook_sums(
    identity: Identity,
    hook: str,
    values: Sequence[np.ndarray],
    positions: Sequence[np.ndarray],
    scales: Sequence[np.ndarray] | None = None,
) -> Sums:
    """Returns the sums over tokens at a hook of a run, whose identity says what the hook's values
    are. The other arguments are those of `Sums.add`.

    Integers have no statistics, so their sums are over no tokens. The sums leave out tokens that
    have no value.
    """
    if hook in identity.integer_hooks:
        return Sums.zeros(values[0].shape[1])
    if identity.leaves_out_firsts(hook):
        pairs = list(zip(values, positions, strict=True))
        masks = [defined_tokens(*pair) for pair in pairs]
        values, positions = (
            [each[mask] for each, mask in zip(arrays, masks, strict=True)]
            for arrays in (values, positions)
        )
    return sums_of(values, positions, scales)


def defined_tokens(values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns which tokens have a loss, bool (tokens,).

    values: (tokens, 1). The first token of a sample has none, and NaN says so.
    """
    return (positions != 0) | ~np.isnan(values).any(axis=1)


@dataclass(frozen=True)
class Statistics:
    """Statistics of activations (tokens, width): mean and (population) variance over all values,
    mean and largest Euclidean norm over tokens.

    error: what encoding changed; None for activations that are not encoded.
    """

    tokens: int = 0
    values: int = 0
    mean: float = 0.0
    variance: float = 0.0
    mean_norm: float = 0.0
    max_norm: float = 0.0
    error: EncodingError | None = None

    @property
    def finite(self) -> bool:
        """Whether no value was NaN or infinite."""
        return math.isfinite(self.max_norm)

    def merge(self, other: "Statistics") -> "Statistics":
        """Merges two statistics by the pairwise update of Chan, Golub and LeVeque (1979)."""
        if not self.values or not other.values:
            return self if self.values else other
        errors = [each.error or EncodingError() for each in (self, other)]
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
            error=errors[0].merge(errors[1]) if self.error or other.error else None,
        )

    def to_json(self) -> dict[str, Any]:
        error = {} if self.error is None else {"error": self.error.to_json()}
        return {name: getattr(self, name) for name in STATISTICS} | error

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Statistics":
        """Reads what `to_json` returned, and ignores other keys."""
        error = EncodingError.from_json(content["error"]) if "error" in content else None
        return cls(**{name: content[name] for name in STATISTICS}, error=error)


STATISTICS = [each.name for each in fields(Statistics) if each.name != "error"]


@dataclass(frozen=True, eq=False)
class DimensionStatistics:
    """Statistics of some tokens: the mean and (population) variance of every dimension, float64
    (width,), and the mean Euclidean norm."""

    tokens: int
    mean: np.ndarray
    variance: np.ndarray
    mean_norm: float


@dataclass(frozen=True)
class HookStatistics:
    """Statistics of a hook over everything that is stored.

    tokens, values: how many there are. overall_mean, overall_variance: numbers over all values,
    which the JSON files call `mean` and `variance`. mean_norm, max_norm: of the Euclidean norms of
    tokens. error: what encoding changed; None for activations that are not encoded.

    `mean` and `variance` are those of every dimension, float64 (width,), here as in `all_tokens`
    and `without_first_token`. They are read when they are first asked for, and raise OSError for
    damaged files. The first token of a document is often an attention sink, whose norm is 100 times
    that of other tokens.
    """

    tokens: int
    values: int
    overall_mean: float
    overall_variance: float
    mean_norm: float
    max_norm: float
    error: EncodingError | None
    load: Callable[[], Sums] = field(repr=False, compare=False)

    @classmethod
    def of(cls, recorded: Statistics, load: Callable[[], Sums]) -> "HookStatistics":
        """Returns the statistics that the JSON files record. load: reads the sums."""
        return cls(
            tokens=recorded.tokens,
            values=recorded.values,
            overall_mean=recorded.mean,
            overall_variance=recorded.variance,
            mean_norm=recorded.mean_norm,
            max_norm=recorded.max_norm,
            error=recorded.error,
            load=load,
        )

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
        return _statistics_of(self.load(), slice(None))

    @cached_property
    def without_first_token(self) -> DimensionStatistics:
        """The statistics of all tokens but the first one of each document."""
        return _statistics_of(self.load(), slice(OTHER, None))

    @property
    def norms_by_position(self) -> dict[range, float]:
        """Maps ranges of positions in a document, if they have tokens, to the mean norm there."""
        sums = self.load()
        return {
            range(1 << bucket >> 1, 1 << bucket): float(sums.norms[bucket] / sums.counts[bucket])
            for bucket in np.flatnonzero(sums.counts).tolist()
        }


def _statistics_of(sums: Sums, kinds: slice) -> DimensionStatistics:
    """Returns the statistics of sinks, of other tokens, or of both; NaN if there are no tokens."""
    tokens = int(sums.counts[kinds].sum())  # bucket 0 is position 0, so it counts the sinks
    totals = sums.sums[kinds].sum(0), sums.squares[kinds].sum(0), sums.norms[kinds].sum()
    with np.errstate(invalid="ignore"):
        mean, squares, norm = (total / tokens for total in totals)
    return DimensionStatistics(tokens, mean, np.maximum(squares - mean * mean, 0), float(norm))


FIELDS = [each.name for each in fields(Sums)]


def pack_sums(sums: Mapping[str, Sums]) -> bytes:
    """Returns the content of the statistics file. sums: the sums by hook."""
    arrays = {f"{hook}/{name}": getattr(sums[hook], name) for hook in sums for name in FIELDS}
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpack_sums(data: bytes, hooks: Iterable[tuple[str, int]], where: str) -> dict[str, Sums]:
    """Reads what `pack_sums` returned. hooks: the names and widths of the hooks to read.

    where: names the file in messages. Raises RunError if the data is damaged.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if any(entry.file_size != entry.compress_size for entry in entries):
                raise ValueError("it is compressed")
            if sum(entry.file_size for entry in entries) > len(data):
                raise ValueError("its arrays overlap")
            return {hook: _sums(archive, hook, width) for hook, width in hooks}
    except UNREADABLE as error:
        raise RunError(f"{where}: cannot be read: {error}") from error


def _sums(archive: zipfile.ZipFile, hook: str, width: int) -> Sums:
    shapes = [(BUCKETS,), (BUCKETS,), (2, width), (2, width), ()]
    arrays = []
    for name, shape, dtype in zip(FIELDS, shapes, DTYPES, strict=True):
        data = archive.read(f"{hook}/{name}.npy")
        arrays.append(_array(data, shape, dtype, f"{hook}/{name}"))
    return Sums(*arrays)


def _array(data: bytes, shape: tuple[int, ...], dtype: str, where: str) -> np.ndarray:
    """Reads an array from the content of a .npy file.

    `numpy.load` would allocate whatever the header says before it looks for the values, so the
    header is compared with the expected one.
    """
    expected, end = io.BytesIO(), 10 + int.from_bytes(data[8:10], "little")
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(expected, header)
    if data[:8] != expected.getvalue()[:8]:
        raise ValueError(f"{where} has an unknown version")
    if data[10:end].split() != expected.getvalue()[10:].split():
        raise ValueError(f"{where} is {data[10:end].strip()!r:.200}, expected {header}")
    return np.frombuffer(data, dtype, offset=end).reshape(shape).copy()
