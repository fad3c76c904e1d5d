"""Reads shards: their samples, their tokens, and the activations at their hooks.

A safetensors shard is read by ranges: only the requested rows of the requested hooks, whose bytes
are not checked. A pickle has to be read whole, and its sha256 is compared. Reading never runs
pickled code.
"""

import hashlib
import io
import mmap
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
    reader: PickledShard | SafetensorsFile
    if read_by_ranges(commit):
        reader = SafetensorsFile(_ranges_of(folder, commit), commit.bytes, where)
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in reader.tensors.items()}
        arrays = [each for name, hook in hooks.items() for each in hook.arrays(name).items()]
        for name, (dtype, width) in arrays:
            _expect(where, name, found.get(name), (dtype, (commit.tokens, width)))
        for name, length in (("sample_offsets", commit.count + 1), ("position", commit.tokens)):
            _expect(where, name, found[name][1], (length,))
    else:
        reader = PickledShard(_unpickle(folder, commit, where), hooks, where)
    _check_samples(where, reader, commit)
    return reader


def _check_samples(where: str, reader: "ShardReader", commit: Commit) -> None:
    """Raises RunError unless the samples match the shard's JSON."""
    indices, offsets = reader.sample_idx, reader.offsets
    _expect(where, "number of samples", len(indices), commit.count)
    first_and_last = [int(index) for index in indices[[0, -1]]]
    _expect(where, "first and last sample", first_and_last, [commit.first, commit.last])
    _expect(where, "tokens", int(offsets[-1]), commit.tokens)
    ascend = (indices[1:] > indices[:-1]).all() and (offsets[1:] >= offsets[:-1]).all()
    if offsets[0] != 0 or not ascend:  # differences may overflow
        raise RunError(f"{where}: is damaged: its samples are not in ascending order")


def _expect(where: str, what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise RunError(f"{where}: {what}: found {found}, expected {expected}")


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
            parts = (shard.slices, shard.scales) if hook.encoded else (shard.slices,)
            for array, part in zip(hook.arrays(name), parts, strict=True):
                self._slices[array] = part[hook.key]
        token_ids: list[np.ndarray] = []
        labels: dict[str, list[np.ndarray]] = {name: [] for name in shard.samples[0].labels}
        for row in shard.samples:
            if row.token_ids is None:
                raise RunError(
                    f"{where}: sample {row.sample_idx}: has no token ids, which reading needs"
                )
            token_ids.append(row.token_ids)
            for name, values in row.labels.items():
                labels[name].append(values)
        self.sample_idx = np.array([row.sample_idx for row in shard.samples], np.int64)
        self.offsets = shard.offsets
        self._tokens = _concatenate(token_ids), _concatenate(shard.positions)
        self._labels = {name: _concatenate(parts) for name, parts in labels.items()}

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


def pinned_version(folder: Folder, commit: Commit, name: str) -> str | None:
    """Returns the version that a file of a shard must have; None where any will do: on a disk,
    where `_check_standing` looks after it, and in a copy of the folder that it was written to."""
    return None if folder.local or commit.url != folder.url else commit.files[name].version


def _ranges_of(folder: Folder, commit: Commit) -> Callable[[int, int], np.ndarray]:
    """Returns a function that reads the bytes of a shard from `start` to `stop`, as uint8."""
    where, version = f"{folder.url}/{commit.file}", pinned_version(folder, commit, commit.file)
    if folder.local:
        content = np.frombuffer(_whole(folder, commit, where), np.uint8)
        return lambda start, stop: content[start:stop]

    def download(start: int, stop: int) -> np.ndarray:
        data = b""
        if stop > start:
            data = _read(folder, commit.file, where, start=start, stop=stop, version=version)
        if len(data) != stop - start:
            raise RunError(f"{where}: is shorter than its JSON says")
        return np.frombuffer(data, np.uint8)

    return download


def _whole(folder: Folder, commit: Commit, where: str) -> bytes | mmap.mmap:
    """Returns the bytes of a shard's file: those on the disk itself, or in memory."""
    content: bytes | mmap.mmap
    if not folder.local:
        version = pinned_version(folder, commit, commit.file)
        content = _read(folder, commit.file, where, version=version, most=commit.bytes)
    else:
        try:
            with open(_path(folder, commit), "rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise RunError(f"{where}: is missing; {REPLACED}") from error
        except (OSError, ValueError) as error:  # ValueError: an empty file
            reason = error.strerror if isinstance(error, OSError) else error
            raise RunError(f"{where}: cannot be read: {reason}") from error
        _check_standing(folder, commit, where)
    if len(content) != commit.bytes:
        raise RunError(f"{where}: has {len(content)} bytes, its JSON says {commit.bytes}")
    return content


def _check_standing(folder: Folder, commit: Commit, where: str) -> None:
    """Raises RunError if a shard of a local folder was replaced: its JSON is, before its files. A
    file that was opened before that keeps its content."""
    data = folder.read(commit.name, most=MOST_BYTES)
    with suppress(DamagedError):
        if data is not None and parse_commit(data, commit.name, commit.name) != commit:
            raise RunError(f"{where}: {REPLACED}")


def _read(folder: Folder, name: str, where: str, **options: Any) -> bytes:
    """Reads a file that a commit names, or a range of it. Raises RunError if it is missing or was
    replaced."""
    try:
        data = folder.read(name, **options)
    except ChangedError as error:
        raise RunError(f"{where}: {REPLACED}") from error
    if data is None:
        raise RunError(f"{where}: is missing; {REPLACED}")
    return data


def _unpickle(folder: Folder, commit: Commit, where: str) -> Shard:
    """Reads a pickle, and compares its sha256 at the same time. Raises RunError."""
    content = _whole(folder, commit, where)
    stream = (
        io.BytesIO(content) if isinstance(content, bytes) else open(_path(folder, commit), "rb")
    )
    with stream, ThreadPoolExecutor(1) as pool:
        if folder.local:
            _check_standing(folder, commit, where)  # the file was opened once more
        digest = pool.submit(_check_digest, content, commit.sha256, where)
        shard = read_pickle(stream, where, commit.unpacked)
        digest.result()
    return shard


def _path(folder: Folder, commit: Commit) -> Path:
    return Path(local_path(folder.url)) / commit.file


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
    version = pinned_version(folder, commit, name)
    data = _read(folder, name, where, version=version, most=facts.bytes)
    _check_digest(data, facts.sha256, where)
    return data, where
