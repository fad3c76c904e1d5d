"""Reads one host's folder: the names of its files, and the content of its JSON files.

metadata.json describes the run. Only the shards of the run that it names count, in a sequence of
numbers without gaps; a JSON of another run is left from one that was overwritten.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice, pairwise
from typing import Any

from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import counted
from activation_extraction.store.commit import (
    FORMAT_VERSION,
    METADATA,
    METRICS,
    MOST_BYTES,
    OTHER_VERSION,
    SHARD_NUMBER,
    Commit,
    DamagedError,
    Totals,
    commit_name,
    number_of,
    reading,
    unseal,
)
from activation_extraction.store.folder import Folder, local_path
from activation_extraction.store.formats import SUFFIXES
from activation_extraction.store.identity import Identity

COUNTED = ("shards", "samples", "tokens", "bytes")
AGGREGATE = "aggregated_metadata.json"
OWN_FILES = re.compile(
    r"\.?(metadata\.json|metrics\.jsonl"
    rf"|shard_{SHARD_NUMBER}(\.json|\.npz|\.samples\.parquet|{SUFFIXES}))(\.tmp)?"
)
COMMIT = re.compile(rf"shard_{SHARD_NUMBER}\.json")
METRICS_TAIL = 4096  # bytes at the end of metrics.jsonl, more than a line has
JSONS_AT_ONCE = 64  # how many small files are read at the same time
MOST_ABSENT = 1000  # how many JSONs are asked for that a listing lacks
RESERVED = "reserved"  # the field of a JSON that reserves a number and commits nothing


@dataclass(frozen=True)
class Stored:
    """The content of one host's folder.

    Attributes:
        metadata: The content of metadata.json; None if there is none.
        version: The version of metadata.json.
        commits: The commits of the run that metadata.json names, by the numbers of the shards.
        versions: The versions of all JSONs of shards that were read, by the names of the files. A
            name that is not in it stands for no file.
        files: The sizes of the files in bytes, by name.
        damaged: Why each unreadable JSON cannot be read, by its name.
        metrics: The last metrics of the run.
        url: The URL of the folder, without secrets.
        local: Whether the folder is on this machine.
    """

    metadata: dict[str, Any] | None = None
    version: str | None = None
    commits: dict[int, Commit] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    local: bool = True

    @cached_property
    def identity(self) -> Identity | None:
        """The identity of the run; None without metadata."""
        return None if self.metadata is None else identity_of(self.metadata, self.url)

    @property
    def run(self) -> str | None:
        """The id of the run; None without metadata."""
        return None if self.metadata is None else self.metadata["run"]

    @property
    def in_order(self) -> list[Commit]:
        """The commits in the order of their numbers."""
        return [self.commits[number] for number in sorted(self.commits)]

    @cached_property
    def totals(self) -> Totals:
        """The totals of all shards, and of the rows that metadata.json counts beyond them."""
        totals, metadata = Totals.of(self.in_order), self.metadata or {}
        totals.count_rows(metadata.get("skipped_rows", 0), metadata.get("empty_rows", 0))
        return totals

    @property
    def moved_to(self) -> str | None:
        """The URL of the bucket that the shards were uploaded to; None if they are here."""
        remote = (self.metadata or {}).get("remote")
        here = not self.local or local_path(remote or "") == local_path(self.url)
        return None if here else remote

    @property
    def lacking(self) -> list[str]:
        """The names of committed files that are not here, or not with their full sizes."""
        files = chain.from_iterable(commit.files.items() for commit in self.in_order)
        return [name for name, facts in files if self.files.get(name) != facts.bytes]

    @property
    def lacking_jsons(self) -> list[str]:
        """Messages on JSONs that are not here: metadata.json, and those of shards although a later
        shard has one, or the run is complete."""
        there = self.metadata or METADATA in self.damaged
        lacking = [] if there else [f"{METADATA}: is missing"]
        if self.moved_to is not None:
            return lacking
        metadata = self.metadata or {}
        recorded = metadata["shards"] if metadata.get("status") == "complete" else 0
        end = max([recorded, *self.commits]) + 1
        damaged = {number_of(name) for name in self.damaged if name != METADATA}
        for gap in gaps([0, *sorted(n for n in {*self.commits, *damaged} if n < end), end]):
            first, last = commit_name(gap.start), commit_name(gap.stop - 1)
            one = first == last
            lacking.append(f"{first}: is missing" if one else f"{first} to {last}: are missing")
        return lacking

    @property
    def problems(self) -> list[str]:
        """Messages on what is damaged or missing here, by its JSONs and the names of its files."""
        jsons = [f"{self.url}/{message}" for message in self.lacking_jsons]
        lacking = self.lacking if self.moved_to is None else []
        files = [f"{self.url}/{name}: is missing or cut short" for name in lacking]
        return [*self.damaged.values(), *jsons, *files]


def total_problems(commits: Iterable[Commit], metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yields the totals in the metadata of a finished host that differ from those of its shards."""
    totals = Totals.of(commits)
    for name in COUNTED:
        if metadata[name] != (total := getattr(totals, name)):
            yield f"has {counted(metadata[name], name.removesuffix('s'))}, there are {total}"


def gaps(numbers: Iterable[int]) -> list[range]:
    """Returns the ranges of numbers that are missing between ascending ones."""
    return [range(a + 1, b) for a, b in pairwise(numbers) if b > a + 1]


