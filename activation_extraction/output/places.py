"""The places of a run's output, local and in a bucket: what lies beside its own folders."""

from collections.abc import Iterable
from pathlib import Path

from activation_extraction.cli.config import Config
from activation_extraction.cli.errors import InputError
from activation_extraction.output.commits import AGGREGATE
from activation_extraction.output.resume import check_output_dir, other_folders, remove_extraction
from activation_extraction.output.stores import Store, StoreError
from activation_extraction.run.hosts import Host


def output_roots(config: Config) -> list[tuple[Store, bool]]:
    """The folders above those of machines and hosts, and whether each is in the bucket."""
    roots = [(Store(config.output_url), False)]
    if config.bucket_url is not None:
        roots.append((Store(config.bucket_url, config.upload_timeout), True))
    return roots


def stale_folders(config: Config, host: Host) -> list[Store]:
    """What an earlier run with another number of hosts or machines left in the output.

    Of machines that this run has, too, only of this one.
    """
    found = []
    for root, in_bucket in output_roots(config):
        own = {config.folder_name(i, host.count, in_bucket) for i in range(host.count)}
        found += other_folders(root, config.machine_id, config.total_machines, own)
    return found


def check_unused(folders: Iterable[Store]) -> None:
    """Raises RunError when another process writes to one of these; of buckets nobody can tell."""
    for folder in folders:
        if "://" not in folder.url:
            check_output_dir(Path(folder.url))


def open_bucket(config: Config, host: Host) -> Store | None:
    """This host's folder in the bucket, after a trial. Raises InputError when it is refused."""
    if config.bucket_url is None:
        return None
    name = config.folder_name(host.id, host.count, in_bucket=True)
    try:
        store = Store(config.bucket_url, config.upload_timeout).child(name)
        store.try_writing()
    except StoreError as error:
        if error.final:
            raise InputError(f"--upload_to_gcs: {error}") from error
        raise
    return store


def remove_others(config: Config, host: Host) -> None:
    """--overwrite: deletes what would count twice or describe what is gone.

    Every host does so on its own disk, the first one also in the bucket.
    """
    stale = stale_folders(config, host)
    check_unused(stale)
    for folder in stale:
        if folder.local or host.id == 0:
            remove_extraction(folder)
    for root, _ in output_roots(config):
        if root.local or host.id == 0:
            root.remove(AGGREGATE)
