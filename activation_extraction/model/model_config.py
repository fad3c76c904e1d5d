"""A ModelConfig holds the checked contents of a model's config.json, for models of all families.

Every family has a function here that reads its configuration, after transformers has completed it
with defaults (family.py). These functions reject by name what this tool would compute wrongly.
Sizes of axes and counts of operations follow from the configuration.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from activation_extraction.common.errors import InputError
from activation_extraction.model.float8 import DEQUANTIZED, scale_names
from activation_extraction.model.rope import TRAINED, Rope, positive_field

# Models are hundreds of times smaller; an absurd one is refused before it is computed with.
LARGEST_SIZE = 2**27
LARGEST_DEPTH = 10_000
# The words of a layer's type. The first three, from config.json, name the attention or delta net;
# the others name the MLP.
ATTENTION, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
DENSE, SPARSE = "dense", "sparse"
HEAD = "lm_head.weight"  # the tensor that makes logits

# These fields must be positive integers. In the dictionaries: name here -> name in config.json.
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
        count: The number of experts.
        per_token: The number of experts that a token goes through.
        width: The width of an expert.
        shared_width: The width of the expert that every token goes through; 0 if there is none.
        renormalise: Whether the weights of a token's experts are made to sum to 1.
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
        layers: The layers that have it.
        key_heads: The number of key heads, which is also that of query heads.
        values_per_key: The number of value heads that share a key head.
        key_size: The size of a key head.
        value_size: The size of a value head.
        taps: The length of the convolution in tokens.
        interleaved: Whether the checkpoint has two projections, whose rows are ordered by key head,
            as Qwen3-Next has, rather than the four of Qwen3.5.
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
    """The shape and constants of a model. Fields that are not listed are those of config.json.

    Attributes:
        rope: The rotary embedding.
        sliding_window: The number of tokens that a token sees in `sliding_layers`, itself included.
            None if there are no such layers.
        sliding_layers: The layers whose attention has a window.
        qkv_bias: Whether the projections to queries, keys and values have biases.
        o_bias: Whether the projection of attention's output has a bias.
        qk_norm: Whether the queries and keys of each head are normed.
        q_gate: Whether q_proj also gives a gate for the output of each head.
        norm_offset: The number that is added to the weights of norms.
        experts: The experts of `sparse_layers`. None if there are no such layers.
        sparse_layers: The layers that have experts in place of an MLP.
        delta: The delta net of the layers without attention. None if all layers have attention.
        chunk: The longest row in tokens that does not need dual-chunk attention, which is not
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
        """Returns the size of each axis of weights and hooks, by its letter (see qwen2_jax.py)."""
        sizes = {"D": self.hidden_size, "H": self.head_dim, "V": self.vocab_size}
        sizes |= {"N": self.num_attention_heads, "K": self.num_key_value_heads}
        sizes["Q"] = self.num_attention_heads * (1 + self.q_gate)
        if len(self.sparse_layers) < self.num_hidden_layers:
            sizes["F"] = self.intermediate_size
        if (x := self.experts) is not None:
            sizes |= {"E": x.count, "R": x.count, "X": x.per_token, "M": x.width}
            sizes |= {"P": x.shared_width, "U": 1} if x.shared_width else {}
        if (d := self.delta) is not None:
            sizes |= {"J": d.key_heads, "G": d.values_per_key, "C": d.key_size, "Z": d.value_size}
            sizes |= {"O": d.key_heads * d.values_per_key * d.value_size, "I": 1, "W": d.taps}
        return sizes

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Returns the type of each layer.

        A type consists of the words in which layers of this model may differ, such as
        "linear_attention sparse". It is "dense" if all layers are alike.
        """
        types: list[list[str]] = [[] for _ in range(self.num_hidden_layers)]
        for layer, words in enumerate(types):
            if self.delta is not None:
                words.append(LINEAR if layer in self.delta.layers else ATTENTION)
            if self.experts is not None:
                words.append(SPARSE if layer in self.sparse_layers else DENSE)
        return tuple(" ".join(words) or DENSE for words in types)

    def sizes_with(self, length: int) -> dict[str, int]:
        """Returns `sizes` with S, the tokens of a row, which is a width of some hooks."""
        return self.sizes | {"S": length}

    @property
    def longest_row(self) -> tuple[int, str]:
        """Returns the largest number of tokens of a row, and the reason for this limit."""
        most = max(self.max_position_embeddings, self.rope.extended_length)
        if self.chunk is not None and self.chunk < most:
            why = "longer rows need dual-chunk attention (dual_chunk_attention_config), which is"
            return self.chunk, f"the limit is {self.chunk}: {why} not supported"
        why = f"the model has {most} positions"
        if self.rope.rope_type == "dynamic":
            why += ", and beyond them its rope_type 'dynamic' depends on the other rows of a batch"
        return most, why

    def sliding(self, layers: range) -> np.ndarray | None:
        """Returns whether each of these layers has a window, bool (layers,).

        It is None if no layer of the model has a window.
        """
        return np.isin(layers, self.sliding_layers) if self.sliding_layers else None

    def flops_of(self, layer: int, weights: int, lengths: Iterable[int]) -> float:
        """Returns the number of floating-point operations of a layer.

        A token takes two operations for each weight of a matrix, and those of causal attention
        (arXiv:2204.02311, appendix B, without the half above the diagonal).

        Args:
            layer: The number of the layer.
            weights: The number of weights that a token is multiplied by in this layer.
            lengths: The lengths of the samples in tokens.
        """
        if self.delta is not None and layer in self.delta.layers:
            # The state of each head takes part in three products.
            products = 3 * self.sizes["O"] * self.delta.key_size
            return 2.0 * (weights + products) * sum(lengths)
        heads = self.num_attention_heads * self.head_dim
        window = self.sliding_window if layer in self.sliding_layers else None

        def seen(n: int) -> int:
            """Returns twice the number of pairs (token, token that it sees) in n tokens."""
            most = n if window is None else min(window, n)
            return most * (2 * n - most)

        return float(sum(2 * (weights * n + heads * seen(n)) for n in lengths))


# The functions below read the configurations of the families. Their arguments are a configuration
# that transformers has completed, and the path of config.json for messages. All raise InputError
# for a model that would be computed wrongly.


def qwen2_config(hf: Any, source: str) -> ModelConfig:
    return _config(hf, source, qkv_bias=True, o_bias=False, qk_norm=False)


def llama_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of a Llama model, whose four projections all have biases or none."""
    if hf.mlp_bias:
        raise InputError(f"{source}: mlp_bias {hf.mlp_bias!r} is not supported, only false is")
    if hf.pretraining_tp not in (None, 1):
        raise InputError(
            f"{source}: pretraining_tp {hf.pretraining_tp!r} is not supported, only 1 is"
        )
    bias = bool(hf.attention_bias)
    return _config(hf, source, qkv_bias=bias, o_bias=bias, qk_norm=False)


