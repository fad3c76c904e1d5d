"""Owner: of several processes that write to one folder, only the last to begin may go on.

What is stored is what the committed shards list, and commits are made in order and never replaced,
as in the log of Delta Lake (Armbrust et al., VLDB 2020). Every write has one order: read which
version stands there, check that metadata.json still names this process, and write on condition of
exactly that version. Whatever goes wrong or stays unknown, the same order begins again; so a write
that succeeded although its answer was lost does no harm. Where a version is a digest of the content
(on S3), it must still name one write. So every file contains the id of its writer, those of a shard
where no reader minds it.

- A process begins by writing its id into metadata.json; only then it reads what is stored.
- It reserves the next number: it writes that shard's JSON with its own id alone. From then on no
  earlier process can commit, because JSONs are written strictly one after the other, and none
  replaces a commit of the same run.
- A shard's JSON follows its files, and records their versions.
- Files that belong to no commit, such as those of an overwritten run, are deleted at the end. A
  deletion cannot be conditional (obstore has no such request). So each file is deleted by one
  request, which is never sent again and whose answer is waited for. A file whose deletion stays
  unknown is left.

A DELETE that is still on its way when its sender gives up, or is killed, may arrive late and remove
a file that a later process has committed under that name. Readers then refuse the shard, because a
file that its JSON lists is missing, and --repair computes it again.

In a local folder there is a lock, too (local_files.py), which the process keeps until it ends.
"""

import os
import platform
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from activation_extraction.common.errors import InputError
from activation_extraction.common.log import log
from activation_extraction.store.commit import (
    FORMAT_VERSION,
    METADATA,
    MOST_BYTES,
    Commit,
    DamagedError,
    commit_name,
    seal,
)
from activation_extraction.store.folder import ANY, Attempts, ChangedError, Folder, FolderError
from activation_extraction.store.metadata import RESERVED, own_files, parse_commit, parse_metadata


class LostError(InputError):
    """Another process has taken over the folder."""


@dataclass
class Owner:
    """This process as the writer of one folder. Its methods raise LostError once another process
    has begun there, and FolderError for a request that fails.

    id: of this process. local: if the folder is in a bucket, the local folder that has a copy of
    metadata.json, and of the shards if `keeps_shards`; there is no order in writing to it. run: the
    id of the run, once it has begun.
    """

    folder: Folder
    id: str
    local: Folder | None = None
    keeps_shards: bool = False
    run: str = ""
    _reserved: str = ""

    def begin(self, run: str, content: Mapping[str, Any], version: str | None) -> bool:
        """Writes the first metadata.json of this process.

        Args:
            run: The id of the run.
            content: The content, without the ids of the run and of this process.
            version: The version of the metadata.json that the process has read; None if there was
                none.

        Returns:
            False if another process has written or deleted it since.
        """
        data = self._metadata(content, run)
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
        if self.local is not None:
            self.local.write(METADATA, data, ANY)
        return True

    def _metadata(self, content: Mapping[str, Any], run: str) -> bytes:
        return seal({**content, "run": run, "owner": self.id})

    def check(self, owner: str | None = None) -> None:
        """Raises LostError unless this process is the owner.

        Args:
            owner: The owner that a commit names; None for the one that metadata.json names now.
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

    def write_metadata(self, content: Mapping[str, Any], upload: bool = True) -> None:
        """Replaces metadata.json. upload: whether also in a bucket."""
        data = self._metadata(content, self.run)
        if self.local is not None:
            self.local.write(METADATA, data, ANY)
        if upload or self.local is None:
            self._write(METADATA, data, lambda found: found == data)

    def write_file(self, name: str, parts: Sequence[bytes | memoryview]) -> str | None:
        """Writes a file of a shard, and returns its version."""
        if self.local is not None and self.keeps_shards:
            self.local.write(name, parts, ANY)
        return self._write(name, parts)[1]

    def reserve(self, number: int) -> bool:
        """Reserves the number of the first shard to store. Returns False if the run has committed
        that shard in the meantime."""
        self._reserved = commit_name(number)
        return self._write_json(self._reserved, self._reservation()) is None

    def withdraw(self, number: int, version: str | None) -> bool:
        """Replaces the JSON of a shard that was found to be bad by a reservation.

        Args:
            number: The number of the shard.
            version: The version of the JSON that was checked; None if there was no JSON.

        Returns:
            False if something else stands there now, such as a commit that has landed since. It has
            to be checked, too, before it may be withdrawn.
        """
        name, reservation = commit_name(number), seal(self._reservation())
        patience = self.folder.patience_for(reservation)
        attempts = Attempts(self.folder, f"writing {name}", patience)
        while True:
            found = self.folder.read_with_version(name, most=MOST_BYTES)
            if found is not None and found[0] == reservation:
                return True
            self.check()
            if (found and found[1]) != version:
                return False
            try:
                self.folder.write(name, reservation, version, patience)
                return True
            except ChangedError as error:  # or nobody knows whether it was written
                attempts.failed(error)

    def _reservation(self) -> dict[str, Any]:
        head = {"format_version": FORMAT_VERSION, "run": self.run, "owner": self.id}
        return {**head, RESERVED: True}

    def commit(self, commit: Commit) -> Commit:
        """Writes the JSON of a shard, after all of its files, and returns what it says."""
        commit = replace(commit, run=self.run, owner=self.id, url=self.folder.url)
        if self.local is not None and self.keeps_shards:
            self.local.write(commit.name, seal(commit.to_json()), ANY)
        standing = self._write_json(commit.name, commit.to_json())
        if standing is not None:
            self.check(standing.owner)
        return commit

    def _write_json(self, name: str, content: Mapping[str, Any]) -> Commit | None:
        """Writes the JSON of a shard, unless a commit of this run stands there, which it returns:
        no commit may be replaced."""
        data = seal(content)

        def is_settled(found: bytes) -> bool:
            return found == data or self._commit_in(found) is not None

        standing, _ = self._write(name, data, is_settled)
        return None if standing is None else self._commit_in(standing)

    def _commit_in(self, data: bytes) -> Commit | None:
        """Returns the commit of this run in a JSON; None if it is none."""
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
        """Writes a file in the one order of every write, until it is there, or until `is_settled`
        says of the content that stands there that it shall stay.

        Returns this content, or None if the file was written; and the version of the file.
        """
        patience = self.folder.patience_for(parts)  # one for all attempts
        attempts = Attempts(self.folder, f"writing {name}", patience)
        while True:
            if is_settled is None:  # a file of a shard, which is never read
                entry = self.folder.head(name)
                version = entry and entry.version
            else:
                found = self.folder.read_with_version(name, most=MOST_BYTES)
                if found is not None and is_settled(found[0]):
                    return found
                version = found and found[1]
            self.check()
            try:
                return None, self.folder.write(name, parts, version, patience)
            except ChangedError as error:
                attempts.failed(error)

    def remove_rest(self, commits: Sequence[Commit]) -> None:
        """Deletes the files of shards that do not belong to these commits, and warns of those that
        may be left.

        Args:
            commits: All that the run has.

        Raises:
            FolderError: A committed file is missing or has changed.
        """
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
                self.check()  # a process that has taken over may do this
                raise FolderError(
                    f"{self.folder.url}/{name}: {why} although shard {commit.number} is committed"
                )


def new_id() -> str:
    """Returns an id of this process, which says on which machine it runs."""
    return f"{platform.node() or 'host'}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
