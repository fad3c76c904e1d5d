"""Folder: what passes is tried again, what does not is not, and what has arrived is compared."""

import errno
import threading
import time

import gcsfs
import google.auth.exceptions
import google_crc32c
import pytest

from activation_extraction.store import folder as folder_module
from activation_extraction.store import patience
from activation_extraction.store.folder import Folder
from activation_extraction.store.patience import FolderError, reason_of


class Flaky:
    """Fails a file system's calls, as often as it is told, in the ways of the network."""

    def __init__(self, monkeypatch, fs, name, errors):
        self.errors = list(errors)
        original = getattr(fs, name)

        def call(*arguments, **options):
            if self.errors:
                raise self.errors.pop(0)
            return original(*arguments, **options)

        monkeypatch.setattr(fs, name, call)


def test_what_passes_is_retried_and_what_does_not_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.001)
    store = Folder(f"memory://{tmp_path}/flaky", patience=5)
    passing = [TimeoutError(), ConnectionResetError(), gcsfs.retry.HttpError({"code": 503})]
    Flaky(monkeypatch, store._fs, "pipe_file", passing)
    store.write("file", b"content")
    assert store.read("file") == b"content" and store.retries == 3
    lasting = {
        "the disk is full; make room first": OSError(errno.ENOSPC, ""),
        "the file system is read-only; make it writable first": OSError(errno.EROFS, ""),
        "permission denied": OSError("Forbidden: https://x"),
        "the credentials are missing, invalid or have expired": gcsfs.retry.HttpError(
            {"code": 401, "message": "Invalid Credentials"}
        ),
    }
    for message, error in lasting.items():
        Flaky(monkeypatch, store._fs, "pipe_file", [error])
        with pytest.raises(FolderError, match=message) as raised:
            store.write("file", b"content")
        assert raised.value.final and store.retries == 3


def test_deleting_what_is_not_there_asks_nothing_else(tmp_path, monkeypatch):
    """Every upload begins so: listing a large bucket for it would take long."""
    monkeypatch.setattr(folder_module, "OBJECT_STORES", {"memory"})
    store = Folder(f"memory://{tmp_path}/large")
    Flaky(monkeypatch, store._fs, "ls", [AssertionError("listed")])
    store.remove("shard_0001.json")
    assert store.retries == 0


def test_what_keeps_failing_is_given_up_after_the_patience(tmp_path, monkeypatch):
    """test_create.py has it that only the time without progress counts."""
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.001)
    store = Folder(f"memory://{tmp_path}/long", patience=0.3)
    monkeypatch.setattr(store._fs, "pipe_file", lambda *_, **__: time.sleep(0.2) or 1 / 0)
    with pytest.raises(FolderError, match="kept failing for 0 s: division by zero"):
        store.write("file", b"content")
    assert store.retries == 1


def test_the_last_attempt_gets_what_is_left_of_the_patience(tmp_path, monkeypatch):
    """It would wait for ever; the message has what was heard before."""
    store = Folder(f"memory://{tmp_path}/silent", patience=2)
    failures, answer = [ConnectionResetError("gone")], threading.Event()

    def look(*_, **__):
        if failures:
            raise failures.pop()
        assert answer.wait(600), "nobody has given up"

    monkeypatch.setattr(store._fs, "ls", look)
    with pytest.raises(FolderError, match=r"listing kept failing for \d+ s: gone") as raised:
        store.files()
    answer.set()
    assert store.retries == 1 and not raised.value.final


def test_what_is_large_may_take_longer_on_a_slow_line(tmp_path, monkeypatch):
    store = Folder(f"memory://{tmp_path}/slow", patience=20)
    store.write("file", b"content")
    limits = []

    def with_timeout(seconds, action):
        limits.append(seconds)
        return action()

    monkeypatch.setattr(patience, "with_timeout", with_timeout)
    monkeypatch.setattr(patience, "MIN_BYTES_PER_SECOND", 0.1)  # 80 s for 7 bytes
    assert store.read("file") == store.fetch("file", tmp_path).read_bytes() == b"content"
    assert store.read("file", 0, 7) == store.read("file", -7) == b"content"
    assert limits == [20, 20, 80, 80, 80]


def test_a_metadata_server_out_of_reach_is_asked_again():
    unreachable = google.auth.exceptions.RefreshError("503")
    unreachable.__cause__ = google.auth.exceptions.TransportError("503")
    assert not reason_of(unreachable)[1]
    assert reason_of(google.auth.exceptions.RefreshError("invalid_grant"))[1]


@pytest.mark.parametrize("method", ["write", "create"])
def test_what_arrives_damaged_is_sent_again(tmp_path, monkeypatch, method):
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.001)
    store = Folder(f"memory://{tmp_path}/damaged")
    original, damaged = store._fs.pipe_file, [b"", b"cont", b"CONTENT"]

    def pipe(target, data):
        original(target, damaged.pop() if damaged else data)

    monkeypatch.setattr(store._fs, "pipe_file", pipe)
    if method == "write":
        store.write("file", b"content")
    else:
        parts = [memoryview(b"content")]
        store.create("file", parts, 7, google_crc32c.value(b"content"))
    assert store.read("file") == b"content" and not damaged and store.retries == 3


def test_what_changes_a_store_without_conditions_is_waited_for(tmp_path, monkeypatch):
    """Left to itself, it might undo what comes later."""
    store = Folder(f"memory://{tmp_path}/run", patience=0.05)
    store.write("file", b"old")
    original = store._fs.rm_file

    def slowly(target):
        time.sleep(0.5)
        original(target)

    monkeypatch.setattr(store._fs, "rm_file", slowly)
    store.remove("file")
    store.write("file", b"new")
    time.sleep(0.6)
    assert store.read("file") == b"new"
