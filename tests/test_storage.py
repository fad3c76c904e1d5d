"""Shards, their commits and metadata; statistics; failing disks."""

import gzip
import json
import pickle
import re
import weakref
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from memory_bucket import MemoryBucket, MemoryFolder, Process
from storages import open_storage

from activation_extraction import ActivationDataset
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import InputError, StorageError
from activation_extraction.store.identity import Identity
from activation_extraction.store.local_files import AtomicFile
from activation_extraction.text.packing import pack, samples_of

HOOKS = {3: "blocks.3.hook_resid_post", 5: "blocks.5.hook_resid_post"}
HIDDEN = 16


def activation(sample, key, tokens, dtype=np.float32):
    return np.random.default_rng([sample, key]).standard_normal((tokens, HIDDEN)).astype(dtype)


def add(storage, sample, tokens=10, dtype=np.float32):
    for key in HOOKS:
        storage.add_activation(
            key,
            activation(sample, key, tokens, dtype),
            sample,
            f"text {sample}",
            token_ids=np.arange(tokens, dtype=np.int32),
            doc_id=f"id-{sample}",
        )


def fill(folder, count=10, **options):
    """Ten samples of 1280 bytes, three to a shard."""
    with open_storage(folder, HOOKS, **({"shard_size_gb": 4e-6} | options)) as storage:
        for sample in range(count):
            add(storage, sample)
    return storage


def commits(folder):
    found = (json.loads(path.read_text()) for path in sorted(folder.glob("shard_*.json")))
    return [content for content in found if "reserved" not in content]


def test_shards_hold_every_record_in_order(tmp_path):
    fill(tmp_path)
    names = sorted(path.name for path in tmp_path.glob("*.pkl*"))
    assert names == [f"shard_000{n}.pkl.gz" for n in (1, 2, 3, 4)]
    seen = []
    for name in names:
        shard = pickle.load(gzip.open(tmp_path / name))
        assert list(shard) == [3, 5]
        for key, records in shard.items():
            for record in records:
                np.testing.assert_array_equal(
                    record["activation"], activation(record["sample_idx"], key, 10)
                )
                assert record["activation"].flags.writeable
                assert record["shape"] == (10, HIDDEN)
                assert record["text_preview"] == f"text {record['sample_idx']}"
                assert record["doc_id"] == f"id-{record['sample_idx']}"
                assert record["token_ids"].dtype == np.int32
                assert list(record["token_ids"]) == list(range(10))
        seen += [record["sample_idx"] for record in shard[3]]
        assert [r["sample_idx"] for r in shard[3]] == [r["sample_idx"] for r in shard[5]]
    assert seen == list(range(10))


def test_commits_describe_their_shards_and_metadata_their_sum(tmp_path):
    storage = fill(tmp_path, metadata={"model": "tiny"})
    parts = commits(tmp_path)
    for part in parts:
        assert [hook["name"] for hook in part["hooks"]] == list(HOOKS.values())
    assert [part["samples"] for part in parts] == [
        {"first": 0, "last": 2, "count": 3},
        {"first": 3, "last": 5, "count": 3},
        {"first": 6, "last": 8, "count": 3},
        {"first": 9, "last": 9, "count": 1},
    ]
    total = json.loads((tmp_path / "metadata.json").read_text())
    assert total["status"] == "complete" and total["model"] == "tiny"
    assert (total["shards"], total["samples"], total["tokens"]) == (4, 10, 100)
    sizes = [part["files"][part["file"]]["bytes"] for part in parts]
    assert total["bytes"] == sum(sizes) == storage.totals.bytes
    everything = np.concatenate([activation(sample, 5, 10) for sample in range(10)])
    norms = np.linalg.norm(everything, axis=1)
    found = total["hooks"][1]
    assert found["tokens"] == 100
    np.testing.assert_allclose(
        [found["mean"], found["variance"], found["mean_norm"], found["max_norm"]],
        [everything.mean(), everything.var(), norms.mean(), norms.max()],
        rtol=1e-5,
    )


