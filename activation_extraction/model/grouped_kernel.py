"""Computes experts on NVIDIA GPUs with a Pallas kernel that multiplies rows with experts' weights.

There is a row for each pair of a token and one of its experts, and the rows are sorted by expert.
Every program of the kernel multiplies a tile of rows of one expert with a block of columns of the
expert's weights. It looks up its expert and its rows in a table, so that experts without rows cost
nothing. experts.py sorts the rows and adds up the results.

Letters: n rows, L layers, E experts, D inputs and M outputs of the matrix that is multiplied.
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

from activation_extraction.model.experts import Stacks, in_sorted_rows, sum_experts_in_tiles

# A program of the kernel multiplies a tile of ROWS rows with a block of COLUMNS columns of the
# weights, at most INNER inputs at a time. These sizes were chosen when the gate, up and down
# projections still had one kernel each. Then the three kernels took 3.5 ms for 16,384 tokens in one
# layer of Qwen3-30B-A3B on an H100, and `sum_experts_in_tiles` took 45 ms. Now one kernel computes
# both gate and up, for which there is no such measurement.
ROWS, COLUMNS, INNER = 128, 128, 64


def grouped_experts(
    x: Array,
    routing_weights: Array,
    chosen_experts: Array,
    stacks: Stacks,
    parts: int = 1,
    interpret: bool = False,
) -> Array:
    """Computes the weighted sum of the results of each token's experts, with two kernels.

    Letters: T tokens, D hidden, X experts of a token.

    The results of the kernels have the dtype of x. If x is float32, this function calls
    `sum_experts_in_tiles` instead of the kernels, because the GPU's matrix units would round
    float32 values.

    Args:
        x: The tokens, (T, D).
        routing_weights: The routing weights of each token's experts, (T, X) float32.
        chosen_experts: The numbers of each token's experts, (T, X) int32.
        stacks: The weights of the experts of all layers, and the number of the layer that is
            computed.
        parts: The number of equal parts into which the tokens are divided. The parts' sums are
            computed one after the other, so that the sums of the first parts can be sent to other
            devices early.
        interpret: Whether Pallas interprets the kernels, for tests without a GPU.

    Returns:
        The sums, (T, D) float32. See `ExpertSumFunction`.
    """
    if x.dtype == jnp.float32:
        return sum_experts_in_tiles(x, routing_weights, chosen_experts, stacks, parts=parts)
    run_experts = partial(_run_in_kernels, interpret=interpret)
    return in_sorted_rows(run_experts, x, routing_weights, chosen_experts, stacks, parts=parts)


def _run_in_kernels(x: Array, row_counts: Array, stacks: Stacks, interpret: bool) -> Array:
    """Runs experts on sorted rows with two kernels.

    One kernel computes the gate and up projections, and the other computes the down projection.

    Letters: n rows, E experts.

    Args:
        x: The inputs of the experts, (n, D), a row for each pair of a token and one of its experts,
            sorted by expert.
        row_counts: The number of rows of each expert, (E,) int32.
        stacks: The weights of the experts of all layers, and the number of the layer that is
            computed.
        interpret: Whether Pallas interprets the kernels, for tests without a GPU.

    Returns:
        The result of each row's expert, (n, D) in the dtype of x. Rows after the last expert's rows
        are meaningless.
    """
    gate_stack, up_stack, down_stack = (
        weights_of_all_layers.reshape(-1, *weights_of_all_layers.shape[2:])
        for weights_of_all_layers in (stacks.gate, stacks.up, stacks.down)
    )
    first_expert_index_in_stacks = stacks.layer_number * len(row_counts)
    # silu(gate projection) * up projection of each row.
    gated_values = _product(
        x, [gate_stack, up_stack], row_counts, first_expert_index_in_stacks, interpret
    )
    return _product(gated_values, [down_stack], row_counts, first_expert_index_in_stacks, interpret)


def _product(
    x: Array, stacks: Sequence[Array], row_counts: Array, first_expert: Array, interpret: bool
) -> Array:
    """Multiplies rows with the weights of their experts.

    Letters: n rows, L layers, E experts, D inputs, M outputs.

    Args:
        x: The rows to multiply, (n, D), one for each pair of a token and one of its experts, sorted
            by expert.
        stacks: One or two arrays with the weights of the experts of all layers, (L * E, D, M). With
            one array, the result is x times the weights. With two arrays, gate and up, it is
            silu(x gate) * (x up).
        row_counts: The number of rows of each expert of this layer, (E,) int32.
        first_expert: The number of this layer's first expert in the stacks, () int32.
        interpret: Whether Pallas interprets the kernel, for tests without a GPU.

    Returns:
        The result, (n, M) in the dtype of x. Rows after the first sum(row_counts) rows belong to no
        expert, and are meaningless.
    """
    row_count, input_width = x.shape
    output_width = stacks[0].shape[-1]
    # The last tile of each expert may be partly empty, which takes up to one more tile per expert.
    tile_count = -(-row_count // ROWS) + len(row_counts)
    block_column_count = math.gcd(output_width, COLUMNS)
    # The kernel runs once for each block of columns and each tile of rows.
    tile_entry_spec = pl.BlockSpec((1,), lambda block, tile: (tile,))
    stack_block_shape = len(stacks[0]), input_width, block_column_count
    stack_block_spec = pl.BlockSpec(stack_block_shape, lambda block, tile: (0, 0, block))
    expert_numbers_of_tiles, first_row_indices_of_tiles, end_row_indices_of_tiles = _tile_table(
        row_counts, tile_count
    )
    return pl.pallas_call(
        partial(_multiply, inputs_at_once=math.gcd(input_width, INNER)),
        grid=(output_width // block_column_count, tile_count),
        in_specs=[
            *([tile_entry_spec] * 3),
            pl.BlockSpec(x.shape, lambda block, tile: (0, 0)),
            *([stack_block_spec] * len(stacks)),
        ],
        out_specs=pl.BlockSpec((row_count, block_column_count), lambda block, tile: (0, block)),
        out_shape=jax.ShapeDtypeStruct((row_count, output_width), x.dtype),
        # If rows are multiplied with two stacks (the gate and the up projection) at the same time,
        # the sums need twice the registers, so there are twice the warps. There are fewer stages of
        # the kernel's pipeline, because each stage takes more of a core's memory.
        compiler_params=plgpu.CompilerParams(num_warps=4 * len(stacks), num_stages=4 - len(stacks)),
        interpret=interpret,
    )(
        first_expert + expert_numbers_of_tiles,
        first_row_indices_of_tiles,
        end_row_indices_of_tiles,
        x,
        *stacks,
    )


def _tile_table(row_counts: Array, tile_count: int) -> tuple[Array, Array, Array]:
    """Divides the rows, which are sorted by expert, into tiles of at most ROWS rows of one expert.

    Each program of the kernel computes one tile, and looks its expert and rows up in the returned
    arrays.

    Args:
        row_counts: The number of rows of each expert, (E,) int32.
        tile_count: The number of tiles, at least the number that is needed for all rows.

    Returns:
        A tuple of three arrays, each (tile_count,) int32:

        - The expert of each tile.
        - The index of the first row of each tile. In a tile that is not needed, it is equal to or
          larger than the end in the third array, so that the tile has no rows.
        - The end of the rows of each tile's expert: the index of the row after the last one.
    """
    tile_counts_of_experts = -(-row_counts // ROWS)
    end_row_indices_of_experts = jnp.cumsum(row_counts)
    tile_numbers = jnp.arange(tile_count, dtype=jnp.int32)
    end_tile_numbers_of_experts = jnp.cumsum(tile_counts_of_experts)
    expert_numbers_of_tiles = jnp.searchsorted(
        end_tile_numbers_of_experts, tile_numbers, side="right"
    ).clip(max=len(row_counts) - 1)
    tile_numbers_in_expert = (
        tile_numbers
        - (end_tile_numbers_of_experts - tile_counts_of_experts)[expert_numbers_of_tiles]
    )
    first_row_indices_of_tiles = (end_row_indices_of_experts - row_counts)[
        expert_numbers_of_tiles
    ] + tile_numbers_in_expert * ROWS
    return (
        expert_numbers_of_tiles.astype(jnp.int32),
        first_row_indices_of_tiles,
        end_row_indices_of_experts[expert_numbers_of_tiles],
    )


def _multiply(
    expert_ref: Any,
    start_ref: Any,
    end_ref: Any,
    x_ref: Any,
    *stacks_and_out: Any,
    inputs_at_once: int,
) -> None:
    """Multiplies one tile of rows with one block of columns of one or two stacks.

    A tile is at most ROWS rows of one expert. A stack is an array with the weights of the experts
    of all layers. With two stacks, gate and up, the result is silu(x gate) * (x up).

    Letters: n rows, L layers, E experts, D inputs.

    Args:
        expert_ref: The number of the tile's expert in the stacks, (1,) int32.
        start_ref: The index of the first row of the tile, (1,) int32.
        end_ref: The index after the last row of the expert, (1,) int32. Rows of the tile from this
            index on belong to other experts, and their results are not written.
        x_ref: All rows, (n, D).
        stacks_and_out: The block of columns of each stack, (L * E, D, columns), then the same
            columns of the result, (n, columns).
        inputs_at_once: The number of inputs that are multiplied at a time.
    """
    *weight_stack_refs, out_ref = stacks_and_out
    first_row_index = start_ref[0]
    end_row_index = end_ref[0]
    expert_number = expert_ref[0]
    tile_rows_slice = pl.ds(first_row_index, ROWS)
    # The rows after the expert's last one belong to other experts.
    expert_rows_mask = (first_row_index + jnp.arange(ROWS) < end_row_index)[:, None]

    def add_inputs(number: Array, products: list[Array]) -> list[Array]:
        input_slice = pl.ds(number * inputs_at_once, inputs_at_once)
        x = plgpu.load(x_ref.at[tile_rows_slice, input_slice], mask=expert_rows_mask, other=0.0)
        updated_products = []
        for product_so_far, weight_stack_ref in zip(products, weight_stack_refs, strict=True):
            updated_products.append(
                product_so_far + plgpu.dot(x, weight_stack_ref[expert_number, input_slice, :])
            )
        return updated_products

    @pl.when(first_row_index < end_row_index)
    def _() -> None:
        initial_sums = [jnp.zeros((ROWS, out_ref.shape[1]), jnp.float32)] * len(weight_stack_refs)
        products = lax.fori_loop(0, x_ref.shape[1] // inputs_at_once, add_inputs, initial_sums)
        tile_result = products[-1]
        if len(products) == 2:
            tile_result *= jax.nn.silu(products[0])
        plgpu.store(
            out_ref.at[tile_rows_slice, :],
            tile_result.astype(out_ref.dtype),
            mask=expert_rows_mask,
        )
