"""ShardWriter: stores shards in the background, several at a time, and commits them in order.

A pool of threads packs a shard, which goes from memory to its files. In every folder, a shard's
files are complete under their final names before its JSON appears, and no shard is committed before
the previous one. The caller waits while too much is waiting to be stored. After a failure, no later
shard is committed.
"""

import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from activation_extraction.common.errors import StorageError, for_the_user, one_line
from activation_extraction.common.log import log
from activation_extraction.store.commit import Commit
from activation_extraction.store.encode_shard import EncodingError, encode_shard
from activation_extraction.store.formats import ShardFormat, Threads
from activation_extraction.store.identity import Identity
from activation_extraction.store.ownership import Ownership
from activation_extraction.store.patience import reason_of
from activation_extraction.store.run_record import RunRecord
from activation_extraction.store.sealed_json import seal
from activation_extraction.store.shard import Key, Shard, pack_table
from activation_extraction.store.statistics import Sums, hook_sums, pack_sums
from activation_extraction.text.batch import Cursor

SHARDS_AT_ONCE = 16  # most of them are being uploaded
OVERFLOW = (
    "float16 ends at 65504; start anew with --activation_dtype bfloat16 or float32 and --overwrite"
)
NOT_FINITE = (
    "the model computes them, and would do so again; check its weights, or start anew with other "
    "layers or --dtype float32, and --overwrite"
)


@dataclass(eq=False)
class _Job:
    """A shard that is being stored. holds: the bytes of memory that are free once it is stored.
    phase: what it is waiting for."""

    number: int
    holds: int
    phase: str = "packing"
    stored: Future[None] = field(default_factory=Future)


