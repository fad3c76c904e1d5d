"""Writes local files so that a file under its final name is complete, whatever dies meanwhile.

Nothing is written through a symbolic link: who made the folder may have put one there, which leads
to a file elsewhere.
"""

import errno
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
WRITE_BEHIND = 32 * 2**20  # bytes after which the kernel is told to start writing to the disk


class AtomicFile:
    """A file that appears under its name when it is complete; until then it has another name.

    It is written, synced to the disk with `finish`, and renamed with `publish`. Whenever the
    process or the machine dies, the file is absent or whole. Leaving the context deletes what was
    not published. Methods raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._temporary.unlink(missing_ok=True)  # that of a process which was killed
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
            # the end. Each range is named only once: the second time, the kernel would drop it
            # from memory, where it may be read soon.
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
        _sync_folder(self._path.parent)

    def _is_ours(self) -> bool:
        """Whether the temporary name still is that of the open file. Without locks, another process
        may begin to write the same file."""
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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Hashed:
    """A file to write to, with the SHA-256 of what was written."""

    def __init__(self, file: AtomicFile) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        self.sha256.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        pass


def write_atomically(path: Path, write: Callable[[Any], object]) -> str:
    """Runs `write(file)`, and returns the SHA-256 of the file that it makes. Raises OSError."""
    with AtomicFile(path) as file:
        hashed = _Hashed(file)
        write(hashed)
        file.finish()
        file.publish()
    return hashed.sha256.hexdigest()


def write_bytes(path: Path, data: bytes) -> str:
    """Writes a whole file atomically, and returns its SHA-256. Raises OSError."""
    return write_atomically(path, lambda file: file.write(data))


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file, which need not exist. Raises OSError, also for a link."""
    with os.fdopen(os.open(path, APPEND, 0o666), "a") as file:
        file.write(line + "\n")
