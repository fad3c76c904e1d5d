"""`--mesh_type auto`: the shortest step that fits, and what it is estimated from."""

import dataclasses
import json
import os
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from command_line import main
from pods import flags_for
from test_model import matching

from activation_extraction.cli.config import parse_args
from activation_extraction.common import host_memory
from activation_extraction.common.errors import InputError
from activation_extraction.model.automatic_mesh import StepSizes
from activation_extraction.model.devices import CHIPS, memory_of
from activation_extraction.model.forward import build_model
from activation_extraction.model.mesh import build_layout
from activation_extraction.run.prepare import model_request
from benchmarks.shapes import SHAPES, evenly_spaced
from qwen2_jax import weight_table
from qwen2_jax_with_hooks import FAMILIES, HOOKS, create_model_with_hooks


@dataclass(frozen=True)
class Device:
    """A device that is not here, and says nothing about its memory."""

    id: int
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0

    def memory_stats(self):
        return None


def step_of(name, rows, length=2048):
    config = FAMILIES.config(SHAPES[name])
    depth = config.num_hidden_layers
    hooks = HOOKS.of_layers(evenly_spaced(8, depth), "residual", depth)
    model = create_model_with_hooks(config, hooks, jax.numpy.dtype("bfloat16"))
    return StepSizes(model, weight_table(model), rows, length)


def devices(count, kind="TPU v5e"):
    return [Device(number, kind) for number in range(count)]


@pytest.mark.parametrize(
    "name,count,kind,rows,expected",
    [
        ("0.5B", 64, "TPU v5e", 128, {"data": 64}),  # everything fits on a chip
        ("7B", 64, "TPU v5e", 128, {"data": 32, "fsdp": 2}),  # it does not on chips of 16 GB
        ("7B", 16, "TPU v6 lite", 32, {"data": 16}),  # but it does on those of 32 GB
        ("72B", 64, "TPU v5e", 128, {"data": 2, "fsdp": 32}),
        ("30B-A3B", 16, "TPU v6 lite", 32, {"data": 4, "expert": 4}),  # gathering sends more
        ("0.5B", 8, "TPU v5e", 2, {"data": 2, "model": 4}),  # too few rows
        ("7B", 8, "TPU v5e", 1, {"data": 1, "model": 8}),
        ("0.5B", 1, "TPU v5e", 8, {"data": 1}),
        ("0.5B", 8, "cpu", 8, {"data": 8}),  # of unknown size
    ],
)
def test_the_mesh_that_is_chosen(name, count, kind, rows, expected):
    there = devices(count, kind)
    chosen, why = step_of(name, rows).choose_mesh(there, memory_of(there[0]))
    assert chosen == expected and list(chosen) == list(expected)
    assert "GB per device" in why and "no mesh" not in why


@pytest.mark.parametrize("length,expected", [(2048, {"data": 16}), (256, {"data": 4, "expert": 4})])
def test_devices_with_few_tokens_read_fewer_experts(length, expected):
    """All experts fit on each chip, but reading them takes longer than computing few tokens."""
    there = devices(16, "TPU v5")
    assert step_of("30B-A3B", 32, length).choose_mesh(there, memory_of(there[0]))[0] == expected


