"""Finds the files of a model, an adapter or an autoencoder, wherever they are.

A `Repository` is a folder on this machine, a URL that fsspec supports, or a repository on the
Hugging Face hub. repository_files.py and hub_files.py read these three locations. Small files are
copied to this machine. Weights at a URL are not copied: only the needed ranges of bytes are read
into memory. Weights on the hub are read by ranges as well, unless the caller wants to keep them on
this machine for later runs and the disk has room for them.

checkpoint.py finds the tensors of a model in the files, and not_read.py has the errors about
repositories that cannot be read.
"""

import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from activation_extraction.common.errors import InputError
from activation_extraction.common.tokenizer_files import TOKENIZER_FILES
from activation_extraction.model import not_read
from activation_extraction.model.hub_files import HubFiles
from activation_extraction.model.repository_files import (
    ADAPTER,
    MODEL,
    LocalFiles,
    RemoteFiles,
    RepositoryFiles,
    RepositoryKind,
)
from activation_extraction.model.weight_files import WeightFile

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class Repository:
    """The files of a model, an adapter or an autoencoder.

    If a file cannot be read, methods raise InputError with the flag and the file in the message.
    `file` and `open_weights` also raise InputError if the file is missing.

    Attributes:
        path: The path of a folder, a URL, or a name on the hub, as the user typed it.
        repository_kind: The kind of repository: MODEL, ADAPTER or AUTOENCODER.
        flag_with_value: The flag and the path, such as "--model_path org/x", with which messages
            begin.
        is_local: Whether the repository is a folder on this machine.
    """

    def __init__(
        self,
        path: str,
        revision: str | None = None,
        keep: bool = True,
        kind: RepositoryKind = MODEL,
    ) -> None:
        """Determines where the repository is, without reading a file.

        Args:
            path: A folder, a URL or the name of a repository on the hub.
            revision: A branch, tag or commit of a repository on the hub; None for its main branch.
            keep: Whether to store weights from the hub in the hub's cache on this machine, so that
                later processes need not download them again.
            kind: The kind of repository: MODEL, ADAPTER or AUTOENCODER.

        Raises:
            InputError: If the path is a file, or neither a folder nor a possible name on the hub;
                or a revision is given for a folder or a URL.
        """
        self.path = path
        self.repository_kind = kind
        self.flag_with_value = f"{kind.flag} {path}"
        local_folder = Path(os.path.expanduser(path))
        self.is_local = local_folder.is_dir()
        is_url = "://" in path
        if local_folder.is_file():
            raise not_read.path_is_file(self.flag_with_value)
        if not (self.is_local or is_url or HUB_NAME.fullmatch(path)):
            raise not_read.no_folder_and_no_hub_name(self.flag_with_value)
        if (self.is_local or is_url) and revision is not None:
            raise not_read.revision_of_a_folder(self.flag_with_value, revision)
        self._file_reader: RepositoryFiles
        if self.is_local:
            self._file_reader = LocalFiles(local_folder)
        elif is_url:
            self._file_reader = RemoteFiles(path, self.flag_with_value, kind.flag)
        else:
            self._file_reader = HubFiles(path, revision, keep, kind)
        # Name of a weight file -> the opened file.
        self._weight_file_by_name: dict[str, WeightFile] = {}

    @property
    def git_commit(self) -> str | None:
        """The git commit of the files on the hub; None for a folder or a URL.

        This property also finds the configuration file, because the commit of a repository on the
        hub is only known after a file was read.

        Raises:
            InputError: If the configuration file of this kind of repository is missing, for example
                because the repository was given as a model but contains an adapter.
        """
        self.file(self.repository_kind.config_file_name)
        return self._file_reader.git_commit

    @property
    def file_names(self) -> Collection[str]:
        """The names of all files, or of the files in the hub's cache if the hub is unreachable."""
        return self._file_reader.file_names

    @property
    def weight_files(self) -> list[WeightFile]:
        """The weight files that were opened so far."""
        return list(self._weight_file_by_name.values())

    def find(self, name: str) -> Path | None:
        """Returns the local path of a small file, which is downloaded if necessary.

        Args:
            name: The name of the file in the repository.

        Returns:
            The path; None if the repository lacks the file.
        """
        return self._file_reader.find(name)

    def file(self, name: str) -> Path:
        """Returns the local path of a small file, which is downloaded if necessary.

        Unlike `find`, this method raises an error if the repository lacks the file.

        Args:
            name: The name of the file in the repository.

        Raises:
            InputError: If the repository lacks the file.
        """
        if (local_path := self.find(name)) is not None:
            return local_path
        if name == MODEL.config_file_name and self.find(ADAPTER.config_file_name):
            raise self.adapter_error()
        raise not_read.lacks_file(self.flag_with_value, name, self._file_reader.is_offline)

    def tokenizer_files(self) -> list[Path]:
        """Returns the local paths of the tokeniser's files that the repository contains.

        They are downloaded if necessary.
        """
        return [
            local_path for local_path in map(self.find, TOKENIZER_FILES) if local_path is not None
        ]

    def open_weights(self, name: str) -> WeightFile:
        """Opens a safetensors file.

        Args:
            name: The name of the file in the repository.

        Returns:
            The file. All calls with the same name return the same object.

        Raises:
            InputError: If the repository lacks the file.
        """
        if name not in self._weight_file_by_name:
            file_reader = self._file_reader
            if (
                name == self.repository_kind.weights_file_name
                and name not in file_reader.file_names
                and not file_reader.is_offline
            ):
                raise not_read.no_weights(
                    self.flag_with_value,
                    name,
                    self.repository_kind.description,
                    file_reader.file_names,
                )
            weight_file = file_reader.open_weights(name)
            if weight_file is None:
                raise not_read.lacks_file(self.flag_with_value, name, file_reader.is_offline)
            self._weight_file_by_name[name] = weight_file
        return self._weight_file_by_name[name]

    def adapter_error(self) -> InputError:
        """Returns the error about an adapter's repository that is given as a model's repository."""
        base_model_name = read_json(self.file(ADAPTER.config_file_name)).get(
            "base_model_name_or_path"
        )
        return not_read.adapter_in_model(
            self.flag_with_value, ADAPTER.config_file_name, base_model_name
        )


def check_adapter(lora: str | None) -> None:
    """Checks that the repository of --lora contains an adapter, before a run starts.

    Args:
        lora: The value of --lora; None if the flag is not set.

    Raises:
        InputError: If the repository has no adapter_config.json.
    """
    if lora is not None:
        Repository(lora, kind=ADAPTER).file(ADAPTER.config_file_name)


def read_json(path: str | Path) -> dict[str, Any]:
    """Reads a JSON object from a file such as config.json.

    Args:
        path: The local path of the file.

    Returns:
        The object as a dict.

    Raises:
        InputError: If the file cannot be read, or does not contain a JSON object.
    """
    try:
        json_content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(json_content, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(json_content).__name__}")
    return json_content
