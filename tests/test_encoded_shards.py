"""Shards with a byte per value: what is stored, read, exported, continued and refused."""

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
from activation_extraction.common.encodings import decode, encode, relative_errors
from activation_extraction.common.errors import InputError, StorageError
from activation_extraction.inspect.verify import verify
from activation_extraction.store import shard as shard_module
from activation_extraction.store.commit import Commit, unseal
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import read_stored
from activation_extraction.store.shard_reader import read_shard

HOOKS = {3: "blocks.3.hook_resid_post", "wide": "blocks.4.mlp.hook_post", 5: "choices"}
WIDTHS = {3: 33, "wide": 64}
DTYPES = ("float32", "float16", "bfloat16")
each_format = pytest.mark.parametrize("shard_format", SHARD_FORMATS)


def activation_of(index, key):
    """What a sample has at a hook, before it is encoded; sinks are large."""
    chance = np.random.default_rng([index, len(HOOKS[key])])
    values = chance.standard_normal((1 + index * 7 % 23, WIDTHS[key]), np.float32)
    values[0, 1] *= 1000
    return values


def stored_of(index, key):
    """Returns that activation as it is read, decoded, and the relative error of each token."""
    x = activation_of(index, key)
    decoded = decode(*encode(x))
    return decoded, relative_errors(x, decoded)


def store(root, shard_format="safetensors", count=12, **options):
    """Writes a run with two encoded hooks and one of integers."""
    identity = replace(identity_of(), activation_dtype="float8", integer_hooks=("choices",))
    identity = replace(identity, max_seq_length=32, shard_format=shard_format, shard_size_gb=5e-6)
    usual = {"shard_size_gb": 5e-6, "shard_format": shard_format, "identity": identity}
    model = {"hidden_size": 33, "vocab_size": 50}
    metadata = {"configuration": {"model_path": "some/model"}, "model": model, "backend": "cpu"}
    with open_storage(root, HOOKS, metadata=metadata, **(usual | options)) as storage:
        for index in range(count):
            tokens = len(activation_of(index, 3))
            for key in HOOKS:
                if key == 5:
                    values = np.full((tokens, 2), index, np.int32)
                else:
                    values = activation_of(index, key)
                ids = np.arange(tokens, dtype=np.int32)
                storage.add_activation(
                    key, values, index, "text", ids, f"id-{index}", {"row": index}
                )
    return root


def tensors_of(path):
    """The tensors of a shard as NumPy arrays; what PyTorch calls float8 is float8 there."""

    def as_numpy(tensor):
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor.numpy()
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)

    return {name: as_numpy(tensor) for name, tensor in load_file(path).items()}


@each_format
def test_what_is_read_is_what_was_decoded(tmp_path, shard_format):
    dataset = ActivationDataset(store(tmp_path, shard_format))
    assert len(dataset) == 12 and dataset.dtype == np.float32
    assert list(dataset.dtypes.values()) == ["float32", "float32", "int32"]
    for sample in dataset:
        for key in WIDTHS:
            expected, _ = stored_of(sample.sample_idx, key)
            assert sample[HOOKS[key]].dtype == np.float32
            assert sample[HOOKS[key]].tobytes() == expected.tobytes()
        assert (sample["choices"] == sample.sample_idx).all()
    every = {k: np.concatenate([stored_of(n, k)[0] for n in range(12)]) for k in WIDTHS}
    for dtype in (None, *DTYPES):
        batches = list(dataset.batches(50, dtype=dtype))
        for key in WIDTHS:
            found = np.concatenate([batch[HOOKS[key]] for batch in batches])
            assert found.tobytes() == every[key].astype(dtype or "float32").tobytes()
        assert {batch["choices"].dtype.name for batch in batches} == {"int32"}
    shuffled = next(dataset.batches(dataset.tokens, shuffle=1, dtype="float16"))
    order = np.lexsort((shuffled.position, shuffled.sample_idx))
    np.testing.assert_array_equal(shuffled[HOOKS[3]][order], every[3].astype(np.float16))
    few = list(dataset.batches(50, max_norm={HOOKS[3]: 50.0}))
    expected = int((np.linalg.norm(every[3], axis=1) <= 50).sum())
    assert sum(map(len, few)) == expected < dataset.tokens


def test_what_a_reader_finds_without_this_program(tmp_path):
    store(tmp_path / "s", shard_size_gb=1.0)
    store(tmp_path / "p", "pickle", shard_size_gb=1.0)
    tensors = tensors_of(tmp_path / "s/shard_0001.safetensors")
    records = pickle.loads(gzip.open(tmp_path / "p/shard_0001.pkl.gz").read())
    for key in WIDTHS:
        values, scale = tensors[HOOKS[key]], tensors[f"{HOOKS[key]}.scale"]
        assert values.dtype.name == "float8_e4m3fn" and scale.dtype == "float32"
        pickled = [record["activation"] for record in records[key]]
        assert {each.dtype.name for each in pickled} == {"uint8"}
        assert np.concatenate(pickled).tobytes() == values.tobytes()
        assert np.concatenate([r["scale"] for r in records[key]]).tobytes() == scale.tobytes()
        expected = np.concatenate([stored_of(n, key)[0] for n in range(12)])
        np.testing.assert_array_equal(values.astype(np.float32) * scale, expected)
    assert "choices.scale" not in tensors and "scale" not in records[5][0]


