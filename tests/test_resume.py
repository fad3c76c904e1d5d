"""An interrupted run, continued: every sample once and the bytes of an uninterrupted run."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from extractions import edit
from small_runs import (
    DOCUMENTS,
    HIDDEN,
    HOOKS,
    Killed,
    both_formats,
    content,
    set_status,
    shards_of,
    status,
    stream_of,
)
from storages import open_storage

from activation_extraction.common.errors import InputError, RunError, StorageError
from activation_extraction.store import pickle_file
from activation_extraction.store.identity import Identity
from activation_extraction.text import file_forms, packing, sources


@pytest.fixture(params=[5, packing.WINDOW])
def window(request, monkeypatch):
    """The window has a few samples, or more than there are."""
    monkeypatch.setattr(packing, "WINDOW", request.param)


@both_formats
def test_killed_after_every_sample_and_once_more(window, run, whole, tmp_path):
    total = json.loads((tmp_path / "whole/metadata.json").read_bytes())["samples"]
    assert total > 30 and len(whole) > 8
    chance = random.Random(2)
    for first in range(total):
        folder = tmp_path / f"killed_{first}"
        with pytest.raises(Killed):
            run(folder, kill_after=first)
        assert status(folder) == "running"
        with pytest.raises(Killed):
            run(folder, kill_after=chance.randint(first, total - 1))
        run(folder)
        assert content(folder) == whole, first
        assert status(folder) == "complete"


@pytest.mark.long
def test_resumed_at_every_sample_that_was_committed(window, run, tmp_path):
    """Shards of one sample each: a cursor for every sample of the data set."""
    run(tmp_path / "whole", shard_size_gb=1e-9)
    whole = content(tmp_path / "whole")
    total = shards_of(whole)
    assert any("taken" in whole[f"shard_{n:04d}.json"]["cursor"] for n in range(1, total + 1))
    for stored in range(total + 1):
        folder = tmp_path / f"stored_{stored}"
        shutil.copytree(tmp_path / "whole", folder)
        for path in folder.glob("shard_*"):
            if int(path.name[6:10]) > stored:
                path.unlink()
        if stored < total:
            set_status(folder, "running")
        run(folder, shard_size_gb=1e-9)
        assert content(folder) == whole, stored


@both_formats
def test_interrupted_anywhere_a_partial_shard_is_made_whole(run, whole, tmp_path):
    total = json.loads((tmp_path / "whole/metadata.json").read_bytes())["samples"]
    for first in range(0, total, 3):
        folder = tmp_path / f"interrupted_{first}"
        run(folder, interrupt_after=first)
        assert status(folder) == "interrupted"
        stored = json.loads((folder / "metadata.json").read_bytes())["samples"]
        assert stored > first  # the whole batch, in a partial shard
        run(folder, interrupt_after=first + 2)
        run(folder)
        assert content(folder) == whole, first


def test_a_complete_run_is_left_alone(run, whole, tmp_path):
    folder = tmp_path / "whole"
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert run(folder).complete
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()} == before


def test_a_complete_host_stays_so_while_others_go_on(run, whole, tmp_path):
    """It takes part in their steps, so its storage is opened and finalized like theirs."""
    folder = tmp_path / "whole"
    for complete in (True, False):
        place = open_storage(
            folder, HOOKS, identity=Identity(model_digest="tiny"), shard_size_gb=1.5e-6
        )
        with place:
            with pytest.raises(ValueError, match="holds a complete extraction"):
                place.add_activation(1, np.zeros((3, HIDDEN), np.float32), 1000, "")
            place.finalize(complete)
        assert status(folder) == "complete" and content(folder) == whole


def first_shards_alone(folder, count, change):
    """Makes of a folder what a run leaves there that was killed, but with another cursor."""
    for path in folder.glob("shard_*"):
        if int(path.name[6:10]) > count:
            path.unlink()
    set_status(folder, "running")
    edit(folder / f"shard_{count:04d}.json", lambda commit: change(commit["cursor"]))


def test_a_run_whose_batches_were_consecutive_samples_is_continued(run, whole, tmp_path):
    """The cursors of earlier versions have no samples that are taken."""
    folder = tmp_path / "whole"
    names = sorted(name for name in whole if name.endswith(".json"))
    count = next(n for n, name in enumerate(names, 1) if "taken" in whole[name]["cursor"])
    first_shards_alone(folder, count, lambda cursor: cursor.pop("taken"))
    run(folder)
    tables = [name for name in whole if name.endswith(".samples.jsonl.gz")]
    assert len(tables) > 8 and all(content(folder)[name] == whole[name] for name in tables)
    assert status(folder) == "complete"


@pytest.mark.parametrize(
    "left_out,change",
    [
        (1, lambda first: {"taken": [first + 1]}),
        (0, lambda first: {"taken": list(range(first, first + 60))}),  # all that is left
        (1, lambda first: {"samples": first + 2}),
    ],
)
def test_a_cursor_that_leaves_out_a_sample_is_refused(left_out, change, run, whole, tmp_path):
    """Nothing is stored after the gap."""
    folder, stored = tmp_path / "whole", whole["shard_0001.json"]["samples"]["count"]
    first_shards_alone(folder, 1, lambda cursor: cursor.update(change(stored)))
    why = f"sample {stored + left_out} is missing: the cursor of shard 1 leaves it out"
    with pytest.raises(StorageError, match=why):
        run(folder)
    assert [path.name for path in folder.glob("shard_*.json")] == ["shard_0001.json"]


@both_formats
def test_max_samples_may_grow_and_not_shrink(run, whole, tmp_path):
    """Each sample is there once. The batches in front of a former end are other ones, for which
    the activations of small_runs differ by much, and those of a model by rounding."""
    folder = tmp_path / "grown"
    run(folder, max_samples=7)
    run(folder, max_samples=20)
    with pytest.raises(InputError, match="already holds 20 samples, more than the 19"):
        run(folder, max_samples=19)
    run(folder)
    grown = content(folder)
    assert grown.keys() == whole.keys()
    for name, before in whole.items():
        if name.endswith(".samples.jsonl.gz"):
            assert grown[name] == before
        elif name.endswith(".json"):
            facts = "samples", "tokens", "partial", "unpacked"
            assert [grown[name][each] for each in facts] == [before[each] for each in facts]


def test_only_the_current_piece_of_the_data_is_read_again(run, tmp_path, monkeypatch, rows):
    """One file per ten rows: those before the cursor's are not opened."""
    lines = rows.read_text().splitlines(keepends=True)
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    for n in range(4):
        (pieces / f"{n}.jsonl").write_text("".join(lines[10 * n : 10 * n + 10]))
    opened = []
    original = file_forms.open_file
    monkeypatch.setattr(
        file_forms, "open_file", lambda url: opened.append(Path(url).name) or original(url)
    )
    stream = stream_of(pieces)
    state = None
    for number, _ in enumerate(stream):
        if number == 24:
            state = stream.state()
    opened.clear()
    again = stream_of(pieces)
    again.restore(json.loads(json.dumps(state)))
    assert len(list(again)) == 15
    assert opened == ["2.jsonl", "3.jsonl"]


