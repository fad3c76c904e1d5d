"""The safetensors format of a shard: every tensor is one contiguous range of bytes.

So the values at one hook can be read without the others, by mapping a part of a local file or by
range requests to a bucket. The docstring of this package lists the tensors, in the order in which
they are written; the tensors of a hook follow one another. The bytes of a file depend only on its
content and on the id of the process that wrote it, which is `writer` in the metadata of the header.
common/safetensors.py parses and writes the header.
"""

from collections.abc import Callable
from functools import cached_property

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.common.safetensors import pack_header, read_header
from activation_extraction.common.visible import counted
from activation_extraction.store.shard import LABELS, Shard

OF_TOKENS = (
    "sample_idx",
    "sample_offsets",
    "token_ids",
    "position",
)  # tensors that belong to no hook
FORMAT = "2"


def safetensors_pieces(shard: Shard, writer: str = "") -> list[memoryview]:
    """Returns the bytes of a shard's file. Activations are not copied.

    Args:
        shard: The shard, whose values are in the stored form.
        writer: The id of the process that writes the file; "" to leave it out.
    """
    tensors = {
        "sample_idx": [np.array([sample.facts.sample_idx for sample in shard.samples], np.int64)],
        "sample_offsets": [shard.offsets],
        "token_ids": [np.asarray(sample.token_ids, np.int32) for sample in shard.samples],
        "position": [np.asarray(sample.positions, np.int32) for sample in shard.samples],
    }
    for name in shard.samples[0].labels:
        tensors[name] = [sample.labels[name] for sample in shard.samples]
    for key, hook in shard.hooks.items():
        tensors |= hook.tensors(shard.values[key])
    metadata = {"format": FORMAT, "writer": writer} if writer else {"format": FORMAT}
    shapes = {
        name: (parts[0].dtype, (sum(map(len, parts)), *parts[0].shape[1:]))
        for name, parts in tensors.items()
    }
    arrays = (np.ascontiguousarray(part) for parts in tensors.values() for part in parts)
    flat = (array.reshape(-1).view(np.uint8).data for array in arrays if array.size)
    return [memoryview(pack_header(shapes, metadata)), *flat]


class SafetensorsFile:
    """A shard's file that is open for reading.

    Arrays are views of the file if it is mapped into memory.

    Attributes:
        tensors: The tensors by name, in the order of the file.
        front: The bytes at the beginning of the file that are kept, uint8.
    """

    def __init__(
        self,
        begin: Callable[[int, int], Callable[[], np.ndarray]],
        size: int,
        where: str,
        front: int = 0,
    ) -> None:
        """Reads the header.

        Args:
            begin: A function that asks for the bytes of the file from `start` to `stop`, and
                returns a function that waits for them and returns them, uint8.
            size: The size of the file in bytes.
            where: The path or URL of the file, for messages.
            front: Number of bytes at the beginning of the file that are read at once, and kept.

        Raises:
            RunError: The file is not a shard of this program, or its size does not match its
                tensors.
        """
        self._ask = begin
        self._where = where
        self.front = begin(0, min(front, size))()
        header = read_header(self._read, size, where, RunError)
        version = header.metadata.get("format")
        if version != FORMAT:
            raise RunError(
                f"{where}: is not a shard that can be read: format {version!r}, expected {FORMAT!r}"
            )
        self.tensors = header.tensors
        # A hook may have the name of a label, too, but its tensor has two axes.
        labels = [
            name for name in LABELS if name in self.tensors and len(self.tensors[name].shape) == 1
        ]
        self._of_tokens = ["token_ids", "position", *labels]

    @cached_property
    def sample_idx(self) -> np.ndarray:
        """The numbers of the samples, int64 (samples,)."""
        return np.array(self.whole("sample_idx"))

    @cached_property
    def offsets(self) -> np.ndarray:
        """The offset of the first token of each sample, then the number of tokens in the shard.

        int64 (samples + 1,). Sample i has the tokens from offsets[i] up to offsets[i + 1] - 1.
        """
        return np.array(self.whole("sample_offsets"))

    def tokens(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns the ids, positions and labels of consecutive tokens.

        Args:
            start: Offset of the first token in the shard.
            stop: Offset of the token after the last one.

        Returns:
            The arrays `token_ids` and `position`, and `role` and `turn` if the run has them, int32
            (stop - start,), by these names.
        """
        return {name: self.begin_rows(name, start, stop)() for name in self._of_tokens}

    def begin_rows(self, name: str, start: int, stop: int) -> Callable[[], np.ndarray]:
        """Asks for consecutive rows of a tensor.

        Args:
            name: Name of the tensor.
            start: Number of the first row.
            stop: Number of the row after the last one.

        Returns:
            A function that waits for the rows and returns them, (stop - start, ...).

        Raises:
            RunError: The file lacks the tensor or some of the rows.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise RunError(f"{self._where}: lacks the tensor {name}")
        if stop > tensor.shape[0]:
            raise RunError(
                f"{self._where}: the tensor {name} has {counted(tensor.shape[0], 'row')}, "
                f"expected {stop} or more"
            )
        content = self._begin(*tensor.byte_range(start, stop))
        shape = stop - start, *tensor.shape[1:]
        return lambda: np.ndarray(shape, tensor.dtype, content())

    def _read(self, start: int, stop: int) -> bytes:
        """Returns the bytes of the file from `start` to `stop`."""
        return self._begin(start, stop)().tobytes()

    def _begin(self, start: int, stop: int) -> Callable[[], np.ndarray]:
        if stop > len(self.front):
            return self._ask(start, stop)
        return lambda: self.front[start:stop]

    def whole(self, name: str) -> np.ndarray:
        """Returns a whole tensor, which the file must have."""
        return self.begin_rows(name, 0, self.tensors[name].shape[0])()
