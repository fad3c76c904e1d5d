"""Checkpoints (a local folder or a Hugging Face hub name) and how arrays are read from them.

`Checkpoint` finds files and tensors; `WeightSpec` says how one parameter is made of checkpoint
tensors; `load_params` puts every parameter straight into its shards, reading only the parts of the
safetensors files that they need. Which parameters exist is the model's knowledge (qwen2_jax.py).
"""

import dataclasses
import functools
import json
import math
import mmap
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from jax import lax
from safetensors import SafetensorError, safe_open

from activation_extraction.cli.errors import InputError, one_line
from activation_extraction.cli.retries import hub_requests, name_unknown
from activation_extraction.model.mesh import Layout

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json")
FLOAT_TYPES: dict[str, np.dtype] = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": jnp.dtype("bfloat16"),
}
READERS = 3  # threads, and tensors in flight
ALIGNMENT = 64  # bytes, of XLA's buffers
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

    def tensor(self, read: ReadTensor, number: int, index: Index) -> np.ndarray:
        """Part of the parameter that checkpoint tensor `number` makes up, with the file's dtype.

        index: within that part, without the "layers" axis. `read(name, hf_index)` returns part of
        a checkpoint tensor.
        """
        axes, shape = (self.axes[1:], self.shape[1:]) if self.stacked else (self.axes, self.shape)
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        wanted = [stop - start for start, stop in bounds]
        if number >= len(self.hf_names):
            return np.zeros(wanted, np.float32)
        merged: list[tuple[int, int]] = []
        for axis, size, (start, stop) in zip(axes, shape, bounds, strict=True):
            if axis != "head_dim":
                merged.append((start, stop))
            elif (start, stop) == (0, size):
                merged[-1] = (merged[-1][0] * size, merged[-1][1] * size)
            else:
                raise ValueError("head_dim cannot be split: it is the inner part of a flat axis")
        part = read(self.hf_names[number], tuple(slice(*bound) for bound in merged))
        return part.reshape(wanted)

    def part(self, read: ReadTensor, dtype: Any, numbers: range, index: Index) -> np.ndarray:
        """Part of the parameter as a new array of `dtype`.

        Of a stacked one only the layers `numbers`, among which the first entry of `index` chooses.
        Each value is copied once, straight to where it belongs.
        """
        shape = (len(numbers), *self.shape[1:]) if self.stacked else self.shape
        sizes = [len(range(size)[chosen]) for size, chosen in zip(shape, index, strict=True)]
        part = _aligned(sizes, dtype)
        if not self.stacked:
            part[...] = self.tensor(read, 0, index)
            return part
        for row, number in zip(part, numbers[index[0]], strict=True):
            row[...] = self.tensor(read, number, index[1:])
        return part

    def assemble(self, read: ReadTensor, dtype: Any) -> np.ndarray:
        """The whole parameter as a NumPy array of `dtype`."""
        return self.part(read, dtype, range(self.shape[0]), (slice(None),) * len(self.shape))


def _aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An empty array as XLA wants it: on the CPU it takes such memory over instead of copying."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """Where a safetensors file keeps a tensor: shape, dtype, and the byte at which it begins."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int


class Checkpoint:
    """The files of a model, in a local folder or on the hub (downloaded one by one, as needed).

    Raises InputError, naming path and file, for anything that is missing, truncated or not a
    floating-point safetensors checkpoint.
    """

    def __init__(self, model_path: str, revision: str | None = None) -> None:
        """revision: a branch, tag or commit of a hub model; None: its main branch."""
        self.model_path = model_path
        self._local = Path(os.path.expanduser(model_path))
        # After the first file its commit: all others are of the same one.
        self._revision = revision
        self._found: dict[str, Path | None] = {}
        if os.path.isfile(self._local):
            raise InputError(f"--model_path {model_path}: is a file, expected a folder")
        if not os.path.isdir(self._local) and not HUB_NAME.fullmatch(model_path):
            raise InputError(f"--model_path {model_path}: no such folder, and not a hub name")
        if self.local and revision is not None:
            raise InputError(
                f"--model_revision {revision}: --model_path {model_path} is a local folder; "
                "only models of the hub have revisions"
            )

    @property
    def local(self) -> bool:
        """Whether it is a folder of this machine."""
        return os.path.isdir(self._local)

    @property
    def commit(self) -> str | None:
        """The hub's commit that the files belong to; None for a local folder."""
        self.file("config.json")
        return None if self.local else self._revision

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
            with hub_requests(f"--model_path {self.model_path}"):
                path = Path(hf_hub_download(self.model_path, name, revision=self._revision))
            self._revision = path.parent.name  # files lie in a folder named after their commit
            return path
        except LocalEntryNotFoundError as error:
            # A kind of EntryNotFoundError, but it means that the network is missing, not the file.
            known = try_to_load_from_cache(self.model_path, name, revision=self._revision)
            if known is _CACHED_NO_EXIST:
                return None
            reason = f"cannot be reached for {name} (no network, or HF_HUB_OFFLINE)"
            if name_unknown(error):
                reason = "has a name that does not resolve: offline? --model_path takes a folder"
            raise InputError(
                f"--model_path {self.model_path}: no such local folder, and the hub {reason}"
            ) from error
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            asked = f" --model_revision {self._revision}" if self._revision else ""
            raise InputError(
                f"--model_path {self.model_path}{asked}: no such local folder, and the hub says: "
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
                shapes = {name: place.shape for name, place in self._header(path).items()}
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
    def _headers(self) -> dict[Path, dict[str, TensorPlace]]:
        return {}

    def _header(self, path: Path) -> dict[str, TensorPlace]:
        if path not in self._headers:
            try:
                with safe_open(path, "np"):  # checks the header, and the file's size against it
                    self._headers[path] = _read_header(path)
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path}: not a complete safetensors file: {error}") from error
        return self._headers[path]

    def read(self, tensor: str, index: Index) -> np.ndarray:
        """Part of a tensor, as a view of the file: its bytes are read when it is copied.

        The file is mapped for as long as the view lives, so pages that were read do not pile up.
        """
        path = self.tensor_path(tensor)
        place = self._header(path)[tensor]
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        values = np.frombuffer(mapped, place.dtype, math.prod(place.shape), place.offset)
        return values.reshape(place.shape)[index]


