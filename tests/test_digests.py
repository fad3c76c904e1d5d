"""Digests of files: every byte counts, and large files are read no more often than needed."""

import os
import shutil

import pytest

from activation_extraction.run import digests
from activation_extraction.run.digests import digest_files


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file that counts as large and settled; the user's cache folder is a temporary one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(digests, "LARGE", 2**20)
    monkeypatch.setattr(digests, "SETTLED", -1)
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(5 * 2**20))
    return path


@pytest.fixture
def read(monkeypatch):
    """The names of the files that have been read, in order."""
    names = []
    original = digests._read

    def note(path, *arguments):
        names.append(path.name)
        return original(path, *arguments)

    monkeypatch.setattr(digests, "_read", note)
    return names


def flip_middle(path):
    """Changes one bit in the middle of a file; its size and its times are as before."""
    stat = path.stat()
    with open(path, "r+b") as file:
        file.seek(stat.st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_large_file_is_read_once_and_again_when_it_is_touched(large, read):
    first = digest_files([large])
    assert digest_files([large]) == first
    assert read == ["model.safetensors"]
    flip_middle(large)
    assert digest_files([large]) != first
    assert read == 2 * ["model.safetensors"]


def test_a_file_that_may_still_change_is_not_remembered(large, read, monkeypatch):
    monkeypatch.setattr(digests, "SETTLED", 1000.0)
    assert digest_files([large]) == digest_files([large])
    assert len(read) == 2
    assert not digests._cache_file().exists()


@pytest.mark.parametrize("damage", ["bit", "empty", "no folder"])
def test_without_a_memory_files_are_read(large, read, damage, tmp_path):
    if damage == "no folder":
        (tmp_path / "caches").write_text("a file")
    first = digest_files([large])
    if damage == "bit":
        flip_middle(digests._cache_file())
    elif damage == "empty":
        digests._cache_file().write_bytes(b"")
    assert digest_files([large]) == first
    assert len(read) == 2


def test_names_and_contents_count_and_folders_do_not(tmp_path):
    for folder, names in (("a", ("x", "y")), ("b", ("x", "y")), ("c", ("x", "z"))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(name)
    shutil.copytree(tmp_path / "a", tmp_path / "d")
    (tmp_path / "d/y").write_text("x")
    a, b, c, d = (digest_files(sorted((tmp_path / name).iterdir())) for name in "abcd")
    assert a == b and len({a, c, d}) == 3


def test_a_file_of_the_hub_is_known_by_its_name_until_it_is_saved_to(large, read, tmp_path):
    content = digest_files([large])
    name = digests._read(large)
    read.clear()
    blob = tmp_path / "cache/blobs" / name
    link = tmp_path / "cache/snapshots/commit/model.safetensors"
    blob.parent.mkdir(parents=True)
    link.parent.mkdir(parents=True)
    shutil.move(large, blob)
    link.symlink_to(blob)
    assert digest_files([link]) == content
    assert read == []
    wait_for_the_clock(link)
    flip_middle(link)
    assert digest_files([link]) != content
    assert read == ["model.safetensors"]


def wait_for_the_clock(path):
    """Until the file system's clock shows a later time than the link's."""
    trial = path.with_name("trial")
    while True:
        trial.touch()
        if trial.stat().st_ctime_ns > path.lstat().st_ctime_ns:
            return
