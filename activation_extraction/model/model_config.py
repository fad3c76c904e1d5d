"""Declares ModelConfig, the checked contents of a config.json, and reads it for all families.

Each family of models has a function here that reads its configuration, after family.py has added
transformers' defaults for missing fields. These functions reject settings with which this tool
would compute wrong activations. ModelConfig also computes the sizes of the model's axes and its
number of floating-point operations.

metadata.json contains the fields of ModelConfig by name, so their names must not change.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from activation_extraction.common.errors import InputError
from activation_extraction.model.float8 import DEQUANTIZED, scale_names
from activation_extraction.model.rope import TRAINED, Rope, positive_field

# The largest accepted value of a size in config.json, such as hidden_size, and the largest accepted
# number of layers. The values of real models are hundreds of times smaller. Larger values are
# rejected, because computing with them could take all memory.
LARGEST_SIZE = 2**27
LARGEST_DEPTH = 10_000
# The words of a layer's type (see `layer_types`). The first three words are values in config.json
# and name the kind of attention or delta net. The other two words name the kind of MLP.
ATTENTION, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
DENSE, SPARSE = "dense", "sparse"
# The name of the tensor with the weights of the head, which computes logits.
HEAD = "lm_head.weight"

# Fields of config.json that must be positive integers. ModelConfig has fields of the same names.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
# Field of ExpertsConfig -> field of config.json, for fields that must be positive integers.
EXPERT_SIZES = dict(
    count="num_experts", per_token="num_experts_per_tok", width="moe_intermediate_size"
)
SHARED_WIDTH = "shared_expert_intermediate_size"
# Field of DeltaNet -> field of config.json, for fields that must be positive integers.
# "num_value_heads" is no field of DeltaNet: `values_per_key` is computed from it.
DELTA_SIZES = {
    "key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_size": "linear_key_head_dim",
    "value_size": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The sizes of the experts in each layer that has experts.

    Attributes:
        count: Number of experts in a layer, without the shared expert.
        per_token: Number of experts that each token uses, without the shared expert.
        width: Number of hidden values of an expert for a token (moe_intermediate_size).
        shared_width: Number of hidden values of the shared expert, which all tokens use. 0 if there
            is no such expert.
        renormalise: Whether the weights of a token's experts are scaled to a sum of 1.
    """

    # The names of these fields are also keys in metadata.json, so they must not change.
    count: int
    per_token: int
    width: int
    shared_width: int
    renormalise: bool


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """The sizes of the gated delta net that replaces attention in some layers.

    Attributes:
        layers: Numbers of the layers with a delta net in place of attention.
        key_heads: Number of key heads, and also of query heads.
        values_per_key: Number of value heads that share a key head.
        key_size: Size of a key head.
        value_size: Size of a value head.
        taps: Number of tokens over which the convolution sums.
        interleaved: Whether the checkpoint stores the input projections as two matrices, as for
            Qwen3-Next, instead of four matrices, as for Qwen3.5. The rows of the two matrices are
            ordered by key head.
    """

    # The names of these fields are also keys in metadata.json, so they must not change.
    layers: tuple[int, ...]
    key_heads: int
    values_per_key: int
    key_size: int
    value_size: int
    taps: int
    interleaved: bool = False


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes and settings of a model. metadata.json stores them under the names of the fields.

    Attributes:
        model_type: Name of the model's family in config.json, such as "qwen2".
        vocab_size: Number of tokens in the vocabulary.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of an MLP. 0 in a family without MLPs.
        num_hidden_layers: Number of layers.
        num_attention_heads: Number of query heads in a layer with attention.
        num_key_value_heads: Number of key/value heads in a layer with attention.
        head_dim: Size of a head of attention.
        rope: Rotary embedding.
        rms_norm_eps: Number that norms add to the mean square of a vector.
        max_position_embeddings: Number of positions that config.json states.
        tie_word_embeddings: Whether the head of the model is its embedding.
        sliding_window: Number of tokens that a token sees in `sliding_layers`, including itself.
            None if there are no such layers.
        sliding_layers: Numbers of the layers whose attention has a window.
        qkv_bias: Whether the projections to queries, keys and values have biases.
        o_bias: Whether the projection of attention's output has a bias.
        qk_norm: Whether the queries and keys of each head are normalised.
        q_gate: Whether q_proj also computes a gate for the output of each head.
        norm_offset: Number that is added to the weights of normalisations.
        experts: Sizes of the experts in `sparse_layers`. None if there are no such layers.
        sparse_layers: Numbers of the layers that have experts in place of an MLP.
        delta: Sizes of the delta net in layers without attention. None if all layers have
            attention.
        chunk: Number of tokens in the longest row that does not need dual-chunk attention, which is
            not supported. None if the model has no dual-chunk attention.
        weights: Description of float8 weights for messages (`float8.DEQUANTIZED`). None if the
            checkpoint has no float8 weights.
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
        """Letter of an axis of weights or hooks -> size of the axis.

        The docstrings of qwen2_jax.py and delta_net.py explain the letters. Letters of parts that
        the model lacks, such as experts, are left out.
        """
        size_by_axis_letter = {"D": self.hidden_size, "H": self.head_dim, "V": self.vocab_size}
        size_by_axis_letter |= {"N": self.num_attention_heads, "K": self.num_key_value_heads}
        size_by_axis_letter["Q"] = self.num_attention_heads * (1 + self.q_gate)
        if len(self.sparse_layers) < self.num_hidden_layers:
            size_by_axis_letter["F"] = self.intermediate_size
        experts_config = self.experts
        if experts_config is not None:
            size_by_axis_letter |= {"E": experts_config.count, "R": experts_config.count}
            size_by_axis_letter |= {"X": experts_config.per_token, "M": experts_config.width}
            if experts_config.shared_width:
                size_by_axis_letter |= {"P": experts_config.shared_width, "U": 1}
        delta_net_config = self.delta
        if delta_net_config is not None:
            num_value_heads = delta_net_config.key_heads * delta_net_config.values_per_key
            size_by_axis_letter |= {
                "J": delta_net_config.key_heads,
                "G": delta_net_config.values_per_key,
            }
            size_by_axis_letter |= {
                "C": delta_net_config.key_size,
                "Z": delta_net_config.value_size,
            }
            size_by_axis_letter |= {
                "O": num_value_heads * delta_net_config.value_size,
                "I": 1,
                "W": delta_net_config.taps,
            }
        return size_by_axis_letter

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The type of each layer. Layers of the same type have the same parameters.

        If the model has a delta net, the type of a layer contains a word for its kind of attention,
        such as "linear_attention". If the model has experts, the type contains a word for the
        layer's kind of MLP, such as "sparse". A space separates the two words. If the model has
        neither a delta net nor experts, the type of all layers is "dense".
        """
        layer_types = []
        for layer in range(self.num_hidden_layers):
            words_in_layer_type = []
            if self.delta is not None:
                words_in_layer_type.append(LINEAR if layer in self.delta.layers else ATTENTION)
            if self.experts is not None:
                words_in_layer_type.append(SPARSE if layer in self.sparse_layers else DENSE)
            layer_types.append(" ".join(words_in_layer_type) or DENSE)
        return tuple(layer_types)

    def sizes_with(self, length: int) -> dict[str, int]:
        """Returns the size of each axis of weights or hooks, by the letter of the axis.

        The result contains `sizes`, and the letter S for the number of tokens in a row. S is also
        the number of keys of attention: the attention pattern of a token has S values for each
        head.

        Args:
            length: The number of tokens in a row.
        """
        return self.sizes | {"S": length}

    @property
    def longest_row(self) -> tuple[int, str]:
        """The largest number of tokens in a row, and the reason for this limit.

        The reason is a clause for messages, such as "the model has 32768 positions".
        """
        max_num_positions = max(self.max_position_embeddings, self.rope.extended_length)
        if self.chunk is not None and self.chunk < max_num_positions:
            return self.chunk, (
                f"the limit is {self.chunk}: longer rows need dual-chunk attention "
                "(dual_chunk_attention_config), which is not supported"
            )
        reason_for_limit = f"the model has {max_num_positions} positions"
        if self.rope.rope_type == "dynamic":
            reason_for_limit += (
                ", and beyond them its rope_type 'dynamic' depends on the other rows of a batch"
            )
        return max_num_positions, reason_for_limit

    def sliding(self, layers: range) -> np.ndarray | None:
        """Returns a mask of the layers that have attention with a window.

        Args:
            layers: The numbers of the layers.

        Returns:
            A mask of the layers with a window, bool (number of `layers`,). None if no layer of the
            model has a window.
        """
        return np.isin(layers, self.sliding_layers) if self.sliding_layers else None

    def flops_of(self, layer: int, weights: int, lengths: Iterable[int]) -> float:
        """Returns the number of floating-point operations of a layer for some samples.

        A token takes two operations for each weight with which it is multiplied, and two operations
        for each product of attention. Attention is causal, so products above the diagonal do not
        count (unlike in arXiv:2204.02311, appendix B). In a layer with a delta net, the products of
        the gated delta rule count instead of the products of attention.

        Args:
            layer: The number of the layer.
            weights: The number of weights with which a token is multiplied in this layer.
            lengths: The number of tokens of each sample.
        """
        if self.delta is not None and layer in self.delta.layers:
            # The state of the gated delta rule has key_size numbers for each of the sizes["O"]
            # values of a token, and each number takes part in three products per token.
            multiplications_per_token = 3 * self.sizes["O"] * self.delta.key_size
            return 2.0 * (weights + multiplications_per_token) * sum(lengths)
        query_size = self.num_attention_heads * self.head_dim
        window_length = self.sliding_window if layer in self.sliding_layers else None
        num_multiplications = 0
        for sample_length in lengths:
            max_attended_tokens = (
                sample_length if window_length is None else min(window_length, sample_length)
            )
            # Approximately twice the number of pairs of a token (the query) and a token that it
            # sees (the key). For each pair, all heads together multiply `query_size` numbers to
            # compute the scores, and `query_size` numbers again to compute the output.
            twice_num_query_key_pairs = max_attended_tokens * (
                2 * sample_length - max_attended_tokens
            )
            num_multiplications += weights * sample_length + query_size * twice_num_query_key_pairs
        return 2.0 * num_multiplications


# The following functions read the configurations of the families. They raise InputError if the
# model has settings that are not supported.


def qwen2_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of Qwen2, Qwen2.5 or QwQ.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        source: The path of config.json, for messages.
    """
    return _config(hf, source, qkv_bias=True, o_bias=False, qk_norm=False)


