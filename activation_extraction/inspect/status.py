"""Prints the progress and speed of every host of a run, and the totals, for --status.

It reads only JSON files. With --aggregate it also writes the totals to the output.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from activation_extraction.common.visible import counted, say
from activation_extraction.store.folder import ANY, Folder
from activation_extraction.store.run_folders import (
    AGGREGATE,
    HostFolder,
    expected_names,
    read_folders,
)
from activation_extraction.store.run_log import FORMAT_VERSION, Commit, RunLog, seal
from activation_extraction.store.statistics_in_words import (
    code_warnings,
    codes_in_words,
    errors_in_words,
)
from activation_extraction.store.totals import COUNTED, Totals

SILENCE = 900.0  # seconds without a commit before a run counts as silent
RECENT = 20  # number of last shards from which the current speed of a host is computed
WRONG = {"damaged", "silent", "failed"}  # states of a host in which its user has to intervene


@dataclass(frozen=True)
class HostState:
    """The state of one host of a run. Times are Unix seconds.

    Attributes:
        name: The name of the host's folder; "" for the output itself.
        machine: The number of the machine.
        host: The number of the host on its machine.
        state: "complete", "running", "silent" (the metadata says running, but nothing has been
            written for a long time), "interrupted", "failed", "not started" or "damaged" (files are
            unreadable or missing).
        shards: The number of stored shards.
        samples: The number of stored samples.
        tokens: The number of stored tokens.
        bytes: The size of the activation files in bytes.
        last_commit: The time at which the last shard was committed. None if there is no shard.
        last_sign: The time of the last write to metadata.json or of the last commit. None if
            metadata.json cannot be read.
        tokens_per_second: The speed over the last RECENT shards, without pauses between processes.
            None if it is unknown.
        utilisation: The fraction of the devices' peak FLOP/s, from metrics.jsonl. None if it is
            unknown.
        waited: The seconds for which computing waited because the memory for shards was full, by
            the phase of the oldest shard.
        expected_end: The time at which the run will reach --max_samples or --max_tokens at its
            present speed. None if that is unknown.
        share: The fraction that is done of --max_samples or --max_tokens, whichever is larger.
            None without a limit.
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
    waited: dict[str, float] = field(default_factory=dict)
    expected_end: float | None = None
    share: float | None = None


def show_status(root: Folder, write: bool, as_json: bool = False) -> int:
    """Prints the state of every host and the totals.

    Args:
        root: The output of the run.
        write: Whether to write the totals to the output.
        as_json: Whether to print one JSON object instead of tables and lines.

    Returns:
        The exit status: 1 if the state of a host is in WRONG, otherwise 0.
    """
    folders = read_folders(root)
    hosts = host_states(folders)
    totals = totals_of_hosts(folders)
    total = aggregate(folders, totals, hosts)
    problems = [problem for stored in folders.values() for problem in stored.problems]
    if as_json:
        say(json.dumps({**total, "problems": problems}))
    else:
        _print_table(hosts, total)
        if not_started := [host.name for host in hosts if host.state == "not started"]:
            say(f"not started: {', '.join(not_started)}")
        if totals.skipped_rows:
            say(f"skipped: {counted(totals.skipped_rows, 'row')} that could not be used")
        if totals.empty_rows:
            say(f"empty: {counted(totals.empty_rows, 'row')} without text, which gave no sample")
        for line in errors_in_words(totals.statistics):
            say(line)
        for line in codes_in_words(totals.statistics):
            say(line)
        for line in code_warnings(totals.statistics):
            say(f"warning: {line}")
        for problem in problems:
            say(f"damaged: {problem}")
    if write:
        root.write(AGGREGATE, seal(total), ANY)
        if not as_json:
            say(f"written: {root.url}/{AGGREGATE}")
    return 1 if any(host.state in WRONG for host in hosts) else 0


def host_states(folders: dict[str, RunLog]) -> list[HostState]:
    """Returns the state of every host, including hosts that have not started.

    Args:
        folders: The content of each folder, by the folder's name.
    """
    names = sorted({*expected_names(folders), *folders})
    return [_host_state(name, folders.get(name, RunLog())) for name in names]


