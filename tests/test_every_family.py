"""Every family is in the numeric matrix (test_model.py). Whole runs with some of them, of each kind
of layer and of config.json: listed, stored and verified. The other tests of runs have Qwen2.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from command_line import main
from conftest import inputs_with
from delta_reference import delta, experts
from pods import first_documents, flags_for
from tiny_models import TINY

from activation_extraction.run import demo
from qwen2_jax_with_hooks import FAMILIES


class Run(NamedTuple):
    """A model, what --list_hooks says of one of its hooks, and hooks to store with their facts."""

    config: Mapping[str, Any]
    listed: str
    stored: Mapping[str, Mapping[str, Any]]


SMALL = {**demo.MODEL_CONFIG, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
HEADS = SMALL | {"head_dim": 32}
EXPERTS = experts(6, 2, 32, decoder_sparse_step=2)
DELTA = delta(4, 8, 16, 16, full_attention_interval=2)
LAST = {"blocks.3.hook_resid_post": {"width": 64}}
NORMED = {"blocks.1.attn.hook_k_normed": {"width": 64, "heads": 2, "head_size": 32}}
ROUTER = {"blocks.3.mlp.gate.hook_out": {"width": 6}}
BIASED = "blocks.K.attn.hook_q model.layers.K.self_attn.q_proj.output 64 float32 256"
BIASED += " blocks.K.attn.q.hook_out"
NORMED_Q = "blocks.K.attn.hook_q_normed model.layers.K.self_attn.q_norm.output 128 float32 512"
RUNS = {
    "qwen3": Run(
        HEADS | dict(use_sliding_window=True, sliding_window=9, max_window_layers=3),
        NORMED_Q,
        NORMED | LAST,
    ),
    "qwen2_moe": Run(
        SMALL | EXPERTS | dict(shared_expert_intermediate_size=48, norm_topk_prob=False),
        "blocks.K.mlp.shared_expert.hook_post (K: 1, 3) "
        "model.layers.K.mlp.shared_expert.down_proj.input 48 float32 192",
        LAST | ROUTER | {"blocks.1.mlp.shared_expert.hook_out": {"width": 64}},
    ),
    "qwen3_next": Run(
        HEADS | DELTA | EXPERTS | {"shared_expert_intermediate_size": 48},
        "blocks.K.linear_attn.hook_beta_logit (K: 0, 2) 8 float32 32",
        NORMED | LAST | ROUTER | {"blocks.2.linear_attn.hook_gate_input": {"module": None}},
    ),
    "qwen2_5_omni": Run({"thinker_config": {"text_config": SMALL}}, BIASED, LAST),
    "qwen3_vl_moe": Run({"text_config": HEADS | EXPERTS}, NORMED_Q, LAST | ROUTER),
    "qwen3_5": Run(
        {"text_config": HEADS | DELTA, "tie_word_embeddings": True},
        "blocks.K.linear_attn.hook_beta (K: 0, 2) 8 float32 32",
        LAST | {"blocks.2.linear_attn.hook_log_decay": {"width": 8}},
    ),
}


def test_every_family_is_in_the_numeric_matrix():
    """And those with images or sound are known as such."""
    known = {family.model_type: family.text_alone for family in FAMILIES.families}
    others = {"vision_config", "thinker_config"}
    found = {raw.get("model_type", "qwen2"): not others.isdisjoint(raw) for raw in TINY.values()}
    assert found == known


@pytest.mark.long
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in RUNS]
)
def test_a_run_lists_stores_and_verifies_the_hooks_of_its_family(
    family, demo_inputs, tmp_path, capsys
):
    of, folder = RUNS[family], tmp_path / "out"
    inputs = inputs_with({**of.config, "model_type": family}, demo_inputs, tmp_path / "inputs")
    first_documents(demo_inputs, inputs / "documents.parquet", 60)
    more = "--shard_size_gb", 8e-4, "--batch_size", 8, "--mesh_shape", "4,2"
    assert main(*flags_for(inputs, folder, *more, hooks=["--hook_names", *of.stored])) == 0
    assert len([*folder.glob("shard_*.pkl.gz")]) > 1
    text_alone = family not in ("qwen3", "qwen2_moe", "qwen3_next")
    assert capsys.readouterr().err.count("its text model alone runs; placeholders") == text_alone
    model = ["--model_path", str(inputs / "model")]
    assert main("--list_hooks", *model) == 0
    assert of.listed in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["model"]["model_type"] == family
    facts = {hook["name"]: hook for hook in metadata["hooks"]}
    assert facts.keys() == of.stored.keys()
    for name, expected in of.stored.items():
        assert expected.items() <= facts[name].items()
    verify = ["--verify", "--verify_samples", "3", "--output_dir", str(folder)]
    assert main(*verify, *model) == 0
    assert "3 samples recomputed; 0 problems" in capsys.readouterr().out
