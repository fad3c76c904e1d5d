"""Processes that need not import the tool: each is forked from one that has.

Importing takes two seconds, more than most of these processes compute. What a library reads from
the environment while it is imported is as it would be in a new process: processes are forked from
one that was started with the same variables. Only the number of devices is set after the fork.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

READ_ON_IMPORT = "JAX_", "XLA_", "HF_", "FSSPEC_", "GCSFS_", "PYTHON", "OMP_"
DEVICES = "JAX_NUM_CPU_DEVICES"
LARGEST = 1 << 17  # bytes of a request
MOST = 4  # parents that are kept, of 300 MB each
PARENTS: dict[frozenset[tuple[str, str]], socket.socket] = {}  # the last one used is the last one


class Forked:
    """A running process, with the methods of subprocess.Popen that the tests use."""

    def __init__(self, news: socket.socket) -> None:
        self._news, self.pid = news, int(news.recv(64))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._news.settimeout(timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(int(self._news.recv(64)))
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None
            self._news.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(1e-3)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()


def start(command: Sequence[str], environment: Mapping[str, str], log: int) -> Forked:
    """Starts a Python script. command: its path and arguments; log: a file's descriptor."""
    early = {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_ON_IMPORT) and name != DEVICES
    }
    key = frozenset(early.items())
    parent = PARENTS.pop(key, None) or new_parent({"PATH": os.environ["PATH"], **early})
    if len(PARENTS) >= MOST:
        PARENTS.pop(next(iter(PARENTS))).close()  # its processes go on
    PARENTS[key] = parent
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = {"command": command, "variables": dict(environment), "folder": os.getcwd()}
    with theirs:
        socket.send_fds(parent, [json.dumps(request).encode()], [log, theirs.fileno()])
    return Forked(ours)


def new_parent(environment: Mapping[str, str]) -> socket.socket:
    """Starts a process that imports the tool, and ends when this end of its socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command, given = [sys.executable, __file__, str(theirs.fileno())], {theirs.fileno()}
    process = subprocess.Popen(command, env=environment, pass_fds=given, stdin=subprocess.DEVNULL)
    process.returncode = 0  # nobody waits for it, of which Python would warn
    theirs.close()
    atexit.register(ours.close)
    return ours


def serve(tests: socket.socket) -> None:
    """Forks for every request; a second process waits for the forked one, and tells the tests."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the second ones
    while True:
        request, descriptors, *_ = socket.recv_fds(tests, LARGEST, 2)
        if not request:
            return
        if os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        tests.close()
        log, news = descriptors
        if not (pid := os.fork()):
            os.close(news)
            become(json.loads(request), log)
        with socket.socket(fileno=news) as told:
            told.send(str(pid).encode())
            told.send(str(os.waitpid(pid, 0)[1]).encode())
        os._exit(0)


def become(request: dict[str, Any], log: int) -> None:
    """Runs the script as a new process does, and ends."""
    import jax

    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["variables"])
    if DEVICES in os.environ:
        jax.config.update(DEVICES.lower(), int(os.environ[DEVICES]))
    os.chdir(request["folder"])
    sys.argv = request["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    status = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    from datasets import IterableDataset

    import extract_activations
    from activation_extraction.run.demo import MODEL_CONFIG

    # Otherwise each process imports this and traces the model that most tests have.
    IterableDataset.from_generator(list)
    family, config = extract_activations.FAMILIES.parse_config(MODEL_CONFIG)
    family.weights_of(config)
    gc.freeze()  # so that no collection looks at all this, or writes to pages that are shared
    with socket.socket(fileno=int(sys.argv[1])) as found:
        serve(found)
