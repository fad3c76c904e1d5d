"""Experts are many small MLPs in a layer; every token goes through a few of them.

No token is dropped, so the result for a token does not depend on its neighbours. Each platform has
its own way to compute the sum of a token's experts: see `ExpertSum`. Most of them sort the rows of
all tokens by expert; each product then consists of many small ones, of each expert's rows with its
weights.

The letters are those of qwen2_jax.py: X experts of a token; n rows, which are T * X.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from activation_extraction.model.layers import STREAM, StackedWeight, einsum, from_bits, to_bits
from activation_extraction.model.mesh import BOTH, Layout

TILE = 128  # rows
LANES = 128  # the width of a TPU's registers

# (x (T, D), weights (T, X) float32, chosen (T, X) int32, layer () int32, gate and up (L, E, D, M),
# down (L, E, M, D), parts=1) -> (T, D) float32: the weighted sum of what each token's experts of
# this layer give. Numbers outside 0..E-1 give nothing and cost nothing. The sums of so many equal
# parts of the tokens are computed one after the other, so that the first ones may leave early.
ExpertSum = Callable[..., Array]

# (rows (n, D), sizes (E,) int32, layer, gate, up, down) -> (n, D), in the type of the rows, which
# are sorted by expert: the first sizes[0] go through expert 0, and so on. The rows after those of
# the last expert have no expert, and what is returned for them means nothing.
SortedRows = Callable[[Array, Array, Array, Array, Array, Array], Array]


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
    expert_sum: ExpertSum
    layout: Layout

    def setup(self) -> None:
        self.gate_proj = StackedWeight(self.config, "EDM", self.dtype)
        self.up_proj = StackedWeight(self.config, "EDM", self.dtype)
        self.down_proj = StackedWeight(self.config, "EMD", self.dtype)

    def sent(self, x: Array) -> tuple[Array, ...]:
        """Returns what the first hop brings of both halves of the tokens, see `_in_a_ring`.

        x: (B, T, D). Where experts are not split, nothing is sent.
        """
        if self.layout.size("expert") == 1:
            return ()
        return self.layout.per_device(partial(_first_hop, self.layout), [x], [STREAM], like=0)

    def __call__(
        self,
        x: Array,
        weights: Array,
        chosen: Array,
        sent: tuple[Array, ...] = (),
        beside: tuple[Array, ...] = (),
    ) -> tuple[Array, tuple[Array, ...]]:
        """Returns the weighted sum of each token's experts, (B, T, D) float32, and `beside`.

        x: (B, T, D); weights, chosen: the weights and numbers of each token's experts, (B, T, X);
        sent: what `sent` returns for x, if it has been called; beside: arrays (B, T, D) that are
        computed before the tokens make their last hop. An expert number beyond the last one gives
        zeros and costs nothing.
        """
        sent = sent or self.sent(x)
        (gate, layer), (up, _), (down, _) = self.gate_proj(), self.up_proj(), self.down_proj()
        arrays = x, weights, chosen, layer, gate, up, down, *sent, *beside
        inwards = "layer", "experts", "hidden", "mlp"
        outwards = "layer", "experts", "mlp", "hidden"
        axes = *[STREAM] * 3, (), inwards, inwards, outwards, *[STREAM] * len(sent + beside)
        run = partial(_exchange, self.layout, self.expert_sum, len(sent))
        return self.layout.per_device(run, arrays, axes, like=0)


def _exchange(
    layout: Layout,
    expert_sum: ExpertSum,
    halves: int,
    x: Array,
    weights: Array,
    chosen: Array,
    layer: Array,
    gate: Array,
    up: Array,
    down: Array,
    *others: Array,
) -> tuple[Array, tuple[Array, ...]]:
    """Runs one device's experts on the tokens of all devices along `expert`.

    Devices send their sums, and what each of them adds up of parts, in the dtype of the tokens.
    others: so many halves of tokens that have been sent, then what is computed before the last hop.
    """
    axes = tuple(axis for axis in BOTH if layout.size(axis) > 1)
    tokens = [a.reshape(-1, a.shape[-1]) for a in (x, weights, chosen)]
    sent, beside = others[:halves], others[halves:]
    if layout.size("expert") == 1:
        y = expert_sum(*tokens, layer, gate, up, down)
    else:
        ring = layout.ring("expert")
        y, beside = _in_a_ring(ring, expert_sum, sent, beside, *tokens, layer, gate, up, down)
    if axes:
        y = lax.psum(y.astype(x.dtype), axes).astype(jnp.float32)
    return y.reshape(x.shape), beside


def _in_rows(x: Array) -> Array:
    """Maps (..., D) to the shape from which a kernel fetches rows, (tokens, D / LANES, LANES)."""
    width = x.shape[-1]
    return x.reshape(-1, width // math.gcd(width, LANES), math.gcd(width, LANES))


def _ways(count: int) -> list[tuple[slice, int]]:
    """Returns which of so many tokens go around the ring, and by how many devices per hop."""
    return [(slice(count // 2), 1), (slice(count // 2, None), -1)]


def _hop(ring: Sequence[int], arrays: Any, by: int) -> Any:
    pairs = [(device, ring[(place + by) % len(ring)]) for place, device in enumerate(ring)]
    return lax.ppermute(arrays, "expert", pairs)


def _first_hop(layout: Layout, x: Array) -> tuple[Array, ...]:
    x, ring = _in_rows(x), layout.ring("expert")
    return tuple(_hop(ring, x[tokens], by) for tokens, by in _ways(len(x)))


def _in_a_ring(
    ring: Sequence[int],
    expert_sum: ExpertSum,
    sent: tuple[Array, ...],
    beside: tuple[Array, ...],
    x: Array,
    weights: Array,
    chosen: Array,
    layer: Array,
    *stacks: Array,
) -> tuple[Array, tuple[Array, ...]]:
    """Sends the tokens around the ring of devices, and then their sums, (T, D) each.

    Half of the tokens go one way and half the other, so that both directions of the links are used.
    Part k of the tokens that a device gets is the first half of those of the k-th device before it
    and the second half of those of the k-th device after it. A part's sum starts at the first
    device that its tokens reach and goes on the same way until it is home; every device adds its
    own. So the hops of the tokens run while the router and the shared expert are computed and the
    rows are sorted, and those of one part's sum while the next part is added up: the weights are
    read once. sent: what the first hop has brought of the tokens; beside: see `Experts`.
    """
    devices, width, ways = len(ring), x.shape[1], _ways(len(x))
    x = _in_rows(x)  # of single tokens, it is cheaper than of all
    parts = []
    for (tokens, by), arrived in zip(ways, sent, strict=True):
        own = [a[tokens] for a in (x, weights, chosen)]
        parts.append([own, [arrived, *_hop(ring, own[1:], by)]])
        for hops in range(2, devices):
            if hops == devices - 1:
                latest = parts[-1][-1]
                latest[0], beside = lax.optimization_barrier((latest[0], beside))
            parts[-1].append(_hop(ring, parts[-1][-1], by))
    both = [part for pair in zip(*parts, strict=True) for part in pair]
    x, weights, chosen = (jnp.concatenate(arrays) for arrays in zip(*both, strict=True))
    chosen = chosen - lax.axis_index("expert") * stacks[0].shape[1]
    y = expert_sum(x.reshape(-1, width), weights, chosen, layer, *stacks, parts=devices)

    # Without barriers, XLA would put the parts together to convert and cut them.
    first, *others = map(lax.optimization_barrier, jnp.split(y, devices))
    sums = []
    for tokens, by in ways:
        total = others[0][tokens]
        for part in [*others[1:], first]:
            total = _hop(ring, total.astype(x.dtype), by).astype(jnp.float32) + part[tokens]
        sums.append(total)
    return jnp.concatenate(sums), beside


def in_sorted_rows(
    compute: SortedRows,
    x: Array,
    weights: Array,
    chosen: Array,
    layer: Array,
    *stacks: Array,
    parts: int = 1,
) -> Array:
    """Computes `ExpertSum` with sorted copies of the rows, and adds up one row of each token at a
    time, so that no array has all rows in float32."""
    (_, per_token), experts = chosen.shape, stacks[0].shape[1]
    local = (chosen >= 0) & (chosen < experts)
    group = jnp.where(local, chosen, experts).reshape(-1)
    order = jnp.argsort(group, stable=True)
    sizes = jnp.bincount(group, length=experts + 1)[:experts].astype(jnp.int32)
    rows = from_bits(to_bits(x)[order // per_token], x.dtype)
    y = to_bits(compute(rows, sizes, layer, *stacks))
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size)).reshape(chosen.shape)

    def added(places: Array, weights: Array, local: Array) -> Array:
        total = jnp.zeros((len(places), x.shape[1]), jnp.float32)
        for each, place in enumerate(places.T):
            row = from_bits(y[place], x.dtype).astype(jnp.float32)
            total += jnp.where(local[:, each, None], row * weights[:, each, None], 0)
        return total

    split = [jnp.split(a, parts) for a in (places, weights, local)]
    return jnp.concatenate([added(*part) for part in zip(*split, strict=True)])


def ragged_experts(
    x: Array, weights: Array, chosen: Array, layer: Array, *stacks: Array, parts: int = 1
) -> Array:
    """Leaves the products to the TPU's compiler, which has a kernel for them. See `ExpertSum`.

    Elsewhere `lax.ragged_dot` multiplies every row with every expert.
    """
    return in_sorted_rows(_in_ragged_products, x, weights, chosen, layer, *stacks, parts=parts)


def _in_ragged_products(
    x: Array, sizes: Array, layer: Array, gate: Array, up: Array, down: Array
) -> Array:
    """Computes `SortedRows` with all layers' experts, of which only this layer's have rows: weights
    that are not sliced are not copied."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    layers, experts = gate.shape[:2]
    sizes = jnp.zeros((layers, experts), jnp.int32).at[layer].set(sizes).reshape(-1)

    def product(x: Array, stack: Array, dtype: Any) -> Array:
        stack = stack.reshape(-1, *stack.shape[2:])
        options: Any = dict(precision=precision, preferred_element_type=dtype)
        return lax.ragged_dot(x, stack, sizes, **options)

    gated = jax.nn.silu(product(x, gate, jnp.float32)) * product(x, up, jnp.float32)
    return product(gated.astype(x.dtype), down, x.dtype)