def test_a_shard_exists_only_with_its_json(tmp_path, monkeypatch):
    """The JSON is the commit: when it cannot be written, the run fails and totals do not count."""
    order = []
    original = AtomicFile.publish

    def spy(file, create):
        order.append(file._path.name)
        if order[-1] == "shard_0002.json":
            raise OSError(28, "No space left on device")
        original(file, create)

    monkeypatch.setattr(AtomicFile, "publish", spy)
    with pytest.raises(StorageError, match=r"shard_0002.*the disk is full"):
        fill(tmp_path)
    order.remove("shard_0001.json")  # which reserves the number
    for number in (1, 2):
        own = [name for name in order if name.startswith(f"shard_{number:04d}")]
        ends = ("pkl.gz", "npz", "samples.parquet", "json")
        assert own == [f"shard_{number:04d}.{end}" for end in ends]
    assert order.index("shard_0001.json") < order.index("shard_0002.json")
    assert "shard_0003.json" not in order
    assert [part["file"] for part in commits(tmp_path)] == ["shard_0001.pkl.gz"]
    assert json.loads((tmp_path / "metadata.json").read_text())["status"] == "failed"


def test_an_exception_commits_what_is_complete(tmp_path):
    with pytest.raises(RuntimeError, match="elsewhere"):
        with open_storage(tmp_path, HOOKS) as storage:
            add(storage, 0)
            storage.add_activation(3, activation(1, 3, 10), 1, "only one of two hooks")
            raise RuntimeError("elsewhere")
    (part,) = commits(tmp_path)
    assert part["samples"] == {"first": 0, "last": 0, "count": 1}
    assert json.loads((tmp_path / "metadata.json").read_text())["status"] == "interrupted"


def test_ctrl_c_while_waiting_for_the_writer_loses_nothing(tmp_path, monkeypatch):
    """In a notebook, say, where the caller may go on."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with open_storage(tmp_path, HOOKS, shard_size_gb=4e-6) as storage:
        for sample in range(3):
            add(storage, sample)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(storage._writer, "take", interrupted)
            add(storage, 3)
        add(storage, 3)
    assert [part["samples"]["first"] for part in commits(tmp_path)] == [0, 3]


def test_the_arrays_of_samples_that_wait_are_counted_and_then_released(tmp_path):
    """All that is in memory counts, and no batch is kept for longer than its samples' shards."""
    lengths = np.random.default_rng(0).integers(1, 65, 400)
    arrays: list[weakref.ref[np.ndarray]] = []
    most = []
    with open_storage(tmp_path, HOOKS, shard_size_gb=2e-5) as storage:
        for batch in pack(samples_of(np.zeros(n, int) for n in lengths), 1, 64):
            values = {key: np.zeros((1, 64, HIDDEN), np.float32) for key in HOOKS}
            arrays += map(weakref.ref, values.values())
            size = sum(each.nbytes for each in values.values())
            storage.add_batch(batch, values)
            storage._writer.wait()
            del values
            alive = sum(array() is not None for array in arrays) // len(HOOKS)
            assert alive * size <= storage.bytes_waiting
            most.append(alive)
    assert 2 <= max(most) <= 5 and len(most) > 100 and storage.totals.samples == 400


def test_an_incomplete_sample_of_a_complete_run_is_an_error(tmp_path):
    storage = open_storage(tmp_path, HOOKS)
    storage.add_activation(3, activation(0, 3, 10), 0, "")
    with pytest.raises(ValueError, match=r"sample 0 has no activation for \[5\]"):
        storage.finalize()


