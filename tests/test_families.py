"""Families of models: what each has of its own, against transformers, and every released size."""

import math
import re
from typing import Any

import numpy as np
import pytest
from conftest import Reference, shapes_of
from delta_reference import VISION
from test_model import (
    PREDICTIONS,
    TOLERANCE,
    error_of,
    every_hook,
    flops_of,
    load,
    predictions,
    run,
)
from test_run import random_samples
from tiny_models import YARN

from activation_extraction.common.errors import InputError
from activation_extraction.model.hooks import hook_table
from activation_extraction.model.released import RELEASED, released_config
from activation_extraction.model.rope import Rope
from activation_extraction.text.packing import pack
from qwen2_jax_with_hooks import FAMILIES, HOOKS, create_model_with_hooks

LENGTHS = 304, 90, 150, 1, 60  # a row of one document, and a packed one


@pytest.mark.usefixtures("optimized_for_some")
def test_every_hook_of_every_layer_equals_hugging_face(reference: Reference):
    """For every document alone; there are longer and shorter ones than a window."""
    config = reference.config
    model = create_model_with_hooks(config, [*every_hook(config), *predictions(config)])
    samples = random_samples(LENGTHS, config.vocab_size)
    (batch,) = pack(samples, rows=2, length=LENGTHS[0])
    got = run(
        model, load(model, reference.folder), batch.token_ids, batch.segment_ids, batch.positions
    )
    depth, words = config.num_hidden_layers, " ".join(config.layer_types).split()
    linear, sparse = words.count("linear_attention"), words.count("sparse")
    of_experts = sparse * (1 + 5 * ("P" in config.sizes))
    of_attention = 18 + 2 * config.qk_norm + config.q_gate
    assert len(got) == of_attention * (depth - linear) + 24 * linear + 8 + of_experts
    assert [at.row for at in batch.samples] == [0, 1, 1, 1, 1]
    for at in batch.samples:
        alone = reference.hooked(at.sample.token_ids[None])
        for hook, value in got.items():
            found, expected = value[at.row, at.start : at.stop], alone[hook.name][0]
            if hook.name == "logits.top_ids":  # two may be as likely but for rounding
                logits = alone["logits"][0]
                found, expected = (
                    np.take_along_axis(logits, x.astype(int), 1) for x in (found, expected)
                )
            if hook.name in PREDICTIONS:  # of a first token, the loss is not a number
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
            else:
                assert error_of(found, expected) < TOLERANCE, (hook.name, at.row, at.start)


def test_the_families_differ_in_their_hooks():
    qwen3 = hook_table(FAMILIES.config(released("Qwen3-8B")))
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


def test_reading_a_configuration_leaves_it_as_it_is():
    raw = dict(model_type="qwen3", rope_scaling=dict(type="linear", factor=2.0))
    assert FAMILIES.config(raw).rope == Rope(1e4, "linear", 2.0)
    assert raw["rope_scaling"] == dict(type="linear", factor=2.0)


def test_fields_that_a_family_does_not_read_are_ignored():
    """As transformers ignores them: Qwen3's experts have no shared one, nor a type per layer."""
    raw = released("Qwen3-30B-A3B")
    others = dict(shared_expert_intermediate_size=512, qkv_bias=True)
    others["layer_types"] = ["sliding_attention"] * raw["num_hidden_layers"]
    assert FAMILIES.config(raw | others) == FAMILIES.config(raw)


def test_yarn_makes_rows_longer_than_the_configuration_says():
    """The cards of Qwen3 add these three fields and nothing else."""
    rope = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
    raw = released("Qwen3-8B") | {"max_position_embeddings": 40960}
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


