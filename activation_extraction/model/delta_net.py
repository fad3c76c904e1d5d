"""The gated delta net (arXiv:2412.06464) replaces attention in layers of Qwen3-Next and Qwen3.5.

The rule keeps a matrix S per head, which is zero before a segment's first token. A token with query
q, key k, value v, log decay g and rate b changes it and reads it:

    S <- exp(g) S;  S <- S + k (b (v - S^T k))^T;  o = S^T q

Tokens are computed in chunks (arXiv:2406.06484): the effect of a chunk's tokens on each other is a
triangular system, which is solved for all chunks at once; S goes from chunk to chunk in a loop. All
of it is in float32, and no token sees another segment of its row.

Key heads, each with its value heads, are split over devices. A checkpoint keeps queries, keys and
values in one matrix, one below the other or head by head, and the convolutions one below the other;
here each has parameters of its own, so that heads can be split.

Letters of the module, besides those of qwen2_jax.py: J key heads, G value heads of each key head,
C key size, Z value size, O all values of a token, W taps of the convolution. The functions of the
rule have letters of their own: B rows, T tokens per row, K key heads, G value heads of each key
head, D key size, U value size, N chunks, C tokens of a chunk (also I and J, where token I reads
token J), X any size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from activation_extraction.model.layers import STREAM, Linear, Out
from activation_extraction.model.mesh import Layout
from activation_extraction.model.model_config import ModelConfig
from activation_extraction.model.numerics import einsum
from activation_extraction.model.parameters import Weight, parameter

CHUNK = 64  # tokens
EPSILON = 1e-6  # added to the squared length of queries and keys
# Logical axes of queries and keys, and of values.
OF_KEYS = "batch", "sequence", "key_heads", "head_dim"
OF_VALUES = *OF_KEYS, "head_dim"

# Maps (q, k, v, log decay, beta, segment ids) to the outputs o, (B, T, K, G, U) in the dtype of v:
#   q, k         (B, T, K, D), which the function normalises
#   v            (B, T, K, G, U)
#   log decay    (B, T, K, G) float32, at most 0
#   beta         (B, T, K, G) float32
#   segment ids  (B, T) int32. Every segment of a row is one run of tokens, and no two have the same
#                number. Padding has 0 and comes last; its outputs mean nothing.
DeltaRule = Callable[[Array, Array, Array, Array, Array, Array], Array]


class GatedDeltaNet(nn.Module):
    """The gated delta net of a layer, with a convolution before the rule and a gate after it.

    It takes the place of attention, and maps (B, T, D) to (B, T, D).

    Attributes:
        config: The configuration of the model.
        dtype: The dtype of weights and matrix products.
        rule: The function that computes the gated delta rule.
        layout: The mesh.
    """

    config: ModelConfig
    dtype: Any
    rule: DeltaRule
    layout: Layout

    def setup(self) -> None:
        linear = partial(Linear, self.config, dtype=self.dtype)
        weight = partial(Weight, self.config, dtype=self.dtype)
        self.in_proj_q, self.in_proj_k = linear("D->JC"), linear("D->JC")
        self.in_proj_v, self.in_proj_z = linear("D->JGZ"), linear("D->JGZ")
        self.in_proj_b, self.in_proj_a = linear("D->JG"), linear("D->JG")
        self.conv1d_q, self.conv1d_k = weight("JCIW"), weight("JCIW")
        self.conv1d_v = weight("JGZIW")
        self.A_log = parameter(self, "A_log", "JG")
        self.dt_bias = parameter(self, "dt_bias", "JG")
        self.norm = weight("Z")
        # TPUs would copy (D, J, G, Z) in each step.
        self.out_proj = linear("O->D", split=self.layout.adds_up_parts)

    def __call__(self, x: Array, segment_ids: Array) -> tuple[Array, Out]:
        """Returns the result and the intermediates.

        Args:
            x: The normed residual stream, (B, T, D).
            segment_ids: The segment of each token, (B, T) int32; 0 for padding.
        """
        out = self._inputs(x, segment_ids)
        q, k, v = out["q"], out["k"], out["v"]
        arrays = q, k, v, out["log_decay"], out["beta"], segment_ids
        axes = OF_KEYS, OF_KEYS, OF_VALUES, OF_KEYS, OF_KEYS, OF_KEYS[:2]
        with jax.named_scope("gated_delta_rule"):
            values = self.layout.per_device(self.rule, arrays, axes, like=2)  # like v
        out["recurrence_out"] = values
        epsilon = self.config.rms_norm_eps
        gated = gated_norm(values, out["gate_input"], self.norm(), epsilon).astype(self.dtype)
        out["gated"] = gated
        flat = gated.reshape(*gated.shape[:2], -1)
        out["out"] = self.layout.constrain(self.out_proj(flat).astype(self.dtype), *STREAM)
        return out["out"], out

    def _inputs(self, x: Array, segment_ids: Array) -> Out:
        """Returns, by name, the inputs of the rule and of the gate after it, and intermediates."""
        constrain = self.layout.constrain
        out: Out = {}
        for name, axes, projection, taps in (
            ("q", OF_KEYS, self.in_proj_q, self.conv1d_q),
            ("k", OF_KEYS, self.in_proj_k, self.conv1d_k),
            ("v", OF_VALUES, self.in_proj_v, self.conv1d_v),
        ):
            y = out[f"{name}_pre_conv"] = constrain(projection(x), *axes).astype(self.dtype)
            weight = jnp.squeeze(taps(), -2)
            if name == "k":
                # At once, both convolutions would need more fast memory than a TPU has for them.
                weight, out["q"] = lax.optimization_barrier((weight, out["q"]))
            out[name] = short_convolution(y, weight, segment_ids).astype(self.dtype)
        out["gate_input"] = constrain(self.in_proj_z(x), *OF_VALUES).astype(self.dtype)
        out["beta_logit"] = constrain(self.in_proj_b(x), *OF_KEYS)
        out["beta"] = jax.nn.sigmoid(out["beta_logit"])
        log_rate = self.A_log.astype(jnp.float32)
        bias = self.dt_bias.astype(jnp.float32)
        step = jax.nn.softplus(constrain(self.in_proj_a(x), *OF_KEYS) + bias)
        out["log_decay"] = -jnp.exp(log_rate) * step
        return out


def short_convolution(x: Array, weight: Array, segment_ids: Array) -> Array:
    """Returns each channel's weighted sum over the last few tokens of its segment, then silu.

    Args:
        x: (B, T, ...channels).
        weight: (...channels, taps). The last tap is that of the token itself.
        segment_ids: (B, T) int32.

    Returns:
        (B, T, ...channels) float32.
    """
    # Each tap converts x to float32: if x were converted once, for all taps, XLA would write it to
    # HBM in float32.
    weight = weight.astype(jnp.float32)
    taps = weight.shape[-1]
    out = x.astype(jnp.float32) * weight[..., -1]
    for distance in range(1, taps):
        same = _earlier(segment_ids, distance) == segment_ids
        seen = jnp.expand_dims(same, range(2, x.ndim))
        earlier = jnp.where(seen, _earlier(x, distance), 0).astype(jnp.float32)
        out += earlier * weight[..., -1 - distance]
    return jax.nn.silu(out)


def _earlier(x: Array, distance: int) -> Array:
    """Returns for each token the value `distance` tokens before it; 0 before the row begins."""
    shift = [(0, 0), (distance, 0), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, shift)[:, : x.shape[1]]


def gated_norm(x: Array, gate: Array, weight: Array, epsilon: float) -> Array:
    """Applies an RMS norm over the last axis, then multiplies by `weight` and silu(gate).

    Args:
        x: The values, (..., Z).
        gate: The input of the gate, like x.
        weight: (Z,).
        epsilon: The number that is added to the mean square.

    Returns:
        (..., Z) float32.
    """
    x, gate = x.astype(jnp.float32), gate.astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return x * inverse_rms * weight.astype(jnp.float32) * jax.nn.silu(gate)


def token_by_token(*arrays: Any) -> np.ndarray:
    """Computes the rule as it is defined, in NumPy's float64. See `DeltaRule`."""
    *inputs, segment_ids = map(np.asarray, arrays)
    q, k, v, log_decay, beta = (x.astype(np.float64) for x in inputs)
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + EPSILON) for x in (q, k))
    rows, length, key_heads, values_per_key, value_size = v.shape
    state = np.zeros((rows, key_heads, values_per_key, k.shape[-1], value_size))  # (B, K, G, D, U)
    out = []
    segment_before = np.zeros(rows)
    for t in range(length):
        segment = segment_ids[:, t]
        continues = (segment == segment_before)[:, None, None]
        decay = np.where(continues, np.exp(log_decay[:, t]), 0)  # (B, K, G)
        state *= decay[..., None, None]
        missing = v[:, t] - np.einsum("bkgdu,bkd->bkgu", state, k[:, t])
        state += np.einsum("bkd,bkg,bkgu->bkgdu", k[:, t], beta[:, t], missing)
        out.append(np.einsum("bkgdu,bkd->bkgu", state, q[:, t]) * q.shape[-1] ** -0.5)
        segment_before = segment
    return np.stack(out, axis=1)


