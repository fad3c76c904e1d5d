"""Totals: what is committed, added up."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from activation_extraction.store.commit import Commit
from activation_extraction.store.shard import Key
from activation_extraction.store.statistics import Statistics

# What becomes of rows and documents that are not stored, or not whole.
ROW_COUNTS = ("skipped_rows", "empty_rows", "cut_samples", "cut_tokens")


@dataclass
class Totals:
    """Adds up what is committed, by earlier runs too, and this run's seconds in the background.

    cut_samples: those that are cut at their end; cut_tokens: how many tokens were left out there.
    """

    shards: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped_rows: int = 0
    empty_rows: int = 0
    cut_samples: int = 0
    cut_tokens: int = 0
    pack_seconds: float = 0.0
    write_seconds: float = 0.0
    statistics: dict[Key, Statistics] = field(default_factory=dict)

    def add(self, commit: Commit) -> None:
        """Counts a shard."""
        self.shards += 1
        self.samples += commit.count
        self.tokens += commit.tokens
        self.bytes += commit.bytes
        self.cut_samples += commit.cut_samples
        self.cut_tokens += commit.cut_tokens
        cursor = commit.cursor or {}
        self.count_rows(cursor.get("skipped_rows", 0), cursor.get("empty_rows", 0))
        self.add_statistics(commit.hooks)

    def add_statistics(self, hooks: Iterable[Mapping[str, Any]]) -> None:
        """hooks: the key and the statistics of each, as a commit has them."""
        for hook in hooks:
            before = self.statistics.get(hook["key"], Statistics())
            self.statistics[hook["key"]] = before.merge(Statistics.from_json(hook))

    def count_rows(self, skipped: int, empty: int) -> None:
        """How many rows were skipped, and how many are empty, up to some point of the data."""
        self.skipped_rows = max(self.skipped_rows, skipped)
        self.empty_rows = max(self.empty_rows, empty)

    def copy(self) -> "Totals":
        """One that can be added to by itself."""
        return replace(self, statistics=dict(self.statistics))
