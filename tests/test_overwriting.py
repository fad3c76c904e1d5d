"""--overwrite deletes what is ours, and nothing that a later process has stored."""

import errno
import fcntl
import os
import stat
import threading

import pytest
from small_runs import content, shard_name
from test_ownership import Held, beside, doors  # noqa: F401

from activation_extraction.common.errors import InputError, StorageError
from activation_extraction.store import ownership
from activation_extraction.store.folder import Folder
from activation_extraction.store.local_files import AtomicFile
from activation_extraction.store.metadata import read_stored
from activation_extraction.store.sealed_json import seal

FEW = {"max_samples": 12}
# The writes of a process that overwrites: its claim, its mark, its deletions, and its own shards.
EVERY_WRITE = [
    pytest.param(at, marks=[pytest.mark.long] * (at not in (2, 5))) for at in (0, 1, 2, 3, 5, 9, 20)
]


@pytest.mark.parametrize("at", EVERY_WRITE)
def test_one_that_is_stopped_deletes_nothing_of_a_later_one(run, doors, tmp_path, at):  # noqa: F811
    run(tmp_path / "whole", **FEW)
    run(tmp_path / "old", interrupt_after=7, remote=doors.earlier, **FEW)
    held = Held(doors.bucket, at)
    with beside(lambda: run(tmp_path / "a", overwrite=True, remote=doors.earlier, **FEW)):
        assert held.there.wait(600)
        try:
            run(tmp_path / "b", remote=doors.later, **FEW)
        except InputError as error:
            assert "--overwrite has begun to delete what is here" in str(error)
            run(tmp_path / "b", overwrite=True, remote=doors.later, **FEW)
        held.go.set()
    doors.check_stored(tmp_path / "whole")


def test_without_conditions_the_owner_is_looked_up_before_each_group(run, tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "DELETIONS", 1)
    folder = Folder(f"memory://{tmp_path}/bucket")
    run(tmp_path / "old", remote=folder, **FEW)
    there, go, remove = threading.Event(), threading.Event(), Folder.remove

    def hold(self, name, version=None):
        if name == "shard_0001.json" and self.url == folder.url and not there.is_set():
            there.set()
            assert go.wait(600)
        remove(self, name, version)

    monkeypatch.setattr(Folder, "remove", hold)
    with beside(lambda: run(tmp_path / "a", overwrite=True, remote=folder, **FEW)):
        assert there.wait(600)
        run(tmp_path / "b", overwrite=True, remote=folder, **FEW)
        before = folder.files()
        go.set()
    assert set(before) - set(folder.files()) <= {"shard_0001.json"}
    assert read_stored(folder).missing()[0] in ([], [range(1, 2)])


@pytest.mark.parametrize("name", ["shard_0001.safetensors", "shard_0007.json", "metadata.json"])
def test_files_of_others_are_refused(run, tmp_path, name):
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(InputError, match=f"{name} may not be of this program"):
        run(tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_files_that_are_ours_without_metadata_are_replaced(run, tmp_path):
    run(tmp_path / "a", **FEW)
    new = content(tmp_path / "a")
    (tmp_path / "a" / "metadata.json").write_bytes(b"damaged")
    run(tmp_path / "a", overwrite=True, **FEW)
    assert content(tmp_path / "a") == new
    (tmp_path / "a" / "shard_0001.json").write_bytes(b"damaged")
    (tmp_path / "a" / "metadata.json").unlink()
    with pytest.raises(InputError, match=r"shard_0001\.\w+(\.gz)? may not be of this program"):
        run(tmp_path / "a", overwrite=True, **FEW)


def test_a_mark_of_overwriting_is_not_continued(run, tmp_path):
    run(tmp_path, **FEW)
    (tmp_path / "metadata.json").write_bytes(seal({"claimed_by": "another"}))
    with pytest.raises(InputError, match="--overwrite has begun to delete"):
        run(tmp_path, **FEW)
    run(tmp_path, overwrite=True, **FEW)
    assert read_stored(Folder(str(tmp_path))).metadata["status"] == "complete"


def test_two_writers_where_the_file_system_has_no_locks(run, tmp_path, monkeypatch, caplog):
    """The earlier one stops before it commits anything after the later one began."""
    flock = fcntl.flock

    def no_locks(descriptor, kind):
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):  # another library's
            return flock(descriptor, kind)
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    run(tmp_path / "whole", **FEW)
    out = tmp_path / "out"
    committed, there, go = [], threading.Event(), threading.Event()
    original = AtomicFile.publish

    def hold(file):
        if file._path.name == "shard_0002.npz" and not there.is_set():
            while not (out / "shard_0001.json").exists():
                assert not there.wait(0.01)
            there.set()
            assert go.wait(600)
        original(file)

    monkeypatch.setattr(AtomicFile, "publish", hold)
    failures = []

    def earlier():
        try:
            run(out, **FEW)
        except StorageError as error:
            failures.append(str(error))

    with beside(earlier):
        assert there.wait(600)
        committed = sorted(path.name for path in out.glob("shard_*.json"))
        run(out, **FEW)
        after = {path.name: path.read_bytes() for path in out.glob("*.json")}
        go.set()
    assert committed == ["shard_0001.json"] and shard_name(2) in content(out)
    assert {path.name: path.read_bytes() for path in out.glob("*.json")} == after
    assert failures and "another process has begun to write there" in failures[0]
    assert content(out) == content(tmp_path / "whole")
    assert "its file system has no locks (No locks available)" in caplog.text
