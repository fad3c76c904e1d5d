"""Samples -> packed batches of one fixed shape, with the tokens marked that are kept.

Several samples share a row; segment ids keep them apart in attention, and positions restart at 0.
A batch holds consecutive samples, so what is stored is always a prefix of the stream. Which tokens
are kept follows from position, length and token id alone, so it is the same after a restart, on any
mesh and with any batch size.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

import numpy as np

from activation_extraction.common.positions import ALL, parse_positions
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
    for item in sorted(placed, key=lambda item: (item.row, item.start)):
        span = item.row, slice(item.start, item.stop)
        segments[item.row] += 1
        token_ids[span] = item.sample.token_ids
        segment_ids[span] = segments[item.row]
        positions[span] = np.arange(item.stop - item.start)
    return Batch(token_ids, segment_ids, positions, tuple(placed))


@dataclass(frozen=True)
class TokenChoice:
    """positions: a rule as --positions has it. dropped: token ids that are never kept.

    The rule counts all tokens of a sample, those that are dropped included.
    """

    positions: str = ALL
    dropped: tuple[int, ...] = ()

    def __str__(self) -> str:
        dropped = f", without the token ids {', '.join(map(str, self.dropped))}"
        return f"positions {self.positions}" + (dropped if self.dropped else "")

    @property
    def everything(self) -> bool:
        return self == TokenChoice()

    def kept(self, sample_idx: int, token_ids: np.ndarray) -> np.ndarray:
        """Returns the positions of a sample's kept tokens, int32, in ascending order."""
        rule = parse_positions(self.positions)
        every = np.arange(len(token_ids), dtype=np.int32)
        if rule.share is None:
            chosen = every[rule.start : rule.stop : rule.step]
        else:
            chance = _random(rule.seed, sample_idx, every)
            chosen = every[chance < np.uint64(rule.threshold)]
        return chosen[~np.isin(token_ids[chosen], self.dropped)]

    def mark(self, batch: Batch) -> Batch:
        """Returns the batch with its kept tokens marked."""
        if self.everything:
            return batch
        kept = np.zeros(batch.token_ids.shape, bool)
        for sample, row, start in batch.samples:
            kept[row, start + self.kept(sample.sample_idx, sample.token_ids)] = True
        return replace(batch, kept=kept)


def _random(seed: int, sample_idx: int, positions: np.ndarray) -> np.ndarray:
    """A uint64 for every position: a hash, which is the same everywhere and at all times."""
    of_sample = _mix(_mix(np.array([seed], np.uint64)) + np.uint64(sample_idx))
    return _mix(of_sample + positions.astype(np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
