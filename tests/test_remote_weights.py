"""Weights read by ranges from a bucket or the hub: the same values, few bytes, faults, digests."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest
from command_line import main
from hub_server import serve_hub
from pods import Pod, flags_for, stored
from safetensors import safe_open
from safetensors.numpy import save

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.model import weight_files
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.weight_files import RemoteFile
from activation_extraction.model.weights import load_params
from activation_extraction.run.digests import model_digest
from activation_extraction.store.folder import SourceFolder
from activation_extraction.text.samples import load_tokenizer
from qwen2_jax import Qwen2, weight_table
from qwen2_jax_with_hooks import FAMILIES


class Counting(SourceFolder):
    """Notes the bytes that are read from it."""

    def __init__(self, url):
        super().__init__(url)
        self.bytes_read = 0

    def read(self, *arguments, **options):
        data = super().read(*arguments, **options)
        self.bytes_read += len(data)
        return data


@pytest.fixture
def memory(tmp_path):
    """A folder of fsspec's that is neither local nor a bucket's, and reports no digests."""
    url = f"memory://{tmp_path.name}"
    yield url
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def put(folder, url):
    for path in sorted(Path(folder).iterdir()):
        write(url, path.name, path.read_bytes())


def write(url, name, data):
    fsspec.filesystem("memory").pipe(f"{url}/{name}", data)


def load(model_path):
    where = Checkpoint(model_path)
    _, config = FAMILIES.read_config(where.file("config.json"))
    layout = build_layout(jax.devices()[:1], {"model": 1}, kv_heads=1)
    return load_params(weight_table(Qwen2(config)), where, np.float32, layout), where


def same(found, expected):
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


@pytest.mark.parametrize("gap,piece", [(0, 2**20), (200, 7), (2**20, 64)])
def test_any_part_of_any_tensor(tmp_path, memory, monkeypatch, gap, piece):
    monkeypatch.setattr(weight_files, "GAP", gap)
    monkeypatch.setattr(weight_files, "PIECE", piece)
    chance = np.random.default_rng(0)
    tensors = {
        f"t{k}": chance.standard_normal(chance.integers(1, 9, k)).astype("float16")
        for k in range(1, 5)
    }
    write(memory, "some.safetensors", save(tensors))
    folder = Counting(memory)
    file = RemoteFile(folder, "some.safetensors", folder.files()["some.safetensors"])
    assert {name: place.shape for name, place in file.header.items()} == {
        name: values.shape for name, values in tensors.items()
    }
    for name, values in tensors.items():
        for _ in range(20):
            ends = [sorted(chance.integers(0, size + 1, 2)) for size in values.shape]
            index = tuple(slice(*map(int, bound)) for bound in ends)
            before = folder.bytes_read
            np.testing.assert_array_equal(file.read(name, index), values[index])
            if gap == 0:  # not a byte too many
                assert folder.bytes_read - before == values[index].nbytes


def test_a_model_at_a_url_is_the_local_one(demo_inputs, memory):
    put(demo_inputs / "model", memory)
    found, remote = load(memory)
    expected, local = load(str(demo_inputs / "model"))
    same(found, expected)
    assert remote.commit is None and len(remote.tokenizer_files()) == len(local.tokenizer_files())
    assert model_digest(remote) == model_digest(local)
    tokenizers = [load_tokenizer(where.tokenizer_files(), "", 2048) for where in (remote, local)]
    assert len({tokenizer.to_str() for tokenizer in tokenizers}) == 1


def test_a_file_that_a_bucket_no_longer_has_is_not_read(demo_inputs, memory):
    """transformers reads what lies in the folder of copies."""
    put(demo_inputs / "model", memory)
    copy = Checkpoint(memory).file("tokenizer_config.json")
    fsspec.filesystem("memory").rm(f"{memory.removeprefix('memory:/')}/tokenizer_config.json")
    assert Checkpoint(memory).find("tokenizer_config.json") is None and not copy.exists()


def test_a_full_folder_of_copies_is_named(demo_inputs, memory, monkeypatch):
    put(demo_inputs / "model", memory)
    folder = Checkpoint(memory).file("config.json").parent

    def full(**_):
        return open("/dev/full", "wb")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    with pytest.raises(RunError, match=rf"config.json cannot be copied to {folder}: No space"):
        Checkpoint(memory).file("config.json")


def test_a_bucket_that_fails_is_asked_again(demo_inputs, monkeypatch, bucket):
    for path in (demo_inputs / "model").iterdir():
        bucket.put(f"models/tiny/{path.name}", path.read_bytes())
    served = bucket.served
    monkeypatch.setattr(weight_files, "PIECE", 2**18)
    bucket.rate, bucket.faults = 0.05, ("503", "reset", "truncated")
    found, remote = load("gs://bucket/models/tiny")
    bucket.rate = 0.0
    same(found, load(str(demo_inputs / "model"))[0])
    assert sum(bucket.failed.values()) > 3
    size = (demo_inputs / "model/model.safetensors").stat().st_size
    assert bucket.served - served < 2.5 * size
    assert model_digest(remote) == model_digest(load(str(demo_inputs / "model"))[1])


@pytest.fixture
def hub(tmp_path, demo_inputs):
    (tmp_path / "hub/models/org").mkdir(parents=True)
    os.symlink(demo_inputs / "model", tmp_path / "hub/models/org/tiny")
    with serve_hub(tmp_path / "hub") as server:
        yield server


LOAD = """
import json, sys
sys.path[:0] = sys.argv[1:3]
from test_remote_weights import load, same
import jax, numpy as np
from activation_extraction.common.errors import RunError
from activation_extraction.model import checkpoint
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.weights import load_params
from activation_extraction.store.folder import SourceFolder
from activation_extraction.run.digests import model_digest
from activation_extraction.text.samples import load_tokenizer
from qwen2_jax import Qwen2, weight_table
from qwen2_jax_with_hooks import FAMILIES
flipped = json.loads(sys.argv[3])
original = SourceFolder.read
def read(self, name, start=None, stop=None):
    data = original(self, name, start, stop)
    if flipped and stop and start <= flipped < stop:
        data = bytearray(data)
        data[flipped - start] ^= 1
    return data
