"""Outline: what the first shards of a folder add up to, so that nobody has to read their JSONs.

metadata.json in a bucket carries it, as of a recent commit. It holds only as long as a listing of
the folder fits it; the JSONs of all other shards are read. What is stored exactly once is decided
by the JSONs alone: where the outline is missing or does not fit, all of them are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from activation_extraction.store.commit import Commit, commit_name, names_beside
from activation_extraction.store.formats import format_of
from activation_extraction.store.json_fields import (
    COUNT,
    HOOK,
    NUMBER,
    OBJECT,
    STATISTICS,
    check_fields,
    list_of,
    object_of,
    optional,
)
from activation_extraction.store.sealed_json import seal
from activation_extraction.store.totals import ROW_COUNTS, Totals

RECENT = 21  # commits that show how fast a host is now
SUMS = ("shards", "samples", "tokens", "bytes", *ROW_COUNTS)
FIELDS = {
    **dict.fromkeys(SUMS, COUNT),
    "json_bytes": COUNT,
    "hooks": list_of(object_of(HOOK, ("key", *STATISTICS))),
    "recent": list_of(OBJECT),
    "partial": optional(OBJECT),
    "metrics": OBJECT,
}


@dataclass
class Outline:
    """The shards from 1 on, up to the first partial one.

    json_bytes: size of their JSONs. recent: the last of their commits, without what they say of
    hooks, and only the very last one with its cursor. partial: the shard behind them, if it is
    partial. metrics: the last ones of the run.
    """

    totals: Totals = field(default_factory=Totals)
    json_bytes: int = 0
    recent: tuple[Commit, ...] = ()
    partial: Commit | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shards(self) -> int:
        return self.totals.shards

    def add(self, commit: Commit) -> None:
        """Takes in the shard that follows; any other one is left out."""
        if commit.number != self.shards + 1:
            return
        if commit.partial:
            self.partial = commit
            return
        self.totals.add(commit)
        self.json_bytes += _json_size(commit)
        before = (replace(each, cursor=None) for each in self.recent)
        self.recent = (*before, replace(commit, hooks=[]))[-RECENT:]

    def whole(self) -> "Outline":
        """A copy that can be added to, without the partial shard, which is made again."""
        return replace(self, totals=self.totals.copy(), partial=None)

    def fits(self, files: Mapping[str, int]) -> bool:
        """Whether a listing has these shards and the files beside them: all names, and the sum of
        the sizes of shards and of JSONs."""
        if self.shards > len(files):
            return False
        numbers = range(1, self.shards + 1)
        return (
            self._adds_up(files, [commit_name(n) for n in numbers], self.json_bytes)
            and self._adds_up(files, self._shard_files(), self.totals.bytes)
            and all(name in files for n in numbers for name in names_beside(n))
        )

    def _shard_files(self) -> list[str]:
        kind = format_of(self.recent[-1].file) if self.recent else None
        return [] if kind is None else [kind.file_name(n) for n in range(1, self.shards + 1)]

    def _adds_up(self, files: Mapping[str, int], names: list[str], size: int) -> bool:
        there = [files[name] for name in names if name in files]
        return len(there) == self.shards and sum(there) == size

    def fitting_partial(self, files: Mapping[str, int]) -> list[Commit]:
        """The partial shard, if a listing has it and the files beside it."""
        commit = self.partial
        if commit is None or files.get(commit.file) != commit.bytes:
            return []
        if any(file not in files for file in names_beside(commit.number)):
            return []
        return [commit] if files.get(commit.name) == _json_size(commit) else []

    def to_json(self) -> dict[str, Any]:
        """As metadata.json carries it."""
        return {
            **{name: getattr(self.totals, name) for name in SUMS},
            "json_bytes": self.json_bytes,
            "hooks": [{"key": k, **s.to_json()} for k, s in self.totals.statistics.items()],
            "recent": [commit.to_json() for commit in self.recent],
            "partial": None if self.partial is None else self.partial.to_json(),
            "metrics": dict(self.metrics),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> "Outline":
        """The inverse of `to_json`. Raises DamagedError or KeyError."""
        check_fields(content, FIELDS, where)
        totals = Totals(**{name: content.get(name, 0) for name in SUMS})
        totals.add_statistics(content["hooks"])
        partial = content["partial"]
        return cls(
            totals,
            content["json_bytes"],
            tuple(Commit.from_json(commit, where) for commit in content["recent"]),
            None if partial is None else Commit.from_json(partial, where),
            {name: value for name, value in content["metrics"].items() if NUMBER.fits(value)},
        )


def _json_size(commit: Commit) -> int:
    return len(seal(commit.to_json()))
