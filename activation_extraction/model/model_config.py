"""Declares ModelConfig, the checked contents of a config.json, and reads it for all families.

Each family has a function here that reads its configuration, after family.py has completed it with
transformers' defaults. These functions reject settings with which this tool would compute wrong
activations. The sizes of axes and the number of operations follow from the configuration.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from activation_extraction.common.errors import InputError
from activation_extraction.model.float8 import DEQUANTIZED, scale_names
from activation_extraction.model.rope import TRAINED, Rope, positive_field

# Sizes of models are hundreds of times smaller. Absurd sizes are rejected, because computing with
# them could take all memory.
LARGEST_SIZE = 2**27
LARGEST_DEPTH = 10_000
# The words of a layer's type (see `layer_types`). The first three, from config.json, name the
# attention or delta net; the others name the MLP.
ATTENTION, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
DENSE, SPARSE = "dense", "sparse"
HEAD = "lm_head.weight"  # the tensor that computes logits

# Fields that must be positive integers. The dictionaries map the name here to the name in
# config.json.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
EXPERT_SIZES = dict(
    count="num_experts", per_token="num_experts_per_tok", width="moe_intermediate_size"
)
SHARED_WIDTH = "shared_expert_intermediate_size"
DELTA_SIZES = {
    "key_heads": "linear_num_key_heads",
    "values_per_key": "linear_num_value_heads",
    "key_size": "linear_key_head_dim",
    "value_size": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a layer.

    Attributes:
        count: Number of experts.
        per_token: Number of experts that each token uses.
        width: Width of an expert.
        shared_width: Width of the expert that all tokens use; 0 if there is none.
        renormalise: Whether the weights of a token's experts are scaled to a sum of 1.
    """

    count: int
    per_token: int
    width: int
    shared_width: int
    renormalise: bool


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """The gated delta net that replaces attention in some layers.

    Attributes:
        layers: Layers with a delta net in place of attention.
        key_heads: Number of key heads, and also of query heads.
        values_per_key: Number of value heads that share a key head.
        key_size: Size of a key head.
        value_size: Size of a value head.
        taps: Length of the convolution in tokens.
        interleaved: Whether the checkpoint has two projections, whose rows are ordered by key head,
            as in Qwen3-Next. Otherwise it has four projections, as in Qwen3.5.
    """

    layers: tuple[int, ...]
    key_heads: int
    values_per_key: int
    key_size: int
    value_size: int
    taps: int
    interleaved: bool = False


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape and constants of a model.

    Attributes:
        model_type: Field of config.json.
        vocab_size: Field of config.json.
        hidden_size: Field of config.json.
        intermediate_size: Field of config.json; 0 in a family without MLPs.
        num_hidden_layers: Field of config.json.
        num_attention_heads: Field of config.json.
        num_key_value_heads: Field of config.json.
        head_dim: Field of config.json.
        rope: Rotary embedding.
        rms_norm_eps: Field of config.json.
        max_position_embeddings: Field of config.json.
        tie_word_embeddings: Whether the head of the model is its embedding.
        sliding_window: Number of tokens that a token sees in `sliding_layers`, including itself.
            None if there are no such layers.
        sliding_layers: Layers whose attention has a window.
        qkv_bias: Whether the projections to queries, keys and values have biases.
        o_bias: Whether the projection of attention's output has a bias.
        qk_norm: Whether the queries and keys of each head are normed.
        q_gate: Whether q_proj also computes a gate for the output of each head.
        norm_offset: Number that is added to the weights of norms.
        experts: Experts of `sparse_layers`. None if there are no such layers.
        sparse_layers: Layers that have experts in place of an MLP.
        delta: Delta net of the layers without attention. None if all layers have attention.
        chunk: Longest row in tokens that does not need dual-chunk attention, which is not
            supported. None if the model has no dual-chunk attention.
        weights: DEQUANTIZED if the checkpoint has float8 weights, otherwise None.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: Rope
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    sliding_window: int | None
    sliding_layers: tuple[int, ...]
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    q_gate: bool = False
    norm_offset: float = 0.0
    experts: ExpertsConfig | None = None
    sparse_layers: tuple[int, ...] = ()
    delta: DeltaNet | None = None
    chunk: int | None = None
    weights: str | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis of weights and hooks, by its letter (see qwen2_jax.py)."""
        sizes = {"D": self.hidden_size, "H": self.head_dim, "V": self.vocab_size}
        sizes |= {"N": self.num_attention_heads, "K": self.num_key_value_heads}
        sizes["Q"] = self.num_attention_heads * (1 + self.q_gate)
        if len(self.sparse_layers) < self.num_hidden_layers:
            sizes["F"] = self.intermediate_size
        experts = self.experts
        if experts is not None:
            sizes |= {"E": experts.count, "R": experts.count}
            sizes |= {"X": experts.per_token, "M": experts.width}
            if experts.shared_width:
                sizes |= {"P": experts.shared_width, "U": 1}
        delta = self.delta
        if delta is not None:
            value_heads = delta.key_heads * delta.values_per_key
            sizes |= {"J": delta.key_heads, "G": delta.values_per_key}
            sizes |= {"C": delta.key_size, "Z": delta.value_size}
            sizes |= {"O": value_heads * delta.value_size, "I": 1, "W": delta.taps}
        return sizes

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The type of each layer.

        A type consists of words such as "linear_attention sparse": one for the attention if the
        model has a delta net, and one for the MLP if it has experts. In a model without either, it
        is "dense".
        """
        types: list[list[str]] = [[] for _ in range(self.num_hidden_layers)]
        for layer, words in enumerate(types):
            if self.delta is not None:
                words.append(LINEAR if layer in self.delta.layers else ATTENTION)
            if self.experts is not None:
                words.append(SPARSE if layer in self.sparse_layers else DENSE)
        return tuple(" ".join(words) or DENSE for words in types)

    def sizes_with(self, length: int) -> dict[str, int]:
        """Returns `sizes` including S, the number of tokens of a row.

        Args:
            length: The number of tokens of a row, which is the width of some hooks.
        """
        return self.sizes | {"S": length}

    @property
    def longest_row(self) -> tuple[int, str]:
        """The largest number of tokens of a row, and the reason for this limit in words."""
        most = max(self.max_position_embeddings, self.rope.extended_length)
        if self.chunk is not None and self.chunk < most:
            why = "longer rows need dual-chunk attention (dual_chunk_attention_config), which is"
            return self.chunk, f"the limit is {self.chunk}: {why} not supported"
        why = f"the model has {most} positions"
        if self.rope.rope_type == "dynamic":
            why += ", and beyond them its rope_type 'dynamic' depends on the other rows of a batch"
        return most, why

    def sliding(self, layers: range) -> np.ndarray | None:
        """Returns whether each layer has a window, bool (layers,).

        Args:
            layers: The numbers of the layers.

        Returns:
            The mask; None if no layer of the model has a window.
        """
        return np.isin(layers, self.sliding_layers) if self.sliding_layers else None

    def flops_of(self, layer: int, weights: int, lengths: Iterable[int]) -> float:
        """Returns the number of floating-point operations of a layer.

        A token takes two operations for each weight of a matrix, and operations for causal
        attention (arXiv:2204.02311, appendix B, but without the half above the diagonal).

        Args:
            layer: The number of the layer.
            weights: The number of weights with which a token is multiplied in this layer.
            lengths: The lengths of the samples in tokens.
        """
        if self.delta is not None and layer in self.delta.layers:
            # The state of each head is a factor of three products.
            products = 3 * self.sizes["O"] * self.delta.key_size
            return 2.0 * (weights + products) * sum(lengths)
        heads = self.num_attention_heads * self.head_dim
        window = self.sliding_window if layer in self.sliding_layers else None

        def seen(length: int) -> int:
            """Returns about twice the number of pairs (token, token that it sees) in a sample."""
            most = length if window is None else min(window, length)
            return most * (2 * length - most)

        return float(sum(2 * (weights * length + heads * seen(length)) for length in lengths))


