"""A folder of files: local, in a bucket, or at any other URL that fsspec knows.

It lists, reads, deletes and writes files, says which request failed and why, and repeats those that
may be repeated. A write can be conditional: it creates a file, or replaces a certain version of it.
This module does not know what the files mean.
"""

import base64
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fsspec.core import url_to_fs

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.visible import plain_url
from activation_extraction.store.bucket import KINDS, Bucket
from activation_extraction.store.local_files import LocalFolder
from activation_extraction.store.patience import (
    ANY,
    PATIENCE,
    Anything,
    ChangedError,
    FileEntry,
    FolderError,
    RequestError,
    Retrying,
    UnsureError,
    check_size,
    heartbeat,
)

__all__ = ["ANY", "ChangedError", "FileEntry", "Folder", "FolderError", "UnsureError"]
LOCAL = {"file", "local"}
# gcsfs would ask Google over gRPC for the type of every bucket, and wait minutes for an emulator.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


class ForeignFolder:
    """The folder at `url`. `LocalFolder` describes its methods; they raise any exception."""

    largest = None

    def __init__(self, url: str) -> None:
        gcs: dict[str, Any] = {"requests_timeout": 120}  # seconds
        if "STORAGE_EMULATOR_HOST" in os.environ:
            gcs["token"] = "anon"
        self._fs, path = url_to_fs(url, **gcs if url.startswith(("gs://", "gcs://")) else {})
        self._url, self._path = plain_url(url), path.rstrip("/")

    def entries(self) -> tuple[dict[str, FileEntry], list[str]]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}, []
        named = [(str(entry["name"]).rstrip("/").rsplit("/", 1)[-1], entry) for entry in found]
        files = {name: FileEntry(int(e["size"])) for name, e in named if e["type"] == "file"}
        return files, sorted(name for name, entry in named if entry["type"] == "directory")

    def entry(self, name: str) -> FileEntry | None:
        return self.entries()[0].get(name)

    def read(
        self, name: str, start: int | None, stop: int | None, version: str | None, most: int | None
    ) -> tuple[bytes, str | None] | None:
        # The hub's file system would read ahead, again for every range.
        no_cache = {"cache_type": "none"} if "hf" in self._fs.protocol else {}
        path = f"{self._path}/{name}"
        try:
            if most is not None:
                check_size(int(self._fs.info(path)["size"]), most)
            return self._fs.cat_file(path, start=start, end=stop, **no_cache), None
        except FileNotFoundError:
            return None

    def digest(self, name: str) -> tuple[str, str] | None:
        """Returns a digest that the store reports (its name, hexadecimal); None if none."""
        info = self._fs.info(f"{self._path}/{name}")
        if info.get("lfs"):  # on the Hugging Face hub
            return "sha256", info["lfs"]["sha256"]
        return ("md5", base64.b64decode(info["md5Hash"]).hex()) if "md5Hash" in info else None

    def write(self, name: str, *_: Any) -> NoReturn:
        expected = "expected a local folder, gs://, s3:// or az://"
        raise InputError(f"{self._url}: {name} cannot be written there; {expected}")

    remove = write


