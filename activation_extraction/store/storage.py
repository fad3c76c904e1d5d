"""ActivationStorage: stores activations that are added in samples or in batches.

A planner (resume.py) finds out what is stored already; shard_writer.py gathers samples into shards
and stores these; log_writer.py commits them, and keeps other processes out.
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
from activation_extraction.store.hook_values import Key
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
from activation_extraction.store.totals import Totals
from activation_extraction.text.batch import Batch
from activation_extraction.text.sample_facts import DocId, SampleFacts, StoredSample


class ActivationStorage:
    """Writes activations to shards in a folder. It is a context manager.

    A stored run with the same `identity` is continued. Its stored samples stay as they are, and are
    skipped if a program adds them again.

    The constructor only reads. Nothing is written before `open`, which is called on entering the
    context, or by the first sample. Leaving the context commits the complete samples, even after an
    exception or Ctrl-C; metadata.json then says "interrupted", or "failed" if a shard could not be
    committed. Without an exception the run is complete, and takes no more samples.

    Args:
        output_dir: The local folder. It need not exist.
        hooks: Full names of the hooks by key (the layer number or hook name that the shards use). A
            sample is complete when it has an activation for every key.
        options: How the activations are stored; None for the defaults.
        identity: Settings that decide the content of the shards, except for the hooks. None for the
            defaults. A run continues only with the same settings.
        remote: A folder in a bucket. Shards are then stored there, from memory, and locally only
            without `delete_local_after_upload`; metadata.json and metrics.jsonl are in both
            folders. None to store everything in `output_dir`.
        facts: Further facts for metadata.json. None to add none.
        repair: Whether to repair a stored run (repair.py). The constructor then reads every
            shard to find damaged and missing ones, and `open` withdraws these. Give all samples
            again, in the same order: those that are stored are skipped, and the lost ones are
            stored.
        on_wait: Function that is called again and again while adding samples waits for room in
            memory.

    Attributes:
        folder: The local folder.
        options: How the activations are stored.
        plan: What earlier processes have stored, and where the run goes on: `plan.mark` is the
            place in the data.
        made: Commits of the shards that this process has stored.
        waited: Seconds for which the memory was full, by the phase of storing (packing, writing,
            committing) that the oldest shard was in.
        format: Format of the shard files.

    Raises:
        InputError: `output_dir` is not a local folder or holds another run, the shard format
            is unknown, or activations in float8 are not to be stored in safetensors.
        StorageError: A shard could not be stored. The next call after that raises this.
        LostError: Another process has begun to write to the same folder; an InputError.
    """

    def __init__(
        self,
        output_dir: str | Path,
        hooks: Mapping[Key, str],
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
        self.options = options = options or StorageOptions()
        if repair and options.overwrite:
            raise InputError(f"{self.folder}: overwrite and repair exclude each other; give one")
        facts = facts or RunFacts()
        self._identity = replace(identity or Identity(), hooks=tuple(hooks.values()))
        self._hooks = {
            key: self._identity.hook_values(key, name, facts.hooks.get(key, {}).get("width", 0))
            for key, name in hooks.items()
        }
        taken = set(OF_TOKENS)
        for hook in self._hooks.values():
            if not hook.in_pickles and options.shard_format != "safetensors":
                raise InputError(
                    f"activation_dtype {self._identity.activation_dtype}: needs shard_format "
                    f"safetensors, found {options.shard_format!r:.40}"
                )
            for clash in taken.intersection(hook.tensor_names):
                raise InputError(f"hook {hook.name}: a shard calls something else {clash}")
            taken.update(hook.tensor_names)
        check_output_dir(self.folder, METRICS)
        if remote is not None and options.shard_bytes > (remote.largest or math.inf):
            raise InputError(
                f"--shard_size_gb {options.shard_size_gb:g}: {remote.url} takes at most "
                f"{remote.largest:,} bytes in one request"
            )
        local = Folder(str(self.folder))
        description = RunDescription(self._identity, dict(hooks), options.limits, facts)
        if remote is None:
            self._log = LogWriter(local, description)
        else:
            keeps_shards = not options.delete_local_after_upload
            self._log = LogWriter(remote, description, local, keeps_shards)
        self._metrics = MetricsFile(self.folder, remote)
        self._writer = ShardWriter(
            self._log,
            self._hooks,
            self._identity,
            options,
            facts.sources,
            on_wait,
            self._metrics.upload_if_due,
        )
        self.made = self._log.made
        self.waited = self._writer.queue.waited
        self.format = self._writer.format
        self._planner: Planner = partial(plan_run, self._identity, options.limits)
        if repair:
            self._planner = RepairPlanner(self.destination, self._identity, options.limits)
        if options.overwrite:
            for folder in {local, self.destination}:
                check_own(folder)
            self._follow(StoragePlan())
        else:
            if remote is not None:
                refuse_elsewhere(RunLog.read(local), remote.url)
            self._follow(self._planner(RunLog.read(self.destination)))
        self._incomplete: dict[int, tuple[ShardSample, dict[Key, np.ndarray]]] = {}
        self._last = -1  # the last sample that `add_activation` has completed
        self._lock: int | None = None
        # planned: the stored shards are known, and nothing has been written; open: this process
        # owns the folder; closed: it has given the folder up, and cannot open it again.
        self._state: Literal["planned", "open", "closed"] = "planned"

    def _follow(self, plan: StoragePlan) -> None:
        self.plan = plan
        self._log.follow(plan)
        hooks = plan.commits[-1].hooks if plan.commits else []
        # The width and dtype at each hook, as in the samples so far.
        self._forms = {hook["key"]: (hook["width"], hook["dtype"]) for hook in hooks}
        self._after_mark: dict[int, StoredSample] | None = None
        self._stored_samples = sum(commit.count for commit in plan.commits)
        # The number that `add_activation` expects next. A repair gets all samples again.
        self._next_sample = self._stored_samples if plan.repair is None else 0
        self._writer.follow(plan)

    @property
    def destination(self) -> Folder:
        """The folder that the shards are committed to: the one in the bucket, if there is one."""
        return self._log.folder

    @property
    def stored_after_mark(self) -> dict[int, StoredSample]:
        """The stored samples after the mark, by `sample_idx`, and perhaps some before it.

        Raises:
            InputError: A sample before the mark is not stored, or the tables are damaged.
        """
        if self._after_mark is None:
            self._after_mark = stored_after(
                self.destination, self.plan.commits, self.plan.mark, self._identity
            )
        return self._after_mark

    @property
    def totals(self) -> Totals:
        """The totals of everything that is stored, also by earlier runs."""
        return self._log.totals

    @property
    def complete(self) -> bool:
        """Whether earlier runs have stored everything."""
        return self.plan.complete

    @property
    def limits(self) -> dict[str, int | None]:
        """The most samples and tokens to store; in a repair, those of the run itself."""
        limits = self.options.limits
        return limits if self.plan.repair is None else self.plan.repair.limits(limits)

    def open(self) -> None:
        """Takes ownership of the folder. If `options.overwrite` is set, a new run begins there.

        Does nothing if the folder is open already, or if nothing is left to do. `plan` may change,
        because another process may have written in the meantime.

        Raises:
            InputError: Nothing may be added to what is stored there now.
            RunError: Another process is writing to the folder.
            StorageError: A file cannot be written.
        """
        if self._state != "planned" or self.plan.up_to_date:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.folder)
            if self._lock is None:
                log.warning(
                    "%s: its file system has no locks, so nothing prevents two processes from "
                    "writing there; see to it that only one does",
                    self.folder,
                )
            self._follow(self._log.take_over(self._planner, self.options.overwrite))
            if self.plan.up_to_date:
                return self._unlock()
            self._state = "open"
            self._metrics.begin(anew=self.options.overwrite)
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
        """Returns metrics about the shards of the run, stored or not, by name.

        The names of counts of this process alone end in `since_start`.
        """
        return {
            "shards_stored": self.totals.shards,
            "bytes_stored": self.totals.bytes,
            **self._writer.queue.gauges(),
            "upload_retries_since_start": self.destination.retries,
        }

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Appends a line to metrics.jsonl.

        A repair that fills gaps adds nothing, because the file describes the run itself.

        Args:
            metrics: Metrics by name, as JSON values.

        Raises:
            StorageError: The file cannot be written.
        """
        if not self.plan.gaps:
            self._metrics.append(metrics)

    def add_batch(self, batch: Batch, activations: Mapping[Key, np.ndarray]) -> None:
        """Adds the samples of a batch.

        Args:
            batch: The batch. Samples must come in the order of the batches, without those of
                `stored_after_mark`.
            activations: Arrays (B, T, width), or (tokens, width) for the batch's kept tokens, by
                the key of the hook. They are kept without a copy until their shard is written,
                except for codes (common/codes.py), which come as records and are kept as sparse
                rows.

        Raises:
            StorageError: Something has failed in the background.
        """
        self.open()
        self._writer.take(sum(values.nbytes for values in activations.values()))
        for placed, (where, positions) in zip(batch.samples, batch.kept_tokens(), strict=True):
            sample = placed.sample
            self._check_open(sample.facts.sample_idx)
            labels = {name: values[positions] for name, values in sample.labels.items()}
            stored = ShardSample(sample.facts, sample.token_ids[positions], positions, labels)
            values = {
                key: hook.for_shard(activations[key][where]) for key, hook in self._hooks.items()
            }
            self._writer.add(stored, values, placed.mark)

    def _check_open(self, sample_idx: int) -> None:
        if self.complete:
            raise ValueError(
                f"sample {sample_idx}: {self.folder} holds a complete run of "
                f"{counted(self.totals.samples, 'sample')}; give another folder, or overwrite it"
            )

    def add_activation(
        self,
        layer_idx: Key,
        activation: np.ndarray,
        sample_idx: int,
        text_preview: str,
        token_ids: np.ndarray | None = None,
        doc_id: DocId = None,
        row: Mapping[str, Any] | None = None,
        cut: int = 0,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """Adds one sample's activation at one hook.

        Samples are numbered 0, 1, 2, ... without gaps, and each has an activation at every hook. A
        program that continues a run may give all samples again, or go on with the number of those
        that are stored (`totals.samples`): a sample that is stored is skipped, by its number alone.
        A repair needs all samples from 0 on. All arguments are copied. Arrays may be NumPy's, JAX's
        or, on the CPU, PyTorch's. What follows `sample_idx` is taken from the sample's first hook.

        Args:
            layer_idx: The key of the hook.
            activation: The activation, (tokens, width).
            sample_idx: The number of the sample.
            text_preview: The beginning of the text.
            token_ids: The ids of the tokens, (tokens,), int32. Safetensors need them, and so does
                ActivationDataset; None for pickles without them.
            doc_id: The id of the document.
            row: Where the sample comes from, as a JSON object.
            cut: How many tokens of the document were left out at its end.
            columns: Values to keep with the sample, by name, as a JSON object.

        Raises:
            KeyError: The hook is unknown.
            ValueError: The sample has another number than the next one, was given twice, or follows
                a complete run; the activation is not two-dimensional, has another width or
                dtype than those before it, or another number of tokens than at the sample's first
                hook; or token ids are missing that safetensors need.
            StorageError: Something has failed in the background.
        """
        self.open()
        if layer_idx not in self._hooks or not self._hooks[layer_idx].is_array:
            raise KeyError(f"hook {layer_idx!r} is not one of {list(self._hooks)}")
        number = index(sample_idx)
        if self._is_stored(number):
            self._next_sample = max(self._next_sample, number + 1)
            return
        self._check_open(number)
        where = f"sample {number}, hook {layer_idx!r}"
        try:
            activation = copy_array(activation)
            ids = None if token_ids is None else copy_as_int32(token_ids)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        for problem in self._problems(layer_idx, activation, ids, number):
            raise ValueError(f"{where}: {problem}")
        if number not in self._incomplete:
            positions = np.arange(len(activation), dtype=np.int32)
            facts = SampleFacts(
                number, deepcopy(row), doc_id, text_preview or "", cut, deepcopy(columns or {})
            )
            self._incomplete[number] = ShardSample(facts, ids, positions), {}
            self._next_sample += 1
        sample, values = self._incomplete[number]
        values[layer_idx] = activation
        if len(values) == len(self._hooks):
            del self._incomplete[number]
            self._writer.take(sum(array.nbytes for array in values.values()))
            self._last = number
            self._writer.add(sample, values)

    def _is_stored(self, number: int) -> bool:
        """Returns whether an earlier process has stored a sample that `add_activation` gets.

        A run without damage stores its samples without gaps, so the number of stored samples
        decides, and no table is read. A repair reads the tables, because lost shards leave gaps,
        which it fills in the order of the samples.
        """
        if self.plan.repair is not None:
            return number <= self._next_sample and number in self.stored_after_mark
        return 0 <= number < self._stored_samples

    def _problems(
        self, key: Key, activation: np.ndarray, ids: np.ndarray | None, number: int
    ) -> Iterator[str]:
        """Yields the reasons why a sample's activation cannot be stored.

        A reason is only meaningful if there is none before it.
        """
        shape, dtype = activation.shape, activation.dtype.name
        if len(shape) != 2 or not shape[1] or (ids is not None and ids.shape != shape[:1]):
            yield (
                f"the activation has shape {shape}, expected (tokens, width) with as many "
                "tokens as there are token ids"
            )
        if ids is None and self.format is SAFETENSORS:
            yield "has no token ids, and safetensors need them"
        if ids is not None and ids.dtype != np.int32:
            yield f"token ids of dtype {ids.dtype}, expected int32"
        sample, values = self._incomplete.get(number, (None, {}))
        if key in values or number <= self._last:
            yield "given twice or out of order"
        if sample is None and number != self._next_sample:
            yield f"expected sample {self._next_sample} next: samples are 0, 1, 2, ..."
        if sample is not None and len(sample.positions) != shape[0]:
            expected = counted(len(sample.positions), "token")
            yield f"{shape[0]}, expected {expected} as at other hooks"
        if dtype not in DTYPES:
            yield f"dtype {dtype}, expected one of {', '.join(sorted(DTYPES))}"
        hook = self._hooks[key]
        dtype = hook.stored_as(dtype)
        due = self._forms.get(key, (shape[1], hook.stored_dtype or dtype))
        if (shape[1], dtype) != due:
            yield (
                f"width {shape[1]}, dtype {dtype}, expected width {due[0]}, dtype {due[1]}, as in "
                "the rest of the run"
            )
        self._forms[key] = due

    def finalize(self, complete: bool = True, skipped_rows: int = 0, empty_rows: int = 0) -> None:
        """Commits every complete sample and metadata.json, and waits until they are stored.

        A second call does nothing.

        Args:
            complete: Whether no more samples are to come. False if the run ends before that.
            skipped_rows: Number of rows of the data that were skipped, if larger than in the marks.
            empty_rows: Number of rows of the data without text, if larger than in the marks.

        Raises:
            ValueError: A sample of a complete run lacks hooks, or a program with a loop of its own
                has not given all samples again that a repair needs, so that the repair is not
                finished. All other samples are committed before.
            StorageError: Something could not be stored.
        """
        if self._state == "planned":
            self.open()
        if self._state != "open":
            return self.close()
        missing_samples = 0
        if complete and self.plan.repair is not None:
            missing_samples = self.plan.repair.samples_missing(self._next_sample)
        complete = (complete and not missing_samples) or self.plan.complete
        self.totals.count_rows(skipped_rows, empty_rows)
        self._state = "closed"
        done = False
        try:
            self._writer.finish(complete)
            self._log.finish(complete)
            self._metrics.upload()
            done = True
        except OSError as error:
            raise StorageError(f"{self.folder}: {reason_of(error)}") from error
        except RunError:
            with suppress(OSError, RunError, InputError):
                self._log.write_metadata("failed", upload=False)
            raise
        finally:  # after a second Ctrl-C or a failure, nothing waits for uploads
            self.close(patient=done)
        for number, (_, values) in self._incomplete.items() if complete else ():
            missing = [key for key in self._hooks if key not in values]
            raise ValueError(f"sample {number} has no activation for {missing}; it is not stored")
        if missing_samples:
            raise ValueError(
                f"{self.folder}: {counted(missing_samples, 'sample')} not given again; a repair "
                "needs all samples from 0 on, and skips those that are stored"
            )

    def close(self, patient: bool = False) -> None:
        """Releases the folder and ends the threads. Shards that are not committed are lost.

        Args:
            patient: Whether the threads finish their work first.
        """
        self._state = "closed"
        self._writer.close(patient)
        self._unlock()

    def _unlock(self) -> None:
        unlock(self._lock)
        self._lock = None
