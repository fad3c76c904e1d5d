"""Experts are many small MLPs in a layer; every token goes through a few of them.

No token is dropped, so the result for a token does not depend on its neighbours. Each platform has
its own way to compute the sum of a token's experts; all have the signature `ExpertSum`. Most of
them sort the rows of all tokens by expert, so that a product consists of many small ones, of the
rows of an expert with its weights.

The letters are those of qwen2_jax.py, for example X experts of a token. T is the number of tokens
of all rows together, and n = T * X, one row for each expert of each token.
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


# Maps (x, weights, chosen, stacks, parts=1) to the weighted sum of the results of every token's
# experts, (T, D) float32:
#   x        the tokens, (T, D)
#   weights  the weights of each token's experts, (T, X) float32
#   chosen   the numbers of these experts, (T, X) int32; numbers outside 0..E-1 add nothing and cost
#            nothing
#   stacks   the weights of the experts
#   parts    the number of equal parts of the tokens, whose sums are computed one after the other,
#            so that the first sums may leave early
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
    first, as the TPU's kernel needs them: otherwise it would transpose all of them in every step.

    Attributes:
        config: The configuration of the model.
        dtype: The dtype of the weights.
        expert_sum: The function that computes the sums.
        layout: The mesh.
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

    Args:
        layout: The mesh.
        expert_sum: The function that computes the sums.
        x: The tokens of this device, (B, T, D).
        weights: (B, T, X) float32.
        chosen: (B, T, X) int32.
        stacks: The fields of `Stacks`, for the experts of this device.

    Returns:
        The sums of the tokens of this device, (B, T, D) float32.
    """
    if layout.size("expert") > 1:
        expert_sum = partial(_in_a_ring, layout.ring("expert"), expert_sum)
    tokens = [array.reshape(-1, array.shape[-1]) for array in (x, weights, chosen)]
    y = expert_sum(*tokens, Stacks(*stacks))
    split_axes = tuple(axis for axis in BOTH if layout.size(axis) > 1)
    if split_axes:  # devices have parts of every expert
        y = lax.psum(y.astype(x.dtype), split_axes).astype(jnp.float32)
    return y.reshape(x.shape)


def _in_a_ring(
    ring: Sequence[int],
    expert_sum: ExpertSum,
    x: Array,
    weights: Array,
    chosen: Array,
    stacks: Stacks,
) -> Array:
    """Sends the tokens around the ring of devices, and then their sums.

    Half of the tokens go one way and half the other, so that both directions of the links are used.
    Part k of the tokens that a device gets is the first half of those of the k-th device before it
    and the second half of those of the k-th device after it. A part's sum starts at the first
    device that its tokens reach and goes on the same way until it is home; every device adds the
    results of its experts. So the hops of the tokens run while the rows are sorted, and the hops of
    one part's sum while the next part is added up. The weights are read once.

    Args:
        ring: The numbers of the devices in the order of the ring.
        expert_sum: The function that computes the sums of one device's experts.
        x: The tokens of this device, (T, D).
        weights: (T, X) float32.
        chosen: The numbers of the experts among those of all devices, (T, X) int32.
        stacks: The weights of the experts of this device.

    Returns:
        The sums of the tokens of this device over the experts of all devices, (T, D) float32.
    """
    devices = len(ring)
    count, width = x.shape
    half = count // 2
    # A kernel fetches rows from this shape. The shape of this device's tokens is cheaper to change
    # than that of the tokens of all devices.
    x = x.reshape(count, -1, math.gcd(width, LANES))
    ways = [(slice(half), 1), (slice(half, None), -1)]  # the tokens, and the devices per hop

    def hop(arrays: Any, by: int) -> Any:
        pairs = [(device, ring[(place + by) % devices]) for place, device in enumerate(ring)]
        return lax.ppermute(arrays, "expert", pairs)

    parts_by_way = []
    for tokens, by in ways:
        parts = [[array[tokens] for array in (x, weights, chosen)]]
        for _ in range(1, devices):
            parts.append(hop(parts[-1], by))
        parts_by_way.append(parts)
    halves: list[list[Array]] = []
    for halves_of_part in zip(*parts_by_way, strict=True):
        halves.extend(halves_of_part)
    x, weights, chosen = (jnp.concatenate(arrays) for arrays in zip(*halves, strict=True))
    chosen = chosen - lax.axis_index("expert") * stacks.gate.shape[1]
    y = expert_sum(x.reshape(-1, width), weights, chosen, stacks, parts=devices)

    # Without barriers, XLA would put the parts together to convert and cut them.
    own_part, *other_parts = map(lax.optimization_barrier, jnp.split(y, devices))
    sums = []
    for tokens, by in ways:
        total = other_parts[0][tokens]
        for part in [*other_parts[1:], own_part]:
            total = hop(total.astype(x.dtype), by).astype(jnp.float32) + part[tokens]
        sums.append(total)
    return jnp.concatenate(sums)


