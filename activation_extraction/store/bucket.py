"""A folder in a bucket of Google Cloud Storage, S3 or Azure, by obstore.

obstore finds the credentials (Google's application default credentials or service account, the
AWS_* and AZURE_* variables, or the machine's own), and repeats reads that fail. The version of an
object is its ETag, which every answer and every listing has. A conditional write is sent once,
because a second attempt could not be told from somebody else's write. What obstore raises becomes a
FolderError with the store's own words.
"""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import obstore
from obstore import Bytes
from obstore.exceptions import BaseError, GenericError
from obstore.store import AzureStore, GCSStore, S3Store

from activation_extraction.store.local_files import (
    ANY,
    ChangedError,
    FileEntry,
    FolderError,
    check_size,
)

if TYPE_CHECKING:
    from obstore import GetOptions

RETRIES = 3  # by obstore, within a second or two; Folder goes on, and says so
READ_TIMEOUT = 60.0  # seconds without a byte of an answer, after which it is asked for again
MIN_BYTES_PER_SECOND = 0.125e6  # 16 uploads that share 16 Mbit/s
GB = 10**9
FORKED = (
    "this process was forked from one that had used a bucket, and lacks its threads; start it "
    'otherwise, as DataLoader(..., multiprocessing_context="spawn") does'
)
DETAILS = "\n\nDebug source:\n"  # in an obstore error: what follows is Rust


def _open_google(bucket: str, options: dict[str, Any]) -> GCSStore:
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if emulator:
        options["base_url"] = emulator if "://" in emulator else f"http://{emulator}"
        options["credential_provider"] = lambda: {"token": "", "expires_at": None}
    return GCSStore(bucket, **options)


def _open_s3(bucket: str, options: dict[str, Any]) -> S3Store:
    return S3Store(bucket, checksum_algorithm="SHA256", **options)  # S3 compares it


def _open_azure(container: str, options: dict[str, Any]) -> AzureStore:
    name, _, host = container.partition("@")  # abfs://container@account.dfs.core.windows.net
    if host:
        options["account_name"] = host.split(".")[0]
    return AzureStore(name, **options)


class BucketKind(NamedTuple):
    """A kind of store. largest: the bytes that one request may write; permission: what a refused
    request needs; renew: how credentials are given; endpoint: the variable with another address."""

    open: Callable[[str, dict[str, Any]], Any]
    largest: int
    permission: str
    renew: str
    endpoint: str


GOOGLE = BucketKind(
    _open_google,
    5 * 2**40,
    "roles/storage.objectUser on the bucket",
    "run `gcloud auth application-default login`, or name a service account's key in "
    "GOOGLE_APPLICATION_CREDENTIALS",
    "STORAGE_EMULATOR_HOST",
)
S3 = BucketKind(
    _open_s3,
    5 * 2**30,
    "s3:ListBucket on the bucket; s3:GetObject, s3:PutObject and s3:DeleteObject on its objects",
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role",
    "AWS_ENDPOINT_URL",
)
AZURE = BucketKind(
    _open_azure,
    5000 * 2**20,
    "the role Storage Blob Data Contributor on the container",
    "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or log in with `az login`",
    "AZURE_STORAGE_ENDPOINT",
)
BUCKETS = {
    **dict.fromkeys(("gs", "gcs"), GOOGLE),
    **dict.fromkeys(("s3", "s3a"), S3),
    **dict.fromkeys(("az", "abfs", "abfss"), AZURE),
}


