"""ActivationStorage: what it stores, refuses and leaves behind, also while a bucket is slow."""

import gzip
import json
import pickle
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from memory_bucket import MemoryBucket, MemoryFolder, Process
from small_runs import status
from storages import open_storage

from activation_extraction import ActivationDataset
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import InputError, RunError, StorageError
from activation_extraction.store.folder import FolderError
from activation_extraction.store.formats import number_of
from activation_extraction.store.identity import Identity
from activation_extraction.store.log_writer import LostError

HOOKS = {3: "blocks.3.hook_resid_post", 5: "blocks.5.hook_resid_post"}
HIDDEN = 16


def activation(sample, key, tokens=10, dtype=np.float32):
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
    """Stores samples of 1280 bytes, three to a shard."""
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
    of_shards = [range(3), range(3, 6), range(6, 9), range(9, 10)]
    for part, numbers in zip(parts, of_shards, strict=True):
        assert part["samples"] == dict(first=numbers[0], last=numbers[-1], count=len(numbers))
        assert [hook["name"] for hook in part["hooks"]] == list(HOOKS.values())
        shard = pickle.load(gzip.open(tmp_path / part["file"]))
        assert list(shard) == [3, 5]
        for key, records in shard.items():
            for number, record in zip(numbers, records, strict=True):
                expected = {
                    **{"hook": HOOKS[key], "activation": activation(number, key)},
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


def test_a_changed_source_names_the_shards_since_the_last_look(tmp_path):
    answers = [None, None, None, RunError("a.jsonl: has changed")]
    sources = Mock(**{"to_json.return_value": [], "check.side_effect": answers})
    told = "a.jsonl: has changed; shards committed since it was last seen unchanged: 3"
    with pytest.raises(StorageError, match=told):
        fill(tmp_path, sources=sources)
    assert len(commits(tmp_path)) == 3


def test_a_sample_that_lacks_hooks_is_an_error_at_the_end_of_a_complete_run(tmp_path):
    with pytest.raises(ValueError, match=r"sample 1 has no activation for \[5\]"):
        with open_storage(tmp_path, HOOKS) as storage:
            add(storage, 0)
            storage.add_activation(3, activation(1, 3), 1, "only one of two hooks")
    (part,) = commits(tmp_path)
    assert part["samples"]["count"] == 1 and status(tmp_path) == "complete"


ONE = np.float32(1)
AS_BEFORE = "expected width 4, dtype float32, as in the rest of the run"
SHAPE = "expected (tokens, width) with as many tokens as there are token ids"
REFUSED = [  # the activation of sample 3 at hook 0, of which hook 1 has 2 tokens; token ids; told
    (np.full((3, 4), ONE), [1, 2, 3], "3, expected 2 tokens as at other hooks"),
    (np.full((2, 5), ONE), [1, 2], f"width 5, dtype float32, {AS_BEFORE}"),
    (np.ones((2, 4)), [1, 2], f"width 4, dtype float64, {AS_BEFORE}"),
    (np.full((2, 4), ONE), [1], f"the activation has shape (2, 4), {SHAPE}"),
    (torch.ones(2, 4, requires_grad=True), None, "the tensor requires grad; give tensor.det"),
    (np.ones((2, 4), complex), [1, 2], "dtype complex128, expected one of bfloat16, bool, "),
    (np.full((2, 4), ONE), [2**31, 1], "token ids of dtype int64, expected int32"),
]


def test_wrong_additions_are_refused_by_name(tmp_path):
    """The run that continues refuses them, too: widths and dtypes are those of stored shards."""
    good = np.full((2, 4), ONE), 3, "", [1, 2]
    for numbers in (range(3), []):
        storage = open_storage(tmp_path, {0: "h", 1: "i"}, shard_size_gb=1e-9)
        with pytest.raises(ZeroDivisionError), storage:
            for number in numbers:
                for key in (0, 1):
                    storage.add_activation(key, good[0], number, "", [1, 2])
            storage.add_activation(1, *good)
            for values, ids, told in REFUSED:
                with pytest.raises(ValueError, match=re.escape(f"sample 3, hook 0: {told}")):
                    storage.add_activation(0, values, 3, "", ids)
            with pytest.raises(KeyError, match="hook 7 is not one of"):
                storage.add_activation(7, *good)
            with pytest.raises(ValueError, match="sample 3, hook 1: given twice or out of order"):
                storage.add_activation(1, *good)
            raise ZeroDivisionError


@pytest.mark.parametrize(
    "value,dtype,stored,remedy",
    [
        (np.nan, np.float32, "float8", "check its weights"),
        (1e6, np.float16, "", "float16 ends at 65504"),
        (np.where(np.arange(HIDDEN) % 2, np.inf, -np.inf), np.float32, "", "check its weights"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_nan_and_infinity_stop_the_run_and_are_not_stored(tmp_path, value, dtype, stored, remedy):
    about = dict(identity=Identity(activation_dtype=stored), shard_format="safetensors")
    ids = np.arange(4, dtype=np.int32)
    with pytest.raises(StorageError, match="sample 1, hook 5: NaN or infinite ") as raised:
        with open_storage(tmp_path, HOOKS, **about) as storage:
            add(storage, 0, dtype=dtype)
            storage.add_activation(3, activation(1, 3, 4, dtype), 1, "", ids)
            storage.add_activation(5, np.full((4, HIDDEN), value).astype(dtype), 1, "", ids)
    assert raised.value.remedy and remedy in raised.value.remedy
    assert not commits(tmp_path)


def test_a_buffer_that_the_caller_uses_again_is_copied(tmp_path):
    values, ids = np.zeros((4, 2), np.float32), np.zeros(4, np.int32)
    row, columns = {"line": 0}, {"tags": [0]}
    with open_storage(tmp_path, {0: "h"}) as storage:
        for number in range(3):
            values[:], ids[:] = number, number
            row["line"] = columns["tags"][0] = number
            storage.add_activation(0, values, number, "", ids, None, row, 0, columns)
    for number, sample in enumerate(ActivationDataset(tmp_path)):
        for found in (sample["h"], sample.token_ids):
            assert (found == number).all()
        assert (sample.row, sample.columns) == ({"line": number}, {"tags": [number]})


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32"])
def test_arrays_of_pytorch_and_jax(tmp_path, dtype, shard_format):
    """They need not be contiguous memory."""
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
    "folder,hook,told",
    [
        ("s3://b/run?token=x", "h", "output_dir s3://b/run: is a URL, expected a local folder"),
        ("own", "position", "hook position: shards already have another tensor named position"),
    ],
)
def test_what_cannot_be_opened_is_refused(tmp_path, monkeypatch, folder, hook, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"^{re.escape(told)}"):
        open_storage(folder, {0: hook})
    assert not list(tmp_path.iterdir())


def test_overwriting_removes_shards_and_nothing_of_others(tmp_path):
    fill(tmp_path)
    theirs = {"notes.txt", "shard_notes.json", "shard_0001.pkl.bak"}
    for name in (*theirs, ".shard_0009.pkl.gz.tmp"):  # the last is left by a run that was killed
        (tmp_path / name).write_text("mine")
    fill(tmp_path, count=2, overwrite=True)
    ours = {f"shard_0001.{end}" for end in ("json", "npz", "pkl.gz", "samples.parquet")}
    assert {path.name for path in tmp_path.iterdir()} == theirs | ours | {"metadata.json"}
    for name in ("shard_0001.safetensors", "shard_0007.json", "metadata.json"):  # of who knows whom
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_bytes(b"{}")
        with pytest.raises(InputError, match=f"{name} may not be of this program"):
            fill(folder, overwrite=True)
        assert [path.name for path in folder.iterdir()] == [name]


def test_each_file_that_is_left_is_deleted_by_one_request_and_named_if_it_may_be_left(
    tmp_path, lines
):
    bucket, asked = MemoryBucket(), []
    fates = {"deleting shard_0003.npz": "fail", "deleting shard_0002.json": "lost"}

    def fate(_, request):
        asked.extend([request] * request.startswith("deleting shard_"))
        return fates.get(request)

    fill(tmp_path / "old", remote=MemoryFolder(bucket, Process()))
    fill(tmp_path / "new", 3, overwrite=True, remote=MemoryFolder(bucket, Process(fate)))
    rest = [f"shard_000{n}.{end}" for n in (2, 3, 4) for end in ("json", "npz", "pkl.gz")]
    rest += [f"shard_000{n}.samples.parquet" for n in (2, 3, 4)]
    assert sorted(asked) == sorted(f"deleting {name}" for name in rest)
    there = {path.removeprefix("mem://bucket/") for path in bucket.objects}
    assert there & {*rest} == {"shard_0003.npz"}
    (told,) = (line for _, line in lines if "belongs to no shard" in line)
    assert told.startswith("mem://bucket: shard_0003.npz: it is not known whether")
    assert status(tmp_path / "new") == "complete"


def test_a_bucket_that_never_takes_the_first_metadata_ends_the_start(tmp_path):
    fate = Process(lambda _, request: "fail" if request == "writing metadata.json" else None)
    folder = MemoryFolder(MemoryBucket(), fate)
    folder.patience_seconds = 0.05
    storage = open_storage(tmp_path, HOOKS, remote=folder)
    with pytest.raises(FolderError, match="writing metadata.json kept failing for .*: no answer"):
        storage.open()
    storage.close()


@pytest.mark.parametrize(
    "standing,told",
    [
        (None, "mem://bucket/metadata.json: is gone; so this process cannot know"),
        (b"{}", "mem://bucket/metadata.json: is damaged, or was not written by this program; so"),
    ],
)
def test_metadata_that_vanishes_or_is_damaged_in_the_middle_of_a_run_is_told(
    tmp_path, standing, told
):
    bucket = MemoryBucket()
    storage = open_storage(tmp_path, HOOKS, remote=MemoryFolder(bucket, Process()))
    with pytest.raises(LostError) as raised, storage:
        add(storage, 0)
        bucket.objects.pop("mem://bucket/metadata.json")
        if standing is not None:
            bucket.put("mem://bucket/metadata.json", standing)
    assert str(raised.value).startswith(told) and "taken over" not in str(raised.value)
    assert "--repair" in str(raised.value) and "--machine_id" not in str(raised.value)


SHARD = 1000 * HIDDEN * 4 * len(HOOKS)  # bytes of a sample of 1000 tokens: each fills a shard


def until(condition):
    """Waits, in vain for ten minutes at most."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class SlowStore(MemoryFolder):
    """Takes a shard once it is let go, or refuses it. `arrived` names files in their order."""

    def __init__(self, refused=None):
        super().__init__(MemoryBucket(), Process(self.hold))
        self.go = [threading.Event() for _ in range(31)]  # by number
        self.refused = refused
        self.begun: set[int] = set()
        self.arrived: list[str] = []

    def hold(self, _, request):
        if re.fullmatch(r"writing .*\.pkl", request):
            number = number_of(request.split()[1])
            self.begun.add(number)
            assert self.go[number].wait(600)
            if number == self.refused:
                raise FolderError("permission denied")

    def write(self, name, *how):
        version = super().write(name, *how)
        self.arrived.append(name)
        return version

    def let_go(self, *numbers):
        for number in numbers:
            self.go[number].set()

    @property
    def committed(self):
        """In the order of their commits; the first one's JSON is written twice: to reserve it."""
        jsons = [name for name in self.arrived if re.fullmatch(r"shard_\d+\.json", name)]
        return [number_of(name) for name in jsons][1:]


def open_slow(folder, store, **options):
    usual = {"shard_size_gb": SHARD / 1e9, "compress_shards": False, "waiting_shards_gb": 1}
    return open_storage(folder, HOOKS, remote=store, **usual | options)


def test_adding_stops_at_the_ceiling_of_memory_and_goes_on_when_there_is_room(tmp_path):
    store = SlowStore()
    storage = open_slow(tmp_path, store, waiting_shards_gb=5.25 * SHARD / 1e9)
    added = []

    def work():
        for sample in range(30):
            add(storage, sample, 1000)
            added.append(sample)
        storage.finalize()

    def is_full(shards):
        """With two samples that are in no shard yet; the last one is not added, but waits."""
        until(lambda: storage.gauges()["bytes_waiting"] == 6 * SHARD and len(store.begun) == shards)
        assert len(added) == shards + 1

    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        is_full(4)
        assert storage.totals.shards == 0 and not store.committed
        store.let_go(1)
        is_full(5)
        store.let_go(4, 3, 5)  # they arrive, and wait for the second one
        tables = {f"shard_000{number}.samples.parquet" for number in (3, 4, 5)}
        until(lambda: tables <= {*store.arrived})
        assert store.committed == [1] and not working.done()
        is_full(5)
        store.let_go(*range(31))
        working.result(600)
    assert storage.totals.shards == 30 and store.committed == [*range(1, 31)]
    assert sum(storage.waited.values()) > 0
    assert storage.gauges()["bytes_waiting"] <= SHARD  # the last sample's, which none followed


def test_a_shard_that_fails_stops_those_after_it_only(tmp_path):
    store = SlowStore(refused=3)
    storage = open_slow(tmp_path, store)
    for sample in range(7):
        add(storage, sample, 1000)
    store.let_go(3, 4, 5, 6)
    until(
        lambda: (
            "shard_0006.npz" in store.arrived
            and storage._shard_writer.queue._shards[2].files_future.done()
        )
    )
    for sample in (7, 8):
        with pytest.raises(StorageError, match="shard_0003.pkl: permission denied"):
            add(storage, sample, 1000)
    store.let_go(2, 1)
    with pytest.raises(StorageError, match="shard_0003.pkl: permission denied"):
        storage.finalize()
    assert store.committed == [1, 2] and storage.totals.shards == 2
    assert status(tmp_path) == "failed"
