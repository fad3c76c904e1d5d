"""Requests that are retried for a while, unless their failure is final."""

import asyncio
import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from fsspec.exceptions import FSTimeoutError

from activation_extraction.common.errors import RunError
from activation_extraction.common.retries import gcsfs_listeners
from activation_extraction.store.reasons import reason_of

PATIENCE = 300.0  # seconds
LOOKING = 20.0  # seconds, for --status
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts
BEAT = 10.0  # seconds

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
    """The result of an action that has no limit of its own, such as a search for credentials.

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


def end_requests(file_system: Any, seconds: float) -> None:
    """gcsfs and s3fs try each request again for minutes if nobody answers: no longer.

    gcsfs renews its credentials before a request, and can do nothing else meanwhile.
    """
    name = "_call_s3" if hasattr(file_system, "_call_s3") else "_request"
    request = getattr(type(file_system), name)

    async def within(*arguments: Any, **options: Any) -> Any:
        most = None if "Body" in options else seconds  # s3fs uploads 50 MB in one request
        return await asyncio.wait_for(request(file_system, *arguments, **options), most)

    setattr(file_system, name, within)
    if credentials := getattr(file_system, "credentials", None):
        renew = partial(type(credentials).maybe_refresh, credentials)
        credentials.maybe_refresh = lambda *given: in_time(seconds, partial(renew, *given))


class Patient(ABC):
    """Sends requests to the folder `url`; see `Folder` for the rest."""

    def __init__(self, url: str, patience: float, beat: Callable[[], None]) -> None:
        self.url = url
        self.beat = beat
        self.retries = 0
        self._patience = patience
        self._opening = 0.0  # seconds that opening it took, until the first success
        self._failing = False  # whether a request has failed since the last success
        self._heard = ""  # why the file system itself has tried a request again

    @property
    @abstractmethod
    def local(self) -> bool:
        """Whether it is a folder on this machine, where it is useless to try again."""

    def _persist(self, what: str, action: Callable[[], T], heartbeat: Heartbeat | None = None) -> T:
        """The result of `action`, which is retried unless its failure is final."""

        def listen(reason: str) -> None:
            self._heard = reason
            self._say(what, reason)

        self._heard = ""
        gcsfs_listeners.append(listen)
        try:
            result = self._try(what, action, heartbeat)
            self._failing, self._opening = False, 0.0
            return result
        finally:
            gcsfs_listeners.remove(listen)

    def _say(self, what: str, reason: str) -> None:
        """Warns about a failed request, once until something succeeds again."""
        if not self._failing:
            self._failing = True
            log.warning(
                "%s: %s failed (%s); trying again for up to %g s (--upload_timeout)",
                *(self.url, what, f"{reason:.200}", self._patience),
            )

    def _try(self, what: str, action: Callable[[], T], heartbeat: Heartbeat | None) -> T:
        # On opening, on attempts, each since its last progress, and on the pauses between them.
        spent = self._opening
        pause = FIRST_PAUSE
        while True:
            began = time.monotonic()
            try:
                return action()
            except FolderError:
                raise
            except Exception as error:  # whatever a file system or the network may raise
                reason, final = reason_of(error)
                if isinstance(error, FSTimeoutError):
                    reason = self._heard or "no answer"
                spent += time.monotonic() - max(began, heartbeat.last if heartbeat else began)
                if final or self.local:
                    raise FolderError(f"{self.url}: {what}: {reason}", final=True) from error
                if spent + pause > self._patience:
                    raise FolderError(
                        f"{self.url}: {what} kept failing for {spent:.0f} s "
                        f"(--upload_timeout): {reason}",
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
