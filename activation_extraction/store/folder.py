"""A folder of files: local, in a bucket, or at any other URL that fsspec knows.

It lists, reads, deletes and writes files, says which request failed and why, and repeats those that
may be repeated. A write can be conditional: it creates a file, or replaces a certain version of it.
This module does not know what the files mean.
"""

import os
import random
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fsspec.core import url_to_fs
from obstore import Bytes

from activation_extraction.common.errors import InputError, one_line, reason_of
from activation_extraction.common.log import log
from activation_extraction.common.visible import plain_url
from activation_extraction.store.answers import Meaning, meaning_of
from activation_extraction.store.bucket import MIN_BYTES_PER_SECOND, Bucket
from activation_extraction.store.bucket_kinds import BUCKET_KINDS
from activation_extraction.store.local_files import (
    ANY,
    ChangedError,
    FileEntry,
    FolderError,
    LocalFolder,
    check_size,
)
from activation_extraction.store.sending import Patience, watched

__all__ = ["ANY", "ChangedError", "FileEntry", "Folder", "FolderError"]
PATIENCE = 300.0  # seconds
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0  # seconds between attempts
UPLOAD_TIMEOUT = "--upload_timeout"  # the flag that sets the patience for a run's bucket
T = TypeVar("T")
# gcsfs would ask Google over gRPC for the type of every bucket, and wait minutes for an emulator.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


