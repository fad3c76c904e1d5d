"""A decoder is a stack of layers as pure functions of their parameters.

Layers are of one type or of a few. Their parameters are stacked by type, and all layers run in one
loop. The model's file decides what a layer computes.
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
from activation_extraction.model.layers import STACKS, ParamPath, from_bits, rotary_table, to_bits
from activation_extraction.model.mesh import Layout
from activation_extraction.model.model_config import ModelConfig

TOKENS_AT_ONCE = 2048  # so many are fastest on one CPU, whose caches can hold them

Layers = tuple[Any, Any]  # the layers' stacked parameters, and which of them have a window
Keep = Callable[[dict[str, Any]], Any]  # picks what is kept of a layer's intermediates


@dataclass(frozen=True)
class Decoder:
    """The layers of a model, which run with parameters that are passed in.

    modules: type of layer -> its module, (x, rotary, segment_ids, slides) -> (x, its intermediates
    by name), where `slides` says whether the layer has a window; it is None in a model without
    windows. The stacked parameters of a model with one type of layer are those of one layer with a
    leading axis named "layers". With several types they are a dict: type -> the same for its
    layers.
    """

    config: ModelConfig
    modules: Mapping[str, Any]

    @property
    def mixed(self) -> bool:
        return len(self.modules) > 1

    def init(self, _: Array, length: int, stages: int = 1) -> Any:
        """Returns parameters of `length` layers, and of as many of the same types for each stage.

        They are zeros, so the random key is not used.
        """
        types, stacks = self.config.layer_types[:length], {}
        for type_ in set(types):

            def stack(box: Any, count: int = stages * types.count(type_)) -> Any:
                zeros = jnp.zeros((count, *box.value.shape), box.value.dtype)
                return box.replace(value=zeros, names=("layers", *box.names))

            boxes = self.parameters(type_).items()
            stacks[type_] = unflatten_dict({path: stack(box) for path, box in boxes})
        return stacks if self.mixed else stacks[types[0]]

    def _example(self) -> tuple[Any, ...]:
        """Returns inputs of a layer's module for one token; only their shapes and types matter."""
        nothing = jnp.zeros((1, 1), jnp.int32)
        dtype = self.modules[self.config.layer_types[0]].dtype
        x = jnp.zeros((1, 1, self.config.hidden_size), dtype)
        sliding = self.config.sliding(range(1))
        slides = None if sliding is None else sliding[0]
        return x, rotary_table(nothing, self.config), nothing, slides

    def stacked(self, params: Any) -> Layers:
        """Returns the layers that have these stacked parameters, from the first layer on."""
        return params, self.config.sliding(range(self._count(params)))

    def _count(self, params: Any) -> int:
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
        """Runs `body(layer_k, carry, per_layer[k]) -> carry` over the layers as one XLA loop.

        `layer_k(x, rotary, segment_ids)` is layer k with its parameters; it returns the stream and
        what `keep` makes of its intermediates. Returns the last carry.
        """
        params, slides = layers
        types = self.config.layer_types[: self._count(params)]
        stacks = params if self.mixed else {types[0]: params}
        apart = {type_: self._apart(type_, stack) for type_, stack in stacks.items()}
        # Of every layer, the number of its stack and its row there; out of a single stack, the loop
        # itself takes what does not stay.
        numbers = np.array([*map(sorted(stacks).index, types)], np.int32)
        rows = np.array([types[:layer].count(type_) for layer, type_ in enumerate(types)], np.int32)
        taken = None if self.mixed else apart[types[0]][1]

        def step(carry: Any, xs: Any) -> tuple[Any, None]:
            number, row, taken, slides, per_layer = xs

            def run(type_: str, *inputs: Any) -> Any:
                stay, others = apart[type_]
                take = partial(jax.lax.dynamic_index_in_dim, index=row, keepdims=False)
                own = jax.tree.map(take, others) if taken is None else taken
                in_place = {path: (stack, row) for path, stack in stay.items()}
                layer = self._apply(type_, own, slides, keep, in_place)
                return in_groups(layer, self.modules[type_])(*inputs)

            layers = [partial(run, type_) for type_ in sorted(stacks)]
            return body(partial(jax.lax.switch, number, layers), carry, per_layer), None

        return jax.lax.scan(step, carry, (numbers, rows, taken, slides, per_layer))[0]

    def _apart(self, type_: str, params: Any) -> tuple[Any, Any]:
        """Returns the stacks that a layer reads in place, those of experts, and the others.

        A loop would copy what it takes out of a stack. Where weights are gathered for each layer,
        or each stage of a pipeline has its own, none stay.
        """
        boxes, flat = self.parameters(type_), flatten_dict(params)
        in_place = self.modules[type_].layout.size("fsdp", "pipeline") == 1
        stay = [path for path, box in boxes.items() if in_place and "experts" in box.names]
        stacks = {path: flat.pop(path) for path in stay}
        return stacks, unflatten_dict(flat)

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
        module, boxes = self.modules[type_], self.parameters(type_)
        gathered = {
            path: from_bits(module.layout.gather(weight, boxes[path].names))
            for path, weight in flatten_dict(params).items()
        }
        variables = {"params": unflatten_dict(gathered), STACKS: unflatten_dict(in_place)}

        def layer(*inputs: Any) -> tuple[Array, Any]:
            x, out = module.apply(variables, *inputs, slides)
            return x, keep(out)

        return layer