def one_expert_after_the_other(
    x: Array, weights: Array, chosen: Array, layer: Array, gate: Array, up: Array, down: Array
) -> Array:
    """Computes `ExpertSum` as it is defined, every token with every expert."""
    total = jnp.zeros(x.shape, jnp.float32)
    for expert in range(gate.shape[1]):
        gated = jax.nn.silu(einsum("TD,DM->TM", x, gate[layer, expert]))
        gated *= einsum("TD,DM->TM", x, up[layer, expert])
        weight = jnp.where(chosen == expert, weights, 0).sum(axis=-1, keepdims=True)
        total += weight * einsum("TM,MD->TD", gated, down[layer, expert])
    return total


def tiled_experts(
    x: Array, weights: Array, chosen: Array, layer: Array, *stacks: Array, parts: int = 1
) -> Array:
    """Takes one expert after the other and a tile of its rows at a time. See `ExpertSum`."""
    return in_sorted_rows(_in_tiles, x, weights, chosen, layer, *stacks, parts=parts)


def _in_tiles(x: Array, sizes: Array, layer: Array, *stacks: Array) -> Array:
    """Computes `SortedRows`.

    Rows of a tile that belong to the next expert are computed again with that expert's tile.
    """
    count, bits = len(x), to_bits(jnp.pad(x, ((0, TILE), (0, 0))))
    first = jnp.cumsum(sizes) - sizes
    stacks = tuple(map(to_bits, stacks))

    def tile(y: Array, start: Array, gate: Array, up: Array, down: Array) -> Array:
        rows = from_bits(lax.dynamic_slice_in_dim(bits, start, TILE), x.dtype)
        gated = jax.nn.silu(einsum("nD,DM->nM", rows, gate)) * einsum("nD,DM->nM", rows, up)
        out = einsum("nM,MD->nD", gated.astype(x.dtype), down).astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(y, to_bits(out), start, 0)

    def expert(number: Array, y: Array) -> Array:
        own = [from_bits(stack[layer, number], x.dtype) for stack in stacks]
        tiles = (sizes[number] + TILE - 1) // TILE
        return lax.fori_loop(0, tiles, lambda i, y: tile(y, first[number] + i * TILE, *own), y)

    def expert_with_rows(number: Array, y: Array) -> Array:
        return lax.cond(sizes[number] > 0, expert, lambda _, y: y, number, y)

    y = lax.fori_loop(0, len(sizes), expert_with_rows, jnp.zeros_like(bits))
    return from_bits(y[:count], x.dtype)
