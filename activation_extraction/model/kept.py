"""If only some tokens are kept, only those leave the devices.

A host marks the kept tokens of its rows before the step. Each of its devices then gathers the kept
tokens of its part of the rows, in pieces of one size, so that one small program serves every batch:
it runs as often as the device with the most kept tokens needs it. Devices of other hosts do not
take part.

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

from activation_extraction.model.hooks import Form
from activation_extraction.model.host_rows import rows_and_tokens, shards_of_host, to_host

PIECES = 16  # of each device if all its tokens are kept


class Piece(NamedTuple):
    """Some kept tokens of every device of this host.

    Attributes:
        values: Form -> (hooks, devices * tokens of a piece, width).
        rows: The index of every kept token on the second axis of the values. Other indices are
            padding.
        indices: The index of every kept token among all kept tokens of the batch.
    """

    values: dict[Form, Array]
    rows: np.ndarray
    indices: np.ndarray


class KeptTokens(NamedTuple):
    """The kept tokens of a batch, on their way to the host.

    Attributes:
        pieces: The pieces.
        shapes: Form -> (hooks, kept tokens of the batch, width).
    """

    pieces: list[Piece]
    shapes: dict[Form, tuple[int, int, int]]

    def receive(self) -> dict[Form, np.ndarray]:
        """Copies the tokens to the host.

        Returns:
            Form -> (hooks, kept tokens of the batch, width), row by row of the batch.
        """
        pieces = [(piece, jax.tree.map(to_host, piece.values)) for piece in self.pieces]
        shapes = self.shapes.items()
        received = {form: np.empty(shape, form.dtype) for form, shape in shapes}
        for piece, values in pieces:
            for form, value in values.items():
                # As integers: NumPy is slow with dtypes of other packages.
                bits = f"uint{8 * value.dtype.itemsize}"
                of_piece = np.asarray(value).view(bits)[:, piece.rows]
                received[form].view(bits)[:, piece.indices] = of_piece
        return received


def take_kept(activations: Mapping[Form, Array], kept: np.ndarray) -> KeptTokens:
    """Starts to gather the kept tokens; does not wait for the devices.

    Args:
        activations: Form -> (hooks, rows of all hosts, T, width), of which each device has other
            rows or another part of T.
        kept: Which tokens of this host's rows are kept, (B, T) bool.
    """
    shards = {form: shards_of_host(array) for form, array in activations.items()}
    first = next(iter(shards.values()))
    mesh = Mesh(np.array([shard.device for shard in first]), ("device",))
    split = NamedSharding(mesh, PartitionSpec("device"))
    local = {form: _one_array(mesh, of_form) for form, of_form in shards.items()}
    pieces = []
    for tokens, rows, indices in _pieces(kept, rows_and_tokens(first)):
        put = jax.device_put(tokens, split)
        values = {form: take(mesh, array, put) for form, array in local.items()}
        pieces.append(Piece(values, rows, indices))
    total = int(kept.sum())
    shapes = {form: (len(array), total, array.shape[-1]) for form, array in activations.items()}
    return KeptTokens(pieces, shapes)


def _pieces(
    kept: np.ndarray, places: Sequence[tuple[slice, slice]]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields the pieces of a batch.

    Args:
        kept: Which tokens of this host's rows are kept, (B, T) bool.
        places: The rows, and the tokens of a row, that each device has.

    Yields:
        The numbers of the tokens that each device gathers from its part, (devices, size of a piece)
        int32, padded with zeros; and `rows` and `indices` of the `Piece`.
    """
    indices = np.cumsum(kept).reshape(kept.shape) - 1
    tokens = [np.flatnonzero(kept[place]) for place in places]
    numbers = [indices[place][kept[place]] for place in places]
    size = -(-kept[places[0]].size // PIECES)
    for start in range(0, max(map(len, tokens)), size):
        piece = [of_device[start : start + size] for of_device in tokens]
        padded = np.zeros((len(places), size), np.int32)
        for row, of_device in zip(padded, piece, strict=True):
            row[: len(of_device)] = of_device
        rows = [i * size + np.arange(len(of_device)) for i, of_device in enumerate(piece)]
        numbers_of_piece = [of_device[start : start + size] for of_device in numbers]
        yield padded, np.concatenate(rows), np.concatenate(numbers_of_piece)


def _one_array(mesh: Mesh, shards: list[Any]) -> Array:
    """Returns the shards of this host as one array, as if each were another part of T."""
    hooks, rows, length, width = shards[0].data.shape
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "device"))
    shape = hooks, rows, length * len(shards), width
    arrays = [shard.data for shard in shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


@partial(jax.jit, static_argnums=0)
def take(mesh: Mesh, values: Array, tokens: Array) -> Array:
    """Gathers tokens on every device.

    Args:
        mesh: The devices of this host, with the axis "device".
        values: (hooks, rows, tokens, width), each device with a part of the tokens.
        tokens: The numbers of the tokens that each device gathers from its part, (devices, size of
            a piece) int32.

    Returns:
        (hooks, devices * size of a piece, width).
    """

    def local(values: Array, tokens: Array) -> Array:
        hooks, rows, length, width = values.shape
        # Rows of one table are taken, as by an embedding: XLA would copy all values for other axes.
        numbers = jnp.arange(hooks)[:, None] * (rows * length) + tokens
        flat = jnp.take(values.reshape(-1, width), numbers.reshape(-1), axis=0, mode="clip")
        return flat.reshape(hooks, -1, width)

    specs = PartitionSpec(None, None, "device"), PartitionSpec("device")
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(None, "device"))(
        values, tokens
    )
