"""Local files and folders, and what a folder of any kind answers: entries, versions and errors.

Files are written atomically, and a folder is locked so that only one process writes to it. Nothing
is written through a symbolic link, because somebody else may have put it into the folder, and it
may point to a file elsewhere.
"""

import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from activation_extraction.common.errors import InputError, RunError, reason_of

ANY = "*"  # instead of a version: replaces any version, or creates the file
CHANGED = "is another version now"
IS_A_LINK = "is a symbolic link; expected a file or folder of its own, or none"
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
# What file systems without hard links say, such as those of memory sticks and mounted buckets.
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
LOCK_ATTEMPTS, LOCK_PAUSE = 5, 0.05  # seconds


class FileEntry(NamedTuple):
    """A file in a listing.

    Attributes:
        size: Size in bytes.
        version: Version of the file, which changes with every write. None if the store has no
            versions.
    """

    size: int
    version: str | None = None


class FolderError(RunError):
    """A request to a folder failed.

    Attributes:
        final: Whether the folder refused the request, so that repeating it is useless. Otherwise
            the request kept failing until its time ran out.
    """

    def __init__(self, message: str, final: bool = True) -> None:
        super().__init__(message)
        self.final = final


class ChangedError(FolderError):
    """A file is not the version that a request was conditional on.

    After a failed write it may also be unknown whether the file was written. The caller then reads
    the file and decides.
    """

    def __init__(self, message: str = CHANGED) -> None:
        super().__init__(message, final=False)


def check_size(size: int, most: int | None) -> None:
    """Raises FolderError if a file has more than `most` bytes. None allows any size."""
    if most is not None and size > most:
        raise FolderError(f"has {size:,} bytes, expected at most {most:,}")


def write_file(path: Path, parts: Sequence[bytes | memoryview], expected: str | None = ANY) -> str:
    """Writes a whole file.

    The file has a temporary name until it is synced to the disk. So whenever the process or the
    machine dies, the file is absent or complete.

    Args:
        path: Path of the file.
        parts: Content of the file, in pieces.
        expected: Version of the file that it replaces; None if there must be no file; ANY to
            replace whatever is there.

    Returns:
        The version of the new file.

    Raises:
        ChangedError: Something else than `expected` is there.
        FolderError: A link or a pipe is there.
        OSError: The file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # a killed process may have left one
    with os.fdopen(os.open(temporary, NEW, 0o666), "wb") as file:
        try:
            write_synced(file, parts)
            standing = None
            with suppress(FileNotFoundError):
                status = os.lstat(path)
                _check_regular(status)
                standing = version_of(status)
            if expected not in (ANY, standing):
                raise ChangedError
            if not _is_at(temporary, file):
                raise OSError(errno.ESTALE, "another process has replaced what was being written")
            _give_name(temporary, path, create=expected is None)
            return version_of(os.fstat(file.fileno()))
        except FileExistsError as error:
            raise ChangedError from error
        finally:
            if _is_at(temporary, file):
                temporary.unlink()


def write_synced(file: IO[bytes], parts: Sequence[bytes | memoryview]) -> None:
    """Writes buffers to a file, one after the other, and syncs it to the disk."""
    file.writelines(parts)
    file.flush()
    os.fsync(file.fileno())


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Returns whether an open file still has the name `path`.

    On a disk without locks, another process may have begun to write a file of the same name.
    """
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _give_name(temporary: Path, path: Path, create: bool) -> None:
    """Gives a file its final name, and syncs the folder.

    Args:
        temporary: Path of the file.
        path: Its final path.
        create: Whether to raise FileExistsError if the final path exists, instead of replacing it.
    """
    try:
        (os.link if create else os.replace)(temporary, path)
    except OSError as error:
        if not create or error.errno not in NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError from error
        os.rename(temporary, path)  # the folder's lock keeps others away
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file, which is created if necessary.

    Args:
        path: Path of the file.
        line: The line, without its end.

    Raises:
        OSError: The line cannot be written, or `path` is a symbolic link.
    """
    with os.fdopen(os.open(path, APPEND, 0o666), "a") as file:
        file.write(line + "\n")


def nearest(folder: Path) -> Path:
    """Returns the folder if it exists, otherwise its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def check_output_dir(folder: Path, appended: str) -> None:
    """Checks that files can be written to a folder.

    Args:
        folder: The folder, which need not exist.
        appended: Name of the file to which lines will be appended. It may not be a symbolic link.

    Raises:
        InputError: Files cannot be written there.
        RunError: Another process is writing there.
    """
    name = f"--output_dir {folder}"
    try:
        str(folder).encode()
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{name}: is a file, expected a folder")
        tempfile.TemporaryFile(dir=nearest(folder)).close()
        if (folder / appended).is_symlink():
            raise InputError(f"{name}: {appended} {IS_A_LINK}")
        if folder.exists():
            unlock(lock_folder(folder))
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: cannot be written to: {reason_of(error)}") from error


