"""Retries failing requests to a folder for a while, unless the failure is final.

It also explains to the user why a file system refused a request.
"""

import errno
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from fsspec.exceptions import FSTimeoutError

from activation_extraction.common.errors import RunError, one_line
from activation_extraction.common.log import gcsfs_listeners, log

PATIENCE = 300.0  # seconds
STATUS_PATIENCE = 20.0  # seconds, for --status
UPLOAD_TIMEOUT = "--upload_timeout"  # the flag that sets the patience for a run's bucket
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0  # seconds between attempts
HEARTBEAT = 10.0  # seconds
MIN_BYTES_PER_SECOND = 0.125e6  # 16 uploads that share 16 Mbit/s

T = TypeVar("T")


class FolderError(RunError):
    """A folder refused a request (`final`), or requests kept failing until time ran out."""

    def __init__(self, message: str, final: bool, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.final = final


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


def with_timeout(seconds: float, action: Callable[[], T]) -> T:
    """Returns the result of an action, which need not have a time limit of its own.

    Raises FSTimeoutError when the time is up; the action then goes on in an abandoned thread.
    """
    result: Future[T] = Future()

    def act() -> None:
        try:
            result.set_result(action())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=act, daemon=True).start()
    if not wait([result], seconds).done:
        raise FSTimeoutError
    return result.result()


def timeout_for(size: int, patience: float) -> float:
    """Returns the time limit, in seconds, of a request for `size` bytes; see object_store.py."""
    return max(patience, 2 ** size.bit_length() / MIN_BYTES_PER_SECOND)


class Retrying:
    """Sends requests to the folder `url`, and retries them. `Folder` describes the arguments."""

    local: bool  # whether the folder is on this machine, where retrying is useless

    def __init__(
        self, url: str, patience: float, on_progress: Callable[[], None], flag: str
    ) -> None:
        self.url = url
        self.on_progress = on_progress
        self.retries = 0
        self._patience = patience
        self._flag = flag
        self._by_flag = f" ({flag})" if flag else ""
        self._opening = 0.0  # seconds that opening it took; 0 after the first success
        self._failing = False  # whether a request has failed since the last success

    def _retry(
        self,
        request: str,
        action: Callable[[], T],
        size: int = 0,
        has_timeout: bool = False,
        must_finish: bool = False,
    ) -> T:
        """Returns the result of `action`, which is retried unless its failure is final.

        request: names it in messages. size: how many bytes it moves. has_timeout: the action limits
        its own time, and only silence, not an answer, counts as time without progress. Any other
        action gets the remaining patience, or the time that its bytes need on a slow line.
        must_finish: the action may not be abandoned, because it would undo later work if it
        succeeded after all.
        """
        inner_reason = ""  # why the file system retried the request by itself

        def listen(reason: str) -> None:
            nonlocal inner_reason
            inner_reason = reason
            self._warn(request, reason)

        # Counts opening, attempts, each since its last progress, and the pauses between them.
        spent = self._opening
        pause, reason = FIRST_PAUSE, "no answer"
        gcsfs_listeners.append(listen)
        try:
            while True:
                began = time.monotonic()
                try:
                    if must_finish or has_timeout or self.local:
                        result = action()
                    else:
                        result = with_timeout(timeout_for(size, self._patience - spent), action)
                    self._failing, self._opening = False, 0.0
                    return result
                except FolderError:
                    raise
                except Exception as error:  # a file system or the network may raise any exception
                    error_reason, final = reason_of(error)
                    silent = isinstance(error, FSTimeoutError)
                    reason = (inner_reason or reason) if silent else error_reason
                    if silent or not has_timeout or not isinstance(error, OSError):
                        spent += time.monotonic() - began
                    if final or self.local:
                        raise FolderError(f"{self.url}: {request}: {reason}", final=True) from error
                    if spent + pause > self._patience:
                        raise FolderError(
                            f"{self.url}: {request} kept failing for {spent:.0f} s{self._by_flag}: "
                            f"{reason}",
                            final=False,
                        ) from error
                self.retries += 1
                self.on_progress()
                self._warn(request, reason)
                log.debug("%s: %s: %s; trying again in %.1f s", self.url, request, reason, pause)
                slept = pause * random.uniform(0.5, 1)
                time.sleep(slept)
                spent += slept
                pause = min(2 * pause, MAX_PAUSE)
        finally:
            gcsfs_listeners.remove(listen)

    def _warn(self, request: str, reason: str) -> None:
        """Warns about a failed request, but only once until a request succeeds again."""
        if not self._failing:
            self._failing = True
            log.warning(
                "%s: %s failed (%s); trying again for up to %g s%s",
                *(self.url, request, f"{reason:.200}", self._patience, self._by_flag),
            )


IS_A_LINK = "is a symbolic link; expected a file or folder of its own, or none"
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
LOCAL_AND_FINAL = {
    errno.ENOSPC: "the disk is full; make room first",
    errno.EDQUOT: "the disk quota is used up; make room first",
    errno.EROFS: "the file system is read-only; make it writable first",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ELOOP: IS_A_LINK,
}
SET_TMPDIR = "set TMPDIR to a folder with room for a few shards"
# HTTP statuses after which a request is worth sending again; 410 means a lost upload session.
RETRYABLE_STATUSES = {408, 409, 410, 416, 429}


def reason_of(error: BaseException) -> tuple[str, bool]:
    """Explains to the user what went wrong, and returns whether it is useless to try again."""
    code = getattr(error, "code", None)
    status = int(str(code)) if str(code).isdigit() else 0
    text = one_line(error)
    if type(error).__module__.startswith("google.auth"):
        # A TransportError of the metadata server is only the cause of the error.
        causes = {type(error).__name__, type(error.__cause__).__name__}
        final = not getattr(error, "retryable", False) and "TransportError" not in causes
        return (
            f"the credentials cannot be used or have expired ({text:.200}); renew them with "
            "`gcloud auth application-default login`, or check the service account",
            final,
        )
    if status == 401:
        return f"the credentials are missing, invalid or have expired ({text:.200})", True
    if status == 403 or text.startswith("Forbidden"):
        return f"permission denied ({text:.200}); needed: roles/storage.objectUser", True
    if isinstance(error, OSError) and error.errno in LOCAL_AND_FINAL:
        return LOCAL_AND_FINAL[error.errno], True
    if isinstance(error, OSError) and error.strerror and status == 0:
        text = error.strerror
    if isinstance(error, FileNotFoundError):
        return f"not found ({text:.200})", True
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):  # a proxy's page, for example
        return f"the answer is not the store's ({text:.200})", False
    final = isinstance(error, ValueError | TypeError | ImportError)
    final = final or 400 <= status < 500 and status not in RETRYABLE_STATUSES
    return f"{text:.200}", final


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Makes a temporary folder for downloads. Raises RunError, naming TMPDIR, if it cannot."""
    try:
        temporary = TemporaryDirectory()
    except OSError as error:
        raise RunError(
            f"no temporary folder can be made: {reason_of(error)[0]}",
            remedy=SET_TMPDIR,
        ) from error
    with temporary as folder:
        yield Path(folder)
