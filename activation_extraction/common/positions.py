"""Parses the rule of --positions, which selects the tokens whose activations are stored.

The position of a token is its index in its sample, from 0. text/token_choice.py applies the rule to
samples.
"""

import re
from dataclasses import dataclass

from activation_extraction.common.errors import FlagValueError

ALL = "all"
LAST_OF_TURN = "last_of_turn"
# Regular expressions for values of --positions that contain numbers, such as "4:-1" (SLICE),
# "random:100:7" (RANDOM_COUNT), "random:0.1" (RANDOM_FRACTION) and "first:3" (NAMED).
SLICE = re.compile(r"(-?\d{1,9})?:(-?\d{1,9})?(?::([1-9]\d{0,8})?)?")
RANDOM_COUNT = re.compile(r"random:(\d{1,9})(?::(\d{1,9})(?::(\d{1,9}))?)?")
RANDOM_FRACTION = re.compile(r"random:(\d*\.?\d+(?:[eE]-?\d+)?)(?::(\d{1,9}))?")
NAMED = re.compile(r"(first|last|every):([1-9]\d{0,8})")
EXPECTED = (
    "expected all, last, first:N, last:N, every:N, random:N[:SEED[:FROM]], random:P[:SEED], "
    "last_of_turn or a slice such as 4:-1"
)


@dataclass(frozen=True)
class Positions:
    """A rule that selects, in each sample, the positions whose activations are stored.

    There are four kinds of rules. A rule keeps a slice of the positions, as in Python, or a fixed
    number of random positions, or a random fraction of the positions, or the last position of each
    turn of a conversation. The attributes of the other kinds have their default values.

    Attributes:
        start: Start of the slice, which may be negative. For a rule with `num_random_positions`,
            the first position that can be chosen, counted from 0. None for the first position of
            the sample.
        stop: End of the slice, exclusive, which may be negative. None for the end of the sample.
        step: Step of the slice, positive.
        num_random_positions: Number of positions to choose at random. If there are fewer positions
            from `start` on, all of them are kept. None for a rule of another kind.
        probability: Probability with which a position is kept, between 0 and 1. None for a rule of
            another kind.
        seed: Seed of the random choice.
        keeps_only_last_token_of_turn: Whether only the last token of each turn is kept.
    """

    start: int | None = None
    stop: int | None = None
    step: int = 1
    num_random_positions: int | None = None
    probability: float | None = None
    seed: int = 0
    keeps_only_last_token_of_turn: bool = False

    def expected(self, length: int) -> float:
        """Returns the expected number of kept tokens in a sample.

        With `keeps_only_last_token_of_turn`, returns `length` as an upper bound, because the number
        of turns is not known.

        Args:
            length: The number of tokens in the sample.
        """
        if self.probability is not None:
            return self.probability * length
        if self.num_random_positions is not None:
            return min(self.num_random_positions, len(range(length)[self.start :]))
        return len(range(length)[self.start : self.stop : self.step])

    def may_keep(self, longest: int) -> bool:
        """Returns whether the rule can keep any token at all.

        Args:
            longest: The largest number of tokens in a sample.
        """
        if self.probability is not None:
            return self.threshold > 0
        return any(self.expected(sample_length) for sample_length in range(1, longest + 1))

    @property
    def threshold(self) -> int:
        """The threshold for the hashes of positions, for a rule with `probability`.

        A position is kept if its hash, a number from 0 to 2**64 - 1, is below the threshold. The
        threshold is `probability` times 2**64, rounded down. It is 0 if `probability` is None.
        """
        return int((self.probability or 0) * 2.0**64)

    def __str__(self) -> str:
        """Returns the rule in its canonical spelling, which `parse_positions` reads back."""
        if self.keeps_only_last_token_of_turn:
            return LAST_OF_TURN
        if self.num_random_positions is not None:
            start_suffix = "" if self.start is None else f":{self.start}"
            return f"random:{self.num_random_positions}:{self.seed}{start_suffix}"
        if self.probability is not None:
            return f"random:{self.probability!r}:{self.seed}"
        if self == Positions():
            return ALL
        if self == Positions(step=self.step):
            return f"every:{self.step}"
        if self.start is None and self.step == 1 and (self.stop or 0) > 0:
            return f"first:{self.stop}"
        if self.stop is None and self.step == 1 and (self.start or 0) < 0:
            return f"last:{-(self.start or 0)}"
        start_text = "" if self.start is None else str(self.start)
        stop_text = "" if self.stop is None else str(self.stop)
        step_suffix = f":{self.step}" if self.step > 1 else ""
        return f"{start_text}:{stop_text}{step_suffix}"


def parse_positions(typed: str) -> Positions:
    """Parses a value of --positions.

    Args:
        typed: The text after the flag.

    Raises:
        FlagValueError: If the text is not a rule of --positions. An example of a rule is "first:8".
    """
    if typed == ALL:
        return Positions()
    if typed == "last":
        return Positions(start=-1)
    if typed == LAST_OF_TURN:
        return Positions(keeps_only_last_token_of_turn=True)
    if named_rule_match := NAMED.fullmatch(typed):
        number_in_rule = int(named_rule_match[2])
        if named_rule_match[1] == "first":
            return Positions(stop=number_in_rule)
        if named_rule_match[1] == "last":
            return Positions(start=-number_in_rule)
        return Positions(step=number_in_rule)
    # In the following rules, a start of 0 becomes None, which also means the first position of the
    # sample. So rules with equal meanings are equal objects.
    if count_rule_match := RANDOM_COUNT.fullmatch(typed):
        token_count, seed, first_position = (
            int(digits_in_rule or 0) for digits_in_rule in count_rule_match.groups()
        )
        if token_count < 1:
            raise FlagValueError(f"{typed}: keeps no token; give at least 1")
        return Positions(start=first_position or None, num_random_positions=token_count, seed=seed)
    if random_fraction_match := RANDOM_FRACTION.fullmatch(typed):
        probability = float(random_fraction_match[1])
        if not 0 < probability < 1:
            raise FlagValueError(f"{typed}: the share is not between 0 and 1")
        return Positions(probability=probability, seed=int(random_fraction_match[2] or 0))
    if slice_rule_match := SLICE.fullmatch(typed):
        first_position = int(slice_rule_match[1] or 0)
        stop_position = None if slice_rule_match[2] is None else int(slice_rule_match[2])
        return Positions(first_position or None, stop_position, step=int(slice_rule_match[3] or 1))
    raise FlagValueError(f"{typed!r} is no choice of positions; {EXPECTED}")
