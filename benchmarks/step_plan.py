"""What a step costs each TPU, read from the program that the compiler makes of it.

`read_step` knows what the numbers mean that program_text.py finds in the compiled text, and
`times_of` what they take at a chip's peaks. Nothing runs.
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

UNREADABLE = ("TPU7x",)  # chips whose programs send in ways that program_text.py cannot read
WIDE_TILES = "TPU v6 lite", "TPU7x"  # chips whose matrix units are 256 wide, not 128


class Sent(NamedTuple):
    """The bytes that a device sends along these mesh axes in a step.

    hidden: those of them that are sent while products run.
    """

    axes: tuple[str, ...]
    bytes: float
    hidden: float


@dataclass(frozen=True)
class StepPlan:
    """What a full step costs each device.

    flops: its share of the operations that the model and autoencoders need, without what several
    devices compute alike, padded tiles and a pipeline's bubble; those of float32 autoencoders in a
    bfloat16 model count as often as they pass a matrix unit. kernel: the operations that Pallas
    kernels add to that, in float32 products of padded tiles. hbm: the bytes of memory that it reads
    and writes, if a Pallas kernel moves its operands and results once; those of experts say what
    they move. sent: what it sends along which axes.
    """

    flops: float
    kernel: float
    hbm: float
    sent: tuple[Sent, ...]


class StepTimes(NamedTuple):
    """How long the parts of a step take on each device at its peaks, in seconds.

    kernel: see `StepPlan`; hidden: what is sent while products run, which may take longer than
    they do; exposed: what is sent while nothing else runs.
    """

    products: float
    kernel: float
    hbm: float
    hidden: float
    exposed: float

    @property
    def device(self) -> float:
        """Returns the seconds of a step, if a run reached the peaks."""
        return max(self.products + self.kernel, self.hbm, self.hidden) + self.exposed


def times_of(step: StepPlan, layout: Layout, chip: Chip, linked: int) -> StepTimes:
    """Returns the times of a step on this mesh. linked: see `linked_devices`."""
    hidden = exposed = 0.0
    for each in step.sent:
        axes = {"model" if axis == "query" else axis for axis in each.axes}
        speed = min((link_speed(layout, axis, chip, linked) for axis in axes), default=chip.link)
        hidden += each.hidden / speed
        exposed += (each.bytes - each.hidden) / speed
    products, kernel = step.flops / chip.flops, step.kernel / chip.flops
    return StepTimes(products, kernel, step.hbm / chip.bandwidth, hidden, exposed)


def read_step(program: Program, compiled: Any) -> StepPlan:
    """Returns what the compiled program of a step costs. Raises InputError for some chips."""
    model, layout, kind = program.model, program.layout, _kind(program)
    if kind in UNREADABLE:
        raise InputError(f"the text of programs for {kind} cannot be read")
    rows = program.shape[0] * program.rows.hosts
    assert layout.mesh is not None
    passes = FLOAT32_TIME["tpu"] if model.dtype == jnp.bfloat16 else 1.0
    encoding = sum(
        each.flops * (passes if each.autoencoder.dtype == jnp.float32 else 1.0)
        for each in program.encoders
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
        tuple(Sent(axes, *found) for axes, found in sent.items()),
    )


def text_of(program: Program, compiled: Any) -> ProgramText:
    """Returns the text that the TPU compiler makes of a program, which can be read."""
    config, mesh = program.model.config, program.layout.mesh
    # In a model with layers of several types, how many there are of each.
    layers = {
        path[1]: spec.shape[0] for path, spec in program.weights.items() if path[0] == "layers"
    }
    counts = [layers[type_] for type_ in sorted(layers) if type_ in config.layer_types]
    shares = [count / sum(counts) for count in counts]
    assert mesh is not None
    times = partial(times_moved, share=1 / program.layout.size("expert"))
    return ProgramText(compiled.as_text() or "", mesh.shape, shares, times)


def times_moved(name: str, shapes: list[list[int]], share: float) -> list[float] | None:
    """Returns how often a kernel reads each of its operands, and writes its result, on average.

    name, shapes: as in a compiled program, the result's shape last; None if it is no kernel of
    experts. share: of all tokens' rows, that of this device's experts, which get equally many.
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
    """Returns how many operations the delta rule's kernel takes of a device in all layers."""
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
    arrays = [jax.ShapeDtypeStruct(*each) for each in shapes]
    tile = 256 if _kind(program) in WIDE_TILES else 128
    return layers * padded_flops(pallas_delta_rule, arrays, tile) / layout.size("pipeline")


def _kind(program: Program) -> str:
    return program.rows.mesh.devices.flat[0].device_kind


def padded_flops(function: Callable[..., Any], arguments: Sequence[Any], tile: int) -> float:
    """Returns what the matrix units do for the Pallas kernels of a function, in operations.

    It compares with a chip's peak: the rows of a product go through square tiles of its other
    operand, however full these are, once for each pass. Products of float32 take six passes with
    precision HIGHEST. tile: 128, or 256 on v6e.
    """
    total = 0.0
    for call in equations(jax.make_jaxpr(function)(*arguments)):
        if call.primitive.name == "pallas_call":
            steps = math.prod(call.params["grid_mapping"].grid)
            for each in equations(call.params["jaxpr"]):
                if each.primitive.name == "dot_general":
                    (contracted, _), _ = each.params["dimension_numbers"]
                    left, right = (operand.aval for operand in each.invars)
                    depth = math.prod(left.shape[axis] for axis in contracted)
                    tiles = -(-depth // tile) * -(-right.size // depth // tile)
                    passes = 6 if left.dtype == jnp.float32 else 1
                    total += steps * left.size // depth * tiles * passes * 2 * tile**2
    return total


def equations(program: Any) -> Iterator[Any]:
    """Yields the equations of a program, those inside of others included."""
    for each in getattr(program, "jaxpr", program).eqns:
        yield each
        for inner in jax.tree.leaves([*each.params.values()]):
            if each.primitive.name != "pallas_call" and hasattr(inner, "eqns"):
                yield from equations(inner)
