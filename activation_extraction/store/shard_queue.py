"""ShardQueue: the shards on their way from memory to the log.

Several shards are packed and written at the same time, but one thread commits them, in the order in
which they were submitted. After a failure no later shard is committed. The caller waits while too
many bytes of activations are in memory.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from activation_extraction.common.errors import StorageError, for_the_user, one_line, reworded
from activation_extraction.store.log_writer import LostError

SHARDS_AT_ONCE = 16  # most of them are being uploaded
# What a shard does or waits for: threads pack it, its files are written, and all shards before it
# are committed.
PHASES = ("packing", "writing", "committing")
T = TypeVar("T")


@dataclass(eq=False)
class QueuedShard(Generic[T]):
    """A shard in the queue.

    Attributes:
        bytes_held: Bytes of memory that are free once the shard is committed.
        phase: Current phase of the shard, one of PHASES.
        stored: Future result of storing the shard's files, which the commit needs.
    """

    bytes_held: int
    phase: str = PHASES[0]
    stored: Future[T] = field(default_factory=Future)


class ShardQueue(Generic[T]):
    """Stores shards in the background, and commits them in order.

    Methods raise StorageError, or LostError if another process has taken over, as soon as a shard
    could not be stored.

    Args:
        commit: Function that commits a shard, given the result of storing its files. It is called
            in one thread, in the order in which the shards were submitted.
        most_bytes: Most bytes of activations in memory before `take` waits.
        on_wait: Function that is called again and again while `take` waits.

    Attributes:
        bytes_waiting: Number of bytes in memory that wait to be stored.
        waited: Seconds for which `take` waited, by the phase that the oldest shard was in.
    """

    def __init__(
        self, commit: Callable[[T], None], most_bytes: float, on_wait: Callable[[], None]
    ) -> None:
        self.bytes_waiting = 0
        self.waited = dict.fromkeys(PHASES, 0.0)
        self._commit = commit
        self._most_bytes = most_bytes
        self._on_wait = on_wait
        self._failure: Exception | None = None  # the failure of the first shard that has failed
        self._stopped = False
        self._storing = ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="shard")
        self._committing = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._taken: list[int] = []  # bytes of each batch that no shard is charged with yet
        self._shards: deque[QueuedShard[T]] = deque()
        self._changed = threading.Condition()  # a shard was committed, or has failed

    def take(self, size: int) -> None:
        """Counts a batch as waiting to be stored, and waits while too many bytes are waiting.

        Args:
            size: Bytes of memory that the batch needs until it is stored.
        """
        with self._changed:
            self._taken.append(size)
            self.bytes_waiting += size
            while self.bytes_waiting > self._most_bytes and self._shards:
                self.check()
                self._on_wait()
                began, phase = time.perf_counter(), self._shards[0].phase
                self._changed.wait(0.2)  # briefly, to notice Ctrl-C
                self.waited[phase] += time.perf_counter() - began
        self.check()

    def submit(self, store: Callable[[QueuedShard[T]], T]) -> None:
        """Stores a shard in the background, then commits it.

        The shard is charged with the memory of all batches before the last, which may have samples
        for later shards.

        Args:
            store: Function that stores the files of the shard, and sets the phase of the queued
                shard that it gets.
        """
        self.check()
        shard = QueuedShard[T](sum(self._taken[:-1]))
        del self._taken[:-1]
        shard.stored = self._storing.submit(store, shard)
        with self._changed:
            self._committing.submit(self._finish, shard)  # `_finish` will wait for this lock
            self._shards.append(shard)

    def check(self) -> None:
        """Raises the error of a shard that has failed. Shards before it may still be stored."""
        if self._failure is not None:
            raise self._failure
        for shard in list(self._shards):
            if shard.stored.done() and (error := shard.stored.exception()) is not None:
                raise self._error_of(error)

    def wait(self) -> None:
        """Waits until all shards are committed.

        If a shard has failed, waits for the shards before it and raises its error.
        """
        with self._changed:
            while self._shards and self._failure is None:
                self._changed.wait(0.2)  # briefly, to notice Ctrl-C
        self.check()

    def gauges(self) -> dict[str, Any]:
        """Returns metrics about the shards that are not committed yet, by name.

        They are the bytes in memory, the number of shards in each phase, and for each phase the
        seconds that `take` waited.
        """
        phases = [shard.phase for shard in list(self._shards)]
        seconds = {phase: round(seconds, 3) for phase, seconds in self.waited.items()}
        return {
            "bytes_waiting": self.bytes_waiting,
            **{f"shards_{phase}": phases.count(phase) for phase in PHASES},
            **{f"waited_{phase}_seconds_since_start": seconds[phase] for phase in PHASES},
        }

    def close(self, patient: bool) -> None:
        """Ends the threads.

        Args:
            patient: Whether they finish their work first.
        """
        self._stopped = self._stopped or not patient
        for pool in (self._storing, self._committing):
            pool.shutdown(wait=patient, cancel_futures=True)

    def _finish(self, shard: QueuedShard[T]) -> None:
        """Commits a shard once it is stored; keeps the first failure, and commits none after it."""
        try:
            if self._failure is None:
                self._commit(shard.stored.result())
        except BaseException as error:  # whatever it is, no later shard may be committed
            self._failure = self._error_of(error)
        finally:
            with self._changed:
                self.bytes_waiting -= shard.bytes_held
                self._shards.remove(shard)
                self._changed.notify_all()

    def _error_of(self, error: BaseException) -> Exception:
        """Returns the error that the caller gets for an exception in one of the threads."""
        if self._stopped:  # `close` did not wait for this shard
            return StorageError("storing was stopped")
        user_error = for_the_user(error)
        if isinstance(user_error, LostError):
            return user_error
        return reworded(user_error, one_line(user_error), StorageError)