def in_sorted_rows(
    compute: SortedRows, x: Array, weights: Array, chosen: Array, stacks: Stacks, parts: int = 1
) -> Array:
    """Implements `ExpertSum` with copies of the rows that are sorted by expert.

    One row of each token is added up at a time, so that no array has all rows in float32.
    `ExpertSum` describes the arguments after `compute`, and the result.

    Args:
        compute: The function that runs the experts on the sorted rows.
        x: As in `ExpertSum`.
        weights: As in `ExpertSum`.
        chosen: As in `ExpertSum`.
        stacks: As in `ExpertSum`.
        parts: As in `ExpertSum`.
    """
    per_token = chosen.shape[1]
    experts = stacks.gate.shape[1]
    exists = (chosen >= 0) & (chosen < experts)
    group = jnp.where(exists, chosen, experts).reshape(-1)
    order = jnp.argsort(group, stable=True)
    sizes = jnp.bincount(group, length=experts + 1)[:experts].astype(jnp.int32)
    rows = from_bits(to_bits(x)[order // per_token], x.dtype)
    y = to_bits(compute(rows, sizes, stacks))
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size)).reshape(chosen.shape)

    def added(places: Array, weights: Array, exists: Array) -> Array:
        total = jnp.zeros((len(places), x.shape[1]), jnp.float32)
        for number, place in enumerate(places.T):
            row = from_bits(y[place], x.dtype).astype(jnp.float32)
            total += jnp.where(exists[:, number, None], row * weights[:, number, None], 0)
        return total

    split = [jnp.split(array, parts) for array in (places, weights, exists)]
    return jnp.concatenate([added(*part) for part in zip(*split, strict=True)])


def _in_ragged_products(x: Array, sizes: Array, stacks: Stacks) -> Array:
    """Implements `SortedRows` by `lax.ragged_dot`, for which the TPU's compiler has a kernel.

    `lax.ragged_dot` gets the experts of all layers, because a slice of the weights would be a copy;
    the experts of other layers have no rows. On other platforms than TPUs, `lax.ragged_dot`
    multiplies every row with every expert.
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
    """Implements `SortedRows` one expert after the other, a tile of TILE rows at a time.

    The last tile of an expert may extend into the rows of the next experts. The results for these
    rows are overwritten when their own expert is computed.
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
    """Implements `ExpertSum` by its definition: computes every token with every expert."""
    layer, gate, up, down = stacks
    total = jnp.zeros(x.shape, jnp.float32)
    for expert in range(gate.shape[1]):
        gated = jax.nn.silu(einsum("TD,DM->TM", x, gate[layer, expert]))
        gated *= einsum("TD,DM->TM", x, up[layer, expert])
        weight = jnp.where(chosen == expert, weights, 0).sum(axis=-1, keepdims=True)
        total += weight * einsum("TM,MD->TD", gated, down[layer, expert])
    return total
