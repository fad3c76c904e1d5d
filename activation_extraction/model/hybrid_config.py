"""HybridConfig: what a config.json says of a model with attention and gated delta nets, checked.

Qwen3.5's models are such, and some have experts in every layer; the language model is a part of
their config.json, which this module reads alone.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from activation_extraction.common.errors import InputError
from activation_extraction.model.moe_config import ExpertsConfig, MoeConfig
from activation_extraction.model.qwen_config import QwenConfig, positive_int, refuse_quantized

ATTENTION, LINEAR = "full_attention", "linear_attention"  # what a layer has before its MLP


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """The layers that have a gated delta net in place of attention, and the sizes of it.

    values_per_key: value heads that share a key head; taps: of the convolution, in tokens.
    """

    layers: tuple[int, ...]
    key_heads: int
    values_per_key: int
    key_size: int
    value_size: int
    taps: int

    @property
    def sizes(self) -> dict[str, int]:
        """Letter -> size; I is the one input channel of the convolution's outputs."""
        values = {"G": self.values_per_key, "Z": self.value_size}
        every = self.key_heads * self.values_per_key * self.value_size
        found = {"J": self.key_heads, "C": self.key_size, **values, "O": every}
        return found | {"I": 1, "W": self.taps}

    @property
    def products(self) -> int:
        """Multiplications per token of the recurrence: three by the state of each value head."""
        return 3 * self.key_heads * self.values_per_key * self.key_size * self.value_size

    def weights(self, hidden_size: int) -> int:
        """In the matrices of a layer, those of the convolution among them."""
        rates = self.key_heads * self.values_per_key
        keys, values = self.key_heads * self.key_size, rates * self.value_size
        channels = 2 * keys + values
        return hidden_size * (channels + 2 * values + 2 * rates) + channels * self.taps

    @classmethod
    def from_hf(cls, hf: Any, source: str) -> "DeltaNet":
        """From a configuration that `complete` returned. Raises InputError."""
        names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
        keys, values, key_size, value_size, taps = (
            positive_int(hf, f"linear_{name}", source) for name in (*names, "conv_kernel_dim")
        )
        if values % keys:
            raise InputError(
                f"{source}: linear_num_value_heads {values} is not a multiple of "
                f"linear_num_key_heads {keys}"
            )
        gate = getattr(hf, "output_gate_type", None)
        if gate not in (None, "swish", "silu"):
            raise InputError(f"{source}: output_gate_type {gate!r} is not supported, 'swish' is")
        linear = tuple(k for k, kind in enumerate(hf.layer_types) if kind == LINEAR)
        return cls(linear, keys, values // keys, key_size, value_size, taps)


@dataclasses.dataclass(frozen=True)
class HybridConfig(QwenConfig):
    """As QwenConfig; delta says which layers have a gated delta net and no attention."""

    delta: DeltaNet
    TYPES: ClassVar = (ATTENTION, LINEAR)
    PARTIAL: ClassVar = True

    @property
    def sizes(self) -> dict[str, int]:
        return super().sizes | self.delta.sizes

    def layer_words(self, layer: int) -> tuple[str, ...]:
        return self.TYPES[layer in self.delta.layers], *super().layer_words(layer)

    def mixer_weights(self, layer: int) -> int:
        if layer in self.delta.layers:
            return self.delta.weights(self.hidden_size)
        return super().mixer_weights(layer)

    def flops_of(self, layer: int, weights: int, attends: bool, lengths: Iterable[int]) -> float:
        if layer in self.delta.layers:
            return 2.0 * (weights + attends * self.delta.products) * sum(lengths)
        return super().flops_of(layer, weights, attends, lengths)


@dataclasses.dataclass(frozen=True)
class HybridMoeConfig(HybridConfig, MoeConfig):
    """Attention or a gated delta net in each layer, as in a HybridConfig, and then experts."""


def qwen3_5_text_config(hf: Any, source: str) -> HybridConfig:
    """Of a language model alone. Raises InputError."""
    return HybridConfig.from_hf(hf, source, **_hybrid(hf, source))


def qwen3_5_moe_text_config(hf: Any, source: str) -> HybridMoeConfig:
    """Of a language model alone, whose layers all have experts. Raises InputError."""
    return HybridMoeConfig.from_hf(
        hf,
        source,
        intermediate_size=0,
        experts=ExpertsConfig.from_hf(hf, source, renormalise=True),
        sparse_layers=tuple(range(hf.num_hidden_layers)),
        **_hybrid(hf, source),
    )


def _hybrid(hf: Any, source: str) -> dict[str, Any]:
    """What both of them have of their own."""
    if not getattr(hf, "attn_output_gate", True):
        raise InputError(f"{source}: attn_output_gate False is not supported, only True is")
    bias = bool(hf.attention_bias)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "q_gate": True,
        "norm_offset": 1.0,
        "delta": DeltaNet.from_hf(hf, source),
    }


def config_beside_vision(
    text_config: Callable[[Any, str], HybridConfig], hf: Any, source: str
) -> HybridConfig:
    """Of the language model in a model with vision inputs. Raises InputError.

    text_config: reads the configuration of such a language model alone.
    """
    refuse_quantized(hf, source)
    return dataclasses.replace(
        text_config(hf.text_config, source),
        model_type=hf.model_type,
        prefix="model.language_model.",
        tie_word_embeddings=bool(hf.tie_word_embeddings),
    )
