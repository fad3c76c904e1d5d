"""The modules of every family are made of these parameters, projections, norms and rotations.

`einsum` fixes the numerics of every matrix product of the model, and `to_bits` how two-byte numbers
are moved. The letters are those of qwen2_jax.py.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import Array, lax

from activation_extraction.model.model_config import QwenConfig

LOGICAL_AXES = {
    "D": "embed",
    "N": "heads",
    "Q": "heads",
    "K": "kv_heads",
    "H": "head_dim",
    "F": "mlp",
    "E": "experts",
    "M": "mlp",  # of an expert
    "P": "mlp",  # of the expert that all tokens share
    "R": "router",
    "U": "one",
    "V": "vocab",
    "J": "key_heads",
    "G": "head_dim",
    "C": "head_dim",
    "Z": "head_dim",
    "O": "key_heads",
    "I": "one",
    "W": "taps",
}
STREAM = "batch", "sequence", "hidden"  # logical axes of the residual stream
# A module's intermediates by name; those of its submodules are nested. An intermediate that is a
# function is computed only if it is called.
Out = dict[str, Any]


def einsum(equation: str, x: Array, y: Array) -> Array:
    """Does what `jnp.einsum` does, but accumulates in float32 and returns float32.

    float32 operands are multiplied as such: TPUs and GPUs would otherwise round them to bfloat16 or
    TF32, which is not what somebody who asked for float32 expects.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)


def to_bits(x: Array) -> Array:
    """Returns a two-byte type as the uint16 with the same bits, anything else unchanged.

    XLA has no slices, gathers or updates of bfloat16 on the CPU: it widens whole arrays to float32
    for them, in every step. So arrays that are only moved are moved as bits.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def from_bits(x: Array, dtype: Any = jnp.bfloat16) -> Array:
    """Returns uint16 bits as `dtype`, anything else unchanged."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def parameter(module: Any, name: str, letters: str) -> Array:
    """Declares a weight; its shape and logical axes follow from its letters.

    Its values come from a checkpoint: `init` gives zeros.
    """
    axes = tuple(LOGICAL_AXES[letter] for letter in letters)
    shape = tuple(module.config.sizes[letter] for letter in letters)
    zeros = nn.with_logical_partitioning(nn.initializers.zeros, axes)
    return module.param(name, zeros, shape, module.dtype)


@cache  # tracing takes a while, and a run calls this several times
def declared(model: nn.Module) -> Mapping[tuple[str, ...], Any]:
    """Returns path -> shape and logical axes for every parameter of a model without a mesh.

    The model takes token ids, segment ids and positions.
    """
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    abstract = jax.eval_shape(lambda *x: model.init(jax.random.key(0), *x), tokens, tokens, tokens)
    return MappingProxyType(flatten_dict(abstract["params"]))


class Linear(nn.Module):
    """A projection, named by its letters: `D->NH` maps (B, T, D) to (B, T, N, H).

    The weight has the checkpoint's orientation, output axes first. Products accumulate in float32,
    the bias is added in float32, and so is the result: the caller rounds once, when it stores it.
    """

    config: QwenConfig
    mapping: str
    use_bias: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        inputs, outputs = self.mapping.split("->")
        weight = parameter(self, "weight", outputs + inputs)
        y = einsum(f"BT{inputs},{outputs}{inputs}->BT{outputs}", x, weight)
        if self.use_bias:
            y += parameter(self, "bias", outputs).astype(jnp.float32)
        return y


class RMSNorm(nn.Module):
    """The root mean square norm (arXiv:1910.07467) over the axis `over`.

    It is computed in float32; `out` is rounded once, at the end, unless it is to stay `wide`. Some
    families store the weights less 1.
    """

    config: QwenConfig
    dtype: Any = jnp.float32
    over: str = "D"
    wide: bool = False

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Out]:
        scale = from_bits(parameter(self, "weight", self.over))
        x = x.astype(jnp.float32)
        inverse_rms = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        normalized = x * inverse_rms
        out = normalized * (scale.astype(jnp.float32) + self.config.norm_offset)
        out = out if self.wide else out.astype(self.dtype)
        return out, {"normalized": normalized, "out": out}


def rotary_table(positions: Array, config: QwenConfig) -> tuple[Array, Array]:
    """Returns the cosine and sine of the rotary embedding, both times the attention factor.

    positions: (B, T) int32. The two arrays are float32 (B, T, 1, H/2), the 1 standing for heads.
    """
    rope, frequencies = config.rope, config.rope.frequencies(config.head_dim)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: Array, rotary: tuple[Array, Array]) -> Array:
    """Rotates (B, T, heads, H) float32; dimension i pairs with i + H/2, as in Hugging Face.

    If only a share of the dimensions is rotated, that share is H here, and the others stay.
    """
    cos, sin = rotary
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
