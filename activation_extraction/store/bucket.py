"""A folder in a bucket of Google Cloud Storage, S3 or Azure, by obstore.

obstore finds the credentials (Google's application default credentials or service account, the
AWS_* and AZURE_* variables, or the machine's own), and repeats reads that fail. The version of an
object is its ETag, which every answer and every listing has; a write to Google is conditional on
the generation that the same answer had. A write or a deletion is sent once: a second attempt at a
conditional write could not be told from somebody else's, and a second deletion may arrive late.
What obstore raises becomes a FolderError with the store's own words.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import obstore
from obstore import Bytes
from obstore.exceptions import BaseError, GenericError

from activation_extraction.store.answers import (
    Failure,
    Meaning,
    failure_of_obstore,
    setting_error,
)
from activation_extraction.store.bucket_kinds import BUCKET_KINDS, GOOGLE, BucketKind
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


class GoogleVersion(str):
    """The version of an object in a bucket of Google Cloud Storage: its ETag, as on other stores.

    Attributes:
        generation: The generation of the object. Google's writes are conditional on it, but no
            listing has it. Another one may have the same ETag, if it has the same content.
    """

    generation: str


class Bucket:
    """The folder at `url`. `LocalFolder` describes its methods; they raise FolderError."""

    _process: ClassVar[int | None] = None  # the first that asked; a fork of it would wait for ever

    def __init__(self, url: str, patience: float) -> None:
        scheme, _, path = url.partition("://")
        self._bucket, _, self._prefix = path.partition("/")
        self._kind, self._patience = BUCKET_KINDS[scheme], patience
        self.max_file_bytes = self._kind.max_request_bytes
        self._worked = False  # whether a request has ever succeeded

    def entries(self) -> dict[str, FileEntry | None]:
        prefix = self._prefix or None
        listing = self._ask(lambda: obstore.list_with_delimiter(self._store(0), prefix))
        files = {
            _last(entry["path"]): FileEntry(entry["size"], _tag(entry["e_tag"]))
            for entry in listing["objects"]
            if entry["path"] != self._prefix  # the object that consoles create for an empty folder
        }
        return {**dict.fromkeys(map(_last, listing["common_prefixes"])), **files}

    def head(self, name: str) -> FileEntry | None:
        with suppress(FileNotFoundError):
            metadata = self._ask(lambda: obstore.head(self._store(0), self._key(name)))
            return FileEntry(metadata["size"], self._version(metadata))
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
                if failure_of_obstore(error).status == 416:  # the range begins past the end
                    return Bytes(b""), version
                raise
            current = self._version(answer.meta)
            if version not in (None, current):  # S3 gateways ignore If-Match when they are read
                raise ChangedError
            if span is None:
                check_size(answer.meta["size"], most)
            return answer.bytes(), current

        with suppress(FileNotFoundError):
            return self._ask(get)
        return None

    def write(self, name: str, parts: Sequence[memoryview], expected: str | None) -> str | None:
        size = sum(part.nbytes for part in parts)

        def put() -> str | None:
            store, key = self._store(size, may_retry=False), self._key(name)
            mode: Any = {None: "create", ANY: "overwrite"}.get(expected, {"e_tag": expected})
            if isinstance(expected, GoogleVersion):
                mode["version"] = expected.generation
            # put_async would often abort a process that ends soon after it.
            answer = obstore.put(store, key, parts, mode=mode, use_multipart=False)
            return self._version(answer)

        try:
            return self._ask(put)
        except FileNotFoundError as error:
            raise ChangedError from error

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            store = self._store(0, may_retry=False)
            self._ask(lambda: obstore.delete(store, self._key(name)))

    def _version(self, answer: Mapping[str, Any]) -> str | None:
        """Returns the version of an object, as in an answer about this object alone."""
        tag = _tag(answer["e_tag"])
        if self._kind is not GOOGLE or tag is None:
            return tag
        version = GoogleVersion(tag)
        version.generation = answer["version"]
        return version

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _store(self, size: int, may_retry: bool = True) -> Any:
        """Returns the bucket for requests that move `size` bytes.

        A timeout begins with the request and ignores how much of its body has been moved, so it
        cannot tell a slow line from a silent server. So each request gets the patience and the time
        that its bytes need on a slow line, in multiples of the patience, because each timeout needs
        a client of its own. A write is given up before that (sending.py).
        """
        seconds = self._patience * math.ceil(1 + size / MIN_BYTES_PER_SECOND / self._patience)
        retries = RETRIES if may_retry else 0
        try:
            settings = tuple(sorted(self._kind.settings(self._bucket).items()))
        except ValueError as error:
            raise FolderError(str(error)) from error
        try:
            return _connect(self._kind, settings, seconds, self._patience, retries)
        except (
            BaseError,
            OSError,
            ValueError,
        ) as error:  # obstore cannot use the settings that it reads
            raise FolderError(f"{setting_error(error)}; {self._kind.renew}") from error

    def _ask(self, action: Callable[[], Any]) -> Any:
        """Sends a request and returns its answer.

        Args:
            action: Function that sends the request with obstore.

        Raises:
            FileNotFoundError: The object does not exist.
            FolderError: The request failed for another reason.
        """
        Bucket._process = Bucket._process or os.getpid()
        if Bucket._process != os.getpid():
            raise FolderError(FORKED)
        try:
            answer = action()
            self._worked = True
            return answer
        except (BaseError, FileNotFoundError) as error:
            raise self._failure(failure_of_obstore(error)) from error

    def _failure(self, failure: Failure) -> FileNotFoundError | FolderError:
        """Returns the exception for a failed request, in the terms of this kind of store."""
        reason, kind = failure.reason, self._kind
        # An address, a setting or a machine's credentials that have worked may work again.
        final = not self._worked
        match failure.meaning:
            case Meaning.MISSING:
                return FileNotFoundError(reason)
            case Meaning.CHANGED:
                return ChangedError()
            case Meaning.NO_BUCKET:
                return FolderError(f"no such bucket: {self._bucket}")
            case Meaning.CREDENTIALS:
                state = "the credentials are missing, invalid or have expired"
                return FolderError(f"{state} ({reason}); {kind.renew}")
            case Meaning.NO_CREDENTIALS:
                state = "no credentials were found, nor given by the machine"
                return FolderError(f"{state} ({reason}); {kind.renew}", final)
            case Meaning.FORBIDDEN:
                return FolderError(f"permission denied ({reason}); needed: {kind.permission}")
            case Meaning.ELSEWHERE:
                state = "the bucket is in another region or at another address"
                return FolderError(f"{state} ({reason}); {kind.address}")
            case Meaning.UNREACHABLE:
                return FolderError(f"{reason}; {kind.address}", final)
            case Meaning.UNUSABLE:
                return FolderError(reason, final)
            case Meaning.REFUSED:
                return FolderError(reason)
            case Meaning.MAY_PASS:
                return FolderError(reason, final=False)


@lru_cache(64)
def _connect(
    kind: BucketKind,
    settings: tuple[tuple[str, Any], ...],
    seconds: float,
    patience: float,
    retries: int,
) -> Any:
    """Returns an obstore client, which keeps connections and credentials for all folders."""
    client: dict[str, Any] = {"timeout": timedelta(seconds=seconds)}
    if any(str(value).startswith("http://") for _, value in settings):
        client["allow_http"] = True
    if retries:  # it counts from the beginning of a request: no long upload could end within it
        client["read_timeout"] = timedelta(seconds=min(READ_TIMEOUT, patience))
    retry = {"max_retries": retries, "retry_timeout": timedelta(seconds=patience)}
    return kind.store(**dict(settings), client_options=client, retry_config=retry)


def _tag(tag: str | None) -> str | None:
    """Returns an ETag in quotes, as in the headers of answers.

    Azure's listings leave out the quotes.
    """
    return f'"{tag}"' if tag and not tag.endswith('"') else tag


def _last(path: str) -> str:
    return path.rsplit("/", 1)[-1]
