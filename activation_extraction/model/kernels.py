"""A trial decides which kernels a run uses.

For attention there are splash attention on TPUs and cuDNN's kernel on GPUs, which work on blocks
that stay on the chip, so that no scores reach its memory; for experts there is tokamax's kernel on
GPUs, and for the gated delta rule that of delta_kernel.py on TPUs. None of them rounds float32.
Before a run loads its weights, each candidate of the platform computes a small packed batch, or a
few rows for some experts, of the sizes that one device has in the run. The run uses the first one
whose numbers are those of the definition.

Letters: B rows, T queries, S keys, N query heads, K key/value heads, H head size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.common.log import log
from activation_extraction.model.attention import (
    Attention,
    blocked_attention,
    dense_attention,
    visible,
)
from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.delta_net import DeltaRule, gated_delta_rule, token_by_token
from activation_extraction.model.experts import (
    GroupedExperts,
    in_products,
    ragged_experts,
    tiled_experts,
)
from activation_extraction.model.layers import einsum
from activation_extraction.model.mesh import Layout

LANES = 128  # the width of a TPU's registers: splash attention's blocks are multiples of it
MOST_IN_BLOCK = 1024  # bytes of one number of each query or key: 512 in bfloat16
PADDING = -1  # the segment of tokens that only fill a block
# This bounds the relative error of any token's value in any head, and of what an expert gives it.
# bfloat16 rounds two factors by at most 2**-9 each, which adds up to less than 2**-7. float32 sums
# of some hundred products are good to 2**-18; products of TF32 or bfloat16 are not good to 2**-14.
# One key too many or too few among n changes a value by about 0.4 * n**-0.5, which is 2**-5 for the
# segments of a trial.
TOLERANCE = {"bfloat16": 2.0**-6, "float32": 2.0**-15}
ALIGNMENT = 128  # kernels treat rows alike if their lengths are the same modulo this
MOST_EXPERTS = 8  # in a trial
MOST_KEY_HEADS = 2  # in a trial
TRIAL_TOKENS = 300  # of each row of a delta rule: several chunks, the last one not whole


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


@dataclass(frozen=True)
class Choice:
    """The kernel that a run uses. passed_over: name -> why an earlier candidate is not used."""

    name: str
    function: Callable[..., Array]
    passed_over: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "passed_over": self.passed_over}


def candidates_for(platform: str) -> Candidates:
    """Returns the candidates of a platform. Raises InputError for a platform that has none."""
    if platform not in CANDIDATES:
        raise InputError(f"JAX runs on the platform {platform!r}: expected cpu, gpu or tpu")
    return CANDIDATES[platform]


def preferred_kernels(platform: str) -> Kernels:
    """Returns the kernels to try first. Raises InputError for a platform that has none."""
    candidates = candidates_for(platform)
    return Kernels(**{kind: next(iter(each.values())) for kind, each in candidates.items()})


def try_kernels(config: Any, layout: Layout, length: int, dtype: jnp.dtype) -> dict[str, Choice]:
    """Returns the kernels of the run by fields of `Kernels`; logs the outcome.

    Every host tries them on a device of its own. What has a single candidate, as on the CPU, is not
    tried. length: tokens per row.
    """
    candidates = candidates_for(jax.default_backend())
    attention = AttentionSizes.of_run(config, layout, length)
    tried = {"attention": partial(largest_error, sizes=attention, dtype=dtype)}
    if config.experts is not None:
        experts = expert_sizes(config, layout)
        tried["experts"] = partial(largest_error_of_experts, sizes=experts, dtype=dtype)
    if config.delta is not None:
        delta = delta_sizes(config, layout)
        tried["delta_rule"] = partial(largest_error_of_delta_rule, sizes=delta, dtype=dtype)
    chosen = {}
    for kind, error_of in tried.items():
        if len(candidates[kind]) == 1:
            chosen[kind] = Choice(*next(iter(candidates[kind].items())))
            continue
        choice = chosen[kind] = choose_kernel(kind, candidates[kind], error_of, dtype)
        for name, why in choice.passed_over.items():
            log.warning("%s: %s is not used: %s", kind, name, why)
        log.info("%s: %s, which agrees with its definition on this device", kind, choice.name)
    return chosen


def choose_kernel(
    kind: str,
    candidates: Mapping[str, Callable[..., Array]],
    error_of: Callable[..., float],
    dtype: jnp.dtype,
) -> Choice:
    """Returns the first candidate that is right on this process's first device.

    error_of: what `largest_error` gives for a candidate. Raises RunError if none is right, since
    the device then computes wrongly.
    """
    passed_over: dict[str, str] = {}
    most = TOLERANCE[dtype.name]
    with jax.default_device(jax.local_devices()[0]):
        for name, candidate in candidates.items():
            try:
                error = error_of(candidate)
            except Exception as failure:  # a kernel or its compiler may raise anything
                passed_over[name] = f"it fails: {one_line(failure):.300}"
                continue
            if error <= most:
                return Choice(name, candidate, passed_over)
            passed_over[name] = (
                f"it differs from the definition by {error:.2g} (allowed: {most:.2g})"
            )
    reasons = "; ".join(f"{name}: {why}" for name, why in passed_over.items())
    raise RunError(f"no kernel for {kind} is right on this device: {reasons}")


class AttentionSizes(NamedTuple):
    """The sizes that one device has: its queries of each row, all keys, and its heads.

    window: of the layers that have one, None without such layers.
    """

    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    @classmethod
    def of_run(cls, config: Any, layout: Layout, length: int) -> "AttentionSizes":
        """Returns the sizes for rows of `length` tokens, or shorter ones that kernels treat alike.

        A window becomes so short that it hides something.
        """
        parts, model = layout.size("query"), layout.size("model")
        queries = length // parts
        if queries > 2 * ALIGNMENT:
            queries = 2 * ALIGNMENT + queries % ALIGNMENT
        keys, window = queries * parts, config.sliding_window
        if window is not None:
            window = min(window, max(keys // 6, 1))
        heads, kv_heads = config.num_attention_heads // model, config.num_key_value_heads // model
        return cls(queries, keys, heads, kv_heads, config.head_dim, window)


def largest_error(attention: Attention, sizes: AttentionSizes, dtype: jnp.dtype) -> float:
    """Returns the largest relative error of any token in any head.

    The error is the norm of the difference to float32, over the norm of the value. Every part of
    the queries is computed, as by devices that share the queries of a row; with and without the
    window, if there is one.
    """
    q, k, v, segments = trial_batch(sizes, dtype)
    exact_q, exact_k, exact_v = (x.astype(jnp.float32) for x in (q, k, v))
    split = sizes.queries < sizes.keys
    errors = []
    windows: list[dict[str, Any]] = [{}]
    if sizes.window is not None:
        windows.append({"window": sizes.window})
    for options in windows:
        compute = jax.jit(partial(attention, **options), static_argnums=() if split else 5)
        for first in range(0, sizes.keys, sizes.queries):
            queries = slice(first, first + sizes.queries)
            own = segments[:, queries]
            first_query = jnp.int32(first) if split else first
            computed = compute(q[:, queries], k, v, own, segments, first_query)
            arrays = exact_q[:, queries], exact_k, exact_v, own, segments
            exact, real = dense_attention(*arrays, first, **options), np.asarray(own) > 0
            errors.append(_relative_error(np.asarray(computed)[real], np.asarray(exact)[real]))
    return float(np.max(errors))


def trial_batch(sizes: AttentionSizes, dtype: jnp.dtype) -> tuple[Array, Array, Array, Array]:
    """Returns q, k, v and segments: two rows of three segments, the second ending in padding."""
    rng = np.random.default_rng(0)
    kv_shape = 2, sizes.keys, sizes.kv_heads, sizes.head_dim
    shapes = (2, sizes.keys, sizes.heads, sizes.head_dim), kv_shape, kv_shape
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    segments = np.ones((2, sizes.keys), np.int32)
    segments[:, sizes.keys // 3 :], segments[:, sizes.keys // 2 :] = 2, 3
    segments[1, sizes.keys - sizes.keys // 5 :] = 0
    q *= sizes.head_dim**-0.5  # the scores then spread so little that every key counts
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), jnp.asarray(segments)


def expert_sizes(config: Any, layout: Layout) -> tuple[int, int, int]:
    """Returns a device's sizes in a trial: experts, the width of a token and that of an expert."""
    sizes: tuple[int, ...] = config.experts.count, config.hidden_size, config.experts.width
    if layout.mesh is not None:
        sizes = layout.sharding(("experts", "hidden", "mlp"), sizes).shard_shape(sizes)
    return min(sizes[0], MOST_EXPERTS), sizes[1], sizes[2]