def gated_delta_rule(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, segment_ids: Array
) -> Array:
    """Computes the rule in chunks. See `DeltaRule`."""
    dtype = v.dtype
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    q, k = q.shape[-1] ** -0.5 * inverse_length(q) * q, inverse_length(k) * k
    per_head = q, k, v, log_decay[..., None], beta[..., None]
    chunks = _prepare(*map(_in_chunks, (*per_head, segment_ids[..., None])))
    state = jnp.zeros((*chunks.written.shape[1:4], k.shape[-1], v.shape[-1]), jnp.float32)
    _, out = lax.scan(_step, state, chunks)
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # (B, N, C, K, G, U)
    return out.reshape(len(v), -1, *v.shape[2:])[:, : v.shape[1]].astype(dtype)


def inverse_length(x: Array) -> Array:
    """Returns the factor that makes the last axis a unit vector: (..., 1) float32."""
    x = x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON)


def _in_chunks(x: Array) -> Array:
    """Maps (B, T, ...heads, size) to (N, B, ...heads, C, size), padded with zeros."""
    padding = [(0, 0), (0, -x.shape[1] % CHUNK), *[(0, 0)] * (x.ndim - 2)]
    x = jnp.pad(x, padding).reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
    return jnp.moveaxis(x, (1, 2), (0, -2))


