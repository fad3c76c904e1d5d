"""`--mesh_type auto` chooses the mesh by what a forward pass computes, holds and sends.

A step on a mesh is estimated as

    seconds = max(products, hbm, gathers) + exchanges

per device: `products` are the model's floating-point operations over the chip's peak; `hbm` is what
they read and write over its bandwidth, which binds where a device has few tokens for each of many
experts; `gathers` are the bytes of weights that a device receives along `fsdp` over the speed of
its links, and they run beside the products; the `exchanges` along `model` and `expert` count in
full, though some of those along `expert` run beside the experts. With t tokens on a
device, b bytes per weight, and a chip with F operations and L bytes per second, the gathers of a
dense layer over f devices hide behind its products if

    2 t / F >= b (f - 1) / (f L),

that is, on a v5e with fsdp 4 (two links of 45 GB/s), from 1,640 tokens on. Of the meshes that fit
in memory, `auto` takes the one with the shortest step, or one within a hundredth of it that splits
weights less. So pure `data` comes first, then `fsdp` over the fewest devices, and `model` where the
rows are too few. It never takes `pipeline`: what that saves in memory, `fsdp` saves without idle
stages.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh

from activation_extraction.common.errors import InputError
from activation_extraction.model.devices import CHIPS, USABLE, Chip, at_dtype, chip_of
from activation_extraction.model.encode import Encoder
from activation_extraction.model.family import HookedModel, WeightTable
from activation_extraction.model.layers import ParamPath
from activation_extraction.model.mesh import (
    BOTH,
    RULES,
    Layout,
    check_divisibility,
    mesh_axes,
)
from activation_extraction.model.predictions import TOKENS_OF_A_BLOCK
from activation_extraction.model.weights import WeightSpec

AXES = ("data", "fsdp", "expert", "model")  # the devices along the last one are neighbours
ALIKE = 1.01  # steps that differ by less are taken as equally long
# For a CPU or an unknown chip, of whose speeds the ratios matter.
UNKNOWN = CHIPS["TPU v5e"]


class Estimate(NamedTuple):
    """What a step on a mesh needs of each device: bytes of memory, and times in seconds.

    hbm: to read and write its memory.
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
class StepSizes:
    """A step of a model that has no mesh yet.

    weights: of all parameters; rows: of all hosts; length: tokens per row. encoders: the
    autoencoders whose codes it computes.
    """

    model: HookedModel
    weights: WeightTable
    rows: int
    length: int
    encoders: Sequence[Encoder] = ()

    def choose_mesh(
        self, devices: Sequence[Any], limit: float | None
    ) -> tuple[dict[str, int], str]:
        """Returns mesh axis -> size, and in one line why this mesh was chosen.

        If nothing fits by the estimate, it is the mesh that takes least memory. devices: ordered by
        host; limit: the bytes of memory of each, None if they are unknown. Raises InputError if no
        mesh divides the rows and widths.
        """
        estimates = self._estimates(devices)
        fitting = [x for x in estimates if limit is None or x.memory <= USABLE * limit]
        if not fitting:
            best = min(estimates, key=lambda each: each.memory)
            return best.layout.shape, f"{_memory(best, limit)}; no mesh fits by this estimate"
        shortest = min(each.seconds for each in fitting)
        alike = [each for each in fitting if each.seconds <= ALIKE * shortest]
        splits = "model", "expert", "fsdp"  # in this order, as few as can be
        best = min(alike, key=lambda each: [each.layout.shape.get(axis, 1) for axis in splits])
        return best.layout.shape, _why(best, limit)

    def _estimates(self, devices: Sequence[Any]) -> list[Estimate]:
        """Returns the estimate of every mesh over these devices that can split the step.

        devices: ordered by host. Raises InputError if no mesh can.
        """
        estimates: list[Estimate] = []
        for shape in self._shapes(len(devices)):
            names, sizes = mesh_axes(shape, self.model.config.num_key_value_heads)
            layout = Layout(AbstractMesh(tuple(sizes), tuple(names)))
            try:
                check_divisibility(layout, self.rows, self.length, self.model.config.sizes)
            except InputError as error:
                if shape.get("model", 1) == len(devices) and not estimates:
                    rows = f"--batch_size: the {self.rows} rows of all hosts"
                    raise InputError(f"{rows} can be split on no mesh: {error}") from error
                continue
            estimates.append(self.estimate(layout, devices))
        return estimates

    def _shapes(self, devices: int) -> Iterator[dict[str, int]]:
        """Yields the meshes that can split the rows; the last one has all devices along `model`."""
        factors = [size for size in range(1, devices + 1) if devices % size == 0]
        experts = 1 if self.model.config.experts is None else self.model.config.experts.count
        for model, expert, fsdp in product(factors, repeat=3):
            data, rest = divmod(devices, model * expert * fsdp)
            divides = rest == 0 and self.rows % (data * fsdp * expert) == 0
            if divides and experts % expert == 0:
                sizes = dict(zip(AXES, (data, fsdp, expert, model), strict=True))
                yield {axis: size for axis, size in sizes.items() if size > 1 or axis == "data"}

    def estimate(self, layout: Layout, devices: Sequence[Any]) -> Estimate:
        """Estimates the step on a mesh without `pipeline` over these devices."""
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
        return Estimate(layout, memory, products, hbm, gathers, exchanges)

    @cached_property
    def _flops(self) -> list[tuple[float, Any]]:
        """The operations of the model and of each autoencoder, and the dtype of their products."""
        tokens = self.rows * self.length
        encoding = [(tokens * each.flops, each.autoencoder.dtype) for each in self.encoders]
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

    def _moved(self, layout: Layout) -> float:
        """Returns the bytes of memory that one device reads and writes in a step, by formula."""
        of_weights = sum(self._moved_by(layout, *each) for each in self.weights.items())
        return of_weights + self._exchanged(layout)

    def moved_by_layer(self, layout: Layout) -> float:
        """Returns how many of the bytes of `_moved` are those of a layer, on average.

        They are those of each weight, once, and, of each token, of what goes into each product and
        comes out of it; gate and up are one product. With `expert`, the tokens of other devices
        arrive, and their sums leave. With `fsdp`, a device reads its part of the weights and writes
        what it gathers. A program needs less only if tokens stay in fast memory between products.
        """
        of_layers = [each for each in self.weights.items() if each[0][0] == "layers"]
        moved = sum(self._moved_by(layout, *each) for each in of_layers)
        return (moved + self._exchanged(layout)) / self.model.num_layers

    def _moved_by(self, layout: Layout, path: ParamPath, spec: WeightSpec) -> float:
        """Returns the bytes of a weight and of what it is multiplied with, in all layers."""
        experts, parts = self.model.config.experts, layout.size(*BOTH)
        whole, held = (_numbers(layout, spec, without=axis) for axis in ("fsdp", None))
        numbers = whole + (whole + held if held < whole else 0.0)
        (layers, *sizes), hidden = spec.shape, self.model.config.hidden_size
        if path[0] == "layers" and len(sizes) > 1 and hidden in sizes:
            rows = layers * self._tokens(layout)
            if experts is not None and "experts" in path:
                rows, sizes = rows * experts.per_token, sizes[1:]
            width = math.prod(sizes) / hidden  # between the stream and this many numbers
            numbers += rows * (width if "up_proj" in path else width + hidden) / parts
        return self.model.dtype.itemsize * numbers

    def _exchanged(self, layout: Layout) -> float:
        """Returns the bytes of tokens that come along `expert`, and of their sums, which go back.

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

        The embedding is not sent, only tokens' vectors, unless it is the head, too.
        """
        head = self.model.predicts and self.model.config.tie_word_embeddings
        specs = [x for path, x in self.weights.items() if head or path[0] != "embed_tokens"]
        received = (_numbers(layout, x, without="fsdp") - _numbers(layout, x) for x in specs)
        return self.model.dtype.itemsize * sum(received)

    def _sent_by_model(self, layout: Layout) -> float:
        """Returns the bytes of two sums and two gathers of the residual stream per layer."""
        parts = layout.size(*BOTH)
        stream = self.model.dtype.itemsize * self._tokens(layout) * self.model.config.hidden_size
        return 4 * self.model.num_layers * stream * (parts - 1) / parts

    def _tokens(self, layout: Layout) -> float:
        """Returns how many tokens of a step the devices along one `model` axis compute."""
        return self.rows * self.length / layout.size(*RULES["batch"])


