"""The lock on a local folder: only one process at a time writes to it."""

import fcntl
import logging
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path

from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.store.metadata import METRICS
from activation_extraction.store.reasons import LINK

LOCK_ATTEMPTS, LOCK_PAUSE = 5, 0.05  # seconds
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger("extract_activations")


def check_output_dir(folder: Path) -> None:
    """Raises InputError if files cannot be written to `folder`, which need not exist, and RunError
    if another process is writing there."""
    name = f"--output_dir {folder}"
    try:
        str(folder).encode()
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{name}: is a file, expected a folder")
        with tempfile.TemporaryFile(dir=existing):
            pass
        if (folder / METRICS).is_symlink():
            raise InputError(f"{name}: {METRICS} {LINK}")
        if folder.exists():
            unlock(lock_folder(folder, fcntl.LOCK_SH))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"{name}: cannot be written to: {reason or one_line(error)}") from error


def check_free_disk(folder: Path, gigabytes: float) -> None:
    """Raises InputError if less than this is free on the disk where `folder` is or will be."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    if free < gigabytes:
        raise InputError(
            f"--output_dir {folder}: its disk has {free:.1f} GB free, --min_free_gb asks for "
            f"{gigabytes:g}; make room, or choose another disk"
        )


def lock_folder(folder: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """Locks the folder until this process ends, however it ends, or the descriptor is closed.

    Returns the descriptor; None, after a warning, if the file system has no locks. Raises RunError
    if another process keeps a lock (`is_locked` takes one only for a moment). That
    process may be an earlier start of this run that is about to end, so a retry makes sense.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    for attempt in range(LOCK_ATTEMPTS):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError as error:
            if attempt == LOCK_ATTEMPTS - 1:
                os.close(descriptor)
                message = f"--output_dir {folder}: another process is writing to it"
                raise RunError(message) from error
            time.sleep(LOCK_PAUSE)
        except OSError as error:  # a file system without locks
            os.close(descriptor)
            if kind == fcntl.LOCK_EX:
                log.warning(
                    "%s: its file system has no locks (%s), so nothing prevents two processes from "
                    "writing there; see to it that only one does",
                    *(folder, error.strerror),
                )
            return None
    raise AssertionError


def unlock(descriptor: int | None) -> None:
    """Gives up what `lock_folder` returned."""
    if descriptor is not None:
        os.close(descriptor)


def is_locked(folder: Path) -> bool | None:
    """Whether a process on this system has a lock on the folder; None if that cannot be known."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):  # the first does not disturb others that check
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
    """An id that differs between machines and boots: a lock is visible only within one of them."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()
