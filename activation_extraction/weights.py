"""Checkpoints (a local folder or a Hugging Face hub name) and how arrays are read from them.

`Checkpoint` finds files and tensors; `WeightSpec` says how one parameter is made of checkpoint
tensors; `load_params` puts every parameter straight into its shards, reading only the parts of the
safetensors files that they need. Which parameters exist is the model's knowledge (qwen2_jax.py).
"""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from jax import lax
from safetensors import SafetensorError, safe_open

from activation_extraction.errors import InputError, one_line
from activation_extraction.mesh import Layout

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json")
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# Written by some exporters, recomputed by every model from rope_theta.
IGNORED_TENSORS = re.compile(r".*\.rotary_emb\.inv_freq")

Index = tuple[slice, ...]
Shape = tuple[int, ...]
ReadTensor = Callable[[str, Index], np.ndarray]


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """One parameter: its shape, the logical axis of each dimension, and its checkpoint tensors.

    A parameter whose first axis is "layers" stacks one tensor per layer (zeros for layers that the
    checkpoint does not have: a block of zeros changes nothing); others have one tensor.
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

    def tensor(self, read: ReadTensor, dtype: Any, number: int, index: Index) -> np.ndarray:
        """Part of the parameter that checkpoint tensor `number` makes up, as `dtype`.

        index: within that part, without the "layers" axis. `read(name, hf_index)` returns part of
        a checkpoint tensor.
        """
        axes, shape = (self.axes[1:], self.shape[1:]) if self.stacked else (self.axes, self.shape)
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        wanted = [stop - start for start, stop in bounds]
        if number >= len(self.hf_names):
            return np.zeros(wanted, dtype)
        merged: list[tuple[int, int]] = []
        for axis, size, (start, stop) in zip(axes, shape, bounds, strict=True):
            if axis != "head_dim":
                merged.append((start, stop))
            elif (start, stop) == (0, size):
                merged[-1] = (merged[-1][0] * size, merged[-1][1] * size)
            else:
                raise ValueError("head_dim cannot be split: it is the inner part of a flat axis")
        part = read(self.hf_names[number], tuple(slice(*bound) for bound in merged))
        return part.reshape(wanted).astype(dtype, copy=False)

    def assemble(self, read: ReadTensor, dtype: Any) -> np.ndarray:
        """The whole parameter as a NumPy array of `dtype`."""
        if not self.stacked:
            return self.tensor(read, dtype, 0, (slice(None),) * len(self.shape))
        everything = (slice(None),) * (len(self.shape) - 1)
        layers = range(self.shape[0])
        return np.stack([self.tensor(read, dtype, k, everything) for k in layers])


class Checkpoint:
    """The files of a model, in a local folder or on the hub (downloaded one by one, as needed).

    Raises InputError, naming path and file, for anything that is missing, truncated or not a
    floating-point safetensors checkpoint.
    """

    def __init__(self, model_path: str) -> None:
        self.model_path = model_path
        self._local = Path(os.path.expanduser(model_path))
        self._revision: str | None = None  # of the hub: that of the first file, for all others
        self._found: dict[str, Path | None] = {}
        if os.path.isfile(self._local):
            raise InputError(f"--model_path {model_path}: is a file, expected a folder")
        if not os.path.isdir(self._local) and not HUB_NAME.fullmatch(model_path):
            raise InputError(f"--model_path {model_path}: no such folder, and not a hub name")

    def file(self, name: str) -> Path:
        """Local path of one file. Raises InputError when the model does not have it."""
        path = self.find(name)
        if path is None:
            raise InputError(f"--model_path {self.model_path}: has no {name}")
        return path

    def find(self, name: str) -> Path | None:
        """Local path of one file, None when the model does not have it."""
        if name not in self._found:
            local = self._local / name
            if os.path.isdir(self._local):
                self._found[name] = local if local.is_file() else None
            else:
                self._found[name] = self._download(name)
        return self._found[name]

    def _download(self, name: str) -> Path | None:
        try:
            path = Path(hf_hub_download(self.model_path, name, revision=self._revision))
            self._revision = path.parent.name  # files lie in a folder named after their commit
            return path
        except LocalEntryNotFoundError as error:
            # A kind of EntryNotFoundError, but it means that the network is missing, not the file.
            raise InputError(
                f"--model_path {self.model_path}: no such local folder, and the hub cannot be "
                f"reached for {name} (no network, or HF_HUB_OFFLINE)"
            ) from error
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise InputError(
                f"--model_path {self.model_path}: no such local folder, and the hub says: "
                f"{one_line(error)}"
            ) from error

    def weight_files(self) -> list[Path]:
        """The files that decide what the model computes: config.json and the checked weights."""
        return [self.file("config.json"), *self._headers]

    def tokenizer_files(self) -> list[Path]:
        """The files that decide how text is tokenised."""
        paths = [self.find(name) for name in TOKENIZER_FILES]
        return [path for path in paths if path is not None]

    @functools.cached_property
    def _file_of_tensor(self) -> dict[str, str] | None:
        """Tensor -> file name from the index; None when the checkpoint is a single file."""
        index = self.find(INDEX_FILE)
        if index is None:
            return None
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
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

    @functools.cached_property
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
    layout: Layout,
    as_bits: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Reads every parameter straight into its shards, layer by layer (of all stages at once).

    A process reads only the parts that its devices hold, each once. Besides what the devices have
    it holds no more than its parts of one tensor (of every stage that it takes part in). as_bits:
    hand a 2-byte `dtype` over as uint16. `progress` is called with the bytes of each part loaded.
    Returns the nested parameter dict.
    """

    def array(spec: WeightSpec, shape: Shape, axes: tuple[str, ...], numbers: range) -> jax.Array:
        """Checkpoint tensors stacked along axis 0, or the one tensor when there is no such axis."""
        parts: dict[str, np.ndarray] = {}

        def part(index: Index | None) -> np.ndarray:
            key = str(index)
            if key not in parts:
                index = index or (slice(None),) * len(shape)
                parts[key] = load(index).view(np.uint16) if as_bits else load(index)
            return parts[key]

        def load(index: Index) -> np.ndarray:
            if not spec.stacked:
                return spec.tensor(checkpoint.read, dtype, 0, index)
            wanted = numbers[index[0]]
            return np.stack([spec.tensor(checkpoint.read, dtype, k, index[1:]) for k in wanted])

        loaded = jax.make_array_from_callback(shape, layout.sharding(axes, shape), part)
        progress(loaded.nbytes)
        return loaded

    stages = layout.size("pipeline")
    params = {}
    for path, spec in table.items():
        if not spec.stacked:
            params[path] = array(spec, spec.shape, spec.axes, range(0))
            continue
        length = spec.shape[0] // stages
        stack = _empty_stack(layout.sharding(spec.axes, spec.shape), spec.shape, dtype, as_bits)
        for k in range(length):
            layers = range(k, stages * length, length)  # layer k of every stage
            row = array(spec, (stages, *spec.shape[1:]), ("stage", *spec.axes[1:]), layers)
            stack = _put_layer(stack, row, np.int32(k))
        params[path] = stack
    return unflatten_dict(params)


def _empty_stack(
    sharding: jax.sharding.Sharding, shape: Shape, dtype: Any, as_bits: bool
) -> jax.Array:
    kind = jnp.uint16 if as_bits else dtype
    return jax.jit(lambda: jnp.zeros(shape, kind), out_shardings=sharding)()


@functools.partial(jax.jit, donate_argnums=0)
def _put_layer(stack: jax.Array, row: jax.Array, k: jax.Array) -> jax.Array:
    """Writes layer k of every stage; row: (stages, ...)."""
    stages = stack.reshape(row.shape[0], -1, *row.shape[1:])
    return lax.dynamic_update_index_in_dim(stages, row, k, axis=1).reshape(stack.shape)
