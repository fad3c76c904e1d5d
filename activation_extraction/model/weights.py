"""Weights: how each parameter of a model is made of checkpoint tensors, and put into its shards.

`WeightSpec` says how one parameter is made; `load_params` puts every parameter straight into its
shards, reading only the parts of the files that they need. Which parameters exist is the model's
knowledge (qwen2_jax.py), and where the files are is checkpoint.py's.
"""

import dataclasses
import functools
import math
import re
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import lax

from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint, Index
from activation_extraction.model.mesh import Layout

# Written by some exporters, recomputed by every model from rope_theta.
IGNORED_TENSORS = re.compile(r".*\.rotary_emb\.inv_freq")
READERS = 3  # threads, and tensors in flight
AT_ONCE = 16 << 20  # bytes: to read so little takes less time than to compile `_put_layer`
ALIGNMENT = 64  # bytes, of XLA's buffers

Shape = tuple[int, ...]
ReadTensor = Callable[[str, Index], np.ndarray]


class Share(NamedTuple):
    """The part of a checkpoint tensor that is a parameter's, where several parameters share it.

    axis: the tensor's axis along which it is split; start: where the part begins on this axis;
    total: the tensor's size along it.
    """

    axis: int
    start: int
    total: int


class Fused(NamedTuple):
    """Checkpoint tensors that hold all experts of a layer: one name per layer."""

    names: tuple[str, ...]
    share: Share | None


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """One parameter: its shape, the logical axis of each dimension, and its checkpoint tensors.

    A parameter whose first axis is "layers" stacks one tensor per layer (zeros for layers that the
    checkpoint does not have: a block of zeros changes nothing); others have one tensor. With the
    axis "experts" there is a tensor for each expert of each layer, or, in checkpoints that have
    those, the `fused` ones; `of` says which, and then hf_names and share are theirs. The checkpoint
    keeps the last two axes of experts the other way round.
    The checkpoint keeps (heads, head_dim) as one flat dimension; all else has the same layout, and
    so has head_dim alone. share: None for a parameter that has its tensors to itself.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    hf_names: tuple[str, ...]
    share: Share | None = None
    fused: Fused | None = None

    def of(self, names: Container[str]) -> "WeightSpec":
        """For a checkpoint with tensors of these names."""
        if self.fused is None or self.fused.names[0] not in names:
            return self
        return dataclasses.replace(self, hf_names=self.fused.names, share=self.fused.share)

    @property
    def possible_names(self) -> set[str]:
        """Those of the tensors of any checkpoint."""
        return {*self.hf_names, *(self.fused.names if self.fused else ())}

    @property
    def stacked(self) -> bool:
        return self.axes[0] == "layers"

    @property
    def apart(self) -> bool:
        """Whether every expert has a tensor of its own."""
        fused = self.fused is not None and self.hf_names == self.fused.names
        return "experts" in self.axes and not fused

    @property
    def tensors_per_layer(self) -> int:
        """How many checkpoint tensors make up one row."""
        return self.shape[self.axes.index("experts")] if self.apart else 1

    def names_from(self, row: int) -> tuple[str, ...]:
        """The tensors of this row of a stacked parameter and of those after it."""
        return self.hf_names[row * self.tensors_per_layer :]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of each checkpoint tensor."""
        merged: list[int] = []
        for axis, size in zip(self.axes, self.shape, strict=True):
            if axis == "head_dim" and merged:
                merged[-1] *= size
            elif axis != "layers" and not (axis == "experts" and self.apart):
                merged.append(size)
        if "experts" in self.axes:
            merged[-2:] = merged[:-3:-1]
        if self.share is not None:
            merged[self.share.axis] = self.share.total
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

    def layer(self, read: ReadTensor, number: int, index: Index) -> Iterator[np.ndarray]:
        """Row `number` of a stacked parameter, or all of another one, with the file's dtype.

        As one array, or as one for each expert where those have tensors of their own. index: within
        that row. `read(name, hf_index)` returns part of a checkpoint tensor.
        """
        axes, shape = (self.axes[1:], self.shape[1:]) if self.stacked else (self.axes, self.shape)
        if not self.apart:
            yield self._tensor(read, number, axes, shape, index)
            return
        count = self.tensors_per_layer
        for expert in range(count)[index[0]]:
            yield self._tensor(read, number * count + expert, axes[1:], shape[1:], index[1:])

    def _tensor(
        self, read: ReadTensor, number: int, axes: Sequence[str], shape: Shape, index: Index
    ) -> np.ndarray:
        """What this part of checkpoint tensor `number` holds."""
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        wanted = [stop - start for start, stop in bounds]
        if number >= len(self.hf_names):
            return np.zeros(wanted, np.float32)
        merged: list[tuple[int, int]] = []
        for axis, size, (start, stop) in zip(axes, shape, bounds, strict=True):
            if axis != "head_dim" or not merged:
                merged.append((start, stop))
            elif (start, stop) == (0, size):
                merged[-1] = (merged[-1][0] * size, merged[-1][1] * size)
            else:
                raise ValueError("head_dim cannot be split: it is the inner part of a flat axis")
        if "experts" in self.axes:
            merged[-2:] = merged[:-3:-1]
        if self.share is not None:
            start, stop = merged[self.share.axis]
            merged[self.share.axis] = start + self.share.start, stop + self.share.start
        part = read(self.hf_names[number], tuple(slice(*bound) for bound in merged))
        return part.swapaxes(-1, -2) if "experts" in self.axes else part.reshape(wanted)

    def part(self, read: ReadTensor, dtype: Any, numbers: range, index: Index) -> np.ndarray:
        """Part of the parameter as a new array of `dtype`.

        Of a stacked one only the layers `numbers`, among which the first entry of `index` chooses.
        Each value is copied once, straight to where it belongs.
        """
        shape = (len(numbers), *self.shape[1:]) if self.stacked else self.shape
        sizes = [len(range(size)[chosen]) for size, chosen in zip(shape, index, strict=True)]
        part = _aligned(sizes, dtype)
        rows, chosen = (part, numbers[index[0]]) if self.stacked else ([part], [0])
        for row, number in zip(rows, chosen, strict=True):
            found = self.layer(read, number, index[1:] if self.stacked else index)
            if not self.apart:
                row[...] = next(found)
                continue
            for expert, values in zip(row, found, strict=True):
                expert[...] = values
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


