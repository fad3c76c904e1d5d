"""A module declares each of its parameters once, by letters.

The letters of a weight give its shape (the sizes of the configuration) and its logical axes
(`LOGICAL_AXES`). weights.py reads the values from a checkpoint, and mesh.py splits them.
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

# Letter -> logical axis. qwen2_jax.py and delta_net.py explain the letters.
LOGICAL_AXES = {
    "D": "embed",
    "N": "heads",
    "Q": "heads",  # with a gate for each head, if the model has gates
    "K": "kv_heads",
    "H": "head_dim",
    "F": "mlp",
    "E": "experts",
    "M": "mlp",  # of an expert
    "P": "mlp",  # of the expert that all tokens share
    "R": "router",
    "U": "one",
    "V": "vocab",
    # Of the gated delta net:
    "J": "key_heads",
    "G": "head_dim",
    "C": "head_dim",
    "Z": "head_dim",
    "O": "key_heads",
    "I": "one",
    "W": "taps",
}
# Weights with these letters are not split along fsdp if they are small, like weights of one axis.
# Most layers begin with them, so that there is a product to compute while the first large weight is
# gathered.
NOT_GATHERED = "KHD", "JGD", "RD", "UD"
SMALL = 2**22  # the largest number of values of such a weight
# The collection of variables in which modules find the weights of all layers; see `StackedWeight`.
STACKS = "stacks"

ParamPath = tuple[str, ...]  # the names of modules around a parameter, and its own name


def parameter(module: Any, name: str, letters: str) -> Array:
    """Declares a weight of a module; `init` gives zeros, since the values come from a checkpoint.

    Args:
        module: The module, which has a `config` and a `dtype`.
        name: The name of the parameter in the module.
        letters: The letters of its axes, from which its shape and its logical axes follow.
    """
    axes = tuple(LOGICAL_AXES[letter] for letter in letters)
    shape = tuple(module.config.sizes[letter] for letter in letters)
    if len(letters) == 1 or (letters in NOT_GATHERED and math.prod(shape) <= SMALL):
        axes = tuple("hidden" if axis == "embed" else axis for axis in axes)
    zeros = nn.with_logical_partitioning(nn.initializers.zeros, axes)
    return module.param(name, zeros, shape, module.dtype)


@cache  # tracing takes a while, and a run calls this several times
def declared(model: nn.Module) -> Mapping[ParamPath, Any]:
    """Returns path -> shape and logical axes for every parameter of a model.

    Args:
        model: A model without a mesh, which takes token ids, segment ids and positions.
    """
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    abstract = jax.eval_shape(lambda *x: model.init(jax.random.key(0), *x), tokens, tokens, tokens)
    return MappingProxyType(flatten_dict(abstract["params"]))


class Weight(nn.Module):
    """A weight that a module uses otherwise than as a projection (see `Linear`).

    Attributes:
        config: The configuration of the model.
        letters: The letters of its axes.
        dtype: The dtype of its values.
    """

    config: ModelConfig
    letters: str
    dtype: Any

    @nn.compact
    def __call__(self) -> Array:
        return parameter(self, "weight", self.letters)


class StackedWeight(nn.Module):
    """A weight that is read in place from the stack of all layers, if the caller has the stack.

    The stack is then a variable of the collection STACKS: the weights of all layers, which may be
    bits, and the number of the layer. See `Weight` for the attributes.
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
