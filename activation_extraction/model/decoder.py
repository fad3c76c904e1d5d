"""A decoder runs a stack of layers, as pure functions of their parameters, in one loop.

Layers are of one type or of a few types. Their parameters are stacked by type, so that the loop
takes those of one layer after the other. qwen2_jax.py decides what a layer computes.

Letters: B rows, T tokens per row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from activation_extraction.common.errors import InputError
from activation_extraction.model.layers import rotary_table
from activation_extraction.model.mesh import Layout
from activation_extraction.model.model_config import ModelConfig
from activation_extraction.model.numerics import from_bits, to_bits
from activation_extraction.model.parameters import STACKS, ParamPath

TOKENS_AT_ONCE = 2048  # the fastest number on one CPU, whose caches can hold them

# The stacked parameters of some layers; and for each layer whether it has a window, bool, or None
# in a model without windows.
Layers = tuple[Any, Any]
# Maps the intermediates of a layer to those that are kept, as a pytree of arrays.
Keep = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Decoder:
    """The layers of a model, which run with parameters that are passed in.

    The stacked parameters of a model with one type of layer are those of one layer with a leading
    axis named "layers". With several types they are a dict: type -> the same for its layers.

    Attributes:
        config: The configuration of the model.
        modules: Type of layer -> its module, which maps (x, rotary, segment_ids, slides) to (x, the
            intermediates by name). `slides` says whether the layer has a window; it is None in a
            model without windows.
    """

    config: ModelConfig
    modules: Mapping[str, Any]

    @property
    def mixed(self) -> bool:
        """Whether the layers are of several types."""
        return len(self.modules) > 1

    def init(self, _: Array, length: int, stages: int = 1) -> Any:
        """Returns zeros as the parameters of layers, with their logical axes.

        Args:
            length: The number of layers in a pipeline stage. All stages have the same types.
            stages: The number of pipeline stages.
        """
        types = self.config.layer_types[:length]
        stacks = {}
        for type_ in set(types):
            count = stages * types.count(type_)
            boxes = self.parameters(type_).items()
            stacks[type_] = unflatten_dict({path: _stacked(box, count) for path, box in boxes})
        return stacks if self.mixed else stacks[types[0]]

    def _example(self) -> tuple[Any, ...]:
        """Returns inputs of a layer's module for one token; only their shapes and dtypes matter."""
        nothing = jnp.zeros((1, 1), jnp.int32)
        dtype = self.modules[self.config.layer_types[0]].dtype
        x = jnp.zeros((1, 1, self.config.hidden_size), dtype)
        slides_by_layer = self.config.sliding(range(1))
        slides = None if slides_by_layer is None else slides_by_layer[0]
        return x, rotary_table(nothing, self.config), nothing, slides

    def stacked(self, params: Any) -> Layers:
        """Returns the first layers of the model, with these stacked parameters."""
        return params, self.config.sliding(range(self._count(params)))

    def _count(self, params: Any) -> int:
        """Returns the number of layers that have these stacked parameters."""
        stacks = params.values() if self.mixed else [params]
        return sum(len(jax.tree.leaves(stack)[0]) for stack in stacks)

    def parameters(self, type_: str) -> dict[ParamPath, Any]:
        """Returns path -> shape and logical axes for the parameters of one layer of this type."""
        module = self.modules[type_].clone(layout=Layout())
        boxes = jax.eval_shape(lambda: _init(module, jax.random.key(0), *self._example()))
        return flatten_dict(boxes)

    def scan(
        self,
        layers: Layers,
        body: Callable,
        carry: Any,
        per_layer: Any = None,
        keep: Keep = lambda _: None,
    ) -> Any:
        """Runs `body` over the layers, as one loop of XLA.

        Args:
            layers: The layers; see `stacked`.
            body: Maps (layer, carry, per_layer[k]) to the next carry, where `layer` is layer k with
                its parameters: it maps (x, rotary, segment_ids) to (x, the result of `keep`).
            carry: The first carry.
            per_layer: A pytree of arrays with one entry per layer; None if `body` needs none.
            keep: Picks what is kept of a layer's intermediates.

        Returns:
            The last carry.
        """
        params, slides = layers
        types = self.config.layer_types[: self._count(params)]
        params_by_type = params if self.mixed else {types[0]: params}
        names = sorted(params_by_type)
        separated = {
            type_: self._separate(type_, stacks) for type_, stacks in params_by_type.items()
        }
        # For every layer, the number of its type and its row in the stacks of that type.
        numbers = np.array([names.index(type_) for type_ in types], np.int32)
        rows = np.array([types[:layer].count(type_) for layer, type_ in enumerate(types)], np.int32)
        # With a single type, the loop itself takes a layer's parameters out of the stacks.
        copied_stacks = None if self.mixed else separated[types[0]][1]

        def step(carry: Any, xs: Any) -> tuple[Any, None]:
            number, row, copied, slides, per_layer = xs

            def run(type_: str, *inputs: Any) -> Any:
                stacks_in_place, stacks = separated[type_]
                params = copied
                if params is None:
                    take = partial(jax.lax.dynamic_index_in_dim, index=row, keepdims=False)
                    params = jax.tree.map(take, stacks)
                in_place = {path: (stack, row) for path, stack in stacks_in_place.items()}
                layer = self._apply(type_, params, slides, keep, in_place)
                return in_groups(layer, self.modules[type_])(*inputs)

            branches = [partial(run, type_) for type_ in names]
            layer = partial(jax.lax.switch, number, branches)
            return body(layer, carry, per_layer), None

        xs = numbers, rows, copied_stacks, slides, per_layer
        carry, _ = jax.lax.scan(step, carry, xs)
        return carry

    def _separate(self, type_: str, params: Any) -> tuple[dict[ParamPath, Array], Any]:
        """Separates the stacks that layers read in place, which are those of experts.

        A loop copies what it takes out of a stack. Nothing is read in place if weights are gathered
        for each layer, or if each stage of a pipeline has its own.

        Args:
            type_: The type of the layers.
            params: Their stacked parameters.

        Returns:
            Path -> stack that is read in place, and the other stacks as a nested dict.
        """
        stacks = flatten_dict(params)
        in_place = {}
        if self.modules[type_].layout.size("fsdp", "pipeline") == 1:
            for path, box in self.parameters(type_).items():
                if "experts" in box.names:
                    in_place[path] = stacks.pop(path)
        return in_place, unflatten_dict(stacks)

    def _apply(
        self,
        type_: str,
        params: Any,
        slides: Any,
        keep: Keep,
        in_place: Mapping[ParamPath, tuple[Array, Array]],
    ) -> Callable:
        """Returns a layer as a function (x, rotary, segment_ids) -> (x, result of `keep`).

        Args:
            type_: The type of the layer.
            params: Its parameters, without those that are read in place.
            slides: Whether the layer has a window; None in a model without windows.
            keep: Picks what is kept of the layer's intermediates.
            in_place: Path of a parameter -> the stack of all layers, and the layer's row in it.
        """
        module = self.modules[type_]
        boxes = self.parameters(type_)
        gathered = {
            path: from_bits(module.layout.gather(weight, boxes[path].names))
            for path, weight in flatten_dict(params).items()
        }
        variables = {"params": unflatten_dict(gathered), STACKS: unflatten_dict(in_place)}

        def layer(*inputs: Any) -> tuple[Array, Any]:
            x, out = module.apply(variables, *inputs, slides)
            return x, keep(out)

        return layer


