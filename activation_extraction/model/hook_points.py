"""The hook points of a dense decoder: the table that families of models begin with.

`hybrid` makes of it the table of a model in which some layers have a gated delta net in place of
attention. Layers of each type then have kinds of their own.

A hook point is a kind of hook at a layer. Names and meanings are those of TransformerLens with
unprocessed weights. A norm's `hook_normalized` comes before its weight and `hook_out` after it;
`hook_q`, `hook_k` and `hook_v` are the projections, which come before any norm on them and before
the rotary embedding; `hook_rot_q` and `hook_rot_k` come after both; `hook_resid_post` of the last
layer comes before the final norm, unlike Hugging Face's last hidden state. Values per head are
flat: (tokens, heads * head size).
`hook_pattern` is (tokens, heads * tokens of a row): how much each head attends to position 0 of the
token's own sample, to position 1 and so on; 0 for positions that the token does not see.

Layers with experts have others after `ln2.hook_out`: `mlp.gate.hook_out` is the router's logits,
`mlp.hook_expert_weights` the weight of every expert (0 for those that a token does not go through),
`mlp.hook_expert_indices` the numbers of the chosen ones, the largest weight first,
`mlp.experts.hook_out` the weighted sum of what they give. `mlp.shared_expert.hook_out` comes before
it is multiplied with the sigmoid of `mlp.shared_expert_gate.hook_out`. Since `mlp.gate` is the
router there, the matrices of a dense layer in such a model are called `mlp.dense_gate` and so on.
"""

import re
from dataclasses import replace

from activation_extraction.model.hooks import HookKind, HookTable
from activation_extraction.model.model_config import ATTENTION, DENSE, LINEAR, SPARSE


def block_kind(
    name: str,
    letters: str,
    value: str,
    modules: str = "",
    aliases: str = "",
    types: tuple[str, ...] = (),
) -> HookKind:
    """A kind of hook of layers. Its names are given without their common beginnings."""
    return HookKind(
        f"blocks.{{}}.{name}",
        letters,
        value,
        tuple(f"model.layers.{{}}.{module}" for module in modules.split()),
        tuple(f"blocks.{{}}.{alias}" for alias in aliases.split()),
        types=types,
    )


HOOKS = HookTable(
    (  # name, letters, intermediate, Hugging Face modules, aliases; in the order of computing
        HookKind("hook_embed", "D", "resid_pre", ("model.embed_tokens.output",)),
        block_kind("hook_resid_pre", "D", "resid_pre", "input", "hook_in ln1.hook_in"),
        block_kind("ln1.hook_normalized", "D", "ln1.normalized"),
        block_kind("ln1.hook_out", "D", "ln1.out", "input_layernorm.output", "attn.hook_in"),
        block_kind("attn.hook_q", "QH", "attn.q", "self_attn.q_proj.output", "attn.q.hook_out"),
        block_kind("attn.hook_k", "KH", "attn.k", "self_attn.k_proj.output", "attn.k.hook_out"),
        block_kind("attn.hook_v", "KH", "attn.v", "self_attn.v_proj.output", "attn.v.hook_out"),
        block_kind("attn.hook_rot_q", "NH", "attn.rot_q"),
        block_kind("attn.hook_rot_k", "KH", "attn.rot_k"),
        block_kind("attn.hook_pattern", "NS", "attn.pattern"),
        block_kind("attn.hook_z", "NH", "attn.z", "self_attn.o_proj.input", "attn.o.hook_in"),
        block_kind(
            "hook_attn_out",
            "D",
            "attn.out",
            "self_attn.output self_attn.o_proj.output",
            "attn.hook_out",
        ),
        block_kind(
            "hook_resid_mid", "D", "resid_mid", "post_attention_layernorm.input", "ln2.hook_in"
        ),
        block_kind("ln2.hook_normalized", "D", "ln2.normalized"),
        block_kind(
            "ln2.hook_out",
            "D",
            "ln2.out",
            "mlp.input post_attention_layernorm.output",
            "mlp.hook_in",
        ),
        block_kind("mlp.hook_pre", "F", "mlp.pre", "mlp.gate_proj.output", "mlp.gate.hook_out"),
        block_kind(
            "mlp.hook_pre_linear", "F", "mlp.pre_linear", "mlp.up_proj.output", "mlp.in.hook_out"
        ),
        block_kind("mlp.hook_post", "F", "mlp.post", "mlp.down_proj.input", "mlp.out.hook_in"),
        block_kind(
            "hook_mlp_out", "D", "mlp.out", "mlp.output mlp.down_proj.output", "mlp.hook_out"
        ),
        block_kind("hook_resid_post", "D", "resid_post", "output", "hook_out"),
        HookKind("ln_final.hook_normalized", "D", "final.normalized", at_end=True),
        HookKind("ln_final.hook_out", "D", "final.out", ("model.norm.output",), at_end=True),
    )
)


