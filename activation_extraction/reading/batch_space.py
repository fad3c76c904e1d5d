"""Memory in which batches are put together token by token.

It has a slot for each batch of two windows, and all slots are parts of the same arrays. A token is
copied from where it was read to its place in its batch. A batch is handed out where it lies, and
its slot is used again once nobody holds any of its arrays.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np

from activation_extraction.reading.reused_memory import ReusedMemory, aligned, is_aligned, owned_by
from activation_extraction.reading.shared_work import Call, SharedWork
from activation_extraction.reading.token_batch import TokenBatch, bits_of, getters_of

HELD = 2  # batches that the caller may hold in their slots: the newest one and the one before it
STAGES = 2  # one is filled while the other one is emptied
STAGE_BYTES = 8 * 2**20  # at most, so that both fit into a processor's cache
STAGE_SHARE = 8  # a stage takes at most one part in so many of a window's memory
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

    def __init__(self, like: TokenBatch, size: int, batches: int, mapped: bool) -> None:
        """like: a batch with the same hooks, widths and dtypes as the tokens that will be put in.
        mapped: whether these take no memory, so that they may wait until a window has them all."""
        self.size = size
        rows = size * (2 * batches + HELD)
        self._rows = like.map(lambda values: aligned((rows, *values.shape[1:]), values.dtype))
        self._getters = getters_of(like)
        self._targets = [bits_of(get(self._rows)) for get in self._getters]
        self._copies = ReusedMemory(HELD * len(self._targets))
        self._free = deque(range(2 * batches + HELD))
        self._lent: set[int] = set()
        widths = [values[0].nbytes for values in self._targets]
        stage = size * batches * max(widths)
        small = stage <= STAGE_BYTES and STAGE_SHARE * max(widths) <= sum(widths)
        self.staged = mapped and small
        self._stages = [np.empty(stage, np.uint8) for _ in range(STAGES * self.staged)]

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

    def gather(
        self, parts: Sequence[Part], order: np.ndarray, slots: Sequence[Slot], work: SharedWork
    ) -> None:
        """Copies all parts of a window to its slots, by way of a stage.

        order: the numbers of the window's tokens as they go into the slots. This is faster than
        `scatter`: only the processor's cache is read at random, and all other memory in order.
        This thread fills one stage while another thread empties the other one. If both made the
        many short calls that fill a stage, each would mostly wait for Python's lock.
        """
        emptying: deque[Future[None]] = deque()
        for number in range(len(self._targets)):
            if len(emptying) == len(self._stages):
                emptying.popleft().result()
            memory = self._stages[number % len(self._stages)]
            stage = self._fill_stage(number, memory, parts, len(order))
            emptying.append(work.aside(partial(self._empty_stage, number, stage, order, slots)))
        for future in emptying:
            future.result()

    def _fill_stage(
        self, number: int, memory: np.ndarray, parts: Sequence[Part], tokens: int
    ) -> np.ndarray:
        target, get = self._targets[number], self._getters[number]
        stage = memory[: tokens * target[0].nbytes].view(target.dtype)
        stage = stage.reshape(tokens, *target.shape[1:])
        end = 0
        for part in parts:
            start, end = end, end + len(part.places)
            stage[start:end] = bits_of(get(part.tokens))[part.rows]
        return stage

    def _empty_stage(
        self, number: int, stage: np.ndarray, order: np.ndarray, slots: Sequence[Slot]
    ) -> None:
        target = self._targets[number]
        for start, slot in zip(range(0, len(order), self.size), slots, strict=True):
            rows = order[start : start + self.size]
            first = slot.number * self.size
            # "clip" keeps NumPy from making another copy; the rows are all there.
            stage.take(rows, axis=0, out=target[first : first + len(rows)], mode="clip")

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
        copies = {hook: self._copy(values, dtype) for hook, values in found.activations.items()}
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
