"""The log of a run in one folder: its entries, the protocol by which they are written, and reading.

The log says which shards exist. As in Delta Lake (Armbrust et al., VLDB 2020), it is a sequence of
small JSON files whose entries are written strictly one after the other:

  metadata.json     the head. It names the run (`run`) and the one process that may write
                    (`owner`), and describes the run. It is replaced when one of these changes.
  shard_0001.json   entry 1, then shard_0002.json and so on, without gaps. An entry is either a
                    commit, which lists the files of a shard with their sizes, digests and
                    versions, or a reservation: a run and an owner, and the field `reserved`.

A shard without a commit does not exist. No commit is replaced by its own run, except by a repair.
Metrics are not part of the log (metrics.py).

*Every write* of the owner follows one order. Delta Lake creates the next entry on condition that
there is none. Here, an overwritten run may have left one, so the writer (1) reads the version of
the file that stands there, if any, (2) reads metadata.json and stops with LostError unless it still
names this process as the owner, and (3) writes on condition that exactly this version, or no file,
is still there. If the condition does not hold, or the answer is lost, the same order begins again:
a JSON with the writer's own content is a success, and a commit of the same run is never replaced.
Where the version of an object is a digest of its content (on S3), it must still name one write, so
every file contains the id of its writer, in the files of a shard where readers ignore it.

A process that writes (log_writer.py) goes through these steps:

- *Begin.* It writes its id into metadata.json, on condition that nobody has changed the file since
  it read it. Only then it reads the entries. A new run gets its id here.
- *Reserve.* It writes a reservation as the next entry. An earlier process may have had a request
  on its way that arrives only now, so if a commit of this run stands there, that shard counts as
  stored, and the process begins again. Once the reservation is there, no earlier process can commit
  anything. It writes its entries one after the other, so its next one is at most this one. If it is
  a lower one, a commit stands there, which is never replaced. If it is this one and the earlier
  process read its version before the reservation, the condition fails. If it read the version
  after that, it then finds another owner in metadata.json.
- *Commit.* It writes the files of a shard, then its entry with their versions, and only then the
  next entry.
- *Withdraw.* A repair replaces the entry of each bad shard by a reservation, on condition of the
  version that it has checked (repair.py).
- *Finish.* If the run is complete, it deletes the files of shards that belong to no commit, such as
  those of an overwritten run. Then it compares the size of every committed file with a new listing,
  and the version, too, if this process wrote the file. In any case it writes the totals and
  `status` into metadata.json. A deletion cannot be conditional (obstore has no such request). So
  each file is deleted by one request, which is never sent again and whose answer is waited for; a
  file whose deletion stays unknown is left, and a warning names it. A DELETE that is still on its
  way when its sender is killed may remove a file that a later process has committed under that
  name. Readers then refuse the shard, because a file that its commit lists is missing, and --repair
  computes it again.

*Continuing* a run stores nothing twice, because what is stored is a set: the samples that the
tables of the committed shards list. Every commit has a mark, a place in the data before which all
samples are stored. The data is read again from the furthest mark, and samples that a table lists
are left out (resume.py).

*A reader* (`RunLog.read`) believes the commits of the run that metadata.json names, and nothing
else: no reservation, no commit of another run, and no file that no commit lists. It reads
metadata.json again after the entries, and begins anew if the run has changed. A listing that comes
in pages is no snapshot, so an entry that it lacks is asked for by its name. An entry that is then
still missing before a later commit, or before the last one that metadata.json of a complete run
counts, is a gap: writers and readers refuse it, and --repair fills it. A file is read in the
version that its commit names (shard_reader.py).

In a local folder there is a lock, too (local_files.py), which a writer keeps until it ends.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, islice, pairwise
from typing import Any, TypeVar

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.store.folder import Folder, local_path
from activation_extraction.store.formats import (
    SHARD_NUMBER,
    SUFFIXES,
    FileFacts,
    number_of,
    shard_name,
)
from activation_extraction.store.hook_values import Key
from activation_extraction.store.identity import Identity
from activation_extraction.store.metrics import METRICS, last_metrics
from activation_extraction.text.mark import Mark

METADATA = "metadata.json"
FORMAT_VERSION = 5
OTHER_VERSION = "was written by another version of this program"
REPAIRS = "--repair repairs it"
MOST_BYTES = 256 * 2**20  # limit for a JSON file; this program writes no larger one
RESERVED = "reserved"  # the field of a reservation that a commit lacks
COMMIT = re.compile(rf"shard_{SHARD_NUMBER}\.json")
OWN_FILES = re.compile(
    r"\.?(metadata\.json|metrics\.jsonl"
    rf"|shard_{SHARD_NUMBER}(\.json|\.npz|\.samples\.parquet|{SUFFIXES}))(\.tmp)?"
)
JSONS_AT_ONCE = 64  # most small files that are read at the same time
MOST_ABSENT = 1000  # most JSON files that are requested although a listing lacks them
T = TypeVar("T")


class DamagedError(RunError):
    """A JSON file does not have the content that was written to it."""


def seal(content: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a JSON file with the SHA-256 of its content.

    The order of the keys does not matter for the checksum.

    Raises:
        ValueError: The content has NaN or an infinite number.
    """
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)
    sealed = {**content, "checksum": hashlib.sha256(text.encode()).hexdigest()}
    return (json.dumps(sealed, ensure_ascii=False, allow_nan=False) + "\n").encode()


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """Returns the content of a file that `seal` made, without the checksum.

    Args:
        data: The bytes of the file.
        where: Path of the file, for messages.

    Raises:
        DamagedError: Even a single byte was changed.
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
def _reading(where: str) -> Iterator[None]:
    """Turns exceptions of a `with` block, which parses JSON, into DamagedError.

    Args:
        where: The beginning of the message, which names the file.

    Raises:
        DamagedError: The block raises KeyError, as for a missing field, or TypeError, ValueError or
            AttributeError, as for an unusable value. Other exceptions are not changed.
    """
    try:
        yield
    except KeyError as error:
        raise DamagedError(f"{where}: lacks {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{where}: cannot be read: {error}") from error


def commit_name(number: int) -> str:
    """Returns the name of the entry with this number."""
    return shard_name(number, ".json")


@dataclass(frozen=True)
class Commit:
    """The entry of the log that commits a shard.

    The fields are those of the JSON, which the package's docstring explains, except for `first`,
    `last` and `count`, which the JSON has in `samples`.

    Attributes:
        number: Number of the entry and of the shard, from 1.
        began: Unix time at which the process that stored the shard began.
        mark: Place in the data before which all samples are stored once this shard and those before
            it are committed. None at the beginning of the data, and for a program with a loop of
            its own.
        run: Id of the run; "" until the shard is committed, as are `owner` and `url`.
        owner: Id of the process that committed the shard.
        url: URL of the folder that it was written to. A copy in another folder has other versions.
        identity: Digest of the run's identity; "" in shards that do not record it.
        file: Name of the file of activations; "" for a shard without samples, which has no files.
        files: Facts about every file of the shard, by its name.
        unpacked: Bytes of the file of activations before compression.
        first: Smallest number (`sample_idx`) of a sample in the shard.
        last: Largest number of a sample in the shard.
        count: Number of samples.
        tokens: Number of stored tokens.
        hooks: Key, name, width, dtype, scale and statistics of each hook.
        committed: Unix time of the commit.
        cut_samples: Number of samples that were cut at their end.
        cut_tokens: Number of tokens that these samples lack.
        empty_samples: Number of samples without a stored token.
    """

    number: int
    began: float
    mark: Mark | None
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
        """The name of the file with the statistics of every dimension."""
        return shard_name(self.number, ".npz")

    @property
    def table_file(self) -> str:
        """The name of the file with the table of samples."""
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
        """Returns the commit that `to_json` described. Unknown fields are ignored.

        Args:
            content: The content of the JSON file.
            where: Path of the file, for messages.

        Raises:
            DamagedError: Fields are missing, or the file has another format version.
        """
        with _reading(where):
            if content["format_version"] != FORMAT_VERSION:
                raise DamagedError(f"{where}: {OTHER_VERSION}")
            files = {
                name: _from_fields(FileFacts, facts) for name, facts in content["files"].items()
            }
            mark = content["mark"]
            parsed = {
                "files": files,
                "mark": None if mark is None else Mark.from_json(mark),
                "identity": content.get("identity", ""),  # older files lack the field
            }
            return _from_fields(cls, {**content, **content["samples"], **parsed})


def _from_fields(kind: type[T], content: Mapping[str, Any]) -> T:
    """Returns a dataclass made from the items of `content` that are its fields."""
    names = [attribute.name for attribute in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: content[name] for name in names})


def furthest_mark(commits: Iterable[Commit], most: float = math.inf) -> Mark | None:
    """Returns the mark that lies furthest in the data.

    Args:
        commits: Commits without gaps, so that all samples before each of their marks are stored.
        most: Most samples that may lie before the mark.

    Returns:
        The mark; None for the beginning of the data.
    """
    marks = [commit.mark for commit in commits if commit.mark is not None]
    within = [mark for mark in marks if mark.samples <= most]
    return max(within, key=lambda mark: mark.samples, default=None)


def reservation(run: str, owner: str) -> dict[str, Any]:
    """Returns the content of an entry that reserves its number for the process `owner`."""
    return {"format_version": FORMAT_VERSION, "run": run, "owner": owner, RESERVED: True}


def parse_commit(data: bytes, where: str) -> Commit | None:
    """Returns the commit in an entry; None for a reservation.

    Args:
        data: The bytes of the JSON file.
        where: Path of the file, for messages.

    Raises:
        DamagedError: The entry cannot be used.
    """
    content = unseal(data, where)
    return None if RESERVED in content else Commit.from_json(content, where)


def parse_metadata(data: bytes, where: str) -> dict[str, Any]:
    """Returns the content of a metadata.json.

    Args:
        data: The bytes of the file.
        where: Path of the file, for messages.

    Raises:
        DamagedError: The file cannot be used.
    """
    content = unseal(data, where)
    if content.get("format_version") != FORMAT_VERSION:
        raise DamagedError(f"{where}: {OTHER_VERSION}")
    identity_of(content, where)
    return content


def identity_of(metadata: Mapping[str, Any], where: str) -> Identity:
    """Returns the identity that metadata.json records. Raises DamagedError if it cannot be read."""
    with _reading(f"{where}: its identity"):
        return Identity.from_json(metadata.get("identity"))


def read_metadata(folder: Folder) -> dict[str, Any] | None:
    """Returns the content of metadata.json; None if it is missing or damaged.

    --verify reports a damaged one.
    """
    data = folder.read(METADATA, most=MOST_BYTES)
    with suppress(DamagedError):
        return None if data is None else parse_metadata(data, METADATA)
    return None


@dataclass(frozen=True)
class RunLog:
    """The log of one host's folder as it was read, and the names of the files beside it.

    Attributes:
        metadata: Content of metadata.json; None if there is none, or it is damaged.
        version: Version of metadata.json.
        commits: Commits of the run that metadata.json names, by their numbers; of any run without
            metadata.
        versions: Version of each entry that was read, by the name of its file. A name that is
            missing stands for a file that does not exist.
        files: Sizes of the files in bytes, by name.
        damaged: Reason why a JSON cannot be read, by the name of the file.
        metrics: Last metrics of the run.
        url: URL of the folder, without secrets.
        local: Whether the folder is on this machine.
    """

    metadata: dict[str, Any] | None = None
    version: str | None = None
    commits: dict[int, Commit] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    local: bool = True

    @classmethod
    def read(cls, folder: Folder) -> "RunLog":
        """Reads the JSON files of a folder, many at a time; `damaged` names unreadable ones.

        metadata.json is read before and after the entries: if another run has begun in between, all
        of them are read again.
        """
        while True:
            run_log = _read_once(folder)
            after = read_metadata(folder)
            if after is None or after["run"] == run_log.run:
                return run_log

    @cached_property
    def identity(self) -> Identity | None:
        """The identity of the run; None without metadata."""
        return None if self.metadata is None else identity_of(self.metadata, self.url)

    @property
    def run(self) -> str | None:
        """The id of the run; None without metadata."""
        return None if self.metadata is None else self.metadata["run"]

    @property
    def in_order(self) -> list[Commit]:
        """The commits in the order of their numbers."""
        return [self.commits[number] for number in sorted(self.commits)]

    @property
    def moved_to(self) -> str | None:
        """The URL of the bucket folder that holds the shards; None if the shards are here."""
        remote = (self.metadata or {}).get("remote")
        is_here = not self.local or local_path(remote or "") == local_path(self.url)
        return None if is_here else remote

    @property
    def missing_files(self) -> list[str]:
        """The names of committed files that are missing, or whose size differs from the commit."""
        files = chain.from_iterable(commit.files.items() for commit in self.in_order)
        return [name for name, facts in files if self.files.get(name) != facts.bytes]

    @property
    def missing_jsons(self) -> list[str]:
        """Messages on missing JSON files: metadata.json, and entries in gaps of the log."""
        has_metadata = self.metadata or METADATA in self.damaged
        messages = [] if has_metadata else [f"{METADATA}: is missing"]
        if self.moved_to is not None:
            return messages
        metadata = self.metadata or {}
        # A complete run records how many entries it has, so a missing last one is noticed, too.
        recorded = metadata["shards"] if metadata.get("status") == "complete" else 0
        end = max([recorded, *self.commits]) + 1
        damaged = {number_of(name) for name in self.damaged if name != METADATA}
        present = {number for number in {*self.commits, *damaged} if number < end}
        for gap in _gaps([0, *sorted(present), end]):
            first, last = commit_name(gap.start), commit_name(gap.stop - 1)
            one = first == last
            messages.append(f"{first}: is missing" if one else f"{first} to {last}: are missing")
        return messages

    @property
    def problems(self) -> list[str]:
        """Messages on damaged and missing files, as far as JSON files and the listing show them."""
        jsons = [f"{self.url}/{message}" for message in self.missing_jsons]
        missing = self.missing_files if self.moved_to is None else []
        files = [f"{self.url}/{name}: is missing or cut short" for name in missing]
        return [*self.damaged.values(), *jsons, *files]


def _read_once(folder: Folder) -> RunLog:
    answer = folder.read_with_version(METADATA, most=MOST_BYTES)
    damaged: dict[str, str] = {}
    versions: dict[str, str | None] = {}
    metadata = None
    if answer is not None:
        try:
            metadata = parse_metadata(answer[0], f"{folder.url}/{METADATA}")
        except DamagedError as error:
            damaged[METADATA] = str(error)
    files = folder.files()
    listed = {name for name in files if COMMIT.fullmatch(name)}
    commits = _read_commits(folder, listed, metadata, versions, damaged)
    # A listing that comes in pages is no snapshot: an entry that it lacks is asked for by its name.
    missing = chain.from_iterable(_gaps([0, *sorted(commits)]))
    absent = {commit_name(number) for number in islice(missing, MOST_ABSENT)} - listed
    commits |= _read_commits(folder, absent, metadata, versions, damaged)
    run_log = RunLog(
        metadata=metadata,
        version=answer and answer[1],
        commits=commits,
        versions=versions,
        files=files,
        damaged=damaged,
        metrics=last_metrics(folder, files.get(METRICS, 0)),
        url=folder.url,
        local=folder.local,
    )
    # A commit may be younger than the listing, and then its files may be, too.
    return replace(run_log, files=folder.files()) if run_log.missing_files else run_log


def _read_commits(
    folder: Folder,
    names: Iterable[str],
    metadata: Mapping[str, Any] | None,
    versions: dict[str, str | None],
    damaged: dict[str, str],
) -> dict[int, Commit]:
    """Returns the commits in the entries of these names, by their numbers.

    Leaves out reservations, and commits of another run than that of the metadata. Adds the version
    of each entry to `versions`, and the reason why an entry cannot be read to `damaged`.
    """
    commits: dict[int, Commit] = {}
    ordered = sorted(names)
    with ThreadPoolExecutor(JSONS_AT_ONCE) as pool:
        answers = pool.map(lambda name: folder.read_with_version(name, most=MOST_BYTES), ordered)
        for name, answer in zip(ordered, answers, strict=True):
            if answer is None:
                continue
            data, versions[name] = answer
            try:
                commit = parse_commit(data, f"{folder.url}/{name}")
            except DamagedError as error:
                damaged[name] = str(error)
                continue
            if commit is not None and (metadata is None or commit.run == metadata["run"]):
                commits[commit.number] = commit
    return commits


def _gaps(numbers: Iterable[int]) -> list[range]:
    """Returns the ranges of missing numbers between ascending numbers."""
    return [range(a + 1, b) for a, b in pairwise(numbers) if b > a + 1]


def own_files(names: Iterable[str], temporary: bool = False) -> list[str]:
    """Returns the names of files that belong to a run, sorted.

    Args:
        names: Names of any files.
        temporary: Whether to include temporary files, which a killed process may have left and
            which are not complete.
    """
    matching = [name for name in sorted(names) if OWN_FILES.fullmatch(name)]
    return matching if temporary else [name for name in matching if not name.startswith(".")]


def check_own(folder: Folder) -> None:
    """Checks that --overwrite deletes and replaces no files of somebody else.

    Raises:
        InputError: Files with names like those of a run are there, but no JSON that
            a run of any version has written.
    """
    names = own_files(folder.files())
    for name in names:
        with suppress(DamagedError):
            if name.endswith(".json") and unseal(folder.read(name, most=MOST_BYTES) or b"", name):
                return
    if names:
        raise InputError(
            f"{folder.url}: --overwrite: {names[0]} may not be of this program: no sound JSON of a "
            "run is beside it; move it, or give another folder"
        )
