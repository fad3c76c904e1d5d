"""Declares workers, samples and batches, the types that other rooms use.

documents.py splits the data between workers, samples.py makes samples, and packing.py makes batches
of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.text.mark import Mark
from activation_extraction.text.sample_facts import SampleFacts


@dataclass(frozen=True)
class Worker:
    """A host that reads a share of the data.

    Data is first split between machines. The hosts of a machine then split the machine's share, so
    machines may differ in their number of hosts.

    Attributes:
        machine: Number of the machine, from 0.
        machines: Number of machines.
        host: Number of the host in its machine, from 0.
        hosts: Number of hosts of the machine.
    """

    machine: int = 0
    machines: int = 1
    host: int = 0
    hosts: int = 1

    def sample_idx(self, number: int) -> int:
        """Returns the index of one of this worker's samples, which is unique over all workers.

        Args:
            number: Number of the sample among those of this worker, from 0.
        """
        return (number * self.hosts + self.host) * self.machines + self.machine

    def number_of(self, sample_idx: int) -> int:
        """Returns the number that a sample has among those of this worker, from 0.

        Args:
            sample_idx: Number of the sample among those of all workers. It must be this worker's.
        """
        return (sample_idx - self.sample_idx(0)) // self.stride

    def share_of(self, limit: int | None) -> int | None:
        """Returns the share that this host has of a limit.

        Args:
            limit: Most samples or tokens of its machine. None for no limit.

        Returns:
            Most samples or tokens of this host; None for no limit.
        """
        return None if limit is None else len(range(self.host, limit, self.hosts))

    @property
    def stride(self) -> int:
        """The difference between the `sample_idx` of consecutive samples of this worker."""
        return self.hosts * self.machines


@dataclass(frozen=True)
class Sample:
    """A tokenised document or a piece of one.

    Attributes:
        facts: Facts of the sample, which are stored beside its tokens.
        token_ids: Ids of the tokens, int32 (tokens,). samples.py leaves them out if the sample
            keeps no token, because then nothing needs them.
        mark: Mark before the sample.
        labels: Labels of the tokens by name, int32 (tokens,) each: "role", an index into ROLES, and
            "turn". Empty unless the sample is a conversation.
        kept: Positions of the tokens whose activations are stored, int32, ascending. None for all
            tokens.
    """

    facts: SampleFacts
    token_ids: np.ndarray
    mark: Mark
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)
    kept: np.ndarray | None = None

    @property
    def number(self) -> int:
        """The number of the sample among those of its worker, counted from 0."""
        return self.mark.samples

    @property
    def mark_after(self) -> Mark:
        """The mark after the sample."""
        return self.mark.after(self.num_kept)

    @property
    def kept_positions(self) -> np.ndarray:
        """The positions of the tokens whose activations are stored, int32, ascending."""
        return np.arange(len(self.token_ids), dtype=np.int32) if self.kept is None else self.kept

    @property
    def num_kept(self) -> int:
        """The number of tokens whose activations are stored."""
        return len(self.token_ids if self.kept is None else self.kept)


class Placed(NamedTuple):
    """A sample with the part of a batch's row that contains its tokens.

    Attributes:
        sample: Sample, which may have no tokens.
        row: Index of the row in the batch.
        start: Index in the row of the sample's first token.
        mark: Mark from which a run continues once this sample and all samples that were placed
            before it, in this batch and in earlier ones, are stored. Some samples after the mark
            may be stored already.
    """

    sample: Sample
    row: int
    start: int
    mark: Mark

    @property
    def stop(self) -> int:
        """The index in the row after the sample's last token."""
        return self.start + len(self.sample.token_ids)


@dataclass(frozen=True)
class Batch:
    """A batch of B rows of T tokens, in which samples are packed.

    Attributes:
        token_ids: Token ids, int32 (B, T); 0 for padding.
        segment_ids: Number of the sample in its row, from 1 on, for each token, int32 (B, T); 0
            for padding.
        positions: Position of each token in its sample, from 0, int32 (B, T); 0 for padding.
        samples: Samples row by row, and from left to right in a row.
        kept: Mask of the tokens whose activations are stored, bool (B, T); None for all.
    """

    token_ids: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    samples: tuple[Placed, ...]
    kept: np.ndarray | None = None

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sample."""
        return [len(placed.sample.token_ids) for placed in self.samples]

    def kept_tokens(self) -> Iterator[tuple[Any, np.ndarray]]:
        """Yields where the kept tokens of each sample are.

        Yields:
            For each sample an index, and the positions of its kept tokens in the sample, int32
            (tokens,). If all tokens are kept, the index selects the sample's tokens in an array
            (B, T, ...). Otherwise it selects them in an array (tokens, ...) that has only the kept
            tokens of the batch, row by row.
        """
        if self.kept is None:
            for placed in self.samples:
                all_positions = np.arange(placed.stop - placed.start, dtype=np.int32)
                yield (placed.row, slice(placed.start, placed.stop)), all_positions
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
