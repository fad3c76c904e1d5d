"""A folder of files, local or in a bucket: any URL that fsspec knows.

It lists, reads, deletes and above all writes files from memory: it sends them again and again until
the store confirms size and checksum, or refuses them for good. What the files mean is up to other
modules.
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
from activation_extraction.store.object_store import GoogleStore, ObjectStore, object_store_of
from activation_extraction.store.patience import (
    NO_ROOM,
    OTHER_SCRATCH,
    PATIENCE,
    FolderError,
    Patient,
    beating,
    in_time,
    reason_of,
    time_for,
)
from activation_extraction.store.sealed_json import is_sealed

# gcsfs would ask Google over gRPC for the type of every bucket, and wait minutes for an emulator.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

REQUEST_SECONDS = 120  # for one of gcsfs, also of a thread that was left to itself
TRIAL = ".write_test"
OBJECT_STORES = {"gs", "gcs", "s3", "s3a", "abfs", "az"}


class TakenError(FolderError):
    """A file of this name exists already, with other content."""


@dataclass(frozen=True)
class FileEntry:
    """A file in a listing. version: changes with every write; None if the store has none."""

    size: int
    version: str | None = None


class Folder(Patient):
    """One folder. patience: for how many seconds without progress a failing request is retried.

    flag: the flag that set the patience, for messages. beat: called whenever there is progress.
    `given` opens it again; `url` is the same without secrets, for messages and for what is stored.
    `retries` counts the attempts that failed. Methods raise FolderError, and may be called from
    several threads.
    """

    def __init__(
        self,
        url: str,
        patience: float = PATIENCE,
        beat: Callable[[], None] = lambda: None,
        flag: str = "",
    ) -> None:
        self.given = url.rstrip("/")
        super().__init__(plain_url(self.given), patience, beat, flag)
        store = self.given.split("://")[0]
        try:
            if store in OBJECT_STORES:  # whose credentials have to be found
                fsspec.get_filesystem_class(store)  # importing it may take as long, but ends
                began = time.monotonic()
                self._fs, path = in_time(
                    patience, lambda: url_to_fs(self.given, **_options(self.given))
                )
                self._opening = time.monotonic() - began
            elif "://" in url:
                self._fs, path = url_to_fs(self.given, **_options(self.given))
            else:  # url_to_fs gives some characters of file names a meaning
                self._fs, path = LocalFileSystem(), os.path.abspath(self.given or "/")
        except FSTimeoutError as error:
            raise FolderError(
                f"{self.url}: no answer about credentials within {patience:g} s{self._by_flag}",
                final=False,
            ) from error
        except Exception as error:  # some file systems connect at once, and raise what they like
            raise FolderError(f"{self.url}: {one_line(error)}", final=True) from error
        protocol = self._fs.protocol
        self._protocols = (protocol,) if isinstance(protocol, str) else tuple(protocol)
        self._path = path.rstrip("/")
        self._store = object_store_of(self._fs, self._protocols, patience)
        self.local = "file" in self._protocols

    @property
    def conditional(self) -> bool:
        """Whether files can be written on condition that nobody else has changed them."""
        return self._store is not None

    def child(self, name: str) -> "Folder":
        """Returns the folder `name` inside this one; "" is this one itself."""
        if not name:
            return self
        return Folder(f"{self.given}/{name}", self._patience, self.beat, self._flag)

    def files(self) -> dict[str, int]:
        """Returns name -> size in bytes of the files here; empty if the folder does not exist."""
        return {name: entry.size for name, entry in self.listing().items()}

    def listing(self) -> dict[str, FileEntry]:
        """Returns the files here by name, as `files`, with their versions."""
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
        """Returns the sorted names of what is here. types: "file", "directory"."""
        return sorted(_name(entry) for entry in self._entries() if entry["type"] in types)

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
        """Returns a whole file, or its bytes from `start` to `stop`; None if there is no such file.

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

        return self._persist(f"reading {name}", get, max(0, (stop or 0) - (start or 0)))

    def read_sealed(self, name: str) -> bytes | None:
        """Reads a sealed JSON file as `read` does, and again if its bytes were damaged on the way.

        Bytes that are not sealed are returned only if the store holds them like that.
        """

        def get() -> bytes | None:
            data, target = self.read(name), self._file(name)
            if data is None or is_sealed(data):
                return data
            if self._found(target, len(data), hashlib.md5(data)):
                return data
            raise ConnectionError("what arrived is not what is stored")

        return self._persist(f"reading {name}", get)

    def digest(self, name: str) -> tuple[str, str] | None:
        """Returns what the store reports of a file's content: the algorithm, and the hexadecimal
        digest."""
        found = self._persist(f"looking at {name}", lambda: self._fs.info(self._file(name)))
        if found.get("lfs"):  # the hub's
            return "sha256", found["lfs"]["sha256"]
        md5 = _google_md5(found)
        return None if md5 is None else ("md5", md5)

    def fetch(self, name: str, folder: Path) -> Path:
        """Returns the local path of a whole file: of the file itself, or of a copy in `folder`.

        folder: a temporary one; if it is full, the error names it and TMPDIR.
        """
        if self.local:
            return Path(self._file(name))

        def download() -> None:
            try:
                self._fs.get_file(self._file(name), str(folder / name))
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                why = f"{folder}: {reason_of(error)[0]}, or {OTHER_SCRATCH}"
                raise FolderError(f"{self.url}: downloading {name}: {why}", final=True) from error

        what = f"downloading {name}"
        size = self._persist(what, lambda: self._fs.info(self._file(name))["size"])
        self._persist(what, download, size or 0)
        return folder / name

    def remove(self, name: str, version: str | None = None) -> None:
        """Deletes a file, or this version of it, if it exists."""

        def delete() -> None:
            with suppress(FileNotFoundError, FileExistsError):
                if version is None or self._store is None:
                    self._fs.rm_file(self._file(name))
                else:
                    self._store.delete(self._file(name), version)

        self._persist(f"deleting {name}", delete, waits=not self.conditional)

    def version(self, name: str) -> str | None:
        """Returns the version of a file now; None if there is no such file."""

        def look() -> str | None:
            self._fs.invalidate_cache()
            try:
                return self._version(self._fs.info(self._file(name)))
            except FileNotFoundError:
                return None

        return self._persist(f"looking at {name}", look)

    def write_if(self, name: str, data: bytes, version: str | None) -> str | None:
        """Replaces this version of a small file (None: creates it), in a store that is conditional.

        Returns the new version; None if somebody else has changed the file. If only the store's
        answer was lost, the file holds this data already, and its version is returned.
        """
        assert self._store is not None
        store, target = self._store, self._file(name)

        def write() -> str | None:
            try:
                return store.write(target, data, version)
            except (FileExistsError, FileNotFoundError):
                self._check_bucket()
                found = self._found(target, len(data), hashlib.md5(data))
                return None if found is None else store.version(found)

        return self._persist(f"writing {name}", write, len(data))

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file from memory; the store has to confirm its size and checksum."""
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
            if not self._found(target, len(data), hashlib.md5(data)):
                raise ConnectionError("what arrived differs from what was sent")

        self._persist(f"uploading {name}", send, len(data), waits=not self.conditional)
        self.beat()

    def create(self, name: str, parts: Sequence[memoryview], size: int, crc32c: int) -> None:
        """Creates a file from the bytes in memory; the store has to confirm size and CRC-32C.

        To Google Cloud Storage and S3 it goes in one conditional request, without a copy: a process
        that is killed leaves the whole object or nothing, and no parts of an upload. If only the
        answer was lost, the object is not sent again; raises TakenError if there is one with other
        content. To other stores it goes as by `write`, which replaces a file.
        """
        if self._store is None:
            self.write(name, b"".join(parts))
        elif self._store.uploads:
            self._upload(self._store, name, parts, size, crc32c)
        elif self.write_if(name, b"".join(parts), None) is None:
            raise self._taken(name)
        self.beat()

    def _upload(
        self, store: ObjectStore, name: str, parts: Sequence[memoryview], size: int, crc32c: int
    ) -> None:
        target, attempts = self._file(name), 0

        def look() -> bool:
            if isinstance(store, GoogleStore):
                return store.holds(target, size, crc32c)
            digest = hashlib.md5()
            for part in parts:
                digest.update(part)
            return self._found(target, size, digest) is not None

        def holds() -> bool:
            return in_time(time_for(size, self._patience), look)

        def send() -> None:
            nonlocal attempts
            attempts += 1
            if attempts > 1 and holds():
                return
            try:
                with beating(self.beat):
                    version = store.create(target, parts, size)
            except FileExistsError as error:
                if not holds():
                    raise self._taken(name) from error
                return
            except FileNotFoundError as error:
                in_time(self._patience, self._check_bucket)
                raise ConnectionError("the upload was lost") from error
            if not store.verifies and not holds():
                self.remove(name, version)
                raise ConnectionError("what arrived differs from what was sent")

        self._persist(f"uploading {name}", send, ends=True)

    def _taken(self, name: str) -> TakenError:
        return TakenError(f"{self.url}/{name}: is there already", final=True)

    def try_writing(self) -> None:
        """Writes a small file and deletes it again."""
        self.write(TRIAL, b"ok")
        self.remove(TRIAL)

    def _found(self, target: str, size: int, digest: Any) -> dict[str, Any] | None:
        """What the store reports of the object, if it has this size and MD5; None otherwise.

        Reads the object if the store reports no MD5.
        """
        self._fs.invalidate_cache()
        try:
            found = self._fs.info(target)
        except FileNotFoundError:
            return None
        if found["size"] != size:
            return None
        reported = _google_md5(found)
        if reported is not None:
            same = reported == digest.hexdigest()
        elif str(found.get("ETag", "")).strip('"') == digest.hexdigest():  # S3, uploads in one part
            same = True
        else:
            with self._fs.open(target, "rb") as file:
                same = hashlib.file_digest(file, "md5").digest() == digest.digest()
        return found if same else None

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


def _google_md5(found: Mapping[str, Any]) -> str | None:
    """Returns an object's MD5 in hexadecimal; None if it is composed of others, or not Google's."""
    return base64.b64decode(found["md5Hash"]).hex() if "md5Hash" in found else None


def local_path(url: str) -> str:
    """Returns the path of a folder on this machine, given as a URL or as a path."""
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
