"""Checks that all contenders of a benchmark stored the same tokens and similar activations.

A contender is a program that end_to_end.py measures: this tool, or a way of competitors.py. The
first contender of a dtype is the reference for the others.

If two experts are nearly tied, rounding may decide to which of them a token is routed, and the
token's activations differ from there on. So activations are compared only for tokens that are
routed to the same experts in all layers. For both contenders, the tokens whose experts are not the
same as in float32 are counted. The reference may have only a few more of them than the other
contender, and the other contender at most about twice as many as the reference.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from activation_extraction.store.pickle_file import read_records

# The largest size of a shard in bytes after decompression.
MAX_SHARD_BYTES = 4 * 10**9
# Dtype -> the largest allowed deviation of a value from the reference, relative to the RMS of the
# hook. bfloat16 has only 8 significant bits, and every layer rounds several times.
TOLERANCE = {"float32": 1e-2, "bfloat16": 0.5}
# The largest allowed ratio of two numbers of tokens with changed experts: a contender's number to
# the reference's number. Both round to the same dtype, so the numbers should be similar.
MAX_CHANGED_RATIO = 2
# Longer documents are not compared, because the activations of all compared documents of the
# reference stay in memory.
MAX_COMPARED_TOKENS = 640
# Names of two hooks of a layer, whose number is inserted: the residual stream after the layer, and
# the numbers of the experts to which the layer routes each token.
RESIDUAL, CHOSEN = "blocks.{}.hook_resid_post", "blocks.{}.mlp.hook_expert_indices"

# The values of a document: hook name -> array (tokens, width).
Values = Mapping[str, np.ndarray]


class Disagreement(Exception):
    """A contender stored other tokens, other activations or other experts than expected."""


@dataclass
class Comparison:
    """The differences between the documents of one contender and of the reference, in one dtype.

    Attributes:
        deviations: Deviation of each hook of each compared document from the reference; see
            `deviation`. Empty if the contender is the reference.
        tokens: Number of compared tokens.
        rerouted: Number of compared tokens whose experts differ from those of the reference.
        changed: Number of this contender's tokens whose experts differ from those of the reference
            in float32. None if there is no float32 run to compare with.
        changed_in_reference: The same number for the reference in this dtype. 0 without a float32
            run.
    """

    deviations: list[float] = field(default_factory=list)
    tokens: int = 0
    rerouted: int = 0
    changed: int | None = 0
    changed_in_reference: int = 0

    def add(self, values: Values, reference: Values, exact: Values | None) -> None:
        """Adds one document to the comparison.

        Args:
            values: The values of this contender.
            reference: The values of the reference in the same dtype.
            exact: The values of the reference in float32. None if they were not computed.
        """
        same_mask = same_experts(values, reference)
        self.tokens += len(same_mask)
        self.rerouted += int((~same_mask).sum())
        if exact is None:
            self.changed = None
        elif self.changed is not None:
            self.changed += int((~same_experts(values, exact)).sum())
            self.changed_in_reference += int((~same_experts(reference, exact)).sum())
        if values is not reference and same_mask.any():
            self.deviations += [
                deviation(array[same_mask], reference[hook][same_mask])
                for hook, array in values.items()
                if not _is_expert_hook(hook)
            ]

    @property
    def largest_deviation(self) -> float | None:
        """The largest of all deviations.

        It is None if no token could be compared, and NaN if any deviation is NaN.
        """
        return float(np.max(self.deviations)) if self.deviations else None

    def check(self, name: str, dtype: str) -> None:
        """Checks the deviations and the numbers of tokens with changed experts.

        Args:
            name: The name of the contender, for the message.
            dtype: "float32" or "bfloat16", which determines the tolerance.

        Raises:
            Disagreement: If a deviation or a number of tokens is larger than allowed.
        """
        largest = self.largest_deviation
        # The negated comparison is also true for NaN.
        if largest is not None and not largest <= TOLERANCE[dtype]:
            raise Disagreement(
                f"{name}: deviates by {largest:.3g} times the RMS; at most {TOLERANCE[dtype]} "
                "is allowed"
            )
        changed = self.changed or 0
        max_changed = MAX_CHANGED_RATIO * self.changed_in_reference + 10
        if not few_more(self.changed_in_reference, changed) or changed > max_changed:
            raise Disagreement(
                f"{name}: {changed} of {self.tokens} tokens have other experts than in float32; "
                f"for the first contender, {self.changed_in_reference} do"
            )


class Agreement:
    """Compares the shards of contenders with each other and with the documents.

    The first contender of each dtype is the reference for the others.
    """

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        """Starts without any contender.

        Args:
            documents: The expected token ids of each document.
        """
        self._documents = documents
        self._reference: dict[tuple[str, int], Values] = {}  # dtype, document number -> values

    def check(self, folder: Path, dtype: str, tokens: int) -> Comparison:
        """Compares the shards of one contender with the documents and with the reference.

        Args:
            folder: The folder of the shards, whose name is the name of the contender.
            dtype: "float32" or "bfloat16".
            tokens: The expected number of stored tokens for each hook.

        Returns:
            The comparison with the reference in this dtype.

        Raises:
            Disagreement: If tokens, activations or experts differ by more than rounding explains.
        """
        tokens_by_hook: Counter[str] = Counter()
        comparison = Comparison()
        for number, token_ids, values in stored_documents(folder):
            length = len(token_ids)
            lengths = {len(array) for array in values.values()}
            if token_ids.tolist() != list(self._documents[number]) or lengths != {length}:
                raise Disagreement(f"{folder.name}: document {number} has other tokens")
            tokens_by_hook.update(dict.fromkeys(values, length))
            if length <= MAX_COMPARED_TOKENS:
                reference = self._reference.setdefault((dtype, number), values)
                exact = self._reference.get(("float32", number))
                comparison.add(values, reference, exact)
        if set(tokens_by_hook.values()) != {tokens}:
            raise Disagreement(
                f"{folder.name}: tokens by hook are {tokens_by_hook}, expected {tokens}"
            )
        comparison.check(folder.name, dtype)
        return comparison


def same_experts(values: Values, expected: Values) -> np.ndarray:
    """Returns a mask of the tokens that are routed to the same experts in all layers.

    Args:
        values: Hook name -> array (..., width). The expert numbers of a token may be in any order.
        expected: The values to compare with, with the same hooks and shapes.

    Returns:
        An array (...) of bool. It is True for all tokens of a model without experts.
    """
    same_mask = np.ones(next(iter(values.values())).shape[:-1], bool)
    for hook in filter(_is_expert_hook, values):
        experts = np.sort(values[hook].astype(np.float32), axis=-1)
        expected_experts = np.sort(expected[hook].astype(np.float32), axis=-1)
        same_mask &= (experts == expected_experts).all(axis=-1)
    return same_mask


def _is_expert_hook(hook: str) -> bool:
    """Returns whether the values of a hook are the numbers of a layer's experts."""
    return hook.endswith(CHOSEN.removeprefix("blocks.{}"))


