"""A folder of files, local or in a bucket: any URL that fsspec knows.

It lists, reads, deletes and above all uploads files: it sends a finished local file again and again
until the store confirms its size and checksum, or refuses it for good. What the files mean is up to
other modules.
"""

import base64
import errno
import hashlib
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.callbacks import Callback
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from activation_extraction.cli.errors import RunError, one_line
from activation_extraction.cli.retries import gcsfs_listeners

# gcsfs would ask Google over gRPC for the type of every bucket, and wait minutes for an emulator.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

PATIENCE = 300.0  # seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts
# Each request carries one chunk. If it takes longer than this, the upload fails and begins again.
# Four uploads at a time need 0.28 MB/s.
CHUNK_BYTES = 8 * 2**20
REQUEST_SECONDS = 120
TRIAL = ".write_test"
OBJECT_STORES = {"gs", "gcs", "s3", "s3a", "abfs", "az"}
LOCAL_AND_FINAL = {
    errno.ENOSPC: "the disk is full; make room first",
    errno.EDQUOT: "the disk quota is used up; make room first",
    errno.EROFS: "the file system is read-only; make it writable first",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
}
# HTTP statuses after which a request may be sent again; 410 means a lost upload session.
WORTH_ANOTHER_TRY = {408, 409, 410, 416, 429}

log = logging.getLogger("extract_activations")
T = TypeVar("T")


