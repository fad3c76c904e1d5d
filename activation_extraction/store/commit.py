"""Commit: one shard, as its JSON file describes it. Without that file the shard does not exist."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from activation_extraction.common.visible import counted
from activation_extraction.store.json_fields import (
    COUNT,
    FLAG,
    HOOK,
    NUMBER,
    OBJECT,
    STATISTICS,
    TEXT,
    check_fields,
    list_of,
    object_of,
    optional,
)
from activation_extraction.store.sample_table import table_name
from activation_extraction.store.sealed_json import DamagedError, seal
from activation_extraction.store.statistics_file import statistics_name
from activation_extraction.text.batch import Cursor

FORMAT_VERSION = 4
OTHER_VERSION = "was written by another version of this program"
CLAIM = "claimed_by"  # the only field of a JSON that holds the place of another one
# A shard's number as we write it into names; shard_00001 is no file of ours.
NUMBER_OF_A_SHARD = "(?!0000)(?:[0-9]{4}|[1-9][0-9]{4,})"
CURSOR = {
    "samples": COUNT,
    "skip": COUNT,
    "skipped_rows": COUNT,
    "empty_rows": COUNT,
    "stream": OBJECT,
}
FIELDS = {
    "file": TEXT,
    "sha256": TEXT,
    "bytes": COUNT,
    "first": COUNT,
    "last": COUNT,
    "count": COUNT,
    "tokens": COUNT,
    "partial": FLAG,
    "cursor": optional(object_of(CURSOR, ("samples",))),
    "hooks": list_of(object_of(HOOK, ("key", "name", "width", "dtype", "scale", *STATISTICS))),
    "run": TEXT,
    "committed": NUMBER,
    "began": NUMBER,
    "unpacked": COUNT,
    "statistics": TEXT,
    "table": TEXT,
    "cut_samples": COUNT,
    "cut_tokens": COUNT,
}
MOST_PER_BYTE = 1032  # samples, or values, that a byte of a file can hold: gzip's largest ratio


@dataclass(frozen=True)
class Commit:
    """One shard, as its JSON describes it.

    first, last, count: its samples. tokens: the tokens of these samples. cut_samples: how many of
    them are cut at their end; cut_tokens: how many tokens were left out there. hooks: for each hook
    its key, name, width, dtype, scale and statistics. cursor: where a run continues after this
    shard. partial: the shard was cut before it was full, because the data ended or the run was
    interrupted; a run that continues makes it again. run: digest of the run's identity. committed:
    Unix time in seconds. began: when the process that wrote it began to store. unpacked: bytes
    before compression. statistics: sha256 of the file with the statistics of every dimension;
    table: of the one with the table of samples.
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

    @property
    def number(self) -> int:
        """The shards of a folder are numbered from 1."""
        return number_of(self.file)

    @property
    def position(self) -> Cursor | None:
        """The cursor as an object."""
        return None if self.cursor is None else Cursor.from_json(self.cursor)

    @property
    def name(self) -> str:
        """Name of the JSON file."""
        return commit_name(self.number)

    @property
    def statistics_file(self) -> str:
        """Name of the file with the statistics of every dimension."""
        return statistics_name(self.number)

    @property
    def table_file(self) -> str:
        """Name of the file with the table of samples."""
        return table_name(self.number)

    @property
    def names(self) -> dict[int | str, str]:
        """Key of each hook in the shard -> the hook's full name."""
        return {hook["key"]: hook["name"] for hook in self.hooks}

    def to_json(self) -> dict[str, Any]:
        """The content of the JSON file."""
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
        check_fields(content, FIELDS, where)
        width = max((hook.get("width", 1) for hook in made.hooks), default=1)
        if max(made.count, made.tokens * width) > MOST_PER_BYTE * made.bytes:
            raise DamagedError(
                f"{where}: {counted(made.count, 'sample')} and {counted(made.tokens, 'token')} "
                f"cannot be in {made.bytes} bytes"
            )
        return made


def claim_of(owner: str) -> bytes:
    """A file in the place of a shard's JSON, which says who is to write it. It is no commit.

    In the place of metadata.json, it says who deletes the extraction."""
    return seal({CLAIM: owner})


def names_beside(number: int) -> tuple[str, str]:
    """Names of the small files that shard `number` has beside its JSON and its own file."""
    return statistics_name(number), table_name(number)


def commit_name(number: int) -> str:
    """Name of the JSON of shard `number`."""
    return f"shard_{number:04d}.json"


def number_of(name: str) -> int:
    """Number of the shard that a file belongs to, from the file's name."""
    return int(name.removeprefix("shard_").split(".")[0])
