"""--status tells how far every machine and host is, from JSON files alone, at any time."""

import json
import re
import socket
import threading

import numpy as np
import pytest
from command_line import main
from extractions import (
    HIDDEN,
    HOOKS,
    activations_of,
    batches,
    edit,
    extract,
    folder_name,
    merge_all,
    open_part,
)

from activation_extraction.common.errors import InputError, StorageError
from activation_extraction.dataset.folders import read_folders
from activation_extraction.inspect import look
from activation_extraction.inspect import status as status_module
from activation_extraction.inspect.status import aggregate, host_states, show_status
from activation_extraction.inspect.verify import verify
from activation_extraction.store.commit import unseal
from activation_extraction.store.folder import Folder
from activation_extraction.store.metadata import AGGREGATE
from activation_extraction.store.statistics import Statistics


def parts_at(root):
    return {part.name: part for part in host_states(read_folders(Folder(str(root))))}


def kill(storage):
    """What SIGKILL leaves: what is committed, and the status that it had."""
    storage._writer.wait()
    storage.close()


def begin(root, *part, count=7, **options):
    """A part that goes on, or was killed: two of its shards are committed."""
    storage = open_part(root, *part, **options)
    storage.open()
    for batch in batches(count, *part):
        storage.add_batch(batch, activations_of(batch))
    return storage


def in_every_state(root):
    """Three machines with two hosts each, only one of them as it should be."""
    extract(root, 0, 0, 3, 2, count=7)
    kill(begin(root, 0, 1, 3, 2, max_samples=100))
    with pytest.raises(KeyboardInterrupt):
        with begin(root, 1, 0, 3, 2):
            raise KeyboardInterrupt
    with pytest.raises(StorageError):
        with begin(root, 1, 1, 3, 2) as storage:
            for key in HOOKS:
                values = np.full((3, HIDDEN), np.nan, np.float32)
                storage.add_activation(key, values, 99, "")
    extract(root, 2, 1, 3, 2, count=4)
    path = root / folder_name(2, 1, 3, 2) / "shard_0002.json"
    path.write_bytes(path.read_bytes().replace(b"tokens", b"Tokens"))
    return root


STATES = {
    "machine_000_host_00": ("complete", 3, 7),
    "machine_000_host_01": ("killed", 2, 6),
    "machine_001_host_00": ("interrupted", 3, 7),
    "machine_001_host_01": ("failed", 2, 6),
    "machine_002_host_00": ("not started", 0, 0),
    "machine_002_host_01": ("damaged", 1, 3),
}


def test_every_part_in_its_state(tmp_path):
    parts = parts_at(in_every_state(tmp_path))
    found = {name: (part.state, part.shards, part.samples) for name, part in parts.items()}
    assert found == STATES
    for name, part in parts.items():
        assert name == folder_name(part.machine, part.host, 3, 2)
        assert part.tokens == 10 * part.samples
        commits = sorted((tmp_path / name).glob("shard_*.json"))
        if part.state != "damaged":
            stored = [json.loads(path.read_text()) for path in commits]
            assert part.bytes == sum(c["files"][c["file"]]["bytes"] for c in stored)
            assert part.last_commit == max((c["committed"] for c in stored), default=None)


def test_the_table_and_its_sum(tmp_path, capsys):
    assert show_status(Folder(str(in_every_state(tmp_path))), write=False) == 1
    lines = capsys.readouterr().out.splitlines()
    cells = [line.split() for line in lines]
    assert cells[0][:6] == ["machine", "host", "state", "shards", "samples", "tokens"]
    assert [row[2] for row in cells[1:6]] == [
        *("complete", "killed", "interrupted", "failed", "damaged")
    ]
    assert cells[6][:5] == ["all", "incomplete", "11", "29", "290"]
    assert lines[7] == "not started: machine_002_host_00"
    assert lines[8].startswith("damaged: ") and "shard_0002.json: is damaged" in lines[8]
    assert len(lines) == 9
    assert not (tmp_path / AGGREGATE).exists()


