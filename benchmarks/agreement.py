"""Checks that all contenders of a benchmark stored the same tokens and similar activations.

The first contender of a dtype is the reference for the others. If two experts are nearly tied,
rounding may decide which of them a token goes through, and the token's values differ from there on.
So activations are compared only over the tokens that have the same experts in all layers. The
tokens whose experts differ from those in float32 are counted for both contenders: the first one may
have only a few more than the other, and the other at most about twice as many as the first.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from activation_extraction.store.pickle_file import read_records

SHARD_LIMIT = 4 * 10**9  # bytes of a shard after decompression, at most
# Largest allowed deviation of a value from the first contender's, relative to the RMS of the hook.
# It is large for bfloat16, which has 8 significant bits: every layer rounds several times.
TOLERANCE = {"float32": 1e-2, "bfloat16": 0.5}
# Largest allowed ratio of a contender's tokens with changed experts to the first contender's. All
# contenders round to the same dtype, so similar numbers of tokens should change.
MOST_CHANGED = 2
KEPT_TOKENS = 640  # longer documents are not compared, because all compared ones stay in memory
RESIDUAL, CHOSEN = "blocks.{}.hook_resid_post", "blocks.{}.mlp.hook_expert_indices"

Values = Mapping[str, np.ndarray]  # hook -> (tokens, width)


class Disagreement(Exception):
    """A contender stored other tokens, other activations or other experts than expected."""


@dataclass
class Comparison:
    """The differences between one contender's documents and the first contender's, in one dtype.

    Attributes:
        deviations: The deviation of each hook of each compared document from the first contender's;
            see `deviation`. Empty for the first contender itself.
        tokens: The number of compared tokens.
        other: The number of tokens whose experts differ from the first contender's.
        changed: The number of this contender's tokens whose experts differ from those in float32.
            None if there is no float32 run to compare with.
        changed_of_first: The same number for the first contender; 0 without a float32 run.
    """

    deviations: list[float] = field(default_factory=list)
    tokens: int = 0
    other: int = 0
    changed: int | None = 0
    changed_of_first: int = 0

    def add(self, values: Values, first: Values, exact: Values | None) -> None:
        """Adds one document to the comparison.

        Args:
            values: This contender's values.
            first: The first contender's values in the same dtype.
            exact: The first contender's values in float32. None if they were not computed.
        """
        same = same_experts(values, first)
        self.tokens += len(same)
        self.other += int((~same).sum())
        if exact is None:
            self.changed = None
        elif self.changed is not None:
            self.changed += int((~same_experts(values, exact)).sum())
            self.changed_of_first += int((~same_experts(first, exact)).sum())
        if values is not first and same.any():
            self.deviations += [
                deviation(array[same], first[hook][same])
                for hook, array in values.items()
                if not _chooses(hook)
            ]

    @property
    def worst(self) -> float | None:
        """Returns the largest deviation.

        It is None if no token could be compared, and NaN if any deviation is NaN.
        """
        return float(np.max(self.deviations)) if self.deviations else None

    def check(self, name: str, dtype: str) -> None:
        """Checks the deviations and the numbers of tokens with changed experts.

        Args:
            name: The contender's name, for the message.
            dtype: "float32" or "bfloat16", which determines the tolerance.

        Raises:
            Disagreement: If a deviation or a number of tokens is larger than allowed.
        """
        if self.worst is not None and not self.worst <= TOLERANCE[dtype]:
            raise Disagreement(
                f"{name}: deviates by {self.worst:.3g} times the RMS; at most {TOLERANCE[dtype]} "
                "is allowed"
            )
        theirs, first = self.changed or 0, self.changed_of_first
        if not few_more(first, theirs) or theirs > MOST_CHANGED * first + 10:
            raise Disagreement(
                f"{name}: {theirs} of {self.tokens} tokens have other experts than in float32; "
                f"for the first contender, {first} do"
            )


class Agreement:
    """Compares the shards of contenders; the first one of each dtype is the reference."""

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        """Starts without any contender.

        Args:
            documents: The expected token ids of each document.
        """
        self._documents = documents
        self._kept: dict[tuple[str, int], Values] = {}

    def check(self, folder: Path, dtype: str, tokens: int) -> Comparison:
        """Compares the shards of one contender with the documents and the first contender.

        Args:
            folder: The folder of the shards, called as the contender.
            dtype: "float32" or "bfloat16".
            tokens: The expected number of stored tokens for each hook.

        Returns:
            The comparison with the first contender of this dtype.

        Raises:
            Disagreement: If tokens, activations or experts differ by more than rounding explains.
        """
        tokens_by_hook: Counter[str] = Counter()
        comparison = Comparison()
        for number, ids, values in stored(folder):
            lengths = {len(array) for array in values.values()}
            if ids.tolist() != list(self._documents[number]) or lengths != {len(ids)}:
                raise Disagreement(f"{folder.name}: document {number} has other tokens")
            tokens_by_hook.update(dict.fromkeys(values, len(ids)))
            if len(ids) <= KEPT_TOKENS:
                first = self._kept.setdefault((dtype, number), values)
                comparison.add(values, first, self._kept.get(("float32", number)))
        if set(tokens_by_hook.values()) != {tokens}:
            raise Disagreement(
                f"{folder.name}: tokens by hook are {tokens_by_hook}, expected {tokens}"
            )
        comparison.check(folder.name, dtype)
        return comparison


def same_experts(values: Values, expected: Values) -> np.ndarray:
    """Returns a mask of the tokens that have the same experts in all layers.

    Args:
        values: hook -> array (..., width). The expert numbers of a token may come in any order.
        expected: The values to compare with, in the same form.

    Returns:
        An array (...) of bool. All tokens are True in a model without experts.
    """
    same = np.ones(next(iter(values.values())).shape[:-1], bool)
    for hook in filter(_chooses, values):
        experts = np.sort(values[hook].astype(np.float32), axis=-1)
        expected_experts = np.sort(expected[hook].astype(np.float32), axis=-1)
        same &= (experts == expected_experts).all(axis=-1)
    return same


def _chooses(hook: str) -> bool:
    return hook.endswith(CHOSEN.removeprefix("blocks.{}"))


def few_more(count: int, other: int) -> bool:
    """Returns whether `count` tokens with changed experts are at most a few more than `other`.

    Two contenders that round alike have similar counts; 25 % and 10 tokens are allowed for chance.
    """
    return count <= 1.25 * other + 10


def deviation(values: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest absolute difference, divided by the RMS of `expected`."""
    wide, reference = values.astype(np.float32), expected.astype(np.float32)
    rms = np.sqrt(np.mean(np.square(reference), dtype=np.float64))
    return float(np.abs(wide - reference).max() / rms)


def stored(folder: Path) -> Iterator[tuple[int, np.ndarray, Values]]:
    """Yields the number, the token ids and the values of each document in a folder's shards."""
    for path in sorted(folder.glob("shard_*.pkl.gz")):
        samples: dict[int, tuple[np.ndarray, dict[str, np.ndarray]]] = {}
        with open(path, "rb") as file:
            records_by_key = read_records(file, path.name, SHARD_LIMIT)
        for key, records in records_by_key.items():
            hook = RESIDUAL.format(key) if isinstance(key, int) else str(key)
            for record in records:
                ids = record["token_ids"]
                assert ids is not None
                _, values = samples.setdefault(record["sample_idx"], (ids, {}))
                values[hook] = record["activation"]
        for number, (ids, values) in samples.items():
            yield number, ids, values
