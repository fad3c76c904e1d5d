"""Copies only the kept tokens of a batch from the devices to the host.

A host knows the kept tokens of its rows before the step. Each of its devices gathers the kept
tokens of its part of the rows in pieces of a fixed size. So one small program serves all batches;
it runs as often as the device with the most kept tokens needs. Devices of other hosts do not take
part.

Letters: B rows of this host, T tokens per row.
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

PIECES = 16  # the number of pieces if all tokens are kept


class Piece(NamedTuple):
    """Up to a fixed number of kept tokens of each device of this host.

    Attributes:
        activations: Vector type -> the values of its hooks, (hooks, devices * size of a piece,
            width).
        rows: Index of each kept token on the second axis of the activations. Other indices are
            padding.
        indices: Index of each of these tokens among all kept tokens of the batch.
    """

    activations: dict[VectorType, Array]
    rows: np.ndarray
    indices: np.ndarray


class KeptTokens(NamedTuple):
    """The kept tokens of a batch, on their way to the host.

    Attributes:
        pieces: Pieces that together contain all kept tokens.
        shapes: Vector type -> the shape of the values of its hooks, (hooks, kept tokens of the
            batch, width).
    """

    pieces: list[Piece]
    shapes: dict[VectorType, tuple[int, int, int]]

    def receive(self) -> dict[VectorType, np.ndarray]:
        """Copies the tokens to the host.

        Returns:
            Vector type -> the values of its hooks, (hooks, kept tokens of the batch, width), row by
            row of the batch.
        """
        # All copies are started before the first one is awaited.
        copies = [jax.tree.map(to_host, piece.activations) for piece in self.pieces]
        received = {
            vector_type: np.empty(shape, vector_type.dtype)
            for vector_type, shape in self.shapes.items()
        }
        for piece, copies_of_piece in zip(self.pieces, copies, strict=True):
            for vector_type, copy in copies_of_piece.items():
                # Copied as integers, because NumPy is slow with dtypes of other packages.
                bits = f"uint{8 * copy.dtype.itemsize}"
                kept = np.asarray(copy).view(bits)[:, piece.rows]
                received[vector_type].view(bits)[:, piece.indices] = kept
        return received


def take_kept(activations: Mapping[VectorType, Array], kept: np.ndarray) -> KeptTokens:
    """Starts to gather the kept tokens, without waiting for the devices.

    Args:
        activations: Vector type -> the values of its hooks, (hooks, rows of all hosts, T, width),
            split over rows or T as `HostRows.outgoing` says.
        kept: The mask of the kept tokens of this host's rows, (B, T) bool.
    """
    shards = {vector_type: shards_of_host(array) for vector_type, array in activations.items()}
    first = next(iter(shards.values()))
    mesh = Mesh(np.array([shard.device for shard in first]), ("device",))
    split = NamedSharding(mesh, PartitionSpec("device"))
    local = {}
    for vector_type, shards_of_type in shards.items():
        local[vector_type] = _one_array(mesh, shards_of_type)
    pieces = []
    for tokens, rows, indices in _pieces(kept, rows_and_tokens(first)):
        put = jax.device_put(tokens, split)
        gathered = {vector_type: take(mesh, array, put) for vector_type, array in local.items()}
        pieces.append(Piece(gathered, rows, indices))
    total = int(kept.sum())
    shapes = {}
    for vector_type, array in activations.items():
        shapes[vector_type] = len(array), total, array.shape[-1]
    return KeptTokens(pieces, shapes)


def _pieces(
    kept: np.ndarray, places: Sequence[tuple[slice, slice]]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields the pieces of a batch.

    Args:
        kept: The mask of the kept tokens of this host's rows, (B, T) bool.
        places: The rows, and the tokens of a row, that each device has.

    Yields:
        A tuple of:
            The indices of the tokens that each device gathers from its part, which is flattened,
                (devices, size of a piece) int32, padded with zeros.
            `Piece.rows`.
            `Piece.indices`.
    """
    index_in_batch = np.cumsum(kept).reshape(kept.shape) - 1
    tokens_of_devices = [np.flatnonzero(kept[place]) for place in places]
    indices_of_devices = [index_in_batch[place][kept[place]] for place in places]
    size = -(-kept[places[0]].size // PIECES)
    for start in range(0, max(map(len, tokens_of_devices)), size):
        padded = np.zeros((len(places), size), np.int32)
        rows = []
        indices = []
        for device, tokens in enumerate(tokens_of_devices):
            tokens_of_piece = tokens[start : start + size]
            padded[device, : len(tokens_of_piece)] = tokens_of_piece
            rows.append(device * size + np.arange(len(tokens_of_piece)))
            indices.append(indices_of_devices[device][start : start + size])
        yield padded, np.concatenate(rows), np.concatenate(indices)


def _one_array(mesh: Mesh, shards: list[Any]) -> Array:
    """Joins the shards of this host into one array, as if each were a different part of T."""
    hooks, rows, length, width = shards[0].data.shape
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "device"))
    shape = hooks, rows, length * len(shards), width
    arrays = [shard.data for shard in shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


@partial(jax.jit, static_argnums=0)
def take(mesh: Mesh, activations: Array, tokens: Array) -> Array:
    """Gathers tokens on each device.

    Args:
        mesh: The devices of this host, with the axis "device".
        activations: (hooks, rows, tokens, width), each device with a part of the tokens.
        tokens: The indices of the tokens that each device gathers from its part, which is
            flattened, (devices, size of a piece) int32.

    Returns:
        The gathered activations, (hooks, devices * size of a piece, width).
    """

    def local(part: Array, tokens: Array) -> Array:
        hooks, rows, length, width = part.shape
        # The part is indexed as a table of rows, like an embedding. With another axis, XLA would
        # copy the whole part.
        indices = jnp.arange(hooks)[:, None] * (rows * length) + tokens
        flat = jnp.take(part.reshape(-1, width), indices.reshape(-1), axis=0, mode="clip")
        return flat.reshape(hooks, -1, width)

    specs = PartitionSpec(None, None, "device"), PartitionSpec("device")
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(None, "device"))(
        activations, tokens
    )
