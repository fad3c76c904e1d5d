"""Families of models: what each has of its own, against transformers, and every released size."""

import math
import re
from typing import Any

import numpy as np
import pytest
from conftest import Reference, make_reference, shapes_of
from test_model import TOLERANCE, error_of, every_hook, flops_of, load, run
from test_run import random_samples
from tiny_models import YARN

from activation_extraction.common.errors import InputError
from activation_extraction.model.hooks import hook_table
from activation_extraction.model.rope import Rope
from activation_extraction.text.packing import pack
from qwen2_jax_with_hooks import FAMILIES, HOOKS, create_model_with_hooks

LENGTHS = 304, 90, 150, 1, 60  # a row of one document, and a packed one


@pytest.mark.usefixtures("optimized_for_some")
def test_every_hook_of_every_layer_equals_hugging_face(reference: Reference):
    """For every document alone; there are longer and shorter ones than a window."""
    config = reference.config
    model = create_model_with_hooks(config, every_hook(config))
    samples = random_samples(LENGTHS, config.vocab_size)
    (batch,) = pack(samples, rows=2, length=LENGTHS[0])
    got = run(
        model, load(model, reference.folder), batch.token_ids, batch.segment_ids, batch.positions
    )
    depth, words = config.num_hidden_layers, " ".join(config.layer_types).split()
    linear, sparse = words.count("linear_attention"), words.count("sparse")
    of_experts = sparse * (1 + 5 * ("P" in config.sizes))
    of_attention = 18 + 2 * config.qk_norm + config.q_gate
    assert len(got) == of_attention * (depth - linear) + 24 * linear + 3 + of_experts
    assert [at.row for at in batch.samples] == [0, 1, 1, 1, 1]
    for at in batch.samples:
        alone = reference.hooked(at.sample.token_ids[None])
        for hook, value in got.items():
            error = error_of(value[at.row, at.start : at.stop], alone[hook.name])
            assert error < TOLERANCE, (hook.name, at.row, at.start)


def test_the_families_differ_in_their_hooks():
    qwen3 = hook_table(FAMILIES.config(RELEASED["Qwen3-8B"][0]))
    names = [kind.name.removeprefix("blocks.{}.") for kind in qwen3.kinds]
    assert [name for name in names if name.startswith("attn.")][:7] == [
        *["attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_q_normed"],
        *["attn.hook_k_normed", "attn.hook_rot_q", "attn.hook_rot_k"],
    ]
    assert len(qwen3.kinds) == len(HOOKS.kinds) + 2
    (hook,) = qwen3.matching(["model.layers.2.self_attn.k_norm.output"], 4).values()
    assert hook.name == "blocks.2.attn.hook_k_normed"
    with pytest.raises(InputError, match="matches no hook"):
        HOOKS.matching(["blocks.0.attn.hook_q_normed"], 4)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Reference:
    folder = tmp_path_factory.mktemp("qwen3")
    return make_reference(folder, model_type="qwen3", num_key_value_heads=2, head_dim=64)


@pytest.mark.parametrize(
    "kind,parts",
    [
        ("attn.hook_q", {"input_layernorm", "q_proj"}),
        ("attn.hook_q_normed", {"input_layernorm", "q_proj", "q_norm"}),
        ("attn.hook_rot_k", {"input_layernorm", "k_proj", "k_norm"}),
    ],
)
def test_a_norm_of_heads_is_loaded_only_where_a_hook_needs_it(qwen3, kind, parts):
    (hook,) = hook_table(qwen3.config).matching([f"blocks.2.{kind}"], 4).values()
    model = create_model_with_hooks(qwen3.config, [hook])
    assert {path[-2] for path in model.last_layer} == parts
    size = qwen3.config.sizes
    matrices = (parts & {"q_proj", "k_proj"}) == {"q_proj"}
    heads = size["N"] if matrices else size["K"]
    last = model.flops([1]) - flops_of(qwen3.config, 2, [1])
    assert last == 2 * heads * size["H"] * size["D"]


