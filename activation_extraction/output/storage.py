"""ActivationStorage: collects activations, cuts them into shards and has these committed.

What is stored already is continued; the background work on a shard is committer.py's part, and
what counts as the same run is resume.py's.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from activation_extraction.cli.errors import RunError
from activation_extraction.output.commits import (
    FORMAT_VERSION,
    METADATA,
    METRICS,
    read_stored,
    run_of,
    seal,
)
from activation_extraction.output.committer import Committer, Key, StorageError, Totals
from activation_extraction.output.resume import (
    Beginning,
    check_output_dir,
    lock_folder,
    remove_extraction,
    running_system,
    take_up,
)
from activation_extraction.output.shards import Record, write_bytes
from activation_extraction.output.stores import Store, reason_of
from activation_extraction.text.batch import Batch, Cursor

GIGABYTE = 10**9


class ActivationStorage:
    """Writes activations to `shard_0001.pkl.gz`, ... in a folder; a context manager.

    hooks: key of the hook in the shards (layer number or hook name) -> the hook's full name.
    A sample is complete when it has an activation for every key; samples must become complete in
    ascending order. `shard_size_gb` counts the activations' bytes before compression; a shard
    holds at least one sample. `metadata` is recorded in metadata.json, and so are `hook_facts`: key
    of a hook -> what else to say of it, such as its width.

    An extraction that the folder or the bucket already holds is continued when its `identity` is
    the same: `cursor` says where, and samples that are stored already are passed over. With
    `overwrite` it is deleted instead. Constructing only reads; `open`, which entering the context
    or the first sample calls, is the first to write.

    remote: the same host's folder in a bucket; a shard then counts as stored when it is there.
    delete_local: delete shard files after their upload; their JSON files stay. `alive`, an
    attribute to be set, is called whenever an upload has moved.

    Leaving the context commits what is complete, also after an exception or Ctrl-C; metadata.json
    then says "interrupted", or "failed" when a shard could not be committed. Raises InputError when
    the folder holds something else, StorageError when writing or uploading fails (at the next call
    after it did).
    """

    def __init__(
        self,
        output_dir: str | Path,
        hooks: Mapping[Key, str],
        shard_size_gb: float = 1.0,
        compress: bool = True,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
        identity: Mapping[str, Any] | None = None,
        max_samples: int | None = None,
        remote: Store | None = None,
        delete_local: bool = True,
        hook_facts: Mapping[Key, Mapping[str, Any]] | None = None,
    ) -> None:
        self.folder = Path(output_dir)
        self.alive: Callable[[], None] = lambda: None
        self._remote = remote
        if remote is not None:
            remote.beat = lambda: self.alive()
        self._hooks = dict(hooks)
        self._hook_facts = dict(hook_facts or {})
        self._limit = shard_size_gb * GIGABYTE
        self._overwrite = overwrite
        self._delete_local = delete_local
        self._identity = {**(identity or {}), "hooks": list(hooks.values())}
        self._max_samples = max_samples
        self._metadata = dict(metadata or {})
        check_output_dir(self.folder)
        self._committer = Committer(
            self.folder,
            remote,
            self._hooks,
            compress,
            delete_local,
            run_of(self._identity),
        )
        self._begin(Beginning() if overwrite else self._look())
        self._incomplete: dict[int, dict[Key, Record]] = {}
        self._pending: list[dict[Key, Record]] = []  # complete samples of the next shard
        self._pending_bytes = 0
        self._lock: int | None = None
        self._finalized = False
        self._began = time.perf_counter()

    def _look(self) -> Beginning:
        local = read_stored(Store(str(self.folder)))
        remote = None if self._remote is None else read_stored(self._remote)
        places = f"--output_dir {self.folder}", self._remote.url if self._remote else ""
        return take_up(local, remote, places, self._identity, self._max_samples)

    def _begin(self, beginning: Beginning) -> None:
        """Continues after what is stored."""
        commits = beginning.commits
        stored = [commit for commit in commits if commit.number not in beginning.waiting]
        self._beginning = beginning
        self._committer.begin(stored)
        self.totals.count_skipped(beginning.skipped_rows)
        self._last_stored = self._last_sample = commits[-1].last if commits else -1
        self._cursor: Cursor | None = commits[-1].position if commits else None
        self._shards_cut = len(commits)

    @property
    def place(self) -> Store:
        """Where what is stored counts: the folder in the bucket, if there is one."""
        return self._remote or Store(str(self.folder))

    @property
    def totals(self) -> Totals:
        """What is stored, that of earlier runs included."""
        return self._committer.totals

    @property
    def cursor(self) -> Cursor | None:
        """Where the stream of samples has to continue; None at its beginning."""
        return self._cursor

    @property
    def complete(self) -> bool:
        """Whether an earlier run has computed everything; some of it may wait for its upload."""
        return self._beginning.complete

    @property
    def found_samples(self) -> int:
        """Samples of an earlier run, those that wait for their upload included."""
        return sum(commit.count for commit in self._beginning.commits)

    @property
    def found_tokens(self) -> int:
        """As `found_samples`."""
        return sum(commit.tokens for commit in self._beginning.commits)

    def open(self) -> None:
        """Takes the folder: deletes what `overwrite` says, starts the uploads that are missing.

        Does nothing when it is open, or when another run has done all. `cursor` and `complete` may
        change: another process may have written until now. Raises StorageError; InputError when
        another process writes to the folder.
        """
        if self._lock is not None or self._finalized or self._beginning.settled:
            return
        self._began = time.perf_counter()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.folder)
            if self._overwrite:
                remove_extraction(Store(str(self.folder)))
                if self._remote is not None:
                    remove_extraction(self._remote)
            else:  # once more: another process may have gone on until now
                self._begin(self._look())
                if self._beginning.settled:
                    return self._unlock()
            self._write_metadata("running")  # before all else: without it a folder is refused
            self._keep_metrics()
            for commit in self._beginning.commits:
                if commit.number in self._beginning.waiting:
                    self._committer.upload(commit)
                elif self._remote is not None and self._delete_local:
                    (self.folder / commit.file).unlink(missing_ok=True)  # killed before it did
        except OSError as error:
            raise StorageError(f"{self.folder}: {reason_of(error)[0]}") from error

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

    def add_batch(self, batch: Batch, activations: Mapping[Key, np.ndarray]) -> int:
        """Adds the samples of a batch that are not stored yet; returns how many these are.

        activations: key of every hook -> (B, T, width); kept by reference until their shard is
        written. Raises StorageError as soon as anything in the background has failed.
        """
        self._committer.check()
        self._cursor = batch.cursor
        # An earlier run's last shard ends in the first batch.
        new = [placed for placed in batch.samples if placed.sample.sample_idx > self._last_stored]
        for sample, row, start in new:
            stop = start + len(sample.token_ids)
            for key in self._hooks:
                self.add_activation(
                    key,
                    activations[key][row, start:stop],
                    sample.sample_idx,
                    sample.text_preview,
                    token_ids=sample.token_ids,
                    doc_id=sample.doc_id,
                )
        self._cursor = batch.next_cursor
        return len(new)

    def add_activation(
        self,
        layer_idx: Key,
        activation: np.ndarray,
        sample_idx: int,
        text_preview: str,
        token_ids: np.ndarray | None = None,
        doc_id: str | int | float | None = None,
    ) -> None:
        """Adds one sample's activation (tokens, width) at one hook.

        The array is kept by reference until its shard is written. Raises KeyError for an unknown
        hook, ValueError for a sample that is out of order, given twice, not two-dimensional, or
        that comes after the end of a complete extraction.
        """
        self.open()
        if layer_idx not in self._hooks:
            raise KeyError(f"hook {layer_idx!r} is not one of {list(self._hooks)}")
        activation = np.asarray(activation)
        if activation.ndim != 2 or (token_ids is not None and len(token_ids) != len(activation)):
            raise ValueError(
                f"sample {sample_idx}: activation of shape {activation.shape} does not fit "
                "(tokens, width) and the token ids"
            )
        if sample_idx <= self._last_sample or layer_idx in self._incomplete.get(sample_idx, {}):
            raise ValueError(
                f"sample {sample_idx}, hook {layer_idx!r}: given twice or out of order"
            )
        if self._beginning.complete:
            raise ValueError(f"sample {sample_idx}: {self.folder} holds a complete extraction")
        records = self._incomplete.setdefault(sample_idx, {})
        records[layer_idx] = {
            "sample_idx": int(sample_idx),
            "hook": self._hooks[layer_idx],
            "activation": activation,
            "shape": activation.shape,
            "text_preview": text_preview,
            "token_ids": token_ids,
            "doc_id": doc_id,
        }
        if len(records) == len(self._hooks):
            self._complete(sample_idx, self._incomplete.pop(sample_idx))

    def _complete(self, sample_idx: int, records: dict[Key, Record]) -> None:
        size = sum(record["activation"].nbytes for record in records.values())
        if self._pending and self._pending_bytes + size > self._limit:
            self._cut_shard(partial=False)
        self._pending.append(records)
        self._pending_bytes += size
        self._last_sample = sample_idx

    def gauges(self) -> dict[str, Any]:
        """What is stored and what is on its way, for metrics."""
        return self._committer.gauges()

    def _keep_metrics(self) -> None:
        """Those of earlier runs, when this disk does not have them."""
        path = self.folder / METRICS
        if self._remote is not None and not self._overwrite and not path.exists():
            data = self._remote.read(METRICS)
            if data is not None:
                write_bytes(path, data)

    def record(self, metrics: dict[str, Any]) -> None:
        """Appends a line to metrics.jsonl, which lies beside the shards. Raises StorageError."""
        try:
            with open(self.folder / METRICS, "a") as file:
                file.write(json.dumps(metrics) + "\n")
        except OSError as error:
            raise StorageError(f"{self.folder / METRICS}: {reason_of(error)[0]}") from error

    def _cut_shard(self, partial: bool) -> None:
        self._committer.commit(self._pending, self._cursor, self._shards_cut + 1, partial)
        self._pending, self._pending_bytes = [], 0  # not before: Ctrl-C may come while it waits
        self._shards_cut += 1

    def finalize(self, complete: bool = True, skipped_rows: int = 0) -> None:
        """Commits every complete sample and metadata.json, and waits until all is stored.

        complete: False when the run ends before its data does. skipped_rows: in all, where more
        were skipped than the cursors count. Calling it again does nothing. Raises ValueError, after
        committing, when a complete run leaves a sample incomplete.
        """
        if self._finalized or (self._beginning.settled and self._lock is None):
            return self.close()
        complete = complete or self._beginning.complete
        self.open()
        self.totals.count_skipped(skipped_rows)
        self._finalized = True
        done = False
        try:
            if self._pending:
                self._cut_shard(partial=True)
            self._committer.wait()
            self._committer.check_owner()
            self._write_metadata("complete" if complete else "interrupted")
            done = True
        except OSError as error:
            raise StorageError(f"{self.folder}: {reason_of(error)[0]}") from error
        except RunError:
            with suppress(OSError):
                self._write_metadata("failed", upload=False)
            raise
        finally:  # neither a second Ctrl-C nor a failure waits for uploads
            self.close(patient=done)
        if complete and self._incomplete:
            sample, records = next(iter(self._incomplete.items()))
            missing = [key for key in self._hooks if key not in records]
            raise ValueError(f"sample {sample} has no activation for {missing}; it is not stored")

    def close(self, patient: bool = False) -> None:
        """Gives up the folder and the threads; what is not committed is lost."""
        self._finalized = True
        self._committer.close(patient)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write_metadata(self, status: str, upload: bool = True) -> None:
        write_bytes(self.folder / METADATA, seal(self._content(status)))
        if self._remote is not None and upload:
            self._remote.put(self.folder / METADATA)
            self._committer.upload_metrics()

    def _content(self, status: str) -> dict[str, Any]:
        """What metadata.json says."""
        totals = self.totals
        return {
            "format_version": FORMAT_VERSION,
            "status": status,
            "shards": totals.shards,
            "samples": totals.samples,
            "tokens": totals.tokens,
            "bytes": totals.bytes,
            "skipped_rows": totals.skipped_rows,
            "max_samples": self._max_samples,
            "seconds": round(time.perf_counter() - self._began, 3),
            "written": round(time.time(), 3),
            "owner": self._committer.owner,
            "system": running_system(),
            "remote": None if self._remote is None else self._remote.url,
            "hooks": [
                {
                    "key": key,
                    "name": self._hooks[key],
                    **self._hook_facts.get(key, {}),
                    **part.to_json(),
                }
                for key, part in totals.statistics.items()
            ],
            "identity": self._identity,
            **self._metadata,
        }