@partial(jax.jit, static_argnums=0)  # jit traces it only once
def _init(module: nn.Module, key: Array, *example: Any) -> Any:
    return module.init(key, *example)["params"]


def stage_length(types: Sequence[str], stages: int) -> int:
    """Returns the layers per pipeline stage with which all stages have the same sequence of types.

    types: of the layers that run. The last stages may be filled up. Raises InputError if some stage
    would have to be filled up completely.
    """
    count = len(types)
    shortest = -(-count // stages)
    for length in range(shortest, count + 1):
        repeats = all(type_ == types[layer % length] for layer, type_ in enumerate(types))
        if repeats and -(-count // length) == -(-count // shortest):
            return length
    runs = [f"{len([*group])} {type_}" for type_, group in groupby(types)]
    found = ", ".join(runs[:6]) + (", ..." if len(runs) > 6 else "")
    raise InputError(
        f"--mesh_shape: {stages} pipeline stages cannot have the same sequence of layers: layers 0 "
        f"to {count - 1} are {found}; choose another number of stages, or a mesh without the axis "
        "pipeline"
    )


def intermediate(out: dict[str, Any], name: str) -> Array | None:
    """Returns one of a layer's intermediates by its dotted name; None if it has none so named."""
    value = flatten_dict(out, sep=".").get(name)
    return value() if callable(value) else value


def rows_at_once(layout: Layout, rows: int, length: int) -> int:
    """Returns how many rows of `length` tokens go through a layer together; it divides `rows`.

    All rows do on anything but a single CPU device.
    """
    mesh = layout.mesh
    if mesh is None or mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return rows
    fitting = max(TOKENS_AT_ONCE // length, 1)
    return max(size for size in range(1, min(fitting, rows) + 1) if rows % size == 0)


def in_groups(layer: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Returns `layer`, run on a group of rows at a time where that is faster (see `rows_at_once`).

    At the end of the data, some groups are nothing but padding, and none of it is computed: they
    keep their x, and their other arrays are zeros.

    layer: (x, rotary, segment_ids) -> (x, arrays (B, T, ...) that are not two-byte floating-point
    numbers). module: gives the layout and the dtype.
    """

    def compute(x: Array, *others: Any) -> Any:
        x, kept = layer(from_bits(x, module.dtype), *others)
        return to_bits(x), kept

    def skip(x: Array, *others: Any) -> Any:
        _, shapes = jax.eval_shape(compute, x, *others)
        return x, jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)

    def group(inputs: Any) -> Any:
        return jax.lax.cond(inputs[-1].any(), compute, skip, *inputs)

    def apply(x: Array, *others: Any) -> Any:
        rows, length = x.shape[:2]
        size = rows_at_once(module.layout, rows, length)
        if size == rows:
            return layer(x, *others)
        groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (to_bits(x), *others))
        x, kept = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(group, groups))
        return from_bits(x, module.dtype), kept

    return apply
