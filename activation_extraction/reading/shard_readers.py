"""One stored shard, opened for reading: its table of samples, and the rows of its hooks.

A safetensors shard is read by ranges: of a hook only the rows that are asked for. A pickle has to
be read whole, once; only the hooks that are asked for stay in memory. Neither runs pickled code.
"""

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from activation_extraction.cli.errors import RunError
from activation_extraction.output import safetensors_file
from activation_extraction.output.commit import Commit
from activation_extraction.output.folder import Folder
from activation_extraction.output.pickle_file import read_records


@dataclass(frozen=True)
class SampleTable:
    """The samples of a shard.

    sample_idx: int64 (samples,); offsets: int64 (samples + 1,), sample i has the tokens offsets[i]
    to offsets[i + 1]; token_ids and position: int32 (tokens,).
    """

    sample_idx: np.ndarray
    offsets: np.ndarray
    token_ids: np.ndarray
    position: np.ndarray
    text_previews: list[str]
    doc_ids: list[Any]


class ShardReader(Protocol):
    """A shard that is open for reading."""

    @property
    def table(self) -> SampleTable: ...

    def rows(self, hook: str, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` of the shard at this hook: (stop - start, width)."""
        ...


def open_shard(folder: Folder, commit: Commit, keys: dict[str, Any]) -> ShardReader:
    """Opens a shard. keys: name of every hook that is wanted -> its key in the shard.

    Raises RunError when the file is missing, has another size than its commit, or is damaged.
    """
    kind = SafetensorsReader if commit.file.endswith(".safetensors") else PickleReader
    return kind(folder, commit, keys)


class SafetensorsReader:
    """Reads rows by mapping a local file, or by ranges of bytes from a bucket."""

    def __init__(self, folder: Folder, commit: Commit, keys: dict[str, Any]) -> None:
        self._where = f"{folder.url}/{commit.file}"
        self._read = _ranges_of(folder, commit)
        self._header = safetensors_file.read_header(self._bytes, commit.bytes, self._where)

    def _bytes(self, start: int, stop: int) -> bytes:
        return self._read(start, stop).tobytes()

    @cached_property
    def table(self) -> SampleTable:
        previews, doc_ids = safetensors_file.texts_of(self._header)
        sample_idx, offsets, token_ids, position = (
            self._rows(name, 0, self._header.tensors[name].shape[0])
            for name in safetensors_file.TABLE
        )
        return SampleTable(sample_idx, offsets, token_ids, position, previews, doc_ids)

    def rows(self, hook: str, start: int, stop: int) -> np.ndarray:
        return self._rows(hook, start, stop)

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray:
        tensor = self._header.tensors.get(name)
        if tensor is None:
            raise RunError(f"{self._where}: has no hook {name}; it has {self._header.hooks}")
        first, last = (tensor.offset + row * tensor.row_bytes for row in (start, stop))
        return self._read(first, last).view(tensor.dtype).reshape(-1, *tensor.shape[1:])


def _ranges_of(folder: Folder, commit: Commit) -> Callable[[int, int], np.ndarray]:
    """Function (start, stop) -> these bytes of a shard, uint8. Raises RunError for a short file."""
    where = f"{folder.url}/{commit.file}"
    if not folder.local:

        def download(start: int, stop: int) -> np.ndarray:
            data = folder.read(commit.file, start, stop)
            if data is None or len(data) != stop - start:
                raise RunError(f"{where}: is missing or shorter than its JSON says")
            return np.frombuffer(data, np.uint8)

        return download
    path = folder.fetch(commit.file, Path())
    try:
        mapped = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise RunError(f"{where}: cannot be read: {error}") from error
    if len(mapped) != commit.bytes:
        raise RunError(f"{where}: has {len(mapped)} bytes, its JSON says {commit.bytes}")
    return lambda start, stop: mapped[start:stop]


class PickleReader:
    """A pickled shard in memory, with the hooks that were asked for."""

    def __init__(self, folder: Folder, commit: Commit, keys: dict[str, Any]) -> None:
        self._where = f"{folder.url}/{commit.file}"
        with tempfile.TemporaryDirectory() as scratch:
            path = folder.fetch(commit.file, Path(scratch))
            if not path.exists():
                raise RunError(f"{self._where}: is missing")
            _check_whole(path, commit, self._where)
            shard = read_records(path, 10**11)
        missing = [name for name, key in keys.items() if key not in shard]
        if missing:
            raise RunError(f"{self._where}: has no hook {missing[0]}; it has {list(shard)}")
        records = next(iter(shard.values()))
        self._slices = {
            name: [record["activation"] for record in shard[key]] for name, key in keys.items()
        }
        token_ids = [np.asarray(record["token_ids"]) for record in records]
        lengths = [len(ids) for ids in token_ids]
        self.table = SampleTable(
            sample_idx=np.array([record["sample_idx"] for record in records], np.int64),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            token_ids=_joined(token_ids),
            position=_joined([np.arange(length, dtype=np.int32) for length in lengths]),
            text_previews=[record["text_preview"] for record in records],
            doc_ids=[record["doc_id"] for record in records],
        )

    def rows(self, hook: str, start: int, stop: int) -> np.ndarray:
        offsets = self.table.offsets
        first = int(np.searchsorted(offsets, start, "right")) - 1
        last = int(np.searchsorted(offsets, stop, "left"))
        parts = [
            self._slices[hook][i][max(start - offsets[i], 0) : stop - offsets[i]]
            for i in range(first, last)
        ]
        return _joined(parts)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check_whole(path: Path, commit: Commit, where: str) -> None:
    """Raises RunError for a file of another size; and, without gzip's own checksum, of another
    content than the commit says."""
    if path.stat().st_size != commit.bytes:
        raise RunError(f"{where}: has {path.stat().st_size} bytes, its JSON says {commit.bytes}")
    if path.suffix != ".gz":
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != commit.sha256:
                raise RunError(f"{where}: is damaged: its sha256 is not the one in its JSON")
