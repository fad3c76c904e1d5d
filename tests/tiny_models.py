"""Tiny models of every family, odd where released ones are regular."""

from typing import Any

from delta_reference import QWEN3_5, QWEN3_NEXT, delta, experts

YARN = dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=64)
YARN_256 = dict(rope_parameters=YARN, max_position_embeddings=256)
LLAMA3 = dict(rope_type="llama3", factor=3.0, original_max_position_embeddings=64)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
SLIDING = dict(use_sliding_window=True, sliding_window=21, max_window_layers=2)
TIED = dict(tie_word_embeddings=True)
QWEN3: dict[str, Any] = dict(model_type="qwen3")
MOE: dict[str, Any] = experts(6, 2, 40, model_type="qwen3_moe", norm_topk_prob=True)
SHARED = MOE | dict(model_type="qwen2_moe", shared_expert_intermediate_size=72)
TINY: dict[str, dict[str, Any]] = {
    "two_kv_heads_tied": TIED | dict(num_key_value_heads=2),
    "sharded": TIED | dict(num_key_value_heads=2, vocab_size=257, head_dim=24),
    "deep_llama3": dict(
        num_key_value_heads=1, num_hidden_layers=7, rope_parameters=LLAMA3 | dict(rope_theta=1e6)
    ),
    "linear": dict(
        num_key_value_heads=4,
        head_dim=64,
        rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e5),
    ),
    "yarn_sliding": SLIDING | YARN_256 | dict(num_key_value_heads=2),
    "qwen3_tied": QWEN3 | TIED | dict(num_key_value_heads=2, head_dim=64),
    "qwen3_biased_yarn": QWEN3
    | dict(num_key_value_heads=1, head_dim=128, attention_bias=True, max_position_embeddings=256)
    | dict(rope_parameters=YARN | dict(attention_factor=1.3, beta_fast=16.0, truncate=False)),
    "qwen3_wide_heads_sliding": QWEN3
    | dict(num_key_value_heads=4, head_dim=256, use_sliding_window=True, sliding_window=70)
    | dict(layer_types=["sliding_attention", "full_attention"] * 2),
    **QWEN3_5,
    **QWEN3_NEXT,
    "qwen3_moe": MOE | dict(num_key_value_heads=2, head_dim=64),
    "qwen3_moe_some_dense_tied": (MOE | SLIDING | TIED | YARN_256 | experts(5, 3, 40))
    | dict(num_key_value_heads=1, head_dim=128, attention_bias=True, norm_topk_prob=False)
    | dict(decoder_sparse_step=2, mlp_only_layers=[3], num_hidden_layers=6),
    "qwen2_moe": SHARED | dict(num_key_value_heads=2, norm_topk_prob=False),
    "qwen2_moe_unbiased_last_dense_tied": (SHARED | SLIDING | TIED | experts(3, 3, 40))
    | dict(num_key_value_heads=1, decoder_sparse_step=3, qkv_bias=False),
}

QUICK_REFERENCE = "two_kv_heads_tied"  # the one of `make test-quick`
# Models whose programs are compiled as in a run.
OPTIMIZED = {
    *(QUICK_REFERENCE, "qwen2_moe"),
    *("qwen3_tied", "qwen3_moe"),
    *("qwen3_5_more_values", "qwen3_5_moe", "qwen3_next_more_values"),
}

# Every second layer has a gated delta net.
TEXT = delta(4, 8, 16, 16, model_type="qwen3_5_text", full_attention_interval=2, head_dim=64)
TEXT |= dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, vocab_size=211)
TEXT |= dict(num_attention_heads=4, num_key_value_heads=2)
MOE_TEXT = TEXT | experts(6, 2, 40, model_type="qwen3_5_moe_text")
MOE_TEXT |= dict(shared_expert_intermediate_size=64)
INTERLEAVED = MOE_TEXT | dict(model_type="qwen3_next")
