"""ShardWriter: writes and uploads shards after they are cut, in the background and in order.

One thread compresses a shard and writes it to the local folder while the caller fills the next one;
others upload what is written. First in the folder and then in the bucket, a shard file is complete
under its final name before its JSON appears, and no shard is committed before the previous one.
Every queue is bounded, so a slow bucket slows the caller down. After a failure nothing follows.
"""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from activation_extraction.common.errors import StorageError, for_the_user, one_line
from activation_extraction.store.atomic_file import write_bytes
from activation_extraction.store.commit import Commit, commit_name
from activation_extraction.store.formats import ShardFormat, write_shard
from activation_extraction.store.metadata import METRICS
from activation_extraction.store.outline import Outline
from activation_extraction.store.ownership import Ownership
from activation_extraction.store.reasons import reason_of
from activation_extraction.store.run_record import Sources
from activation_extraction.store.sealed_json import seal
from activation_extraction.store.shard import Key, Shard
from activation_extraction.store.statistics import Statistics, Sums, sums_of
from activation_extraction.store.statistics_file import write_sums
from activation_extraction.text.batch import Cursor

UPLOADS = 4  # shards uploaded at the same time; up to two more wait on the disk
METRICS_SECONDS = 300  # between uploads of metrics.jsonl
OUTLINE_SECONDS = 10  # between uploads of metadata.json, after a commit

OVERFLOW = (
    "float16 ends at 65504; start anew with --activation_dtype bfloat16 or float32 and --overwrite"
)
NOT_FINITE = (
    "the model computes them, and would do so again; check its weights, or start anew with other "
    "layers or --dtype float32, and --overwrite"
)

log = logging.getLogger("extract_activations")


