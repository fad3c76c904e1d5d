"""Hooks: their names, which parts of a model they need, and values that depend on nothing else."""

import gzip
import json
import pickle

import jax
import pytest
from command_line import main
from conftest import Reference, make_reference
from test_model import (
    assert_same_but_for_rounding,
    every_hook,
    flops_of,
    load,
    rounding_of,
    rows,
    run,
)

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError
from activation_extraction.model.mesh import build_layout
from activation_extraction.run import demo
from qwen2_jax import Qwen2, weight_table
from qwen2_jax_with_hooks import FAMILIES, HOOKS, create_model_with_hooks

DEPTH = 4
HALF = {"input_layernorm", "q_proj", "k_proj", "v_proj", "o_proj"}  # a layer without its MLP


def named(*names, depth=DEPTH):
    return list(HOOKS.matching(names, depth).values())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Reference:
    folder = tmp_path_factory.mktemp("tiny")
    return make_reference(folder, num_key_value_heads=2, num_hidden_layers=DEPTH)


def test_every_hook_of_the_table_has_its_own_names():
    names = [name for hook in HOOKS.all_hooks(DEPTH) for name in hook.names()]
    assert len(names) == len(set(names))
    assert {hook.layer for hook in HOOKS.all_hooks(DEPTH) if hook.name == "hook_embed"} == {0}
    assert [hook.name for hook in HOOKS.all_hooks(DEPTH)[-6:]] == [
        *("ln_final.hook_normalized", "ln_final.hook_out"),
        *("logits.top_ids", "logits.top_logprobs", "loss", "entropy"),
    ]


@pytest.mark.parametrize(
    "asked,hook",
    [
        ("blocks.1.mlp.hook_in", "blocks.1.ln2.hook_out"),
        ("blocks.1.attn.hook_in", "blocks.1.ln1.hook_out"),
        ("blocks.1.hook_out", "blocks.1.hook_resid_post"),
        ("blocks.1.attn.o.hook_in", "blocks.1.attn.hook_z"),
        ("model.layers.1.mlp.input", "blocks.1.ln2.hook_out"),
        ("model.layers.1.mlp.down_proj.input", "blocks.1.mlp.hook_post"),
        ("model.layers.1.self_attn.o_proj.input", "blocks.1.attn.hook_z"),
        ("model.layers.1.post_attention_layernorm.output", "blocks.1.ln2.hook_out"),
        ("model.layers.1.output", "blocks.1.hook_resid_post"),
        ("model.norm.output", "ln_final.hook_out"),
    ],
)
def test_a_hook_is_found_by_any_name_and_keeps_the_one_that_was_asked_for(asked, hook):
    assert {key: found.name for key, found in HOOKS.matching([asked], DEPTH).items()} == {
        asked: hook
    }


def test_globs_ask_for_canonical_names_first():
    block = HOOKS.matching(["blocks.2.*"], DEPTH)
    assert list(block) == [hook.name for hook in block.values()] and len(block) == 18
    assert list(HOOKS.matching(["model.layers.*.mlp.output", "blocks.0.*mlp_out"], DEPTH)) == [
        f"model.layers.{layer}.mlp.output" for layer in range(DEPTH)
    ]
    assert len(HOOKS.matching(["*"], DEPTH)) == 18 * DEPTH + 7


@pytest.mark.parametrize("name", ["blocks.4.hook_resid_post", "blocks.*.hook_mlp_in", "resid"])
def test_a_name_that_no_hook_has_is_refused(name):
    with pytest.raises(InputError, match="matches no hook of a model with layers 0 to 3"):
        HOOKS.matching(["blocks.0.hook_resid_post", name], DEPTH)


