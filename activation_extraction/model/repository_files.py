"""Declares the kinds of repositories, and reads a repository in a local folder or at a URL.

There are three kinds of repositories (`RepositoryKind`): a repository contains a model, an adapter
or an autoencoder. It is in a local folder (`LocalFiles`), at a URL (`RemoteFiles`), or on the
Hugging Face hub (`HubFiles` in hub_files.py). These three classes have the interface
`RepositoryFiles`. `Repository` in repository.py chooses one of them.
"""

import functools
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, Protocol

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.model.weight_files import (
    SINGLE_FILE,
    LocalFile,
    RemoteFile,
    WeightFile,
)
from activation_extraction.store.folder import FolderError, SourceFolder


class RepositoryKind(NamedTuple):
    """A kind of repository, for models, for adapters or for autoencoders.

    Attributes:
        flag: The flag whose value is such a repository.
        config_file_name: The name of the configuration file.
        weights_file_name: The name of the file with the weights, if a single file contains all of
            them; "" if this name varies.
        description: The kind of repository, and the library that loads and stores its weights if
            there is one, in words for messages, such as "adapter with PEFT".
    """

    flag: str
    config_file_name: str
    weights_file_name: str
    description: str


MODEL = RepositoryKind("--model_path", "config.json", SINGLE_FILE, "model with transformers")
ADAPTER = RepositoryKind(
    "--lora", "adapter_config.json", "adapter_model.safetensors", "adapter with PEFT"
)
AUTOENCODER = RepositoryKind("--encode", "cfg.json", "", "autoencoder")


class RepositoryFiles(Protocol):
    """The interface to the files of a repository, wherever they are.

    `LocalFiles`, `RemoteFiles` and `HubFiles` implement this protocol.

    Attributes:
        git_commit: Git commit of the files on the hub; None if the repository is not on the hub.
        file_names: Names of all files that can be read.
        is_offline: Whether the repository is on the hub, but only the hub's cache on this machine
            can be read. This is the case if HF_HUB_OFFLINE is set or the hub cannot be reached.
            Always False for repositories that are not on the hub.
    """

    @property
    def git_commit(self) -> str | None: ...

    @property
    def file_names(self) -> Collection[str]: ...

    @property
    def is_offline(self) -> bool: ...

    def find(self, name: str) -> Path | None:
        """Returns the local path of a small file, which is downloaded if necessary.

        Args:
            name: The name of the file in the repository.

        Returns:
            The path; None if the repository lacks the file.
        """

    def open_weights(self, name: str) -> WeightFile | None:
        """Opens a safetensors file, whose tensors can be read in parts.

        Args:
            name: The name of the file in the repository.

        Returns:
            The file; None if the repository lacks it.
        """


class LocalFiles:
    """Reads the files of a repository in a local folder.

    `RepositoryFiles` documents the public methods.
    """

    # A local folder has no git commit, and is read in the same way with and without a network.
    git_commit = None
    is_offline = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cached_property
    def file_names(self) -> Collection[str]:
        return os.listdir(self._folder)

    def find(self, name: str) -> Path | None:
        local_path = self._folder / name
        return local_path if local_path.is_file() else None

    def open_weights(self, name: str) -> WeightFile | None:
        local_path = self.find(name)
        return None if local_path is None else LocalFile(local_path)


class RemoteFiles:
    """Reads the files of a repository at a URL. `RepositoryFiles` documents the public methods.

    Small files are copied to a temporary folder, and weights are read by ranges into memory.
    """

    # Files at a URL have no git commit and are never read from a cache, unlike those on the hub.
    git_commit = None
    is_offline = False

    def __init__(self, url: str, flag_with_value: str, flag_name: str) -> None:
        """Stores the URL, without sending a request.

        Args:
            url: A URL that fsspec supports.
            flag_with_value: The flag that gives the URL, and the URL, such as
                "--model_path gs://bucket/qwen", for error messages.
            flag_name: The name of this flag, such as "--model_path", for error messages that
                already contain the URL.
        """
        self._url = url
        self._flag_with_value = flag_with_value
        self._flag_name = flag_name
        self._copy_by_file_name: dict[str, Path | None] = {}

    @property
    def file_names(self) -> Collection[str]:
        return self._sizes

    def size(self, name: str) -> int:
        """Returns the size of a file.

        Args:
            name: The name of the file in the repository.

        Returns:
            The size in bytes; 0 if the repository lacks the file.
        """
        return self._sizes.get(name, 0)

    def find(self, name: str) -> Path | None:
        if name not in self._copy_by_file_name:
            self._copy_by_file_name[name] = self._copy(name)
        return self._copy_by_file_name[name]

    def open_weights(self, name: str) -> WeightFile | None:
        if name not in self._sizes:
            return None
        return RemoteFile(self._folder, name, self._sizes[name])

    def _copy(self, name: str) -> Path | None:
        """Copies a file of the repository to the temporary folder of this object.

        Args:
            name: The name of the file in the repository.

        Returns:
            The path of the copy, or None if the repository lacks the file.

        Raises:
            RunError: If the copy cannot be written.
        """
        file_content = self._folder.read(name)
        if file_content is None:
            return None
        try:
            copy_path = self._temporary_folder / name
            copy_path.parent.mkdir(exist_ok=True)  # because `name` may contain a folder
            copy_path.write_bytes(file_content)
        except OSError as error:
            raise RunError(
                f"{self._flag_with_value}: {name} cannot be copied to the folder for "
                f"temporary files: {error.strerror}",
                remedy="set TMPDIR to another folder",
            ) from error
        return copy_path

    @functools.cached_property
    def _temporary_folder(self) -> Path:
        """The folder for copies of small files, which is deleted when this object is deleted."""
        temporary_folder = tempfile.mkdtemp(prefix="model_")
        weakref.finalize(self, shutil.rmtree, temporary_folder, ignore_errors=True)
        return Path(temporary_folder)

    @functools.cached_property
    def _folder(self) -> SourceFolder:
        try:
            return SourceFolder(self._url)
        except (FolderError, InputError) as error:
            raise InputError(f"{self._flag_name} {error}") from error

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """Name of a file -> its size in bytes, for all files of the repository."""
        try:
            return self._folder.files()
        except FolderError as error:
            if error.is_permanent:
                raise InputError(f"{self._flag_name} {error}") from error
            raise
