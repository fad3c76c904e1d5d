"""The log of a run in one folder: its entries, and the protocol by which they are written and read.

This module reads the log; log_writer.py writes it. The log determines which shards exist. As in
Delta Lake (Armbrust et al., VLDB 2020), it is a sequence of small JSON files, which are written
strictly one after the other:

  metadata.json     The head of the log. It names the run (`run`) and the only process that may
                    write to the folder (`owner`), and describes the run. It is replaced if one of
                    these changes.
  shard_0001.json   Entry 1, then shard_0002.json and so on, without gaps. An entry is either a
                    commit or a reservation. A commit lists the files of a shard with their sizes,
                    digests and versions. A reservation contains a run, an owner, and the field
                    `reserved`.

A shard without a commit does not exist. Metrics are not part of the log (metrics.py).

*Every write* of the owner follows the same three steps. Delta Lake creates the next entry on
condition that there is no such file. Here, an overwritten run may have left a file, so the writer
(1) reads the version of the current file, if there is one, (2) reads metadata.json, and stops with
LostError unless it still names this process as the owner, and (3) writes the file on condition that
it still has this version, or still does not exist. If the condition does not hold, or the answer is
lost, the steps are repeated. If the current JSON file then has the content that was to be written,
the write has succeeded. These steps never replace a commit of the same run. Only a repair does so
(see *Withdraw*).

On S3, the version of an object is a digest of its content, so two processes that write the same
content would get the same version. Therefore every file contains the id of its writer. In the files
of a shard, the id is at a place that readers ignore.

A process that writes to the folder goes through these phases:

- *Begin.* The process writes its id into metadata.json, on condition that the file has not changed
  since it read the file. It reads the entries only after that. A new run gets its id here.
- *Reserve.* The process writes a reservation as entry n, the first entry after all commits of the
  run, including the ones that a repair will withdraw. If entry n has become a commit of this run,
  because a request of an earlier process has arrived late, the process begins again. Otherwise,
  once the reservation is written, no earlier process of the run can commit another shard. This is
  so because an earlier process writes entries without gaps, and has not committed shard n. So the
  next entry that it writes can only be entry n or a lower entry:

    - To write entry n, the earlier process reads the version of the entry, then the owner in
      metadata.json, and then writes on condition that the version has not changed. If it read the
      version before the reservation was written, the condition does not hold. If it read the
      version afterwards, it finds another owner in metadata.json, and stops.
    - A lower entry is usually a commit of this run, which the earlier process does not replace. If
      the entry is a reservation that a repair has written, the earlier process cannot replace it
      for the same reason as entry n.

- *Withdraw.* A repair replaces the entry of each bad shard by a reservation, on condition that the
  entry still has the version that was checked (repair.py).
- *Commit.* The process writes the files of a shard, then the entry with the versions of the files,
  and only then the next entry.
- *Finish.* If the run is complete, the process deletes the files of shards that belong to no
  commit, such as the files of an overwritten run. Then it compares the size of every committed file
  with a new listing, and also the version if it wrote the file itself. In any case it writes the
  totals and `status` into metadata.json.

A deletion cannot be conditional, because obstore has no such request. So each file is deleted by
one request, which is never sent again and whose answer is awaited. If the answer is lost, a warning
names the file. If the sender is killed, its request may arrive late, and delete a file that a later
process has committed under the same name. Readers then refuse the shard, because a file in its
commit is missing, and --repair computes the shard again.

*Continuing* a run stores no sample twice, because the stored samples are a set: the samples in the
tables of all committed shards. Every commit has a mark, a place in the data before which all
samples are stored. The data is read again from the furthest mark, and samples that a table contains
are left out (resume.py).

*A reader* (`RunLog.read`) uses only the commits of the run that metadata.json names. It ignores
reservations, commits of other runs, and files that are in no commit. It reads metadata.json again
after the entries, and starts again if the run has changed. A listing of several pages is not a
snapshot, so missing entries are requested by name. The log has a gap if an entry before a commit is
still missing, or is a reservation. If the `status` in metadata.json is "complete", metadata.json
also contains the number of shards, and all entries up to this number must be commits. Writers and
readers refuse a log with a gap, and --repair fills the gap. A file is read in the version that is
recorded in its commit (shard_reader.py).

A local folder also has a lock (local_files.py), which a writer keeps until it ends.
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
from activation_extraction.store.identity import Identity
from activation_extraction.store.metrics import METRICS, last_metrics
from activation_extraction.store.stored_hook import HookKey
from activation_extraction.text.mark import Mark

METADATA = "metadata.json"
FORMAT_VERSION = 5
OTHER_VERSION = "was written by another version of this program"
REPAIRS = "--repair repairs it"
# Largest size of a JSON file in bytes; this program writes smaller files.
MAX_JSON_BYTES = 256 * 2**20
RESERVED = "reserved"  # name of the field that only reservations contain
COMMIT = re.compile(rf"shard_{SHARD_NUMBER}\.json")
# Names of all files that a run writes to a folder, such as metadata.json and shard_0001.npz, and of
# temporary files, such as .metadata.json.tmp.
OWN_FILES = re.compile(
    r"\.?(metadata\.json|metrics\.jsonl"
    rf"|shard_{SHARD_NUMBER}(\.json|\.npz|\.samples\.parquet|{SUFFIXES}))(\.tmp)?"
)
# Number of JSON files that are read at the same time. It may exceed the number of processors,
# because reading a file in a bucket is mostly waiting for the answer.
JSONS_AT_ONCE = 64
# Largest number of JSON files that are requested by name because the listing of the folder lacks
# them, although it contains files of later shards. The listing may be outdated, because a listing
# of several pages may lack a file that was written meanwhile. The limit saves time if a log has a
# large gap.
MAX_UNLISTED = 1000
T = TypeVar("T")


class DamagedError(RunError):
    """A JSON file of a run is damaged, or was written by another version of this program."""


def seal(content: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a JSON file that contains the SHA-256 of its content.

    The order of the keys does not matter for the checksum.

    Args:
        content: Content of the file, without the field `checksum`.

    Raises:
        ValueError: If the content contains NaN or an infinite number.
    """
    sorted_json = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)
    sealed_content = {**content, "checksum": hashlib.sha256(sorted_json.encode()).hexdigest()}
    return (json.dumps(sealed_content, ensure_ascii=False, allow_nan=False) + "\n").encode()


