"""Finds the devices of a run, determines their speed and memory, and rewords their errors.

A device is an accelerator as JAX shows it, or the CPU. mesh.py arranges devices in a mesh, and
compilation.py compiles programs for them.
"""

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.common.host_memory import host_memory
from activation_extraction.common.log import log


class Chip(NamedTuple):
    """The speed and memory of a kind of device, according to the data sheet of its vendor.

    Attributes:
        flops_per_second: Dense bfloat16 operations per second.
        memory_bytes: Bytes of memory.
        memory_bytes_per_second: Bytes per second from and to the device's memory.
        link_bytes_per_second: Bytes per second that a device receives over one fast link.
        link_count: Number of fast links over which a device receives if the devices form a ring.
            TPUs receive from both neighbours over two links. GPUs have one link, NVLink.
        network_bytes_per_second: Bytes per second that a device receives from another TPU slice, or
            from another host with GPUs.
    """

    flops_per_second: float
    memory_bytes: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    link_count: int
    network_bytes_per_second: float


# A part of JAX's name for a kind of device -> the speed and memory of this kind. If several parts
# occur in a name, the first one counts.
CHIPS = {
    "TPU v4": Chip(275e12, 32e9, 1200e9, 45e9, 2, 3e9),
    "TPU v5 lite": Chip(197e12, 16e9, 819e9, 45e9, 2, 3e9),
    "TPU v5e": Chip(197e12, 16e9, 819e9, 45e9, 2, 3e9),
    "TPU v5": Chip(459e12, 95e9, 2765e9, 90e9, 2, 6e9),
    "TPU v6": Chip(918e12, 32e9, 1638e9, 90e9, 2, 12e9),
    # JAX shows a TPU7x chip as two devices. The numbers are for one device.
    "TPU7x": Chip(1153e12, 96e9, 3690e9, 100e9, 2, 12e9),
    "A100": Chip(312e12, 80e9, 2039e9, 300e9, 1, 25e9),
    "H100": Chip(989e12, 80e9, 3350e9, 450e9, 1, 50e9),
    "H200": Chip(989e12, 141e9, 4800e9, 450e9, 1, 50e9),
}

# Platform -> duration of a float32 product, divided by the duration of the bfloat16 product. TPUs
# make six passes for float32, and GPUs do not use their matrix units.
FLOAT32_TIME = {"tpu": 6.0, "gpu": 15.0}

# The largest fraction of a device's memory that a run may take by the estimates of --plan and of
# the choice of a mesh. It is less than 1, because these estimates are not exact.
USABLE = 0.9

# The remedy in the message if a device has too little memory.
TOO_LARGE = (
    "it continues with a smaller --batch_size, or with a larger model or fsdp axis (--mesh_shape); "
    "fewer layers or a smaller --max_seq_length make it another run (--overwrite)"
)

# A computer with a TPU has at least one of these device files or environment variables.
TPU_FILES = "/dev/accel*", "/dev/vfio/[0-9]*"
TPU_VARIABLES = (
    "TPU_NAME",
    "TPU_ACCELERATOR_TYPE",
    "TPU_WORKER_ID",
    "TPU_WORKER_HOSTNAMES",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "CLOUD_TPU_TASK_ID",
    "JAX_FORCE_TPU_INIT",
)


def leave_out_absent_tpu() -> None:
    """Makes JAX use only the CPU on a computer with libtpu but without signs of a TPU or GPU.

    On such a computer, libtpu is installed for --plan, and it would print errors when JAX looks for
    a TPU. This function must be called before JAX looks for devices. It has no effect if the user
    has chosen JAX's platforms (JAX_PLATFORMS).
    """
    has_tpu = any(map(glob.glob, TPU_FILES)) or any(map(os.environ.get, TPU_VARIABLES))
    has_gpu_support = find_spec("jax_plugins") is not None
    jax_platforms_setting = jax.config.values["jax_platforms"]
    may_use_accelerator = has_tpu or has_gpu_support or jax_platforms_setting
    if find_spec("libtpu") is not None and not may_use_accelerator:
        log.info("libtpu is installed, but this machine shows no TPU: the CPU computes")
        jax.config.update("jax_platforms", "cpu")


