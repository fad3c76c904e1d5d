"""Reads and writes files on this machine, and locks folders.

A file is written atomically: it is absent or complete, whenever the process or the machine dies. A
locked folder can be written by one process only. Nothing is written through a symbolic link,
because it may point to a file elsewhere, and somebody else may have put it into the folder.

The module also declares what folders of all kinds share: the types `FileEntry`, `FolderError` and
`ChangedError`, and the constant ANY, which stands for any version of a file. folder.py repeats
failed requests and chooses the kind of a folder.
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

ANY = "*"  # `expected` of a write that creates the file or replaces any version of it
CHANGED = "is another version now"
IS_A_LINK = "is a symbolic link; expected a file or folder of its own, or none"
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
# Error numbers of file systems without hard links, such as memory sticks and mounted buckets.
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
LOCK_ATTEMPTS = 5
LOCK_PAUSE = 0.05  # seconds between two attempts to lock a folder


class FileEntry(NamedTuple):
    """A file in a listing.

    Attributes:
        byte_count: Size of the file in bytes.
        version: Version of the file, which changes with every write. None if the store has no
            versions.
    """

    byte_count: int
    version: str | None = None


class FolderError(RunError):
    """A request to a folder failed.

    Attributes:
        is_permanent: Whether the same request would fail again. If False, the request failed for a
            temporary reason, such as a lost connection.
    """

    def __init__(self, message: str, is_permanent: bool = True) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent


class ChangedError(FolderError):
    """Raised if a file does not have the version that a request requires.

    A conditional write also raises ChangedError if its answer was lost, so that it is unknown
    whether the file was written. After a ChangedError, the caller reads the file to find out.
    """

    def __init__(self, message: str = CHANGED) -> None:
        super().__init__(message, is_permanent=False)


def check_size(num_file_bytes: int, max_bytes: int | None) -> None:
    """Raises FolderError if a file is larger than allowed.

    Args:
        num_file_bytes: Size of the file in bytes.
        max_bytes: Largest allowed size in bytes; None to allow any size.

    Raises:
        FolderError: If the file is larger.
    """
    if max_bytes is not None and num_file_bytes > max_bytes:
        raise FolderError(f"has {num_file_bytes:,} bytes, expected at most {max_bytes:,}")


def write_file(
    path: Path, buffers: Sequence[bytes | memoryview], expected: str | None = ANY
) -> str:
    """Creates a file, or replaces its whole content.

    The new file has a temporary name until it is synced to the disk. So whenever the process or the
    machine dies, `path` is the whole new file, or the old file if there was one.

    Args:
        path: Path of the file.
        buffers: Content of the file, as consecutive buffers.
        expected: Version of the file that is replaced. None to create the file, which then must not
            exist. ANY to create or replace it without a condition.

    Returns:
        The version of the new file.

    Raises:
        ChangedError: If the file has another version than `expected`.
        FolderError: If the path is a symbolic link, a folder, a pipe or a device.
        OSError: If the file cannot be written.
    """
    temporary_path = path.with_name(f".{path.name}.tmp")
    temporary_path.unlink(missing_ok=True)  # a killed process may have left a temporary file
    with os.fdopen(os.open(temporary_path, NEW, 0o666), "wb") as temporary_file:
        try:
            write_synced(temporary_file, buffers)
            current_version = None
            with suppress(FileNotFoundError):
                file_status = os.lstat(path)
                _check_regular(file_status)
                current_version = version_of(file_status)
            if expected not in (ANY, current_version):
                raise ChangedError
            if not _is_at(temporary_path, temporary_file):
                raise OSError(errno.ESTALE, "another process has replaced what was being written")
            _give_name(temporary_path, path, create=expected is None)
            return version_of(os.fstat(temporary_file.fileno()))
        except FileExistsError as error:
            raise ChangedError from error
        finally:
            if _is_at(temporary_path, temporary_file):
                temporary_path.unlink()


def write_synced(file: IO[bytes], buffers: Sequence[bytes | memoryview]) -> None:
    """Writes consecutive buffers to an open file, and waits until the disk has stored them."""
    file.writelines(buffers)
    file.flush()
    os.fsync(file.fileno())


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Returns whether a path still leads to the file that was opened at this path.

    The path may lead to another file by now: on a file system without locks, another process may
    have begun to write a file of the same name.
    """
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _give_name(temporary_path: Path, path: Path, create: bool) -> None:
    """Gives a file its final name, and syncs the folder to the disk.

    Args:
        temporary_path: Current path of the file, in the same folder.
        path: Final path of the file.
        create: Whether the final path must not exist. Otherwise, a file at this path is replaced.

    Raises:
        FileExistsError: If `create` is True, and the final path exists.
    """
    try:
        if create:
            os.link(temporary_path, path)
        else:
            os.replace(temporary_path, path)
    except OSError as error:
        if not create or error.errno not in NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError from error
        # Another process could create the file after the check that it does not exist and before
        # this rename, but the lock of the folder prevents that.
        os.rename(temporary_path, path)
    folder_descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder_descriptor)
    finally:
        os.close(folder_descriptor)


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file, which is created if it does not exist.

    Args:
        path: Path of the file.
        line: Line without a line break at its end.

    Raises:
        OSError: If the line cannot be written, or `path` is a symbolic link.
    """
    with os.fdopen(os.open(path, APPEND, 0o666), "a") as appended_file:
        appended_file.write(line + "\n")


def nearest(folder: Path) -> Path:
    """Returns a folder if it exists, otherwise its nearest parent that exists."""
    return next(
        candidate_path
        for candidate_path in (folder, *folder.absolute().parents)
        if candidate_path.exists()
    )


def check_output_dir(folder: Path, appended: str) -> None:
    """Checks that files can be written to a folder.

    Args:
        folder: Folder, which need not exist.
        appended: Name of the file in the folder to which lines will be appended. It must not be a
            symbolic link.

    Raises:
        InputError: If files cannot be written to the folder.
        RunError: If another process has locked the folder.
    """
    flag_and_folder = f"--output_dir {folder}"
    try:
        str(folder).encode()
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{flag_and_folder}: is a file, expected a folder")
        tempfile.TemporaryFile(dir=nearest(folder)).close()
        if (folder / appended).is_symlink():
            raise InputError(f"{flag_and_folder}: {appended} {IS_A_LINK}")
        if folder.exists():
            unlock(lock_folder(folder))
    except (OSError, ValueError) as error:
        raise InputError(f"{flag_and_folder}: cannot be written to: {reason_of(error)}") from error


def lock_folder(folder: Path) -> int | None:
    """Locks a folder until the returned descriptor is closed or this process ends.

    The lock is tried several times, because `check_output_dir` of another process holds the lock
    for a moment.

    Args:
        folder: Folder, which must exist.

    Returns:
        The file descriptor that holds the lock; None if the file system has no locks.

    Raises:
        RunError: If another process holds the lock. It may be an earlier process of this run that
            is about to end, so a restart may succeed.
    """
    lock_descriptor = os.open(folder, os.O_RDONLY)
    try:
        for _ in range(LOCK_ATTEMPTS):
            with suppress(BlockingIOError):
                fcntl.flock(lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock_descriptor
            time.sleep(LOCK_PAUSE)
    except OSError:
        os.close(lock_descriptor)
        return None
    os.close(lock_descriptor)
    raise RunError(f"--output_dir {folder}: another process is writing to it")


def unlock(descriptor: int | None) -> None:
    """Releases the lock of a folder.

    Args:
        descriptor: The file descriptor that `lock_folder` returned. None if the file system has no
            locks, so that there is nothing to release.
    """
    if descriptor is not None:
        os.close(descriptor)


class LocalFolder:
    """A folder on this machine. Its methods raise OSError and FolderError.

    `Bucket` (bucket.py), `HubFolder` (hub_folder.py) and `ForeignFolder` (folder.py) have the same
    methods.

    Args:
        path: Path of the folder, which need not exist.

    Attributes:
        max_file_bytes: Largest size in bytes of a file that can be written to the folder. None,
            because a local folder has no such limit.
    """

    max_file_bytes: int | None = None

    def __init__(self, path: Path) -> None:
        self._folder_path = path

    def entries(self) -> dict[str, FileEntry | None]:
        """Lists the folder.

        Returns:
            A dict from the name of each file to its size and version, and from the name of each
            folder inside this folder to None. It is empty if this folder does not exist.
        """
        entry_by_name: dict[str, FileEntry | None] = {}
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(self._folder_path) as dir_entries,
        ):
            for dir_entry in dir_entries:
                # The file may have been renamed or deleted since the folder was listed.
                with suppress(FileNotFoundError):
                    file_status = dir_entry.stat()
                    if stat.S_ISREG(file_status.st_mode):
                        entry_by_name[dir_entry.name] = FileEntry(
                            file_status.st_size, version_of(file_status)
                        )
                    elif stat.S_ISDIR(file_status.st_mode):
                        entry_by_name[dir_entry.name] = None
        return entry_by_name

    def head(self, name: str) -> FileEntry | None:
        """Returns the size and version of a file; None if there is no such file."""
        with suppress(FileNotFoundError, NotADirectoryError):
            file_status = os.stat(self._folder_path / name)
            return FileEntry(file_status.st_size, version_of(file_status))
        return None

    def read(
        self,
        name: str,
        version: str | None,
        max_bytes: int | None,
        byte_range: tuple[int, int] | None,
    ) -> tuple[bytes, str | None] | None:
        """Reads a whole file or a range of its bytes.

        Args:
            name: Name of the file.
            version: Version that the file must have. None for any version.
            max_bytes: Largest allowed size of the file in bytes, which is checked if the whole file
                is read. None for no limit.
            byte_range: Offsets of the first byte to read and of the byte after the last one, which
                may lie behind the end of the file. None to read the whole file.

        Returns:
            A tuple of the bytes and the version of the file, or None if there is no such file.

        Raises:
            ChangedError: If the file has another version.
            FolderError: If the file is too large, or is a folder, a pipe or a device.
        """
        with suppress(FileNotFoundError, NotADirectoryError):
            _check_regular(os.stat(self._folder_path / name))  # opening a named pipe would block
            with open(self._folder_path / name, "rb") as open_file:
                file_status = os.fstat(open_file.fileno())
                if version not in (None, version_of(file_status)):
                    raise ChangedError
                start_byte, stop_byte = byte_range or (0, file_status.st_size)
                if byte_range is None:
                    check_size(file_status.st_size, max_bytes)
                open_file.seek(start_byte)
                return open_file.read(stop_byte - start_byte), version_of(file_status)
        return None

    def write(self, name: str, buffers: Sequence[memoryview], expected: str | None) -> str | None:
        """Creates a file, or replaces its whole content.

        Args:
            name: Name of the file.
            buffers: Content of the file, as consecutive buffers.
            expected: Version of the file that is replaced. None to create the file, which then must
                not exist. ANY to create or replace it without a condition.

        Returns:
            The new version of the file; None if the store of the folder keeps no versions.

        Raises:
            ChangedError: If the file has another version than `expected`.
        """
        file_path = self._folder_path / name
        os.makedirs(file_path.parent, exist_ok=True)
        return write_file(file_path, buffers, expected)

    def remove(self, name: str) -> None:
        """Deletes a file if it exists."""
        (self._folder_path / name).unlink(missing_ok=True)


def version_of(file_status: os.stat_result) -> str:
    """Returns the version of a local file: its modification time in ns, inode and size in bytes.

    Every write results in another version, because it makes a new file at another time.
    """
    return f"{file_status.st_mtime_ns}-{file_status.st_ino}-{file_status.st_size}"


def _check_regular(file_status: os.stat_result) -> None:
    """Raises FolderError if a status belongs to anything but a regular file.

    Symbolic links, folders, pipes and devices are no regular files.

    Args:
        file_status: Status of the file, as os.stat or os.lstat returns it.
    """
    if stat.S_ISLNK(file_status.st_mode):
        raise FolderError(IS_A_LINK)
    if not stat.S_ISREG(file_status.st_mode):
        raise FolderError("is a pipe, a folder or a device, expected a regular file")
