"""Reads shards: their samples, their tokens, and the activations at their hooks.

A safetensors shard is read by ranges: only the requested rows of the requested hooks. A pickle has
to be read whole, and becomes such a file in memory. What is read is compared with the crc32c of
every MiB in the shard's JSON. Reading never runs pickled code.
"""

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from crc32c import crc32c

from activation_extraction.common.codes import Codes, code_bytes, record_width
from activation_extraction.common.encodings import FLOAT8, VALUES, decode, token_bytes
from activation_extraction.common.errors import RunError, reason_of
from activation_extraction.store.folder import ChangedError, Folder, FolderError, local_path
from activation_extraction.store.formats import MIB, SAFETENSORS, format_of
from activation_extraction.store.identity import Identity
from activation_extraction.store.pickle_file import read_pickle
from activation_extraction.store.run_log import MOST_BYTES, Commit, DamagedError, parse_commit
from activation_extraction.store.safetensors_file import SCALE, SafetensorsFile, safetensors_pieces
from activation_extraction.store.shard import Shard, Values
from activation_extraction.store.statistics import Sums, unpack_sums

REPLACED = "the run was overwritten or repaired since its JSON was read; open it again"
Form = tuple[np.dtype, tuple[int, ...]]  # the dtype and the shape of a tensor
FLOATS: np.dtype = np.dtype(np.float32)
RANGE = 8 * MIB  # of one request; a range may have up to twice as much
HEADER = 2**16  # bytes: room for the header of most safetensors files
IN_FLIGHT = 32  # requests to buckets at the same time, over all runs, shards and hooks


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

    @classmethod
    def of(cls, recorded: Mapping[str, Any], identity: Identity) -> "StoredHook":
        """Returns a hook. recorded: what the shards say of it, or, before there is one, the
        metadata alone. Raises ValueError for a width or dtype that is not recorded or unknown."""
        name, key = recorded["name"], recorded["key"]
        if (width := recorded.get("width")) is None:
            raise ValueError(f"the metadata does not record how wide {name} is")
        if name in identity.code_hooks:
            return cls(key, width, FLOATS, False, most=int(recorded["most"]))
        encoded = identity.is_encoded(name)
        dtype = "float32" if encoded else recorded.get("dtype", identity.dtype_of(name))
        try:
            return cls(key, width, np.dtype(dtype), identity.has_activations(name), encoded)
        except TypeError as error:
            raise ValueError(f"{name}: dtype {dtype!r}: {error}") from error

    @property
    def row(self) -> np.dtype:
        """The dtype and the shape of a token in memory, where codes are records
        (common/codes.py)."""
        if self.most:
            return np.dtype((np.int32, (record_width(self.most),)))
        return np.dtype((self.dtype, (self.width,)))

    def given(self, values: np.ndarray) -> Values:
        """Returns the values of tokens as they are given to the user. values: as they are read."""
        return Codes.of(values, self.width) if self.most else values

    @property
    def stored_bytes(self) -> int:
        """The bytes of a token where it is stored; of codes, the least."""
        if self.most:
            return code_bytes(0, self.dtype)
        return token_bytes(self.width, FLOAT8 if self.encoded else self.dtype.name)

    def tensor(self, name: str, tokens: int) -> tuple[str, Form]:
        """Returns a tensor that the hook is stored in: its name, its dtype and its shape."""
        if self.most:
            return f"{name}.norm", (FLOATS, (tokens,))
        return name, (VALUES if self.encoded else self.dtype, (tokens, self.width))


@lru_cache(1)
def request_threads(process: int) -> ThreadPoolExecutor:
    """Returns the threads for requests to buckets. process: the number of this process; a fork of
    it has none of its threads."""
    return ThreadPoolExecutor(IN_FLIGHT, "requests")


def read_by_ranges(commit: Commit) -> bool:
    """Returns whether rows of a shard can be read without the rest of it."""
    return format_of(commit.file) is SAFETENSORS


