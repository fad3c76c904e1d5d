"""This module decides how many rows a host feeds in a step, where --batch_size gives no number.

On a CPU, a step is as small as it can be without losing speed, so that the first activations are
stored soon. `auto` finds the largest step that accelerators have memory for. The activations depend
on the number of rows only in their rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from activation_extraction.common.errors import one_line
from activation_extraction.common.host_memory import available_memory
from activation_extraction.common.log import log
from activation_extraction.model.decoder import TOKENS_AT_ONCE
from activation_extraction.model.devices import USABLE
from activation_extraction.model.family import Families
from activation_extraction.model.forward import (
    Forward,
    ModelRequest,
    bytes_of_step,
    prepare_model,
)
from activation_extraction.model.mesh import own_devices, usable_devices
from activation_extraction.run.hosts import Host, any_host, gather, together
from activation_extraction.store.identity import GIGABYTE

DEFAULT_ROWS, MOST_ROWS = 8, 512
STEPS_ON_HOST = 4  # so many steps' activations must fit in the memory of a host


def default_rows(
    length: int, every_device: bool, auto: bool = False, planned: Sequence[Any] | None = None
) -> int:
    """Returns the default of --batch_size for rows of `length` tokens.

    It is 8. On a CPU, where more tokens at a time are not faster, it is the number of rows that
    TOKENS_AT_ONCE fill, at most 8, rounded up to a multiple of the host's devices. auto: whether to
    round it up on accelerators, too, so that no mesh refuses it before `fit_rows` finds a better
    one. planned: the devices of a machine that is only planned.
    """
    devices, rows = _own_devices(every_device, planned), DEFAULT_ROWS
    on_cpu = devices[0].platform == "cpu"
    if on_cpu:
        rows = min(max(TOKENS_AT_ONCE // length, 1), DEFAULT_ROWS)
    return -(-rows // len(devices)) * len(devices) if on_cpu or auto else rows


def _own_devices(every: bool, planned: Sequence[Any] | None = None) -> list[Any]:
    """Returns the usable devices of this host, or of the first host of a planned machine."""
    devices = usable_devices(every, planned)
    if planned is None:
        return own_devices(devices)
    return [each for each in devices if each.process_index == devices[0].process_index]


def fit_rows(
    host: Host,
    families: Families,
    request: ModelRequest,
    forward: Forward,
    earlier: Sequence[Mapping[str, Any]],
) -> tuple[Forward, dict[str, Any] | None]:
    """Returns the model for the largest step that fits, and what metadata.json records about it.

    The rows of a host are the number of its devices times a power of two, at most MOST_ROWS. Each
    number is tried on the mesh that it leads to (see `_search`). If the run that is continued
    recorded a number for as many devices of this kind and this mesh, it is taken untried. On
    devices that do not report their memory (CPU) the default stays, and nothing is recorded.

    forward: the model for `request`, whose rows are the default. earlier: metadata of the run that
    is continued, if any. All hosts must call this together, and all get the same number. If making
    or compiling the model fails on a host, and not for lack of memory, all of them raise.
    """
    devices = _own_devices(request.use_data_parallel)
    kind, count = devices[0].device_kind, len(devices) * host.count
    stats = together(host, devices[0].memory_stats) or {}
    usable = USABLE * min(map(int, gather(host, str(stats.get("bytes_limit", 0)))))
    if not usable:
        log.info("--batch_size auto: %d rows, the default on %s", request.batch_size, kind)
        return forward, None
    recorded = [metadata.get("auto_batch_size") or {} for metadata in earlier]
    alike = [
        each for each in recorded if (each.get("device"), each.get("devices")) == (kind, count)
    ]
    of_hosts = gather(host, str(min((each["rows"] for each in alike), default="")))
    rows, why = min(map(int, filter(None, of_hosts)), default=None), "as when the run began"
    if rows is not None:
        asked = replace(request, batch_size=rows)
        tried = together(host, partial(prepare_model, families, asked, forward))
        same = any_host(host, [tried.layout.shape in [each.get("mesh") for each in recorded]])[0]
        rows, forward = (rows, tried) if same else (None, forward)
    if rows is None:
        rows, forward, why = _search(host, families, request, forward, len(devices), usable)
    log.info("--batch_size auto: %d rows per host and step: %s", rows, why)
    mesh = forward.layout.shape
    return forward, {"rows": rows, "device": kind, "devices": count, "mesh": mesh}


def _search(
    host: Host,
    families: Families,
    request: ModelRequest,
    forward: Forward,
    least: int,
    usable: float,
) -> tuple[int, Forward, str]:
    """Returns the rows, the model for them, and why there are no more.

    A step fits if every host has room for the activations of STEPS_ON_HOST steps, one of which is
    received while others wait to be stored, and if the compiler plans for no more than `usable`
    bytes on a device. least: the smallest number, which is taken even if it does not fit.
    """
    rows = least
    while True:
        asked = replace(request, batch_size=rows)
        tried = together(host, partial(prepare_model, families, asked, forward))
        why = _lacking_on_host(tried)
        fits = not any_host(host, [bool(why)])[0]
        if fits:  # all hosts compile, or none does
            why = together(host, partial(_lacking_on_device, tried, usable))
            fits = not any_host(host, [bool(why)])[0]
        if fits or rows == least:
            forward = tried
        if not fits:
            return max(rows // 2, least), forward, why or "another host has no room for more"
        if 2 * rows > MOST_ROWS:
            return rows, forward, "the most that are tried"
        rows *= 2


def _lacking_on_host(forward: Forward) -> str:
    """Says why this host has no room for the activations; "" if it has."""
    rows, length = forward.shape
    of_token = sum(forward.form(hook).bytes for hook in forward.hooks.values())
    needed, available = STEPS_ON_HOST * rows * length * of_token, available_memory()
    steps = f"{STEPS_ON_HOST} steps of {rows}"
    return _too_much(steps, needed, "host", available) if needed > available else ""


def _lacking_on_device(forward: Forward, usable: float) -> str:
    """Says why a step does not fit on a device; "" if it does."""
    rows, _ = forward.shape
    try:
        needed = bytes_of_step(forward)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return f"{rows} do not fit, says the compiler: {one_line(error):.200}"
    return _too_much(f"{rows}", needed, "device", usable) if needed > usable else ""


def _too_much(what: str, needed: float, where: str, room: float) -> str:
    return (
        f"{what} would take {needed / GIGABYTE:.3g} GB of each {where}, where "
        f"{room / GIGABYTE:.3g} GB can be used"
    )
