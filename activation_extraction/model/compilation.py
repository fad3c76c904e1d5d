"""Compiles programs with the options of their platform, and sets up JAX's compilation cache.

The persistent cache saves a run that starts again the compilation. JAX's key of an entry covers the
program, its devices, the compiler's version and flags, and on the CPU the machine's instruction
sets, so machines of different kinds may share a folder.
"""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.log import log

# Platform -> options of its compiler that differ from the defaults.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "tpu": {
        # By default, only the v5e gathers weights along fsdp while it computes other products. The
        # first option makes gathers asynchronous. The other two fuse a gather with the product that
        # runs at the same time.
        "xla_enable_async_all_gather": True,
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    },
}

OFF = "off"  # the value of --compilation_cache for no cache
HIT = "/jax/compilation_cache/cache_hits"  # the event of jax.monitoring for a program in the cache
# A pattern of JAX's warning about a damaged or unusable cache.
PROBLEM = "Error (reading|writing) persistent compilation cache"


def compile_with_options(lowered: Any, platform: str, **options: Any) -> Any:
    """Compiles a lowered program with the options in COMPILER_OPTIONS.

    If the compiler does not know one of the options, all of them are dropped, with a warning.

    Args:
        lowered: The program, as `jax.jit(...).lower(...)` returns it.
        platform: The platform of its devices.
        options: Further options of the compiler.

    Returns:
        The compiled program.
    """
    try:
        return lowered.compile(COMPILER_OPTIONS.get(platform, {}) | options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        log.warning("the compiler's defaults are used: %s", one_line(error))
        return lowered.compile()


def use_compilation_cache(flag: str | None, output: Path, several: bool) -> None:
    """Makes JAX keep compiled programs in `--compilation_cache` or in the user's cache folder.

    Args:
        flag: The value of --compilation_cache: a folder, a URL or OFF; None for the default.
        output: The folder of the run, in which the cache must not lie.
        several: Whether this is one of several hosts. They have no cache by default, because JAX
            writes to it only on host 0, so that all hosts would have to share the folder.

    Raises:
        InputError: The folder of the flag cannot be used. If the default folder cannot be used,
            only a warning is logged.
    """
    if not jax.config.values["jax_enable_compilation_cache"]:  # the environment turned it off
        return
    folder = None if flag == OFF else flag
    if folder is not None and "://" not in folder:
        folder = _usable(Path(folder), output)
    elif flag is None and not several:
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
    # JAX compiles the program of a damaged entry again. `watch_compiling` logs the warnings.
    warnings.filterwarnings("ignore", PROBLEM)
    if "://" in folder:
        # JAX would also put XLA's caches into this folder, but they do not support URLs.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def default_folder() -> Path:
    """Returns the folder of the compilation cache in the user's cache folder."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return caches / "activation_extraction/jax"


def _usable(folder: Path, output: Path) -> str:
    """Returns the folder, which is created if it does not exist.

    Raises:
        InputError: The folder cannot be written, or it lies in the output folder, which must only
            contain the run.
    """
    if folder.resolve().is_relative_to(output.resolve()):
        raise InputError(f"--compilation_cache {folder}: lies within --output_dir {output}")
    try:
        # Only for the user: whoever can write to the cache can make this program run any code.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"--compilation_cache {folder}: {error.strerror}") from error
    return str(folder)


@contextmanager
def watch_compiling() -> Iterator[Callable[[], bool]]:
    """Watches the compilation cache in a `with` block, and logs JAX's warnings about it.

    Yields:
        A function that returns whether a program came from the cache in the block.
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
