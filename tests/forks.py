"""Starts Python processes quickly, by forking a server that has already imported the tool.

Importing takes two seconds, which is longer than most of these processes compute. The server starts
together with the first process. It imports with the environment variables of this process; each
forked process then sets its own.
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
        """Starts the process.

        Args:
            command: The path of the script and its arguments.
            environment: All of its environment variables.
            log: The file of its output.
        """
        log.write_bytes(b"")
        arguments = [*command], dict(environment), str(log), os.getcwd()
        self._process = SERVER.Process(target=_become, args=arguments, daemon=True)
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

    gc.freeze()  # collections skip imported objects, and so do not write to pages that are shared
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
    # As in a new process, even if the tests were started with these signals ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
