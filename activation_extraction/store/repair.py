"""A repair of a run: finds bad and missing shards, whose samples are then stored again.

`RepairPlanner` checks the shards and plans the repair. The plan is a `StoragePlan` (resume.py),
whose field of the type `Repair` contains, for example, the numbers of the shards to store again.
log_writer.py and shard_writer.py carry the plan out. Like every process that writes (run_log.py), a
repair writes its id into metadata.json, and then reads the log, before it changes anything else.

- *Bad shards.* A shard is bad if its content was read and differs from its commit, or if one of its
  files certainly does not exist. A shard is also bad if it contains a sample that an earlier good
  shard contains. This happens if somebody puts a lost JSON file back after a repair. If a request
  fails, it is unknown whether a shard is bad, so the repair ends without changing anything.
- *Withdrawing.* The entry in the log (the JSON file) of every bad or missing shard is replaced by a
  reservation. The write is conditional: the entry must still have the version that was checked, or
  must still be missing. If it has changed, the log is read and planned again, and only new commits
  are checked. The change may be a commit that an earlier process had sent and that has arrived
  since, or the work of another repair. Entries at the end of the log are replaced first, the last
  entry before the others, so that a repair that is killed meanwhile leaves no new gap.
- *Bad shards at the end of the log* no longer exist after they are withdrawn, and the run continues
  after the good shards.
- *Gaps* are the numbers of bad and missing shards that come before a good one. The data is read
  again from the furthest mark before which no sample is missing. If the run was complete, reading
  ends at its last sample. Otherwise it ends at the last sample that is known to have been stored:
  the last sample in a good shard or the last sample before the mark of a good shard, whichever
  comes later. Every sample in between that no good shard contains is stored under the
  numbers of the gaps, in order. The last gap is filled last. If the samples do not fit in the gaps,
  shards with new numbers are stored before the last gap is filled. Later samples are left to the
  run that continues.
- *Open gaps.* As long as a gap is open, no process can continue the run. A repair that was killed
  is finished by the next repair. All shards of a repair get the mark at which the repair began,
  because all samples before a mark must be stored.
- *Limits.* --max_samples and --max_tokens do not apply up to the last sample that was ever stored
  (`StoragePlan.end_of_stored`), because the repair must read all samples up to there. So if
  --max_tokens had cut the last sample of the run, and this sample was lost, it is stored without
  the cut.

For example, shards 3 and 5 of the seven of a complete run are damaged:

1. `RepairPlanner._good_shards` checks all seven. The good ones are 1, 2, 4, 6 and 7, so
   `RepairPlanner._plan` finds the gaps 3 and 5, and 8 as the number of the next new shard. No shard
   at the end of the log is bad.
2. `LogWriter.take_over` writes the id of this process into metadata.json, plans again, reserves 8,
   and replaces the entries 3 and 5 by reservations (`withdraw`). From now on writers and readers
   refuse the run because of its gaps.
3. `StoragePlan.mark` is the furthest mark before which no sample is missing, such as the mark of
   shard 2, and `Repair.num_samples_to_read` is the number of samples of the complete run. The data
   is read from this mark up to this number. `ActivationStorage.stored_after_mark` contains the
   samples in good shards, which are left out.
4. `ShardWriter` stores the other samples. `ShardNumbers` gives the first full shard the number 3,
   more full shards the numbers 8, 9 and so on, and the last shard the number 5. If one shard is
   enough for all samples, it gets the number 5, and shard 3 is committed without samples.
5. `LogWriter.finish` writes metadata.json with the status that `Repair.status` returns.

A program with a loop of its own has no data set that could be read again. It must add all its
samples again, and samples in good shards are skipped. If it ends before it has added as many
samples as the run had, the last gap stays open, so that the repair is not finished, and a message
says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from activation_extraction.common.errors import InputError
from activation_extraction.common.log import log
from activation_extraction.store.folder import Folder, FolderError
from activation_extraction.store.formats import number_of
from activation_extraction.store.identity import Identity
from activation_extraction.store.resume import (
    VERSION_REMEDY,
    StoragePlan,
    plan_rest,
    refuse_difference,
    refuse_elsewhere,
)
from activation_extraction.store.run_log import (
    METADATA,
    OTHER_VERSION,
    Commit,
    RunLog,
    commit_name,
    furthest_mark,
)
from activation_extraction.store.shard_check import (
    NO_NUMBERS,
    CheckedShard,
    check_shard,
    for_each_shard,
)
from activation_extraction.store.totals import COUNTED, CUT, total_problems


@dataclass(frozen=True)
class Repair:
    """Describes the shards that a repair replaces, and how many samples are read or added again.

    Attributes:
        json_file_version_by_withdrawn_shard_number: Number of each bad or missing shard -> version
            of its JSON file. The version is None if the shard has no JSON file, or if the store has
            no versions. Reservations replace the files in the order of this dict.
        shard_numbers_to_store_again: Numbers of the bad and missing shards before a good one (the
            gaps), in ascending order. The repair stores new shards under these numbers. If there
            are none, the repair only replaces the JSON files of bad shards at the end of the log by
            reservations, and then continues the run.
        num_samples_to_read: Number of the host's samples after which reading stops, counted from
            its first sample. None to read all the data, and for a program with a loop of its own.
        num_samples_to_add: Number of samples that a program with a loop of its own must add again:
            all samples up to the last one that is known to have been stored, from a good shard or
            from metadata.json. 0 for a run on a data set.
        previous_metadata: Content of metadata.json before the repair, of which `revised` keeps most
            fields. Empty if metadata.json was missing, or if there are no
            shards to store again.
    """

    json_file_version_by_withdrawn_shard_number: Mapping[int, str | None]
    shard_numbers_to_store_again: tuple[int, ...] = ()
    num_samples_to_read: int | None = None
    num_samples_to_add: int = 0
    previous_metadata: Mapping[str, Any] = field(default_factory=dict)

    def limits(self, limit_by_flag_name: Mapping[str, int | None]) -> dict[str, int | None]:
        """Returns the largest numbers of samples and of tokens to store during this repair.

        If the repair stores no missing or bad shards again, the numbers are the same as in
        `limit_by_flag_name`. Otherwise they are the limits that metadata.json records,
        so that the repair stores the same samples as the run did. A limit that metadata.json does
        not record is taken from `limit_by_flag_name`.

        Args:
            limit_by_flag_name: Limits of this process, by the names "max_samples" and "max_tokens";
                None for no limit.

        Returns:
            A dict of the limits, by the same names; None for no limit.
        """
        if not self.shard_numbers_to_store_again:
            return dict(limit_by_flag_name)
        return {
            flag_name: self.previous_metadata.get(flag_name, limit_of_this_process)
            for flag_name, limit_of_this_process in limit_by_flag_name.items()
        }

    def samples_missing(self, added_sample_count: int) -> int:
        """Returns the number of samples that must still be added before the repair is complete.

        Only a program with a loop of its own adds samples. For a run on a data set, the number is
        0.

        Args:
            added_sample_count: Number of samples that the program has added, including samples that
                are skipped because they are stored already.
        """
        return max(self.num_samples_to_add - added_sample_count, 0)

    def status(self, stored_sample_count: int) -> str:
        """Returns the status of the run after all gaps are filled: "complete" or "interrupted".

        A run on a data set is complete again if it was complete before and has as many samples as
        before. The run of a program with a loop of its own is complete if it has at least as many
        samples as before. Otherwise, the run is interrupted and can be continued.

        Args:
            stored_sample_count: Number of samples that are stored now.
        """
        previous_sample_count = self.previous_metadata.get("samples", 0)
        # `num_samples_to_read` is None if a program with a loop of its own adds the samples.
        if self.num_samples_to_read is None:
            has_no_fewer_samples = stored_sample_count >= previous_sample_count
            return "complete" if has_no_fewer_samples else "interrupted"
        has_same_sample_count = stored_sample_count == previous_sample_count
        return "complete" if self._was_complete and has_same_sample_count else "interrupted"

    @property
    def _was_complete(self) -> bool:
        return self.previous_metadata.get("status") == "complete"

    def revised(self, new_metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of metadata.json that a process with this repair writes.

        Gaps are the numbers of bad and missing shards before a good shard. The repair fills a gap
        when it stores a new shard under this number.

        Args:
            new_metadata: Fields that a process without a repair would write. If the repair began
                with gaps, the status "complete" in `new_metadata` means that all gaps are filled by
                now.

        Returns:
            `new_metadata`, if there were no gaps when the repair began. Otherwise the fields of
            metadata.json before the repair, with the following changes:

            - "written", "remote", and all fields that metadata.json did not contain before the
              repair, come from `new_metadata`.
            - As long as a gap is open, the status is "complete" if it was "complete" before the
              repair, otherwise "interrupted".
            - Once all gaps are filled, the totals (the fields in COUNTED and CUT) and "hooks" also
              come from `new_metadata`, and the method `status` of this object determines whether
              the status is "complete" or "interrupted".
        """
        if not self.shard_numbers_to_store_again:
            return dict(new_metadata)
        revised_status = "complete" if self._was_complete else "interrupted"
        changed_metadata_field_names = ["written", "remote"]
        if new_metadata["status"] == "complete":
            revised_status = self.status(new_metadata["samples"])
            changed_metadata_field_names += [*COUNTED, *CUT, "hooks"]
        new_value_by_changed_field = {
            changed_field_name: new_metadata[changed_field_name]
            for changed_field_name in changed_metadata_field_names
        }
        return {
            **new_metadata,
            **self.previous_metadata,
            **new_value_by_changed_field,
            "status": revised_status,
        }