class _Chunks(NamedTuple):
    """The arrays of all chunks that the loop needs.

    Token j of a chunk adds the outer product of its key and a vector to S. This vector is the value
    `added` of `_step`.

    Attributes:
        written: The vectors that tokens would add if S were zero before the chunk,
            (N, B, K, G, C, U).
        readers: The factors of S before the chunk, (N, B, K, G, 2 C, D): first the C factors for
            the vectors that tokens add, then the C factors for the outputs.
        within: The factor of token j's vector in the output of token i, (N, B, K, G, I, J).
        writers: The keys, decayed until the end of the chunk, (N, B, K, G, C, D).
        kept: The share of S before the chunk that is left after it, (N, B, K, G, 1, 1).
    """

    written: Array
    readers: Array
    within: Array
    writers: Array
    kept: Array


def _prepare(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, segments: Array
) -> _Chunks:
    """Computes all that does not depend on S, for all chunks at once.

    Args:
        q: The normalised queries, (N, B, K, C, D).
        k: The normalised keys, (N, B, K, C, D).
        v: The values, (N, B, K, G, C, U).
        log_decay: The log decays, (N, B, K, G, C, 1).
        beta: The rates, (N, B, K, G, C, 1).
        segments: The segment ids, (N, B, C, 1).
    """
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
    """Inverts lower triangular matrices whose diagonal is 1.

    It inverts blocks along the diagonal, first of one token, then of two, of four and so on. Two
    blocks with the inverses X and Y become one block: the inverse of

        [ A 0 ]      [    X    0 ]
        [ M B ]  is  [ -Y M X  Y ]

    These are matrix products, while a solver would take tokens one after the other; on a CPU with
    several devices a solver never returns.

    Args:
        below: The matrices, (N, B, K, G, I, J). Only the values below the diagonal are used.
    """
    tokens = np.arange(CHUNK)
    inverse = jnp.eye(CHUNK)
    for level in range(CHUNK.bit_length() - 1):
        block = tokens >> level
        joined_block = tokens >> (level + 1)
        is_joined = joined_block[:, None] == joined_block
        is_below = block[:, None] > block
        between = jnp.where(is_joined & is_below, below, 0)
        if level:
            product = partial(einsum, "NBKGIC,NBKGCJ->NBKGIJ")
            between = product(product(inverse, between), inverse)
        inverse = inverse - between
    return inverse


def _decays(log_decay: Array, segments: Array) -> tuple[Array, Array]:
    """Returns the decay of S between tokens of a chunk, and since the beginning of the chunk.

    Only numbers of one sign are added, and nothing is subtracted, so a token that forgets
    everything does not harm the precision of the next ones.

    Args:
        log_decay: (N, B, K, G, C, 1).
        segments: The segment ids, (N, B, C, 1).

    Returns:
        The share of what token j added that is left at token i, (N, B, K, G, I, J).
        The share of S before the chunk that is left at each token, (N, B, K, G, C, 1).
        Both are 0 across segments.
    """
    segment = segments[:, :, None, None]  # (N, B, 1, 1, C, 1)
    last_segment = segment[:-1, ..., -1:, :]  # the last token's, of each chunk but the last
    segment_before = jnp.pad(last_segment, [(1, 0), *[(0, 0)] * 5], constant_values=-1)
    seen = jnp.tril(segment == segment.mT)  # whether token I sees token J, (N, B, 1, 1, I, J)
    until = jnp.tri(CHUNK)  # 1 where token C does not come after token I, (I, C)
    between = einsum("IC,NBKGCJ->NBKGIJ", until, log_decay * jnp.tri(CHUNK, k=-1))
    since_begin = einsum("IC,NBKGCJ->NBKGIJ", until, log_decay)
    within = jnp.where(seen, jnp.exp(between), 0)
    return within, jnp.where(segment == segment_before, jnp.exp(since_begin), 0)


def _step(state: Array, chunk: _Chunks) -> tuple[Array, Array]:
    """Computes one chunk.

    Args:
        state: S before the chunk, (B, K, G, D, U).
        chunk: The arrays of this chunk, without the axis N.

    Returns:
        S after the chunk, (B, K, G, D, U), and the outputs of its tokens, (B, K, G, C, U).
    """
    stored, read = jnp.split(einsum("BKGCD,BKGDU->BKGCU", chunk.readers, state), 2, axis=3)
    added = chunk.written - stored
    out = read + einsum("BKGIJ,BKGJU->BKGIU", chunk.within, added)
    state = chunk.kept * state + einsum("BKGCD,BKGCU->BKGDU", chunk.writers, added)
    return state, out
