"""Chooses which tokens of a sample are kept, by --positions, --roles and --drop_token_ids.

The activations of kept tokens are stored. The choice for a sample depends only on these flags, on
the sample's document and, if it is random, on the number of the sample in the run. So it is the
same after a restart, on any mesh and with any batch size.
common/positions.py parses --positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from activation_extraction.common.choices import ROLES
from activation_extraction.common.positions import Positions


@dataclass(frozen=True)
class TokenChoice:
    """Chooses the tokens whose activations are stored.

    The choice has two steps. For a document, `eligible` selects the tokens that have one of the
    requested roles. For each sample of the document, `kept` applies the rule of --positions to
    these tokens, and then leaves out the token ids that are never kept. So the rule counts these
    token ids like other tokens.

    Attributes:
        position_rule: The rule of --positions.
        dropped_token_ids: Token ids that are never kept.
        roles: The roles whose tokens may be kept; empty for all roles.
    """

    position_rule: Positions = Positions()
    dropped_token_ids: tuple[int, ...] = ()
    roles: tuple[str, ...] = ()

    def __str__(self) -> str:
        choice_phrase = f"positions {self.position_rule}"
        if self.roles:
            choice_phrase += f", of the roles {', '.join(self.roles)}"
        if self.dropped_token_ids:
            choice_phrase += (
                f", without the token ids {', '.join(map(str, self.dropped_token_ids))}"
            )
        return choice_phrase

    @property
    def keeps_everything(self) -> bool:
        """Returns whether all tokens are kept."""
        return self == TokenChoice()

    def eligible(
        self,
        num_tokens: int,
        storable_token_mask: np.ndarray | None,
        token_labels_by_name: Mapping[str, np.ndarray],
    ) -> np.ndarray:
        """Returns a mask of the tokens of a document among which the rule of --positions chooses.

        These are the tokens whose activations may be stored. If `self.roles` is not empty, they are
        only the tokens with one of these roles. The rule `last_of_turn` is applied here already: it
        leaves only the last such token of each turn. Turns are those of the whole document. So if a
        sample ends before the selected token of a turn, the sample keeps no token of this turn.

        Args:
            num_tokens: The number of tokens of the document.
            storable_token_mask: Mask of the tokens whose activations may be stored, bool
                (num_tokens,). None if the activations of all tokens may be stored. Other tokens are
                only context for the model.
            token_labels_by_name: Name of a label -> its value for each token, int32 (num_tokens,).
                The labels are "role", an index into ROLES, which `self.roles` needs, and "turn",
                the number of the turn, which `last_of_turn` needs. Empty if the document has no
                labels.

        Returns:
            The mask, bool (num_tokens,).
        """
        if storable_token_mask is None:
            eligible_token_mask = np.ones(num_tokens, bool)
        else:
            eligible_token_mask = storable_token_mask.copy()
        if self.roles:
            role_indices = [ROLES.index(role) for role in self.roles]
            eligible_token_mask &= np.isin(token_labels_by_name["role"], role_indices)
        if self.position_rule.keeps_only_last_token_of_turn:
            eligible_token_indices = np.flatnonzero(eligible_token_mask)
            turn_numbers_of_eligible_tokens = token_labels_by_name["turn"][eligible_token_indices]
            last_token_of_turn_mask = np.diff(turn_numbers_of_eligible_tokens, append=-1) != 0
            eligible_token_mask[:] = False
            eligible_token_mask[eligible_token_indices[last_token_of_turn_mask]] = True
        return eligible_token_mask

    def kept(
        self, sample_idx: int, token_ids: np.ndarray, eligible_token_mask: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the positions of a sample's kept tokens.

        Args:
            sample_idx: The `sample_idx` of the sample, on which a random choice depends.
            token_ids: The token ids of the sample, int32 (tokens,).
            eligible_token_mask: Mask of the tokens among which the rule of --positions chooses,
                bool (tokens,). Other tokens are not kept. None if it chooses among all tokens.

        Returns:
            The positions in the sample, counted from 0, int32, ascending.
        """
        candidate_positions = np.arange(len(token_ids), dtype=np.int32)
        if eligible_token_mask is not None:
            candidate_positions = candidate_positions[eligible_token_mask]
        position_rule = self.position_rule
        if position_rule.probability is not None:
            position_hashes = _hashes(position_rule.seed, sample_idx, candidate_positions)
            chosen_positions = candidate_positions[
                position_hashes < np.uint64(position_rule.threshold)
            ]
        else:
            chosen_positions = candidate_positions[
                position_rule.start : position_rule.stop : position_rule.step
            ]
            if (
                position_rule.num_random_positions is not None
                and len(chosen_positions) > position_rule.num_random_positions
            ):
                # The positions with the smallest hashes are chosen. There are no ties, because the
                # hashes of different positions of a sample differ.
                position_hashes = _hashes(position_rule.seed, sample_idx, chosen_positions)
                indices_of_smallest_hashes = np.argpartition(
                    position_hashes, position_rule.num_random_positions - 1
                )[: position_rule.num_random_positions]
                chosen_positions = chosen_positions[np.sort(indices_of_smallest_hashes)]
        dropped_token_mask = np.isin(token_ids[chosen_positions], self.dropped_token_ids)
        return chosen_positions[~dropped_token_mask]


def _hashes(seed: int, sample_idx: int, positions: np.ndarray) -> np.ndarray:
    """Returns a hash for each position of a sample, uint64 (positions,).

    Unlike the random numbers of a library, the hashes are the same on any machine and with any
    version of the libraries.

    Args:
        seed: The seed of the random choice.
        sample_idx: The `sample_idx` of the sample.
        positions: Positions of tokens in the sample, int32 (positions,).
    """
    seed_hash = _mix(np.array([seed], np.uint64))
    sample_hash = _mix(seed_hash + np.uint64(sample_idx))
    return _mix(sample_hash + positions.astype(np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    """Hashes numbers with one step of SplitMix64 (Steele, Lea and Flood, 2014).

    Args:
        x: The numbers, uint64 (numbers,).
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