def llama_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of a Llama model.

    Either all four projections of attention have biases, or no projection has a bias.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        source: The path of config.json, for messages.
    """
    if hf.mlp_bias:
        raise InputError(f"{source}: mlp_bias {hf.mlp_bias!r} is not supported, only false is")
    if hf.pretraining_tp not in (None, 1):
        raise InputError(
            f"{source}: pretraining_tp {hf.pretraining_tp!r} is not supported, only 1 is"
        )
    has_attention_biases = bool(hf.attention_bias)
    return _config(
        hf, source, qkv_bias=has_attention_biases, o_bias=has_attention_biases, qk_norm=False
    )


def qwen3_config(hf: Any, source: str, **more_fields: Any) -> ModelConfig:
    """Reads the configuration of a dense Qwen3 model, or of a family that extends it.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        source: The path of config.json, for messages.
        more_fields: Name of a further field of the ModelConfig -> its value.
    """
    has_attention_biases = bool(hf.attention_bias)
    return _config(
        hf,
        source,
        qkv_bias=has_attention_biases,
        o_bias=has_attention_biases,
        qk_norm=True,
        **more_fields,
    )


def qwen2_moe_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of Qwen1.5-MoE or Qwen2 57B-A14B.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        source: The path of config.json, for messages.
    """
    expert_fields = _experts(hf, source)
    return _config(
        hf, source, qkv_bias=bool(hf.qkv_bias), o_bias=False, qk_norm=False, **expert_fields
    )


