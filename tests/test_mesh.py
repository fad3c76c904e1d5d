"""Meshes of eight devices: the numbers of one device, split weights, and refusals."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_reference
from jax import lax
from jax.sharding import Mesh
from test_model import (
    TOLERANCE,
    assert_same_but_for_rounding,
    by_hook,
    every_hook,
    load,
    packed,
    rms,
    rounding_of,
    run,
)
from tiny_models import MOE_TEXT, SHARED, TEXT
from watched import Watched

from activation_extraction.common.errors import InputError
from activation_extraction.model import layers
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.mesh import (
    HostRows,
    build_layout,
    check_divisibility,
    choose_shape,
    host_rows,
    usable_devices,
)
from activation_extraction.model.weights import load_params
from qwen2_jax import weight_table
from qwen2_jax_with_hooks import HOOKS, create_model_with_hooks

SHAPES = {
    "1d": {"model": 8},
    "2d": {"data": 2, "model": 4},
    "3d pipeline": {"pipeline": 2, "data": 2, "model": 2},
    "3d fsdp": {"data": 2, "fsdp": 2, "model": 2},
    "deep pipeline": {"pipeline": 4, "model": 2},
    "all": {"pipeline": 2, "fsdp": 2, "model": 2},
    "model first": {"model": 2, "data": 4},
}
WITH_EXPERTS = {
    "expert": {"expert": 2, "model": 4},
    "data": {"data": 2, "expert": 2, "model": 2},
    "pipeline": {"pipeline": 2, "expert": 2, "model": 2},
    "fsdp": {"fsdp": 2, "data": 2, "expert": 2},
}
ODD_HOOKS = [  # several widths, none of layer 1, and of the last layer only a part
    "blocks.0.hook_mlp_out",
    "blocks.0.attn.hook_k",
    "blocks.2.attn.hook_z",
    "blocks.2.hook_resid_post",
    "blocks.3.mlp.hook_pre",
    "blocks.3.ln2.hook_out",
]
ODD_HOOKS_OF_DELTA_NETS = [
    "blocks.0.linear_attn.hook_recurrence_out",
    "blocks.1.attn.hook_z",
    "blocks.2.linear_attn.hook_k",
    "blocks.3.hook_resid_post",
]
WINDOWS = dict(use_sliding_window=True, sliding_window=11, max_window_layers=2)
QWEN3 = dict(model_type="qwen3", head_dim=32, attention_bias=True)
FIVE = dict(num_hidden_layers=5, intermediate_size=128, num_key_value_heads=2)
SMALL: dict[str, dict[str, Any]] = {
    "1 kv head": FIVE | dict(num_key_value_heads=1),
    "2 kv heads": FIVE,
    "4 kv heads": FIVE | dict(num_key_value_heads=4),
    "qwen3 with windows": FIVE | QWEN3 | WINDOWS,
    "experts": SHARED | dict(num_key_value_heads=2, num_hidden_layers=4, decoder_sparse_step=2),
    "delta nets": TEXT,
    "delta nets and experts": MOE_TEXT,
}


@pytest.fixture(scope="module", params=["2 kv heads"])
def small(request, tmp_path_factory):
    """A model, packed rows, and its hooks' values on one device for them."""
    reference = make_reference(tmp_path_factory.mktemp("small"), **SMALL[request.param])
    return reference, packed(reference.config.vocab_size), {}


def run_on(reference, batch, hooks, shape, hosts=1, kernels=None):
    """Activations on a mesh, as the run gets them; the devices as if on that many hosts."""
    devices = usable_devices(every=True)
    layout = build_layout(devices, shape, reference.config.num_key_value_heads)
    grid = np.array(devices, object).reshape(hosts, -1)
    coming = HostRows(Mesh(grid, ("host", "device")))
    model = create_model_with_hooks(reference.config, hooks, kernels=kernels, layout=layout)
    checkpoint = Checkpoint(str(reference.folder))
    table = weight_table(model, checkpoint.tensors)
    params = load_params(table, checkpoint, np.float32, layout)
    forward = jax.jit(model.apply, out_shardings=coming.outgoing(64, layout))
    inputs = [jax.device_put(array, coming.incoming()) for array in batch]
    return forward({"params": params}, *inputs), model


