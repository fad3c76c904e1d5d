"""The gated delta net (arXiv:2412.06464) replaces attention in layers of Qwen3-Next and Qwen3.5.

The rule keeps a matrix S per head, which is zero before a segment's first token. A token with query
q, key k, value v, log decay g and rate b changes it and reads it:

    S <- exp(g) S;  S <- S + k (b (v - S^T k))^T;  o = S^T q

Tokens are computed in chunks (arXiv:2406.06484): what the tokens of a chunk do to each other is a
triangular system, solved for all chunks at once; S goes from chunk to chunk in a loop. All of it is
in float32, and no token sees another segment of its row.

The modules use the letters of qwen2_jax.py, and J key heads, G value heads of each, C key size, Z
value size, O all values of a token, W taps of the convolution. Key heads, each with its value
heads, are split over devices. A checkpoint keeps queries, keys and values in one matrix, one below
the other or head by head, and the convolutions one below the other; here each has parameters of its
own, so that heads can be split. The functions use the letters B rows, T tokens per row, K key
heads, G value heads of each, D key size, U value size, N chunks, C tokens of a chunk (I and J where
two meet).
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
OF_KEYS = "batch", "sequence", "key_heads", "head_dim"  # logical axes of queries and keys
OF_VALUES = *OF_KEYS, "head_dim"

# Computes (q, k, v, log decay, beta, segment ids) -> o (B, T, K, G, U), in the dtype of v. q, k:
# (B, T, K, D), normalised here; v: (B, T, K, G, U); log decay, at most 0, and beta: (B, T, K, G)
# float32; segment ids: (B, T); the segments of a row follow one another, all different. Padding,
# segment 0, comes last, and its outputs mean nothing.
DeltaRule = Callable[[Array, Array, Array, Array, Array, Array], Array]


class GatedDeltaNet(nn.Module):
    """Maps (B, T, D) to (B, T, D), token by token, with the state of each token's segment."""

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
        constrain, out = self.layout.constrain, self._inputs(x, segment_ids)
        names = "q", "k", "v", "log_decay", "beta"
        with jax.named_scope("gated_delta_rule"):
            out["recurrence_out"] = self.layout.per_device(
                self.rule,
                [*(out[name] for name in names), segment_ids],
                [OF_KEYS, OF_KEYS, OF_VALUES, OF_KEYS, OF_KEYS, OF_KEYS[:2]],
                like=names.index("v"),
            )
        epsilon, values = self.config.rms_norm_eps, out["recurrence_out"]
        gated = gated_norm(values, out["gate_input"], self.norm(), epsilon).astype(self.dtype)
        out["gated"], flat = gated, gated.reshape(*gated.shape[:2], -1)
        out["out"] = constrain(self.out_proj(flat).astype(self.dtype), *STREAM)
        return out["out"], out

    def _inputs(self, x: Array, segment_ids: Array) -> Out:
        """Returns the inputs of the recurrence and of the gate after it."""
        constrain, out = self.layout.constrain, Out()
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
        rate, bias = (x.astype(jnp.float32) for x in (self.A_log, self.dt_bias))
        step = jax.nn.softplus(constrain(self.in_proj_a(x), *OF_KEYS) + bias)
        out["log_decay"] = -jnp.exp(rate) * step
        return out


def short_convolution(x: Array, weight: Array, segment_ids: Array) -> Array:
    """Returns each channel's weighted sum over the last few tokens of its segment, then silu.

    x: (B, T, ...channels); weight: (...channels, taps), the last tap being the token's own. Each
    tap widens x itself: if x were widened once, for all taps, XLA would write it to HBM wide.
    """
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
    """Gives each token the value `distance` tokens before it, zeros before the row begins."""
    shift = [(0, 0), (distance, 0), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, shift)[:, : x.shape[1]]


def gated_norm(x: Array, gate: Array, weight: Array, epsilon: float) -> Array:
    """Applies an RMS norm over the last axis, then multiplies by `weight` and silu(gate)."""
    x, gate = x.astype(jnp.float32), gate.astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return x * inverse_rms * weight.astype(jnp.float32) * jax.nn.silu(gate)


