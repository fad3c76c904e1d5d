"""Computes the gated delta rule with one Pallas kernel for TPUs, which writes only outputs to HBM.

The kernel computes the function `gated_delta_rule` of delta_net.py, in the same chunks of tokens.
The triangular system of equations between the tokens of a chunk, its inverse and the state S stay
in VMEM, the chip's fast memory. A program of the grid computes a block of two chunks, for one key
head and its value heads. The blocks of a row are the last axis of the grid, and scratch memory
keeps the state from one block to the next.

The matrix of one chunk's system, (C, C), would fill half of a register, and a quarter of a matrix
unit. So the matrices of a block's two chunks lie side by side in one array, (C, 2C): columns 0 to
C - 1 belong to the first chunk, and the other columns to the second. For a product, one operand
holds the two chunks one above the other instead, (2C, ...).

Products of float32 have the precision HIGHEST: each operand is the sum of three arrays in bfloat16,
and the six largest of their nine products are added up. With only three products, the errors of
a chunk's solution would be 15 to 50 times as large. The six products are computed as one product
whose summed axis is six times as long. The summed axis of each of the six products has C = 64
elements, while a matrix unit has 128 rows (256 in v6e). So a product on its own would leave half of
the rows idle (three quarters in v6e).

Queries and keys in bfloat16 are normalised after they are multiplied, because normalised values
would not be exact in bfloat16. So multiplying queries with keys takes a single product of bfloat16
arrays. Multiplying queries or keys with a float32 array takes three products instead of six,
because only the float32 array is split.

Letters, as in delta_net.py: B rows, T tokens, K key heads, G value heads of each key head, D key
size, U value size, C tokens of a chunk (also I and J, where token I reads token J).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from activation_extraction.model.delta_net import CHUNK, inverse_length
from activation_extraction.model.numerics import einsum

TWO_CHUNKS = 2 * CHUNK  # the number of tokens of a block, which is the number of a register's lanes
# The number of rows of a float32 register. Slicing an array at a multiple of this number moves no
# values.
SUBLANES = 8
FORGETS = -1e30  # log decay that erases the state: its exp is 0, and sums of such decays are finite


def pallas_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    segment_ids: Array,
    interpret: bool = False,
) -> Array:
    """Computes the gated delta rule on TPUs.

    This function replaces the log decay of the first token of each segment by a log decay that
    erases the state, so that no segment reads another one's state.

    Letters: B rows, T tokens per row, K key heads, G value heads of each key head, D key size, U
    value size.

    Args:
        q: The queries, (B, T, K, D), which the kernel normalises.
        k: The keys, (B, T, K, D), which the kernel normalises.
        v: The values, (B, T, K, G, U).
        log_decay: The log decays, (B, T, K, G) float32, at most 0.
        beta: The rates with which tokens change the state, (B, T, K, G) float32.
        segment_ids: The segment of each token, (B, T) int32; 0 for padding.
        interpret: Whether Pallas interprets the kernel, for tests without a TPU.

    Returns:
        The outputs, (B, T, K, G, U) in the dtype of v. See `DeltaRuleFunction`.
    """
    row_count, row_length, key_head_count, value_heads_per_key_head, value_head_dim = v.shape
    key_head_dim = k.shape[-1]
    segment_start_mask = jnp.pad(segment_ids[:, :-1], [(0, 0), (1, 0)]) != segment_ids
    log_decay = jnp.where(
        segment_start_mask[..., None, None], FORGETS, log_decay.astype(jnp.float32)
    )
    log_decays_and_betas = jnp.concatenate([log_decay, beta.astype(jnp.float32)], axis=-1)
    # The shape becomes (B, K, 2G, T). For each key head, the first G entries are the log decays of
    # its value heads, and the other G entries are the betas.
    log_decays_and_betas = jnp.moveaxis(_whole_blocks(log_decays_and_betas), 1, 3)
    # The shapes are q (B, K, T, D), k (B, K, T, D) and v (B, K, G, T, U).
    qkv_heads_first = [jnp.moveaxis(_whole_blocks(x), 1, -2) for x in (q, k, v)]

    # The kernel runs once for each row b, key head k and block of tokens n.
    key_block_spec = pl.BlockSpec(
        (None, None, TWO_CHUNKS, key_head_dim), lambda b, k, n: (b, k, n, 0)
    )
    value_block_spec = pl.BlockSpec(
        (None, None, value_heads_per_key_head, TWO_CHUNKS, value_head_dim),
        lambda b, k, n: (b, k, 0, n, 0),
    )
    gate_block_spec = pl.BlockSpec(
        (None, None, 2 * value_heads_per_key_head, TWO_CHUNKS), lambda b, k, n: (b, k, 0, n)
    )
    heads_first_output = pl.pallas_call(
        _compute_block,
        grid=(row_count, key_head_count, log_decays_and_betas.shape[-1] // TWO_CHUNKS),
        in_specs=[key_block_spec, key_block_spec, value_block_spec, gate_block_spec],
        out_specs=value_block_spec,
        out_shape=jax.ShapeDtypeStruct(qkv_heads_first[2].shape, v.dtype),
        scratch_shapes=[
            pltpu.VMEM((key_head_dim, value_heads_per_key_head * value_head_dim), jnp.float32)
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="gated_delta_rule",
    )(*qkv_heads_first, log_decays_and_betas)
    return jnp.moveaxis(heads_first_output, -2, 1)[:, :row_length]


def _whole_blocks(x: Array) -> Array:
    """Pads an array (B, T, ...) with zeros along T, up to the next multiple of TWO_CHUNKS."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % TWO_CHUNKS), *[(0, 0)] * (x.ndim - 2)])