def test_what_cannot_be_continued_is_refused_and_left_alone(run, whole, tmp_path):
    def broken(name, change):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "whole", folder)
        change(folder)
        return folder

    def remove(*names):
        return lambda folder: [(folder / name).unlink() for name in names]

    def flip(name):
        def change(folder):
            data = bytearray((folder / name).read_bytes())
            data[len(data) // 2] ^= 1
            (folder / name).write_bytes(data)

        return change

    def from_another_run(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Identity, "run", "0" * 64)
            run(tmp_path / "other")
        shutil.copy(tmp_path / "other/shard_0002.json", folder)

    def truncate(folder):
        os.truncate(folder / "shard_0002.pkl.gz", 10)

    for name, change, message in (
        ("gap", remove("shard_0002.json", "shard_0002.pkl.gz"), "shard 2 is missing, but shard 3"),
        ("no file", remove("shard_0002.pkl.gz"), "shard 2 has a JSON, but its file is missing"),
        ("short", truncate, "shard 2 has a JSON, but its file is missing or has another size"),
        ("no metadata", remove("metadata.json"), "already holds shards, but no metadata.json"),
        ("damaged commit", flip("shard_0002.json"), "shard_0002.json: is damaged"),
        ("damaged metadata", flip("metadata.json"), "metadata.json: is damaged"),
        ("other run", from_another_run, "shard_0002.json belongs to another run"),
    ):
        folder = broken(name, change)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(InputError, match=message):
            run(folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        run(folder, overwrite=True)
        assert content(folder) == whole


@pytest.mark.long
def test_a_read_that_failed_changes_no_bytes(run, whole, tmp_path, monkeypatch):
    """The batch in which it failed is not packed differently for that."""
    original = sources.json_rows
    for bad in range(1, DOCUMENTS):
        folder = tmp_path / f"bad_{bad}"

        def fails(urls, names, bad=bad):
            for number, row in enumerate(original(urls, names)):
                if number == bad:
                    raise ConnectionError("gone")
                yield row

        with monkeypatch.context() as patch:
            patch.setattr(sources, "json_rows", fails)
            with pytest.raises(RunError, match="gone"):
                run(folder)
        assert status(folder) == "interrupted"
        run(folder)
        assert content(folder) == whole


def test_a_partial_shard_stays_while_the_one_that_replaces_it_cannot_be_written(
    run, tmp_path, monkeypatch
):
    run(tmp_path, max_samples=10)
    before = content(tmp_path)
    last = sorted(tmp_path.glob("shard_*.json"))[-1]
    assert json.loads(last.read_bytes())["partial"]

    def full(*_):
        raise OSError(28, "")

    with monkeypatch.context() as patch:
        patch.setattr(pickle_file, "records_of", full)
        with pytest.raises(StorageError, match="shard_00.*the disk is full"):
            run(tmp_path)
    assert content(tmp_path) == before