def lock_folder(folder: Path) -> int | None:
    """Locks the folder until this process ends in any way, or the descriptor is closed.

    There are several attempts, because `check_output_dir` of another process holds the lock for a
    moment.

    Args:
        folder: The folder, which must exist.

    Returns:
        The descriptor that holds the lock; None if the file system has no locks.

    Raises:
        RunError: Another process keeps its lock. That process may be an earlier start of this run
            that is about to end, so a restart may succeed.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        for _ in range(LOCK_ATTEMPTS):
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            time.sleep(LOCK_PAUSE)
    except OSError:
        os.close(descriptor)
        return None
    os.close(descriptor)
    raise RunError(f"--output_dir {folder}: another process is writing to it")


def unlock(descriptor: int | None) -> None:
    """Releases the lock that `lock_folder` returned."""
    if descriptor is not None:
        os.close(descriptor)


class LocalFolder:
    """The folder `path`, which need not exist. Methods raise OSError and FolderError."""

    max_file_bytes: int | None = None  # no limit on the size of a file

    def __init__(self, path: Path) -> None:
        self._path = path

    def entries(self) -> dict[str, FileEntry | None]:
        """Returns the size and the version of each file by its name, and None for each folder."""
        content: dict[str, FileEntry | None] = {}
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # it was renamed or deleted in this moment
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode):
                        content[entry.name] = FileEntry(status.st_size, version_of(status))
                    elif stat.S_ISDIR(status.st_mode):
                        content[entry.name] = None
        return content

    def head(self, name: str) -> FileEntry | None:
        """Returns the size and the version of a file; None if there is no such file."""
        with suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(self._path / name)
            return FileEntry(status.st_size, version_of(status))
        return None

    def read(
        self, name: str, version: str | None, most: int | None, span: tuple[int, int] | None
    ) -> tuple[bytes, str | None] | None:
        """Reads a file.

        Args:
            name: Name of the file.
            version: Version that the file must have. None for any.
            most: Most bytes that a file may have that is read whole. None for no limit.
            span: Offsets of the first byte to read and of the byte after the last one, which may
                lie behind the end of the file. None for the whole file.

        Returns:
            The bytes and the version of the file; None if there is no such file.

        Raises:
            ChangedError: The file has another version.
            FolderError: The file is too large, or is a link or a pipe.
        """
        with suppress(FileNotFoundError, NotADirectoryError):
            _check_regular(os.stat(self._path / name))  # opening a pipe would wait
            with open(self._path / name, "rb") as file:
                status = os.fstat(file.fileno())
                if version not in (None, version_of(status)):
                    raise ChangedError
                start, stop = span or (0, status.st_size)
                if span is None:
                    check_size(status.st_size, most)
                file.seek(start)
                return file.read(stop - start), version_of(status)
        return None

    def write(self, name: str, parts: Sequence[memoryview], expected: str | None) -> str | None:
        """Writes a file, and returns its new version; see `write_file`."""
        path = self._path / name
        os.makedirs(path.parent, exist_ok=True)
        return write_file(path, parts, expected)

    def remove(self, name: str) -> None:
        """Deletes a file if it exists."""
        (self._path / name).unlink(missing_ok=True)


def version_of(status: os.stat_result) -> str:
    """Returns the version of a local file: its time of modification, inode and size.

    Two writes give two versions, because each makes a new file at another time.
    """
    return f"{status.st_mtime_ns}-{status.st_ino}-{status.st_size}"


def _check_regular(status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise FolderError(IS_A_LINK)
    if not stat.S_ISREG(status.st_mode):
        raise FolderError("is a pipe, a folder or a device, expected a regular file")
