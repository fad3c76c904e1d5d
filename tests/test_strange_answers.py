"""What a store answers is not always what it holds, and a folder is not always what it seems."""

import os
import re
import socket
import tempfile
import threading
import time

import fsspec
import pytest
from command_line import main
from extractions import extract
from fsspec.implementations.memory import MemoryFileSystem
from gcsfs.credentials import GoogleCredentials
from silent_server import LONGEST, silent_server
from small_runs import content

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError, StorageError
from activation_extraction.store import patience
from activation_extraction.store.folder import Folder
from activation_extraction.store.local_files import write_bytes
from activation_extraction.store.metadata import read_stored
from activation_extraction.store.patience import FolderError


@pytest.mark.parametrize("answer", [b"", b"<html>sign in</html>", None])
def test_a_json_that_arrives_damaged_is_read_again(run, bucket, tmp_path, monkeypatch, answer):
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.001)
    folder = Folder("gs://bucket/run/machine_000", patience=20)
    run(tmp_path / "a", interrupt_after=7, max_samples=12, remote=folder)
    original, damaged = folder._fs.cat_file, set()

    def cat(path, **options):
        data = original(path, **options)
        if path.endswith(".json") and path not in damaged:
            damaged.add(path)
            return data[: len(data) // 2] if answer is None else answer
        return data

    monkeypatch.setattr(folder._fs, "cat_file", cat)
    stored = read_stored(folder)
    assert not stored.damaged and stored.metadata and len(damaged) == 1 + len(stored.commits)
    damaged.clear()
    run(tmp_path / "a", max_samples=12, remote=folder)
    assert read_stored(folder).metadata["status"] == "complete"


def test_a_json_that_is_stored_damaged_is_told_and_nothing_is_to_be_deleted(run, bucket, tmp_path):
    folder = Folder("gs://bucket/run/machine_000", patience=20)
    run(tmp_path / "a", interrupt_after=7, max_samples=12, remote=folder)
    bucket.put("run/machine_000/metadata.json", b"{}")
    with pytest.raises(InputError, match="--repair repairs it") as raised:
        run(tmp_path / "b", max_samples=12, remote=folder)
    assert "--overwrite" not in str(raised.value)


def test_a_page_instead_of_a_listing_is_asked_for_again(bucket, monkeypatch):
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.001)
    bucket.put("run/file", b"1")
    folder = Folder("gs://bucket/run", patience=20)
    original, pages = type(folder._fs)._request, [b"<html>sign in</html>"]

    async def request(*arguments, **options):
        status, headers, info, body = await original(folder._fs, *arguments, **options)
        return status, headers, info, pages.pop() if pages else body

    monkeypatch.setattr(folder._fs, "_request", request)
    assert folder.files() == {"file": 1} and not pages and folder.retries == 1


def test_a_bucket_that_never_answers_is_given_up_after_the_time_that_was_asked(bucket, monkeypatch):
    """Each request ends with the patience of the folder, whatever gcsfs does in between."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{silent.getsockname()[1]}")
        folder = Folder("gs://bucket/run", patience=0.3)
        with pytest.raises(FolderError, match="listing kept failing for"):
            folder.files()
    assert folder.retries == 0


@pytest.mark.parametrize("drips", [False, True])
def test_so_is_a_file_whose_content_does_not_arrive(bucket, monkeypatch, tmp_path, drips):
    with silent_server(drips) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        monkeypatch.setitem(fsspec.config.conf, "gcs", {})  # requests have as long as in a run
        folder, began = Folder("gs://bucket/run", patience=2), time.monotonic()
        for get in (lambda: folder.read("file"), lambda: folder.fetch("file", tmp_path)):
            with pytest.raises(FolderError, match="ing file kept failing for"):
                get()
        assert time.monotonic() - began < LONGEST


@pytest.mark.parametrize("found", ["at the start", "at a request"])
def test_so_is_a_search_for_credentials(bucket, monkeypatch, found):
    """google.auth has limits of its own: a minute where packets vanish, two for each token."""
    answer = threading.Event()

    def silent(*_, **__):
        assert answer.wait(600)

    name = "connect" if found == "at the start" else "maybe_refresh"
    monkeypatch.setattr(GoogleCredentials, name, silent)
    with pytest.raises(FolderError, match="no answer") as raised:
        Folder("gs://bucket/run", patience=0.3).files()
    answer.set()
    assert not raised.value.final


def test_nothing_is_written_through_a_link(run, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("metadata.json", ".metadata.json.tmp", ".shard_0001.json.tmp", "shard_0001.npz"):
        os.symlink(precious, out / name)
    os.unlink(out / "metadata.json")
    run(out, max_samples=12)
    write_bytes(out / "shard_0001.npz", b"")
    assert precious.read_text() == "mine" and content(out)
    with pytest.raises(StorageError, match=r"metrics.jsonl: is a symbolic link"):
        (out / "metrics.jsonl").unlink()
        place = run(tmp_path / "other", interrupt_after=3, max_samples=12)
        (tmp_path / "other/metrics.jsonl").unlink()
        os.symlink(precious, tmp_path / "other/metrics.jsonl")
        place.record({"line": 1})
    with pytest.raises(InputError, match=r"metrics.jsonl is a symbolic link"):
        run(tmp_path / "other", max_samples=12)
    assert precious.read_text() == "mine"


def test_a_report_and_a_bucket_on_this_machine_replace_links(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    os.symlink(precious, tmp_path / "file")
    Folder(f"file://{tmp_path}").write("file", b"new")
    assert precious.read_text() == "mine" and (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("name", ["demo_inputs", "demo_inputs/model"])
def test_the_demo_writes_into_no_linked_folder(tmp_path, name, capsys):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "out" / name
    link.parent.mkdir(parents=True)
    os.symlink(tmp_path / "elsewhere", link)
    assert main("--demo", "--output_dir", tmp_path / "out") == 2
    assert "is a symbolic link" in capsys.readouterr().err
    assert not list((tmp_path / "elsewhere").iterdir())


def test_what_is_uploaded_needs_no_temporary_folder(run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    folder = Folder(f"memory://{tmp_path}/bucket")
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    folder.try_writing()
    run(tmp_path / "a", max_samples=12, remote=folder)
    assert folder.read("metrics.jsonl")


def test_without_a_temporary_folder_tmpdir_is_named(run, tmp_path, monkeypatch, capsys):
    run(tmp_path / "out")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    assert main("--verify", "--output_dir", tmp_path / "out") == 1
    err = capsys.readouterr().err
    assert "error: no temporary folder can be made: " in err and "; set TMPDIR to a folder" in err


def test_where_downloads_fill_the_temporary_folder_it_is_named(tmp_path, monkeypatch, capsys):
    """So for --verify, where it is not the shards that are at fault, and for a data set."""
    url = f"memory://{tmp_path}/bucket"
    extract(tmp_path / "a", remote=Folder(url))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    download = MemoryFileSystem.get_file

    def get_file(self, source, target, **options):
        os.symlink("/dev/full", target)
        try:
            download(self, source, target, **options)
        finally:
            os.unlink(target)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    full = rf"{tmp_path}/scratch/\S+: the disk is full; make room first, or set TMPDIR to a folder"
    assert main("--verify", "--output_dir", url) == 1
    assert re.search(f"shard_0001.pkl.gz: .*{full}", capsys.readouterr().out)
    with pytest.raises(OSError, match=f"downloading shard_0001.pkl.gz: {full}"):
        ActivationDataset(url)[0]
