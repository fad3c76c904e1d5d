"""Processes that need not import the tool: each is forked from one that has.

Importing takes two seconds, more than most of these processes compute. That one is started with the
first of them, by this process, and has its variables while it imports; others are set after a fork.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["jax", "datasets", "extract_activations", "forks"])
DEVICES = "JAX_NUM_CPU_DEVICES"


class Forked:
    """A running Python script, with the methods of subprocess.Popen that the tests use."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """command: the path of the script and its arguments. log: where its output goes."""
        log.write_bytes(b"")
        given = [*command], dict(environment), str(log), os.getcwd()
        self._process = SERVER.Process(target=_become, args=given, daemon=True)
        self._process.start()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(str(self._process.pid), timeout or 0)
        return status

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._process.pid or 0, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()


def _become(command: list[str], environment: dict[str, str], log: str, folder: str) -> None:
    """Runs the script as a new process does, and ends."""
    import jax

    gc.freeze()  # no collection looks at what was imported, or writes to pages that are shared
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    if DEVICES in environment:
        jax.config.update(DEVICES.lower(), int(environment[DEVICES]))
    if platforms := environment.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", platforms)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a process of its own,
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever was ignored where the tests started
    sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
    status = 1
    try:
        runpy.run_path(command[0], run_name="__main__")
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
