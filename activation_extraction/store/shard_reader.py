"""Reads shards: their samples, their tokens, and the activations at their hooks.

A safetensors shard is read by ranges: only the requested rows of the requested hooks. A pickle has
to be read whole. What is read is compared with the crc32c of every MiB in the shard's JSON. Reading
never runs pickled code.
"""

import hashlib
import mmap
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from crc32c import crc32c

from activation_extraction.common.codes import (
    VALUE_DTYPES,
    Codes,
    code_bytes,
    concatenated_codes,
    record_width,
)
from activation_extraction.common.encodings import FLOAT8, SCALES, VALUES, decode, token_bytes
from activation_extraction.common.errors import RunError
from activation_extraction.store.commit import MOST_BYTES, Commit, DamagedError
from activation_extraction.store.folder import ChangedError, Folder, local_path
from activation_extraction.store.formats import MIB, SAFETENSORS, format_of
from activation_extraction.store.metadata import parse_commit
from activation_extraction.store.pickle_file import read_pickle
from activation_extraction.store.safetensors_file import SCALE, SafetensorsFile
from activation_extraction.store.shard import Shard, Values
from activation_extraction.store.statistics import Sums, unpack_sums

REPLACED = "the run was overwritten or repaired since its JSON was read; open it again"
Form = tuple[np.dtype, tuple[int, ...]]  # the dtype and the shape of a tensor
FLOATS: np.dtype = np.dtype(np.float32)
RANGE = 8 * MIB  # of one request; a range may have up to twice as much
HEADER = 2**16  # bytes: room for the header of most safetensors files


@dataclass(frozen=True)
class StoredHook:
    """A hook as the run records it.

    key: its name in pickles. dtype: the dtype that reading gives, unless another is asked for.
    activations: whether its values are activations, rather than integers, losses and the like,
    which have a dtype of their own. encoded: whether they are stored as float8. most: of codes, how
    many features of a token are kept at most, and then the width is the number of all features; 0
    for other hooks.
    """

    key: Any
    width: int
    dtype: np.dtype
    activations: bool = True
    encoded: bool = False
    most: int = 0

    @property
    def row_bytes(self) -> int:
        """The bytes of a token in memory, where codes are records (common/codes.py)."""
        return 4 * record_width(self.most) if self.most else self.width * self.dtype.itemsize

    def given(self, values: np.ndarray) -> Values:
        """Returns the values of tokens as they are given to the user. values: as they are read."""
        return Codes.of(values, self.width) if self.most else values

    @property
    def stored_bytes(self) -> int:
        """The bytes of a token where it is stored; of codes, the least."""
        if self.most:
            return code_bytes(0, self.dtype)
        return token_bytes(self.width, FLOAT8 if self.encoded else self.dtype.name)

    def tensors(self, name: str, tokens: int, found: Mapping[str, Form]) -> dict[str, Form]:
        """Returns the dtype and the shape of the tensors in which the hook is stored, by name.

        found: those of the tensors that there are. How many features tokens have in all, and in
        which dtype, only these say.
        """
        if self.most:
            each: dict[str, Form] = {
                f"{name}.{part}": (FLOATS, (tokens,)) for part in ("error", "norm")
            }
            dtype, shape = found.get(f"{name}.values", (FLOATS, (0,)))
            each[f"{name}.values"] = dtype if dtype in VALUE_DTYPES else FLOATS, shape
            each[f"{name}.ids"] = np.dtype(np.int32), shape
            return each | {f"{name}.offsets": (np.dtype(np.int64), (tokens + 1,))}
        if not self.encoded:
            return {name: (self.dtype, (tokens, self.width))}
        return {name: (VALUES, (tokens, self.width)), name + SCALE: (SCALES, (tokens, 1))}


def read_by_ranges(commit: Commit) -> bool:
    """Returns whether rows of a shard can be read without the rest of it."""
    return format_of(commit.file) is SAFETENSORS


