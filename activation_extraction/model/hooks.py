"""A hook point is a kind of hook at a layer; this module names them and finds those asked for.

Names and meanings are those of TransformerLens with unprocessed weights. A norm's `hook_normalized`
comes before its weight and `hook_out` after it; `hook_q`, `hook_k` and `hook_v` are the
projections, which come before any norm on them and before the rotary embedding; `hook_rot_q` and
`hook_rot_k` come after both; `hook_resid_post` of the last layer comes before the final norm,
unlike Hugging Face's last hidden state. Values per head are flat: (tokens, heads * head size).
`hook_pattern` is (tokens, heads * tokens of a row): how much each head attends to position 0 of the
token's own sample, to position 1 and so on; positions that the token does not see have 0.

Layers with experts have others after `ln2.hook_out`: `mlp.gate.hook_out` is the router's logits,
`mlp.hook_expert_weights` the weight of every expert (0 for those that a token does not go through),
`mlp.hook_expert_indices` the numbers of the chosen ones, int32, the largest weight first,
`mlp.experts.hook_out` the weighted sum of what they give. `mlp.shared_expert.hook_out` comes before
it is multiplied by the sigmoid of `mlp.shared_expert_gate.hook_out`. Since `mlp.gate` is the router
there, the matrices of a dense layer in such a model are called `mlp.dense_gate` and so on.

A model has a few more hooks after its last layer (predictions.py). `loss` is that of a token given
the tokens before it, in nats, and NaN for the first token of a sample. `entropy`, `logits`,
`logits.top_ids` and `logits.top_logprobs` describe the prediction of the token after it.

A hook has one canonical name, TransformerLens's, and may have aliases there and as an input or
output of a Hugging Face module. Nothing here computes; the hooked model captures the values.
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
ACTIVATION_TYPES = {"residual": "hook_resid_post", "attn": "hook_attn_out", "mlp": "hook_mlp_out"}


class Form(NamedTuple):
    """The form of a hook's values. Those of one form share an array while they are captured."""

    width: int  # numbers per token
    dtype: str  # of NumPy's, or "float8"

    @property
    def bytes(self) -> int:
        return token_bytes(self.width, self.dtype)


@dataclass(frozen=True)
class HookKind:
    """A kind of hook, which is one row of a hook table.

    name: the canonical one; aliases: other names in TransformerLens; modules: inputs and outputs of
    Hugging Face modules. "{}" stands for the layer; a name without it exists once in a model.
    letters: the axes of one token's value, as in the model file, and S for the tokens of a row;
    the product of their sizes and of `count` is the width. Kinds with S or V are large, and have to
    be asked for by name. value: the intermediate of a layer that is captured. at_end: whether a
    kind that exists once comes after the last layer, rather than before the first. types: words of
    the configuration's layer_types; the layers that one of them describes have the kind, and all
    layers have it if there are none. dtype: the kind's own; None for activations, whose dtype the
    user chooses.
    """

    name: str
    letters: str
    value: str
    modules: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    at_end: bool = False
    types: tuple[str, ...] = ()
    dtype: str | None = None
    count: int = 1

    def width(self, sizes: Mapping[str, int]) -> int:
        """Returns how many numbers a token has. sizes: letter -> size, of the model."""
        return math.prod(sizes[letter] for letter in self.letters) * self.count

    def form(self, sizes: Mapping[str, int], dtype: Any) -> Form:
        """Returns the form of the values. sizes: as for `width`; dtype: of activations, or "float8"
        for how they are stored."""
        own = FLOAT8 if str(dtype) == FLOAT8 else np.dtype(dtype).name
        return Form(self.width(sizes), self.dtype or own)

    def exists_in(self, type_: str) -> bool:
        return not self.types or not {*self.types}.isdisjoint(type_.split())

    @property
    def grows(self) -> bool:
        return "S" in self.letters

    @property
    def large(self) -> bool:
        """Returns whether the kind has to be asked for by name."""
        return self.grows or "V" in self.letters

    def layers(self, depth: int, types: Sequence[str] = ()) -> Sequence[int]:
        """Returns the layers of a model that have a hook of this kind. types: of each layer."""
        if "{}" in self.name:
            return [k for k in range(depth) if not types or self.exists_in(types[k])]
        return range(depth - 1, depth) if self.at_end else range(1)


