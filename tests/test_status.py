"""--status tells how far every machine and host is, from JSON files alone, at any time."""

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
from storages import kill

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import StorageError
from activation_extraction.inspect.status import host_states, shard_seconds
from activation_extraction.store.folder import Folder
from activation_extraction.store.run_folders import AGGREGATE, read_folders

NOW = 1_800_000_000.0


def parts_at(root):
    return {part.name: part for part in host_states(read_folders(Folder(str(root))))}


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
            storage.add_activation(key, np.full((3, HIDDEN), np.nan, np.float32), 0, "")


STATES = {
    "machine_000_host_00": ("complete", 3, 7),
    "machine_000_host_01": ("running", 2, 6),
    "machine_001_host_00": ("interrupted", 3, 7),
    "machine_001_host_01": ("failed", 2, 6),
    "machine_002_host_00": ("not started", 0, 0),
    "machine_002_host_01": ("damaged", 1, 3),
}


def test_every_part_in_its_state(tmp_path, capsys):
    """Three machines with two hosts each, only one of them as it should be. The exit status is 1
    where somebody has to do something, and not for a host that runs, waits or was stopped."""
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
        if part.state not in ("damaged", "not started"):
            stored = [json.loads(p.read_text()) for p in (tmp_path / name).glob("shard_*.json")]
            assert part.bytes == sum(c["files"][c["file"]]["bytes"] for c in stored)
            assert part.last_commit == max(c["committed"] for c in stored)
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
    for name in STATES.keys() - {"machine_002_host_00"}:
        status = main("--status", "--output_dir", tmp_path / name)
        assert status == (STATES[name][0] in ("failed", "damaged"))


def test_metadata_missing_or_damaged_is_told_and_the_rest_counts(tmp_path, capsys):
    for machine in range(2):
        extract(tmp_path, machine, 0, 2, 1)
    path = tmp_path / "machine_000" / "metadata.json"
    for data in (path.read_bytes()[:-9], None):
        path.unlink() if data is None else path.write_bytes(data)
        assert main("--status", "--output_dir", tmp_path) == 1
        *_, total, told = capsys.readouterr().out.splitlines()
        assert total.split()[:5] == ["all", "incomplete", "8", "20", "200"]
        assert told.startswith("damaged: ") and "machine_000/metadata.json: is " in told


LOST = {
    "shard_0002.json shard_0003.json": "shard_0002.json to shard_0003.json: are missing",
    "shard_0003.pkl.gz": "shard_0003.pkl.gz: is missing or cut short",
}


@pytest.mark.parametrize("lost", LOST)
def test_missing_shards_are_named(tmp_path, capsys, lost):
    """They are named in the bucket, which has them: what uploads keeps no shards here."""
    folder = tmp_path / "bucket"
    extract(tmp_path / "here", remote=Folder(f"file://{folder}"))
    assert not list((tmp_path / "here").glob("*.pkl.gz"))
    assert main("--status", "--output_dir", tmp_path / "here") == 0
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


def test_the_share_done_is_that_of_the_nearer_limit(tmp_path, capsys):
    """Over all hosts it is the mean; a host that has not started has done nothing."""
    begin(tmp_path, 0, 0, 2, 1, max_samples=20, max_tokens=10**6).finalize(complete=False)
    assert main("--status", "--output_dir", tmp_path) == 0
    _, machine, whole = capsys.readouterr().out.splitlines()[:3]
    assert "35.0%" in machine and "17.5%" in whole


def test_the_aggregate_adds_up_and_is_left_alone(tmp_path, capsys):
    """The machines have two, one and three hosts."""
    numbers = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    for (machine, host), hosts in zip(numbers, (2, 2, 1, 3, 3, 3), strict=True):
        extract(tmp_path, machine, host, 3, hosts, count=7)
    assert main("--status", "--aggregate", "--output_dir", tmp_path) == 0
    assert capsys.readouterr().out.endswith(f"written: {tmp_path}/{AGGREGATE}\n")
    content = json.loads((tmp_path / AGGREGATE).read_bytes())
    assert content["status"] == "complete"
    assert (content["shards"], content["samples"], content["tokens"]) == (18, 42, 420)
    assert [(part["machine"], part["host"]) for part in content["parts"]] == numbers
    for what in ("shards", "samples", "tokens", "bytes"):
        assert content[what] == sum(part[what] for part in content["parts"])
    assert content["bytes"] == sum(path.stat().st_size for path in tmp_path.rglob("*.pkl.gz"))
    for hook, name in zip(content["hooks"], HOOKS.values(), strict=True):
        values = np.concatenate([sample[name] for sample in ActivationDataset(tmp_path)])
        norms = np.linalg.norm(values.astype(np.float64), axis=1)
        expected = [values.mean(), values.var(), norms.mean(), norms.max()]
        found = [hook[what] for what in ("mean", "variance", "mean_norm", "max_norm")]
        assert hook["name"] == name and found == pytest.approx(expected, rel=1e-5)
    # Nobody takes the file for a part of the extraction.
    assert len(parts_at(tmp_path)) == 6 and main("--verify", "--output_dir", tmp_path) == 0


