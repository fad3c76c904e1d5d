"""Loads the parameters of a model from the tensors of a checkpoint, directly into their shards.

`WeightSpec` declares how one parameter is made. `check_tensors` compares all parameters with the
checkpoint before a tensor is read. `load_params` reads only the parts of the files that the devices
of this host need. qwen2_jax.py lists the parameters of a model, and checkpoint.py reads tensors.

A parameter may be a stack of the tensors of all layers. With `pipeline`, the layers are divided
into stages of consecutive layers, one stage for each index of this mesh axis.
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

WEIGHT_READERS = 3  # the number of threads that read, and of parts that are in memory at a time
TRANSPOSED_ROWS = 16  # the rows to transpose at a time, few enough for a core's caches
BUFFER_ALIGNMENT = 64  # the alignment of XLA's buffers in bytes

# A function that takes the name of a tensor and a slice for each axis, and returns that part of the
# tensor.
ReadTensor = Callable[[str, Index], np.ndarray]


class TensorSlice(NamedTuple):
    """The slice of a tensor that makes one parameter, if several parameters share the tensor.

    Attributes:
        axis: Axis of the tensor along which the parameters are concatenated.
        start: Index on this axis at which the slice begins.
        total: Size of the tensor along this axis.
        per_head: Whether the axis contains one head after the other, and each head has such a
            slice. If so, `start` and `total` refer to one head, and the first axis of the parameter
            that is not stacked is the axis of heads.
    """

    axis: int
    start: int
    total: int
    per_head: bool = False


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """A parameter and the tensors of the checkpoint from which it is made.

    A checkpoint stores (heads, head_dim) as one flat dimension.

    Attributes:
        shape: Shape of the parameter.
        axes: Logical axis of each dimension.
        hf_names: Names of the tensors, in the order of the stack. If there are fewer names than
            layers, the last layers are zeros, because a layer of zeros changes nothing.
        stacked: Number of leading axes ("layers", "experts") along which the parameter is a stack
            of tensors.
        tensor_slice: Slice of each tensor that belongs to the parameter; None for whole tensors.
        input_first: Whether the tensors of experts have the input axis before the output axis, as
            the parameter has. Otherwise their last two axes are reversed when they are read.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    hf_names: tuple[str, ...]
    stacked: int = 0
    tensor_slice: TensorSlice | None = None
    input_first: bool = False

    @property
    def reverses_axes(self) -> bool:
        """Whether the last two axes of the tensors are in reverse order."""
        return "experts" in self.axes and not self.input_first

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        bounds = self._bounds([*map(range, self.shape[self.stacked :])])
        sizes = [stop - start for start, stop in bounds]
        if self.tensor_slice is not None:
            heads = self.shape[self.stacked] if self.tensor_slice.per_head else 1
            sizes[self.tensor_slice.axis] = self.tensor_slice.total * heads
        return tuple(sizes)

    def _bounds(self, ranges: Sequence[range]) -> list[tuple[int, int]]:
        """Returns the start and stop on each axis of a tensor, for a part of the parameter.

        Args:
            ranges: The range of each axis of the parameter that is not stacked. The whole of
                head_dim, which RULES never split. With `per_head`, a single head.
        """
        bounds: list[tuple[int, int]] = []
        axes, sizes = self.axes[self.stacked :], self.shape[self.stacked :]
        for axis, size, chosen in zip(axes, sizes, ranges, strict=True):
            if axis != "head_dim" or not bounds:
                bounds.append((chosen.start, chosen.stop))
            else:  # (heads, head_dim) is one axis of the tensor
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
            shape: The shape of the tensor; None if it is missing.
            source: The name of the file, for the message.

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
        """Reads a part of the parameter into a new array. Each value is copied once.

        Args:
            read: A function that reads a part of a tensor.
            dtype: The dtype of the returned array.
            ranges: The range of each axis of the parameter.
            at_once: About how many values of a tensor to read at a time. They may take more memory
                until they are rounded to `dtype`. The tensors of experts are read whole.
        """
        parameter = _aligned([*map(len, ranges)], dtype)
        axis = self.stacked
        step = max(at_once // math.prod(parameter.shape[axis + 1 :]), 1)
        if "experts" in self.axes[:axis]:  # the axes of its tensors may be in reverse order
            step = len(ranges[axis])
        for start in range(0, len(ranges[axis]), step):
            rows = slice(start, start + step)
            chosen = *ranges[:axis], ranges[axis][rows], *ranges[axis + 1 :]
            self._fill(parameter[(slice(None),) * axis + (rows,)], read, chosen)
        return parameter

    def _fill(self, target: np.ndarray, read: ReadTensor, ranges: Sequence[range]) -> None:
        """Reads a part of the parameter into an array.

        Args:
            target: The array, of the shape of the part.
            read: A function that reads a part of a tensor.
            ranges: The range of each axis of the parameter.
        """
        stack_ranges = ranges[: self.stacked]
        tensor_ranges = [*ranges[self.stacked :]]
        first_range = tensor_ranges[0]  # of the heads, with `per_head`
        per_head = self.tensor_slice is not None and self.tensor_slice.per_head
        # An entry of `target` is filled from one tensor, or with `per_head` from one head of it.
        for entry in np.ndindex(target.shape[: self.stacked + per_head]):
            number = 0  # the number of the tensor in the whole stack
            for size, chosen, position in zip(self.shape, stack_ranges, entry, strict=False):
                number = number * size + chosen[position]
            if number >= len(self.hf_names):
                target[entry] = 0
                continue
            if per_head:
                tensor_ranges[0] = first_range[entry[-1] : entry[-1] + 1]
            index = tuple(slice(*bound) for bound in self._bounds(tensor_ranges))
            part = read(self.hf_names[number], index)
            if self.reverses_axes:
                for start in range(0, part.shape[-2], TRANSPOSED_ROWS):
                    rows = slice(start, start + TRANSPOSED_ROWS)
                    target[entry][..., rows] = part[..., rows, :].swapaxes(-1, -2)
            else:
                target[entry] = part.reshape(target[entry].shape)


WeightTable = dict[ParamPath, WeightSpec]  # all parameters of a model


def _aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an empty array whose alignment lets XLA on the CPU use it without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + BUFFER_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % BUFFER_ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def oriented(
    table: Mapping[ParamPath, WeightSpec], shape_of: Callable[[str], tuple[int, ...]]
) -> WeightTable:
    """Adapts the table to the order of axes that fused experts have in the checkpoint.

    The experts of a layer are fused if one tensor contains all of them. Their input axis is last in
    the files that transformers saves, as in any linear layer, and first in the released Qwen3-VL
    models. The shapes show the order: gate_up_proj is square if D = 2 M, and down_proj if D = M,
    but never both (D is the hidden size, M the width of an expert).

    Args:
        table: Path of a parameter -> how it is made, for fused experts whose input axis is last.
        shape_of: A function that returns the shape of a tensor of the checkpoint.

    Returns:
        The table for this checkpoint.
    """
    fused = {path: spec for path, spec in table.items() if "experts" in spec.axes[spec.stacked :]}
    input_first = dict(fused)
    for path, spec in fused.items():
        split = spec.tensor_slice and spec.tensor_slice._replace(axis=2)
        input_first[path] = dataclasses.replace(spec, input_first=True, tensor_slice=split)

    def fits(specs: Mapping[ParamPath, WeightSpec]) -> bool:
        """Returns whether the first tensors have the shapes that the specs declare."""
        for spec in specs.values():
            for name in spec.hf_names[:1]:
                if tuple(shape_of(name)) != spec.hf_shape:
                    return False
        return True

    return {**table, **input_first} if fits(input_first) and not fits(fused) else {**table}


def check_tensors(checkpoint: Checkpoint, table: Iterable[WeightSpec], allowed: set[str]) -> None:
    """Compares the headers of the checkpoint with the parameters, before anything is read.

    Args:
        checkpoint: The checkpoint.
        table: The parameters to load.
        allowed: All names that tensors of this model may have.

    Raises:
        InputError: A tensor is missing, is unknown, has another shape or a dtype that is not
            supported, or scales of float8 are missing or inconsistent with their tensor.
    """
    for spec in table:
        for name in spec.hf_names:
            file, tensor = checkpoint.place(name)
            spec.check(name, tensor.shape, file.where)
            checkpoint.scales(name)
    names = set(checkpoint.tensors)
    for file in checkpoint.weight_files:  # they may contain tensors that the index does not list
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
    """Reads all parameters directly into their shards.

    Parameters are read layer by layer: at a time, one layer of each stage. They are read in the
    order of the files, so that a file is read from beginning to end. A process reads only the parts
    that its devices need, each part once, with several threads. In addition to the loaded
    parameters, its memory contains the parts of at most WEIGHT_READERS layers or other parameters.

    Args:
        table: Path of a parameter -> how it is made.
        checkpoint: The checkpoint.
        dtype: The dtype of the parameters.
        layout: The mesh.
        as_bits: Whether to return parameters of a two-byte dtype as uint16.
        progress: A function that is called with the number of bytes of each array that was loaded.

    Returns:
        The parameters as a nested dict.
    """
    stages = layout.size("pipeline")
    loaded_dtype = np.uint16 if as_bits else dtype
    stacks = {path: spec for path, spec in table.items() if spec.axes[0] == "layers"}

    def empty() -> dict[ParamPath, jax.Array]:
        return {path: jnp.zeros(spec.shape, loaded_dtype) for path, spec in stacks.items()}

    shardings = {path: layout.sharding(spec.axes, spec.shape) for path, spec in stacks.items()}
    params = jax.jit(empty, out_shardings=shardings)()
    # A job is the path of a parameter and the number of a layer in its stage, or None if the
    # parameter has no layers. It loads this layer of all stages.
    jobs: list[tuple[ParamPath, int | None]] = []
    for path, spec in table.items():
        if path in stacks:
            jobs += [(path, layer) for layer in range(spec.shape[0] // stages)]
        else:
            jobs.append((path, None))

    def position(job: tuple[ParamPath, int | None]) -> tuple[bool, str, int]:
        """Returns the sort key of a job.

        Returns:
            A tuple of:
                Whether the job reads no tensor, because its layer is zeros. Such jobs come last.
                The name of the file with the first tensor.
                The offset of this tensor in the file.
        """
        path, layer = job
        spec = table[path]
        tensors_per_layer = math.prod(spec.shape[1 : spec.stacked])
        names = spec.hf_names[(layer or 0) * tensors_per_layer :]
        if not names:
            return True, "", 0
        file, tensor = checkpoint.place(names[0])
        return False, file.name, tensor.offset

    def load(path: ParamPath, layer: int | None) -> jax.Array:
        """Loads a parameter, or a layer of each stage of it, as an array on the devices."""
        spec = table[path]
        axes = spec.axes
        at_once = checkpoint.place(spec.hf_names[0])[0].at_once
        ranges = [*map(range, spec.shape)]
        if layer is not None:
            axes = ("stage", *axes[1:])
            ranges[0] = range(layer, spec.shape[0], spec.shape[0] // stages)
        read = functools.partial(checkpoint.read, dtype=dtype)
        slices: dict[str, np.ndarray] = {}  # shared by devices that need the same slice

        def slice_at(index: Index | None) -> np.ndarray:
            key = str(index)
            if key not in slices:
                chosen = ranges
                if index:
                    pairs = zip(ranges, index, strict=True)
                    chosen = [indices[bounds] for indices, bounds in pairs]
                part = spec.read_slice(read, dtype, chosen, at_once)
                slices[key] = part.view(loaded_dtype)
            return slices[key]

        shape = tuple(map(len, ranges))
        array = jax.make_array_from_callback(shape, layout.sharding(axes, shape), slice_at)
        return jax.block_until_ready(array)  # so that the host's copy can be freed

    jobs.sort(key=position)
    with ThreadPoolExecutor(WEIGHT_READERS, "read-weights") as pool:
        arrays = _ahead(pool, load, jobs)
        for path, layer in jobs:
            array = next(arrays)
            progress(array.nbytes)
            if layer is not None:
                array = _put_layer(params[path], array, np.int32(layer))
            # Without this wait, arrays would queue up in the devices' memory.
            params[path] = jax.block_until_ready(array)
            del array  # otherwise it would stay in memory while the next one is loaded
    return unflatten_dict(params)


def _ahead(
    pool: ThreadPoolExecutor, load: Callable[..., jax.Array], jobs: Iterable[tuple[Any, ...]]
) -> Iterator[jax.Array]:
    """Yields `load(*job)` of each job in order, computing up to WEIGHT_READERS of them ahead."""
    pending: deque[Future[jax.Array]] = deque()
    for job in jobs:
        pending.append(pool.submit(load, *job))
        if len(pending) == WEIGHT_READERS:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@functools.partial(jax.jit, donate_argnums=0)
def _put_layer(stack: jax.Array, layers: jax.Array, number: jax.Array) -> jax.Array:
    """Writes one layer of each stage into a stack.

    Args:
        stack: The layers of all stages, (layers, ...).
        layers: The layer of each stage, (stages, ...).
        number: The number of the layer in its stage.
    """
    stages = stack.reshape(layers.shape[0], -1, *layers.shape[1:])
    return lax.dynamic_update_index_in_dim(stages, layers, number, axis=1).reshape(stack.shape)
