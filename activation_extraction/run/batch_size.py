"""Chooses the number of rows that a host feeds in a step, if --batch_size gives no number.

On a CPU, the default is the smallest step that does not lose speed, so that the first activations
are stored soon. `--batch_size auto` finds the largest step for which accelerators have memory. The
number of rows affects only the rounding of activations.
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

DEFAULT_ROWS = 8
MOST_ROWS = 512  # the largest number of rows of a host that --batch_size auto tries
STEPS_ON_HOST = 4  # steps whose activations must fit in the memory of a host together


def default_rows(
    length: int, every_device: bool, auto: bool = False, planned: Sequence[Any] | None = None
) -> int:
    """Returns the default number of rows of --batch_size.

    It is DEFAULT_ROWS on accelerators. On a CPU, where more than TOKENS_AT_ONCE tokens at a time
    are not faster, it is the number of rows that they fill, at least 1 and at most DEFAULT_ROWS,
    rounded up to a multiple of the host's devices.

    Args:
        length: Tokens per row.
        every_device: Whether all devices of the host compute; otherwise only one does.
        auto: Whether to round up on accelerators, too, so that no mesh refuses the rows before
            `fit_rows` finds a better number.
        planned: The devices of a machine that is only planned. None for this machine's devices.

    Raises:
        InputError: JAX finds no devices.
    """
    devices = devices_of_this_host(usable_devices(every_device, planned))
    rows = DEFAULT_ROWS
    on_cpu = devices[0].platform == "cpu"
    if on_cpu:
        rows = min(max(TOKENS_AT_ONCE // length, 1), DEFAULT_ROWS)
    return -(-rows // len(devices)) * len(devices) if on_cpu or auto else rows


def fit_rows(
    host: Host,
    request: StepRequest,
    forward: Forward,
    earlier: Sequence[Mapping[str, Any]],
) -> tuple[Forward, dict[str, Any] | None]:
    """Finds the largest step that fits in memory. All hosts must call this together.

    The rows of a host are the number of its devices times a power of two, at most MOST_ROWS. If a
    continued run recorded a number of rows for as many devices of the same kind and for the mesh
    that the default rows get now, that number is used without trying it. On devices that do not
    report their memory (CPUs), the default stays.

    Args:
        host: This host.
        request: The request for a step, with the default rows.
        forward: The model for this request.
        earlier: The metadata of the run that is continued; empty for a new run.

    Returns:
        The model for the largest step, with the same rows on all hosts, and the facts that
        metadata.json records about the choice: rows, device, devices and mesh. The facts are None
        if the default stays.

    Raises:
        InputError: The model cannot be made for other rows, here or on another host.
        RunError: The compiler failed on another host, and not for lack of memory.
        JaxRuntimeError: The compiler failed on this host, and not for lack of memory.
    """
    devices = devices_of_this_host(usable_devices(request.computing.use_data_parallel))
    kind = devices[0].device_kind
    limit = together(host, lambda: (devices[0].memory_stats() or {}).get("bytes_limit", 0))
    usable = USABLE * min(gather(host, limit))
    if not usable:
        log.info("--batch_size auto: %d rows, the default on %s", request.shape[0], kind)
        return forward, None
    facts = {"device": kind, "devices": len(devices) * host.count, "mesh": forward.layout.shape}
    recorded = [metadata.get("auto_batch_size") or {} for metadata in earlier]
    rows_recorded = [record["rows"] for record in recorded if {**record, **facts} == record]
    rows_of_hosts = gather(host, min(rows_recorded, default=None))
    recorded_rows = min(filter(None, rows_of_hosts), default=None)

    def prepare(rows: int) -> Forward:
        shape = rows, request.shape[1]
        return together(host, partial(prepare_model, replace(request, shape=shape), forward))

    if recorded_rows is not None:
        fitted = prepare(recorded_rows)
        reason = "as when the run began"
    else:
        fitted, reason = _largest(host, prepare, len(devices), usable)
    rows, _ = fitted.shape
    log.info("--batch_size auto: %d rows per host and step: %s", rows, reason)
    return fitted, {"rows": rows, **facts}


def _largest(
    host: Host, prepare: Callable[[int], Forward], least: int, usable: float
) -> tuple[Forward, str]:
    """Finds the largest number of rows that fits.

    A step fits if every host has room for the activations of STEPS_ON_HOST steps, one of which is
    received while others wait to be stored, and if the compiler plans for no more than `usable`
    bytes on a device.

    Args:
        host: This host.
        prepare: A function that returns the model for a number of rows, on all hosts.
        least: The smallest number of rows, which is used even if it does not fit.
        usable: Bytes of memory of a device that may be used.

    Returns:
        The model for the rows that fit, and the reason why there are not more, in words.
    """
    best = tried = prepare(least)
    while True:
        reason = next(filter(None, gather(host, _lacking_on_host(tried))), "")
        # `reason` is the same on all hosts, so either all of them compile or none.
        if not reason:
            lacking = together(host, partial(_lacking_on_device, tried, usable))
            reason = next(filter(None, gather(host, lacking)), "")
        if reason:
            return best, reason
        best = tried
        if 2 * best.shape[0] > MOST_ROWS:
            return best, "the most that are tried"
        tried = prepare(2 * best.shape[0])


def _lacking_on_host(forward: Forward) -> str:
    """Returns why this host's memory has no room for the activations; "" if it has."""
    rows, length = forward.shape
    token_bytes = sum(forward.vector_type(hook).bytes for hook in forward.hooks.values())
    needed = STEPS_ON_HOST * rows * length * token_bytes
    return _too_much(f"{STEPS_ON_HOST} steps of {rows}", needed, "host", available_memory())


def _lacking_on_device(forward: Forward, usable: float) -> str:
    """Returns why a step does not fit in a device's memory; "" if it does."""
    rows, _ = forward.shape
    try:
        return _too_much(f"{rows}", bytes_of_step(forward), "device", usable)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return f"{rows} do not fit, says the compiler: {one_line(error):.200}"


def _too_much(what: str, needed: float, where: str, room: float) -> str:
    """Returns a message if more bytes are needed than there is room for, otherwise "".

    Args:
        what: The number of rows or steps that need the memory.
        needed: Bytes that are needed.
        where: "host" or "device".
        room: Bytes that can be used.
    """
    if needed <= room:
        return ""
    return (
        f"{what} would take {needed / GIGABYTE:.3g} GB of each {where}, where "
        f"{room / GIGABYTE:.3g} GB can be used"
    )
