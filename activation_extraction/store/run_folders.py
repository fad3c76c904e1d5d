"""The folders of a run: how they are named, found and checked.

Each host of a run has a folder. These folders are in the output folder: --output_dir, or a folder
in a bucket. The folder `machine_003` belongs to a machine with one host, and `machine_003_host_01`
to one of several hosts. If a run has only one machine with one host, its local files are in the
output folder itself. In a bucket, the files of such a run are in the folder `machine_000`. No other
module forms or parses these names.

`read_folders` reads all folders of a run, also of an incomplete run. `read_run` reads them as well,
but raises an exception if a folder is missing or belongs to another run. A process that stores a
run begins with `RunFolders`, which refuses output folders with folders of other runs. run_log.py
reads the files in one folder.
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
    MAX_JSON_BYTES,
    METADATA,
    OTHER_VERSION,
    DamagedError,
    RunLog,
    identity_of,
    own_files,
    parse_metadata,
)
from activation_extraction.text.batch import Worker

NAME = re.compile(r"machine_([0-9]{3}|[1-9][0-9]{3,})(?:_host_([0-9]{2}|[1-9][0-9]{2,}))?")
AGGREGATE = "aggregated_metadata.json"  # file with totals over all folders, which --status writes
# Number of folders whose logs are read at the same time. It is smaller than JSONS_AT_ONCE, because
# up to JSONS_AT_ONCE files of each folder are read at the same time.
FOLDERS_AT_ONCE = 16


class HostFolder(NamedTuple):
    """The folder of one host, as its name describes it.

    Attributes:
        machine_number: Number of the machine, from 0.
        host_number: Number of the host in its machine, from 0. None if the machine has a single
            host, whose number the name does not contain.
    """

    machine_number: int
    host_number: int | None = None

    @classmethod
    def of(cls, machine_number: int, host_number: int, host_count: int) -> "HostFolder":
        """Returns the folder of a host.

        Args:
            machine_number: Number of the machine, from 0.
            host_number: Number of the host in its machine, from 0.
            host_count: Number of hosts of the machine. If it is 1, the folder's name does not
                contain the number of the host.
        """
        return cls(machine_number, host_number if host_count > 1 else None)

    @classmethod
    def parse(cls, name: str) -> "HostFolder | None":
        """Parses the name of a folder; returns None if it is not the name of a host's folder."""
        name_match = NAME.fullmatch(name)
        if name_match is None:
            return None
        return cls(int(name_match[1]), int(name_match[2]) if name_match[2] else None)

    @property
    def name(self) -> str:
        """The name of the folder, such as "machine_003" or "machine_003_host_01"."""
        if self.host_number is None:
            return f"machine_{self.machine_number:03d}"
        return f"machine_{self.machine_number:03d}_host_{self.host_number:02d}"


def host_folders(names: Iterable[str]) -> dict[str, HostFolder]:
    """Parses the names of hosts' folders among the names of files and folders.

    Args:
        names: Names of files and folders.

    Returns:
        A dict from each name of a host's folder to the parsed name, in the order of `names`. Other
        names are left out.
    """
    folder_or_none_by_name = {
        file_or_folder_name: HostFolder.parse(file_or_folder_name) for file_or_folder_name in names
    }
    return {
        file_or_folder_name: host_folder
        for file_or_folder_name, host_folder in folder_or_none_by_name.items()
        if host_folder is not None
    }


def folder_name(worker: Worker, in_bucket: bool) -> str:
    """Returns the name of a worker's folder.

    Args:
        worker: Worker that stores its files in the folder.
        in_bucket: Whether the output folder is in a bucket.

    Returns:
        The name in the output folder. "" for the only worker of a run if the output folder is not
        in a bucket, because its files are then in the output folder itself.
    """
    if worker.num_hosts > 1 or in_bucket or worker.num_machines > 1:
        return HostFolder.of(worker.machine_number, worker.host_number, worker.num_hosts).name
    return ""


def shown_name(name: str) -> str:
    """Returns the name of a worker's folder for messages.

    Args:
        name: Name of the folder in the output folder. "" if the worker's files are in the output
            folder itself, which is called "the output itself" in messages.
    """
    return name or "the output itself"