def identity_of(metadata: Mapping[str, Any], where: str) -> Identity:
    """Returns the identity that metadata.json records. Raises DamagedError if it cannot be read."""
    with reading(f"{where}: its identity"):
        return Identity.from_json(metadata.get("identity"))


def own_files(names: Iterable[str], temporary: bool = False) -> list[str]:
    """Returns those of `names` that an extraction uses, sorted. temporary: also files that a killed
    process may have left, which are not complete."""
    own = [name for name in sorted(names) if OWN_FILES.fullmatch(name)]
    return own if temporary else [name for name in own if not name.startswith(".")]


def read_stored(folder: Folder) -> Stored:
    """Reads the JSON files of a folder, many at a time; `Stored.damaged` names unreadable ones.

    metadata.json is read before and after the shards' JSONs: if another run has begun in between,
    all of them are read again.
    """
    while True:
        stored = _read_once(folder)
        after = read_metadata(folder)
        if after is None or after["run"] == stored.run:
            return stored


def _read_once(folder: Folder) -> Stored:
    found = folder.read_with_version(METADATA, most=MOST_BYTES)
    damaged: dict[str, str] = {}
    versions: dict[str, str | None] = {}
    metadata = None
    if found is not None:
        try:
            metadata = parse_metadata(found[0], f"{folder.url}/{METADATA}")
        except DamagedError as error:
            damaged[METADATA] = str(error)
    files = folder.files()
    listed = {name for name in files if COMMIT.fullmatch(name)}
    commits = _read_commits(folder, listed, metadata, versions, damaged)
    # A listing that comes in pages is no snapshot: a JSON that it lacks is asked for by its name.
    missing = chain.from_iterable(gaps([0, *sorted(commits)]))
    absent = {commit_name(number) for number in islice(missing, MOST_ABSENT)} - listed
    commits |= _read_commits(folder, absent, metadata, versions, damaged)
    stored = Stored(
        metadata=metadata,
        version=found and found[1],
        commits=commits,
        versions=versions,
        files=files,
        damaged=damaged,
        metrics=_last_metrics(folder, files),
        url=folder.url,
        local=folder.local,
    )
    # A commit may be younger than the listing, and then its files may be, too.
    return replace(stored, files=folder.files()) if stored.lacking else stored


def _read_commits(
    folder: Folder,
    names: Iterable[str],
    metadata: Mapping[str, Any] | None,
    versions: dict[str, str | None],
    damaged: dict[str, str],
) -> dict[int, Commit]:
    """Returns the commits in the JSONs of these names, by the numbers of the shards.

    Commits of another run than that of the metadata, and JSONs that only reserve their number, are
    left out. Adds the version of each JSON to `versions`, and the reason why a JSON cannot be read
    to `damaged`.
    """
    commits: dict[int, Commit] = {}
    ordered = sorted(names)
    with ThreadPoolExecutor(JSONS_AT_ONCE) as pool:
        found = pool.map(lambda name: folder.read_with_version(name, most=MOST_BYTES), ordered)
        for name, content in zip(ordered, found, strict=True):
            if content is None:
                continue
            data, versions[name] = content
            try:
                commit = parse_commit(data, f"{folder.url}/{name}")
            except DamagedError as error:
                damaged[name] = str(error)
                continue
            if commit is not None and (metadata is None or commit.run == metadata["run"]):
                commits[commit.number] = commit
    return commits


def parse_metadata(data: bytes, where: str) -> dict[str, Any]:
    """Returns the content of a metadata.json. Raises DamagedError if it cannot be used."""
    content = unseal(data, where)
    if content.get("format_version") != FORMAT_VERSION:
        raise DamagedError(f"{where}: {OTHER_VERSION}")
    identity_of(content, where)
    return content


def parse_commit(data: bytes, where: str) -> Commit | None:
    """Reads the JSON of a shard; returns None if it only reserves the number."""
    content = unseal(data, where)
    return None if RESERVED in content else Commit.from_json(content, where)


def _last_metrics(folder: Folder, files: Mapping[str, int]) -> dict[str, Any]:
    """Returns the last complete line of metrics.jsonl, which is only for the user to see."""
    size = files.get(METRICS, 0)
    tail = folder.read_range(METRICS, max(0, size - METRICS_TAIL), size)
    for line in reversed(bytes(tail or b"").splitlines()):
        with suppress(ValueError, RecursionError):
            metrics = json.loads(line)
            if isinstance(metrics, dict):
                return {name: each for name, each in metrics.items() if type(each) in (int, float)}
    return {}


def read_metadata(folder: Folder) -> dict[str, Any] | None:
    """Returns the content of metadata.json; None if it is missing or damaged.

    --verify reports a damaged one.
    """
    data = folder.read(METADATA, most=MOST_BYTES)
    with suppress(DamagedError):
        return None if data is None else parse_metadata(data, METADATA)
    return None


def check_own(folder: Folder) -> None:
    """Raises InputError if --overwrite would delete or replace files of somebody else: some of that
    name are there, but no JSON that an extraction of any version has written."""
    names = own_files(folder.files())
    for name in names:
        with suppress(DamagedError):
            if name.endswith(".json") and unseal(folder.read(name, most=MOST_BYTES) or b"", name):
                return
    if names:
        raise InputError(
            f"{folder.url}: --overwrite: {names[0]} may not be of this program: no sound JSON of a "
            "run is beside it; move it, or give another folder"
        )
