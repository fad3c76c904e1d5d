"""Packing: full rows, every sample once and isolated, and marks from which the rest follows."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from activation_extraction.common.errors import RunError
from activation_extraction.text import packing
from activation_extraction.text.packing import pack, samples_of
from activation_extraction.text.samples import ChangedDataError


def make_samples(lengths):
    """Samples whose token ids say which sample and position they are. 0: one that keeps nothing."""
    return [
        replace(sample, kept=None if len(sample.token_ids) else np.zeros(0, np.int32))
        for sample in samples_of(10_000 * i + np.arange(n) for i, n in enumerate(lengths))
    ]


def some_lengths(count, seed):
    """Lengths from 0 to 32, many of them short."""
    chance = np.random.default_rng(seed)
    return (32 * chance.random(count) ** 2).round().astype(int).tolist()


def places(batches):
    placed = chain.from_iterable(batch.samples for batch in batches)
    return [(p.sample.number, p.row, p.start, p.mark.samples) for p in placed]


@pytest.fixture
def small_groups(monkeypatch):
    """Groups of 64 tokens, which are two rows of 32, and of 40 samples."""
    monkeypatch.setattr(packing, "LEAST_ROWS", 2)
    monkeypatch.setattr(packing, "GROUP_TOKENS", 64)
    monkeypatch.setattr(packing, "GROUP_SAMPLES", 40)


@pytest.mark.parametrize("rows,seed", [(1, 0), (3, 1), (8, 2)])
def test_every_sample_is_there_once_and_alone(rows, seed, small_groups):
    """Segments follow each other without gaps, and positions start at 0."""
    seen = []
    for batch in pack(make_samples(some_lengths(150, seed)), rows, 32):
        ends, segments = [0] * rows, [0] * rows
        arrays = batch.token_ids, batch.segment_ids, batch.positions
        assert {array.shape for array in arrays} == {(rows, 32)}
        for sample, row, start, _ in batch.samples:
            stop = start + len(sample.token_ids)
            assert start == ends[row] if stop > start else start == 0
            ends[row], segments[row] = max(stop, ends[row]), segments[row] + (stop > start)
            np.testing.assert_array_equal(batch.token_ids[row, start:stop], sample.token_ids)
            np.testing.assert_array_equal(batch.positions[row, start:stop], np.arange(stop - start))
            assert (batch.segment_ids[row, start:stop] == segments[row]).all()
            seen.append(sample.number)
        assert not any(batch.segment_ids[row, end:].any() for row, end in enumerate(ends))
    assert sorted(seen) == [*range(150)]


@pytest.mark.parametrize("seed", range(2))
def test_a_group_is_what_follows_and_fits(seed, small_groups):
    """Its rows come in the order of their first samples; the mark moves with its last sample."""
    lengths = [*some_lengths(150, seed), *[1] * 100]
    found, begin = places(pack(make_samples(lengths), rows=1, length=32)), 0
    sizes = []
    while found:
        count = next(n for n, place in enumerate(found, start=1) if place[3] > begin)
        group, found = found[:count], found[count:]
        due = range(begin, begin + count)
        assert sorted(number for number, *_ in group) == [*due]
        assert [mark for *_, mark in group] == [begin] * (count - 1) + [due.stop]
        assert sum(lengths[begin : due.stop]) <= 64 and count <= 40
        assert not found or count == 40 or sum(lengths[begin : due.stop + 1]) > 64
        rows: list[list[int]] = []
        for number, _, start, _ in group:
            rows = rows if start else [*rows, []]
            rows[-1].append(number)
        assert rows == sorted(map(sorted, rows))
        begin = due.stop
        sizes.append(count)
    assert begin == 250 and sizes[-3:-1] == [40, 40]


def test_the_stream_of_rows_is_full_and_does_not_depend_on_how_many_a_batch_has():
    """A batch may have the end of a group, and the beginning of the next one. Documents are as long
    as FineWeb-Edu's: the median is 620 tokens, sigma 1.0, and they are cut at 2048."""
    drawn = np.random.default_rng(0).lognormal(np.log(620), 1.0, 3000)
    lengths, every = np.clip(drawn.round().astype(int), 1, 2048), []
    for rows in (1, 3, 8):
        batches = list(pack(make_samples(lengths), rows, 2048))
        assert all(batch.segment_ids[:, 0].all() for batch in batches[:-1])
        found = [row.tobytes() for batch in batches for row in batch.token_ids if row.any()]
        assert 1 - lengths.sum() / (len(found) * 2048) <= 0.006
        every.append((found, [(number, *place) for number, _, *place in places(batches)]))
    assert every[0] == every[1] == every[2]


def test_samples_without_tokens_take_no_row(small_groups):
    """They come in order, with the rows that follow them, and do not wait for one for ever."""
    samples = make_samples([0, 20, 0, 12, 20, 0, 30, 0, 0])
    batches = list(pack(samples, rows=2, length=32))
    assert [[place[:2] for place in places([batch])] for batch in batches] == [
        [(0, 0), (1, 0), (3, 0), (2, 1), (4, 1)],
        [(5, 0), (6, 0), (7, 1), (8, 1)],
    ]
    assert [batch.segment_ids.max(1).tolist() for batch in batches] == [[2, 1], [1, 0]]
    many = pack(make_samples([0] * 100), rows=2, length=32)
    assert [(len(batch.samples), batch.num_tokens) for batch in many] == [(40, 0), (40, 0), (20, 0)]


def test_only_kept_tokens_are_marked():
    first, second = make_samples([5, 4])
    second = replace(second, kept=np.array([1, 3], np.int32))
    (batch,) = pack([first, second], rows=2, length=8)
    assert batch.kept.tolist() == [[True] * 5 + [False] * 3, [False, True, False, True] + 4 * [0]]
    assert batch.token_ids[batch.kept].tolist() == [0, 1, 2, 3, 4, 10_001, 10_003]
    kept = [(where.start, where.stop, found.tolist()) for where, found in batch.kept_tokens()]
    assert kept == [(0, 5, [0, 1, 2, 3, 4]), (5, 7, [1, 3])]


@pytest.mark.parametrize(
    "error,count",
    [(RunError("no more"), 0), (RunError("no more"), 60), (ChangedDataError("other"), 60)],
)
def test_an_error_comes_after_all_samples_before_it_unless_they_are_not_to_be_trusted(
    error, count, small_groups
):
    """The marks are those of a stream that ends there."""
    samples, found = make_samples(some_lengths(count, 1)), []

    def fails():
        yield from samples
        raise error

    with pytest.raises(type(error)):
        for batch in pack(fails(), rows=2, length=32):
            found.append(batch)
    whole = places(pack(samples, 2, 32))
    assert len(whole) == count
    assert places(found) == whole if type(error) is RunError else len(places(found)) < count


def test_a_sample_that_is_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="a sample of 11 tokens, more than the 10 of a row"):
        list(pack(make_samples([11]), rows=1, length=10))
