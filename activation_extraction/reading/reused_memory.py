"""Memory for the arrays of batches, used again once nobody holds them."""

import math
from collections import deque

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
        block = spare.pop() if spare else np.empty(size + ALIGNMENT, np.uint8)
        start = -block.ctypes.data % ALIGNMENT
        lent = np.asarray(_Lent(block, spare))
        return lent[start : start + size].view(dtype).reshape(shape)


class _Lent:
    """A block as the owner of arrays; with the last of them, the block goes back to the spare."""

    def __init__(self, block: np.ndarray, spare: deque[np.ndarray]) -> None:
        self.__array_interface__ = block.__array_interface__
        self._block = block
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append(self._block)
