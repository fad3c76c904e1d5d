"""This module builds the mesh from the flags and the devices, and says how arrays lie on it.

The model and the step name logical axes only; `RULES` maps them to mesh axes, and an axis that the
mesh lacks drops out. Users know the mesh axes pipeline, data, fsdp, expert and model. Inside,
`model` is two axes: `model` proper, along which attention heads are split, and `query`, along which
the queries of a row are split where the key/value heads do not divide further; all else uses both
alike.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from activation_extraction.common.choices import MESH_AXES
from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.visible import counted
from activation_extraction.model.attention import Attention, Segments
from activation_extraction.model.hooks import Form

PINNED_ON = ("gpu",)  # platforms
DEFAULT_3D_DEVICES = 64
DEFAULT_3D_AXES = ("pipeline", "data", "model")
DEFAULT_2D_AXES = ("data", "model")
BOTH = ("model", "query")
RULES: dict[str, tuple[str, ...]] = {
    # These are axes of weights,
    "layers": ("pipeline",),
    "embed": ("fsdp",),
    "heads": ("model",),
    "kv_heads": ("model",),
    "key_heads": BOTH,
    "mlp": BOTH,
    "experts": ("expert",),
    "vocab": BOTH,
    "head_vocab": (*BOTH, "pipeline"),
    # and these of activations.
    "stage": ("pipeline",),
    "batch": ("data", "fsdp", "expert"),
    "fsdp_batch": ("data", "expert"),  # every device along fsdp has the rows of all
    "query_sequence": ("query",),
    "captured_sequence": BOTH,
    "leaving_sequence": (*BOTH, "pipeline"),
}


@dataclass(frozen=True)
class Layout:
    """A mesh with its rules. Without a mesh (one device, shapes only) it does nothing.

    An abstract mesh knows its axes and no devices. why: for the log, why it was chosen.
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
        """Returns the devices along a mesh axis in an order in which they send around a ring.

        TPUs that form a rectangle, two of them wide, are each beside the next one. Some cannot
        compute while they send to others.
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
        """Returns how an array with these logical axes is split, never along the mesh axis
        `without`. A dimension that does not divide is not split."""
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
        if self.mesh is None:
            return shape
        return self.sharding(axes, shape, without).shard_shape(shape)

    def constrain(self, x: Array, *axes: str, without: str | None = None) -> Array:
        """Says how `x` lies on the mesh at this point of the computation."""
        if self.mesh is None or self.mesh.size == 1:
            return x
        return lax.with_sharding_constraint(x, self.sharding(axes, x.shape, without))

    def gather(self, weight: Array, axes: Sequence[str]) -> Array:
        """Gathers a weight along fsdp just before its use; its split along the rest stays."""
        return weight if self.size("fsdp") == 1 else self.constrain(weight, *axes, without="fsdp")

    def per_device(
        self,
        function: Callable[..., Array],
        arrays: Sequence[Array],
        axes: Sequence[Sequence[str]],
        like: int,
    ) -> Array:
        """Runs `function` on every device with its own part of the arrays, whose axes are given.

        like: the number of the array that has the shape and the axes of the result.
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
        """Runs `attention` on every device with its own rows, heads and queries."""

        def local(q: Array, k: Array, v: Array, *segments: Array) -> Array:
            split = self.size("query") > 1
            first = lax.axis_index("query") * q.shape[1] if split else 0
            return attention(q, k, v, Segments(*segments), first)

        queries = "batch", "query_sequence", "heads", "head_dim"
        keys = "batch", "sequence", "kv_heads", "head_dim"
        arrays = q, k, v, segment_ids, segment_ids
        return self.per_device(local, arrays, [queries, keys, keys, queries[:2], keys[:2]], like=0)


