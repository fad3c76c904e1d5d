"""Which kernels a run uses: the first of a platform's whose numbers are right on this device.

Before a run loads its weights, each candidate computes a small packed batch, or a few rows for some
experts, of the sizes that one device has in the run. It is compared with the definition, and the
first one that agrees is used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from activation_extraction.cli.console import log
from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.model.attention import Attention, blocked_attention, dense_attention
from activation_extraction.model.experts import ragged_experts, tiled_experts
from activation_extraction.model.family import HookedModel
from activation_extraction.model.kernels import (
    Kernels,
    cudnn_attention,
    splash_attention,
    tokamax_experts,
)
from activation_extraction.model.trial_of_experts import (
    ExpertSizes,
    largest_error_of_experts,
    relative_errors,
)

# A field of `Kernels` -> its candidates by name, in the order of preference.
Candidates = Mapping[str, Mapping[str, Callable[..., Array]]]
# kernels.py's Triton kernel has not run on a GPU yet: benchmarks/gpu.py measures it.
ON_GPU: Candidates = {
    "attention": {"cudnn": cudnn_attention, "blocked": blocked_attention},
    "experts": {"tokamax": tokamax_experts, "tiled": tiled_experts},
}
CANDIDATES: dict[str, Candidates] = {
    "cpu": {"attention": {"blocked": blocked_attention}, "experts": {"tiled": tiled_experts}},
    "tpu": {
        "attention": {"splash": splash_attention, "blocked": blocked_attention},
        "experts": {"ragged_dot": ragged_experts, "tiled": tiled_experts},
    },
    **dict.fromkeys(("gpu", "cuda", "rocm"), ON_GPU),
}
# The largest relative error of any token's value in any head, or of what it gets from an expert.
# bfloat16 rounds two factors by at most 2**-9 each, which adds up to less than 2**-7. float32 sums
# of some hundred products are good to 2**-18; products of TF32 or bfloat16 are not good to 2**-14.
# A key too many or too few among n changes a value by about 0.4 * n**-0.5, or 2**-5 for the
# segments here.
TOLERANCE = {"bfloat16": 2.0**-6, "float32": 2.0**-15}
ALIGNMENT = 128  # kernels treat rows alike whose lengths are the same modulo this
SPREAD = 1.0  # standard deviation of the scores: every key of a segment counts


@dataclass(frozen=True)
class Sizes:
    """What one device computes: its queries of each row, all keys, heads, head size.

    window: of the layers that have one, None without such layers.
    """

    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    @classmethod
    def of_run(
        cls,
        length: int,
        parts: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int | None = None,
    ) -> "Sizes":
        """For rows of `length` tokens, or shorter ones that kernels treat alike.

        parts: into which the queries of a row are split, a divisor of `length`. A window becomes so
        short that it hides something.
        """
        queries = length // parts
        if queries > 2 * ALIGNMENT:
            queries = 2 * ALIGNMENT + queries % ALIGNMENT
        keys = queries * parts
        if window is not None:
            window = min(window, max(keys // 6, 1))
        return cls(queries, keys, heads, kv_heads, head_dim, window)


@dataclass(frozen=True)
class Choice:
    """One of the kernels of a run; passed_over: name -> why it is not one of those before it."""

    name: str
    function: Callable[..., Array]
    passed_over: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "passed_over": self.passed_over}


def candidates_for(platform: str) -> Candidates:
    """Raises InputError for a platform that has none."""
    if platform not in CANDIDATES:
        raise InputError(f"JAX runs on the platform {platform!r}: expected cpu, gpu or tpu")
    return CANDIDATES[platform]


def preferred_kernels(platform: str) -> Kernels:
    """Those that would be tried first. Raises InputError for a platform that has none."""
    return Kernels(**{k: next(iter(each.values())) for k, each in candidates_for(platform).items()})


def try_kernels(model: HookedModel, length: int) -> dict[str, Choice]:
    """The kernels of the run, by fields of `Kernels`; logs the outcome.

    Every host tries them on a device of its own. What has a single candidate, as on the CPU, is not
    tried.
    """
    candidates, dtype = candidates_for(jax.default_backend()), jnp.dtype(model.dtype)
    config, layout = model.config, model.layout
    heads = layout.size("model")
    sizes = Sizes.of_run(
        length,
        layout.size("query"),
        config.num_attention_heads // heads,
        config.num_key_value_heads // heads,
        config.head_dim,
        config.sliding_window,
    )
    tried = {"attention": partial(largest_error, sizes=sizes, dtype=dtype)}
    if getattr(config, "experts", None) is not None:
        experts = ExpertSizes.of_run(config, layout)
        tried["experts"] = partial(largest_error_of_experts, sizes=experts, dtype=dtype)
    chosen = {}
    for what, error_of in tried.items():
        if len(candidates[what]) == 1:
            chosen[what] = Choice(*next(iter(candidates[what].items())))
            continue
        choice = chosen[what] = choose(what, candidates[what], error_of, dtype)
        for name, why in choice.passed_over.items():
            log.warning("%s: %s is not used: %s", what, name, why)
        log.info("%s: %s, which agrees with its definition on this device", what, choice.name)
    return chosen


def choose(
    what: str,
    candidates: Mapping[str, Callable[..., Array]],
    error_of: Callable[..., float],
    dtype: jnp.dtype,
) -> Choice:
    """The first candidate that is right on this process's first device.

    error_of: what `largest_error` gives for a candidate. Raises RunError when none is right: the
    device computes wrongly then.
    """
    passed_over: dict[str, str] = {}
    most = TOLERANCE[dtype.name]
    with jax.default_device(jax.local_devices()[0]):
        for name, candidate in candidates.items():
            try:
                error = error_of(candidate)
            except Exception as failure:  # whatever a kernel or its compiler may raise
                passed_over[name] = f"it fails: {one_line(failure):.300}"
                continue
            if error <= most:
                return Choice(name, candidate, passed_over)
            passed_over[name] = (
                f"it differs from the definition by {error:.2g} (allowed: {most:.2g})"
            )
    reasons = "; ".join(f"{name}: {why}" for name, why in passed_over.items())
    raise RunError(f"no kernel for {what} is right on this device: {reasons}")


def largest_error(attention: Attention, sizes: Sizes, dtype: jnp.dtype) -> float:
    """Of any token in any head: the norm of the difference to float32, over that of the value.

    Every part of the queries is computed, as by the devices that share the queries of a row; with
    and without the window, if there is one.
    """
    error = _largest_error(attention, dense_attention, sizes, dtype)
    if sizes.window is None:
        return error
    windowed, definition = (partial(f, window=sizes.window) for f in (attention, dense_attention))
    return float(np.maximum(error, _largest_error(windowed, definition, sizes, dtype)))


def _largest_error(
    attention: Attention, definition: Attention, sizes: Sizes, dtype: jnp.dtype
) -> float:
    q, k, v, segments = trial_batch(sizes, dtype)
    exact_k, exact_v = k.astype(jnp.float32), v.astype(jnp.float32)
    split = sizes.queries < sizes.keys
    compute = jax.jit(attention) if split else jax.jit(attention, static_argnums=5)
    errors = []
    for first in range(0, sizes.keys, sizes.queries):
        part = slice(first, first + sizes.queries)
        queries, own = q[:, part], segments[:, part]
        got = compute(queries, k, v, own, segments, jnp.int32(first) if split else first)
        exact = definition(queries.astype(jnp.float32), exact_k, exact_v, own, segments, first)
        real = np.asarray(own) > 0
        wanted, found = (np.asarray(x, np.float64)[real] for x in (exact, got))
        errors.append(relative_errors(found, wanted))
    return float(np.max(np.concatenate(errors)))


def trial_batch(sizes: Sizes, dtype: jnp.dtype) -> tuple[Array, Array, Array, Array]:
    """q, k, v and segments of two rows of three segments; the second row ends in padding."""
    chance = np.random.default_rng(0)
    of_keys = 2, sizes.keys, sizes.kv_heads, sizes.head_dim
    shapes = (2, sizes.keys, sizes.heads, sizes.head_dim), of_keys, of_keys
    q, k, v = (jnp.asarray(chance.standard_normal(shape), jnp.float32) for shape in shapes)
    segments = np.ones((2, sizes.keys), np.int32)
    segments[:, sizes.keys // 3 :], segments[:, sizes.keys // 2 :] = 2, 3
    segments[1, sizes.keys - sizes.keys // 5 :] = 0
    q *= SPREAD * sizes.head_dim**-0.5
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), jnp.asarray(segments)
