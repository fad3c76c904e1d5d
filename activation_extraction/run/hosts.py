"""Joins the hosts of a pod to one run, compares their settings, and keeps them at the same step.

`join` connects the hosts through `jax.distributed`. Before each expensive stage, `raise_together`
compares everything that must be the same on all hosts, such as the flags and the model's files.
During the run, `Lockstep` keeps the hosts at the same step, and a `Watchdog` ends a process whose
steps no longer finish. If JAX ends this process because another one died, the helper process of
`explain_abort` prints what to do.
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
from activation_extraction.common.log import activity_by_thread_id
from activation_extraction.common.visible import say_error
from activation_extraction.model.devices import usable_devices
from activation_extraction.model.host_rows import count_hosts
from activation_extraction.text.batch import Batch

# Largest number of characters of a field in a message. Of a longer field, a digest is shown.
MOST_SHOWN = 400
# Number of steps by which each host fetches its batches in advance. The hosts also vote this number
# of steps in advance on whether they take a step.
STEPS_AHEAD = 2
# The kinds of problems that hosts exchange in `raise_together`. A problem that recurs would come
# again with the same command. A problem that may pass could be gone at the next start.
NO_PROBLEM, BAD_INPUT, RECURS, MAY_PASS = range(4)
LOOK_SECONDS = 1.0  # longest time in seconds between two checks of the watchdog
T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """A host, which is one process of a pod, or the only process of a run without a pod.

    Attributes:
        id: The number of the host among the hosts of the pod, from 0.
        num_hosts: The number of hosts.
    """

    id: int = 0
    num_hosts: int = 1

    @property
    def is_one_of_several(self) -> bool:
        """Whether the run has more than one host."""
        return self.num_hosts > 1


def join(options: HostOptions) -> Host:
    """Connects this host to the other hosts of its pod, through jax.distributed.

    Args:
        options: The flags about hosts. If they do not give the address of host 0, JAX finds the
            hosts of a pod of Cloud TPU, GKE or Slurm.

    Returns:
        This host.

    Raises:
        InputError: If JAX finds no pod or no devices, or if hosts have different numbers of
            devices.
        RunError: If the other hosts do not answer in time.
    """
    coordinator_address = options.coordinator_address
    num_hosts = options.num_hosts
    connect_timeout = options.connect_timeout
    connection_failure_message = (
        f"not all hosts connected to {coordinator_address or 'the coordinator'} within "
        f"{connect_timeout} s (--connect_timeout); check that host 0 is running, that its port can "
        f"be reached from here, and that all {num_hosts or ''} hosts were started with the same "
        "address and number of hosts"
    )
    if coordinator_address is not None and options.host_id:
        _wait_for_port(coordinator_address, connect_timeout, connection_failure_message)
    elif coordinator_address is not None:
        _check_port(coordinator_address)
    # Under Slurm, JAX uses one GPU per task, but a task that is alone on its node should use all
    # GPUs of the node. SLURM_STEP_TASKS_PER_NODE is "1(x16)" if there is one task on each of 16
    # nodes.
    task_counts_text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    is_only_task_on_node = re.fullmatch(r"1(\(x\d+\))?", task_counts_text) is not None
    # This program handles SIGTERM itself; JAX's preemption service would swallow the signal.
    jax.config.update("jax_enable_preemption_service", False)
    connection_timer = threading.Timer(
        connect_timeout, _end_process, [f"error: {connection_failure_message}"]
    )
    connection_timer.daemon = True
    connection_timer.start()
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator_address,
            num_processes=num_hosts,
            process_id=options.host_id,
            # An empty list lets this process use all devices of the node. With None, JAX chooses
            # the devices.
            local_device_ids=[] if is_only_task_on_node else None,
            # If the hosts are not connected after this time, JAX aborts the process. It is longer
            # than the time of `connection_timer`, which ends the process with a message that tells
            # the user what to check.
            initialization_timeout=connect_timeout + 60,
            heartbeat_timeout_seconds=options.heartbeat_timeout,
        )
    except ValueError as error:
        raise InputError(
            "--multihost: found no pod of Cloud TPU, GKE or Slurm; give --coordinator_address, "
            f"--host_id and --num_hosts ({one_line(error)})"
        ) from error
    except RuntimeError as error:
        raise RunError(f"{connection_failure_message} ({one_line(error):.200})") from error
    finally:
        connection_timer.cancel()
    devices_of_all_hosts = usable_devices(all_of_host=True)
    this_host = Host(jax.process_index(), jax.process_count())
    try:
        # `count_hosts` raises an error if hosts have different numbers of devices. It is called
        # before anything is gathered, because JAX cannot gather from such hosts.
        count_hosts(devices_of_all_hosts)
    except InputError:
        # Every host knows the devices of all hosts, so this error is raised on all of them.
        # Therefore all hosts call `leave` together, as they must.
        leave(this_host)
        raise
    return this_host


def _end_process(message: str) -> None:
    """Prints a message and ends the process with status 1 at once, even if other threads hang."""
    say_error(message)
    os._exit(1)


def _check_port(address: str) -> None:
    """Checks that host 0, which is this host, can listen at the coordinator's port.

    If it cannot, JAX aborts the process without a message.

    Args:
        address: The coordinator's address, HOST:PORT.

    Raises:
        RunError: If this process cannot listen at the port.
    """
    coordinator_port = int(address.rsplit(":", 1)[1])
    has_dual_stack = socket.has_dualstack_ipv6()
    address_family = socket.AF_INET6 if has_dual_stack else socket.AF_INET
    try:
        socket.create_server(
            ("", coordinator_port), family=address_family, dualstack_ipv6=has_dual_stack
        ).close()
    except OSError as error:
        raise RunError(
            f"--coordinator_address {address}: host 0 cannot listen at port {coordinator_port}: "
            f"{os.strerror(error.errno or 0)}",
            remedy="end the process that uses it, or give all hosts another port",
        ) from error


def _wait_for_port(address: str, seconds: float, failure_message: str) -> None:
    """Waits until a process listens at a port.

    JAX would also try again until it can connect. But it waits longer after each attempt, so it
    would notice later than this function that a process has begun to listen.

    Args:
        address: The coordinator's address, HOST:PORT.
        seconds: The longest time to wait in seconds.
        failure_message: The message of the error if no process listens.

    Raises:
        RunError: If no process has listened at the port in time.
    """
    coordinator_host_name, coordinator_port = address.rsplit(":", 1)
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(
                (coordinator_host_name.strip("[]"), int(coordinator_port)), min(seconds, 5)
            ).close()
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise RunError(f"{failure_message} ({error})") from error
            time.sleep(0.2)


def gather(host: Host, local_value: Any) -> list[Any]:
    """Gathers a value from each host. All hosts must call this together.

    Args:
        host: This host.
        local_value: The value of this host, which JSON can represent.

    Returns:
        The values of all hosts in the order of their numbers. If there are several hosts, the
        values were sent as JSON, so tuples have become lists.
    """
    if not host.is_one_of_several:
        return [local_value]
    local_json = json.dumps(local_value).encode()
    largest_json_bytes = int(np.max(multihost_utils.process_allgather(np.int32(len(local_json)))))
    # The JSON is padded with spaces, which JSON ignores, because only arrays of equal sizes can be
    # gathered.
    padded_json_of_host = np.frombuffer(local_json.ljust(largest_json_bytes), np.uint8)
    padded_json_of_hosts = multihost_utils.process_allgather(padded_json_of_host)
    return [json.loads(padded_json.tobytes()) for padded_json in np.asarray(padded_json_of_hosts)]


def any_host(host: Host, condition_values: Sequence[bool]) -> list[bool]:
    """Returns for each condition whether it is true on any host. All hosts must call this together.

    Args:
        host: This host.
        condition_values: For each condition, whether it is true on this host. All hosts pass the
            values of the same conditions in the same order.
    """
    condition_values_of_hosts = gather(host, condition_values)
    return [
        any(values_of_condition)
        for values_of_condition in zip(*condition_values_of_hosts, strict=True)
    ]


def leave(host: Host) -> None:
    """Disconnects this host from the others.

    All hosts must call this together, because JAX aborts a host that stays connected when another
    one has left.

    Args:
        host: This host.
    """
    if host.is_one_of_several:
        jax.distributed.shutdown()


def raise_together(
    host: Host, local_error: Exception | None, fields: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Raises an error on all hosts if any host has failed, or if fields differ between hosts.

    All hosts must call this together, and they wait for each other. Before an error is raised, all
    hosts disconnect. The attribute `is_recurring` of a RunError tells whether the same command
    would fail again in the same way. If it is True on any host, it becomes True on all hosts.

    Args:
        host: This host.
        local_error: The error of this host. None if this host has not failed.
        fields: The contents that must be the same on all hosts, by their names in messages. A host
            that has failed may leave the fields out.

    Raises:
        Exception: If this host has failed. The exception is `local_error` itself.
        InputError: If this host has not failed, but another host has found bad input. The message
            names all hosts that have failed.
        InputError: If no host has failed, but a field differs between hosts or is missing on some
            of them. The message names the field, its contents and their hosts.
        RunError: If this host has not failed, but other hosts have failed without bad input. The
            message names those hosts.
    """
    if local_error is None:
        local_problem_kind = NO_PROBLEM
    elif isinstance(local_error, InputError):
        local_problem_kind = BAD_INPUT
    else:
        local_problem_kind = RECURS if getattr(local_error, "is_recurring", False) else MAY_PASS
    shown_content_by_field = {
        field_name: _text_or_digest(field_content) for field_name, field_content in fields.items()
    }
    compared_fields_digest = hashlib.sha256(
        json.dumps(shown_content_by_field, sort_keys=True).encode()
    ).hexdigest()
    problem_kinds_of_hosts, compared_fields_digests_of_hosts = zip(
        *gather(host, (local_problem_kind, compared_fields_digest)), strict=True
    )
    error_to_raise = local_error
    if local_error is None and any(problem_kinds_of_hosts):
        failed_host_numbers = [
            host_number
            for host_number, problem_kind in enumerate(problem_kinds_of_hosts)
            if problem_kind != NO_PROBLEM
        ]
        other_failure_message = (
            f"host {', '.join(map(str, failed_host_numbers))} failed: see the message there"
        )
        if BAD_INPUT in problem_kinds_of_hosts:
            error_to_raise = InputError(other_failure_message)
        else:
            error_to_raise = RunError(
                other_failure_message, remedy="it says what to do on all hosts"
            )
    elif local_error is None and len({*compared_fields_digests_of_hosts}) > 1:
        # Hosts exchange the fields themselves only if the digests differ, because a data set of
        # many files has many fields.
        error_to_raise = InputError(_difference_message(gather(host, shown_content_by_field)))
    if isinstance(error_to_raise, RunError) and {BAD_INPUT, RECURS} & {*problem_kinds_of_hosts}:
        error_to_raise.is_recurring = True
    if error_to_raise is not None:
        leave(host)
        raise error_to_raise