def largest_error_of_experts(
    grouped: GroupedExperts, sizes: tuple[int, int, int], dtype: jnp.dtype
) -> float:
    """Returns the largest relative error, as `largest_error` does, of any row with an expert."""
    x, counts, gate, up, down = arrays = trial_rows(sizes, dtype)
    computed = np.asarray(jax.jit(grouped)(*arrays))
    x, gate, up, down = (array.astype(jnp.float32) for array in (x, gate, up, down))
    ends = np.cumsum(counts)
    exact = []
    for expert, rows in enumerate(np.split(np.asarray(x), ends)[:-1]):
        gated = jax.nn.silu(einsum("nD,DM->nM", jnp.asarray(rows), gate[expert]))
        gated *= einsum("nD,DM->nM", jnp.asarray(rows), up[expert])
        exact.append(einsum("nM,MD->nD", gated, down[expert]))
    return _relative_error(computed[: ends[-1]], np.concatenate(exact))


def trial_rows(sizes: tuple[int, int, int], dtype: jnp.dtype) -> list[Array]:
    """Returns arguments for a `GroupedExperts`; one expert has no rows, the last rows no expert."""
    rng = np.random.default_rng(0)
    experts, hidden, width = sizes
    counts = [0 if expert == 2 else (expert + 1) * 67 % 300 for expert in range(experts)]

    def normal(size: float, *shape: int) -> Array:
        return jnp.asarray(size * rng.standard_normal(shape, np.float32), dtype)

    x = normal(1, sum(counts) + 21, hidden)
    gate, up = (normal(hidden**-0.5, experts, hidden, width) for _ in range(2))
    down = normal(width**-0.5, experts, width, hidden)
    return [x, jnp.asarray(counts, jnp.int32), gate, up, down]


