"""What the hosts of a run tell each other about the steps to come, so that all take the same ones.

Hosts run out of data at different times, and any of them may fail or be asked to stop. With step n
goes what a host knows about step n + 2: whether it has a batch for it, and whether it wants to end.
The answer comes back with the results of step n, in time for step n + 2, and nobody waits for it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from activation_extraction.cli.console import Clock
from activation_extraction.cli.errors import for_the_user
from activation_extraction.run.hosts import elsewhere
from activation_extraction.text.batch import Batch

T = TypeVar("T")
AHEAD = 2  # steps


class Votes(NamedTuple):
    """What one host says along with a step; summed up over the hosts, how many say so."""

    with_data: bool
    stopping: bool
    failed: bool


class Agreement:
    """The batches of this host, one for each step that all hosts take together.

    Iterating gives None where this host has no batch left but another one does. With every step the
    host sends its `votes`; once the step is done, `learn` takes in everybody's. All hosts end at
    the same step: when none has data, or two steps after any host failed or was asked to stop.

    stopped: whether this host has been asked to stop. any_host: for each of several flags, whether
    any host has set it; called once, by all hosts together. complete: whether the data came to its
    end. failure: what failed on this host or, as far as it knows by then, on another one.
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
            except Exception as error:  # raised in the end, when all hosts have stopped
                self.fail(error)
        return None

    @property
    def votes(self) -> Votes:
        """What goes with the step of the batch that came last."""
        return Votes(
            with_data=self._upcoming[-1] is not None,
            stopping=bool(self._stopped()),
            failed=self.failure is not None,
        )

    def learn(self, votes: Iterable[float]) -> None:
        """Takes in how many hosts voted for what with a step: decides on the step two later."""
        with_data, stopping, failed = (bool(count) for count in votes)
        if failed and self.failure is None:
            self.failure = elsewhere()
        self.complete = self.complete and not stopping
        self._wanted.append(with_data and not stopping and not failed)

    def fail(self, error: Exception) -> None:
        """Reports a failure on this host; the first one counts. A defect's traceback is logged."""
        if self.failure is None:
            self.failure = for_the_user(error)


def one_behind(items: Iterable[T]) -> Iterator[T]:
    """The items, each of them only when the next one has been made, or at the end.

    Of steps that compute in the background, one is then always in flight.
    """
    before: list[T] = []
    for item in items:
        yield from before
        before = [item]
    yield from before
