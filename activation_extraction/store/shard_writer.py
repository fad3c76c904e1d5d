"""ShardWriter: gathers samples into shards, stores these in the background, and commits them.

A pool of threads packs a shard, which goes from memory to its files. In every folder, a shard's
files are complete under their final names before its JSON appears, and one thread commits them in
order. The caller waits while too much is waiting to be stored. After a failure, no later shard is
committed.
"""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from activation_extraction.common.codes import Codes
from activation_extraction.common.encodings import FLOAT8, token_bytes
from activation_extraction.common.errors import (
    RunError,
    StorageError,
    for_the_user,
    one_line,
    reworded,
)
from activation_extraction.common.log import log
from activation_extraction.store.formats import FileFacts, chosen_format, measured, shard_name
from activation_extraction.store.identity import Identity, Sources, StorageOptions
from activation_extraction.store.log_writer import LogWriter, LostError
from activation_extraction.store.resume import ShardNumbers, StoragePlan
from activation_extraction.store.run_log import Commit
from activation_extraction.store.sample_table import pack_table
from activation_extraction.store.shard import Key, Shard, ShardSample, Values, encode_shard
from activation_extraction.store.statistics import pack_sums
from activation_extraction.text.mark import Mark

SHARDS_AT_ONCE = 16  # most of them are being uploaded


@dataclass(eq=False)
class _Job:
    """A shard that is being stored. holds: the bytes of memory that are free once it is committed.
    phase: what it is waiting for. stored: will have its commit and its samples."""

    holds: int
    phase: str = "packing"
    stored: Future[tuple[Commit, list[ShardSample]]] = field(default_factory=Future)


