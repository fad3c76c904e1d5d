"""Digests of files show whether two runs read the same.

Every byte of a file counts, yet weights are read for this only once: the digest of a large file is
kept in the user's cache folder until the file changes. A large file in the hub's cache is not read
at all, because its name there is its SHA-256.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from tqdm import tqdm

from activation_extraction.common.errors import InputError
from activation_extraction.common.log import log, on_terminal
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.devices import default_folder
from activation_extraction.store.local_files import write_bytes
from activation_extraction.store.sealed_json import DamagedError, seal, unseal

LARGE = 16 * 2**20  # bytes; smaller files are simply read
CHUNK = 2**20  # bytes
READERS = 8  # files are read at the same time
# A file that changed less than this many seconds ago may change again and keep its timestamp.
SETTLED = 3.0
MOST_CACHED = 10_000  # files
CACHE_NAME = "file_digests.json"


def model_digest(checkpoint: Checkpoint) -> str:
    """Returns a digest of config.json and the weights, which decide what a model computes."""
    return digest_files(checkpoint.local_files(), checkpoint.remote_digests())


def digest_files(paths: Sequence[Path], remote: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns a digest of the names and contents of files. Raises InputError if one is unreadable.

    remote: name -> digest of files that are not on this machine.
    """
    known = {path: digest for path in paths if (digest := _hub_digest(path)) is not None}
    known |= file_digests([path for path in paths if path not in known], "weights")
    digests = [*((path.name, known[path]) for path in paths), *remote.items()]
    lines = sorted(f"{name} {digest}\n" for name, digest in digests)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def file_digests(paths: Sequence[Path], what: str | None = None) -> dict[Path, str]:
    """Returns the SHA-256 of each file. what: a progress bar's name for them; None: no bar."""
    large = {}
    for path in paths:
        with reading(path):
            if path.stat().st_size >= LARGE:
                large[path] = _state(path)
    cached = _read_cache() if large else {}
    known = {path: cached[state] for path, state in large.items() if state in cached}
    unread = [path for path in large if path not in known]
    settled = [path for path in unread if time.time() - path.stat().st_ctime > SETTLED]
    known |= _read_all(unread, what)
    same = {large[path]: known[path] for path in settled if _state(path) == large[path]}
    if same:
        _write_cache(cached | same)
    return {path: known[path] if path in known else _read(path) for path in paths}


def same_beginning(path: Path, size: int, sha256: str) -> bool:
    """Returns whether the first `size` bytes of a file are whole lines with this SHA-256."""
    digest, last = hashlib.sha256(), b""
    with reading(path), open(path, "rb") as file:
        while size > 0 and (last := file.read(min(size, CHUNK))):
            digest.update(last)
            size -= len(last)
    return digest.hexdigest() == sha256 and last.endswith(b"\n")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises InputError if the file cannot be read inside the block."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _hub_digest(path: Path) -> str | None:
    """Returns the SHA-256 that the hub reported; None for other files and for ones edited here.

    The hub's cache keeps a large file under its SHA-256, and its snapshots link to it. A file that
    has changed since its link was made was edited through the link.
    """
    if not path.is_symlink():
        return None
    blob = path.resolve()
    if blob.parent.name != "blobs" or not re.fullmatch("[0-9a-f]{64}", blob.name):
        return None
    return blob.name if blob.stat().st_ctime_ns <= path.lstat().st_ctime_ns else None


def _state(path: Path) -> str:
    """Returns a digest of the path and of everything that changes when the file is written to."""
    stat = path.stat()
    state = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
    return hashlib.sha256(os.fsencode(path.resolve()) + repr(state).encode()).hexdigest()


def _read_all(paths: Sequence[Path], what: str | None) -> dict[Path, str]:
    """Returns the SHA-256 of every file; with a progress bar, several are read at a time."""
    if what is None or not paths:
        return {path: _read(path) for path in paths}
    total = sum(path.stat().st_size for path in paths)
    text = "reading %.2g GB of %s to compute the SHA-256; later starts remember it"
    log.info(text, total / 1e9, what)
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
    """Returns the SHA-256 of a file; `progress` is called with the bytes of each piece."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK))
    with reading(path), open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
            progress(size)
    return digest.hexdigest()


def _cache_file() -> Path:
    return default_folder().parent / CACHE_NAME


def _read_cache() -> dict[str, str]:
    """Returns state of a file -> its SHA-256."""
    try:
        return unseal(_cache_file().read_bytes(), CACHE_NAME)
    except (OSError, DamagedError):
        return {}


def _write_cache(digests: dict[str, str]) -> None:
    """Keeps the newest digests. If the cache folder is read-only, every start reads the files."""
    newest = dict(list(digests.items())[-MOST_CACHED:])
    with suppress(OSError):
        _cache_file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_bytes(_cache_file(), seal(newest))
