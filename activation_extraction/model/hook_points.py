"""The hook points of a dense decoder: the table that families of models begin with.

A hook point is a kind of hook at a layer. Names and meanings are those of TransformerLens with
unprocessed weights. A norm's `hook_normalized` comes before its weight and `hook_out` after it;
`hook_q`, `hook_k` and `hook_v` are the projections, which come before any norm on them and before
the rotary embedding; `hook_rot_q` and `hook_rot_k` come after both; `hook_resid_post` of the last
layer comes before the final norm, unlike Hugging Face's last hidden state. Values per head are
flat: (tokens, heads * head size).
`hook_pattern` is (tokens, heads * tokens of a row): how much each head attends to position 0 of the
token's own sample, to position 1 and so on; 0 for positions that the token does not see.
"""

from activation_extraction.model.hooks import HookKind, HookTable


def block_kind(
    name: str, letters: str, value: str, modules: str = "", aliases: str = ""
) -> HookKind:
    """A kind that every layer has. Its names are given without their common beginnings."""
    return HookKind(
        f"blocks.{{}}.{name}",
        letters,
        value,
        tuple(f"model.layers.{{}}.{module}" for module in modules.split()),
        tuple(f"blocks.{{}}.{alias}" for alias in aliases.split()),
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