def qwen3_config(hf: Any, source: str, **details: Any) -> ModelConfig:
    bias = bool(hf.attention_bias)
    return _config(hf, source, qkv_bias=bias, o_bias=bias, qk_norm=True, **details)


def qwen2_moe_config(hf: Any, source: str) -> ModelConfig:
    details = _experts(hf, source)
    return _config(hf, source, qkv_bias=bool(hf.qkv_bias), o_bias=False, qk_norm=False, **details)


def qwen3_moe_config(hf: Any, source: str) -> ModelConfig:
    return qwen3_config(hf, source, **_experts(hf, source))


def qwen3_next_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of Qwen3-Next.

    It differs from Qwen3.5 with experts in the projections of its delta nets, and in that some of
    its layers may be dense.
    """
    return qwen3_5_text_config(hf, source, interleaved=True, **_experts(hf, source))


def qwen3_5_text_config(
    hf: Any, source: str, interleaved: bool = False, **details: Any
) -> ModelConfig:
    if not getattr(hf, "attn_output_gate", True):
        raise InputError(f"{source}: attn_output_gate False is not supported, only True is")
    delta = _delta_net(hf, source, interleaved)
    return qwen3_config(hf, source, q_gate=True, norm_offset=1.0, delta=delta, **details)


def qwen3_5_moe_text_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of a text-only model in which every layer is a mixture of experts."""
    return qwen3_5_text_config(
        hf,
        source,
        intermediate_size=0,
        experts=_experts_config(hf, source, renormalise=True),
        sparse_layers=tuple(range(hf.num_hidden_layers)),
    )


def multimodal_config(read: Callable[[Any, str], ModelConfig], hf: Any, source: str) -> ModelConfig:
    """Reads the language model of a model that also takes images, video or audio.

    An Omni model has its language model in its thinker. Whether the head is tied stands beside
    `text_config`; inside of it, the field may hold transformers' default.

    Args:
        read: The function that reads the configuration of a model that takes text alone.
        hf: The configuration of the whole model, which transformers has completed.
        source: The path of config.json, for messages.
    """
    around = getattr(hf, "thinker_config", hf)
    return dataclasses.replace(
        read(around.text_config, source),
        model_type=hf.model_type,
        tie_word_embeddings=bool(around.tie_word_embeddings),
    )


def as_stored(config: ModelConfig, tensors: Collection[str]) -> ModelConfig:
    """Returns the configuration that fits the tensors of a checkpoint, as transformers does.

    A stored head is used even if config.json ties it to the embedding. Weights with scales are
    float8 even if config.json does not say so.

    Args:
        config: The configuration that config.json gives.
        tensors: The names of the tensors in the checkpoint.
    """
    tied = config.tie_word_embeddings and HEAD not in tensors
    weights = DEQUANTIZED if any(scale_names(name, tensors) for name in tensors) else None
    return dataclasses.replace(config, tie_word_embeddings=tied, weights=weights)