@dataclass(frozen=True)
class HostRows:
    """How rows come from the hosts, and how activations go back to them.

    The mesh has the same devices in the same order as the layout's, as hosts x devices of a host,
    so that one program uses both. Each host feeds its own rows and receives the activations of its
    own rows, with different rows or a different part of the sequence from every device.
    """

    mesh: Mesh

    @property
    def hosts(self) -> int:
        return self.mesh.shape["host"]

    def incoming(self) -> NamedSharding:
        """Returns the sharding of arrays whose first axis is the rows of all hosts."""
        return NamedSharding(self.mesh, PartitionSpec("host"))

    def outgoing(self, length: int, layout: Layout) -> NamedSharding:
        """Returns the sharding of activations (hooks, rows of all hosts, T, width).

        Devices that compute rows of their own keep those; else each gets another part of T.
        """
        if layout.size(*RULES["batch"]) == self.mesh.size:
            return NamedSharding(self.mesh, PartitionSpec(None, ("host", "device")))
        split = "device" if length % self.mesh.shape["device"] == 0 else None
        return NamedSharding(self.mesh, PartitionSpec(None, "host", split))

    def everywhere(self) -> NamedSharding:
        """Returns the sharding of values that every host needs."""
        return NamedSharding(self.mesh, PartitionSpec())

    def feed(self, array: np.ndarray) -> Array:
        """Turns this host's rows into the rows of all hosts."""
        shape = (array.shape[0] * self.hosts, *array.shape[1:])
        return jax.make_array_from_process_local_data(self.incoming(), array, shape)

    def receive(self, activations: Mapping[Form, Array]) -> dict[Form, np.ndarray]:
        """Returns the activations of this host's rows, {form: (hooks, B, T, width)}, as NumPy."""
        shards = {form: own_shards(array) for form, array in activations.items()}
        on_host = {form: [to_host(shard.data) for shard in own] for form, own in shards.items()}
        received = {}
        for form, (first, *others) in on_host.items():
            received[form] = np.asarray(first)
            if others:
                places = rows_and_tokens(shards[form])
                hooks, rows = len(first), max(rows.stop for rows, _ in places)
                received[form] = np.empty((hooks, rows, *activations[form].shape[2:]), first.dtype)
                for place, part in zip(places, (first, *others), strict=True):
                    received[form][:, *place] = part
        return received


def to_host(array: Array) -> Array:
    """Starts to copy an array to the host; returns the one to turn into NumPy's.

    That of a GPU is in pinned memory, which NumPy reads in place: an H100 copied 38 to 51 GB/s
    there, and 1.5 GB/s to other memory.
    """
    if next(iter(array.devices())).platform in PINNED_ON:
        return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
    array.copy_to_host_async()
    return array


def own_shards(array: Array) -> list[Any]:
    """Returns this host's shards of activations, one for each part that it has, in order."""
    starts = [tuple(part.start or 0 for part in x.index[1:3]) for x in array.addressable_shards]
    shards = dict(zip(starts, array.addressable_shards, strict=True))
    return [shards[start] for start in sorted(shards)]


def rows_and_tokens(shards: Sequence[Any]) -> list[tuple[slice, slice]]:
    """Returns which of this host's rows, and which of their tokens, each of its shards has.

    shards: all that the host has of activations (hooks, rows of all hosts, T, width).
    """
    starts = [shard.index[1].start or 0 for shard in shards]
    firsts = [start - min(starts) for start in starts]
    return [
        (slice(first, first + shard.data.shape[1]), shard.index[2])
        for first, shard in zip(firsts, shards, strict=True)
    ]


def in_words(shape: Mapping[str, int]) -> str:
    """Returns a mesh in words, such as `data 4 x fsdp 2`. shape: mesh axis -> size."""
    return " x ".join(f"{axis} {size}" for axis, size in shape.items())


def host_rows(devices: Sequence[Any]) -> HostRows:
    """Groups the devices by host. Raises InputError if hosts have different numbers of devices."""
    counts = Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} on host {host}" for host, count in sorted(counts.items()))
        raise InputError(
            f"hosts have different numbers of devices: {found}; expected the same on all"
        )
    return HostRows(Mesh(np.array(devices, object).reshape(len(counts), -1), ("host", "device")))


def build_layout(
    devices: Sequence[Any], shape: Mapping[str, int], kv_heads: int, why: str = ""
) -> Layout:
    """Builds the mesh with these axes over the devices in order, the first axis being the slowest.

    why: for the log, why this shape was chosen.
    """
    names, sizes = mesh_axes(shape, kv_heads)
    return Layout(Mesh(np.array(devices, object).reshape(sizes), tuple(names)), why)


