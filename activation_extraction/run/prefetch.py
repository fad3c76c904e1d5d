"""Prepares items in a background thread while the caller works on earlier items."""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from activation_extraction.common.errors import RunError, one_line

T = TypeVar("T")
R = TypeVar("R")  # type of the generator's return value
POLL = 0.2  # seconds between checks whether to stop
PATIENCE = 10.0  # seconds after which a host that skips samples takes a step without a batch


@dataclass(frozen=True)
class _End(Generic[R]):
    """The end of the items that a thread prepares.

    Attributes:
        result: The value that the generator has returned. None if it has raised an exception.
        error: The exception that the generator has raised. None if it has returned.
    """

    result: R | None = None
    error: BaseException | None = None


class Prefetch(Generic[T, R]):
    """Yields the items of a generator, some of which a background thread prepares in advance.

    An exception in the generator is raised in place of the item that it prevented: an Exception as
    it is, any other BaseException as a RunError.

    Attributes:
        result: The value that the generator has returned. None until iterating here has ended,
            even if the background thread has reached the end already.
    """

    def __init__(
        self,
        items: Generator[T, None, R],
        depth: int,
        skipping: threading.Event | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """Starts the thread.

        Args:
            items: The generator.
            depth: The largest number of items that are prepared.
            skipping: An event that the generator sets again and again while it leaves out samples
                that are stored already. During that time, None is yielded every `patience`
                seconds, so that the other hosts of a pod, which wait for this one, can go on. None
                to wait for an item however long it takes.
            patience: The seconds after which None is yielded.
        """
        self.result: R | None = None
        self._skipping = skipping
        self._patience = patience
        self._head: T | None = None
        self._ready: queue.Queue[T | _End[R]] = queue.Queue(depth)
        threading.Thread(target=self._run, args=(items,), name="prefetch", daemon=True).start()

    def _run(self, items: Generator[T, None, R]) -> None:
        end: _End[R]
        try:
            while True:
                self._ready.put(next(items))
        except StopIteration as stop:
            end = _End(result=stop.value)
        except BaseException as error:  # otherwise the consumer would wait forever
            end = _End(error=error)
        self._ready.put(end)

    @property
    def ready(self) -> int:
        """The number of prepared items that have not been taken yet."""
        return self._ready.qsize()

    def peek(self) -> T | None:
        """Returns the next item without consuming it.

        Returns:
            None if there are no more items, or if the item is not ready because samples are
            skipped.
        """
        if self._head is None:
            self._head = next(iter(self), None)
        return self._head

    def __iter__(self) -> Iterator[T | None]:
        return self.until(lambda: False)

    def until(self, stopped: Callable[[], object]) -> Iterator[T | None]:
        """Yields items until the end, or until the caller is asked to stop.

        Args:
            stopped: A function that returns a true value when no more items are wanted. It is
                called several times a second.

        Yields:
            The items; None for an item that is not ready because samples are skipped.
        """
        waiting_since = time.monotonic()
        while not stopped():
            if (head := self._head) is not None:
                self._head = None
                yield head
                waiting_since = time.monotonic()
                continue
            try:
                item = self._ready.get(timeout=POLL)
            except queue.Empty:
                waited = time.monotonic() - waiting_since
                skipping = self._skipping
                if skipping is not None and skipping.is_set() and waited >= self._patience:
                    skipping.clear()
                    yield None
                    waiting_since = time.monotonic()
                continue
            if isinstance(item, _End):
                error = item.error
                self._ready.put(replace(item, error=None))  # the next iteration ends as well
                if isinstance(error, Exception):
                    raise error
                if error is not None:
                    raise RunError(f"preparing batches failed: {one_line(error)}") from error
                self.result = item.result
                return
            yield item
            waiting_since = time.monotonic()
