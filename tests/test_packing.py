"""Packing: full rows, every sample once and isolated, and marks from which the rest follows."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from activation_extraction.common.errors import RunError
from activation_extraction.text import packing
from activation_extraction.text.batch import Cursor, Sample
from activation_extraction.text.packing import best_fit, pack, rows_of_group
from activation_extraction.text.samples import ChangedDataError

NOTHING = np.zeros(0, np.int32)


def make_samples(lengths):
    """Samples whose token ids say which sample and position they are. 0: one that keeps nothing."""
    return [
        Sample(
            sample_idx=i,
            token_ids=np.arange(n, dtype=np.int32) + 10_000 * i,
            text_preview="",
            doc_id=None,
            cursor=Cursor(i),
            next_cursor=Cursor(i + 1),
            kept=None if n else NOTHING,
        )
        for i, n in enumerate(lengths)
    ]


def log_normal_lengths(count, seed=0):
    """Document lengths like FineWeb-Edu's: median 620 tokens, sigma 1.0, cut at 2048."""
    drawn = np.random.default_rng(seed).lognormal(np.log(620), 1.0, count)
    return np.clip(drawn.round().astype(int), 1, 2048)


def some_lengths(count, seed):
    """Lengths from 0 to 32, many of them short."""
    chance = np.random.default_rng(seed)
    return (32 * chance.random(count) ** 2).round().astype(int).tolist()


def placed_in(batches):
    return [*chain.from_iterable(batch.samples for batch in batches)]


def numbers(batch):
    return [placed.sample.number for placed in batch.samples]


@pytest.fixture
def small_groups(monkeypatch):
    """Groups of 64 tokens, which are two rows of 32, or four of 16."""
    monkeypatch.setattr(packing, "LEAST_ROWS", 2)
    monkeypatch.setattr(packing, "GROUP_TOKENS", 64)


@pytest.mark.parametrize("seed", range(2))
def test_little_of_the_batches_is_padding(seed):
    lengths = log_normal_lengths(20_000, seed)
    batches = sum(1 for _ in pack(make_samples(lengths), rows=8, length=2048))
    assert 1 - lengths.sum() / (batches * 8 * 2048) <= 0.006


@pytest.mark.parametrize(
    "length,rows",
    [(128, 256), (2048, 256), (4096, 256), (8192, 128), (65_536, 16), (2**20, 16), (2**22, 16)],
)
def test_a_group_has_256_rows_or_a_million_tokens_and_at_least_16_rows(length, rows):
    assert rows_of_group(length) == rows


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_every_sample_is_there_once_and_alone(rows, seed, small_groups):
    """Segments follow each other without gaps, and positions start at 0."""
    samples = make_samples(some_lengths(150, seed))
    seen = []
    for batch in pack(samples, rows, 32):
        assert {array.shape for array in (batch.token_ids, batch.segment_ids, batch.positions)} == {
            (rows, 32)
        }
        ends, segments = [0] * rows, [0] * rows
        for sample, row, start, _ in batch.samples:
            stop = start + len(sample.token_ids)
            assert start == ends[row] if stop > start else start == 0
            ends[row], segments[row] = max(stop, ends[row]), segments[row] + (stop > start)
            np.testing.assert_array_equal(batch.token_ids[row, start:stop], sample.token_ids)
            np.testing.assert_array_equal(batch.positions[row, start:stop], np.arange(stop - start))
            assert (batch.segment_ids[row, start:stop] == segments[row]).all()
            seen.append(sample.number)
        for row, end in enumerate(ends):
            assert not batch.segment_ids[row, end:].any()
    assert sorted(seen) == [*range(150)]


def groups_of(batches):
    """The placed samples, divided where the mark moves on."""
    groups, begin = [[]], 0
    for placed in chain.from_iterable(batch.samples for batch in batches):
        groups[-1].append(placed)
        if placed.mark.samples > begin:
            begin = placed.mark.samples
            groups.append([])
    assert groups.pop() == []
    return groups


@pytest.mark.parametrize("seed", range(4))
def test_a_group_is_what_follows_and_fits(seed, small_groups):
    """Its rows come in the order of their first samples, and it fills them but for a few."""
    lengths = some_lengths(150, seed)
    groups = groups_of(pack(make_samples(lengths), rows=1, length=32))
    assert len(groups) > 9
    begin = 0
    for group in groups:
        due = range(begin, begin + len(group))
        assert sorted(placed.sample.number for placed in group) == [*due]
        assert sum(lengths[begin : due.stop]) <= 64 < sum(lengths[begin : due.stop + 1]) or (
            due.stop == 150
        )
        assert [placed.mark.samples for placed in group] == [begin] * (len(group) - 1) + [due.stop]
        rows: list[list[int]] = []
        for placed in group:
            if placed.start == 0:
                rows.append([])
            rows[-1].append(placed.sample.number)
        assert all(row == sorted(row) for row in rows)
        firsts = [row[0] for row in rows]
        assert firsts == sorted(firsts)
        assert len([row for row in rows if lengths[row[0]]]) <= 4
        begin = due.stop


