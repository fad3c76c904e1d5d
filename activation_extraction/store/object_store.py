"""Requests to Google Cloud Storage and S3 that fsspec's file systems do not offer.

The store carries out a conditional request only if an object has not changed since it was last
seen: Google compares generations, S3 compares ETags. Uploads go from memory, in one conditional PUT
for each object. They use obstore, which is written in Rust and needs neither the GIL nor a copy of
the data. The address of the bucket and the credentials come from fsspec's file system, and `Folder`
retries requests that fail.
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

from activation_extraction.store.patience import timeout_for, with_timeout

# obstore's timeouts begin with the request and ignore how much of its body has been sent, so they
# cannot tell a slow upload from a silent server. So each request gets `patience`, or the time that
# an object of its size needs on a slow line, whichever is longer. A dead line, or a server that has
# stopped reading, ends it sooner: obstore has the system close a connection on which nothing is
# acknowledged for 30 s (TCP_USER_TIMEOUT), and waits 5 s for a connection.

# Error codes of S3 that are worth a retry although their status is 400.
RETRYABLE_CODES = {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"}


class RequestError(OSError):
    """The store refused a request. code: the HTTP status; 0 if that is misleading."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class ObjectStore(ABC):
    """A bucket. patience: in seconds, as in `Folder`. Paths are those of the file system.

    uploads: whether `create` works; it does not where obstore would ignore options of the file
    system. verifies: whether the store itself refuses data that was damaged on the way. Conditional
    requests raise FileExistsError or FileNotFoundError when the object has changed.
    """

    uploads: bool
    verifies: bool

    def __init__(self, file_system: Any, patience: float) -> None:
        self._fs = file_system
        self._patience = patience
        self._stores: dict[float, Any] = {}  # by timeout, which applies to all requests of a store

    @abstractmethod
    def version(self, entry: dict[str, Any]) -> str:
        """Returns the version of an object, given its entry in a listing or its `info`."""

    @abstractmethod
    def write(self, path: str, data: bytes, version: str | None) -> str:
        """Replaces a version of a small object (None: creates it), and returns the new version."""

    @abstractmethod
    def delete(self, path: str, version: str) -> None:
        """Deletes a version of an object."""

    @property
    @abstractmethod
    def _address(self) -> str: ...  # the URL that requests go to

    @abstractmethod
    def _credentials(self) -> dict[str, Any]: ...  # as obstore wants them

    @abstractmethod
    def _open(self, bucket: str, shared: dict[str, Any]) -> Any: ...  # a store of obstore

    def create(self, path: str, parts: Sequence[memoryview], size: int) -> str | None:
        """Creates an object, and returns its version if the store has versions.

        Raises FileExistsError, FileNotFoundError if there is no such bucket, FSTimeoutError if
        there was no answer, and RequestError or ConnectionError for other failures.
        """
        from obstore.exceptions import AlreadyExistsError, BaseError  # reading needs no obstore

        find = partial(with_timeout, self._patience, self._credentials)
        find()  # its own errors explain better than obstore's what is wrong with the credentials
        bucket, key = path.split("/", 1)
        seconds = timeout_for(size, self._patience)
        if seconds not in self._stores:
            http = self._address.startswith("http://")
            shared = {
                "client_options": {"timeout": timedelta(seconds=seconds), "allow_http": http},
                "retry_config": {"max_retries": 0},
                "credential_provider": find,
            }
            self._stores[seconds] = self._open(bucket, shared)
        try:
            # put_async would often abort a process that ends soon after it.
            return self._stores[seconds].put(key, parts, mode="create")["version"]
        except AlreadyExistsError as error:
            raise FileExistsError(path) from error
        except BaseError as error:
            raise as_os_error(error) from error


class GoogleStore(ObjectStore):
    """A bucket in Google Cloud Storage, where generation 0 means that there is no object."""

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
        """Returns whether an object has this content. It sends one request; `info` sends two."""
        try:
            info = self._fs.call("GET", "b/{}/o/{}", *path.split("/", 1), json_out=True)
        except FileNotFoundError:
            return False
        expected = base64.b64encode(crc32c.to_bytes(4, "big")).decode()
        return int(info["size"]) == size and info.get("crc32c") == expected

    @property
    def _address(self) -> str:
        return self._fs._location

    def _open(self, bucket: str, shared: dict[str, Any]) -> Any:
        from obstore.store import GCSStore

        return GCSStore(bucket, base_url=self._address, **shared)

    def _credentials(self) -> dict[str, Any]:
        """Returns a token that is valid for some minutes; it is empty for anonymous access."""
        self._fs.credentials.maybe_refresh()
        credentials = self._fs.credentials.credentials
        if credentials is None:
            return {"token": "", "expires_at": None}
        expires = credentials.expiry and credentials.expiry.replace(tzinfo=UTC)
        return {"token": credentials.token, "expires_at": expires}


class S3Store(ObjectStore):
    """A bucket in S3. ETags are digests of the content, so two versions must differ in content."""

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

        # S3 refuses data that does not match this checksum, which the signature needs anyway.
        shared |= {"endpoint": self._address, "checksum_algorithm": "SHA256"}
        return store.S3Store(bucket, region=self._fs.connect().meta.region_name, **shared)

    def _credentials(self) -> dict[str, Any]:
        """Returns keys that are valid for at least ten minutes."""
        fs = self._fs

        async def find() -> Any:
            await fs.set_session()
            credentials = await fs.session.get_credentials()
            if credentials is None:
                raise RequestError(401, "no credentials for S3 were found")
            return await credentials.get_frozen_credentials()

        key, secret, token = (fs.key, fs.secret, fs.token) if fs.key else sync(fs.loop, find)[:3]
        expires = datetime.now(UTC) + timedelta(minutes=10)
        keys = {"access_key_id": key, "secret_access_key": secret, "token": token}
        return {**keys, "expires_at": expires}


def as_os_error(error: Exception) -> OSError:
    """Converts an error of obstore to an OSError with a short message: the code and message of the
    store's answer, or the message of the operating system."""
    text, _, details = str(error).partition("\n\nDebug source:\n")
    answer = re.search(r"status code: (\d+) ?([^:]*)", text)
    if answer is not None:
        messages = re.findall(r"<(?:Code|Message)>([^<]*)</", text)
        retryable = not RETRYABLE_CODES.isdisjoint(messages)
        return RequestError(0 if retryable else int(answer[1]), ": ".join(messages) or answer[0])
    if "TimedOut" in details:
        return FSTimeoutError("no answer")
    reason = re.search(r'(?:message|error): "([^"]+)"', details)
    return ConnectionError(reason[1] if reason else text.rpartition(" - ")[2])


def find_object_store(
    file_system: Any, protocols: tuple[str, ...], patience: float
) -> ObjectStore | None:
    """Returns the object store behind a file system; None if it is neither Google's nor S3."""
    if not {"gs", "gcs"}.isdisjoint(protocols):
        return GoogleStore(file_system, patience)
    if "s3" in protocols and hasattr(file_system, "connect"):
        return S3Store(file_system, patience)
    return None
