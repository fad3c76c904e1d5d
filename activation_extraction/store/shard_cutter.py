"""ShardCutter: gathers complete samples into shards, in ascending order.

A batch may hold samples ahead of those that it leaves to later batches; such samples wait here
until all before them have come. The cutter follows the ranges of a plan, passes over samples
outside them, and refuses data that does not give the expected shards again.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from activation_extraction.common.encodings import FLOAT8, token_bytes
from activation_extraction.common.errors import StorageError
from activation_extraction.store.identity import Identity
from activation_extraction.store.resume import ShardRange, StoragePlan
from activation_extraction.store.shard import Key, SampleRow, Shard
from activation_extraction.store.shard_writer import ShardWriter
from activation_extraction.text.batch import Batch, Cursor


class ShardCutter:
    """Passes shards to a ShardWriter. A shard has at most `limit` bytes of activations, but at
    least one sample.

    encoded: the hooks whose activations are encoded later. where: names the output in messages.
    `cursor` is where a run continues after the added batches. `waiting` has the samples that wait
    for those before them, by `sample_idx`. Methods raise StorageError as soon as a shard could
    not be committed.
    """

    def __init__(
        self,
        writer: ShardWriter,
        keys: Sequence[Key],
        encoded: Collection[Key],
        limit: float,
        identity: Identity,
        plan: StoragePlan,
        where: str,
    ) -> None:
        self._writer = writer
        self._keys = keys
        self._limit = limit
        self._some_tokens = not identity.every_token
        self._encoded = encoded
        self._worker = identity.worker
        self._where = where
        self._ranges = list(plan.ranges)
        self._expected = plan.expected
        self._start(plan.next)

    def _start(self, shards: ShardRange) -> None:
        self.cursor: Cursor | None = shards.cursor
        self.waiting: dict[int, tuple[SampleRow, Mapping[Key, np.ndarray]]] = {}
        # Of each batch from the earliest one on that has a sample which no shard has yet: where a
        # run continues that forms the batch again, and the batch's last sample.
        self._batches: deque[tuple[Cursor, int]] = deque()
        self._stored = self.last_sample = shards.last_sample_before
        self._cut_so_far = shards.first - 1
        self._empty()
        for number in () if self.cursor is None else self.cursor.left_out:
            if (sample_idx := self._worker.sample_idx(number)) > self._stored:
                raise self._missing(sample_idx)

    def _missing(self, sample_idx: int) -> StorageError:
        return StorageError(
            f"{self._where}: sample {sample_idx} is missing: the cursor of shard "
            f"{self._cut_so_far} leaves it out"
        )

    def _empty(self) -> None:
        self._pending = Shard([], {key: [] for key in self._keys}, self._some_tokens)
        self._bytes = 0

    @property
    def done(self) -> bool:
        """Whether every range has been stored."""
        return not self._ranges

    def needs(self, sample_idx: int) -> bool:
        """Returns whether a sample of a batch is to be stored. An earlier run may have stored some
        samples of the batch, and some may come after the current range."""
        return self._stored < sample_idx < self._until

    @property
    def _until(self) -> float:
        """The first sample after the current range; infinity if there is none."""
        until = self._ranges[0].until if self._ranges else None
        return math.inf if until is None else until

    def add_batch(
        self, batch: Batch, samples: Mapping[int, tuple[SampleRow, Mapping[Key, np.ndarray]]]
    ) -> None:
        """Adds the samples of a batch that are needed, as `add` takes them, by `sample_idx`.

        Ends the range if it is complete then. Raises StorageError for a sample before
        `batch.next_cursor` that no batch has brought.
        """
        self.cursor = batch.next_cursor
        self._batches.append((batch.cursor, batch.samples[-1].sample.sample_idx))
        self.waiting |= samples
        missing = self._worker.sample_idx(batch.next_cursor.samples)  # the first that has not come
        for sample_idx in sorted(idx for idx in self.waiting if idx < missing):
            begun, worker = self.last_sample >= 0, self._worker
            expected = self.last_sample + worker.stride if begun else worker.sample_idx(0)
            if sample_idx != expected:
                raise self._missing(expected)
            self.add(*self.waiting[sample_idx])
            del self.waiting[sample_idx]
        if missing >= self._until:
            self.end_range()

    def add(self, row: SampleRow, slices: Mapping[Key, np.ndarray]) -> None:
        """Adds the next sample. slices: its activations (tokens, width) by the key of the hook.

        A sample without tokens counts as one token, so that a shard of such samples is cut, too.
        """
        size = 0
        for key, each in slices.items():
            width = each.shape[1]
            of_token = token_bytes(width, FLOAT8) if key in self._encoded else each.itemsize * width
            size += max(len(each), 1) * of_token
        if self._pending.samples and self._bytes + size > self._limit:
            self._cut(partial=False)
        self._pending.samples.append(row)
        for key in self._keys:
            self._pending.slices[key].append(slices[key])
        self._bytes += size
        self.last_sample = row.sample_idx

    def end_range(self) -> None:
        """Cuts the last shard of the current range, and begins the next range."""
        current = self._ranges[0]
        if current.last is None:
            if self._pending.samples:
                self._cut(partial=True)
        else:
            assert current.until is not None
            if not current.until - self._worker.stride <= self.last_sample < current.until:
                raise self._other_data(current.last)
            self._cut(current.partial)
            if self._cut_so_far != current.last:
                raise self._other_data(current.last)
        self._ranges.pop(0)
        if self._ranges:
            self._start(self._ranges[0])

    def finish(self, complete: bool) -> None:
        """Ends all ranges if the data is `complete`.

        Otherwise it does not end a range whose last shard is known and has not been reached.
        """
        while self._ranges and (complete or self._ranges[0].last is None):
            self.end_range()

    def _cut(self, partial: bool) -> None:
        """Cuts a shard after the sample that was added last."""
        number = self._cut_so_far + 1
        while self._batches and self._batches[0][1] <= self.last_sample:
            self._batches.popleft()
        cursor = self._batches[0][0] if self._batches else self.cursor
        expected = self._expected.get(number)
        if expected is not None:
            rows = self._pending.samples
            first, last = rows[0].sample_idx, rows[-1].sample_idx
            before = expected.first, expected.last, expected.count, expected.tokens
            if (first, last, len(rows), self._pending.tokens) != before:
                raise self._other_data(number)
        in_use = max(len(self._batches), 1)
        self._writer.commit(self._pending, cursor, number, partial, in_use)
        self._empty()  # only now, because Ctrl-C may interrupt `commit`
        self._cut_so_far = number

    def _other_data(self, number: int) -> StorageError:
        return StorageError(
            f"{self._where}: shard {number} cannot be made again: the data set gives other samples "
            "now; restore the files that the run began with"
        )