def mesh_axes(shape: Mapping[str, int], kv_heads: int) -> tuple[list[str], list[int]]:
    """Returns the names and sizes of JAX's mesh axes.

    `model` is split into heads and queries: as many ways over heads as key/value heads allow.
    """
    heads, sizes = math.gcd(kv_heads, shape.get("model", 1)), dict[str, int]()
    for axis, size in shape.items():
        split = {"model": heads, "query": size // heads}
        sizes |= split if axis == "model" else {axis: size}
    return [*sizes], [*sizes.values()]


def check_divisibility(layout: Layout, rows: int, length: int, sizes: dict[str, int]) -> None:
    """Raises InputError if rows, tokens or widths do not divide among the devices.

    rows: of all hosts per step; sizes: letter -> size as in the model's configuration.
    """
    if "expert" in layout.shape and "E" not in sizes:
        raise InputError("--mesh_axes expert: the model has no experts")
    checks = (
        ("--batch_size, rows of all hosts together", rows, RULES["batch"]),
        ("--max_seq_length", length, ("query",)),
        ("intermediate_size", sizes.get("F", 0), BOTH),
        ("moe_intermediate_size", sizes.get("M", 0), BOTH),
        ("shared_expert_intermediate_size", sizes.get("P", 0), BOTH),
        ("num_experts", sizes.get("E", 0), ("expert",)),
        ("hidden_size", sizes["D"], ("fsdp",)),
    )
    for what, size, axes in checks:
        parts = layout.size(*axes)
        if size % parts:
            names = " x ".join(axes)
            raise InputError(
                f"{what}: {size} does not divide among {parts} devices ({names}); "
                "choose another --mesh_shape or size (--no_data_parallel uses one device)"
            )


def usable_devices(every: bool, devices: Sequence[Any] | None = None) -> list[Any]:
    """Returns all devices, ordered by host, or (not `every`) the first one of each host.

    devices: those of a machine that is only planned; None for JAX's. Raises InputError if JAX has
    none on the platform that the environment asks for.
    """
    try:
        devices = jax.devices() if devices is None else devices
        devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    except (RuntimeError, AssertionError) as error:
        reason = one_line(error)
        raise InputError(f"JAX finds no devices (JAX_PLATFORMS, drivers): {reason:.200}") from error
    firsts = {device.process_index: device for device in reversed(devices)}
    return devices if every else [firsts[index] for index in sorted(firsts)]


def own_devices(devices: Sequence[Any]) -> list[Any]:
    return [each for each in devices if each.process_index == jax.process_index()]


def choose_shape(
    kind: str | None,
    shape: Sequence[int] | None,
    axes: Sequence[str] | None,
    devices: int,
    hosts: int,
    automatic: Callable[[], tuple[dict[str, int], str]],
) -> tuple[dict[str, int], str]:
    """Returns mesh axis -> size for the flags of the mesh, and why it was chosen, or "".

    kind: --mesh_type; None if only a shape is given. automatic: chooses for `auto`. Raises
    InputError if a given shape does not fit the axes or the devices.
    """
    dimensions = {"1d": 1, "2d": 2, "3d": 3}.get(kind or "")
    if shape is not None:
        return _explicit(shape, axes, dimensions, devices), ""
    if axes is not None and dimensions != 3:
        raise InputError(f"--mesh_axes {','.join(axes)}: needs --mesh_shape")
    if kind == "auto":
        return automatic()
    if kind == "1d":
        return {"model": devices}, ""
    why = ""
    if kind == "3d":
        if devices >= DEFAULT_3D_DEVICES and devices % 16 == 0:
            names = tuple(axes or DEFAULT_3D_AXES)
            if len(names) != 3:
                raise InputError(f"--mesh_axes {','.join(names)}: a 3d mesh has three axes")
            # Two axes get four devices; the one that splits only rows, or the first, gets the rest.
            rest = next(axis for axis in ("data", "fsdp", names[0]) if axis in names)
            return {name: devices // 16 if name == rest else 4 for name in names}, ""
        why = (
            f"a 3d mesh needs a multiple of 16 devices, {DEFAULT_3D_DEVICES} or more, or "
            f"--mesh_shape; {counted(devices, 'device')} become a 2d mesh"
        )
    data = hosts if hosts > 1 else (2 if devices >= 8 and devices % 2 == 0 else 1)
    return {"data": data, "model": devices // data}, why


def _explicit(
    shape: Sequence[int], axes: Sequence[str] | None, dimensions: int | None, devices: int
) -> dict[str, int]:
    text = ",".join(map(str, shape))
    if dimensions is not None and len(shape) != dimensions:
        raise InputError(
            f"--mesh_shape {text}: has {len(shape)} axes, --mesh_type has {dimensions}"
        )
    defaults = {1: ("model",), 2: DEFAULT_2D_AXES, 3: DEFAULT_3D_AXES}
    names = tuple(axes or defaults.get(len(shape), MESH_AXES))
    if len(names) != len(shape):
        raise InputError(f"--mesh_shape {text}: has {len(shape)} axes, --mesh_axes {len(names)}")
    if math.prod(shape) != devices:
        factors = [n for n in range(1, devices + 1) if devices % n == 0]
        shapes = [s for s in product(factors, repeat=len(shape)) if math.prod(s) == devices]
        shapes.sort(key=lambda s: (max(s) - min(s), s))  # the most even shapes come first
        fitting = "; ".join(",".join(map(str, s)) for s in shapes[:8])
        raise InputError(
            f"--mesh_shape {text}: is {counted(math.prod(shape), 'device')}, there are {devices}; "
            f"these would fit: {fitting}"
        )
    return dict(zip(names, shape, strict=True))