def qwen3_moe_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of Qwen3 with experts.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        source: The path of config.json, for messages.
    """
    return qwen3_config(hf, source, **_experts(hf, source))


def qwen3_next_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of Qwen3-Next.

    Qwen3-Next differs from Qwen3.5 with experts in two ways: its delta nets have two input
    projections, and some of its layers may have no experts.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        source: The path of config.json, for messages.
    """
    return qwen3_5_text_config(hf, source, has_interleaved_projections=True, **_experts(hf, source))


def qwen3_5_text_config(
    hf: Any, source: str, has_interleaved_projections: bool = False, **more_fields: Any
) -> ModelConfig:
    """Reads the configuration of the language model of Qwen3.5, or of a family that extends it.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        source: The path of config.json, for messages.
        has_interleaved_projections: Whether the checkpoint stores the input projections of a delta
            net as two matrices instead of four. The rows of the two matrices are ordered by key
            head.
        more_fields: Name of a further field of the ModelConfig -> its value.
    """
    if not getattr(hf, "attn_output_gate", True):
        raise InputError(f"{source}: attn_output_gate False is not supported, only True is")
    delta_net_config = _delta_net_config(hf, source, has_interleaved_projections)
    return qwen3_config(
        hf, source, q_gate=True, norm_offset=1.0, delta=delta_net_config, **more_fields
    )


