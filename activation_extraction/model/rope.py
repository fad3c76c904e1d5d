"""Reads the settings of the rotary embedding (arXiv:2104.09864) and computes its frequencies.

A model may scale its embedding to a context that is longer than the one it was trained on.
Frequencies are computed in float32, as in `transformers.modeling_rope_utils`. Linear scaling
divides all frequencies by the factor of the scaling. YaRN (arXiv:2309.00071) and Llama 3.1 divide
low frequencies and do not change high frequencies. YaRN also multiplies the rotated queries and
keys by an attention factor. Some families rotate only the first dimensions of a head. layers.py
applies the rotation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from activation_extraction.common.errors import InputError

# By default, YaRN blends the frequencies that make between BETA_SLOW and BETA_FAST full rotations
# over the trained context.
BETA_FAST, BETA_SLOW = 32.0, 1.0
# The field of config.json with the length of the context before scaling.
TRAINED = "original_max_position_embeddings"
LARGEST = float(np.finfo(np.float32).max)
# The supported values of rope_type in config.json, beside "mrope".
TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """The settings of a rotary embedding.

    Attributes:
        theta: Base of the wavelengths.
        rope_type: Type of the scaling, one of TYPES. "dynamic" equals "default" in rows of up to
            max_position_embeddings tokens; longer rows are refused.
        factor: Length of the scaled context divided by the length of the trained context. 1 for
            types without scaling.
        attention_factor: Factor for rotated queries and keys with YaRN. 1 for other types.
        blended: First and last value of the range in which the scaled frequency is a mixture of the
            original frequency and the original frequency divided by `factor`. With YaRN, the values
            are indices of frequencies; with Llama 3.1, numbers of full rotations over the trained
            context. None for other types.
        trained: Number of tokens in the context before scaling, with YaRN and Llama 3.1. 0 for
            other types.
        share: Fraction of a head's dimensions that are rotated, at most 1. The other dimensions
            are the last ones of the head.
        attn_factor: Factor that vLLM reads in configurations with YaRN, and that is ignored here,
            as in transformers. None if the configuration has no such factor.
    """

    # The names of these fields are also keys in metadata.json, so they must not change.
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
        cls, rope: Mapping[str, Any], head_dim: int, source: str, allows_partial: bool = False
    ) -> "Rope":
        """Reads and checks the settings of a rotary embedding in a model's configuration.

        Args:
            rope: The `rope_parameters` of a configuration that transformers has completed.
            head_dim: The size of a head.
            source: The path of config.json, for messages.
            allows_partial: Whether the family may rotate only some of the dimensions of a head.

        Raises:
            InputError: If the type is not in TYPES, or a number is missing or unusable.
        """
        rope_type = _rope_type(rope, source)
        rotated_fraction = _rotated_fraction(rope, head_dim, allows_partial, source)
        theta = positive_field(rope, "rope_theta", source)
        scaling_factor = 1.0 if rope_type == "default" else positive_field(rope, "factor", source)
        if rope_type in ("default", "dynamic"):
            return cls(theta, rope_type, share=rotated_fraction)
        if rope_type == "linear":
            return cls(theta, rope_type, scaling_factor, share=rotated_fraction)
        trained_length = positive_field(rope, TRAINED, source)
        if rope_type == "llama3":
            blend_limits_in_rotations = _llama3_rotation_count_bounds(rope, source)
            return cls(
                theta,
                rope_type,
                scaling_factor,
                blended=blend_limits_in_rotations,
                trained=trained_length,
                share=rotated_fraction,
            )
        return cls(
            theta,
            rope_type,
            scaling_factor,
            _attention_factor(rope, scaling_factor, source),
            _bounding_indices_of_blend(
                rope, theta, trained_length, int(head_dim * rotated_fraction), source
            ),
            trained_length,
            rotated_fraction,
            rope.get("attn_factor"),
        )

    @property
    def extended_length(self) -> int:
        """The length of the context after scaling with YaRN, in tokens; 0 for other types.

        With YaRN, max_position_embeddings in config.json may be the length before scaling, because
        model cards recommend to add YaRN to a config.json without changing this field. With
        "llama3", max_position_embeddings is the length after scaling, so this property is not
        needed. It would even be wrong: in Llama 3.2, the factor times the trained length is larger
        than the length after scaling.
        """
        return int(self.factor * self.trained) if self.rope_type == "yarn" else 0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Returns the frequencies with which the pairs of dimensions are rotated.

        Args:
            head_dim: The size of a head.

        Returns:
            The frequency of each pair in radians per position, (rotated dimensions / 2,) float32.
        """
        num_rotated_dims = int(head_dim * self.share)
        theta_exponents = np.arange(0, num_rotated_dims, 2, dtype=np.float32) / np.float32(
            num_rotated_dims
        )
        # Powers are computed in float64, because NumPy's float32 power is wrong in the last bit,
        # and large positions multiply the error.
        original_frequencies = 1 / (self.theta ** theta_exponents.astype(np.float64)).astype(
            np.float32
        )
        frequencies_divided_by_factor = original_frequencies / np.float32(self.factor)
        if self.blended is None:
            return frequencies_divided_by_factor
        # YaRN and Llama 3.1 mix each original frequency with the original frequency divided by
        # `factor`. These are the weights of the original frequencies in the mixtures. They are
        # clipped to the range from 0 to 1 below.
        weights_of_original_frequencies: np.ndarray
        if self.rope_type == "llama3":
            min_rotations_of_blend, max_rotations_of_blend = self.blended
            rotation_counts_over_trained_length = (
                np.float32(self.trained / (2 * math.pi)) * original_frequencies
            )
            weights_of_original_frequencies = (
                rotation_counts_over_trained_length - min_rotations_of_blend
            ) / (max_rotations_of_blend - min_rotations_of_blend)
        else:
            index_of_first_blended_frequency, index_of_last_blended_frequency = self.blended
            frequency_indices = np.arange(num_rotated_dims // 2, dtype=np.float32)
            weights_of_original_frequencies = 1 - (
                frequency_indices - index_of_first_blended_frequency
            ) / (index_of_last_blended_frequency - index_of_first_blended_frequency)
        weights_of_original_frequencies = np.clip(weights_of_original_frequencies, 0, 1)
        return (
            frequencies_divided_by_factor * (1 - weights_of_original_frequencies)
            + original_frequencies * weights_of_original_frequencies
        )


def check_rope(section: dict[str, Any], source: str) -> None:
    """Rejects RoPE settings for which transformers gives no clear error.

    For the RoPE types "llama3" and "yarn" (field rope_type), this function also deletes the field
    original_max_position_embeddings if it is null, because transformers can read a configuration
    without this field, but not with a null in it.

    Args:
        section: The contents of config.json, or of its text_config. This dict is changed, and so is
            the dict in its field rope_scaling or rope_parameters.
        source: The path of config.json, for messages.

    Raises:
        InputError: If the RoPE type is neither in TYPES nor "mrope". For "llama3" and "yarn", also
            if original_max_position_embeddings is present, but neither null nor a positive number.
    """
    rope_entry = section.get("rope_scaling") or section.get("rope_parameters")
    rope_settings = rope_entry if isinstance(rope_entry, dict) else {}
    if _rope_type(rope_settings, source) not in ("llama3", "yarn"):
        return  # other types of RoPE do not use the length of the trained context
    for config_section in (section, rope_settings):
        if config_section.get(TRAINED) is not None:
            positive_field(config_section, TRAINED, source)
        else:
            config_section.pop(TRAINED, None)


def positive_field(fields: Mapping[str, Any], field: str, source: str) -> float:
    """Returns the positive number in a field of a model's configuration.

    Args:
        fields: The fields of the configuration, by name.
        field: The name of the field.
        source: The path of the configuration's file, for the message.

    Raises:
        InputError: If the field is missing, or is no positive number within the range of float32.
    """
    field_value: Any = fields.get(field)
    if type(field_value) not in (int, float) or not 0 < field_value <= LARGEST:
        raise InputError(f"{source}: {field} must be a positive number, found {field_value!r}")
    return float(field_value)


def _rope_type(rope: Mapping[str, Any], source: str) -> str:
    """Returns the type of a rotary embedding, one of TYPES.

    "mrope" becomes "default", because the two are the same for text.

    Args:
        rope: The settings of the rotary embedding.
        source: The path of config.json, for the message.

    Raises:
        InputError: If the type is neither in TYPES nor "mrope".
    """
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "mrope":
        return "default"
    if rope_type not in TYPES:
        raise InputError(
            f"{source}: rope_type {rope_type!r} is not supported; {', '.join(TYPES)} and mrope are"
        )
    return rope_type


def _rotated_fraction(
    rope: Mapping[str, Any], head_dim: int, allows_partial: bool, source: str
) -> float:
    """Returns the fraction of a head's dimensions that are rotated.

    Args:
        rope: The settings of the rotary embedding.
        head_dim: The size of a head.
        allows_partial: Whether the family may rotate only some of the dimensions of a head.
        source: The path of config.json, for messages.

    Raises:
        InputError: If the fraction is not supported, or does not give an even number of dimensions.
    """
    rotated_fraction = positive_field(
        {"partial_rotary_factor": 1.0, **rope}, "partial_rotary_factor", source
    )
    if rotated_fraction != 1 and not allows_partial:
        raise InputError(
            f"{source}: partial_rotary_factor {rotated_fraction!r} is not supported, only 1.0 is"
        )
    num_rotated_dims = int(head_dim * rotated_fraction)
    if rotated_fraction > 1 or num_rotated_dims < 2 or num_rotated_dims % 2:
        raise InputError(
            f"{source}: partial_rotary_factor {rotated_fraction!r} rotates {num_rotated_dims} of a "
            f"head's {head_dim} dimensions; it must be an even number of them, at least 2"
        )
    return rotated_fraction


def _attention_factor(rope: Mapping[str, Any], factor: float, source: str) -> float:
    """Returns YaRN's attention factor, by which rotated queries and keys are multiplied.

    If the configuration contains an attention factor, this factor is returned. Otherwise the
    attention factor is computed from `factor`, as in YaRN's paper.

    Args:
        rope: The settings of the rotary embedding.
        factor: The length of the scaled context divided by the length of the trained context.
        source: The path of config.json, for messages.

    Raises:
        InputError: If a number that is needed for the attention factor is not a positive number.
    """
    if rope.get("attention_factor") is not None:
        return positive_field(rope, "attention_factor", source)

    def paper_factor(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        mscale = positive_field(rope, "mscale", source)
        mscale_all_dim = positive_field(rope, "mscale_all_dim", source)
        return paper_factor(mscale) / paper_factor(mscale_all_dim)
    return paper_factor(1.0)


def _llama3_rotation_count_bounds(rope: Mapping[str, Any], source: str) -> tuple[float, float]:
    """Returns the range of frequencies that Llama 3.1 blends, as two numbers of full rotations.

    A frequency makes a number of full rotations over the trained context. If this number is below
    the range, the frequency is divided by the factor of the scaling. If it is above the range, the
    frequency is not changed. A frequency in the range becomes a mixture of the divided and the
    unchanged frequency.

    Args:
        rope: The settings of the rotary embedding.
        source: The path of config.json, for messages.

    Returns:
        A tuple of the smallest and the largest number of rotations in the range.

    Raises:
        InputError: If a number is missing or unusable, or if the smallest number is not below the
            largest number.
    """
    low_freq_factor = positive_field(rope, "low_freq_factor", source)
    high_freq_factor = positive_field(rope, "high_freq_factor", source)
    if low_freq_factor >= high_freq_factor:
        raise InputError(
            f"{source}: high_freq_factor {high_freq_factor} must exceed low_freq_factor "
            f"{low_freq_factor}"
        )
    return low_freq_factor, high_freq_factor


def _bounding_indices_of_blend(
    rope: Mapping[str, Any], theta: float, trained_length: float, num_rotated_dims: int, source: str
) -> tuple[float, float]:
    """Returns the indices of the first and the last frequency that YaRN blends.

    The indices need not be integers. Frequencies before the first index are not changed, and
    frequencies after the last index are divided by the factor. A frequency between the two indices
    becomes a mixture of the divided and the unchanged frequency.

    Args:
        rope: The settings of the rotary embedding.
        theta: The base of the wavelengths.
        trained_length: The length of the context before scaling, in tokens.
        num_rotated_dims: The number of dimensions of a head that are rotated.
        source: The path of config.json, for messages.

    Returns:
        A tuple of:
            The index of the first frequency that is blended.
            The index of the last frequency that is blended.

    Raises:
        InputError: If a number is unusable, or no index can be computed from the numbers.
    """

    def index_with_rotations(num_rotations: float) -> float:
        """Returns the index of the rotary frequency that makes a certain number of full rotations.

        The index need not be an integer.

        Args:
            num_rotations: The number of full rotations over the trained context.
        """
        num_tokens_per_radian = trained_length / (num_rotations * 2 * math.pi)
        return num_rotated_dims * math.log(num_tokens_per_radian) / (2 * math.log(theta))

    blend_limits_in_rotations: list[float] = []
    for beta_field, default_num_rotations in (("beta_fast", BETA_FAST), ("beta_slow", BETA_SLOW)):
        blend_limits_in_rotations.append(
            positive_field(rope, beta_field, source)
            if rope.get(beta_field)
            else default_num_rotations
        )
    try:
        index_of_first_blended_frequency, index_of_last_blended_frequency = map(
            index_with_rotations, blend_limits_in_rotations
        )
        if rope.get("truncate", True):
            index_of_first_blended_frequency = math.floor(index_of_first_blended_frequency)
            index_of_last_blended_frequency = math.ceil(index_of_last_blended_frequency)
    except ArithmeticError:  # because theta is 1, or a beta is almost 0
        raise InputError(f"{source}: no YaRN can be computed from {dict(rope)}") from None
    index_of_first_blended_frequency = max(index_of_first_blended_frequency, 0)
    index_of_last_blended_frequency = float(
        min(index_of_last_blended_frequency, num_rotated_dims - 1)
    )
    # The difference of the indices is a divisor, so it must not be 0.
    if index_of_first_blended_frequency == index_of_last_blended_frequency:
        index_of_last_blended_frequency += 0.001
    return index_of_first_blended_frequency, index_of_last_blended_frequency
