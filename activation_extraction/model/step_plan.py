"""What a step costs each device, read from the program that the compiler makes of it.

`plan_step` compiles the program of a run for devices that need not be here, and runs nothing. Of a
TPU's program, the text says what it moves and sends (program_text.py); of others, formulas do
(automatic_mesh.py).
"""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.model.automatic_mesh import Sent, StepSizes, link_speed
from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.devices import Chip
from activation_extraction.model.family import Families
from activation_extraction.model.forward import (
    ModelRequest,
    Program,
    StepMemory,
    build_model,
    compile_unloaded,
    memory_of_step,
)
from activation_extraction.model.kernel_flops import padded_flops
from activation_extraction.model.mesh import RULES, Layout
from activation_extraction.model.program_text import ProgramText
from activation_extraction.model.topologies import Topology

# Chips whose programs send in ways that program_text.py cannot read.
UNREADABLE = ("TPU7x",)
WIDE_TILES = "TPU v6 lite", "TPU7x"  # chips whose matrix units are 256 wide, not 128
LONGEST = 900  # seconds that the compiler may take
ANSWER = f"from {__name__} import answer; answer()"
# No TPU is looked for or opened, so the lock that keeps processes from sharing one is not needed.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class StepPlan:
    """What a full step costs each device.

    flops: its share of the operations that the model needs, without what several devices compute
    alike, padded tiles and a pipeline's bubble. kernel: the operations that Pallas kernels add to
    that, in float32 products of padded tiles. hbm: the bytes of memory that it reads and writes, if
    a Pallas kernel moves its operands and results once. sent: what it sends along which axes.
    by_formula: whether hbm and sent are, and not what the compiler plans.
    """

    flops: float
    kernel: float
    hbm: float
    sent: tuple[Sent, ...]
    memory: StepMemory
    by_formula: bool = False


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

    def at_shares(self, share: Mapping[str, float]) -> "StepTimes":
        """Returns the times at these shares of the peak of "products", of "hbm" and of "sent"."""
        names = ("products", "products", "hbm", "sent", "sent")
        return StepTimes(*(time / share[name] for time, name in zip(self, names, strict=True)))

    @property
    def device(self) -> float:
        """Returns the seconds of a step on a device that takes these times."""
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


def plan_step(program: Program) -> StepPlan:
    """Returns what a program costs. Raises JaxRuntimeError if it does not compile."""
    return read_step(program, compile_unloaded(program))


def read_step(program: Program, compiled: Any) -> StepPlan:
    """Returns what the compiled program of a step costs."""
    model, layout = program.model, program.layout
    rows = program.shape[0] * program.rows.hosts
    assert layout.mesh is not None
    flops = model.flops([program.shape[1]] * rows) / layout.mesh.size
    memory, device = memory_of_step(compiled), program.rows.mesh.devices.flat[0]
    sizes = StepSizes(model, program.weights, rows, program.shape[1])
    if device.platform != "tpu" or device.device_kind in UNREADABLE:
        return replace(by_formula(sizes, layout), memory=memory)
    text = text_of(program, compiled)
    moves = text.moves(text.entry)
    sent: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for move in moves:
        if move.sent:
            sent[move.axes][0] += move.sent
            sent[move.axes][1] += move.sent * move.hidden
    return StepPlan(
        flops,
        _flops_of_delta_rule(program),
        sum(move.hbm for move in moves),
        tuple(Sent(axes, *found) for axes, found in sent.items()),
        memory,
    )


def text_of(program: Program, compiled: Any) -> ProgramText:
    """Returns the text that the TPU compiler makes of a program, which can be read."""
    config, mesh = program.model.config, program.layout.mesh
    # In a model with layers of several types, how many there are of each.
    layers = {
        path[1]: spec.shape[0] for path, spec in program.weights.items() if path[0] == "layers"
    }
    counts = [layers[type_] for type_ in sorted(layers) if type_ in config.layer_types]
    assert mesh is not None
    return ProgramText(compiled.as_text() or "", mesh.shape, [n / sum(counts) for n in counts])


def by_formula(sizes: StepSizes, layout: Layout) -> StepPlan:
    """Returns by formula what a step costs on a mesh without `pipeline`; compiles nothing."""
    assert layout.mesh is not None
    flops = sizes.model.flops([sizes.length]) * sizes.rows / layout.mesh.size
    moved, sent, memory = sizes.moved(layout), sizes.sent(layout), sizes.memory(layout)
    return StepPlan(flops, 0.0, moved, sent, memory, by_formula=True)


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
    tile = 256 if program.rows.mesh.devices.flat[0].device_kind in WIDE_TILES else 128
    return layers * padded_flops(pallas_delta_rule, arrays, tile) / layout.size("pipeline")


def with_mesh(request: ModelRequest, shape: Mapping[str, int]) -> ModelRequest:
    """Returns the request with this mesh, axis -> size."""
    return replace(request, mesh_type=None, mesh_shape=(*shape.values(),), mesh_axes=(*shape,))


def program_of(families: Families, request: ModelRequest, raw: Mapping[str, Any]) -> Program:
    """Returns the program of a run. raw: the contents of the model's config.json."""
    family, config = families.parse_config(raw)
    model, rows = build_model(family, request, config)
    return Program(model, family.weight_table(model), rows, (request.rows, request.length))


def plan_elsewhere(
    families: Families, request: ModelRequest, raw: Mapping[str, Any], topology: Topology
) -> StepPlan | str:
    """Plans a step on TPUs in a process of its own, as the compiler may crash.

    request: with its mesh; the devices are the topology's. raw: the contents of the model's
    config.json. Returns why there is no plan if the step is too large or the compiler fails.
    """
    asked = pickle.dumps((families, replace(request, devices=None), dict(raw), topology))
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", ANSWER],
            input=asked,
            capture_output=True,
            timeout=LONGEST,
            env=os.environ | ENVIRONMENT | paths,
        )
    except subprocess.TimeoutExpired:
        return f"the compiler took more than {LONGEST} s"
    if done.returncode < 0:
        return f"the compiler crashed ({signal.Signals(-done.returncode).name})"
    said = done.stdout.decode(errors="replace").splitlines()
    if done.returncode or not said:
        errors = done.stderr.decode(errors="replace").strip().splitlines()
        return f"the compiler failed: {errors[-1] if errors else 'it says nothing'}"
    found = json.loads(said[-1])
    if "failure" in found:
        return found["failure"]
    sent = tuple(Sent(tuple(axes), *rest) for axes, *rest in found["sent"])
    return StepPlan(**found | {"sent": sent, "memory": StepMemory(*found["memory"])})


def answer() -> None:
    """Prints as JSON what `plan_elsewhere` asks for on stdin."""
    families, request, raw, topology = pickle.load(sys.stdin.buffer)
    try:
        request = replace(request, devices=topology.compilable())
        found = asdict(plan_step(program_of(families, request, raw)))
    except (InputError, jax.errors.JaxRuntimeError) as error:
        found = {"failure": one_line(error)}
    print(json.dumps(found))
