"""What is stored: the JSON files of one host's folder, and the state that they add up to.

A shard exists when its JSON does. Every JSON carries a checksum of its own content, so that a
damaged one is never believed. metadata.json describes the run; its `identity` is what must stay the
same for a run to be continued.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from activation_extraction.cli.errors import RunError
from activation_extraction.output.stores import Store

FORMAT_VERSION = 3
READABLE_VERSIONS = (2, 3)  # 2: records without `hook`
PART_PREFIX = "machine_"
METADATA = "metadata.json"
METRICS = "metrics.jsonl"
AGGREGATE = "aggregated_metadata.json"
OWN_FILES = re.compile(
    r"\.?(metadata\.json|metrics\.jsonl|shard_\d{4,}\.(json|pkl|pkl\.gz))(\.tmp)?"
)
MAY_TURN_ON = ("skip_bad_rows",)  # of the identity: changes nothing that is stored already
NEEDED = ("identity", "status", "max_samples", "written")  # of the metadata
METRICS_TAIL = 4096  # bytes that hold the last line
ANEW = "--repair mends it, --overwrite starts anew"
READERS = 32  # files read at the same time; they are small


class DamagedError(RunError):
    """A JSON file is not what was written."""


def digest_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of JSON content, whatever the order of its keys."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def run_of(identity: Mapping[str, Any]) -> str:
    """Digest of the part of a run's identity that never changes."""
    return digest_of({key: identity[key] for key in identity if key not in MAY_TURN_ON})


