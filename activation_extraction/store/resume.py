"""Where a run stands when it starts: what is stored already, whether the same run stored it, and
what is still to be uploaded. Only reads; every refusal comes from here, before anything expensive.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import counted
from activation_extraction.store.commit import FORMAT_VERSION, OTHER_VERSION, Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Difference, Identity
from activation_extraction.store.metadata import (
    METADATA,
    Stored,
    own_files,
    owner_of,
    read_stored,
)
from activation_extraction.store.plan import ShardRange, StoragePlan
from activation_extraction.store.sealed_json import REPAIRS

ANOTHER = (
    "continue it with the version that began it, give another folder, or --overwrite to start anew"
)
OPTIONS = "give the same flags as before, another folder, or --overwrite to start anew"


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
        """Reads the JSON files."""
        local = f"--output_dir {self.folder.url}"
        if self.remote is None:
            stored = read_stored(self.folder)
            return self._plan(local, stored, None)
        owner = owner_of(self.remote)
        stored = read_stored(self.remote, brief=True)
        self._check_local(local, read_stored(self.folder))
        return self._plan(self.remote.url, stored, owner)

    def _plan(self, where: str, stored: Stored, owner: str | None) -> StoragePlan:
        """Raises InputError if nothing may be added, because another run is stored there, or
        because what is stored is damaged or has gaps."""
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


def take_up(
    where: str, stored: Stored, max_samples: int | None, more_rows: bool = False
) -> StoragePlan:
    """Plans what is to be stored after what is stored already.

    where: names the folder in messages. more_rows: as in ResumePlanner. Raises InputError.
    """
    commits = _without_gaps(where, stored)
    plan = StoragePlan(commits, outline=stored.outline)
    count = plan.samples
    if max_samples is not None and count > max_samples:
        raise InputError(
            f"--max_samples: {where} already holds {counted(count, 'sample')}, more than the "
            f"{max_samples} that this host may store; {OPTIONS}"
        )
    told = stored.metadata or {}
    asked = ("complete", max_samples, count)
    more = more_rows and count != max_samples
    if not more and (told.get("status"), told.get("max_samples"), told.get("samples")) == asked:
        rows = {name: told.get(name, 0) for name in ("skipped_rows", "empty_rows")}
        return replace(plan, ranges=(), settled=True, **rows)
    if commits and commits[-1].partial:
        commits.pop()
    return replace(plan, ranges=(ShardRange(plan.shards + 1, plan.last),))


def _without_gaps(where: str, stored: Stored) -> list[Commit]:
    """The commits after the outline. Raises InputError if one or its file is missing."""
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
    return commits


def check_identity(place: str, stored: Stored, identity: Identity) -> None:
    for why in stored.damaged.values():
        raise InputError(f"{why}; {ANOTHER if OTHER_VERSION in why else REPAIRS}")
    if stored.metadata is None:
        if any(name.startswith("shard_") for name in own_files(stored.files)):
            raise InputError(
                f"{place}: already holds shards, but no {METADATA}; --repair makes it again; or "
                "give another folder"
            )
        return
    check_same_run(place, stored, identity)


def check_same_run(place: str, stored: Stored, identity: Identity) -> None:
    """Raises InputError if a folder, which must have metadata, holds anything of another run."""
    assert stored.metadata is not None and stored.identity is not None
    check_version(place, stored.metadata)
    refuse_difference(place, identity.compare(stored.identity))
    for commit in stored.commits.values():
        if commit.run != stored.run:
            raise InputError(f"{place}: {commit.name} belongs to another run; {OPTIONS}")


def check_version(place: str, metadata: Mapping[str, Any]) -> None:
    """Raises InputError if what is stored has another form than what would be added to it."""
    found = metadata.get("format_version")
    if found != FORMAT_VERSION:
        raise InputError(
            f"{place}: holds an extraction in format {found}, but this program writes format "
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


def refuse_difference(place: str, found: Difference | None) -> None:
    """Raises InputError if the identity that was found is another run's."""
    if found is not None:
        raise InputError(
            f"{place}: already holds an extraction with another {found.name}: "
            f"{_short(found.before)}, now {_short(found.now)}; {OPTIONS}"
        )


def _short(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"digest {text[:12]}" if re.fullmatch("[0-9a-f]{64}", text) else f"{text:.100}"