def unseal(json_content: bytes, where: str) -> dict[str, Any]:
    """Checks the checksum in a JSON file of a run, and returns the content without it.

    `seal` makes the bytes of such files.

    Args:
        json_content: Content of the file as bytes.
        where: Path of the file, for messages.

    Raises:
        DamagedError: If the bytes are not exactly the bytes that `seal` made.
    """
    try:
        json_object = json.loads(json_content)
        del json_object["checksum"]
        is_intact = json_content == seal(json_object)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"{where}: is damaged, or was not written by this program"
        raise DamagedError(message, remedy=REPAIRS) from error
    if not is_intact:
        message = f"{where}: is damaged: its checksum does not match its content"
        raise DamagedError(message, remedy=REPAIRS)
    return json_object


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Turns exceptions of a `with` block that parses JSON into DamagedError.

    Args:
        where: Beginning of the message, which names the file.

    Raises:
        DamagedError: If the block raises KeyError, as for a missing field, or TypeError, ValueError
            or AttributeError, as for an unusable value. Other exceptions are not changed.
    """
    try:
        yield
    except KeyError as error:
        raise DamagedError(f"{where}: lacks {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{where}: cannot be read: {error}") from error


def commit_name(number: int) -> str:
    """Returns the name of the JSON file of a commit or reservation, such as "shard_0007.json".

    Args:
        number: Number of the shard.
    """
    return shard_name(number, ".json")


@dataclass(frozen=True)
class Commit:
    """The content of the JSON file that commits a shard.

    The object is made before the shard is stored, and some fields are filled in when the shard is
    committed. The fields have the same names in the JSON file, except that `first`, `last` and
    `count` are in the object `samples` there.

    Attributes:
        number: Number of the shard, from 1, which is also in the name of the JSON file.
        began: Unix time at which the process that stored the shard began.
        mark: Point in the host's stream of samples. When this shard and all earlier shards are
            committed, all samples before the mark are stored. None for the beginning of the data,
            and for a program that computes activations itself.
        run: Id of the run; "" until the shard is committed.
        owner: Id of the process that committed the shard; "" until the shard is committed.
        url: URL of the folder to which the shard was written; "" until the shard is committed. The
            versions in `files` are valid only in this folder.
        identity: Digest of the run's identity; "" in older shards, which do not record it.
        file: Name of the file of activations; "" for a shard without samples, which has no files.
        files: Facts about each file of the shard, by the name of the file.
        unpacked: Size of the file of activations before compression, in bytes.
        first: Smallest number (`sample_idx`) of a sample in the shard.
        last: Largest number (`sample_idx`) of a sample in the shard.
        count: Number of samples.
        tokens: Number of stored tokens.
        hooks: A JSON object for each hook, with its key, name, width, dtype, scale and statistics.
        committed: Unix time of the commit.
        cut_samples: Number of samples that were cut at their end.
        cut_tokens: Number of tokens that were cut off from these samples.
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
        """The name of the JSON file that is this commit, such as "shard_0007.json"."""
        return commit_name(self.number)

    @property
    def bytes(self) -> int:
        """The size in bytes of the shard's file of activations; 0 for a shard without samples."""
        return self.files[self.file].bytes if self.file else 0

    @property
    def sha256(self) -> str:
        """The SHA-256 of the shard's file of activations; "" for a shard without samples."""
        return self.files[self.file].sha256 if self.file else ""

    @property
    def statistics_file(self) -> str:
        """The name of the shard's file with sums of values, from which statistics are computed."""
        return shard_name(self.number, ".npz")

    @property
    def table_file(self) -> str:
        """The name of the file with the table of samples."""
        return shard_name(self.number, ".samples.parquet")

    @property
    def hook_name_by_key(self) -> dict[HookKey, str]:
        """The full names of the hooks in the shard, by the keys of the hooks in pickles."""
        return {
            hook_description["key"]: hook_description["name"] for hook_description in self.hooks
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the JSON file that is this commit, without its checksum."""
        json_object = asdict(self)
        sample_range_fields = {
            field_name: json_object.pop(field_name) for field_name in ("first", "last", "count")
        }
        return {"format_version": FORMAT_VERSION, **json_object, "samples": sample_range_fields}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> "Commit":
        """Returns the commit in a JSON file, ignoring unknown fields.

        Args:
            content: Content of the JSON file, as `to_json` returns it.
            where: Path of the file, for messages.

        Raises:
            DamagedError: If fields are missing, or the file has another format version.
        """
        with _reading(where):
            if content["format_version"] != FORMAT_VERSION:
                raise DamagedError(f"{where}: {OTHER_VERSION}")
            facts_by_name = {
                file_name: FileFacts.from_json(file_facts_json)
                for file_name, file_facts_json in content["files"].items()
            }
            mark_fields = content["mark"]
            parsed_fields = {
                "files": facts_by_name,
                "mark": None if mark_fields is None else Mark.from_json(mark_fields),
                "identity": content.get("identity", ""),  # older files lack this field
            }
            return _from_fields(cls, {**content, **content["samples"], **parsed_fields})


def _from_fields(dataclass_type: type[T], content: Mapping[str, Any]) -> T:
    """Makes an object of a dataclass from a JSON object.

    Args:
        dataclass_type: Dataclass of which an object is made.
        content: JSON object that contains at least the fields of the dataclass, by name. Other
            keys are ignored.

    Raises:
        KeyError: If a field is missing.
    """
    # mypy cannot know that the type T is a dataclass.
    dataclass_fields = fields(dataclass_type)  # type: ignore[arg-type]
    field_names = [dataclass_field.name for dataclass_field in dataclass_fields]
    return dataclass_type(**{field_name: content[field_name] for field_name in field_names})


def furthest_mark(commits: Iterable[Commit], max_samples: float = math.inf) -> Mark | None:
    """Returns the furthest of some commits' marks: the one with the most samples before it.

    Args:
        commits: Commits whose marks are compared.
        max_samples: Largest number of samples before the mark; marks with more samples are ignored.

    Returns:
        The mark. None for the beginning of the data, if no commit has such a mark.
    """
    marks = [commit.mark for commit in commits if commit.mark is not None]
    marks_within_limit = [mark for mark in marks if mark.samples <= max_samples]
    return max(marks_within_limit, key=lambda mark: mark.samples, default=None)


def reservation(run: str, owner: str) -> dict[str, Any]:
    """Returns the content of a reservation, which reserves a shard number for a process.

    Args:
        run: Id of the run.
        owner: Id of the process.
    """
    return {"format_version": FORMAT_VERSION, "run": run, "owner": owner, RESERVED: True}


def parse_commit(json_content: bytes, where: str) -> Commit | None:
    """Returns the commit in an entry of the log; None if the entry is a reservation.

    Args:
        json_content: Content of the JSON file as bytes.
        where: Path of the file, for messages.

    Raises:
        DamagedError: If the entry is damaged, or was written by another version of this program.
    """
    json_object = unseal(json_content, where)
    return None if RESERVED in json_object else Commit.from_json(json_object, where)


def parse_metadata(json_content: bytes, where: str) -> dict[str, Any]:
    """Returns the content of metadata.json as a JSON object.

    Args:
        json_content: Content of the file as bytes.
        where: Path of the file, for messages.

    Raises:
        DamagedError: If the file is damaged, or was written by another version of this program.
    """
    metadata = unseal(json_content, where)
    if metadata.get("format_version") != FORMAT_VERSION:
        raise DamagedError(f"{where}: {OTHER_VERSION}")
    identity_of(metadata, where)
    return metadata


def identity_of(metadata: Mapping[str, Any], where: str) -> Identity:
    """Returns the identity in the content of metadata.json.

    Args:
        metadata: Content of metadata.json.
        where: Path of the file, for messages.

    Raises:
        DamagedError: If the identity cannot be read.
    """
    with _reading(f"{where}: its identity"):
        return Identity.from_json(metadata.get("identity"))


def read_metadata(folder: Folder) -> dict[str, Any] | None:
    """Reads metadata.json in a folder, and returns None if the file is missing or damaged."""
    json_content = folder.read(METADATA, max_bytes=MAX_JSON_BYTES)
    with suppress(DamagedError):
        return None if json_content is None else parse_metadata(json_content, METADATA)
    return None


@dataclass(frozen=True)
class RunLog:
    """A snapshot of the log in one host's folder, with a listing of the folder's files.

    Attributes:
        metadata: Content of metadata.json. None if the file is missing or damaged.
        metadata_file_version: Version of metadata.json. None if the file is missing, or the store
            has no versions.
        commit_by_shard_number: Commits of the run that metadata.json names, by the number of the
            shard. Without metadata, the commits of all runs.
        file_version_by_shard_json_name: Version of each shard's JSON file that was read, by the
            name of the file; None if the store has no versions. Missing files have no key.
        size_by_file_name: Sizes of all files in the folder in bytes, by the name of the file.
        message_by_damaged_file: Message on each JSON file that cannot be read, by the name of the
            file.
        metrics: Numbers in the last line of metrics.jsonl, by name.
        url: URL of the folder, without secrets.
        is_local: Whether the folder is on a local disk, and not in a bucket or at another URL.
    """

    metadata: dict[str, Any] | None = None
    metadata_file_version: str | None = None
    commit_by_shard_number: dict[int, Commit] = field(default_factory=dict)
    file_version_by_shard_json_name: dict[str, str | None] = field(default_factory=dict)
    size_by_file_name: dict[str, int] = field(default_factory=dict)
    message_by_damaged_file: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    is_local: bool = True

    @classmethod
    def read(cls, folder: Folder) -> "RunLog":
        """Reads the log in a folder.

        metadata.json is read before and after the JSON files of the shards. If another run has
        begun in between, all files are read again. JSON files that cannot be read are listed in
        `message_by_damaged_file`.

        Args:
            folder: Folder of a host.

        Raises:
            FolderError: If a request failed.
        """
        while True:
            run_log = _read_once(folder)
            latest_metadata = read_metadata(folder)
            if latest_metadata is None or latest_metadata["run"] == run_log.run:
                return run_log

    @cached_property
    def identity(self) -> Identity | None:
        """The identity of the run; None if there is no metadata."""
        return None if self.metadata is None else identity_of(self.metadata, self.url)

    @property
    def run(self) -> str | None:
        """The id of the run; None if there is no metadata."""
        return None if self.metadata is None else self.metadata["run"]

    @property
    def commits_in_order(self) -> list[Commit]:
        """The commits in the order of their numbers."""
        return [
            self.commit_by_shard_number[shard_number]
            for shard_number in sorted(self.commit_by_shard_number)
        ]

    @property
    def moved_to(self) -> str | None:
        """The URL of the folder to which the shards were uploaded.

        None if the shards are in the folder of this log.
        """
        remote_url = (self.metadata or {}).get("remote")
        are_shards_in_this_folder = not self.is_local or local_path(remote_url or "") == local_path(
            self.url
        )
        return None if are_shards_in_this_folder else remote_url

    @property
    def missing_file_names(self) -> list[str]:
        """The names of committed files that are missing, or whose size differs from the commit."""
        file_names_and_facts = chain.from_iterable(
            commit.files.items() for commit in self.commits_in_order
        )
        return [
            file_name
            for file_name, file_facts in file_names_and_facts
            if self.size_by_file_name.get(file_name) != file_facts.bytes
        ]

    @property
    def missing_json_messages(self) -> list[str]:
        """Messages on missing JSON files of the folder.

        There is one message for each series of consecutive shards without a JSON file, unless the
        shards were uploaded to another folder. If metadata.json is missing, a message on it comes
        first.
        """
        has_metadata_file = self.metadata or METADATA in self.message_by_damaged_file
        messages_on_missing_files = [] if has_metadata_file else [f"{METADATA}: is missing"]
        if self.moved_to is not None:
            return messages_on_missing_files
        metadata = self.metadata or {}
        # If the JSON files of the last shards are missing, no later file shows this. But the
        # metadata.json of a complete run records the number of shards.
        recorded_shard_count = metadata["shards"] if metadata.get("status") == "complete" else 0
        shard_number_after_last = max([recorded_shard_count, *self.commit_by_shard_number]) + 1
        damaged_shard_numbers = {
            number_of(file_name)
            for file_name in self.message_by_damaged_file
            if file_name != METADATA
        }
        existing_shard_numbers = {
            shard_number
            for shard_number in {*self.commit_by_shard_number, *damaged_shard_numbers}
            if shard_number < shard_number_after_last
        }
        for missing_range in _gaps([0, *sorted(existing_shard_numbers), shard_number_after_last]):
            first_missing_name = commit_name(missing_range.start)
            last_missing_name = commit_name(missing_range.stop - 1)
            if first_missing_name == last_missing_name:
                messages_on_missing_files.append(f"{first_missing_name}: is missing")
            else:
                messages_on_missing_files.append(
                    f"{first_missing_name} to {last_missing_name}: are missing"
                )
        return messages_on_missing_files

    @property
    def problems(self) -> list[str]:
        """Messages on the damaged and missing files of the folder.

        JSON files are checked by their content, and all other files by their sizes in the listing.
        If the shards were uploaded to another folder, only the JSON files are checked.
        """
        json_problem_messages = [f"{self.url}/{message}" for message in self.missing_json_messages]
        missing_file_names = self.missing_file_names if self.moved_to is None else []
        file_problem_messages = [
            f"{self.url}/{file_name}: is missing or cut short" for file_name in missing_file_names
        ]
        return [
            *self.message_by_damaged_file.values(),
            *json_problem_messages,
            *file_problem_messages,
        ]


def _read_once(folder: Folder) -> RunLog:
    """Reads all files of the log once.

    The returned log may mix the files of two runs if a new run begins at the same time.
    """
    metadata_content_and_version = folder.read_with_version(METADATA, max_bytes=MAX_JSON_BYTES)
    metadata_content, metadata_file_version = metadata_content_and_version or (None, None)
    # Name of a JSON file that cannot be read -> message on the file.
    message_by_damaged_file: dict[str, str] = {}
    # Name of a shard's JSON file (a commit or a reservation) -> version of this file; None if the
    # store has no versions.
    file_version_by_shard_json_name: dict[str, str | None] = {}
    metadata = None
    if metadata_content is not None:
        try:
            metadata = parse_metadata(metadata_content, f"{folder.url}/{METADATA}")
        except DamagedError as error:
            message_by_damaged_file[METADATA] = str(error)
    size_by_file_name = folder.files()
    listed_shard_json_names = {
        file_name for file_name in size_by_file_name if COMMIT.fullmatch(file_name)
    }
    commit_by_shard_number = _read_commits(
        folder,
        listed_shard_json_names,
        metadata,
        file_version_by_shard_json_name,
        message_by_damaged_file,
    )
    # A listing of several pages may lack a shard's JSON file that was written meanwhile, so JSON
    # files with the missing numbers are requested by name.
    missing_shard_numbers = chain.from_iterable(_gaps([0, *sorted(commit_by_shard_number)]))
    missing_shard_json_names = {
        commit_name(shard_number) for shard_number in islice(missing_shard_numbers, MAX_UNLISTED)
    }
    unlisted_shard_json_names = missing_shard_json_names - listed_shard_json_names
    commit_by_shard_number |= _read_commits(
        folder,
        unlisted_shard_json_names,
        metadata,
        file_version_by_shard_json_name,
        message_by_damaged_file,
    )
    run_log = RunLog(
        metadata=metadata,
        metadata_file_version=metadata_file_version,
        commit_by_shard_number=commit_by_shard_number,
        file_version_by_shard_json_name=file_version_by_shard_json_name,
        size_by_file_name=size_by_file_name,
        message_by_damaged_file=message_by_damaged_file,
        metrics=last_metrics(folder, size_by_file_name.get(METRICS, 0)),
        url=folder.url,
        is_local=folder.is_local,
    )
    if run_log.missing_file_names:
        # The missing files may have been written after the folder was listed, so it is listed
        # again.
        return replace(run_log, size_by_file_name=folder.files())
    return run_log


def _read_commits(
    folder: Folder,
    names: Iterable[str],
    metadata: Mapping[str, Any] | None,
    file_version_by_shard_json_name: dict[str, str | None],
    message_by_damaged_file: dict[str, str],
) -> dict[int, Commit]:
    """Reads JSON files of shards, and returns the commits among them by the shard's number.

    The other JSON files are reservations, commits of other runs, or files that cannot be read.

    Args:
        folder: Folder that contains the log.
        names: Names of the JSON files, of which some may not exist.
        metadata: Content of metadata.json. Commits of other runs are left out. None to return the
            commits of all runs.
        file_version_by_shard_json_name: Dict to which the version of each file is added, by the
            name of the file.
        message_by_damaged_file: Dict to which a message on each file that cannot be read is added,
            by the name of the file.
    """
    commit_by_shard_number: dict[int, Commit] = {}
    sorted_json_names = sorted(names)

    def read(name: str) -> tuple[bytes, str | None] | None:
        return folder.read_with_version(name, max_bytes=MAX_JSON_BYTES)

    with ThreadPoolExecutor(JSONS_AT_ONCE) as thread_pool:
        for shard_json_name, json_content_and_version in zip(
            sorted_json_names, thread_pool.map(read, sorted_json_names), strict=True
        ):
            if json_content_and_version is None:
                continue
            json_content, file_version_by_shard_json_name[shard_json_name] = (
                json_content_and_version
            )
            try:
                commit = parse_commit(json_content, f"{folder.url}/{shard_json_name}")
            except DamagedError as error:
                message_by_damaged_file[shard_json_name] = str(error)
                continue
            if commit is not None and (metadata is None or commit.run == metadata["run"]):
                commit_by_shard_number[commit.number] = commit
    return commit_by_shard_number


def _gaps(numbers: Iterable[int]) -> list[range]:
    """Returns the ranges of consecutive numbers that are missing between other numbers.

    Args:
        numbers: Existing numbers, in ascending order. Numbers before the first or after the last of
            them do not count as missing.
    """
    return [
        range(existing_number + 1, next_existing_number)
        for existing_number, next_existing_number in pairwise(numbers)
        if next_existing_number > existing_number + 1
    ]


def own_files(names: Iterable[str], temporary: bool = False) -> list[str]:
    """Selects the names that files of a run can have, and returns them sorted.

    Args:
        names: Names of all files in a folder, also of files that belong to no run.
        temporary: Whether to include the names of incomplete temporary files, which a killed
            process may have left.
    """
    run_file_names = [file_name for file_name in sorted(names) if OWN_FILES.fullmatch(file_name)]
    if temporary:
        return run_file_names
    return [file_name for file_name in run_file_names if not file_name.startswith(".")]


def check_own(folder: Folder) -> None:
    """Checks that the files that --overwrite would delete or replace belong to a run.

    Args:
        folder: Folder that is overwritten.

    Raises:
        InputError: If the folder contains files that are named like files of a run, but no JSON
            file that this program, in any of its versions, has written.
    """
    run_file_names = own_files(folder.files())
    for file_name in run_file_names:
        with suppress(DamagedError):
            if file_name.endswith(".json") and unseal(
                folder.read(file_name, max_bytes=MAX_JSON_BYTES) or b"", file_name
            ):
                return
    if run_file_names:
        raise InputError(
            f"{folder.url}: --overwrite: {run_file_names[0]} may not be of this program: no sound "
            "JSON of a run is beside it; move it, or give another folder"
        )
