"""Totals: numbers of samples, tokens and bytes, and statistics, over the committed shards of a run.

The totals can be computed from the commits (run_log.py) alone. A writer adds up the totals of its
shards, and metadata.json records them. --verify compares the recorded totals with the commits.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from activation_extraction.common.visible import counted
from activation_extraction.store.run_log import Commit, RunLog
from activation_extraction.store.statistics import Statistics

# Names of the totals that --verify compares with the shards of a complete run, and --status shows.
COUNTED = ("shards", "samples", "tokens", "bytes")
# Names of the totals over samples that were cut or that have no stored token. Like the totals
# in COUNTED, they can be computed from the shards alone.
CUT = ("cut_samples", "cut_tokens", "empty_samples")


@dataclass
class Totals:
    """The totals over several shards.

    Attributes:
        shards: Number of shards.
        samples: Number of samples.
        tokens: Number of stored tokens.
        bytes: Total size of the files of activations, in bytes.
        skipped_rows: Number of rows of the data set that could not be used and were skipped.
        empty_rows: Number of rows of the data set without text.
        cut_samples: Number of samples that were cut at their end.
        cut_tokens: Number of tokens that were cut off from these samples.
        empty_samples: Number of samples without a stored token.
        statistics: Statistics by the full names of the hooks.
    """

    # The names of the counts are also keys in metadata.json.
    shards: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped_rows: int = 0
    empty_rows: int = 0
    cut_samples: int = 0
    cut_tokens: int = 0
    empty_samples: int = 0
    statistics: dict[str, Statistics] = field(default_factory=dict)

    @classmethod
    def of(cls, commits: Iterable[Commit]) -> "Totals":
        """Returns the totals of several shards of one host."""
        totals_of_shards = cls()
        for commit in commits:
            totals_of_shards.add(commit)
        return totals_of_shards

    @classmethod
    def of_log(cls, run_log: RunLog) -> "Totals":
        """Returns the totals of one host's folder.

        metadata.json also counts the skipped and the empty rows after the last shard, so these are
        included.

        Args:
            run_log: Log of the folder.
        """
        totals_of_folder = cls.of(run_log.commits_in_order)
        stored_metadata = run_log.metadata or {}
        totals_of_folder.update_row_counts(
            stored_metadata.get("skipped_rows", 0), stored_metadata.get("empty_rows", 0)
        )
        return totals_of_folder

    def add(self, commit: Commit) -> None:
        """Adds a shard of the same host to the totals.

        The marks of shards count rows from the beginning of the host's data, so the largest counts
        of skipped and empty rows are kept, instead of their sums.
        """
        self.shards += 1
        self.samples += commit.count
        for count_name in ("tokens", "bytes", "cut_samples", "cut_tokens", "empty_samples"):
            setattr(self, count_name, getattr(self, count_name) + getattr(commit, count_name))
        if commit.mark is not None:
            self.update_row_counts(commit.mark.skipped_rows, commit.mark.empty_rows)
        for hook_description in commit.hooks:
            previous_statistics = self.statistics.get(hook_description["name"], Statistics())
            self.statistics[hook_description["name"]] = previous_statistics.merge(
                Statistics.from_json(hook_description)
            )

    def add_host(self, host_totals: "Totals") -> None:
        """Adds the totals of another host to these totals.

        No row of the data set belongs to two hosts, so the counts of rows are added, too.
        """
        for count_name, count in host_totals.counts.items():
            setattr(self, count_name, getattr(self, count_name) + count)
        for hook_name, hook_statistics in host_totals.statistics.items():
            previous_statistics = self.statistics.get(hook_name, Statistics())
            self.statistics[hook_name] = previous_statistics.merge(hook_statistics)

    def update_row_counts(self, skipped: int, empty: int) -> None:
        """Increases `skipped_rows` and `empty_rows` to the given numbers.

        A number that is smaller than the current one is ignored.

        Args:
            skipped: Number of skipped rows among the rows that the host has read so far.
            empty: Number of rows without text among the rows that the host has read so far.
        """
        self.skipped_rows = max(self.skipped_rows, skipped)
        self.empty_rows = max(self.empty_rows, empty)

    @property
    def counts(self) -> dict[str, int]:
        """The counts that metadata.json records, by name: all fields except `statistics`."""
        count_names = [total_field.name for total_field in fields(self) if total_field.type is int]
        return {count_name: getattr(self, count_name) for count_name in count_names}


def total_problems(commits: Iterable[Commit], metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yields a message for each total in metadata.json that differs from the total of the shards.

    Only the numbers of shards, samples, tokens and bytes (COUNTED) are compared.

    Args:
        commits: Commits of all shards in the folder of a host.
        metadata: Content of metadata.json in the same folder.
    """
    computed_totals = Totals.of(commits)
    for count_name in COUNTED:
        computed_total = getattr(computed_totals, count_name)
        if metadata[count_name] != computed_total:
            recorded_count_phrase = counted(metadata[count_name], count_name.removesuffix("s"))
            yield f"has {recorded_count_phrase}, there are {computed_total}"
