"""ShardQueue: stores shards with threads in the background, and commits them in order.

The files of several shards are made and written at the same time, but one thread commits the
shards, in the order in which they were submitted. After a failure, no later shard is committed. The
queue also limits the memory: its caller waits while too many bytes of activations wait to be
stored. shard_writer.py provides the functions that make and write the files of a shard, and commit
the shard.
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

# Number of shards that are stored at the same time. It may exceed the number of processors, because
# most of these shards are being uploaded.
SHARDS_AT_ONCE = 16
# Phases of a shard in the queue. "packing": threads make the content of its files, or have not
# begun to do so. "writing": its files are being written. "committing": it waits for the commits of
# all shards before it, or is being committed.
PHASES = ("packing", "writing", "committing")
T = TypeVar("T")


@dataclass(eq=False)
class QueuedShard(Generic[T]):
    """A shard in the queue.

    Attributes:
        bytes_held: Number of bytes of memory that become free when the shard is committed.
        phase: Current phase of the shard, one of PHASES.
        files_future: Future that is done when the shard's files are stored. Its result is passed to
            the function that commits the shard.
    """

    bytes_held: int
    phase: str = PHASES[0]
    files_future: Future[T] = field(default_factory=Future)


class ShardQueue(Generic[T]):
    """Stores shards in background threads, and commits them in the order of their submission.

    Before the samples of a batch are stored, the caller passes the number of bytes of the batch to
    `take`, which adds it to the memory in use, and waits while too much memory is in use. For each
    shard, the caller passes a function that stores the files of the shard to `submit`.

    If storing or committing a shard fails, `take`, `submit`, `check` and `wait` raise StorageError
    from then on. If the reason for the failure is that another process has become the owner of the
    folder, they raise LostError instead.

    Args:
        commit: Function that takes the result of storing a shard's files, and commits the shard. It
            is called in one thread, in the order in which the shards were submitted.
        max_bytes: Number of bytes of memory above which `take` waits for shards to be committed, as
            long as the queue contains a shard.
        on_wait: Function without arguments that is called repeatedly while `take` waits.

    Attributes:
        bytes_waiting: Number of bytes of memory in use: the bytes of all batches that were passed
            to `take`, without the bytes that became free when shards were committed.
        waited_seconds_by_phase: Phase of a shard -> seconds for which `take` waited while the
            oldest uncommitted shard was in this phase. The phases are "packing" (the content of its
            files is being made, or this has not begun), "writing" (its files are being written) and
            "committing" (it waits for the commits of earlier shards, or is being committed).
    """

    def __init__(
        self, commit: Callable[[T], None], max_bytes: float, on_wait: Callable[[], None]
    ) -> None:
        self.bytes_waiting = 0
        self.waited_seconds_by_phase = dict.fromkeys(PHASES, 0.0)
        self._commit_shard = commit
        self._max_waiting_bytes = max_bytes
        self._on_wait = on_wait
        # Error that the methods raise because a shard could not be stored or committed. None if no
        # shard has failed.
        self._failure: Exception | None = None
        # Whether `close` was called, and did not wait for the threads.
        self._has_cancelled_work = False
        self._storing_executor = ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="shard")
        self._commit_executor = ThreadPoolExecutor(1, thread_name_prefix="commit")
        # Number of bytes of each batch that is held in memory but not counted in the `bytes_held`
        # of any shard yet.
        self._byte_counts_of_batches: list[int] = []
        self._shards: deque[QueuedShard[T]] = deque()
        # Notified when a shard was committed or could not be stored. The lock guards `_shards`.
        self._shards_condition = threading.Condition()

    def take(self, batch_bytes: int) -> None:
        """Counts the memory of a batch before its samples are stored, and waits for free memory.

        The memory is added to `bytes_waiting`. This method waits while `bytes_waiting` exceeds
        `max_bytes` and the queue contains a shard.

        Args:
            batch_bytes: Number of bytes of memory that the batch needs until it is stored.

        Raises:
            StorageError: If a shard could not be stored.
        """
        with self._shards_condition:
            self._byte_counts_of_batches.append(batch_bytes)
            self.bytes_waiting += batch_bytes
            while self.bytes_waiting > self._max_waiting_bytes and self._shards:
                self.check()
                self._on_wait()
                start_time = time.perf_counter()
                phase_of_oldest_shard = self._shards[0].phase
                # The wait ends after 0.2 seconds, so that Ctrl-C is noticed.
                self._shards_condition.wait(0.2)
                self.waited_seconds_by_phase[phase_of_oldest_shard] += (
                    time.perf_counter() - start_time
                )
        self.check()

    def submit(self, store: Callable[[QueuedShard[T]], T]) -> None:
        """Adds a shard, which is stored by `store` and then committed in the background.

        When this shard is committed, the memory of the batches that were added between the previous
        call of `submit` and this call is counted as free, except the memory of the latest batch,
        which may also contain samples of the next shard.

        Args:
            store: Function that takes the queued shard, stores its files, and returns the result
                that the function `commit` of this queue takes. While it runs, it sets the phase of
                the shard.

        Raises:
            StorageError: If an earlier shard could not be stored.
        """
        self.check()
        queued_shard = QueuedShard[T](sum(self._byte_counts_of_batches[:-1]))
        del self._byte_counts_of_batches[:-1]
        queued_shard.files_future = self._storing_executor.submit(store, queued_shard)
        with self._shards_condition:
            # `_finish` may run at once in another thread. It cannot remove the shard from `_shards`
            # before the shard is added, because it needs the lock that is held here.
            self._commit_executor.submit(self._finish, queued_shard)
            self._shards.append(queued_shard)

    def check(self) -> None:
        """Raises the error of a shard that could not be stored, if there is one.

        Shards that were submitted before the shard that failed may still be stored.

        Raises:
            StorageError: If a shard could not be stored.
        """
        if self._failure is not None:
            raise self._failure
        for queued_shard in list(self._shards):
            if (
                queued_shard.files_future.done()
                and (storing_error := queued_shard.files_future.exception()) is not None
            ):
                raise self._error_to_raise(storing_error)

    def wait(self) -> None:
        """Waits until all shards are committed.

        Raises:
            StorageError: If a shard could not be stored. All shards before it are committed.
        """
        with self._shards_condition:
            while self._shards and self._failure is None:
                # The wait ends after 0.2 seconds, so that Ctrl-C is noticed.
                self._shards_condition.wait(0.2)
        self.check()

    def gauges(self) -> dict[str, Any]:
        """Returns metrics about the shards that are not committed yet, by name.

        Returns:
            A dict with these keys, where PHASE is one of PHASES:
            "bytes_waiting": Number of bytes in memory that wait to be stored.
            "shards_PHASE": Number of shards that are in this phase.
            "waited_PHASE_seconds_since_start": Seconds for which the process waited for free memory
            (in `take`) while the oldest shard was in this phase.
        """
        phases_of_shards = [queued_shard.phase for queued_shard in list(self._shards)]
        value_by_gauge: dict[str, Any] = {"bytes_waiting": self.bytes_waiting}
        for phase in PHASES:
            value_by_gauge[f"shards_{phase}"] = phases_of_shards.count(phase)
        for phase in PHASES:
            value_by_gauge[f"waited_{phase}_seconds_since_start"] = round(
                self.waited_seconds_by_phase[phase], 3
            )
        return value_by_gauge

    def close(self, patient: bool) -> None:
        """Ends the threads that store and commit shards.

        Args:
            patient: Whether to wait for the work that the threads have begun. Work that they have
                not begun is cancelled in any case.
        """
        self._has_cancelled_work = self._has_cancelled_work or not patient
        for executor in (self._storing_executor, self._commit_executor):
            executor.shutdown(wait=patient, cancel_futures=True)

    def _finish(self, shard: QueuedShard[T]) -> None:
        """Waits until a shard is stored and commits it, unless an earlier shard has failed.

        The first failure is kept in `_failure`.
        """
        try:
            if self._failure is None:
                self._commit_shard(shard.files_future.result())
        except BaseException as error:  # after any failure, no later shard may be committed
            self._failure = self._error_to_raise(error)
        finally:
            with self._shards_condition:
                self.bytes_waiting -= shard.bytes_held
                self._shards.remove(shard)
                self._shards_condition.notify_all()

    def _error_to_raise(self, error: BaseException) -> Exception:
        """Returns the error that the methods raise after an exception in a thread.

        Args:
            error: Exception of the thread.

        Returns:
            If `close` was called and did not wait for the threads: a StorageError with the message
            that storing was stopped. Otherwise, the exception itself if it is a LostError, and a
            StorageError that describes the exception if it is another exception.
        """
        if self._has_cancelled_work:  # the exception only shows that `close` has cancelled the work
            return StorageError("storing was stopped")
        error_for_user = for_the_user(error)
        if isinstance(error_for_user, LostError):
            return error_for_user
        return reworded(error_for_user, one_line(error_for_user), StorageError)
