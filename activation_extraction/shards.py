"""What a shard file looks like, and how a file comes to be complete under its final name.

`pickle.load(gzip.open(path))` gives a dict: layer (int, or hook name) -> list of records, one per
sample, in order. A record is a dict of plain values and NumPy arrays, see `Record`. The bytes
depend on the records alone.
"""

import hashlib
import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypedDict

import numpy as np
from isal import igzip

# Protocol 4 names only NumPy internals that NumPy 1.26 also has; 5 would shut out its users.
PICKLE_PROTOCOL = 4
COMPRESSION_LEVEL = 1


class Record(TypedDict):
    """One sample at one hook."""

    sample_idx: int
    activation: np.ndarray  # (tokens, hidden)
    shape: tuple[int, ...]
    text_preview: str
    token_ids: np.ndarray | None  # int32 (tokens,)
    doc_id: str | int | float | None


Shard = dict[int | str, list[Record]]


class _CountingFile:
    """A file for writing that keeps the sha256, the size and the seconds spent writing."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.seconds = 0.0

    def write(self, data: bytes) -> int:
        began = time.perf_counter()
        self._file.write(data)
        self.sha256.update(data)
        self.size += len(data)
        self.seconds += time.perf_counter() - began
        return len(data)

    def flush(self) -> None:
        self._file.flush()


class Written(TypedDict):
    """What is known of a file that was written; bytes, and seconds of writing alone."""

    sha256: str
    bytes: int
    write_seconds: float


def write_atomically(path: Path, write: Callable[[Any], None]) -> Written:
    """Runs `write(file)` on a temporary file beside `path`, syncs it and renames it to `path`.

    Whenever the process or the machine dies, `path` is absent or whole. Raises OSError; the
    temporary file is then removed.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            counting = _CountingFile(file)
            write(counting)
            began = time.perf_counter()
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    seconds = counting.seconds + time.perf_counter() - began
    return {"sha256": counting.sha256.hexdigest(), "bytes": counting.size, "write_seconds": seconds}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON atomically. NaN is refused: other languages could not read it."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def write_shard(path: Path, shard: Shard, compress: bool) -> Written:
    """Writes a shard atomically, as gzip when `compress`, with nothing of time or place in it."""

    def write(file: IO[bytes]) -> None:
        if not compress:
            pickle.dump(shard, file, protocol=PICKLE_PROTOCOL)
            return
        with igzip.IGzipFile(
            filename="", mode="wb", fileobj=file, compresslevel=COMPRESSION_LEVEL, mtime=0
        ) as stream:
            pickle.dump(shard, stream, protocol=PICKLE_PROTOCOL)

    return write_atomically(path, write)
