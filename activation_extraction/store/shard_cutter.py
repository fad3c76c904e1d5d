"""ShardCutter: gathers complete samples into shards.

It follows the ranges of a plan, and refuses samples that do not belong to them.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from activation_extraction.common.encodings import ERROR_BYTES, Encoding
from activation_extraction.common.errors import StorageError
from activation_extraction.store.identity import Identity
from activation_extraction.store.resume import ShardRange, StoragePlan
from activation_extraction.store.shard import Key, SampleRow, Shard
from activation_extraction.store.shard_writer import ShardWriter
from activation_extraction.text.batch import Cursor


class ShardCutter:
    """Passes shards to a ShardWriter. A shard has at most `limit` bytes of activations, but at
    least one sample.

    encodings: of the hooks whose activations are packed rows. where: names the output in messages.
    `cursor` is where the data continues after the added
    samples. Methods raise StorageError as soon as a shard could not be committed.
    """

    def __init__(
        self,
        writer: ShardWriter,
        keys: Sequence[Key],
        encodings: Mapping[Key, Encoding],
        limit: float,
        identity: Identity,
        plan: StoragePlan,
        where: str,
    ) -> None:
        self.cursor: Cursor | None = plan.next.cursor
        self._writer = writer
        self._keys = keys
        self._limit = limit
        self._some_tokens = not identity.every_token
        self._encodings = encodings
        self._stride = identity.total_machines * identity.num_hosts
        self._where = where
        self._ranges = list(plan.ranges)
        self._expected = plan.expected
        self._start(plan.next)

    def _start(self, shards: ShardRange) -> None:
        self._stored = self.last_sample = shards.last_sample_before
        self._cut_so_far = shards.first - 1
        self._empty()

    def _empty(self) -> None:
        self._pending = Shard([], {key: [] for key in self._keys}, self._some_tokens)
        self._bytes = 0

    @property
    def done(self) -> bool:
        """Whether every range has been stored."""
        return not self._ranges

    def needs(self, sample_idx: int) -> bool:
        """Returns whether a sample is not stored yet: an earlier run may have stored some samples
        of its batch."""
        return sample_idx > self._stored

    def is_past_range(self, sample_idx: int) -> bool:
        """Returns whether a sample comes after the samples of the current range."""
        until = self._ranges[0].until if self._ranges else None
        return until is not None and sample_idx >= until

    def add(
        self,
        row: SampleRow,
        slices: Mapping[Key, np.ndarray],
        here: Cursor | None = None,
        after: Cursor | None = None,
    ) -> None:
        """Adds the next sample. slices: its activations (tokens, width) by the key of the hook.

        here: where a run continues if this sample is not stored. after: where it continues if all
        samples of the batch are stored. A sample without tokens counts as one token, so that a
        shard of such samples is cut, too.
        """
        size = sum(
            max(len(each), 1)
            * (each.itemsize * each.shape[1] - ERROR_BYTES * (key in self._encodings))
            for key, each in slices.items()
        )
        if self._pending.samples and self._bytes + size > self._limit:
            self._cut(here, partial=False)
        self._pending.samples.append(row)
        for key in self._keys:
            self._pending.slices[key].append(slices[key])
        self._bytes += size
        self.last_sample = row.sample_idx
        self.cursor = after

    def end_range(self, here: Cursor | None) -> None:
        """Cuts the last shard of the current range, and begins the next range.

        here: where the data continues after the range.
        """
        current = self._ranges[0]
        if current.last is None:
            if self._pending.samples:
                self._cut(here, partial=True)
        else:
            assert current.until is not None
            if not current.until - self._stride <= self.last_sample < current.until:
                raise self._other_data(current.last)
            self._cut(here, current.partial)
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
            self.end_range(self.cursor)

    def _cut(self, cursor: Cursor | None, partial: bool) -> None:
        number = self._cut_so_far + 1
        expected = self._expected.get(number)
        if expected is not None:
            rows = self._pending.samples
            first, last = rows[0].sample_idx, rows[-1].sample_idx
            before = expected.first, expected.last, expected.count, expected.tokens
            if (first, last, len(rows), self._pending.tokens) != before:
                raise self._other_data(number)
        self._writer.commit(self._pending, cursor, number, partial)
        self._empty()  # only now, because Ctrl-C may interrupt `commit`
        self._cut_so_far = number

    def _other_data(self, number: int) -> StorageError:
        return StorageError(
            f"{self._where}: shard {number} cannot be made again: the data set gives other samples "
            "now; restore the files that the run began with"
        )
