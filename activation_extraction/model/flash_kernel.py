"""Computes attention on NVIDIA GPUs with a Pallas kernel.

The kernel skips the keys that no query of a block sees. It computes FlashAttention-2
(https://arxiv.org/abs/2307.08691, section 3.1) over packed rows. For each block of queries it reads
a span of keys. The span ends at the block's last query. It begins where the segment of the block's
first query begins, or where this query's window begins if that is later. No scores reach the GPU's
memory.

Letters: B rows, T queries, S keys, N query heads, K key/value heads, H head size.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from activation_extraction.model.attention import Segments, blocked_attention, whole_blocks

# The number of queries of a block, and the number of keys of a block. For 28 heads of size 128 and
# 16,384 tokens of packed documents, an H100 took 0.42 ms, and 0.46 ms with blocks of 128 queries.
# The attention of cuDNN with a mask took 1.5 to 2.1 ms.
QUERIES, KEYS = 64, 64
PADDING = -1  # the segment number of the tokens that are appended to fill the last block
UNSEEN = -1e30  # the score of a key that a query does not see


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    segments: Segments,
    first_query: int | Array,
    window: int | None = None,
    interpret: bool = False,
) -> Array:
    """Computes attention on NVIDIA GPUs with a kernel.

    If q is float32, `blocked_attention` computes the attention instead, because the GPU's matrix
    units would round float32 values.

    Letters: T queries, S keys, N query heads, K key/value heads, H head size.

    Args:
        q: The queries, (B, T, N, H).
        k: The keys, (B, S, K, H).
        v: The values, (B, S, K, H).
        segments: The number of the segment (the sample in its row) of every query and key.
        first_query: The index in the row of the first of the T queries.
        window: The largest number of tokens that a token sees, itself included; None for no limit.
        interpret: Whether Pallas interprets the kernel, for tests without a GPU.

    Returns:
        The outputs, (B, T, N, H) in the dtype of q. See `AttentionFunction` for their definition.
    """
    if q.dtype == jnp.float32:
        return blocked_attention(q, k, v, segments, first_query, window)
    query_count = q.shape[1]
    head_size = q.shape[3]
    q = whole_blocks(q, QUERIES)
    k = whole_blocks(k, KEYS)
    v = whole_blocks(v, KEYS)
    query_segments = whole_blocks(segments.q, QUERIES, PADDING)
    key_segments = whole_blocks(segments.k, KEYS, PADDING)
    row_count, padded_query_count, head_count = q.shape[:3]
    padded_key_count = k.shape[1]
    query_heads_per_key_head = head_count // k.shape[2]
    first_key_block_numbers, end_key_block_numbers = _spans(
        query_segments, key_segments, first_query, window
    )
    # The kernel runs once for each block of queries i, query head n and row b.
    span_block_spec = pl.BlockSpec((None, 1), lambda i, n, b: (b, i))
    query_block_spec = pl.BlockSpec((None, QUERIES, None, head_size), lambda i, n, b: (b, i, n, 0))
    key_block_spec = pl.BlockSpec(
        (None, padded_key_count, None, head_size),
        lambda i, n, b: (b, 0, n // query_heads_per_key_head, 0),
    )
    padded_output = pl.pallas_call(
        partial(_attend, window=window),
        grid=(padded_query_count // QUERIES, head_count, row_count),
        in_specs=[
            pl.BlockSpec((1,), lambda i, n, b: (0,)),
            span_block_spec,
            span_block_spec,
            query_block_spec,
            key_block_spec,
            key_block_spec,
            pl.BlockSpec((None, QUERIES), lambda i, n, b: (b, i)),
            pl.BlockSpec((None, padded_key_count), lambda i, n, b: (b, 0)),
        ],
        out_specs=query_block_spec,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3 if head_size <= 128 else 2),
        interpret=interpret,
    )(
        jnp.full(1, first_query, jnp.int32),
        first_key_block_numbers,
        end_key_block_numbers,
        q,
        k,
        v,
        query_segments,
        key_segments,
    )
    return padded_output[:, :query_count]


def _spans(
    query_segments: Array, key_segments: Array, first_query: int | Array, window: int | None
) -> tuple[Array, Array]:
    """Returns the span of key blocks that each block of queries reads.

    Letters: T queries, S keys.

    Args:
        query_segments: The segment of every query, (B, T) int32, where QUERIES divides T.
        key_segments: The segment of every key, (B, S) int32, where KEYS divides S.
        first_query: The index in the row of the first of the T queries.
        window: The largest number of tokens that a token sees, itself included; None for no limit.

    Returns:
        The number of the first key block of each span, (B, T / QUERIES) int32.
        The number after the last key block of each span, (B, T / QUERIES) int32. It is 0 for blocks
        of queries that are all padding, so their spans are empty.
    """
    # The span of keys that a block of queries reads begins where the segment of the block's first
    # query begins.
    first_segments_of_query_blocks = query_segments[:, ::QUERIES]
    key_in_first_segment_mask = (
        key_segments[:, None, :] == first_segments_of_query_blocks[..., None]
    )
    first_key_indices_of_spans = jnp.argmax(key_in_first_segment_mask, axis=-1).astype(jnp.int32)
    end_key_indices_of_spans = first_query + QUERIES * jnp.arange(
        1, first_segments_of_query_blocks.shape[1] + 1, dtype=jnp.int32
    )
    if window is not None:
        first_key_indices_of_spans = jnp.maximum(
            first_key_indices_of_spans, end_key_indices_of_spans - QUERIES - window + 1
        )
    end_key_indices_of_spans = jnp.where(
        first_segments_of_query_blocks > 0,
        jnp.minimum(end_key_indices_of_spans, key_segments.shape[1]),
        0,
    )
    return first_key_indices_of_spans // KEYS, pl.cdiv(end_key_indices_of_spans, KEYS)


def _attend(
    first_query_ref: Any,
    begin_ref: Any,
    end_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    query_segments_ref: Any,
    key_segments_ref: Any,
    out_ref: Any,
    window: int | None,
) -> None:
    """Computes the outputs of one block of queries of one head.

    The block of queries reads a span of keys, which consists of whole blocks of KEYS keys.

    Letters: S keys, H head size.

    Args:
        first_query_ref: The index in its row of the first of all queries of the call, (1,) int32.
            The block with the number i contains the QUERIES queries from this index + i * QUERIES.
        begin_ref: The number of the first key block of the span, (1,) int32.
        end_ref: The number after the last key block of the span, (1,) int32.
        q_ref: The queries of the block, (QUERIES, H).
        k_ref: All keys of the row, (S, H).
        v_ref: All values of the row, (S, H).
        query_segments_ref: The number of the segment (the sample in the row) of each query of the
            block, (QUERIES,) int32; 0 for padding.
        key_segments_ref: The number of the segment of each key of the row, (S,) int32; 0 for
            padding.
        out_ref: The outputs, (QUERIES, H).
        window: The largest number of tokens that a token sees, itself included; None for no limit.
    """
    q = q_ref[...]
    query_segments = query_segments_ref[...]
    query_indices = first_query_ref[0] + pl.program_id(0) * QUERIES + jnp.arange(QUERIES)

    def add_keys(
        key_block_number: Array, state: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        """Adds one block of keys to the running softmax.

        Args:
            key_block_number: The number of the block of keys.
            state: The softmax over the blocks of keys before this one, as a tuple: the weighted sum
                of the values for each query, (QUERIES, H); the largest score of each query,
                (QUERIES,); the sum of the softmax weights of each query, (QUERIES,).

        Returns:
            The state after this block of keys, as the same tuple.
        """
        weighted_value_sums, max_scores, softmax_weight_sums = state
        key_slice = pl.ds(key_block_number * KEYS, KEYS)
        query_key_distances = (
            query_indices[:, None] - (key_block_number * KEYS + jnp.arange(KEYS))[None]
        )
        visible_key_mask = (query_segments[:, None] == key_segments_ref[key_slice][None]) & (
            query_key_distances >= 0
        )
        if window is not None:
            visible_key_mask &= query_key_distances < window
        query_key_scores = plgpu.dot(q, k_ref[key_slice, :].T) * math.log2(math.e)
        query_key_scores = jnp.where(visible_key_mask, query_key_scores, UNSEEN)
        new_max_scores = jnp.maximum(max_scores, query_key_scores.max(axis=1))
        softmax_weights = jnp.exp2(query_key_scores - new_max_scores[:, None])
        rescale_factors = jnp.exp2(max_scores - new_max_scores)
        weighted_value_sums = weighted_value_sums * rescale_factors[:, None]
        weighted_value_sums += plgpu.dot(softmax_weights.astype(v_ref.dtype), v_ref[key_slice, :])
        return (
            weighted_value_sums,
            new_max_scores,
            softmax_weight_sums * rescale_factors + softmax_weights.sum(axis=1),
        )

    # The state before any key is added: for each query, the weighted sum of values, the largest
    # score and the sum of weights.
    initial_softmax_state = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(QUERIES, UNSEEN),
        jnp.zeros(QUERIES),
    )
    weighted_value_sums, _, softmax_weight_sums = lax.fori_loop(
        begin_ref[0], end_ref[0], add_keys, initial_softmax_state
    )
    # A block of queries that are all padding has an empty span, so its sums of weights are 0. They
    # are replaced by 1, because 0 / 0 would be NaN.
    out_ref[...] = (
        weighted_value_sums / jnp.where(softmax_weight_sums == 0, 1, softmax_weight_sums)[:, None]
    ).astype(out_ref.dtype)