def with_normed_heads(table: HookTable) -> HookTable:
    """The table of a family with norms on the queries and keys of each head."""
    return table.after(
        "blocks.{}.attn.hook_v",
        block_kind("attn.hook_q_normed", "NH", "attn.q_normed", "self_attn.q_norm.output"),
        block_kind("attn.hook_k_normed", "KH", "attn.k_normed", "self_attn.k_norm.output"),
    )


def _sparse(name: str, letters: str, value: str, modules: str = "", aliases: str = "") -> HookKind:
    return block_kind(name, letters, value, modules, aliases, (SPARSE,))


EXPERTS = (
    _sparse("mlp.gate.hook_out", "R", "mlp.logits", "mlp.gate.output"),
    _sparse("mlp.hook_expert_weights", "R", "mlp.weights"),
    _sparse("mlp.hook_expert_indices", "X", "mlp.chosen"),
    _sparse("mlp.experts.hook_out", "D", "mlp.routed", "mlp.experts.output"),
)
SHARED_EXPERT = tuple(
    _sparse(f"mlp.{name}", letters, f"mlp.{value}", f"mlp.{module}")
    for name, letters, value, module in (
        ("shared_expert.hook_pre", "P", "shared.pre", "shared_expert.gate_proj.output"),
        ("shared_expert.hook_pre_linear", "P", "shared.pre_linear", "shared_expert.up_proj.output"),
        ("shared_expert.hook_post", "P", "shared.post", "shared_expert.down_proj.input"),
        (
            *("shared_expert.hook_out", "D", "shared.out"),
            "shared_expert.output mlp.shared_expert.down_proj.output",
        ),
        ("shared_expert_gate.hook_out", "U", "shared_share", "shared_expert_gate.output"),
    )
)


def with_experts(table: HookTable, kinds: tuple[HookKind, ...]) -> HookTable:
    """The table of a family with dense and sparse layers. kinds: those of the sparse ones."""
    dense = [_dense(kind) if kind.value.startswith("mlp.") else kind for kind in table.kinds]
    out = _sparse("hook_mlp_out", "D", "mlp.out", "mlp.output", "mlp.hook_out")
    return HookTable(tuple(dense)).after("blocks.{}.hook_mlp_out", *kinds, out)


def _dense(kind: HookKind) -> HookKind:
    """Of a dense layer beside sparse ones, where `mlp.gate` is the router."""
    matrices = re.compile(r"mlp\.(gate|in|out)\.")
    aliases = tuple(matrices.sub(r"mlp.dense_\1.", alias) for alias in kind.aliases)
    return replace(kind, aliases=aliases, types=(DENSE,))


DELTA_NET = (
    ("q_pre_conv", "JC", ""),
    ("k_pre_conv", "JC", ""),
    ("v_pre_conv", "JGZ", ""),
    ("q", "JC", ""),
    ("k", "JC", ""),
    ("v", "JGZ", ""),
    ("beta_logit", "JG", "in_proj_b.output"),
    ("beta", "JG", ""),
    ("log_decay", "JG", ""),
    ("recurrence_out", "JGZ", "norm.input"),
    ("gate_input", "JGZ", "in_proj_z.output"),
    ("out", "D", "output linear_attn.out_proj.output"),
)
RECURRENT = "linear_attn.recurrence_out", "linear_attn.gated", "linear_attn.out"


def hybrid(table: HookTable) -> HookTable:
    """For layers with gated attention or a gated delta net; table: of a model with attention."""
    kinds: list[HookKind] = []
    for kind in table.kinds:
        own = kind.name.removeprefix("blocks.{}.")
        if own == "ln1.hook_out":
            delta = replace(kind, aliases=("blocks.{}.linear_attn.hook_in",), types=(LINEAR,))
            kinds += [replace(kind, types=(ATTENTION,)), delta, *_delta_net()]
        elif own.startswith("attn.") or own == "hook_attn_out":
            kinds.append(replace(kind, types=(ATTENTION,)))
        else:
            kinds.append(kind)
    gate = replace(block_kind("attn.hook_q_gate", "NH", "attn.q_gate"), types=(ATTENTION,))
    return HookTable(tuple(kinds)).after("blocks.{}.attn.hook_v", gate)


def _delta_net() -> list[HookKind]:
    """All kinds inside of a gated delta net; the last but one is what its heads give."""
    kinds = [
        block_kind(
            f"linear_attn.hook_{name}",
            letters,
            f"linear_attn.{name}",
            f"linear_attn.{modules}" if modules else "",
        )
        for name, letters, modules in DELTA_NET
    ]
    gated = block_kind(
        "linear_attn.out_proj.hook_in", "JGZ", "linear_attn.gated", "linear_attn.out_proj.input"
    )
    return [replace(kind, types=(LINEAR,)) for kind in (*kinds[:-1], gated, kinds[-1])]