# The functions below read the configurations of the families. Their arguments are `hf`, a
# configuration that transformers has completed, and `source`, the path of config.json for messages.
# They raise InputError for a model with settings that are not supported.


def qwen2_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of Qwen2, Qwen2.5 or QwQ."""
    return _config(hf, source, qkv_bias=True, o_bias=False, qk_norm=False)


def llama_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of a Llama model.

    Either all four projections of attention have biases, or none has.
    """
    if hf.mlp_bias:
        raise InputError(f"{source}: mlp_bias {hf.mlp_bias!r} is not supported, only false is")
    if hf.pretraining_tp not in (None, 1):
        raise InputError(
            f"{source}: pretraining_tp {hf.pretraining_tp!r} is not supported, only 1 is"
        )
    bias = bool(hf.attention_bias)
    return _config(hf, source, qkv_bias=bias, o_bias=bias, qk_norm=False)


def qwen3_config(hf: Any, source: str, **details: Any) -> ModelConfig:
    """Reads the configuration of a dense Qwen3 model, or of a family that extends it.

    Args:
        hf: The configuration, which transformers has completed.
        source: The path of config.json, for messages.
        details: Further fields of the ModelConfig.
    """
    bias = bool(hf.attention_bias)
    return _config(hf, source, qkv_bias=bias, o_bias=bias, qk_norm=True, **details)


