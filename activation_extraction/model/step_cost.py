"""Estimates the cost of a step on a mesh by formula: memory, and time at the chips' peak speeds.

`CostModel` describes a step of a model, and estimates its cost on any mesh without `pipeline`. Its
users are mesh_choice.py, for `--mesh_type auto`, and `--plan`. On each device, a step takes

    seconds = max(products, hbm, gathers) + exchanges

`products` is the number of floating-point operations divided by the chip's peak. `hbm` is the
number of bytes that they read and write, divided by the bandwidth of the chip's memory; it is the
largest term if a device has few tokens for each of many experts. `gathers` is the number of bytes
of weights that a device receives along `fsdp`, divided by the speed of its links; gathers overlap
with products. The `exchanges` along `model` and `expert` count in full, although some of those
along `expert` overlap with the experts' products.

With t tokens on a device, b bytes per weight, and a chip with F operations and L bytes per second,
the gathers of a dense layer over f devices hide behind its products if

    2 t / F >= b (f - 1) / (f L),

that is, from 1,640 tokens on for a v5e with fsdp 4 and bfloat16 (two links of 45 GB/s).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from activation_extraction.model.devices import CHIPS, Chip, at_dtype, chip_of
from activation_extraction.model.encode import Encoder
from activation_extraction.model.mesh import BOTH, RULES, Layout
from activation_extraction.model.parameters import ParamPath
from activation_extraction.model.predictions import TOKENS_OF_A_BLOCK
from activation_extraction.model.weights import WeightSpec, WeightTable
from qwen2_jax_with_hooks import HookedModel

AXES = ("data", "fsdp", "expert", "model")  # the last axis varies fastest over the devices
# The figures that are used for CPUs and unknown chips, where only their ratios matter.
UNKNOWN = CHIPS["TPU v5e"]


class StepCost(NamedTuple):
    """The cost of a step on a mesh, for each device.

    Attributes:
        layout: Mesh.
        memory: Bytes of memory.
        products: Seconds of the matrix products.
        hbm: Seconds of reading and writing the device's memory.
        gathers: Seconds of receiving weights along `fsdp`.
        exchanges: Seconds of exchanging activations along `model` and `expert`.
    """

    layout: Layout
    memory: float
    products: float
    hbm: float
    gathers: float
    exchanges: float

    @property
    def seconds(self) -> float:
        """The duration of the step by the formula of this module."""
        return max(self.products, self.hbm, self.gathers) + self.exchanges


@dataclass(frozen=True)
class CostModel:
    """A step of a model, whose cost can be estimated on any mesh.

    Attributes:
        model: Hooked model; its mesh is ignored.
        weights: All parameters of the model.
        rows: Number of rows, of all hosts together.
        length: Number of tokens per row.
        encoders: Autoencoders whose codes the step computes.
    """

    model: HookedModel
    weights: WeightTable
    rows: int
    length: int
    encoders: Sequence[Encoder] = ()

    def estimate(self, layout: Layout, devices: Sequence[Any]) -> StepCost:
        """Estimates the cost of the step.

        Args:
            layout: A mesh without `pipeline`, which may be abstract.
            devices: The devices of the mesh, ordered by host.
        """
        chip = chip_of(devices[0]) or UNKNOWN
        linked = linked_devices(devices)
        seconds = 0.0
        for flops, dtype in self._flops:
            seconds += flops / at_dtype(chip, dtype, devices[0].platform).flops
        speed = {axis: link_speed(layout, axis, chip, linked) for axis in AXES}
        products = seconds / layout.size(*AXES, "query")
        exchanges = self._sent_by_model(layout) / speed["model"]
        exchanges += self._exchanged(layout) / speed["expert"]
        gathers = self._gathered(layout) / speed["fsdp"]
        hbm, memory = self._moved(layout) / chip.bandwidth, self.memory(layout)
        return StepCost(layout, memory, products, hbm, gathers, exchanges)

    @cached_property
    def _flops(self) -> list[tuple[float, Any]]:
        """The operations and the dtype of the products, for the model and each autoencoder."""
        tokens = self.rows * self.length
        encoding = [
            (tokens * encoder.flops, encoder.autoencoder.dtype) for encoder in self.encoders
        ]
        return [(self.rows * self.model.flops([self.length]), self.model.dtype), *encoding]

    def memory(self, layout: Layout) -> float:
        """Returns the bytes of memory that a device needs.

        They include weights, gathered layers, activations of a layer, the activations at the hooks
        and the weights and codes of autoencoders.

        Args:
            layout: The mesh.
        """
        config = self.model.config
        value_bytes = self.model.dtype.itemsize
        held = float(sum(_numbers(layout, spec) for spec in self.weights.values()))
        if layout.size("fsdp") > 1:  # the next layer is gathered while a layer is computed
            held += 2 * self._largest_layer(layout)
        parts = layout.size(*BOTH)
        widths = 6 * config.hidden_size + 4 * config.sizes.get("F", 0) // parts
        if config.experts is not None:  # a token takes a row for each of its experts
            rows = config.experts.per_token * layout.size("expert")
            widths += rows * (2 * config.hidden_size + config.experts.width // parts)
        if self.model.predicts:  # the head is gathered, for the logits of a block
            names = ("embed_tokens", "weight"), ("lm_head", "weight")
            *_, head = (self.weights[name] for name in names if name in self.weights)
            whole = _numbers(layout, head, without="fsdp")
            held += whole - _numbers(layout, head) + 6 * TOKENS_OF_A_BLOCK * head.shape[0] / parts
        sizes = config.sizes_with(self.length)
        hooks = [*self.model.hooks, *(encoder.hook for encoder in self.encoders)]
        vector_types = [hook.kind.vector_type(sizes, self.model.captured_dtype) for hook in hooks]
        captured = self.rows * self.length * sum(vector_type.bytes for vector_type in vector_types)
        # The activations of two steps are in memory at a time, because the host copies those of one
        # step while the next one computes. A step needs half as much while it computes.
        outputs = 2.5 * captured / layout.size(*AXES, "query")
        encoding = sum(encoder.memory(layout) for encoder in self.encoders)
        return value_bytes * (held + self._tokens(layout) * widths) + outputs + encoding

    def moved_by_layer(self, layout: Layout) -> float:
        """Returns the bytes of memory that a device reads and writes per layer, on average.

        Each weight counts once, and so do the input and the output of each product for each token;
        gate and up are one product. With `expert`, a device also receives the tokens of other
        devices and sends their sums. With `fsdp`, it also reads its part of the weights and writes
        the gathered weights. A program can only need less by keeping tokens in fast memory between
        products.

        Args:
            layout: The mesh.
        """
        moved = sum(
            self._moved_by(layout, path, spec)
            for path, spec in self.weights.items()
            if path[0] == "layers"
        )
        return (moved + self._exchanged(layout)) / self.model.num_layers

    def _moved(self, layout: Layout) -> float:
        """Returns the bytes of memory that one device reads and writes in a step."""
        moved = sum(self._moved_by(layout, path, spec) for path, spec in self.weights.items())
        return moved + self._exchanged(layout)

    def _moved_by(self, layout: Layout, path: ParamPath, spec: WeightSpec) -> float:
        """Returns the bytes that the products with a weight read and write, in all layers.

        Args:
            layout: The mesh.
            path: The path of the parameter.
            spec: The parameter.
        """
        experts, parts = self.model.config.experts, layout.size(*BOTH)
        whole = _numbers(layout, spec, without="fsdp")
        held = _numbers(layout, spec)
        numbers = whole + (whole + held if held < whole else 0.0)
        (layers, *sizes), hidden = spec.shape, self.model.config.hidden_size
        if path[0] == "layers" and len(sizes) > 1 and hidden in sizes:
            rows = layers * self._tokens(layout)
            if experts is not None and "experts" in path:
                rows, sizes = rows * experts.per_token, sizes[1:]
            width = math.prod(sizes) / hidden  # the other width of the product
            numbers += rows * (width if "up_proj" in path else width + hidden) / parts
        return self.model.dtype.itemsize * numbers

    def _exchanged(self, layout: Layout) -> float:
        """Returns the bytes that a device receives along `expert`.

        They are the tokens of other devices, and sums for its own tokens, in the model's dtype.
        """
        others, config = layout.size("expert") - 1, self.model.config
        sparse = sum(layer < self.model.num_layers for layer in config.sparse_layers)
        width = 2 * self.model.dtype.itemsize * config.hidden_size
        return sparse * others * self._tokens(layout) * width

    def _largest_layer(self, layout: Layout) -> float:
        """Returns how many weights a device has of its largest layer, once they are gathered."""
        layers = Counter[str]()
        mixed = len({*self.model.config.layer_types}) > 1
        for path, spec in self.weights.items():
            if path[0] == "layers":
                of_layer = _numbers(layout, spec, without="fsdp") // spec.shape[0]
                layers[path[1] if mixed else ""] += of_layer
        return max(layers.values(), default=0)

    def _gathered(self, layout: Layout) -> float:
        """Returns the bytes of weights that a device receives along `fsdp`.

        The embedding does not count, because only the vectors of tokens are sent, unless it is also
        used as the head.
        """
        embedding_is_head = self.model.predicts and self.model.config.tie_word_embeddings
        received = 0
        for path, spec in self.weights.items():
            if path[0] != "embed_tokens" or embedding_is_head:
                received += _numbers(layout, spec, without="fsdp") - _numbers(layout, spec)
        return self.model.dtype.itemsize * received

    def _sent_by_model(self, layout: Layout) -> float:
        """Returns the bytes that a device sends along `model`.

        There are two sums and two gathers of the residual stream per layer.
        """
        parts = layout.size(*BOTH)
        stream = self.model.dtype.itemsize * self._tokens(layout) * self.model.config.hidden_size
        return 4 * self.model.num_layers * stream * (parts - 1) / parts

    def _tokens(self, layout: Layout) -> float:
        """Returns the number of tokens of a step that a device computes, shared along `model`."""
        return self.rows * self.length / layout.size(*RULES["batch"])


def _numbers(layout: Layout, spec: WeightSpec, without: str | None = None) -> int:
    """Returns how many values of a weight a device has.

    Args:
        layout: The mesh.
        spec: The parameter.
        without: A mesh axis along which the weight is not split; None for no such axis.
    """
    return math.prod(layout.shard_shape(spec.axes, spec.shape, without))


def linked_devices(devices: Sequence[Any]) -> int:
    """Returns how many consecutive devices are joined by fast links.

    They are the devices of a TPU slice, or the GPUs of a host.

    Args:
        devices: The devices, ordered by host.
    """
    name = "slice_index" if devices[0].platform == "tpu" else "process_index"
    groups = [getattr(device, name, 0) for device in devices]
    return groups.count(groups[0])


def link_speed(layout: Layout, axis: str, chip: Chip, linked: int) -> float:
    """Returns the bytes per second that a device can receive along a mesh axis.

    This is the speed of its fast links if they join all devices along the axis, otherwise the speed
    of the network.

    Args:
        layout: The mesh.
        axis: The name of the mesh axis, as in --mesh_axes: `model` includes the axis `query` of
            JAX's mesh.
        chip: The kind of the devices.
        linked: The number of consecutive devices that are joined by fast links (see
            `linked_devices`).
    """
    assert layout.mesh is not None
    names = layout.mesh.axis_names
    links = min(layout.shape.get(axis, 1) - 1, chip.links) or 1
    # The devices along the axis lie within this number of consecutive devices.
    span = layout.size(*names[names.index(axis) :]) if axis in names else 1
    return chip.link * links if linked % span == 0 else chip.network