def _compute_block(
    q_ref: Any, k_ref: Any, v_ref: Any, gates_ref: Any, out_ref: Any, state: Any
) -> None:
    """Computes the outputs of a block of 2C tokens, and the state S after the block.

    The block consists of two chunks of C tokens, which are computed one after the other. For all
    value heads of the key head at once, these formulas are computed for a chunk:

        update = inverse (beta (v - since k S))
        o      = since q S + within update
        S     <- total S + k^T (until update)

    The names in these formulas are:

        S        the state before the chunk, (D, U) for each value head
        update   the update vector of each token: the token adds the outer product of its key and
                 this vector to S
        o        the outputs
        q, k, v  the queries and keys, both normalised, and the values
        beta     the rate with which each token changes S
        since    the decay of S from the beginning of the chunk to each token
        until    the decay of S from each token to the end of the chunk
        total    the decay of S from the beginning to the end of the chunk
        inverse  the inverse of a matrix (C, C), which is 1 on its diagonal and 0 above it. Below
                 the diagonal, the entry in row I and column J is the product of the keys of tokens
                 I and J, times the decay of S from token J to token I, times beta of token I.
        within   a matrix (C, C), which is 0 above its diagonal. The other entries in row I and
                 column J are the factors of token J's update vector in the output of token I.

    `_prepare` and `_step` of delta_net.py compute the same values in another order: for all chunks,
    `_prepare` multiplies `inverse` by (beta v) and by (beta since k) before S is known.

    Letters: C tokens of a chunk, G value heads, D key size, U value size.

    Args:
        q_ref: The queries, not yet normalised, (2C, D).
        k_ref: The keys, not yet normalised, (2C, D).
        v_ref: The values, (G, 2C, U).
        gates_ref: The log decays of all value heads, then the rates (beta) of all value heads,
            (2G, 2C).
        out_ref: The outputs, (G, 2C, U).
        state: The state S of all value heads side by side, (D, G * U), which is updated.
    """

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        state[...] = jnp.zeros_like(state)

    q = q_ref[...]
    k = k_ref[...]
    q_scale = q.shape[-1] ** -0.5 * inverse_length(
        q
    )  # shape (2C, 1); C is the number of tokens of a chunk
    k_scale = inverse_length(k)  # shape (2C, 1)
    # k_scale as a row, (1, 2C). SUBLANES copies of the column are transposed, so that the result
    # fills a register. Its SUBLANES rows are equal, and the first one is used.
    k_scale_row = jnp.broadcast_to(k_scale, (k_scale.shape[0], SUBLANES)).T[:1]
    # The products of every two keys of a chunk, with the two chunks of the block side by side,
    # (C, 2C). `query_key_products` are the products of every query and every key of a chunk.
    key_products = _side_by_side(einsum("ID,JD->IJ", k, k)) * k_scale_row
    query_key_products = _side_by_side(einsum("ID,JD->IJ", q, k)) * k_scale_row
    query_key_products *= _side_by_side(q_scale)
    # The log decays and the rates (betas) of the tokens, (tokens of two chunks, value heads) each.
    log_decays, betas = jnp.split(gates_ref[...].T, 2, axis=1)
    head_count, _, value_head_dim = v_ref.shape
    # The following lists have one element for each value head. An element of
    # `decays_since_chunk_begin_of_heads` is a list of two arrays, one for each chunk.
    inverse_matrices_of_heads = []
    decayed_query_key_products_of_heads = []
    decays_since_chunk_begin_of_heads = []
    decays_until_chunk_end_of_heads = []
    for head_number in range(head_count):
        decays_between_tokens, decays_since_chunk_begin = _decays(log_decays[:, head_number, None])
        scaled_betas = _side_by_side(betas[:, head_number, None] * k_scale)
        inverse_matrices_of_heads.append(
            _inverse(scaled_betas * key_products * decays_between_tokens)
        )
        decayed_query_key_products_of_heads.append(query_key_products * decays_between_tokens)
        decays_since_chunk_begin_of_heads.append(decays_since_chunk_begin)
        decay_until_chunk_end = decays_between_tokens[-SUBLANES:].T[:, -1:]  # shape (2C, 1)
        decays_until_chunk_end_of_heads.append(k_scale * decay_until_chunk_end)
    for chunk_number in (0, 1):
        token_slice = slice(chunk_number * CHUNK, (chunk_number + 1) * CHUNK)
        chunk_decays_of_heads = [
            head_decays[chunk_number] for head_decays in decays_since_chunk_begin_of_heads
        ]
        keys_and_queries = jnp.concatenate([k[token_slice], q[token_slice]])
        products_with_state = _product("CD,DU->CU", keys_and_queries, state[...])
        key_state_products, query_state_products = jnp.split(products_with_state, 2)
        key_state_products_of_heads = jnp.split(
            k_scale[token_slice] * key_state_products, head_count, axis=1
        )
        query_state_products_of_heads = jnp.split(
            q_scale[token_slice] * query_state_products, head_count, axis=1
        )
        update_vectors_of_heads = []
        for head_number in range(head_count):
            values = v_ref[head_number, token_slice].astype(jnp.float32)
            values_in_state = (
                chunk_decays_of_heads[head_number] * key_state_products_of_heads[head_number]
            )
            right_hand_side = (values - values_in_state) * betas[token_slice, head_number, None]
            update_vectors = _product(
                "IJ,JU->IU", inverse_matrices_of_heads[head_number][:, token_slice], right_hand_side
            )
            update_vectors_of_heads.append(update_vectors)
            head_output = (
                chunk_decays_of_heads[head_number] * query_state_products_of_heads[head_number]
            )
            head_output += _product(
                "IJ,JU->IU",
                decayed_query_key_products_of_heads[head_number][:, token_slice],
                update_vectors,
            )
            out_ref[head_number, token_slice] = head_output.astype(out_ref.dtype)
        state_decays_of_heads = [
            jnp.broadcast_to(decay[-1:], (1, value_head_dim)) for decay in chunk_decays_of_heads
        ]
        decayed_vectors_of_heads = [
            decays_until_chunk_end_of_heads[head_number][token_slice]
            * update_vectors_of_heads[head_number]
            for head_number in range(head_count)
        ]
        state_update = _product(
            "CD,CU->DU", k[token_slice], jnp.concatenate(decayed_vectors_of_heads, axis=1)
        )
        state[...] = jnp.concatenate(state_decays_of_heads, axis=1) * state[...] + state_update