def qwen2_moe_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of Qwen1.5-MoE or Qwen2 57B-A14B."""
    details = _experts(hf, source)
    return _config(hf, source, qkv_bias=bool(hf.qkv_bias), o_bias=False, qk_norm=False, **details)


def qwen3_moe_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of Qwen3 with experts."""
    return qwen3_config(hf, source, **_experts(hf, source))


def qwen3_next_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of Qwen3-Next.

    Unlike Qwen3.5 with experts, its delta nets have two projections, and some layers may be dense.
    """
    return qwen3_5_text_config(hf, source, interleaved=True, **_experts(hf, source))


def qwen3_5_text_config(
    hf: Any, source: str, interleaved: bool = False, **details: Any
) -> ModelConfig:
    """Reads the configuration of the language model of Qwen3.5, or of a family that extends it.

    Args:
        hf: The configuration, which transformers has completed.
        source: The path of config.json, for messages.
        interleaved: See `DeltaNet`.
        details: Further fields of the ModelConfig.
    """
    if not getattr(hf, "attn_output_gate", True):
        raise InputError(f"{source}: attn_output_gate False is not supported, only True is")
    delta_net = _delta_net(hf, source, interleaved)
    return qwen3_config(hf, source, q_gate=True, norm_offset=1.0, delta=delta_net, **details)


def qwen3_5_moe_text_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of the language model of Qwen3.5 with experts in all layers."""
    return qwen3_5_text_config(
        hf,
        source,
        intermediate_size=0,
        experts=_experts_config(hf, source, renormalise=True),
        sparse_layers=tuple(range(hf.num_hidden_layers)),
    )


def multimodal_config(read: Callable[[Any, str], ModelConfig], hf: Any, source: str) -> ModelConfig:
    """Reads the language model of a model that also takes images, video or audio.

    The language model of an Omni model is in its thinker. `tie_word_embeddings` is read from the
    outer configuration, which contains `text_config`: in `text_config` itself, the field may be
    missing in config.json, and have transformers' default.

    Args:
        read: The function that reads the configuration of a text-only model.
        hf: The configuration of the whole model, which transformers has completed.
        source: The path of config.json, for messages.
    """
    outer = getattr(hf, "thinker_config", hf)
    return dataclasses.replace(
        read(outer.text_config, source),
        model_type=hf.model_type,
        tie_word_embeddings=bool(outer.tie_word_embeddings),
    )


def as_stored(config: ModelConfig, tensors: Collection[str]) -> ModelConfig:
    """Adapts a configuration to the tensors of a checkpoint, as transformers does.

    A stored head is used even if config.json ties it to the embedding. Weights with scales are
    float8 even if config.json does not say so.

    Args:
        config: The configuration in config.json.
        tensors: The names of the tensors in the checkpoint.

    Returns:
        The adapted configuration.
    """
    tied = config.tie_word_embeddings and HEAD not in tensors
    weights = DEQUANTIZED if any(scale_names(name, tensors) for name in tensors) else None
    return dataclasses.replace(config, tie_word_embeddings=tied, weights=weights)


