"""The rotary embedding (arXiv:2104.09864) is plain, or scaled to contexts longer than trained.

Frequencies follow `transformers.modeling_rope_utils`, in float32 as there. Linear scaling divides
them all by the factor; YaRN (arXiv:2309.00071) and Llama 3.1 divide those that turn slowly and
leave those that turn fast. YaRN also multiplies the rotated queries and keys by an attention
factor. Some families rotate only the first dimensions of a head. layers.py rotates.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from activation_extraction.common.errors import InputError

BETA_FAST, BETA_SLOW = 32.0, 1.0  # YaRN's default bounds, in turns over the trained context
TRAINED = "original_max_position_embeddings"
LARGEST = float(np.finfo(np.float32).max)
TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """A rotary embedding: the base `theta` of its wavelengths, and how it is scaled.

    rope_type: one of TYPES. "dynamic" is "default" for rows up to max_position_embeddings, and
    longer ones are refused. The rest is for scaled types. factor: how many times longer the context
    becomes; trained, its tokens before that. blended: the frequencies that are between left and
    divided, for YaRN from the first to the last index, for Llama 3.1 from the lowest to the highest
    number of turns over the trained context. attention_factor and attn_factor are YaRN's; the
    latter is read by vLLM and not by transformers, and not used here. share: of a head's
    dimensions, from the first on, that are rotated.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    blended: tuple[float, float] | None = None
    trained: float = 0.0
    share: float = 1.0
    attn_factor: Any = None

    @classmethod
    def from_hf(
        cls, rope: Mapping[str, Any], head_dim: int, source: str, partial: bool = False
    ) -> "Rope":
        """Reads the `rope_parameters` of a configuration that transformers has completed.

        partial: whether the family may rotate only a share of a head's dimensions. Raises
        InputError, naming field and value, for types that are not in TYPES and for missing numbers.
        """
        kind, share = _rope_type(rope, source), _rotated_share(rope, head_dim, partial, source)
        theta = positive_field(rope, "rope_theta", source)
        factor = 1.0 if kind == "default" else positive_field(rope, "factor", source)
        if kind in ("default", "dynamic"):
            return cls(theta, kind, share=share)
        if kind == "linear":
            return cls(theta, kind, factor, share=share)
        trained = positive_field(rope, TRAINED, source)
        if kind == "llama3":
            turns = _llama3_turns(rope, source)
            return cls(theta, kind, factor, blended=turns, trained=trained, share=share)
        blended = _blended(rope, theta, trained, int(head_dim * share), source)
        attention_factor = _attention_factor(rope, factor, source)
        ignored = rope.get("attn_factor")
        return cls(theta, kind, factor, attention_factor, blended, trained, share, ignored)

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
        left: np.ndarray
        if self.rope_type == "llama3":
            turns = np.float32(self.trained / (2 * math.pi)) * plain
            left = (turns - first) / (last - first)
        else:
            left = 1 - (np.arange(head_dim // 2, dtype=np.float32) - first) / (last - first)
        left = np.clip(left, 0, 1)
        return stretched * (1 - left) + plain * left


def check_rope(section: dict[str, Any], source: str) -> None:
    """Refuses, in a config.json or its text_config, what transformers has no clear message for.

    Deletes null original lengths from it: transformers cannot read them, unlike missing ones.
    """
    rope = section.get("rope_scaling") or section.get("rope_parameters")
    scaled = rope if isinstance(rope, dict) else {}
    if _rope_type(scaled, source) not in ("llama3", "yarn"):
        return  # the others have no use for an original length
    for fields in (section, scaled):
        if fields.get(TRAINED) is not None:
            positive_field(fields, TRAINED, source)
        else:
            fields.pop(TRAINED, None)


def positive_field(fields: Mapping[str, Any], field: str, source: str) -> float:
    """Returns the number in a field of a model's configuration.

    Args:
        fields: The fields of the configuration, by name.
        field: The name of the field.
        source: The path of the configuration's file, for the message.

    Raises:
        InputError: The value is not a number above 0 that float32 can hold.
    """
    value: Any = fields.get(field)
    if type(value) not in (int, float) or not 0 < value <= LARGEST:
        raise InputError(f"{source}: {field} must be a positive number, found {value!r}")
    return float(value)


def _rope_type(rope: Mapping[str, Any], source: str) -> str:
    """Returns one of TYPES: "mrope" turns the positions of a text as "default" does."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "mrope":
        return "default"
    if kind not in TYPES:
        raise InputError(
            f"{source}: rope_type {kind!r} is not supported; {', '.join(TYPES)} and mrope are"
        )
    return kind


def _rotated_share(rope: Mapping[str, Any], head_dim: int, partial: bool, source: str) -> float:
    """Returns the share of a head's dimensions that are rotated. Raises InputError."""
    share = positive_field({"partial_rotary_factor": 1.0, **rope}, "partial_rotary_factor", source)
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
        return positive_field(rope, "attention_factor", source)

    def suggested(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        scale, of_all = (
            positive_field(rope, name, source) for name in ("mscale", "mscale_all_dim")
        )
        return suggested(scale) / suggested(of_all)
    return suggested(1.0)


def _llama3_turns(rope: Mapping[str, Any], source: str) -> tuple[float, float]:
    """Returns the turns up to which frequencies are divided, and from which on they are left."""
    low, high = (positive_field(rope, f"{name}_freq_factor", source) for name in ("low", "high"))
    if low >= high:
        raise InputError(f"{source}: high_freq_factor {high} must exceed low_freq_factor {low}")
    return low, high


def _blended(
    rope: Mapping[str, Any], theta: float, trained: float, head_dim: int, source: str
) -> tuple[float, float]:
    """Returns the frequencies between which YaRN goes from leaving them to dividing them."""

    def with_turns(turns: float) -> float:
        """Returns the index of the frequency that turns so many times over the trained context."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    turns = [
        positive_field(rope, name, source) if rope.get(name) else default
        for name, default in (("beta_fast", BETA_FAST), ("beta_slow", BETA_SLOW))
    ]
    try:
        first, last = map(with_turns, turns)
        if rope.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
    except ArithmeticError:  # a theta of 1, or a beta next to 0
        raise InputError(f"{source}: no YaRN can be computed from {dict(rope)}") from None
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last + 0.001 * (first == last)
