"""Meshes: the shapes that flags choose, what cannot be split, and `--mesh_type auto`: the shortest
step that fits into the memory of the devices. test_model.py has the numbers.
"""

import dataclasses
import json
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from command_line import main
from pods import flags_for
from tiny_models import SHARED

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError
from activation_extraction.model import devices as devices_module
from activation_extraction.model.automatic_mesh import StepSizes
from activation_extraction.model.devices import memory_of
from activation_extraction.model.forward import build_model
from activation_extraction.model.mesh import (
    build_layout,
    check_divisibility,
    choose_shape,
    host_rows,
    usable_devices,
)
from activation_extraction.run.prepare import model_request
from benchmarks.inputs import SHAPES, evenly_spaced
from qwen2_jax import weight_table
from qwen2_jax_with_hooks import FAMILIES, HOOKS, create_model_with_hooks


@pytest.mark.parametrize(
    "kind,shape,axes,devices,hosts,expected",
    [
        ("2d", None, None, 64, 16, {"data": 16, "model": 4}),
        ("1d", None, None, 64, 4, {"model": 64}),
        ("3d", None, None, 64, 4, {"pipeline": 4, "data": 4, "model": 4}),
        (None, (2, 2, 2), ("data", "model", "fsdp"), 8, 1, {"data": 2, "model": 2, "fsdp": 2}),
        (None, (8,), None, 8, 1, {"model": 8}),
    ],
)
def test_shapes_that_are_chosen(kind, shape, axes, devices, hosts, expected):
    chosen, why = choose_shape(kind, shape, axes, devices, hosts, automatic=dict)
    assert chosen == expected and list(chosen) == list(expected) and not why


def test_3d_on_few_devices_falls_back_and_a_shape_that_does_not_fit_is_refused():
    chosen, why = choose_shape("3d", None, None, 8, 1, dict)
    assert chosen == {"data": 2, "model": 4}
    assert "64 or more" in why and "8 devices become a 2d" in why
    with pytest.raises(InputError, match="is 12 devices, there are 8.*2,4; 4,2; 1,8; 8,1"):
        choose_shape(None, (3, 4), None, 8, 1, dict)


MOE = FAMILIES.config(SHARED | dict(num_hidden_layers=4, decoder_sparse_step=2)).sizes
DENSE = FAMILIES.config({"model_type": "qwen3", "intermediate_size": 128}).sizes


@pytest.mark.parametrize(
    "shape,rows,length,sizes,said",
    [
        ({"data": 8}, 16, 64, DENSE, None),
        ({"data": 2, "expert": 2, "model": 2}, 8, 64, MOE, None),
        ({"model": 8}, 8, 64, MOE, None),  # which has 6 experts
        ({"data": 4, "fsdp": 2}, 12, 64, DENSE, "--batch_size.* 12 does not divide among 8"),
        ({"model": 8}, 8, 66, DENSE, "--max_seq_length: 66 does not divide among 4"),
        ({"expert": 4, "model": 2}, 8, 64, MOE, "num_experts: 6 does .* among 4 devices .expert"),
        ({"expert": 2, "model": 4}, 8, 64, DENSE, "--mesh_axes expert: the model has no experts"),
    ],
)
def test_what_does_not_divide_is_refused(shape, rows, length, sizes, said):
    layout = build_layout(usable_devices(every=True), shape, kv_heads=2)
    if said is None:
        return check_divisibility(layout, rows, length, sizes)
    with pytest.raises(InputError, match=said):
        check_divisibility(layout, rows, length, sizes)


def test_the_order_of_devices_of_several_hosts():
    """Rows of a host go to consecutive devices; a TPU may number neighbours across hosts."""
    found = [SimpleNamespace(process_index=host, id=n) for n, host in enumerate((1, 0, 1, 0))]
    assert [each.id for each in usable_devices(True, found)] == [1, 3, 0, 2]
    assert [each.id for each in usable_devices(False, found)] == [1, 0]
    with pytest.raises(InputError, match="different numbers of devices"):
        host_rows(found[:3])


@dataclass(frozen=True)
class Device:
    """A device that is not here, and says nothing about its memory."""

    id: int
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0

    def memory_stats(self):
        return None


def step_of(name, rows):
    config = FAMILIES.config(SHAPES[name])
    depth = config.num_hidden_layers
    hooks = HOOKS.of_layers(evenly_spaced(8, depth), "residual", depth)
    model = create_model_with_hooks(config, hooks, jax.numpy.dtype("bfloat16"))
    return StepSizes(model, weight_table(model), rows, 2048)


def devices(count, kind="TPU v5e"):
    return [Device(number, kind) for number in range(count)]


@pytest.mark.parametrize(
    "name,count,kind,rows,expected",
    [
        ("0.5B", 64, "TPU v5e", 128, {"data": 64}),  # everything fits on a chip
        ("7B", 64, "TPU v5e", 128, {"data": 32, "fsdp": 2}),  # not on chips of 16 GB
        ("72B", 64, "TPU v5e", 128, {"data": 2, "fsdp": 32}),
        ("30B-A3B", 16, "TPU v6 lite", 32, {"data": 4, "expert": 4}),  # gathering sends more
        ("0.5B", 8, "TPU v5e", 2, {"data": 2, "model": 4}),  # too few rows
        ("0.5B", 8, "cpu", 8, {"data": 8}),  # of unknown size
    ],
)
def test_the_mesh_that_auto_chooses(name, count, kind, rows, expected):
    there = devices(count, kind)
    chosen, why = step_of(name, rows).choose_mesh(there, memory_of(there[0]))
    assert chosen == expected and list(chosen) == list(expected)
    assert "GB per device" in why and "no mesh" not in why


def test_what_fits_on_no_mesh_or_divides_on_none():
    chosen, why = step_of("72B", 8).choose_mesh(devices(4), 16e9)
    assert "no mesh fits" in why and np.prod([*chosen.values()]) == 4
    assert chosen.get("data", 1) == 1
    with pytest.raises(InputError, match="the 3 rows .* on no mesh: .* among 5 devices"):
        step_of("0.5B", 3).choose_mesh(devices(5), None)


def test_memory(monkeypatch):
    """CPU devices share that of this process; others say what they have."""
    monkeypatch.setattr(devices_module, "host_memory", lambda: 16 * 10**6)
    assert memory_of(SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 5})) == 5
    assert memory_of(Device(0, "TPU v6 lite")) == 32e9 and memory_of(Device(0, "cpu")) is None
    assert 8 * memory_of(jax.local_devices()[0]) == 16e6


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
