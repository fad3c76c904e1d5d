"""Why a file system refused a request, in words for the user."""

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from activation_extraction.common.errors import RunError, one_line

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
    """What went wrong, in words for the user, and whether it is useless to try again."""
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
    """A folder for downloads. Raises RunError, naming TMPDIR, if none can be made."""
    try:
        made = TemporaryDirectory()
    except OSError as error:
        raise RunError(
            f"no temporary folder can be made: {reason_of(error)[0]}",
            remedy=OTHER_SCRATCH,
        ) from error
    with made as folder:
        yield Path(folder)
