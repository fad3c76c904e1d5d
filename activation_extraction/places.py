"""The places of a run's output, local and in a bucket: what lies beside its own folders."""

from activation_extraction.commits import AGGREGATE
from activation_extraction.config import Config
from activation_extraction.errors import InputError
from activation_extraction.hosts import Host
from activation_extraction.resume import other_folders, remove_extraction
from activation_extraction.stores import Store, StoreError


def output_roots(config: Config) -> list[tuple[Store, bool]]:
    """The folders above those of machines and hosts, and whether each is in the bucket."""
    roots = [(Store(config.output_url), False)]
    if config.bucket_url is not None:
        roots.append((Store(config.bucket_url, config.upload_timeout), True))
    return roots


def stale_folders(config: Config, host: Host) -> list[Store]:
    """What an earlier run of this machine, with other hosts or machines, left in the output."""
    found = []
    for root, in_bucket in output_roots(config):
        own = {config.folder_name(i, host.count, in_bucket) for i in range(host.count)}
        found += other_folders(root, config.machine_id, own)
    return found


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
    """--overwrite: deletes what would count twice or describe what is gone."""
    for folder in stale_folders(config, host):
        remove_extraction(folder)
    for root, _ in output_roots(config):
        root.remove(AGGREGATE)
