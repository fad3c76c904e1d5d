"""The state of every host of a run, from its JSON files alone: how far it is, and how fast."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from activation_extraction.dataset.folders import HostFolder, expected_names
from activation_extraction.store.commit import Commit, number_of
from activation_extraction.store.metadata import METADATA, Stored, gaps

SILENCE = 900.0  # seconds without a commit before a run can be called silent
RECENT = 20  # the last shards, which show how fast a host is now


@dataclass(frozen=True)
class HostState:
    """One host of a run. Times are Unix seconds; None means that it cannot be known.

    state: "complete", "running", "killed" (its metadata says running and no process holds its
    folder), "silent" (it says running, no lock can be seen, and nothing has been written for a long
    time), "interrupted", "failed", "not started" or "damaged" (files are unreadable or missing).
    tokens_per_second: over the last shards, counting only the time in which a run was at work.
    utilisation: share of the devices' peak FLOP/s, from metrics.jsonl. waited: for how many seconds
    computing waited because the memory for shards was full, by what the oldest of them waited for.
    last_sign: when the run last wrote anything.
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


def host_states(folders: dict[str, Stored]) -> list[HostState]:
    """The state of every host, including hosts that have not started."""
    names = sorted({*expected_names(folders), *folders})
    return [_host_state(name, folders.get(name, Stored())) for name in names]


def _host_state(name: str, stored: Stored) -> HostState:
    commits = [*stored.outline.recent, *stored.in_order]
    totals = stored.totals
    pace = sign = None
    state = "damaged" if stored.files else "not started"
    if stored.metadata is not None:
        pace = _pace(commits)
        sign = max([stored.metadata["written"], *(commit.committed for commit in commits)])
        state = _state(stored, stored.metadata, pace, sign)
    place = HostFolder.parse(name) or HostFolder(0)
    return HostState(
        name=name,
        machine=place.machine,
        host=place.host or 0,
        state=state,
        shards=totals.shards,
        samples=totals.samples,
        tokens=totals.tokens,
        bytes=totals.bytes,
        last_commit=commits[-1].committed if commits else None,
        last_sign=sign,
        tokens_per_second=None if pace is None else pace.tokens,
        utilisation=stored.metrics.get("model_flops_utilisation"),
        waited=_waited(stored.metrics),
        expected_end=_expected_end(stored, pace, sign) if state == "running" else None,
    )


def _waited(metrics: Mapping[str, float]) -> dict[str, float]:
    """From the last line of metrics: `waited_PHASE_seconds`."""
    found = {name: re.fullmatch("waited_([a-z]+)_seconds", name) for name in metrics}
    return {match[1]: metrics[name] for name, match in found.items() if match}


def _expected_end(stored: Stored, pace: "Pace | None", sign: float | None) -> float | None:
    """When the host has all its samples; None when their number or its pace is unknown."""
    most = (stored.metadata or {}).get("max_samples")
    if pace is None or sign is None or most is None:
        return None
    return sign + (most - stored.totals.samples) / pace.samples


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
    """What is damaged or missing in a folder, as far as its JSON files and file names show."""
    problems = list(stored.damaged.values())
    if stored.metadata is None and METADATA not in stored.damaged:
        problems.append(f"{stored.url}/{METADATA}: is missing")
    without_json, without_file, incomplete = stored.missing()
    unread = sorted({number_of(name) for name in stored.damaged if name != METADATA})
    lost = [
        part
        for gap in without_json
        for part in gaps([gap.start - 1, *(n for n in unread if n in gap), gap.stop])
    ]
    if lost:
        named = ", ".join("-".join(map(str, sorted({gap[0], gap[-1]}))) for gap in lost)
        problems.append(f"{stored.url}: shards are missing: {named}")
    if without_file:
        numbers = ranges(without_file)
        problems.append(f"{stored.url}: shard files are missing or cut short: {numbers}")
    if incomplete:
        numbers = ranges(incomplete)
        problems.append(f"{stored.url}: statistics or tables of samples are missing: {numbers}")
    return problems


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short, such as 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in runs)


class Pace(NamedTuple):
    """Tokens and samples per second, and seconds per shard."""

    tokens: float
    samples: float
    seconds_per_shard: float


def _pace(commits: list[Commit]) -> Pace | None:
    """The pace of the last shards; None when they do not show it.

    A shard's time starts at the commit before it, or at the start of its own run if that is later.
    So the pause between two runs does not count.
    """
    seconds = tokens = samples = shards = 0.0
    before: Commit | None = None
    for commit in commits[-RECENT - 1 :]:
        same_run = before is not None and before.began == commit.began
        since = before.committed if before is not None and same_run else commit.began
        first = before is None and len(commits) > RECENT
        before = commit
        if first or since is None or commit.committed <= since:
            continue
        seconds += commit.committed - since
        tokens, samples, shards = tokens + commit.tokens, samples + commit.count, shards + 1
    return Pace(tokens / seconds, samples / seconds, seconds / shards) if shards else None