def _difference_message(fields_of_hosts: Sequence[Mapping[str, str]]) -> str:
    """Returns a message about the first field that differs, with its content on each host.

    Args:
        fields_of_hosts: For each host, a dict: name of a field -> content. At least one field
            differs.
    """
    for field_name in chain(*fields_of_hosts):
        host_numbers_by_field_content: dict[str, list[int]] = {}
        for host_number, fields_of_host in enumerate(fields_of_hosts):
            field_content = fields_of_host.get(field_name, "nothing")
            host_numbers_by_field_content.setdefault(field_content, []).append(host_number)
        if len(host_numbers_by_field_content) > 1:
            break
    content_phrases = [
        f"{field_content} on {', '.join(map(str, host_numbers))}"
        for field_content, host_numbers in host_numbers_by_field_content.items()
    ]
    return f"hosts differ in {field_name}: {'; '.join(content_phrases)}; it must be the same on all"


def _text_or_digest(content: object) -> str:
    """Returns a text that shows a value in a message.

    If the text would have more than MOST_SHOWN characters, its digest is returned instead.

    Args:
        content: The value, which hosts compare with each other (see `raise_together`).
    """
    content_as_text = str(content)
    if len(content_as_text) <= MOST_SHOWN:
        return content_as_text
    return f"digest {hashlib.sha256(content_as_text.encode()).hexdigest()[:32]}"


