"""Which tokens of a sample are kept.

That follows from the sample alone: from positions, token ids and roles. So it is the same after a
restart, on any mesh and with any batch size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from activation_extraction.common.choices import ROLES
from activation_extraction.common.positions import Positions


@dataclass(frozen=True)
class TokenChoice:
    """positions: the rule of --positions. dropped: token ids that are never kept. roles: the
    only ones whose tokens are kept; () for all.

    The rule counts the tokens of these roles, including those that are dropped.
    """

    positions: Positions = Positions()
    dropped: tuple[int, ...] = ()
    roles: tuple[str, ...] = ()

    def __str__(self) -> str:
        roles = f", of the roles {', '.join(self.roles)}" if self.roles else ""
        dropped = f", without the token ids {', '.join(map(str, self.dropped))}"
        return f"positions {self.positions}{roles}" + (dropped if self.dropped else "")

    @property
    def everything(self) -> bool:
        return self == TokenChoice()

    def eligible(
        self, tokens: int, mask: np.ndarray | None, labels: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Returns which tokens of a whole document the rule counts, bool (tokens,).

        mask: of the same shape, False for tokens that are only context. labels: as of the Sample,
        but for all tokens of the document. That is where a turn ends, even if a sample does before.
        """
        eligible = np.ones(tokens, bool) if mask is None else mask.copy()
        if self.roles:
            eligible &= np.isin(labels["role"], [ROLES.index(role) for role in self.roles])
        if self.positions.last_of_turn:
            places = np.flatnonzero(eligible)
            ends = places[np.diff(labels["turn"][places], append=-1) != 0]
            eligible[:] = False
            eligible[ends] = True
        return eligible

    def kept(
        self, sample_idx: int, token_ids: np.ndarray, eligible: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the positions of a sample's kept tokens, int32, in ascending order.

        eligible: bool (tokens,), as of its document; None for all.
        """
        every = np.arange(len(token_ids), dtype=np.int32)
        positions, rule = every if eligible is None else every[eligible], self.positions
        if rule.share is None:
            chosen = positions[rule.start : rule.stop : rule.step]
        else:
            chance = _random(rule.seed, sample_idx, positions)
            chosen = positions[chance < np.uint64(rule.threshold)]
        return chosen[~np.isin(token_ids[chosen], self.dropped)]


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
