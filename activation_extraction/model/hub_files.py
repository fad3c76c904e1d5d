"""Reads the files of a repository on the Hugging Face hub, or in the hub's cache on this machine.

Small files are downloaded to the cache. So are weights, if they are in it or are to be kept in it;
otherwise they are read by ranges into memory. If the hub cannot be reached, only files in the cache
are read. The first file determines the commit of all others.
"""

import functools
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from huggingface_hub import (
    constants,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)

from activation_extraction.common.errors import InputError
from activation_extraction.common.log import log
from activation_extraction.common.retries import hub_requests, hub_unreachable, unwritable_cache
from activation_extraction.model import not_read
from activation_extraction.model.repository_files import AUTOENCODER, MODEL, Kind, RemoteFiles
from activation_extraction.model.weight_files import INDEX_FILE, LocalFile, WeightFile, read_index

AUTOENCODER_WEIGHTS = (".safetensors", ".npz", ".pt")


class HubFiles:
    """The files of a repository on the hub (see `Files`)."""

    def __init__(self, name: str, revision: str | None, keep: bool, kind: Kind) -> None:
        """Takes the name of a repository, without reading a file.

        Args:
            name: The name of the repository on the hub.
            revision: A branch, tag or commit; None for the main branch.
            keep: Whether to store the weights in the cache for the next start.
            kind: The kind of the repository.
        """
        self._name = name
        self._where = f"{kind.flag} {name}"
        # Reading the first file replaces the revision by a commit, which is used for all others.
        self._revision = revision
        self._keep = keep
        self._kind = kind
        self._paths: dict[str, Path | None] = {}
        # Whether the hub, which seemed to be reachable, has not answered a request.
        self._unanswered = False

    @property
    def commit(self) -> str | None:
        self._config()
        return self._revision

    @property
    def offline(self) -> bool:
        return (
            constants.HF_HUB_OFFLINE
            or self._unanswered
            or hub_unreachable(constants.ENDPOINT) is not None
        )

    @functools.cached_property
    def names(self) -> Collection[str]:
        return os.listdir(self._config().parent) if self.offline else self._remote.names

    def find(self, name: str) -> Path | None:
        if name not in self._paths:
            self._paths[name] = self._download(name)
        return self._paths[name]

    def open_weights(self, name: str) -> WeightFile | None:
        if not self._belongs_in_cache(name):
            return self._remote.open_weights(name)
        path = self.find(name)
        return None if path is None else LocalFile(path)

    def _config(self) -> Path:
        """Returns the path of the configuration, and thereby turns the revision into a commit."""
        path = self.find(self._kind.config)
        if path is None:
            raise not_read.lacks_file(self._where, self._kind.config, self.offline)
        return path

    @functools.cached_property
    def _remote(self) -> RemoteFiles:
        """The files on the hub, read without the cache."""
        return RemoteFiles(f"hf://{self._name}@{self.commit}", self._where, self._kind.flag)

    def _download(self, name: str) -> Path | None:
        """Returns the path of a file in the hub's cache, to which it is downloaded if necessary.

        If the hub cannot be reached and the cache lacks the file, it counts as missing from the
        repository if `_cache_shows_absence` says so. Otherwise this is an error.

        Returns:
            The path; None if the repository lacks the file.

        Raises:
            InputError: The file cannot be read.
        """
        try:
            with hub_requests(self._where):
                path = hf_hub_download(
                    self._name, name, revision=self._revision, local_files_only=self.offline
                )
        except LocalEntryNotFoundError as error:
            # This subclass of EntryNotFoundError means that the hub cannot be reached.
            self._unanswered = True
            if self._cache_shows_absence(name):
                return None
            nothing = self._snapshot() is None
            raise not_read.hub_not_reached(
                self._where, self._kind.flag, name, nothing, error
            ) from error
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            if cache := unwritable_cache(error):
                raise InputError(f"{self._where}: {cache}") from error
            raise not_read.hub_refuses(self._where, self._revision, error) from error
        # The folder of the files in the cache is named after the commit.
        self._revision = Path(path.removesuffix(name)).name
        if self.offline and not constants.HF_HUB_OFFLINE:
            log_that_the_cache_is_read(self._where, self._revision)
        return Path(path)

    def _cache_shows_absence(self, name: str) -> bool:
        """Returns whether the cache shows that the repository lacks a file.

        The cache may contain a record that the file is missing. Without a record, since another
        program may have filled the cache, it shows the same if it contains a configuration and all
        weights of this commit. If HF_HUB_OFFLINE forbids requests, it is enough that the cache
        contains files of this commit.
        """
        cached = try_to_load_from_cache(self._name, name, revision=self._revision)
        if not isinstance(cached, str | None):  # the sentinel of a recorded absence
            return True
        snapshot = self._snapshot()
        if snapshot is None:
            return False
        return constants.HF_HUB_OFFLINE or self._is_whole(snapshot, name)

    def _snapshot(self) -> Path | None:
        """Returns the folder of this commit in the cache; None if there is none."""
        try:
            return Path(
                snapshot_download(self._name, revision=self._revision, local_files_only=True)
            )
        except LocalEntryNotFoundError:
            return None

    def _is_whole(self, snapshot: Path, name: str) -> bool:
        """Returns whether the cache contains a configuration and all weights.

        Args:
            snapshot: The folder of the commit in the cache.
            name: The name of the file that is missing. In a repository with many autoencoders, only
                the autoencoder in the folder of this file is considered.
        """
        if self._kind is AUTOENCODER:
            folder = (snapshot / name).parent
            return folder.is_dir() and any(
                path.name.endswith(AUTOENCODER_WEIGHTS) for path in folder.iterdir()
            )
        if not (snapshot / self._kind.config).is_file():
            return False
        if (snapshot / self._kind.weights).is_file():
            return True
        if self._kind is not MODEL or not (snapshot / INDEX_FILE).is_file():
            return False
        shards = set(read_index(snapshot / INDEX_FILE).values())
        return all((snapshot / shard).is_file() for shard in shards)

    def _belongs_in_cache(self, name: str) -> bool:
        """Returns whether to read a weight file from the cache, downloading it if necessary."""
        self._config()
        if isinstance(try_to_load_from_cache(self._name, name, revision=self._revision), str):
            return True
        if not self._keep or self.offline:
            return self._keep
        cache = Path(constants.HF_HUB_CACHE)
        size = self._remote.size(name)
        free = shutil.disk_usage(cache).free
        if size > free:
            text = "%s takes %.3g GB, but %s has only %.3g free: it is read straight into memory"
            log.warning(text, name, size / 1e9, cache, free / 1e9)
        return size <= free


@functools.cache
def log_that_the_cache_is_read(where: str, commit: str) -> None:
    """Logs a warning, once for each repository, that files come from the cache.

    Args:
        where: The flag and its value.
        commit: The commit that is read.
    """
    log.warning(
        "%s: the hub cannot be reached; commit %s is read from its cache, %s",
        where,
        commit,
        constants.HF_HUB_CACHE,
    )
