"""Checkpoints (a local folder or a Hugging Face hub name) and how arrays are read from them.

`Checkpoint` finds files and tensors; `WeightSpec` says how one parameter is made of checkpoint
tensors; `load_params` puts every parameter straight into its shards, reading only the parts of the
safetensors files that they need. Which parameters exist is the model's knowledge (qwen2_jax.py).
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open

from activation_extraction.errors import InputError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Written by some exporters, recomputed by every model from rope_theta.
IGNORED_TENSORS = re.compile(r".*\.rotary_emb\.inv_freq")

Index = tuple[slice, ...]
ReadTensor = Callable[[str, Index], np.ndarray]


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """One parameter: its shape, the logical axis of each dimension, and its checkpoint tensors.

    A parameter whose first axis is "layers" stacks one tensor per layer; others have one tensor.
    The checkpoint keeps (heads, head_dim) as one flat dimension; all else has the same layout.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    hf_names: tuple[str, ...]

    @property
    def stacked(self) -> bool:
        return self.axes[0] == "layers"

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of each checkpoint tensor."""
        merged: list[int] = []
        for axis, size in zip(self.axes, self.shape, strict=True):
            if axis == "head_dim":
                merged[-1] *= size
            elif axis != "layers":
                merged.append(size)
        return tuple(merged)

    def check(self, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
        """Raises InputError when a tensor is not in `shapes` (name -> shape) or has another one."""
        for name in self.hf_names:
            if name not in shapes:
                raise InputError(f"{source}: tensor {name} is missing")
            if tuple(shapes[name]) != self.hf_shape:
                raise InputError(
                    f"{source}: tensor {name} has shape {tuple(shapes[name])}, "
                    f"config.json asks for {self.hf_shape}"
                )

    def assemble(self, read: ReadTensor, dtype: Any, index: Index | None = None) -> np.ndarray:
        """The part `index` of the parameter (default: all of it) as a NumPy array of `dtype`.

        `read(name, hf_index)` returns that part of a checkpoint tensor.
        """
        bounds = [
            part.indices(size)[:2]
            for part, size in zip(
                index or (slice(None),) * len(self.shape), self.shape, strict=True
            )
        ]
        out = np.empty([stop - start for start, stop in bounds], dtype)
        if not self.stacked:
            out[...] = read(self.hf_names[0], self._hf_index(bounds)).reshape(out.shape)
            return out
        for row, name in zip(out, self.hf_names[slice(*bounds[0])], strict=True):
            row[...] = read(name, self._hf_index(bounds)).reshape(row.shape)
        return out

    def _hf_index(self, bounds: list[tuple[int, int]]) -> Index:
        merged: list[tuple[int, int]] = []
        for axis, size, (start, stop) in zip(self.axes, self.shape, bounds, strict=True):
            if axis == "head_dim":
                if (start, stop) != (0, size):
                    raise ValueError(
                        "head_dim cannot be split: it is the inner part of a flat axis"
                    )
                merged[-1] = (merged[-1][0] * size, merged[-1][1] * size)
            elif axis != "layers":
                merged.append((start, stop))
        return tuple(slice(*bound) for bound in merged)


class Checkpoint:
    """The files of a model, in a local folder or on the hub (downloaded one by one, as needed).

    Raises InputError, naming path and file, for anything that is missing, truncated or not a
    floating-point safetensors checkpoint.
    """

    def __init__(self, model_path: str) -> None:
        self.model_path = model_path
        self._local = Path(model_path).expanduser()
        if self._local.is_file():
            raise InputError(f"--model_path {model_path}: is a file, expected a folder")
        if not self._local.is_dir() and not HUB_NAME.fullmatch(model_path):
            raise InputError(f"--model_path {model_path}: no such folder, and not a hub name")

    def file(self, name: str) -> Path:
        """Local path of one file. Raises InputError when the model does not have it."""
        path = self.find(name)
        if path is None:
            raise InputError(f"--model_path {self.model_path}: has no {name}")
        return path

    def find(self, name: str) -> Path | None:
        """Local path of one file, None when the model does not have it."""
        if self._local.is_dir():
            path = self._local / name
            return path if path.is_file() else None
        try:
            return Path(hf_hub_download(self.model_path, name))
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"--model_path {self.model_path}: no such local folder, and the hub says: {reason}"
            ) from error

    @cached_property
    def _file_of_tensor(self) -> dict[str, str] | None:
        """Tensor -> file name from the index; None when the checkpoint is a single file."""
        index = self.find(INDEX_FILE)
        if index is None:
            return None
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{index}: not a safetensors index: {error!r}") from error

    def tensor_path(self, tensor: str) -> Path:
        """The safetensors file that holds (or should hold) a tensor."""
        if self._file_of_tensor is None:
            return self.file(SINGLE_FILE)
        if tensor not in self._file_of_tensor:
            raise InputError(f"--model_path {self.model_path}: tensor {tensor} is missing")
        return self.file(self._file_of_tensor[tensor])

    def check(self, table: Iterable[WeightSpec], known: set[str]) -> None:
        """Compares the checkpoint's headers with what the model needs, before anything is read.

        table: the parameters to load; known: every tensor name that the architecture has.
        Raises InputError for missing, unknown, misshapen or non-float tensors.
        """
        names = set(self._file_of_tensor or ())
        for spec in table:
            for path in {self.tensor_path(name) for name in spec.hf_names}:
                shapes = self._shapes(path)
                names |= set(shapes)
                own = [name for name in spec.hf_names if self.tensor_path(name) == path]
                dataclasses.replace(spec, hf_names=tuple(own)).check(shapes, str(path))
        unknown = sorted(n for n in names - known if not IGNORED_TENSORS.fullmatch(n))
        if unknown:
            raise InputError(
                f"--model_path {self.model_path}: tensor {unknown[0]} is unknown to this model"
                + (f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else "")
            )

    @cached_property
    def _headers(self) -> dict[Path, dict[str, tuple[int, ...]]]:
        return {}

    def _shapes(self, path: Path) -> dict[str, tuple[int, ...]]:
        if path not in self._headers:
            try:
                with safe_open(path, "np") as tensors:
                    slices = {name: tensors.get_slice(name) for name in tensors.keys()}
                    types = {name: part.get_dtype() for name, part in slices.items()}
                    shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path}: not a complete safetensors file: {error}") from error
            for name, dtype in types.items():
                if dtype not in FLOAT_TYPES:
                    raise InputError(
                        f"{path}: tensor {name} is {dtype}; only {', '.join(FLOAT_TYPES)} are read "
                        "(quantised checkpoints are not)"
                    )
            self._headers[path] = shapes
        return self._headers[path]

    def read(self, tensor: str, index: Index) -> np.ndarray:
        """Part of a tensor. The file is mapped for this call only, so its pages do not pile up."""
        with safe_open(self.tensor_path(tensor), "np") as tensors:
            return tensors.get_slice(tensor)[index]


def load_params(
    table: Mapping[tuple[str, ...], WeightSpec],
    checkpoint: Checkpoint,
    dtype: Any,
    shardings: Mapping[tuple[str, ...], jax.sharding.Sharding],
    as_bits: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Reads every parameter into its shards, the largest first so that the peak stays low.

    as_bits: hand a 2-byte `dtype` over as uint16. `progress` is called with the bytes of each
    parameter loaded. Returns the nested parameter dict.
    """
    params = {}
    for path, spec in sorted(table.items(), key=lambda item: -math.prod(item[1].shape)):

        def part(index: Index | None, spec: WeightSpec = spec) -> np.ndarray:
            array = spec.assemble(checkpoint.read, dtype, index)
            return array.view(np.uint16) if as_bits else array

        params[path] = jax.make_array_from_callback(spec.shape, shardings[path], part)
        progress(params[path].nbytes)
    return unflatten_dict(params)
