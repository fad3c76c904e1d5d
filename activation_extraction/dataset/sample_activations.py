"""SampleActivations: one sample with its activations, or a document that is joined from pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np

from activation_extraction.common.visible import counted
from activation_extraction.dataset.token_batch import ByHook


@dataclass(frozen=True)
class SampleActivations:
    """One sample: activations by hook, (tokens, width), and what the run stored with it.

    row: of the data set, where the sample comes from: {"file", "line"} of JSON Lines, counted from
    1; {"file", "row_group", "row"} of Parquet, from 0; {"row"} of a hub data set, from 0, with
    {"share"} if it counts only one share of the data. In a mixture it has the {"source"}, too. The
    pieces of a long document have the same row but for {"piece", "start"}: the number of the piece,
    from 0, and the position in the document of its first token. cut: how many tokens of the
    document were left out at its end. columns: those that the run kept, by name.
    role, turn: int32 (tokens,), None where the run has none; a role is an index in
    `activation_extraction.ROLES`.
    """

    activations: ByHook[np.ndarray]
    token_ids: np.ndarray
    position: np.ndarray
    sample_idx: int
    text_preview: str
    doc_id: Any
    row: Mapping[str, Any] | None
    cut: int
    columns: Mapping[str, Any] = field(default_factory=dict)
    role: np.ndarray | None = None
    turn: np.ndarray | None = None

    def __getitem__(self, hook: str) -> np.ndarray:
        return self.activations[hook]


class Samples(Sequence[SampleActivations]):
    """Samples that are read when they are asked for, by `_sample` of their number from 0."""

    def number(self, index: int) -> int:
        """Returns the number of a sample, which an index may count from the end. Raises
        IndexError."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index}: the dataset has {counted(len(self), 'sample')}")
        return index % len(self)

    @overload
    def __getitem__(self, index: int) -> SampleActivations: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampleActivations]: ...
    def __getitem__(self, index: int | slice) -> SampleActivations | list[SampleActivations]:
        if isinstance(index, slice):
            return [self._sample(number) for number in range(*index.indices(len(self)))]
        return self._sample(self.number(index))

    def _sample(self, number: int) -> SampleActivations:
        raise NotImplementedError


def piece_of(row: Mapping[str, Any] | None) -> tuple[int, int, dict[str, Any]] | None:
    """Returns the number and the start of a piece of a document, and its row without these; None
    for the row of a sample that is no piece."""
    document = dict(row or {})
    piece, start = document.pop("piece", None), document.pop("start", None)
    return None if piece is None or start is None else (piece, start, document)


def joined(pieces: Sequence[SampleActivations], starts: Sequence[int]) -> SampleActivations:
    """Returns a document as one sample, with the position of every token in the document.

    pieces: all of them, in their order. starts: where in the document each begins.
    """
    first = pieces[0]
    at = [start + piece.position for start, piece in zip(starts, pieces, strict=True)]
    values = {hook: np.concatenate([p[hook] for p in pieces]) for hook in first.activations}
    whole: dict[str, Any] = {
        name: np.concatenate([getattr(piece, name) for piece in pieces])
        for name in ("token_ids", "role", "turn")
        if getattr(first, name) is not None
    }
    return replace(
        first,
        activations=ByHook(values, first.activations.aliases),
        position=np.concatenate(at).astype(np.int32),
        cut=pieces[-1].cut,
        **whole,
    )