def _read_header(path: Path) -> dict[str, TensorPlace]:
    """Of a safetensors file: 8 bytes with the length of a JSON, the JSON, the tensors' bytes.

    Raises InputError for dtypes that are not in FLOAT_TYPES.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        if entry["dtype"] not in FLOAT_TYPES:
            raise InputError(
                f"{path}: tensor {name} is {entry['dtype']}; only {', '.join(FLOAT_TYPES)} are "
                "read (quantised checkpoints are not)"
            )
        offset = 8 + length + entry["data_offsets"][0]
        places[name] = TensorPlace(tuple(entry["shape"]), FLOAT_TYPES[entry["dtype"]], offset)
    return places


def load_params(
    table: Mapping[tuple[str, ...], WeightSpec],
    checkpoint: Checkpoint,
    dtype: Any,
    layout: Layout,
    as_bits: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Reads every parameter straight into its shards, layer by layer (of all stages at once).

    A process reads only the parts that its devices hold, each once, with several threads. Besides
    what the devices have in the end it holds no more than its parts of READERS tensors (of every
    stage that it takes part in). as_bits: hand a 2-byte `dtype` over as uint16. `progress` is
    called with the bytes of each part loaded. Returns the nested parameter dict.
    """
    stages = layout.size("pipeline")
    whole = {path: spec for path, spec in table.items() if not spec.stacked}
    stacked = {path: spec for path, spec in table.items() if spec.stacked}
    length = min((spec.shape[0] for spec in stacked.values()), default=0) // stages

    def load(spec: WeightSpec, numbers: range) -> jax.Array:
        shape, axes = spec.shape, spec.axes
        if spec.stacked:
            shape, axes = (stages, *shape[1:]), ("stage", *axes[1:])
        parts: dict[str, np.ndarray] = {}

        def part(index: Index | None) -> np.ndarray:
            key = str(index)
            if key not in parts:
                index = index or (slice(None),) * len(shape)
                values = spec.part(checkpoint.read, dtype, numbers, index)
                parts[key] = values.view(np.uint16) if as_bits else values
            return parts[key]

        array = jax.make_array_from_callback(shape, layout.sharding(axes, shape), part)
        return jax.block_until_ready(array)  # from now on the host's copy is not needed

    def jobs() -> Iterator[tuple[WeightSpec, range]]:
        yield from ((spec, range(0)) for spec in whole.values())
        for k in range(length):
            layers = range(k, stages * length, length)  # layer k of every stage
            yield from ((spec, layers) for spec in stacked.values())

    with ThreadPoolExecutor(READERS, "read-weights") as pool:
        arrays = _ahead(pool, load, jobs())
        params = {}
        for path in whole:
            params[path] = next(arrays)
            progress(params[path].nbytes)
        stacks = _empty_stacks(stacked, layout, np.uint16 if as_bits else dtype)
        for k in range(length):
            for path in stacked:
                row = next(arrays)
                progress(row.nbytes)
                # Waiting, because rows would otherwise queue up in front of the devices.
                stacks[path] = jax.block_until_ready(_put_layer(stacks[path], row, np.int32(k)))
                del row  # it counts among those in flight
    return unflatten_dict(params | stacks)


def _ahead(
    pool: ThreadPoolExecutor, load: Callable[..., jax.Array], jobs: Iterable[tuple[Any, ...]]
) -> Iterator[jax.Array]:
    """`load(*job)` of every job, in order; READERS at a time, the one that is out included."""
    begun: deque[Future[jax.Array]] = deque()
    for job in jobs:
        begun.append(pool.submit(load, *job))
        if len(begun) == READERS:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


def _empty_stacks(
    table: Mapping[tuple[str, ...], WeightSpec], layout: Layout, dtype: Any
) -> dict[tuple[str, ...], jax.Array]:
    """Zeros for all stacked parameters, made by one program: compiling is what takes time here."""
    shardings = {path: layout.sharding(spec.axes, spec.shape) for path, spec in table.items()}

    def fill(zeros: jax.Array) -> dict[tuple[str, ...], jax.Array]:
        # A zero of its own for each: XLA would make equal outputs once and copy them.
        pairs = zip(zeros, table.items(), strict=True)
        return {path: jnp.broadcast_to(zero, spec.shape) for zero, (path, spec) in pairs}

    return jax.jit(fill, out_shardings=shardings)(np.zeros(len(table), dtype))


@functools.partial(jax.jit, donate_argnums=0)
def _put_layer(stack: jax.Array, row: jax.Array, k: jax.Array) -> jax.Array:
    """Writes layer k of every stage; row: (stages, ...)."""
    stages = stack.reshape(row.shape[0], -1, *row.shape[1:])
    return lax.dynamic_update_index_in_dim(stages, row, k, axis=1).reshape(stack.shape)
