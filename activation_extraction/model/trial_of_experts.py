"""The trial of kernels for experts: what they compute, and how far from the definition they are."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from activation_extraction.model.attention import einsum
from activation_extraction.model.experts import GroupedExperts
from activation_extraction.model.mesh import Layout

MOST_EXPERTS = 8  # that a trial has


@dataclass(frozen=True)
class ExpertSizes:
    """What one device has. experts: how many; hidden: width of a token; width: of an expert."""

    experts: int
    hidden: int
    width: int

    @classmethod
    def of_run(cls, config: Any, layout: Layout) -> "ExpertSizes":
        sizes: tuple[int, ...] = config.experts.count, config.hidden_size, config.experts.width
        if layout.mesh is not None:
            sizes = layout.sharding(("experts", "hidden", "mlp"), sizes).shard_shape(sizes)
        return cls(min(sizes[0], MOST_EXPERTS), *sizes[1:])


def largest_error_of_experts(
    grouped: GroupedExperts, sizes: ExpertSizes, dtype: jnp.dtype
) -> float:
    """As `largest_error`, of any row that goes through an expert."""
    x, *parameters = arrays = trial_rows(sizes, dtype)
    found = np.asarray(jax.jit(grouped)(*arrays), np.float64)
    wide = [array.astype(jnp.float32) for array in (x, *parameters[1:])]
    wanted = np.asarray(experts_definition(wide[0], parameters[0], *wide[1:]), np.float64)
    return float(np.max(relative_errors(found[: len(wanted)], wanted)))


def relative_errors(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The norm of the difference over that of `wanted`, along the last axis."""
    return np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


def experts_definition(x: Array, sizes: Array, gate: Array, up: Array, down: Array) -> Array:
    """`GroupedExperts`, one expert at a time; only the rows that have one."""
    parts, ends = [], np.cumsum(sizes)
    for expert, (size, end) in enumerate(zip(sizes.tolist(), ends.tolist(), strict=True)):
        rows = x[end - size : end]
        gated = jax.nn.silu(einsum("nD,DM->nM", rows, gate[expert]))
        gated *= einsum("nD,DM->nM", rows, up[expert])
        parts.append(einsum("nM,MD->nD", gated, down[expert]))
    return jnp.concatenate(parts)


def trial_rows(sizes: ExpertSizes, dtype: jnp.dtype) -> list[Array]:
    """Arguments for a `GroupedExperts`; an expert has no rows, and the last rows have no expert."""
    chance = np.random.default_rng(0)
    count = [0 if expert == 2 else (expert + 1) * 67 % 300 for expert in range(sizes.experts)]

    def normal(size: float, *shape: int) -> Array:
        return jnp.asarray(size * chance.standard_normal(shape, np.float32), dtype)

    experts, hidden, width = sizes.experts, sizes.hidden, sizes.width
    x = normal(1, sum(count) + 21, hidden)
    gate, up = (normal(hidden**-0.5, experts, hidden, width) for _ in range(2))
    down = normal(width**-0.5, experts, width, hidden)
    return [x, jnp.asarray(count, jnp.int32), gate, up, down]
