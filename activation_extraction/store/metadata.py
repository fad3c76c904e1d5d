"""Reads one host's folder: the names of its files, and the content of its JSON files.

metadata.json describes the run; a run can continue only if its `identity` is the same.
"""

import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from activation_extraction.common.errors import InputError
from activation_extraction.store.commit import (
    CLAIM,
    FORMAT_VERSION,
    METADATA,
    METRICS,
    OTHER_VERSION,
    SHARD_NUMBER,
    Commit,
    Outline,
    Totals,
    commit_name,
    names_beside,
    number_of,
    numbers_of,
)
from activation_extraction.store.folder import Folder, local_path
from activation_extraction.store.formats import SUFFIXES
from activation_extraction.store.identity import Identity, run_of
from activation_extraction.store.sealed_json import DamagedError, unseal

COUNTED = ("shards", "samples", "tokens", "bytes")
AGGREGATE = "aggregated_metadata.json"
OWN_FILES = re.compile(
    r"\.?(metadata\.json|metrics\.jsonl"
    rf"|shard_{SHARD_NUMBER}(\.json|\.npz|\.samples\.jsonl\.gz|{SUFFIXES}))(\.tmp)?"
)
# The totals in the metadata.json of a folder that has no shards yet.
EMPTY_TOTALS = {"shards": 0, "samples": 0, "tokens": 0, "bytes": 0, "hooks": []}
# Fields of metadata.json that every run records.
REQUIRED = ("identity", "status", "max_samples", "written", *COUNTED)
METRICS_TAIL = 4096  # bytes at the end of metrics.jsonl, more than a line has
READERS = 32  # how many small files are read at the same time


@dataclass(frozen=True)
class Stored:
    """The content of one host's folder.

    metadata: None if there is none. commits: by the shards' numbers. files: sizes by name. damaged:
    maps the name of each unreadable JSON file to the reason. metrics: the last ones of the run.
    url: the URL of the folder. local: whether it is on this machine. locked: whether a process has
    locked it; None if unknown. versions: the versions of the shards' JSONs, if the store has
    versions; claims are included here, but not in `files`. outline: describes the first shards if
    their JSONs were not read; `commits` then lacks these shards.
    """

    metadata: dict[str, Any] | None = None
    commits: dict[int, Commit] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    local: bool = True
    locked: bool | None = None
    versions: dict[str, str] = field(default_factory=dict)
    outline: Outline = field(default_factory=Outline)

    @cached_property
    def identity(self) -> Identity | None:
        """The identity of the run; None without metadata."""
        return None if self.metadata is None else identity_of(self.metadata, self.url)

    @property
    def run(self) -> str | None:
        """The digest of the run's identity, as the commits record it."""
        return None if self.metadata is None else run_of(self.metadata["identity"])

    @property
    def in_order(self) -> list[Commit]:
        """The commits in the order of their numbers."""
        return [self.commits[number] for number in sorted(self.commits)]

    @cached_property
    def totals(self) -> Totals:
        """The totals of all shards."""
        totals = self.outline.totals.copy()
        for commit in self.in_order:
            totals.add(commit)
        return totals

    def has(self, commit: Commit) -> bool:
        """Returns whether this commit's shard is here, with its full size."""
        return self.files.get(commit.file) == commit.bytes

    @property
    def in_bucket(self) -> bool:
        """Whether runs upload to this folder. If so, it has all shards, and nobody locks it."""
        remote = (self.metadata or {}).get("remote") or ""
        return not self.local or local_path(remote) == local_path(self.url)

    def missing(self) -> tuple[list[range], list[int], list[int]]:
        """Returns the numbers of three kinds of incomplete shards.

        The first are ranges of shards without a JSON (there may be any number of them), then shards
        without a file of the right size, then shards without their statistics or table of samples.
        All are empty if the shards were uploaded from here to a bucket.
        """
        metadata = self.metadata or {}
        if metadata.get("remote") is not None and not self.in_bucket:
            return [], [], []
        first_shards = self.outline.shards
        last = max([metadata.get("shards", 0), first_shards, *self.commits])
        without_json = gaps([first_shards, *sorted(self.commits), last + 1])
        without_file = [commit.number for commit in self.in_order if not self.has(commit)]
        incomplete = [
            number
            for number in sorted(self.commits)
            if any(name not in self.files for name in names_beside(number))
        ]
        return without_json, without_file, incomplete


def gaps(numbers: Iterable[int]) -> list[range]:
    """Returns the ranges of numbers that are missing between ascending ones."""
    return [range(a + 1, b) for a, b in pairwise(numbers) if b > a + 1]


def identity_of(metadata: Mapping[str, Any], where: str) -> Identity:
    """Returns the identity that metadata.json records. Raises DamagedError if it cannot be read."""
    return Identity.from_json(metadata.get("identity"), where)


def is_commit(name: str) -> bool:
    """Returns whether this is the name of a shard's JSON."""
    return re.fullmatch(rf"shard_{SHARD_NUMBER}\.json", name) is not None


def own_files(names: Iterable[str]) -> list[str]:
    """Returns those of `names` that an extraction uses, JSON files first.

    If files are deleted in this order, the remaining ones never look like a whole extraction.
    """
    matching = [name for name in sorted(names) if OWN_FILES.fullmatch(name)]
    return sorted(matching, key=lambda name: not name.endswith(".json"))


