"""Statistics of every dimension: those of the stored tokens, with and without attention sinks."""

import fsspec
import numpy as np
import pytest
from extractions import extract
from runs_to_read import DTYPES, FORMATS, WIDTHS, make_run, store, stored_tokens

from activation_extraction import ActivationDataset
from activation_extraction.dataset import open_shards
from activation_extraction.store.statistics import BUCKETS, Sums, pack_sums, unpack_sums

FIRST = next(iter(WIDTHS))
KINDS = [(shard_format, dtype) for shard_format in FORMATS for dtype in DTYPES]


def close(found, values):
    """values: (tokens, width)"""
    wide = values.astype(np.float64)
    assert found.tokens == len(wide)
    np.testing.assert_allclose(found.mean, wide.mean(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.variance, wide.var(0), rtol=1e-9)
    assert found.mean_norm == pytest.approx(np.linalg.norm(wide, axis=1).mean(), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_they_are_those_of_the_stored_tokens(kind, tmp_path, monkeypatch):
    """Over hosts and machines, and no shard is read for them."""
    run = make_run(tmp_path, *kind, count=12, machines=(2, 1))
    tokens = stored_tokens(run)
    dataset = ActivationDataset(tmp_path, list(WIDTHS)[:2])
    monkeypatch.setattr(open_shards, "open_shard", None)
    for hook in dataset.hooks:
        found, values = dataset.statistics[hook], tokens[hook]
        close(found, values)
        close(found.all_tokens, values)
        close(found.without_first_token, values[tokens["position"] > 0])
        norms = np.linalg.norm(values.astype(np.float64), axis=1)
        expected = {}
        for start, stop in ((0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32)):
            inside = (tokens["position"] >= start) & (tokens["position"] < stop)
            if inside.any():
                expected[range(start, stop)] = pytest.approx(norms[inside].mean(), rel=1e-12)
        assert len(expected) > 4 and found.norms_by_position == expected
        assert found.mean_norm == pytest.approx(found.all_tokens.mean_norm)
        assert (
            found.without_first_token.mean_norm < found.all_tokens.mean_norm
        )  # sinks are large here


def test_they_are_the_same_whatever_the_format_and_wherever_they_are(tmp_path):
    """Bit by bit: the files of a run in a bucket, and of the other format."""
    for shard_format in FORMATS:
        make_run(tmp_path / shard_format, shard_format, "bfloat16", machines=(1, 2))
    url = f"memory://{tmp_path}/bucket"
    fsspec.filesystem("memory").put(f"{tmp_path}/pickle/", url, recursive=True)
    one, *others = (
        ActivationDataset(where).statistics[FIRST].without_first_token
        for where in (tmp_path / "pickle", tmp_path / "safetensors", url)
    )
    for other in others:
        assert (one.mean == other.mean).all() and (one.variance == other.variance).all()


def test_while_a_run_goes_on_and_where_it_is_too_small_for_sinks_alone(tmp_path):
    store(tmp_path, finish=False)
    dataset = ActivationDataset(tmp_path)
    found = dataset.statistics[FIRST]
    assert 0 < found.without_first_token.tokens < found.all_tokens.tokens == dataset.tokens
    sums = Sums.zeros(3)
    sums.add([np.ones((1, 3), np.float32)], [np.zeros(1, np.int32)])
    data = pack_sums({"h": sums})
    assert unpack_sums(data, ["h"])["h"].counts.sum() == 1


def test_sums_of_two_halves_add_up():
    """Whole numbers, so that nothing is rounded; a token with a large position has its bucket."""
    values = np.random.default_rng(0).integers(-9, 9, (40, 3)).astype(np.float32)
    positions = np.sort(np.random.default_rng(1).choice(2**20, 40, replace=False)).astype(np.int32)
    positions[0] = 0
    whole, first, second = (Sums.zeros(3) for _ in range(3))
    whole.add([values], [positions])
    first.add([values[:17]], [positions[:17]])
    second.add([values[17:]], [positions[17:]])
    first.merge(second)
    for name in ("counts", "sums", "squares", "largest"):
        np.testing.assert_array_equal(getattr(first, name), getattr(whole, name))
    np.testing.assert_allclose(first.norms, whole.norms, rtol=1e-12)
    assert first.counts.argmax() == 20 < BUCKETS
    np.testing.assert_array_equal(whole.sums[0], values[0])


def test_damaged_sums_are_found(tmp_path, check):
    """Activations are read nevertheless."""
    extract(tmp_path)
    path = tmp_path / "shard_0002.npz"
    path.write_bytes(path.read_bytes().replace(b"hook", b"Hook", 1))
    (found,) = check(tmp_path)
    assert "shard_0002.npz: is damaged: its sha256" in found
    dataset = ActivationDataset(tmp_path)
    assert len(dataset[5].token_ids) == 10
    with pytest.raises(OSError, match="shard_0002.npz: is damaged: its sha256"):
        print(dataset.statistics["blocks.3.hook_resid_post"].all_tokens)
