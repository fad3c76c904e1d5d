"""The folders of a whole run, local and in a bucket: this host's own, those of its siblings, and
those left by an earlier run with different numbers of machines or hosts.
"""

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from activation_extraction.common.errors import InputError
from activation_extraction.dataset.folders import HostFolder, host_folders
from activation_extraction.store.folder import Folder, FolderError
from activation_extraction.store.identity import Identity
from activation_extraction.store.local_files import check_output_dir
from activation_extraction.store.metadata import (
    AGGREGATE,
    identity_of,
    metadata_in,
    own_files,
)
from activation_extraction.store.ownership import Ownership
from activation_extraction.store.patience import UPLOAD_TIMEOUT
from activation_extraction.store.resume import check_version, refuse_difference
from activation_extraction.text.workers import Worker


@dataclass(frozen=True)
class RunFolders:
    """Where one worker's shards go: a folder inside `local`, and one inside `bucket_url` if given.

    local, bucket_url: the folders that hold those of machines and hosts. upload_timeout: for how
    many seconds a failing request to the bucket is retried.
    """

    worker: Worker
    local: Path
    bucket_url: str | None = None
    upload_timeout: int = 300

    @property
    def folder(self) -> Path:
        """The worker's local folder."""
        return self.local / folder_name(self.worker, in_bucket=False)

    @property
    def roots(self) -> list[tuple[Folder, bool]]:
        """The folders that hold those of machines and hosts, and whether each is in the bucket."""
        roots = [(Folder(str(self.local)), False)]
        if self.bucket_url is not None:
            roots.append((Folder(self.bucket_url, self.upload_timeout, flag=UPLOAD_TIMEOUT), True))
        return roots

    def open_bucket(self, beat: Callable[[], None]) -> Folder | None:
        """The worker's folder in the bucket, after a trial upload. Raises InputError if it fails.

        beat: called whenever an upload makes progress.
        """
        if self.bucket_url is None:
            return None
        name = folder_name(self.worker, in_bucket=True)
        try:
            root = Folder(self.bucket_url, self.upload_timeout, beat, UPLOAD_TIMEOUT)
            folder = root.child(name)
            folder.try_writing()
        except FolderError as error:
            if error.final:
                raise InputError(f"--upload_to_gcs: {error}") from error
            raise
        return folder

    def stale_folders(self) -> list[Folder]:
        """The folders that an earlier run with other numbers of hosts or machines left behind.

        A folder of another machine counts only if this run has no such machine.
        """
        worker, found = self.worker, []
        hosts = [replace(worker, host=host) for host in range(worker.hosts)]
        for root, in_bucket in self.roots:
            own = {folder_name(host, in_bucket) for host in hosts}
            found += _other_folders(root, worker.machine, worker.machines, own)
        return found

    def check_stale_folders(self, overwrite: bool) -> None:
        """Raises InputError if there are any, unless `overwrite` is set and nobody uses them."""
        stale = self.stale_folders()
        if stale and not overwrite:
            raise InputError(
                f"{stale[0].url}: holds an extraction with another number of hosts or machines; "
                "give the same number, or --overwrite to replace it"
            )
        _check_unused(stale)

    def remove_others(self) -> None:
        """--overwrite: deletes folders whose samples would count twice, and outdated totals.

        Every host does this on its own disk, the first one also in the bucket.
        """
        stale = self.stale_folders()
        _check_unused(stale)
        for folder in stale:
            if folder.local or self.worker.host == 0:
                Ownership(folder, uuid.uuid4().hex).delete()
        for root, _ in self.roots:
            if root.local or self.worker.host == 0:
                root.remove(AGGREGATE)


def folder_name(worker: Worker, in_bucket: bool) -> str:
    """Name of the worker's folder; "" if its files are in the output folder itself."""
    if worker.hosts > 1 or in_bucket or worker.machines > 1:
        return HostFolder.of(worker.machine, worker.host, worker.hosts).name
    return ""


def find_metadata(root: Folder) -> tuple[str, dict[str, Any]] | None:
    """A folder of this output that has metadata, and the metadata; None if there is none."""
    for folder in (root, *map(root.child, host_folders(root.folders()))):
        metadata = metadata_in(folder)
        if metadata is not None:
            return folder.url, metadata
    return None


def check_siblings(root: Folder, identity: Identity) -> None:
    """Raises InputError if other machines or hosts have stored another run here."""
    found = find_metadata(root)
    if found is not None:
        where, metadata = found
        check_version(where, metadata)
        refuse_difference(where, identity.compare_shared(identity_of(metadata, where)))


def _other_folders(root: Folder, machine: int, machines: int, own: set[str]) -> list[Folder]:
    """Folders of `machine` with another number of hosts, and of machines that this run lacks.

    own: the folders of this run ("" is the root itself); beside them, samples would count twice.
    """
    named = host_folders(root.folders()).items()
    stale = [name for name, at in named if at.machine == machine or at.machine >= machines]
    folders = [root.child(name) for name in ("", *stale) if name not in own]
    return [folder for folder in folders if own_files(folder.files())]


def _check_unused(folders: Iterable[Folder]) -> None:
    """Raises RunError if another process writes to a local one; a bucket cannot be locked."""
    for folder in folders:
        if "://" not in folder.url:
            check_output_dir(Path(folder.url))
