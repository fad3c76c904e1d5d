"""The rotary embedding (arXiv:2104.09864) is plain, or scaled to contexts longer than trained.

Frequencies follow `transformers.modeling_rope_utils`, in float32 as there. Linear scaling divides
them all by the factor; YaRN (arXiv:2309.00071) divides those that turn slowly, leaves those that
turn fast, and multiplies the rotated queries and keys by an attention factor. Some families rotate
only the first dimensions of a head. layers.py rotates.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from activation_extraction.common.errors import InputError

BETA_FAST, BETA_SLOW = 32.0, 1.0  # YaRN's default bounds, in turns over the trained context


@dataclass(frozen=True)
class Rope:
    """A rotary embedding: the base `theta` of its wavelengths, and how it is scaled.

    rope_type: "default", "linear" or "yarn"; the rest is for scaled types. factor: how many times
    longer the context becomes. For YaRN, attention_factor; blended, the first and last index of the
    frequencies that are between left and divided; trained, the tokens of the context before it
    became longer. share: of a head's dimensions, from the first on, that are rotated.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    blended: tuple[float, float] | None = None
    trained: int = 0
    share: float = 1.0

    @classmethod
    def from_hf(
        cls, rope: Mapping[str, Any], head_dim: int, source: str, partial: bool = False
    ) -> "Rope":
        """Reads the `rope_parameters` of a configuration that transformers has completed.

        partial: whether the family may rotate only a share of a head's dimensions. Raises
        InputError, naming field and value, for any other type and for missing numbers.
        """
        kind = rope.get("rope_type")
        if kind not in ("default", "linear", "yarn"):
            raise InputError(
                f"{source}: rope_type {kind!r} is not supported; default, linear and yarn are"
            )
        share = _rotated_share(rope, head_dim, partial, source)
        head_dim = int(head_dim * share)
        theta = positive(rope, "rope_theta", source)
        factor = 1.0 if kind == "default" else positive(rope, "factor", source)
        if kind != "yarn":
            return cls(theta, kind, factor, share=share)
        trained = int(positive(rope, "original_max_position_embeddings", source))
        blended = _blended(rope, theta, trained, head_dim, source)
        attention_factor = _attention_factor(rope, factor, source)
        return cls(theta, kind, factor, attention_factor, blended, trained, share)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Returns the radians per position of each pair of rotated dimensions, float32.

        They are (H/2,) if all dimensions are rotated. NumPy's own float32 power is not good to the
        last bit, which a late position multiplies.
        """
        head_dim = int(head_dim * self.share)
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        plain = 1 / (self.theta ** exponents.astype(np.float64)).astype(np.float32)
        stretched = plain / np.float32(self.factor)
        if self.blended is None:
            return stretched
        first, last = self.blended
        ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / (last - first)
        ramp = np.clip(ramp, 0, 1).astype(np.float32)
        return stretched * ramp + plain * (1 - ramp)


def positive(fields: Mapping[str, Any], field: str, source: str) -> float:
    """Returns a number above 0. Raises InputError for anything else."""
    value: Any = fields.get(field)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise InputError(f"{source}: {field} must be a positive number, found {value!r}")
    return float(value)


def _rotated_share(rope: Mapping[str, Any], head_dim: int, partial: bool, source: str) -> float:
    """Returns the share of a head's dimensions that are rotated. Raises InputError."""
    share = positive({"partial_rotary_factor": 1.0, **rope}, "partial_rotary_factor", source)
    if share != 1 and not partial:
        raise InputError(f"{source}: partial_rotary_factor {share!r} is not supported, only 1.0 is")
    rotated = int(head_dim * share)
    if share > 1 or rotated < 2 or rotated % 2:
        raise InputError(
            f"{source}: partial_rotary_factor {share!r} rotates {rotated} of a head's {head_dim} "
            "dimensions; it must be an even number of them, at least 2"
        )
    return share


def _attention_factor(rope: Mapping[str, Any], factor: float, source: str) -> float:
    """Returns the factor that is given, or else what YaRN's paper suggests for this factor."""
    if rope.get("attention_factor") is not None:
        return positive(rope, "attention_factor", source)

    def suggested(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        scale, of_all = (positive(rope, name, source) for name in ("mscale", "mscale_all_dim"))
        return suggested(scale) / suggested(of_all)
    return suggested(1.0)


def _blended(
    rope: Mapping[str, Any], theta: float, trained: int, head_dim: int, source: str
) -> tuple[float, float]:
    """Returns the frequencies between which YaRN goes from leaving them to dividing them."""

    def with_turns(turns: float) -> float:
        """Returns the index of the frequency that turns so many times over the trained context."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    turns = [
        positive(rope, name, source) if rope.get(name) else default
        for name, default in (("beta_fast", BETA_FAST), ("beta_slow", BETA_SLOW))
    ]
    first, last = map(with_turns, turns)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last + 0.001 * (first == last)
