"""A run continued from a bucket, or from what another process stored meanwhile."""

import shutil
from functools import partial

import fsspec
import numpy as np
import pytest
from small_runs import DOCUMENTS, HIDDEN, HOOKS, Killed, content, shards_of, status
from storages import open_storage

from activation_extraction.common.errors import InputError, RunError, StorageError
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity
from activation_extraction.store.storage import ActivationStorage


def test_two_processes_do_not_write_to_one_folder(run, tmp_path):
    first, second = open_storage(tmp_path, HOOKS), open_storage(tmp_path, HOOKS)
    first.open()
    for begin in (second.open, partial(open_storage, tmp_path, HOOKS)):
        with pytest.raises(RunError, match="another process is writing to it"):
            begin()
    first.close()
    second.open()
    second.close()


def test_what_another_process_stored_meanwhile_is_continued(run, whole, tmp_path, monkeypatch):
    """It ended after this one had looked, and before this one was ready to begin.

    test_meanwhile.py has it for a local folder.
    """
    folder, url = tmp_path / "out", f"memory://{tmp_path}/bucket"
    run(folder, interrupt_after=5, remote=Folder(url))
    original = ActivationStorage.open

    def late(storage):
        monkeypatch.setattr(ActivationStorage, "open", original)
        before = storage.plan.samples
        run(tmp_path / "other", interrupt_after=20, remote=Folder(url))
        original(storage)
        assert 0 < before < storage.plan.samples < DOCUMENTS

    monkeypatch.setattr(ActivationStorage, "open", late)
    run(folder, remote=Folder(url))
    copy = copied(url, tmp_path / "copy")
    assert content(copy) == whole and status(copy) == "complete"


def copied(url, folder):
    """A local copy of what is in the bucket."""
    shutil.rmtree(folder, ignore_errors=True)
    fsspec.filesystem("memory").get(f"{url}/", str(folder), recursive=True)
    return folder


def test_the_bucket_is_what_counts(run, whole, tmp_path):
    """The local disk is lost, then the bucket is: what is not in it is made again."""
    folder, url = tmp_path / "local", f"memory://{tmp_path}/bucket"

    def in_bucket():
        return content(copied(url, tmp_path / "copy"))

    with pytest.raises(Killed):
        run(folder, kill_after=20, remote=Folder(url))
    shutil.rmtree(folder)
    last = run(folder, remote=Folder(url))
    assert last.totals.shards == shards_of(whole) > len(last.made) and in_bucket() == whole
    assert {path.name for path in folder.iterdir()} == {"metadata.json", "metrics.jsonl"}
    shutil.rmtree(folder)
    assert run(folder, remote=Folder(url)).complete and not folder.exists()
    for _ in range(2):  # on an empty disk, and on one whose metadata says that all is stored
        fsspec.filesystem("memory").rm(url, recursive=True)
        assert len(run(folder, remote=Folder(url)).made) == shards_of(whole)
        assert in_bucket() == whole


@pytest.mark.parametrize("delete", [True, False])
def test_a_shard_that_is_lost_in_the_bucket_is_for_repair(run, whole, tmp_path, delete):
    """The files on this disk are no reason to believe that it is there."""
    memory, folder, url = fsspec.filesystem("memory"), tmp_path / "local", f"memory://{tmp_path}/b"
    options = {"remote": Folder(url), "delete_local_after_upload": delete}
    run(folder, **options)
    assert content(copied(url, tmp_path / "copy")) == whole
    assert content(folder) == ({} if delete else whole)
    for lost, told in (
        ("shard_0003.json", "shard 3 is missing, but shard 4 is there; --repair computes"),
        ("shard_0002.pkl.gz", "shard 2 has a JSON, but its file is missing .* --repair computes"),
    ):
        memory.rm(f"{url}/{lost}")
        with pytest.raises(InputError, match=f"{url}: {told}"):
            run(folder, **options)


