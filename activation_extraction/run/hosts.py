"""Joins many processes to one run, compares their settings, and keeps them at the same step.

`jax.distributed` joins the processes of a pod. Before anything expensive, `raise_together`
compares everything that must be the same on all hosts, such as the flags and the model's files.
During the run, `Lockstep` keeps the hosts at the same step, and a watchdog ends a process whose
steps no longer finish. If JAX ends this process because another one died, a helper process prints
what to do.
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

MOST_SHOWN = 400  # characters of a value in a message; of a longer value, a digest is shown
STEPS_AHEAD = 2  # batches are fetched, and votes are cast, so many steps before they are needed
# Whether a host has a problem, and which, in `raise_together`. A problem that recurs comes again
# with the same command; one that may pass perhaps does not.
NO_PROBLEM, BAD_INPUT, RECURS, MAY_PASS = range(4)
LOOK_SECONDS = 1.0  # longest time between two checks of the watchdog
T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """This process among the hosts of the run, each of which has one process.

    Attributes:
        id: The number of this host, from 0.
        count: The number of hosts.
    """

    id: int = 0
    count: int = 1

    @property
    def several(self) -> bool:
        """Whether the run has more than one host."""
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
    # Under Slurm, JAX uses one GPU per task, but a task that is alone on its node should use all
    # its GPUs.
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
            initialization_timeout=seconds + 60,  # JAX would abort then, later than `timer`
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
        # Checked first, because JAX cannot gather from hosts with different numbers of devices.
        count_hosts(devices)
    except InputError:  # every host knows the devices of all hosts, so all raise it
        leave(host)
        raise
    return host


def _end_process(message: str) -> None:
    """Prints a message and ends the process at once, even if other threads hang."""
    say_error(message)
    os._exit(1)


def _check_port(address: str) -> None:
    """Checks that host 0 can listen at the port, because JAX would abort without a message.

    Args:
        address: HOST:PORT.

    Raises:
        RunError: This process cannot listen at the port.
    """
    port = int(address.rsplit(":", 1)[1])
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=dual_stack).close()
    except OSError as error:
        raise RunError(
            f"--coordinator_address {address}: host 0 cannot listen at port {port}: "
            f"{os.strerror(error.errno or 0)}",
            remedy="end the process that uses it, or give all hosts another port",
        ) from error


def _wait_for_port(address: str, seconds: float, failed: str) -> None:
    """Waits until a process listens at a port, because JAX would retry at ever longer intervals.

    Args:
        address: HOST:PORT.
        seconds: The longest time to wait.
        failed: The message of the error.

    Raises:
        RunError: No process has listened at the port in time.
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
    """Gathers a value from each host. All hosts must call this together.

    Args:
        host: This host.
        value: The value of this host, which JSON can represent.

    Returns:
        The values of all hosts, by the hosts' numbers. Of several hosts, they went through JSON, so
        a tuple becomes a list.
    """
    if not host.several:
        return [value]
    local = json.dumps(value).encode()
    size = int(np.max(multihost_utils.process_allgather(np.int32(len(local)))))
    # Padded with spaces, which JSON ignores, because only arrays of one size can be gathered.
    rows = multihost_utils.process_allgather(np.frombuffer(local.ljust(size), np.uint8))
    return [json.loads(row.tobytes()) for row in np.asarray(rows)]


def any_host(host: Host, flags: Sequence[bool]) -> list[bool]:
    """Returns for each flag whether it is set on any host. All hosts must call this together.

    Args:
        host: This host.
        flags: The flags of this host, as many as on the other hosts.
    """
    return [any(votes) for votes in zip(*gather(host, flags), strict=True)]


def leave(host: Host) -> None:
    """Leaves the run. All hosts must call this together: JAX would abort a host that leaves later.

    Args:
        host: This host.
    """
    if host.several:
        jax.distributed.shutdown()


def raise_together(
    host: Host, problem: Exception | None, fields: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Raises on all hosts if one has a problem, or if fields differ between hosts.

    All hosts must call this together; it is a barrier. Before it raises, all hosts leave the run.
    If the problem of any host recurs with the same command, the errors of all hosts are marked so.

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
        # A data set of many files has many fields, so hosts exchange the fields themselves only
        # if their digests differ.
        problem = InputError(_difference(gather(host, values)))
    if isinstance(problem, RunError) and {BAD_INPUT, RECURS} & {*kinds}:
        problem.recurs = True
    if problem is not None:
        leave(host)
        raise problem


def _difference(fields_of_hosts: Sequence[Mapping[str, str]]) -> str:
    """Returns a message on the first field that differs, with its values and their hosts.

    Args:
        fields_of_hosts: The fields of each host, name -> content, which differ.
    """
    names = chain(*fields_of_hosts)
    name = next(n for n in names if len({fields.get(n) for fields in fields_of_hosts}) > 1)
    hosts_with: dict[str, list[str]] = {}
    for number, fields in enumerate(fields_of_hosts):
        hosts_with.setdefault(fields.get(name, "nothing"), []).append(str(number))
    values = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in hosts_with.items())
    return f"hosts differ in {name}: {values}; it must be the same on all"


