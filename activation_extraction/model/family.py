"""Lists the supported model families, and turns a config.json into a ModelConfig.

A family is one line of `FAMILIES`: a model_type and the function that reads its configuration. The
modules, the hooks and the table of weights follow from the ModelConfig. The functions that read
configurations are in model_config.py. This module completes a config.json with transformers'
defaults before one of these functions reads it.
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

FLAT = "qwen2_vl", "qwen2_5_vl"  # the released models of these families have no text_config
# model_type -> a field that config.json must contain. The shapes of weights do not show a wrong
# value of this field, and transformers' default differs from the value of all released models.
MUST_BE_STATED = dict.fromkeys(FLAT, "rms_norm_eps")
MUST_BE_STATED |= dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), "rope_theta")


class Family(NamedTuple):
    """The models of one model_type.

    Attributes:
        released: The released models, for messages.
        read: The function that returns the ModelConfig. Its arguments are a configuration that
            transformers has completed, and the path of config.json, for messages. For a multimodal
            family, it is called with the configuration of the language model.
        multimodal: Whether the models also take images, video or audio. Only their language model
            is used, with text.
    """

    released: str
    read: Callable[[Any, str], ModelConfig]
    multimodal: bool = False


FAMILIES = {
    "qwen2": Family("Qwen2, Qwen2.5, QwQ", qwen2_config),
    "qwen3": Family("Qwen3, dense", qwen3_config),
    "qwen2_moe": Family("Qwen1.5-MoE, Qwen2 57B-A14B", qwen2_moe_config),
    "qwen3_moe": Family("Qwen3 30B-A3B, 235B-A22B", qwen3_moe_config),
    "qwen3_next": Family("Qwen3-Next 80B-A3B, Qwen3-Coder-Next", qwen3_next_config),
    "qwen2_vl": Family("Qwen2-VL", qwen2_config, multimodal=True),
    "qwen2_5_vl": Family("Qwen2.5-VL", qwen2_config, multimodal=True),
    "qwen2_5_omni": Family("Qwen2.5-Omni", qwen2_config, multimodal=True),
    "qwen3_vl": Family("Qwen3-VL, dense", qwen3_config, multimodal=True),
    "qwen3_vl_moe": Family("Qwen3-VL 30B-A3B, 235B-A22B", qwen3_moe_config, multimodal=True),
    "qwen3_omni_moe": Family("Qwen3-Omni", qwen3_moe_config, multimodal=True),
    "qwen3_5": Family("Qwen3.5, dense", qwen3_5_text_config, multimodal=True),
    "qwen3_5_text": Family("Qwen3.5, dense, text alone", qwen3_5_text_config),
    "qwen3_5_moe": Family(
        "Qwen3.5 35B-A3B, 122B-A10B, 397B-A17B", qwen3_5_moe_text_config, multimodal=True
    ),
    "qwen3_5_moe_text": Family("Qwen3.5 with experts, text alone", qwen3_5_moe_text_config),
    "llama": Family("Llama 3, 3.1, 3.2 and 3.3, text alone", llama_config),
}


def read_model_config(path: str | Path) -> ModelConfig:
    """Reads a config.json file.

    Raises:
        InputError: The file is not JSON, or the model is not supported.
    """
    return parse_model_config(read_json(path), str(path))


def parse_model_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Returns the configuration of a model.

    Args:
        raw: The contents of config.json, which are not changed.
        source: The path of config.json, for messages.

    Raises:
        InputError: The family is not supported, or the model has a setting that is not supported.
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
    weights = DEQUANTIZED if float8_format(raw, source) else None
    hf = complete(raw, source)
    if family.multimodal:
        config = multimodal_config(family.read, hf, source)
    else:
        config = family.read(hf, source)
    return dataclasses.replace(config, weights=weights)


def _unsupported(raw: Mapping[str, Any], source: str) -> InputError:
    """Returns the error about a family that is not supported, which lists the supported ones."""
    vision = " (a model with vision inputs)" if "vision_config" in raw else ""
    supported = []
    for model_type, family in FAMILIES.items():
        text_of = "the text of " if family.multimodal else ""
        supported.append(f"{model_type} ({text_of}{family.released})")
    return InputError(
        f"{source}: model_type {raw.get('model_type')!r}{vision} is not supported; supported are: "
        f"{', '.join(supported)}"
    )


def complete(raw: Mapping[str, Any], source: str) -> Any:
    """Returns a config.json as transformers reads it, with its defaults for missing fields.

    Args:
        raw: The contents of config.json, which are not changed. Its model_type is in FAMILIES.
        source: The path of config.json, for messages.

    Raises:
        InputError: transformers rejects the configuration, a size is absurdly large, or a field
            that must be stated is missing.
    """
    fields = copy.deepcopy(dict(raw))  # because transformers and check_rope change it
    text = _text_section(fields)
    for section in (fields, text):
        for name in SIZES:
            size = section.get(name)
            most = LARGEST_DEPTH if name == "num_hidden_layers" else LARGEST_SIZE
            if isinstance(size, int | float) and size > most:
                raise InputError(f"{source}: {name} is {size:.6g}, expected at most {most:,}")
        check_rope(section, source)
    field = MUST_BE_STATED.get(raw["model_type"])
    if field is not None:
        sections = [text, text.get("rope_parameters"), text.get("rope_scaling")]
        stated = [section.get(field) for section in sections if isinstance(section, dict)]
        if all(number is None for number in stated):
            raise InputError(
                f"{source}: {field} of the language model is missing; take it from the config.json "
                "of the released model: transformers' default is another value"
            )
    try:
        return transformers().AutoConfig.for_model(**fields)
    except Exception as error:  # its validation may raise anything
        raise InputError(f"{source}: {one_line(error)}") from error


def _text_section(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the section of config.json in which transformers looks for the language model.

    The section is empty if there is none, as in the config.json of a text-only model.
    """
    if raw["model_type"] in FLAT and raw.get("text_config") is None:
        return raw
    around = raw.get("thinker_config", raw)
    text = around.get("text_config") if isinstance(around, dict) else None
    return text if isinstance(text, dict) else {}
