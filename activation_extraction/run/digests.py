"""Computes digests and fingerprints, which show whether two runs read the same files.

A digest covers the whole content of small files. A fingerprint is for weights and data, which may
be terabytes: it is a digest of the size and of sampled blocks, which takes milliseconds. It does
not show an edit between the blocks that keeps the size.
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

BLOCK = 2**16  # bytes of a sampled block
BLOCKS = 64  # number of sampled blocks; a file of at most BLOCK * BLOCKS bytes is read whole
BLOCKS_AT_ONCE = 32  # blocks or files that are read at the same time


def model_digest(repository: Repository) -> str:
    """Returns the identity of a model: its commit on the hub, otherwise its `content_digest`.

    Args:
        repository: The files of the model.

    Raises:
        InputError: A file cannot be read.
        RunError: A request for weights at a URL failed.
    """
    if repository.commit is not None:
        return f"commit {repository.commit}"
    return content_digest(repository)


def content_digest(repository: Repository) -> str:
    """Returns a digest of the configuration and of the fingerprints of the weights.

    It does not depend on where the files are, nor on the names of the weight files.

    Args:
        repository: The files of a model or an adapter.

    Raises:
        InputError: A file cannot be read.
        RunError: A request for weights at a URL failed.
    """
    with ThreadPoolExecutor(BLOCKS_AT_ONCE, "fingerprint-weights") as pool:
        weights = sorted(_weight_fingerprint(file, pool) for file in repository.weight_files)
    lines = [digest_files([repository.file(repository.kind.config_file)]), *weights]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_fingerprints(paths: Sequence[Path]) -> str:
    """Returns a digest of the fingerprints of files, without their names.

    Args:
        paths: The files. Another order gives another digest.

    Raises:
        InputError: A file cannot be read.
    """
    fingerprints = [file_fingerprint(path, path.stat().st_size) for path in paths]
    return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()


def digest_files(paths: Sequence[Path]) -> str:
    """Returns a digest of the names and whole contents of files.

    Args:
        paths: The files, in any order.

    Raises:
        InputError: A file cannot be read.
    """
    lines = []
    for path in paths:
        with naming_unreadable(path):
            lines.append(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def file_fingerprint(path: Path, size: int) -> str:
    """Computes the fingerprint of the first `size` bytes of a file.

    Args:
        path: The file.
        size: Number of bytes.

    Raises:
        InputError: The file cannot be read.
    """
    with naming_unreadable(path), open(path, "rb", buffering=0) as file:
        blocks = (
            os.pread(file.fileno(), stop - start, start) for start, stop in sampled_blocks(size)
        )
        return _digest_of(size, blocks)


def sampled_blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yields the offsets of the sampled blocks of a file, start and stop.

    The blocks cover a small file completely. In a large file, the first and the last block are at
    its ends, and the others are spread evenly between them.

    Args:
        size: The size of the file in bytes.
    """
    starts: Iterable[int] = range(0, size, BLOCK)
    if size > BLOCK * BLOCKS:
        starts = ((size - BLOCK) * n // (BLOCKS - 1) for n in range(BLOCKS))
    for start in starts:
        yield start, min(start + BLOCK, size)


@contextmanager
def naming_unreadable(path: Path | str) -> Iterator[None]:
    """Turns an OSError in the `with` block into an InputError that names the file.

    Args:
        path: The file that the block reads.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _weight_fingerprint(file: WeightFile, pool: ThreadPoolExecutor) -> str:
    """Returns the fingerprint of a weight file, which also covers its whole header.

    Args:
        file: The file, local or remote.
        pool: Threads that read the blocks at the same time.
    """
    with naming_unreadable(file.where):
        ranges = [(0, file.header.end), *sampled_blocks(file.size)]
        starts, stops = zip(*ranges, strict=True)
        return _digest_of(file.size, pool.map(file.read_bytes, starts, stops))


def _digest_of(size: int, parts: Iterable[bytes]) -> str:
    """Returns the SHA-256 of a size and of parts of a file, in hexadecimal digits."""
    digest = hashlib.sha256(str(size).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
