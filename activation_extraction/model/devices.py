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
    """A kind of device, as vendors' data sheets describe it.

    Attributes:
        flops: Dense bfloat16 operations per second.
        memory: Bytes of memory.
        bandwidth: Bytes per second of this memory.
        link: Bytes per second that come over one link from the device beside it.
        links: The number of links of a ring: two through a TPU's neighbours, with or without
            wraparound, and one with NVLink.
        network: Bytes per second from devices of another TPU slice, or of another host with GPUs.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    links: int
    network: float


# A part of the device's kind -> the chip. The first part that occurs in the kind counts.
CHIPS = {
    "TPU v4": Chip(275e12, 32e9, 1200e9, 45e9, 2, 3e9),
    "TPU v5 lite": Chip(197e12, 16e9, 819e9, 45e9, 2, 3e9),
    "TPU v5e": Chip(197e12, 16e9, 819e9, 45e9, 2, 3e9),
    "TPU v5": Chip(459e12, 95e9, 2765e9, 90e9, 2, 6e9),
    "TPU v6": Chip(918e12, 32e9, 1638e9, 90e9, 2, 12e9),
    # A chip has two devices; these are the numbers of each.
    "TPU7x": Chip(1153e12, 96e9, 3690e9, 100e9, 2, 12e9),
    "A100": Chip(312e12, 80e9, 2039e9, 300e9, 1, 25e9),
    "H100": Chip(989e12, 80e9, 3350e9, 450e9, 1, 50e9),
    "H200": Chip(989e12, 141e9, 4800e9, 450e9, 1, 50e9),
}

# Platform -> how many times as long float32 products take as bfloat16 products: TPUs make six
# passes, and GPUs do without their matrix units.
FLOAT32_TIME = {"tpu": 6.0, "gpu": 15.0}

USABLE = 0.9  # the share of a device's memory that plans may fill

TOO_LARGE = (
    "it continues with a smaller --batch_size, or with a larger model or fsdp axis (--mesh_shape); "
    "fewer layers or a smaller --max_seq_length make it another run (--overwrite)"
)

# A machine with a TPU has some of these device files or environment variables.
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
    """Makes JAX use the CPU alone where libtpu is installed, but nothing shows a TPU or a GPU.

    Such a machine has libtpu for --plan, and libtpu would print errors when JAX looks for a TPU.
    Must be called before JAX looks for devices. Does nothing if the platform was chosen.
    """
    has_tpu = any(map(glob.glob, TPU_FILES)) or any(map(os.environ.get, TPU_VARIABLES))
    for_gpu = find_spec("jax_plugins") is not None
    chosen = jax.config.values["jax_platforms"]
    if find_spec("libtpu") is not None and not (has_tpu or for_gpu or chosen):
        log.info("libtpu is installed, but this machine shows no TPU: the CPU computes")
        jax.config.update("jax_platforms", "cpu")


def usable_devices(all_of_host: bool, devices: Sequence[Any] | None = None) -> list[Any]:
    """Returns the devices that a run uses, of all hosts, ordered by host.

    Args:
        all_of_host: Whether to use all devices of a host, or only its first one.
        devices: The devices of a machine that is only planned; None for JAX's.

    Raises:
        InputError: JAX has no devices on the platform that the environment asks for.
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
    return [device for device in devices if device.process_index == jax.process_index()]


def chip_of(device: Any) -> Chip | None:
    """Returns the data of this kind of device; None for a CPU and for unknown kinds."""
    return next((chip for name, chip in CHIPS.items() if name in device.device_kind), None)


def at_dtype(chip: Chip, dtype: Any, platform: str) -> Chip:
    """Returns the chip with the speed of its products of this dtype."""
    if dtype != jnp.float32:
        return chip
    return chip._replace(flops=chip.flops / FLOAT32_TIME.get(platform, 1.0))


def memory_of(device: Any) -> float | None:
    """Returns the bytes of memory that a device can use; None if they are unknown.

    The number is what the device reports, and otherwise that of its kind. The CPU devices of a host
    share the host's memory. Only a host's own devices report anything.
    """
    if device.platform == "cpu":
        return host_memory() / jax.local_device_count()
    try:
        reported = (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # a device that is only described
        reported = None
    if reported:
        return reported
    chip = chip_of(device)
    return chip and chip.memory


def peak_flops(devices: int) -> float | None:
    """Returns the bfloat16 FLOP/s of this many devices together; None if they are unknown."""
    chip = chip_of(jax.local_devices()[0])
    return chip and chip.flops * devices


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns an error of the device or of its compiler into a RunError of one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = one_line(error).rstrip(".")
        remedy = TOO_LARGE if "EXHAUSTED" in reason else None
        raise RunError(f"the device failed: {reason:.300}", remedy=remedy) from error
