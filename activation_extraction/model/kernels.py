"""Lists the kernels of each platform for attention, experts and the gated delta rule.

Splash attention on TPUs and flash attention on GPUs keep blocks of scores on the chip, so that no
scores are written to memory. No kernel rounds float32 to a narrower dtype. trial.py chooses the
kernels of a run.

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
from activation_extraction.model.attention import (
    Attention,
    Segments,
    blocked_attention,
    whole_blocks,
)
from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.delta_net import DeltaRule, gated_delta_rule
from activation_extraction.model.expert_kernel import pallas_experts
from activation_extraction.model.experts import ExpertSum, ragged_experts, tiled_experts
from activation_extraction.model.flash_kernel import PADDING, flash_attention
from activation_extraction.model.grouped_kernel import grouped_experts

LANES = 128  # the width of a TPU's registers, of which splash attention's blocks are multiples
MOST_IN_BLOCK = 1024  # the largest block in tokens times bytes per value: 512 tokens in bfloat16


class Kernels(NamedTuple):
    """The functions for which platforms have their own kernels.

    Attributes:
        attention: See `Attention` in attention.py.
        experts: See `ExpertSum` in experts.py.
        delta_rule: See `DeltaRule` in delta_net.py.
    """

    attention: Attention = blocked_attention
    experts: ExpertSum = tiled_experts
    delta_rule: DeltaRule = gated_delta_rule


def splash_attention(
    q: Array,
    k: Array,
    v: Array,
    segments: Segments,
    first: int | Array,
    window: int | None = None,
    interpret: bool = False,
) -> Array:
    """Computes attention on TPUs, with Pallas's splash attention.

    The kernel is compiled for a fixed position of the first query. If `first` is traced, each of
    its possible values, which are multiples of T, becomes a branch of the program.

    Args:
        q: See `Attention`, as for the following arguments.
        k: See `Attention`.
        v: See `Attention`.
        segments: See `Attention`.
        first: See `Attention`. A traced value must be a multiple of T.
        window: See `Attention`.
        interpret: Whether Pallas interprets the kernel, for tests on CPUs.

    Returns:
        See `Attention`.
    """
    length, keys = q.shape[1], k.shape[1]
    q, k, v = (whole_blocks(x, LANES) for x in (q, k, v))
    ids = splash.SegmentIds(*(whole_blocks(x, LANES, PADDING) for x in segments))
    heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]  # BNTH, BKSH
    shape = q.shape[1], k.shape[1]
    of_queries, of_keys = (_largest_block(size, q.dtype) for size in shape)
    blocks = splash.BlockSizes(block_q=of_queries, block_kv=of_keys)

    def from_query(first: int) -> Array:
        mask: Any = splash.CausalMask(shape, offset=first)
        if window is not None:
            mask = splash.LocalMask(shape, (window - 1, 0), offset=first)
        kernel = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * q.shape[2]), block_sizes=blocks, interpret=interpret
        )
        # The kernel sets no precision, so a TPU would round float32 to bfloat16.
        precision = "highest" if q.dtype == jnp.float32 else "default"
        with jax.default_matmul_precision(precision):
            return jax.vmap(kernel)(*heads_first, ids)

    if isinstance(first, int):
        out = from_query(first)
    else:
        branches = [partial(from_query, start) for start in range(0, keys, length)]
        out = lax.switch(first // length, branches)
    return out.swapaxes(1, 2)[:, :length]


def _largest_block(length: int, dtype: Any) -> int:
    """Returns the largest block within MOST_IN_BLOCK that divides a length, in tokens.

    Args:
        length: The length, a multiple of LANES.
        dtype: The dtype of the queries and keys.
    """
    max_tokens = min(length, MOST_IN_BLOCK // dtype.itemsize)
    return max(size for size in range(LANES, max_tokens + 1, LANES) if length % size == 0)


# Field of `Kernels` -> name -> function, in the order of preference.
Candidates = Mapping[str, Mapping[str, Callable[..., Array]]]
# Field of `Kernels` -> the name of its default, which works on every platform and comes last.
PLAIN = {"attention": "blocked", "experts": "tiled", "delta_rule": "chunked"}
# Platform -> the kernels that are preferred over the defaults.
FASTER: Mapping[str, Candidates] = {
    "cpu": {},
    "tpu": {
        "attention": {"splash": splash_attention},
        "experts": {"pallas": pallas_experts, "ragged_dot": ragged_experts},
        "delta_rule": {"pallas": pallas_delta_rule},
    },
    "gpu": {"attention": {"flash": flash_attention}, "experts": {"grouped": grouped_experts}},
}


def candidates_for(platform: str) -> Candidates:
    """Returns the kernels that a platform may use.

    Raises:
        InputError: The platform is not supported.
    """
    faster = FASTER.get("gpu" if platform in ("cuda", "rocm") else platform)
    if faster is None:
        raise InputError(f"JAX runs on the platform {platform!r}: expected cpu, gpu or tpu")
    plain = Kernels()._asdict()
    return {kind: {**faster.get(kind, {}), name: plain[kind]} for kind, name in PLAIN.items()}