@pytest.mark.parametrize(
    "names,layers,last",
    [
        (["hook_embed"], 0, set()),
        (["blocks.2.hook_resid_pre"], 2, set()),
        (["blocks.2.ln1.hook_normalized"], 2, set()),
        (["blocks.2.ln1.hook_out"], 2, {"input_layernorm"}),
        (["blocks.2.attn.hook_q"], 2, {"input_layernorm", "q_proj"}),
        (["blocks.0.attn.hook_rot_k"], 0, {"input_layernorm", "k_proj"}),
        (["blocks.2.attn.hook_z"], 2, {"input_layernorm", "q_proj", "k_proj", "v_proj"}),
        (["blocks.2.attn.hook_pattern"], 2, {"input_layernorm", "q_proj", "k_proj"}),
        (["blocks.2.hook_resid_mid", "blocks.0.mlp.hook_post"], 2, HALF),
        (["blocks.2.hook_mlp_out"], 3, None),
        (["blocks.2.hook_mlp_out", "blocks.2.ln2.hook_out", "blocks.1.attn.hook_z"], 3, None),
        (["blocks.2.hook_resid_post"], 3, None),
    ],
)
def test_only_what_a_hook_needs_is_loaded(names, layers, last, tiny):
    model = create_model_with_hooks(tiny.config, named(*names))
    table = weight_table(model)
    stacked = [spec for path, spec in table.items() if path[0] == "layers"]
    assert {len(spec.hf_names) for spec in stacked} == ({layers} if layers else set())
    assert "norm" not in {path[0] for path in table} and "lm_head" not in table
    loaded = {path[-2] for path in table if path[0] == "last_layer"}
    assert loaded == (last or set())
    assert (model.last_layer is None) == (last is None)
    names_there = {
        name for path, spec in table.items() for name in spec.hf_names if "last" in path[0]
    }
    assert all(name.startswith(f"model.layers.{layers}.") for name in names_there)


@pytest.mark.long
def test_any_set_of_hooks_gives_the_values_of_all_hooks(tiny):
    """Of all kinds and widths; with work left to do after a hook, and with kinds that are in use
    but not asked for at other layers."""
    everything = create_model_with_hooks(tiny.config, every_hook(tiny.config))
    batch = rows(tiny.config.vocab_size, (1, 40))
    params = load(everything, tiny.folder)
    expected, allowed = run(everything, params, *batch), rounding_of(everything, params, *batch)
    for names in (
        ["blocks.0.hook_attn_out"],
        ["blocks.0.hook_resid_post", "blocks.3.hook_mlp_out"],
        ["hook_embed", "blocks.1.attn.hook_k", "blocks.2.mlp.hook_pre", "blocks.2.hook_resid_mid"],
        ["blocks.1.attn.hook_z", "blocks.1.mlp.hook_post", "blocks.3.attn.hook_q"],
        ["blocks.0.attn.hook_rot_q", "ln_final.hook_out", "blocks.3.hook_resid_post"],
        ["blocks.2.*", "blocks.0.mlp.hook_pre"],
        ["blocks.3.ln2.hook_normalized", "blocks.3.ln2.hook_out", "blocks.1.hook_resid_pre"],
        ["blocks.*.ln2.hook_out", "blocks.*.hook_mlp_out"],
    ):
        model = create_model_with_hooks(tiny.config, named(*names))
        found = run(model, load(model, tiny.folder), *batch)
        assert_same_but_for_rounding(found, expected, allowed)


@pytest.mark.long
def test_what_comes_after_the_last_hook_does_not_run(tiny):
    one_cpu = build_layout(jax.devices()[:1], {"model": 1}, kv_heads=2)

    def products(name):
        hooks = named(f"blocks.1.{name}")
        model = create_model_with_hooks(tiny.config, hooks, layout=one_cpu)
        params = {"params": load(model, tiny.folder)}
        program = jax.jit(model.apply).lower(params, *rows(tiny.config.vocab_size, (4, 1024)))
        return program.compile().as_text().count(" dot(")

    before_attention, before_mlp = products("hook_resid_pre"), products("hook_resid_mid")
    assert products("attn.hook_q") == before_attention + 1
    assert products("mlp.hook_pre") == before_mlp + 1 > before_attention + 5


def test_operations_are_counted_as_far_as_layers_run(tiny):
    def flops(name):
        return create_model_with_hooks(tiny.config, named(name)).flops([10, 30])

    size = tiny.config.sizes
    head, whole = 2 * 40 * size["D"] * size["H"], flops_of(tiny.config, 1, [10, 30])
    attention = 2 * (10**2 + 30**2) * size["N"] * size["H"]
    assert flops("hook_embed") == 0 and flops("blocks.2.ln1.hook_out") == 2 * whole
    assert flops("blocks.2.hook_resid_post") == flops("ln_final.hook_out") * 3 / 4 == 3 * whole
    assert flops("blocks.2.attn.hook_q") == 2 * whole + size["N"] * head
    assert flops("blocks.2.attn.hook_v") == 2 * whole + size["K"] * head
    all_heads = 2 * size["N"] + 2 * size["K"]
    assert flops("blocks.2.hook_resid_mid") == 2 * whole + all_heads * head + attention


