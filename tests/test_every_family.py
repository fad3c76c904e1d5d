"""Every family is in the numeric matrix (test_model.py). Whole runs with some of them, of each kind
of layer and of config.json: listed, stored and verified. The other tests of runs have Qwen2.
"""

import json

import pytest
from command_line import main
from conftest import inputs_with
from delta_reference import delta, experts
from pods import first_documents, flags_for
from tiny_models import LLAMA3, TINY

from activation_extraction.model.family import FAMILIES
from activation_extraction.run import demo

SMALL = {**demo.MODEL_CONFIG, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
HEADS = SMALL | {"head_dim": 32}
EXPERTS = experts(6, 2, 32, decoder_sparse_step=2)
DELTA = delta(4, 8, 16, 16, full_attention_interval=2)
RUNS = {  # a model, what --list_hooks says of one of its hooks, and other hooks to store
    "qwen3_next": (
        HEADS | DELTA | EXPERTS | {"shared_expert_intermediate_size": 48},
        "blocks.K.mlp.shared_expert.hook_post (K: 1, 3) "
        "model.layers.K.mlp.shared_expert.down_proj.input 48 float32 192",
        "blocks.1.attn.hook_k_normed blocks.2.linear_attn.hook_gate_input "
        "blocks.3.mlp.gate.hook_out blocks.3.hook_resid_post",
    ),
    "qwen2_5_omni": (
        {"thinker_config": {"text_config": SMALL}},
        "blocks.K.attn.hook_q model.layers.K.self_attn.q_proj.output 64 float32 256 "
        "blocks.K.attn.q.hook_out",
        "blocks.3.hook_resid_post",
    ),
    "llama": (
        SMALL | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        "blocks.K.attn.hook_q model.layers.K.self_attn.q_proj.output 64 float32 256 "
        "blocks.K.attn.q.hook_out",
        "blocks.1.hook_mlp_out blocks.3.hook_resid_post",
    ),
}


def test_every_family_is_in_the_numeric_matrix():
    """The table of families knows which of them have images or sound."""
    is_multimodal_in_table = {
        model_type: family.is_multimodal for model_type, family in FAMILIES.items()
    }
    configs_beside_text = {"vision_config", "thinker_config"}
    has_config_beside_text = {
        raw.get("model_type", "qwen2"): not configs_beside_text.isdisjoint(raw)
        for raw in TINY.values()
    }
    assert has_config_beside_text == is_multimodal_in_table


@pytest.mark.long
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in RUNS]
)
def test_a_run_lists_stores_and_verifies_the_hooks_of_its_family(
    family, demo_inputs, tmp_path, capsys
):
    (raw, listed, stored), folder = RUNS[family], tmp_path / "out"
    inputs = inputs_with({**raw, "model_type": family}, demo_inputs, tmp_path / "inputs")
    first_documents(demo_inputs, inputs / "documents.parquet", 60)
    more = "--shard_size_gb", 8e-4, "--batch_size", 8, "--mesh_shape", "4,2"
    assert main(*flags_for(inputs, folder, *more, hooks=["--hook_names", *stored.split()])) == 0
    told = capsys.readouterr().err.count("its text model alone runs; placeholders")
    assert told == FAMILIES[family].is_multimodal
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["model"]["model_type"] == family
    assert [hook["name"] for hook in metadata["hooks"]] == stored.split()
    model = ["--model_path", str(inputs / "model")]
    assert main("--list_hooks", *model) == 0
    assert listed in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert main("--verify", "--verify_samples", "3", "--output_dir", str(folder), *model) == 0
    assert "3 samples recomputed; 0 problems" in capsys.readouterr().out
