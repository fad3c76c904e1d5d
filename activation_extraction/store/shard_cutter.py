"""ShardCutter: gathers samples into shards, in the order in which they come."""

from collections.abc import Mapping, Sequence

from activation_extraction.common.codes import Codes
from activation_extraction.common.encodings import FLOAT8, token_bytes
from activation_extraction.store.resume import StoragePlan
from activation_extraction.store.shard import Key, SampleRow, Shard, Values
from activation_extraction.store.shard_writer import ShardWriter
from activation_extraction.text.batch import Cursor


class ShardCutter:
    """Passes shards to a ShardWriter, under the numbers of a plan. A shard has at most `limit`
    bytes of activations, but at least one sample; its samples are in ascending order.

    Methods raise StorageError as soon as a shard could not be committed.
    """

    def __init__(
        self,
        writer: ShardWriter,
        keys: Sequence[Key],
        limit: float,
        plan: StoragePlan,
    ) -> None:
        self._writer = writer
        self._keys = keys
        self._limit = limit
        self._holes = list(plan.holes)  # numbers of damaged shards, which the plan fills
        self._next = plan.next
        self._mark = plan.mark
        self._may_move = not plan.holes  # a mark may not pass a sample whose shard is still open
        self._empty()

    def _empty(self) -> None:
        self._pending: list[tuple[SampleRow, Mapping[Key, Values]]] = []
        self._bytes = 0

    def add(self, row: SampleRow, slices: Mapping[Key, Values], mark: Cursor | None = None) -> None:
        """Adds a sample. slices: its activations (tokens, width) by the key of the hook. mark:
        where a run continues once this sample and those before it are stored.

        A sample without tokens counts as one token, so that a shard of such samples is cut, too.
        """
        size = 0
        for key, each in slices.items():
            if isinstance(each, Codes):
                size += each.nbytes
                continue
            width, encoded = each.shape[1], key in self._writer.encoded
            of_token = token_bytes(width, FLOAT8) if encoded else width * each.itemsize
            size += max(len(each), 1) * of_token
        if self._pending and self._bytes + size > self._limit:
            self._cut(self._number())
        self._pending.append((row, slices))
        self._bytes += size
        if self._may_move:
            self._mark = mark

    def finish(self, complete: bool) -> None:
        """Cuts the last shard. complete: whether there are no more samples; all holes are filled
        then, the last one at the end, with shards that are empty if nothing is left."""
        if complete and self._holes:
            *others, last = self._holes
            for number in others:
                self._writer.commit(Shard([], {}), self._mark, number)
            self._cut(last)
            self._holes = []
        elif self._pending:
            self._cut(self._number())

    def _number(self) -> int:
        """The number of the next shard. The last hole is kept for the last shard."""
        if len(self._holes) > 1:
            return self._holes.pop(0)
        self._next += 1
        return self._next - 1

    def _cut(self, number: int) -> None:
        self._pending.sort(key=lambda sample: sample[0].sample_idx)
        slices = {key: [each[key] for _, each in self._pending] for key in self._keys}
        shard = Shard([row for row, _ in self._pending], slices)
        self._writer.commit(shard, self._mark, number)
        self._empty()  # only now, because Ctrl-C may interrupt `commit`
