"""Float8 checkpoints: what NumPy makes of codes and scales, whole runs, and refusals.

test_model.py compares whole models with transformers.
"""

import json
import shutil
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from command_line import main
from conftest import configure, inputs_with, make_reference
from float8_models import (
    BFLOAT16,
    BLOCKS,
    DENSE,
    E4M3,
    FLOATS,
    FP8,
    compressed,
    quantise,
    spread,
)
from pods import first_documents, flags_for
from safetensors.numpy import save_file
from test_every_family import EXPERTS, HEADS
from test_model import checked, load

from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.family import parse_model_config
from activation_extraction.model.weights import WeightSpec

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def modelopt(algorithm):
    return {"quant_method": "modelopt", "quant_algo": algorithm}


M, EXP = (200, 72), (3, 200, 72)
UE8M0 = BLOCKS | {"scale_fmt": "ue8m0"}
SCALES = [
    (M, (), np.float32, "weight_scale", FP8),
    (M, (200, 1), BFLOAT16, "weight_scale", compressed(strategy="channel")),
    (M, (200,), np.float32, "weight_scale", modelopt("FP8_PER_CHANNEL_PER_TOKEN")),
    (M, (2, 1, 1, 1), np.float32, "weight_scale", modelopt("FP8_PB_WO")),
    (M, (2, 1), np.float32, "weight_scale_inv", BLOCKS),
    ((3000, 72), (24, 1), np.float32, "weight_scale_inv", BLOCKS),  # in pieces, even read whole
    (M, (2, 1), E8M0, "weight_scale_inv", UE8M0),
    (M, (2, 1), np.uint8, "weight_scale_inv", UE8M0),
    (M, (2, 1), BFLOAT16, "weight_scale_inv", None),
    (M, (7, 5), BFLOAT16, "weight_scale", compressed()),
    (EXP, (3, 2, 1), BFLOAT16, "weight_scale_inv", BLOCKS),
    (EXP, (3, 7, 5), BFLOAT16, "weight_scale", compressed()),
    (EXP, (3, 200, 1), np.float32, "weight_scale", BLOCKS),
    *((EXP, shape, np.float32, "weight_scale", FP8) for shape in ((), (3, 1, 1))),
]


@pytest.mark.parametrize("shape,of_scales,dtype,name,config", SCALES)
def test_parts_are_codes_times_scales_rounded_once(tmp_path, shape, of_scales, dtype, name, config):
    """Parts that begin and end inside blocks, every code, read whole and a few values at a time."""
    rng = np.random.default_rng(0)
    bits = rng.permutation(np.resize([x for x in range(256) if x & 0x7F != 0x7F], np.prod(shape)))
    codes = bits.astype(np.uint8).view(E4M3).reshape(shape)
    exact = np.array(2.0 ** rng.integers(-9, 9, of_scales))
    scales = exact if dtype in (E8M0, np.uint8) else exact * rng.uniform(1, 2, of_scales)
    scales = np.array(scales, E8M0).view(dtype) if dtype == np.uint8 else np.array(scales, dtype)
    save_file({"t.weight": codes, f"t.{name}": scales}, tmp_path / "model.safetensors")
    if config is not None:
        configure(tmp_path, quantization_config=config)
    block = (32, 16) if of_scales[-2:] == (7, 5) else (128, 128)
    plain = scales.view(E8M0) if dtype == np.uint8 else scales
    expected = codes.astype(np.float32) * spread(plain, shape, block)
    read, experts = Checkpoint(str(tmp_path)).read, len(shape) == 3
    axes = ("experts", "embed", "mlp") if experts else ("mlp", "embed")
    wanted = expected.swapaxes(-1, -2) if experts else expected
    spec = WeightSpec(wanted.shape, axes, ("t.weight",))
    for rows, columns in ((slice(0, shape[-2]), slice(0, 72)), (slice(100, 150), slice(35, 70))):
        part = (*map(slice, (1,) * experts, shape[:-2]), rows, columns)
        for each in (read, Checkpoint(f"file://{tmp_path}").read):
            np.testing.assert_array_equal(each("t.weight", part), expected[part])
        chosen = (*part[:-2], columns, rows) if experts else part
        ranges = [range(size)[each] for size, each in zip(wanted.shape, chosen, strict=True)]
        for dtype_of_run in (np.float32, BFLOAT16):
            rounded = partial(read, dtype=dtype_of_run)
            got = spec.read_slice(rounded, dtype_of_run, ranges, num_values_per_read=300)
            np.testing.assert_array_equal(got, wanted[chosen].astype(dtype_of_run))


