"""A shard in memory: a table of its samples, and for every hook one slice of tokens per sample.

Every shard format writes this and reads it back. Nothing here knows about files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Key = int | str  # what a shard calls a hook: its layer number, or the name the user asked for
DocId = str | int | float | None


@dataclass(frozen=True)
class SampleRow:
    """What a shard knows of one sample.

    token_ids and positions: int32, shape (tokens,); the position of a token counts from 0 at the
    start of its sample. token_ids: None if the caller gave none. The rest is in the table of
    samples; until that is read, text_preview is None, except in pickles, which have it and doc_id
    themselves. doc_id: the `id` of the row in the data set, and row: which row that is. cut: how
    many tokens were left out at the end of its document.
    """

    sample_idx: int
    token_ids: np.ndarray | None
    positions: np.ndarray
    text_preview: str | None = None
    doc_id: DocId = None
    row: Mapping[str, Any] | None = None
    cut: int = 0


@dataclass(frozen=True)
class Shard:
    """Samples in ascending order; `slices[key][i]` is sample i at that hook, (tokens, width).

    chosen: whether the run keeps only some tokens of its samples.
    """

    samples: list[SampleRow]
    slices: dict[Key, list[np.ndarray]]
    chosen: bool = False

    @property
    def needs_positions(self) -> bool:
        """Whether its positions do not simply count the tokens of each sample, or might not."""
        return self.chosen or not all(
            np.array_equal(sample.positions, np.arange(len(sample.positions)))
            for sample in self.samples
        )

    @property
    def positions(self) -> list[np.ndarray]:
        """The positions of the tokens of each sample."""
        return [sample.positions for sample in self.samples]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.positions))

    @property
    def nbytes(self) -> int:
        """The bytes of the activations."""
        return sum(each.nbytes for slices in self.slices.values() for each in slices)

    @property
    def offsets(self) -> np.ndarray:
        """int64, shape (samples + 1,): sample i has the tokens offsets[i] to offsets[i + 1]."""
        lengths = list(map(len, self.positions))
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def follow_each_other(offsets: np.ndarray, tokens: int) -> bool:
    """Whether offsets, of any integers, begin at 0, do not descend, and end at so many tokens."""
    if len(offsets) == 0 or [int(offsets[0]), int(offsets[-1])] != [0, tokens]:
        return False
    return bool((offsets[1:] >= offsets[:-1]).all())  # differences of int64 may overflow


def same_content(one: Shard, other: Shard) -> bool:
    """Whether two shards have the same samples, texts and values, bit by bit."""
    return (
        len(one.samples) == len(other.samples)
        and list(one.slices) == list(other.slices)
        and all(map(_same_row, one.samples, other.samples))
        and all(all(map(_same_array, one.slices[key], other.slices[key])) for key in one.slices)
    )


def _same_row(one: SampleRow, other: SampleRow) -> bool:
    texts = [
        (each.sample_idx, each.text_preview, repr(each.doc_id), each.row, each.cut)
        for each in (one, other)
    ]
    arrays = [(row.token_ids, row.positions) for row in (one, other)]
    return texts[0] == texts[1] and all(map(_same_array, *arrays))


def _same_array(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    same_form = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same_form and one.tobytes() == other.tobytes()
