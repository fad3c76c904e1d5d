"""What an output folder or a bucket holds already: what is continued, refused or replaced.

test_exactly_once.py shows that whatever is continued holds every sample once.
"""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from memory_bucket import MemoryBucket, MemoryFolder, Process
from small_runs import HIDDEN, HOOKS, status, stream_of
from storages import open_storage

from activation_extraction.common.errors import InputError
from activation_extraction.store import folder as folder_module
from activation_extraction.store.folder import Folder, FolderError
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import read_stored
from activation_extraction.store.owner import Owner


@pytest.fixture
def whole(run, tmp_path):
    run(tmp_path / "whole")
    return tmp_path / "whole"


@pytest.fixture
def bucket():
    return MemoryFolder(MemoryBucket(), Process())


def files_in(folder):
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


def samples_in(folder):
    stored = read_stored(folder if isinstance(folder, Folder) else Folder(str(folder)))
    assert not stored.problems
    return stored.totals.samples


def test_a_complete_run_is_left_alone(run, whole, rows):
    """Also if its storage is opened because other hosts go on. Its totals are those of the data."""
    before = files_in(whole)
    assert run(whole).complete
    lengths = [len(json.loads(line)["text"]) for line in rows.read_text().splitlines()]
    cut, totals = [n - 24 for n in lengths if n > 24], read_stored(Folder(str(whole))).totals
    assert (totals.cut_samples, totals.cut_tokens) == (len(cut), sum(cut))
    assert totals.tokens == sum(lengths) - sum(cut)
    identity = Identity(model_digest="tiny")
    with open_storage(whole, HOOKS, identity=identity, shard_size_gb=1.5e-6) as place:
        with pytest.raises(ValueError, match="holds a complete extraction of 36 samples"):
            place.add_activation(1, np.zeros((3, HIDDEN), np.float32), 1000, "")
        place.finalize(False)
    assert status(whole) == "complete" and files_in(whole) == before


def test_limits_may_grow_and_not_shrink(run, tmp_path):
    for most in (7, 20):
        assert run(tmp_path, max_samples=most).totals.samples == most == samples_in(tmp_path)
    with pytest.raises(InputError, match="--max_samples: .* already holds 20 samples, more than t"):
        run(tmp_path, max_samples=19)
    run(tmp_path)
    assert samples_in(tmp_path) == 36


def test_only_the_current_piece_of_the_data_is_read_again(tmp_path, rows):
    """One file per ten rows: those before the mark's may be gone once it is open."""
    lines, stream_at = rows.read_text().splitlines(keepends=True), tmp_path / "pieces"
    stream_at.mkdir()
    for n in range(4):
        (stream_at / f"{n}.jsonl").write_text("".join(lines[10 * n : 10 * n + 10]))
    stream = stream_of(stream_at)
    state, again = [stream.state() for _ in stream][24], stream_of(stream_at)
    for n in range(2):
        (stream_at / f"{n}.jsonl").unlink()
    again.restore(json.loads(json.dumps(state)))
    assert len(list(again)) == 15


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def count_more(path):
    path.write_text(path.read_text().replace('"tokens": ', '"tokens": 1'))


