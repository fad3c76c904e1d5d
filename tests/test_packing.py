"""Packing: full rows, and every sample once and isolated, however many rows a batch has."""

from dataclasses import replace

import numpy as np
import pytest

from activation_extraction.text import packing
from activation_extraction.text.packing import pack, samples_of


def make_samples(lengths):
    """Samples whose token ids say which sample and position they are. 0: one that keeps nothing."""
    return [
        replace(
            sample, kept_positions_or_none=None if len(sample.token_ids) else np.zeros(0, np.int32)
        )
        for sample in samples_of(10_000 * i + np.arange(n) for i, n in enumerate(lengths))
    ]


@pytest.fixture
def small_groups(monkeypatch):
    """Groups of 64 tokens, which are two rows of 32, and of 40 samples."""
    monkeypatch.setattr(packing, "MIN_GROUP_ROWS", 2)
    monkeypatch.setattr(packing, "GROUP_TOKENS", 64)
    monkeypatch.setattr(packing, "GROUP_SAMPLES", 40)


@pytest.mark.parametrize("rows,seed", [(1, 0), (3, 1), (8, 2)])
def test_every_sample_is_there_once_and_alone(rows, seed, small_groups):
    """Segments follow each other without gaps, and positions start at 0."""
    seen, chance = [], np.random.default_rng(seed)
    lengths = (32 * chance.random(150) ** 2).round().astype(int)  # from 0, and many short ones
    for batch in pack(make_samples(lengths), rows, 32):
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
        placed = [place for batch in batches for place in batch.samples]
        every.append((found, [(p.sample.number, p.start_in_row, p.mark.samples) for p in placed]))
    assert every[0] == every[1] == every[2]


def test_samples_without_tokens_do_not_wait_for_a_row_for_ever(small_groups):
    many = pack(make_samples([0] * 100), rows_per_batch=2, tokens_per_row=32)
    assert [(len(batch.samples), batch.num_tokens) for batch in many] == [(40, 0), (40, 0), (20, 0)]


def test_only_kept_tokens_are_marked():
    first, second = make_samples([5, 4])
    second = replace(second, kept_positions_or_none=np.array([1, 3], np.int32))
    (batch,) = pack([first, second], rows_per_batch=2, tokens_per_row=8)
    assert batch.kept_mask.tolist() == [
        [True] * 5 + [False] * 3,
        [False, True, False, True] + 4 * [0],
    ]
    assert batch.token_ids[batch.kept_mask].tolist() == [0, 1, 2, 3, 4, 10_001, 10_003]
    kept = [(where.start, where.stop, found.tolist()) for where, found in batch.kept_tokens()]
    assert kept == [(0, 5, [0, 1, 2, 3, 4]), (5, 7, [1, 3])]
