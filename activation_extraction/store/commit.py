"""Commits: the content of each shard's JSON, and the totals over several shards.

A shard without its JSON does not exist. This module also names a shard's files. In a bucket,
metadata.json carries an Outline: the totals over the first shards as of a recent commit, so that
readers need not open all of their JSONs. An outline is valid only while it agrees with a listing of
the folder. The JSONs alone decide what is stored.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from activation_extraction.common.visible import counted
from activation_extraction.store.sealed_json import DamagedError, reading, seal
from activation_extraction.store.shard import MAX_GZIP_RATIO, Key
from activation_extraction.store.statistics import Statistics
from activation_extraction.text.batch import Cursor

METADATA = "metadata.json"
METRICS = "metrics.jsonl"
FORMAT_VERSION = 4
OTHER_VERSION = "was written by another version of this program"
CLAIM = "claimed_by"  # the only field of a JSON that reserves its name and commits nothing
# A shard's number as this program writes it in file names; it never writes shard_00001.
SHARD_NUMBER = "(?!0000)(?:[0-9]{4}|[1-9][0-9]{4,})"
RECENT = 21  # how many commits the current speed of a host is computed from


def shard_name(number: int, suffix: str) -> str:
    """Returns the name of a file of shard `number`."""
    return f"shard_{number:04d}{suffix}"


def commit_name(number: int) -> str:
    """Returns the name of the JSON of shard `number`."""
    return shard_name(number, ".json")


def names_beside(number: int) -> tuple[str, str]:
    """Returns the names of a shard's statistics file and of its table of samples."""
    return shard_name(number, ".npz"), shard_name(number, ".samples.jsonl.gz")


