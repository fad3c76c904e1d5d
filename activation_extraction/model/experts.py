"""Experts are many small MLPs in a layer; every token goes through a few of them.

No token is dropped, so the result for a token does not depend on its neighbours. Each platform has
its own way to compute the sum of a token's experts; all have the signature `ExpertSum`. Most of
them sort the rows of all tokens by expert, so that a product consists of many small ones, of the
rows of an expert with its weights.

The letters are those of qwen2_jax.py, for example X experts of a token; and n rows, which are
T * X.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from activation_extraction.model.layers import STREAM
from activation_extraction.model.mesh import BOTH, Layout
from activation_extraction.model.numerics import einsum, from_bits, to_bits
from activation_extraction.model.parameters import StackedWeight

TILE = 128  # rows
LANES = 128  # the width of a TPU's registers


class Stacks(NamedTuple):
    """The weights of the experts of all layers, and the number of one layer.

    Attributes:
        layer: The number of the layer whose experts are used, () int32.
        gate: (L, E, D, M).
        up: (L, E, D, M).
        down: (L, E, M, D).
    """

    layer: Array
    gate: Array
    up: Array
    down: Array


# Maps (x (T, D), weights (T, X) float32, chosen (T, X) int32, stacks, parts=1) to (T, D) float32,
# the weighted sum of the results of every token's experts. Numbers of experts outside 0..E-1 add
# nothing and cost nothing. The tokens are divided into `parts` equal parts, whose sums are computed
# one after the other, so that the first sums may leave early.
ExpertSum = Callable[..., Array]

# Maps (rows (n, D), sizes (E,) int32, stacks) to (n, D) in the dtype of the rows. The rows are
# sorted by expert: the first sizes[0] go through expert 0, and so on. Rows after those of the last
# expert have no expert, and the result for them means nothing.
SortedRows = Callable[[Array, Array, Stacks], Array]


def route(logits: Array, count: int, renormalise: bool) -> tuple[Array, Array]:
    """Chooses the experts of every token; of equal logits, the first ones.

    Args:
        logits: The logits of the router, (B, T, E).
        count: X, the number of experts per token.
        renormalise: Whether the weights of a token's experts are divided by their sum.

    Returns:
        The weights of the chosen experts, (B, T, X) float32, rounded to the dtype of the logits as
        in transformers; and the numbers of the experts, (B, T, X) int32.
    """
    weights, chosen = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), count)
    if renormalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights.astype(logits.dtype).astype(jnp.float32), chosen


def scattered(weights: Array, chosen: Array, count: int) -> Array:
    """Returns the weight of every expert, (B, T, E); experts that were not chosen have 0.

    Args:
        weights: The weights of the chosen experts, (B, T, X).
        chosen: The numbers of the chosen experts, (B, T, X) int32.
        count: E.
    """
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
    expert_sum: ExpertSum
    layout: Layout

    def setup(self) -> None:
        self.gate_proj = StackedWeight(self.config, "EDM", self.dtype)
        self.up_proj = StackedWeight(self.config, "EDM", self.dtype)
        self.down_proj = StackedWeight(self.config, "EMD", self.dtype)

    def __call__(self, x: Array, weights: Array, chosen: Array) -> Array:
        """Returns the weighted sum of each token's experts, (B, T, D) float32.

        Args:
            x: The tokens, (B, T, D).
            weights: The weights of each token's experts, (B, T, X) float32.
            chosen: The numbers of each token's experts, (B, T, X) int32. A number beyond the last
                expert adds zeros and costs nothing.
        """
        (gate, layer), (up, _), (down, _) = self.gate_proj(), self.up_proj(), self.down_proj()
        arrays = x, weights, chosen, layer, gate, up, down
        inwards, outwards = ("experts", "hidden", "mlp"), ("experts", "mlp", "hidden")
        stacks = [("layer", *axes) for axes in (inwards, inwards, outwards)]
        axes = [STREAM, STREAM, STREAM, (), *stacks]
        run = partial(_exchange, self.layout, self.expert_sum)
        return self.layout.per_device(run, arrays, axes, like=0)


def _exchange(
    layout: Layout, expert_sum: ExpertSum, x: Array, weights: Array, chosen: Array, *stacks: Array
) -> Array:
    """Runs one device's experts on the tokens of all devices along `expert`.

    Sums that devices send to each other are rounded to the dtype of the tokens.
    """
    axes = tuple(axis for axis in BOTH if layout.size(axis) > 1)
    tokens = [a.reshape(-1, a.shape[-1]) for a in (x, weights, chosen)]
    if layout.size("expert") > 1:
        expert_sum = partial(_in_a_ring, layout.ring("expert"), expert_sum)
    y = expert_sum(*tokens, Stacks(*stacks))
    if axes:
        y = lax.psum(y.astype(x.dtype), axes).astype(jnp.float32)
    return y.reshape(x.shape)


def _in_a_ring(
    ring: Sequence[int],
    expert_sum: ExpertSum,
    x: Array,
    weights: Array,
    chosen: Array,
    stacks: Stacks,
) -> Array:
    """Sends the tokens around the ring of devices, and then their sums, (T, D) each.

    Half of the tokens go one way and half the other, so that both directions of the links are used.
    Part k of the tokens that a device gets is the first half of those of the k-th device before it
    and the second half of those of the k-th device after it. A part's sum starts at the first
    device that its tokens reach and goes on the same way until it is home; every device adds its
    own. So the hops of the tokens run while the rows are sorted, and those of one part's sum while
    the next part is added up: the weights are read once.
    """
    devices, half, (count, width) = len(ring), len(x) // 2, x.shape
    # A kernel fetches rows from this shape; of single tokens, it is cheaper to change than of all.
    x = x.reshape(count, -1, math.gcd(width, LANES))
    ways = [(slice(half), 1), (slice(half, None), -1)]  # some tokens, and devices per hop

    def hop(arrays: Any, by: int) -> Any:
        pairs = [(device, ring[(place + by) % devices]) for place, device in enumerate(ring)]
        return lax.ppermute(arrays, "expert", pairs)

    parts = []
    for tokens, by in ways:
        parts.append([[a[tokens] for a in (x, weights, chosen)]])
        for _ in range(1, devices):
            parts[-1].append(hop(parts[-1][-1], by))
    both = [part for pair in zip(*parts, strict=True) for part in pair]
    x, weights, chosen = (jnp.concatenate(arrays) for arrays in zip(*both, strict=True))
    chosen = chosen - lax.axis_index("expert") * stacks.gate.shape[1]
    y = expert_sum(x.reshape(-1, width), weights, chosen, stacks, parts=devices)

    # Without barriers, XLA would put the parts together to convert and cut them.
    first, *others = map(lax.optimization_barrier, jnp.split(y, devices))
    sums = []
    for tokens, by in ways:
        total = others[0][tokens]
        for part in [*others[1:], first]:
            total = hop(total.astype(x.dtype), by).astype(jnp.float32) + part[tokens]
        sums.append(total)
    return jnp.concatenate(sums)


def in_sorted_rows(
    compute: SortedRows, x: Array, weights: Array, chosen: Array, stacks: Stacks, parts: int = 1
) -> Array:
    """Computes `ExpertSum` with copies of the rows that are sorted by expert.

    One row of each token is added up at a time, so that no array has all rows in float32.

    Args:
        compute: Runs the experts on sorted rows.
        x: The tokens. See `ExpertSum` for this and the other arguments.
    """
    (_, per_token), experts = chosen.shape, stacks.gate.shape[1]
    local = (chosen >= 0) & (chosen < experts)
    group = jnp.where(local, chosen, experts).reshape(-1)
    order = jnp.argsort(group, stable=True)
    sizes = jnp.bincount(group, length=experts + 1)[:experts].astype(jnp.int32)
    rows = from_bits(to_bits(x)[order // per_token], x.dtype)
    y = to_bits(compute(rows, sizes, stacks))
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size)).reshape(chosen.shape)

    def added(places: Array, weights: Array, local: Array) -> Array:
        total = jnp.zeros((len(places), x.shape[1]), jnp.float32)
        for number, place in enumerate(places.T):
            row = from_bits(y[place], x.dtype).astype(jnp.float32)
            total += jnp.where(local[:, number, None], row * weights[:, number, None], 0)
        return total

    split = [jnp.split(a, parts) for a in (places, weights, local)]
    return jnp.concatenate([added(*part) for part in zip(*split, strict=True)])


def _in_ragged_products(x: Array, sizes: Array, stacks: Stacks) -> Array:
    """Leaves the products to the TPU's compiler, which has a kernel for them. See `SortedRows`.

    They are with all layers' experts, of which only this layer's have rows: weights that are not
    sliced are not copied. Elsewhere `lax.ragged_dot` multiplies every row with every expert.
    """
    layer, gate, up, down = stacks
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    layers, experts = gate.shape[:2]
    sizes = jnp.zeros((layers, experts), jnp.int32).at[layer].set(sizes).reshape(-1)

    def product(x: Array, stack: Array, dtype: Any) -> Array:
        stack = stack.reshape(-1, *stack.shape[2:])
        options: Any = dict(precision=precision, preferred_element_type=dtype)
        return lax.ragged_dot(x, stack, sizes, **options)

    gated = jax.nn.silu(product(x, gate, jnp.float32)) * product(x, up, jnp.float32)
    return product(gated.astype(x.dtype), down, x.dtype)


def _in_tiles(x: Array, sizes: Array, stacks: Stacks) -> Array:
    """Takes one expert after the other and a tile of its rows at a time. See `SortedRows`.

    Rows of a tile that belong to the next expert are computed again with that expert's tile.
    """
    count, bits = len(x), to_bits(jnp.pad(x, ((0, TILE), (0, 0))))
    first = jnp.cumsum(sizes) - sizes
    layer, *matrices = map(to_bits, stacks)

    def tile(y: Array, start: Array, gate: Array, up: Array, down: Array) -> Array:
        rows = from_bits(lax.dynamic_slice_in_dim(bits, start, TILE), x.dtype)
        gated = jax.nn.silu(einsum("nD,DM->nM", rows, gate)) * einsum("nD,DM->nM", rows, up)
        out = einsum("nM,MD->nD", gated.astype(x.dtype), down).astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(y, to_bits(out), start, 0)

    def expert(number: Array, y: Array) -> Array:
        gate, up, down = (from_bits(stack[layer, number], x.dtype) for stack in matrices)
        tiles = (sizes[number] + TILE - 1) // TILE

        def next_tile(i: Array, y: Array) -> Array:
            return tile(y, first[number] + i * TILE, gate, up, down)

        return lax.fori_loop(0, tiles, next_tile, y)

    def expert_with_rows(number: Array, y: Array) -> Array:
        return lax.cond(sizes[number] > 0, expert, lambda _, y: y, number, y)

    y = lax.fori_loop(0, len(sizes), expert_with_rows, jnp.zeros_like(bits))
    return from_bits(y[:count], x.dtype)


ragged_experts = partial(in_sorted_rows, _in_ragged_products)
tiled_experts = partial(in_sorted_rows, _in_tiles)


def one_expert_after_the_other(x: Array, weights: Array, chosen: Array, stacks: Stacks) -> Array:
    """Computes every token with every expert, which defines `ExpertSum`."""
    layer, gate, up, down = stacks
    total = jnp.zeros(x.shape, jnp.float32)
    for expert in range(gate.shape[1]):
        gated = jax.nn.silu(einsum("TD,DM->TM", x, gate[layer, expert]))
        gated *= einsum("TD,DM->TM", x, up[layer, expert])
        weight = jnp.where(chosen == expert, weights, 0).sum(axis=-1, keepdims=True)
        total += weight * einsum("TM,MD->TD", gated, down[layer, expert])
    return total
