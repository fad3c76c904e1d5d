"""Computes digests and fingerprints, which show whether two runs read the same files.

Small files, such as tokenizer.json, are read whole. Weights and data may be terabytes, so their
fingerprints are used: the fingerprint of a large file is a digest of its size and of some of its
blocks, which takes milliseconds. A fingerprint does not change if an edit keeps the size of the
file and lies between the blocks.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from activation_extraction.common.errors import InputError
from activation_extraction.model.repository import Repository
from activation_extraction.model.weight_files import WeightFile

# The fingerprint of a large file covers only some blocks of the file. A block has this many bytes.
BLOCK_BYTES = 2**16
# The number of blocks that the fingerprint of a large file covers. A file of at most
# BLOCK_BYTES * SAMPLED_BLOCKS bytes is read whole.
SAMPLED_BLOCKS = 64
BLOCKS_AT_ONCE = 32  # number of blocks or files that are read at the same time


def model_digest(repository: Repository) -> str:
    """Returns a digest that identifies a model.

    For a model on the hub, it is the commit, as "commit <id>". For any other model, it is a SHA-256
    of config.json and the weight files (see `content_digest`).

    Args:
        repository: The files of the model.

    Raises:
        InputError: If a file cannot be read.
        RunError: If a request for weights at a URL failed.
    """
    if repository.git_commit is not None:
        return f"commit {repository.git_commit}"
    return content_digest(repository)


def content_digest(repository: Repository) -> str:
    """Returns a digest of config.json and of the fingerprints of the weight files.

    Copies of the files in another folder, or weight files with other names, have the same digest.

    Args:
        repository: The files of a model or an adapter.

    Raises:
        InputError: If a file cannot be read.
        RunError: If a request for weights at a URL failed.
    """
    with ThreadPoolExecutor(BLOCKS_AT_ONCE, "fingerprint-weights") as thread_pool:
        fingerprints = sorted(
            _weight_fingerprint(weight_file, thread_pool) for weight_file in repository.weight_files
        )
    digest_lines = [
        digest_files([repository.file(repository.repository_kind.config_file_name)]),
        *fingerprints,
    ]
    return hashlib.sha256("\n".join(digest_lines).encode()).hexdigest()


def digest_fingerprints(paths: Sequence[Path]) -> str:
    """Returns a digest of the fingerprints of files. It does not depend on the files' names.

    Args:
        paths: The files. The digest depends on their order.

    Raises:
        InputError: If a file cannot be read.
    """
    fingerprints = [file_fingerprint(file_path, file_path.stat().st_size) for file_path in paths]
    return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()


def digest_files(paths: Sequence[Path]) -> str:
    """Returns a digest of the names and whole contents of files.

    Args:
        paths: The files, in any order.

    Raises:
        InputError: If a file cannot be read.
    """
    name_and_digest_lines = []
    for file_path in paths:
        with naming_unreadable(file_path):
            name_and_digest_lines.append(
                f"{file_path.name} {hashlib.sha256(file_path.read_bytes()).hexdigest()}\n"
            )
    return hashlib.sha256("".join(sorted(name_and_digest_lines)).encode()).hexdigest()


def file_fingerprint(path: Path, size: int) -> str:
    """Computes the fingerprint of the first `size` bytes of a file.

    Args:
        path: The file.
        size: The number of bytes that the fingerprint covers.

    Raises:
        InputError: If the file cannot be read.
    """
    sampled_block_contents = []
    with naming_unreadable(path), open(path, "rb", buffering=0) as binary_file:
        for block_start, block_stop in sampled_blocks(size):
            sampled_block_contents.append(
                os.pread(binary_file.fileno(), block_stop - block_start, block_start)
            )
    return _digest_of(size, sampled_block_contents)


def sampled_blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yields the byte ranges of a file that its fingerprint covers, which are called blocks.

    The blocks cover a small file completely. In a large file, the first block is at the beginning,
    the last block is at the end, and the others are spread evenly between them.

    Args:
        size: The size of the file in bytes.

    Yields:
        A tuple for each block:
            The offset of its first byte in the file.
            The offset of the byte after its last byte.
    """
    block_starts: Iterable[int] = range(0, size, BLOCK_BYTES)
    if size > BLOCK_BYTES * SAMPLED_BLOCKS:
        start_of_last_block = size - BLOCK_BYTES
        block_starts = (
            start_of_last_block * block_number // (SAMPLED_BLOCKS - 1)
            for block_number in range(SAMPLED_BLOCKS)
        )
    for block_start in block_starts:
        yield block_start, min(block_start + BLOCK_BYTES, size)


@contextmanager
def naming_unreadable(path: Path | str) -> Iterator[None]:
    """Turns an OSError in a `with` block into an InputError that names the file.

    Args:
        path: The file that the block reads.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _weight_fingerprint(file: WeightFile, pool: ThreadPoolExecutor) -> str:
    """Returns the fingerprint of a weight file, which also covers the whole safetensors header.

    Args:
        file: The file, local or remote.
        pool: The threads that read the blocks.
    """
    with naming_unreadable(file.location):
        header_range = (0, file.header.end_offset)
        block_starts, block_stops = zip(header_range, *sampled_blocks(file.byte_count), strict=True)
        return _digest_of(file.byte_count, pool.map(file.read_bytes, block_starts, block_stops))


def _digest_of(size: int, blocks: Iterable[bytes]) -> str:
    """Returns the SHA-256 of the size of a file and of some of its blocks, in hexadecimal digits.

    Args:
        size: The size of the file in bytes.
        blocks: The contents of the blocks.
    """
    size_and_blocks_digest = hashlib.sha256(str(size).encode())
    for block_content in blocks:
        size_and_blocks_digest.update(block_content)
    return size_and_blocks_digest.hexdigest()
