"""QwenConfig: a Hugging Face config.json, checked for everything that would be computed wrongly.

Sizes of axes and counts of operations follow from it.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from activation_extraction.cli.errors import InputError


@dataclasses.dataclass(frozen=True)
class QwenConfig:
    """Shape and constants of a Qwen2 model, under the names of its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool

    @property
    def sizes(self) -> dict[str, int]:
        """Letter -> size, for the axes that weights have."""
        return {
            "D": self.hidden_size,
            "N": self.num_attention_heads,
            "K": self.num_key_value_heads,
            "H": self.head_dim,
            "F": self.intermediate_size,
            "V": self.vocab_size,
        }

    def flops(self, layers: int, lengths: Iterable[int]) -> float:
        """Floating point operations of a forward pass through `layers` layers.

        lengths: tokens of each sample. Two per weight of a matrix and token, and what causal
        attention needs (arXiv:2204.02311, appendix B, without the half above the diagonal).
        """
        heads = self.num_attention_heads * self.head_dim
        per_token = self.hidden_size * (
            2 * heads + 2 * self.num_key_value_heads * self.head_dim + 3 * self.intermediate_size
        )
        return layers * self.flops_of(per_token, True, lengths)

    def flops_of(self, weights: int, attends: bool, lengths: Iterable[int]) -> float:
        """As `flops`, of one layer that uses so many weights of its matrices."""
        heads = self.num_attention_heads * self.head_dim
        return float(sum(2 * n * (weights + attends * heads * n) for n in lengths))

    @classmethod
    def from_file(cls, path: str | Path) -> "QwenConfig":
        """Reads a config.json. Raises InputError as `from_hf` does, and for a file without JSON."""
        try:
            raw = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(raw, dict):
            raise InputError(f"{path}: expected a JSON object, found {type(raw).__name__}")
        return cls.from_hf(raw, source=str(path))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str = "config.json") -> "QwenConfig":
        """From the contents of a config.json, in the layout of transformers 4 or 5.

        Raises InputError, naming field and value, for what this model would compute wrongly:
        another model_type or activation, sliding-window layers, scaled or partial rotary embedding.
        """
        _refuse_other_architectures(raw, source)
        rope = {**raw, **_rope_parameters(raw, source)}
        heads = _positive_int(raw, "num_attention_heads", source)
        hidden = _positive_int(raw, "hidden_size", source)
        config = cls(
            vocab_size=_positive_int(raw, "vocab_size", source),
            hidden_size=hidden,
            intermediate_size=_positive_int(raw, "intermediate_size", source),
            num_hidden_layers=_positive_int(raw, "num_hidden_layers", source),
            num_attention_heads=heads,
            num_key_value_heads=_positive_int(raw, "num_key_value_heads", source, heads),
            head_dim=_positive_int(raw, "head_dim", source, hidden // heads),
            rope_theta=_positive_float(rope, "rope_theta", source, 10_000.0),
            rms_norm_eps=_positive_float(raw, "rms_norm_eps", source, 1e-6),
            max_position_embeddings=_positive_int(raw, "max_position_embeddings", source, 32_768),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        )
        if config.num_attention_heads % config.num_key_value_heads:
            raise InputError(
                f"{source}: num_attention_heads {config.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {config.num_key_value_heads}"
            )
        if config.head_dim % 2:
            raise InputError(f"{source}: head_dim {config.head_dim} is odd; rotary needs it even")
        return config


def _positive_int(raw: Mapping[str, Any], field: str, source: str, default: int = 0) -> int:
    value = raw.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        found = repr(value) if field in raw else "nothing"
        raise InputError(f"{source}: {field} must be a positive integer, found {found}")
    return value


def _positive_float(raw: Mapping[str, Any], field: str, source: str, default: float) -> float:
    value = raw.get(field, default)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise InputError(f"{source}: {field} must be a positive number, found {value!r}")
    return float(value)


def _rope_parameters(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """transformers 5 writes `rope_parameters`, transformers 4 `rope_scaling` beside rope_theta."""
    merged: dict[str, Any] = {}
    for field in ("rope_scaling", "rope_parameters"):
        value = raw.get(field) or {}
        if not isinstance(value, Mapping) or any(isinstance(v, Mapping) for v in value.values()):
            raise InputError(f"{source}: {field} {value!r} is not supported, only one flat set is")
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default":
            raise InputError(f"{source}: rope_type {kind!r} is not supported, only 'default' is")
        merged |= value
    return merged


def _refuse_other_architectures(raw: Mapping[str, Any], source: str) -> None:
    rope = _rope_parameters(raw, source)
    expected = {
        "model_type": (raw.get("model_type"), "qwen2"),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "quantization_config": (raw.get("quantization_config"), None),
        "partial_rotary_factor": (
            rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)),
            1.0,
        ),
    }
    for field, (found, wanted) in expected.items():
        if found != wanted:
            raise InputError(f"{source}: {field} {found!r} is not supported, only {wanted!r} is")
    sliding = _sliding_layers(raw, source)
    if sliding:
        raise InputError(
            f"{source}: sliding-window attention is not supported, and layer {sliding[0]} uses it "
            f"(use_sliding_window, layer_types, max_window_layers)"
        )


def _sliding_layers(raw: Mapping[str, Any], source: str) -> list[int]:
    kinds = raw.get("layer_types")
    if isinstance(kinds, list):
        return [k for k, kind in enumerate(kinds) if kind != "full_attention"]
    if not raw.get("use_sliding_window") or raw.get("sliding_window") is None:
        return []
    depth = _positive_int(raw, "num_hidden_layers", source)
    first = _positive_int(raw, "max_window_layers", source, 28)
    return list(range(first, depth))
