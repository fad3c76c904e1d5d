"""Gathers samples into shards, makes the files of each shard, and commits it.

`ShardWriter` does this. All files of a shard are complete under their final names before its
commit is written. shard_queue.py runs the functions of this module in background threads, keeps the
commits in order, and limits the memory. log_writer.py writes the files and the commits to the
folder.
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
from activation_extraction.store.identity import Identity, Sources
from activation_extraction.store.log_writer import LogWriter
from activation_extraction.store.resume import ShardNumbers, StoragePlan
from activation_extraction.store.run_log import Commit
from activation_extraction.store.sample_table import pack_table
from activation_extraction.store.shard import Shard, ShardSample
from activation_extraction.store.shard_queue import QueuedShard, ShardQueue
from activation_extraction.store.source_check import SourceCheck
from activation_extraction.store.statistics import pack_sums
from activation_extraction.store.stored_hook import HookKey, StoredHook
from activation_extraction.text.mark import Mark

# A shard whose files are stored, as a tuple of its commit and its samples.
StoredShard = tuple[Commit, list[ShardSample]]


class ShardWriter:
    """Gathers samples into shards, and stores the shards in a folder.

    Samples become shards in the order in which they are added. A shard contains at most
    `options.shard_bytes` bytes of values at hooks, but at least one sample. If storing or
    committing a shard fails, later calls raise StorageError or LostError (see `ShardQueue`).

    Args:
        log_writer: Writer of the run log in the folder. This process must own the folder.
        hooks: Descriptions of the hooks, by the keys of the hooks in pickles.
        identity: Identity of the run.
        options: Options of the shards, such as their size.
        sources: Files from which the samples come, to check that they do not change. None for no
            check.
        on_wait: Function without arguments that is called repeatedly while the method `take` waits
            for free memory. The owner of the writer calls `take` before it adds a batch's samples.
        on_commit: Function without arguments that is called after each commit, in the thread that
            commits.

    Attributes:
        queue: Queue with the shards that are not committed yet.
        format: Format of the shard files.
    """

    def __init__(
        self,
        log_writer: LogWriter,
        hooks: Mapping[HookKey, StoredHook],
        identity: Identity,
        options: StorageOptions,
        sources: Sources | None,
        on_wait: Callable[[], None],
        on_commit: Callable[[], None],
    ) -> None:
        self.format = chosen_format(options.shard_format, options.compress_shards)
        self._log_writer = log_writer
        self._hook_by_key = hooks
        self._identity = identity
        self._source_check = SourceCheck(sources, log_writer.new_commits)
        self._on_commit = on_commit  # function that is called after each commit
        self._max_shard_bytes = options.shard_bytes
        self._storing_executor = ThreadPoolExecutor(options.threads, thread_name_prefix="store")
        # Limits how many shards are encoded and converted to files at the same time.
        self._serialization_slots = threading.Semaphore(options.threads)
        self.queue = ShardQueue[StoredShard](self._commit, options.waiting_bytes, on_wait)

    def follow(self, plan: StoragePlan) -> None:
        """Sets the plan of this process. This must be called before the first sample is added.

        Args:
            plan: Plan of this process, with the numbers of the shards to store.
        """
        self._storage_plan = plan
        self._shard_numbering = ShardNumbers(plan)
        self._mark_of_next_shard = plan.mark
        self._clear_pending()

    def _clear_pending(self) -> None:
        # Samples of the next shard, each with its values: key of a hook -> values at the hook.
        self._pending_samples: list[tuple[ShardSample, Mapping[HookKey, Any]]] = []
        self._pending_bytes = 0  # bytes of the values of `_pending_samples`

    def take(self, batch_bytes: int) -> None:
        """Reserves the memory for storing a batch, and waits while too much memory is reserved.

        This must be called before the samples of the batch are added.

        Args:
            batch_bytes: Number of bytes of the batch's values at all hooks.
        """
        # While a shard is stored, memory contains its arrays and, if there are any, the compressed
        # file and the encoded values.
        has_float8_hooks = any(hook.values_are_float8 for hook in self._hook_by_key.values())
        num_copies_in_memory = 1 + self.format.is_compressed + has_float8_hooks
        self.queue.take(batch_bytes * num_copies_in_memory)

    def add(
        self,
        sample: ShardSample,
        values_by_hook_key: Mapping[HookKey, Any],
        mark: Mark | None = None,
    ) -> None:
        """Adds a sample. If it does not fit into the current shard, that shard is submitted first.

        Args:
            sample: Sample without its values.
            values_by_hook_key: Values of the sample by the key of the hook, as
                `StoredHook.for_shard` returns them.
            mark: Place in the data from which the run continues when this sample and all samples
                before it are stored. None if a program with a loop of its own adds the sample.
        """
        sample_bytes = sum(
            self._hook_by_key[hook_key].bytes_of(hook_values)
            for hook_key, hook_values in values_by_hook_key.items()
        )
        if self._pending_samples and self._pending_bytes + sample_bytes > self._max_shard_bytes:
            self._submit_pending(self._shard_numbering.take())
        self._pending_samples.append((sample, values_by_hook_key))
        self._pending_bytes += sample_bytes
        self._mark_of_next_shard = self._storage_plan.mark_after(mark)

    def finish(self, complete: bool) -> None:
        """Stores the last samples as a shard, and waits until all shards are committed.

        Args:
            complete: Whether there are no more samples. A repair must replace every missing or bad
                shard whose number is smaller than the number of a good shard, even if fewer shards
                would be enough for the samples. So if `complete` is True in a repair, the samples
                that are left are stored as the last of these shards, and the shards that are still
                missing before it are stored without samples.

        Raises:
            StorageError: If a shard could not be stored. All shards before it are committed.
        """
        with suppress(StorageError):  # `queue.wait` raises the error again
            missing_shard_numbers = self._shard_numbering.take_gaps() if complete else []
            for missing_shard_number in missing_shard_numbers[:-1]:
                self._submit(Shard([], {}, {}), missing_shard_number)
            if missing_shard_numbers:
                self._submit_pending(missing_shard_numbers[-1])
            elif self._pending_samples:
                self._submit_pending(self._shard_numbering.take())
        self.queue.wait()

    def _submit_pending(self, number: int) -> None:
        """Puts a shard into the queue, with the samples that were added since the last shard.

        Args:
            number: Number of the shard.
        """
        self._pending_samples.sort(key=lambda pending: pending[0].facts.sample_idx)
        shard_samples = [shard_sample for shard_sample, _ in self._pending_samples]
        sample_values_by_hook_key: dict[HookKey, list[Any]] = {
            hook_key: [] for hook_key in self._hook_by_key
        }
        for _, values_by_hook_key in self._pending_samples:
            for hook_key in self._hook_by_key:
                sample_values_by_hook_key[hook_key].append(values_by_hook_key[hook_key])
        pending_shard = Shard(shard_samples, self._hook_by_key, sample_values_by_hook_key)
        # The samples are removed before the shard is submitted, because Ctrl-C may interrupt
        # `_submit`. If they were removed afterwards, samples could be in two shards.
        self._clear_pending()
        self._submit(pending_shard, number)

    def _submit(self, shard: Shard, number: int) -> None:
        self.queue.submit(partial(self._store, shard, self._mark_of_next_shard, number))

    def close(self, patient: bool) -> None:
        """Ends the threads that encode, store and commit shards.

        Args:
            patient: Whether to wait for the work that the threads have begun. Work that they have
                not begun is cancelled in any case.
        """
        self.queue.close(patient)
        self._storing_executor.shutdown(wait=patient, cancel_futures=True)

    def _store(
        self, shard: Shard, mark: Mark | None, number: int, queued_shard: QueuedShard[StoredShard]
    ) -> StoredShard:
        """Encodes a shard, makes the content of its files, and writes them.

        A shard without samples has no files.

        Args:
            shard: The shard. Its values are encoded here if they are not encoded yet.
            mark: Mark that the commit records, from which a later process can continue the run.
                None for the beginning of the data, or if a program with a loop of its own adds the
                samples.
            number: Number of the shard.
            queued_shard: Entry of the shard in the queue. This method sets its `phase`.

        Returns:
            A tuple of the commit, which is not written yet, and the samples of the shard.
        """
        writer_id = self._log_writer.process_id
        shard_commit = Commit(
            number, self._log_writer.storing_start_time, mark, identity=self._identity.digest
        )
        if not shard.samples:
            return shard_commit, []
        with self._serialization_slots:
            encoded_shard, encoding_errors = shard.encode(self._storing_executor)
            hook_descriptions, sums_by_hook_name = encoded_shard.compute_statistics(
                encoding_errors, self._storing_executor
            )
            packed_file = self.format.pack(encoded_shard, self._storing_executor, writer_id)
        cut_token_counts = [
            shard_sample.facts.cut for shard_sample in shard.samples if shard_sample.facts.cut > 0
        ]
        token_counts_of_samples = [len(shard_sample.positions) for shard_sample in shard.samples]
        shard_commit = replace(
            shard_commit,
            file=shard_name(number, self.format.suffix),
            unpacked=packed_file.num_uncompressed_bytes,
            first=shard.samples[0].facts.sample_idx,
            last=shard.samples[-1].facts.sample_idx,
            count=len(token_counts_of_samples),
            tokens=sum(token_counts_of_samples),
            hooks=hook_descriptions,
            cut_samples=len(cut_token_counts),
            cut_tokens=sum(cut_token_counts),
            empty_samples=token_counts_of_samples.count(0),
        )
        content_by_small_file = {
            shard_commit.statistics_file: pack_sums(sums_by_hook_name, writer_id),
            shard_commit.table_file: pack_table(shard.samples, writer_id),
        }
        queued_shard.phase = "writing"
        file_version = self._log_writer.write_file(shard_commit.file, packed_file.buffers)
        facts_by_file = {
            shard_commit.file: replace(packed_file.facts_for_commit, version=file_version)
        }
        for file_name, file_content in content_by_small_file.items():
            content_digest = hashlib.sha256(file_content).hexdigest()
            file_version = self._log_writer.write_file(file_name, [file_content])
            facts_by_file[file_name] = FileFacts(len(file_content), content_digest, file_version)
        queued_shard.phase = "committing"
        return replace(shard_commit, files=facts_by_file), shard.samples

    def _commit(self, stored_shard: StoredShard) -> None:
        """Commits a shard whose files are stored.

        Args:
            stored_shard: Commit of the shard, which is not written yet, and its samples.

        Raises:
            StorageError: If a file from which samples come has changed.
        """
        shard_commit, shard_samples = stored_shard
        self._source_check.check(shard_samples)
        shard_commit = self._log_writer.commit(
            replace(shard_commit, committed=round(time.time(), 3))
        )
        log.debug(
            "shard %d: %d samples, %d bytes",
            shard_commit.number,
            shard_commit.count,
            shard_commit.bytes,
        )
        self._on_commit()
