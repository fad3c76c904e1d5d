"""The choice of kernels: right ones pass, wrong ones and those that fail are passed over."""

import dataclasses
import json
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from command_line import main
from pods import flags_for
from tiny_models import MOE_TEXT, TEXT

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.model import trial
from activation_extraction.model.attention import Segments, blocked_attention, dense_attention
from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.delta_net import gated_delta_rule
from activation_extraction.model.experts import ragged_experts, tiled_experts
from activation_extraction.model.flash_kernel import flash_attention
from activation_extraction.model.grouped_kernel import grouped_experts
from activation_extraction.model.kernels import candidates_for
from activation_extraction.model.mesh import Layout, build_layout, usable_devices
from activation_extraction.model.trial import (
    TOLERANCE,
    attention_trials,
    choose_kernel,
    delta_trials,
    expert_trials,
    largest_error,
    try_kernels,
)
from benchmarks.shapes import SHAPES
from qwen2_jax_with_hooks import FAMILIES

BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


def run_of(shape, length, model=1, **changes):
    """What the trials of a run are made from but for the dtype, with an axis `model` of that many
    devices."""
    config = FAMILIES.parse_config(SHAPES[shape])[1]
    config = dataclasses.replace(config, **changes)
    devices = usable_devices(every=True)[:model]
    return config, build_layout(devices, {"model": model}, config.num_key_value_heads), length


# On one device; with the heads and the queries split; a row shorter than a block; with a window.
RUNS = {
    "0.5B": run_of("0.5B", 2048),
    "7B split": run_of("7B", 1000, model=8),
    "short": run_of("tiny", 20),
    "window": run_of("0.5B", 1000, model=4, sliding_window=4096),
}


def trials_of_experts(sizes, dtype):
    """Trials of so many experts, of tokens and experts of these widths."""
    count, hidden, width = sizes
    config = SimpleNamespace(experts=SimpleNamespace(count=count, width=width), hidden_size=hidden)
    return expert_trials(config, Layout(), dtype)


def trials_of(name, dtype):
    """Trials of attention by the name of a run; of others by their sizes."""
    if name in RUNS:
        return attention_trials(*RUNS[name], dtype)
    if len(name) == 3:
        return trials_of_experts(name, dtype)
    names = "key_heads", "values_per_key", "key_size", "value_size"
    delta = SimpleNamespace(**dict(zip(names, name, strict=True)))
    return delta_trials(SimpleNamespace(delta=delta), Layout(), dtype)


def shapes_of(trials):
    """The shapes of the arguments of the first trial."""
    return [each.shape for each in next(trials).arguments if isinstance(each, jax.Array)]


def broken(*_):
    raise NotImplementedError("no such\ninstruction")


def changed(kernel, place, change):
    """The kernel, one of whose arguments is another; or, where place is None, its result."""

    def wrong(*arrays):
        if place is None:
            return change(kernel(*arrays))
        return kernel(*arrays[:place], change(arrays[place]), *arrays[place + 1 :])

    return wrong


def without_first_key(segments):
    return segments._replace(k=segments.k.at[:, 0].set(-1))


def sees_more_than_the_window(*arrays):
    return dense_attention(*arrays[:5], *(window + 1 for window in arrays[5:]))


def low(kernel, count):
    """The kernel with its first arguments in bfloat16."""

    def rounds(*arrays):
        rounded = (array.astype(jnp.bfloat16) for array in arrays[:count])
        return kernel(*rounded, *arrays[count:]).astype(arrays[0].dtype)

    return rounds


pallas, flash, grouped = (
    partial(kernel, interpret=True)
    for kernel in (pallas_delta_rule, flash_attention, grouped_experts)
)


def name_of(x):
    return getattr(getattr(x, "func", x), "__name__", str(x))


