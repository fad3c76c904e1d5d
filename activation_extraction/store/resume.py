"""Where a run stands when it starts: what is stored already, whether the same run stored it, and
what is still to be uploaded. Only reads; every refusal comes from here, before anything expensive.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from activation_extraction.common.errors import InputError
from activation_extraction.store.commit import FORMAT_VERSION, Commit, number_of
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Difference, Identity
from activation_extraction.store.metadata import (
    METADATA,
    Stored,
    own_files,
    owner_of,
    read_stored,
)
from activation_extraction.store.outline import Outline
from activation_extraction.store.plan import ShardRange, StoragePlan
from activation_extraction.store.sealed_json import REPAIRS

OPTIONS = "give the same flags as before, another folder, or --overwrite to start anew"


@dataclass(frozen=True)
class ResumePlanner:
    """Plans a run that begins, or continues what is stored.

    folder: the local one. remote: the one in the bucket; None without upload. delete_local: local
    shards are deleted after their upload. more_rows: the data has new rows at its end.
    """

    folder: Folder
    remote: Folder | None
    identity: Identity
    max_samples: int | None
    delete_local: bool
    more_rows: bool = False

    def look(self) -> StoragePlan:
        """Reads the JSON files, local ones and those in the bucket."""
        owner = None if self.remote is None else owner_of(self.remote)
        local = read_stored(self.folder)
        remote = None if self.remote is None else read_stored(self.remote, brief=True)
        places = f"--output_dir {self.folder.url}", self.remote.url if self.remote else ""
        plan = take_up(local, remote, places, self.identity, self.max_samples, self.more_rows)
        if remote is not None:
            plan = replace(plan, versions=remote.versions, owner=owner)
        if remote is None or not self.delete_local:
            return plan
        # A run that was killed after an upload, before the deletion, left these behind.
        uploaded = {c.number for c in plan.commits if c.number not in plan.waiting}
        uploaded |= set(range(1, plan.outline.shards + 1))
        obsolete = [
            (self.folder, name)
            for name in own_files(local.files)
            if name.startswith("shard_") and not name.endswith(".json")
            if number_of(name) in uploaded
        ]
        return replace(plan, obsolete=tuple(obsolete))

    def look_again(self, plan: StoragePlan) -> StoragePlan:
        """Another process may have stored more, or everything."""
        return self.look()


def take_up(
    local: Stored,
    remote: Stored | None,
    places: tuple[str, str],
    identity: Identity,
    max_samples: int | None,
    more_rows: bool = False,
) -> StoragePlan:
    """Compares what is stored, here and in the bucket (None without upload), with the request.

    places: the names of the two in messages. more_rows: as in ResumePlanner. Raises InputError if
    nothing may be added, because another run is stored there, or because what is stored is damaged
    or has gaps.
    """
    both = [local] if remote is None else [local, remote]
    for place, stored in zip(places, both, strict=False):
        _check_identity(place, stored, identity)
    commits, waiting = _choose_all(local, remote, places)
    outline = Outline() if remote is None else remote.outline
    count = outline.totals.samples + sum(commit.count for commit in commits)
    if max_samples is not None and count > max_samples:
        raise InputError(
            f"--max_samples: {places[len(both) - 1]} already holds {count} samples, more than the "
            f"{max_samples} that this host may store; {OPTIONS}"
        )
    more = more_rows and count != max_samples
    complete = [not more and _complete(stored, count, max_samples) for stored in both]
    if any(complete):
        recorded = [s.metadata or {} for s, done in zip(both, complete, strict=True) if done]
        return StoragePlan(
            commits,
            outline=outline,
            ranges=(),
            waiting=frozenset(waiting),
            settled=complete[-1] and not waiting,
            skipped_rows=max(told.get("skipped_rows", 0) for told in recorded),
            empty_rows=max(told.get("empty_rows", 0) for told in recorded),
        )
    if commits and commits[-1].partial:
        waiting.discard(commits.pop().number)
    plan = StoragePlan(commits, waiting=frozenset(waiting), outline=outline)
    return replace(plan, ranges=(ShardRange(plan.shards + 1, plan.last),))


def _choose_all(
    local: Stored, remote: Stored | None, places: tuple[str, str]
) -> tuple[list[Commit], set[int]]:
    """The valid commits after the bucket's outline, and the numbers of those that it lacks."""
    chosen: list[Commit] = []
    waiting: set[int] = set()
    known = 0 if remote is None else remote.outline.shards
    for number in sorted({*local.commits, *(remote.commits if remote else ())}):
        if number <= known:
            continue
        due = known + len(chosen) + 1
        if number != due:
            raise InputError(
                f"{places[0 if remote is None else 1]}: shard {due} is missing, but "
                f"shard {number} is there; --repair makes the missing one again"
            )
        commit, uploaded = _choose(number, local, remote, places)
        chosen.append(commit)
        if remote is not None and not uploaded:
            waiting.add(number)
    return chosen, waiting


def _check_identity(place: str, stored: Stored, identity: Identity) -> None:
    for why in stored.damaged.values():
        raise InputError(f"{why}; {REPAIRS}")
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
            f"{FORMAT_VERSION}; continue it with the version that began it, give another folder, "
            "or --overwrite to start anew"
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


def _choose(
    number: int, local: Stored, remote: Stored | None, places: tuple[str, str]
) -> tuple[Commit, bool]:
    """The valid commit of a shard, and whether it is the bucket's. More samples win."""
    candidates = [
        (stored.commits[number], stored is remote)
        for stored in (remote, local)
        if stored is not None and number in stored.commits and stored.has(stored.commits[number])
    ]
    if candidates:
        return max(candidates, key=lambda candidate: (not candidate[0].partial, candidate[0].count))
    commit = local.commits.get(number)
    if commit is not None and commit.file not in local.files:
        moved = (local.metadata or {}).get("remote")
        if remote is None and moved is not None:
            raise InputError(
                f"{places[0]}: {commit.file} was uploaded to {moved}; to continue, give "
                "--upload_to_gcs, --gcs_bucket and --gcs_prefix as before"
            )
        if remote is not None and moved is not None:
            raise InputError(
                f"{places[1]}: {commit.file} is not there; it was uploaded to {moved} and deleted "
                f"here; {OPTIONS}"
            )
    place = places[0] if remote is None or number not in remote.commits else places[1]
    raise InputError(
        f"{place}: shard {number} has a JSON, but its file is missing or has another size "
        "(--verify says which); --repair makes it again"
    )


def _complete(stored: Stored, samples: int, max_samples: int | None) -> bool:
    told = stored.metadata or {}
    asked = ("complete", max_samples, samples)
    return (told.get("status"), told.get("max_samples"), told.get("samples")) == asked
