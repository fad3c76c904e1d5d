"""Packing: full rows, complete, isolated, and the same batches from every cursor."""

import json
from itertools import chain

import numpy as np
import pytest

from activation_extraction.text import packing
from activation_extraction.text.batch import Cursor, Sample
from activation_extraction.text.packing import WINDOW, fullest, pack


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


def numbers(batch):
    return [placed.sample.number for placed in batch.samples]


@pytest.mark.parametrize("seed", range(2))
def test_padding_is_at_most_1_percent_on_log_normal_lengths(seed):
    lengths = log_normal_lengths(20_000, seed)
    batches = list(pack(iter(make_samples(lengths)), rows=8, length=2048))
    padding = 1 - lengths.sum() / (len(batches) * 8 * 2048)
    assert padding <= 0.01


@pytest.mark.parametrize("scale", [1, 20])  # a few samples in a row, and many
def test_batches_are_complete_of_one_shape_and_never_far_from_in_order(scale):
    lengths = log_normal_lengths(300) % 128 // scale + 1
    batches = list(pack(iter(make_samples(lengths)), rows=3, length=128))
    order = [*chain(*map(numbers, batches))]
    assert sorted(order) == list(range(300)) and order != list(range(300))
    assert {batch.token_ids.shape for batch in batches} == {(3, 128)}
    assert sum(batch.num_tokens for batch in batches) == lengths.sum()
    for before, after in zip(batches, batches[1:], strict=False):
        assert before.next_cursor == after.cursor
        assert min(numbers(after)) == after.cursor.samples  # the oldest one
    for number, batch in enumerate(batches):
        earlier = {*chain(*map(numbers, batches[:number]))}
        begin = batch.cursor.samples
        assert {*range(begin)} <= earlier
        assert set(batch.cursor.taken) == earlier - {*range(begin)}
        assert [*batch.cursor.taken] == sorted(batch.cursor.taken)
        assert max(batch.cursor.taken, default=0) < begin + WINDOW
        assert numbers(batch) == sorted(numbers(batch))
    assert batches[0].cursor == Cursor(0) and batches[-1].next_cursor == Cursor(300)


@pytest.mark.parametrize("window", [1, 5, WINDOW])
@pytest.mark.parametrize("scale", [1, 4])
def test_the_same_batches_follow_from_every_cursor(monkeypatch, window, scale):
    monkeypatch.setattr(packing, "WINDOW", window)
    lengths = log_normal_lengths(100 * scale, seed=window) % 128 // scale**2 + 1
    whole = list(pack(iter(make_samples(lengths)), rows=2, length=128))
    assert len(whole) > 4
    for number, batch in enumerate([*whole, None]):
        cursor = whole[-1].next_cursor if batch is None else batch.cursor
        cursor = Cursor.from_json(json.loads(json.dumps(cursor.to_json())))
        samples = make_samples(lengths)[cursor.samples :]
        again = list(pack(iter(samples), 2, 128, cursor.taken))
        assert [each.token_ids.tolist() for each in again] == [
            each.token_ids.tolist() for each in whole[number:]
        ]
        assert [(b.cursor, b.next_cursor, numbers(b)) for b in again] == [
            (b.cursor, b.next_cursor, numbers(b)) for b in whole[number:]
        ]


def test_a_cursor_without_taken_samples_is_written_as_ever():
    assert Cursor(3).to_json() == {
        **{"samples": 3, "skip": 0, "skipped_rows": 0, "empty_rows": 0, "stream": {}, "tokens": 0}
    }
    assert Cursor.from_json({"samples": 3}) == Cursor(3)


def test_rows_do_not_depend_on_how_many_a_batch_has():
    lengths = log_normal_lengths(300)

    def rows_of(rows):
        batches = pack(iter(make_samples(lengths)), rows, 2048)
        rows = [row.tolist() for batch in batches for row in batch.token_ids]
        return [row for row in rows if any(row)]

    assert rows_of(1) == rows_of(3) == rows_of(8)


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


def test_the_fullest_choice_is_found_and_the_first_of_equal_ones():
    assert fullest([6, 3, 5, 4, 4], room=9, enough=9) == [0, 1]
    assert fullest([6, 5, 5, 4, 4, 3], room=9, enough=9) == [1, 3]
    assert fullest([6, 5, 2, 5], room=9, enough=9) == [0, 2]
    assert fullest([6, 5, 4, 3], room=9, enough=6) == [0]
    assert fullest([7, 8], room=6, enough=6) == []
    assert fullest([], room=6, enough=6) == [] and fullest([1], room=0, enough=0) == []


def test_a_row_begins_with_the_oldest_sample():
    (first, second) = pack(iter(make_samples([3, 7, 9, 3, 10])), rows=2, length=10)
    assert [numbers(first), numbers(second)] == [[0, 1, 2], [3, 4]]
    first, second, last = pack(iter(make_samples([6, 6, 6, 4, 4, 4])), rows=1, length=10)
    assert [numbers(first), numbers(second), numbers(last)] == [[0, 3], [1, 4], [2, 5]]
    assert second.cursor == Cursor(1, taken=(3,)) and last.cursor == Cursor(2, taken=(3, 4))


def test_a_sample_that_is_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="more tokens than the 10 of a row"):
        list(pack(iter(make_samples([11])), rows=1, length=10))


def test_the_last_short_batch_is_padded_not_dropped():
    batches = list(pack(iter(make_samples([10, 10, 3])), rows=2, length=10))
    assert [batch.num_tokens for batch in batches] == [20, 3]
    assert (batches[1].segment_ids > 0).sum() == 3
    assert list(pack(iter([]), rows=2, length=10)) == []
