"""A repair: finds bad and missing shards of a run, whose samples are then stored again.

A repair begins as any process does (run_log.py): it writes its id into metadata.json and reads the
log. `RepairPlanner` then decides what is to be done, and passes it to the storage as a `Repair`.

- *Bad shards.* A shard is bad if its content was read and differs from its commit, or if one of its
  files is definitely absent. It is also bad if it lists a sample that an earlier good shard lists,
  because somebody has put a lost JSON back. If a request fails, nobody knows whether the shard is
  bad: the repair ends, and has withdrawn nothing.
- *Withdrawing.* The entry of every bad or missing shard is replaced by a reservation, on condition
  of exactly the version, or absence, that was checked. Those at the end of the log come first, the
  last one before the others, so that a repair that is killed among them leaves no new gap. Where
  something else stands now (a commit that an earlier process had sent and that has landed since, or
  the work of another repair), the log is read and planned again, and only the new commits are
  checked.
- *Bad shards at the end of the log* are then gone, and the run simply goes on after the others.
- *Gaps* are the numbers of the bad shards that lie before a good one. The text is read again, from
  the furthest mark before which no sample is missing, up to the largest sample that is stored or
  lies before a mark. Every sample in between that no good shard lists is stored under the numbers
  of the gaps, in order. The last gap is kept for the last shard, and samples that do not fit get
  new numbers before that. As long as a gap is open, no other run goes on, so a repair that was
  killed is repaired by the next one. All these shards get the mark that the repair began from: a
  mark may not pass a sample whose shard is still open. The samples after the largest one are left
  to the run that continues; if the run was complete, the repair reads on up to its last sample.
- *Limits.* Up to the largest stored sample, no limit ends or cuts the stream, because samples after
  the gap are stored. So a lost sample that a limit had cut is stored whole.

For example, shards 3 and 5 of the seven of a complete run are damaged:

1. `RepairPlanner._good_shards` checks all seven. The good ones are 1, 2, 4, 6 and 7, so
   `RepairPlanner._plan` finds the gaps 3 and 5, and 8 as the number of the next new shard. No shard
   at the end of the log is bad.
2. `LogWriter.take_over` writes the id of this process into metadata.json, plans again, replaces the
   entries 3 and 5 by reservations (`withdraw`), and reserves 8. From now on writers and readers
   refuse the run as one with gaps.
3. `StoragePlan.mark` is the furthest mark before which no sample is missing, such as the one of
   shard 2, and `Repair.until` the number of samples of the complete run. The text is read from this
   mark up to that sample, and `ActivationStorage.stored_after_mark` tells which samples the good
   shards list; these are left out.
4. `ShardWriter` stores the others. `ShardNumbers` gives a full shard the number 3, more full shards
   8, 9 and so on, and the last shard the number 5. If one shard holds all samples, it gets the
   number 5, and 3 is committed without samples.
5. `LogWriter.finish` writes metadata.json, whose status `Repair.status` decides.

A program with a loop of its own has no text that could be read again: it adds all its samples, and
those that are stored are skipped. If it ends before it has added as many as there were, the last
gap stays open, so that the repair is not finished, and a message says so.
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
    """The work of a repair in the folder of one host, as the storage asks for it.

    Attributes:
        withdrawn: Version of the entry that was checked, by the number of each bad or missing
            shard, in the order in which reservations replace the entries. None for no entry.
        gaps: Numbers of the bad shards that lie before a good one, in ascending order. If there are
            none, the repair withdraws shards and then continues the run as any process does.
        until: Number of samples of the host that are read. None to read to the end of the data, and
            for a program with a loop of its own.
        due: Number of samples that a program with a loop of its own must add: all up to the last
            one that is, or was, stored. 0 for a run on a data set, which is read again.
        metadata: Content of the run's metadata.json before the repair. It is kept if there are
            gaps.
    """

    withdrawn: Mapping[int, str | None]
    gaps: tuple[int, ...] = ()
    until: int | None = None
    due: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def limits(self, limits: Mapping[str, int | None]) -> dict[str, int | None]:
        """Returns the most samples and tokens of the stream, by name.

        Args:
            limits: Limits that the flags of the repair ask for. They count only if there are no
                gaps; otherwise the limits of the run do, which metadata.json records.
        """
        recorded = self.metadata if self.gaps else {}
        return {name: recorded.get(name, most) for name, most in limits.items()}

    def samples_missing(self, count: int) -> int:
        """Returns how many samples a program with a loop of its own still has to add.

        Args:
            count: Number of samples that it has added, including those that were skipped.
        """
        return max(self.due - count, 0)

    def status(self, samples: int) -> str:
        """Returns the status of the run once all gaps are filled: "complete" or "interrupted".

        A run is complete again if it was complete and has as many samples as before. Otherwise, the
        samples after the largest stored one are left to the run that continues. A program with a
        loop of its own has added all its samples by then, so its run is complete, too.

        Args:
            samples: Number of samples that are stored now.
        """
        before = self.metadata.get("samples", 0)
        if self.until is None:
            return "complete" if samples >= before else "interrupted"
        return "complete" if self._was_complete and samples == before else "interrupted"

    @property
    def _was_complete(self) -> bool:
        return self.metadata.get("status") == "complete"

    def revised(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of metadata.json during this repair.

        If gaps are filled, it is the metadata of the run, of which only the totals and the status
        change, and these only at the end. Otherwise it is `content`.

        Args:
            content: The content that a run with the flags of the repair would write. Its status
                "complete" means that all gaps are filled.
        """
        if not self.gaps:
            return dict(content)
        status = "complete" if self._was_complete else "interrupted"
        updated = ["written", "remote"]
        if content["status"] == "complete":
            status = self.status(content["samples"])
            updated += [*COUNTED, *CUT, "hooks"]
        changes = {name: content[name] for name in updated}
        return {**content, **self.metadata, **changes, "status": status}