def test_metadata_missing_or_damaged_is_told_and_the_rest_counts(tmp_path, capsys):
    for machine in range(2):
        extract(tmp_path, machine, 0, 2, 1)
    path = tmp_path / "machine_000" / "metadata.json"
    for data in (None, b"{", b"[]", path.read_bytes()[:-9]):
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        assert show_status(Folder(str(tmp_path)), write=False) == 1
        *_, total, told = capsys.readouterr().out.splitlines()
        assert total.split()[:5] == ["all", "incomplete", "8", "20", "200"]
        assert told.startswith("damaged: ") and "machine_000/metadata.json: is " in told
        folders = read_folders(Folder(str(tmp_path)))
        whole = aggregate(folders, host_states(folders))
        assert [hook["tokens"] for hook in whole["hooks"]] == [whole["tokens"]] * 2


CUT_SHORT = "is missing or cut short"


@pytest.mark.parametrize("place", ["local", "bucket"])
@pytest.mark.parametrize(
    "lost,told",
    [
        (["shard_0004.json", "shard_0004.pkl.gz"], "shard_0004.json: is missing"),
        (["shard_0002.json", "shard_0003.json"], "shard_0002.json to shard_0003.json: are missing"),
        (["shard_0003.pkl.gz"], f"shard_0003.pkl.gz: {CUT_SHORT}"),
        (
            ["shard_0001.npz", "shard_0002.npz"],
            f"shard_0001.pkl.gz: {CUT_SHORT}, and so are files of 1 other shard",
        ),
        (["shard_0003.samples.parquet"], f"shard_0003.pkl.gz: {CUT_SHORT}"),
    ],
)
def test_missing_shards_are_named(tmp_path, capsys, place, lost, told):
    folder = tmp_path / "bucket" / "machine_000"
    extract(tmp_path, remote=Folder(f"file://{folder}") if place == "bucket" else None)
    folder = folder if place == "bucket" else tmp_path
    for name in lost:
        (folder / name).unlink()
    assert main("--status", "--output_dir", folder) == 1
    *_, total, line = capsys.readouterr().out.splitlines()
    assert line == f"damaged: {folder}/{told}" and total.split()[1] == "incomplete"
    assert parts_at(folder)[""].state == "damaged"


def test_a_folder_that_uploads_keeps_no_shards(tmp_path, capsys):
    extract(tmp_path, remote=Folder(f"file://{tmp_path}/bucket/machine_000"))
    assert not list(tmp_path.glob("*.pkl.gz"))
    assert main("--status", "--output_dir", tmp_path) == 0


def test_a_run_that_has_stored_nothing_yet(tmp_path, capsys):
    storage = open_part(tmp_path, max_samples=10)
    storage.open()
    kill(storage)
    (part,) = parts_at(tmp_path).values()
    assert (part.state, part.shards, part.last_commit) == ("killed", 0, None)
    assert part.tokens_per_second is part.expected_end is None
    assert show_status(Folder(str(tmp_path)), write=True) == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_status_says_whether_somebody_has_to_do_something(as_json, tmp_path, monkeypatch):
    """A host that was killed, failed or fell silent; not one that runs, waits or was stopped."""

    def status(name):
        return show_status(Folder(str(tmp_path / name)), write=False, as_json=as_json)

    extract(tmp_path / "complete")
    extract(tmp_path / "not started", 0, 0, 2, 1)
    begin(tmp_path / "interrupted").finalize(complete=False)
    running = begin(tmp_path / "running")
    names = "complete", "not started", "interrupted", "running"
    assert [status(name) for name in names] == [0] * 4
    running._writer.wait()  # so that it writes no more
    edit(tmp_path / "running/metadata.json", lambda content: content.update(system="another"))
    assert status("running") == 0  # what another system does cannot be seen
    now = status_module.time.time
    with monkeypatch.context() as patch:
        patch.setattr(status_module.time, "time", lambda: now() + 10 * status_module.SILENCE)
        assert status("running") == 1
    running.close()
    kill(begin(tmp_path / "killed"))
    with pytest.raises(StorageError), begin(tmp_path / "failed") as storage:
        for key in HOOKS:
            storage.add_activation(key, np.full((3, HIDDEN), np.nan, np.float32), 99, "")
    extract(tmp_path / "damaged")
    (tmp_path / "damaged/shard_0001.pkl.gz").unlink()
    assert [status(name) for name in ("killed", "failed", "damaged")] == [1] * 3


