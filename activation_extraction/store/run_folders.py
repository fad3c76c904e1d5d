"""The folders of a run: their names, which ones there are, and which ones there should be.

`machine_003` belongs to a machine with one host, `machine_003_host_01` to one of several hosts. A
single machine with one host writes to the output itself, unless the output is in a bucket. This
module alone forms and parses these names.

`read_folders` reads all folders of a run in whatever state they are, and `read_run` requires that
they are in order. A process that stores a run begins with `RunFolders`, which has the process's own
folders and refuses folders of other runs. What lies in one folder is the subject of run_log.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.store.folder import UPLOAD_TIMEOUT, Folder, FolderError
from activation_extraction.store.identity import Identity
from activation_extraction.store.resume import VERSION_REMEDY, refuse_difference, shown
from activation_extraction.store.run_log import (
    METADATA,
    MOST_BYTES,
    OTHER_VERSION,
    DamagedError,
    RunLog,
    identity_of,
    own_files,
    parse_metadata,
)
from activation_extraction.text.batch import Worker

NAME = re.compile(r"machine_([0-9]{3}|[1-9][0-9]{3,})(?:_host_([0-9]{2}|[1-9][0-9]{2,}))?")
AGGREGATE = "aggregated_metadata.json"  # totals over all folders, as --status writes them
FOLDERS_AT_ONCE = 16  # folders that are read at the same time


class HostFolder(NamedTuple):
    """The folder of one host.

    Attributes:
        machine: The number of the machine.
        host: The number of the host; None if the machine has a single host.
    """

    machine: int
    host: int | None = None

    @classmethod
    def of(cls, machine: int, host: int, hosts: int) -> "HostFolder":
        """Returns the folder of host `host` of a machine with `hosts` hosts."""
        return cls(machine, host if hosts > 1 else None)

    @classmethod
    def parse(cls, name: str) -> "HostFolder | None":
        """Returns the folder with this name; None if the name is not that of a host's folder."""
        match = NAME.fullmatch(name)
        if match is None:
            return None
        return cls(int(match[1]), int(match[2]) if match[2] else None)

    @property
    def name(self) -> str:
        """The name of the folder."""
        if self.host is None:
            return f"machine_{self.machine:03d}"
        return f"machine_{self.machine:03d}_host_{self.host:02d}"


def host_folders(names: Iterable[str]) -> dict[str, HostFolder]:
    """Returns the folders of hosts among `names`, by name, in the same order."""
    folders = {name: HostFolder.parse(name) for name in names}
    return {name: folder for name, folder in folders.items() if folder is not None}


def folder_name(worker: Worker, in_bucket: bool) -> str:
    """Returns the name of a worker's folder; "" if its files are in the output itself."""
    if worker.hosts > 1 or in_bucket or worker.machines > 1:
        return HostFolder.of(worker.machine, worker.host, worker.hosts).name
    return ""


def shown_name(name: str) -> str:
    """Returns the name of a folder for messages. "" stands for the output itself."""
    return name or "the output itself"


def read_folders(root: Folder) -> dict[str, RunLog]:
    """Reads the JSON files of all folders of a run, whatever state they are in.

    Args:
        root: The output of the run.

    Returns:
        The content of each folder that holds files of a run, by the folder's name; "" is
        the output itself.

    Raises:
        InputError: There is no run at all.
    """
    listing = root.listing()
    names = list(host_folders(listing))
    if own_files(listing):
        names.insert(0, "")
    with ThreadPoolExecutor(FOLDERS_AT_ONCE) as pool:
        contents = list(pool.map(lambda name: RunLog.read(root.child(name)), names))
    by_name = dict(zip(names, contents, strict=True))
    folders = {name: stored for name, stored in by_name.items() if own_files(stored.files)}
    if not folders:
        raise InputError(f"{root.url}: holds no run")
    return folders


