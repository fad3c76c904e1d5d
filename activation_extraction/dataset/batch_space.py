"""Memory in which batches are put together token by token.

It has a slot for each batch of two windows, and all slots are parts of the same arrays. A token is
copied from where it was read to its place in its batch. A batch is handed out where it lies, and
its slot is used again once nobody holds any of its arrays.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from activation_extraction.dataset.reused_memory import ReusedMemory, aligned, is_aligned, owned_by
from activation_extraction.dataset.shared_work import Call
from activation_extraction.dataset.token_batch import TokenBatch, bits_of, getters_of

HELD = 2  # batches that the caller may hold in their slots: the newest one and the one before it
COLUMN_PARTS = 8  # in which rows are moved


class Part(NamedTuple):
    """Some rows of `tokens`, and the row of the space to which each of them goes."""

    tokens: TokenBatch
    rows: slice | np.ndarray
    places: np.ndarray


class Slot:
    """A slot in use. It is free again when nobody refers to this object."""

    def __init__(self, number: int, free: deque[int], lent: set[int]) -> None:
        self.number = number
        self._free = free
        self._lent = lent

    def lend(self) -> None:
        self._lent.add(self.number)

    def __del__(self) -> None:
        self._free.append(self.number)  # first, so that a slot that is not lent is free for sure
        self._lent.discard(self.number)


class BatchSpace:
    """Slots for two windows of so many batches of `size` tokens, and for what the caller holds."""

    def __init__(self, like: TokenBatch, size: int, batches: int) -> None:
        """like: a batch with the same hooks, widths and dtypes as the tokens that are put in."""
        self.size = size
        rows = size * (2 * batches + HELD)
        self._rows = like.map(lambda values: aligned((rows, *values.shape[1:]), values.dtype))
        self._getters = getters_of(like)
        self._targets = [bits_of(get(self._rows)) for get in self._getters]
        self._copies = ReusedMemory(HELD * len(self._targets))
        self._free = deque(range(2 * batches + HELD))
        self._lent: set[int] = set()

    def reserve(self, count: int) -> list[Slot]:
        """Free slots. No more than those of two windows may be in use and not lent."""
        return [Slot(self._free.pop(), self._free, self._lent) for _ in range(count)]

    def rows_of(self, slots: Sequence[Slot]) -> np.ndarray:
        """The numbers of all rows of some slots, in their order."""
        starts = np.array([slot.number for slot in slots]) * self.size
        return (starts[:, None] + np.arange(self.size)).reshape(-1)

    def scatter(self, parts: Sequence[Part]) -> list[Call]:
        """The calls that copy some parts to their places, one per array.

        They go array by array, so that few pages of memory are in use at the same time.
        """
        return [partial(self._scatter, number, parts) for number in range(len(self._targets))]

    def _scatter(self, number: int, parts: Sequence[Part]) -> None:
        target, get = self._targets[number], self._getters[number]
        for part in parts:
            target[part.places] = bits_of(get(part.tokens))[part.rows]

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Moves rows, a few columns at a time so that it takes little memory."""
        for values in self._targets:
            columns = values.reshape(len(values), -1)
            step = -(-columns.shape[1] // COLUMN_PARTS)
            for start in range(0, columns.shape[1], step):
                part = columns[:, start : start + step]
                part[targets] = part[sources]

    def batch(self, slot: Slot, length: int, dtype: str | None) -> TokenBatch:
        """The first tokens of a slot, which the caller may keep and change.

        They are copied if they have to be converted, or if the caller holds too many slots already.
        Arrays that JAX could not share are copied, too.
        """
        first = slot.number * self.size
        found = self._rows.map(lambda values: values[first : first + length])
        stored = all(
            dtype is None or values.dtype == dtype for values in found.activations.values()
        )
        if stored and len(self._lent) < HELD:
            slot.lend()
            return found.map(lambda v: owned_by(slot, v) if is_aligned(v) else self._copy(v))
        copies = found.activations.map(lambda values: self._copy(values, dtype))
        rest = map(self._copy, (found.token_ids, found.sample_idx, found.position))
        return TokenBatch(copies, *rest)

    def _copy(self, values: np.ndarray, dtype: str | None = None) -> np.ndarray:
        if dtype is None or values.dtype == dtype:
            result = self._copies.empty(values.shape, values.dtype)
            bits_of(result)[...] = bits_of(values)
        else:
            result = self._copies.empty(values.shape, np.dtype(dtype))
            np.copyto(result, values, casting="unsafe")
        return result
