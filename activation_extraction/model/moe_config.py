"""MoeConfig: what a config.json says of a model in which some layers have experts, checked."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from activation_extraction.common.errors import InputError
from activation_extraction.model.qwen_config import QwenConfig, positive_int

DENSE, SPARSE = "dense", "sparse"  # what a layer's MLP is


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """How many experts a layer has and how wide they are.

    per_token: how many a token goes through; shared_width: of the expert that every token goes
    through, 0 without one; renormalise: whether a token's weights are made to sum to 1.
    """

    count: int
    per_token: int
    width: int
    shared_width: int
    renormalise: bool

    @property
    def sizes(self) -> dict[str, int]:
        """Letter -> size, for the axes of weights and hooks."""
        found = {"E": self.count, "R": self.count, "X": self.per_token, "M": self.width}
        return found | ({"P": self.shared_width, "U": 1} if self.shared_width else {})

    def weights(self, hidden: int) -> int:
        """Of the matrices that one token is multiplied with."""
        shared = 3 * self.shared_width + 1 if self.shared_width else 0
        return hidden * (self.count + 3 * self.per_token * self.width + shared)

    @classmethod
    def from_hf(cls, hf: Any, source: str, renormalise: bool) -> "ExpertsConfig":
        """Raises InputError, naming field and value, for what cannot be."""
        numbers = {name: positive_int(hf, field, source) for name, field in FIELDS.items()}
        if numbers["per_token"] > numbers["count"]:
            raise InputError(
                f"{source}: num_experts_per_tok {numbers['per_token']} is more than num_experts "
                f"{numbers['count']}"
            )
        shared = 0
        if hasattr(hf, "shared_expert_intermediate_size"):
            shared = positive_int(hf, "shared_expert_intermediate_size", source)
        return cls(**numbers, shared_width=shared, renormalise=renormalise)


FIELDS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "width": "moe_intermediate_size",
}


@dataclasses.dataclass(frozen=True)
class MoeConfig(QwenConfig):
    """As QwenConfig; the layers in sparse_layers have experts, the others an MLP."""

    experts: ExpertsConfig
    sparse_layers: tuple[int, ...]

    @property
    def sizes(self) -> dict[str, int]:
        sizes = super().sizes | self.experts.sizes
        if len(self.sparse_layers) == self.num_hidden_layers:
            del sizes["F"]
        return sizes

    def layer_words(self, layer: int) -> tuple[str, ...]:
        return *super().layer_words(layer), SPARSE if layer in self.sparse_layers else DENSE

    def mlp_weights(self, layer: int) -> int:
        if layer in self.sparse_layers:
            return self.experts.weights(self.hidden_size)
        return super().mlp_weights(layer)

    def used(self, path: Sequence[str]) -> float:
        return self.experts.per_token / self.experts.count if "experts" in path else 1.0


def sparse_layers(hf: Any, source: str) -> tuple[int, ...]:
    """The layers that have experts. Raises InputError when there is none."""
    step, depth = positive_int(hf, "decoder_sparse_step", source), hf.num_hidden_layers
    every = range(step - 1, depth, step)
    found = tuple(layer for layer in every if layer not in hf.mlp_only_layers)
    if not found:
        raise InputError(
            f"{source}: no layer has experts (decoder_sparse_step {step}, mlp_only_layers "
            f"{hf.mlp_only_layers}); such a model is not supported"
        )
    return found


def qwen2_moe_config(hf: Any, source: str) -> MoeConfig:
    """From a configuration that `complete` returned. Raises InputError."""
    bias, details = bool(hf.qkv_bias), _experts(hf, source)
    return MoeConfig.from_hf(hf, source, qkv_bias=bias, o_bias=False, qk_norm=False, **details)


def qwen3_moe_config(hf: Any, source: str) -> MoeConfig:
    """From a configuration that `complete` returned. Raises InputError."""
    bias, details = bool(hf.attention_bias), _experts(hf, source)
    return MoeConfig.from_hf(hf, source, qkv_bias=bias, o_bias=bias, qk_norm=True, **details)


def _experts(hf: Any, source: str) -> dict[str, Any]:
    """What a MoeConfig has besides a QwenConfig."""
    experts = ExpertsConfig.from_hf(hf, source, renormalise=bool(hf.norm_topk_prob))
    return {"experts": experts, "sparse_layers": sparse_layers(hf, source)}
