"""Reads shards: their samples, their tokens, and the activations at their hooks.

A safetensors shard is read by ranges: only the values of the requested tokens at the requested
hooks. A pickle has to be read whole, and is converted to a safetensors file in memory. All bytes
are compared with a CRC-32C in the shard's commit before they are used. For a safetensors file that
is not local, the checksums of blocks of tokens (RangeChecksums) are compared. For a local file, for
a pickle, and if the commit lacks these checksums, the checksums of every MiB of the file are
compared. Reading never runs pickled code.
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
from activation_extraction.store.pickle_file import read_pickle
from activation_extraction.store.run_log import MAX_JSON_BYTES, Commit, DamagedError, parse_commit
from activation_extraction.store.safetensors_file import (
    Blocks,
    SafetensorsFile,
    safetensors_pieces,
)
from activation_extraction.store.shard import Shard
from activation_extraction.store.statistics import Sums, unpack_sums
from activation_extraction.store.stored_hook import Shape, StoredHook

REPLACED_REASON = "the run was overwritten or repaired since its JSON was read; open it again"
# Approximate size in bytes of a request, if a read from a bucket is split into several requests. A
# request has fewer than 2 * REQUEST_BYTES bytes, and at least REQUEST_BYTES bytes unless the whole
# read has fewer.
REQUEST_BYTES = 8 * MIB
# Estimated size of the header of a safetensors file in bytes. Most headers do not exceed it, so one
# request is enough to read them.
HEADER_BYTES = 2**16
# Largest number of large requests (see SMALL_REQUEST_BYTES) to buckets at the same time, over all
# runs, shards and hooks.
MAX_REQUESTS = 32
# Largest size in bytes of a read whose requests count as small. Small requests have threads of
# their own: they mostly wait for an answer, and in shared threads they would occupy the threads
# that large requests need.
SMALL_REQUEST_BYTES = MIB // 2
MAX_SMALL_REQUESTS = 64  # number of small requests to buckets at the same time


@lru_cache(2)
def request_threads(process: int, small: bool) -> ThreadPoolExecutor:
    """Returns the threads that send requests to buckets.

    Args:
        process: Id of this process. A forked process inherits the cache of this function, but not
            the threads of its parent. It has another id, so new threads are made for it.
        small: Whether to return the threads for small requests, which belong to reads of at most
            SMALL_REQUEST_BYTES bytes.
    """
    return ThreadPoolExecutor(MAX_SMALL_REQUESTS if small else MAX_REQUESTS, "requests")


def can_read_ranges(commit: Commit) -> bool:
    """Returns whether the values of some tokens can be read without the rest of a shard's file.

    The file is the shard's file of activations. A pickle has to be read whole.

    Args:
        commit: Commit of the shard.
    """
    return format_of(commit.file) is SAFETENSORS


def front_bytes(commit: Commit) -> int:
    """Returns the estimated number of bytes before the tokens in the file of a safetensors shard.

    These bytes are the header, whose size is estimated, and the two tensors with a value for each
    sample.

    Args:
        commit: Commit of the shard.
    """
    return HEADER_BYTES + 16 * commit.count


class ShardBytes:
    """Reads ranges of a shard's file of activations, and checks all bytes that it reads.

    The bytes are compared with the CRC-32C values that the commit records. A local file is mapped
    into memory, and each MiB of it is compared when it is first read. If the file is in a bucket,
    the threads of `request_threads` read all blocks that contain a part of the range, in requests
    of about REQUEST_BYTES bytes. A block is a part of the file with a checksum of its own.

    Args:
        folder: Folder of the shard.
        commit: Commit of the shard.
        where: URL of the file, for messages.

    Raises:
        RunError: If the file is local, and is missing, was replaced, or has another size than the
            commit records.
        FolderError: If the file is local and cannot be opened.
    """

    def __init__(self, folder: Folder, commit: Commit, where: str) -> None:
        self._folder = folder
        self._commit = commit
        self._file_location = where
        self._mib_blocks = Blocks(0, commit.bytes, MIB, commit.files[commit.file].crc32c)
        self._mapped_bytes: np.ndarray | None = None
        if folder.is_local:
            self._mapped_bytes = np.frombuffer(_whole(folder, commit, where), np.uint8)
            self._unchecked_mib_mask = np.ones(-(-commit.bytes // MIB), bool)

    def begin(
        self, start: int, stop: int, blocks: Blocks | None = None
    ) -> Callable[[], np.ndarray]:
        """Begins to read a range of bytes.

        The bytes are compared with the checksums of consecutive pieces of the file. All pieces that
        contain bytes of the range are compared as a whole. If the file is in a bucket, they are
        also read as a whole.

        Args:
            start: Offset of the first byte in the file.
            stop: Offset of the byte after the last one.
            blocks: The pieces and their checksums. The pieces must contain the range. None for
                pieces of one MiB each. If the file is local, its pieces have one MiB each in any
                case.

        Returns:
            A function that waits for the bytes and returns them, uint8 (stop - start,). If the file
            is not local, this function raises RunError if the bytes are damaged, missing or
            replaced, and FolderError if they cannot be read.

        Raises:
            RunError: If the file is local, and the bytes are damaged.
        """
        if start >= stop:
            return lambda: np.empty(0, np.uint8)
        if self._mapped_bytes is not None:
            requested_bytes = self._mapped_bytes[start:stop]
            first_block_number, stop_block_number = start // MIB, -(-stop // MIB)
            for block_number in first_block_number + np.flatnonzero(
                self._unchecked_mib_mask[first_block_number:stop_block_number]
            ):
                self._check(
                    self._mapped_bytes[block_number * MIB :][:MIB],
                    self._mib_blocks,
                    int(block_number),
                )
                self._unchecked_mib_mask[block_number] = False
            return lambda: requested_bytes
        blocks_to_check = blocks or self._mib_blocks
        first_block_number = (start - blocks_to_check.start_offset) // blocks_to_check.block_bytes
        stop_block_number = -(-(stop - blocks_to_check.start_offset) // blocks_to_check.block_bytes)
        first_block_offset = (
            blocks_to_check.start_offset + first_block_number * blocks_to_check.block_bytes
        )
        num_requested_bytes = (stop_block_number - first_block_number) * blocks_to_check.block_bytes
        request_count = max(num_requested_bytes // REQUEST_BYTES, 1)
        # Request i reads the blocks from number `request_boundaries[i]` to the next boundary.
        request_boundaries = np.linspace(
            first_block_number,
            stop_block_number,
            min(request_count, stop_block_number - first_block_number) + 1,
        ).astype(int)
        submit_request = request_threads(
            os.getpid(), num_requested_bytes <= SMALL_REQUEST_BYTES
        ).submit
        request_futures = [
            submit_request(
                self._read,
                blocks_to_check,
                first_block_number_of_request,
                stop_block_number_of_request,
            )
            for first_block_number_of_request, stop_block_number_of_request in pairwise(
                request_boundaries.tolist()
            )
        ]

        def wait() -> np.ndarray:
            arrays_of_requests = [future.result() for future in request_futures]
            bytes_of_blocks = (
                arrays_of_requests[0]
                if len(arrays_of_requests) == 1
                else np.concatenate(arrays_of_requests)
            )
            return bytes_of_blocks[start - first_block_offset : stop - first_block_offset]

        return wait

    def _read(self, blocks: Blocks, first_block_number: int, stop_block_number: int) -> np.ndarray:
        """Reads consecutive blocks from a bucket, and compares each with its CRC-32C.

        Args:
            blocks: All blocks of the file or of a tensor.
            first_block_number: Number of the first block to read, from 0.
            stop_block_number: Number of the block after the last one to read.

        Returns:
            The bytes of the blocks that were read, uint8 (bytes,).

        Raises:
            RunError: If the bytes are damaged, missing or replaced.
            FolderError: If the bytes cannot be read.
        """
        start_offset = blocks.start_offset + first_block_number * blocks.block_bytes
        stop_offset = min(
            blocks.start_offset + stop_block_number * blocks.block_bytes, blocks.stop_offset
        )
        range_bytes = _read(
            self._folder,
            self._commit,
            self._commit.file,
            self._file_location,
            start=start_offset,
            stop=stop_offset,
        )
        if len(range_bytes) != stop_offset - start_offset:
            raise RunError(f"{self._file_location}: is shorter than its JSON says")
        bytes_of_blocks = np.frombuffer(range_bytes, np.uint8)
        for block_number in range(first_block_number, stop_block_number):
            bytes_of_block = bytes_of_blocks[
                (block_number - first_block_number) * blocks.block_bytes :
            ][: blocks.block_bytes]
            self._check(bytes_of_block, blocks, block_number)
        return bytes_of_blocks

    def _check(self, bytes_of_block: np.ndarray, blocks: Blocks, block_number: int) -> None:
        """Compares the CRC-32C of a block with its recorded CRC-32C.

        Args:
            bytes_of_block: Bytes of the block.
            blocks: Blocks of the file or of a tensor.
            block_number: Number of the block, from 0.

        Raises:
            RunError: If the two checksums differ.
        """
        if (
            f"{crc32c(bytes_of_block.data):08x}"
            != blocks.concatenated_block_crc32c_hex[8 * block_number : 8 * block_number + 8]
        ):
            block_start = blocks.start_offset + block_number * blocks.block_bytes
            first_mib, last_mib = block_start // MIB, (block_start + len(bytes_of_block) - 1) // MIB
            damaged_mib_phrase = (
                f"MiB {first_mib}" if first_mib == last_mib else f"MiB {first_mib} or {last_mib}"
            )
            raise RunError(
                f"{self._file_location}: is damaged in {damaged_mib_phrase}: its crc32c is not "
                "the one in its JSON"
            )


def open_shard(folder: Folder, commit: Commit, hooks: Iterable[StoredHook]) -> SafetensorsFile:
    """Opens a shard, and compares the dtypes and shapes of its tensors with its commit.

    Args:
        folder: Folder of the shard.
        commit: Commit of the shard.
        hooks: Hooks that will be read.

    Raises:
        RunError: If the file of activations is missing or damaged, or does not match its commit.
        FolderError: If the file cannot be read.
    """
    hooks = list(hooks)
    file_url = f"{folder.url}/{commit.file}"
    range_reader = ShardBytes(folder, commit, file_url)
    if can_read_ranges(commit):
        range_checksums = None if folder.is_local else commit.files[commit.file].ranges
        front_bytes_to_read = 0 if folder.is_local else front_bytes(commit)
        safetensors_file = SafetensorsFile(
            range_reader.begin, commit.bytes, file_url, range_checksums, front_bytes_to_read
        )
    else:
        pickle_content = pyarrow.py_buffer(range_reader.begin(0, commit.bytes)())
        hook_by_key = {hook.key: hook for hook in hooks}
        unpickled_shard = read_pickle(
            pyarrow.BufferReader(pickle_content), file_url, commit.unpacked, hook_by_key
        )
        safetensors_file = _in_memory(unpickled_shard, file_url)
    actual_dtype_and_shape_by_tensor_name = {
        tensor_name: (header_entry.dtype, header_entry.shape)
        for tensor_name, header_entry in safetensors_file.header_entry_by_tensor_name.items()
    }
    expected_dtype_and_shape_by_tensor_name: dict[str, tuple[np.dtype, Shape]] = {
        "sample_idx": (np.dtype(np.int64), (commit.count,)),
        "sample_offsets": (np.dtype(np.int64), (commit.count + 1,)),
        "token_ids": (np.dtype(np.int32), (commit.tokens,)),
        "position": (np.dtype(np.int32), (commit.tokens,)),
    }
    for hook in hooks:
        expected_dtype_and_shape_by_tensor_name |= hook.expected_dtypes_and_shapes(commit.tokens)
    for tensor_name, dtype_and_shape in expected_dtype_and_shape_by_tensor_name.items():
        expect(
            file_url,
            tensor_name,
            actual_dtype_and_shape_by_tensor_name.get(tensor_name),
            dtype_and_shape,
        )
    return safetensors_file


def _in_memory(shard: Shard, where: str) -> SafetensorsFile:
    """Converts a pickled shard to a safetensors file in memory.

    Args:
        shard: Shard that was read from a pickle.
        where: URL of the pickle, for messages.

    Raises:
        RunError: If a sample has no token ids.
    """
    for sample in shard.samples:
        if sample.token_ids is None:
            raise RunError(
                f"{where}: sample {sample.facts.sample_idx}: has no token ids, which reading needs"
            )
    file_buffers = safetensors_pieces(shard)
    buffer_ends = np.cumsum([buffer.nbytes for buffer in file_buffers])

    def begin(start: int, stop: int, _blocks: Blocks | None) -> Callable[[], np.ndarray]:
        first_buffer_index, last_buffer_index = np.searchsorted(
            buffer_ends, [start, stop], "right"
        ).tolist()
        file_offset_of_joined_buffers = (
            int(buffer_ends[first_buffer_index - 1]) if first_buffer_index else 0
        )
        joined_buffers = np.frombuffer(
            b"".join(file_buffers[first_buffer_index : last_buffer_index + 1]), np.uint8
        )
        return lambda: joined_buffers[
            start - file_offset_of_joined_buffers : stop - file_offset_of_joined_buffers
        ]

    return SafetensorsFile(begin, int(buffer_ends[-1]), where)


def expect(where: str, what: str, actual: Any, expected: Any) -> None:
    """Raises RunError if a fact about a shard's file differs from the JSON of the shard.

    Args:
        where: URL of the file, for messages.
        what: Name of the fact, for messages.
        actual: Fact in the file.
        expected: Fact that follows from the JSON.

    Raises:
        RunError: If the facts differ.
    """
    if actual != expected:
        raise RunError(f"{where}: {what}: found {actual}, its JSON says {expected}")


def check_shard_file(folder: Folder, commit: Commit) -> None:
    """Compares the SHA-256 of a shard's file of activations with the commit.

    Args:
        folder: Folder of the shard.
        commit: Commit of the shard.

    Raises:
        RunError: If the file is missing, has another size, or is damaged.
        FolderError: If the file cannot be read, so that it is unknown whether it is damaged.
    """
    _check_digest(_whole(folder, commit, commit.file), commit.sha256, commit.file)


def _whole(folder: Folder, commit: Commit, where: str) -> bytes | mmap.mmap:
    """Returns the content of a shard's file of activations.

    A local file is mapped into memory, and any other file is read.

    Args:
        folder: Folder of the shard.
        commit: Commit of the shard.
        where: URL of the file, for messages.

    Raises:
        RunError: If the file is missing, was replaced, or has another size than its JSON says.
        FolderError: If the file cannot be read.
    """
    file_content: bytes | mmap.mmap
    if not folder.is_local:
        file_content = _read(folder, commit, commit.file, where, max_bytes=commit.bytes)
    else:
        try:
            with open(Path(local_path(folder.url)) / commit.file, "rb") as opened_file:
                file_content = mmap.mmap(opened_file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise RunError(f"{where}: is missing; {REPLACED_REASON}") from error
        except ValueError as error:
            raise RunError(f"{where}: is empty") from error
        except OSError as error:  # reading failed, but the file need not be damaged
            raise FolderError(f"{where}: cannot be read: {reason_of(error)}") from error
        # The file is mapped first. The following check then proves that the JSON of the shard was
        # not replaced before, so the mapped file belongs to this JSON. If the file is replaced
        # later, the mapped content does not change.
        _check_json(folder, commit, where)
    if len(file_content) != commit.bytes:
        raise RunError(f"{where}: has {len(file_content)} bytes, its JSON says {commit.bytes}")
    return file_content


def _check_json(folder: Folder, commit: Commit, where: str) -> None:
    """Checks that the JSON of a shard has not changed since it was first read.

    The caller has read the JSON first, and then has opened another file of the shard. This function
    reads the JSON a second time. When a shard is overwritten or repaired, its JSON is replaced
    before its other files. So if the JSON is still the same, the other file was opened before it
    could be replaced, and it belongs to the JSON.

    A JSON that is missing or damaged now is not reported.

    Args:
        folder: Folder of the shard.
        commit: Content of the JSON when it was first read.
        where: URL of the other file, for the message.

    Raises:
        RunError: If the JSON has changed.
        FolderError: If the JSON cannot be read.
    """
    json_content = folder.read(commit.name, max_bytes=MAX_JSON_BYTES)
    with suppress(DamagedError):
        if json_content is not None and parse_commit(json_content, commit.name) != commit:
            raise RunError(f"{where}: {REPLACED_REASON}")


def _read(folder: Folder, commit: Commit, name: str, where: str, **options: Any) -> bytes:
    """Reads a file of a shard, or a range of it.

    The file must have the version that the commit records. Versions are not compared if the folder
    is on a local disk, or is a copy of the folder in which the shard was stored, because the files
    of a copy have other versions.

    Args:
        folder: Folder of the shard.
        commit: Commit of the shard.
        name: Name of the file.
        where: URL of the file, for messages.
        **options: For a range of the file, `start` and `stop`: the offsets of its first byte and of
            the byte after its last. For the whole file, `max_bytes`: its largest allowed size in
            bytes.

    Raises:
        RunError: If the file is missing or was replaced.
        FolderError: If the file cannot be read.
    """
    compares_versions = not folder.is_local and commit.url == folder.url
    try:
        recorded_version = commit.files[name].version if compares_versions else None
        read_function = folder.read_range if "start" in options else folder.read
        file_content: Any = read_function(name, version=recorded_version, **options)
    except ChangedError as error:
        raise RunError(f"{where}: {REPLACED_REASON}") from error
    if file_content is None:
        raise RunError(f"{where}: is missing; {REPLACED_REASON}")
    return file_content


def _check_digest(content: bytes | mmap.mmap, sha256: str, where: str) -> None:
    if hashlib.sha256(content).hexdigest() != sha256:
        raise RunError(f"{where}: is damaged: its sha256 is not the one in its JSON")


def read_sums(folder: Folder, commit: Commit, hooks: Iterable[str]) -> dict[str, Sums]:
    """Returns the sums over the values of a shard at some hooks, by the full names of the hooks.

    Statistics of every dimension are computed from these sums.

    Args:
        folder: Folder of the shard.
        commit: Commit of the shard.
        hooks: Names of the hooks.

    Raises:
        RunError: If the shard's file with the sums (`Commit.statistics_file`) is missing, damaged
            or replaced.
    """
    return unpack_sums(read_beside(folder, commit, commit.statistics_file)[0], hooks)


def read_beside(folder: Folder, commit: Commit, name: str) -> tuple[bytes, str]:
    """Reads a small file of a shard, and compares its SHA-256 with the commit.

    A shard has two small files beside the file of activations: the table of its samples, and the
    file with the sums of its values for every dimension (statistics.py).

    Args:
        folder: Folder of the shard.
        commit: Commit of the shard.
        name: Name of the small file.

    Returns:
        A tuple of the content of the file, and its URL for messages.

    Raises:
        RunError: If the file is missing, damaged or replaced.
    """
    file_facts = commit.files[name]
    file_url = f"{folder.url}/{name}"
    try:
        file_content = _read(folder, commit, name, file_url, max_bytes=file_facts.bytes)
        _check_digest(file_content, file_facts.sha256, file_url)
    except RunError:
        # A local file may have been replaced since its JSON was read, which is no damage. So the
        # JSON is read again. In a bucket, the file was read in its recorded version, so it cannot
        # have been replaced.
        if folder.is_local:
            _check_json(folder, commit, file_url)
        raise
    return file_content, file_url
