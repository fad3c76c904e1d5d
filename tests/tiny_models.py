"""Tiny models of every family, odd where released ones are regular."""

from typing import Any

from delta_reference import QWEN3_5

YARN = dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=64)
# hidden, MLP, layers, heads, KV heads, vocabulary, and what is special about each.
TINY: dict[str, dict[str, Any]] = {
    "one_kv_head": dict(num_key_value_heads=1),
    "two_kv_heads_tied": dict(num_key_value_heads=2, tie_word_embeddings=True),
    "four_kv_heads": dict(num_key_value_heads=4),
    "wide_heads": dict(num_key_value_heads=2, head_dim=24),
    "sharded": dict(num_key_value_heads=2, tie_word_embeddings=True, vocab_size=257),
    "deep_other_theta": dict(
        num_key_value_heads=1, num_hidden_layers=7, rope_parameters={"rope_theta": 1e6}
    ),
    "linear": dict(
        num_key_value_heads=4,
        head_dim=64,
        rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e5),
    ),
    "yarn_sliding": dict(
        num_key_value_heads=2,
        rope_parameters=YARN,
        max_position_embeddings=256,
        use_sliding_window=True,
        sliding_window=21,
        max_window_layers=2,
    ),
    "qwen3_tied": dict(
        model_type="qwen3", num_key_value_heads=2, head_dim=64, tie_word_embeddings=True
    ),
    "qwen3_biased_yarn": dict(
        model_type="qwen3",
        num_key_value_heads=1,
        head_dim=128,
        attention_bias=True,
        rope_parameters=YARN | dict(attention_factor=1.3, beta_fast=16.0, truncate=False),
        max_position_embeddings=256,
    ),
    "qwen3_wide_heads_sliding": dict(
        model_type="qwen3",
        num_key_value_heads=4,
        head_dim=256,
        use_sliding_window=True,
        sliding_window=70,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    **QWEN3_5,
}

MOE: dict[str, Any] = dict(
    model_type="qwen3_moe",
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=40,
    norm_topk_prob=True,
)
SHARED = MOE | dict(model_type="qwen2_moe", shared_expert_intermediate_size=72)
TINY |= {
    "qwen3_moe": MOE | dict(num_key_value_heads=2, head_dim=64),
    "qwen3_moe_some_dense_tied": MOE
    | dict(
        num_key_value_heads=1,
        head_dim=128,
        attention_bias=True,
        num_experts=5,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        num_hidden_layers=6,
        tie_word_embeddings=True,
    ),
    "qwen3_moe_sliding_yarn": MOE
    | dict(
        num_key_value_heads=4,
        head_dim=256,
        num_experts=9,
        num_experts_per_tok=1,
        use_sliding_window=True,
        sliding_window=70,
        rope_parameters=YARN,
        max_position_embeddings=256,
        mlp_only_layers=[0],
    ),
    "qwen2_moe": SHARED | dict(num_key_value_heads=2, norm_topk_prob=False),
    "qwen2_moe_last_dense_tied": SHARED
    | dict(num_key_value_heads=4, num_experts=7, mlp_only_layers=[3], tie_word_embeddings=True),
    "qwen2_moe_unbiased_sliding": SHARED
    | dict(
        num_key_value_heads=1,
        num_experts=3,
        num_experts_per_tok=3,
        decoder_sparse_step=3,
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=21,
        max_window_layers=2,
    ),
}

QUICK_REFERENCE = "two_kv_heads_tied"  # the one of `make test-quick`
# Models whose programs are compiled as in a run.
OPTIMIZED = {
    *(QUICK_REFERENCE, "qwen2_moe"),
    *("qwen3_tied", "qwen3_moe"),
    *("qwen3_5_more_values", "qwen3_5_moe"),
}

TEXT: dict[str, Any] = {  # Qwen3.5, every second layer with a gated delta net
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 211,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rms_norm_eps": 1e-2,
}
MOE_TEXT = TEXT | dict(
    model_type="qwen3_5_moe_text",
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=40,
    shared_expert_intermediate_size=64,
)
