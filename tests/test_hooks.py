"""Hooks: their names, which parts of a model they need, and runs that store them."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from command_line import main, records_of
from conftest import inputs_with
from pods import flags_for
from test_model import matching
from tiny_models import SHARED, TEXT

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError
from activation_extraction.model.decoder import stage_length
from activation_extraction.model.hooks import hook_table
from activation_extraction.model.mesh import build_layout, usable_devices
from activation_extraction.run import demo
from qwen2_jax import weight_table
from qwen2_jax_with_hooks import FAMILIES, HOOKS, create_model_with_hooks

DEPTH = 4
BASE = dict(model_type="qwen2", vocab_size=211, hidden_size=64, intermediate_size=112)
BASE |= dict(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=DEPTH)
QWEN2, QWEN3 = (FAMILIES.config(BASE | {"model_type": name}) for name in ("qwen2", "qwen3"))
DELTA = FAMILIES.config(TEXT)
EXPERTS = FAMILIES.config(BASE | SHARED | dict(decoder_sparse_step=2))


def test_every_hook_of_the_table_has_its_own_names():
    every = HOOKS.all_hooks(DEPTH)
    names = [name for hook in every for name in hook.names()]
    assert len(names) == len(set(names))
    assert [hook.name for hook in every[-6:]] == [
        *("ln_final.hook_normalized", "ln_final.hook_out"),
        *("logits.top_ids", "logits.top_logprobs", "loss", "entropy"),
    ]
    for layer in (-1, DEPTH):
        with pytest.raises(InputError, match=f"{layer}: the model has layers 0 to 3"):
            HOOKS.of_layers([0, layer], "mlp", DEPTH)


@pytest.mark.parametrize(
    "config,asked,expected",
    [
        (QWEN2, "blocks.1.hook_out", "blocks.1.hook_resid_post"),
        (QWEN2, "model.layers.1.mlp.input", "blocks.1.ln2.hook_out"),
        (QWEN2, "model.layers.1.output", "blocks.1.hook_resid_post"),
        (QWEN2, "model.norm.output", "ln_final.hook_out"),
        (QWEN2, "lm_head.output", "logits"),
        (QWEN3, "model.layers.2.self_attn.k_norm.output", "blocks.2.attn.hook_k_normed"),
        (DELTA, "blocks.2.linear_attn.hook_in", "blocks.2.ln1.hook_out"),
        (EXPERTS, "blocks.1.mlp.gate.hook_out", "blocks.1.mlp.gate.hook_out"),
        (EXPERTS, "blocks.2.mlp.dense_gate.hook_out", "blocks.2.mlp.hook_pre"),
    ],
)
def test_a_hook_is_found_by_any_name_and_keeps_the_one_that_was_asked_for(config, asked, expected):
    found = hook_table(config).matching([asked], DEPTH)
    assert {key: hook.name for key, hook in found.items()} == {asked: expected}


def test_globs_ask_for_canonical_names_first_and_for_no_large_hook():
    block = HOOKS.matching(["blocks.2.*"], DEPTH)
    assert list(block) == [hook.name for hook in block.values()] and len(block) == 18
    assert list(HOOKS.matching(["model.layers.*.mlp.output", "blocks.0.*mlp_out"], DEPTH)) == [
        f"model.layers.{layer}.mlp.output" for layer in range(DEPTH)
    ]
    every = HOOKS.matching(["*"], DEPTH)
    assert len(every) == 18 * DEPTH + 7 and "loss" in every and "logits" not in every


@pytest.mark.parametrize(
    "config,pattern,said",
    [
        *(
            (QWEN2, pattern, "matches no hook of a model with layers 0 to 3")
            for pattern in ("blocks.4.hook_resid_post", "blocks.*.hook_mlp_in", "resid")
        ),
        (QWEN2, "blocks.0.attn.hook_q_normed", "matches no hook"),
        (QWEN2, "*.logits", "did you mean logits"),
        *((QWEN2, p, "logits, which takes 422 bytes") for p in ("lm_head.*", "logi?s")),
        (DELTA, "blocks.0.hook_attn_out", "layer 0 is of type linear_attention and has no such"),
        (EXPERTS, "blocks.1.mlp.hook_post", "is of type sparse and has no such hook"),
        (EXPERTS, "model.layers.3.mlp.down_proj.output", "is of type sparse and has no such hook"),
    ],
)
def test_a_name_that_no_hook_has_is_refused(config, pattern, said):
    with pytest.raises(InputError, match=said):
        hook_table(config).matching(["blocks.0.hook_resid_post", pattern], DEPTH)


@pytest.mark.parametrize(
    "names,layers,last",
    [
        (["hook_embed"], 0, ""),
        (["blocks.2.ln1.hook_normalized"], 2, ""),
        (["blocks.2.ln1.hook_out"], 2, "input_layernorm"),
        (["blocks.0.attn.hook_rot_k"], 0, "input_layernorm k_proj"),
        (["blocks.2.attn.hook_z"], 2, "input_layernorm q_proj k_proj v_proj"),
        (["blocks.2.attn.hook_pattern"], 2, "input_layernorm q_proj k_proj"),
        (
            ["blocks.2.hook_resid_mid", "blocks.0.mlp.hook_post"],
            *(2, "input_layernorm q_proj k_proj v_proj o_proj"),  # a layer without its MLP
        ),
        (["blocks.2.hook_mlp_out", "blocks.1.attn.hook_z"], 3, ""),
        (["blocks.2.hook_resid_post"], 3, ""),
    ],
)
def test_only_what_a_hook_needs_is_loaded(names, layers, last):
    table = weight_table(create_model_with_hooks(QWEN2, matching(QWEN2, names)))
    stacked = [spec for path, spec in table.items() if path[0] == "layers"]
    assert {len(spec.hf_names) for spec in stacked} == ({layers} if layers else set())
    assert "norm" not in {path[0] for path in table} and "lm_head" not in table
    assert {path[-2] for path in table if path[0] == "last_layer"} == {*last.split()}
    ours = {name for path, x in table.items() for name in x.hf_names if path[0] == "last_layer"}
    assert all(name.startswith(f"model.layers.{layers}.") for name in ours)


def test_a_type_that_no_layer_of_the_loop_has_is_not_loaded():
    hooks = matching(DELTA, ["blocks.0.hook_resid_post", "blocks.1.attn.hook_q"])
    paths = {path[:3] for path in weight_table(create_model_with_hooks(DELTA, hooks))}
    assert {path[1] for path in paths if path[0] == "layers"} == {"linear_attention"}
    assert ("last_layer", "self_attn", "q_proj") in paths


@pytest.mark.parametrize("name", ["q", "k"])
def test_queries_and_keys_of_a_delta_net_need_no_weights_of_each_other(name):
    hooks = matching(DELTA, [f"blocks.0.linear_attn.hook_{name}"])
    paths = weight_table(create_model_with_hooks(DELTA, hooks))
    needed = {path[2] for path in paths if path[1] == "linear_attn"}
    assert needed == {f"in_proj_{name}", f"conv1d_{name}"}


@pytest.mark.parametrize("stages,last", [(2, 5), (4, 5), (8, 7), (2, 15)])
def test_stages_have_only_the_layers_up_to_the_last_hook(stages, last):
    """The stages are as short as can be."""
    layout = build_layout(usable_devices(every=True)[:stages], {"pipeline": stages}, 2)
    config = dataclasses.replace(QWEN2, num_hidden_layers=16)
    model = create_model_with_hooks(config, HOOKS.of_layers([2, last], "mlp", 16), layout=layout)
    table = weight_table(model)
    length = {x.shape[0] for path, x in table.items() if path[0] == "layers"}
    assert length == {stages * -(-(last + 1) // stages)}
    named = {name for spec in table.values() for name in spec.hf_names}
    layers = {int(name.split(".")[2]) for name in named if ".layers." in name}
    assert layers == set(range(last + 1)) and "model.norm.weight" not in named


def test_stages_have_the_same_sequence_of_types():
    # In the second, the last stage is filled up completely; 7 layers of the fourth do not repeat.
    types = "aaaaa", "aaaaa", "abbabbab", "aaabaaabaaabaa", "abbb"
    assert [*map(stage_length, types, (2, 4, 3, 2, 1))] == [3, 2, 3, 8, 4]
    layout = build_layout(usable_devices(every=True)[:2], {"pipeline": 2}, 2)
    config = FAMILIES.config(BASE | SHARED | dict(mlp_only_layers=[0]))
    hooks = hook_table(config).of_layers([2], "residual", 4)
    with pytest.raises(InputError, match="2 pipeline stages .* 0 to 2 are 1 dense, 2 sparse"):
        create_model_with_hooks(config, hooks, layout=layout)


ASKED = ["blocks.1.mlp.hook_in", "model.layers.1.mlp.output", "blocks.0.attn.hook_k"]
ASKED += ["model.layers.2.mlp.down_proj.input", "blocks.1.attn.hook_pattern"]
STORED = ["blocks.0.attn.hook_k", "blocks.1.attn.hook_pattern", "blocks.1.ln2.hook_out"]
STORED += ["blocks.1.hook_mlp_out", "blocks.2.mlp.hook_post"]


@pytest.fixture(scope="module", params=["pickle", "safetensors"])
def run(demo_inputs, tmp_path_factory, request):
    """A run that stores hooks of several widths under the names that were asked for."""
    folder = tmp_path_factory.mktemp("run")
    flags = "--max_samples", 12, "--shard_format", request.param
    assert main(*flags_for(demo_inputs, folder, *flags, hooks=("--hook_names", *ASKED))) == 0
    return folder


@pytest.mark.long
def test_a_run_stores_hooks_under_the_names_that_were_asked_for(run, demo_inputs, capsys):
    widths = [64, 4 * 64, 128, 128, 384]
    typed = [ASKED[2], ASKED[4], ASKED[0], ASKED[1], ASKED[3]]
    if records := records_of(run):
        assert list(records) == typed
        assert [of_hook[0]["activation"].shape[1] for of_hook in records.values()] == widths
        assert records[ASKED[0]][1]["hook"] == STORED[2]  # the canonical name
    hooks = json.loads((run / "metadata.json").read_text())["hooks"]
    assert [(hook["key"], hook["name"], hook["width"]) for hook in hooks] == [
        *zip(typed, STORED, widths, strict=True)
    ]
    assert hooks[0]["module"] == "model.layers.0.self_attn.k_proj.output"
    assert (hooks[0]["heads"], hooks[0]["head_size"]) == (2, 32) and "heads" not in hooks[2]
    assert (hooks[1]["heads"], hooks[1]["keys"]) == (4, 64)
    model = "--model_path", demo_inputs / "model"
    assert main("--verify", "--verify_samples", 3, *model, "--output_dir", run) == 0
    assert "3 samples recomputed; 0 problems" in capsys.readouterr().out


@pytest.mark.parametrize("name", [STORED[2], *ASKED[:1], "model.layers.1.mlp.input", "*1.mlp.inp*"])
def test_a_hook_is_read_by_any_of_its_names_and_by_globs(run, name):
    whole, stored = ActivationDataset(run), STORED[2]
    alias, module = ASKED[0], "model.layers.1.mlp.input"
    assert list(whole.hooks) == STORED
    dataset = ActivationDataset(run, hooks=[name])
    assert list(dataset.hooks) == [stored] and dataset.hooks[alias] == whole.hooks[stored]
    expected = whole[1].activations[stored]
    for sample in (dataset[1], pickle.loads(pickle.dumps(dataset[1]))):
        np.testing.assert_array_equal(sample[alias], expected)
        np.testing.assert_array_equal(sample[module], expected)
    assert dataset.statistics[module] == whole.statistics[stored]
    (batch,) = whole.batches(10**4, hooks=[name], max_norm={alias: 1e9}, dtype="float32")
    assert list(batch.activations) == [stored]
    for each in (batch, batch.jax(), batch.torch()):
        np.testing.assert_array_equal(np.asarray(each[alias]), batch[stored])


def test_names_that_a_run_lacks_are_refused_wherever_a_hook_is_asked_for(run, tmp_path, capsys):
    lacks = "has no hook 'blocks.2.mlp.hook_in'; it has blocks.0"
    with pytest.raises(ValueError, match=lacks):
        ActivationDataset(run, hooks=["blocks.2.mlp.hook_in"])
    dataset = ActivationDataset(run, hooks=[STORED[4]])
    with pytest.raises(ValueError, match=f"has no hook '{ASKED[0]}'"):  # which is not read
        dataset.batches(8, hooks=[ASKED[0]])
    with pytest.raises(KeyError, match=ASKED[0]):
        dataset[0][ASKED[0]]
    export = "--export", "memmap", "--output_dir", run, "--export_dir"
    assert main(*export, tmp_path / "copy", "--hook_names", "blocks.[12].mlp.hook_in") == 0
    copies = {path.name for path in (tmp_path / "copy").iterdir() if path.is_dir()}
    assert copies == {STORED[2]}
    assert main(*export, tmp_path / "other", "--hook_names", "blocks.2.mlp.hook_in") == 2
    assert lacks in capsys.readouterr().err


@pytest.mark.parametrize("dtype,stored", [("float16", "256"), ("float8", "132")])
def test_list_hooks_needs_nothing_but_the_configuration(
    demo_inputs, tmp_path, capsys, dtype, stored
):
    (tmp_path / "config.json").write_text((demo_inputs / "model" / "config.json").read_text())
    flags = ["--model_path", str(tmp_path), "--list_hooks", "--activation_dtype", dtype]
    assert main(*flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(HOOKS.kinds) + 2
    row = next(line.split() for line in lines if "ln2.hook_out" in line)
    assert row[:4] == ["blocks.K.ln2.hook_out", "model.layers.K.mlp.input", "128", dtype]
    assert row[4] == stored and "blocks.K.mlp.hook_in" in " ".join(row[5:])
    assert next(line.split() for line in lines if "top_ids" in line)[1:] == ["10", "int32", "40"]
    assert lines[-1] == "K is the layer, from 0 to 11"
    assert main("--list_hooks", "--status") == 2


@pytest.mark.long
def test_clipped_default_layers_are_told(demo_inputs, tmp_path, capsys):
    """A model of six layers has none of the default ones: its last layer is taken."""
    inputs = inputs_with(demo.MODEL_CONFIG | {"num_hidden_layers": 6}, demo_inputs, tmp_path / "in")
    for typed, layers in (([], (5,)), (["all"], range(6)), (["4-5", "0"], (0, 4, 5))):
        out = tmp_path / "-".join(["out", *typed])
        asked = ["--layers_to_extract", *typed] if typed else []
        assert main(*flags_for(inputs, out, "--max_samples", 1, hooks=asked)) == 0
        clipped = "the default layers, 10 to 23, are clipped: the model has layers 0 to 5\n"
        assert (clipped in capsys.readouterr().err) == (not typed)
        names = [f"blocks.{layer}.hook_resid_post" for layer in layers]
        assert list(ActivationDataset(out).hooks) == names
