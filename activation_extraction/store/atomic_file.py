"""Writes local files so that a file under its final name is complete, whatever dies meanwhile.

Nothing is written through a symbolic link: who made the folder may have put one there, which leads
to a file elsewhere.
"""

import errno
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pickle import PickleBuffer
from typing import IO, Any, TypedDict

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
WRITE_BEHIND = 32 * 2**20  # bytes after which the kernel is told to start writing to the disk


class Written(TypedDict):
    """What is known of a file that was written; `write_seconds` counts only the writing."""

    sha256: str
    bytes: int
    write_seconds: float


class _CountingFile:
    """A file to write to that keeps count of sha256, size and seconds spent writing."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._handed_over = 0
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.seconds = 0.0

    def write(self, data: bytes | PickleBuffer) -> int:
        began = time.perf_counter()
        size = self._file.write(data)
        self.sha256.update(data)
        self.size += size
        if sys.platform == "linux" and self.size - self._handed_over >= WRITE_BEHIND:
            # The kernel starts writing these bytes to the disk, so that little is left to sync at
            # the end. Each range is named only once: the second time, the kernel would drop it
            # from memory, where the upload reads it.
            new = self._handed_over, self.size - self._handed_over
            os.posix_fadvise(self._file.fileno(), *new, os.POSIX_FADV_DONTNEED)
            self._handed_over = self.size
        self.seconds += time.perf_counter() - began
        return size

    def flush(self) -> None:
        self._file.flush()


def write_atomically(
    path: Path, write: Callable[[Any], object], ready: Callable[[], None] | None = None
) -> Written:
    """Runs `write(file)` on a temporary file beside `path`, syncs it and renames it to `path`.

    ready: called just before renaming. Whenever the process or the machine dies, `path` is absent
    or whole. Raises OSError, after deleting the temporary file.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # that of a process which was killed
    with os.fdopen(os.open(temporary, NEW, 0o666), "wb") as file:
        try:
            counting = _CountingFile(file)
            write(counting)
            began = time.perf_counter()
            file.flush()
            os.fsync(file.fileno())
            if ready is not None:
                ready()
            if not _is_open_as(temporary, file):
                raise OSError(errno.ESTALE, "another process has replaced what was being written")
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except BaseException:
            if _is_open_as(temporary, file):
                temporary.unlink()
            raise
    seconds = counting.seconds + time.perf_counter() - began
    return {"sha256": counting.sha256.hexdigest(), "bytes": counting.size, "write_seconds": seconds}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_open_as(path: Path, file: IO[bytes]) -> bool:
    """Whether this is still the name of an open file. Without locks, another process may begin to
    write the same file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a whole file atomically. Raises OSError."""
    write_atomically(path, lambda file: file.write(data))


def copy_atomically(source: Path, target: Path) -> None:
    """Copies a whole file atomically. Raises OSError."""
    with open(source, "rb") as file:
        write_atomically(target, lambda copy: shutil.copyfileobj(file, copy, WRITE_BEHIND))


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file, which need not exist. Raises OSError, also for a link."""
    with os.fdopen(os.open(path, APPEND, 0o666), "a") as file:
        file.write(line + "\n")
