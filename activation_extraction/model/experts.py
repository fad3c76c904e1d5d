"""Computes the experts of a layer, which are many small MLPs of which each token uses a few.

No token is dropped, so the result for a token does not depend on its neighbours. Each platform has
its own function that computes the weighted sum of each token's experts. All of these functions have
the signature `ExpertSumFunction`. Most of them sort rows by expert, so that each expert's weights
are multiplied with consecutive rows. There is a row for each pair of a token and one of its
experts. The kernels for TPUs and GPUs are in expert_kernel.py and grouped_kernel.py.

Letters: B batch rows, T tokens (of all batch rows together where an array has no axis B), D hidden,
L layers, E experts, X experts of a token, M width of an expert, n = T * X rows.
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
from activation_extraction.model.mesh import MODEL_AXES, Layout
from activation_extraction.model.model_config import ModelConfig
from activation_extraction.model.numerics import einsum, from_bits, to_bits
from activation_extraction.model.parameters import StackedWeight

# The number of an expert's rows that `sum_experts_in_tiles` multiplies at a time. The last tile of
# an expert is computed as a whole, even if the expert has only a few rows left.
TILE = 128
LANES = 128  # the number of values in a row of a TPU's register


class Stacks(NamedTuple):
    """The weights of the experts of all layers, and the number of the layer that is computed.

    Letters: L layers, E experts, D hidden, M width of an expert.

    Attributes:
        layer_number: The number of the layer whose experts are used, () int32.
        gate: The weights of the gate projections, (L, E, D, M).
        up: The weights of the up projections, (L, E, D, M).
        down: The weights of the down projections, (L, E, M, D).
    """

    layer_number: Array
    gate: Array
    up: Array
    down: Array


# A function that computes experts. It maps (x, routing_weights, chosen_experts, stacks, parts=1) to
# the weighted sum of the results of each token's experts, (T, D) float32:
#   x                the tokens, (T, D)
#   routing_weights  the weights of each token's experts, (T, X) float32
#   chosen_experts   the numbers of each token's experts, (T, X) int32; numbers outside 0..E-1 add
#                    nothing and cost nothing
#   stacks           the `Stacks` with the weights of the experts
#   parts            the number of equal parts into which the tokens are divided; the parts' sums
#                    are computed one after the other, so that the first sums can be sent early
ExpertSumFunction = Callable[..., Array]

# A function that runs experts on sorted rows. It maps (rows, row_counts, stacks) to the result of
# each row's expert, (n, D) in the dtype of the rows:
#   rows        the rows, (n, D): the first row_counts[0] belong to expert 0, the next row_counts[1]
#               to expert 1, and so on; rows after the rows of the last expert have no expert, and
#               their results are meaningless
#   row_counts  the number of rows of each expert, (E,) int32
#   stacks      the `Stacks` with the weights of the experts
SortedRowsFunction = Callable[[Array, Array, Stacks], Array]


def route(logits: Array, count: int, renormalise: bool) -> tuple[Array, Array]:
    """Chooses the experts of each token.

    Letters: E experts, X experts of a token.

    Args:
        logits: The logits of the router, (B, T, E). Among experts with equal logits, the experts
            with the lowest numbers are chosen.
        count: X, the number of experts per token.
        renormalise: Whether to divide the weights of a token's experts by their sum.

    Returns:
        A tuple of:
            The weights of the chosen experts, (B, T, X) float32. They are rounded to the dtype of
                the logits, as in transformers.
            The numbers of the chosen experts, (B, T, X) int32.
    """
    routing_weights, chosen_experts = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), count)
    if renormalise:
        routing_weights = routing_weights / routing_weights.sum(axis=-1, keepdims=True)
    return routing_weights.astype(logits.dtype).astype(jnp.float32), chosen_experts


def scattered(routing_weights: Array, chosen_experts: Array, count: int) -> Array:
    """Returns the weight of every expert for every token.

    Letters: E experts, X experts of a token.

    Args:
        routing_weights: The weights of the chosen experts, (B, T, X).
        chosen_experts: The numbers of the chosen experts, (B, T, X) int32. All other experts get
            the weight 0.
        count: E, the number of experts.

    Returns:
        The weights, (B, T, E).
    """
    one_hot_experts = jax.nn.one_hot(chosen_experts, count, dtype=routing_weights.dtype)
    return (one_hot_experts * routing_weights[..., None]).sum(axis=-2)


class Experts(nn.Module):
    """The routed experts of a layer, each of which is a SwiGLU.

    Each of the three parameters contains the weights of all experts. The experts are divided among
    the devices along the mesh axis `expert`, and these devices exchange their tokens. Each expert
    is split along the mesh axis `model` like any MLP. Unlike other weights, an expert's weights
    have their input axis first, because the kernel for TPUs needs this order. It would otherwise
    transpose all weights in every step.

    Attributes:
        config: The configuration of the model.
        dtype: The dtype of the weights.
        compute_expert_sum: The function that computes the weighted sum of the results of each
            token's experts.
        layout: The mesh of devices, and the rules for splitting arrays along its axes.
    """

    config: ModelConfig
    dtype: Any
    compute_expert_sum: ExpertSumFunction
    layout: Layout

    def setup(self) -> None:
        self.gate_proj = StackedWeight(self.config, "EDM", self.dtype)
        self.up_proj = StackedWeight(self.config, "EDM", self.dtype)
        self.down_proj = StackedWeight(self.config, "EMD", self.dtype)

    def __call__(self, x: Array, routing_weights: Array, chosen_experts: Array) -> Array:
        """Returns the weighted sum of the outputs of each token's experts.

        Letters: E experts, X experts of a token.

        Args:
            x: The tokens, (B, T, D).
            routing_weights: The routing weights of each token's experts, (B, T, X) float32.
            chosen_experts: The numbers of each token's experts, (B, T, X) int32. Numbers outside
                0..E-1 add nothing and cost nothing.

        Returns:
            The sums, (B, T, D) float32.
        """
        gate_weights, layer_number = self.gate_proj()
        up_weights, _ = self.up_proj()
        down_weights, _ = self.down_proj()
        device_sum_arguments = (
            x,
            routing_weights,
            chosen_experts,
            layer_number,
            gate_weights,
            up_weights,
            down_weights,
        )
        gate_and_up_axes = "layer", "experts", "hidden", "mlp"
        down_axes = "layer", "experts", "mlp", "hidden"
        axes_of_device_sum_arguments = [
            STREAM,
            STREAM,
            STREAM,
            (),
            gate_and_up_axes,
            gate_and_up_axes,
            down_axes,
        ]
        compute_sum_on_device = partial(_sum_on_device, self.layout, self.compute_expert_sum)
        return self.layout.per_device(
            compute_sum_on_device, device_sum_arguments, axes_of_device_sum_arguments, template=0
        )


def _sum_on_device(
    layout: Layout,
    compute_expert_sum: ExpertSumFunction,
    x: Array,
    routing_weights: Array,
    chosen_experts: Array,
    *stacks: Array,
) -> Array:
    """Computes the weighted sums of the experts for the tokens of one device.

    All devices call this function together, because the experts are divided among them. Sums that
    devices send to each other are rounded to the dtype of the tokens.

    Letters: X experts of a token.

    Args:
        layout: The mesh of devices, and the rules for splitting arrays along its axes.
        compute_expert_sum: The function that computes the sums over the experts of one device.
        x: The tokens of this device, (B, T, D).
        routing_weights: The routing weights of each token's experts, (B, T, X) float32.
        chosen_experts: The numbers of each token's experts, (B, T, X) int32.
        stacks: The fields of `Stacks`, with the weights of this device's experts.

    Returns:
        The sums over the experts of all devices, (B, T, D) float32.
    """
    if layout.size("expert") > 1:
        compute_expert_sum = partial(_sum_in_ring, layout.ring("expert"), compute_expert_sum)

    def merge_rows(batch_array: Array) -> Array:
        """Joins the first two axes, which are the batch rows and the tokens of a row."""
        return batch_array.reshape(-1, batch_array.shape[-1])

    summed_expert_results_of_tokens = compute_expert_sum(
        merge_rows(x), merge_rows(routing_weights), merge_rows(chosen_experts), Stacks(*stacks)
    )
    # Along these mesh axes, each device has a part of every expert.
    split_axes = tuple(mesh_axis for mesh_axis in MODEL_AXES if layout.size(mesh_axis) > 1)
    if split_axes:
        summed_expert_results_of_tokens = lax.psum(
            summed_expert_results_of_tokens.astype(x.dtype), split_axes
        ).astype(jnp.float32)
    return summed_expert_results_of_tokens.reshape(x.shape)


def _sum_in_ring(
    ring: Sequence[int],
    compute_expert_sum: ExpertSumFunction,
    x: Array,
    routing_weights: Array,
    chosen_experts: Array,
    stacks: Stacks,
) -> Array:
    """Computes the weighted sums of the results of experts that are divided among devices.

    Every device runs its experts on the tokens of all devices. First, the tokens go around a ring
    of the devices. Half of each device's tokens go forwards and half backwards, so that both
    directions of the links are used. The tokens that a device collects are divided into parts. Part
    0 contains the device's own tokens. Part k contains the first half of the tokens of the device k
    places before this device in the ring, and the second half of the tokens of the device k places
    after this device.

    Then the sums go around the ring. Each half of a device's tokens has an array with the sums of
    these tokens. The array starts at the first device that received this half, and follows the
    half's direction around the ring, until it arrives at the half's own device. Every device on the
    way adds the results of its experts, and the half's own device adds its results last.

    The sending overlaps with the computation. While the tokens are sent, each device can already
    sort the pairs of a token and one of its experts by expert, because it only needs the numbers of
    the experts to do so. While the sums of one part are sent, the sums of the next part are
    computed. Each device reads the weights of its experts once.

    Letters: T tokens, D hidden, X experts of a token.

    Args:
        ring: The numbers of the devices in the order of the ring.
        compute_expert_sum: The function that computes the sums over one device's experts (see
            `ExpertSumFunction`).
        x: The tokens of this device, (T, D).
        routing_weights: The routing weights of each token's experts, (T, X) float32.
        chosen_experts: The numbers of each token's experts, counted over all devices, (T, X) int32.
        stacks: The weights of this device's experts in all layers, and the number of the layer that
            is computed.

    Returns:
        The sums for the tokens of this device, (T, D) float32.
    """
    device_count = len(ring)
    token_count, hidden_size = x.shape
    half_token_count = token_count // 2
    # Kernels fetch rows from arrays of this shape. It is cheaper to reshape the tokens of this
    # device before they are sent than the tokens of all devices afterwards.
    x = x.reshape(token_count, -1, math.gcd(hidden_size, LANES))
    # For each direction around the ring, the half of the tokens that goes this way, and the number
    # of places in the ring by which one transfer moves it.
    half_slices_and_shifts = [(slice(half_token_count), 1), (slice(half_token_count, None), -1)]

    def hop(arrays: Any, shift: int) -> Any:
        sender_receiver_pairs = [
            (sender_number, ring[(ring_index + shift) % device_count])
            for ring_index, sender_number in enumerate(ring)
        ]
        return lax.ppermute(arrays, "expert", sender_receiver_pairs)

    arrays_to_send = x, routing_weights, chosen_experts

    def collect_halves(half_slice: slice, ring_shift: int) -> list[list[Array]]:
        """Sends half of each device's tokens around the ring, and collects the arriving halves.

        Args:
            half_slice: The slice of a device's tokens that is sent.
            ring_shift: The number of places in the ring by which a transfer moves the tokens; -1 to
                move them backwards.

        Returns:
            A list that starts with the half of this device's own tokens, followed by the half that
            arrives with each transfer. Each half is a list of three arrays: the tokens, their
            routing weights and their chosen experts.
        """
        arrays_of_collected_halves = [
            [per_token_array[half_slice] for per_token_array in arrays_to_send]
        ]
        for _ in range(1, device_count):
            arrays_of_collected_halves.append(hop(arrays_of_collected_halves[-1], ring_shift))
        return arrays_of_collected_halves

    first_halves_of_token_parts, second_halves_of_token_parts = (
        collect_halves(half_slice, ring_shift) for half_slice, ring_shift in half_slices_and_shifts
    )
    # Each of these lists contains two arrays for each part of the collected tokens: one for the
    # first half of the part, and one for the second half. The parts are in the order of their
    # numbers, because `jnp.split` below divides the results into the same parts again.
    tokens_of_halves: list[Array] = []
    routing_weights_of_halves: list[Array] = []
    chosen_experts_of_halves: list[Array] = []
    for halves_of_token_part in zip(
        first_halves_of_token_parts, second_halves_of_token_parts, strict=True
    ):
        for half_tokens, half_routing_weights, half_chosen_experts in halves_of_token_part:
            tokens_of_halves.append(half_tokens)
            routing_weights_of_halves.append(half_routing_weights)
            chosen_experts_of_halves.append(half_chosen_experts)
    x = jnp.concatenate(tokens_of_halves)
    routing_weights = jnp.concatenate(routing_weights_of_halves)
    chosen_expert_numbers = jnp.concatenate(chosen_experts_of_halves)
    # The numbers of this device's experts become 0 to E - 1, for E experts per device. All other
    # numbers are experts of other devices.
    chosen_expert_numbers_from_first_of_device = (
        chosen_expert_numbers - lax.axis_index("expert") * stacks.gate.shape[1]
    )
    y = compute_expert_sum(
        x.reshape(-1, hidden_size),
        routing_weights,
        chosen_expert_numbers_from_first_of_device,
        stacks,
        parts=device_count,
    )

    # Without barriers, XLA would join the results of the parts in one array again, in order to
    # convert and slice them together. The results of the first parts could then not be sent to
    # other devices before the results of the last parts are computed.
    own_part_results, *other_part_results = map(
        lax.optimization_barrier, jnp.split(y, device_count)
    )
    summed_results_of_token_halves = []
    for half_slice, ring_shift in half_slices_and_shifts:
        summed_results_of_token_half = other_part_results[0][half_slice]
        for part_results in [*other_part_results[1:], own_part_results]:
            summed_results_of_token_half = (
                hop(summed_results_of_token_half.astype(x.dtype), ring_shift).astype(jnp.float32)
                + part_results[half_slice]
            )
        summed_results_of_token_halves.append(summed_results_of_token_half)
    return jnp.concatenate(summed_results_of_token_halves)


def in_sorted_rows(
    run_experts_on_sorted_rows: SortedRowsFunction,
    x: Array,
    routing_weights: Array,
    chosen_experts: Array,
    stacks: Stacks,
    parts: int = 1,
) -> Array:
    """Computes the weighted sum of each token's experts by sorting copies of the tokens by expert.

    Every token is copied once for each of its experts. These copies are the rows that are sorted.
    After the experts have run on the rows, a loop adds the results of the first expert of every
    token, then the results of the second expert of every token, and so on. So no array contains the
    results of all rows in float32.

    Letters: T tokens, D hidden, X experts of a token.

    Args:
        run_experts_on_sorted_rows: The function that runs the experts on the sorted rows. See
            `SortedRowsFunction`.
        x: The tokens, (T, D).
        routing_weights: The routing weights of each token's experts, (T, X) float32.
        chosen_experts: The numbers of each token's experts, (T, X) int32.
        stacks: The weights of the experts of all layers, and the number of the layer that is
            computed.
        parts: The number of equal parts into which the tokens are divided. The parts' sums are
            computed one after the other, so that the sums of the first parts can be sent to other
            devices early.

    Returns:
        The sums, (T, D) float32. See `ExpertSumFunction`.
    """
    experts_per_token = chosen_experts.shape[1]
    expert_count = stacks.gate.shape[1]
    local_expert_mask = (chosen_experts >= 0) & (chosen_experts < expert_count)
    expert_numbers_of_rows = jnp.where(local_expert_mask, chosen_experts, expert_count).reshape(-1)
    row_numbers_sorted_by_expert = jnp.argsort(expert_numbers_of_rows, stable=True)
    row_counts_of_experts = jnp.bincount(expert_numbers_of_rows, length=expert_count + 1)[
        :expert_count
    ].astype(jnp.int32)
    sorted_rows = from_bits(to_bits(x)[row_numbers_sorted_by_expert // experts_per_token], x.dtype)
    expert_result_bits = to_bits(
        run_experts_on_sorted_rows(sorted_rows, row_counts_of_experts, stacks)
    )
    # For each token and each of its X chosen experts, the index in `sorted_rows` of the row of this
    # token and expert, (T, X).
    indices_in_sorted_rows = (
        jnp.zeros_like(row_numbers_sorted_by_expert)
        .at[row_numbers_sorted_by_expert]
        .set(jnp.arange(row_numbers_sorted_by_expert.size))
    )
    indices_in_sorted_rows = indices_in_sorted_rows.reshape(chosen_experts.shape)

    def add_up(
        indices_in_sorted_rows: Array, routing_weights: Array, local_expert_mask: Array
    ) -> Array:
        summed_expert_results_of_tokens = jnp.zeros(
            (len(indices_in_sorted_rows), x.shape[1]), jnp.float32
        )
        # Choice i is the expert with the index i among the chosen experts of every token.
        for choice_index, indices_in_sorted_rows_of_choice in enumerate(indices_in_sorted_rows.T):
            expert_results = from_bits(
                expert_result_bits[indices_in_sorted_rows_of_choice], x.dtype
            ).astype(jnp.float32)
            summed_expert_results_of_tokens += jnp.where(
                local_expert_mask[:, choice_index, None],
                expert_results * routing_weights[:, choice_index, None],
                0,
            )
        return summed_expert_results_of_tokens

    parts_of_arrays = [
        jnp.split(per_token_array, parts)
        for per_token_array in (indices_in_sorted_rows, routing_weights, local_expert_mask)
    ]
    return jnp.concatenate(
        [add_up(*arrays_of_part) for arrays_of_part in zip(*parts_of_arrays, strict=True)]
    )


def _run_with_ragged_dot(x: Array, row_counts: Array, stacks: Stacks) -> Array:
    """Runs experts on sorted rows with `lax.ragged_dot`, for which XLA has a kernel on TPUs.

    `lax.ragged_dot` gets the weights of the experts of all layers, because a slice with the weights
    of one layer would be a copy. Only the experts of the layer that is computed get rows. On other
    platforms than TPUs, `lax.ragged_dot` multiplies every row with the weights of every expert.

    Letters: n rows, E experts.

    Args:
        x: The inputs of the experts, (n, D), a row for each pair of a token and one of its experts,
            sorted by expert.
        row_counts: The number of rows of each expert, (E,) int32.
        stacks: The weights of the experts of all layers, and the number of the layer that is
            computed.

    Returns:
        The result of each row's expert, (n, D) in the dtype of x. See `SortedRowsFunction`.
    """
    layer_number, gate_stack, up_stack, down_stack = stacks
    dot_precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    layer_count, expert_count = gate_stack.shape[:2]
    row_counts_of_all_experts = (
        jnp.zeros((layer_count, expert_count), jnp.int32)
        .at[layer_number]
        .set(row_counts)
        .reshape(-1)
    )

    def product(x: Array, stack: Array, dtype: Any) -> Array:
        matrices_of_all_layers = stack.reshape(-1, *stack.shape[2:])
        dot_options: Any = dict(precision=dot_precision, preferred_element_type=dtype)
        return lax.ragged_dot(x, matrices_of_all_layers, row_counts_of_all_experts, **dot_options)

    gated_values = jax.nn.silu(product(x, gate_stack, jnp.float32)) * product(
        x, up_stack, jnp.float32
    )
    return product(gated_values.astype(x.dtype), down_stack, x.dtype)


def _run_in_tiles(x: Array, row_counts: Array, stacks: Stacks) -> Array:
    """Runs one expert after the other on its rows, a tile of TILE rows at a time.

    A row contains the values of one token, as the input of one of its experts. The last tile of an
    expert may extend into the rows of the next experts. The results for these rows are overwritten
    when the next experts are computed.

    Letters: n rows, E experts.

    Args:
        x: The inputs of the experts, (n, D), a row for each pair of a token and one of its experts,
            sorted by expert.
        row_counts: The number of rows of each expert, (E,) int32.
        stacks: The weights of the experts of all layers, and the number of the layer that is
            computed.

    Returns:
        The result of each row's expert, (n, D) in the dtype of x. See `SortedRowsFunction`.
    """
    row_count = len(x)
    padded_row_bits = to_bits(jnp.pad(x, ((0, TILE), (0, 0))))
    first_row_indices_of_experts = jnp.cumsum(row_counts) - row_counts
    weight_bits_of_projections = [
        to_bits(projection_weights) for projection_weights in (stacks.gate, stacks.up, stacks.down)
    ]

    def compute_tile(
        y: Array, start: Array, gate_weights: Array, up_weights: Array, down_weights: Array
    ) -> Array:
        tile_rows = from_bits(lax.dynamic_slice_in_dim(padded_row_bits, start, TILE), x.dtype)
        gated_values = jax.nn.silu(einsum("nD,DM->nM", tile_rows, gate_weights)) * einsum(
            "nD,DM->nM", tile_rows, up_weights
        )
        tile_results = einsum("nM,MD->nD", gated_values.astype(x.dtype), down_weights)
        tile_results = tile_results.astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(y, to_bits(tile_results), start, 0)

    def compute_expert(expert: Array, y: Array) -> Array:
        weights_of_expert = tuple(
            from_bits(weight_bits[stacks.layer_number, expert], x.dtype)
            for weight_bits in weight_bits_of_projections
        )
        tile_count = (row_counts[expert] + TILE - 1) // TILE

        def compute_next_tile(tile: Array, y: Array) -> Array:
            return compute_tile(
                y, first_row_indices_of_experts[expert] + tile * TILE, *weights_of_expert
            )

        return lax.fori_loop(0, tile_count, compute_next_tile, y)

    def compute_expert_with_rows(expert: Array, y: Array) -> Array:
        return lax.cond(row_counts[expert] > 0, compute_expert, lambda _, y: y, expert, y)

    y = lax.fori_loop(0, len(row_counts), compute_expert_with_rows, jnp.zeros_like(padded_row_bits))
    return from_bits(y[:row_count], x.dtype)


sum_experts_with_ragged_dot = partial(in_sorted_rows, _run_with_ragged_dot)
sum_experts_in_tiles = partial(in_sorted_rows, _run_in_tiles)


def one_expert_after_the_other(
    x: Array, routing_weights: Array, chosen_experts: Array, stacks: Stacks
) -> Array:
    """Computes every expert on every token, and adds up the results with the routing weights.

    This is the reference implementation of `ExpertSumFunction`, with which tests and the trials of
    kernels in trial.py compare the other implementations.

    Letters: X experts of a token.

    Args:
        x: The tokens, (T, D).
        routing_weights: The routing weights of each token's experts, (T, X) float32.
        chosen_experts: The numbers of each token's experts, (T, X) int32. Numbers outside 0..E-1
            add nothing, where E is the number of experts.
        stacks: The weights of the experts of all layers, and the number of the layer that is
            computed.

    Returns:
        The sums, (T, D) float32.
    """
    layer_number, gate_stack, up_stack, down_stack = stacks
    summed_expert_results_of_tokens = jnp.zeros(x.shape, jnp.float32)
    for expert_number in range(gate_stack.shape[1]):
        gate_activations = jax.nn.silu(
            einsum("TD,DM->TM", x, gate_stack[layer_number, expert_number])
        )
        gated_values = gate_activations * einsum(
            "TD,DM->TM", x, up_stack[layer_number, expert_number]
        )
        routing_weights_of_expert = jnp.where(
            chosen_experts == expert_number, routing_weights, 0
        ).sum(axis=-1, keepdims=True)
        summed_expert_results_of_tokens += routing_weights_of_expert * einsum(
            "TM,MD->TD", gated_values, down_stack[layer_number, expert_number]
        )
    return summed_expert_results_of_tokens
