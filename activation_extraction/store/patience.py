"""Requests that are retried for a while, unless their failure is final."""

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from fsspec.callbacks import Callback
from fsspec.exceptions import FSTimeoutError

from activation_extraction.common.errors import RunError
from activation_extraction.common.retries import gcsfs_listeners
from activation_extraction.store.reasons import reason_of

PATIENCE = 300.0  # seconds
LOOKING = 20.0  # seconds, for --status
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts

log = logging.getLogger("extract_activations")
T = TypeVar("T")


class FolderError(RunError):
    """A folder refused a request (`final`), or kept failing until the retries were given up."""

    def __init__(self, message: str, final: bool, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.final = final


class Heartbeat(Callback):
    """fsspec calls this for every chunk that has arrived; `last` is the time of the last one."""

    def __init__(self, beat: Callable[[], None]) -> None:
        super().__init__()
        self._beat = beat
        self.last = time.monotonic()

    def call(self, *_: Any, **__: Any) -> None:
        self.last = time.monotonic()
        self._beat()


def end_requests(file_system: Any, seconds: float) -> None:
    """gcsfs tries each request again by itself, for minutes if nobody answers: no longer."""
    request = type(file_system)._request

    async def within(*arguments: Any, **options: Any) -> Any:
        return await asyncio.wait_for(request(file_system, *arguments, **options), seconds)

    file_system._request = within


class Patient(ABC):
    """Sends requests to the folder `url`; see `Folder` for the rest."""

    def __init__(self, url: str, patience: float, beat: Callable[[], None]) -> None:
        self.url = url
        self.beat = beat
        self.retries = 0
        self._patience = patience
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
            self._failing = False
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
        spent = 0.0  # on attempts, each since its last progress, and on the pauses between them
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
