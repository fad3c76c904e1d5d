"""--repair remakes the shards that --verify finds damaged or missing, and no others.

The JSON of the last good shard before a gap records where in the data to start, so the same batches
are formed and the same bytes are stored. As always when a shard is replaced, its JSON is deleted
first and written last, so a repair that is killed leaves a gap for the next one to find.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from activation_extraction.common.errors import InputError
from activation_extraction.common.log import log
from activation_extraction.inspect.verify import check_shards, total_problems
from activation_extraction.store.commit import FORMAT_VERSION, METADATA, Commit, number_of
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import (
    EMPTY_TOTALS,
    Stored,
    gaps,
    own_files,
    read_owner,
    read_stored,
)
from activation_extraction.store.resume import (
    ShardRange,
    StoragePlan,
    check_identity,
    check_same_run,
    refuse_moved,
)

# A rebuilt metadata.json says this at first; the next run without --repair continues from there.
REBUILT = {"status": "interrupted", **EMPTY_TOTALS}


def find_gaps(stored: Stored, good: set[int], stride: int) -> tuple[ShardRange, ...]:
    """Returns the gaps in a folder, each with its end if the metadata or a JSON file records it.

    good: numbers of the intact shards. stride: the number of hosts of all machines together.
    """
    assert stored.metadata is not None
    most = max([stored.metadata["shards"], *stored.commits])  # metadata.json may say any number
    ranges = []
    for gap in gaps([0, *sorted(good), most + 1]):
        first, last = gap.start, gap.stop - 1
        own, following = stored.commits.get(last), stored.commits.get(last + 1)
        until, partial = stored.metadata["samples"] * stride, True
        if following is not None:
            until, partial = following.first, False
        elif own is not None:
            until, partial = own.last + 1, own.partial
        ranges.append(ShardRange(first, stored.commits.get(first - 1), last, until, partial))
    return tuple(ranges)


@dataclass
class RepairPlanner:
    """Plans the repair of one host's folder: one range of shards for each gap.

    folder: the local one. remote: the one in the bucket; None without upload. metadata: what a run
    with these flags would record. Its methods raise InputError if the folder holds nothing, or
    another run.
    """

    folder: Folder
    remote: Folder | None
    identity: Identity
    metadata: Mapping[str, Any]
    _before: Stored = field(default_factory=Stored)
    _owner: str | None = None

    @property
    def target(self) -> Folder:
        """Returns the folder to repair."""
        return self.remote or self.folder

    def plan(self) -> StoragePlan:
        """Reads every shard to find the damaged ones."""
        self._owner = read_owner(self.target)
        self._before = before = read_stored(self.target)
        stored = before if before.metadata is not None else self._with_new_metadata(before)
        check_same_run(self.target.url, stored, self.identity)
        self._check_local(stored)
        log.info("looking for damaged shards")
        checked = check_shards(self.target, {"": stored})
        good = {shard.commit.number for shard in checked if not shard.problems}
        ranges = find_gaps(stored, good, self.identity.total_machines * self.identity.num_hosts)
        commits = [stored.commits[number] for number in sorted(good)]
        obsolete = tuple(self._obsolete_files(ranges))
        # A repair that was killed leaves a complete run with wrong totals.
        metadata = before.metadata
        finished = metadata is not None and metadata["status"] == "complete"
        miscounted = finished and any(total_problems(commits, metadata or {}))
        return StoragePlan(
            commits,
            ranges,
            obsolete=obsolete,
            up_to_date=not (ranges or obsolete or miscounted) and metadata is not None,
            recorded=REBUILT if metadata is None else metadata,
            expected=stored.commits,
            versions=stored.versions,
            owner=self._owner,
        )

    def plan_again(self, plan: StoragePlan) -> StoragePlan:
        """Raises InputError if another process has changed the folder since it was checked."""
        now = read_stored(self.target)
        same = (now.metadata, now.commits) == (self._before.metadata, self._before.commits)
        if not same or read_owner(self.target) != self._owner:
            raise InputError(
                f"{self.target.url}: another process has written to it during the check; "
                "start --repair again once that process has ended"
            )
        if changes := self._changes():
            log.warning("recomputed values may differ in rounding: %s", changes)
        return plan

    def _with_new_metadata(self, stored: Stored) -> Stored:
        if not stored.commits:
            raise InputError(f"{self.target.url}: holds no extraction that --repair could work on")
        log.warning("%s/%s is damaged or missing and is rebuilt", self.target.url, METADATA)
        new = {"format_version": FORMAT_VERSION, "identity": self.identity.to_json()}
        return replace(stored, metadata={**self.metadata, **new, **REBUILT})

    def _check_local(self, stored: Stored) -> None:
        """Raises InputError if the shards are in a bucket, or the metadata is another run's."""
        where = f"--output_dir {self.folder.url}"
        if self.remote is not None:
            check_identity(where, read_stored(self.folder), self.identity)
        else:
            refuse_moved(where, stored, "repair them there")

    def _obsolete_files(self, ranges: tuple[ShardRange, ...]) -> Iterator[str]:
        """Yields the files of those last shards of an unfinished run whose JSON is damaged.

        Nothing says where these shards end. They count as not stored, and the run makes them when
        it continues.
        """
        numbers = {number_of(name) for name in self._before.damaged if name != METADATA}
        numbers -= {n for n in numbers for r in ranges if r.first <= n <= (r.last or 0)}
        for name in own_files(self.target.files()) if numbers else ():
            if name.startswith("shard_") and number_of(name) in numbers:
                yield name

    def differing(self, made: list[Commit]) -> list[str]:
        """Returns a line for each remade shard whose bytes are not those that it had."""
        changes = self._changes() or "with the same batch size, mesh, backend and versions"
        return [
            f"{commit.file}: its bytes are not those that it had; its values may differ in "
            f"rounding: {changes}"
            for commit in made
            if self._before.commits.get(commit.number, commit).sha256 != commit.sha256
        ]

    def _changes(self) -> str:
        """Returns what may round differently than in the run, according to its metadata."""
        before = self._before.metadata
        if before is None:
            return ""

        def settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
            batch_size = metadata.get("configuration", {}).get("batch_size")
            mesh = {axis: size for axis, size in (metadata.get("mesh") or {}).items() if size != 1}
            others = {name: metadata.get(name) for name in ("backend", "versions")}
            return {"batch_size": batch_size, "mesh": mesh, **others}

        was, now = settings(before), settings(self.metadata)
        changed = [name for name in was if was[name] != now[name]]
        return "; ".join(f"{name} is {now[name]}, was {was[name]}" for name in changed)
