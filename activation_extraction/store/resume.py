"""Plans what a run stores: what is there already, whether the same run stored it, what is left.

The result is a StoragePlan. A run that begins or continues has one range of shards to store, up to
the end of the data; a repair has one range for each gap. Planning only reads. It refuses what
cannot be continued, before anything expensive begins.
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
from activation_extraction.store.metadata import Stored, own_files, read_owner, read_stored
from activation_extraction.store.sealed_json import REPAIRS
from activation_extraction.text.batch import Cursor

VERSION_REMEDY = (
    "continue it with the version that began it, give another folder, or --overwrite to start anew"
)
FLAGS_REMEDY = "give the same flags as before, another folder, or --overwrite to start anew"


@dataclass(frozen=True)
class ShardRange:
    """Shards to store, with the numbers from `first` to `last`.

    last: None if the shards go on to the end of the data. before: the shard before the range; None
    at the beginning of the data. until: the first `sample_idx` after the range. partial: whether
    the last shard of the range is cut before it is full.
    """

    first: int = 1
    before: Commit | None = None
    last: int | None = None
    until: int | None = None
    partial: bool = True

    @property
    def cursor(self) -> Cursor | None:
        """Where a run continues that stores the range; None at the beginning of the data. The first
        batches from there may have samples of earlier shards."""
        return None if self.before is None else self.before.position

    @property
    def last_sample_before(self) -> int:
        """The `sample_idx` of the last sample before the range; -1 if there is none."""
        return -1 if self.before is None else self.before.last


@dataclass(frozen=True)
class StoragePlan:
    """The shards that are stored and kept, and the shards that are still to be stored.

    commits: the shards that are kept. outline: describes the bucket's first shards if their JSONs
    were not read; `commits` then lacks these. ranges: the shards to store, in the order of the
    data. obsolete: names of files to delete. up_to_date: whether nothing is left to do, not even an
    update of metadata.json. skipped_rows, empty_rows: the counts of a complete extraction, which
    include rows after its last sample. versions: the versions of the JSONs in the bucket when the
    plan was made. owner: the owner that metadata.json named just before. For a repair, `recorded`
    is the metadata, in which only the totals change, and `expected` maps the numbers of shards to
    their commits as they were.
    """

    commits: list[Commit] = field(default_factory=list)
    ranges: tuple[ShardRange, ...] = (ShardRange(),)
    obsolete: tuple[str, ...] = ()
    up_to_date: bool = False
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
        """How many shards are kept."""
        return self.outline.shards + len(self.commits)

    @property
    def samples(self) -> int:
        """How many samples the kept shards have."""
        return self.outline.totals.samples + sum(commit.count for commit in self.commits)

    @property
    def tokens(self) -> int:
        """How many tokens the kept shards have."""
        return self.outline.totals.tokens + sum(commit.tokens for commit in self.commits)

    @property
    def next(self) -> ShardRange:
        """The first range to store; if none is left, the empty range after the kept shards."""
        last = next(reversed([*self.outline.recent, *self.commits]), None)
        return next(iter(self.ranges), ShardRange(self.shards + 1, last))


class Planner(Protocol):
    """Decides what is to be stored. Raises InputError if nothing may be added."""

    def plan(self) -> StoragePlan:
        """Makes a plan before anything is written."""
        ...

    def plan_again(self, plan: StoragePlan) -> StoragePlan:
        """Plans again once the folder is locked: others may have written to it until then."""
        ...


@dataclass(frozen=True)
class ResumePlanner:
    """Plans a run that begins or continues.

    folder: the local folder. remote: the folder in the bucket; if there is one, it has the shards.
    limits: the most samples and tokens to store, by name. more_rows: whether the data has new rows
    at its end.
    """

    folder: Folder
    remote: Folder | None
    identity: Identity
    limits: Mapping[str, int | None]
    more_rows: bool = False

    def plan(self) -> StoragePlan:
        """Reads the JSON files, and plans. Raises InputError if another run is stored there, or if
        the stored one is damaged or has gaps."""
        where, owner = f"--output_dir {self.folder.url}", None
        if self.remote is None:
            stored = read_stored(self.folder)
        else:
            owner = read_owner(self.remote)
            stored = read_stored(self.remote, brief=True)
            self._check_local(where, read_stored(self.folder))
            where = self.remote.url
        check_identity(where, stored, self.identity)
        if self.remote is None:
            refuse_moved(where, stored, "continue")
        plan = plan_rest(where, stored, self.limits, self.more_rows)
        return replace(plan, versions=stored.versions, owner=owner)

    def _check_local(self, where: str, stored: Stored) -> None:
        """Raises InputError if this would overwrite the metadata of another run, or of shards that
        are not in the bucket."""
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

    def plan_again(self, plan: StoragePlan) -> StoragePlan:
        """Plans from the beginning: another process may have stored more, or everything."""
        return self.plan()


def plan_rest(
    where: str, stored: Stored, limits: Mapping[str, int | None], more_rows: bool
) -> StoragePlan:
    """Plans what is to be stored after the shards that are stored already.

    where: names the folder in messages. limits, more_rows: as in ResumePlanner. Raises InputError
    if a shard or its file is missing, or if more is stored than the limits allow.
    """
    commits = stored.in_order
    for number, commit in enumerate(commits, stored.outline.shards + 1):
        if commit.number != number:
            raise InputError(
                f"{where}: shard {number} is missing, but shard {commit.number} is there; --repair "
                "computes the missing one again"
            )
        if not stored.has(commit):
            raise InputError(
                f"{where}: shard {number} has a JSON, but its file is missing or has another size "
                "(--verify says which); --repair computes it again"
            )
    plan = StoragePlan(commits, ranges=(), outline=stored.outline)
    metadata = stored.metadata or {}
    counts = {"max_samples": plan.samples, "max_tokens": plan.tokens}
    for name, limit in limits.items():
        if limit is not None and counts[name] > limit:
            unit = name.removeprefix("max_").removesuffix("s")
            raise InputError(
                f"--{name}: {where} already holds {counted(counts[name], unit)}, more than the "
                f"{limit} that this host may store; {FLAGS_REMEDY}"
            )
    finished = {"status": "complete", **limits, "samples": plan.samples}
    more = more_rows and all(counts[name] != limit for name, limit in limits.items())
    if not more and all(metadata.get(name) == value for name, value in finished.items()):
        rows = {name: metadata.get(name, 0) for name in ("skipped_rows", "empty_rows")}
        return replace(plan, up_to_date=True, **rows)
    if commits and commits[-1].partial:
        commits.pop()
    return replace(plan, ranges=(plan.next,))


def check_identity(where: str, stored: Stored, identity: Identity) -> None:
    """Raises InputError if a folder holds a damaged extraction or another run."""
    for why in stored.damaged.values():
        raise InputError(f"{why}; {VERSION_REMEDY if OTHER_VERSION in why else REPAIRS}")
    if stored.metadata is not None:
        check_same_run(where, stored, identity)
    elif any(name.startswith("shard_") for name in own_files(stored.files)):
        raise InputError(
            f"{where}: already holds shards, but no {METADATA}; --repair writes it again; or "
            "give another folder"
        )


def check_same_run(where: str, stored: Stored, identity: Identity) -> None:
    """Raises InputError if a folder, which must have metadata, holds another run or its shards."""
    assert stored.identity is not None
    refuse_difference(where, identity.compare(stored.identity))
    for commit in stored.commits.values():
        if commit.run != stored.run:
            raise InputError(f"{where}: {commit.name} belongs to another run; {FLAGS_REMEDY}")


def check_version(where: str, metadata: Mapping[str, Any]) -> None:
    """Raises InputError if an extraction has another format version than this program writes."""
    version = metadata.get("format_version")
    if version != FORMAT_VERSION:
        raise InputError(
            f"{where}: holds an extraction in format {version}, but this program writes format "
            f"{FORMAT_VERSION}; {VERSION_REMEDY}"
        )


def refuse_moved(where: str, stored: Stored, purpose: str) -> None:
    """Raises InputError if the shards of a local folder are in a bucket.

    purpose: says in the message what the user wants to do.
    """
    remote = (stored.metadata or {}).get("remote")
    if remote is not None and not stored.in_bucket:
        raise InputError(
            f"{where}: its shards were uploaded to {remote}; to {purpose}, give --upload_to_gcs, "
            "--gcs_bucket and --gcs_prefix as before"
        )


def refuse_difference(where: str, difference: Difference | None) -> None:
    """Raises InputError if there is a difference between two identities."""
    if difference is not None and difference.name == "integer_hooks":
        hook = next(iter({*difference.before} ^ {*difference.now}))
        raise InputError(
            f"{where}: already holds an extraction by another version, which does not store "
            f"{hook} as this one does, in integers; {VERSION_REMEDY}"
        )
    if difference is not None and difference.before == "attention_mask":
        raise InputError(
            f"{where}: already holds an extraction by another version, whose model read the tokens "
            f"with 0 in --mask_column attention_mask; {VERSION_REMEDY}"
        )
    if difference is not None:
        raise InputError(
            f"{where}: already holds an extraction that differs in {difference.name}: "
            f"{shown(difference.before)}, now {shown(difference.now)}; {FLAGS_REMEDY}"
        )


def shown(value: Any) -> str:
    """Returns a field of an identity as messages show it."""
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return (
        f"digest {text[:12]}" if re.fullmatch("[0-9a-f]{64}", text) else f"{text or 'nothing':.100}"
    )
