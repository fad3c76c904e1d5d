"""The encoding of activations in one byte per value, float8: its formula, and NumPy code for it.

A token has one scale, max|x| / 448 in float32, and a value is x / scale, rounded to e4m3
(`float8_e4m3fn`, whose largest number is 448; https://arxiv.org/abs/2209.05433). A scale is always
positive, so that zeros stay zeros. If a token has NaN or an infinite value, all of its values
decode to NaN.
"""

from collections.abc import Iterator
from functools import cache
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
    values, scales = np.empty(x.shape, np.uint8), np.empty((len(x), 1), SCALES)
    with np.errstate(invalid="ignore", over="ignore"):  # for NaN and infinity
        for rows in _blocks_of_rows(x):
            scaled = np.array(x[rows], np.float32, order="C")
            largest = np.abs(scaled).max(axis=1, keepdims=True, initial=0)
            scales[rows] = np.maximum(largest * np.float32(1 / LARGEST_E4M3), TINY)
            scaled /= scales[rows]
            values[rows] = _to_e4m3(scaled)
    return values.view(VALUES), scales


def _blocks_of_rows(x: np.ndarray) -> Iterator[slice]:
    """Yields the rows of x in pieces of about AT_ONCE values, all but the last an even number."""
    step = max(AT_ONCE // max(x.shape[1], 1) // 2, 1) * 2
    for start in range(0, len(x), step):
        yield slice(start, min(start + step, len(x)))


def _to_e4m3(x: np.ndarray) -> np.ndarray:
    """Rounds float32 to the bits of e4m3, ties to even, by a table that has five times the speed of
    `astype`.

    The upper half of a number, a bfloat16, is rounded as the number is once its last bit also
    stands for the lower half: e4m3 has 4 bits less.
    """
    bits = x.view(np.uint32)
    upper = bits >> 16 | (bits & 0xFFFF != 0)
    return _e4m3_of_bfloat16().take(upper, mode="clip")


@cache
def _e4m3_of_bfloat16() -> np.ndarray:
    """Returns a table from every bfloat16, as uint16, to its e4m3, as uint8."""
    with np.errstate(invalid="ignore"):
        every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(VALUES)
    return every.view(np.uint8)


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
            direct = dtype == np.float32
            block = decoded[rows] if direct else np.empty(values[rows].shape, np.float32)
            _copy_e4m3(values[rows], block)
            np.multiply(block, scales[rows], out=block)
            if not direct:
                np.copyto(decoded[rows], block, casting="unsafe")
    return decoded


def _copy_e4m3(values: np.ndarray, target: np.ndarray) -> None:
    """Copies numbers of e4m3 to a float32 array, two at a time where that is possible.

    NumPy would convert them one by one, at a third of the speed.
    """
    if values.flags.c_contiguous and values.size % 2 == 0:
        pairs, floats = values.reshape(-1).view(np.uint16), target.reshape(-1).view(np.uint64)
        np.take(_pairs_of_e4m3(), pairs, out=floats, mode="clip")
    else:
        np.copyto(target, values.astype(np.float32))


@cache
def _pairs_of_e4m3() -> np.ndarray:
    """Returns a table from every pair of numbers of e4m3, as uint16, to both in float32, as one
    uint64."""
    pairs = np.arange(2**16, dtype=np.uint16).view(VALUES).astype(np.float32)
    return pairs.view(np.uint64)
