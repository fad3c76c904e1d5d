"""What hosts tell each other a step ahead: every host takes the same steps, whatever happens."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

import extract_activations as script
from activation_extraction.cli.console import Clock
from activation_extraction.common.errors import RunError
from activation_extraction.run.hosts import Host, Lockstep, one_step_behind


class Exchange:
    """Sums what several threads bring, each time when all have come."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, self._add_up, timeout=600)
        self._brought: list[Sequence[bool]] = []

    def _add_up(self) -> None:
        self._total = np.sum(self._brought, axis=0)
        self._brought.clear()

    def __call__(self, flags: Sequence[bool]) -> list[bool]:
        self._brought.append(flags)
        self._barrier.wait()
        return [bool(votes) for votes in self._total]


@dataclass
class Play:
    """One host: `batches` of them, then what goes wrong at which number (of batch, or of step)."""

    batches: int
    unreadable: int | None = None
    unstorable: int | None = None
    signal_at: int | None = None
    fed: list[int | None] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    lockstep: Lockstep | None = None

    def source(self):
        for number in range(self.batches):
            if number == self.unreadable:
                raise RunError(f"batch {number} cannot be read")
            yield number

    def run(self, exchange: Exchange) -> None:
        steps = Lockstep(
            self.source(),  # type: ignore[arg-type]
            lambda: self.signal_at is not None and len(self.fed) >= self.signal_at,
            exchange,
            Clock(),
        )
        self.lockstep = steps

        def started():
            for batch in steps:
                self.fed.append(batch)
                yield batch, exchange(steps.votes)

        storing = True
        for batch, votes in one_step_behind(started()):
            if batch is not None and storing:
                if batch == self.unstorable:
                    steps.fail(RunError(f"batch {batch} cannot be stored"))
                    storing = False
                else:
                    self.stored.append(batch)
            steps.learn(votes)


def play(*hosts: Play) -> None:
    """Runs the hosts, each in its thread; they would wait forever for one that stops early."""
    exchange = Exchange(len(hosts))
    threads = [threading.Thread(target=host.run, args=(exchange,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()


@pytest.mark.parametrize("counts", list(product(range(5), repeat=2)) + [(0, 3, 7), (6,)])
def test_all_hosts_take_as_many_steps_as_the_longest_needs(counts):
    hosts = [Play(count) for count in counts]
    play(*hosts)
    for host, count in zip(hosts, counts, strict=True):
        assert len(host.fed) == max(counts)
        assert host.fed == [*range(count), *[None] * (max(counts) - count)]
        assert host.stored == list(range(count))
        assert host.lockstep.complete and host.lockstep.failure is None


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("what", ["unreadable", "unstorable"])
def test_a_failure_on_one_host_ends_all_at_the_same_step(what, at):
    bad, good = Play(8, **{what: at}), Play(8)
    play(bad, good)
    assert len(bad.fed) == len(good.fed)
    assert bad.stored == list(range(at))  # nothing after a gap, everything before it
    assert good.stored == list(range(len(good.fed)))
    assert "cannot be" in str(bad.lockstep.failure)
    if len(good.fed) < 8:
        assert "another host failed" in str(good.lockstep.failure)
    else:  # the failure came too late to stop anyone
        assert at >= 4


@pytest.mark.parametrize("at", range(6))
def test_a_signal_on_one_host_stops_all_at_the_same_step(at):
    asked, other = Play(20, signal_at=at), Play(20)
    play(asked, other)
    assert len(asked.fed) == len(other.fed) <= at + 3
    for host in (asked, other):
        assert not host.lockstep.complete and host.lockstep.failure is None
        assert host.stored == [batch for batch in host.fed if batch is not None]


@pytest.mark.parametrize("host,expected", [(0, "| opens | |"), (1, "| | opens |")])
def test_the_first_host_takes_over_the_output_before_the_others(host, expected, monkeypatch):
    """So if two pods begin together, one of them gets all folders. At a bar, all hosts meet."""
    events = []
    monkeypatch.setattr(script, "compile_step", lambda _: None)
    monkeypatch.setattr(script, "raise_together", lambda *_: events.append("|"))
    monkeypatch.setattr(script, "open_output", lambda job, *_: events.append("opens") or job)
    script.start_together(SimpleNamespace(host=Host(host, 2), forward=None), False, None)
    assert " ".join(events) == expected


def test_a_defect_is_reported_with_its_traceback(caplog):
    steps = Lockstep(iter([]), lambda: False, list, Clock())
    with caplog.at_level("ERROR", "extract_activations"):
        steps.fail(ValueError("a defect"))
    assert "unexpected ValueError" in str(steps.failure) and caplog.records[0].exc_info
    steps.fail(RunError("a later one"))
    assert "ValueError" in str(steps.failure)  # the first one counts