QWEN2_MOE = dict(model_type="qwen2_moe", decoder_sparse_step=1, norm_topk_prob=False)
QWEN2_MOE |= dict(vocab_size=151936, tie_word_embeddings=False)
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "shared_expert_intermediate_size",
)
MIXTURES = {
    "Qwen1.5-MoE-A2.7B": (2048, 5632, 24, 16, 16, 60, 4, 1408, 5632),
    "Qwen2-57B-A14B": (3584, 18944, 28, 28, 4, 64, 8, 2560, 20480),
}
# Of parameters, in 10**9, as published.
PUBLISHED = {
    "Qwen2.5": {"0.5B": 0.494, "1.5B": 1.54, "3B": 3.09, "7B": 7.62, "14B": 14.7, "32B": 32.5},
    "Qwen2": {"57B-A14B": 57.4},
    "Qwen3": {"0.6B": 0.6, "1.7B": 1.7, "4B": 4.0, "8B": 8.2, "14B": 14.8, "32B": 32.8},
}
PUBLISHED["Qwen2.5"] |= {"72B": 72.7}
PUBLISHED["Qwen3"] |= {"30B-A3B": 30.5, "235B-A22B": 235.0}
PUBLISHED["Qwen3.5"] = {"0.8B": 0.75, "2B": 1.88, "4B": 4.2, "9B": 8.95, "27B": 26.9}
PUBLISHED["Qwen3.5"] |= {"35B-A3B": 34.7, "122B-A10B": 122, "397B-A17B": 397}
BILLIONS = {f"{a}-{b}": size for a, sizes in PUBLISHED.items() for b, size in sizes.items()}
BILLIONS |= {"Qwen1.5-MoE-A2.7B": 14.3}
ACTIVE = {"Qwen3-30B-A3B": 3.3, "Qwen3-235B-A22B": 22.0, "Qwen1.5-MoE-A2.7B": 2.7}
ACTIVE |= {"Qwen2-57B-A14B": 14.0}  # billions of parameters that a token uses, as published
# In whole billions; of the embeddings, one counts.
ACTIVE |= {"Qwen3.5-35B-A3B": 3, "Qwen3.5-122B-A10B": 10, "Qwen3.5-397B-A17B": 17}


def released(name: str) -> dict[str, Any]:
    """A config.json; that of Qwen3.5 has vision inputs."""
    if name in MIXTURES:
        return QWEN2_MOE | dict(zip(SIZES, MIXTURES[name], strict=True))
    text = released_config(f"Qwen/{name}")
    assert text is not None
    if not name.startswith("Qwen3.5-"):
        return text
    rope = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25)
    rope |= dict(mrope_section=[11, 11, 10], mrope_interleaved=True)
    return {
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": text | {"rope_parameters": rope},
        "vision_config": VISION,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def test_every_model_that_a_plan_knows_is_compared_with_transformers():
    assert {*BILLIONS} == {*MIXTURES, *RELEASED}


EXACT = {"0.5B": 494_032_768, "7B": 7_615_616_512, "72B": 72_706_203_648}


@pytest.mark.parametrize("name", EXACT)
def test_the_exact_number_of_parameters(name):
    family, config = FAMILIES.parse_config(released(f"Qwen2.5-{name}"))
    tensors = {(spec.hf_names, spec.shape) for spec in family.weights_of(config)}  # tied ones once
    assert sum(math.prod(shape) for _, shape in tensors) == EXACT[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_operations_are_those_of_the_active_parameters(name):
    config, rounded = FAMILIES.config(released(name)), name.startswith("Qwen3.5-")
    embeddings = (1 if rounded else 2) * config.vocab_size * config.hidden_size
    weights = flops_of(config, config.num_hidden_layers, [1]) / 2  # but for attention to itself
    allowed = 0.1 if rounded else 0.04
    assert (weights + embeddings) / 1e9 == pytest.approx(ACTIVE[name], rel=allowed)


@pytest.mark.long
@pytest.mark.parametrize("name", BILLIONS)
def test_released_sizes_have_exactly_the_tensors_of_transformers(name):
    """Those of the language model, in both layouts; of Qwen3.5, others are not loaded.

    Shapes alone: nothing is allocated on either side.
    """
    raw = released(name)
    fused, beside = shapes_of(raw), set()
    family, config = FAMILIES.parse_config(raw)
    for layout in (fused, apart(fused)):
        specs = family.weight_table(family.whole(config), layout).values()
        for spec in specs:
            for tensor in spec.hf_names:
                spec.check(tensor, layout.get(tensor), raw["model_type"])
        others = {key for key in layout if re.fullmatch(family.ignored, key)}
        assert {key for spec in specs for key in spec.hf_names} == layout.keys() - others
        total = sum(math.prod(shape) for key, shape in layout.items() if key not in others)
        assert total / 1e9 == pytest.approx(BILLIONS[name], rel=0.015)
        beside |= others
    assert bool(beside) == ("vision_config" in raw)
    assert all(key.startswith("model.visual.") for key in beside)


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
