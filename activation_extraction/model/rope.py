"""Reads the settings of the rotary embedding (arXiv:2104.09864) and computes its frequencies.

The embedding may be scaled to a context longer than the trained one. Frequencies follow
`transformers.modeling_rope_utils`, in float32 as there. Linear scaling divides all frequencies by
the factor. YaRN (arXiv:2309.00071) and Llama 3.1 divide low frequencies and do not change high
ones. YaRN also multiplies the rotated queries and keys by an attention factor. Some families rotate
only the first dimensions of a head. layers.py applies the rotation.
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
    """The settings of a rotary embedding.

    Attributes:
        theta: Base of the wavelengths.
        rope_type: Type of the scaling, one of TYPES. "dynamic" equals "default" in rows of up to
            max_position_embeddings tokens; longer rows are refused.
        factor: Length of the scaled context relative to the trained one. 1 for types without
            scaling.
        attention_factor: Factor for rotated queries and keys with YaRN. 1 for other types.
        blended: Range in which frequencies change from undivided to divided. With YaRN, the first
            and last index of frequencies; with Llama 3.1, the lowest and highest number of turns
            over the trained context. None for other types.
        trained: Length of the context before scaling in tokens, with YaRN and Llama 3.1. 0 for
            other types.
        share: Share of the dimensions of a head that are rotated, from the first one on.
        attn_factor: Factor that vLLM reads in configurations with YaRN, and that is ignored here,
            as in transformers. None if there is none.
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
        """Reads the settings of a rotary embedding.

        Args:
            rope: The `rope_parameters` of a configuration that transformers has completed.
            head_dim: The size of a head.
            source: The path of config.json, for messages.
            partial: Whether the family may rotate only a share of the dimensions of a head.

        Raises:
            InputError: The type is not in TYPES, or a number is missing or unusable.
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

    @property
    def extended_length(self) -> int:
        """The length of the context that YaRN extends, in tokens; 0 for other types.

        Model cards recommend to add YaRN to a config.json without changing its
        max_position_embeddings. With "llama3", that field contains the length of the extended
        context, which may be less than the factor times the trained length, as in Llama 3.2.
        """
        return int(self.factor * self.trained) if self.rope_type == "yarn" else 0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Returns the frequencies of the pairs of rotated dimensions.

        Args:
            head_dim: The size of a head.

        Returns:
            Radians per position, float32, (rotated dimensions / 2,).
        """
        head_dim = int(head_dim * self.share)
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        # Powers are computed in float64, because NumPy's float32 power is wrong in the last bit,
        # and large positions multiply the error.
        plain = 1 / (self.theta ** exponents.astype(np.float64)).astype(np.float32)
        divided = plain / np.float32(self.factor)
        if self.blended is None:
            return divided
        first, last = self.blended
        undivided_share: np.ndarray
        if self.rope_type == "llama3":
            turns = np.float32(self.trained / (2 * math.pi)) * plain
            undivided_share = (turns - first) / (last - first)
        else:
            indices = np.arange(head_dim // 2, dtype=np.float32)
            undivided_share = 1 - (indices - first) / (last - first)
        undivided_share = np.clip(undivided_share, 0, 1)
        return divided * (1 - undivided_share) + plain * undivided_share


def check_rope(section: dict[str, Any], source: str) -> None:
    """Rejects RoPE settings for which transformers gives no clear error.

    This function also deletes original lengths that are null, because transformers can read a
    missing length but not a null.

    Args:
        section: The contents of config.json, or of its text_config. They are changed.
        source: The path of config.json, for messages.

    Raises:
        InputError: The type is not in TYPES, or the original length is no positive number.
    """
    rope = section.get("rope_scaling") or section.get("rope_parameters")
    scaled = rope if isinstance(rope, dict) else {}
    if _rope_type(scaled, source) not in ("llama3", "yarn"):
        return  # other types do not use an original length
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
        InputError: The field is missing, or is no positive number within the range of float32.
    """
    number: Any = fields.get(field)
    if type(number) not in (int, float) or not 0 < number <= LARGEST:
        raise InputError(f"{source}: {field} must be a positive number, found {number!r}")
    return float(number)


def _rope_type(rope: Mapping[str, Any], source: str) -> str:
    """Returns the type, one of TYPES. "mrope" becomes "default", which is the same for text."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "mrope":
        return "default"
    if kind not in TYPES:
        raise InputError(
            f"{source}: rope_type {kind!r} is not supported; {', '.join(TYPES)} and mrope are"
        )
    return kind


def _rotated_share(rope: Mapping[str, Any], head_dim: int, partial: bool, source: str) -> float:
    """Returns the share of a head's dimensions that are rotated, or raises InputError."""
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
    """Returns YaRN's attention factor: as configured, or as the paper suggests."""
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
    """Returns the range in which Llama 3.1 blends frequencies, in turns over the trained context.

    Frequencies below the range are divided by the factor, and those above it are not changed.
    """
    low_factor = positive_field(rope, "low_freq_factor", source)
    high_factor = positive_field(rope, "high_freq_factor", source)
    if low_factor >= high_factor:
        raise InputError(
            f"{source}: high_freq_factor {high_factor} must exceed low_freq_factor {low_factor}"
        )
    return low_factor, high_factor


def _blended(
    rope: Mapping[str, Any], theta: float, trained: float, head_dim: int, source: str
) -> tuple[float, float]:
    """Returns the range in which YaRN blends frequencies, as two indices.

    Frequencies before the range are not changed, and those after it are divided by the factor.
    """

    def with_turns(turns: float) -> float:
        """Returns the index of the frequency with this number of turns over the trained context."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    turns = [
        positive_field(rope, name, source) if rope.get(name) else default
        for name, default in (("beta_fast", BETA_FAST), ("beta_slow", BETA_SLOW))
    ]
    try:
        first, last = map(with_turns, turns)
        if rope.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
    except ArithmeticError:  # if theta is 1, or a beta is almost 0
        raise InputError(f"{source}: no YaRN can be computed from {dict(rope)}") from None
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last + 0.001 * (first == last)
