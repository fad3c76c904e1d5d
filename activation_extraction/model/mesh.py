"""A mesh arranges the devices along named axes, and a `Layout` says how arrays lie on it.

The model and the step name logical axes only, such as "batch" and "heads". `RULES` maps a logical
axis to axes of the mesh, and axes that the mesh lacks drop out. Users know the mesh axes pipeline,
data, fsdp, expert and model. Inside, `model` is two axes: `model` proper, along which attention
heads are split, and `query`, along which the queries of a row are split where the key/value heads
do not divide further. Everything else is split along both alike.

mesh_choice.py decides which mesh a run gets, and host_rows.py brings rows to it.
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

# The two axes of JAX's mesh that are `model` for the user.
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
    "fsdp_batch": ("data", "expert"),  # devices along fsdp have one another's rows
    "query_sequence": ("query",),
    "captured_sequence": BOTH,
    "leaving_sequence": (*BOTH, "pipeline"),
}


@dataclass(frozen=True)
class Layout:
    """A mesh with its rules.

    Attributes:
        mesh: The mesh. An abstract mesh has axes but no devices. None stands for a single device,
            or for shapes alone; then nothing is split and nothing is constrained.
        why: The reason why this mesh was chosen, for the log; "" if the user gave its shape.
    """

    mesh: Mesh | AbstractMesh | None = None
    why: str = field(default="", compare=False)

    def size(self, *axes: str) -> int:
        """Returns the number of devices along these mesh axes together; absent axes count as 1."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape.get(a, 1) for a in axes)

    @property
    def shape(self) -> dict[str, int]:
        """Returns mesh axis -> size, with `model` as the user knows it."""
        sizes = {} if self.mesh is None else dict(self.mesh.shape)
        if "query" in sizes:
            sizes["model"] *= sizes.pop("query")
        return sizes

    def ring(self, axis: str) -> list[int]:
        """Returns the numbers of the devices along a mesh axis in the order of a ring.

        TPUs that form a rectangle of width two are each beside the next one in the ring. Some
        devices cannot compute while they send to devices that are not beside them.
        """
        assert isinstance(self.mesh, Mesh)
        devices = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(axis), 0)
        first = enumerate(devices.reshape(len(devices), -1)[:, 0])
        places = np.array([getattr(device, "coords", (number, 0)) for number, device in first])
        across, along = places.T[np.argsort(np.ptp(places, axis=0))[-2:]]
        return np.lexsort([np.where(across % 2, -along, along), across]).tolist()

    @property
    def adds_up_parts(self) -> bool:
        """Returns whether devices have parts of a product's inputs and add up their results."""
        return self.size(*BOTH) > 1

    def sharding(
        self, axes: Sequence[str], shape: Sequence[int], without: str | None = None
    ) -> NamedSharding:
        """Returns how an array is split. A dimension that does not divide is not split.

        Args:
            axes: The logical axis of every dimension.
            shape: The shape of the array.
            without: A mesh axis along which nothing is split; None for none.
        """
        assert self.mesh is not None
        entries: list[tuple[str, ...] | None] = []
        for axis, size in zip(axes, shape, strict=True):
            rule = RULES.get(axis, ())
            names = tuple(a for a in rule if a in self.mesh.axis_names and a != without)
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
        """Fixes how `x` lies on the mesh at this point of the computation.

        Args:
            x: The array.
            axes: The logical axis of every dimension.
            without: A mesh axis along which nothing is split; None for none.
        """
        if self.mesh is None or self.mesh.size == 1:
            return x
        return lax.with_sharding_constraint(x, self.sharding(axes, x.shape, without))

    def gather(self, weight: Array, axes: Sequence[str]) -> Array:
        """Gathers a weight along fsdp just before its use; it stays split along other mesh axes.

        Args:
            weight: The weight.
            axes: The logical axis of every dimension.
        """
        return weight if self.size("fsdp") == 1 else self.constrain(weight, *axes, without="fsdp")

    def per_device(
        self,
        function: Callable[..., Array],
        arrays: Sequence[Array],
        axes: Sequence[Sequence[str]],
        like: int,
    ) -> Array:
        """Runs a function on every device, with the device's part of every array.

        Args:
            function: Maps the parts of the arrays to a part of the result.
            arrays: The arguments of the function.
            axes: The logical axes of every array.
            like: The number of the array that has the shape and the axes of the result.
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
        """Runs `attention` on every device, with the device's rows, heads and queries.

        Args:
            attention: The function; see `Attention` for its arguments and result.
            q: The queries of whole rows.
            k: The keys.
            v: The values.
            segment_ids: The segments of the tokens, (B, T) int32.
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
    """Builds a mesh over the devices.

    Args:
        devices: The devices, ordered by host.
        shape: Mesh axis as the user knows it -> size. The first axis varies slowest.
        kv_heads: The number of key/value heads of the model.
        why: The reason why this shape was chosen, for the log.
    """
    names, sizes = mesh_axes(shape, kv_heads)
    return Layout(Mesh(arrange_devices(devices, sizes), tuple(names)), why)


def abstract_layout(shape: Mapping[str, int], kv_heads: int) -> Layout:
    """Returns the layout of a mesh without devices. See `build_layout` for the arguments."""
    names, sizes = mesh_axes(shape, kv_heads)
    return Layout(AbstractMesh(tuple(sizes), tuple(names)))


def mesh_axes(shape: Mapping[str, int], kv_heads: int) -> tuple[list[str], list[int]]:
    """Returns the names and the sizes of the axes of JAX's mesh.

    `model` is split as many ways over heads as the key/value heads allow, and the rest over
    queries.

    Args:
        shape: Mesh axis as the user knows it -> size.
        kv_heads: The number of key/value heads of the model.
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
    """Returns the devices as an array with the axes of a mesh.

    JAX arranges the TPUs of a slice so that devices along an axis are joined by links, if every
    axis of the mesh can be whole axes of the slice. Its arrangement is taken only if it keeps the
    devices of every host together, since otherwise the rows of a host would be computed by other
    hosts' devices. Elsewhere the devices stay in their order.

    Args:
        devices: The devices, ordered by host.
        sizes: The size of every axis. The first axis varies slowest.
    """
    in_order = np.array(devices, object).reshape(sizes)
    slices = {getattr(device, "slice_index", 0) for device in devices}
    has_coordinates = all(hasattr(device, "coords") for device in devices)
    if devices[0].platform != "tpu" or len(slices) > 1 or not has_coordinates:
        return in_order
    try:
        arranged = mesh_utils.create_device_mesh(sizes, devices)
    except (NotImplementedError, AssertionError):
        # An axis of the mesh would be a part of an axis of the slice, and the squares that hosts
        # have are better than such parts; or the devices, such as one of each host, are no cuboid.
        return in_order
    return arranged if _keeps_hosts_together(arranged) else in_order


def _keeps_hosts_together(arranged: np.ndarray) -> bool:
    """Returns whether the devices of every host follow one another, the last axis fastest."""
    hosts = [device.process_index for device in arranged.flat]
    return len([*groupby(hosts)]) == len(set(hosts))


def in_words(shape: Mapping[str, int]) -> str:
    """Returns a mesh in words, such as `data 4 x fsdp 2`.

    Args:
        shape: Mesh axis -> size.
    """
    return " x ".join(f"{axis} {size}" for axis, size in shape.items())
