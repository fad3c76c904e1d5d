"""A shard in memory: a table of its samples, and for every hook one slice of tokens per sample.

Every shard format writes this and reads it back. Nothing here knows about files.
"""

from dataclasses import dataclass

import numpy as np

Key = int | str  # what a shard calls a hook: its layer number, or the name the user asked for
DocId = str | int | float | None


@dataclass(frozen=True)
class SampleRow:
    """One row of the table of samples.

    token_ids and positions: int32, shape (tokens,); the position of a token counts from 0 at the
    start of its sample. token_ids: None if the caller gave none. doc_id: the `id` of the row in
    the data set.
    """

    sample_idx: int
    token_ids: np.ndarray | None
    positions: np.ndarray
    text_preview: str
    doc_id: DocId

    @classmethod
    def whole(
        cls,
        sample_idx: int,
        tokens: int,
        token_ids: np.ndarray | None,
        text_preview: str,
        doc_id: DocId,
    ) -> "SampleRow":
        """A sample of so many tokens with all its positions."""
        return cls(sample_idx, token_ids, np.arange(tokens, dtype=np.int32), text_preview, doc_id)


@dataclass(frozen=True)
class Shard:
    """Samples in ascending order; `slices[key][i]` is sample i at that hook, (tokens, width)."""

    samples: list[SampleRow]
    slices: dict[Key, list[np.ndarray]]

    @property
    def tokens(self) -> int:
        return sum(len(sample.positions) for sample in self.samples)

    @property
    def offsets(self) -> np.ndarray:
        """int64, shape (samples + 1,): sample i has the tokens offsets[i] to offsets[i + 1]."""
        lengths = [len(sample.positions) for sample in self.samples]
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
