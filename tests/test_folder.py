"""Folder: what passes is tried again, what does not is not, and what has arrived is compared."""

import errno
import time

import gcsfs
import google.auth.exceptions
import pytest

from activation_extraction.store import folder as folder_module
from activation_extraction.store import patience
from activation_extraction.store.folder import Folder, FolderError
from activation_extraction.store.reasons import reason_of


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
    path = tmp_path / "file"
    path.write_bytes(b"content")
    store = Folder(f"memory://{tmp_path}/flaky", patience=5)
    passing = [TimeoutError(), ConnectionResetError(), gcsfs.retry.HttpError({"code": 503})]
    Flaky(monkeypatch, store._fs, "put_file", passing)
    store.put(path)
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
        Flaky(monkeypatch, store._fs, "put_file", [error])
        with pytest.raises(FolderError, match=message) as raised:
            store.put(path)
        assert raised.value.final and store.retries == 3


def test_deleting_what_is_not_there_asks_nothing_else(tmp_path, monkeypatch):
    """Every upload begins so: listing a large bucket for it would take long."""
    monkeypatch.setattr(folder_module, "OBJECT_STORES", {"memory"})
    store = Folder(f"memory://{tmp_path}/large")
    Flaky(monkeypatch, store._fs, "ls", [AssertionError("listed")])
    store.remove("shard_0001.json")
    assert store.retries == 0


def test_patience_counts_the_time_without_progress_only(tmp_path, monkeypatch):
    """An upload that takes longer than that is sent again as well, when it fails at its end."""
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.001)
    path = tmp_path / "file"
    path.write_bytes(b"content")
    store = Folder(f"memory://{tmp_path}/long", patience=0.3)
    original, failures = store._fs.put_file, [TimeoutError()] * 3

    def put(*arguments, callback, **options):
        for _ in range(4):
            time.sleep(0.1)
            callback.call()
        if failures:
            raise failures.pop()
        original(*arguments, **options)

    monkeypatch.setattr(store._fs, "put_file", put)
    store.put(path)
    assert store.read("file") == b"content" and store.retries == 3
    monkeypatch.setattr(store._fs, "put_file", lambda *_, **__: time.sleep(0.2) or 1 / 0)
    with pytest.raises(FolderError, match="kept failing for .*--upload_timeout"):
        store.put(path, "another")


def test_a_metadata_server_out_of_reach_is_asked_again():
    unreachable = google.auth.exceptions.RefreshError("503")
    unreachable.__cause__ = google.auth.exceptions.TransportError("503")
    assert not reason_of(unreachable)[1]
    assert reason_of(google.auth.exceptions.RefreshError("invalid_grant"))[1]


def test_an_upload_whose_answer_was_lost_is_recognised(tmp_path, monkeypatch):
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.001)
    path = tmp_path / "file"
    path.write_bytes(b"content")
    store = Folder(f"memory://{tmp_path}/lost")
    original, calls = store._fs.put_file, []

    def put(*arguments, **options):
        calls.append(original(*arguments, **options))
        raise ConnectionResetError

    monkeypatch.setattr(store._fs, "put_file", put)
    store.put(path)
    assert len(calls) == 1


def test_what_arrives_damaged_is_sent_again(tmp_path, monkeypatch):
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.001)
    path = tmp_path / "file"
    path.write_bytes(b"content")
    store = Folder(f"memory://{tmp_path}/damaged")
    original, damaged = store._fs.put_file, [b"", b"cont", b"CONTENT"]

    def put(source, target, **options):
        original(source, target, **options)
        if damaged:
            store._fs.pipe_file(target, damaged.pop())

    monkeypatch.setattr(store._fs, "put_file", put)
    store.put(path)
    assert store.read("file") == b"content" and not damaged
