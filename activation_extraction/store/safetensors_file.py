"""The safetensors format of a shard: one contiguous tensor per hook.

So one hook can be read by mapping a part of a local file, or as one range of bytes from a bucket.
The package's docstring says which tensors there are; they are in that order, and each hook's scales
follow it. The bytes of the file depend only on the content and on the id of the process that wrote
it, which is in the metadata of the header as `writer`. common/safetensors.py knows the header.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from activation_extraction.common.codes import ARRAYS, Codes, concatenated_values
from activation_extraction.common.errors import RunError
from activation_extraction.common.safetensors import pack_header, read_header
from activation_extraction.store.shard import LABELS, Key, Shard

OF_TOKENS = "sample_idx", "sample_offsets", "token_ids", "position"  # tensors beside the hooks
SCALE = ".scale"  # follows the name of an encoded hook
FORMAT = "2"


def safetensors_pieces(
    shard: Shard, names: Mapping[Key, str], writer: str = ""
) -> list[memoryview]:
    """Returns the bytes of a shard's file. Activations are not copied.

    Args:
        shard: The shard.
        names: The full names of its hooks by key.
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
    for key, slices in shard.slices.items():
        if isinstance(slices[0], Codes):
            codes = concatenated_values(slices)
            tensors |= {f"{names[key]}.{n}": [getattr(codes, f)] for n, f in ARRAYS.items()}
            continue
        tensors[names[key]] = slices
        if key in shard.scales:
            tensors[names[key] + SCALE] = shard.scales[key]
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
            front: How many bytes at the beginning of the file are read at once, and kept.

        Raises:
            RunError: The file is not a shard of this program, or its size does not match its
                tensors.
        """
        self._ask = begin
        self.front = begin(0, min(front, size))()
        header = read_header(self._read, size, where, RunError)
        version = header.metadata.get("format")
        if version != FORMAT:
            raise RunError(
                f"{where}: is not a shard that can be read: format {version!r}, expected {FORMAT!r}"
            )
        self.tensors = header.tensors
        # A hook may have such a name, too.
        found = (name for name in LABELS if name in self.tensors)
        labels = [name for name in found if len(self.tensors[name].shape) == 1]
        self._of_tokens = ["token_ids", "position", *labels]

    @cached_property
    def sample_idx(self) -> np.ndarray:
        """The numbers of the samples, int64 (samples,)."""
        return np.array(self.whole("sample_idx"))

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 (samples + 1,); sample i has the tokens offsets[i] to offsets[i + 1]."""
        return np.array(self.whole("sample_offsets"))

    def tokens(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns what is said of the tokens `start` to `stop`: `token_ids`, `position`, and the
        labels that the run has, int32, by name."""
        return {name: self.rows(name, start, stop) for name in self._of_tokens}

    def rows(self, hook: str, start: int, stop: int) -> Any:
        """Returns what `begin_rows` asks for."""
        return self.begin_rows(hook, start, stop)()

    def begin_rows(self, hook: str, start: int, stop: int) -> Callable[[], Any]:
        """Asks for the rows of a tensor from `start` to `stop`, and returns what waits for them: an
        array, or Codes for a hook of codes. How many features there are, the file does not say."""
        if hook not in self.tensors:
            return self._begin_codes(hook, start, stop)
        tensor = self.tensors[hook]
        content = self._begin(*tensor.byte_range(start, stop))
        shape = stop - start, *tensor.shape[1:]
        return lambda: np.ndarray(shape, tensor.dtype, content())

    def _begin_codes(self, hook: str, start: int, stop: int) -> Callable[[], Codes]:
        indptr = self.rows(f"{hook}.offsets", start, stop + 1)
        first, last = indptr[[0, -1]].tolist()
        of_features = [self.begin_rows(f"{hook}.{name}", first, last) for name in ("ids", "values")]
        of_tokens = [self.begin_rows(f"{hook}.{name}", start, stop) for name in ("error", "norm")]

        def wait() -> Codes:
            ids, values, error, norm = (each() for each in (*of_features, *of_tokens))
            return Codes(indptr - first, ids, values, error, norm, 0)

        return wait

    def _read(self, start: int, stop: int) -> bytes:
        """Returns the bytes of the file from `start` to `stop`."""
        return self._begin(start, stop)().tobytes()

    def _begin(self, start: int, stop: int) -> Callable[[], np.ndarray]:
        if stop > len(self.front):
            return self._ask(start, stop)
        return lambda: self.front[start:stop]

    def whole(self, name: str) -> np.ndarray:
        """Returns a whole tensor."""
        return self.rows(name, 0, self.tensors[name].shape[0])
