"""The choice of kernels: right ones pass, wrong ones and those that fail are passed over."""

import dataclasses
import json
from functools import partial
from itertools import product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from command_line import main
from pods import flags_for
from test_families import released
from tiny_models import TEXT

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
    return expert_trials(config, Layout(), dtype)


def trials_of_delta(sizes, dtype):
    """Trials of so many key heads, value heads of each, and of keys and values of these sizes."""
    names = "key_heads", "values_per_key", "key_size", "value_size"
    delta = SimpleNamespace(**dict(zip(names, sizes, strict=True)))
    return delta_trials(SimpleNamespace(delta=delta), Layout(), dtype)


def trials_of(name, dtype):
    """Trials of attention by the name of a run, and others by their sizes."""
    if name in RUNS:
        return attention_trials(*RUNS[name], dtype)
    return (trials_of_experts if len(name) == 3 else trials_of_delta)(name, dtype)


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


def without(*places):
    """Attention that takes no notice of segments."""
    return lambda *arrays: dense_attention(
        *(array * 0 if place in places else array for place, array in enumerate(arrays))
    )


def low(kernel, count):
    """The kernel with its first arguments in bfloat16."""

    def rounds(*arrays):
        rounded = (array.astype(jnp.bfloat16) for array in arrays[:count])
        return kernel(*rounded, *arrays[count:]).astype(arrays[0].dtype)

    return rounds


def pallas(*arrays):
    return pallas_delta_rule(*arrays, interpret=True)


ATTENTIONS, EXPERTS = ("0.5B", "short"), [(8, 256, 96), (3, 72, 40), (1, 64, 32)]
DELTA = [(2, 2, 128, 128), (1, 4, 32, 16)]
RIGHT = [
    *((dense_attention, run, BFLOAT16) for run in RUNS),
    *((blocked_attention, run, BFLOAT16) for run in RUNS),
    (blocked_attention, "7B split", FLOAT32),
    *product((tiled_experts, ragged_experts), EXPERTS, (BFLOAT16, FLOAT32)),
    *product((gated_delta_rule, pallas), DELTA, (BFLOAT16, FLOAT32)),
]
SEES_THE_NEXT_TOKEN = changed(dense_attention, 5, lambda first: first + 1)
NOT_A_NUMBER = changed(dense_attention, None, lambda x: x.at[0, 0, 0, 0].set(jnp.nan))
FORGETS_THE_GATE = changed(tiled_experts, 2, jnp.ones_like)
FORGETS_SEGMENTS = changed(gated_delta_rule, 5, jnp.ones_like)
WRONG = {
    "all in one segment": (without(3, 4), *ATTENTIONS),
    "sees the next token": (SEES_THE_NEXT_TOKEN, *ATTENTIONS),
    "misses the first token": (
        *(changed(dense_attention, 4, lambda x: x.at[:, 0].set(-1)), *ATTENTIONS),
    ),
    "scales again": (changed(dense_attention, 0, lambda q: q * q.shape[-1] ** -0.5), *ATTENTIONS),
    "wrong in one head": (
        *(changed(dense_attention, None, lambda x: x.at[:, 5:9, -1].multiply(1.1)), *ATTENTIONS),
    ),
    "not a number": (NOT_A_NUMBER, *ATTENTIONS),
    "a row of the next expert": (
        *(changed(tiled_experts, 1, lambda x: x.at[0].add(1).at[1].add(-1)), EXPERTS[0]),
    ),
    "forgets the gate": (FORGETS_THE_GATE, EXPERTS[0]),
    "forgets segments": (FORGETS_SEGMENTS, DELTA[0]),
    "forgets nothing": (changed(gated_delta_rule, 3, lambda x: x * 0), DELTA[0]),
    "reads the next head": (
        *(changed(gated_delta_rule, 0, lambda q: jnp.roll(q, 1, axis=2)), DELTA[0]),
    ),
}
ROUNDS = [
    *((low(dense_attention, 3), "0.5B"), (low(tiled_experts, 1), EXPERTS[0])),
    (changed(gated_delta_rule, 2, lambda v: v.astype(jnp.bfloat16)), DELTA[0]),
]


@pytest.mark.long
@pytest.mark.parametrize("kernel,name,dtype", RIGHT, ids=lambda x: getattr(x, "__name__", str(x)))
def test_right_kernels_stay_well_below_the_tolerance(kernel, name, dtype):
    error = largest_error(kernel, trials_of(name, dtype))
    assert dtype == FLOAT32 or error > 0
    assert error < TOLERANCE[dtype.name] / 1.5