def _host_state(name: str, stored: RunLog) -> HostState:
    """Returns the state of a host.

    Args:
        name: The name of the host's folder.
        stored: The content of the folder; empty if it does not exist.
    """
    folder = HostFolder.parse(name) or HostFolder(0)
    commits = stored.in_order
    metadata = stored.metadata
    totals = Totals.of_log(stored)
    waited = {}
    for key, seconds in stored.metrics.items():
        if match := re.fullmatch("waited_([a-z]+)_seconds_since_start", key):
            waited[match[1]] = seconds
    without_metadata = HostState(
        name=name,
        machine=folder.machine,
        host=folder.host or 0,
        state="damaged" if stored.files else "not started",
        **{name: getattr(totals, name) for name in COUNTED},
        last_commit=max((commit.committed for commit in commits), default=None),
        utilisation=stored.metrics.get("model_flops_utilisation"),
        waited=waited,
    )
    if metadata is None:
        return without_metadata
    pace = _pace(commits)
    expected_end = None
    share = None
    last_sign = max([metadata["written"], *(commit.committed for commit in commits)])
    state = _state(stored, metadata, pace, last_sign)
    limits = {}
    for counted_name in ("samples", "tokens"):
        limit = metadata.get(f"max_{counted_name}")
        if limit is not None:
            limits[counted_name] = limit
    if limits:
        share = max(getattr(totals, name) / (limit or 1) for name, limit in limits.items())
        share = 1.0 if state == "complete" else share
    if state == "running" and pace is not None:
        rates = {name: getattr(pace, name) for name in limits}
        left = {name: limit - getattr(totals, name) for name, limit in limits.items()}
        seconds = [left[name] / rate for name, rate in rates.items() if rate]
        expected_end = last_sign + min(seconds) if seconds else None
    return replace(
        without_metadata,
        state=state,
        last_sign=last_sign,
        tokens_per_second=None if pace is None else pace.tokens,
        expected_end=expected_end,
        share=share,
    )


class Pace(NamedTuple):
    """The current speed of a host.

    Attributes:
        tokens: Tokens per second.
        samples: Samples per second.
        seconds_per_shard: Mean seconds per shard.
    """

    tokens: float
    samples: float
    seconds_per_shard: float


def shard_seconds(commits: Iterable[Commit]) -> Iterator[tuple[Commit, float]]:
    """Yields the seconds that each shard of a host took, in the order of the commits.

    The time of a shard starts at the previous commit of the same process, or at the start of the
    process if it is the first commit. So pauses between processes do not count, and neither does
    the time of a --repair, which commits shards between those of an earlier process.

    Args:
        commits: The commits of the shards of a host, in any order.

    Yields:
        The commit and its seconds. A shard is left out if its times do not show how long it took.
    """
    last_commits: dict[float, float] = {}  # by the start of the process
    for commit in sorted(commits, key=lambda commit: commit.committed):
        since = last_commits.get(commit.began, commit.began)
        if commit.committed > since:
            yield commit, commit.committed - since
        last_commits[commit.began] = commit.committed


def _pace(commits: list[Commit]) -> Pace | None:
    """Returns the pace over the last RECENT shards, or None if their times do not show it."""
    timed = list(shard_seconds(commits))[-RECENT:]
    if not timed:
        return None
    seconds = sum(shard_time for _, shard_time in timed)
    tokens = sum(commit.tokens for commit, _ in timed)
    samples = sum(commit.count for commit, _ in timed)
    return Pace(tokens / seconds, samples / seconds, seconds / len(timed))


def _state(stored: RunLog, metadata: dict[str, Any], pace: Pace | None, last_sign: float) -> str:
    """Returns the state of a host that has started, as in HostState."""
    if stored.problems:
        return "damaged"
    if metadata["status"] != "running":
        return metadata["status"]
    patience = max(SILENCE, 5 * pace.seconds_per_shard if pace is not None else 0)
    return "silent" if time.time() - last_sign > patience else "running"


def totals_of_hosts(folders: Mapping[str, RunLog]) -> Totals:
    """Returns the totals over all hosts.

    Args:
        folders: The content of each folder, by the folder's name.
    """
    totals = Totals()
    for stored in folders.values():
        totals.add_host(Totals.of_log(stored))
    return totals


