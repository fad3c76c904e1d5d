"""Chooses the kernels of a run, after a trial of the candidates on the device.

A run uses one kernel of each kind, such as attention. kernels.py lists the candidates of each
platform in the order of preference. Before a run loads its weights, the candidates are tried in
this order on small random arrays, in which heads and experts have the same sizes as on a device in
the run. The result of a candidate is compared with the exact result of a slow function. The first
candidate that is accurate is chosen.

Letters: T tokens per row.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from activation_extraction.common.errors import RunError, one_line
from activation_extraction.common.log import log
from activation_extraction.model.attention import Segments, dense_attention
from activation_extraction.model.delta_net import token_by_token
from activation_extraction.model.experts import Stacks, one_expert_after_the_other
from activation_extraction.model.kernels import candidates_for
from activation_extraction.model.mesh import Layout

# Dtype of the computation -> the largest allowed relative error of a vector (see `largest_error`).
#
# bfloat16 rounds the two factors of a product by at most 2**-9 each, so that their errors add up to
# less than 2**-7. float32 sums of some hundred products are accurate to 2**-18. If a kernel uses
# products of TF32 or bfloat16 for float32, its errors are larger than 2**-14. A kernel of attention
# that sees one key too many or too few among n keys changes a token's output by about
# 0.4 * n**-0.5, which is 2**-5 for the samples of a trial.
TOLERANCE = {"bfloat16": 2.0**-6, "float32": 2.0**-15}
# Kernels compute rows in the same way if the lengths of the rows are equal modulo this number.
LENGTH_MODULUS = 128
# The largest number of experts in a trial of a kernel for experts, so that the trial is short.
MAX_EXPERTS = 4
# The largest number of key heads in a trial of the delta rule, so that the trial is short.
MAX_KEY_HEADS = 2
# The tokens per row in a trial of the delta rule, which are several chunks and a part of a chunk.
DELTA_TOKENS = 300


class Trial(NamedTuple):
    """One comparison of a candidate kernel with the slow function that defines its result.

    The result consists of vectors: for each token, the output of every head if the kernel computes
    attention or a delta net, or the sum of the token's experts if the kernel computes experts.

    Attributes:
        exact_function: Slow function that defines the result.
        arguments: Arguments of both functions. For `exact_function`, floating-point arrays are
            converted to float32. For the candidate, Python integers are constants
            of the compiled program.
        mask_of_compared_vectors: Mask of the vectors to compare, bool, with the shape of the result
            without its last axis. Vectors of padding are not compared.
    """

    exact_function: Callable[..., Any]
    arguments: tuple[Any, ...]
    mask_of_compared_vectors: Array


@dataclass(frozen=True)
class Choice:
    """The kernel that was chosen for a run.

    Attributes:
        kernel_name: Name of the kernel.
        kernel: Kernel, as a function.
        rejection_reason_by_kernel: Name of a preferred candidate -> reason why it is not used.
    """

    kernel_name: str
    kernel: Callable[..., Array]
    rejection_reason_by_kernel: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object that metadata.json records.

        Returns:
            A dict with these keys.
            name: The name of the kernel.
            passed_over: Name of a preferred candidate -> reason why it is not used.
        """
        return {"name": self.kernel_name, "passed_over": self.rejection_reason_by_kernel}


def try_kernels(config: Any, layout: Layout, length: int, dtype: jnp.dtype) -> dict[str, Choice]:
    """Chooses the kernels of the run.

    A model needs one kernel for attention, and may need others for its experts or for the delta
    rule. If there are several candidate kernels for one of these operations, each host tries them
    on its first device, and logs the choice. A single candidate is chosen without a trial.

    Args:
        config: The configuration of the model.
        layout: The layout of the mesh.
        length: The number of tokens per row.
        dtype: The dtype of the computation.

    Returns:
        A dict from the name of each field of `Kernels` (kernels.py) that the model needs, such as
        "attention", to the kernel that was chosen for it.

    Raises:
        RunError: If there are several candidates for an operation, and each of them fails or
            computes wrong numbers on this device.
    """
    trial_maker_by_kernel_kind = {
        "attention": partial(attention_trials, config, layout, length, dtype)
    }
    if config.experts is not None:
        trial_maker_by_kernel_kind["experts"] = partial(expert_trials, config, layout, dtype)
    if config.delta is not None:
        trial_maker_by_kernel_kind["delta_rule"] = partial(delta_trials, config, layout, dtype)
    candidate_kernels_by_kernel_kind = candidates_for(jax.default_backend())
    tolerance = TOLERANCE[dtype.name]
    return {
        kernel_kind: choose_kernel(
            kernel_kind, candidate_kernels_by_kernel_kind[kernel_kind], make_trials, tolerance
        )
        for kernel_kind, make_trials in trial_maker_by_kernel_kind.items()
    }


