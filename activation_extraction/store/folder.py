"""Folder: a folder of files on this machine, in a bucket, or at another URL that fsspec supports.

A `Folder` lists, reads, writes and deletes files, and repeats failed requests if that is safe. A
write can be conditional: it creates a file or replaces a certain version of it, and otherwise
fails. The requests themselves are sent by local_files.py, bucket.py, hub_folder.py, and
`ForeignFolder` in this module. The content of the files is left to the callers.
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
from activation_extraction.store.answers import FailureKind, failure_kind_of
from activation_extraction.store.bucket import MIN_BYTES_PER_SECOND, Bucket
from activation_extraction.store.bucket_kinds import BUCKET_KINDS
from activation_extraction.store.hub_folder import HubFolder, is_repository
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
PATIENCE = 300.0  # seconds for which a request is repeated after its first failure by default
FIRST_PAUSE = 0.5  # seconds between the first two attempts at a request
MAX_PAUSE = 30.0  # largest number of seconds between two attempts at a request
# Flag that sets the seconds for which an output folder in a bucket repeats a failing request.
UPLOAD_TIMEOUT = "--upload_timeout"
T = TypeVar("T")
# Without this setting, gcsfs would ask Google over gRPC for the type of every bucket, and would
# wait minutes for the answer of an emulator.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


class ForeignFolder:
    """A folder at a URL that fsspec supports, which can be read but not written.

    The methods do the same as the methods of `LocalFolder` (local_files.py), whose docstrings
    describe them. They may raise any exception.
    """

    max_file_bytes = None

    def __init__(self, url: str) -> None:
        gcs_options: dict[str, Any] = {"requests_timeout": 120}  # the timeout is in seconds
        if "STORAGE_EMULATOR_HOST" in os.environ:
            gcs_options["token"] = "anon"
        connection_options = gcs_options if url.startswith(("gs://", "gcs://")) else {}
        self._file_system, folder_path = url_to_fs(url, **connection_options)
        self._url = plain_url(url)
        self._path = folder_path.rstrip("/")

    def entries(self) -> dict[str, FileEntry | None]:
        self._file_system.invalidate_cache()
        try:
            file_infos = self._file_system.ls(self._path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        entry_by_name: dict[str, FileEntry | None] = {}
        for file_info in file_infos:
            file_name = str(file_info["name"]).rstrip("/").rpartition("/")[2]
            is_file = file_info["type"] == "file"
            entry_by_name[file_name] = FileEntry(int(file_info["size"])) if is_file else None
        return entry_by_name

    def head(self, name: str) -> FileEntry | None:
        with suppress(FileNotFoundError):
            return FileEntry(int(self._file_system.info(f"{self._path}/{name}")["size"]))
        return None

    def read(
        self,
        name: str,
        version: str | None,
        max_bytes: int | None,
        byte_range: tuple[int, int] | None,
    ) -> tuple[bytes, str | None] | None:
        if max_bytes is not None and (file_entry := self.head(name)) is not None:
            check_size(file_entry.byte_count, max_bytes)
        start_byte, stop_byte = byte_range or (None, None)
        # Without this option, fsspec would read more bytes than each range contains if the file is
        # in a bucket of the Hugging Face hub.
        cache_options = {"cache_type": "none"} if "hf" in self._file_system.protocol else {}
        with suppress(FileNotFoundError):
            file_path = f"{self._path}/{name}"
            return self._file_system.cat_file(
                file_path, start=start_byte, end=stop_byte, **cache_options
            ), None
        return None

    def write(self, name: str, *_: Any) -> NoReturn:
        raise InputError(
            f"{self._url}: {name} cannot be written there; expected a local folder, gs://, s3:// "
            "or az://"
        )

    remove = write  # no file can be deleted either, so the same error is raised


class Folder:
    """A folder of files on this machine, in a bucket, or at another URL that fsspec supports.

    Methods may be called from several threads. Each of them raises FolderError if its request
    fails, and repeats a request that fails for a temporary reason, such as a lost connection.

    A folder in a repository on the Hugging Face hub is read from one git commit. It is the commit
    to which the revision in the URL (by default, "main") points when this object is made. The
    attributes `full_url` and `url` name this commit, so other processes that get one of these URLs
    read the same commit.

    Args:
        url: URL or local path of the folder, which need not exist.
        patience_seconds: Seconds for which a request is repeated after its first failure. A write
            to a bucket, which may take longer, fails after this time without progress.
        flag: Name of the flag that sets `patience_seconds`, for messages. "" if no flag sets it.

    Attributes:
        full_url: URL or path of the folder with any secrets that it contains. It must not be
            printed or stored.
        url: URL or path of the folder without secrets, for messages and for files.
        patience_seconds: Seconds for which a request is repeated after its first failure.
        flag_in_parentheses: Name of the flag that sets `patience_seconds`, in parentheses and after
            a space, for messages; "" without a flag.
        is_local: Whether the folder is on this machine.
        num_failed_attempts: Number of attempts, over all requests so far, that failed for a
            temporary reason, such as a lost connection.

    Raises:
        InputError: If the folder is on the hub, and its repository or revision cannot be read.
        FolderError: If the URL cannot be used, or the hub did not answer.
    """

    def __init__(self, url: str, patience_seconds: float = PATIENCE, flag: str = "") -> None:
        self.full_url = url.rstrip("/")
        self.url = plain_url(self.full_url)
        self.patience_seconds = patience_seconds
        self._patience_flag = flag  # flag that sets `patience_seconds`; "" for none
        self.flag_in_parentheses = f" ({flag})" if flag else ""
        self.num_failed_attempts = 0
        self._is_failing = False  # whether a request has failed since the last success
        scheme, separator, _ = self.full_url.partition("://")
        self.is_local = not separator or scheme in ("file", "local")
        try:
            self._backend = self._open(scheme)
        except InputError:
            raise
        except Exception as error:  # opening may connect to a server and raise any exception
            raise FolderError(f"{self.url}: {one_line(error)}") from error
        if isinstance(self._backend, HubFolder):
            self._pin(self._backend)

    def _open(self, scheme: str) -> LocalFolder | Bucket | HubFolder | ForeignFolder:
        if self.is_local:
            return LocalFolder(Path(os.path.abspath(local_path(self.full_url) or "/")))
        if scheme in BUCKET_KINDS:
            return Bucket(self.full_url, self.patience_seconds)
        return _open_foreign(self.full_url)

    def _pin(self, hub_folder: HubFolder) -> None:
        """Chooses the git commit from which this folder on the hub is read.

        Afterwards, `full_url` and `url` of this object name the commit.

        Args:
            hub_folder: Backend of this folder, which sends the requests to the hub.

        Raises:
            InputError: If the repository or its revision cannot be read.
            FolderError: If the hub did not answer.
        """
        try:
            self._retry("opening", hub_folder.pin)
        except FolderError as error:
            if error.is_permanent:
                raise InputError(str(error)) from error
            raise
        self.full_url = hub_folder.url
        self.url = plain_url(self.full_url)

    def child(self, name: str) -> "Folder":
        """Returns the folder `name` inside this folder; this folder itself if `name` is ""."""
        if not name:
            return self
        return type(self)(f"{self.full_url}/{name}", self.patience_seconds, self._patience_flag)

    @property
    def max_file_bytes(self) -> int | None:
        """The largest size of a file that can be written, in bytes; None if there is no limit."""
        return self._backend.max_file_bytes

    def listing(self) -> dict[str, FileEntry | None]:
        """Lists the folder, sorted by name.

        Returns:
            A dict from the name of each file to its size and version, and from the name of each
            folder inside this folder to None. It is empty if this folder does not exist.

        Raises:
            FolderError: If the request failed.
        """
        return dict(sorted(self._retry("listing", self._backend.entries).items()))

    def files(self) -> dict[str, int]:
        """Returns the sizes in bytes of the files in the folder, by name."""
        return {
            file_name: file_entry.byte_count
            for file_name, file_entry in self.listing().items()
            if file_entry is not None
        }

    def head(self, name: str) -> FileEntry | None:
        """Returns the size and version of a file; None if there is no such file."""
        return self._retry(f"reading {name}", lambda: self._backend.head(name))

    def read(
        self, name: str, *, version: str | None = None, max_bytes: int | None = None
    ) -> bytes | None:
        """Reads a whole file.

        Args:
            name: Name of the file.
            version: Version of the file to read. None for the current one.
            max_bytes: Largest size of the file in bytes, which is checked before the file is read.
                None for no limit.

        Returns:
            The content of the file; None if there is no such file.

        Raises:
            ChangedError: If the file has another version now.
            FolderError: If the request failed, or the file has more than `max_bytes` bytes.
        """
        content_and_version = self.read_with_version(name, version, max_bytes)
        return content_and_version and content_and_version[0]

    def read_with_version(
        self, name: str, version: str | None = None, max_bytes: int | None = None
    ) -> tuple[bytes, str | None] | None:
        """Reads a whole file and its version.

        Args:
            name: Name of the file.
            version: Version of the file to read. None for the current one.
            max_bytes: Largest size of the file in bytes, which is checked before the file is read.
                None for no limit.

        Returns:
            A tuple of the content and the version of the file, or None if there is no such file.
            The version is None if the store has no versions.

        Raises:
            ChangedError: If the file has another version now.
            FolderError: If the request failed, or the file has more than `max_bytes` bytes.
        """
        content_and_version = self._read(name, version, max_bytes, None)
        if content_and_version is None:
            return None
        file_content, current_version = content_and_version
        return bytes(file_content), current_version

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
            The bytes, as a buffer of obstore if a bucket sent them. None if there is no such file.

        Raises:
            ChangedError: If the file has another version now.
            FolderError: If the request failed.
        """
        if stop <= start:
            return b""
        content_and_version = self._read(name, version, None, (start, stop))
        return content_and_version and content_and_version[0]

    def _read(
        self,
        name: str,
        version: str | None,
        max_bytes: int | None,
        byte_range: tuple[int, int] | None,
    ) -> tuple[Bytes | bytes, str | None] | None:
        """Reads a whole file or a range of its bytes, and repeats a request that fails.

        Args:
            name: Name of the file.
            version: Version of the file to read. None for the current one.
            max_bytes: Largest allowed size of the file in bytes, which is checked if the whole file
                is read. None for no limit.
            byte_range: Offsets of the first byte to read and of the byte after the last one. None
                to read the whole file.

        Returns:
            A tuple of the bytes and the version of the file, or None if there is no such file. The
            version is None if the store has no versions.

        Raises:
            ChangedError: If the file has another version now.
            FolderError: If the request failed, or the file is too large.
        """
        return self._retry(
            f"reading {name}", lambda: self._backend.read(name, version, max_bytes, byte_range)
        )

    def patience_for(self, file_content: bytes | Sequence[Any]) -> Patience:
        """Returns the time limit of a write that begins now, for all of its attempts together.

        The larger the file, the more time a slow line gets to send it (see `Patience`).

        Args:
            file_content: Content of the file that is written, as bytes or as consecutive buffers.
        """
        num_file_bytes = sum(byte_view.nbytes for byte_view in _views(file_content))
        return Patience(self.patience_seconds, num_file_bytes / MIN_BYTES_PER_SECOND)

    def write(
        self,
        name: str,
        file_content: bytes | Sequence[Any],
        expected: str | None,
        patience: Patience | None = None,
    ) -> str | None:
        """Creates a file, or replaces its whole content.

        A conditional write (`expected` is not ANY) is sent once only. After a lost answer, a second
        attempt could not tell the first attempt from the write of another process.

        Args:
            name: Name of the file.
            file_content: Content of the file, as bytes or as consecutive buffers.
            expected: Version of the file that is replaced. None to create the file, which then must
                not exist. ANY to create or replace it without a condition.
            patience: Countdown of the seconds for the write, which has already started if the
                caller made other attempts before. None for a new countdown (see `patience_for`).

        Returns:
            The new version of the file; None if the store has no versions.

        Raises:
            ChangedError: If `expected` is not ANY, and the file has another version, or it is
                unknown whether the file was written.
            FolderError: If the write failed for another reason.
        """
        byte_views = _views(file_content)
        write_countdown = patience or self.patience_for(file_content)

        def send() -> str | None:
            return self._backend.write(name, byte_views, expected)

        def send_watched() -> str | None:
            return watched(send, write_countdown, f"{self.url}: writing {name}")

        send_request = send_watched if isinstance(self._backend, Bucket) else send
        return self._retry(
            f"writing {name}", send_request, once=expected != ANY, patience=write_countdown
        )

    def remove(self, name: str) -> None:
        """Deletes a file if it exists, and repeats a request that fails for a temporary reason.

        After a request whose answer was lost, the store may receive both this request and its
        repetition, one of them late. So the name must never be used again, because a late request
        could delete a new file.

        Raises:
            FolderError: If a request failed for a permanent reason, or all attempts failed until
                the time limit. A local folder allows one attempt.
        """
        self._retry(f"deleting {name}", lambda: self._backend.remove(name))

    def remove_once(self, name: str) -> bool:
        """Deletes a file if it exists, by one request that is not repeated if it fails.

        Returns:
            Whether the file is gone. If False, the store may still delete the file later.

        Raises:
            FolderError: If the request failed for a permanent reason, such as missing credentials.
        """
        try:
            self._retry(f"deleting {name}", lambda: self._backend.remove(name), once=True)
        except ChangedError:
            return self.head(name) is None
        return True

    def check_conditions(self) -> None:
        """Checks that the store obeys conditions on writes.

        The check writes a tiny file several times, and then deletes it. In a store that ignores the
        conditions, two processes could write the same file.

        Raises:
            InputError: If the store ignores the conditions, or a read of a file returns another
                version than its write did, so that a condition on the version would always fail.
            FolderError: If a request failed.
        """
        test_file_name = f".write_test_{uuid.uuid4().hex[:8]}"
        first_version = self.write(test_file_name, b"1", ANY)
        try:
            second_version = self.write(test_file_name, b"two", ANY)
            content_and_version = self.read_with_version(test_file_name)
            if content_and_version is not None and content_and_version[1] != second_version:
                raise InputError(
                    f"{self.url}: {test_file_name} has one ETag where it is written and another "
                    "one where it is read; expected a store in which they are the same, as in "
                    "Google Cloud Storage, S3 and Azure"
                )
            # Both expectations are wrong: the file exists, and it has the second version.
            for wrong_version in (None, first_version):
                with suppress(ChangedError):
                    write_again = partial(self._backend.write, test_file_name, [], wrong_version)
                    self._retry(f"writing {test_file_name}", write_again)
                    raise InputError(
                        f"{self.url}: a second write of {test_file_name} was not refused: the "
                        "store ignores If-None-Match or If-Match; expected one that obeys them, as "
                        "Google Cloud Storage, S3 and Azure do"
                    )
        except (InputError, FolderError) as error:
            # If the store does not answer anymore (`error.is_permanent` is False), it would not
            # answer a request to delete the file either.
            if not isinstance(error, FolderError) or error.is_permanent:
                # If the test file cannot be deleted, this exception is ignored, because the user
                # must see the first error (`error`).
                with suppress(Exception):
                    self._backend.remove(test_file_name)
            raise
        if not self.remove_once(test_file_name):
            log.warning(
                "%s/%s: this test file may not have been deleted; delete it",
                self.url,
                test_file_name,
            )

    def _retry(
        self,
        request: str,
        action: Callable[[], T],
        once: bool = False,
        patience: Patience | None = None,
    ) -> T:
        """Sends a request, repeats it after temporary failures, and returns its result.

        The first failure since the last success is logged as a warning. Later failures are logged
        as debug messages, so that an outage does not flood the log.

        Args:
            request: Name of the request, such as "reading metadata.json", for messages.
            action: Function that sends the request once and returns its result.
            once: Whether to send the request only once. If True, a temporary failure raises
                ChangedError.
            patience: Countdown of the seconds for all attempts together, which has already
                started. None for the time limit of the folder (`patience_seconds`), which starts at
                the first failure.

        Raises:
            ChangedError: If the file is not the version that the request is conditional on, or
                `once` is True and the attempt failed for a temporary reason.
            FolderError: If another attempt would fail in the same way, or no time is left for it.
        """
        request_attempts = Attempts(self, request, patience)
        while True:
            try:
                request_result = action()
            except (InputError, MemoryError):
                raise
            except Exception as error:  # a file system or the network may raise any exception
                folder_error = error if isinstance(error, FolderError) else failure_of(error)
                error_message = f"{self.url}: {request}: {folder_error}"
                if isinstance(folder_error, ChangedError):
                    raise ChangedError(error_message) from error
                # Requests to a local disk are not repeated, because they would fail again.
                if folder_error.is_permanent or self.is_local:
                    raise FolderError(error_message) from error
                self.num_failed_attempts += 1
                next_action_phrase = (
                    f"trying again for up to {self.patience_seconds:g} s{self.flag_in_parentheses}"
                )
                if once:
                    next_action_phrase = "looking at what is there now"
                log_at_level = log.debug if self._is_failing else log.warning
                shortened_error_text = f"{folder_error!s:.200}"
                log_at_level(
                    "%s: %s failed (%s); %s",
                    self.url,
                    request,
                    shortened_error_text,
                    next_action_phrase,
                )
                self._is_failing = True
                if once:
                    raise ChangedError(error_message) from error
                request_attempts.failed(folder_error)
            else:
                self._is_failing = False
                return request_result


