"""Passes rows from the hosts to the devices of a mesh, and activations back to the hosts.

Each host feeds the token ids of its own rows and receives the activations of its own rows, with any
mesh. `HostRows` determines the shardings for both directions, and copies activations to NumPy
arrays. mesh.py determines the shardings during the computation. If the activations of only some
tokens are stored, kept.py receives them.

In this module, a device part is the part of an array that is on one device (`jax.Shard`).

Hooks whose values have the same width and dtype share one array (see `hooks.WidthAndDtype`).

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
from activation_extraction.model.hooks import WidthAndDtype
from activation_extraction.model.mesh import RULES, Layout

# Names of the JAX platforms from whose devices `to_host` copies arrays to pinned host memory.
PINNED_ON = ("gpu",)


@dataclass(frozen=True)
class HostRows:
    """The shardings of the rows that hosts feed and of the activations that they receive.

    Attributes:
        mesh: Mesh with the axes "host" and "device". The second axis contains the devices of a
            host. The mesh has the same devices in the same order as the mesh of the computation, so
            that a program can use both meshes.
    """

    mesh: Mesh

    @property
    def num_hosts(self) -> int:
        """The number of hosts whose devices are in the mesh."""
        return self.mesh.shape["host"]

    def incoming(self) -> NamedSharding:
        """Returns the sharding of the arrays that the hosts feed to the model.

        The first axis of these arrays has the rows of all hosts. Each device has all rows of its
        host.
        """
        return NamedSharding(self.mesh, PartitionSpec("host"))

    def outgoing(self, length: int, layout: Layout) -> NamedSharding:
        """Returns the sharding of the arrays in which the model returns activations at hooks.

        The shape of these arrays is (hooks, rows of all hosts, T, width). If each device computes
        rows of its own, the activations are split by rows, and each device has the activations of
        its rows. Otherwise the activations of a host's rows are split by tokens over the devices of
        the host if T is divisible by the number of these devices. If T is not divisible by it, each
        device of the host has a copy of the activations of all tokens of the host's rows.

        Args:
            length: T, the number of tokens per row.
            layout: The layout of the computation's mesh.
        """
        if layout.size(*RULES["batch"]) == self.mesh.size:
            return NamedSharding(self.mesh, PartitionSpec(None, ("host", "device")))
        mesh_axis_of_tokens = "device" if length % self.mesh.shape["device"] == 0 else None
        return NamedSharding(self.mesh, PartitionSpec(None, "host", mesh_axis_of_tokens))

    def everywhere(self) -> NamedSharding:
        """Returns a sharding with which each device has a copy of the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())

    def feed(self, array: np.ndarray) -> Array:
        """Copies the rows of this host to its devices, as a part of the array of all hosts' rows.

        All hosts must call this method together.

        Args:
            array: The rows of this host, (B, ...). All hosts have the same number of rows.

        Returns:
            The rows of all hosts as one array, (rows of all hosts, ...). The devices of each host
            hold the rows of their host.
        """
        shape_of_all_rows = (array.shape[0] * self.num_hosts, *array.shape[1:])
        return jax.make_array_from_process_local_data(self.incoming(), array, shape_of_all_rows)

    def receive(
        self, activations_by_width_and_dtype: Mapping[WidthAndDtype, Array]
    ) -> dict[WidthAndDtype, np.ndarray]:
        """Copies the activations of this host's rows from its devices to the host.

        Args:
            activations_by_width_and_dtype: Width and dtype -> activations at the hooks with this
                width and dtype, (hooks, rows of all hosts, T, width). They have the sharding that
                the method `outgoing` returns: the devices of each host together hold the
                activations of the host's rows.

        Returns:
            Width and dtype -> activations of this host's rows at the hooks with this width and
            dtype, (hooks, B, T, width).
        """
        device_parts_by_width_and_dtype = {
            width_and_dtype: device_parts_of_host(activations_of_hooks)
            for width_and_dtype, activations_of_hooks in activations_by_width_and_dtype.items()
        }
        # All copies are started before the first copy is awaited, so that they overlap.
        copied_parts_by_width_and_dtype = {}
        for width_and_dtype, device_parts in device_parts_by_width_and_dtype.items():
            copied_parts_by_width_and_dtype[width_and_dtype] = [
                to_host(device_part.data) for device_part in device_parts
            ]
        received_array_by_width_and_dtype: dict[WidthAndDtype, np.ndarray] = {}
        for width_and_dtype, copied_parts in copied_parts_by_width_and_dtype.items():
            if len(copied_parts) == 1:
                received_array_by_width_and_dtype[width_and_dtype] = np.asarray(copied_parts[0])
                continue
            row_and_token_slices = rows_and_tokens(device_parts_by_width_and_dtype[width_and_dtype])
            num_hooks = len(copied_parts[0])
            num_rows = max(row_slice.stop for row_slice, _ in row_and_token_slices)
            received_shape = (
                num_hooks,
                num_rows,
                *activations_by_width_and_dtype[width_and_dtype].shape[2:],
            )
            received_array_by_width_and_dtype[width_and_dtype] = np.empty(
                received_shape, copied_parts[0].dtype
            )
            for (row_slice, token_slice), copied_part in zip(
                row_and_token_slices, copied_parts, strict=True
            ):
                received_array_by_width_and_dtype[width_and_dtype][:, row_slice, token_slice] = (
                    copied_part
                )
        return received_array_by_width_and_dtype


