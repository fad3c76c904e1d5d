"""Float8Array: activations in one byte per value, encoded and decoded with NumPy.

A token has one scale, max|x| / 448 in float32, and its activation x is stored as x / scale, rounded
to e4m3 (`float8_e4m3fn`, whose largest number is 448; https://arxiv.org/abs/2209.05433). A scale is
always positive, so that zeros stay zeros. If an activation contains NaN or infinity, all of its
values decode to NaN.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

FLOAT8 = "float8"  # the name of the encoding, which stands in place of a dtype's name
VALUES, SCALES = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float32)
LARGEST_E4M3 = 448
TINY = np.finfo(np.float32).tiny  # the smallest normal number, and the smallest scale
AT_ONCE = 2**17  # the number of values to encode at once, few enough for a core's caches


def token_bytes(width: int, dtype: str) -> int:
    """Returns the number of bytes stored of a token at a hook, including the scale for FLOAT8.

    Args:
        width: The width of the hook.
        dtype: The name of a NumPy dtype, or FLOAT8.
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
        """Encodes activations.

        Args:
            x: The activations, (tokens, width), of any floating-point dtype.
        """
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
        """Returns one array with the tokens of all parts, in order."""
        values = np.concatenate([part.values for part in parts])
        scales = np.concatenate([part.scales for part in parts])
        return cls(values, scales)

    def split(self, tokens: np.ndarray) -> list["Float8Array"]:
        """Splits the array into consecutive parts, which share its memory.

        Args:
            tokens: The index of the first token of each part but the first one, ascending.

        Returns:
            The parts, one more than `tokens` has entries.
        """
        parts = zip(np.split(self.values, tokens), np.split(self.scales, tokens), strict=True)
        return [Float8Array(values, scales) for values, scales in parts]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, tokens: Any) -> "Float8Array":
        """Returns some of the tokens; `tokens` is a slice, a mask or an array of indices."""
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
        """Returns the decoded activations, (tokens, width).

        Args:
            dtype: The dtype to return. The products of values and scales are computed in float32
                and then converted.
        """
        decoded = np.empty(self.values.shape, dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            for rows in _blocks_of_rows(self.values):
                decoded[rows] = self.values[rows].astype(np.float32) * self.scales[rows]
        return decoded


def _blocks_of_rows(x: np.ndarray) -> Iterator[slice]:
    """Yields consecutive slices of rows with about AT_ONCE values each, at least one row."""
    step = max(AT_ONCE // max(x.shape[1], 1), 1)
    for start in range(0, len(x), step):
        yield slice(start, min(start + step, len(x)))


def relative_errors(x: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """Returns the relative error ||x - decoded|| / ||x|| of each token, float64 (tokens,).

    Args:
        x: The activations before encoding, (tokens, width). The norm of a token of zeros counts
            as 1.
        decoded: The same activations after decoding.
    """
    exact = x.astype(np.float64)
    norms = np.linalg.norm(exact, axis=1)
    return np.linalg.norm(exact - decoded, axis=1) / np.where(norms == 0, 1, norms)
