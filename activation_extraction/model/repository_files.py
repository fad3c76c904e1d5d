"""The files of a repository are in a local folder, at a URL, or on the Hugging Face hub.

`Files` is the interface of the three places. This module has the kinds of repositories and the
first two places; hub_files.py has the hub. `Repository` (repository.py) chooses the place.
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


class Kind(NamedTuple):
    """The kind of a repository.

    Attributes:
        flag: The flag that names such a repository.
        config: The file with its configuration.
        weights: The file with its weights, if they are in a single file with a usual name;
            otherwise "".
        words: The kind and the library that stores it, for messages.
    """

    flag: str
    config: str
    weights: str
    words: str


MODEL = Kind("--model_path", "config.json", SINGLE_FILE, "model with transformers")
ADAPTER = Kind("--lora", "adapter_config.json", "adapter_model.safetensors", "adapter with PEFT")
AUTOENCODER = Kind("--encode", "cfg.json", "", "autoencoder")


class Files(Protocol):
    """The files of a repository, wherever they are.

    Attributes:
        commit: The commit of the hub that the files belong to; None if they are not on the hub.
        names: The names of all files.
        offline: Whether the files are on the hub, and the hub cannot be asked.
    """

    @property
    def commit(self) -> str | None: ...

    @property
    def names(self) -> Collection[str]: ...

    @property
    def offline(self) -> bool: ...

    def find(self, name: str) -> Path | None:
        """Returns the local path of a small file; None if the repository lacks it."""

    def open_weights(self, name: str) -> WeightFile | None:
        """Returns a safetensors file; None if the repository lacks it."""


class LocalFiles:
    """The files of a folder of this machine. See `Files`."""

    commit = None
    offline = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cached_property
    def names(self) -> Collection[str]:
        return os.listdir(self._folder)

    def find(self, name: str) -> Path | None:
        path = self._folder / name
        return path if path.is_file() else None

    def open_weights(self, name: str) -> WeightFile | None:
        path = self.find(name)
        return None if path is None else LocalFile(path)


class RemoteFiles:
    """The files at a URL. See `Files`. Small files are copied to a temporary folder."""

    commit = None
    offline = False

    def __init__(self, url: str, where: str, flag: str) -> None:
        """Takes a URL that fsspec knows; reads nothing yet.

        Args:
            url: The URL.
            where: The flag and its value, for messages.
            flag: The flag that names the repository, for messages.
        """
        self._url = url
        self._where = where
        self._flag = flag
        self._copies: dict[str, Path | None] = {}

    @property
    def names(self) -> Collection[str]:
        return self._sizes

    def size(self, name: str) -> int:
        """Returns the size of a file in bytes; 0 if there is none of this name."""
        return self._sizes.get(name, 0)

    def find(self, name: str) -> Path | None:
        if name not in self._copies:
            self._copies[name] = self._copy(name)
        return self._copies[name]

    def open_weights(self, name: str) -> WeightFile | None:
        if name not in self._sizes:
            return None
        return RemoteFile(self._folder, name, self._sizes[name])

    def _copy(self, name: str) -> Path | None:
        """Copies a file to the temporary folder; returns None if it is missing."""
        data = self._folder.read(name)
        if data is None:
            return None
        try:
            copy = self._temporary_folder / name
            copy.parent.mkdir(exist_ok=True)  # the name may have a folder in it
            copy.write_bytes(data)
        except OSError as error:
            raise RunError(
                f"{self._where}: {name} cannot be copied to the folder for "
                f"temporary files: {error.strerror}",
                remedy="TMPDIR names another folder",
            ) from error
        return copy

    @functools.cached_property
    def _temporary_folder(self) -> Path:
        """Returns a folder for copies of small files, which is deleted with this object."""
        folder = tempfile.mkdtemp(prefix="model_")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    @functools.cached_property
    def _folder(self) -> SourceFolder:
        try:
            return SourceFolder(self._url)
        except FolderError as error:
            raise InputError(f"{self._flag} {error}") from error

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """Returns the name of every file -> its size in bytes."""
        try:
            return self._folder.files()
        except FolderError as error:
            if error.final:
                raise InputError(f"{self._flag} {error}") from error
            raise
