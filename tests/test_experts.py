"""Layers with experts: dispatch, meshes with the axis `expert`, neighbours, checkpoints."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Reference, make_reference
from rounding import assert_rounded_alike, assert_within_rounding
from safetensors.numpy import save_file
from test_mesh import SHAPES, SMALL, WITH_EXPERTS
from test_model import (
    INDICES,
    every_hook,
    flops_of,
    load,
    rounding_of,
    run,
)
from tiny_models import MOE
from watched import Watched

from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.experts import (
    TILE,
    ragged_experts,
    route,
    tiled_experts,
)
from activation_extraction.model.hooks import hook_table
from activation_extraction.model.mesh import build_layout, check_divisibility, usable_devices
from activation_extraction.model.weights import check_tensors, load_params
from qwen2_jax import Qwen2, weight_table
from qwen2_jax_with_hooks import FAMILIES, create_model_with_hooks


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Reference:
    """Every second layer has experts, and a shared one."""
    folder = tmp_path_factory.mktemp("small")
    return make_reference(folder, **SMALL["experts"])


def test_experts_are_split_and_each_device_reads_its_own(small):
    checkpoint = Watched(small.folder)
    layout = build_layout(usable_devices(every=True), WITH_EXPERTS["data"], 2)
    model = create_model_with_hooks(small.config, every_hook(small.config), layout=layout)
    params = load_params(weight_table(model), checkpoint, np.float32, layout)
    gate = params["layers"]["sparse"]["mlp"]["experts"]["gate_proj"]["weight"]
    assert gate.shape[1:] == (6, 64, 40)
    assert {shard.data.shape[1:] for shard in gate.addressable_shards} == {(3, 64, 20)}
    name = "model.layers.1.mlp.experts.4.gate_proj.weight"
    assert checkpoint.sizes[name] == [4 * 20 * 64] * 2


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("sizes", [(0, 200, 1, 63, 64, 0), (5, 0, 0, 0, 0, 0), (0,) * 6])
def test_tiles_compute_what_the_definition_says(sizes, dtype):
    """Rows after those of all experts, as other devices' are, do not matter."""
    rng, total = np.random.default_rng(0), sum(sizes)
    x = jnp.array(rng.standard_normal((total + 30, 32)), dtype)
    gate, up = jnp.array(rng.standard_normal((2, 6, 32, 24)) / 5, dtype)
    down = jnp.array(rng.standard_normal((6, 24, 32)) / 5, dtype)
    inputs = jnp.array(sizes, jnp.int32), gate, up, down
    assert TILE < 200
    got = jax.jit(tiled_experts)(x, *inputs)
    assert got.shape == x.shape and got.dtype == dtype

    def definition(x, *matrices):
        return ragged_experts(x, inputs[0], *matrices)[:total]

    arrays = x, *inputs[1:]
    if dtype == jnp.float32 and total:
        assert_within_rounding(got[:total], definition, arrays, terms=32)
    elif total:
        exact = definition(*(array.astype(jnp.float32) for array in arrays))
        assert_rounded_alike(got[:total], definition(*arrays), exact)


def test_equal_logits_choose_the_first_experts():
    weights, chosen = route(jnp.array([[[1.0, 3.0, 3.0, 2.0, 3.0]]]), 2, True)
    assert chosen.tolist() == [[[1, 2]]] and weights.tolist() == [[[0.5, 0.5]]]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_sample_is_the_same_with_other_neighbours(small, dtype):
    """In its row and in its batch: within rounding, and with the same experts."""
    config = small.config
    model = create_model_with_hooks(config, every_hook(config), dtype, jnp.float32)
    params = load(model, small.folder, dtype)
    first, second = (np.random.default_rng(seed).integers(0, 211, (4, 96)) for seed in (1, 2))
    second[2, 30:70] = first[2, 30:70]
    segment_ids = np.ones((4, 96), np.int32)
    segment_ids[2, 30:], segment_ids[2, 70:] = 2, 3
    positions = np.broadcast_to(np.arange(96, dtype=np.int32), (4, 96)).copy()
    positions[2, 30:] -= 30
    positions[2, 70:] -= 40
    values = [
        run(model, params, token_ids.astype(np.int32), segment_ids, positions)
        for token_ids in (first, second)
    ]
    exact = create_model_with_hooks(config, every_hook(config))
    batch = first.astype(np.int32), segment_ids, positions
    allowed = rounding_of(exact, load(exact, small.folder), *batch)
    for hook, value in values[0].items():
        got, expected = value[2, 30:70], values[1][hook][2, 30:70]
        if hook.name.endswith(INDICES):
            np.testing.assert_array_equal(got, expected)
        assert np.abs(got - expected).max() <= allowed[hook.name], hook.name


