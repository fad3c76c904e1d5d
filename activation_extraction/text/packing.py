"""Packs samples into batches of a fixed shape.

Several samples share a row. Segment ids keep them apart in attention, and positions restart at 0.
Samples are read in the order of the stream, in groups of consecutive samples. Each group is packed
by itself, with best-fit decreasing: the longest samples are placed first, each in the row where it
leaves the least free space. Batches are cut from the rows of all groups, one group after the other.
So a run that continues only needs the mark at the beginning of a group (`PlacedSample.mark`), and
the list of stored samples after this mark.
"""

from bisect import bisect_left, insort
from collections.abc import Generator, Iterable, Iterator, Sequence

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.text.batch import Batch, PlacedSample, Sample
from activation_extraction.text.mark import Mark
from activation_extraction.text.sample_facts import SampleFacts
from activation_extraction.text.samples import ChangedDataError

# The tokens of a group fill at most GROUP_TOKENS / T rows of T tokens. This limit is replaced by
# MIN_GROUP_ROWS if it is smaller, and by MAX_GROUP_ROWS if it is larger.
MAX_GROUP_ROWS = 256
MIN_GROUP_ROWS = 16
GROUP_TOKENS = 2**20
# The largest number of samples in a group. Only a group of very short samples reaches this limit
# before the limit of its tokens.
GROUP_SAMPLES = 2**16


def samples_of(token_ids_of_samples: Iterable[Sequence[int] | np.ndarray]) -> Iterator[Sample]:
    """Yields samples made from token ids alone, for programs without a data set.

    Args:
        token_ids_of_samples: Token ids of each sample. The samples are numbered from 0.
    """
    for sample_index, token_ids in enumerate(token_ids_of_samples):
        yield Sample(SampleFacts(sample_index), np.asarray(token_ids, np.int32), Mark(sample_index))


