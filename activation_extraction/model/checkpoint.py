"""Checkpoints: the files of a model, in a local folder or on the Hugging Face hub.

`Checkpoint` finds the files, checks what their headers say, and reads parts of tensors. How
parameters are made of tensors is weights.py's part.
"""

import dataclasses
import functools
import json
import math
import mmap
import os
import re
from pathlib import Path

import ml_dtypes
import numpy as np
from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from safetensors import SafetensorError, safe_open

from activation_extraction.cli.errors import InputError, one_line
from activation_extraction.cli.retries import hub_requests, name_unknown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
)
FLOAT_TYPES: dict[str, np.dtype] = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """Where a safetensors file keeps a tensor: shape, dtype, and the byte at which it begins."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int


class Checkpoint:
    """The files of a model, in a local folder or on the hub (downloaded one by one, as needed).

    Raises InputError, naming path and file, for anything that is missing, truncated or not a
    floating-point safetensors checkpoint.
    """

    def __init__(self, model_path: str, revision: str | None = None) -> None:
        """revision: a branch, tag or commit of a hub model; None: its main branch."""
        self.model_path = model_path
        self._local = Path(os.path.expanduser(model_path))
        # After the first file its commit: all others are of the same one.
        self._revision = revision
        self._found: dict[str, Path | None] = {}
        if os.path.isfile(self._local):
            raise InputError(f"--model_path {model_path}: is a file, expected a folder")
        if not os.path.isdir(self._local) and not HUB_NAME.fullmatch(model_path):
            raise InputError(f"--model_path {model_path}: no such folder, and not a hub name")
        if self.local and revision is not None:
            raise InputError(
                f"--model_revision {revision}: --model_path {model_path} is a local folder; "
                "only models of the hub have revisions"
            )

    @property
    def local(self) -> bool:
        """Whether it is a folder of this machine."""
        return os.path.isdir(self._local)

    @property
    def commit(self) -> str | None:
        """The hub's commit that the files belong to; None for a local folder."""
        self.file("config.json")
        return None if self.local else self._revision

    def file(self, name: str) -> Path:
        """Local path of one file. Raises InputError when the model does not have it."""
        path = self.find(name)
        if path is None:
            raise InputError(f"--model_path {self.model_path}: has no {name}")
        return path

    def find(self, name: str) -> Path | None:
        """Local path of one file, None when the model does not have it."""
        if name not in self._found:
            local = self._local / name
            if os.path.isdir(self._local):
                self._found[name] = local if local.is_file() else None
            else:
                self._found[name] = self._download(name)
        return self._found[name]

    def _download(self, name: str) -> Path | None:
        try:
            with hub_requests(f"--model_path {self.model_path}"):
                path = Path(hf_hub_download(self.model_path, name, revision=self._revision))
            self._revision = path.parent.name  # files lie in a folder named after their commit
            return path
        except LocalEntryNotFoundError as error:
            # A kind of EntryNotFoundError, but it means that the network is missing, not the file.
            known = try_to_load_from_cache(self.model_path, name, revision=self._revision)
            if known is _CACHED_NO_EXIST:
                return None
            reason = f"cannot be reached for {name} (no network, or HF_HUB_OFFLINE)"
            if name_unknown(error):
                reason = "has a name that does not resolve: offline? --model_path takes a folder"
            raise InputError(
                f"--model_path {self.model_path}: no such local folder, and the hub {reason}"
            ) from error
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            asked = f" --model_revision {self._revision}" if self._revision else ""
            raise InputError(
                f"--model_path {self.model_path}{asked}: no such local folder, and the hub says: "
                f"{one_line(error)}"
            ) from error

    def weight_files(self) -> list[Path]:
        """The files that decide what the model computes: config.json and the checked weights."""
        return [self.file("config.json"), *self._headers]

    def tokenizer_files(self) -> list[Path]:
        """The files that decide how text is tokenised."""
        paths = [self.find(name) for name in TOKENIZER_FILES]
        return [path for path in paths if path is not None]

    @functools.cached_property
    def file_of_tensor(self) -> dict[str, str] | None:
        """Tensor -> file name from the index; None when the checkpoint is a single file."""
        index = self.find(INDEX_FILE)
        if index is None:
            return None
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{index}: not a safetensors index: {error!r}") from error

    def tensor_path(self, tensor: str) -> Path:
        """The safetensors file that holds (or should hold) a tensor."""
        if self.file_of_tensor is None:
            return self.file(SINGLE_FILE)
        if tensor not in self.file_of_tensor:
            raise InputError(f"--model_path {self.model_path}: tensor {tensor} is missing")
        return self.file(self.file_of_tensor[tensor])

    @functools.cached_property
    def _headers(self) -> dict[Path, dict[str, TensorPlace]]:
        return {}

    def header(self, path: Path) -> dict[str, TensorPlace]:
        if path not in self._headers:
            try:
                with safe_open(path, "np"):  # checks the header, and the file's size against it
                    self._headers[path] = _read_header(path)
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path}: not a complete safetensors file: {error}") from error
        return self._headers[path]

    def read(self, tensor: str, index: Index) -> np.ndarray:
        """Part of a tensor, as a view of the file: its bytes are read when it is copied.

        The file is mapped for as long as the view lives, so pages that were read do not pile up.
        """
        path = self.tensor_path(tensor)
        place = self.header(path)[tensor]
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        values = np.frombuffer(mapped, place.dtype, math.prod(place.shape), place.offset)
        return values.reshape(place.shape)[index]


def _read_header(path: Path) -> dict[str, TensorPlace]:
    """Of a safetensors file: 8 bytes with the length of a JSON, the JSON, the tensors' bytes.

    Raises InputError for dtypes that are not in FLOAT_TYPES.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        if entry["dtype"] not in FLOAT_TYPES:
            raise InputError(
                f"{path}: tensor {name} is {entry['dtype']}; only {', '.join(FLOAT_TYPES)} are "
                "read (quantised checkpoints are not)"
            )
        offset = 8 + length + entry["data_offsets"][0]
        places[name] = TensorPlace(tuple(entry["shape"]), FLOAT_TYPES[entry["dtype"]], offset)
    return places
