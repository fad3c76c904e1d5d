"""The modules of every family are made of these parameters, projections, norms and rotations.

`einsum` fixes the numerics of every matrix product of the model, and `to_bits` how two-byte numbers
are moved. The letters are those of qwen2_jax.py.
"""

import math
from collections.abc import Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax import Array, lax

from activation_extraction.model.model_config import ModelConfig

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
# Like weights of one axis, these small ones are not split along fsdp: most layers begin with them,
# so there is a product to compute while the first large weight is gathered.
NOT_GATHERED = "KHD", "JGD", "RD", "UD"
SMALL = 2**22  # numbers
STACKS = "stacks"
STREAM = "batch", "sequence", "hidden"  # logical axes of the residual stream
ParamPath = tuple[str, ...]  # the path of a parameter
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


def einsum_of_parts(equation: str, x: Array, y: Array) -> Array:
    """Returns what `einsum` returns, where devices add up their parts of the result.

    Accelerators round each part to the dtype of x before they add, so that bfloat16 halves what
    they move and send. The result is rounded later anyway.
    """

    def rounded_before(x: Array, y: Array) -> Array:
        return jnp.einsum(equation, x, y, preferred_element_type=x.dtype).astype(jnp.float32)

    exact = partial(einsum, equation)
    if x.dtype == jnp.float32:
        return exact(x, y)
    return lax.platform_dependent(x, y, cpu=exact, default=rounded_before)


def to_bits(x: Array) -> Array:
    """Returns a two-byte type as the uint16 with the same bits, anything else unchanged.

    XLA has no slices, gathers or updates of bfloat16 on the CPU: it widens whole arrays to float32
    for them, in every step. So arrays that are only moved are moved as bits.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def from_bits(x: Array, dtype: Any = jnp.bfloat16) -> Array:
    """Returns uint16 bits as `dtype`, anything else unchanged."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def rounded(x: Array, dtype: Any) -> Array:
    """Rounds a product's float32 result to `dtype`, on TPUs before it leaves the product.

    Without a barrier, XLA omits rounding that float32 arithmetic follows: a TPU would move twice
    the bytes. A CPU is faster without one more pass over them.
    """

    def in_product(x: Array) -> Array:
        return lax.optimization_barrier(x.astype(dtype))

    if x.dtype == dtype:
        return x
    return lax.platform_dependent(x, tpu=in_product, default=lambda x: x.astype(dtype))


def parameter(module: Any, name: str, letters: str) -> Array:
    """Declares a weight; its shape and logical axes follow from its letters.

    Its values come from a checkpoint: `init` gives zeros.
    """
    axes = tuple(LOGICAL_AXES[letter] for letter in letters)
    shape = tuple(module.config.sizes[letter] for letter in letters)
    if len(letters) == 1 or (letters in NOT_GATHERED and math.prod(shape) <= SMALL):
        axes = tuple("hidden" if axis == "embed" else axis for axis in axes)
    zeros = nn.with_logical_partitioning(nn.initializers.zeros, axes)
    return module.param(name, zeros, shape, module.dtype)


@cache  # tracing takes a while, and a run calls this several times
def declared(model: nn.Module) -> Mapping[ParamPath, Any]:
    """Returns path -> shape and logical axes for every parameter of a model without a mesh.

    The model takes token ids, segment ids and positions.
    """
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    abstract = jax.eval_shape(lambda *x: model.init(jax.random.key(0), *x), tokens, tokens, tokens)
    return MappingProxyType(flatten_dict(abstract["params"]))


class Weight(nn.Module):
    """A weight that is used in another way than that of a `Linear`."""

    config: ModelConfig
    letters: str
    dtype: Any

    @nn.compact
    def __call__(self) -> Array:
        return parameter(self, "weight", self.letters)


class StackedWeight(nn.Module):
    """A weight that is read in its place among those of all layers, where the caller has them.

    They are then a variable of the collection STACKS: the stack, which may be bits, and the layer's
    number in it.
    """

    config: ModelConfig
    letters: str
    dtype: Any

    @nn.compact
    def __call__(self) -> tuple[Array, Array]:
        """Returns the weights of one layer or of several, layers first, and the layer's number."""
        if self.has_variable(STACKS, "weight"):
            stacked: Any = self.get_variable(STACKS, "weight")
            return from_bits(stacked[0], self.dtype), stacked[1]
        return parameter(self, "weight", self.letters)[None], jnp.int32(0)


class Linear(nn.Module):
    """A projection, named by its letters: `D->NH` maps (B, T, D) to (B, T, N, H).

    The weight has the checkpoint's orientation, output axes first. Products accumulate in float32,
    the bias is added in float32, and so is the result: the caller rounds once, when it stores it.
    split: whether each device has a part of the inputs, so that `einsum_of_parts` adds up results.
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


class RMSNorm(nn.Module):
    """The root mean square norm (arXiv:1910.07467) over the axis `over`.

    It is computed in float32; `out` is rounded once, at the end. Some families store the weights
    less 1.
    """

    config: ModelConfig
    dtype: Any = jnp.float32
    over: str = "D"

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Out]:
        scale = from_bits(parameter(self, "weight", self.over))
        x = x.astype(jnp.float32)
        inverse_rms = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        normalized = x * inverse_rms
        out = normalized * (scale.astype(jnp.float32) + self.config.norm_offset)
        out = out.astype(self.dtype)
        return out, {"normalized": normalized, "out": out}


def rotary_table(positions: Array, config: ModelConfig) -> tuple[Array, Array]:
    """Returns the cosine and sine of the rotary embedding, both times the attention factor.

    positions: (B, T) int32. The two arrays are float32 (B, T, 1, H), the 1 standing for heads. The
    sine has the sign that `rotate` needs; dimensions that are not rotated have 1 and 0.
    """
    rope, frequencies = config.rope, config.rope.frequencies(config.head_dim)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
    rest = jnp.zeros((*angles.shape[:3], config.head_dim - 2 * len(frequencies)))
    return jnp.concatenate([cos, cos, 1 + rest], -1), jnp.concatenate([-sin, sin, rest], -1)


def rotate(x: Array, rotary: tuple[Array, Array], config: ModelConfig) -> Array:
    """Rotates the first r dimensions of (B, T, heads, H), which may be all, to float32.

    Dimension i pairs with i + r/2, as in Hugging Face.
    """
    cos, sin = rotary
    half = len(config.rope.frequencies(config.head_dim))
    others = lax.platform_dependent(
        x, tpu=partial(others_of_pairs_on_tpu, half), default=partial(others_of_pairs, half)
    )
    return x.astype(jnp.float32) * cos + others * sin


def others_of_pairs(half: int, x: Array) -> Array:
    """Returns, for each dimension that is rotated, the one that it pairs with, in float32."""
    first, second, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    return jnp.concatenate([second, first, jnp.zeros_like(rest)], axis=-1)


def others_of_pairs_on_tpu(half: int, x: Array) -> Array:
    """Does the same with a matrix product, which is exact and which XLA can fuse.

    Half a head would fill only half of a TPU's register, and of what it writes.
    """
    size = x.shape[-1]
    pairs = np.eye(size, k=half) + np.eye(size, k=-half)
    pairs[2 * half :] = pairs[:, 2 * half :] = 0
    return einsum("BTNH,HI->BTNI", x, jnp.asarray(pairs, x.dtype))
