"""How programs are compiled, and where compiled programs are kept for the next start.

`compile_with_options` gives the compiler the options of its platform. JAX's persistent compilation
cache spares a run that starts again the compilation. JAX's key of an entry covers the program, its
devices, the compiler's version and flags, and on the CPU the machine's instruction sets, so
machines of different kinds may share a folder.
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
        # By default, only v5e gathers weights along fsdp while other products run. With the first
        # option, a gather does not block; with the others, it goes on inside the product that runs
        # beside it.
        "xla_enable_async_all_gather": True,
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    },
}

OFF = "off"  # the value of --compilation_cache for no cache
HIT = "/jax/compilation_cache/cache_hits"  # an event of jax.monitoring
PROBLEM = "Error (reading|writing) persistent compilation cache"  # a warning of JAX


def compile_with_options(lowered: Any, platform: str, **options: Any) -> Any:
    """Compiles a lowered program with the options in COMPILER_OPTIONS.

    If the compiler does not know one of the options, a warning is logged and its defaults are used.

    Args:
        lowered: The program, as `jax.jit(...).lower(...)` returns it.
        platform: The platform of its devices.
        options: Further options of the compiler.
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
        flag: --compilation_cache: a folder, a URL or OFF; None if it is not given.
        output: The folder of the run, in which the cache must not lie.
        several: Whether this is one of several hosts. They have no cache by default: JAX writes on
            host 0 only, so all of them must share the folder.

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
    # A damaged entry is compiled anew; `watch_compiling` logs the warning about the entry of a run.
    warnings.filterwarnings("ignore", PROBLEM)
    if "://" in folder:
        # The compiler's own caches, which JAX would put there too, cannot use URLs.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def default_folder() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return caches / "activation_extraction/jax"


def _usable(folder: Path, output: Path) -> str:
    """Returns the folder, which is created if it does not exist.

    Raises:
        InputError: It cannot be written, or it lies in the output, which holds only the run.
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
    """Yields a function that returns whether anything came from the cache inside the block.

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
