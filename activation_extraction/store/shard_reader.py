"""Shards that are open for reading: their samples, their tokens, and rows of their hooks.

A safetensors shard is read by ranges: nothing is touched but the rows of the hooks that are asked
for. A pickle has to be read whole. Reading never runs pickled code.
"""

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.store.commit import Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.formats import SAFETENSORS, format_of
from activation_extraction.store.patience import scratch_folder
from activation_extraction.store.pickle_file import ContentError, read_pickle
from activation_extraction.store.safetensors_file import SafetensorsFile
from activation_extraction.store.shard import Shard, TableRow, follow_each_other, unpack_table
from activation_extraction.store.statistics import Sums, unpack_sums


@dataclass(frozen=True)
class StoredHook:
    """What the run records of a hook. key: what the pickles call it. integers: whether its values
    number something, instead of being activations."""

    key: Any
    width: int
    dtype: np.dtype
    integers: bool = False


def read_by_ranges(commit: Commit) -> bool:
    """Returns whether rows of a shard can be read without the rest of it."""
    return format_of(commit.file) is SAFETENSORS


def open_shard(folder: Folder, commit: Commit, hooks: Mapping[str, StoredHook]) -> "ShardReader":
    """Opens a shard. hooks: those that will be read, by name.

    Raises RunError when the file is missing or damaged, or is not what its JSON file describes.
    """
    where = f"{folder.url}/{commit.file}"
    reader: PickledShard | SafetensorsFile
    if read_by_ranges(commit):
        reader = SafetensorsFile(_ranges_of(folder, commit), commit.bytes, where)
        forms = {name: (each.dtype, each.shape) for name, each in reader.tensors.items()}
        for name, hook in hooks.items():
            due = hook.dtype, (commit.tokens, hook.width)
            _expect(where, name, forms.get(name), due)
        for name, length in (("sample_offsets", commit.count + 1), ("position", commit.tokens)):
            _expect(where, name, forms[name][1], (length,))
    else:
        with scratch_folder() as scratch:
            try:
                shard = _unpickle(folder.fetch(commit.file, scratch), commit, where)
            except ContentError as error:
                raise RunError(f"{where}: {error}") from error
        reader = PickledShard(shard, hooks, where)
    _check_samples(where, reader, commit)
    return reader


def _check_samples(where: str, reader: "ShardReader", commit: Commit) -> None:
    """Raises RunError unless the samples are those that the JSON file describes."""
    indices, offsets = reader.sample_idx, reader.offsets
    _expect(where, "number of samples", len(indices), commit.count)
    if not commit.count:
        raise RunError(f"{where}: has no sample")
    ends = [int(i) for i in indices[[0, -1]]]
    _expect(where, "first and last sample", ends, [commit.first, commit.last])
    _expect(where, "tokens", int(offsets[-1]), commit.tokens)
    ascending = bool((indices[1:] > indices[:-1]).all())  # differences may overflow
    if not ascending or not follow_each_other(offsets, commit.tokens):
        raise RunError(f"{where}: is damaged: its samples are not in ascending order")