def _config(hf: Any, source: str, **details: Any) -> ModelConfig:
    """Reads the fields that all families share.

    Args:
        hf: The configuration, which transformers has completed.
        source: The path of config.json, for messages.
        details: Further fields of the ModelConfig, some of which replace fields of config.json.
    """
    if not getattr(hf, "is_causal", True):
        raise InputError(
            f"{source}: is_causal {hf.is_causal!r} is not supported: tokens would see later ones"
        )
    if hf.hidden_act != "silu":
        raise InputError(f"{source}: hidden_act {hf.hidden_act!r} is not supported, only 'silu' is")
    hybrid = "delta" in details
    numbers = _positive_ints(hf, source, {name: name for name in SIZES if name not in details})
    head_dim = getattr(hf, "head_dim", None)
    if head_dim is None:
        head_dim = numbers["hidden_size"] // numbers["num_attention_heads"]
    window, sliding = _sliding(hf, (ATTENTION, LINEAR if hybrid else SLIDING), source)
    config = ModelConfig(
        model_type=hf.model_type,
        head_dim=head_dim,
        rope=Rope.from_hf(_rope_parameters(hf, source), head_dim, source, partial=hybrid),
        rms_norm_eps=positive_field(vars(hf), "rms_norm_eps", source),
        tie_word_embeddings=bool(getattr(hf, "tie_word_embeddings", False)),
        sliding_window=window,
        sliding_layers=sliding,
        chunk=_chunk(hf, source),
        **numbers,
        **details,
    )
    if config.num_attention_heads % config.num_key_value_heads:
        raise InputError(
            f"{source}: num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    if type(head_dim) is not int or head_dim < 2 or head_dim % 2:
        raise InputError(f"{source}: head_dim {head_dim!r} is not a positive even number")
    return config


def _positive_ints(hf: Any, source: str, fields: Mapping[str, str]) -> dict[str, Any]:
    """Reads fields that must be positive integers.

    Args:
        hf: The configuration, which transformers has completed.
        source: The path of config.json, for messages.
        fields: Name in the returned dict -> name in config.json.

    Returns:
        The integers by the names in `fields`.
    """
    numbers = {}
    for name, field in fields.items():
        number = getattr(hf, field)
        if type(number) is not int or number < 1:
            raise InputError(f"{source}: {field} must be a positive integer, found {number!r}")
        if number > LARGEST_SIZE:
            raise InputError(
                f"{source}: {field} is {number:.6g}, expected at most {LARGEST_SIZE:,}"
            )
        numbers[name] = number
    return numbers


def _rope_parameters(hf: Any, source: str) -> Mapping[str, Any]:
    """Returns the settings of the rotary embedding, which are the same for all layers.

    An original length outside of these settings overrides the one inside, as in transformers. If
    YaRN's factor is null, it is max_position_embeddings divided by the original length.
    """
    hf.standardize_rope_params()
    rope = hf.rope_parameters
    if not isinstance(rope, Mapping) or any(isinstance(field, Mapping) for field in rope.values()):
        raise InputError(f"{source}: rope_parameters {rope!r} is not supported, only one flat set")
    if rope.get("rope_type") == "yarn" and rope.get("factor", 0) is None:
        trained = positive_field(rope, TRAINED, source)
        return {**rope, "factor": hf.max_position_embeddings / trained}
    return rope


def _chunk(hf: Any, source: str) -> int | None:
    """Returns the longest row in which dual-chunk attention (arXiv:2402.17463) is plain attention.

    The default of chunk_size is the one of vLLM and SGLang, which also scale the queries of rows
    beyond the original length. transformers ignores all of dual_chunk_attention_config, including
    the settings of sparse attention.

    Returns:
        The number of tokens; None if the model has no dual-chunk attention.
    """
    dual = getattr(hf, "dual_chunk_attention_config", None)
    if dual is None:
        return None
    if not isinstance(dual, Mapping):
        raise InputError(f"{source}: dual_chunk_attention_config {dual!r} is not a set of fields")
    chunk = positive_field({"chunk_size": 8192, **dual}, "chunk_size", source)
    return int(min(chunk, positive_field(dual, TRAINED, source) if dual.get(TRAINED) else chunk))


def _sliding(
    hf: Any, supported: tuple[str, ...], source: str
) -> tuple[int | None, tuple[int, ...]]:
    """Reads the sliding window.

    Args:
        hf: The configuration, which transformers has completed.
        supported: The types of layers that the family may have.
        source: The path of config.json, for messages.

    Returns:
        The window in tokens; None if no layer has one.
        The layers with a window.
    """
    types = hf.layer_types if hasattr(type(hf), "layer_types") else None
    if types is None:  # either all layers have the window, or no layer has it
        # In families without use_sliding_window, transformers ignores the window.
        slides = hasattr(type(hf), "use_sliding_window") and hf.sliding_window
        types = [SLIDING if slides else ATTENTION] * hf.num_hidden_layers
    for layer, kind in enumerate(types):
        if kind not in supported:
            raise InputError(
                f"{source}: layer_types: layer {layer} is {kind!r}, and only "
                f"{' and '.join(supported)} are supported"
            )
    sliding = tuple(layer for layer, kind in enumerate(types) if kind == SLIDING)
    if not sliding:
        return None, ()
    if hf.sliding_window is None:
        raise InputError(
            f"{source}: layer_types: layer {sliding[0]} slides, but there is no window "
            "(use_sliding_window, sliding_window)"
        )
    return _positive_ints(hf, source, {"window": "sliding_window"})["window"], sliding


def _experts(hf: Any, source: str) -> dict[str, Any]:
    """Reads the fields `experts` and `sparse_layers` of a model with experts in some layers."""
    step = _positive_ints(hf, source, {"step": "decoder_sparse_step"})["step"]
    candidates = range(step - 1, hf.num_hidden_layers, step)
    layers = tuple(layer for layer in candidates if layer not in hf.mlp_only_layers)
    if not layers:
        raise InputError(
            f"{source}: no layer has experts (decoder_sparse_step {step}, mlp_only_layers "
            f"{hf.mlp_only_layers}); such a model is not supported"
        )
    # Families whose configuration lacks the field always renormalise.
    renormalise = not hasattr(type(hf), "norm_topk_prob") or bool(hf.norm_topk_prob)
    experts = _experts_config(hf, source, renormalise)
    return {"experts": experts, "sparse_layers": layers}


def _experts_config(hf: Any, source: str, renormalise: bool) -> ExpertsConfig:
    numbers = {"shared_width": 0} | _positive_ints(hf, source, EXPERT_SIZES)
    if hasattr(type(hf), SHARED_WIDTH):  # other families ignore the field, as transformers does
        numbers |= _positive_ints(hf, source, {"shared_width": SHARED_WIDTH})
    if numbers["per_token"] > numbers["count"]:
        raise InputError(
            f"{source}: num_experts_per_tok {numbers['per_token']} is more than num_experts "
            f"{numbers['count']}"
        )
    return ExpertsConfig(**numbers, renormalise=renormalise)


def _delta_net(hf: Any, source: str, interleaved: bool) -> DeltaNet:
    numbers = _positive_ints(hf, source, DELTA_SIZES)
    key_heads = numbers["key_heads"]
    value_heads = numbers["values_per_key"]  # of all key heads together; divided below
    if value_heads % key_heads:
        raise InputError(
            f"{source}: linear_num_value_heads {value_heads} is not a multiple of "
            f"linear_num_key_heads {key_heads}"
        )
    gate = getattr(hf, "output_gate_type", None)
    if gate not in (None, "swish", "silu"):
        raise InputError(f"{source}: output_gate_type {gate!r} is not supported, 'swish' is")
    linear = tuple(layer for layer, kind in enumerate(hf.layer_types) if kind == LINEAR)
    numbers["values_per_key"] = value_heads // key_heads
    return DeltaNet(linear, **numbers, interleaved=interleaved)