@pytest.mark.parametrize("layout", ["fused", "apart"])
def test_both_layouts_of_a_checkpoint_give_the_same_weights(small, tmp_path, layout):
    """transformers writes a tensor for each expert, and holds fused ones in memory."""
    folder, model = small.folder, Qwen2(small.config)
    if layout == "fused":
        folder = tmp_path
        tensors = {name: tensor.numpy() for name, tensor in small.model.state_dict().items()}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((small.folder / "config.json").read_text())
    checkpoint = Checkpoint(str(folder))
    assert ("model.layers.1.mlp.experts.gate_up_proj" in checkpoint.tensors) == (layout == "fused")
    known = FAMILIES.by_model_type("qwen2_moe").tensor_names(small.config, checkpoint.tensors)
    check_tensors(checkpoint, weight_table(model, checkpoint.tensors).values(), known)
    sparse = load(model, folder)["layers"]["sparse"]["mlp"]["experts"]
    state = {name: tensor.numpy() for name, tensor in small.model.state_dict().items()}
    both = state["model.layers.3.mlp.experts.gate_up_proj"]
    down = state["model.layers.1.mlp.experts.down_proj"]
    for name, row, expected in (
        ("gate_proj", 1, both[:, :40]),
        ("up_proj", 1, both[:, 40:]),
        ("down_proj", 0, down),
    ):
        np.testing.assert_array_equal(sparse[name]["weight"][row], expected.swapaxes(1, 2))


def test_the_operations_of_a_token_are_those_of_its_experts(small):
    config = small.config
    of_layers = np.diff([0, *(flops_of(config, layers, [1]) for layers in range(1, 5))])
    more = 64 * (6 + 2 * 3 * 40 + 3 * 72 + 1) - 3 * 64 * 112  # weights than those of an MLP
    assert (of_layers - of_layers[0]).tolist() == [0, 2 * more, 0, 2 * more]
    table = hook_table(config)

    def flops(name):
        hooks = list(table.matching([name], 4).values())
        return create_model_with_hooks(config, hooks).flops([10])

    before, routed = (flops(f"blocks.1.mlp.{n}") for n in ("gate.hook_out", "experts.hook_out"))
    assert routed - before == 2 * 10 * 64 * 2 * 3 * 40
    assert flops("blocks.1.hook_resid_post") == flops_of(config, 2, [10])


def test_names_mean_what_the_layer_has(small):
    table = hook_table(small.config)
    for pattern, name, layers in (
        ("blocks.*.mlp.gate.hook_out", "gate.hook_out", (1, 3)),
        ("blocks.*.mlp.dense_gate.hook_out", "hook_pre", (0, 2)),
        ("blocks.*.mlp.dense_out.hook_in", "hook_post", (0, 2)),
    ):
        found = [hook.name for hook in table.matching([pattern], 4).values()]
        assert found == [f"blocks.{layer}.mlp.{name}" for layer in layers]
    for name in ("blocks.1.mlp.hook_post", "model.layers.3.mlp.down_proj.output"):
        with pytest.raises(InputError, match="is of type sparse and has no such hook"):
            table.matching([name], 4)
    assert len(table.of_layers([0, 1], "mlp", 4)) == 2


@pytest.mark.parametrize(
    "change,named",
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 is more than num_experts 6"),
        ({"num_experts": 0}, "num_experts must be a positive integer, found 0"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be a positive"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive"),
        ({"mlp_only_layers": list(range(24))}, "no layer has experts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised checkpoints"),
    ],
)
def test_what_cannot_be_computed_is_refused(change, named):
    with pytest.raises(InputError, match=named):
        FAMILIES.config(MOE | change)


def test_what_does_not_divide_among_devices_is_refused(small):
    sizes, devices = small.config.sizes, usable_devices(every=True)
    check_divisibility(build_layout(devices, WITH_EXPERTS["data"], 2), 8, 64, sizes)
    check_divisibility(build_layout(devices, SHAPES["1d"], 2), 8, 64, sizes)  # of 6 experts
    with pytest.raises(InputError, match="num_experts: 6 does not divide among 4 devices .expert"):
        check_divisibility(build_layout(devices, {"expert": 4, "model": 2}, 2), 8, 64, sizes)
    with pytest.raises(InputError, match="moe_intermediate_size: 20 does not divide among 8"):
        check_divisibility(build_layout(devices, {"model": 8}, 2), 8, 64, sizes | {"M": 20})
    with pytest.raises(InputError, match="--mesh_axes expert: the model has no experts"):
        dense = FAMILIES.config(json.loads('{"model_type": "qwen3"}')).sizes
        check_divisibility(build_layout(devices, {"expert": 2, "model": 4}, 2), 8, 64, dense)
