"""Reads shards: their samples, their tokens, and the activations at their hooks.

A safetensors shard is read by ranges: only the requested rows of the requested hooks. A pickle has
to be read whole, and becomes such a file in memory. All bytes are compared with a crc32c in the
shard's JSON before they are used: in a bucket with those of blocks of tokens (RangeChecksums), on
this machine and if the JSON lacks them with those of every MiB. Reading never runs pickled code.
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
from activation_extraction.store.run_log import MAX_JSON_BYTES, Commit, DamagedError, parse_commit
from activation_extraction.store.safetensors_file import (
    Blocks,
    SafetensorsFile,
    safetensors_pieces,
)
from activation_extraction.store.shard import Shard
from activation_extraction.store.statistics import Sums, unpack_sums

REPLACED = "the run was overwritten or repaired since its JSON was read; open it again"
# A read from a bucket is split into requests for ranges of about the same size: fewer than
# 2 * RANGE bytes, and at least RANGE unless the whole read has fewer.
RANGE = 8 * MIB
HEADER = 2**16  # bytes: room for the header of most safetensors files
IN_FLIGHT = 32  # requests to buckets at the same time, over all runs, shards and hooks
# Most bytes of a small request, and how many of them are sent at the same time beside the others.
# They spend their time waiting for an answer, and would keep the others from being sent.
SMALL = MIB // 2
SMALL_IN_FLIGHT = 64


@lru_cache(2)
def request_threads(process: int, small: bool) -> ThreadPoolExecutor:
    """Returns the threads for requests to buckets.

    Args:
        process: Id of this process. A fork has another one, and none of the threads of its parent,
            so it gets threads of its own.
        small: Whether the requests are small.
    """
    return ThreadPoolExecutor(SMALL_IN_FLIGHT if small else IN_FLIGHT, "requests")


def read_by_ranges(commit: Commit) -> bool:
    """Returns whether rows of a shard can be read without the rest of it."""
    return format_of(commit.file) is SAFETENSORS


def front_bytes(commit: Commit) -> int:
    """Returns how many bytes at the beginning of a shard usually contain all but the tokens.

    These are the header and the two tensors with a value for each sample.
    """
    return HEADER + 16 * commit.count


class ShardBytes:
    """The bytes of a shard's file. All that are read are compared with a crc32c.

    A file on this machine is mapped into memory, and each MiB is compared when it is first read. In
    a bucket, `request_threads` read ranges of whole blocks, of about RANGE bytes each.

    Args:
        folder: Folder of the shard.
        commit: Commit of the shard.
        where: URL of the file, for messages.

    Raises:
        RunError: The file is on this machine, and is missing or has another size than its JSON
            says.
        FolderError: The file is on this machine and cannot be opened.
    """

    def __init__(self, folder: Folder, commit: Commit, where: str) -> None:
        self._folder = folder
        self._commit = commit
        self._where = where
        self._mibs = Blocks(0, commit.bytes, MIB, commit.files[commit.file].crc32c)
        self._mapped: np.ndarray | None = None
        if folder.local:
            self._mapped = np.frombuffer(_whole(folder, commit, where), np.uint8)
            self._unseen = np.ones(-(-commit.bytes // MIB), bool)

    def begin(
        self, start: int, stop: int, blocks: Blocks | None = None
    ) -> Callable[[], np.ndarray]:
        """Asks for a range of bytes, and returns a function that waits for them.

        Args:
            start: Offset of the first byte.
            stop: Offset of the byte after the last one.
            blocks: Blocks that contain the range, to read it with fewer other bytes than whole MiB
                from a bucket. None to read whole MiB.

        Returns:
            A function that returns the bytes, uint8 (stop - start,). It raises RunError if they are
            damaged, missing or replaced, and FolderError if they cannot be read. On this machine,
            `begin` itself raises RunError.
        """
        if start >= stop:
            return lambda: np.empty(0, np.uint8)
        if self._mapped is not None:
            part = self._mapped[start:stop]
            first, last = start // MIB, -(-stop // MIB)
            for number in first + np.flatnonzero(self._unseen[first:last]):
                self._check(self._mapped[number * MIB :][:MIB], self._mibs, int(number))
                self._unseen[number] = False
            return lambda: part
        blocks = blocks or self._mibs
        first = (start - blocks.start) // blocks.size
        last = -(-(stop - blocks.start) // blocks.size)
        begun = blocks.start + first * blocks.size
        requests = max((last - first) * blocks.size // RANGE, 1)
        edges = np.linspace(first, last, min(requests, last - first) + 1).astype(int)
        submit = request_threads(os.getpid(), (last - first) * blocks.size <= SMALL).submit
        parts = [submit(self._read, blocks, a, b) for a, b in pairwise(edges.tolist())]

        def wait() -> np.ndarray:
            ranges = [part.result() for part in parts]
            content = ranges[0] if len(ranges) == 1 else np.concatenate(ranges)
            return content[start - begun : stop - begun]

        return wait

    def _read(self, blocks: Blocks, first: int, last: int) -> np.ndarray:
        """Reads consecutive blocks from a bucket, and compares each with its crc32c.

        Args:
            blocks: All blocks, of which some are read.
            first: Number of the first block to read, from 0.
            last: Number of the block after the last one to read.

        Raises:
            RunError: The bytes are damaged, missing or replaced.
            FolderError: The bytes cannot be read.
        """
        start = blocks.start + first * blocks.size
        stop = min(blocks.start + last * blocks.size, blocks.stop)
        options = {"start": start, "stop": stop}
        data = _read(self._folder, self._commit, self._commit.file, self._where, **options)
        if len(data) != stop - start:
            raise RunError(f"{self._where}: is shorter than its JSON says")
        content = np.frombuffer(data, np.uint8)
        for number in range(first, last):
            block = content[(number - first) * blocks.size :][: blocks.size]
            self._check(block, blocks, number)
        return content

    def _check(self, content: np.ndarray, blocks: Blocks, number: int) -> None:
        """Raises RunError if the content of a block does not have the block's crc32c.

        Args:
            content: Bytes of the block.
            blocks: All blocks.
            number: Number of the block, from 0.
        """
        if f"{crc32c(content.data):08x}" != blocks.crc32c[8 * number : 8 * number + 8]:
            start = blocks.start + number * blocks.size
            first, last = start // MIB, (start + len(content) - 1) // MIB
            place = f"MiB {first}" if first == last else f"MiB {first} or {last}"
            raise RunError(
                f"{self._where}: is damaged in {place}: its crc32c is not the one in its JSON"
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
        ranges = None if folder.local else commit.files[commit.file].ranges
        front = 0 if folder.local else front_bytes(commit)
        reader = SafetensorsFile(file.begin, commit.bytes, where, ranges, front)
    else:
        content = pyarrow.py_buffer(file.begin(0, commit.bytes)())
        by_key = {hook.key: hook for hook in hooks}
        shard = read_pickle(pyarrow.BufferReader(content), where, commit.unpacked, by_key)
        reader = _in_memory(shard, where)
    tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in reader.tensors.items()}
    expected: dict[str, tuple[np.dtype, Shape]] = {
        "sample_idx": (np.dtype(np.int64), (commit.count,)),
        "sample_offsets": (np.dtype(np.int64), (commit.count + 1,)),
        "token_ids": (np.dtype(np.int32), (commit.tokens,)),
        "position": (np.dtype(np.int32), (commit.tokens,)),
    }
    for hook in hooks:
        expected |= hook.expected_tensors(commit.tokens)
    for name, dtype_and_shape in expected.items():
        expect(where, name, tensors.get(name), dtype_and_shape)
    return reader


def _in_memory(shard: Shard, where: str) -> SafetensorsFile:
    """Returns a pickled shard as a safetensors file in memory.

    Args:
        shard: The shard.
        where: URL of the pickle, for messages.

    Raises:
        RunError: A sample has no token ids.
    """
    for sample in shard.samples:
        if sample.token_ids is None:
            raise RunError(
                f"{where}: sample {sample.facts.sample_idx}: has no token ids, which reading needs"
            )
    pieces = safetensors_pieces(shard)
    ends = np.cumsum([piece.nbytes for piece in pieces])

    def begin(start: int, stop: int, _blocks: Blocks | None) -> Callable[[], np.ndarray]:
        first, last = np.searchsorted(ends, [start, stop], "right").tolist()
        begun = int(ends[first - 1]) if first else 0
        data = np.frombuffer(b"".join(pieces[first : last + 1]), np.uint8)
        return lambda: data[start - begun : stop - begun]

    return SafetensorsFile(begin, int(ends[-1]), where)


def expect(where: str, what: str, actual: Any, expected: Any) -> None:
    """Compares a fact about a shard with its JSON.

    Args:
        where: URL of the file, for messages.
        what: Name of the fact, for messages.
        actual: The fact in the file.
        expected: The fact in the JSON.

    Raises:
        RunError: They differ.
    """
    if actual != expected:
        raise RunError(f"{where}: {what}: found {actual}, its JSON says {expected}")


def check_shard_file(folder: Folder, commit: Commit) -> None:
    """Compares the sha256 of a shard's activations with its commit.

    Raises:
        RunError: The file is missing, has another size, or is damaged.
        FolderError: The file cannot be read, so that nobody knows whether it is damaged.
    """
    _check_digest(_whole(folder, commit, commit.file), commit.sha256, commit.file)


def _whole(folder: Folder, commit: Commit, where: str) -> bytes | mmap.mmap:
    """Returns the whole file of a shard's activations.

    A file on a disk is mapped into memory; a file in a bucket is read.

    Raises:
        RunError: The file is missing, was replaced, or has another size than its JSON says.
        FolderError: The file cannot be read.
    """
    content: bytes | mmap.mmap
    if not folder.local:
        content = _read(folder, commit, commit.file, where, max_bytes=commit.bytes)
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
    """Raises RunError if the shard has another JSON now.

    The JSON of a shard is replaced before its files are. So an unchanged JSON shows that the files
    were not replaced before it was read.

    Args:
        folder: Folder of the shard.
        commit: The commit that was read before.
        where: URL of one of the shard's files, for the message.
    """
    data = folder.read(commit.name, max_bytes=MAX_JSON_BYTES)
    with suppress(DamagedError):
        if data is not None and parse_commit(data, commit.name) != commit:
            raise RunError(f"{where}: {REPLACED}")


def _read(folder: Folder, commit: Commit, name: str, where: str, **options: Any) -> bytes:
    """Reads a file of a shard, or a range of it.

    The version of the file must be the one in its JSON. Versions are not compared on a disk, which
    has none, and in a copy of the folder, which has others.

    Args:
        folder: Folder of the shard.
        commit: Commit of the shard.
        name: Name of the file.
        where: URL of the file, for messages.
        **options: `start` and `stop` of a range in bytes; for a whole file `max_bytes`, the
            most bytes that it may have.

    Raises:
        RunError: The file is missing or was replaced.
        FolderError: The file cannot be read.
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
    """Returns the sums of a shard at some hooks.

    Args:
        folder: Folder of the shard.
        commit: Commit of the shard.
        hooks: Names of the hooks.

    Raises:
        RunError: The statistics file is missing, damaged or replaced.
    """
    return unpack_sums(read_beside(folder, commit, commit.statistics_file)[0], hooks)


def read_beside(folder: Folder, commit: Commit, name: str) -> tuple[bytes, str]:
    """Reads a small file of a shard, and compares its sha256 with the commit.

    Args:
        folder: Folder of the shard.
        commit: Commit of the shard.
        name: Name of the file.

    Returns:
        The content of the file, and its URL for messages.

    Raises:
        RunError: The file is missing, damaged or replaced.
    """
    facts = commit.files[name]
    where = f"{folder.url}/{name}"
    try:
        data = _read(folder, commit, name, where, max_bytes=facts.bytes)
        _check_digest(data, facts.sha256, where)
    except RunError:
        if folder.local:  # elsewhere, the file is pinned to its version
            _check_json(folder, commit, where)
        raise
    return data, where
