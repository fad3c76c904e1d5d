"""The choice of kernels: right ones pass, wrong ones and those that fail are passed over."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from command_line import main
from pods import flags_for
from test_qwen3_5 import TEXT, released

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.model import trial
from activation_extraction.model.attention import blocked_attention, dense_attention
from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.delta_net import gated_delta_rule
from activation_extraction.model.experts import ragged_experts, tiled_experts
from activation_extraction.model.kernels import candidates_for, cudnn_attention
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


# On one device; with the heads and the queries split; a row shorter than a block.
RUNS = {
    "0.5B": run_of("0.5B", 2048),
    "7B split": run_of("7B", 1000, model=8),
    "short": run_of("tiny", 20),
}


def trials_of_experts(sizes, dtype):
    """Trials of so many experts, of tokens and experts of these widths."""
    count, hidden, width = sizes
    config = SimpleNamespace(experts=SimpleNamespace(count=count, width=width), hidden_size=hidden)
    return expert_trials(config, Layout(), 64, dtype)


def trials_of_delta(sizes, dtype):
    """Trials of so many key heads, value heads of each, and of keys and values of these sizes."""
    names = "key_heads", "values_per_key", "key_size", "value_size"
    delta = SimpleNamespace(**dict(zip(names, sizes, strict=True)))
    return delta_trials(SimpleNamespace(delta=delta), Layout(), 64, dtype)


def shapes_of(trials):
    """The shapes of the arguments of the first trial."""
    return [each.shape for each in next(trials).arguments if isinstance(each, jax.Array)]


def broken(*_):
    raise NotImplementedError("no such\ninstruction")


def ignores_the_window(*arrays):
    return dense_attention(*arrays[:6])


def sees_one_key_more_than_the_window(*arrays):
    return dense_attention(*arrays[:6], *(window + 1 for window in arrays[6:]))


def all_in_one_segment(q, k, v, q_segments, k_segments, first):
    return dense_attention(q, k, v, q_segments * 0, k_segments * 0, first)


def sees_the_next_token(q, k, v, q_segments, k_segments, first):
    return dense_attention(q, k, v, q_segments, k_segments, first + 1)


def misses_the_first_token(q, k, v, q_segments, k_segments, first):
    return dense_attention(q, k, v, q_segments, k_segments.at[:, 0].set(-1), first)


def scales_again(q, *others):
    return dense_attention(q * q.shape[-1] ** -0.5, *others)


def wrong_in_one_head(q, *others):
    return dense_attention(q, *others).at[:, 5:9, -1].multiply(1.1)


def not_a_number(q, *others):
    return dense_attention(q, *others).at[0, 0, 0, 0].set(jnp.nan)


def rounds_float32(q, k, v, *others):
    low = (x.astype(jnp.bfloat16) for x in (q, k, v))
    return dense_attention(*low, *others).astype(q.dtype)


WRONG = [all_in_one_segment, sees_the_next_token, misses_the_first_token, scales_again]
WRONG += [wrong_in_one_head, not_a_number]


def test_a_run_is_tried_at_its_own_sizes():
    """As many heads as a device has, and rows that are the run's or that kernels treat alike."""
    q, k, v, *_ = shapes_of(attention_trials(*RUNS["0.5B"], BFLOAT16))
    assert (q, k, v) == ((2, 256, 14, 64), (2, 256, 2, 64), (2, 256, 2, 64))
    (_, length, *_), *_ = shapes_of(attention_trials(*run_of("0.5B", 2047), BFLOAT16))
    assert 256 <= length < 384 and length % 128 == 2047 % 128
    q, k, *_ = shapes_of(attention_trials(*RUNS["7B split"], BFLOAT16))
    assert (q, k) == ((2, 372, 7, 128), (2, 744, 1, 128))
    assert len(list(attention_trials(*RUNS["7B split"], BFLOAT16))) == 2
    q, k, *_ = shapes_of(attention_trials(*run_of("0.5B", 20), BFLOAT16))
    assert q[1] == k[1] == 20


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("attention", [dense_attention, blocked_attention])
def test_right_attentions_stay_well_below_the_tolerance(attention, run):
    error = largest_error(attention, attention_trials(*RUNS[run], BFLOAT16))
    assert 0 < error < TOLERANCE["bfloat16"] / 1.5