class ShardBytes:
    """The bytes of a shard's file; every MiB that is read is compared with its crc32c.

    A file on this machine is mapped, and a MiB of it is compared when it is first read. Any other
    is read in ranges of whole MiB by the threads of `requests`, RANGE at once.
    """

    def __init__(self, folder: Folder, commit: Commit, where: str, requests: Executor) -> None:
        self._folder, self._commit, self._where = folder, commit, where
        self._requests = requests
        self._crcs = commit.files[commit.file].crc32c
        self._mapped: np.ndarray | None = None
        if folder.local:
            self._mapped = np.frombuffer(_whole(folder, commit, where), np.uint8)
            self._unseen = np.ones(-(-commit.bytes // MIB), bool)

    def begin(self, start: int, stop: int) -> Callable[[], np.ndarray]:
        """Asks for the bytes from `start` to `stop`, and returns what waits for them, uint8.

        Waiting raises RunError if they are damaged or cannot be read.
        """
        first, last = start // MIB, -(-stop // MIB)
        if self._mapped is not None:
            part = self._mapped[start:stop]
            for number in first + np.flatnonzero(self._unseen[first:last]):
                self._check(self._mapped[number * MIB :][:MIB], int(number))
                self._unseen[number] = False
            return lambda: part
        edges = np.linspace(first, last, max((last - first) * MIB // RANGE, 1) + 1).astype(int)
        parts = [self._requests.submit(self._read, a, b) for a, b in pairwise(edges.tolist())]

        def wait() -> np.ndarray:
            content = _concatenate([part.result() for part in parts])
            return content[start - first * MIB : stop - first * MIB]

        return wait

    def _read(self, first: int, last: int) -> np.ndarray:
        """Reads whole MiB, by their numbers."""
        start, stop = first * MIB, min(last * MIB, self._commit.bytes)
        data = b""
        if stop > start:
            options = {"start": start, "stop": stop}
            data = _read(self._folder, self._commit, self._commit.file, self._where, **options)
        if len(data) != stop - start:
            raise RunError(f"{self._where}: is shorter than its JSON says")
        content = np.frombuffer(data, np.uint8)
        for number in range(first, last):
            self._check(content[(number - first) * MIB :][:MIB], number)
        return content

    def _check(self, block: np.ndarray, number: int) -> None:
        if f"{crc32c(block.data):08x}" != self._crcs[8 * number : 8 * number + 8]:
            raise RunError(
                f"{self._where}: is damaged in MiB {number}: its crc32c is not the one in its JSON"
            )


def open_shard(
    folder: Folder, commit: Commit, hooks: Mapping[str, StoredHook], requests: Executor
) -> "ShardReader":
    """Opens a shard. hooks: the hooks that will be read, by name. requests: the threads that read
    ranges of a file which is not on this machine.

    Raises RunError if the file is missing or damaged, or does not match its JSON.
    """
    where = f"{folder.url}/{commit.file}"
    file = ShardBytes(folder, commit, where, requests)
    if not read_by_ranges(commit):
        content = pyarrow.py_buffer(file.begin(0, commit.bytes)())
        shard = read_pickle(pyarrow.BufferReader(content), where, commit.unpacked)
        return PickledShard(shard, hooks, where)
    # The header and all that is said of samples and tokens, in one request.
    front = 0 if folder.local else HEADER + 16 * commit.count + 16 * commit.tokens
    reader = SafetensorsFile(file.begin, commit.bytes, where, -(-front // MIB) * MIB)
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in reader.tensors.items()}
    expected: dict[str, Form] = {
        "sample_idx": (np.dtype(np.int64), (commit.count,)),
        "sample_offsets": (np.dtype(np.int64), (commit.count + 1,)),
        "token_ids": (np.dtype(np.int32), (commit.tokens,)),
        "position": (np.dtype(np.int32), (commit.tokens,)),
    }
    for name, hook in hooks.items():
        expected |= hook.tensors(name, commit.tokens, found)
    for name, each in expected.items():
        expect(where, name, found.get(name), each)
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
        return _concatenate(self._parts(hook, start, stop))

    def _parts(self, hook: str, start: int, stop: int) -> list[Any]:
        first = int(np.searchsorted(self.offsets, start, "right")) - 1
        last = int(np.searchsorted(self.offsets, stop, "left"))
        parts = [
            self._slices[hook][i][max(start - self.offsets[i], 0) : stop - self.offsets[i]]
            for i in range(first, last)
        ]
        return parts or [self._slices[hook][0][:0]]

    def begin_codes(self, hook: str, start: int, stop: int) -> Callable[[], Codes]:
        """Returns what gives the codes of these tokens, as that of a SafetensorsFile does."""
        return partial(concatenated_codes, self._parts(hook, start, stop))

    def begin_rows(self, hook: str, start: int, stop: int) -> Callable[[], np.ndarray]:
        """Returns what gives these rows, as that of a SafetensorsFile does."""
        return partial(self.rows, hook, start, stop)


ShardReader = PickledShard | SafetensorsFile


def begin_rows(
    reader: ShardReader, name: str, hook: StoredHook, span: tuple[int, int], dtype: Any = None
) -> Callable[[], np.ndarray]:
    """Asks for the values at a hook of the tokens in a span, and returns what waits for them:
    (tokens, width).

    dtype: the dtype to which encoded activations are decoded, by default float32; other values are
    returned as they are stored, and codes as records.
    """
    if hook.most:
        codes = reader.begin_codes(name, *span)
        return lambda: codes().records(hook.most)
    values = reader.begin_rows(name, *span)
    if not hook.encoded:
        return values
    scales = reader.begin_rows(name + SCALE, *span)
    return lambda: decode(values(), scales(), dtype or hook.dtype)


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
    content = _whole(folder, commit, commit.file)
    _check_digest(content, commit.sha256, commit.file)
    if not read_by_ranges(commit):
        return read_pickle(pyarrow.BufferReader(content), commit.file, commit.unpacked)
    data = np.frombuffer(content, np.uint8)

    def begin(start: int, stop: int) -> Callable[[], np.ndarray]:
        return lambda: data[start:stop]

    return SafetensorsFile(begin, commit.bytes, commit.file).shard(commit.names)


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
        read = folder.read_range if "start" in options else folder.read
        data: Any = read(name, version=version, **options)
    except ChangedError as error:
        raise RunError(f"{where}: {REPLACED}") from error
    if data is None:
        raise RunError(f"{where}: is missing; {REPLACED}")
    return data


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