# One model on every mesh, and the others on those that split their heads or their layers.
CASES = [("2 kv heads", name, hooks) for name in SHAPES for hooks in ("every", "odd")]
OTHERS = "1 kv head", "4 kv heads", "qwen3 with windows"
CASES += [(model, name, "odd") for model in OTHERS for name in ("1d", "2d", "3d pipeline")]
CASES += [("experts", name, "every") for name in (*WITH_EXPERTS, "1d")]
CASES += [("delta nets", name, "odd") for name in ("1d", "3d fsdp", "3d pipeline")]
CASES += [("delta nets", "2d", "every"), ("delta nets and experts", "data", "odd")]
QUICK = [("2 kv heads", name, "odd") for name in ("2d", "3d pipeline")]


@pytest.mark.parametrize(
    "small,name,hooks",
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.long) for case in CASES],
    indirect=["small"],
)
def test_every_mesh_gives_the_values_of_one_device(small, name, hooks):
    reference, batch, expected = small
    chosen = every_hook(reference.config)
    delta_nets = reference.config.delta is not None
    if hooks == "odd":
        odd = ODD_HOOKS_OF_DELTA_NETS if delta_nets else ODD_HOOKS
        chosen = [hook for hook in chosen if hook.name in odd]
        assert len(chosen) == len(odd)
    real = batch[1] > 0
    if hooks not in expected:
        alone = create_model_with_hooks(reference.config, chosen)
        params = load(alone, reference.folder)
        values = {hook: value[real] for hook, value in run(alone, params, *batch).items()}
        allowed = {hook.name: TOLERANCE * rms(value) for hook, value in values.items()}
        if not delta_nets:
            allowed = rounding_of(alone, params, *batch)
        expected[hooks] = values, allowed
    found, model = run_on(reference, batch, chosen, (SHAPES | WITH_EXPERTS)[name], hosts=2)
    for got in found.values():
        assert len({str(shard.index) for shard in got.addressable_shards}) == 8
    values = {hook: value[real] for hook, value in by_hook(model, found).items()}
    assert_same_but_for_rounding(values, *expected[hooks])


@pytest.mark.long
def test_rounding_the_parts_of_a_sum_costs_little(small, monkeypatch):
    """What accelerators do in bfloat16 where products are split over devices, here on CPUs."""
    reference, batch, _ = small
    config, platform_dependent = reference.config, lax.platform_dependent
    chosen = [hook for hook in every_hook(config) if hook.name.endswith("hook_resid_post")]

    def values(shape, dtype):
        layout = build_layout(usable_devices(every=True)[:4], shape, config.num_key_value_heads)
        model = create_model_with_hooks(config, chosen, dtype, jnp.float32, layout=layout)
        checkpoint = Checkpoint(str(reference.folder))
        params = load_params(weight_table(model, checkpoint.tensors), checkpoint, dtype, layout)
        found = by_hook(model, jax.jit(model.apply)({"params": params}, *batch))
        return np.stack([found[hook] for hook in chosen])

    def as_elsewhere(*arrays, cpu=None, default=None, **others):
        return platform_dependent(*arrays, cpu=default, default=default, **others)

    exact = values({"data": 4}, jnp.float32)
    whole, split = (values({"model": 4}, jnp.bfloat16) for _ in range(2))
    assert np.array_equal(whole, split)
    monkeypatch.setattr(layers.lax, "platform_dependent", as_elsewhere)
    rounded = values({"model": 4}, jnp.bfloat16)
    assert not np.array_equal(rounded, whole)
    errors = [np.sqrt(np.square(found - exact).mean()) for found in (whole, rounded)]
    assert errors[1] < 1.2 * errors[0]


