"""--status tells how far every machine and host is, from JSON files alone, at any time; and which
folders there are of machines with other numbers of hosts."""

import json
import time

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
    open_part,
)

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import StorageError
from activation_extraction.inspect.status import host_states
from activation_extraction.store.folder import Folder
from activation_extraction.store.host_folders import (
    expected_names,
    host_folders,
    host_name,
    read_folders,
)
from activation_extraction.store.metadata import AGGREGATE

NOW = 1_800_000_000.0


def parts_at(root):
    return {part.name: part for part in host_states(read_folders(Folder(str(root))))}


def kill(storage):
    """What SIGKILL leaves: what is committed, and the status that it had."""
    storage._writer.wait()
    storage.close()


def begin(root, *part, count=7, **options):
    """A part that goes on: two of its shards are committed."""
    storage = open_part(root, *part, **options)
    storage.open()
    for batch in batches(count, *part):
        storage.add_batch(batch, activations_of(batch))
    return storage


def fail(root, *part):
    with pytest.raises(StorageError), begin(root, *part) as storage:
        for key in HOOKS:
            storage.add_activation(key, np.full((3, HIDDEN), np.nan, np.float32), 99, "")


STATES = {
    "machine_000_host_00": ("complete", 3, 7),
    "machine_000_host_01": ("running", 2, 6),
    "machine_001_host_00": ("interrupted", 3, 7),
    "machine_001_host_01": ("failed", 2, 6),
    "machine_002_host_00": ("not started", 0, 0),
    "machine_002_host_01": ("damaged", 1, 3),
}


