"""Float8 checkpoints: what NumPy makes of codes and scales, whole runs, and refusals.

test_model.py compares whole models with transformers.
"""

import json
import shutil
from functools import partial
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from command_line import main
from conftest import inputs_with, make_reference
from float8_models import (
    BFLOAT16,
    BLOCKS,
    DENSE,
    E4M3,
    FLOATS,
    FP8,
    compressed,
    configure,
    quantise,
    spread,
)
from pods import first_documents, flags_for
from safetensors.numpy import save_file
from test_every_family import EXPERTS, HEADS
from test_model import checked, load
from watched import Watched

from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.model_config import as_stored
from activation_extraction.model.weight_files import LocalFile
from activation_extraction.model.weights import WeightSpec, load_params
from qwen2_jax_with_hooks import FAMILIES

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def modelopt(algorithm):
    return {"quant_method": "modelopt", "quant_algo": algorithm}


M, EXP = (200, 72), (3, 200, 72)
UE8M0 = BLOCKS | {"scale_fmt": "ue8m0"}
SCALES = [
    (M, (), np.float32, "weight_scale", FP8),
    (M, (1,), BFLOAT16, "weight_scale", modelopt("FP8")),
    (M, (200, 1), BFLOAT16, "weight_scale", compressed(strategy="channel")),
    (M, (200,), np.float32, "weight_scale", modelopt("FP8_PER_CHANNEL_PER_TOKEN")),
    (M, (2, 1, 1, 1), np.float32, "weight_scale", modelopt("FP8_PB_WO")),
    (M, (2, 1), np.float32, "weight_scale_inv", BLOCKS),
    (M, (2, 1), np.float16, "weight_scale_inv", BLOCKS),
    (M, (2, 1), E8M0, "weight_scale_inv", UE8M0),
    (M, (2, 1), np.uint8, "weight_scale_inv", UE8M0),
    (M, (2, 1), BFLOAT16, "weight_scale_inv", None),
    (M, (7, 5), BFLOAT16, "weight_scale", compressed()),
    (M, (3, 3), np.float32, "weight_scale_inv", BLOCKS | {"weight_block_size": [96, 32]}),
    (EXP, (3, 2, 1), BFLOAT16, "weight_scale_inv", BLOCKS),
    (EXP, (3, 7, 5), BFLOAT16, "weight_scale", compressed()),
    (EXP, (3, 200, 1), np.float32, "weight_scale", BLOCKS),
    *((EXP, shape, np.float32, "weight_scale", FP8) for shape in ((), (1,), (3,), (3, 1))),
    (EXP, (3, 1, 1), np.float32, "weight_scale", FP8),
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
    block = {(7, 5): (32, 16), (3, 3): (96, 32)}.get(of_scales[-2:], (128, 128))
    plain = scales.view(E8M0) if dtype == np.uint8 else scales
    expected = codes.astype(np.float32) * spread(plain, shape, block)
    read = Checkpoint(str(tmp_path)).read
    for rows, columns in ((slice(0, 200), slice(0, 72)), (slice(100, 150), slice(35, 70))):
        part = (*map(slice, (1,) * (len(shape) - 2), shape[:-2]), rows, columns)
        for each in (read, Checkpoint(f"file://{tmp_path}").read):
            np.testing.assert_array_equal(each("t.weight", part), expected[part])
        rounded = read("t.weight", part, BFLOAT16)
        assert rounded.dtype == BFLOAT16
        np.testing.assert_array_equal(rounded, expected[part].astype(BFLOAT16))
        axes = ("experts", "embed", "mlp") if len(shape) == 3 else ("mlp", "embed")
        wanted = expected.swapaxes(-1, -2) if len(shape) == 3 else expected
        chosen = (*part[:-2], columns, rows) if len(shape) == 3 else part
        spec = WeightSpec(wanted.shape, axes, ("t.weight",))
        ranges = [range(size)[each] for size, each in zip(wanted.shape, chosen, strict=True)]
        for dtype_of_run in (np.float32, BFLOAT16):
            for at_once in (300, 10**6):
                rounded = partial(read, dtype=dtype_of_run)
                got = spec.read_slice(rounded, dtype_of_run, ranges, at_once)
                np.testing.assert_array_equal(got, wanted[chosen].astype(dtype_of_run))


@pytest.mark.long
def test_a_run_says_what_the_weights_were_and_is_continued_and_verified(
    demo_inputs, tmp_path, capsys
):
    """A bfloat16 copy of the same values is another model."""
    inputs = inputs_with(
        {**HEADS, **EXPERTS, "model_type": "qwen3_moe"}, demo_inputs, tmp_path / "i"
    )
    first_documents(demo_inputs, inputs / "documents.parquet", 40)
    model, folder = inputs / "model", tmp_path / "out"
    shutil.copytree(model, tmp_path / "copy")
    _, state = quantise(model, BLOCKS)
    save_file(state, tmp_path / "copy" / "model.safetensors", {"format": "pt"})
    says = "float8 weights, dequantised"
    flags = flags_for(inputs, folder, "--shard_size_gb", 1e-4, "--batch_size", 8)
    assert main(*flags, "--max_samples", 10) == 0
    assert f"float32 ({says})" in capsys.readouterr().err
    assert main(*flags) == 0
    assert json.loads((folder / "metadata.json").read_text())["model"]["weights"] == says
    page = tmp_path / "report.html"
    assert main("--report", page, "--output_dir", folder) == 0
    assert f"Checkpoint: {says}" in page.read_text()
    verify = "--verify", "--verify_samples", "3", "--output_dir", folder, "--model_path"
    capsys.readouterr()
    assert main(*verify, model) == 0
    assert "3 samples recomputed; 0 problems" in capsys.readouterr().out
    assert main(*verify, tmp_path / "copy") == 2
    assert main("--list_hooks", "--model_path", model) == 0
    assert f"the checkpoint has {says}" in capsys.readouterr().out
    assert main("--list_hooks", "--model_path", tmp_path / "copy") == 0
    assert says not in capsys.readouterr().out


UP = "model.layers.1.mlp.up_proj.weight"
SCALE = f"{UP}_scale_inv"


def without(name):
    return lambda tensors: tensors.pop(name)


def replaced(name, make):
    return lambda tensors: tensors.update({name: make(tensors.get(name))})


BAD_TENSORS = {
    "no scale": (without(SCALE), f"{UP} is F8_E4M3 and has no {SCALE}, expected 1"),
    "two scales": (
        lambda t: t.update({f"{UP}_scale": t[SCALE].copy()}),
        f"{UP} is F8_E4M3 and has {SCALE} and {UP}_scale, expected 1",
    ),
    "scale without its tensor": (
        replaced("model.layers.0.odd.weight_scale", lambda _: np.ones(1, np.float32)),
        "model.layers.0.odd.weight_scale is a scale without its tensor, model.layers.0.odd.weight",
    ),
    "scale of bfloat16": (
        replaced(UP, lambda x: x.astype(BFLOAT16)),
        f"{UP} is BF16 and has {SCALE}, expected no tensor",
    ),
    "blocks of 100 rows": (
        replaced(SCALE, lambda x: np.ones((2, 2), x.dtype)),
        f"{SCALE} is BF16 of shape (2, 2); scales of (200, 72) in blocks of (128, 128) are read",
    ),
    "scale for each column": (
        replaced(SCALE, lambda x: np.ones((1, 72), x.dtype)),
        "have one of the shapes (1,), (200, 1), (2, 1)",
    ),
    "exponents unannounced": (
        replaced(SCALE, lambda x: np.ones((2, 1), np.uint8)),
        f"{SCALE} is U8 of shape (2, 1)",
    ),
    "float8 of a vector": (
        lambda t: t.update(
            {"model.norm.weight": np.ones(72, E4M3), "model.norm.weight_scale": np.ones(1, "f4")}
        ),
        "scales of (72,) in blocks",
    ),
    "zero point": (
        replaced(f"{UP}_zero_point", lambda _: np.zeros(1, np.float32)),
        f"{UP} is F8_E4M3 and has {UP}_zero_point: zero points are not read",
    ),
    "eight bits of another kind": (
        replaced(UP, lambda x: x.astype(ml_dtypes.float8_e5m2)),
        f"{UP} is F8_E5M2; only F64, F32, F16, BF16 and, beside its scales, F8_E4M3 are read",
    ),
    "NaN code": (replaced(UP, lambda x: with_code(x, 0x7F)), f"tensor {UP} has NaN codes"),
    "other NaN code": (replaced(UP, lambda x: with_code(x, 0xFF)), f"tensor {UP} has NaN codes"),
    "NaN scale": (
        replaced(SCALE, lambda x: x * np.array(np.nan, x.dtype)),
        f"{SCALE} has NaN or infinite scales",
    ),
}


def with_code(codes, code):
    changed = codes.copy()
    changed.view(np.uint8)[150, 60] = code
    return changed


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    make_reference(folder, **DENSE)
    return folder, quantise(folder, BLOCKS)[0]


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_what_cannot_be_dequantised_is_refused_by_name(dense, tmp_path, name):
    spoil, named = BAD_TENSORS[name]
    shutil.copytree(dense[0], tmp_path, dirs_exist_ok=True)
    tensors = dict(dense[1])
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError) as refused:
        model, _ = checked(Checkpoint(str(tmp_path)))
        assert "NaN" in name  # all else is seen before a value is read
        load(model, tmp_path)
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_a_matrix_is_dequantised_a_few_values_at_a_time(dense, monkeypatch):
    """So little more than the parameter is held."""
    monkeypatch.setattr(LocalFile, "at_once", 1000)
    checkpoint = Watched(dense[0])
    layout = build_layout(jax.devices()[:1], {"model": 1}, kv_heads=1)
    _, table = checked(checkpoint)
    load_params(table, checkpoint, np.float32, layout)
    assert max(checkpoint.sizes[UP]) == 13 * 72 * 4  # 13 rows of 72 columns
    checkpoint.check_read_once(table)