def test_wrong_additions_are_refused(tmp_path):
    with open_storage(tmp_path, HOOKS) as storage:
        add(storage, 4)
        with pytest.raises(KeyError, match="hook 7 is not one of"):
            storage.add_activation(7, activation(5, 7, 10), 5, "")
        with pytest.raises(ValueError, match="given twice or out of order"):
            add(storage, 4)
        with pytest.raises(ValueError, match="expected .tokens, width."):
            storage.add_activation(3, np.zeros(16), 5, "")
        with pytest.raises(ValueError, match="expected .tokens, width."):
            storage.add_activation(3, np.zeros((3, 16)), 5, "", token_ids=np.zeros(2))


@pytest.mark.parametrize(
    "value,dtype,remedy",
    [
        (np.nan, np.float32, "check its weights"),
        (1e6, np.float16, "float16 ends at 65504"),
        (np.where(np.arange(HIDDEN) % 2, np.inf, -np.inf), np.float32, "check its weights"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_nan_and_infinity_stop_the_run_and_are_not_stored(tmp_path, value, dtype, remedy):
    with pytest.raises(StorageError, match="sample 1, hook 5: NaN or infinite ") as raised:
        with open_storage(tmp_path, HOOKS) as storage:
            add(storage, 0, dtype=dtype)
            storage.add_activation(3, activation(1, 3, 4, dtype), 1, "")
            storage.add_activation(5, np.full((4, HIDDEN), value).astype(dtype), 1, "")
    assert raised.value.remedy and remedy in raised.value.remedy
    assert not commits(tmp_path)


def test_a_buffer_that_the_caller_uses_again_is_copied(tmp_path):
    values, ids = np.zeros((4, 2), np.float32), np.zeros(4, np.int32)
    row, columns = {"line": 0}, {"tags": [0]}
    with open_storage(tmp_path, {0: "h"}) as storage:
        for number in range(3):
            values[:], ids[:] = number, number
            row["line"] = columns["tags"][0] = number
            labels = {"role": ids, "turn": ids}
            storage.add_activation(0, values, number, "", ids, None, row, 0, columns, labels)
    for number, sample in enumerate(ActivationDataset(tmp_path)):
        for found in (sample["h"], sample.token_ids, sample.role, sample.turn):
            assert (found == number).all()
        assert (sample.row, sample.columns) == ({"line": number}, {"tags": [number]})


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32"])
def test_arrays_of_pytorch_and_jax(tmp_path, dtype, shard_format):
    """Also such that are no contiguous memory."""
    tensor = torch.arange(12).reshape(2, 6)[:, ::2].to(getattr(torch, dtype))
    expected = np.array([[0, 2, 4], [6, 8, 10]], dtype)
    given = [tensor, tensor[:0], tensor.T.contiguous().T]
    if dtype != "float64":  # which JAX has not
        given.append(jnp.asarray(expected))
    with open_storage(tmp_path, {0: "h"}, shard_format=shard_format) as storage:
        for number, values in enumerate(given):
            storage.add_activation(0, values, number, "", torch.arange(len(values)))
    for values, sample in zip(given, ActivationDataset(tmp_path), strict=True):
        assert sample["h"].dtype == dtype
        np.testing.assert_array_equal(sample["h"], expected[: len(values)])


@pytest.mark.parametrize(
    "values,told",
    [
        (
            torch.ones(2, 3, requires_grad=True),
            "the tensor requires grad; give tensor.detach(",
        ),
        (torch.ones(2, 3, device="meta"), "the tensor is on meta; give tensor.detach().cpu()"),
        (
            torch.ones(2, 3).to(torch.float8_e4m3fn),
            "Tensor of torch.float8_e4m3fn: expected an",
        ),
        (torch.ones(2, 3).to_sparse(), "Tensor of torch.float32: expected an array of numbers: "),
        (
            np.ones((2, 3), np.complex64),
            "dtype complex64, expected one of bfloat16, bool, ",
        ),
        (np.ones((2, 0), np.float32), "the activation has shape (2, 0), expected (tokens, width)"),
        ([["a", "b"]] * 2, "dtype str32, expected one of "),
    ],
)
def test_arrays_that_cannot_be_stored_are_refused_by_name(tmp_path, values, told):
    with open_storage(tmp_path, {0: "h"}) as storage:
        with pytest.raises(ValueError, match=re.escape(f"sample 0, hook 0: {told}")):
            storage.add_activation(0, values, 0, "", [1, 2])
        for ids, of in (([0.5, 1.0], "float64"), ([2**31, 1], "int64")):
            told = f"sample 0, hook 0: token ids of dtype {of}, expected int32"
            with pytest.raises(ValueError, match=told):
                storage.add_activation(0, np.ones((2, 3)), 0, "", ids)


def test_safetensors_take_no_dtype_that_they_cannot_give_back(tmp_path):
    with open_storage(tmp_path, {0: "h"}, shard_format="safetensors") as storage:
        for dtype in ("int8", "uint8", "bool"):
            with pytest.raises(ValueError, match=f"dtype {dtype}, expected one of bfloat16, float"):
                storage.add_activation(0, np.ones((1, 2), dtype), 0, "", [1])


def test_a_sample_of_another_width_or_dtype_is_named(tmp_path):
    """Also by the run that continues, and in a bucket."""

    def wrong(storage, values, told):
        with pytest.raises(ValueError, match=re.escape(f"sample 9, hook 0: {told}")):
            storage.add_activation(0, values, 9, "", np.zeros(len(values), np.int32))

    for remote in (None, MemoryFolder(MemoryBucket(), Process())):
        folder = tmp_path / ("local" if remote is None else "remote")
        for _ in range(2):
            storage = open_storage(folder, {0: "h", 1: "i"}, remote=remote, shard_size_gb=1e-9)
            with pytest.raises(ZeroDivisionError), storage:
                for number in range(3):
                    for key in (0, 1):
                        values = np.zeros((2, 4), np.float32)
                        storage.add_activation(key, values, number, "", [1, 2])
                told = "expected width 4, dtype float32, as in the rest of the run"
                wrong(storage, np.zeros((2, 5), np.float32), f"width 5, dtype float32, {told}")
                wrong(storage, np.zeros((2, 4)), f"width 4, dtype float64, {told}")
                storage.add_activation(1, np.zeros((3, 4), np.float32), 9, "")
                wrong(storage, np.zeros((2, 4), np.float32), "2, expected 3 tokens as at other")
                raise ZeroDivisionError
    identity = Identity(activation_dtype="bfloat16")
    with open_storage(tmp_path / "other", {0: "h"}, identity=identity) as storage:
        wrong(storage, np.zeros((2, 4)), "width 4, dtype float64, expected width 4, dtype bfloat16")


@pytest.mark.parametrize(
    "folder,options,told",
    [
        ("s3://bucket/run?token=x", {}, "output_dir s3://bucket/run: is a URL, expected a local "),
        (Path("nope://bucket"), {}, "output_dir nope:/bucket: is a URL, expected a local folder"),
        ("own", {"shard_format": "parquet"}, "shard_format 'parquet': expected pickle or safetens"),
    ],
)
def test_unknown_formats_and_urls_are_refused(tmp_path, monkeypatch, folder, options, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=told):
        open_storage(folder, {0: "h"}, **options)
    assert not list(tmp_path.iterdir())


def test_an_existing_extraction_is_kept_unless_overwritten(tmp_path):
    fill(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match="already holds an extraction that differs in model_d"):
        open_storage(tmp_path, HOOKS, identity=Identity(model_digest="other"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    for name in ("notes.txt", "shard_notes.json", "shard_0001.pkl.bak"):
        (tmp_path / name).write_text("mine")
    (tmp_path / ".shard_0009.pkl.gz.tmp").write_text("left over by a killed run")
    fill(tmp_path, count=2, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "metadata.json",
        "notes.txt",
        "shard_0001.json",
        "shard_0001.npz",
        "shard_0001.pkl.bak",
        "shard_0001.pkl.gz",
        "shard_0001.samples.parquet",
        "shard_notes.json",
    ]