@pytest.mark.parametrize("small", ["1 kv head", "2 kv heads", "4 kv heads"], indirect=True)
def test_weights_are_split_and_read_only_once(small):
    """Per device: what the axes leave of each weight; per process: every byte once."""
    reference, _, _ = small
    shape = {"pipeline": 2, "fsdp": 2, "model": 2}
    kv_heads = reference.config.num_key_value_heads
    layout = build_layout(usable_devices(every=True), shape, kv_heads)
    model = create_model_with_hooks(
        reference.config, HOOKS.of_layers([4], "residual", 5), layout=layout
    )
    table, checkpoint = weight_table(model), Watched(reference.folder)
    params = load_params(table, checkpoint, np.float32, layout)
    mlp = params["layers"]["mlp"]["gate_proj"]["weight"]  # (6 with padding, 128, 64)
    assert {shard.data.shape for shard in mlp.addressable_shards} == {(3, 64, 32)}
    q = params["layers"]["self_attn"]["q_proj"]["weight"]
    heads = 4 // math.gcd(kv_heads, 2)
    size = reference.config.head_dim
    assert {shard.data.shape for shard in q.addressable_shards} == {(3, heads, size, 32)}
    checkpoint.check_read_once(table)


@pytest.mark.parametrize(
    "kind,shape,axes,devices,hosts,expected",
    [
        ("2d", None, None, 1, 1, {"data": 1, "model": 1}),
        ("2d", None, None, 4, 1, {"data": 1, "model": 4}),
        ("2d", None, None, 8, 1, {"data": 2, "model": 4}),
        ("2d", None, None, 64, 16, {"data": 16, "model": 4}),
        ("1d", None, None, 64, 4, {"model": 64}),
        ("3d", None, None, 64, 4, {"pipeline": 4, "data": 4, "model": 4}),
        ("3d", None, ("data", "fsdp", "model"), 64, 4, {"data": 4, "fsdp": 4, "model": 4}),
        (
            *("3d", None, ("pipeline", "fsdp", "model"), 128, 8),
            {"pipeline": 4, "fsdp": 8, "model": 4},
        ),
        (None, (2, 2, 2), ("data", "model", "fsdp"), 8, 1, {"data": 2, "model": 2, "fsdp": 2}),
        ("3d", (2, 2, 2), None, 8, 1, {"pipeline": 2, "data": 2, "model": 2}),
        (None, (8,), None, 8, 1, {"model": 8}),
    ],
)
def test_shapes_that_are_chosen(kind, shape, axes, devices, hosts, expected):
    chosen, why = choose_shape(kind, shape, axes, devices, hosts, automatic=dict)
    assert chosen == expected and list(chosen) == list(expected) and not why


def test_3d_on_few_devices_falls_back_and_says_so():
    chosen, why = choose_shape("3d", None, None, 8, 1, dict)
    assert chosen == {"data": 2, "model": 4}
    assert "64 or more" in why and "8 devices become a 2d" in why


def test_a_shape_that_does_not_fit_names_both_numbers_and_what_would():
    with pytest.raises(InputError) as refused:
        choose_shape(None, (3, 4), None, 8, 1, dict)
    assert "is 12 devices, there are 8" in str(refused.value)
    assert "2,4; 4,2; 1,8; 8,1" in str(refused.value)


def test_what_does_not_divide_is_refused(small):
    reference, _, _ = small
    sizes = reference.config.sizes
    devices = usable_devices(every=True)
    check_divisibility(build_layout(devices, {"data": 8}, 2), 16, 64, sizes)
    with pytest.raises(InputError, match="--batch_size.* 12 does not divide among 8"):
        check_divisibility(build_layout(devices, {"data": 4, "fsdp": 2}, 2), 12, 64, sizes)
    with pytest.raises(InputError, match="--max_seq_length: 66 does not divide among 4"):
        check_divisibility(build_layout(devices, {"model": 8}, 2), 8, 66, sizes)
    with pytest.raises(InputError, match="intermediate_size: 100 does not divide among 8"):
        check_divisibility(build_layout(devices, {"model": 8}, 8), 8, 64, sizes | {"F": 100})


def test_hosts_with_different_numbers_of_devices_are_refused():
    class Device:
        def __init__(self, process_index):
            self.process_index = process_index

    with pytest.raises(InputError, match="different numbers of devices"):
        host_rows([Device(0), Device(0), Device(1)])