def test_what_a_run_says_of_weights_follows_from_the_tensors(dense):
    config = FAMILIES.read_config(dense[0] / "config.json")[1]
    assert as_stored(config, dense[1]).weights == config.weights == "float8 weights, dequantised"
    assert as_stored(config, [UP]).weights is None


def test_tensors_that_no_weight_needs_are_left_alone(dense, tmp_path):
    """Scales of activations and caches, and tensors of other types beside the language model."""
    shutil.copytree(dense[0], tmp_path, dirs_exist_ok=True)
    path, one = tmp_path / "model.safetensors", np.ones(1, np.float32)
    attention = "model.layers.0.self_attn"
    beside = {f"{attention}.q_proj.{name}": one for name in ("input_scale", "activation_scale")}
    beside |= {f"{attention}.{name}": one for name in ("k_proj.k_scale", "v_proj.v_scale")}
    beside |= {"visual.odd.weight": np.ones(8, np.int8), "mtp.fc.weight": np.ones(3, np.uint16)}
    draft = "mtp.layers.0.mlp.up_proj.weight"
    beside |= {draft: np.ones((2, 2), E4M3), f"{draft}_scale_inv": one}
    save_file(dense[1] | beside, path, {"format": "pt"})
    assert checked(Checkpoint(str(tmp_path)))[0].config.weights == "float8 weights, dequantised"


