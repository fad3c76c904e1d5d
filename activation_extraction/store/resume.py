"""Where a run stands when it starts: what is stored already, whether the same run stored it, and
what is still to be stored.

A StoragePlan says so. A run that begins or continues has one range of shards, up to the end of the
data; a repair has one for each gap. Planning only reads; every refusal comes from here, before
anything expensive.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import counted
from activation_extraction.store.commit import (
    FORMAT_VERSION,
    METADATA,
    OTHER_VERSION,
    Commit,
    Outline,
)
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Difference, Identity
from activation_extraction.store.metadata import Stored, own_files, owner_of, read_stored
from activation_extraction.store.sealed_json import REPAIRS
from activation_extraction.text.batch import Cursor

ANOTHER = (
    "continue it with the version that began it, give another folder, or --overwrite to start anew"
)
OPTIONS = "give the same flags as before, another folder, or --overwrite to start anew"


@dataclass(frozen=True)
class ShardRange:
    """Shards to store, from `first` to `last`; last is None if the data decides how many there are.

    before: the shard before them; None at the beginning of the data. until: the end of the range;
    their samples have a smaller `sample_idx`, all later samples do not. partial: whether the last
    of them is cut before it is full.
    """

    first: int = 1
    before: Commit | None = None
    last: int | None = None
    until: int | None = None
    partial: bool = True

    @property
    def cursor(self) -> Cursor | None:
        """Where in the data they begin; None at its beginning."""
        return None if self.before is None else self.before.position

    @property
    def sample_before(self) -> int:
        """The `sample_idx` just before theirs; -1 at the beginning of the data."""
        return -1 if self.before is None else self.before.last


@dataclass(frozen=True)
class StoragePlan:
    """What is stored and stays, and what is still to be stored.

    commits: the shards that stay. outline: of the bucket's first shards, if their JSONs were not
    read; `commits` lacks these. ranges: what is to be stored, in the order of the data. obsolete:
    names of files to delete. settled: nothing is left to do, not even an update of metadata.json.
    skipped_rows, empty_rows: those of a complete extraction, rows after its last sample too.
    versions: those of the JSONs in the bucket when the plan was made. owner: the one that its
    metadata.json named just before. For a repair, `recorded` is the metadata, of which only the
    totals change, and `expected` has the shards as they were, by number.
    """

    commits: list[Commit] = field(default_factory=list)
    ranges: tuple[ShardRange, ...] = (ShardRange(),)
    obsolete: tuple[str, ...] = ()
    settled: bool = False
    skipped_rows: int = 0
    empty_rows: int = 0
    recorded: Mapping[str, Any] | None = None
    expected: Mapping[int, Commit] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    outline: Outline = field(default_factory=Outline)
    owner: str | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing is left to compute."""
        return not self.ranges

    @property
    def shards(self) -> int:
        """How many are stored and stay."""
        return self.outline.shards + len(self.commits)

    @property
    def samples(self) -> int:
        """How many samples these have."""
        return self.outline.totals.samples + sum(commit.count for commit in self.commits)

    @property
    def tokens(self) -> int:
        """How many tokens these have."""
        return self.outline.totals.tokens + sum(commit.tokens for commit in self.commits)

    @property
    def next(self) -> ShardRange:
        """The first range to store; where nothing is left, the empty one after what is stored."""
        last = next(reversed([*self.outline.recent, *self.commits]), None)
        return next(iter(self.ranges), ShardRange(self.shards + 1, last))


class Planner(Protocol):
    """Finds out what is to be stored. Raises InputError if nothing may be added."""

    def look(self) -> StoragePlan:
        """Called before anything is written."""
        ...

    def look_again(self, plan: StoragePlan) -> StoragePlan:
        """Called once this process holds the folder: others may have written to it until then."""
        ...


@dataclass(frozen=True)
class ResumePlanner:
    """Plans a run that begins, or continues what is stored.

    folder: the local one. remote: the one in the bucket, which then is the one that counts.
    more_rows: the data has new rows at its end.
    """

    folder: Folder
    remote: Folder | None
    identity: Identity
    max_samples: int | None
    more_rows: bool = False

    def look(self) -> StoragePlan:
        """Reads the JSON files. Raises InputError if nothing may be added, because another run is
        stored there, or because what is stored is damaged or has gaps."""
        where, owner = f"--output_dir {self.folder.url}", None
        if self.remote is None:
            stored = read_stored(self.folder)
        else:
            owner = owner_of(self.remote)
            stored = read_stored(self.remote, brief=True)
            self._check_local(where, read_stored(self.folder))
            where = self.remote.url
        check_identity(where, stored, self.identity)
        if self.remote is None:
            refuse_moved(where, stored, "continue")
        plan = take_up(where, stored, self.max_samples, self.more_rows)
        return replace(plan, versions=stored.versions, owner=owner)

    def _check_local(self, where: str, stored: Stored) -> None:
        """Raises InputError if the metadata of another run, or of shards that are nowhere else,
        would be overwritten."""
        assert self.remote is not None
        check_identity(where, stored, self.identity)
        uploaded = (stored.metadata or {}).get("remote")
        if uploaded not in (None, self.remote.url):
            raise InputError(
                f"{where}: its shards were uploaded to {uploaded}, not to {self.remote.url}; give "
                "the same --gcs_bucket and --gcs_prefix as before, or another --output_dir"
            )
        if stored.commits and uploaded is None:
            raise InputError(
                f"{where}: holds {counted(len(stored.commits), 'shard')} not in the bucket; "
                "continue without --upload_to_gcs, or give another --output_dir: if you copy this "
                "folder to the bucket first, the copy is continued"
            )

    def look_again(self, plan: StoragePlan) -> StoragePlan:
        """Another process may have stored more, or everything."""
        return self.look()


