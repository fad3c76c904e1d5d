"""Packs samples into batches of a fixed shape.

Several samples share a row: segment ids keep them apart in attention, and positions restart at 0.
Samples are read in groups, in the order of the stream. Each group is packed by itself: its samples,
longest first, go into the row where they leave the least room (best-fit decreasing). The rows of
all groups form one stream, from which batches are cut. So a run that continues only needs the mark
at the beginning of a group (`Placed.mark`), and the samples after this mark that are stored.
"""

from bisect import bisect_left, insort
from collections.abc import Generator, Iterable, Iterator, Sequence

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.text.batch import Batch, Placed, Sample
from activation_extraction.text.mark import Mark
from activation_extraction.text.sample_facts import SampleFacts
from activation_extraction.text.samples import ChangedDataError

# The size of a group in rows is the number of rows that its tokens would fill without padding.
GROUP_ROWS = 256  # the largest size of a group
LEAST_ROWS = 16  # the smallest size of a group
GROUP_TOKENS = 2**20  # if rows are long, groups have as many tokens and fewer than GROUP_ROWS rows
GROUP_SAMPLES = 2**16  # the largest number of samples in a group, however short they are


def samples_of(documents: Iterable[Sequence[int] | np.ndarray]) -> Iterator[Sample]:
    """Makes samples from token ids alone, for programs without a data set.

    Args:
        documents: Token ids of each sample. The samples are numbered from 0.
    """
    for number, ids in enumerate(documents):
        yield Sample(SampleFacts(number), np.asarray(ids, np.int32), Mark(number))


def rows_of_group(length: int) -> int:
    """Returns the size of a group in rows.

    Args:
        length: The number of tokens of a row.
    """
    return max(LEAST_ROWS, min(GROUP_ROWS, GROUP_TOKENS // length))


def pack(samples: Iterable[Sample], rows: int, length: int) -> Generator[Batch, None, Mark | None]:
    """Packs samples into batches.

    The rows of a group are ordered by their first samples. A sample without tokens has a place in
    this order, but takes no row.

    Args:
        samples: The samples, each of at most `length` tokens.
        rows: The number of rows of a batch.
        length: The number of tokens of a row.

    Yields:
        The batches.

    Returns:
        The mark at the end of the samples, if `samples` is a generator that returns it; otherwise
        None.

    Raises:
        ChangedDataError: The data set has changed. Earlier samples of the same group are not
            yielded.
        RunError: Reading has failed. All earlier samples have been yielded.
    """
    failure: RunError | None = None
    end: Mark | None = None

    def readable() -> Iterator[Sample]:
        nonlocal end, failure
        try:
            # An iterable that is no generator returns None.
            end = yield from samples  # type: ignore[func-returns-value]
        except ChangedDataError:  # the samples before it may be wrong as well
            raise
        except RunError as error:
            failure = error

    placements: list[Placed] = []
    filled_rows = 0  # the number of rows that the next batch has so far
    for group in _groups(readable(), length):
        order = best_fit([len(sample.token_ids) for sample in group], length)
        last = order[-1][-1]
        for row in order:
            start = 0
            for number in row:
                mark = group[-1].mark_after if number == last else group[0].mark
                placements.append(Placed(group[number], filled_rows, start, mark))
                start = placements[-1].stop
            filled_rows += start > 0
            if filled_rows == rows or len(placements) >= GROUP_SAMPLES:
                yield _lay_out(placements, rows, length)
                placements, filled_rows = [], 0
    if placements:
        yield _lay_out(placements, rows, length)
    if failure is not None:
        raise failure
    return end


def _groups(samples: Iterable[Sample], length: int) -> Iterator[list[Sample]]:
    """Yields groups: as many consecutive samples as fit the size of a group.

    Args:
        samples: The samples.
        length: The number of tokens of a row.

    Raises:
        ValueError: A sample has more tokens than a row.
    """
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
    """Distributes lengths among rows, by best-fit decreasing.

    The longest lengths are placed first, each in the row where it leaves the least room, or in a
    new row if it fits no other.

    Args:
        lengths: The lengths, each at most `room`. A length of 0 gets a row of its own.
        room: The length of a row.

    Returns:
        The indices of the lengths in each row, ascending. The rows are ordered by their first
        indices.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, index of the row), ascending; no full rows
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[index]
        if not length:
            rows.append([index])
            continue
        best = bisect_left(free, (length, 0))
        if best < len(free):
            left, row = free.pop(best)
            rows[row].append(index)
        else:
            left = room
            row = len(rows)
            rows.append([index])
        if left > length:
            insort(free, (left - length, row))
    return sorted(map(sorted, rows))


def _lay_out(samples: Sequence[Placed], rows: int, length: int) -> Batch:
    """Returns the batch of (rows, length) tokens with these samples."""
    token_ids, segment_ids, positions = np.zeros((3, rows, length), np.int32)
    segments = [0] * rows  # the number of samples with tokens in each row so far
    keeps_all = all(placement.sample.kept is None for placement in samples)
    kept = None if keeps_all else np.zeros((rows, length), bool)
    for placement in samples:
        span = placement.row, slice(placement.start, placement.stop)
        segments[placement.row] += placement.stop > placement.start
        token_ids[span] = placement.sample.token_ids
        segment_ids[span] = segments[placement.row]
        positions[span] = np.arange(placement.stop - placement.start)
        if kept is not None:
            kept[placement.row, placement.start + placement.sample.kept_positions] = True
    return Batch(token_ids, segment_ids, positions, tuple(samples), kept)
