"""The parts that the layers of every model share: norm, projection and rotary embedding.

A token passes them in this order in every layer: `RMSNorm`, `Linear`, then `rotate`, and again
`Linear`. qwen2_jax.py puts them together, attention.py, experts.py and delta_net.py have what comes
between projections, and decoder.py runs the layers. numerics.py has the products, and parameters.py
declares the weights. The letters are those of qwen2_jax.py.
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
# A module's intermediates by name; those of its submodules are nested. An intermediate that is a
# function is computed only if it is called.
Out = dict[str, Any]


class RMSNorm(nn.Module):
    """The root mean square norm (arXiv:1910.07467).

    It is computed in float32, and the result is rounded once.

    Attributes:
        config: The configuration of the model, which says whether its weights are stored less 1.
        dtype: The dtype of the weights and of the result.
        over: The letter of the axis over which it is computed, the last one.
    """

    config: ModelConfig
    dtype: Any = jnp.float32
    over: str = "D"

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Out]:
        """Returns the normed array, and as intermediates `normalized` (before the weights), `out`.

        Args:
            x: The array, whose last axis is normed.
        """
        scale = from_bits(parameter(self, "weight", self.over))
        x = x.astype(jnp.float32)
        inverse_rms = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        normalized = x * inverse_rms
        out = normalized * (scale.astype(jnp.float32) + self.config.norm_offset)
        out = out.astype(self.dtype)
        return out, {"normalized": normalized, "out": out}


class Linear(nn.Module):
    """A projection, named by its letters: `D->NH` maps (B, T, D) to (B, T, N, H).

    The weight has the orientation of the checkpoint, output axes first. Products accumulate in
    float32, the bias is added in float32, and the result is float32: the caller rounds it once.

    Attributes:
        config: The configuration of the model.
        mapping: The letters of the input axes, `->`, and the letters of the output axes.
        use_bias: Whether there is a bias.
        dtype: The dtype of the weight and of the bias.
        split: Whether every device has a part of the inputs, so that results are added up.
    """

    config: ModelConfig
    mapping: str
    use_bias: bool = False
    dtype: Any = jnp.float32
    split: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        inputs, outputs = self.mapping.split("->")
        weight = parameter(self, "weight", outputs + inputs)
        product = einsum_of_parts if self.split else einsum
        y = product(f"BT{inputs},{outputs}{inputs}->BT{outputs}", x, weight)
        if self.use_bias:
            y += parameter(self, "bias", outputs).astype(jnp.float32)
        return y


def rotary_table(positions: Array, config: ModelConfig) -> tuple[Array, Array]:
    """Returns the cosine and the sine of the rotary embedding, both times the attention factor.

    The sine has the sign that `rotate` needs. Dimensions that are not rotated have 1 and 0.

    Args:
        positions: The position of every token in its sample, (B, T) int32.
        config: The configuration of the model.

    Returns:
        Two float32 arrays (B, T, 1, H), the 1 standing for heads.
    """
    rope, frequencies = config.rope, config.rope.frequencies(config.head_dim)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
    unrotated = jnp.zeros((*angles.shape[:3], config.head_dim - 2 * len(frequencies)))
    return (
        jnp.concatenate([cos, cos, 1 + unrotated], -1),
        jnp.concatenate([-sin, sin, unrotated], -1),
    )


def rotate(x: Array, rotary: tuple[Array, Array], config: ModelConfig) -> Array:
    """Rotates the first r dimensions of every head; r may be all of them.

    Dimension i pairs with i + r/2, as in Hugging Face.

    Args:
        x: Queries or keys, (B, T, heads, H).
        rotary: The result of `rotary_table`.
        config: The configuration of the model.

    Returns:
        The rotated array in float32.
    """
    cos, sin = rotary
    half = len(config.rope.frequencies(config.head_dim))
    others = lax.platform_dependent(
        x, tpu=partial(others_of_pairs_on_tpu, half), default=partial(others_of_pairs, half)
    )
    return x.astype(jnp.float32) * cos + others * sin


def others_of_pairs(half: int, x: Array) -> Array:
    """Returns for each rotated dimension the dimension that it pairs with, in float32.

    Args:
        half: Half of the number of rotated dimensions.
        x: Queries or keys, (B, T, heads, H).
    """
    first, second, unrotated = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    return jnp.concatenate([second, first, jnp.zeros_like(unrotated)], axis=-1)


def others_of_pairs_on_tpu(half: int, x: Array) -> Array:
    """Returns what `others_of_pairs` returns, by a matrix product, which is exact.

    XLA can fuse a product. Half a head would fill only half of a TPU's register, and of the memory
    that it writes.
    """
    size = x.shape[-1]
    pairs = np.eye(size, k=half) + np.eye(size, k=-half)
    pairs[2 * half :] = pairs[:, 2 * half :] = 0
    return einsum("BTNH,HI->BTNI", x, jnp.asarray(pairs, x.dtype))
