"""The safetensors format of a shard: one contiguous tensor per hook.

So one hook can be read by mapping a part of a local file, or as one range of bytes from a bucket.
The file has `sample_idx` and `sample_offsets` (int64), `token_ids`, `position` and labels (int32),
and a tensor (tokens, width) per hook under the hook's full name, in this order. The scales of an
encoded HOOK, (tokens, 1), are the tensor HOOK.scale, which follows it. The bytes of the file
depend only on the content. https://huggingface.co/docs/safetensors describes such files: 8 bytes
with the length of the header, the header as JSON, and the tensors.
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

from activation_extraction.common.encodings import VALUES
from activation_extraction.common.errors import RunError
from activation_extraction.store.shard import LABELS, Key, SampleRow, Shard

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "F8_E4M3": VALUES,
}
SCALE = ".scale"  # follows the name of an encoded hook
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
        DTYPES.
        """
        begin, end = entry["data_offsets"]
        tensor = cls(DTYPES[entry["dtype"]], tuple(entry["shape"]), start + begin)
        if type(begin) is not int or type(end) is not int or begin < 0:
            raise ValueError(f"data_offsets {begin!r:.40}, {end!r:.40}")
        if any(type(size) is not int or size < 0 for size in tensor.shape):
            raise ValueError(f"shape {tensor.shape}")
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


NAMES = {dtype: name for name, dtype in DTYPES.items()}
FORMAT = "2"
TABLE = {
    "sample_idx": np.dtype(np.int64),
    "sample_offsets": np.dtype(np.int64),
    "token_ids": np.dtype(np.int32),
    "position": np.dtype(np.int32),
}
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def safetensors_pieces(shard: Shard, names: Mapping[Key, str]) -> list[memoryview]:
    """Returns the bytes of a shard's file. Activations are not copied.

    names: the hooks' full names by key.
    """
    table = {
        "sample_idx": [np.array([sample.sample_idx for sample in shard.samples], np.int64)],
        "sample_offsets": [shard.offsets],
        "token_ids": [np.asarray(sample.token_ids, np.int32) for sample in shard.samples],
        "position": [np.asarray(sample.positions, np.int32) for sample in shard.samples],
    }
    for name in shard.samples[0].labels:
        table[name] = [sample.labels[name] for sample in shard.samples]
    tensors = dict(table)
    for key, slices in shard.slices.items():
        tensors[names[key]] = slices
        if key in shard.scales:
            tensors[names[key] + SCALE] = shard.scales[key]
    layout = {
        name: (parts[0].dtype, (sum(map(len, parts)), *parts[0].shape[1:]))
        for name, parts in tensors.items()
    }
    arrays = (np.ascontiguousarray(part) for parts in tensors.values() for part in parts)
    flat = (array.reshape(-1).view(np.uint8).data for array in arrays if array.size)
    return [memoryview(header(layout, {"format": FORMAT})), *flat]


def header(
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]], metadata: dict[str, str] | None = None
) -> bytes:
    """Returns the header, after its length in 8 bytes, padded to a multiple of 8 bytes.

    tensors: the dtypes and shapes by name, in the order of the tensors in the file.
    """
    content: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        offsets = [begin, end]
        content[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _check_layout(tensors: Mapping[str, Tensor], size: int) -> None:
    """Raises ValueError unless the tensors fill the file and agree about samples and tokens."""
    end = max(tensor.end for tensor in tensors.values())
    if end != size:
        raise ValueError(f"{size} bytes, its tensors end at {end}")
    for name, dtype in (TABLE | dict.fromkeys(_labels(tensors), np.dtype(np.int32))).items():
        if tensors[name].dtype != dtype:
            raise ValueError(f"{name} is {tensors[name].dtype}, expected {dtype}")
    (samples,), (tokens,) = tensors["sample_idx"].shape, tensors["token_ids"].shape
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if (shapes.pop("sample_offsets"), shapes["position"]) != ((samples + 1,), (tokens,)):
        raise ValueError("its tables differ in length")
    del shapes["sample_idx"]
    for name, shape in shapes.items():  # each has one value, or one activation, per token
        if not 1 <= len(shape) <= 2 or shape[0] != tokens:
            raise ValueError(f"{name} has shape {shape}")


def _labels(tensors: Mapping[str, Tensor]) -> list[str]:
    """The labels of tokens that a file has; a hook may have such a name, too."""
    return [name for name in LABELS if name in tensors and len(tensors[name].shape) == 1]


class SafetensorsFile:
    """A shard's file that is open for reading, with the methods of PickledShard.

    read: returns the bytes of the file from `start` to `stop`, uint8. size: the size of the file.
    where: names it in messages. `tensors` maps names to tensors, in the order of the file. Arrays
    are views of the file if it is mapped. Methods raise RunError; so does the constructor, if the
    file is not a shard of this program or its size does not match its tensors.
    """

    def __init__(self, read: Callable[[int, int], np.ndarray], size: int, where: str) -> None:
        self._read = read
        self._where = where
        try:
            (length,) = struct.unpack("<Q", read(0, 8).tobytes())
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"the header claims {length} bytes")
            content = json.loads(read(8, 8 + length).tobytes())
            version = content.pop("__metadata__")["format"]
            if version != FORMAT:
                raise ValueError(f"format {version!r}, expected {FORMAT!r}")
            self.tensors = {
                name: Tensor.from_json(entry, 8 + length) for name, entry in content.items()
            }
            _check_layout(self.tensors, size)
        except (*MALFORMED, struct.error) as error:
            raise RunError(f"{where}: is not a shard that can be read: {error}") from error

    @cached_property
    def sample_idx(self) -> np.ndarray:
        return np.array(self.whole("sample_idx"))

    @cached_property
    def offsets(self) -> np.ndarray:
        return np.array(self.whole("sample_offsets"))

    def tokens(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return self.rows("token_ids", start, stop), self.rows("position", start, stop)

    def labels(self, start: int, stop: int) -> dict[str, np.ndarray]:
        return {name: self.rows(name, start, stop) for name in _labels(self.tensors)}

    def rows(self, hook: str, start: int, stop: int) -> np.ndarray:
        """Returns the rows of a tensor from `start` to `stop`."""
        tensor = self.tensors[hook]
        first, row = tensor.offset, tensor.row_bytes
        content = self._read(first + start * row, first + stop * row)
        return np.ndarray((stop - start, *tensor.shape[1:]), tensor.dtype, content)

    def whole(self, name: str) -> np.ndarray:
        """Returns a whole tensor."""
        return self.rows(name, 0, self.tensors[name].shape[0])

    def shard(self, names: Mapping[Key, str]) -> Shard:
        """Returns the whole shard, without the content of its table of samples.

        names: the full names of its hooks by key. Raises RunError for a file that lacks one.
        """
        if missing := [name for name in names.values() if name not in self.tensors]:
            raise RunError(f"{self._where}: has no hook {missing[0]}")
        encoded = {
            key: name + SCALE for key, name in names.items() if self.tensors[name].dtype == VALUES
        }
        labels = _labels(self.tensors)
        tensors = ("token_ids", "position", *labels, *names.values(), *encoded.values())
        parts = {name: np.split(self.whole(name), self.offsets[1:-1]) for name in tensors}
        columns = self.sample_idx.tolist(), parts["token_ids"], parts["position"]
        rows = [
            SampleRow(*values, labels={name: parts[name][number] for name in labels})
            for number, values in enumerate(zip(*columns, strict=True))
        ]
        slices, scales = (
            {key: parts[name] for key, name in each.items()} for each in (names, encoded)
        )
        return Shard(rows, slices, scales=scales)
