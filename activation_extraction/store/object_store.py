"""Uploads from memory to Google Cloud Storage and S3: one conditional PUT for each object.

obstore, which is written in Rust, sends it: without Python's lock, and without a copy of the data.
Where the bucket is and who we are there, fsspec's file system says; requests that fail are
repeated by `Folder`.
"""

import base64
import re
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


class ObjectStore:
    """One bucket, of Google's or of S3. patience: seconds, as in `Folder`.

    verifies: whether the store itself refuses what does not arrive as it was sent.
    """

    def __init__(self, file_system: Any, google: bool, bucket: str, patience: float) -> None:
        self._fs = file_system
        self._google = google
        self.verifies = not google
        self._bucket = bucket
        self._patience = patience
        find = partial(google_credentials if google else s3_credentials, file_system)
        self._credentials = partial(in_time, patience, find)
        self._stores: dict[float, Any] = {}  # by time-out, which each has for all of its requests

    def create(self, key: str, parts: Sequence[memoryview], size: int) -> str | None:
        """Creates an object; returns its version, if objects have versions there.

        Raises FileExistsError, FileNotFoundError if there is no such bucket, FSTimeoutError if
        nobody answered, and RequestError or ConnectionError.
        """
        from obstore.exceptions import AlreadyExistsError, BaseError

        self._credentials()  # what is wrong with them is better said by their own errors
        seconds = time_for(size, self._patience)
        if seconds not in self._stores:
            self._stores[seconds] = self._open(seconds)
        try:
            # Not put_async: a process that ends soon after it is often aborted.
            return self._stores[seconds].put(key, parts, mode="create")["version"]
        except AlreadyExistsError as error:
            raise FileExistsError(key) from error
        except BaseError as error:
            raise in_python(error) from error

    def holds(self, key: str, size: int, crc32c: int) -> bool:
        """Whether Google reports an object of this content, in one request; `info` sends two."""
        try:
            found = self._fs.call("GET", "b/{}/o/{}", self._bucket, key, json_out=True)
        except FileNotFoundError:
            return False
        expected = base64.b64encode(crc32c.to_bytes(4, "big")).decode()
        return int(found["size"]) == size and found.get("crc32c") == expected

    def _open(self, seconds: float) -> Any:
        from obstore.store import GCSStore, S3Store  # reading needs no obstore

        address = self._fs._location if self._google else self._fs.connect().meta.endpoint_url
        http = address.startswith("http://")
        shared: Any = {
            "client_options": {"timeout": timedelta(seconds=seconds), "allow_http": http},
            "retry_config": {"max_retries": 0},
            "credential_provider": self._credentials,
        }
        if self._google:
            return GCSStore(self._bucket, base_url=address, **shared)
        # S3 refuses what does not have this checksum, which the signature needs anyway.
        region = self._fs.connect().meta.region_name
        shared |= {"endpoint": address, "region": region, "checksum_algorithm": "SHA256"}
        return S3Store(self._bucket, **shared)


def google_credentials(file_system: Any) -> dict[str, Any]:
    """The credentials of a gcsfs, fresh for some minutes; an empty token if it is anonymous."""
    file_system.credentials.maybe_refresh()
    found = file_system.credentials.credentials
    if found is None:
        return {"token": "", "expires_at": None}
    return {"token": found.token, "expires_at": found.expiry and found.expiry.replace(tzinfo=UTC)}


def s3_credentials(file_system: Any) -> dict[str, Any]:
    """The credentials of an s3fs, which last for ten minutes at least."""

    async def find() -> Any:
        await file_system.set_session()
        found = await file_system.session.get_credentials()
        if found is None:
            raise RequestError(401, "no credentials for S3 were found")
        return await found.get_frozen_credentials()

    if file_system.key:
        key, secret, token = file_system.key, file_system.secret, file_system.token
    else:
        key, secret, token = sync(file_system.loop, find)[:3]
    expires = datetime.now(UTC) + timedelta(minutes=10)
    keys = {"access_key_id": key, "secret_access_key": secret, "token": token}
    return {**keys, "expires_at": expires}


def in_python(error: Exception) -> OSError:
    """What obstore says of an error, briefly: the answer's code and message, or the system's."""
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
    file_system: Any, protocols: tuple[str, ...], bucket: str, patience: float
) -> ObjectStore | None:
    """None if it is another kind of store, or opened with options that obstore would not honour."""
    if not {"gs", "gcs"}.isdisjoint(protocols) and not file_system.requester_pays:
        return ObjectStore(file_system, True, bucket, patience)
    honoured = "s3" in protocols and hasattr(file_system, "connect")
    if honoured and not file_system.anon and not file_system.s3_additional_kwargs:
        return ObjectStore(file_system, False, bucket, patience)
    return None
