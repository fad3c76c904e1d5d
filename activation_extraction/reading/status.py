"""How far an extraction is, over all machines and hosts; reads its JSON files only."""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
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
    own_files,
    part_folder,
    part_folders,
    read_stored,
    seal,
)
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

    state: "complete", "running", "silent" (its metadata says running and nothing has been committed
    for long: killed?), "interrupted", "failed", "not started" or "damaged". tokens_per_second: over
    the last shards. utilisation: share of the devices' peak FLOP/s, from metrics.jsonl.
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
        stored = list(pool.map(lambda name: read_stored(root.child(name)), names))
    found = {name: s for name, s in zip(names, stored, strict=True) if _finished_files(s.files)}
    if not found:
        raise InputError(f"{root.url}: holds no extraction")
    return found


def _finished_files(names: Iterable[str]) -> list[str]:
    """Those of an extraction, without the temporary ones of a run that has just begun."""
    return [name for name in own_files(names) if name[0] != "."]


def expected_names(folders: dict[str, Stored]) -> list[str]:
    """The folders that a finished run has, as far as what is there tells."""
    for name, stored in folders.items():
        if stored.metadata is not None:
            identity = stored.metadata["identity"]
            machines, hosts = identity.get("total_machines", 1), identity.get("num_hosts", 1)
            return [
                "" if name == "" else part_folder(machine, host, hosts)
                for machine in range(machines)
                for host in range(hosts)
            ]
    return list(folders)


def parts_of(folders: dict[str, Stored]) -> list[Part]:
    """Every host's part, those that have not begun included."""
    names = sorted({*expected_names(folders), *folders})
    return [_part(name, folders.get(name, Stored())) for name in names]


def _part(name: str, stored: Stored) -> Part:
    machine, host, *_ = [int(word) for word in name.split("_") if word.isdigit()] + [0, 0]
    commits = stored.in_order
    samples = sum(commit.count for commit in commits)
    pace = end = None
    if stored.metadata is None:
        state = "damaged" if stored.files else "not started"
    else:
        pace = _pace(stored.metadata, commits)
        most = stored.metadata["max_samples"]
        state = "damaged" if stored.damaged else stored.metadata["status"]
        if state == "running" and pace is not None and most is not None:
            end = commits[-1].committed + (most - samples) / pace.samples
        patience = max(SILENCE, 5 * pace.seconds_per_shard if pace is not None else 0)
        moved = max([stored.metadata["written"], *(commit.committed for commit in commits)])
        if state == "running" and time.time() - moved > patience:
            state, end = "silent", None
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
        tokens_per_second=None if pace is None else pace.tokens,
        utilisation=stored.metrics.get("model_flops_utilisation"),
        expected_end=end,
    )


class Pace(NamedTuple):
    """Tokens and samples per second, seconds per shard."""

    tokens: float
    samples: float
    seconds_per_shard: float


def _pace(metadata: dict[str, Any], commits: list[Commit]) -> Pace | None:
    """Over the last shards; of a run that goes on, since its start at the most: it may have stood
    still before."""
    running = metadata["status"] == "running"
    began = metadata["written"] if running else 0.0
    recent = [commit for commit in commits[-RECENT:] if commit.committed > began]
    if recent and (not running or len(recent) == RECENT):
        began = recent.pop(0).committed
    seconds = recent[-1].committed - began if recent else 0.0
    if seconds <= 0:
        return None
    tokens, samples = (sum(getattr(c, what) for c in recent) for what in ("tokens", "count"))
    return Pace(tokens / seconds, samples / seconds, seconds / len(recent))


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
    """Prints the state of every part and the sum, writes it to the output as well if asked."""
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
    for name, stored in folders.items():
        for why in stored.damaged.values():
            print(f"damaged: {why}")
        if stored.metadata is None and METADATA not in stored.damaged:
            print(f"damaged: {root.child(name).url}/{METADATA}: is missing")
    if write:
        _write(root, total)
        print(f"written: {root.url}/{AGGREGATE}")
    return 0


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
    end = "" if part.expected_end is None else f"in {_duration(part.expected_end - time.time())}"
    return (
        *(str(part.machine), str(part.host), part.state, f"{part.shards:,}"),
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
