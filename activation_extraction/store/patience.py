"""Requests that are retried for a while, unless their failure is final.

Also says why a file system refused a request, in words for the user.
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
LOOKING = 20.0  # seconds, for --status
UPLOAD_TIMEOUT = "--upload_timeout"  # the flag that sets it for buckets of runs
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts
BEAT = 10.0  # seconds
SLOWEST = 0.125e6  # bytes per second: 16 Mbit/s that 16 uploads share

T = TypeVar("T")


class FolderError(RunError):
    """A folder refused a request (`final`), or kept failing until the retries were given up."""

    def __init__(self, message: str, final: bool, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.final = final


@contextmanager
def beating(beat: Callable[[], None]) -> Iterator[None]:
    """Calls `beat` now and then inside the block, which ends in time by itself."""
    done = threading.Event()

    def work() -> None:
        while not done.wait(BEAT):
            beat()

    threading.Thread(target=work, name="beat", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def in_time(seconds: float, action: Callable[[], T]) -> T:
    """Returns the result of an action that has no limit of its own, or one that is too long.

    Raises FSTimeoutError after so many seconds; the action's thread is then left to itself.
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


def time_for(size: int, patience: float) -> float:
    """Returns the seconds for a request that moves so many bytes; see object_store.py."""
    return max(patience, 2 ** size.bit_length() / SLOWEST)


class Patient:
    """Sends requests to the folder `url`; see `Folder` for the rest."""

    local: bool  # whether it is a folder on this machine, where it is useless to try again

    def __init__(self, url: str, patience: float, beat: Callable[[], None], flag: str) -> None:
        self.url = url
        self.beat = beat
        self.retries = 0
        self._patience = patience
        self._flag = flag
        self._by_flag = f" ({flag})" if flag else ""
        self._opening = 0.0  # seconds that opening it took, until the first success
        self._failing = False  # whether a request has failed since the last success

    def _persist(
        self,
        what: str,
        action: Callable[[], T],
        size: int = 0,
        ends: bool = False,
        waits: bool = False,
    ) -> T:
        """Returns the result of `action`, which is retried unless its failure is final.

        size: how many bytes it moves. ends: the action ends in time by itself, and only silence,
        not an answer, counts as time without progress. Any other action has what is left of the
        patience, or what its bytes need on a slow line. waits: the action may not be left to
        itself, since it would undo later work if it came to its end after all.
        """
        heard = ""  # why the file system itself has tried a request again

        def listen(reason: str) -> None:
            nonlocal heard
            heard = reason
            self._say(what, reason)

        # On opening, on attempts, each since its last progress, and on the pauses between them.
        spent = self._opening
        pause, reason = FIRST_PAUSE, "no answer"
        gcsfs_listeners.append(listen)
        try:
            while True:
                began = time.monotonic()
                try:
                    if waits or ends or self.local:
                        result = action()
                    else:
                        result = in_time(time_for(size, self._patience - spent), action)
                    self._failing, self._opening = False, 0.0
                    return result
                except FolderError:
                    raise
                except Exception as error:  # whatever a file system or the network may raise
                    said, final = reason_of(error)
                    silent = isinstance(error, FSTimeoutError)
                    reason = (heard or reason) if silent else said
                    if silent or not ends or not isinstance(error, OSError):
                        spent += time.monotonic() - began
                    if final or self.local:
                        raise FolderError(f"{self.url}: {what}: {reason}", final=True) from error
                    if spent + pause > self._patience:
                        raise FolderError(
                            f"{self.url}: {what} kept failing for {spent:.0f} s{self._by_flag}: "
                            f"{reason}",
                            final=False,
                        ) from error
                self.retries += 1
                self.beat()
                self._say(what, reason)
                log.debug("%s: %s: %s; trying again in %.1f s", self.url, what, reason, pause)
                slept = pause * random.uniform(0.5, 1)
                time.sleep(slept)
                spent += slept
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            gcsfs_listeners.remove(listen)

    def _say(self, what: str, reason: str) -> None:
        """Warns about a failed request, once until something succeeds again."""
        if not self._failing:
            self._failing = True
            log.warning(
                "%s: %s failed (%s); trying again for up to %g s%s",
                *(self.url, what, f"{reason:.200}", self._patience, self._by_flag),
            )


LINK = "is a symbolic link; expected a file or folder of its own, or none"
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
LOCAL_AND_FINAL = {
    errno.ENOSPC: "the disk is full; make room first",
    errno.EDQUOT: "the disk quota is used up; make room first",
    errno.EROFS: "the file system is read-only; make it writable first",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ELOOP: LINK,
}
OTHER_SCRATCH = "set TMPDIR to a folder with room for a few shards"
# HTTP statuses after which a request may be sent again; 410 means a lost upload session.
WORTH_ANOTHER_TRY = {408, 409, 410, 416, 429}


def reason_of(error: BaseException) -> tuple[str, bool]:
    """Returns what went wrong, in words for the user, and whether it is useless to try again."""
    code = getattr(error, "code", None)
    status = int(str(code)) if str(code).isdigit() else 0
    text = one_line(error)
    if type(error).__module__.startswith("google.auth"):
        causes = {type(error).__name__, type(error.__cause__).__name__}  # metadata server: a cause
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
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):  # as of a proxy in between
        return f"the answer is not the store's ({text:.200})", False
    final = isinstance(error, ValueError | TypeError | ImportError)
    final = final or 400 <= status < 500 and status not in WORTH_ANOTHER_TRY
    return f"{text:.200}", final


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Makes a folder for downloads, for a while. Raises RunError, naming TMPDIR, if it cannot."""
    try:
        made = TemporaryDirectory()
    except OSError as error:
        raise RunError(
            f"no temporary folder can be made: {reason_of(error)[0]}",
            remedy=OTHER_SCRATCH,
        ) from error
    with made as folder:
        yield Path(folder)