def qwen3_5_moe_text_config(hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of the language model of Qwen3.5 with experts in all layers.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        source: The path of config.json, for messages.
    """
    return qwen3_5_text_config(
        hf,
        source,
        intermediate_size=0,
        experts=_experts_config(hf, source, renormalises_routing_weights=True),
        sparse_layers=tuple(range(hf.num_hidden_layers)),
    )


def multimodal_config(read: Callable[[Any, str], ModelConfig], hf: Any, source: str) -> ModelConfig:
    """Reads the configuration of the language model in a model for images, video or audio.

    The configuration of the language model is in the field `text_config`. In an Omni model, this
    field is inside of the field `thinker_config`. `tie_word_embeddings` is read from the
    configuration that contains `text_config`. In `text_config` itself, the field may be missing in
    config.json, and then it has transformers' default, which may be wrong.

    Args:
        read: The function that reads the configuration of a text-only model of the family. Its
            arguments are the configuration and the path of config.json.
        hf: The configuration of the whole model as an object of transformers, with defaults for
            missing fields.
        source: The path of config.json, for messages.
    """
    config_with_text_config = getattr(hf, "thinker_config", hf)
    return dataclasses.replace(
        read(config_with_text_config.text_config, source),
        model_type=hf.model_type,
        tie_word_embeddings=bool(config_with_text_config.tie_word_embeddings),
    )


def as_stored(config: ModelConfig, tensors: Collection[str]) -> ModelConfig:
    """Adapts a configuration to the tensors of a checkpoint, as transformers does.

    If the checkpoint contains a head, the head is used even if config.json ties it to the
    embedding. If the checkpoint contains scales of weights, the weights are float8 even if
    config.json does not state a quantisation.

    Args:
        config: The configuration in config.json.
        tensors: The names of the tensors in the checkpoint.

    Returns:
        The adapted configuration.
    """
    uses_embedding_as_head = config.tie_word_embeddings and HEAD not in tensors
    has_scales = any(scale_names(tensor_name, tensors) for tensor_name in tensors)
    return dataclasses.replace(
        config,
        tie_word_embeddings=uses_embedding_as_head,
        weights=DEQUANTIZED if has_scales else None,
    )


def _config(hf: Any, source: str, **more_fields: Any) -> ModelConfig:
    """Reads the fields that all families share, and returns the configuration.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        source: The path of config.json, for messages.
        more_fields: Values of further fields of the ModelConfig, by name. A size among them
            (`vocab_size`, `hidden_size` or another name in SIZES) is used instead of the size in
            config.json.

    Raises:
        InputError: If a value in config.json is invalid or not supported.
    """
    if not getattr(hf, "is_causal", True):
        raise InputError(
            f"{source}: is_causal {hf.is_causal!r} is not supported: tokens would see later ones"
        )
    if hf.hidden_act != "silu":
        raise InputError(f"{source}: hidden_act {hf.hidden_act!r} is not supported, only 'silu' is")
    has_delta_net = "delta" in more_fields
    size_by_field_name = _positive_ints(
        hf,
        source,
        {field_name: field_name for field_name in SIZES if field_name not in more_fields},
    )
    head_dim = getattr(hf, "head_dim", None)
    if head_dim is None:
        head_dim = size_by_field_name["hidden_size"] // size_by_field_name["num_attention_heads"]
    supported_layer_types = (ATTENTION, LINEAR if has_delta_net else SLIDING)
    window_length, numbers_of_layers_with_window = _sliding(hf, supported_layer_types, source)
    model_config = ModelConfig(
        model_type=hf.model_type,
        head_dim=head_dim,
        rope=Rope.from_hf(
            _rope_parameters(hf, source), head_dim, source, allows_partial=has_delta_net
        ),
        rms_norm_eps=positive_field(vars(hf), "rms_norm_eps", source),
        tie_word_embeddings=bool(getattr(hf, "tie_word_embeddings", False)),
        sliding_window=window_length,
        sliding_layers=numbers_of_layers_with_window,
        chunk=_chunk(hf, source),
        **size_by_field_name,
        **more_fields,
    )
    if model_config.num_attention_heads % model_config.num_key_value_heads:
        raise InputError(
            f"{source}: num_attention_heads {model_config.num_attention_heads} is not a multiple "
            f"of num_key_value_heads {model_config.num_key_value_heads}"
        )
    if type(head_dim) is not int or head_dim < 2 or head_dim % 2:
        raise InputError(f"{source}: head_dim {head_dim!r} is not a positive even number")
    return model_config


def _positive_ints(hf: Any, source: str, field_name_by_key: Mapping[str, str]) -> dict[str, Any]:
    """Reads fields that must be positive integers.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        source: The path of config.json, for messages.
        field_name_by_key: Key of the returned dict -> name of the field in config.json.

    Returns:
        Key of `field_name_by_key` -> value of the field.

    Raises:
        InputError: If a value is no positive integer, or if it is larger than LARGEST_SIZE.
    """
    positive_int_by_key = {}
    for key_of_returned_dict, config_field_name in field_name_by_key.items():
        field_value = getattr(hf, config_field_name)
        if type(field_value) is not int or field_value < 1:
            raise InputError(
                f"{source}: {config_field_name} must be a positive integer, found {field_value!r}"
            )
        if field_value > LARGEST_SIZE:
            raise InputError(
                f"{source}: {config_field_name} is {field_value:.6g}, expected at most "
                f"{LARGEST_SIZE:,}"
            )
        positive_int_by_key[key_of_returned_dict] = field_value
    return positive_int_by_key


def _rope_parameters(hf: Any, source: str) -> Mapping[str, Any]:
    """Returns the settings of the rotary embedding: name of a setting -> its value.

    If config.json contains original_max_position_embeddings both in these settings and outside of
    them, the outer value is used, as in transformers. If YaRN's factor is null, this function
    returns max_position_embeddings / original_max_position_embeddings as the factor.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields. Its
            attribute rope_parameters is changed to the standard form of transformers.
        source: The path of config.json, for messages.

    Raises:
        InputError: If the settings differ between layers, or if YaRN's factor is null and
            original_max_position_embeddings is no positive number.
    """
    hf.standardize_rope_params()
    rope_settings = hf.rope_parameters
    has_same_settings_in_all_layers = isinstance(rope_settings, Mapping) and not any(
        isinstance(rope_setting, Mapping) for rope_setting in rope_settings.values()
    )
    if not has_same_settings_in_all_layers:
        raise InputError(
            f"{source}: rope_parameters {rope_settings!r} is not supported, only one flat set"
        )
    if rope_settings.get("rope_type") == "yarn" and rope_settings.get("factor", 0) is None:
        original_context_length = positive_field(rope_settings, TRAINED, source)
        return {**rope_settings, "factor": hf.max_position_embeddings / original_context_length}
    return rope_settings


def _chunk(hf: Any, source: str) -> int | None:
    """Returns the length of the longest row that does not need dual-chunk attention.

    In rows up to this length, dual-chunk attention (arXiv:2402.17463) computes the same as plain
    attention. The length is chunk_size, for which this function has the same default as vLLM and
    SGLang. If the settings contain a smaller original_max_position_embeddings, that number is the
    length, because vLLM and SGLang scale the queries of longer rows. transformers would compute
    plain attention in longer rows as well, because it ignores dual_chunk_attention_config. Like
    transformers, this function ignores settings of sparse attention in this configuration.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        source: The path of config.json, for messages.

    Returns:
        The number of tokens. None if the model has no dual-chunk attention.

    Raises:
        InputError: If the settings of dual-chunk attention are not valid.
    """
    dual_chunk_settings = getattr(hf, "dual_chunk_attention_config", None)
    if dual_chunk_settings is None:
        return None
    if not isinstance(dual_chunk_settings, Mapping):
        raise InputError(
            f"{source}: dual_chunk_attention_config {dual_chunk_settings!r} is not a set of fields"
        )
    max_row_length = positive_field(
        {"chunk_size": 8192, **dual_chunk_settings}, "chunk_size", source
    )
    if dual_chunk_settings.get(TRAINED):
        max_row_length = min(max_row_length, positive_field(dual_chunk_settings, TRAINED, source))
    return int(max_row_length)


def _sliding(
    hf: Any, supported_types: tuple[str, ...], source: str
) -> tuple[int | None, tuple[int, ...]]:
    """Reads the sliding window of attention.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        supported_types: The types of layers that the family supports.
        source: The path of config.json, for messages.

    Returns:
        A tuple of:
            The number of tokens in the window. None if no layer has a window.
            The numbers of the layers with a window.

    Raises:
        InputError: If a layer has another type, or has a window whose length is not stated.
    """
    layer_types = hf.layer_types if hasattr(type(hf), "layer_types") else None
    if layer_types is None:
        # Families without the field layer_types have the same kind of attention in all layers: all
        # layers have the window, or none has it. Families that also lack the field
        # use_sliding_window have no window, because transformers ignores sliding_window for them.
        all_layers_have_window = bool(hasattr(type(hf), "use_sliding_window") and hf.sliding_window)
        layer_types = [SLIDING if all_layers_have_window else ATTENTION] * hf.num_hidden_layers
    for layer, layer_type in enumerate(layer_types):
        if layer_type not in supported_types:
            raise InputError(
                f"{source}: layer_types: layer {layer} is {layer_type!r}, and only "
                f"{' and '.join(supported_types)} are supported"
            )
    numbers_of_layers_with_window = _layers_of_type(layer_types, SLIDING)
    if not numbers_of_layers_with_window:
        return None, ()
    if hf.sliding_window is None:
        raise InputError(
            f"{source}: layer_types: layer {numbers_of_layers_with_window[0]} slides, but there "
            "is no window (use_sliding_window, sliding_window)"
        )
    window_length = _positive_ints(hf, source, {"window": "sliding_window"})["window"]
    return window_length, numbers_of_layers_with_window


def _layers_of_type(layer_types: Sequence[str], wanted_type: str) -> tuple[int, ...]:
    return tuple(layer for layer, layer_type in enumerate(layer_types) if layer_type == wanted_type)


def _experts(hf: Any, source: str) -> dict[str, Any]:
    """Reads which layers of a model have experts, and the sizes of these experts.

    This function is for families whose config.json states which layers have experts.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        source: The path of config.json, for messages.

    Returns:
        The fields `experts` and `sparse_layers` of ModelConfig, by name.

    Raises:
        InputError: If no layer has experts, or if the sizes are not valid.
    """
    sparse_layer_step = _positive_ints(hf, source, {"step": "decoder_sparse_step"})["step"]
    # For n = `sparse_layer_step`, every nth layer has experts, unless mlp_only_layers contains its
    # number.
    numbers_of_sparse_layers = tuple(
        layer_number
        for layer_number in range(sparse_layer_step - 1, hf.num_hidden_layers, sparse_layer_step)
        if layer_number not in hf.mlp_only_layers
    )
    if not numbers_of_sparse_layers:
        raise InputError(
            f"{source}: no layer has experts (decoder_sparse_step {sparse_layer_step}, "
            f"mlp_only_layers {hf.mlp_only_layers}); such a model is not supported"
        )
    # Families whose configuration class lacks norm_topk_prob always renormalise.
    renormalises_routing_weights = not hasattr(type(hf), "norm_topk_prob") or bool(
        hf.norm_topk_prob
    )
    experts_config = _experts_config(hf, source, renormalises_routing_weights)
    return {"experts": experts_config, "sparse_layers": numbers_of_sparse_layers}


def _experts_config(hf: Any, source: str, renormalises_routing_weights: bool) -> ExpertsConfig:
    """Reads the sizes of the experts in each layer that has experts.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        source: The path of config.json, for messages.
        renormalises_routing_weights: Whether the model scales the weights of a token's experts to a
            sum of 1.

    Raises:
        InputError: If a size is not valid, or if a token uses more experts than a layer has.
    """
    size_by_expert_field = {"shared_width": 0} | _positive_ints(hf, source, EXPERT_SIZES)
    if hasattr(type(hf), SHARED_WIDTH):
        # The family's configuration class in transformers has the field SHARED_WIDTH, which means
        # that each layer with experts also has a shared expert. For other families, `shared_width`
        # stays 0 even if config.json contains the field, because transformers ignores it.
        size_by_expert_field |= _positive_ints(hf, source, {"shared_width": SHARED_WIDTH})
    if size_by_expert_field["per_token"] > size_by_expert_field["count"]:
        raise InputError(
            f"{source}: num_experts_per_tok {size_by_expert_field['per_token']} is more than "
            f"num_experts {size_by_expert_field['count']}"
        )
    return ExpertsConfig(**size_by_expert_field, renormalise=renormalises_routing_weights)


def _delta_net_config(hf: Any, source: str, has_interleaved_projections: bool) -> DeltaNet:
    """Reads the sizes of the delta nets, which are the same in all layers that have a delta net.

    Args:
        hf: The configuration as an object of transformers, with defaults for missing fields.
        source: The path of config.json, for messages.
        has_interleaved_projections: Whether the checkpoint stores the input projections of a delta
            net as two matrices instead of four. The rows of the two matrices are ordered by key
            head.

    Raises:
        InputError: If a size is not valid, if the number of value heads is not a multiple of the
            number of key heads, or if the activation function of the output gate is not supported.
    """
    delta_net_size_by_field = _positive_ints(hf, source, DELTA_SIZES)
    num_key_heads = delta_net_size_by_field["key_heads"]
    # The number of value heads of all key heads together. DeltaNet has no such field, but the field
    # `values_per_key`, the number of value heads of one key head.
    num_value_heads = delta_net_size_by_field.pop("num_value_heads")
    if num_value_heads % num_key_heads:
        raise InputError(
            f"{source}: linear_num_value_heads {num_value_heads} is not a multiple of "
            f"linear_num_key_heads {num_key_heads}"
        )
    output_gate_type = getattr(hf, "output_gate_type", None)
    if output_gate_type not in (None, "swish", "silu"):
        raise InputError(
            f"{source}: output_gate_type {output_gate_type!r} is not supported, 'swish' is"
        )
    return DeltaNet(
        _layers_of_type(hf.layer_types, LINEAR),
        values_per_key=num_value_heads // num_key_heads,
        interleaved=has_interleaved_projections,
        **delta_net_size_by_field,
    )
