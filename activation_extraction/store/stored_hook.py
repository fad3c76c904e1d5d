"""StoredHook: describes a hook, and stores, reads and compares the values of tokens at the hook.

There are three kinds of values. A class for each kind describes the hooks with such values:
`DenseHook` for numbers that are stored without encoding, `Float8Hook` for activations that are
stored in one byte per value, and `CodeHook` for the active features of an autoencoder. An object
of one of these classes describes one hook, and does not contain the values. It has the functions
that writers, readers, statistics and --verify apply to the values at the hook; no other module
depends on the kind of a hook. `Identity.stored_hook` chooses the class.

The values of some tokens at a hook have up to three forms:

  rows         An array with one row per token. A step of the model returns rows, and readers
               shuffle rows into batches. For codes, a row is an int32 record (common/codes.py).
  user's form  The values as users of `ActivationDataset` get them: an array (tokens, width), or
               `Codes`.
  stored form  The values in a shard in memory, ready to be written: an array (tokens, width), a
               `Float8Array` or `Codes`.

`width` is the number of values of a token at the hook; for codes, the number of all features of the
autoencoder.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, Protocol

import numpy as np

from activation_extraction.common.codes import ARRAYS, Codes, code_bytes, record_width
from activation_extraction.common.encodings import (
    FLOAT8,
    SCALE_DTYPE,
    VALUE_DTYPE,
    Float8Array,
    relative_errors,
    token_bytes,
)
from activation_extraction.store.statistics import (
    CodeSums,
    EncodingError,
    ErrorByTokenKind,
    Sums,
    SumsOfCodes,
    sums_of,
)

# Key of a hook in pickles: the number of its layer, or the name by which the user selects the hook.
HookKey = int | str
# Values of some tokens at a hook, as users of `ActivationDataset` get them: `Codes` at a hook with
# codes, and an array (tokens, width) at any other hook.
Values = np.ndarray | Codes
Shape = tuple[int, ...]
SCALE = ".scale"  # end of the name of the tensor with the scales of a hook
FLOAT32: np.dtype = np.dtype(np.float32)
SLICE_BYTES = 32 * 2**20  # bytes of values at a hook that a thread processes at a time
# Encoding errors are measured on at most this many attention sinks of a shard, and on at most as
# many of its other tokens, because measuring decodes the tokens again, which takes time.
MAX_MEASURED_TOKENS = 1024
# Number of integers or features of a sample that may differ even if the sample is very short. If,
# for example, the router's scores of two experts are nearly equal, a small error can reverse their
# order, and then two integers differ.
TIE = 2


class TensorFile(Protocol):
    """A file of named tensors whose rows can be read, such as SafetensorsFile."""

    def begin_rows(self, name: str, start: int, stop: int) -> Callable[[], np.ndarray]:
        """Begins to read consecutive rows of a tensor.

        Args:
            name: Name of the tensor.
            start: Index of the first row.
            stop: Index of the row after the last one.

        Returns:
            A function that waits for the rows and returns them, in an array with the dtype and the
            other axes of the tensor.
        """


@dataclass(frozen=True)
class Tolerance:
    """The largest allowed differences between the stored and the recomputed values of a sample.

    A relative error is the norm of the difference between the stored and the recomputed values at a
    hook, divided by the norm of the stored values.

    Attributes:
        relative_computation_error: Largest relative error of computing the values again.
        relative_rounding_error: Largest relative error of rounding activations to the dtype in
            which they are stored.
        max_fraction_of_differences: At a hook with integers, such as the numbers of experts, the
            largest fraction of a sample's values that may differ, from 0 to 1. At a hook with
            codes, the same for the active features.
    """

    relative_computation_error: float
    relative_rounding_error: float
    max_fraction_of_differences: float

    @property
    def relative_activation_error(self) -> float:
        """The largest allowed relative error of recomputed activations.

        It allows for the error of computing the values again, and for the error of rounding them to
        the dtype in which they are stored.
        """
        return self.relative_computation_error + self.relative_rounding_error

    def max_different_numbers(self, compared_count: int) -> int:
        """Returns how many stored integers or features of a sample may differ from recomputed ones.

        The result is `max_fraction_of_differences` times `compared_count`, but at least TIE (2),
        because a tie changes two numbers. For example, if the router's scores of two experts are
        nearly equal, a small error can reverse their order, and then two integers differ.

        Args:
            compared_count: Number of integers that are compared, or of features at a hook with
                codes.
        """
        return max(int(self.max_fraction_of_differences * compared_count), TIE)


@dataclass(frozen=True)
class StoredHook(ABC):
    """Describes one hook of a run, and converts, sums, reads and compares the values at this hook.

    Values are passed in one of three forms, which the docstring of the module defines: as rows (an
    array with one row per token), in the form that users get, or in the form that files contain.

    Attributes:
        key: Key of the hook in pickles: the number of its layer, or the name by which the user
            selects the hook.
        name: Full name of the hook.
        width: Number of values of a token; for codes, number of all features. 0 if it is not known
            yet, because a program with a loop of its own has not stored a sample.
        stored_dtype_name: Name of the dtype of the values in files. "" if the first sample of a
            program with a loop of its own determines the dtype.
    """

    key: HookKey
    name: str
    width: int
    stored_dtype_name: str

    # The following members describe the values.

    @property
    @abstractmethod
    def user_dtype(self) -> np.dtype:
        """The dtype of the values that users get, unless they ask for another dtype."""

    @property
    @abstractmethod
    def values_are_activations(self) -> bool:
        """Whether the values are activations. Codes, losses and token ids, for example, are not.

        Readers convert only activations to a dtype that the user asks for. If they leave out tokens
        with large norms, they compute norms of activations only.
        """

    @property
    @abstractmethod
    def values_are_array(self) -> bool:
        """Whether users get the values as an array, and not as `Codes`.

        Programs with a loop of their own can only store arrays. The statistics file of a shard only
        contains the sums of hooks with arrays.
        """

    @property
    @abstractmethod
    def max_values(self) -> int:
        """The largest number of values that are stored for a token."""

    # The following members are used to write shards.

    @property
    @abstractmethod
    def tensor_names(self) -> list[str]:
        """The names of the hook's tensors in a safetensors shard."""

    @property
    def can_be_in_pickles(self) -> bool:
        """Whether pickles can contain the values. Safetensors can contain every kind of values."""
        return True

    @property
    @abstractmethod
    def values_are_float8(self) -> bool:
        """Whether shards contain the values as float8, so that `encode` converts them.

        If True, the original and the converted values need memory together while a shard is
        encoded.
        """

    def stored_as(self, dtype: str) -> str:
        """Returns the name of the dtype that the values have in files.

        Args:
            dtype: Name of the dtype that the values have in memory, before they are encoded.
        """
        return dtype

    def for_shard(self, rows: np.ndarray) -> Any:
        """Returns the values of a sample as they are kept in memory until their shard is full.

        Args:
            rows: Values of the sample as an array with one row per stored token.

        Returns:
            An array in the stored dtype for dense values, or `Codes` for codes. If the values are
            stored as float8 (see `values_are_float8`), `rows` unchanged, which `encode` converts
            later.
        """
        return rows

    @abstractmethod
    def bytes_of(self, values: Any) -> int:
        """Returns the number of bytes that the values of a sample at this hook take in a shard.

        The number is the size before compression. A shard is full when the sum of these numbers
        over its samples and hooks reaches the limit. If the values are arrays, a sample without
        tokens counts as one token.

        Args:
            values: Values of the sample, as `for_shard` returns them.
        """

    def encode(
        self, samples: list[Any], positions: Sequence[np.ndarray], threads: Executor
    ) -> tuple[list[Any], ErrorByTokenKind]:
        """Converts the values of samples to the form in which a shard stores them.

        Args:
            samples: Values of each sample, as `for_shard` returns them.
            positions: Positions of each sample's tokens, int32 (tokens,).
            threads: Threads that encode slices of the samples.

        Returns:
            A tuple of:
                The values of each sample, in the stored form.
                The encoding errors (see `EncodingError`), measured on some of the tokens: a dict
                with the error of the first tokens of samples (position 0) under the key "sinks",
                and the error of all other tokens under "others". It is empty if the values are not
                stored as float8 (see `values_are_float8`).
        """
        return samples, {}

    @abstractmethod
    def sums(self, samples: Sequence[Any], positions: Sequence[np.ndarray]) -> Sums | SumsOfCodes:
        """Returns sums over all tokens of some samples, from which statistics are computed.

        Each sum has two items: for the first tokens of samples (position 0), which are often
        attention sinks, and for all other tokens.

        Args:
            samples: Values of each sample, as `encode` returns them; at least one sample.
            positions: Positions of each sample's tokens, int32 (tokens,), which tell the first
                tokens from the others.

        Returns:
            `Sums` for arrays: number of tokens, sum of their norms, sums of the values and of the
            squared values in each dimension, and the largest norm. `SumsOfCodes` for codes: number
            of tokens and of active features, and sums of the squared norms of the activations and
            of the errors of reconstruction. store/statistics.py declares both classes.
        """

    def to_json(self, values: Any) -> dict[str, Any]:
        """Returns the description of the hook in the JSON of a shard, without the statistics.

        Args:
            values: Values of one sample of the shard, as `encode` returns them.

        Returns:
            A dict with "key", "name", "width", "dtype" and "scale". The scale is None if the values
            have no scales, otherwise the number of values that share a scale.
        """
        return {
            "key": self.key,
            "name": self.name,
            "width": values.shape[1],
            "dtype": values.dtype.name,
            "scale": None,
        }

    @abstractmethod
    def tensors(self, samples: Sequence[Any]) -> dict[str, list[np.ndarray]]:
        """Returns the tensors in which a safetensors shard contains the values at this hook.

        Args:
            samples: Values of each sample of the shard, as `encode` returns them.

        Returns:
            A dict from the name of each tensor to a list of arrays, which are the tensor if they
            are concatenated along the first axis.
        """

    @abstractmethod
    def record(self, values: Any) -> dict[str, np.ndarray]:
        """Returns the part of a sample's record in a pickle that contains the values at this hook.

        Args:
            values: Values of the sample at this hook, as `encode` returns them.

        Returns:
            A dict: name of a field of the record -> array. A dense hook has one field with its
            values, and a hook with codes has a field for each array of its codes. pickle_file.py
            describes the fields and the rest of the record.

        Raises:
            ValueError: If the values are stored as float8, which pickles do not support.
        """

    # The following members are used to read shards.

    @abstractmethod
    def from_record(self, record: Mapping[str, Any]) -> Any:
        """Returns the values of one sample at this hook from the record of the sample in a pickle.

        Args:
            record: Record of the sample, as pickle_file.py describes it.

        Returns:
            The values as a shard in memory contains them: an array (tokens, width) at a dense hook,
            and `Codes` at a hook with codes.

        Raises:
            KeyError: If the record lacks a field.
            TypeError: If a field has a value of another type.
            AttributeError: If a field has a value of another type.
            ValueError: If the fields are inconsistent, or if the values are stored as float8,
                which pickles do not support.
        """

    @property
    @abstractmethod
    def row_dtype(self) -> np.dtype:
        """The NumPy dtype of a token's row, a subarray dtype with the shape of the row."""

    @property
    @abstractmethod
    def min_token_bytes(self) -> int:
        """The smallest number of bytes that the values of a token can take in a shard.

        This is the size before compression. For codes, it is the size of a token without active
        features.
        """

    @abstractmethod
    def expected_dtypes_and_shapes(self, tokens: int) -> dict[str, tuple[np.dtype, Shape]]:
        """Returns the dtypes and shapes that the tensors of a safetensors shard must have.

        Readers check the tensors of this hook with them. Tensors whose shape does not follow from
        the number of tokens are left out.

        Args:
            tokens: Number of tokens in the shard.

        Returns:
            A dict from the name of each tensor to a tuple of its dtype and its shape.
        """

    @abstractmethod
    def begin_rows(
        self, file: TensorFile, start: int, stop: int, dtype: Any = None
    ) -> Callable[[], np.ndarray]:
        """Begins to read the values of consecutive tokens at this hook from a safetensors shard.

        Args:
            file: File of the shard.
            start: Index of the first token in the shard.
            stop: Index of the token after the last one. If it equals `start`, nothing is read.
            dtype: Dtype to which float8 activations are decoded. None for `user_dtype`. Values of
                other kinds are returned in the stored dtype.

        Returns:
            A function that waits for the rows and returns them, an array with one row per token.
        """

    def for_user(self, rows: np.ndarray) -> Values:
        """Converts the values of tokens to the form that users get.

        Args:
            rows: Values as an array with one row per token. At a hook with codes, each row is a
                record of codes (common/codes.py).

        Returns:
            An array (tokens, width), or `Codes` at a hook with codes.
        """
        return rows

    # The following member is used by --verify, which compares stored with recomputed values.

    @abstractmethod
    def differences(
        self, stored: Any, recomputed: Any, positions: np.ndarray, tolerance: Tolerance
    ) -> Iterator[str]:
        """Compares the stored values of a sample at this hook with recomputed values.

        Args:
            stored: Stored values of the sample, as `for_user` returns them.
            recomputed: Recomputed values of the sample, as `for_user` returns them.
            positions: Positions of the sample's tokens, int32 (tokens,). If the hook is the loss,
                position 0 is not compared, because the first token of a sample has no loss.
            tolerance: Largest differences that are allowed.

        Yields:
            A message for each difference that is larger than the tolerance allows.
        """


