"""Makes the inputs of the benchmarks, which are the same in every run.

They are the configurations of released models and of small ones (`SHAPES`), checkpoints of random
weights, documents whose lengths are distributed like the lengths of documents in FineWeb-Edu, and
the token ids of these documents for programs that do not tokenise.
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

# The number of random numbers that are drawn. Larger weight matrices repeat them.
DRAWN_COUNT = 2**22
# Documents have log-normal lengths in tokens. These are the median, the standard deviation of the
# logarithm, and the length at which a document is cut.
MEDIAN_TOKENS, SPREAD, MAX_TOKENS = 620, 1.0, 2048


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
    """Returns the indices of evenly spaced layers in ascending order, up to `depth` - 1.

    Args:
        count: The number of layers to choose. If it is `depth` or more, all layers are chosen.
        depth: The number of layers of the model.
    """
    num_chosen_layers = min(count, depth)
    return [
        depth * chosen_layer_rank // num_chosen_layers - 1
        for chosen_layer_rank in range(1, num_chosen_layers + 1)
    ]


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
    # A model of Qwen2's family for short runs on a CPU.
    "0.1B": _shape(640, 2560, 16, 10, 2, 32000, True),
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
    # Twelve layers of Qwen3-0.6B, with a smaller vocabulary.
    "qwen3": _shape(1024, 3072, 12, 16, 8, 32000, True) | {"model_type": "qwen3", "head_dim": 128},
    # Eight layers with the attention of Qwen3-0.6B, but with experts.
    "qwen3-moe": _shape(1024, 3072, 8, 16, 8, 32000, True)
    | {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    # Eight layers of Qwen3.5-0.8B, with a smaller vocabulary. Six of them have a gated delta net.
    "qwen3.5": _shape(1024, 3584, 8, 8, 2, 32000, True)
    | {"model_type": "qwen3_5_text", "head_dim": 256},
}


def make_model(folder: Path, config: dict[str, Any]) -> int:
    """Writes a checkpoint of random bfloat16 weights, with a tokenizer whose tokens are bytes.

    Args:
        folder: The folder in which the files are written.
        config: The content of config.json.

    Returns:
        The number of parameters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    demo.write_tokenizer(folder, [])
    weight_spec_by_parameter_path = weight_table(Qwen2(parse_model_config(config)))
    if config["tie_word_embeddings"]:
        del weight_spec_by_parameter_path["lm_head", "weight"]
    write_weights(folder / "model.safetensors", weight_spec_by_parameter_path.values())
    return sum(
        int(np.prod(weight_spec.shape)) for weight_spec in weight_spec_by_parameter_path.values()
    )


def write_weights(path: Path, specs: Iterable[WeightSpec]) -> None:
    """Writes random bfloat16 weights to a safetensors file.

    Weights are divided by the square root of their fan-in, and 1 is added to the weights of norms.
    Large matrices repeat the same numbers, because drawing normal numbers takes longer than writing
    them.

    Args:
        path: The path of the file to write.
        specs: The specifications of the weights to write, which contain the name and the shape of
            each tensor.
    """
    normal_values = np.random.default_rng(0).standard_normal(DRAWN_COUNT, np.float32)
    weight_spec_by_tensor_name = {
        tensor_name: weight_spec for weight_spec in specs for tensor_name in weight_spec.hf_names
    }
    bfloat16_dtype = np.dtype(ml_dtypes.bfloat16)
    dtype_and_shape_by_tensor_name = {
        tensor_name: (bfloat16_dtype, weight_spec.hf_shape)
        for tensor_name, weight_spec in weight_spec_by_tensor_name.items()
    }
    with path.open("wb") as weight_file:
        weight_file.write(pack_header(dtype_and_shape_by_tensor_name, {}))
        for tensor_name, weight_spec in weight_spec_by_tensor_name.items():
            weight_values = normal_values / np.float32(math.sqrt(weight_spec.hf_shape[-1]))
            if tensor_name.endswith("norm.weight"):
                weight_values += 1
            weight_values = weight_values.astype(bfloat16_dtype)
            num_values = math.prod(weight_spec.hf_shape)
            for first_value_index in range(0, num_values, DRAWN_COUNT):
                weight_file.write(weight_values[: num_values - first_value_index].tobytes())


def make_documents(path: Path, count: int) -> None:
    """Writes documents of random letters as JSON Lines with the field "text".

    The number of letters of each document is drawn from a log-normal distribution. It resembles the
    distribution of the lengths of documents in FineWeb-Edu, in tokens. With the tokenizer of
    `make_model`, every letter is one token, so the lengths in tokens have this distribution. They
    are at most MAX_TOKENS.

    Args:
        path: The path of the file to write.
        count: The number of documents.
    """
    rng = np.random.default_rng(0)
    document_lengths = rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD, count)
    document_lengths = np.clip(document_lengths.round().astype(int), 1, MAX_TOKENS)
    letters = np.frombuffer(b"etaoinshrdlu ", np.uint8)
    document_rows = [
        {"text": rng.choice(letters, document_length).tobytes().decode()}
        for document_length in document_lengths
    ]
    path.write_text("".join(json.dumps(document_row) + "\n" for document_row in document_rows))


def tokenise(model: Path, documents: Path, max_tokens: int) -> list[list[int]]:
    """Returns the token ids of each document, as extract_activations.py makes them.

    Args:
        model: The folder of the tokenizer.
        documents: The path of a JSON Lines file with the documents.
        max_tokens: The number of tokens at which a document is cut.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    document_texts = [
        json.loads(json_line)["text"] for json_line in documents.read_text().splitlines()
    ]
    document_encodings = tokenizer.encode_batch(document_texts, add_special_tokens=False)
    return [encoding.ids[:max_tokens] for encoding in document_encodings]
