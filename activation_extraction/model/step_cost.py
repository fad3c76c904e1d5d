"""Estimates the memory and the duration of a step on a mesh, by formula.

`CostModel` estimates the cost of one step of a model on any mesh without `pipeline`.
mesh_choice.py uses the estimates for `--mesh_type auto`, and run/estimate.py for `--plan`. A device
needs this time for a step:

    seconds = (
        max(matrix_product_seconds, hbm_seconds, weight_gather_seconds)
        + activation_exchange_seconds
    )

`matrix_product_seconds` is the number of floating-point operations of the matrix products, divided
by the chip's peak speed. `hbm_seconds` is the number of bytes that the products read and write,
divided by the bandwidth of the chip's memory (HBM). It is the largest term if a device has few
tokens for each of many experts. `weight_gather_seconds` is the number of bytes of weights that a
device receives along `fsdp`, divided by the speed of its links. Weights are gathered while other
products are computed. `activation_exchange_seconds` is the time of sending activations along
`model` and `expert`. It is added, although some exchanges along `expert` overlap with the products
of the experts.

Gathers of weights take no extra time if a device has enough tokens. With t tokens on a device, b
bytes per weight, and a chip with F operations and L received bytes per second, the weights of a
dense layer that are split over f devices arrive during the products of a layer if

    2 t / F >= b (f - 1) / (f L).

For a v5e (two links of 45 GB/s) with fsdp 4 and bfloat16, this holds for at least 1,640 tokens on a
device.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from activation_extraction.model.devices import CHIPS, Chip, at_dtype, chip_of
from activation_extraction.model.encode import Encoder
from activation_extraction.model.mesh import MODEL_AXES, RULES, Layout
from activation_extraction.model.parameters import ParamPath
from activation_extraction.model.predictions import TOKENS_OF_A_BLOCK
from activation_extraction.model.weights import WeightSpec, WeightTable
from qwen2_jax_with_hooks import HookedModel

# The axes of meshes whose cost can be estimated. The last axis varies fastest over the devices.
AXES = ("data", "fsdp", "expert", "model")
# The chip whose figures are used for CPUs and unknown chips. The choice of a mesh only needs the
# ratios of the figures.
STAND_IN_CHIP = CHIPS["TPU v5e"]


class StepCost(NamedTuple):
    """The memory and the time that each device needs for a step on a mesh.

    Attributes:
        layout: Layout of the mesh.
        needed_memory_bytes: Bytes of memory that a device needs.
        matrix_product_seconds: Duration of the matrix products in seconds.
        hbm_seconds: Duration of reading and writing the device's memory in seconds.
        weight_gather_seconds: Duration of receiving weights along the mesh axis `fsdp` in seconds.
        activation_exchange_seconds: Duration of exchanging activations along the mesh axes `model`
            and `expert` in seconds.
    """

    layout: Layout
    needed_memory_bytes: float
    matrix_product_seconds: float
    hbm_seconds: float
    weight_gather_seconds: float
    activation_exchange_seconds: float

    @property
    def seconds(self) -> float:
        """The duration of the step in seconds, by the formula in this module's docstring."""
        seconds_of_overlapping_work = max(
            self.matrix_product_seconds, self.hbm_seconds, self.weight_gather_seconds
        )
        return seconds_of_overlapping_work + self.activation_exchange_seconds


