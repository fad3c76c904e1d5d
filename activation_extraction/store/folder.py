"""A folder of files, local or in a bucket, given as any URL that fsspec knows.

It lists, reads, deletes and writes files. A file is written from memory, and sent again until the
store confirms its size and checksum or refuses it for good. This module does not know what the
files mean.
"""

import base64
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.local import LocalFileSystem

from activation_extraction.common.errors import one_line
from activation_extraction.common.visible import plain_url
from activation_extraction.store.local_files import write_bytes
from activation_extraction.store.object_store import GoogleStore, ObjectStore, find_object_store
from activation_extraction.store.patience import (
    DISK_FULL,
    PATIENCE,
    SET_TMPDIR,
    FolderError,
    Retrying,
    heartbeat,
    reason_of,
    timeout_for,
    with_timeout,
)
from activation_extraction.store.sealed_json import is_sealed

# gcsfs would ask Google over gRPC for the type of every bucket, and wait minutes for an emulator.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

REQUEST_SECONDS = 120  # a limit for gcsfs, which also ends requests that were abandoned
TEST_FILE = ".write_test"
OBJECT_STORES = {"gs", "gcs", "s3", "s3a", "abfs", "az"}


class ObjectExistsError(FolderError):
    """An object of this name exists already and has other content."""