def few_more(count: int, reference_count: int) -> bool:
    """Returns whether `count` is at most 25 % and 10 tokens larger than `reference_count`.

    Both are numbers of tokens whose experts changed by rounding. Two programs that round equally
    often have similar numbers, up to chance.
    """
    return count <= 1.25 * reference_count + 10


def deviation(values: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest absolute difference of two arrays, divided by the RMS of `expected`."""
    values, expected = values.astype(np.float32), expected.astype(np.float32)
    rms = np.sqrt(np.mean(np.square(expected), dtype=np.float64))
    return float(np.abs(values - expected).max() / rms)


def stored_documents(folder: Path) -> Iterator[tuple[int, np.ndarray, Values]]:
    """Yields the number, the token ids and the values of each document in a folder's shards."""
    for path in sorted(folder.glob("shard_*.pkl.gz")):
        token_ids_of: dict[int, np.ndarray] = {}  # document number -> token ids
        values_of: dict[int, dict[str, np.ndarray]] = {}  # document number -> values
        with open(path, "rb") as file:
            records_by_key = read_records(file, path.name, MAX_SHARD_BYTES)
        for key, records in records_by_key.items():
            hook = RESIDUAL.format(key) if isinstance(key, int) else str(key)
            for record in records:
                number = record["sample_idx"]
                assert record["token_ids"] is not None
                token_ids_of.setdefault(number, record["token_ids"])
                values_of.setdefault(number, {})[hook] = record["activation"]
        for number, values in values_of.items():
            yield number, token_ids_of[number], values
