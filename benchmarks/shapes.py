"""The config.json of the models that benchmarks run: Qwen2.5's, layers of others, small ones."""

from typing import Any

from activation_extraction.model.released import released_config


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
    """So many layers of `depth`, the last one among them; all if there are fewer."""
    count = min(count, depth)
    return [depth * (number + 1) // count - 1 for number in range(count)]


SHAPES: dict[str, Any] = {
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
    "0.5B": released_config("Qwen2.5-0.5B"),
    "1.5B": released_config("Qwen2.5-1.5B"),
    "7B": released_config("Qwen2.5-7B"),
    "72B": released_config("Qwen2.5-72B"),
    "8B": released_config("Qwen3-8B"),
    "32B": released_config("Qwen3-32B"),
    "30B-A3B": released_config("Qwen3-30B-A3B"),
    "80B-A3B": released_config("Qwen3-Next-80B-A3B"),
    "9B": released_config("Qwen3.5-9B"),
    "35B-A3B": released_config("Qwen3.5-35B-A3B"),
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
