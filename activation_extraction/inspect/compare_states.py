"""Compares hidden states that another program stored with states of a model, token by token.

verify_states.py chooses the rows to compare and describes the results. A row is an entry of the
other program's data set. For each row there is a file, which contains the states of some layers for
each token of the row's sample.

The relative error of a token is the norm of the difference between its stored and its computed
state, divided by the norm of the computed state. The error of several tokens is the root mean
square of their relative errors. So tokens with huge norms, such as the first token in many models,
count no more than other tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from activation_extraction.inspect.hidden_states import StoredRow
from activation_extraction.inspect.verify import COMPUTING_ERRORS, ROUNDING_ERRORS

# Largest relative error of one token that rounding explains, as a multiple of
# `Limits.max_rms_token_error`.
TOKEN_FACTOR = 5
# Largest fraction of a row's tokens for which this program and the program that stored the row may
# have chosen different experts. Rounding to bfloat16 decides between experts that have nearly equal
# scores. In tiny random models with 6 experts, 3 % of 200 tokens had errors above
# `Limits.max_token_error` after two layers.
MAX_TOKEN_FRACTION_WITH_OTHER_EXPERTS = 0.1
# Largest relative error of a token's stored state that a different choice of experts explains. The
# relative error is the norm of the difference between the stored and the computed state, divided by
# the norm of the computed state. A stored state of zeros has the relative error 1. The limit is
# below 1, because a different choice of experts does not explain such a state.
MAX_ERROR_WITH_OTHER_EXPERTS = 0.9
# Largest relative error of a stored state when `align` searches for the token to which the state
# belongs, as a multiple of `Limits.max_rms_token_error`. The factor is smaller than TOKEN_FACTOR,
# the factor for a state whose token is known, so that a similar state of another token is not
# accepted.
ALIGNMENT_FACTOR = 2
# If a layer of a file contains wrong states, a message says to which computed states they belong,
# part by part. A part consists of the stored states that match the computed states of one sample at
# one hook, all shifted by the same number of tokens (`Alignment`). At most this many parts are
# described, to keep the message short.
MAX_PARTS = 3
# Factor by which the error of another hook must be smaller than the error of the expected hook, so
# that the states are taken for those of the other hook. Rounding alone may make the states of a
# neighbouring layer slightly nearer.
MIN_ERROR_RATIO = 2


@dataclass(frozen=True)
class Limits:
    """The largest differences between stored and computed states that rounding explains.

    Attributes:
        max_rms_token_error: Largest allowed root mean square of the relative errors of a row's
            tokens. The error of a token is relative to the norm of its computed state (see
            `token_errors`).
        max_token_error: Largest allowed relative error of a single token.
        max_token_fraction_with_other_experts: Largest fraction of a row's tokens that may have
            larger errors, up to MAX_ERROR_WITH_OTHER_EXPERTS, because this program and the program
            that stored the row have chosen different experts for these tokens. 0 if the model has
            no experts, or if both programs compute in float32, so that rounding hardly changes the
            choice.
    """

    max_rms_token_error: float
    max_token_error: float
    max_token_fraction_with_other_experts: float

    @classmethod
    def of(cls, stored_dtype: str, computing_dtype: str, has_experts: bool) -> "Limits":
        """Returns the limits for a file of another program.

        The limit `max_rms_token_error` is c + r. Here, r is the error of rounding to the stored
        dtype (ROUNDING_ERRORS in verify.py), and c is the error of computing on another platform
        (COMPUTING_ERRORS in verify.py) in the less precise one of two dtypes: the dtype of this
        computation, and the dtype in which the other program has probably computed. The other
        program's dtype is taken to be float32 if the file contains float32, and bfloat16 otherwise.
        The limit `max_token_error` is TOKEN_FACTOR times as large.
        `max_token_fraction_with_other_experts` is MAX_TOKEN_FRACTION_WITH_OTHER_EXPERTS if the
        model has experts and one of the two dtypes is bfloat16, otherwise 0.

        Args:
            stored_dtype: Name of the dtype in the file, FLOAT8 for e4m3.
            computing_dtype: Name of the dtype of this computation.
            has_experts: Whether the model chooses experts for each token.
        """
        dtype_of_other_program = "float32" if stored_dtype == "float32" else "bfloat16"
        _, error_of_this_dtype = COMPUTING_ERRORS[computing_dtype]
        _, error_of_other_dtype = COMPUTING_ERRORS[dtype_of_other_program]
        max_relative_computing_error = max(error_of_this_dtype, error_of_other_dtype)
        max_rms_token_error = max_relative_computing_error + ROUNDING_ERRORS[stored_dtype]
        uses_bfloat16 = "bfloat16" in (computing_dtype, dtype_of_other_program)
        max_token_fraction_with_other_experts = (
            MAX_TOKEN_FRACTION_WITH_OTHER_EXPERTS if has_experts and uses_bfloat16 else 0.0
        )
        return cls(
            max_rms_token_error,
            TOKEN_FACTOR * max_rms_token_error,
            max_token_fraction_with_other_experts,
        )


class HookMatch(NamedTuple):
    """The errors of a row's stored states in one layer, against computed states at one hook.

    A match with smaller errors sorts before a match with larger errors. The relative error of a
    token is the norm of the difference between its stored and its computed state, divided by the
    norm of the computed state.

    Attributes:
        rms_token_error: Root mean square of the tokens' relative errors. Tokens are left out if
            this program and the program that stored the row may have chosen different experts for
            them.
        largest_token_error: Largest relative error of a token that is not left out.
        hook_name: Name of the hook.
        token_offset_from_state: Index of a token minus the index of the stored state with which the
            computed state of this token is compared. The right offset is 0, because a correct file
            has the state of token i at index i.
        num_tokens_with_other_experts: Number of tokens that are left out because of different
            experts.
    """

    rms_token_error: float
    largest_token_error: float
    hook_name: str
    token_offset_from_state: int
    num_tokens_with_other_experts: int

    def within(self, limits: Limits) -> bool:
        """Returns whether rounding may explain the error of the row and the errors of its tokens.

        Args:
            limits: Largest errors that rounding explains.
        """
        return (
            self.rms_token_error <= limits.max_rms_token_error
            and self.largest_token_error <= limits.max_token_error
        )


def token_errors(stored: np.ndarray, computed: np.ndarray) -> np.ndarray:
    """Returns the relative error of each token's stored state, float64 (tokens,).

    The relative error is the Euclidean norm of the difference between the stored and the computed
    state, divided by the norm of the computed state. If the computed state is zero, the norm is
    divided by 1 instead. The error is infinite if one of the states contains NaN or infinity.

    Args:
        stored: States of a file, float32 (tokens, width).
        computed: States that the model computes for the same tokens, float32 (tokens, width).
    """
    with np.errstate(invalid="ignore", over="ignore"):
        difference_norms = np.linalg.norm(stored - computed, axis=1).astype(np.float64)
    computed_norms = np.linalg.norm(computed, axis=1).astype(np.float64)
    relative_errors = difference_norms / np.where(computed_norms == 0, 1, computed_norms)
    return np.where(np.isfinite(relative_errors), relative_errors, np.inf)


def match_hooks(
    row: StoredRow, layer: int, computed: Mapping[str, np.ndarray], limits: Limits
) -> dict[tuple[str, int], HookMatch]:
    """Compares a row's stored states in one layer with the computed states at all hooks.

    Args:
        row: Content of the row's file.
        layer: Index of the layer in `row.states_of_layers`.
        computed: States that the model computes for the tokens of the row at each hook, by the name
            of the hook, float32 (tokens, width).
        limits: Largest differences that rounding explains.

    Returns:
        A `HookMatch` by the name of the hook and the offset (`HookMatch.token_offset_from_state`).
        At offset k, the stored state at index i is compared with the computed state of token i + k.
        The offsets are 0, -1 and 1. If there are fewer states than tokens, they also include the
        offset at which the last state is compared with the last token. An offset is left out if it
        assigns no state to a token.
    """
    stored_states = row.states(layer)
    token_count = len(row.token_ids)
    token_offsets = {0, -1, 1}
    if len(stored_states) < token_count:
        token_offsets.add(token_count - len(stored_states))
    match_by_hook_and_token_offset: dict[tuple[str, int], HookMatch] = {}
    for hook_name, hook_states in computed.items():
        for token_offset_from_state in token_offsets:
            first_state_index = max(0, -token_offset_from_state)
            stop_state_index = min(len(stored_states), token_count - token_offset_from_state)
            if first_state_index >= stop_state_index:
                continue
            expected_states = row.as_if_stored(
                hook_states[
                    first_state_index + token_offset_from_state : stop_state_index
                    + token_offset_from_state
                ],
                first_state_index,
            )
            relative_errors_of_tokens = token_errors(
                stored_states[first_state_index:stop_state_index], expected_states
            )
            tokens_with_other_experts_mask = _tokens_with_other_experts(
                relative_errors_of_tokens, limits
            )
            relative_errors_of_tokens = relative_errors_of_tokens[~tokens_with_other_experts_mask]
            rms_token_error = float(np.sqrt(np.mean(relative_errors_of_tokens**2)))
            match_by_hook_and_token_offset[hook_name, token_offset_from_state] = HookMatch(
                rms_token_error,
                float(relative_errors_of_tokens.max()),
                hook_name,
                token_offset_from_state,
                int(tokens_with_other_experts_mask.sum()),
            )
    return match_by_hook_and_token_offset


def _tokens_with_other_experts(errors: np.ndarray, limits: Limits) -> np.ndarray:
    """Returns a mask of the tokens of a row whose large errors may come from different experts.

    This program and the program that stored the row may have chosen different experts for a token.
    This may explain an error above `limits.max_rms_token_error` and up to
    MAX_ERROR_WITH_OTHER_EXPERTS. Of the tokens with such errors, the mask selects only the tokens
    with the largest errors. Their number is at most the product of
    `limits.max_token_fraction_with_other_experts` and the number of the row's tokens, rounded down
    to an integer. If a product that is not 0 would be rounded down to 0, it is rounded up to 1. The
    mask selects no token if the fraction is 0 or if the row has a single token.

    Args:
        errors: Relative error of each token, (tokens,), as the docstring of the module defines it.
        limits: Largest differences that rounding explains.

    Returns:
        Whether different experts may explain the error of each token, bool (tokens,).
    """
    tokens_with_other_experts_mask = np.zeros(len(errors), bool)
    if not limits.max_token_fraction_with_other_experts or len(errors) < 2:
        return tokens_with_other_experts_mask
    candidate_token_indices = np.flatnonzero(
        (errors > limits.max_rms_token_error) & (errors <= MAX_ERROR_WITH_OTHER_EXPERTS)
    )
    max_tokens_with_other_experts = max(
        int(limits.max_token_fraction_with_other_experts * len(errors)), 1
    )
    candidate_indices_largest_error_first = candidate_token_indices[
        np.argsort(-errors[candidate_token_indices])
    ]
    tokens_with_other_experts_mask[
        candidate_indices_largest_error_first[:max_tokens_with_other_experts]
    ] = True
    return tokens_with_other_experts_mask


class Alignment(NamedTuple):
    """A match between stored states and states that the model computes for a sample at a hook.

    Another program has stored the states in a layer of a file, which is one of the file's arrays
    of hidden states. The stored states may belong to another
    sample, hook or token than expected. The alignments of the layer show to which.

    Attributes:
        row_number_of_sample: Number, in the other program's data set, of the row whose sample was
            computed. It may be another row than the row whose file contains the layer.
        hook_name: Name of the hook at which the states were computed.
        token_offset_from_state: Offset from the index of a stored state to the index of the token
            in the sample whose computed state it is compared with.
        matching_state_mask: Whether each stored state of the layer matches the computed state with
            which it is compared, bool (states,).
    """

    row_number_of_sample: int
    hook_name: str
    token_offset_from_state: int
    matching_state_mask: np.ndarray

    @property
    def num_matching_states(self) -> int:
        """The number of stored states that match the computed states."""
        return int(self.matching_state_mask.sum())


def align(
    row: StoredRow,
    layer: int,
    row_number_of_sample: int,
    hook: str,
    computed: np.ndarray,
    limits: Limits,
) -> list[Alignment]:
    """Compares each stored state of a layer with the computed state of each token of a sample.

    A layer is an array of hidden states in the file of a row. The comparison shows whether the
    stored states belong to the sample, and to which of its tokens. A pair of a state and a token
    has an offset, the index of the token minus the index of the state.

    Args:
        row: Content of the file with the stored states.
        layer: Index of the layer in `row.states_of_layers`.
        row_number_of_sample: Number, in the other program's data set, of the row whose sample was
            computed. `row` may be the content of another row's file.
        hook: Name of the hook at which the states were computed.
        computed: Computed states of the sample, float32 (tokens, width).
        limits: Largest differences that rounding explains. A stored state matches if its error is
            at most ALIGNMENT_FACTOR times `limits.max_rms_token_error`.

    Returns:
        An `Alignment` for each of the MAX_PARTS offsets with the largest numbers of matching
        states, in descending order of this number. Of two offsets with equal numbers, the offset
        that is nearer to 0 comes first. Empty if no state matches.
    """
    # The squared distance of a stored state s and a computed state c is |s|^2 + |c|^2 - 2 s.c. It
    # is computed for all pairs, (states, tokens). If s and c are nearly equal, the terms cancel. In
    # float64, the squared distance then has a rounding error of about 1e-16 |s|^2, which changes
    # the distance by at most about 1e-8 |s|. This is far below all limits.
    stored_states = row.states(layer).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        dot_products = stored_states @ computed.astype(np.float64).T
        stored_squared_norms = np.square(stored_states).sum(axis=1)[:, None]
        computed_squared_norms = np.square(computed.astype(np.float64)).sum(axis=1)[None]
        squared_distances = stored_squared_norms + computed_squared_norms - 2 * dot_products
        match_mask = (
            squared_distances
            <= (ALIGNMENT_FACTOR * limits.max_rms_token_error) ** 2 * computed_squared_norms
        )
    match_mask &= computed_squared_norms > 0
    state_indices, token_indices = np.nonzero(match_mask)
    token_offsets_of_matches = token_indices - state_indices
    distinct_token_offsets, counts_of_token_offsets = np.unique(
        token_offsets_of_matches, return_counts=True
    )
    indices_most_frequent_first = np.lexsort(
        (np.abs(distinct_token_offsets), -counts_of_token_offsets)
    )
    most_frequent_token_offsets = distinct_token_offsets[indices_most_frequent_first[:MAX_PARTS]]
    alignments: list[Alignment] = []
    for token_offset_from_state in most_frequent_token_offsets.tolist():
        matching_state_mask = np.zeros(len(stored_states), bool)
        match_at_offset_mask = token_offsets_of_matches == token_offset_from_state
        matching_state_mask[state_indices[match_at_offset_mask]] = True
        alignments.append(
            Alignment(row_number_of_sample, hook, token_offset_from_state, matching_state_mask)
        )
    return alignments


def best_alignments(alignments: Sequence[Alignment]) -> Iterator[Alignment]:
    """Yields the alignments that best explain which states a layer of a file contains.

    At most MAX_PARTS alignments are yielded. An alignment pairs the stored states of the layer with
    the computed states of one sample, and explains the stored states that match. The alignment that
    explains the largest number of states comes first. Each further alignment explains the largest
    number of states that no earlier alignment explains.

    An alignment that explains only one state is left out, unless the layer contains only one state.
    Such a match proves little, because the first tokens of different samples often have equal
    states.

    Args:
        alignments: Alignments of the layer with any samples, hooks and offsets. Of two alignments
            that explain equally many states, the earlier one is preferred.

    Yields:
        The alignments. The field `matching_state_mask` of a yielded alignment is False for the
        states that an earlier yielded alignment explains.
    """
    remaining_alignments = list(alignments)
    for _ in range(MAX_PARTS if alignments else 0):
        largest_alignment = max(
            remaining_alignments, key=lambda alignment: alignment.num_matching_states
        )
        if largest_alignment.num_matching_states < min(
            2, len(largest_alignment.matching_state_mask)
        ):
            return
        yield largest_alignment
        remaining_alignments = [
            alignment._replace(
                matching_state_mask=alignment.matching_state_mask
                & ~largest_alignment.matching_state_mask
            )
            for alignment in remaining_alignments
        ]
