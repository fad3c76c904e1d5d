"""LogWriter: this process as the only one that may write to the log of a folder.

run_log.py describes the protocol that it follows. Of several processes that write to one folder,
only the last one to begin may go on.
"""

import os
import platform
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from activation_extraction.common.errors import InputError
from activation_extraction.common.log import log
from activation_extraction.store.folder import ANY, Attempts, ChangedError, Folder, FolderError
from activation_extraction.store.formats import number_of
from activation_extraction.store.hook_values import Key
from activation_extraction.store.identity import Identity, RunFacts
from activation_extraction.store.resume import Planner, StoragePlan
from activation_extraction.store.run_log import (
    FORMAT_VERSION,
    METADATA,
    MOST_BYTES,
    Commit,
    DamagedError,
    RunLog,
    commit_name,
    own_files,
    parse_commit,
    parse_metadata,
    reservation,
    seal,
)
from activation_extraction.store.statistics import Statistics
from activation_extraction.store.totals import Totals


class LostError(InputError):
    """Another process has taken over the folder."""


@dataclass(frozen=True)
class RunDescription:
    """The content of metadata.json that is the same from the beginning of a run to its end.

    Attributes:
        identity: Identity of the run.
        hooks: Full names of the hooks by key.
        limits: Most samples and most tokens to store, by the names in metadata.json; None for no
            limit.
        facts: Further facts about the run and its hooks.
    """

    identity: Identity
    hooks: Mapping[Key, str] = field(default_factory=dict)
    limits: Mapping[str, int | None] = field(default_factory=dict)
    facts: RunFacts = field(default_factory=RunFacts)

    def to_json(self, totals: Totals) -> dict[str, Any]:
        """Returns this content together with the totals of what is stored."""
        hooks = []
        for key, name in self.hooks.items():
            statistics = totals.statistics.get(name, Statistics())
            facts = self.facts.hooks.get(key, {})
            hooks.append({"key": key, "name": name, **facts, **statistics.to_json()})
        sources = self.facts.sources
        return {
            **totals.counts,
            **self.limits,
            "hooks": hooks,
            "identity": self.identity.to_json(),
            "data_files": sources.to_json() if sources else [],
            **self.facts.metadata,
        }


