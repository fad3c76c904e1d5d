"""Kernels. Of attention: splash attention on TPUs, cuDNN's and one in Triton on GPUs.

These are `Attention`s; they work on blocks that stay on the chip, so that no scores reach its
memory. For experts on GPUs there is tokamax's. trial.py says which ones a run uses. None of them
rounds float32.

Letters: B rows, T queries, S keys, N query heads, K key/value heads, H head size.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from activation_extraction.model.attention import Attention, blocked_attention, visible
from activation_extraction.model.experts import GroupedExperts, in_products, tiled_experts

LANES = 128  # the width of a TPU's registers: splash attention's blocks are multiples of it
MOST_IN_BLOCK = 1024  # bytes of one number of each query or key: 512 in bfloat16
GPU_QUERIES, GPU_KEYS = 128, 64  # in a block; with H = 128 two stages fit the shared memory
PADDING = -1  # the segment of tokens that only fill a block
LOG2_E = math.log2(math.e)  # exp(x) is 2**(x * LOG2_E), which is what the hardware has
HIDDEN = -1e30  # the score of a key that is not visible; finite, so that differences are


class Kernels(NamedTuple):
    """The functions that each platform has in a form of its own."""

    attention: Attention = blocked_attention
    experts: GroupedExperts = tiled_experts


def splash_attention(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    k_segments: Array,
    first_query: int | Array,
    window: int | None = None,
    interpret: bool = False,
) -> Array:
    """Pallas splash attention, for TPUs. See `Attention`; `interpret` is for tests on other ones.

    The kernel must know when compiling where the queries begin: a traced `first_query` has to be a
    multiple of T, and each of its values becomes a branch of its own.
    """
    length, keys = q.shape[1], k.shape[1]
    q, k, v, *segments = _fill_all(q, k, v, q_segments, k_segments, LANES, LANES)
    heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]  # BNTH, BKSH
    blocks = splash.BlockSizes(
        block_q=_block(q.shape[1], q.dtype), block_kv=_block(k.shape[1], k.dtype)
    )

    def from_query(first: int) -> Array:
        shape = q.shape[1], k.shape[1]
        mask: Any = splash.CausalMask(shape, offset=first)
        if window is not None:
            mask = splash.LocalMask(shape, (window - 1, 0), offset=first)
        kernel = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * q.shape[2]), block_sizes=blocks, interpret=interpret
        )
        # The kernel asks for no precision, and a TPU would round float32 to bfloat16.
        with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
            return jax.vmap(kernel)(*heads_first, splash.SegmentIds(*segments))

    if isinstance(first_query, int):
        out = from_query(first_query)
    else:
        branches = [lambda first=first: from_query(first) for first in range(0, keys, length)]
        out = lax.switch(first_query // length, branches)
    return out.swapaxes(1, 2)[:, :length]


def _fill_all(
    q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array, block_q: int, block_k: int
) -> tuple[Array, ...]:
    """Lengthens rows to whole blocks, with tokens of a segment of their own."""
    q, q_segments = _fill(q, block_q, 0), _fill(q_segments, block_q, PADDING)
    k, v = _fill(k, block_k, 0), _fill(v, block_k, 0)
    k_segments = _fill(k_segments, block_k, PADDING)
    return q, k, v, q_segments, k_segments


def _fill(x: Array, block: int, value: int, axis: int = 1) -> Array:
    """Lengthens an axis to a multiple of `block`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths, constant_values=value)