@dataclass(frozen=True)
class CostModel:
    """Estimates the memory and the time that each device needs for one step of a model.

    The methods take the layout of a mesh as an argument. This mesh may have any axes except
    `pipeline`.

    Attributes:
        model: Model with its hooks. Its own layout is ignored.
        weight_spec_by_path: Path of each parameter of the model -> its `WeightSpec`, which contains
            the shape and the logical axes of the parameter.
        num_rows: Number of rows in the step, of all hosts together.
        row_length: Number of tokens per row.
        encoders: Encoders of the autoencoders whose codes the step computes.
    """

    model: HookedModel
    weight_spec_by_path: WeightTable
    num_rows: int
    row_length: int
    encoders: Sequence[Encoder] = ()

    def estimate(self, layout: Layout, devices: Sequence[Any]) -> StepCost:
        """Estimates the memory and the time that each device needs for the step.

        Args:
            layout: The layout of a mesh without the axis `pipeline`. The mesh may be an abstract
                mesh of JAX.
            devices: The devices of the mesh, ordered by host.
        """
        chip = chip_of(devices[0]) or STAND_IN_CHIP
        num_linked_devices = linked_devices(devices)
        seconds_on_one_device = 0.0
        for flop_count, dtype in self._flop_counts_and_dtypes:
            chip_with_speed_for_dtype = at_dtype(chip, dtype, devices[0].platform)
            seconds_on_one_device += flop_count / chip_with_speed_for_dtype.flops_per_second
        bytes_per_second_by_axis = {
            axis: link_speed(layout, axis, chip, num_linked_devices) for axis in AXES
        }
        activation_exchange_seconds = (
            self._bytes_along_model(layout) / bytes_per_second_by_axis["model"]
        )
        activation_exchange_seconds += (
            self._bytes_along_expert(layout) / bytes_per_second_by_axis["expert"]
        )
        return StepCost(
            layout,
            needed_memory_bytes=self.needed_memory_bytes(layout),
            matrix_product_seconds=seconds_on_one_device / layout.size(*AXES, "query"),
            hbm_seconds=self._memory_traffic_bytes(layout) / chip.memory_bytes_per_second,
            weight_gather_seconds=self._gathered_bytes(layout) / bytes_per_second_by_axis["fsdp"],
            activation_exchange_seconds=activation_exchange_seconds,
        )

    @cached_property
    def _flop_counts_and_dtypes(self) -> list[tuple[float, Any]]:
        """The numbers of floating-point operations in a step, on all devices together.

        The list contains a tuple for the model, and then a tuple for each autoencoder. A tuple
        contains the number of floating-point operations, and the dtype of the matrix products.
        """
        num_tokens = self.num_rows * self.row_length
        flop_counts_and_dtypes = [
            (self.num_rows * self.model.flops([self.row_length]), self.model.dtype)
        ]
        for encoder in self.encoders:
            flop_counts_and_dtypes.append((num_tokens * encoder.flops, encoder.autoencoder.dtype))
        return flop_counts_and_dtypes

    def needed_memory_bytes(self, layout: Layout) -> float:
        """Returns the bytes of memory that a device needs for the step.

        They include weights, the weights of layers that are gathered from other devices, the
        intermediate activations of a layer, the activations at the hooks, and the weights and codes
        of autoencoders.

        Args:
            layout: The layout of the mesh.
        """
        model_config = self.model.config
        num_devices_along_model_axes = layout.size(*MODEL_AXES)
        # The number of weight values on a device. It can be added to the number of activation
        # values, because weights and activations both have the model's dtype.
        num_weight_values_on_device = float(
            sum(
                _values_on_device(layout, weight_spec)
                for weight_spec in self.weight_spec_by_path.values()
            )
        )
        if layout.size("fsdp") > 1:
            # A device gathers the whole weights of the next layer while it computes a layer, so it
            # stores the whole weights of two layers.
            num_weight_values_on_device += 2 * self._largest_layer(layout)
        num_activation_values_per_token = (
            6 * model_config.hidden_size
            + 4 * model_config.sizes.get("F", 0) // num_devices_along_model_axes
        )
        if model_config.experts is not None:
            # Each expert that a token chooses gets a copy of the token's vector as its input (see
            # experts.py). A device computes its experts for its own tokens and for as many tokens
            # of every other device along the mesh axis `expert`. The number of inputs that the
            # device stores for all these tokens is divided by the number of its own tokens.
            num_expert_inputs_per_token = model_config.experts.per_token * layout.size("expert")
            num_activation_values_per_expert_input = (
                2 * model_config.hidden_size
                + model_config.experts.width // num_devices_along_model_axes
            )
            num_activation_values_per_token += (
                num_expert_inputs_per_token * num_activation_values_per_expert_input
            )
        num_logit_block_values = 0.0
        if self.model.predicts:
            # To compute a block of logits, a device gathers the parts of the LM head that are split
            # along the mesh axis fsdp.
            lm_head_weight_spec = (
                self.weight_spec_by_path.get(("lm_head", "weight"))
                or self.weight_spec_by_path["embed_tokens", "weight"]
            )
            num_gathered_lm_head_values = _values_on_device(
                layout, lm_head_weight_spec, unsplit_axis="fsdp"
            )
            num_weight_values_on_device += num_gathered_lm_head_values - _values_on_device(
                layout, lm_head_weight_spec
            )
            num_logit_block_values = (
                6 * TOKENS_OF_A_BLOCK * lm_head_weight_spec.shape[0] / num_devices_along_model_axes
            )
        size_by_axis_letter = model_config.sizes_with(self.row_length)
        captured_hooks = [*self.model.hooks, *(encoder.hook for encoder in self.encoders)]
        captured_bytes_in_step = 0
        for hook in captured_hooks:
            bytes_per_token = hook.kind.width_and_dtype(
                size_by_axis_letter, self.model.captured_dtype
            ).bytes
            captured_bytes_in_step += self.num_rows * self.row_length * bytes_per_token
        # The captured activations of two steps are in memory, because the host copies the
        # activations of one step while the next step is computed. While a step is computed,
        # temporary copies need half as much memory as the activations of one step.
        captured_activation_bytes_per_device = (
            2.5 * captured_bytes_in_step / layout.size(*AXES, "query")
        )
        encoder_bytes = sum(encoder.memory(layout) for encoder in self.encoders)
        num_values_of_model_dtype = (
            num_weight_values_on_device
            + num_logit_block_values
            + self._tokens_on_device(layout) * num_activation_values_per_token
        )
        return (
            self.model.dtype.itemsize * num_values_of_model_dtype
            + captured_activation_bytes_per_device
            + encoder_bytes
        )

    def memory_traffic_per_layer(self, layout: Layout) -> float:
        """Returns the bytes that a device reads from and writes to its memory per layer of a step.

        The result is an average over the layers. Each weight counts once, and so do the input and
        the output of each product for each token. The projections gate and up count as one product,
        because they have the same input. If experts are split along the mesh axis `expert`, a
        device also receives the tokens of other devices and sends sums for these tokens. If weights
        are split along `fsdp`, a device also reads its part of the weights and writes the gathered
        weights. A program can only need fewer bytes if it keeps tokens in faster memory between
        products.

        Args:
            layout: The layout of the mesh.
        """
        memory_traffic_bytes_of_layers = sum(
            self._weight_traffic(layout, parameter_path, weight_spec)
            for parameter_path, weight_spec in self.weight_spec_by_path.items()
            if parameter_path[0] == "layers"
        )
        return (
            memory_traffic_bytes_of_layers + self._bytes_along_expert(layout)
        ) / self.model.num_layers

    def _memory_traffic_bytes(self, layout: Layout) -> float:
        """Returns the bytes that a device reads from and writes to its memory in a step."""
        memory_traffic_bytes = self._bytes_along_expert(layout)
        for parameter_path, weight_spec in self.weight_spec_by_path.items():
            memory_traffic_bytes += self._weight_traffic(layout, parameter_path, weight_spec)
        return memory_traffic_bytes

    def _weight_traffic(self, layout: Layout, path: ParamPath, weight_spec: WeightSpec) -> float:
        """Returns the bytes that a device reads and writes for products with one parameter.

        The result is the number of bytes that the device reads from its memory in a step, plus the
        number of bytes that it writes to its memory, for the products in all layers.

        Args:
            layout: The layout of the mesh.
            path: The path of the parameter in the model.
            weight_spec: The shape and the logical axes of the parameter. A parameter of layers has
                a first axis for the layers, and contains the weights of all layers.
        """
        experts_config = self.model.config.experts
        hidden_size = self.model.config.hidden_size
        num_gathered_values = _values_on_device(layout, weight_spec, unsplit_axis="fsdp")
        num_values_before_gather = _values_on_device(layout, weight_spec)
        num_read_and_written_values = float(num_gathered_values)
        if num_values_before_gather < num_gathered_values:
            num_read_and_written_values += num_values_before_gather + num_gathered_values
        num_layers, *weight_axis_sizes = weight_spec.shape
        if path[0] == "layers" and len(weight_axis_sizes) > 1 and hidden_size in weight_axis_sizes:
            num_products_of_vector_and_matrix = num_layers * self._tokens_on_device(layout)
            if experts_config is not None and "experts" in path:
                num_products_of_vector_and_matrix *= experts_config.per_token
                weight_axis_sizes = weight_axis_sizes[1:]
            # Each product of a token's vector and a weight matrix reads an input vector from memory
            # and writes an output vector to memory. The values of both vectors are counted. One of
            # the vectors has `hidden_size` values, which are added below. The other vector has as
            # many values as the matrix has weights, divided by `hidden_size`.
            num_vector_values_per_matrix_product = math.prod(weight_axis_sizes) / hidden_size
            # The vector with `hidden_size` values is the input of both up_proj and gate_proj. It is
            # only counted for gate_proj, because the two products read it together.
            if "up_proj" not in path:
                num_vector_values_per_matrix_product += hidden_size
            num_read_and_written_values += (
                num_products_of_vector_and_matrix
                * num_vector_values_per_matrix_product
                / layout.size(*MODEL_AXES)
            )
        return self.model.dtype.itemsize * num_read_and_written_values

    def _bytes_along_expert(self, layout: Layout) -> float:
        """Returns the bytes that a device receives along the mesh axis `expert` in a step.

        Each device has some of the experts. So in each layer with experts, a device receives the
        tokens of every other device. It also receives a vector for each of its own tokens from
        every other device: the weighted sum over the token's experts on that device.
        """
        num_other_devices = layout.size("expert") - 1
        model_config = self.model.config
        num_sparse_layers = sum(
            layer < self.model.num_layers for layer in model_config.sparse_layers
        )
        exchanged_bytes_per_token = 2 * self.model.dtype.itemsize * model_config.hidden_size
        return (
            num_sparse_layers
            * num_other_devices
            * self._tokens_on_device(layout)
            * exchanged_bytes_per_token
        )

    def _largest_layer(self, layout: Layout) -> float:
        """Returns how many weights a device holds of the layer with the most weights.

        The weights of the layer are counted after the device gathered them along the mesh axis
        `fsdp`.
        """
        num_weight_values_by_layer_type = Counter[str]()
        # If layers are of different types, the second part of a parameter's path is the type.
        has_several_layer_types = len({*self.model.config.layer_types}) > 1
        for parameter_path, weight_spec in self.weight_spec_by_path.items():
            if parameter_path[0] == "layers":
                layer_type = parameter_path[1] if has_several_layer_types else ""
                num_gathered_values_on_device = _values_on_device(
                    layout, weight_spec, unsplit_axis="fsdp"
                )
                num_weight_values_by_layer_type[layer_type] += (
                    num_gathered_values_on_device // weight_spec.shape[0]
                )
        return max(num_weight_values_by_layer_type.values(), default=0)

    def _gathered_bytes(self, layout: Layout) -> float:
        """Returns the bytes of weights that a device receives along the axis `fsdp` in a step.

        The embedding only counts if it is also used as the head. Otherwise it is not gathered,
        because devices only send the vectors of tokens.
        """
        uses_embedding_as_head = self.model.predicts and self.model.config.tie_word_embeddings
        num_received_values = 0
        for parameter_path, weight_spec in self.weight_spec_by_path.items():
            if parameter_path[0] != "embed_tokens" or uses_embedding_as_head:
                num_received_values += _values_on_device(layout, weight_spec, unsplit_axis="fsdp")
                num_received_values -= _values_on_device(layout, weight_spec)
        return self.model.dtype.itemsize * num_received_values

    def _bytes_along_model(self, layout: Layout) -> float:
        """Returns the bytes that a device sends along the mesh axis `model` in a step.

        In each layer, the residual stream is summed over the devices along this axis twice, and
        gathered from them twice.
        """
        num_devices_along_model_axes = layout.size(*MODEL_AXES)
        num_residual_stream_values = self._tokens_on_device(layout) * self.model.config.hidden_size
        residual_stream_bytes = self.model.dtype.itemsize * num_residual_stream_values
        sent_fraction = (num_devices_along_model_axes - 1) / num_devices_along_model_axes
        return 4 * self.model.num_layers * residual_stream_bytes * sent_fraction

    def _tokens_on_device(self, layout: Layout) -> float:
        """Returns the number of tokens that a device computes in a step.

        The devices along the mesh axis `model` compute the same tokens together.
        """
        return self.num_rows * self.row_length / layout.size(*RULES["batch"])


