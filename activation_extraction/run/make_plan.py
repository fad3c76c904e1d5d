"""Makes the plan of a run: compiles its program for the machine, on each mesh that makes sense.

Of the model, it reads config.json alone. No step runs, and a plan for another machine leaves this
one's accelerators alone.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh
from tqdm import tqdm

from activation_extraction.cli.flags import Config
from activation_extraction.common.encodings import FLOAT8, VALUES
from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.common.log import log, on_terminal
from activation_extraction.model.automatic_mesh import Estimate, StepSizes, best_mesh
from activation_extraction.model.checkpoint import Checkpoint, read_json
from activation_extraction.model.devices import at_dtype, chip_of, memory_of
from activation_extraction.model.family import Families, HookedModel
from activation_extraction.model.forward import ModelRequest, model_without_mesh
from activation_extraction.model.measured_chip import measured_chip
from activation_extraction.model.mesh import (
    Layout,
    check_divisibility,
    choose_shape,
    mesh_axes,
    usable_devices,
)
from activation_extraction.model.released import released_config
from activation_extraction.model.step_plan import (
    UNREADABLE,
    StepPlan,
    by_formula,
    plan_elsewhere,
    plan_step,
    program_of,
    with_mesh,
)
from activation_extraction.model.topologies import HERE, Topology, check_compiler, topology_of
from activation_extraction.run.data_size import DataSize, data_size
from activation_extraction.run.demo import MODEL_CONFIG
from activation_extraction.run.mesh_plan import Machine, MeshPlan
from activation_extraction.run.plan import Plan
from activation_extraction.run.prepare import model_request
from activation_extraction.run.rented import (
    PRICES,
    Price,
    host_of,
    this_host,
)
from activation_extraction.store.identity import StorageOptions
from activation_extraction.store.pack_rate import pack_rate

GPU_MEMORY = 0.75  # the share that JAX takes by default


@dataclass(frozen=True)
class PlannedRun:
    """The run that is planned, and its machine.

    raw: the contents of the model's config.json. topology: None for this machine. sizes: of a step
    of all hosts.
    """

    config: Config
    families: Families
    raw: Mapping[str, Any]
    topology: Topology | None
    machine: Machine
    request: ModelRequest
    sizes: StepSizes
    data: DataSize

    def with_rows(self, rows: int) -> "PlannedRun":
        """Returns the same run with this many rows per host and step."""
        request = replace(self.request, rows=rows)
        return replace(
            self, request=request, sizes=replace(self.sizes, rows=rows * self.machine.hosts)
        )

    def hook_bytes(self, dtype: Any) -> list[int]:
        """Returns the bytes that each hook stores of a token.

        dtype: of the activations, or "float8".
        """
        model = self.sizes.model
        letters = model.config.sizes_with(self.sizes.length)
        return [hook.kind.form(letters, dtype).bytes for hook in model.hooks]


def make_plan(config: Config, families: Families) -> Plan:
    """Returns the plan of a run.

    Raises InputError for flags that the run would refuse, as far as config.json can tell, and if
    the TPU compiler is missing; RunError if no program compiles, and not for lack of memory.
    """
    run = planned_run(config, families)
    layouts = [*meshes_to_plan(run)]
    meshes = plan_meshes(run, layouts)
    rows = meshes[0].batch_size
    if config.batch_size == "auto" and rows > run.request.rows:
        meshes = plan_meshes(run.with_rows(rows), layouts)
    model, length = run.sizes.model, run.sizes.length
    kind = "" if run.topology is None else run.topology.kind
    return Plan(
        config=config,
        machine=run.machine,
        meshes=sorted(meshes, key=lambda mesh: (not mesh.fits, -mesh.tokens_per_second[1])),
        chosen=meshes[0],
        data=run.data,
        hook_bytes=run.hook_bytes(model.activation_dtype),
        encoded={name: sum(run.hook_bytes(name)) for name in (FLOAT8,)},
        flops_per_token=model.flops([length]) / length,
        price=price_of(config, kind),
        layers=(model.num_layers, model.config.num_hidden_layers),
    )


def planned_run(config: Config, families: Families) -> PlannedRun:
    """Returns what the flags ask to plan. Raises InputError."""
    assert config.plan is not None
    topology = None if config.plan == HERE else topology_of(config.plan, config.chips_per_host)
    if topology is not None:
        jax.config.update("jax_platforms", "cpu")
        if topology.is_tpu:
            check_compiler(config.plan)
    raw = read_config(config)
    family, model_config = families.parse_config(raw, config.model_path)
    described = None if topology is None else topology.described()
    devices = usable_devices(config.use_data_parallel, described)
    request = model_request(config, devices)
    model = model_without_mesh(family, request, model_config, devices[0].platform)
    machine = machine_of(config, topology, devices, model)
    rows = request.rows * machine.hosts
    sizes = StepSizes(model, family.weight_table(model), rows, request.length)
    return PlannedRun(config, families, raw, topology, machine, request, sizes, data_size(config))


def plan_meshes(run: PlannedRun, layouts: Sequence[Layout]) -> list[MeshPlan]:
    """Plans each mesh, several at a time, with a progress bar.

    Raises RunError if none compiles, and not for lack of memory.
    """
    several = f"{len(layouts)} meshes" if len(layouts) > 1 else "one mesh"
    log.info("planning a step of %d rows per host on %s", run.request.rows, several)
    with (
        tqdm(total=len(layouts), desc="planning", disable=not on_terminal(), leave=False) as bar,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):

        def planned(layout: Layout) -> MeshPlan:
            found = plan_mesh(run, layout)
            bar.update()
            return found

        meshes = list(pool.map(planned, layouts))
    reasons = [mesh.fails for mesh in meshes]
    if all(reasons) and not any("EXHAUSTED" in reason for reason in reasons):
        raise RunError(f"no mesh can be planned: {reasons[0]}")
    return meshes


def plan_mesh(run: PlannedRun, layout: Layout) -> MeshPlan:
    """Plans one mesh, by formula if its program does not compile."""
    step, sizes = plan_step_on(run, layout), run.sizes
    return MeshPlan(
        machine=run.machine,
        layout=layout,
        step=by_formula(sizes, layout) if isinstance(step, str) else step,
        rows=run.request.rows,
        tokens=sizes.rows * sizes.length,
        token_bytes=sum(run.hook_bytes(sizes.model.activation_dtype)),
        kept=run.data.kept,
        uploads=run.config.upload_to_gcs,
        fails=step if isinstance(step, str) else "",
    )


def plan_step_on(run: PlannedRun, layout: Layout) -> StepPlan | str:
    """Returns what a step costs on a mesh, or why its program does not compile."""
    topology, families, raw = run.topology, run.families, run.raw
    if topology is not None and not topology.is_tpu:
        return by_formula(run.sizes, layout)
    asked = with_mesh(run.request, layout.shape)
    if topology is not None:
        return plan_elsewhere(families, asked, raw, topology)
    try:
        return plan_step(program_of(families, asked, raw))
    except jax.errors.JaxRuntimeError as error:
        return one_line(error)


def price_of(config: Config, kind: str) -> Price:
    """Returns what a chip costs, by --chip_hour_dollars or by the table."""
    if config.chip_hour_dollars is None:
        return PRICES.get(kind, Price(None, None))
    on_demand, *spot = [(dollars, dollars) for dollars in config.chip_hour_dollars]
    return Price(on_demand, spot[0] if spot else None)


def read_config(config: Config) -> Mapping[str, Any]:
    """Returns the contents of the model's config.json, or the released model's known sizes."""
    if config.demo:
        return MODEL_CONFIG
    known = None if os.path.exists(config.model_path) else released_config(config.model_path)
    try:
        checkpoint = Checkpoint(config.model_path, config.model_revision)
        return read_json(checkpoint.file("config.json"))
    except InputError as error:
        if known is None:
            raise
        log.info("%s; the plan uses the known sizes of this model", error)
        return known


def machine_of(
    config: Config, topology: Topology | None, devices: Sequence[Any], model: HookedModel
) -> Machine:
    """Returns what is known of the machine, and measures what can be measured here.

    topology: None for this machine.
    """
    encoded = model.activation_dtype == FLOAT8
    stored = VALUES if encoded else np.dtype(model.activation_dtype)
    pack = pack_rate(stored, config.shard_format, config.compress_shards)
    cores = StorageOptions(threads=config.writer_threads).writer_threads
    if topology is None:
        known, memory = chip_of(devices[0]), memory_of(devices[0])
        on_cpu = devices[0].platform == "cpu"
        if known is None:
            chip = measured_chip(model.config, model.dtype, len(devices) if on_cpu else 1)
        else:
            chip = at_dtype(known, model.dtype, devices[0].platform)
        chip = chip._replace(memory=memory or chip.memory)
        name = f"this machine ({len(devices)} x {devices[0].device_kind})"
        here = this_host(cores)
        return Machine(name, devices, len(devices), 1, chip, known is None, here, pack)
    chip = at_dtype(topology.chip, model.dtype, devices[0].platform)
    host = host_of(topology.kind, topology.chips // topology.hosts)
    if not topology.is_tpu:
        chip = chip._replace(memory=GPU_MEMORY * chip.memory)
    if config.writer_threads and host.cores:
        host = host._replace(cores=min(config.writer_threads, host.cores))
    return Machine(topology.name, devices, topology.chips, topology.hosts, chip, False, host, pack)


def meshes_to_plan(run: PlannedRun) -> Iterator[Layout]:
    """Yields the mesh that the run would take, and with `auto` others beside it.

    The others are pure `data`, and for each other axis the shortest step by formula on a mesh of
    `data` and that axis. Raises InputError if a mesh that was asked for cannot split the step.
    """
    request, sizes, machine = run.request, run.sizes, run.machine
    devices, limit = machine.devices, machine.chip.memory
    estimates: list[Estimate] = []

    def automatic() -> tuple[dict[str, int], str]:
        estimates.extend(sizes.estimates(devices))
        return best_mesh(estimates, limit)

    shape, why = choose_shape(
        request.mesh_type,
        request.mesh_shape if request.every_device else None,
        request.mesh_axes if request.every_device else None,
        devices=len(devices),
        hosts=machine.hosts,
        automatic=automatic,
    )
    if why:
        log.info("the run's mesh: %s", why)
    model = sizes.model.config
    first = layout_of(shape, model.num_key_value_heads)
    check_divisibility(first, sizes.rows, sizes.length, model.sizes)
    readable = devices[0].platform == "tpu" and devices[0].device_kind not in UNREADABLE
    if not readable and first.size("pipeline") > 1:
        raise InputError(f"--mesh_axes pipeline: cannot be planned for {machine.name}")
    yield first
    if not request.every_device:
        return
    taken = [_splitting(first)]
    estimates.sort(key=lambda each: (not each.fits(limit), each.seconds))
    for each in estimates:
        splitting = _splitting(each.layout)
        if splitting not in taken and len(splitting) <= 1:
            taken.append(splitting)
            yield each.layout


def _splitting(layout: Layout) -> set[str]:
    """Returns the axes other than `data` that have several devices."""
    return {axis for axis, size in layout.shape.items() if size > 1 and axis != "data"}


def layout_of(shape: Mapping[str, int], kv_heads: int) -> Layout:
    """Returns a mesh without devices. shape: mesh axis -> size."""
    names, sizes = mesh_axes(shape, kv_heads)
    return Layout(AbstractMesh(tuple(sizes), tuple(names)))
