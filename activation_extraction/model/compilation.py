"""Compiles programs with the options of their platform, and sets up JAX's compilation cache.

The cache keeps compiled programs in a folder or bucket, so that a run that starts again need not
compile its programs again. Computers of different kinds may share a folder, because the key under
which JAX stores a program depends on the program, its devices, the version and the flags of the
compiler, and for CPUs on their instruction set.
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

# Platform -> options of JAX's compiler that differ from the defaults.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "tpu": {
        # By default, only the TPU v5e gathers weights along the mesh axis fsdp while it computes
        # matrix products. The first option makes gathers asynchronous on all TPUs. The other two
        # options fuse a gather with the product that runs at the same time.
        "xla_enable_async_all_gather": True,
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    },
}

# The value of --compilation_cache for no cache.
NO_CACHE = "off"
# The event that jax.monitoring reports when a program is taken from the cache.
CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"
# A regular expression for JAX's warnings about a cache that is damaged or cannot be used.
CACHE_WARNING = "Error (reading|writing) persistent compilation cache"


def compile_with_options(lowered: Any, platform: str, **options: Any) -> Any:
    """Compiles a lowered program with the options in COMPILER_OPTIONS.

    If the compiler does not know one of these options or of `options`, the function logs a warning
    and compiles the program with the compiler's defaults, without any of the options.

    Args:
        lowered: The program, as `jax.jit(...).lower(...)` returns it.
        platform: The platform of the program's devices.
        options: Name of a further option of the compiler -> its value.

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


def use_compilation_cache(flag: str | None, output: Path, several_hosts: bool) -> None:
    """Makes JAX keep compiled programs in `--compilation_cache` or in the user's cache folder.

    Args:
        flag: The value of --compilation_cache, which is a folder, a URL or "off". None for the
            default, which is the user's cache folder for a single host, and no cache for several
            hosts.
        output: The output folder of the run, which must not contain the cache.
        several_hosts: Whether the run has several hosts. They have no default folder, because JAX
            only writes to the cache on host 0, so all hosts would have to share the folder.

    Raises:
        InputError: If the folder of the flag cannot be used. If the default folder cannot be used,
            only a warning is logged.
    """
    if not jax.config.values["jax_enable_compilation_cache"]:
        # The user has turned the cache off with an environment variable of JAX.
        return
    cache_folder = None if flag == NO_CACHE else flag
    if cache_folder is not None and "://" not in cache_folder:
        cache_folder = _usable_folder(Path(cache_folder), output)
    elif flag is None and not several_hosts:
        try:
            cache_folder = _usable_folder(default_folder(), output)
        except InputError as error:
            log.warning(
                "%s: nothing is kept for the next start; XDG_CACHE_HOME names another cache", error
            )
    jax.config.update("jax_enable_compilation_cache", cache_folder is not None)
    if cache_folder is None:
        return
    jax.config.update("jax_compilation_cache_dir", cache_folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # JAX compiles a program again if its file in the cache is damaged. JAX's warnings about damaged
    # files are not shown, because `watch_compiling` logs them.
    warnings.filterwarnings("ignore", CACHE_WARNING)
    if "://" in cache_folder:
        # JAX would also put XLA's own caches into this folder, but they do not support URLs.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def default_folder() -> Path:
    """Returns the default folder of the compilation cache, which is in the user's cache folder."""
    user_cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return user_cache_folder / "activation_extraction/jax"


def _usable_folder(folder: Path, output: Path) -> str:
    """Checks that a folder can be used as a cache, and creates it if it does not exist.

    Args:
        folder: The folder for the cache.
        output: The output folder of the run.

    Returns:
        The path of the folder for the cache, as given.

    Raises:
        InputError: If the folder cannot be written, or if it is inside the output folder, which
            must only contain the run.
    """
    if folder.resolve().is_relative_to(output.resolve()):
        raise InputError(f"--compilation_cache {folder}: lies within --output_dir {output}")
    try:
        # Only the user may write to the cache, because its files contain code that this program
        # runs.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"--compilation_cache {folder}: {error.strerror}") from error
    return str(folder)


@contextmanager
def watch_compiling() -> Iterator[Callable[[], bool]]:
    """Watches compilations in a `with` block, and logs JAX's warnings about the cache after it.

    Yields:
        A function without arguments, which can be called in the block and after it. It returns
        whether JAX has loaded a program of the block from its persistent compilation cache instead
        of compiling it.
    """
    reported_event_names = set[str]()

    def record_event(event: str, **_: str | int) -> None:
        reported_event_names.add(event)

    jax.monitoring.register_event_listener(record_event)
    try:
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.filterwarnings("always", CACHE_WARNING)
            yield lambda: CACHE_HIT_EVENT in reported_event_names
    finally:
        jax.monitoring.unregister_event_listener(record_event)
    for warning in caught_warnings:
        warning_text = " ".join(str(warning.message).split())
        log.warning("the compilation cache could not be used: %s", warning_text)
