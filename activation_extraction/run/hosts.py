"""Many processes as one run: start, agreement, and what ends a process that is stuck.

`jax.distributed` joins the processes of a pod. Before anything expensive they compare digests of
all that must be the same. During the run a watchdog ends a process whose steps do not finish, and a
small helper tells what to do when JAX ends this process because another one died.
"""

import faulthandler
import hashlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from activation_extraction.cli.errors import InputError, RunError, one_line

log = logging.getLogger("extract_activations")

TEXT_BYTES = 64


@dataclass(frozen=True)
class Host:
    """This process among those of the run."""

    id: int = 0
    count: int = 1

    @property
    def several(self) -> bool:
        return self.count > 1


def join(
    coordinator: str | None,
    host_id: int | None,
    num_hosts: int | None,
    connect_seconds: int,
    heartbeat_seconds: int,
) -> Host:
    """Starts jax.distributed; all three are None where JAX finds them itself (as on Cloud TPU).

    Raises InputError where JAX finds no cluster, RunError when the others do not answer in time.
    """
    failed = (
        f"connecting to {coordinator or 'the coordinator'} did not succeed within "
        f"{connect_seconds} s: check that host 0 runs, that its port is reachable from here, and "
        f"that all {num_hosts or ''} hosts were started with the same address and number of hosts"
    )
    if coordinator is not None and host_id:
        _wait_for_port(coordinator, connect_seconds, failed)
    # SIGTERM is for this program: its service would swallow the signal.
    jax.config.update("jax_enable_preemption_service", False)
    timer = threading.Timer(connect_seconds, _end_process, [f"error: {failed}"])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=num_hosts,
            process_id=host_id,
            local_device_ids=_local_device_ids(),
            initialization_timeout=connect_seconds + 60,  # it aborts: be there before it does
            heartbeat_timeout_seconds=heartbeat_seconds,
        )
    except ValueError as error:
        raise InputError(
            "--multihost: no pod was found (Cloud TPU, GKE, Slurm); give --coordinator_address, "
            f"--host_id and --num_hosts ({one_line(error)})"
        ) from error
    except RuntimeError as error:
        raise RunError(f"{failed} ({one_line(error):.200})") from error
    finally:
        timer.cancel()
    return Host(jax.process_index(), jax.process_count())


def _local_device_ids() -> list[int] | None:
    """[] restricts nothing: a task that Slurm started alone on its node sees all of its GPUs.

    None leaves it to JAX, which under Slurm takes one GPU for each task.
    """
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as 1(x16)
    return [] if re.fullmatch(r"1(\(x\d+\))?", tasks) else None


def _end_process(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


def _wait_for_port(address: str, seconds: float, failed: str) -> None:
    """Until somebody listens at HOST:PORT. Raises RunError(failed) when nobody does in time."""
    name, port = address.rsplit(":", 1)
    name = name.strip("[]")
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((name, int(port)), timeout=min(seconds, 5)).close()
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise RunError(f"{failed} ({error})") from error
            time.sleep(0.2)


def any_host(host: Host, flags: Sequence[bool]) -> list[bool]:
    """For every flag: is it set on any host? All hosts must call it together."""
    if not host.several:
        return list(flags)
    gathered = multihost_utils.process_allgather(np.array(flags, np.int32))
    return [bool(value) for value in np.max(np.asarray(gathered), axis=0)]


def leave(host: Host) -> None:
    """Leaves the run, together with all hosts: JAX would abort those that leave later."""
    if host.several:
        jax.distributed.shutdown()


def together(host: Host, failure: Exception | None) -> None:
    """Raises `failure` where there is one, and RunError on every other host. A barrier.

    All hosts leave the run before it raises.
    """
    if any_host(host, [failure is not None])[0]:
        leave(host)
        raise failure or elsewhere()


def elsewhere() -> RunError:
    """What to raise where nothing is wrong but on another host."""
    return RunError("another host failed", remedy="its message says what to do, on all hosts")


def gather(host: Host, text: str) -> list[str]:
    """Every host's `text`, of TEXT_BYTES at most, in their order. All hosts must call it."""
    if not host.several:
        return [text]
    mine = np.frombuffer(text.encode().ljust(TEXT_BYTES), np.uint8)
    every = np.asarray(multihost_utils.process_allgather(mine))
    return [row.tobytes().decode().rstrip() for row in every]


def agree(host: Host, fields: Mapping[str, object], problem: Exception | None) -> None:
    """Compares `fields` (name -> content) over all hosts, and ends all when one has a problem.

    All hosts must call it, with the same names; one with a problem needs none. Raises `problem`
    where it arose. Elsewhere it names the hosts that have one: InputError, or RunError when no
    input was bad. When none has, InputError with the first field that differs and on which hosts.
    All hosts leave the run before it raises.
    """
    found = _disagreement(fields, problem) if host.several else problem
    if found is not None:
        leave(host)
        raise found


def _disagreement(fields: Mapping[str, object], problem: Exception | None) -> Exception | None:
    kind = 0 if problem is None else 1 if isinstance(problem, InputError) else 2
    kinds = np.asarray(multihost_utils.process_allgather(np.int32(kind)))
    if kinds.any():
        hosts = ", ".join(str(i) for i in np.flatnonzero(kinds))
        if 1 in kinds:
            return problem or InputError(f"host {hosts} refused the request: see the message there")
        return problem or RunError(f"host {hosts} failed: see the message there")
    digests = [hashlib.sha256(str(value).encode()).digest() for value in fields.values()]
    mine = np.frombuffer(b"".join(digests), np.uint8).reshape(len(fields), -1)
    return _difference(list(fields), np.asarray(multihost_utils.process_allgather(mine)))


def _difference(names: list[str], every: np.ndarray) -> InputError | None:
    """The first field in which hosts differ. every: (hosts, fields, bytes of a digest)."""
    for name, digests in zip(names, every.swapaxes(0, 1), strict=True):
        groups: dict[str, list[str]] = {}
        for number, digest in enumerate(digests):
            groups.setdefault(digest.tobytes().hex()[:12], []).append(str(number))
        if len(groups) > 1:
            told = "; ".join(f"{digest} on {', '.join(who)}" for digest, who in groups.items())
            return InputError(f"hosts differ in {name}: digest {told}")
    return None


class Watchdog:
    """Ends the process, with the stack of every thread, when no step finishes for too long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = time.monotonic()
        self._done = threading.Event()

    def alive(self) -> None:
        self._last = time.monotonic()

    def __enter__(self) -> "Watchdog":
        self._last = time.monotonic()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(min(self._seconds / 4, 5.0)):
            if time.monotonic() - self._last > self._seconds:
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                _end_process(
                    f"error: no step finished for {self._seconds:g} s (--stall_timeout); "
                    "the stacks are above, what is committed is safe"
                )


@contextmanager
def last_words(host: Host, message: str) -> Iterator[None]:
    """Prints `message` to stderr if JAX ends this process inside the block.

    JAX aborts a process whose peers are gone, without `finally` blocks. A helper process, which
    waits at the other end of a pipe, outlives it for as long as it takes to say so.
    """
    if not host.several:
        yield
        return
    why = "because another host is gone (or because it crashed itself: see above)"
    script = "import sys; sys.stdin.read() == '.' or sys.stderr.write(sys.argv[1])"
    helper = subprocess.Popen(
        [sys.executable, "-S", "-c", script, f"error: host {host.id} ended {why}; {message}\n"],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C in the terminal is not for it
    )
    try:
        yield
    finally:
        helper.communicate(".")