@dataclass
class RepairPlanner:
    """A planner that checks the shards in the folder of one host, and plans their repair.

    An object of this class is called like a function, before the repair begins, and again if
    another process may have written to the folder. A later call only checks shards with new
    commits.

    Attributes:
        folder: Folder that contains the shards.
        identity: Identity that follows from the flags or arguments of this process.
        limit_by_flag_name: Largest numbers of samples and of tokens to store, by the names
            "max_samples" and "max_tokens"; None for no limit.
    """

    folder: Folder
    identity: Identity
    limit_by_flag_name: Mapping[str, int | None]
    # Shard number -> result of the last check of this shard.
    _checked_shard_by_number: dict[int, CheckedShard] = field(default_factory=dict)
    # Whether the user was warned that the repair writes a missing or damaged metadata.json again,
    # with the settings of this command.
    _has_warned_of_new_metadata: bool = False

    def __call__(self, run_log: RunLog) -> StoragePlan:
        """Checks the shards, and returns the plan by which bad and missing ones are stored again.

        Args:
            run_log: Log of the folder.

        Raises:
            InputError: If the folder contains no run, or another run.
            FolderError: If a request failed, so it is unknown which shards are bad.
        """
        repaired_run_id = run_log.run or self._newest_run(run_log)
        self._refuse_others(run_log, repaired_run_id)
        good_shards = self._good_shards(
            replace(run_log, commit_by_shard_number=_commits_of(run_log, repaired_run_id))
        )
        return self._plan(run_log, repaired_run_id, good_shards)

    def _newest_run(self, run_log: RunLog) -> str:
        """Returns the id of the run in a folder without metadata.json, from its newest commit.

        Args:
            run_log: Log of the folder.

        Raises:
            InputError: If the folder contains no commit, or the newest shard has other hooks than
                this process would store.
        """
        if not run_log.commit_by_shard_number:
            raise InputError(f"{self.folder.url}: holds no run that could be repaired")
        newest_commit = max(
            run_log.commit_by_shard_number.values(), key=lambda commit: commit.committed
        )
        hook_names = tuple(newest_commit.hook_name_by_key.values())
        if hook_names and hook_names != self.identity.hooks:
            raise InputError(
                f"{self.folder.url}: its shards have the hooks {' '.join(hook_names)}, expected "
                f"{' '.join(self.identity.hooks)}, as asked now; ask for the same as before"
            )
        return newest_commit.run

    def _refuse_others(self, run_log: RunLog, run: str) -> None:
        """Raises InputError if the folder contains files that this repair must not change.

        Args:
            run_log: Log of the folder.
            run: Id of the run that is repaired.

        Raises:
            InputError: If the folder contains another run, if the run's shards were uploaded to a
                bucket, so that they must be repaired there, or if another version of this program
                wrote a file, because this version cannot tell whether such a file is damaged.
        """
        for damage_message in run_log.message_by_damaged_file.values():
            if OTHER_VERSION in damage_message:
                raise InputError(f"{damage_message}; {VERSION_REMEDY}")
        if run_log.identity is not None:
            refuse_difference(run_log.url, self.identity.compare(run_log.identity))
        else:
            self._refuse_other_shards(run_log, run)
        refuse_elsewhere(run_log)

    def _refuse_other_shards(self, run_log: RunLog, run: str) -> None:
        """Checks that the shards in the folder were stored with the settings of this command.

        This check is for a folder in which metadata.json is damaged or missing. The JSON of a shard
        contains only the digest of the run's identity, so the message cannot name the setting that
        differs.

        Args:
            run_log: Log of the folder.
            run: Id of the run that is repaired.

        Raises:
            InputError: If a shard was stored with other settings than those of this command.
        """
        metadata_url = f"{self.folder.url}/{METADATA}"
        stored_identity_digests = {commit.identity for commit in _commits_of(run_log, run).values()}
        if stored_identity_digests - {self.identity.digest, ""}:
            raise InputError(
                f"{metadata_url}: is damaged or missing, and the shards were stored with other "
                "settings than those of this repair; give the same flags or arguments as before"
            )
        if not self._has_warned_of_new_metadata:
            self._has_warned_of_new_metadata = True
            comparison_note = (
                "nothing compares them with the run"
                if "" in stored_identity_digests
                else "as before"
            )
            log.warning(
                "%s is written again with the settings of this repair: %s",
                metadata_url,
                comparison_note,
            )

    def _good_shards(self, run_log: RunLog) -> list[CheckedShard]:
        """Checks the shards that this planner has not checked yet, and returns all good shards.

        Args:
            run_log: Log of the folder, with the commits of the run that is repaired.

        Returns:
            The results for all good shards, in the order of the shards' numbers.

        Raises:
            FolderError: If a shard could not be checked.
        """
        unchecked_commits = [
            commit for commit in run_log.commits_in_order if not self._has_checked(commit)
        ]
        if unchecked_commits:
            log.info("looking for damaged shards")
        commits_and_check_arguments = [
            (commit, (self.folder, "", run_log, commit)) for commit in unchecked_commits
        ]
        for checked_shard in for_each_shard(check_shard, commits_and_check_arguments):
            if (check_failure := checked_shard.failure) is not None:
                raise FolderError(
                    f"{checked_shard.problem}; shard {checked_shard.commit.number} could not be "
                    "checked, so the repair ends",
                    check_failure.is_permanent,
                ) from check_failure
            if checked_shard.problem:
                log.warning("%s/%s", self.folder.url, checked_shard.problem)
            self._checked_shard_by_number[checked_shard.commit.number] = checked_shard
        checked_shards = [
            self._checked_shard_by_number[commit.number] for commit in run_log.commits_in_order
        ]
        return self._without_duplicates(
            [checked_shard for checked_shard in checked_shards if not checked_shard.problem]
        )

    def _has_checked(self, commit: Commit) -> bool:
        checked_shard = self._checked_shard_by_number.get(commit.number)
        return checked_shard is not None and checked_shard.commit == commit

    def _without_duplicates(self, shards: list[CheckedShard]) -> list[CheckedShard]:
        """Returns the shards that repeat no sample of an earlier shard.

        Args:
            shards: Shards without damage, in the order of their numbers.
        """
        distinct_sample_numbers, occurrence_counts = np.unique(
            _sample_numbers(shards), return_counts=True
        )
        duplicate_sample_numbers = set(distinct_sample_numbers[occurrence_counts > 1].tolist())
        if not duplicate_sample_numbers:
            return shards
        good_shards = []
        seen_sample_numbers = set[int]()
        for checked_shard in shards:
            duplicate_sample_numbers_in_shard = duplicate_sample_numbers.intersection(
                _sample_numbers([checked_shard]).tolist()
            )
            sample_numbers_in_earlier_shards = (
                duplicate_sample_numbers_in_shard & seen_sample_numbers
            )
            if sample_numbers_in_earlier_shards:
                commit_url = f"{self.folder.url}/{checked_shard.commit.name}"
                log.warning(
                    "%s: sample %d is also in a shard before it",
                    commit_url,
                    min(sample_numbers_in_earlier_shards),
                )
            else:
                seen_sample_numbers |= duplicate_sample_numbers_in_shard
                good_shards.append(checked_shard)
        return good_shards

    def _plan(self, run_log: RunLog, run: str, good_shards: list[CheckedShard]) -> StoragePlan:
        """Returns the plan that keeps the good shards, and replaces all others by reservations.

        Args:
            run_log: Log of the folder.
            run: Id of the run that is repaired.
            good_shards: Good shards, in the order of their numbers.
        """
        stored_metadata = run_log.metadata or {}
        good_commit_by_shard_number = {
            good_shard.commit.number: good_shard.commit for good_shard in good_shards
        }
        last_good_shard_number = max(good_commit_by_shard_number, default=0)
        damaged_shard_numbers = {
            number_of(damaged_file_name)
            for damaged_file_name in run_log.message_by_damaged_file
            if damaged_file_name != METADATA
        }
        existing_shard_numbers = damaged_shard_numbers | set(_commits_of(run_log, run))
        bad_shard_numbers_at_end = sorted(
            (
                shard_number
                for shard_number in existing_shard_numbers
                if shard_number > last_good_shard_number
            ),
            reverse=True,
        )
        shard_numbers_to_store_again = tuple(
            shard_number
            for shard_number in range(1, last_good_shard_number)
            if shard_number not in good_commit_by_shard_number
        )
        json_file_version_by_withdrawn_shard_number = {
            shard_number: run_log.file_version_by_shard_json_name.get(commit_name(shard_number))
            for shard_number in (*bad_shard_numbers_at_end, *shard_numbers_to_store_again)
        }
        continuation_mark = furthest_mark(
            good_commit_by_shard_number.values(), self._index_of_first_missing_sample(good_shards)
        )
        if shard_numbers_to_store_again:
            continuation_plan = StoragePlan(
                [*good_commit_by_shard_number.values()],
                run_id=run,
                next_shard_number=last_good_shard_number + 1,
                mark=continuation_mark,
            )
            return replace(
                continuation_plan,
                repair=self._repair_of_gaps(
                    shard_numbers_to_store_again,
                    json_file_version_by_withdrawn_shard_number,
                    continuation_plan,
                    stored_metadata,
                ),
            )
        continuation_plan = plan_rest(
            replace(run_log, commit_by_shard_number=good_commit_by_shard_number),
            self.limit_by_flag_name,
        )
        has_wrong_totals = continuation_plan.is_run_complete and any(
            total_problems(good_commit_by_shard_number.values(), stored_metadata)
        )
        return replace(
            continuation_plan,
            run_id=run,
            mark=continuation_mark,
            is_run_up_to_date=continuation_plan.is_run_up_to_date
            and not (json_file_version_by_withdrawn_shard_number or has_wrong_totals),
            repair=Repair(
                json_file_version_by_withdrawn_shard_number,
                num_samples_to_add=self._num_samples_to_add(continuation_plan),
            ),
        )

    def _repair_of_gaps(
        self,
        shard_numbers_to_store_again: tuple[int, ...],
        json_file_version_by_withdrawn_shard_number: Mapping[int, str | None],
        plan: StoragePlan,
        metadata: Mapping[str, Any],
    ) -> Repair:
        """Returns the repair of a run in which bad or missing shards precede a good shard.

        The repair withdraws all bad and missing shards, which means that it replaces their JSON
        files by reservations. The numbers of the withdrawn shards before the last good shard are
        gaps. The repair stores new shards under these numbers.

        Args:
            shard_numbers_to_store_again: Numbers of the withdrawn shards before the last good
                shard, in ascending order.
            json_file_version_by_withdrawn_shard_number: Number of each withdrawn shard, before or
                after the last good shard -> version of its JSON file. The version is None if the
                shard has no JSON file, or if the store has no versions.
            plan: Plan that has no repair yet, and in which `commits` contains the commits of the
                good shards only. The caller adds the returned repair to this plan.
            metadata: Content of metadata.json before the repair; empty if the file is missing.
        """
        gap_repair = Repair(
            json_file_version_by_withdrawn_shard_number,
            shard_numbers_to_store_again,
            previous_metadata=metadata,
        )
        if not self.identity.from_dataset:
            return replace(
                gap_repair,
                num_samples_to_add=max(metadata.get("samples", 0), self._num_samples_to_add(plan)),
            )
        if metadata.get("status") == "complete":
            return replace(gap_repair, num_samples_to_read=metadata["samples"])
        return replace(gap_repair, num_samples_to_read=plan.end_of_stored(self.identity.worker))

    def _num_samples_to_add(self, plan: StoragePlan) -> int:
        """Returns the number of samples that a program with a loop of its own must add again.

        The program must pass all samples from the first one to the last one in a good shard to the
        `ActivationStorage` again, which skips the samples in good shards. This function does not
        count samples in lost shards after the last good shard, because the commits do not show how
        many there were. Its caller takes the number of samples in metadata.json if that is larger.
        The result is 0 for a run on a data set, because the repair reads the data set again.

        Args:
            plan: Plan whose `commits` are the commits of the good shards.
        """
        return 0 if self.identity.from_dataset else plan.end_of_stored(self.identity.worker)

    def _index_of_first_missing_sample(self, good_shards: list[CheckedShard]) -> int:
        """Returns the index of this host's first sample that no undamaged shard contains.

        The samples of the host are counted from 0, in the order in which they are read. So the
        index is also the number of samples before the first missing sample.

        Args:
            good_shards: All undamaged shards of this host.
        """
        stored_sample_idx_values = np.sort(_sample_numbers(good_shards))
        host_worker = self.identity.worker
        expected_sample_idx_values = host_worker.sample_idx(0) + host_worker.stride * np.arange(
            len(stored_sample_idx_values)
        )
        return int(
            np.argmax(np.append(stored_sample_idx_values != expected_sample_idx_values, True))
        )


def _commits_of(run_log: RunLog, run: str) -> dict[int, Commit]:
    """Returns the commits of one run in a log, as a dict from the number of a shard to its commit.

    Args:
        run_log: Log of a folder.
        run: Id of the run.
    """
    return {
        shard_number: commit
        for shard_number, commit in run_log.commit_by_shard_number.items()
        if commit.run == run
    }


def _sample_numbers(shards: list[CheckedShard]) -> np.ndarray:
    """Returns the numbers (`sample_idx`) of all samples of some shards, one shard after the other.

    Args:
        shards: Results of checking the shards. Bad shards are left out.
    """
    sample_numbers_of_shards = [
        checked_shard.sample_numbers
        for checked_shard in shards
        if checked_shard.sample_numbers is not None
    ]
    return np.concatenate([NO_NUMBERS, *sample_numbers_of_shards])
