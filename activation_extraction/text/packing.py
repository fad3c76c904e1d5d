"""Samples -> packed batches of one fixed shape.

Several samples share a row; segment ids keep them apart in attention and positions restart at 0.
A batch holds a contiguous run of samples, so what is stored is always a prefix of the stream.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any, NamedTuple

import numpy as np

Cursor = dict[str, Any]  # JSON-compatible position in a worker's stream of samples


@dataclass(frozen=True)
class Sample:
    """One tokenised document. `cursor` continues with this sample, `next_cursor` after it."""

    sample_idx: int
    token_ids: np.ndarray  # int32, shape (tokens,)
    text_preview: str
    doc_id: str | int | float | None
    cursor: Cursor
    next_cursor: Cursor


def samples_of(documents: Iterable[Sequence[int] | np.ndarray]) -> Iterator[Sample]:
    """Samples of token ids alone, numbered from 0, that come from no dataset."""
    for number, ids in enumerate(documents):
        yield Sample(number, np.asarray(ids, np.int32), "", None, {}, {})


class Placed(NamedTuple):
    """Where a sample lies in its batch."""

    sample: Sample
    row: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.sample.token_ids)


@dataclass(frozen=True)
class Batch:
    """Arrays (B, T) int32 and the samples in them, in stream order.

    segment_ids: 0 for padding, 1, 2, ... along each row; positions: from 0 within each sample.
    """

    token_ids: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    samples: tuple[Placed, ...]

    @property
    def cursor(self) -> Cursor:
        return self.samples[0].sample.cursor

    @property
    def next_cursor(self) -> Cursor:
        return self.samples[-1].sample.next_cursor

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding not counted."""
        return sum(placed.stop - placed.start for placed in self.samples)


def best_fit(lengths: Sequence[int], rows: int, capacity: int) -> list[tuple[int, int]] | None:
    """Best-fit-decreasing bin packing: (row, start) of each length, or None when it does not fit.

    Longest first (ties in order), each into the fullest row that still has room.
    """
    free = [(capacity, row) for row in range(rows)]  # sorted by free space
    places: list[tuple[int, int]] = [(0, 0)] * len(lengths)
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(free, (lengths[item], -1))
        if at == len(free):
            return None
        space, row = free.pop(at)
        places[item] = (row, capacity - space)
        insort(free, (space - lengths[item], row))
    return places


def longest_run(lengths: Sequence[int], rows: int, capacity: int) -> list[tuple[int, int]]:
    """Places of the longest prefix of `lengths` that `best_fit` gets into one batch.

    Every length must be at most `capacity`, so that at least one always fits.
    """
    totals = takewhile(lambda total: total <= rows * capacity, accumulate(lengths))
    for count in range(sum(1 for _ in totals), 0, -1):
        places = best_fit(lengths[:count], rows, capacity)
        if places is not None:
            return places
    raise ValueError(f"the first length, {lengths[0]}, exceeds the capacity {capacity}")


def pack(samples: Iterator[Sample], rows: int, length: int) -> Iterator[Batch]:
    """Packs samples (each at most `length` tokens) into batches of `rows` x `length` tokens.

    When reading samples fails, those that do not fill a batch are left out: packed without what
    follows them, they would not give the same bits as in a run that reads on.
    """
    waiting: list[Sample] = []
    total = 0
    more = True
    while more or waiting:
        while more and total < rows * length:
            sample = next(samples, None)
            if sample is None:
                more = False
            else:
                waiting.append(sample)
                total += len(sample.token_ids)
        if waiting:
            places = longest_run([len(s.token_ids) for s in waiting], rows, length)
            batch = _lay_out(waiting[: len(places)], places, rows, length)
            del waiting[: len(places)]
            total -= batch.num_tokens
            yield batch


def _lay_out(
    samples: Sequence[Sample], places: Sequence[tuple[int, int]], rows: int, length: int
) -> Batch:
    token_ids, segment_ids, positions = np.zeros((3, rows, length), np.int32)
    placed = [Placed(s, row, start) for s, (row, start) in zip(samples, places, strict=True)]
    segments = [0] * rows
    for item in sorted(placed, key=lambda item: (item.row, item.start)):
        span = item.row, slice(item.start, item.stop)
        segments[item.row] += 1
        token_ids[span] = item.sample.token_ids
        segment_ids[span] = segments[item.row]
        positions[span] = np.arange(item.stop - item.start)
    return Batch(token_ids, segment_ids, positions, tuple(placed))
