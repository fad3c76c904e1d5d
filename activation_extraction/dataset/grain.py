"""A source of tokens for the data loader Grain, which reads them in random order.

`TokenRecords` divides the tokens of a run into records of consecutive tokens. Grain shuffles
the records and makes batches of them itself. batches.py makes batches without grain,
with fewer and larger reads.
"""

from bisect import bisect_right
from itertools import accumulate
from operator import index

import numpy as np

from activation_extraction.dataset.token_source import TokenSource
from activation_extraction.dataset.windows import Chunk


class TokenRecords:
    """A sequence of records of tokens, for use as a `grain.sources.RandomAccessDataSource`.

    A record is a dict of NumPy arrays, which `ActivationDataset.grain` describes.

    Args:
        source: Source of the tokens, whose options choose the hooks.
        tokens: Number of tokens in a record. The last record of a shard may have fewer.

    Raises:
        ValueError: If `tokens` is less than 1.
    """

    def __init__(self, source: TokenSource, tokens: int) -> None:
        tokens_per_record = index(tokens)
        if tokens_per_record < 1:
            raise ValueError(f"tokens {tokens_per_record}: expected 1 or more tokens in a record")
        self._token_source = source
        self._tokens_per_record = tokens_per_record
        record_counts = (
            -(-commit.tokens // tokens_per_record)  # this division rounds up
            for commit in source.shards.commits
        )
        # For each shard, the index of its first record among all records. One more item at the end
        # is the number of all records.
        self._record_offsets_of_shards = [0, *accumulate(record_counts)]

    def __len__(self) -> int:
        return self._record_offsets_of_shards[-1]

    def __repr__(self) -> str:
        # grain restores a saved state only if the `repr` of the source is unchanged since then. So
        # the text contains everything that determines the records.
        token_source = self._token_source
        hook_names = list(token_source.options.hooks)
        return (
            f"TokenRecords(data={token_source.fingerprint}, hooks={hook_names}, "
            f"tokens={self._tokens_per_record})"
        )

    def __getitem__(self, record_number: int) -> dict[str, np.ndarray]:
        record_number = index(record_number)
        if not 0 <= record_number < len(self):
            raise IndexError(f"record {record_number}: there are {len(self)}, counted from 0")
        token_source = self._token_source
        shard_index = bisect_right(self._record_offsets_of_shards, record_number) - 1
        first_token_index = (
            record_number - self._record_offsets_of_shards[shard_index]
        ) * self._tokens_per_record
        num_shard_tokens = token_source.shards.commits[shard_index].tokens
        end_token_index = min(first_token_index + self._tokens_per_record, num_shard_tokens)
        batch = token_source.whole_tokens([Chunk(shard_index, first_token_index, end_token_index)])
        array_by_field_name = {
            field_name: getattr(batch, field_name)
            for field_name in ("token_ids", "sample_idx", "position")
        }
        record = {**batch.activations, **array_by_field_name, **batch.labels}
        if self._tokens_per_record == 1:
            return {
                array_name: values_of_tokens[0, ...]
                for array_name, values_of_tokens in record.items()
            }
        return record
