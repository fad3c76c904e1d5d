"""Hooks against TransformerLens, whose values for tiny models are stored beside this file.

tests/transformer_lens_expectations.py wrote them, and says with which versions.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import Reference
from safetensors.numpy import save_file
from test_model import TOLERANCE, error_of, values_on

from activation_extraction.model.family import parse_model_config
from activation_extraction.model.hooks import hook_table

STORED = Path(__file__).parent / "transformer_lens_expectations.npz"
with np.load(STORED) as FILE:
    MODELS = sorted({name.partition("/")[0] for name in FILE} - {"versions"})
# Hooks of ours that TransformerLens does not have in models of these types.
LACKING = {
    "qwen3_moe": ["blocks.0.mlp.experts.hook_out", "blocks.1.mlp.experts.hook_out"],
    "qwen3_5_text": ["blocks.0.linear_attn.out_proj.hook_in"],
}


def below(folder, arrays):
    return {n.removeprefix(folder): arrays[n] for n in arrays if n.startswith(folder)}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_hook_and_every_alias_equals_transformer_lens(name, tmp_path):
    """For one row, in float32; but for a few hooks that are named here, it has all of ours."""
    with np.load(STORED) as file:
        found = below(f"{name}/", file)
    weights, expected = below("weights/", found), below("hooks/", found)
    config = parse_model_config(json.loads(str(found["config"])))
    every = hook_table(config).all_hooks(config.num_hidden_layers, large=True)
    hooks = [hook for hook in every if not hook.kind.is_prediction]
    ours = {hook.name: [a.format(hook.layer_number) for a in hook.kind.aliases] for hook in hooks}
    for lacking in LACKING.get(config.model_type, ()):
        assert not ours.pop(lacking)
    assert json.loads(str(found["aliases"])) == ours
    assert expected.keys() == ours.keys()

    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(str(found["config"]))
    token_ids = found["token_ids"].astype(np.int32)[None]
    positions = np.arange(token_ids.size, dtype=np.int32)[None]
    batch, model = (token_ids, np.ones_like(token_ids), positions), Reference(None, tmp_path)
    got = {h.name: x[0] for h, x in values_on({"data": 1}, model, hooks, batch).items()}
    for hook, wanted in expected.items():
        assert error_of(got[hook], wanted) < TOLERANCE, hook
