"""Estimates the resources of a run on a machine that is not rented yet, for --plan.

The estimate has four parts: the mesh, whether the run fits in memory, its hours, and its bytes. If
a price is given, it also has dollars. Memory and the fastest possible step follow from the formula
by which `--mesh_type auto` chooses (step_cost.py). For TPUs, the compiler also reports the memory
of the compiled program; that needs libtpu, but no TPU. Only config.json of the model is read, and
nothing is computed.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import jax

from activation_extraction.cli.flags import DATASET, Config
from activation_extraction.common.errors import InputError, install_extra, one_line
from activation_extraction.common.log import log
from activation_extraction.common.visible import counted, say
from activation_extraction.model.devices import USABLE, memory_of
from activation_extraction.model.family import parse_model_config
from activation_extraction.model.forward import Program, bytes_of_step
from activation_extraction.model.mesh import in_words
from activation_extraction.model.model_setup import StepRequest, build_model, choose_hooks
from activation_extraction.model.released import released_config
from activation_extraction.model.repository import Repository, check_adapter, read_json
from activation_extraction.model.step_cost import CostModel
from activation_extraction.run.demo import MODEL_CONFIG
from activation_extraction.run.prepare import step_request
from activation_extraction.run.topologies import Topology, topology_of
from qwen2_jax import weight_table

# The guessed speed of a run, at worst and at best, as a fraction of the peak speed of its chips.
# Published runs that store nothing reach 0.02 (mixtures of experts on v6e) to 0.7 (training of
# dense models on v4 to v6e). The work of the hosts is not included.
GUESSED_SHARES = (0.15, 0.7)
# (data set, configuration) -> the number of its documents, from published counts.
KNOWN_DOCUMENTS = {
    (DATASET[0], "sample-10BT"): 9_672_101,
    (DATASET[0], "sample-350BT"): 339_347_842,
}
# Environment variables that libtpu reads when it is loaded. Because there is no TPU, it would warn
# about each missing variable. TPU_ACCELERATOR_TYPE may be any type, because a program names the
# accelerator for which it is compiled.
LIBTPU_VARIABLES = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
TOKENS_OF_A_DOCUMENT = 1_000  # about the mean of FineWeb-Edu


@dataclass(frozen=True)
class Amount:
    """The amount of work of a whole run.

    Attributes:
        computed: The number of tokens that go through the model.
        stored: The number of tokens whose activations are stored.
    """

    computed: float
    stored: float


@dataclass(frozen=True)
class PlannedRun:
    """A run and the machine that it is planned for.

    Attributes:
        raw: The content of config.json.
        topology: The machine.
        request: The request for a step: model, hooks, mesh and shape.
        amount: The amount of work. None if the amount of data is unknown.
    """

    raw: Mapping[str, Any]
    topology: Topology
    request: StepRequest
    amount: Amount | None


def print_estimate(config: Config) -> int:
    """Prints the estimate of a run, in words or as the JSON that --help describes.

    It covers the mesh that the flags ask for and, if that is another one, the mesh of --mesh_type
    auto.

    Args:
        config: The configuration, which contains --plan.

    Returns:
        The exit status, 0.

    Raises:
        InputError: The machine is unknown, or the run would refuse the flags, as far as config.json
            shows that.
    """
    check_adapter(config.model.lora)
    run = planned_run(config)
    automatic = replace(run.request.computing, mesh_type="auto", mesh_shape=None, mesh_axes=None)
    auto = replace(run.request, computing=automatic)
    programs = [(request, program_of(run, request)) for request in (auto, run.request)]
    token_bytes = sum(programs[0][1].token_bytes.values())
    if programs[0][1].layout.shape == programs[1][1].layout.shape:
        programs.pop()
    meshes = [estimate_mesh(run, request, program) for request, program in programs]
    fitting = [mesh for mesh in meshes if mesh["fits"]]
    best = max(fitting, key=lambda mesh: mesh["tokens_per_second"][1], default=None)
    totals = estimate_totals(run, best, token_bytes, config)
    if config.looking.json:
        say(json.dumps({"meshes": meshes, "best": best} | totals))
    else:
        say(*lines_of(run, meshes, totals, token_bytes, config.planning.tokens_per_second))
    return 0


def planned_run(config: Config) -> PlannedRun:
    """Returns the run that the flags describe, and the machine that it is planned for.

    It reads the model's config.json and the autoencoders, and makes JAX use only the CPU.

    Args:
        config: The configuration, in which --plan names the machine.

    Raises:
        InputError: The machine is unknown, or config.json or an autoencoder cannot be read.
    """
    topology = topology_of(config.planning.plan or "", config.planning.chips_per_host)
    jax.config.update("jax_platforms", "cpu")  # this machine's accelerators are left alone
    request = step_request(config, planned=topology.described())
    if config.computing.batch_size == "auto":
        log.info("--batch_size auto: a run may take more than these %d rows", request.shape[0])
    return PlannedRun(read_config(config), topology, request, amount_of(config))


def read_config(config: Config) -> Mapping[str, Any]:
    """Returns the content of the model's config.json, or the known one of a released model.

    Args:
        config: The configuration, which names the model.

    Raises:
        InputError: config.json cannot be read, and no sizes of this model are known.
    """
    if config.demo:
        return MODEL_CONFIG
    model_path = config.model.model_path
    released = None if os.path.exists(model_path) else released_config(model_path)
    try:
        repository = Repository(model_path, config.model.model_revision)
        return read_json(repository.file("config.json"))
    except InputError as error:
        if released is None:
            raise
        log.info("%s; the estimate uses the known sizes of this model", error)
        return released


def program_of(run: PlannedRun, request: StepRequest) -> Program:
    """Returns the program of a step.

    Args:
        run: The planned run.
        request: The request for the step, which may have another mesh or devices than the run's.

    Raises:
        InputError: A run would refuse the model or the mesh, or the mesh has a pipeline.
    """
    config = parse_model_config(run.raw, request.model.model_path)
    model, rows = build_model(request, config)
    if model.layout.size("pipeline") > 1:
        raise InputError("--mesh_type, --mesh_axes: --plan has no formula for a pipeline")
    hooks = choose_hooks(request, config)
    return Program(model, weight_table(model), rows, request.shape, *hooks)


def estimate_mesh(run: PlannedRun, request: StepRequest, program: Program) -> dict[str, Any]:
    """Estimates a step of a program, which is compiled for a TPU if libtpu is installed.

    Args:
        run: The planned run.
        request: The request for the step.
        program: The program of this request.

    Returns:
        The facts about a mesh that --json prints:

        - shape: The size of each axis by its name.
        - fits: Whether the run fits in the memory of a device.
        - memory_gb: GB on each device, by formula.
        - compiled_gb: GB on each device, by the compiler; None if it was not asked or failed.
        - step_ms: Milliseconds of a step at the peak speed of the chips.
        - tokens_per_second: The guessed speed of the whole machine, at worst and at best.
    """
    layout = program.layout
    devices = [*program.rows.mesh.devices.flat]
    rows_of_host, length = request.shape
    rows = rows_of_host * program.rows.hosts
    step = CostModel(program.model, program.weights, rows, length, program.encoders).estimate(
        layout, devices
    )
    room = USABLE * (memory_of(devices[0]) or 0)
    compiled = None
    fits = step.memory <= room
    if run.topology.is_tpu:
        try:
            compiled = compiled_bytes(run, request)
            if compiled is not None:
                fits = compiled <= room
        except (InputError, jax.errors.JaxRuntimeError) as error:
            log.warning("mesh %s: %s", in_words(layout.shape), one_line(error))
            fits = fits and "RESOURCE_EXHAUSTED" not in str(error)
    speed = rows * length / step.seconds
    return {
        "shape": layout.shape,
        "fits": fits,
        "memory_gb": step.memory / 1e9,
        "compiled_gb": None if compiled is None else compiled / 1e9,
        "step_ms": 1e3 * step.seconds,
        "tokens_per_second": [share * speed for share in GUESSED_SHARES],
    }


def compiled_bytes(run: PlannedRun, request: StepRequest) -> float | None:
    """Returns the bytes of memory that the compiler plans on each TPU.

    Args:
        run: The planned run.
        request: The request for the step to compile.

    Returns:
        None if libtpu, the compiler, is not installed.

    Raises:
        InputError: The compiler knows no such machine, or does not say how much memory it needs.
        JaxRuntimeError: The program cannot be compiled, for example because it does not fit.
    """
    if find_spec("libtpu") is None:
        log.info(
            "nothing is compiled: that needs libtpu, the TPU compiler; %s", install_extra("plan")
        )
        return None
    for variable, value in LIBTPU_VARIABLES.items():
        os.environ.setdefault(variable, value)
    program = program_of(run, replace(request, devices=run.topology.compilable()))
    log.info("compiling the program for the mesh %s", in_words(program.layout.shape))
    return bytes_of_step(program)


def amount_of(config: Config) -> Amount | None:
    """Returns the amount of work of a run, assuming that all documents have the mean length.

    Args:
        config: The configuration.

    Returns:
        None if there is no limit and the number of documents is unknown.
    """
    text, storage = config.text, config.storage
    length = tokens_of_a_sample(text.max_seq_length)
    kept_fraction = text.positions.expected(length) / length
    computed = math.inf
    documents = KNOWN_DOCUMENTS.get((text.dataset_name or "", text.dataset_config or ""))
    if documents is not None:
        document_length = TOKENS_OF_A_DOCUMENT if text.long_documents == "split" else length
        computed = documents / config.hosts.total_machines * document_length
    if storage.max_samples is not None:
        computed = min(computed, storage.max_samples * length)
    if storage.max_tokens is not None and kept_fraction:
        computed = min(computed, storage.max_tokens / kept_fraction)
    if math.isinf(computed):
        return None
    return Amount(computed, computed * kept_fraction)


def tokens_of_a_sample(max_seq_length: int) -> int:
    """Returns the assumed number of tokens of a sample: a mean document, cut to a row.

    Args:
        max_seq_length: Tokens of a row.
    """
    return min(TOKENS_OF_A_DOCUMENT, max_seq_length)


def estimate_totals(
    run: PlannedRun, best: Mapping[str, Any] | None, token_bytes: int, config: Config
) -> dict[str, Any]:
    """Returns the hours, dollars and terabytes of the whole run.

    Args:
        run: The planned run.
        best: The fastest mesh that fits, from `estimate_mesh`. None if no mesh fits.
        token_bytes: The bytes of a stored token, before compression.
        config: The configuration, which may contain the speed and the price.

    Returns:
        "hours" and "dollars", each [least, most], and "terabytes" before compression. A value is
        None if it is unknown.
    """
    hours = dollars = terabytes = None
    if run.amount is not None:
        terabytes = run.amount.stored * token_bytes / 1e12
        if best is not None:
            slowest, fastest = best["tokens_per_second"]
            tokens = run.amount.computed
            if config.planning.tokens_per_second is not None:
                slowest = fastest = config.planning.tokens_per_second * run.topology.hosts
                tokens = run.amount.stored
            hours = [tokens / fastest / 3600, tokens / slowest / 3600]
        if hours is not None and config.planning.chip_hour_dollars:
            prices = config.planning.chip_hour_dollars
            least, most = hours[0] * min(prices), hours[1] * max(prices)
            dollars = [run.topology.chips * least, run.topology.chips * most]
    return {"hours": hours, "dollars": dollars, "terabytes": terabytes}


def lines_of(
    run: PlannedRun,
    meshes: Sequence[Mapping[str, Any]],
    totals: Mapping[str, Any],
    token_bytes: int,
    tokens_per_second: float | None,
) -> Iterator[str]:
    """Yields the lines of the estimate in words.

    Args:
        run: The planned run.
        meshes: The results of `estimate_mesh`.
        totals: The result of `estimate_totals`.
        token_bytes: The bytes of a stored token, before compression.
        tokens_per_second: The stored tokens per second of each host, as --tokens_per_second gives
            them. None if the speed is guessed.
    """
    machine = run.topology
    rows_of_host, length = run.request.shape
    hosts = f"{counted(machine.chips, 'chip')} on {counted(machine.hosts, 'host')}"
    rows = f"{counted(rows_of_host, 'row')} of {counted(length, 'token')}"
    yield f"{machine.name}: {hosts}, each of which feeds {rows} per step"
    for mesh in meshes:
        memory = f"{short(mesh['memory_gb'])} GB per device by formula"
        if mesh["compiled_gb"] is not None:
            memory += f", {short(mesh['compiled_gb'])} GB by the compiler"
        yield (
            f"mesh {in_words(mesh['shape'])}: {'fits' if mesh['fits'] else 'does not fit'} "
            f"({memory}); {short(mesh['step_ms'])} ms per step at the chips' peak speed"
        )
    if totals["hours"] is None:
        reason = "nothing says how much data there is" if run.amount is None else "no mesh fits"
        yield f"time: unknown ({reason})"
    elif tokens_per_second is not None:
        yield (
            f"time: {duration(totals['hours'][0])}, at {tokens_per_second:,.10g} stored tokens per "
            "second and host (--tokens_per_second)"
        )
    else:
        low, high = (f"{share:.0%}" for share in GUESSED_SHARES)
        yield (
            f"time: {between(map(duration, totals['hours']))}; a guess, which assumes that the "
            f"fastest mesh above reaches {low} to {high} of its chips' peak speed, and that hosts "
            "and uploads keep up. To know it, run --max_samples 200 on this machine and give the "
            "tokens/s of its last line, 'time: ...', as --tokens_per_second"
        )
    if totals["terabytes"] is not None:
        yield (
            f"stored: {size(totals['terabytes'])} before compression, {token_bytes:,} bytes per "
            f"token; {samples_in_words(run)}"
        )
    else:
        yield f"stored: {token_bytes:,} bytes per token before compression"
    if totals["dollars"] is not None:
        yield f"cost: {between(f'${dollars:,.2f}' for dollars in totals['dollars'])}"


def samples_in_words(run: PlannedRun) -> str:
    """Returns the assumption about the length of samples, in words."""
    length = tokens_of_a_sample(run.request.shape[1])
    return f"a sample is taken to have {counted(length, 'token')}, as FineWeb-Edu's have on average"


def duration(hours: float) -> str:
    """Returns a time in words with two significant digits, such as "3.5 hours".

    Args:
        hours: The time in hours.
    """
    for unit, length in (("day", 24), ("hour", 1), ("minute", 1 / 60)):
        number = float(f"{hours / length:.2g}")
        if number >= 1:
            if unit == "day" and number < 2:
                continue
            return f"{number:,.10g} {unit}" if number == 1 else f"{number:,.10g} {unit}s"
    return "under a minute"


def size(terabytes: float) -> str:
    """Returns a number of bytes in words, such as "1.25 TB".

    Args:
        terabytes: The number in TB. It is shown in the largest unit that gives at least 1.
    """
    units = {"TB": 1.0, "GB": 1e-3, "MB": 1e-6}
    unit = next((unit for unit, length in units.items() if terabytes >= length), "MB")
    return f"{short(terabytes / units[unit])} {unit}"


def between(ends: Iterable[str]) -> str:
    """Returns a range in words, such as "1 hour to 2 hours"; equal ends are named once."""
    return " to ".join(dict.fromkeys(ends))


def short(number: float) -> str:
    """Returns a number with three significant digits."""
    return f"{float(f'{number:.3g}'):,.10g}"
