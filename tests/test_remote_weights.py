"""Weights read by ranges from a bucket or the hub: the same values, few bytes, faults."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest
from command_line import assert_refused
from hub_server import serve_hub
from safetensors import safe_open
from safetensors.numpy import save

from activation_extraction.common.errors import RunError
from activation_extraction.model import weight_files
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.weights import load_params
from activation_extraction.run.digests import model_digest
from activation_extraction.store.folder import SourceFolder
from activation_extraction.text.tokenizer import load_tokenizer
from qwen2_jax import Qwen2, weight_table
from qwen2_jax_with_hooks import FAMILIES

WEIGHTS = "model.safetensors"


@pytest.fixture
def memory(tmp_path):
    """A folder of fsspec's that is neither local nor a bucket's."""
    url = f"memory://{tmp_path.name}"
    yield url
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture
def tiny(demo_inputs, memory):
    """That folder, with the demo model."""
    fsspec.filesystem("memory").put(f"{demo_inputs}/model/*", f"{memory}/")
    return memory


def load(where):
    where = where if isinstance(where, Checkpoint) else Checkpoint(str(where))
    _, config = FAMILIES.read_config(where.file("config.json"))
    layout = build_layout(jax.devices()[:1], {"model": 1}, kv_heads=1)
    return load_params(weight_table(Qwen2(config)), where, np.float32, layout), where


def same(found, expected):
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


def test_any_part_of_any_tensor(memory):
    """Also of tensors that are larger than a request, and of ranges far from each other."""
    chance = np.random.default_rng(0)
    shapes = {"large": (5, 3_000_000), "deep": (2, 3, 700_000), "t4": (3, 5, 2, 7), "t1": (9,)}
    tensors = {
        name: chance.integers(-99, 99, shape).astype("float16") for name, shape in shapes.items()
    }
    fsspec.filesystem("memory").pipe(f"{memory}/some.safetensors", save(tensors))
    folder = SourceFolder(memory)
    file = weight_files.RemoteFile(folder, "some.safetensors", folder.files()["some.safetensors"])
    assert {name: place.shape for name, place in file.header.items()} == shapes
    for name, values in tensors.items():
        for _ in range(20):
            ends = [sorted(chance.integers(0, size + 1, 2)) for size in values.shape]
            index = tuple(slice(*map(int, bound)) for bound in ends)
            np.testing.assert_array_equal(file.read(name, index), values[index])


def test_a_model_at_a_url_is_the_local_one(demo_inputs, tiny, monkeypatch):
    """Copies of its small files go with the checkpoint."""
    found, remote = load(tiny)
    expected, local = load(demo_inputs / "model")
    same(found, expected)
    assert remote.commit is None and model_digest(remote) == model_digest(local)
    tokenizers = [load_tokenizer(where.tokenizer_files(), "", 2048) for where in (remote, local)]
    assert len({tokenizer.to_str() for tokenizer in tokenizers}) == 1
    copy = remote.file("config.json")
    assert copy.read_bytes() == (demo_inputs / "model/config.json").read_bytes()
    del remote
    assert not copy.parent.exists()
    monkeypatch.setattr(tempfile, "tempdir", str(demo_inputs / "documents.parquet"))
    with pytest.raises(RunError, match="config.json cannot be copied to .*: Not a directory"):
        Checkpoint(tiny).file("config.json")


def test_a_bucket_that_fails_is_asked_again(demo_inputs, monkeypatch, bucket):
    for path in (demo_inputs / "model").iterdir():
        bucket.put(f"models/tiny/{path.name}", path.read_bytes())
    served = bucket.served
    monkeypatch.setattr(weight_files, "PIECE", 2**18)
    bucket.rate, bucket.faults = 0.05, ("503", "reset", "truncated")
    found, remote = load("gs://bucket/models/tiny")
    bucket.rate = 0.0
    expected, local = load(demo_inputs / "model")
    same(found, expected)
    assert sum(bucket.failed.values()) > 3
    size = (demo_inputs / "model" / WEIGHTS).stat().st_size
    assert bucket.served - served < 2.5 * size
    assert model_digest(remote) == model_digest(local)


@pytest.fixture
def hub(tmp_path, demo_inputs):
    (tmp_path / "hub/models/org").mkdir(parents=True)
    os.symlink(demo_inputs / "model", tmp_path / "hub/models/org/tiny")
    with serve_hub(tmp_path / "hub") as server:
        yield server


def load_from_hub(local):
    """Loads org/tiny without a disk, and with a full one."""
    for keep in (False, True):
        shutil.disk_usage = lambda path: shutil._ntuple_diskusage(9, 9, 9)
        found, where = load(Checkpoint("org/tiny", keep=keep))
        same(found, load(local)[0])
        assert model_digest(where) == f"commit {where.commit}"


@pytest.mark.long
def test_the_hub_s_weights_without_a_disk(hub, tmp_path, demo_inputs):
    path = demo_inputs / "model" / WEIGHTS
    call = "import sys, test_remote_weights as t; t.load_from_hub(sys.argv[1])"
    home, folders = tmp_path / "home", f"{Path(__file__).parent}:{Path(__file__).parents[1]}"
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "PYTHONPATH": folders}
    done = subprocess.run(
        [sys.executable, "-c", call, path.parent],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    with safe_open(path, "np") as file:
        twice = file.get_tensor("model.embed_tokens.weight").nbytes  # the whole model's head, too
    # Nothing is read to know the model, which the hub's commit says.
    assert hub.sent <= 2 * (path.stat().st_size + twice + weight_files.FIRST_BYTES)
    assert not list(home.rglob("*.safetensors"))
    assert "it is read straight into memory" in done.stderr


@pytest.mark.parametrize(
    "break_it,message",
    [
        (lambda data: data[:-5], "its header describes"),
        (lambda data: b"\xff" * 8 + data[8:], "its header would have"),
        (lambda data: data[:8] + b"[" + data[9:], "not a safetensors file"),
        (lambda data: data.replace(b"[128]", b"[127]", 1), "size does not follow from its shape"),
        (None, "has no model.safetensors"),
    ],
)
def test_a_broken_remote_file_is_named(demo_inputs, tiny, tmp_path, capsys, break_it, message):
    memory = fsspec.filesystem("memory")
    data = memory.cat(f"{tiny}/{WEIGHTS}")
    memory.rm_file(f"{tiny}/{WEIGHTS}")
    if break_it:
        memory.pipe(f"{tiny}/{WEIGHTS}", break_it(data))
    flags = ["--model_path", tiny, "--dataset_path", demo_inputs / "documents.parquet"]
    assert_refused(capsys, tmp_path, flags, message)
    for path in memory.ls(tiny, detail=False):
        memory.rm_file(path)
    assert_refused(capsys, tmp_path, flags, "config.json")
