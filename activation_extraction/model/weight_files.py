"""Reads parts of tensors from safetensors files on the local disk, in a bucket or on the hub.

A local file is mapped into memory. From a remote file, only the needed ranges of bytes are
downloaded into memory, with many requests at a time. common/safetensors.py reads the headers, and
checkpoint.py finds the file of a tensor.
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
SHARD_NAME = re.compile(r"[^/\\:.\0][^/\\:\0]*")  # a file name without folders
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")  # the supported float dtypes, by safetensors' names
REQUEST_BYTES = 8 * 2**20  # the largest number of bytes that a request downloads
# A read of `RemoteFile.num_values_per_read` values is divided into at least this many requests.
MIN_REQUESTS_PER_READ = 4
MIN_BYTES_PER_VALUE = 1  # the size of a value in the smallest dtypes, such as float8
CONNECTIONS = 16  # the largest number of requests at a time, for all files together
# Two ranges with fewer unneeded bytes between them are downloaded as one range, because these bytes
# take less time than another request.
GAP_BYTES = 2**20

Index = tuple[slice, ...]  # a slice for each axis of a tensor


class WeightFile(ABC):
    """A safetensors file of weights.

    Attributes:
        name: The name of the file, without folders.
        location: The path or URL of the file, for messages.
        byte_count: The size of the file in bytes.
        num_values_per_read: The approximate number of values that a caller should read with one
            call of `read`.
    """

    name: str
    location: str
    byte_count: int
    num_values_per_read: int

    @cached_property
    def header(self) -> Header:
        """The header of the file, which describes the tensors.

        Raises:
            InputError: If the header is damaged or cut off.
        """
        return read_header(self.read_bytes, self.byte_count, self.location, InputError)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name of a tensor -> its dtype, shape and offset, from the header of the file.

        Raises:
            InputError: If the header is damaged or cut off.
        """
        return self.header.tensors

    @abstractmethod
    def read_bytes(self, start: int, stop: int) -> bytes:
        """Reads a range of bytes of the file.

        Args:
            start: The offset of the first byte in the file.
            stop: The offset after the last byte.

        Returns:
            The bytes; b"" if `stop <= start`.
        """

    @abstractmethod
    def read(self, tensor: str, index: Index) -> np.ndarray:
        """Reads a part of a tensor.

        Args:
            tensor: The name of the tensor in the file.
            index: A slice for each axis. A `LocalFile` also accepts (), which selects the whole
                tensor; a `RemoteFile` always needs the slices.

        Returns:
            The values of the part, in the dtype of the file.
        """


class LocalFile(WeightFile):
    """A weight file on this machine, which is mapped into memory."""

    num_values_per_read = 2**20

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.location = str(path)
        self.byte_count = path.stat().st_size

    def read_bytes(self, start: int, stop: int) -> bytes:
        try:
            with open(self.path, "rb") as file:
                file.seek(start)
                return file.read(max(stop - start, 0))
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}") from error

    def read(self, tensor: str, index: Index) -> np.ndarray:
        """Maps the file, and returns a part of a tensor as a view of the mapped file.

        The bytes are only read when the view is copied. Each call maps the file again, and the
        mapping is freed with the view. So pages that were read do not accumulate in memory.

        Args:
            tensor: The name of the tensor in the file.
            index: A slice for each axis, or () for the whole tensor.

        Returns:
            The values of the part, in the dtype of the file.
        """
        header_entry = self.tensors[tensor]
        tensor_shape = header_entry.shape
        with open(self.path, "rb") as file:
            mapped_file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        flat_values = np.frombuffer(
            mapped_file, header_entry.dtype, math.prod(tensor_shape), header_entry.offset
        )
        return flat_values.reshape(tensor_shape)[index]


