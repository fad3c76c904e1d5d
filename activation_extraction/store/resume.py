"""Plans what a run stores: what is there already, whether the same run stored it, what is left.

Planning only reads. It refuses what cannot be continued, before anything expensive begins.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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

VERSION_REMEDY = (
    "continue it with the version that began it, give another folder, or --overwrite to start anew"
)
FLAGS_REMEDY = "give the same flags as before, another folder, or --overwrite to start anew"


@dataclass(frozen=True)
class StoragePlan:
    """A plan says what is stored and kept, and where the run goes on.

    commits: the shards that are kept. run: the id of the run that goes on; None for the one that
    metadata.json names, if any. next: the number of the next new shard. mark: where in the
    data the run continues; None at the beginning. complete: whether nothing is left to compute.
    up_to_date: whether nothing is left to do, not even an update of metadata.json. skipped_rows,
    empty_rows: the counts of a complete extraction, which include rows after its last sample.

    A repair has more (repair.py). `withdrawn` maps the number of each damaged or missing shard to
    the version of its JSON that was checked, None for no JSON, in the order in which reservations
    replace them. `holes` are those of these numbers that lie before a good shard. `until` is how
    many samples of the host are read, None for all. `recorded` is the metadata, of which only the
    totals change.
    """

    commits: list[Commit] = field(default_factory=list)
    run: str | None = None
    next: int = 1
    mark: Mark | None = None
    complete: bool = False
    up_to_date: bool = False
    skipped_rows: int = 0
    empty_rows: int = 0
    withdrawn: Mapping[int, str | None] = field(default_factory=dict)
    holes: tuple[int, ...] = ()
    until: int | None = None
    recorded: Mapping[str, Any] | None = None

    @property
    def totals(self) -> Totals:
        """The totals of the kept shards."""
        totals = Totals.of(self.commits)
        totals.count_rows(self.skipped_rows, self.empty_rows)
        return totals

    def end_of_stored(self, worker: Worker) -> int:
        """Returns the number of samples of a worker up to the largest one that is stored, or that
        lies before a mark, since that one was stored.

        Some of them may not be stored: samples are packed in another order than they are read, and
        shards may be lost.
        """
        mark = furthest_mark(self.commits)
        ends = [worker.number_of(commit.last) + 1 for commit in self.commits if commit.count]
        return max([0 if mark is None else mark.samples, *ends])

    def repaired_status(self, samples: int) -> str:
        """Returns the status of a run whose holes are filled, of which `samples` are stored now.

        What comes after its largest stored sample may be left to the run that continues.
        """
        recorded = self.recorded or {}
        before = recorded.get("samples", 0)
        if self.until is None:  # a loop of its own has given all its samples
            return "complete" if samples >= before else "interrupted"
        whole = recorded.get("status") == "complete" and samples == before
        return "complete" if whole else "interrupted"


# Decides what is to be stored, from what is stored in the folder that has the shards. It is asked
# again once this process owns the folder. Raises InputError if nothing may be added.
Planner = Callable[[RunLog], StoragePlan]


def plan_run(identity: Identity, limits: Mapping[str, int | None], stored: RunLog) -> StoragePlan:
    """Plans a run that begins or continues. limits: the most samples and tokens to store, by name.

    Raises InputError if another run is stored there, if what is stored is damaged or has gaps, or
    if it is more than the limits allow.
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
    """Plans what is to be stored after the shards that are stored, which have no gaps.

    Raises InputError if these hold more than the limits allow, unless it is a repair that has
    stored more than the same limits: samples whole that smaller limits had cut.
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
    """Returns the samples after a mark that are stored, by `sample_idx`, and perhaps some others.

    Raises InputError, naming the repair, if a sample before the mark is not stored, if a sample is
    stored twice, or if a table is damaged.
    """
    before = 0 if mark is None else mark.samples
    first, found = identity.worker.sample_idx(before), dict[int, StoredSample]()
    repairs = f"{identity.repair_option} repairs it"
    for commit in commits:
        if commit.count and commit.last >= first:
            try:
                found |= samples_to_continue(read_table(folder, commit))
            except RunError as error:
                raise InputError(f"{error}; {repairs}") from error
    after = sum(number >= first for number in found)
    lost = before + after - sum(commit.count for commit in commits)
    if lost > 0:  # a shard of an earlier repair, which was the last one, has been deleted
        raise InputError(
            f"{folder.url}: {counted(lost, 'sample')} before the mark of its shards not stored; "
            f"{repairs}"
        )
    if lost < 0:  # somebody has put a JSON back whose samples a repair had stored again
        raise InputError(
            f"{folder.url}: {counted(-lost, 'sample')} stored more than once; {repairs}"
        )
    return found


def refuse_elsewhere(stored: RunLog, remote: str | None = None) -> None:
    """Raises InputError if the shards of a local run are not where they would be continued.

    remote: the URL of the folder in a bucket that they would be in; None: they would be here.
    """
    if stored.moved_to != remote and (stored.moved_to or stored.commits):
        found = "are here" if stored.moved_to is None else f"were uploaded to {stored.moved_to}"
        wanted = f", not in {remote}" if remote else ""
        raise InputError(
            f"{stored.url}: its shards {found}{wanted}; give --upload_to_gcs, --gcs_bucket and "
            "--gcs_prefix or leave them out, as before, or another --output_dir"
        )


def refuse_difference(where: str, difference: Difference | None) -> None:
    """Raises InputError if there is a difference between two identities."""
    if difference is not None:
        name, before, now = difference
        raise InputError(
            f"{where}: already holds an extraction that differs in {name}: "
            f"{shown(before, now)}, now {shown(now, before)}; {FLAGS_REMEDY}"
        )


def shown(value: Any, other: Any) -> str:
    """Returns a field of an identity as messages show it: of several values, those that `other`,
    the same field of another identity, does not have."""
    if isinstance(value, tuple):
        own = [each for each in value if each not in other]
        value = " ".join(map(str, own if {*value} != {*other} else value))
    text = str(value) or "nothing"
    if re.fullmatch("[0-9a-f]{64}", text):
        return f"digest {text[:12]}"
    return text if len(text) <= 100 else f"{text[:100].rstrip()} ..."