class Hook(NamedTuple):
    """A kind of hook at one layer. Hooks sort in the order in which they are computed."""

    layer: int
    order: int  # of the kind within a layer: its index in the family's table
    kind: HookKind

    @property
    def name(self) -> str:
        return self.kind.name.format(self.layer)

    @property
    def module(self) -> str | None:
        """Returns the Hugging Face module's input or output; None if no module has it."""
        return self.kind.modules[0].format(self.layer) if self.kind.modules else None

    def matching(self, pattern: str) -> list[str]:
        """Returns the hook's names that a glob matches.

        A hook of a large kind matches only if the glob is one of its names, or ends in the kind's
        own name.
        """
        names = [name for name in self.names() if fnmatchcase(name, pattern)]
        named = pattern in names or pattern.rpartition(".")[2] == self.name.rpartition(".")[2]
        return names if named or not self.kind.large else []

    def names(self) -> list[str]:
        """Returns every name, the canonical one first."""
        names = self.kind.name, *self.kind.aliases, *self.kind.modules
        return [name.format(self.layer) for name in names]

    def facts(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Returns what metadata.json records of the hook besides its canonical name."""
        facts: dict[str, Any] = {"module": self.module, "aliases": self.names()[1:]}
        facts["width"] = self.kind.width(sizes)
        if self.kind.dtype is not None:
            facts["dtype"] = self.kind.dtype
        heads, size = self.kind.letters[:-1], self.kind.letters[-1:]
        if size and size in HEAD_SIZES:
            facts |= {"heads": math.prod(sizes[axis] for axis in heads), "head_size": sizes[size]}
        if self.kind.grows:
            facts |= {"heads": sizes[self.kind.letters[0]], "keys": sizes["S"]}
        return facts


@dataclass(frozen=True)
class HookTable:
    """The kinds of hooks of a family, in the order in which a layer computes them.

    types: of each layer of a model, where that decides which kinds the layer has. vocabulary: the
    number of tokens in the model's vocabulary, 0 if it is not known.
    """

    kinds: tuple[HookKind, ...]
    types: tuple[str, ...] = ()
    vocabulary: int = 0

    def without_predictions(self) -> "HookTable":
        """Returns the table of a model without a head, which has no losses and logits."""
        kinds = (kind for kind in self.kinds if not kind.value.startswith("predicted."))
        return replace(self, kinds=tuple(kinds))

    def all_hooks(self, depth: int, large: bool = False) -> list[Hook]:
        """Returns all hooks of a model with `depth` layers, in their order.

        large: whether to include those that have to be asked for by name.
        """
        return sorted(
            Hook(layer, order, kind)
            for order, kind in enumerate(self.kinds)
            for layer in kind.layers(depth, self.types)
            if large or not kind.large
        )

    def of_layers(self, layers: Sequence[int], activation_type: str, depth: int) -> list[Hook]:
        """Returns one hook per layer. Raises InputError for a layer outside 0 .. depth - 1."""
        if outside := [layer for layer in layers if not 0 <= layer < depth]:
            raise InputError(
                f"--layers_to_extract {outside[0]}: the model has layers 0 to {depth - 1}"
            )
        wanted = [f"blocks.{layer}.{ACTIVATION_TYPES[activation_type]}" for layer in layers]
        return list(self.matching(wanted, depth).values())

    def matching(self, patterns: Sequence[str], depth: int) -> dict[str, Hook]:
        """Returns the hooks that any glob matches, by the name that was asked for, in their order.

        A glob that matches several names of a hook asks for the canonical one, or else for the
        first of them. Raises InputError for a glob that matches nothing.
        """
        asked, every = dict[Hook, str](), self.all_hooks(depth, large=True)
        for pattern in patterns:
            matches = {hook: names[0] for hook in every if (names := hook.matching(pattern))}
            if not matches:
                raise self._refusal(pattern, depth)
            asked = matches | asked
        return {asked[hook]: hook for hook in sorted(asked)}

    def _refusal(self, pattern: str, depth: int) -> InputError:
        for hook in HookTable(self.kinds).all_hooks(depth, large=True):  # in layers of any type
            if hook.matching(pattern):
                return InputError(
                    f"--hook_names {pattern}: layer {hook.layer} is of type "
                    f"{self.types[hook.layer]} and has no such hook; --list_hooks shows their names"
                )
        every = self.all_hooks(depth, large=True)
        for hook in every:
            if "V" in hook.kind.letters and any(fnmatchcase(n, pattern) for n in hook.names()):
                return InputError(
                    f"--hook_names {pattern}: matches only {hook.name}, which takes "
                    f"{2 * self.vocabulary:,} bytes per token in bfloat16; if you want it, ask for "
                    f"{hook.name}"
                )
        known = [name for hook in every for name in hook.names()]
        return InputError(
            f"--hook_names {pattern}: matches no hook of a model with layers 0 to "
            f"{depth - 1}{near_miss(pattern, known)}; --list_hooks shows their names"
        )


# The kinds of hooks of layers, in the order in which a layer computes them. The columns are: which
# layers have the kind (see `hook_table`), its name, the letters of its width, the intermediate, its
# Hugging Face modules, its aliases. The beginning that all names share, with "{}", is left out.
EVERY, NORMED, GATED, SHARED = "every", "normed", "gated", "shared"
APART, INTERLEAVED = "apart", "interleaved"  # a delta net's projections
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
    """Returns the hooks of the model with this configuration.

    top_logits: how many of the most likely next tokens `logits.top_ids` has.
    """
    delta, experts = config.delta, config.experts
    attention = (ATTENTION,) if delta is not None else ()  # () if all layers have it
    dense = (DENSE,) if experts is not None else ()
    types: dict[str, tuple[str, ...]] = {EVERY: (), ATTENTION: attention, DENSE: dense}
    if delta is not None:
        types |= dict.fromkeys((LINEAR, INTERLEAVED if delta.interleaved else APART), (LINEAR,))
    types |= {NORMED: attention} if config.qk_norm else {}
    types |= {GATED: attention} if config.q_gate else {}
    if experts is not None:
        types |= {SPARSE: (SPARSE,)} | ({SHARED: (SPARSE,)} if experts.shared_width else {})
    own, every = config.layer_types, _table(types, top_logits).kinds
    kinds = tuple(kind for kind in every if any(map(kind.exists_in, own)))
    return HookTable(kinds, own, config.vocab_size)


def _table(types: Mapping[str, tuple[str, ...]], top_logits: int = DEFAULT_TOP_LOGITS) -> HookTable:
    """Builds a table. types: a row's first column -> types of the layers that have the kind."""
    kinds = [HookKind("hook_embed", "D", "resid_pre", ("model.embed_tokens.output",))]
    for layers, name, letters, value, modules, aliases in HOOK_KINDS:
        if layers not in types:
            continue
        if types[layers] == (DENSE,):  # `mlp.gate` is the router of other layers
            aliases = re.sub(r"mlp\.(gate|in|out)\.", r"mlp.dense_\1.", aliases)
        kinds.append(
            HookKind(
                f"blocks.{{}}.{name}",
                letters,
                value,
                tuple(f"model.layers.{{}}.{module}" for module in modules.split()),
                tuple(f"blocks.{{}}.{alias}" for alias in aliases.split()),
                types=types[layers],
                dtype=OWN_DTYPES.get(value),
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
    return HookTable(tuple(kinds))


HOOKS = _table({EVERY: (), ATTENTION: (), DENSE: ()})  # the hooks of Qwen2, the plainest family
