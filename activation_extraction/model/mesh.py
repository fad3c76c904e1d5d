"""Arranges the devices in a mesh of named axes, and determines how arrays are split along them.

The model and the step only name logical axes, such as "batch" and "heads". `RULES` maps a logical
axis to axes of the mesh; axes that the mesh lacks are left out. Users know the mesh axes pipeline,
data, fsdp, expert and model. Internally, the user's `model` is two axes of JAX's mesh: `model`,
along which attention heads are split, and `query`, along which the queries of a row are split if
there are more devices than key/value heads. Other arrays are split along both.

mesh_choice.py chooses the mesh of a run, and host_rows.py brings rows to it.
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

from activation_extraction.model.attention import Attention, Segments

# The two axes of JAX's mesh that make up the user's axis `model`.
BOTH = ("model", "query")
# Logical axis -> the axes of the mesh along which it is split.
RULES: dict[str, tuple[str, ...]] = {
    # Axes of weights:
    "layers": ("pipeline",),
    "embed": ("fsdp",),
    "heads": ("model",),
    "kv_heads": ("model",),
    "key_heads": BOTH,
    "mlp": BOTH,
    "experts": ("expert",),
    "vocab": BOTH,
    "head_vocab": (*BOTH, "pipeline"),
    # Axes of activations:
    "stage": ("pipeline",),
    "batch": ("data", "fsdp", "expert"),
    "fsdp_batch": ("data", "expert"),  # like "batch", but all devices along fsdp have the same rows
    "query_sequence": ("query",),
    "captured_sequence": BOTH,
    "leaving_sequence": (*BOTH, "pipeline"),
}


@dataclass(frozen=True)
class Layout:
    """A mesh, with methods that split arrays along it by RULES.

    Attributes:
        mesh: Mesh. An abstract mesh has axes but no devices. None for a single device, or to
            compute only shapes; then arrays are not split.
        why: Reason for the choice of this mesh, for the log; "" if the flags determine it.
    """

    mesh: Mesh | AbstractMesh | None = None
    why: str = field(default="", compare=False)

    def size(self, *axes: str) -> int:
        """Returns the product of the sizes of mesh axes; an axis that the mesh lacks counts as 1.

        Args:
            axes: Names of axes of JAX's mesh.
        """
        return 1 if self.mesh is None else math.prod(self.mesh.shape.get(axis, 1) for axis in axes)

    @property
    def shape(self) -> dict[str, int]:
        """The size of each mesh axis by name, with `model` as the user knows it."""
        sizes = {} if self.mesh is None else dict(self.mesh.shape)
        if "query" in sizes:
            sizes["model"] *= sizes.pop("query")
        return sizes

    def ring(self, axis: str) -> list[int]:
        """Returns the order in which the devices along a mesh axis form a ring.

        TPUs in a rectangle of width two are ordered so that each is a neighbour of the next one.
        Some devices cannot compute while they send to devices that are not their neighbours.

        Args:
            axis: Name of the mesh axis.

        Returns:
            The indices of the devices along the axis, in the order of the ring.
        """
        assert isinstance(self.mesh, Mesh)
        devices = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(axis), 0)
        first = enumerate(devices.reshape(len(devices), -1)[:, 0])
        places = np.array([getattr(device, "coords", (number, 0)) for number, device in first])
        across, along = places.T[np.argsort(np.ptp(places, axis=0))[-2:]]
        return np.lexsort([np.where(across % 2, -along, along), across]).tolist()

    @property
    def adds_up_parts(self) -> bool:
        """Whether products are split along `model`, so that devices add up their results."""
        return self.size(*BOTH) > 1

    def sharding(
        self, axes: Sequence[str], shape: Sequence[int], without: str | None = None
    ) -> NamedSharding:
        """Returns the sharding of an array.

        A dimension that is not divisible by the number of devices along its mesh axes is not split.

        Args:
            axes: The logical axis of each dimension.
            shape: The shape of the array.
            without: A mesh axis along which the array is not split; None for no such axis.
        """
        assert self.mesh is not None
        entries: list[tuple[str, ...] | None] = []
        for axis, size in zip(axes, shape, strict=True):
            present = (name for name in RULES.get(axis, ()) if name in self.mesh.axis_names)
            names = tuple(name for name in present if name != without)
            entries.append(names if names and size % self.size(*names) == 0 else None)
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def shard_shape(
        self, axes: Sequence[str], shape: tuple[int, ...], without: str | None = None
    ) -> tuple[int, ...]:
        """Returns the shape of one device's part of an array. See `sharding` for the arguments."""
        if self.mesh is None:
            return shape
        return self.sharding(axes, shape, without).shard_shape(shape)

    def constrain(self, x: Array, *axes: str, without: str | None = None) -> Array:
        """Fixes the sharding of an array at this point of the computation.

        Args:
            x: The array.
            axes: The logical axis of each dimension.
            without: A mesh axis along which the array is not split; None for no such axis.

        Returns:
            The array with this sharding.
        """
        if self.mesh is None or self.mesh.size == 1:
            return x
        return lax.with_sharding_constraint(x, self.sharding(axes, x.shape, without))

    def gather(self, weight: Array, axes: Sequence[str]) -> Array:
        """Gathers a weight along fsdp, just before its use. It stays split along other mesh axes.

        Args:
            weight: The weight.
            axes: The logical axis of each dimension.

        Returns:
            The gathered weight.
        """
        return weight if self.size("fsdp") == 1 else self.constrain(weight, *axes, without="fsdp")

    def per_device(
        self,
        function: Callable[..., Array],
        arrays: Sequence[Array],
        axes: Sequence[Sequence[str]],
        like: int,
    ) -> Array:
        """Runs a function on each device, with the device's part of each array.

        Args:
            function: A function that takes the parts of the arrays and returns a part of the
                result.
            arrays: The arguments of the function.
            axes: The logical axes of each array.
            like: The index of the array in `arrays` that has the logical axes and shape of the
                result.

        Returns:
            The result, assembled from the parts.
        """
        if self.mesh is None or self.mesh.size == 1:
            return function(*arrays)
        pairs = zip(axes, arrays, strict=True)
        specs = tuple(self.sharding(names, array.shape).spec for names, array in pairs)
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=specs, out_specs=specs[like], check_vma=False
        )(*arrays)

    def attend(
        self, attention: Attention, q: Array, k: Array, v: Array, segment_ids: Array
    ) -> Array:
        """Runs attention on each device, with the device's rows, heads and queries.

        Args:
            attention: The function (see `Attention` for its arguments and result).
            q: The queries of whole rows, (B, T, query heads, head size).
            k: The keys, (B, T, key/value heads, head size).
            v: The values, (B, T, key/value heads, head size).
            segment_ids: The segment of each token, (B, T) int32.

        Returns:
            The output of attention, in the shape of `q`.
        """

        def local(q: Array, k: Array, v: Array, *segments: Array) -> Array:
            split = self.size("query") > 1
            first = lax.axis_index("query") * q.shape[1] if split else 0
            return attention(q, k, v, Segments(*segments), first)

        queries = "batch", "query_sequence", "heads", "head_dim"
        keys = "batch", "sequence", "kv_heads", "head_dim"
        arrays = q, k, v, segment_ids, segment_ids
        return self.per_device(local, arrays, [queries, keys, keys, queries[:2], keys[:2]], like=0)


