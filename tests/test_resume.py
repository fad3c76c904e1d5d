"""An interrupted run, continued: every sample once and the bytes of an uninterrupted run."""

import json
import os
import random
import shutil
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest

from activation_extraction.cli.errors import InputError, RunError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.output import pickle_file
from activation_extraction.output.folder import Folder
from activation_extraction.output.identity import Identity
from activation_extraction.output.sealed_json import seal
from activation_extraction.output.shard_writer import StorageError
from activation_extraction.output.storage import ActivationStorage
from activation_extraction.run import demo
from activation_extraction.text import documents
from activation_extraction.text.documents import DocumentStream, open_files
from activation_extraction.text.packing import pack
from activation_extraction.text.tokens import load_tokenizer, samples

HOOKS = {1: "blocks.1.hook_resid_post", 2: "blocks.2.hook_resid_post"}
HIDDEN = 4
DOCUMENTS = 40


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the run goes on."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One byte, one token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    demo.write_tokenizer(folder, [])
    (folder / "config.json").write_text("{}")
    return load_tokenizer(Checkpoint(str(folder)), 2048)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Texts of 1 to 30 bytes, some empty."""
    chance = random.Random(1)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    texts = ["x" * chance.choice([0, 1, *range(2, 31)]) for _ in range(DOCUMENTS)]
    path.write_text("".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(texts)))
    return path


@pytest.fixture
def run(tokenizer, rows):
    """Runs all but the model; what is stored depends on how samples are packed, too."""

    def run(folder, *, kill_after=None, interrupt_after=None, max_samples=None, **options):
        stream = DocumentStream(open_files(str(rows), "text"), "text")
        place = ActivationStorage(
            folder,
            HOOKS,
            identity=Identity(model_digest="tiny"),
            max_samples=max_samples,
            **({"shard_size_gb": 1.5e-6} | options),
        )
        try:
            if place.complete:
                place.finalize()
                return place
            start = place.cursor
            batches = pack(samples(stream, tokenizer, 24, max_samples, start=start), 2, 32)
            place.open()
            place.record({"found": place.found_samples})
            for batch in batches:
                left = None if kill_after is None else kill_after - place._cutter.last_sample - 1
                if left is not None and left < len(batch.samples):
                    for sample, row, begin in batch.samples:
                        if (
                            place._cutter.wants(sample.sample_idx)
                            and sample.sample_idx < kill_after
                        ):
                            for key in HOOKS:
                                end = begin + len(sample.token_ids)
                                place._cutter.cursor = batch.cursor
                                place.add_activation(
                                    key,
                                    activations(batch)[key][row, begin:end],
                                    sample.sample_idx,
                                    sample.text_preview,
                                    sample.token_ids,
                                    sample.doc_id,
                                )
                    raise Killed
                place.add_batch(batch, activations(batch))
                if interrupt_after is not None and place._cutter.last_sample >= interrupt_after:
                    place.finalize(complete=False)
                    return place
            place.finalize()
        except StorageError:
            raise
        except RunError:  # of the data, as in an extraction
            place.finalize(complete=False)
            raise
        finally:
            place.close(patient=True)
        return place

    return run


def activations(batch):
    values = {key: np.zeros((*batch.token_ids.shape, HIDDEN), np.float32) for key in HOOKS}
    for sample, row, start in batch.samples:
        stop = start + len(sample.token_ids)
        ramp = np.arange(stop - start, dtype=np.float32)[:, None]
        for number, value in enumerate(values.values()):
            value[row, start:stop] = sample.sample_idx + ramp / 64 + np.arange(HIDDEN) + number
            value[row, start:stop] += row / 4 + batch.samples[0].sample.sample_idx / 1024
    return values


def content(folder: Path) -> dict[str, object]:
    """Shards as bytes, commits without their times."""
    found: dict[str, object] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("shard") and path.suffix == ".json":
            commit = json.loads(path.read_bytes())
            found[path.name] = {
                key: value
                for key, value in commit.items()
                if key not in ("committed", "began", "checksum")
            }
        elif path.is_file() and path.name not in ("metadata.json", "metrics.jsonl"):
            found[path.name] = path.read_bytes()
    return found


@pytest.fixture
def whole(run, tmp_path):
    """What an uninterrupted run stores."""
    run(tmp_path / "whole")
    return content(tmp_path / "whole")


def status(folder):
    return json.loads((folder / "metadata.json").read_bytes())["status"]


def set_status(folder, status):
    """As a run leaves it that was killed."""
    metadata = json.loads((folder / "metadata.json").read_bytes())
    del metadata["checksum"]
    (folder / "metadata.json").write_bytes(seal({**metadata, "status": status}))


def test_killed_after_every_sample_and_once_more(run, whole, tmp_path):
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


def test_resumed_at_every_sample_that_was_committed(run, tmp_path):
    """Shards of one sample each: a cursor for every sample of the data set."""
    run(tmp_path / "whole", shard_size_gb=1e-9)
    whole = content(tmp_path / "whole")
    total = len(whole) // 2
    for stored in range(total + 1):
        folder = tmp_path / f"stored_{stored}"
        shutil.copytree(tmp_path / "whole", folder)
        for path in folder.glob("shard_*"):
            if int(path.name[6:10]) > stored:
                path.unlink()
        if stored < total:
            metadata = seal(
                {
                    **{
                        key: value
                        for key, value in json.loads(
                            (folder / "metadata.json").read_bytes()
                        ).items()
                        if key != "checksum"
                    },
                    "status": "running",
                }
            )
            (folder / "metadata.json").write_bytes(metadata)
        run(folder, shard_size_gb=1e-9)
        assert content(folder) == whole, stored


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
        place = ActivationStorage(
            folder, HOOKS, identity=Identity(model_digest="tiny"), shard_size_gb=1.5e-6
        )
        with place:
            with pytest.raises(ValueError, match="holds a complete extraction"):
                place.add_activation(1, np.zeros((3, HIDDEN), np.float32), 1000, "")
            place.finalize(complete)
        assert status(folder) == "complete" and content(folder) == whole


def test_max_samples_may_grow_and_not_shrink(run, whole, tmp_path):
    folder = tmp_path / "grown"
    run(folder, max_samples=7)
    run(folder, max_samples=20)
    with pytest.raises(InputError, match="--max_samples: 20 samples are stored"):
        run(folder, max_samples=19)
    run(folder)
    assert content(folder) == whole


def test_only_the_current_piece_of_the_data_is_read_again(run, tmp_path, monkeypatch, rows):
    """One file per ten rows: those before the cursor's are not opened."""
    lines = rows.read_text().splitlines(keepends=True)
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    for n in range(4):
        (pieces / f"{n}.jsonl").write_text("".join(lines[10 * n : 10 * n + 10]))
    opened = []
    original = documents.fsspec.open
    monkeypatch.setattr(
        documents.fsspec,
        "open",
        lambda url, *a, **k: opened.append(Path(url).name) or original(url, *a, **k),
    )
    stream = DocumentStream(open_files(str(pieces), "text"), "text")
    state = None
    for number, _ in enumerate(stream):
        if number == 24:
            state = stream.state()
    opened.clear()
    again = DocumentStream(open_files(str(pieces), "text"), "text")
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
        ("gap", remove("shard_0002.json", "shard_0002.pkl.gz"), "shard 2 is missing and shard 3"),
        ("no file", remove("shard_0002.pkl.gz"), "shard 2 has a JSON, but its file is missing"),
        ("short", truncate, "shard 2 has a JSON, but its file is missing or of another size"),
        ("no metadata", remove("metadata.json"), "already holds shards, without metadata.json"),
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