@pytest.mark.long
@pytest.mark.parametrize("run", ["0.5B", "short"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_attentions_are_found_out(wrong, run):
    error = largest_error(wrong, attention_trials(*RUNS[run], BFLOAT16))
    assert not error <= 1.5 * TOLERANCE["bfloat16"]


@pytest.mark.long
@pytest.mark.parametrize("length", [1000, 20])
def test_a_window_is_tried_too(length):
    run = run_of("0.5B", length, model=4, sliding_window=4096)
    trials, most = partial(attention_trials, *run, BFLOAT16), TOLERANCE["bfloat16"]
    *whole, windowed = (each.arguments for each in trials())
    assert windowed[0].shape[1] < windowed[1].shape[1]
    assert len(whole[0]) == 6 and windowed[6] == windowed[1].shape[1] // 6
    for right in (dense_attention, blocked_attention):
        assert largest_error(right, trials()) < most / 1.5
    for wrong in (ignores_the_window, sees_one_key_more_than_the_window):
        assert not largest_error(wrong, trials()) <= 1.5 * most
        assert choose_kernel("x", {"a": wrong, "b": dense_attention}, trials, most).name == "b"


@pytest.mark.long
def test_float32_may_not_be_rounded():
    most = TOLERANCE["float32"]
    split = attention_trials(*RUNS["7B split"], FLOAT32)
    assert largest_error(blocked_attention, split) < most / 4
    assert largest_error(rounds_float32, attention_trials(*RUNS["0.5B"], FLOAT32)) > 10 * most


def test_the_first_right_one_is_chosen_and_the_others_are_explained():
    candidates = {"broken": broken, "wrong": sees_the_next_token, "right": dense_attention}
    trials, most = partial(attention_trials, *RUNS["short"], BFLOAT16), TOLERANCE["bfloat16"]
    chosen = choose_kernel("attention", candidates | {"last": broken}, trials, most)
    assert (chosen.name, chosen.function) == ("right", dense_attention)
    assert list(chosen.passed_over) == ["broken", "wrong"]
    assert chosen.passed_over["broken"] == "it fails: no such instruction"
    assert chosen.passed_over["wrong"].startswith("it differs from the definition by ")
    preferred = choose_kernel("attention", {"right": dense_attention} | candidates, trials, most)
    assert (preferred.name, preferred.passed_over) == ("right", {})
    message = "no kernel for attention is right on this device: broken: it fails: .*; wrong: it "
    with pytest.raises(RunError, match=message):
        choose_kernel("attention", {"broken": broken, "wrong": not_a_number}, trials, most)


def test_other_names_of_platforms():
    assert candidates_for("cuda") == candidates_for("rocm") == candidates_for("gpu")
    with pytest.raises(InputError, match="platform 'METAL': expected cpu, gpu or tpu"):
        candidates_for("METAL")


@pytest.mark.long
def test_a_run_and_its_verification_use_the_choice_and_the_metadata_have_it(
    demo_inputs, tmp_path, monkeypatch, capsys
):
    """As on a GPU where cuDNN does not work."""
    out = tmp_path / "out"
    flags = flags_for(demo_inputs, out, "--max_samples", 6)

    def candidates(platform):
        attention = {"cudnn": cudnn_attention, "wrong": broken, "blocked": blocked_attention}
        return {"attention": attention}

    with monkeypatch.context() as patch:
        patch.setattr(trial, "candidates_for", candidates)
        assert main(*flags, "--dtype", "bfloat16") == 0
        found = json.loads((out / "metadata.json").read_text())["attention"]
        assert found["name"] == "blocked" and list(found["passed_over"]) == ["cudnn", "wrong"]
        log = capsys.readouterr().err
        assert "WARNING machine 0 host 0: attention: cudnn is not used: it fails: " in log
        assert log.index("attention: blocked, which agrees") < log.index("model: layers")
        verify = ["--verify", "--output_dir", str(out), "--model_path", str(demo_inputs / "model")]
        assert main(*verify) == 0
        assert "attention: blocked, which agrees" in capsys.readouterr().err


EXPERTS = [(8, 256, 96), (3, 72, 40), (1, 64, 32)]


def takes_a_row_of_the_next_expert(x, sizes, *parameters):
    return tiled_experts(x, sizes.at[0].add(1).at[1].add(-1), *parameters)


def forgets_the_gate(x, sizes, gate, up, down):
    return tiled_experts(x, sizes, jnp.ones_like(gate), up, down)


def rounds_what_experts_get(x, sizes, *parameters):
    low = (array.astype(jnp.bfloat16) for array in parameters)
    return tiled_experts(x.astype(jnp.bfloat16), sizes, *low).astype(x.dtype)


@pytest.mark.parametrize("sizes", EXPERTS, ids=str)
@pytest.mark.parametrize("grouped", [tiled_experts, ragged_experts])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_right_experts_stay_well_below_the_tolerance(grouped, sizes, dtype):
    assert largest_error(grouped, trials_of_experts(sizes, dtype)) < TOLERANCE[dtype.name] / 2


def test_wrong_experts_are_found_out():
    for wrong in (takes_a_row_of_the_next_expert, forgets_the_gate):
        error = largest_error(wrong, trials_of_experts(EXPERTS[0], BFLOAT16))
        assert error > 10 * TOLERANCE["bfloat16"]
    error = largest_error(rounds_what_experts_get, trials_of_experts(EXPERTS[0], FLOAT32))
    assert error > 10 * TOLERANCE["float32"]


def test_experts_are_tried_at_the_sizes_of_one_device():
    _, config = FAMILIES.parse_config(SHAPES["qwen3-moe"])
    gate = shapes_of(expert_trials(config, Layout(), 64, BFLOAT16))[2]
    assert gate == (8, 1024, 512)
    layout = build_layout(usable_devices(every=True), {"expert": 4, "model": 2}, 8)
    few = dataclasses.replace(config, experts=dataclasses.replace(config.experts, count=12))
    gate = shapes_of(expert_trials(few, layout, 64, BFLOAT16))[2]
    assert gate == (3, 1024, 256)


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_experts_are_tried_where_a_model_has_some(shape, monkeypatch):
    config = FAMILIES.parse_config(SHAPES[shape])[1]
    candidates = {
        "attention": {"blocked": blocked_attention},
        "experts": {"absent": broken, "wrong": forgets_the_gate, "tiled": tiled_experts},
    }
    monkeypatch.setattr(trial, "candidates_for", lambda platform: candidates)
    chosen = try_kernels(config, Layout(), 64, FLOAT32)
    assert chosen["attention"].function is blocked_attention
    assert ("experts" in chosen) == (shape == "tiny-moe")
    if "experts" in chosen:
        assert chosen["experts"].function is tiled_experts
        assert list(chosen["experts"].passed_over) == ["absent", "wrong"]


DELTA = [(2, 2, 128, 128), (1, 4, 32, 16)]


def forgets_segments(*arrays):
    return gated_delta_rule(*arrays[:-1], jnp.ones_like(arrays[-1]))


def forgets_nothing(q, k, v, log_decay, *others):
    return gated_delta_rule(q, k, v, log_decay * 0, *others)


def reads_the_next_head(q, *others):
    return gated_delta_rule(jnp.roll(q, 1, axis=2), *others)


def rounds_the_values(q, k, v, *others):
    return gated_delta_rule(q, k, v.astype(jnp.bfloat16), *others).astype(v.dtype)


@pytest.mark.parametrize("sizes", DELTA, ids=str)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("rule", [gated_delta_rule, partial(pallas_delta_rule, interpret=True)])
def test_right_delta_rules_stay_well_below_the_tolerance(rule, sizes, dtype):
    assert 0 < largest_error(rule, trials_of_delta(sizes, dtype)) < TOLERANCE[dtype.name] / 2


def test_wrong_delta_rules_are_found_out():
    for wrong in (forgets_segments, forgets_nothing, reads_the_next_head):
        error = largest_error(wrong, trials_of_delta(DELTA[0], BFLOAT16))
        assert error > 10 * TOLERANCE["bfloat16"]
    error = largest_error(rounds_the_values, trials_of_delta(DELTA[0], FLOAT32))
    assert error > 10 * TOLERANCE["float32"]


def test_delta_rules_are_tried_at_the_sizes_of_one_device_where_a_model_has_some(monkeypatch):
    """A kernel that fails, as one for TPUs does here, and one that is wrong are passed over."""
    config = FAMILIES.config(released("9B"))
    layout = build_layout(usable_devices(every=True), {"model": 8}, kv_heads=4)
    for large in (config, FAMILIES.config(released("35B-A3B"))):
        for each in (layout, Layout()):
            q, _, v, *_ = shapes_of(delta_trials(large, each, 64, BFLOAT16))
            assert (q[2:], v[2:]) == ((2, 128), (2, 2, 128))
    small = FAMILIES.config(TEXT)
    layout = build_layout(usable_devices(every=True)[:4], {"model": 4}, kv_heads=2)
    q, _, v, *_ = shapes_of(delta_trials(small, layout, 64, BFLOAT16))
    assert (q[2:], v[2:]) == ((1, 16), (1, 2, 16))
    candidates = {
        "attention": {"blocked": blocked_attention},
        "delta_rule": {
            "pallas": pallas_delta_rule,
            "wrong": forgets_segments,
            "chunked": gated_delta_rule,
        },
    }
    monkeypatch.setattr(trial, "candidates_for", lambda platform: candidates)
    chosen = try_kernels(small, layout, 64, FLOAT32)["delta_rule"]
    assert chosen.function is gated_delta_rule
    assert list(chosen.passed_over) == ["pallas", "wrong"]
    assert chosen.passed_over["pallas"].startswith("it fails: ")
    assert chosen.passed_over["wrong"].startswith("it differs from the definition by ")


def test_an_unknown_platform_is_refused_in_one_line(demo_inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jax.default_backend", lambda: "METAL")
    flags = flags_for(demo_inputs, tmp_path / "out")
    assert main(*flags) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: JAX runs on the platform")
