"""Statistics of every dimension of a hook, with and without attention sinks.

They are merged from the files beside the shards, in the order of the shards: always with the same
result.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.store.commit import Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.shard_reader import read_sums
from activation_extraction.store.statistics import OTHER, Statistics, Sums

READERS = 16  # files read at the same time


@dataclass(frozen=True, eq=False)
class DimensionStatistics:
    """Of some tokens: mean and (population) variance of every dimension, float64 (width,), and the
    mean Euclidean norm."""

    tokens: int
    mean: np.ndarray
    variance: np.ndarray
    mean_norm: float


@dataclass(frozen=True)
class HookStatistics(Statistics):
    """Statistics of a hook over all that is stored.

    mean, variance, mean_norm and max_norm are numbers over all values, or all tokens. `all_tokens`
    and `without_first_token` have them for every dimension. The first token of a document often is
    an attention sink, whose norm is 100 times that of the others. These two raise OSError for
    damaged files.
    """

    load: Callable[[], Sums] = field(repr=False, compare=False, kw_only=True)

    @classmethod
    def of_hook(cls, known: Statistics, load: Callable[[], Sums]) -> "HookStatistics":
        """known: what the JSON files say; load: reads the rest when it is asked for."""
        norms = known.mean_norm, known.max_norm
        return cls(known.tokens, known.values, known.mean, known.variance, *norms, load=load)

    @cached_property
    def _sums(self) -> Sums:
        return self.load()

    @cached_property
    def all_tokens(self) -> DimensionStatistics:
        """Of every token."""
        return _of(self._sums, slice(None))

    @cached_property
    def without_first_token(self) -> DimensionStatistics:
        """Of the tokens that are not the first one of their document."""
        return _of(self._sums, slice(OTHER, None))

    @property
    def norms_by_position(self) -> dict[range, float]:
        """Positions in a document -> mean norm there; only ranges that have tokens."""
        counts, norms = self._sums.counts, self._sums.norms
        return {
            range(1 << bucket >> 1, 1 << bucket): float(norms[bucket] / counts[bucket])
            for bucket in np.flatnonzero(counts).tolist()
        }


def _of(sums: Sums, kinds: slice) -> DimensionStatistics:
    """Those of sinks, of others, or of both: position 0 is bucket 0. NaN for no tokens."""
    tokens = int(sums.counts[kinds].sum())
    totals = sums.sums[kinds].sum(0), sums.squares[kinds].sum(0), sums.norms[kinds].sum()
    with np.errstate(invalid="ignore"):
        mean, squares, norm = (total / tokens for total in totals)
    return DimensionStatistics(tokens, mean, np.maximum(squares - mean * mean, 0), float(norm))


def merged_sums(
    root: Folder, shards: Sequence[tuple[str, Commit]], hooks: Mapping[str, int]
) -> dict[str, Sums]:
    """Of all shards. Raises as `HookStatistics` says."""
    total: dict[str, Sums] = {}  # as large as what was read
    folders = {name: root.child(name) for name, _ in shards}
    try:
        with ThreadPoolExecutor(READERS) as pool:
            for found in pool.map(lambda at: read_sums(folders[at[0]], at[1], hooks), shards):
                for hook, sums in found.items():
                    if hook in total:
                        total[hook].merge(sums)
                    else:
                        total[hook] = sums
    except RunError as error:
        raise OSError(str(error)) from error
    return total or {name: Sums.zeros(width) for name, width in hooks.items()}
