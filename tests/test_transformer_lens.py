"""Hooks against TransformerLens, whose values for tiny models are stored beside this file.

benchmarks/transformer_lens_expectations.py wrote them, and says with which versions.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import Reference
from safetensors.numpy import save_file
from test_model import TOLERANCE, error_of, values_on

from activation_extraction.model.hooks import hook_table
from qwen2_jax_with_hooks import FAMILIES

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


@pytest.fixture(scope="module", params=MODELS)
def expected(request):
    """What the file holds of one model: by name without the model's."""
    start = f"{request.param}/"
    with np.load(STORED) as file:
        return {n.removeprefix(start): file[n] for n in file.files if n.startswith(start)}


def below(folder, expected):
    return {n.removeprefix(folder): x for n, x in expected.items() if n.startswith(folder)}


def hooks_of(expected):
    """The configuration, and every hook that we have in this model."""
    config = FAMILIES.config(json.loads(str(expected["config"])))
    every = hook_table(config).all_hooks(config.num_hidden_layers, large=True)
    return config, [hook for hook in every if not hook.kind.value.startswith("predicted.")]


def test_transformer_lens_has_every_hook_of_our_table_and_every_alias(expected):
    """But for a few that are named here; so every other hook is compared."""
    config, hooks = hooks_of(expected)
    ours = {hook.name: [a.format(hook.layer) for a in hook.kind.aliases] for hook in hooks}
    for name in LACKING.get(config.model_type, ()):
        assert not ours.pop(name)
    assert json.loads(str(expected["aliases"])) == ours
    assert {*below("hooks/", expected)} == {*ours}


@pytest.mark.long
def test_every_hook_equals_transformer_lens(expected, tmp_path):
    """For one row, in float32."""
    config, hooks = hooks_of(expected)
    save_file(below("weights/", expected), tmp_path / "model.safetensors")
    token_ids = expected["token_ids"].astype(np.int32)[None]
    positions = np.arange(token_ids.size, dtype=np.int32)[None]
    batch, model = (token_ids, np.ones_like(token_ids), positions), Reference(None, tmp_path)
    (tmp_path / "config.json").write_text(str(expected["config"]))
    got = {h.name: x[0] for h, x in values_on({"data": 1}, model, hooks, batch).items()}
    for name, wanted in below("hooks/", expected).items():
        assert error_of(got[name], wanted) < TOLERANCE, name