@dataclass
class RepairPlanner:
    """Plans the repair of one host's folder.

    It is called before the repair begins, and again whenever somebody may have written to the
    folder since. It then checks only the shards whose commits it has not seen yet.

    Attributes:
        target: The folder that has the shards.
        identity: The identity of the run, as the flags or arguments of the repair ask.
        limits: The most samples and tokens that the flags ask for, by name.
    """

    target: Folder
    identity: Identity
    limits: Mapping[str, int | None]
    _checked: dict[int, CheckedShard] = field(default_factory=dict)  # by the numbers of the shards
    _warned: bool = False

    def __call__(self, stored: RunLog) -> StoragePlan:
        """Returns the plan for a folder.

        Raises:
            InputError: The folder holds nothing, or another run.
            FolderError: A request failed, so it is not known which shards are bad.
        """
        run = stored.run or self._newest_run(stored)
        self._refuse_others(stored, run)
        commits = {number: commit for number, commit in stored.commits.items() if commit.run == run}
        good = self._good_shards(replace(stored, commits=commits))
        return self._plan(stored, run, good)

    def _newest_run(self, stored: RunLog) -> str:
        """Returns the run that the newest shard belongs to, for a folder that lacks metadata."""
        if not stored.commits:
            raise InputError(f"{self.target.url}: holds no run that could be repaired")
        newest = max(stored.commits.values(), key=lambda commit: commit.committed)
        hooks = tuple(newest.names.values())
        if hooks and hooks != self.identity.hooks:
            raise InputError(
                f"{self.target.url}: its shards have the hooks {' '.join(hooks)}, expected "
                f"{' '.join(self.identity.hooks)}, as asked now; ask for the same as before"
            )
        return newest.run

    def _refuse_others(self, stored: RunLog, run: str) -> None:
        """Refuses a folder that this repair must not change.

        Raises:
            InputError: The folder holds another run, or files of another version of this program,
                which are not damaged.
        """
        for why in stored.damaged.values():
            if OTHER_VERSION in why:
                raise InputError(f"{why}; {VERSION_REMEDY}")
        if stored.identity is not None:
            refuse_difference(stored.url, self.identity.compare(stored.identity))
        else:
            self._refuse_other_shards(stored, run)
        refuse_elsewhere(stored)

    def _refuse_other_shards(self, stored: RunLog, run: str) -> None:
        """Compares this repair with the shards of a folder that lacks metadata.json.

        They record only the digest of their run's identity, so the message cannot name the setting
        that differs.

        Raises:
            InputError: A shard was stored with other settings.
        """
        where = f"{self.target.url}/{METADATA}"
        digests = {commit.identity for commit in stored.commits.values() if commit.run == run}
        if digests - {self.identity.digest, ""}:
            raise InputError(
                f"{where}: is damaged or missing, and the shards were stored with other settings "
                "than those of this repair; give the same flags or arguments as before"
            )
        if not self._warned:
            self._warned = True
            compared = "nothing compares them with the run" if "" in digests else "as before"
            log.warning("%s is written again with the settings of this repair: %s", where, compared)

    def _good_shards(self, stored: RunLog) -> list[CheckedShard]:
        """Checks every shard whose commit was not checked before.

        Returns:
            All good shards, in the order of their numbers.

        Raises:
            FolderError: A shard could not be checked.
        """
        new = [commit for commit in stored.in_order if not self._has_checked(commit)]
        if new:
            log.info("looking for damaged shards")
        arguments = [(commit, (self.target, "", stored, commit)) for commit in new]
        for shard in for_each_shard(check_shard, arguments):
            if (failure := shard.failure) is not None:
                raise FolderError(
                    f"{shard.problem}; shard {shard.commit.number} could not be checked, so "
                    "the repair ends",
                    failure.final,
                ) from failure
            if shard.problem:
                log.warning("%s/%s", self.target.url, shard.problem)
            self._checked[shard.commit.number] = shard
        shards = [self._checked[commit.number] for commit in stored.in_order]
        return self._without_doubles([shard for shard in shards if not shard.problem])

    def _has_checked(self, commit: Commit) -> bool:
        checked = self._checked.get(commit.number)
        return checked is not None and checked.commit == commit

    def _without_doubles(self, shards: list[CheckedShard]) -> list[CheckedShard]:
        """Leaves out every shard that lists a sample which a shard before it lists as well."""
        numbers, times = np.unique(_numbers_of(shards), return_counts=True)
        doubled = {*numbers[times > 1].tolist()}
        if not doubled:
            return shards
        good, listed = [], set[int]()
        for shard in shards:
            shared = doubled.intersection(_numbers_of([shard]).tolist())
            if again := shared & listed:
                name = f"{self.target.url}/{shard.commit.name}"
                log.warning("%s: sample %d is also in a shard before it", name, min(again))
            else:
                listed |= shared
                good.append(shard)
        return good

    def _plan(self, stored: RunLog, run: str, good: list[CheckedShard]) -> StoragePlan:
        """Returns the plan that keeps the good shards, and withdraws all others."""
        kept = {shard.commit.number: shard.commit for shard in good}
        last = max(kept, default=0)
        damaged = {number_of(name) for name in stored.damaged if name != METADATA}
        committed = {number for number, commit in stored.commits.items() if commit.run == run}
        at_the_end = sorted((n for n in damaged | committed if n > last), reverse=True)
        gaps = tuple(number for number in range(1, last) if number not in kept)
        withdrawn = {n: stored.versions.get(commit_name(n)) for n in (*at_the_end, *gaps)}
        mark = furthest_mark(kept.values(), self._first_missing(good))
        if gaps:
            plan = StoragePlan([*kept.values()], run=run, next=last + 1, mark=mark)
            return replace(plan, repair=self._filling(gaps, withdrawn, plan, stored.metadata or {}))
        plan = plan_rest(replace(stored, commits=kept), self.limits)
        miscounted = plan.complete and any(total_problems(kept.values(), stored.metadata or {}))
        return replace(
            plan,
            run=run,
            mark=mark,
            up_to_date=plan.up_to_date and not (withdrawn or miscounted),
            repair=Repair(withdrawn, due=self._due(plan)),
        )

    def _filling(
        self,
        gaps: tuple[int, ...],
        withdrawn: Mapping[int, str | None],
        plan: StoragePlan,
        metadata: Mapping[str, Any],
    ) -> Repair:
        """Returns the repair that fills gaps between the commits of a plan."""
        repair = Repair(withdrawn, gaps, metadata=metadata)
        if not self.identity.from_dataset:
            return replace(repair, due=max(metadata.get("samples", 0), self._due(plan)))
        if metadata.get("status") == "complete":
            return replace(repair, until=metadata["samples"])
        return replace(repair, until=plan.end_of_stored(self.identity.worker))

    def _due(self, plan: StoragePlan) -> int:
        """Returns the number of samples, from the first, that must be added to the repaired run.

        A program with a loop of its own adds them, as far as the good shards show how many there
        were. 0 for a run on a data set, which the program reads again by itself.
        """
        return 0 if self.identity.from_dataset else plan.end_of_stored(self.identity.worker)

    def _first_missing(self, good: list[CheckedShard]) -> int:
        """Returns how many samples of this host come before the first one that is not stored."""
        numbers = np.sort(_numbers_of(good))
        worker = self.identity.worker
        expected = worker.sample_idx(0) + worker.stride * np.arange(len(numbers))
        return int(np.argmax(np.append(numbers != expected, True)))


def _numbers_of(shards: list[CheckedShard]) -> np.ndarray:
    """Returns the numbers of all samples of good shards, in the order of the shards."""
    numbers = [shard.sample_idx for shard in shards if shard.sample_idx is not None]
    return np.concatenate([NO_NUMBERS, *numbers])
