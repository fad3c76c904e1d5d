"""Experts are many small MLPs in a layer; every token goes through a few of them.

No token is dropped, so the result for a token does not depend on its neighbours. The rows of all
tokens are sorted by expert; each product then consists of many small ones, of each expert's rows
with its weights. How they are computed depends on the platform: see `GroupedExperts`.

The letters are those of qwen2_jax.py: X experts of a token; n rows, which are T * X.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from activation_extraction.model.layers import STREAM, Weight, einsum, from_bits, to_bits
from activation_extraction.model.mesh import BOTH, Layout

TILE = 128  # rows

# (rows (n, D), sizes (E,) int32, gate and up (E, D, M), down (E, M, D)) -> (n, D), in the type of
# the rows. The rows are sorted by expert: the first sizes[0] go through expert 0, and so on. The
# rows after those of the last expert have no expert, and what is returned for them means nothing.
GroupedExperts = Callable[[Array, Array, Array, Array, Array], Array]


def route(logits: Array, count: int, renormalise: bool) -> tuple[Array, Array]:
    """Maps router logits (B, T, E) to weights and numbers of `count` experts, each (B, T, X).

    The weights are float32, rounded to the type of the logits, as transformers rounds them. Of
    equal logits, the first ones are taken.
    """
    weights, chosen = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), count)
    if renormalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights.astype(logits.dtype).astype(jnp.float32), chosen


def scattered(weights: Array, chosen: Array, count: int) -> Array:
    """Maps (B, T, X) to (B, T, E), the weight of every expert; experts not chosen have 0."""
    one_hot = jax.nn.one_hot(chosen, count, dtype=weights.dtype)
    return (one_hot * weights[..., None]).sum(axis=-2)


class Experts(nn.Module):
    """The experts of a layer. Each is a SwiGLU; one parameter has the weights of all experts.

    Experts are split over the mesh axis `expert`, along which the devices exchange their tokens,
    and each of them over `model` like any MLP. Unlike other weights these have their input axis
    first, as the TPU's kernel wants them: it would transpose all of them in every step.
    """

    config: Any
    dtype: Any
    grouped: GroupedExperts
    layout: Layout

    def setup(self) -> None:
        self.gate_proj = Weight(self.config, "EDM", self.dtype)
        self.up_proj = Weight(self.config, "EDM", self.dtype)
        self.down_proj = Weight(self.config, "EMD", self.dtype)

    def __call__(self, x: Array, weights: Array, chosen: Array) -> Array:
        """Returns the weighted sum of each token's experts, (B, T, D) float32.

        x: (B, T, D); weights, chosen: the weights and numbers of each token's experts, (B, T, X).
        An expert number beyond the last one gives zeros and costs nothing.
        """
        arrays = x, weights, chosen, self.gate_proj(), self.up_proj(), self.down_proj()
        up, down = ("experts", "hidden", "mlp"), ("experts", "mlp", "hidden")
        run = partial(_exchange, self.layout, self.grouped)
        return self.layout.per_device(run, arrays, [STREAM, STREAM, STREAM, up, up, down], like=0)


def _exchange(
    layout: Layout,
    grouped: GroupedExperts,
    x: Array,
    weights: Array,
    chosen: Array,
    *parameters: Array,
) -> Array:
    """Runs one device's experts on the tokens of all devices along `expert`."""
    several = layout.size("expert") > 1
    if several:
        x, weights, chosen = (lax.all_gather(a, "expert", tiled=True) for a in (x, weights, chosen))
        chosen = chosen - lax.axis_index("expert") * len(parameters[0])
    y = _sum_of_experts(grouped, x, weights, chosen, *parameters)
    if layout.adds_up_parts:
        y = lax.psum(y, tuple(axis for axis in BOTH if layout.size(axis) > 1))
    return lax.psum_scatter(y, "expert", tiled=True) if several else y