def _product(equation: str, x: Array, y: Array) -> Array:
    """Computes `einsum` with the precision HIGHEST, as one product of bfloat16 arrays.

    x and y are split into the bfloat16 arrays of which they are the sums. For each pair of an array
    of x and an array of y whose product is needed, the two arrays are appended to the left and the
    right operand along the summed axis, so that one product adds up the products of all pairs. The
    pairs with the smallest products come first, because a sum of small numbers is rounded little.

    Args:
        equation: The equation of the einsum, such as "CD,DU->CU". The summed axis must be the first
            axis of y.
        x: The left operand, float32 or bfloat16.
        y: The right operand, float32.

    Returns:
        The product, float32.
    """
    x_summands = _bfloat16_arrays(x)
    y_summands = _bfloat16_arrays(y)
    left_summands = []
    right_summands = []
    # The larger i + j is, the smaller is the product of x_summands[i] and y_summands[j]. Adding the
    # smallest numbers first loses the fewest bits, so the products with i + j = 2 come first.
    for sum_of_summand_indices in (2, 1, 0):
        for x_index, x_summand in enumerate(x_summands[: sum_of_summand_indices + 1]):
            left_summands.append(x_summand)
            right_summands.append(y_summands[sum_of_summand_indices - x_index])
    # The sum is over the first axis of y, whose letter is equation[3], such as D in "CD,DU->CU".
    # This is the number of the axis of x with the same letter.
    summed_axis_number = equation.index(equation[3])
    joined_left_operand = jnp.concatenate(left_summands, axis=summed_axis_number)
    return einsum(equation, joined_left_operand, jnp.concatenate(right_summands))