REFUSED = {
    "gap": ("shard_0002.json", Path.unlink, "shard_0002.json: is missing"),
    "no last JSON": ("shard_*.json", Path.unlink, "shard_.*.json: is missing"),
    "no file": ("shard_0002.pkl.gz", Path.unlink, "0002.pkl.gz: is missing or cut short"),
    "short file": ("shard_0002.npz", lambda path: os.truncate(path, 10), "npz: is missing or cut"),
    "no metadata": ("metadata.json", Path.unlink, "already holds shards, but no metadata.json"),
    "damaged JSON": ("shard_0002.json", flip, "shard_0002.json: is damaged"),
    "another count": (
        "shard_0002.json",
        count_more,
        "json: is damaged: its checksum does not",
    ),
    "another total": ("metadata.json", count_more, "metadata.json: is damaged: its checks"),
    "damaged metadata": ("metadata.json", flip, "metadata.json: is damaged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_continued_is_refused_and_left_alone(name, run, whole):
    file, change, told = REFUSED[name]
    change(max(whole.glob(file)))
    before = files_in(whole)
    with pytest.raises(InputError, match=f"{told}.*--repair"):
        run(whole)
    assert files_in(whole) == before
    run(whole, overwrite=True)
    assert samples_in(whole) == 36


def test_a_damaged_table_is_refused_where_it_is_needed(run, tmp_path):
    """The samples after the mark are found in it."""
    run(tmp_path, interrupt_after=20)
    for path in tmp_path.glob("*.parquet"):
        flip(path)
    with pytest.raises(InputError, match=r"samples.parquet: is damaged.*--repair"):
        run(tmp_path)


def test_files_of_others_are_not_overwritten(run, tmp_path):
    for name in ("shard_0001.safetensors", "shard_0007.json", "metadata.json"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(b"{}")
        with pytest.raises(InputError, match=f"{name} may not be of this program"):
            run(folder, overwrite=True)
        assert [path.name for path in folder.iterdir()] == [name]


def test_with_a_local_copy_both_have_every_shard(run, bucket, tmp_path):
    options = {"remote": bucket, "delete_local_after_upload": False}
    run(tmp_path, interrupt_after=20, **options)
    run(tmp_path, **options)
    for name, (data, _) in bucket.bucket.objects.items():
        path = tmp_path / name.removeprefix("mem://bucket/")
        assert path.suffix == ".json" or path.read_bytes() == data
    assert samples_in(bucket) == 36


def test_nothing_is_overwritten_that_is_nowhere_else(run, bucket, tmp_path):
    """Shards of a local run, or the only word on which bucket has the shards."""
    local, moved = tmp_path / "local", tmp_path / "moved"
    run(local, interrupt_after=20)
    before = files_in(local)
    with pytest.raises(InputError, match="its shards are here, not in mem://bucket; give --upload"):
        run(local, remote=bucket)
    assert files_in(local) == before and not bucket.files()
    run(moved, interrupt_after=20, remote=bucket)
    with pytest.raises(InputError, match="were uploaded to mem://bucket; .*give --upload_to_gcs"):
        run(moved)
    with pytest.raises(InputError, match="were uploaded to mem://bucket, not in mem://bucket/oth"):
        run(moved, remote=bucket.child("other"))


def test_a_json_that_a_listing_lacks_is_asked_for_by_its_name(run, bucket, tmp_path, monkeypatch):
    """A listing that comes in pages is no snapshot."""
    run(tmp_path, remote=bucket)
    whole = read_stored(bucket)
    listings = [bucket.listing(), bucket.listing()]
    del listings[-1]["shard_0002.json"], listings[-1]["shard_0002.npz"]
    monkeypatch.setattr(bucket, "listing", listings.pop)
    found = read_stored(bucket)
    assert found.commits == whole.commits and not found.problems


@pytest.mark.parametrize("data,told", [(None, "was replaced"), (b"1", "has 1 bytes")])
def test_a_run_is_complete_only_if_its_files_are_those_committed(run, tmp_path, data, told):
    memory, path = MemoryBucket(), "mem://bucket/shard_0001.npz"

    def disturb(number, request):
        if request == "listing" and path in memory.objects:
            memory.objects[path] = data or memory.objects[path][0], "another version"

    message = f"{path}: {told} although shard 1 is committed"
    with pytest.raises(FolderError, match=message):
        run(tmp_path, remote=MemoryFolder(memory, Process(disturb)))


def test_the_patience_with_writes_begins_at_the_first_failure(monkeypatch):
    """A long upload that fails at its end is sent again, but silence does not go on for ever."""
    monkeypatch.setattr(folder_module, "FIRST_PAUSE", 0.0)
    now, fates = [0.0], ["fail"] * 10**3 + [None, "fail"]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def take_long(number, request):
        if request == "writing file":
            now[0] += 100.0  # more than the patience
            return fates.pop()

    owner = Owner(MemoryFolder(MemoryBucket(), Process(take_long)), "this process")
    assert owner.begin("run", {"format_version": 5, "identity": Identity().to_json()}, None)
    assert owner.write_file("file", [b"x"]) is not None and len(fates) == 10**3
    with pytest.raises(FolderError, match="writing file kept failing for 100 s: .*no answer"):
        owner.write_file("file", [b"y"])
    assert len(fates) == 998


def test_what_belongs_to_the_process_that_opens_the_folder(bucket, tmp_path, monkeypatch):
    """The beginning of its shards is not that of loading weights, and with `overwrite` metrics of
    the earlier run are gone."""
    place = open_storage(tmp_path / "first", {0: "h"}, remote=bucket)
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    place.open()
    place.add_activation(0, np.ones((3, 2), np.float32), 0, "", np.zeros(3, np.int32))
    place.record({"line": 1})
    place.finalize()
    assert read_stored(bucket).commits[1].began == 5000.0 and read_stored(bucket).metrics
    open_storage(tmp_path / "first", {0: "h"}, remote=bucket, overwrite=True).finalize()
    assert not read_stored(bucket).metrics and not (tmp_path / "first/metrics.jsonl").exists()
