"""Writes the activations of TransformerLens at our hooks in tiny models, as a reference for tests.

No test runs this script; the file that it has written is in tests/. It needs a separate virtual
environment with transformer-lens and torch, without JAX:

    python tests/transformer_lens_expectations.py

The file in tests/ was made with transformer-lens 4.3.0, transformers 5.23.0, torch 2.13.0 and
numpy 2.4.6; it contains these versions. TransformerLens's bridge runs with unprocessed weights. It
must have each hook of our table under its canonical name and its aliases, except those in LACKING.
The script stops if another hook is missing, or if an alias has other values.

For each model, the file contains its config.json, its weights without the output layer, the token
ids of one row, an array (tokens, width) in float32 for each hook, and the aliases of each hook.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoConfig, AutoModelForCausalLM

from activation_extraction.model.family import FAMILIES
from activation_extraction.model.hooks import Hook, hook_table

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests/transformer_lens_expectations.npz"
PACKAGES = ("transformer-lens", "transformers", "torch", "numpy")
SEED = 0
TOKENS = 7
USUAL: dict[str, Any] = dict(
    vocab_size=13,
    hidden_size=16,
    intermediate_size=14,
    num_hidden_layers=2,
    num_attention_heads=4,
    tie_word_embeddings=False,
)
EXPERTS_OF = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=8)
YARN = dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=4)
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_tied": dict(model_type="qwen2", num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2_wide_heads": dict(
        model_type="qwen2",
        num_key_value_heads=2,
        head_dim=6,
        rms_norm_eps=1e-2,
        rope_parameters={"rope_theta": 1e6},
    ),
    "qwen3": dict(model_type="qwen3", num_key_value_heads=4, head_dim=6),
    "qwen3_biased_yarn_sliding": dict(
        model_type="qwen3",
        num_key_value_heads=1,
        head_dim=8,
        attention_bias=True,
        rope_parameters=YARN,
        max_position_embeddings=16,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen2_moe": EXPERTS_OF
    | dict(
        model_type="qwen2_moe",
        num_key_value_heads=2,
        shared_expert_intermediate_size=12,
        decoder_sparse_step=2,
    ),
    "qwen3_moe": EXPERTS_OF
    | dict(model_type="qwen3_moe", num_key_value_heads=1, head_dim=8, norm_topk_prob=True),
    "qwen3_5": dict(
        model_type="qwen3_5_text",
        num_key_value_heads=2,
        head_dim=16,
        full_attention_interval=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=8,
    ),
}
# Hooks whose values the bridge returns as (heads, tokens, ...). Other hooks with heads have values
# (tokens, heads, ...) there.
HEADS_FIRST = ("hook_pattern", "hook_q_normed", "hook_k_normed")
# Model type -> the end of the names of our hooks that the bridge lacks in models of this type.
LACKING = {"qwen3_moe": "mlp.experts.hook_out", "qwen3_5_text": "linear_attn.out_proj.hook_in"}


def hooks_of(config: Any) -> list[Hook]:
    """Returns the hooks of our table in a model, except those that TransformerLens lacks."""
    model_config = FAMILIES[config.model_type].read_config(config, "config.json")
    hooks = hook_table(model_config).all_hooks(model_config.num_hidden_layers, large=True)
    lacking = LACKING.get(config.model_type)
    return [hook for hook in hooks if lacking is None or not hook.name.endswith(lacking)]


def tiny_model(changes: dict[str, Any], chance: np.random.Generator) -> Any:
    """Makes a random model in which every weight matters, including those of norms and biases.

    The weights have bfloat16 values, which halves the size of the compressed file.

    Args:
        changes: Fields of config.json.
        chance: The generator of the weights.
    """
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(USUAL | changes))).eval()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = chance.standard_normal(tuple(parameter.shape)) / USUAL["hidden_size"] ** 0.5
            values += name.endswith("norm.weight")
            parameter.copy_(torch.from_numpy(values).bfloat16())
    return model


def flat(name: str, values: torch.Tensor) -> np.ndarray:
    """Returns a hook's values of the only row as (tokens, width), in float32."""
    if name.endswith(HEADS_FIRST):
        values = values.transpose(1, 2)
    return values.float().reshape(TOKENS, -1).numpy()  # experts' values have no axis of rows


def expectations(model: Any, token_ids: np.ndarray) -> Iterator[tuple[str, np.ndarray, list[str]]]:
    """Yields the canonical name, the values and the aliases of each hook.

    Raises:
        AssertionError: If an alias has other values.
    """
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model.save_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(folder, hf_model=model, dtype=torch.float32)
        # With a cache, the inner values of a delta net are not computed step by step.
        _, cache = bridge.run_with_cache(torch.from_numpy(token_ids[None]), use_cache=False)
    for hook in hooks_of(model.config):
        values = flat(hook.name, cache[hook.name])
        aliases = [alias.format(hook.layer_number) for alias in hook.kind.aliases]
        for alias in aliases:
            np.testing.assert_array_equal(flat(alias, cache[alias]), values, alias)
        yield hook.name, values, aliases


def contents() -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the array of each entry of the file; texts are arrays without axes."""
    yield "versions", np.array(json.dumps({name: version(name) for name in PACKAGES}))
    for number, (title, changes) in enumerate(MODELS.items()):
        chance = np.random.default_rng((SEED, number))
        model = tiny_model(changes, chance)
        token_ids = chance.integers(0, USUAL["vocab_size"], TOKENS)
        yield f"{title}/config", np.array(model.config.to_json_string())
        yield f"{title}/token_ids", token_ids
        for name, tensor in model.model.state_dict().items():
            yield f"{title}/weights/model.{name}", tensor.clone().numpy()
        aliases_by_hook = {}
        for name, values, aliases in expectations(model, token_ids):
            aliases_by_hook[name] = aliases
            yield f"{title}/hooks/{name}", values
        yield f"{title}/aliases", np.array(json.dumps(aliases_by_hook))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args()
    arrays: dict[str, Any] = dict(contents())
    np.savez_compressed(options.output, **arrays)
    print(f"{options.output}: {options.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
