"""Conditional writes on S3: the real client against an emulated store."""

import time

import fsspec
import pytest
from silent_server import LONGEST, silent_server

from activation_extraction.store.folder import Folder, ObjectExistsError
from activation_extraction.store.patience import FolderError

WHY = "tests/requirements-s3.txt is not installed"
s3fs = pytest.importorskip("s3fs", reason=WHY)
moto_server = pytest.importorskip("moto.server", reason=WHY)


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")


@pytest.fixture
def folder(monkeypatch):
    server = moto_server.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": endpoint})
    s3fs.S3FileSystem(endpoint_url=endpoint).makedirs("bucket", exist_ok=True)
    yield Folder("s3://bucket/run", patience=5)
    server.stop()


def test_conditional_writes(folder):
    assert folder.conditional
    created = folder.write_if("file", b"1", None)
    assert created == folder.version("file") == folder.listing()["file"].version
    assert folder.write_if("file", b"2", None) is None
    assert folder.write_if("file", b"1", None) == created  # as after a lost answer
    replaced = folder.write_if("file", b"2", created)
    assert folder.write_if("file", b"3", created) is None and folder.read("file") == b"2"
    folder.remove("file", created)
    assert folder.read("file") == b"2"
    folder.remove("file", replaced)
    assert folder.version("file") is None and folder.write_if("file", b"4", replaced) is None


def test_a_shard_goes_from_memory_in_one_request(folder):
    """The checksum in the request is the store's to compare."""

    def create(data):
        folder.create("new", data, len(b"".join(data)), 0)

    parts = [memoryview(b"x" * 10), memoryview(b"y")]
    create(parts)
    create(parts)  # as after a lost answer
    with pytest.raises(ObjectExistsError):
        create([memoryview(b"z" * 11)])
    assert folder.read("new") == b"x" * 10 + b"y" and folder.retries == 0
    with pytest.raises(FolderError, match="no such bucket: elsewhere"):
        Folder("s3://elsewhere/run", patience=5).create("new", [memoryview(b"x")], 1, 0)


@pytest.mark.parametrize("drips", [False, True])
def test_a_store_that_does_not_answer_is_given_up_after_the_patience(monkeypatch, tmp_path, drips):
    with silent_server(drips) as address:
        monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": address})
        folder, began = Folder("s3://bucket/run", patience=2), time.monotonic()
        for ask in (
            lambda: folder.write_if("file", b"1", None),
            lambda: folder.read("file"),
            lambda: folder.fetch("file", tmp_path),
        ):
            with pytest.raises(FolderError, match="ing file kept failing for .* no answer"):
                ask()
        assert time.monotonic() - began < LONGEST
