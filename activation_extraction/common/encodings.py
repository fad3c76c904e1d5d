"""Encodings of activations in one byte per value: their formulas, layouts, and NumPy code.

float8: a token has one scale, max|x| / 448 in float32, and a value is x / scale, rounded to e4m3
(`float8_e4m3fn`, whose largest number is 448; https://arxiv.org/abs/2209.05433).

int8: as GGML's Q8_0 (https://github.com/ggml-org/ggml), 32 consecutive values of a token have one
scale, max|x| / 127, but rounded up to float16; a value is the whole number nearest to x / scale.
The last block of a token may be shorter.

A scale is always positive, so that zeros stay zeros. Numbers smaller than the smallest normal
float32 count as zero, because some processors treat them so. If a token (float8) or a block (int8)
has NaN or an infinite value, all of its values decode to NaN; so do those of an int8 block with
values above 8.3 million, whose scale float16 cannot hold.

`encode` also measures the relative error of every token. Its result is packed: an array of bytes
(..., row), where a row has a token's values, its scales, and its error, a float32.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

ERROR_BYTES = 4
TINY = float(np.finfo(np.float32).tiny)  # the smallest normal number
DECODED_AT_ONCE = 2**16  # values, which stay in a core's caches


@dataclass(frozen=True)
class Encoding:
    """How activations are encoded.

    values, scales: the dtypes of both. largest: the largest number that is used for a value. block:
    how many consecutive values share a scale; None: all values of a token do.
    """

    name: str
    values: np.dtype
    scales: np.dtype
    largest: int
    block: int | None = None

    def per_scale(self, width: int) -> int:
        """Returns how many consecutive values share a scale."""
        return self.block or width

    def scales_of(self, width: int) -> int:
        """Returns how many scales a token has."""
        return -(-width // self.per_scale(width))

    def stored_bytes(self, width: int) -> int:
        """Returns how many bytes of a token are stored: its values and its scales."""
        return width + self.scales_of(width) * self.scales.itemsize

    def row_bytes(self, width: int) -> int:
        """Returns the length of a packed row."""
        return self.stored_bytes(width) + ERROR_BYTES

    def width_of(self, row: int) -> int:
        """Returns the width of an activation from the length of its packed row.

        Raises ValueError if no width has such rows.
        """
        stored, scale = row - ERROR_BYTES, self.scales.itemsize
        width = stored - scale * (1 if self.block is None else -(-stored // (self.block + scale)))
        if width < 1 or self.row_bytes(width) != row:
            raise ValueError(f"{row} bytes per token are no packed {self.name} activation")
        return width


FLOAT8 = Encoding("float8", np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float32), 448)
INT8 = Encoding("int8", np.dtype(np.int8), np.dtype(np.float16), 127, 32)
ENCODINGS = {encoding.name: encoding for encoding in (FLOAT8, INT8)}
OF_DTYPE = {encoding.values.name: encoding for encoding in ENCODINGS.values()}  # of the values


def token_bytes(width: int, dtype: str) -> int:
    """Returns how many bytes of a token are stored. dtype: one of NumPy's, that of an encoding's
    values, or the name of an encoding."""
    encoding = ENCODINGS.get(dtype) or OF_DTYPE.get(dtype)
    return width * np.dtype(dtype).itemsize if encoding is None else encoding.stored_bytes(width)


def encode(x: Any, encoding: Encoding, library: Any = np) -> Any:
    """Returns the packed rows of activations, uint8 (..., row).

    x: (..., width), of any floating-point type. library: jax.numpy if x is an array of JAX's. Both
    libraries give the same values and scales, bit by bit; their errors may differ in rounding.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # for NaN and infinity
        return _encode(x.astype(np.float32), encoding, library)


def _encode(x: Any, encoding: Encoding, xp: Any) -> Any:
    width, block = x.shape[-1], encoding.per_scale(x.shape[-1])
    leading, scales_of = x.shape[:-1], encoding.scales_of(width)
    x = xp.where(xp.abs(x) < TINY, xp.zeros_like(x), x)
    if padding := scales_of * block - width:
        x = xp.concatenate([x, xp.zeros((*leading, padding), x.dtype)], axis=-1)
    x = x.reshape(*leading, scales_of, block)
    largest = xp.max(xp.abs(x), axis=-1, keepdims=True)
    # XLA multiplies by the inverse of a constant, too, where a program divides by one.
    wanted = xp.maximum(largest * np.float32(1 / encoding.largest), np.float32(TINY))
    scales = _rounded_up(wanted) if encoding.scales == np.float16 else wanted
    scale = scales.astype(np.float32)
    scaled = x / scale
    rounded = _to_e4m3(scaled, xp) if encoding is FLOAT8 else xp.rint(scaled)  # ties to even
    error = _relative_error(x, rounded * scale, largest, xp)
    values = rounded.astype(encoding.values).reshape(*leading, scales_of * block)[..., :width]
    parts = [values, scales.reshape(*leading, scales_of), error.astype(np.float32)]
    return xp.concatenate([_bytes(part, xp) for part in parts], axis=-1)


