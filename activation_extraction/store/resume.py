"""Plans what a process stores in the folder of one host, from what is stored there already.

Planning only reads. It refuses folders that cannot be continued, before anything expensive begins:
another run, damaged files, gaps in the log, or more samples than the limits allow. `plan_run` plans
a run that begins or continues; repair.py plans a repair, with the help of this module. A run
continues at the furthest mark of its shards, and leaves out the samples after it that
`stored_after` finds in their tables.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.visible import counted
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Difference, Identity
from activation_extraction.store.run_log import (
    METADATA,
    OTHER_VERSION,
    Commit,
    RunLog,
    furthest_mark,
    own_files,
)
from activation_extraction.store.sample_table import read_table, samples_to_continue
from activation_extraction.store.totals import Totals
from activation_extraction.text.batch import Worker
from activation_extraction.text.mark import Mark
from activation_extraction.text.sample_facts import StoredSample

if TYPE_CHECKING:  # repair.py imports this module
    from activation_extraction.store.repair import Repair

VERSION_REMEDY = (
    "continue it with the version that began it, give another folder, or --overwrite to start anew"
)
FLAGS_REMEDY = "give the same flags as before, another folder, or --overwrite to start anew"


@dataclass(frozen=True)
class StoragePlan:
    """The plan of a process for the folder of one host: what is stored, and where the run goes on.

    Attributes:
        commits: Commits of the shards that are kept, in the order of their numbers.
        run: Id of the run that goes on. None for the one that metadata.json names, or for a new run
            without metadata.
        next: Number of the next new shard.
        mark: Place in the data where the run continues; None for the beginning.
        complete: Whether nothing is left to compute.
        up_to_date: Whether nothing is left to do, not even an update of metadata.json.
        skipped_rows: Number of skipped rows that metadata.json records if the run is complete,
            including rows after the last sample. Otherwise 0, and only the marks of the commits
            count skipped rows.
        empty_rows: Number of rows without text, with the same meaning as `skipped_rows`.
        repair: Further work of a repair; None for a run that begins or continues.
    """

    commits: list[Commit] = field(default_factory=list)
    run: str | None = None
    next: int = 1
    mark: Mark | None = None
    complete: bool = False
    up_to_date: bool = False
    skipped_rows: int = 0
    empty_rows: int = 0
    repair: "Repair | None" = None

    @property
    def totals(self) -> Totals:
        """The totals of the kept shards."""
        totals = Totals.of(self.commits)
        totals.count_rows(self.skipped_rows, self.empty_rows)
        return totals

    def end_of_stored(self, worker: Worker) -> int:
        """Returns the number of samples of a worker up to the last one that is, or was, stored.

        Samples before a mark were stored when the mark was made. Some of these samples may not be
        stored now: samples are packed in another order than they are read, and shards may be lost.
        """
        mark = furthest_mark(self.commits)
        ends = [worker.number_of(commit.last) + 1 for commit in self.commits if commit.count]
        return max([0 if mark is None else mark.samples, *ends])

    @property
    def gaps(self) -> tuple[int, ...]:
        """The numbers of the gaps in the log, which a repair fills."""
        return () if self.repair is None else self.repair.gaps

    @property
    def until(self) -> int | None:
        """The number of samples of the host that are read; None for the whole stream."""
        return None if self.repair is None else self.repair.until

    def mark_after(self, mark: Mark | None) -> Mark | None:
        """Returns the mark of a shard.

        Args:
            mark: Mark of the stream after the last sample of the shard.

        Returns:
            This mark; while a repair fills gaps, the mark that it began from.
        """
        return self.mark if self.gaps else mark


class ShardNumbers:
    """Hands out the numbers of the shards that a plan stores.

    Gaps come first, but the last gap is kept for the last shard.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: StoragePlan) -> None:
        self._gaps = [*plan.gaps]
        self._next = plan.next

    def take(self) -> int:
        """Returns the number of the next shard, which is not the last one."""
        if len(self._gaps) > 1:
            return self._gaps.pop(0)
        self._next += 1
        return self._next - 1

    def take_gaps(self) -> list[int]:
        """Returns the gaps that are still open.

        It is called once the samples that are left fit into one shard.
        """
        gaps, self._gaps = self._gaps, []
        return gaps


# Returns the plan for a folder, from its log. It is called when the process starts, and again once
# the process owns the folder. Raises InputError if nothing may be added.
Planner = Callable[[RunLog], StoragePlan]


def plan_run(identity: Identity, limits: Mapping[str, int | None], stored: RunLog) -> StoragePlan:
    """Plans a run that begins or continues.

    Args:
        identity: Identity of the run.
        limits: Most samples and most tokens to store, by name; None for no limit.
        stored: Log of the folder.

    Raises:
        InputError: Another run is stored there, files are damaged or missing, or the shards have
            more samples or tokens than the limits allow.
    """
    repairs = f"{identity.repair_option} repairs it"
    for why in stored.damaged.values():
        raise InputError(f"{why}; {VERSION_REMEDY if OTHER_VERSION in why else repairs}")
    if stored.identity is not None:
        refuse_difference(stored.url, identity.compare(stored.identity))
    elif any(name.startswith("shard_") for name in own_files(stored.files)):
        raise InputError(
            f"{stored.url}: already holds shards, but no {METADATA}; {identity.repair_option} "
            "writes it again; or give another folder"
        )
    refuse_elsewhere(stored)
    for problem in stored.problems if stored.metadata is not None else ():
        raise InputError(f"{problem}; {repairs}")
    return plan_rest(stored, limits)


