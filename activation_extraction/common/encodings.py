"""Encodes activations in one byte per value, and decodes them, with NumPy.

The activation x of a token, a vector, is stored as one scale in float32, max|x| / 448, and the
values x / scale, rounded to e4m3 (`float8_e4m3fn`, whose largest number is 448;
https://arxiv.org/abs/2209.05433). The scale of an activation of
zeros is a positive number instead of 0, so that the zeros stay zeros. If an
activation contains NaN or infinity, all of its values decode to NaN.

store/stored_hook.py writes the scales and values to files, and reads them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

# The name of the encoding, which is used in place of a dtype's name.
FLOAT8 = "float8"
VALUE_DTYPE = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE_DTYPE = np.dtype(np.float32)
LARGEST_E4M3 = 448
# The smallest scale of a token, which is the smallest normal number of float32. It is not 0, so an
# activation of zeros can be divided by its scale.
SMALLEST_SCALE = np.finfo(np.float32).tiny
# The number of values that are encoded together. It is chosen so that they fit in the CPU's caches.
VALUES_AT_ONCE = 2**17


def token_bytes(width: int, dtype: str) -> int:
    """Returns the bytes that the activation of a token takes, including its scale for FLOAT8.

    Args:
        width: The number of values of the activation.
        dtype: The name of a NumPy dtype, or FLOAT8.
    """
    if dtype == FLOAT8:
        return width * VALUE_DTYPE.itemsize + SCALE_DTYPE.itemsize
    return width * np.dtype(dtype).itemsize


@dataclass(frozen=True, eq=False)
class Float8Array:
    """The activations of some tokens at a hook, encoded as float8.

    Attributes:
        values: The activations divided by the scale of their token, e4m3, (tokens, width).
        scales: The scale of each token, float32, (tokens, 1).
    """

    values: np.ndarray
    scales: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray) -> "Float8Array":
        """Encodes activations in float8, with one scale for each token.

        Args:
            x: The activations, (tokens, width), of any floating-point dtype.
        """
        float8_values = np.empty(x.shape, VALUE_DTYPE)
        token_scales = np.empty((len(x), 1), SCALE_DTYPE)
        # Without `errstate`, NumPy would warn about activations that contain NaN or infinity.
        with np.errstate(invalid="ignore", over="ignore"):
            for token_slice in _blocks_of_tokens(x):
                activations = np.array(x[token_slice], np.float32, order="C")
                largest_magnitudes = np.abs(activations).max(axis=1, keepdims=True, initial=0)
                unclipped_scales = largest_magnitudes * np.float32(1 / LARGEST_E4M3)
                token_scales[token_slice] = np.maximum(unclipped_scales, SMALLEST_SCALE)
                activations /= token_scales[token_slice]
                float8_values[token_slice] = activations
        return cls(float8_values, token_scales)

    @classmethod
    def concatenate(cls, arrays: Sequence["Float8Array"]) -> "Float8Array":
        """Joins several arrays into one, which contains all of their tokens in order.

        Args:
            arrays: At least one array, all of the same width.
        """
        float8_values = np.concatenate([float8_array.values for float8_array in arrays])
        token_scales = np.concatenate([float8_array.scales for float8_array in arrays])
        return cls(float8_values, token_scales)

    def split(self, first_tokens: np.ndarray) -> list["Float8Array"]:
        """Splits the array into consecutive arrays, which share its memory.

        Args:
            first_tokens: The index of the first token of each array except the first one,
                ascending.

        Returns:
            The arrays, whose number is one more than the length of `first_tokens`.
        """
        values_of_parts = np.split(self.values, first_tokens)
        scales_of_parts = np.split(self.scales, first_tokens)
        return list(map(Float8Array, values_of_parts, scales_of_parts))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, tokens: Any) -> "Float8Array":
        """Returns the activations of some of the tokens.

        Args:
            tokens: A slice, a mask or an array of indices of tokens.
        """
        return Float8Array(self.values[tokens], self.scales[tokens])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `values`: the number of tokens and the width of an activation."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of `values`, which is e4m3."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """The size of `values` in bytes, without `scales`."""
        return self.values.nbytes

    def decode(self, dtype: Any = np.float32) -> np.ndarray:
        """Returns the decoded activations, (tokens, width).

        Args:
            dtype: The dtype of the returned array. The products of values and scales are computed
                in float32 and then converted.
        """
        decoded_activations = np.empty(self.values.shape, dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            for token_slice in _blocks_of_tokens(self.values):
                decoded_activations[token_slice] = (
                    self.values[token_slice].astype(np.float32) * self.scales[token_slice]
                )
        return decoded_activations


def _blocks_of_tokens(x: np.ndarray) -> Iterator[slice]:
    """Divides the tokens of an array into consecutive slices, which are processed in turn.

    Args:
        x: An array (tokens, width).

    Yields:
        A slice of the first axis. It contains at most VALUES_AT_ONCE values, or a single token if
        one token has more values than this.
    """
    tokens_per_block = max(VALUES_AT_ONCE // max(x.shape[1], 1), 1)
    for first_token_index in range(0, len(x), tokens_per_block):
        yield slice(first_token_index, min(first_token_index + tokens_per_block, len(x)))


def relative_errors(x: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """Returns the relative error ||x - decoded|| / ||x|| of each token, float64 (tokens,).

    Args:
        x: The activations before encoding, (tokens, width). A norm of 0 counts as 1.
        decoded: The same activations after decoding.
    """
    float64_activations = x.astype(np.float64)
    norms = np.linalg.norm(float64_activations, axis=1)
    error_norms = np.linalg.norm(float64_activations - decoded, axis=1)
    return error_norms / np.where(norms == 0, 1, norms)
