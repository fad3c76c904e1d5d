"""Lists the kernels of each platform for attention, experts and the gated delta rule.

A kernel is a function that computes attention, experts or the gated delta rule in a way that suits
a platform. Splash attention on TPUs and flash attention on GPUs keep blocks of scores on the chip,
so that no scores are written to memory. No kernel rounds float32 to a narrower dtype. trial.py
chooses the kernels of a run.

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
    AttentionFunction,
    Segments,
    blocked_attention,
    whole_blocks,
)
from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.delta_net import DeltaRuleFunction, gated_delta_rule
from activation_extraction.model.expert_kernel import pallas_experts
from activation_extraction.model.experts import (
    ExpertSumFunction,
    sum_experts_in_tiles,
    sum_experts_with_ragged_dot,
)
from activation_extraction.model.flash_kernel import PADDING, flash_attention
from activation_extraction.model.grouped_kernel import grouped_experts

# The number of lanes of a TPU's register. A block of splash attention must have a multiple of this
# number of tokens.
LANES = 128
# The largest number of tokens in a block of splash attention, times the bytes of a value. It allows
# blocks of 512 tokens in bfloat16, and of 256 tokens in float32.
MOST_IN_BLOCK = 1024


class Kernels(NamedTuple):
    """The functions with which a model computes its attention, experts and gated delta rules.

    The defaults work on every platform. metadata.json records the kernels of a run under the names
    of the fields, so these names must not change.

    Attributes:
        attention: The function that computes attention; see `AttentionFunction` in attention.py.
        experts: The function that computes the weighted sums of experts; see `ExpertSumFunction` in
            experts.py.
        delta_rule: The function that computes the gated delta rule; see `DeltaRuleFunction` in
            delta_net.py.
    """

    attention: AttentionFunction = blocked_attention
    experts: ExpertSumFunction = sum_experts_in_tiles
    delta_rule: DeltaRuleFunction = gated_delta_rule


def splash_attention(
    q: Array,
    k: Array,
    v: Array,
    segments: Segments,
    first_query: int | Array,
    window: int | None = None,
    interpret: bool = False,
) -> Array:
    """Computes attention on TPUs, with Pallas's splash attention.

    Splash attention compiles a kernel for one fixed index of the first query. If the index is a
    traced array, the program contains a kernel for each multiple of T below S, and the device runs
    the kernel for the actual index.

    Letters: B rows, T queries, S keys, N query heads, K key/value heads, H head size.

    Args:
        q: The queries, (B, T, N, H).
        k: The keys, (B, S, K, H).
        v: The values, (B, S, K, H).
        segments: For each query and each key, the number of its sample in the row; 0 for padding.
        first_query: The index of the first query in its row. If it is a traced array, it must be a
            multiple of T.
        window: The largest number of tokens that a token sees, itself included; None for no limit.
        interpret: Whether Pallas interprets the kernel, for tests on CPUs.

    Returns:
        The outputs, (B, T, N, H) in the dtype of q. See `AttentionFunction` for their definition.
    """
    query_count = q.shape[1]
    key_count = k.shape[1]
    q, k, v = (whole_blocks(x, LANES) for x in (q, k, v))
    segment_ids = splash.SegmentIds(
        q=whole_blocks(segments.q, LANES, PADDING), kv=whole_blocks(segments.k, LANES, PADDING)
    )
    qkv_heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]  # shapes BNTH, BKSH and BKSH
    scores_shape = q.shape[1], k.shape[1]
    block_sizes = splash.BlockSizes(
        block_q=_largest_block(q.shape[1], q.dtype), block_kv=_largest_block(k.shape[1], q.dtype)
    )

    def attend_from(first_query: int) -> Array:
        attention_mask: Any = splash.CausalMask(scores_shape, offset=first_query)
        if window is not None:
            attention_mask = splash.LocalMask(scores_shape, (window - 1, 0), offset=first_query)
        head_masks = splash.MultiHeadMask([attention_mask] * q.shape[2])
        splash_kernel = splash.make_splash_mha_single_device(
            head_masks, block_sizes=block_sizes, interpret=interpret
        )
        # The kernel sets no precision, so a TPU would round float32 to bfloat16.
        matmul_precision = "highest" if q.dtype == jnp.float32 else "default"
        with jax.default_matmul_precision(matmul_precision):
            return jax.vmap(splash_kernel)(*qkv_heads_first, segment_ids)

    if isinstance(first_query, int):
        heads_first_output = attend_from(first_query)
    else:
        start_indices_of_query_blocks = range(0, key_count, query_count)
        attention_branches = [
            partial(attend_from, query_block_start)
            for query_block_start in start_indices_of_query_blocks
        ]
        heads_first_output = lax.switch(first_query // query_count, attention_branches)
    return heads_first_output.swapaxes(1, 2)[:, :query_count]


def _largest_block(length: int, dtype: Any) -> int:
    """Returns the size of the largest block that splash attention can use, in tokens.

    The size is a multiple of LANES, divides the length, and is at most MOST_IN_BLOCK divided by the
    bytes of a value.

    Args:
        length: The number of queries or keys, a multiple of LANES.
        dtype: The dtype of the queries and keys.
    """
    max_block_tokens = min(length, MOST_IN_BLOCK // dtype.itemsize)
    return max(
        block_size
        for block_size in range(LANES, max_block_tokens + 1, LANES)
        if length % block_size == 0
    )


# Field of `Kernels` -> a dict of the functions that the field may have: name -> function, with the
# preferred functions first.
KernelsByFieldAndName = Mapping[str, Mapping[str, Callable[..., Array]]]
# Field of `Kernels` -> the name of its default function, which works on every platform.
DEFAULT_NAMES = {"attention": "blocked", "experts": "tiled", "delta_rule": "chunked"}
# Platform -> the kernels that are preferred to the defaults.
PREFERRED: Mapping[str, KernelsByFieldAndName] = {
    "cpu": {},
    "tpu": {
        "attention": {"splash": splash_attention},
        "experts": {"pallas": pallas_experts, "ragged_dot": sum_experts_with_ragged_dot},
        "delta_rule": {"pallas": pallas_delta_rule},
    },
    "gpu": {"attention": {"flash": flash_attention}, "experts": {"grouped": grouped_experts}},
}


def candidates_for(platform: str) -> KernelsByFieldAndName:
    """Returns the kernels that a platform may use.

    Args:
        platform: JAX's name of the platform, such as "tpu" or "cuda".

    Returns:
        Field of `Kernels` -> its candidates as a dict: name -> function, with the preferred ones
        first and the default last.

    Raises:
        InputError: If the platform is not supported.
    """
    preferred_kernels = PREFERRED.get("gpu" if platform in ("cuda", "rocm") else platform)
    if preferred_kernels is None:
        raise InputError(f"JAX runs on the platform {platform!r}: expected cpu, gpu or tpu")
    kernel_by_name_by_kernel_kind = {}
    for kernel_kind, default_name in DEFAULT_NAMES.items():
        default_kernel_by_name = {default_name: getattr(Kernels(), kernel_kind)}
        kernel_by_name_by_kernel_kind[kernel_kind] = {
            **preferred_kernels.get(kernel_kind, {}),
            **default_kernel_by_name,
        }
    return kernel_by_name_by_kernel_kind
