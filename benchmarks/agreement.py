"""Whether contenders stored the same thing: the tokens of every document, and like activations.

Rounding may decide which experts a token goes through, where two are nearly tied, and the token has
other values from there on. So contenders are compared over the tokens that have the same experts in
all layers. How many have not is counted against float32: the first contender may have few more than
another, and no other twice as many.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from activation_extraction.store.pickle_file import read_records

SHARD_LIMIT = 4 * 10**9  # bytes that a shard may unpack to
# Largest deviation of a value from the first contender's, relative to the layer's RMS. bfloat16
# has 8 bits, and every layer rounds several times.
TOLERANCE = {"float32": 1e-2, "bfloat16": 0.5}
MOST_CHANGED = 2  # times as many tokens of others as of the first contender: all round alike
KEPT_TOKENS = 640  # longer documents are not kept for comparing
RESIDUAL, CHOSEN = "blocks.{}.hook_resid_post", "blocks.{}.mlp.hook_expert_indices"

Values = Mapping[str, np.ndarray]  # hook -> (tokens, width)


class Disagreement(Exception):
    """A contender computed something else."""


@dataclass
class Comparison:
    """One contender's documents with the first one's of the same dtype.

    other: tokens that have other experts than the first contender's; changed and changed_of_first:
    than in float32, of this contender and of the first one, None without float32.
    """

    deviations: list[float] = field(default_factory=list)
    tokens: int = 0
    other: int = 0
    changed: int | None = 0
    changed_of_first: int = 0

    def add(self, values: Values, first: Values, exact: Values | None) -> None:
        """A document. exact: in float32."""
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
                deviation(value[same], first[hook][same])
                for hook, value in values.items()
                if not _chooses(hook)
            ]

    @property
    def worst(self) -> float | None:
        """The largest deviation; None when nothing can be compared, and NaN if any is."""
        return float(np.max(self.deviations)) if self.deviations else None

    def check(self, name: str, dtype: str) -> None:
        """Raises Disagreement."""
        if self.worst is not None and not self.worst <= TOLERANCE[dtype]:
            raise Disagreement(
                f"{name}: deviates by {self.worst:.3g} of the RMS, {TOLERANCE[dtype]} is allowed"
            )
        theirs, first = self.changed or 0, self.changed_of_first
        if not few_more(first, theirs) or theirs > MOST_CHANGED * first + 10:
            raise Disagreement(
                f"{name}: {theirs} of {self.tokens} tokens have other experts than in float32, "
                f"and {first} of the first contender's"
            )


class Agreement:
    """Compares what contenders stored; the first one of a dtype is the measure of the others."""

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        self._documents = documents
        self._kept: dict[tuple[str, int], Values] = {}

    def check(self, folder: Path, dtype: str, tokens: int) -> Comparison:
        """tokens: how many every layer should have. Raises Disagreement."""
        found: Counter[str] = Counter()
        comparison = Comparison()
        for number, ids, values in stored(folder):
            lengths = {len(value) for value in values.values()}
            if ids.tolist() != list(self._documents[number]) or lengths != {len(ids)}:
                raise Disagreement(f"{folder.name}: document {number} has other tokens")
            found.update(dict.fromkeys(values, len(ids)))
            if len(ids) <= KEPT_TOKENS:
                first = self._kept.setdefault((dtype, number), values)
                comparison.add(values, first, self._kept.get(("float32", number)))
        if set(found.values()) != {tokens}:
            raise Disagreement(f"{folder.name}: tokens by hook are {found}, expected {tokens}")
        comparison.check(folder.name, dtype)
        return comparison


def same_experts(values: Values, expected: Values) -> np.ndarray:
    """Which tokens have the same experts in all layers, (...) bool; all of them without experts.

    Both: hook -> (..., width); the numbers of experts come in any order.
    """
    same = np.ones(next(iter(values.values())).shape[:-1], bool)
    for hook in filter(_chooses, values):
        found, wanted = (np.sort(x[hook].astype(np.float32), axis=-1) for x in (values, expected))
        same &= (found == wanted).all(axis=-1)
    return same


def _chooses(hook: str) -> bool:
    return hook.endswith(CHOSEN.removeprefix("blocks.{}"))


def few_more(count: int, other: int) -> bool:
    """Whether rounding like another's explains so many tokens with changed experts."""
    return count <= 1.25 * other + 10


def deviation(values: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, in units of the RMS of `expected`."""
    wide, reference = values.astype(np.float32), expected.astype(np.float32)
    rms = np.sqrt(np.mean(np.square(reference), dtype=np.float64))
    return float(np.abs(wide - reference).max() / rms)


def stored(folder: Path) -> Iterator[tuple[int, np.ndarray, Values]]:
    """(document, token ids, values) of all that is in the shards of a folder."""
    for path in sorted(folder.glob("shard_*.pkl.gz")):
        found: dict[int, tuple[np.ndarray, dict[str, np.ndarray]]] = {}
        with open(path, "rb") as file:
            every = read_records(file, path.name, SHARD_LIMIT)
        for key, records in every.items():
            hook = RESIDUAL.format(key) if isinstance(key, int) else str(key)
            for record in records:
                ids = record["token_ids"]
                assert ids is not None
                _, values = found.setdefault(record["sample_idx"], (ids, {}))
                values[hook] = record["activation"]
        for number, (ids, values) in found.items():
            yield number, ids, values