def _numbers(layout: Layout, spec: WeightSpec, without: str | None = None) -> int:
    return math.prod(layout.shard_shape(spec.axes, spec.shape, without))


def linked_devices(devices: Sequence[Any]) -> int:
    """Returns how many consecutive devices fast links join: a TPU slice, or a host's GPUs."""
    name = "slice_index" if devices[0].platform == "tpu" else "process_index"
    groups = [getattr(device, name, 0) for device in devices]
    return groups.count(groups[0])


def link_speed(layout: Layout, axis: str, chip: Chip, linked: int) -> float:
    """Returns the bytes per second that a device receives along an axis.

    linked: how many consecutive devices fast links join, see `linked_devices`.
    """
    assert layout.mesh is not None
    names, links = layout.mesh.axis_names, min(layout.shape.get(axis, 1) - 1, chip.links) or 1
    span = layout.size(*names[names.index(axis) :]) if axis in names else 1  # of a group
    return chip.link * links if linked % span == 0 else chip.network


def _why(best: Estimate, limit: float | None) -> str:
    """Says in one line what speaks for a mesh."""
    shape, text = best.layout.shape, [_memory(best, limit)]
    if shape.keys() == {"data"} and shape["data"] > 1:
        text.append("every device holds all weights and computes its own rows")
    if "fsdp" in shape:
        hidden = best.gathers <= best.products
        text.append("gathers of weights " + ("hide behind" if hidden else "outlast") + " products")
    if best.exchanges:
        share = 100 * best.exchanges / best.seconds
        axes = " and ".join(axis for axis in shape if axis in ("expert", "model"))
        text.append(f"exchanges along {axes} take {share:.0f} %")
    return "; ".join(text)


def _memory(estimate: Estimate, limit: float | None) -> str:
    of = "" if limit is None else f" of {limit / 1e9:.3g}"
    return f"about {estimate.memory / 1e9:.2g}{of} GB per device"
