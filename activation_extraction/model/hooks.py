"""Declares the hooks of a model, and finds the hooks that a user asked for.

A hook is a point in the model whose values can be stored. Hooks at the same point in several layers
are of the same kind. A hook has one canonical name, which TransformerLens uses. It may have other
names in TransformerLens, and names as the input or output of a Hugging Face module. The hook table
of a model lists its kinds of hooks. capture.py collects the values.

Names and meanings are the same as in TransformerLens with unprocessed weights. The values of
`hook_normalized` are taken before the weight of the norm, and the values of `hook_out` after it.
`hook_q`, `hook_k` and `hook_v` are the results of the projections, before any norm and before the
rotary embedding; `hook_rot_q` and `hook_rot_k` come after both. `hook_resid_post` of the last layer
comes before the final norm, unlike Hugging Face's last hidden state. Values of heads are flat:
(tokens, heads * head size). `hook_pattern` is (tokens, heads * tokens of a row): the attention of
each head to position 0 of the token's own sample, to position 1 and so on, and 0 for positions that
the token does not see.

Layers with experts have these hooks after `ln2.hook_out`:

    mlp.gate.hook_out                the router's logits
    mlp.hook_expert_weights          the weight of every expert, 0 for experts that were not chosen
    mlp.hook_expert_indices          the numbers of the chosen experts, int32, the one with the
                                     largest weight first
    mlp.experts.hook_out             the weighted sum of the results of the chosen experts
    mlp.shared_expert.hook_out       the result of the shared expert, before it is multiplied by the
                                     sigmoid of mlp.shared_expert_gate.hook_out

`mlp.gate` is the router in these layers. So in a model with both dense layers and layers with
experts, the hooks `mlp.gate.hook_out`, `mlp.in.hook_out` and `mlp.out.hook_in` of dense layers are
called `mlp.dense_gate.hook_out` and so on.

A model has a few more hooks after its last layer (predictions.py). `loss` is the cross-entropy of a
token given the tokens before it, in nats, and NaN for the first token of a sample. `entropy`,
`logits`, `logits.top_ids` and `logits.top_logprobs` describe the prediction of the next token.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.common.choices import DEFAULT_TOP_LOGITS
from activation_extraction.common.encodings import FLOAT8, token_bytes
from activation_extraction.common.errors import InputError, near_miss
from activation_extraction.model.model_config import ATTENTION, DENSE, LINEAR, SPARSE, ModelConfig

HEAD_SIZES = "HCZ"  # the letters that stand for head sizes
# Value of --activation_type -> the name of its hook, without the prefix of the layer.
ACTIVATION_TYPES = {"residual": "hook_resid_post", "attn": "hook_attn_out", "mlp": "hook_mlp_out"}
# Prefix of `HookKind.path_in_intermediates` for values that are computed from the logits.
PREDICTED = "predicted."


class WidthAndDtype(NamedTuple):
    """The width and the dtype of the vector that a hook has for each token.

    A step stores the values of all hooks with the same width and dtype in one array.

    Attributes:
        width: The length of the vector.
        dtype: The name of a NumPy dtype, or "float8".
    """

    width: int
    dtype: str

    @property
    def bytes(self) -> int:
        """The number of bytes of one token's vector at a hook, including its scale for float8."""
        return token_bytes(self.width, self.dtype)


@dataclass(frozen=True)
class HookKind:
    """A kind of hook: the same point in several layers, or a point outside the layers.

    Attributes:
        name: The canonical name. In this and all other names, "{}" stands for the number of the
            layer. A model has a single hook of a kind without "{}".
        axis_letters: One letter for each axis of the values of a token, such as "NH" for heads and
            head size; "" if a token has no such axes. qwen2_jax.py and delta_net.py explain the
            letters. In addition, S is the number of tokens of a row, and Q the number of heads of
            the query projection, which may contain a gate for each head. The width of the hook is
            the product of these sizes and `width_factor`.
        path_in_intermediates: The dotted path of the array to capture among the intermediates of a
            layer, such as "attn.q": the names of the modules that contain the array, then its own
            name.
        module_names: The names of the same values in Hugging Face: module paths that end in
            ".input" or ".output".
        aliases: The other names in TransformerLens.
        is_after_layers: Whether the kind comes after the last layer. False for kinds in layers and
            for the kind before the first layer.
        layer_type_words: Words in the types of the layers that have a hook of this kind, such as
            "sparse" (see `ModelConfig.layer_types`). A layer has such a hook if its type contains
            one of these words. () if every layer has a hook of this kind.
        dtype: The name of the dtype of the values; None for activations, whose dtype the user
            chooses.
        width_factor: A factor of the width that has no letter, such as the number of most likely
            tokens in `logits.top_ids`; 1 if every factor has a letter.
    """

    name: str
    axis_letters: str
    path_in_intermediates: str
    module_names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    is_after_layers: bool = False
    layer_type_words: tuple[str, ...] = ()
    dtype: str | None = None
    width_factor: int = 1

    @property
    def is_prediction(self) -> bool:
        """Returns whether the values at hooks of this kind are computed from the logits."""
        return self.path_in_intermediates.startswith(PREDICTED)

    @property
    def grows_with_row_length(self) -> bool:
        """Returns whether hooks of this kind have more values per token in longer rows."""
        return "S" in self.axis_letters

    @property
    def is_large(self) -> bool:
        """Returns whether hooks of this kind are only stored if a user names them explicitly.

        Hooks of such a large kind have many values per token: their number grows with the number of
        tokens in a row or with the size of the vocabulary.
        """
        return self.grows_with_row_length or "V" in self.axis_letters

    def width(self, sizes: Mapping[str, int]) -> int:
        """Returns the number of values that a token has at a hook of this kind.

        Args:
            sizes: Letter of an axis -> its size in the model.
        """
        return math.prod(sizes[letter] for letter in self.axis_letters) * self.width_factor

    def width_and_dtype(self, sizes: Mapping[str, int], dtype: Any) -> WidthAndDtype:
        """Returns the width and dtype of the values that a token has at a hook of this kind.

        Args:
            sizes: Letter of an axis -> its size in the model.
            dtype: The dtype of activations, or "float8" for the encoding that a run with
                --activation_dtype float8 stores. It has no effect on kinds of hooks whose values
                are not activations.
        """
        activation_dtype_name = FLOAT8 if str(dtype) == FLOAT8 else np.dtype(dtype).name
        return WidthAndDtype(self.width(sizes), self.dtype or activation_dtype_name)

    def exists_in(self, layer_type: str) -> bool:
        """Returns whether layers of a type have hooks of this kind.

        Args:
            layer_type: One of ModelConfig.layer_types.
        """
        return not self.layer_type_words or not {*self.layer_type_words}.isdisjoint(
            layer_type.split()
        )

    def layers(self, depth: int, layer_types: Sequence[str] = ()) -> Sequence[int]:
        """Returns the numbers of the layers of a model that have a hook of this kind.

        A hook after the last layer counts as a hook of the last layer. A hook before the first
        layer counts as a hook of the first layer.

        Args:
            depth: The number of layers.
            layer_types: The type of each layer. () to ignore the types, so that no layer is left
                out because of its type.
        """
        if "{}" in self.name:
            return [
                layer_number
                for layer_number in range(depth)
                if not layer_types or self.exists_in(layer_types[layer_number])
            ]
        return range(depth - 1, depth) if self.is_after_layers else range(1)