def aggregate(
    folders: Mapping[str, RunLog], totals: Totals, hosts: list[HostState]
) -> dict[str, Any]:
    """Returns the content of aggregated_metadata.json, which --status --json also prints.

    Args:
        folders: The content of each folder, by the folder's name.
        totals: The totals over all hosts.
        hosts: The states of all hosts.

    Returns:
        A JSON object with these keys. format_version: FORMAT_VERSION. status: "complete" or
        "incomplete". The counts of `totals` by their names. hooks: for each hook its key, name,
        width and statistics. parts: the fields of each HostState. written: the Unix time now.
    """
    complete = all(host.state == "complete" for host in hosts)
    commits = (commit for stored in folders.values() for commit in stored.in_order)
    hooks = {hook["name"]: hook for commit in commits for hook in commit.hooks}
    return {
        "format_version": FORMAT_VERSION,
        "status": "complete" if complete else "incomplete",
        **totals.counts,
        "hooks": [
            {key: hooks[name][key] for key in ("key", "name", "width")} | statistics.to_json()
            for name, statistics in totals.statistics.items()
        ],
        "parts": [asdict(host) for host in hosts],
        "written": round(time.time(), 3),
    }


def _print_table(hosts: list[HostState], total: dict[str, Any]) -> None:
    rows = [_row(host) for host in hosts if host.state != "not started"]
    rows.append({**_row(_sum(hosts, total)), "machine": "all", "host": ""})
    header = tuple(rows[0])
    table = [header, *(tuple(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        say("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))


def _sum(hosts: list[HostState], total: dict[str, Any]) -> HostState:
    """Returns the sums over all hosts, for the last row of the table.

    A run ends when its last host ends, so the expected end is known only if it is known for all
    running hosts. The fraction that is done is known only if all hosts that have started have a
    limit; hosts that have not started count as 0.

    Args:
        hosts: The states of all hosts.
        total: The content of aggregated_metadata.json.
    """
    running = [host for host in hosts if host.state == "running"]
    rates = [host.tokens_per_second for host in running if host.tokens_per_second is not None]
    ends = [host.expected_end for host in running if host.expected_end is not None]
    commits = [host.last_commit for host in hosts if host.last_commit is not None]
    started = [host for host in hosts if host.state != "not started"]
    shares = [host.share for host in started if host.share is not None]
    return HostState(
        name="",
        machine=0,
        host=0,
        state=total["status"],
        **{name: total[name] for name in COUNTED},
        last_commit=max(commits, default=None),
        tokens_per_second=sum(rates) if rates else None,
        expected_end=max(ends) if ends and len(ends) == len(running) else None,
        share=sum(shares) / len(hosts) if shares and len(shares) == len(started) else None,
    )


def _row(host: HostState) -> dict[str, str]:
    """Returns the cells of a host by the title of the column. Unknown values are empty cells."""
    now = time.time()
    state = host.state
    waited = ""
    if host.state == "silent" and host.last_sign is not None:
        state = f"silent for {_duration(now - host.last_sign)}"
    if (seconds := sum(host.waited.values())) >= 1:
        waited = f"{_duration(seconds)} ({max(host.waited, key=lambda name: host.waited[name])})"

    def cell(number: float | None, in_words: Callable[[float], str]) -> str:
        return "" if number is None else in_words(number)

    return {
        "machine": str(host.machine),
        "host": str(host.host),
        "state": state,
        "shards": f"{host.shards:,}",
        "samples": f"{host.samples:,}",
        "tokens": f"{host.tokens:,}",
        "GB": f"{host.bytes / 1e9:,.3f}",
        "done": cell(host.share, "{:.1%}".format),
        "last commit": cell(host.last_commit, lambda moment: f"{_duration(now - moment)} ago"),
        "tokens/s": cell(host.tokens_per_second, "{:,.0f}".format),
        "of peak": cell(host.utilisation, "{:.0%}".format),
        "waited to store": waited,
        "expected end": cell(host.expected_end, lambda moment: f"in {_duration(moment - now)}"),
    }


def _duration(seconds: float) -> str:
    minutes, seconds_left = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds_left} s"
