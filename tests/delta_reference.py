"""Defines tiny Qwen3.5 and Qwen3-Next models, and the reference for hooks in gated delta nets."""

from typing import Any

import numpy as np

VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2)
VISION |= dict(out_hidden_size=64, num_position_embeddings=16)


def delta(keys: int, values: int, key_size: int, value_size: int, **more: Any) -> dict[str, Any]:
    """Returns the fields of config.json that describe gated delta nets.

    The outputs of delta nets are often close to 0. With the usual small eps, the norm would amplify
    their rounding errors.

    Args:
        keys: The number of heads of queries and keys.
        values: The number of heads of values.
        key_size: The width of a key.
        value_size: The width of a value.
        more: More fields.
    """
    heads = dict(linear_num_key_heads=keys, linear_num_value_heads=values, rms_norm_eps=1e-2)
    sizes = dict(linear_key_head_dim=key_size, linear_value_head_dim=value_size)
    return heads | sizes | more


def experts(count: int, per_token: int, width: int, **more: Any) -> dict[str, Any]:
    sizes = dict(num_experts=count, num_experts_per_tok=per_token, moe_intermediate_size=width)
    return sizes | more


FULL, LINEAR = "full_attention", "linear_attention"
_TEXT = dict(model_type="qwen3_5_text", head_dim=64)
_MORE_VALUES = delta(2, 6, 16, 24, num_key_value_heads=2, num_hidden_layers=4, **_TEXT)
_MORE_VALUES |= dict(full_attention_interval=3)
_BESIDE = delta(1, 4, 32, 16, num_hidden_layers=3, layer_types=[FULL, LINEAR, FULL], head_dim=256)
_BESIDE |= dict(vocab_size=211, hidden_size=64, intermediate_size=112, num_attention_heads=3)
_BESIDE |= dict(num_key_value_heads=1, tie_word_embeddings=True)
_VISION = dict(tie_word_embeddings=True, vision_config=VISION)
_SHARED = "shared_expert_intermediate_size"
_IN_VAIN = {_SHARED: 24, "norm_topk_prob": False}  # transformers ignores norm_topk_prob here
QWEN3_5: dict[str, dict[str, Any]] = {
    "qwen3_5_more_values": _MORE_VALUES,
    "qwen3_5_tied_beside_vision": _VISION | dict(model_type="qwen3_5", text_config=_BESIDE),
    "qwen3_5_moe": _MORE_VALUES | experts(6, 2, 40, model_type="qwen3_5_moe_text", **{_SHARED: 72}),
    "qwen3_5_moe_tied_beside_vision": _VISION
    | dict(model_type="qwen3_5_moe", text_config=_BESIDE | experts(5, 3, 24, **_IN_VAIN)),
}
_NEXT = experts(6, 2, 40, model_type="qwen3_next", **{_SHARED: 72})
_NEXT_YARN = dict(rope_type="yarn", factor=4.0, rope_theta=1e4)
_NEXT_YARN |= dict(original_max_position_embeddings=64, partial_rotary_factor=0.5)
QWEN3_NEXT: dict[str, dict[str, Any]] = {
    "qwen3_next_some_dense_tied": (delta(4, 8, 24, 16) | _NEXT | experts(5, 3, 24))
    | dict(num_key_value_heads=1, head_dim=64, linear_conv_kernel_dim=3, tie_word_embeddings=True)
    | dict(num_hidden_layers=4, layer_types=[FULL, LINEAR, FULL, LINEAR])
    | dict(decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=False, attention_bias=True)
    | dict(rope_parameters=_NEXT_YARN, max_position_embeddings=256),
}


def inside_delta_net(model: Any, config: Any, block: str, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the hooks in a gated delta net whose values no module of transformers returns.

    Args:
        model: The decoder of transformers.
        config: The tool's configuration of the model.
        block: "blocks.K."
        values: The name of a hook -> the values that modules return.
    """
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn

    layer = int(block.split(".")[1])
    module, sizes = model.layers[layer].linear_attn, config.sizes
    keys = sizes["J"] * sizes["C"]
    parts = [keys, keys, sizes["J"] * sizes["G"] * sizes["Z"]]
    inputs = values[f"{block}ln1.hook_out"]
    hooks: dict[str, Any] = {}
    if config.delta.interleaved:
        both = module.in_proj_qkvz(inputs), module.in_proj_ba(inputs)
        *qkvz, b, rates = module.fix_query_key_value_ordering(*both)
        *qkv, gates = (x.flatten(2) for x in qkvz)
        projected = torch.cat(qkv, dim=-1)
        hooks |= {"gate_input": gates, "beta_logit": b}
    else:
        projected, rates = module.in_proj_qkv(inputs), module.in_proj_a(inputs)
        b = values[f"{block}linear_attn.hook_beta_logit"]
    weight = module.conv1d.weight.squeeze(1)
    mixed = causal_conv1d_fn(projected.mT, weight, activation="silu").mT
    for suffix, qkv_tensor in (("_pre_conv", projected), ("", mixed)):
        for name, tensor in zip("qkv", qkv_tensor.split(parts, dim=-1), strict=True):
            hooks[f"{name}{suffix}"] = tensor
    hooks["beta"] = b.sigmoid()
    step = torch.nn.functional.softplus(rates.float() + module.dt_bias)
    hooks["log_decay"] = -module.A_log.float().exp() * step
    return {f"{block}linear_attn.hook_{name}": tensor for name, tensor in hooks.items()}


def untouched(same: np.ndarray, taps: int) -> np.ndarray:
    """Returns a mask of the tokens whose convolution reads only tokens in `same`.

    Args:
        same: A mask of tokens, (B, T).
        taps: The number of taps of the convolution.
    """
    mask = same.copy()
    for distance in range(1, taps):
        mask[:, distance:] &= same[:, :-distance]
    return mask
