"""Parameters are made from the tensors of a checkpoint, straight into their shards.

`WeightSpec` says how one parameter is made. `check_tensors` compares all of them with the
checkpoint before anything is read, and `load_params` reads them: only the parts of the files that
the devices of this host need. qwen2_jax.py says which parameters exist, and checkpoint.py reads
tensors.
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
TRANSPOSED_ROWS = 16  # rows transposed at a time, so that they stay in a core's caches
BUFFER_ALIGNMENT = 64  # bytes to which XLA's buffers are aligned

# Maps the name of a tensor, and a slice for every axis, to that part of the tensor.
ReadTensor = Callable[[str, Index], np.ndarray]


class TensorSlice(NamedTuple):
    """The slice of a tensor that is one parameter, where several parameters share a tensor.

    Attributes:
        axis: The axis of the tensor along which the parameters share it.
        start: The index on this axis at which the slice begins.
        total: The size of the tensor along this axis.
        per_head: Whether the axis has one head after the other, and every head has such a slice.
            Then `start` and `total` are those of one head, and the first axis of the parameter that
            is not stacked counts the heads.
    """

    axis: int
    start: int
    total: int
    per_head: bool = False


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """A parameter and the tensors of the checkpoint that it is made of.

    A checkpoint stores (heads, head_dim) as one flat dimension.

    Attributes:
        shape: The shape of the parameter.
        axes: The logical axis of every dimension.
        hf_names: The names of the tensors, in the order of the stack. Layers that the checkpoint
            does not have are zeros, because a layer of zeros changes nothing.
        stacked: The number of first axes ("layers", "experts") along which the parameter is a stack
            of tensors.
        tensor_slice: The slice of each tensor that belongs to the parameter; None for whole
            tensors.
        input_first: Whether the tensors of experts have the input axis before the output axis, as
            the parameter has. Otherwise their last two axes are in reverse order.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    hf_names: tuple[str, ...]
    stacked: int = 0
    tensor_slice: TensorSlice | None = None
    input_first: bool = False

    @property
    def reverses_axes(self) -> bool:
        """Returns whether the last two axes of the tensors are in reverse order."""
        return "experts" in self.axes and not self.input_first

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Returns the shape of each tensor."""
        bounds = self._bounds([*map(range, self.shape[self.stacked :])])
        sizes = [stop - start for start, stop in bounds]
        if (part := self.tensor_slice) is not None:
            sizes[part.axis] = part.total * (self.shape[self.stacked] if part.per_head else 1)
        return tuple(sizes)

    def _bounds(self, ranges: Sequence[range]) -> list[tuple[int, int]]:
        """Returns (start, stop) of every axis of a tensor, for a part of the parameter.

        Args:
            ranges: The range of every axis of the parameter that is not stacked. With a slice per
                head, the part is of one head. RULES never split a head_dim.
        """
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
        """Checks that a tensor exists and has the shape that the parameter needs.

        Args:
            name: The name of the tensor.
            shape: Its shape; None if it is missing.
            source: The file, for the message.

        Raises:
            InputError: The tensor is missing or has another shape.
        """
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
        """Returns a part of the parameter as a new array; every value is copied once.

        Args:
            read: Returns a part of a tensor.
            dtype: The dtype of the result.
            ranges: The range of every axis of the parameter.
            at_once: About how many values of a tensor are read at a time, since they may take more
                memory until they are rounded. The tensors of experts are read whole.
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
        """Reads a part of the parameter into an array. See `read_slice` for the arguments."""
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
    """Returns an empty array whose alignment lets XLA on the CPU use it without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + BUFFER_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % BUFFER_ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def oriented(
    table: Mapping[ParamPath, WeightSpec], shape_of: Callable[[str], tuple[int, ...]]
) -> WeightTable:
    """Returns the table with the orientation that fused experts have in the checkpoint.

    Their input axis is last in the files that transformers saves, as in any linear layer, and first
    in the released Qwen3-VL models. The shapes show which it is: gate_up_proj is square if D = 2 M,
    and down_proj if D = M, but never both.

    Args:
        table: Path of a parameter -> how it is made, for experts whose input axis is last.
        shape_of: Returns the shape of a tensor of the checkpoint.
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


def check_tensors(checkpoint: Checkpoint, table: Iterable[WeightSpec], allowed: set[str]) -> None:
    """Compares the headers of the checkpoint with the parameters, before anything is read.

    Args:
        checkpoint: The checkpoint.
        table: The parameters to load.
        allowed: All names that tensors of this model may have.

    Raises:
        InputError: A tensor is missing, unknown, of another shape or of a type that is not read, or
            scales of float8 are missing or do not fit.
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
    if unknown := sorted(without_scales(names, where) - allowed):
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

    Parameters are read in the order of the files, which are thus read from beginning to end. A
    process reads only the parts that its devices hold, each part once, with several threads. Beside
    these parts, its memory holds those of at most WEIGHT_READERS tensors (of every stage that it
    takes part in).

    Args:
        table: Path of a parameter -> how it is made.
        checkpoint: The checkpoint.
        dtype: The dtype of the parameters.
        layout: The mesh.
        as_bits: Whether parameters of a two-byte dtype are returned as uint16.
        progress: Called with the number of bytes of each part that was read.

    Returns:
        The parameters as a nested dict.
    """
    stages, loaded_dtype = layout.size("pipeline"), np.uint16 if as_bits else dtype
    stacks = {path: spec for path, spec in table.items() if spec.axes[0] == "layers"}

    def empty() -> dict[ParamPath, jax.Array]:
        return {path: jnp.zeros(spec.shape, loaded_dtype) for path, spec in stacks.items()}

    shardings = {path: layout.sharding(spec.axes, spec.shape) for path, spec in stacks.items()}
    params = jax.jit(empty, out_shardings=shardings)()
    # A job is the path of a parameter, and if it has layers, the number of a layer of each stage.
    jobs: list[tuple[ParamPath, int | None]] = []
    for path, spec in table.items():
        layers = range(spec.shape[0] // stages)
        jobs += [(path, k) for k in layers] if path in stacks else [(path, None)]

    def position(job: tuple[ParamPath, int | None]) -> tuple[bool, str, int]:
        """Returns the sort key of a job: where its first tensor begins. Zeros come last."""
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
        slices: dict[str, np.ndarray] = {}  # devices that hold the same slice share it

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
    """Yields `load(*job)` of every job, in order; at most WEIGHT_READERS results live at once."""
    pending: deque[Future[jax.Array]] = deque()
    for job in jobs:
        pending.append(pool.submit(load, *job))
        if len(pending) == WEIGHT_READERS:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@functools.partial(jax.jit, donate_argnums=0)
def _put_layer(stack: jax.Array, row: jax.Array, k: jax.Array) -> jax.Array:
    """Writes layer k of every stage into a stack (layers, ...).

    Args:
        stack: The layers of all stages.
        row: The new values, (stages, ...).
        k: The number of the layer in its stage.
    """
    stages = stack.reshape(row.shape[0], -1, *row.shape[1:])
    return lax.dynamic_update_index_in_dim(stages, row, k, axis=1).reshape(stack.shape)