def read_stored(folder: Folder, brief: bool = False) -> Stored:
    """Reads the JSON files of a folder, many at a time; `Stored.damaged` names unreadable ones.
    Raises InputError for a run of int8, which earlier versions stored.

    brief: skips, in a bucket, the JSON files that are covered by an outline. metadata.json is then
    read before the folder is listed, so the listing must have every file that the outline counts.
    """
    first_read = folder.read_sealed(METADATA) if brief and not folder.local else None
    listing = folder.listing()
    files = {name: entry.size for name, entry in listing.items()}
    versions = {
        name: entry.version
        for name, entry in listing.items()
        if is_commit(name) and entry.version is not None
    }
    names = [name for name in own_files(files) if name.endswith(".json") and name[0] != "."]
    metadata, outline = _valid_outline(first_read, f"{folder.url}/{METADATA}", files)
    has_outline = metadata is not None
    commits: dict[int, Commit] = {}
    if has_outline:
        commits = {commit.number: commit for commit in outline.fitting_partial(files)}
        covered = {METADATA, *map(commit_name, [*range(1, outline.shards + 1), *commits])}
        names = [name for name in names if name not in covered]
    damaged: dict[str, str] = {}
    with ThreadPoolExecutor(READERS) as pool:
        for name, data in zip(names, pool.map(folder.read_sealed, names), strict=True):
            if data is None:  # deleted by a run in the meantime
                continue
            try:
                if name == METADATA:
                    metadata = _read_metadata(data, f"{folder.url}/{name}")
                elif (commit := _read_commit(data, name, f"{folder.url}/{name}")) is None:
                    del files[name]
                else:
                    commits[commit.number] = commit
            except DamagedError as error:
                damaged[name] = str(error)
    return Stored(
        metadata,
        commits,
        files,
        damaged,
        dict(outline.metrics) if has_outline else _last_metrics(folder, files),
        folder.url,
        folder.local,
        versions=versions,
        outline=outline,
    )


def _valid_outline(
    data: bytes | None, where: str, files: Mapping[str, int]
) -> tuple[dict[str, Any] | None, Outline]:
    """Returns the metadata and its outline; None and an empty outline if they are missing or
    damaged, or if they disagree with the files."""
    with suppress(DamagedError):
        metadata = None if data is None else _read_metadata(data, where)
        recorded = {} if metadata is None else metadata.get("outline", {})
        outline = Outline() if metadata is None else Outline.from_json(recorded, where)
        if outline.fits(files):
            return metadata, outline
    return None, Outline()


def _read_metadata(data: bytes, where: str) -> dict[str, Any]:
    content = unseal(data, where)
    if CLAIM in content:
        raise DamagedError(
            f"{where}: --overwrite has begun to delete what is here and did not end; start it again"
        )
    if content.get("format_version") != FORMAT_VERSION:
        raise DamagedError(f"{where}: {OTHER_VERSION}")
    if missing := [key for key in REQUIRED if key not in content]:
        raise DamagedError(f"{where}: lacks {', '.join(missing)}")
    if identity_of(content, where).activation_dtype == "int8":
        raise InputError(
            f"{where}: its activations are stored as int8, which this version neither reads nor "
            "continues"
        )
    return content


def _read_commit(data: bytes, name: str, where: str) -> Commit | None:
    """Reads the JSON of a shard; returns None for a claim."""
    content = unseal(data, where)
    if CLAIM in content:
        return None
    commit = Commit.from_json(content, where)
    if str(commit.file).split(".")[0] != name.removesuffix(".json"):
        raise DamagedError(f"{where}: describes {commit.file}, expected the shard of its own name")
    return commit


def _last_metrics(folder: Folder, files: Mapping[str, int]) -> dict[str, Any]:
    """Returns the last complete line of metrics.jsonl, which is only for the user to see."""
    size = files.get(METRICS, 0)
    tail = folder.read(METRICS, start=-min(size, METRICS_TAIL)) if size else None
    for line in reversed((tail or b"").splitlines()):
        with suppress(ValueError, RecursionError):
            metrics = json.loads(line)
            if isinstance(metrics, dict):
                return numbers_of(metrics)
    return {}


def read_metadata(folder: Folder) -> dict[str, Any] | None:
    """Returns the content of metadata.json; None if it is missing or damaged, or if it is a claim.

    --verify reports a damaged one.
    """
    content = _unsealed(folder, METADATA)
    return None if content is None or CLAIM in content else content


def read_owner(folder: Folder) -> str | None:
    """Returns the process that owns a folder according to metadata.json; None if it names none."""
    content = _unsealed(folder, METADATA) or {}
    return content.get(CLAIM, content.get("owner"))


def check_own(folder: Folder) -> None:
    """Raises InputError if --overwrite would delete or replace files of somebody else.

    A file whose name fits belongs to an extraction if there is a sound metadata.json beside it, or
    if the JSON of a shard names it.
    """
    names = [name for name in own_files(folder.files()) if name[0] != "."]
    if not names or _unsealed(folder, METADATA) is not None:
        return
    known: set[str] = set()
    for name in filter(is_commit, names):
        content = _unsealed(folder, name)
        if content is not None:
            known |= {name, str(content.get("file")), *names_beside(number_of(name))}
    if known:
        known |= {METADATA, METRICS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(
            f"{folder.url}: --overwrite: {unknown[0]} may not be of this program: there is no "
            f"sound {METADATA}, and no JSON of a shard names it; move it, or give another folder"
        )


def _unsealed(folder: Folder, name: str) -> dict[str, Any] | None:
    """Returns the content of a sealed JSON; None if it is missing or damaged."""
    data = folder.read_sealed(name)
    with suppress(DamagedError):
        return None if data is None else unseal(data, name)
    return None