@pytest.mark.long
def test_a_run_stores_hooks_of_any_width_under_the_names_that_were_asked_for(
    demo_inputs, tmp_path, capsys
):
    """Transcoder pairs and more, in one pass; --verify recomputes them."""
    model = ["--model_path", str(demo_inputs / "model")]
    data = ["--dataset_path", str(demo_inputs / "documents.parquet"), "--max_samples", "20"]
    asked = ["blocks.1.mlp.hook_in", "model.layers.1.mlp.output", "blocks.0.attn.hook_k"]
    asked += ["model.layers.2.mlp.down_proj.input"]
    flags = ["--hook_names", *asked, "--max_seq_length", "64", "--output_dir", str(tmp_path)]
    assert main(*model, *data, *flags) == 0
    shard = pickle.load(gzip.open(tmp_path / "shard_0001.pkl.gz"))
    assert list(shard) == [asked[2], asked[0], asked[1], asked[3]]
    assert {key: records[0]["activation"].shape[1] for key, records in shard.items()} == dict(
        zip(asked, (128, 128, 64, 384), strict=True)
    )
    assert shard[asked[0]][1]["hook"] == "blocks.1.ln2.hook_out"  # the canonical name
    hooks = json.loads((tmp_path / "metadata.json").read_text())["hooks"]
    facts = [
        {name: hook.get(name) for name in ("key", "name", "module", "width")} for hook in hooks
    ]
    assert facts[0] == dict(
        key=asked[2], name=asked[2], module="model.layers.0.self_attn.k_proj.output", width=64
    )
    assert facts[1] | {"width": 128} == facts[1]
    assert facts[1]["name"] == "blocks.1.ln2.hook_out"
    assert facts[3]["name"] == "blocks.2.mlp.hook_post" and facts[3]["module"] == asked[3]
    assert (hooks[0]["heads"], hooks[0]["head_size"]) == (2, 32) and "heads" not in hooks[1]
    commit = json.loads((tmp_path / "shard_0001.json").read_text())
    assert [hook["width"] for hook in commit["hooks"]] == [64, 128, 128, 384]
    assert main("--verify", "--verify_samples", "3", *model, *flags[-2:]) == 0
    assert "3 samples recomputed; 0 problems" in capsys.readouterr().out
    other = [flags[0], "blocks.1.ln2.hook_out", *flags[2:]]
    assert main(*model, *data, *other) == 2
    assert "differs in keyed_by" in capsys.readouterr().err


def test_list_hooks_needs_nothing_but_the_configuration(demo_inputs, tmp_path, capsys):
    (tmp_path / "config.json").write_text((demo_inputs / "model" / "config.json").read_text())
    flags = ["--model_path", str(tmp_path), "--list_hooks", "--activation_dtype", "float16"]
    assert main(*flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(HOOKS.kinds) + 2
    row = next(line.split() for line in lines if "ln2.hook_out" in line)
    assert row[:4] == ["blocks.K.ln2.hook_out", "model.layers.K.mlp.input", "128", "float16"]
    assert row[4] == "256" and "blocks.K.mlp.hook_in" in " ".join(row[5:])
    assert next(line.split() for line in lines if "top_ids" in line)[1:] == ["10", "int32", "40"]
    assert lines[-1] == "K is the layer, from 0 to 11"
    assert not list(tmp_path.glob("shard*"))
    assert main("--list_hooks", "--status") == 2


@pytest.mark.long
def test_clipped_default_layers_are_told(texts, tmp_path, capsys):
    """A model of six layers has none of the default ones: its last layer is taken."""
    config = {**demo.MODEL_CONFIG, "num_hidden_layers": 6}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    demo.write_tokenizer(model, [])
    weights = weight_table(Qwen2(FAMILIES.config(config))).values()
    demo.write_weights(model / "model.safetensors", weights)
    flags = ["--model_path", model, "--dataset_path", texts([{"text": "one"}])]
    flags += ["--output_dir", tmp_path / "out", "--max_seq_length", 16]
    assert main(*flags) == 0
    log = capsys.readouterr().err
    assert "the default layers, 10 to 23, are clipped: the model has layers 0 to 5\n" in log
    assert "hooks: blocks.5.hook_resid_post; width 128" in log
    for typed, layers in ((["all"], range(6)), (["4-5", "0"], (0, 4, 5))):
        out = tmp_path / typed[0]
        flags[flags.index("--output_dir") + 1] = out
        more = [*map(str, flags), "--layers_to_extract", *typed]
        assert main(*more) == 0
        names = [f"blocks.{layer}.hook_resid_post" for layer in layers]
        assert list(ActivationDataset(out).hooks) == names
