"""Brings rows from the hosts to the mesh, and activations back to the hosts.

Each host feeds the token ids of its own rows and receives the activations of its own rows, with any
mesh. `HostRows` has the shardings for both directions; the functions below it copy the shards of a
host into NumPy arrays. mesh.py determines the shardings during the computation, and kept.py
receives activations if only some tokens of the rows are kept.

Letters: B rows of a host, T tokens per row.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from activation_extraction.common.errors import InputError
from activation_extraction.model.hooks import VectorType
from activation_extraction.model.mesh import RULES, Layout

PINNED_ON = ("gpu",)  # platforms from which arrays are copied through pinned memory


@dataclass(frozen=True)
class HostRows:
    """The shardings of the rows that hosts feed and of the activations that they receive.

    Attributes:
        mesh: Mesh with the axes "host" and "device" (of a host). Its devices are those of the
            layout in the same order, so that a program can use both.
    """

    mesh: Mesh

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.mesh.shape["host"]

    def incoming(self) -> NamedSharding:
        """Returns the sharding of arrays whose first axis is the rows of all hosts."""
        return NamedSharding(self.mesh, PartitionSpec("host"))

    def outgoing(self, length: int, layout: Layout) -> NamedSharding:
        """Returns the sharding of activations (hooks, rows of all hosts, T, width).

        If each device computes rows of its own, it keeps them. Otherwise each device of a host gets
        a part of T for all rows of the host, or all of T if the number of devices does not divide
        T.

        Args:
            length: T.
            layout: The layout of the computation.
        """
        if layout.size(*RULES["batch"]) == self.mesh.size:
            return NamedSharding(self.mesh, PartitionSpec(None, ("host", "device")))
        split = "device" if length % self.mesh.shape["device"] == 0 else None
        return NamedSharding(self.mesh, PartitionSpec(None, "host", split))

    def everywhere(self) -> NamedSharding:
        """Returns the sharding of arrays that all devices have whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def feed(self, array: np.ndarray) -> Array:
        """Passes rows to the devices. All hosts must call this together.

        Args:
            array: The rows of this host, (rows, ...), as many as each other host has.

        Returns:
            The rows of all hosts as one array, sharded as `incoming` says.
        """
        shape = (array.shape[0] * self.hosts, *array.shape[1:])
        return jax.make_array_from_process_local_data(self.incoming(), array, shape)

    def receive(self, activations: Mapping[VectorType, Array]) -> dict[VectorType, np.ndarray]:
        """Copies the activations of this host's rows to the host.

        Args:
            activations: Vector type -> the values of its hooks, (hooks, rows of all hosts, T,
                width), sharded as `outgoing` says.

        Returns:
            Vector type -> the values of its hooks, (hooks, B, T, width).
        """
        shards = {vector_type: shards_of_host(array) for vector_type, array in activations.items()}
        # All copies are started before the first one is awaited.
        copies = {}
        for vector_type, shards_of_type in shards.items():
            copies[vector_type] = [to_host(shard.data) for shard in shards_of_type]
        received = {}
        for vector_type, parts in copies.items():
            if len(parts) == 1:
                received[vector_type] = np.asarray(parts[0])
                continue
            places = rows_and_tokens(shards[vector_type])
            hooks = len(parts[0])
            num_rows = max(rows.stop for rows, _ in places)
            shape = (hooks, num_rows, *activations[vector_type].shape[2:])
            received[vector_type] = np.empty(shape, parts[0].dtype)
            for (rows, tokens), part in zip(places, parts, strict=True):
                received[vector_type][:, rows, tokens] = part
        return received


def count_hosts(devices: Sequence[Any]) -> int:
    """Returns the number of hosts that have these devices.

    Raises:
        InputError: The hosts have different numbers of devices.
    """
    counts = Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{count} on host {host}" for host, count in sorted(counts.items()))
        raise InputError(
            f"hosts have different numbers of devices: {numbers}; expected the same on all"
        )
    return len(counts)


def host_rows(layout: Layout) -> HostRows:
    """Groups the devices of a layout by host. Raises InputError as `count_hosts` does."""
    assert isinstance(layout.mesh, Mesh)
    devices = layout.mesh.devices
    by_host = devices.reshape(count_hosts([*devices.flat]), -1)
    return HostRows(Mesh(by_host, ("host", "device")))


def to_host(array: Array) -> Array:
    """Starts to copy an array to the host, and returns the array to pass to np.asarray.

    The returned array of a GPU is in pinned memory, which NumPy reads in place. An H100 copied 38
    to 51 GB/s to pinned memory, and 1.5 GB/s to other memory.
    """
    if next(iter(array.devices())).platform in PINNED_ON:
        return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
    array.copy_to_host_async()
    return array


def shards_of_host(array: Array) -> list[Any]:
    """Returns this host's shards of activations, ordered by row and token, without duplicates.

    Args:
        array: Activations (hooks, rows of all hosts, T, width).
    """
    shards = {}  # by the first row and token; shards with the same ones are equal
    for shard in array.addressable_shards:
        rows, tokens = shard.index[1:3]
        shards[rows.start or 0, tokens.start or 0] = shard
    return [shards[start] for start in sorted(shards)]


def rows_and_tokens(shards: Sequence[Any]) -> list[tuple[slice, slice]]:
    """Returns the position of each shard in the activations of this host's rows.

    Args:
        shards: All shards of this host, of activations (hooks, rows of all hosts, T, width).

    Returns:
        For each shard, its rows, counted from the first row of this host, and its tokens.
    """
    starts = [shard.index[1].start or 0 for shard in shards]
    places = []
    for start, shard in zip(starts, shards, strict=True):
        first = start - min(starts)
        places.append((slice(first, first + shard.data.shape[1]), shard.index[2]))
    return places
