"""Products of rows with the weights of their experts on NVIDIA GPUs: a Pallas kernel.

The rows are sorted by expert. Every program multiplies a tile of one expert's rows with some of the
columns of its weights; it finds both in a table, so experts without rows cost nothing.

Letters: n rows, E experts, D inputs, M outputs of an expert.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from activation_extraction.model.experts import in_products, tiled_experts

# Of a tile. With 16,384 tokens of Qwen3-30B-A3B an H100 took 3.5 ms, and `tiled_experts` 45.
ROWS, COLUMNS, INNER = 128, 128, 64


def grouped_experts(
    x: Array, sizes: Array, gate: Array, up: Array, down: Array, interpret: bool = False
) -> Array:
    """Computes experts with one kernel for each of the three products. See `GroupedExperts`.

    float32 is left to `tiled_experts`: the GPU's matrix units would round it. `interpret` is for
    tests.
    """
    if x.dtype == jnp.float32:
        return tiled_experts(x, sizes, gate, up, down)
    return in_products(partial(grouped_product, interpret=interpret), x, sizes, gate, up, down)


def grouped_product(x: Array, weights: Array, sizes: Array, interpret: bool = False) -> Array:
    """Multiplies rows with their experts' weights: (n, D), (E, D, M), (E,) -> (n, M) float32.

    What is returned for rows without an expert means nothing.
    """
    (count, inner), (experts, _, columns) = x.shape, weights.shape
    tiles, width = -(-count // ROWS) + experts, math.gcd(columns, COLUMNS)
    of_tile = pl.BlockSpec((1,), lambda column, tile: (tile,))
    return pl.pallas_call(
        partial(_multiply, step=math.gcd(inner, INNER)),
        grid=(columns // width, tiles),
        in_specs=[
            *([of_tile] * 3),
            pl.BlockSpec(x.shape, lambda column, tile: (0, 0)),
            pl.BlockSpec((experts, inner, width), lambda column, tile: (0, 0, column)),
        ],
        out_specs=pl.BlockSpec((count, width), lambda column, tile: (0, column)),
        out_shape=jax.ShapeDtypeStruct((count, columns), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )(*_tiles(sizes, tiles), x, weights)


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
    expert_ref: Any,
    start_ref: Any,
    end_ref: Any,
    x_ref: Any,
    weights_ref: Any,
    out_ref: Any,
    step: int,
) -> None:
    """Multiplies one tile of rows with one block of columns."""
    start, end, expert = start_ref[0], end_ref[0], expert_ref[0]
    rows = pl.ds(start, ROWS)
    real = (start + jnp.arange(ROWS) < end)[:, None]

    def add(number: Array, total: Array) -> Array:
        inner = pl.ds(number * step, step)
        x = plgpu.load(x_ref.at[rows, inner], mask=real, other=0.0)
        return total + plgpu.dot(x, weights_ref[expert, inner, :])

    @pl.when(start < end)
    def _() -> None:
        total = jnp.zeros((ROWS, out_ref.shape[1]), jnp.float32)
        total = lax.fori_loop(0, x_ref.shape[1] // step, add, total)
        plgpu.store(out_ref.at[rows, :], total, mask=real)