def test_every_part_in_its_state(tmp_path, capsys):
    """Three machines with two hosts each, only one of them as it should be."""
    extract(tmp_path, 0, 0, 3, 2, count=7)
    kill(begin(tmp_path, 0, 1, 3, 2, max_samples=100))
    begin(tmp_path, 1, 0, 3, 2).finalize(complete=False)
    fail(tmp_path, 1, 1, 3, 2)
    extract(tmp_path, 2, 1, 3, 2, count=4)
    path = tmp_path / folder_name(2, 1, 3, 2) / "shard_0002.json"
    path.write_bytes(path.read_bytes().replace(b"tokens", b"Tokens"))
    parts = parts_at(tmp_path)
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
    assert main("--status", "--output_dir", tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    cells = [line.split() for line in lines]
    assert cells[0][:6] == ["machine", "host", "state", "shards", "samples", "tokens"]
    states = [state for state, *_ in STATES.values() if state != "not started"]
    assert [row[2] for row in cells[1:6]] == states
    assert cells[6][:5] == ["all", "incomplete", "11", "29", "290"]
    assert lines[7] == "not started: machine_002_host_00"
    assert lines[8].startswith("damaged: ") and "shard_0002.json: is damaged" in lines[8]
    assert len(lines) == 9 and not (tmp_path / AGGREGATE).exists()


def test_metadata_missing_or_damaged_is_told_and_the_rest_counts(tmp_path, capsys):
    for machine in range(2):
        extract(tmp_path, machine, 0, 2, 1)
    path = tmp_path / "machine_000" / "metadata.json"
    for data in (None, b"[]", path.read_bytes()[:-9]):
        path.unlink() if data is None else path.write_bytes(data)
        assert main("--status", "--output_dir", tmp_path) == 1
        *_, total, told = capsys.readouterr().out.splitlines()
        assert total.split()[:5] == ["all", "incomplete", "8", "20", "200"]
        assert told.startswith("damaged: ") and "machine_000/metadata.json: is " in told
    assert main("--status", "--json", "--output_dir", tmp_path) == 1
    assert [h["tokens"] for h in json.loads(capsys.readouterr().out)["hooks"]] == [200, 200]


CUT_SHORT = "is missing or cut short"
LOST = {
    "shard_0004.json shard_0004.pkl.gz": "shard_0004.json: is missing",
    "shard_0002.json shard_0003.json": "shard_0002.json to shard_0003.json: are missing",
    "shard_0003.pkl.gz": f"shard_0003.pkl.gz: {CUT_SHORT}",
    "shard_0003.samples.parquet": f"shard_0003.samples.parquet: {CUT_SHORT}",
}


@pytest.mark.parametrize("place", ["local", "bucket"])
@pytest.mark.parametrize("lost", LOST)
def test_missing_shards_are_named(tmp_path, capsys, place, lost):
    folder = tmp_path / "bucket" / "machine_000"
    extract(tmp_path, remote=Folder(f"file://{folder}") if place == "bucket" else None)
    if place == "bucket":  # what uploads keeps no shards here
        assert not list(tmp_path.glob("*.pkl.gz"))
        assert main("--status", "--output_dir", tmp_path) == 0
    folder = folder if place == "bucket" else tmp_path
    for name in lost.split():
        (folder / name).unlink()
    capsys.readouterr()
    assert main("--status", "--output_dir", folder) == 1
    *_, total, line = capsys.readouterr().out.splitlines()
    assert line == f"damaged: {folder}/{LOST[lost]}" and total.split()[1] == "incomplete"
    assert main("--status", "--json", "--output_dir", folder) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == [f"{folder}/{LOST[lost]}"]
    assert [part["state"] for part in found["parts"]] == ["damaged"]


def test_the_exit_status_says_whether_somebody_has_to_do_something(tmp_path):
    """A host that failed or is damaged; not one that runs, waits or was stopped."""
    extract(tmp_path / "complete")
    extract(tmp_path / "not started", 0, 0, 2, 1)
    begin(tmp_path / "interrupted").finalize(complete=False)
    running = begin(tmp_path / "running")
    fail(tmp_path / "failed")
    extract(tmp_path / "damaged")
    (tmp_path / "damaged/shard_0001.pkl.gz").unlink()
    for flags in (["--status"], ["--status", "--json"]):
        found = {path.name: main(*flags, "--output_dir", path) for path in tmp_path.iterdir()}
        assert {name for name, status in found.items() if status} == {"failed", "damaged"}
        assert len(found) == 6
    running.close()


def test_the_share_done_is_that_of_the_nearer_limit(tmp_path, capsys):
    """Over all hosts it is the mean; a host that has not started has done nothing."""
    begin(tmp_path, 0, 0, 2, 1, max_samples=20, max_tokens=10**6).finalize(complete=False)
    assert main("--status", "--output_dir", tmp_path) == 0
    _, machine, whole = capsys.readouterr().out.splitlines()[:3]
    assert "35.0%" in machine and "17.5%" in whole


def test_the_aggregate_adds_up_and_is_left_alone(tmp_path, capsys):
    for machine in range(3):
        for host in range(2):
            extract(tmp_path, machine, host, 3, 2, count=7)
    assert main("--status", "--aggregate", "--output_dir", tmp_path) == 0
    assert capsys.readouterr().out.endswith(f"written: {tmp_path}/{AGGREGATE}\n")
    content = json.loads((tmp_path / AGGREGATE).read_bytes())
    assert content["status"] == "complete"
    assert (content["shards"], content["samples"], content["tokens"]) == (18, 42, 420)
    for what in ("shards", "samples", "tokens", "bytes"):
        assert content[what] == sum(part[what] for part in content["parts"])
    assert content["bytes"] == sum(path.stat().st_size for path in tmp_path.rglob("*.pkl.gz"))
    for hook, name in zip(content["hooks"], HOOKS.values(), strict=True):
        values = np.concatenate([sample[name] for sample in ActivationDataset(tmp_path)])
        norms = np.linalg.norm(values.astype(np.float64), axis=1)
        expected = [values.mean(), values.var(), norms.mean(), norms.max()]
        found = [hook[what] for what in ("mean", "variance", "mean_norm", "max_norm")]
        assert hook["name"] == name and found == pytest.approx(expected, rel=1e-5)
    before = parts_at(tmp_path)  # nobody takes it for a part of the extraction
    assert len(before) == 6 and main("--verify", "--output_dir", tmp_path) == 0
    assert open_part(tmp_path, 0, 1, 3, 2, max_samples=None).complete
    (tmp_path / AGGREGATE).unlink()
    (tmp_path / AGGREGATE).mkdir()
    assert main("--status", "--aggregate", "--output_dir", tmp_path) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and AGGREGATE in error


def test_nothing_to_look_at_is_bad_input(tmp_path, capsys):
    (tmp_path / "machine_000").mkdir()
    (tmp_path / "notes.txt").touch()
    for flags in (["--status", "--aggregate"], ["--verify"]):
        for place, named in (
            (tmp_path, f"{tmp_path}: holds no extraction"),
            (tmp_path / "notes.txt", "holds no extraction"),
            ("nope://x", "nope://x: Protocol not known: nope"),
            ("memory://nowhere", "holds no extraction"),
        ):
            assert main(*flags, "--output_dir", place) == 2
            (error,) = capsys.readouterr().err.splitlines()
            assert error.startswith("error: ") and named in error


def test_shards_are_not_opened_and_metrics_that_are_no_numbers_are_left_out(tmp_path, capsys):
    extract(tmp_path)
    for path in tmp_path.glob("*.pkl.gz"):
        path.write_bytes(bytes(path.stat().st_size))
    more = '{"model_flops_utilisation": "evil", "steps": [1], "waited_write_seconds": 70}'
    (tmp_path / "metrics.jsonl").write_text(f"{'[' * 10**5}\n{more}\n")
    assert main("--status", "--output_dir", tmp_path) == 0
    out = capsys.readouterr().out
    assert "evil" not in out and "1 min 10 s (write)" in out


# The pace of a run, and whether it is still going on.


def set_times(folder, started, commits, began=None):
    """Commit times of the shards, in order; when the metadata was written, and the run began."""
    edit(folder / "metadata.json", lambda content: content.update(written=started))
    paths = sorted(folder.glob("shard_*.json"))
    for number, (path, when) in enumerate(zip(paths, commits, strict=True)):
        since = started if began is None else began[number]
        edit(path, lambda content, at=(when, since): content.update(committed=at[0], began=at[1]))


def test_rates_and_the_expected_end(tmp_path, monkeypatch, capsys):
    """30 tokens and 3 samples every 10 seconds, on two machines at once."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    running = []  # for as long as nobody closes them
    for machine in range(2):
        running.append(begin(tmp_path, machine, 0, 2, 1, count=13, max_samples=103))
        running[-1]._writer.wait()
        folder = tmp_path / folder_name(machine, 0, 2, 1)
        set_times(folder, NOW - 60, [NOW - 50, NOW - 40, NOW - 30, NOW - 20])
    for part in parts_at(tmp_path).values():
        assert part.state == "running" and part.samples == 12
        assert part.tokens_per_second == pytest.approx(3)
        assert part.expected_end == pytest.approx(NOW - 20 + (103 - 12) / 0.3)
    for later, told in ((0, "0 min 20 s ago"), (3600, "1 h 0 min ago"), (90000, "1 d 1 h ago")):
        monkeypatch.setattr(time, "time", lambda later=later: NOW + later)
        main("--status", "--output_dir", tmp_path)
        cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].split("  ")]
        shown = [told, "6", "in 4 min 43 s"] if later == 0 else [told]  # it is silent later
        assert [cell for cell in cells if cell][-len(shown) :] == shown
    for storage in running:
        storage.close()


@pytest.mark.parametrize("tokens,left", [(140, 20 / 3), (10**6, (103 - 12) / 0.3)])
def test_a_run_ends_at_the_limit_that_comes_first(tokens, left, tmp_path):
    """At 3 tokens and 0.3 samples a second."""
    storage = begin(tmp_path, count=13, max_samples=103, max_tokens=tokens)
    storage._writer.wait()
    set_times(tmp_path, NOW - 40, [NOW - 30, NOW - 20, NOW - 10, NOW])
    (part,) = parts_at(tmp_path).values()
    assert part.state == "running" and part.expected_end == pytest.approx(NOW + left, abs=1e-3)
    storage.close()


def test_a_run_that_has_gone_silent_is_not_called_running(tmp_path, monkeypatch, capsys):
    kill(begin(tmp_path, count=13, max_samples=103))
    folder = tmp_path
    for interval, patience in ((10, 900), (1000, 5000)):
        set_times(folder, NOW, [NOW + interval * n for n in range(1, 5)])
        last = NOW + 4 * interval
        for later, state in ((patience - 1, "running"), (patience + 1, "silent")):
            monkeypatch.setattr(time, "time", lambda now=last + later: now)
            (part,) = parts_at(f"file://{folder}").values()
            assert part.state == state
            assert (part.expected_end is None) == (state == "silent")
    assert main("--status", "--output_dir", folder) == 1
    assert "silent for 1 h 23 min" in capsys.readouterr().out


def test_a_rate_is_of_the_last_shards_and_not_of_the_time_between_two_runs(tmp_path):
    kill(begin(tmp_path, count=92))
    slow_then_fast = [NOW + 100 * n for n in range(10)]
    slow_then_fast += [slow_then_fast[-1] + n for n in range(1, 21)]
    # Stood still for a day, then started again: four shards since, at the same rate.
    times = [NOW - 86400 + 10 * n for n in range(26)] + [NOW + 10 * n for n in range(1, 5)]
    began, set_back = [NOW - 86410] * 26 + [NOW] * 4, [NOW + 10**6] * 30
    for started, commits, since, rate in (
        (NOW - 100, slow_then_fast, None, pytest.approx(30)),
        (NOW + 10**6, times, began, pytest.approx(3)),
        (NOW, times, [when - 5 for when in times], pytest.approx(6)),  # one shard in every start
        (NOW - 10**6, times[::-1], set_back, None),  # so was the clock
    ):
        set_times(tmp_path, started, commits, since)
        assert parts_at(tmp_path)[""].tokens_per_second == rate


# Machines with other numbers of hosts.


@pytest.fixture
def mixture(tmp_path):
    """Machines of two, one and three hosts."""
    for machine, hosts in enumerate((2, 1, 3)):
        for host in range(hosts):
            extract(tmp_path, machine, host, 3, hosts, count=5 + host)
    return tmp_path


NAMES = {  # (machine, host, hosts)
    "machine_000": (0, 0, 1),
    "machine_003_host_01": (3, 1, 2),
    "machine_1234_host_100": (1234, 100, 128),
}
OTHERS = (
    "|machine|machine_|machine_x|machine_000_host|machine_000 |xmachine_000|machine_0001"
    "|machine_٠٠١|machine_000_host_001"
)


def test_names_of_folders_are_read_back_and_others_are_none():
    for name, numbers in NAMES.items():
        assert host_name(*numbers) == name
        assert host_folders([name])[name].machine == numbers[0]
        assert (host_folders([name])[name].host or 0) == numbers[1]
    assert not host_folders(OTHERS.split("|"))


def test_each_machine_is_read_with_its_own_number_of_hosts(mixture, check):
    assert check(mixture) == []
    hosts = [(each.machine, each.host, each.state) for each in parts_at(mixture).values()]
    numbers = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert hosts == [(*each, "complete") for each in numbers]


def test_hosts_of_one_machine_agree_on_their_number(tmp_path, check):
    for host, hosts in enumerate((3, 2, 3)):
        extract(tmp_path, 0, host, 1, hosts, count=5)
    assert check(tmp_path) == [
        "machine_000_host_01: belongs to another run: its num_hosts differs",
        "3 sample numbers stored more than once, such as 3",
    ]


def test_folders_without_metadata_tell_how_many_hosts_there_are(mixture):
    for path in mixture.glob("machine_002_*/metadata.json"):
        path.unlink()
    for name in ("machine_001", "machine_002_host_01"):
        (mixture / name).rename(mixture / f"{name} (copy)")
    expected = expected_names(read_folders(Folder(str(mixture))))
    hosts = [f"machine_002_host_{host:02d}" for host in range(3)]
    assert expected[2:] == ["machine_001", *hosts]
