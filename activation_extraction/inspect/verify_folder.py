"""What the JSON files of a run show: folders that are missing or belong to another run, samples
that are missing or stored twice, totals that do not add up."""

from collections.abc import Iterable, Iterator
from math import isclose
from typing import Any

from activation_extraction.common.visible import counted
from activation_extraction.dataset.folders import HostFolder, expected_names
from activation_extraction.store.commit import Commit, Totals, commit_name
from activation_extraction.store.formats import SHARD_FILE
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import METADATA, Stored
from activation_extraction.store.statistics import Statistics
from activation_extraction.text.workers import Worker


def check_folders(folders: dict[str, Stored]) -> Iterator[str]:
    """Everything that is wrong, as far as the JSON files and the names of the files show."""
    expected = expected_names(folders)
    yield from (f"{name}: is missing" for name in expected if name not in folders)
    readable: list[str] = []
    for name, stored in folders.items():
        if name not in expected:
            yield f"{name or 'the output itself'}: holds shards that are not part of this run"
        yield from stored.damaged.values()
        yield from _gaps(name, stored)
        if stored.metadata is None:
            if METADATA not in stored.damaged:
                yield f"{file_path(name, METADATA)}: is missing"
            continue
        try:
            yield from _check_folder(name, stored, stored.metadata)
            readable.append(name)
        except (KeyError, TypeError, IndexError) as error:
            yield f"{file_path(name, METADATA)}: lacks what every run records: {error!r}"
    yield from _check_one_run(folders, readable)


def file_path(folder: str, name: str) -> str:
    """A file's path in the output. folder: its folder's name, "" for the output itself."""
    return f"{folder}/{name}" if folder else name


def differing(found: Statistics, recorded: dict[str, Any]) -> Iterator[str]:
    """How statistics differ from those that a JSON file records."""
    expected = Statistics.from_json(recorded)
    for what, value in found.to_json().items():
        if not isclose(value, getattr(expected, what), rel_tol=1e-6, abs_tol=1e-9):
            yield f"its {what} is {value}, its JSON says {getattr(expected, what)}"


def _check_one_run(folders: dict[str, Stored], names: Iterable[str]) -> Iterator[str]:
    """Whether all these folders are of the run that the first one is of."""
    common: dict[str, Any] = {}
    hosts: dict[int, int] = {}  # of every machine
    digests: dict[tuple[str, int], str] = {}  # of files of the data set, by name and size
    for name in names:
        for file in (folders[name].metadata or {}).get("data_files", ()):
            known, digest = (file["name"], file["bytes"]), file["digest"]
            if digest and digests.setdefault(known, digest) != digest:
                yield f"{name}: has read a file {file['name']} with other content than others have"
        identity = folders[name].identity
        assert identity is not None
        shared = identity.shared
        common = common or shared
        if hosts.setdefault(identity.machine, identity.num_hosts) != identity.num_hosts:
            yield f"{name}: is of another run: its num_hosts differs"
        for key in common:
            if shared[key] != common[key]:
                yield f"{name}: is of another run: its {key} differs"


def _check_folder(name: str, stored: Stored, metadata: dict[str, Any]) -> Iterator[str]:
    """Everything that is wrong in one folder. Raises KeyError where its metadata lacks a field."""
    assert stored.identity is not None
    identity = stored.identity
    expected = HostFolder.of(identity.machine, identity.host, identity.num_hosts).name
    if name not in ("", expected):
        yield f"{name}: holds the shards of {expected}"
    if metadata["status"] != "complete":
        yield f"{file_path(name, METADATA)}: the run is not complete: {metadata['status']}"
    yield from _check_sequence(name, stored, _worker_of(identity))
    for commit in stored.in_order[:-1]:
        if commit.partial:
            yield f"{file_path(name, commit.name)}: is partial, and not the last one"
    if metadata["status"] == "complete":
        for problem in _check_totals(stored.in_order, metadata):
            yield f"{file_path(name, METADATA)}: {problem}"
    committed = {commit.file for commit in stored.in_order}
    for file in stored.files:
        if SHARD_FILE.fullmatch(file) and file not in committed:
            yield f"{file_path(name, file)}: has no JSON"


def _worker_of(identity: Identity) -> Worker:
    return Worker(
        machine=identity.machine,
        machines=identity.total_machines,
        host=identity.host,
        hosts=identity.num_hosts,
    )


def _gaps(name: str, stored: Stored) -> Iterator[str]:
    """The shards without a JSON before others that have one."""
    before = 0
    for number in sorted(stored.commits):
        first, last = file_path(name, commit_name(before + 1)), commit_name(number - 1)
        if number == before + 2:
            yield f"{first}: is missing"
        elif number > before + 2:
            yield f"{first} to {last}: are missing"
        before = number


def _check_sequence(name: str, stored: Stored, worker: Worker) -> Iterator[str]:
    """Whether the shards follow each other, without a gap and without a sample stored twice."""
    upcoming = worker.sample_idx(0)
    position = 0  # of the cursor
    for number, commit in enumerate(stored.in_order, start=1):
        where = file_path(name, commit.name)
        if commit.number != number:
            break
        if commit.run != stored.run:
            yield f"{where}: is of another run"
        if commit.first != upcoming:
            word = "is missing" if commit.first > upcoming else "is stored twice"
            yield f"{where}: sample {min(upcoming, commit.first)} {word}"
        if commit.last != commit.first + worker.stride * (commit.count - 1):
            span = f"from {commit.first} to {commit.last}"
            yield f"{where}: {counted(commit.count, 'sample')} cannot go {span}"
        upcoming = commit.last + worker.stride
        if commit.cursor is not None:
            before, position = position, commit.cursor["samples"]
            if not before <= position <= upcoming // worker.stride:
                yield f"{where}: its cursor does not follow from the one before"


def _check_totals(commits: list[Commit], metadata: dict[str, Any]) -> Iterator[str]:
    """Whether the metadata of a finished host adds up the JSON files of its shards."""
    totals = Totals()
    for commit in commits:
        totals.add(commit)
    for what in ("shards", "samples", "tokens", "bytes"):
        if metadata[what] != getattr(totals, what):
            told = counted(metadata[what], what.removesuffix("s"))
            yield f"has {told}, there are {getattr(totals, what)}"
    for hook in metadata["hooks"]:
        found = totals.statistics.get(hook["key"], Statistics())
        for problem in differing(found, hook):
            yield f"hook {hook['key']}: {problem}"
