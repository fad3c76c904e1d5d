"""Chooses which tokens of a sample are kept, by --positions, --roles and --drop_token_ids.

The choice follows from the sample alone: from positions, token ids and roles. So it is the same
after a restart, on any mesh and with any batch size. common/positions.py parses --positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from activation_extraction.common.choices import ROLES
from activation_extraction.common.positions import Positions


@dataclass(frozen=True)
class TokenChoice:
    """The choice of the tokens to keep.

    First, `eligible` determines the tokens of a document to which the rule of --positions applies.
    Then `kept` applies the rule to the eligible tokens of each sample, and drops token ids that are
    never kept. (The rule counts these tokens as well.)

    Attributes:
        positions: The rule of --positions.
        dropped: Token ids that are never kept.
        roles: The roles whose tokens may be kept; empty for all.
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
        """Whether all tokens are kept."""
        return self == TokenChoice()

    def eligible(
        self, tokens: int, mask: np.ndarray | None, labels: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Returns the tokens of a document to which the rule of --positions applies.

        With `last_of_turn`, they are the last tokens of the turns of the whole document, even if a
        sample ends earlier.

        Args:
            tokens: The number of tokens of the document.
            mask: Mask that is False for tokens that are only context, bool (tokens,); None if no
                token is only context.
            labels: "role" and "turn" of each token of a conversation, int32 (tokens,) each.

        Returns:
            A mask of the tokens, bool (tokens,).
        """
        eligible = np.ones(tokens, bool) if mask is None else mask.copy()
        if self.roles:
            eligible &= np.isin(labels["role"], [ROLES.index(role) for role in self.roles])
        if self.positions.last_of_turn:
            indices = np.flatnonzero(eligible)
            turns = labels["turn"][indices]
            last_of_turn = indices[np.diff(turns, append=-1) != 0]
            eligible[:] = False
            eligible[last_of_turn] = True
        return eligible

    def kept(
        self, sample_idx: int, token_ids: np.ndarray, eligible: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the positions of a sample's kept tokens.

        Args:
            sample_idx: The index of the sample, which makes a random choice differ between samples.
            token_ids: The token ids of the sample, int32 (tokens,).
            eligible: The tokens to which the rule applies, bool (tokens,); None for all.

        Returns:
            Positions, int32, ascending.
        """
        positions = np.arange(len(token_ids), dtype=np.int32)
        if eligible is not None:
            positions = positions[eligible]
        rule = self.positions
        if rule.share is not None:
            hashes = _hashes(rule.seed, sample_idx, positions)
            chosen = positions[hashes < np.uint64(rule.threshold)]
        else:
            chosen = positions[rule.start : rule.stop : rule.step]
            if rule.count is not None and len(chosen) > rule.count:
                # The positions of a sample have different hashes, so the smallest are unambiguous.
                hashes = _hashes(rule.seed, sample_idx, chosen)
                smallest = np.argpartition(hashes, rule.count - 1)[: rule.count]
                chosen = chosen[np.sort(smallest)]
        return chosen[~np.isin(token_ids[chosen], self.dropped)]


def _hashes(seed: int, sample_idx: int, positions: np.ndarray) -> np.ndarray:
    """Returns a hash of the seed, the sample and each position, uint64 (positions,).

    Unlike random numbers of a library, hashes are the same on any machine and in any version.
    """
    of_seed = _mix(np.array([seed], np.uint64))
    of_sample = _mix(of_seed + np.uint64(sample_idx))
    return _mix(of_sample + positions.astype(np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """Computes one step of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