def usable_devices(all_of_host: bool, devices: Sequence[Any] | None = None) -> list[Any]:
    """Returns the devices of all hosts that a run uses, ordered by host.

    Args:
        all_of_host: Whether to use all devices of each host. Otherwise only the first device of
            each host is used.
        devices: The devices of a machine that --plan describes. None for the devices of JAX.

    Raises:
        InputError: If JAX finds no devices on the platform that the environment chooses.
    """
    try:
        devices = jax.devices() if devices is None else devices
        devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    except (RuntimeError, AssertionError) as error:
        error_text = one_line(error)
        raise InputError(
            f"JAX finds no devices (JAX_PLATFORMS, drivers): {error_text:.200}"
        ) from error
    if all_of_host:
        return devices
    first_device_by_host: dict[int, Any] = {}
    for device in devices:
        first_device_by_host.setdefault(device.process_index, device)
    return list(first_device_by_host.values())


def devices_of_this_host(devices: Sequence[Any]) -> list[Any]:
    """Returns the devices in `devices` that belong to this host, which is a process of JAX."""
    return [device for device in devices if device.process_index == jax.process_index()]


def chip_of(device: Any) -> Chip | None:
    """Returns the `Chip` of a device; None for a CPU or a device of an unknown kind."""
    for name_part, chip_specification in CHIPS.items():
        if name_part in device.device_kind:
            return chip_specification
    return None


def at_dtype(chip: Chip, dtype: Any, platform: str) -> Chip:
    """Returns a chip whose `flops_per_second` is its speed for matrix products in a given dtype.

    Args:
        chip: The chip with its speed for bfloat16, from `chip_of`.
        dtype: The dtype of the products. Only float32 changes the speed.
        platform: The platform of the device, which determines how slow float32 is.
    """
    if dtype != jnp.float32:
        return chip
    float32_slowdown = FLOAT32_TIME.get(platform, 1.0)
    return chip._replace(flops_per_second=chip.flops_per_second / float32_slowdown)


def memory_of(device: Any) -> float | None:
    """Returns the bytes of memory that a device can use, or None if they are unknown.

    A device of this host reports its memory. For devices of other hosts, and for devices that
    --plan describes, the result comes from the data sheets of the vendors, which the table CHIPS
    contains. For a CPU device, it is the host's memory divided by the number of the host's CPU
    devices.
    """
    if device.platform == "cpu":
        return host_memory() / jax.local_device_count()
    try:
        memory_statistics = device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:
        # The device belongs to another host, or it is a device that --plan describes. So its
        # memory is looked up by the kind of its chip below.
        memory_statistics = {}
    if memory_statistics.get("bytes_limit"):
        return memory_statistics["bytes_limit"]
    chip_specification = chip_of(device)
    return None if chip_specification is None else chip_specification.memory_bytes


def peak_flops(devices: int) -> float | None:
    """Returns the peak speed of several devices together, in bfloat16 operations per second.

    The devices are of the same kind as the devices of this host. Returns None if the speed of this
    kind is unknown.

    Args:
        devices: The number of devices.
    """
    chip_specification = chip_of(jax.local_devices()[0])
    if chip_specification is None:
        return None
    return chip_specification.flops_per_second * devices


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns an error of a device or of the compiler in a `with` block into a RunError.

    Raises:
        RunError: If JAX raises a JaxRuntimeError in the block. The message has one line.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        error_text = one_line(error).rstrip(".")
        remedy = TOO_LARGE if "EXHAUSTED" in error_text else None
        raise RunError(f"the device failed: {error_text:.300}", remedy=remedy) from error