@dataclass(frozen=True)
class DenseHook(StoredHook):
    """A hook whose values are stored without encoding.

    A safetensors shard contains one tensor, which has the full name of the hook and the shape
    (tokens, width).

    Attributes:
        meaning: Meaning of the values:

            activations: Activations in the dtype in which the run stores them.
            integers: Indices of experts, or token ids, int32. They have no statistics.
            loss: Loss at each token, float32, width 1. The first token of a sample has no loss, so
                its value is NaN.
            numbers: Other float32 numbers, such as entropies and log-probabilities.
    """

    meaning: Literal["activations", "integers", "loss", "numbers"] = "activations"
    values_are_array = True  # users get the values as an array
    values_are_float8 = False

    @property
    def user_dtype(self) -> np.dtype:
        return np.dtype(self.stored_dtype_name)

    @property
    def values_are_activations(self) -> bool:
        return self.meaning == "activations"

    @property
    def max_values(self) -> int:
        return self.width

    @property
    def tensor_names(self) -> list[str]:
        return [self.name]

    def bytes_of(self, values: np.ndarray) -> int:
        return max(len(values), 1) * values.shape[1] * values.itemsize

    def sums(self, samples: Sequence[np.ndarray], positions: Sequence[np.ndarray]) -> Sums:
        if self.meaning == "integers":
            return Sums.zeros(samples[0].shape[1])
        concatenated_values = np.concatenate(samples)
        positions_of_summed_tokens = np.concatenate(positions)
        if self.meaning == "loss":
            mask_of_tokens_with_loss = self._mask_of_tokens_with_loss(
                concatenated_values, positions_of_summed_tokens
            )
            concatenated_values = concatenated_values[mask_of_tokens_with_loss]
            positions_of_summed_tokens = positions_of_summed_tokens[mask_of_tokens_with_loss]
        return sums_of(
            concatenated_values.__getitem__,
            concatenated_values.shape[1],
            positions_of_summed_tokens,
        )

    @staticmethod
    def _mask_of_tokens_with_loss(values: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns a mask of the tokens that have a loss, bool (tokens,).

        The first token of a sample has a loss only if its value is not NaN. Every other token is in
        the mask even if its value is NaN, so that statistics and --verify show this error.

        Args:
            values: Value of each token, float32 (tokens, 1).
            positions: Position of each token in its sample, int32 (tokens,).
        """
        return (positions != 0) | ~np.isnan(values).any(axis=1)

    def tensors(self, samples: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        return {self.name: list(samples)}

    def record(self, values: np.ndarray) -> dict[str, np.ndarray]:
        return {"activation": values}

    def from_record(self, record: Mapping[str, Any]) -> np.ndarray:
        sample_values: np.ndarray = record["activation"]
        return sample_values

    @property
    def row_dtype(self) -> np.dtype:
        return np.dtype((self.user_dtype, (self.width,)))

    @property
    def min_token_bytes(self) -> int:
        return token_bytes(self.width, self.stored_dtype_name)

    def expected_dtypes_and_shapes(self, tokens: int) -> dict[str, tuple[np.dtype, Shape]]:
        return {self.name: (self.user_dtype, (tokens, self.width))}

    def begin_rows(
        self, file: TensorFile, start: int, stop: int, dtype: Any = None
    ) -> Callable[[], np.ndarray]:
        if start == stop:
            return lambda: np.empty(0, self.row_dtype)
        return file.begin_rows(self.name, start, stop)

    def differences(
        self,
        stored: np.ndarray,
        recomputed: np.ndarray,
        positions: np.ndarray,
        tolerance: Tolerance,
    ) -> Iterator[str]:
        if self.meaning == "integers":
            difference_count = int((recomputed != stored).sum())
            max_difference_count = tolerance.max_different_numbers(stored.size)
            if difference_count > max_difference_count:
                yield (
                    f"{difference_count} of its {stored.size} numbers differ "
                    f"(allowed: {max_difference_count})"
                )
        elif self.meaning == "loss":
            mask_of_tokens_with_loss = self._mask_of_tokens_with_loss(stored, positions)
            mask_of_tokens_with_loss |= self._mask_of_tokens_with_loss(recomputed, positions)
            yield from _norm_difference(
                stored[mask_of_tokens_with_loss],
                recomputed[mask_of_tokens_with_loss],
                tolerance.relative_computation_error,
            )
        elif self.meaning == "numbers":
            # Numbers such as entropies are stored in the dtype in which they are computed, so no
            # rounding error is added.
            yield from _norm_difference(stored, recomputed, tolerance.relative_computation_error)
        else:
            yield from _norm_difference(stored, recomputed, tolerance.relative_activation_error)


@dataclass(frozen=True)
class Float8Hook(StoredHook):
    """A hook with activations in one byte per value, which only safetensors shards can contain.

    common/encodings.py defines the encoding. A shard contains two tensors: `NAME` contains the
    values, e4m3 (tokens, width), and `NAME.scale` the scale of each token, float32 (tokens, 1).
    NAME is the full name of the hook.
    """

    stored_dtype_name: str = VALUE_DTYPE.name
    user_dtype = FLOAT32
    values_are_activations = True
    values_are_array = True  # users get the values as an array
    values_are_float8 = True
    can_be_in_pickles = False

    @property
    def max_values(self) -> int:
        return self.width

    @property
    def tensor_names(self) -> list[str]:
        return [self.name, self.name + SCALE]

    def stored_as(self, dtype: str) -> str:
        return VALUE_DTYPE.name

    def bytes_of(self, values: np.ndarray) -> int:
        return max(len(values), 1) * token_bytes(values.shape[1], FLOAT8)

    def encode(
        self, samples: list[np.ndarray], positions: Sequence[np.ndarray], threads: Executor
    ) -> tuple[list[Float8Array], ErrorByTokenKind]:
        sample_offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
        sink_token_mask = np.concatenate(positions) == 0
        measured_token_mask = _evenly_chosen(sink_token_mask) | _evenly_chosen(~sink_token_mask)

        def encode_slice(sample_slice: slice) -> tuple[list[Float8Array], np.ndarray]:
            offsets_of_slice = sample_offsets[sample_slice.start : sample_slice.stop + 1]
            start_token_index, stop_token_index = offsets_of_slice[[0, -1]]
            activations_of_slice = np.concatenate(samples[sample_slice])
            float8_array = Float8Array.of(activations_of_slice)
            measured_mask_of_slice = measured_token_mask[start_token_index:stop_token_index]
            decoded_values = float8_array[measured_mask_of_slice].decode()
            token_errors = relative_errors(
                activations_of_slice[measured_mask_of_slice], decoded_values
            )
            return float8_array.split(offsets_of_slice[1:-1] - start_token_index), token_errors

        float8_arrays_of_samples: list[Float8Array] = []
        errors_of_slices: list[np.ndarray] = []
        for float8_arrays_of_slice, encoding_errors_of_slice in threads.map(
            encode_slice, slices_of(samples)
        ):
            float8_arrays_of_samples += float8_arrays_of_slice
            errors_of_slices.append(encoding_errors_of_slice)
        measured_errors = np.concatenate(errors_of_slices)
        sink_mask_of_measured_tokens = sink_token_mask[measured_token_mask]
        return float8_arrays_of_samples, {
            "sinks": EncodingError.of(measured_errors[sink_mask_of_measured_tokens]),
            "others": EncodingError.of(measured_errors[~sink_mask_of_measured_tokens]),
        }

    def sums(self, samples: Sequence[Float8Array], positions: Sequence[np.ndarray]) -> Sums:
        float8_array = Float8Array.concatenate(samples)

        def decode(tokens: slice) -> np.ndarray:
            return float8_array[tokens].decode()

        return sums_of(decode, float8_array.shape[1], np.concatenate(positions))

    def to_json(self, values: Float8Array) -> dict[str, Any]:
        return super().to_json(values) | {"scale": values.shape[1]}

    def tensors(self, samples: Sequence[Float8Array]) -> dict[str, list[np.ndarray]]:
        return {
            self.name: [float8_array.values for float8_array in samples],
            self.name + SCALE: [float8_array.scales for float8_array in samples],
        }

    def record(self, values: Float8Array) -> dict[str, np.ndarray]:
        raise ValueError(f"{self.name}: pickles do not hold float8")

    def from_record(self, record: Mapping[str, Any]) -> Float8Array:
        raise ValueError(f"{self.name}: pickles do not hold float8")

    @property
    def row_dtype(self) -> np.dtype:
        return np.dtype((FLOAT32, (self.width,)))

    @property
    def min_token_bytes(self) -> int:
        return token_bytes(self.width, FLOAT8)

    def expected_dtypes_and_shapes(self, tokens: int) -> dict[str, tuple[np.dtype, Shape]]:
        return {
            self.name: (VALUE_DTYPE, (tokens, self.width)),
            self.name + SCALE: (SCALE_DTYPE, (tokens, 1)),
        }

    def begin_rows(
        self, file: TensorFile, start: int, stop: int, dtype: Any = None
    ) -> Callable[[], np.ndarray]:
        if start == stop:
            return lambda: np.empty(0, self.row_dtype)
        wait_for_value_rows = file.begin_rows(self.name, start, stop)
        wait_for_scale_rows = file.begin_rows(self.name + SCALE, start, stop)
        return lambda: Float8Array(wait_for_value_rows(), wait_for_scale_rows()).decode(
            dtype or FLOAT32
        )

    def differences(
        self,
        stored: np.ndarray,
        recomputed: np.ndarray,
        positions: np.ndarray,
        tolerance: Tolerance,
    ) -> Iterator[str]:
        yield from _norm_difference(stored, recomputed, tolerance.relative_activation_error)


@dataclass(frozen=True)
class CodeHook(StoredHook):
    """A hook with the codes of an autoencoder: the active features of each token.

    A safetensors shard contains five tensors, `NAME.ids`, `NAME.values`, `NAME.offsets`,
    `NAME.error` and `NAME.norm`, where NAME is the full name of the hook. A record in a pickle
    contains fields named "ids", "values" and so on. They are the arrays of `Codes`, which
    common/codes.py describes.

    Attributes:
        max_features_per_token: Largest number of features stored for a token. 0 in a process that
            writes codes, which does not need this number.
    """

    max_features_per_token: int
    user_dtype = FLOAT32
    values_are_activations = False  # the values are codes
    values_are_array = False  # users get the values as `Codes`
    values_are_float8 = False

    @property
    def max_values(self) -> int:
        return self.max_features_per_token

    @property
    def tensor_names(self) -> list[str]:
        return [f"{self.name}.{array_name}" for array_name in ARRAYS]

    def for_shard(self, rows: np.ndarray) -> Codes:
        return Codes.of(rows, self.width, self.stored_dtype_name)

    def bytes_of(self, values: Codes) -> int:
        return values.nbytes

    def sums(self, samples: Sequence[Codes], positions: Sequence[np.ndarray]) -> SumsOfCodes:
        return reduce(SumsOfCodes.merge, map(self._sums_of_sample, samples, positions))

    @staticmethod
    def _sums_of_sample(codes: Codes, positions: np.ndarray) -> SumsOfCodes:
        sink_token_mask = positions == 0
        return SumsOfCodes(
            CodeSums.of(codes, sink_token_mask), CodeSums.of(codes, ~sink_token_mask)
        )

    def tensors(self, samples: Sequence[Codes]) -> dict[str, list[np.ndarray]]:
        concatenated_codes = Codes.concatenate(samples)
        return {
            f"{self.name}.{array_name}": [getattr(concatenated_codes, field_name)]
            for array_name, field_name in ARRAYS.items()
        }

    def record(self, values: Codes) -> dict[str, np.ndarray]:
        return {
            array_name: getattr(values, field_name) for array_name, field_name in ARRAYS.items()
        }

    def from_record(self, record: Mapping[str, Any]) -> Codes:
        array_by_field_name = {
            field_name: np.asarray(record[array_name]) for array_name, field_name in ARRAYS.items()
        }
        sample_codes = Codes(**array_by_field_name, features=record["shape"][1])
        first_offset, last_offset = sample_codes.indptr[[0, -1]].tolist()
        distinct_entry_counts = {last_offset, len(sample_codes.indices), len(sample_codes.data)}
        are_offsets_ascending = (np.diff(sample_codes.indptr) >= 0).all()
        if first_offset != 0 or len(distinct_entry_counts) != 1 or not are_offsets_ascending:
            raise ValueError(f"sample {record['sample_idx']}: its codes do not fit their offsets")
        return sample_codes

    @property
    def row_dtype(self) -> np.dtype:
        return np.dtype((np.int32, (record_width(self.max_features_per_token),)))

    @property
    def min_token_bytes(self) -> int:
        return code_bytes(0, self.stored_dtype_name)

    def expected_dtypes_and_shapes(self, tokens: int) -> dict[str, tuple[np.dtype, Shape]]:
        return {
            f"{self.name}.offsets": (np.dtype(np.int64), (tokens + 1,)),
            f"{self.name}.error": (FLOAT32, (tokens,)),
            f"{self.name}.norm": (FLOAT32, (tokens,)),
        }

    def begin_rows(
        self, file: TensorFile, start: int, stop: int, dtype: Any = None
    ) -> Callable[[], np.ndarray]:
        if start == stop:
            return lambda: np.empty(0, self.row_dtype)
        token_offsets = file.begin_rows(f"{self.name}.offsets", start, stop + 1)()
        first_value_index, stop_value_index = token_offsets[[0, -1]].tolist()
        wait_for_feature_ids = file.begin_rows(
            f"{self.name}.ids", first_value_index, stop_value_index
        )
        wait_for_feature_values = file.begin_rows(
            f"{self.name}.values", first_value_index, stop_value_index
        )
        wait_for_error_rows = file.begin_rows(f"{self.name}.error", start, stop)
        wait_for_norm_rows = file.begin_rows(f"{self.name}.norm", start, stop)

        def wait() -> np.ndarray:
            # Index of each token's first feature among the features that are read. One more item at
            # the end is the number of these features.
            relative_token_offsets = token_offsets - first_value_index
            codes_of_token_range = Codes(
                relative_token_offsets,
                wait_for_feature_ids(),
                wait_for_feature_values(),
                wait_for_error_rows(),
                wait_for_norm_rows(),
                self.width,
            )
            return codes_of_token_range.records(self.max_features_per_token)

        return wait

    def for_user(self, rows: np.ndarray) -> Codes:
        return Codes.of(rows, self.width)

    def differences(
        self, stored: Codes, recomputed: Codes, positions: np.ndarray, tolerance: Tolerance
    ) -> Iterator[str]:
        """Compares the stored codes of a sample at this hook with recomputed codes.

        The active features, their values, the norms of the activations and the errors of
        reconstruction are compared. Values are compared only for the features that are active in
        both codes.

        Args:
            stored: Stored codes of the sample.
            recomputed: Recomputed codes of the sample.
            positions: Positions of the sample's tokens. They are not used.
            tolerance: Largest differences that are allowed.

        Yields:
            A message for each of the four quantities that differs more than is allowed.
        """
        stored_flat_indices = self._flat_feature_indices(stored)
        recomputed_flat_indices = self._flat_feature_indices(recomputed)
        common_flat_indices, indices_into_stored_data, indices_into_recomputed_data = (
            np.intersect1d(
                stored_flat_indices,
                recomputed_flat_indices,
                assume_unique=True,
                return_indices=True,
            )
        )
        # A feature that is active at several tokens counts once for each of them.
        stored_active_feature_count = len(stored_flat_indices)
        # A feature that is active in only one of the two codes is a difference.
        difference_count = (
            stored_active_feature_count
            + len(recomputed_flat_indices)
            - 2 * len(common_flat_indices)
        )
        max_difference_count = tolerance.max_different_numbers(stored_active_feature_count)
        if difference_count > max_difference_count:
            yield (
                f"{difference_count} of its {stored_active_feature_count} features differ "
                f"(allowed: {max_difference_count})"
            )
        # Name of a quantity -> its stored array and its recomputed array.
        array_pair_by_quantity = {
            "values": (
                stored.data[indices_into_stored_data],
                recomputed.data[indices_into_recomputed_data],
            ),
            "norms": (stored.norm, recomputed.norm),
            "errors": (_root(stored.error), _root(recomputed.error)),
        }
        # Codes may differ twice as much as activations, because the computations after the
        # activation add errors: the product of the activation and the encoder's weights, and the
        # difference between the activation and its reconstruction.
        allowed_relative_error = 2 * tolerance.relative_activation_error
        for quantity_name, (stored_array, recomputed_array) in array_pair_by_quantity.items():
            relative_error = _relative_error(stored_array, recomputed_array)
            if not relative_error <= allowed_relative_error:
                yield (
                    f"its {quantity_name} differ by {relative_error:.2g} of their norm "
                    f"(allowed: {allowed_relative_error:g})"
                )

    def _flat_feature_indices(self, codes: Codes) -> np.ndarray:
        """Returns the index of each active feature in the flattened array (tokens, width).

        Args:
            codes: Codes of some tokens.

        Returns:
            The indices, int64 (active features of all tokens,).
        """
        token_indices_of_active_features = np.repeat(np.arange(len(codes)), np.diff(codes.indptr))
        return token_indices_of_active_features * self.width + codes.indices


def slices_of(samples: Iterable[Any]) -> Iterator[slice]:
    """Divides the samples of a shard into slices. A thread processes one slice at a time.

    Args:
        samples: Values of each sample at one hook: NumPy arrays, `Float8Array` or `Codes`. Their
            attribute `nbytes` is their size in bytes.

    Yields:
        Slices of consecutive samples whose values have about SLICE_BYTES bytes together.
    """
    start_sample_index = 0
    num_slice_bytes = 0
    stop_sample_index = 0
    for stop_sample_index, sample_values in enumerate(samples, 1):
        num_slice_bytes += sample_values.nbytes
        if num_slice_bytes >= SLICE_BYTES:
            yield slice(start_sample_index, stop_sample_index)
            start_sample_index = stop_sample_index
            num_slice_bytes = 0
    if start_sample_index < stop_sample_index:
        yield slice(start_sample_index, stop_sample_index)


def _evenly_chosen(mask: np.ndarray) -> np.ndarray:
    """Chooses at most MAX_MEASURED_TOKENS tokens, at equal intervals.

    Args:
        mask: Mask of the tokens from which to choose, bool (tokens,).

    Returns:
        A mask of the chosen tokens, bool (tokens,).
    """
    indices_of_tokens_in_mask = np.flatnonzero(mask)
    token_stride = max(math.ceil(len(indices_of_tokens_in_mask) / MAX_MEASURED_TOKENS), 1)
    chosen_token_mask = np.zeros(len(mask), bool)
    chosen_token_mask[indices_of_tokens_in_mask[::token_stride]] = True
    return chosen_token_mask


def _root(squares: np.ndarray) -> np.ndarray:
    return np.sqrt(squares.astype(np.float64))


def _relative_error(stored: np.ndarray, recomputed: np.ndarray) -> float:
    """Returns the norm of the difference of two arrays, divided by the norm of `stored`."""
    stored_values_in_float64 = stored.astype(np.float64)
    value_differences = recomputed.astype(np.float64) - stored_values_in_float64
    stored_norm = float(np.linalg.norm(stored_values_in_float64))
    return float(np.linalg.norm(value_differences)) / max(stored_norm, 1e-30)


def _norm_difference(stored: np.ndarray, recomputed: np.ndarray, limit: float) -> Iterator[str]:
    """Yields one message if all recomputed values together have too large a relative error.

    The relative error is the Euclidean norm of all differences, divided by the norm of the
    stored values (see `_relative_error`).

    Args:
        stored: Values in the shard, of any shape.
        recomputed: Values that were computed again, of the same shape.
        limit: Largest relative error for which there is no message. There is always one for NaN.
    """
    relative_error = _relative_error(stored, recomputed)
    if not relative_error <= limit:  # this condition is also true for NaN
        yield f"it differs by {relative_error:.2g} of its norm (allowed: {limit:g})"
