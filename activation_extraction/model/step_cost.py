"""The cost of a step on a mesh is estimated by formula: memory, and time at the chips' peak speeds.

`CostModel` knows a step of a model, and estimates it on any mesh without `pipeline`. Its users are
mesh_choice.py, for `--mesh_type auto`, and `--plan`. On every device, a step takes

    seconds = max(products, hbm, gathers) + exchanges

`products` are the model's floating-point operations over the chip's peak. `hbm` is what they read
and write over the bandwidth of the chip's memory; it is the largest where a device has few tokens
for each of many experts. `gathers` are the bytes of weights that a device receives along `fsdp`
over the speed of its links; they run beside the products. The `exchanges` along `model` and
`expert` count in full, though some of those along `expert` run beside the experts' products.

With t tokens on a device, b bytes per weight, and a chip with F operations and L bytes per second,
the gathers of a dense layer over f devices hide behind its products if

    2 t / F >= b (f - 1) / (f L),

that is, on a v5e with fsdp 4 (two links of 45 GB/s), from 1,640 tokens on.
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

AXES = ("data", "fsdp", "expert", "model")  # the devices along the last one are neighbours
# For CPUs and unknown chips; only the ratios of its speeds matter there.
UNKNOWN = CHIPS["TPU v5e"]


class StepCost(NamedTuple):
    """The cost of a step on one mesh, for each device.

    Attributes:
        layout: The mesh.
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
        return max(self.products, self.hbm, self.gathers) + self.exchanges


