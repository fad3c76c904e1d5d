"""Compares what is read of a run (runs_of_rows.py) with what it holds, value by value."""

import numpy as np
import pytest
from runs_of_rows import HOOKS, OTHER_HOOKS, Run, columns_of, row_of, tokens_of

SHARED = ("token_ids", "sample_idx", "position")


def run_of(shard_format="pickle", dtype="float32", count=20, **given):
    options = dict(shard_format=shard_format, dtype=dtype, hooks=HOOKS | OTHER_HOOKS)
    return Run([*range(count)], 0, **(options | given))


def stored_tokens(run):
    """All tokens that a run holds, sorted by sample and position: arrays by name, the hooks among
    them."""
    numbers = run.sample_numbers()
    rows = sorted(run.rows, key=numbers.__getitem__)
    kept = [run.positions(row) for row in rows]
    ids, roles = zip(*map(tokens_of, rows), strict=True)
    of_rows = {
        "token_ids": ids,
        "role": roles,
        "turn": [each + 1 for each in roles],
        **{hook: [run.values(row, hook) for row in rows] for hook in run.hooks.values()},
    }
    return {
        "sample_idx": np.repeat([numbers[row] for row in rows], [*map(len, kept)]),
        "position": np.concatenate(kept).astype(np.int32),
        **{
            name: np.concatenate([values[at] for values, at in zip(every, kept, strict=True)])
            for name, every in of_rows.items()
        },
    }


def joined(batches):
    """The tokens of all batches, as `stored_tokens` has them, but in their order."""
    batches = list(batches)
    found = {name: np.concatenate([getattr(b, name) for b in batches]) for name in SHARED}
    return found | {hook: np.concatenate([b[hook] for b in batches]) for hook in batches[0]}


def in_order(tokens):
    """The same tokens, sorted by sample and position."""
    order = np.lexsort((tokens["position"], tokens["sample_idx"]))
    return {name: values[order] for name, values in tokens.items()}


def assert_same(found, expected):
    """Every value of `found` is the expected one, bit by bit, and of the same dtype."""
    for name, values in found.items():
        assert values.dtype == expected[name].dtype, name
        assert values.shape == expected[name].shape, name
        assert values.tobytes() == expected[name].tobytes(), name


def check_samples(samples, run, hooks):
    """Each sample of the run is there once, with all that is known of it."""
    numbers = run.sample_numbers()
    found = {sample.sample_idx: sample for sample in samples}
    assert len(samples) == len(found) == len(numbers)
    for row, number in numbers.items():
        sample, kept = found[number], run.positions(row)
        assert list(sample.activations) == list(hooks)
        for hook in hooks:
            assert_same({hook: sample[hook]}, {hook: run.values(row, hook)[kept]})
        ids, roles = (values[kept] for values in tokens_of(row))
        for values, due in ((sample.token_ids, ids), (sample.role, roles), (sample.position, kept)):
            np.testing.assert_array_equal(values, due)
        told = sample.text_preview, sample.doc_id, sample.row, sample.columns
        assert told == (f"text {row} ä", f"id-{row}", row_of(row), columns_of(row))


def check_moments(found, values):
    """found: statistics of every dimension. values: float64 (tokens, width)."""
    assert found.tokens == len(values)
    np.testing.assert_allclose(found.mean, values.mean(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.variance, values.var(0), rtol=1e-9)
    assert found.mean_norm == pytest.approx(np.linalg.norm(values, axis=1).mean(), rel=1e-6)
