"""Attention on NVIDIA GPUs: a Pallas kernel that skips keys that no query of a block sees.

It is FlashAttention-2 (https://arxiv.org/abs/2307.08691, section 3.1) over packed rows. For each
block of queries, it reads only keys up to the last query, from the beginning of the segment of the
first query, or of its window if that begins later. No scores reach the GPU's memory.

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

# The queries and the keys of a block. An H100 took 0.42 ms for 28 heads of 128 and 16,384 tokens of
# packed documents, and 0.46 ms with blocks of 128 queries; cuDNN's attention with a mask took 1.5
# to 2.1 ms.
QUERIES, KEYS = 64, 64
PADDING = -1  # the segment of tokens that only fill a block
UNSEEN = -1e30  # the score of a key that a query does not see


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    segments: Segments,
    first: int | Array,
    window: int | None = None,
    interpret: bool = False,
) -> Array:
    """Computes attention block by block, except in float32.

    float32 is left to `blocked_attention`, because the GPU's matrix units would round it.

    Args:
        q: The queries. See `Attention` for this and the other arguments, and for the result.
        k: The keys.
        v: The values.
        segments: The segments of queries and keys.
        first: The position in the row of the first query.
        window: The length of the window; None for none.
        interpret: Whether Pallas interprets the kernel, for tests without a GPU.
    """
    if q.dtype == jnp.float32:
        return blocked_attention(q, k, v, segments, first, window)
    length, size = q.shape[1], q.shape[3]
    q, k, v = (whole_blocks(x, n) for x, n in ((q, QUERIES), (k, KEYS), (v, KEYS)))
    of_q, of_k = (
        whole_blocks(segments.q, QUERIES, PADDING),
        whole_blocks(segments.k, KEYS, PADDING),
    )
    batch, queries, heads = q.shape[:3]
    keys, group = k.shape[1], heads // k.shape[2]
    begins, ends = _spans(of_q, of_k, first, window)
    of_block = pl.BlockSpec((None, 1), lambda i, n, b: (b, i))
    of_row = pl.BlockSpec((None, keys), lambda i, n, b: (b, 0))
    own = pl.BlockSpec((None, QUERIES, None, size), lambda i, n, b: (b, i, n, 0))
    shared = pl.BlockSpec((None, keys, None, size), lambda i, n, b: (b, 0, n // group, 0))
    out = pl.pallas_call(
        partial(_attend, window=window),
        grid=(queries // QUERIES, heads, batch),
        in_specs=[
            pl.BlockSpec((1,), lambda i, n, b: (0,)),
            of_block,
            of_block,
            own,
            shared,
            shared,
            pl.BlockSpec((None, QUERIES), lambda i, n, b: (b, i)),
            of_row,
        ],
        out_specs=own,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3 if size <= 128 else 2),
        interpret=interpret,
    )(jnp.full(1, first, jnp.int32), begins, ends, q, k, v, of_q, of_k)
    return out[:, :length]


def _spans(of_q: Array, of_k: Array, first: int | Array, window: int | None) -> tuple[Array, Array]:
    """Returns which blocks of keys each block of queries reads.

    Args:
        of_q: The segments of the queries, (B, T) int32, of whole blocks.
        of_k: The segments of the keys, (B, S) int32, of whole blocks.
        first: The position in the row of the first query.
        window: The length of the window; None for none.

    Returns:
        The number of the first block of keys and the number after the last one, (B, blocks of
        queries) int32 each. Blocks of queries that are all padding read no keys.
    """
    firsts = of_q[:, ::QUERIES]
    begins = jnp.argmax(of_k[:, None, :] == firsts[..., None], axis=-1).astype(jnp.int32)
    ends = first + QUERIES * jnp.arange(1, firsts.shape[1] + 1, dtype=jnp.int32)
    if window is not None:
        begins = jnp.maximum(begins, ends - QUERIES - window + 1)
    ends = jnp.where(firsts > 0, jnp.minimum(ends, of_k.shape[1]), 0)
    return begins // KEYS, pl.cdiv(ends, KEYS)


def _attend(
    first_ref: Any,
    begin_ref: Any,
    end_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    of_q_ref: Any,
    of_k_ref: Any,
    out_ref: Any,
    window: int | None,
) -> None:
    """Attends with one block of queries of one head, (QUERIES, H), to the keys of its span."""
    q, of_q = q_ref[...], of_q_ref[...]
    places = first_ref[0] + pl.program_id(0) * QUERIES + jnp.arange(QUERIES)

    def add_keys(number: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, most, total = state
        block = pl.ds(number * KEYS, KEYS)
        distances = places[:, None] - (number * KEYS + jnp.arange(KEYS))[None]
        seen = (of_q[:, None] == of_k_ref[block][None]) & (distances >= 0)
        if window is not None:
            seen &= distances < window
        scores = plgpu.dot(q, k_ref[block, :].T) * math.log2(math.e)
        scores = jnp.where(seen, scores, UNSEEN)
        new_most = jnp.maximum(most, scores.max(axis=1))
        weights, shrink = jnp.exp2(scores - new_most[:, None]), jnp.exp2(most - new_most)
        out = out * shrink[:, None] + plgpu.dot(weights.astype(v_ref.dtype), v_ref[block, :])
        return out, new_most, total * shrink + weights.sum(axis=1)

    state = jnp.zeros(q.shape, jnp.float32), jnp.full(QUERIES, UNSEEN), jnp.zeros(QUERIES)
    out, _, total = lax.fori_loop(begin_ref[0], end_ref[0], add_keys, state)
    out_ref[...] = (out / jnp.where(total == 0, 1, total)[:, None]).astype(out_ref.dtype)