class ForeignFolder:
    """The folder at a URL that fsspec knows, which can be read but not written.

    `LocalFolder` describes the methods. They may raise any exception.
    """

    largest = None

    def __init__(self, url: str) -> None:
        gcs_options: dict[str, Any] = {"requests_timeout": 120}  # seconds
        if "STORAGE_EMULATOR_HOST" in os.environ:
            gcs_options["token"] = "anon"
        options = gcs_options if url.startswith(("gs://", "gcs://")) else {}
        self._fs, path = url_to_fs(url, **options)
        self._url, self._path = plain_url(url), path.rstrip("/")

    def entries(self) -> dict[str, FileEntry | None]:
        self._fs.invalidate_cache()
        try:
            listing = self._fs.ls(self._path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        entries: dict[str, FileEntry | None] = {}
        for info in listing:
            name = str(info["name"]).rstrip("/").rpartition("/")[2]
            entries[name] = FileEntry(int(info["size"])) if info["type"] == "file" else None
        return entries

    def head(self, name: str) -> FileEntry | None:
        with suppress(FileNotFoundError):
            return FileEntry(int(self._fs.info(f"{self._path}/{name}")["size"]))
        return None

    def read(
        self, name: str, version: str | None, most: int | None, span: tuple[int, int] | None
    ) -> tuple[bytes, str | None] | None:
        if most is not None and (entry := self.head(name)) is not None:
            check_size(entry.size, most)
        start, stop = span or (None, None)
        # The hub's file system would read ahead, again for every range.
        no_cache = {"cache_type": "none"} if "hf" in self._fs.protocol else {}
        with suppress(FileNotFoundError):
            path = f"{self._path}/{name}"
            return self._fs.cat_file(path, start=start, end=stop, **no_cache), None
        return None

    def write(self, name: str, *_: Any) -> NoReturn:
        expected = "expected a local folder, gs://, s3:// or az://"
        raise InputError(f"{self._url}: {name} cannot be written there; {expected}")

    remove = write


class Folder:
    """A folder. Its methods raise FolderError, and may be called from several threads.

    Args:
        url: The URL or the path of the folder.
        patience: Seconds for which a request is retried after its first failure, and for which a
            write to a bucket may make no progress (sending.py).
        flag: The flag that sets the patience, for messages.

    Attributes:
        given: The URL as it was given.
        url: The URL without its secrets, which is the one to print and to store.
        local: Whether the folder is on this machine.
        retries: The number of failed attempts so far.
    """

    def __init__(self, url: str, patience: float = PATIENCE, flag: str = "") -> None:
        self.given = url.rstrip("/")
        self.url = plain_url(self.given)
        self.patience, self._flag = patience, flag
        self.by_flag = f" ({flag})" if flag else ""
        self.retries = 0
        self._failing = False  # whether a request has failed since the last success
        scheme, separator, _ = self.given.partition("://")
        self.local = not separator or scheme in ("file", "local")
        try:
            self._files = self._open(scheme)
        except Exception as error:  # some file systems connect here, and raise any exception
            raise FolderError(f"{self.url}: {one_line(error)}") from error

    def _open(self, scheme: str) -> LocalFolder | Bucket | ForeignFolder:
        if self.local:
            return LocalFolder(Path(os.path.abspath(local_path(self.given) or "/")))
        return (
            Bucket(self.given, self.patience)
            if scheme in BUCKET_KINDS
            else ForeignFolder(self.given)
        )

    def child(self, name: str) -> "Folder":
        """Returns the folder `name` inside this one; "" means this one."""
        if not name:
            return self
        return type(self)(f"{self.given}/{name}", self.patience, self._flag)

    @property
    def largest(self) -> int | None:
        """The largest size in bytes of a file that can be written; None if there is no limit."""
        return self._files.largest

    def listing(self) -> dict[str, FileEntry | None]:
        """Lists the folder, sorted by name.

        Returns:
            The size and the version of each file by its name, and None for each folder in this one.
            Empty if this folder does not exist.

        Raises:
            FolderError: The request failed.
        """
        return dict(sorted(self._retry("listing", self._files.entries).items()))

    def files(self) -> dict[str, int]:
        """Returns the sizes in bytes of the files in the folder, by name."""
        return {name: entry.size for name, entry in self.listing().items() if entry is not None}

    def head(self, name: str) -> FileEntry | None:
        """Returns the size and the version of a file; None if there is no such file."""
        return self._retry(f"reading {name}", lambda: self._files.head(name))

    def read(
        self, name: str, *, version: str | None = None, most: int | None = None
    ) -> bytes | None:
        """Reads a whole file.

        Args:
            name: Name of the file.
            version: Version of the file to read. None for the current one.
            most: Most bytes that the file may have. None for no limit.

        Returns:
            The content; None if there is no such file.

        Raises:
            ChangedError: The file has another version now.
            FolderError: The request failed, or the file has more than `most` bytes, which is found
                before it is read.
        """
        answer = self.read_with_version(name, version, most)
        return answer and answer[0]

    def read_with_version(
        self, name: str, version: str | None = None, most: int | None = None
    ) -> tuple[bytes, str | None] | None:
        """Reads a whole file and its version.

        Args:
            name: Name of the file.
            version: Version of the file to read. None for the current one.
            most: Most bytes that the file may have. None for no limit.

        Returns:
            The content, and the version or None if the store has no versions. None instead of both
            if there is no such file.

        Raises:
            ChangedError: The file has another version now.
            FolderError: The request failed, or the file has more than `most` bytes, which is found
                before it is read.
        """
        answer = self._read(name, version, most, None)
        return answer and (bytes(answer[0]), answer[1])

    def read_range(
        self, name: str, start: int, stop: int, version: str | None = None
    ) -> Bytes | bytes | None:
        """Reads a range of bytes of a file.

        Args:
            name: Name of the file.
            start: Offset of the first byte.
            stop: Offset of the byte after the last one. Fewer bytes are returned if the file ends
                before it.
            version: Version of the file to read. None for the current one.

        Returns:
            The bytes, which are not copied if a bucket sent them; None if there is no such file.

        Raises:
            ChangedError: The file has another version now.
            FolderError: The request failed.
        """
        if stop <= start:
            return b""
        answer = self._read(name, version, None, (start, stop))
        return answer and answer[0]

    def _read(self, name: str, *how: Any) -> tuple[Bytes | bytes, str | None] | None:
        return self._retry(f"reading {name}", lambda: self._files.read(name, *how))

    def patience_for(self, parts: bytes | Sequence[Any]) -> Patience:
        """Returns the time that a write may take from now on, including all retries.

        Args:
            parts: Content of the file that is written.
        """
        size = sum(view.nbytes for view in _views(parts))
        return Patience(self.patience, size / MIN_BYTES_PER_SECOND)

    def write(
        self,
        name: str,
        parts: bytes | Sequence[Any],
        expected: str | None,
        patience: Patience | None = None,
    ) -> str | None:
        """Writes a whole file.

        Without ANY there is one attempt.

        Args:
            name: The name of the file.
            parts: The content: bytes, or buffers, one after the other.
            expected: The version to replace; None if there must be no file, so that it is created;
                ANY to replace whatever is there.
            patience: The time that is left for the write; None if this is the first attempt.

        Returns:
            The version of the file; None where the store has no versions.

        Raises:
            ChangedError: Something else is there, or it cannot be known whether the file was
                written. Not raised with ANY.
        """
        views, files = _views(parts), self._files
        left = patience or self.patience_for(parts)

        def send() -> str | None:
            return files.write(name, views, expected)

        def attempt() -> str | None:
            return watched(send, left, f"{self.url}: writing {name}")

        action = attempt if isinstance(files, Bucket) else send
        return self._retry(f"writing {name}", action, once=expected != ANY, patience=left)

    def remove(self, name: str) -> None:
        """Deletes a file if it exists, and repeats the request until it is answered.

        Only for a name that is never used again: a repeated request may arrive twice, and late.
        """
        self._retry(f"deleting {name}", lambda: self._files.remove(name))

    def remove_once(self, name: str) -> bool:
        """Deletes a file if it exists, by one request that is never sent again.

        Returns:
            Whether the file is gone. If not, it is unknown whether the store will still delete it.
        """
        try:
            self._retry(f"deleting {name}", lambda: self._files.remove(name), once=True)
        except ChangedError:
            return self.head(name) is None
        return True

    def check_conditions(self) -> None:
        """Checks that the store obeys conditions on writes, with a tiny file that it then deletes.

        In a store that ignores the conditions, two processes could write the same file.

        Raises:
            InputError: The store ignores the conditions, or a read of a file returns another
                version than its write did, so that a condition on the version would always fail.
            FolderError: A request failed.
        """
        name = f".write_test_{uuid.uuid4().hex[:8]}"
        first = self.write(name, b"1", ANY)
        try:
            second = self.write(name, b"two", ANY)
            content = self.read_with_version(name)
            if content is not None and content[1] != second:
                raise InputError(
                    f"{self.url}: {name} has one ETag where it is written and another one where "
                    "it is read; expected a store in which they are the same, as in Google Cloud "
                    "Storage, S3 and Azure"
                )
            for expected in (None, first):
                with suppress(ChangedError):
                    self._retry(f"writing {name}", partial(self._files.write, name, [], expected))
                    raise InputError(
                        f"{self.url}: a second write of {name} was not refused: the store ignores "
                        "If-None-Match or If-Match; expected one that obeys them, as Google Cloud "
                        "Storage, S3 and Azure do"
                    )
        except (InputError, FolderError) as error:
            if not isinstance(error, FolderError) or error.final:  # the store still answers
                with suppress(Exception):  # the first failure is the one to report
                    self._files.remove(name)
            raise
        if not self.remove_once(name):
            log.warning("%s/%s: may be left; it was a test of the store; delete it", self.url, name)

    def _retry(
        self,
        request: str,
        action: Callable[[], T],
        once: bool = False,
        patience: Patience | None = None,
    ) -> T:
        """Calls `action`, again after each failure that may pass, and returns its result.

        The first failure since the last success is a warning in the log; later ones are debug
        messages, so that an outage does not flood the log.

        Args:
            request: The name of the request, for messages.
            action: One attempt.
            once: Whether a failure that may pass raises ChangedError at once.
            patience: The time for all attempts; None to let it begin with the first failure.

        Raises:
            ChangedError: The file is not the version that the request is conditional on, or, with
                `once`, the only attempt failed.
            FolderError: A failure is final, or no time is left.
        """
        attempts = Attempts(self, request, patience)
        while True:
            try:
                answer = action()
            except (InputError, MemoryError):
                raise
            except Exception as error:  # a file system or the network may raise any exception
                failure = error if isinstance(error, FolderError) else failure_of(error)
                message = f"{self.url}: {request}: {failure}"
                if isinstance(failure, ChangedError):
                    raise ChangedError(message) from error
                if failure.final or self.local:  # trying again is useless on this machine
                    raise FolderError(message) from error
                self.retries += 1
                again = f"trying again for up to {self.patience:g} s{self.by_flag}"
                next_step = "looking at what is there now" if once else again
                level = log.debug if self._failing else log.warning
                level("%s: %s failed (%s); %s", self.url, request, f"{failure!s:.200}", next_step)
                self._failing = True
                if once:
                    raise ChangedError(message) from error
                attempts.failed(failure)
            else:
                self._failing = False
                return answer


class Attempts:
    """The attempts at one request to a folder.

    Args:
        folder: The folder.
        request: The name of the request, for messages.
        patience: The time that they may take; None to let the folder's patience begin with the
            first failure, so that a long transfer which fails at its end is tried again.
    """

    def __init__(self, folder: Folder, request: str, patience: Patience | None = None) -> None:
        self._folder = folder
        self._request = request
        self._patience = patience
        self._pause = FIRST_PAUSE

    def failed(self, reason: object) -> None:
        """Waits before the next attempt, longer each time.

        Args:
            reason: The reason why the last attempt failed, for the message.

        Raises:
            FolderError: No time is left for another attempt.
        """
        folder, now = self._folder, time.monotonic()
        self._patience = patience = self._patience or Patience(folder.patience)
        if now + self._pause > patience.end:
            raise FolderError(
                f"{folder.url}: {self._request} kept failing for {now - patience.began:.0f} s"
                f"{folder.by_flag}: {reason}",
                final=False,
            )
        time.sleep(self._pause * random.uniform(0.5, 1))
        self._pause = min(2 * self._pause, MAX_PAUSE)


class SourceFolder(Folder):
    """A folder of input files, such as a model, which is read through fsspec even in a bucket."""

    def _open(self, scheme: str) -> LocalFolder | Bucket | ForeignFolder:
        return ForeignFolder(self.given)


def _views(parts: bytes | Sequence[Any]) -> list[memoryview]:
    """Returns the bytes of buffers, without empty ones."""
    buffers: Sequence[Any] = [parts] if isinstance(parts, bytes) else parts
    return [memoryview(part).cast("B") for part in buffers if memoryview(part).nbytes]


def local_path(url: str) -> str:
    """Returns the path of a folder on this machine, given as a URL or as a path."""
    return url.removeprefix("file://").removeprefix("local://")


def failure_of(error: Exception) -> FolderError:
    """Returns an exception of a file system as a FolderError.

    The error is final if a second attempt would fail in the same way.
    """
    code = str(getattr(error, "code", ""))
    status = int(code) if code.isdigit() else 0
    reason = f"{one_line(error) if status else reason_of(error):.200}"
    if status == 401:
        reason = f"the credentials are missing, invalid or have expired ({reason})"
    hopeless = FileNotFoundError | PermissionError | ValueError | TypeError | ImportError
    forbidden = reason.startswith("Forbidden")  # how gcsfs reports status 403
    refused = status != 0 and meaning_of(status) is not Meaning.MAY_PASS
    return FolderError(reason, isinstance(error, hopeless) or forbidden or refused)
