"""Loads the parameters of a model from the tensors of a checkpoint onto the devices.

`WeightSpec` declares how to make one parameter from tensors. `check_tensors` compares all
parameters with the checkpoint before any values are read. `load_params` reads only the parts of the
files that the devices of this host need, and puts each part directly on its devices. qwen2_jax.py
lists the parameters of a model, and checkpoint.py reads tensors.

A parameter may be a stack of the tensors of all layers. On a mesh with a `pipeline` axis, the
layers are divided into stages of consecutive layers, one stage for each index of this axis.
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
from activation_extraction.model.tensor_names import tensors_of_language_model
from activation_extraction.model.weight_files import Index

WEIGHT_READERS = 3  # the number of threads that read weights; each reads one array at a time
TRANSPOSED_ROWS = 16  # the number of rows to transpose at a time, which fit into a core's caches
BUFFER_ALIGNMENT = 64  # the alignment of XLA's buffers in bytes

# A function that takes the name of a tensor and a slice for each axis, and returns this part of the
# tensor.
ReadTensor = Callable[[str, Index], np.ndarray]


class TensorSlice(NamedTuple):
    """The slice of a tensor that becomes one parameter, if several parameters share the tensor.

    Attributes:
        axis: Axis of the tensor along which the parameters are concatenated.
        start: Index on the axis `axis` at which the slice begins.
        full_axis_size: Size of the tensor along this axis.
        is_per_head: Whether the axis contains one head after the other, and the parameter consists
            of one slice per head. If so, `start` and `full_axis_size` refer to a single head, and
            the parameter has an axis of heads directly after the leading axes along which layers
            (and experts) are stacked.
    """

    axis: int
    start: int
    full_axis_size: int
    is_per_head: bool = False


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """A parameter, and the tensors of the checkpoint from which it is made.

    The parameter has separate axes for heads and head_dim, where the tensors have a single axis.

    Attributes:
        shape: Shape of the parameter.
        logical_axes: Logical axis of each dimension of the parameter.
        hf_names: Names of the tensors, in the order of the stack. If there are fewer names than
            layers, the parameter of the last layers is zeros. A layer of zeros only fills up a
            stage of the pipeline; it leaves the residual stream unchanged.
        num_stacked_axes: Number of leading axes ("layers", "experts") along which the parameter is
            a stack of tensors.
        tensor_slice: Slice of each tensor that belongs to the parameter; None for whole tensors.
        has_input_axis_first: Whether the tensors of experts have the input axis before the output
            axis, like the parameter. If not, their last two axes are swapped when they are read.
    """

    shape: tuple[int, ...]
    logical_axes: tuple[str, ...]
    hf_names: tuple[str, ...]
    num_stacked_axes: int = 0
    tensor_slice: TensorSlice | None = None
    has_input_axis_first: bool = False

    @property
    def reverses_axes(self) -> bool:
        """Returns whether the tensors of the checkpoint have the last two axes in reverse order.

        The parameter of the Flax model has the axes in the order of `shape`.
        """
        return "experts" in self.logical_axes and not self.has_input_axis_first

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape that each of the tensors `hf_names` must have in the checkpoint."""
        bounds_of_axes = self._bounds([*map(range, self.shape[self.num_stacked_axes :])])
        tensor_shape = [axis_stop - axis_start for axis_start, axis_stop in bounds_of_axes]
        if self.tensor_slice is not None:
            head_count = self.shape[self.num_stacked_axes] if self.tensor_slice.is_per_head else 1
            tensor_shape[self.tensor_slice.axis] = self.tensor_slice.full_axis_size * head_count
        return tuple(tensor_shape)

    def _bounds(self, ranges: Sequence[range]) -> list[tuple[int, int]]:
        """Returns the slice of a checkpoint tensor that contains a part of this parameter.

        The stacked axes of the parameter are its first `num_stacked_axes` axes. The part has a
        single index on each of them, so that a single tensor contains its values. On the axis of a
        head's dimensions, the part has the whole axis, because the mesh never splits this axis.

        If `tensor_slice.is_per_head` is set, the slices of two heads are not adjacent in the
        tensor. So the returned slice on the tensor's axis of heads is only right if the part
        contains a single head. For several heads, the caller must ignore it.

        Args:
            ranges: The range of the part on each axis of the parameter after its stacked axes.

        Returns:
            The start and stop of the slice on each axis of the tensor.
        """
        bounds_of_axes: list[tuple[int, int]] = []
        axis_names = self.logical_axes[self.num_stacked_axes :]
        axis_lengths = self.shape[self.num_stacked_axes :]
        for axis_name, axis_length, axis_range in zip(
            axis_names, axis_lengths, ranges, strict=True
        ):
            if axis_name != "head_dim" or not bounds_of_axes:
                bounds_of_axes.append((axis_range.start, axis_range.stop))
            else:  # head_dim and the axis of heads before it are a single axis of the tensor
                start_head, stop_head = bounds_of_axes[-1]
                bounds_of_axes[-1] = start_head * axis_length, stop_head * axis_length
        if self.reverses_axes:
            bounds_of_axes[-2], bounds_of_axes[-1] = bounds_of_axes[-1], bounds_of_axes[-2]
        if self.tensor_slice is not None:
            sliced_axis, slice_offset, full_axis_size, is_sliced_per_head = self.tensor_slice
            slice_start, slice_stop = bounds_of_axes[sliced_axis]
            # On the sliced axis, each head has `full_axis_size` values in the tensor, but only some
            # of them are in the slice. So the offset also skips the values of earlier heads that
            # are not in the slice.
            if is_sliced_per_head:
                slice_offset += ranges[0].start * (full_axis_size - (slice_stop - slice_start))
            bounds_of_axes[sliced_axis] = slice_start + slice_offset, slice_stop + slice_offset
        return bounds_of_axes

    def check(self, name: str, shape: tuple[int, ...] | None, source: str) -> None:
        """Checks that a tensor of the checkpoint exists, and that its shape fits this parameter.

        Args:
            name: The name of the tensor, one of `hf_names`.
            shape: The shape of the tensor in the checkpoint; None if it is missing there.
            source: The path or URL of the file, for the message.

        Raises:
            InputError: If the tensor is missing or has another shape.
        """
        if shape is None:
            raise InputError(f"{source}: tensor {name} is missing")
        if tuple(shape) != self.hf_shape:
            raise InputError(
                f"{source}: tensor {name} has shape {tuple(shape)}, "
                f"config.json asks for {self.hf_shape}"
            )

    def read_slice(
        self,
        read: ReadTensor,
        dtype: Any,
        ranges: Sequence[range],
        num_values_per_read: int = sys.maxsize,
    ) -> np.ndarray:
        """Reads a part of the parameter into a new array. Each value is copied once.

        Args:
            read: A function that takes the name of a tensor and a slice for each of its axes, and
                returns this part of the tensor.
            dtype: The dtype of the returned array.
            ranges: The range of the part on each axis of the parameter.
            num_values_per_read: The approximate number of values of a tensor to read at a time,
                which limits the memory for values that are not yet rounded to `dtype`. Tensors of
                single experts are read whole.

        Returns:
            The array, with the shape of the part.
        """
        parameter_part = _aligned([*map(len, ranges)], dtype)
        first_unstacked_axis = self.num_stacked_axes
        num_rows_per_read = max(
            num_values_per_read // math.prod(parameter_part.shape[first_unstacked_axis + 1 :]), 1
        )
        # Tensors of single experts may have their axes in reverse order. Rows of the parameter are
        # then columns of the tensor, which are spread over its bytes, so the tensor is read whole.
        if "experts" in self.logical_axes[:first_unstacked_axis]:
            num_rows_per_read = len(ranges[first_unstacked_axis])
        for first_row_index in range(0, len(ranges[first_unstacked_axis]), num_rows_per_read):
            row_slice = slice(first_row_index, first_row_index + num_rows_per_read)
            ranges_with_row_slice = (
                *ranges[:first_unstacked_axis],
                ranges[first_unstacked_axis][row_slice],
                *ranges[first_unstacked_axis + 1 :],
            )
            self._fill(
                parameter_part[(slice(None),) * first_unstacked_axis + (row_slice,)],
                read,
                ranges_with_row_slice,
            )
        return parameter_part

    def _fill(self, target: np.ndarray, read: ReadTensor, ranges: Sequence[range]) -> None:
        """Reads a part of the parameter into an array.

        Args:
            target: The array to fill, with the shape of the part.
            read: A function that takes the name of a tensor and a slice for each of its axes, and
                returns this part of the tensor.
            ranges: The range of the part on each axis of the parameter.
        """
        stack_ranges = ranges[: self.num_stacked_axes]
        tensor_ranges = [*ranges[self.num_stacked_axes :]]
        head_range = tensor_ranges[0]  # the range of heads, used if `is_sliced_per_head`
        is_sliced_per_head = self.tensor_slice is not None and self.tensor_slice.is_per_head
        # `target[index_in_leading_axes]` is filled from one tensor. If `is_sliced_per_head`, the
        # last number in `index_in_leading_axes` is a head, and only the values of this head are
        # read.
        for index_in_leading_axes in np.ndindex(
            target.shape[: self.num_stacked_axes + is_sliced_per_head]
        ):
            # `hf_names` lists the tensors of all layers (and experts) of the parameter, in the
            # row-major order of its stacked axes.
            hf_name_index = 0
            for axis_length, axis_range, index_in_stack_range in zip(
                self.shape, stack_ranges, index_in_leading_axes, strict=False
            ):
                hf_name_index = hf_name_index * axis_length + axis_range[index_in_stack_range]
            if hf_name_index >= len(self.hf_names):
                target[index_in_leading_axes] = 0
                continue
            if is_sliced_per_head:
                head_index = index_in_leading_axes[-1]
                tensor_ranges[0] = head_range[head_index : head_index + 1]
            axis_slices = tuple(slice(*axis_bounds) for axis_bounds in self._bounds(tensor_ranges))
            tensor_values = read(self.hf_names[hf_name_index], axis_slices)
            if self.reverses_axes:
                for first_row_index in range(0, tensor_values.shape[-2], TRANSPOSED_ROWS):
                    row_slice = slice(first_row_index, first_row_index + TRANSPOSED_ROWS)
                    target[index_in_leading_axes][..., row_slice] = tensor_values[
                        ..., row_slice, :
                    ].swapaxes(-1, -2)
            else:
                target[index_in_leading_axes] = tensor_values.reshape(
                    target[index_in_leading_axes].shape
                )