class Hook(NamedTuple):
    """A hook of a model: the hook of one kind in one layer, or a hook outside of the layers.

    Sorting hooks puts them in the order in which the model computes their values.

    Attributes:
        layer_number: The number of the layer. For a hook before the first layer it is 0, and for a
            hook after the last layer it is the number of the last layer.
        kind_index_in_hook_table: The index of the kind in the model's hook table. Kinds that are
            computed earlier in a layer have smaller indices.
        kind: The kind of the hook.
    """

    layer_number: int
    kind_index_in_hook_table: int
    kind: HookKind

    @property
    def name(self) -> str:
        """The canonical name of the hook, such as "blocks.3.hook_resid_post"."""
        return self.kind.name.format(self.layer_number)

    @property
    def module_name(self) -> str | None:
        """The name of the hook's values in Hugging Face's model, such as "model.layers.3.output".

        The first name if the values have several names. None if they have no name there.
        """
        return (
            self.kind.module_names[0].format(self.layer_number) if self.kind.module_names else None
        )

    def names(self) -> list[str]:
        """Returns all names of the hook.

        They are the canonical name, the aliases, and the names of the hook's modules in
        transformers, in this order.
        """
        name_patterns = self.kind.name, *self.kind.aliases, *self.kind.module_names
        return [name_pattern.format(self.layer_number) for name_pattern in name_patterns]

    def matching(self, pattern: str) -> list[str]:
        """Returns the names of the hook that match a glob.

        A hook of a large kind (see `HookKind.is_large`) only matches a glob if the user clearly
        asks for this kind. The glob must be one of the hook's names, or it must have the same text
        after its last dot as the hook's canonical name. For example, "*.hook_pattern" matches
        "blocks.3.attn.hook_pattern", and "*.attn.*" does not.

        Args:
            pattern: The glob.
        """
        hook_names = self.names()
        if self.kind.is_large and pattern not in hook_names:
            if pattern.rpartition(".")[2] != self.name.rpartition(".")[2]:
                return []
        return [hook_name for hook_name in hook_names if fnmatchcase(hook_name, pattern)]

    def metadata(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Returns the entry of the hook in metadata.json.

        Args:
            sizes: Letter of an axis -> its size in the model.

        Returns:
            A dict with the keys `module` (the name in Hugging Face; None for no such name),
            `aliases` (all other names) and `width`. If the values are not activations, but for
            example numbers of experts, it also has their `dtype`. If `width` is the product of a
            number of heads and a head size, it also has `heads` and `head_size`. For an attention
            pattern, it also has `heads` and `keys` (the number of tokens of a row).
        """
        hook_metadata: dict[str, Any] = {"module": self.module_name, "aliases": self.names()[1:]}
        hook_metadata["width"] = self.kind.width(sizes)
        if self.kind.dtype is not None:
            hook_metadata["dtype"] = self.kind.dtype
        letters_of_head_axes = self.kind.axis_letters[:-1]
        head_size_letter = self.kind.axis_letters[-1:]
        if head_size_letter and head_size_letter in HEAD_SIZES:
            hook_metadata["heads"] = math.prod(sizes[letter] for letter in letters_of_head_axes)
            hook_metadata["head_size"] = sizes[head_size_letter]
        if self.kind.grows_with_row_length:
            hook_metadata["heads"] = sizes[self.kind.axis_letters[0]]
            hook_metadata["keys"] = sizes["S"]
        return hook_metadata


@dataclass(frozen=True)
class HookTable:
    """The kinds of hooks of a model, or of a model family.

    Attributes:
        kinds: The kinds of hooks, in the order in which they are computed.
        layer_types: The type of each layer of the model. () for a family, whose layers are unknown;
            every layer is then assumed to have the hooks of all kinds.
        vocabulary_size: The number of tokens in the model's vocabulary; 0 if it is unknown.
    """

    kinds: tuple[HookKind, ...]
    layer_types: tuple[str, ...] = ()
    vocabulary_size: int = 0

    def without_predictions(self) -> "HookTable":
        """Returns the table without the kinds that need logits, for a model without an LM head."""
        kinds_without_predictions = tuple(
            hook_kind for hook_kind in self.kinds if not hook_kind.is_prediction
        )
        return replace(self, kinds=kinds_without_predictions)

    def all_hooks(self, depth: int, large: bool = False) -> list[Hook]:
        """Returns the hooks of a model, in the order in which they are computed.

        Args:
            depth: The number of layers of the model.
            large: Whether to include hooks of large kinds (see `HookKind.is_large`).
        """
        return sorted(
            Hook(layer_number, kind_index_in_hook_table, hook_kind)
            for kind_index_in_hook_table, hook_kind in enumerate(self.kinds)
            for layer_number in hook_kind.layers(depth, self.layer_types)
            if large or not hook_kind.is_large
        )

    def of_layers(self, layers: Sequence[int], activation_type: str, depth: int) -> list[Hook]:
        """Returns the hooks of one activation type at some layers, in the order of the layers.

        Args:
            layers: The numbers of the layers.
            activation_type: The value of --activation_type, a key of ACTIVATION_TYPES.
            depth: The number of layers of the model.

        Raises:
            InputError: If a layer is outside 0 .. depth - 1, or has no such hook.
        """
        for layer_number in layers:
            if not 0 <= layer_number < depth:
                raise InputError(
                    f"--layers_to_extract {layer_number}: the model has layers 0 to {depth - 1}"
                )
        hook_names = [
            f"blocks.{layer_number}.{ACTIVATION_TYPES[activation_type]}" for layer_number in layers
        ]
        return list(self.matching(hook_names, depth).values())

    def matching(self, patterns: Sequence[str], depth: int) -> dict[str, Hook]:
        """Returns the hooks that globs match, in the order in which they are computed.

        If several globs match a hook, the first of these globs determines the hook's name in the
        result. If this glob matches several names of the hook, the result has the first of them in
        the order of `Hook.names`.

        Args:
            patterns: The globs.
            depth: The number of layers of the model.

        Returns:
            Name that a glob matches -> the hook with this name.

        Raises:
            InputError: If a glob matches no hook.
        """
        hooks_of_model = self.all_hooks(depth, large=True)
        name_by_hook: dict[Hook, str] = {}
        for pattern in patterns:
            matching_names_by_hook = {hook: hook.matching(pattern) for hook in hooks_of_model}
            if not any(matching_names_by_hook.values()):
                raise self._no_match_error(pattern, depth)
            for hook, matching_names in matching_names_by_hook.items():
                if matching_names:
                    name_by_hook.setdefault(hook, matching_names[0])
        return {name_by_hook[hook]: hook for hook in sorted(name_by_hook)}

    def _no_match_error(self, pattern: str, depth: int) -> InputError:
        """Returns the error for a glob that matches no hook.

        The message contains the reason if it is known, otherwise similar names if there are any.

        Args:
            pattern: The glob.
            depth: The number of layers of the model.
        """
        family_hook_table = HookTable(self.kinds)
        for hook in family_hook_table.all_hooks(depth, large=True):
            if hook.matching(pattern):
                return InputError(
                    f"--hook_names {pattern}: layer {hook.layer_number} is of type "
                    f"{self.layer_types[hook.layer_number]} and has no such hook; "
                    "--list_hooks shows their names"
                )
        hooks_of_model = self.all_hooks(depth, large=True)
        for hook in hooks_of_model:
            hook_names = hook.names()
            if "V" in hook.kind.axis_letters and any(
                fnmatchcase(hook_name, pattern) for hook_name in hook_names
            ):
                return InputError(
                    f"--hook_names {pattern}: matches only {hook.name}, which takes "
                    f"{2 * self.vocabulary_size:,} bytes per token in bfloat16; if you want it, "
                    f"ask for {hook.name}"
                )
        names_of_all_hooks = [hook_name for hook in hooks_of_model for hook_name in hook.names()]
        near_miss_hint = near_miss(pattern, names_of_all_hooks)
        return InputError(
            f"--hook_names {pattern}: matches no hook of a model with layers 0 to "
            f"{depth - 1}{near_miss_hint}; --list_hooks shows their names"
        )


# The first column of HOOK_KINDS contains a layer selector, which determines the layers that have a
# kind of hook. It is one of the following texts, or a word of the layers' types in ModelConfig
# (ATTENTION, LINEAR, DENSE or SPARSE). `_layer_type_words` finds the layers of each selector.
EVERY = "every"  # layer selector of all layers
NORMED = "normed"  # layer selector of layers whose attention has norms of queries and keys
GATED = "gated"  # layer selector of layers whose attention has a gate on its output
SHARED = "shared"  # layer selector of layers that have a shared expert
# Layer selectors of layers with linear attention whose projections are stored as separate tensors
# (APART), or interleaved in one tensor (INTERLEAVED).
APART, INTERLEAVED = "apart", "interleaved"
# The kinds of hooks in layers, in the order in which a layer computes them. The columns contain:
#   the layer selector of the layers that have the kind: EVERY, ATTENTION, LINEAR and so on,
#   the canonical name, without the prefix "blocks.{}.",
#   the letters of the width (see `HookKind.axis_letters`),
#   the path of the intermediate (see `HookKind.path_in_intermediates`),
#   the names in Hugging Face, without the prefix "model.layers.{}.", separated by spaces,
#   the aliases, without the prefix "blocks.{}.", separated by spaces.
# fmt: off
HOOK_KINDS = (
    (EVERY, "hook_resid_pre", "D", "resid_pre", "input", "hook_in ln1.hook_in"),
    (EVERY, "ln1.hook_normalized", "D", "ln1.normalized", "", ""),
    (ATTENTION, "ln1.hook_out", "D", "ln1.out", "input_layernorm.output", "attn.hook_in"),
    (LINEAR, "ln1.hook_out", "D", "ln1.out", "input_layernorm.output", "linear_attn.hook_in"),
    (LINEAR, "linear_attn.hook_q_pre_conv", "JC", "linear_attn.q_pre_conv", "", ""),
    (LINEAR, "linear_attn.hook_k_pre_conv", "JC", "linear_attn.k_pre_conv", "", ""),
    (LINEAR, "linear_attn.hook_v_pre_conv", "JGZ", "linear_attn.v_pre_conv", "", ""),
    (LINEAR, "linear_attn.hook_q", "JC", "linear_attn.q", "", ""),
    (LINEAR, "linear_attn.hook_k", "JC", "linear_attn.k", "", ""),
    (LINEAR, "linear_attn.hook_v", "JGZ", "linear_attn.v", "", ""),
    (APART, "linear_attn.hook_beta_logit", "JG", "linear_attn.beta_logit",
     "linear_attn.in_proj_b.output", ""),
    (INTERLEAVED, "linear_attn.hook_beta_logit", "JG", "linear_attn.beta_logit", "", ""),
    (LINEAR, "linear_attn.hook_beta", "JG", "linear_attn.beta", "", ""),
    (LINEAR, "linear_attn.hook_log_decay", "JG", "linear_attn.log_decay", "", ""),
    (LINEAR, "linear_attn.hook_recurrence_out", "JGZ", "linear_attn.recurrence_out",
     "linear_attn.norm.input", ""),
    (APART, "linear_attn.hook_gate_input", "JGZ", "linear_attn.gate_input",
     "linear_attn.in_proj_z.output", ""),
    (INTERLEAVED, "linear_attn.hook_gate_input", "JGZ", "linear_attn.gate_input", "", ""),
    (LINEAR, "linear_attn.out_proj.hook_in", "JGZ", "linear_attn.gated",
     "linear_attn.out_proj.input", ""),
    (LINEAR, "linear_attn.hook_out", "D", "linear_attn.out",
     "linear_attn.output linear_attn.out_proj.output", ""),
    (ATTENTION, "attn.hook_q", "QH", "attn.q", "self_attn.q_proj.output", "attn.q.hook_out"),
    (ATTENTION, "attn.hook_k", "KH", "attn.k", "self_attn.k_proj.output", "attn.k.hook_out"),
    (ATTENTION, "attn.hook_v", "KH", "attn.v", "self_attn.v_proj.output", "attn.v.hook_out"),
    (GATED, "attn.hook_q_gate", "NH", "attn.q_gate", "", ""),
    (NORMED, "attn.hook_q_normed", "NH", "attn.q_normed", "self_attn.q_norm.output", ""),
    (NORMED, "attn.hook_k_normed", "KH", "attn.k_normed", "self_attn.k_norm.output", ""),
    (ATTENTION, "attn.hook_rot_q", "NH", "attn.rot_q", "", ""),
    (ATTENTION, "attn.hook_rot_k", "KH", "attn.rot_k", "", ""),
    (ATTENTION, "attn.hook_pattern", "NS", "attn.pattern", "", ""),
    (ATTENTION, "attn.hook_z", "NH", "attn.z", "self_attn.o_proj.input", "attn.o.hook_in"),
    (ATTENTION, "hook_attn_out", "D", "attn.out",
     "self_attn.output self_attn.o_proj.output", "attn.hook_out"),
    (EVERY, "hook_resid_mid", "D", "resid_mid", "post_attention_layernorm.input", "ln2.hook_in"),
    (EVERY, "ln2.hook_normalized", "D", "ln2.normalized", "", ""),
    (EVERY, "ln2.hook_out", "D", "ln2.out",
     "mlp.input post_attention_layernorm.output", "mlp.hook_in"),
    (DENSE, "mlp.hook_pre", "F", "mlp.pre", "mlp.gate_proj.output", "mlp.gate.hook_out"),
    (DENSE, "mlp.hook_pre_linear", "F", "mlp.pre_linear", "mlp.up_proj.output", "mlp.in.hook_out"),
    (DENSE, "mlp.hook_post", "F", "mlp.post", "mlp.down_proj.input", "mlp.out.hook_in"),
    (DENSE, "hook_mlp_out", "D", "mlp.out", "mlp.output mlp.down_proj.output", "mlp.hook_out"),
    (SPARSE, "mlp.gate.hook_out", "R", "mlp.logits", "mlp.gate.output", ""),
    (SPARSE, "mlp.hook_expert_weights", "R", "mlp.weights", "", ""),
    (SPARSE, "mlp.hook_expert_indices", "X", "mlp.chosen", "", ""),
    (SPARSE, "mlp.experts.hook_out", "D", "mlp.routed", "mlp.experts.output", ""),
    (SHARED, "mlp.shared_expert.hook_pre", "P", "mlp.shared.pre",
     "mlp.shared_expert.gate_proj.output", ""),
    (SHARED, "mlp.shared_expert.hook_pre_linear", "P", "mlp.shared.pre_linear",
     "mlp.shared_expert.up_proj.output", ""),
    (SHARED, "mlp.shared_expert.hook_post", "P", "mlp.shared.post",
     "mlp.shared_expert.down_proj.input", ""),
    (SHARED, "mlp.shared_expert.hook_out", "D", "mlp.shared.out",
     "mlp.shared_expert.output mlp.shared_expert.down_proj.output", ""),
    (SHARED, "mlp.shared_expert_gate.hook_out", "U", "mlp.shared_share",
     "mlp.shared_expert_gate.output", ""),
    (SPARSE, "hook_mlp_out", "D", "mlp.out", "mlp.output", "mlp.hook_out"),
    (EVERY, "hook_resid_post", "D", "resid_post", "output", "hook_out"),
)
# fmt: on

# Path of an intermediate in HOOK_KINDS -> its dtype, for intermediates that are not activations.
DTYPE_OF_INTERMEDIATE = {"mlp.chosen": "int32"}


def hook_table(config: ModelConfig, top_logits: int = DEFAULT_TOP_LOGITS) -> HookTable:
    """Returns the table of the hooks of a model.

    Args:
        config: The configuration of the model.
        top_logits: The number of most likely next tokens at `logits.top_ids`.
    """
    hook_kinds_in_model = []
    for hook_kind in _kinds(_layer_type_words(config), top_logits):
        if any(hook_kind.exists_in(layer_type) for layer_type in config.layer_types):
            hook_kinds_in_model.append(hook_kind)
    return HookTable(tuple(hook_kinds_in_model), config.layer_types, config.vocab_size)


def _layer_type_words(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Returns which layers of a model belong to each layer selector in the table HOOK_KINDS.

    A layer selector is a text in the first column of the table, such as GATED for layers whose
    attention has a gate. It determines which layers have the kind of hook in its row.

    Args:
        config: The configuration of the model.

    Returns:
        Layer selector -> words. The selector stands for the layers whose type (see
        `ModelConfig.layer_types`) contains any of the words. For example, SHARED -> ("sparse",)
        means that the layers whose type contains the word "sparse" have a shared expert. An empty
        tuple stands for all layers. The dict does not contain selectors without layers in this
        model.
    """
    delta_config, experts_config = config.delta, config.experts
    layer_type_words_of_attention = () if delta_config is None else (ATTENTION,)
    layer_type_words_by_selector: dict[str, tuple[str, ...]] = {
        EVERY: (),
        ATTENTION: layer_type_words_of_attention,
    }
    layer_type_words_by_selector[DENSE] = () if experts_config is None else (DENSE,)
    if config.qk_norm:
        layer_type_words_by_selector[NORMED] = layer_type_words_of_attention
    if config.q_gate:
        layer_type_words_by_selector[GATED] = layer_type_words_of_attention
    if delta_config is not None:
        layer_type_words_by_selector[LINEAR] = (LINEAR,)
        # HOOK_KINDS contains two rows for each hook at the output of a projection of linear
        # attention. The row with the layer selector APART is for models in which a Hugging Face
        # module computes this projection alone, and contains the name of the module. The row with
        # the layer selector INTERLEAVED is for models in which one module computes several
        # interleaved projections, and contains no name of a module.
        layer_type_words_by_selector[INTERLEAVED if delta_config.interleaved else APART] = (LINEAR,)
    if experts_config is not None:
        layer_type_words_by_selector[SPARSE] = (SPARSE,)
        if experts_config.shared_width:
            layer_type_words_by_selector[SHARED] = (SPARSE,)
    return layer_type_words_by_selector


def _kinds(
    layer_type_words_by_selector: Mapping[str, tuple[str, ...]], top_logits: int
) -> list[HookKind]:
    """Makes the kinds of hooks of a model, in the order in which the model computes their values.

    Args:
        layer_type_words_by_selector: The dict that `_layer_type_words` returns for the model: a
            layer selector -> words that the type of a layer must contain to be selected, such as
            SHARED -> ("sparse",). Rows of the table HOOK_KINDS with other layer selectors are left
            out, because no layer of the model has their hooks.
        top_logits: The number of most likely next tokens at `logits.top_ids`.
    """
    hook_kinds = [HookKind("hook_embed", "D", "resid_pre", ("model.embed_tokens.output",))]
    for (
        layer_selector,
        kind_name,
        axis_letters,
        path_in_intermediates,
        module_names_text,
        alias_names_text,
    ) in HOOK_KINDS:
        if layer_selector not in layer_type_words_by_selector:
            continue
        # If the model also has layers with experts, `mlp.gate` is the name of their router. So in
        # dense layers, for example the alias "mlp.gate.hook_out" becomes "mlp.dense_gate.hook_out".
        if layer_type_words_by_selector[layer_selector] == (DENSE,):
            alias_names_text = re.sub(r"mlp\.(gate|in|out)\.", r"mlp.dense_\1.", alias_names_text)
        hook_kinds.append(
            HookKind(
                f"blocks.{{}}.{kind_name}",
                axis_letters,
                path_in_intermediates,
                tuple(
                    f"model.layers.{{}}.{module_name}" for module_name in module_names_text.split()
                ),
                tuple(f"blocks.{{}}.{alias_name}" for alias_name in alias_names_text.split()),
                layer_type_words=layer_type_words_by_selector[layer_selector],
                dtype=DTYPE_OF_INTERMEDIATE.get(path_in_intermediates),
            )
        )
    make_kind_after_layers = partial(HookKind, is_after_layers=True)
    hook_kinds += [
        make_kind_after_layers("ln_final.hook_normalized", "D", "final.normalized"),
        make_kind_after_layers("ln_final.hook_out", "D", "final.out", ("model.norm.output",)),
        make_kind_after_layers(
            "logits", "V", "predicted.logits", ("lm_head.output",), ("unembed.hook_out",)
        ),
        make_kind_after_layers(
            "logits.top_ids", "", "predicted.top_ids", dtype="int32", width_factor=top_logits
        ),
        make_kind_after_layers(
            "logits.top_logprobs",
            "",
            "predicted.top_logprobs",
            dtype="float32",
            width_factor=top_logits,
        ),
        make_kind_after_layers("loss", "", "predicted.loss", dtype="float32"),
        make_kind_after_layers("entropy", "", "predicted.entropy", dtype="float32"),
    ]
    return hook_kinds


# The table of the hooks of Qwen2, the family with the fewest kinds of hooks. Tests use it. It
# contains only the rows of HOOK_KINDS whose first column is EVERY, ATTENTION or DENSE. () means
# that all layers have the hooks in such a row, because all layers of Qwen2 have attention and a
# dense MLP.
HOOKS = HookTable(tuple(_kinds({EVERY: (), ATTENTION: (), DENSE: ()}, DEFAULT_TOP_LOGITS)))
