"""Reads shards: their samples, their tokens, and the activations at their hooks.

A safetensors shard is read by ranges: only the requested rows of the requested hooks, whose bytes
are not checked. A pickle has to be read whole, and its sha256 is compared. Reading never runs
pickled code.
"""

import hashlib
import mmap
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from activation_extraction.common.encodings import FLOAT8, SCALES, VALUES, decode, token_bytes
from activation_extraction.common.errors import RunError
from activation_extraction.store.commit import MOST_BYTES, Commit, DamagedError
from activation_extraction.store.folder import ChangedError, Folder, local_path
from activation_extraction.store.formats import SAFETENSORS, format_of
from activation_extraction.store.metadata import parse_commit
from activation_extraction.store.pickle_file import read_pickle
from activation_extraction.store.safetensors_file import SCALE, SafetensorsFile
from activation_extraction.store.shard import Shard
from activation_extraction.store.statistics import Sums, unpack_sums

REPLACED = "the run was overwritten or repaired since its JSON was read; open it again"


@dataclass(frozen=True)
class StoredHook:
    """A hook as the run records it.

    key: its name in pickles. dtype: the dtype that reading gives, unless another is asked for.
    activations: whether its values are activations, rather than integers, losses and the like,
    which have a dtype of their own. encoded: whether they are stored as float8.
    """

    key: Any
    width: int
    dtype: np.dtype
    activations: bool = True
    encoded: bool = False

    @property
    def stored_bytes(self) -> int:
        """The bytes of a token where it is stored."""
        return token_bytes(self.width, FLOAT8 if self.encoded else self.dtype.name)

    def arrays(self, name: str) -> dict[str, tuple[np.dtype, int]]:
        """Returns the dtype and the width of the arrays in which the hook is stored, by name."""
        if not self.encoded:
            return {name: (self.dtype, self.width)}
        return {name: (VALUES, self.width), name + SCALE: (SCALES, 1)}


def read_by_ranges(commit: Commit) -> bool:
    """Returns whether rows of a shard can be read without the rest of it."""
    return format_of(commit.file) is SAFETENSORS


def open_shard(folder: Folder, commit: Commit, hooks: Mapping[str, StoredHook]) -> "ShardReader":
    """Opens a shard. hooks: the hooks that will be read, by name.

    Raises RunError if the file is missing or damaged, or does not match its JSON.
    """
    where = f"{folder.url}/{commit.file}"
    if not read_by_ranges(commit):
        return PickledShard(_unpickle(folder, commit, where), hooks, where)
    reader = SafetensorsFile(_ranges_of(folder, commit, where), commit.bytes, where)
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in reader.tensors.items()}
    expected: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
        "sample_idx": (np.dtype(np.int64), (commit.count,)),
        "sample_offsets": (np.dtype(np.int64), (commit.count + 1,)),
        "token_ids": (np.dtype(np.int32), (commit.tokens,)),
        "position": (np.dtype(np.int32), (commit.tokens,)),
    }
    for name, hook in hooks.items():
        for array, (dtype, width) in hook.arrays(name).items():
            expected[array] = dtype, (commit.tokens, width)
    for name, each in expected.items():
        expect(where, name, found.get(name), each)
    # Nobody has compared these ranges with a checksum.
    indices, offsets = reader.sample_idx, reader.offsets
    ends = indices[[0, -1]].tolist()
    expect(where, "first and last sample", ends, [commit.first, commit.last])
    expect(where, "first and last offset", offsets[[0, -1]].tolist(), [0, commit.tokens])
    if not ((indices[1:] > indices[:-1]).all() and (offsets[1:] >= offsets[:-1]).all()):
        raise RunError(f"{where}: is damaged: its samples are not in ascending order")
    return reader


def expect(where: str, what: str, found: Any, expected: Any) -> None:
    """Raises RunError unless what was found in a shard is what its JSON says."""
    if found != expected:
        raise RunError(f"{where}: {what}: found {found}, its JSON says {expected}")


