"""Declares workers, samples and batches, the types that other packages use.

documents.py divides the rows of the data among workers, samples.py makes samples, and packing.py
packs samples into batches.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.text.mark import Mark
from activation_extraction.text.sample_facts import SampleFacts


@dataclass(frozen=True)
class Worker:
    """A host of a machine, which reads its own share of the data.

    The data is first divided among the machines. The hosts of a machine then divide the machine's
    share, so machines may differ in their number of hosts.

    Attributes:
        machine_number: Number of the machine, counted from 0.
        num_machines: Number of machines of the run.
        host_number: Number of the host in its machine, counted from 0.
        num_hosts: Number of hosts of the machine.
    """

    machine_number: int = 0
    num_machines: int = 1
    host_number: int = 0
    num_hosts: int = 1

    def sample_idx(self, number: int) -> int:
        """Returns the `sample_idx` of a sample, its number among the samples of the whole run.

        The numbers of a run with W workers are dealt out to the workers in turn: each worker gets
        every W-th number. So no two samples have the same number.

        Args:
            number: Number of the sample among this worker's samples, counted from 0.
        """
        return (
            number * self.num_hosts + self.host_number
        ) * self.num_machines + self.machine_number

    def number_of(self, sample_idx: int) -> int:
        """Returns the number of a sample among this worker's samples, counted from 0.

        Args:
            sample_idx: Number of the sample among all samples of the run. The sample must belong to
                this worker.
        """
        return (sample_idx - self.sample_idx(0)) // self.stride

    def share_of(self, limit: int | None) -> int | None:
        """Returns this host's part of a limit that applies to its whole machine.

        Args:
            limit: Largest number of samples, or of tokens, that the machine stores; None for no
                limit.

        Returns:
            The largest number that this host stores; None for no limit.
        """
        return None if limit is None else len(range(self.host_number, limit, self.num_hosts))

    @property
    def stride(self) -> int:
        """The difference between the `sample_idx` of consecutive samples of this worker."""
        return self.num_hosts * self.num_machines


@dataclass(frozen=True)
class Sample:
    """A sample: a tokenised document, or a piece of one.

    Attributes:
        facts: Facts of the sample, which are stored beside its tokens.
        token_ids: Token ids, int32 (tokens,). samples.py makes them empty if no token's activations
            are stored, because the model need not read the sample then.
        mark: Mark before the sample.
        token_labels_by_name: Name of a label -> its value for each token, int32 (tokens,). The
            labels are "role", an index into ROLES, and "turn", the number of the turn from 0. Empty
            if the sample is no conversation.
        kept_positions_or_none: Positions in the sample, counted from 0, of the tokens whose
            activations are stored, int32, ascending. None if the activations of all tokens are
            stored.
    """

    facts: SampleFacts
    token_ids: np.ndarray
    mark: Mark
    token_labels_by_name: Mapping[str, np.ndarray] = field(default_factory=dict)
    kept_positions_or_none: np.ndarray | None = None

    @property
    def number(self) -> int:
        """The number of the sample among the samples of its worker, counted from 0."""
        return self.mark.samples

    @property
    def mark_after(self) -> Mark:
        """The mark after this sample, from which the stream continues with the next sample."""
        return self.mark.after(self.num_kept)

    @property
    def kept_positions(self) -> np.ndarray:
        """Positions in the sample of the tokens whose activations are stored, int32, ascending."""
        if self.kept_positions_or_none is None:
            return np.arange(len(self.token_ids), dtype=np.int32)
        return self.kept_positions_or_none

    @property
    def num_kept(self) -> int:
        """The number of tokens whose activations are stored."""
        return len(
            self.token_ids if self.kept_positions_or_none is None else self.kept_positions_or_none
        )


class PlacedSample(NamedTuple):
    """A sample with its place in a batch: a row, and a range of tokens in this row.

    Attributes:
        sample: Sample, which may have no tokens.
        row_index: Index of the row in the batch.
        start_in_row: Index of the sample's first token in the row.
        mark: Mark from which a run can continue once this sample is stored, together with all
            samples before it in this batch and in earlier batches. Some samples after the mark may
            be stored already.
    """

    sample: Sample
    row_index: int
    start_in_row: int
    mark: Mark

    @property
    def stop(self) -> int:
        """The end of the sample in the row: the index of its last token plus one."""
        return self.start_in_row + len(self.sample.token_ids)


@dataclass(frozen=True)
class Batch:
    """A batch of B rows of T tokens, in which samples are packed.

    Attributes:
        token_ids: Token ids, int32 (B, T); 0 for padding.
        segment_ids: For each token, the number of its sample in the row, counted from 1, int32
            (B, T); 0 for padding.
        positions: Position of each token in its sample, counted from 0, int32 (B, T); 0 for
            padding.
        samples: Samples with their places, row by row, and from left to right in a row.
        kept_mask: Mask of the tokens whose activations are stored, bool (B, T). None if the
            activations of all tokens are stored.
    """

    token_ids: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    samples: tuple[PlacedSample, ...]
    kept_mask: np.ndarray | None = None

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sample, in the order of `samples`."""
        return [len(placed_sample.sample.token_ids) for placed_sample in self.samples]

    def kept_tokens(self) -> Iterator[tuple[Any, np.ndarray]]:
        """Yields, for each sample, where to find its kept tokens in an array of activations.

        Kept tokens are the tokens whose activations are stored. The array has the shape (B, T, ...)
        if all tokens of the batch are kept. Otherwise, it contains only the kept tokens of the
        batch, row by row, and has the shape (kept tokens, ...).

        Yields:
            A tuple of:
                The index with which the array returns the activations of the sample's kept tokens:
                a row and a slice, or only a slice of the kept tokens.
                The positions of the kept tokens in the sample, counted from 0, int32 (tokens,).
        """
        if self.kept_mask is None:
            for placed_sample in self.samples:
                positions_of_all_tokens = np.arange(
                    placed_sample.stop - placed_sample.start_in_row, dtype=np.int32
                )
                yield (
                    (
                        placed_sample.row_index,
                        slice(placed_sample.start_in_row, placed_sample.stop),
                    ),
                    positions_of_all_tokens,
                )
            return
        row_length = self.kept_mask.shape[1]
        # For each token of the batch, row by row, the number of kept tokens before this token. The
        # last element is the number of all kept tokens.
        kept_token_counts_before_tokens = np.concatenate([[0], np.cumsum(self.kept_mask)])
        for placed_sample in self.samples:
            kept_mask_of_sample = self.kept_mask[
                placed_sample.row_index, placed_sample.start_in_row : placed_sample.stop
            ]
            kept_positions = np.flatnonzero(kept_mask_of_sample)
            index_of_first_kept_token = kept_token_counts_before_tokens[
                placed_sample.row_index * row_length + placed_sample.start_in_row
            ]
            yield (
                slice(index_of_first_kept_token, index_of_first_kept_token + len(kept_positions)),
                kept_positions.astype(np.int32),
            )

    @property
    def num_tokens(self) -> int:
        """The number of tokens without padding."""
        return sum(self.lengths)
