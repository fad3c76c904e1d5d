"""Computes causal grouped-query attention over packed rows.

A row contains several samples, one segment each, and tokens see only tokens of their own sample.
All implementations of attention have the signature `AttentionFunction`, so the model can use any of
them. `dense_attention` is the reference implementation, which materialises all scores, and
`blocked_attention` is for CPUs. kernels.py and flash_kernel.py contain the kernels for TPUs and
GPUs.

Letters: B rows, T queries, S keys, N query heads, K key/value heads, G = N / K, H head size.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from activation_extraction.model.numerics import einsum, from_bits, to_bits


class Segments(NamedTuple):
    """The segment numbers of queries and keys, which limit attention to tokens of the same sample.

    The tokens of a sample in a row are a segment, and all have the number of this segment. The
    segments of a row follow one another. Padding comes after them, with the number 0.

    Letters: B rows, T queries, S keys.

    Attributes:
        q: The segment number of every query, (B, T) int32.
        k: The segment number of every key, (B, S) int32.
    """

    q: Array
    k: Array


# A function that computes attention. It maps (q, k, v, segments, first_query, window=None) to the
# outputs, (B, T, N, H) in the dtype of q:
#   q            the queries, (B, T, N, H); the scores are the products of q and k, because the
#                queries were multiplied by H**-0.5 before they were rounded
#   k, v         the keys and values of the whole row, (B, S, K, H); query head n reads key/value
#                head n // G
#   segments     the `Segments` of queries and keys
#   first_query  the index in the row of the first of the T queries, an int or a traced scalar
#   window       the largest number of tokens that a token sees, itself included, an int; None for
#                no limit: a token then sees its segment up to itself
# The outputs of padding are meaningless.
AttentionFunction = Callable[..., Array]

QUERY_BLOCK = 64  # the number of queries that `blocked_attention` computes together
# For each block of queries, `blocked_attention` reads a span of consecutive keys. The length of
# every span except the longest one is a multiple of this number of keys, so that only a few
# different lengths occur.
KEY_BLOCK = 128
# The largest number of different lengths that the spans of keys in `blocked_attention` may have.
# The compiled program has a branch for each length, and more branches take longer to compile.
MOST_LENGTHS = 32


def visible_keys(
    segments: Segments,
    first_query: int | Array,
    window: int | None = None,
    first_key: int | Array = 0,
) -> Array:
    """Returns the mask of the keys that each query sees.

    Letters: T queries, S keys.

    Args:
        segments: The segments of the queries (..., T) and of the keys (..., S).
        first_query: The index in the row of the first of the T queries.
        window: The largest number of tokens that a token sees, itself included; None for no limit.
        first_key: The index in the row of the first of the S keys.

    Returns:
        True where the query sees the key, (..., T, S) bool. A query sees the keys of its own
        segment up to its own index, and of these only the last `window` keys.
    """
    query_indices = first_query + jnp.arange(segments.q.shape[-1])[:, None]
    key_indices = first_key + jnp.arange(segments.k.shape[-1])
    visible_key_mask = query_indices >= key_indices
    visible_key_mask &= segments.q[..., :, None] == segments.k[..., None, :]
    if window is not None:
        visible_key_mask &= query_indices - key_indices < window
    return visible_key_mask


def whole_blocks(x: Array, block: int, value: int = 0) -> Array:
    """Appends padding to the rows of an array, so that each row consists of whole blocks of tokens.

    Args:
        x: The array, (B, T, ...), for B rows of T tokens.
        block: The number of tokens of a block.
        value: The value with which the array is padded.

    Returns:
        The padded array, (B, T rounded up to a multiple of `block`, ...).
    """
    padding_widths = [(0, 0), (0, -x.shape[1] % block), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, padding_widths, constant_values=value)


def dense_attention(
    q: Array,
    k: Array,
    v: Array,
    segments: Segments,
    first_query: int | Array,
    window: int | None = None,
) -> Array:
    """Computes attention with all (T, S) scores in memory at once.

    This is the reference implementation of `AttentionFunction`. Tests compare the other
    implementations with it.

    Letters: T queries, S keys, N query heads, K key/value heads, H head size.

    Args:
        q: The queries, (B, T, N, H).
        k: The keys, (B, S, K, H).
        v: The values, (B, S, K, H).
        segments: The segment number of every query and key.
        first_query: The index in the row of the first of the T queries.
        window: The largest number of tokens that a token sees, itself included; None for no limit.

    Returns:
        The outputs, (B, T, N, H) in the dtype of q. See `AttentionFunction` for their definition.
    """
    visible_key_mask = visible_keys(segments, first_query, window)
    grouped_output = einsum(
        "BKGTS,BSKH->BTKGH", _probabilities(q, k, visible_key_mask).astype(v.dtype), v
    )
    return grouped_output.reshape(q.shape).astype(q.dtype)


def attention_pattern(
    q: Array,
    k: Array,
    v: Array,
    segments: Segments,
    first_query: int | Array,
    window: int | None = None,
) -> Array:
    """Returns the attention weights of every query, ordered by the key's position in its sample.

    The function has the signature of `AttentionFunction`, but returns weights instead of outputs.

    Letters: T queries, S keys, N query heads, K key/value heads, H head size.

    Args:
        q: The queries, (B, T, N, H).
        k: The keys, (B, S, K, H).
        v: The values, which are not used.
        segments: The segment number of every query and key.
        first_query: The index in the row of the first of the T queries.
        window: The largest number of tokens that a token sees, itself included; None for no limit.

    Returns:
        The weights, (B, T, N, S) in the dtype of q. Column j belongs to the token at position j of
        the query's segment, wherever the segment lies in the row. Tokens that the query does not
        see have the weight 0.
    """
    visible_key_mask = visible_keys(segments, first_query, window)
    attention_weights = _probabilities(q, k, visible_key_mask)  # shape (B, K, G, T, S)
    attention_weights = jnp.moveaxis(attention_weights, 3, 1)  # shape (B, T, K, G, S)
    attention_weights = attention_weights.reshape(*q.shape[:3], k.shape[1]).astype(q.dtype)
    same_segment_mask = segments.q[..., :, None] == segments.k[..., None, :]
    segment_start_indices_of_queries = jnp.argmax(same_segment_mask, axis=-1)
    # Column j of a query is the key j tokens after the start of the query's segment. Where this key
    # lies in another segment, its weight is 0.
    key_indices_of_columns = segment_start_indices_of_queries[..., None] + jnp.arange(k.shape[1])
    return jnp.take_along_axis(
        attention_weights, key_indices_of_columns[:, :, None] % k.shape[1], axis=-1
    )


def _probabilities(q: Array, k: Array, mask: Array) -> Array:
    """Returns the softmax of the scores over the keys that each query sees.

    Letters: T queries, S keys, N query heads, K key/value heads, G = N / K, H head size.

    Args:
        q: The queries, (B, T, N, H).
        k: The keys, (B, S, K, H).
        mask: The mask of the keys that each query sees, (B, T, S) bool.

    Returns:
        The weight of every key for every query, (B, K, G, T, S) float32.
    """
    grouped_queries = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])  # shape (B, T, K, G, H)
    scores = einsum("BTKGH,BSKH->BKGTS", grouped_queries, k)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1)


def blocked_attention(
    q: Array,
    k: Array,
    v: Array,
    segments: Segments,
    first_query: int | Array,
    window: int | None = None,
) -> Array:
    """Computes attention on CPUs, one block of queries at a time.

    Each block of QUERY_BLOCK queries reads only a span of keys, so memory grows with T, not with
    T * S. The span ends at the block's last query. It begins at the first key that the block's
    first query sees: where the segment of this query begins, or where its window begins if that is
    later.

    Arrays in a compiled program have fixed shapes. So the length of each span is rounded up to one
    of at most MOST_LENGTHS lengths, and the program has one branch for each length. Another branch
    skips blocks that contain only padding.

    Letters: T queries, S keys, N query heads, K key/value heads, H head size.

    Args:
        q: The queries, (B, T, N, H).
        k: The keys, (B, S, K, H).
        v: The values, (B, S, K, H).
        segments: The segment number of every query and key.
        first_query: The index in the row of the first of the T queries.
        window: The largest number of tokens that a token sees, itself included; None for no limit.

    Returns:
        The outputs, (B, T, N, H) in the dtype of q. See `AttentionFunction` for their definition.
    """
    row_count, query_count, head_count, head_dim = q.shape
    key_count, kv_head_count = k.shape[1:3]
    q = whole_blocks(q, QUERY_BLOCK)
    segments = segments._replace(q=whole_blocks(segments.q, QUERY_BLOCK))
    blocks_per_row = q.shape[1] // QUERY_BLOCK
    key_span_length_increment = KEY_BLOCK * -(-key_count // (KEY_BLOCK * MOST_LENGTHS))
    span_lengths = [
        *range(key_span_length_increment, key_count, key_span_length_increment),
        key_count,
    ]
    switch_branch_numbers_of_blocks = _branch_numbers(segments, first_query, span_lengths, window)
    query_segments_of_blocks = segments.q.reshape(-1, QUERY_BLOCK)
    block_count = len(query_segments_of_blocks)
    # The query heads that read the same key/value head are computed in one matrix product. Its left
    # operand has a row for each of these heads and each query of a block.
    query_bit_patterns_of_blocks = to_bits(q).reshape(
        -1, QUERY_BLOCK, kv_head_count, head_count // kv_head_count * head_dim
    )
    query_bit_patterns_of_blocks = query_bit_patterns_of_blocks.swapaxes(1, 2).reshape(
        block_count, kv_head_count, -1, head_dim
    )
    key_bit_patterns = to_bits(k).swapaxes(1, 2)  # (rows, key/value heads, keys, head size)
    value_bit_patterns = to_bits(v).swapaxes(1, 2)  # (rows, key/value heads, keys, head size)

    def compute_block(query_block_number: Array) -> Array:
        row_index = query_block_number // blocks_per_row
        first_query_of_block = first_query + query_block_number % blocks_per_row * QUERY_BLOCK

        def attend_to_span(length: int) -> Array:
            first_key_index_of_span = jnp.clip(
                first_query_of_block + QUERY_BLOCK - length, 0, key_count - length
            )
            kv_span_start_indices = row_index, 0, first_key_index_of_span, 0
            kv_span_shape = 1, kv_head_count, length, head_dim
            segments_of_span_keys = lax.dynamic_slice(
                segments.k, (row_index, first_key_index_of_span), (1, length)
            )[0]
            block_q = from_bits(query_bit_patterns_of_blocks[query_block_number], q.dtype)
            span_k = from_bits(
                lax.dynamic_slice(key_bit_patterns, kv_span_start_indices, kv_span_shape)[0],
                k.dtype,
            )
            span_v = from_bits(
                lax.dynamic_slice(value_bit_patterns, kv_span_start_indices, kv_span_shape)[0],
                v.dtype,
            )
            segments_of_block_and_span = Segments(
                query_segments_of_blocks[query_block_number], segments_of_span_keys
            )
            visible_key_mask = visible_keys(
                segments_of_block_and_span, first_query_of_block, window, first_key_index_of_span
            )
            return to_bits(_attend(block_q, span_k, span_v, visible_key_mask))

        def skip() -> Array:
            return jnp.zeros(
                query_bit_patterns_of_blocks.shape[1:], query_bit_patterns_of_blocks.dtype
            )

        span_branches = [partial(attend_to_span, span_length) for span_length in span_lengths]
        return lax.switch(
            switch_branch_numbers_of_blocks[query_block_number], [skip, *span_branches]
        )

    block_outputs = lax.map(compute_block, jnp.arange(block_count))
    block_outputs = block_outputs.reshape(block_count, kv_head_count, QUERY_BLOCK, -1).swapaxes(
        1, 2
    )
    block_outputs = block_outputs.reshape(row_count, -1, head_count, head_dim)[:, :query_count]
    return from_bits(block_outputs, q.dtype)


def _branch_numbers(
    segments: Segments, first_query: int | Array, span_lengths: list[int], window: int | None
) -> Array:
    """Returns, for each block of queries, which branch `blocked_attention` runs.

    Branch 0 skips the block. Each of the other branches reads a span of keys of one length.

    Letters: B rows, T queries, S keys.

    Args:
        segments: The segments of the queries (B, T), where QUERY_BLOCK divides T, and of the keys
            (B, S).
        first_query: The index in the row of the first of the T queries.
        span_lengths: The lengths of the spans that branches 1, 2 and so on read, ascending.
        window: The largest number of tokens that a token sees, itself included; None for no limit.

    Returns:
        The number of each block's branch, row by row, (B * T / QUERY_BLOCK,) int32. It is 0 if the
        block contains only padding. Otherwise, it is the number of the branch with the shortest
        span that contains all keys that the block's queries see.
    """
    # The span of keys that a block of queries reads begins with the first key of the segment that
    # contains the block's first query.
    first_query_segments_of_blocks = segments.q[:, ::QUERY_BLOCK, None]
    first_key_indices_of_spans = jnp.argmax(
        segments.k[:, None, :] == first_query_segments_of_blocks, axis=-1
    )
    end_key_indices_of_spans = first_query + QUERY_BLOCK * jnp.arange(
        1, first_key_indices_of_spans.shape[1] + 1
    )
    if window is not None:
        first_key_indices_of_spans = jnp.maximum(
            first_key_indices_of_spans, end_key_indices_of_spans - QUERY_BLOCK - window + 1
        )
    min_span_lengths_of_blocks = (
        jnp.minimum(end_key_indices_of_spans, span_lengths[-1]) - first_key_indices_of_spans
    )
    switch_branch_numbers_of_blocks = (
        jnp.searchsorted(jnp.asarray(span_lengths), min_span_lengths_of_blocks) + 1
    )
    nonempty_block_mask = segments.q.reshape(*first_key_indices_of_spans.shape, QUERY_BLOCK).any(
        axis=-1
    )
    return jnp.where(nonempty_block_mask, switch_branch_numbers_of_blocks, 0).reshape(-1)


def _attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Computes attention of one block of queries to one span of keys.

    Letters: Q queries of the block, K key/value heads, G query heads that read each of them, S keys
    of the span, H head size.

    Args:
        q: The queries of the block, grouped by key/value head, (K, Q * G, H).
        k: The keys of the span, (K, S, H).
        v: The values of the span, (K, S, H).
        mask: The mask of the keys that each query sees, (Q, S) bool.

    Returns:
        The outputs, with the shape and dtype of q.
    """
    scores = einsum("KQH,KSH->KQS", q, k)
    grouped_scores = scores.reshape(len(k), len(mask), -1, k.shape[1])  # shape (K, Q, G, S)
    grouped_scores = jnp.where(mask[:, None], grouped_scores, jnp.finfo(jnp.float32).min)
    scores = grouped_scores.reshape(scores.shape)
    unnormalised_weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weight_sums_of_queries = unnormalised_weights.sum(axis=-1, keepdims=True)
    return (
        einsum("KQS,KSH->KQH", unnormalised_weights.astype(v.dtype), v) / weight_sums_of_queries
    ).astype(q.dtype)
