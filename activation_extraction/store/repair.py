"""Plans a repair: finds damaged and missing shards, whose samples are then stored again.

A repair begins as any process does: it writes its id into metadata.json, and reads what is stored.

- *What is bad.* A shard is bad if its content was read and differs from its JSON, or if one of its
  files is definitely absent. It is also bad if it lists a sample that an earlier good shard lists,
  because somebody has put a lost JSON back. If a request fails, nobody knows whether the shard is
  bad: the repair ends, and has withdrawn nothing.
- *Withdrawing.* The JSON of every bad or missing shard is replaced by a reservation, on condition
  of exactly the version, or absence, that was checked. Where something else stands now (a commit
  that an earlier process had sent and that has landed since, or the work of another repair), the
  folder is read and planned again, and only the new commits are checked.
- *Bad shards at the end* are then gone, and the run simply goes on after those that are left.
- *Holes* are the numbers of bad shards that lie before a good one. The text is read again, from the
  mark of the last shard before the first hole up to the largest sample that is stored or lies
  before a mark. Every sample in between that no good shard lists is stored under the numbers of the
  holes. The last hole is committed last. As long as it is open, no other run goes on, so a repair
  that was killed is repaired by the next one. The samples after that are left to the run that
  continues; if the run was complete, the repair reads on up to its last sample.
- *Limits.* Up to the largest stored sample, no limit ends or cuts the stream, because samples after
  the hole are stored. So a lost sample that a limit had cut is stored whole.

A program with a loop of its own has no text that could be read again: it gives all its samples, and
those that are stored are skipped. If it ends before it has given all that there were, the last hole
stays open, so that the repair is not finished, and the program is told.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
from activation_extraction.store.totals import total_problems


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
        commits = {number: each for number, each in stored.commits.items() if each.run == run}
        good = self._good_shards(replace(stored, commits=commits))
        return self._plan(stored, run, good)

    def _newest_run(self, stored: RunLog) -> str:
        """Returns the run that the newest shard belongs to, for a folder that lacks metadata."""
        if not stored.commits:
            raise InputError(f"{self.target.url}: holds no extraction that could be repaired")
        newest = max(stored.commits.values(), key=lambda commit: commit.committed)
        found = tuple(newest.names.values())
        if found and found != self.identity.hooks:
            raise InputError(
                f"{self.target.url}: its shards have the hooks {' '.join(found)}, expected "
                f"{' '.join(self.identity.hooks)}, as asked now; ask for the same as before"
            )
        return newest.run

    def _refuse_others(self, stored: RunLog, run: str) -> None:
        """Raises InputError if the folder holds another run than this one, or files of another
        version of this program, which are not damaged."""
        for why in stored.damaged.values():
            if OTHER_VERSION in why:
                raise InputError(f"{why}; {VERSION_REMEDY}")
        if stored.identity is not None:
            refuse_difference(stored.url, self.identity.compare(stored.identity))
        else:
            self._refuse_other_shards(stored, run)
        refuse_elsewhere(stored)

    def _refuse_other_shards(self, stored: RunLog, run: str) -> None:
        """Does for a folder without metadata.json what comparing with it does: the shards record
        the digest of their run's identity, though not which setting differs.

        Raises:
            InputError: A shard was stored with other settings.
        """
        where = f"{self.target.url}/{METADATA}"
        digests = {each.identity for each in stored.commits.values() if each.run == run}
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
        """Checks every shard whose commit was not checked before, and returns the good ones, in the
        order of their numbers. Raises FolderError if a shard could not be checked."""
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
            found = doubled.intersection(_numbers_of([shard]).tolist())
            if again := found & listed:
                name = f"{self.target.url}/{shard.commit.name}"
                log.warning("%s: sample %d is also in a shard before it", name, min(again))
            else:
                listed |= found
                good.append(shard)
        return good

    def _plan(self, stored: RunLog, run: str, good: list[CheckedShard]) -> StoragePlan:
        """Returns the plan that keeps the good shards, and withdraws all others."""
        metadata = stored.metadata or {}
        kept = {shard.commit.number: shard.commit for shard in good}
        last = max(kept, default=0)
        damaged = {number_of(name) for name in stored.damaged if name != METADATA}
        bad = damaged | {number for number, commit in stored.commits.items() if commit.run == run}
        ends = sorted((number for number in bad if number > last), reverse=True)
        holes = tuple(number for number in range(1, last) if number not in kept)
        withdrawn = {number: stored.versions.get(commit_name(number)) for number in (*ends, *holes)}
        mark = furthest_mark(kept.values(), self._first_missing(good))
        if not holes:
            plan = plan_rest(replace(stored, commits=kept), self.limits)
            miscounted = plan.complete and any(total_problems(kept.values(), metadata))
            in_order = plan.up_to_date and not (ends or miscounted)
            return replace(plan, run=run, mark=mark, withdrawn=withdrawn, up_to_date=in_order)
        complete = metadata.get("status") == "complete"
        plan = StoragePlan(
            [*kept.values()],
            run=run,
            next=last + 1,
            mark=mark,
            withdrawn=withdrawn,
            holes=holes,
            recorded={**metadata, "status": "complete" if complete else "interrupted"},
        )
        if self.identity.from_dataset:
            until = metadata["samples"] if complete else plan.end_of_stored(self.identity.worker)
            plan = replace(plan, until=until)
        return plan

    def _first_missing(self, good: list[CheckedShard]) -> int:
        """Returns how many samples of this host come before the first one that is not stored."""
        numbers = np.sort(_numbers_of(good))
        worker = self.identity.worker
        expected = worker.sample_idx(0) + worker.stride * np.arange(len(numbers))
        return int(np.argmax(np.append(numbers != expected, True)))


def _numbers_of(shards: list[CheckedShard]) -> np.ndarray:
    """Returns the numbers of all samples of good shards, in the order of the shards."""
    known = [shard.sample_idx for shard in shards if shard.sample_idx is not None]
    return np.concatenate([NO_NUMBERS, *known])