class ShardWriter:
    """Gathers samples into shards, in the order in which they come, and stores these in the folder
    that this process owns. A shard has at most `shard_bytes` bytes of activations, but at least one
    sample.

    Methods raise StorageError as soon as a shard could not be committed.

    Args:
        run_log: The log of the folder, in which this process is the writer.
        names: Full names of the hooks by key. Hooks to encode are encoded in the background.
        identity: Identity of the run.
        options: Options of the storage.
        sources: The files that samples come from; None if they are not checked.
        on_wait: Function that is called again and again while `take` waits.
        on_commit: Function that is called after each commit, in the thread that commits.

    Attributes:
        bytes_waiting: Number of bytes in memory that wait to be stored.
        waited: Seconds for which the caller waited, by the phase that the oldest shard was in.
        encoded: Keys of the hooks that are encoded.
        format: Format of the shard files.
    """

    def __init__(
        self,
        run_log: LogWriter,
        names: Mapping[Key, str],
        identity: Identity,
        options: StorageOptions,
        sources: Sources | None,
        on_wait: Callable[[], None],
        on_commit: Callable[[], None],
    ) -> None:
        self.bytes_waiting = 0
        self.waited = {"packing": 0.0, "writing": 0.0, "committing": 0.0}
        self.encoded = [key for key in names if identity.is_encoded(names[key])]
        self.format = chosen_format(options.shard_format, options.compress_shards)
        self._log = run_log
        self._names = names
        self._identity = identity
        self._sources = sources
        self._on_wait = on_wait
        self._on_commit = on_commit
        self._failure: Exception | None = None  # what the first shard has failed with
        self._stopped = False
        self._threads = ThreadPoolExecutor(options.threads, thread_name_prefix="store")
        self._packing = threading.Semaphore(options.threads)
        self._shards = ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="shard")
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._shard_bytes, self._max_bytes = options.shard_bytes, options.waiting_bytes
        # A compressed shard is in memory beside its uncompressed arrays, and so are encoded values
        # beside those that they were made from.
        self._copies = 1 + self.format.compressed + bool(self.encoded)
        self._unchanged = 0
        self._taken: list[int] = []  # the bytes of batches that no shard is charged with yet
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()  # a shard was committed, or has failed

    def follow(self, plan: StoragePlan) -> None:
        """Begins with the next shard of a plan. No samples may have been added."""
        self._plan = plan
        self._numbers = ShardNumbers(plan)
        self._mark = plan.mark
        self._empty()

    def _empty(self) -> None:
        self._pending: list[tuple[ShardSample, Mapping[Key, Values]]] = []
        self._bytes = 0

    def take(self, size: int) -> None:
        """Counts the `size` bytes of a batch as waiting to be stored, and waits if these are too
        many."""
        size *= self._copies
        with self._changed:
            self._taken.append(size)
            self.bytes_waiting += size
            while self.bytes_waiting > self._max_bytes and self._jobs:
                self.check()
                self._on_wait()
                began, phase = time.perf_counter(), self._jobs[0].phase
                self._changed.wait(0.2)  # briefly, to notice Ctrl-C
                self.waited[phase] += time.perf_counter() - began
        self.check()

    def add(
        self, sample: ShardSample, slices: Mapping[Key, Values], mark: Mark | None = None
    ) -> None:
        """Adds a sample.

        A sample without tokens counts as one token, so that a shard of such samples is cut, too.

        Args:
            sample: The sample.
            slices: Its activations, (tokens, width), by the key of the hook.
            mark: Where a run continues once this sample and those before it are stored. None if the
                samples come from no stream.
        """
        size = 0
        for key, each in slices.items():
            if isinstance(each, Codes):
                size += each.nbytes
                continue
            width, encoded = each.shape[1], key in self.encoded
            of_token = token_bytes(width, FLOAT8) if encoded else width * each.itemsize
            size += max(len(each), 1) * of_token
        if self._pending and self._bytes + size > self._shard_bytes:
            self._cut(self._numbers.take())
        self._pending.append((sample, slices))
        self._bytes += size
        self._mark = self._plan.mark_after(mark)

    def finish(self, complete: bool) -> None:
        """Cuts the last shard, and waits until all are committed. If one has failed, waits for the
        shards before it.

        Args:
            complete: Whether there are no more samples. All gaps of a repair are filled then, with
                empty shards if nothing is left for them.
        """
        with suppress(StorageError):  # `wait` raises it
            gaps = self._numbers.take_gaps() if complete else []
            for number in gaps[:-1]:
                self._submit(Shard([], {}), number)
            if gaps:
                self._cut(gaps[-1])
            elif self._pending:
                self._cut(self._numbers.take())
        self.wait()

    def _cut(self, number: int) -> None:
        self._pending.sort(key=lambda pending: pending[0].facts.sample_idx)
        slices = {key: [each[key] for _, each in self._pending] for key in self._names}
        shard = Shard([sample for sample, _ in self._pending], slices)
        self._empty()  # before Ctrl-C may interrupt `_submit`: no sample may be in two shards
        self._submit(shard, number)

    def _submit(self, shard: Shard, number: int) -> None:
        """Stores a shard in the background.

        It is charged with the memory of all batches before the last, which may have samples for
        later shards.
        """
        self.check()
        job = _Job(sum(self._taken[:-1]))
        del self._taken[:-1]
        job.stored = self._shards.submit(self._store, job, shard, self._mark, number)
        with self._changed:
            self._committer.submit(self._finish, job)  # which will wait for this lock
            self._jobs.append(job)

    def check(self) -> None:
        """Raises what a shard has failed with; those before it may still be stored."""
        if self._failure is not None:
            raise self._failure
        for job in list(self._jobs):
            if job.stored.done() and (error := job.stored.exception()) is not None:
                raise self._as_storage_error(error)

    def wait(self) -> None:
        """Waits until all shards are committed. If one has failed, waits for the shards before it
        and raises StorageError."""
        with self._changed:
            while self._jobs and self._failure is None:
                self._changed.wait(0.2)  # briefly, to notice Ctrl-C
        self.check()

    def gauges(self) -> dict[str, Any]:
        """Returns metrics about the shards of the run that are stored, and about those that are
        not yet. The names of counts of this process alone end in `since_start`."""
        phases = [job.phase for job in list(self._jobs)]
        return {
            "shards_stored": self._log.totals.shards,
            "bytes_stored": self._log.totals.bytes,
            "bytes_waiting": self.bytes_waiting,
            **{f"shards_{phase}": phases.count(phase) for phase in self.waited},
            **{
                f"waited_{phase}_seconds_since_start": round(seconds, 3)
                for phase, seconds in self.waited.items()
            },
            "upload_retries_since_start": self._log.folder.retries,
        }

    def close(self, patient: bool) -> None:
        """Ends the threads; if `patient`, they finish their work first."""
        self._stopped = self._stopped or not patient
        for pool in (self._shards, self._committer, self._threads):
            pool.shutdown(wait=patient, cancel_futures=True)

    def _finish(self, job: _Job) -> None:
        """Commits a shard once it is stored; keeps the first failure, and commits none after it."""
        try:
            if self._failure is None:
                self._commit(*job.stored.result())
        except BaseException as error:  # whatever it is, no later shard may be committed
            self._failure = self._as_storage_error(error)
        finally:
            with self._changed:
                self.bytes_waiting -= job.holds
                self._jobs.remove(job)
                self._changed.notify_all()

    def _as_storage_error(self, error: BaseException) -> Exception:
        if self._stopped:  # `close` did not wait for this shard
            return StorageError("storing was stopped")
        user_error = for_the_user(error)
        if isinstance(user_error, LostError):
            return user_error
        return reworded(user_error, one_line(user_error), StorageError)

    def _store(
        self, job: _Job, shard: Shard, mark: Mark | None, number: int
    ) -> tuple[Commit, list[ShardSample]]:
        """Writes the files of a shard; returns its commit and its samples."""
        writer = self._log.id
        commit = Commit(
            number,
            self._log.began,
            mark,
            identity=self._identity.digest,
        )
        if not shard.samples:
            return commit, []
        with self._packing:
            shard, errors = encode_shard(shard, self.encoded, self._threads)
            hooks, sums = measured(shard, self._names, self._identity, errors, self._threads)
            packed = self.format.pack(shard, self._names, self._threads, writer)
        cuts = [sample.facts.cut for sample in shard.samples if sample.facts.cut > 0]
        lengths = [len(sample.positions) for sample in shard.samples]
        commit = replace(
            commit,
            file=shard_name(number, self.format.suffix),
            unpacked=packed.unpacked,
            first=shard.samples[0].facts.sample_idx,
            last=shard.samples[-1].facts.sample_idx,
            count=len(lengths),
            tokens=sum(lengths),
            hooks=hooks,
            cut_samples=len(cuts),
            cut_tokens=sum(cuts),
            empty_samples=lengths.count(0),
        )
        small = {
            commit.statistics_file: pack_sums(sums, writer),
            commit.table_file: pack_table(shard.samples, writer),
        }
        job.phase = "writing"
        write = self._log.write_file
        files = {commit.file: replace(packed.facts, version=write(commit.file, packed.parts))}
        for name, data in small.items():
            digest = hashlib.sha256(data).hexdigest()
            files[name] = FileFacts(len(data), digest, write(name, [data]))
        job.phase = "committing"
        return replace(commit, files=files), shard.samples

    def _commit(self, commit: Commit, samples: Sequence[ShardSample]) -> None:
        """Writes the JSON of a shard, once all shards before it are committed.

        Args:
            commit: The content of the JSON.
            samples: The samples of the shard.

        Raises:
            StorageError: A file that samples come from has changed. The message names the shards
                that were committed since it was last seen unchanged.
        """
        try:
            if self._sources is not None:
                rows = [sample.facts.row for sample in samples]
                self._sources.check(row for row in rows if row is not None)
        except RunError as error:
            since = [commit.number for commit in self._log.made[self._unchanged :]]
            names = ", ".join(map(str, since)) or "none"
            told = f"{error}; shards committed since it was last seen unchanged: {names}"
            raise reworded(error, told, StorageError) from error
        self._unchanged = len(self._log.made)
        made = self._log.commit(replace(commit, committed=round(time.time(), 3)))
        log.debug("shard %d: %d samples, %d bytes", made.number, made.count, made.bytes)
        self._on_commit()
