"""Hooks against TransformerLens, whose values for tiny models are stored beside this file.

benchmarks/transformer_lens_expectations.py wrote them, and says with which versions.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_model import TOLERANCE, error_of, run

from activation_extraction.model.hooks import hook_table
from qwen2_jax import convert_hf_to_jax_weights
from qwen2_jax_with_hooks import FAMILIES, create_model_with_hooks

STORED = Path(__file__).parent / "transformer_lens_expectations.npz"
MODELS = [
    *("qwen2_tied", "qwen2_wide_heads", "qwen3", "qwen3_biased_yarn_sliding"),
    *("qwen2_moe", "qwen3_moe", "qwen3_5"),
]
# Hooks of ours that TransformerLens does not have in models of these types.
LACKING = {
    "qwen3_moe": ["blocks.0.mlp.experts.hook_out", "blocks.1.mlp.experts.hook_out"],
    "qwen3_5_text": ["blocks.0.linear_attn.out_proj.hook_in"],
}


class Expected(NamedTuple):
    """What the file holds of one model."""

    config: Any
    token_ids: np.ndarray
    weights: dict[str, np.ndarray]
    hooks: dict[str, np.ndarray]  # canonical name -> (tokens, width)
    aliases: dict[str, list[str]]  # canonical name -> other names in TransformerLens

    def ours(self):
        """Every hook that we have in this model."""
        table = hook_table(self.config)
        every = table.all_hooks(self.config.num_hidden_layers, large=True)
        return [hook for hook in every if not hook.kind.value.startswith("predicted.")]


@pytest.fixture(scope="module", params=MODELS)
def expected(request) -> Expected:
    with np.load(STORED) as file:

        def below(folder: str) -> dict[str, np.ndarray]:
            start = f"{request.param}/{folder}"
            return {n.removeprefix(start): file[n] for n in file.files if n.startswith(start)}

        return Expected(
            FAMILIES.config(json.loads(str(file[f"{request.param}/config"]))),
            file[f"{request.param}/token_ids"],
            below("weights/"),
            below("hooks/"),
            json.loads(str(file[f"{request.param}/aliases"])),
        )


def test_transformer_lens_has_every_hook_of_our_table_and_every_alias(expected):
    """But for a few that are named here; so every other hook is compared."""
    ours = {
        hook.name: [a.format(hook.layer) for a in hook.kind.aliases] for hook in expected.ours()
    }
    for name in LACKING.get(expected.config.model_type, ()):
        assert not ours.pop(name)
    assert expected.aliases == ours
    assert set(expected.hooks) == set(ours)


@pytest.mark.long
def test_every_hook_equals_transformer_lens(expected):
    """For one row, in float32."""
    ours = expected.ours()
    model = create_model_with_hooks(expected.config, ours)
    params = convert_hf_to_jax_weights(expected.weights, model)
    token_ids = expected.token_ids.astype(np.int32)[None]
    positions = np.arange(token_ids.size, dtype=np.int32)[None]
    got = run(model, params, token_ids, np.ones_like(token_ids), positions)
    errors = {
        hook.name: error_of(got[hook][0], expected.hooks[hook.name])
        for hook in ours
        if hook.name in expected.hooks
    }
    assert not {name: error for name, error in errors.items() if not error < TOLERANCE}
