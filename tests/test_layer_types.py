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
from qwen2_jax import Qwen2, weight_table
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


def test_parameters_of_a_type_are_those_of_its_layers(five):
    table = weight_table(Qwen2(mixed(five.config)))
    names = {path[1]: spec.hf_names for path, spec in table.items() if path[-2] == "q_proj"}
    assert names["a"] != names["b"]
    found = {path: spec for path, spec in table.items() if path[-2:] == ("o_proj", "weight")}
    numbers = {
        path[1]: [int(n.split(".")[2]) for n in spec.hf_names] for path, spec in found.items()
    }
    assert numbers == {"a": [0, 3], "b": [1, 2, 4]}


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


OF_B = dataclasses.replace(
    HOOKS,
    kinds=tuple(dataclasses.replace(k, types=("b",) * ("mlp." in k.name)) for k in HOOKS.kinds),
)


def test_a_hook_that_a_layer_lacks_is_neither_listed_nor_taken(five):
    table = OF_B.for_layer_types(mixed(five.config).layer_types)
    listed = [hook.layer for hook in table.all_hooks(5) if hook.kind.name.endswith("mlp.hook_pre")]
    assert listed == [1, 2, 4]
    assert [*table.matching(["blocks.*.mlp.hook_pre"], 5)] == [
        f"blocks.{layer}.mlp.hook_pre" for layer in listed
    ]
    with pytest.raises(InputError, match="blocks.3.mlp.hook_pre: layer 3 is of type a and has no"):
        table.matching(["blocks.3.mlp.hook_pre"], 5)
    assert len(OF_B.for_layer_types(("a", "a")).kinds) == len(HOOKS.kinds) - 3


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


def test_stages_that_cannot_be_alike_are_refused():
    with pytest.raises(InputError, match="layers 0 to 3 are 1 a, 3 b; choose another number"):
        stage_length("abbb", 2)


@pytest.mark.long
def test_stages_that_would_differ_are_refused(five):
    layout = build_layout(usable_devices(every=True)[:2], {"pipeline": 2}, 2)
    hooks = HOOKS.of_layers([2], "residual", 5)
    create_model_with_hooks(five.config, hooks, layout=layout)
    with pytest.raises(InputError, match="2 pipeline stages .* layers 0 to 2 are 1 a, 2 b"):
        create_model_with_hooks(mixed(five.config), hooks, layout=layout)
