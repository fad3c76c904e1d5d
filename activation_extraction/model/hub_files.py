"""Reads the files of a repository on the Hugging Face hub, with the hub's cache on this machine.

Small files are downloaded to the cache. If the cache already contains the weights, they are read
from it. Otherwise they are downloaded to the cache if the caller of `HubFiles` wants to keep them
there. If not, ranges of their bytes are requested from the hub and read into memory. If the hub
cannot be reached, only files in the cache are read. All files come from the same commit, which is
determined when the first file is read.
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
from activation_extraction.model.repository_files import (
    AUTOENCODER,
    MODEL,
    RemoteFiles,
    RepositoryKind,
)
from activation_extraction.model.weight_files import INDEX_FILE, LocalFile, WeightFile, read_index

AUTOENCODER_WEIGHTS = (".safetensors", ".npz", ".pt")  # extensions of autoencoders' weight files


class HubFiles:
    """Reads the files of a repository on the Hugging Face hub, with the hub's cache.

    The cache is a folder on this machine. Small files are downloaded to it, and read from there.
    Weights are read from the cache if it contains them or if they are to be kept there, otherwise
    straight from the hub. If the hub cannot be reached, all files are read from the cache.
    `RepositoryFiles` documents the public methods.
    """

    def __init__(self, name: str, revision: str | None, keep: bool, kind: RepositoryKind) -> None:
        """Stores the name of the repository, without sending a request.

        Args:
            name: The name of the repository on the hub.
            revision: A branch, tag or commit; None for the main branch.
            keep: Whether to store weights in the hub's cache on this machine, so that later
                processes need not download them again.
            kind: The kind of repository: a model, an adapter or an autoencoder.
        """
        self._repository_name = name
        self._flag_with_value = f"{kind.flag} {name}"
        # When the first file is read, its commit replaces this revision, so that all other files
        # are read from the same commit.
        self._revision = revision
        self._keeps_weights = keep
        self._repository_kind = kind
        # Name of a file -> its path in the cache; None if the repository lacks it.
        self._path_by_file_name: dict[str, Path | None] = {}
        # Whether a download failed with LocalEntryNotFoundError (see `_download`). From then on,
        # only files in the hub's cache are read.
        self._has_failed_download = False

    @property
    def git_commit(self) -> str | None:
        self._config()
        return self._revision

    @property
    def is_offline(self) -> bool:
        return (
            constants.HF_HUB_OFFLINE
            or self._has_failed_download
            or hub_unreachable(constants.ENDPOINT) is not None
        )

    @functools.cached_property
    def file_names(self) -> Collection[str]:
        return os.listdir(self._config().parent) if self.is_offline else self._remote.file_names

    def find(self, name: str) -> Path | None:
        if name not in self._path_by_file_name:
            self._path_by_file_name[name] = self._download(name)
        return self._path_by_file_name[name]

    def open_weights(self, name: str) -> WeightFile | None:
        if not self._belongs_in_cache(name):
            return self._remote.open_weights(name)
        cached_path = self.find(name)
        return None if cached_path is None else LocalFile(cached_path)

    def _config(self) -> Path:
        """Returns the path of the repository's configuration file, such as config.json.

        The file is downloaded to the hub's cache if necessary. After this call, `_revision` is the
        commit on the hub from which the file comes.

        Raises:
            InputError: If the repository has no configuration file.
        """
        config_path = self.find(self._repository_kind.config_file_name)
        if config_path is None:
            raise not_read.lacks_file(
                self._flag_with_value, self._repository_kind.config_file_name, self.is_offline
            )
        return config_path

    @functools.cached_property
    def _remote(self) -> RemoteFiles:
        """The reader of the repository's files that bypasses the hub's cache.

        The files belong to the same commit as the configuration file that was read first.
        """
        return RemoteFiles(
            f"hf://{self._repository_name}@{self.git_commit}",
            self._flag_with_value,
            self._repository_kind.flag,
        )

    def _download(self, name: str) -> Path | None:
        """Downloads a file to the hub's cache, if the cache does not contain it yet.

        Args:
            name: The name of the file in the repository.

        Returns:
            The path of the file in the cache; None if the repository lacks the file. If the hub
            cannot be reached, `_cache_shows_absence` determines whether the repository lacks the
            file.

        Raises:
            InputError: If the file cannot be downloaded, and the cache does not show that the
                repository lacks it.
        """
        try:
            with hub_requests(self._flag_with_value):
                downloaded_path = hf_hub_download(
                    self._repository_name,
                    name,
                    revision=self._revision,
                    local_files_only=self.is_offline,
                )
        except LocalEntryNotFoundError as error:
            # LocalEntryNotFoundError means that the cache lacks the file, and that the hub could
            # not be reached or the request for the file failed. The repository may contain the
            # file, although this class is a subclass of EntryNotFoundError. From now on, only the
            # cache is read.
            self._has_failed_download = True
            if self._cache_shows_absence(name):
                return None
            cache_is_empty = self._snapshot() is None
            raise not_read.hub_not_reached(
                self._flag_with_value, self._repository_kind.flag, name, cache_is_empty, error
            ) from error
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            if unwritable_cache_message := unwritable_cache(error):
                raise InputError(f"{self._flag_with_value}: {unwritable_cache_message}") from error
            raise not_read.hub_error(self._flag_with_value, self._revision, error) from error
        # In the hub's cache, the folder that contains the files of a commit is named after it.
        self._revision = Path(downloaded_path.removesuffix(name)).name
        if self.is_offline and not constants.HF_HUB_OFFLINE:
            log_that_the_cache_is_read(self._flag_with_value, self._revision)
        return Path(downloaded_path)

    def _cache_shows_absence(self, name: str) -> bool:
        """Returns whether the cache shows that the repository lacks a file.

        The cache shows that a file is missing in three cases:
            The cache contains a record of an earlier answer that the file is missing.
            The cache contains the configuration and all weights of the commit `_revision`. The
                whole repository was probably downloaded, and that leaves no record of missing
                files.
            HF_HUB_OFFLINE forbids requests, and the cache contains any file of this commit.

        Args:
            name: The name of the file in the repository.
        """
        cached_path = try_to_load_from_cache(self._repository_name, name, revision=self._revision)
        # A result that is neither a path nor None is huggingface_hub's object for a file that the
        # repository lacks according to the cache.
        if not isinstance(cached_path, str | None):
            return True
        snapshot_folder = self._snapshot()
        if snapshot_folder is None:
            return False
        return constants.HF_HUB_OFFLINE or self._is_complete(snapshot_folder, name)

    def _snapshot(self) -> Path | None:
        """Returns the folder with the files of `_revision` in the hub's cache.

        None if the cache contains no file of this revision.
        """
        try:
            return Path(
                snapshot_download(
                    self._repository_name, revision=self._revision, local_files_only=True
                )
            )
        except LocalEntryNotFoundError:
            return None

    def _is_complete(self, snapshot: Path, name: str) -> bool:
        """Returns whether the cache contains the configuration and all weights of a commit.

        If so, the whole commit was probably downloaded, and a file that the cache lacks is not in
        the repository. A repository may contain many autoencoders, each in its own folder. So for
        autoencoders, it is enough if the cache contains a weight file in the folder of the file
        `name`.

        Args:
            snapshot: The folder of the commit in the cache.
            name: The name of the file that the cache lacks.
        """
        if self._repository_kind is AUTOENCODER:
            autoencoder_folder = (snapshot / name).parent
            return autoencoder_folder.is_dir() and any(
                file_path.name.endswith(AUTOENCODER_WEIGHTS)
                for file_path in autoencoder_folder.iterdir()
            )
        if not (snapshot / self._repository_kind.config_file_name).is_file():
            return False
        if (snapshot / self._repository_kind.weights_file_name).is_file():
            return True
        if self._repository_kind is not MODEL or not (snapshot / INDEX_FILE).is_file():
            return False
        weight_file_names = set(read_index(snapshot / INDEX_FILE).values())
        return all(
            (snapshot / weight_file_name).is_file() for weight_file_name in weight_file_names
        )

    def _belongs_in_cache(self, name: str) -> bool:
        """Returns whether to read a weight file through the hub's cache.

        The cache is used if it already contains the file. It is also used if this object was made
        with keep=True, which stores weights on this machine, and either the disk has room for the
        file or the hub cannot be reached. In all other cases, ranges of the file's bytes are
        requested from the hub and read straight into memory.

        Args:
            name: The name of the weight file in the repository.
        """
        self._config()  # sets `_revision` to the commit whose file is looked up in the cache
        if isinstance(
            try_to_load_from_cache(self._repository_name, name, revision=self._revision), str
        ):
            return True
        if not self._keeps_weights:
            return False
        if self.is_offline:
            return True
        cache_folder = Path(constants.HF_HUB_CACHE)
        file_byte_count = self._remote.size(name)
        free_byte_count = shutil.disk_usage(cache_folder).free
        if file_byte_count > free_byte_count:
            log_format = (
                "%s takes %.3g GB, but %s has only %.3g free: it is read straight into memory"
            )
            log.warning(
                log_format, name, file_byte_count / 1e9, cache_folder, free_byte_count / 1e9
            )
        return file_byte_count <= free_byte_count


@functools.cache
def log_that_the_cache_is_read(flag_with_value: str, git_commit: str) -> None:
    """Logs a warning, once for each repository, that its files are read from the hub's cache.

    Args:
        flag_with_value: The flag that names the repository and its value, such as `--model_path
            org/x`.
        git_commit: The commit on the hub from which the files in the cache come.
    """
    log.warning(
        "%s: the hub cannot be reached; commit %s is read from its cache, %s",
        flag_with_value,
        git_commit,
        constants.HF_HUB_CACHE,
    )
