"""Plans how a process continues the stored run in the folder of one host.

`plan_run` plans a run that begins or is continued; repair.py plans a repair with functions of this
module. A run continues at the furthest mark of its shards. Some samples after this mark may already
be stored, because packing changes the order of the samples in a group. `stored_after` finds them,
so that they are not computed again.

Planning only reads. It refuses a folder before anything expensive begins if the folder contains
another run, if files are damaged, if shards before the last one are missing, or if more samples are
stored than the limits allow. log_writer.py carries the plan out.
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

if TYPE_CHECKING:  # repair.py imports this module, so an import at run time would be circular
    from activation_extraction.store.repair import Repair

VERSION_REMEDY = (
    "continue it with the version that began it, give another folder, or --overwrite to start anew"
)
FLAGS_REMEDY = "give the same flags as before, another folder, or --overwrite to start anew"


@dataclass(frozen=True)
class StoragePlan:
    """Describes which shards a host's folder contains, and how a process continues the run there.

    Attributes:
        commits: Commits of the stored shards, in the order of their numbers. Bad shards, which a
            repair withdraws, are left out.
        run_id: Id of the run. None if a new run begins.
        next_shard_number: Number for the first shard that is stored after the last shard in
            `commits`, from 1. In a repair, the numbers of missing and bad shards before it are in
            the property `shard_numbers_to_store_again`.
        mark: Mark from which the run continues. None for the beginning of the data.
        is_run_complete: Whether no sample of the run is left to store.
        is_run_up_to_date: Whether nothing is left to do for the run, not even an update of
            metadata.json.
        num_skipped_rows: For a complete run, the number of skipped rows in metadata.json, which
            includes rows after the last sample. 0 for an incomplete run, whose number is taken from
            the marks of the commits.
        num_empty_rows: For a complete run, the number of rows without text in metadata.json. 0 for
            an incomplete run, whose number is taken from the marks of the commits.
        repair: Details of a repair: the shards that it replaces, and the number of samples that it
            reads. None if the process begins or continues a run.
    """

    commits: list[Commit] = field(default_factory=list)
    run_id: str | None = None
    next_shard_number: int = 1
    mark: Mark | None = None
    is_run_complete: bool = False
    is_run_up_to_date: bool = False
    num_skipped_rows: int = 0
    num_empty_rows: int = 0
    repair: "Repair | None" = None

    @property
    def totals(self) -> Totals:
        """The totals over the shards in `commits`."""
        totals_of_shards = Totals.of(self.commits)
        totals_of_shards.update_row_counts(self.num_skipped_rows, self.num_empty_rows)
        return totals_of_shards

    def end_of_stored(self, worker: Worker) -> int:
        """Returns the number after the last sample of a worker that was ever stored.

        The worker's samples are numbered from 0 in the order in which they are read. When a commit
        gets a mark, all samples before the mark are stored, and shards may contain further samples
        after the last mark.

        Args:
            worker: Worker that writes to the folder.

        Returns:
            The larger of two numbers: the number of samples before the last mark in `commits`, and
            1 plus the largest number of a sample in the shards of `commits`. 0 if nothing was
            stored. Some samples with smaller numbers may not be stored now, because samples are
            stored in another order than they are read, and because shards may have been lost.
        """
        last_mark = furthest_mark(self.commits)
        cumulative_sample_counts = [
            worker.number_of(commit.last) + 1 for commit in self.commits if commit.count
        ]
        sample_count_before_mark = 0 if last_mark is None else last_mark.samples
        return max([sample_count_before_mark, *cumulative_sample_counts])

    @property
    def number_to_reserve(self) -> int:
        """The smallest shard number after all shards, including shards that a repair withdraws.

        A process reserves this number before it stores shards, because an earlier process may still
        be about to commit a shard under this number. The reservation prevents such a commit.
        """
        withdrawn_shard_numbers: list[int] = []
        if self.repair is not None:
            withdrawn_shard_numbers += self.repair.json_file_version_by_withdrawn_shard_number
        last_withdrawn_shard_number = max(withdrawn_shard_numbers, default=0)
        return max(self.next_shard_number, last_withdrawn_shard_number + 1)

    @property
    def shard_numbers_to_store_again(self) -> tuple[int, ...]:
        """The numbers of the missing and bad shards before the last good shard, in ascending order.

        A repair stores shards under these numbers again. Bad shards after the last good shard are
        only withdrawn, and the run continues in their place. Empty without a repair.
        """
        return () if self.repair is None else self.repair.shard_numbers_to_store_again

    @property
    def num_samples_to_read(self) -> int | None:
        """The number of samples, from this host's first one, after which reading stops.

        Only a repair that stores missing or bad shards again has such a limit, because it stores
        no samples after the last one that was ever stored. None to read all the data, and for a
        program with a loop of its own.
        """
        return None if self.repair is None else self.repair.num_samples_to_read

    def mark_after(self, mark: Mark | None) -> Mark | None:
        """Returns the mark for the commit of a new shard.

        Args:
            mark: Mark from which the run could continue once this shard and all earlier ones are
                stored. None if a program with a loop of its own adds the samples, because its
                shards have no marks.

        Returns:
            In a repair that stores missing or bad shards again: the mark at which the repair began;
            None if it began at the beginning of the data. A run may only continue from a mark if
            all samples before the mark are stored, and during the repair, this is certain of no
            later mark. Without such a repair: the argument `mark`.
        """
        return self.mark if self.shard_numbers_to_store_again else mark


class ShardNumbers:
    """Gives out the numbers of the shards that are still to be stored.

    A repair gives the numbers of missing and bad shards (the gaps), except the last one, to its
    first shards. Then it gives new numbers to further shards. Its last shard gets the number of the
    last gap. So there is a gap until the repair is finished. No process can continue a run with a
    gap, so an unfinished repair is noticed.

    Args:
        plan: Plan of this process, which contains the numbers of the gaps, and the first new number
            (`next_shard_number`).
    """

    def __init__(self, plan: StoragePlan) -> None:
        self._shard_numbers_to_store_again = [*plan.shard_numbers_to_store_again]
        self._next_shard_number = plan.next_shard_number

    def take(self) -> int:
        """Returns the number of the next shard.

        Outside of a repair, every number is new. In a repair, the numbers of missing and bad shards
        (the gaps) come before new numbers. The highest gap is never returned here, because
        `take_gaps` returns it when the repair stores its final shard.
        """
        if len(self._shard_numbers_to_store_again) > 1:
            return self._shard_numbers_to_store_again.pop(0)
        self._next_shard_number += 1
        return self._next_shard_number - 1

    def take_gaps(self) -> list[int]:
        """Returns all gaps that `take` has not returned, in ascending order.

        A gap is a shard number that a repair uses again, because the shard with this number is
        missing or bad.

        This must be called only when the run or the repair ends, and the remaining samples fit into
        one shard. In a repair, the caller stores these samples in a shard with the last number of
        the list, and a shard without samples for each of the other numbers. The list is empty if
        there is no repair.
        """
        remaining_shard_numbers = self._shard_numbers_to_store_again
        self._shard_numbers_to_store_again = []
        return remaining_shard_numbers


# A function that takes the log of a folder and returns the plan of this process. It is called when
# the process starts, and again when the process has become the owner of the folder. It raises
# InputError if the stored run cannot be continued.
Planner = Callable[[RunLog], StoragePlan]


def plan_run(
    identity: Identity, limit_by_flag_name: Mapping[str, int | None], run_log: RunLog
) -> StoragePlan:
    """Plans how a process begins a run in a folder, or continues the run that the folder contains.

    Args:
        identity: Identity of the run.
        limit_by_flag_name: Largest numbers of samples and of tokens to store, by the names
            "max_samples" and "max_tokens"; None for no limit.
        run_log: Log of the folder.

    Returns:
        The plan: the commits of the stored shards, and the mark from which the run continues (see
        `StoragePlan`).

    Raises:
        InputError: If the folder contains another run, files are damaged or missing, or the shards
            contain more samples or tokens than the limits allow.
    """
    repair_hint = f"{identity.repair_option} repairs it"
    for damage_message in run_log.message_by_damaged_file.values():
        damage_remedy = VERSION_REMEDY if OTHER_VERSION in damage_message else repair_hint
        raise InputError(f"{damage_message}; {damage_remedy}")
    if run_log.identity is not None:
        refuse_difference(run_log.url, identity.compare(run_log.identity))
    elif any(file_name.startswith("shard_") for file_name in own_files(run_log.size_by_file_name)):
        raise InputError(
            f"{run_log.url}: already holds shards, but no {METADATA}; {identity.repair_option} "
            "writes it again; or give another folder"
        )
    refuse_elsewhere(run_log)
    for missing_file_problem in run_log.problems if run_log.metadata is not None else ():
        raise InputError(f"{missing_file_problem}; {repair_hint}")
    return plan_rest(run_log, limit_by_flag_name)


def plan_rest(run_log: RunLog, limit_by_flag_name: Mapping[str, int | None]) -> StoragePlan:
    """Plans how a run goes on after its last shard, if no shard before it is missing.

    Args:
        run_log: Log of the folder, whose shards are numbered without gaps.
        limit_by_flag_name: Largest numbers of samples and of tokens to store, by the names
            "max_samples" and "max_tokens"; None for no limit.

    Returns:
        The plan, whose field `repair` is None.

    Raises:
        InputError: If the shards contain more samples or tokens than the limits allow. A limit is
            not checked if metadata.json records the same limit, because a repair may have exceeded
            it: a repair stores the whole of a sample that the limit had cut.
    """
    stored_commits = run_log.commits_in_order
    stored_totals = Totals.of_log(run_log)
    stored_metadata = run_log.metadata or {}
    plan_to_continue = StoragePlan(
        stored_commits, run_log.run, len(stored_commits) + 1, furthest_mark(stored_commits)
    )
    stored_count_by_flag_name = {
        "max_samples": stored_totals.samples,
        "max_tokens": stored_totals.tokens,
    }
    for flag_name, max_count in limit_by_flag_name.items():
        is_limit_exceeded = (
            max_count is not None and stored_count_by_flag_name[flag_name] > max_count
        )
        if is_limit_exceeded and max_count != stored_metadata.get(flag_name):
            counted_noun = flag_name.removeprefix("max_").removesuffix("s")
            raise InputError(
                f"--{flag_name}: {run_log.url} already holds "
                f"{counted(stored_count_by_flag_name[flag_name], counted_noun)}, more than the "
                f"{max_count} that this host may store; {FLAGS_REMEDY}"
            )
    metadata_if_complete = {
        "status": "complete",
        **limit_by_flag_name,
        "samples": stored_totals.samples,
    }
    if all(
        stored_metadata.get(metadata_key) == expected_value
        for metadata_key, expected_value in metadata_if_complete.items()
    ):
        return replace(
            plan_to_continue,
            is_run_complete=True,
            is_run_up_to_date=True,
            num_skipped_rows=stored_metadata.get("skipped_rows", 0),
            num_empty_rows=stored_metadata.get("empty_rows", 0),
        )
    return plan_to_continue


def stored_after(
    folder: Folder, commits: list[Commit], mark: Mark | None, identity: Identity
) -> dict[int, StoredSample]:
    """Finds the stored samples after a mark.

    Args:
        folder: Folder that contains the shards.
        commits: Commits of all shards.
        mark: Mark before which all samples are stored; None for the beginning of the data.
        identity: Identity of the run.

    Returns:
        The stored samples after the mark, by `sample_idx`. Samples before the mark are included if
        a shard contains them together with samples after the mark.

    Raises:
        InputError: If a sample before the mark is not stored, a sample is stored twice, or a table
            of samples is damaged.
    """
    sample_count_before_mark = 0 if mark is None else mark.samples
    first_sample_idx_after_mark = identity.worker.sample_idx(sample_count_before_mark)
    stored_sample_by_idx: dict[int, StoredSample] = {}
    repair_hint = f"{identity.repair_option} repairs it"
    for commit in commits:
        if commit.count and commit.last >= first_sample_idx_after_mark:
            try:
                stored_sample_by_idx |= samples_to_continue(read_table(folder, commit))
            except RunError as error:
                raise InputError(f"{error}; {repair_hint}") from error
    sample_count_after_mark = sum(
        sample_idx >= first_sample_idx_after_mark for sample_idx in stored_sample_by_idx
    )
    stored_sample_count = sum(commit.count for commit in commits)
    missing_sample_count = sample_count_before_mark + sample_count_after_mark - stored_sample_count
    # Samples before the mark are missing, for example because a repair had stored them in the last
    # shard, and this shard was deleted afterwards.
    if missing_sample_count > 0:
        raise InputError(
            f"{folder.url}: {counted(missing_sample_count, 'sample')} before the mark of its "
            f"shards not stored; {repair_hint}"
        )
    # More samples are stored than there are sample numbers, so some are stored twice. This happens
    # if, for example, a repair stored the samples of a lost JSON file again, and the file was put
    # back afterwards.
    if missing_sample_count < 0:
        raise InputError(
            f"{folder.url}: {counted(-missing_sample_count, 'sample')} stored more than once; "
            f"{repair_hint}"
        )
    return stored_sample_by_idx


def refuse_elsewhere(run_log: RunLog, remote: str | None = None) -> None:
    """Refuses a local folder if its run stores the shards in another place than this process would.

    Args:
        run_log: Log of the local folder.
        remote: URL of the folder in a bucket in which this process would store shards. None if it
            would store them in the local folder.

    Raises:
        InputError: If the shards are in another folder.
    """
    upload_url = run_log.moved_to
    if upload_url != remote and (upload_url or run_log.commit_by_shard_number):
        shards_location_clause = (
            "are here" if upload_url is None else f"were uploaded to {upload_url}"
        )
        requested_location_clause = f", not in {remote}" if remote else ""
        raise InputError(
            f"{run_log.url}: its shards {shards_location_clause}{requested_location_clause}; give "
            "--upload_to_gcs, --gcs_bucket and --gcs_prefix or leave them out, as before, or "
            "another --output_dir"
        )


def refuse_difference(where: str, difference: Difference | None) -> None:
    """Refuses a folder if the run in it differs from the run that this process would store.

    Args:
        where: URL of the folder, for the message.
        difference: Field in which the two runs differ, with its value in each run. The first value
            is that of the run in the folder. None if the runs are the same.

    Raises:
        InputError: If there is a difference. The message shows both values.
    """
    if difference is not None:
        field_name, stored_value, new_value = difference
        raise InputError(
            f"{where}: already holds a run that differs in {field_name}: "
            f"{shown(stored_value, new_value)}, now {shown(new_value, stored_value)}; "
            f"{FLAGS_REMEDY}"
        )


def shown(value: Any, other_value: Any) -> str:
    """Returns the value of an identity's field as text for messages.

    If the value is a list, only the items that `other_value` lacks are shown. If the two lists
    contain the same items in another order, all items are shown. A digest and a long text are
    shortened.

    Args:
        value: Value of the field, as JSON.
        other_value: Value of the same field in another identity, as JSON.
    """
    if isinstance(value, list):
        items_missing_in_other = [
            value_item for value_item in value if value_item not in other_value
        ]
        shown_items = value if {*value} == {*other_value} else items_missing_in_other
        value_as_text = " ".join(map(str, shown_items))
    else:
        value_as_text = str(value)
    shown_value = value_as_text or "nothing"
    if re.fullmatch("[0-9a-f]{64}", shown_value):
        return f"digest {shown_value[:12]}"
    return shown_value if len(shown_value) <= 100 else f"{shown_value[:100].rstrip()} ..."