def _expect(where: str, what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise RunError(f"{where}: {what}: found {found}, expected {expected}")


class PickledShard:
    """A shard in memory, with the hooks that were asked for.

    sample_idx: int64 (samples,). offsets: int64 (samples + 1,); sample i has the tokens offsets[i]
    to offsets[i + 1].
    """

    def __init__(self, shard: Shard, hooks: Mapping[str, StoredHook], where: str) -> None:
        self._slices = {}
        if not shard.samples:
            raise RunError(f"{where}: has no sample")
        for name, hook in hooks.items():
            if hook.key not in shard.slices:
                raise RunError(f"{where}: has no hook {name}; it has {list(shard.slices)}")
            self._slices[name] = shard.slices[hook.key]
            for row, values in zip(shard.samples, self._slices[name], strict=True):
                expected = hook.dtype, (len(row.positions), hook.width)
                _expect(where, name, (values.dtype, values.shape), expected)
        ids: list[np.ndarray] = []
        for row in shard.samples:
            at, own = f"{where}: sample {row.sample_idx}", row.token_ids
            if own is None:
                raise RunError(f"{at}: has no token ids, which reading needs")
            form = np.dtype(np.int32), (len(row.positions),)
            _expect(at, "token ids", (own.dtype, own.shape), form)
            ids.append(own)
        self.sample_idx = np.array([row.sample_idx for row in shard.samples], np.int64)
        self.offsets = shard.offsets
        self._tokens = _joined(ids), _joined(shard.positions)

    def tokens(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns token ids and positions of tokens `start` to `stop`, int32."""
        token_ids, positions = self._tokens
        return token_ids[start:stop], positions[start:stop]

    def rows(self, hook: str, start: int, stop: int) -> np.ndarray:
        """Returns tokens `start` to `stop` of the shard at this hook: (stop - start, width)."""
        first = int(np.searchsorted(self.offsets, start, "right")) - 1
        last = int(np.searchsorted(self.offsets, stop, "left"))
        parts = [
            self._slices[hook][i][max(start - self.offsets[i], 0) : stop - self.offsets[i]]
            for i in range(first, last)
        ]
        return _joined(parts or [self._slices[hook][0][:0]])


ShardReader = PickledShard | SafetensorsFile


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def read_shard(folder: Folder, commit: Commit, scratch: Path) -> Shard:
    """Returns a whole shard, without what its table of samples says.

    scratch: a folder for a download. Raises RunError if the shard is not what its JSON describes,
    or OSError.
    """
    path = folder.fetch(commit.file, scratch)
    try:
        if not read_by_ranges(commit):
            return _unpickle(path, commit, commit.file)
        _check_digest(path, commit, commit.file)
        file = SafetensorsFile(_mapped(path, commit, commit.file), commit.bytes, commit.file)
        return file.shard(commit.names)
    finally:
        if not folder.local:
            path.unlink(missing_ok=True)


def _ranges_of(folder: Folder, commit: Commit) -> Callable[[int, int], np.ndarray]:
    """A function that reads the bytes from `start` to `stop` of a shard, as uint8."""
    where = f"{folder.url}/{commit.file}"
    if folder.local:
        return _mapped(folder.fetch(commit.file, Path()), commit, where)

    def download(start: int, stop: int) -> np.ndarray:
        data = folder.read(commit.file, start, stop) if stop > start else b""
        if data is None or len(data) != stop - start:
            raise RunError(f"{where}: is missing, or shorter than its JSON says")
        return np.frombuffer(data, np.uint8)

    return download


def _mapped(path: Path, commit: Commit, where: str) -> Callable[[int, int], np.ndarray]:
    _check_size(path, commit, where)
    try:
        mapped = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise RunError(f"{where}: cannot be read: {error}") from error
    return lambda start, stop: mapped[start:stop]


def _unpickle(path: Path, commit: Commit, where: str) -> Shard:
    """Reads a pickle. Its sha256 is compared meanwhile. Raises RunError."""
    _check_size(path, commit, where)
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(_check_digest, path, commit, where)
        shard = read_pickle(path, commit.names, commit.unpacked)
        digest.result()
    return shard


def _check_digest(path: Path, commit: Commit, where: str) -> None:
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != commit.sha256:
            raise RunError(f"{where}: is damaged: its sha256 is not the one in its JSON")


def _check_size(path: Path, commit: Commit, where: str) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise RunError(f"{where}: cannot be read: {error.strerror}") from error
    if size != commit.bytes:
        raise RunError(f"{where}: has {size} bytes, its JSON says {commit.bytes}")


def read_table(folder: Folder, commit: Commit) -> list[TableRow]:
    """Returns the table of a shard's samples. Raises RunError when it is missing or damaged."""
    data, where = _read_beside(folder, commit.table_file, commit.table)
    rows = unpack_table(data, commit.count, where)
    indices = [row.sample_idx for row in rows]
    cuts = [row.cut for row in rows if row.cut]
    found = indices[:1], indices[-1:], sum(row.tokens for row in rows), len(cuts), sum(cuts)
    expected = [commit.first], [commit.last], commit.tokens, commit.cut_samples, commit.cut_tokens
    if found != expected or any(a >= b for a, b in pairwise(indices)):
        raise RunError(f"{where}: is not the table of the shard that its JSON describes")
    return rows


def read_sums(folder: Folder, commit: Commit, hooks: Mapping[str, int]) -> dict[str, Sums]:
    """Returns the sums of a shard, by hook. hooks: name -> width.

    Raises RunError when they are missing or damaged.
    """
    data, where = _read_beside(folder, commit.statistics_file, commit.statistics)
    return unpack_sums(data, hooks.items(), where)


def _read_beside(folder: Folder, name: str, sha256: str) -> tuple[bytes, str]:
    """A small file beside a shard, whose JSON has its sha256, and the file's name for messages."""
    data, where = folder.read(name), f"{folder.url}/{name}"
    if data is None:
        raise RunError(f"{where}: is missing")
    if hashlib.sha256(data).hexdigest() != sha256:
        raise RunError(f"{where}: is damaged: its sha256 is not the one in the shard's JSON")
    return data, where