def build_layout(
    devices: Sequence[Any], shape: Mapping[str, int], kv_heads: int, why: str = ""
) -> Layout:
    """Builds a mesh of the devices.

    Args:
        devices: The devices, ordered by host.
        shape: Mesh axis, as the user knows it -> size. The first axis varies slowest.
        kv_heads: The number of key/value heads of the model.
        why: The reason for the choice of this shape, for the log.
    """
    names, sizes = mesh_axes(shape, kv_heads)
    return Layout(Mesh(arrange_devices(devices, sizes), tuple(names)), why)


def abstract_layout(shape: Mapping[str, int], kv_heads: int) -> Layout:
    """Returns the layout of a mesh without devices. See `build_layout` for the arguments."""
    names, sizes = mesh_axes(shape, kv_heads)
    return Layout(AbstractMesh(tuple(sizes), tuple(names)))


def mesh_axes(shape: Mapping[str, int], kv_heads: int) -> tuple[list[str], list[int]]:
    """Returns the names and the sizes of the axes of JAX's mesh.

    The user's `model` becomes `model` and `query`. The size of `model` is the greatest common
    divisor of the user's size and the number of key/value heads.

    Args:
        shape: Mesh axis, as the user knows it -> size.
        kv_heads: The number of key/value heads of the model.

    Returns:
        The names of the axes.
        The sizes of the axes.
    """
    heads = math.gcd(kv_heads, shape.get("model", 1))
    sizes: dict[str, int] = {}
    for axis, size in shape.items():
        if axis == "model":
            sizes |= {"model": heads, "query": size // heads}
        else:
            sizes[axis] = size
    return [*sizes], [*sizes.values()]


def arrange_devices(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray:
    """Arranges the devices as an array with the axes of a mesh.

    JAX can arrange the TPUs of a slice so that links join the devices along an axis, if each axis
    of the mesh consists of whole axes of the slice. This arrangement is only used if it keeps the
    devices of each host together, because otherwise devices of other hosts would compute the rows
    of a host. In all other cases, the devices stay in their order.

    Args:
        devices: The devices, ordered by host.
        sizes: The size of each axis. The first axis varies slowest.
    """
    in_order = np.array(devices, object).reshape(sizes)
    slices = {getattr(device, "slice_index", 0) for device in devices}
    has_coordinates = all(hasattr(device, "coords") for device in devices)
    if devices[0].platform != "tpu" or len(slices) > 1 or not has_coordinates:
        return in_order
    try:
        arranged = mesh_utils.create_device_mesh(sizes, devices)
    except (NotImplementedError, AssertionError):
        # JAX would have to divide an axis of the slice, which is worse than the order by host; or
        # the devices, such as one of each host, form no cuboid.
        return in_order
    return arranged if _keeps_hosts_together(arranged) else in_order


def _keeps_hosts_together(arranged: np.ndarray) -> bool:
    """Returns whether the devices of each host are consecutive, if the last axis varies fastest."""
    hosts = [device.process_index for device in arranged.flat]
    return len([*groupby(hosts)]) == len(set(hosts))


def in_words(shape: Mapping[str, int]) -> str:
    """Describes a mesh in words, such as `data 4 x fsdp 2`.

    Args:
        shape: Mesh axis -> size.
    """
    return " x ".join(f"{axis} {size}" for axis, size in shape.items())
