"""--positions takes a rule that says which positions of a sample are kept.

This module parses the rule and knows nothing of tokens; text/token_choice.py applies it.
"""

import re
from dataclasses import dataclass

from activation_extraction.common.errors import FlagValueError

ALL, LAST_OF_TURN = "all", "last_of_turn"
SLICE = re.compile(r"(-?\d{1,9})?:(-?\d{1,9})?(?::([1-9]\d{0,8})?)?")
RANDOM = re.compile(r"random:(\d*\.?\d+(?:[eE]-?\d+)?)(?::(\d{1,9}))?")
NAMED = re.compile(r"(first|last|every):([1-9]\d{0,8})")
EXPECTED = (
    "expected all, last, first:N, last:N, every:N, random:P, random:P:SEED, last_of_turn or a "
    "slice such as 4:-1"
)


@dataclass(frozen=True)
class Positions:
    """A rule keeps a slice of a sample's positions, as in Python, or a random share of them, or the
    last position of every turn of a conversation.

    start, stop, step: the slice. share: between 0 and 1; None for a slice.
    """

    start: int | None = None
    stop: int | None = None
    step: int = 1
    share: float | None = None
    seed: int = 0
    last_of_turn: bool = False

    def expected(self, length: int) -> float:
        """Returns how many tokens of a sample of `length` tokens are kept on average; with
        `last_of_turn`, how many are kept at most.
        """
        if self.share is not None:
            return self.share * length
        return len(range(length)[self.start : self.stop : self.step])

    def may_keep(self, longest: int) -> bool:
        """Returns whether a token of any sample of up to `longest` tokens can be kept."""
        if self.share is not None:
            return self.threshold > 0
        return any(self.expected(length) for length in range(1, longest + 1))

    @property
    def threshold(self) -> int:
        """Returns the share as an integer out of 2**64."""
        return int((self.share or 0) * 2.0**64)

    def __str__(self) -> str:
        """Returns the rule in its canonical spelling, which `parse_positions` reads back."""
        if self.last_of_turn:
            return LAST_OF_TURN
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
    """Parses a rule of --positions. Raises FlagValueError for any other text."""
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
    if match := RANDOM.fullmatch(typed):
        if not 0 < (share := float(match[1])) < 1:
            raise FlagValueError(f"{typed}: the share is not between 0 and 1")
        return Positions(share=share, seed=int(match[2] or 0))
    if match := SLICE.fullmatch(typed):
        start, stop, step = (None if each is None else int(each) for each in match.groups())
        return Positions(start or None, stop, step or 1)
    raise FlagValueError(f"{typed!r} is no choice of positions; {EXPECTED}")
