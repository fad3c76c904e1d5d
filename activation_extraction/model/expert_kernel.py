"""Computes experts on TPUs with three Pallas kernels, which fetch each row from its place in HBM.

There is a row for each pair of a token and one of its experts. A tile consists of at most ROWS rows
of the same expert, padded to ROWS rows. The rows take this path:

    1. `make_table` assigns the rows to tiles: it sorts the rows by expert, and pads the rows of
       every expert to whole tiles. The table contains the token and the expert of each row.
    2. The kernel GATED fetches the tokens of a tile from x (T, D), one by one, while it multiplies
       the previous tile. It computes gated = silu(x gate) * (x up), (n', M) bfloat16, in the order
       of the tiles.
    3. The kernel WEIGHTED computes (gated down) * w, (n', D) bfloat16, in the same order, where w
       is the routing weight of the row: the weight that the router gives to this expert for this
       token.
    4. The kernel ADDED fetches the rows of each token and adds them up in float32, (T, D). Rows of
       other devices' experts are not fetched, and count as 0.

The tiles of an expert follow one another, so its weight matrices are read once. They are read
directly from the stack of the weights of all layers, because a kernel knows the layer and each
tile's expert before it starts. Only tiles with rows are computed. Arrays of rows have the shape
(n', D / LANES, LANES), in which the values of a row are contiguous, so that a kernel can fetch a
row. In an array (n', D), the parts of a row would lie between parts of other rows.

Letters: T tokens, D hidden, M width of an expert, E experts, X experts of a token, and n' rows of
all tiles with their padding: T * X + E * ROWS, rounded up to whole tiles.
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

from activation_extraction.model.experts import LANES, Stacks, sum_experts_with_ragged_dot
from activation_extraction.model.numerics import einsum

SUBLANES = 8  # the number of rows of a float32 register
ROWS = 128  # the number of rows of a tile: rows of one expert that are multiplied together
# The number of consecutive tokens that form a token block. The kernel `ADDED` adds up the rows of
# each token; each program of its grid does so for one token block.
TOKENS = 16
# The number of tokens that one iteration of a loop of the kernel GATED begins to fetch. The last
# iteration of a tile may also fetch tokens that do not belong to the tile; they are not used.
AT_ONCE = 8
# The names of the three kernels in profiles.
GATED, WEIGHTED, ADDED = "experts_gate_up", "experts_down", "experts_sum"
# The bytes of VMEM that two blocks of weights may take: the block that is used, and the next
# block, which is read meanwhile. The other bytes of FAST_MEMORY are for the tokens and results of
# tiles.
MOST_OF_WEIGHTS = 40 * 2**20
# The bytes of VMEM that a kernel may take. v5p has 64 MiB of it; v5e and v6e have more.
FAST_MEMORY = 56 * 2**20


class Table(NamedTuple):
    """The rows that each tile computes, and the rows that are added up for each token block.

    There is a row for each pair of a token and one of its experts. A tile consists of at most ROWS
    rows of the same expert, padded to ROWS rows. A token block is TOKENS consecutive tokens. The
    rows of a token block are fetched from the tiles into a buffer, and added up there for each
    token. Rows of experts that are not on this device are not fetched.

    Letters: X experts of a token.

    Attributes:
        used_tile_count: The number of tiles that have rows, () int32. These tiles come first.
        expert_numbers_of_tiles: The number of each tile's expert, (tiles,) int32.
        row_counts_of_tiles: The number of rows of each tile, without padding, (tiles,) int32.
        token_numbers_of_rows: The number of the token of each row of a tile, (tiles, 1, ROWS)
            int32.
        routing_weights_of_rows: The routing weight of each row of a tile, (tiles, 1, ROWS) float32.
        fetch_plans_of_token_blocks: The places from and to which the rows of each token block are
            fetched, (token blocks, 2, X * TOKENS) int32. Index 0 of the second axis holds the
            number of each row among the rows of all tiles. Index 1 holds the index of the row in
            the token block's buffer of X * TOKENS rows. Along the third axis, the rows to fetch
            come first. The numbers of the other rows are not used.
        fetched_row_counts_of_token_blocks: The number of rows to fetch for each token block,
            (token blocks,) int32.
    """

    used_tile_count: Array
    expert_numbers_of_tiles: Array
    row_counts_of_tiles: Array
    token_numbers_of_rows: Array
    routing_weights_of_rows: Array
    fetch_plans_of_token_blocks: Array
    fetched_row_counts_of_token_blocks: Array


def pallas_experts(
    x: Array, routing_weights: Array, chosen_experts: Array, stacks: Stacks, parts: int = 1
) -> Array:
    """Computes the weighted sum of each token's experts with three kernels for TPUs.

    The kernels cannot compute in float32, or with sizes D or M that are not multiples of LANES. In
    these cases, `sum_experts_with_ragged_dot` computes the sums instead.

    Letters: M width of an expert, X experts of a token.

    Args:
        x: The tokens, (T, D).
        routing_weights: The routing weights of each token's experts, (T, X) float32.
        chosen_experts: The numbers of each token's experts, (T, X) int32. Numbers that are no
            experts of `stacks` add nothing.
        stacks: The weights of the experts.
        parts: The number of equal parts of the tokens whose sums are computed one after the other,
            so that the sums of the first parts can be sent to other devices early.

    Returns:
        The sums, (T, D) float32. See `ExpertSumFunction`.
    """
    expert_count, hidden_size, expert_width = stacks.gate.shape[1:]
    if x.dtype == jnp.float32 or hidden_size % LANES or expert_width % LANES:
        return sum_experts_with_ragged_dot(x, routing_weights, chosen_experts, stacks, parts=parts)
    padding_widths = [(0, -len(x) % TOKENS), (0, 0)]
    chosen_experts = jnp.pad(chosen_experts, padding_widths, constant_values=-1)
    tile_table = make_table(jnp.pad(routing_weights, padding_widths), chosen_experts, expert_count)
    weighted_expert_rows = _run_weighted(tile_table, stacks, _run_gated(tile_table, stacks, x))
    part_count = parts if len(tile_table.fetch_plans_of_token_blocks) % parts == 0 else 1
    fetch_plans_of_parts = jnp.split(tile_table.fetch_plans_of_token_blocks, part_count)
    fetched_row_counts_of_parts = jnp.split(
        tile_table.fetched_row_counts_of_token_blocks, part_count
    )
    sums_of_parts = [
        _run_added(weighted_expert_rows, part_fetch_plans, part_fetched_row_counts)
        for part_fetch_plans, part_fetched_row_counts in zip(
            fetch_plans_of_parts, fetched_row_counts_of_parts, strict=True
        )
    ]
    return jnp.concatenate(sums_of_parts)[: len(x)]


def make_table(routing_weights: Array, chosen_experts: Array, expert_count: int) -> Table:
    """Assigns rows to tiles and to token blocks, by sorting the rows twice.

    There is a row for each pair of a token and one of its experts. A tile consists of at most ROWS
    rows of the same expert, padded to ROWS rows. A token block is TOKENS consecutive tokens. The
    first sort orders the rows by expert, together with the rows of padding that fill the tiles, so
    it puts every row into its place in a tile without lookups. TPUs sort fast, but look numbers up
    one by one. The second sort orders the rows by token block, because
    the kernel ADDED fetches the rows of one token block after another into a buffer, in which it
    adds them up.

    Letters: T tokens, E experts, X experts of a token.

    Args:
        routing_weights: The routing weights of each token's experts, (T, X) float32. T must be a
            multiple of TOKENS.
        chosen_experts: The numbers of each token's experts, (T, X) int32. Rows of experts outside
            0..E-1 count as 0: the kernel ADDED does not fetch them.
        expert_count: E, the number of experts.

    Returns:
        The table. For each tile, it contains the number of the tile's expert, and the number of
        rows. For each row of a tile, it contains the number of the row's token, and the routing
        weight of the row. For each token block, it contains the numbers of the rows that the
        kernel ADDED fetches, and the index of each of these rows in the buffer.
    """
    routed_row_count = chosen_experts.size
    experts_per_token = chosen_experts.shape[1]
    rows_per_token_block = TOKENS * experts_per_token
    flat_chosen_experts = chosen_experts.reshape(-1)
    local_choice_mask = (flat_chosen_experts >= 0) & (flat_chosen_experts < expert_count)
    # The number of each row's expert; `expert_count` for rows that are not computed, because this
    # device has no expert with their number.
    expert_numbers_of_rows = jnp.where(local_choice_mask, flat_chosen_experts, expert_count)
    expert_numbers = jnp.arange(expert_count)
    row_indices_in_tile = jnp.arange(ROWS)
    # For each expert, the number of rows of padding that its last tile needs.
    padding_row_counts = -(expert_numbers_of_rows[:, None] == expert_numbers).sum(axis=0) % ROWS
    needed_padding_row_mask = row_indices_in_tile < padding_row_counts[:, None]
    # The sizes of arrays must not depend on the routing, so there are ROWS rows of padding for each
    # expert. The last tile of an expert needs only some of them. This array contains the expert of
    # each row of padding that is needed, and `expert_count` for the other rows of padding.
    expert_numbers_of_padding_rows = jnp.where(
        needed_padding_row_mask, expert_numbers[:, None], expert_count
    ).reshape(-1)
    # More rows of padding, which belong to no expert, make the number of all rows a multiple of
    # ROWS.
    num_extra_padding_rows = -routed_row_count % ROWS
    expert_numbers_of_padding_rows = jnp.pad(
        expert_numbers_of_padding_rows, (0, num_extra_padding_rows), constant_values=expert_count
    )
    # Odd keys sort the padding of an expert after its rows of tokens, whose keys are even.
    expert_sort_keys = jnp.concatenate(
        [2 * expert_numbers_of_rows, 2 * expert_numbers_of_padding_rows + 1]
    )
    row_numbers = jnp.arange(expert_sort_keys.size)
    padded_routing_weights = jnp.pad(
        routing_weights.reshape(-1), (0, expert_numbers_of_padding_rows.size)
    )
    sort_operands = expert_sort_keys, row_numbers, padded_routing_weights
    sorted_expert_sort_keys, row_numbers_in_expert_order, routing_weights_in_expert_order = (
        lax.sort(sort_operands, num_keys=1, is_stable=False)
    )
    fetched_row_mask = (row_numbers_in_expert_order < routed_row_count) & (
        sorted_expert_sort_keys < 2 * expert_count
    )
    # The index of each row among the rows of its token block.
    row_indices_in_token_block = row_numbers_in_expert_order % rows_per_token_block
    expert_numbers_of_tiles = sorted_expert_sort_keys[::ROWS] // 2
    # The second sort orders the rows by token block and then by token. In each token block, the
    # rows that are not fetched come last, because `rows_per_token_block` is added to their keys.
    token_block_sort_keys = (
        2 * row_numbers_in_expert_order
        - row_indices_in_token_block
        + jnp.where(fetched_row_mask, 0, rows_per_token_block)
    )
    token_block_sort_keys = jnp.where(
        row_numbers_in_expert_order < routed_row_count, token_block_sort_keys, 2 * routed_row_count
    )
    token_block_sort_keys, tile_row_numbers_in_token_block_order = lax.sort(
        (token_block_sort_keys, row_numbers), num_keys=1, is_stable=False
    )
    # The remainder is the index of a row in its token block, because a sort key is a multiple of
    # `rows_per_token_block` plus this index. These indices count the rows token by token; a token
    # has one row for each of its experts.
    row_indices_in_token_block = token_block_sort_keys[:routed_row_count] % rows_per_token_block
    token_indices_in_token_block = row_indices_in_token_block // experts_per_token
    # The buffer of a token block instead contains the first row of each token, then the second row
    # of each token, and so on. So `_add_fetched` can add TOKENS consecutive rows at a time, one to
    # the sum of each token.
    row_indices_in_buffer = (
        row_indices_in_token_block % experts_per_token * TOKENS + token_indices_in_token_block
    )
    tile_row_numbers_of_token_blocks = tile_row_numbers_in_token_block_order[
        :routed_row_count
    ].reshape(-1, 1, rows_per_token_block)
    row_indices_in_buffer = row_indices_in_buffer.reshape(-1, 1, rows_per_token_block)
    fetched_row_masks_of_token_blocks = (expert_numbers_of_rows < expert_count).reshape(
        -1, rows_per_token_block
    )
    fetched_row_counts_of_token_blocks = fetched_row_masks_of_token_blocks.sum(axis=1)
    return Table(
        used_tile_count=(expert_numbers_of_tiles < expert_count).sum(),
        expert_numbers_of_tiles=jnp.minimum(expert_numbers_of_tiles, expert_count - 1),
        row_counts_of_tiles=fetched_row_mask.reshape(-1, ROWS).sum(axis=1),
        token_numbers_of_rows=jnp.where(
            fetched_row_mask, row_numbers_in_expert_order // experts_per_token, 0
        ).reshape(-1, 1, ROWS),
        routing_weights_of_rows=routing_weights_in_expert_order.reshape(-1, 1, ROWS),
        fetch_plans_of_token_blocks=jnp.concatenate(
            [tile_row_numbers_of_token_blocks, row_indices_in_buffer], axis=1
        ),
        fetched_row_counts_of_token_blocks=fetched_row_counts_of_token_blocks,
    )


def columns_per_block(columns: int, bytes_per_column: int) -> int:
    """Returns the number of columns of the largest block of weights of which two fit in VMEM.

    A block consists of consecutive columns of an expert's weight matrix. Two blocks may take
    MOST_OF_WEIGHTS bytes of VMEM, because the next block is read while a block is used. The result
    is a multiple of LANES that divides `columns`. It is LANES if no multiple fits.

    Args:
        columns: The number of columns of the matrix, a multiple of LANES.
        bytes_per_column: The bytes of a column of the matrix; for two matrices that a kernel reads
            together, the bytes of a column of both.
    """
    column_count_of_block = LANES
    for candidate_column_count in range(LANES, columns + 1, LANES):
        block_pair_bytes = 2 * candidate_column_count * bytes_per_column
        if columns % candidate_column_count == 0 and block_pair_bytes <= MOST_OF_WEIGHTS:
            column_count_of_block = candidate_column_count
    return column_count_of_block


def _call(
    kernel: Callable[..., None], scalars: list[Array], out: Any, name: str, **options: Any
) -> Callable[..., Array]:
    """Returns a function that calls a kernel, with its first inputs already bound.

    Args:
        kernel: The kernel.
        scalars: The first inputs of the kernel. The index maps of blocks may read them before the
            kernel runs.
        out: The shape and dtype of the result.
        name: The name of the kernel in profiles.
        options: The other fields of `pltpu.PrefetchScalarGridSpec`, such as the grid.

    Returns:
        A function that maps the remaining inputs of the kernel to its result.
    """
    grid_spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=len(scalars), **options)
    compiler_params = pltpu.CompilerParams(vmem_limit_bytes=FAST_MEMORY)
    run_kernel = pl.pallas_call(
        kernel, out, grid_spec=grid_spec, compiler_params=compiler_params, name=name
    )
    return partial(run_kernel, *scalars)


def _run_gated(table: Table, stacks: Stacks, x: Array) -> Array:
    """Computes silu(x gate) * (x up) for the rows of all tiles.

    There is a row for each pair of a token and one of its experts. A tile consists of at most ROWS
    rows of the same expert, padded to ROWS rows.

    Letters: n' rows of all tiles, M width of an expert.

    Args:
        table: The table that assigns the rows to tiles.
        stacks: The weights of the experts.
        x: The tokens, (T, D).

    Returns:
        The results in the order of the tiles, (n', M) in the dtype of x.
    """
    _, _, hidden_size, expert_width = stacks.gate.shape
    tile_count = len(table.expert_numbers_of_tiles)
    column_count_of_block = columns_per_block(expert_width, 2 * hidden_size * x.dtype.itemsize)

    # A step of the grid fetches its own tile, but multiplies the tile of the step before, so it
    # reads the weights and writes the result for the step before.
    def weight_index(
        column: Any, grid_index: Any, layer: Any, experts: Any, _counts: Any
    ) -> tuple[Any, ...]:
        return layer[0], experts[jnp.maximum(grid_index - 1, 0)], 0, column

    def result_index(column: Any, grid_index: Any, *_: Any) -> tuple[Any, ...]:
        return jnp.maximum(grid_index - 1, 0), column

    return _call(
        _multiply_fetched,
        [stacks.layer_number.reshape(1), table.expert_numbers_of_tiles, table.row_counts_of_tiles],
        jax.ShapeDtypeStruct((tile_count * ROWS, expert_width), x.dtype),
        GATED,
        grid=(expert_width // column_count_of_block, table.used_tile_count + 1),
        in_specs=[
            pl.BlockSpec(
                (None, 1, ROWS),
                lambda column, grid_index, *_: (grid_index, 0, 0),
                memory_space=pltpu.SMEM,
            ),
            pl.BlockSpec(memory_space=pltpu.HBM),
            *[pl.BlockSpec((None, None, hidden_size, column_count_of_block), weight_index)] * 2,
        ],
        out_specs=pl.BlockSpec((ROWS, column_count_of_block), result_index),
        scratch_shapes=[
            pltpu.VMEM((2, ROWS, hidden_size // LANES, LANES), x.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )(table.token_numbers_of_rows, x.reshape(len(x), -1, LANES), stacks.gate, stacks.up)


def _multiply_fetched(
    _layer: Any,
    _experts: Any,
    counts: Any,
    tokens: Any,
    x_ref: Any,
    gate_ref: Any,
    up_ref: Any,
    out_ref: Any,
    buffers: Any,
    semaphores: Any,
) -> None:
    """Begins to fetch the tokens of a tile, and computes silu(x gate) * (x up) for the tile before.

    Each step of the kernel's grid fetches its own tile, and multiplies the tile of the previous
    step, whose tokens have arrived meanwhile. A tile has a row for each of at most ROWS tokens that
    have chosen the same expert, and is padded to ROWS rows.

    Args:
        _layer: The number of the layer, which only the index maps read.
        _experts: The expert of each tile, which only the index maps read.
        counts: The number of rows of each tile, without padding, (tiles,) int32.
        tokens: The token of each row of this step's tile, (1, ROWS) int32.
        x_ref: All tokens in HBM, (T, D / LANES, LANES).
        gate_ref: A block of columns of the gate projection of the previous tile's expert,
            (D, columns).
        up_ref: The same columns of the up projection, (D, columns).
        out_ref: The same columns of the previous tile's result, silu(x gate) * (x up),
            (ROWS, columns).
        buffers: Two buffers for the tokens of a tile, (2, ROWS, D / LANES, LANES).
        semaphores: The DMA semaphore of each buffer, (2,).
    """
    grid_index = pl.program_id(1)
    previous_grid_index = jnp.maximum(grid_index - 1, 0)
    fetch_iteration_count = pl.cdiv(counts[grid_index], AT_ONCE)
    fetch_iteration_count_of_previous_tile = pl.cdiv(counts[previous_grid_index], AT_ONCE)

    def start_copies(iteration: Any, _: None) -> None:
        for row_in_iteration in range(AT_ONCE):
            row_number = iteration * AT_ONCE + row_in_iteration
            token_row_ref = x_ref.at[pl.ds(tokens[0, row_number], 1)]
            buffer_row_ref = buffers.at[grid_index % 2, pl.ds(row_number, 1)]
            pltpu.make_async_copy(
                token_row_ref, buffer_row_ref, semaphores.at[grid_index % 2]
            ).start()

    lax.fori_loop(0, fetch_iteration_count, start_copies, None)

    @pl.when(grid_index > 0)
    def multiply() -> None:
        buffer_index = (grid_index - 1) % 2
        _wait(buffers, semaphores, buffer_index, fetch_iteration_count_of_previous_tile * AT_ONCE)
        x = buffers[buffer_index].reshape(buffers.shape[1], -1)
        gate_product = einsum("nD,DM->nM", x, gate_ref[...])
        up_product = einsum("nD,DM->nM", x, up_ref[...])
        out_ref[...] = (jax.nn.silu(gate_product) * up_product).astype(out_ref.dtype)


def _wait(buffers: Any, semaphores: Any, buffer: Any, count: Any) -> None:
    """Waits until the copies of rows into a buffer are complete.

    Args:
        buffers: The two buffers into which rows are copied, (2, rows of a buffer, D / LANES,
            LANES).
        semaphores: The DMA semaphore of each buffer, (2,).
        buffer: The index of the buffer, 0 or 1.
        count: The number of rows that are copied into the buffer.
    """

    @pl.when(count > 0)
    def wait() -> None:
        # Waiting for a copy subtracts its size from the semaphore. The copy below is never started;
        # it only has the size of all copies into the buffer.
        copied_rows_ref = buffers.at[buffer, pl.ds(0, count)]
        pltpu.make_async_copy(copied_rows_ref, copied_rows_ref, semaphores.at[buffer]).wait()


def _run_weighted(table: Table, stacks: Stacks, gated: Array) -> Array:
    """Multiplies the rows of all tiles by the down matrices, and then by the routing weights.

    There is a row for each pair of a token and one of its experts, and each row is multiplied by
    the down matrix of its expert. A tile consists of at most ROWS rows of the same expert, padded
    to ROWS rows.

    Letters: n' rows of all tiles, M width of an expert.

    Args:
        table: The table that assigns the rows to tiles, and contains the routing weight of each
            row.
        stacks: The weights of the experts.
        gated: The rows silu(x gate) * (x up), which `_run_gated` returns, (n', M).

    Returns:
        The results in the order of the tiles, (n', D / LANES, LANES) in the dtype of `gated`.
    """
    _, _, expert_width, hidden_size = stacks.down.shape
    column_count_of_block = columns_per_block(hidden_size, expert_width * gated.dtype.itemsize)

    def weight_index(column: Any, tile: Any, layer: Any, experts: Any) -> tuple[Any, ...]:
        return layer[0], experts[tile], 0, column

    return _call(
        _multiply_down,
        [stacks.layer_number.reshape(1), table.expert_numbers_of_tiles],
        jax.ShapeDtypeStruct((len(gated), hidden_size // LANES, LANES), gated.dtype),
        WEIGHTED,
        grid=(hidden_size // column_count_of_block, jnp.maximum(table.used_tile_count, 1)),
        in_specs=[
            pl.BlockSpec((None, 1, ROWS), lambda column, tile, *_: (tile, 0, 0)),
            pl.BlockSpec((ROWS, expert_width), lambda column, tile, *_: (tile, 0)),
            pl.BlockSpec((None, None, expert_width, column_count_of_block), weight_index),
        ],
        out_specs=pl.BlockSpec(
            (ROWS, column_count_of_block // LANES, LANES),
            lambda column, tile, *_: (tile, column, 0),
        ),
    )(table.routing_weights_of_rows, gated, stacks.down)


def _multiply_down(
    _layer: Any, _experts: Any, weights_ref: Any, gated_ref: Any, down_ref: Any, out_ref: Any
) -> None:
    """Multiplies a tile of rows by the down projection, and scales each row by its routing weight.

    Letters: M width of an expert.

    Args:
        _layer: The number of the layer, which only the index maps read.
        _experts: The expert of each tile, which only the index maps read.
        weights_ref: The routing weight of each row of the tile, (1, ROWS) float32.
        gated_ref: The rows of the tile, silu(x gate) * (x up), (ROWS, M).
        down_ref: A block of columns of the expert's down projection, (M, columns).
        out_ref: The same columns of the result, (ROWS, columns / LANES, LANES).
    """
    repeated_weights = jnp.broadcast_to(weights_ref[...], (SUBLANES, ROWS))
    routing_weight_column = repeated_weights.T[:, :1]  # shape (ROWS, 1)
    y = routing_weight_column * einsum("nM,MD->nD", gated_ref[...], down_ref[...])
    out_ref[...] = y.astype(out_ref.dtype).reshape(out_ref.shape)


def _run_added(rows: Array, fetch_plans: Array, counts: Array) -> Array:
    """Adds up the results of each token's experts, for the tokens of some token blocks.

    A row is the result of one expert for one token, multiplied by its routing weight. The rows are
    stored in tiles, and a tile contains rows of a single expert. A token block is TOKENS
    consecutive tokens. The kernel fetches the rows of a token block from the tiles to a buffer, and
    adds up the rows of each token there.

    Letters: n' rows of all tiles, X experts of a token.

    Args:
        rows: The rows of all tiles, (n', D / LANES, LANES).
        fetch_plans: For each token block, the number of each of its rows among the rows of all
            tiles (index 0 of the second axis), and the index of each row in the token block's
            buffer (index 1), (token blocks, 2, X * TOKENS) int32.
        counts: The number of rows that are fetched for each token block, (token blocks,) int32.

    Returns:
        The sums, (token blocks * TOKENS, D) float32.
    """
    token_block_count, _, rows_per_token_block = fetch_plans.shape
    hidden_size = math.prod(rows.shape[1:])

    # Each step of the grid fetches the rows of one token block, and adds up the rows of the token
    # block that the step before it has fetched. So there is one more step than token blocks. This
    # last step fetches nothing, and its index is limited to the last token block.
    def fetch_index(grid_index: Any, _: Any) -> tuple[Any, ...]:
        return jnp.minimum(grid_index, token_block_count - 1), 0, 0

    return _call(
        _add_fetched,
        [jnp.pad(counts, (0, 1))],
        jax.ShapeDtypeStruct((token_block_count * TOKENS, hidden_size), jnp.float32),
        ADDED,
        grid=(token_block_count + 1,),
        in_specs=[
            pl.BlockSpec((None, 2, rows_per_token_block), fetch_index, memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=pl.BlockSpec(
            (TOKENS, hidden_size), lambda grid_index, _: (jnp.maximum(grid_index - 1, 0), 0)
        ),
        scratch_shapes=[
            pltpu.VMEM((2, rows_per_token_block, *rows.shape[1:]), rows.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )(fetch_plans, rows)


def _add_fetched(
    counts: Any, fetch_plan: Any, rows_ref: Any, out_ref: Any, buffers: Any, semaphores: Any
) -> None:
    """Begins to fetch the rows of a token block, and adds up the rows of the token block before.

    Each step of the kernel's grid fetches the rows of its own token block. It adds up the rows of
    each token of the previous step's token block, whose rows have arrived meanwhile. A token block
    is TOKENS consecutive tokens, and a row is the result of one of a token's experts for this
    token. The rows lie in tiles: a tile consists of ROWS rows of one expert, with padding.

    Letters: n' rows of all tiles, X experts of a token.

    Args:
        counts: The number of rows that are fetched for each token block, and a 0 at the end,
            (token blocks + 1,) int32.
        fetch_plan: For each row of this step's token block, its number among the rows of all tiles
            (index 0) and its index in the buffer (index 1), (2, X * TOKENS) int32.
        rows_ref: The rows of all tiles in HBM, (n', D / LANES, LANES).
        out_ref: The sum of the rows of each token of the previous token block, (TOKENS, D)
            float32.
        buffers: Two buffers for the rows of a token block, (2, X * TOKENS, D / LANES, LANES).
        semaphores: The DMA semaphore of each buffer, (2,).
    """
    grid_index = pl.program_id(0)
    rows_per_token_block = buffers.shape[1]

    # Rows that are not fetched must count as 0, so the buffer is cleared if there are any.
    @pl.when(counts[grid_index] < rows_per_token_block)
    def clear() -> None:
        buffers[grid_index % 2] = jnp.zeros_like(buffers[grid_index % 2])

    def start_copy(number: Any, _: None) -> None:
        source_row_ref = rows_ref.at[pl.ds(fetch_plan[0, number], 1)]
        buffer_row_ref = buffers.at[grid_index % 2, pl.ds(fetch_plan[1, number], 1)]
        pltpu.make_async_copy(source_row_ref, buffer_row_ref, semaphores.at[grid_index % 2]).start()

    lax.fori_loop(0, counts[grid_index], start_copy, None)

    @pl.when(grid_index > 0)
    def add() -> None:
        buffer_index = (grid_index - 1) % 2
        _wait(buffers, semaphores, buffer_index, counts[grid_index - 1])
        token_sums = jnp.zeros((TOKENS, *buffers.shape[2:]), jnp.float32)
        for first_buffer_row_index in range(0, rows_per_token_block, TOKENS):
            token_sums += buffers[buffer_index, pl.ds(first_buffer_row_index, TOKENS)].astype(
                jnp.float32
            )
        out_ref[...] = token_sums.reshape(out_ref.shape)
