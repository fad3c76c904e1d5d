"""Reads shards: their samples, their tokens, and the activations at their hooks.

A safetensors shard is read by ranges: only the requested rows of the requested hooks. A pickle has
to be read whole, and becomes such a file in memory. What is read is compared with the crc32c of
every MiB in the shard's JSON. Reading never runs pickled code.
"""

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from crc32c import crc32c

from activation_extraction.common.errors import RunError, reason_of
from activation_extraction.store.folder import ChangedError, Folder, FolderError, local_path
from activation_extraction.store.formats import MIB, SAFETENSORS, format_of
from activation_extraction.store.hook_values import HookValues, Shape
from activation_extraction.store.pickle_file import read_pickle
from activation_extraction.store.run_log import MOST_BYTES, Commit, DamagedError, parse_commit
from activation_extraction.store.safetensors_file import SafetensorsFile, safetensors_pieces
from activation_extraction.store.shard import Shard
from activation_extraction.store.statistics import Sums, unpack_sums

REPLACED = "the run was overwritten or repaired since its JSON was read; open it again"
RANGE = 8 * MIB  # of one request; a range may have up to twice as much
HEADER = 2**16  # bytes: room for the header of most safetensors files
IN_FLIGHT = 32  # requests to buckets at the same time, over all runs, shards and hooks


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


def open_shard(folder: Folder, commit: Commit, hooks: Iterable[HookValues]) -> SafetensorsFile:
    """Opens a shard.

    Args:
        folder: The folder of the shard.
        commit: The commit of the shard.
        hooks: The hooks that will be read.

    Raises:
        RunError: The file is missing or damaged, or does not match its JSON.
    """
    hooks = list(hooks)
    where = f"{folder.url}/{commit.file}"
    file = ShardBytes(folder, commit, where)
    if read_by_ranges(commit):
        front = 0 if folder.local else front_bytes(commit)
        reader = SafetensorsFile(file.begin, commit.bytes, where, front)
    else:
        content = pyarrow.py_buffer(file.begin(0, commit.bytes)())
        by_key = {hook.key: hook for hook in hooks}
        shard = read_pickle(pyarrow.BufferReader(content), where, commit.unpacked, by_key)
        reader = _in_memory(shard, where)
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in reader.tensors.items()}
    expected: dict[str, tuple[np.dtype, Shape]] = {
        "sample_idx": (np.dtype(np.int64), (commit.count,)),
        "sample_offsets": (np.dtype(np.int64), (commit.count + 1,)),
        "token_ids": (np.dtype(np.int32), (commit.tokens,)),
        "position": (np.dtype(np.int32), (commit.tokens,)),
    }
    for hook in hooks:
        expected |= hook.expected_tensors(commit.tokens)
    for name, each in expected.items():
        expect(where, name, found.get(name), each)
    return reader


def _in_memory(shard: Shard, where: str) -> SafetensorsFile:
    """Returns a shard as if it were a safetensors file."""
    for sample in shard.samples:
        if sample.token_ids is None:
            raise RunError(
                f"{where}: sample {sample.facts.sample_idx}: has no token ids, which reading needs"
            )
    pieces = safetensors_pieces(shard)
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