def _config(hf: Any, source: str, **details: Any) -> ModelConfig:
    """Reads the fields that all families share.

    Args:
        hf: The configuration, which transformers has completed.
        source: The path of config.json, for messages.
        details: Further fields of the ModelConfig, which replace those of config.json.
    """
    if not getattr(hf, "is_causal", True):
        raise InputError(
            f"{source}: is_causal {hf.is_causal!r} is not supported: tokens would see later ones"
        )
    if hf.hidden_act != "silu":
        raise InputError(f"{source}: hidden_act {hf.hidden_act!r} is not supported, only 'silu' is")
    hybrid = "delta" in details
    numbers = _positive_ints(hf, source, {name: name for name in SIZES if name not in details})
    usual = numbers["hidden_size"] // numbers["num_attention_heads"]
    head_dim = usual if getattr(hf, "head_dim", None) is None else hf.head_dim
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
    """Reads positive integers.

    Args:
        hf: The configuration, which transformers has completed.
        source: The path of config.json, for messages.
        fields: Name in the result -> name in config.json.
    """
    numbers = {}
    for name, field in fields.items():
        value = numbers[name] = getattr(hf, field)
        if type(value) is not int or value < 1:
            raise InputError(f"{source}: {field} must be a positive integer, found {value!r}")
        if value > LARGEST_SIZE:
            raise InputError(f"{source}: {field} is {value:.6g}, expected at most {LARGEST_SIZE:,}")
    return numbers


def _rope_parameters(hf: Any, source: str) -> Mapping[str, Any]:
    """Returns the settings of the rotary embedding, which are the same for all layers.

    transformers lets an original length beside these settings override the one among them. If
    YaRN's factor is missing, it follows from the numbers of positions.
    """
    hf.standardize_rope_params()
    rope = hf.rope_parameters
    if not isinstance(rope, Mapping) or any(isinstance(v, Mapping) for v in rope.values()):
        raise InputError(f"{source}: rope_parameters {rope!r} is not supported, only one flat set")
    if rope.get("rope_type") == "yarn" and rope.get("factor", 0) is None:
        trained = positive_field(rope, TRAINED, source)
        return {**rope, "factor": hf.max_position_embeddings / trained}
    return rope


def _chunk(hf: Any, source: str) -> int | None:
    """Returns the longest row in which dual-chunk attention (arXiv:2402.17463) is plain attention.

    The default of chunk_size is that of vLLM and SGLang. They also scale the queries of rows beyond
    the original length. transformers ignores these settings, and the sparse attention that may be
    configured with them.

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
    """Returns the window in tokens, and the layers that have it.

    Args:
        hf: The configuration, which transformers has completed.
        supported: The types of layers that the family may have.
        source: The path of config.json, for messages.
    """
    types = hf.layer_types if hasattr(type(hf), "layer_types") else None
    if types is None:  # all layers of the family have the window, or none has
        # transformers ignores the window in families without this field.
        slides = hasattr(type(hf), "use_sliding_window") and hf.sliding_window
        types = [SLIDING if slides else ATTENTION] * hf.num_hidden_layers
    for layer, kind in enumerate(types):
        if kind not in supported:
            raise InputError(
                f"{source}: layer_types: layer {layer} is {kind!r}, and only "
                f"{' and '.join(supported)} are supported"
            )
    sliding = tuple(k for k, kind in enumerate(types) if kind == SLIDING)
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
    if hasattr(type(hf), SHARED_WIDTH):  # else transformers ignores it
        numbers |= _positive_ints(hf, source, {"shared_width": SHARED_WIDTH})
    if numbers["per_token"] > numbers["count"]:
        raise InputError(
            f"{source}: num_experts_per_tok {numbers['per_token']} is more than num_experts "
            f"{numbers['count']}"
        )
    return ExpertsConfig(**numbers, renormalise=renormalise)


def _delta_net(hf: Any, source: str, interleaved: bool) -> DeltaNet:
    numbers = _positive_ints(hf, source, DELTA_SIZES)
    keys, values = numbers["key_heads"], numbers["values_per_key"]
    if values % keys:
        raise InputError(
            f"{source}: linear_num_value_heads {values} is not a multiple of "
            f"linear_num_key_heads {keys}"
        )
    gate = getattr(hf, "output_gate_type", None)
    if gate not in (None, "swish", "silu"):
        raise InputError(f"{source}: output_gate_type {gate!r} is not supported, 'swish' is")
    linear = tuple(k for k, kind in enumerate(hf.layer_types) if kind == LINEAR)
    numbers["values_per_key"] = values // keys
    return DeltaNet(linear, **numbers, interleaved=interleaved)
