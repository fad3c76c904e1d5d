"""The safetensors form of a shard: one contiguous tensor per hook.

So one hook can be read by mapping a part of a local file, or as one range of bytes from a bucket.
The file holds, in this order, `sample_idx` and `sample_offsets` (int64), `token_ids` and `position`
(int32), and a tensor (tokens, width) per hook under the hook's full name. The header's metadata has
JSON lists of the text previews, the document ids, the rows of the data set and how much was cut.
The bytes depend only on the content.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.store.safetensors_header import DTYPES, LARGEST_HEADER, Tensor
from activation_extraction.store.shard import Key, SampleRow, Shard

NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_TEXTS = LARGEST_HEADER // 2  # bytes, which leaves room for the names of the hooks
TABLE = ("sample_idx", "sample_offsets", "token_ids", "position")  # every other tensor is a hook
FORMAT = "1"
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Header:
    """What a file holds: tensors by name, and metadata, strings by name."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    @property
    def hooks(self) -> list[str]:
        return [name for name in self.tensors if name not in TABLE]


def safetensors_pieces(shard: Shard, names: Mapping[Key, str]) -> list[memoryview]:
    """The bytes of a shard's file, of which the activations are not copied.

    names: key of each hook in the shard -> its full name.
    """
    table = {
        "sample_idx": [np.array([sample.sample_idx for sample in shard.samples], np.int64)],
        "sample_offsets": [shard.offsets],
        "token_ids": [np.asarray(sample.token_ids, np.int32) for sample in shard.samples],
        "position": [np.asarray(sample.positions, np.int32) for sample in shard.samples],
    }
    tensors = table | {names[key]: slices for key, slices in shard.slices.items()}
    metadata = {
        "format": FORMAT,
        "text_previews": _json_list([sample.text_preview for sample in shard.samples]),
        "doc_ids": _json_list([sample.doc_id for sample in shard.samples]),
        "rows": _json_list([sample.row for sample in shard.samples]),
        "cut": _json_list([sample.cut for sample in shard.samples]),
    }
    layout = {
        name: (parts[0].dtype, (sum(map(len, parts)), *parts[0].shape[1:]))
        for name, parts in tensors.items()
    }
    arrays = (np.ascontiguousarray(part) for parts in tensors.values() for part in parts)
    flat = (array.reshape(-1).view(np.uint8).data for array in arrays if array.size)
    return [memoryview(header(layout, metadata)), *flat]


def text_bytes(row: SampleRow) -> int:
    """The bytes that a sample's texts take in the header."""
    return len(_json(_json_list([row.text_preview, row.doc_id, row.row, row.cut])))


def header(
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]], metadata: dict[str, str] | None = None
) -> bytes:
    """The length of the header in 8 bytes, and the header, padded to a multiple of 8 bytes.

    tensors: name -> dtype and shape, in the order in which their bytes follow.
    """
    content: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        offsets = [begin, end]
        content[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = _json(content).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _json_list(values: list[Any]) -> str:
    """A list in ASCII: an id may be NaN, or text that has no form in UTF-8."""
    return json.dumps(values, separators=(",", ":"))


def read_header(read: Callable[[int, int], bytes], size: int, where: str) -> Header:
    """Reads the header of a file of `size` bytes, by means of `read(start, stop)`.

    Raises RunError if the file is not a shard of ours, or if its tensors do not have its size.
    """
    try:
        (length,) = struct.unpack("<Q", read(0, 8))
        if length > min(LARGEST_HEADER, size - 8):
            raise ValueError(f"the header claims {length} bytes")
        content = json.loads(read(8, 8 + length))
        metadata = content.pop("__metadata__")
        if metadata["format"] != FORMAT:
            raise ValueError(f"format {metadata['format']!r}, expected {FORMAT!r}")
        tensors = {n: Tensor.from_json(entry, 8 + length) for n, entry in content.items()}
        _check_layout(tensors, size)
    except (*MALFORMED, struct.error) as error:
        raise RunError(f"{where}: is not a shard that can be read: {error}") from error
    return Header(tensors, metadata)


def _check_layout(tensors: Mapping[str, Tensor], size: int) -> None:
    """Raises ValueError unless the tensors fill the file and agree about samples and tokens."""
    end = max(tensor.end for tensor in tensors.values())
    if end != size:
        raise ValueError(f"{size} bytes, its tensors end at {end}")
    samples, tokens = tensors["sample_idx"].shape, tensors["token_ids"].shape
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes["sample_offsets"] != (samples[0] + 1,) or shapes["position"] != tokens:
        raise ValueError("its tables differ in length")
    if wrong := [
        n for n, s in shapes.items() if n not in TABLE and (len(s), *s[:1]) != (2, *tokens)
    ]:
        raise ValueError(f"hook {wrong[0]} has shape {shapes[wrong[0]]}")


def texts_of(header: Header) -> list[list[Any]]:
    """Text previews, document ids, rows of the data set, and how many tokens were cut off.

    One of each per sample; RunError or another error of MALFORMED if that is not so.
    """
    found = [json.loads(header.metadata[name]) for name in ("text_previews", "doc_ids")]
    for name, default in (("rows", None), ("cut", 0)):
        stored = header.metadata.get(name)
        found.append([default] * len(found[0]) if stored is None else json.loads(stored))
    return found


def read_safetensors(path: Path, names: Mapping[Key, str], limit: int) -> Shard:
    """Reads a shard; the activations are views of the mapped file.

    names: key of each hook that it should have -> the hook's full name. limit: the most bytes that
    it may have. Raises RunError for a file that is damaged, too large, or has other hooks.
    """
    size = path.stat().st_size
    if size > limit:
        raise RunError(f"{path.name}: has {size} bytes, more than {limit}")
    try:
        mapped = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    except ValueError as error:  # an empty file
        raise RunError(f"{path.name}: cannot be read: {error}") from error
    head = read_header(lambda start, stop: mapped[start:stop].tobytes(), size, path.name)
    if head.hooks != list(names.values()):
        raise RunError(f"{path.name}: has hooks {head.hooks}, its JSON others")
    tables = {name: _view(mapped, tensor) for name, tensor in head.tensors.items()}
    offsets = _checked_offsets(tables, path.name)
    try:
        rows = [
            SampleRow(*of_sample)
            for of_sample in zip(
                tables["sample_idx"].tolist(),
                np.split(tables["token_ids"], offsets),
                np.split(tables["position"], offsets),
                *texts_of(head),
                strict=True,
            )
        ]
    except MALFORMED as error:
        raise RunError(f"{path.name}: its texts cannot be read: {error}") from error
    return Shard(rows, {key: np.split(tables[name], offsets) for key, name in names.items()})


def _view(mapped: np.ndarray, tensor: Tensor) -> np.ndarray:
    return mapped[tensor.offset : tensor.end].view(tensor.dtype).reshape(tensor.shape)


def _checked_offsets(tables: Mapping[str, np.ndarray], where: str) -> np.ndarray:
    """Where the second sample begins, the third, ... Raises RunError for impossible offsets."""
    offsets = tables["sample_offsets"]
    ends = offsets[[0, -1]].tolist() == [0, len(tables["token_ids"])]
    if not ends or (np.diff(offsets) < 0).any():
        raise RunError(f"{where}: is damaged: its samples do not follow each other")
    return offsets[1:-1]
