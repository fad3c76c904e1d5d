"""Attention as kernels: splash attention on TPUs. Every function here is an `Attention`.

`attention_for` is the only place where a platform chooses its function. The kernels work on blocks
that stay on the chip, so that no scores reach its memory. float32 is computed as such everywhere.

Letters: B rows, T queries, S keys, N query heads, K key/value heads, G = N / K, H head size.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from activation_extraction.attention import Attention, blocked_attention

LANES = 128  # the width of a TPU's registers: splash attention's blocks are multiples of it
MOST_IN_BLOCK = 512
PADDING = -1  # the segment of tokens that only fill a block


def attention_for(platform: str) -> Attention:
    """The function for devices whose `platform` this is."""
    return {"tpu": splash_attention}.get(platform, blocked_attention)


def splash_attention(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    k_segments: Array,
    first_query: int | Array,
    interpret: bool = False,
) -> Array:
    """Pallas splash attention, for TPUs. See `Attention`; `interpret` is for tests on other ones.

    The kernel must know when compiling where the queries begin: a traced `first_query` has to be a
    multiple of T, and each of its values becomes a branch of its own.
    """
    length, keys = q.shape[1], k.shape[1]

    def from_query(first: int) -> Array:
        return _splash(q, k, v, q_segments, k_segments, first, interpret)

    if isinstance(first_query, int):
        return from_query(first_query)
    branches = [lambda first=first: from_query(first) for first in range(0, keys, length)]
    return lax.switch(first_query // length, branches)


def _splash(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    k_segments: Array,
    first_query: int,
    interpret: bool,
) -> Array:
    length = q.shape[1]
    q, k = _scale(q, k)
    q, q_segments = _fill(q, 0), _fill(q_segments, PADDING)
    k, v, k_segments = _fill(k, 0), _fill(v, 0), _fill(k_segments, PADDING)
    mask = splash.CausalMask((q.shape[1], k.shape[1]), offset=first_query)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * q.shape[2]),
        block_sizes=splash.BlockSizes(block_q=_block(q.shape[1]), block_kv=_block(k.shape[1])),
        interpret=interpret,
    )
    heads_first = (x.swapaxes(1, 2) for x in (q, k, v))  # BNTH, BKSH
    # The kernel asks for no precision, and a TPU would round float32 to bfloat16.
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
        out = jax.vmap(kernel)(*heads_first, splash.SegmentIds(q_segments, k_segments))
    return out.swapaxes(1, 2)[:, :length]


def _scale(q: Array, k: Array) -> tuple[Array, Array]:
    """Queries times H**-0.5, which the kernel leaves out, without rounding them a second time.

    Where the factor is no power of two, bfloat16 queries become two halves whose sum is right to
    16 bits, and the keys are doubled to match.
    """
    scale = q.shape[-1] ** -0.5
    scaled = q.astype(jnp.float32) * scale
    if q.dtype == jnp.float32 or math.frexp(scale)[0] == 0.5:
        return scaled.astype(q.dtype), k
    # Not a cast to bfloat16 and back, which XLA may leave out as a needless loss of precision.
    high = lax.reduce_precision(scaled, exponent_bits=8, mantissa_bits=7)
    halves = [high.astype(q.dtype), (scaled - high).astype(q.dtype)]
    return jnp.concatenate(halves, axis=-1), jnp.concatenate([k, k], axis=-1)


def _fill(x: Array, value: int) -> Array:
    """Lengthens axis 1 to a multiple of LANES."""
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, -x.shape[1] % LANES)
    return jnp.pad(x, widths, constant_values=value)


def _block(length: int) -> int:
    """The largest block that divides a multiple of LANES."""
    fitting = range(LANES, min(length, MOST_IN_BLOCK) + 1, LANES)
    return max(block for block in fitting if length % block == 0)
