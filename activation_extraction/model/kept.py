"""Copies the activations of only the kept tokens of a batch from the devices to the host.

The kept tokens are the tokens whose activations are stored. A host knows the kept tokens of its
rows before the step. After the step, each device of the host gathers the activations of its kept
tokens in blocks of a fixed number of tokens. All batches use the same compiled program, which
gathers one block on each device. The host runs this program until the device with the most kept
tokens has gathered all of them. Devices of other hosts do not take part.

If all tokens are kept, host_rows.py copies the activations instead.

Hooks whose values have the same width and dtype share one array (see `hooks.WidthAndDtype`).

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

from activation_extraction.model.hooks import WidthAndDtype
from activation_extraction.model.host_rows import device_parts_of_host, rows_and_tokens, to_host

# A device gathers its kept tokens of a batch in blocks, with one call of `gather_tokens` per block.
# MAX_BLOCKS is the largest number of blocks, which is reached if all tokens are kept. So a block
# has room for the number of all tokens on the device divided by MAX_BLOCKS. If MAX_BLOCKS were
# larger, blocks would contain less padding, but `gather_tokens` would be called more often.
MAX_BLOCKS = 16


class KeptBlock(NamedTuple):
    """The activations of up to N kept tokens from each device of this host.

    N is the same number for all blocks of a batch.

    Attributes:
        activations_by_width_and_dtype: Width and dtype -> activations at the hooks with this width
            and dtype, (hooks, devices * N, width).
        token_indices_in_block: Indices of the kept tokens on the second axis of the activations,
            (kept tokens of the block,) int. The values at other indices are padding.
        kept_token_numbers: For each index in `token_indices_in_block`, the number of the kept
            token, (kept tokens of the block,) int. The kept tokens of this host's rows are numbered
            from 0, ordered by row and position.
    """

    activations_by_width_and_dtype: dict[WidthAndDtype, Array]
    token_indices_in_block: np.ndarray
    kept_token_numbers: np.ndarray


class KeptTokens(NamedTuple):
    """The activations of a batch's kept tokens, which the devices may still be gathering.

    Attributes:
        blocks: Blocks that together contain all kept tokens.
        shape_by_width_and_dtype: Width and dtype -> shape of the activations at the hooks with this
            width and dtype: (hooks, kept tokens of this host's rows, width).
    """

    blocks: list[KeptBlock]
    shape_by_width_and_dtype: dict[WidthAndDtype, tuple[int, int, int]]

    def receive(self) -> dict[WidthAndDtype, np.ndarray]:
        """Copies the activations to the host, and waits for them.

        Returns:
            Width and dtype -> activations at the hooks with this width and dtype, (hooks, kept
            tokens of this host's rows, width). The tokens are ordered by row and position.
        """
        # All copies are started before the first copy is awaited, so that they overlap.
        host_copies_of_blocks = [
            jax.tree.map(to_host, kept_token_block.activations_by_width_and_dtype)
            for kept_token_block in self.blocks
        ]
        received_array_by_width_and_dtype = {
            width_and_dtype: np.empty(received_shape, width_and_dtype.dtype)
            for width_and_dtype, received_shape in self.shape_by_width_and_dtype.items()
        }
        for kept_token_block, host_copy_by_width_and_dtype in zip(
            self.blocks, host_copies_of_blocks, strict=True
        ):
            for width_and_dtype, copied_array in host_copy_by_width_and_dtype.items():
                # Values are copied as integers, because NumPy is slow with ml_dtypes' dtypes.
                bits_dtype = f"uint{8 * copied_array.dtype.itemsize}"
                kept_bits = np.asarray(copied_array).view(bits_dtype)[
                    :, kept_token_block.token_indices_in_block
                ]
                received_array_by_width_and_dtype[width_and_dtype].view(bits_dtype)[
                    :, kept_token_block.kept_token_numbers
                ] = kept_bits
        return received_array_by_width_and_dtype


def take_kept(
    activations_by_width_and_dtype: Mapping[WidthAndDtype, Array], kept_mask: np.ndarray
) -> KeptTokens:
    """Starts to gather the activations of kept tokens, without waiting for the devices.

    Args:
        activations_by_width_and_dtype: Width and dtype -> activations at the hooks with this width
            and dtype, (hooks, rows of all hosts, T, width). Their sharding is the result of
            `HostRows.outgoing`.
        kept_mask: The mask of the kept tokens of this host's rows, (B, T) bool.

    Returns:
        The activations that are being gathered. `KeptTokens.receive` waits for them.
    """
    device_parts_by_width_and_dtype = {
        width_and_dtype: device_parts_of_host(activations_of_hooks)
        for width_and_dtype, activations_of_hooks in activations_by_width_and_dtype.items()
    }
    # The arrays of activations are split alike: their parts on a device have the same rows and
    # tokens.
    device_parts_of_first_array = next(iter(device_parts_by_width_and_dtype.values()))
    host_mesh = Mesh(
        np.array([device_part.device for device_part in device_parts_of_first_array]),
        ("device",),
    )
    index_sharding = NamedSharding(host_mesh, PartitionSpec("device"))
    host_array_by_width_and_dtype = {
        width_and_dtype: _array_of_host(host_mesh, device_parts)
        for width_and_dtype, device_parts in device_parts_by_width_and_dtype.items()
    }
    kept_token_blocks: list[KeptBlock] = []
    for block_plan in _block_plans(kept_mask, rows_and_tokens(device_parts_of_first_array)):
        token_indices_of_devices = jax.device_put(
            block_plan.token_indices_of_devices, index_sharding
        )
        gathered_array_by_width_and_dtype = {
            width_and_dtype: gather_tokens(host_mesh, host_array, token_indices_of_devices)
            for width_and_dtype, host_array in host_array_by_width_and_dtype.items()
        }
        kept_token_blocks.append(
            KeptBlock(
                gathered_array_by_width_and_dtype,
                block_plan.token_indices_in_block,
                block_plan.kept_token_numbers,
            )
        )
    num_kept_tokens = int(kept_mask.sum())
    received_shape_by_width_and_dtype = {
        width_and_dtype: (
            len(activations_of_hooks),
            num_kept_tokens,
            activations_of_hooks.shape[-1],
        )
        for width_and_dtype, activations_of_hooks in activations_by_width_and_dtype.items()
    }
    return KeptTokens(kept_token_blocks, received_shape_by_width_and_dtype)


class _BlockPlan(NamedTuple):
    """The tokens that one block will contain, as indices.

    A block contains up to N kept tokens from each device of this host.

    Attributes:
        token_indices_of_devices: Indices of the tokens that each device gathers, (devices, N)
            int32, padded with zeros. An index counts the tokens in the device's part of the rows,
            row by row, from 0.
        token_indices_in_block: Indices of the kept tokens in the block that all devices gather,
            (kept tokens of the block,) int. Device d has the indices from d * N to d * N + N - 1.
            The other indices are padding.
        kept_token_numbers: For each index in `token_indices_in_block`, the number of the kept
            token, (kept tokens of the block,) int. The kept tokens of this host's rows are numbered
            from 0, ordered by row and position.
    """

    token_indices_of_devices: np.ndarray
    token_indices_in_block: np.ndarray
    kept_token_numbers: np.ndarray


def _block_plans(
    kept_mask: np.ndarray, slices_of_devices: Sequence[tuple[slice, slice]]
) -> Iterator[_BlockPlan]:
    """Divides the kept tokens of a batch into blocks, and yields a plan for each block.

    A block contains at most N kept tokens of each device of this host. N is the number of tokens on
    a device divided by MAX_BLOCKS, rounded up. The first block contains the first N kept tokens of
    every device, the next block the next N, and so on.

    Args:
        kept_mask: The mask of the kept tokens of this host's rows, (B, T) bool.
        slices_of_devices: For each device of this host, a tuple of the slice of its rows and the
            slice of its tokens in these rows.

    Yields:
        The plan of a block. It contains three indices of each of the block's tokens: on the token's
        device, in the block, and among all kept tokens of the host (see `_BlockPlan`).
    """
    kept_token_numbers_of_rows = np.cumsum(kept_mask).reshape(kept_mask.shape) - 1
    kept_token_indices_of_devices = [
        np.flatnonzero(kept_mask[device_slices]) for device_slices in slices_of_devices
    ]
    kept_token_numbers_of_devices = [
        kept_token_numbers_of_rows[device_slices][kept_mask[device_slices]]
        for device_slices in slices_of_devices
    ]
    tokens_per_device = kept_mask[slices_of_devices[0]].size
    tokens_per_block = -(-tokens_per_device // MAX_BLOCKS)
    for block_start in range(0, max(map(len, kept_token_indices_of_devices)), tokens_per_block):
        block_stop = block_start + tokens_per_block
        token_indices_of_devices = np.zeros((len(slices_of_devices), tokens_per_block), np.int32)
        # The following lists have an entry for each device: an array with an entry for each token.
        token_indices_in_block_of_devices = []
        kept_token_numbers_in_block_of_devices = []
        for device_number, kept_token_indices in enumerate(kept_token_indices_of_devices):
            num_block_tokens = len(kept_token_indices[block_start:block_stop])
            token_indices_of_devices[device_number, :num_block_tokens] = kept_token_indices[
                block_start:block_stop
            ]
            token_indices_in_block_of_devices.append(
                device_number * tokens_per_block + np.arange(num_block_tokens)
            )
            kept_token_numbers_in_block_of_devices.append(
                kept_token_numbers_of_devices[device_number][block_start:block_stop]
            )
        yield _BlockPlan(
            token_indices_of_devices,
            np.concatenate(token_indices_in_block_of_devices),
            np.concatenate(kept_token_numbers_in_block_of_devices),
        )


def _array_of_host(mesh: Mesh, device_parts: list[Any]) -> Array:
    """Joins the activations on this host's devices into one array, without copying them.

    The result is an argument of `gather_tokens`. The arrays of the devices are joined along the
    axis of tokens, even if they contain different rows, so the rows of the result have no meaning.
    This does no harm, because on each device, `gather_tokens` only uses the part of the result that
    is on this device.

    Args:
        mesh: The devices of this host, with the axis "device".
        device_parts: For each device, the part of the activations that is on the device
            (`jax.Shard`), (hooks, rows, tokens, width). All parts have the same shape.

    Returns:
        The joined array, (hooks, rows, devices * tokens, width).
    """
    arrays_of_devices = [device_part.data for device_part in device_parts]
    num_hooks, num_rows, tokens_per_row, width = arrays_of_devices[0].shape
    token_sharding = NamedSharding(mesh, PartitionSpec(None, None, "device"))
    host_array_shape = num_hooks, num_rows, tokens_per_row * len(arrays_of_devices), width
    return jax.make_array_from_single_device_arrays(
        host_array_shape, token_sharding, arrays_of_devices
    )


@partial(jax.jit, static_argnums=0)
def gather_tokens(mesh: Mesh, activations: Array, token_indices_of_devices: Array) -> Array:
    """Gathers the activations of some tokens on each device.

    Args:
        mesh: The devices of this host, with the axis "device".
        activations: The activations, (hooks, rows, tokens, width), of which each device has a part
            of the tokens.
        token_indices_of_devices: The indices of the N tokens that each device gathers, (devices, N)
            int32. An index counts the tokens in the device's part row by row, from 0.

    Returns:
        The gathered activations, (hooks, devices * N, width). The tokens of the first device come
        first.
    """

    def gather_tokens_on_device(activations_on_device: Array, token_indices: Array) -> Array:
        num_hooks, num_rows, tokens_per_row, width = activations_on_device.shape
        # `activations_on_device` is reshaped to a table of vectors, (hooks * rows * tokens, width),
        # and the vectors are taken by their indices, as in an embedding. If `activations_on_device`
        # were indexed along its axes of rows and tokens instead, XLA would copy all of it.
        flat_vector_indices = (
            jnp.arange(num_hooks)[:, None] * (num_rows * tokens_per_row) + token_indices
        )
        vector_table = activations_on_device.reshape(-1, width)
        gathered_vectors = jnp.take(
            vector_table, flat_vector_indices.reshape(-1), axis=0, mode="clip"
        )
        return gathered_vectors.reshape(num_hooks, -1, width)

    gather_tokens_on_all_devices = jax.shard_map(
        gather_tokens_on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(None, None, "device"), PartitionSpec("device")),
        out_specs=PartitionSpec(None, "device"),
    )
    return gather_tokens_on_all_devices(activations, token_indices_of_devices)