@pytest.mark.parametrize("expert", [1, 4])
def test_bytes_of_a_layer_with_experts(expert):
    """30B-A3B with 32 heads of 128 and 8 experts per token, of which each device has some."""
    step, there, chip = step_of("30B-A3B", 32), devices(16, "TPU v6 lite"), CHIPS["TPU v6"]
    shape = {"data": 16 // expert, "expert": expert} if expert > 1 else {"data": 16}
    layout, tokens, d, m = build_layout(there, shape, 4), 2 * 2048, 2048, 768
    others = [(d, 32 * 128), (d, 4 * 128), (d, 4 * 128), (32 * 128, d), (d, 128)]
    weights = sum(a * b for a, b in others) + 128 // expert * 3 * d * m
    in_and_out = sum(a + b for a, b in others) + 8 * (d + 2 * m + m + d)
    sent = 2 * (expert - 1) * tokens * d * 2  # tokens there, sums back, in bfloat16
    moved = 2 * (weights + tokens * in_and_out) + sent
    assert step.moved_by_layer(layout) == pytest.approx(moved, rel=0.01)
    assert step.estimate(layout, there).exchanges == pytest.approx(48 * sent / (2 * chip.link))


@pytest.mark.parametrize("length,hidden", [(1024, False), (2048, True)])
def test_gathers_hide_behind_products_if_a_chip_has_enough_tokens(length, hidden):
    """The formula of the module: 1,640 tokens of a chip hide the gathers of fsdp 4 on a v5e."""
    step, four, chip = step_of("7B", 4, length), devices(4), CHIPS["TPU v5e"]
    estimate = step.estimate(build_layout(four, {"data": 1, "fsdp": 4}, 4), four)
    assert (estimate.gathers <= estimate.products) == hidden
    # Weights of keys and values are not sent, and scores are computed, too.
    of_formula = (2 * length / chip.flops) / (2 * 3 / 4 / (chip.links * chip.link))
    assert estimate.products / estimate.gathers == pytest.approx(of_formula, rel=0.1)


def test_weights_of_a_device_are_those_of_its_shards():
    step = step_of("30B-A3B", 64)
    layouts = [
        build_layout(jax.devices(), shape, 4)
        for shape in ({"data": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 2, "expert": 2, "model": 2})
    ]
    least = [step.memory(layout) for layout in layouts]
    for layout, memory in zip(layouts, least, strict=True):
        held = 0
        for spec in step.weights.values():
            held += 2 * np.prod(layout.sharding(spec.axes, spec.shape).shard_shape(spec.shape))
        assert held < memory < 1.2 * held + 20e9
    assert least[0] > 60e9 and max(least[1:]) < 0.6 * least[0]


def test_what_fits_on_no_mesh_or_divides_on_none():
    chosen, why = step_of("72B", 8).choose_mesh(devices(4), 16e9)
    assert "no mesh fits" in why and np.prod([*chosen.values()]) == 4
    assert chosen.get("data", 1) == 1
    with pytest.raises(InputError, match="the 3 rows .* on no mesh: .* among 5 devices"):
        step_of("0.5B", 3).choose_mesh(devices(5), None)


def test_gpus_of_one_host_gather_sooner_than_those_of_several():
    """A GPU's links end at its host; of two hosts of two, none should gather over four."""
    step, kind = step_of("7B", 64), "NVIDIA H100 80GB HBM3"
    layout = build_layout(jax.devices()[:4], {"data": 1, "fsdp": 4}, 4)
    slow, fast = (
        step.estimate(layout, [Device(n, kind, "gpu", n // of_host) for n in range(4)]).gathers
        for of_host in (2, 4)
    )
    assert slow == pytest.approx(9 * fast)


@pytest.mark.parametrize("limited", [True, False])
def test_memory(limited, monkeypatch, tmp_path):
    """CPU devices share that of the machine or of its container; others say what they have."""
    most, used = container = tmp_path / "memory.max", tmp_path / "memory.current"
    most.write_text("16000000\n" if limited else "max\n")
    used.write_text("15000000\n")
    monkeypatch.setattr(host_memory, "CONTAINER", container)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_of(SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 5})) == 5
    assert memory_of(Device(0, "TPU v6 lite")) == 32e9 and memory_of(Device(0, "cpu")) is None
    assert 8 * memory_of(jax.local_devices()[0]) == (16e6 if limited else machine)
    available = host_memory.available_memory()
    assert available == 1e6 if limited else 1e6 < available <= machine


def test_the_head_counts_where_logits_are_computed():
    config = FAMILIES.config(SHAPES["7B"])
    layout = build_layout(jax.devices(), {"data": 2, "fsdp": 4}, 4)
    found = []
    for names in (["ln_final.hook_out"], ["ln_final.hook_out", "loss"]):
        model = create_model_with_hooks(config, matching(config, names), np.dtype("bfloat16"))
        found.append(StepSizes(model, weight_table(model), 16, 2048).memory(layout))
    head = 2 * config.vocab_size * config.hidden_size
    assert head < found[1] - found[0] < 2 * head  # gathered, and the logits of a block


def test_the_least_memory_of_all_hosts_decides():
    """A host cannot ask the devices of another one."""
    family, config = FAMILIES.parse_config(SHAPES["0.5B"])
    request = model_request(parse_args(["--batch_size", "8", "--layers_to_extract", "3"]))
    large, small = (
        build_model(family, dataclasses.replace(request, memory=memory), config)[0].layout
        for memory in (1e12, 1e9)
    )
    assert large.shape == {"data": 8} and small.size("fsdp") > 1


def test_a_run_says_which_mesh_it_took_and_why(demo_inputs, tmp_path, capsys):
    flags = flags_for(demo_inputs, tmp_path, "--batch_size", 8, "--max_samples", 20)
    assert main(*flags) == 0
    said = capsys.readouterr().err
    assert "mesh: data 8 (about" in said
    assert "every device holds all weights and computes its own rows)" in said
    assert json.loads((tmp_path / "metadata.json").read_text())["mesh"] == {"data": 8}
