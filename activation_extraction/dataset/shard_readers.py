"""Shards that are open for reading: their samples, their tokens, and rows of their hooks.

A safetensors shard is read by ranges: nothing is touched but the rows of the hooks that are asked
for. A pickle has to be read whole. Reading never runs pickled code.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.dataset.hook_names import ByHook
from activation_extraction.store import safetensors_file
from activation_extraction.store.commit import Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.pickle_file import Record, positions_of, read_records
from activation_extraction.store.reasons import scratch_folder

OPEN_SHARDS = 128  # that stay open, where a shard is read by ranges; one pickle stays in memory


@dataclass(frozen=True)
class StoredHook:
    """What the run records of a hook. key: what the pickles call it."""

    key: Any
    width: int
    dtype: np.dtype


@dataclass(frozen=True)
class Samples:
    """The samples of a shard.

    sample_idx: int64 (samples,). offsets: int64 (samples + 1,); sample i has the tokens offsets[i]
    to offsets[i + 1].
    """

    sample_idx: np.ndarray
    offsets: np.ndarray


class ShardReader(Protocol):
    """A shard that is open for reading. All methods raise RunError."""

    @property
    def samples(self) -> Samples: ...

    @property
    def told(self) -> Sequence[Sequence[Any]]:
        """Text previews, document ids, rows of the data set and how much was cut, per sample."""
        ...

    def tokens(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and positions of tokens `start` to `stop`, int32."""
        ...

    def rows(self, hook: str, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` of the shard at this hook: (stop - start, width)."""
        ...


def read_by_ranges(commit: Commit) -> bool:
    """Whether rows of a shard can be read without the rest of it."""
    return commit.file.endswith(".safetensors")


def open_shard(folder: Folder, commit: Commit, hooks: Mapping[str, StoredHook]) -> ShardReader:
    """Opens a shard. hooks: those that will be read, by name.

    Raises RunError when the file is missing or damaged, or is not what its JSON file describes.
    """
    kind = SafetensorsReader if read_by_ranges(commit) else PickleReader
    return kind(folder, commit, hooks)


class SafetensorsReader:
    """Reads rows from a mapped local file, or ranges of bytes from a bucket."""

    def __init__(self, folder: Folder, commit: Commit, hooks: Mapping[str, StoredHook]) -> None:
        self._where = f"{folder.url}/{commit.file}"
        self._size = commit.bytes
        self._mapped = folder.local
        self._read = _ranges_of(folder, commit)
        self._tensors = self._header().tensors
        self._views: dict[str, np.ndarray] = {}
        for name, hook in hooks.items():
            tensor = self._tensors.get(name)
            found = None if tensor is None else (tensor.dtype, tensor.shape)
            _expect(self._where, name, found, (hook.dtype, (commit.tokens, hook.width)))
        count, tokens = ("sample_offsets", commit.count + 1), ("position", commit.tokens)
        for name, length in (count, tokens):
            _expect(self._where, name, self._tensors[name].shape, (length,))
        self.samples = Samples(self._whole("sample_idx"), self._whole("sample_offsets"))
        _check_samples(self._where, self.samples, commit)

    @cached_property
    def told(self) -> Sequence[Sequence[Any]]:
        try:
            told = safetensors_file.texts_of(self._header())
            if any(len(each) != len(self.samples.sample_idx) for each in told):
                raise ValueError("they are not one for each sample")
        except safetensors_file.MALFORMED as error:
            raise RunError(f"{self._where}: its texts cannot be read: {error}") from error
        return told

    def tokens(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return self.rows("token_ids", start, stop), self.rows("position", start, stop)

    def rows(self, hook: str, start: int, stop: int) -> np.ndarray:
        if not self._mapped:
            return self._read_rows(hook, start, stop)
        if hook not in self._views:
            self._views[hook] = self._read_rows(hook, 0, self._tensors[hook].shape[0])
        return self._views[hook][start:stop]

    def _read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        tensor = self._tensors[name]
        first, row = tensor.offset, tensor.row_bytes
        content = self._read(first + start * row, first + stop * row)
        return np.ndarray((stop - start, *tensor.shape[1:]), tensor.dtype, content)

    def _whole(self, name: str) -> np.ndarray:
        return np.array(self.rows(name, 0, self._tensors[name].shape[0]))

    def _header(self) -> safetensors_file.Header:
        """Read again for the texts: they are longer than all the rest that is kept of a shard."""
        return safetensors_file.read_header(
            lambda start, stop: self._read(start, stop).tobytes(), self._size, self._where
        )


def _ranges_of(folder: Folder, commit: Commit) -> Callable[[int, int], np.ndarray]:
    """A function that reads the bytes from `start` to `stop` of a shard, as uint8."""
    where = f"{folder.url}/{commit.file}"
    if not folder.local:

        def download(start: int, stop: int) -> np.ndarray:
            data = folder.read(commit.file, start, stop) if stop > start else b""
            if data is None or len(data) != stop - start:
                raise RunError(f"{where}: is missing, or shorter than its JSON says")
            return np.frombuffer(data, np.uint8)

        return download
    path = folder.fetch(commit.file, Path())
    _check_size(path, commit, where)
    try:
        mapped = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise RunError(f"{where}: cannot be read: {error}") from error
    return lambda start, stop: mapped[start:stop]


class PickleReader:
    """A pickled shard in memory, with the hooks that were asked for."""

    def __init__(self, folder: Folder, commit: Commit, hooks: Mapping[str, StoredHook]) -> None:
        where = f"{folder.url}/{commit.file}"
        shard = _unpickle(folder, commit, where)
        for name, hook in hooks.items():
            if hook.key not in shard:
                raise RunError(f"{where}: has no hook {name}; it has {list(shard)}")
        records = next(iter(shard.values()))
        try:
            self._slices = {name: _slices(shard[hook.key]) for name, hook in hooks.items()}
            token_ids = [np.asarray(record["token_ids"], np.int32) for record in records]
            self.told = (
                [record["text_preview"] for record in records],
                [record["doc_id"] for record in records],
                [record.get("row") for record in records],
                [record.get("cut", 0) for record in records],
            )
            positions = [positions_of(record) for record in records]
            indices = [record["sample_idx"] for record in records]
            lengths = [len(ids) for ids in token_ids]
            if [each.shape for each in (*token_ids, *positions)] != 2 * [(n,) for n in lengths]:
                raise ValueError("positions and token ids differ in number")
            index = np.array(indices, np.int64)
            if any(len(part) != len(records) for part in self._slices.values()):
                raise ValueError("hooks differ in their number of samples")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RunError(f"{where}: its records cannot be read: {error!r:.200}") from error
        self.samples = Samples(index, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
        _check_samples(where, self.samples, commit)
        for name, hook in hooks.items():
            for length, part in zip(lengths, self._slices[name], strict=True):
                found = part.dtype, part.shape
                _expect(where, name, found, (hook.dtype, (length, hook.width)))
        self._token_ids = _joined(token_ids)
        self._position = _joined(positions)

    def tokens(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return self._token_ids[start:stop], self._position[start:stop]

    def rows(self, hook: str, start: int, stop: int) -> np.ndarray:
        offsets = self.samples.offsets
        first = int(np.searchsorted(offsets, start, "right")) - 1
        last = int(np.searchsorted(offsets, stop, "left"))
        parts = [
            self._slices[hook][i][max(start - offsets[i], 0) : stop - offsets[i]]
            for i in range(first, last)
        ]
        return _joined(parts or [self._slices[hook][0][:0]])


def _unpickle(folder: Folder, commit: Commit, where: str) -> dict[Any, list[Record]]:
    """Reads a pickle. Its sha256 is compared meanwhile. Raises RunError."""
    with scratch_folder() as scratch, ThreadPoolExecutor(1) as pool:
        path = folder.fetch(commit.file, scratch)
        _check_size(path, commit, where)
        digest = pool.submit(_sha256, path)
        shard = read_records(path, commit.unpacked)
        if digest.result() != commit.sha256:
            raise RunError(f"{where}: is damaged: its sha256 is not the one in its JSON")
    return shard


def _slices(records: Sequence[Record]) -> list[np.ndarray]:
    slices = [record["activation"] for record in records]
    if not all(type(each) is np.ndarray for each in slices):
        raise ValueError("an activation that is no array")
    return slices


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check_size(path: Path, commit: Commit, where: str) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise RunError(f"{where}: cannot be read: {error.strerror}") from error
    if size != commit.bytes:
        raise RunError(f"{where}: has {size} bytes, its JSON says {commit.bytes}")


def _check_samples(where: str, samples: Samples, commit: Commit) -> None:
    """Raises RunError unless the table of samples is the one that the JSON file describes."""
    _expect(where, "number of samples", len(samples.sample_idx), commit.count)
    if not commit.count:
        raise RunError(f"{where}: has no sample")
    ends = [int(i) for i in samples.sample_idx[[0, -1]]]
    _expect(where, "first and last sample", ends, [commit.first, commit.last])
    bounds = [int(samples.offsets[0]), int(samples.offsets[-1])]
    _expect(where, "range of tokens", bounds, [0, commit.tokens])
    if (np.diff(samples.offsets) < 0).any() or (np.diff(samples.sample_idx) <= 0).any():
        raise RunError(f"{where}: is damaged: its samples are not in ascending order")


def _expect(where: str, what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise RunError(f"{where}: {what}: found {found}, expected {expected}")


@dataclass
class OpenShards:
    """The shards of a run; the last few that were read stay open.

    url: of the run. shards: the name of the folder and the commit of each. A copy of this in
    another process opens its own files and connections, also after a fork.
    """

    url: str
    shards: list[tuple[str, Commit]]
    hooks: ByHook[StoredHook]

    def __post_init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._folders: dict[str, Folder] = {}
        self._readers: OrderedDict[int, ShardReader] = OrderedDict()

    def __getstate__(self) -> tuple[str, list[tuple[str, Commit]], ByHook[StoredHook]]:
        return self.url, self.shards, self.hooks

    def __setstate__(self, state: tuple[str, list[tuple[str, Commit]], ByHook[StoredHook]]) -> None:
        self.url, self.shards, self.hooks = state
        self.__post_init__()

    def row_bytes(self, hooks: Sequence[str]) -> int:
        """The bytes of one token at these hooks."""
        return sum(self.hooks[name].width * self.hooks[name].dtype.itemsize for name in hooks)

    def get(self, number: int) -> ShardReader:
        """The reader of a shard, which stays open for the next call. Raises OSError."""
        if self._process != os.getpid():
            self.__post_init__()
        with self._lock:
            if number in self._readers:
                self._readers.move_to_end(number)
                return self._readers[number]
        reader = self.open(number)
        most = OPEN_SHARDS if read_by_ranges(self.shards[number][1]) else 1
        with self._lock:
            self._readers[number] = reader
            while len(self._readers) > most:
                self._readers.popitem(last=False)
        return reader

    def open(self, number: int, hooks: Sequence[str] | None = None) -> ShardReader:
        """A new reader of a shard, for some of the hooks. Raises OSError."""
        if self._process != os.getpid():
            self.__post_init__()
        folder, commit = self.shards[number]
        wanted = self.hooks if hooks is None else {name: self.hooks[name] for name in hooks}
        try:
            if folder not in self._folders:
                self._folders[folder] = Folder(self.url).child(folder)
            return open_shard(self._folders[folder], commit, wanted)
        except RunError as error:
            raise OSError(str(error)) from error
