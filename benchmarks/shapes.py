"""The config.json of the models that benchmarks run: Qwen2.5's, layers of others, small ones."""

from typing import Any


def _shape(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
    }


def evenly_spaced(count: int, depth: int) -> list[int]:
    """So many layers of `depth`, the last one among them."""
    return sorted({depth * (number + 1) // count - 1 for number in range(count)})


SHAPES = {
    "tiny": _shape(64, 128, 12, 4, 2, 300, True),
    "tiny-moe": _shape(64, 128, 12, 4, 2, 300, True)
    | {
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 2,
    },
    "0.1B": _shape(640, 2560, 16, 10, 2, 32000, True),  # for a CPU that has little time
    "0.5B": _shape(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": _shape(1536, 8960, 28, 12, 2, 151936, True),
    "7B": _shape(3584, 18944, 28, 28, 4, 152064, False),
    "72B": _shape(8192, 29568, 80, 64, 8, 152064, False),
    "32B": _shape(5120, 25600, 64, 64, 8, 151936, False)  # Qwen3
    | {"model_type": "qwen3", "head_dim": 128},
    "30B-A3B": _shape(2048, 6144, 48, 32, 4, 151936, False)
    | {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    # Qwen3.5, three quarters of whose layers have a gated delta net; and one with experts.
    "9B": _shape(4096, 12288, 32, 16, 4, 248320, False)
    | {"model_type": "qwen3_5_text", "head_dim": 256, "linear_num_value_heads": 32},
    "35B-A3B": _shape(2048, 512, 40, 16, 2, 248320, False)
    | {
        "model_type": "qwen3_5_moe_text",
        "head_dim": 256,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    # Twelve layers of Qwen3-0.6B; and eight with experts, of the same attention.
    "qwen3": _shape(1024, 3072, 12, 16, 8, 32000, True) | {"model_type": "qwen3", "head_dim": 128},
    "qwen3-moe": _shape(1024, 3072, 8, 16, 8, 32000, True)
    | {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    # Eight layers of Qwen3.5-0.8B, six of them with a gated delta net.
    "qwen3.5": _shape(1024, 3584, 8, 8, 2, 32000, True)
    | {"model_type": "qwen3_5_text", "head_dim": 256},
}