EXPERTS, DELTA = [(8, 256, 96), (3, 72, 40), (1, 64, 32)], [(2, 2, 128, 128), (1, 4, 32, 16)]
RIGHT = [
    *product((dense_attention, blocked_attention), RUNS, [BFLOAT16]),
    *product([flash], RUNS, [BFLOAT16]),
    (blocked_attention, "7B split", FLOAT32),
    *product([grouped], EXPERTS, [BFLOAT16]),
    *product((tiled_experts, ragged_experts), EXPERTS, (BFLOAT16, FLOAT32)),
    *product((gated_delta_rule, pallas), DELTA, (BFLOAT16, FLOAT32)),
]
of_attention, of_experts, of_delta = (
    partial(changed, kernel) for kernel in (dense_attention, tiled_experts, gated_delta_rule)
)
WRONG = {
    "all in one segment": of_attention(3, lambda x: Segments(x.q * 0, x.k * 0)),
    "sees the next token": of_attention(4, lambda first: first + 1),
    "misses the first token": of_attention(3, without_first_key),
    "scales again": of_attention(0, lambda q: q * q.shape[-1] ** -0.5),
    "wrong in one head": of_attention(None, lambda x: x.at[:, 5:9, -1].multiply(1.1)),
    "not a number": of_attention(None, lambda x: x.at[0, 0, 0, 0].set(jnp.nan)),
    "a key more than the window": sees_more_than_the_window,
    "a row of the next expert": of_experts(1, lambda x: x.at[0].add(1).at[1].add(-1)),
    "forgets the gate": of_experts(2, jnp.ones_like),
    "forgets segments": of_delta(5, jnp.ones_like),
    "forgets nothing": of_delta(3, lambda x: x * 0),
    "reads the next head": of_delta(0, lambda q: jnp.roll(q, 1, axis=2)),
}
PLACES: dict[str, Any] = dict.fromkeys(WRONG, ("0.5B", "short")) | {
    "a key more than the window": ("window",)
}
PLACES |= dict.fromkeys([*WRONG][7:9], (EXPERTS[0],)) | dict.fromkeys([*WRONG][9:], (DELTA[0],))


@pytest.mark.long
@pytest.mark.parametrize("kernel,name,dtype", RIGHT, ids=name_of)
def test_right_kernels_stay_well_below_the_tolerance(kernel, name, dtype):
    error = largest_error(kernel, trials_of(name, dtype))
    assert dtype == FLOAT32 or error > 0
    assert error < TOLERANCE[dtype.name] / 1.5


@pytest.mark.long
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_kernels_are_found_out(wrong):
    for name in PLACES[wrong]:
        error = largest_error(WRONG[wrong], trials_of(name, BFLOAT16))
        assert not error <= 1.5 * TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    "kernel,name",
    [
        (low(dense_attention, 3), "0.5B"),
        (low(tiled_experts, 1), EXPERTS[0]),
        (of_delta(2, lambda v: v.astype(jnp.bfloat16)), DELTA[0]),
    ],
)
def test_float32_may_not_be_rounded(kernel, name):
    assert largest_error(kernel, trials_of(name, FLOAT32)) > 10 * TOLERANCE["float32"]


def test_a_run_is_tried_at_the_sizes_of_one_device():
    """As many heads as a device has, and rows that are the run's or that kernels treat alike."""
    q, k, v = shapes_of(trials_of("0.5B", BFLOAT16))
    assert (q, k, v) == ((2, 256, 14, 64), (2, 256, 2, 64), (2, 256, 2, 64))
    (_, length, *_), *_ = shapes_of(attention_trials(*run_of("0.5B", 2047), BFLOAT16))
    assert 256 <= length < 384 and length % 128 == 2047 % 128
    every = [each.arguments for each in trials_of("7B split", BFLOAT16)]
    assert len(every) == 2 and every[0][1].shape == (2, 744, 1, 128)
    assert every[0][0].shape == (2, 372, 7, 128)
    q, k, *_ = shapes_of(trials_of("short", BFLOAT16))
    assert q[1] == k[1] == 20
    *whole, windowed = (each.arguments for each in trials_of("window", BFLOAT16))
    assert windowed[0].shape[1] < windowed[1].shape[1]
    assert len(whole[0]) == 5 and windowed[5] == windowed[1].shape[1] // 6
    eight, config = usable_devices(every=True), FAMILIES.config(SHAPES["qwen3-moe"])
    layout = build_layout(eight, {"expert": 4, "model": 2}, 8)
    few = dataclasses.replace(config, experts=dataclasses.replace(config.experts, count=12))
    assert shapes_of(expert_trials(few, layout, BFLOAT16))[2] == (3, 1024, 256)
    layout = build_layout(eight[:4], {"model": 4}, 2)
    q, _, v, *_ = shapes_of(delta_trials(FAMILIES.config(TEXT), layout, BFLOAT16))
    assert (q[2:], v[2:]) == ((1, 16), (1, 2, 16))


