"""A checkpoint is the files of a model, in a local folder, in a bucket or on the Hugging Face hub.

`Checkpoint` finds the files and says which of them holds a tensor. weight_files.py reads the files,
lora.py changes what is read, and weights.py turns tensors into parameters.
"""

import functools
import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
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

from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.common.log import log
from activation_extraction.common.retries import (
    hub_requests,
    hub_unreachable,
    name_unknown,
    unwritable_cache,
)
from activation_extraction.common.safetensors import Tensor
from activation_extraction.common.tokenizer_files import TOKENIZER_FILES
from activation_extraction.model.float8 import Float8Format, Scales, float8_format
from activation_extraction.model.tensor_names import text_names
from activation_extraction.model.weight_files import Index, LocalFile, RemoteFile, WeightFile
from activation_extraction.store.folder import FolderError, SourceFolder

if TYPE_CHECKING:
    from activation_extraction.model.lora import Adapter

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_config.json"
WEIGHT_FILE = re.compile(r"[^/\\:.\0][^/\\:\0]*")  # a file in the folder of its index
AUTOENCODER_WEIGHTS = (".safetensors", ".npz", ".pt")
# Weights in forms that are not read.
OTHER_WEIGHTS = re.compile(r"(\w+_)?model.*\.(bin|pt|pth)|consolidated.*\.pth|.*\.gguf")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class Kind(NamedTuple):
    """What a checkpoint is: the flag that names it, two of its files, and words for messages."""

    flag: str
    config: str
    weights: str
    words: str


MODEL = Kind("--model_path", "config.json", SINGLE_FILE, "model with transformers")
ADAPTER = Kind("--lora", ADAPTER_FILE, "adapter_model.safetensors", "adapter with PEFT")
AUTOENCODER = Kind("--encode", "cfg.json", "", "autoencoder")


