"""How far an extraction is, over all machines and hosts; reads its JSON files only."""

import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from activation_extraction.cli.errors import InputError, RunError
from activation_extraction.output.commits import (
    AGGREGATE,
    FORMAT_VERSION,
    METADATA,
    Commit,
    Stored,
    local_path,
    number_of,
    own_files,
    part_folder,
    part_folders,
    read_stored,
    seal,
)
from activation_extraction.output.resume import is_locked, running_system
from activation_extraction.output.shards import write_bytes
from activation_extraction.output.statistics import Statistics
from activation_extraction.output.stores import Store, reason_of

SILENCE = 900.0  # seconds without a commit, at least, after which a run is not called running
RECENT = 20  # shards that tell how fast a host is now
FOLDERS = 16  # read at the same time
COLUMNS: tuple[str, ...] = ("machine", "host", "state", "shards", "samples", "tokens", "GB")
COLUMNS += ("last commit", "tokens/s", "of peak", "expected end")


@dataclass(frozen=True)
class Part:
    """One host's part. Times in Unix seconds; None where nothing can be told.

    state: "complete", "running", "killed" (its metadata says running and no process holds its
    folder), "silent" (it says running and nothing has been written for long, where no lock can be
    seen), "interrupted", "failed", "not started" or "damaged" (files are unreadable or missing).
    tokens_per_second: over the last shards, while runs were at work. utilisation: share of the
    devices' peak FLOP/s, from metrics.jsonl. last_sign: when the run last wrote anything.
    """

    name: str
    machine: int
    host: int
    state: str
    shards: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    last_commit: float | None = None
    last_sign: float | None = None
    tokens_per_second: float | None = None
    utilisation: float | None = None
    expected_end: float | None = None


def read_folders(root: Store) -> dict[str, Stored]:
    """Folder name ("" for the output itself) -> what is stored in it.

    Raises InputError when there is no extraction at all.
    """
    names = part_folders(root)
    if _finished_files(root.files()):
        names.insert(0, "")
    with ThreadPoolExecutor(FOLDERS) as pool:
        stored = list(pool.map(lambda name: _read(root.child(name)), names))
    found = {name: s for name, s in zip(names, stored, strict=True) if _finished_files(s.files)}
    if not found:
        raise InputError(f"{root.url}: holds no extraction")
    return found


def _read(store: Store) -> Stored:
    """As read_stored, and whether a process holds the folder.

    Looks again where files are missing or a run seems to be dead: it may have written meanwhile.
    """
    stored = read_stored(store)
    locked = _locked(stored)
    if locked is not False and not any(stored.missing()):
        return replace(stored, locked=locked)
    again = read_stored(store)
    return replace(again, locked=locked if again.metadata == stored.metadata else None)


def _locked(stored: Stored) -> bool | None:
    told = stored.metadata or {}
    if stored.in_bucket or (told.get("status"), told.get("system")) != (
        "running",
        running_system(),
    ):
        return None
    return is_locked(Path(local_path(stored.url)))


def _finished_files(names: Iterable[str]) -> list[str]:
    """Those of an extraction, without the temporary ones of a run that has just begun."""
    return [name for name in own_files(names) if name[0] != "."]


def expected_names(folders: dict[str, Stored]) -> list[str]:
    """The folders that a finished run has, as far as what is there tells.

    Each machine has its own number of hosts.
    """
    known = {name: s.metadata["identity"] for name, s in folders.items() if s.metadata is not None}
    if not known or "" in known:
        return [""] if known else list(folders)
    expected = []
    for machine in range(next(iter(known.values())).get("total_machines", 1)):
        alone = part_folder(machine, 0, 1)
        names = [name for name in folders if name.split("_host_")[0] == alone]
        told = [known[name].get("num_hosts", 1) for name in names if name in known]
        hosts = told[0] if told else _hosts_by_name(names)
        expected += [part_folder(machine, host, hosts) for host in range(hosts)]
    return expected


def _hosts_by_name(names: list[str]) -> int:
    """At least so many hosts a machine has that left these folders; 1 where there are none."""
    numbers = [
        int(found[1]) for found in map(re.compile(r".*_host_(\d+)").fullmatch, names) if found
    ]
    return max(*numbers, 1) + 1 if numbers else 1


def parts_of(folders: dict[str, Stored]) -> list[Part]:
    """Every host's part, those that have not begun included."""
    names = sorted({*expected_names(folders), *folders})
    return [_part(name, folders.get(name, Stored())) for name in names]


def _part(name: str, stored: Stored) -> Part:
    machine, host, *_ = [int(word) for word in name.split("_") if word.isdigit()] + [0, 0]
    commits = stored.in_order
    samples = sum(commit.count for commit in commits)
    pace = end = sign = None
    state = "damaged" if stored.files else "not started"
    if stored.metadata is not None:
        pace = _pace(commits)
        most = stored.metadata["max_samples"]
        times = [commit.committed for commit in commits]
        sign = max([stored.metadata["written"], *times])
        state = _state(stored, stored.metadata, pace, sign)
        if state == "running" and pace is not None and most is not None:
            end = sign + (most - samples) / pace.samples
    return Part(
        name,
        machine,
        host,
        state,
        shards=len(commits),
        samples=samples,
        tokens=sum(commit.tokens for commit in commits),
        bytes=sum(commit.bytes for commit in commits),
        last_commit=commits[-1].committed if commits else None,
        last_sign=sign,
        tokens_per_second=None if pace is None else pace.tokens,
        utilisation=stored.metrics.get("model_flops_utilisation"),
        expected_end=end,
    )


def _state(stored: Stored, metadata: dict[str, Any], pace: "Pace | None", sign: float) -> str:
    if problems_of(stored):
        return "damaged"
    if metadata["status"] != "running":
        return metadata["status"]
    if stored.locked is not None:
        return "running" if stored.locked else "killed"
    patience = max(SILENCE, 5 * pace.seconds_per_shard if pace is not None else 0)
    return "silent" if time.time() - sign > patience else "running"


def problems_of(stored: Stored) -> list[str]:
    """What is damaged or missing in a folder, as far as its JSON files and file names tell."""
    problems = list(stored.damaged.values())
    if stored.metadata is None and METADATA not in stored.damaged:
        problems.append(f"{stored.url}/{METADATA}: is missing")
    without_json, without_file = stored.missing()
    unread = {number_of(name) for name in stored.damaged if name != METADATA}
    if lost := [number for number in without_json if number not in unread]:
        problems.append(f"{stored.url}: shards are missing: {_ranges(lost)}")
    if without_file:
        numbers = _ranges(without_file)
        problems.append(f"{stored.url}: shard files are missing or cut short: {numbers}")
    return problems


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers in short: 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in runs)


class Pace(NamedTuple):
    """Tokens and samples per second, seconds per shard."""

    tokens: float
    samples: float
    seconds_per_shard: float


def _pace(commits: list[Commit]) -> Pace | None:
    """Over the last shards, without the time between one run's last shard and the next's start."""
    seconds = tokens = samples = shards = 0.0
    before: Commit | None = None
    for commit in commits[-RECENT - 1 :]:
        same = before is not None and before.began == commit.began
        since = before.committed if before is not None and same else commit.began
        first = before is None and len(commits) > RECENT
        before = commit
        if first or since is None or commit.committed <= since:
            continue
        seconds += commit.committed - since
        tokens, samples, shards = tokens + commit.tokens, samples + commit.count, shards + 1
    return Pace(tokens / seconds, samples / seconds, seconds / shards) if shards else None


def aggregate(folders: dict[str, Stored], parts: list[Part]) -> dict[str, Any]:
    """All parts together, as aggregated_metadata.json holds it."""
    statistics: dict[str, Statistics] = {}
    heads: dict[str, Any] = {}
    for stored in folders.values():
        for commit in stored.commits.values():
            for hook in commit.hooks:
                before = statistics.get(hook["name"], Statistics())
                statistics[hook["name"]] = before.merge(Statistics.from_json(hook))
                heads[hook["name"]] = {k: hook[k] for k in ("key", "name", "width") if k in hook}
    return {
        "format_version": FORMAT_VERSION,
        "status": "complete" if all(part.state == "complete" for part in parts) else "incomplete",
        **{
            what: sum(getattr(part, what) for part in parts)
            for what in ("shards", "samples", "tokens", "bytes")
        },
        "hooks": [{**heads[name], **statistics[name].to_json()} for name in statistics],
        "parts": [asdict(part) for part in parts],
        "written": round(time.time(), 3),
    }


def show_status(root: Store, write: bool) -> int:
    """Prints the state of every part and the sum, writes it to the output as well if asked.

    Returns the exit status: 1 when anything stored is damaged or missing.
    """
    folders = read_folders(root)
    parts = parts_of(folders)
    total = aggregate(folders, parts)
    rows = [COLUMNS, *(_row(part) for part in parts if part.state != "not started")]
    rows.append(("all", "", *_row(_sum(parts, total))[2:]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    waiting = [part.name for part in parts if part.state == "not started"]
    if waiting:
        print(f"not started: {', '.join(waiting)}")
    problems = [problem for stored in folders.values() for problem in problems_of(stored)]
    for problem in problems:
        print(f"damaged: {problem}")
    if write:
        _write(root, total)
        print(f"written: {root.url}/{AGGREGATE}")
    return 1 if problems else 0


def _sum(parts: list[Part], total: dict[str, Any]) -> Part:
    running = [part for part in parts if part.state == "running"]
    rates = [part.tokens_per_second for part in running if part.tokens_per_second is not None]
    ends = [part.expected_end for part in running if part.expected_end is not None]
    commits = [part.last_commit for part in parts if part.last_commit is not None]
    return Part(
        name="",
        machine=0,
        host=0,
        state=total["status"],
        shards=total["shards"],
        samples=total["samples"],
        tokens=total["tokens"],
        bytes=total["bytes"],
        last_commit=max(commits, default=None),
        tokens_per_second=sum(rates) if rates else None,
        expected_end=max(ends) if ends and len(ends) == len(running) else None,
    )


def _row(part: Part) -> tuple[str, ...]:
    ago = "" if part.last_commit is None else f"{_duration(time.time() - part.last_commit)} ago"
    rate = "" if part.tokens_per_second is None else f"{part.tokens_per_second:,.0f}"
    share = "" if part.utilisation is None else f"{part.utilisation:.0%}"
    state = part.state
    if state == "silent" and part.last_sign is not None:
        state = f"silent for {_duration(time.time() - part.last_sign)}"
    end = "" if part.expected_end is None else f"in {_duration(part.expected_end - time.time())}"
    return (
        *(str(part.machine), str(part.host), state, f"{part.shards:,}"),
        *(f"{part.samples:,}", f"{part.tokens:,}", f"{part.bytes / 1e9:,.3f}"),
        *(ago, rate, share, end),
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _write(root: Store, content: dict[str, Any]) -> None:
    if root.local:
        try:
            write_bytes(root.fetch(AGGREGATE, Path()), seal(content))
        except OSError as error:
            raise RunError(f"{root.url}/{AGGREGATE}: {reason_of(error)[0]}") from error
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / AGGREGATE
        path.write_bytes(seal(content))
        root.put(path)