def _rounded_up(x: Any) -> Any:
    """Returns the smallest float16 that is not smaller than x, a positive float32."""
    nearest = x.astype(np.float16)
    smaller = nearest.astype(np.float32) < x
    return (nearest.view(np.int16) + smaller.astype(np.int16)).view(np.float16)


def _to_e4m3(x: Any, xp: Any) -> Any:
    """Rounds float32 to numbers of e4m3, and ties to even ones; the conversion is then exact.

    Conversions of some platforms would go through float16, and round twice. A division by `step`
    would not do: XLA would divide by `scale * step`, which may be 0.
    """
    exponent = xp.maximum((x.view(np.int32) >> 23) & 0xFF, np.int32(127 - 6))
    step = exponent - np.int32(3)  # the exponent of the last of 3 bits
    inverse = ((np.int32(254) - step) << 23).view(np.float32)
    return xp.rint(x * inverse) * (step << 23).view(np.float32)


def _relative_error(x: Any, decoded: Any, largest: Any, xp: Any) -> Any:
    """Returns ||x - decoded|| / ||x|| of every token, (..., 1); 0 for zeros.

    x, decoded: (..., scales, block). largest: (..., scales, 1). Both are divided by the largest
    value first, so that no square overflows.
    """
    unit = xp.maximum(xp.max(largest, axis=-2, keepdims=True), np.float32(TINY))
    squares = [xp.sum(each * each, axis=(-2, -1)) for each in ((x - decoded) / unit, x / unit)]
    return xp.sqrt(squares[0] / xp.maximum(squares[1], np.float32(1)))[..., None]


def _bytes(x: Any, xp: Any) -> Any:
    return xp.ascontiguousarray(x).view(np.uint8) if xp is np else x.view(np.uint8)


def unpack(packed: np.ndarray, encoding: Encoding) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns copies of the values (tokens, width), the scales (tokens, scales) and the errors
    (tokens,) in packed rows (tokens, row)."""
    width = encoding.width_of(packed.shape[1])
    ends = [width, encoding.stored_bytes(width)]
    parts = (np.ascontiguousarray(part) for part in np.split(packed, ends, axis=1))
    values, scales, errors = (
        part.view(dtype)
        for part, dtype in zip(parts, (encoding.values, encoding.scales, np.float32), strict=True)
    )
    return values, scales, errors[:, 0]


def fits(values: np.ndarray, scales: np.ndarray) -> bool:
    """Returns whether values (tokens, width) and scales have an encoding's dtypes and shapes."""
    encoding = OF_DTYPE.get(values.dtype.name)
    if encoding is None or scales.dtype != encoding.scales:
        return False
    tokens, width = values.shape
    return scales.shape == (tokens, encoding.scales_of(width) if width else 0)


def decode(values: np.ndarray, scales: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """Returns activations (tokens, width): each value times its scale, rounded to float32 and then
    to `dtype`."""
    tokens, width = values.shape
    encoding, decoded = OF_DTYPE[values.dtype.name], np.empty(values.shape, dtype)
    step = max(DECODED_AT_ONCE // width, 1) * 2
    block = decoded if dtype == np.float32 else np.empty((min(step, tokens), width), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, tokens, step):
            rows = slice(start, min(start + step, tokens))
            target = decoded[rows] if block is decoded else block[: rows.stop - start]
            if encoding is FLOAT8:
                _copy_e4m3(values[rows], target)
            else:
                np.copyto(target, values[rows])
            scale = scales[rows].astype(np.float32)
            if encoding.block is not None:
                scale = np.repeat(scale, encoding.block, axis=1)[:, :width]
            np.multiply(target, scale, out=target)
            if block is not decoded:
                np.copyto(decoded[rows], target, casting="unsafe")
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
    pairs = np.arange(2**16, dtype=np.uint16).view(FLOAT8.values).astype(np.float32)
    return pairs.view(np.uint64)