def test_a_group_ends_at_so_many_samples(monkeypatch):
    monkeypatch.setattr(packing, "GROUP_SAMPLES", 7)
    groups = groups_of(pack(make_samples([1] * 20), rows=2, length=32))
    assert [len(group) for group in groups] == [7, 7, 6]


def test_the_stream_of_rows_does_not_depend_on_how_many_a_batch_has():
    """A batch may have the end of a group, and the beginning of the next one."""
    lengths = log_normal_lengths(1500)
    every = []
    for rows in (1, 3, 8):
        batches = list(pack(make_samples(lengths), rows, 2048))
        assert all(batch.segment_ids[:, 0].all() for batch in batches[:-1])
        found = [row.tolist() for batch in batches for row in batch.token_ids if row.any()]
        every.append((found, [(p.sample.number, p.start, p.mark) for p in placed_in(batches)]))
    assert every[0] == every[1] == every[2]


def test_the_longest_goes_first_to_where_it_fits_best():
    assert best_fit([6, 5, 5, 4, 4, 3], room=9) == [[0, 5], [1, 3], [2, 4]]
    assert best_fit([2, 7, 8, 1, 2], room=10) == [[0, 2], [1, 3, 4]]
    assert best_fit([3, 10, 0, 3, 0], room=10) == [[0, 3], [1], [2], [4]]
    assert best_fit([], room=6) == []


def test_a_group_may_have_many_short_samples():
    """It would take minutes if the time grew with the square of their number."""
    lengths = np.random.default_rng(0).integers(1, 9, 2**16).tolist()
    (group,) = groups_of(pack(make_samples(lengths), rows=8, length=2048))
    assert len(group) == 2**16
    assert sum(placed.start == 0 for placed in group) == -(-sum(lengths) // 2048)


def test_samples_without_tokens_take_no_row(small_groups):
    """They come in order, with the rows that follow them."""
    samples = make_samples([0, 20, 0, 12, 20, 0, 30, 0, 0])
    batches = list(pack(samples, rows=2, length=32))
    assert [numbers(batch) for batch in batches] == [[0, 1, 3, 2, 4], [5, 6, 7, 8]]
    assert [[p.row for p in batch.samples] for batch in batches] == [[0, 0, 0, 1, 1], [0, 0, 1, 1]]
    assert [batch.segment_ids.max(1).tolist() for batch in batches] == [[2, 1], [1, 0]]
    for batch in batches:
        kept = dict(zip(numbers(batch), batch.kept_tokens(), strict=True))
        for placed in batch.samples:
            _, positions = kept[placed.sample.number]
            assert positions.tolist() == [*range(len(placed.sample.token_ids))]
    (only,) = pack(make_samples([0, 0]), rows=2, length=32)
    assert numbers(only) == [0, 1] and only.num_tokens == 0


def test_samples_without_tokens_do_not_wait_for_a_row_for_ever(monkeypatch):
    monkeypatch.setattr(packing, "GROUP_SAMPLES", 8)
    batches = list(pack(make_samples([0] * 20), rows=2, length=32))
    assert [len(batch.samples) for batch in batches] == [8, 8, 4]


def test_only_kept_tokens_are_marked():
    first, second = make_samples([5, 4])
    second = replace(second, kept=np.array([1, 3], np.int32))
    (batch,) = pack([first, second], rows=1, length=10)
    assert np.flatnonzero(batch.kept[0]).tolist() == [0, 1, 2, 3, 4, 6, 8]
    assert [positions.tolist() for _, positions in batch.kept_tokens()] == [[0, 1, 2, 3, 4], [1, 3]]


def fails_after(samples, error):
    yield from samples
    raise error


@pytest.mark.parametrize("count", [0, 1, 5, 60])
def test_an_error_comes_after_all_samples_before_it(count, small_groups):
    """The marks are those of a stream that ends there."""
    samples = make_samples(some_lengths(count, 1))
    found = []
    with pytest.raises(RunError, match="no more"):
        for batch in pack(fails_after(samples, RunError("no more")), rows=2, length=32):
            found.append(batch)
    expected = placed_in(pack(samples, 2, 32))
    assert [(p.sample.number, p.row, p.start, p.mark) for p in placed_in(found)] == [
        (p.sample.number, p.row, p.start, p.mark) for p in expected
    ]
    assert len(expected) == count


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ChangedDataError("other"), KeyError()])
def test_other_errors_come_at_once(error):
    batches = pack(fails_after(make_samples([3, 4]), error), rows=2, length=32)
    with pytest.raises(type(error)):
        next(batches)


def test_a_sample_that_is_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="a sample of 11 tokens, more than the 10 of a row"):
        list(pack(make_samples([11]), rows=1, length=10))
