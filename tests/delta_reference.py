"""Tiny Qwen3.5 models, and what transformers computes in a gated delta net outside of modules."""

from typing import Any

import numpy as np

VISION = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    out_hidden_size=64,
    num_position_embeddings=16,
)

# Outputs of a gated delta net are often close to 0: its norm would amplify their rounding, were eps
# as small as usual.
QWEN3_5: dict[str, dict[str, Any]] = {
    "qwen3_5_more_values": dict(
        model_type="qwen3_5_text",
        num_key_value_heads=2,
        head_dim=64,
        num_hidden_layers=4,
        full_attention_interval=3,
        rms_norm_eps=1e-2,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
    ),
    "qwen3_5_tied_beside_vision": dict(
        model_type="qwen3_5",
        tie_word_embeddings=True,
        vision_config=VISION,
        text_config=dict(
            vocab_size=211,
            hidden_size=64,
            intermediate_size=112,
            num_hidden_layers=3,
            rms_norm_eps=1e-2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=256,
            layer_types=["full_attention", "linear_attention", "full_attention"],
            linear_num_key_heads=1,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=16,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3_5_linear_at_the_end": dict(
        model_type="qwen3_5_text",
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        rms_norm_eps=1e-2,
        rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.5),
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=3,
    ),
}

_NESTED = QWEN3_5["qwen3_5_tied_beside_vision"]
QWEN3_5 |= {
    "qwen3_5_moe": QWEN3_5["qwen3_5_more_values"]
    | dict(
        model_type="qwen3_5_moe_text",
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=72,
    ),
    "qwen3_5_moe_tied_beside_vision": _NESTED
    | dict(
        model_type="qwen3_5_moe",
        text_config=_NESTED["text_config"]
        | dict(
            num_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
        ),
    ),
    "qwen3_5_moe_linear_at_the_end": QWEN3_5["qwen3_5_linear_at_the_end"]
    | dict(
        model_type="qwen3_5_moe_text",
        num_experts=9,
        num_experts_per_tok=4,
        moe_intermediate_size=56,
        shared_expert_intermediate_size=17,
    ),
}


def inside_delta_net(model: Any, config: Any, block: str, values: dict[str, Any]) -> dict[str, Any]:
    """Name of a hook -> its value. block: "blocks.K."; values: of the hooks that modules have."""
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn

    layer = int(block.split(".")[1])
    module, sizes = model.layers[layer].linear_attn, config.sizes
    keys = sizes["J"] * sizes["C"]
    parts = [keys, keys, sizes["J"] * sizes["G"] * sizes["Z"]]
    inputs = values[f"{block}ln1.hook_out"]
    projected = module.in_proj_qkv(inputs)
    weight = module.conv1d.weight.squeeze(1)
    mixed = causal_conv1d_fn(projected.mT, weight, activation="silu").mT
    found = {
        f"{name}{when}": value
        for when, tensor in (("_pre_conv", projected), ("", mixed))
        for name, value in zip("qkv", tensor.split(parts, dim=-1), strict=True)
    }
    found["beta"] = values[f"{block}linear_attn.hook_beta_logit"].sigmoid()
    step = torch.nn.functional.softplus(module.in_proj_a(inputs).float() + module.dt_bias)
    found["log_decay"] = -module.A_log.float().exp() * step
    return {f"{block}linear_attn.hook_{name}": value for name, value in found.items()}


def untouched(same: np.ndarray, taps: int) -> np.ndarray:
    """The tokens in `same`, (B, T), whose convolution of so many taps takes no others."""
    found = same.copy()
    for distance in range(1, taps):
        found[:, distance:] &= same[:, :-distance]
    return found
