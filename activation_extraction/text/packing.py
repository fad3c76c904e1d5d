"""Samples -> packed batches of one fixed shape, with the tokens marked that are kept.

Several samples share a row; segment ids keep them apart in attention, and positions restart at 0. A
row begins with the oldest sample that waits, followed by later ones that fill it. None of these is
WINDOW or more samples after the oldest that still waits, so what is stored lags little behind. A
batch follows from its cursor alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from activation_extraction.text.batch import Batch, Cursor, Placed, Sample

WINDOW = 64  # samples; `taken` in a shard's JSON may list no more
FULL = 128  # a row is full enough once at most one part in FULL of it is empty


def samples_of(documents: Iterable[Sequence[int] | np.ndarray]) -> Iterator[Sample]:
    """Makes samples of token ids alone, numbered from 0; they belong to no data set."""
    for number, ids in enumerate(documents):
        here, after = Cursor(number), Cursor(number + 1)
        yield Sample(number, np.asarray(ids, np.int32), "", None, here, after)


def pack(
    samples: Iterator[Sample], rows: int, length: int, taken: Iterable[int] = ()
) -> Iterator[Batch]:
    """Packs samples (each at most `length` tokens) into batches of `rows` x `length` tokens.

    taken: the `taken` of the cursor at which the samples begin. If reading fails, samples whose
    window is not complete are left out: packed without the ones that follow, they would not get the
    same bits as in a run that can read on.
    """
    waiting = _Waiting(samples, taken)
    cursor = waiting.cursor()
    while waiting.any:
        placed: list[Placed] = []
        for row in range(rows):
            start = 0
            for sample in waiting.take(length):
                placed.append(Placed(sample, row, start))
                start = placed[-1].stop
        here, cursor = cursor, waiting.cursor()
        yield _lay_out(placed, rows, length, here, cursor)


class _Waiting:
    """The samples that are in no batch yet, from the oldest on; they are read as they are needed.

    taken: the numbers of samples that are in a batch already.
    """

    def __init__(self, samples: Iterator[Sample], taken: Iterable[int]) -> None:
        self._samples = samples
        self._read: list[Sample] = []
        self._taken = set(taken)
        self._end = Cursor(0)  # after the sample that was read last

    @property
    def any(self) -> bool:
        """Whether a sample waits, among those that have been read."""
        return bool(self._read)

    def cursor(self) -> Cursor:
        """Returns where a run continues that makes the same rows from here on."""
        oldest = self._look(0)
        if oldest is None:
            return self._end
        self._taken = {number for number in self._taken if number > oldest.number}
        return replace(oldest.cursor, taken=tuple(sorted(self._taken)))

    def take(self, length: int) -> list[Sample]:
        """Takes the samples of one row of `length` tokens, in order.

        The window is the WINDOW samples from the oldest one that waits, without those in earlier
        rows. The oldest one comes first, and more follow in order while all of the window fits,
        which moves on with them. Of the last window, those are taken that fill the row best.
        """
        begin = end = tokens = 0  # of the window, and how many tokens it has
        room = length
        while (oldest := self._look(begin)) is not None:
            while (last := self._look(end)) is not None and last.number < oldest.number + WINDOW:
                tokens += len(last.token_ids)
                end += 1
            if begin and tokens > room:
                break
            begin += 1
            tokens -= len(oldest.token_ids)
            room -= len(oldest.token_ids)
            if room < 0:
                raise ValueError(f"a sample of more tokens than the {length} of a row")
        lengths = [len(sample.token_ids) for sample in self._read[begin:end]]
        chosen = {begin + item for item in fullest(lengths, room, room - length // FULL)}
        row = [s for at, s in enumerate(self._read) if at < begin or at in chosen]
        self._read = [s for at, s in enumerate(self._read) if at >= begin and at not in chosen]
        self._taken |= {sample.number for sample in row}
        return row

    def _look(self, at: int) -> Sample | None:
        """Returns one of the samples that wait, counted from the oldest; None after the last."""
        while at >= len(self._read):
            sample = next(self._samples, None)
            if sample is None:
                return None
            self._end = sample.next_cursor
            if sample.number not in self._taken:
                self._read.append(sample)
        return self._read[at]


def fullest(lengths: Sequence[int], room: int, enough: int) -> list[int]:
    """Returns the numbers of the lengths whose sum comes closest to `room` without exceeding it.

    It looks at no further lengths once some of the first ones add up to `enough`. Of equally good
    choices, it takes the one whose last length comes first.
    """
    sums = [1]  # bit n of sums[i] says whether some of the first i lengths add up to n
    for length in lengths:
        sums.append((sums[-1] | sums[-1] << length) & (2 << room) - 1)
        if sums[-1].bit_length() > enough:
            break
    left = sums[-1].bit_length() - 1
    chosen = []
    for item in reversed(range(len(sums) - 1)):
        if not sums[item] >> left & 1:
            chosen.append(item)
            left -= lengths[item]
    return chosen[::-1]


def _lay_out(
    placed: Sequence[Placed], rows: int, length: int, here: Cursor, after: Cursor
) -> Batch:
    """Fills the arrays of a batch. placed: row by row."""
    token_ids, segment_ids, positions = np.zeros((3, rows, length), np.int32)
    segments = [0] * rows
    kept = None if all(p.sample.kept is None for p in placed) else np.zeros((rows, length), bool)
    for item in placed:
        span = item.row, slice(item.start, item.stop)
        segments[item.row] += 1
        token_ids[span] = item.sample.token_ids
        segment_ids[span] = segments[item.row]
        positions[span] = np.arange(item.stop - item.start)
        if kept is not None:
            kept[item.row, item.start + item.sample.kept_positions] = True
    in_order = tuple(sorted(placed, key=lambda item: item.sample.number))
    return Batch(token_ids, segment_ids, positions, in_order, here, after, kept)
