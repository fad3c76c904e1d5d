"""--status: prints the state of every host and the totals, and writes the totals to the output."""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from activation_extraction.common.errors import RunError
from activation_extraction.common.visible import say
from activation_extraction.dataset.folders import read_folders
from activation_extraction.inspect.status import HostState, host_states, problems_of
from activation_extraction.store.commit import FORMAT_VERSION
from activation_extraction.store.folder import Folder
from activation_extraction.store.local_files import write_bytes
from activation_extraction.store.metadata import AGGREGATE, Stored
from activation_extraction.store.patience import reason_of
from activation_extraction.store.sealed_json import seal
from activation_extraction.store.statistics import Statistics

COLUMNS = (
    "machine",
    "host",
    "state",
    "shards",
    "samples",
    "tokens",
    "GB",
    "last commit",
    "tokens/s",
    "of peak",
    "waited to store",
    "expected end",
)


def show_status(root: Folder, write: bool, as_json: bool = False) -> int:
    """Prints the state of every host and the totals; if asked, writes the totals to the output.

    as_json: as one object. Returns the exit status: 1 when anything stored is damaged or missing.
    """
    folders = read_folders(root, brief=True)
    hosts = host_states(folders)
    total = aggregate(folders, hosts)
    problems = [problem for stored in folders.values() for problem in problems_of(stored)]
    if as_json:
        say(json.dumps({**total, "problems": problems}))
    else:
        _print_table(hosts, total)
        waiting = [host.name for host in hosts if host.state == "not started"]
        if waiting:
            say(f"not started: {', '.join(waiting)}")
        for problem in problems:
            say(f"damaged: {problem}")
    if write:
        _write(root, total)
        if not as_json:
            say(f"written: {root.url}/{AGGREGATE}")
    return 1 if problems else 0


def aggregate(folders: dict[str, Stored], hosts: list[HostState]) -> dict[str, Any]:
    """The totals over all hosts, as aggregated_metadata.json holds them."""
    complete = all(host.state == "complete" for host in hosts)
    counted = ("shards", "samples", "tokens", "bytes")
    return {
        "format_version": FORMAT_VERSION,
        "status": "complete" if complete else "incomplete",
        **{what: sum(getattr(host, what) for host in hosts) for what in counted},
        "hooks": _hooks_of(folders.values()),
        "parts": [asdict(host) for host in hosts],
        "written": round(time.time(), 3),
    }


def _hooks_of(folders: Iterable[Stored]) -> list[dict[str, Any]]:
    """Every hook with its statistics over all folders."""
    statistics: dict[str, Statistics] = {}
    heads: dict[str, Any] = {}
    for stored in folders:
        told = [*(stored.metadata or {}).get("hooks", ()), *_hooks_of_commits(stored)]
        names = {hook["key"]: hook["name"] for hook in told}
        for hook in told:
            head = {key: hook[key] for key in ("key", "name", "width") if key in hook}
            heads.setdefault(hook["name"], head)
        for key, found in stored.totals.statistics.items():
            before = statistics.get(names[key], Statistics())
            statistics[names[key]] = before.merge(found)
    return [{**heads[name], **statistics[name].to_json()} for name in statistics]


def _hooks_of_commits(stored: Stored) -> list[dict[str, Any]]:
    return [hook for commit in stored.in_order for hook in commit.hooks]


def _print_table(hosts: list[HostState], total: dict[str, Any]) -> None:
    rows = [COLUMNS, *(_row(host) for host in hosts if host.state != "not started")]
    rows.append(("all", "", *_row(_sum(hosts, total))[2:]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _sum(hosts: list[HostState], total: dict[str, Any]) -> HostState:
    """The last row of the table. The run ends when its last host does."""
    running = [host for host in hosts if host.state == "running"]
    rates = [host.tokens_per_second for host in running if host.tokens_per_second is not None]
    ends = [host.expected_end for host in running if host.expected_end is not None]
    commits = [host.last_commit for host in hosts if host.last_commit is not None]
    return HostState(
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


def _row(host: HostState) -> tuple[str, ...]:
    """The cells of a host, in the order of COLUMNS; empty where a value is unknown."""
    now = time.time()
    state, ago, rate, share, waited, end = host.state, "", "", "", "", ""
    if host.state == "silent" and host.last_sign is not None:
        state = f"silent for {_duration(now - host.last_sign)}"
    if host.last_commit is not None:
        ago = f"{_duration(now - host.last_commit)} ago"
    if host.tokens_per_second is not None:
        rate = f"{host.tokens_per_second:,.0f}"
    if host.utilisation is not None:
        share = f"{host.utilisation:.0%}"
    if (seconds := sum(host.waited.values())) >= 1:
        waited = f"{_duration(seconds)} ({max(host.waited, key=lambda name: host.waited[name])})"
    if host.expected_end is not None:
        end = f"in {_duration(host.expected_end - now)}"
    return (
        str(host.machine),
        str(host.host),
        state,
        f"{host.shards:,}",
        f"{host.samples:,}",
        f"{host.tokens:,}",
        f"{host.bytes / 1e9:,.3f}",
        ago,
        rate,
        share,
        waited,
        end,
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _write(root: Folder, content: dict[str, Any]) -> None:
    """Writes the totals beside the folders of the hosts. Raises RunError."""
    if root.local:
        try:
            write_bytes(root.fetch(AGGREGATE, Path()), seal(content))
        except OSError as error:
            raise RunError(f"{root.url}/{AGGREGATE}: {reason_of(error)[0]}") from error
        return
    root.write(AGGREGATE, seal(content))