class Checkpoint:
    """The files of a model or adapter, in a local folder, at a URL that fsspec knows or on the hub.

    Small files are copied to local ones. Weights at a URL are read by ranges, straight into memory;
    so are those of the hub, unless they are to be kept and the disk has room for them. All methods
    raise InputError, naming path and file, for anything that is missing, truncated or not a
    floating-point safetensors checkpoint.
    """

    def __init__(
        self, model_path: str, revision: str | None = None, keep: bool = True, kind: Kind = MODEL
    ) -> None:
        """Finds out where the model is; reads nothing yet.

        revision: a branch, tag or commit of a hub model; None: its main branch. keep: whether the
        hub's cache on this machine is to keep the weights for the next start.
        """
        self.model_path = model_path
        self.where = f"{kind.flag} {model_path}"  # for messages
        # What is read is merged with it; None: it is what is stored.
        self.adapter: Adapter | None = None
        self.kind = kind
        self._local = Path(os.path.expanduser(model_path))
        self._url = "://" in model_path
        # The first file replaces this by its commit, to which all others belong as well.
        self._revision = revision
        self._keep = keep
        # Whether the hub, which seemed to be there, has not answered a request.
        self._unanswered = False
        self._files: dict[str, Path | None] = {}
        self._opened: dict[str, WeightFile] = {}
        if os.path.isfile(self._local):
            raise InputError(f"{self.where}: is a file, expected a folder")
        if not (self.local or self._url or HUB_NAME.fullmatch(model_path)):
            raise InputError(f"{self.where}: no such folder, and not a hub name")
        if (self.local or self._url) and revision is not None:
            raise InputError(
                f"--model_revision {revision}: {self.where} is a folder; "
                "only models of the hub have revisions"
            )

    @property
    def local(self) -> bool:
        """Returns whether the model is a folder of this machine."""
        return os.path.isdir(self._local)

    @property
    def commit(self) -> str | None:
        """Returns the hub's commit that the files belong to; None for a folder."""
        self.file(self.kind.config)
        return None if self.local or self._url else self._revision

    def file(self, name: str) -> Path:
        """Returns the local path of a small file. Raises InputError if the model lacks it."""
        if (path := self.find(name)) is not None:
            return path
        if name == "config.json" and self.find(ADAPTER_FILE):
            raise self._holds_adapter()
        who = "the hub cannot be reached, and its cache here " if self._offline else ""
        raise InputError(f"{self.where}: {who}has no {name}")

    def find(self, name: str) -> Path | None:
        """Returns the local path of a small file; None if the model lacks it."""
        if self.local:
            path = self._local / name
            return path if path.is_file() else None
        if name not in self._files:
            self._files[name] = self._copy(name) if self._url else self._download(name)
        return self._files[name]

    def _copy(self, name: str) -> Path | None:
        """Copies a file from a URL."""
        data = self._remote.read(name)
        if data is None:
            return None
        try:
            copy = self._copies / name
            copy.parent.mkdir(exist_ok=True)  # its name may have a folder in it
            copy.write_bytes(data)
        except OSError as error:
            raise RunError(
                f"{self.where}: {name} cannot be copied to the folder for "
                f"temporary files: {error.strerror}",
                remedy="TMPDIR names another folder",
            ) from error
        return copy

    @functools.cached_property
    def _copies(self) -> Path:
        """Returns a folder for copies of small files, which goes with this object."""
        folder = tempfile.mkdtemp(prefix="model_")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    def _download(self, name: str) -> Path | None:
        """Returns the path of a file in the hub's cache, where it is put if the hub has it.

        If the hub cannot be reached, a file that the cache lacks counts as missing from the model
        only where the rest of the model is in the cache, or where HF_HUB_OFFLINE says so.
        """
        try:
            with hub_requests(self.where):
                path = hf_hub_download(
                    self.model_path, name, revision=self._revision, local_files_only=self._offline
                )
            # The folder that holds the files is named after the commit.
            self._revision = Path(path.removesuffix(name)).name
            if self._offline and not constants.HF_HUB_OFFLINE:
                _log_that_the_cache_is_read(self.where, self._revision)
            return Path(path)
        except LocalEntryNotFoundError as error:
            # This EntryNotFoundError means that the network is missing, not the file.
            self._unanswered = True
            known = try_to_load_from_cache(self.model_path, name, revision=self._revision)
            snapshot = self._snapshot()
            # If the cache records that the model lacks the file, the answer is neither a path nor
            # None. A cache that another program has filled may lack such records.
            if not isinstance(known, str | None) or (
                snapshot is not None and (constants.HF_HUB_OFFLINE or self._whole(snapshot, name))
            ):
                return None
            raise self._unreachable(name, snapshot is not None, error) from error
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            if cache := unwritable_cache(error):
                raise InputError(f"{self.where}: {cache}") from error
            asked = f" --model_revision {self._revision}" if self._revision else ""
            raise InputError(
                f"{self.where}{asked}: no such local folder, and the hub says: {one_line(error)}"
            ) from error

    def _snapshot(self) -> Path | None:
        """Returns the folder of the hub's cache that holds files of this commit; None without."""
        try:
            return Path(
                snapshot_download(self.model_path, revision=self._revision, local_files_only=True)
            )
        except LocalEntryNotFoundError:
            return None

    def _whole(self, snapshot: Path, name: str) -> bool:
        """Returns whether a folder of the hub's cache holds a configuration and all weights.

        Args:
            snapshot: The folder.
            name: The file that is looked for. A repository may hold many autoencoders; the one in
                the folder of this file counts.
        """
        if self.kind is AUTOENCODER:
            folder = (snapshot / name).parent
            return folder.is_dir() and any(
                path.name.endswith(AUTOENCODER_WEIGHTS) for path in folder.iterdir()
            )
        if not (snapshot / self.kind.config).is_file():
            return False
        if (snapshot / self.kind.weights).is_file():
            return True
        if self.kind is not MODEL or not (snapshot / INDEX_FILE).is_file():
            return False
        shards = set((self.file_of_tensor or {}).values())
        return all((snapshot / shard).is_file() for shard in shards)

    def _unreachable(self, name: str, has_some: bool, error: Exception) -> InputError:
        """Returns the refusal of a model for which the hub must be asked and cannot be.

        Args:
            name: The file that is looked for.
            has_some: Whether the hub's cache holds other files of the model.
            error: Why the hub could not be asked.
        """
        if constants.HF_HUB_OFFLINE:
            return InputError(
                f"{self.where}: no such local folder, and the hub's cache "
                f"{constants.HF_HUB_CACHE} has nothing of it; HF_HUB_OFFLINE=1 forbids to ask the "
                "hub"
            )
        reason = f"the hub cannot be reached for {name}"
        if name_unknown(hub_unreachable(constants.ENDPOINT) or error):
            reason = (
                f"the hub has a name that does not resolve: offline? {self.kind.flag} takes a "
                "folder"
            )
        held = "does without what its cache lacks" if has_some else "reads its cache"
        nothing = "" if has_some else ", which has nothing of this repository"
        return InputError(
            f"{self.where}: no such local folder, and {reason}; HF_HUB_OFFLINE=1 {held} "
            f"({constants.HF_HUB_CACHE}){nothing}"
        )

    @property
    def weight_files(self) -> list[WeightFile]:
        """Returns the files of the checked weights."""
        return list(self._opened.values())

    def tokenizer_files(self) -> list[Path]:
        """Returns the files that decide how text is tokenised."""
        return [path for path in map(self.find, TOKENIZER_FILES) if path is not None]

    @functools.cached_property
    def file_of_tensor(self) -> dict[str, str] | None:
        """Returns tensor -> file name from the index; None if the checkpoint is a single file.

        If it has both, the single file counts, as it does in transformers.
        """
        index = self.find(INDEX_FILE)
        if index is None:
            return None
        if SINGLE_FILE in self._names:
            log.info("%s: %s is read, and %s is not", self.where, SINGLE_FILE, INDEX_FILE)
            return None
        try:
            files = dict(json.loads(index.read_bytes())["weight_map"])
            for tensor, name in files.items():
                if type(name) is not str or not WEIGHT_FILE.fullmatch(name):
                    what = f"{ascii(name):.80} for {ascii(tensor):.80}"
                    raise ValueError(f"weight_map: {what}, expected a file beside it")
            return files
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{index}: not a safetensors index: {error!r}") from error

    @functools.cached_property
    def tensors(self) -> dict[str, str]:
        """Returns the names of the language model's tensors, and what each is stored as."""
        if ADAPTER_FILE in self._names:
            raise self._holds_adapter()
        stored = self.file_of_tensor or self._open(SINGLE_FILE).tensors
        return text_names(stored, self.where)

    def known_tensors(self) -> Collection[str] | None:
        """Returns the names in `tensors`; None if no local file tells them."""
        told = self.local and any(map(self.find, (SINGLE_FILE, INDEX_FILE)))
        return self.tensors if told else None

    def place(self, tensor: str) -> tuple[WeightFile, Tensor]:
        """Returns the file that holds a tensor of the language model, and where it lies there."""
        if (stored := self.tensors.get(tensor)) is None:
            raise InputError(f"{self.where}: tensor {tensor} is missing")
        file = self._open((self.file_of_tensor or {}).get(stored, SINGLE_FILE))
        if stored not in file.tensors:
            other = text_names(file.tensors, file.where).get(tensor)
            but = f"; it is {other} there: {INDEX_FILE} is of another checkpoint" if other else ""
            raise InputError(f"{file.where}: tensor {stored} is missing{but}")
        return file, file.tensors[stored]

    def read(self, tensor: str, index: Index, dtype: Any = np.float32) -> np.ndarray:
        """Reads a part of a tensor, with the adapter merged into it if there is one.

        The index has a (start, stop) slice for every axis. Float8 comes dequantised, in `dtype`, or
        in float32 if there is an adapter: what it changes is not to be rounded twice.
        """
        if self.adapter is None:
            return self._values(tensor, index, dtype)
        values = functools.partial(self._values, tensor, dtype=np.float32)
        return self.adapter.merge(tensor, index, values)

    @property
    def only_file(self) -> WeightFile:
        """Returns the file that holds all weights of an adapter."""
        return self._open(self.kind.weights)

    def _values(self, tensor: str, index: Index, dtype: Any) -> np.ndarray:
        scales = self.scales(tensor)
        stored = self.place(tensor)[0].read(self.tensors[tensor], index)
        return stored if scales is None else scales.dequantize(stored, index, dtype)

    def scales(self, tensor: str) -> Scales | None:
        """Returns the scales of a float8 tensor, and None for a tensor of another type.

        Raises InputError for types that are not read, and for scales that do not fit.
        """
        return Scales.find(tensor, self.tensors, self.place, self._float8)

    @functools.cached_property
    def _float8(self) -> Float8Format:
        """Returns what config.json says of scales."""
        path = self.find("config.json")
        found = None if path is None else float8_format(read_json(path), str(path))
        return found or Float8Format()

    def _open(self, name: str) -> WeightFile:
        if name not in self._opened:
            if name == self.kind.weights and name not in self._names and not self._offline:
                raise self._has_no_weights()
            if self.local or not (self._url or not self._in_cache(name)):
                self._opened[name] = LocalFile(self.file(name))
            elif name in self._sizes:
                self._opened[name] = RemoteFile(self._remote, name, self._sizes[name])
            else:
                raise InputError(f"{self.where}: has no {name}")
        return self._opened[name]

    def _has_no_weights(self) -> InputError:
        """Returns the refusal of a model without readable weights, which says what it has."""
        shards = sorted(name for name in self._names if name.endswith(".safetensors"))
        others = sorted(name for name in self._names if OTHER_WEIGHTS.fullmatch(name))
        but, single = "", self.kind.weights
        if shards and single == SINGLE_FILE:
            but = (
                f" and no {INDEX_FILE}, but {shards[0]}; copy the index from where the shards come "
                "from: it says which shard holds a tensor"
            )
        elif others:
            but = (
                f", but {others[0]}; only safetensors are read: load the {self.kind.words} and "
                "store it with save_pretrained"
            )
        return InputError(f"{self.where}: has no {single}{but}")

    def _holds_adapter(self) -> InputError:
        """Returns the refusal of an adapter, alone or beside the weights of its base model."""
        base = read_json(self.file(ADAPTER_FILE)).get("base_model_name_or_path")
        return InputError(
            f"{self.where}: holds an adapter ({ADAPTER_FILE}"
            f"{f', of {base}' if base else ''}), which --lora takes; give its base model alone here"
        )

    def _in_cache(self, name: str) -> bool:
        """Returns whether a weight file of the hub is in the local cache, or is to be put there."""
        self.file(self.kind.config)  # from now on the revision is a commit
        if isinstance(try_to_load_from_cache(self.model_path, name, revision=self._revision), str):
            return True
        if not self._keep or self._offline:
            return self._keep
        cache = Path(constants.HF_HUB_CACHE)
        size, free = self._sizes.get(name, 0), shutil.disk_usage(cache).free
        if size > free:
            text = "%s takes %.3g GB, but %s has only %.3g free: it is read straight into memory"
            log.warning(text, name, size / 1e9, cache, free / 1e9)
        return size <= free

    @functools.cached_property
    def _remote(self) -> SourceFolder:
        """Returns the folder that holds the weights if they are not in a local one."""
        try:
            url = self.model_path if self._url else f"hf://{self.model_path}@{self.commit}"
            return SourceFolder(url)
        except FolderError as error:
            raise InputError(f"{self.kind.flag} {error}") from error

    @property
    def _offline(self) -> bool:
        """Returns whether the model is on the hub, which cannot be asked."""
        on_hub = not (self.local or self._url)
        return on_hub and (
            constants.HF_HUB_OFFLINE
            or self._unanswered
            or hub_unreachable(constants.ENDPOINT) is not None
        )

    @functools.cached_property
    def _names(self) -> Collection[str]:
        """Returns the names of the model's files; offline, of those in the hub's cache."""
        if self.local:
            return os.listdir(self._local)
        return os.listdir(self.file(self.kind.config).parent) if self._offline else self._sizes

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """Returns name -> size in bytes of the remote files."""
        try:
            return self._remote.files()
        except FolderError as error:
            if error.final:
                raise InputError(f"{self.kind.flag} {error}") from error
            raise


@functools.cache
def _log_that_the_cache_is_read(where: str, commit: str) -> None:
    """Logs once for each model that its newest commit is not known."""
    log.warning(
        "%s: the hub cannot be reached; commit %s is read from its cache, %s",
        where,
        commit,
        constants.HF_HUB_CACHE,
    )


def check_adapter(lora: str | None) -> None:
    """Raises InputError if there is no adapter in this folder; a run looks at all of it."""
    if lora is not None:
        Checkpoint(lora, kind=ADAPTER).file(ADAPTER.config)


def read_json(path: str | Path) -> dict[str, Any]:
    """Returns the contents of a config.json. Raises InputError if it is no JSON object."""
    try:
        raw = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw
