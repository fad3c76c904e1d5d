"""ActivationStorage: collects activations, cuts them into shards and commits these one by one.

A shard is committed by its JSON: first the shard file is complete under its final name, then the
JSON appears. A shard without JSON does not exist. One background thread writes while the caller
goes on; at most one shard is being written while the next one fills.
"""

import logging
import re
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from activation_extraction.errors import InputError, RunError
from activation_extraction.packing import Batch, Cursor
from activation_extraction.shards import Record, Shard, write_json, write_shard
from activation_extraction.statistics import Statistics, merge_all

FORMAT_VERSION = 1
METADATA = "metadata.json"
OWN_FILES = re.compile(r"\.?(metadata\.json|shard_\d{4,}\.(json|pkl|pkl\.gz))(\.tmp)?")
GIGABYTE = 10**9

log = logging.getLogger("extract_activations")

Key = int | str  # of a hook in the shard: the layer, or the hook's name


class StorageError(RunError):
    """A shard could not be committed, so nothing after it may be; what came before is safe."""


@dataclass
class Totals:
    """What is committed, and the seconds that the background spent on it."""

    shards: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    compress_seconds: float = 0.0
    write_seconds: float = 0.0
    statistics: dict[Key, Statistics] = field(default_factory=dict)


def check_output_dir(folder: Path, overwrite: bool) -> None:
    """Raises InputError unless shards can be written to `folder`, which is not made yet.

    A folder that already holds an extraction is refused unless `overwrite`.
    """
    name = f"--output_dir {folder}"
    try:
        str(folder).encode()
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{name}: is a file, expected a folder")
        if not overwrite and _own_files(folder):
            raise InputError(f"{name}: already holds an extraction; --overwrite replaces it")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: cannot be written to: {_reason(error)}") from error


def other_folders(output_dir: Path, machine: str, own: set[Path]) -> list[Path]:
    """Folders with an extraction by the same machine as another number of hosts or machines.

    Beside `own`, the folders of this run, their samples would count twice.
    """
    candidates = [output_dir, *output_dir.glob(f"{machine}*")] if output_dir.is_dir() else []
    return [folder for folder in candidates if folder not in own and _own_files(folder)]


def remove_extraction(folder: Path) -> None:
    """Deletes the shards, commits and metadata in a folder, and nothing else."""
    for path in _own_files(folder):
        path.unlink()