def _bfloat16_arrays(x: Array) -> list[Array]:
    """Splits an array into bfloat16 arrays whose sum is the array.

    Args:
        x: The array, bfloat16 or float32.

    Returns:
        The array itself if it is bfloat16. Otherwise three arrays: the first one is the rounded
        array, and each further one is the rounded remainder.
    """
    if x.dtype == jnp.bfloat16:
        return [x]
    bfloat16_summands = []
    for _ in range(3):
        bfloat16_summands.append(x.astype(jnp.bfloat16))
        x -= bfloat16_summands[-1].astype(jnp.float32)
    return bfloat16_summands


def _indices() -> tuple[Array, Array, Array]:
    """Returns the row, the column and the matrix of every value of two matrices side by side.

    Letters: C tokens of a chunk.

    Returns:
        The row of each value in its matrix, (C, 2C) int32.
        The column of each value in its matrix, (C, 2C) int32.
        The first column of each value's matrix in the array, (C, 2C) int32: 0 for the first matrix,
            CHUNK for the second.
    """
    row_indices = lax.broadcasted_iota(jnp.int32, (CHUNK, TWO_CHUNKS), 0)
    column_indices_of_both_matrices = lax.broadcasted_iota(jnp.int32, (CHUNK, TWO_CHUNKS), 1)
    return (
        row_indices,
        column_indices_of_both_matrices & (CHUNK - 1),
        column_indices_of_both_matrices & CHUNK,
    )


def _side_by_side(x: Array) -> Array:
    """Puts the values of the two chunks of a block side by side in one array.

    A block is two chunks of tokens, which are computed together.

    Letters: C tokens of a chunk.

    Args:
        x: A value for each pair of the block's tokens, (2C, 2C), or for each token, (2C, 1).

    Returns:
        The values, (C, 2C). Columns 0 to C - 1 belong to the first chunk, and the other columns to
        the second chunk. For pairs of tokens, these columns contain x[:C, :C] and x[C:, C:]; values
        of pairs of tokens in different chunks are dropped. For single tokens, each column of the
        first chunk is x[:C], and each column of the second chunk is x[C:].
    """
    _, _, first_columns_of_matrices = _indices()
    return jnp.where(first_columns_of_matrices == 0, x[:CHUNK], x[CHUNK:])


def _decays(log_decay: Array) -> tuple[Array, list[Array]]:
    """Returns the decay of the state S between tokens, and since the beginning of their chunk.

    `_decays` of delta_net.py computes the same decays for any number of chunks.

    Letters: C tokens of a chunk.

    Args:
        log_decay: The logarithm of the factor by which S decays at each token of a block of two
            chunks, (2C, 1).

    Returns:
        A tuple of:
            An array (C, 2C), which contains a (C, C) matrix for each of the two chunks, side by
            side. The entry in row I and column J of a matrix is the factor by which S decays after
            token J until token I of the chunk, including the decay at token I. The entry is 0 if J
            comes after I.
            A list of two arrays (C, 1), one for each chunk. Entry I is the factor by which S decays
            from the beginning of the chunk until token I, including the decay at token I.
    """
    row_indices, column_indices, _ = _indices()
    log_decay = _side_by_side(log_decay)
    log_decay_between_tokens = jnp.where(row_indices > column_indices, log_decay, 0)
    # Each row becomes the sum of itself and all rows above it. Before a pass of this loop, a row
    # contains the sum of `num_summed_rows` rows, and after it, the sum of twice as many.
    num_summed_rows = 1
    while num_summed_rows < CHUNK:
        log_decay_between_tokens += jnp.where(
            row_indices >= num_summed_rows,
            pltpu.roll(log_decay_between_tokens, num_summed_rows, 0),
            0,
        )
        num_summed_rows *= 2
    # In the first column of each chunk in `log_decay_between_tokens`, row i is now the sum of the
    # log decays of tokens 1 to i of the chunk. Adding the log decay of token 0, which is in row 0
    # of `log_decay`, makes it the sum since the beginning of the chunk. The other columns of the
    # result are not used.
    log_decay_since_chunk_begin = log_decay_between_tokens + log_decay[:1]
    decays_since_begin_of_chunks = [
        jnp.exp(log_decay_since_chunk_begin[:, first_column_of_chunk, None])
        for first_column_of_chunk in (0, CHUNK)
    ]
    return jnp.where(
        row_indices >= column_indices, jnp.exp(log_decay_between_tokens), 0
    ), decays_since_begin_of_chunks


