"""Work that is shared between threads."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

THREADS = 2

Call = Callable[[], None]


class SharedWork:
    """Calls that are made by the thread that adds them, and by others that help it."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._calls: deque[Call] = deque()
        self._helpers = ThreadPoolExecutor(max(threads - 1, 1), "helper")
        self._helping: deque[Future[None]] = deque()

    def begin(self, calls: Sequence[Call]) -> None:
        """Makes calls. When this returns, one per helper may be left."""
        self._calls.extend(calls)
        for _ in range(self.threads - 1):
            self._helping.append(self._helpers.submit(self._work, 0))
        self._work(0 if self.threads == 1 else len(calls))

    def finish(self) -> None:
        """Returns when all calls are made. Raises what one of them raised."""
        self._work(0)
        while self._helping:
            self._helping.popleft().result()

    def close(self) -> None:
        self._helpers.shutdown(wait=False, cancel_futures=True)

    def _work(self, left: int) -> None:
        """Makes calls until no more than so many are left."""
        while len(self._calls) > left:
            try:
                call = self._calls.popleft()
            except IndexError:  # another thread has taken the last one
                return
            call()
