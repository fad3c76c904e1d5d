"""HubFolder: a folder in a repository of the Hugging Face hub, which can be read but not written.

All files are read from the same git commit, whatever is pushed to the repository meanwhile. A file
or a range of it is read by a single request, straight into memory: nothing is stored in the hub's
cache on this machine. The file system of huggingface_hub is not used for two reasons: it would list
the folder before it reads a file, and it keeps the listings in a cache that several threads cannot
change safely at the same time. folder.py repeats failed requests.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from urllib.parse import quote, unquote

from activation_extraction.common.errors import InputError, install_advice, one_line
from activation_extraction.common.retries import hub_unreachable
from activation_extraction.store.answers import FailureKind, failure_kind_of
from activation_extraction.store.local_files import FileEntry, FolderError, check_size

# URL of a folder in a repository on the hub, such as hf://datasets/ORG/NAME@REVISION/PATH. Models
# need no prefix before ORG. The pattern does not match URLs of the hub's buckets. fsspec reads them
# instead of this module, because their API differs from the API of repositories.
REPOSITORY_URL = re.compile(
    r"hf://(?:(?P<kind>datasets|spaces|models)/)?"
    r"(?P<name>(?!(?:datasets|spaces|models|buckets|kernels)/)[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?"
    r"(?:/(?P<path>.*))?"
)
GIT_COMMIT_ID = re.compile("[0-9a-f]{40}")
# Prefix before ORG in a URL (None if there is none) -> kind of the repository, as requests to the
# hub name it.
KINDS = {"datasets": "dataset", "spaces": "space", "models": "model", None: "model"}
# Name of each kind of repository in messages.
NOUNS = {"dataset": "data set", "space": "space", "model": "model"}
TIMEOUT = 60.0  # largest number of seconds for which the hub may send nothing
# Largest size in bytes of a file from which this module cuts out a range if the server ignores the
# header Range and sends the whole file.
MAX_BYTES_WITHOUT_RANGES = 64 * 2**20


def is_repository(url: str) -> bool:
    """Returns whether a URL names a repository on the hub, or a folder in a repository."""
    return REPOSITORY_URL.fullmatch(url) is not None


class HubFolder:
    """A folder in a repository of the Hugging Face hub, which can be read but not written.

    The methods do the same as the methods of `LocalFolder` (local_files.py), whose docstrings
    describe them. They raise FolderError if the hub refuses a request. If the hub does not answer,
    the exception of the HTTP client may be passed on. Files have no versions, because the files of
    a git commit never change.

    Args:
        url: URL of the folder, for which `is_repository` is True.

    Raises:
        InputError: If the package huggingface_hub is not installed.
    """

    max_file_bytes = None

    def __init__(self, url: str) -> None:
        try:
            # The module is not used here. The import only finds out whether the package is
            # installed, because folders outside of the hub can be read without it.
            import huggingface_hub  # noqa: F401
        except ImportError as error:
            missing_package_message = (
                f"{url}: needs huggingface_hub; {install_advice('huggingface_hub')}"
            )
            raise InputError(missing_package_message) from error
        url_match = REPOSITORY_URL.fullmatch(url)
        if url_match is None:
            raise ValueError(f"{url}: is not the URL of a repository on the hub")
        self._repository_kind = KINDS[url_match["kind"]]
        self._url_prefix = f"{url_match['kind']}/" if url_match["kind"] else ""
        self._repository_name = url_match["name"]
        self._revision = unquote(url_match["revision"] or "main")
        self._path_in_repository = (url_match["path"] or "").strip("/")

    @property
    def url(self) -> str:
        """The URL of the folder, with the revision from which it is read (see `pin`)."""
        repository_url = (
            f"hf://{self._url_prefix}{self._repository_name}@{quote(self._revision, safe='')}"
        )
        return (
            f"{repository_url}/{self._path_in_repository}"
            if self._path_in_repository
            else repository_url
        )

    def pin(self) -> None:
        """Replaces the revision of this folder by the git commit to which it points now.

        A single request determines this git commit, and all files are then read from it. If the
        revision is the id of a git commit already, nothing is done.

        Raises:
            FolderError: If the request failed. The attribute `is_permanent` of this error is True
                if there is no such repository or revision, if the user's token may not read it, or
                if the hub cannot be reached.
        """
        from huggingface_hub import HfApi, constants

        if GIT_COMMIT_ID.fullmatch(self._revision):
            return
        try:
            with self._as_folder_errors():
                repository_info = HfApi().repo_info(
                    self._repository_name,
                    repo_type=self._repository_kind,
                    revision=self._revision,
                    timeout=TIMEOUT,
                )
        except FolderError:
            raise
        except Exception as error:  # the exceptions of the HTTP client depend on its version
            if connection_problem := hub_unreachable(constants.ENDPOINT):
                problem_message = f"the hub cannot be reached ({one_line(connection_problem)})"
                raise FolderError(problem_message) from error
            raise
        self._revision = str(repository_info.sha)

    def entries(self) -> dict[str, FileEntry | None]:
        from huggingface_hub import constants, get_session
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        tree_path = "/".join(
            ["tree", quote(self._revision, safe=""), quote(self._path_in_repository)]
        ).rstrip("/")
        page_url = (
            f"{constants.ENDPOINT}/api/{self._repository_kind}s/{self._repository_name}/{tree_path}"
        )
        request_headers = build_hf_headers()
        entry_by_name: dict[str, FileEntry | None] = {}
        with self._as_folder_errors():
            while page_url:
                page_response = get_session().get(
                    page_url, headers=request_headers, timeout=TIMEOUT
                )
                try:
                    hf_raise_for_status(page_response)
                except EntryNotFoundError:  # the git commit contains no such folder
                    return {}
                for entry_json in page_response.json():
                    entry_name = entry_json["path"].rpartition("/")[2]
                    entry_by_name[entry_name] = (
                        FileEntry(entry_json["size"]) if entry_json["type"] == "file" else None
                    )
                page_url = page_response.links.get("next", {}).get("url", "")
        return entry_by_name

    def head(self, name: str) -> FileEntry | None:
        return self.entries().get(name)

    def read(
        self,
        name: str,
        version: str | None,
        max_bytes: int | None,
        byte_range: tuple[int, int] | None,
    ) -> tuple[bytes, str | None] | None:
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        path_in_repository = (
            f"{self._path_in_repository}/{name}" if self._path_in_repository else name
        )
        file_url = hf_hub_url(
            self._repository_name,
            path_in_repository,
            repo_type=self._repository_kind,
            revision=self._revision,
        )
        # Without this header, the answer may be compressed, and sizes and ranges would refer to the
        # compressed bytes.
        request_headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if byte_range is not None:
            start_byte, stop_byte = byte_range
            request_headers["Range"] = f"bytes={start_byte}-{stop_byte - 1}"
        response_context = get_session().stream(
            "GET", file_url, headers=request_headers, timeout=TIMEOUT
        )
        with self._as_folder_errors(), response_context as file_response:
            if file_response.status_code == 416:  # the range begins behind the end of the file
                return b"", None
            try:
                hf_raise_for_status(file_response)
            except EntryNotFoundError:
                return None
            num_response_bytes = int(file_response.headers.get("Content-Length", 0))
            if byte_range is None:
                check_size(num_response_bytes, max_bytes)
                return file_response.read(), None
            if file_response.status_code == 206:
                return file_response.read(), None
            # The server has ignored the header Range, and sends the whole file.
            check_size(num_response_bytes, MAX_BYTES_WITHOUT_RANGES)
            return file_response.read()[start_byte:stop_byte], None

    def write(self, name: str, *_: Any) -> NoReturn:
        raise InputError(
            f"{self.url}: {name} cannot be written there; expected a local folder, gs://, s3:// "
            "or az://, from which `hf upload` copies a finished run to the hub"
        )

    remove = write  # no file can be deleted either, so the same error is raised

    @contextmanager
    def _as_folder_errors(self) -> Iterator[None]:
        """Raises FolderError if the `with` block raises an exception of huggingface_hub.

        Raises:
            FolderError: If the hub answers a request with an error, or if huggingface_hub does not
                send the request. The attribute `is_permanent` of the FolderError is False only if
                the HTTP status of the answer means that the same request may succeed later.
        """
        from huggingface_hub import get_token
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        repository_noun = NOUNS[self._repository_kind]
        try:
            yield
        except OfflineModeIsEnabled as error:
            offline_message = (
                f"HF_HUB_OFFLINE is set, and the {repository_noun} is read from the hub alone; "
                "unset it"
            )
            raise FolderError(offline_message) from error
        except HFValidationError as error:
            raise FolderError(one_line(error)) from error
        except GatedRepoError as error:
            raise FolderError(
                f"the {repository_noun} is gated: ask for access on its page, and set HF_TOKEN to "
                "your token"
            ) from error
        except RepositoryNotFoundError as error:
            access_problem = "HF_TOKEN is not set"
            if get_token():
                access_problem = "your token (HF_TOKEN) may not read it"
            raise FolderError(
                f"the hub has no such {repository_noun}, or it is private and {access_problem}"
            ) from error
        except RevisionNotFoundError as error:
            raise FolderError(f"the {repository_noun} has no revision {self._revision}") from error
        except HfHubHTTPError as error:
            http_status = error.response.status_code
            failure_reason = f"{one_line(error):.200}"
            if http_status == 401:
                failure_reason = "the hub does not accept your token (HF_TOKEN)"
            is_failure_permanent = failure_kind_of(http_status) is not FailureKind.MAY_PASS
            raise FolderError(failure_reason, is_permanent=is_failure_permanent) from error