def test_a_shard_has_as_many_stored_bytes_as_it_may(tmp_path):
    """The bytes before encoding do not count."""
    most, of_token = 5000, 33 + 4 + 64 + 4 + 8
    store(tmp_path, count=60)
    taken = []
    for path in sorted(tmp_path.glob("shard_*.json")):
        samples = json.loads(path.read_text())["samples"]
        indices = range(samples["first"], samples["last"] + 2)
        tokens = [len(activation_of(index, 3)) for index in indices]
        taken.append(sum(tokens[:-1]) * of_token)
        if samples["last"] < 59:
            assert sum(tokens) * of_token > most
    assert max(taken) <= most and len(taken) > 2


def test_exports_decode(tmp_path):
    source, target = store(tmp_path / "source", "pickle"), tmp_path / "memmap"
    assert main("--export", "memmap", "--export_dir", target, "--output_dir", source) == 0
    values = np.fromfile(target / HOOKS[3] / "shard_0.memmap", np.float32).reshape(-1, 33)
    expected = np.concatenate([stored_of(n, 3)[0] for n in range(12)])
    np.testing.assert_array_equal(values, expected)


def test_nan_stops_the_run_and_names_the_sample(tmp_path):
    bad = np.ones((3, 40), np.float32)
    bad[1, 35] = np.nan
    identity = Identity(activation_dtype="float8")
    with pytest.raises(StorageError, match="sample 1, hook 0: NaN or infinite"):
        with open_storage(tmp_path, {0: "h"}, identity=identity) as storage:
            for index, values in enumerate((np.ones((3, 40), np.float32), bad)):
                storage.add_activation(0, values, index, "text", np.zeros(3, np.int32))
    assert not read_stored(Folder(str(tmp_path))).commits


@each_format
def test_samples_that_keep_no_token(tmp_path, shard_format):
    identity = replace(identity_of(), activation_dtype="float8", positions="last")
    with open_storage(tmp_path, {0: "h"}, identity=identity, shard_format=shard_format) as storage:
        for index, tokens in enumerate((0, 2, 0)):
            values = np.full((tokens, 40), 2, np.float32)
            storage.add_activation(0, values, index, "text", np.zeros(tokens, np.int32))
    dataset = ActivationDataset(tmp_path)
    assert [sample["h"].shape for sample in dataset] == [(0, 40), (2, 40), (0, 40)]
    np.testing.assert_allclose(dataset[1]["h"], 2, rtol=2**-10)
    error = dataset.statistics["h"].error
    assert (error.sinks.tokens, error.others.tokens) == (1, 1)


def test_some_tokens_are_measured_of_a_shard_that_has_many(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_module, "MEASURED", 5)
    store(tmp_path, shard_size_gb=1.0)
    hook, _, integers = json.loads((tmp_path / "shard_0001.json").read_text())["hooks"]
    assert (hook["scale"], integers["scale"], "error" in integers) == (33, None, False)
    errors = [stored_of(n, 3)[1] for n in range(12)]
    for kind, of_kind in (
        ("sinks", np.array([each[0] for each in errors])),
        ("others", np.concatenate([each[1:] for each in errors])),
    ):
        some = of_kind[:: -(-len(of_kind) // 5)]
        assert 3 < len(some) <= 5 and hook["error"][kind]["tokens"] == len(some)
        assert hook["error"][kind]["mean"] == pytest.approx(some.mean())
        assert hook["error"][kind]["worst"] == some.max()
    assert verify(Folder(str(tmp_path)), None, 0) == 0


def test_groups_that_threads_encode_change_nothing(tmp_path, monkeypatch):
    store(tmp_path / "whole", shard_size_gb=1.0)
    monkeypatch.setattr(shard_module, "GROUP_BYTES", 3000)
    store(tmp_path / "groups", shard_size_gb=1.0)
    folders = [tmp_path / name for name in ("whole", "groups")]
    shards = [(folder / "shard_0001.safetensors").read_bytes() for folder in folders]
    jsons = [json.loads((folder / "shard_0001.json").read_text()) for folder in folders]
    assert shards[0] == shards[1] and jsons[0]["samples"]["count"] == 12
    errors = [[hook.get("error") for hook in content["hooks"]] for content in jsons]
    assert errors[0] == errors[1]


def test_a_hook_may_be_called_as_the_scales_of_another_only_if_that_is_not_encoded(tmp_path):
    hooks = {1: "stream", 2: "stream.scale"}

    def open_run(folder, dtype):
        identity = replace(identity_of(), activation_dtype=dtype, shard_format="safetensors")
        return open_storage(tmp_path / folder, hooks, identity=identity, shard_format="safetensors")

    with pytest.raises(InputError, match="hook stream.scale: has the name of another hook's"):
        open_run("encoded", "float8")
    with open_run("plain", "float32") as storage:
        for key in hooks:
            values = np.full((3, 4 * key), key, np.float32)
            storage.add_activation(key, values, 0, "", np.arange(3, dtype=np.int32))
    folder = Folder(str(tmp_path / "plain"))
    commit = Commit.from_json(unseal((tmp_path / "plain/shard_0001.json").read_bytes(), ""), "")
    shard = read_shard(folder, commit)
    assert [slices[0].shape for slices in shard.slices.values()] == [(3, 4), (3, 8)]
