"""A model family says what the tool must know of some models; the script passes families in.

So this folder computes with a family's modules without importing the files that define them.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import flax.linen as nn

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.late_imports import transformers
from activation_extraction.model.checkpoint import read_json
from activation_extraction.model.float8 import DEQUANTIZED, float8_format
from activation_extraction.model.hooks import Hook
from activation_extraction.model.kernels import Kernels
from activation_extraction.model.mesh import Layout
from activation_extraction.model.model_config import HEAD, LARGEST_DEPTH, LARGEST_SIZE, SIZES
from activation_extraction.model.rope import check_rope
from activation_extraction.model.weights import WeightSpec

WeightTable = dict[tuple[str, ...], WeightSpec]

FLAT = "qwen2_vl", "qwen2_5_vl"  # as released, these have no text_config
# Shapes do not show a wrong value of these fields, and transformers' default for them is that of no
# release: model_type -> field.
MUST_BE_STATED = dict.fromkeys(FLAT, "rms_norm_eps")
MUST_BE_STATED |= dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), "rope_theta")


class HookedModel(Protocol):
    """A hooked model returns the values at its hooks: {form: (hooks of that form, B, T, width)}.

    The hooks of one form are in the order of `hooks`. `apply` takes the parameters, then token
    ids, segment ids and positions, all (B, T) int32.
    """

    config: Any
    hooks: tuple[Hook, ...]
    dtype: Any
    activation_dtype: Any
    layout: Layout
    stages: int
    apply: Callable[..., Any]
    clone: Callable[..., "HookedModel"]

    @property
    def kernels(self) -> Kernels: ...

    @property
    def captured_dtype(self) -> Any: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def predicts(self) -> bool: ...

    def micro_batches(self, rows: int) -> int: ...

    def flops(self, lengths: Sequence[int]) -> float: ...


@dataclass(frozen=True)
class ModelFamily:
    """A family of models: what it does not share with the others."""

    model_type: str  # as in config.json
    models: str  # the released ones, for messages
    # (what transformers makes of a config.json, what to call the file) -> the checked configuration
    config: Callable[[Any, str], Any]
    whole: Callable[[Any], nn.Module]  # configuration -> the complete language model
    # (configuration, hooks, dtype, activation dtype, kernels, layout) -> HookedModel
    hooked: Callable[..., Any]
    weight_table: Callable[..., WeightTable]  # (either model, the checkpoint's tensors if known)
    text_alone: bool = False  # whether its models also take images or sound, which are not read

    def weights_of(self, config: Any) -> Iterable[WeightSpec]:
        return self.weight_table(self.whole(config)).values()

    def tensor_names(self, config: Any, tensors: Iterable[str]) -> set[str]:
        """Returns the names that the language model's tensors may have beside `tensors`.

        Checkpoints may hold a tensor for each expert beside the fused ones, and a head even where
        it is tied to the embedding.
        """
        tables = (self.weight_table(self.whole(config), names) for names in ((), tensors))
        specs = (spec for table in tables for spec in table.values())
        return {name for spec in specs for name in spec.hf_names} | {HEAD}


@dataclass(frozen=True)
class Families:
    """The families that the tool supports. A config.json names its family by the model_type."""

    families: tuple[ModelFamily, ...]

    def by_model_type(self, model_type: str) -> ModelFamily:
        return next(family for family in self.families if family.model_type == model_type)

    def read_config(self, path: str | Path) -> tuple[ModelFamily, Any]:
        return self.parse_config(read_json(path), str(path))

    def parse_config(
        self, raw: Mapping[str, Any], source: str = "config.json"
    ) -> tuple[ModelFamily, Any]:
        """Returns the family and configuration of a model. raw: the contents of config.json."""
        model_type = raw.get("model_type")
        if "qwen4_exp" in str(model_type) or "Qwen4Exp" in str(raw.get("architectures")):
            raise InputError(
                f"{source}: qwen4_exp models (such as Qwen3.8-Flash-Next) are not supported: they "
                "have n-gram embedding tables, several residual streams and sparse attention"
            )
        for family in self.families:
            if family.model_type == model_type:
                weights = DEQUANTIZED if float8_format(raw, source) else None
                config = family.config(complete(raw, source), source)
                return family, dataclasses.replace(config, weights=weights)
        vision = " (a model with vision inputs)" if "vision_config" in raw else ""
        known = ", ".join(f"{family.model_type} ({family.models})" for family in self.families)
        raise InputError(
            f"{source}: model_type {model_type!r}{vision} is not supported; supported are: {known}"
        )

    def config(self, raw: Mapping[str, Any]) -> Any:
        return self.parse_config(raw)[1]


def complete(raw: Mapping[str, Any], source: str) -> Any:
    """Returns a config.json as transformers understands it, with defaults for what it leaves out.

    raw: its contents, with a model_type that transformers knows. Raises InputError for what
    transformers rejects, and for sizes that would take too much memory.
    """
    fields = copy.deepcopy(dict(raw))  # which transformers and check_rope change
    text = _text_section(fields)
    for section in (fields, text):
        for name in SIZES:
            value, most = section.get(name), LARGEST_SIZE
            if name == "num_hidden_layers":
                most = LARGEST_DEPTH
            if isinstance(value, int | float) and value > most:
                raise InputError(f"{source}: {name} is {value:.6g}, expected at most {most:,}")
        check_rope(section, source)
    missing = MUST_BE_STATED.get(raw["model_type"])
    places = [text, text.get("rope_parameters"), text.get("rope_scaling")]
    if missing and not any(isinstance(p, dict) and p.get(missing) is not None for p in places):
        raise InputError(
            f"{source}: {missing} of the language model is missing; take it from the config.json "
            "of the released model: transformers' default is another value"
        )
    try:
        return transformers().AutoConfig.for_model(**fields)
    except Exception as error:  # its validation may raise anything
        raise InputError(f"{source}: {one_line(error)}") from error


def _text_section(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns where transformers looks for the language model of a model with other inputs."""
    if raw["model_type"] in FLAT and raw.get("text_config") is None:
        return raw
    around = raw.get("thinker_config", raw)
    text = around.get("text_config") if isinstance(around, dict) else None
    return text if isinstance(text, dict) else {}
