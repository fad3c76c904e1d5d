"""Many processes join as one run, compare what must be the same, and take the same steps.

`jax.distributed` joins the processes of a pod. Before anything expensive, `raise_together`
compares everything that must be the same on all hosts, such as the flags and the model's files.
During the run, `Lockstep` keeps the hosts at the same step, a watchdog ends a process whose steps
no longer finish, and a helper process says what to do when JAX ends this one because another one
died.
"""

import faulthandler
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from activation_extraction.cli.console import Clock
from activation_extraction.cli.flags import HostOptions
from activation_extraction.common.errors import InputError, RunError, for_the_user, one_line
from activation_extraction.common.interrupts import raise_on_ctrl_c
from activation_extraction.common.log import activities
from activation_extraction.common.visible import say_error
from activation_extraction.model.devices import usable_devices
from activation_extraction.model.host_rows import count_hosts
from activation_extraction.text.batch import Batch

MOST_SHOWN = 400  # of a value with more characters, messages show a digest
STEPS_AHEAD = 2
# What `raise_together` finds on a host. A problem may pass, or it can only recur.
NO_PROBLEM, BAD_INPUT, RECURS, MAY_PASS = range(4)
LOOK_SECONDS = 1.0  # between two looks of the watchdog
T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """The number of this process among the hosts of the run."""

    id: int = 0
    count: int = 1

    @property
    def several(self) -> bool:
        return self.count > 1


def join(options: HostOptions) -> Host:
    """Starts jax.distributed, with which this host joins the others.

    Args:
        options: Flags about hosts. Where they name no hosts, JAX finds them.

    Returns:
        This host.

    Raises:
        InputError: JAX finds no pod or no devices, or hosts have different numbers of devices.
        RunError: The other hosts do not answer in time.
    """
    coordinator, count = options.coordinator_address, options.num_hosts
    seconds = options.connect_timeout
    failed = (
        f"not all hosts connected to {coordinator or 'the coordinator'} within {seconds} s "
        "(--connect_timeout); check that host 0 is running, that its port can be reached from "
        f"here, and that all {count or ''} hosts were started with the same address and number "
        "of hosts"
    )
    if coordinator is not None and options.host_id:
        _wait_for_port(coordinator, seconds, failed)
    elif coordinator is not None:
        _check_port(coordinator)
    # Under Slurm JAX takes one GPU per task, but a task that is alone on its node should use all.
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as 1(x16)
    alone = re.fullmatch(r"1(\(x\d+\))?", tasks) is not None
    # This program handles SIGTERM itself; JAX's preemption service would swallow the signal.
    jax.config.update("jax_enable_preemption_service", False)
    timer = threading.Timer(seconds, _end_process, [f"error: {failed}"])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=count,
            process_id=options.host_id,
            local_device_ids=[] if alone else None,  # None: JAX chooses
            initialization_timeout=seconds + 60,  # JAX aborts then, after our timer
            heartbeat_timeout_seconds=options.heartbeat_timeout,
        )
    except ValueError as error:
        raise InputError(
            "--multihost: found no pod of Cloud TPU, GKE or Slurm; give --coordinator_address, "
            f"--host_id and --num_hosts ({one_line(error)})"
        ) from error
    except RuntimeError as error:
        raise RunError(f"{failed} ({one_line(error):.200})") from error
    finally:
        timer.cancel()
    devices = usable_devices(all_of_host=True)
    host = Host(jax.process_index(), jax.process_count())
    try:
        count_hosts(devices)  # first, because JAX can gather nothing from hosts that differ in this
    except InputError:  # all hosts know all devices, so all raise
        leave(host)
        raise
    return host


def _end_process(message: str) -> None:
    say_error(message)
    os._exit(1)


def _check_port(address: str) -> None:
    """Raises RunError unless host 0 can listen at the port: JAX would abort without a message."""
    port = int(address.rsplit(":", 1)[1])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        raise RunError(
            f"--coordinator_address {address}: host 0 cannot listen at port {port}: "
            f"{os.strerror(error.errno or 0)}",
            remedy="end the process that uses it, or give all hosts another port",
        ) from error


def _wait_for_port(address: str, seconds: float, failed: str) -> None:
    """Waits until something listens at HOST:PORT: JAX would look less and less often.

    Raises RunError(failed) if nothing ever does.
    """
    name, port = address.rsplit(":", 1)
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((name.strip("[]"), int(port)), min(seconds, 5)).close()
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise RunError(f"{failed} ({error})") from error
            time.sleep(0.2)


