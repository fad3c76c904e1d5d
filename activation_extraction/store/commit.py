"""Commits: what the JSON of each shard says, and what they add up to.

A shard without its JSON does not exist. This module also names a shard's files. metadata.json in a
bucket carries an Outline, the sums over the first shards as of a recent commit, so that nobody has
to read their JSONs. It holds only as long as a listing of the folder fits it. What is stored
exactly once is decided by the JSONs alone.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from activation_extraction.common.visible import counted
from activation_extraction.store.sealed_json import (
    COUNT,
    LARGEST_COUNT,
    LARGEST_WIDTH,
    NUMBER,
    OBJECT,
    TEXT,
    Count,
    DamagedError,
    Flag,
    Kind,
    Number,
    Text,
    any_of,
    check_fields,
    integer,
    kinds_of,
    list_of,
    object_of,
    optional,
    seal,
)
from activation_extraction.store.shard import Key
from activation_extraction.store.statistics import Statistics
from activation_extraction.text.batch import Cursor

METADATA = "metadata.json"
METRICS = "metrics.jsonl"
FORMAT_VERSION = 4
OTHER_VERSION = "was written by another version of this program"
CLAIM = "claimed_by"  # the only field of a JSON that holds the place of another one
# A shard's number as we write it into names; shard_00001 is no file of ours.
NUMBER_OF_A_SHARD = "(?!0000)(?:[0-9]{4}|[1-9][0-9]{4,})"
CURSOR = {
    **dict.fromkeys(("samples", "skip", "skipped_rows", "empty_rows", "tokens"), COUNT),
    "stream": OBJECT,
}
STATISTICS = kinds_of(Statistics)
HOOK = {
    "key": any_of(TEXT, integer(-LARGEST_COUNT, LARGEST_COUNT)),
    "name": TEXT,
    "aliases": list_of(TEXT),
    "width": integer(1, LARGEST_WIDTH),
    "dtype": TEXT,
    "scale": Kind("null: this version reads no others", lambda value: value is None),
    **STATISTICS,
}
HOOKS = list_of(object_of(HOOK, ("key", "name", "width", "dtype", "scale", *STATISTICS)))
MOST_PER_BYTE = 1032  # samples, or values, that a byte of a file can hold: gzip's largest ratio
RECENT = 21  # commits that show how fast a host is now


def shard_name(number: int, suffix: str) -> str:
    """Returns the name of a file of shard `number`."""
    return f"shard_{number:04d}{suffix}"


def commit_name(number: int) -> str:
    """Returns the name of the JSON of shard `number`."""
    return shard_name(number, ".json")


def names_beside(number: int) -> tuple[str, str]:
    """Returns the names of the small files that a shard has beside its JSON and its own file: of
    its statistics, and of its table of samples."""
    return shard_name(number, ".npz"), shard_name(number, ".samples.jsonl.gz")


def number_of(name: str) -> int:
    """Returns the number of the shard that a file belongs to, from the file's name."""
    return int(name.removeprefix("shard_").split(".")[0])


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns a line of metrics.jsonl without anything that is no number."""
    return {name: value for name, value in metrics.items() if NUMBER.fits(value)}


def claim_of(owner: str) -> bytes:
    """Returns a file in the place of a shard's JSON, which says who is to write it. It is no
    commit. In the place of metadata.json, it says who deletes the extraction."""
    return seal({CLAIM: owner})


@dataclass(frozen=True)
class Commit:
    """One shard, as its JSON describes it.

    first, last, count: its samples. tokens: the tokens of these samples. cut_samples: how many of
    them are cut at their end; cut_tokens: how many tokens were left out there. empty_samples: how
    many keep no token. hooks: for each hook its key, name, width, dtype, scale and statistics.
    cursor: where a run continues after this shard. partial: the shard was cut before it was full,
    because the data ended or the run was interrupted; a run that continues makes it again. run:
    digest of the run's identity. committed: Unix time in seconds. began: when the process that
    wrote it began to store. unpacked: bytes before compression. statistics: sha256 of the file with
    the statistics of every dimension; table: of the one with the table of samples.
    """

    file: Text
    sha256: Text
    bytes: Count
    first: Count
    last: Count
    count: Count
    tokens: Count
    partial: Flag
    cursor: Annotated[dict[str, Any] | None, optional(object_of(CURSOR, ("samples",)))]
    hooks: Annotated[list[dict[str, Any]], HOOKS]
    run: Text
    committed: Number
    began: Number
    unpacked: Count
    statistics: Text
    table: Text
    cut_samples: Count = 0
    cut_tokens: Count = 0
    empty_samples: Count = 0

    @property
    def number(self) -> int:
        """The number of the shard; those of a folder are numbered from 1."""
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
        """Key of each hook in the shard -> the hook's full name."""
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
        """The inverse of `to_json`. Raises DamagedError if fields are missing or unknown, or have
        values that cannot be."""
        content = dict(content)
        try:
            if content.pop("format_version") != FORMAT_VERSION:
                raise DamagedError(f"{where}: {OTHER_VERSION}")
            content |= content.pop("samples")
            made = cls(**content)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{where}: fields are missing or unknown: {error}") from error
        check_fields(content, COMMIT, where)
        width = max((hook["width"] for hook in made.hooks), default=1)
        if max(made.count, made.tokens * width) > MOST_PER_BYTE * made.bytes:
            raise DamagedError(
                f"{where}: {counted(made.count, 'sample')} and {counted(made.tokens, 'token')} "
                f"cannot be in {made.bytes} bytes"
            )
        return made


