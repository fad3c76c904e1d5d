"""Estimates the resources of a run on a machine that is not rented yet, for --plan.

The estimate names the mesh, says whether the run fits in memory, and gives its hours and the bytes
that it stores. If the price of a chip is known, it also gives dollars. The memory and the fastest
possible step are computed by the formula by which `--mesh_type auto` chooses a mesh (step_cost.py).
For TPUs, the compiler also reports the memory of the compiled program, which needs libtpu but no
TPU. Only config.json of the model is read, and the model is not run. topologies.py describes the
machines.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import jax

from activation_extraction.cli.flags import DEFAULT_DATASET, Config
from activation_extraction.common.errors import InputError, install_extra_advice, one_line
from activation_extraction.common.log import log
from activation_extraction.common.visible import counted, say
from activation_extraction.model.devices import USABLE, memory_of
from activation_extraction.model.family import parse_model_config
from activation_extraction.model.forward import Program, bytes_of_step
from activation_extraction.model.mesh import shape_phrase
from activation_extraction.model.model_setup import StepRequest, build_model, choose_hooks
from activation_extraction.model.released import released_config
from activation_extraction.model.repository import Repository, check_adapter, read_json
from activation_extraction.model.step_cost import CostModel
from activation_extraction.run.demo import MODEL_CONFIG
from activation_extraction.run.prepare import step_request
from activation_extraction.run.topologies import Topology, topology_of
from qwen2_jax import weight_table

# The lowest and the highest guess of the fraction of the chips' peak speed that a run reaches.
# Published runs that store nothing reach 0.02 (mixtures of experts on v6e) to 0.7 (training of
# dense models on v4 to v6e). The work of the hosts is not included.
GUESSED_FRACTIONS = (0.15, 0.7)
# Number of documents of a data set on the hub, by its name and configuration, as published.
KNOWN_DOCUMENTS = {
    (DEFAULT_DATASET.name, "sample-10BT"): 9_672_101,
    (DEFAULT_DATASET.name, "sample-350BT"): 339_347_842,
}
# Environment variables that libtpu reads when it is loaded. Without a TPU, libtpu warns about each
# of them that is missing. TPU_ACCELERATOR_TYPE may be any type, because a program names the
# accelerator for which it is compiled.
LIBTPU_VARIABLES = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
TOKENS_OF_A_DOCUMENT = 1_000  # approximate mean number of tokens of a document of FineWeb-Edu


@dataclass(frozen=True)
class TokenCounts:
    """The numbers of tokens that one machine computes and stores in a whole run.

    Attributes:
        num_computed_tokens: The number of tokens that the model computes.
        num_stored_tokens: The number of tokens whose activations are stored.
    """

    num_computed_tokens: float
    num_stored_tokens: float


@dataclass(frozen=True)
class PlannedRun:
    """A run and the machine that it is planned for.

    Attributes:
        model_config: The content of the model's config.json.
        topology: The machine.
        step_request: The request for a step: model, hooks, mesh and shape.
        token_counts: The numbers of tokens that the machine computes and stores. None if the amount
            of data is unknown.
    """

    model_config: Mapping[str, Any]
    topology: Topology
    step_request: StepRequest
    token_counts: TokenCounts | None


def print_estimate(config: Config) -> int:
    """Prints the estimate of a run.

    With --json, the estimate is printed as a JSON object, which --help describes. Otherwise it is
    printed in words.

    The estimate covers the mesh that the flags ask for. If --mesh_type auto would choose another
    mesh, the estimate covers that mesh, too.

    Args:
        config: The configuration, which contains --plan.

    Returns:
        The exit status, 0.

    Raises:
        InputError: If the accelerators are unknown, or if the run would reject the flags for this
            model.
    """
    check_adapter(config.model_options.lora)
    run_to_estimate = planned_run(config)
    computing_options_with_automatic_mesh = replace(
        run_to_estimate.step_request.computing_options,
        mesh_type="auto",
        mesh_shape=None,
        mesh_axes=None,
    )
    request_with_automatic_mesh = replace(
        run_to_estimate.step_request, computing_options=computing_options_with_automatic_mesh
    )
    program_with_automatic_mesh = program_of(run_to_estimate, request_with_automatic_mesh)
    requested_program = program_of(run_to_estimate, run_to_estimate.step_request)
    bytes_per_token = sum(program_with_automatic_mesh.token_bytes.values())
    mesh_estimates = [
        estimate_mesh(run_to_estimate, request_with_automatic_mesh, program_with_automatic_mesh)
    ]
    if requested_program.layout.shape != program_with_automatic_mesh.layout.shape:
        mesh_estimates.append(
            estimate_mesh(run_to_estimate, run_to_estimate.step_request, requested_program)
        )
    fitting_mesh_estimates = [
        mesh_estimate for mesh_estimate in mesh_estimates if mesh_estimate["fits"]
    ]
    fastest_mesh_estimate = max(
        fitting_mesh_estimates,
        key=lambda mesh_estimate: mesh_estimate["tokens_per_second"][1],
        default=None,
    )
    estimated_totals = estimate_totals(
        run_to_estimate, fastest_mesh_estimate, bytes_per_token, config
    )
    if config.inspection_options.json:
        say(
            json.dumps({"meshes": mesh_estimates, "best": fastest_mesh_estimate} | estimated_totals)
        )
    else:
        say(
            *lines_of(
                run_to_estimate,
                mesh_estimates,
                estimated_totals,
                bytes_per_token,
                config.plan_options.tokens_per_second,
            )
        )
    return 0


def planned_run(config: Config) -> PlannedRun:
    """Returns the run that the flags describe, with the accelerators for which it is planned.

    This function reads the model's config.json and the autoencoders. After the call, JAX uses only
    the CPU.

    Args:
        config: The configuration, in which --plan names the accelerators, such as "v5e:8x8".

    Raises:
        InputError: If the accelerators are unknown, or if config.json or an autoencoder cannot be
            read.
    """
    planned_topology = topology_of(
        config.plan_options.plan or "", config.plan_options.chips_per_host
    )
    # Without this setting, JAX would reserve the memory of this machine's accelerators, which the
    # estimate does not need.
    jax.config.update("jax_platforms", "cpu")
    planned_request = step_request(config, planned=planned_topology.describe_devices())
    if config.computing_options.batch_size == "auto":
        log.info(
            "--batch_size auto: a run may take more than these %d rows",
            planned_request.batch_shape[0],
        )
    return PlannedRun(
        read_config(config), planned_topology, planned_request, token_counts_of(config)
    )


def read_config(config: Config) -> Mapping[str, Any]:
    """Returns the content of the model's config.json.

    This program contains the sizes of some released models. They are returned if config.json of
    such a model cannot be read.

    Args:
        config: The configuration, which names the model.

    Raises:
        InputError: If config.json cannot be read, and the program does not contain the sizes of the
            model.
    """
    if config.demo:
        return MODEL_CONFIG
    model_path = config.model_options.model_path
    config_of_released_model = None
    if not os.path.exists(model_path):
        config_of_released_model = released_config(model_path)
    try:
        model_repository = Repository(model_path, config.model_options.model_revision)
        return read_json(model_repository.file("config.json"))
    except InputError as error:
        if config_of_released_model is None:
            raise
        log.info("%s; the estimate uses the known sizes of this model", error)
        return config_of_released_model


def program_of(run: PlannedRun, request: StepRequest) -> Program:
    """Returns the program that computes a step, without compiling it.

    Args:
        run: The planned run.
        request: The request for the step. Its mesh or devices may differ from `run.step_request`.

    Raises:
        InputError: If the run would reject the model or the mesh, or if the mesh has the axis
            pipeline.
    """
    model_config = parse_model_config(run.model_config, request.model_options.model_path)
    model, host_row_shardings = build_model(request, model_config)
    if model.layout.size("pipeline") > 1:
        raise InputError("--mesh_type, --mesh_axes: --plan has no formula for a pipeline")
    hooks_and_encoders = choose_hooks(request, model_config)
    return Program(
        model, weight_table(model), host_row_shardings, request.batch_shape, *hooks_and_encoders
    )


def estimate_mesh(run: PlannedRun, request: StepRequest, program: Program) -> dict[str, Any]:
    """Estimates the memory and the time of a step on one mesh of the planned machine.

    If the machine has TPUs and libtpu is installed here, the program is also compiled.

    Args:
        run: The planned run.
        request: The request for the step, which determines the mesh.
        program: The program that `program_of` returns for this request.

    Returns:
        A JSON object about the mesh, which --json prints, with these keys:

        - shape: The size of each mesh axis by its name.
        - fits: Whether the run fits in the memory of each device.
        - memory_gb: Memory in GB that the run needs on each device, computed by formula.
        - compiled_gb: Memory in GB that the run needs on each device, as the compiler reports it.
          None if the program was not compiled or the compiler failed.
        - step_ms: Milliseconds of a step at the peak speed of the chips.
        - tokens_per_second: A list of the lowest and the highest guess of the number of tokens
          that the whole machine computes per second.
    """
    mesh_layout = program.layout
    devices_of_mesh = [*program.host_rows.mesh.devices.flat]
    rows_per_host, tokens_per_row = request.batch_shape
    num_rows_of_step = rows_per_host * program.host_rows.num_hosts
    cost_model = CostModel(
        program.model, program.weight_table, num_rows_of_step, tokens_per_row, program.encoders
    )
    step_cost = cost_model.estimate(mesh_layout, devices_of_mesh)
    usable_bytes_of_device = USABLE * (memory_of(devices_of_mesh[0]) or 0)
    memory_bytes_from_compiler = None
    fits_in_memory = step_cost.needed_memory_bytes <= usable_bytes_of_device
    if run.topology.is_tpu:
        try:
            memory_bytes_from_compiler = bytes_of_compiled_step(run, request)
            if memory_bytes_from_compiler is not None:
                fits_in_memory = memory_bytes_from_compiler <= usable_bytes_of_device
        except (InputError, jax.errors.JaxRuntimeError) as error:
            log.warning("mesh %s: %s", shape_phrase(mesh_layout.shape), one_line(error))
            fits_in_memory = fits_in_memory and "RESOURCE_EXHAUSTED" not in str(error)
    peak_tokens_per_second = num_rows_of_step * tokens_per_row / step_cost.seconds
    return {
        "shape": mesh_layout.shape,
        "fits": fits_in_memory,
        "memory_gb": step_cost.needed_memory_bytes / 1e9,
        "compiled_gb": None
        if memory_bytes_from_compiler is None
        else memory_bytes_from_compiler / 1e9,
        "step_ms": 1e3 * step_cost.seconds,
        "tokens_per_second": [
            fraction_of_peak * peak_tokens_per_second for fraction_of_peak in GUESSED_FRACTIONS
        ],
    }


def bytes_of_compiled_step(run: PlannedRun, request: StepRequest) -> float | None:
    """Compiles a step, and returns the bytes of memory that it needs on each TPU.

    Args:
        run: The planned run.
        request: The request for the step to compile.

    Returns:
        The bytes, as the compiler reports them. None if libtpu, the compiler, is not installed.

    Raises:
        InputError: If the compiler does not know the TPU topology of the planned machine, or if it
            does not report the memory.
        JaxRuntimeError: If the program cannot be compiled, for example because it does not fit.
    """
    if find_spec("libtpu") is None:
        log.info(
            "nothing is compiled: that needs libtpu, the TPU compiler; %s",
            install_extra_advice("plan"),
        )
        return None
    for environment_variable_name, environment_variable_value in LIBTPU_VARIABLES.items():
        os.environ.setdefault(environment_variable_name, environment_variable_value)
    program_to_compile = program_of(
        run, replace(request, devices_of_planned_machine=run.topology.compiler_devices())
    )
    log.info("compiling the program for the mesh %s", shape_phrase(program_to_compile.layout.shape))
    return bytes_of_step(program_to_compile)


def token_counts_of(config: Config) -> TokenCounts | None:
    """Returns the numbers of tokens that one machine computes and stores in a whole run.

    All documents are assumed to have TOKENS_OF_A_DOCUMENT tokens.

    Args:
        config: The configuration.

    Returns:
        The numbers of tokens. None if the number of documents is unknown and neither --max_samples
        nor --max_tokens limits the run.
    """
    text_options, storage_options = config.text_options, config.storage_options
    tokens_per_sample = tokens_of_a_sample(text_options.max_seq_length)
    kept_fraction_of_tokens = text_options.positions.expected(tokens_per_sample) / tokens_per_sample
    num_computed_tokens = math.inf
    dataset_name_and_config = (text_options.dataset_name or "", text_options.dataset_config or "")
    num_documents = KNOWN_DOCUMENTS.get(dataset_name_and_config)
    if num_documents is not None:
        tokens_per_document = (
            TOKENS_OF_A_DOCUMENT if text_options.long_documents == "split" else tokens_per_sample
        )
        num_computed_tokens = (
            num_documents / config.host_options.total_machines * tokens_per_document
        )
    if storage_options.max_samples is not None:
        num_computed_tokens = min(
            num_computed_tokens, storage_options.max_samples * tokens_per_sample
        )
    if storage_options.max_tokens is not None and kept_fraction_of_tokens:
        num_computed_tokens = min(
            num_computed_tokens, storage_options.max_tokens / kept_fraction_of_tokens
        )
    if math.isinf(num_computed_tokens):
        return None
    return TokenCounts(num_computed_tokens, num_computed_tokens * kept_fraction_of_tokens)


def tokens_of_a_sample(max_seq_length: int) -> int:
    """Returns the assumed number of tokens of a sample.

    It is the number of tokens of an average document, but at most the number of tokens of a row.

    Args:
        max_seq_length: The number of tokens of a row.
    """
    return min(TOKENS_OF_A_DOCUMENT, max_seq_length)


def estimate_totals(
    run: PlannedRun, fastest_mesh: Mapping[str, Any] | None, token_bytes: int, config: Config
) -> dict[str, Any]:
    """Estimates the hours, dollars and terabytes of one machine in the whole run.

    Args:
        run: The planned run.
        fastest_mesh: The estimates for the fastest mesh that fits, of which "tokens_per_second" is
            used: a list of the lowest and the highest guess for the whole machine. None if no mesh
            fits.
        token_bytes: The bytes of a stored token, before compression.
        config: The configuration, which may contain --tokens_per_second and --chip_hour_dollars.

    Returns:
        A dict with these keys, whose values are None if they are unknown:

        - "hours": A list of the lowest and the highest number of hours.
        - "dollars": A list of the lowest and the highest price.
        - "terabytes": The terabytes that are stored, before compression.
    """
    hours_range = None
    dollars_range = None
    stored_terabytes = None
    if run.token_counts is not None:
        stored_terabytes = run.token_counts.num_stored_tokens * token_bytes / 1e12
        if fastest_mesh is not None:
            # The speed of a mesh is in computed tokens per second. The speed that a user gives is
            # in stored tokens per second and host.
            if config.plan_options.tokens_per_second is None:
                num_tokens_that_speed_refers_to = run.token_counts.num_computed_tokens
                possible_speeds = fastest_mesh["tokens_per_second"]
            else:
                num_tokens_that_speed_refers_to = run.token_counts.num_stored_tokens
                # The user gives a single speed, so this list contains one number.
                possible_speeds = [config.plan_options.tokens_per_second * run.topology.num_hosts]
            hours_range = [
                num_tokens_that_speed_refers_to / max(possible_speeds) / 3600,
                num_tokens_that_speed_refers_to / min(possible_speeds) / 3600,
            ]
        if hours_range is not None and config.plan_options.chip_hour_dollars:
            chip_hour_prices_in_dollars = config.plan_options.chip_hour_dollars
            chip_hours_range = [run.topology.num_chips * hours for hours in hours_range]
            dollars_range = [
                chip_hours_range[0] * min(chip_hour_prices_in_dollars),
                chip_hours_range[1] * max(chip_hour_prices_in_dollars),
            ]
    return {"hours": hours_range, "dollars": dollars_range, "terabytes": stored_terabytes}


def lines_of(
    run: PlannedRun,
    meshes: Sequence[Mapping[str, Any]],
    totals: Mapping[str, Any],
    token_bytes: int,
    tokens_per_second: float | None,
) -> Iterator[str]:
    """Yields the estimate in words, line by line.

    Args:
        run: The planned run.
        meshes: The estimate for each mesh to describe, a JSON object (see `estimate_mesh`).
        totals: The hours, dollars and terabytes of one machine in the whole run (see
            `estimate_totals`).
        token_bytes: The bytes of a stored token, before compression.
        tokens_per_second: The value of --tokens_per_second, the stored tokens per second of each
            host. None if the speed is guessed.
    """
    topology = run.topology
    rows_per_host, tokens_per_row = run.step_request.batch_shape
    chips_and_hosts_phrase = (
        f"{counted(topology.num_chips, 'chip')} on {counted(topology.num_hosts, 'host')}"
    )
    rows_and_tokens_phrase = (
        f"{counted(rows_per_host, 'row')} of {counted(tokens_per_row, 'token')}"
    )
    yield (
        f"{topology.name}: {chips_and_hosts_phrase}, each of which feeds "
        f"{rows_and_tokens_phrase} per step"
    )
    for mesh_estimate in meshes:
        memory_phrase = f"{three_digits(mesh_estimate['memory_gb'])} GB per device by formula"
        if mesh_estimate["compiled_gb"] is not None:
            memory_phrase += f", {three_digits(mesh_estimate['compiled_gb'])} GB by the compiler"
        fit_phrase = "fits" if mesh_estimate["fits"] else "does not fit"
        step_milliseconds_text = three_digits(mesh_estimate["step_ms"])
        yield (
            f"mesh {shape_phrase(mesh_estimate['shape'])}: {fit_phrase} ({memory_phrase}); "
            f"{step_milliseconds_text} ms per step at the chips' peak speed"
        )
    if totals["hours"] is None:
        reason_for_unknown_time = (
            "nothing says how much data there is" if run.token_counts is None else "no mesh fits"
        )
        yield f"time: unknown ({reason_for_unknown_time})"
    elif tokens_per_second is not None:
        yield (
            f"time: {hours_phrase(totals['hours'][0])}, at {tokens_per_second:,.10g} stored "
            "tokens per second and host (--tokens_per_second)"
        )
    else:
        time_phrase = range_phrase(map(hours_phrase, totals["hours"]))
        lowest_fraction_of_peak, highest_fraction_of_peak = GUESSED_FRACTIONS
        yield (
            f"time: {time_phrase}; a guess, which assumes that the fastest mesh above reaches "
            f"{lowest_fraction_of_peak:.0%} to {highest_fraction_of_peak:.0%} of its chips' peak "
            "speed, and that hosts and uploads keep up. To know it, run --max_samples 200 on this "
            "machine and give the tokens/s of its last line, 'time: ...', as --tokens_per_second"
        )
    if totals["terabytes"] is not None:
        size_phrase = terabytes_phrase(totals["terabytes"])
        yield (
            f"stored: {size_phrase} before compression, {token_bytes:,} bytes per token; "
            f"{samples_phrase(run)}"
        )
    else:
        yield f"stored: {token_bytes:,} bytes per token before compression"
    if totals["dollars"] is not None:
        price_phrases = [f"${price:,.2f}" for price in totals["dollars"]]
        yield f"cost: {range_phrase(price_phrases)}"


def samples_phrase(run: PlannedRun) -> str:
    """Returns a clause for the estimate that states the assumed number of tokens of a sample."""
    tokens_per_sample = tokens_of_a_sample(run.step_request.batch_shape[1])
    return (
        f"a sample is taken to have {counted(tokens_per_sample, 'token')}, as FineWeb-Edu's have "
        "on average"
    )


def hours_phrase(hours: float) -> str:
    """Returns a duration in words, rounded to two significant digits, such as "3.5 hours".

    It is in days if it is at least 2 days, otherwise in hours or minutes.

    Args:
        hours: The duration in hours.
    """
    for unit_name, hours_per_unit in (("day", 24), ("hour", 1), ("minute", 1 / 60)):
        rounded_duration = float(f"{hours / hours_per_unit:.2g}")
        smallest_shown_duration = 2 if unit_name == "day" else 1
        if rounded_duration >= smallest_shown_duration:
            plural_ending = "" if rounded_duration == 1 else "s"
            return f"{rounded_duration:,.10g} {unit_name}{plural_ending}"
    return "under a minute"


def terabytes_phrase(terabytes: float) -> str:
    """Returns a number of bytes in TB, GB or MB, such as "1.25 TB".

    Args:
        terabytes: The number of terabytes. It is shown in the largest unit in which it is at least
            1, otherwise in MB.
    """
    for unit_name, terabytes_per_unit in (("TB", 1.0), ("GB", 1e-3)):
        if terabytes >= terabytes_per_unit:
            return f"{three_digits(terabytes / terabytes_per_unit)} {unit_name}"
    return f"{three_digits(terabytes / 1e-6)} MB"


def range_phrase(limits: Iterable[str]) -> str:
    """Returns a range in words, such as "1 hour to 2 hours", or "1 hour" if the limits are equal.

    Args:
        limits: The lower and the upper limit in words.
    """
    return " to ".join(dict.fromkeys(limits))


def three_digits(number: float) -> str:
    """Returns a number as text, rounded to three significant digits, such as "12,300"."""
    return f"{float(f'{number:.3g}'):,.10g}"
