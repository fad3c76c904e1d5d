"""What config.json says of each family: refusals, released sizes, frequencies, operations."""

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from delta_reference import VISION
from test_model import flops_of
from tiny_models import BESIDE_OTHERS, MOE, SECTIONED, TEXT, text

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError
from activation_extraction.model.family import complete, parse_model_config
from activation_extraction.model.model_setup import build_model
from activation_extraction.model.released import RELEASED, released_config
from activation_extraction.model.rope import Rope
from activation_extraction.run.prepare import step_request
from qwen2_jax import Qwen2, weight_table

V4 = {
    **{"model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864},
    **{"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
    **{"max_position_embeddings": 32768, "max_window_layers": 21, "rms_norm_eps": 1e-06},
    **{"rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True},
    **{"use_sliding_window": False, "vocab_size": 151936},
}
QWEN3_5 = {"model_type": "qwen3_5", "text_config": TEXT, "vision_config": VISION}
QWEN2_VL, QWEN2_5_OMNI = BESIDE_OTHERS["qwen2_vl_flat_sliding"], BESIDE_OTHERS["qwen2_5_omni"]
QWEN3_VL = BESIDE_OTHERS["qwen3_vl_tied_biased"]
AWQ = {"quantization_config": {"quant_method": "awq"}}
LINEAR, FULL = "linear_attention", "full_attention"


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e6} | parameters}


def scaling(**fields: Any) -> dict[str, Any]:
    return {"rope_scaling": fields}


TRAINED = "original_max_position_embeddings"
LENGTH = {TRAINED: 32768}
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0) | LENGTH
# What Qwen2.5's cards say to add, and what Qwen3's do.
CARD_2 = dict(type="yarn", factor=4.0) | LENGTH
CARD_3 = dict(rope_type="yarn", factor=4.0) | LENGTH
NEXT = "qwen4_exp models .* are not supported"
# As released: the limit of a row is not factor times the original length.
LLAMA_3_2 = {
    **{"model_type": "llama", "hidden_act": "silu", "hidden_size": 2048},
    **{"intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072},
    **{"rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True},
    **{"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "vocab_size": 128256},
    "rope_scaling": LLAMA3 | {"factor": 32.0, TRAINED: 8192},
}
SLIDES = {"layer_types": ["sliding_attention"] * 24}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        V4,
        {"model_type": "mistral"},
        r"'mistral' is not .* are: qwen2 \(.*, qwen3_5_moe \(the text of",
    ),
    (V4, {"model_type": "llava", "vision_config": {}}, "'llava' .a model with vision inputs"),
    (V4, {"model_type": "qwen4_exp_text"}, NEXT),
    (V4, {"architectures": ["Qwen4ExpForConditionalGeneration"]}, NEXT),
    (V4, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    (V4, scaling(type="yarn"), "factor"),
    (V4, rope(rope_type="su"), "'su' is not supported; default, linear, dynamic, llama3, yarn and"),
    (V4, scaling(**CARD_2) | {TRAINED: "32768"}, f"{TRAINED} must be .* found '32768'"),
    (V4, scaling(type="llama3", factor=8.0), "'llama3': {'(low|high)_freq_factor'"),
    (V4, {"rope_parameters": {FULL: {"rope_theta": 1e6}}}, "only one flat set"),
    (V4, {"rope_theta": "abc"}, "rope_theta must be a positive number, found 'abc'"),
    (V4, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    (V4, SLIDES, "layer 0 slides, but there is no window"),
    (V4, {"layer_types": [FULL]}, "num_hidden_layers"),
    (V4, {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
    (V4, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq.: quantised"),
    (V4, {"num_attention_heads": "14"}, "'num_attention_heads' expected int, got str"),
    (V4, {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    (V4, {"head_dim": 63}, "even rotary dimension.* `head_dim`=63"),
    (MOE, {"num_experts_per_tok": 7}, "num_experts_per_tok 7 is more than num_experts 6"),
    (QWEN3_5, {"text_config": TEXT | AWQ}, "awq.: quantised"),
    (V4, {"is_causal": False}, "is_causal False is not supported"),
    (LLAMA_3_2, {"mlp_bias": True}, "mlp_bias True is not supported"),
    (LLAMA_3_2, {"pretraining_tp": 2}, "pretraining_tp 2 is not supported"),
    (LLAMA_3_2, scaling(rope_type="longrope", factor=4.0), "'longrope' is not supported; default,"),
    (LLAMA_3_2, {"is_causal": False}, "is_causal False is not supported"),
    (TEXT, {"linear_num_value_heads": 6}, "linear_num_value_heads 6 is not a multiple of .* 4"),
    (TEXT, {"layer_types": ["sliding_attention"] * 4}, "layer 0 is 'sliding_attention', and only"),
    (TEXT, {"attn_output_gate": False}, "attn_output_gate False is not supported"),
    (TEXT, rope(partial_rotary_factor=0.05), "rotates 3 of a"),
    # transformers would take what no release has.
    (QWEN3_VL, {"text_config": text()}, "rope_theta of the language model is missing"),
]


@pytest.mark.parametrize("raw,change,named", REFUSED)
def test_what_would_be_computed_wrongly_is_refused_by_name(raw, change, named):
    with pytest.raises(InputError, match=named) as refused:
        parse_model_config(raw | change)
    assert "\n" not in str(refused.value)


def test_the_keys_of_the_rotary_embedding_in_metadata_json_stay():
    """metadata.json records the fields of `Rope` by their names."""
    assert [*dataclasses.asdict(Rope(1e6))] == [
        "theta",
        "rope_type",
        "factor",
        "attention_factor",
        "blended",
        "trained",
        "share",
        "attn_factor",
    ]


def test_what_configurations_say():
    """The models of the numeric matrix have the rest."""
    config = parse_model_config(V4)
    v5 = V4 | {"layer_types": [FULL] * 24, "sliding_window": None} | rope(rope_type="default")
    del v5["rope_theta"]
    assert config == parse_model_config(v5)  # as transformers 5 writes it
    assert config.rope.theta == 1e6 and config.head_dim == 64 and config.tie_word_embeddings
    # No layer has the window.
    parse_model_config(V4 | {"use_sliding_window": True, "max_window_layers": 24})
    raw = dict(model_type="qwen3", rope_scaling=dict(type="linear", factor=2.0))
    assert parse_model_config(raw).rope == Rope(1e4, "linear", 2.0)
    assert raw["rope_scaling"] == dict(type="linear", factor=2.0)  # not changed
    raw = released_config("Qwen3-30B-A3B") or {}  # which has no shared expert, nor a type per layer
    others = dict(shared_expert_intermediate_size=512, qkv_bias=True)
    others["layer_types"] = ["sliding_attention"] * raw["num_hidden_layers"]
    assert parse_model_config(raw | others) == parse_model_config(raw)
    hf = complete(QWEN2_VL, "config.json").to_dict()
    assert "hidden_size" not in hf and parse_model_config(hf) == parse_model_config(QWEN2_VL)
    # Only the text says that it is tied.
    assert not parse_model_config(QWEN2_5_OMNI).tie_word_embeddings
    thinker = QWEN2_5_OMNI["thinker_config"] | {"tie_word_embeddings": True}
    assert parse_model_config(QWEN2_5_OMNI | {"thinker_config": thinker}).tie_word_embeddings
    as_released = {"thinker_config": {"text_config": text(**SECTIONED)}}  # "mrope"
    assert parse_model_config(QWEN2_5_OMNI | as_released).rope == Rope(1e6)


DUAL = {"chunk_size": 262144, "local_size": 8192, TRAINED: 262144}
MILLION = {"max_position_embeddings": 1010000}  # Qwen2.5-7B-Instruct-1M has all of these
DUAL_CHUNK = "longer rows need dual-chunk attention"
ROWS: list[tuple[dict[str, Any], int, str]] = [
    ({}, 32768, "the model has 32768 positions"),
    (scaling(**CARD_2), 131072, "the model has 131072 positions"),
    (scaling(type="dynamic", factor=2.0), 32768, "and beyond .* 'dynamic' depends"),
    (MILLION | {"dual_chunk_attention_config": DUAL}, 262144, DUAL_CHUNK),
    ({"dual_chunk_attention_config": {}}, 8192, DUAL_CHUNK),
    (LLAMA_3_2, 131072, "the model has 131072 positions"),
]


@pytest.mark.parametrize("changes,longest,why", ROWS)
def test_the_longest_row_and_the_refusal_of_a_longer_one(changes, longest, why):
    config = parse_model_config(V4 | changes)
    flags = ["--batch_size", "1", "--no_data_parallel", "--layers_to_extract", "3"]
    within, beyond = (
        step_request(parse_args([*flags, "--max_seq_length", str(longest + more)]))
        for more in (0, 1)
    )
    build_model(within, config)
    with pytest.raises(InputError, match=f"--max_seq_length {longest + 1}: .*{why}") as refused:
        build_model(beyond, config)
    assert "\n" not in str(refused.value)


M_ROPE = dict(mrope_section=[8, 12, 12])
SHARE = dict(model_type="qwen3_5_text", head_dim=256, partial_rotary_factor=0.25)
SPELLINGS: list[dict[str, Any]] = [
    {},
    scaling(rope_type="linear", factor=3.0) | {TRAINED: 0},  # which only other types use
    scaling(type="dynamic", factor=2.7),
    scaling(**CARD_2),
    scaling(**CARD_3, type="mrope", **M_ROPE, mrope_interleaved=True),
    scaling(**CARD_3) | rope(rope_type="linear", factor=2.0),  # the former counts
    rope(**CARD_3, rope_theta=5e6) | {"rope_theta": 1e4},
    scaling(**CARD_3 | dict(factor=None)),
    scaling(type="yarn", factor=4.0),  # the original length is then max_position_embeddings
    scaling(**CARD_3 | {TRAINED: 64}) | LENGTH,  # which overrides the other one
    scaling(**CARD_3, mscale=1.2, mscale_all_dim=0.7),
    scaling(**CARD_3, attention_factor=0.9, mscale=1.2, mscale_all_dim=0.7),
    scaling(**CARD_3, attn_factor=0.8782488562869419),
    scaling(**LLAMA3),
    SHARE | rope(**CARD_3 | LENGTH, rope_theta=1e7),
    SHARE | scaling(**LLAMA3),
    LLAMA_3_2,
    LLAMA_3_2 | {"rope_scaling": None},
]
# What transformers fails with, and a spelling of what that must mean.
MEANT = [(rope(rope_type="mrope", **M_ROPE), rope())]


@pytest.mark.parametrize("changes,meant", [(each, each) for each in SPELLINGS] + MEANT)
def test_frequencies_are_those_of_transformers(changes, meant):
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    usual = dict(model_type="qwen3", head_dim=64, max_position_embeddings=40960)
    hf = AutoConfig.for_model(**copy.deepcopy(usual | meant))
    rotary = {
        "qwen3": Qwen3RotaryEmbedding,
        "qwen3_5_text": Qwen3_5TextRotaryEmbedding,
        "llama": LlamaRotaryEmbedding,
    }[hf.model_type]
    expected, config = rotary(hf), parse_model_config(usual | changes)
    got, wanted = config.rope.frequencies(config.head_dim), expected.inv_freq.numpy()
    assert got.dtype == np.float32 and got.shape == wanted.shape
    np.testing.assert_array_max_ulp(got, wanted, 4)
    # Radians at the last position.
    np.testing.assert_allclose(32768 * got, 32768 * wanted, rtol=0, atol=1e-3)
    scale = config.rope.attention_factor
    assert scale == pytest.approx(expected.attention_scaling, rel=1e-12)


def test_operations():
    """They are two for each weight, and those of causal attention and of the delta rule."""
    config, lengths, tokens = parse_model_config(TEXT), [10, 3], 13
    mlp, convolutions = 3 * 64 * 128, (2 * 4 * 16 + 8 * 16) * 4
    projections = 64 * (2 * 4 * 16 + 8 * 16 + 8 * 16 + 2 * 8 + 8 * 16)
    recurrence = 3 * 8 * 16 * 16  # S^T k, the update and S^T q
    linear = 2 * tokens * (mlp + projections + convolutions + recurrence)
    assert flops_of(config, 1, lengths) == linear
    heads = 64 * 64 * (2 * 4 + 2 * 2 + 4)  # queries with gates, keys, values, and back
    full = 2 * tokens * (mlp + heads) + 2 * 4 * 64 * (10**2 + 3**2)
    assert flops_of(config, 2, lengths) == linear + full


# Of parameters, in 10**9, as published.
PUBLISHED = {
    "Qwen2.5": {"0.5B": 0.494, "1.5B": 1.54, "3B": 3.09, "7B": 7.62, "14B": 14.7, "32B": 32.5}
    | {"72B": 72.7},
    "Qwen3": {"0.6B": 0.6, "1.7B": 1.7, "4B": 4.0, "8B": 8.2, "14B": 14.8, "32B": 32.8}
    | {"30B-A3B": 30.5, "235B-A22B": 235.0, "Next-80B-A3B": 80, "Coder-Next": 80},
    "Qwen3.5": {"0.8B": 0.75, "2B": 1.88, "4B": 4.2, "9B": 8.95, "27B": 26.9, "35B-A3B": 34.7}
    | {"122B-A10B": 122, "397B-A17B": 397},
}
BILLIONS = {f"{a}-{b}": size for a, sizes in PUBLISHED.items() for b, size in sizes.items()}
# Billions of parameters that a token uses, as published.
ACTIVE = {"Qwen3-30B-A3B": 3.3, "Qwen3-235B-A22B": 22.0}
# In whole billions; of the embeddings, one counts.
ACTIVE |= {"Qwen3.5-35B-A3B": 3, "Qwen3.5-122B-A10B": 10, "Qwen3.5-397B-A17B": 17}


def test_numbers_of_parameters():
    """Our table of weights has all, and the operations of a token those that it uses."""
    assert {*BILLIONS} == {*RELEASED}
    llama = weight_table(Qwen2(parse_model_config(LLAMA_3_2)))
    assert (
        sum(math.prod(spec.shape) for path, spec in llama.items() if path[0] != "lm_head")
        == 1235814400
    )
    for name, billions in BILLIONS.items():
        config = parse_model_config(released_config(name) or {})
        table = weight_table(Qwen2(config), ())
        shapes = {(spec.hf_names, spec.tensor_slice): spec.shape for spec in table.values()}
        assert sum(map(math.prod, shapes.values())) / 1e9 == pytest.approx(billions, rel=0.015)
        if name not in ACTIVE:
            continue
        rounded = name.startswith("Qwen3.5-")
        embeddings = (1 if rounded else 2) * config.vocab_size * config.hidden_size
        weights = flops_of(config, config.num_hidden_layers, [1]) / 2
        found, allowed = (weights + embeddings) / 1e9, 0.1 if rounded else 0.04
        assert found == pytest.approx(ACTIVE[name], rel=allowed), name