class LogWriter:
    """This process as the writer of one folder.

    Its methods raise LostError once another process has begun there, and FolderError for a request
    that fails.

    Args:
        folder: The folder, local or in a bucket.
        description: The description of the run.
        local: The local folder with a copy of metadata.json, to which files are written without
            conditions. None if `folder` is local itself.
        keeps_shards: Whether the local folder has a copy of the shards, too.

    Attributes:
        folder: The folder.
        id: Id of this process.
        run: Id of the run; "" until this process has begun.
        began: Unix time at which this process began.
        made: Commits of this process, in order.
        totals: Totals of everything that is stored, also by earlier processes.
    """

    def __init__(
        self,
        folder: Folder,
        description: RunDescription,
        local: Folder | None = None,
        keeps_shards: bool = False,
    ) -> None:
        self.folder = folder
        self.id = _new_id()
        self.run = ""
        self.began = round(time.time(), 3)
        self.made: list[Commit] = []
        self._description = description
        self._local = local
        self._keeps_shards = keeps_shards
        self._reserved = ""
        self.follow(StoragePlan())

    def follow(self, plan: StoragePlan) -> None:
        """Resets the totals to what earlier processes have stored."""
        self._plan = plan
        self.totals = plan.totals

    def take_over(self, planner: Planner, overwrite: bool) -> StoragePlan:
        """Makes this process the owner of the folder, and reserves the first shard to store.

        All steps begin again whenever another process has written in between.

        Args:
            planner: Function that plans what to store, given the log of the folder.
            overwrite: Whether a new run begins, whatever is stored.

        Returns:
            The plan to follow. If it is up to date, nothing was written.

        Raises:
            InputError: Nothing may be added to what is stored there.
        """
        new_run = uuid.uuid4().hex
        while True:
            stored = RunLog.read(self.folder)
            begins_anew = overwrite and self.run != new_run
            self.follow(StoragePlan() if begins_anew else planner(stored))
            if self._plan.up_to_date:
                return self._plan
            if not self.begin(self._plan.run or new_run, stored.version):
                continue
            stored = RunLog.read(self.folder)
            bad_entries: dict[int, str | None] = {}
            if overwrite:  # unreadable entries cannot belong to the new run
                names = [name for name in stored.damaged if name != METADATA]
                bad_entries = {number_of(name): stored.versions[name] for name in names}
                stored = replace(stored, damaged={})
            self.follow(planner(stored))
            if self._plan.repair is not None:
                bad_entries |= self._plan.repair.withdrawn
            if not all(self.withdraw(*entry) for entry in bad_entries.items()):
                continue  # something else stands there now: it is read and checked, too
            if self._plan.complete or self.reserve(self._plan.next):
                return self._plan

    def begin(self, run: str, version: str | None) -> bool:
        """Writes the first metadata.json of this process.

        Args:
            run: Id of the run.
            version: Version of the metadata.json that the process has read; None if there was none.

        Returns:
            False if another process has written or deleted it since.
        """
        self.began = round(time.time(), 3)
        data = self._metadata(run, "running")
        patience = self.folder.patience_for(data)
        attempts = Attempts(self.folder, f"writing {METADATA}", patience)
        while True:
            try:
                self.folder.write(METADATA, data, version, patience)
                break
            except ChangedError as error:
                standing = self.folder.read_with_version(METADATA, most=MOST_BYTES)
                if standing is not None and standing[0] == data:
                    break
                if (standing and standing[1]) != version:
                    return False
                attempts.failed(error)
        self.run = run
        if self._local is not None:
            self._local.write(METADATA, data, ANY)
        return True

    def write_metadata(self, status: str, upload: bool = True) -> None:
        """Replaces metadata.json.

        Args:
            status: Status of the run: "complete", "interrupted" or "failed".
            upload: Whether to write it to a bucket as well.
        """
        data = self._metadata(self.run, status)
        if self._local is not None:
            self._local.write(METADATA, data, ANY)
        if upload or self._local is None:
            self._write(METADATA, data, lambda standing: standing == data)

    def _metadata(self, run: str, status: str) -> bytes:
        """Returns the content of metadata.json."""
        content = {
            "format_version": FORMAT_VERSION,
            "status": status,
            **self._description.to_json(self.totals),
            "written": round(time.time(), 3),
            "remote": None if self._local is None else self.folder.url,
        }
        if self._plan.repair is not None:
            content = self._plan.repair.revised(content)
        return seal({**content, "run": run, "owner": self.id})

    def check(self, owner: str | None = None) -> None:
        """Raises LostError unless this process is the owner.

        Args:
            owner: Owner that a commit names. None for the owner that metadata.json names now.
        """
        if owner is None:
            owner = self._owner_in_metadata()
        if owner != self.id:
            raise LostError(
                f"{self.folder.url}: {owner or 'somebody who left no name'} has taken over, so "
                "this process stops; what it has committed is safe; give each machine a "
                "--machine_id of its own"
            )

    def _owner_in_metadata(self) -> str:
        """Returns the id of the process that metadata.json names.

        Raises:
            LostError: metadata.json is gone or damaged, or names no process.
        """
        where = f"{self.folder.url}/{METADATA}"
        data = self.folder.read(METADATA, most=MOST_BYTES)
        if data is None:
            state = f"{where}: is gone"
        else:
            try:
                owner = parse_metadata(data, where).get("owner")
            except DamagedError as error:
                state = str(error)
            else:
                if owner:
                    return owner
                state = f"{where}: names no owner"
        raise LostError(
            f"{state}; so this process cannot know whether the folder is still its own, and stops; "
            "find out who changed or deleted the file; --repair writes it again"
        )

    def write_file(self, name: str, parts: Sequence[bytes | memoryview]) -> str | None:
        """Writes a file of a shard.

        Args:
            name: Name of the file.
            parts: Content of the file, in pieces.

        Returns:
            The version of the file; None if the store has no versions.
        """
        if self._local is not None and self._keeps_shards:
            self._local.write(name, parts, ANY)
        return self._write(name, parts)[1]

    def reserve(self, number: int) -> bool:
        """Reserves the number of the first shard to store.

        Args:
            number: Number of the shard.

        Returns:
            False if the run has committed that shard in the meantime.
        """
        self._reserved = commit_name(number)
        return self._write_json(self._reserved, reservation(self.run, self.id)) is None

    def withdraw(self, number: int, version: str | None) -> bool:
        """Replaces the entry of a bad shard by a reservation.

        Args:
            number: Number of the shard.
            version: Version of the entry that was checked; None if there was none.

        Returns:
            False if something else stands there now, such as a commit that has landed since. It has
            to be checked, too, before it may be withdrawn.
        """
        name = commit_name(number)
        data = seal(reservation(self.run, self.id))
        patience = self.folder.patience_for(data)
        attempts = Attempts(self.folder, f"writing {name}", patience)
        while True:
            standing = self.folder.read_with_version(name, most=MOST_BYTES)
            if standing is not None and standing[0] == data:
                return True
            self.check()
            if (standing and standing[1]) != version:
                return False
            try:
                self.folder.write(name, data, version, patience)
                return True
            except ChangedError as error:  # or nobody knows whether it was written
                attempts.failed(error)

    def commit(self, commit: Commit) -> Commit:
        """Writes the entry of a shard, after all of its files, and counts the shard.

        Args:
            commit: The commit, without `run`, `owner` and `url`.

        Returns:
            The commit that was written.
        """
        commit = replace(commit, run=self.run, owner=self.id, url=self.folder.url)
        if self._local is not None and self._keeps_shards:
            self._local.write(commit.name, seal(commit.to_json()), ANY)
        standing = self._write_json(commit.name, commit.to_json())
        if standing is not None:
            self.check(standing.owner)
        self.made.append(commit)
        self.totals.add(commit)
        return commit

    def _write_json(self, name: str, content: Mapping[str, Any]) -> Commit | None:
        """Writes an entry, unless a commit of this run stands there, which may not be replaced.

        Returns:
            The commit that stands there; None if the entry was written.
        """
        data = seal(content)

        def is_settled(standing: bytes) -> bool:
            return standing == data or self._commit_in(standing) is not None

        standing, _ = self._write(name, data, is_settled)
        return None if standing is None else self._commit_in(standing)

    def _commit_in(self, data: bytes) -> Commit | None:
        """Returns the commit in an entry; None if the entry is not a commit of this run."""
        with suppress(DamagedError):
            commit = parse_commit(data, "")
            return commit if commit is not None and commit.run == self.run else None
        return None

    def _write(
        self,
        name: str,
        parts: bytes | Sequence[bytes | memoryview],
        is_settled: Callable[[bytes], bool] | None = None,
    ) -> tuple[bytes | None, str | None]:
        """Writes a file in the one order of every write (run_log.py), until it succeeds.

        Args:
            name: Name of the file.
            parts: Content of the file, or its pieces.
            is_settled: Function that gets the current content of the file, and returns whether that
                must stay. None for a file of a shard, which is replaced whatever it contains.

        Returns:
            The content that stays, or None if the file was written; and the version of the file.
        """
        patience = self.folder.patience_for(parts)  # one for all attempts
        attempts = Attempts(self.folder, f"writing {name}", patience)
        while True:
            if is_settled is None:
                entry = self.folder.head(name)
                version = entry and entry.version
            else:
                standing = self.folder.read_with_version(name, most=MOST_BYTES)
                if standing is not None and is_settled(standing[0]):
                    return standing
                version = standing and standing[1]
            self.check()
            try:
                return None, self.folder.write(name, parts, version, patience)
            except ChangedError as error:
                attempts.failed(error)

    def finish(self, complete: bool) -> None:
        """Writes the last metadata.json of this process, after all commits.

        Args:
            complete: Whether the run is complete. Files that belong to no commit are deleted then.

        Raises:
            FolderError: A committed file of a complete run is missing or has changed.
        """
        if complete:
            self._remove_uncommitted()
        self.write_metadata("complete" if complete else "interrupted")

    def _remove_uncommitted(self) -> None:
        """Deletes the files of shards that belong to no commit of the run.

        It warns of files that the store may not have deleted, then checks the committed files.

        Raises:
            FolderError: A committed file is missing or has changed.
        """
        commits = [*self._plan.commits, *self.made]
        kept = {name for commit in commits for name in (commit.name, *commit.files)}
        kept.add(self._reserved)  # as long as it is there, no earlier process can commit
        left = []
        for name in own_files(self.folder.files(), temporary=True):
            if name.startswith(("shard_", ".shard_")) and name not in kept:
                self.check()
                if not self.folder.remove_once(name):
                    left.append(name)
        if left:
            log.warning(
                "%s: %s: it is not known whether the store has deleted this, which belongs to no "
                "shard of the run and harms nothing; delete it once nobody writes to the folder",
                self.folder.url,
                ", ".join(left),
            )
        listing = self.folder.listing()
        for commit in commits:
            for name, facts in commit.files.items():
                entry = listing.get(name)
                if entry is None or entry.size != facts.bytes:
                    why = "is missing" if entry is None else f"has {entry.size} bytes"
                elif commit.owner == self.id and entry.version != facts.version:
                    why = "was replaced"
                else:
                    continue
                self.check()  # a process that has taken over may have changed the file
                raise FolderError(
                    f"{self.folder.url}/{name}: {why} although shard {commit.number} is committed"
                )


def _new_id() -> str:
    """Returns an id of this process, which says on which machine it runs."""
    return f"{platform.node() or 'host'}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