def token_by_token(*arrays: Any) -> np.ndarray:
    """Computes the rule as it is defined, in NumPy's float64. See `DeltaRule`."""
    *others, segment_ids = map(np.asarray, arrays)
    q, k, v, log_decay, beta = (x.astype(np.float64) for x in others)
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + EPSILON) for x in (q, k))
    state, out = np.zeros((*v.shape[:1], *v.shape[2:4], k.shape[-1], v.shape[-1])), []
    last = np.zeros(len(v))
    for t, own in enumerate(segment_ids.T):
        kept = np.where((own == last)[:, None, None], np.exp(log_decay[:, t]), 0)  # BKG
        state *= kept[..., None, None]
        missing = v[:, t] - np.einsum("bkgdu,bkd->bkgu", state, k[:, t])
        state += np.einsum("bkd,bkg,bkgu->bkgdu", k[:, t], beta[:, t], missing)
        out.append(np.einsum("bkgdu,bkd->bkgu", state, q[:, t]) * q.shape[-1] ** -0.5)
        last = own
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
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # BNCKGU
    return out.reshape(len(v), -1, *v.shape[2:])[:, : v.shape[1]].astype(dtype)


def inverse_length(x: Array) -> Array:
    """Returns the factor that makes the last axis a unit vector: (..., 1) float32."""
    x = x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON)


def _in_chunks(x: Array) -> Array:
    """Maps (B, T, ...heads, size) to (N, B, ...heads, C, size), padded with zeros."""
    more = [(0, 0), (0, -x.shape[1] % CHUNK), *[(0, 0)] * (x.ndim - 2)]
    x = jnp.pad(x, more).reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
    return jnp.moveaxis(x, (1, 2), (0, -2))


class _Chunks(NamedTuple):
    """The arrays of each chunk that the loop needs; every array begins with N."""

    written: Array  # NBKGCU: what tokens add to S if it was zero before the chunk
    readers: Array  # NBKG(2C)D: what reads the S before the chunk, for the update and for o
    within: Array  # NBKGIJ: how much the output of token i takes of what token j added
    writers: Array  # NBKGCD: the keys, decayed until the chunk's end
    kept: Array  # NBKG11: how much of the S before the chunk is left after it


def _prepare(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, segments: Array
) -> _Chunks:
    """Prepares all chunks at once, before the loop.

    q, k: NBKCD; v: NBKGCU; log_decay, beta: NBKGC1; segments: NBC1.
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
    """Inverts the identity plus what `below` (..., C, C) has below its diagonal.

    It goes along the diagonal block by block, and each time the blocks are twice as large; where
    two inverse blocks X and Y become one, -Y (what is below X) X comes between them. These are
    matrix products, where a solver would take tokens one after the other; on a CPU with several
    devices it never returns.
    """
    tokens = np.arange(CHUNK)
    inverse = jnp.eye(CHUNK)
    for level in range(CHUNK.bit_length() - 1):
        blocks, twice = tokens >> level, tokens >> (level + 1)
        joined = (twice[:, None] == twice) & (blocks[:, None] > blocks)
        between = jnp.where(joined, below, 0)
        if level:
            product = partial(einsum, "NBKGIC,NBKGCJ->NBKGIJ")
            between = product(product(inverse, between), inverse)
        inverse = inverse - between
    return inverse


def _decays(log_decay: Array, segments: Array) -> tuple[Array, Array]:
    """Returns how much is left from token to token of a chunk, NBKGIJ, and from before it, NBKGC1.

    A mask puts 0 between different segments. Only numbers of one sign are added, and nothing is
    subtracted, so a token that forgets everything does not harm the precision of the next ones.
    """
    own = segments[:, :, None, None]  # NB11C1
    before = jnp.pad(own[:-1, ..., -1:, :], [(1, 0), *[(0, 0)] * 5], constant_values=-1)
    seen = jnp.tril(own == own.mT)  # NB11IJ
    until = jnp.tri(CHUNK)  # IC: token C comes no later than I
    between = einsum("IC,NBKGCJ->NBKGIJ", until, log_decay * jnp.tri(CHUNK, k=-1))
    begun = einsum("IC,NBKGCJ->NBKGIJ", until, log_decay)
    return jnp.where(seen, jnp.exp(between), 0), jnp.where(own == before, jnp.exp(begun), 0)


def _step(state: Array, chunk: _Chunks) -> tuple[Array, Array]:
    """Computes one chunk; returns S after it, (B, K, G, D, U), and its outputs (B, K, G, C, U)."""
    stored, read = jnp.split(einsum("BKGCD,BKGDU->BKGCU", chunk.readers, state), 2, axis=3)
    added = chunk.written - stored
    out = read + einsum("BKGIJ,BKGJU->BKGIU", chunk.within, added)
    state = chunk.kept * state + einsum("BKGCD,BKGCU->BKGDU", chunk.writers, added)
    return state, out
