"""Which tokens of a sample are kept: a choice made from position, length and token id alone.

So it is the same after a restart, on any mesh and with any batch size. `--positions` and
`--drop_token_ids` make it; it is applied to batches before they are computed.
"""

from dataclasses import dataclass, replace

import numpy as np

from activation_extraction.common.positions import ALL, parse_positions
from activation_extraction.text.batch import Batch


@dataclass(frozen=True)
class TokenChoice:
    """positions: a rule as --positions has it. dropped: token ids that are never kept.

    The rule counts all tokens of a sample, those that are dropped included.
    """

    positions: str = ALL
    dropped: tuple[int, ...] = ()

    def __str__(self) -> str:
        dropped = f", without the token ids {', '.join(map(str, self.dropped))}"
        return f"positions {self.positions}" + (dropped if self.dropped else "")

    @property
    def everything(self) -> bool:
        return self == TokenChoice()

    def kept(self, sample_idx: int, token_ids: np.ndarray) -> np.ndarray:
        """The positions of a sample's kept tokens, int32, in ascending order."""
        rule = parse_positions(self.positions)
        every = np.arange(len(token_ids), dtype=np.int32)
        if rule.share is None:
            chosen = every[rule.start : rule.stop : rule.step]
        else:
            chance = _random(rule.seed, sample_idx, every)
            chosen = every[chance < np.uint64(rule.threshold)]
        return chosen[~np.isin(token_ids[chosen], self.dropped)]

    def mark(self, batch: Batch) -> Batch:
        """The batch with its kept tokens marked."""
        if self.everything:
            return batch
        kept = np.zeros(batch.token_ids.shape, bool)
        for sample, row, start in batch.samples:
            kept[row, start + self.kept(sample.sample_idx, sample.token_ids)] = True
        return replace(batch, kept=kept)


def _random(seed: int, sample_idx: int, positions: np.ndarray) -> np.ndarray:
    """A uint64 for every position: a hash, which is the same everywhere and at all times."""
    of_sample = _mix(_mix(np.array([seed], np.uint64)) + np.uint64(sample_idx))
    return _mix(of_sample + positions.astype(np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
