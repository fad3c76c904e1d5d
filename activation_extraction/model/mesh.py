"""Arranges the devices in a mesh of named axes, and determines how arrays are split along the axes.

The model and the step only name logical axes of arrays, such as "batch" and "heads". `RULES` maps a
logical axis to axes of the mesh, and axes that the mesh lacks are ignored. Users name the mesh axes
pipeline, data, fsdp, expert and model. The user's `model` is two axes of JAX's mesh: `model`, along
which attention heads are split, and `query`, along which the queries of a row are split if there
are more devices than key/value heads. Everything else that the user's `model` splits, such as the
width of an MLP, is split along both axes.

mesh_choice.py chooses the mesh of a run. host_rows.py splits rows and activations between hosts.

Letters: B rows, T tokens per row.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from activation_extraction.model.attention import AttentionFunction, Segments

# The two axes of JAX's mesh that make up the user's axis `model`.
MODEL_AXES = ("model", "query")
# Logical axis of an array -> the axes of the mesh along which it is split.
RULES: dict[str, tuple[str, ...]] = {
    # The logical axes of weights.
    "layers": ("pipeline",),
    "embed": ("fsdp",),
    "heads": ("model",),
    "kv_heads": ("model",),
    "key_heads": MODEL_AXES,
    "mlp": MODEL_AXES,
    "experts": ("expert",),
    "vocab": MODEL_AXES,
    "head_vocab": (*MODEL_AXES, "pipeline"),
    # The logical axes of activations and of the rows that hosts feed.
    "stage": ("pipeline",),
    "batch": ("data", "fsdp", "expert"),
    # The logical axis of a batch's rows while the vectors of their tokens are looked up in the
    # embedding. The rows are not split along fsdp, because the columns of the embedding are: all
    # devices along fsdp look up the same tokens, each of them in its own columns.
    "fsdp_batch": ("data", "expert"),
    "query_sequence": ("query",),
    "captured_sequence": MODEL_AXES,
    "leaving_sequence": (*MODEL_AXES, "pipeline"),
}


@dataclass(frozen=True)
class Layout:
    """A mesh, with methods that split arrays along its axes.

    The table RULES lists the mesh axes along which each logical axis of an array, such as "batch",
    is split.

    Attributes:
        mesh: Mesh of JAX. An abstract mesh has axes but no devices. None for a single device, or if
            only shapes are computed, so that arrays are not split.
        reason_for_mesh: Reason for the choice of this mesh, for the log. "" if the flags determine
            the mesh.
    """

    mesh: Mesh | AbstractMesh | None = None
    reason_for_mesh: str = field(default="", compare=False)

    def size(self, *axes: str) -> int:
        """Returns the number of devices along some axes of JAX's mesh, the product of their sizes.

        Args:
            axes: The names of the axes. An axis that the mesh lacks has the size 1.
        """
        return 1 if self.mesh is None else math.prod(self.mesh.shape.get(axis, 1) for axis in axes)

    @property
    def shape(self) -> dict[str, int]:
        """The shape of the mesh: name of an axis that --mesh_axes accepts -> size of the axis.

        JAX's mesh divides the axis `model` of the user into two axes, `model` and `query`. The size
        of `model` in the result is the product of their sizes.
        """
        size_by_axis = {} if self.mesh is None else dict(self.mesh.shape)
        if "query" in size_by_axis:
            size_by_axis["model"] *= size_by_axis.pop("query")
        return size_by_axis

    def ring(self, axis: str) -> list[int]:
        """Returns the order in which the devices along a mesh axis form a ring.

        In a ring, each device sends to the next device, and the last device to the first. If the
        devices are TPUs in a rectangle of width two, each device is a neighbour of the next device
        in the ring. Some devices cannot compute while they send to a device that is not their
        neighbour.

        Args:
            axis: The name of the mesh axis.

        Returns:
            The indices of the devices along the axis, in the order of the ring.
        """
        assert isinstance(self.mesh, Mesh)
        ring_axis_index = self.mesh.axis_names.index(axis)
        devices_with_ring_axis_first = np.moveaxis(self.mesh.devices, ring_axis_index, 0)
        devices_of_axis = devices_with_ring_axis_first.reshape(self.size(axis), -1)[:, 0]
        device_coordinates = np.array(
            [
                getattr(device, "coords", (device_index, 0))
                for device_index, device in enumerate(devices_of_axis)
            ]
        )
        # The devices are ordered so that each device is a neighbour of the next device in the
        # network of chips, where they form a rectangle (or a single line). The order goes through
        # the rectangle in lines parallel to its long side. Lines with an odd coordinate on the
        # short side are traversed backwards. If there are two lines, the last device is also a
        # neighbour of the first device, so that the devices form a ring.
        dimensions_shortest_first = np.argsort(np.ptp(device_coordinates, axis=0))
        short_side_coordinates, long_side_coordinates = device_coordinates.T[
            dimensions_shortest_first[-2:]
        ]
        long_side_sort_keys = np.where(
            short_side_coordinates % 2, -long_side_coordinates, long_side_coordinates
        )
        return np.lexsort([long_side_sort_keys, short_side_coordinates]).tolist()

    @property
    def adds_up_parts(self) -> bool:
        """Whether devices compute parts of the sums of matrix products, and add up these parts.

        This is the case if weights are split along the mesh axis `model`.
        """
        return self.size(*MODEL_AXES) > 1

    def sharding(
        self, axes: Sequence[str], shape: Sequence[int], unsplit_axis: str | None = None
    ) -> NamedSharding:
        """Returns the sharding of an array.

        A dimension that is not divisible by the number of devices along its mesh axes is not split.

        Args:
            axes: The logical axis of each dimension.
            shape: The shape of the array.
            unsplit_axis: A mesh axis along which the array is not split. None to split it along all
                mesh axes that RULES lists for its logical axes.
        """
        assert self.mesh is not None
        mesh_axes_of_dimensions: list[tuple[str, ...] | None] = []
        for logical_axis, dimension_size in zip(axes, shape, strict=True):
            mesh_axes = tuple(
                mesh_axis
                for mesh_axis in RULES.get(logical_axis, ())
                if mesh_axis in self.mesh.axis_names and mesh_axis != unsplit_axis
            )
            is_split = bool(mesh_axes) and dimension_size % self.size(*mesh_axes) == 0
            mesh_axes_of_dimensions.append(mesh_axes if is_split else None)
        return NamedSharding(self.mesh, PartitionSpec(*mesh_axes_of_dimensions))

    def shard_shape(
        self, axes: Sequence[str], shape: tuple[int, ...], unsplit_axis: str | None = None
    ) -> tuple[int, ...]:
        """Returns the shape of one device's part of an array.

        Args:
            axes: The logical axis of each dimension.
            shape: The shape of the whole array.
            unsplit_axis: A mesh axis along which the array is not split. None to split it along all
                mesh axes that RULES lists for its logical axes.
        """
        if self.mesh is None:
            return shape
        return self.sharding(axes, shape, unsplit_axis).shard_shape(shape)

    def constrain(self, x: Array, *axes: str, unsplit_axis: str | None = None) -> Array:
        """Fixes the sharding of an array at a point of a computation.

        Args:
            x: The array.
            axes: The logical axis of each dimension.
            unsplit_axis: A mesh axis along which the array is not split. None to split it along all
                mesh axes that RULES lists for its logical axes.

        Returns:
            The array with this sharding.
        """
        if self.mesh is None or self.mesh.size == 1:
            return x
        return lax.with_sharding_constraint(x, self.sharding(axes, x.shape, unsplit_axis))

    def gather(self, weight: Array, axes: Sequence[str]) -> Array:
        """Gathers a weight along the mesh axis `fsdp`, just before its use.

        The weight stays split along the other mesh axes.

        Args:
            weight: The weight.
            axes: The logical axis of each dimension of the weight.

        Returns:
            The gathered weight.
        """
        return (
            weight if self.size("fsdp") == 1 else self.constrain(weight, *axes, unsplit_axis="fsdp")
        )

    def per_device(
        self,
        function: Callable[..., Array],
        arrays: Sequence[Array],
        axes: Sequence[Sequence[str]],
        template: int,
    ) -> Array:
        """Runs a function on each device, with the device's part of each array.

        Args:
            function: A function that takes one device's part of each array and returns this
                device's part of the result.
            arrays: The arrays, whose parts are the arguments of the function.
            axes: For each array, the logical axis of each of its dimensions.
            template: The index in `arrays` of an array with the same logical axes and shape as the
                result.

        Returns:
            The whole result, which is split over the devices like the template.
        """
        if self.mesh is None or self.mesh.size == 1:
            return function(*arrays)
        partition_specs = tuple(
            self.sharding(axes_of_array, array.shape).spec
            for axes_of_array, array in zip(axes, arrays, strict=True)
        )
        run_on_devices = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=partition_specs,
            out_specs=partition_specs[template],
            check_vma=False,
        )
        return run_on_devices(*arrays)

    def attend(
        self, attention: AttentionFunction, q: Array, k: Array, v: Array, segment_ids: Array
    ) -> Array:
        """Runs attention on each device, with the device's rows, heads and queries.

        Args:
            attention: The function that computes attention (see `AttentionFunction`).
            q: The queries of whole rows, (B, T, query heads, head size).
            k: The keys, (B, T, key/value heads, head size).
            v: The values, (B, T, key/value heads, head size).
            segment_ids: For each token, the number of its sample in the row, (B, T) int32. 0 for
                padding. Tokens only attend to tokens of the same sample.

        Returns:
            The output of attention, in the shape of `q`.
        """

        def attend_on_device(q: Array, k: Array, v: Array, *segments: Array) -> Array:
            # Index of this device's first query in its row.
            first_query_index: Array | int = 0
            if self.size("query") > 1:
                first_query_index = lax.axis_index("query") * q.shape[1]
            return attention(q, k, v, Segments(*segments), first_query_index)

        query_axes = "batch", "query_sequence", "heads", "head_dim"
        key_axes = "batch", "sequence", "kv_heads", "head_dim"
        axes_of_arrays = [query_axes, key_axes, key_axes, query_axes[:2], key_axes[:2]]
        attention_arrays = q, k, v, segment_ids, segment_ids
        return self.per_device(attend_on_device, attention_arrays, axes_of_arrays, template=0)


def build_layout(
    devices: Sequence[Any], shape: Mapping[str, int], kv_heads: int, reason: str = ""
) -> Layout:
    """Builds a mesh of devices, and returns its layout.

    Args:
        devices: The devices, ordered by host.
        shape: A dict from the name of a mesh axis in --mesh_axes, such as `model`, to its size. The
            first axis varies slowest over the devices.
        kv_heads: The number of key/value heads of the model, which limits the axis `model` of JAX's
            mesh (see `mesh_axes`).
        reason: The reason for the choice of this shape, for the log. "" if the flags determine it.
    """
    axis_names, axis_sizes = mesh_axes(shape, kv_heads)
    return Layout(Mesh(arrange_devices(devices, axis_sizes), tuple(axis_names)), reason)


def abstract_layout(shape: Mapping[str, int], kv_heads: int) -> Layout:
    """Returns the layout of an abstract mesh, which has named axes with sizes but no devices.

    With it, the cost of a mesh can be estimated before the devices are arranged.

    Args:
        shape: A dict from the name of a mesh axis in --mesh_axes, such as `model`, to its size.
            JAX's mesh has other axes, which `mesh_axes` derives from these.
        kv_heads: The number of key/value heads of the model. `mesh_axes` divides them among the
            devices.
    """
    axis_names, axis_sizes = mesh_axes(shape, kv_heads)
    return Layout(AbstractMesh(tuple(axis_sizes), tuple(axis_names)))


def mesh_axes(shape: Mapping[str, int], kv_heads: int) -> tuple[list[str], list[int]]:
    """Returns the names and the sizes of the axes of JAX's mesh.

    The user's axis `model` becomes the axes `model` and `query`. The size of the new `model` is the
    greatest common divisor of the user's size and the number of key/value heads, and the size of
    `query` is the quotient of the user's size and this divisor.

    Args:
        shape: A dict from the name of a mesh axis in --mesh_axes, such as `model`, to its size.
        kv_heads: The number of key/value heads of the model.

    Returns:
        A tuple of the names of the axes and the sizes of the axes, in the same order.
    """
    new_model_axis_size = math.gcd(kv_heads, shape.get("model", 1))
    size_by_axis: dict[str, int] = {}
    for axis_name, axis_size in shape.items():
        if axis_name == "model":
            size_by_axis["model"] = new_model_axis_size
            size_by_axis["query"] = axis_size // new_model_axis_size
        else:
            size_by_axis[axis_name] = axis_size
    return list(size_by_axis), list(size_by_axis.values())


def arrange_devices(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray:
    """Arranges the devices as an array with the axes of a mesh.

    JAX can arrange the TPUs of a slice so that direct links connect the devices along each mesh
    axis. This requires that each mesh axis consists of whole axes of the slice. JAX's arrangement
    is only used if it keeps the devices of each host together, because otherwise devices of other
    hosts would compute the rows of a host. In all other cases, the devices stay in their order.

    Args:
        devices: The devices, ordered by host.
        sizes: The size of each mesh axis. The first axis varies slowest over the devices.
    """
    device_grid_in_given_order = np.array(devices, object).reshape(sizes)
    tpu_slice_numbers = {getattr(device, "slice_index", 0) for device in devices}
    has_coordinates = all(hasattr(device, "coords") for device in devices)
    if devices[0].platform != "tpu" or len(tpu_slice_numbers) > 1 or not has_coordinates:
        return device_grid_in_given_order
    try:
        arranged_devices = mesh_utils.create_device_mesh(sizes, devices)
    except (NotImplementedError, AssertionError):
        # JAX cannot arrange these devices, because a mesh axis would divide an axis of the TPU
        # slice, or because the devices do not form a cuboid, for example if each host uses one
        # device.
        return device_grid_in_given_order
    return (
        arranged_devices if _keeps_hosts_together(arranged_devices) else device_grid_in_given_order
    )


def _keeps_hosts_together(arranged_devices: np.ndarray) -> bool:
    """Returns whether the devices of each host are consecutive in row-major order.

    Args:
        arranged_devices: The devices in an array with the axes of a mesh.
    """
    host_numbers_of_devices = [device.process_index for device in arranged_devices.flat]
    return len([*groupby(host_numbers_of_devices)]) == len(set(host_numbers_of_devices))


def shape_phrase(shape: Mapping[str, int]) -> str:
    """Describes the shape of a mesh for messages, such as `data 4 x fsdp 2`.

    Args:
        shape: Name of a mesh axis -> its size.
    """
    return " x ".join(f"{axis_name} {axis_size}" for axis_name, axis_size in shape.items())
