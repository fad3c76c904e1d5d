"""A shard in memory: a list of samples, and the values of each sample at every hook.

The threads of a writer encode and measure a shard; then a shard format makes a file of it. The
facts of its samples are stored in the table of samples (sample_table.py).
"""

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from activation_extraction.common.errors import StorageError
from activation_extraction.store.hook_values import HookValues, Key, groups_of
from activation_extraction.store.statistics import Errors, Sums, SumsOfCodes
from activation_extraction.text.sample_facts import SampleFacts

LABELS = ("role", "turn")  # of every token; all samples of a run have the same ones, or none
MAX_GZIP_RATIO = 1032  # the most bytes that gzip can unpack from one byte
OVERFLOW = (
    "float16 ends at 65504; start anew with --activation_dtype bfloat16 or float32 and --overwrite"
)
NOT_FINITE = (
    "the model computes them, and would do so again; check its weights, or start anew with other "
    "layers or --dtype float32, and --overwrite"
)


@dataclass(frozen=True)
class ShardSample:
    """A sample of a shard, without its activations.

    Attributes:
        facts: Facts of the sample. Those that only the table of samples has are their defaults in a
            shard that was read.
        token_ids: Ids of the stored tokens, int32 (tokens,). None if the caller gave none.
        positions: Positions of the stored tokens, int32 (tokens,), counted from 0 at the start of
            the sample.
        labels: Labels of the stored tokens, int32 (tokens,) each, by names in LABELS. Empty if the
            run has none.
    """

    facts: SampleFacts
    token_ids: np.ndarray | None
    positions: np.ndarray
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """Samples in ascending order, and their values at every hook.

    Attributes:
        samples: The samples.
        hooks: The hooks by key.
        values: The values of each sample by the key of the hook, in the order of the samples. They
            are in the stored form, except before `encode` (see hook_values.py).
    """

    samples: list[ShardSample]
    hooks: Mapping[Key, HookValues]
    values: Mapping[Key, list[Any]]

    @property
    def positions(self) -> list[np.ndarray]:
        """The positions of the tokens of each sample."""
        return [sample.positions for sample in self.samples]

    @property
    def offsets(self) -> np.ndarray:
        """The offset of the first token of each sample, then the number of tokens in the shard.

        int64 (samples + 1,). Sample i has the tokens from offsets[i] up to offsets[i + 1] - 1.
        """
        return np.cumsum([0, *map(len, self.positions)], dtype=np.int64)

    def encode(self, threads: Executor) -> tuple["Shard", dict[Key, Errors]]:
        """Encodes the values at the hooks whose stored form differs from what a step returns.

        Args:
            threads: The threads that encode.

        Returns:
            The shard with all values in the stored form, and the errors of encoding by key; a hook
            that is not encoded has none.
        """
        values, errors = dict[Key, list[Any]](), dict[Key, Errors]()
        for key, hook in self.hooks.items():
            values[key], errors[key] = hook.encode(self.values[key], self.positions, threads)
        return replace(self, values=values), errors

    def measure(
        self, errors: Mapping[Key, Errors], threads: Executor
    ) -> tuple[list[dict[str, Any]], dict[str, Sums]]:
        """Measures the values at all hooks.

        Args:
            errors: The errors of encoding by key.
            threads: The threads that compute sums.

        Returns:
            The entries of the hooks in the shard's JSON, with their statistics, and the sums for
            the statistics file by the hook's name.

        Raises:
            StorageError: A value is NaN or infinite. The message names the sample.
        """
        groups = [(key, group) for key in self.hooks for group in groups_of(self.values[key])]
        totals: dict[Key, Any] = {}
        of_groups = threads.map(lambda group: self._sums(*group), groups)
        for (key, _), part in zip(groups, of_groups, strict=True):
            totals[key] = totals[key].merge(part) if key in totals else part
        entries = []
        for key, total in totals.items():
            statistics = replace(total.statistics, error=errors[key])
            if not statistics.finite:
                self._refuse_not_finite(key)
            entry = self.hooks[key].to_json(self.values[key][0])
            entries.append(entry | statistics.to_json())
        sums = {hook.name: totals[key] for key, hook in self.hooks.items() if hook.is_array}
        return entries, sums

    def _sums(self, key: Key, samples: slice) -> Sums | SumsOfCodes:
        """Returns the sums over some of the samples at a hook."""
        positions = [sample.positions for sample in self.samples[samples]]
        return self.hooks[key].sums(self.values[key][samples], positions)

    def _refuse_not_finite(self, key: Key) -> None:
        """Raises StorageError for the first sample with NaN or infinity at a hook."""
        for number, sample in enumerate(self.samples):
            if not self._sums(key, slice(number, number + 1)).statistics.finite:
                dtype = self.values[key][number].dtype.name
                raise StorageError(
                    f"sample {sample.facts.sample_idx}, hook {key}: NaN or infinite {dtype} values",
                    remedy=OVERFLOW if dtype == "float16" else NOT_FINITE,
                    recurs=True,
                )
