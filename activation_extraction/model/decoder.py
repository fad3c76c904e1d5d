"""Runs the layers of a model in one loop, as pure functions of their parameters.

A model has layers of one type or of a few types. The parameters of all layers of a type are
stacked, with an axis of layers first, and each iteration of the loop uses the parameters of one
layer. qwen2_jax.py defines the modules of the layers.

In this module, `cos_and_sin` is the result of `layers.rotary_table`. The path of a parameter is a
tuple: the names of the modules that contain it, outermost first, then its own name. A stack is the
array of a parameter for all layers of a type.

Letters: B rows, T tokens per row, D hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

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

# The number of tokens that go through a layer together on a CPU. A layer is fastest with this
# number, because the caches of a CPU can hold the values of so many tokens.
TOKENS_AT_ONCE = 2048

# A function that maps the intermediates of a layer, by name, to a pytree of the arrays to keep.
KeptArraysFunction = Callable[[dict[str, Any]], Any]


class StackedLayers(NamedTuple):
    """Some layers of a model, with their parameters stacked.

    Attributes:
        params: The stacked parameters of the layers, in the form that `Decoder` describes.
        windowed_layer_mask: Whether each layer's attention has a sliding window, (layers,) bool;
            None in a model without windows.
    """

    params: Any
    windowed_layer_mask: Any


@dataclass(frozen=True)
class Decoder:
    """The layers of a model, as functions of parameters that the caller passes in.

    Stacked parameters are a nested dict with the same keys as the parameters of one layer, but each
    array has an axis "layers" before its other axes. In a model with several types of layers, each
    type has a nested dict of its own: type -> the stacked parameters of the layers of this type.

    Attributes:
        config: The configuration of the model.
        module_by_layer_type: Type of layer -> its module. The module maps (x, cos_and_sin,
            segment_ids, has_window) to the residual stream after the layer and the intermediates
            by name. `has_window` tells whether the layer's attention has a sliding window, () bool;
            it is None in a model without windows.
    """

    config: ModelConfig
    module_by_layer_type: Mapping[str, Any]

    @property
    def has_several_types(self) -> bool:
        """Returns whether the model has several types of layers."""
        return len(self.module_by_layer_type) > 1

    def init(self, _: Array, length: int, stages: int = 1) -> Any:
        """Initialises the stacked parameters of all layers with zeros.

        Args:
            _: A random key, which Flax passes to every initialiser, and which zeros do not need.
            length: The number of layers in a pipeline stage. All stages have the same types of
                layers in the same order.
            stages: The number of pipeline stages.

        Returns:
            The stacked parameters: arrays whose first axis is the layer, over all stages. Each
            array is in a box of Flax, which adds its logical axes.
        """
        layer_types = self.config.layer_types[:length]
        stacked_params_by_layer_type = {}
        for layer_type in set(layer_types):
            layer_count_of_type = stages * layer_types.count(layer_type)
            stacked_zeros_by_path = {}
            for parameter_path, parameter_spec in self.parameters(layer_type).items():
                stacked_zeros_by_path[parameter_path] = _stacked_zeros(
                    parameter_spec, layer_count_of_type
                )
            stacked_params_by_layer_type[layer_type] = unflatten_dict(stacked_zeros_by_path)
        if self.has_several_types:
            return stacked_params_by_layer_type
        return stacked_params_by_layer_type[layer_types[0]]

    def _example_inputs(self) -> tuple[Any, ...]:
        """Returns inputs of a layer's module for a single token, of the right shapes and dtypes.

        Returns:
            A tuple of:
                The residual stream, (1, 1, D).
                The cosines and the sines with which the token's queries and keys are rotated, a
                tuple of two arrays (1, 1, 1, H) float32.
                The segment ids, (1, 1) int32.
                Whether the first layer's attention has a sliding window, () bool; None in a model
                without windows.
        """
        positions = jnp.zeros((1, 1), jnp.int32)
        segment_ids = jnp.zeros((1, 1), jnp.int32)
        module_dtype = self.module_by_layer_type[self.config.layer_types[0]].dtype
        x = jnp.zeros((1, 1, self.config.hidden_size), module_dtype)
        windowed_layer_mask = self.config.sliding(range(1))  # an array with one element, or None
        layer_has_window = None if windowed_layer_mask is None else windowed_layer_mask[0]
        return x, rotary_table(positions, self.config), segment_ids, layer_has_window

    def stacked(self, params: Any) -> StackedLayers:
        """Combines the stacked parameters of layers with a mask: which layers have a window.

        The result is the argument `stacked_layers` of `scan`.

        Args:
            params: The stacked parameters of the first layers of the model. The shapes of these
                arrays determine the number of layers.

        Returns:
            The stacked parameters, unchanged, and the mask, bool (layers,), which tells whether the
            attention of each layer has a sliding window; None in a model without windows.
        """
        return StackedLayers(params, self.config.sliding(range(self._count(params))))

    def _count(self, params: Any) -> int:
        """Returns the number of layers to which stacked parameters belong, from the array shapes.

        Args:
            params: The stacked parameters of layers of all types.
        """
        params_of_layer_types = params.values() if self.has_several_types else [params]
        return sum(
            len(jax.tree.leaves(params_of_layer_type)[0])
            for params_of_layer_type in params_of_layer_types
        )

    def parameters(self, layer_type: str) -> dict[ParamPath, Any]:
        """Returns the shape and the logical axes of each parameter of one layer.

        Args:
            layer_type: The type of the layer.

        Returns:
            Path of a parameter (a tuple of the names of its modules and its own name) -> Flax's box
            of its logical axes (`names`) around a `jax.ShapeDtypeStruct` (`value`).
        """
        layer_module = self.module_by_layer_type[layer_type].clone(layout=Layout())
        nested_parameter_specs = jax.eval_shape(
            lambda: _init(layer_module, jax.random.key(0), *self._example_inputs())
        )
        return flatten_dict(nested_parameter_specs)

    def scan(
        self,
        stacked_layers: StackedLayers,
        body: Callable,
        carry: Any,
        per_layer: Any = None,
        keep: KeptArraysFunction = lambda _: None,
    ) -> Any:
        """Runs layers one after the other, in a single loop of XLA with one iteration per layer.

        Each iteration computes `carry = body(apply_layer, carry, element)`. The function `body`
        decides what is passed to the layer, and what is done with the results. Its arguments are:

            apply_layer: A function that computes the layer of this iteration (see below).
            carry: The carry after the previous layer; for the first layer, the argument `carry` of
                `scan`.
            element: The entry of this layer in `per_layer`: a pytree with the same structure, whose
                arrays lack the axis of layers. None if `per_layer` is None.

        The arguments of `apply_layer(x, cos_and_sin, segment_ids)` are:

            x: The residual stream before the layer, (B, T, D).
            cos_and_sin: The cosines and sines of the rotary embedding, as `rotary_table` in
                layers.py returns them.
            segment_ids: For each token, the number of its sample in its row, from 1; 0 for padding.
                The shape is (B, T), the dtype int32.

        `apply_layer` returns a tuple of the residual stream after the layer, (B, T, D), and the
        result of `keep`.

        Args:
            stacked_layers: The stacked parameters of the layers, and the mask of the layers whose
                attention has a sliding window, as `stacked` returns them.
            body: The body of the loop, a function that maps (apply_layer, carry, element) to the
                next carry.
            carry: The carry of the loop before the first layer, a pytree of arrays.
            per_layer: A pytree of arrays, each with the layers as its first axis. None if `body`
                needs none.
            keep: A function that maps the intermediates of a layer, a dict from their names to
                arrays, to a pytree of the arrays that `apply_layer` returns with the residual
                stream. The shape of these arrays is (B, T, ...), and their dtype is neither
                bfloat16 nor float16. By default, the function returns None, so no array is kept.

        Returns:
            The carry after the last layer.
        """
        params_of_layers, windowed_layer_mask = stacked_layers
        layer_types = self.config.layer_types[: self._count(params_of_layers)]
        params_by_layer_type = (
            params_of_layers if self.has_several_types else {layer_types[0]: params_of_layers}
        )
        sorted_layer_types = sorted(params_by_layer_type)
        in_place_stacks_by_layer_type = {}
        stacks_to_slice_by_layer_type = {}
        for layer_type, stacked_params in params_by_layer_type.items():
            in_place_stack_by_param_path, nested_stacks_to_slice = self._separate(
                layer_type, stacked_params
            )
            in_place_stacks_by_layer_type[layer_type] = in_place_stack_by_param_path
            stacks_to_slice_by_layer_type[layer_type] = nested_stacks_to_slice
        # For each layer, the index of its type in `sorted_layer_types`, and its index in the stacks
        # of its type.
        layer_type_numbers = np.array(
            [sorted_layer_types.index(layer_type) for layer_type in layer_types], np.int32
        )
        stack_indices_of_layers = np.array(
            [layer_types[:layer].count(layer_type) for layer, layer_type in enumerate(layer_types)],
            np.int32,
        )
        # If all layers have one type, lax.scan slices each layer's parameters from the stacks.
        # Otherwise, `run_layer` takes them from the stacks of the layer's type.
        params_of_single_layer_type = (
            None if self.has_several_types else stacks_to_slice_by_layer_type[layer_types[0]]
        )

        def step(carry: Any, loop_element: Any) -> tuple[Any, None]:
            layer_type_number, index_in_stack, layer_params, has_window, element_of_per_layer = (
                loop_element
            )

            def run_layer(layer_type: str, *inputs: Any) -> Any:
                unstacked_params = layer_params
                if unstacked_params is None:
                    take_layer_from_stack = partial(
                        jax.lax.dynamic_index_in_dim, index=index_in_stack, keepdims=False
                    )
                    unstacked_params = jax.tree.map(
                        take_layer_from_stack, stacks_to_slice_by_layer_type[layer_type]
                    )
                stack_and_index_by_path = {
                    parameter_path: (stack, index_in_stack)
                    for parameter_path, stack in in_place_stacks_by_layer_type[layer_type].items()
                }
                apply_layer = self._apply(
                    layer_type, unstacked_params, has_window, keep, stack_and_index_by_path
                )
                return few_rows_at_once(apply_layer, self.module_by_layer_type[layer_type])(*inputs)

            branches_of_layer_types = [
                partial(run_layer, layer_type) for layer_type in sorted_layer_types
            ]
            apply_layer = partial(jax.lax.switch, layer_type_number, branches_of_layer_types)
            return body(apply_layer, carry, element_of_per_layer), None

        arrays_with_layer_axis = (
            layer_type_numbers,
            stack_indices_of_layers,
            params_of_single_layer_type,
            windowed_layer_mask,
            per_layer,
        )
        carry, _ = jax.lax.scan(step, carry, arrays_with_layer_axis)
        return carry

    def _separate(self, layer_type: str, params: Any) -> tuple[dict[ParamPath, Array], Any]:
        """Separates the stacks of parameters that layers read in place from the other stacks.

        A stack is the array of a parameter for all layers of a type. A loop copies the parameters
        of a layer out of their stacks. The weights of experts are too large to be copied, so
        layers read them in place. No stack is read in place if weights are gathered for each layer,
        or if each stage of a pipeline has its own weights.

        Args:
            layer_type: The type of the layers.
            params: The stacked parameters of all layers of this type.

        Returns:
            A tuple of:
                Path of a parameter -> its stack, for the stacks that are read in place.
                The other stacks, as a nested dict.
        """
        stack_by_param_path = flatten_dict(params)
        in_place_stack_by_param_path = {}
        if self.module_by_layer_type[layer_type].layout.size("fsdp", "pipeline") == 1:
            for parameter_path, parameter_spec in self.parameters(layer_type).items():
                if "experts" in parameter_spec.names:
                    in_place_stack_by_param_path[parameter_path] = stack_by_param_path.pop(
                        parameter_path
                    )
        return in_place_stack_by_param_path, unflatten_dict(stack_by_param_path)

    def _apply(
        self,
        layer_type: str,
        params: Any,
        has_window: Any,
        keep: KeptArraysFunction,
        stack_and_index_by_path: Mapping[ParamPath, tuple[Array, Array]],
    ) -> Callable:
        """Binds the parameters of a layer, and returns the layer as a function of its inputs.

        Most parameters are passed to this function as arrays of this layer alone. Some parameters
        are too large to be copied for each layer, such as the weights of experts (see `_separate`).
        The layer reads them from their stacks. A stack is the array of a parameter for all layers
        of the same type.

        Args:
            layer_type: The type of the layer.
            params: The parameters of the layer, as a nested dict without the parameters that the
                layer reads from stacks.
            has_window: Whether the layer's attention has a sliding window, () bool; None in a model
                without windows.
            keep: A function that maps the intermediates of the layer, by name, to a pytree of the
                arrays to keep.
            stack_and_index_by_path: The parameters that the layer reads from stacks, as a dict:
                path of a parameter -> (its stack, the index of the layer in this stack).

        Returns:
            A function with these arguments:
                x: The residual stream before the layer, (B, T, D).
                cos_and_sin: The cosines and sines of the rotary embedding (from
                    `layers.rotary_table`).
                segment_ids: The segment of each token, (B, T) int32; 0 for padding.
            It returns a tuple of:
                The residual stream after the layer, (B, T, D).
                The result of `keep`.
        """
        layer_module = self.module_by_layer_type[layer_type]
        parameter_spec_by_path = self.parameters(layer_type)
        gathered_weight_by_path = {
            parameter_path: from_bits(
                layer_module.layout.gather(weight, parameter_spec_by_path[parameter_path].names)
            )
            for parameter_path, weight in flatten_dict(params).items()
        }
        flax_variables = {
            "params": unflatten_dict(gathered_weight_by_path),
            STACKS: unflatten_dict(stack_and_index_by_path),
        }

        def layer(*inputs: Any) -> tuple[Array, Any]:
            x, intermediates = layer_module.apply(flax_variables, *inputs, has_window)
            return x, keep(intermediates)

        return layer


def _stacked_zeros(box: Any, layer_count: int) -> Any:
    """Returns zeros for one parameter of several layers, stacked in one array.

    Args:
        box: Flax's box with the shape, the dtype and the logical axes of one layer's parameter.
        layer_count: The number of layers.

    Returns:
        A box around the zeros, with the logical axis "layers" before the others.
    """
    stacked_zeros = jnp.zeros((layer_count, *box.value.shape), box.value.dtype)
    return box.replace(value=stacked_zeros, names=("layers", *box.names))


# The module is a static argument, so modules that compare equal are traced only once.
@partial(jax.jit, static_argnums=0)
def _init(module: nn.Module, key: Array, *inputs: Any) -> Any:
    return module.init(key, *inputs)["params"]


def stage_length(types: Sequence[str], stages: int) -> int:
    """Returns the number of layers in each pipeline stage.

    All stages run the same program, so the types of their layers must come in the same sequence. If
    the layers do not fill the last stages, layers of zeros are appended to the model.

    With L layers and S stages, a stage needs at least m = ceil(L / S) layers. The result is the
    smallest number n >= m that meets two conditions:

        1. With n layers per stage, all stages have the same sequence of types.
        2. As many stages contain layers of the model as with m layers per stage: ceil(L / n) equals
           ceil(L / m). So no additional stage consists only of layers of zeros.

    Args:
        types: The type of each layer that runs.
        stages: The number of stages.

    Raises:
        InputError: If no number of layers per stage meets both conditions.
    """
    layer_count = len(types)
    rounded_up_layers_per_stage = -(-layer_count // stages)
    for candidate_layers_per_stage in range(rounded_up_layers_per_stage, layer_count + 1):
        has_repeating_types = all(
            layer_type == types[layer % candidate_layers_per_stage]
            for layer, layer_type in enumerate(types)
        )
        if has_repeating_types and -(-layer_count // candidate_layers_per_stage) == -(
            -layer_count // rounded_up_layers_per_stage
        ):
            return candidate_layers_per_stage
    type_count_texts = [
        f"{len([*consecutive_equal_types])} {layer_type}"
        for layer_type, consecutive_equal_types in groupby(types)
    ]
    layer_types_phrase = ", ".join(type_count_texts[:6]) + (
        ", ..." if len(type_count_texts) > 6 else ""
    )
    raise InputError(
        f"--mesh_shape: {stages} pipeline stages cannot have the same sequence of layers: layers 0 "
        f"to {layer_count - 1} are {layer_types_phrase}; choose another number of stages, or a "
        "mesh without the axis pipeline"
    )


def intermediate(intermediates: dict[str, Any], name: str) -> Array | None:
    """Returns an intermediate, which is an array that a layer computes besides its result.

    Args:
        intermediates: The intermediates of the layer, nested by module.
        name: The dotted path of the intermediate, such as "attn.q": the names of the modules that
            contain it, then its own name.

    Returns:
        The array; None if the layer has no such intermediate. If the intermediate is a function,
        the function is called to compute the array.
    """
    array_or_function = flatten_dict(intermediates, sep=".").get(name)
    return array_or_function() if callable(array_or_function) else array_or_function


def rows_at_once(layout: Layout, rows: int, length: int) -> int:
    """Returns the number of rows that go through a layer together, a divisor of `rows`.

    On a single CPU device, these rows have at most TOKENS_AT_ONCE tokens, unless a single row has
    more. On other devices, all rows go through a layer together.

    Args:
        layout: The mesh of devices, and the rules for splitting arrays along its axes.
        rows: The number of rows of a step.
        length: T, the number of tokens per row.
    """
    mesh = layout.mesh
    if mesh is None or mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return rows
    max_rows_at_once = min(max(TOKENS_AT_ONCE // length, 1), rows)
    return max(
        candidate_row_count
        for candidate_row_count in range(1, max_rows_at_once + 1)
        if rows % candidate_row_count == 0
    )


def few_rows_at_once(layer: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Wraps a layer so that it computes a few rows of a batch at a time where this is faster.

    `rows_at_once` determines the number of rows. If these rows contain only padding, as at the end
    of the data, the layer is not computed: the result is x unchanged, and zeros for the captured
    arrays.

    Args:
        layer: A function that computes a layer. It returns the residual stream after the layer, and
            a pytree of captured arrays (intermediates of the layer that the caller needs),
            (B, T, ...), none of which is bfloat16 or float16. Its arguments are:
                x: The residual stream before the layer, (B, T, D).
                cos_and_sin: The cosines and sines of the rotary embedding (from
                    `layers.rotary_table`).
                segment_ids: The segment of each token, (B, T) int32; 0 for padding.
        module: The module of the layer, whose mesh and dtype are used.

    Returns:
        A function with the inputs and results of `layer`.
    """

    def compute(x_bits: Array, cos_and_sin: Any, segment_ids: Array) -> Any:
        x, captured_arrays = layer(from_bits(x_bits, module.dtype), cos_and_sin, segment_ids)
        return to_bits(x), captured_arrays

    def skip(x_bits: Array, cos_and_sin: Any, segment_ids: Array) -> Any:
        _, shapes_of_captured_arrays = jax.eval_shape(compute, x_bits, cos_and_sin, segment_ids)
        zero_arrays = jax.tree.map(
            lambda array_shape: jnp.zeros(array_shape.shape, array_shape.dtype),
            shapes_of_captured_arrays,
        )
        return x_bits, zero_arrays

    def run_rows(inputs: Any) -> Any:
        _, _, segment_ids = inputs
        return jax.lax.cond(segment_ids.any(), compute, skip, *inputs)

    def apply(x: Array, cos_and_sin: Any, segment_ids: Array) -> Any:
        row_count, row_length = x.shape[:2]
        rows_per_pass = rows_at_once(module.layout, row_count, row_length)
        if rows_per_pass == row_count:
            return layer(x, cos_and_sin, segment_ids)
        layer_inputs = to_bits(x), cos_and_sin, segment_ids
        inputs_of_passes = jax.tree.map(
            lambda array: array.reshape(-1, rows_per_pass, *array.shape[1:]), layer_inputs
        )
        results_of_passes = jax.lax.map(run_rows, inputs_of_passes)
        x_bits, captured_arrays = jax.tree.map(
            lambda array: array.reshape(-1, *array.shape[2:]), results_of_passes
        )
        return from_bits(x_bits, module.dtype), captured_arrays

    return apply
