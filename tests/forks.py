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
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
READ_ON_IMPORT = "JAX_", "XLA_", "HF_", "FSSPEC_", "GCSFS_", "PYTHON", "OMP_"
DEVICES = "JAX_NUM_CPU_DEVICES"
LARGEST = 1 << 17  # bytes of a request
MOST = 4  # parents that are kept, of 300 MB each


class Forked:
    """A running process, with the methods of subprocess.Popen that the tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, status: int) -> None:
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Parent:
    """The process that has imported the tool, as the tests see it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self.running: dict[int, Forked] = {}
        self._started: list[Forked] = []
        self._news = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._socket.close()
        atexit.unregister(self.close)

    def start(self, command: Sequence[str], variables: Mapping[str, str], log: int) -> Forked:
        request = json.dumps({"command": command, "variables": variables, "folder": os.getcwd()})
        with self._news:
            socket.send_fds(self._socket, [request.encode()], [log])
            assert self._news.wait_for(lambda: self._started, timeout=600)
            return self._started.pop()

    def _listen(self) -> None:
        while message := self._socket.recv(LARGEST):
            pid, status = json.loads(message)
            with self._news:
                if status is None:
                    self.running[pid] = Forked(pid)
                    self._started.append(self.running[pid])
                    self._news.notify()
                else:
                    self.running.pop(pid).end(status)


PARENTS: dict[frozenset[tuple[str, str]], Parent] = {}


def start(command: Sequence[str], environment: Mapping[str, str], log: int) -> Forked:
    """Starts a Python script. command: its path and arguments; log: a file's descriptor."""
    early = {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_ON_IMPORT) and name != DEVICES
    }
    key = frozenset(early.items())
    parent = PARENTS.pop(key, None) or Parent({"PATH": os.environ["PATH"], **early})
    idle = [other for other, of_other in PARENTS.items() if not of_other.running]
    if len(PARENTS) >= MOST and idle:
        PARENTS.pop(idle[0]).close()
    PARENTS[key] = parent  # the last one used is the last one
    return parent.start(command, environment, log)


def serve(tests: socket.socket) -> None:
    """Forks for every request, and tells the tests of every process that has ended."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children = 0
    while True:
        sources: list[Any] = [tests, ended]
        ready = select.select(sources, [], [])[0]
        if ended in ready:
            os.read(ended, 4096)
        while children and (found := os.waitpid(-1, os.WNOHANG))[0]:
            children -= 1
            tests.send(json.dumps(found).encode())
        if tests in ready:
            request, logs, *_ = socket.recv_fds(tests, LARGEST, 1)
            if not request:
                return
            pid = os.fork()
            if not pid:
                tests.close()
                become(json.loads(request), logs[0])
            os.close(logs[0])
            children += 1
            tests.send(json.dumps([pid, None]).encode())


def become(request: dict[str, Any], log: int) -> None:
    """Runs the script as a new process does, and ends."""
    import jax

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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
