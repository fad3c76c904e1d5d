"""A run continued from a bucket, or from what another process stored meanwhile."""

import json
import shutil
from functools import partial

import fsspec
import numpy as np
import pytest
from small_runs import DOCUMENTS, HIDDEN, HOOKS, Killed, content, shards_of, status

from activation_extraction.common.errors import InputError, RunError, StorageError
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity
from activation_extraction.store.storage import ActivationStorage


def test_two_processes_do_not_write_to_one_folder(run, tmp_path):
    first, second = ActivationStorage(tmp_path, HOOKS), ActivationStorage(tmp_path, HOOKS)
    first.open()
    for begin in (second.open, partial(ActivationStorage, tmp_path, HOOKS)):
        with pytest.raises(RunError, match="another process is writing to it"):
            begin()
    first.close()
    second.open()
    second.close()


@pytest.mark.parametrize("place", ["local", "bucket"])
def test_what_another_process_stored_meanwhile_is_continued(
    run, whole, tmp_path, place, monkeypatch
):
    """It ended after this one had looked, and before this one was ready to begin."""
    folder, url = tmp_path / "out", f"memory://{tmp_path}/bucket"
    bucket = {"remote": Folder(url)} if place == "bucket" else {}
    run(folder, interrupt_after=5, **bucket)
    original = ActivationStorage.open

    def late(storage):
        monkeypatch.setattr(ActivationStorage, "open", original)
        before = storage.found_samples
        run(folder if place == "local" else tmp_path / "other", interrupt_after=20, **bucket)
        original(storage)
        assert 0 < before < storage.found_samples < DOCUMENTS

    monkeypatch.setattr(ActivationStorage, "open", late)
    run(folder, **bucket)
    if place == "bucket":
        folder = tmp_path / "copy"
        fsspec.filesystem("memory").get(f"{url}/", str(folder), recursive=True)
    assert content(folder) == whole and status(folder) == "complete"


def test_the_bucket_is_what_counts(run, whole, tmp_path):
    """Local disk gone; bucket gone with and without local shards; another bucket."""
    url = f"memory://{tmp_path}/bucket"
    memory = fsspec.filesystem("memory")

    def in_bucket():
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        memory.get(f"{url}/", str(copy), recursive=True)
        return content(copy)

    folder = tmp_path / "local"
    with pytest.raises(Killed):
        run(folder, kill_after=20, remote=Folder(url))
    shutil.rmtree(folder)
    assert run(folder, remote=Folder(url)).totals.shards == shards_of(whole)
    assert in_bucket() == whole and not list(folder.glob("*.gz"))
    shutil.rmtree(folder)
    assert run(folder, remote=Folder(url)).complete and not folder.exists()
    # The bucket is emptied, and the local shards are not there.
    memory.rm(url, recursive=True)
    run(folder, remote=Folder(url))
    memory.rm(url, recursive=True)
    with pytest.raises(InputError, match="shard_0001.pkl.gz is not there; it was uploaded to"):
        run(folder, remote=Folder(url))
    with pytest.raises(InputError, match="was uploaded to memory://.*--upload_to_gcs"):
        run(folder)
    # With the local shards everything is uploaded again, or what is missing, and nothing computed.
    kept = tmp_path / "kept"
    run(kept, remote=Folder(url), delete_local=False)
    for lost in (url, f"{url}/shard_0002.pkl.gz", f"{url}/shard_0003.json"):
        memory.rm(lost, recursive=True)
        again = run(kept, remote=Folder(url), delete_local=False)
        assert again.complete and again.totals.shards == shards_of(whole)
        assert in_bucket() == whole == content(kept)
    # What was damaged here meanwhile is not uploaded.
    memory.rm(url, recursive=True)
    path = kept / "shard_0003.pkl.gz"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(StorageError, match="shard_0003.pkl.gz: is damaged"):
        run(kept, remote=Folder(url), delete_local=False)
    # A local run gets a bucket afterwards.
    memory.rm(url, recursive=True)
    run(tmp_path / "whole", remote=Folder(url))
    assert in_bucket() == whole


def test_of_two_parts_of_a_shard_the_longer_one_counts(run, tmp_path):
    """Interrupted with one bucket, ended without it: the bucket has less of the last shard."""
    folder, url = tmp_path / "local", f"memory://{tmp_path}/bucket"
    kept = {"remote": Folder(url), "delete_local": False}
    for large in (1, 1.5e-6):  # the only shard, and the last one of some
        run(folder, interrupt_after=3, shard_size_gb=large, overwrite=True, **kept)
        run(folder, shard_size_gb=large)
        ended = content(folder)
        total = json.loads((folder / "metadata.json").read_bytes())["samples"]
        assert run(folder, shard_size_gb=large, **kept).totals.samples == total > 30
        copy = tmp_path / f"copy_{large}"
        fsspec.filesystem("memory").get(f"{url}/", str(copy), recursive=True)
        assert content(copy) == ended and status(copy) == "complete"


@pytest.mark.parametrize("uploads", [True, False])
def test_of_two_machines_with_one_machine_id_the_later_goes_on(run, whole, tmp_path, uploads):
    """Whether the first one still has a shard to upload, or only its last word to say."""
    url = f"memory://{tmp_path}/shared"
    identity = Identity(model_digest="tiny")
    first = ActivationStorage(tmp_path / "a", HOOKS, identity=identity, remote=Folder(url))
    first.open()
    run(tmp_path / "b", remote=Folder(url))
    for key in HOOKS if uploads else ():
        first.add_activation(key, np.zeros((3, HIDDEN), np.float32), 0, "")
    with pytest.raises(StorageError, match="another process has begun to write there"):
        first.finalize()
    copy = tmp_path / "copy"
    fsspec.filesystem("memory").get(f"{url}/", str(copy), recursive=True)
    assert content(copy) == whole and status(copy) == "complete"


def test_a_shard_that_another_machine_stored_meanwhile_is_replaced_as_a_whole(
    run, tmp_path, monkeypatch
):
    """This machine looked before that; it is killed while it replaces the shard."""
    url = f"memory://{tmp_path}/shared"
    late = ActivationStorage(
        tmp_path / "late", HOOKS, identity=Identity(model_digest="tiny"), remote=Folder(url)
    )
    run(tmp_path / "early", interrupt_after=3, shard_size_gb=1, remote=Folder(url))
    late.open()
    original = Folder.put

    def killed(store, path):
        if path.name == "shard_0001.json":
            raise Killed
        original(store, path)

    monkeypatch.setattr(Folder, "put", killed)
    for key in HOOKS:
        late.add_activation(key, np.zeros((3, HIDDEN), np.float32), 0, "")
    with pytest.raises(StorageError, match="unexpected Killed"):
        late.finalize()
    assert Folder(url).files()["shard_0001.pkl.gz"]
    assert not Folder(url).read("shard_0001.json")
