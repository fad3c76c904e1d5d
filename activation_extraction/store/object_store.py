"""Requests to Google Cloud Storage and S3 that fsspec's file systems do not offer.

Conditional ones, which the store carries out only if an object is still as it was seen: Google
compares generations, S3 compares ETags. And uploads from memory, one conditional PUT for each
object, by obstore, which is written in Rust: without Python's lock, and without a copy of the data.
Where the bucket is and who we are there, fsspec's file system says; requests that fail are repeated
by `Folder`.
"""

import base64
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError

from activation_extraction.store.patience import in_time, time_for

# obstore's time-outs begin with the request and know nothing of how much of its body has been sent:
# they cannot tell a slow upload from a silent server. So each request has `patience`, or what an
# object of its size needs on a slow line, if that is longer. A line that is dead, and a server that
# reads no further, end it sooner: obstore has the system close a connection on which nothing is
# acknowledged for 30 s (TCP_USER_TIMEOUT), and waits 5 s for one.

# Codes of S3 for what is worth another try although its status is 400.
PASSING = {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"}


class RequestError(OSError):
    """The store answered, but refused. code: the HTTP status; 0 if that is misleading."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class ObjectStore(ABC):
    """One bucket. patience: seconds, as in `Folder`. Paths are those of the file system.

    uploads: whether `create` works: not where obstore would not honour the file system's options.
    verifies: whether the store itself refuses what does not arrive as it was sent. Conditional
    requests raise FileExistsError or FileNotFoundError when the object has changed.
    """

    uploads: bool
    verifies: bool

    def __init__(self, file_system: Any, patience: float) -> None:
        self._fs = file_system
        self._patience = patience
        self._stores: dict[float, Any] = {}  # by time-out, which each has for all of its requests

    @abstractmethod
    def version(self, entry: dict[str, Any]) -> str:
        """Returns the version of an object, from what a listing or `info` says of it."""

    @abstractmethod
    def write(self, path: str, data: bytes, version: str | None) -> str:
        """Replaces this version of a small object (None: creates it); returns the new version."""

    @abstractmethod
    def delete(self, path: str, version: str) -> None:
        """Deletes this version of an object."""

    @property
    @abstractmethod
    def _address(self) -> str: ...  # the URL that requests go to

    @abstractmethod
    def _credentials(self) -> dict[str, Any]: ...  # as obstore wants them

    @abstractmethod
    def _open(self, bucket: str, shared: dict[str, Any]) -> Any: ...  # a store of obstore

    def create(self, path: str, parts: Sequence[memoryview], size: int) -> str | None:
        """Creates an object; returns its version, if objects have versions there.

        Raises FileExistsError, FileNotFoundError if there is no such bucket, FSTimeoutError if
        nobody answered, and RequestError or ConnectionError.
        """
        from obstore.exceptions import AlreadyExistsError, BaseError  # reading needs no obstore

        find = partial(in_time, self._patience, self._credentials)
        find()  # what is wrong with them is better said by their own errors
        bucket, key = path.split("/", 1)
        seconds = time_for(size, self._patience)
        if seconds not in self._stores:
            http = self._address.startswith("http://")
            shared = {
                "client_options": {"timeout": timedelta(seconds=seconds), "allow_http": http},
                "retry_config": {"max_retries": 0},
                "credential_provider": find,
            }
            self._stores[seconds] = self._open(bucket, shared)
        try:
            # Not put_async: a process that ends soon after it is often aborted.
            return self._stores[seconds].put(key, parts, mode="create")["version"]
        except AlreadyExistsError as error:
            raise FileExistsError(path) from error
        except BaseError as error:
            raise in_python(error) from error


class GoogleStore(ObjectStore):
    """Google Cloud Storage. Generation 0 stands for an object that does not exist."""

    verifies = False

    def __init__(self, file_system: Any, patience: float) -> None:
        super().__init__(file_system, patience)
        self.uploads = not file_system.requester_pays

    def version(self, entry: dict[str, Any]) -> str:
        return str(entry["generation"])

    def write(self, path: str, data: bytes, version: str | None) -> str:
        bucket, key, _ = self._fs.split_path(path)
        answer = self._fs.call(
            "POST",
            f"{self._address}/upload/storage/v1/b/{{}}/o",
            bucket,
            uploadType="media",
            name=key,
            ifGenerationMatch=version or "0",
            headers={"Content-Type": "application/octet-stream"},
            data=data,
            json_out=True,
        )
        return str(answer["generation"])

    def delete(self, path: str, version: str) -> None:
        bucket, key, _ = self._fs.split_path(path)
        self._fs.call("DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=version)

    def holds(self, path: str, size: int, crc32c: int) -> bool:
        """Returns whether there is an object of this content, in one request; `info` sends two."""
        try:
            found = self._fs.call("GET", "b/{}/o/{}", *path.split("/", 1), json_out=True)
        except FileNotFoundError:
            return False
        expected = base64.b64encode(crc32c.to_bytes(4, "big")).decode()
        return int(found["size"]) == size and found.get("crc32c") == expected

    @property
    def _address(self) -> str:
        return self._fs._location

    def _open(self, bucket: str, shared: dict[str, Any]) -> Any:
        from obstore.store import GCSStore

        return GCSStore(bucket, base_url=self._address, **shared)

    def _credentials(self) -> dict[str, Any]:
        """Fresh for some minutes; an empty token if the file system is anonymous."""
        self._fs.credentials.maybe_refresh()
        found = self._fs.credentials.credentials
        if found is None:
            return {"token": "", "expires_at": None}
        expires = found.expiry and found.expiry.replace(tzinfo=UTC)
        return {"token": found.token, "expires_at": expires}


class S3Store(ObjectStore):
    """S3, whose ETags are digests of what is stored: what is to be told apart must differ."""

    verifies = True

    def __init__(self, file_system: Any, patience: float) -> None:
        super().__init__(file_system, patience)
        self.uploads = not file_system.anon and not file_system.s3_additional_kwargs

    def version(self, entry: dict[str, Any]) -> str:
        return str(entry["ETag"])

    def write(self, path: str, data: bytes, version: str | None) -> str:
        expected = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        return str(self._call("put_object", path, Body=data, **expected)["ETag"])

    def delete(self, path: str, version: str) -> None:
        self._call("delete_object", path, IfMatch=version)

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        bucket, key, _ = self._fs.split_path(path)
        self._fs.invalidate_cache(path)
        try:
            return self._fs.call_s3(method, Bucket=bucket, Key=key, **arguments)
        except OSError as error:  # s3fs has no type of its own for a failed IfMatch
            response = getattr(error.__cause__, "response", {})
            if response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412:
                raise FileExistsError(path) from error
            raise

    @property
    def _address(self) -> str:
        return self._fs.connect().meta.endpoint_url

    def _open(self, bucket: str, shared: dict[str, Any]) -> Any:
        from obstore import store

        # S3 refuses what does not have this checksum, which the signature needs anyway.
        own: Any = {"endpoint": self._address, "checksum_algorithm": "SHA256"}
        return store.S3Store(bucket, region=self._fs.connect().meta.region_name, **own, **shared)

    def _credentials(self) -> dict[str, Any]:
        """These last for ten minutes at least."""
        fs = self._fs

        async def find() -> Any:
            await fs.set_session()
            found = await fs.session.get_credentials()
            if found is None:
                raise RequestError(401, "no credentials for S3 were found")
            return await found.get_frozen_credentials()

        key, secret, token = (fs.key, fs.secret, fs.token) if fs.key else sync(fs.loop, find)[:3]
        expires = datetime.now(UTC) + timedelta(minutes=10)
        keys = {"access_key_id": key, "secret_access_key": secret, "token": token}
        return {**keys, "expires_at": expires}


def in_python(error: Exception) -> OSError:
    """Returns what obstore says of an error, briefly: the answer's code and message, or the
    system's."""
    text, _, details = str(error).partition("\n\nDebug source:\n")
    answer = re.search(r"status code: (\d+) ?([^:]*)", text)
    if answer is not None:
        said = re.findall(r"<(?:Code|Message)>([^<]*)</", text)
        passing = not PASSING.isdisjoint(said)
        return RequestError(0 if passing else int(answer[1]), ": ".join(said) or answer[0])
    if "TimedOut" in details:
        return FSTimeoutError("no answer")
    reason = re.search(r'(?:message|error): "([^"]+)"', details)
    return ConnectionError(reason[1] if reason else text.rpartition(" - ")[2])


def object_store_of(
    file_system: Any, protocols: tuple[str, ...], patience: float
) -> ObjectStore | None:
    """Returns the store behind a file system; None if it is another kind of store."""
    if not {"gs", "gcs"}.isdisjoint(protocols):
        return GoogleStore(file_system, patience)
    if "s3" in protocols and hasattr(file_system, "connect"):
        return S3Store(file_system, patience)
    return None