def _stacked(box: Any, count: int) -> Any:
    """Returns zeros for the parameters of several layers.

    Args:
        box: The shape and the logical axes of the parameter of one layer.
        count: The number of layers.
    """
    zeros = jnp.zeros((count, *box.value.shape), box.value.dtype)
    return box.replace(value=zeros, names=("layers", *box.names))


@partial(jax.jit, static_argnums=0)  # jit traces it only once
def _init(module: nn.Module, key: Array, *example: Any) -> Any:
    return module.init(key, *example)["params"]


def stage_length(types: Sequence[str], stages: int) -> int:
    """Returns the number of layers per pipeline stage for which all stages have the same types.

    Layers of zeros fill up the last stages.

    Args:
        types: The types of the layers that run.
        stages: The number of stages.

    Raises:
        InputError: Every such number would leave a stage without any layer.
    """
    count = len(types)
    shortest = -(-count // stages)
    for length in range(shortest, count + 1):
        repeats = all(type_ == types[layer % length] for layer, type_ in enumerate(types))
        if repeats and -(-count // length) == -(-count // shortest):
            return length
    runs = [f"{len([*group])} {type_}" for type_, group in groupby(types)]
    sequence = ", ".join(runs[:6]) + (", ..." if len(runs) > 6 else "")
    raise InputError(
        f"--mesh_shape: {stages} pipeline stages cannot have the same sequence of layers: layers 0 "
        f"to {count - 1} are {sequence}; choose another number of stages, or a mesh without the "
        "axis pipeline"
    )


def intermediate(out: dict[str, Any], name: str) -> Array | None:
    """Returns one of a layer's intermediates.

    Args:
        out: The intermediates of the layer, nested by module.
        name: The dotted path of the intermediate, such as "attn.q": the names of the modules that
            contain it, then its own name.

    Returns:
        The array; None if the layer has no such intermediate.
    """
    value = flatten_dict(out, sep=".").get(name)
    return value() if callable(value) else value


def rows_at_once(layout: Layout, rows: int, length: int) -> int:
    """Returns how many rows go through a layer together, a divisor of `rows`.

    All rows do, except on a single CPU device.

    Args:
        layout: The mesh.
        rows: The number of rows.
        length: The tokens per row.
    """
    mesh = layout.mesh
    if mesh is None or mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return rows
    fitting = max(TOKENS_AT_ONCE // length, 1)
    return max(size for size in range(1, min(fitting, rows) + 1) if rows % size == 0)


def in_groups(layer: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Returns a layer that runs on a group of rows at a time, if that is faster.

    See `rows_at_once` for the size of a group. Groups of nothing but padding, as at the end of the
    data, are not computed: they keep their x, and their other arrays are zeros.

    Args:
        layer: Maps (x, rotary, segment_ids) to (x, a pytree of arrays (B, T, ...) of dtypes other
            than bfloat16 and float16).
        module: The module of the layer, which has the layout and the dtype.
    """

    def compute(bits: Array, rotary: Any, segment_ids: Array) -> Any:
        x, kept = layer(from_bits(bits, module.dtype), rotary, segment_ids)
        return to_bits(x), kept

    def skip(bits: Array, rotary: Any, segment_ids: Array) -> Any:
        _, shapes = jax.eval_shape(compute, bits, rotary, segment_ids)
        return bits, jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)

    def run_group(group: Any) -> Any:
        _, _, segment_ids = group
        return jax.lax.cond(segment_ids.any(), compute, skip, *group)

    def apply(x: Array, rotary: Any, segment_ids: Array) -> Any:
        rows, length = x.shape[:2]
        size = rows_at_once(module.layout, rows, length)
        if size == rows:
            return layer(x, rotary, segment_ids)
        arrays = to_bits(x), rotary, segment_ids
        groups = jax.tree.map(lambda array: array.reshape(-1, size, *array.shape[1:]), arrays)
        results = jax.lax.map(run_group, groups)
        bits, kept = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), results)
        return from_bits(bits, module.dtype), kept

    return apply
