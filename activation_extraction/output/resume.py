"""Where a run stands when it starts: what is stored already, whether it is the same run's, and what
is still to be uploaded. Only reads; every refusal is found here, before anything expensive.
"""

import fcntl
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from activation_extraction.cli.errors import InputError, RunError, one_line
from activation_extraction.output.commits import (
    ANEW,
    FORMAT_VERSION,
    MAY_TURN_ON,
    METADATA,
    PART_PREFIX,
    READERS,
    Commit,
    DamagedError,
    Stored,
    own_files,
    part_folders,
    unseal,
)
from activation_extraction.output.stores import Store

OPTIONS = "give the same as before, another place, or --overwrite to start anew"
LOCK_ATTEMPTS, LOCK_PAUSE = 5, 0.05  # seconds
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Of the identity: may differ between the folders of one run.
PER_HOST = ("machine", "host", "num_hosts", *MAY_TURN_ON)


@dataclass(frozen=True)
class Beginning:
    """Shards 1, 2, ... that are stored and stay; `waiting`: numbers of those the bucket lacks.

    complete: nothing is left to compute; settled: nor to upload or to write down. skipped_rows: of
    a complete extraction, those after its last sample included.
    """

    commits: list[Commit] = field(default_factory=list)
    waiting: frozenset[int] = frozenset()
    complete: bool = False
    settled: bool = False
    skipped_rows: int = 0


def take_up(
    local: Stored,
    remote: Stored | None,
    places: tuple[str, str],
    identity: Mapping[str, Any],
    max_samples: int | None,
) -> Beginning:
    """Compares what is stored, here and in the bucket (None without upload), with the request.

    places: what to call the two. Raises InputError when the stored is another run's, damaged or has
    gaps: then nothing may be added to it.
    """
    both = [local] if remote is None else [local, remote]
    for place, stored in zip(places, both, strict=False):
        _check_identity(place, stored, identity)
    chosen: list[Commit] = []
    waiting: set[int] = set()
    numbers = sorted({number for stored in both for number in stored.commits})
    for number in numbers:
        if number != len(chosen) + 1:
            raise InputError(
                f"{places[len(both) - 1]}: shard {len(chosen) + 1} is missing and shard {number} "
                "is there; --repair makes it again"
            )
        commit, uploaded = _choose(number, local, remote, places)
        chosen.append(commit)
        if remote is not None and not uploaded:
            waiting.add(number)
    count = sum(commit.count for commit in chosen)
    if max_samples is not None and count > max_samples:
        raise InputError(
            f"--max_samples: {count} samples are stored in {places[len(both) - 1]}, this would "
            f"keep {max_samples}; {OPTIONS}"
        )
    complete = [_complete(stored, count, max_samples) for stored in both]
    if any(complete):
        settled = complete[-1] and not waiting
        told = (stored.metadata for stored, done in zip(both, complete, strict=True) if done)
        skipped = max(metadata.get("skipped_rows", 0) for metadata in told if metadata is not None)
        return Beginning(chosen, frozenset(waiting), True, settled, skipped)
    if chosen and chosen[-1].partial:
        waiting.discard(chosen.pop().number)
    return Beginning(chosen, frozenset(waiting))


def _check_identity(place: str, stored: Stored, identity: Mapping[str, Any]) -> None:
    for why in stored.damaged.values():
        raise InputError(f"{why}; {ANEW}")
    if stored.metadata is None:
        if any(name.startswith("shard_") for name in own_files(stored.files)):
            raise InputError(
                f"{place}: already holds shards, without {METADATA}; --repair makes it again; or "
                f"{OPTIONS}"
            )
        return
    check_same_run(place, stored, identity)


def check_same_run(place: str, stored: Stored, identity: Mapping[str, Any]) -> None:
    """Raises InputError when a folder, which has its metadata, holds anything of another run."""
    assert stored.metadata is not None
    _check_version(place, stored.metadata)
    compare_identities(place, stored.metadata["identity"], identity)
    for commit in stored.commits.values():
        if commit.run != stored.run:
            raise InputError(f"{place}: {commit.name} belongs to another run; {OPTIONS}")


def _check_version(place: str, metadata: Mapping[str, Any]) -> None:
    """Raises InputError where records of another form would be added to those that are stored."""
    found = metadata.get("format_version")
    if found != FORMAT_VERSION:
        raise InputError(
            f"{place}: holds an extraction in format {found}, and this program writes format "
            f"{FORMAT_VERSION}: continue it with the version that began it, give another place, or "
            "--overwrite to start anew"
        )