def read_folders(root: Folder) -> dict[str, RunLog]:
    """Reads the logs of all existing folders of a run.

    A damaged or missing file raises no exception. The log of a folder records the JSON files that
    cannot be read (`RunLog.message_by_damaged_file`), and folders that do not exist are left out.

    Args:
        root: Output folder of the run.

    Returns:
        The log of each folder that contains files of a run, by the name of the folder. The name of
        the output folder itself is "".

    Raises:
        InputError: If neither the output folder nor a folder in it contains files of a run.
    """
    root_listing = root.listing()
    folder_names = list(host_folders(root_listing))
    if own_files(root_listing):
        folder_names.insert(0, "")
    with ThreadPoolExecutor(FOLDERS_AT_ONCE) as thread_pool:
        logs_of_folders = list(
            thread_pool.map(
                lambda host_folder_name: RunLog.read(root.child(host_folder_name)), folder_names
            )
        )
    log_by_folder = {}
    for host_folder_name, run_log in zip(folder_names, logs_of_folders, strict=True):
        if own_files(run_log.size_by_file_name):
            log_by_folder[host_folder_name] = run_log
    if not log_by_folder:
        raise InputError(f"{root.url}: holds no run")
    return log_by_folder


def read_run(url: str) -> tuple[Folder, dict[str, RunLog]]:
    """Reads the logs of a run, and checks that its folders are complete and belong together.

    Args:
        url: Local path or URL of the run's output folder.

    Returns:
        A tuple of:
            The output folder.
            The log of each host's folder, by the name of the folder. All files that the logs list
            exist.

    Raises:
        ValueError: If there is no run, or its folders do not belong together.
        OSError: If files are missing, cut short or damaged.
    """
    try:
        run_root = Folder(url)
        log_by_folder_name = read_folders(run_root)
    except InputError as error:
        raise ValueError(str(error)) from error
    except RunError as error:
        raise OSError(str(error)) from error
    for run_log in log_by_folder_name.values():
        for problem_message in run_log.problems:
            repair_option = (
                "--repair" if run_log.identity is None else run_log.identity.repair_option
            )
            repair_hint = (
                "" if OTHER_VERSION in problem_message else f"; {repair_option} repairs it"
            )
            raise OSError(f"{problem_message}{repair_hint}")
        if run_log.moved_to and run_log.missing_file_names:
            raise OSError(f"{run_log.url}: the shards were uploaded to {run_log.moved_to}")
    for problem_message in foreign_folders(log_by_folder_name):
        raise ValueError(f"{run_root.url}: {problem_message}")
    return run_root, log_by_folder_name


def foreign_folders(log_by_folder_name: Mapping[str, RunLog]) -> Iterator[str]:
    """Yields a message for each folder that does not belong to the same run as the other folders.

    The first folder whose metadata can be read determines the run.

    Args:
        log_by_folder_name: Log of each host's folder in an output folder, by the name of the
            folder.
    """
    expected_folder_names = expected_names(log_by_folder_name)
    # Number of a machine -> number of hosts of this machine.
    host_count_by_machine: dict[int, int] = {}
    names_and_identities = [
        (name_of_folder, run_log.identity)
        for name_of_folder, run_log in log_by_folder_name.items()
        if run_log.identity
    ]
    for name_of_folder, run_log in log_by_folder_name.items():
        folder_phrase = shown_name(name_of_folder)
        if name_of_folder not in expected_folder_names:
            yield f"{folder_phrase}: holds shards that are not part of this run"
        folder_identity = run_log.identity
        if folder_identity is None:
            continue
        folder_worker = folder_identity.worker
        expected_folder_name = HostFolder.of(
            folder_worker.machine_number, folder_worker.host_number, folder_worker.num_hosts
        ).name
        first_folder_name, first_identity = names_and_identities[0]
        identity_difference = first_identity.compare(folder_identity, shared_only=True)
        host_count = host_count_by_machine.get(
            folder_worker.machine_number, folder_worker.num_hosts
        )
        if identity_difference is not None:
            field_name, value_in_folder, value_in_first_folder = identity_difference
            yield (
                f"{folder_phrase}: belongs to another run: its {field_name} is "
                f"{shown(value_in_folder, value_in_first_folder)}, but "
                f"{shown(value_in_first_folder, value_in_folder)} in "
                f"{shown_name(first_folder_name)}"
            )
            continue
        host_count_by_machine[folder_worker.machine_number] = host_count
        if folder_worker.num_hosts != host_count:
            yield f"{folder_phrase}: belongs to another run: its num_hosts differs"
        elif name_of_folder not in ("", expected_folder_name):
            yield f"{folder_phrase}: holds the shards of {expected_folder_name}"