class ShardWriter:
    """Stores shards in the folders that this process owns, one folder after the other.

    names: the hooks' full names by key. encoded: the hooks to encode, which is done in the
    background. max_bytes: how many bytes may wait to be stored.
    threads: how many threads pack shards. record: counts what is committed; the files that the
    samples come from are recorded before a shard is committed. `made` lists the shards that this
    process has stored. `bytes_waiting` counts the bytes in memory that wait to be stored. `waited`
    maps each phase to the seconds for which the caller waited because the oldest shard was in that
    phase.
    """

    def __init__(
        self,
        owners: Sequence[Ownership],
        names: Mapping[Key, str],
        encoded: Collection[Key],
        shard_format: ShardFormat,
        identity: Identity,
        record: RunRecord,
        threads: int,
        max_bytes: float,
    ) -> None:
        self.made: list[Commit] = []
        self._failure: tuple[int, StorageError] | None = None  # the first shard that failed
        self._stopped = False
        self.waited = {"packing": 0.0, "writing": 0.0, "committing": 0.0}
        self._owners = owners
        self._names = names
        self._format = shard_format
        self._run = identity.run
        self._identity = identity
        self._encoded = encoded
        self._record = record
        self._threads = Threads(threads)
        self._packing = threading.Semaphore(threads)
        self._shards = ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="shard")
        self._max_bytes = max_bytes
        # A compressed shard for a bucket is in memory beside its uncompressed arrays, and so are
        # encoded values beside those that they were made from.
        buckets = [owner for owner in owners if not owner.folder.local]
        self._copies = 1 + shard_format.compressed * len(buckets) + bool(encoded)
        self.bytes_waiting = 0
        self._batches: list[int] = []  # the bytes of each batch that later shards may use
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()  # a shard was stored, or has failed
        self.begin({})

    def begin(self, expected: Mapping[int, Commit]) -> None:
        """Takes the current time as the beginning of the run.

        expected: the shards that are computed again, by number; a shard with the same bytes keeps
        its JSON.
        """
        self._began = round(time.time(), 3)
        self._expected = expected

    def take(self, size: int) -> None:
        """Counts the `size` bytes of a batch as waiting to be stored, and waits if these are too
        many.

        Raises StorageError if any shard so far could not be committed.
        """
        size *= self._copies
        self._batches.append(size)
        with self._changed:
            self.bytes_waiting += size
            while self.bytes_waiting > self._max_bytes and self._jobs and self._failure is None:
                began, phase = time.perf_counter(), self._jobs[0].phase
                self._changed.wait(0.2)  # briefly, to notice Ctrl-C
                self.waited[phase] += time.perf_counter() - began
        self.check()

    def commit(
        self, shard: Shard, cursor: Cursor | None, number: int, partial: bool, in_use: int
    ) -> None:
        """Stores shard `number` in the background.

        in_use: how many of the last batches may have samples for later shards. Raises StorageError
        if any shard so far could not be committed.
        """
        self.check()
        job = _Job(number, sum(self._batches[:-in_use]))
        del self._batches[:-in_use]
        with self._changed:
            previous = self._jobs[-1] if self._jobs else None
            self._jobs.append(job)
        self._shards.submit(self._run_job, job, previous, shard, cursor, partial)

    def check(self, before: float = math.inf) -> None:
        """Raises StorageError if any shard, or any shard before a certain number, has failed."""
        if self._failure is not None and self._failure[0] < before:
            raise self._failure[1]

    def wait(self) -> None:
        """Waits until all shards are stored. If one has failed, waits for the shards before it and
        raises StorageError."""
        while jobs := list(self._jobs):
            if self._failure is not None and self._failure[0] < jobs[0].number:
                break
            wait([jobs[0].stored], timeout=0.2)  # briefly, to notice Ctrl-C
        self.check()

    def gauges(self) -> dict[str, Any]:
        """Returns metrics about the shards that are stored, and about those that are not yet."""
        phases = [job.phase for job in list(self._jobs)]
        return {
            "shards_stored": self._record.totals.shards,
            "bytes_stored": self._record.totals.bytes,
            "bytes_waiting": self.bytes_waiting,
            **{f"shards_{phase}": phases.count(phase) for phase in self.waited},
            **{f"waited_{key}_seconds": round(value, 3) for key, value in self.waited.items()},
            "upload_retries": sum(owner.folder.retries for owner in self._owners),
        }

    def close(self, patient: bool) -> None:
        """Ends the threads; if `patient`, they finish their work first."""
        self._stopped = not patient
        for pool in (self._shards, self._threads.pool):
            pool.shutdown(wait=patient, cancel_futures=True)

    def _run_job(
        self, job: _Job, previous: _Job | None, shard: Shard, cursor: Cursor | None, partial: bool
    ) -> None:
        """Stores a shard, and keeps the first failure for the next `check`."""
        try:
            self.check(before=job.number)
            commit = self._store(job, shard, cursor, partial)
            job.phase = "committing"
            if previous is not None:
                previous.stored.result()
            self.check(before=job.number)
            self._commit(commit)
        except BaseException as error:  # whatever it is, no later shard may be committed
            failure = self._as_storage_error(error)
            with self._changed:
                if self._failure is None or job.number < self._failure[0]:
                    self._failure = job.number, failure
        finally:
            del shard
            with self._changed:
                self.bytes_waiting -= job.holds
                self._jobs.remove(job)
                self._changed.notify_all()
            job.stored.set_result(None)

    def _as_storage_error(self, error: BaseException) -> StorageError:
        if self._stopped:  # `close` did not wait for this shard
            return StorageError("storing was stopped")
        if isinstance(error, OSError):  # from the disk
            return StorageError(f"{self._owners[0].folder.url}: {reason_of(error)[0]}")
        user_error = for_the_user(error)
        return StorageError(one_line(user_error), remedy=getattr(user_error, "remedy", None))

    def _store(self, job: _Job, shard: Shard, cursor: Cursor | None, partial: bool) -> Commit:
        """Writes the files of a shard, and returns its commit."""
        name, began = self._format.file_name(job.number), time.perf_counter()
        try:
            with ExitStack() as stack:
                with self._packing:
                    shard, errors = encode_shard(shard, self._encoded, self._threads.in_order)
                    sums = self._sums(shard)
                    files = []
                    for owner in self._owners:
                        files.append(owner.new_file(name))
                        stack.enter_context(files[-1])
                    sinks = [file.write for file in files]
                    packed = self._format.write(shard, self._names, self._threads, sinks)
                statistics = pack_sums({self._names[key]: sums[key] for key in sums})
                table = pack_table(shard.samples)
                packing = time.perf_counter() - began
                job.phase = "writing"
                commit = Commit(
                    file=name,
                    sha256=packed.sha256,
                    bytes=packed.bytes,
                    unpacked=packed.unpacked,
                    first=shard.samples[0].sample_idx,
                    last=shard.samples[-1].sample_idx,
                    count=len(shard.samples),
                    tokens=shard.tokens,
                    partial=partial,
                    cursor=None if cursor is None else cursor.to_json(),
                    hooks=self._describe_hooks(shard, sums, errors),
                    run=self._run,
                    committed=0,
                    began=self._began,
                    statistics=hashlib.sha256(statistics).hexdigest(),
                    table=hashlib.sha256(table).hexdigest(),
                    cut_samples=sum(row.cut > 0 for row in shard.samples),
                    cut_tokens=sum(row.cut for row in shard.samples),
                    empty_samples=sum(not len(row.positions) for row in shard.samples),
                )
                for owner, file in zip(self._owners, files, strict=True):
                    file.finish()
                    owner.begin_shard(commit.name)
                    file.publish()
                    owner.write(commit.statistics_file, statistics)
                    owner.write(commit.table_file, table)
        except OSError as error:
            where = f"{self._owners[0].folder.url}/{name}"
            raise StorageError(f"{where}: {reason_of(error)[0]}") from error
        with self._changed:
            self._record.totals.pack_seconds += packing
            self._record.totals.write_seconds += time.perf_counter() - began - packing
        return commit

    def _sums(self, shard: Shard) -> dict[Key, Sums]:
        """Returns the sums by hook. Raises StorageError, naming the sample, for NaN or infinity."""
        sums = sum_shard(shard, self._threads, self._names, self._identity)
        for key in (key for key in sums if not sums[key].statistics.finite):
            for number, row in enumerate(shard.samples):
                dtype = shard.slices[key][number].dtype
                one = slice(number, number + 1)
                sums_of_one = sum_samples(shard, key, one, self._names[key], self._identity)
                if not sums_of_one.statistics.finite:
                    raise StorageError(
                        f"sample {row.sample_idx}, hook {key}: NaN or infinite {dtype} values",
                        remedy=OVERFLOW if dtype.name == "float16" else NOT_FINITE,
                    )
        return sums

    def _describe_hooks(
        self, shard: Shard, sums: Mapping[Key, Sums], errors: Mapping[Key, EncodingError]
    ) -> list[dict[str, Any]]:
        """Returns the `hooks` of a commit."""
        widths = {key: of_hook.sums.shape[1] for key, of_hook in sums.items()}
        return [
            {
                "key": key,
                "name": self._names[key],
                "width": width,
                "dtype": shard.slices[key][0].dtype.name,
                "scale": width if key in self._encoded else None,
                **replace(sums[key].statistics, error=errors.get(key)).to_json(),
            }
            for key, width in widths.items()
        ]

    def _commit(self, commit: Commit) -> None:
        """Writes the JSON of a shard, once all shards before it are committed."""
        commit = replace(commit, committed=round(time.time(), 3))
        expected = self._expected.get(commit.number)
        if expected is not None and expected.sha256 == commit.sha256:
            commit = replace(expected, statistics=commit.statistics, table=commit.table)
        self._record.settle()
        for owner in self._owners:
            owner.commit(commit.name, seal(commit.to_json()))
        self.made.append(commit)
        log.debug("%s: %d samples, %d bytes", commit.file, commit.count, commit.bytes)
        self._record.add(commit)


def sum_shard(
    shard: Shard, threads: Threads, names: Mapping[Key, str], identity: Identity
) -> dict[Key, Sums]:
    """Returns the sums of a shard by hook. They depend on its content alone.

    names: the hooks' full names by key.
    """
    groups = [(key, group) for key in shard.slices for group in shard.groups(key)]

    def sum_group(item: tuple[Key, slice]) -> Sums:
        key, group = item
        return sum_samples(shard, key, group, names[key], identity)

    total = {key: Sums.zeros(slices[0].shape[1]) for key, slices in shard.slices.items()}
    for (key, _), sums in zip(groups, threads.in_order(sum_group, groups), strict=True):
        total[key].merge(sums)
    return total


def sum_samples(shard: Shard, key: Key, samples: slice, hook: str, identity: Identity) -> Sums:
    """Returns the sums of some samples of a shard at the hook with this key and full name."""
    scales = shard.scales[key][samples] if key in shard.scales else None
    positions = [row.positions for row in shard.samples[samples]]
    return hook_sums(identity, hook, shard.slices[key][samples], positions, scales)