def compare_identities(place: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises InputError with the first field that differs and was not just turned on."""
    for name in [*wanted, *found]:
        turned_on = name in MAY_TURN_ON and wanted.get(name)
        if found.get(name) != wanted.get(name) and not turned_on:
            before, now = _short(found.get(name)), _short(wanted.get(name))
            raise InputError(
                f"{place}: already holds an extraction with another {name}: "
                f"{before}, now {now}; {OPTIONS}"
            )


def _short(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"digest {text[:12]}" if re.fullmatch("[0-9a-f]{64}", text) else f"{text:.100}"


def _choose(
    number: int, local: Stored, remote: Stored | None, places: tuple[str, str]
) -> tuple[Commit, bool]:
    """The valid commit of a shard, and whether it is the bucket's; one with more samples wins."""
    candidates = [
        (stored.commits[number], stored is remote)
        for stored in (remote, local)
        if stored is not None and number in stored.commits and stored.has(stored.commits[number])
    ]
    if candidates:
        return max(candidates, key=lambda candidate: (not candidate[0].partial, candidate[0].count))
    commit = local.commits.get(number)
    if commit is not None and commit.file not in local.files:
        moved = (local.metadata or {}).get("remote")
        if remote is None and moved is not None:
            raise InputError(
                f"{places[0]}: {commit.file} was uploaded to {moved}; to continue, give "
                "--upload_to_gcs, --gcs_bucket and --gcs_prefix as before"
            )
        if remote is not None and moved is not None:
            raise InputError(
                f"{places[1]}: {commit.file} is not there, and was deleted here after its upload "
                f"to {moved}; {OPTIONS}"
            )
    place = places[0] if remote is None or number not in remote.commits else places[1]
    raise InputError(
        f"{place}: shard {number} has a JSON, but its file is missing or of another size "
        "(--verify tells more); --repair makes it again"
    )


def _complete(stored: Stored, samples: int, max_samples: int | None) -> bool:
    told = stored.metadata or {}
    asked = ("complete", max_samples, samples)
    return (told.get("status"), told.get("max_samples"), told.get("samples")) == asked


def check_output_dir(folder: Path) -> None:
    """Raises InputError unless files can be written to `folder`, which need not exist, and RunError
    when another process does so."""
    name = f"--output_dir {folder}"
    try:
        str(folder).encode()
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{name}: is a file, expected a folder")
        with tempfile.TemporaryFile(dir=existing):
            pass
        if folder.exists():
            os.close(lock_folder(folder, fcntl.LOCK_SH))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"{name}: cannot be written to: {reason or one_line(error)}") from error


def check_free_disk(folder: Path, gigabytes: float) -> None:
    """Raises InputError when less than this is free where `folder` is, or will be."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    if free < gigabytes:
        raise InputError(
            f"--output_dir {folder}: {free:.1f} GB are free there, --min_free_gb is {gigabytes:g}"
        )


def lock_folder(folder: Path, kind: int = fcntl.LOCK_EX) -> int:
    """A lock on the folder that ends with this process, however it ends, or with its descriptor.

    Raises RunError when another process keeps one (`is_locked` takes it for a moment): it may be an
    earlier start of this run that is just ending, so it is right to try again later.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    for attempt in range(LOCK_ATTEMPTS):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if attempt == LOCK_ATTEMPTS - 1:
                os.close(descriptor)
                message = f"--output_dir {folder}: another process is writing to it"
                raise RunError(message) from error
            time.sleep(LOCK_PAUSE)
        except OSError:  # a file system without locks
            break
    return descriptor


def is_locked(folder: Path) -> bool | None:
    """Whether a process of this system has a lock on the folder; None where nobody can tell."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):  # the first does not disturb others who look
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return kind == fcntl.LOCK_SH
        return False
    except OSError:  # as in lock_folder
        return None
    finally:
        os.close(descriptor)


def running_system() -> str:
    """Differs between machines, and after a restart: locks are seen within one system."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def other_folders(root: Store, machine: int, machines: int, own: set[str]) -> list[Store]:
    """Folders of `machine` with another number of hosts, and of machines that are too many.

    Beside `own`, the folders of this run ("" is the root itself), their samples would count twice.
    """
    names = re.compile(rf"{PART_PREFIX}(\d+)(_host_\d+)?")
    found = filter(None, map(names.fullmatch, part_folders(root)))
    stale = [name[0] for name in found if int(name[1]) == machine or int(name[1]) >= machines]
    candidates = ["", *stale]
    stores = [root.child(name) for name in candidates if name not in own]
    return [store for store in stores if own_files(store.files())]


def find_metadata(root: Store) -> tuple[str, dict[str, Any]] | None:
    """Some host's metadata in this output, and where it is; None when there is none."""
    for store in (root, *map(root.child, part_folders(root))):
        data = store.read(METADATA)
        try:
            if data is not None:
                return store.url, unseal(data, store.url)
        except DamagedError:  # for --verify to tell
            continue
    return None


def check_siblings(root: Store, identity: Mapping[str, Any]) -> None:
    """Raises InputError when what other machines and hosts stored here is not of the same run."""
    found = find_metadata(root)
    if found is not None:
        where, metadata = found
        _check_version(where, metadata)
        theirs = metadata.get("identity", {})
        ours = {**identity, **{key: theirs[key] for key in PER_HOST if key in theirs}}
        compare_identities(where, theirs, ours)


def remove_extraction(store: Store) -> None:
    """Deletes the metadata, metrics, commits and shards in a folder, in this order, no other file.

    What is left when it is killed cannot be continued: shards without metadata are refused.
    """
    names = own_files(store.files())
    groups = (
        [name for name in names if "shard_" not in name],
        [name for name in names if "shard_" in name and ".json" in name],
        [name for name in names if "shard_" in name and ".json" not in name],
    )
    with ThreadPoolExecutor(READERS) as pool:
        for group in groups:
            list(pool.map(store.remove, group))
