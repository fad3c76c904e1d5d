"""The gated delta net over packed rows: its short convolution, its recurrence and its norm.

These are functions of arrays; the module that has the weights is in the family's file. All of them
compute in float32, and none lets a token see another segment of its row.

The gated delta rule (arXiv:2412.06464) keeps a matrix S per head, zero before a segment's first
token. A token with query q, key k, value v, log decay g and rate b changes it and reads it:

    S <- exp(g) S;  S <- S + k (b (v - S^T k))^T;  o = S^T q

Tokens are computed in chunks (arXiv:2406.06484): what the tokens of a chunk do to each other is a
triangular system, solved for all chunks at once; S goes from chunk to chunk in a loop.

Letters: B rows, T tokens per row, K key heads, G value heads of each, D key size, U value size,
N chunks, C tokens of a chunk (I and J where two of them meet).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from activation_extraction.model.layers import einsum

CHUNK = 64  # tokens
EPSILON = 1e-6  # of the squared length of queries and keys


def short_convolution(x: Array, weight: Array, segment_ids: Array) -> Array:
    """Each channel's weighted sum over the last few tokens of its segment, then silu.

    x: (B, T, ...channels); weight: (...channels, taps), the last tap being the token's own.
    """
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    taps = weight.shape[-1]
    out = x * weight[..., -1]
    for distance in range(1, taps):
        same = _earlier(segment_ids, distance) == segment_ids
        seen = jnp.expand_dims(same, range(2, x.ndim))
        out += jnp.where(seen, _earlier(x, distance), 0) * weight[..., -1 - distance]
    return jax.nn.silu(out)


def _earlier(x: Array, distance: int) -> Array:
    """For each token the value `distance` tokens before it, zeros before the row begins."""
    shift = [(0, 0), (distance, 0), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, shift)[:, : x.shape[1]]


def gated_norm(x: Array, gate: Array, weight: Array, epsilon: float) -> Array:
    """RMS norm over the last axis, times `weight`, times silu(gate)."""
    x, gate = x.astype(jnp.float32), gate.astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return x * inverse_rms * weight.astype(jnp.float32) * jax.nn.silu(gate)


def gated_delta_rule(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, segment_ids: Array
) -> Array:
    """The outputs o of all tokens, (B, T, K, G, U) float32.

    q, k: (B, T, K, D), normalised here; v: (B, T, K, G, U); log_decay, at most 0, and beta:
    (B, T, K, G). segment_ids: (B, T); the segments of a row follow one another, all different.
    Padding, segment 0, comes last, and what it gives means nothing.
    """
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    per_head = q.shape[-1] ** -0.5 * _unit(q), _unit(k), v, log_decay[..., None], beta[..., None]
    chunks = _prepare(*map(_in_chunks, (*per_head, segment_ids[..., None])))
    state = jnp.zeros((*chunks.written.shape[1:4], k.shape[-1], v.shape[-1]), jnp.float32)
    _, out = lax.scan(_step, state, chunks)
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # BNCKGU
    return out.reshape(len(v), -1, *v.shape[2:])[:, : v.shape[1]]


def _unit(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON)


def _in_chunks(x: Array) -> Array:
    """(B, T, ...heads, size) -> (N, B, ...heads, C, size), filled up with zeros."""
    more = [(0, 0), (0, -x.shape[1] % CHUNK), *[(0, 0)] * (x.ndim - 2)]
    x = jnp.pad(x, more).reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
    return jnp.moveaxis(x, (1, 2), (0, -2))


class _Chunks(NamedTuple):
    """What the loop needs of each chunk. Every array begins with N."""

    written: Array  # NBKGCU: what tokens add to S if it was zero before the chunk
    readers: Array  # NBKG(2C)D: what reads the S before the chunk, for the update and for o
    within: Array  # NBKGIJ: how much the output of token i takes of what token j added
    writers: Array  # NBKGCD: the keys, decayed until the chunk's end
    kept: Array  # NBKG11: how much of the S before the chunk is left after it


def _prepare(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, segments: Array
) -> _Chunks:
    """q, k: NBKCD; v: NBKGCU; log_decay, beta: NBKGC1; segments: NBC1."""
    within, since = _decays(log_decay, segments)
    among_keys = einsum("NBKID,NBKJD->NBKIJ", k, k)[:, :, :, None]
    of_queries = einsum("NBKID,NBKJD->NBKIJ", q, k)[:, :, :, None]
    q, k = q[:, :, :, None], k[:, :, :, None]
    right = beta * jnp.concatenate([v, since * k], axis=-1)
    solution = einsum("NBKGIJ,NBKGJX->NBKGIX", _inverse(beta * among_keys * within), right)
    written, stored = jnp.split(solution, [v.shape[-1]], axis=-1)
    return _Chunks(
        written=written,
        readers=jnp.concatenate([stored, since * q], axis=-2),
        within=of_queries * within,
        writers=within[..., -1:, :].mT * k,
        kept=since[..., -1:, :],
    )


def _inverse(below: Array) -> Array:
    """Of the identity plus what `below` (..., C, C) has below its diagonal.

    Block by block on the diagonal, each time of twice the size; where two inverse blocks X and Y
    become one, -Y (what is below X) X comes between them. These are products of matrices, where a
    solver would take tokens one after the other; on a CPU with several devices it never returns.
    """
    tokens = np.arange(CHUNK)
    found = jnp.eye(CHUNK)
    for level in range(CHUNK.bit_length() - 1):
        blocks, twice = tokens >> level, tokens >> (level + 1)
        joined = (twice[:, None] == twice) & (blocks[:, None] > blocks)
        between = jnp.where(joined, below, 0)
        if level:
            between = _product(_product(found, between), found)
        found = found - between
    return found


def _product(x: Array, y: Array) -> Array:
    return einsum("NBKGIC,NBKGCJ->NBKGIJ", x, y)


def _decays(log_decay: Array, segments: Array) -> tuple[Array, Array]:
    """From token to token of a chunk, NBKGIJ, and from before the chunk to each token, NBKGC1.

    0 between different segments, by a mask. Numbers of one sign are added, and none is subtracted
    from another, so a token that forgets everything does not harm the precision of the next ones.
    """
    own = segments[:, :, None, None]  # NB11C1
    before = jnp.pad(own[:-1, ..., -1:, :], [(1, 0), *[(0, 0)] * 5], constant_values=-1)
    seen = jnp.tril(own == own.mT)  # NB11IJ
    until = jnp.tri(CHUNK)  # IC: token C comes no later than I
    between = einsum("IC,NBKGCJ->NBKGIJ", until, log_decay * jnp.tri(CHUNK, k=-1))
    begun = einsum("IC,NBKGCJ->NBKGIJ", until, log_decay)
    return (
        jnp.where(seen, jnp.exp(between), 0),
        jnp.where(own == before, jnp.exp(begun), 0),
    )


def _step(state: Array, chunk: _Chunks) -> tuple[Array, Array]:
    """One chunk. Returns S after it, (B, K, G, D, U), and its outputs (B, K, G, C, U)."""
    stored, read = jnp.split(einsum("BKGCD,BKGDU->BKGCU", chunk.readers, state), 2, axis=3)
    added = chunk.written - stored
    out = read + einsum("BKGIJ,BKGJU->BKGIU", chunk.within, added)
    state = chunk.kept * state + einsum("BKGCD,BKGCU->BKGDU", chunk.writers, added)
    return state, out
