"""Two processes with one machine_id and one bucket: the later goes on, the earlier stops."""

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from itertools import cycle

import fsspec
import pytest
from gcs_server import MUTATIONS
from small_runs import HOOKS
from storages import open_storage
from test_upload import flags, undisturbed, upload_flags, uploaded  # noqa: F401

from activation_extraction.common.errors import StorageError
from activation_extraction.inspect.status import host_states, problems_of
from activation_extraction.store import patience
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import is_commit, read_stored

URL = "gs://bucket/run/machine_000"
# The writes of the earlier process after its claim, and up to its last word. Which shard comes
# first is a matter of chance, so some are named.
EVERY_WRITE = [
    pytest.param(at, marks=[pytest.mark.long] * (at not in (3, 6)))
    for at in (*range(1, 12), "shard_0001.pkl.gz", "shard_0002.npz", "shard_0003.json")
]


def open_folder(door):
    """The folder as a client sees it that comes in by this door."""
    address = door.environment["STORAGE_EMULATOR_HOST"]
    fsspec.config.conf.setdefault("gs", {})["endpoint_url"] = address
    return Folder(URL, patience=600)


class Held:
    """Stops the writes that pass a door, from number `at` or from that of the file `at` on, until
    it lets them go."""

    def __init__(self, door, at):
        self.there, self.go = threading.Event(), threading.Event()
        self._at, self._passed = at, 0
        door.before = self._hold

    def _hold(self, method, name):
        if method in MUTATIONS:
            self._passed += 1
            if self._at in (self._passed - 1, name.rsplit("/", 1)[-1]) or self.there.is_set():
                self.there.set()
                assert self.go.wait(600)


@contextmanager
def beside(action):
    """Runs it in a thread of its own; what stops it is its own affair."""

    def run():
        with suppress(StorageError):
            action()

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


class Doors:
    """Two ways into the bucket; `journal` tells by which of them each write has come."""

    def __init__(self, bucket, door):
        self.bucket, self.doors = bucket, {"earlier": bucket, "later": door}
        self.journal = []
        for who, each in self.doors.items():
            each.after = self._note(who)
        self.earlier, self.later = map(open_folder, self.doors.values())

    def _note(self, who):
        def after(method, name, status):
            if method in MUTATIONS and status < 300:
                self.journal.append((who, name.rsplit("/", 1)[-1]))

        return after

    def check(self, folder):
        """Once the later one has written metadata.json, the earlier one commits nothing."""
        begun = self.journal.index(("later", "metadata.json"))
        late = {name for who, name in self.journal[begun:] if who == "earlier"}
        assert not {name for name in late if is_commit(name) or name == "metadata.json"}
        self.check_stored(folder)

    def check_stored(self, folder):
        """Everything is as in `folder`, and no claim is left."""
        expected = {path.name: path.read_bytes() for path in folder.glob("*.pkl.gz")}
        assert uploaded(self.bucket) == expected
        stored = read_stored(self.later)
        assert stored.metadata["status"] == "complete" and not problems_of(stored)
        assert len(stored.commits) == len(expected) == stored.metadata["shards"]
        assert {n for n in self.later.files() if is_commit(n)} == {c.name for c in stored.in_order}


@pytest.fixture
def doors(bucket):
    with bucket.door() as door:
        yield Doors(bucket, door)