@pytest.mark.long
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_kernels_are_found_out(wrong):
    kernel, *names = WRONG[wrong]
    for name in names:
        error = largest_error(kernel, trials_of(name, BFLOAT16))
        assert not error <= 1.5 * TOLERANCE["bfloat16"]


@pytest.mark.parametrize("kernel,name", ROUNDS, ids=["attention", "experts", "delta rule"])
def test_float32_may_not_be_rounded(kernel, name):
    assert largest_error(kernel, trials_of(name, FLOAT32)) > 10 * TOLERANCE["float32"]


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
@pytest.mark.parametrize("length", [1000, 20])
def test_a_window_is_tried_too(length):
    run = run_of("0.5B", length, model=4, sliding_window=4096)
    trials, most = partial(attention_trials, *run, BFLOAT16), TOLERANCE["bfloat16"]
    *whole, windowed = (each.arguments for each in trials())
    assert windowed[0].shape[1] < windowed[1].shape[1]
    assert len(whole[0]) == 6 and windowed[6] == windowed[1].shape[1] // 6
    for right in (dense_attention, blocked_attention):
        assert largest_error(right, trials()) < most / 1.5
    for more in (10**6, 1):  # no window, and one key too many
        wrong = partial(sees_more_than_the_window, more)
        assert not largest_error(wrong, trials()) <= 1.5 * most


def sees_more_than_the_window(more, *arrays):
    return dense_attention(*arrays[:6], *(window + more for window in arrays[6:]))


def test_the_first_right_one_is_chosen_and_the_others_are_explained():
    candidates = {"broken": broken, "wrong": SEES_THE_NEXT_TOKEN, "right": dense_attention}
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
        choose_kernel("attention", {"broken": broken, "wrong": NOT_A_NUMBER}, trials, most)


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


def test_others_are_tried_at_the_sizes_of_one_device():
    eight = usable_devices(every=True)
    _, config = FAMILIES.parse_config(SHAPES["qwen3-moe"])
    few = dataclasses.replace(config, experts=dataclasses.replace(config.experts, count=12))
    layout = build_layout(eight, {"expert": 4, "model": 2}, 8)
    for each, mesh, gate in ((config, Layout(), (8, 1024, 512)), (few, layout, (3, 1024, 256))):
        assert shapes_of(expert_trials(each, mesh, BFLOAT16))[2] == gate
    split = build_layout(eight[:4], {"model": 4}, 2)
    large = [FAMILIES.config(released(f"Qwen3.5-{name}")) for name in ("9B", "35B-A3B")]
    for config, mesh, keys, values in (
        *((each, Layout(), (2, 128), (2, 2, 128)) for each in large),
        *((each, build_layout(eight, {"model": 8}, 4), (2, 128), (2, 2, 128)) for each in large),
        (FAMILIES.config(TEXT), split, (1, 16), (1, 2, 16)),
    ):
        q, _, v, *_ = shapes_of(delta_trials(config, mesh, BFLOAT16))
        assert (q[2:], v[2:]) == (keys, values)


@pytest.mark.parametrize("raw,kind", [("tiny", ""), ("tiny-moe", "experts"), (TEXT, "delta_rule")])
def test_kernels_are_tried_where_a_model_needs_them(raw, kind, monkeypatch):
    """One that fails, as one for TPUs does here, and one that is wrong are passed over."""
    candidates = {
        "attention": {"blocked": blocked_attention},
        "experts": {"absent": broken, "wrong": FORGETS_THE_GATE, "right": tiled_experts},
        "delta_rule": {
            **{"absent": pallas_delta_rule, "wrong": FORGETS_SEGMENTS, "right": gated_delta_rule}
        },
    }
    monkeypatch.setattr(trial, "candidates_for", lambda platform: candidates)
    config = FAMILIES.config(SHAPES.get(raw) if isinstance(raw, str) else raw)
    chosen = try_kernels(config, Layout(), 64, FLOAT32)
    assert chosen.pop("attention").function is blocked_attention
    assert [*chosen] == [kind] * bool(kind)
    for choice in chosen.values():
        assert choice.function is candidates[kind]["right"]
        assert list(choice.passed_over) == ["absent", "wrong"]
        assert choice.passed_over["absent"].startswith("it fails: ")
        assert choice.passed_over["wrong"].startswith("it differs from the definition by ")


def test_an_unknown_platform_is_refused_in_one_line(demo_inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jax.default_backend", lambda: "METAL")
    flags = flags_for(demo_inputs, tmp_path / "out")
    assert main(*flags) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: JAX runs on the platform")
