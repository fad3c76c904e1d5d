"""Shards with a byte per value: what is stored, read, exported, measured and refused."""

import gzip
import json
import pickle
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from command_line import main
from runs_to_read import identity_of
from safetensors.torch import load_file
from storages import open_storage

from activation_extraction import ActivationDataset
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.store import shard as shard_module

HOOKS = {3: "blocks.3.hook_resid_post", "wide": "blocks.4.mlp.hook_post", 5: "choices"}
WIDTHS = {3: 33, "wide": 64}
COUNT = 12
each_format = pytest.mark.parametrize("shard_format", SHARD_FORMATS)


def activation_of(index, key):
    """What a sample has at a hook, before it is encoded; sinks are large."""
    chance = np.random.default_rng([index, len(HOOKS[key])])
    values = chance.standard_normal((1 + index * 7 % 23, WIDTHS[key]), np.float32)
    values[0, 1] *= 1000
    return values


def decoded(x):
    """Returns x as it is read back: e4m3 as NumPy rounds it, with a scale for every token."""
    scales = np.abs(x).max(axis=1, keepdims=True) * np.float32(1 / 448)
    return (x / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales


def every(key):
    return np.concatenate([decoded(activation_of(index, key)) for index in range(COUNT)])


def float8_run(root, hooks=HOOKS, **options):
    identity = replace(identity_of(), activation_dtype="float8", integer_hooks=("choices",))
    return open_storage(root, hooks, **{"identity": identity} | options)


def store(root, shard_format="safetensors", **options):
    """Writes a run with two encoded hooks and one of integers."""
    usual = {"shard_size_gb": 5e-6, "shard_format": shard_format}
    with float8_run(root, **usual | options) as storage:
        for index in range(COUNT):
            tokens = len(activation_of(index, 3))
            ids = np.arange(tokens, dtype=np.int32)
            for key in HOOKS:
                whole = np.full((tokens, 2), index, np.int32)
                values = whole if key == 5 else activation_of(index, key)
                storage.add_activation(key, values, index, "text", ids)
    return root


@each_format
def test_what_is_read_is_what_was_decoded(tmp_path, shard_format):
    dataset = ActivationDataset(store(tmp_path / "run", shard_format))
    assert list(dataset.dtypes.values()) == ["float32", "float32", "int32"]
    for sample in dataset:
        for key in WIDTHS:
            expected = decoded(activation_of(sample.sample_idx, key))
            assert sample[HOOKS[key]].dtype == np.float32
            assert sample[HOOKS[key]].tobytes() == expected.tobytes()
        assert (sample["choices"] == sample.sample_idx).all()
    for dtype in (None, "float32", "float16", "bfloat16"):
        batches = list(dataset.batches(50, dtype=dtype))
        for key in WIDTHS:
            found = np.concatenate([batch[HOOKS[key]] for batch in batches])
            assert found.tobytes() == every(key).astype(dtype or "float32").tobytes()
        assert {batch["choices"].dtype.name for batch in batches} == {"int32"}
    shuffled = next(dataset.batches(dataset.tokens, shuffle=1, dtype="float16"))
    order = np.lexsort((shuffled.position, shuffled.sample_idx))
    np.testing.assert_array_equal(shuffled[HOOKS[3]][order], every(3).astype(np.float16))
    few = dataset.batches(50, max_norm={HOOKS[3]: 50.0})
    expected = int((np.linalg.norm(every(3), axis=1) <= 50).sum())
    assert sum(map(len, few)) == expected < dataset.tokens
    flags = "--export_dir", tmp_path / "memmap", "--hook_names", HOOKS[3]
    assert main("--export", "memmap", *flags, "--output_dir", tmp_path / "run") == 0
    (path,) = (tmp_path / "memmap").rglob("shard_0.memmap")
    np.testing.assert_array_equal(np.fromfile(path, np.float32).reshape(-1, 33), every(3))


def test_what_a_reader_finds_without_this_program(tmp_path):
    store(tmp_path / "s", shard_size_gb=1.0)
    store(tmp_path / "p", "pickle", shard_size_gb=1.0)
    tensors = load_file(tmp_path / "s/shard_0001.safetensors")
    records = pickle.loads(gzip.open(tmp_path / "p/shard_0001.pkl.gz").read())
    for key in WIDTHS:
        values, scale = tensors[HOOKS[key]], tensors[f"{HOOKS[key]}.scale"].numpy()
        assert values.dtype == torch.float8_e4m3fn and scale.dtype == "float32"
        pickled = np.concatenate([record["activation"] for record in records[key]])
        np.testing.assert_array_equal(pickled, values.view(torch.uint8).numpy(), strict=True)
        assert np.concatenate([r["scale"] for r in records[key]]).tobytes() == scale.tobytes()
        np.testing.assert_array_equal(values.float().numpy() * scale, every(key))
    assert "choices.scale" not in tensors and "scale" not in records[5][0]


def test_a_shard_has_as_many_stored_bytes_as_it_may(tmp_path):
    """The bytes before encoding do not count: a token of width 28 takes 32 bytes, not 112."""
    with float8_run(tmp_path, {0: "h"}, shard_size_gb=192 / 10**9) as storage:
        for index in range(7):
            storage.add_activation(0, np.ones((2, 28), np.float32), index, "text", [1, 2])
    assert [commit.count for commit in storage.made] == [3, 3, 1]


@each_format
def test_samples_that_keep_no_token(tmp_path, shard_format):
    with float8_run(tmp_path, {0: "h"}, shard_format=shard_format) as storage:
        for index, tokens in enumerate((0, 2, 0)):
            values = np.full((tokens, 40), 2, np.float32)
            storage.add_activation(0, values, index, "text", [0] * tokens)
    dataset = ActivationDataset(tmp_path)
    assert [sample["h"].shape for sample in dataset] == [(0, 40), (2, 40), (0, 40)]
    assert [each.tokens for each in dataset.statistics["h"].error.values()] == [1, 1]


def test_some_tokens_are_measured_of_a_shard_that_has_many(tmp_path, monkeypatch, check):
    """Whatever the groups of samples that threads encode."""
    monkeypatch.setattr(shard_module, "MEASURED", 5)
    whole = store(tmp_path / "whole", shard_size_gb=1.0) / "shard_0001.safetensors"
    monkeypatch.setattr(shard_module, "GROUP_BYTES", 3000)
    store(tmp_path / "groups", shard_size_gb=1.0)
    assert (tmp_path / "groups/shard_0001.safetensors").read_bytes() == whole.read_bytes()
    hook, _, integers = json.loads((tmp_path / "groups/shard_0001.json").read_text())["hooks"]
    assert (hook["scale"], integers["scale"], "error" in integers) == (33, None, False)
    exact = [activation_of(index, 3).astype(np.float64) for index in range(COUNT)]
    errors = [
        np.linalg.norm(x - decoded(x.astype(np.float32)), axis=1) / np.linalg.norm(x, axis=1)
        for x in exact
    ]
    for kind, of_kind in (
        ("sinks", np.array([each[0] for each in errors])),
        ("others", np.concatenate([each[1:] for each in errors])),
    ):
        some = of_kind[:: -(-len(of_kind) // 5)]
        found = hook["error"][kind]
        assert 3 < len(some) <= 5 and found["tokens"] == len(some)
        assert (found["mean"], found["worst"]) == pytest.approx((some.mean(), some.max()))
    assert check(tmp_path / "groups") == []
