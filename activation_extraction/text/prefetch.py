"""Prefetch: a background thread that prepares the next items of an iterator."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from activation_extraction.common.errors import RunError, one_line

T = TypeVar("T")
POLL = 0.2  # seconds between checks whether to stop


class Prefetch(Generic[T]):
    """Yields the items of an iterator, while a background thread prepares up to `depth` of them.

    An exception in the iterator is raised here when its turn comes, whatever kind it is.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._head: T | None = None
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        threading.Thread(target=self._run, args=(items,), name="prefetch", daemon=True).start()

    def _run(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                self._ready.put((item, None))
        except BaseException as error:  # a thread that ends without a word is waited for
            self._ready.put((None, error))
        self._ready.put((None, None))

    @property
    def ready(self) -> int:
        """How many items are ready."""
        return self._ready.qsize()

    def peek(self) -> T | None:
        """The next item, without consuming it; None at the end."""
        if self._head is None:
            self._head = next(iter(self), None)
        return self._head

    def __iter__(self) -> Iterator[T]:
        return self.until(lambda: False)

    def until(self, stopped: Callable[[], object]) -> Iterator[T]:
        """The items, until `stopped` returns true; it is called several times a second."""
        while not stopped():
            if self._head is not None:
                item, self._head = self._head, None
                yield item
                continue
            try:
                found, error = self._ready.get(timeout=POLL)
            except queue.Empty:
                continue
            if error is not None and not isinstance(error, Exception):
                raise RunError(f"preparing batches failed: {one_line(error)}") from error
            if error is not None:
                raise error
            if found is None:
                self._ready.put((None, None))  # the next iteration ends as well
                return
            yield found
