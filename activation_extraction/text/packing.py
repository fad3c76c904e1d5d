"""Samples -> packed batches of one fixed shape, with the tokens marked that are kept.

Several samples share a row; segment ids keep them apart in attention, and positions restart at 0.
A batch holds consecutive samples, so what is stored is always a prefix of the stream.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, takewhile

import numpy as np

from activation_extraction.text.batch import Batch, Cursor, Placed, Sample


def samples_of(documents: Iterable[Sequence[int] | np.ndarray]) -> Iterator[Sample]:
    """Makes samples of token ids alone, numbered from 0; they belong to no data set."""
    for number, ids in enumerate(documents):
        here, after = Cursor(number), Cursor(number + 1)
        yield Sample(number, np.asarray(ids, np.int32), "", None, here, after)


def best_fit(lengths: Sequence[int], rows: int, capacity: int) -> list[tuple[int, int]] | None:
    """Packs best-fit-decreasing: returns (row, start) of each length, or None if they do not fit.

    Takes the longest first (ties in order) and puts each in the fullest row that has room.
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
    """Returns (row, start) of each length in the longest prefix that `best_fit` fits into a batch.

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

    If reading fails, the last samples, which do not fill a batch, are left out: packed without the
    ones that follow, they would not get the same bits as in a run that can read on.
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
    kept = None if all(s.kept is None for s in samples) else np.zeros((rows, length), bool)
    for item in sorted(placed, key=lambda item: (item.row, item.start)):
        span = item.row, slice(item.start, item.stop)
        segments[item.row] += 1
        token_ids[span] = item.sample.token_ids
        segment_ids[span] = segments[item.row]
        positions[span] = np.arange(item.stop - item.start)
        if kept is not None:
            kept[item.row, item.start + item.sample.kept_positions] = True
    return Batch(token_ids, segment_ids, positions, tuple(placed), kept)
