"""This module makes parameters from checkpoint tensors and puts them into their shards.

`WeightSpec` says how one parameter is made; `load_params` puts every parameter straight into its
shards, reading only the parts of the files that they need. The model (qwen2_jax.py) says which
parameters exist, and checkpoint.py where the files are.
"""

import dataclasses
import functools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import lax

from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.float8 import without_scales
from activation_extraction.model.mesh import Layout
from activation_extraction.model.parameters import ParamPath
from activation_extraction.model.tensor_names import text_names
from activation_extraction.model.weight_files import Index

WEIGHT_READERS = 3  # threads that read, and tensors in flight
TRANSPOSED_ROWS = 16  # at a time, so that what is read and written stays in a core's caches
BUFFER_ALIGNMENT = 64  # XLA's buffers are aligned to so many bytes

ReadTensor = Callable[[str, Index], np.ndarray]


class TensorSlice(NamedTuple):
    """The slice of a checkpoint tensor that is one parameter, where several share a tensor.

    axis: the tensor's axis along which it is split; start: where the slice begins on this axis;
    total: the tensor's size along it. per_head: whether the axis has one head after the other, each
    with such a slice: then start and total are those of one head, and the first axis of the
    parameter that is not stacked counts the heads.
    """

    axis: int
    start: int
    total: int
    per_head: bool = False


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """A parameter: its shape, a logical axis for each dimension, and its checkpoint tensors.

    stacked: along how many of the first axes ("layers", "experts") the parameter is a stack of
    tensors, whose names come in this order. Layers that the checkpoint does not have are zeros: a
    block of zeros changes nothing. tensor_slice: None for a parameter that has its tensors to
    itself. The checkpoint keeps (heads, head_dim) as one flat dimension, and the last two axes of
    experts in reverse order unless `input_first`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    hf_names: tuple[str, ...]
    stacked: int = 0
    tensor_slice: TensorSlice | None = None
    input_first: bool = False

    @property
    def reverses_axes(self) -> bool:
        """Returns whether the last two axes of the tensors are the parameter's in reverse order."""
        return "experts" in self.axes and not self.input_first

    @property
    def hf_shape(self) -> tuple[int, ...]:
        bounds = self._bounds([*map(range, self.shape[self.stacked :])])
        sizes = [stop - start for start, stop in bounds]
        if (part := self.tensor_slice) is not None:
            sizes[part.axis] = part.total * (self.shape[self.stacked] if part.per_head else 1)
        return tuple(sizes)

    def _bounds(self, ranges: Sequence[range]) -> list[tuple[int, int]]:
        """Returns (start, stop) of every axis of a tensor, for ranges of the axes that are not
        stacked; RULES never split a head_dim. For a slice per head they are of one head."""
        bounds: list[tuple[int, int]] = []
        axes, sizes = self.axes[self.stacked :], self.shape[self.stacked :]
        for axis, size, chosen in zip(axes, sizes, ranges, strict=True):
            if axis != "head_dim" or not bounds:
                bounds.append((chosen.start, chosen.stop))
            else:
                bounds[-1] = bounds[-1][0] * size, bounds[-1][1] * size
        if self.reverses_axes:
            bounds[-2:] = bounds[:-3:-1]
        if self.tensor_slice is not None:
            split, offset, total, per_head = self.tensor_slice
            start, stop = bounds[split]
            if per_head:
                offset += ranges[0].start * (total - (stop - start))
            bounds[split] = start + offset, stop + offset
        return bounds

    def check(self, name: str, shape: tuple[int, ...] | None, source: str) -> None:
        """Raises InputError for a tensor that is missing (shape None) or has another shape."""
        if shape is None:
            raise InputError(f"{source}: tensor {name} is missing")
        if tuple(shape) != self.hf_shape:
            raise InputError(
                f"{source}: tensor {name} has shape {tuple(shape)}, "
                f"config.json asks for {self.hf_shape}"
            )

    def read_slice(
        self, read: ReadTensor, dtype: Any, ranges: Sequence[range], at_once: int = sys.maxsize
    ) -> np.ndarray:
        """Returns part of the parameter, given by a range of every axis, as a new array of `dtype`.

        `read(name, index)` returns part of a checkpoint tensor. Each value is copied once, straight
        to where it belongs. at_once: about how many values of a tensor are read at a time, since
        they may take more memory until they are rounded; an expert's are not split.
        """
        values = _aligned([*map(len, ranges)], dtype)
        axis = self.stacked
        step = max(at_once // math.prod(values.shape[axis + 1 :]), 1)
        if "experts" in self.axes[:axis]:  # their axes may be in reverse order in the file
            step = len(ranges[axis])
        for start in range(0, len(ranges[axis]), step):
            part = slice(start, start + step)
            chosen = *ranges[:axis], ranges[axis][part], *ranges[axis + 1 :]
            self._fill(values[(slice(None),) * axis + (part,)], read, chosen)
        return values

    def _fill(self, values: np.ndarray, read: ReadTensor, ranges: Sequence[range]) -> None:
        """Reads part of the parameter, given by a range of every axis, into an array."""
        outer, inner = ranges[: self.stacked], [*ranges[self.stacked :]]
        heads = inner[0]
        per_head = self.tensor_slice is not None and self.tensor_slice.per_head
        for at in np.ndindex(values.shape[: self.stacked + per_head]):
            number = 0
            for size, chosen, k in zip(self.shape, outer, at, strict=False):
                number = number * size + chosen[k]
            if number >= len(self.hf_names):
                values[at] = 0
                continue
            if per_head:
                inner[0] = heads[at[-1] : at[-1] + 1]
            index = tuple(slice(*bound) for bound in self._bounds(inner))
            part = read(self.hf_names[number], index)
            if self.reverses_axes:
                for start in range(0, part.shape[-2], TRANSPOSED_ROWS):
                    rows = slice(start, start + TRANSPOSED_ROWS)
                    values[at][..., rows] = part[..., rows, :].swapaxes(-1, -2)
            else:
                values[at] = part.reshape(values[at].shape)


WeightTable = dict[ParamPath, WeightSpec]  # of all parameters of a model


def _aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an empty array, aligned so that XLA on the CPU takes it over without copying it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + BUFFER_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % BUFFER_ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def oriented(
    table: Mapping[ParamPath, WeightSpec], shape_of: Callable[[str], tuple[int, ...]]
) -> WeightTable:
    """Returns the table for fused experts as the checkpoint has them.

    Their input axis is last in what transformers saves, as in any linear layer, and first in the
    released Qwen3-VL models. Shapes tell, which `shape_of(name)` returns: gate_up_proj is square if
    D = 2 M, and down_proj if D = M, but never both.
    """
    fused = {path: spec for path, spec in table.items() if "experts" in spec.axes[spec.stacked :]}
    turned = dict(fused)
    for path, spec in fused.items():
        split = spec.tensor_slice and spec.tensor_slice._replace(axis=2)
        turned[path] = dataclasses.replace(spec, input_first=True, tensor_slice=split)

    def fits(specs: Mapping[ParamPath, WeightSpec]) -> bool:
        firsts = [(spec, name) for spec in specs.values() for name in spec.hf_names[:1]]
        return all(tuple(shape_of(name)) == spec.hf_shape for spec, name in firsts)

    return {**table, **turned} if fits(turned) and not fits(fused) else {**table}


def check_tensors(checkpoint: Checkpoint, table: Iterable[WeightSpec], known: set[str]) -> None:
    """Compares the checkpoint's headers with what the model needs, before anything is read.

    table: the parameters to load; known: every tensor name that the architecture has. Raises
    InputError for missing, unknown, misshapen or non-float tensors, and for scales of float8 that
    are missing or do not fit.
    """
    for spec in table:
        for name in spec.hf_names:
            file, tensor = checkpoint.place(name)
            spec.check(name, tensor.shape, file.where)
            checkpoint.scales(name)
    names = set(checkpoint.tensors)
    for file in checkpoint.weight_files:  # they may hold more than the index says
        names.update(text_names(file.tensors, file.where))
    where = checkpoint.where
    if unknown := sorted(without_scales(names, where) - known):
        raise InputError(
            f"{where}: tensor {unknown[0]} is unknown to this model"
            + (f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else "")
        )


def load_params(
    table: Mapping[ParamPath, WeightSpec],
    checkpoint: Checkpoint,
    dtype: Any,
    layout: Layout,
    as_bits: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Reads every parameter straight into its shards, layer by layer (of all stages at once).

    They come in the order of the files, which are thus read from beginning to end. A process reads
    only the parts that its devices hold, each once, with several threads. Besides these parts it
    holds those of WEIGHT_READERS tensors (of every stage that it takes part in) and no more.
    as_bits: whether a 2-byte `dtype` is returned as uint16. `progress` is called with the bytes of
    each part. Returns the nested dict.
    """
    stages, loaded_dtype = layout.size("pipeline"), np.uint16 if as_bits else dtype
    stacks = {path: spec for path, spec in table.items() if spec.axes[0] == "layers"}

    def empty() -> dict[ParamPath, jax.Array]:
        return {path: jnp.zeros(spec.shape, loaded_dtype) for path, spec in stacks.items()}

    shardings = {path: layout.sharding(spec.axes, spec.shape) for path, spec in stacks.items()}
    params = jax.jit(empty, out_shardings=shardings)()
    # A job is a parameter, and the number of a layer of each stage if it has layers.
    jobs: list[tuple[ParamPath, int | None]] = []
    for path, spec in table.items():
        layers = range(spec.shape[0] // stages)
        jobs += [(path, k) for k in layers] if path in stacks else [(path, None)]

    def position(job: tuple[ParamPath, int | None]) -> tuple[bool, str, int]:
        """Returns where the first tensor of a job begins, to sort by; layers of zeros come last."""
        spec, k = table[job[0]], job[1] or 0
        names = spec.hf_names[k * math.prod(spec.shape[1 : spec.stacked]) :]
        if not names:
            return True, "", 0
        file, tensor = checkpoint.place(names[0])
        return False, file.name, tensor.offset

    def load(path: ParamPath, k: int | None) -> jax.Array:
        spec, axes = table[path], table[path].axes
        at_once = checkpoint.place(spec.hf_names[0])[0].at_once
        ranges = [*map(range, spec.shape)]
        if k is not None:
            axes = ("stage", *axes[1:])
            ranges[0] = range(k, spec.shape[0], spec.shape[0] // stages)
        read = functools.partial(checkpoint.read, dtype=dtype)
        slices: dict[str, np.ndarray] = {}  # one for all devices that hold the same

        def slice_at(index: Index | None) -> np.ndarray:
            key = str(index)
            if key not in slices:
                chosen = [r[i] for r, i in zip(ranges, index, strict=True)] if index else ranges
                part = spec.read_slice(read, dtype, chosen, at_once)
                slices[key] = part.view(loaded_dtype)
            return slices[key]

        shape = tuple(map(len, ranges))
        array = jax.make_array_from_callback(shape, layout.sharding(axes, shape), slice_at)
        return jax.block_until_ready(array)  # from now on the host's copy is not needed

    jobs.sort(key=position)
    with ThreadPoolExecutor(WEIGHT_READERS, "read-weights") as pool:
        arrays = _ahead(pool, load, jobs)
        for path, k in jobs:
            array = next(arrays)
            progress(array.nbytes)
            if k is not None:
                array = _put_layer(params[path], array, np.int32(k))
            # Without this wait, layers would queue up in front of the devices.
            params[path] = jax.block_until_ready(array)
            del array  # it would count among those in flight
    return unflatten_dict(params)


def _ahead(
    pool: ThreadPoolExecutor, load: Callable[..., jax.Array], jobs: Iterable[tuple[Any, ...]]
) -> Iterator[jax.Array]:
    """Yields `load(*job)` of every job, in order; at most WEIGHT_READERS are alive at a time."""
    pending: deque[Future[jax.Array]] = deque()
    for job in jobs:
        pending.append(pool.submit(load, *job))
        if len(pending) == WEIGHT_READERS:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@functools.partial(jax.jit, donate_argnums=0)
def _put_layer(stack: jax.Array, row: jax.Array, k: jax.Array) -> jax.Array:
    """Writes layer k of every stage; row: (stages, ...)."""
    stages = stack.reshape(row.shape[0], -1, *row.shape[1:])
    return lax.dynamic_update_index_in_dim(stages, row, k, axis=1).reshape(stack.shape)
