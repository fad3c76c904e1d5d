"""Which shards --repair makes again, without a model: every shard, every pair, killed anywhere."""

import json
import shutil
from dataclasses import replace
from itertools import combinations

import fsspec
import numpy as np
import pytest
from extractions import edit, shard_file
from small_runs import HIDDEN, HOOKS, TEXT, Killed, activations, content, shards_of, status
from storages import open_storage
from test_killed import forget, killed_at

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError, StorageError
from activation_extraction.inspect.verify import verify
from activation_extraction.run.data_files import DataFiles
from activation_extraction.run.host_text import HostText
from activation_extraction.run.hosts import Watchdog
from activation_extraction.run.open_data import Dataset, Source, TextRequest
from activation_extraction.run.repair import RepairPlanner
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Worker
from activation_extraction.text.sources import list_files, open_files

IDENTITY = Identity(model_digest="tiny", activation_dtype="float32", max_seq_length=32)
METADATA = {
    "model": {"hidden_size": HIDDEN, "vocab_size": 2048},
    "configuration": {"batch_size": 2},
    "backend": "cpu",
}


class Repaired:
    """What a repair has done."""

    def __init__(self, storage, planner):
        self.complete = storage.complete
        self.repaired = [commit.number for commit in storage.made]
        self.differing = planner.differing(storage.made)


@pytest.fixture
def run(byte_tokenizer, rows, shard_format):
    """Runs or repairs all but the model. Shards are smaller than batches, or larger."""

    def run(folder, repairing=False, *, stop_after=None, identity=IDENTITY, **options):
        path = str(options.pop("data", rows))
        files = DataFiles(list_files(path))
        asked = parse_args(["--max_seq_length", "32"]).part(TextRequest)
        asked = replace(asked, max_samples=options.get("max_samples"))
        dataset = Dataset((Source(open_files(path, TEXT.columns)),), "files", "", files)
        text = HostText(asked, dataset, TEXT, byte_tokenizer, Worker(), (2, 32))
        named = replace(identity, hooks=tuple(HOOKS.values()))
        planner = RepairPlanner(Folder(str(folder)), options.get("remote"), named, METADATA)
        place = open_storage(
            folder,
            HOOKS,
            identity=identity,
            metadata=METADATA,
            planner=planner if repairing else None,
            **({"shard_size_gb": 1e-6, "shard_format": shard_format} | options),
        )
        try:
            batches = text.open(place, Watchdog(600))[1]
            place.open()
            for number, batch in enumerate(batches):
                if stop_after == number:
                    place.finalize(complete=False)
                    break
                place.add_batch(batch, activations(batch))
            place.finalize()
        finally:
            place.close(patient=True)
        return place if not repairing else Repaired(place, planner)

    return run


@pytest.fixture
def whole(run, tmp_path):
    run(tmp_path / "whole")
    return content(tmp_path / "whole")


def shard(number, suffix="pkl.gz"):
    return f"shard_{number:04d}.{suffix}"


def totals(folder):
    found = json.loads((folder / "metadata.json").read_bytes())
    return {name: found[name] for name in ("shards", "samples", "tokens", "bytes", "hooks")}


DAMAGE = {
    "both": lambda folder, n: [p.unlink() for p in folder.glob(f"shard_{n:04d}.*")],
    "file": lambda folder, n: shard_file(folder, n).write_bytes(b"short"),
    "statistics": lambda folder, n: (folder / shard(n, "npz")).unlink(),
    "table": lambda folder, n: (folder / shard(n, "samples.jsonl.gz")).unlink(),
    "JSON": lambda folder, n: (folder / shard(n, "json")).write_bytes(b"{}"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "size,shard_format",
    [(0.3e-6, "pickle"), (1e-6, "pickle"), (1e-6, "safetensors"), (3e-6, "pickle")],
)
def test_every_shard_and_every_pair_of_shards(size, run, tmp_path):
    """Smaller than a batch, and larger; bytes depend on how the samples were packed."""
    run(tmp_path / "whole", shard_size_gb=size)
    whole, counted = content(tmp_path / "whole"), totals(tmp_path / "whole")
    numbers = range(1, shards_of(whole) + 1)
    lost = [*[(n,) for n in numbers], *combinations(numbers, 2)][:: 1 if len(numbers) < 9 else 20]
    assert len(lost) > 15
    for case, each in enumerate(lost):
        folder = tmp_path / f"{case}"
        shutil.copytree(tmp_path / "whole", folder)
        kinds = list(DAMAGE)[case % 4 :] + list(DAMAGE)[: case % 4]
        for number, kind in zip(each, kinds, strict=False):
            DAMAGE[kind](folder, number)
        place = run(folder, True, shard_size_gb=size)
        assert place.repaired == list(each) and not place.differing, each
        assert content(folder) == whole and totals(folder) == counted, (each, kinds)
        assert verify(Folder(str(folder)), None, 0) == 0
        forget(folder)


def test_nothing_is_written_when_all_is_in_order(run, whole, tmp_path):
    folder = tmp_path / "whole"
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert run(folder, True).complete
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()} == before


