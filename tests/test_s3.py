"""Conditional writes on S3: the real client against an emulated store."""

import fsspec
import pytest

from activation_extraction.store.folder import Folder, TakenError

WHY = "tests/requirements-s3.txt is not installed"
s3fs = pytest.importorskip("s3fs", reason=WHY)
moto_server = pytest.importorskip("moto.server", reason=WHY)


@pytest.fixture
def folder(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
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


def test_a_file_that_is_only_created(folder, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    folder.put(path, new=True)
    folder.put(path, new=True)
    path.write_bytes(b"y" * 10)
    with pytest.raises(TakenError):
        folder.put(path, new=True)
    assert folder.read("file") == b"x" * 10
