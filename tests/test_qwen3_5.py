"""Qwen3.5: its configurations and checkpoints, meshes, and a run with layers of both types."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from conftest import Reference, make_reference
from delta_reference import QWEN3_5, VISION
from safetensors.numpy import load_file, save_file
from test_mesh import SHAPES
from test_model import every_hook, flops_of
from tiny_models import MOE_TEXT, TEXT
from watched import Watched

from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.hooks import hook_table
from activation_extraction.model.mesh import build_layout, usable_devices
from activation_extraction.model.weights import check_tensors, load_params
from qwen2_jax import Qwen2, weight_table
from qwen2_jax_with_hooks import FAMILIES, create_model_with_hooks

LINEAR, FULL = "linear_attention", "full_attention"


def test_what_a_configuration_says():
    config = FAMILIES.config(TEXT)
    assert config.layer_types == (LINEAR, FULL, LINEAR, FULL)
    assert config.rope.share == 0.25 and len(config.rope.frequencies(64)) == 8
    nested = {"model_type": "qwen3_5", "text_config": TEXT, "vision_config": VISION}
    inside = FAMILIES.config(nested | {"tie_word_embeddings": True})
    assert inside.tie_word_embeddings and not config.tie_word_embeddings
    assert inside.delta == config.delta and inside.sizes == config.sizes
    assert config.prefix == "model." and inside.prefix == "model.language_model."


@pytest.mark.parametrize(
    "change,named",
    [
        ({"linear_num_value_heads": 6}, "linear_num_value_heads 6 is not a multiple of .* 4"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim must be a positive integer"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer 0 is 'sliding_attention', and only"),
        ({"attn_output_gate": False}, "attn_output_gate False is not supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.05}}, "rotates 3 of a"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 1.5}}, "factor 1.5"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change, named):
    with pytest.raises(InputError, match=named):
        FAMILIES.config({"model_type": "qwen3_5", "text_config": TEXT | change})


def test_quantised_checkpoints_are_refused_wherever_it_is_said():
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    for raw in (
        {"model_type": "qwen3_5", "text_config": TEXT, **quantised},
        {"model_type": "qwen3_5", "text_config": TEXT | quantised},
    ):
        with pytest.raises(InputError, match="fp8.: quantised"):
            FAMILIES.config(raw)


def test_each_type_of_layer_has_hooks_of_its_own():
    table = hook_table(FAMILIES.config(TEXT))
    found = {hook.name for hook in table.all_hooks(4)}
    for name, own in (
        ("linear_attn.hook_log_decay", (0, 2)),
        ("linear_attn.out_proj.hook_in", (0, 2)),
        ("attn.hook_q_gate", (1, 3)),
        ("hook_attn_out", (1, 3)),
        ("ln1.hook_out", (0, 1, 2, 3)),
    ):
        layers = [k for k in range(4) if f"blocks.{k}.{name}" in found]
        assert layers == [*own], name
    (hook,) = table.matching(["blocks.2.linear_attn.hook_in"], 4).values()
    assert hook.name == "blocks.2.ln1.hook_out"
    module, alias = "model.layers.2.input_layernorm.output", "blocks.2.linear_attn.hook_in"
    assert hook.facts({"D": 64}) == {"module": module, "aliases": [alias, module], "width": 64}
    with pytest.raises(InputError, match="layer 0 is of type linear_attention"):
        table.of_layers([0], "attn", 4)
    (values,) = table.matching(["blocks.0.linear_attn.hook_v"], 4).values()
    facts = values.facts(FAMILIES.config(TEXT).sizes)
    assert facts == {"module": None, "aliases": [], "width": 128, "heads": 8, "head_size": 16}


def test_what_is_before_the_mlp_and_what_the_mlp_is_vary_independently():
    config = FAMILIES.config(MOE_TEXT | {"norm_topk_prob": False})  # which transformers ignores
    assert config.layer_types == (f"{LINEAR} sparse", f"{FULL} sparse") * 2
    assert config.experts.renormalise and config.delta == FAMILIES.config(TEXT).delta
    some = dataclasses.replace(config, sparse_layers=(0, 1), intermediate_size=128)
    assert some.layer_types[1:] == (f"{FULL} sparse", f"{LINEAR} dense", f"{FULL} dense")
    found = {hook.name for hook in hook_table(some).all_hooks(4)}
    for name, own in (
        ("linear_attn.hook_beta", (0, 2)),
        ("attn.hook_q_gate", (1, 3)),
        ("mlp.gate.hook_out", (0, 1)),
        ("mlp.shared_expert.hook_out", (0, 1)),
        ("mlp.hook_pre", (2, 3)),
        ("hook_mlp_out", (0, 1, 2, 3)),
    ):
        assert [k for k in range(4) if f"blocks.{k}.{name}" in found] == [*own], name
    with pytest.raises(InputError, match="layer 0 is of type linear_attention sparse and has no"):
        hook_table(some).matching(["blocks.0.mlp.hook_post"], 4)
    stacks = {path[1] for path in weight_table(Qwen2(some)) if path[0] == "layers"}
    assert stacks == {*some.layer_types}
    found, dense = (
        np.diff([0, *(flops_of(each, layers, [1]) for layers in range(1, 5))])
        for each in (some, FAMILIES.config(TEXT))
    )
    more = 64 * (6 + 2 * 3 * 40 + 3 * 64 + 1) - 3 * 64 * 128  # weights
    assert (found - dense).tolist() == [2 * more, 2 * more, 0, 0]


def test_operations_of_a_model_with_both_types():
    config, lengths = FAMILIES.config(TEXT), [10, 3]
    mlp, tokens = 3 * 64 * 128, 13
    convolutions = (2 * 4 * 16 + 8 * 16) * 4
    projections = 64 * (2 * 4 * 16 + 8 * 16 + 8 * 16 + 2 * 8 + 8 * 16)
    recurrence = 3 * 8 * 16 * 16  # S^T k, the update and S^T q
    linear = 2 * tokens * (mlp + projections + convolutions + recurrence)
    assert flops_of(config, 1, lengths) == linear
    heads = 64 * 64 * (2 * 4 + 2 * 2 + 4)  # queries with gates, keys, values, and back
    full = 2 * tokens * (mlp + heads) + 2 * 4 * 64 * (10**2 + 3**2)
    assert flops_of(config, 2, lengths) == linear + full
    for name, last in (("hook_q", 64 * 4 * 16 + 4 * 16 * 4), ("hook_beta_logit", 64 * 8)):
        table = hook_table(config)
        hooks = table.matching([f"blocks.2.linear_attn.{name}"], 4).values()
        model = create_model_with_hooks(config, [*hooks])
        assert model.flops(lengths) == linear + full + 2 * tokens * last


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("small"), **TEXT)


def test_key_heads_are_split_with_their_value_heads(small):
    """And of the tensor that queries, keys and values share, every byte is read once."""
    checkpoint = Watched(small.folder)
    layout = build_layout(usable_devices(every=True), SHAPES["2d"], kv_heads=2)
    hooks = hook_table(small.config).of_layers([3], "residual", 4)
    table = weight_table(create_model_with_hooks(small.config, hooks, layout=layout))
    params = load_params(table, checkpoint, np.float32, layout)
    own = params["layers"][LINEAR]["linear_attn"]
    for name, shape in (
        ("in_proj_q", (2, 1, 16, 64)),
        ("in_proj_v", (2, 1, 2, 16, 64)),
        ("conv1d_k", (2, 1, 16, 1, 4)),
        ("out_proj", (2, 64, 32)),
    ):
        assert {x.data.shape for x in own[name]["weight"].addressable_shards} == {shape}, name
    assert {x.data.shape for x in own["A_log"].addressable_shards} == {(2, 1, 2)}
    checkpoint.check_read_once(table)


def test_some_weights_in_float32_and_what_is_beside_the_language_model(tmp_path):
    """As released: rounded as transformers rounds them; and only the language model is read."""
    import torch

    reference = make_reference(tmp_path, **QWEN3_5["qwen3_5_tied_beside_vision"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    kept = [name for name in tensors if name.endswith(("A_log", "linear_attn.norm.weight"))]
    assert len(kept) == 2 and any("visual" in name for name in tensors)
    rounded = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    beside = {"mtp.fc.weight": np.ones((2, 2), np.float32)}
    save_file(rounded | {name: tensors[name] for name in kept} | beside, file)
    family, config = FAMILIES.read_config(tmp_path / "config.json")
    model = create_model_with_hooks(config, every_hook(config))
    checkpoint, table = Checkpoint(str(tmp_path)), family.weight_table(model)
    known = family.tensor_names(config, checkpoint.tensors)
    check_tensors(checkpoint, table.values(), known, family.ignored)
    with pytest.raises(InputError, match="tensor m.* is unknown"):
        check_tensors(checkpoint, table.values(), known)
    layout = build_layout(usable_devices(every=False), {"model": 1}, kv_heads=1)
    params = load_params(table, checkpoint, ml_dtypes.bfloat16, layout)
    (delta,) = (one for one in reference.language.bfloat16().layers if hasattr(one, "linear_attn"))
    got = np.asarray(params["layers"][LINEAR]["linear_attn"]["A_log"]).reshape(-1)
    expected = delta.linear_attn.A_log.detach().to(torch.float32).numpy()
    np.testing.assert_array_equal(got.astype(np.float32), expected)
