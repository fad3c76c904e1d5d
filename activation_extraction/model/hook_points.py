"""The hook points of a dense decoder: the table that families of models begin with.

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
it is multiplied with the sigmoid of `mlp.shared_expert_gate.hook_out`.
"""

from dataclasses import replace

from activation_extraction.model.hooks import HookKind, HookTable
from activation_extraction.model.moe_config import DENSE, SPARSE


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
        block_kind("attn.hook_q", "NH", "attn.q", "self_attn.q_proj.output", "attn.q.hook_out"),
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
    dense = [
        replace(kind, types=(DENSE,)) if kind.value.startswith("mlp.") else kind
        for kind in table.kinds
    ]
    out = _sparse("hook_mlp_out", "D", "mlp.out", "mlp.output", "mlp.hook_out")
    return HookTable(tuple(dense)).after("blocks.{}.hook_mlp_out", *kinds, out)
