"""The folders of a whole run, local and in a bucket: this host's own, its siblings', and those that
an earlier run with other numbers of machines or hosts has left.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from activation_extraction.cli.config import Config
from activation_extraction.cli.errors import InputError
from activation_extraction.output.folder import Folder, FolderError
from activation_extraction.output.folder_lock import check_output_dir
from activation_extraction.output.identity import Identity
from activation_extraction.output.metadata import (
    AGGREGATE,
    METADATA,
    identity_of,
    own_files,
    remove_extraction,
)
from activation_extraction.output.paths import host_folders
from activation_extraction.output.resume import check_version, refuse_difference
from activation_extraction.output.sealed_json import DamagedError, unseal


def output_roots(config: Config) -> list[tuple[Folder, bool]]:
    """The folders above those of machines and hosts, and whether each is in the bucket."""
    roots = [(Folder(config.output_url), False)]
    if config.bucket_url is not None:
        roots.append((Folder(config.bucket_url, config.upload_timeout), True))
    return roots


def find_metadata(root: Folder) -> tuple[str, dict[str, Any]] | None:
    """The metadata of any one host in this output, and its folder; None when there is none."""
    for folder in (root, *map(root.child, host_folders(root.folders()))):
        data = folder.read(METADATA)
        try:
            if data is not None:
                return folder.url, unseal(data, folder.url)
        except DamagedError:  # --verify reports it
            continue
    return None


def check_siblings(root: Folder, identity: Identity) -> None:
    """Raises InputError when other machines or hosts have stored another run here."""
    found = find_metadata(root)
    if found is not None:
        where, metadata = found
        check_version(where, metadata)
        refuse_difference(where, identity.compare_shared(identity_of(metadata, where)))


def stale_folders(config: Config, host: int, hosts: int) -> list[Folder]:
    """What an earlier run with another number of hosts or machines left in the output.

    Folders of machines that this run has too are left to those machines, but for this machine's.
    """
    found = []
    for root, in_bucket in output_roots(config):
        own = {config.folder_name(each, hosts, in_bucket) for each in range(hosts)}
        found += _other_folders(root, config.machine_id, config.total_machines, own)
    return found


def _other_folders(root: Folder, machine: int, machines: int, own: set[str]) -> list[Folder]:
    """Folders of `machine` with another number of hosts, and of machines that are too many.

    Beside `own`, the folders of this run ("" is the root itself), their samples would count twice.
    """
    named = host_folders(root.folders()).items()
    stale = [name for name, at in named if at.machine == machine or at.machine >= machines]
    folders = [root.child(name) for name in ("", *stale) if name not in own]
    return [folder for folder in folders if own_files(folder.files())]


def check_unused(folders: Iterable[Folder]) -> None:
    """Raises InputError when another process writes to a local one; a bucket cannot be locked."""
    for folder in folders:
        if "://" not in folder.url:
            check_output_dir(Path(folder.url))


def open_bucket(config: Config, host: int, hosts: int, beat: Callable[[], None]) -> Folder | None:
    """This host's folder in the bucket, after a trial. Raises InputError when it is refused.

    beat: called whenever an upload has moved.
    """
    if config.bucket_url is None:
        return None
    name = config.folder_name(host, hosts, in_bucket=True)
    try:
        folder = Folder(config.bucket_url, config.upload_timeout, beat).child(name)
        folder.try_writing()
    except FolderError as error:
        if error.final:
            raise InputError(f"--upload_to_gcs: {error}") from error
        raise
    return folder


def remove_others(config: Config, host: int, hosts: int) -> None:
    """--overwrite: deletes what would count twice, or describe what is gone.

    Every host does so on its own disk, the first one also in the bucket.
    """
    stale = stale_folders(config, host, hosts)
    check_unused(stale)
    for folder in stale:
        if folder.local or host == 0:
            remove_extraction(folder)
    for root, _ in output_roots(config):
        if root.local or host == 0:
            root.remove(AGGREGATE)