class Attempts:
    """Counts down the time for all attempts at one request to a folder, and waits between attempts.

    Args:
        folder: Folder to which the request is sent.
        request: Name of the request, for messages.
        patience: Countdown of the time for all attempts, which is already running. None to start a
            countdown of `Folder.patience_seconds` at the first failure, so that a long transfer is
            tried again even if it fails at its end.
    """

    def __init__(self, folder: Folder, request: str, patience: Patience | None = None) -> None:
        self._folder = folder
        self._request_name = request
        # Countdown of the seconds for all attempts together. None until the first attempt has
        # failed, if the caller gave no countdown.
        self._retry_countdown = patience
        self._pause_seconds = FIRST_PAUSE

    def failed(self, reason: object) -> None:
        """Waits after a failed attempt, each time about twice as long, up to MAX_PAUSE seconds.

        Args:
            reason: Reason why the attempt failed, for the message of the FolderError.

        Raises:
            FolderError: If no time is left for another attempt.
        """
        folder = self._folder
        failure_time = time.monotonic()
        if self._retry_countdown is None:
            self._retry_countdown = Patience(folder.patience_seconds)
        if failure_time + self._pause_seconds > self._retry_countdown.deadline:
            seconds_since_countdown_start = failure_time - self._retry_countdown.start_time
            raise FolderError(
                f"{folder.url}: {self._request_name} kept failing for "
                f"{seconds_since_countdown_start:.0f} s"
                f"{folder.flag_in_parentheses}: {reason}",
                is_permanent=False,
            )
        time.sleep(self._pause_seconds * random.uniform(0.5, 1))
        self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE)


