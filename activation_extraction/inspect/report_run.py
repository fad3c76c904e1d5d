"""What a report says about the run as a whole, from its JSON files and metrics alone."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from activation_extraction.inspect.report_sample import Document
from activation_extraction.inspect.status import HostState, host_states, problems_of
from activation_extraction.store.folder import Folder
from activation_extraction.store.metadata import METRICS, Stored, numbers_of

METRICS_BYTES = 2 * 2**20  # of each host, from the end: about two days of a line every 30 s
BINS = 120


@dataclass(frozen=True)
class Run:
    """facts: label -> value. parts: the hosts. problems: what is damaged or missing."""

    state: str
    model: str
    dataset: str
    samples: int
    tokens: int
    bytes: int
    shards: int
    facts: dict[str, str]
    parts: list[HostState]
    problems: list[str]


def describe(folders: Mapping[str, Stored], metadata: Mapping[str, Any]) -> Run:
    """metadata: of one of the folders."""
    parts = host_states(dict(folders))
    asked, identity = metadata.get("configuration", {}), metadata["identity"]
    model = str(asked.get("model_path", "unknown model"))
    names = [asked.get(f"dataset_{what}") for what in ("path", "name", "config", "split")]
    return Run(
        _state([part.state for part in parts]),
        model,
        ", ".join(name for name in names if name) or str(identity.get("data", "unknown data")),
        sum(part.samples for part in parts),
        sum(part.tokens for part in parts),
        sum(part.bytes for part in parts),
        sum(part.shards for part in parts),
        dict(_facts(metadata, asked, identity)),
        parts,
        [problem for stored in folders.values() for problem in problems_of(stored)],
    )


def _state(states: Sequence[str]) -> str:
    """Of the run: the same of all hosts, or the first of these that any host has."""
    if len(set(states)) == 1:
        return states[0]
    order = ("damaged", "running", "failed", "killed", "silent", "interrupted", "not started")
    return next((state for state in order if state in states), states[0])


def _facts(
    metadata: Mapping[str, Any], asked: Mapping[str, Any], identity: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    yield from _known(
        ("Model commit", metadata.get("model_commit") or asked.get("model_revision")),
        ("Text column", identity.get("text_column")),
        ("Tokens per row", f"{identity['max_seq_length']:,}"),
        ("Kept positions", identity.get("positions")),
        ("Dropped token ids", ", ".join(map(str, identity.get("drop_token_ids", ())))),
        ("Computed in", identity.get("dtype")),
        ("Stored as", identity.get("activation_dtype")),
        ("Machines", identity.get("total_machines")),
        ("Devices", metadata.get("backend")),
        ("Mesh", _pairs(metadata.get("mesh"))),
        ("Attention", (metadata.get("attention") or {}).get("name")),
        ("Uploaded to", asked.get("bucket_url")),
        ("Skipped rows", metadata.get("skipped_rows")),
        ("Rows without text", metadata.get("empty_rows")),
        ("Samples that are cut", metadata.get("cut_samples")),
        ("Tokens left out there", metadata.get("cut_tokens")),
        ("Versions", _pairs(metadata.get("versions"))),
    )


def _known(*pairs: tuple[str, Any]) -> Iterator[tuple[str, str]]:
    return ((label, str(value)) for label, value in pairs if value not in (None, "", 0))


def _pairs(content: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (content or {}).items())


def read_metrics(folder: Folder, size: int) -> list[dict[str, Any]]:
    """The lines of a host's metrics.jsonl, those at the end when it is large. size: in bytes."""
    start = max(size - METRICS_BYTES, 0)
    data = folder.read(METRICS, start=start) if size else None
    lines = []
    for line in (data or b"").splitlines()[1 if start else 0 :]:
        with suppress(ValueError, RecursionError):  # a line that is being written, or was cut
            content = json.loads(line)
            if isinstance(content, dict) and "time" in (found := numbers_of(content)):
                lines.append(found)
    return lines


@dataclass(frozen=True)
class Lengths:
    """Tokens per document. cut: the share of the sample's documents that are as long as a row.

    mean: of all documents of the run. padded: the share of padding, had every document had a row
    of its own; packed: the share that the run itself computed, None where that is not known.
    """

    sampled: np.ndarray
    longest_row: int
    cut: float
    mean: float
    padded: float
    packed: float | None


def lengths_of(
    documents: Sequence[Document], run: Run, longest_row: int, packed: float | None
) -> Lengths:
    sampled = np.array([document.stop - document.start for document in documents])
    mean = run.tokens / run.samples
    return Lengths(
        sampled,
        longest_row,
        float((sampled >= longest_row).mean()),
        mean,
        1 - mean / max(longest_row, 1),
        packed,
    )


def _metrics(line: Mapping[str, Any], name: str) -> float:
    return float(line.get(name) or 0)


@dataclass(frozen=True)
class Throughput:
    """Of all hosts together, in bins of equal duration.

    edges: of the bins, in hours since the first step that was measured, (bins + 1,).
    tokens_per_second: (bins,). hosts: those that measured anything.
    """

    edges: np.ndarray
    tokens_per_second: np.ndarray
    hosts: int


@dataclass(frozen=True)
class Interval:
    """Seconds (Unix time) in which one host went through `tokens` tokens."""

    start: float
    stop: float
    tokens: float


def intervals(lines: Sequence[Mapping[str, Any]]) -> list[Interval]:
    """What each line of one host's metrics.jsonl covers. `tokens` there counts from every start of
    the program; time in which it did not run belongs to no line."""
    found, before = [], 0.0
    for line in lines:
        tokens, rate = _metrics(line, "tokens"), _metrics(line, "tokens_per_second")
        new = tokens - before if tokens >= before else tokens
        before = tokens
        if new > 0 and rate > 0:
            found.append(Interval(line["time"] - new / rate, line["time"], new))
    return found


def throughput(hosts: Sequence[Sequence[Interval]], bins: int = BINS) -> Throughput | None:
    """The sum over hosts, in bins of equal duration. None when nothing was measured."""
    every = [interval for host in hosts for interval in host]
    if not every:
        return None
    begin, end = min(i.start for i in every), max(i.stop for i in every)
    longest = max(interval.stop - interval.start for interval in every)
    edges = np.linspace(begin, end, int(np.clip((end - begin) / longest, 1, bins)) + 1)
    tokens = np.zeros(len(edges) - 1)
    for interval in every:
        inside = np.clip(edges, interval.start, interval.stop)
        tokens += interval.tokens * np.diff(inside) / (interval.stop - interval.start)
    return Throughput((edges - begin) / 3600, tokens / np.diff(edges), sum(map(bool, hosts)))


def padding(lines: Sequence[Mapping[str, Any]], slots: int) -> float | None:
    """The share of padding in what a host computed since its last start. slots: tokens of a step,
    padding included."""
    for line in reversed(lines):
        if slots and (steps := _metrics(line, "steps")):
            return 1 - _metrics(line, "tokens") / (steps * slots)
    return None