def together(
    host: Host,
    action: Callable[[], T],
    compared: Callable[[T], Mapping[str, object]] = lambda _: {},
) -> T:
    """Calls `action`, and returns its result once it has succeeded on all hosts.

    All hosts must call this together.

    Args:
        host: This host.
        action: A function that may fail on some hosts.
        compared: A function that takes the result and returns the contents that must be the same on
            all hosts, by their names in messages. By default, nothing is compared.

    Raises:
        Exception: If the action failed on any host, or if the compared contents differ between
            hosts (see `raise_together` for the types).
    """
    try:
        action_result = action()
        compared_fields = compared(action_result)
    except Exception as error:  # the other hosts must not wait for this one
        raise_together(host, error)
        raise
    raise_together(host, None, compared_fields)
    return action_result


class Watchdog:
    """Ends the process if it makes no progress for too long, and prints the stack of each thread.

    The watchdog is active inside a `with` block. It can be used for several blocks, one after
    another.

    Args:
        max_silent_seconds: The longest time in seconds between two calls of `reset`.

    Attributes:
        max_silent_seconds: The longest time in seconds between two calls of `reset`.
    """

    def __init__(self, max_silent_seconds: float) -> None:
        self.max_silent_seconds = max_silent_seconds
        self._last_progress_time = time.monotonic()
        self._with_block_ended_event = threading.Event()

    def reset(self) -> None:
        """Records progress, so that the time without progress starts again at 0."""
        self._last_progress_time = time.monotonic()

    def __enter__(self) -> "Watchdog":
        self._last_progress_time = time.monotonic()
        self._with_block_ended_event.clear()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._with_block_ended_event.set()

    def _watch(self) -> None:
        while not self._with_block_ended_event.wait(min(self.max_silent_seconds / 4, LOOK_SECONDS)):
            if time.monotonic() - self._last_progress_time <= self.max_silent_seconds:
                continue
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            problem_phrase = (
                "no batch has become ready and no step has finished for "
                f"{self.max_silent_seconds:g} s"
            )
            remedy_phrase = "to continue, start the run again without --overwrite"
            # `activity_by_thread_id` tells which rows the threads are working on. Applying a chat
            # template to a row may hang.
            if activities_phrase := ", ".join(list(activity_by_thread_id.values())):
                problem_phrase = f"{activities_phrase}: {problem_phrase}"
                remedy_phrase = (
                    "change or leave out the row, or the template, and start anew with --overwrite"
                )
            _end_process(
                f"error: {problem_phrase} (--stall_timeout); the stack of every thread is above; "
                f"committed shards are safe; {remedy_phrase}"
            )


