"""HookValues: the values of tokens at a hook, and how shards hold them.

There are three kinds of values, with a class each: `DenseValues` are numbers that are stored as
they are, `Float8Values` are activations in one byte per value, and `CodeValues` are the active
features of an autoencoder. An object of such a class describes a hook and has the functions that
writers, readers, statistics and --verify apply to its values; nothing else depends on the kind of a
hook. `Identity.hook_values` chooses the class.

The values of some tokens have up to three forms:

  rows         an array with a row for each token. A step returns rows, and batches shuffle them.
               Codes are records of int32 there (common/codes.py).
  user's form  what users read: an array (tokens, width), or Codes.
  stored form  what a shard in memory has: an array, a Float8Array, or Codes.

Shapes have the axes (tokens, width) unless a docstring gives others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any, Literal, Protocol

import numpy as np

from activation_extraction.common.codes import ARRAYS, Codes, code_bytes, record_width
from activation_extraction.common.encodings import (
    FLOAT8,
    SCALES,
    VALUES,
    Float8Array,
    relative_errors,
    token_bytes,
)
from activation_extraction.store.statistics import (
    CodeSums,
    EncodingError,
    Errors,
    Sums,
    SumsOfCodes,
    sums_of,
)

Key = int | str  # a hook's name in pickles: its layer number, or the name the user asked for
Values = np.ndarray | Codes  # the values of some tokens at a hook, in the user's form
Shape = tuple[int, ...]
SCALE = ".scale"  # follows the name of a hook in the name of the tensor with its scales
FLOATS: np.dtype = np.dtype(np.float32)
GROUP_BYTES = 32 * 2**20  # size of the values that a thread handles at a time
MEASURED = 1024  # most tokens of each kind in a shard whose encoding errors are measured
TIE = 2  # numbers that differ if two nearly equal ones change places, which is always allowed


class TensorFile(Protocol):
    """A file of named tensors whose rows can be read, such as SafetensorsFile."""

    def begin_rows(self, name: str, start: int, stop: int) -> Callable[[], np.ndarray]:
        """Asks for consecutive rows of a tensor, and returns a function that waits for them.

        Args:
            name: Name of the tensor.
            start: Number of the first row.
            stop: Number of the row after the last one.
        """


@dataclass(frozen=True)
class Tolerance:
    """How much recomputed values of a sample may differ from the stored ones.

    Attributes:
        computed: Error of computing, relative to the norm of the sample's values.
        rounded: Error of rounding activations to the dtype in which they are stored, relative to
            the same norm.
        share: Share of the sample's integers, or of its active features, that may differ.
    """

    computed: float
    rounded: float
    share: float

    @property
    def activations(self) -> float:
        """Largest relative error of recomputed activations: those of computing and of rounding."""
        return self.computed + self.rounded

    def different_numbers(self, count: int) -> int:
        """Returns how many of `count` integers or features may differ."""
        return max(int(self.share * count), TIE)


@dataclass(frozen=True)
class HookValues(ABC):
    """Describes the values at one hook of a run. The module's docstring defines their forms.

    Attributes:
        key: Name of the hook in pickles: its layer number, or the name that the user chose.
        name: Full name of the hook.
        width: Number of values of a token; of codes, the number of all features. 0 if it is not
            known yet, because a program with a loop of its own has stored no sample.
        stored_dtype: Dtype of the values in files; "" if the identity of a program with a loop of
            its own leaves it to the samples.
    """

    key: Key
    name: str
    width: int
    stored_dtype: str

    # Members that describe the values.

    @property
    @abstractmethod
    def dtype(self) -> np.dtype:
        """The dtype of the values in the user's form, unless the reader asks for another dtype."""

    @property
    @abstractmethod
    def are_activations(self) -> bool:
        """Whether the values are activations.

        Only activations have norms that batches may limit, and can be read in another dtype than
        `dtype`.
        """

    @property
    @abstractmethod
    def is_array(self) -> bool:
        """Whether the user's form is an array.

        Only arrays can be stored by a program with a loop of its own, and have sums in the
        statistics file of a shard.
        """

    @property
    @abstractmethod
    def most_values(self) -> int:
        """The largest number of values that are stored for a token."""

    # Members with which shards are written.

    @property
    @abstractmethod
    def tensor_names(self) -> list[str]:
        """The names of the hook's tensors in a safetensors shard."""

    @property
    def in_pickles(self) -> bool:
        """Whether pickles can hold the values. Safetensors can hold the values of every kind."""
        return True

    @property
    @abstractmethod
    def is_encoded(self) -> bool:
        """Whether `encode` makes other arrays, so that values are in memory twice meanwhile."""

    def stored_as(self, dtype: str) -> str:
        """Returns the dtype in which values of some dtype are stored."""
        return dtype

    def for_shard(self, rows: np.ndarray) -> Any:
        """Returns the values of a sample as they wait for their shard.

        Args:
            rows: The rows of the sample's tokens.

        Returns:
            The values in the stored form, but for those that `encode` still has to encode.
        """
        return rows

    @abstractmethod
    def bytes_of(self, values: Any) -> int:
        """Returns how many bytes a shard has, before compression, for the values of a sample.

        Args:
            values: The values, as `for_shard` returns them. A sample without tokens counts as one
                token if values are arrays.
        """

    def encode(
        self, samples: list[Any], positions: Sequence[np.ndarray], threads: Executor
    ) -> tuple[list[Any], Errors]:
        """Encodes the values of the samples of a shard.

        Args:
            samples: The values of each sample, as `for_shard` returns them.
            positions: The positions of each sample's tokens, int32 (tokens,).
            threads: The threads that encode.

        Returns:
            The values of each sample in the stored form, and the errors of encoding some of the
            tokens; no errors if nothing is encoded.
        """
        return samples, {}

    @abstractmethod
    def sums(self, samples: Sequence[Any], positions: Sequence[np.ndarray]) -> Sums | SumsOfCodes:
        """Returns the sums over the tokens of some samples, at least one.

        Args:
            samples: The values of each sample in the stored form.
            positions: The positions of each sample's tokens, int32 (tokens,).
        """

    def to_json(self, values: Any) -> dict[str, Any]:
        """Returns the entry of the hook in the JSON of a shard, without the statistics.

        Args:
            values: The values of a sample of the shard in the stored form.
        """
        width, dtype = values.shape[1], values.dtype.name
        return {"key": self.key, "name": self.name, "width": width, "dtype": dtype, "scale": None}

    @abstractmethod
    def tensors(self, samples: Sequence[Any]) -> dict[str, list[np.ndarray]]:
        """Returns the tensors of a safetensors shard for the hook, by name.

        Args:
            samples: The values of each sample in the stored form.

        Returns:
            The parts of each tensor, which follow one another in the file.
        """

    @abstractmethod
    def record(self, values: Any) -> dict[str, np.ndarray]:
        """Returns the fields with values in a pickle's record of a sample.

        Args:
            values: The values of the sample in the stored form.
        """

    # Members with which shards are read.

    @abstractmethod
    def from_record(self, record: Mapping[str, Any]) -> Any:
        """Returns the values in a pickle's record, in the stored form.

        Args:
            record: The record of a sample.

        Raises:
            KeyError, TypeError, AttributeError, ValueError: The record lacks fields, or they are
                inconsistent.
        """

    @property
    @abstractmethod
    def row(self) -> np.dtype:
        """The dtype and the shape of a token's row."""

    @property
    @abstractmethod
    def least_bytes(self) -> int:
        """The smallest number of bytes per token in a shard, before compression."""

    @abstractmethod
    def expected_tensors(self, tokens: int) -> dict[str, tuple[np.dtype, Shape]]:
        """Returns the dtype and the shape of tensors of the hook, by name.

        Only tensors whose shape follows from the number of tokens are contained.

        Args:
            tokens: The number of tokens in the shard.
        """

    @abstractmethod
    def begin_rows(
        self, file: TensorFile, start: int, stop: int, dtype: Any = None
    ) -> Callable[[], np.ndarray]:
        """Asks for the rows of consecutive tokens, and returns a function that waits for them.

        Args:
            file: The file of a shard.
            start: Offset of the first token in the shard.
            stop: Offset of the token after the last one. Nothing is read if there are no tokens.
            dtype: Dtype to which encoded activations are decoded. None for the hook's `dtype`.
                Values that are not encoded are returned in the stored dtype.
        """

    def for_user(self, rows: np.ndarray) -> Values:
        """Returns rows in the user's form."""
        return rows

    # The comparison of stored values with recomputed ones, for --verify.

    @abstractmethod
    def differences(
        self, stored: Any, recomputed: Any, positions: np.ndarray, tolerance: Tolerance
    ) -> Iterator[str]:
        """Yields a message on each difference of a sample's values that is not allowed.

        Args:
            stored: The stored values in the user's form.
            recomputed: The recomputed values in the user's form.
            positions: The positions of the tokens, int32 (tokens,).
            tolerance: The differences that are allowed.
        """


