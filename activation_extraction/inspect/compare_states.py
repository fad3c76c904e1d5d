"""Compares the hidden states of a file with those that a model computes, token by token.

verify_states.py chooses the rows and words the results.

The relative error of a token is the norm of the difference between its two states, divided by the
norm of the computed state. The error of several tokens is the root mean square of their relative
errors. Tokens with huge norms, such as the first one of many models, count no more than others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from activation_extraction.inspect.hidden_states import StoredRow
from activation_extraction.inspect.verify import COMPUTING_ERRORS, ROUNDING_ERRORS

# Largest error of one token, as a multiple of the largest error of a row.
TOKEN_FACTOR = 5
# Largest share of a row's tokens that may have other experts, and largest error of such a token.
# Rounding to bfloat16 decides between experts that are nearly tied. In tiny random models with 6
# experts, 3 % of 200 tokens had errors above the limit of a token after two layers. The error of a
# token of zeros, 1, is too large.
OTHER_EXPERTS = 0.1
OTHER_EXPERTS_ERROR = 0.9
# Largest error of a token when its sample and position are searched, as a multiple of the largest
# error of a row. It is below TOKEN_FACTOR, because states of different tokens may be similar.
ALIGNMENT_FACTOR = 2
# Largest number of parts of a layer, of other samples or at other offsets, that are described.
MAX_PARTS = 3
# A hook is only taken for another one than the expected hook if its error is smaller by this
# factor. Rounding alone may make the states of a neighbouring layer slightly nearer.
NEARER = 2


@dataclass(frozen=True)
class Limits:
    """The largest relative errors that rounding explains.

    Attributes:
        row: Largest error of the tokens of a row together.
        token: Largest error of a single token.
        other_experts: Largest share of the tokens whose errors are above `row` and at most
            OTHER_EXPERTS_ERROR, because these tokens have other experts. 0 if the model has no
            experts, or if rounding does not choose other ones.
    """

    row: float
    token: float
    other_experts: float

    @classmethod
    def of(cls, stored_dtype: str, computing_dtype: str, has_experts: bool) -> "Limits":
        """Returns the limits for a file.

        The limit of a row is c + r. Here, r is the error of rounding to the stored dtype
        (ROUNDING_ERRORS in verify.py), and c is the error of computing on another platform
        (COMPUTING_ERRORS in verify.py) in the less precise one of two dtypes: the dtype of this
        computation, and the dtype in which the other program has probably computed. The latter is
        float32 if the file contains float32, and bfloat16 if it contains any smaller dtype. The
        limit of a token is TOKEN_FACTOR times as large.

        Args:
            stored_dtype: Name of the dtype in the file, FLOAT8 for e4m3.
            computing_dtype: Name of the dtype of this computation.
            has_experts: Whether the model chooses experts for each token.
        """
        other_dtype = "float32" if stored_dtype == "float32" else "bfloat16"
        computing = max(COMPUTING_ERRORS[computing_dtype][1], COMPUTING_ERRORS[other_dtype][1])
        row_limit = computing + ROUNDING_ERRORS[stored_dtype]
        is_rounded = "bfloat16" in (computing_dtype, other_dtype)
        other_experts = OTHER_EXPERTS if has_experts and is_rounded else 0.0
        return cls(row_limit, TOKEN_FACTOR * row_limit, other_experts)


class HookMatch(NamedTuple):
    """The errors of the states of a layer, compared with the states at one hook.

    Attributes:
        error: Error of all compared tokens together, without tokens that may have other experts.
        largest_error: Largest error of one of these tokens.
        hook: Name of the hook.
        offset: Number that is added to the index of a stored state to get the index of the token
            with whose computed state it is compared. 0 in a right file.
        other_experts: Number of the tokens that are left out.
    """

    error: float
    largest_error: float
    hook: str
    offset: int
    other_experts: int

    def within(self, limits: Limits) -> bool:
        """Returns whether rounding explains the errors."""
        return self.error <= limits.row and self.largest_error <= limits.token


def token_errors(stored: np.ndarray, computed: np.ndarray) -> np.ndarray:
    """Returns the relative error of each token, float64 (tokens,); inf for NaN and infinity.

    Args:
        stored: States of a file, float32 (tokens, width).
        computed: States that the model computes, float32 (tokens, width). The norm of a state of
            zeros counts as 1.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        differences = np.linalg.norm(stored - computed, axis=1).astype(np.float64)
    norms = np.linalg.norm(computed, axis=1).astype(np.float64)
    errors = differences / np.where(norms == 0, 1, norms)
    return np.where(np.isfinite(errors), errors, np.inf)


