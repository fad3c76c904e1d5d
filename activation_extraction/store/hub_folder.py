"""HubFolder: a folder in a repository of the Hugging Face hub, which can be read but not written.

All files are read from the same commit, whatever is pushed to the repository meanwhile. A file or a
range of it is read by a single request, straight into memory: nothing is stored in the hub's cache
on this machine. The file system of huggingface_hub would list the folder before it reads a file,
and its threads would share the listings. folder.py repeats failed requests.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from urllib.parse import quote, unquote

from activation_extraction.common.errors import InputError, install, one_line
from activation_extraction.common.retries import hub_unreachable
from activation_extraction.store.answers import Meaning, meaning_of
from activation_extraction.store.local_files import FileEntry, FolderError, check_size

# hf://datasets/ORG/NAME@REVISION/PATH. Models have no prefix. Buckets of the hub have another
# protocol, and are left to fsspec.
REPOSITORY_URL = re.compile(
    r"hf://(?:(?P<kind>datasets|spaces|models)/)?"
    r"(?P<name>(?!(?:datasets|spaces|models|buckets|kernels)/)[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?"
    r"(?:/(?P<path>.*))?"
)
COMMIT = re.compile("[0-9a-f]{40}")
KINDS = {"datasets": "dataset", "spaces": "space", "models": "model", None: "model"}
NOUNS = {"dataset": "data set", "space": "space", "model": "model"}
TIMEOUT = 60.0  # seconds for which the hub may send nothing
# Largest file of which a range is cut out here if the server sends the whole file instead.
MOST_WITHOUT_RANGES = 64 * 2**20


def is_repository(url: str) -> bool:
    """Returns whether a URL is that of a repository on the hub, or of a folder in one."""
    return REPOSITORY_URL.fullmatch(url) is not None


class HubFolder:
    """A folder in a repository of the Hugging Face hub, which can be read but not written.

    The methods do the same as the methods of `LocalFolder` (local_files.py), whose docstrings
    describe them. They raise FolderError, or another exception if there was no answer. Files have
    no versions, because those of a commit never change.

    Args:
        url: URL of the folder, for which `is_repository` is True.

    Raises:
        InputError: If the package huggingface_hub is not installed.
    """

    max_file_bytes = None

    def __init__(self, url: str) -> None:
        try:
            import huggingface_hub  # noqa: F401 (reading runs elsewhere does not need it)
        except ImportError as error:
            message = f"{url}: needs huggingface_hub; {install('huggingface_hub')}"
            raise InputError(message) from error
        match = REPOSITORY_URL.fullmatch(url)
        if match is None:
            raise ValueError(f"{url}: is not the URL of a repository on the hub")
        self._kind = KINDS[match["kind"]]
        self._prefix = f"{match['kind']}/" if match["kind"] else ""
        self._name = match["name"]
        self._revision = unquote(match["revision"] or "main")
        self._path = (match["path"] or "").strip("/")

    @property
    def url(self) -> str:
        """The URL of the folder, with the revision from which it is read."""
        repository = f"hf://{self._prefix}{self._name}@{quote(self._revision, safe='')}"
        return f"{repository}/{self._path}" if self._path else repository

    def pin(self) -> None:
        """Replaces the revision by its commit, by one request. A commit stays as it is.

        Raises:
            FolderError: If the request failed. It is final if there is no such repository or
                revision, if the token may not read it, or if the hub cannot be reached.
        """
        from huggingface_hub import HfApi, constants

        if COMMIT.fullmatch(self._revision):
            return
        options: dict[str, Any] = {"repo_type": self._kind, "revision": self._revision}
        try:
            with self._as_folder_errors():
                information = HfApi().repo_info(self._name, timeout=TIMEOUT, **options)
        except FolderError:
            raise
        except Exception as error:  # those of the HTTP client, which depend on its version
            if reason := hub_unreachable(constants.ENDPOINT):
                message = f"the hub cannot be reached ({one_line(reason)})"
                raise FolderError(message) from error
            raise
        self._revision = str(information.sha)

    def entries(self) -> dict[str, FileEntry | None]:
        from huggingface_hub import constants, get_session
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        path = "/".join(["tree", quote(self._revision, safe=""), quote(self._path)]).rstrip("/")
        page_url = f"{constants.ENDPOINT}/api/{self._kind}s/{self._name}/{path}"
        headers = build_hf_headers()
        entries: dict[str, FileEntry | None] = {}
        with self._as_folder_errors():
            while page_url:
                response = get_session().get(page_url, headers=headers, timeout=TIMEOUT)
                try:
                    hf_raise_for_status(response)
                except EntryNotFoundError:  # the commit has no such folder
                    return {}
                for item in response.json():
                    name = item["path"].rpartition("/")[2]
                    entries[name] = FileEntry(item["size"]) if item["type"] == "file" else None
                page_url = response.links.get("next", {}).get("url", "")
        return entries

    def head(self, name: str) -> FileEntry | None:
        return self.entries().get(name)

    def read(
        self, name: str, version: str | None, most: int | None, span: tuple[int, int] | None
    ) -> tuple[bytes, str | None] | None:
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        path = f"{self._path}/{name}" if self._path else name
        url = hf_hub_url(self._name, path, repo_type=self._kind, revision=self._revision)
        # Sizes and ranges are those of the file itself, and not of a compressed answer.
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        request = get_session().stream("GET", url, headers=headers, timeout=TIMEOUT)
        with self._as_folder_errors(), request as response:
            if response.status_code == 416:  # the range begins behind the end of the file
                return b"", None
            try:
                hf_raise_for_status(response)
            except EntryNotFoundError:
                return None
            size = int(response.headers.get("Content-Length", 0))
            if span is None:
                check_size(size, most)
                return response.read(), None
            if response.status_code == 206:
                return response.read(), None
            check_size(size, MOST_WITHOUT_RANGES)  # this server sends the whole file instead
            return response.read()[span[0] : span[1]], None

    def write(self, name: str, *_: Any) -> NoReturn:
        raise InputError(
            f"{self.url}: {name} cannot be written there; expected a local folder, gs://, s3:// "
            "or az://, from which `hf upload` copies a finished run to the hub"
        )

    remove = write

    @contextmanager
    def _as_folder_errors(self) -> Iterator[None]:
        """Raises FolderError in place of the exceptions of huggingface_hub.

        Raises:
            FolderError: If the hub refused a request. It is final if the hub would refuse the same
                request again.
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

        noun = NOUNS[self._kind]
        try:
            yield
        except OfflineModeIsEnabled as error:
            message = f"HF_HUB_OFFLINE is set, and the {noun} is read from the hub alone; unset it"
            raise FolderError(message) from error
        except HFValidationError as error:
            raise FolderError(one_line(error)) from error
        except GatedRepoError as error:
            raise FolderError(
                f"the {noun} is gated: ask for access on its page, and set HF_TOKEN to your token"
            ) from error
        except RepositoryNotFoundError as error:
            remedy = "HF_TOKEN is not set"
            if get_token():
                remedy = "your token (HF_TOKEN) may not read it"
            raise FolderError(
                f"the hub has no such {noun}, or it is private and {remedy}"
            ) from error
        except RevisionNotFoundError as error:
            raise FolderError(f"the {noun} has no revision {self._revision}") from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            reason = f"{one_line(error):.200}"
            if status == 401:
                reason = "the hub does not accept your token (HF_TOKEN)"
            is_final = meaning_of(status) is not Meaning.MAY_PASS
            raise FolderError(reason, final=is_final) from error
