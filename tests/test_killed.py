"""Runs killed before each single change to the disk or the bucket: the same command continues.

An audit hook sees every file that is opened for writing, renamed or deleted, whoever does it.
"""

import fnmatch
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import fsspec
import pytest
from small_runs import Killed, content, shard_name, status

from activation_extraction.common.errors import InputError, StorageError
from activation_extraction.inspect.status import show_status
from activation_extraction.run.run_folders import RunFolders
from activation_extraction.store import ownership, run_record
from activation_extraction.store.folder import Folder
from activation_extraction.store.metadata import AGGREGATE
from activation_extraction.store.sealed_json import unseal
from activation_extraction.text.batch import Worker

PLACES = ["local", "bucket", "bucket, local kept"]
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
watch: Callable[[str], None] | None = None


def audit(event: str, arguments: tuple) -> None:
    """Tells `watch` of every change of the disk; whatever that raises prevents the change."""
    if watch is None or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
        return
    if event != "open" or arguments[2] & WRITING:
        watch(f"{event} {arguments[0]}")


sys.addaudithook(audit)


def forget(*places: Path) -> None:
    """Deletes what a round has stored: fsspec searches all of its memory for each file."""
    fsspec.filesystem("memory").store.clear()
    for place in places:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def killed_at(event: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kills the run before its event-th change below `folder` or in the bucket, and all later ones.

    The list has the changes so far.
    """
    events: list[str] = []

    def change(what: str) -> None:
        events.append(what)
        if len(events) >= event:
            raise Killed

    def deadly(patch: pytest.MonkeyPatch, name: str) -> None:
        memory = type(fsspec.filesystem("memory"))
        original = getattr(memory, name)

        def changes(*arguments, **options):
            change(f"{name} {arguments[1:]}")
            return original(*arguments, **options)

        patch.setattr(memory, name, changes)

    with monkeypatch.context() as patch:
        patch.setattr(run_record, "METRICS_SECONDS", 0)  # they are uploaded after every shard
        for name in ("pipe_file", "rm_file"):
            deadly(patch, name)
        patch.setattr(
            sys.modules[__name__],
            "watch",
            lambda what: change(what) if str(folder) in what else None,
        )
        yield events


def options_of(place: str, url: str) -> dict:
    if place == "local":
        return {}
    return {"remote": Folder(url), "delete_local_after_upload": place == "bucket"}


def result(place: str, folder: Path, url: str) -> Path:
    """A local copy of what counts."""
    if place == "local":
        return folder
    copy = folder.with_name(f"{folder.name}_bucket")
    shutil.rmtree(copy, ignore_errors=True)
    fsspec.filesystem("memory").get(f"{url}/", str(copy), recursive=True)
    return copy


def shards_of(folder: Path) -> dict[str, object]:
    """The content of a folder and nothing that a run may not leave there."""
    found = content(folder)
    found.pop(AGGREGATE, None)
    assert not fnmatch.filter(found, ".*"), found.keys()
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "place,before,shard_format",
    [
        *((place, before, "pickle") for place in PLACES for before in ("nothing", "interrupted")),
        *((place, "interrupted, disk lost", "pickle") for place in PLACES[1:]),
        ("bucket, local kept", "interrupted", "safetensors"),
    ],
)
def test_killed_before_every_change(
    run, shard_format, tmp_path, monkeypatch, capsys, place, before
):
    """Exhaustive: before the first change, the second, ... until a run is not killed any more."""
    run = partial(run, shard_size_gb=6e-6)
    run(tmp_path / "whole")
    whole = content(tmp_path / "whole")
    event, finished = 0, False
    while not finished:
        event += 1
        folder, url = tmp_path / f"{event}", f"memory://{tmp_path}/{event}"
        options = options_of(place, url)
        root = Folder(str(folder)) if place == "local" else options["remote"]
        if before != "nothing":
            run(folder, interrupt_after=20, **options)
        if "lost" in before:
            shutil.rmtree(folder)
        with killed_at(event, folder, monkeypatch) as events, suppress(Killed, StorageError):
            run(folder, **options)
            show_status(root, write=True)
            finished = True
        run(folder, **options)
        show_status(root, write=True)
        stored = result(place, folder, url)
        assert shards_of(stored) == whole and status(stored) == "complete", (event, events)
        assert unseal((stored / AGGREGATE).read_bytes(), "")["status"] == "complete"
        metrics = [json.loads(line) for line in (stored / "metrics.jsonl").read_text().splitlines()]
        assert metrics[0] == {"found": 0} and (before == "nothing" or {"found": 0} != metrics[-1])
        if place == "bucket":
            assert not list(folder.glob("shard_*")), (event, events)
        elif "lost" not in before:
            assert shards_of(folder) == whole
        forget(folder, stored)
    assert shard_name(3, shard_format) in whole and event > 20


class Backwards(ThreadPoolExecutor):
    """Takes what it is given from the end: a thread pool may take it in any order."""

    def map(self, function, items):
        return [function(item) for item in reversed(list(items))][::-1]


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
def test_overwriting_killed_before_every_deletion(run, source, tmp_path, monkeypatch, place):
    """With --overwrite the same command begins anew. Without it, it never continues what is half
    deleted: all is as before, or new, or refused."""
    monkeypatch.setattr(ownership, "ThreadPoolExecutor", Backwards)
    run = partial(run, shard_size_gb=6e-6)
    run(tmp_path / "new")
    new, original = content(tmp_path / "new"), source.values

    def other(batch):
        return {key: values + 1 for key, values in original(batch).items()}

    outcomes: list[str] = []
    while outcomes[-3:] != ["new"] * 3:  # its own writing is killed in the test above
        event = 1 + len(outcomes)
        assert event < 200
        folder, url = tmp_path / f"{event}", f"memory://{tmp_path}/{event}"
        options = options_of(place, url)
        run(folder, values=other, **options)
        old = shards_of(result(place, folder, url))
        assert old != new
        with killed_at(event, folder, monkeypatch) as events, suppress(Killed, StorageError):
            run(folder, overwrite=True, **options)
        try:
            run(folder, **options)
            (folder / ".metadata.json.tmp").unlink(missing_ok=True)  # nothing was written since
            found = shards_of(result(place, folder, url))
            assert found in (old, new), (event, events)
            outcomes.append("old" if found == old else "new")
        except InputError as error:
            assert "--overwrite has begun to delete what is here" in str(error), (event, events)
            outcomes.append("refused")
            run(folder, overwrite=True, **options)
            assert shards_of(result(place, folder, url)) == new
        forget(folder)
    assert set(outcomes) == {"old", "refused", "new"}


@pytest.mark.long
def test_other_folders_are_replaced_also_after_a_kill(run, tmp_path, monkeypatch):
    """--overwrite with another number of machines: without it refused while any is left."""
    places = RunFolders(Worker(), tmp_path / "out")
    event, finished = 0, False
    while not finished:
        event += 1
        for machine in range(2):
            run(tmp_path / f"out/machine_{machine:03d}", shard_size_gb=6e-6)
        (tmp_path / "out" / AGGREGATE).write_text("{}")
        with killed_at(event, tmp_path, monkeypatch), suppress(Killed):
            places.remove_others()
            finished = True
        left = {path.parent for path in (tmp_path / "out").glob("*/*")}
        assert {Path(store.url) for store in places.stale_folders()} == left
        places.remove_others()
        assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert event > 8
