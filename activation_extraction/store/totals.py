"""Totals: the sums over the committed shards of a run, which metadata.json records.

They follow from the commits (run_log.py), so a writer counts them up, and --verify compares those
in metadata.json with those of the commits.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from activation_extraction.common.visible import counted
from activation_extraction.store.run_log import Commit, RunLog
from activation_extraction.store.statistics import Statistics

# The totals that --verify compares with the shards of a complete run, and --status shows.
COUNTED = ("shards", "samples", "tokens", "bytes")
CUT = ("cut_samples", "cut_tokens", "empty_samples")  # totals that follow from the shards, too


@dataclass
class Totals:
    """The sums over several shards.

    Attributes:
        shards: Number of shards.
        samples: Number of samples.
        tokens: Number of stored tokens.
        bytes: Bytes of the files of activations.
        skipped_rows: Number of rows of the data that could not be used and were skipped.
        empty_rows: Number of rows without text.
        cut_samples: Number of samples that were cut at their end.
        cut_tokens: Number of tokens that these samples lack.
        empty_samples: Number of samples without a stored token.
        statistics: Statistics by the names of the hooks.
    """

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
        totals = cls()
        for commit in commits:
            totals.add(commit)
        return totals

    @classmethod
    def of_log(cls, run_log: RunLog) -> "Totals":
        """Returns the totals of a host.

        They are those of all its shards, and include the skipped and empty rows after the last
        shard, which metadata.json counts.
        """
        totals, metadata = cls.of(run_log.in_order), run_log.metadata or {}
        totals.count_rows(metadata.get("skipped_rows", 0), metadata.get("empty_rows", 0))
        return totals

    def add(self, commit: Commit) -> None:
        """Adds a shard of the same host, whose marks count rows from the beginning of its data."""
        self.shards += 1
        self.samples += commit.count
        for name in ("tokens", "bytes", "cut_samples", "cut_tokens", "empty_samples"):
            setattr(self, name, getattr(self, name) + getattr(commit, name))
        if commit.mark is not None:
            self.count_rows(commit.mark.skipped_rows, commit.mark.empty_rows)
        for hook in commit.hooks:
            before = self.statistics.get(hook["name"], Statistics())
            self.statistics[hook["name"]] = before.merge(Statistics.from_json(hook))

    def add_host(self, host: "Totals") -> None:
        """Adds the totals of another host. No row belongs to two hosts, so all counts add up."""
        for name, count in host.counts.items():
            setattr(self, name, getattr(self, name) + count)
        for name, statistics in host.statistics.items():
            before = self.statistics.get(name, Statistics())
            self.statistics[name] = before.merge(statistics)

    def count_rows(self, skipped: int, empty: int) -> None:
        """Raises the counts of rows, unless they are larger already.

        Args:
            skipped: Number of skipped rows from the beginning of the data up to a certain row.
            empty: Number of rows without text up to the same row.
        """
        self.skipped_rows = max(self.skipped_rows, skipped)
        self.empty_rows = max(self.empty_rows, empty)

    @property
    def counts(self) -> dict[str, int]:
        """The counts that metadata.json records: all fields but statistics."""
        return {
            count.name: getattr(self, count.name) for count in fields(self) if count.type is int
        }


def total_problems(commits: Iterable[Commit], metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yields the totals in the metadata of a finished host that differ from those of its shards."""
    totals = Totals.of(commits)
    for name in COUNTED:
        if metadata[name] != (total := getattr(totals, name)):
            yield f"has {counted(metadata[name], name.removesuffix('s'))}, there are {total}"
