"""Experts on TPUs: three Pallas kernels in which each row is fetched from where it lies.

The way of a row, which is one expert of one token:

    chosen (T, X) -- sorted by expert, every expert's rows filled up to whole tiles --> a table
    x (T, D)         of the tokens of each tile
      |  a tile's tokens are fetched row by row, the next tile's while this one is multiplied
      v
    tile (ROWS, D) -- silu(x gate) * (x up) --> gated (n', M), bfloat16, in the order of the tiles
                   -- (gated down) * weight --> rows (n', D), bfloat16, in the order of the tiles
      |  a token's rows are fetched and added in float32; those of other devices' experts count 0
      v
    sum (T, D)

The tiles of an expert follow each other, so its weights are read once. They are read where they lie
in the stack of all layers: a kernel knows the layer and each tile's expert before it starts. Only
tiles with rows are computed. Arrays of rows are (n', D / 128, 128), of which a row can be fetched:
in (n', D) it would lie in pieces among those of other rows.

The letters are those of experts.py; n' is T * X and as many rows as fill the tiles.
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

from activation_extraction.model.experts import LANES, ragged_experts
from activation_extraction.model.layers import einsum

SUBLANES = 8  # the height of a register
ROWS = 128  # of a tile
TOKENS = 16  # whose sums are computed together
AT_ONCE = 8  # rows of which the fetches are one turn of a loop
GATED, WEIGHTED, ADDED = "experts_gate_up", "experts_down", "experts_sum"  # the kernels
MOST_OF_WEIGHTS = 40 * 2**20  # bytes of the blocks of weights in fast memory
FAST_MEMORY = 56 * 2**20  # bytes: v5p has 64 MiB, v5e and v6e have more


class Table(NamedTuple):
    """Which rows each tile has, and where each token's rows are.

    The tiles with rows come first. experts: of each tile; counts: of each tile's rows; tokens,
    weights: of the rows of each tile, (tiles, 1, ROWS). rows: for every TOKENS tokens, the rows to
    fetch, and their places among X * TOKENS rows, (groups, 2, X * TOKENS); of_tokens: how many
    these are, (groups,).
    """

    tiles: Array
    experts: Array
    counts: Array
    tokens: Array
    weights: Array
    rows: Array
    of_tokens: Array


def pallas_experts(
    x: Array,
    weights: Array,
    chosen: Array,
    layer: Array,
    *stacks: Array,
    parts: int = 1,
    interpret: Any = False,
) -> Array:
    """Computes experts with three kernels. See `ExpertSum`; `interpret` is for tests.

    float32, widths that are no multiples of LANES, and more rows than can be numbered are left to
    `ragged_experts`.
    """
    experts, hidden, width = stacks[0].shape[1:]
    fits = (experts + 1) << bits_of_places(chosen, experts) < 2**31
    if x.dtype == jnp.float32 or hidden % LANES or width % LANES or not fits:
        return ragged_experts(x, weights, chosen, layer, *stacks, parts=parts)
    count, gate, up, down = len(x), *stacks
    fill = [(0, -count % TOKENS), (0, 0)]
    chosen = jnp.pad(chosen, fill, constant_values=-1)
    table, layer = table_of(jnp.pad(weights, fill), chosen, experts), layer.reshape(1)
    gated = _gated(table, layer, x, gate, up, interpret)
    rows = _weighted(table, layer, gated, down, interpret)
    parts = parts if len(table.rows) % parts == 0 else 1
    of_parts = zip(jnp.split(table.rows, parts), jnp.split(table.of_tokens, parts), strict=True)
    sums = [_added(rows, *each, interpret) for each in of_parts]
    return jnp.concatenate(sums)[:count]


def table_of(weights: Array, chosen: Array, experts: int) -> Table:
    """Returns the table of rows. weights, chosen: (T, X), where TOKENS divides T.

    Sorting with the rows that fill the tiles gives every row its place: TPUs sort fast, but look
    numbers up one by one.
    """
    count, per_token = chosen.size, chosen.shape[1]
    numbers, of_group = chosen.reshape(-1), TOKENS * per_token
    numbers = jnp.where((numbers >= 0) & (numbers < experts), numbers, experts)
    all_experts, of_tile = jnp.arange(experts), jnp.arange(ROWS)
    missing = -(numbers[:, None] == all_experts).sum(axis=0) % ROWS
    filling = jnp.where(of_tile < missing[:, None], all_experts[:, None], experts).reshape(-1)
    filling = jnp.pad(filling, (0, -count % ROWS), constant_values=experts)
    size, bits = count + filling.size, bits_of_places(chosen, experts)
    places = jnp.arange(size)
    keys = (jnp.concatenate([numbers, filling]) << bits) + places
    weights = jnp.pad(weights.reshape(-1), (0, filling.size))
    keys, weights = lax.sort((keys, weights), num_keys=1, is_stable=False)
    expert, row = keys >> bits, keys & (1 << bits) - 1
    real = (row < count) & (expert < experts)
    # Next come each group's rows, those that are not fetched last, as from token to token.
    in_group = row % of_group
    keys = 2 * row - in_group + jnp.where(real, 0, of_group)
    keys = jnp.where(row < count, keys, 2 * count)
    keys, places = lax.sort((keys, places), num_keys=1, is_stable=False)
    in_group = keys[:count] % of_group
    in_group = in_group % per_token * TOKENS + in_group // per_token
    rows = [each.reshape(-1, 1, of_group) for each in (places[:count], in_group)]
    tiles = expert[::ROWS]
    return Table(
        (tiles < experts).sum(),
        jnp.minimum(tiles, experts - 1),
        real.reshape(-1, ROWS).sum(axis=1),
        jnp.where(real, row // per_token, 0).reshape(-1, 1, ROWS),
        weights.reshape(-1, 1, ROWS),
        jnp.concatenate(rows, axis=1),
        (numbers < experts).reshape(-1, of_group).sum(axis=1),
    )


def bits_of_places(chosen: Array, experts: int) -> int:
    """Returns how many bits the places of rows have, those that fill the tiles included."""
    return (chosen.size + (experts + 1) * ROWS).bit_length()


def block_of(columns: int, bytes_of_column: int) -> int:
    """Returns the largest block of columns whose weights, held twice, fit into fast memory."""
    sizes = [size for size in range(LANES, columns + 1, LANES) if columns % size == 0]
    return max([LANES, *(s for s in sizes if 2 * s * bytes_of_column <= MOST_OF_WEIGHTS)])


def _call(kernel: Callable[..., None], scalars: list[Array], grid: Any, **options: Any) -> Any:
    """Returns the call of a kernel, whose scalars are known before it runs."""
    names = "in_specs", "out_specs", "scratch_shapes"
    specs = {name: options.pop(name) for name in names if name in options}
    spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=len(scalars), grid=grid, **specs)
    parameters = pltpu.CompilerParams(vmem_limit_bytes=FAST_MEMORY)
    call = pl.pallas_call(kernel, grid_spec=spec, compiler_params=parameters, **options)
    return partial(call, *scalars)


def _now_and_next(shape: tuple[int, ...], last: int, axis: int) -> list[pl.BlockSpec]:
    """Returns how a kernel gets the block of a table for this step of a grid and the next one."""

    def block(ahead: int) -> pl.BlockSpec:
        def index(*ids: Any) -> tuple[Any, ...]:
            return jnp.minimum(ids[axis] + ahead, last), 0, 0

        return pl.BlockSpec((None, *shape), index, memory_space=pltpu.SMEM)

    return [block(0), block(1)]


def _gated(table: Table, layer: Array, x: Array, gate: Array, up: Array, interpret: Any) -> Array:
    """Returns silu(x gate) * (x up) of the rows of all tiles, (n', M)."""
    (_, _, hidden, width), tiles = gate.shape, len(table.experts)
    columns = block_of(width, 2 * hidden * x.dtype.itemsize)

    def of_expert(column: Any, tile: Any, layer: Any, experts: Any, _: Any) -> tuple[Any, ...]:
        return layer[0], experts[tile], 0, column

    weights = pl.BlockSpec((None, None, hidden, columns), of_expert)
    return _call(
        _multiply_fetched,
        [layer, table.experts, table.counts],
        grid=(width // columns, jnp.maximum(table.tiles, 1)),
        in_specs=[
            *_now_and_next((1, ROWS), tiles - 1, axis=1),
            pl.BlockSpec(memory_space=pltpu.HBM),
            *[weights] * 2,
        ],
        out_specs=pl.BlockSpec((ROWS, columns), lambda column, tile, *_: (tile, column)),
        out_shape=jax.ShapeDtypeStruct((tiles * ROWS, width), x.dtype),
        scratch_shapes=[
            pltpu.VMEM((2, ROWS, hidden // LANES, LANES), x.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        interpret=interpret,
        name=GATED,
    )(table.tokens, table.tokens, x.reshape(len(x), -1, LANES), gate, up)


def _multiply_fetched(
    _layer: Any,
    _experts: Any,
    counts: Any,
    now: Any,
    following: Any,
    x_ref: Any,
    gate_ref: Any,
    up_ref: Any,
    out_ref: Any,
    fetched: Any,
    arrived: Any,
) -> None:
    """Multiplies a tile of rows, which the step before has begun to fetch."""
    tile, (_, rows, *_) = pl.program_id(1), fetched.shape

    def turns(tile: Any) -> Any:
        return pl.cdiv(counts[tile], AT_ONCE)

    def fetch(tokens: Any, tile: Any) -> None:
        def turn(number: Any, _: None) -> None:
            for row in range(AT_ONCE):
                row += number * AT_ONCE
                source = x_ref.at[pl.ds(tokens[0, row], 1)]
                target = fetched.at[tile % 2, pl.ds(row, 1)]
                pltpu.make_async_copy(source, target, arrived.at[tile % 2]).start()

        lax.fori_loop(0, turns(tile), turn, None)

    pl.when(tile == 0)(lambda: fetch(now, tile))
    pl.when(tile + 1 < pl.num_programs(1))(lambda: fetch(following, tile + 1))

    def wait(_number: Any, _: None) -> None:
        some = fetched.at[tile % 2, pl.ds(0, AT_ONCE)]
        pltpu.make_async_copy(some, some, arrived.at[tile % 2]).wait()

    lax.fori_loop(0, turns(tile), wait, None)
    x = fetched[tile % 2].reshape(rows, -1)
    gate, up = (einsum("nD,DM->nM", x, weights[...]) for weights in (gate_ref, up_ref))
    out_ref[...] = (jax.nn.silu(gate) * up).astype(out_ref.dtype)


def _weighted(table: Table, layer: Array, gated: Array, down: Array, interpret: Any) -> Array:
    """Returns (gated down) * weight of the rows of all tiles, (n', D / LANES, LANES)."""
    _, _, width, hidden = down.shape
    columns = block_of(hidden, width * gated.dtype.itemsize)

    def of_expert(column: Any, tile: Any, layer: Any, experts: Any) -> tuple[Any, ...]:
        return layer[0], experts[tile], 0, column

    return _call(
        _multiply_down,
        [layer, table.experts],
        grid=(hidden // columns, jnp.maximum(table.tiles, 1)),
        in_specs=[
            pl.BlockSpec((None, 1, ROWS), lambda column, tile, *_: (tile, 0, 0)),
            pl.BlockSpec((ROWS, width), lambda column, tile, *_: (tile, 0)),
            pl.BlockSpec((None, None, width, columns), of_expert),
        ],
        out_specs=pl.BlockSpec(
            (ROWS, columns // LANES, LANES), lambda column, tile, *_: (tile, column, 0)
        ),
        out_shape=jax.ShapeDtypeStruct((len(gated), hidden // LANES, LANES), gated.dtype),
        interpret=interpret,
        name=WEIGHTED,
    )(table.weights, gated, down)


def _multiply_down(
    _layer: Any, _experts: Any, weights_ref: Any, gated_ref: Any, down_ref: Any, out_ref: Any
) -> None:
    """Multiplies a tile of rows, and each row with its weight."""
    weights = jnp.broadcast_to(weights_ref[...], (SUBLANES, ROWS)).T[:, :1]
    y = weights * einsum("nM,MD->nD", gated_ref[...], down_ref[...])
    out_ref[...] = y.astype(out_ref.dtype).reshape(out_ref.shape)


def _added(rows: Array, fetches: Array, counts: Array, interpret: Any) -> Array:
    """Returns the sum of each token's rows, (T, D) float32.

    fetches, counts: `Table.rows` and `Table.of_tokens` of these tokens.
    """
    groups, _, of_group = fetches.shape
    hidden = math.prod(rows.shape[1:])
    return _call(
        _add_fetched,
        [counts],
        grid=(groups,),
        in_specs=[
            *_now_and_next((2, of_group), groups - 1, axis=0),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=pl.BlockSpec((TOKENS, hidden), lambda group, _: (group, 0)),
        out_shape=jax.ShapeDtypeStruct((groups * TOKENS, hidden), jnp.float32),
        scratch_shapes=[
            pltpu.VMEM((2, of_group, *rows.shape[1:]), rows.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        interpret=interpret,
        name=ADDED,
    )(fetches, fetches, rows)


def _add_fetched(
    counts: Any, now: Any, following: Any, rows_ref: Any, out_ref: Any, fetched: Any, arrived: Any
) -> None:
    """Adds up the rows of some tokens, which the step before has begun to fetch."""
    group, (_, of_group, *_) = pl.program_id(0), fetched.shape

    def fetch(rows: Any, group: Any) -> None:
        def clear() -> None:
            fetched[group % 2] = jnp.zeros_like(fetched[group % 2])

        def start(number: Any, _: None) -> None:
            source = rows_ref.at[pl.ds(rows[0, number], 1)]
            target = fetched.at[group % 2, pl.ds(rows[1, number], 1)]
            pltpu.make_async_copy(source, target, arrived.at[group % 2]).start()

        pl.when(counts[group] < of_group)(clear)
        lax.fori_loop(0, counts[group], start, None)

    def wait() -> None:
        some = fetched.at[group % 2, pl.ds(0, counts[group])]
        pltpu.make_async_copy(some, some, arrived.at[group % 2]).wait()

    pl.when(group == 0)(lambda: fetch(now, group))
    pl.when(group + 1 < pl.num_programs(0))(lambda: fetch(following, group + 1))
    pl.when(counts[group] > 0)(wait)
    total = jnp.zeros((TOKENS, *fetched.shape[2:]), jnp.float32)
    for first in range(0, of_group, TOKENS):
        total += fetched[group % 2, pl.ds(first, TOKENS)].astype(jnp.float32)
    out_ref[...] = total.reshape(out_ref.shape)
