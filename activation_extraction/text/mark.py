"""Declares the mark: a position in a worker's stream of samples, where the stream can continue.

samples.py makes the mark before each sample. packing.py determines from which mark a run may
continue once a sample is stored. The JSON of each shard contains a mark, under `mark`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Mark:
    """A position in a worker's stream of samples, from which the stream can continue.

    The stream reads documents in chunks. A mark contains the state of the documents at the start of
    a chunk, and the number of samples between this start and the mark. The names of the fields are
    also the keys in the JSON of a shard.

    Attributes:
        samples: Number of the worker's samples before the mark.
        skip: Number of these samples that come from the chunk.
        skipped_rows: Number of rows before the mark that were skipped because they could not be
            used.
        empty_rows: Number of rows before the mark without a single token.
        stream: State of the documents at the start of the chunk, as JSON. Empty for the beginning
            of the data, and for samples that come from no data set.
        tokens: Number of tokens that the samples before the mark keep.
    """

    samples: int
    skip: int = 0
    skipped_rows: int = 0
    empty_rows: int = 0
    stream: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Mark":
        """Returns the mark in the JSON of a shard, ignoring keys that are not fields."""
        stored_fields = {}
        for declared in fields(cls):
            if declared.name in content:
                stored_fields[declared.name] = content[declared.name]
        return cls(**stored_fields)

    def after(self, tokens: int) -> "Mark":
        """Returns the mark after the sample that follows this mark.

        It does not count the rows between that sample and the next one.

        Args:
            tokens: Number of tokens that the sample keeps.
        """
        return replace(
            self, samples=self.samples + 1, skip=self.skip + 1, tokens=self.tokens + tokens
        )