def choose_kernel(
    kind: str,
    candidates: Mapping[str, Callable[..., Array]],
    make_trials: Callable[[], Iterable[Trial]],
    tolerance: float,
) -> Choice:
    """Returns the first candidate that is accurate on the first device of this host.

    If there is only one candidate, as on the CPU, it is chosen without a trial.

    Args:
        kind: The field of `Kernels`, such as "attention", for messages.
        candidates: Name of a kernel -> its function, in the order of preference.
        make_trials: A function without arguments that returns the trials: the inputs and the
            function that computes the exact results. It is called again for each candidate, and
            returns the same trials each time.
        tolerance: The largest relative error of a vector that counts as accurate (see
            `largest_error`).

    Raises:
        RunError: If there are several candidates and none of them is accurate. This means that the
            device computes wrong numbers.
    """
    rejection_reason_by_kernel: dict[str, str] = {}
    for kernel_name, candidate_kernel in candidates.items():
        if len(candidates) == 1:
            return Choice(kernel_name, candidate_kernel)
        try:
            with jax.default_device(jax.local_devices()[0]):
                largest_relative_error = largest_error(candidate_kernel, make_trials())
            if largest_relative_error <= tolerance:
                log.info(
                    "%s: %s, which agrees with its definition on this device", kind, kernel_name
                )
                return Choice(kernel_name, candidate_kernel, rejection_reason_by_kernel)
            reason_for_rejection = (
                f"it differs from the definition by {largest_relative_error:.2g} "
                f"(allowed: {tolerance:.2g})"
            )
        except Exception as failure:
            # A kernel or its compiler may raise any exception, and the next candidate may work.
            reason_for_rejection = f"it fails: {one_line(failure):.300}"
        rejection_reason_by_kernel[kernel_name] = reason_for_rejection
        log.warning("%s: %s is not used: %s", kind, kernel_name, reason_for_rejection)
    rejection_reasons_phrase = "; ".join(
        f"{kernel_name}: {reason_for_rejection}"
        for kernel_name, reason_for_rejection in rejection_reason_by_kernel.items()
    )
    raise RunError(f"no kernel for {kind} is right on this device: {rejection_reasons_phrase}")


def largest_error(candidate: Callable[..., Array], trials: Iterable[Trial]) -> float:
    """Returns the largest relative error of the results of a kernel in several trials.

    A result consists of vectors (see `Trial`). `Trial.exact_function` computes the exact vectors in
    float32. The relative error of a vector is
    the norm of its difference from the exact vector, divided by the norm of the exact vector. The
    exact function runs on the CPU if JAX can use the CPU, because the compiler of a GPU would try
    many programs for each product of this function.

    Args:
        candidate: The kernel to check, which is called with the arguments of each trial.
        trials: The trials.
    """
    largest_errors_of_trials = []
    device_of_exact_result = jax.local_devices()[0]
    # JAX raises RuntimeError if JAX_PLATFORMS excludes the CPU.
    with suppress(RuntimeError):
        device_of_exact_result = jax.local_devices(backend="cpu")[0]
    for trial in trials:
        constant_argument_indices = []
        for argument_index, argument in enumerate(trial.arguments):
            if isinstance(argument, int):
                constant_argument_indices.append(argument_index)
        computed_result = jax.jit(candidate, static_argnums=constant_argument_indices)(
            *trial.arguments
        )
        exact_arguments = jax.tree.map(
            partial(_as_float32, device_of_exact_result), trial.arguments
        )
        with jax.default_device(device_of_exact_result):
            exact_result = trial.exact_function(*exact_arguments)
        mask_of_compared_vectors = np.asarray(trial.mask_of_compared_vectors)
        computed_vectors = np.asarray(computed_result)[mask_of_compared_vectors].astype(float)
        exact_vectors = np.asarray(exact_result)[mask_of_compared_vectors].astype(float)
        exact_norms = np.linalg.norm(exact_vectors, axis=-1)
        # The exact output of a token without experts has the norm 0. Its error is divided by 1.
        exact_norms[exact_norms == 0] = 1
        error_norms = np.linalg.norm(computed_vectors - exact_vectors, axis=-1)
        largest_errors_of_trials.append(np.max(error_norms / exact_norms))
    return float(np.max(largest_errors_of_trials))


