"""ActivationStorage: stores activations, which a program adds sample by sample or in batches.

This module checks what callers add, and opens and ends a run. Other modules do the work: a planner
(resume.py, repair.py) determines which samples are already stored, shard_writer.py gathers samples
into shards and writes the shards, and log_writer.py commits the shards and keeps other processes
from writing to the folder.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from activation_extraction.cli.flags import StorageOptions
from activation_extraction.common.errors import InputError, RunError, StorageError, reason_of
from activation_extraction.common.log import log
from activation_extraction.common.visible import counted, plain_url
from activation_extraction.store.caller_arrays import copy_array, copy_as_int32
from activation_extraction.store.folder import Folder
from activation_extraction.store.formats import DTYPES, SAFETENSORS
from activation_extraction.store.identity import Identity, RunFacts
from activation_extraction.store.local_files import check_output_dir, lock_folder, unlock
from activation_extraction.store.log_writer import LogWriter, RunDescription
from activation_extraction.store.metrics import METRICS, MetricsFile
from activation_extraction.store.repair import RepairPlanner
from activation_extraction.store.resume import (
    Planner,
    StoragePlan,
    plan_run,
    refuse_elsewhere,
    stored_after,
)
from activation_extraction.store.run_log import RunLog, check_own
from activation_extraction.store.safetensors_file import OF_TOKENS
from activation_extraction.store.shard import ShardSample
from activation_extraction.store.shard_writer import ShardWriter
from activation_extraction.store.stored_hook import HookKey
from activation_extraction.store.totals import Totals
from activation_extraction.text.batch import Batch
from activation_extraction.text.sample_facts import DocId, SampleFacts, StoredSample


class ActivationStorage:
    """Stores activations in a folder, in numbered files that are called shards.

    A program calls `add_activation` for each sample and hook. Samples are written in the
    background, and several of them share a shard. The shards are read with `ActivationDataset`. For
    example, this stores 100 samples of 20 tokens at one hook of width 64:

        hooks = {"third": "my.layers.3.output"}
        with ActivationStorage("activations", hooks) as storage:
            for sample_idx in range(storage.totals.samples, 100):
                token_ids = np.arange(20, dtype=np.int32)
                activation = np.random.rand(20, 64).astype(np.float32)  # shape (tokens, width)
                storage.add_activation("third", activation, sample_idx, "a text", token_ids)

    If `output_dir` contains an interrupted run with the same `identity`, this run is continued. Its
    stored samples, whose number is `totals.samples`, stay as they are, and are skipped if the
    program adds them again.

    A storage is a context manager. The constructor only reads. Nothing is written before `open`,
    which is called on entering the context, or by the first sample without a context. Leaving the
    context commits all complete samples, also after an exception or Ctrl-C. Without an exception,
    the `status` in metadata.json is then "complete", and no more samples can be added. After an
    exception it is "interrupted", or "failed" if a shard could not be committed, and the run can be
    continued.

    Args:
        output_dir: Local folder for all files of the run. It is created if it does not exist.
        hooks: Key of a hook -> full name of the hook. A key is an integer, such as the number of a
            layer, or any text. `add_activation` and the shards refer to the hook by its key. A
            sample is complete when it has an activation for every key.
        options: Options of the shards, such as their format and size. None for the defaults.
        identity: Settings that decide the content of the shards, except for the hooks. A run can
            only be continued with the same settings. None for the defaults.
        remote: Folder in a bucket to which the shards are written from memory. metadata.json and
            metrics.jsonl are written to both folders; shards are also written to `output_dir`
            unless `options.delete_local_after_upload` is set. None to write all files to
            `output_dir` only.
        facts: Further facts about the run, which metadata.json records. None to record none.
        repair: Whether to repair a stored run (repair.py). The constructor then reads every shard,
            to find damaged and missing ones. `open` replaces the JSON files of these shards by
            reservations, so that the shards no longer exist. The program must add all samples
            again, in the same order. The samples of the damaged and missing shards are stored
            again, and the other samples are skipped.
        on_wait: Function without arguments that is called repeatedly while adding a sample waits
            for free memory.

    Attributes:
        folder: Path of the local folder.
        options: Options of the shards.
        plan: Shards that earlier processes have stored, and the place in the data where the run
            goes on.
        new_commits: Commits of the shards that this process has stored.
        waited: Phase of a shard ("packing", "writing" or "committing") -> seconds for which adding
            samples waited for free memory while the oldest shard that was not yet committed was in
            this phase.
        format: Format of the shard files.

    Raises:
        InputError: If `output_dir` is not a local folder or contains another run, the shard format
            is unknown, or `identity.activation_dtype` is "float8" and the format is not
            safetensors.
        StorageError: If a shard could not be stored. The first call after the failure raises this.
        LostError: If another process has begun to write to the same folder. This is an InputError.
    """

    def __init__(
        self,
        output_dir: str | Path,
        hooks: Mapping[HookKey, str],
        options: StorageOptions | None = None,
        identity: Identity | None = None,
        remote: Folder | None = None,
        facts: RunFacts | None = None,
        repair: bool = False,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        if re.match(r"[A-Za-z][\w+.-]*:/", str(output_dir)):
            raise InputError(
                f"output_dir {plain_url(str(output_dir))}: is a URL, expected a local folder; "
                "`remote` takes a folder in a bucket"
            )
        self.folder = Path(output_dir)
        options = options or StorageOptions()
        self.options = options
        if repair and options.overwrite:
            raise InputError(f"{self.folder}: overwrite and repair exclude each other; give one")
        run_facts = facts or RunFacts()
        self._identity = replace(identity or Identity(), hooks=tuple(hooks.values()))
        self._hook_by_key = {
            hook_key: self._identity.stored_hook(
                hook_key, hook_name, run_facts.facts_by_hook_key.get(hook_key, {}).get("width", 0)
            )
            for hook_key, hook_name in hooks.items()
        }
        tensor_names = set(OF_TOKENS)
        for hook in self._hook_by_key.values():
            if not hook.can_be_in_pickles and options.shard_format != "safetensors":
                raise InputError(
                    f"activation_dtype {self._identity.activation_dtype}: needs shard_format "
                    f"safetensors, found {options.shard_format!r:.40}"
                )
            for tensor_name in tensor_names.intersection(hook.tensor_names):
                raise InputError(
                    f"hook {hook.name}: shards already have another tensor named "
                    f"{tensor_name}; give the hook another name"
                )
            tensor_names.update(hook.tensor_names)
        check_output_dir(self.folder, METRICS)
        if remote is not None and options.shard_bytes > (remote.max_file_bytes or math.inf):
            raise InputError(
                f"--shard_size_gb {options.shard_size_gb:g}: {remote.url} takes at most "
                f"{remote.max_file_bytes:,} bytes in one request"
            )
        local_folder = Folder(str(self.folder))
        run_description = RunDescription(self._identity, dict(hooks), options.limits, run_facts)
        if remote is None:
            self._log_writer = LogWriter(local_folder, run_description)
        else:
            keeps_local_shards = not options.delete_local_after_upload
            self._log_writer = LogWriter(remote, run_description, local_folder, keeps_local_shards)
        self._metrics_file = MetricsFile(self.folder, remote)
        self._shard_writer = ShardWriter(
            self._log_writer,
            self._hook_by_key,
            self._identity,
            options,
            run_facts.sources,
            on_wait,
            self._metrics_file.upload_if_due,
        )
        self.new_commits = self._log_writer.new_commits
        self.waited = self._shard_writer.queue.waited_seconds_by_phase
        self.format = self._shard_writer.format
        self._planner: Planner = partial(plan_run, self._identity, options.limits)
        if repair:
            self._planner = RepairPlanner(self.destination, self._identity, options.limits)
        if options.overwrite:
            for checked_folder in {local_folder, self.destination}:
                check_own(checked_folder)
            self._follow(StoragePlan())
        else:
            if remote is not None:
                refuse_elsewhere(RunLog.read(local_folder), remote.url)
            self._follow(self._planner(RunLog.read(self.destination)))
        # Samples that still lack an activation at a hook, with the activations that they have, by
        # sample number.
        self._incomplete_sample_by_number: dict[
            int, tuple[ShardSample, dict[HookKey, np.ndarray]]
        ] = {}
        # Number of the last sample that has all its activations; -1 for no such sample.
        self._last_complete_sample_number = -1
        # Descriptor of the locked folder; None if this process has no lock.
        self._lock_descriptor: int | None = None
        # "planned": the stored shards are known, and this storage has not written anything yet.
        # "open": this process owns the folder.
        # "closed": this process has released the folder, and the storage cannot be opened again.
        self._state: Literal["planned", "open", "closed"] = "planned"

    def _follow(self, plan: StoragePlan) -> None:
        self.plan = plan
        self._log_writer.follow(plan)
        hook_descriptions_of_last_shard = plan.commits[-1].hooks if plan.commits else []
        # Width and dtype of the stored samples, by the key of the hook. New samples must have the
        # same width and dtype.
        self._width_and_dtype_by_key = {
            hook_description["key"]: (hook_description["width"], hook_description["dtype"])
            for hook_description in hook_descriptions_of_last_shard
        }
        self._sample_by_idx_after_mark: dict[int, StoredSample] | None = None
        self._stored_sample_count = sum(commit.count for commit in plan.commits)
        # The sample number that `add_activation` expects next. In a repair, the program adds all
        # samples again, from number 0.
        self._next_sample_number = self._stored_sample_count if plan.repair is None else 0
        self._shard_writer.follow(plan)

    @property
    def destination(self) -> Folder:
        """The folder that contains the committed shards.

        This is the folder in the bucket if there is one, otherwise the local folder.
        """
        return self._log_writer.folder

    @property
    def stored_after_mark(self) -> dict[int, StoredSample]:
        """The stored samples that come again when the data is read from `plan.mark`.

        A run goes on at this mark, but shards may contain samples after it, because samples are
        stored in another order than they are read. The keys are the numbers of the samples
        (`sample_idx`). Some samples before the mark may be included, too.

        Raises:
            InputError: If a sample before the mark is not stored, or a table of samples is damaged.
        """
        if self._sample_by_idx_after_mark is None:
            self._sample_by_idx_after_mark = stored_after(
                self.destination, self.plan.commits, self.plan.mark, self._identity
            )
        return self._sample_by_idx_after_mark

    @property
    def totals(self) -> Totals:
        """The totals over all stored shards of the run, including those of earlier processes."""
        return self._log_writer.totals

    @property
    def complete(self) -> bool:
        """Whether earlier processes have completed the run, so that no sample can be added."""
        return self.plan.is_run_complete

    @property
    def limits(self) -> dict[str, int | None]:
        """The largest numbers of samples and of tokens to store; None for no limit.

        The keys are "max_samples" and "max_tokens". During a repair that replaces missing or bad
        shards, these are the limits that metadata.json records.
        """
        if self.plan.repair is None:
            return self.options.limits
        return self.plan.repair.limits(self.options.limits)

    def open(self) -> None:
        """Makes this process the owner of the folder, the only process that may write to it.

        A new run begins in the folder if it is empty or `options.overwrite` is set; otherwise the
        stored run is continued. `plan` is made again, because another process may have written to
        the folder since the constructor read it. Nothing is done if the storage is open already, or
        if the stored run is complete and needs no repair.

        Raises:
            InputError: If the folder contains another run or a damaged one.
            RunError: If another process is writing to the folder.
            StorageError: If a file cannot be written.
        """
        if self._state != "planned" or self.plan.is_run_up_to_date:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_descriptor = lock_folder(self.folder)
            if self._lock_descriptor is None:
                log.warning(
                    "%s: its file system has no locks, so nothing prevents two processes from "
                    "writing there; see to it that only one does",
                    self.folder,
                )
            self._follow(self._log_writer.take_over(self._planner, self.options.overwrite))
            if self.plan.is_run_up_to_date:
                return self._unlock()
            self._state = "open"
            self._metrics_file.begin(anew=self.options.overwrite)
        except OSError as error:
            raise StorageError(f"{self.folder}: {reason_of(error)}") from error

    def __enter__(self) -> "ActivationStorage":
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.finalize(complete=error is None)
        except StorageError:
            if not isinstance(error, StorageError):
                raise

    def gauges(self) -> dict[str, Any]:
        """Returns metrics about the stored and the waiting shards of the run, by name.

        Returns:
            The metrics of `ShardQueue.gauges`, and these:
            "shards_stored": Number of committed shards of the run.
            "bytes_stored": Total size of the files of activations in these shards, in bytes.
            "upload_retries_since_start": Number of failed attempts to send a request to the folder
            (`destination`) since this process started. An attempt counts if it failed for a
            temporary reason, even if a later attempt succeeded.
        """
        return {
            "shards_stored": self.totals.shards,
            "bytes_stored": self.totals.bytes,
            **self._shard_writer.queue.gauges(),
            "upload_retries_since_start": self.destination.num_failed_attempts,
        }

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Appends a line to metrics.jsonl, which describes the speed of the run.

        Nothing is appended while a repair stores missing or bad shards again, because this work is
        not part of the run's speed.

        Args:
            metrics: Metrics by name, as JSON values.

        Raises:
            StorageError: If the file cannot be written.
        """
        if not self.plan.shard_numbers_to_store_again:
            self._metrics_file.append(metrics)

    def add_batch(self, batch: Batch, activations: Mapping[HookKey, np.ndarray]) -> None:
        """Adds the samples of a batch, with their activations at all hooks.

        `add_activation` is for programs with a loop of their own; this method is for batches of
        B rows of T tokens, which the packing of a data set makes (text/packing.py). It may wait
        until enough memory is free. An array is not copied, so the caller must not change it later.

        Args:
            batch: Batch whose samples are added. The batches must come in the order in which they
                were packed, and must not contain samples that are stored already
                (`stored_after_mark`).
            activations: Activations of the batch, by the key of the hook. An array has the shape
                (B, T, width) if all tokens are stored. If `batch.kept_mask` selects the tokens to
                store, an array contains only these, and has the shape (tokens, width). At hooks
                with codes, the arrays contain the records of the codes, int32 (common/codes.py).

        Raises:
            StorageError: If a shard could not be stored.
            LostError: If another process has begun to write to the folder.
            ValueError: If the run is already complete.
        """
        self.open()
        self._shard_writer.take(sum(batch_array.nbytes for batch_array in activations.values()))
        # `index_into_activations` is a tuple of a row and a slice if the batch keeps all tokens,
        # otherwise a slice (see `Batch.kept_tokens`).
        for placed_sample, (index_into_activations, kept_positions) in zip(
            batch.samples, batch.kept_tokens(), strict=True
        ):
            packed_sample = placed_sample.sample
            self._check_takes_samples(packed_sample.facts.sample_idx)
            kept_values_by_label_name = {
                label_name: label_values[kept_positions]
                for label_name, label_values in packed_sample.token_labels_by_name.items()
            }
            shard_sample = ShardSample(
                packed_sample.facts,
                packed_sample.token_ids[kept_positions],
                kept_positions,
                kept_values_by_label_name,
            )
            values_by_hook_key = {}
            for hook_key, hook in self._hook_by_key.items():
                values_by_hook_key[hook_key] = hook.for_shard(
                    activations[hook_key][index_into_activations]
                )
            self._shard_writer.add(shard_sample, values_by_hook_key, placed_sample.mark)

    def _check_takes_samples(self, sample_idx: int) -> None:
        if self.complete:
            raise ValueError(
                f"sample {sample_idx}: {self.folder} holds a complete run of "
                f"{counted(self.totals.samples, 'sample')}; give another folder, or overwrite it"
            )

    def add_activation(
        self,
        layer_idx: HookKey,
        activation: np.ndarray,
        sample_idx: int,
        text_preview: str,
        token_ids: np.ndarray | None = None,
        doc_id: DocId = None,
        row: Mapping[str, Any] | None = None,
        cut: int = 0,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """Adds the activation of one sample at one hook.

        Samples are numbered 0, 1, 2, ... without gaps. Call this once for every hook of a sample;
        the sample is stored when it has all its activations. The parameters from `text_preview` on
        describe the sample, so only the first call for a sample needs them, and later calls ignore
        them. All arguments are copied. Arrays may belong to NumPy, to JAX or, on the CPU, to
        PyTorch. The call may wait until enough memory is free.

        A program that continues a run may start with sample number `totals.samples`, or add all
        samples again: samples that are already stored are recognised by their number and skipped.
        In a repair, the program must add all samples again, from number 0.

        Args:
            layer_idx: Key of the hook.
            activation: Activation at the hook, (tokens, width). Its dtype is bfloat16 or a NumPy
                dtype for real numbers of up to 64 bits.
            sample_idx: Number of the sample.
            text_preview: Beginning of the sample's text, for people who look at the table of
                samples.
            token_ids: Token ids of the sample, int32 (tokens,). None is possible in pickles only,
                and `ActivationDataset` cannot read such a run.
            doc_id: Id of the document in its data set. None if it has none.
            row: Position of the document in its data set, as a JSON object. None to store none.
            cut: Number of tokens that were cut off at the end of the document.
            columns: Further values to store with the sample, by name, as a JSON object. None to
                store none.

        Raises:
            KeyError: If the run has no hook with the key `layer_idx`.
            ValueError: If `sample_idx` is not the next number, or this activation was already
                added.
            ValueError: If the run is already complete.
            ValueError: If the activation is not two-dimensional, its width or dtype is not the same
                as in the samples before, or its number of tokens not the same as at the sample's
                first hook.
            ValueError: If token ids are missing in safetensors, or are not integers that fit int32.
            StorageError: If a shard could not be stored.
            LostError: If another process has begun to write to the folder.
        """
        self.open()
        if layer_idx not in self._hook_by_key or not self._hook_by_key[layer_idx].values_are_array:
            raise KeyError(f"hook {layer_idx!r} is not one of {list(self._hook_by_key)}")
        sample_number = index(sample_idx)
        if self._is_stored(sample_number):
            self._next_sample_number = max(self._next_sample_number, sample_number + 1)
            return
        self._check_takes_samples(sample_number)
        sample_and_hook_phrase = f"sample {sample_number}, hook {layer_idx!r}"
        try:
            copied_activations = copy_array(activation)
            copied_token_ids = None if token_ids is None else copy_as_int32(token_ids)
        except ValueError as error:
            raise ValueError(f"{sample_and_hook_phrase}: {error}") from error
        for activation_problem in self._problems(
            layer_idx, copied_activations, copied_token_ids, sample_number
        ):
            raise ValueError(f"{sample_and_hook_phrase}: {activation_problem}")
        if sample_number not in self._incomplete_sample_by_number:
            token_positions = np.arange(len(copied_activations), dtype=np.int32)
            sample_facts = SampleFacts(
                sample_number,
                deepcopy(row),
                doc_id,
                text_preview or "",
                cut,
                deepcopy(columns or {}),
            )
            self._incomplete_sample_by_number[sample_number] = (
                ShardSample(sample_facts, copied_token_ids, token_positions),
                {},
            )
            self._next_sample_number += 1
        shard_sample, activations_by_hook_key = self._incomplete_sample_by_number[sample_number]
        activations_by_hook_key[layer_idx] = copied_activations
        if len(activations_by_hook_key) == len(self._hook_by_key):
            del self._incomplete_sample_by_number[sample_number]
            self._shard_writer.take(
                sum(
                    hook_activations.nbytes for hook_activations in activations_by_hook_key.values()
                )
            )
            self._last_complete_sample_number = sample_number
            self._shard_writer.add(shard_sample, activations_by_hook_key)

    def _is_stored(self, sample_number: int) -> bool:
        """Returns whether an earlier process has stored the sample with this number.

        A sample is stored if its number is smaller than the number of stored samples, because a run
        without damage stores its samples without gaps. In a repair, samples between the stored ones
        are missing, so the tables of samples are read instead.
        """
        if self.plan.repair is not None:
            return (
                sample_number <= self._next_sample_number
                and sample_number in self.stored_after_mark
            )
        return 0 <= sample_number < self._stored_sample_count

    def _problems(
        self,
        key: HookKey,
        activations: np.ndarray,
        token_ids: np.ndarray | None,
        sample_number: int,
    ) -> Iterator[str]:
        """Yields the reasons why a sample's activations at one hook cannot be stored.

        Only the first reason is certain to be true, because each check assumes that the checks
        before it passed.

        Args:
            key: Key of the hook.
            activations: Activations that are added, which should have the shape (tokens, width).
            token_ids: Token ids of the sample; None if there are none.
            sample_number: Number of the sample.
        """
        activation_shape = activations.shape
        dtype_name = activations.dtype.name
        if (
            len(activation_shape) != 2
            or not activation_shape[1]
            or (token_ids is not None and token_ids.shape != activation_shape[:1])
        ):
            yield (
                f"the activation has shape {activation_shape}, expected (tokens, width) with as "
                "many tokens as there are token ids"
            )
        if token_ids is None and self.format is SAFETENSORS:
            yield "has no token ids, and safetensors need them"
        if token_ids is not None and token_ids.dtype != np.int32:
            yield f"token ids of dtype {token_ids.dtype}, expected int32"
        incomplete_sample, activations_by_hook_key = self._incomplete_sample_by_number.get(
            sample_number, (None, {})
        )
        if key in activations_by_hook_key or sample_number <= self._last_complete_sample_number:
            yield "given twice or out of order"
        if incomplete_sample is None and sample_number != self._next_sample_number:
            yield f"expected sample {self._next_sample_number} next: samples are 0, 1, 2, ..."
        if (
            incomplete_sample is not None
            and len(incomplete_sample.positions) != activation_shape[0]
        ):
            expected_count_phrase = counted(len(incomplete_sample.positions), "token")
            yield f"{activation_shape[0]}, expected {expected_count_phrase} as at other hooks"
        if dtype_name not in DTYPES:
            yield f"dtype {dtype_name}, expected one of {', '.join(sorted(DTYPES))}"
        hook = self._hook_by_key[key]
        stored_dtype_name = hook.stored_as(dtype_name)
        # The first sample of a run determines the width and, unless it is a setting, the dtype.
        width_and_dtype_if_first_sample = (
            activation_shape[1],
            hook.stored_dtype_name or stored_dtype_name,
        )
        expected_width_and_dtype = self._width_and_dtype_by_key.get(
            key, width_and_dtype_if_first_sample
        )
        if (activation_shape[1], stored_dtype_name) != expected_width_and_dtype:
            expected_width, expected_dtype = expected_width_and_dtype
            yield (
                f"width {activation_shape[1]}, dtype {stored_dtype_name}, expected width "
                f"{expected_width}, dtype {expected_dtype}, as in the rest of the run"
            )
        self._width_and_dtype_by_key[key] = expected_width_and_dtype

    def finalize(self, complete: bool = True, skipped_rows: int = 0, empty_rows: int = 0) -> None:
        """Commits all complete samples, writes metadata.json, and closes the storage.

        Returns when everything is stored. A second call does nothing.

        Args:
            complete: Whether the run is complete, so that no more samples can be added. False if
                the run may be continued.
            skipped_rows: Number of rows of the data set that were skipped. It is ignored if the
                marks of the shards record a larger number.
            empty_rows: Number of rows of the data set without text. It is ignored if the marks of
                the shards record a larger number.

        Raises:
            ValueError: If `complete` is True, and a sample lacks an activation at a hook. Also if
                `complete` is True, the storage was opened to repair damaged and missing shards, and
                the program has not added all samples of the run again. All complete samples are
                committed nevertheless.
            StorageError: If a file could not be written.
        """
        if self._state == "planned":
            self.open()
        if self._state != "open":
            return self.close()
        missing_sample_count = 0
        if complete and self.plan.repair is not None:
            missing_sample_count = self.plan.repair.samples_missing(self._next_sample_number)
        is_run_complete = (complete and not missing_sample_count) or self.plan.is_run_complete
        self.totals.update_row_counts(skipped_rows, empty_rows)
        self._state = "closed"
        is_storing_finished = False
        try:
            self._shard_writer.finish(is_run_complete)
            self._log_writer.finish(is_run_complete)
            self._metrics_file.upload()
            is_storing_finished = True
        except OSError as error:
            raise StorageError(f"{self.folder}: {reason_of(error)}") from error
        except RunError:
            with suppress(OSError, RunError, InputError):
                self._log_writer.write_metadata("failed", upload=False)
            raise
        finally:
            # If the shards could not be stored, or after a second Ctrl-C, the program does not wait
            # for uploads.
            self.close(patient=is_storing_finished)
        if is_run_complete and self._incomplete_sample_by_number:
            sample_number, (_, activations_by_hook_key) = next(
                iter(self._incomplete_sample_by_number.items())
            )
            missing_keys = [
                hook_key
                for hook_key in self._hook_by_key
                if hook_key not in activations_by_hook_key
            ]
            raise ValueError(
                f"sample {sample_number} has no activation for {missing_keys}; it is not stored"
            )
        if missing_sample_count:
            raise ValueError(
                f"{self.folder}: {counted(missing_sample_count, 'sample')} not given again; a "
                "repair needs all samples from 0 on, and skips those that are stored"
            )

    def close(self, patient: bool = False) -> None:
        """Releases the folder and ends the threads.

        Args:
            patient: Whether to wait for the work that the threads have begun. Work that they have
                not begun is cancelled in any case, and shards that are not committed are lost.
        """
        self._state = "closed"
        self._shard_writer.close(patient)
        self._unlock()

    def _unlock(self) -> None:
        unlock(self._lock_descriptor)
        self._lock_descriptor = None