def expected_names(log_by_folder_name: Mapping[str, RunLog]) -> list[str]:
    """Returns the names of the folders that a run has when it is complete.

    Machines may have different numbers of hosts, which their metadata records. If no metadata of a
    machine can be read, its number of hosts is inferred from the names of its folders, and is too
    small if the folders of the last hosts are missing. If no metadata at all can be read, the names
    of the existing folders are returned.

    Args:
        log_by_folder_name: Log of each existing folder, by the name of the folder.
    """
    identity_by_folder: dict[str, Identity] = {}
    for name_of_folder, run_log in log_by_folder_name.items():
        if run_log.identity is not None:
            identity_by_folder[name_of_folder] = run_log.identity
    if not identity_by_folder:
        return list(log_by_folder_name)
    if "" in identity_by_folder:
        return [""]
    first_identity = next(iter(identity_by_folder.values()))
    machine_count = first_identity.worker.num_machines
    host_count_by_machine = dict.fromkeys(range(machine_count), 1)
    for host_folder in host_folders(log_by_folder_name).values():
        if host_folder.host_number is not None:
            host_count = host_count_by_machine.get(host_folder.machine_number, 1)
            host_count_by_machine[host_folder.machine_number] = max(
                host_count, host_folder.host_number + 1, 2
            )
    for folder_identity in reversed(identity_by_folder.values()):
        host_count_by_machine[folder_identity.worker.machine_number] = (
            folder_identity.worker.num_hosts
        )
    folder_names = []
    for machine_number in range(machine_count):
        host_count = host_count_by_machine[machine_number]
        folder_names += [
            HostFolder.of(machine_number, host_number, host_count).name
            for host_number in range(host_count)
        ]
    return folder_names


