"""Makes what the benchmarks run on, the same every time.

There are the config.json of released models and of small ones (`SHAPES`), checkpoints of random
weights, documents of FineWeb-Edu's lengths, and their token ids for programs that do not tokenise.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer

from activation_extraction.common.safetensors import pack_header
from activation_extraction.model.family import parse_model_config
from activation_extraction.model.released import released_config
from activation_extraction.model.weights import WeightSpec
from activation_extraction.run import demo
from qwen2_jax import Qwen2, weight_table

REPEATED = 2**22  # numbers
MEDIAN_TOKENS, SPREAD, LONGEST = 620, 1.0, 2048  # of the documents' log-normal lengths


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


def make_model(folder: Path, config: dict[str, Any]) -> int:
    """Writes a checkpoint of random bfloat16 weights; returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    demo.write_tokenizer(folder, [])
    read = parse_model_config(config)
    table = weight_table(Qwen2(read))
    if config["tie_word_embeddings"]:
        del table["lm_head", "weight"]
    write_weights(folder / "model.safetensors", table.values())
    return sum(int(np.prod(spec.shape)) for spec in table.values())


def write_weights(path: Path, table: Iterable[WeightSpec]) -> None:
    """Writes random bfloat16 weights, norms near 1, matrices scaled by their fan-in, to a
    safetensors file. Large matrices repeat themselves: normal numbers take longer than the disk."""
    normal = np.random.default_rng(0).standard_normal(REPEATED, np.float32)
    specs = {name: spec for spec in table for name in spec.hf_names}
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    shapes = {name: (bfloat16, spec.hf_shape) for name, spec in specs.items()}
    with path.open("wb") as file:
        file.write(pack_header(shapes, {}))
        for name, spec in specs.items():
            values = normal / np.float32(math.sqrt(spec.hf_shape[-1])) + name.endswith(
                "norm.weight"
            )
            values, count = values.astype(bfloat16), math.prod(spec.hf_shape)
            for begin in range(0, count, REPEATED):
                file.write(values[: count - begin].tobytes())


def make_documents(path: Path, count: int) -> None:
    """Documents with FineWeb-Edu's lengths; without merges, one byte is one token."""
    chance = np.random.default_rng(0)
    lengths = chance.lognormal(np.log(MEDIAN_TOKENS), SPREAD, count)
    lengths = np.clip(lengths.round().astype(int), 1, LONGEST)
    letters = np.frombuffer(b"etaoinshrdlu ", np.uint8)
    rows = [{"text": chance.choice(letters, n).tobytes().decode()} for n in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokenise(model: Path, documents: Path, longest: int) -> list[list[int]]:
    """Token ids of every document, cut to `longest`, as the tool makes them."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in documents.read_text().splitlines()]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [encoding.ids[:longest] for encoding in encoded]
