"""Experts on TPUs: three Pallas kernels, which fetch each row from its place in HBM.

A row is one expert of one token. It takes this path:

    chosen (T, X) -- sorted by expert, every expert's rows padded to whole tiles --> a table of
    x (T, D)         the tokens of each tile
      |  a tile's tokens are fetched row by row, the next tile's while this one is multiplied
      v
    tile (ROWS, D) -- silu(x gate) * (x up) --> gated (n', M), bfloat16, in the order of the tiles
                   -- (gated down) * weight --> rows (n', D), bfloat16, in the order of the tiles
      |  a token's rows are fetched and added in float32; rows of other devices' experts are not
      |  fetched, and count as 0
      v
    sum (T, D)

The tiles of an expert follow each other, so its weights are read once. They are read directly from
the stack of all layers, because a kernel knows the layer and each tile's expert before it starts.
Only tiles with rows are computed. Arrays of rows have the shape (n', D / 128, 128), in which the
values of a row are contiguous, so that a kernel can fetch it. In an array (n', D), the pieces of a
row would lie between pieces of other rows.

The letters are those of experts.py. n' is T * X + E * ROWS, rounded up to whole tiles: room for the
rows and for the padding of every expert's last tile.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from activation_extraction.model.experts import LANES, Stacks, ragged_experts
from activation_extraction.model.numerics import einsum

SUBLANES = 8  # the height of a register
ROWS = 128  # rows of a tile
TOKENS = 16  # tokens of a group, whose sums are computed together
AT_ONCE = 8  # rows that a turn of a loop fetches
GATED, WEIGHTED, ADDED = "experts_gate_up", "experts_down", "experts_sum"  # names of the kernels
MOST_OF_WEIGHTS = 40 * 2**20  # bytes of fast memory for blocks of weights
FAST_MEMORY = 56 * 2**20  # bytes of fast memory for a kernel: v5p has 64 MiB, v5e and v6e have more


class Table(NamedTuple):
    """The rows of each tile, and the rows of each token.

    A group is TOKENS tokens that follow one another.

    Attributes:
        tiles: The number of tiles with rows, which come first, () int32.
        experts: The expert of each tile, (tiles,) int32.
        counts: The number of rows of each tile, (tiles,) int32.
        tokens: The token of each row of a tile, (tiles, 1, ROWS) int32.
        weights: The weight of each row of a tile, (tiles, 1, ROWS) float32.
        rows: For each group, the numbers of its rows among those of all tiles, and their places
            among the X * TOKENS rows of the group, (groups, 2, X * TOKENS) int32. Rows to fetch
            come first.
        of_tokens: The number of rows to fetch for each group, (groups,) int32.
    """

    tiles: Array
    experts: Array
    counts: Array
    tokens: Array
    weights: Array
    rows: Array
    of_tokens: Array


def pallas_experts(
    x: Array, weights: Array, chosen: Array, stacks: Stacks, parts: int = 1
) -> Array:
    """Computes experts with three kernels, except in float32.

    float32, and widths that are no multiples of LANES, are left to `ragged_experts`. See
    `ExpertSum` for the arguments and the result.
    """
    experts, hidden, width = stacks.gate.shape[1:]
    if x.dtype == jnp.float32 or hidden % LANES or width % LANES:
        return ragged_experts(x, weights, chosen, stacks, parts=parts)
    fill = [(0, -len(x) % TOKENS), (0, 0)]
    chosen = jnp.pad(chosen, fill, constant_values=-1)
    table = table_of(jnp.pad(weights, fill), chosen, experts)
    rows = _weighted(table, stacks, _gated(table, stacks, x))
    parts = parts if len(table.rows) % parts == 0 else 1
    fetches_of_parts = jnp.split(table.rows, parts)
    counts_of_parts = jnp.split(table.of_tokens, parts)
    sums = [
        _added(rows, fetches, counts)
        for fetches, counts in zip(fetches_of_parts, counts_of_parts, strict=True)
    ]
    return jnp.concatenate(sums)[: len(x)]


def table_of(weights: Array, chosen: Array, experts: int) -> Table:
    """Returns the table of rows.

    Rows of padding are sorted together with the rows of tokens, which gives every row its place
    without a lookup: TPUs sort fast, but look numbers up one by one.

    Args:
        weights: The weights of each token's experts, (T, X) float32, where TOKENS divides T.
        chosen: The numbers of each token's experts, (T, X) int32.
        experts: The number of experts.
    """
    count = chosen.size
    per_token = chosen.shape[1]
    of_group = TOKENS * per_token
    numbers = chosen.reshape(-1)
    numbers = jnp.where((numbers >= 0) & (numbers < experts), numbers, experts)
    all_experts = jnp.arange(experts)
    rows_of_tile = jnp.arange(ROWS)
    missing = -(numbers[:, None] == all_experts).sum(axis=0) % ROWS  # in each expert's last tile
    is_padding = rows_of_tile < missing[:, None]
    padding = jnp.where(is_padding, all_experts[:, None], experts).reshape(-1)
    padding = jnp.pad(padding, (0, -count % ROWS), constant_values=experts)
    # Odd keys sort the padding of an expert after its rows of tokens, whose keys are even.
    keys = jnp.concatenate([2 * numbers, 2 * padding + 1])
    places, weights = jnp.arange(keys.size), jnp.pad(weights.reshape(-1), (0, padding.size))
    keys, row, weights = lax.sort((keys, places, weights), num_keys=1, is_stable=False)
    real = (row < count) & (keys < 2 * experts)
    # The second sort orders the rows by group and token. Rows that are not fetched come last in
    # their group.
    in_group, tiles = row % of_group, keys[::ROWS] // 2
    keys = 2 * row - in_group + jnp.where(real, 0, of_group)
    keys = jnp.where(row < count, keys, 2 * count)
    keys, places = lax.sort((keys, places), num_keys=1, is_stable=False)
    in_group = keys[:count] % of_group
    in_group = in_group % per_token * TOKENS + in_group // per_token
    rows = [array.reshape(-1, 1, of_group) for array in (places[:count], in_group)]
    return Table(
        tiles=(tiles < experts).sum(),
        experts=jnp.minimum(tiles, experts - 1),
        counts=real.reshape(-1, ROWS).sum(axis=1),
        tokens=jnp.where(real, row // per_token, 0).reshape(-1, 1, ROWS),
        weights=weights.reshape(-1, 1, ROWS),
        rows=jnp.concatenate(rows, axis=1),
        of_tokens=(numbers < experts).reshape(-1, of_group).sum(axis=1),
    )


def block_of(columns: int, bytes_of_column: int) -> int:
    """Returns the largest block of columns whose weights, held twice, fit into fast memory.

    Args:
        columns: The number of all columns, a multiple of LANES.
        bytes_of_column: The bytes of the weights of a column.
    """
    sizes = [size for size in range(LANES, columns + 1, LANES) if columns % size == 0]
    return max([LANES, *(s for s in sizes if 2 * s * bytes_of_column <= MOST_OF_WEIGHTS)])


def _call(
    kernel: Callable[..., None], scalars: list[Array], out: Any, name: str, **options: Any
) -> Any:
    """Returns the call of a kernel, a function of its other inputs.

    Args:
        kernel: The kernel.
        scalars: Its first inputs, which the index maps of blocks may read before it runs.
        out: The shape and dtype of the result.
        name: The name of the kernel in profiles.
        options: The other fields of `pltpu.PrefetchScalarGridSpec`.
    """
    spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=len(scalars), **options)
    parameters = pltpu.CompilerParams(vmem_limit_bytes=FAST_MEMORY)
    call = pl.pallas_call(kernel, out, grid_spec=spec, compiler_params=parameters, name=name)
    return partial(call, *scalars)


def _gated(table: Table, stacks: Stacks, x: Array) -> Array:
    """Returns silu(x gate) * (x up) of the rows of all tiles, (n', M)."""
    (_, _, hidden, width), tiles = stacks.gate.shape, len(table.experts)
    columns = block_of(width, 2 * hidden * x.dtype.itemsize)

    def of_expert(column: Any, step: Any, layer: Any, experts: Any, _: Any) -> tuple[Any, ...]:
        return layer[0], experts[jnp.maximum(step - 1, 0)], 0, column

    def to_write(column: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return jnp.maximum(step - 1, 0), column

    return _call(
        _multiply_fetched,
        [stacks.layer.reshape(1), table.experts, table.counts],
        jax.ShapeDtypeStruct((tiles * ROWS, width), x.dtype),
        GATED,
        grid=(width // columns, table.tiles + 1),
        in_specs=[
            pl.BlockSpec(
                (None, 1, ROWS), lambda column, step, *_: (step, 0, 0), memory_space=pltpu.SMEM
            ),
            pl.BlockSpec(memory_space=pltpu.HBM),
            *[pl.BlockSpec((None, None, hidden, columns), of_expert)] * 2,
        ],
        out_specs=pl.BlockSpec((ROWS, columns), to_write),
        scratch_shapes=[
            pltpu.VMEM((2, ROWS, hidden // LANES, LANES), x.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )(table.tokens, x.reshape(len(x), -1, LANES), stacks.gate, stacks.up)


def _multiply_fetched(
    _layer: Any,
    _experts: Any,
    counts: Any,
    tokens: Any,
    x_ref: Any,
    gate_ref: Any,
    up_ref: Any,
    out_ref: Any,
    fetched: Any,
    arrived: Any,
) -> None:
    """Begins to fetch the rows of this step's tile, and computes those of the previous step's tile.

    Args:
        _layer: The number of the layer, which only the index maps read.
        _experts: The expert of each tile, which only the index maps read.
        counts: The number of rows of each tile, (tiles,) int32.
        tokens: The token of each row of this step's tile, (1, ROWS) int32.
        x_ref: All tokens in HBM, (T, D / LANES, LANES).
        gate_ref: A block of columns of the gate projection of the previous tile's expert,
            (D, columns).
        up_ref: The same columns of the up projection.
        out_ref: These columns of the previous tile's result, silu(x gate) * (x up),
            (ROWS, columns).
        fetched: Two buffers for the rows of a tile, (2, ROWS, D / LANES, LANES).
        arrived: The DMA semaphore of each buffer.
    """
    step, (_, rows, *_) = pl.program_id(1), fetched.shape
    turns = [pl.cdiv(counts[tile], AT_ONCE) for tile in (step, jnp.maximum(step - 1, 0))]

    def start(turn: Any, _: None) -> None:
        for row in range(AT_ONCE):
            row += turn * AT_ONCE
            source = x_ref.at[pl.ds(tokens[0, row], 1)]
            target = fetched.at[step % 2, pl.ds(row, 1)]
            pltpu.make_async_copy(source, target, arrived.at[step % 2]).start()

    lax.fori_loop(0, turns[0], start, None)

    @pl.when(step > 0)
    def multiply() -> None:
        buffer = (step - 1) % 2
        _wait(fetched, arrived, buffer, turns[1] * AT_ONCE)
        x = fetched[buffer].reshape(rows, -1)
        gate, up = (einsum("nD,DM->nM", x, weights[...]) for weights in (gate_ref, up_ref))
        out_ref[...] = (jax.nn.silu(gate) * up).astype(out_ref.dtype)


def _wait(fetched: Any, arrived: Any, buffer: Any, count: Any) -> None:
    """Waits until rows have arrived in a buffer.

    Args:
        fetched: The two buffers.
        arrived: The DMA semaphore of each buffer.
        buffer: The index of the buffer, 0 or 1.
        count: The number of rows that are fetched into the buffer.
    """

    @pl.when(count > 0)
    def wait() -> None:
        rows = fetched.at[buffer, pl.ds(0, count)]  # only their size matters
        pltpu.make_async_copy(rows, rows, arrived.at[buffer]).wait()


def _weighted(table: Table, stacks: Stacks, gated: Array) -> Array:
    """Returns (gated down) * weight of the rows of all tiles, (n', D / LANES, LANES)."""
    _, _, width, hidden = stacks.down.shape
    columns = block_of(hidden, width * gated.dtype.itemsize)

    def of_expert(column: Any, tile: Any, layer: Any, experts: Any) -> tuple[Any, ...]:
        return layer[0], experts[tile], 0, column

    return _call(
        _multiply_down,
        [stacks.layer.reshape(1), table.experts],
        jax.ShapeDtypeStruct((len(gated), hidden // LANES, LANES), gated.dtype),
        WEIGHTED,
        grid=(hidden // columns, jnp.maximum(table.tiles, 1)),
        in_specs=[
            pl.BlockSpec((None, 1, ROWS), lambda column, tile, *_: (tile, 0, 0)),
            pl.BlockSpec((ROWS, width), lambda column, tile, *_: (tile, 0)),
            pl.BlockSpec((None, None, width, columns), of_expert),
        ],
        out_specs=pl.BlockSpec(
            (ROWS, columns // LANES, LANES), lambda column, tile, *_: (tile, column, 0)
        ),
    )(table.weights, gated, stacks.down)


def _multiply_down(
    _layer: Any, _experts: Any, weights_ref: Any, gated_ref: Any, down_ref: Any, out_ref: Any
) -> None:
    """Multiplies a tile of rows by the down projection, and scales each row by its routing weight.

    Args:
        _layer: The number of the layer, which only the index maps read.
        _experts: The expert of each tile, which only the index maps read.
        weights_ref: The routing weight of each row of the tile, (1, ROWS) float32.
        gated_ref: The rows of the tile, silu(x gate) * (x up), (ROWS, M).
        down_ref: A block of columns of the expert's down projection, (M, columns).
        out_ref: These columns of the result, (ROWS, columns / LANES, LANES).
    """
    weights = jnp.broadcast_to(weights_ref[...], (SUBLANES, ROWS)).T[:, :1]
    y = weights * einsum("nM,MD->nD", gated_ref[...], down_ref[...])
    out_ref[...] = y.astype(out_ref.dtype).reshape(out_ref.shape)


def _added(rows: Array, fetches: Array, counts: Array) -> Array:
    """Returns the sum of each token's rows, (T, D) float32.

    Args:
        rows: The rows of all tiles, (n', D / LANES, LANES).
        fetches: `Table.rows` of these tokens.
        counts: `Table.of_tokens` of these tokens.
    """
    groups, _, of_group = fetches.shape
    hidden = math.prod(rows.shape[1:])

    def to_fetch(step: Any, _: Any) -> tuple[Any, ...]:
        return jnp.minimum(step, groups - 1), 0, 0

    return _call(
        _add_fetched,
        [jnp.pad(counts, (0, 1))],
        jax.ShapeDtypeStruct((groups * TOKENS, hidden), jnp.float32),
        ADDED,
        grid=(groups + 1,),
        in_specs=[
            pl.BlockSpec((None, 2, of_group), to_fetch, memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=pl.BlockSpec((TOKENS, hidden), lambda step, _: (jnp.maximum(step - 1, 0), 0)),
        scratch_shapes=[
            pltpu.VMEM((2, of_group, *rows.shape[1:]), rows.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )(fetches, rows)


def _add_fetched(
    counts: Any, rows: Any, rows_ref: Any, out_ref: Any, fetched: Any, arrived: Any
) -> None:
    """Begins to fetch the rows of this step's group, and adds up those of the previous group.

    Args:
        counts: The number of rows to fetch for each group, and a 0 at the end, (groups + 1,) int32.
        rows: For this step's group, the numbers of its rows among those of all tiles, and their
            places in the buffer, (2, X * TOKENS) int32.
        rows_ref: The rows of all tiles in HBM, (n', D / LANES, LANES).
        out_ref: The sum of the rows of each token of the previous group, (TOKENS, D) float32.
        fetched: Two buffers for the rows of a group, (2, X * TOKENS, D / LANES, LANES).
        arrived: The DMA semaphore of each buffer.
    """
    step, (_, of_group, *_) = pl.program_id(0), fetched.shape

    @pl.when(counts[step] < of_group)
    def clear() -> None:
        fetched[step % 2] = jnp.zeros_like(fetched[step % 2])

    def start(number: Any, _: None) -> None:
        source = rows_ref.at[pl.ds(rows[0, number], 1)]
        target = fetched.at[step % 2, pl.ds(rows[1, number], 1)]
        pltpu.make_async_copy(source, target, arrived.at[step % 2]).start()

    lax.fori_loop(0, counts[step], start, None)

    @pl.when(step > 0)
    def add() -> None:
        buffer = (step - 1) % 2
        _wait(fetched, arrived, buffer, counts[step - 1])
        total = jnp.zeros((TOKENS, *fetched.shape[2:]), jnp.float32)
        for first in range(0, of_group, TOKENS):
            total += fetched[buffer, pl.ds(first, TOKENS)].astype(jnp.float32)
        out_ref[...] = total.reshape(out_ref.shape)