def seal(content: Mapping[str, Any]) -> bytes:
    """Content -> the bytes of its JSON file, with its checksum. NaN is refused: not JSON."""
    sealed = {**content, "checksum": digest_of(content)}
    return (json.dumps(sealed, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """The content of a sealed JSON file. Raises DamagedError when a single byte differs."""
    try:
        content = json.loads(data)
        checksum = content.pop("checksum")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"{where}: is damaged, or not written by this program"
        raise DamagedError(what, remedy=ANEW) from error
    try:
        intact = checksum == digest_of(content) and data == seal(content)
    except ValueError:  # NaN
        intact = False
    if not intact:
        what = f"{where}: is damaged: its checksum does not match its content"
        raise DamagedError(what, remedy=ANEW)
    return content


@dataclass(frozen=True)
class Commit:
    """One shard, as its JSON records it.

    first, last, count: its samples; tokens: of these samples; hooks: key, name and statistics.
    cursor: where to continue. partial: cut before it had its size, by the end or an interruption;
    made again when the run goes on. run: digest of the run's identity. committed: Unix time, s;
    began: that at which the process that wrote it began to store. unpacked: bytes before
    compression; None in JSONs that do not say it.
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
    began: float | None = None
    unpacked: int | None = None

    @property
    def number(self) -> int:
        return number_of(self.file)

    @property
    def name(self) -> str:
        """Of the JSON file."""
        return commit_name(self.number)

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        samples = {key: content.pop(key) for key in ("first", "last", "count")}
        head = {key: content.pop(key) for key in ("file", "sha256", "bytes", "unpacked")}
        return {"format_version": FORMAT_VERSION, **head, "samples": samples, **content}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> "Commit":
        """Raises DamagedError when fields are missing or unknown."""
        content = dict(content)
        try:
            if content.pop("format_version") not in READABLE_VERSIONS:
                raise DamagedError(f"{where}: was written by another version of this program")
            return cls(**content.pop("samples"), **content)
        except (KeyError, TypeError) as error:
            raise DamagedError(f"{where}: fields are missing or unknown: {error}") from error


def commit_name(number: int) -> str:
    """Name of the JSON of shard `number`, counted from 1."""
    return f"shard_{number:04d}.json"


def part_folder(machine: int, host: int, hosts: int) -> str:
    """Name of the folder of one of a machine's hosts, where a run has several of either."""
    return f"{PART_PREFIX}{machine:03d}" + (f"_host_{host:02d}" if hosts > 1 else "")


def part_folders(root: Store) -> list[str]:
    """Names of the folders of all hosts in an output, where it has several."""
    return [name for name in root.folders() if name.startswith(PART_PREFIX)]


def number_of(name: str) -> int:
    """Number of the shard that a file belongs to."""
    return int(name.removeprefix("shard_").split(".")[0])


@dataclass(frozen=True)
class Stored:
    """One host's folder: metadata (None when there is none), commits by number, file sizes.

    damaged: what could not be read, JSON name -> why. metrics: the last ones of the run. url: of
    the folder; local: whether it is one of this machine. locked: whether a process holds it, None
    where nobody can tell.
    """

    metadata: dict[str, Any] | None = None
    commits: dict[int, Commit] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    local: bool = True
    locked: bool | None = None

    @property
    def run(self) -> str | None:
        """Digest of the run's identity."""
        return None if self.metadata is None else run_of(self.metadata["identity"])

    @property
    def in_order(self) -> list[Commit]:
        """The commits by their numbers."""
        return [self.commits[number] for number in sorted(self.commits)]

    def has(self, commit: Commit) -> bool:
        """Whether the shard of this commit is here, in its full size."""
        return self.files.get(commit.file) == commit.bytes

    @property
    def in_bucket(self) -> bool:
        """Whether runs upload to this folder: nobody locks it, and all shards are here."""
        remote = (self.metadata or {}).get("remote") or ""
        return not self.local or local_path(remote) == local_path(self.url)

    def missing(self) -> tuple[list[int], list[int]]:
        """Numbers of the shards that must be here and have no JSON, or no file of the right size.

        None where the shards go to a bucket: they are deleted after their upload.
        """
        told = self.metadata or {}
        if told.get("remote") is not None and not self.in_bucket:
            return [], []
        last = max([told.get("shards", 0), *self.commits])
        without_json = [number for number in range(1, last + 1) if number not in self.commits]
        return without_json, [c.number for c in self.in_order if not self.has(c)]


def local_path(url: str) -> str:
    """Of a folder of this machine, given as a URL or as a path."""
    return url.removeprefix("file://")


def own_files(names: Iterable[str]) -> list[str]:
    """Those of an extraction, in an order in which they may be deleted: the commits first."""
    own = [name for name in sorted(names) if OWN_FILES.fullmatch(name)]
    return sorted(own, key=lambda name: not name.endswith(".json"))


def read_stored(store: Store) -> Stored:
    """Reads all JSON files of a folder, many at a time. A damaged one is told, not raised."""
    files = store.files()
    names = [name for name in own_files(files) if name.endswith(".json") and name[0] != "."]
    damaged: dict[str, str] = {}
    metadata = None
    commits = {}
    with ThreadPoolExecutor(READERS) as pool:
        for name, data in zip(names, pool.map(store.read, names), strict=True):
            where = f"{store.url}/{name}"
            if data is None:  # replaced by a run that is going on
                continue
            try:
                content = unseal(data, where)
                if name == METADATA:
                    if content.get("format_version") not in READABLE_VERSIONS:
                        raise DamagedError(f"{where}: was written by another version")
                    if missing := [key for key in NEEDED if key not in content]:
                        raise DamagedError(f"{where}: lacks {', '.join(missing)}")
                    metadata = content
                else:
                    commit = Commit.from_json(content, where)
                    if str(commit.file).split(".")[0] != name.removesuffix(".json"):
                        raise DamagedError(f"{where}: is the JSON of {commit.file}")
                    commits[commit.number] = commit
            except DamagedError as error:
                damaged[name] = str(error)
    return Stored(
        metadata, commits, files, damaged, _last_metrics(store, files), store.url, store.local
    )


def _last_metrics(store: Store, files: Mapping[str, int]) -> dict[str, Any]:
    """The last whole line of metrics.jsonl; they inform and decide nothing."""
    size = files.get(METRICS, 0)
    tail = store.read(METRICS, start=-min(size, METRICS_TAIL)) if size else None
    for line in reversed((tail or b"").splitlines()):
        with suppress(ValueError):
            metrics = json.loads(line)
            if isinstance(metrics, dict):
                return metrics
    return {}
