"""The encoding of activations in one byte per value, float8: its formula, and NumPy code for it.

A token has one scale, max|x| / 448 in float32, and a value is x / scale, rounded to e4m3
(`float8_e4m3fn`, whose largest number is 448; https://arxiv.org/abs/2209.05433). A scale is always
positive, so that zeros stay zeros. If a token has NaN or an infinite value, all of its values
decode to NaN.
"""

from collections.abc import Iterator
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

    dtype: one of NumPy's, or FLOAT8.
    """
    if dtype == FLOAT8:
        return width * VALUES.itemsize + SCALES.itemsize
    return width * np.dtype(dtype).itemsize


def encode(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values (tokens, width) and the scales (tokens, 1) of activations.

    x: (tokens, width), of any floating-point type.
    """
    values, scales = np.empty(x.shape, VALUES), np.empty((len(x), 1), SCALES)
    with np.errstate(invalid="ignore", over="ignore"):  # for NaN and infinity
        for rows in _blocks_of_rows(x):
            scaled = np.array(x[rows], np.float32, order="C")
            largest = np.abs(scaled).max(axis=1, keepdims=True, initial=0)
            scales[rows] = np.maximum(largest * np.float32(1 / LARGEST_E4M3), TINY)
            scaled /= scales[rows]
            values[rows] = scaled
    return values, scales


def _blocks_of_rows(x: np.ndarray) -> Iterator[slice]:
    """Yields the rows of x in pieces of about AT_ONCE values."""
    step = max(AT_ONCE // max(x.shape[1], 1), 1)
    for start in range(0, len(x), step):
        yield slice(start, min(start + step, len(x)))


def relative_errors(x: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """Returns ||x - decoded|| / ||x|| of every token, float64 (tokens,); 0 for zeros."""
    exact = x.astype(np.float64)
    norms = np.linalg.norm(exact, axis=1)
    return np.linalg.norm(exact - decoded, axis=1) / np.where(norms == 0, 1, norms)


def decode(values: np.ndarray, scales: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """Returns activations (tokens, width): each value times its scale, rounded to float32 and then
    to `dtype`."""
    decoded = np.empty(values.shape, dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        for rows in _blocks_of_rows(values):
            decoded[rows] = values[rows].astype(np.float32) * scales[rows]
    return decoded