def count_hosts(devices: Sequence[Any]) -> int:
    """Returns the number of hosts to which devices belong.

    Args:
        devices: The devices of one or several hosts, in any order.

    Raises:
        InputError: If the hosts have different numbers of these devices.
    """
    device_count_by_host = Counter(device.process_index for device in devices)
    if len(set(device_count_by_host.values())) > 1:
        device_counts_text = ", ".join(
            f"{device_count} on host {host_number}"
            for host_number, device_count in sorted(device_count_by_host.items())
        )
        raise InputError(
            f"hosts have different numbers of devices: {device_counts_text}; expected the same on "
            "all"
        )
    return len(device_count_by_host)


def host_rows(layout: Layout) -> HostRows:
    """Makes the `HostRows` of a mesh, which passes rows and activations between hosts and devices.

    Args:
        layout: The layout of the mesh, which must have devices (not an abstract mesh).

    Returns:
        An object with the same devices, ordered by host. It has the sharding with which hosts feed
        their rows, the sharding with which they receive their activations, and a function that
        copies the activations to NumPy arrays.

    Raises:
        InputError: If the hosts have different numbers of devices in the mesh. The devices then
            form no array with one row per host.
    """
    assert isinstance(layout.mesh, Mesh)
    mesh_devices = layout.mesh.devices
    devices_of_hosts = mesh_devices.reshape(count_hosts([*mesh_devices.flat]), -1)
    return HostRows(Mesh(devices_of_hosts, ("host", "device")))


def to_host(array: Array) -> Array:
    """Starts to copy an array from a device to the host, without waiting for the copy.

    Arrays of GPUs are copied to pinned memory of the host, because that is faster. An H100 copied
    38 to 51 GB/s to pinned memory, and 1.5 GB/s to other memory.

    Args:
        array: The array, on devices of this host.

    Returns:
        An array with the same values as `array`. `numpy.asarray` of this array waits for the copy
        and returns the values.
    """
    if next(iter(array.devices())).platform in PINNED_ON:
        return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
    array.copy_to_host_async()
    return array


def device_parts_of_host(activations: Array) -> list[Any]:
    """Returns the parts of the activations on this host's devices, ordered by row and token.

    Each part is a `jax.Shard`, which contains the activations on one device. If several devices
    have the same rows and tokens, only one of their parts is returned.

    Args:
        activations: The activations, (hooks, rows of all hosts, T tokens per row, width).
    """
    # (Index of the first row, index of the first token) -> the part of the array on one
    # device that begins there.
    device_part_by_first_indices = {}
    for device_part in activations.addressable_shards:
        row_slice, token_slice = device_part.index[1:3]
        first_row_index = row_slice.start or 0
        first_token_index = token_slice.start or 0
        device_part_by_first_indices[first_row_index, first_token_index] = device_part
    return [
        device_part_by_first_indices[first_indices]
        for first_indices in sorted(device_part_by_first_indices)
    ]


def rows_and_tokens(device_parts: Sequence[Any]) -> list[tuple[slice, slice]]:
    """Returns the rows and the tokens of this host that each device part contains.

    A device part is the part of the activations that is on one device (`jax.Shard`).

    Args:
        device_parts: All device parts of the activations on this host's devices. The shape of the
            whole activations is (hooks, rows of all hosts, T tokens per row, width).

    Returns:
        A tuple of two slices for each device part: its rows, counted from the first row of this
        host, and its tokens in each of these rows.
    """
    first_row_indices = [device_part.index[1].start or 0 for device_part in device_parts]
    first_row_index_of_host = min(first_row_indices)
    row_and_token_slices = []
    for first_row_index, device_part in zip(first_row_indices, device_parts, strict=True):
        first_row_index_in_host = first_row_index - first_row_index_of_host
        num_rows = device_part.data.shape[1]
        row_slice = slice(first_row_index_in_host, first_row_index_in_host + num_rows)
        row_and_token_slices.append((row_slice, device_part.index[2]))
    return row_and_token_slices