def _own_files(folder: Path) -> list[Path]:
    """The extraction's files in a folder, in an order in which they may be deleted."""
    if not folder.is_dir():
        return []
    own = [path for path in sorted(folder.iterdir()) if OWN_FILES.fullmatch(path.name)]
    return sorted(own, key=lambda path: path.suffix != ".json")  # the commits first


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class ActivationStorage:
    """Writes activations to `shard_0001.pkl.gz`, ... in a folder; a context manager.

    hooks: key of the hook in the shards (layer number or hook name) -> the hook's full name.
    A sample is complete when it has an activation for every key; samples must become complete in
    ascending order. `shard_size_gb` counts the activations' bytes before compression; a shard
    holds at least one sample. `metadata` is recorded in metadata.json.

    Leaving the context commits what is complete, also after an exception or Ctrl-C; metadata.json
    then says "interrupted", or "failed" when a shard could not be committed. Raises InputError when
    the folder holds an extraction and `overwrite` is false, StorageError when writing fails (at the
    next call after it did).
    """

    def __init__(
        self,
        output_dir: str | Path,
        hooks: Mapping[Key, str],
        shard_size_gb: float = 1.0,
        compress: bool = True,
        overwrite: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(output_dir)
        self.totals = Totals(statistics={key: Statistics() for key in hooks})
        self._hooks = dict(hooks)
        self._limit = shard_size_gb * GIGABYTE
        self._suffix = ".pkl.gz" if compress else ".pkl"
        self._compress = compress
        self._metadata = dict(metadata or {})
        self._incomplete: dict[int, dict[Key, Record]] = {}
        self._last_sample = -1
        self._cursor: Cursor | None = None
        self._shards_cut = 0
        self._pending: list[dict[Key, Record]] = []  # complete samples of the next shard
        self._pending_bytes = 0
        self._failure: StorageError | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="shard-writer")
        self._writing: Future[None] | None = None
        self._finalized = False
        self._began = time.perf_counter()
        check_output_dir(self.folder, overwrite)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_extraction(self.folder)
            self._write_metadata("running")
        except OSError as error:
            raise StorageError(f"{self.folder}: {_reason(error)}") from error

    def __enter__(self) -> "ActivationStorage":
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

    def add_batch(self, batch: Batch, activations: np.ndarray) -> None:
        """Adds every sample of a batch. activations: (hooks, B, T, D), hooks in this storage's
        order; kept by reference until their shard is written."""
        self._cursor = batch.cursor
        for sample, row, start in batch.samples:
            stop = start + len(sample.token_ids)
            for key, activation in zip(self._hooks, activations, strict=True):
                self.add_activation(
                    key,
                    activation[row, start:stop],
                    sample.sample_idx,
                    sample.text_preview,
                    token_ids=sample.token_ids,
                    doc_id=sample.doc_id,
                )
        self._cursor = batch.next_cursor

    def add_activation(
        self,
        layer_idx: Key,
        activation: np.ndarray,
        sample_idx: int,
        text_preview: str,
        token_ids: np.ndarray | None = None,
        doc_id: str | int | float | None = None,
    ) -> None:
        """Adds one sample's activation (tokens, hidden) at one hook.

        The array is kept by reference until its shard is written. Raises KeyError for an unknown
        hook, ValueError for a sample that is out of order, given twice, or not two-dimensional.
        """
        if layer_idx not in self._hooks:
            raise KeyError(f"hook {layer_idx!r} is not one of {list(self._hooks)}")
        activation = np.asarray(activation)
        if activation.ndim != 2 or (token_ids is not None and len(token_ids) != len(activation)):
            raise ValueError(
                f"sample {sample_idx}: activation of shape {activation.shape} does not fit "
                "(tokens, hidden) and the token ids"
            )
        if sample_idx <= self._last_sample or layer_idx in self._incomplete.get(sample_idx, {}):
            raise ValueError(
                f"sample {sample_idx}, hook {layer_idx!r}: given twice or out of order"
            )
        records = self._incomplete.setdefault(sample_idx, {})
        records[layer_idx] = {
            "sample_idx": int(sample_idx),
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

    def finalize(self, complete: bool = True) -> None:
        """Commits every complete sample and metadata.json, and waits until all is on disk.

        complete: False when the run ends before its data does. Calling it again does nothing.
        Raises ValueError, after committing, when a complete run leaves a sample incomplete.
        """
        if self._finalized:
            return
        self._finalized = True
        try:
            if self._pending:
                self._cut_shard(partial=not complete)
            self._wait()
            self._write_metadata("complete" if complete else "interrupted")
        except OSError as error:
            self._failure = StorageError(f"{self.folder}: {_reason(error)}")
            raise self._failure from error
        finally:
            self._writer.shutdown()
            if self._failure is not None:
                with suppress(OSError):
                    self._write_metadata("failed")
        if complete and self._incomplete:
            sample, records = next(iter(self._incomplete.items()))
            missing = [key for key in self._hooks if key not in records]
            raise ValueError(f"sample {sample} has no activation for {missing}; it is not stored")

    def _cut_shard(self, partial: bool) -> None:
        """Hands the pending samples to the writer, after the previous shard is committed."""
        self._wait()
        samples, self._pending, self._pending_bytes = self._pending, [], 0
        self._shards_cut += 1
        self._writing = self._writer.submit(
            self._commit, samples, self._cursor, self._shards_cut, partial
        )

    def _wait(self) -> None:
        """Until the shard that is being written is committed.

        Raises StorageError when it, or any before it, could not be: nothing may follow it then.
        """
        if self._failure is not None:
            raise self._failure
        if self._writing is not None:
            try:
                self._writing.result()
            except Exception as error:
                if not isinstance(error, StorageError):
                    error = StorageError(f"{self.folder}: {error!r}")
                self._failure = error
                raise error from None
            self._writing = None

    def _commit(
        self,
        samples: list[dict[Key, Record]],
        cursor: Cursor | None,
        number: int,
        partial: bool,
    ) -> None:
        """Runs in the writer thread: the shard file first, its JSON last."""
        path = self.folder / f"shard_{number:04d}{self._suffix}"
        shard: Shard = {key: [records[key] for records in samples] for key in self._hooks}
        statistics = {key: _statistics(key, records) for key, records in shard.items()}
        first = next(iter(shard.values()))
        tokens = sum(record["shape"][0] for record in first)
        began = time.perf_counter()
        try:
            written = write_shard(path, shard, self._compress)
            seconds = time.perf_counter() - began
            commit = {
                "format_version": FORMAT_VERSION,
                "file": path.name,
                "sha256": written["sha256"],
                "bytes": written["bytes"],
                "samples": {
                    "first": first[0]["sample_idx"],
                    "last": first[-1]["sample_idx"],
                    "count": len(first),
                },
                "tokens": tokens,
                "partial": partial,
                "cursor": cursor,
                "hooks": self._describe(statistics),
            }
            write_json(self.folder / f"shard_{number:04d}.json", commit)
        except OSError as error:
            raise StorageError(f"{path}: {_reason(error)}") from error
        totals = self.totals
        totals.shards += 1
        totals.samples += len(first)
        totals.tokens += tokens
        totals.bytes += written["bytes"]
        totals.write_seconds += written["write_seconds"]
        totals.compress_seconds += seconds - written["write_seconds"]
        for key, part in statistics.items():
            totals.statistics[key] = totals.statistics[key].merge(part)
        log.debug("%s: %d samples, %d bytes", path.name, len(first), written["bytes"])

    def _describe(self, statistics: Mapping[Key, Statistics]) -> list[dict[str, Any]]:
        return [
            {"key": key, "name": self._hooks[key], **part.to_json()}
            for key, part in statistics.items()
        ]

    def _write_metadata(self, status: str) -> None:
        totals = self.totals
        content = {
            "format_version": FORMAT_VERSION,
            "status": status,
            "shards": totals.shards,
            "samples": totals.samples,
            "tokens": totals.tokens,
            "bytes": totals.bytes,
            "seconds": round(time.perf_counter() - self._began, 3),
            "hooks": self._describe(totals.statistics),
            **self._metadata,
        }
        write_json(self.folder / METADATA, content)


def _statistics(key: Key, records: list[Record]) -> Statistics:
    """Of one hook in one shard. Raises StorageError, naming the sample, for NaN or infinity."""
    parts = []
    for record in records:
        part = Statistics.of(record["activation"])
        if not part.finite:
            dtype = record["activation"].dtype
            hint = "; float16 ends at 65504, try bfloat16" if dtype == np.float16 else ""
            raise StorageError(
                f"sample {record['sample_idx']}, hook {key}: NaN or infinite {dtype} values{hint}"
            )
        parts.append(part)
    return merge_all(parts)