def test_the_first_right_one_is_chosen_and_the_others_are_explained():
    candidates = {"broken": broken, "wrong": WRONG["sees the next token"], "right": dense_attention}
    trials, most = partial(trials_of, "short", BFLOAT16), TOLERANCE["bfloat16"]
    chosen = choose_kernel("attention", candidates | {"last": broken}, trials, most)
    assert (chosen.name, chosen.function) == ("right", dense_attention)
    assert list(chosen.passed_over) == ["broken", "wrong"]
    assert chosen.passed_over["broken"] == "it fails: no such instruction"
    assert chosen.passed_over["wrong"].startswith("it differs from the definition by ")
    message = "no kernel for attention is right on this device: broken: it fails: .*; wrong: it "
    with pytest.raises(RunError, match=message):
        choose_kernel("attention", {"broken": broken, "wrong": WRONG["not a number"]}, trials, most)


def test_kernels_are_tried_where_a_model_needs_them(monkeypatch):
    """One that fails, as one for TPUs does here, and one that is wrong are passed over."""
    experts = {"wrong": WRONG["forgets the gate"], "right": tiled_experts}
    delta_rule = {"absent": pallas_delta_rule, "wrong": WRONG["forgets segments"]}
    delta_rule["right"] = gated_delta_rule
    candidates = {"attention": {"blocked": blocked_attention}}
    candidates |= {"experts": experts, "delta_rule": delta_rule}
    monkeypatch.setattr(trial, "candidates_for", lambda platform: candidates)
    for raw, expected in ((SHAPES["tiny"], {}), (MOE_TEXT, candidates)):
        chosen = try_kernels(FAMILIES.config(raw), Layout(), 64, FLOAT32)
        assert chosen.keys() == {"attention", *expected}
        for name, choice in chosen.items():
            *others, right = candidates[name].values()
            assert choice.function is right and len(choice.passed_over) == len(others)


@pytest.mark.long
def test_a_run_and_its_verification_use_the_choice_and_the_metadata_have_it(
    demo_inputs, tmp_path, monkeypatch, capsys
):
    """A GPU on which its kernel fails, as it does on this CPU, goes on with another one."""
    out = tmp_path / "out"
    flags = flags_for(demo_inputs, out, "--max_samples", 6)
    attention = {"flash": flash_attention, "wrong": broken, "blocked": blocked_attention}
    with monkeypatch.context() as patch:
        patch.setattr(trial, "candidates_for", lambda platform: {"attention": attention})
        assert main(*flags, "--dtype", "bfloat16") == 0
        found = json.loads((out / "metadata.json").read_text())["attention"]
        assert found["name"] == "blocked" and list(found["passed_over"]) == ["flash", "wrong"]
        log = capsys.readouterr().err
        assert "WARNING machine 0 host 0: attention: flash is not used: it fails: " in log
        assert log.index("attention: blocked, which agrees") < log.index("model: layers")
        verify = ["--verify", "--output_dir", str(out), "--model_path", str(demo_inputs / "model")]
        assert main(*verify) == 0
        assert "attention: blocked, which agrees" in capsys.readouterr().err


def test_platforms_by_other_names_and_unknown_ones(demo_inputs, tmp_path, monkeypatch, capsys):
    assert candidates_for("cuda") == candidates_for("rocm") == candidates_for("gpu")
    with pytest.raises(InputError, match="platform 'METAL': expected cpu, gpu or tpu"):
        candidates_for("METAL")
    monkeypatch.setattr("jax.default_backend", lambda: "METAL")
    assert main(*flags_for(demo_inputs, tmp_path / "out")) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: JAX runs on the platform")