def _block(length: int, dtype: Any) -> int:
    """The largest block of at most MOST_IN_BLOCK that divides a multiple of LANES."""
    most = min(length, MOST_IN_BLOCK // dtype.itemsize)
    return max(size for size in range(LANES, most + 1, LANES) if length % size == 0)


def triton_attention(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    k_segments: Array,
    first_query: int | Array,
    window: int | None = None,
    interpret: bool = False,
) -> Array:
    """Flash attention (arXiv:2307.08691) in Pallas for Triton, for GPUs. See `Attention`.

    Reads neither the blocks of keys after its queries nor those before their segments; keys and
    values are shared by the heads of a group, not repeated. It is a candidate: it is checked in
    interpret mode and lowered for CUDA, but it has not run on a GPU, so no run uses it yet. float32
    is left to `blocked_attention`: the GPU's matrix units would round it. `interpret` is for tests
    elsewhere.
    """
    if q.dtype == jnp.float32:
        return blocked_attention(q, k, v, q_segments, k_segments, first_query, window)
    length, head_dim = q.shape[1], q.shape[3]
    block_q, block_k = (
        min(most, max(16, pl.next_power_of_2(n)))
        for most, n in ((GPU_QUERIES, length), (GPU_KEYS, k.shape[1]))
    )
    inputs = _fill_all(q, k, v, q_segments, k_segments, block_q, block_k)
    wide = max(16, pl.next_power_of_2(head_dim))  # Triton's blocks are powers of two
    q, k, v = (_fill(x, wide, 0, axis=3) for x in inputs[:3])
    q_segments, k_segments = inputs[3:]
    rows, queries, heads, _ = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    first = jnp.full((1,), first_query, jnp.int32)
    begins = _first_key_blocks(q_segments, k_segments, block_q, block_k)

    def of_queries(i: Any, b: Any, h: Any) -> tuple[Any, ...]:
        return b, i, h, 0

    def of_keys(i: Any, b: Any, h: Any) -> tuple[Any, ...]:
        return b, 0, lax.div(h, group), 0

    row = pl.BlockSpec((None, keys, None, wide), of_keys)
    out = pl.pallas_call(
        partial(_flash_kernel, block_k=block_k, window=window),
        grid=(queries // block_q, rows, heads),
        in_specs=[
            pl.BlockSpec((1,), lambda i, b, h: (0,)),
            pl.BlockSpec((None, 1), lambda i, b, h: (b, i)),
            pl.BlockSpec((None, block_q, None, wide), of_queries),
            row,
            row,
            pl.BlockSpec((None, block_q), lambda i, b, h: (b, i)),
            pl.BlockSpec((None, keys), lambda i, b, h: (b, 0)),
        ],
        out_specs=pl.BlockSpec((None, block_q, None, wide), of_queries),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=triton.CompilerParams(num_warps=4 if wide <= 64 else 8, num_stages=2),
        interpret=interpret,
        name="attention",
    )(first, begins, q, k, v, q_segments, k_segments)
    return out[:, :length, :, :head_dim]


def _first_key_blocks(q_segments: Array, k_segments: Array, block_q: int, block_k: int) -> Array:
    """(B, blocks of queries) int32: the first block of keys with a segment in the queries' range.

    Segments need not be in order for this to be right, but few keys are left out when they are not.
    """
    rows = q_segments.shape[0]
    of_q = q_segments.reshape(rows, -1, 1, block_q)
    of_k = k_segments.reshape(rows, 1, -1, block_k)
    meet = (of_q.min(-1) <= of_k.max(-1)) & (of_k.min(-1) <= of_q.max(-1))
    return jnp.argmax(meet, axis=-1).astype(jnp.int32)


def _flash_kernel(
    first_ref: Any,
    begin_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_segments_ref: Any,
    k_segments_ref: Any,
    out_ref: Any,
    *,
    block_k: int,
    window: int | None,
) -> None:
    """One block of queries of one head: the running maximum, sum and values of the softmax."""
    block_q, wide = q_ref.shape
    q, q_segments = q_ref[...], q_segments_ref[...]
    first = first_ref[0] + pl.program_id(0) * block_q

    def step(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, most, total = carry
        keys = pl.ds(block * block_k, block_k)
        scores = triton.dot(q, k_ref[keys, :], trans_b=True) * LOG2_E
        seen = visible(q_segments, k_segments_ref[keys], first, block * block_k, window)
        scores = jnp.where(seen, scores, HIDDEN)
        new_most = jnp.maximum(most, scores.max(axis=-1))
        # Exactly 0 for what is hidden, also in a row that has seen no key so far.
        weights = jnp.where(seen, jnp.exp2(scores - new_most[:, None]), 0.0)
        shrink = jnp.exp2(most - new_most)
        values = triton.dot(weights.astype(v_ref.dtype), v_ref[keys, :])
        return out * shrink[:, None] + values, new_most, total * shrink + weights.sum(axis=-1)

    start = (
        jnp.zeros((block_q, wide), jnp.float32),
        jnp.full((block_q,), HIDDEN, jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
    )
    end = jnp.minimum(lax.div(first + block_q + block_k - 1, block_k), k_ref.shape[0] // block_k)
    out, _, total = lax.fori_loop(begin_ref[0], end, step, start)
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)  # 0 in a block's filling alone
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)


def cudnn_attention(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    k_segments: Array,
    first_query: int | Array,
    window: int | None = None,
) -> Array:
    """cuDNN's, for GPUs. See `Attention`. It gets the segments as a mask (B, 1, T, S).

    float32 is left to `blocked_attention`, as in `triton_attention`.
    """
    if q.dtype == jnp.float32:
        return blocked_attention(q, k, v, q_segments, k_segments, first_query, window)
    mask = visible(q_segments, k_segments, first_query, window=window)[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=1.0, implementation="cudnn")


def tokamax_experts(x: Array, sizes: Array, gate: Array, up: Array, down: Array) -> Array:
    """tokamax's grouped products, for NVIDIA GPUs. See `GroupedExperts`.

    float32 is left to `tiled_experts`: the GPU's matrix units would round it.
    """
    if x.dtype == jnp.float32:
        return tiled_experts(x, sizes, gate, up, down)
    import tokamax
    from absl import flags, logging

    flags.FLAGS.mark_as_parsed()  # it would look for its own flags among those of this program
    logging.set_verbosity("error")  # it warns of every shape that it was not tuned for
    product = partial(
        tokamax.ragged_dot,
        preferred_element_type=jnp.float32,
        implementation=("mosaic", "triton"),  # the first one that this GPU has
    )
    return in_products(product, x, sizes, gate, up, down)