class FolderError(RunError):
    """A folder refused a request (`final`), or kept failing until the retries were given up."""

    def __init__(self, message: str, final: bool, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.final = final


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
    final = isinstance(error, ValueError | TypeError | ImportError)
    final = final or 400 <= status < 500 and status not in WORTH_ANOTHER_TRY
    return f"{text:.200}", final


class _Heartbeat(Callback):
    """fsspec calls this for every chunk that has arrived; `last` is the time of the last one."""

    def __init__(self, beat: Callable[[], None]) -> None:
        super().__init__()
        self._beat = beat
        self.last = time.monotonic()

    def call(self, *_: Any, **__: Any) -> None:
        self.last = time.monotonic()
        self._beat()


class Folder:
    """One folder. patience: for how many seconds without progress a failing request is retried.

    beat: called whenever there is progress. `retries` counts the attempts that failed. Methods
    raise FolderError, and may be called from several threads.
    """

    def __init__(
        self, url: str, patience: float = PATIENCE, beat: Callable[[], None] = lambda: None
    ) -> None:
        self.url = url.rstrip("/")
        self.beat = beat
        self.retries = 0
        self._patience = patience
        self._failing = False  # whether a request has failed since the last success
        try:
            if "://" in url:
                self._fs, path = url_to_fs(self.url, **_options(self.url))
            else:  # url_to_fs gives some characters of file names a meaning
                self._fs, path = LocalFileSystem(), os.path.abspath(self.url or "/")
        except (ValueError, ImportError) as error:
            raise FolderError(f"{url}: {one_line(error)}", final=True) from error
        self._path = path.rstrip("/")

    @property
    def local(self) -> bool:
        """Whether it is a folder on this machine."""
        return "file" in self._protocols

    @property
    def _protocols(self) -> tuple[str, ...]:
        protocol = self._fs.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    def child(self, name: str) -> "Folder":
        """The folder `name` inside this one; "" is this one itself."""
        if not name:
            return self
        return Folder(f"{self.url}/{name}", self._patience, self.beat)

    def files(self) -> dict[str, int]:
        """Name -> size in bytes of the files here; empty if the folder does not exist."""
        return {
            _name(entry): int(entry["size"]) for entry in self._entries() if entry["type"] == "file"
        }

    def folders(self) -> list[str]:
        """The names of the folders here, sorted."""
        return sorted(_name(entry) for entry in self._entries() if entry["type"] == "directory")

    def _entries(self) -> list[dict[str, Any]]:
        def look() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            try:
                return self._fs.ls(self._path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                self._check_bucket()
                return []

        return self._persist("listing", look)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        """A whole file, or its bytes from `start` to `stop`; None if there is no such file.

        A negative `start` counts from the end.
        """

        # Without reading ahead: the hub's file system would, and again for every range.
        exactly = {"cache_type": "none"} if "hf" in self._protocols else {}

        def get() -> bytes | None:
            try:
                return self._fs.cat_file(self._file(name), start=start, end=stop, **exactly)
            except FileNotFoundError:
                self._check_bucket()
                return None

        return self._persist(f"reading {name}", get)

    def digest(self, name: str) -> tuple[str, str] | None:
        """What the store reports of a file's content: the algorithm, and the hexadecimal digest."""
        found = self._persist(f"looking at {name}", lambda: self._fs.info(self._file(name)))
        if found.get("lfs"):  # the hub's
            return "sha256", found["lfs"]["sha256"]
        if "md5Hash" in found:  # Google's, unless the object was composed of others
            return "md5", base64.b64decode(found["md5Hash"]).hex()
        return None

    def fetch(self, name: str, folder: Path) -> Path:
        """The local path of a whole file: of the file itself, or of a copy in `folder`."""
        if self.local:
            return Path(self._file(name))
        self._persist(
            f"downloading {name}", lambda: self._fs.get_file(self._file(name), str(folder / name))
        )
        return folder / name

    def remove(self, name: str) -> None:
        """Deletes a file, if it exists."""

        def delete() -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._file(name))

        self._persist(f"deleting {name}", delete)

    def put(self, path: Path, name: str | None = None) -> None:
        """Uploads a finished local file, and retries until the store confirms size and checksum.

        If only the store's answer was lost, the upload is not repeated.
        """
        name = name or path.name
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "md5")  # what stores report
        size = path.stat().st_size
        target = self._file(name)
        heartbeat = _Heartbeat(self.beat)
        attempts = 0

        def upload() -> None:
            nonlocal attempts
            attempts += 1
            if attempts > 1 and self._holds(target, size, digest):
                return
            chunks = {"chunksize": CHUNK_BYTES} if "gs" in self._protocols else {}
            try:
                if OBJECT_STORES.isdisjoint(self._protocols):  # those have no folders to make
                    self._fs.makedirs(self._path, exist_ok=True)
                self._fs.put_file(str(path), target, callback=heartbeat, **chunks)
            except FileNotFoundError as error:
                self._check_bucket()
                raise ConnectionError("the upload session was lost") from error
            if not self._holds(target, size, digest):
                raise ConnectionError("what arrived differs from what was sent")

        self._persist(f"uploading {name}", upload, heartbeat)
        self.beat()

    def try_writing(self) -> None:
        """Writes a small file and deletes it again."""
        with tempfile.TemporaryDirectory() as folder:
            trial = Path(folder) / TRIAL
            trial.write_text("ok")
            self.put(trial)
        self.remove(TRIAL)

    def _holds(self, target: str, size: int, digest: Any) -> bool:
        """Whether the stored object has this size and MD5. Reads it if the store reports no MD5."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.info(target)
        except FileNotFoundError:
            return False
        if found["size"] != size:
            return False
        reported = found.get("md5Hash")
        if reported is not None:
            return reported == base64.b64encode(digest.digest()).decode()
        if str(found.get("ETag", "")).strip('"') == digest.hexdigest():  # S3, uploads in one part
            return True
        with self._fs.open(target, "rb") as file:
            return hashlib.file_digest(file, "md5").digest() == digest.digest()

    def _check_bucket(self) -> None:
        """Raises FolderError if not just a file but the whole bucket is missing."""
        if OBJECT_STORES.isdisjoint(self._protocols):
            return
        bucket = self._path.split("/")[0]
        try:
            self._fs.ls(bucket, detail=False)
        except FileNotFoundError as error:
            raise FolderError(f"{self.url}: no such bucket: {bucket}", final=True) from error

    def _file(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _persist(
        self, what: str, action: Callable[[], T], heartbeat: _Heartbeat | None = None
    ) -> T:
        """The result of `action`, which is retried unless its failure is final."""

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
        """Warns about a failed request, once until something succeeds again."""
        if not self._failing:
            self._failing = True
            log.warning(
                "%s: %s failed (%s); trying again for up to %g s (--upload_timeout)",
                *(self.url, what, f"{reason:.200}", self._patience),
            )

    def _try(self, what: str, action: Callable[[], T], heartbeat: _Heartbeat | None) -> T:
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


def local_path(url: str) -> str:
    """The path of a folder on this machine, given as a URL or as a path."""
    return url.removeprefix("file://")


def _options(url: str) -> dict[str, Any]:
    """The options to open it with; fsspec's own configuration (FSSPEC_GCS, ...) wins."""
    if not url.startswith(("gs://", "gcs://")):
        return {}
    chosen: dict[str, Any] = {"requests_timeout": REQUEST_SECONDS}
    if "STORAGE_EMULATOR_HOST" in os.environ:
        chosen["token"] = "anon"
    return {**chosen, **fsspec.config.conf.get("gs", {}), **fsspec.config.conf.get("gcs", {})}


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