def _shown(value: object) -> str:
    """Returns a value as text; a digest of it if it is longer than MOST_SHOWN."""
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
    """Ends the process when no step finishes for too long, after printing every thread's stack.

    It watches inside a `with` block. It can be used for several blocks, one after another.

    Args:
        seconds: The longest time without a step.

    Attributes:
        seconds: The longest time without a step.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._last = time.monotonic()
        self._done = threading.Event()

    def reset(self) -> None:
        """Records progress: the time starts anew."""
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
            problem = f"no batch has become ready and no step has finished for {self.seconds:g} s"
            remedy = "to continue, start the run again without --overwrite"
            if busy := ", ".join(list(activities.values())):
                problem = f"{busy}: {problem}"
                remedy = "change or leave out the row, or the template, and start anew with "
                remedy += "--overwrite"
            _end_process(
                f"error: {problem} (--stall_timeout); the stack of every thread is above; "
                f"committed shards are safe; {remedy}"
            )


@contextmanager
def explain_abort(host: Host, message: str) -> Iterator[None]:
    """Prints a message to stderr if JAX ends this process inside the `with` block.

    JAX aborts a process whose peers are gone and runs no `finally` blocks. A helper process waits
    at the other end of a pipe and outlives this one long enough to print the message.

    Args:
        host: This host. A single host has no helper process.
        message: The message, which says what to do.
    """
    if not host.several:
        yield
        return
    reason = "because another host is gone (or because it crashed itself; see above)"
    script = "import sys; sys.stdin.read() == '.' or sys.stderr.write(sys.argv[1])"
    helper = subprocess.Popen(
        [sys.executable, "-S", "-c", script, f"error: host {host.id} ended {reason}; {message}\n"],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C in the terminal must not reach it
    )
    try:
        with raise_on_ctrl_c():  # an exception, so that `finally` ends the helper in silence
            yield
    finally:
        helper.communicate(".")


class Lockstep:
    """Yields the batches of this host, one for each step that all hosts take together.

    Hosts run out of data at different times, and any of them may fail or be asked to stop. With
    step n, each host sends its `votes` on step n + 2. The sums of the votes over all hosts come
    back with the results of step n and are passed to `learn`, in time for step n + 2, so no host
    waits for them.

    Iterating yields None if this host has no batch for a step: its data has ended although another
    host has a batch, or no batch is ready because this host skips samples that are stored already.
    All hosts end at the same step: when none has data, or two steps after any host has failed or
    was asked to stop.

    Args:
        batches: The batches of this host. None for a batch that is not ready yet.
        stopped: A function that returns a true value once this host has been asked to stop.
        any_host: A function that takes flags and returns for each whether any host has set it. It
            is called once, by all hosts together.
        clock: The clock that measures the wait for batches.

    Attributes:
        complete: Whether the run comes to the end of its data; False once a host is known to have
            been asked to stop.
        failure: The failure of this host or, once this host has learned of it, of another host.
            None without a failure.
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
        """Returns the next batch, which is for a later step; None if there is none.

        Sets `_has_data`: whether this host may have more batches from that step on.
        """
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
        """The votes of this host, to send with the step of the batch that was yielded last.

        The three votes are whether this host has data, whether it was asked to stop, and whether it
        failed.
        """
        return self._has_data, bool(self._stopped()), self.failure is not None

    def learn(self, votes: Iterable[float]) -> None:
        """Takes in the votes that all hosts sent with a step, and decides on the step two later.

        Args:
            votes: The sums of `votes` over all hosts: the number of hosts that have data, the
                number of hosts that were asked to stop, and the number of hosts that failed.
        """
        with_data, stopping, failed = (bool(count) for count in votes)
        if failed and self.failure is None:
            remedy = "its message says what to do on all hosts"
            self.failure = RunError("another host failed", remedy=remedy)
        self.complete = self.complete and not stopping
        self._take_step.append(with_data and not stopping and not failed)

    def fail(self, error: Exception) -> None:
        """Records a failure of this host. Only the first failure counts.

        Args:
            error: The failure. If it is a bug, its traceback is logged.
        """
        if self.failure is None:
            self.failure = for_the_user(error)


def one_step_behind(items: Iterable[T]) -> Iterator[T]:
    """Yields each item only after the next one has been made, and the last one at the end.

    If making an item starts a step, one step is always in flight while the one before it is used.

    Args:
        items: The items.
    """
    for item, _ in pairwise(chain(items, [None])):
        yield item  # type: ignore[misc]