def test_the_share_done_is_that_of_the_nearer_limit(tmp_path, capsys):
    """Over all hosts it is the mean; a host that has not started has done nothing."""
    begin(tmp_path, 0, 0, 2, 1, max_samples=20, max_tokens=10**6).finalize(complete=False)
    part = parts_at(tmp_path)["machine_000"]
    assert (part.samples, part.share) == (7, 7 / 20)
    assert show_status(Folder(str(tmp_path)), write=False) == 0
    _, machine, whole = capsys.readouterr().out.splitlines()[:3]
    assert "35.0%" in machine and "17.5%" in whole


def test_the_status_as_json(tmp_path, capsys):
    extract(tmp_path)
    (tmp_path / "shard_0002.npz").unlink()
    assert main("--status", "--json", "--aggregate", "--output_dir", tmp_path) == 1
    found = json.loads(capsys.readouterr().out)
    (problem,) = found.pop("problems")
    assert problem.endswith(f"shard_0002.pkl.gz: {CUT_SHORT}")
    written = json.loads((tmp_path / "aggregated_metadata.json").read_text())
    assert found == {name: written[name] for name in found} and found["samples"] == 10
    assert [part["state"] for part in found["parts"]] == ["damaged"]


def test_the_aggregate_adds_up_and_is_left_alone(tmp_path, capsys):
    for machine in range(3):
        for host in range(2):
            extract(tmp_path, machine, host, 3, 2, count=7)
    root = Folder(str(tmp_path))
    assert main("--status", "--aggregate", "--output_dir", tmp_path) == 0
    assert capsys.readouterr().out.endswith(f"written: {tmp_path}/{AGGREGATE}\n")
    content = unseal((tmp_path / AGGREGATE).read_bytes(), AGGREGATE)
    assert content["status"] == "complete"
    assert (content["shards"], content["samples"], content["tokens"]) == (18, 42, 420)
    for what in ("shards", "samples", "tokens", "bytes"):
        assert content[what] == sum(part[what] for part in content["parts"])
    files = [path for path in tmp_path.rglob("*.pkl.gz")]
    assert content["bytes"] == sum(path.stat().st_size for path in files)
    metadata = [json.loads(path.read_text()) for path in tmp_path.glob("machine_*/metadata.json")]
    for number, hook in enumerate(content["hooks"]):
        whole = merge_all(Statistics.from_json(one["hooks"][number]) for one in metadata)
        assert hook["name"] == list(HOOKS.values())[number]
        for what, value in whole.to_json().items():
            assert hook[what] == pytest.approx(value, rel=1e-9), what
    # Nobody takes it for a part of the extraction.
    before = parts_at(tmp_path)
    assert len(before) == 6 and not (tmp_path / f".{AGGREGATE}.tmp").exists()
    assert verify(root, None, 0) == 0
    assert open_part(tmp_path, 0, 1, 3, 2, max_samples=None).complete
    assert show_status(root, write=True) == 0
    assert parts_at(tmp_path) == before


def test_an_aggregate_that_cannot_be_written_is_told_in_one_line(tmp_path, capsys):
    extract(tmp_path)
    (tmp_path / AGGREGATE).mkdir()
    assert main("--status", "--aggregate", "--output_dir", tmp_path) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and AGGREGATE in error


