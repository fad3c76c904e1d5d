"""Attention in blocks against its definition, and that against numbers worked out by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rounding import assert_within_rounding

from activation_extraction.model.attention import KEY_BLOCK, blocked_attention, dense_attention


def attention_inputs(shape, heads, kv_heads):
    chance = np.random.default_rng(1)
    q, k, v = (
        jnp.asarray(chance.standard_normal((*shape, n, 16), np.float32))
        for n in (heads, kv_heads, kv_heads)
    )
    return q / 4.0, k, v


@pytest.mark.long
@pytest.mark.parametrize(
    "keys,first_query,kv_heads,window",
    [
        (40, 0, 2, None),
        (300, 100, 1, None),
        (300, 100, 2, 1),
        (300, 100, 4, 70),
        (5000, 0, 2, None),
        (5000, 2500, 2, 2500),
    ],
)
def test_blocked_attention_equals_the_dense_definition(keys, first_query, kv_heads, window):
    """Rows of one segment, of several, of several and padding, of nothing; part of the queries.

    Whether the first query is known to the compiler or not: it may add up in another order then.
    """
    q, k, v = attention_inputs((4, keys), 4, kv_heads)
    lengths = np.array([[0, 0, keys], [keys // 3, 1, keys], [7, keys // 2, keys // 8], [0, 0, 0]])
    ends = np.cumsum(lengths, axis=1)[:, :, None]
    segments = (np.arange(keys) >= ends).sum(axis=1) + 1
    segments = jnp.asarray(np.where(segments > 3, 0, segments), jnp.int32)
    some = slice(first_query, first_query + 200)
    inputs = q[:, some], k, v, segments[:, some], segments
    real = np.asarray(segments[:, some]) > 0
    blocked = partial(blocked_attention, window=window)
    traced = jax.jit(blocked)(*inputs, first_query)
    known = jax.jit(blocked, static_argnums=5)(*inputs, first_query)
    got = np.stack([traced, known])[:, real]

    def definition(q, k, v):
        return dense_attention(q, k, v, *inputs[3:], first_query, window)[real]

    assert_within_rounding(got, definition, inputs[:3], terms=keys)


def test_blocked_attention_does_not_read_blocks_of_other_segments():
    """Nor keys that come later: what lies there is not a number."""
    length = 1024
    q, k, v = attention_inputs((1, length), 4, 2)
    segments = jnp.asarray(np.repeat([1, 2, 3], [256, 384, 384])[None], jnp.int32)
    near = np.arange(256 - KEY_BLOCK, 640)  # lengths are rounded up
    k, v = (jnp.full_like(x, jnp.nan).at[:, near].set(x[:, near]) for x in (k, v))
    got = np.asarray(blocked_attention(q, k, v, segments, segments, 0))
    assert np.isfinite(got[:, 256:640]).all()
    assert np.isnan(got[:, :128]).all() and np.isnan(got[:, 640:]).all()


def test_blocked_attention_does_not_read_keys_before_the_window():
    q, k, v = attention_inputs((1, 1024), 4, 2)
    segments = jnp.ones((1, 1024), jnp.int32)
    k, v = (x.at[:, :512].set(jnp.nan) for x in (k, v))
    got = np.asarray(blocked_attention(q, k, v, segments, segments, 0, window=65))
    assert np.isfinite(got[:, 640:]).all() and np.isnan(got[:, :512]).all()


@pytest.mark.parametrize("window", [None, 2])
def test_dense_attention_by_hand(window):
    """Two segments of one row, against plain loops."""

    def by_hand(q, k, v):
        out = np.zeros_like(q)
        for t in range(5):
            seen = [s for s in range(t + 1) if segments[0, s] == segments[0, t]][-(window or 9) :]
            for n in range(4):
                scores = np.array([q[0, t, n] @ k[0, s, n // 2] for s in seen])
                weights = np.exp(scores - scores.max())
                out[0, t, n] = weights @ v[0, seen, n // 2] / weights.sum()
        return out

    chance = np.random.default_rng(2)
    q, k, v = (chance.standard_normal((1, 5, n, 4)).astype(np.float32) for n in (4, 2, 2))
    segments = np.array([[1, 1, 1, 2, 2]], np.int32)
    got = dense_attention(*map(jnp.asarray, (q, k, v, segments, segments)), 0, window)
    assert_within_rounding(got, by_hand, (q, k, v), terms=5)