def test_reading_a_configuration_leaves_it_as_it_is():
    raw = dict(model_type="qwen3", rope_scaling=dict(type="linear", factor=2.0))
    assert FAMILIES.config(raw).rope == Rope(1e4, "linear", 2.0)
    assert raw["rope_scaling"] == dict(type="linear", factor=2.0)


def test_fields_that_a_family_does_not_read_are_ignored():
    """As transformers ignores them: Qwen3's experts have no shared one, nor a type per layer."""
    raw, _ = RELEASED["Qwen3-30B-A3B"]
    others = dict(shared_expert_intermediate_size=512, qkv_bias=True)
    others["layer_types"] = ["sliding_attention"] * raw["num_hidden_layers"]
    assert FAMILIES.config(raw | others) == FAMILIES.config(raw)


def test_yarn_makes_rows_longer_than_the_configuration_says():
    """The cards of Qwen3 add these three fields and nothing else."""
    rope = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
    raw, _ = RELEASED["Qwen3-8B"]
    assert FAMILIES.config(raw).longest_row == 40960
    assert FAMILIES.config(raw | {"rope_scaling": rope}).longest_row == 131072


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(rope_type="linear", factor=3.0),
        YARN,
        YARN | dict(factor=1.0),
        YARN | dict(factor=None),
        YARN | dict(beta_fast=4.0, beta_slow=2.0),
        YARN | dict(mscale=1.2, mscale_all_dim=0.7),
        YARN | dict(attention_factor=0.9, truncate=False),
        YARN | dict(original_max_position_embeddings=32768, rope_theta=5e6),
    ],
)
def test_frequencies_are_those_of_transformers(changes):
    from transformers import AutoConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    rope = dict(rope_type="default", rope_theta=1e4) | changes
    hf = AutoConfig.for_model("qwen3", head_dim=64, rope_parameters=rope)
    expected = Qwen3RotaryEmbedding(hf)
    got = FAMILIES.config(hf.to_dict()).rope
    frequencies = got.frequencies(64)
    assert frequencies.dtype == np.float32
    # Radians at the last position.
    np.testing.assert_allclose(
        32768 * frequencies, 32768 * expected.inv_freq.numpy(), rtol=0, atol=1e-3
    )
    assert got.attention_factor == pytest.approx(expected.attention_scaling, rel=1e-12)


def test_a_window_leaves_operations_out():
    base = dict(model_type="qwen3", hidden_size=64, num_hidden_layers=2, head_dim=32)
    window = dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    whole, windowed = (FAMILIES.config(base | more) for more in ({}, window))
    heads = whole.num_attention_heads * 32
    assert flops_of(whole, 1, [10, 3]) == flops_of(windowed, 1, [10, 3])
    # Two products of two operations each, for all pairs that are further apart than the window.
    less = flops_of(whole, 2, [10]) - flops_of(windowed, 2, [10])
    assert less == 2 * 2 * heads * (10 - 4) ** 2 / 2


def qwen(model_type, hidden, mlp, layers, heads, kv_heads, tied=False, vocabulary=151936, **more):
    """A config.json."""
    return {
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        **more,
    }