def plan_rest(stored: RunLog, limits: Mapping[str, int | None]) -> StoragePlan:
    """Plans what is to be stored after shards without gaps.

    Args:
        stored: Log of the folder.
        limits: Most samples and most tokens to store, by name; None for no limit.

    Raises:
        InputError: The shards have more samples or tokens than the limits allow. Limits that
            metadata.json records are not compared: under the same limits, a repair may have stored
            whole samples that smaller limits had cut.
    """
    commits = stored.in_order
    totals = Totals.of_log(stored)
    metadata = stored.metadata or {}
    plan = StoragePlan(commits, stored.run, len(commits) + 1, furthest_mark(commits))
    counts = {"max_samples": totals.samples, "max_tokens": totals.tokens}
    for name, limit in limits.items():
        if limit is not None and counts[name] > limit and limit != metadata.get(name):
            unit = name.removeprefix("max_").removesuffix("s")
            raise InputError(
                f"--{name}: {stored.url} already holds {counted(counts[name], unit)}, more than "
                f"the {limit} that this host may store; {FLAGS_REMEDY}"
            )
    finished = {"status": "complete", **limits, "samples": totals.samples}
    if all(metadata.get(name) == value for name, value in finished.items()):
        rows = {name: metadata.get(name, 0) for name in ("skipped_rows", "empty_rows")}
        return replace(plan, complete=True, up_to_date=True, **rows)
    return plan


def stored_after(
    folder: Folder, commits: list[Commit], mark: Mark | None, identity: Identity
) -> dict[int, StoredSample]:
    """Returns the stored samples after a mark, by `sample_idx`, and perhaps some before it.

    Args:
        folder: Folder with the shards.
        commits: Commits of all shards.
        mark: Place in the data before which all samples are stored; None for the beginning.
        identity: Identity of the run.

    Raises:
        InputError: A sample before the mark is not stored, a sample is stored twice, or a table is
            damaged. The message names the repair.
    """
    count_before_mark = 0 if mark is None else mark.samples
    first = identity.worker.sample_idx(count_before_mark)
    samples: dict[int, StoredSample] = {}
    repairs = f"{identity.repair_option} repairs it"
    for commit in commits:
        if commit.count and commit.last >= first:
            try:
                samples |= samples_to_continue(read_table(folder, commit))
            except RunError as error:
                raise InputError(f"{error}; {repairs}") from error
    count_after_mark = sum(number >= first for number in samples)
    count_stored = sum(commit.count for commit in commits)
    lost = count_before_mark + count_after_mark - count_stored
    if lost > 0:  # a shard of an earlier repair, which was the last one, has been deleted
        raise InputError(
            f"{folder.url}: {counted(lost, 'sample')} before the mark of its shards not stored; "
            f"{repairs}"
        )
    if lost < 0:  # somebody has put a JSON back whose samples a repair had stored again
        raise InputError(
            f"{folder.url}: {counted(-lost, 'sample')} stored more than once; {repairs}"
        )
    return samples


def refuse_elsewhere(stored: RunLog, remote: str | None = None) -> None:
    """Raises InputError if the shards of a local run are not where they would be continued.

    Args:
        stored: Log of the local folder.
        remote: URL of the folder in a bucket that the run would use; None if it would store its
            shards in the local folder.
    """
    if stored.moved_to != remote and (stored.moved_to or stored.commits):
        place = "are here" if stored.moved_to is None else f"were uploaded to {stored.moved_to}"
        wanted = f", not in {remote}" if remote else ""
        raise InputError(
            f"{stored.url}: its shards {place}{wanted}; give --upload_to_gcs, --gcs_bucket and "
            "--gcs_prefix or leave them out, as before, or another --output_dir"
        )


def refuse_difference(where: str, difference: Difference | None) -> None:
    """Raises InputError if there is a difference between two identities."""
    if difference is not None:
        name, before, now = difference
        raise InputError(
            f"{where}: already holds a run that differs in {name}: "
            f"{shown(before, now)}, now {shown(now, before)}; {FLAGS_REMEDY}"
        )


def shown(value: Any, other: Any) -> str:
    """Returns a field of an identity for messages.

    Args:
        value: Value of the field. Of several values, only those that `other` lacks are shown.
        other: Value of the same field in another identity.
    """
    if isinstance(value, list):
        lacking = [item for item in value if item not in other]
        value = " ".join(map(str, lacking if {*value} != {*other} else value))
    text = str(value) or "nothing"
    if re.fullmatch("[0-9a-f]{64}", text):
        return f"digest {text[:12]}"
    return text if len(text) <= 100 else f"{text[:100].rstrip()} ..."
