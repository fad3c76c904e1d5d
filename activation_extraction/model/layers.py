"""Declares the norm, the projection and the rotary embedding that the layers of all models use.

qwen2_jax.py builds layers of these modules and functions. attention.py, experts.py and delta_net.py
compute attention, experts and delta nets, numerics.py computes matrix products, and parameters.py
declares weights.

Letters: B rows, T tokens per row, D hidden size, N heads, H head size.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from activation_extraction.model.model_config import ModelConfig
from activation_extraction.model.numerics import einsum, einsum_of_parts, from_bits
from activation_extraction.model.parameters import parameter

STREAM = "batch", "sequence", "hidden"  # logical axes of the residual stream
# The intermediates of a module, which hooks can store: name -> array, or a function that computes
# the array if a hook needs it. The intermediates of a submodule are a nested dict.
Intermediates = dict[str, Any]


class RMSNorm(nn.Module):
    """The root mean square norm of the last axis (arXiv:1910.07467).

    The norm is computed in float32, and the result is rounded once.

    Attributes:
        config: The configuration of the model. Its `norm_offset` is added to the weights.
        dtype: The dtype of the weights and of the result.
        axis_letter: The letter of the last axis, which gives the number of weights (see
            `LOGICAL_AXES` in parameters.py).
    """

    config: ModelConfig
    dtype: Any = jnp.float32
    axis_letter: str = "D"

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Intermediates]:
        """Normalises an array, and returns the result with the intermediates.

        Args:
            x: The array, whose last axis is divided by its root mean square.

        Returns:
            The result, with the shape of x and the dtype of the module.
            A dict of the intermediates: `normalized` is the float32 array before it is multiplied
            by the weights, and `out` is the result.
        """
        weight = from_bits(parameter(self, "weight", self.axis_letter))
        x = x.astype(jnp.float32)
        inverse_rms = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        normalized_x = x * inverse_rms
        weighted_values = normalized_x * (weight.astype(jnp.float32) + self.config.norm_offset)
        weighted_values = weighted_values.astype(self.dtype)
        return weighted_values, {"normalized": normalized_x, "out": weighted_values}


class Linear(nn.Module):
    """A linear projection of each token, with a bias or without.

    The weight has its output axes first, as in the checkpoint. The product accumulates in float32,
    and the bias is added in float32. The result is float32, so that the caller rounds it once.

    Attributes:
        config: The configuration of the model, which gives the size of each letter's axis.
        axis_letters: The letters of the input axes, `->`, and the letters of the output axes. For
            example, `D->NH` maps (B, T, D) to (B, T, N, H).
        use_bias: Whether there is a bias.
        dtype: The dtype of the weight and of the bias.
        has_split_inputs: Whether the input axes are split over devices, so that the products of
            the devices are added up.
    """

    config: ModelConfig
    axis_letters: str
    use_bias: bool = False
    dtype: Any = jnp.float32
    has_split_inputs: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        input_letters, output_letters = self.axis_letters.split("->")
        weight = parameter(self, "weight", output_letters + input_letters)
        einsum_equation = f"BT{input_letters},{output_letters}{input_letters}->BT{output_letters}"
        multiply = einsum_of_parts if self.has_split_inputs else einsum
        y = multiply(einsum_equation, x, weight)
        if self.use_bias:
            y += parameter(self, "bias", output_letters).astype(jnp.float32)
        return y


def rotary_table(positions: Array, config: ModelConfig) -> tuple[Array, Array]:
    """Returns the cosines and sines with which `rotate` rotates queries and keys.

    The cosines and sines are multiplied by the attention factor of the rotary embedding.

    Args:
        positions: The position of every token in its sample, (B, T) int32.
        config: The configuration of the model.

    Returns:
        The cosine for each dimension of a head, (B, T, 1, H) float32; 1 for dimensions that are not
        rotated.
        The sine for each dimension of a head, (B, T, 1, H) float32, negative for the first half of
        the rotated dimensions; 0 for dimensions that are not rotated.
    """
    pair_frequencies = config.rope.frequencies(config.head_dim)
    attention_factor = config.rope.attention_factor
    angles = positions[:, :, None, None].astype(jnp.float32) * pair_frequencies
    cos = jnp.cos(angles) * attention_factor
    sin = jnp.sin(angles) * attention_factor
    zeros_of_unrotated_dims = jnp.zeros(
        (*angles.shape[:3], config.head_dim - 2 * len(pair_frequencies))
    )
    cos_of_all_dims = jnp.concatenate([cos, cos, 1 + zeros_of_unrotated_dims], -1)
    sin_of_all_dims = jnp.concatenate([-sin, sin, zeros_of_unrotated_dims], -1)
    return cos_of_all_dims, sin_of_all_dims


def rotate(x: Array, cos_and_sin: tuple[Array, Array], config: ModelConfig) -> Array:
    """Applies the rotary embedding to queries or keys.

    Some models rotate only the first dimensions of every head. If r dimensions are rotated,
    dimensions i and i + r/2 form a pair, as in transformers.

    Args:
        x: The queries or keys, (B, T, N heads, H head size).
        cos_and_sin: The cosines and sines from `rotary_table`.
        config: The configuration of the model.

    Returns:
        The rotated queries or keys, (B, T, N, H) float32.
    """
    cos, sin = cos_and_sin
    rotated_pair_count = len(config.rope.frequencies(config.head_dim))
    swapped_values = lax.platform_dependent(
        x,
        tpu=partial(swap_pairs_on_tpu, rotated_pair_count),
        default=partial(swap_pairs, rotated_pair_count),
    )
    return x.astype(jnp.float32) * cos + swapped_values * sin


def swap_pairs(pair_count: int, x: Array) -> Array:
    """Swaps the two dimensions of every pair that `rotate` rotates, i and i + `pair_count`.

    Args:
        pair_count: The number of pairs of rotated dimensions.
        x: The queries or keys, (B, T, N heads, H head size).

    Returns:
        The swapped values, (B, T, N, H) float32; 0 for dimensions that are not rotated.
    """
    first_values_of_pairs, second_values_of_pairs, unrotated_values = jnp.split(
        x.astype(jnp.float32), [pair_count, 2 * pair_count], axis=-1
    )
    return jnp.concatenate(
        [second_values_of_pairs, first_values_of_pairs, jnp.zeros_like(unrotated_values)], axis=-1
    )


def swap_pairs_on_tpu(pair_count: int, x: Array) -> Array:
    """Swaps the two dimensions of every pair that `rotate` rotates, by a matrix product.

    The second factor of the product is a permutation matrix, so the result is exact and equals the
    result of `swap_pairs`. On TPUs the product is faster, because XLA can fuse it with other
    operations. `swap_pairs` splits each head into halves, and an array of halves would use only
    half of each register and half of the memory that it occupies.

    Args:
        pair_count: The number of pairs of rotated dimensions.
        x: The queries or keys, (B, T, N heads, H head size).

    Returns:
        The swapped values, (B, T, N, H) float32; 0 for dimensions that are not rotated.
    """
    head_size = x.shape[-1]
    permutation_matrix = np.eye(head_size, k=pair_count) + np.eye(head_size, k=-pair_count)
    permutation_matrix[2 * pair_count :] = 0
    permutation_matrix[:, 2 * pair_count :] = 0
    return einsum("BTNH,HI->BTNI", x, jnp.asarray(permutation_matrix, x.dtype))
