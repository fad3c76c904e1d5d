"""The devices: which ones a run uses, what they can do, and how their failures are reported.

Their arrangement as a mesh is the part of mesh_shape.py and mesh.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from activation_extraction.common.errors import InputError, RunError, one_line

# Dense bfloat16 FLOP/s of one device, by a part of its kind's name (vendors' data sheets).
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
}

TOO_LARGE = (
    "it continues with a smaller --batch_size, or with a larger model or fsdp axis (--mesh_shape); "
    "fewer layers or a smaller --max_seq_length make it another extraction (--overwrite)"
)


def usable_devices(every: bool) -> list[Any]:
    """All devices, those of a host together, or (not `every`) the first one of each host.

    Raises InputError when JAX has none on the platform that the environment asks for.
    """
    try:
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    except (RuntimeError, AssertionError) as error:
        reason = one_line(error)
        raise InputError(f"JAX finds no devices (JAX_PLATFORMS, drivers): {reason:.200}") from error
    if every:
        return devices
    firsts = {device.process_index: device for device in reversed(devices)}
    return [firsts[index] for index in sorted(firsts)]


def peak_flops(devices: int) -> float | None:
    """What this many devices can do per second in bfloat16; None when that is not known."""
    kind = jax.local_devices()[0].device_kind
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in kind), None)
    return None if peak is None else peak * devices


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns what the device or its compiler reports into a RunError of one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = one_line(error).rstrip(".")
        remedy = TOO_LARGE if "EXHAUSTED" in reason else None
        raise RunError(f"the device failed: {reason:.300}", remedy=remedy) from error
