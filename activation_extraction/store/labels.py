"""Labels: what is known of every token of a sample, such as its role in a conversation.

They are int32 arrays (tokens,), under the names in LABELS. A run has some of them, or none: all of
its samples have the same ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from activation_extraction.common.choices import ROLES
from activation_extraction.store.own_arrays import as_int32

LABELS = ("role", "turn")


def as_labels(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns copies in the order of LABELS, as int32 where they are whole numbers that fit."""
    return {name: as_int32(values) for name, values in sorted(given.items())}


def check_labels(labels: Mapping[str, np.ndarray], tokens: int, due: Sequence[str] | None) -> None:
    """Raises ValueError for labels of so many tokens that cannot be stored.

    due: the names that the samples before have; None for the first sample.
    """
    names = [name for name in LABELS if name in labels] if due is None else list(due)
    if list(labels) != names:
        expected = ", ".join(LABELS if due is None else names) or "none"
        raise ValueError(f"labels {', '.join(labels) or 'none'}: expected {expected}")
    for name, values in labels.items():
        if (values.dtype, values.shape) != (np.int32, (tokens,)):
            found = f"dtype {values.dtype}, shape {values.shape}"
            raise ValueError(f"{name} of {found}: expected int32, ({tokens},)")
    roles = labels.get("role", np.zeros(0, np.int32))
    if roles.size and (roles.min() < 0 or roles.max() >= len(ROLES)):
        wrong = roles.min() if roles.min() < 0 else roles.max()
        raise ValueError(f"role {wrong}: expected 0 to {len(ROLES) - 1}")
