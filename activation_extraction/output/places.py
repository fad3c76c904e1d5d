"""The places of a run's output, local and in a bucket, and what lies beside its own folders."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from activation_extraction.cli.errors import InputError
from activation_extraction.output.commits import AGGREGATE, part_folder
from activation_extraction.output.resume import check_output_dir, other_folders, remove_extraction
from activation_extraction.output.stores import Store, StoreError
from activation_extraction.text.workers import Worker


@dataclass(frozen=True)
class Places:
    """Where one worker's shards go: a folder below `local`, and one below `bucket_url` if given.

    local, bucket_url: the folders above those of machines and hosts. upload_timeout: how long a
    failing request to the bucket is repeated, in seconds.
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
    def roots(self) -> list[tuple[Store, bool]]:
        """The folders above those of machines and hosts, and whether each is in the bucket."""
        roots = [(Store(str(self.local)), False)]
        if self.bucket_url is not None:
            roots.append((Store(self.bucket_url, self.upload_timeout), True))
        return roots

    def open_bucket(self) -> Store | None:
        """The worker's folder in the bucket, after a trial. Raises InputError if it is refused."""
        if self.bucket_url is None:
            return None
        name = folder_name(self.worker, in_bucket=True)
        try:
            store = Store(self.bucket_url, self.upload_timeout).child(name)
            store.try_writing()
        except StoreError as error:
            if error.final:
                raise InputError(f"--upload_to_gcs: {error}") from error
            raise
        return store

    def stale_folders(self) -> list[Store]:
        """What an earlier run with another number of hosts or machines left in the output.

        Folders of other machines count only if this run has no such machine.
        """
        worker, found = self.worker, []
        hosts = [replace(worker, host=host) for host in range(worker.hosts)]
        for root, in_bucket in self.roots:
            own = {folder_name(host, in_bucket) for host in hosts}
            found += other_folders(root, worker.machine, worker.machines, own)
        return found

    def check_stale_folders(self, overwrite: bool) -> None:
        """Raises InputError if there are any, unless they are unused and to be overwritten."""
        stale = self.stale_folders()
        if stale and not overwrite:
            raise InputError(
                f"{stale[0].url}: holds an extraction by another number of hosts or machines; "
                "--overwrite replaces it"
            )
        _check_unused(stale)

    def remove_others(self) -> None:
        """--overwrite: deletes what would count twice or describe what is gone.

        Every host does so on its own disk, the first one also in the bucket.
        """
        stale = self.stale_folders()
        _check_unused(stale)
        for folder in stale:
            if folder.local or self.worker.host == 0:
                remove_extraction(folder)
        for root, _ in self.roots:
            if root.local or self.worker.host == 0:
                root.remove(AGGREGATE)


def folder_name(worker: Worker, in_bucket: bool) -> str:
    """Name of the worker's folder; "" where its files lie in the output's folder itself."""
    if worker.hosts > 1 or in_bucket or worker.machines > 1:
        return part_folder(worker.machine, worker.host, worker.hosts)
    return ""


def _check_unused(folders: Iterable[Store]) -> None:
    """Raises RunError if another process writes to one of these. In buckets nobody can tell."""
    for folder in folders:
        if "://" not in folder.url:
            check_output_dir(Path(folder.url))
