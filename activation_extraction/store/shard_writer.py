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
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from activation_extraction.common.codes import Codes
from activation_extraction.common.errors import RunError, StorageError, for_the_user, one_line
from activation_extraction.common.log import log
from activation_extraction.store.commit import Commit, FileFacts
from activation_extraction.store.formats import Threads, chosen_format
from activation_extraction.store.identity import Identity, StorageOptions
from activation_extraction.store.owner import LostError, Owner
from activation_extraction.store.run_record import RunRecord
from activation_extraction.store.sample_table import pack_table
from activation_extraction.store.shard import (
    CodeSums,
    Errors,
    Key,
    SampleRow,
    Shard,
    SumsOfCodes,
    encode_shard,
    sums_of_codes,
)
from activation_extraction.store.statistics import (
    Statistics,
    Sums,
    defined_tokens,
    pack_sums,
    sums_of,
)
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
    """A shard that is being stored. order: how many shards come before it in this process; in a
    repair, their numbers are in another order. holds: the bytes of memory that are free once it is
    stored. phase: what it is waiting for."""

    number: int
    order: int
    holds: int
    phase: str = "packing"
    stored: Future[None] = field(default_factory=Future)


class ShardWriter:
    """Stores shards in the folders that this process owns, one folder after the other.

    names: the hooks' full names by key; those to encode are encoded in the background. record:
    counts what is committed. `made` lists the shards that this process has stored. `bytes_waiting`
    counts the bytes in memory that wait to be stored. `waited` maps each phase to the seconds for
    which the caller waited because the oldest shard was in that phase.
    """

    def __init__(
        self,
        owners: Sequence[Owner],
        names: Mapping[Key, str],
        identity: Identity,
        options: StorageOptions,
        record: RunRecord,
    ) -> None:
        self.made: list[Commit] = []
        self.bytes_waiting = 0
        self.waited = {"packing": 0.0, "writing": 0.0, "committing": 0.0}
        self.encoded = [key for key in names if identity.is_encoded(names[key])]
        self.format = chosen_format(options.shard_format, options.compress_shards)
        self._owners = owners
        self._names = names
        self._identity = identity
        self._record = record
        self._failure: tuple[int, Exception] | None = None  # the first shard that failed
        self._stopped = False
        self._threads = Threads(options.threads)
        self._packing = threading.Semaphore(options.threads)
        self._shards = ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="shard")
        self._max_bytes = options.waiting_bytes
        # A compressed shard is in memory beside its uncompressed arrays, and so are encoded values
        # beside those that they were made from.
        self._copies = 1 + self.format.compressed + bool(self.encoded)
        self._order = self._unchanged = 0
        self._taken: list[int] = []  # the bytes of batches that no shard is charged with yet
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()  # a shard was stored, or has failed

    def take(self, size: int) -> None:
        """Counts the `size` bytes of a batch as waiting to be stored, and waits if these are too
        many.

        Raises StorageError if any shard so far could not be committed.
        """
        size *= self._copies
        with self._changed:
            self._taken.append(size)
            self.bytes_waiting += size
            while self.bytes_waiting > self._max_bytes and self._jobs and self._failure is None:
                began, phase = time.perf_counter(), self._jobs[0].phase
                self._changed.wait(0.2)  # briefly, to notice Ctrl-C
                self.waited[phase] += time.perf_counter() - began
        self.check()

    def commit(self, shard: Shard, mark: Cursor | None, number: int) -> None:
        """Stores shard `number` in the background. mark: where a run continues after it.

        It is charged with the memory of all batches before the last, which may have samples for
        later shards. Raises StorageError if any shard so far could not be committed.
        """
        self.check()
        job = _Job(number, self._order, sum(self._taken[:-1]))
        self._order += 1
        del self._taken[:-1]
        with self._changed:
            previous = self._jobs[-1] if self._jobs else None
            self._jobs.append(job)
        self._shards.submit(self._run_job, job, previous, shard, mark)

    def check(self, before: float = math.inf) -> None:
        """Raises what a shard has failed with. before: only failures of shards whose order is
        smaller count."""
        if self._failure is not None and self._failure[0] < before:
            raise self._failure[1]

    def wait(self) -> None:
        """Waits until all shards are stored. If one has failed, waits for the shards before it and
        raises StorageError."""
        while jobs := list(self._jobs):
            if self._failure is not None and self._failure[0] < jobs[0].order:
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
        self._stopped = self._stopped or not patient
        for pool in (self._shards, self._threads.pool):
            pool.shutdown(wait=patient, cancel_futures=True)

    def _run_job(self, job: _Job, previous: _Job | None, shard: Shard, mark: Cursor | None) -> None:
        """Stores a shard, and keeps the first failure for the next `check`."""
        try:
            self.check(before=job.order)
            commits, rows = self._store(job, shard, mark), shard.samples
            job.phase = "committing"
            if previous is not None:
                previous.stored.result()
            self.check(before=job.order)
            self._commit(commits, rows)
        except BaseException as error:  # whatever it is, no later shard may be committed
            failure = self._as_storage_error(error)
            with self._changed:
                if self._failure is None or job.order < self._failure[0]:
                    self._failure = job.order, failure
        finally:
            del shard
            with self._changed:
                self.bytes_waiting -= job.holds
                self._jobs.remove(job)
                self._changed.notify_all()
            job.stored.set_result(None)

    def _as_storage_error(self, error: BaseException) -> Exception:
        if self._stopped:  # `close` did not wait for this shard
            return StorageError("storing was stopped")
        user_error = for_the_user(error)
        if isinstance(user_error, LostError):
            return user_error
        return StorageError(one_line(user_error), remedy=getattr(user_error, "remedy", None))

    def _store(self, job: _Job, shard: Shard, mark: Cursor | None) -> list[Commit]:
        """Writes the files of a shard, and returns its commit for each of the folders."""
        name = self.format.file_name(job.number) if shard.samples else ""
        indices = [row.sample_idx for row in shard.samples] or [0]
        lengths = [len(row.positions) for row in shard.samples]
        cuts = [row.cut for row in shard.samples if row.cut > 0]
        commit = Commit(
            number=job.number,
            run="",  # the owner fills this in, and the next two
            owner="",
            url="",
            file=name,
            files={},
            unpacked=0,
            first=min(indices),
            last=max(indices),
            count=len(lengths),
            tokens=sum(lengths),
            hooks=[],
            mark=None if mark is None else mark.to_json(),
            committed=0,
            began=self._record.began,
            cut_samples=len(cuts),
            cut_tokens=sum(cuts),
            empty_samples=lengths.count(0),
        )
        if not shard.samples:
            return [commit] * len(self._owners)
        with self._packing:
            shard, errors = encode_shard(shard, self.encoded, self._threads.in_order)
            sums, codes = self._sums(shard), self._code_sums(shard)
            packed = self.format.pack(shard, self._names, self._threads)
        contents: dict[str, tuple[Sequence[bytes | memoryview], FileFacts]]
        contents = {name: (packed.parts, packed.facts)}
        for file, data in (
            (commit.statistics_file, pack_sums({self._names[key]: sums[key] for key in sums})),
            (commit.table_file, pack_table(shard.samples)),
        ):
            contents[file] = [data], FileFacts(len(data), hashlib.sha256(data).hexdigest())
        hooks = [
            self._describe_codes(key, shard, codes[key])
            if key in codes
            else self._describe_hook(key, shard, sums[key], errors.get(key, {}))
            for key in shard.slices
        ]
        job.phase = "writing"
        commits = []
        for owner in self._owners:
            written = {
                file: replace(facts, version=owner.write_file(file, parts))
                for file, (parts, facts) in contents.items()
            }
            commits.append(replace(commit, files=written, unpacked=packed.unpacked, hooks=hooks))
        return commits

    def _sums(self, shard: Shard) -> dict[Key, Sums]:
        """Returns the sums by hook. Raises StorageError, naming the sample, for NaN or infinity."""
        dense = {key: s for key, s in shard.slices.items() if not isinstance(s[0], Codes)}
        total = {key: Sums.zeros(slices[0].shape[1]) for key, slices in dense.items()}
        groups = [(key, group) for key in dense for group in shard.groups(key)]
        found = self._threads.in_order(lambda group: self._sums_of(shard, *group), groups)
        for (key, _), sums in zip(groups, found, strict=True):
            total[key].merge(sums)
        for key in (key for key in total if not total[key].statistics.finite):
            for number, row in enumerate(shard.samples):
                one = slice(number, number + 1)
                if not self._sums_of(shard, key, one).statistics.finite:
                    dtype = shard.slices[key][number].dtype.name
                    raise StorageError(
                        f"sample {row.sample_idx}, hook {key}: NaN or infinite {dtype} values",
                        remedy=OVERFLOW if dtype == "float16" else NOT_FINITE,
                    )
        return total

    def _code_sums(self, shard: Shard) -> dict[Key, SumsOfCodes]:
        """Returns the sums of codes by hook. Raises StorageError, naming the sample, for NaN or
        infinity."""
        found: dict[Key, SumsOfCodes] = {}
        for key, slices in shard.slices.items():
            for row, codes in zip(shard.samples, slices, strict=True):
                if not isinstance(codes, Codes):
                    break
                if not (np.isfinite(codes.error).all() and np.isfinite(codes.norm).all()):
                    told = f"sample {row.sample_idx}, hook {key}: NaN or infinite values"
                    raise StorageError(told, remedy=NOT_FINITE)
                sums = sums_of_codes(codes, row.positions)
                before = found.setdefault(key, {})
                found[key] = {kind: before.get(kind, CodeSums()).merge(sums[kind]) for kind in sums}
        return found

    def _sums_of(self, shard: Shard, key: Key, samples: slice) -> Sums:
        """Returns the sums of some samples at a hook, without tokens that have no value there.

        Integers have no statistics, so their sums are over no tokens.
        """
        values, name = shard.slices[key][samples], self._names[key]
        if name in self._identity.integer_hooks:
            return Sums.zeros(values[0].shape[1])
        positions = [row.positions for row in shard.samples[samples]]
        if self._identity.leaves_out_firsts(name):
            masks = [defined_tokens(*pair) for pair in zip(values, positions, strict=True)]
            values, positions = (
                [each[mask] for each, mask in zip(arrays, masks, strict=True)]
                for arrays in (values, positions)
            )
        scales = shard.scales[key][samples] if key in shard.scales else None
        return sums_of(values, positions, scales)

    def _describe_hook(self, key: Key, shard: Shard, sums: Sums, error: Errors) -> dict[str, Any]:
        """Returns an entry of the `hooks` of a commit."""
        width = sums.sums.shape[1]
        return {
            "key": key,
            "name": self._names[key],
            "width": width,
            "dtype": shard.slices[key][0].dtype.name,
            "scale": width if key in self.encoded else None,
            **replace(sums.statistics, error=error).to_json(),
        }

    def _describe_codes(self, key: Key, shard: Shard, codes: SumsOfCodes) -> dict[str, Any]:
        """Returns an entry of the `hooks` of a commit for codes."""
        first = shard.slices[key][0]
        return {
            "key": key,
            "name": self._names[key],
            "width": first.features,
            "dtype": first.data.dtype.name,
            "scale": None,
            **Statistics(codes=codes).to_json(),
        }

    def _commit(self, commits: Sequence[Commit], rows: Sequence[SampleRow]) -> None:
        """Writes the JSON of a shard, once all shards before it are committed. commits: one for
        each of the folders. rows: its samples.

        Raises StorageError if a file that samples come from has changed, and names the shards that
        were committed since it was last seen unchanged.
        """
        try:
            if self._record.sources is not None:
                self._record.sources.check(row.row for row in rows if row.row is not None)
        except RunError as error:
            since = [commit.number for commit in self.made[self._unchanged :]]
            names = ", ".join(map(str, since)) or "none"
            raise StorageError(
                f"{error}; shards committed since it was last seen unchanged: {names}",
                remedy=error.remedy,
            ) from error
        self._unchanged = len(self.made)
        for owner, commit in zip(self._owners, commits, strict=True):
            made = owner.commit(replace(commit, committed=round(time.time(), 3)))
        self.made.append(made)
        log.debug("shard %d: %d samples, %d bytes", made.number, made.count, made.bytes)
        self._record.add(made)
