"""A whole run has folders, local and in a bucket.

This host has its own, and so do its siblings; an earlier run with other numbers of machines or
hosts may have left more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from activation_extraction.common.errors import InputError
from activation_extraction.dataset.folders import HostFolder, host_folders
from activation_extraction.store.commit import METADATA, MOST_BYTES, OTHER_VERSION, DamagedError
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import AGGREGATE, identity_of, own_files, parse_metadata
from activation_extraction.store.patience import UPLOAD_TIMEOUT, FolderError
from activation_extraction.store.resume import VERSION_REMEDY, refuse_difference
from activation_extraction.text.batch import Worker


@dataclass(frozen=True)
class RunFolders:
    """One worker's shards go to a folder inside `local`, and to one inside `bucket_url` if given.

    local, bucket_url: the folders that hold those of machines and hosts. upload_timeout: for how
    many seconds a failing request to the bucket is retried.
    """

    worker: Worker
    local: Path
    bucket_url: str | None = None
    upload_timeout: int = 300

    @property
    def folder(self) -> Path:
        """Returns the worker's local folder."""
        return self.local / folder_name(self.worker, in_bucket=False)

    @property
    def roots(self) -> list[Folder]:
        """Returns the folders that hold those of machines and hosts, the local one first."""
        roots = [Folder(str(self.local))]
        if self.bucket_url is not None:
            roots.append(Folder(self.bucket_url, self.upload_timeout, flag=UPLOAD_TIMEOUT))
        return roots

    def open_bucket(self, on_progress: Callable[[], None]) -> Folder | None:
        """Returns the worker's folder in the bucket, after a trial upload.

        on_progress: is called whenever an upload makes progress. Raises InputError if it fails.
        """
        if self.bucket_url is None:
            return None
        try:
            root = Folder(self.bucket_url, self.upload_timeout, on_progress, UPLOAD_TIMEOUT)
            folder = root.child(folder_name(self.worker, in_bucket=True))
            folder.check_conditions()
        except FolderError as error:
            if error.final:
                raise InputError(f"--upload_to_gcs: {error}") from error
            raise
        return folder

    def check_stale_folders(self, overwrite: bool) -> None:
        """Raises InputError if a run with other numbers of hosts or machines has left a folder.

        Beside this run's folders, its samples would count twice. A folder of another machine is
        stale only if this run has no such machine. overwrite: whether --overwrite was given, which
        replaces this run's own folders alone.
        """
        worker = self.worker
        for in_bucket, root in enumerate(self.roots):
            hosts = (replace(worker, host=host) for host in range(worker.hosts))
            own = {folder_name(host, bool(in_bucket)) for host in hosts}
            names = [
                name
                for name, folder in host_folders(root.folders()).items()
                if folder.machine == worker.machine or folder.machine >= worker.machines
            ]
            for folder in (root.child(name) for name in ("", *names) if name not in own):
                if own_files(folder.files()):
                    remedy = "delete it" if overwrite else "give the same number, or delete it"
                    raise InputError(
                        f"{folder.url}: holds an extraction with another number of hosts or "
                        f"machines; {remedy}"
                    )

    def remove_totals(self) -> None:
        """Deletes totals over all folders, which --overwrite makes wrong. Every host does this on
        its own disk, the first one also in the bucket."""
        for root in self.roots:
            if root.local or self.worker.host == 0:
                root.remove(AGGREGATE)


def folder_name(worker: Worker, in_bucket: bool) -> str:
    """Returns the name of the worker's folder; "" if its files are in the output folder itself."""
    if worker.hosts > 1 or in_bucket or worker.machines > 1:
        return HostFolder.of(worker.machine, worker.host, worker.hosts).name
    return ""


def find_metadata(root: Folder) -> tuple[str, dict[str, Any]] | None:
    """Returns the URL and the metadata of a folder of this output that has any; None without.

    Raises InputError for that of another version.
    """
    for folder in (root, *map(root.child, host_folders(root.folders()))):
        data = folder.read(METADATA, most=MOST_BYTES)
        try:
            if data is not None:
                return folder.url, parse_metadata(data, f"{folder.url}/{METADATA}")
        except DamagedError as error:
            if OTHER_VERSION in str(error):
                raise InputError(f"{error}; {VERSION_REMEDY}") from error
    return None


def check_siblings(root: Folder, identity: Identity) -> None:
    """Raises InputError if other machines or hosts have stored another run here."""
    if (found := find_metadata(root)) is not None:
        where, metadata = found
        refuse_difference(where, identity.compare_shared(identity_of(metadata, where)))
