"""Float8Array: activations in one byte per value. Has the formula of the encoding in NumPy.

A token has one scale, max|x| / 448 in float32, and a value is x / scale, rounded to e4m3
(`float8_e4m3fn`, whose largest number is 448; https://arxiv.org/abs/2209.05433). A scale is always
positive, so that zeros stay zeros. If a token has NaN or an infinite value, all of its values
decode to NaN.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

FLOAT8 = "float8"  # the name of the encoding, which is used where a dtype's name might be
VALUES, SCALES = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float32)
LARGEST_E4M3 = 448
TINY = np.finfo(np.float32).tiny  # the smallest normal number, and the smallest scale
AT_ONCE = 2**17  # values, which stay in a core's caches


def token_bytes(width: int, dtype: str) -> int:
    """Returns how many bytes of a token are stored: its values, and its scale if it is encoded.

    Args:
        width: The number of values of the token.
        dtype: The name of a dtype of NumPy, or FLOAT8.
    """
    if dtype == FLOAT8:
        return width * VALUES.itemsize + SCALES.itemsize
    return width * np.dtype(dtype).itemsize


@dataclass(frozen=True, eq=False)
class Float8Array:
    """The activations of some tokens as float8.

    Attributes:
        values: The values divided by the scale of their token, e4m3, (tokens, width).
        scales: The scale of each token, float32, (tokens, 1).
    """

    values: np.ndarray
    scales: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray) -> "Float8Array":
        """Encodes activations, (tokens, width), of any floating-point dtype."""
        values, scales = np.empty(x.shape, VALUES), np.empty((len(x), 1), SCALES)
        with np.errstate(invalid="ignore", over="ignore"):  # for NaN and infinity
            for rows in _blocks_of_rows(x):
                scaled = np.array(x[rows], np.float32, order="C")
                largest = np.abs(scaled).max(axis=1, keepdims=True, initial=0)
                scales[rows] = np.maximum(largest * np.float32(1 / LARGEST_E4M3), TINY)
                scaled /= scales[rows]
                values[rows] = scaled
        return cls(values, scales)

    @classmethod
    def concatenate(cls, parts: Sequence["Float8Array"]) -> "Float8Array":
        """Returns the tokens of several arrays as one."""
        values = np.concatenate([part.values for part in parts])
        scales = np.concatenate([part.scales for part in parts])
        return cls(values, scales)

    def split(self, tokens: np.ndarray) -> list["Float8Array"]:
        """Returns the array in consecutive parts, which share its memory.

        Args:
            tokens: The first token of each part but the first one, ascending.
        """
        parts = zip(np.split(self.values, tokens), np.split(self.scales, tokens), strict=True)
        return [Float8Array(values, scales) for values, scales in parts]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, tokens: Any) -> "Float8Array":
        """Returns the tokens that a slice, a mask or an array of their numbers chooses."""
        return Float8Array(self.values[tokens], self.scales[tokens])

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of tokens and the width."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the values, without the scales."""
        return self.values.nbytes

    def decode(self, dtype: Any = np.float32) -> np.ndarray:
        """Returns the activations, (tokens, width).

        Args:
            dtype: The dtype of the result. A value times its scale is rounded to float32 first.
        """
        decoded = np.empty(self.values.shape, dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            for rows in _blocks_of_rows(self.values):
                decoded[rows] = self.values[rows].astype(np.float32) * self.scales[rows]
        return decoded


def _blocks_of_rows(x: np.ndarray) -> Iterator[slice]:
    """Yields the rows of x in pieces of about AT_ONCE values."""
    step = max(AT_ONCE // max(x.shape[1], 1), 1)
    for start in range(0, len(x), step):
        yield slice(start, min(start + step, len(x)))


def relative_errors(x: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """Returns the relative error ||x - decoded|| / ||x|| of every token, float64 (tokens,).

    Args:
        x: The activations before encoding, (tokens, width). A token of zeros has the error 0.
        decoded: The same activations after decoding.
    """
    exact = x.astype(np.float64)
    norms = np.linalg.norm(exact, axis=1)
    return np.linalg.norm(exact - decoded, axis=1) / np.where(norms == 0, 1, norms)
