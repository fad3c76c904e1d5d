"""Prepares items in a background thread while the caller works on earlier items.

A run prepares batches in this way while its devices compute. The module accepts items of any type.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from activation_extraction.common.errors import RunError, one_line

T = TypeVar("T")
R = TypeVar("R")  # type of the generator's return value
POLL = 0.2  # largest number of seconds between two checks whether the caller is asked to stop
# Seconds after which a host that skips stored samples takes a step without a batch. All hosts of a
# pod take every step together, so otherwise they would all wait until this host has a batch again.
PATIENCE = 10.0


@dataclass(frozen=True)
class _End(Generic[R]):
    """A marker behind the last item of a `Prefetch`, which tells how its generator ended.

    Attributes:
        generator_result: The value that the generator has returned. None if it has raised an
            exception.
        error: The exception that the generator has raised. None if it has returned.
    """

    generator_result: R | None = None
    error: BaseException | None = None


class Prefetch(Generic[T, R]):
    """Yields the items of a generator, which a background thread runs in advance.

    If the generator raises an exception, iterating yields the items before it and then raises it.
    An exception of a class that does not derive from Exception, such as SystemExit, is raised as a
    RunError.

    Attributes:
        generator_result: The value that the generator has returned. None until the caller has
            iterated to the end, even if the background thread has reached the end already.
    """

    def __init__(
        self,
        items: Generator[T, None, R],
        depth: int,
        skipping: threading.Event | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """Starts a background thread that takes items from a generator before they are needed.

        Args:
            items: The generator that makes the items.
            depth: The largest number of prepared items that wait until the caller takes them. When
                so many wait, the thread waits, too.
            skipping: An event that the generator sets for each stored sample that it skips. While
                it skips samples, None is yielded every `patience` seconds instead of an item, so
                that the other hosts of a pod need not wait for this host. If `skipping` is None,
                the iteration waits for an item without a limit of time.
            patience: Time in seconds without an item after which None is yielded while samples are
                skipped.
        """
        self.generator_result: R | None = None
        # An event that the generator sets for each stored sample that it skips.
        self._skip_event = skipping
        self._patience_seconds = patience
        self._peeked_item: T | None = None
        self._ready_items: queue.Queue[T | _End[R]] = queue.Queue(depth)
        threading.Thread(target=self._run, args=(items,), name="prefetch", daemon=True).start()

    def _run(self, items: Generator[T, None, R]) -> None:
        end_marker: _End[R]
        try:
            while True:
                self._ready_items.put(next(items))
        except StopIteration as stop:
            end_marker = _End(generator_result=stop.value)
        except BaseException as error:  # without an end marker, the caller would wait forever
            end_marker = _End(error=error)
        self._ready_items.put(end_marker)

    @property
    def ready(self) -> int:
        """The number of prepared items that have not been taken yet."""
        return self._ready_items.qsize()

    def peek(self) -> T | None:
        """Returns the next item without taking it out of the iteration.

        Returns:
            The item. None if there are no more items. Also None if no item was ready for `patience`
            seconds because the generator is skipping stored samples; a later call may then return
            an item.
        """
        if self._peeked_item is None:
            self._peeked_item = next(iter(self), None)
        return self._peeked_item

    def __iter__(self) -> Iterator[T | None]:
        return self.until(lambda: False)

    def until(self, get_stop_request: Callable[[], object]) -> Iterator[T | None]:
        """Yields items until the generator ends, or until a stop is requested.

        Args:
            get_stop_request: A function that returns a true value if the iteration is to end before
                the generator ends. It is called several times a second.

        Yields:
            The next item, or None if it is not ready because the generator is skipping stored
            samples.
        """
        wait_start_time = time.monotonic()
        while not get_stop_request():
            if (peeked_item := self._peeked_item) is not None:
                self._peeked_item = None
                yield peeked_item
                wait_start_time = time.monotonic()
                continue
            try:
                item_or_end = self._ready_items.get(timeout=POLL)
            except queue.Empty:
                seconds_waited = time.monotonic() - wait_start_time
                skip_event = self._skip_event
                is_item_late = seconds_waited >= self._patience_seconds
                if skip_event is not None and skip_event.is_set() and is_item_late:
                    skip_event.clear()
                    yield None
                    wait_start_time = time.monotonic()
                continue
            if isinstance(item_or_end, _End):
                generator_error = item_or_end.error
                # The end marker stays in the queue, so that a later iteration ends, too.
                self._ready_items.put(replace(item_or_end, error=None))
                if isinstance(generator_error, Exception):
                    raise generator_error
                if generator_error is not None:
                    raise RunError(
                        f"preparing batches failed: {one_line(generator_error)}"
                    ) from generator_error
                self.generator_result = item_or_end.generator_result
                return
            yield item_or_end
            wait_start_time = time.monotonic()