def _inverse(matrices: Array) -> Array:
    """Inverts two lower triangular matrices side by side, whose diagonals are 1.

    First, blocks of SUBLANES rows and columns along the diagonals are inverted by forward
    substitution, one column after the other. Then every two neighbouring blocks on a diagonal are
    joined to one, as in `_inverse` of delta_net.py, until one block is left for each matrix. When
    two blocks are joined, only the rows of the second block change.

    Letters: C tokens of a chunk.

    Args:
        matrices: The matrices, (C, 2C). Only the values below their diagonals are used.

    Returns:
        The inverses side by side, (C, 2C).
    """
    row_indices, column_indices, first_columns_of_matrices = _indices()
    inverse_matrices = (row_indices == column_indices).astype(jnp.float32)
    block_starts = row_indices & -SUBLANES
    for column_offset in range(SUBLANES - 1):
        eliminated_column_mask = (column_indices == block_starts + column_offset) & (
            row_indices > column_indices
        )
        elimination_factors = jnp.where(eliminated_column_mask, matrices, 0)
        factors_of_first_matrix = jnp.sum(
            jnp.where(first_columns_of_matrices == 0, elimination_factors, 0),
            axis=1,
            keepdims=True,
        )
        factors_of_second_matrix = jnp.sum(
            jnp.where(first_columns_of_matrices == 0, 0, elimination_factors),
            axis=1,
            keepdims=True,
        )
        row_factors = jnp.where(
            first_columns_of_matrices == 0,
            factors_of_first_matrix,
            factors_of_second_matrix,
        )
        inverse_matrices -= row_factors * _repeat_row(inverse_matrices, column_offset)
    block_size = SUBLANES
    while block_size < CHUNK:
        same_block_pair_mask = row_indices & -2 * block_size == column_indices & -2 * block_size
        lower_left_mask = same_block_pair_mask & (
            row_indices & block_size > column_indices & block_size
        )
        even_blocks, odd_blocks = _alternate_blocks(inverse_matrices, block_size)
        lower_left_blocks = jnp.where(lower_left_mask, matrices, 0)
        odd_blocks_times_lower_left = _product(
            "IC,CJ->IJ", odd_blocks, _block_diagonal(lower_left_blocks)
        )
        odd_blocks -= _product(
            "IC,CJ->IJ", odd_blocks_times_lower_left, _block_diagonal(inverse_matrices)
        )
        # The even and the odd block of each pair, (pairs, 1, block_size, 2C) each.
        even_and_odd_blocks = [
            blocks.reshape(-1, 1, block_size, TWO_CHUNKS) for blocks in (even_blocks, odd_blocks)
        ]
        inverse_matrices = jnp.concatenate(even_and_odd_blocks, axis=1).reshape(CHUNK, TWO_CHUNKS)
        block_size *= 2
    return inverse_matrices


def _repeat_row(x: Array, offset: int) -> Array:
    """Fills each block of SUBLANES consecutive rows with copies of one row of the block.

    Args:
        x: The array, (C, 2C), where C is the number of tokens of a chunk.
        offset: The index in each block of the row that is copied.
    """
    row_blocks = x.reshape(-1, SUBLANES, x.shape[1])
    return jnp.broadcast_to(row_blocks[:, offset, None], row_blocks.shape).reshape(x.shape)


def _alternate_blocks(x: Array, block_size: int) -> tuple[Array, Array]:
    """Separates blocks with even numbers from blocks with odd numbers.

    A block is `block_size` consecutive rows.

    Letters: C tokens of a chunk.

    Args:
        x: The array, (C, 2C).
        block_size: The number of rows of a block.

    Returns:
        The rows of blocks 0, 2, 4 and so on, (C / 2, 2C).
        The rows of blocks 1, 3, 5 and so on, (C / 2, 2C).
    """
    block_pairs = x.reshape(-1, 2, block_size, x.shape[1])
    return block_pairs[:, 0].reshape(-1, x.shape[1]), block_pairs[:, 1].reshape(-1, x.shape[1])


def _block_diagonal(x: Array) -> Array:
    """Moves two matrices that lie side by side onto the diagonal of an array of zeros.

    Letters: C tokens of a chunk.

    Args:
        x: The matrices, (C, 2C).

    Returns:
        The array, (2C, 2C).
    """
    _, _, first_columns_of_matrices = _indices()
    return jnp.concatenate(
        [
            jnp.where(first_columns_of_matrices == 0, x, 0),
            jnp.where(first_columns_of_matrices == 0, 0, x),
        ]
    )
