"""What the requests to every kind of folder share: how they fail, and how long they are retried.

`Retrying` repeats a request until it succeeds, is refused for good, or the patience is used up.
`reason_of` explains to the user why a file system refused something.
"""

import errno
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.common.log import log

PATIENCE = 300.0  # seconds
STATUS_PATIENCE = 20.0  # seconds, for --status
UPLOAD_TIMEOUT = "--upload_timeout"  # the flag that sets the patience for a run's bucket
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0  # seconds between attempts
HEARTBEAT = 10.0  # seconds
MIN_BYTES_PER_SECOND = 0.125e6  # 16 uploads that share 16 Mbit/s

T = TypeVar("T")


class Anything(Enum):
    """`ANY`, in the place of a version, is whatever stands there, or nothing."""

    ANY = "any"


ANY = Anything.ANY
CHANGED, GONE = "is another version now", "no longer exists"


@dataclass(frozen=True)
class FileEntry:
    """A file in a listing. version: changes with every write; None if the store has no versions."""

    size: int
    version: str | None = None


class FolderError(RunError):
    """A folder refused a request (`final`), or requests kept failing until time ran out."""

    def __init__(self, message: str, final: bool, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.final = final


class ChangedError(FolderError):
    """A file is not the version that a request was conditional on."""


class UnsureError(FolderError):
    """It cannot be known whether a file was written: only reading it back can tell."""


class RequestError(Exception):
    """A single request failed. final: whether it is useless to send it again; changed: because the
    file is another version."""

    def __init__(self, reason: str, final: bool = True, changed: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.final, self.changed = reason, final, changed


def check_size(size: int, most: int | None) -> None:
    """Raises RequestError if a file is larger than it may be; `most` is in bytes, None: any size.

    Files of a run that are read whole have a size that their kind never exceeds.
    """
    if most is not None and size > most:
        raise RequestError(f"has {size:,} bytes, expected at most {most:,}")


@contextmanager
def heartbeat(on_progress: Callable[[], None]) -> Iterator[None]:
    """Calls `on_progress` regularly while the block runs, which must have a time limit."""
    done = threading.Event()

    def work() -> None:
        while not done.wait(HEARTBEAT):
            on_progress()

    threading.Thread(target=work, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def timeout_for(size: int, patience: float) -> float:
    """Returns the time limit, in seconds, of a request that moves `size` bytes.

    A timeout begins with the request and ignores how much of its body has been moved, so it cannot
    tell a slow line from a silent server. So each request gets the patience, or the time that its
    bytes need on a slow line, whichever is longer.
    """
    return max(patience, 2 ** size.bit_length() / MIN_BYTES_PER_SECOND)


class Retrying:
    """Sends requests to the folder `url`, and retries them. `Folder` describes the arguments."""

    local: bool  # whether the folder is on this machine

    def __init__(
        self, url: str, patience: float, on_progress: Callable[[], None], flag: str
    ) -> None:
        self.url = url
        self.on_progress = on_progress
        self.retries = 0
        self.patience = patience
        self._flag = flag
        self.by_flag = f" ({flag})" if flag else ""
        self._failing = False  # whether a request has failed since the last success

    def _retry(self, request: str, action: Callable[[], T]) -> T:
        """Returns the result of `action`, which is retried unless its failure is final.

        request: names it in messages.
        """
        attempts = Attempts(self, request)
        while True:
            try:
                return self._attempt(request, action)
            except RequestError as error:
                attempts.failed(error.reason)
                again = f"trying again for up to {self.patience:g} s{self.by_flag}"
                self._note(request, error.reason, again)
            attempts.pause()

    def _attempt(self, request: str, action: Callable[[], T]) -> T:
        """Returns the result of `action`. Raises RequestError if it is worth another attempt, and
        FolderError, which names the request, if it is not."""
        try:
            result = action()
        except (FolderError, InputError, MemoryError):
            raise
        except Exception as error:  # a file system or the network may raise any exception
            failure = error if isinstance(error, RequestError) else RequestError(*reason_of(error))
            cause = error.__cause__ or error
            message = f"{self.url}: {request}: {failure.reason}"
            if failure.changed:
                raise ChangedError(message, final=False) from cause
            if failure.final or self.local:  # trying again is useless on this machine
                raise FolderError(message, final=True) from cause
            raise failure from cause
        self._failing = False
        return result

    def _note(self, request: str, reason: str, next_step: str) -> None:
        """Counts a failed attempt, and warns about it, but only once until a request succeeds."""
        self.retries += 1
        self.on_progress()
        level = log.debug if self._failing else log.warning
        level("%s: %s failed (%s); %s", self.url, request, f"{reason:.200}", next_step)
        self._failing = True


class Attempts:
    """The attempts at one request to a folder. The folder's patience counts from the first failure,
    so that a long transfer which fails at its end is tried again."""

    def __init__(self, folder: Retrying, request: str) -> None:
        self._folder, self._request = folder, request
        self._first_failure: float | None = None
        self._pause = FIRST_PAUSE

    def failed(self, reason: str) -> None:
        """Raises FolderError if there is no patience left for another attempt."""
        now, folder = time.monotonic(), self._folder
        if self._first_failure is None:
            self._first_failure = now
        spent = now - self._first_failure
        if spent + self._pause > folder.patience:
            raise FolderError(
                f"{folder.url}: {self._request} kept failing for {spent:.0f} s{folder.by_flag}: "
                f"{reason}",
                final=False,
            )

    def pause(self) -> None:
        """Waits before the next attempt, longer each time."""
        self._folder.on_progress()
        time.sleep(self._pause * random.uniform(0.5, 1))
        self._pause = min(2 * self._pause, MAX_PAUSE)


IS_A_LINK = "is a symbolic link; expected a file or folder of its own, or none"
LOCAL_AND_FINAL = {
    errno.ENOSPC: "the disk is full; make room first",
    errno.EDQUOT: "the disk quota is used up; make room first",
    errno.EROFS: "the file system is read-only; make it writable first",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ELOOP: IS_A_LINK,
}
RETRYABLE_STATUSES = {408, 409, 425, 429}  # of those from 400 to 499


def is_final(status: int) -> bool:
    """Returns whether a request that got this HTTP status would fail again."""
    return 400 <= status < 500 and status not in RETRYABLE_STATUSES


def reason_of(error: BaseException) -> tuple[str, bool]:
    """Explains to the user what went wrong, and returns whether it is useless to try again."""
    code = getattr(error, "code", None)
    status = int(str(code)) if str(code).isdigit() else 0
    text = one_line(error)
    if status == 401:
        return f"the credentials are missing, invalid or have expired ({text:.200})", True
    if status == 403 or text.startswith("Forbidden"):  # so gcsfs says it
        return f"permission denied ({text:.200})", True
    if isinstance(error, OSError) and error.errno in LOCAL_AND_FINAL:
        return LOCAL_AND_FINAL[error.errno], True
    if isinstance(error, OSError) and error.strerror and status == 0:
        text = error.strerror
    if isinstance(error, FileNotFoundError):
        return f"not found ({text:.200})", True
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):  # a proxy's page, for example
        return f"the answer is not the store's ({text:.200})", False
    final = isinstance(error, ValueError | TypeError | ImportError)
    return f"{text:.200}", final or is_final(status)
