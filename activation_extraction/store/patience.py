"""How requests to a folder fail: why, for the user, and whether it is useless to try again."""

import errno
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from activation_extraction.common.errors import RunError, one_line

PATIENCE = 300.0  # seconds
STATUS_PATIENCE = 20.0  # seconds, for --status
UPLOAD_TIMEOUT = "--upload_timeout"  # the flag that sets the patience for a run's bucket
HEARTBEAT = 10.0  # seconds
ANY = "*"  # in the place of a version: whatever stands there, or nothing
CHANGED, EXISTS, GONE = "is another version now", "exists already", "no longer exists"


class FileEntry(NamedTuple):
    """A file in a listing. version: changes with every write; None if the store has no versions."""

    size: int
    version: str | None = None


class FolderError(RunError):
    """A folder refused a request (`final`), or requests kept failing until time ran out."""

    def __init__(self, message: str, final: bool = True) -> None:
        super().__init__(message)
        self.final = final


class ChangedError(FolderError):
    """A file is not the version that a request was conditional on. After a write, this may also be
    unknown: the caller reads what stands there, and decides."""

    def __init__(self, message: str) -> None:
        super().__init__(message, final=False)


def check_size(size: int, most: int | None) -> None:
    """Raises FolderError if a file has more than `most` bytes; None: any size will do."""
    if most is not None and size > most:
        raise FolderError(f"has {size:,} bytes, expected at most {most:,}")


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


IS_A_LINK = "is a symbolic link; expected a file or folder of its own, or none"
LOCAL_AND_FINAL = {
    errno.ENOSPC: "the disk is full; make room first",
    errno.EDQUOT: "the disk quota is used up; make room first",
    errno.EROFS: "the file system is read-only; make it writable first",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ELOOP: IS_A_LINK,
}


def is_final(status: int) -> bool:
    """Returns whether a request that got this HTTP status would fail again."""
    return 400 <= status < 500 and status not in (408, 409, 425, 429)


def reason_of(error: BaseException) -> tuple[str, bool]:
    """Explains to the user what went wrong, and returns whether it is useless to try again."""
    code = str(getattr(error, "code", ""))
    status = int(code) if code.isdigit() else 0
    text = f"{one_line(error):.200}"
    if isinstance(error, OSError) and not status:
        if error.errno in LOCAL_AND_FINAL:
            return LOCAL_AND_FINAL[error.errno], True
        text = error.strerror or text
    if status == 401:
        return f"the credentials are missing, invalid or have expired ({text})", True
    if status == 403 or text.startswith("Forbidden"):  # so gcsfs says it
        return f"permission denied ({text})", True
    if isinstance(error, FileNotFoundError):
        return f"not found ({text})", True
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):  # a proxy's page, for example
        return f"the answer is not the store's ({text})", False
    return text, isinstance(error, ValueError | TypeError | ImportError) or is_final(status)
