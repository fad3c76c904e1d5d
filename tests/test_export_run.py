"""--export pickle and --export safetensors: the copy is a run, and holds what the source holds."""

import json
import shutil
from contextlib import suppress
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from command_line import main
from extractions import HOOKS, extract, open_part
from small_runs import Killed, shard_name
from storages import open_storage
from test_killed import killed_at

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.inspect import export as exporting
from activation_extraction.inspect.export import export
from activation_extraction.inspect.status import show_status
from activation_extraction.store.folder import Folder
from activation_extraction.store.formats import format_of
from activation_extraction.store.identity import Identity
from activation_extraction.store.local_files import AtomicFile, lock_folder
from benchmarks.kill_and_resume import shards_in

FIRST, SECOND = HOOKS.values()
PAIRS = [("pickle", "safetensors"), ("safetensors", "pickle")]
HOSTS = [f"machine_000_host_{host:02d}" for host in range(2)]


def make(root, shard_format):
    """A finished run of two hosts."""
    for host in range(2):
        identity = {"shard_format": shard_format, "compress_shards": shard_format == "pickle"}
        extract(root, 0, host, 1, 2, shard_format=shard_format, identity=identity)
    return root


@pytest.fixture
def run(request, tmp_path):
    return make(tmp_path / "run", getattr(request, "param", "pickle"))


def save(run, form, target, *patterns, compress=True):
    export(Folder(str(run)), form, str(target), patterns or None, compress)
    return target


def all_shards(root):
    return {folder: shards_in(root / folder) for folder in HOSTS}


def sample_of(dataset, number):
    sample = dataset[number]
    table = sample.sample_idx, sample.text_preview, sample.doc_id
    arrays = [sample.token_ids, sample.position, *sample.activations.values()]
    return table, [(str(each.dtype), each.shape, each.tobytes()) for each in arrays]


def same(one, other, hooks=None):
    one, other = ActivationDataset(one, hooks), ActivationDataset(other, hooks)
    assert len(one) == len(other) > 0 and one.hooks == other.hooks
    assert all(sample_of(one, n) == sample_of(other, n) for n in range(len(one)))


@pytest.mark.parametrize("source,form", PAIRS)
def test_there_and_back_again(source, form, tmp_path, check, capsys):
    """The copy is in order, and a copy of it in the first format has the run's own bytes."""
    run = make(tmp_path / "run", source)
    copy = save(run, form, tmp_path / "copy")
    assert check(copy) == [] and show_status(Folder(str(copy)), write=False) == 0
    assert list(all_shards(copy)[HOSTS[0]])[:2] == [shard_name(n, form) for n in (1, 2)]
    same(copy, run)
    back = save(copy, source, tmp_path / "back")
    assert check(back) == [] and all_shards(back) == all_shards(run)
    same(back, run)


@pytest.mark.parametrize("source,form", PAIRS)
def test_the_run_s_command_goes_on_in_the_copy(source, form, tmp_path):
    """With the copy's format in its flags."""
    extract(tmp_path / "run", shard_format=source, identity={"shard_format": source})
    save(tmp_path / "run", form, tmp_path / "copy", compress=True)
    identity = {"shard_format": form, "compress_shards": form == "pickle"}
    assert open_part(tmp_path / "copy", identity=identity, shard_format=form).complete
    with pytest.raises(InputError, match=f"differs in shard_format: {form}"):
        open_part(tmp_path / "copy", identity={"shard_format": source})


def test_plain_pickles_and_chosen_hooks(run, tmp_path, check):
    plain = save(run, "pickle", tmp_path / "plain", compress=False)
    assert set(shards_in(plain / HOSTS[0])) == {f"shard_000{n}.pkl" for n in range(1, 5)}
    one = save(run, "safetensors", tmp_path / "one", "*.5.*")
    assert list(ActivationDataset(one).hooks) == [SECOND]
    for copy in (plain, one):
        assert check(copy) == []
        same(copy, run, [SECOND])
    assert json.loads((one / HOSTS[0] / "metadata.json").read_text())["identity"]["hooks"] == [
        SECOND
    ]


