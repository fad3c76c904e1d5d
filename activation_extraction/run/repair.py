"""--repair: makes the shards again that --verify finds damaged or missing, and no others.

The JSON of the last good shard in front of a gap says where in the data to start, so that the same
batches are formed and the same bytes stored. A shard is replaced like any other: its JSON goes
first and comes last, so a repair that was killed leaves a gap for the next one.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from activation_extraction.cli.errors import InputError
from activation_extraction.output.commits import (
    METADATA,
    Commit,
    Stored,
    number_of,
    own_files,
    read_stored,
)
from activation_extraction.output.committer import Key, StorageError, Totals
from activation_extraction.output.resume import Beginning, check_same_run, lock_folder
from activation_extraction.output.storage import ActivationStorage
from activation_extraction.output.stores import Store, reason_of
from activation_extraction.reading.verify import check_shards
from activation_extraction.text.batch import Batch, Cursor

COUNTED = ("shards", "samples", "tokens", "bytes", "hooks")  # in metadata.json

log = logging.getLogger("extract_activations")


@dataclass(frozen=True)
class Gap:
    """Shards `first` to `last`, which are to be made again.

    before: the good shard in front of them; None at the beginning of the data. until: above the
    `sample_idx` of their samples, and of no sample after them. partial: whether the last of them
    was cut before it had its size.
    """

    first: int
    last: int
    before: Commit | None
    until: int
    partial: bool

    @property
    def cursor(self) -> Cursor | None:
        return None if self.before is None else self.before.position


def find_gaps(stored: Stored, good: set[int], world: int) -> tuple[Gap, ...]:
    """The gaps in a folder, as far as its metadata and its JSONs tell where they end.

    good: numbers of the shards that are in order. world: number of hosts of all machines.
    """
    assert stored.metadata is not None
    known = max([stored.metadata["shards"], *stored.commits])
    bad = set(range(1, known + 1)) - good
    gaps = []
    for first in sorted(number for number in bad if number - 1 not in bad):
        last = next(number for number in range(first, known + 1) if number + 1 not in bad)
        own, following = stored.commits.get(last), stored.commits.get(last + 1)
        until, partial = stored.metadata["samples"] * world, True
        if following is not None:
            until, partial = following.first, False
        elif own is not None:
            until, partial = own.last + 1, own.partial
        gaps.append(Gap(first, last, stored.commits.get(first - 1), until, partial))
    return tuple(gaps)


class Repair(ActivationStorage):
    """Takes the place of an ActivationStorage: of the batches that come, it keeps the samples of
    the `gaps`, one gap after the other.

    `complete` says that there is nothing to repair. `repaired`: numbers of the shards that were
    made again; `differing`: what to tell of those that have other bytes than before. Constructing
    reads every shard. Raises InputError when the folder holds nothing, or another run.
    """

    gaps: tuple[Gap, ...]

    def _look(self) -> Beginning:
        self.repaired: list[int] = []
        self.differing: list[str] = []
        self._at = 0  # in the gaps
        self._counted = False
        self._began = time.perf_counter()
        self._found = found = read_stored(self.place)
        where = self.place.url
        if found.metadata is None and not found.commits:
            raise InputError(f"{where}: holds no extraction that --repair could mend")
        stored = found if found.metadata is not None else replace(found, metadata=self._anew())
        self._was = stored.metadata or {}
        check_same_run(where, stored, self._identity)
        self._refuse_moved(stored)
        log.info("looking for damaged shards")
        checked = list(check_shards(self.place, {"": stored}))
        good = {commit.number for commit, problems, _ in checked if not problems}
        self._world = self._identity["total_machines"] * self._identity["num_hosts"]
        self.gaps = find_gaps(stored, good, self._world)
        self._committer.known = stored.commits
        numbers = {number_of(name) for name in found.damaged if name != METADATA}
        in_gaps = {n for gap in self.gaps for n in range(gap.first, gap.last + 1)}
        self._unknown = numbers - in_gaps
        self._useless = self._look_at_copies(stored, good)
        commits = [stored.commits[n] for n in sorted(good)]
        anew = found.metadata is None or self._miscounted(commits)
        nothing = not any((self.gaps, self._unknown, self._useless, anew))
        return Beginning(commits, complete=nothing)

    def _miscounted(self, commits: list[Commit]) -> bool:
        """Whether a complete run has other sums in its metadata: a repair was killed."""
        sums = Totals()
        for commit in commits:
            sums.add(commit)
        wrong = any(self._was[name] != getattr(sums, name) for name in COUNTED[:4])
        return wrong and not self.gaps and self._was["status"] == "complete"

    def _anew(self) -> dict[str, Any]:
        """Metadata where there is none. The next run without --repair finds out what is left."""
        log.warning("%s/%s is damaged or missing: it is made anew", self.place.url, METADATA)
        nothing = {"shards": 0, "samples": 0, "tokens": 0, "bytes": 0, "hooks": []}
        return {**super()._content("interrupted"), **nothing}

    def _look_at_copies(self, stored: Stored, good: set[int]) -> list[str]:
        """Files here that are of no use beside the bucket's: damaged JSONs, and shards that a run
        would have deleted after their upload, had it not been killed."""
        if self._remote is None:
            return []
        copies = read_stored(Store(str(self.folder)))
        if copies.metadata is not None:
            check_same_run(f"--output_dir {self.folder}", copies, self._identity)
        uploaded = {stored.commits[n].file for n in good} if self._delete_local else set()
        return [name for name in copies.files if name in copies.damaged or name in uploaded]

    def _refuse_moved(self, stored: Stored) -> None:
        moved = self._was.get("remote")
        if self._remote is None and moved is not None and not all(map(stored.has, stored.in_order)):
            raise InputError(
                f"--output_dir {self.folder}: its shards were uploaded to {moved}; to repair them "
                "there, give --upload_to_gcs, --gcs_bucket and --gcs_prefix as before"
            )

    @property
    def found_max_samples(self) -> int | None:
        """That of the run itself: the end of the data is packed as it was."""
        return self._was["max_samples"]

    def open(self) -> None:
        """Takes the folder. Raises InputError when somebody has changed it since it was checked."""
        if self._lock is not None or self._finalized or self.complete:
            return
        self._began = time.perf_counter()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.folder)
            now = read_stored(self.place)
            if (now.metadata, now.commits) != (self._found.metadata, self._found.commits):
                raise InputError(f"{self.place.url}: another process has written there meanwhile")
            if changes := self._changes():
                log.warning("recomputed values may differ in rounding: %s", changes)
            self._write_metadata(self._was["status"])
            for name in set(self._useless) - {METADATA}:
                (self.folder / name).unlink(missing_ok=True)
            for store in (self.place, Store(str(self.folder))):
                self._remove_unknown(store)
        except OSError as error:
            raise StorageError(f"{self.folder}: {reason_of(error)[0]}") from error
        if self.gaps:
            self._enter(self.gaps[0])

    def _remove_unknown(self, store: Store) -> None:
        """Shards at the end of a run that is not complete, of which nobody knows where they ended:
        without their damaged JSON they do not exist, and the run makes them when it goes on."""
        for name in own_files(store.files()):
            if name.startswith("shard_") and number_of(name) in self._unknown:
                store.remove(name)

    def _enter(self, gap: Gap) -> None:
        self._last_stored = self._last_sample = -1 if gap.before is None else gap.before.last
        self._shards_cut = gap.first - 1

    def add_batch(self, batch: Batch, activations: Mapping[Key, np.ndarray]) -> int:
        gap = self.gaps[self._at]
        kept = tuple(placed for placed in batch.samples if placed.sample.sample_idx < gap.until)
        added = super().add_batch(replace(batch, samples=kept), activations) if kept else 0
        if len(kept) < len(batch.samples):
            self._cursor = batch.cursor  # of the batch with the first sample after the gap
            self._close_gap()
        return added

    def _close_gap(self) -> None:
        gap = self.gaps[self._at]
        if not gap.until - self._world <= self._last_sample < gap.until:
            raise self._other_data(gap.last)
        self._cut_shard(gap.partial)
        if self._shards_cut != gap.last:
            raise self._other_data(gap.last)
        self._at += 1
        if self._at < len(self.gaps):
            self._enter(self.gaps[self._at])

    def _cut_shard(self, partial: bool) -> None:
        number = self._shards_cut + 1
        records = [next(iter(each.values())) for each in self._pending]
        found = records[0]["sample_idx"], records[-1]["sample_idx"], len(records)
        tokens = sum(record["shape"][0] for record in records)
        known = self._committer.known.get(number)
        if known is not None and (*found, tokens) != (
            *(known.first, known.last, known.count, known.tokens),
        ):
            raise self._other_data(number)
        super()._cut_shard(partial)
        self.repaired.append(number)

    def _other_data(self, number: int) -> StorageError:
        return StorageError(
            f"{self.place.url}: shard {number} cannot be made again: the data gives other samples "
            "than those that it had; have the files of the data set changed?"
        )

    def record(self, metrics: dict[str, Any]) -> None:
        """metrics.jsonl tells of the run itself."""

    def finalize(self, complete: bool = True, skipped_rows: int = 0) -> None:
        """Waits until all is stored. What is incomplete when it is interrupted is not kept."""
        if self._finalized or self.complete:
            return self.close()
        self._finalized = True
        done = False
        try:
            if complete and self._at < len(self.gaps):  # the data ends in the last gap
                self._close_gap()
            self._committer.wait()
            self._committer.check_owner()
            if complete:
                self._count()
            self._write_metadata(self._was["status"])
            done = True
        except OSError as error:
            raise StorageError(f"{self.folder}: {reason_of(error)[0]}") from error
        finally:
            self.close(patient=done)

    def _count(self) -> None:
        """All that is stored now, and which of it has other bytes than before."""
        stored = read_stored(self.place)
        self._committer.begin(stored.in_order)
        self._counted = True
        for number in self.repaired:
            before, now = self._committer.known.get(number), stored.commits[number]
            if before is not None and before.sha256 != now.sha256:
                why = self._changes() or "with the same batch size, mesh, backend and versions"
                self.differing.append(
                    f"{now.file}: its bytes are not those that it had, its values may differ in "
                    f"rounding: {why}"
                )

    def _content(self, status: str) -> dict[str, Any]:
        """The metadata of the run, with another owner and, in the end, what is stored now."""
        new = super()._content(status)
        names = ("owner", "written", *(COUNTED if self._counted else ()))
        return {**self._was, **{name: new[name] for name in names}}

    def _changes(self) -> str:
        """What rounds otherwise than in the run, as far as its metadata tells."""
        told = []
        for name in ("batch_size", "mesh", "backend", "versions"):
            before, now = (
                (m.get("configuration", {}) if name == "batch_size" else m).get(name)
                for m in (self._was, self._metadata)
            )
            if before != now:
                told.append(f"{name} is {now}, was {before}")
        return "; ".join(told)
