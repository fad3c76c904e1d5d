"""StoragePlan: what an ActivationStorage finds stored, and which shards it is to store.

A run that begins or continues has one range of shards, up to the end of the data; a repair has one
for each gap. Planning only reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from activation_extraction.store.commit import Commit
from activation_extraction.store.outline import Outline
from activation_extraction.text.batch import Cursor


@dataclass(frozen=True)
class ShardRange:
    """Shards to store, from `first` to `last`; last is None if the data decides how many there are.

    before: the shard before them; None at the beginning of the data. until: the end of the range;
    their samples have a smaller `sample_idx`, all later samples do not. partial: whether the last
    of them is cut before it is full.
    """

    first: int = 1
    before: Commit | None = None
    last: int | None = None
    until: int | None = None
    partial: bool = True

    @property
    def cursor(self) -> Cursor | None:
        """Where in the data they begin; None at its beginning."""
        return None if self.before is None else self.before.position

    @property
    def sample_before(self) -> int:
        """The `sample_idx` just before theirs; -1 at the beginning of the data."""
        return -1 if self.before is None else self.before.last


@dataclass(frozen=True)
class StoragePlan:
    """commits: the shards that are stored and stay.

    outline: of the bucket's first shards, if their JSONs were not read; `commits` lacks these.
    ranges: what is to be stored, in the order of the data. obsolete: names of files to
    delete. settled: nothing is left to do, not even an update of metadata.json.
    skipped_rows, empty_rows: those of a complete extraction, rows after its last sample too.
    versions: those of the JSONs in the bucket when the plan was made. owner: the one that its
    metadata.json named just before. For a repair, `recorded` is the metadata, of which only the
    totals change, and `expected` has the shards as they were, by
    number.
    """

    commits: list[Commit] = field(default_factory=list)
    ranges: tuple[ShardRange, ...] = (ShardRange(),)
    obsolete: tuple[str, ...] = ()
    settled: bool = False
    skipped_rows: int = 0
    empty_rows: int = 0
    recorded: Mapping[str, Any] | None = None
    expected: Mapping[int, Commit] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    outline: Outline = field(default_factory=Outline)
    owner: str | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing is left to compute."""
        return not self.ranges

    @property
    def first_to_store(self) -> int:
        """Number of the first shard that is to be stored where it belongs, or would be."""
        return min((each.first for each in self.ranges), default=self.shards + 1)

    @property
    def shards(self) -> int:
        """How many are stored and stay."""
        return self.outline.shards + len(self.commits)

    @property
    def samples(self) -> int:
        """How many samples these have."""
        return self.outline.totals.samples + sum(commit.count for commit in self.commits)

    @property
    def tokens(self) -> int:
        """How many tokens these have."""
        return self.outline.totals.tokens + sum(commit.tokens for commit in self.commits)

    @property
    def last(self) -> Commit | None:
        """The last of them."""
        return next(reversed([*self.outline.recent, *self.commits]), None)

    @property
    def last_sample(self) -> int:
        """The `sample_idx` just before that of the first sample to store."""
        if self.ranges:
            return self.ranges[0].sample_before
        return -1 if self.last is None else self.last.last

    @property
    def cursor(self) -> Cursor | None:
        """Where in the data the first sample to store is; None at its beginning."""
        if self.ranges:
            return self.ranges[0].cursor
        return None if self.last is None else self.last.position


class Planner(Protocol):
    """Finds out what is to be stored. Raises InputError if nothing may be added."""

    def look(self) -> StoragePlan:
        """Called before anything is written."""
        ...

    def look_again(self, plan: StoragePlan) -> StoragePlan:
        """Called once this process holds the folder: others may have written to it until then."""
        ...