def gather(host: Host, value: Any) -> list[Any]:
    """Returns every host's value, which JSON can hold. All hosts must call this together."""
    if not host.several:
        return [value]
    local = json.dumps(value).encode()
    size = int(np.max(multihost_utils.process_allgather(np.int32(len(local)))))
    # Arrays of different sizes could not be gathered; JSON may end with spaces.
    rows = multihost_utils.process_allgather(np.frombuffer(local.ljust(size), np.uint8))
    return [json.loads(row.tobytes()) for row in np.asarray(rows)]


def any_host(host: Host, flags: Sequence[bool]) -> list[bool]:
    """Returns, for each flag, whether any host has set it. All hosts must call this together."""
    return [any(votes) for votes in zip(*gather(host, flags), strict=True)]


def leave(host: Host) -> None:
    """Leaves the run. All hosts must do so together: JAX would abort one that leaves later."""
    if host.several:
        jax.distributed.shutdown()


def raise_together(
    host: Host, problem: Exception | None, fields: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Raises on all hosts if one has a problem, or if fields differ between hosts.

    All hosts must call this together; it is a barrier. If any host raises, all leave the run
    before. If the problem of any host can only recur, the errors of all hosts say so.

    Args:
        host: This host.
        problem: Problem of this host; None if it has none.
        fields: Name -> content that must be the same on all hosts. A host with a problem may leave
            the fields out.

    Raises:
        Exception: `problem` itself, on a host that has one.
        InputError: Another host has found bad input, and the message names that host; or no host
            has a problem but a field differs or is missing on some hosts, and the message names the
            field, its values and their hosts.
        RunError: Another host has failed in another way; the message names that host.
    """
    kind = NO_PROBLEM
    if problem is not None:
        kind = RECURS if getattr(problem, "recurs", False) else MAY_PASS
        kind = BAD_INPUT if isinstance(problem, InputError) else kind
    values = {name: _shown(value) for name, value in fields.items()}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    kinds, digests = zip(*gather(host, (kind, digest)), strict=True)
    if problem is None and any(kinds):
        hosts = ", ".join(str(number) for number, kind in enumerate(kinds) if kind)
        message = f"host {hosts} failed: see the message there"
        if BAD_INPUT in kinds:
            problem = InputError(message)
        else:
            problem = RunError(message, remedy="it says what to do on all hosts")
    elif problem is None and len({*digests}) > 1:
        # A data set of many files has many fields, so they are seldom sent.
        problem = InputError(_difference(gather(host, values)))
    if isinstance(problem, RunError) and {BAD_INPUT, RECURS} & {*kinds}:
        problem.recurs = True
    if problem is not None:
        leave(host)
        raise problem


def _difference(of_hosts: Sequence[Mapping[str, str]]) -> str:
    """Names the first field that differs, its values and their hosts."""
    name = next(n for n in chain(*of_hosts) if len({fields.get(n) for fields in of_hosts}) > 1)
    groups: dict[str, list[str]] = {}
    for number, fields in enumerate(of_hosts):
        groups.setdefault(fields.get(name, "nothing"), []).append(str(number))
    who = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in groups.items())
    return f"hosts differ in {name}: {who}; it must be the same on all"


def _shown(value: object) -> str:
    """Returns a value that is short enough to be shown, or else a digest of it."""
    text = str(value)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return text if len(text) <= MOST_SHOWN else f"digest {digest}"


def together(
    host: Host,
    action: Callable[[], T],
    compared: Callable[[T], Mapping[str, object]] = lambda _: {},
) -> T:
    """Returns the result of `action` once it has succeeded on all hosts, which call this together.

    Args:
        host: This host.
        action: A function that may fail on some hosts.
        compared: A function that returns those fields of the result, name -> content, that must be
            the same on all hosts.

    Raises:
        Exception: As `raise_together`.
    """
    try:
        result = action()
        fields = compared(result)
    except Exception as error:  # the other hosts must not wait for this one
        raise_together(host, error)
        raise
    raise_together(host, None, fields)
    return result


class Watchdog:
    """Ends the process when no step finishes for too long; first prints every thread's stack.

    It watches inside its blocks, of which there may be several in turn.

    Attributes:
        seconds: How long no step may finish.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._last = time.monotonic()
        self._done = threading.Event()

    def reset(self) -> None:
        self._last = time.monotonic()

    def __enter__(self) -> "Watchdog":
        self._last = time.monotonic()
        self._done.clear()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(min(self.seconds / 4, LOOK_SECONDS)):
            if time.monotonic() - self._last <= self.seconds:
                continue
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            why = f"no batch has become ready and no step has finished for {self.seconds:g} s"
            remedy = "to continue, start the run again without --overwrite"
            if busy := ", ".join(list(activities.values())):
                why = f"{busy}: {why}"
                remedy = "change or leave out the row, or the template, and start anew with "
                remedy += "--overwrite"
            _end_process(
                f"error: {why} (--stall_timeout); the stack of every thread is above; committed "
                f"shards are safe; {remedy}"
            )


@contextmanager
def explain_abort(host: Host, message: str) -> Iterator[None]:
    """Prints `message` to stderr if JAX ends this process inside the block.

    JAX aborts a process whose peers are gone and runs no `finally` blocks. A helper process waits
    at the other end of a pipe and outlives this one long enough to print the message.
    """
    if not host.several:
        yield
        return
    why = "because another host is gone (or because it crashed itself; see above)"
    script = "import sys; sys.stdin.read() == '.' or sys.stderr.write(sys.argv[1])"
    helper = subprocess.Popen(
        [sys.executable, "-S", "-c", script, f"error: host {host.id} ended {why}; {message}\n"],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C in the terminal must not reach it
    )
    try:
        with raise_on_ctrl_c():  # which is no abort
            yield
    finally:
        helper.communicate(".")


class Lockstep:
    """Gives out the batches of this host, one for each step that all hosts take together.

    Hosts run out of data at different times, and any of them may fail or be asked to stop. Along
    with step n, each host sends its `votes`: what it knows about step n + 2. The sum over all hosts
    comes back with the results of step n, in time for step n + 2, and `learn` takes it in; so no
    host waits for it. Iterating yields None when this host has no batch for a step: none is left
    although another host has one, or none is ready because this host skips samples that are stored.
    All hosts end at the same step: when none has data, or two steps after any host failed or was
    asked to stop.

    Args:
        batches: The batches of this host; None for a batch that is not ready yet.
        stopped: Whether this host has been asked to stop.
        any_host: Returns, for each of several flags, whether any host has set it. It is called
            once, by all hosts together.
        clock: The clock that measures the wait for batches.

    Attributes:
        complete: Whether the run came to the end of its data.
        failure: The failure of this host or, once this host has learned of it, of another one.
    """

    def __init__(
        self,
        batches: Iterator[Batch | None],
        stopped: Callable[[], object],
        any_host: Callable[[Sequence[bool]], Sequence[bool]],
        clock: Clock,
    ) -> None:
        self.failure: Exception | None = None
        self._batches = batches
        self._stopped = stopped
        self._clock = clock
        self._upcoming: deque[Batch | None] = deque()
        present = []
        for _ in range(STEPS_AHEAD):
            self._upcoming.append(self._fetch())
            present.append(self._has_data)
        flags = [*present, bool(stopped()), self.failure is not None]
        *some_data, stopping, failed = any_host(flags)
        self.complete = not stopping
        ending = stopping or (failed and not any(some_data))
        self._take_step = deque([] if ending else some_data)

    def __iter__(self) -> Iterator[Batch | None]:
        while self._take_step and self._take_step.popleft():
            batch = self._upcoming.popleft()
            self._upcoming.append(self._fetch())
            yield batch

    def _fetch(self) -> Batch | None:
        """Returns the batch of a later step, or None; `_has_data` says whether there may be more
        batches from that step on."""
        self._has_data = False
        if self.failure is None and not self._stopped():
            try:
                with self._clock.measure("data"):
                    batch = next(self._batches)
                self._has_data = True
                return batch
            except StopIteration:
                return None
            except Exception as error:  # it is raised once all hosts have stopped
                self.fail(error)
        return None

    @property
    def votes(self) -> tuple[bool, bool, bool]:
        """Returns what to send with the step of the batch that was yielded last: whether this host
        has data, whether it was asked to stop, and whether it failed."""
        return self._has_data, bool(self._stopped()), self.failure is not None

    def learn(self, votes: Iterable[float]) -> None:
        """Learns how many hosts cast each vote with a step; decides on the step two later."""
        with_data, stopping, failed = (bool(count) for count in votes)
        if failed and self.failure is None:
            remedy = "its message says what to do on all hosts"
            self.failure = RunError("another host failed", remedy=remedy)
        self.complete = self.complete and not stopping
        self._take_step.append(with_data and not stopping and not failed)

    def fail(self, error: Exception) -> None:
        """Records a failure on this host; only the first counts. Logs the traceback of a bug."""
        if self.failure is None:
            self.failure = for_the_user(error)


def one_step_behind(items: Iterable[T]) -> Iterator[T]:
    """Yields each item only once the next one has been made, and the last one at the end.

    So one of the steps that compute in the background is always in flight.
    """
    for item, _ in pairwise(chain(items, [None])):
        yield item  # type: ignore[misc]
