"""Parses the rule of --positions, which determines the positions of a sample that are kept.

text/token_choice.py applies the rule to tokens.
"""

import re
from dataclasses import dataclass

from activation_extraction.common.errors import FlagValueError

ALL, LAST_OF_TURN = "all", "last_of_turn"
SLICE = re.compile(r"(-?\d{1,9})?:(-?\d{1,9})?(?::([1-9]\d{0,8})?)?")
RANDOM_COUNT = re.compile(r"random:(\d{1,9})(?::(\d{1,9})(?::(\d{1,9}))?)?")
RANDOM_SHARE = re.compile(r"random:(\d*\.?\d+(?:[eE]-?\d+)?)(?::(\d{1,9}))?")
NAMED = re.compile(r"(first|last|every):([1-9]\d{0,8})")
EXPECTED = (
    "expected all, last, first:N, last:N, every:N, random:N[:SEED[:FROM]], random:P[:SEED], "
    "last_of_turn or a slice such as 4:-1"
)


@dataclass(frozen=True)
class Positions:
    """A rule for the positions of a sample to keep.

    A rule keeps one of four sets: a slice of the positions, as in Python; a random choice of a
    fixed number of positions; a random share of the positions; or the last position of each turn of
    a conversation.

    Attributes:
        start: Start of the slice; None for the first position. May be negative. For a random choice
            of `count` positions, the first position that can be chosen.
        stop: End of the slice, exclusive; None for the end of the sample. May be negative.
        step: Step of the slice, positive.
        count: Number of positions to choose at random; all positions from `start` on are kept if
            there are fewer. None for any other rule.
        share: Probability with which a position is kept, between 0 and 1; None for any other rule.
        seed: Seed of the random choice.
        last_of_turn: Whether to keep the last position of each turn.
    """

    start: int | None = None
    stop: int | None = None
    step: int = 1
    count: int | None = None
    share: float | None = None
    seed: int = 0
    last_of_turn: bool = False

    def expected(self, length: int) -> float:
        """Returns the expected number of tokens that are kept of a sample.

        Args:
            length: The number of tokens of the sample. With `last_of_turn`, all of them are
                returned, as an upper bound.
        """
        if self.share is not None:
            return self.share * length
        if self.count is not None:
            return min(self.count, len(range(length)[self.start :]))
        return len(range(length)[self.start : self.stop : self.step])

    def may_keep(self, longest: int) -> bool:
        """Returns whether the rule can keep a token of a sample with 1 to `longest` tokens."""
        if self.share is not None:
            return self.threshold > 0
        return any(self.expected(length) for length in range(1, longest + 1))

    @property
    def threshold(self) -> int:
        """The share times 2**64, rounded down; 0 if there is no share."""
        return int((self.share or 0) * 2.0**64)

    def __str__(self) -> str:
        """Returns the rule in its canonical spelling, which `parse_positions` reads back."""
        if self.last_of_turn:
            return LAST_OF_TURN
        if self.count is not None:
            first = "" if self.start is None else f":{self.start}"
            return f"random:{self.count}:{self.seed}{first}"
        if self.share is not None:
            return f"random:{self.share!r}:{self.seed}"
        if self == Positions():
            return ALL
        if self == Positions(step=self.step):
            return f"every:{self.step}"
        if self.start is None and self.step == 1 and (self.stop or 0) > 0:
            return f"first:{self.stop}"
        if self.stop is None and self.step == 1 and (self.start or 0) < 0:
            return f"last:{-(self.start or 0)}"
        start, stop = ("" if end is None else str(end) for end in (self.start, self.stop))
        return f"{start}:{stop}" + (f":{self.step}" if self.step > 1 else "")


def parse_positions(typed: str) -> Positions:
    """Parses a rule of --positions.

    Raises:
        FlagValueError: The text is not a rule.
    """
    if typed in (ALL, "last"):
        return Positions(start=None if typed == ALL else -1)
    if typed == LAST_OF_TURN:
        return Positions(last_of_turn=True)
    if match := NAMED.fullmatch(typed):
        count = int(match[2])
        slices = {
            "first": (None, count, 1),
            "last": (-count, None, 1),
            "every": (None, None, count),
        }
        return Positions(*slices[match[1]])
    if match := RANDOM_COUNT.fullmatch(typed):
        count, seed, first = (int(digits or 0) for digits in match.groups())
        if count < 1:
            raise FlagValueError(f"{typed}: keeps no token; give at least 1")
        return Positions(start=first or None, count=count, seed=seed)
    if match := RANDOM_SHARE.fullmatch(typed):
        if not 0 < (share := float(match[1])) < 1:
            raise FlagValueError(f"{typed}: the share is not between 0 and 1")
        return Positions(share=share, seed=int(match[2] or 0))
    if match := SLICE.fullmatch(typed):
        start, stop, step = (None if digits is None else int(digits) for digits in match.groups())
        return Positions(start or None, stop, step or 1)
    raise FlagValueError(f"{typed!r} is no choice of positions; {EXPECTED}")
