"""A mark: a place in a worker's stream of samples, from which the stream can continue.

samples.py makes the marks before samples, packing.py says after which of them a run may continue,
and the JSON of every shard contains one, under `mark`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Mark:
    """A place in a worker's stream of samples, from which the stream can continue.

    The stream reads documents in chunks. A mark is the state of the documents at the start of a
    chunk, and the number of samples that lie between this start and the mark. The keys in the JSON
    of a shard are the names of the fields.

    Attributes:
        samples: Number of the worker's samples before the mark.
        skip: Number of these samples that come from the chunk.
        skipped_rows: Number of rows before the mark that were skipped because they could not be
            used.
        empty_rows: Number of rows before the mark that have no text.
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
        """Returns the mark that a JSON contains.

        Args:
            content: Fields of the mark by name. Other items are ignored.
        """
        names = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in names})

    def after(self, tokens: int) -> "Mark":
        """Returns the mark after the sample that follows this mark.

        Rows behind that sample's row count only for the marks of later samples.

        Args:
            tokens: Number of tokens that the sample keeps.
        """
        return replace(
            self, samples=self.samples + 1, skip=self.skip + 1, tokens=self.tokens + tokens
        )