COMMIT = kinds_of(Commit)


@dataclass
class Totals:
    """Adds up what is committed, by earlier runs too, and this run's seconds in the background.

    cut_samples: those that are cut at their end; cut_tokens: how many tokens were left out there.
    empty_samples: those of which no token is kept.
    """

    shards: Count = 0
    samples: Count = 0
    tokens: Count = 0
    bytes: Count = 0
    skipped_rows: Count = 0
    empty_rows: Count = 0
    cut_samples: Count = 0
    cut_tokens: Count = 0
    empty_samples: Count = 0
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
        self.empty_samples += commit.empty_samples
        cursor = commit.cursor or {}
        self.count_rows(cursor.get("skipped_rows", 0), cursor.get("empty_rows", 0))
        self.add_statistics(commit.hooks)

    def add_statistics(self, hooks: Iterable[Mapping[str, Any]]) -> None:
        """Adds the statistics of some hooks, each with its key, as a commit has them."""
        for hook in hooks:
            before = self.statistics.get(hook["key"], Statistics())
            self.statistics[hook["key"]] = before.merge(Statistics.from_json(hook))

    def count_rows(self, skipped: int, empty: int) -> None:
        """Takes note of how many rows are skipped, and empty, up to some point of the data."""
        self.skipped_rows = max(self.skipped_rows, skipped)
        self.empty_rows = max(self.empty_rows, empty)

    def copy(self) -> "Totals":
        """Returns one that can be added to by itself."""
        return replace(self, statistics=dict(self.statistics))

    @property
    def counts(self) -> dict[str, int]:
        """All but seconds and statistics, as metadata.json has them."""
        return {name: getattr(self, name) for name in COUNTS}


COUNTS = kinds_of(Totals)
OUTLINE = {
    **COUNTS,
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
        self.json_bytes += commit.json_size
        before = (replace(each, cursor=None) for each in self.recent)
        self.recent = (*before, replace(commit, hooks=[]))[-RECENT:]

    def whole(self) -> "Outline":
        """Returns a copy that can be added to, without the partial shard, which is made again."""
        return replace(self, totals=self.totals.copy(), partial=None)

    def fits(self, files: Mapping[str, int]) -> bool:
        """Returns whether a listing has these shards and the files beside them: all names, and the
        sum of the sizes of shards and of JSONs."""
        if self.shards > len(files):
            return False
        numbers = range(1, self.shards + 1)
        last = self.recent[-1].file if self.recent else ""
        own = re.fullmatch(rf"shard_{NUMBER_OF_A_SHARD}(\..+)", last)
        sizes = {".json": self.json_bytes, own[1] if own else "": self.totals.bytes}
        return all(
            sum(files.get(shard_name(n, suffix), 0) for n in numbers) == size
            and all(shard_name(n, suffix) in files for n in numbers)
            for suffix, size in sizes.items()
        ) and all(name in files for n in numbers for name in names_beside(n))

    def fitting_partial(self, files: Mapping[str, int]) -> list[Commit]:
        """Returns the partial shard, if a listing has it and the files beside it."""
        commit = self.partial
        if commit is None or files.get(commit.file) != commit.bytes:
            return []
        if any(file not in files for file in names_beside(commit.number)):
            return []
        return [commit] if files.get(commit.name) == commit.json_size else []

    def to_json(self) -> dict[str, Any]:
        """Returns the outline as metadata.json carries it."""
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
        """The inverse of `to_json`. Raises DamagedError or KeyError."""
        check_fields(content, OUTLINE, where)
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