QWEN3: dict[str, Any] = dict(head_dim=128, attention_bias=False, max_window_layers=36)
THINKING = dict(max_position_embeddings=262144, rope_theta=5e6)
QWEN3_MOE = QWEN3 | dict(norm_topk_prob=True, num_experts=128, num_experts_per_tok=8)
QWEN3_MOE |= dict(decoder_sparse_step=1, mlp_only_layers=[])
QWEN2_MOE = dict(decoder_sparse_step=1, norm_topk_prob=False)
A3B = QWEN3_MOE | dict(moe_intermediate_size=768)
A22B = QWEN3_MOE | dict(moe_intermediate_size=1536, max_position_embeddings=262144)
A2_7B = QWEN2_MOE | dict(num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
A2_7B |= dict(shared_expert_intermediate_size=5632)
A14B = QWEN2_MOE | dict(num_experts=64, num_experts_per_tok=8, moe_intermediate_size=2560)
A14B |= dict(shared_expert_intermediate_size=20480)
RELEASED = {  # with the number of parameters that is published, in 10**9
    "Qwen2.5-3B": (qwen("qwen2", 2048, 11008, 36, 16, 2, True), 3.09),
    "Qwen2.5-14B": (qwen("qwen2", 5120, 13824, 48, 40, 8, vocabulary=152064), 14.7),
    "Qwen2.5-32B": (qwen("qwen2", 5120, 27648, 64, 40, 8, vocabulary=152064), 32.5),
    "Qwen3-0.6B": (qwen("qwen3", 1024, 3072, 28, 16, 8, True, **QWEN3), 0.6),
    "Qwen3-1.7B": (qwen("qwen3", 2048, 6144, 28, 16, 8, True, **QWEN3), 1.7),
    "Qwen3-4B": (qwen("qwen3", 2560, 9728, 36, 32, 8, True, **QWEN3), 4.0),
    "Qwen3-4B-Thinking": (qwen("qwen3", 2560, 9728, 36, 32, 8, True, **QWEN3 | THINKING), 4.0),
    "Qwen3-8B": (qwen("qwen3", 4096, 12288, 36, 32, 8, **QWEN3), 8.2),
    "Qwen3-14B": (qwen("qwen3", 5120, 17408, 40, 40, 8, **QWEN3), 14.8),
    "Qwen3-32B": (qwen("qwen3", 5120, 25600, 64, 64, 8, **QWEN3), 32.8),
    "Qwen3-30B-A3B": (qwen("qwen3_moe", 2048, 6144, 48, 32, 4, **A3B), 30.5),
    "Qwen3-235B-A22B": (qwen("qwen3_moe", 4096, 12288, 94, 64, 4, **A22B), 235.0),
    "Qwen1.5-MoE-A2.7B": (qwen("qwen2_moe", 2048, 5632, 24, 16, 16, **A2_7B), 14.3),
    "Qwen2-57B-A14B": (qwen("qwen2_moe", 3584, 18944, 28, 28, 4, **A14B), 57.4),
}
ACTIVE = {"Qwen3-30B-A3B": 3.3, "Qwen3-235B-A22B": 22.0, "Qwen1.5-MoE-A2.7B": 2.7}
ACTIVE |= {"Qwen2-57B-A14B": 14.0}  # billions of parameters that a token uses, as published


@pytest.mark.parametrize("name", ACTIVE)
def test_operations_are_those_of_the_active_parameters(name):
    config = FAMILIES.config(RELEASED[name][0])
    embeddings = 2 * config.vocab_size * config.hidden_size
    weights = flops_of(config, config.num_hidden_layers, [1]) / 2  # but for attention to itself
    assert (weights + embeddings) / 1e9 == pytest.approx(ACTIVE[name], rel=0.04)


@pytest.mark.long
@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes_have_exactly_the_tensors_of_transformers(name):
    raw, billions = RELEASED[name]
    assert not check_tensors_of(raw, billions)


def check_tensors_of(raw, billions):
    """Checks those of the language model in both layouts; returns the names of all others.

    billions: how many parameters they have. Shapes alone: nothing is allocated on either side.
    """
    fused, beside = shapes_of(raw), set()
    family, config = FAMILIES.parse_config(raw)
    for layout in (fused, apart(fused)):
        specs = family.weight_table(family.whole(config), layout).values()
        for spec in specs:
            for name in spec.hf_names:
                spec.check(name, layout.get(name), raw["model_type"])
        others = {key for key in layout if re.fullmatch(family.ignored, key)}
        assert {key for spec in specs for key in spec.hf_names} == layout.keys() - others
        total = sum(math.prod(shape) for key, shape in layout.items() if key not in others)
        assert total / 1e9 == pytest.approx(billions, rel=0.015)
        beside |= others
    return beside


def apart(shapes):
    """With a tensor for each expert, as checkpoints are published and transformers saves them."""
    found = {}
    for name, shape in shapes.items():
        before, experts, tensor = name.partition(".experts.")
        if not experts:
            found[name] = shape
            continue
        parts = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}[tensor]
        for part in parts:
            of_one = shape[1] // len(parts), shape[2]
            found |= {f"{before}.experts.{e}.{part}.weight": of_one for e in range(shape[0])}
    return found