@pytest.mark.long
@pytest.mark.parametrize("source,form", PAIRS)
def test_killed_before_every_change(source, form, tmp_path, monkeypatch, check):
    """Exhaustive, and the same call then continues; what is complete is not written again."""
    extract(tmp_path / "run", shard_format=source)
    whole = shards_in(save(tmp_path / "run", form, tmp_path / "whole"))
    event, finished = 0, False
    while not finished:
        event += 1
        target = tmp_path / f"{event}"
        with killed_at(event, target, monkeypatch) as events, suppress(Killed):
            save(tmp_path / "run", form, target)
            finished = True
        before = {path: path.stat().st_mtime_ns for path in target.glob("shard_*.json")}
        save(tmp_path / "run", form, target)
        assert shards_in(target) == whole and check(target) == [], (event, events)
        assert all(path.stat().st_mtime_ns == time for path, time in before.items())
        assert not list(target.glob(".*")), (event, events)
    assert event > 20


def test_folders_that_are_in_use_are_refused(run, tmp_path):
    with pytest.raises(InputError, match="holds another run"):
        save(run, "safetensors", run)
    copy = save(run, "safetensors", tmp_path / "copy")
    for other, form in ((run, "pickle"), (make(tmp_path / "other", "safetensors"), "pickle")):
        with pytest.raises(InputError, match="holds another run"):
            save(other, form, copy)
    with pytest.raises(InputError, match="holds another run"):
        save(run, "safetensors", copy, FIRST)
    for place in (tmp_path / "notes", tmp_path / "inside" / HOSTS[0]):
        place.mkdir(parents=True)
        (place / "notes.txt").touch()
    with pytest.raises(InputError, match="notes: holds notes.txt; expected an empty folder"):
        save(run, "safetensors", tmp_path / "notes")
    with pytest.raises(InputError, match="holds other files; expected an empty folder"):
        save(run, "safetensors", tmp_path / "inside")
    with pytest.raises(InputError, match="is a URL"):
        save(run, "safetensors", "memory://elsewhere")
    (tmp_path / "locked" / HOSTS[0]).mkdir(parents=True)
    lock_folder(tmp_path / "locked" / HOSTS[0])
    with pytest.raises(RunError, match="another process is writing to it"):
        save(run, "safetensors", tmp_path / "locked")


def test_a_damaged_source_and_a_bad_disk_are_found(run, tmp_path, monkeypatch):
    shard = run / HOSTS[0] / shard_name(2)
    whole = shard.read_bytes()
    shard.write_bytes(bytes([*whole[:9], whole[9] ^ 1, *whole[10:]]))  # of the gzip header
    with pytest.raises(RunError, match="sha256 is not the one in its JSON"):
        save(run, "safetensors", tmp_path / "copy")
    shard.write_bytes(whole)
    original = AtomicFile.publish

    def bad_disk(file):
        original(file)
        path = file._path
        if format_of(path.name) and path.name.startswith("shard_0003"):
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    with monkeypatch.context() as patch:
        patch.setattr(AtomicFile, "publish", bad_disk)
        with pytest.raises(RunError, match="does not hold what was written"):
            save(run, "safetensors", tmp_path / "copy")
    assert not (tmp_path / "copy" / HOSTS[0] / "shard_0003.json").exists()
    same(save(run, "safetensors", tmp_path / "copy"), run)


def test_a_run_without_token_ids_stays_a_pickle(tmp_path):
    options = {"hook_facts": {0: {"width": 2}}, "identity": Identity(activation_dtype="float32")}
    with open_storage(tmp_path / "run", {0: "h"}, **options) as storage:
        storage.add_activation(0, np.zeros((1, 2), np.float32), 0, "")
    with pytest.raises(InputError, match="the run has no token ids"):
        save(tmp_path / "run", "safetensors", tmp_path / "copy")


def test_the_command_line_copies_from_a_bucket(run, tmp_path, capsys):
    url = f"memory:/{tmp_path}/bucket"
    fsspec.filesystem("memory").put(f"{run}/", url, recursive=True)
    target = tmp_path / "copy"
    command = ["--output_dir", url, "--export", "safetensors", "--export_dir", str(target)]
    assert main(*command) == 0
    printed, lines = capsys.readouterr().out.split("read it with:\n")
    assert printed.startswith("exported: 20 samples, 200 tokens, 2 hooks, as safetensors in ")
    scope: dict = {}
    exec("\n".join(line.strip() for line in lines.splitlines()), scope)
    assert len(scope["dataset"]) == 20
    same(target, run)
    assert main(*command, "--compress_shards") == 2
    assert "safetensors are never compressed" in capsys.readouterr().err
    shutil.rmtree(target)


def test_a_disk_with_too_little_room_is_refused(run, tmp_path, monkeypatch):
    free = 100 * 2 * 64 - 1  # a host has 100 tokens of 64 bytes at each hook
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(InputError, match="has 0.0 GB free, needs 0.0 GB$"):
        save(run, "safetensors", tmp_path / "copy")
