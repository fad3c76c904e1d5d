"""Bucket: a folder in a bucket of Google Cloud Storage, S3 or Azure, which obstore accesses.

obstore finds the credentials (Google's application default credentials or service account, the
AWS_* and AZURE_* variables, or the machine's own), and repeats reads that fail. Writes and
deletions are sent only once. If the answer to a conditional write is lost, a second attempt may be
refused because the first one has succeeded, and this cannot be told from a write of another
process. A second deletion may arrive late, and delete a file that was written in the meantime.

The version of an object is its ETag, which all answers and listings contain. Writes to Google are
conditional on the generation of the object instead (`GoogleVersion`). An exception of obstore
becomes a FolderError with the reason that the store gave (answers.py).
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
    FailureKind,
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

# Number of times that obstore repeats a failed read, within a second or two. `Folder` repeats the
# read after that.
RETRIES = 3
# Seconds after which a read is sent again if no further byte of its answer has arrived.
READ_TIMEOUT = 60.0
# Speed of an upload on a slow line, in bytes per second: a line of 16 Mbit/s that 16 uploads share.
MIN_BYTES_PER_SECOND = 0.125e6
GB = 10**9
FORKED = (
    "this process was forked from one that had used a bucket, and lacks its threads; start it "
    'otherwise, as DataLoader(..., multiprocessing_context="spawn") does'
)


class GoogleVersion(str):
    """The version of an object in Google Cloud Storage: its ETag, with its generation.

    Attributes:
        generation: Generation of the object, on which Google's writes are conditional. Listings do
            not contain generations, so the ETag is used to compare versions. Two generations with
            the same content may have the same ETag.
    """

    generation: str


class Bucket:
    """A folder in a bucket.

    The methods do the same as the methods of `LocalFolder` (local_files.py), whose docstrings
    describe them. But they raise FolderError where those raise another OSError.

    Args:
        url: URL of the folder, such as "gs://bucket/folder".
        patience_seconds: Seconds for which obstore repeats failing reads. The timeout of a single
            request is at least this time plus the time that a slow connection needs to transfer the
            bytes of the request.

    Attributes:
        max_file_bytes: Largest size of a file that can be written, in bytes.
    """

    # Id of the one process that may send requests: it sent the first one. None before the first
    # request. A fork of this process lacks obstore's threads, so its requests would wait forever.
    _id_of_sending_process: ClassVar[int | None] = None

    def __init__(self, url: str, patience_seconds: float) -> None:
        scheme, _, bucket_and_prefix = url.partition("://")
        self._bucket_name, _, self._key_prefix = bucket_and_prefix.partition("/")
        self._bucket_kind = BUCKET_KINDS[scheme]
        self._patience_seconds = patience_seconds
        self.max_file_bytes = self._bucket_kind.max_request_bytes
        # After a request of this object has succeeded, some kinds of failures count as temporary
        # (see `_failure`).
        self._any_request_succeeded = False

    def entries(self) -> dict[str, FileEntry | None]:
        listed_prefix = self._key_prefix or None
        bucket_listing = self._ask(
            lambda: obstore.list_with_delimiter(self._store(0), listed_prefix)
        )
        entry_by_file_or_folder_name: dict[str, FileEntry | None] = {}
        for folder_path in bucket_listing["common_prefixes"]:
            entry_by_file_or_folder_name[_file_name(folder_path)] = None
        for object_meta in bucket_listing["objects"]:
            # If a user creates an empty folder in the web console of a store, the store contains an
            # object with the name of the folder. This object is not a file in the folder.
            if object_meta["path"] != self._key_prefix:
                file_name = _file_name(object_meta["path"])
                e_tag = _quoted_tag(object_meta["e_tag"])
                entry_by_file_or_folder_name[file_name] = FileEntry(object_meta["size"], e_tag)
        return entry_by_file_or_folder_name

    def head(self, name: str) -> FileEntry | None:
        with suppress(FileNotFoundError):
            object_meta = self._ask(lambda: obstore.head(self._store(0), self._key(name)))
            return FileEntry(object_meta["size"], self._version(object_meta))
        return None

    def read(
        self,
        name: str,
        version: str | None,
        max_bytes: int | None,
        byte_range: tuple[int, int] | None,
    ) -> tuple[Bytes, str | None] | None:
        get_options: GetOptions = {} if version is None else {"if_match": version}
        if byte_range is not None:
            get_options["range"] = byte_range
        max_answer_bytes = max_bytes or GB if byte_range is None else byte_range[1] - byte_range[0]

        def get() -> tuple[Bytes, str | None]:
            try:
                get_result = obstore.get(
                    self._store(max_answer_bytes), self._key(name), options=get_options
                )
            except GenericError as error:
                if failure_of_obstore(error).http_status == 416:  # the range begins past the end
                    return Bytes(b""), version
                raise
            current_version = self._version(get_result.meta)
            # Some gateways to S3 ignore the header If-Match of reads, so the version of the answer
            # is compared with the requested version.
            if version not in (None, current_version):
                raise ChangedError
            if byte_range is None:
                check_size(get_result.meta["size"], max_bytes)
            return get_result.bytes(), current_version

        with suppress(FileNotFoundError):
            return self._ask(get)
        return None

    def write(self, name: str, buffers: Sequence[memoryview], expected: str | None) -> str | None:
        num_file_bytes = sum(buffer.nbytes for buffer in buffers)
        write_mode: Any  # the condition under which obstore writes the object
        if expected is None:
            write_mode = "create"
        elif expected == ANY:
            write_mode = "overwrite"
        elif isinstance(expected, GoogleVersion):
            write_mode = {"e_tag": expected, "version": expected.generation}
        else:
            write_mode = {"e_tag": expected}

        def put() -> str | None:
            store_client = self._store(num_file_bytes, may_retry=False)
            # `put` is used because `put_async` often aborts a process that ends soon afterwards.
            new_object_meta = obstore.put(
                store_client, self._key(name), buffers, mode=write_mode, use_multipart=False
            )
            return self._version(new_object_meta)

        try:
            return self._ask(put)
        except FileNotFoundError as error:
            raise ChangedError from error

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            store_client = self._store(0, may_retry=False)
            self._ask(lambda: obstore.delete(store_client, self._key(name)))

    def _version(self, object_meta: Mapping[str, Any]) -> str | None:
        """Returns the version of an object; None if the store has no versions.

        Args:
            object_meta: Metadata of the object, from the answer to a request for this object alone.
                A listing is not enough, because the listings of Google lack the generation.
        """
        e_tag = _quoted_tag(object_meta["e_tag"])
        if self._bucket_kind is not GOOGLE or e_tag is None:
            return e_tag
        google_version = GoogleVersion(e_tag)
        google_version.generation = object_meta["version"]
        return google_version

    def _key(self, name: str) -> str:
        return f"{self._key_prefix}/{name}" if self._key_prefix else name

    def _store(self, num_transfer_bytes: int, may_retry: bool = True) -> Any:
        """Returns an obstore client whose timeout suits requests of a certain size.

        obstore counts a timeout from the beginning of the request, and cannot tell a slow line from
        a server that does not answer. So the timeout is the sum of `patience_seconds` (an argument
        of the class) and the seconds that the bytes need on a slow line. It is rounded up to a
        multiple of `patience_seconds`, so that few clients are needed, because each timeout needs a
        client of its own. sending.py gives up a write before its timeout.

        Args:
            num_transfer_bytes: Number of bytes that a request transfers.
            may_retry: Whether obstore may repeat a request that fails.

        Raises:
            FolderError: If the settings for the store cannot be used.
        """
        timeout_seconds = self._patience_seconds * math.ceil(
            1 + num_transfer_bytes / MIN_BYTES_PER_SECOND / self._patience_seconds
        )
        max_retries = RETRIES if may_retry else 0
        try:
            client_argument_pairs = tuple(
                sorted(self._bucket_kind.make_client_arguments(self._bucket_name).items())
            )
        except ValueError as error:
            raise FolderError(str(error)) from error
        try:
            return _connect(
                self._bucket_kind,
                client_argument_pairs,
                timeout_seconds,
                self._patience_seconds,
                max_retries,
            )
        except (BaseError, OSError, ValueError) as error:  # obstore cannot use the settings
            raise FolderError(
                f"{setting_error(error)}; {self._bucket_kind.credential_help}"
            ) from error

    def _ask(self, action: Callable[[], Any]) -> Any:
        """Sends a request and returns its answer.

        Args:
            action: Function that sends the request with obstore, and returns the answer or the part
                of it that the caller of `_ask` needs.

        Raises:
            FileNotFoundError: If the object does not exist.
            FolderError: If the request failed for another reason.
        """
        Bucket._id_of_sending_process = Bucket._id_of_sending_process or os.getpid()
        if Bucket._id_of_sending_process != os.getpid():
            raise FolderError(FORKED)
        try:
            request_result = action()
            self._any_request_succeeded = True
            return request_result
        except (BaseError, FileNotFoundError) as error:
            raise self._failure(failure_of_obstore(error)) from error

    def _failure(self, failure: Failure) -> FileNotFoundError | FolderError:
        """Returns the exception to raise for a failed request.

        The message of the exception states the reason of the failure, and the remedies for this
        kind of bucket.

        Args:
            failure: Reason why the request failed.
        """
        failure_reason = failure.reason
        bucket_kind = self._bucket_kind
        # If a request has succeeded before, the address, the settings and the machine's credentials
        # are valid, so the same request may succeed later.
        is_failure_permanent = not self._any_request_succeeded
        match failure.kind:
            case FailureKind.MISSING:
                return FileNotFoundError(failure_reason)
            case FailureKind.CHANGED:
                return ChangedError()
            case FailureKind.NO_BUCKET:
                return FolderError(f"no such bucket: {self._bucket_name}")
            case FailureKind.CREDENTIALS:
                problem_message = "the credentials are missing, invalid or have expired"
                return FolderError(
                    f"{problem_message} ({failure_reason}); {bucket_kind.credential_help}"
                )
            case FailureKind.NO_CREDENTIALS:
                problem_message = "no credentials were found, nor given by the machine"
                return FolderError(
                    f"{problem_message} ({failure_reason}); {bucket_kind.credential_help}",
                    is_failure_permanent,
                )
            case FailureKind.FORBIDDEN:
                return FolderError(
                    f"permission denied ({failure_reason}); needed: {bucket_kind.permission_help}"
                )
            case FailureKind.ELSEWHERE:
                problem_message = "the bucket is in another region or at another address"
                return FolderError(
                    f"{problem_message} ({failure_reason}); {bucket_kind.address_help}"
                )
            case FailureKind.UNREACHABLE:
                return FolderError(
                    f"{failure_reason}; {bucket_kind.address_help}", is_failure_permanent
                )
            case FailureKind.UNUSABLE:
                return FolderError(failure_reason, is_failure_permanent)
            case FailureKind.REFUSED:
                return FolderError(failure_reason)
            case FailureKind.MAY_PASS:
                return FolderError(failure_reason, is_permanent=False)


@lru_cache(64)
def _connect(
    kind: BucketKind,
    client_argument_pairs: tuple[tuple[str, Any], ...],
    timeout: float,
    patience_seconds: float,
    max_retries: int,
) -> Any:
    """Returns an obstore client, which is cached so that folders share connections and credentials.

    Args:
        kind: Kind of the store.
        client_argument_pairs: Name and value of each argument of `kind.client_class`.
        timeout: Seconds that a request may take.
        patience_seconds: Seconds for which obstore may repeat a request.
        max_retries: Largest number of repetitions; 0 for a client that sends every request once.
    """
    client_options: dict[str, Any] = {"timeout": timedelta(seconds=timeout)}
    if any(str(argument).startswith("http://") for _, argument in client_argument_pairs):
        client_options["allow_http"] = True
    # The read timeout also counts from the beginning of a request, so a long upload would always
    # exceed it. Therefore clients for writes, which have no retries, get no read timeout.
    if max_retries:
        client_options["read_timeout"] = timedelta(seconds=min(READ_TIMEOUT, patience_seconds))
    retry_options = {
        "max_retries": max_retries,
        "retry_timeout": timedelta(seconds=patience_seconds),
    }
    return kind.client_class(
        **dict(client_argument_pairs), client_options=client_options, retry_config=retry_options
    )


def _quoted_tag(e_tag: str | None) -> str | None:
    """Returns an ETag in quotes, as headers of answers contain it; None if there is no ETag.

    Quotes are added if they are missing, because the listings of Azure leave them out.
    """
    return f'"{e_tag}"' if e_tag and not e_tag.endswith('"') else e_tag


def _file_name(path: str) -> str:
    return path.rsplit("/", 1)[-1]
