"""The rotary embedding (arXiv:2104.09864) is plain, or scaled to a context longer than trained.

Frequencies follow `transformers.modeling_rope_utils`, in float32 as there. Linear scaling divides
all of them by the factor. YaRN (arXiv:2309.00071) and Llama 3.1 divide low frequencies and leave
high ones as they are. YaRN also multiplies the rotated queries and keys by an attention factor.
Some families rotate only the first dimensions of a head. layers.py does the rotation.
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
    """A rotary embedding, and how it is scaled.

    Attributes:
        theta: The base of the wavelengths.
        rope_type: One of TYPES. "dynamic" equals "default" in rows of up to max_position_embeddings
            tokens; longer rows are refused.
        factor: How many times longer the context becomes. 1 in types that do not scale.
        attention_factor: The factor of YaRN for rotated queries and keys. 1 in other types.
        blended: The range in which frequencies change from undivided to divided: for YaRN the first
            and last index, for Llama 3.1 the lowest and highest number of turns over the trained
            context. None in other types.
        trained: The tokens of the context before it was scaled, of YaRN and Llama 3.1. 0 in other
            types.
        share: The share of the dimensions of a head, from the first one on, that are rotated.
        attn_factor: A factor that vLLM reads in configurations with YaRN. It is ignored here, as in
            transformers. None if there is none.
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
        """Returns the tokens of the context that YaRN extends; 0 in other types.

        Model cards say to add YaRN to a config.json without changing its max_position_embeddings.
        With "llama3", that field has the length of the extended context, which may be less than
        factor times the trained one, as in Llama 3.2.
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
        # NumPy's float32 power is wrong in the last bit, and late positions multiply its error.
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
    """Rejects RoPE settings for which transformers gives no clear error.

    It also deletes original lengths that are null, because transformers can read a missing length
    but not a null.

    Args:
        section: The contents of config.json, or of its text_config. It is changed.
        source: The path of config.json, for messages.

    Raises:
        InputError: The type is not in TYPES, or the original length is no positive number.
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
    """Returns one of TYPES. "mrope" is "default", because both rotate text in the same way."""
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
    """Returns YaRN's attention factor: the configured one, or otherwise what its paper suggests."""
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

    Frequencies below the range are divided by the factor, and those above it are left as they are.
    """
    low, high = (positive_field(rope, f"{name}_freq_factor", source) for name in ("low", "high"))
    if low >= high:
        raise InputError(f"{source}: high_freq_factor {high} must exceed low_freq_factor {low}")
    return low, high


def _blended(
    rope: Mapping[str, Any], theta: float, trained: float, head_dim: int, source: str
) -> tuple[float, float]:
    """Returns the range in which YaRN blends frequencies, as two indices.

    Frequencies before the range are left as they are, and those after it are divided by the factor.
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
    except ArithmeticError:  # a theta of 1, or a beta next to 0
        raise InputError(f"{source}: no YaRN can be computed from {dict(rope)}") from None
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last + 0.001 * (first == last)
