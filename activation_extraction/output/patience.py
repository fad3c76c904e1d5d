"""Requests that are sent again while they fail for no lasting reason, for as long as is allowed."""

import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fsspec.callbacks import Callback

from activation_extraction.cli.errors import RunError
from activation_extraction.cli.retries import gcsfs_listeners
from activation_extraction.output.reasons import reason_of

PATIENCE = 300.0  # seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts

log = logging.getLogger("extract_activations")
T = TypeVar("T")


class FolderError(RunError):
    """A folder refused a request (`final`), or kept failing for as long as it was tried again."""

    def __init__(self, message: str, final: bool, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.final = final


class Heartbeat(Callback):
    """fsspec calls it with every chunk that has arrived; `last` is when that was."""

    def __init__(self, beat: Callable[[], None]) -> None:
        super().__init__()
        self._beat = beat
        self.last = time.monotonic()

    def call(self, *_: Any, **__: Any) -> None:
        self.last = time.monotonic()
        self._beat()


class Patient:
    """Sends requests to the folder `url`; see `Folder` for the rest."""

    def __init__(self, url: str, patience: float, beat: Callable[[], None]) -> None:
        self.url = url
        self.beat = beat
        self.retries = 0
        self._patience = patience
        self._failing = False  # since something last succeeded

    @property
    def local(self) -> bool:
        """Whether it is a folder of this machine, where trying again is useless."""
        raise NotImplementedError

    def _persist(self, what: str, action: Callable[[], T], heartbeat: Heartbeat | None = None) -> T:
        """The result of `action`, tried again while it fails for no lasting reason."""

        def listen(reason: str) -> None:
            self._say(what, reason)

        gcsfs_listeners.append(listen)
        try:
            result = self._try(what, action, heartbeat)
            self._failing = False
            return result
        finally:
            gcsfs_listeners.remove(listen)

    def _say(self, what: str, reason: str) -> None:
        """Warns of a request that failed; only once until something succeeds."""
        if not self._failing:
            self._failing = True
            log.warning(
                "%s: %s fails (%s); trying again for up to %g s (--upload_timeout)",
                *(self.url, what, f"{reason:.200}", self._patience),
            )

    def _try(self, what: str, action: Callable[[], T], heartbeat: Heartbeat | None) -> T:
        spent = 0.0  # on attempts, each from its last progress on, and on pauses between them
        pause = FIRST_PAUSE
        while True:
            began = time.monotonic()
            try:
                return action()
            except FolderError:
                raise
            except Exception as error:  # whatever a file system or the network may raise
                reason, final = reason_of(error)
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