def test_rows_that_are_left_out_add_up_over_hosts_but_not_over_shards(tmp_path, capsys):
    """The mark of each shard counts the rows of its host from the beginning. Host 1 is not
    complete: of its rows, only those up to its marks are known."""
    of_hosts = [(4, 5), (2, 1)]
    for host, counts in enumerate(of_hosts):
        with open_part(tmp_path, 0, host, 1, 2) as storage:
            for batch in batches(7, 0, host, 1, 2):
                storage.add_batch(batch, activations_of(batch))
            storage.finalize(host == 0, *(counts if host == 0 else ()))
        for path in (tmp_path / f"machine_000_host_{host:02d}").glob("shard_*.json"):
            skipped, empty = (min(int(path.stem[-4:]), count) for count in counts)
            edit(
                path, lambda it, s=skipped, e=empty: it["mark"].update(skipped_rows=s, empty_rows=e)
            )
    assert main("--status", "--aggregate", "--output_dir", tmp_path) == 0
    out = capsys.readouterr().out
    assert "\nskipped: 6 rows that could not be used\n" in out
    assert "\nempty: 6 rows without text, which gave no sample\n" in out
    content = json.loads((tmp_path / AGGREGATE).read_bytes())
    assert (content["skipped_rows"], content["empty_rows"]) == (6, 6)


@pytest.mark.parametrize("flags", [["--status", "--aggregate"], ["--verify"]])
def test_nothing_to_look_at_is_bad_input(flags, tmp_path, capsys):
    (tmp_path / "machine_000").mkdir()
    for place, named in (
        (tmp_path, f"{tmp_path}: holds no run"),
        ("memory://nowhere", "holds no run"),
    ):
        assert main(*flags, "--output_dir", place) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith("error: ") and named in error


# The pace of a run, and whether it is still going on.


def set_times(folder, started, commits, began=None):
    """Commit times of the shards, in order; when the metadata was written, and the run began."""
    edit(folder / "metadata.json", lambda content: content.update(written=started))
    paths = sorted(folder.glob("shard_*.json"))
    for number, (path, when) in enumerate(zip(paths, commits, strict=True)):
        since = started if began is None else began[number]
        edit(path, lambda content, at=(when, since): content.update(committed=at[0], began=at[1]))


def test_rates_and_the_expected_end(tmp_path, monkeypatch, capsys):
    """30 tokens and 3 samples every 10 seconds, on two machines at once; the end is that of the
    limit that comes first."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    both, short = tmp_path / "both", tmp_path / "short"
    for folder, machine, tokens, left in (  # 12 samples are stored
        (both, 0, None, 91 / 0.3),
        (both, 1, 10**6, 91 / 0.3),
        (short, 0, 140, 20 / 3),
    ):
        kill(begin(folder, machine, 0, 2, 1, count=13, max_samples=103, max_tokens=tokens))
        name = folder_name(machine, 0, 2, 1)
        set_times(folder / name, NOW - 60, [NOW - 50, NOW - 40, NOW - 30, NOW - 20])
        part = parts_at(folder)[name]
        assert (part.state, part.samples) == ("running", 12)
        assert part.tokens_per_second == pytest.approx(3)
        assert part.expected_end == pytest.approx(NOW - 20 + left)
    for later, told in ((0, "0 min 20 s ago"), (3600, "1 h 0 min ago"), (90000, "1 d 1 h ago")):
        monkeypatch.setattr(time, "time", lambda later=later: NOW + later)
        main("--status", "--output_dir", both)
        cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].split("  ")]
        shown = [told, "6", "in 4 min 43 s"] if later == 0 else [told]  # it is silent later
        assert [cell for cell in cells if cell][-len(shown) :] == shown


def test_a_run_that_has_gone_silent_is_not_called_running(tmp_path, monkeypatch, capsys):
    kill(begin(tmp_path, count=13, max_samples=103))
    for interval, patience in ((10, 900), (1000, 5000)):
        set_times(tmp_path, NOW, [NOW + interval * n for n in range(1, 5)])
        last = NOW + 4 * interval
        for later, state in ((patience - 1, "running"), (patience + 1, "silent")):
            monkeypatch.setattr(time, "time", lambda now=last + later: now)
            (part,) = parts_at(f"file://{tmp_path}").values()
            assert part.state == state
            assert (part.expected_end is None) == (state == "silent")
    assert main("--status", "--output_dir", tmp_path) == 1
    assert "silent for 1 h 23 min" in capsys.readouterr().out


def test_a_rate_is_of_the_last_shards_and_not_of_the_time_between_two_runs(tmp_path):
    kill(begin(tmp_path, count=92))
    slow_then_fast = [NOW + 100 * n for n in range(10)]
    slow_then_fast += [slow_then_fast[-1] + n for n in range(1, 21)]
    # Stood still for a day, then started again: four shards since, at the same rate.
    times = [NOW - 86400 + 10 * n for n in range(26)] + [NOW + 10 * n for n in range(1, 5)]
    began = [NOW - 86410] * 26 + [NOW] * 4
    for started, commits, since, rate in (
        (NOW - 100, slow_then_fast, None, 30),
        (NOW + 10**6, times, began, 3),
    ):
        set_times(tmp_path, started, commits, since)
        assert parts_at(tmp_path)[""].tokens_per_second == pytest.approx(rate)


def test_a_repaired_shard_changes_the_times_of_no_other(tmp_path):
    """The third shard of an earlier process was committed again a day later."""
    kill(begin(tmp_path, count=18))
    later, began = NOW + 86400, [NOW] * 5
    times = [NOW + 10 * n for n in range(1, 6)]
    times[2], began[2] = later + 20, later
    set_times(tmp_path, NOW, times, began)
    (stored,) = read_folders(Folder(str(tmp_path))).values()
    seconds = {commit.number: took for commit, took in shard_seconds(stored.commits_in_order)}
    assert seconds == {1: 10, 2: 10, 4: 20, 5: 10, 3: 20}
    (part,) = parts_at(tmp_path).values()
    assert part.last_commit == later + 20
    assert part.tokens_per_second == pytest.approx(5 * 30 / 70)