@pytest.mark.parametrize("until", ["it owns the folder", "it is done"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("at", EVERY_WRITE)
def test_the_earlier_one_is_held_at_a_write_while_the_later_one_begins(
    run, doors, tmp_path, at, overwrite, until
):
    run(tmp_path / "whole", max_samples=12)
    held = Held(doors.bucket, at)

    def begin():
        run(tmp_path / "a", interrupt_after=7, max_samples=12, remote=doors.earlier)
        held.there.set()

    def note(method, name):
        if ("later", "metadata.json") in doors.journal and until == "it owns the folder":
            held.go.set()

    doors.doors["later"].before = note
    with beside(begin):
        assert held.there.wait(600)
        run(tmp_path / "b", max_samples=12, remote=doors.later, overwrite=overwrite)
        held.go.set()
    doors.check(tmp_path / "whole")


@pytest.mark.parametrize("at", [0, "metadata.json", 2])
def test_the_later_one_is_held_while_it_begins_and_the_earlier_one_goes_on(
    run, doors, tmp_path, at
):
    """Before it claims a shard, before it says so in metadata.json, before it stores anything."""
    run(tmp_path / "whole", max_samples=12)
    first, held = Held(doors.bucket, 5), Held(doors.doors["later"], at)
    ended = threading.Event()

    def begin():
        try:
            run(tmp_path / "a", max_samples=12, remote=doors.earlier)
        finally:
            ended.set()

    def begin_later():
        run(tmp_path / "b", max_samples=12, remote=doors.later)

    with beside(begin):
        assert first.there.wait(600)
        with beside(begin_later):
            assert held.there.wait(600)
            first.go.set()
            assert ended.wait(600)
            held.go.set()
    if at:
        doors.check(tmp_path / "whole")
    else:  # the earlier one was done before the later one could claim anything
        assert ("later", "metadata.json") not in doors.journal
        assert len(uploaded(doors.bucket)) == len(list((tmp_path / "whole").glob("*.pkl.gz")))


@pytest.mark.long
def test_a_claim_is_no_shard(run, doors, tmp_path):
    """Killed between its claim and metadata.json, and then with a claim after some shards."""
    run(tmp_path / "whole")
    identity = Identity(model_digest="tiny")
    late = open_storage(tmp_path / "late", HOOKS, identity=identity, remote=doors.earlier)
    assert late._remote._claim("shard_0001.json")
    assert not read_stored(doors.later).files
    run(tmp_path / "a", interrupt_after=9, remote=doors.later)
    late = open_storage(
        tmp_path / "late", HOOKS, identity=identity, remote=doors.earlier, shard_size_gb=1.5e-6
    )
    late.open()
    late.close()
    stored = read_stored(doors.later)
    assert stored.metadata["owner"] == late._remote.owner and not problems_of(stored)
    (state,) = host_states({"machine_000": stored})
    assert state.state == "running" and state.shards == len(stored.commits) < len(stored.versions)
    run(tmp_path / "b", remote=doors.later)
    doors.check_stored(tmp_path / "whole")


def test_conditional_writes(bucket, tmp_path, monkeypatch):
    """Also when the answer to a write is lost."""
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.001)
    folder = Folder(URL, patience=600)
    assert folder.conditional and not Folder(f"memory://{tmp_path}").conditional
    created = folder.write_if("file", b"1", None)
    assert created == folder.version("file") == folder.listing()["file"].version
    assert folder.write_if("file", b"2", None) is None and folder.read("file") == b"1"
    replaced = folder.write_if("file", b"2", created)
    assert replaced not in (None, created)
    assert folder.write_if("file", b"3", created) is None and folder.read("file") == b"2"
    folder.remove("file", created)
    assert folder.read("file") == b"2"
    bucket.faults, bucket.rate, bucket.chance.random = ("lost",), 0.5, cycle([0, 1]).__next__
    lost = folder.write_if("file", b"4", replaced)
    assert lost == folder.version("file") and bucket.failed["lost"]
    folder.remove("file", lost)
    bucket.rate = 0
    assert folder.version("file") is None and folder.write_if("file", b"5", lost) is None


@pytest.mark.long
def test_of_two_real_processes_the_later_one_stores_everything(
    flags,  # noqa: F811
    undisturbed,  # noqa: F811
    doors,
    tmp_path,
    check,
):
    """The earlier one is held in front of its third shard's JSON until the later one has begun."""
    held = Held(doors.bucket, "shard_0003.json")

    def start(name, door):
        command = [sys.executable, "extract_activations.py"]
        command += upload_flags(flags, tmp_path / name)
        environment = os.environ | door.environment
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)

    earlier, later = start("a", doors.bucket), None
    try:
        assert held.there.wait(600)
        later = start("b", doors.doors["later"])
        while ("later", "metadata.json") not in doors.journal:
            assert later.poll() is None
            time.sleep(0.05)
    finally:
        held.go.set()
        told = [each.communicate(timeout=600)[1] for each in (earlier, later) if each is not None]
    assert (earlier.returncode, later.returncode) == (1, 0), told
    assert "another process has begun to write there" in told[0]
    assert uploaded(doors.bucket) == undisturbed
    assert check("gs://bucket/run") == []
