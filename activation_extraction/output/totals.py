"""Totals: what is committed, added up."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from activation_extraction.output.commit import Commit
from activation_extraction.output.shard import Key
from activation_extraction.output.statistics import Statistics


@dataclass
class Totals:
    """What is committed, including earlier runs; and this run's seconds in the background."""

    shards: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped_rows: int = 0
    compress_seconds: float = 0.0  # what shards took besides writing
    write_seconds: float = 0.0
    upload_seconds: float = 0.0
    statistics: dict[Key, Statistics] = field(default_factory=dict)

    def add(self, commit: Commit) -> None:
        """Counts a shard."""
        self.shards += 1
        self.samples += commit.count
        self.tokens += commit.tokens
        self.bytes += commit.bytes
        self.count_skipped((commit.cursor or {}).get("skipped_rows", 0))
        self.add_statistics(commit.hooks)

    def add_statistics(self, hooks: Iterable[Mapping[str, Any]]) -> None:
        """hooks: the key and the statistics of each, as a commit has them."""
        for hook in hooks:
            before = self.statistics.get(hook["key"], Statistics())
            self.statistics[hook["key"]] = before.merge(Statistics.from_json(hook))

    def count_skipped(self, rows: int) -> None:
        """rows: how many were skipped up to some point of the data."""
        self.skipped_rows = max(self.skipped_rows, rows)

    def copy(self) -> "Totals":
        """One that can be added to by itself."""
        return replace(self, statistics=dict(self.statistics))
