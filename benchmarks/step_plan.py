"""Computes the cost of a step on each TPU from the compiled program, without running it.

`read_step` sums the bytes that program_text.py reads from the compiled text, and adds the
operations that the model needs. `times_of` divides them by the peaks of a chip.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from activation_extraction.common.errors import InputError
from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.devices import FLOAT32_TIME, Chip
from activation_extraction.model.expert_kernel import ADDED, GATED, ROWS, WEIGHTED, block_of
from activation_extraction.model.forward import Program
from activation_extraction.model.mesh import RULES, Layout
from activation_extraction.model.step_cost import link_speed
from benchmarks.program_text import ProgramText

UNREADABLE = ("TPU7x",)  # chips whose programs contain collectives that cannot be parsed
WIDE_TILES = "TPU v6 lite", "TPU7x"  # chips whose matrix units are 256 wide, not 128


class Sent(NamedTuple):
    """The bytes that a device sends along some mesh axes in a step.

    Attributes:
        axes: The mesh axes.
        bytes: The bytes that a device sends.
        hidden: The part of these bytes that is sent while products run.
    """

    axes: tuple[str, ...]
    bytes: float
    hidden: float


@dataclass(frozen=True)
class StepPlan:
    """The cost of a full step on each device.

    Attributes:
        flops: The device's share of the operations that the model and the autoencoders need.
            Operations that several devices repeat, padding of tiles and the bubble of a pipeline
            are not included. The operations of float32 autoencoders in a bfloat16 model are
            multiplied by their passes through a matrix unit.
        kernel: The additional operations of the kernel of gated delta nets, including the padding
            of its tiles and the passes of its float32 products.
        hbm: The bytes of HBM that it reads and writes. Pallas kernels count as moving their
            operands and results once, except those of experts (see `times_moved`).
        sent: The bytes that it sends along each set of mesh axes.
    """

    flops: float
    kernel: float
    hbm: float
    sent: tuple[Sent, ...]


class StepTimes(NamedTuple):
    """The seconds that the parts of a step take on each device at its peaks.

    Attributes:
        products: Seconds of `StepPlan.flops`.
        kernel: Seconds of `StepPlan.kernel`.
        hbm: Seconds of reading and writing HBM.
        hidden: Seconds of sending while products run. It may be longer than these products.
        exposed: Seconds of sending while nothing else runs.
    """

    products: float
    kernel: float
    hbm: float
    hidden: float
    exposed: float

    @property
    def device(self) -> float:
        """The duration in seconds of a whole step at the device's peak rates.

        Computing, HBM traffic and hidden sending overlap; exposed sending comes on top.
        """
        return max(self.products + self.kernel, self.hbm, self.hidden) + self.exposed


def times_of(step: StepPlan, layout: Layout, chip: Chip, linked: int) -> StepTimes:
    """Returns the times of a step.

    Args:
        step: The cost of the step.
        layout: The layout of the mesh.
        chip: The peaks of a chip.
        linked: The number of consecutive devices that fast links connect; see `link_speed`.
    """
    hidden = exposed = 0.0
    for sent in step.sent:
        axes = {"model" if axis == "query" else axis for axis in sent.axes}
        speed = min((link_speed(layout, axis, chip, linked) for axis in axes), default=chip.link)
        hidden += sent.hidden / speed
        exposed += (sent.bytes - sent.hidden) / speed
    products, kernel = step.flops / chip.flops, step.kernel / chip.flops
    return StepTimes(products, kernel, step.hbm / chip.bandwidth, hidden, exposed)


def read_step(program: Program, compiled: Any) -> StepPlan:
    """Returns the cost of a compiled step.

    Args:
        program: The program that was compiled.
        compiled: The compiled program, as JAX returns it.

    Raises:
        InputError: If programs for this kind of chip cannot be parsed.
    """
    model, layout, kind = program.model, program.layout, _kind(program)
    if kind in UNREADABLE:
        raise InputError(f"the compiled text of programs for {kind} cannot be parsed")
    rows = program.shape[0] * program.rows.hosts
    assert layout.mesh is not None
    passes = FLOAT32_TIME["tpu"] if model.dtype == jnp.bfloat16 else 1.0
    encoding = sum(
        encoder.flops * (passes if encoder.autoencoder.dtype == jnp.float32 else 1.0)
        for encoder in program.encoders
    )
    flops = model.flops([program.shape[1]] * rows) + encoding * program.shape[1] * rows
    text = text_of(program, compiled)
    moves = text.moves(text.entry)
    sent: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for move in moves:
        if move.sent:
            sent[move.axes][0] += move.sent
            sent[move.axes][1] += move.sent * move.hidden
    return StepPlan(
        flops / layout.mesh.size,
        _flops_of_delta_rule(program),
        sum(move.hbm for move in moves),
        tuple(Sent(axes, *totals) for axes, totals in sent.items()),
    )


def text_of(program: Program, compiled: Any) -> ProgramText:
    """Parses the text of a compiled program.

    Args:
        program: The program that was compiled.
        compiled: The compiled program, as JAX returns it.
    """
    config, mesh = program.model.config, program.layout.mesh
    # Each type of layers has stacked weights, whose first axis has the number of its layers.
    layers = {
        path[1]: spec.shape[0] for path, spec in program.weights.items() if path[0] == "layers"
    }
    counts = [layers[type_] for type_ in sorted(layers) if type_ in config.layer_types]
    shares = [count / sum(counts) for count in counts]
    assert mesh is not None
    times = partial(times_moved, share=1 / program.layout.size("expert"))
    return ProgramText(compiled.as_text() or "", mesh.shape, shares, times)


def times_moved(name: str, shapes: list[list[int]], share: float) -> list[float] | None:
    """Returns how often a kernel of experts reads each operand and writes its result, on average.

    Args:
        name: The name of the kernel in the compiled text.
        shapes: The shapes of its operands and, last, of its result.
        share: The share of all tokens' rows that goes to this device's experts, if all experts get
            equally many.

    Returns:
        The average number of reads of each operand and, last, of writes of the result, or None for
        other kernels.
    """
    if name == ADDED:
        _, fetches, rows, _ = shapes
        fetched = share * fetches[0] * fetches[-1]
        return [1, 1, fetched / rows[0], 1]
    if name not in (GATED, WEIGHTED):
        return None
    *others, (layers, experts, inputs, outputs), result = shapes
    tiles = share * (result[0] - experts * ROWS) / ROWS
    filled = (tiles + experts / 2) * ROWS / result[0]
    if name == WEIGHTED:
        columns = outputs // block_of(outputs, inputs * 2)
        return [1] * (len(others) - 1) + [columns * filled, 1 / layers, filled]
    columns = outputs // block_of(outputs, 2 * inputs * 2)
    fetched = columns * tiles * ROWS / others[-2][0]
    return [1] * (len(others) - 2) + [fetched, 1 / layers, 1 / layers, filled]


def _flops_of_delta_rule(program: Program) -> float:
    """Returns the number of operations of the delta rule's kernel on one device, in all layers.

    The number is 0 for a model without gated delta nets.
    """
    model, layout = program.model, program.layout
    delta = model.config.delta
    if delta is None:
        return 0.0
    rows = program.shape[0] * program.rows.hosts // layout.size(*RULES["batch"])
    heads = delta.key_heads // layout.size("model", "query")
    keys = rows, program.shape[1], heads, delta.key_size
    gates = *keys[:3], delta.values_per_key
    shapes: list[Any] = [(keys, model.dtype)] * 2 + [((*gates, delta.value_size), model.dtype)]
    shapes += [(gates, jnp.float32)] * 2 + [(keys[:2], jnp.int32)]
    layers = sum(layer < model.num_layers for layer in delta.layers)
    arrays = [jax.ShapeDtypeStruct(*array) for array in shapes]
    tile = 256 if _kind(program) in WIDE_TILES else 128
    return layers * padded_flops(pallas_delta_rule, arrays, tile) / layout.size("pipeline")


def _kind(program: Program) -> str:
    return program.rows.mesh.devices.flat[0].device_kind


def padded_flops(function: Callable[..., Any], arguments: Sequence[Any], tile: int) -> float:
    """Returns the number of operations of the matrix units in a function's Pallas kernels.

    A matrix unit multiplies the rows of the left operand by square tiles of the right one. A tile
    that is not full takes as long as a full one, so its operations count as those of a full tile. A
    float32 product with precision HIGHEST takes six passes, and counts six times. So the number
    divided by a chip's peak is the time of the products.

    Args:
        function: The function.
        arguments: Its arguments, or their shapes and dtypes.
        tile: The number of rows and columns of a tile: 128, or 256 on the chips in WIDE_TILES.
    """
    total = 0.0
    for call in equations(jax.make_jaxpr(function)(*arguments)):
        if call.primitive.name == "pallas_call":
            steps = math.prod(call.params["grid_mapping"].grid)
            for product in equations(call.params["jaxpr"]):
                if product.primitive.name == "dot_general":
                    (contracted, _), _ = product.params["dimension_numbers"]
                    left, right = (operand.aval for operand in product.invars)
                    depth = math.prod(left.shape[axis] for axis in contracted)
                    tiles = -(-depth // tile) * -(-right.size // depth // tile)
                    passes = 6 if left.dtype == jnp.float32 else 1
                    total += steps * left.size // depth * tiles * passes * 2 * tile**2
    return total


def equations(program: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, including nested ones, except those of Pallas kernels."""
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        for inner in jax.tree.leaves([*equation.params.values()]):
            if equation.primitive.name != "pallas_call" and hasattr(inner, "eqns"):
                yield from equations(inner)
