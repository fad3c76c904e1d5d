"""Products of rows with the weights of their experts on NVIDIA GPUs: a Pallas kernel.

The rows are sorted by expert. Every program multiplies a tile of one expert's rows with a block of
columns of the expert's weights. It looks up the expert and the rows in a table, so that experts
without rows cost nothing.

Letters: n rows, E experts, D inputs, M outputs of an expert.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from activation_extraction.model.experts import Stacks, in_sorted_rows, tiled_experts

# The rows and the columns of a tile, and the inputs that are multiplied at a time. With 16,384
# tokens of Qwen3-30B-A3B and a kernel for each of three products, an H100 took 3.5 ms, and
# `tiled_experts` 45 ms.
ROWS, COLUMNS, INNER = 128, 128, 64


def grouped_experts(
    x: Array,
    weights: Array,
    chosen: Array,
    stacks: Stacks,
    parts: int = 1,
    interpret: bool = False,
) -> Array:
    """Computes experts with two kernels, except in float32.

    The results of the kernels have the dtype of x. float32 is left to `tiled_experts`, because the
    GPU's matrix units would round it.

    Args:
        x: The tokens. See `ExpertSum` for this and the next four arguments, and for the result.
        weights: The weights of each token's experts.
        chosen: The numbers of each token's experts.
        stacks: The weights of the experts.
        parts: The number of parts whose sums are computed one after the other.
        interpret: Whether Pallas interprets the kernels, for tests without a GPU.
    """
    if x.dtype == jnp.float32:
        return tiled_experts(x, weights, chosen, stacks, parts=parts)
    compute = partial(_in_kernels, interpret=interpret)
    return in_sorted_rows(compute, x, weights, chosen, stacks, parts=parts)


def _in_kernels(x: Array, sizes: Array, stacks: Stacks, interpret: bool) -> Array:
    """Computes `SortedRows` with one kernel for the gate and up, and one for down."""
    layer, *matrices = stacks
    gate, up, down = (matrix.reshape(-1, *matrix.shape[2:]) for matrix in matrices)
    first = layer * len(sizes)
    gated = _product(x, [gate, up], sizes, first, interpret)
    return _product(gated, [down], sizes, first, interpret)


def _product(
    x: Array, stacks: Sequence[Array], sizes: Array, first: Array, interpret: bool
) -> Array:
    """Multiplies rows with the weights of their experts.

    Args:
        x: The rows, sorted by expert, (n, D).
        stacks: The weights of the experts of all layers, (L * E, D, M). With two stacks, the first
            is that of the gate, and the result is silu(x gate) * (x up).
        sizes: The number of rows of each expert of this layer, (E,) int32.
        first: The number of the first expert of this layer in the stacks, () int32.
        interpret: Whether Pallas interprets the kernel.

    Returns:
        (n, M) in the dtype of x. The values of rows without an expert mean nothing.
    """
    (count, inner), columns = x.shape, stacks[0].shape[-1]
    tiles, width = -(-count // ROWS) + len(sizes), math.gcd(columns, COLUMNS)
    of_tile = pl.BlockSpec((1,), lambda column, tile: (tile,))
    of_column = pl.BlockSpec((len(stacks[0]), inner, width), lambda column, tile: (0, 0, column))
    experts, starts, ends = _tiles(sizes, tiles)
    return pl.pallas_call(
        partial(_multiply, step=math.gcd(inner, INNER)),
        grid=(columns // width, tiles),
        in_specs=[
            *([of_tile] * 3),
            pl.BlockSpec(x.shape, lambda column, tile: (0, 0)),
            *([of_column] * len(stacks)),
        ],
        out_specs=pl.BlockSpec((count, width), lambda column, tile: (0, column)),
        out_shape=jax.ShapeDtypeStruct((count, columns), x.dtype),
        # Two stacks need twice the registers, and as much of a core's memory in fewer stages.
        compiler_params=plgpu.CompilerParams(num_warps=4 * len(stacks), num_stages=4 - len(stacks)),
        interpret=interpret,
    )(first + experts, starts, ends, x, *stacks)


def _tiles(sizes: Array, count: int) -> tuple[Array, Array, Array]:
    """Returns the table of tiles.

    Args:
        sizes: The number of rows of each expert, (E,) int32.
        count: The number of tiles, which must suffice for all rows.

    Returns:
        The expert of each tile, its first row, and the end of the expert's rows, (count,) int32
        each. Tiles that are left over start at or after the end.
    """
    tiles_per_expert = -(-sizes // ROWS)
    ends = jnp.cumsum(sizes)
    tiles = jnp.arange(count, dtype=jnp.int32)
    tile_ends = jnp.cumsum(tiles_per_expert)
    experts = jnp.searchsorted(tile_ends, tiles, side="right").clip(max=len(sizes) - 1)
    number = tiles - (tile_ends - tiles_per_expert)[experts]
    starts = (ends - sizes)[experts] + number * ROWS
    return experts.astype(jnp.int32), starts, ends[experts]


def _multiply(
    expert_ref: Any, start_ref: Any, end_ref: Any, x_ref: Any, *stacks_and_out: Any, step: int
) -> None:
    """Multiplies one tile of rows with one block of columns of one or two stacks.

    Args:
        expert_ref: The number of the expert in the stacks, (1,).
        start_ref: The first row of the tile, (1,).
        end_ref: The end of the expert's rows, (1,).
        x_ref: All rows, (n, D).
        stacks_and_out: The columns of each stack, (L * E, D, columns), and the columns of the
            result, (n, columns).
        step: The number of inputs that are multiplied at a time.
    """
    *stacks, out_ref = stacks_and_out
    start = start_ref[0]
    end = end_ref[0]
    expert = expert_ref[0]
    rows = pl.ds(start, ROWS)
    real = (start + jnp.arange(ROWS) < end)[:, None]

    def add(number: Array, totals: list[Array]) -> list[Array]:
        inner = pl.ds(number * step, step)
        x = plgpu.load(x_ref.at[rows, inner], mask=real, other=0.0)
        pairs = zip(totals, stacks, strict=True)
        return [total + plgpu.dot(x, stack[expert, inner, :]) for total, stack in pairs]

    @pl.when(start < end)
    def _() -> None:
        totals = [jnp.zeros((ROWS, out_ref.shape[1]), jnp.float32)] * len(stacks)
        *gate, total = lax.fori_loop(0, x_ref.shape[1] // step, add, totals)
        if gate:
            total *= jax.nn.silu(gate[0])
        plgpu.store(out_ref.at[rows, :], total.astype(out_ref.dtype), mask=real)