def front_bytes(commit: Commit) -> int:
    """Returns how many bytes at the beginning of a shard in a bucket are read at once, and kept:
    whole MiB with the header and all that is said of samples and tokens."""
    return -(-(HEADER + 16 * commit.count + 16 * commit.tokens) // MIB) * MIB


class ShardBytes:
    """The bytes of a shard's file; every MiB that is read is compared with its crc32c.

    A file on this machine is mapped, and a MiB of it is compared when it is first read. Any other
    is read in ranges of whole MiB by `request_threads`, RANGE at once.
    """

    def __init__(self, folder: Folder, commit: Commit, where: str) -> None:
        self._folder = folder
        self._commit = commit
        self._where = where
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
        submit = request_threads(os.getpid()).submit
        parts = [submit(self._read, a, b) for a, b in pairwise(edges.tolist())]

        def wait() -> np.ndarray:
            found = [part.result() for part in parts]
            content = found[0] if len(found) == 1 else np.concatenate(found)
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


def open_shard(folder: Folder, commit: Commit, hooks: Mapping[str, StoredHook]) -> SafetensorsFile:
    """Opens a shard. hooks: the hooks that will be read, by name.

    Raises RunError if the file is missing or damaged, or does not match its JSON.
    """
    where = f"{folder.url}/{commit.file}"
    file = ShardBytes(folder, commit, where)
    if read_by_ranges(commit):
        front = 0 if folder.local else front_bytes(commit)
        reader = SafetensorsFile(file.begin, commit.bytes, where, front)
    else:
        content = pyarrow.py_buffer(file.begin(0, commit.bytes)())
        shard = read_pickle(pyarrow.BufferReader(content), where, commit.unpacked)
        reader = _in_memory(shard, hooks, where)
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in reader.tensors.items()}
    expected: dict[str, Form] = {
        "sample_idx": (np.dtype(np.int64), (commit.count,)),
        "sample_offsets": (np.dtype(np.int64), (commit.count + 1,)),
        "token_ids": (np.dtype(np.int32), (commit.tokens,)),
        "position": (np.dtype(np.int32), (commit.tokens,)),
        **dict(hook.tensor(name, commit.tokens) for name, hook in hooks.items()),
    }
    for name, each in expected.items():
        expect(where, name, found.get(name), each)
    return reader


def _in_memory(shard: Shard, hooks: Mapping[str, StoredHook], where: str) -> SafetensorsFile:
    """Returns a shard with the requested hooks alone, as if it were a safetensors file."""
    for sample in shard.samples:
        if sample.token_ids is None:
            raise RunError(
                f"{where}: sample {sample.facts.sample_idx}: has no token ids, which reading needs"
            )
    names = {hook.key: name for name, hook in hooks.items() if hook.key in shard.slices}
    asked = replace(shard, slices={key: shard.slices[key] for key in names})
    pieces = safetensors_pieces(asked, names)
    ends = np.cumsum([piece.nbytes for piece in pieces])

    def begin(start: int, stop: int) -> Callable[[], np.ndarray]:
        first, last = np.searchsorted(ends, [start, stop], "right").tolist()
        begun = int(ends[first - 1]) if first else 0
        data = np.frombuffer(b"".join(pieces[first : last + 1]), np.uint8)
        return lambda: data[start - begun : stop - begun]

    return SafetensorsFile(begin, int(ends[-1]), where)


def expect(where: str, what: str, found: Any, expected: Any) -> None:
    """Raises RunError unless what was found in a shard is what its JSON says."""
    if found != expected:
        raise RunError(f"{where}: {what}: found {found}, its JSON says {expected}")


def begin_rows(
    reader: SafetensorsFile, name: str, hook: StoredHook, span: tuple[int, int], dtype: Any = None
) -> Callable[[], np.ndarray]:
    """Asks for the values at a hook of the tokens in a span, and returns what waits for them:
    (tokens, width).

    dtype: the dtype to which encoded activations are decoded, by default float32; other values are
    returned as they are stored, and codes as records. Nothing is read for a span without tokens.
    """
    if span[0] == span[1]:
        return lambda: np.empty(0, hook.row)
    values = reader.begin_rows(name, *span)
    if hook.most:
        return lambda: values().records(hook.most)
    if not hook.encoded:
        return values
    scales = reader.begin_rows(name + SCALE, *span)
    return lambda: decode(values(), scales(), dtype or hook.dtype)


def check_shard_file(folder: Folder, commit: Commit) -> None:
    """Raises RunError if a shard's file is missing or its sha256 is not the one in its JSON, and
    FolderError if the file cannot be read."""
    _check_digest(_whole(folder, commit, commit.file), commit.sha256, commit.file)


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
        except ValueError as error:
            raise RunError(f"{where}: is empty") from error
        except OSError as error:  # which does not say that the file is damaged
            raise FolderError(f"{where}: cannot be read: {reason_of(error)}") from error
        _check_json(folder, commit, where)  # a file that was opened before keeps its content
    if len(content) != commit.bytes:
        raise RunError(f"{where}: has {len(content)} bytes, its JSON says {commit.bytes}")
    return content


def _check_json(folder: Folder, commit: Commit, where: str) -> None:
    """Raises RunError if the shard has another JSON now: it is replaced before its files are.

    where: the name of one of its files, for the message.
    """
    data = folder.read(commit.name, most=MOST_BYTES)
    with suppress(DamagedError):
        if data is not None and parse_commit(data, commit.name) != commit:
            raise RunError(f"{where}: {REPLACED}")


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

    Raises RunError if it is missing, damaged or replaced.
    """
    facts, where = commit.files[name], f"{folder.url}/{name}"
    try:
        data = _read(folder, commit, name, where, most=facts.bytes)
        _check_digest(data, facts.sha256, where)
    except RunError:
        if folder.local:  # elsewhere, the file is pinned to its version
            _check_json(folder, commit, where)
        raise
    return data, where