@pytest.mark.long
@pytest.mark.parametrize(
    "place,shard_format",
    [("local", "pickle"), ("bucket", "safetensors"), ("bucket, local kept", "pickle")],
)
def test_a_repair_that_was_killed_is_repaired(run, tmp_path, monkeypatch, place):
    """Before the first change of disk or bucket, the second, ... until it is not killed."""
    memory, size = fsspec.filesystem("memory"), 4e-6
    run(tmp_path / "whole", shard_size_gb=size)
    whole = content(tmp_path / "whole")
    last = shards_of(whole)
    assert last > 4
    event, finished = 0, False
    while not finished:
        event += 1
        url = f"memory://{tmp_path}/{event}"
        folder, damaged = tmp_path / f"{event}", tmp_path / f"{event}_damaged"
        shutil.copytree(tmp_path / "whole", damaged)
        DAMAGE["file"](damaged, 2)
        DAMAGE["JSON"](damaged, 3)
        DAMAGE["both"](damaged, last)
        options = {"shard_size_gb": size}
        if place == "local":
            damaged.rename(folder)
        else:
            memory.put(f"{damaged}/", f"{url}/", recursive=True)
            options |= {"remote": Folder(url), "delete_local_after_upload": place == "bucket"}
        with killed_at(event, folder, monkeypatch) as events:
            try:
                run(folder, True, **options)
                finished = True
            except (Killed, StorageError):
                pass
        run(folder, True, **options)
        if place != "local":
            shutil.rmtree(damaged)
            memory.get(f"{url}/", str(damaged), recursive=True)
        found = folder if place == "local" else damaged
        kept = {name: data for name, data in content(found).items() if name[0] != "."}
        assert kept == whole, (event, events)
        assert status(found) == "complete" and verify(Folder(str(found)), None, 0) == 0
        assert not (place == "bucket" and list(folder.glob("shard_*.[!j]*"))), (event, events)
        run(folder, **options)
        forget(folder, damaged)
    assert event > 10


@pytest.mark.parametrize("lost", [(2,), (3, 4), (1, "last"), ("last",)])
def test_an_interrupted_run_is_repaired_and_goes_on(lost, run, whole, tmp_path):
    """Its last shard is partial."""
    folder = tmp_path / "out"
    run(folder, stop_after=9)
    before = content(folder)
    for each in lost:
        DAMAGE["both"](folder, shards_of(before) if each == "last" else each)
    run(folder, True)
    assert content(folder) == before != whole and status(folder) == "interrupted"
    run(folder)
    assert content(folder) == whole


def test_shards_of_a_killed_run_that_end_nobody_knows_where_are_left_to_it(run, whole, tmp_path):
    folder = tmp_path / "out"
    run(folder, stop_after=9)
    last = shards_of(content(folder))
    edit(folder / "metadata.json", lambda told: told.update(status="running", shards=0, samples=0))
    DAMAGE["JSON"](folder, last)
    DAMAGE["both"](folder, 2)
    assert run(folder, True).repaired == [2]
    assert not (folder / shard(last)).exists() and not (folder / shard(last, "json")).exists()
    run(folder)
    assert content(folder) == whole