def delta_sizes(config: Any, layout: Layout) -> tuple[int, int, int, int]:
    """Returns a device's sizes in a trial: key heads, value heads of each, key and value size."""
    delta = config.delta
    heads: tuple[int, ...] = (delta.key_heads,)
    if layout.mesh is not None:
        heads = layout.sharding(("key_heads",), heads).shard_shape(heads)
    return min(heads[0], MOST_KEY_HEADS), delta.values_per_key, delta.key_size, delta.value_size


def largest_error_of_delta_rule(
    rule: DeltaRule, sizes: tuple[int, int, int, int], dtype: jnp.dtype
) -> float:
    """Returns the largest relative error, as `largest_error` does, of any token in any head."""
    arrays = trial_tokens(sizes, dtype)
    computed, real = np.asarray(jax.jit(rule)(*arrays)), np.asarray(arrays[-1]) > 0
    exact = token_by_token(*(x.astype(jnp.float32) for x in arrays[:-1]), arrays[-1])
    return _relative_error(computed[real], exact[real])


def trial_tokens(sizes: tuple[int, int, int, int], dtype: jnp.dtype) -> list[Array]:
    """Returns arguments for a `DeltaRule`: two rows of three segments, the second with padding.

    They end within chunks. Heads forget at different speeds.
    """
    rng = np.random.default_rng(0)
    heads, of_each, key_size, value_size = sizes
    shape, length = (heads, of_each), TRIAL_TOKENS

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((2, length, *shape), np.float32)

    q, k, v = normal(heads, key_size), normal(heads, key_size), normal(*shape, value_size)
    slopes = np.geomspace(0.01, 1, heads * of_each, dtype=np.float32).reshape(shape)
    log_decay, beta = -slopes * np.logaddexp(0, normal(*shape)), 1 / (1 + np.exp(-normal(*shape)))
    segments = np.ones((2, length), np.int32)
    segments[:, length // 3 :], segments[:, length // 2 :] = 2, 3
    segments[1, length - length // 5 :] = 0
    narrow = (jnp.asarray(x, dtype) for x in (q, k, v))
    return [*narrow, *map(jnp.asarray, (log_decay, beta, segments))]


def _relative_error(computed: np.ndarray, exact: np.ndarray) -> float:
    """Returns the largest norm of the difference over that of `exact`, along the last axis."""
    computed, exact = computed.astype(np.float64), exact.astype(np.float64)
    norms = np.linalg.norm(exact, axis=-1)
    return float(np.max(np.linalg.norm(computed - exact, axis=-1) / norms))