def match_hooks(
    row: StoredRow, layer: int, computed: Mapping[str, np.ndarray], limits: Limits
) -> dict[tuple[str, int], HookMatch]:
    """Compares the states of a layer with the states of the same sample at all hooks.

    Args:
        row: Row of the file.
        layer: Index of the layer in the file.
        computed: States of the sample at each hook, by the name of the hook, float32 (tokens,
            width).
        limits: Largest errors.

    Returns:
        The match by the name of the hook and the offset. Offsets are 0, -1 and 1, and, if there are
        fewer states than tokens, the offset with which the last state belongs to the last token.
    """
    stored = row.states(layer)
    tokens = len(row.token_ids)
    offsets = {0, -1, 1}
    if len(stored) < tokens:
        offsets.add(tokens - len(stored))
    matches = {}
    for hook, states in computed.items():
        for offset in offsets:
            first = max(0, -offset)
            stop = min(len(stored), tokens - offset)
            if first >= stop:
                continue
            expected = row.as_if_stored(states[first + offset : stop + offset], first)
            errors = token_errors(stored[first:stop], expected)
            with_other_experts = _with_other_experts(errors, limits)
            errors = errors[~with_other_experts]
            error = float(np.sqrt(np.mean(errors**2)))
            matches[hook, offset] = HookMatch(
                error, float(errors.max()), hook, offset, int(with_other_experts.sum())
            )
    return matches


def _with_other_experts(errors: np.ndarray, limits: Limits) -> np.ndarray:
    """Returns a mask of the tokens that may have other experts, bool (tokens,).

    They are the tokens with the largest errors among those that rounding alone does not explain, as
    many as `limits` allows. In a row of at least two tokens, one is always allowed.

    Args:
        errors: Relative error of each token, (tokens,).
        limits: Largest errors.
    """
    mask = np.zeros(len(errors), bool)
    if not limits.other_experts or len(errors) < 2:
        return mask
    candidates = np.flatnonzero((errors > limits.row) & (errors <= OTHER_EXPERTS_ERROR))
    most = max(int(limits.other_experts * len(errors)), 1)
    by_error = candidates[np.argsort(-errors[candidates])]
    mask[by_error[:most]] = True
    return mask


class Alignment(NamedTuple):
    """The stored states of a layer that are consecutive computed states of a sample.

    Attributes:
        number: Number of the row whose sample it is.
        hook: Name of the hook.
        offset: Number that is added to the index of a stored state to get the index of the token.
        states: Mask of the stored states that match, bool (states,).
    """

    number: int
    hook: str
    offset: int
    states: np.ndarray

    @property
    def size(self) -> int:
        """The number of stored states that match."""
        return int(self.states.sum())


def align(
    row: StoredRow, layer: int, number: int, hook: str, computed: np.ndarray, limits: Limits
) -> list[Alignment]:
    """Finds the offsets at which most stored states of a layer are those of a sample.

    Args:
        row: Row of the file.
        layer: Index of the layer in the file.
        number: Number of the row whose sample was computed.
        hook: Name of the hook at which it was computed.
        computed: States of the sample, float32 (tokens, width).
        limits: Largest errors. A stored state matches if its error is at most ALIGNMENT_FACTOR
            times the error of a row.

    Returns:
        The alignments with most states, at most MAX_PARTS. Of two offsets with as many states, the
        one that is nearer to 0 comes first.
    """
    # Squared distances of all pairs are |s|^2 + |c|^2 - 2 s.c, (states, tokens). Float64 leaves a
    # relative error of 1e-8, which is far below all limits.
    stored = row.states(layer).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        products = stored @ computed.astype(np.float64).T
        stored_squares = np.square(stored).sum(axis=1)[:, None]
        computed_squares = np.square(computed.astype(np.float64)).sum(axis=1)[None]
        squares = stored_squares + computed_squares - 2 * products
        matches = squares <= (ALIGNMENT_FACTOR * limits.row) ** 2 * computed_squares
    matches &= computed_squares > 0
    state_indices, token_indices = np.nonzero(matches)
    state_offsets = token_indices - state_indices
    offsets, counts = np.unique(state_offsets, return_counts=True)
    most_frequent = np.lexsort((np.abs(offsets), -counts))[:MAX_PARTS]
    alignments = []
    for offset in offsets[most_frequent].tolist():
        mask = np.zeros(len(stored), bool)
        mask[state_indices[state_offsets == offset]] = True
        alignments.append(Alignment(number, hook, offset, mask))
    return alignments


def best_alignments(alignments: Sequence[Alignment]) -> Iterator[Alignment]:
    """Yields at most MAX_PARTS alignments that explain most states of a layer, the largest first.

    Alignments with a single state are left out unless the layer has only one, because the first
    tokens of different samples often have the same states.

    Args:
        alignments: Alignments of the same layer, preferred ones first.

    Yields:
        Alignments without the states that the earlier ones explain.
    """
    left = list(alignments)
    for _ in range(MAX_PARTS if alignments else 0):
        largest = max(left, key=lambda alignment: alignment.size)
        if largest.size < min(2, len(largest.states)):
            return
        yield largest
        left = [alignment._replace(states=alignment.states & ~largest.states) for alignment in left]
