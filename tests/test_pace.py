"""--status on the pace of a run, and on whether it is still going on."""

import fcntl
import os
import time

import pytest
from extractions import edit, folder_name, open_part
from test_status import begin, kill, parts_at

from activation_extraction.dataset import folders as folders_module
from activation_extraction.inspect.status import show_status
from activation_extraction.store import local_files
from activation_extraction.store.folder import Folder

NOW = 1_800_000_000.0


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
    parts = parts_at(tmp_path)
    for part in parts.values():
        assert part.state == "running" and part.samples == 12
        assert part.tokens_per_second == pytest.approx(3)
        assert part.expected_end == pytest.approx(NOW - 20 + (103 - 12) / 0.3)
    show_status(Folder(str(tmp_path)), write=False)
    last = capsys.readouterr().out.splitlines()[-1]
    assert [cell.strip() for cell in last.split("  ") if cell][-3:] == [
        *("0 min 20 s ago", "6", "in 4 min 43 s")
    ]
    for storage in running:
        storage.close()
    assert {part.state for part in parts_at(tmp_path).values()} == {"killed"}


@pytest.mark.parametrize("place", ["bucket", "another system"])
def test_a_run_that_has_gone_silent_is_not_called_running(tmp_path, monkeypatch, capsys, place):
    """Where its lock cannot be seen."""
    folder = tmp_path / "bucket" / "machine_000"
    remote = Folder(f"file://{folder}") if place == "bucket" else None
    kill(begin(tmp_path, count=13, max_samples=103, remote=remote))
    if place != "bucket":
        folder = tmp_path
        edit(folder / "metadata.json", lambda content: content.update(system="another"))
    for interval, patience in ((10, 900), (1000, 5000)):
        set_times(folder, NOW, [NOW + interval * n for n in range(1, 5)])
        last = NOW + 4 * interval
        for later, state in ((patience - 1, "running"), (patience + 1, "silent")):
            monkeypatch.setattr(time, "time", lambda now=last + later: now)
            for url in (str(folder), f"file://{folder}"):
                (part,) = parts_at(url).values()
                assert part.state == state
                assert (part.expected_end is None) == (state == "silent")
    capsys.readouterr()
    assert show_status(Folder(str(folder)), write=False) == 1
    assert "silent for 1 h 23 min" in capsys.readouterr().out


def test_a_run_is_running_for_as_long_as_it_has_its_lock(tmp_path, monkeypatch):
    """However long it is silent; killed as soon as it is gone; running again when it goes on."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    for _ in range(2):
        storage = begin(tmp_path, max_samples=100)
        storage._writer.wait()
        monkeypatch.setattr(time, "time", lambda: NOW + 10**6)
        assert parts_at(tmp_path)[""].state == "running"
        storage.close()
        assert parts_at(f"file://{tmp_path}")[""].state == "killed"


def test_a_run_that_ends_while_it_is_looked_at_is_not_called_killed(tmp_path, monkeypatch):
    storage = begin(tmp_path)

    def late(folder):
        storage.finalize()
        return local_files.is_locked(folder)

    monkeypatch.setattr(folders_module, "is_locked", late)
    assert parts_at(tmp_path)[""].state == "complete"


def test_looking_does_not_keep_a_run_from_starting(tmp_path, monkeypatch):
    lock = local_files.lock_folder(tmp_path, fcntl.LOCK_SH)
    monkeypatch.setattr(local_files.time, "sleep", lambda _: os.close(lock))
    open_part(tmp_path).open()
    assert local_files.is_locked(tmp_path)


def test_a_rate_is_of_the_last_shards_and_not_of_the_time_between_two_runs(tmp_path):
    kill(begin(tmp_path, count=92))
    folder = tmp_path
    count = len(list(folder.glob("shard_*.json")))
    assert count == 30
    slow_then_fast = [NOW + 100 * n for n in range(10)]
    slow_then_fast += [slow_then_fast[-1] + n for n in range(1, 21)]
    set_times(folder, NOW - 100, slow_then_fast)
    assert parts_at(folder)[""].tokens_per_second == pytest.approx(30)
    # Stood still for a day, then started again: four shards since, at the same rate.
    times = [NOW - 86400 + 10 * n for n in range(26)] + [NOW + 10 * n for n in range(1, 5)]
    began = [NOW - 86410] * 26 + [NOW] * 4
    for state, started in (("running", NOW), ("interrupted", NOW + 41), ("running", NOW + 10**6)):
        set_times(folder, started, times, began)
        edit(folder / "metadata.json", lambda content, state=state: content.update(status=state))
        assert parts_at(folder)[""].tokens_per_second == pytest.approx(3)
    # One shard in every start; then the clock was set back.
    set_times(folder, NOW, times, [when - 5 for when in times])
    assert parts_at(folder)[""].tokens_per_second == pytest.approx(6)
    set_times(folder, NOW - 10**6, times[::-1], [NOW + 10**6] * 30)
    assert parts_at(folder)[""].tokens_per_second is None