def number_of(name: str) -> int:
    """Returns the number of the shard that a file belongs to, from the file's name."""
    return int(name.removeprefix("shard_").split(".")[0])


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers in a line of metrics.jsonl, without its other values."""
    return {
        name: value
        for name, value in metrics.items()
        if type(value) in (int, float) and abs(value) < math.inf
    }


def claim_of(owner: str) -> bytes:
    """Returns the content of a claim, which names the process that has reserved a file's name.

    A claim for a shard's JSON says who will write that JSON. A claim for metadata.json says who is
    deleting the extraction.
    """
    return seal({CLAIM: owner})


@dataclass(frozen=True)
class Commit:
    """A committed shard, as its JSON describes it.

    first, last, count: the range and number of its samples. tokens: how many tokens are stored.
    cut_samples: how many samples are cut at their end; cut_tokens: how many tokens that left out.
    empty_samples: how many samples keep no token. hooks: the key, name, width, dtype, scale and
    statistics of each hook. cursor: where a run continues after this shard. partial: whether the
    shard was cut before it was full, because the data ended or the run was interrupted; a run that
    continues computes it again. run: digest of the run's identity. committed: Unix time in seconds.
    began: when the process that wrote the shard began to store. unpacked: bytes before compression.
    statistics, table: sha256 of the file with the statistics of every dimension, and of the table
    of samples.
    """

    file: str
    sha256: str
    bytes: int
    first: int
    last: int
    count: int
    tokens: int
    partial: bool
    cursor: dict[str, Any] | None
    hooks: list[dict[str, Any]]
    run: str
    committed: float
    began: float
    unpacked: int
    statistics: str
    table: str
    cut_samples: int = 0
    cut_tokens: int = 0
    empty_samples: int = 0

    @property
    def number(self) -> int:
        """The number of the shard, counted from 1 in each folder."""
        return number_of(self.file)

    @property
    def position(self) -> Cursor | None:
        """The cursor as an object."""
        return None if self.cursor is None else Cursor.from_json(self.cursor)

    @property
    def name(self) -> str:
        """The name of the JSON file."""
        return commit_name(self.number)

    @property
    def statistics_file(self) -> str:
        """The name of the file with the statistics of every dimension."""
        return names_beside(self.number)[0]

    @property
    def table_file(self) -> str:
        """The name of the file with the table of samples."""
        return names_beside(self.number)[1]

    @property
    def names(self) -> dict[Key, str]:
        """Maps the key of each hook in the shard to the hook's full name."""
        return {hook["key"]: hook["name"] for hook in self.hooks}

    @property
    def json_size(self) -> int:
        """The size of the JSON file in bytes."""
        return len(seal(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the JSON file."""
        content = asdict(self)
        samples = {key: content.pop(key) for key in ("first", "last", "count")}
        head = {key: content.pop(key) for key in ("file", "sha256", "bytes", "unpacked")}
        return {"format_version": FORMAT_VERSION, **head, "samples": samples, **content}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> "Commit":
        """Reads what `to_json` returned, and ignores unknown fields. Raises DamagedError if fields
        are missing, or if there are fewer bytes than so many samples and tokens need."""
        with reading(where):
            if content["format_version"] != FORMAT_VERSION:
                raise DamagedError(f"{where}: {OTHER_VERSION}")
            found = {**content, **content["samples"]}
            commit = cls(
                **{each.name: found[each.name] for each in fields(cls) if each.name in found}
            )
            width = max((hook["width"] for hook in commit.hooks), default=1)
            if max(commit.count, commit.tokens * width) > MAX_GZIP_RATIO * commit.bytes:
                samples, tokens = counted(commit.count, "sample"), counted(commit.tokens, "token")
                raise ValueError(f"{samples} and {tokens} cannot be in {commit.bytes} bytes")
        return commit


@dataclass
class Totals:
    """The totals over all commits, also of earlier runs, and this run's seconds in the background.

    cut_samples: how many samples are cut at their end; cut_tokens: how many tokens that left out.
    empty_samples: how many samples keep no token.
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
    pack_seconds: float = 0.0
    write_seconds: float = 0.0
    statistics: dict[Key, Statistics] = field(default_factory=dict)

    def add(self, commit: Commit) -> None:
        """Adds a shard."""
        self.shards += 1
        self.samples += commit.count
        self.tokens += commit.tokens
        self.bytes += commit.bytes
        self.cut_samples += commit.cut_samples
        self.cut_tokens += commit.cut_tokens
        self.empty_samples += commit.empty_samples
        cursor = commit.cursor or {}
        self.count_rows(cursor.get("skipped_rows", 0), cursor.get("empty_rows", 0))
        self.add_statistics(commit.hooks)

    def add_statistics(self, hooks: Iterable[Mapping[str, Any]]) -> None:
        """Adds the statistics in the `hooks` of a commit."""
        for hook in hooks:
            before = self.statistics.get(hook["key"], Statistics())
            self.statistics[hook["key"]] = before.merge(Statistics.from_json(hook))

    def count_rows(self, skipped: int, empty: int) -> None:
        """Raises the counts of skipped and empty rows to those up to some point of the data."""
        self.skipped_rows = max(self.skipped_rows, skipped)
        self.empty_rows = max(self.empty_rows, empty)

    def copy(self) -> "Totals":
        """Returns an independent copy."""
        return replace(self, statistics=dict(self.statistics))

    @property
    def counts(self) -> dict[str, int]:
        """The counts that metadata.json records: all fields but seconds and statistics."""
        return {name: getattr(self, name) for name in COUNTS}


COUNTS = [each.name for each in fields(Totals) if each.type is int]


@dataclass
class Outline:
    """A summary of the first shards, from shard 1 to the last one that is not partial.

    json_bytes: the total size of their JSONs. recent: the last commits, without their hooks; only
    the very last one has its cursor. partial: the next shard, if it is partial. metrics: the last
    metrics of the run.
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
        """Adds the next shard, and ignores any other one."""
        if commit.number != self.shards + 1:
            return
        if commit.partial:
            self.partial = commit
            return
        self.totals.add(commit)
        self.json_bytes += commit.json_size
        earlier = (replace(recent, cursor=None) for recent in self.recent)
        self.recent = (*earlier, replace(commit, hooks=[]))[-RECENT:]

    def without_partial(self) -> "Outline":
        """Returns an independent copy without the partial shard, which is computed again."""
        return replace(self, totals=self.totals.copy(), partial=None)

    def fits(self, files: Mapping[str, int]) -> bool:
        """Returns whether a listing agrees with this outline.

        The listing has to name every file of these shards, and the sizes of all shards, and of all
        JSONs, have to add up to the recorded totals.
        """
        if self.shards > len(files):
            return False
        numbers = range(1, self.shards + 1)
        last = self.recent[-1].file if self.recent else ""
        match = re.fullmatch(rf"shard_{SHARD_NUMBER}(\..+)", last)
        sizes = {".json": self.json_bytes, match[1] if match else "": self.totals.bytes}
        return all(
            sum(files.get(shard_name(n, suffix), 0) for n in numbers) == size
            and all(shard_name(n, suffix) in files for n in numbers)
            for suffix, size in sizes.items()
        ) and all(name in files for n in numbers for name in names_beside(n))

    def fitting_partial(self, files: Mapping[str, int]) -> list[Commit]:
        """Returns the partial shard in a list, or an empty list if the listing lacks its files."""
        commit = self.partial
        if commit is None or files.get(commit.file) != commit.bytes:
            return []
        if any(file not in files for file in names_beside(commit.number)):
            return []
        return [commit] if files.get(commit.name) == commit.json_size else []

    def to_json(self) -> dict[str, Any]:
        """Returns the outline as metadata.json records it."""
        return {
            **self.totals.counts,
            "json_bytes": self.json_bytes,
            "hooks": [{"key": k, **s.to_json()} for k, s in self.totals.statistics.items()],
            "recent": [commit.to_json() for commit in self.recent],
            "partial": None if self.partial is None else self.partial.to_json(),
            "metrics": dict(self.metrics),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> "Outline":
        """Reads what `to_json` returned. Raises DamagedError if fields are missing."""
        with reading(where):
            totals = Totals(**{name: content.get(name, 0) for name in COUNTS})
            totals.add_statistics(content["hooks"])
            partial = content["partial"]
            return cls(
                totals,
                content["json_bytes"],
                tuple(Commit.from_json(commit, where) for commit in content["recent"]),
                None if partial is None else Commit.from_json(partial, where),
                numbers_of(content["metrics"]),
            )