def _as_float32(device: jax.Device, argument: Any) -> Any:
    """Copies an argument to a device. A floating-point array is converted to float32.

    Args:
        device: The device.
        argument: An array, or an object of another type, which is returned unchanged.
    """
    if not isinstance(argument, Array):
        return argument
    is_float = jnp.issubdtype(argument.dtype, jnp.floating)
    return jax.device_put(argument.astype(jnp.float32) if is_float else argument, device)


def attention_trials(config: Any, layout: Layout, length: int, dtype: jnp.dtype) -> Iterator[Trial]:
    """Yields the trials in which a kernel for attention is compared with the exact function.

    If the queries of a row are split over devices, there is a trial for the queries of each device.
    If the model has a sliding window, there are trials with and without a window. Long rows are
    replaced by shorter rows that kernels compute in the same way, and the window is so short that
    it hides some keys of the shorter rows.

    Args:
        config: The configuration of the model.
        layout: The layout of the mesh.
        length: The number of tokens per row.
        dtype: The dtype of the computation.
    """
    # The numbers of devices over which the queries of a row and the attention heads are split.
    num_devices_splitting_queries = layout.size("query")
    num_devices_splitting_heads = layout.size("model")
    num_queries_on_device = length // num_devices_splitting_queries
    num_trial_queries = num_queries_on_device
    if num_queries_on_device > 2 * LENGTH_MODULUS:
        num_trial_queries = 2 * LENGTH_MODULUS + num_queries_on_device % LENGTH_MODULUS
    num_keys = num_trial_queries * num_devices_splitting_queries
    head_dim = config.head_dim
    rng = np.random.default_rng(0)
    draw_normal = partial(_normal, rng, dtype, 2, num_keys)
    segment_ids = _segments(num_keys)
    # The scores are scaled to a narrow range, so that all keys contribute to the result.
    q = draw_normal(
        config.num_attention_heads // num_devices_splitting_heads, head_dim, scale=head_dim**-0.5
    )
    k = draw_normal(config.num_key_value_heads // num_devices_splitting_heads, head_dim)
    v = draw_normal(config.num_key_value_heads // num_devices_splitting_heads, head_dim)
    # The arguments for the sliding window with which attention is called: none, or its length.
    window_args_to_try: list[tuple[int, ...]] = [()]
    if config.sliding_window is not None:
        window_args_to_try.append((min(config.sliding_window, max(num_keys // 6, 1)),))
    for window_args in window_args_to_try:
        for first_query_index in range(0, num_keys, num_trial_queries):
            query_slice = slice(first_query_index, first_query_index + num_trial_queries)
            # The trial compiles the kernel as the run does. An int is a constant of the compiled
            # program, and an array is an argument. If devices split the queries of a row, the index
            # of the first query differs between devices, so it must be an argument.
            static_or_traced_first_query_index = (
                first_query_index
                if num_devices_splitting_queries == 1
                else jnp.int32(first_query_index)
            )
            query_segment_ids = segment_ids[:, query_slice]
            attention_arrays = q[:, query_slice], k, v, Segments(query_segment_ids, segment_ids)
            attention_arguments = (
                *attention_arrays,
                static_or_traced_first_query_index,
                *window_args,
            )
            yield Trial(dense_attention, attention_arguments, query_segment_ids > 0)


def expert_trials(config: Any, layout: Layout, dtype: jnp.dtype) -> Iterator[Trial]:
    """Yields a trial in which a kernel for experts is compared with the exact function.

    The exact function computes one expert after the other.

    The trial has the weights of two layers and computes the second layer, because kernels read a
    layer from a stack. Each token chooses two experts. If there are more than two experts, one has
    no tokens. Some experts have more tokens than a tile of a kernel. Some tokens choose experts of
    other devices.

    Args:
        config: The configuration of a model with experts.
        layout: The mesh of devices. The number of experts in the trial is the number of experts
            that one device has in the run, but at most MAX_EXPERTS.
        dtype: The dtype of the tokens and weights.
    """
    weight_shape = config.experts.count, config.hidden_size, config.experts.width
    num_experts_on_device, hidden_size, expert_width_on_device = layout.shard_shape(
        ("experts", "hidden", "mlp"), weight_shape
    )
    num_trial_experts = min(num_experts_on_device, MAX_EXPERTS)
    rng = np.random.default_rng(0)
    token_counts_of_experts = [
        (expert_number + 1) * 67 % 300 for expert_number in range(num_trial_experts)
    ]
    if num_trial_experts > 2:
        token_counts_of_experts[2] = 0
    # Experts of other devices have numbers outside of this device's range, such as the last two.
    expert_numbers = [*range(num_trial_experts), num_trial_experts, -1]
    # Experts 0, 1 and so on are chosen as often as `token_counts_of_experts` tells. The two experts
    # of other devices are chosen 70 times each, or one of them 71 times, because the number of all
    # choices must be even: each token makes two choices.
    choice_counts_of_experts = [*token_counts_of_experts, 70, 70 + sum(token_counts_of_experts) % 2]
    unshuffled_expert_choices = np.repeat(expert_numbers, choice_counts_of_experts)
    chosen_experts = rng.permutation(unshuffled_expert_choices).reshape(-1, 2).astype(np.int32)
    routing_weights = rng.uniform(0.2, 1, chosen_experts.shape).astype(np.float32)
    draw_normal = partial(_normal, rng, dtype)
    x = draw_normal(len(chosen_experts), hidden_size)
    gate_weights = draw_normal(
        2, num_trial_experts, hidden_size, expert_width_on_device, scale=hidden_size**-0.5
    )
    up_weights = draw_normal(
        2, num_trial_experts, hidden_size, expert_width_on_device, scale=hidden_size**-0.5
    )
    down_weights = draw_normal(
        2,
        num_trial_experts,
        expert_width_on_device,
        hidden_size,
        scale=expert_width_on_device**-0.5,
    )
    weight_stacks = Stacks(jnp.int32(1), gate_weights, up_weights, down_weights)
    expert_arguments = x, jnp.asarray(routing_weights), jnp.asarray(chosen_experts), weight_stacks
    yield Trial(one_expert_after_the_other, expert_arguments, jnp.ones(len(x), bool))


def delta_trials(config: Any, layout: Layout, dtype: jnp.dtype) -> Iterator[Trial]:
    """Yields one trial, which compares a kernel for the delta rule with the exact function.

    The exact function computes one token after the other. In the random arrays of the trial, some
    samples end within a chunk of tokens that kernels compute together, and the heads have different
    decay rates.

    Args:
        config: The configuration of a model with a delta net.
        layout: The mesh of devices. The number of heads in the trial is the number of heads that
            one device computes in the run, but with at most MAX_KEY_HEADS key heads.
        dtype: The dtype of queries, keys and values.
    """
    delta_net_config = config.delta
    segment_ids = _segments(DELTA_TOKENS)
    (num_key_heads_on_device,) = layout.shard_shape(("key_heads",), (delta_net_config.key_heads,))
    num_trial_key_heads = min(num_key_heads_on_device, MAX_KEY_HEADS)
    value_heads_shape = num_trial_key_heads, delta_net_config.values_per_key
    rng = np.random.default_rng(0)
    draw_normal = partial(_normal, rng, dtype, *segment_ids.shape)
    draw_float32_normal = partial(_normal, rng, jnp.float32, *segment_ids.shape)
    q = draw_normal(num_trial_key_heads, delta_net_config.key_size)
    k = draw_normal(num_trial_key_heads, delta_net_config.key_size)
    v = draw_normal(*value_heads_shape, delta_net_config.value_size)
    decay_rates = np.geomspace(0.01, 1, math.prod(value_heads_shape), dtype=np.float32)
    log_decay = -decay_rates.reshape(value_heads_shape) * jax.nn.softplus(
        draw_float32_normal(*value_heads_shape)
    )
    beta = jax.nn.sigmoid(draw_float32_normal(*value_heads_shape))
    yield Trial(token_by_token, (q, k, v, log_decay, beta, segment_ids), segment_ids > 0)


def _normal(rng: np.random.Generator, dtype: Any, *shape: int, scale: float = 1) -> Array:
    return jnp.asarray(scale * rng.standard_normal(shape, np.float32), dtype)


def _segments(length: int) -> Array:
    """Returns the segments of two rows with three samples each, (2, T) int32.

    A segment is the number of a token's sample in its row, from 1. It is 0 for padding, which is at
    the end of the second row.

    Args:
        length: T, the number of tokens per row.
    """
    segment_ids = np.ones((2, length), np.int32)
    segment_ids[:, length // 3 :] = 2
    segment_ids[:, length // 2 :] = 3
    segment_ids[1, length - length // 5 :] = 0
    return jnp.asarray(segment_ids)