@dataclass(frozen=True)
class FileEntry:
    """A file in a listing. version: changes with every write; None if the store has no versions."""

    size: int
    version: str | None = None


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
        scheme = self.given.split("://")[0]
        try:
            if scheme in OBJECT_STORES:  # finding their credentials may hang
                fsspec.get_filesystem_class(scheme)  # importing it may take as long, but ends
                began = time.monotonic()
                self._fs, path = with_timeout(
                    patience, lambda: url_to_fs(self.given, **_options(self.given))
                )
                self._opening = time.monotonic() - began
            elif "://" in url:
                self._fs, path = url_to_fs(self.given, **_options(self.given))
            else:  # url_to_fs would interpret some characters of file names
                self._fs, path = LocalFileSystem(), os.path.abspath(self.given or "/")
        except FSTimeoutError as error:
            raise FolderError(
                f"{self.url}: no answer about credentials within {patience:g} s{self._by_flag}",
                final=False,
            ) from error
        except Exception as error:  # some file systems connect here, and raise any exception
            raise FolderError(f"{self.url}: {one_line(error)}", final=True) from error
        protocol = self._fs.protocol
        self._protocols = (protocol,) if isinstance(protocol, str) else tuple(protocol)
        self._path = path.rstrip("/")
        self._store = find_object_store(self._fs, self._protocols, patience)
        self.local = "file" in self._protocols

    @property
    def conditional(self) -> bool:
        """Whether a write can be conditional on nobody else having changed the file."""
        return self._store is not None

    def child(self, name: str) -> "Folder":
        """Returns the folder `name` inside this one; "" means this one."""
        if not name:
            return self
        return Folder(f"{self.given}/{name}", self._patience, self.on_progress, self._flag)

    def files(self) -> dict[str, int]:
        """Maps the names of the files here to sizes in bytes; empty if the folder is missing."""
        return {name: entry.size for name, entry in self.listing().items()}

    def listing(self) -> dict[str, FileEntry]:
        """Maps the names of the files here to their sizes and versions."""
        return {
            _name(entry): FileEntry(int(entry["size"]), self._version(entry))
            for entry in self._entries()
            if entry["type"] == "file"
        }

    def _version(self, entry: dict[str, Any]) -> str | None:
        return None if self._store is None else self._store.version(entry)

    def folders(self) -> list[str]:
        """Returns the names of the folders here, sorted."""
        return self.names("directory")

    def names(self, *types: str) -> list[str]:
        """Returns the sorted names of the entries here. types: "file", "directory"."""
        return sorted(_name(entry) for entry in self._entries() if entry["type"] in types)

    def _entries(self) -> list[dict[str, Any]]:
        def list_entries() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            try:
                return self._fs.ls(self._path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                self._check_bucket()
                return []

        return self._retry("listing", list_entries)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes | None:
        """Returns a whole file, or its bytes from `start` to `stop`; None if there is no such file.

        A negative `start` counts from the end.
        """

        # The hub's file system would read ahead, again for every range.
        no_cache = {"cache_type": "none"} if "hf" in self._protocols else {}

        def get() -> bytes | None:
            try:
                return self._fs.cat_file(self._file(name), start=start, end=stop, **no_cache)
            except FileNotFoundError:
                self._check_bucket()
                return None

        return self._retry(f"reading {name}", get, max(0, (stop or 0) - (start or 0)))

    def read_sealed(self, name: str) -> bytes | None:
        """Reads a sealed JSON file, and reads it again if it was damaged on the way.

        A file that is not sealed is returned only if these are the bytes that the store holds.
        """

        def get() -> bytes | None:
            data = self.read(name)
            if data is None or is_sealed(data):
                return data
            if self._info_if_same(self._file(name), len(data), hashlib.md5(data)):
                return data
            raise ConnectionError("what arrived is not what is stored")

        return self._retry(f"reading {name}", get)

    def digest(self, name: str) -> tuple[str, str] | None:
        """Returns the name of a digest that the store reports for a file, and its hexadecimal
        value; None if it reports none."""
        info = self._retry(f"looking at {name}", lambda: self._fs.info(self._file(name)))
        if info.get("lfs"):  # on the Hugging Face hub
            return "sha256", info["lfs"]["sha256"]
        md5 = _google_md5(info)
        return None if md5 is None else ("md5", md5)

    def fetch(self, name: str, folder: Path) -> Path:
        """Returns the path of a local file, or of a copy of a remote one in `folder`.

        folder: a temporary folder; if it is full, the error names it and TMPDIR.
        """
        if self.local:
            return Path(self._file(name))

        def download() -> None:
            try:
                self._fs.get_file(self._file(name), str(folder / name))
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                why = f"{folder}: {reason_of(error)[0]}, or {SET_TMPDIR}"
                raise FolderError(f"{self.url}: {request}: {why}", final=True) from error

        request = f"downloading {name}"
        size = self._retry(request, lambda: self._fs.info(self._file(name))["size"])
        self._retry(request, download, size or 0)
        return folder / name

    def remove(self, name: str, version: str | None = None) -> None:
        """Deletes a file, or only a certain version of it, if it exists."""

        def delete() -> None:
            with suppress(FileNotFoundError, FileExistsError):
                if version is None or self._store is None:
                    self._fs.rm_file(self._file(name))
                else:
                    self._store.delete(self._file(name), version)

        self._retry(f"deleting {name}", delete, must_finish=not self.conditional)

    def version(self, name: str) -> str | None:
        """Returns the current version of a file; None if there is no such file."""

        def look_up() -> str | None:
            self._fs.invalidate_cache()
            try:
                return self._version(self._fs.info(self._file(name)))
            except FileNotFoundError:
                return None

        return self._retry(f"looking at {name}", look_up)

    def write_if(self, name: str, data: bytes, version: str | None) -> str | None:
        """Replaces a certain version of a small file (None: creates it), if `conditional`.

        Returns the new version; None if somebody else has changed the file. If an earlier attempt
        wrote the data but its answer was lost, the version of that attempt is returned.
        """
        assert self._store is not None
        store, target = self._store, self._file(name)

        def write() -> str | None:
            try:
                return store.write(target, data, version)
            except (FileExistsError, FileNotFoundError):
                self._check_bucket()
                info = self._info_if_same(target, len(data), hashlib.md5(data))
                return None if info is None else store.version(info)

        return self._retry(f"writing {name}", write, len(data))

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file from memory, and checks the size and checksum of what arrived."""
        target = self._file(name)

        def send() -> None:
            if OBJECT_STORES.isdisjoint(self._protocols):
                self._fs.makedirs(self._path, exist_ok=True)
            try:
                if self.local:
                    write_bytes(Path(target), data)
                else:
                    self._fs.pipe_file(target, data)
            except FileNotFoundError as error:
                self._check_bucket()
                raise ConnectionError("the upload was lost") from error
            if not self._info_if_same(target, len(data), hashlib.md5(data)):
                raise ConnectionError("what arrived differs from what was sent")

        self._retry(f"uploading {name}", send, len(data), must_finish=not self.conditional)
        self.on_progress()

    def create(self, name: str, parts: Sequence[memoryview], size: int, crc32c: int) -> None:
        """Creates a file from bytes in memory, and checks the size and CRC-32C of what arrived.

        Google Cloud Storage and S3 get it in one conditional request, without a copy: a process
        that is killed leaves the whole object or nothing, and no parts of an upload. If only the
        answer was lost, the object is not sent again. Raises ObjectExistsError if there is an
        object with other content. Other stores get it by `write`, which replaces a file.
        """
        if self._store is None:
            self.write(name, b"".join(parts))
        elif self._store.uploads:
            self._upload(self._store, name, parts, size, crc32c)
        elif self.write_if(name, b"".join(parts), None) is None:
            raise self._taken(name)
        self.on_progress()

    def _upload(
        self, store: ObjectStore, name: str, parts: Sequence[memoryview], size: int, crc32c: int
    ) -> None:
        target, attempts = self._file(name), 0

        def compare() -> bool:
            if isinstance(store, GoogleStore):
                return store.holds(target, size, crc32c)
            digest = hashlib.md5()
            for part in parts:
                digest.update(part)
            return self._info_if_same(target, size, digest) is not None

        def is_stored() -> bool:
            return with_timeout(timeout_for(size, self._patience), compare)

        def send() -> None:
            nonlocal attempts
            attempts += 1
            if attempts > 1 and is_stored():
                return
            try:
                with heartbeat(self.on_progress):
                    version = store.create(target, parts, size)
            except FileExistsError as error:
                if not is_stored():
                    raise self._taken(name) from error
                return
            except FileNotFoundError as error:
                with_timeout(self._patience, self._check_bucket)
                raise ConnectionError("the upload was lost") from error
            if not store.verifies and not is_stored():
                self.remove(name, version)
                raise ConnectionError("what arrived differs from what was sent")

        self._retry(f"uploading {name}", send, has_timeout=True)

    def _taken(self, name: str) -> ObjectExistsError:
        return ObjectExistsError(
            f"{self.url}/{name}: exists already, with other content", final=True
        )

    def try_writing(self) -> None:
        """Writes a small file and deletes it again."""
        self.write(TEST_FILE, b"ok")
        self.remove(TEST_FILE)

    def _info_if_same(self, target: str, size: int, digest: Any) -> dict[str, Any] | None:
        """Returns the store's information about an object if it has this size and MD5, else None.

        Reads the object if the store reports no MD5.
        """
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(target)
        except FileNotFoundError:
            return None
        if info["size"] != size:
            return None
        reported = _google_md5(info)
        if reported is not None:
            same = reported == digest.hexdigest()
        elif str(info.get("ETag", "")).strip('"') == digest.hexdigest():  # S3, uploads in one part
            same = True
        else:
            with self._fs.open(target, "rb") as file:
                same = hashlib.file_digest(file, "md5").digest() == digest.digest()
        return info if same else None

    def _check_bucket(self) -> None:
        """Raises FolderError if the whole bucket is missing, and not just a file in it."""
        if OBJECT_STORES.isdisjoint(self._protocols):
            return
        bucket = self._path.split("/")[0]
        try:
            self._fs.ls(bucket, detail=False)
        except FileNotFoundError as error:
            raise FolderError(f"{self.url}: no such bucket: {bucket}", final=True) from error

    def _file(self, name: str) -> str:
        return f"{self._path}/{name}"


def _google_md5(info: Mapping[str, Any]) -> str | None:
    """Returns the MD5 that Google reports for an object, which composite objects do not have."""
    return base64.b64decode(info["md5Hash"]).hex() if "md5Hash" in info else None


def local_path(url: str) -> str:
    """Returns the path of a folder on this machine, given as a URL or as a path."""
    return url.removeprefix("file://")


def _options(url: str) -> dict[str, Any]:
    """Returns the options for opening a URL; fsspec's own configuration (FSSPEC_GCS, ...) wins."""
    if not url.startswith(("gs://", "gcs://")):
        return {}
    chosen: dict[str, Any] = {"requests_timeout": REQUEST_SECONDS}
    if "STORAGE_EMULATOR_HOST" in os.environ:
        chosen["token"] = "anon"
    return {**chosen, **fsspec.config.conf.get("gs", {}), **fsspec.config.conf.get("gcs", {})}


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
