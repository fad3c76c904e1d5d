"""Digests of files, which show whether two runs have the same model, tokenizer, code and data.

Every byte counts, yet weights are read for this only once: the digest of a large file is kept in
the user's cache folder until the file changes. A large file in the hub's cache is not read at all,
because its name there is its SHA-256.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

from tqdm import tqdm

from activation_extraction.cli.console import log, on_terminal
from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.devices import default_folder
from activation_extraction.store.atomic_file import write_bytes
from activation_extraction.store.sealed_json import DamagedError, seal, unseal

LARGE = 16 * 2**20  # bytes; smaller files are simply read
CHUNK = 2**20  # bytes
READERS = 8  # files read at the same time
# A file that changed less than this many seconds ago may change again and keep its timestamp.
SETTLED = 3.0
REMEMBERED = 10_000  # files
MEMORY = "file_digests.json"


def digest_files(paths: Sequence[Path], remote: Mapping[str, str] = MappingProxyType({})) -> str:
    """Digest of the names and contents of files. Raises InputError if one cannot be read.

    remote: name -> digest of files that are not on this machine.
    """
    digests = {path: _hub_digest(path) for path in paths}
    unknown = [path for path, digest in digests.items() if digest is None]
    found = file_digests(unknown, "weights")
    every = [*((path.name, digests[path] or found[path]) for path in paths), *remote.items()]
    lines = sorted(f"{name} {digest}\n" for name, digest in every)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def model_digest(checkpoint: Checkpoint) -> str:
    """Digest of what decides what a model computes: config.json and the files of its weights."""
    return digest_files(checkpoint.local_files(), checkpoint.remote_digests())


def file_digests(paths: Sequence[Path], what: str) -> dict[Path, str]:
    """The SHA-256 of each file, read with a progress bar. what: they are, for the log."""
    large = [path for path in paths if _size(path) >= LARGE]
    found = _digest_large(large, partial(_read_all, what=what)) if large else {}
    return {path: found[path] if path in found else _read(path) for path in paths}


def file_digest(path: Path) -> str:
    """The SHA-256 of one file, without a progress bar."""
    if _size(path) < LARGE:
        return _read(path)
    return _digest_large([path], lambda paths: {path: _read(path) for path in paths})[path]


def same_beginning(path: Path, size: int, sha256: str) -> bool:
    """Whether the first `size` bytes of a file are whole lines with this SHA-256."""
    digest, last = hashlib.sha256(), b""
    try:
        with open(path, "rb") as file:
            while size > 0 and (last := file.read(min(size, CHUNK))):
                digest.update(last)
                size -= len(last)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest() == sha256 and last.endswith(b"\n")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _hub_digest(path: Path) -> str | None:
    """The SHA-256 that the hub reported; None for other files, and for one that was edited here.

    The hub's cache keeps a large file under its SHA-256, and its snapshots link to it. A file that
    has changed since its link was made was edited through the link.
    """
    if not path.is_symlink():
        return None
    blob = path.resolve()
    if blob.parent.name != "blobs" or not re.fullmatch("[0-9a-f]{64}", blob.name):
        return None
    return blob.name if blob.stat().st_ctime_ns <= path.lstat().st_ctime_ns else None


def _digest_large(
    paths: Sequence[Path], read_all: Callable[[Sequence[Path]], dict[Path, str]]
) -> dict[Path, str]:
    """The SHA-256 of every file; `read_all` reads those whose digest is not remembered."""
    remembered = _recall()
    keys = {path: _state(path) for path in paths}
    found = {path: remembered[keys[path]] for path in paths if keys[path] in remembered}
    unread = [path for path in paths if path not in found]
    if not unread:
        return found
    settled = [path for path in unread if time.time() - path.stat().st_ctime > SETTLED]
    found |= read_all(unread)
    same = {keys[path]: found[path] for path in settled if _state(path) == keys[path]}
    if same:
        _remember(remembered | same)
    return found


def _state(path: Path) -> str:
    """Digest of the path and of everything that changes when the file is written to."""
    stat = path.stat()
    state = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
    return hashlib.sha256(os.fsencode(path.resolve()) + repr(state).encode()).hexdigest()


def _read_all(paths: Sequence[Path], what: str) -> dict[Path, str]:
    """The SHA-256 of every file; reads several at a time, with a progress bar."""
    total = sum(path.stat().st_size for path in paths)
    gigabytes = total / 1e9
    log.info(
        "reading %.2g GB of %s to compute the SHA-256; later starts remember it", gigabytes, what
    )
    bar = tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc=f"reading {what}",
        leave=False,
        disable=not on_terminal(),
    )
    with bar, ThreadPoolExecutor(READERS, "digest-files") as pool:
        return dict(zip(paths, pool.map(lambda path: _read(path, bar.update), paths), strict=True))


def _read(path: Path, progress: Callable[[int], object] = lambda _: None) -> str:
    """The SHA-256 of a file; `progress` is called with the bytes of each piece."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    try:
        with open(path, "rb", buffering=0) as file:
            while size := file.readinto(buffer):
                digest.update(buffer[:size])
                progress(size)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _memory() -> Path:
    return default_folder().parent / MEMORY


def _recall() -> dict[str, str]:
    """State of a file -> its SHA-256."""
    try:
        return unseal(_memory().read_bytes(), MEMORY)
    except (OSError, DamagedError):
        return {}


def _remember(digests: dict[str, str]) -> None:
    """Keeps the newest digests. If the cache folder is read-only, every start reads the files."""
    newest = dict(list(digests.items())[-REMEMBERED:])
    with suppress(OSError):
        _memory().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_bytes(_memory(), seal(newest))
