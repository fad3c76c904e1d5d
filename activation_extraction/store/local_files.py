"""Writes local files atomically, and locks a local folder so that only one process writes to it.

Nothing is written through a symbolic link, because somebody else may have put it into the folder,
and it may point to a file elsewhere.
"""

import errno
import fcntl
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.common.log import log
from activation_extraction.store.commit import METRICS
from activation_extraction.store.patience import IS_A_LINK

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
WRITE_BEHIND = 32 * 2**20  # bytes after which the kernel is asked to start writing to the disk
LOCK_ATTEMPTS, LOCK_PAUSE = 5, 0.05  # seconds
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class AtomicFile:
    """A file that has a temporary name until it is complete.

    `finish` syncs it to the disk, and `publish` gives it its final name. Whenever the process or
    the machine dies, the file is absent or complete. Leaving the context deletes a file that was
    not published. Methods raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._temporary.unlink(missing_ok=True)  # a killed process may have left one
        self._file = os.fdopen(os.open(self._temporary, NEW, 0o666), "wb", buffering=0)
        self._size = self._handed_over = 0

    def write(self, data: bytes | memoryview) -> int:
        left = memoryview(data).cast("B")
        self._size += left.nbytes
        written = left.nbytes
        while left:
            left = left[self._file.write(left) :]
        if sys.platform == "linux" and self._size - self._handed_over >= WRITE_BEHIND:
            # The kernel starts writing these bytes to the disk, so that little is left to sync at
            # the end. No range is passed twice: the second time, the kernel would drop it from its
            # cache, although it may be read soon.
            new = self._handed_over, self._size - self._handed_over
            os.posix_fadvise(self._file.fileno(), *new, os.POSIX_FADV_DONTNEED)
            self._handed_over = self._size
        return written

    def finish(self) -> None:
        os.fsync(self._file.fileno())

    def publish(self) -> None:
        if not self._is_ours():
            raise OSError(errno.ESTALE, "another process has replaced what was being written")
        os.replace(self._temporary, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _is_ours(self) -> bool:
        """Returns whether the temporary name still belongs to the open file: without locks, another
        process may have begun to write the same file."""
        try:
            return os.path.samestat(os.lstat(self._temporary), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._file:
            if self._is_ours():
                self._temporary.unlink()


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a whole file atomically. Raises OSError."""
    with AtomicFile(path) as file:
        file.write(data)
        file.finish()
        file.publish()


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file, and creates it if necessary. Raises OSError, also for a link."""
    with os.fdopen(os.open(path, APPEND, 0o666), "a") as file:
        file.write(line + "\n")


def _nearest(folder: Path) -> Path:
    """Returns the folder if it exists, or else its nearest parent that does."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def check_output_dir(folder: Path) -> None:
    """Raises InputError if files cannot be written to `folder`, which need not exist, and RunError
    if another process is writing there."""
    name = f"--output_dir {folder}"
    try:
        str(folder).encode()
        existing = _nearest(folder)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{name}: is a file, expected a folder")
        with tempfile.TemporaryFile(dir=existing):
            pass
        if (folder / METRICS).is_symlink():
            raise InputError(f"{name}: {METRICS} {IS_A_LINK}")
        if folder.exists():
            unlock(lock_folder(folder, fcntl.LOCK_SH))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"{name}: cannot be written to: {reason or one_line(error)}") from error


def check_free_disk(folder: Path, gigabytes: float) -> None:
    """Raises InputError if the disk where `folder` is or will be has too little free space."""
    free = shutil.disk_usage(_nearest(folder)).free / 1e9
    if free < gigabytes:
        raise InputError(
            f"--output_dir {folder}: its disk has {free:.1f} GB free, --min_free_gb asks for "
            f"{gigabytes:g}; make room, or choose another disk"
        )


def lock_folder(folder: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """Locks the folder until this process ends in any way, or the descriptor is closed.

    Returns the descriptor; None, after a warning, if the file system has no locks. Raises RunError
    if another process keeps its lock (`is_locked` takes one only for a moment). That process may be
    an earlier start of this run that is about to end, so it makes sense to retry.
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
    """Releases the lock that `lock_folder` returned."""
    if descriptor is not None:
        os.close(descriptor)


def is_locked(folder: Path) -> bool | None:
    """Returns whether a process on this system has locked the folder; None if unknown."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX):  # a shared lock does not disturb other checks
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return kind == fcntl.LOCK_SH
        return False
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)


def running_system() -> str:
    """Returns an id of this machine and its current boot, outside which no lock is visible."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()
