"""ActivationStorage: what it stores, refuses and leaves behind; failing disks."""

import gzip
import json
import pickle
import re
from pathlib import Path
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from memory_bucket import MemoryBucket, MemoryFolder, Process
from storages import open_storage

from activation_extraction import ActivationDataset
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import InputError, RunError, StorageError
from activation_extraction.store import local_files
from activation_extraction.store.identity import Identity

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


def test_shards_commits_and_metadata_describe_what_was_given(tmp_path):
    storage = fill(tmp_path, metadata={"model": "tiny"})
    parts = commits(tmp_path)
    assert [part["samples"] for part in parts] == [
        {"first": 0, "last": 2, "count": 3},
        {"first": 3, "last": 5, "count": 3},
        {"first": 6, "last": 8, "count": 3},
        {"first": 9, "last": 9, "count": 1},
    ]
    for part in parts:
        assert [hook["name"] for hook in part["hooks"]] == list(HOOKS.values())
        shard = pickle.load(gzip.open(tmp_path / part["file"]))
        assert list(shard) == [3, 5]
        numbers = range(part["samples"]["first"], part["samples"]["last"] + 1)
        for key, records in shard.items():
            assert [record["sample_idx"] for record in records] == [*numbers]
            for number, record in zip(numbers, records, strict=True):
                expected = {
                    **{"hook": HOOKS[key], "activation": activation(number, key, 10)},
                    **{"shape": (10, HIDDEN), "text_preview": f"text {number}"},
                    **{"token_ids": np.arange(10, dtype=np.int32), "doc_id": f"id-{number}"},
                    "positions": np.arange(10, dtype=np.int32),
                }
                np.testing.assert_equal(record, {"sample_idx": number, **expected})
                assert record["activation"].flags.writeable
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
    original = local_files.write_file

    def write_file(path, *given):
        if path.name == "shard_0002.json":
            assert (tmp_path / "shard_0002.pkl.gz").exists()
            assert (tmp_path / "shard_0001.json").exists()
            raise OSError(28, "No space left on device")
        return original(path, *given)

    monkeypatch.setattr(local_files, "write_file", write_file)
    with pytest.raises(StorageError, match=r"shard_0002.*No space left on device"):
        fill(tmp_path)
    assert [part["file"] for part in commits(tmp_path)] == ["shard_0001.pkl.gz"]
    assert not (tmp_path / "shard_0003.json").exists()
    assert json.loads((tmp_path / "metadata.json").read_text())["status"] == "failed"


def test_a_changed_source_names_the_shards_since_the_last_look(tmp_path):
    answers = [None, None, None, RunError("a.jsonl: has changed")]
    sources = Mock(**{"to_json.return_value": [], "check.side_effect": answers})
    told = "a.jsonl: has changed; shards committed since it was last seen unchanged: 3"
    with pytest.raises(StorageError, match=told):
        fill(tmp_path, sources=sources)
    assert len(commits(tmp_path)) == 3


def test_an_exception_commits_what_is_complete(tmp_path):
    """In a run that is said to be complete, a sample that lacks hooks is an error instead."""
    for failing in (True, False):
        told = "elsewhere" if failing else r"sample 1 has no activation for \[5\]"
        with pytest.raises(ValueError, match=told):
            with open_storage(tmp_path / told[:4], HOOKS) as storage:
                add(storage, 0)
                storage.add_activation(3, activation(1, 3, 10), 1, "only one of two hooks")
                if failing:
                    raise ValueError("elsewhere")
        (part,) = commits(tmp_path / told[:4])
        assert part["samples"] == {"first": 0, "last": 0, "count": 1}
        status = json.loads((tmp_path / told[:4] / "metadata.json").read_text())["status"]
        assert status == ("interrupted" if failing else "complete")


def test_ctrl_c_while_waiting_for_the_writer_loses_nothing(tmp_path, monkeypatch):
    """In a notebook, say, where the caller may go on."""
    with open_storage(tmp_path, HOOKS, shard_size_gb=4e-6) as storage:
        for sample in range(3):
            add(storage, sample)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(storage._writer, "take", Mock(side_effect=KeyboardInterrupt))
            add(storage, 3)
        add(storage, 3)
    assert [part["samples"]["first"] for part in commits(tmp_path)] == [0, 3]


ONE = np.float32(1)
AS_BEFORE = "expected width 4, dtype float32, as in the rest of the run"
SHAPE = "expected (tokens, width) with as many tokens as there are token ids"
REFUSED = [  # the activation of sample 9 at hook 0, of which hook 1 has 2 tokens; token ids; told
    (np.full((3, 4), ONE), [1, 2, 3], "3, expected 2 tokens as at other hooks"),
    (np.full((2, 5), ONE), [1, 2], f"width 5, dtype float32, {AS_BEFORE}"),
    (np.ones((2, 4)), [1, 2], f"width 4, dtype float64, {AS_BEFORE}"),
    (np.full(4, ONE), [1, 2], f"the activation has shape (4,), {SHAPE}"),
    (np.full((2, 4), ONE), [1], f"the activation has shape (2, 4), {SHAPE}"),
    (np.full((2, 0), ONE), [1, 2], f"the activation has shape (2, 0), {SHAPE}"),
    (torch.ones(2, 4, requires_grad=True), None, "the tensor requires grad; give tensor.det"),
    (torch.ones(2, 4, device="meta"), None, "the tensor is on meta; give tensor.detach().cpu()"),
    (torch.ones(2, 4).to(torch.float8_e4m3fn), None, "Tensor of torch.float8_e4m3fn: expected an"),
    (torch.ones(2, 4).to_sparse(), None, "Tensor of torch.float32: expected an array of numbers"),
    (np.ones((2, 4), complex), [1, 2], "dtype complex128, expected one of bfloat16, bool, "),
    ([["a", "b"]] * 2, [1, 2], "dtype str32, expected one of bfloat16, bool, "),
    (np.full((2, 4), ONE), [0.5, 1], "token ids of dtype float64, expected int32"),
    (np.full((2, 4), ONE), [2**31, 1], "token ids of dtype int64, expected int32"),
]