class Folder(Retrying):
    """A folder. patience: for how many seconds without progress a failing request is retried.

    flag: the flag that sets the patience, for messages. on_progress: is called whenever there is
    progress. `given` is the URL as it was given; `url` lacks its secrets, and is the one to print
    and to store. `retries` counts failed attempts. Methods raise FolderError, and may be called
    from several threads.
    """

    def __init__(
        self,
        url: str,
        patience: float = PATIENCE,
        on_progress: Callable[[], None] = lambda: None,
        flag: str = "",
    ) -> None:
        self.given = url.rstrip("/")
        super().__init__(plain_url(self.given), patience, on_progress, flag)
        scheme = self.given.partition("://")[0] if "://" in self.given else ""
        self.local = scheme in LOCAL or not scheme
        try:
            self._files = self._open(scheme)
        except Exception as error:  # some file systems connect here, and raise any exception
            raise FolderError(f"{self.url}: {one_line(error)}", final=True) from error

    def _open(self, scheme: str) -> LocalFolder | Bucket | ForeignFolder:
        if self.local:
            return LocalFolder(Path(os.path.abspath(local_path(self.given) or "/")))
        if scheme in KINDS:
            return Bucket(self.given, self.patience)
        return ForeignFolder(self.given)

    def child(self, name: str) -> "Folder":
        """Returns the folder `name` inside this one; "" means this one."""
        if not name:
            return self
        return type(self)(f"{self.given}/{name}", self.patience, self.on_progress, self._flag)

    @property
    def largest(self) -> int | None:
        """The number of bytes that a file may have to be written; None if there is no limit."""
        return self._files.largest

    def files(self) -> dict[str, int]:
        """Maps the names of the files here to sizes in bytes; empty if the folder is missing."""
        return {name: entry.size for name, entry in self.listing().items()}

    def listing(self) -> dict[str, FileEntry]:
        """Maps the names of the files here to their sizes and versions."""
        return self._retry("listing", self._files.entries)[0]

    def folders(self) -> list[str]:
        """Returns the names of the folders here, sorted."""
        return self._retry("listing", self._files.entries)[1]

    def names(self) -> list[str]:
        """Returns the names of the files and folders here, sorted."""
        files, folders = self._retry("listing", self._files.entries)
        return sorted([*files, *folders])

    def entry(self, name: str) -> FileEntry | None:
        """Returns the size and the version of a file; None if there is no such file."""
        return self._retry(f"looking at {name}", lambda: self._files.entry(name))

    def read(
        self,
        name: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        version: str | None = None,
        most: int | None = None,
    ) -> bytes | None:
        """Returns a whole file, or its bytes from `start` to `stop`; None if there is no such file.

        A negative `start` counts from the end, and what lies past the end is left out. version:
        raises ChangedError if the file is another version now. most: raises FolderError, before it
        is read, if the file has more bytes.
        """
        found = self._read(name, start, stop, version, most)
        return None if found is None else found[0]

    def read_with_version(
        self, name: str, most: int | None = None
    ) -> tuple[bytes, str | None] | None:
        """Returns a whole file, and the version that these bytes are."""
        return self._read(name, None, None, None, most)

    def _read(self, name: str, *arguments: Any) -> tuple[bytes, str | None] | None:
        return self._retry(f"reading {name}", lambda: self._files.read(name, *arguments))

    def write(
        self, name: str, parts: bytes | Sequence[Any], expected: str | None | Anything
    ) -> str | None:
        """Writes a whole file, and returns its version; None where the store has no versions.

        parts: bytes, or buffers, one after the other. expected: the version to replace; None: no
        file, so that it is created; ANY: whatever is there. Without ANY there is one attempt: it
        raises ChangedError if something else is there, and UnsureError if it cannot be known
        whether the file was written; the caller then reads it and decides.
        """
        buffers: Sequence[Any] = [parts] if isinstance(parts, bytes) else parts
        views = [memoryview(part).cast("B") for part in buffers if memoryview(part).nbytes]

        def send() -> str | None:
            with heartbeat(self.on_progress):
                return self._files.write(name, views, expected)

        request = f"writing {name}"
        if expected is ANY:
            version = self._retry(request, send)
        else:
            try:
                version = self._attempt(request, send)
            except RequestError as error:
                self._note(request, error.reason, "looking whether it was written")
                message = f"{self.url}: {request}: {error.reason}"
                raise UnsureError(message, final=False) from error
        self.on_progress()
        return version

    def remove(self, name: str) -> None:
        """Deletes a file if it exists."""
        self._retry(f"deleting {name}", lambda: self._files.remove(name))

    def check_conditions(self) -> None:
        """Writes a tiny file and deletes it again. Raises InputError if the store ignores what a
        write is conditional on, because two processes could then write the same file."""
        name = f".write_test_{uuid.uuid4().hex[:8]}"
        try:
            first = self._settle(name, b"1", None)
            self._settle(name, b"two", first)
            if not (self._refuses(name, None) and self._refuses(name, first)):
                raise InputError(
                    f"{self.url}: a second write of {name} was not refused: the store ignores "
                    "If-None-Match or If-Match; expected one that obeys them, as Google Cloud "
                    "Storage, S3 and Azure do"
                )
        finally:
            self.remove(name)

    def _settle(self, name: str, data: bytes, expected: str | None) -> str | None:
        """Writes a file that nobody else writes, until it is there, and returns its version."""

        def write() -> str | None:
            found = self._files.read(name, None, None, None, None)
            if found is not None and found[0] == data:  # an earlier attempt's answer was lost
                return found[1]
            return self._files.write(name, [memoryview(data)], expected)

        return self._retry(f"writing {name}", write)

    def _refuses(self, name: str, expected: str | None) -> bool:
        def write() -> None:
            self._files.write(name, [memoryview(b"three")], expected)

        try:
            self._retry(f"writing {name}", write)
        except ChangedError:
            return True
        return False


class SourceFolder(Folder):
    """A folder that others wrote, such as a model: from a bucket, too, it is read by fsspec."""

    def _open(self, scheme: str) -> LocalFolder | Bucket | ForeignFolder:
        return ForeignFolder(self.given)

    def digest(self, name: str) -> tuple[str, str] | None:
        """Returns the name of a digest that the store reports for a file, and its hexadecimal
        value; None if it reports none."""
        files = self._files
        assert isinstance(files, ForeignFolder)
        return self._retry(f"looking at {name}", lambda: files.digest(name))


def local_path(url: str) -> str:
    """Returns the path of a folder on this machine, given as a URL or as a path."""
    return url.removeprefix("file://").removeprefix("local://")
