"""Layers of different types in one model: their parameters, their hooks, and pipelines of them.

The types are two names for the same layer, so that one type gives the values to expect.
"""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import Reference, make_reference
from test_mesh import ODD_HOOKS
from test_model import assert_same_but_for_rounding, by_hook, load, rounding_of, rows, run

from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.decoder import stage_length
from activation_extraction.model.hooks import HOOKS
from activation_extraction.model.mesh import build_layout, usable_devices
from activation_extraction.model.model_config import QwenConfig
from activation_extraction.model.weights import load_params
from qwen2_jax import weight_table
from qwen2_jax_with_hooks import create_model_with_hooks


class Mixed(QwenConfig):
    @property
    def layer_types(self) -> tuple[str, ...]:
        return tuple("abb"[layer % 3] for layer in range(self.num_hidden_layers))


def mixed(config: QwenConfig) -> Mixed:
    fields = [field.name for field in dataclasses.fields(config)]
    return Mixed(**{name: getattr(config, name) for name in fields})


@pytest.fixture(scope="module")
def five(tmp_path_factory) -> Reference:
    folder = tmp_path_factory.mktemp("five")
    return make_reference(
        folder,
        num_key_value_heads=2,
        num_hidden_layers=5,
        intermediate_size=128,
        use_sliding_window=True,
        sliding_window=11,
        max_window_layers=2,
    )


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory) -> Reference:
    folder = tmp_path_factory.mktemp("sixteen")
    return make_reference(
        folder, num_key_value_heads=2, num_hidden_layers=16, intermediate_size=128
    )


@pytest.mark.long
@pytest.mark.parametrize("shape", [{"model": 1}, {"pipeline": 2, "data": 2, "model": 2}])
def test_layers_of_two_types_are_run_in_their_order(five, shape):
    layout = build_layout(usable_devices(every=True)[: np.prod([*shape.values()])], shape, 2)
    batch = rows(five.config.vocab_size, (8, 64))
    hooks = list(HOOKS.matching(ODD_HOOKS, 5).values())
    alone = create_model_with_hooks(five.config, hooks)
    own = load(alone, five.folder)
    expected, allowed = run(alone, own, *batch), rounding_of(alone, own, *batch)
    model = create_model_with_hooks(mixed(five.config), hooks, layout=layout)
    params = load_params(weight_table(model), Checkpoint(str(five.folder)), np.float32, layout)
    assert set(params["layers"]) == {"a", "b"}
    found = jax.jit(model.apply)({"params": params}, *batch)
    assert_same_but_for_rounding(by_hook(model, found), expected, allowed)


@pytest.mark.long
def test_a_type_that_no_layer_of_the_loop_has_is_not_loaded(five):
    hooks = HOOKS.matching(["blocks.0.hook_resid_post", "blocks.1.attn.hook_q"], 5).values()
    batch = rows(211, (1, 8))
    alone = create_model_with_hooks(five.config, list(hooks))
    model = create_model_with_hooks(mixed(five.config), list(hooks))
    params = load(model, five.folder)
    assert set(params["layers"]) == {"a"} and "q_proj" in params["last_layer"]["self_attn"]
    own = load(alone, five.folder)
    expected, allowed = run(alone, own, *batch), rounding_of(alone, own, *batch)
    assert_same_but_for_rounding(run(model, params, *batch), expected, allowed)


@pytest.mark.parametrize(
    "types,stages,length",
    [
        ("aaaaa", 2, 3),
        ("aaaaa", 4, 2),  # the last stage is filled up completely, as with one type it may be
        ("abbabbab", 3, 3),
        ("aaabaaabaaabaa", 2, 8),  # 7 would not repeat
        ("abbb", 1, 4),
    ],
)
def test_stages_have_the_same_sequence_of_types(types, stages, length):
    assert stage_length(types, stages) == length


@pytest.mark.parametrize(
    "stages,last,length", [(2, 5, 3), (2, 6, 4), (4, 5, 2), (4, 7, 2), (8, 7, 1), (2, 15, 8)]
)
def test_stages_have_only_the_layers_up_to_the_last_hook(sixteen, stages, last, length):
    """All that a stage has and loads is of these, and the stages are as short as can be."""
    layout = build_layout(usable_devices(every=True)[:stages], {"pipeline": stages}, 2)
    hooks = HOOKS.of_layers([2, last], "mlp", 16)
    model = create_model_with_hooks(sixteen.config, hooks, layout=layout)
    assert (model.num_layers, model.layers_per_stage) == (last + 1, length)
    table = weight_table(model)
    named = {name for spec in table.values() for name in spec.hf_names}
    layers = {int(name.split(".")[2]) for name in named if ".layers." in name}
    assert layers == set(range(last + 1)) and "model.norm.weight" not in named
    params = load_params(table, Checkpoint(str(sixteen.folder)), np.float32, layout)
    for value in jax.tree.leaves(params["layers"]):
        assert len(value) == stages * length
        shards = {str(shard.index): len(shard.data) for shard in value.addressable_shards}
        assert list(shards.values()) == [length] * stages
        assert not np.asarray(value[last + 1 :]).any()  # to make the last stage as long


@pytest.mark.long
def test_stages_that_would_differ_are_refused(five):
    layout = build_layout(usable_devices(every=True)[:2], {"pipeline": 2}, 2)
    hooks = HOOKS.of_layers([2], "residual", 5)
    create_model_with_hooks(five.config, hooks, layout=layout)
    with pytest.raises(InputError, match="2 pipeline stages .* layers 0 to 2 are 1 a, 2 b"):
        create_model_with_hooks(mixed(five.config), hooks, layout=layout)