class RemoteFile(WeightFile):
    """A weight file in a bucket or on the hub, of which only ranges of bytes are downloaded.

    Methods raise FolderError if the file cannot be read, and RunError if the file has changed since
    it was opened.
    """

    # A read of this many values is divided into several requests, which run in parallel.
    num_values_per_read = MIN_REQUESTS_PER_READ * REQUEST_BYTES // MIN_BYTES_PER_VALUE

    def __init__(self, folder: SourceFolder, name: str, size: int) -> None:
        self.name = name
        self.location = f"{folder.url}/{name}"
        self.byte_count = size
        self._folder = folder

    def read_bytes(self, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        range_content = self._folder.read_range(self.name, start, stop)
        if range_content is None or len(range_content) != stop - start:
            raise RunError(f"{self.location}: has changed while it was being read")
        return bytes(range_content)

    def read(self, tensor: str, index: Index) -> np.ndarray:
        """Downloads a part of a tensor as a new array.

        The download may contain more bytes than the part (see `byte_ranges`).

        Args:
            tensor: The name of the tensor in the file.
            index: A slice for each axis.

        Returns:
            The values of the part, in the dtype of the file.
        """
        header_entry = self.tensors[tensor]
        tensor_shape = header_entry.shape
        bounds_of_axes = [
            axis_slice.indices(axis_size)[:2]
            for axis_slice, axis_size in zip(index, tensor_shape, strict=True)
        ]
        last_sliced_axis, offset_ranges = byte_ranges(header_entry, bounds_of_axes)
        downloaded_content = np.empty(
            sum(range_stop - range_start for range_start, range_stop in offset_ranges), np.uint8
        )
        # A request is the offset of its first byte in the file, and the view of
        # `downloaded_content` that it fills.
        offsets_and_buffers_of_requests: list[tuple[int, np.ndarray]] = []
        requested_byte_count = 0
        for range_start, range_stop in offset_ranges:
            for request_offset in range(range_start, range_stop, REQUEST_BYTES):
                request_byte_count = min(REQUEST_BYTES, range_stop - request_offset)
                offsets_and_buffers_of_requests.append(
                    (
                        request_offset,
                        downloaded_content[
                            requested_byte_count : requested_byte_count + request_byte_count
                        ],
                    )
                )
                requested_byte_count += request_byte_count

        def fill(request: tuple[int, np.ndarray]) -> None:
            first_byte_offset, target_buffer = request
            target_buffer[:] = np.frombuffer(
                self.read_bytes(first_byte_offset, first_byte_offset + target_buffer.size), np.uint8
            )

        for _ in _connections().map(fill, offsets_and_buffers_of_requests):
            pass
        # The axes after `last_sliced_axis` were downloaded whole, so the index is applied to them
        # here.
        lengths_of_axes = [
            range_stop - range_start
            for range_start, range_stop in bounds_of_axes[: last_sliced_axis + 1]
        ]
        downloaded_part = downloaded_content.view(header_entry.dtype).reshape(
            *lengths_of_axes, *tensor_shape[last_sliced_axis + 1 :]
        )
        return downloaded_part[
            (slice(None),) * len(lengths_of_axes) + tuple(index[last_sliced_axis + 1 :])
        ]


def byte_ranges(
    tensor: Tensor, bounds: Sequence[tuple[int, int]]
) -> tuple[int, list[tuple[int, int]]]:
    """Returns the ranges of bytes to download for a part of a tensor.

    The ranges contain only the part's indices on the first axes of the tensor (the sliced axes),
    and all indices on the later axes. Axis 0 is always sliced. Each next axis is sliced as well, as
    long as this leaves gaps of at least GAP_BYTES bytes between the ranges. Smaller gaps are
    downloaded, because this takes less time than another request.

    There is one range for each combination of the part's indices on all sliced axes except the
    last one. The range covers the bounds of the part on the last sliced axis.

    Args:
        tensor: The description of the tensor in the header of the file.
        bounds: The start and stop of the part on each axis.

    Returns:
        A tuple of:
            The number of the last sliced axis, from 0.
            The ranges, each as a tuple of the offsets in the file of its first byte and of the byte
                after it.
    """
    # The distance in bytes between two neighbouring indices on each axis.
    byte_strides = [
        tensor.dtype.itemsize * math.prod(tensor.shape[axis + 1 :]) for axis in range(len(bounds))
    ]
    last_sliced_axis = 0
    while last_sliced_axis + 1 < len(bounds):
        next_axis_start, next_axis_stop = bounds[last_sliced_axis + 1]
        needed_byte_count = (next_axis_stop - next_axis_start) * byte_strides[last_sliced_axis + 1]
        if byte_strides[last_sliced_axis] - needed_byte_count < GAP_BYTES:
            break
        last_sliced_axis += 1
    range_start, range_stop = bounds[last_sliced_axis]
    offset_ranges = []
    for outer_indices in product(
        *(range(*axis_bounds) for axis_bounds in bounds[:last_sliced_axis])
    ):
        byte_offsets_along_outer_axes = [
            outer_index * byte_stride
            for outer_index, byte_stride in zip(outer_indices, byte_strides, strict=False)
        ]
        byte_offset_of_outer_indices = tensor.offset + sum(byte_offsets_along_outer_axes)
        offset_ranges.append(
            (
                byte_offset_of_outer_indices + range_start * byte_strides[last_sliced_axis],
                byte_offset_of_outer_indices + range_stop * byte_strides[last_sliced_axis],
            )
        )
    return last_sliced_axis, offset_ranges


def read_index(path: Path) -> dict[str, str]:
    """Reads the index of a checkpoint that consists of several weight files.

    Args:
        path: The local path of the index.

    Returns:
        Name of a tensor -> the name of its file.

    Raises:
        InputError: If the file is not an index of weight files, or names files in other folders.
    """
    try:
        file_name_by_tensor = dict(json.loads(path.read_bytes())["weight_map"])
        for tensor_name, file_name in file_name_by_tensor.items():
            if type(file_name) is not str or not SHARD_NAME.fullmatch(file_name):
                index_entry_phrase = f"{ascii(file_name):.80} for {ascii(tensor_name):.80}"
                raise ValueError(f"weight_map: {index_entry_phrase}, expected a file beside it")
        return file_name_by_tensor
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: not a safetensors index: {error!r}") from error


@cache
def _connections() -> ThreadPoolExecutor:
    """Returns the pool of threads that download weights, which all weight files share."""
    return ThreadPoolExecutor(CONNECTIONS, "download-weights")