def _sum_of_experts(
    grouped: GroupedExperts, x: Array, weights: Array, chosen: Array, *parameters: Array
) -> Array:
    """Returns the weighted sum of what the local experts give; other numbers give nothing."""
    count, numbers = len(parameters[0]), chosen.reshape(-1)
    local = (numbers >= 0) & (numbers < count)
    group = jnp.where(local, numbers, count)
    order = jnp.argsort(group, stable=True)
    sizes = jnp.bincount(group, length=count + 1)[:count].astype(jnp.int32)
    rows = to_bits(x.reshape(-1, x.shape[-1]))[order // chosen.shape[-1]]
    y = grouped(from_bits(rows, x.dtype), sizes, *parameters)
    inverse_order = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    y = from_bits(to_bits(y)[inverse_order], x.dtype).astype(jnp.float32)
    y = jnp.where(local[:, None], y, 0).reshape(*chosen.shape, -1)
    return (y * weights[..., None]).sum(axis=-2)


def ragged_experts(x: Array, sizes: Array, gate: Array, up: Array, down: Array) -> Array:
    """Leaves the products to the TPU's compiler, which has a kernel for them. See `GroupedExperts`.

    Elsewhere `lax.ragged_dot` multiplies every row with every expert.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = partial(lax.ragged_dot, precision=precision, preferred_element_type=jnp.float32)
    return in_products(product, x, sizes, gate, up, down)


def in_products(
    product: Callable[[Array, Array, Array], Array],
    x: Array,
    sizes: Array,
    gate: Array,
    up: Array,
    down: Array,
) -> Array:
    """Computes `GroupedExperts` with `product`, which multiplies rows by their experts' weights."""
    gated = jax.nn.silu(product(x, gate, sizes)) * product(x, up, sizes)
    return product(gated.astype(x.dtype), down, sizes).astype(x.dtype)


def one_expert_after_the_other(
    x: Array, sizes: Array, gate: Array, up: Array, down: Array
) -> Array:
    """Computes `GroupedExperts` as it is defined; rows without an expert get zeros."""
    found, ends = [], np.cumsum(sizes)
    for expert, rows in enumerate(jnp.split(x, ends)[:-1]):
        gated = jax.nn.silu(einsum("nD,DM->nM", rows, gate[expert]))
        gated *= einsum("nD,DM->nM", rows, up[expert])
        found.append(einsum("nM,MD->nD", gated, down[expert]))
    return jnp.concatenate([*found, jnp.zeros_like(x[ends[-1] :])])


def tiled_experts(x: Array, sizes: Array, gate: Array, up: Array, down: Array) -> Array:
    """Takes one expert after the other and a tile of its rows at a time. See `GroupedExperts`.

    Rows of a tile that belong to the next expert are computed again with that expert's tile.
    """
    count, bits = len(x), to_bits(jnp.pad(x, ((0, TILE), (0, 0))))
    first = jnp.cumsum(sizes) - sizes
    weights = [to_bits(weight) for weight in (gate, up, down)]

    def tile(y: Array, start: Array, gate: Array, up: Array, down: Array) -> Array:
        rows = from_bits(lax.dynamic_slice_in_dim(bits, start, TILE), x.dtype)
        gated = jax.nn.silu(einsum("nD,DM->nM", rows, gate)) * einsum("nD,DM->nM", rows, up)
        out = einsum("nM,MD->nD", gated.astype(x.dtype), down).astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(y, to_bits(out), start, 0)

    def expert(number: Array, y: Array) -> Array:
        own = [lax.dynamic_index_in_dim(weight, number, keepdims=False) for weight in weights]
        own = [from_bits(weight, x.dtype) for weight in own]
        tiles = (sizes[number] + TILE - 1) // TILE
        return lax.fori_loop(0, tiles, lambda i, y: tile(y, first[number] + i * TILE, *own), y)

    def expert_with_rows(number: Array, y: Array) -> Array:
        return lax.cond(sizes[number] > 0, expert, lambda _, y: y, number, y)

    y = lax.fori_loop(0, len(gate), expert_with_rows, jnp.zeros_like(bits))
    return from_bits(y[:count], x.dtype)
