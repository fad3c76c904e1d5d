"""The choice of kernels: right ones pass, wrong ones and those that fail are passed over."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from command_line import main
from conftest import rare_but
from interpreted import pallas
from pods import flags_for
from tiny_models import MOE_TEXT

from activation_extraction.common.errors import RunError
from activation_extraction.model import trial
from activation_extraction.model.attention import blocked_attention, dense_attention
from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.delta_net import gated_delta_rule
from activation_extraction.model.devices import usable_devices
from activation_extraction.model.experts import sum_experts_in_tiles, sum_experts_with_ragged_dot
from activation_extraction.model.family import parse_model_config
from activation_extraction.model.flash_kernel import flash_attention
from activation_extraction.model.grouped_kernel import grouped_experts
from activation_extraction.model.mesh import Layout, build_layout
from activation_extraction.model.trial import (
    TOLERANCE,
    attention_trials,
    delta_trials,
    expert_trials,
    largest_error,
    try_kernels,
)
from benchmarks.inputs import SHAPES

BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
# A shape, the length of rows, devices along `model`, what differs. On one device; with the heads
# and the queries split; a row shorter than a block; with a window.
RUNS = {
    "0.5B": ("0.5B", 2048, 1, {}),
    "7B split": ("7B", 1000, 8, {}),
    "short": ("tiny", 20, 1, {}),
    "window": ("0.5B", 1000, 4, {"sliding_window": 4096}),
}
EXPERTS = (8, 256, 96)  # how many; widths of tokens and of experts
DELTA = (2, 2, 128, 128)  # key heads, values of each, sizes of keys and values


def trials_of(name, dtype):
    """Trials of attention by the name of a run; of others by their sizes."""
    if name in RUNS:
        shape, length, model, changes = RUNS[name]
        config = dataclasses.replace(parse_model_config(SHAPES[shape]), **changes)
        devices = usable_devices(all_of_host=True)[:model]
        layout = build_layout(devices, {"model": model}, config.num_key_value_heads)
        return attention_trials(config, layout, length, dtype)
    if len(name) == 3:
        experts = SimpleNamespace(count=name[0], width=name[2])
        config = SimpleNamespace(experts=experts, hidden_size=name[1])
        return expert_trials(config, Layout(), dtype)
    names = "key_heads", "values_per_key", "key_size", "value_size"
    delta = SimpleNamespace(**dict(zip(names, name, strict=True)))
    return delta_trials(SimpleNamespace(delta=delta), Layout(), dtype)


def broken(*_):
    raise NotImplementedError("no such\ninstruction")


def changed(kernel, place, change):
    """The kernel, one of whose arguments is another; or, where place is None, its result."""

    def wrong(*arrays):
        if place is None:
            return change(kernel(*arrays))
        return kernel(*arrays[:place], change(arrays[place]), *arrays[place + 1 :])

    return wrong


def sees_more_than_the_window(*arrays):
    return dense_attention(*arrays[:5], *(window + 1 for window in arrays[5:]))


delta_rule, flash, grouped = (
    partial(kernel, interpret=True)
    for kernel in (pallas_delta_rule, flash_attention, grouped_experts)
)
of_attention, of_experts, of_delta = (
    partial(changed, kernel) for kernel in (dense_attention, sum_experts_in_tiles, gated_delta_rule)
)


def with_other(name, change):
    """Changes one of the stacks of experts."""
    return lambda stacks: stacks._replace(**{name: change(getattr(stacks, name))})


RIGHT = [  # a kernel, a trial, a dtype
    (dense_attention, "0.5B", BFLOAT16),
    (blocked_attention, "window", BFLOAT16),
    (grouped, EXPERTS, BFLOAT16),
    (sum_experts_with_ragged_dot, EXPERTS, FLOAT32),
    *((rule, DELTA, BFLOAT16) for rule in (gated_delta_rule, delta_rule)),
]
SELDOM = [
    *((flash, name, BFLOAT16) for name in ("window", "7B split")),
    (pallas, (3, 256, 128), BFLOAT16),
]
WRONG = {  # a kernel, and a trial that it must not pass
    "all in one segment": (of_attention(3, lambda x: jax.tree.map(jnp.zeros_like, x)), "short"),
    "sees the next token": (of_attention(4, lambda first: first + 1), "0.5B"),
    "not a number": (of_attention(None, lambda x: x.at[0, 0, 0, 0].set(jnp.nan)), "short"),
    "a key more than the window": (sees_more_than_the_window, "window"),
    "forgets the gate": (of_experts(3, with_other("gate", jnp.ones_like)), EXPERTS),
    "forgets segments": (of_delta(5, jnp.ones_like), DELTA),
    "reads the next head": (of_delta(0, lambda q: jnp.roll(q, 1, axis=2)), DELTA),
}


@pytest.mark.long
@pytest.mark.parametrize("right", rare_but(RIGHT, RIGHT + SELDOM))
def test_right_kernels_stay_well_below_the_tolerance(right):
    kernel, name, dtype = right
    error = largest_error(kernel, trials_of(name, dtype))
    assert dtype == FLOAT32 or error > 0
    assert error < TOLERANCE[dtype.name] / 1.5


@pytest.mark.long
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_kernels_are_found_out(wrong):
    kernel, name = WRONG[wrong]
    assert not largest_error(kernel, trials_of(name, BFLOAT16)) <= 1.5 * TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    "kernel,place,name",
    [
        (dense_attention, 2, "0.5B"),
        (sum_experts_in_tiles, 3, EXPERTS),
        (gated_delta_rule, 2, DELTA),
    ],
)
def test_float32_may_not_be_rounded(kernel, place, name):
    def in_bfloat16(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    change = with_other("down", in_bfloat16) if kernel is sum_experts_in_tiles else in_bfloat16
    rounds = changed(kernel, place, change)
    assert largest_error(rounds, trials_of(name, FLOAT32)) > 10 * TOLERANCE["float32"]


def test_the_first_right_kernel_is_chosen_where_a_model_needs_one(monkeypatch):
    """One that fails, as one for TPUs does here, and one that is wrong are passed over."""
    candidates = {
        "attention": [broken, WRONG["sees the next token"][0], blocked_attention, broken],
        "experts": [WRONG["forgets the gate"][0], sum_experts_in_tiles],
        "delta_rule": [pallas_delta_rule, WRONG["forgets segments"][0], gated_delta_rule],
    }
    right = blocked_attention, sum_experts_in_tiles, gated_delta_rule
    named = {name: dict(zip("abcd", each, strict=False)) for name, each in candidates.items()}
    monkeypatch.setattr(trial, "candidates_for", lambda platform: named)
    for raw, expected in ((SHAPES["tiny"], {"attention"}), (MOE_TEXT, {*candidates})):
        chosen = try_kernels(parse_model_config(raw), Layout(), 64, FLOAT32)
        assert chosen.keys() == expected
        for function, (name, choice) in zip(right, chosen.items(), strict=False):
            assert choice.kernel is function
            assert len(choice.rejection_reason_by_kernel) == candidates[name].index(function)
    assert chosen["attention"].rejection_reason_by_kernel["a"] == "it fails: no such instruction"
    assert (
        chosen["attention"]
        .rejection_reason_by_kernel["b"]
        .startswith("it differs from the definition by ")
    )
    named["attention"] = {"a": broken, "b": WRONG["not a number"][0]}
    message = "no kernel for attention is right on this device: a: it fails: .*; b: it differs"
    with pytest.raises(RunError, match=message):
        try_kernels(parse_model_config(SHAPES["tiny"]), Layout(), 64, FLOAT32)


@pytest.mark.long
def test_a_run_and_its_verification_use_the_choice_and_the_metadata_have_it(
    demo_inputs, tmp_path, monkeypatch, capsys
):
    """A GPU on which its kernel fails, as it does on this CPU, goes on with another one."""
    attention = {"flash": flash_attention, "wrong": broken, "blocked": blocked_attention}
    monkeypatch.setattr(trial, "candidates_for", lambda platform: {"attention": attention})
    flags = flags_for(demo_inputs, tmp_path, "--max_samples", 6, "--dtype", "bfloat16")
    assert main(*flags) == 0
    found = json.loads((tmp_path / "metadata.json").read_text())["attention"]
    assert found["name"] == "blocked" and list(found["passed_over"]) == ["flash", "wrong"]
    log = capsys.readouterr().err
    assert "WARNING machine 0 host 0: attention: flash is not used: it fails: " in log
    assert main("--verify", "--output_dir", tmp_path, "--model_path", demo_inputs / "model") == 0
    assert "attention: blocked, which agrees" in capsys.readouterr().err
