"""The kernels of attention, experts and the gated delta rule that each platform has.

For attention there are splash attention on TPUs and cuDNN's kernel on GPUs, which work on blocks
that stay on the chip, so that no scores reach its memory; for experts there is tokamax's kernel on
GPUs, and for the gated delta rule that of delta_kernel.py on TPUs. None of them rounds float32. A
trial (trial.py) decides which of them a run uses.

Letters: B rows, T queries, S keys, N query heads, K key/value heads, H head size.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from activation_extraction.common.errors import InputError
from activation_extraction.model.attention import Attention, blocked_attention, visible
from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.delta_net import DeltaRule, gated_delta_rule
from activation_extraction.model.experts import (
    GroupedExperts,
    in_products,
    ragged_experts,
    tiled_experts,
)

LANES = 128  # the width of a TPU's registers: splash attention's blocks are multiples of it
MOST_IN_BLOCK = 1024  # bytes of one number of each query or key: 512 in bfloat16
PADDING = -1  # the segment of tokens that only fill a block


class Kernels(NamedTuple):
    """The functions of which each platform has its own form."""

    attention: Attention = blocked_attention
    experts: GroupedExperts = tiled_experts
    delta_rule: DeltaRule = gated_delta_rule


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
    """Computes Pallas splash attention on TPUs. See `Attention`; `interpret` is for tests.

    The kernel must know when compiling where the queries begin: a traced `first_query` has to be a
    multiple of T, and each of its values becomes a branch of its own.
    """
    length, keys = q.shape[1], k.shape[1]
    q, k, v = (_pad(x, 0) for x in (q, k, v))
    segments = splash.SegmentIds(_pad(q_segments, PADDING), _pad(k_segments, PADDING))
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
        # The kernel sets no precision, so a TPU would round float32 to bfloat16.
        precision = "highest" if q.dtype == jnp.float32 else "default"
        with jax.default_matmul_precision(precision):
            return jax.vmap(kernel)(*heads_first, segments)

    if isinstance(first_query, int):
        out = from_query(first_query)
    else:
        branches = [lambda first=first: from_query(first) for first in range(0, keys, length)]
        out = lax.switch(first_query // length, branches)
    return out.swapaxes(1, 2)[:, :length]


def _pad(x: Array, value: int) -> Array:
    """Pads rows to a multiple of LANES."""
    widths = [(0, 0), (0, -x.shape[1] % LANES), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, constant_values=value)


def _block(length: int, dtype: Any) -> int:
    """Returns the largest block of at most MOST_IN_BLOCK that divides a multiple of LANES."""
    most = min(length, MOST_IN_BLOCK // dtype.itemsize)
    return max(size for size in range(LANES, most + 1, LANES) if length % size == 0)


def cudnn_attention(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    k_segments: Array,
    first_query: int | Array,
    window: int | None = None,
) -> Array:
    """Computes attention with cuDNN on GPUs; the segments become a mask (B, 1, T, S).

    See `Attention`. float32 is left to `blocked_attention`: the GPU's matrix units would round it.
    """
    if q.dtype == jnp.float32:
        return blocked_attention(q, k, v, q_segments, k_segments, first_query, window)
    mask = visible(q_segments, k_segments, first_query, window=window)[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=1.0, implementation="cudnn")


def tokamax_experts(x: Array, sizes: Array, gate: Array, up: Array, down: Array) -> Array:
    """Computes experts with tokamax's grouped products on NVIDIA GPUs. See `GroupedExperts`.

    float32 is left to `tiled_experts`: the GPU's matrix units would round it.
    """
    if x.dtype == jnp.float32:
        return tiled_experts(x, sizes, gate, up, down)
    import tokamax
    from absl import flags, logging

    flags.FLAGS.mark_as_parsed()  # tokamax would look for its own flags in our command line
    logging.set_verbosity("error")  # tokamax warns of every shape that it was not tuned for
    product = partial(
        tokamax.ragged_dot,
        preferred_element_type=jnp.float32,
        implementation=("mosaic", "triton"),  # the first one that this GPU has
    )
    return in_products(product, x, sizes, gate, up, down)


# Maps a field of `Kernels` to its candidates by name, in the order of preference.
Candidates = Mapping[str, Mapping[str, Callable[..., Array]]]
ON_GPU: Candidates = {
    "attention": {"cudnn": cudnn_attention, "blocked": blocked_attention},
    "experts": {"tokamax": tokamax_experts, "tiled": tiled_experts},
    "delta_rule": {"chunked": gated_delta_rule},
}
CANDIDATES: dict[str, Candidates] = {
    "cpu": {
        "attention": {"blocked": blocked_attention},
        "experts": {"tiled": tiled_experts},
        "delta_rule": {"chunked": gated_delta_rule},
    },
    "tpu": {
        "attention": {"splash": splash_attention, "blocked": blocked_attention},
        "experts": {"ragged_dot": ragged_experts, "tiled": tiled_experts},
        "delta_rule": {"pallas": pallas_delta_rule, "chunked": gated_delta_rule},
    },
    **dict.fromkeys(("gpu", "cuda", "rocm"), ON_GPU),
}


def candidates_for(platform: str) -> Candidates:
    """Returns the candidates of a platform. Raises InputError for a platform that has none."""
    if platform not in CANDIDATES:
        raise InputError(f"JAX runs on the platform {platform!r}: expected cpu, gpu or tpu")
    return CANDIDATES[platform]


def preferred_kernels(platform: str) -> Kernels:
    """Returns the kernels to try first. Raises InputError for a platform that has none."""
    candidates = candidates_for(platform)
    return Kernels(**{kind: next(iter(each.values())) for kind, each in candidates.items()})