class ShardWriter:
    """Writes shards by right of `local`, and uploads them by right of `ownership`.

    ownership: None if shards stay in the local folder. names: key of each hook in the shards -> its
    full name. run: digest of the run's identity. sources: of the samples; it is on record what they
    are before a shard is committed. record: writes metadata.json, with the outline. `made` has the
    shards that this process has stored.
    """

    def __init__(
        self,
        local: Ownership,
        ownership: Ownership | None,
        names: Mapping[Key, str],
        shard_format: ShardFormat,
        delete_local: bool,
        run: str,
        sources: Sources | None,
        record: Callable[[], None],
    ) -> None:
        self.made: list[Commit] = []
        self.failure: StorageError | None = None
        self._local = local
        self._folder = Path(local.folder.url)
        self._remote = None if ownership is None else ownership.folder
        self._ownership = ownership
        self._names = names
        self._format = shard_format
        self._delete_local = delete_local
        self._run = run
        self._sources = sources
        self._record = record
        self._counting = threading.Lock()
        self.begin(Outline(), [], {})
        self._metrics_uploaded = self._recorded = time.monotonic()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="shard-writer")
        self._uploader = ThreadPoolExecutor(UPLOADS, thread_name_prefix="uploader")
        self._writing: Future[None] | None = None
        self._uploading: deque[Future[None]] = deque()

    def begin(
        self, outline: Outline, commits: Iterable[Commit], expected: Mapping[int, Commit]
    ) -> None:
        """Counts what earlier runs have stored, and that alone. This one begins now.

        outline: of the first shards; commits: of those after them. expected: shards that are made
        again, by number; with the same bytes they keep their JSON.
        """
        self._began = round(time.time(), 3)
        self._expected = expected
        self.count(commits, outline)

    def count(self, commits: Iterable[Commit], outline: Outline | None = None) -> None:
        """Makes `totals` and `outline` those of these shards, and of those in an outline."""
        self.outline = Outline() if outline is None else outline.whole()
        self.totals = self.outline.totals.copy()
        self.totals.statistics = {
            key: self.totals.statistics.get(key, Statistics()) for key in self._names
        }
        for commit in commits:
            self._add(commit)

    def _add(self, commit: Commit) -> None:
        self.totals.add(commit)
        self.outline.add(commit)

    def commit(self, shard: Shard, cursor: Cursor | None, number: int, partial: bool) -> None:
        """Takes over shard `number`, once the previous one is written.

        Raises StorageError if any shard so far could not be committed.
        """
        self.wait(uploads=False)
        self._writing = self._writer.submit(
            self._guard, self._write, shard, cursor, number, partial
        )

    def upload(self, commit: Commit) -> None:
        """Takes over a shard that an earlier run wrote but did not upload.

        Raises StorageError if it is not what its JSON says.
        """
        path = self._folder / commit.file
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != commit.sha256:
                raise StorageError(
                    f"{path}: is damaged: its sha256 is not the one in its JSON",
                    remedy="put the original back, or delete its JSON and those of all later "
                    "shards there: their samples are then computed again",
                )
        self._submit_upload(commit)

    def check(self) -> None:
        """Raises StorageError if anything in the background has failed."""
        if self.failure is not None:
            raise self.failure

    def wait(self, uploads: bool = True) -> None:
        """Waits until everything taken over is written and, with `uploads`, also uploaded.

        Raises StorageError as soon as anything has failed.
        """
        waiting = [self._writing] if self._writing is not None else []
        while waiting or (uploads and self._uploading):
            future = waiting[0] if waiting else self._uploading[0]
            wait([future], timeout=0.2)  # briefly, to notice failures elsewhere and Ctrl-C
            self.check()
            if future.done():
                future.result()
                waiting.remove(future) if waiting else self._uploading.popleft()
        self.check()

    def gauges(self) -> dict[str, Any]:
        """What is stored and what is on its way."""
        return {
            "shards_stored": self.totals.shards,
            "bytes_stored": self.totals.bytes,
            "shards_writing": int(self._writing is not None and not self._writing.done()),
            "shards_uploading": sum(not future.done() for future in list(self._uploading)),
            "upload_retries": 0 if self._remote is None else self._remote.retries,
        }

    def close(self, patient: bool) -> None:
        """Ends the threads; if `patient`, they first finish what they are doing."""
        for pool in (self._writer, self._uploader):
            pool.shutdown(wait=patient, cancel_futures=True)

    def _guard(self, action: Callable[..., None], *arguments: Any) -> None:
        """Runs `action` in the background, and keeps the first failure for whoever checks next."""
        try:
            self.check()
            action(*arguments)
        except BaseException as error:  # whatever it is, nothing may follow this shard
            if self.failure is None:
                self.failure = self._told(error)
            raise self.failure from error

    def _told(self, error: BaseException) -> StorageError:
        if isinstance(error, OSError):  # from the disk
            return StorageError(f"{self._folder}: {reason_of(error)[0]}")
        known = for_the_user(error)
        return StorageError(one_line(known), remedy=getattr(known, "remedy", None))

    def _write(self, shard: Shard, cursor: Cursor | None, number: int, partial: bool) -> None:
        path = self._folder / self._format.file_name(number)
        sums = {key: self._sums(key, shard) for key in shard.slices}
        by_name = {self._names[key]: of_hook for key, of_hook in sums.items()}
        began = time.perf_counter()
        announcement = self._folder / commit_name(number)

        def ready() -> None:
            """The JSON of a shard that this one replaces stays until this one is on the disk."""
            self._local.check()
            announcement.unlink(missing_ok=True)

        try:
            written = write_shard(path, shard, self._names, self._format, ready)
            statistics = write_sums(self._folder, number, by_name)
            commit = Commit(
                file=path.name,
                sha256=written["sha256"],
                bytes=written["bytes"],
                unpacked=written["unpacked"],
                first=shard.samples[0].sample_idx,
                last=shard.samples[-1].sample_idx,
                count=len(shard.samples),
                tokens=shard.tokens,
                partial=partial,
                cursor=None if cursor is None else cursor.to_json(),
                hooks=self._describe_hooks(sums),
                run=self._run,
                committed=round(time.time(), 3),
                began=self._began,
                statistics=statistics,
                cut_samples=sum(row.cut > 0 for row in shard.samples),
                cut_tokens=sum(row.cut for row in shard.samples),
            )
            expected = self._expected.get(number)
            if expected is not None and expected.sha256 == commit.sha256:
                commit = replace(expected, statistics=commit.statistics)
            if self._sources is not None and self._sources.settle():
                with self._counting:
                    self._record()
            self._local.check()
            write_bytes(announcement, seal(commit.to_json()))
        except OSError as error:
            raise StorageError(f"{path}: {reason_of(error)[0]}") from error
        self.totals.write_seconds += written["write_seconds"]
        self.totals.compress_seconds += time.perf_counter() - began - written["write_seconds"]
        log.debug("%s: %d samples, %d bytes", path.name, commit.count, commit.bytes)
        if self._remote is None:
            self._count_made(commit)
        else:
            self._submit_upload(commit)

    def _sums(self, key: Key, shard: Shard) -> Sums:
        """Of one hook. Raises StorageError, naming the sample, for NaN or infinity."""
        sums = sums_of(shard.slices[key], shard.samples)
        if not sums.statistics.finite:
            for row, activation in zip(shard.samples, shard.slices[key], strict=True):
                if not Statistics.of(activation).finite:
                    raise StorageError(
                        f"sample {row.sample_idx}, hook {key}: NaN or infinite {activation.dtype} "
                        "values",
                        remedy=OVERFLOW if activation.dtype == np.float16 else NOT_FINITE,
                    )
        return sums

    def _describe_hooks(self, sums: Mapping[Key, Sums]) -> list[dict[str, Any]]:
        """Key, name, width and statistics of each hook, as a commit has them."""
        return [
            {
                "key": key,
                "name": self._names[key],
                "width": of_hook.sums.shape[1],
                **of_hook.statistics.to_json(),
            }
            for key, of_hook in sums.items()
        ]

    def _count_made(self, commit: Commit) -> None:
        self._add(commit)
        self.made.append(commit)

    def _submit_upload(self, commit: Commit) -> None:
        """Starts an upload; waits while too many are on their way."""
        while len(self._uploading) > UPLOADS:
            self._uploading.popleft().result()
        previous = self._uploading[-1] if self._uploading else None
        self._uploading.append(self._uploader.submit(self._guard, self._upload, commit, previous))

    def _upload(self, commit: Commit, previous: Future[None] | None) -> None:
        assert self._ownership is not None
        began = time.perf_counter()
        files = [self._folder / file for file in commit.files]
        self._ownership.begin_shard(files, commit.name)
        if previous is not None:
            previous.result()
        self.check()
        self._ownership.commit(self._folder / commit.name)
        with self._counting:  # what is recorded must not change meanwhile
            self.totals.upload_seconds += time.perf_counter() - began
            self._count_made(commit)
            due = time.monotonic() - self._recorded > OUTLINE_SECONDS
            if due and self.failure is None:
                self._record()
                self._recorded = time.monotonic()
        if self._delete_local:
            for file in commit.files:
                (self._folder / file).unlink(missing_ok=True)
        log.debug("%s: uploaded", commit.file)
        if time.monotonic() - self._metrics_uploaded > METRICS_SECONDS:
            self.upload_metrics()

    def upload_metrics(self) -> None:
        """Uploads metrics.jsonl as it is now: lines are added to it all the time."""
        path = self._folder / METRICS
        self._metrics_uploaded = time.monotonic()
        if self._remote is not None and path.exists():
            self._remote.write(METRICS, path.read_bytes())