def check_tensors(
    checkpoint: Checkpoint, table: Iterable[WeightSpec], known: set[str], ignored: str = ""
) -> None:
    """Compares the checkpoint's headers with what the model needs, before anything is read.

    table: the parameters to load; known: every tensor name that the architecture has; ignored: a
    regular expression for those that it has beside the language model.
    Raises InputError for missing, unknown, misshapen or non-float tensors.
    """
    names = set(checkpoint.file_of_tensor or ())
    for spec in (spec.of(checkpoint.tensors) for spec in table):
        for file in {checkpoint.file_with(name) for name in spec.hf_names}:
            shapes = {name: place.shape for name, place in file.header.items()}
            names |= set(shapes)
            own = [name for name in spec.hf_names if checkpoint.file_with(name) is file]
            dataclasses.replace(spec, hf_names=tuple(own)).check(shapes, file.where)
    beside = re.compile(ignored)
    unknown = sorted(
        name
        for name in names - known
        if not IGNORED_TENSORS.fullmatch(name) and not beside.fullmatch(name)
    )
    if unknown:
        raise InputError(
            f"--model_path {checkpoint.model_path}: tensor {unknown[0]} is unknown to this model"
            + (f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else "")
        )


def load_params(
    table: Mapping[tuple[str, ...], WeightSpec],
    checkpoint: Checkpoint,
    dtype: Any,
    layout: Layout,
    as_bits: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Reads every parameter straight into its shards, layer by layer (of all stages at once).

    Stacked ones come in the order of the files, which are thus read from beginning to end. A
    process reads only the parts that its devices hold, each once, with several threads, and holds
    no more besides them than its parts of READERS tensors (of every stage that it takes part in),
    or of READERS stacks if all weights have AT_ONCE bytes or less. as_bits: hand a 2-byte `dtype`
    over as uint16. `progress` is called with the bytes of each part. Returns the nested dict.
    """
    stages = layout.size("pipeline")
    table = {path: spec.of(checkpoint.tensors) for path, spec in table.items()}
    size = sum(math.prod(spec.shape) for spec in table.values()) * np.dtype(dtype).itemsize
    stacked = {path: spec for path, spec in table.items() if spec.stacked and size > AT_ONCE}
    whole = {path: spec for path, spec in table.items() if path not in stacked}
    rows = [(path, k) for path, spec in stacked.items() for k in range(spec.shape[0] // stages)]
    rows.sort(key=lambda row: _place(checkpoint, stacked[row[0]].names_from(row[1])))

    def load(spec: WeightSpec, axes: Sequence[str], numbers: range) -> jax.Array:
        shape = (len(numbers), *spec.shape[1:]) if spec.stacked else spec.shape
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

    def jobs() -> Iterator[tuple[WeightSpec, Sequence[str], range]]:
        yield from ((spec, spec.axes, range(spec.shape[0])) for spec in whole.values())
        for path, k in rows:
            spec = stacked[path]
            yield spec, ("stage", *spec.axes[1:]), range(k, spec.shape[0], spec.shape[0] // stages)

    with ThreadPoolExecutor(READERS, "read-weights") as pool:
        arrays = _ahead(pool, load, jobs())
        params = {}
        for path in whole:
            params[path] = next(arrays)
            progress(params[path].nbytes)
        if stacked:
            params |= _empty_stacks(stacked, layout, np.uint16 if as_bits else dtype)
        for path, k in rows:
            row = next(arrays)
            progress(row.nbytes)
            # Waiting, because rows would otherwise queue up in front of the devices.
            params[path] = jax.block_until_ready(_put_layer(params[path], row, np.int32(k)))
            del row  # it counts among those in flight
    return unflatten_dict(params)


def _place(checkpoint: Checkpoint, tensors: Sequence[str]) -> tuple[bool, str, int]:
    """Where the first of these tensors is, to sort by; none comes last."""
    return (False, *checkpoint.place(tensors[0])) if tensors else (True, "", 0)


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
