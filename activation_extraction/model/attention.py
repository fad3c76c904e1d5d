"""Attention over packed rows is causal, grouped-query and isolated by segments.

All forms of attention have one signature, `Attention`, so that the model takes any of them.
`dense_attention` is the definition and materialises all scores; `blocked_attention` is for CPUs;
kernels.py and flash_kernel.py have the kernels of TPUs and GPUs.

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
    """The segments of a row, which follow one another; padding, segment 0, comes last.

    Attributes:
        q: The segment of every query, (B, T) int32.
        k: The segment of every key, (B, S) int32.
    """

    q: Array
    k: Array


# Maps (q BTNH, k BSKH, v BSKH, segments, first, window=None) to BTNH in the dtype of q.
#
# Query head n reads key/value head n // (N / K). Scores are the products of q and k, because q was
# multiplied by H**-0.5 before it was rounded. The queries are T tokens of the row, from index
# `first` (an int or a traced scalar); the keys are the whole row. A token sees the tokens of its
# own segment up to itself; with a `window` (an int) only the last `window` of them. The output of
# padding means nothing.
Attention = Callable[..., Array]

QUERY_BLOCK = 64
KEY_BLOCK = 128
MOST_LENGTHS = 32  # lengths of spans of keys; the time to compile grows with their number


def visible_keys(
    segments: Segments, first: int | Array, window: int | None = None, first_key: int | Array = 0
) -> Array:
    """Returns which keys each query sees, (..., T, S) bool.

    Args:
        segments: The segments of the queries (..., T) and of the keys (..., S).
        first: The index of the first query in its row.
        window: The number of tokens that a token sees; None for all of its segment.
        first_key: The index of the first key in its row.
    """
    queries = first + jnp.arange(segments.q.shape[-1])[:, None]
    keys = first_key + jnp.arange(segments.k.shape[-1])
    seen = (queries >= keys) & (segments.q[..., :, None] == segments.k[..., None, :])
    return seen if window is None else seen & (queries - keys < window)


def whole_blocks(x: Array, block: int, value: int = 0) -> Array:
    """Returns x (B, T, ...) with T filled up to a multiple of `block`."""
    widths = [(0, 0), (0, -x.shape[1] % block), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, constant_values=value)


def dense_attention(
    q: Array, k: Array, v: Array, segments: Segments, first: int | Array, window: int | None = None
) -> Array:
    """Computes attention with all (T, S) scores in memory at once.

    This is the reference implementation of `Attention`, with which tests compare the others. The
    comment on `Attention` defines the arguments and the result.
    """
    seen = visible_keys(segments, first, window)
    out = einsum("BKGTS,BSKH->BTKGH", _probabilities(q, k, seen).astype(v.dtype), v)
    return out.reshape(q.shape).astype(q.dtype)


def attention_pattern(
    q: Array, k: Array, v: Array, segments: Segments, first: int | Array, window: int | None = None
) -> Array:
    """Returns how much each head of a token attends to the tokens of its segment.

    The function has the signature of `Attention`, but ignores v.

    Returns:
        (B, T, N, S) in the dtype of q. Column j belongs to the token at position j of the query's
        segment, wherever the segment lies in the row. Tokens that the query does not see have 0.
    """
    seen = visible_keys(segments, first, window)
    pattern = jnp.moveaxis(_probabilities(q, k, seen), 3, 1)  # BTKGS
    pattern = pattern.reshape(*q.shape[:3], k.shape[1]).astype(q.dtype)
    same = segments.q[..., :, None] == segments.k[..., None, :]
    columns = jnp.argmax(same, axis=-1)[..., None] + jnp.arange(k.shape[1])  # other segments have 0
    return jnp.take_along_axis(pattern, columns[:, :, None] % k.shape[1], axis=-1)


def _probabilities(q: Array, k: Array, seen: Array) -> Array:
    """Returns the weight of every key for every query, (B, K, G, T, S) float32.

    Args:
        q: The queries, (B, T, N, H).
        k: The keys, (B, S, K, H).
        seen: Which keys each query sees, (B, T, S) bool.
    """
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = einsum("BTKGH,BSKH->BKGTS", grouped, k)
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1)


def blocked_attention(
    q: Array, k: Array, v: Array, segments: Segments, first: int | Array, window: int | None = None
) -> Array:
    """Computes `Attention` block by block of queries, with only the keys that a block may see.

    This is for CPUs. The keys that a block may see form a span, which begins at the first token of
    its first segment, or at the window of its first query, and ends at its last query. One program
    is compiled for each of a few lengths of the span, and each block runs the program that it
    needs; blocks of nothing but padding run none. Memory grows with T, not with T * S.
    """
    batch, length, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    q = whole_blocks(q, QUERY_BLOCK)
    segments = segments._replace(q=whole_blocks(segments.q, QUERY_BLOCK))
    per_row = q.shape[1] // QUERY_BLOCK
    step = KEY_BLOCK * -(-keys // (KEY_BLOCK * MOST_LENGTHS))
    sizes = [*range(step, keys, step), keys]  # lengths of spans; the last one covers all keys
    choices = _span_choices(segments, first, sizes, window)
    of_blocks = segments.q.reshape(-1, QUERY_BLOCK)
    # The queries of a block and the heads of a group are rows of one product for each of K heads.
    grouped = to_bits(q).reshape(-1, QUERY_BLOCK, kv_heads, heads // kv_heads * head_dim)
    grouped = grouped.swapaxes(1, 2).reshape(len(of_blocks), kv_heads, -1, head_dim)
    k_bits, v_bits = to_bits(k).swapaxes(1, 2), to_bits(v).swapaxes(1, 2)  # BKSH

    def block(number: Array) -> Array:
        row = number // per_row
        start = first + number % per_row * QUERY_BLOCK

        def attend_to_span(size: int) -> Array:
            first_key = jnp.clip(start + QUERY_BLOCK - size, 0, keys - size)
            span = (row, 0, first_key, 0), (1, kv_heads, size, head_dim)
            of_span = lax.dynamic_slice(segments.k, (row, first_key), (1, size))[0]
            out = _attend(
                from_bits(grouped[number], q.dtype),
                from_bits(lax.dynamic_slice(k_bits, *span)[0], k.dtype),
                from_bits(lax.dynamic_slice(v_bits, *span)[0], v.dtype),
                visible_keys(Segments(of_blocks[number], of_span), start, window, first_key),
            )
            return to_bits(out)

        def skip() -> Array:
            return jnp.zeros(grouped.shape[1:], grouped.dtype)

        spans = [partial(attend_to_span, size) for size in sizes]
        return lax.switch(choices[number], [skip, *spans])

    out = lax.map(block, jnp.arange(len(of_blocks)))
    out = out.reshape(len(of_blocks), kv_heads, QUERY_BLOCK, -1).swapaxes(1, 2)
    return from_bits(out.reshape(batch, -1, heads, head_dim)[:, :length], q.dtype)


def _span_choices(
    segments: Segments, first: int | Array, sizes: list[int], window: int | None
) -> Array:
    """Returns for each block, row by row, the number of the length of span that it needs.

    Args:
        segments: The segments of the queries, whose number is a multiple of QUERY_BLOCK, and of the
            keys.
        first: The index of the first query in its row.
        sizes: The lengths of spans.
        window: The number of tokens that a token sees; None for all of its segment.

    Returns:
        Numbers of `sizes`, counted from 1, and 0 for blocks of nothing but padding: (blocks of all
        rows,) int32.
    """
    firsts = segments.q[:, ::QUERY_BLOCK, None]
    begins = jnp.argmax(segments.k[:, None, :] == firsts, axis=-1)
    ends = first + QUERY_BLOCK * jnp.arange(1, begins.shape[1] + 1)
    if window is not None:
        begins = jnp.maximum(begins, ends - QUERY_BLOCK - window + 1)
    needed = jnp.searchsorted(jnp.asarray(sizes), jnp.minimum(ends, sizes[-1]) - begins) + 1
    real = segments.q.reshape(*begins.shape, QUERY_BLOCK).any(axis=-1)
    return jnp.where(real, needed, 0).reshape(-1)


def _attend(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """Computes attention of one block of queries.

    Args:
        q: Q queries of G heads for each of K key/value heads, (K, Q * G, H).
        k: The keys, (K, S, H).
        v: The values, (K, S, H).
        seen: Which keys each query sees, (Q, S) bool.

    Returns:
        An array with the shape and dtype of q.
    """
    scores = einsum("KQH,KSH->KQS", q, k)
    by_query = scores.reshape(len(k), len(seen), -1, k.shape[1])  # K, Q, G, S
    by_query = jnp.where(seen[:, None], by_query, jnp.finfo(jnp.float32).min)
    scores = by_query.reshape(scores.shape)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1, keepdims=True)
    return (einsum("KQS,KSH->KQH", weights.astype(v.dtype), v) / total).astype(q.dtype)