@pytest.mark.parametrize("in_bucket", [False, True])
def test_wrong_additions_are_refused_by_name(tmp_path, in_bucket):
    """Also by the run that continues, since widths and dtypes are those of the stored shards."""
    remote = MemoryFolder(MemoryBucket(), Process()) if in_bucket else None
    good = np.full((2, 4), ONE), 9, "", [1, 2]
    for numbers in (range(3), [], range(10)):
        storage = open_storage(tmp_path, {0: "h", 1: "i"}, remote=remote, shard_size_gb=1e-9)
        with pytest.raises(ZeroDivisionError), storage:
            for number in numbers:
                for key in (0, 1):
                    storage.add_activation(key, good[0], number, "", [1, 2])
            if 9 not in numbers:
                storage.add_activation(1, *good)
                for values, ids, told in REFUSED:
                    with pytest.raises(ValueError, match=re.escape(f"sample 9, hook 0: {told}")):
                        storage.add_activation(0, values, 9, "", ids)
            with pytest.raises(KeyError, match="hook 7 is not one of"):
                storage.add_activation(7, *good)
            with pytest.raises(ValueError, match="sample 9, hook 1: given twice or out of order"):
                storage.add_activation(1, *good)
            raise ZeroDivisionError
    safetensors = {"shard_format": "safetensors"}
    for number, (options, dtype, ids, told) in enumerate(
        (
            ({}, "float64", [1], "width 2, dtype float64, expected width 2, dtype bfloat16, as"),
            (safetensors, "float64", None, "has no token ids, and safetens"),
            (safetensors, complex, [1], "dtype complex128, expected one of bfloat16, bool, "),
        )
    ):
        identity, folder = Identity(activation_dtype="bfloat16"), tmp_path / f"other{number}"
        with open_storage(folder, {0: "h"}, identity=identity, **options) as storage:
            with pytest.raises(ValueError, match=f"^sample 0, hook 0: {told}"):
                storage.add_activation(0, np.ones((1, 2), dtype), 0, "", ids)


BOTH_INFINITIES = np.where(np.arange(HIDDEN) % 2, np.inf, -np.inf)


@pytest.mark.parametrize(
    "value,dtype,stored,remedy",
    [
        (np.nan, np.float32, "", "check its weights"),
        (np.nan, np.float32, "float8", "check its weights"),
        (1e6, np.float16, "", "float16 ends at 65504"),
        (BOTH_INFINITIES, np.float32, "", "check its weights"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_nan_and_infinity_stop_the_run_and_are_not_stored(tmp_path, value, dtype, stored, remedy):
    identity = Identity(activation_dtype=stored)
    with pytest.raises(StorageError, match="sample 1, hook 5: NaN or infinite ") as raised:
        with open_storage(tmp_path, HOOKS, identity=identity) as storage:
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


IS_A_URL = "is a URL, expected a local folder"
SCALES = {1: "stream", 2: "stream.scale"}
OPENED = [  # the folder, its hooks, options, what is told
    ("s3://b/run?token=x", HOOKS, {}, f"output_dir s3://b/run: {IS_A_URL}"),
    (Path("nope://b"), HOOKS, {}, f"output_dir nope:/b: {IS_A_URL}"),
    ("own", HOOKS, {"shard_format": "parquet"}, "shard_format 'parquet': expected pickle or sa"),
    ("own", {0: "position"}, {}, "hook position: a shard calls something else position"),
    ("own", {0: "h", 1: "h"}, {}, "hook h: a shard calls something else h"),
    (
        *("own", {0: "h", 1: "h.ids"}, {"identity": Identity(code_hooks=("h",))}),
        "hook h.ids: a shard calls something else h.ids",
    ),
    (
        *("own", SCALES, {"identity": Identity(activation_dtype="float8")}),
        "hook stream.scale: a shard calls something else stream.scale",
    ),
]


@pytest.mark.parametrize("folder,hooks,options,told", OPENED)
def test_what_cannot_be_opened_is_refused(tmp_path, monkeypatch, folder, hooks, options, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"^{re.escape(told)}"):
        open_storage(folder, hooks, **options)
    assert not list(tmp_path.iterdir())


def test_overwriting_removes_shards_and_nothing_of_others(tmp_path):
    fill(tmp_path)
    theirs = {"notes.txt", "shard_notes.json", "shard_0001.pkl.bak"}
    for name in (*theirs, ".shard_0009.pkl.gz.tmp"):  # the last is left by a run that was killed
        (tmp_path / name).write_text("mine")
    fill(tmp_path, count=2, overwrite=True)
    ours = {f"shard_0001.{end}" for end in ("json", "npz", "pkl.gz", "samples.parquet")}
    assert {path.name for path in tmp_path.iterdir()} == theirs | ours | {"metadata.json"}