def read_run(url: str) -> tuple[Folder, dict[str, RunLog]]:
    """Reads the JSON files of a run whose folders are in order.

    Args:
        url: The output of the run: a local folder or a URL.

    Returns:
        The output, and the content of each folder by the folder's name. The folders contain all
        files that their JSON files list.

    Raises:
        ValueError: There is no run, or its folders do not belong together.
        OSError: Files are missing, cut short or damaged.
    """
    try:
        root = Folder(url)
        folders = read_folders(root)
    except InputError as error:
        raise ValueError(str(error)) from error
    except RunError as error:
        raise OSError(str(error)) from error
    for stored in folders.values():
        for problem in stored.problems:
            option = "--repair" if stored.identity is None else stored.identity.repair_option
            remedy = "" if OTHER_VERSION in problem else f"; {option} repairs it"
            raise OSError(f"{problem}{remedy}")
        if stored.moved_to and stored.missing_files:
            raise OSError(f"{stored.url}: the shards were uploaded to {stored.moved_to}")
    for stranger in strangers(folders):
        raise ValueError(f"{root.url}: {stranger}")
    return root, folders


def strangers(folders: Mapping[str, RunLog]) -> Iterator[str]:
    """Yields a message on each folder that is not part of the run of the first readable folder.

    Args:
        folders: The content of each folder, by the folder's name.
    """
    expected = expected_names(folders)
    hosts: dict[int, int] = {}  # number of hosts of each machine
    readable = [(name, stored.identity) for name, stored in folders.items() if stored.identity]
    for name, stored in folders.items():
        where = shown_name(name)
        if name not in expected:
            yield f"{where}: holds shards that are not part of this run"
        if (identity := stored.identity) is None:
            continue
        worker = identity.worker
        written_as = HostFolder.of(worker.machine, worker.host, worker.hosts).name
        first_name, first = readable[0]
        if difference := first.compare(identity, shared_only=True):
            field, value, first_value = difference
            elsewhere = f"{shown(first_value, value)} in {shown_name(first_name)}"
            other = f"its {field} is {shown(value, first_value)}, but {elsewhere}"
            yield f"{where}: belongs to another run: {other}"
        elif hosts.setdefault(worker.machine, worker.hosts) != worker.hosts:
            yield f"{where}: belongs to another run: its num_hosts differs"
        elif name not in ("", written_as):
            yield f"{where}: holds the shards of {written_as}"


def expected_names(folders: Mapping[str, RunLog]) -> list[str]:
    """Returns the names of the folders that the run has once it is finished.

    Machines may have different numbers of hosts, which their metadata records. If no metadata of a
    machine can be read, its number of hosts is inferred from the names of its folders, and is too
    small if the folders of the last hosts are missing. Without any readable metadata, the names are
    those of the existing folders.

    Args:
        folders: The content of each existing folder, by the folder's name.
    """
    identities = {name: s.identity for name, s in folders.items() if s.identity is not None}
    if not identities:
        return list(folders)
    if "" in identities:
        return [""]
    first = next(iter(identities.values()))
    hosts = dict.fromkeys(range(first.worker.machines), 1)
    for folder in host_folders(folders).values():
        if folder.host is not None:
            hosts[folder.machine] = max(hosts.get(folder.machine, 1), folder.host + 1, 2)
    for identity in reversed(identities.values()):
        hosts[identity.worker.machine] = identity.worker.hosts
    return [
        HostFolder.of(machine, host, hosts[machine]).name
        for machine in range(first.worker.machines)
        for host in range(hosts[machine])
    ]


