"""What hosts tell each other a step ahead: every host takes the same steps, whatever happens."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest

from activation_extraction.cli.console import Clock
from activation_extraction.common.errors import RunError
from activation_extraction.run.hosts import Lockstep, one_step_behind


def play(counts, fault="", at=0, late=0):
    """Runs hosts that have so many batches, each in its thread; what goes wrong on the first one,
    and at which number of batch or step. late: for how many steps batch `at` of the first one is
    not ready. Returns what each is fed and stores, and its Lockstep."""
    brought, total = [], []

    def add_up():
        total[:] = np.sum(brought, axis=0)
        brought.clear()

    all_have_come = threading.Barrier(len(counts), add_up, timeout=60)  # not if one stops early

    def exchange(flags):
        brought.append(flags)
        all_have_come.wait()
        return [bool(votes) for votes in total]

    def run(host):
        fed, stored = [], []
        own = fault if host == 0 else ""

        def source():
            for number in range(counts[host]):
                if own == "unreadable" and number == at:
                    raise RunError(f"batch {number} cannot be read")
                if host == 0 and number == at:
                    yield from [None] * late
                yield number

        def started():
            for batch in steps:
                fed.append(batch)
                yield batch, exchange(steps.votes)

        steps = Lockstep(source(), lambda: own == "signal" and len(fed) >= at, exchange, Clock())
        storing = True
        for batch, votes in one_step_behind(started()):
            if own == "unstorable" and batch == at:
                steps.fail(RunError(f"batch {batch} cannot be stored"))
                storing = False
            elif batch is not None and storing:
                stored.append(batch)
            steps.learn(votes)
        return fed, stored, steps

    with ThreadPoolExecutor(len(counts)) as threads:
        return list(threads.map(run, range(len(counts))))


@pytest.mark.parametrize("counts", [*product(range(5), repeat=2), (0, 3, 7), (6,)])
def test_all_hosts_take_as_many_steps_as_the_longest_needs(counts):
    for count, (fed, stored, steps) in zip(counts, play(counts), strict=True):
        assert fed == [*range(count), *[None] * (max(counts) - count)]
        assert stored == list(range(count))
        assert steps.reaches_end_of_data and steps.error_to_raise is None


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("late", [1, 2, 5])
def test_no_host_waits_for_one_whose_batch_is_not_ready(at, late):
    """Others go on, which tells their watchdogs that nobody hangs, and nothing ends before it."""
    (slow_fed, slow_stored, _), (fed, stored, _) = play((3, 4), at=at, late=late)
    assert slow_fed[: 3 + late] == [*range(at), *[None] * late, *range(at, 3)]
    assert slow_stored == [*range(3)] and stored == [*range(4)]
    assert len(fed) == len(slow_fed)


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("fault", ["unreadable", "unstorable"])
def test_a_failure_on_one_host_ends_all_at_the_same_step(fault, at):
    (bad_fed, bad_stored, bad), (fed, stored, good) = play((8, 8), fault, at)
    assert len(bad_fed) == len(fed)
    assert bad_stored == list(range(at))  # nothing after a gap, everything before it
    assert stored == list(range(len(fed)))
    assert "cannot be" in str(bad.error_to_raise)
    if len(fed) < 8:
        assert "another host failed" in str(good.error_to_raise)
    else:  # the failure came too late to stop anyone
        assert at >= 4


@pytest.mark.parametrize("at", range(6))
def test_a_signal_on_one_host_stops_all_at_the_same_step(at):
    hosts = play((20, 20), "signal", at)
    assert len({len(fed) for fed, _, _ in hosts}) == 1 and len(hosts[0][0]) <= at + 3
    for fed, stored, steps in hosts:
        assert not steps.reaches_end_of_data and steps.error_to_raise is None
        assert stored == [batch for batch in fed if batch is not None]
