"""LogWriter: writes the files and the log of a run to a folder.

It follows the protocol in the docstring of run_log.py, which makes sure that only one process
writes to a folder. If several processes write to it, the process that began last continues, and all
others stop with LostError. shard_writer.py makes the shards, and run_log.py reads the log.
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
from activation_extraction.store.identity import Identity, RunFacts
from activation_extraction.store.resume import Planner, StoragePlan
from activation_extraction.store.run_log import (
    FORMAT_VERSION,
    MAX_JSON_BYTES,
    METADATA,
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
from activation_extraction.store.stored_hook import HookKey
from activation_extraction.store.totals import Totals


class LostError(InputError):
    """Another process has become the owner of the folder, so this process must stop."""


@dataclass(frozen=True)
class RunDescription:
    """The content of metadata.json that is the same from the beginning of a run to its end.

    Attributes:
        identity: Identity of the run.
        hook_name_by_key: Key of a hook in pickles -> full name of the hook.
        limit_by_flag_name: Largest numbers of samples and of tokens to store, by the names
            "max_samples" and "max_tokens"; None for no limit.
        facts: Further facts about the run and its hooks.
    """

    identity: Identity
    hook_name_by_key: Mapping[HookKey, str] = field(default_factory=dict)
    limit_by_flag_name: Mapping[str, int | None] = field(default_factory=dict)
    facts: RunFacts = field(default_factory=RunFacts)

    def to_json(self, totals: Totals) -> dict[str, Any]:
        """Returns the fields of metadata.json that describe the run and the stored shards.

        Args:
            totals: Totals over the stored shards.
        """
        hook_descriptions = []
        for hook_key, hook_name in self.hook_name_by_key.items():
            hook_statistics = totals.statistics.get(hook_name, Statistics())
            hook_facts = self.facts.facts_by_hook_key.get(hook_key, {})
            hook_descriptions.append(
                {"key": hook_key, "name": hook_name, **hook_facts, **hook_statistics.to_json()}
            )
        dataset_files = self.facts.sources
        return {
            **totals.counts,
            **self.limit_by_flag_name,
            "hooks": hook_descriptions,
            "identity": self.identity.to_json(),
            "data_files": dataset_files.to_json() if dataset_files else [],
            **self.facts.metadata,
        }


class LogWriter:
    """The writer of one folder: it writes the files of shards, their commits, and metadata.json.

    Methods raise LostError if another process has become the owner of the folder, and FolderError
    if a request fails.

    Args:
        folder: Folder of the host, local or in a bucket.
        description: Identity, hooks, limits and further facts of the run, for metadata.json.
        local_folder: Local folder for a copy of metadata.json. Unlike the file in `folder`, the
            copy is overwritten without checking whether another process has changed it. None if
            `folder` is local.
        keeps_shards: Whether the local folder gets a copy of the shards as well.

    Attributes:
        folder: Folder of the host.
        process_id: Id of this process.
        run_id: Id of the run; "" until `begin` has written it.
        storing_start_time: Unix time at which this process began to store the run: the time of the
            last call of `begin`, or the time at which this object was made if `begin` was not
            called yet.
        new_commits: Commits that this process has written, in order.
        totals: Totals over all stored shards, including those of earlier processes.
    """

    def __init__(
        self,
        folder: Folder,
        description: RunDescription,
        local_folder: Folder | None = None,
        keeps_shards: bool = False,
    ) -> None:
        self.folder = folder
        self.process_id = _new_process_id()
        self.run_id = ""
        self.storing_start_time = round(time.time(), 3)
        self.new_commits: list[Commit] = []
        self._run_description = description
        self._local_folder = local_folder
        self._keeps_local_shards = keeps_shards
        # Names of the JSON files to which `reserve` or `withdraw` has written a reservation, or has
        # tried to write one. `_remove_uncommitted` deletes none of these files.
        self._reserved_file_names: set[str] = set()
        self.follow(StoragePlan())

    def follow(self, plan: StoragePlan) -> None:
        """Sets the plan by which this process stores its shards from now on.

        Args:
            plan: Plan for storing further shards. It also lists the shards that earlier processes
                have stored. The attribute
                `totals` is set to the totals over these shards.
        """
        self._storage_plan = plan
        self.totals = plan.totals

    def take_over(self, planner: Planner, overwrite: bool) -> StoragePlan:
        """Makes this process the owner of the folder, and reserves the next number of a shard.

        If another process changes the log at the same time, this method reads the log again, and
        begins anew.

        Args:
            planner: Function that takes the log of the folder, and returns the plan by which this
                process continues or repairs the stored run.
            overwrite: Whether to begin a new run even if another run is stored.

        Returns:
            The plan of this process. If its `is_run_up_to_date` is True, nothing is left to do, and
            nothing was written.

        Raises:
            InputError: If the stored run cannot be continued.
        """
        new_run_id = uuid.uuid4().hex
        while True:
            run_log = RunLog.read(self.folder)
            begins_anew = overwrite and self.run_id != new_run_id
            self.follow(StoragePlan() if begins_anew else planner(run_log))
            if self._storage_plan.is_run_up_to_date:
                return self._storage_plan
            if not self.begin(
                self._storage_plan.run_id or new_run_id, run_log.metadata_file_version
            ):
                continue
            run_log = RunLog.read(self.folder)
            # Shard number -> version of the JSON file that a reservation will replace. None if
            # there is no such file, or if the store has no versions.
            json_file_version_by_withdrawn_shard_number: dict[int, str | None] = {}
            if overwrite:
                # This process has begun the new run and has not stored a shard yet, so damaged JSON
                # files are left over from the old run. They are replaced by reservations and hidden
                # from the planner, which would otherwise refuse to continue.
                for shard_json_name in run_log.message_by_damaged_file:
                    if shard_json_name != METADATA:
                        json_file_version = run_log.file_version_by_shard_json_name[shard_json_name]
                        json_file_version_by_withdrawn_shard_number[number_of(shard_json_name)] = (
                            json_file_version
                        )
                run_log = replace(run_log, message_by_damaged_file={})
            self.follow(planner(run_log))
            if self._storage_plan.repair is not None:
                json_file_version_by_withdrawn_shard_number |= (
                    self._storage_plan.repair.json_file_version_by_withdrawn_shard_number
                )
            # The number after all shards is reserved before bad shards are withdrawn. So even if
            # this process is killed while it withdraws them, no earlier process can commit a shard
            # under this number or a higher one.
            has_reservation_if_needed = self._storage_plan.is_run_complete or self.reserve(
                self._storage_plan.number_to_reserve
            )
            if has_reservation_if_needed and self._withdraw_all(
                json_file_version_by_withdrawn_shard_number
            ):
                return self._storage_plan
            # Another process has written a JSON file, so the log is read and checked again.

    def _withdraw_all(self, json_file_version_by_shard_number: Mapping[int, str | None]) -> bool:
        """Replaces the JSON files of some shards by reservations.

        If another process has changed one of the files since this process read it, the function
        stops there.

        Args:
            json_file_version_by_shard_number: Shard number -> version of the shard's JSON file as
                this process has read it. The version is None if there was no file, or if the store
                has no versions.

        Returns:
            Whether all files were replaced.
        """
        return all(
            self.withdraw(shard_number, json_file_version)
            for shard_number, json_file_version in json_file_version_by_shard_number.items()
        )

    def begin(self, run_id: str, version: str | None) -> bool:
        """Writes the first metadata.json of this process, which makes it the owner of the folder.

        Args:
            run_id: Id of the run.
            version: Version of metadata.json that this process has read; None if there was no file.

        Returns:
            Whether the file was written. False if another process has written or deleted it since
            this process read it.
        """
        self.storing_start_time = round(time.time(), 3)
        metadata_content = self._metadata(run_id, "running")
        write_countdown = self.folder.patience_for(metadata_content)
        write_attempts = Attempts(self.folder, f"writing {METADATA}", write_countdown)
        while True:
            try:
                self.folder.write(METADATA, metadata_content, version, write_countdown)
                break
            except ChangedError as error:
                current_content, current_version = self._read(METADATA)
                if current_content == metadata_content:
                    break
                if current_version != version:
                    return False
                write_attempts.failed(error)
        self.run_id = run_id
        if self._local_folder is not None:
            self._local_folder.write(METADATA, metadata_content, ANY)
        return True

    def write_metadata(self, status: str, upload: bool = True) -> None:
        """Writes metadata.json with the current totals.

        Args:
            status: Status of the run: "complete", "interrupted" or "failed".
            upload: Whether to write the file to the bucket, too, if there is one.
        """
        metadata_content = self._metadata(self.run_id, status)
        if self._local_folder is not None:
            self._local_folder.write(METADATA, metadata_content, ANY)
        if upload or self._local_folder is None:
            self._write(
                METADATA,
                metadata_content,
                lambda current_content: current_content == metadata_content,
            )

    def _metadata(self, run: str, status: str) -> bytes:
        """Returns the content of metadata.json as this process writes it now.

        Args:
            run: Id of the run.
            status: Status of the run.
        """
        metadata_fields = {
            "format_version": FORMAT_VERSION,
            "status": status,
            **self._run_description.to_json(self.totals),
            "written": round(time.time(), 3),
            "remote": None if self._local_folder is None else self.folder.url,
        }
        if self._storage_plan.repair is not None:
            metadata_fields = self._storage_plan.repair.revised(metadata_fields)
        return seal({**metadata_fields, "run": run, "owner": self.process_id})

    def check(self, owner: str | None = None) -> None:
        """Checks that this process is the owner of the folder.

        Args:
            owner: Id of the current owner, if the caller has just read it from a commit that only
                the current owner can have written. None to read the id from metadata.json.

        Raises:
            LostError: If another process is the owner.
        """
        if owner is None:
            owner = self._owner_in_metadata()
        if owner != self.process_id:
            raise LostError(
                f"{self.folder.url}: {owner or 'somebody who left no name'} has taken over, so "
                "this process stops; what it has committed is safe; give each machine a "
                "--machine_id of its own"
            )

    def _owner_in_metadata(self) -> str:
        """Returns the id of the owner that metadata.json names now.

        Raises:
            LostError: If metadata.json is missing or damaged, or names no owner.
        """
        metadata_url = f"{self.folder.url}/{METADATA}"
        metadata_content = self.folder.read(METADATA, max_bytes=MAX_JSON_BYTES)
        if metadata_content is None:
            owner_problem = f"{metadata_url}: is gone"
        else:
            try:
                owner_id = parse_metadata(metadata_content, metadata_url).get("owner")
            except DamagedError as error:
                owner_problem = str(error)
            else:
                if owner_id:
                    return owner_id
                owner_problem = f"{metadata_url}: names no owner"
        raise LostError(
            f"{owner_problem}; so this process cannot know whether it is still the owner, and "
            "stops; find out who changed or deleted the file; --repair writes it again"
        )

    def write_file(self, name: str, buffers: Sequence[bytes | memoryview]) -> str | None:
        """Writes a file of a shard.

        Args:
            name: Name of the file.
            buffers: Content of the file, as consecutive buffers.

        Returns:
            The version of the file; None if the store has no versions.
        """
        if self._local_folder is not None and self._keeps_local_shards:
            self._local_folder.write(name, buffers, ANY)
        _, file_version = self._write(name, buffers)
        return file_version

    def reserve(self, number: int) -> bool:
        """Reserves the first number after all shards of the run (`StoragePlan.number_to_reserve`).

        Afterwards, no earlier process can commit a shard under this number or a higher one.

        Args:
            number: Number of the shard.

        Returns:
            Whether the number was reserved. False if another process of the run has committed the
            shard in the meantime.
        """
        shard_json_name = commit_name(number)
        self._reserved_file_names.add(shard_json_name)
        return self._write_json(shard_json_name, reservation(self.run_id, self.process_id)) is None

    def withdraw(self, number: int, version: str | None) -> bool:
        """Replaces the JSON file of a bad or missing shard by a reservation.

        The shard then no longer exists.

        Args:
            number: Number of the shard.
            version: Version of the JSON file as this process has read it; None if there was no
                file.

        Returns:
            Whether the file was replaced. False if it has another version now, for example because
            a commit has arrived since. The new content must be checked before it may be replaced.
        """
        shard_json_name = commit_name(number)
        self._reserved_file_names.add(shard_json_name)
        reservation_content = seal(reservation(self.run_id, self.process_id))
        write_countdown = self.folder.patience_for(reservation_content)
        write_attempts = Attempts(self.folder, f"writing {shard_json_name}", write_countdown)
        while True:
            current_content, current_version = self._read(shard_json_name)
            if current_content == reservation_content:
                return True
            self.check()
            if current_version != version:
                return False
            try:
                self.folder.write(shard_json_name, reservation_content, version, write_countdown)
                return True
            except ChangedError as error:
                # A conditional write also raises ChangedError if the connection breaks before the
                # answer comes. So the file may have been written. The next pass of the loop reads
                # it to find out.
                write_attempts.failed(error)

    def _read(self, name: str) -> tuple[bytes | None, str | None]:
        """Returns the content and the version of a JSON file; both are None if it is missing."""
        return self.folder.read_with_version(name, max_bytes=MAX_JSON_BYTES) or (None, None)

    def commit(self, commit: Commit) -> Commit:
        """Commits a shard whose files are all written, and adds it to the totals.

        Args:
            commit: Commit of the shard, whose `run`, `owner` and `url` are set here.

        Returns:
            The commit that was written.
        """
        commit = replace(commit, run=self.run_id, owner=self.process_id, url=self.folder.url)
        if self._local_folder is not None and self._keeps_local_shards:
            self._local_folder.write(commit.name, seal(commit.to_json()), ANY)
        commit_already_in_file = self._write_json(commit.name, commit.to_json())
        if commit_already_in_file is not None:
            self.check(commit_already_in_file.owner)
        self.new_commits.append(commit)
        self.totals.add(commit)
        return commit

    def _write_json(self, name: str, json_fields: Mapping[str, Any]) -> Commit | None:
        """Writes a commit or a reservation, but never replaces a commit of this run.

        Args:
            name: Name of the JSON file.
            json_fields: Fields of the commit or of the reservation.

        Returns:
            None if the file was written, otherwise the commit of this run that it contained
            already. If the answer to the write was lost, this may be the commit that this process
            has just written.
        """
        json_content = seal(json_fields)

        def must_stay(current_content: bytes) -> bool:
            return current_content == json_content or self._commit_in(current_content) is not None

        current_content, _ = self._write(name, json_content, must_stay)
        return None if current_content is None else self._commit_in(current_content)

    def _commit_in(self, json_content: bytes) -> Commit | None:
        """Returns the commit in a JSON file of the log.

        A JSON file with a reservation only reserves the number of a shard for a process.

        Args:
            json_content: Content of the file as bytes.

        Returns:
            The commit. None if the file is damaged, or contains a reservation or a commit of
            another run.
        """
        with suppress(DamagedError):
            parsed_commit = parse_commit(json_content, "")
            if parsed_commit is not None and parsed_commit.run == self.run_id:
                return parsed_commit
        return None

    def _write(
        self,
        name: str,
        file_content: bytes | Sequence[bytes | memoryview],
        must_stay: Callable[[bytes], bool] | None = None,
    ) -> tuple[bytes | None, str | None]:
        """Writes a file by the steps of the protocol in run_log.py.

        The steps are repeated until the file is written or has content that must stay.

        Args:
            name: Name of the file.
            file_content: Content of the file, as bytes or as consecutive buffers.
            must_stay: Function that takes the current content of the file, and returns whether it
                must stay. None to replace any content.

        Returns:
            A tuple of two elements. The first is the current content of the file if it must stay,
            and None if the file was written. The second is the version of the file; None if the
            store has no versions.
        """
        # Countdown of the seconds for all attempts to write the file together.
        write_countdown = self.folder.patience_for(file_content)
        write_attempts = Attempts(self.folder, f"writing {name}", write_countdown)
        while True:
            if must_stay is None:
                file_entry = self.folder.head(name)
                current_version = file_entry and file_entry.version
            else:
                current_content, current_version = self._read(name)
                if current_content is not None and must_stay(current_content):
                    return current_content, current_version
            self.check()
            try:
                return None, self.folder.write(name, file_content, current_version, write_countdown)
            except ChangedError as error:
                write_attempts.failed(error)

    def finish(self, complete: bool) -> None:
        """Writes the last metadata.json of this process, after all commits.

        Args:
            complete: Whether the run is complete. If True, files of shards that belong to no commit
                are deleted first.

        Raises:
            FolderError: If a committed file of a complete run is missing or has changed.
        """
        if complete:
            self._remove_uncommitted()
        self.write_metadata("complete" if complete else "interrupted")

    def _remove_uncommitted(self) -> None:
        """Deletes the files of shards that belong to no commit of the run.

        Reservations are kept. If the answer to the deletion of a file was lost and the file still
        exists, the store may delete it later. A warning with the names of such files is logged.

        After the deletions, the folder is always listed again, to check the sizes of all committed
        files, and the versions of the files that this process committed.

        Raises:
            FolderError: If a committed file is missing or has changed.
        """
        commits_of_run_in_folder = [*self._storage_plan.commits, *self.new_commits]
        file_names_to_keep = {
            file_name
            for commit in commits_of_run_in_folder
            for file_name in (commit.name, *commit.files)
        }
        # All other files of shards are deleted. Reservations must stay, because they prevent
        # earlier processes from committing a shard.
        file_names_to_keep |= self._reserved_file_names
        undeleted_file_names = []
        for file_name in own_files(self.folder.files(), temporary=True):
            if file_name.startswith(("shard_", ".shard_")) and file_name not in file_names_to_keep:
                self.check()
                if not self.folder.remove_once(file_name):
                    undeleted_file_names.append(file_name)
        if undeleted_file_names:
            log.warning(
                "%s: %s: it is not known whether the store has deleted this, which belongs to no "
                "shard of the run and harms nothing; delete it once nobody writes to the folder",
                self.folder.url,
                ", ".join(undeleted_file_names),
            )
        entry_by_name = self.folder.listing()
        for commit in commits_of_run_in_folder:
            for file_name, file_facts in commit.files.items():
                file_entry = entry_by_name.get(file_name)
                if file_entry is None:
                    difference_phrase = "is missing"
                elif file_entry.byte_count != file_facts.bytes:
                    difference_phrase = f"has {file_entry.byte_count} bytes"
                elif commit.owner == self.process_id and file_entry.version != file_facts.version:
                    difference_phrase = "was replaced"
                else:
                    continue
                self.check()  # another process may be the owner now, and have changed the file
                raise FolderError(
                    f"{self.folder.url}/{file_name}: {difference_phrase} although shard "
                    f"{commit.number} is committed"
                )


def _new_process_id() -> str:
    """Returns a new unique id for this process.

    The id consists of the network name of the computer ("host" if it has none), the process number
    that the operating system has given to the process, and random digits.
    """
    return f"{platform.node() or 'host'}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
