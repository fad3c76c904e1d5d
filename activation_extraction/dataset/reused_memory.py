"""Memory for the arrays of batches, used again once nobody holds them."""

import math
from collections import deque
from typing import Any

import numpy as np

ALIGNMENT = 64  # bytes: JAX on CPUs shares an array's memory when it begins at a multiple of these


class ReusedMemory:
    """Memory for arrays. It is used again when nobody holds an array in it any more, because the
    first use of fresh memory can take longer than all the copying."""

    def __init__(self, most: int) -> None:
        """most: unused blocks of one size that are kept."""
        self._most = most
        self._spare: dict[int, deque[np.ndarray]] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array that begins at a multiple of ALIGNMENT."""
        size = math.prod(shape) * dtype.itemsize
        spare = self._spare.setdefault(size, deque(maxlen=self._most))
        block = spare.pop() if spare else aligned((size,), np.dtype(np.uint8))
        return owned_by(_Returned(block, spare), block).view(dtype).reshape(shape)


class _Returned:
    """Puts a block back among the spare ones when nobody refers to this object any more."""

    def __init__(self, block: np.ndarray, spare: deque[np.ndarray]) -> None:
        self._block = block
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append(self._block)


class _Lent(np.ndarray):
    """An array that keeps an owner alive."""

    owner: Any


def owned_by(owner: Any, values: np.ndarray) -> np.ndarray:
    """The same array. It and every view of it keep `owner` alive."""
    # A view of a view refers to the array behind both, unless that is of another type. So this is
    # a view of a `_Lent` that is a view of a `_Lent`.
    lent: Any = values.view(_Lent)[...]
    lent.owner = owner
    return lent.view(np.ndarray)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that begins at a multiple of ALIGNMENT, with any content."""
    size = math.prod(shape) * dtype.itemsize
    block = np.empty(size + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + size].view(dtype).reshape(shape)


def is_aligned(values: np.ndarray) -> bool:
    return values.__array_interface__["data"][0] % ALIGNMENT == 0
