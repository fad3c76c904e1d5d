"""Defines tiny models of every family, irregular where released models are regular."""

from typing import Any

from delta_reference import QWEN3_5, QWEN3_NEXT, VISION, delta, experts

YARN = dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=64)
YARN_256 = dict(rope_parameters=YARN, max_position_embeddings=256)
LLAMA3 = dict(rope_type="llama3", factor=3.0, original_max_position_embeddings=64)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
SLIDING = dict(use_sliding_window=True, sliding_window=21, max_window_layers=2)
TIED = dict(tie_word_embeddings=True)
QWEN3: dict[str, Any] = dict(model_type="qwen3")
LLAMA: dict[str, Any] = dict(model_type="llama", max_position_embeddings=512)
MOE: dict[str, Any] = experts(6, 2, 40, model_type="qwen3_moe", norm_topk_prob=True)
SHARED = MOE | dict(model_type="qwen2_moe", shared_expert_intermediate_size=72)
# Encoders beside the language model. The placeholders of their inputs are among the token ids of
# the tests.
DEEP_VISION: dict[str, Any] = VISION | dict(deepstack_visual_indexes=[0])
AUDIO = dict(encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, d_model=16)
AUDIO |= dict(output_dim=64, num_mel_bins=16, n_window=4, downsample_hidden_size=8)
PLACEHOLDERS = dict(image_token_id=7, video_token_id=8, audio_token_id=9)


def text(**more: Any) -> dict[str, Any]:
    """Returns the part of a config.json that describes the language model."""
    sizes = dict(vocab_size=211, hidden_size=64, intermediate_size=112, num_hidden_layers=3)
    return sizes | dict(num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6) | more


def mrope(*sections: int, **more: Any) -> dict[str, Any]:
    rope = dict(rope_type="default", rope_theta=5e6, mrope_section=sections, mrope_interleaved=True)
    return dict(rope_parameters=rope | more)


def vision(model_type: str, part: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = dict(model_type=model_type, text_config=part, vision_config=DEEP_VISION)
    return named | PLACEHOLDERS | more


def omni(model_type: str, part: dict[str, Any]) -> dict[str, Any]:
    thinker = dict(text_config=part, vision_config=DEEP_VISION, audio_config=AUDIO) | PLACEHOLDERS
    return dict(model_type=model_type, thinker_config=thinker, enable_audio_output=False)


SECTIONED = dict(rope_theta=1e6, rope_scaling=dict(type="mrope", mrope_section=[2, 3, 3]))
IN_TURN = dict(mrope_section=[4, 4, 4], mrope_interleaved=True)
VL_MOE = text(head_dim=32, num_hidden_layers=4, **experts(6, 2, 32), **mrope(6, 5, 5))
BESIDE_OTHERS: dict[str, dict[str, Any]] = {
    "qwen2_vl_flat_sliding": text(model_type="qwen2_vl", vision_config=VISION, as_released=True)
    | (SECTIONED | SLIDING | PLACEHOLDERS),
    "qwen2_5_vl_tied_yarn": vision(
        "qwen2_5_vl",
        text(num_key_value_heads=1, max_position_embeddings=256, **mrope(2, 2, 4, **YARN)),
        **TIED,
    ),
    "qwen2_5_omni": omni("qwen2_5_omni", text(**SLIDING | TIED, **mrope(2, 3, 3))),
    "qwen3_vl_tied_biased": vision(
        "qwen3_vl",
        text(head_dim=24, attention_bias=True, rope_theta=5e6, rope_scaling=IN_TURN),
        as_released=True,
        **TIED,
    ),
    # One of the two tensors of fused experts is square: here gate_up_proj, below down_proj.
    "qwen3_vl_moe": vision("qwen3_vl_moe", VL_MOE, as_released=True),
    "qwen3_vl_moe_some_dense_tied": vision(
        "qwen3_vl_moe",
        # norm_topk_prob=False is ignored in this family.
        VL_MOE | experts(5, 3, 64, decoder_sparse_step=2, norm_topk_prob=False),
        **TIED,
    ),
    "qwen3_omni_moe_not_renormalised": omni(
        "qwen3_omni_moe", VL_MOE | dict(norm_topk_prob=False, mlp_only_layers=[0], head_dim=24)
    ),
}
TINY: dict[str, dict[str, Any]] = {
    "two_kv_heads_tied": TIED | dict(num_key_value_heads=2),
    "sharded": TIED | dict(num_key_value_heads=4, vocab_size=257, head_dim=24),
    "deep_llama3_sliding": SLIDING
    | dict(num_key_value_heads=1, num_hidden_layers=7)
    | dict(rope_parameters=LLAMA3 | dict(rope_theta=1e6)),
    "qwen3_tied": QWEN3 | TIED | dict(num_key_value_heads=2, head_dim=64),
    "qwen3_biased_yarn_sliding": QWEN3
    | dict(num_key_value_heads=1, head_dim=128, attention_bias=True, max_position_embeddings=256)
    | dict(rope_parameters=YARN | dict(attention_factor=1.3, beta_fast=16.0, truncate=False))
    | dict(use_sliding_window=True, sliding_window=70)
    | dict(layer_types=["sliding_attention", "full_attention"] * 2),
    "llama_tied": LLAMA
    | TIED
    | dict(num_key_value_heads=2, rope_parameters=LLAMA3 | dict(rope_theta=1e6)),
    "llama_biased": LLAMA | dict(num_key_value_heads=1, head_dim=24, attention_bias=True),
    **QWEN3_5,
    **QWEN3_NEXT,
    **BESIDE_OTHERS,
    "qwen3_moe": MOE | dict(num_key_value_heads=2, head_dim=64),
    "qwen3_moe_some_dense_tied": (MOE | SLIDING | TIED | YARN_256 | experts(5, 3, 40))
    | dict(num_key_value_heads=1, head_dim=128, attention_bias=True, norm_topk_prob=False)
    | dict(decoder_sparse_step=2, mlp_only_layers=[3], num_hidden_layers=6),
    "qwen2_moe": SHARED | dict(num_key_value_heads=2, norm_topk_prob=False),
    "qwen2_moe_unbiased_last_dense_tied": (SHARED | SLIDING | TIED | experts(3, 3, 40))
    | dict(num_key_value_heads=1, decoder_sparse_step=3, qkv_bias=False),
}

QUICK_REFERENCE = "two_kv_heads_tied"  # the only model that `make test-quick` uses
OPTIMIZED = QUICK_REFERENCE, "qwen3_5_moe"  # models whose programs are compiled as in a run

# Every second layer has a gated delta net.
TEXT = delta(4, 8, 16, 16, model_type="qwen3_5_text", full_attention_interval=2, head_dim=64)
TEXT |= dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, vocab_size=211)
TEXT |= dict(num_attention_heads=4, num_key_value_heads=2)
MOE_TEXT = TEXT | experts(6, 2, 40, model_type="qwen3_5_moe_text")
MOE_TEXT |= dict(shared_expert_intermediate_size=64)
INTERLEAVED = MOE_TEXT | dict(model_type="qwen3_next")