@dataclass(frozen=True)
class RunFolders:
    """The folders of a run, local and in a bucket, as one worker sees them when it starts.

    The worker stores its shards in a folder inside `local`, and in one inside `bucket_url` if there
    is a bucket. The other workers of the run have folders beside these, its siblings. An earlier
    run with other numbers of machines or hosts may have left more folders.

    Attributes:
        worker: The machine and host of this process.
        local: The local output, which holds the folders of machines and hosts.
        bucket_url: The URL that holds these folders in a bucket; None without a bucket.
        upload_timeout: The number of seconds for which a failing request to the bucket is retried.
    """

    worker: Worker
    local: Path
    bucket_url: str | None
    upload_timeout: int

    @property
    def folder(self) -> Path:
        """The worker's local folder."""
        return self.local / folder_name(self.worker, in_bucket=False)

    @cached_property
    def roots(self) -> list[Folder]:
        """The outputs that hold the folders of machines and hosts.

        The local output comes first, then the one in the bucket if there is a bucket.
        """
        roots = [Folder(str(self.local))]
        if self.bucket_url is not None:
            roots.append(Folder(self.bucket_url, self.upload_timeout, UPLOAD_TIMEOUT))
        return roots

    @cached_property
    def remote(self) -> Folder | None:
        """The worker's folder in the bucket; None without a bucket."""
        if self.bucket_url is None:
            return None
        return self.roots[1].child(folder_name(self.worker, in_bucket=True))

    def check_bucket(self) -> None:
        """Checks that the bucket can be written to and obeys conditions on writes.

        Raises:
            InputError: The check fails, and trying again would not help.
            FolderError: The request failed for another reason.
        """
        try:
            if self.remote is not None:
                self.remote.check_conditions()
        except FolderError as error:
            if error.final:
                raise InputError(f"--upload_to_gcs: {error}") from error
            raise

    def check_stale_folders(self, overwrite: bool) -> None:
        """Refuses folders that a run with other numbers of hosts or machines has left.

        Samples in such a folder would count twice, beside those in this run's folders. A folder of
        another machine is stale only if this run has no such machine.

        Args:
            overwrite: Whether --overwrite was given, which replaces only this run's own folders.

        Raises:
            InputError: There is such a folder.
        """
        worker = self.worker
        siblings = [replace(worker, host=host) for host in range(worker.hosts)]
        for in_bucket, root in enumerate(self.roots):
            current = {folder_name(sibling, bool(in_bucket)) for sibling in siblings}
            candidates = [""]  # the output itself
            for name, folder in host_folders(root.listing()).items():
                if folder.machine == worker.machine or folder.machine >= worker.machines:
                    candidates.append(name)
            for name in candidates:
                stale = root.child(name)
                if name not in current and own_files(stale.files()):
                    remedy = "delete it" if overwrite else "give the same number, or delete it"
                    raise InputError(
                        f"{stale.url}: holds a run with another number of hosts or "
                        f"machines; {remedy}"
                    )

    def earlier(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns the metadata of the run that is stored in the outputs already.

        Returns:
            For each output that has metadata, the local one first, the URL of a folder and its
            metadata. The folder is this worker's if that has metadata, otherwise any other.

        Raises:
            InputError: Another version of this program has written the metadata.
        """
        stored = []
        for in_bucket, root in enumerate(self.roots):
            preferred = root.child(folder_name(self.worker, bool(in_bucket)))
            metadata = _find_metadata(root, preferred)
            if metadata is not None:
                stored.append(metadata)
        return stored

    def check_siblings(self, identity: Identity) -> None:
        """Refuses outputs in which other machines or hosts have stored another run.

        Args:
            identity: The identity of this worker's run.

        Raises:
            InputError: There is such an output.
        """
        for root in self.roots:
            stored = _find_metadata(root)
            if stored is not None:
                where, metadata = stored
                difference = identity.compare(identity_of(metadata, where), shared_only=True)
                refuse_difference(where, difference)

    def remove_totals(self) -> None:
        """Deletes the totals over all folders, which --overwrite makes wrong.

        Every host does this on its own disk, and only the first one in the bucket.
        """
        for root in self.roots:
            if root.local or self.worker.host == 0:
                root.remove(AGGREGATE)


def _find_metadata(
    root: Folder, preferred: Folder | None = None
) -> tuple[str, dict[str, Any]] | None:
    """Returns the URL and the metadata of the first folder of an output that has metadata.

    Args:
        root: The output.
        preferred: The folder to look into first; None for the output itself.

    Returns:
        The URL of the folder and its metadata; None if no folder has any.

    Raises:
        InputError: Another version of this program has written the metadata.
    """
    folders = [root, *map(root.child, host_folders(root.listing()))]
    if preferred is not None:
        folders.insert(0, preferred)
    for folder in folders:
        data = folder.read(METADATA, most=MOST_BYTES)
        try:
            if data is not None:
                return folder.url, parse_metadata(data, f"{folder.url}/{METADATA}")
        except DamagedError as error:
            if OTHER_VERSION in str(error):
                raise InputError(f"{error}; {VERSION_REMEDY}") from error
    return None