class SourceFolder(Folder):
    """A folder of input files, such as a model.

    It is read through fsspec even if it is in a bucket. Output folders in buckets use obstore.
    """

    def _open(self, scheme: str) -> LocalFolder | Bucket | HubFolder | ForeignFolder:
        return _open_foreign(self.full_url)


def _open_foreign(url: str) -> HubFolder | ForeignFolder:
    """Opens a folder that can only be read: on the hub, or at another URL that fsspec supports."""
    return HubFolder(url) if is_repository(url) else ForeignFolder(url)


def _views(file_content: bytes | Sequence[Any]) -> list[memoryview]:
    """Returns the content of a file as views of its bytes, leaving out empty buffers.

    Args:
        file_content: Content of the file, as bytes or as consecutive buffers.
    """
    buffers: Sequence[Any] = [file_content] if isinstance(file_content, bytes) else file_content
    buffer_views = [memoryview(buffer) for buffer in buffers]
    return [buffer_view.cast("B") for buffer_view in buffer_views if buffer_view.nbytes]


def local_path(url: str) -> str:
    """Returns the local path in a `file://` or `local://` URL; other strings are returned as is."""
    return url.removeprefix("file://").removeprefix("local://")


def failure_of(error: Exception) -> FolderError:
    """Converts an exception that a file system raised to a FolderError that states its reason.

    The error's attribute `is_permanent` is True if the same request would fail again in the same
    way.
    """
    error_code = str(getattr(error, "code", ""))
    http_status = int(error_code) if error_code.isdigit() else 0
    failure_reason = one_line(error) if http_status else reason_of(error)
    failure_reason = f"{failure_reason:.200}"
    if http_status == 401:
        failure_reason = f"the credentials are missing, invalid or have expired ({failure_reason})"
    permanent_error_types = (FileNotFoundError, PermissionError, ValueError, TypeError, ImportError)
    # For HTTP status 403, gcsfs raises an exception without a code, whose message begins so.
    is_access_forbidden = failure_reason.startswith("Forbidden")
    is_permanent_http_failure = (
        http_status != 0 and failure_kind_of(http_status) is not FailureKind.MAY_PASS
    )
    is_failure_permanent = (
        isinstance(error, permanent_error_types) or is_access_forbidden or is_permanent_http_failure
    )
    return FolderError(failure_reason, is_failure_permanent)
