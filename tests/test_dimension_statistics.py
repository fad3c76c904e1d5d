"""Statistics of every dimension: those of the stored tokens, with and without attention sinks."""

import fsspec
import numpy as np
import pytest
from extractions import extract
from runs_to_read import FORMATS, WIDTHS, make_run, stored_tokens

from activation_extraction import ActivationDataset
from activation_extraction.common.encodings import encode
from activation_extraction.dataset import open_shards
from activation_extraction.store import statistics
from activation_extraction.store.statistics import sums_of


def close(found, values):
    """values: (tokens, width)"""
    wide = values.astype(np.float64)
    assert found.tokens == len(wide)
    np.testing.assert_allclose(found.mean, wide.mean(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.variance, wide.var(0), rtol=1e-9)
    assert found.mean_norm == pytest.approx(np.linalg.norm(wide, axis=1).mean(), rel=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_are_those_of_the_stored_tokens(dtype, tmp_path, monkeypatch):
    """Over hosts and machines, of both formats and in a bucket; no shard is read for them."""
    for shard_format in FORMATS:
        folder = tmp_path / shard_format
        run = make_run(folder, shard_format, dtype, count=12, machines=(2, 1))
    tokens, url = stored_tokens(run), f"memory://{tmp_path}/bucket"
    fsspec.filesystem("memory").put(f"{tmp_path}/pickle/", url, recursive=True)
    monkeypatch.setattr(open_shards, "open_shard", None)
    dataset = ActivationDataset(folder)
    for hook in WIDTHS:
        found, values = dataset.statistics[hook], tokens[hook]
        close(found, values)
        close(found.all_tokens, values)
        close(found.without_first_token, values[tokens["position"] > 0])
        one = found.without_first_token
        for other in (tmp_path / "pickle", url):
            same = ActivationDataset(other).statistics[hook].without_first_token
            assert (one.mean == same.mean).all() and (one.variance == same.variance).all()


def test_sums_of_two_halves_add_up():
    """Whole numbers, so that nothing is rounded."""
    values = np.random.default_rng(0).integers(-9, 9, (40, 3)).astype(np.float32)
    positions = np.sort(np.random.default_rng(1).choice(2**20, 40, replace=False)).astype(np.int32)
    positions[0] = 0
    whole, first = sums_of([values], [positions]), sums_of([values[:17]], [positions[:17]])
    first = first.merge(sums_of([values[17:]], [positions[17:]]))
    for name in ("counts", "sums", "squares", "largest"):
        np.testing.assert_array_equal(getattr(first, name), getattr(whole, name))
    np.testing.assert_allclose(first.norms, whole.norms, rtol=1e-12)
    assert whole.counts.tolist() == [1, 39]
    np.testing.assert_array_equal(whole.sums, [values[0], values[1:].sum(0)])


@pytest.mark.parametrize("encoded", [False, True])
def test_sums_do_not_depend_on_the_size_of_blocks(monkeypatch, encoded):
    """Blocks of three tokens, over arrays of other lengths and several first tokens."""
    values = np.random.default_rng(2).standard_normal((40, 3)).astype(np.float32)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in (17, 4, 19)])
    stored, scales = encode(values) if encoded else (values, None)
    arrays = [stored[:29], stored[29:]], [positions]
    both = None if scales is None else [scales[:29], scales[29:]]
    whole = sums_of(*arrays, both)
    monkeypatch.setattr(statistics, "SUMMED_BYTES", 8 * 3 * 3)
    for name, found in vars(sums_of(*arrays, both)).items():
        np.testing.assert_allclose(found, getattr(whole, name), rtol=1e-12, atol=1e-12)


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