AWQ, MXFP4 = {"quant_method": "awq", "bits": 4}, {"quant_method": "mxfp4"}
CONFIGS: list[tuple[Any, str | None]] = [
    *((FP8 | more, None) for more in ({}, {"fmt": None}, {"weight_block_size": None})),
    (BLOCKS | {"ignored_layers": ["lm_head"]}, None),
    (compressed(), None),
    (compressed() | {"format": "naive-quantized"}, None),
    *(
        ({"quant_method": "modelopt", "quant_algo": name}, None)
        for name in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
    ),
    (FP8 | {"fmt": "e5m2"}, "(fp8, e5m2)"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "(modelopt, NVFP4)"),
    (compressed() | {"format": "pack-quantized"}, "(compressed-tensors, pack-quantized)"),
    (compressed(num_bits=4), "(compressed-tensors, float-quantized)"),
    (compressed(type="int"), "(compressed-tensors, float-quantized)"),
    (compressed() | {"config_groups": [1]}, "(compressed-tensors, float-quantized)"),
    *((each, f"({each['quant_method']})") for each in (AWQ, MXFP4, {"quant_method": "gptq"})),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "(bitsandbytes)"),
    ({}, "(None)"),
    ("awq", "(awq)"),
    *(
        (FP8 | {"weight_block_size": size}, "is not one size of blocks")
        for size in ([128], [0, 1], "128", 128, [1.5, 2])
    ),
    (FP8 | {"config_groups": {"a": {"weights": FLOATS}}, **BLOCKS}, "is not one size of blocks"),
]


@pytest.mark.parametrize("config,named", CONFIGS)
@pytest.mark.parametrize("inside", [False, True])
def test_which_quantisations_are_read(config, named, inside):
    """Whether config.json says it of the whole model or of the language model inside it."""
    field = {"quantization_config": config}
    raw = {"model_type": "qwen3"} | field
    if inside:
        raw = {"model_type": "qwen3_5", "vision_config": {}, "text_config": field}
    if named is None:
        assert FAMILIES.config(raw).weights == "float8 weights, dequantised"
        return
    with pytest.raises(InputError) as refused:
        FAMILIES.config(raw)
    assert named in str(refused.value) and "quantization_config" in str(refused.value)
