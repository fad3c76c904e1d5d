"""This module knows the devices: their speed, their errors and the cache of compiled programs.

JAX's persistent compilation cache spares a run that starts again the compilation. JAX's key for an
entry covers the program, its devices, the compiler's version and flags, and on the CPU the
machine's instruction sets: machines of different kinds may share a folder.
"""

import glob
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.common.host_memory import host_memory
from activation_extraction.common.log import log


class Chip(NamedTuple):
    """What a device can do, from vendors' data sheets."""

    flops: float  # dense bfloat16 operations per second
    memory: float  # bytes
    bandwidth: float  # of that memory, bytes per second
    link: float  # bytes per second that come over one link to a device beside it
    links: int  # a ring through a TPU's neighbours has two, with or without wraparound; NVLink one
    network: float  # bytes per second from devices of another slice, or of a GPU's other hosts


# By a part of the device's kind.
CHIPS = {
    "TPU v4": Chip(275e12, 32e9, 1200e9, 45e9, 2, 3e9),
    "TPU v5 lite": Chip(197e12, 16e9, 819e9, 45e9, 2, 3e9),
    "TPU v5e": Chip(197e12, 16e9, 819e9, 45e9, 2, 3e9),
    "TPU v5": Chip(459e12, 95e9, 2765e9, 90e9, 2, 6e9),
    "TPU v6": Chip(918e12, 32e9, 1638e9, 90e9, 2, 12e9),
    # Of each of a chip's two devices.
    "TPU7x": Chip(1153e12, 96e9, 3690e9, 100e9, 2, 12e9),
    "A100": Chip(312e12, 80e9, 2039e9, 300e9, 1, 25e9),
    "H100": Chip(989e12, 80e9, 3350e9, 450e9, 1, 50e9),
    "H200": Chip(989e12, 141e9, 4800e9, 450e9, 1, 50e9),
}

# How many times as long products of float32 take as those of bfloat16: TPUs make six passes, GPUs
# do without their matrix units.
FLOAT32_TIME = {"tpu": 6.0, "gpu": 15.0}

# What a platform's compiler is told beyond its defaults.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "tpu": {
        # Weights are gathered along fsdp while other products run, as only v5e does by default: a
        # gather does not block,
        "xla_enable_async_all_gather": True,
        # and it goes on inside the product that runs beside it.
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    },
}

USABLE = 0.9  # the share of a device's memory that plans may fill

TOO_LARGE = (
    "it continues with a smaller --batch_size, or with a larger model or fsdp axis (--mesh_shape); "
    "fewer layers or a smaller --max_seq_length make it another extraction (--overwrite)"
)

# What shows that a machine has a TPU: its device files, and what its environment says.
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

OFF = "off"  # of --compilation_cache
HIT = "/jax/compilation_cache/cache_hits"  # jax.monitoring's event
PROBLEM = "Error (reading|writing) persistent compilation cache"  # JAX's warning


def leave_out_absent_tpu() -> None:
    """Makes JAX use the CPU alone where libtpu is installed, but nothing shows a TPU or a GPU.

    That is so where it was installed for --plan; libtpu would print errors when JAX looks for a
    TPU. Must be called before JAX looks for devices. Does nothing if the platform was chosen.
    """
    has_tpu = any(map(glob.glob, TPU_FILES)) or any(map(os.environ.get, TPU_VARIABLES))
    for_gpu = find_spec("jax_plugins") is not None
    chosen = jax.config.values["jax_platforms"]
    if find_spec("libtpu") is not None and not (has_tpu or for_gpu or chosen):
        log.info("libtpu is installed, but this machine shows no TPU: the CPU computes")
        jax.config.update("jax_platforms", "cpu")


def use_compilation_cache(given: str | None, output: Path, several: bool) -> None:
    """Makes JAX keep compiled programs in `--compilation_cache` or in the user's cache folder.

    given: the flag; output: the folder that the cache must not lie in; several: whether this is one
    of several hosts. Such hosts have no cache unless the flag asks for one: JAX writes on host 0
    only, so all must share the folder. Raises InputError for a folder that was asked for and cannot
    be used; only a warning is logged if the default one cannot.
    """
    if not jax.config.values["jax_enable_compilation_cache"]:  # the environment turned it off
        return
    folder = None if given == OFF else given
    if folder is not None and "://" not in folder:
        folder = _usable(Path(folder), output)
    elif given is None and not several:
        try:
            folder = _usable(default_folder(), output)
        except InputError as error:
            text = "%s: nothing is kept for the next start; XDG_CACHE_HOME names another cache"
            log.warning(text, error)
    jax.config.update("jax_enable_compilation_cache", folder is not None)
    if folder is None:
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # A damaged entry is compiled anew; `watch_compiling` reports it for the one that counts.
    warnings.filterwarnings("ignore", PROBLEM)
    if "://" in folder:
        # The compiler's own caches, which JAX would put there too, cannot use URLs.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def default_folder() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return caches / "activation_extraction/jax"


def _usable(folder: Path, output: Path) -> str:
    """Returns the folder, which is created if it does not exist.

    Raises InputError if it cannot be written, or lies in the output, which holds nothing but the
    extraction.
    """
    if folder.resolve().is_relative_to(output.resolve()):
        raise InputError(f"--compilation_cache {folder}: lies within --output_dir {output}")
    try:
        # Anybody who can write there can make this program run any code.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"--compilation_cache {folder}: {error.strerror}") from error
    return str(folder)


@contextmanager
def watch_compiling() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether anything came from the cache inside the block.

    JAX's warnings about a damaged cache become lines of the log.
    """
    events = set[str]()

    def note(event: str, **_: str | int) -> None:
        events.add(event)

    jax.monitoring.register_event_listener(note)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", PROBLEM)
            yield lambda: HIT in events
    finally:
        jax.monitoring.unregister_event_listener(note)
    for warning in caught:
        reason = " ".join(str(warning.message).split())
        log.warning("the compilation cache could not be used: %s", reason)


def compile_with_options(lowered: Any, platform: str, **more: Any) -> Any:
    """Compiles a lowered program with COMPILER_OPTIONS, or without them if one is not known.

    more: further options.
    """
    try:
        return lowered.compile(COMPILER_OPTIONS.get(platform, {}) | more)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        log.warning("the compiler's defaults are used: %s", one_line(error))
        return lowered.compile()


def chip_of(device: Any) -> Chip | None:
    """Returns what is known of this kind of device; None for a CPU and unknown kinds."""
    return next((chip for name, chip in CHIPS.items() if name in device.device_kind), None)


def at_dtype(chip: Chip, dtype: Any, platform: str) -> Chip:
    """Returns the chip with the speed of its products of this dtype."""
    if dtype != jnp.float32:
        return chip
    return chip._replace(flops=chip.flops / FLOAT32_TIME.get(platform, 1.0))


def memory_of(device: Any) -> float | None:
    """Returns the bytes that a device can use, as it says or as its kind has; None if unknown.

    The CPU devices of a host share its memory. Only a host's own devices can say anything.
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
    """Returns the bfloat16 FLOP/s of this many devices together; None if that is not known."""
    chip = chip_of(jax.local_devices()[0])
    return chip and chip.flops * devices


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns what the device or its compiler reports into a RunError of one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = one_line(error).rstrip(".")
        remedy = TOO_LARGE if "EXHAUSTED" in reason else None
        raise RunError(f"the device failed: {reason:.300}", remedy=remedy) from error
