"""Chooses the number of rows that a host feeds to the model in a step.

This module is used if --batch_size gives no number. Without --batch_size, accelerators get a fixed
number of rows. A CPU gets the smallest step that does not lose speed, so that the first activations
are stored soon. `--batch_size auto` finds the largest step that fits in the memory of the
accelerators. The number of rows affects only the rounding of activations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from activation_extraction.cli.flags import GIGABYTE
from activation_extraction.common.errors import one_line
from activation_extraction.common.host_memory import available_memory
from activation_extraction.common.log import log
from activation_extraction.model.decoder import TOKENS_AT_ONCE
from activation_extraction.model.devices import USABLE, devices_of_this_host, usable_devices
from activation_extraction.model.forward import Forward, bytes_of_step
from activation_extraction.model.model_setup import StepRequest, prepare_model
from activation_extraction.run.hosts import Host, gather, together

DEFAULT_ROWS = 8  # rows of a host per step on accelerators, without --batch_size
# Largest number of rows of a host that --batch_size auto tries. Each try compiles the step.
MOST_ROWS = 512
# Number of steps whose activations must fit in a host's memory together, because the activations of
# one step are received while the activations of earlier steps wait to be stored.
STEPS_ON_HOST = 4


def default_rows(
    length: int, every_device: bool, auto: bool = False, planned: Sequence[Any] | None = None
) -> int:
    """Returns the number of rows of a host per step if --batch_size gives no number.

    On accelerators, the number is DEFAULT_ROWS. On a CPU, steps of more than TOKENS_AT_ONCE tokens
    are not faster, so the number is TOKENS_AT_ONCE divided by `length`, at least 1 and at most
    DEFAULT_ROWS. This number is rounded up to a multiple of the number of the host's devices that
    compute (see `every_device`).

    Args:
        length: Number of tokens of a row.
        every_device: Whether all devices of the host compute. If False, only one device computes,
            and nothing is rounded up.
        auto: Whether --batch_size is "auto". The number is then rounded up on accelerators, too, so
            that every mesh accepts it until `fit_rows` finds a better number.
        planned: The devices of a machine that is only planned. None for this machine's devices.

    Raises:
        InputError: If JAX finds no devices.
    """
    devices_of_host = devices_of_this_host(usable_devices(every_device, planned))
    num_rows = DEFAULT_ROWS
    computes_on_cpu = devices_of_host[0].platform == "cpu"
    if computes_on_cpu:
        num_rows = min(max(TOKENS_AT_ONCE // length, 1), DEFAULT_ROWS)
    if not (computes_on_cpu or auto):
        return num_rows
    rows_per_device = -(-num_rows // len(devices_of_host))  # this division rounds up
    return rows_per_device * len(devices_of_host)


def fit_rows(
    host: Host,
    request: StepRequest,
    forward: Forward,
    metadata_of_earlier_outputs: Sequence[Mapping[str, Any]],
) -> tuple[Forward, dict[str, Any] | None]:
    """Finds the largest number of rows with which a step fits in memory.

    All hosts must call this together. The function tries the number of a host's devices times 1, 2,
    4 and so on, up to MOST_ROWS rows. A run that continues may have recorded its number of rows
    together with the mesh and the kind and number of the devices. If mesh and devices have not
    changed, the recorded number is used without trying others. On devices that do not report their
    memory (CPUs), the default number of rows is used.

    Args:
        host: This host.
        request: The request for a step with the default number of rows.
        forward: The model, made ready to compute this step.
        metadata_of_earlier_outputs: The content of each metadata.json that this run has stored
            already, in the local folder and in the bucket. Empty for a new run.

    Returns:
        A tuple of:
            The model, made ready to compute steps of the chosen number of rows. The number is the
            same on all hosts.
            The JSON object that metadata.json records as "auto_batch_size", with the keys "rows",
            "device", "devices" and "mesh". None if the default number of rows is used.

    Raises:
        InputError: If this host or another host cannot prepare the model for steps of another
            number of rows.
        RunError: If the compiler failed on another host for another reason than lack of memory.
        JaxRuntimeError: If the compiler failed on this host for another reason than lack of memory.
    """
    devices_of_host = devices_of_this_host(
        usable_devices(request.computing_options.use_data_parallel)
    )
    device_kind = devices_of_host[0].device_kind
    bytes_limit_of_device = together(
        host, lambda: (devices_of_host[0].memory_stats() or {}).get("bytes_limit", 0)
    )
    usable_bytes_of_device = USABLE * min(gather(host, bytes_limit_of_device))
    if not usable_bytes_of_device:
        log.info(
            "--batch_size auto: %d rows, the default on %s", request.batch_shape[0], device_kind
        )
        return forward, None
    num_devices_of_run = len(devices_of_host) * host.num_hosts
    device_and_mesh_fields = {
        "device": device_kind,
        "devices": num_devices_of_run,
        "mesh": forward.layout.shape,
    }
    recorded_batch_size_choices = [
        metadata.get("auto_batch_size") or {} for metadata in metadata_of_earlier_outputs
    ]
    recorded_row_counts_for_same_devices = [
        recorded_batch_size_choice["rows"]
        for recorded_batch_size_choice in recorded_batch_size_choices
        if device_and_mesh_fields.items() <= recorded_batch_size_choice.items()
    ]
    recorded_row_counts_of_hosts = gather(
        host, min(recorded_row_counts_for_same_devices, default=None)
    )
    smallest_recorded_row_count = min(filter(None, recorded_row_counts_of_hosts), default=None)

    def prepare(num_rows: int) -> Forward:
        request_with_num_rows = replace(request, batch_shape=(num_rows, request.batch_shape[1]))
        return together(host, partial(prepare_model, request_with_num_rows, forward))

    if smallest_recorded_row_count is not None:
        forward_with_chosen_row_count = prepare(smallest_recorded_row_count)
        reason_for_num_rows = "as when the run began"
    else:
        smallest_num_rows = len(devices_of_host)
        forward_with_chosen_row_count, reason_for_num_rows = _largest_fitting(
            host, prepare, smallest_num_rows, usable_bytes_of_device
        )
    num_rows, _ = forward_with_chosen_row_count.batch_shape
    log.info("--batch_size auto: %d rows per host and step: %s", num_rows, reason_for_num_rows)
    return forward_with_chosen_row_count, {"rows": num_rows, **device_and_mesh_fields}


def _largest_fitting(
    host: Host, prepare: Callable[[int], Forward], smallest_rows: int, usable_bytes: float
) -> tuple[Forward, str]:
    """Finds the largest number of rows with which a step fits in memory, by trying.

    A step fits under two conditions. First, every host has memory for the activations of
    STEPS_ON_HOST steps, because one step is received while others wait to be stored. Second, the
    compiler needs no more than `usable_bytes` on each device.

    Args:
        host: This host.
        prepare: A function that takes a number of rows, and returns the model, made ready to
            compute steps of this size. All hosts must call it together.
        smallest_rows: The smallest number of rows, which is used even if it does not fit.
        usable_bytes: Bytes of memory that may be used on each device.

    Returns:
        A tuple of:
            The model, made ready to compute steps of the largest number of rows that fits.
            The reason why there are not more rows, in words.
    """
    largest_fitting_forward = prepare(smallest_rows)
    candidate_forward = largest_fitting_forward
    while True:
        shortage_message = next(
            filter(None, gather(host, _shortage_on_host(candidate_forward))), ""
        )
        # The message is the same on all hosts, so either all hosts compile the step or none does.
        if not shortage_message:
            device_shortage_message = together(
                host, partial(_shortage_on_device, candidate_forward, usable_bytes)
            )
            shortage_message = next(filter(None, gather(host, device_shortage_message)), "")
        if shortage_message:
            return largest_fitting_forward, shortage_message
        largest_fitting_forward = candidate_forward
        if 2 * largest_fitting_forward.batch_shape[0] > MOST_ROWS:
            return largest_fitting_forward, "the most that are tried"
        candidate_forward = prepare(2 * largest_fitting_forward.batch_shape[0])


def _shortage_on_host(forward: Forward) -> str:
    """Returns a message if the activations of STEPS_ON_HOST steps exceed this host's memory.

    Args:
        forward: The model. The memory is checked for batches of the shape `forward.batch_shape`,
            (rows, tokens of a row).

    Returns:
        The message. "" if the activations fit.
    """
    num_rows, tokens_per_row = forward.batch_shape
    bytes_per_token = sum(
        forward.width_and_dtype(hook).bytes for hook in forward.hook_by_key.values()
    )
    needed_bytes = STEPS_ON_HOST * num_rows * tokens_per_row * bytes_per_token
    return _shortage_message(
        f"{STEPS_ON_HOST} steps of {num_rows}", needed_bytes, "host", available_memory()
    )


def _shortage_on_device(forward: Forward, usable_bytes: float) -> str:
    """Returns a message if the compiled step needs too much memory on each device of the run.

    Args:
        forward: The model, whose step is compiled for batches of the shape `forward.batch_shape`,
            (rows, tokens of a row).
        usable_bytes: Bytes of memory that may be used on each device.

    Returns:
        The message. "" if the step fits.

    Raises:
        InputError: If the compiler does not report how much memory the step needs.
        JaxRuntimeError: If the compiler failed for another reason than lack of memory.
    """
    num_rows, _ = forward.batch_shape
    try:
        return _shortage_message(f"{num_rows}", bytes_of_step(forward), "device", usable_bytes)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return f"{num_rows} do not fit, says the compiler: {one_line(error):.200}"


def _shortage_message(
    rows_phrase: str, needed_bytes: float, memory_owner: str, usable_bytes: float
) -> str:
    """Returns a message if some rows need more memory than a host or a device has; otherwise "".

    Args:
        rows_phrase: The rows that need the memory, in words, such as "4 steps of 8" for 4 steps
            with 8 rows each.
        needed_bytes: Bytes of memory that the rows need on each host or device.
        memory_owner: "host" or "device", to which the memory belongs.
        usable_bytes: Bytes of memory that can be used on each host or device.
    """
    if needed_bytes <= usable_bytes:
        return ""
    return (
        f"{rows_phrase} would take {needed_bytes / GIGABYTE:.3g} GB of each {memory_owner}, "
        f"where {usable_bytes / GIGABYTE:.3g} GB can be used"
    )
