"""The types that `text` hands on: workers, samples and batches.

The model and the output know only this module of the folder. Data is first split between machines;
the hosts of a machine then split its share, so machines may differ in their number of hosts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.text.mark import Mark
from activation_extraction.text.sample_facts import SampleFacts


@dataclass(frozen=True)
class Worker:
    """Host `host` of `hosts`, on machine `machine` of `machines`: a share of the data."""

    machine: int = 0
    machines: int = 1
    host: int = 0
    hosts: int = 1

    def sample_idx(self, number: int) -> int:
        """Returns the index of this worker's sample `number`, unique over all workers."""
        return (number * self.hosts + self.host) * self.machines + self.machine

    def number_of(self, sample_idx: int) -> int:
        """Returns the number of a sample of this worker: the reverse of `sample_idx`."""
        return (sample_idx - self.sample_idx(0)) // self.stride

    def share_of(self, limit: int | None) -> int | None:
        """Returns how many of a machine's samples or tokens are this host's; None: no limit."""
        return None if limit is None else len(range(self.host, limit, self.hosts))

    @property
    def stride(self) -> int:
        """The difference between the indices of consecutive samples of this worker."""
        return self.hosts * self.machines


@dataclass(frozen=True)
class Sample:
    """One tokenised document, or a piece of one.

    Attributes:
        facts: All that is known of the sample beside its tokens.
        token_ids: Ids of the tokens, int32 (tokens,); empty if the sample keeps no token, since
            nothing needs them then.
        mark: Mark before the sample.
        labels: Labels of the tokens, int32 (tokens,) each, by name: "role" (a number in ROLES) and
            "turn". Empty unless the sample is a conversation.
        kept: Positions of the tokens whose activations are wanted, int32, ascending. None for all
            tokens.
    """

    facts: SampleFacts
    token_ids: np.ndarray
    mark: Mark
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)
    kept: np.ndarray | None = None

    @property
    def number(self) -> int:
        """The sample's number among those of its worker, counted from 0."""
        return self.mark.samples

    @property
    def mark_after(self) -> Mark:
        """The mark after the sample."""
        return self.mark.after(self.num_kept)

    @property
    def kept_positions(self) -> np.ndarray:
        return np.arange(len(self.token_ids), dtype=np.int32) if self.kept is None else self.kept

    @property
    def num_kept(self) -> int:
        return len(self.token_ids if self.kept is None else self.kept)


class Placed(NamedTuple):
    """A sample and its place in a batch; one without tokens takes no room there.

    Attributes:
        sample: The sample.
        row: Row of the batch.
        start: Position in the row of the sample's first token.
        mark: Mark from which a run continues if this sample and all those before it, in this batch
            and in earlier ones, are stored. Some samples after the mark may be stored already.
    """

    sample: Sample
    row: int
    start: int
    mark: Mark

    @property
    def stop(self) -> int:
        return self.start + len(self.sample.token_ids)


@dataclass(frozen=True)
class Batch:
    """Arrays (B, T) int32 and the samples in them, row by row, each row from left to right.

    segment_ids: 1, 2, ... for the samples of each row, 0 for padding. positions: counted from 0
    within each sample. kept: bool (B, T), the tokens whose activations are wanted; None for all.
    """

    token_ids: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    samples: tuple[Placed, ...]
    kept: np.ndarray | None = None

    @property
    def lengths(self) -> list[int]:
        return [len(placed.sample.token_ids) for placed in self.samples]

    def kept_tokens(self) -> Iterator[tuple[Any, np.ndarray]]:
        """Yields, for each sample, an index of its kept tokens and their positions, int32.

        The index is into an array (B, T, ...), or, if only some tokens are kept, into an array
        (tokens, ...) of these, row by row.
        """
        if self.kept is None:
            for placed in self.samples:
                every = np.arange(placed.stop - placed.start, dtype=np.int32)
                yield (placed.row, slice(placed.start, placed.stop)), every
            return
        before = np.concatenate([[0], np.cumsum(self.kept)])
        for placed in self.samples:
            positions = np.flatnonzero(self.kept[placed.row, placed.start : placed.stop])
            first = before[placed.row * self.kept.shape[1] + placed.start]
            yield slice(first, first + len(positions)), positions.astype(np.int32)

    @property
    def num_tokens(self) -> int:
        """The number of tokens without padding."""
        return sum(self.lengths)