def test_a_bucket(bucket, tmp_path, capsys):
    url = "gs://bucket/run"
    for machine in range(2):
        extract(tmp_path, machine, 0, 2, 1, remote=Folder(f"{url}/machine_{machine:03d}"))
    assert main("--status", "--aggregate", "--output_dir", url) == 0
    out = capsys.readouterr().out
    assert "all" in out and f"written: {url}/{AGGREGATE}" in out
    content = unseal(bucket.objects()[f"run/{AGGREGATE}"], "")
    assert (content["status"], content["samples"]) == ("complete", 20)
    assert [part["state"] for part in content["parts"]] == ["complete"] * 2
    assert main("--verify", "--output_dir", url) == 0
    bucket.delete("run/machine_001/shard_0002.pkl.gz")
    capsys.readouterr()
    assert main("--verify", "--output_dir", url) == 1
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "machine_001/shard_0002.pkl.gz: is missing"


@pytest.mark.long
@pytest.mark.parametrize(
    "own,told", [(0.3, ": no answer"), (20, r" \(--upload_timeout\): no answer")]
)
def test_a_bucket_that_is_silent_is_told_with_the_flag_only_if_that_decided(
    bucket, monkeypatch, capsys, own, told
):
    monkeypatch.setattr(look, "STATUS_PATIENCE", own)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{silent.getsockname()[1]}")
        flags = ("--output_dir", "gs://bucket/run", "--upload_timeout", 1)
        assert main("--status", *flags) == 1
    assert re.search(rf"kept failing for \d+ s{told}", capsys.readouterr().err)


def test_while_a_run_writes(tmp_path):
    """Nothing is ever damaged, nothing counts down, and the sum is right at every moment."""
    done = threading.Event()

    def write():
        extract(tmp_path, 1, 0, 2, 1, count=300)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = []
    try:
        while not done.is_set():
            try:
                folders = read_folders(Folder(str(tmp_path)))
            except InputError:  # not begun
                continue
            parts = host_states(folders)
            assert [part.state for part in parts] in (
                ["not started", "running"],
                ["not started", "complete"],
            )
            total = aggregate(folders, parts)
            assert total["tokens"] == 10 * total["samples"]
            assert all(hook["tokens"] == total["tokens"] for hook in total["hooks"])
            seen.append(total["samples"])
    finally:
        thread.join()
    assert seen == sorted(seen) and len(set(seen)) > 1
    assert parts_at(tmp_path)["machine_001"].samples == 300


def test_shards_are_not_opened(tmp_path):
    extract(tmp_path)
    for path in tmp_path.glob("*.pkl.gz"):
        path.write_bytes(bytes(path.stat().st_size))
    assert parts_at(tmp_path)[""].samples == 10
    assert parts_at(tmp_path)[""].state == "complete"


@pytest.mark.parametrize(
    "place,named",
    [
        ("{}", "{}: holds no extraction"),
        ("{}/nowhere", "nowhere: holds no extraction"),
        ("{}/notes/notes.txt", "holds no extraction"),
        ("nope://x", "nope://x: Protocol not known: nope"),
        ("memory://nowhere", "holds no extraction"),
    ],
)
@pytest.mark.parametrize("flags", [["--status"], ["--status", "--aggregate"], ["--verify"]])
def test_nothing_to_look_at_is_bad_input(place, named, flags, tmp_path, capsys):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").touch()
    (tmp_path / "machine_000").mkdir()
    assert main(*flags, "--output_dir", place.format(tmp_path)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert named.format(tmp_path) in err


def test_durations():
    for seconds, told in (
        (-5, "0 min 0 s"),
        (61, "1 min 1 s"),
        (3660, "1 h 1 min"),
        (90000, "1 d 1 h"),
    ):
        assert status_module._duration(seconds) == told


@pytest.mark.parametrize("line", ['{"time": "x"}', '{"time": 1, "tokens": "y"}', "[" * 10**5])
def test_metrics_that_are_no_numbers_are_left_out(line, tmp_path, capsys):
    extract(tmp_path)
    more = '{"time": 1, "model_flops_utilisation": "evil", "steps": [1]}'
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n{more}\n")
    assert main("--status", "--output_dir", tmp_path) == 0
    assert "evil" not in capsys.readouterr().out
