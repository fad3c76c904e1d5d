"""The hooks of a model: their names, their meanings, and which of them a user asked for.

A hook is a kind of hook at a layer. It has one canonical name, TransformerLens's, and may have
aliases there and as an input or output of a Hugging Face module. The hook table of a model lists
its kinds of hooks. Nothing here computes; the hooked model captures the values.

Names and meanings are those of TransformerLens with unprocessed weights. A norm's `hook_normalized`
comes before its weight and `hook_out` after it; `hook_q`, `hook_k` and `hook_v` are the
projections, which come before any norm on them and before the rotary embedding; `hook_rot_q` and
`hook_rot_k` come after both; `hook_resid_post` of the last layer comes before the final norm,
unlike Hugging Face's last hidden state. Values per head are flat: (tokens, heads * head size).
`hook_pattern` is (tokens, heads * tokens of a row): how much each head attends to position 0 of the
token's own sample, to position 1 and so on; positions that the token does not see have 0.

Layers with experts have others after `ln2.hook_out`:

    mlp.gate.hook_out                the router's logits
    mlp.hook_expert_weights          the weight of every expert, 0 for those that were not chosen
    mlp.hook_expert_indices          the numbers of the chosen experts, int32, the one with the
                                     largest weight first
    mlp.experts.hook_out             the weighted sum of the results of the chosen experts
    mlp.shared_expert.hook_out       the result of the shared expert, before it is multiplied by the
                                     sigmoid of mlp.shared_expert_gate.hook_out

Since `mlp.gate` is the router there, the matrices of a dense layer in such a model are called
`mlp.dense_gate` and so on.

A model has a few more hooks after its last layer (predictions.py). `loss` is that of a token given
the tokens before it, in nats, and NaN for the first token of a sample. `entropy`, `logits`,
`logits.top_ids` and `logits.top_logprobs` describe the prediction of the token after it.
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
# --activation_type -> the hook of a layer that it stands for.
ACTIVATION_TYPES = {"residual": "hook_resid_post", "attn": "hook_attn_out", "mlp": "hook_mlp_out"}
PREDICTED = "predicted."  # where predictions are among the intermediates; see HookKind


class Form(NamedTuple):
    """The width and dtype of a hook's values. Hooks of one form share an array in a step.

    Attributes:
        width: The numbers of a token.
        dtype: The name of the dtype in NumPy, or "float8".
    """

    width: int
    dtype: str

    @property
    def bytes(self) -> int:
        """The bytes of a token."""
        return token_bytes(self.width, self.dtype)


@dataclass(frozen=True)
class HookKind:
    """A kind of hook, which a model has once or in each of some layers.

    Attributes:
        name: The canonical name. "{}" stands for the layer, here and in the other names; a kind
            without it exists once in a model.
        letters: One letter for each axis of a token's value, such as "NH" for heads and head size;
            "" for a value without such axes. qwen2_jax.py and delta_net.py explain the letters.
            Besides them, S stands for the tokens of a row, and Q for the heads of the query
            projection, which may contain the gate of each head. The width is the product of the
            sizes of the letters and `count`.
        intermediate: The dotted path of the layer's intermediate that is captured, such as
            "attn.q": the names of the modules that contain it, then its own name.
        modules: Inputs and outputs of Hugging Face modules that have the same values.
        aliases: Other names in TransformerLens.
        at_end: For a kind that exists once, whether it comes after the last layer rather than
            before the first.
        types: Words of ModelConfig.layer_types. A layer has a hook of this kind if its type
            contains one of these words. () if all layers have one.
        dtype: The dtype of its values if they are not activations, whose dtype the user chooses;
            None for activations.
        count: A factor of the width without a letter, such as the number of most likely tokens in
            `logits.top_ids`; otherwise 1.
    """

    name: str
    letters: str
    intermediate: str
    modules: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    at_end: bool = False
    types: tuple[str, ...] = ()
    dtype: str | None = None
    count: int = 1

    @property
    def is_prediction(self) -> bool:
        """Whether the values come from the logits."""
        return self.intermediate.startswith(PREDICTED)

    @property
    def grows(self) -> bool:
        """Whether the width grows with the tokens of a row."""
        return "S" in self.letters

    @property
    def large(self) -> bool:
        """Whether the values are so large that the kind has to be asked for by name."""
        return self.grows or "V" in self.letters

    def width(self, sizes: Mapping[str, int]) -> int:
        """Returns the width, which is how many numbers a token has.

        Args:
            sizes: Letter -> size in the model.
        """
        return math.prod(sizes[letter] for letter in self.letters) * self.count

    def form(self, sizes: Mapping[str, int], dtype: Any) -> Form:
        """Returns the form of the values.

        Args:
            sizes: Letter -> size in the model.
            dtype: The dtype of activations; or "float8", for the form in which they are stored.
        """
        of_activations = FLOAT8 if str(dtype) == FLOAT8 else np.dtype(dtype).name
        return Form(self.width(sizes), self.dtype or of_activations)

    def exists_in(self, type_: str) -> bool:
        """Returns whether layers of a type have the kind."""
        return not self.types or not {*self.types}.isdisjoint(type_.split())

    def layers(self, depth: int, types: Sequence[str] = ()) -> Sequence[int]:
        """Returns the layers of a model that have a hook of this kind.

        A hook that exists once in the model counts as a hook of the last layer if it comes after
        the layers, and as a hook of the first layer if it comes before them.

        Args:
            depth: The number of layers.
            types: The type of each layer; () to return layers of every type.
        """
        if "{}" in self.name:
            return [k for k in range(depth) if not types or self.exists_in(types[k])]
        return range(depth - 1, depth) if self.at_end else range(1)


class Hook(NamedTuple):
    """A kind of hook at one layer. Hooks sort in the order in which they are computed.

    Attributes:
        layer: The number of the layer.
        order: The index of the kind in the hook table, which has the order in which a layer
            computes them.
        kind: The kind.
    """

    layer: int
    order: int
    kind: HookKind

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.kind.name.format(self.layer)

    @property
    def module(self) -> str | None:
        """The Hugging Face module's input or output; None if no module has it."""
        return self.kind.modules[0].format(self.layer) if self.kind.modules else None

    def names(self) -> list[str]:
        """Returns all of its names, the canonical one first."""
        names = self.kind.name, *self.kind.aliases, *self.kind.modules
        return [name.format(self.layer) for name in names]

    def matching(self, pattern: str) -> list[str]:
        """Returns the names of the hook that a glob matches.

        A hook of a large kind matches only if the glob is one of its names, or ends in the last
        part of its canonical name.

        Args:
            pattern: The glob.
        """
        names = self.names()
        if self.kind.large and pattern not in names:
            if pattern.rpartition(".")[2] != self.name.rpartition(".")[2]:
                return []
        return [name for name in names if fnmatchcase(name, pattern)]

    def facts(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Returns what metadata.json records of the hook besides its canonical name.

        Args:
            sizes: Letter -> size in the model.

        Returns:
            A dict with the keys `module`, `aliases` and `width`; `dtype` if the values are not
            activations; `heads` and `head_size` if they are flat values per head; `heads` and
            `keys` for a pattern.
        """
        facts: dict[str, Any] = {"module": self.module, "aliases": self.names()[1:]}
        facts["width"] = self.kind.width(sizes)
        if self.kind.dtype is not None:
            facts["dtype"] = self.kind.dtype
        heads, size = self.kind.letters[:-1], self.kind.letters[-1:]
        if size and size in HEAD_SIZES:
            facts["heads"] = math.prod(sizes[letter] for letter in heads)
            facts["head_size"] = sizes[size]
        if self.kind.grows:
            facts["heads"] = sizes[self.kind.letters[0]]
            facts["keys"] = sizes["S"]
        return facts


@dataclass(frozen=True)
class HookTable:
    """The kinds of hooks of a model, or of a family.

    Attributes:
        kinds: The kinds, in the order in which a layer computes them.
        types: The type of each layer of the model; () if layers of every type are meant.
        vocabulary: The number of tokens in the model's vocabulary; 0 if it is not known.
    """

    kinds: tuple[HookKind, ...]
    types: tuple[str, ...] = ()
    vocabulary: int = 0

    def without_predictions(self) -> "HookTable":
        """Returns the table of a model without a head, which has no losses and logits."""
        kinds = tuple(kind for kind in self.kinds if not kind.is_prediction)
        return replace(self, kinds=kinds)

    def all_hooks(self, depth: int, large: bool = False) -> list[Hook]:
        """Returns all hooks of a model in the order in which they are computed.

        Args:
            depth: The number of layers.
            large: Whether to include hooks that have to be asked for by name.
        """
        return sorted(
            Hook(layer, order, kind)
            for order, kind in enumerate(self.kinds)
            for layer in kind.layers(depth, self.types)
            if large or not kind.large
        )

    def of_layers(self, layers: Sequence[int], activation_type: str, depth: int) -> list[Hook]:
        """Returns one hook of each layer.

        Args:
            layers: The numbers of the layers.
            activation_type: A key of ACTIVATION_TYPES.
            depth: The number of layers of the model.

        Raises:
            InputError: A layer is outside 0 .. depth - 1, or has no such hook.
        """
        for layer in layers:
            if not 0 <= layer < depth:
                raise InputError(
                    f"--layers_to_extract {layer}: the model has layers 0 to {depth - 1}"
                )
        names = [f"blocks.{layer}.{ACTIVATION_TYPES[activation_type]}" for layer in layers]
        return list(self.matching(names, depth).values())

    def matching(self, patterns: Sequence[str], depth: int) -> dict[str, Hook]:
        """Returns the hooks that globs match, in the order in which they are computed.

        A glob that matches several names of a hook stands for the canonical one, or else for the
        first of them. Of several globs that match a hook, the first one counts.

        Args:
            patterns: The globs.
            depth: The number of layers of the model.

        Returns:
            Name by which a hook was asked for -> the hook.

        Raises:
            InputError: A glob matches nothing.
        """
        hooks = self.all_hooks(depth, large=True)
        names: dict[Hook, str] = {}
        for pattern in patterns:
            matches = {hook: hook.matching(pattern) for hook in hooks}
            if not any(matches.values()):
                raise self._refusal(pattern, depth)
            for hook, matching in matches.items():
                if matching:
                    names.setdefault(hook, matching[0])
        return {names[hook]: hook for hook in sorted(names)}

    def _refusal(self, pattern: str, depth: int) -> InputError:
        """Returns the error for a glob that matches no hook, with a hint if there is one."""
        of_any_type = HookTable(self.kinds).all_hooks(depth, large=True)
        for hook in of_any_type:
            if hook.matching(pattern):
                return InputError(
                    f"--hook_names {pattern}: layer {hook.layer} is of type "
                    f"{self.types[hook.layer]} and has no such hook; --list_hooks shows their names"
                )
        hooks = self.all_hooks(depth, large=True)
        for hook in hooks:
            names = hook.names()
            if "V" in hook.kind.letters and any(fnmatchcase(name, pattern) for name in names):
                return InputError(
                    f"--hook_names {pattern}: matches only {hook.name}, which takes "
                    f"{2 * self.vocabulary:,} bytes per token in bfloat16; if you want it, ask for "
                    f"{hook.name}"
                )
        hint = near_miss(pattern, [name for hook in hooks for name in hook.names()])
        return InputError(
            f"--hook_names {pattern}: matches no hook of a model with layers 0 to "
            f"{depth - 1}{hint}; --list_hooks shows their names"
        )


# The first column of HOOK_KINDS determines which layers have a kind of hook. It contains one of
# these words, or a word of the layers' types in ModelConfig (ATTENTION, LINEAR, DENSE or SPARSE).
# `_types_with` maps each word to types of layers.
EVERY, NORMED, GATED, SHARED = "every", "normed", "gated", "shared"
APART, INTERLEAVED = "apart", "interleaved"
# The kinds of hooks of layers, in the order in which a layer computes them. The columns are: which
# layers have the kind, its name, the letters of its width, the intermediate, its Hugging Face
# modules, its aliases. Several names in a column are separated by spaces. Names omit the prefix of
# the layer, which is "blocks.{}." in the first and the last column of names and "model.layers.{}."
# in the column of modules.
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

OWN_DTYPES = {"mlp.chosen": "int32"}  # of intermediates that are not activations


def hook_table(config: ModelConfig, top_logits: int = DEFAULT_TOP_LOGITS) -> HookTable:
    """Returns the hooks of a model.

    Args:
        config: The configuration of the model.
        top_logits: The number of most likely next tokens that `logits.top_ids` has.
    """
    kinds = tuple(
        kind
        for kind in _kinds(_types_with(config), top_logits)
        if any(kind.exists_in(type_) for type_ in config.layer_types)
    )
    return HookTable(kinds, config.layer_types, config.vocab_size)


def _types_with(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Returns which layers of a model have the kinds of hooks in HOOK_KINDS.

    Returns:
        Word in the first column of HOOK_KINDS -> words of the types of layers. A layer has the
        kinds of hooks if its type contains one of these words; () means all layers. Words for
        which the model has no layer are left out.
    """
    delta, experts = config.delta, config.experts
    attention = () if delta is None else (ATTENTION,)
    types: dict[str, tuple[str, ...]] = {EVERY: (), ATTENTION: attention}
    types[DENSE] = () if experts is None else (DENSE,)
    if config.qk_norm:
        types[NORMED] = attention
    if config.q_gate:
        types[GATED] = attention
    if delta is not None:
        types[LINEAR] = (LINEAR,)
        # A module of Hugging Face has a projection of its own only if it is stored by itself.
        types[INTERLEAVED if delta.interleaved else APART] = (LINEAR,)
    if experts is not None:
        types[SPARSE] = (SPARSE,)
        if experts.shared_width:
            types[SHARED] = (SPARSE,)
    return types


def _kinds(types: Mapping[str, tuple[str, ...]], top_logits: int) -> list[HookKind]:
    """Returns the kinds of hooks, in the order in which they are computed.

    Args:
        types: The layers that have a kind; see `_types_with`.
        top_logits: The number of most likely next tokens that `logits.top_ids` has.
    """
    kinds = [HookKind("hook_embed", "D", "resid_pre", ("model.embed_tokens.output",))]
    for layers, name, letters, intermediate, modules, aliases in HOOK_KINDS:
        if layers not in types:
            continue
        if types[layers] == (DENSE,):  # `mlp.gate` is the router of other layers
            aliases = re.sub(r"mlp\.(gate|in|out)\.", r"mlp.dense_\1.", aliases)
        kinds.append(
            HookKind(
                f"blocks.{{}}.{name}",
                letters,
                intermediate,
                tuple(f"model.layers.{{}}.{module}" for module in modules.split()),
                tuple(f"blocks.{{}}.{alias}" for alias in aliases.split()),
                types=types[layers],
                dtype=OWN_DTYPES.get(intermediate),
            )
        )
    end = partial(HookKind, at_end=True)
    kinds += [
        end("ln_final.hook_normalized", "D", "final.normalized"),
        end("ln_final.hook_out", "D", "final.out", ("model.norm.output",)),
        end("logits", "V", "predicted.logits", ("lm_head.output",), ("unembed.hook_out",)),
        end("logits.top_ids", "", "predicted.top_ids", dtype="int32", count=top_logits),
        end("logits.top_logprobs", "", "predicted.top_logprobs", dtype="float32", count=top_logits),
        end("loss", "", "predicted.loss", dtype="float32"),
        end("entropy", "", "predicted.entropy", dtype="float32"),
    ]
    return kinds


# The hooks of Qwen2, the plainest family.
HOOKS = HookTable(tuple(_kinds({EVERY: (), ATTENTION: (), DENSE: ()}, DEFAULT_TOP_LOGITS)))