@contextmanager
def explain_abort(host: Host, message: str) -> Iterator[None]:
    """Prints a message to stderr if JAX ends this process inside a `with` block.

    JAX aborts a process when another host is gone, without running `finally` blocks. Therefore, a
    helper process waits at the other end of a pipe and prints the message when the pipe breaks.

    Args:
        host: This host. If it is the only one, there is no helper process.
        message: The message, which tells the user what to do.
    """
    if not host.is_one_of_several:
        yield
        return
    abort_reason_phrase = "because another host is gone (or because it crashed itself; see above)"
    message_printing_script = "import sys; sys.stdin.read() == '.' or sys.stderr.write(sys.argv[1])"
    message_printing_process = subprocess.Popen(
        [
            sys.executable,
            "-S",
            "-c",
            message_printing_script,
            f"error: host {host.id} ended {abort_reason_phrase}; {message}\n",
        ],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C in the terminal must not end the helper process
    )
    try:
        # Ctrl-C raises an exception here instead of ending this process at once. So `finally` is
        # executed and ends the helper process, which then does not print `message`.
        with raise_on_ctrl_c():
            yield
    finally:
        message_printing_process.communicate(".")


class Lockstep:
    """Yields this host's batches, one for each step, so that all hosts take the same steps.

    Hosts run out of data at different times, and any host may fail or be asked to stop. Before step
    n + 2, all hosts must know whether they take this step. Therefore, each host sends its `votes`
    on step n + 2 together with step n. The devices sum the votes over all hosts, and return the
    sums with the results of step n. The caller passes the sums to `learn` before step n + 2, so no
    host waits for the votes of others.

    Iterating yields None if this host has no batch for a step. In this case, its data has ended
    while another host has a batch, or no batch is ready because this host skips samples that are
    stored already. All hosts end at the same step. They end when no host has data, or two steps
    after any host has failed or was asked to stop.

    Args:
        batches: The batches of this host, with None for a batch that is not ready yet.
        get_stop_request: A function that returns a true value once this host has been asked to
            stop.
        any_host: A function that takes conditions, which are true or false on this host, and
            returns for each condition whether it is true on any host. It is called once, by all
            hosts together.
        clock: The clock that measures the wait for batches.

    Attributes:
        reaches_end_of_data: Whether the run comes to the end of its data. It becomes False when
            this host learns that any host has been asked to stop.
        error_to_raise: The error that the run raises once all hosts have stopped. If this host has
            failed, it is the error of this host. If another host has failed, it is set when this
            host learns of that. None if no failure is known.
    """

    def __init__(
        self,
        batches: Iterator[Batch | None],
        get_stop_request: Callable[[], object],
        any_host: Callable[[Sequence[bool]], Sequence[bool]],
        clock: Clock,
    ) -> None:
        self.error_to_raise: Exception | None = None
        self._remaining_batches = batches
        self._get_stop_request: Callable[[], object] = get_stop_request
        self._clock = clock
        self._upcoming_batches: deque[Batch | None] = deque()
        # Whether this host has data, for each of the first STEPS_AHEAD steps.
        this_host_has_data_flags: list[bool] = []
        for _ in range(STEPS_AHEAD):
            self._upcoming_batches.append(self._fetch())
            this_host_has_data_flags.append(self._this_host_has_data_two_steps_ahead)
        condition_values_of_this_host = [
            *this_host_has_data_flags,
            bool(get_stop_request()),
            self.error_to_raise is not None,
        ]
        # `any_host_has_data_flags` contains, for each of the first STEPS_AHEAD steps of the run,
        # whether any host has data.
        *any_host_has_data_flags, is_any_host_stopping, has_any_host_failed = any_host(
            condition_values_of_this_host
        )
        self.reaches_end_of_data = not is_any_host_stopping
        is_run_ending = is_any_host_stopping or (
            has_any_host_failed and not any(any_host_has_data_flags)
        )
        # For each of the next steps, whether the hosts take it. All hosts take a step together if
        # any of them has data for it. A host without data then takes the step without a batch.
        self._should_take_step_queue = deque([] if is_run_ending else any_host_has_data_flags)

    def __iter__(self) -> Iterator[Batch | None]:
        while self._should_take_step_queue and self._should_take_step_queue.popleft():
            batch_of_step = self._upcoming_batches.popleft()
            self._upcoming_batches.append(self._fetch())
            yield batch_of_step

    def _fetch(self) -> Batch | None:
        """Fetches the next batch, for the step two steps (STEPS_AHEAD) after the current one.

        Sets `_this_host_has_data_two_steps_ahead` to False if the data of this host has ended, if
        this host has failed, or if it was asked to stop. Otherwise sets it to True, even if no
        batch is ready for that step.

        Returns:
            The batch. None if the data of this host has ended, if this host has failed or was asked
            to stop, or if no batch is ready for that step.
        """
        self._this_host_has_data_two_steps_ahead = False
        if self.error_to_raise is None and not self._get_stop_request():
            try:
                with self._clock.measure("data"):
                    fetched_batch = next(self._remaining_batches)
                self._this_host_has_data_two_steps_ahead = True
                return fetched_batch
            except StopIteration:
                return None
            except Exception as error:  # the error is raised once all hosts have stopped
                self.fail(error)
        return None

    @property
    def votes(self) -> tuple[bool, bool, bool]:
        """The votes by which the hosts decide together whether to take another step (see `learn`).

        This host sends the votes to the devices together with the batch that iterating over this
        object has yielded last. In the step that computes this batch, the devices sum the votes of
        all hosts. The sums decide whether the hosts take the step that comes STEPS_AHEAD steps
        later. A tuple of:
            Whether this host has data.
            Whether it was asked to stop.
            Whether it failed.
        """
        return (
            self._this_host_has_data_two_steps_ahead,
            bool(self._get_stop_request()),
            self.error_to_raise is not None,
        )

    def learn(self, votes: Iterable[float]) -> None:
        """Decides by the votes of all hosts whether to take the step that the votes were about.

        Hosts vote on a step two steps before it. The step is taken if any host has data, and
        no host has failed or was asked to stop. Otherwise, the iteration over this object ends
        before the step. If another host has failed, `error_to_raise` is set, unless this host has
        failed as well.

        Args:
            votes: The sums of the votes over all hosts: the number of hosts that have data, the
                number of hosts that were asked to stop, and the number of hosts that failed.
        """
        does_any_host_have_data, is_any_host_stopping, has_any_host_failed = (
            bool(number_of_votes) for number_of_votes in votes
        )
        if has_any_host_failed and self.error_to_raise is None:
            failure_remedy = "its message says what to do on all hosts"
            self.error_to_raise = RunError("another host failed", remedy=failure_remedy)
        self.reaches_end_of_data = self.reaches_end_of_data and not is_any_host_stopping
        self._should_take_step_queue.append(
            does_any_host_have_data and not is_any_host_stopping and not has_any_host_failed
        )

    def fail(self, error: Exception) -> None:
        """Records a failure of this host, which the run raises once all hosts have stopped.

        Later failures of this host are ignored.

        Args:
            error: The failure. If it is a bug of this program, its traceback is logged.
        """
        if self.error_to_raise is None:
            self.error_to_raise = for_the_user(error)


def one_step_behind(items: Iterable[T]) -> Iterator[T]:
    """Yields each item after the next item has been made; yields the last item at the end.

    If making an item starts a step, the devices compute a step while the caller uses the results of
    the previous one.

    Args:
        items: The items, which are made when they are iterated over.
    """
    # `pairwise` makes the successor of an item before it yields the item, and the successor is not
    # used otherwise. The appended None is the successor of the last item.
    for item, _ in pairwise(chain(items, [None])):
        yield item  # type: ignore[misc]  # `item` is never None
