"""Packing: contiguous, complete, isolated, and with little padding."""

import numpy as np
import pytest

from activation_extraction.text.batch import Cursor, Sample
from activation_extraction.text.packing import best_fit, longest_run, pack


def make_samples(lengths):
    """Samples whose token ids say which sample and position they are."""
    return [
        Sample(
            sample_idx=i,
            token_ids=np.arange(n, dtype=np.int32) + 10_000 * i,
            text_preview="",
            doc_id=None,
            cursor=Cursor(i),
            next_cursor=Cursor(i + 1),
        )
        for i, n in enumerate(lengths)
    ]


def log_normal_lengths(count, seed=0):
    """Document lengths like FineWeb-Edu's: median 620 tokens, sigma 1.0, cut at 2048."""
    drawn = np.random.default_rng(seed).lognormal(np.log(620), 1.0, count)
    return np.clip(drawn.round().astype(int), 1, 2048)


@pytest.mark.parametrize("seed", range(5))
def test_padding_is_at_most_8_percent_on_log_normal_lengths(seed):
    lengths = log_normal_lengths(4000, seed)
    batches = list(pack(iter(make_samples(lengths)), rows=8, length=2048))
    padding = 1 - lengths.sum() / (len(batches) * 8 * 2048)
    assert padding <= 0.08


def test_batches_are_contiguous_complete_and_of_one_shape():
    lengths = log_normal_lengths(300) % 128 + 1
    batches = list(pack(iter(make_samples(lengths)), rows=3, length=128))
    order = [placed.sample.sample_idx for batch in batches for placed in batch.samples]
    assert order == list(range(300))
    assert {batch.token_ids.shape for batch in batches} == {(3, 128)}
    assert sum(batch.num_tokens for batch in batches) == lengths.sum()
    for before, after in zip(batches, batches[1:], strict=False):
        assert before.next_cursor == after.cursor
    assert batches[0].cursor == Cursor(0) and batches[-1].next_cursor == Cursor(300)


def test_rows_hold_each_sample_once_isolated_with_positions_from_zero():
    lengths = log_normal_lengths(60) % 50 + 1
    for batch in pack(iter(make_samples(lengths)), rows=4, length=64):
        seen = np.zeros_like(batch.token_ids)
        for placed in batch.samples:
            span = placed.row, slice(placed.start, placed.stop)
            np.testing.assert_array_equal(batch.token_ids[span], placed.sample.token_ids)
            np.testing.assert_array_equal(
                batch.positions[span], np.arange(len(placed.sample.token_ids))
            )
            segment = batch.segment_ids[placed.row, placed.start]
            inside = batch.segment_ids[placed.row] == segment
            assert inside.sum() == inside[span[1]].sum() == len(placed.sample.token_ids)
            seen[span] += 1
        np.testing.assert_array_equal(seen, batch.segment_ids > 0)


def test_best_fit_prefers_the_fullest_row_with_room():
    assert best_fit([6, 5, 4, 3], rows=2, capacity=10) == [(0, 0), (1, 0), (0, 6), (1, 5)]
    assert best_fit([6, 6, 6], rows=2, capacity=10) is None
    assert best_fit([], rows=2, capacity=10) == []


def test_longest_run_uses_every_sample_that_still_fits():
    """Greedy filling would stop at the third length; taking one more still fits."""
    assert len(longest_run([7, 3, 7, 3, 1], rows=2, capacity=10)) == 4
    assert len(longest_run([10] * 5, rows=3, capacity=10)) == 3
    with pytest.raises(ValueError, match="exceeds"):
        longest_run([11], rows=1, capacity=10)


def test_the_last_short_batch_is_padded_not_dropped():
    batches = list(pack(iter(make_samples([10, 10, 3])), rows=2, length=10))
    assert [batch.num_tokens for batch in batches] == [20, 3]
    assert (batches[1].segment_ids > 0).sum() == 3
    assert list(pack(iter([]), rows=2, length=10)) == []
