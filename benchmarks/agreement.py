"""Checks that all contenders of a benchmark stored the same tokens and similar activations.

A contender is a program that end_to_end.py measures: this tool, or an extraction method of
competitors.py, which uses transformers. The first contender that is checked in a dtype is the
reference in this dtype: the other contenders are compared with its values.

If two experts are nearly tied, rounding may decide to which of them a token is routed, and the
token's activations differ in all later layers. So activations are compared only for tokens that the
contender and the reference route to the same experts in all layers.

The float32 reference is the reference in the dtype float32. A token of a contender has changed
experts if the contender routes it to other experts than the float32 reference does. Only
rounding should change experts, and rounding is similar in all contenders. So in each dtype, the
numbers of such tokens must be similar: the contender's number is at most 2 times the reference's
number plus 10, and the reference's number is at most 1.25 times the contender's number plus 10.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from activation_extraction.store.pickle_file import read_records

# The largest size in bytes to which a shard may be decompressed, so that no shard fills the memory.
MAX_SHARD_BYTES = 4 * 10**9
# Dtype -> the largest allowed deviation from the reference (see `deviation`). bfloat16 has only 8
# significant bits, and every layer rounds several times, so its tolerance is large.
TOLERANCE = {"float32": 1e-2, "bfloat16": 0.5}
# Rounding changes the experts of some tokens: the router chooses other experts than in float32.
# This is the largest allowed number of such tokens in the contender's activations, divided by their
# number in the reference's activations, which are rounded to the same dtype.
MAX_CHANGED_RATIO = 2
# The largest number of tokens of a document that is compared. Longer documents are left out,
# because the activations of all compared documents of the reference stay in memory.
MAX_COMPARED_TOKENS = 640
# The names of two hooks of a layer, without the layer's number: the residual stream after the
# layer, and the numbers of the experts to which the layer routes each token.
RESIDUAL, CHOSEN = "blocks.{}.hook_resid_post", "blocks.{}.mlp.hook_expert_indices"

# The values of a document: hook name -> array (tokens, width).
ValuesByHook = Mapping[str, np.ndarray]


class Disagreement(Exception):
    """Raised if one of the compared programs stored wrong tokens, activations or experts.

    Its tokens differ from the tokens of the documents, or its activations or experts differ more
    than allowed from the values that the first program stored.
    """


@dataclass
class Comparison:
    """The differences between the values that one contender and the reference stored in one dtype.

    The reference is the contender that was checked first in this dtype.

    Attributes:
        deviations: For each compared document and each hook with activations, the deviation of the
            contender's values from the reference's values (see `deviation`). Empty if the
            contender's values are themselves the reference's values.
        num_compared_tokens: Number of tokens in all documents that were compared.
        num_rerouted_tokens: Number of these tokens that the contender and the reference route to
            different experts.
        num_tokens_with_changed_experts: Number of these tokens for which the contender's experts
            differ from the experts of the float32 reference, which is the contender that was
            checked first in float32. None if no contender has been checked in float32.
        num_reference_tokens_with_changed_experts: Number of these tokens for which the reference's
            experts in this dtype differ from the experts of the float32 reference. 0 if no
            contender has been checked in float32.
    """

    deviations: list[float] = field(default_factory=list)
    num_compared_tokens: int = 0
    num_rerouted_tokens: int = 0
    num_tokens_with_changed_experts: int | None = 0
    num_reference_tokens_with_changed_experts: int = 0

    def add(
        self,
        values_by_hook: ValuesByHook,
        reference_values_by_hook: ValuesByHook,
        float32_values_by_hook: ValuesByHook | None,
    ) -> None:
        """Adds one document to the comparison.

        Args:
            values_by_hook: The contender's values of the document (see `ValuesByHook`).
            reference_values_by_hook: The values of the document that the reference stored in the
                same dtype. They are the object `values_by_hook` itself if the contender is the
                reference.
            float32_values_by_hook: The values of the document that the float32 reference stored.
                The float32 reference is the contender that was checked first in float32, which may
                be this contender. None if no contender has been checked in float32.
        """
        mask_of_tokens_with_same_experts = tokens_with_same_experts(
            values_by_hook, reference_values_by_hook
        )
        self.num_compared_tokens += len(mask_of_tokens_with_same_experts)
        self.num_rerouted_tokens += int((~mask_of_tokens_with_same_experts).sum())
        if float32_values_by_hook is None:
            self.num_tokens_with_changed_experts = None
        elif self.num_tokens_with_changed_experts is not None:
            self.num_tokens_with_changed_experts += int(
                (~tokens_with_same_experts(values_by_hook, float32_values_by_hook)).sum()
            )
            self.num_reference_tokens_with_changed_experts += int(
                (~tokens_with_same_experts(reference_values_by_hook, float32_values_by_hook)).sum()
            )
        if (
            values_by_hook is not reference_values_by_hook
            and mask_of_tokens_with_same_experts.any()
        ):
            self.deviations += [
                deviation(
                    hook_values[mask_of_tokens_with_same_experts],
                    reference_values_by_hook[hook_name][mask_of_tokens_with_same_experts],
                )
                for hook_name, hook_values in values_by_hook.items()
                if not _is_expert_hook(hook_name)
            ]

    @property
    def largest_deviation(self) -> float | None:
        """The largest element of `deviations`, NaN if any element is NaN, None if it is empty."""
        return float(np.max(self.deviations)) if self.deviations else None

    def check(self, name: str, dtype: str) -> None:
        """Checks that the contender agrees with the reference.

        The deviations from the reference must be small. The contender's number of tokens with
        changed experts must be similar to the reference's number (see the docstring of the module).

        Args:
            name: The name of the compared program (the contender), for the message.
            dtype: "float32" or "bfloat16", which determines the tolerance.

        Raises:
            Disagreement: If a deviation or a number of tokens is larger than allowed.
        """
        largest_deviation = self.largest_deviation
        # The negated comparison is also true for NaN.
        if largest_deviation is not None and not largest_deviation <= TOLERANCE[dtype]:
            raise Disagreement(
                f"{name}: deviates by {largest_deviation:.3g} times the RMS; at most "
                f"{TOLERANCE[dtype]} is allowed"
            )
        num_tokens_with_changed_experts = self.num_tokens_with_changed_experts or 0
        # Small numbers vary by chance, so 10 more tokens are allowed.
        max_num_tokens_with_changed_experts = (
            MAX_CHANGED_RATIO * self.num_reference_tokens_with_changed_experts + 10
        )
        if (
            not few_more(
                self.num_reference_tokens_with_changed_experts, num_tokens_with_changed_experts
            )
            or num_tokens_with_changed_experts > max_num_tokens_with_changed_experts
        ):
            raise Disagreement(
                f"{name}: {num_tokens_with_changed_experts} of {self.num_compared_tokens} tokens "
                "have other experts than in float32; for the first contender, "
                f"{self.num_reference_tokens_with_changed_experts} do"
            )


class Agreement:
    """Compares the shards of contenders with each other and with the documents' token ids.

    A contender is one of the programs whose speed the benchmark compares. The first contender
    whose shards are checked in a dtype is the reference in this dtype.
    """

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        """Stores the expected token ids. `check` compares each contender with them.

        Args:
            documents: The token ids that every contender should store for each document. A
                contender is a program that the benchmark measures.
        """
        self._token_ids_of_documents = documents
        # (dtype, number of a document) -> values of the reference.
        self._reference_values_by_dtype_and_document: dict[tuple[str, int], ValuesByHook] = {}

    def check(self, folder: Path, dtype: str, tokens: int) -> Comparison:
        """Compares the shards of one contender with the documents and with the reference.

        A contender is this tool or an extraction method of competitors.py. The contender that is
        checked first in a dtype becomes the reference in this dtype.

        Args:
            folder: The folder of the shards, whose name is the name of the contender.
            dtype: "float32" or "bfloat16".
            tokens: The number of tokens that each hook should have in all shards together.

        Returns:
            The comparison with the reference in this dtype.

        Raises:
            Disagreement: If tokens, activations or experts differ by more than rounding explains.
        """
        token_count_by_hook: Counter[str] = Counter()
        comparison = Comparison()
        for document_number, token_ids, values_by_hook in stored_documents(folder):
            num_tokens = len(token_ids)
            distinct_token_counts = {len(hook_values) for hook_values in values_by_hook.values()}
            if token_ids.tolist() != list(
                self._token_ids_of_documents[document_number]
            ) or distinct_token_counts != {num_tokens}:
                raise Disagreement(f"{folder.name}: document {document_number} has other tokens")
            token_count_by_hook.update(dict.fromkeys(values_by_hook, num_tokens))
            if num_tokens <= MAX_COMPARED_TOKENS:
                reference_values_by_hook = self._reference_values_by_dtype_and_document.setdefault(
                    (dtype, document_number), values_by_hook
                )
                float32_values_by_hook = self._reference_values_by_dtype_and_document.get(
                    ("float32", document_number)
                )
                comparison.add(values_by_hook, reference_values_by_hook, float32_values_by_hook)
        if set(token_count_by_hook.values()) != {tokens}:
            raise Disagreement(
                f"{folder.name}: tokens by hook are {token_count_by_hook}, expected {tokens}"
            )
        comparison.check(folder.name, dtype)
        return comparison


def tokens_with_same_experts(
    values_by_hook: ValuesByHook, expected_values_by_hook: ValuesByHook
) -> np.ndarray:
    """Returns a mask of the tokens that two programs route to the same experts in all layers.

    Args:
        values_by_hook: The values that one program stored: hook name -> array (..., width), where
            "..." stands for any number of axes of tokens. The numbers of a token's experts may be
            in any order.
        expected_values_by_hook: The values that the other program stored, at the same hooks and in
            the same shapes.

    Returns:
        The mask, bool (...): True for each token with the same experts. It is True for all tokens
        of a model without experts.
    """
    mask_of_tokens_with_same_experts = np.ones(next(iter(values_by_hook.values())).shape[:-1], bool)
    for expert_hook_name in filter(_is_expert_hook, values_by_hook):
        sorted_expert_numbers = np.sort(
            values_by_hook[expert_hook_name].astype(np.float32), axis=-1
        )
        sorted_expected_expert_numbers = np.sort(
            expected_values_by_hook[expert_hook_name].astype(np.float32), axis=-1
        )
        mask_of_tokens_with_same_experts &= (
            sorted_expert_numbers == sorted_expected_expert_numbers
        ).all(axis=-1)
    return mask_of_tokens_with_same_experts


def _is_expert_hook(hook_name: str) -> bool:
    """Returns whether a hook stores the numbers of the experts to which tokens are routed."""
    return hook_name.endswith(CHOSEN.removeprefix("blocks.{}"))


def few_more(count: int, reference_count: int) -> bool:
    """Returns whether one number of rerouted tokens is at most a little larger than another.

    Two programs that round alike route similar numbers of tokens to other experts than in float32.
    The numbers also depend on chance, so `count` may be up to 1.25 times `reference_count` plus 10.

    Args:
        count: The number of tokens that one program routes to other experts than in float32.
        reference_count: The number of tokens that the other program routes to other experts than in
            float32.
    """
    return count <= 1.25 * reference_count + 10


def deviation(values: np.ndarray, expected: np.ndarray) -> float:
    """Returns how far the values at a hook are from the expected values.

    Args:
        values: The values of a document's tokens, (tokens, width).
        expected: The expected values of these tokens, in the same shape.

    Returns:
        The largest absolute difference between a value and the expected value in the same place,
        divided by the root mean square of all expected values.
    """
    float32_values = values.astype(np.float32)
    float32_expected_values = expected.astype(np.float32)
    rms_of_expected_values = np.sqrt(np.mean(np.square(float32_expected_values), dtype=np.float64))
    return float(np.abs(float32_values - float32_expected_values).max() / rms_of_expected_values)


def stored_documents(folder: Path) -> Iterator[tuple[int, np.ndarray, ValuesByHook]]:
    """Yields the documents that one of the compared programs stored as gzipped pickles in a folder.

    Yields:
        A tuple of the document's number in the data set, from 0; its token ids, (tokens,); and its
        values, a dict from the name of a hook to an array (tokens, width).
    """
    for shard_path in sorted(folder.glob("shard_*.pkl.gz")):
        # Number of a document in the data set -> token ids of the document.
        token_ids_by_document_number: dict[int, np.ndarray] = {}
        # Number of a document in the data set -> hook name -> values of the document at the hook.
        values_by_document_number_and_hook: dict[int, dict[str, np.ndarray]] = {}
        with open(shard_path, "rb") as shard_file:
            records_by_key = read_records(shard_file, shard_path.name, MAX_SHARD_BYTES)
        for hook_key, hook_records in records_by_key.items():
            hook_name = RESIDUAL.format(hook_key) if isinstance(hook_key, int) else str(hook_key)
            for record in hook_records:
                document_number = record["sample_idx"]
                assert record["token_ids"] is not None
                token_ids_by_document_number.setdefault(document_number, record["token_ids"])
                values_by_document_number_and_hook.setdefault(document_number, {})[hook_name] = (
                    record["activation"]
                )
        for document_number, values_by_hook in values_by_document_number_and_hook.items():
            yield document_number, token_ids_by_document_number[document_number], values_by_hook
