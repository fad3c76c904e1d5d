"""A stack of equal layers as pure functions of their parameters.

The parameters of whole layers are stacked and run in one loop; a layer of which only a part is
needed has parameters of its own. What a layer computes is the model file's part.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from activation_extraction.model.bits import from_bits
from activation_extraction.model.groups import in_groups
from activation_extraction.model.mesh import Layout
from activation_extraction.model.needed import needed_inputs

Path = tuple[str, ...]  # of a parameter
Layers = tuple[Any, Any]  # their stacked parameters, and what `Decoder.sliding` says of them
Keep = Callable[[dict[str, Any]], Any]  # what is to be kept of a layer's intermediates


@dataclass(frozen=True)
class Decoder:
    """layer: the module, (x, rotary, segment_ids, slides) -> (x, its intermediates by name), where
    `slides` says whether the layer has a window; example: smallest inputs, without `slides`;
    sliding: says which layers of a range have a window, None if no layer of the model has one."""

    layer: Any
    example: Callable[[], tuple[Any, ...]]
    sliding: Callable[[range], np.ndarray | None]

    def init(self, key: Array, length: int) -> Any:
        """Parameters of `length` layers: those of one with a leading axis named "layers"."""
        stacked = jax.vmap(self._init_layer)(jax.random.split(key, length))
        return nn.meta.add_axis(stacked, 0, {nn.meta.PARTITION_NAME: "layers"})

    def init_part(self, key: Array, paths: frozenset[Path]) -> Any:
        """Parameters of one layer, those at `paths` alone."""
        every = flatten_dict(self._init_layer(key))
        return unflatten_dict({path: every[path] for path in paths})

    def _init_layer(self, key: Array) -> Any:
        return self.layer.clone(layout=Layout()).init(key, *self._example())["params"]

    def _example(self) -> tuple[Any, ...]:
        return *self.example(), self._slides(0)

    def _slides(self, layer: int) -> Any:
        sliding = self.sliding(range(layer, layer + 1))
        return None if sliding is None else sliding[0]

    def of(self, params: Any) -> Layers:
        """The layers that have these stacked parameters, from the first layer on."""
        return params, self.sliding(range(len(jax.tree.leaves(params)[0])))

    def _boxes(self) -> Any:
        """Shapes and logical axes of one layer's parameters."""
        return jax.eval_shape(self._init_layer, jax.random.key(0))

    def scan(
        self,
        layers: Layers,
        body: Callable,
        carry: Any,
        per_layer: Any = None,
        keep: Keep = lambda _: None,
    ) -> Any:
        """Runs `body(layer_k, carry, per_layer[k]) -> carry` over the layers, as one XLA loop.

        `layer_k(x, rotary, segment_ids)` is layer k with its parameters; it returns the stream and
        what `keep` makes of its intermediates. Returns the last carry.
        """

        def step(carry: Any, xs: Any) -> tuple[Any, None]:
            (params, slides), per_layer = xs
            layer = self._in_groups(self._apply(params, slides, keep))
            return body(layer, carry, per_layer), None

        return jax.lax.scan(step, carry, (layers, per_layer))[0]

    def part(self, number: int, params: Any, keep: Keep, *inputs: Any) -> Any:
        """What `keep` makes of the intermediates of a layer that has only some of its parameters.

        `keep` must not depend on the others (see `paths_for`): zeros stand for them, and what they
        enter is in no compiled program.
        """
        shapes = flatten_dict(nn.meta.unbox(self._boxes()))
        every = {path: jnp.zeros(like.shape, like.dtype) for path, like in shapes.items()}
        own = unflatten_dict(every | flatten_dict(params))
        layer = self._apply(own, self._slides(number), keep)

        def kept(x: Array, *others: Any) -> tuple[Array, Any]:
            return x, layer(x, *others)[1]

        return self._in_groups(kept)(*inputs)[1]

    def _in_groups(self, layer: Callable) -> Callable:
        return in_groups(layer, self.layer.layout, self.layer.dtype)

    def _apply(self, params: Any, slides: Any, keep: Keep) -> Callable:
        """The layer with these parameters."""
        axes = jax.tree.map(lambda box: box.names, self._boxes(), is_leaf=_is_boxed)
        gathered = jax.tree.map(self.layer.layout.gather, params, axes)
        own = {"params": jax.tree.map(from_bits, gathered)}

        def layer(*inputs: Any) -> tuple[Array, Any]:
            x, out = self.layer.apply(own, *inputs, slides)
            return x, keep(out)

        return layer

    def paths_for(self, values: Iterable[str]) -> frozenset[Path]:
        """The parameters that these intermediates of a layer depend on."""
        params = flatten_dict(nn.meta.unbox(self._boxes()))
        layer = self.layer.clone(layout=Layout())

        def compute(params: Any) -> list[Array]:
            _, out = layer.apply({"params": unflatten_dict(params)}, *self._example())
            return [intermediate(out, value) for value in values]

        needed = needed_inputs(compute, params)
        return frozenset(path for path, used in zip(sorted(params), needed, strict=True) if used)

    def matrix_sizes(self) -> dict[Path, int]:
        """The weights of one layer in each parameter that is a matrix, 0 for the others."""
        boxes = flatten_dict(self._boxes(), is_leaf=lambda _, x: _is_boxed(x))
        return {
            path: math.prod(box.value.shape) if path[-1] == "weight" and len(box.names) > 1 else 0
            for path, box in boxes.items()
        }


def intermediate(out: dict[str, Any], name: str) -> Array:
    """One of a layer's intermediates, by its dotted name."""
    value = flatten_dict(out, sep=".")[name]
    return value() if callable(value) else value


def _is_boxed(x: Any) -> bool:
    return isinstance(x, nn.LogicallyPartitioned)