SourceFolder.read = read
if sys.argv[5:]:
    checkpoint.shutil.disk_usage = lambda path: checkpoint.shutil._ntuple_diskusage(9, 9, 9)
found = Checkpoint("org/tiny", keep=bool(sys.argv[5:]))
_, config = FAMILIES.read_config(found.file("config.json"))
layout = build_layout(jax.devices()[:1], {"model": 1}, kv_heads=1)
table = weight_table(Qwen2(config))
try:
    params = load_params(table, found, np.float32, layout)
except RunError as error:
    sys.exit(f"RunError {error}")
same(params, load(sys.argv[4])[0])
print(model_digest(found) == f"commit {found.commit}")
"""


def load_from_hub(hub, tmp_path, demo_inputs, flipped, *more):
    here = Path(__file__).parent
    arguments = [here, here.parent, json.dumps(flipped), demo_inputs / "model", *more]
    return subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, arguments)],
        env=os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["full disk"]], ids=["not kept", "full disk"])
def test_the_hub_s_weights_without_a_disk(hub, tmp_path, demo_inputs, more):
    done = load_from_hub(hub, tmp_path, demo_inputs, None, *more)
    assert done.stdout == "True\n", done.stderr
    path = demo_inputs / "model/model.safetensors"
    with safe_open(path, "np") as file:
        twice = file.get_tensor("model.embed_tokens.weight").nbytes  # the whole model's head, too
    # Nothing is read to know the model, which the hub's commit says.
    assert hub.sent <= path.stat().st_size + twice + weight_files.FIRST_BYTES
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    assert ("straight into memory" in done.stderr) == bool(more)


@pytest.mark.long
def test_a_byte_that_changed_on_the_way_is_found(hub, tmp_path, demo_inputs):
    size = (demo_inputs / "model/model.safetensors").stat().st_size
    done = load_from_hub(hub, tmp_path, demo_inputs, size - 1000)
    assert "RunError hf://org/tiny@" in done.stderr
    assert "/model.safetensors: its content has the sha256 " in done.stderr


@pytest.mark.long
def test_each_of_four_hosts_downloads_only_its_layers(hub, tmp_path, demo_inputs):
    """Pipeline stages: three layers of twelve each, and the embedding; counted by the servers."""
    shared = ["--layers_to_extract", 11, "--mesh_shape", 4, "--mesh_axes", "pipeline"]
    shared += ["--max_samples", 8, "--output_dir", tmp_path / "pod"]
    texts = ["--dataset_path", demo_inputs / "documents.parquet", "--max_seq_length", 64]
    with ExitStack() as servers:
        hubs = [servers.enter_context(serve_hub(tmp_path / "hub")) for _ in range(4)]
        pod = Pod(
            *(tmp_path, 4, 1, "--model_path", "org/tiny", *texts, *shared),
            of_each=[
                {"HF_ENDPOINT": each.endpoint, "HF_HOME": str(tmp_path / f"home{host}")}
                for host, each in enumerate(hubs)
            ],
        )
        assert pod.wait() == [0] * 4, [pod.text(i) for i in range(4)]
    with safe_open(demo_inputs / "model/model.safetensors", "np") as file:
        sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}
    layer = [f".layers.{k}." for k in range(12)]
    everywhere = sum(size for name, size in sizes.items() if ".layers." not in name)
    for host, each in enumerate(hubs):
        own = sum(
            size
            for name, size in sizes.items()
            if any(mark in name for mark in layer[3 * host : 3 * host + 3])
        )
        assert own < each.sent <= own + everywhere + weight_files.FIRST_BYTES, host
    alone = tmp_path / "alone"
    one = flags_for(demo_inputs, alone, "--max_samples", 8, hooks=("--layers_to_extract", 11))
    assert main(*one) == 0
    assert sum(map(len, stored(tmp_path / "pod").values())) == 8


@pytest.mark.parametrize(
    "break_it,message",
    [
        (lambda data: data[:-5], "its header describes"),
        (lambda data: b"\xff" * 8 + data[8:], "its header would have"),
        (lambda data: data[:8] + b"[" + data[9:], "not a safetensors file"),
        (lambda data: data.replace(b"[128]", b"[127]", 1), "size does not follow from its shape"),
        (None, "has no model.safetensors"),
    ],
    ids=["cut short", "length", "text", "shape", "missing"],
)
def test_a_broken_remote_file_is_named(demo_inputs, memory, break_it, message):
    put(demo_inputs / "model", memory)
    name = "model.safetensors"
    fsspec.filesystem("memory").rm_file(f"{memory}/{name}")
    if break_it:
        write(memory, name, break_it((demo_inputs / "model" / name).read_bytes()))
    with pytest.raises(InputError, match=message) as found:
        load(memory)
    assert memory in str(found.value)


def test_a_url_without_a_model_is_refused(tmp_path, demo_inputs, capsys):
    flags = ["--model_path", "memory://empty", "--output_dir", tmp_path / "out"]
    assert main(*flags, "--dataset_path", demo_inputs / "documents.parquet") == 2
    error = capsys.readouterr().err
    assert "config.json" in error and len(error.splitlines()) == 1
