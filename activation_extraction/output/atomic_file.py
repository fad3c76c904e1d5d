"""Writes local files so that a file under its final name is complete, whatever dies meanwhile."""

import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pickle import PickleBuffer
from typing import IO, Any, TypedDict

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
    path: Path, write: Callable[[Any], object], outdated: Path | None = None
) -> Written:
    """Runs `write(file)` on a temporary file beside `path`, syncs it and renames it to `path`.

    outdated: a file to delete just before renaming, if it exists. Whenever the process or the
    machine dies, `path` is absent or whole. Raises OSError, after deleting the temporary file.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            counting = _CountingFile(file)
            write(counting)
            began = time.perf_counter()
            file.flush()
            os.fsync(file.fileno())
        if outdated is not None:
            outdated.unlink(missing_ok=True)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    seconds = counting.seconds + time.perf_counter() - began
    return {"sha256": counting.sha256.hexdigest(), "bytes": counting.size, "write_seconds": seconds}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a whole file atomically. Raises OSError."""
    write_atomically(path, lambda file: file.write(data))