def test_with_a_bucket_nothing_is_overwritten_that_is_nowhere_else(run, whole, tmp_path):
    """Shards of a local run, or the only word on which bucket has the shards."""
    folder, url = tmp_path / "local", f"memory://{tmp_path}/bucket"
    run(tmp_path / "local only", interrupt_after=20)
    before = content(tmp_path / "local only")
    told = rf"holds {shards_of(before)} shards not in the bucket; continue without"
    for delete in (True, False):
        with pytest.raises(InputError, match=told):
            run(tmp_path / "local only", remote=Folder(url), delete_local_after_upload=delete)
    assert content(tmp_path / "local only") == before and not Folder(url).files()
    fsspec.filesystem("memory").put(f"{tmp_path}/local only/", f"{url} copy", recursive=True)
    run(tmp_path / "another", remote=Folder(f"{url} copy"))  # as the refusal says
    assert content(copied(f"{url} copy", tmp_path / "copy")) == whole
    for delete in (True, False):
        run(
            folder,
            interrupt_after=20,
            remote=Folder(url),
            delete_local_after_upload=delete,
            overwrite=True,
        )
        with pytest.raises(InputError, match="were uploaded to memory://.*give --upload_to_gcs"):
            run(folder)
        with pytest.raises(InputError, match="were uploaded to memory://.*/bucket, not to .*other"):
            run(
                folder,
                remote=Folder(f"memory://{tmp_path}/other"),
                delete_local_after_upload=delete,
            )
        run(folder, remote=Folder(url), delete_local_after_upload=delete)
        assert content(copied(url, tmp_path / "copy")) == whole


@pytest.mark.parametrize("delete", [True, False])
@pytest.mark.parametrize("large", [1, 1.5e-6])  # the only shard, and the last one of some
def test_a_part_of_a_shard_is_replaced_by_the_whole(run, tmp_path, large, delete):
    folder, url = tmp_path / "local", f"memory://{tmp_path}/bucket"
    run(tmp_path / "whole", shard_size_gb=large)
    options = {"shard_size_gb": large, "remote": Folder(url), "delete_local_after_upload": delete}
    for number in (3, 5, 31):
        part = run(folder, interrupt_after=number, **options)
        assert part.made[-1].partial
    run(folder, **options)
    for place in (copied(url, tmp_path / "copy"), *([] if delete else [folder])):
        assert content(place) == content(tmp_path / "whole") and status(place) == "complete"


@pytest.mark.parametrize("uploads", [True, False])
def test_of_two_machines_with_one_machine_id_the_later_goes_on(run, whole, tmp_path, uploads):
    """Whether the first one still has a shard to upload, or only its last word to say."""
    url = f"memory://{tmp_path}/shared"
    identity = Identity(model_digest="tiny")
    first = open_storage(tmp_path / "a", HOOKS, identity=identity, remote=Folder(url))
    first.open()
    run(tmp_path / "b", remote=Folder(url))
    for key in HOOKS if uploads else ():
        first.add_activation(key, np.zeros((3, HIDDEN), np.float32), 0, "")
    with pytest.raises(StorageError, match="another process has begun to write there"):
        first.finalize()
    copy = copied(url, tmp_path / "copy")
    assert content(copy) == whole and status(copy) == "complete"


def test_a_shard_that_another_machine_stored_meanwhile_is_replaced_as_a_whole(
    run, tmp_path, monkeypatch
):
    """This machine looked before that; it is killed while it replaces the shard."""
    url = f"memory://{tmp_path}/shared"
    late = open_storage(
        tmp_path / "late", HOOKS, identity=Identity(model_digest="tiny"), remote=Folder(url)
    )
    run(tmp_path / "early", interrupt_after=3, shard_size_gb=1, remote=Folder(url))
    late.open()
    original = Folder.write

    def killed(store, name, data):
        if name == "shard_0001.json":
            raise Killed
        original(store, name, data)

    monkeypatch.setattr(Folder, "write", killed)
    for key in HOOKS:
        late.add_activation(key, np.zeros((3, HIDDEN), np.float32), 0, "")
    with pytest.raises(StorageError, match="unexpected Killed"):
        late.finalize()
    assert Folder(url).files()["shard_0001.pkl.gz"]
    assert not Folder(url).read("shard_0001.json")
