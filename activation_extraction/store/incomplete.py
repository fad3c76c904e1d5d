"""IncompleteSamples: samples that do not have activations for all hooks yet."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from activation_extraction.store.shard import Key, SampleRow

Slices = dict[Key, np.ndarray]  # one sample's: key of a hook -> (tokens, width)


@dataclass
class _Sample:
    row: SampleRow
    slices: Slices = field(default_factory=dict)


class IncompleteSamples:
    """Keeps activations that are given one hook at a time. keys: those of all hooks."""

    def __init__(self, keys: Collection[Key]) -> None:
        self._keys = keys
        self._samples: dict[int, _Sample] = {}

    def add(self, key: Key, activation: np.ndarray, row: SampleRow) -> tuple[SampleRow, Slices]:
        """Adds one hook; returns the sample's row and the hooks that it has so far.

        The row is the one given with the sample's first hook. A sample that has all its hooks is
        dropped from here. Raises ValueError for a hook that the sample already has.
        """
        sample = self._samples.setdefault(row.sample_idx, _Sample(row))
        if key in sample.slices:
            raise ValueError(f"sample {row.sample_idx}, hook {key!r}: given twice or out of order")
        sample.slices[key] = activation
        if len(sample.slices) == len(self._keys):
            del self._samples[row.sample_idx]
        return sample.row, sample.slices

    def check_none(self) -> None:
        """Raises ValueError if a sample lacks hooks."""
        for number, sample in self._samples.items():
            missing = [key for key in self._keys if key not in sample.slices]
            raise ValueError(f"sample {number} has no activation for {missing}; it is not stored")
