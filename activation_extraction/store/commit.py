"""Commits: the content of each shard's JSON, and the totals over several shards.

A shard without its JSON does not exist. This module also names a shard's files.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from activation_extraction.common.errors import RunError
from activation_extraction.store.shard import Key
from activation_extraction.store.statistics import Statistics
from activation_extraction.text.batch import Cursor

METADATA = "metadata.json"
METRICS = "metrics.jsonl"
FORMAT_VERSION = 5
OTHER_VERSION = "was written by another version of this program"
REPAIRS = "--repair repairs it"
MOST_BYTES = 256 * 2**20  # of a JSON; a larger file is not one of ours
# A shard's number as this program writes it in file names; it never writes shard_00001.
SHARD_NUMBER = "(?!0000)(?:[0-9]{4}|[1-9][0-9]{4,})"


def shard_name(number: int, suffix: str) -> str:
    return f"shard_{number:04d}{suffix}"


def commit_name(number: int) -> str:
    return shard_name(number, ".json")


def number_of(name: str) -> int:
    """Returns the number of the shard that a file belongs to, from the file's name."""
    return int(name.removeprefix("shard_").split(".")[0])


T = TypeVar("T")


class DamagedError(RunError):
    """A JSON file does not have the content that was written to it."""


def seal(content: Mapping[str, Any]) -> bytes:
    """Returns the bytes of the JSON file, including the SHA-256 of its content, for which the order
    of the keys does not matter. Raises ValueError for NaN."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)
    sealed = {**content, "checksum": hashlib.sha256(text.encode()).hexdigest()}
    return (json.dumps(sealed, ensure_ascii=False, allow_nan=False) + "\n").encode()


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """Returns the content of a sealed JSON file. where: names it in messages.

    Raises DamagedError if even a single byte was changed.
    """
    try:
        content = json.loads(data)
        del content["checksum"]
        intact = data == seal(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"{where}: is damaged, or was not written by this program"
        raise DamagedError(message, remedy=REPAIRS) from error
    if not intact:
        message = f"{where}: is damaged: its checksum does not match its content"
        raise DamagedError(message, remedy=REPAIRS)
    return content


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Raises DamagedError, which names the file, if a constructor finds that a field of a JSON is
    missing or has a value that it cannot use."""
    try:
        yield
    except KeyError as error:
        raise DamagedError(f"{where}: lacks {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{where}: cannot be read: {error}") from error


@dataclass(frozen=True)
class FileFacts:
    """A file of a shard. version: the one that the store gave it, which holds only at the `url` of
    the commit. crc32c: of every MiB of the activations, 8 hexadecimal digits
    each, one after the other; empty for the other files."""

    bytes: int
    sha256: str
    version: str | None = None
    crc32c: str = ""


@dataclass(frozen=True)
class Commit:
    """A committed shard, as its JSON describes it; the package's docstring explains the fields.

    url: a copy in another folder has other versions. identity: the digest of the run's identity;
    "" in shards that do not record it. file: "" for a shard without samples, which
    has no files. hooks: the key, name, width, dtype, scale and statistics of each.
    """

    number: int
    began: float
    mark: Mapping[str, Any] | None
    run: str = ""
    owner: str = ""
    url: str = ""
    identity: str = ""
    file: str = ""
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    unpacked: int = 0
    first: int = 0
    last: int = 0
    count: int = 0
    tokens: int = 0
    hooks: list[dict[str, Any]] = field(default_factory=list)
    committed: float = 0.0
    cut_samples: int = 0
    cut_tokens: int = 0
    empty_samples: int = 0

    @property
    def position(self) -> Cursor | None:
        """The mark as an object; None at the beginning of the data."""
        return None if self.mark is None else Cursor(**self.mark)

    @property
    def name(self) -> str:
        """The name of the JSON file."""
        return commit_name(self.number)

    @property
    def bytes(self) -> int:
        """The size of the activations' file."""
        return self.files[self.file].bytes if self.file else 0

    @property
    def sha256(self) -> str:
        """The SHA-256 of the activations' file."""
        return self.files[self.file].sha256 if self.file else ""

    @property
    def statistics_file(self) -> str:
        """The file with the statistics of every dimension."""
        return shard_name(self.number, ".npz")

    @property
    def table_file(self) -> str:
        """The file with the table of samples."""
        return shard_name(self.number, ".samples.parquet")

    @property
    def names(self) -> dict[Key, str]:
        """Maps the key of each hook in the shard to the hook's full name."""
        return {hook["key"]: hook["name"] for hook in self.hooks}

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the JSON file."""
        content = asdict(self)
        samples = {key: content.pop(key) for key in ("first", "last", "count")}
        return {"format_version": FORMAT_VERSION, **content, "samples": samples}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> "Commit":
        """Reads what `to_json` returned, and ignores unknown fields. Raises DamagedError if fields
        are missing."""
        with reading(where):
            if content["format_version"] != FORMAT_VERSION:
                raise DamagedError(f"{where}: {OTHER_VERSION}")
            files = {name: _known(FileFacts, each) for name, each in content["files"].items()}
            added_later = {"identity": content.get("identity", "")}
            return _known(cls, {**content, **content["samples"], **added_later, "files": files})


def _known(kind: type[T], content: Mapping[str, Any]) -> T:
    """Makes a dataclass from those items of `content` that it has as fields."""
    return kind(**{each.name: content[each.name] for each in fields(kind)})  # type: ignore[arg-type]


@dataclass
class Totals:
    """The totals over all commits, also of earlier runs. The fields are those of a commit.

    statistics: by the names of the hooks.
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

    def add(self, commit: Commit) -> None:
        """Adds a shard of the same host, whose marks count rows from the beginning of its data."""
        self.shards += 1
        self.samples += commit.count
        for name in ("tokens", "bytes", "cut_samples", "cut_tokens", "empty_samples"):
            setattr(self, name, getattr(self, name) + getattr(commit, name))
        mark = commit.mark or {}
        self.count_rows(mark.get("skipped_rows", 0), mark.get("empty_rows", 0))
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
        """Raises the counts of skipped and empty rows to those up to some point of the data."""
        self.skipped_rows = max(self.skipped_rows, skipped)
        self.empty_rows = max(self.empty_rows, empty)

    @property
    def counts(self) -> dict[str, int]:
        """The counts that metadata.json records: all fields but statistics."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.type is int}
