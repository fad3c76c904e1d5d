"""Samples -> packed batches of one fixed shape, with the tokens marked that are kept.

Several samples share a row; segment ids keep them apart in attention, and positions restart at 0.
Samples are read in groups, in the order of the stream. A group is packed on its own, the longest
sample first, each into the row that it fills best. Batches are cut from the one stream of the rows
of all groups. So a run that continues needs to know only where a group began (`Placed.mark`), and
which samples after that are stored.
"""

from bisect import bisect_left, insort
from collections.abc import Generator, Iterable, Iterator, Sequence

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.text.batch import Batch, Placed, Sample
from activation_extraction.text.mark import Mark
from activation_extraction.text.sample_facts import SampleFacts
from activation_extraction.text.samples import ChangedDataError

GROUP_ROWS, LEAST_ROWS = 256, 16  # as many rows as the samples of a group fill, if packed tightly
GROUP_TOKENS = 2**20  # fewer rows have as many tokens
GROUP_SAMPLES = 2**16  # the most samples of a group, however short they are


def samples_of(documents: Iterable[Sequence[int] | np.ndarray]) -> Iterator[Sample]:
    """Makes samples of token ids alone, numbered from 0; they belong to no data set."""
    for number, ids in enumerate(documents):
        yield Sample(SampleFacts(number), np.asarray(ids, np.int32), Mark(number))


def rows_of_group(length: int) -> int:
    """Returns how many rows of `length` tokens the samples of a group would fill exactly."""
    return max(LEAST_ROWS, min(GROUP_ROWS, GROUP_TOKENS // length))


def pack(samples: Iterable[Sample], rows: int, length: int) -> Generator[Batch, None, Mark | None]:
    """Packs samples into batches, which it yields.

    The rows of a group come in the order of their first samples. A sample without tokens comes as
    if it had a row, but takes none.

    Args:
        samples: The samples, each of at most `length` tokens.
        rows: The number of rows of a batch.
        length: The number of tokens of a row.

    Returns:
        The mark at the end of the samples, which their generator returns; None if `samples` is
        another iterable.

    Raises:
        RunError: Reading has failed, which is raised after all samples before it have come.
    """
    failure: RunError | None = None
    end: Mark | None = None

    def readable() -> Iterator[Sample]:
        nonlocal end, failure
        try:
            end = yield from samples  # type: ignore[func-returns-value]  # None of other iterables
        except ChangedDataError:  # nor are the samples before it to be trusted
            raise
        except RunError as error:
            failure = error

    placed: list[Placed] = []
    filled = 0  # rows of the next batch
    for group in _groups(readable(), length):
        order = best_fit([len(sample.token_ids) for sample in group], length)
        last = order[-1][-1]
        for row in order:
            start = 0
            for number in row:
                mark = group[-1].mark_after if number == last else group[0].mark
                placed.append(Placed(group[number], filled, start, mark))
                start = placed[-1].stop
            filled += start > 0
            if filled == rows or len(placed) >= GROUP_SAMPLES:
                yield _lay_out(placed, rows, length)
                placed, filled = [], 0
    if placed:
        yield _lay_out(placed, rows, length)
    if failure is not None:
        raise failure
    return end


def _groups(samples: Iterable[Sample], length: int) -> Iterator[list[Sample]]:
    """Yields the samples that are packed together: as many as follow each other and fit."""
    room = rows_of_group(length) * length
    group: list[Sample] = []
    tokens = 0
    for sample in samples:
        size = len(sample.token_ids)
        if size > length:
            raise ValueError(f"a sample of {size} tokens, more than the {length} of a row")
        if tokens + size > room or len(group) == GROUP_SAMPLES:
            yield group
            group, tokens = [], 0
        group.append(sample)
        tokens += size
    if group:
        yield group


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Distributes lengths, each at most `room`, among rows that have `room`.

    Returns the indices of the lengths in each row, ascending, and the rows in the order of their
    first ones. The longest comes first, and goes where it leaves the least room, or into a new row.
    A length of 0 has a row of its own.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # how much, and in which row, ascending; no row that is full
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[index]
        at = bisect_left(free, (length, 0)) if length else len(free)
        if at < len(free):
            left, row = free.pop(at)
            rows[row].append(index)
        else:
            left, row = room if length else 0, len(rows)
            rows.append([index])
        if left > length:
            insort(free, (left - length, row))
    return sorted(map(sorted, rows))


def _lay_out(placed: Sequence[Placed], rows: int, length: int) -> Batch:
    token_ids, segment_ids, positions = np.zeros((3, rows, length), np.int32)
    segments = [0] * rows
    kept = None if all(p.sample.kept is None for p in placed) else np.zeros((rows, length), bool)
    for item in placed:
        span = item.row, slice(item.start, item.stop)
        segments[item.row] += item.stop > item.start
        token_ids[span] = item.sample.token_ids
        segment_ids[span] = segments[item.row]
        positions[span] = np.arange(item.stop - item.start)
        if kept is not None:
            kept[item.row, item.start + item.sample.kept_positions] = True
    return Batch(token_ids, segment_ids, positions, tuple(placed), kept)