@pytest.mark.long
def test_a_run_says_what_the_weights_were_and_is_verified(demo_inputs, tmp_path, capsys):
    inputs = inputs_with(
        {**HEADS, **EXPERTS, "model_type": "qwen3_moe"}, demo_inputs, tmp_path / "i"
    )
    first_documents(demo_inputs, inputs / "documents.parquet", 10)
    model, folder = inputs / "model", tmp_path / "out"
    quantise(model, BLOCKS)
    says = "float8 weights, dequantised"
    assert main(*flags_for(inputs, folder, "--batch_size", 8)) == 0
    assert f"float32 ({says})" in capsys.readouterr().err
    assert json.loads((folder / "metadata.json").read_text())["model"]["weights"] == says
    verify = "--verify", "--verify_samples", "3", "--output_dir", folder
    assert main(*verify, "--model_path", model) == 0
    assert "3 samples recomputed; 0 problems" in capsys.readouterr().out


UP = "model.layers.1.mlp.up_proj.weight"
SCALE = f"{UP}_scale_inv"
ONE = np.ones(1, np.float32)
BAD_TENSORS: dict[str, dict[str, np.ndarray | None]] = {  # what is said, and what is changed
    f"{UP} is F8_E4M3 and has no {SCALE}, expected 1": {SCALE: None},
    f"{UP} is F8_E4M3 and has {SCALE} and {UP}_scale, expected 1": {f"{UP}_scale": ONE},
    f"{SCALE} is BF16 of shape (2, 2); scales of (200, 72) in blocks of (128, 128) are read": {
        SCALE: np.ones((2, 2), BFLOAT16)
    },
    f"{UP} is F8_E4M3 and has {UP}_zero_point: zero points are not read": {f"{UP}_zero_point": ONE},
    f"{UP} is F8_E5M2; only F64, F32, F16, BF16 and, beside its scales, F8_E4M3 are read": {
        UP: np.ones((200, 72), ml_dtypes.float8_e5m2)
    },
    f"tensor {UP} has NaN values": {UP: np.full((200, 72), 0xFF, np.uint8).view(E4M3)},
    f"{SCALE} has NaN or infinite scales": {SCALE: np.full((2, 1), np.nan, BFLOAT16)},
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    make_reference(folder, **DENSE)
    return folder, quantise(folder, BLOCKS)[0]


@pytest.mark.parametrize("told", BAD_TENSORS)
def test_what_cannot_be_dequantised_is_refused_by_name(dense, tmp_path, told):
    shutil.copytree(dense[0], tmp_path, dirs_exist_ok=True)
    tensors = dense[1] | BAD_TENSORS[told]
    tensors = {name: values for name, values in tensors.items() if values is not None}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError) as refused:
        model, _ = checked(Checkpoint(str(tmp_path)))
        assert "NaN" in told  # all else is seen before a value is read
        load(model, tmp_path)
    assert told in str(refused.value) and "\n" not in str(refused.value)