class Bucket:
    """The folder at `url`. `LocalFolder` describes its methods; they raise FolderError."""

    _process: ClassVar[int | None] = None  # the first that asked; a fork of it would wait for ever

    def __init__(self, url: str, patience: float) -> None:
        scheme, _, path = url.partition("://")
        self._bucket, _, self._prefix = path.partition("/")
        self._kind, self._patience = BUCKETS[scheme], patience
        self.largest = self._kind.largest
        self._worked = False  # whether a request has ever succeeded

    def entries(self) -> dict[str, FileEntry | None]:
        prefix = self._prefix or None
        found = self._ask(lambda: obstore.list_with_delimiter(self._store(0), prefix))
        files = {
            _last(entry["path"]): FileEntry(entry["size"], entry["e_tag"])
            for entry in found["objects"]
            if entry["path"] != self._prefix  # what consoles leave in an empty folder
        }
        return {**dict.fromkeys(map(_last, found["common_prefixes"])), **files}

    def head(self, name: str) -> FileEntry | None:
        with suppress(FileNotFoundError):
            found = self._ask(lambda: obstore.head(self._store(0), self._key(name)))
            return FileEntry(found["size"], found["e_tag"])
        return None

    def read(
        self, name: str, version: str | None, most: int | None, span: tuple[int, int] | None
    ) -> tuple[Bytes, str | None] | None:
        options: GetOptions = {} if version is None else {"if_match": version}
        if span is not None:
            options["range"] = span
        size = most or GB if span is None else span[1] - span[0]

        def get() -> tuple[Bytes, str | None]:
            try:
                answer = obstore.get(self._store(size), self._key(name), options=options)
            except GenericError as error:
                if _status(error) == 416:  # the range begins past the end
                    return Bytes(b""), version
                raise
            if span is None:
                check_size(answer.meta["size"], most)
            return answer.bytes(), answer.meta["e_tag"]

        with suppress(FileNotFoundError):
            return self._ask(get)
        return None

    def write(self, name: str, parts: Sequence[memoryview], expected: str | None) -> str | None:
        size = sum(part.nbytes for part in parts)

        def put() -> str | None:
            store, key = self._store(size, may_retry=expected == ANY), self._key(name)
            mode: Any = {None: "create", ANY: "overwrite"}.get(expected, {"e_tag": expected})
            if "e_tag" in mode and self._kind is GOOGLE:
                # Google compares generations, which no listing has.
                found = obstore.head(self._store(0), key)
                if found["e_tag"] != expected:
                    raise ChangedError
                mode["version"] = found["version"]
            # put_async would often abort a process that ends soon after it.
            return obstore.put(store, key, parts, mode=mode, use_multipart=False)["e_tag"]

        try:
            return self._ask(put)
        except FileNotFoundError as error:
            raise ChangedError from error

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._ask(lambda: obstore.delete(self._store(0), self._key(name)))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _store(self, size: int, may_retry: bool = True) -> Any:
        """Returns the bucket for requests that move `size` bytes.

        A timeout begins with the request and ignores how much of its body has been moved, so it
        cannot tell a slow line from a silent server. So each request gets the patience, or the time
        that its bytes need on a slow line, whichever is longer.
        """
        seconds = max(self._patience, 2 ** size.bit_length() / MIN_BYTES_PER_SECOND)
        endpoint = os.environ.get(self._kind.endpoint, "")
        retries = RETRIES if may_retry else 0
        try:
            return _connect(self._kind, self._bucket, endpoint, seconds, self._patience, retries)
        except (BaseError, OSError, ValueError) as error:  # of the settings that it finds
            raise FolderError(f"{_message(error)}; {self._kind.renew}") from error

    def _ask(self, action: Callable[[], Any]) -> Any:
        """Returns the result of a request. Raises FileNotFoundError if the object is missing."""
        Bucket._process = Bucket._process or os.getpid()
        if Bucket._process != os.getpid():
            raise FolderError(FORKED)
        try:
            result = action()
            self._worked = True
            return result
        except (BaseError, FileNotFoundError) as error:
            text = str(error).partition(DETAILS)[0]
            if "NoSuchBucket" in text or "ContainerNotFound" in text:
                raise FolderError(f"no such bucket: {self._bucket}") from error
            if isinstance(error, FileNotFoundError):
                raise
            raise self._explained(error) from error

    def _explained(self, error: BaseError) -> FolderError:
        """Returns an obstore error in short: the code and message of the store's answer, or what
        the operating system says. Nothing else of it is shown: it may hold secrets."""
        text, _, details = str(error).partition(DETAILS)
        status, renew = _status(error), self._kind.renew
        if status:
            said = ": ".join(re.findall(r"<(?:Code|Message)>([^<]*)</", text))
            reason = said or text.rpartition("status code: ")[2].partition(":")[0]
        elif "TimedOut" in details:
            reason = "no answer"
        elif found := re.search(r'(?:message|error): "([^"]+)"', details):
            reason = found[1]
        else:
            reason = "the connection broke" if "HTTP error" in text else _message(error)
        if re.search("169.254|metadata.google|token request", text):
            # A machine that has given credentials before will do so again.
            reason = f"no credentials were found, nor given by the machine ({reason})"
            return FolderError(f"{reason}; {renew}", final=not self._worked)
        if status in (404, 412):  # S3 says 404 of a version that is to be replaced and is gone
            return ChangedError()
        if status == 401:
            reason = f"the credentials are missing, invalid or have expired ({reason}); {renew}"
        if status == 403:
            reason = f"permission denied ({reason}); needed: {self._kind.permission}"
        return FolderError(reason, is_final(status) or not (status or type(error) is GenericError))


@lru_cache(64)
def _connect(
    kind: BucketKind, bucket: str, endpoint: str, seconds: float, patience: float, retries: int
) -> Any:
    """Returns an obstore client, which keeps connections and credentials for all folders."""
    client = {
        "timeout": timedelta(seconds=seconds),
        "allow_http": bool(endpoint) and not endpoint.startswith("https://"),
    }
    if retries:  # while the answer to a long upload begins late
        client["read_timeout"] = timedelta(seconds=min(READ_TIMEOUT, patience))
    retry = {"max_retries": retries, "retry_timeout": timedelta(seconds=patience)}
    return kind.open(bucket, {"client_options": client, "retry_config": retry})


def is_final(status: int) -> bool:
    """Returns whether a request that got this HTTP status would fail again."""
    return 400 <= status < 500 and status not in (408, 409, 425, 429)


def _status(error: BaseError) -> int:
    """Returns the HTTP status of the answer that an error is about; 0 if there was none."""
    answer = re.search(r"status code: (\d+)", str(error).partition(DETAILS)[0])
    return int(answer[1]) if answer else 0


def _message(error: BaseException) -> str:
    return str(error).partition(DETAILS)[0].rpartition(" error: ")[2]


def _last(path: str) -> str:
    return path.rsplit("/", 1)[-1]
