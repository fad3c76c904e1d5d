"""Lists the supported families of models, and turns a config.json into a ModelConfig.

`FAMILIES` has one line for each family, with its model_type and the function that reads its
configurations. These functions are in model_config.py. Before one of them reads a config.json, this
module adds transformers' defaults for missing fields. The modules, hooks and weights of a model
follow from its ModelConfig.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.late_imports import transformers
from activation_extraction.model.float8 import DEQUANTIZED, float8_format
from activation_extraction.model.model_config import (
    LARGEST_DEPTH,
    LARGEST_SIZE,
    SIZES,
    ModelConfig,
    llama_config,
    multimodal_config,
    qwen2_config,
    qwen2_moe_config,
    qwen3_5_moe_text_config,
    qwen3_5_text_config,
    qwen3_config,
    qwen3_moe_config,
    qwen3_next_config,
)
from activation_extraction.model.repository import read_json
from activation_extraction.model.rope import check_rope

# The model_type of multimodal families whose released models have no text_config in config.json.
# The fields of the language model are beside the fields of the whole model.
WITHOUT_TEXT_CONFIG = "qwen2_vl", "qwen2_5_vl"
# model_type -> a field that config.json must contain. The shapes of weights do not show whether the
# value of this field is right, and transformers' default differs from the value of all released
# models.
REQUIRED_FIELD = dict.fromkeys(WITHOUT_TEXT_CONFIG, "rms_norm_eps")
REQUIRED_FIELD |= dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), "rope_theta")


class Family(NamedTuple):
    """A supported family of models, which all have the same model_type in config.json.

    Attributes:
        released_models_phrase: Names of the released models, for messages.
        read_config: Function that returns the ModelConfig. Its arguments are a configuration that
            transformers has completed, and the path of config.json for messages. For a multimodal
            family, the configuration is the configuration of the language model.
        is_multimodal: Whether the models also take images, video or audio. This tool only uses
            their language model.
    """

    released_models_phrase: str
    read_config: Callable[[Any, str], ModelConfig]
    is_multimodal: bool = False


# model_type -> family.
FAMILIES = {
    "qwen2": Family("Qwen2, Qwen2.5, QwQ", qwen2_config),
    "qwen3": Family("Qwen3, dense", qwen3_config),
    "qwen2_moe": Family("Qwen1.5-MoE, Qwen2 57B-A14B", qwen2_moe_config),
    "qwen3_moe": Family("Qwen3 30B-A3B, 235B-A22B", qwen3_moe_config),
    "qwen3_next": Family("Qwen3-Next 80B-A3B, Qwen3-Coder-Next", qwen3_next_config),
    "qwen2_vl": Family("Qwen2-VL", qwen2_config, is_multimodal=True),
    "qwen2_5_vl": Family("Qwen2.5-VL", qwen2_config, is_multimodal=True),
    "qwen2_5_omni": Family("Qwen2.5-Omni", qwen2_config, is_multimodal=True),
    "qwen3_vl": Family("Qwen3-VL, dense", qwen3_config, is_multimodal=True),
    "qwen3_vl_moe": Family("Qwen3-VL 30B-A3B, 235B-A22B", qwen3_moe_config, is_multimodal=True),
    "qwen3_omni_moe": Family("Qwen3-Omni", qwen3_moe_config, is_multimodal=True),
    "qwen3_5": Family("Qwen3.5, dense", qwen3_5_text_config, is_multimodal=True),
    "qwen3_5_text": Family("Qwen3.5, dense, text alone", qwen3_5_text_config),
    "qwen3_5_moe": Family(
        "Qwen3.5 35B-A3B, 122B-A10B, 397B-A17B", qwen3_5_moe_text_config, is_multimodal=True
    ),
    "qwen3_5_moe_text": Family("Qwen3.5 with experts, text alone", qwen3_5_moe_text_config),
    "llama": Family("Llama 3, 3.1, 3.2 and 3.3, text alone", llama_config),
}


def read_model_config(path: str | Path) -> ModelConfig:
    """Reads the configuration of a model from its config.json.

    Args:
        path: The path of the file.

    Raises:
        InputError: If the file is not JSON, or if the model is not supported.
    """
    return parse_model_config(read_json(path), str(path))


def parse_model_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Returns the configuration of a model.

    Args:
        raw: The contents of config.json, which are not changed.
        source: The path of config.json, for messages.

    Raises:
        InputError: If the family is not supported, or if the model has a setting that is not
            supported.
    """
    model_type = raw.get("model_type")
    if "qwen4_exp" in str(model_type) or "Qwen4Exp" in str(raw.get("architectures")):
        raise InputError(
            f"{source}: qwen4_exp models (such as Qwen3.8-Flash-Next) are not supported: they "
            "have n-gram embedding tables, several residual streams and sparse attention"
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise _unsupported(raw, source)
    family = FAMILIES[model_type]
    weights_phrase = DEQUANTIZED if float8_format(raw, source) else None
    hf_config = complete(raw, source)
    if family.is_multimodal:
        model_config = multimodal_config(family.read_config, hf_config, source)
    else:
        model_config = family.read_config(hf_config, source)
    return dataclasses.replace(model_config, weights=weights_phrase)


def _unsupported(raw: Mapping[str, Any], source: str) -> InputError:
    """Returns the error about a family that is not supported, which lists the supported families.

    Args:
        raw: The contents of config.json.
        source: The path of config.json, for the message.
    """
    vision_note = " (a model with vision inputs)" if "vision_config" in raw else ""
    supported_family_phrases = []
    for model_type, family in FAMILIES.items():
        models_phrase = family.released_models_phrase
        if family.is_multimodal:
            models_phrase = f"the text of {models_phrase}"
        supported_family_phrases.append(f"{model_type} ({models_phrase})")
    return InputError(
        f"{source}: model_type {raw.get('model_type')!r}{vision_note} is not supported; supported "
        f"are: {', '.join(supported_family_phrases)}"
    )


def complete(raw: Mapping[str, Any], source: str) -> Any:
    """Returns a configuration with transformers' defaults for the fields that are missing.

    Args:
        raw: The contents of config.json, which are not changed. Its model_type is in FAMILIES.
        source: The path of config.json, for messages.

    Returns:
        An object of the family's configuration class in transformers.

    Raises:
        InputError: If transformers rejects the configuration, if a size is absurdly large, or if
            the field in REQUIRED_FIELD is missing.
    """
    # The fields are copied, because transformers and check_rope change the dictionary.
    config_fields = copy.deepcopy(dict(raw))
    text_section = _text_section(config_fields)
    for config_section in (config_fields, text_section):
        for size_field in SIZES:
            field_value = config_section.get(size_field)
            size_limit = LARGEST_DEPTH if size_field == "num_hidden_layers" else LARGEST_SIZE
            if isinstance(field_value, int | float) and field_value > size_limit:
                raise InputError(
                    f"{source}: {size_field} is {field_value:.6g}, expected at most {size_limit:,}"
                )
        check_rope(config_section, source)
    required_field = REQUIRED_FIELD.get(raw["model_type"])
    if required_field is not None and not _states(text_section, required_field):
        raise InputError(
            f"{source}: {required_field} of the language model is missing; take it from the "
            "config.json of the released model: transformers' default is another value"
        )
    try:
        return transformers().AutoConfig.for_model(**config_fields)
    except Exception as error:
        # The validation of transformers may raise any exception.
        raise InputError(f"{source}: {one_line(error)}") from error


def _text_section(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the section of config.json in which transformers looks for the language model.

    Args:
        raw: The contents of config.json.

    Returns:
        The section itself, not a copy. An empty dict if there is no such section, as in the
        config.json of a text-only model.
    """
    if raw["model_type"] in WITHOUT_TEXT_CONFIG and raw.get("text_config") is None:
        return raw
    thinker_section_or_whole = raw.get("thinker_config", raw)
    text_section = (
        thinker_section_or_whole.get("text_config")
        if isinstance(thinker_section_or_whole, dict)
        else None
    )
    return text_section if isinstance(text_section, dict) else {}


def _states(text_section: dict[str, Any], field: str) -> bool:
    """Returns whether the language model's section, or its RoPE settings, contain a field.

    Args:
        text_section: The section of config.json.
        field: The name of the field. A field with the value null counts as missing.
    """
    rope_sections = [text_section.get("rope_parameters"), text_section.get("rope_scaling")]
    for config_section in (text_section, *rope_sections):
        if isinstance(config_section, dict) and config_section.get(field) is not None:
            return True
    return False
