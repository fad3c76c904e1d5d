"""Weight files are safetensors on the local disk, or read by ranges from a bucket or the hub.

A caller asks for a part of a tensor and gets its values. A local file is mapped into memory. Of a
remote file only the bytes that are asked for are downloaded, with many requests at a time, and
nothing is kept on disk. common/safetensors.py reads the headers.
"""

import json
import math
import mmap
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from itertools import product
from pathlib import Path

import numpy as np

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.safetensors import Header, Tensor, read_header
from activation_extraction.store.folder import SourceFolder

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[^/\\:.\0][^/\\:\0]*")  # a file in the folder of its index
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
PIECE = 8 * 2**20  # bytes of one request
CONNECTIONS = 16  # requests at a time, for all files together
GAP = 2**20  # reading so many bytes between two ranges takes less time than another request

Index = tuple[slice, ...]


class WeightFile(ABC):
    """A safetensors file of weights.

    Attributes:
        name: The name of the file, without folders.
        where: The path or URL of the file, for messages.
        size: The size of the file in bytes.
        at_once: How many values of a tensor should be read at a time.
    """

    name: str
    where: str
    size: int
    at_once: int

    @cached_property
    def header(self) -> Header:
        """The header of the file. Raises InputError, naming the file, if it is not complete."""
        return read_header(self.read_bytes, self.size, self.where, InputError)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the file by name. Raises InputError as `header` does."""
        return self.header.tensors

    @abstractmethod
    def read_bytes(self, start: int, stop: int) -> bytes:
        """Returns the bytes from `start` to `stop`; none if `stop` is not after `start`."""

    @abstractmethod
    def read(self, tensor: str, index: Index) -> np.ndarray:
        """Returns a part of a tensor."""


class LocalFile(WeightFile):
    """A file of this machine, mapped into memory."""

    at_once = 2**20

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.where = str(path)
        self.size = path.stat().st_size

    def read_bytes(self, start: int, stop: int) -> bytes:
        try:
            with open(self.path, "rb") as file:
                file.seek(start)
                return file.read(max(stop - start, 0))
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}") from error

    def read(self, tensor: str, index: Index) -> np.ndarray:
        """Returns a view of the file: its bytes are read when it is copied.

        The file is mapped for as long as the view lives, so pages that were read do not pile up.
        """
        entry = self.tensors[tensor]
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        values = np.frombuffer(mapped, entry.dtype, math.prod(entry.shape), entry.offset)
        return values.reshape(entry.shape)[index]


class RemoteFile(WeightFile):
    """A file in a bucket or on the hub. Methods raise FolderError if it cannot be read."""

    at_once = 4 * PIECE  # else few requests would be under way

    def __init__(self, folder: SourceFolder, name: str, size: int) -> None:
        self.name = name
        self.where = f"{folder.url}/{name}"
        self.size = size
        self._folder = folder

    def read_bytes(self, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        data = self._folder.read_range(self.name, start, stop)
        if data is None or len(data) != stop - start:
            raise RunError(f"{self.where}: has changed while it was being read")
        return bytes(data)

    def read(self, tensor: str, index: Index) -> np.ndarray:
        """Returns a new array; downloads little more than its bytes (see `ranges_of`)."""
        entry = self.tensors[tensor]
        bounds = [part.indices(size)[:2] for part, size in zip(index, entry.shape, strict=True)]
        depth, blocks = ranges_of(entry, bounds)
        content = np.empty(sum(stop - start for start, stop in blocks), np.uint8)
        pieces, filled = [], 0
        for start, stop in blocks:
            for first in range(start, stop, PIECE):
                last = min(first + PIECE, stop)
                pieces.append((first, content[filled : filled + last - first]))
                filled += last - first

        def fill(piece: tuple[int, np.ndarray]) -> None:
            start, values = piece
            values[:] = np.frombuffer(self.read_bytes(start, start + values.size), np.uint8)

        for _ in _connections().map(fill, pieces):
            pass
        lengths = [stop - start for start, stop in bounds[: depth + 1]]
        values = content.view(entry.dtype).reshape(*lengths, *entry.shape[depth + 1 :])
        return values[(slice(None),) * len(lengths) + tuple(index[depth + 1 :])]


def ranges_of(
    entry: Tensor, bounds: Sequence[tuple[int, int]]
) -> tuple[int, list[tuple[int, int]]]:
    """Returns the ranges of bytes to read for a part of a tensor.

    Args:
        entry: The tensor.
        bounds: (start, stop) of every axis.

    Returns:
        The axis that the ranges run along, and the (start, stop) of every range. There is one range
        for each index of the axes before this axis. The axes after it are read whole, because
        reading the bytes between shorter ranges takes less time than more requests.
    """
    sizes = [entry.dtype.itemsize * math.prod(entry.shape[k + 1 :]) for k in range(len(bounds))]
    lengths = [stop - start for start, stop in bounds]
    axis = 0
    while axis + 1 < len(bounds) and sizes[axis] - lengths[axis + 1] * sizes[axis + 1] >= GAP:
        axis += 1
    blocks = []
    for before in product(*(range(*bound) for bound in bounds[:axis])):
        first = entry.offset + sum(k * size for k, size in zip(before, sizes, strict=False))
        start, stop = bounds[axis]
        blocks.append((first + start * sizes[axis], first + stop * sizes[axis]))
    return axis, blocks


def read_index(path: Path) -> dict[str, str]:
    """Returns the file name of every tensor from the index of a checkpoint in several files.

    Raises:
        InputError: It is no such index, or names files in other folders.
    """
    try:
        files = dict(json.loads(path.read_bytes())["weight_map"])
        for tensor, name in files.items():
            if type(name) is not str or not SHARD_NAME.fullmatch(name):
                entry = f"{ascii(name):.80} for {ascii(tensor):.80}"
                raise ValueError(f"weight_map: {entry}, expected a file beside it")
        return files
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: not a safetensors index: {error!r}") from error


@cache
def _connections() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CONNECTIONS, "download-weights")
