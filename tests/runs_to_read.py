"""Compares what is read from a run of runs_of_rows.py with what it stored, value by value."""

import numpy as np
import pytest
from runs_of_rows import HOOKS, OTHER_HOOKS, Run, columns_of, row_of, tokens_of

SHARED = ("token_ids", "sample_idx", "position")


def run_of(shard_format="pickle", dtype="float32", count=20, **changes):
    options = dict(shard_format=shard_format, dtype=dtype, hooks=HOOKS | OTHER_HOOKS)
    return Run([*range(count)], 0, **(options | changes))


def stored_tokens(run):
    """Returns all tokens that a run stored, sorted by sample and position.

    Returns:
        The name of a column or hook -> an array with an entry for each token.
    """
    numbers = run.sample_numbers()
    rows = sorted(run.rows, key=numbers.__getitem__)
    kept = [run.positions(row) for row in rows]
    ids, roles = zip(*map(tokens_of, rows), strict=True)
    arrays_of_rows = {"token_ids": ids, "role": roles, "turn": [array + 1 for array in roles]}
    for hook in run.hooks.values():
        arrays_of_rows[hook] = [run.values(row, hook) for row in rows]
    tokens = {
        "sample_idx": np.repeat([numbers[row] for row in rows], [*map(len, kept)]),
        "position": np.concatenate(kept).astype(np.int32),
    }
    for name, arrays in arrays_of_rows.items():
        pairs = zip(arrays, kept, strict=True)
        tokens[name] = np.concatenate([array[positions] for array, positions in pairs])
    return tokens


def joined(batches):
    """Returns the tokens of all batches in their order, in the form of `stored_tokens`.

    Of the columns, it contains only those in SHARED.
    """
    batches = list(batches)
    arrays = {name: np.concatenate([getattr(b, name) for b in batches]) for name in SHARED}
    return arrays | {hook: np.concatenate([b[hook] for b in batches]) for hook in batches[0]}


def in_order(tokens):
    """Returns arrays with a value for each token, sorted by sample and position."""
    order = np.lexsort((tokens["position"], tokens["sample_idx"]))
    return {name: values[order] for name, values in tokens.items()}


def assert_same(tensors, expected):
    """Asserts that all arrays have the expected dtypes, shapes and bits.

    Args:
        tensors: The arrays by name.
        expected: The expected arrays by name; it may contain more.
    """
    for name, values in tensors.items():
        assert values.dtype == expected[name].dtype, name
        assert values.shape == expected[name].shape, name
        assert values.tobytes() == expected[name].tobytes(), name


def check_samples(samples, run, hooks):
    """Asserts that `samples` are all samples of a run, with the right facts, labels and values.

    Args:
        samples: The samples that were read.
        run: The run.
        hooks: The names of the hooks that were read.
    """
    numbers = run.sample_numbers()
    samples_by_number = {sample.sample_idx: sample for sample in samples}
    assert len(samples) == len(samples_by_number) == len(numbers)
    for row, number in numbers.items():
        sample, kept = samples_by_number[number], run.positions(row)
        assert list(sample.activations) == list(hooks)
        for hook in hooks:
            assert_same({hook: sample[hook]}, {hook: run.values(row, hook)[kept]})
        ids, roles = (values[kept] for values in tokens_of(row))
        for values, expected in (
            (sample.token_ids, ids),
            (sample.role, roles),
            (sample.position, kept),
        ):
            np.testing.assert_array_equal(values, expected)
        facts = sample.text_preview, sample.doc_id, sample.row, sample.columns
        assert facts == (f"text {row} ä", f"id-{row}", row_of(row), columns_of(row))


def check_moments(statistics, values):
    """Asserts that statistics of each dimension are right.

    Args:
        statistics: The statistics.
        values: The values that they describe, float64 (tokens, width).
    """
    assert statistics.tokens == len(values)
    np.testing.assert_allclose(statistics.mean, values.mean(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(statistics.variance, values.var(0), rtol=1e-9)
    assert statistics.mean_norm == pytest.approx(np.linalg.norm(values, axis=1).mean(), rel=1e-6)
