"""Attention over packed rows: causal, segment-isolated, grouped-query.

Every function here has one signature, `Attention`, so the model takes any of them as a callable.
`dense_attention` is the definition, materialising all scores; `blocked_attention` computes the same
in blocks of queries that read only the keys up to their own block, so that memory grows with T
and not with its square. `einsum` fixes the numerics of every matrix product of the model.

Letters: B rows, T queries, S keys, N query heads, K key/value heads, G = N / K, H head size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

# (q BTNH, k BSKH, v BSKH, q_segments BT, k_segments BS, first_query) -> BTNH in q's dtype.
# Query head n reads key/value head n // (N / K). The queries are the T tokens of the row from
# `first_query` on (an int or a traced scalar), the keys are the whole row. A token sees the tokens
# of its own segment that are not after it.
Attention = Callable[[Array, Array, Array, Array, Array, int | Array], Array]

QUERY_BLOCK = 128


def einsum(equation: str, x: Array, y: Array) -> Array:
    """`jnp.einsum` that accumulates in float32 and returns float32.

    float32 operands are multiplied as such: TPUs and GPUs would otherwise round them to bfloat16
    or TF32, which is not what somebody who asked for float32 expects.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)


def dense_attention(
    q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array, first_query: int | Array
) -> Array:
    """Attention with all (T, S) scores at once; the reference for tests. See `Attention`."""
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    grouped = q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = einsum("BTKGH,BSKH->BKGTS", grouped, k) * head_dim**-0.5
    causal = first_query + jnp.arange(queries)[:, None] >= jnp.arange(keys)[None, :]
    visible = causal & (q_segments[:, :, None] == k_segments[:, None, :])  # BTS
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = einsum("BKGTS,BSKH->BTKGH", probabilities, v)
    return out.reshape(batch, queries, heads, head_dim).astype(q.dtype)


def blocked_attention(
    q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array, first_query: int | Array
) -> Array:
    """Attention in blocks of `QUERY_BLOCK` queries. See `Attention`.

    Where `first_query` is known when compiling, later keys are not read; otherwise they are masked.
    """
    length = q.shape[1]
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        queries = slice(start, stop)
        keys = slice(first_query + stop if isinstance(first_query, int) else None)
        blocks.append(
            dense_attention(
                q[:, queries],
                k[:, keys],
                v[:, keys],
                q_segments[:, queries],
                k_segments[:, keys],
                first_query + start,
            )
        )
    return jnp.concatenate(blocks, axis=1)