@dataclass(frozen=True)
class CostModel:
    """A step of a model, whose cost is estimated on any mesh.

    Attributes:
        model: The hooked model; its own mesh does not matter.
        weights: All parameters of the model.
        rows: The rows of all hosts together.
        length: The tokens per row.
        encoders: The autoencoders whose codes the step computes.
    """

    model: HookedModel
    weights: WeightTable
    rows: int
    length: int
    encoders: Sequence[Encoder] = ()

    def estimate(self, layout: Layout, devices: Sequence[Any]) -> StepCost:
        """Estimates the step.

        Args:
            layout: A mesh without `pipeline`, which may be abstract.
            devices: The devices of the mesh, ordered by host.
        """
        chip, linked = chip_of(devices[0]) or UNKNOWN, linked_devices(devices)
        seconds = sum(
            flops / at_dtype(chip, dtype, devices[0].platform).flops for flops, dtype in self._flops
        )
        speed = {axis: link_speed(layout, axis, chip, linked) for axis in AXES}
        products = seconds / layout.size(*AXES, "query")
        exchanges = self._sent_by_model(layout) / speed["model"]
        exchanges += self._exchanged(layout) / speed["expert"]
        gathers = self._gathered(layout) / speed["fsdp"]
        hbm, memory = self._moved(layout) / chip.bandwidth, self.memory(layout)
        return StepCost(layout, memory, products, hbm, gathers, exchanges)

    @cached_property
    def _flops(self) -> list[tuple[float, Any]]:
        """The operations of the model and of each autoencoder, and the dtype of their products."""
        tokens = self.rows * self.length
        encoding = [
            (tokens * encoder.flops, encoder.autoencoder.dtype) for encoder in self.encoders
        ]
        return [(self.rows * self.model.flops([self.length]), self.model.dtype), *encoding]

    def memory(self, layout: Layout) -> float:
        """Returns the bytes that one device holds; gathered layers count as working memory."""
        config, item = self.model.config, self.model.dtype.itemsize
        held = float(sum(_numbers(layout, spec) for spec in self.weights.values()))
        if layout.size("fsdp") > 1:  # one layer computes while the next one is gathered
            held += 2 * self._largest_layer(layout)
        parts = layout.size(*BOTH)
        widths = 6 * config.hidden_size + 4 * config.sizes.get("F", 0) // parts
        if config.experts is not None:  # every token has a row for each of its experts
            rows = config.experts.per_token * layout.size("expert")
            widths += rows * (2 * config.hidden_size + config.experts.width // parts)
        if self.model.predicts:  # the head is gathered, for the logits of a block
            names = ("embed_tokens", "weight"), ("lm_head", "weight")
            *_, head = (self.weights[name] for name in names if name in self.weights)
            whole = _numbers(layout, head, without="fsdp")
            held += whole - _numbers(layout, head) + 6 * TOKENS_OF_A_BLOCK * head.shape[0] / parts
        sizes = config.sizes_with(self.length)
        hooks = [*self.model.hooks, *(encoder.hook for encoder in self.encoders)]
        forms = [hook.kind.form(sizes, self.model.captured_dtype) for hook in hooks]
        captured = self.rows * self.length * sum(form.bytes for form in forms)
        # The next step's activations are there before the last one's have left, and some are held
        # while a step computes.
        results = 2.5 * captured / layout.size(*AXES, "query")
        encoding = sum(encoder.memory(layout) for encoder in self.encoders)
        return item * (held + self._tokens(layout) * widths) + results + encoding

    def moved_by_layer(self, layout: Layout) -> float:
        """Returns the bytes of memory that a device reads and writes per layer, on average.

        Every weight counts once, and so does, for each token, the input and the output of each
        product; gate and up are one product. With `expert`, the tokens of other devices arrive, and
        their sums leave. With `fsdp`, a device reads its part of the weights and writes what it
        gathers. A program needs less only if tokens stay in fast memory between products.
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
        """Returns the bytes of a weight and of what it is multiplied with, in all layers."""
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
        """Returns the bytes that a device receives along `expert`: tokens, and sums of its own.

        Sums are sent in the dtype of the model.
        """
        others, config = layout.size("expert") - 1, self.model.config
        sparse = sum(layer < self.model.num_layers for layer in config.sparse_layers)
        width = 2 * self.model.dtype.itemsize * config.hidden_size
        return sparse * others * self._tokens(layout) * width

    def _largest_layer(self, layout: Layout) -> float:
        """Returns how many weights a device has of one layer, once they are gathered."""
        layers, mixed = Counter[str](), len({*self.model.config.layer_types}) > 1
        for path, spec in self.weights.items():
            if path[0] == "layers":
                of_layer = _numbers(layout, spec, without="fsdp") // spec.shape[0]
                layers[path[1] if mixed else ""] += of_layer
        return max(layers.values(), default=0)

    def _gathered(self, layout: Layout) -> float:
        """Returns the bytes of weights that a device receives along `fsdp`.

        Of the embedding only the tokens' vectors are sent, unless it is the head, too.
        """
        head = self.model.predicts and self.model.config.tie_word_embeddings
        specs = [x for path, x in self.weights.items() if head or path[0] != "embed_tokens"]
        received = (_numbers(layout, x, without="fsdp") - _numbers(layout, x) for x in specs)
        return self.model.dtype.itemsize * sum(received)

    def _sent_by_model(self, layout: Layout) -> float:
        """Returns the bytes that a device sends along `model`.

        They are two sums and two gathers of the residual stream per layer.
        """
        parts = layout.size(*BOTH)
        stream = self.model.dtype.itemsize * self._tokens(layout) * self.model.config.hidden_size
        return 4 * self.model.num_layers * stream * (parts - 1) / parts

    def _tokens(self, layout: Layout) -> float:
        """Returns how many tokens of a step the devices along one `model` axis compute."""
        return self.rows * self.length / layout.size(*RULES["batch"])


def _numbers(layout: Layout, spec: WeightSpec, without: str | None = None) -> int:
    """Returns how many numbers of a weight a device has, if it is not split along `without`."""
    return math.prod(layout.shard_shape(spec.axes, spec.shape, without))


def linked_devices(devices: Sequence[Any]) -> int:
    """Returns how many consecutive devices fast links join: a TPU slice, or a host's GPUs."""
    name = "slice_index" if devices[0].platform == "tpu" else "process_index"
    groups = [getattr(device, name, 0) for device in devices]
    return groups.count(groups[0])


def link_speed(layout: Layout, axis: str, chip: Chip, linked: int) -> float:
    """Returns the bytes per second that a device receives along an axis.

    Args:
        layout: The mesh.
        axis: The axis, as the user knows it.
        chip: The kind of its devices.
        linked: How many consecutive devices fast links join; see `linked_devices`.
    """
    assert layout.mesh is not None
    names, links = layout.mesh.axis_names, min(layout.shape.get(axis, 1) - 1, chip.links) or 1
    span = layout.size(*names[names.index(axis) :]) if axis in names else 1  # of a group
    return chip.link * links if linked % span == 0 else chip.network
