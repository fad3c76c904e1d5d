"""A whole run has folders, local and in a bucket.

This host has its own, and so do its siblings; an earlier run with other numbers of machines or
hosts may have left more.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from activation_extraction.common.errors import InputError
from activation_extraction.store.commit import METADATA, MOST_BYTES, OTHER_VERSION, DamagedError
from activation_extraction.store.folder import UPLOAD_TIMEOUT, Folder, FolderError
from activation_extraction.store.host_folders import host_folders, host_name
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import AGGREGATE, identity_of, own_files, parse_metadata
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
    bucket_url: str | None
    upload_timeout: int

    @property
    def folder(self) -> Path:
        """Returns the worker's local folder."""
        return self.local / folder_name(self.worker, in_bucket=False)

    @cached_property
    def roots(self) -> list[Folder]:
        """Returns the folders that hold those of machines and hosts, the local one first."""
        roots = [Folder(str(self.local))]
        if self.bucket_url is not None:
            roots.append(Folder(self.bucket_url, self.upload_timeout, UPLOAD_TIMEOUT))
        return roots

    @cached_property
    def remote(self) -> Folder | None:
        """Returns the worker's folder in the bucket."""
        if self.bucket_url is None:
            return None
        return self.roots[1].child(folder_name(self.worker, in_bucket=True))

    def check_bucket(self) -> None:
        """Tries an upload. Raises InputError if it fails for good."""
        try:
            if self.remote is not None:
                self.remote.check_conditions()
        except FolderError as error:
            if error.final:
                raise InputError(f"--upload_to_gcs: {error}") from error
            raise

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
                for name, folder in host_folders(root.listing()).items()
                if folder.machine == worker.machine or folder.machine >= worker.machines
            ]
            for folder in (root.child(name) for name in ("", *names) if name not in own):
                if own_files(folder.files()):
                    remedy = "delete it" if overwrite else "give the same number, or delete it"
                    raise InputError(
                        f"{folder.url}: holds an extraction with another number of hosts or "
                        f"machines; {remedy}"
                    )

    def earlier(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns the URL and the metadata of a folder in each root that has any, of this worker's
        if it has. Raises InputError for those of another version."""
        found = []
        for in_bucket, root in enumerate(self.roots):
            own = root.child(folder_name(self.worker, bool(in_bucket)))
            found.append(_find_metadata(root, own))
        return [each for each in found if each is not None]

    def check_siblings(self, identity: Identity) -> None:
        """Raises InputError if other machines or hosts have stored another run here."""
        for root in self.roots:
            if (found := _find_metadata(root)) is not None:
                where, metadata = found
                difference = identity.compare(identity_of(metadata, where), shared_only=True)
                refuse_difference(where, difference)

    def remove_totals(self) -> None:
        """Deletes totals over all folders, which --overwrite makes wrong. Every host does this on
        its own disk, the first one also in the bucket."""
        for root in self.roots:
            if root.local or self.worker.host == 0:
                root.remove(AGGREGATE)


def folder_name(worker: Worker, in_bucket: bool) -> str:
    """Returns the name of the worker's folder; "" if its files are in the output folder itself."""
    if worker.hosts > 1 or in_bucket or worker.machines > 1:
        return host_name(worker.machine, worker.host, worker.hosts)
    return ""


def _find_metadata(root: Folder, *first: Folder) -> tuple[str, dict[str, Any]] | None:
    """Returns the URL and the metadata of a folder of this output that has any; None without.

    Raises InputError for that of another version.
    """
    for folder in (*first, root, *map(root.child, host_folders(root.listing()))):
        data = folder.read(METADATA, most=MOST_BYTES)
        try:
            if data is not None:
                return folder.url, parse_metadata(data, f"{folder.url}/{METADATA}")
        except DamagedError as error:
            if OTHER_VERSION in str(error):
                raise InputError(f"{error}; {VERSION_REMEDY}") from error
    return None