def take_up(where: str, stored: Stored, max_samples: int | None, more_rows: bool) -> StoragePlan:
    """Plans what is to be stored after what is stored already.

    where: names the folder in messages. more_rows: as in ResumePlanner. Raises InputError if a
    shard or its file is missing, or if there is more than may be stored.
    """
    commits = stored.in_order
    for due, commit in enumerate(commits, stored.outline.shards + 1):
        if commit.number != due:
            raise InputError(
                f"{where}: shard {due} is missing, but shard {commit.number} is there; --repair "
                "makes the missing one again"
            )
        if not stored.has(commit):
            raise InputError(
                f"{where}: shard {due} has a JSON, but its file is missing or has another size "
                "(--verify says which); --repair makes it again"
            )
    plan = StoragePlan(commits, ranges=(), outline=stored.outline)
    count, metadata = plan.samples, stored.metadata or {}
    if max_samples is not None and count > max_samples:
        raise InputError(
            f"--max_samples: {where} already holds {counted(count, 'sample')}, more than the "
            f"{max_samples} that this host may store; {OPTIONS}"
        )
    asked = {"status": "complete", "max_samples": max_samples, "samples": count}
    more = more_rows and count != max_samples
    if not more and all(metadata.get(name) == value for name, value in asked.items()):
        rows = {name: metadata.get(name, 0) for name in ("skipped_rows", "empty_rows")}
        return replace(plan, settled=True, **rows)
    if commits and commits[-1].partial:
        commits.pop()
    return replace(plan, ranges=(plan.next,))


def check_identity(where: str, stored: Stored, identity: Identity) -> None:
    """Raises InputError if what a folder holds, if anything, is damaged or of another run."""
    for why in stored.damaged.values():
        raise InputError(f"{why}; {ANOTHER if OTHER_VERSION in why else REPAIRS}")
    if stored.metadata is not None:
        check_same_run(where, stored, identity)
    elif any(name.startswith("shard_") for name in own_files(stored.files)):
        raise InputError(
            f"{where}: already holds shards, but no {METADATA}; --repair makes it again; or "
            "give another folder"
        )


def check_same_run(where: str, stored: Stored, identity: Identity) -> None:
    """Raises InputError if a folder, which must have metadata, holds anything of another run."""
    assert stored.identity is not None
    refuse_difference(where, identity.compare(stored.identity))
    for commit in stored.commits.values():
        if commit.run != stored.run:
            raise InputError(f"{where}: {commit.name} belongs to another run; {OPTIONS}")


def check_version(where: str, metadata: Mapping[str, Any]) -> None:
    """Raises InputError if what is stored has another form than what would be added to it."""
    found = metadata.get("format_version")
    if found != FORMAT_VERSION:
        raise InputError(
            f"{where}: holds an extraction in format {found}, but this program writes format "
            f"{FORMAT_VERSION}; {ANOTHER}"
        )


def refuse_moved(where: str, stored: Stored, purpose: str) -> None:
    """Raises InputError if the shards of a local folder are in a bucket.

    purpose: what the bucket's flags are to be given for.
    """
    remote = (stored.metadata or {}).get("remote")
    if remote is not None and not stored.in_bucket:
        raise InputError(
            f"{where}: its shards were uploaded to {remote}; to {purpose}, give --upload_to_gcs, "
            "--gcs_bucket and --gcs_prefix as before"
        )


def refuse_difference(where: str, found: Difference | None) -> None:
    """Raises InputError if the identity that was found is another run's."""
    if found is not None and found.name == "integer_hooks":
        hook = next(iter({*found.before} ^ {*found.now}))
        raise InputError(
            f"{where}: already holds an extraction by another version, which does not store "
            f"{hook} as this one does, in integers; {ANOTHER}"
        )
    if found is not None:
        raise InputError(
            f"{where}: already holds an extraction with another {found.name}: "
            f"{_short(found.before)}, now {_short(found.now)}; {OPTIONS}"
        )


def _short(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"digest {text[:12]}" if re.fullmatch("[0-9a-f]{64}", text) else f"{text:.100}"
