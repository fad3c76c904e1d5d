"""Products of rows with the weights of their experts on NVIDIA GPUs: a Pallas kernel.

The rows are sorted by expert. Every program multiplies a tile of one expert's rows with some of the
columns of its weights; it finds both in a table, so experts without rows cost nothing.

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

# Of a tile. With 16,384 tokens of Qwen3-30B-A3B and a kernel for each of three products, an H100
# took 3.5 ms, and `tiled_experts` 45.
ROWS, COLUMNS, INNER = 128, 128, 64


def grouped_experts(
    x: Array,
    weights: Array,
    chosen: Array,
    stacks: Stacks,
    parts: int = 1,
    interpret: bool = False,
) -> Array:
    """Computes experts with two kernels, whose results have the type of x. See `ExpertSum`.

    float32 is left to `tiled_experts`: the GPU's matrix units would round it. `interpret` is for
    tests.
    """
    if x.dtype == jnp.float32:
        return tiled_experts(x, weights, chosen, stacks, parts=parts)
    compute = partial(_in_kernels, interpret=interpret)
    return in_sorted_rows(compute, x, weights, chosen, stacks, parts=parts)


def _in_kernels(x: Array, sizes: Array, stacks: Stacks, interpret: bool) -> Array:
    """Computes `SortedRows`."""
    layer, *matrices = stacks
    gate, up, down = (matrix.reshape(-1, *matrix.shape[2:]) for matrix in matrices)
    first = layer * len(sizes)
    gated = _product(x, [gate, up], sizes, first, interpret)
    return _product(gated, [down], sizes, first, interpret)


def _product(
    x: Array, stacks: Sequence[Array], sizes: Array, first: Array, interpret: bool
) -> Array:
    """Multiplies rows with their experts' weights: (n, D), (L * E, D, M), (E,) -> (n, M).

    Of two stacks, the first is the gate of the second: the result is SwiGLU's. first: the number of
    the layer's first expert. What is returned for rows without an expert means nothing.
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
    """Returns the expert, the first row and the end of the rows of each tile, (count,) each.

    Those that are left over have no rows.
    """
    own, ends = -(-sizes // ROWS), jnp.cumsum(sizes)
    tiles, last_tiles = jnp.arange(count, dtype=jnp.int32), jnp.cumsum(own)
    experts = jnp.searchsorted(last_tiles, tiles, side="right").clip(max=len(sizes) - 1)
    number = tiles - (last_tiles - own)[experts]
    starts = (ends - sizes)[experts] + number * ROWS
    return experts.astype(jnp.int32), starts, ends[experts]


def _multiply(
    expert_ref: Any, start_ref: Any, end_ref: Any, x_ref: Any, *others: Any, step: int
) -> None:
    """Multiplies one tile of rows with one block of columns. others: the weights, the result."""
    *stacks, out_ref = others
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
