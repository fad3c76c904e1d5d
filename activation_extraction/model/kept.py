"""Copies the activations of only the kept tokens of a batch from the devices to the host.

The kept tokens are the tokens whose activations are stored. A host knows the kept tokens of its
rows before the step. After the step, each device of the host gathers the activations of its kept
tokens in blocks of a fixed number of tokens. All batches use the same compiled program, which
gathers one block on each device. The host runs this program until the device with the most kept
tokens has gathered all of them. Devices of other hosts do not take part.

If all tokens are kept, host_rows.py copies the activations instead.

Hooks whose values have the same width and dtype share one array. The pair of this width and dtype
is called the vector type of the hooks (`hooks.VectorType`).

Letters: B rows of this host, T tokens per row, N tokens in a block of a device.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from activation_extraction.model.hooks import VectorType
from activation_extraction.model.host_rows import rows_and_tokens, shards_of_host, to_host

# A device gathers its kept tokens of a batch in blocks, and each block takes one call of `take`.
# This is the largest number of blocks, which is reached if all tokens are kept. So a block has room
# for the number of all tokens on the device divided by MAX_BLOCKS. With a larger number, blocks
# would contain less padding, but `take` would be called more often.
MAX_BLOCKS = 16


class KeptBlock(NamedTuple):
    """The activations of up to N kept tokens from each device of this host.

    N is the same number for all blocks of a batch.

    Attributes:
        activations: Vector type -> activations at the hooks of this type (a width and a dtype),
            (hooks, devices * N, width).
        indices_in_block: Indices of the kept tokens on the second axis of `activations`. The values
            at other indices are padding.
        indices_among_kept: For each index in `indices_in_block`, the index of the token among all
            kept tokens of this host's rows, ordered by row and position.
    """

    activations: dict[VectorType, Array]
    indices_in_block: np.ndarray
    indices_among_kept: np.ndarray


class KeptTokens(NamedTuple):
    """The activations of a batch's kept tokens, which the devices may still be gathering.

    Attributes:
        blocks: Blocks that together contain all kept tokens.
        shape_of_type: Vector type (a width and a dtype) -> shape of the activations at the hooks of
            this type: (hooks, kept tokens of the batch, width).
    """

    blocks: list[KeptBlock]
    # Vector type (a width and a dtype) -> shape of the activations at the hooks of this type:
    # (hooks, kept tokens of the batch, width).
    shape_of_type: dict[VectorType, tuple[int, int, int]]

    def receive(self) -> dict[VectorType, np.ndarray]:
        """Copies the activations to the host, and waits for them.

        Returns:
            Vector type -> activations at the hooks of this type (a width and a dtype), (hooks, kept
            tokens of the batch, width). The tokens are ordered by row and position.
        """
        # All copies are started before the first copy is awaited, so that they overlap.
        host_copies_of_blocks = [
            jax.tree.map(to_host, kept_block.activations) for kept_block in self.blocks
        ]
        received_array_of_type = {
            vector_type: np.empty(received_shape, vector_type.dtype)
            for vector_type, received_shape in self.shape_of_type.items()
        }
        for kept_block, host_copies_of_block in zip(
            self.blocks, host_copies_of_blocks, strict=True
        ):
            for vector_type, copied_block in host_copies_of_block.items():
                # Values are copied as integers, because NumPy is slow with ml_dtypes' dtypes.
                bits_dtype = f"uint{8 * copied_block.dtype.itemsize}"
                kept_bits = np.asarray(copied_block).view(bits_dtype)[
                    :, kept_block.indices_in_block
                ]
                received_array_of_type[vector_type].view(bits_dtype)[
                    :, kept_block.indices_among_kept
                ] = kept_bits
        return received_array_of_type


def take_kept(activations: Mapping[VectorType, Array], kept: np.ndarray) -> KeptTokens:
    """Starts to gather the activations of kept tokens, without waiting for the devices.

    Args:
        activations: Vector type (a width and a dtype) -> activations at its hooks, (hooks, rows of
            all hosts, T, width), with the sharding of `HostRows.outgoing`.
        kept: The mask of the kept tokens of this host's rows, (B, T) bool.

    Returns:
        The activations that are being gathered. `KeptTokens.receive` waits for them.
    """
    device_shards_of_type = {
        vector_type: shards_of_host(stacked_activations)
        for vector_type, stacked_activations in activations.items()
    }
    # The arrays of all vector types are split alike: their parts on a device have the same rows and
    # tokens.
    shards_of_first_type = next(iter(device_shards_of_type.values()))
    host_mesh = Mesh(
        np.array([device_shard.device for device_shard in shards_of_first_type]), ("device",)
    )
    index_sharding = NamedSharding(host_mesh, PartitionSpec("device"))
    host_array_of_type = {
        vector_type: _array_of_host(host_mesh, shards_of_type)
        for vector_type, shards_of_type in device_shards_of_type.items()
    }
    kept_blocks = []
    for block_plan in _block_plans(kept, rows_and_tokens(shards_of_first_type)):
        device_token_indices = jax.device_put(block_plan.device_token_indices, index_sharding)
        gathered_array_of_type = {
            vector_type: take(host_mesh, host_array, device_token_indices)
            for vector_type, host_array in host_array_of_type.items()
        }
        kept_blocks.append(
            KeptBlock(
                gathered_array_of_type, block_plan.indices_in_block, block_plan.indices_among_kept
            )
        )
    num_kept_tokens = int(kept.sum())
    received_shape_of_type = {
        vector_type: (len(activations_of_type), num_kept_tokens, activations_of_type.shape[-1])
        for vector_type, activations_of_type in activations.items()
    }
    return KeptTokens(kept_blocks, received_shape_of_type)


class _BlockPlan(NamedTuple):
    """The tokens that one block will contain, as indices.

    A block contains up to N kept tokens from each device of this host.

    Attributes:
        device_token_indices: Indices of the tokens that each device gathers, (devices, N) int32,
            padded with zeros. An index counts the tokens in the device's part of the rows, row by
            row, from 0.
        indices_in_block: Indices of the kept tokens in the gathered block of all devices, where
            device d has the indices from d * N. The other indices are padding.
        indices_among_kept: For each index in `indices_in_block`, the index of the token among all
            kept tokens of this host's rows.
    """

    device_token_indices: np.ndarray
    indices_in_block: np.ndarray
    indices_among_kept: np.ndarray


def _block_plans(
    kept: np.ndarray, slices_of_devices: Sequence[tuple[slice, slice]]
) -> Iterator[_BlockPlan]:
    """Divides the kept tokens of a batch into blocks, and yields the tokens of each block.

    A block contains at most N kept tokens of each device of this host. N is the number of tokens on
    a device divided by MAX_BLOCKS, rounded up. The first block contains the first N kept tokens of
    every device, the next block the next N, and so on.

    Args:
        kept: The mask of the kept tokens of this host's rows, (B, T) bool.
        slices_of_devices: For each device of this host, a tuple of the slice of its rows and the
            slice of its tokens in these rows.

    Yields:
        The plan of the block, which consists of indices of its tokens.
    """
    index_among_kept_of_token = np.cumsum(kept).reshape(kept.shape) - 1
    kept_token_indices_of_devices = [
        np.flatnonzero(kept[device_slices]) for device_slices in slices_of_devices
    ]
    indices_among_kept_of_devices = [
        index_among_kept_of_token[device_slices][kept[device_slices]]
        for device_slices in slices_of_devices
    ]
    tokens_per_device = kept[slices_of_devices[0]].size
    tokens_per_block = -(-tokens_per_device // MAX_BLOCKS)
    for block_start in range(0, max(map(len, kept_token_indices_of_devices)), tokens_per_block):
        block_stop = block_start + tokens_per_block
        device_token_indices = np.zeros((len(slices_of_devices), tokens_per_block), np.int32)
        indices_in_block_of_devices = []
        indices_among_kept_tokens = []
        for device_number, kept_token_indices in enumerate(kept_token_indices_of_devices):
            num_block_tokens = len(kept_token_indices[block_start:block_stop])
            device_token_indices[device_number, :num_block_tokens] = kept_token_indices[
                block_start:block_stop
            ]
            indices_in_block_of_devices.append(
                device_number * tokens_per_block + np.arange(num_block_tokens)
            )
            indices_among_kept_tokens.append(
                indices_among_kept_of_devices[device_number][block_start:block_stop]
            )
        yield _BlockPlan(
            device_token_indices,
            np.concatenate(indices_in_block_of_devices),
            np.concatenate(indices_among_kept_tokens),
        )


def _array_of_host(mesh: Mesh, shards: list[Any]) -> Array:
    """Returns the activations on this host's devices as one array, without copying them.

    A shard is the part of the activations on one device. The shards are joined along the axis of
    tokens, even if they contain different rows. So the result is no meaningful array of rows. It
    only serves as an argument of the function `take`, which reads each shard on its own device.

    Args:
        mesh: The devices of this host, with the axis "device".
        shards: The shard of each device, (hooks, rows, tokens, width), all of the same shape.
    """
    num_hooks, num_rows, tokens_per_row, width = shards[0].data.shape
    token_sharding = NamedSharding(mesh, PartitionSpec(None, None, "device"))
    host_array_shape = num_hooks, num_rows, tokens_per_row * len(shards), width
    shard_arrays = [shard.data for shard in shards]
    return jax.make_array_from_single_device_arrays(host_array_shape, token_sharding, shard_arrays)


@partial(jax.jit, static_argnums=0)
def take(mesh: Mesh, activations: Array, device_token_indices: Array) -> Array:
    """Gathers the activations of some tokens on each device.

    Args:
        mesh: The devices of this host, with the axis "device".
        activations: The activations, (hooks, rows, tokens, width), of which each device has a part
            of the tokens.
        device_token_indices: The indices of the N tokens that each device gathers, (devices, N)
            int32. An index counts the tokens in the device's part row by row, from 0.

    Returns:
        The gathered activations, (hooks, devices * N, width). The tokens of the first device come
        first.
    """

    def take_on_device(device_part: Array, token_indices: Array) -> Array:
        num_hooks, num_rows, tokens_per_row, width = device_part.shape
        # `device_part` is reshaped to a table of vectors, (hooks * rows * tokens, width), and its
        # rows are taken by their indices, as in an embedding. If `device_part` were indexed along
        # its axes of rows and tokens instead, XLA would copy all of it.
        flat_vector_indices = (
            jnp.arange(num_hooks)[:, None] * (num_rows * tokens_per_row) + token_indices
        )
        vector_table = device_part.reshape(-1, width)
        taken_vectors = jnp.take(vector_table, flat_vector_indices.reshape(-1), axis=0, mode="clip")
        return taken_vectors.reshape(num_hooks, -1, width)

    take_on_devices = jax.shard_map(
        take_on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(None, None, "device"), PartitionSpec("device")),
        out_specs=PartitionSpec(None, "device"),
    )
    return take_on_devices(activations, device_token_indices)