class PickledShard:
    """A shard in memory, with the requested hooks.

    sample_idx: int64 (samples,). offsets: int64 (samples + 1,); sample i has the tokens offsets[i]
    to offsets[i + 1].
    """

    def __init__(self, shard: Shard, hooks: Mapping[str, StoredHook], where: str) -> None:
        self._slices = {}
        for name, hook in hooks.items():
            if hook.key not in shard.slices:
                raise RunError(f"{where}: has no hook {name}; it has {list(shard.slices)}")
            self._slices[name] = shard.slices[hook.key]
            if hook.encoded:
                self._slices[name + SCALE] = shard.scales[hook.key]
        token_ids = [row.token_ids for row in shard.samples if row.token_ids is not None]
        if len(token_ids) < len(shard.samples):
            number = next(row.sample_idx for row in shard.samples if row.token_ids is None)
            raise RunError(f"{where}: sample {number}: has no token ids, which reading needs")
        self.sample_idx = np.array([row.sample_idx for row in shard.samples], np.int64)
        self.offsets = shard.offsets
        self._tokens = _concatenate(token_ids), _concatenate(shard.positions)
        self._labels = {
            name: _concatenate([row.labels[name] for row in shard.samples])
            for name in shard.samples[0].labels
        }

    def tokens(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids and the positions of tokens `start` to `stop`, int32."""
        token_ids, positions = self._tokens
        return token_ids[start:stop], positions[start:stop]

    def labels(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns the labels of tokens `start` to `stop`, int32, by the names that the run has."""
        return {name: values[start:stop] for name, values in self._labels.items()}

    def rows(self, hook: str, start: int, stop: int) -> np.ndarray:
        """Returns tokens `start` to `stop` of a hook or of its scales, as they are stored."""
        first = int(np.searchsorted(self.offsets, start, "right")) - 1
        last = int(np.searchsorted(self.offsets, stop, "left"))
        parts = [
            self._slices[hook][i][max(start - self.offsets[i], 0) : stop - self.offsets[i]]
            for i in range(first, last)
        ]
        return _concatenate(parts or [self._slices[hook][0][:0]])


ShardReader = PickledShard | SafetensorsFile


def read_rows(
    reader: ShardReader, name: str, hook: StoredHook, span: tuple[int, int], dtype: Any = None
) -> np.ndarray:
    """Returns the values at a hook of the tokens in a span, (tokens, width).

    dtype: the dtype to which encoded activations are decoded, by default float32; other values are
    returned as they are stored.
    """
    values = reader.rows(name, *span)
    if not hook.encoded:
        return values
    return decode(values, reader.rows(name + SCALE, *span), dtype or hook.dtype)


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    """Concatenates arrays, but does not copy a single one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def check_shard_file(folder: Folder, commit: Commit) -> None:
    """Raises RunError if the sha256 of a shard's file is not the one in its JSON, or OSError."""
    _check_digest(_whole(folder, commit, commit.file), commit.sha256, commit.file)


def read_shard(folder: Folder, commit: Commit) -> Shard:
    """Returns a whole shard, without the values in its table of samples.

    Raises RunError if its file is damaged, or OSError.
    """
    if not read_by_ranges(commit):
        return _unpickle(folder, commit, commit.file)
    content = _whole(folder, commit, commit.file)
    _check_digest(content, commit.sha256, commit.file)
    data = np.frombuffer(content, np.uint8)
    file = SafetensorsFile(lambda start, stop: data[start:stop], commit.bytes, commit.file)
    return file.shard(commit.names)


def _ranges_of(folder: Folder, commit: Commit, where: str) -> Callable[[int, int], np.ndarray]:
    """Returns a function that reads the bytes of a shard from `start` to `stop`, as uint8."""
    if folder.local:
        content = np.frombuffer(_whole(folder, commit, where), np.uint8)
        return lambda start, stop: content[start:stop]

    def download(start: int, stop: int) -> np.ndarray:
        data = b""
        if stop > start:
            data = _read(folder, commit, commit.file, where, start=start, stop=stop)
        if len(data) != stop - start:
            raise RunError(f"{where}: is shorter than its JSON says")
        return np.frombuffer(data, np.uint8)

    return download


def _whole(folder: Folder, commit: Commit, where: str) -> bytes | mmap.mmap:
    """Returns the bytes of a shard's file: those on the disk itself, or in memory."""
    content: bytes | mmap.mmap
    if not folder.local:
        content = _read(folder, commit, commit.file, where, most=commit.bytes)
    else:
        try:
            with open(Path(local_path(folder.url)) / commit.file, "rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise RunError(f"{where}: is missing; {REPLACED}") from error
        except (OSError, ValueError) as error:  # ValueError: an empty file
            reason = getattr(error, "strerror", None) or error
            raise RunError(f"{where}: cannot be read: {reason}") from error
        # The JSON of a shard that is replaced changes before its files. A file that was opened
        # before that keeps its content.
        data = folder.read(commit.name, most=MOST_BYTES)
        with suppress(DamagedError):
            if data is not None and parse_commit(data, commit.name, commit.name) != commit:
                raise RunError(f"{where}: {REPLACED}")
    if len(content) != commit.bytes:
        raise RunError(f"{where}: has {len(content)} bytes, its JSON says {commit.bytes}")
    return content


def _read(folder: Folder, commit: Commit, name: str, where: str, **options: Any) -> bytes:
    """Reads a file of a shard, or a range of it. Raises RunError if it is missing or was replaced.

    Its version must be the one in the JSON, except on a disk and in a copy of the folder that it
    was written to.
    """
    pinned = not folder.local and commit.url == folder.url
    try:
        version = commit.files[name].version if pinned else None
        data = folder.read(name, version=version, **options)
    except ChangedError as error:
        raise RunError(f"{where}: {REPLACED}") from error
    if data is None:
        raise RunError(f"{where}: is missing; {REPLACED}")
    return data


def _unpickle(folder: Folder, commit: Commit, where: str) -> Shard:
    """Reads a pickle, and compares its sha256 at the same time. Raises RunError."""
    content = _whole(folder, commit, where)
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(_check_digest, content, commit.sha256, where)
        shard = read_pickle(pyarrow.BufferReader(content), where, commit.unpacked)
        digest.result()
    return shard


def _check_digest(content: bytes | mmap.mmap, sha256: str, where: str) -> None:
    if hashlib.sha256(content).hexdigest() != sha256:
        raise RunError(f"{where}: is damaged: its sha256 is not the one in its JSON")


def read_sums(folder: Folder, commit: Commit, hooks: Iterable[str]) -> dict[str, Sums]:
    """Returns the sums of a shard at these hooks. Raises RunError for a damaged file."""
    return unpack_sums(read_beside(folder, commit, commit.statistics_file)[0], hooks)


def read_beside(folder: Folder, commit: Commit, name: str) -> tuple[bytes, str]:
    """Returns the content of a small file beside a shard, and the file's URL for messages.

    Raises RunError if it is missing or damaged.
    """
    facts, where = commit.files[name], f"{folder.url}/{name}"
    data = _read(folder, commit, name, where, most=facts.bytes)
    _check_digest(data, facts.sha256, where)
    return data, where