WeightTable = dict[ParamPath, WeightSpec]  # path of a parameter -> its spec, for a whole model


def _aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an uninitialised array that XLA on the CPU can use without copying it.

    Args:
        shape: The shape of the array.
        dtype: The dtype of the array.
    """
    byte_count = math.prod(shape) * np.dtype(dtype).itemsize
    byte_buffer = np.empty(byte_count + BUFFER_ALIGNMENT, np.uint8)
    aligned_offset = -byte_buffer.ctypes.data % BUFFER_ALIGNMENT
    return byte_buffer[aligned_offset : aligned_offset + byte_count].view(dtype).reshape(shape)


def orient_experts(
    table: Mapping[ParamPath, WeightSpec], shape_of: Callable[[str], tuple[int, ...]]
) -> WeightTable:
    """Sets `WeightSpec.has_input_axis_first` of fused experts according to the checkpoint.

    The experts of a layer are fused if one tensor contains all of them. In the files that
    transformers saves, the input axis of this tensor is last, as in any linear layer. In the
    released Qwen3-VL models it is before the output axis. The shapes of the tensors show the order,
    because at most one of gate_up_proj and down_proj is square: gate_up_proj if D = 2 M, and
    down_proj if D = M, where D is the hidden size and M the width of an expert.

    Args:
        table: Path of a parameter -> its spec. For fused experts, the specs say that the input axis
            is last.
        shape_of: A function that takes the name of a tensor of the checkpoint and returns its
            shape.

    Returns:
        A copy of the table, in which the specs of fused experts have the order of axes of this
        checkpoint.
    """
    fused_experts_spec_by_path = {
        parameter_path: weight_spec
        for parameter_path, weight_spec in table.items()
        if "experts" in weight_spec.logical_axes[weight_spec.num_stacked_axes :]
    }
    spec_with_input_axis_first_by_path = dict(fused_experts_spec_by_path)
    for parameter_path, weight_spec in fused_experts_spec_by_path.items():
        tensor_slice = weight_spec.tensor_slice and weight_spec.tensor_slice._replace(axis=2)
        spec_with_input_axis_first_by_path[parameter_path] = dataclasses.replace(
            weight_spec, has_input_axis_first=True, tensor_slice=tensor_slice
        )

    def shapes_agree(specs: Mapping[ParamPath, WeightSpec]) -> bool:
        """Returns whether tensors in the checkpoint have the shapes that their specs declare.

        Of each spec, only the first tensor is compared.

        Args:
            specs: Path of a parameter -> its spec.
        """
        for weight_spec in specs.values():
            for tensor_name in weight_spec.hf_names[:1]:
                if tuple(shape_of(tensor_name)) != weight_spec.hf_shape:
                    return False
        return True

    if shapes_agree(spec_with_input_axis_first_by_path) and not shapes_agree(
        fused_experts_spec_by_path
    ):
        return {**table, **spec_with_input_axis_first_by_path}
    return {**table}


def check_tensors(
    checkpoint: Checkpoint, specs: Iterable[WeightSpec], allowed_names: set[str]
) -> None:
    """Compares the headers of the weight files with the parameters, before any values are read.

    Args:
        checkpoint: The checkpoint.
        specs: The parameters to load.
        allowed_names: All names that tensors of this model may have.

    Raises:
        InputError: If a tensor is missing or unknown, has the wrong shape or has an unsupported
            dtype, or if the scales of a float8 tensor are missing or inconsistent with it.
    """
    for weight_spec in specs:
        for tensor_name in weight_spec.hf_names:
            weight_file, header_entry = checkpoint.locate(tensor_name)
            weight_spec.check(tensor_name, header_entry.shape, weight_file.location)
            checkpoint.scales(tensor_name)
    tensor_names_in_files = set(checkpoint.tensors)
    # Weight files may contain tensors that the index does not list, so the headers of the files are
    # searched for unknown tensors as well.
    for weight_file in checkpoint.weight_files:
        tensor_names_in_files.update(
            tensors_of_language_model(weight_file.tensors, weight_file.location)
        )
    unknown_tensor_names = sorted(
        without_scales(tensor_names_in_files, checkpoint.flag_with_value) - allowed_names
    )
    if unknown_tensor_names:
        more_names_note = (
            f" (and {len(unknown_tensor_names) - 1} more)" if len(unknown_tensor_names) > 1 else ""
        )
        raise InputError(
            f"{checkpoint.flag_with_value}: tensor {unknown_tensor_names[0]} is unknown to this "
            f"model{more_names_note}"
        )


def load_params(
    table: Mapping[ParamPath, WeightSpec],
    checkpoint: Checkpoint,
    dtype: Any,
    layout: Layout,
    as_bits: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Reads all parameters from a checkpoint directly into the memory of the devices.

    Each job reads one layer of a stacked parameter, or a whole parameter without layers. In a
    pipeline, each job reads one layer of every stage. The jobs are in the order of the files, so
    that each file is read from beginning to end. A process reads only the parts that its devices
    need, each part once, with several threads. Besides the loaded parameters, the process holds the
    arrays of at most WEIGHT_READERS jobs in memory.

    Args:
        table: Path of a parameter -> its spec.
        checkpoint: The checkpoint.
        dtype: The dtype of the parameters.
        layout: The layout of the mesh, which determines the part of each parameter that a device
            stores.
        as_bits: Whether to return parameters of a two-byte dtype as uint16 arrays of the same bits.
        progress: A function that is called after each job with the number of bytes that it loaded.

    Returns:
        The parameters on the devices, as Flax's nested dict: the first name of a path -> a dict of
        the other names, and so on.
    """
    stage_count = layout.size("pipeline")
    loaded_dtype = np.uint16 if as_bits else dtype
    stacked_spec_by_path = {
        parameter_path: weight_spec
        for parameter_path, weight_spec in table.items()
        if weight_spec.logical_axes[0] == "layers"
    }

    def make_zeros() -> dict[ParamPath, jax.Array]:
        return {
            parameter_path: jnp.zeros(stacked_spec.shape, loaded_dtype)
            for parameter_path, stacked_spec in stacked_spec_by_path.items()
        }

    sharding_by_path = {}
    for parameter_path, stacked_spec in stacked_spec_by_path.items():
        sharding_by_path[parameter_path] = layout.sharding(
            stacked_spec.logical_axes, stacked_spec.shape
        )
    array_by_path = jax.jit(make_zeros, out_shardings=sharding_by_path)()
    # If a parameter has layers, a job reads one layer of every pipeline stage, for example the
    # second layer of each. Otherwise it reads the whole parameter. A job is a tuple of the path of
    # the parameter and the index of the layer in its stage, from 0; None without layers.
    path_and_layer_index_of_jobs: list[tuple[ParamPath, int | None]] = []
    for parameter_path, weight_spec in table.items():
        if parameter_path in stacked_spec_by_path:
            path_and_layer_index_of_jobs += [
                (parameter_path, layer_index_in_stage)
                for layer_index_in_stage in range(weight_spec.shape[0] // stage_count)
            ]
        else:
            path_and_layer_index_of_jobs.append((parameter_path, None))

    def position_in_files(job: tuple[ParamPath, int | None]) -> tuple[bool, str, int]:
        """Returns the sort key of a job: the position of its first tensor in the weight files.

        Args:
            job: A unit of reading: a tuple of the path of the parameter, and the index of a layer
                within a pipeline stage. The job reads the layer with this index of every stage. The
                index is None if the parameter has no layers.

        Returns:
            A tuple of:
                Whether the job reads no tensor, because its layers are zeros that only fill up
                    the stages (see `WeightSpec.hf_names`). Such a job comes last.
                The name of the file with the first tensor; "" if the job reads no tensor.
                The offset of this tensor in the file in bytes; 0 if the job reads no tensor.
        """
        parameter_path, layer_index_in_stage = job
        weight_spec = table[parameter_path]
        num_tensors_per_layer = math.prod(weight_spec.shape[1 : weight_spec.num_stacked_axes])
        tensor_names = weight_spec.hf_names[(layer_index_in_stage or 0) * num_tensors_per_layer :]
        if not tensor_names:
            return True, "", 0
        file_of_first_tensor, header_entry = checkpoint.locate(tensor_names[0])
        return False, file_of_first_tensor.name, header_entry.offset

    def load(path: ParamPath, layer_index_in_stage: int | None) -> jax.Array:
        """Reads a parameter, or some of its layers, into an array on the devices.

        Args:
            path: The path of the parameter.
            layer_index_in_stage: The index of a layer within a pipeline stage, from 0. The layer
                with this index is read for every stage. None to read a parameter without layers as
                a whole.

        Returns:
            The weights of this layer in each stage, (stages, ...). If `layer_index_in_stage` is
            None, the whole parameter.
        """
        weight_spec = table[path]
        logical_axis_names = weight_spec.logical_axes
        file_of_first_tensor, _ = checkpoint.locate(weight_spec.hf_names[0])
        ranges_of_axes = [*map(range, weight_spec.shape)]
        if layer_index_in_stage is not None:
            logical_axis_names = ("stage", *logical_axis_names[1:])
            ranges_of_axes[0] = range(
                layer_index_in_stage, weight_spec.shape[0], weight_spec.shape[0] // stage_count
            )
        read_tensor = functools.partial(checkpoint.read, dtype=dtype)
        # The slices that select a part of the array, as text -> values of the part. Several devices
        # may need the same part, which is read only once. The slices become text because they are
        # not hashable before Python 3.12.
        part_by_slices_text: dict[str, np.ndarray] = {}

        def part_at(index: Index | None) -> np.ndarray:
            slices_text = str(index)
            if slices_text not in part_by_slices_text:
                part_ranges = ranges_of_axes
                if index:
                    part_ranges = [
                        axis_range[axis_slice]
                        for axis_range, axis_slice in zip(ranges_of_axes, index, strict=True)
                    ]
                part_values = weight_spec.read_slice(
                    read_tensor, dtype, part_ranges, file_of_first_tensor.num_values_per_read
                )
                part_by_slices_text[slices_text] = part_values.view(loaded_dtype)
            return part_by_slices_text[slices_text]

        loaded_shape = tuple(map(len, ranges_of_axes))
        loaded_array = jax.make_array_from_callback(
            loaded_shape, layout.sharding(logical_axis_names, loaded_shape), part_at
        )
        return jax.block_until_ready(loaded_array)  # so that the host's copy can be freed

    path_and_layer_index_of_jobs.sort(key=position_in_files)
    with ThreadPoolExecutor(WEIGHT_READERS, "read-weights") as reader_pool:
        loaded_arrays = _loaded_ahead(reader_pool, load, path_and_layer_index_of_jobs)
        for parameter_path, layer_index_in_stage in path_and_layer_index_of_jobs:
            loaded_array = next(loaded_arrays)
            progress(loaded_array.nbytes)
            if layer_index_in_stage is not None:
                loaded_array = _put_layer(
                    array_by_path[parameter_path], loaded_array, np.int32(layer_index_in_stage)
                )
            # Without waiting here, arrays of many jobs would accumulate in the devices' memory.
            array_by_path[parameter_path] = jax.block_until_ready(loaded_array)
            del loaded_array  # because the array would stay in memory while the next one is loaded
    return unflatten_dict(array_by_path)


def _loaded_ahead(
    pool: ThreadPoolExecutor, load: Callable[..., jax.Array], jobs: Iterable[tuple[Any, ...]]
) -> Iterator[jax.Array]:
    """Loads arrays in threads before they are needed, and yields them in the order of their jobs.

    At any time, at most WEIGHT_READERS arrays are being loaded or are loaded but not yet yielded.

    Args:
        pool: The pool of threads.
        load: A function that loads an array. The elements of a job are its arguments.
        jobs: A tuple of the arguments of `load` for each array.

    Yields:
        The array of each job.
    """
    pending_arrays: deque[Future[jax.Array]] = deque()
    for load_job in jobs:
        pending_arrays.append(pool.submit(load, *load_job))
        if len(pending_arrays) == WEIGHT_READERS:
            yield pending_arrays.popleft().result()
    while pending_arrays:
        yield pending_arrays.popleft().result()


@functools.partial(jax.jit, donate_argnums=0)
def _put_layer(
    stack: jax.Array, layer_of_each_stage: jax.Array, layer_index_in_stage: jax.Array
) -> jax.Array:
    """Writes one layer of each pipeline stage into a stack of layers.

    Args:
        stack: The layers of all stages, one stage after the other, (layers, ...). Its memory is
            reused for the result.
        layer_of_each_stage: The new values of one layer in each stage, (stages, ...).
        layer_index_in_stage: The index of this layer in its stage, from 0, () int32.

    Returns:
        The stack with the new values.
    """
    stage_count, *layer_shape = layer_of_each_stage.shape
    stack_in_stages = stack.reshape(stage_count, -1, *layer_shape)
    updated_stack_in_stages = lax.dynamic_update_index_in_dim(
        stack_in_stages, layer_of_each_stage, layer_index_in_stage, axis=1
    )
    return updated_stack_in_stages.reshape(stack.shape)
