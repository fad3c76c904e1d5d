"""The devices of a run: which ones they are, their speed and memory, and their errors.

mesh.py arranges them, and compilation.py compiles for them.
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
    """A kind of device, with the figures of its vendor's data sheet.

    Attributes:
        flops: Dense bfloat16 operations per second.
        memory: Bytes of memory.
        bandwidth: Bytes per second from and to this memory.
        link: Bytes per second that a device receives over one link.
        links: Number of links over which a device of a ring receives: two for TPUs, from both
            neighbours, and one for NVLink.
        network: Bytes per second that a device receives from another TPU slice, or from another
            host with GPUs.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    links: int
    network: float


# A part of JAX's name for the kind of device -> the chip. The first part that occurs in the name
# determines the chip.
CHIPS = {
    "TPU v4": Chip(275e12, 32e9, 1200e9, 45e9, 2, 3e9),
    "TPU v5 lite": Chip(197e12, 16e9, 819e9, 45e9, 2, 3e9),
    "TPU v5e": Chip(197e12, 16e9, 819e9, 45e9, 2, 3e9),
    "TPU v5": Chip(459e12, 95e9, 2765e9, 90e9, 2, 6e9),
    "TPU v6": Chip(918e12, 32e9, 1638e9, 90e9, 2, 12e9),
    # JAX shows a chip as two devices. These are the figures of one device.
    "TPU7x": Chip(1153e12, 96e9, 3690e9, 100e9, 2, 12e9),
    "A100": Chip(312e12, 80e9, 2039e9, 300e9, 1, 25e9),
    "H100": Chip(989e12, 80e9, 3350e9, 450e9, 1, 50e9),
    "H200": Chip(989e12, 141e9, 4800e9, 450e9, 1, 50e9),
}

# Platform -> time of float32 products relative to bfloat16 products. TPUs make six passes for
# float32, and GPUs do not use their matrix units.
FLOAT32_TIME = {"tpu": 6.0, "gpu": 15.0}

USABLE = 0.9  # the share of a device's memory that plans may fill

TOO_LARGE = (
    "it continues with a smaller --batch_size, or with a larger model or fsdp axis (--mesh_shape); "
    "fewer layers or a smaller --max_seq_length make it another run (--overwrite)"
)

# A machine with a TPU has at least one of these device files or environment variables.
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
    """Makes JAX use only the CPU on a machine with libtpu but without signs of a TPU or GPU.

    Such a machine has libtpu for --plan, and libtpu would print errors when JAX looks for a TPU.
    Must be called before JAX looks for devices. Has no effect if the user has chosen JAX's
    platforms.
    """
    has_tpu = any(map(glob.glob, TPU_FILES)) or any(map(os.environ.get, TPU_VARIABLES))
    for_gpu = find_spec("jax_plugins") is not None
    chosen = jax.config.values["jax_platforms"]
    if find_spec("libtpu") is not None and not (has_tpu or for_gpu or chosen):
        log.info("libtpu is installed, but this machine shows no TPU: the CPU computes")
        jax.config.update("jax_platforms", "cpu")


def usable_devices(all_of_host: bool, devices: Sequence[Any] | None = None) -> list[Any]:
    """Returns the devices of all hosts that a run uses, ordered by host.

    Args:
        all_of_host: Whether to use all devices of each host. Otherwise only its first one is used.
        devices: The devices of a machine that --plan describes; None for the devices of JAX.

    Raises:
        InputError: JAX finds no devices on the platform that the environment chooses.
    """
    try:
        devices = jax.devices() if devices is None else devices
        devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    except (RuntimeError, AssertionError) as error:
        reason = one_line(error)
        raise InputError(f"JAX finds no devices (JAX_PLATFORMS, drivers): {reason:.200}") from error
    if all_of_host:
        return devices
    firsts = {device.process_index: device for device in reversed(devices)}
    return [firsts[index] for index in sorted(firsts)]


def devices_of_this_host(devices: Sequence[Any]) -> list[Any]:
    """Returns the devices that belong to this process."""
    return [device for device in devices if device.process_index == jax.process_index()]


def chip_of(device: Any) -> Chip | None:
    """Returns the figures of a device's kind; None for a CPU and for unknown kinds."""
    return next((chip for name, chip in CHIPS.items() if name in device.device_kind), None)


def at_dtype(chip: Chip, dtype: Any, platform: str) -> Chip:
    """Returns the chip with the speed of products of a dtype in place of bfloat16.

    Args:
        chip: The chip.
        dtype: The dtype of the products.
        platform: The platform of the device.
    """
    if dtype != jnp.float32:
        return chip
    return chip._replace(flops=chip.flops / FLOAT32_TIME.get(platform, 1.0))


def memory_of(device: Any) -> float | None:
    """Returns the bytes of memory that a device can use; None if they are unknown.

    The device reports its memory if it belongs to this host. Otherwise the figure of its kind is
    used. The CPU devices of a host share the host's memory.
    """
    if device.platform == "cpu":
        return host_memory() / jax.local_device_count()
    try:
        reported = (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # a device that --plan describes, or that of another host
        reported = None
    if reported:
        return reported
    chip = chip_of(device)
    return chip and chip.memory


def peak_flops(devices: int) -> float | None:
    """Returns the bfloat16 FLOP/s of several devices of this host's kind; None if unknown.

    Args:
        devices: The number of devices.
    """
    chip = chip_of(jax.local_devices()[0])
    return chip and chip.flops * devices


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns errors of the device or compiler in a `with` block into a RunError of one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = one_line(error).rstrip(".")
        remedy = TOO_LARGE if "EXHAUSTED" in reason else None
        raise RunError(f"the device failed: {reason:.300}", remedy=remedy) from error