def rows_of_group(tokens_per_row: int) -> int:
    """Returns the size limit of a group of samples, in rows.

    Without padding, the tokens of a group would fill at most this number of rows. The group may
    need more rows, because packing leaves padding.

    Args:
        tokens_per_row: The number of tokens of a row.
    """
    return max(MIN_GROUP_ROWS, min(MAX_GROUP_ROWS, GROUP_TOKENS // tokens_per_row))


def pack(
    samples: Iterable[Sample], rows_per_batch: int, tokens_per_row: int
) -> Generator[Batch, None, Mark | None]:
    """Packs samples into the rows of batches, and yields the batches.

    The samples of a group are distributed among rows. The rows are added to batches in the order
    of the numbers of their first samples. A batch is complete when it has `rows_per_batch` rows, or
    at least GROUP_SAMPLES samples. A sample without tokens takes no room in a row, but is
    treated like a row in this order, and belongs to the batch that is not complete when its turn
    comes.

    Args:
        samples: The samples, each of at most `tokens_per_row` tokens.
        rows_per_batch: The number of rows of a batch.
        tokens_per_row: The number of tokens of a row.

    Yields:
        The batches.

    Returns:
        The mark at the end of the samples, if `samples` is a generator that returns a mark;
        otherwise None.

    Raises:
        ChangedDataError: If the data set has changed. The samples of the last group, which was not
            complete at the error, are not yielded.
        RunError: If reading fails. All samples that were read before the error are yielded first.
    """
    read_error: RunError | None = None
    mark_at_end_of_samples: Mark | None = None

    def samples_before_error() -> Iterator[Sample]:
        nonlocal mark_at_end_of_samples, read_error
        try:
            # The value of `yield from` is the mark that a generator returns, and None for another
            # iterable. mypy only knows the second case, so its error is ignored.
            mark_at_end_of_samples = yield from samples  # type: ignore[func-returns-value]
        except ChangedDataError:
            # A file has changed while it was read, so the earlier samples of the group may be wrong
            # as well. The exception leaves `pack` at once, and none of these samples is yielded.
            raise
        except RunError as error:
            read_error = error

    placed_samples: list[PlacedSample] = []
    num_filled_rows = 0  # the number of rows of the next batch that contain tokens
    for sample_group in _sample_groups(samples_before_error(), tokens_per_row):
        sample_indices_of_rows = best_fit(
            [len(sample.token_ids) for sample in sample_group], tokens_per_row
        )
        index_of_last_placed_sample = sample_indices_of_rows[-1][-1]
        for sample_indices in sample_indices_of_rows:
            start_in_row = 0
            for sample_index in sample_indices:
                # Samples are stored in the order in which they are placed in rows. When the last
                # of them is stored, the whole group is stored, and a run may continue after it. As
                # long as a sample is missing, the run must continue from the group's beginning.
                mark_of_placed_sample = (
                    sample_group[-1].mark_after
                    if sample_index == index_of_last_placed_sample
                    else sample_group[0].mark
                )
                placed_samples.append(
                    PlacedSample(
                        sample_group[sample_index],
                        num_filled_rows,
                        start_in_row,
                        mark_of_placed_sample,
                    )
                )
                start_in_row = placed_samples[-1].stop
            num_filled_rows += start_in_row > 0
            if num_filled_rows == rows_per_batch or len(placed_samples) >= GROUP_SAMPLES:
                yield _batch_of_placed_samples(placed_samples, rows_per_batch, tokens_per_row)
                placed_samples, num_filled_rows = [], 0
    if placed_samples:
        yield _batch_of_placed_samples(placed_samples, rows_per_batch, tokens_per_row)
    if read_error is not None:
        raise read_error
    return mark_at_end_of_samples


def _sample_groups(samples: Iterable[Sample], tokens_per_row: int) -> Iterator[list[Sample]]:
    """Divides samples into groups of consecutive samples.

    Each group has as many samples as possible, but at most GROUP_SAMPLES. The number of its tokens
    is limited too: without padding, they would fill at most `rows_of_group(tokens_per_row)` rows.

    Args:
        samples: The samples.
        tokens_per_row: The number of tokens of a row.

    Raises:
        ValueError: If a sample has more tokens than a row.
    """
    max_group_tokens = rows_of_group(tokens_per_row) * tokens_per_row
    sample_group: list[Sample] = []
    num_group_tokens = 0
    for sample in samples:
        num_sample_tokens = len(sample.token_ids)
        if num_sample_tokens > tokens_per_row:
            raise ValueError(
                f"a sample has {num_sample_tokens} tokens, but a row has only {tokens_per_row}"
            )
        if (
            num_group_tokens + num_sample_tokens > max_group_tokens
            or len(sample_group) == GROUP_SAMPLES
        ):
            yield sample_group
            sample_group = []
            num_group_tokens = 0
        sample_group.append(sample)
        num_group_tokens += num_sample_tokens
    if sample_group:
        yield sample_group


def best_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Distributes samples among rows with best-fit decreasing.

    The longest samples are placed first, each in the row where it leaves the least free space, or
    in a new row if no row has enough space.

    Args:
        lengths: The number of tokens of each sample, at most `row_length`. A sample without tokens
            gets a row of its own.
        row_length: The number of tokens of a row.

    Returns:
        For each row, the indices of its samples, ascending. The rows are ordered by the index of
        their first sample.
    """
    sample_indices_of_rows: list[list[int]] = []
    # For each row that is not full, a tuple of the number of its free tokens and its index; sorted.
    free_token_counts_and_row_indices: list[tuple[int, int]] = []
    for sample_index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        num_sample_tokens = lengths[sample_index]
        if not num_sample_tokens:
            sample_indices_of_rows.append([sample_index])
            continue
        best_fit_insertion_index = bisect_left(
            free_token_counts_and_row_indices, (num_sample_tokens, 0)
        )
        if best_fit_insertion_index < len(free_token_counts_and_row_indices):
            num_free_tokens, row_index = free_token_counts_and_row_indices.pop(
                best_fit_insertion_index
            )
            sample_indices_of_rows[row_index].append(sample_index)
        else:
            num_free_tokens = row_length
            row_index = len(sample_indices_of_rows)
            sample_indices_of_rows.append([sample_index])
        if num_free_tokens > num_sample_tokens:
            insort(
                free_token_counts_and_row_indices, (num_free_tokens - num_sample_tokens, row_index)
            )
    return sorted(map(sorted, sample_indices_of_rows))


def _batch_of_placed_samples(
    placed_samples: Sequence[PlacedSample], num_rows: int, row_length: int
) -> Batch:
    """Makes a batch of samples whose rows, and positions in the rows, are already determined.

    Args:
        placed_samples: The samples, each with its row and the index of its first token in the row.
        num_rows: The number of rows of the batch.
        row_length: The number of tokens of a row.
    """
    token_ids, segment_ids, positions = np.zeros((3, num_rows, row_length), np.int32)
    # For each row, the number of samples with tokens that are already placed in the row.
    num_segments_of_rows = [0] * num_rows
    keeps_all_tokens = all(
        placed_sample.sample.kept_positions_or_none is None for placed_sample in placed_samples
    )
    kept_mask = None if keeps_all_tokens else np.zeros((num_rows, row_length), bool)
    for placed_sample in placed_samples:
        row_and_columns = (
            placed_sample.row_index,
            slice(placed_sample.start_in_row, placed_sample.stop),
        )
        num_segments_of_rows[placed_sample.row_index] += (
            placed_sample.stop > placed_sample.start_in_row
        )
        token_ids[row_and_columns] = placed_sample.sample.token_ids
        segment_ids[row_and_columns] = num_segments_of_rows[placed_sample.row_index]
        positions[row_and_columns] = np.arange(placed_sample.stop - placed_sample.start_in_row)
        if kept_mask is not None:
            kept_mask[
                placed_sample.row_index,
                placed_sample.start_in_row + placed_sample.sample.kept_positions,
            ] = True
    return Batch(token_ids, segment_ids, positions, tuple(placed_samples), kept_mask)
