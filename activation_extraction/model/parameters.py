"""Declares the parameters of Flax modules by letters, one letter for each axis.

A letter gives the size of the axis (from the configuration) and its logical axis (from
LOGICAL_AXES), as in Flax's partitioning. So the letters of a parameter determine its shape and how
it is split over devices. weights.py reads the values of parameters from a checkpoint, and mesh.py
maps logical axes to the axes of the mesh. qwen2_jax.py and delta_net.py explain the letters.
"""

import math
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import Array

from activation_extraction.model.model_config import ModelConfig
from activation_extraction.model.numerics import from_bits

# Letter of an axis of a weight -> its logical axis (see mesh.RULES).
LOGICAL_AXES = {
    "D": "embed",
    "N": "heads",
    "Q": "heads",  # size: the number of heads, or twice that if q_proj computes gates as well
    "K": "kv_heads",
    "H": "head_dim",
    "F": "mlp",
    "E": "experts",
    "M": "mlp",  # width of a routed expert
    "P": "mlp",  # width of the shared expert
    "R": "router",
    "U": "one",
    "V": "vocab",
    # The axes of a gated delta net follow.
    "J": "key_heads",
    "G": "head_dim",
    "C": "head_dim",
    "Z": "head_dim",
    "O": "key_heads",
    "I": "one",
    "W": "taps",
}
# Weights that are not split along the mesh axis fsdp unless they are large. Each string contains
# the letters of the axes of such a weight (see LOGICAL_AXES). Weights with one axis are never split
# along this mesh axis. Most layers begin with a product with one of these weights, so devices can
# compute this product while they gather the first weight that is split.
NOT_GATHERED = "KHD", "JGD", "RD", "UD"
# A weight in NOT_GATHERED is not split along the mesh axis fsdp if it has at most this many values.
SMALL = 2**22
# The Flax collection of variables with the weights of all layers, which `StackedWeight` reads.
STACKS = "stacks"

# The names of the modules that contain a parameter, outermost first, then the parameter's name.
ParamPath = tuple[str, ...]


def parameter(module: Any, name: str, letters: str) -> Array:
    """Declares a parameter of a module, and returns its value.

    When Flax initialises the module, the value is zeros, because the values come from a checkpoint.

    Args:
        module: The module, which has a `config` and a `dtype`.
        name: The name of the parameter in the module.
        letters: The letters of the parameter's axes, one letter for each axis, such as "KHD". They
            give its shape and its logical axes (see `LOGICAL_AXES`).

    Returns:
        The value of the parameter.
    """
    logical_axes = tuple(LOGICAL_AXES[axis_letter] for axis_letter in letters)
    parameter_shape = tuple(module.config.sizes[axis_letter] for axis_letter in letters)
    if len(letters) == 1 or (letters in NOT_GATHERED and math.prod(parameter_shape) <= SMALL):
        logical_axes = tuple(
            "hidden" if logical_axis == "embed" else logical_axis for logical_axis in logical_axes
        )
    initialize_zeros = nn.with_logical_partitioning(nn.initializers.zeros, logical_axes)
    return module.param(name, initialize_zeros, parameter_shape, module.dtype)


# A run needs the result several times. It is cached, because computing it requires tracing the
# model, which takes long.
@cache
def declared(model: nn.Module) -> Mapping[ParamPath, Any]:
    """Returns the shape and the logical axes of every parameter of a model, without allocating it.

    Args:
        model: A model without a mesh, which maps token ids, segment ids and positions to a result.

    Returns:
        A dict: path of a parameter -> box of Flax, whose attribute `names` contains the logical
        axes of the parameter, and whose attribute `value` is a `jax.ShapeDtypeStruct` with its
        shape and dtype.
    """
    abstract_token_array = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    abstract_variables = jax.eval_shape(
        lambda *x: model.init(jax.random.key(0), *x),
        abstract_token_array,
        abstract_token_array,
        abstract_token_array,
    )
    return MappingProxyType(flatten_dict(abstract_variables["params"]))


class Weight(nn.Module):
    """A module that contains a single weight and no computation. Calling it returns the weight.

    Attributes:
        config: The configuration of the model, which gives the size of each letter's axis.
        axis_letters: The letters of the weight's axes, one letter for each axis, such as "JCIW".
            They are keys of `LOGICAL_AXES`; qwen2_jax.py and delta_net.py explain them.
        dtype: The dtype of the weight.
    """

    config: ModelConfig
    axis_letters: str
    dtype: Any

    @nn.compact
    def __call__(self) -> Array:
        return parameter(self, "weight", self.axis_letters)


class StackedWeight(nn.Module):
    """A weight that can be read from a stack of the weights of all layers, without a copy.

    The program that applies the module may pass the stack as a variable of the Flax collection
    STACKS. The variable is a tuple: the weights of all layers in one array, which may be viewed as
    uint16 (see `from_bits`), and the index of this layer on the first axis of the array. Without
    such a variable, the weight is a parameter like any other.

    Attributes:
        config: The configuration of the model, which gives the size of each letter's axis.
        axis_letters: The letters of the axes of one layer's weight, one letter for each axis, such
            as "EDM". They are keys of `LOGICAL_AXES`; qwen2_jax.py and delta_net.py explain them.
        dtype: The dtype of the weight.
    """

    config: ModelConfig
    axis_letters: str
    dtype: Any

    @nn.compact
    def __call__(self) -> tuple[Array, Array]:
        """Returns an array with this layer's weight, and the index of the layer in the array.

        Returns:
            The array, (layers, *axes of one layer's weight). It contains the weights of all layers
            if the collection STACKS has a variable for this weight, otherwise the weight of this
            layer alone.
            The index of this layer on the first axis of the array, () int32. It is 0 if the array
            contains this layer alone.
        """
        if self.has_variable(STACKS, "weight"):
            stack_and_layer_index: Any = self.get_variable(STACKS, "weight")
            stack, layer_index_in_stack = stack_and_layer_index
            return from_bits(stack, self.dtype), layer_index_in_stack
        return parameter(self, "weight", self.axis_letters)[None], jnp.int32(0)
