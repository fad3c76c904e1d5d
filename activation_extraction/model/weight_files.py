"""Reads parts of tensors from safetensors files on the local disk, in a bucket or on the hub.

A local file is mapped into memory. Of a remote file, only the needed ranges of bytes are
downloaded, with many requests at a time, and nothing is stored on disk. common/safetensors.py reads
the headers.
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
SHARD_NAME = re.compile(r"[^/\\:.\0][^/\\:\0]*")  # a name without folders
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
PIECE = 8 * 2**20  # the largest number of bytes of a request
CONNECTIONS = 16  # the number of requests at a time, for all files together
GAP = 2**20  # reading fewer bytes between two ranges takes less time than another request

Index = tuple[slice, ...]


class WeightFile(ABC):
    """A safetensors file of weights.

    Attributes:
        name: The name of the file, without folders.
        where: The path or URL of the file, for messages.
        size: The size of the file in bytes.
        at_once: About how many values of a tensor to read at a time.
    """

    name: str
    where: str
    size: int
    at_once: int

    @cached_property
    def header(self) -> Header:
        """The header of the file. Raises InputError as `read_header` does."""
        return read_header(self.read_bytes, self.size, self.where, InputError)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the file by name. Raises InputError as `header` does."""
        return self.header.tensors

    @abstractmethod
    def read_bytes(self, start: int, stop: int) -> bytes:
        """Returns the bytes from offset `start` to offset `stop`, or b"" if `stop <= start`."""

    @abstractmethod
    def read(self, tensor: str, index: Index) -> np.ndarray:
        """Reads a part of a tensor.

        Args:
            tensor: The name of the tensor in the file.
            index: A slice for each axis.

        Returns:
            The part, in the dtype of the file.
        """


class LocalFile(WeightFile):
    """A file on this machine, which is mapped into memory."""

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
        """Returns a view of the mapped file. The bytes are read when the view is copied.

        The mapping ends with the view, so that pages that were read do not accumulate.
        """
        entry = self.tensors[tensor]
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        flat = np.frombuffer(mapped, entry.dtype, math.prod(entry.shape), entry.offset)
        return flat.reshape(entry.shape)[index]


class RemoteFile(WeightFile):
    """A file in a bucket or on the hub.

    Methods raise FolderError if the file cannot be read, and RunError if it has changed.
    """

    at_once = 4 * PIECE  # with fewer values, few requests would run at a time

    def __init__(self, folder: SourceFolder, name: str, size: int) -> None:
        self.name = name
        self.where = f"{folder.url}/{name}"
        self.size = size
        self._folder = folder

    def read_bytes(self, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        content = self._folder.read_range(self.name, start, stop)
        if content is None or len(content) != stop - start:
            raise RunError(f"{self.where}: has changed while it was being read")
        return bytes(content)

    def read(self, tensor: str, index: Index) -> np.ndarray:
        """Downloads a part of a tensor, with few bytes more (see `ranges_of`), as a new array."""
        entry = self.tensors[tensor]
        bounds = [part.indices(size)[:2] for part, size in zip(index, entry.shape, strict=True)]
        axis, ranges = ranges_of(entry, bounds)
        content = np.empty(sum(stop - start for start, stop in ranges), np.uint8)
        requests = []  # (offset in the file, the bytes of `content` to fill)
        filled = 0
        for start, stop in ranges:
            for first in range(start, stop, PIECE):
                size = min(PIECE, stop - first)
                requests.append((first, content[filled : filled + size]))
                filled += size

        def fill(request: tuple[int, np.ndarray]) -> None:
            start, target = request
            target[:] = np.frombuffer(self.read_bytes(start, start + target.size), np.uint8)

        for _ in _connections().map(fill, requests):
            pass
        # The axes after `axis` were downloaded whole, so the index applies to them now.
        lengths = [stop - start for start, stop in bounds[: axis + 1]]
        downloaded = content.view(entry.dtype).reshape(*lengths, *entry.shape[axis + 1 :])
        return downloaded[(slice(None),) * len(lengths) + tuple(index[axis + 1 :])]


def ranges_of(
    entry: Tensor, bounds: Sequence[tuple[int, int]]
) -> tuple[int, list[tuple[int, int]]]:
    """Returns the ranges of bytes to read for a part of a tensor.

    There is one range for each index of the axes before a certain axis, and a range covers the part
    along this axis. The axes after it are read whole, because reading the bytes between shorter
    ranges takes less time than more requests.

    Args:
        entry: The tensor.
        bounds: The start and stop of the part on each axis.

    Returns:
        A tuple of:
            The number of the axis along which the ranges are.
            The offsets in the file of the start and the stop of each range.
    """
    # The bytes of one index of each axis.
    sizes = [
        entry.dtype.itemsize * math.prod(entry.shape[axis + 1 :]) for axis in range(len(bounds))
    ]
    lengths = [stop - start for start, stop in bounds]
    axis = 0
    while axis + 1 < len(bounds) and sizes[axis] - lengths[axis + 1] * sizes[axis + 1] >= GAP:
        axis += 1
    start, stop = bounds[axis]
    ranges = []
    for indices in product(*(range(*bound) for bound in bounds[:axis])):
        steps = [index * size for index, size in zip(indices, sizes, strict=False)]
        first = entry.offset + sum(steps)
        ranges.append((first + start * sizes[axis], first + stop * sizes[axis]))
    return axis, ranges


def read_index(path: Path) -> dict[str, str]:
    """Reads the index of a checkpoint in several files.

    Args:
        path: The path of the index.

    Returns:
        The name of a tensor -> the name of its file.

    Raises:
        InputError: The file is no such index, or it names files in other folders.
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
    """Returns the threads that download weights, which all files share."""
    return ThreadPoolExecutor(CONNECTIONS, "download-weights")