def test_wrong_sums_are_counted_again(run, whole, tmp_path):
    """A repair was killed before it wrote them."""
    folder = tmp_path / "whole"
    before = totals(folder)
    edit(folder / "metadata.json", lambda told: told.update(bytes=told["bytes"] + 1))
    assert verify(Folder(str(folder)), None, 0) == 1
    assert run(folder, True).repaired == []
    assert totals(folder) == before and verify(Folder(str(folder)), None, 0) == 0


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text("{")])
def test_metadata_is_made_anew(damage, run, whole, tmp_path):
    folder = tmp_path / "whole"
    damage(folder / "metadata.json")
    DAMAGE["file"](folder, 3)
    with pytest.raises(InputError, match="--repair (repairs|writes)"):
        run(folder)
    assert run(folder, True).repaired == [3]
    assert status(folder) == "interrupted"
    run(folder)
    assert content(folder) == whole and status(folder) == "complete"


def test_a_fresh_disk_and_damaged_copies(run, whole, tmp_path):
    url = f"memory://{tmp_path}/bucket"
    options = {"remote": Folder(url)}
    run(tmp_path / "out", **options)
    assert not list((tmp_path / "out").glob("shard_*"))
    assert run(tmp_path / "out", True, **options).repaired == []
    run(tmp_path / "out", **options)
    memory = fsspec.filesystem("memory")
    memory.rm(f"{tmp_path}/bucket/{shard(3)}")
    with pytest.raises(InputError, match="were uploaded to memory"):
        run(tmp_path / "out", True)
    assert run(tmp_path / "fresh", True, **options).repaired == [3]
    memory.get(f"{url}/", str(tmp_path / "copy"), recursive=True)
    assert content(tmp_path / "copy") == whole


def test_refusals(run, whole, tmp_path):
    folder = tmp_path / "whole"
    with pytest.raises(InputError, match="holds no extraction that --repair could work on"):
        run(tmp_path / "nothing", True)
    assert not (tmp_path / "nothing").exists()
    DAMAGE["file"](folder, 2)
    before = content(folder)
    with pytest.raises(InputError, match="differs in model_digest: tiny, now other"):
        run(folder, True, identity=replace(IDENTITY, model_digest="other"))
    (folder / "metadata.json").unlink()
    with pytest.raises(InputError, match="belongs to another run"):
        run(folder, True, identity=replace(IDENTITY, model_digest="other"))
    assert content(folder) == before


def test_another_process_has_written_meanwhile(run, whole, tmp_path, monkeypatch):
    folder = tmp_path / "whole"
    DAMAGE["file"](folder, 2)
    original = ActivationStorage.open

    def late(place):
        edit(folder / "metadata.json", lambda told: told.update(written=1.0))
        original(place)

    monkeypatch.setattr(ActivationStorage, "open", late)
    with pytest.raises(InputError, match="another process has written to it during the check"):
        run(folder, True)


def test_other_data_replaces_nothing(run, whole, rows, tmp_path):  # noqa: F811
    folder, other = tmp_path / "whole", tmp_path / "other.jsonl"
    DAMAGE["file"](folder, 4)
    lines = rows.read_text().splitlines(keepends=True)
    other.write_text("".join('{"text": "xy", "id": 1}\n' for _ in lines))
    before = content(folder)
    with pytest.raises(StorageError, match="shard 4 cannot be made again"):
        run(folder, True, data=other)
    assert content(folder) == before


def test_other_rounding_is_told(run, whole, tmp_path, monkeypatch):
    """Another batch size, or a device that rounds otherwise."""
    folder = tmp_path / "whole"
    DAMAGE["file"](folder, 2)
    monkeypatch.setitem(globals(), "activations", lambda batch: activations_of_another(batch))
    monkeypatch.setitem(METADATA, "configuration", {"batch_size": 4})
    place = run(folder, True)
    (told,) = place.differing
    assert told.startswith(f"{shard(2)}: its bytes are not those that it had")
    assert told.endswith("batch_size is 4, was 2")
    assert verify(Folder(str(folder)), None, 0) == 0


original_activations = activations


def activations_of_another(batch):
    values = original_activations(batch)
    return {key: value * np.float32(1 + 2**-20) for key, value in values.items()}
