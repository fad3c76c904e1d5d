"""ShardWriter: gathers samples into shards, packs these, and commits them.

A shard goes from memory to its files, which are complete under their final names before its commit
appears. shard_queue.py has the threads that do this in the background, the order of the commits,
and the limit of memory; log_writer.py writes the files and the commits.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from activation_extraction.cli.flags import StorageOptions
from activation_extraction.common.errors import StorageError
from activation_extraction.common.log import log
from activation_extraction.store.formats import FileFacts, chosen_format, shard_name
from activation_extraction.store.hook_values import HookValues, Key
from activation_extraction.store.identity import Identity, Sources
from activation_extraction.store.log_writer import LogWriter
from activation_extraction.store.resume import ShardNumbers, StoragePlan
from activation_extraction.store.run_log import Commit
from activation_extraction.store.sample_table import pack_table
from activation_extraction.store.shard import Shard, ShardSample
from activation_extraction.store.shard_queue import QueuedShard, ShardQueue
from activation_extraction.store.source_check import SourceCheck
from activation_extraction.store.statistics import pack_sums
from activation_extraction.text.mark import Mark

# A shard whose files are stored: its commit, and its samples.
StoredShard = tuple[Commit, list[ShardSample]]


class ShardWriter:
    """Gathers samples into shards, and stores the shards in the folder that this process owns.

    Samples are taken in the order in which they come. A shard has at most `shard_bytes` bytes of
    activations, but at least one sample.

    Methods raise the errors of ShardQueue as soon as a shard could not be committed.

    Args:
        run_log: The log of the folder, in which this process is the writer.
        hooks: Hooks by key. Their values are encoded in the background.
        identity: Identity of the run.
        options: Options of the storage.
        sources: The files that samples come from; None if they are not checked.
        on_wait: Function that is called again and again while `take` waits.
        on_commit: Function that is called after each commit, in the thread that commits.

    Attributes:
        queue: The shards that are not committed yet.
        format: Format of the shard files.
    """

    def __init__(
        self,
        run_log: LogWriter,
        hooks: Mapping[Key, HookValues],
        identity: Identity,
        options: StorageOptions,
        sources: Sources | None,
        on_wait: Callable[[], None],
        on_commit: Callable[[], None],
    ) -> None:
        self.format = chosen_format(options.shard_format, options.compress_shards)
        self._log = run_log
        self._hooks = hooks
        self._identity = identity
        self._source_check = SourceCheck(sources, run_log.made)
        self._on_commit = on_commit
        self._shard_bytes = options.shard_bytes
        self._threads = ThreadPoolExecutor(options.threads, thread_name_prefix="store")
        self._packing = threading.Semaphore(options.threads)
        self.queue = ShardQueue[StoredShard](self._commit, options.waiting_bytes, on_wait)

    def follow(self, plan: StoragePlan) -> None:
        """Begins with the next shard of a plan. No samples may have been added."""
        self._plan = plan
        self._numbers = ShardNumbers(plan)
        self._mark = plan.mark
        self._empty()

    def _empty(self) -> None:
        self._pending: list[tuple[ShardSample, Mapping[Key, Any]]] = []
        self._bytes = 0

    def take(self, size: int) -> None:
        """Counts a batch as waiting to be stored, and waits while too many bytes are waiting.

        Args:
            size: Bytes of the batch's activations.
        """
        # A compressed shard is in memory beside its uncompressed arrays, and so are encoded values
        # beside those that they were made from.
        is_encoded = any(hook.is_encoded for hook in self._hooks.values())
        copies = 1 + self.format.compressed + is_encoded
        self.queue.take(size * copies)

    def add(self, sample: ShardSample, values: Mapping[Key, Any], mark: Mark | None = None) -> None:
        """Adds a sample.

        A sample without tokens counts as one token, so that a shard of such samples is cut, too.

        Args:
            sample: The sample.
            values: Its values by the key of the hook, as `HookValues.for_shard` returns them.
            mark: Where a run continues once this sample and those before it are stored. None if the
                samples come from no stream.
        """
        size = sum(self._hooks[key].bytes_of(values[key]) for key in values)
        if self._pending and self._bytes + size > self._shard_bytes:
            self._cut(self._numbers.take())
        self._pending.append((sample, values))
        self._bytes += size
        self._mark = self._plan.mark_after(mark)

    def finish(self, complete: bool) -> None:
        """Cuts the last shard, and waits until all are committed.

        If a shard has failed, waits for the shards before it and raises its error.

        Args:
            complete: Whether there are no more samples. All gaps of a repair are filled then, with
                empty shards if nothing is left for them.
        """
        with suppress(StorageError):  # the queue raises it below
            gaps = self._numbers.take_gaps() if complete else []
            for number in gaps[:-1]:
                self._submit(Shard([], {}, {}), number)
            if gaps:
                self._cut(gaps[-1])
            elif self._pending:
                self._cut(self._numbers.take())
        self.queue.wait()

    def _cut(self, number: int) -> None:
        self._pending.sort(key=lambda pending: pending[0].facts.sample_idx)
        samples = [sample for sample, _ in self._pending]
        values = {key: [values[key] for _, values in self._pending] for key in self._hooks}
        shard = Shard(samples, self._hooks, values)
        self._empty()  # before Ctrl-C may interrupt `_submit`: no sample may be in two shards
        self._submit(shard, number)

    def _submit(self, shard: Shard, number: int) -> None:
        self.queue.submit(partial(self._store, shard, self._mark, number))

    def close(self, patient: bool) -> None:
        """Ends the threads.

        Args:
            patient: Whether they finish their work first.
        """
        self.queue.close(patient)
        self._threads.shutdown(wait=patient, cancel_futures=True)

    def _store(
        self, shard: Shard, mark: Mark | None, number: int, queued: QueuedShard[StoredShard]
    ) -> StoredShard:
        """Packs a shard and writes its files; returns its commit and its samples."""
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
            shard, errors = shard.encode(self._threads)
            hooks, sums = shard.measure(errors, self._threads)
            packed = self.format.pack(shard, self._threads, writer)
        cuts = [sample.facts.cut for sample in shard.samples if sample.facts.cut > 0]
        lengths = [len(sample.positions) for sample in shard.samples]
        commit = replace(
            commit,
            file=shard_name(number, self.format.suffix),
            unpacked=packed.uncompressed_bytes,
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
        queued.phase = "writing"
        write = self._log.write_file
        files = {commit.file: replace(packed.facts, version=write(commit.file, packed.parts))}
        for name, data in small.items():
            digest = hashlib.sha256(data).hexdigest()
            files[name] = FileFacts(len(data), digest, write(name, [data]))
        queued.phase = "committing"
        return replace(commit, files=files), shard.samples

    def _commit(self, stored: StoredShard) -> None:
        """Commits a shard, once all shards before it are committed.

        Raises:
            StorageError: A file that samples come from has changed.
        """
        commit, samples = stored
        self._source_check.check(samples)
        made = self._log.commit(replace(commit, committed=round(time.time(), 3)))
        log.debug("shard %d: %d samples, %d bytes", made.number, made.count, made.bytes)
        self._on_commit()
