"""What the tool knows of a family of models: one object for each, handed in by the script.

So this room computes with a family's modules without importing the files that define them.
"""

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import flax.linen as nn

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.late_imports import transformers
from activation_extraction.model.hooks import Hook
from activation_extraction.model.kernels import Kernels
from activation_extraction.model.mesh import Layout
from activation_extraction.model.model_config import (
    LARGEST_DEPTH,
    LARGEST_SIZE,
    SIZES,
)
from activation_extraction.model.weights import WeightSpec

WeightTable = dict[tuple[str, ...], WeightSpec]


class HookedModel(Protocol):
    """A model that returns what its hooks saw: {form: (hooks of that form, B, T, width)}.

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
    def num_layers(self) -> int: ...

    def micro_batches(self, rows: int) -> int: ...

    def flops(self, lengths: Sequence[int]) -> float: ...


@dataclass(frozen=True)
class ModelFamily:
    """One family of models: the place that says what it has of its own.

    model_type: as in config.json; models: the released ones, for messages; config: (what
    transformers makes of a config.json, what to call the file) -> the checked configuration;
    whole: configuration -> the complete language model; hooked: (configuration, hooks, dtype,
    activation dtype, kernels, layout) -> the HookedModel that computes these hooks and no more;
    weight_table: (either model, the checkpoint's tensors if known) -> its parameters; ignored:
    a regular expression for tensors of its checkpoints that are not loaded.

    A configuration says of every layer which type it is of: `layer_types`.
    """

    model_type: str
    models: str
    config: Callable[[Any, str], Any]
    whole: Callable[[Any], nn.Module]
    hooked: Callable[..., Any]
    weight_table: Callable[..., WeightTable]
    ignored: str = ""

    def weights_of(self, config: Any) -> Iterable[WeightSpec]:
        """All weights of the model with this configuration."""
        return self.weight_table(self.whole(config)).values()

    def tensor_names(self, config: Any, tensors: Iterable[str]) -> set[str]:
        """The names that tensors of the language model may have in a checkpoint with `tensors`.

        Checkpoints may have a tensor for each expert where there are fused ones, too, and a head
        where it is tied to the embedding.
        """
        tables = (self.weight_table(self.whole(config), names) for names in ((), tensors))
        every = (spec for table in tables for spec in table.values())
        return {name for spec in every for name in spec.hf_names} | {"lm_head.weight"}


@dataclass(frozen=True)
class Families:
    """The families that the tool supports. A config.json names its family by the model_type."""

    every: tuple[ModelFamily, ...]

    def named(self, model_type: str) -> ModelFamily:
        """The one of a configuration's model_type."""
        return next(one for one in self.every if one.model_type == model_type)

    def read(self, path: str | Path) -> tuple[ModelFamily, Any]:
        """The family and configuration of the model with this config.json. Raises InputError."""
        return self.of(read_json(path), str(path))

    def of(self, raw: Mapping[str, Any], source: str = "config.json") -> tuple[ModelFamily, Any]:
        """Does what `read` does, with the contents of a config.json."""
        asked = raw.get("model_type")
        for family in self.every:
            if family.model_type == asked:
                return family, family.config(complete(raw, source), source)
        vision = " (a model with vision inputs)" if "vision_config" in raw else ""
        known = ", ".join(f"{one.model_type} ({one.models})" for one in self.every)
        raise InputError(
            f"{source}: model_type {asked!r}{vision} is not supported; supported are: {known}"
        )

    def config(self, raw: Mapping[str, Any]) -> Any:
        """The configuration of the model with these contents of a config.json."""
        return self.of(raw)[1]


def read_json(path: str | Path) -> dict[str, Any]:
    """The contents of a config.json. Raises InputError for a file that holds no JSON object."""
    try:
        raw = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def complete(raw: Mapping[str, Any], source: str) -> Any:
    """A config.json as transformers understands it, with everything that it leaves out.

    raw: its contents, with a model_type that transformers knows. Raises InputError for what
    transformers does not take, and for sizes for which it would need too much memory.
    """
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, Mapping) else {}):
        for name in SIZES:
            value: Any = part.get(name)
            most = LARGEST_DEPTH if name == "num_hidden_layers" else LARGEST_SIZE
            if type(value) in (int, float) and value > most:
                raise InputError(f"{source}: {name} is {value:.6g}, expected at most {most:,}")
    try:
        return transformers().AutoConfig.for_model(**copy.deepcopy(dict(raw)))  # it writes to it
    except Exception as error:  # its validation raises types of its own, and whatever it runs into
        raise InputError(f"{source}: {one_line(error)}") from error