OF_CACHES = (  # and of what attention computes; from checkpoints that vLLM and SGLang read
    "k_proj.k_scale",
    "v_proj.v_scale",
    "qkv_proj.k_scale",
    "qkv_proj.v_scale",
    "kv_scale",
    "q_scale",
    "k_scale",
    "v_scale",
    "attn.q_scale",
    "attn.k_scale",
    "attn.v_scale",
    "attn.prob_scale",
    "prob_output_scale",
    "q_zero_point",
    "k_zero_point",
    "v_zero_point",
    "q_proj.output_scale",
    "k_proj.output_scale",
    "v_proj.output_scale",
    "k_global_scale",
    "k_proj.output_zero_point",
    "q_proj.input_zero_point",
    "k_proj.kv_cache_scale",
)


def test_tensors_that_no_weight_needs_are_left_alone(dense, tmp_path):
    """They are scales of activations and caches, and tensors of other types beside the text's."""
    shutil.copytree(dense[0], tmp_path, dirs_exist_ok=True)
    attention = "model.layers.0.self_attn"
    beside = {f"{attention}.q_proj.{name}": ONE for name in ("input_scale", "activation_scale")}
    beside |= {f"{attention}.{name}": ONE for name in OF_CACHES}
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    beside |= {f"{experts}_{name}_scale": ONE for name in ("input", "activation")}
    beside |= {"visual.odd.weight": np.ones(8, np.int8), "mtp.fc.weight": np.ones(3, np.uint16)}
    draft = "mtp.layers.0.mlp.up_proj.weight"
    beside |= {draft: np.ones((2, 2), E4M3), f"{draft}_scale_inv": ONE}
    save_file(dense[1] | beside, tmp_path / "model.safetensors", {"format": "pt"})
    assert checked(Checkpoint(str(tmp_path)))[0].config.weights == "float8 weights, dequantised"


def test_a_scale_without_its_weight_is_refused(dense, tmp_path):
    shutil.copytree(dense[0], tmp_path, dirs_exist_ok=True)
    lone = "model.layers.0.self_attn.odd_proj.weight_scale"
    save_file(dense[1] | {lone: ONE}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"{lone} is a scale without its tensor"):
        checked(Checkpoint(str(tmp_path)))


ROTATION = {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"], "location": "input"}]}
CONFIGS: list[tuple[Any, str | None]] = [
    (compressed() | {"transform_config": {}}, None),
    (compressed() | {"transform_config": None}, None),
    (compressed() | {"transform_config": {"config_groups": {}}}, None),
    (compressed() | {"transform_config": {"config_groups": {"R4": ROTATION}}}, "transform_config"),
    (compressed() | {"transform_config": {"R4": ROTATION}}, "transform_config"),
    (FP8 | {"transform_config": [ROTATION]}, "transform_config"),
    (FP8 | {"fmt": None, "weight_block_size": None}, None),
    (BLOCKS, None),
    (compressed(), None),
    (compressed() | {"format": "naive-quantized"}, None),
    (modelopt("FP8_PB_WO"), None),
    (FP8 | {"fmt": "e5m2"}, "(fp8, e5m2)"),
    (modelopt("NVFP4"), "(modelopt, NVFP4)"),
    (compressed() | {"format": "pack-quantized"}, "(compressed-tensors, pack-quantized)"),
    (compressed(num_bits=4), "(compressed-tensors, float-quantized)"),
    ({"quant_method": "awq", "bits": 4}, "(awq)"),
    (FP8 | {"config_groups": {"a": {"weights": FLOATS}}, **BLOCKS}, "is not one size of blocks"),
]


@pytest.mark.parametrize("config,named", CONFIGS)
def test_which_quantisations_are_read(config, named):
    """config.json may say it of the whole model or of the language model inside it."""
    field = {"quantization_config": config}
    inside = {"model_type": "qwen3_5", "vision_config": {}, "text_config": field}
    for raw in ({"model_type": "qwen3"} | field, inside):
        if named is None:
            assert parse_model_config(raw).weights == "float8 weights, dequantised"
            continue
        with pytest.raises(InputError) as refused:
            parse_model_config(raw)
        assert named in str(refused.value) and "quantization_config" in str(refused.value)