def test_two_processes_do_not_write_to_one_folder(run, tmp_path):
    first, second = ActivationStorage(tmp_path, HOOKS), ActivationStorage(tmp_path, HOOKS)
    first.open()
    for begin in (second.open, partial(ActivationStorage, tmp_path, HOOKS)):
        with pytest.raises(InputError, match="another process is writing to it"):
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


def test_a_read_that_failed_changes_no_bytes(run, whole, tmp_path, monkeypatch):
    """The batch in which it failed is not packed differently for that."""
    original = documents.json_lines
    for bad in range(1, DOCUMENTS):
        folder = tmp_path / f"bad_{bad}"

        def fails(urls, bad=bad):
            for number, row in enumerate(original(urls)):
                if number == bad:
                    raise ConnectionError("gone")
                yield row

        with monkeypatch.context() as patch:
            patch.setattr(documents, "json_lines", fails)
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
        patch.setattr(pickle_file, "pickle_records", full)
        with pytest.raises(StorageError, match=f"{last.stem}.*the disk is full"):
            run(tmp_path)
    assert content(tmp_path) == before


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
    assert run(folder, remote=Folder(url)).totals.shards == len(whole) // 2
    assert in_bucket() == whole and not list(folder.glob("*.gz"))
    shutil.rmtree(folder)
    assert run(folder, remote=Folder(url)).complete and not folder.exists()
    # The bucket is emptied, and the local shards are not there.
    memory.rm(url, recursive=True)
    run(folder, remote=Folder(url))
    memory.rm(url, recursive=True)
    with pytest.raises(InputError, match="shard_0001.pkl.gz is not there, and was deleted here"):
        run(folder, remote=Folder(url))
    with pytest.raises(InputError, match="was uploaded to memory://.*--upload_to_gcs"):
        run(folder)
    # With the local shards everything is uploaded again, or what is missing, and nothing computed.
    kept = tmp_path / "kept"
    run(kept, remote=Folder(url), delete_local=False)
    for lost in (url, f"{url}/shard_0002.pkl.gz", f"{url}/shard_0003.json"):
        memory.rm(lost, recursive=True)
        again = run(kept, remote=Folder(url), delete_local=False)
        assert again.complete and again.totals.shards == len(whole) // 2
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
    with pytest.raises(Killed):
        late.finalize()
    assert Folder(url).files()["shard_0001.pkl.gz"]
    assert not Folder(url).read("shard_0001.json")
