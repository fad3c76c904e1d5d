"""The safetensors format of a shard: one contiguous tensor per hook.

So one hook can be read by mapping a part of a local file, or as one range of bytes from a bucket.
The package's docstring says which tensors there are; they are in that order, and each hook's scales
follow it. The bytes of the file depend only on the content and on the id of the process that wrote
it, which is in the metadata of the header as `writer`. (The safetensors library reads and writes
whole files, and no header alone: https://huggingface.co/docs/safetensors describes them.)
"""

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from activation_extraction.common.codes import ARRAYS, Codes, concatenated_values
from activation_extraction.common.encodings import VALUES
from activation_extraction.common.errors import RunError
from activation_extraction.store.shard import LABELS, Key, Shard

ALL_DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": VALUES,
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BOOL": np.dtype(bool),
    **{f"F{8 * n}": np.dtype(f"<f{n}") for n in (2, 4, 8)},
    **{f"{kind.upper()}{8 * n}": np.dtype(f"<{kind}{n}") for n in (1, 2, 4, 8) for kind in "iu"},
}
NAMES = {dtype: name for name, dtype in ALL_DTYPES.items()}
OF_TOKENS = "sample_idx", "sample_offsets", "token_ids", "position"  # tensors beside the hooks
SCALE = ".scale"  # follows the name of an encoded hook
FORMAT = "2"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class Tensor:
    """The dtype and shape of a tensor in a file, and the offset of its first byte."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], start: int) -> "Tensor":
        """Reads a tensor's entry in the header. start: the offset of the byte after the header.

        Raises KeyError, TypeError or ValueError for a damaged entry, or a dtype that is not in
        ALL_DTYPES.
        """
        begin, end = entry["data_offsets"]
        tensor = cls(ALL_DTYPES[entry["dtype"]], tuple(entry["shape"]), start + begin)
        for number in (begin, end, *tensor.shape):
            if type(number) is not int or number < 0:
                raise ValueError(f"{number!r:.40} in its header, expected a size")
        if tensor.end != start + end:
            raise ValueError("a tensor's size does not follow from its shape")
        return tensor

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def end(self) -> int:
        """The offset of the byte after the tensor."""
        return self.offset + self.dtype.itemsize * math.prod(self.shape)


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
        "sample_idx": [np.array([sample.sample_idx for sample in shard.samples], np.int64)],
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
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, parts in tensors.items():
        begin, end = end, end + sum(part.nbytes for part in parts)
        header[name] = {
            "dtype": NAMES[parts[0].dtype],
            "shape": [sum(map(len, parts)), *parts[0].shape[1:]],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    arrays = (np.ascontiguousarray(part) for parts in tensors.values() for part in parts)
    flat = (array.reshape(-1).view(np.uint8).data for array in arrays if array.size)
    return [memoryview(struct.pack("<Q", len(text)) + text), *flat]


class SafetensorsFile:
    """A shard's file that is open for reading.

    begin: asks for the bytes of the file from `start` to `stop`, and returns what waits for them,
    uint8. size: the size of the file. where: names it in messages. front: how many bytes at its
    beginning are read at once, and kept. `tensors` maps names to tensors, in the order of the file.
    Arrays are views of the file if it is mapped. The constructor raises RunError if the file is not
    a shard of this program or its size does not match its tensors.
    """

    def __init__(
        self,
        begin: Callable[[int, int], Callable[[], np.ndarray]],
        size: int,
        where: str,
        front: int = 0,
    ) -> None:
        self._ask = begin
        self.front = begin(0, min(front, size))()
        try:
            (length,) = struct.unpack("<Q", self._begin(0, 8)().tobytes())
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"the header claims {length} bytes")
            content = json.loads(self._begin(8, 8 + length)().tobytes())
            version = content.pop("__metadata__")["format"]
            if version != FORMAT:
                raise ValueError(f"format {version!r}, expected {FORMAT!r}")
            self.tensors = {
                name: Tensor.from_json(entry, 8 + length) for name, entry in content.items()
            }
            end = max(tensor.end for tensor in self.tensors.values())
            if end != size:
                raise ValueError(f"{size} bytes, its tensors end at {end}")
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise RunError(f"{where}: is not a shard that can be read: {error}") from error
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
        first, row = tensor.offset, tensor.row_bytes
        content = self._begin(first + start * row, first + stop * row)
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

    def _begin(self, start: int, stop: int) -> Callable[[], np.ndarray]:
        if stop > len(self.front):
            return self._ask(start, stop)
        return lambda: self.front[start:stop]

    def whole(self, name: str) -> np.ndarray:
        """Returns a whole tensor."""
        return self.rows(name, 0, self.tensors[name].shape[0])
