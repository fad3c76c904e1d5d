"""Requests that are retried for a while, unless their failure is final."""

import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

from fsspec.exceptions import FSTimeoutError

from activation_extraction.common.errors import RunError
from activation_extraction.common.log import gcsfs_listeners
from activation_extraction.store.reasons import reason_of

PATIENCE = 300.0  # seconds
LOOKING = 20.0  # seconds, for --status
UPLOAD_TIMEOUT = "--upload_timeout"  # the flag that sets it for buckets of runs
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts
BEAT = 10.0  # seconds
SLOWEST = 0.125e6  # bytes per second: 16 Mbit/s that 16 uploads share

log = logging.getLogger("extract_activations")
T = TypeVar("T")


class FolderError(RunError):
    """A folder refused a request (`final`), or kept failing until the retries were given up."""

    def __init__(self, message: str, final: bool, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.final = final


class Heartbeat:
    """Tells `beat` of progress; `last` is the time of the last one."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self.last = time.monotonic()

    def beat(self) -> None:
        self.last = time.monotonic()
        self._tell()


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
    """The result of an action that has no limit of its own, or one that is too long.

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
    """Seconds for a request that moves so many bytes; few numbers, see object_store.py."""
    return max(patience, 2 ** size.bit_length() / SLOWEST)


class Patient(ABC):
    """Sends requests to the folder `url`; see `Folder` for the rest."""

    def __init__(self, url: str, patience: float, beat: Callable[[], None], flag: str) -> None:
        self.url = url
        self.beat = beat
        self.retries = 0
        self._patience = patience
        self._flag = flag
        self._by_flag = f" ({flag})" if flag else ""
        self._opening = 0.0  # seconds that opening it took, until the first success
        self._failing = False  # whether a request has failed since the last success
        self._heard = ""  # why the file system itself has tried a request again

    @property
    @abstractmethod
    def local(self) -> bool:
        """Whether it is a folder on this machine, where it is useless to try again."""

    def _persist(
        self,
        what: str,
        action: Callable[[], T],
        size: int = 0,
        heartbeat: Heartbeat | None = None,
        waits: bool = False,
    ) -> T:
        """The result of `action`, which is retried unless its failure is final.

        size: how many bytes it moves. An action with a heartbeat ends in time by itself; any other
        has what is left of the patience, or what its bytes need on a slow line. waits: the action
        may not be left to itself, since it would undo later work if it came to its end after all.
        """

        def listen(reason: str) -> None:
            self._heard = reason
            self._say(what, reason)

        self._heard = ""
        gcsfs_listeners.append(listen)
        try:
            result = self._try(what, action, size, heartbeat, waits or self.local)
            self._failing, self._opening = False, 0.0
            return result
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

    def _try(
        self,
        what: str,
        action: Callable[[], T],
        size: int,
        heartbeat: Heartbeat | None,
        waits: bool,
    ) -> T:
        # On opening, on attempts, each since its last progress, and on the pauses between them.
        spent = self._opening
        pause, reason = FIRST_PAUSE, "no answer"
        while True:
            began = time.monotonic()
            try:
                if waits or heartbeat:
                    return action()
                return in_time(time_for(size, self._patience - spent), action)
            except FolderError:
                raise
            except Exception as error:  # whatever a file system or the network may raise
                said, final = reason_of(error)
                if not isinstance(error, FSTimeoutError):
                    reason = said
                elif self._heard:
                    reason = self._heard
                spent += time.monotonic() - max(began, heartbeat.last if heartbeat else began)
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