@dataclass(frozen=True)
class RunFolders:
    """Finds and checks the folders of a run, local and in a bucket, before a worker stores the run.

    The worker has a folder inside the local output folder and, if there is a bucket, another one
    inside the output folder in the bucket. It writes to both. The output folders also contain the
    folders of the run's other workers (its siblings), and perhaps folders that runs with other
    numbers of machines or hosts have left.

    Attributes:
        worker: Machine and host of this process.
        local_output_path: Path of the local output folder.
        bucket_url: URL of the output folder in a bucket. None if there is no bucket.
        upload_timeout_seconds: Seconds for which a failing request to the bucket is repeated.
    """

    worker: Worker
    local_output_path: Path
    bucket_url: str | None
    upload_timeout_seconds: int

    @property
    def folder(self) -> Path:
        """The path of the worker's local folder."""
        return self.local_output_path / folder_name(self.worker, in_bucket=False)

    @cached_property
    def roots(self) -> list[Folder]:
        """The output folders: the local one, then the one in the bucket if there is a bucket."""
        output_folders = [Folder(str(self.local_output_path))]
        if self.bucket_url is not None:
            output_folders.append(
                Folder(self.bucket_url, self.upload_timeout_seconds, UPLOAD_TIMEOUT)
            )
        return output_folders

    @cached_property
    def remote(self) -> Folder | None:
        """The worker's folder in the bucket; None if there is no bucket."""
        if self.bucket_url is None:
            return None
        return self.roots[1].child(folder_name(self.worker, in_bucket=True))

    def check_bucket(self) -> None:
        """Checks that the bucket can be written to and supports conditional writes.

        Nothing is checked if there is no bucket.

        Raises:
            InputError: If the check fails, and a second check would fail in the same way.
            FolderError: If a request fails for a temporary reason.
        """
        try:
            if self.remote is not None:
                self.remote.check_conditions()
        except FolderError as error:
            if error.is_permanent:
                raise InputError(f"--upload_to_gcs: {error}") from error
            raise

    def check_stale_folders(self, overwrite: bool) -> None:
        """Refuses output folders with stale folders.

        A stale folder belongs to a run with other numbers of hosts or machines. Readers would read
        its samples together with the samples of this run. A folder of this worker's machine is
        stale if this run has no host for it. A folder of another machine is stale if this run has
        no such machine. The output folder itself is stale if it contains files of a run, and this
        run stores no files in it.

        Args:
            overwrite: Whether --overwrite was given. It replaces only the folders of this run, so
                stale folders are refused nevertheless, with another message.

        Raises:
            InputError: If there is a stale folder.
        """
        worker = self.worker
        workers_of_this_machine = [
            replace(worker, host_number=host_number) for host_number in range(worker.num_hosts)
        ]
        # Root 0 is the local output folder, and root 1 is the output folder in the bucket.
        for root_index, output_root in enumerate(self.roots):
            folder_names_of_this_machine = {
                folder_name(worker_of_this_machine, bool(root_index))
                for worker_of_this_machine in workers_of_this_machine
            }
            # Names of folders that a run with another number of hosts or machines may have left. ""
            # is the name of the output folder itself.
            folder_names_to_check = [""]
            for name_of_folder, host_folder in host_folders(output_root.listing()).items():
                machine_number = host_folder.machine_number
                if machine_number == worker.machine_number or machine_number >= worker.num_machines:
                    folder_names_to_check.append(name_of_folder)
            for name_of_folder in folder_names_to_check:
                stale_folder = output_root.child(name_of_folder)
                if name_of_folder not in folder_names_of_this_machine and own_files(
                    stale_folder.files()
                ):
                    remedy_for_stale_folder = (
                        "delete it" if overwrite else "give the same number, or delete it"
                    )
                    raise InputError(
                        f"{stale_folder.url}: holds a run with another number of hosts or "
                        f"machines; {remedy_for_stale_folder}"
                    )

    def earlier(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns the metadata of the run that is already stored in the output folders.

        Each output folder contains a folder for each worker. metadata.json is read from this
        worker's folder, or from the folder of any other worker if it is missing there.

        Returns:
            A tuple for each output folder that contains a metadata.json, the local output folder
            first. The tuple contains:
            The URL of the folder from which metadata.json was read.
            The content of metadata.json.

        Raises:
            InputError: If another version of this program has written the metadata.
        """
        # Tuples of the URL of a folder and the content of the metadata.json that was found for it.
        urls_and_metadata = []
        # Root 0 is the local output folder, and root 1 is the output folder in the bucket.
        for root_index, output_root in enumerate(self.roots):
            worker_folder = output_root.child(folder_name(self.worker, bool(root_index)))
            url_and_metadata = _find_metadata(output_root, worker_folder)
            if url_and_metadata is not None:
                urls_and_metadata.append(url_and_metadata)
        return urls_and_metadata

    def check_siblings(self, identity: Identity) -> None:
        """Refuses output folders in which other machines or hosts have stored another run.

        Args:
            identity: Identity of this worker's run.

        Raises:
            InputError: If an output folder contains another run.
        """
        for output_root in self.roots:
            url_and_metadata = _find_metadata(output_root)
            if url_and_metadata is not None:
                folder_url, stored_metadata = url_and_metadata
                identity_difference = identity.compare(
                    identity_of(stored_metadata, folder_url), shared_only=True
                )
                refuse_difference(folder_url, identity_difference)

    def remove_totals(self) -> None:
        """Deletes the file with totals over all folders, because --overwrite makes them wrong.

        Every host deletes the file in its local output folder. Host 0 also deletes the file in the
        bucket.
        """
        for output_root in self.roots:
            if output_root.is_local or self.worker.host_number == 0:
                output_root.remove(AGGREGATE)


def _find_metadata(
    root: Folder, preferred: Folder | None = None
) -> tuple[str, dict[str, Any]] | None:
    """Searches the folders of a run for an undamaged metadata.json, and reads the first one.

    The output folder is searched before the folders of hosts in it.

    Args:
        root: Output folder of the run.
        preferred: Folder that is searched before the output folder. None if there is no such
            folder.

    Returns:
        A tuple of the folder's URL and the content of metadata.json; None if no folder contains
        undamaged metadata.

    Raises:
        InputError: If another version of this program has written the metadata.
    """
    folders_to_search = [root, *map(root.child, host_folders(root.listing()))]
    if preferred is not None:
        folders_to_search.insert(0, preferred)
    for searched_folder in folders_to_search:
        metadata_content = searched_folder.read(METADATA, max_bytes=MAX_JSON_BYTES)
        try:
            if metadata_content is not None:
                return searched_folder.url, parse_metadata(
                    metadata_content, f"{searched_folder.url}/{METADATA}"
                )
        except DamagedError as error:
            if OTHER_VERSION in str(error):
                raise InputError(f"{error}; {VERSION_REMEDY}") from error
    return None
