"""Declares the mark: a place in a worker's stream of samples from which the run can continue.

A run that was stopped continues from the mark in the JSON file of its last shard, under the key
`mark`. samples.py makes the mark before each sample. packing.py determines from which mark a run
may continue once a sample is stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Mark:
    """A place in a worker's stream of samples from which the run can continue.

    A worker reads its rows in chunks of several rows. A mark contains the place in the data where a
    chunk starts, and the number of the chunk's samples before the mark. A run that continues reads
    the chunk again, and skips these samples. The names of the fields are also the keys in the JSON
    file of a shard.

    Attributes:
        samples: Number of the worker's samples before the mark.
        skip: Number of samples to skip, which are the samples before the mark that come from the
            same chunk.
        skipped_rows: Number of rows before the mark that were skipped because they could not be
            used.
        empty_rows: Number of rows before the mark without a single token.
        stream: Place in the data where the chunk starts, a JSON object that documents.py defines.
            Empty for the beginning of the data, and for samples that come from no data set.
        tokens: Number of tokens before the mark whose activations are stored.
    """

    samples: int
    skip: int = 0
    skipped_rows: int = 0
    empty_rows: int = 0
    stream: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Mark":
        """Returns a mark that was stored as JSON.

        Args:
            content: The JSON object. Keys that are no fields are ignored, and fields without a key
                get their defaults.
        """
        stored_value_by_field = {}
        for mark_field in fields(cls):
            if mark_field.name in content:
                stored_value_by_field[mark_field.name] = content[mark_field.name]
        return cls(**stored_value_by_field)

    def after(self, num_kept_tokens: int) -> "Mark":
        """Returns the mark after the next sample.

        The numbers of skipped and empty rows stay the same, because the mark before a sample
        already counts all such rows before the sample.

        Args:
            num_kept_tokens: Number of kept tokens of the next sample.
        """
        return replace(
            self, samples=self.samples + 1, skip=self.skip + 1, tokens=self.tokens + num_kept_tokens
        )