@dataclass(frozen=True)
class DenseValues(HookValues):
    """Values that are stored as they are: one tensor, `NAME`, of the dtype of the hook.

    Attributes:
        content: What the values are:

            activations: Activations in the dtype of the run.
            integers: Numbers of experts or of tokens, int32. They have no statistics.
            loss: The loss at each token, float32, width 1. The first token of a sample has no
                loss, and its value is NaN.
            numbers: Entropies, log-probabilities and the like, float32.
    """

    content: Literal["activations", "integers", "loss", "numbers"] = "activations"
    is_array = True
    is_encoded = False

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.stored_dtype)

    @property
    def are_activations(self) -> bool:
        return self.content == "activations"

    @property
    def most_values(self) -> int:
        return self.width

    @property
    def tensor_names(self) -> list[str]:
        return [self.name]

    def bytes_of(self, values: np.ndarray) -> int:
        return max(len(values), 1) * values.shape[1] * values.itemsize

    def sums(self, samples: Sequence[np.ndarray], positions: Sequence[np.ndarray]) -> Sums:
        if self.content == "integers":
            return Sums.zeros(samples[0].shape[1])
        values, all_positions = np.concatenate(samples), np.concatenate(positions)
        if self.content == "loss":
            defined = self._has_loss(values, all_positions)
            values, all_positions = values[defined], all_positions[defined]
        return sums_of(values.__getitem__, values.shape[1], all_positions)

    @staticmethod
    def _has_loss(values: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns which tokens have a loss, bool (tokens,).

        The first token of a sample counts only if its loss is a number. Every other token counts,
        because a NaN there is an error that must stay visible.
        """
        return (positions != 0) | ~np.isnan(values).any(axis=1)

    def tensors(self, samples: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        return {self.name: list(samples)}

    def record(self, values: np.ndarray) -> dict[str, np.ndarray]:
        return {"activation": values}

    def from_record(self, record: Mapping[str, Any]) -> np.ndarray:
        values: np.ndarray = record["activation"]
        return values

    @property
    def row(self) -> np.dtype:
        return np.dtype((self.dtype, (self.width,)))

    @property
    def least_bytes(self) -> int:
        return token_bytes(self.width, self.stored_dtype)

    def expected_tensors(self, tokens: int) -> dict[str, tuple[np.dtype, Shape]]:
        return {self.name: (self.dtype, (tokens, self.width))}

    def begin_rows(
        self, file: TensorFile, start: int, stop: int, dtype: Any = None
    ) -> Callable[[], np.ndarray]:
        if start == stop:
            return lambda: np.empty(0, self.row)
        return file.begin_rows(self.name, start, stop)

    def differences(
        self,
        stored: np.ndarray,
        recomputed: np.ndarray,
        positions: np.ndarray,
        tolerance: Tolerance,
    ) -> Iterator[str]:
        if self.content == "integers":
            different = int((recomputed != stored).sum())
            allowed = tolerance.different_numbers(stored.size)
            if different > allowed:
                yield f"{different} of its {stored.size} numbers differ (allowed: {allowed})"
            return
        before, now = stored.astype(np.float64), recomputed.astype(np.float64)
        if self.content == "loss":
            defined = self._has_loss(before, positions) | self._has_loss(now, positions)
            before, now = before[defined], now[defined]
        # Values other than activations are stored in the dtype in which they are computed.
        limit = tolerance.activations if self.are_activations else tolerance.computed
        yield from _different_norm(before, now, limit)


@dataclass(frozen=True)
class Float8Values(HookValues):
    """Activations in one byte per value (common/encodings.py), which only safetensors can store.

    Two tensors hold them: `NAME` the values, e4m3 (tokens, width), and `NAME.scale` the scale of
    each token, float32 (tokens, 1).
    """

    stored_dtype: str = VALUES.name
    dtype = FLOATS
    are_activations = True
    is_array = True
    is_encoded = True
    in_pickles = False

    @property
    def most_values(self) -> int:
        return self.width

    @property
    def tensor_names(self) -> list[str]:
        return [self.name, self.name + SCALE]

    def stored_as(self, dtype: str) -> str:
        return VALUES.name

    def bytes_of(self, values: np.ndarray) -> int:
        return max(len(values), 1) * token_bytes(values.shape[1], FLOAT8)

    def encode(
        self, samples: list[np.ndarray], positions: Sequence[np.ndarray], threads: Executor
    ) -> tuple[list[Float8Array], Errors]:
        offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
        are_sinks = np.concatenate(positions) == 0
        measured = _every_nth(are_sinks) | _every_nth(~are_sinks)

        def encode_group(group: slice) -> tuple[list[Float8Array], np.ndarray]:
            first, *starts, stop = offsets[group.start : group.stop + 1]
            x = np.concatenate(samples[group])
            encoded = Float8Array.of(x)
            chosen = measured[first:stop]
            errors = relative_errors(x[chosen], encoded[chosen].decode())
            return encoded.split(np.array(starts, np.int64) - first), errors

        groups = list(threads.map(encode_group, groups_of(samples)))
        errors = np.concatenate([errors for _, errors in groups])
        of_sinks = are_sinks[measured]
        return list(chain.from_iterable(encoded for encoded, _ in groups)), {
            "sinks": EncodingError.of(errors[of_sinks]),
            "others": EncodingError.of(errors[~of_sinks]),
        }

    def sums(self, samples: Sequence[Float8Array], positions: Sequence[np.ndarray]) -> Sums:
        encoded = Float8Array.concatenate(samples)

        def decode(tokens: slice) -> np.ndarray:
            return encoded[tokens].decode()

        return sums_of(decode, encoded.shape[1], np.concatenate(positions))

    def to_json(self, values: Float8Array) -> dict[str, Any]:
        return super().to_json(values) | {"scale": values.shape[1]}

    def tensors(self, samples: Sequence[Float8Array]) -> dict[str, list[np.ndarray]]:
        return {
            self.name: [sample.values for sample in samples],
            self.name + SCALE: [sample.scales for sample in samples],
        }

    def record(self, values: Float8Array) -> dict[str, np.ndarray]:
        raise ValueError(f"{self.name}: pickles do not hold float8")

    def from_record(self, record: Mapping[str, Any]) -> Float8Array:
        raise ValueError(f"{self.name}: pickles do not hold float8")

    @property
    def row(self) -> np.dtype:
        return np.dtype((FLOATS, (self.width,)))

    @property
    def least_bytes(self) -> int:
        return token_bytes(self.width, FLOAT8)

    def expected_tensors(self, tokens: int) -> dict[str, tuple[np.dtype, Shape]]:
        return {
            self.name: (VALUES, (tokens, self.width)),
            self.name + SCALE: (SCALES, (tokens, 1)),
        }

    def begin_rows(
        self, file: TensorFile, start: int, stop: int, dtype: Any = None
    ) -> Callable[[], np.ndarray]:
        if start == stop:
            return lambda: np.empty(0, self.row)
        values = file.begin_rows(self.name, start, stop)
        scales = file.begin_rows(self.name + SCALE, start, stop)
        return lambda: Float8Array(values(), scales()).decode(dtype or FLOATS)

    def differences(
        self,
        stored: np.ndarray,
        recomputed: np.ndarray,
        positions: np.ndarray,
        tolerance: Tolerance,
    ) -> Iterator[str]:
        before, now = stored.astype(np.float64), recomputed.astype(np.float64)
        yield from _different_norm(before, now, tolerance.activations)


@dataclass(frozen=True)
class CodeValues(HookValues):
    """The codes of an autoencoder: `Codes`, of which only the active features are stored.

    A safetensors shard has five tensors, `NAME.ids`, `.values`, `.offsets`, `.error` and `.norm`,
    and the record of a pickle five fields of these names: the arrays of `Codes` by ARRAYS.

    Attributes:
        most: Largest number of features stored for a token. 0 if values are written but not read.
    """

    most: int
    dtype = FLOATS
    are_activations = False
    is_array = False
    is_encoded = False

    @property
    def most_values(self) -> int:
        return self.most

    @property
    def tensor_names(self) -> list[str]:
        return [f"{self.name}.{array}" for array in ARRAYS]

    def for_shard(self, rows: np.ndarray) -> Codes:
        return Codes.of(rows, self.width, self.stored_dtype)

    def bytes_of(self, values: Codes) -> int:
        return values.nbytes

    def sums(self, samples: Sequence[Codes], positions: Sequence[np.ndarray]) -> SumsOfCodes:
        pairs = zip(samples, positions, strict=True)
        return reduce(SumsOfCodes.merge, (self._sums_of_sample(*pair) for pair in pairs))

    @staticmethod
    def _sums_of_sample(codes: Codes, positions: np.ndarray) -> SumsOfCodes:
        are_sinks = positions == 0
        return SumsOfCodes(CodeSums.of(codes, are_sinks), CodeSums.of(codes, ~are_sinks))

    def tensors(self, samples: Sequence[Codes]) -> dict[str, list[np.ndarray]]:
        codes = Codes.concatenate(samples)
        return {f"{self.name}.{array}": [getattr(codes, field)] for array, field in ARRAYS.items()}

    def record(self, values: Codes) -> dict[str, np.ndarray]:
        return {array: getattr(values, field) for array, field in ARRAYS.items()}

    def from_record(self, record: Mapping[str, Any]) -> Codes:
        arrays = {field: np.asarray(record[array]) for array, field in ARRAYS.items()}
        codes = Codes(**arrays, features=record["shape"][1])
        first, last = codes.indptr[[0, -1]].tolist()
        lengths = {last, len(codes.indices), len(codes.data)}
        if first != 0 or len(lengths) != 1 or (np.diff(codes.indptr) < 0).any():
            raise ValueError(f"sample {record['sample_idx']}: its codes do not fit their offsets")
        return codes

    @property
    def row(self) -> np.dtype:
        return np.dtype((np.int32, (record_width(self.most),)))

    @property
    def least_bytes(self) -> int:
        return code_bytes(0, self.stored_dtype)

    def expected_tensors(self, tokens: int) -> dict[str, tuple[np.dtype, Shape]]:
        return {
            f"{self.name}.offsets": (np.dtype(np.int64), (tokens + 1,)),
            f"{self.name}.error": (FLOATS, (tokens,)),
            f"{self.name}.norm": (FLOATS, (tokens,)),
        }

    def begin_rows(
        self, file: TensorFile, start: int, stop: int, dtype: Any = None
    ) -> Callable[[], np.ndarray]:
        if start == stop:
            return lambda: np.empty(0, self.row)
        offsets = file.begin_rows(f"{self.name}.offsets", start, stop + 1)()
        first, last = offsets[[0, -1]].tolist()
        ids = file.begin_rows(f"{self.name}.ids", first, last)
        values = file.begin_rows(f"{self.name}.values", first, last)
        errors = file.begin_rows(f"{self.name}.error", start, stop)
        norms = file.begin_rows(f"{self.name}.norm", start, stop)

        def wait() -> np.ndarray:
            codes = Codes(offsets - first, ids(), values(), errors(), norms(), self.width)
            return codes.records(self.most)

        return wait

    def for_user(self, rows: np.ndarray) -> Codes:
        return Codes.of(rows, self.width)

    def differences(
        self, stored: Codes, recomputed: Codes, positions: np.ndarray, tolerance: Tolerance
    ) -> Iterator[str]:
        """Compares the features, norms and errors of reconstruction.

        Values are compared for the features that both codes contain.
        """
        before, now = (
            np.repeat(np.arange(len(codes)), np.diff(codes.indptr)) * self.width + codes.indices
            for codes in (stored, recomputed)
        )
        both, at_before, at_now = np.intersect1d(
            before, now, assume_unique=True, return_indices=True
        )
        different = len(before) + len(now) - 2 * len(both)
        allowed = tolerance.different_numbers(len(before))
        if different > allowed:
            yield f"{different} of its {len(before)} features differ (allowed: {allowed})"
        pairs = {
            "values": (stored.data[at_before], recomputed.data[at_now]),
            "norms": (stored.norm, recomputed.norm),
            "errors": (_root(stored.error), _root(recomputed.error)),
        }
        # The product with the encoder and the difference from the reconstruction add to the error.
        limit = 2 * tolerance.activations
        for name, (x, y) in pairs.items():
            error = _relative_error(x.astype(np.float64), y.astype(np.float64))
            if not error <= limit:
                yield f"its {name} differ by {error:.2g} of their norm (allowed: {limit:g})"


def groups_of(samples: Iterable[Any]) -> Iterator[slice]:
    """Yields groups of consecutive samples that have about GROUP_BYTES at a hook together.

    A thread handles a group at a time.

    Args:
        samples: The values of each sample, in any form.
    """
    begin = size = stop = 0
    for stop, values in enumerate(samples, 1):
        size += values.nbytes
        if size >= GROUP_BYTES:
            yield slice(begin, stop)
            begin, size = stop, 0
    if begin < stop:
        yield slice(begin, stop)


def _every_nth(mask: np.ndarray) -> np.ndarray:
    """Returns a mask of every n-th element that is True, so that at most MEASURED are left."""
    indices = np.flatnonzero(mask)
    chosen = np.zeros(len(mask), bool)
    chosen[indices[:: max(-(-len(indices) // MEASURED), 1)]] = True
    return chosen


def _root(squares: np.ndarray) -> np.ndarray:
    return np.sqrt(squares.astype(np.float64))


def _relative_error(before: np.ndarray, now: np.ndarray) -> float:
    return float(np.linalg.norm(now - before)) / max(float(np.linalg.norm(before)), 1e-30)


def _different_norm(before: np.ndarray, now: np.ndarray, limit: float) -> Iterator[str]:
    """Yields a message with the relative error of the values, if that is above the limit or NaN."""
    error = _relative_error(before, now)
    if not error <= limit:  # also for NaN
        yield f"it differs by {error:.2g} of its norm (allowed: {limit:g})"
