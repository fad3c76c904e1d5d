"""Digests and fingerprints show whether two runs read the same files.

Small files are digested whole. Weights and data may be terabytes: a fingerprint is their size and
samples of their content, which takes milliseconds. It does not show an edit that keeps the size and
lies between the samples.
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

BLOCK, BLOCKS = 2**16, 64  # a file that is not larger than all blocks is read whole
BLOCKS_AT_ONCE = 32  # blocks or files that are read at the same time


def model_digest(repository: Repository) -> str:
    """Returns what a model is known by: its commit on the hub, or a digest of its files.

    That is made of config.json and the fingerprints of the weights, without their names. Raises
    InputError if config.json cannot be read, RunError if weights cannot.
    """
    if repository.commit is not None:
        return f"commit {repository.commit}"
    return content_digest(repository)


def content_digest(repository: Repository) -> str:
    """Returns a digest of a repository's configuration and of its weights, wherever they are."""
    with ThreadPoolExecutor(BLOCKS_AT_ONCE, "fingerprint-weights") as pool:
        weights = sorted(_of_weights(file, pool) for file in repository.weight_files)
    lines = [digest_files([repository.file(repository.kind.config)]), *weights]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_fingerprints(paths: Sequence[Path]) -> str:
    """Returns a digest of the fingerprints of files, in this order, without their names. Raises
    InputError if a file is unreadable."""
    prints = [file_fingerprint(path, path.stat().st_size) for path in paths]
    return hashlib.sha256("\n".join(prints).encode()).hexdigest()


def digest_files(paths: Sequence[Path]) -> str:
    """Returns a digest of names and whole contents. Raises InputError if a file is unreadable."""
    lines = []
    for path in paths:
        with naming_unreadable(path):
            lines.append(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def file_fingerprint(path: Path, size: int) -> str:
    """Takes that of the first `size` bytes of a file. Raises InputError if it is unreadable."""
    with naming_unreadable(path), open(path, "rb", buffering=0) as file:
        blocks = sampled_blocks(size)
        return _digest_of(size, (os.pread(file.fileno(), b - a, a) for a, b in blocks))


def sampled_blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yields the start and stop of the blocks that stand for a file of this size.

    They are all of a small file. Of a large one, the first and the last block are at its ends, and
    the others are spread evenly between them.
    """
    starts: Iterable[int] = range(0, size, BLOCK)
    if size > BLOCK * BLOCKS:
        starts = ((size - BLOCK) * n // (BLOCKS - 1) for n in range(BLOCKS))
    for start in starts:
        yield start, min(start + BLOCK, size)


@contextmanager
def naming_unreadable(path: Path | str) -> Iterator[None]:
    """Raises InputError if the file cannot be read inside the block."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _of_weights(file: WeightFile, pool: ThreadPoolExecutor) -> str:
    """Returns the fingerprint of a file of weights, in which the whole header counts.

    The blocks of a remote file are asked for at the same time.
    """
    with naming_unreadable(file.where):
        ranges = [(0, file.header.end), *sampled_blocks(file.size)]
        return _digest_of(file.size, pool.map(lambda each: file.read_bytes(*each), ranges))


def _digest_of(size: int, parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256(str(size).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
