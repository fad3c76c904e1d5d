"""Hooks: their names, which parts of a model they need, and runs that store them."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from command_line import main, records_of
from pods import flags_for
from test_model import matching
from tiny_models import SHARED, TEXT

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError
from activation_extraction.model.devices import usable_devices
from activation_extraction.model.family import parse_model_config
from activation_extraction.model.hooks import HOOKS, hook_table
from activation_extraction.model.mesh import build_layout
from qwen2_jax import weight_table
from qwen2_jax_with_hooks import create_model_with_hooks

DEPTH = 4
BASE = dict(model_type="qwen2", vocab_size=211, hidden_size=64, intermediate_size=112)
BASE |= dict(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=DEPTH)
QWEN2, DELTA = parse_model_config(BASE), parse_model_config(TEXT)
EXPERTS = parse_model_config(BASE | SHARED | dict(decoder_sparse_step=2))


def test_every_hook_of_the_table_has_its_own_names():
    names = [name for hook in HOOKS.all_hooks(DEPTH) for name in hook.names()]
    assert len(names) == len(set(names))
    for layer in (-1, DEPTH):
        with pytest.raises(InputError, match=f"{layer}: the model has layers 0 to 3"):
            HOOKS.of_layers([0, layer], "mlp", DEPTH)


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
        (QWEN2, "blocks.4.hook_resid_post", "matches no hook of a model with layers 0 to 3"),
        (QWEN2, "*.logits", "did you mean logits"),
        (QWEN2, "lm_head.*", "logits, which takes 422 bytes"),
        (DELTA, "blocks.0.hook_attn_out", "layer 0 is of type linear_attention and has no such"),
        (EXPERTS, "model.layers.3.mlp.down_proj.output", "is of type sparse and has no such hook"),
    ],
)
def test_a_name_that_no_hook_has_is_refused(config, pattern, said):
    with pytest.raises(InputError, match=said):
        hook_table(config).matching(["blocks.0.hook_resid_post", pattern], DEPTH)


MID = ["blocks.2.hook_resid_mid", "blocks.0.mlp.hook_post"]
MIXED = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_q"]


@pytest.mark.parametrize(
    "config,names,layers",
    [
        (QWEN2, ["hook_embed"], 1),
        (QWEN2, MID, 3),
        (DELTA, ["blocks.0.linear_attn.hook_q"], 1),
        (DELTA, MIXED, 2),
    ],
)
def test_only_the_layers_up_to_the_deepest_hook_are_loaded(config, names, layers):
    table = weight_table(create_model_with_hooks(config, matching(config, names)))
    assert {path[0] for path in table} == {"embed_tokens", "layers"}
    loaded = {name for spec in table.values() for name in spec.hf_names if ".layers." in name}
    assert {int(name.split(".")[2]) for name in loaded} == set(range(layers))


@pytest.mark.parametrize("stages,last", [(2, 5), (4, 5)])
def test_stages_have_only_the_layers_up_to_the_last_hook(stages, last):
    """The stages are as short as can be."""
    layout = build_layout(usable_devices(all_of_host=True)[:stages], {"pipeline": stages}, 2)
    config = dataclasses.replace(QWEN2, num_hidden_layers=16)
    model = create_model_with_hooks(config, HOOKS.of_layers([2, last], "mlp", 16), layout=layout)
    table = weight_table(model)
    length = {x.shape[0] for path, x in table.items() if path[0] == "layers"}
    assert length == {stages * -(-(last + 1) // stages)}
    named = {name for spec in table.values() for name in spec.hf_names}
    layers = {int(name.split(".")[2]) for name in named if ".layers." in name}
    assert layers == set(range(last + 1)) and "model.norm.weight" not in named


ASKED = ["blocks.1.mlp.hook_in", "model.layers.1.mlp.output", "blocks.0.attn.hook_k"]
ASKED += ["model.layers.2.mlp.down_proj.input", "blocks.1.attn.hook_pattern"]
STORED = ["blocks.0.attn.hook_k", "blocks.1.attn.hook_pattern", "blocks.1.ln2.hook_out"]
STORED += ["blocks.1.hook_mlp_out", "blocks.2.mlp.hook_post"]


@pytest.fixture(scope="module")
def run(demo_inputs, tmp_path_factory):
    """A run that stores hooks of several widths under the names that were asked for."""
    folder = tmp_path_factory.mktemp("run")
    asked = "--hook_names", *ASKED
    assert main(*flags_for(demo_inputs, folder, "--max_samples", 12, hooks=asked)) == 0
    return folder


@pytest.mark.long
def test_a_run_stores_hooks_under_the_names_that_were_asked_for(run, demo_inputs, capsys):
    widths = [64, 4 * 64, 128, 128, 384]
    typed = [ASKED[2], ASKED[4], ASKED[0], ASKED[1], ASKED[3]]
    records = records_of(run)
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


def test_a_hook_is_read_by_any_of_its_names_and_by_globs(run):
    whole, stored = ActivationDataset(run), STORED[2]
    alias, module = ASKED[0], "model.layers.1.mlp.input"
    assert list(whole.hooks) == STORED
    for name in (stored, alias, module, "*1.mlp.inp*"):
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


def test_names_that_a_run_lacks_are_refused(run, tmp_path, capsys):
    lacks = "has no hook 'blocks.2.mlp.hook_in'; it has blocks.0"
    with pytest.raises(ValueError, match=lacks):
        ActivationDataset(run, hooks=["blocks.2.mlp.hook_in"])
    with pytest.raises(KeyError, match=ASKED[0]):  # which is not read
        ActivationDataset(run, hooks=[STORED[4]])[0][ASKED[0]]
    export = "--export", "sae_lens", "--output_dir", run, "--export_dir", tmp_path / "copy"
    assert main(*export, "--hook_names", "blocks.2.mlp.hook_in") == 2
    assert lacks in capsys.readouterr().err
    assert main(*export, "--hook_names", "blocks.[12].mlp.hook_in") == 0
    assert [path.name for path in (tmp_path / "copy").iterdir() if path.is_dir()] == [STORED[2]]


def test_list_hooks_needs_nothing_but_the_configuration(demo_inputs, tmp_path, capsys):
    (tmp_path / "config.json").write_text((demo_inputs / "model" / "config.json").read_text())
    listed = "--model_path", tmp_path, "--list_hooks", "--shard_format", "safetensors"
    listed += ("--activation_dtype",)
    for dtype, stored in (("float16", "256"), ("float8", "132")):
        assert main(*listed, dtype) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(HOOKS.kinds) + 2
        row = next(line.split() for line in lines if "ln2.hook_out" in line)
        assert row[:2] == ["blocks.K.ln2.hook_out", "model.layers.K.mlp.input"]
        assert row[2:5] == ["128", dtype, stored]
        assert "blocks.K.mlp.hook_in" in " ".join(row[5:])
        top_ids = next(line.split() for line in lines if "top_ids" in line)
        assert top_ids[1:] == ["10", "int32", "40"]
        assert lines[-1] == "K is the layer, from 0 to 11"
    assert main("--list_hooks", "--status") == 2