def _values_on_device(
    layout: Layout, weight_spec: WeightSpec, unsplit_axis: str | None = None
) -> int:
    """Returns the number of values of a parameter that a device stores.

    Args:
        layout: The layout of the mesh.
        weight_spec: The shape and the logical axes of the parameter.
        unsplit_axis: A mesh axis along which the parameter is not split. None to split it along all
            mesh axes that RULES in mesh.py lists for its logical axes.
    """
    return math.prod(layout.shard_shape(weight_spec.logical_axes, weight_spec.shape, unsplit_axis))


def linked_devices(devices: Sequence[Any]) -> int:
    """Returns the number of devices that fast links connect with the first one, itself included.

    Fast links connect the devices of a TPU slice, or the GPUs of a host. These devices are
    consecutive.

    Args:
        devices: The devices, ordered by host.
    """
    is_tpu = devices[0].platform == "tpu"
    tpu_slice_or_host_attribute = "slice_index" if is_tpu else "process_index"
    tpu_slice_or_host_numbers = [
        getattr(device, tpu_slice_or_host_attribute, 0) for device in devices
    ]
    return tpu_slice_or_host_numbers.count(tpu_slice_or_host_numbers[0])


def link_speed(layout: Layout, axis: str, chip: Chip, linked: int) -> float:
    """Returns the bytes per second that a device can receive along a mesh axis.

    The result is the speed of the device's fast links if they connect all devices along the axis.
    Otherwise it is the speed of the network.

    Args:
        layout: The layout of the mesh.
        axis: The name of a mesh axis, as in --mesh_axes. JAX's mesh divides the user's axis `model`
            into the axes `model` and `query`; here `model` means both of them together.
        chip: The speeds of a device and its links.
        linked: The number of consecutive devices that fast links connect (see `linked_devices`).
    """
    assert layout.mesh is not None
    axis_names = layout.mesh.axis_names
    num_links_used = min(layout.shape.get(axis, 1) - 1, chip.link_count) or 1
    # The last axis of the mesh varies fastest over the devices in their order. So devices that only
    # differ in `axis` and later axes are a block of consecutive devices. A device exchanges data
    # along `axis` only with devices of its own block. If the mesh lacks the axis, each block is a
    # single device.
    axis_and_later_axes = axis_names[axis_names.index(axis) :] if axis in axis_names else ()
    num_devices_per_block = layout.size(*axis_and_later_axes)
    # The devices of a block, which are consecutive, exchange data with each other. Fast links
    # connect each set of `linked` consecutive devices. If `linked` is a multiple of the number of
    # devices in a block, each block lies within one set, so its devices use fast links only.
    if linked % num_devices_per_block == 0:
        return chip.link_bytes_per_second * num_links_used
    return chip.network_bytes_per_second
