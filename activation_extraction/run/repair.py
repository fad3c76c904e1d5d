"""--repair: finds damaged and missing shards, and has their samples computed again.

A process first withdraws the commits of all bad shards. If these are the last ones, the run simply
goes on after the shards that are left. If some lie before an intact shard, the text is read again
up to the last mark, and what no intact shard lists is stored under their numbers. As long as one of
these is open, no other run goes on; so a repair that is killed is repaired by the next one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from activation_extraction.common.errors import InputError
from activation_extraction.common.log import log
from activation_extraction.inspect.verify import check_shards, total_problems
from activation_extraction.inspect.verify_shard import CheckedShard
from activation_extraction.store.commit import METADATA, Commit, number_of
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import Stored
from activation_extraction.store.resume import (
    StoragePlan,
    furthest_mark,
    plan_rest,
    refuse_difference,
    refuse_elsewhere,
)


@dataclass
class RepairPlanner:
    """Plans the repair of one host's folder.

    target: the folder that has the shards. limits: the most samples and tokens that the flags ask
    for. Raises InputError if the folder holds nothing, or another run.
    """

    target: Folder
    identity: Identity
    limits: Mapping[str, int | None]
    _commits: Mapping[int, Commit] | None = None
    _plan: StoragePlan | None = None

    def __call__(self, stored: Stored) -> StoragePlan:
        """Reads every shard to find the damaged ones. The second time, raises InputError if another
        process has committed a shard since the first."""
        run = stored.run or self._newest_run(stored)
        commits = {number: each for number, each in stored.commits.items() if each.run == run}
        if self._plan is None:
            self._commits = commits
            self._plan = self._make(replace(stored, commits=commits), run)
        elif commits != self._commits:
            raise InputError(
                f"{self.target.url}: another process has written to it during the check; "
                "start --repair again once that process has ended"
            )
        return self._plan

    def _newest_run(self, stored: Stored) -> str:
        """Returns the run that the newest shard belongs to, for a folder that lacks metadata."""
        if not stored.commits:
            raise InputError(f"{self.target.url}: holds no extraction that --repair could work on")
        newest = max(stored.commits.values(), key=lambda commit: commit.committed)
        found = tuple(newest.names.values())
        if found and found != self.identity.hooks:
            raise InputError(
                f"{self.target.url}: its shards have the hooks {' '.join(found)}, expected "
                f"{' '.join(self.identity.hooks)}, as these flags ask; give the flags of the run"
            )
        return newest.run

    def _make(self, stored: Stored, run: str) -> StoragePlan:
        metadata = stored.metadata or {}
        if stored.identity is None:
            log.warning(
                "%s/%s is damaged or missing and is written again: from these flags, which nothing "
                "compares with those of the run",
                *(self.target.url, METADATA),
            )
        else:
            refuse_difference(stored.url, self.identity.compare(stored.identity))
        refuse_elsewhere(stored)
        log.info("looking for damaged shards")
        good = [each for each in check_shards(self.target, {"": stored}) if not each.problems]
        kept = {shard.commit.number: shard.commit for shard in good}
        last = max(kept, default=0)
        bad = {number_of(name) for name in stored.damaged if name != METADATA} | {*stored.commits}
        holes = tuple(number for number in range(1, last) if number not in kept)
        ends = tuple(sorted((number for number in bad if number > last), reverse=True))
        mark = furthest_mark(kept.values(), self._first_missing(good))
        if not holes:
            plan = plan_rest(replace(stored, commits=kept), self.limits)
            miscounted = plan.complete and any(total_problems(kept.values(), metadata))
            in_order = plan.up_to_date and not (ends or miscounted)
            return replace(plan, run=run, mark=mark, withdrawn=ends, up_to_date=in_order)
        end, complete = furthest_mark(kept.values()), metadata.get("status") == "complete"
        until = 0 if end is None else end.samples  # the run that continues stores the rest
        if complete:
            until = metadata["samples"]
        return StoragePlan(
            [*kept.values()],
            run=run,
            next=last + 1,
            mark=mark,
            withdrawn=(*ends, *holes),
            holes=holes,
            until=until,
            recorded={**metadata, "status": "complete" if complete else "interrupted"},
        )

    def _first_missing(self, good: list[CheckedShard]) -> int:
        """Returns how many samples of this host come before the first one that is not stored."""
        known = [shard.sample_idx for shard in good if shard.sample_idx is not None]
        numbers = np.sort(np.concatenate([np.zeros(0, np.int64), *known]))
        worker = self.identity.worker
        expected = worker.sample_idx(0) + worker.stride * np.arange(len(numbers))
        return int(np.argmax(np.append(numbers != expected, True)))
