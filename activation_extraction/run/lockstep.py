"""Lockstep: all hosts of a run take the same steps and end at the same one.

Hosts run out of data at different times, and any of them may fail or be asked to stop. Along with
step n, each host sends what it knows about step n + 2: whether it has a batch for it, and whether
it wants to stop. The sum over all hosts comes back with the results of step n, in time for step
n + 2, so no host waits for it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from activation_extraction.cli.console import Clock
from activation_extraction.common.errors import for_the_user
from activation_extraction.run.hosts import elsewhere
from activation_extraction.text.batch import Batch

T = TypeVar("T")
AHEAD = 2  # steps


class Votes(NamedTuple):
    """What one host sends along with a step. The sums over all hosts say how many agree."""

    with_data: bool
    stopping: bool
    failed: bool


class Lockstep:
    """The batches of this host, one for each step that all hosts take together.

    Iterating yields None when this host has no batch left but another host has one. With every step
    the host sends its `votes`; once the step is done, `learn` takes in the sums of all votes. All
    hosts end at the same step: when none has data, or two steps after any host failed or was asked
    to stop.

    stopped: whether this host has been asked to stop. any_host: for each of several flags, whether
    any host has set it; called once, by all hosts together. complete: whether the run came to the
    end of its data. failure: what failed on this host or, once this host has learned of it, on
    another one.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        stopped: Callable[[], object],
        any_host: Callable[[Sequence[bool]], Sequence[bool]],
        clock: Clock,
    ) -> None:
        self.failure: Exception | None = None
        self._batches, self._stopped, self._clock = batches, stopped, clock
        self._upcoming = deque(self._fetch() for _ in range(AHEAD))
        present = [batch is not None for batch in self._upcoming]
        asked = [*present, bool(stopped()), self.failure is not None]
        *some_data, stopping, failed = any_host(asked)
        self.complete = not stopping
        ending = stopping or (failed and not any(some_data))
        self._wanted = deque([] if ending else some_data)

    def __iter__(self) -> Iterator[Batch | None]:
        while self._wanted and self._wanted.popleft():
            batch = self._upcoming.popleft()
            self._upcoming.append(self._fetch())
            yield batch

    def _fetch(self) -> Batch | None:
        if self.failure is None and not self._stopped():
            try:
                with self._clock.measure("data"):
                    return next(self._batches, None)
            except Exception as error:  # raised at the end, once all hosts have stopped
                self.fail(error)
        return None

    @property
    def votes(self) -> Votes:
        """What to send with the step of the batch that was yielded last."""
        return Votes(
            with_data=self._upcoming[-1] is not None,
            stopping=bool(self._stopped()),
            failed=self.failure is not None,
        )

    def learn(self, votes: Iterable[float]) -> None:
        """Takes in how many hosts cast each vote with a step; decides on the step two later."""
        with_data, stopping, failed = (bool(count) for count in votes)
        if failed and self.failure is None:
            self.failure = elsewhere()
        self.complete = self.complete and not stopping
        self._wanted.append(with_data and not stopping and not failed)

    def fail(self, error: Exception) -> None:
        """Records a failure on this host; only the first counts. Logs the traceback of a bug."""
        if self.failure is None:
            self.failure = for_the_user(error)


def one_behind(items: Iterable[T]) -> Iterator[T]:
    """Yields each item only once the next one has been made, and the last one at the end.

    So of steps that compute in the background, one is always in flight.
    """
    before: list[T] = []
    for item in items:
        yield from before
        before = [item]
    yield from before
