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
from activation_extraction.model.devices import memory_of, usable_devices
from activation_extraction.model.family import parse_model_config
from activation_extraction.model.hooks import HOOKS, WidthAndDtype
from activation_extraction.model.host_rows import count_hosts, host_rows
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.mesh_choice import (
    MeshChoice,
    cheapest_mesh,
    check_divisibility,
    choose_mesh,
)
from activation_extraction.model.model_setup import build_model
from activation_extraction.model.step_cost import CostModel
from activation_extraction.run.prepare import step_request
from benchmarks.inputs import SHAPES, evenly_spaced
from qwen2_jax import weight_table
from qwen2_jax_with_hooks import create_model_with_hooks


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
    chosen, why = choose_mesh(kind, shape, axes, devices, hosts, automatic=MeshChoice)
    assert chosen == expected and list(chosen) == list(expected) and not why


def test_3d_on_few_devices_falls_back_and_a_shape_that_does_not_fit_is_refused():
    chosen, why = choose_mesh("3d", None, None, 8, 1, MeshChoice)
    assert chosen == {"data": 2, "model": 4}
    assert "64 or more" in why and "8 devices become a 2d" in why
    with pytest.raises(InputError, match="is 12 devices, there are 8.*2,4; 4,2; 1,8; 8,1"):
        choose_mesh(None, (3, 4), None, 8, 1, MeshChoice)


MOE = parse_model_config(SHARED | dict(num_hidden_layers=4, decoder_sparse_step=2)).sizes
DENSE = parse_model_config({"model_type": "qwen3", "intermediate_size": 128}).sizes


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
    layout = build_layout(usable_devices(all_of_host=True), shape, kv_heads=2)
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
        count_hosts(found[:3])


@dataclass(frozen=True)
class Chip:
    """A chip of a TPU slice that is not here."""

    id: int
    process_index: int
    coords: tuple[int, ...]
    device_kind: str
    slice_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"


def tpu_slice(kind, sides, host_sides, slice_index=0):
    """Returns the chips of a slice, host by host; each host has a block of it."""
    places = [place[::-1] for place in np.ndindex(sides[::-1])]  # x varies fastest
    blocks = [tuple(np.floor_divide(place, host_sides)[::-1]) for place in places]
    hosts = sorted(set(blocks))
    first = slice_index * len(hosts)
    order = sorted(range(len(places)), key=lambda k: (hosts.index(blocks[k]), k))
    return [
        Chip(
            first * len(places) + number,
            first + hosts.index(blocks[k]),
            places[k],
            kind,
            slice_index,
        )
        for number, k in enumerate(order)
    ]


def coordinates(layout):
    """Returns the coordinates of a layout's devices, as an array with the axes of the mesh."""
    chips = layout.mesh.devices
    return np.array([chip.coords for chip in chips.flat]).reshape(*chips.shape, 3)


def test_jax_arranges_the_chips_of_a_slice():
    """On v5e hosts with four chips these form a ring; on v4, the hosts follow one another."""
    layout = build_layout(tpu_slice("TPU v5 lite", (2, 2, 1), (2, 2, 1)), {"data": 4}, 1)
    steps = np.diff(coordinates(layout), axis=0, append=coordinates(layout)[:1])
    assert (np.abs(steps).sum(axis=-1) == 1).all()
    chips = tpu_slice("TPU v4", (2, 2, 4), (2, 2, 1))
    layout = build_layout(chips[8:] + chips[:8], {"data": 4, "fsdp": 4}, 1)
    places = coordinates(layout)
    assert (places[..., 2] == np.arange(4)[:, None]).all()  # though the devices came otherwise


@pytest.mark.parametrize(
    "devices,shape",
    [
        # No axis of the slice has four chips: a host's square is better than half of an axis.
        (tpu_slice("TPU v5 lite", (8, 8, 1), (2, 2, 1)), {"data": 16, "fsdp": 4}),
        # Whole axes of the slice cross several hosts, whose rows would mix.
        (tpu_slice("TPU v5 lite", (4, 4, 1), (2, 2, 1)), {"data": 4, "fsdp": 4}),
        (tpu_slice("TPU v4", (2, 2, 4), (2, 2, 1)), {"data": 2, "fsdp": 8}),
        # One device of each host leaves holes.
        (tpu_slice("TPU v4", (4, 4, 4), (2, 2, 1))[::4], {"data": 16}),
        # Chips of two slices have the same coordinates.
        (
            [chip for k in range(2) for chip in tpu_slice("TPU v5e", (2, 2, 1), (2, 2, 1), k)],
            {"data": 2, "fsdp": 4},
        ),
        (jax.devices(), {"data": 4, "fsdp": 2}),
    ],
)
def test_devices_stay_in_their_order_where_jax_has_no_better_one(devices, shape):
    layout = build_layout(devices, shape, 1)
    assert [device.id for device in layout.mesh.devices.flat] == [x.id for x in devices]


@pytest.mark.parametrize("shape", [{"data": 8}, {"data": 2, "fsdp": 4}, {"data": 4, "fsdp": 2}])
@pytest.mark.parametrize("host_sides", [(2, 4, 1), (2, 2, 1)])
def test_the_rows_of_a_host_lie_on_its_own_devices(host_sides, shape):
    chips = tpu_slice("TPU v5 lite", (2, 4, 1), host_sides)
    layout = build_layout(chips, shape, 1)
    assert [*layout.mesh.devices.flat] != chips  # JAX has arranged them
    rows = host_rows(layout).mesh
    assert [*rows.devices.flat] == [*layout.mesh.devices.flat]
    for of_host in rows.devices:
        assert len({chip.process_index for chip in of_host}) == 1


def test_a_run_has_the_same_numbers_in_any_order_of_devices(monkeypatch):
    """Activations come back row by row even if the mesh has the devices in another order."""
    layout = build_layout(jax.devices()[::-1], {"data": 4, "fsdp": 2}, 1)
    rows = host_rows(layout)
    fed = np.arange(16, dtype=np.int32).reshape(8, 2)
    np.testing.assert_array_equal(rows.feed(fed), fed)
    width_and_dtype = WidthAndDtype(3, "float32")
    values = np.random.default_rng(0).standard_normal((2, 8, 4, 3), np.float32)
    array = jax.device_put(values, rows.outgoing(4, layout))
    np.testing.assert_array_equal(rows.receive({width_and_dtype: array})[width_and_dtype], values)


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
    config = parse_model_config(SHAPES[name])
    depth = config.num_hidden_layers
    hooks = HOOKS.of_layers(evenly_spaced(8, depth), "residual", depth)
    model = create_model_with_hooks(config, hooks, jax.numpy.dtype("bfloat16"))
    return CostModel(model, weight_table(model), rows, 2048)


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
    chosen, why = cheapest_mesh(step_of(name, rows), there, memory_of(there[0]))
    assert chosen == expected and list(chosen) == list(expected)
    assert "GB per device" in why and "no mesh" not in why


def test_what_fits_on_no_mesh_or_divides_on_none():
    chosen, why = cheapest_mesh(step_of("72B", 8), devices(4), 16e9)
    assert "no mesh fits" in why and np.prod([*chosen.values()]) == 4
    assert chosen.get("data", 1) == 1
    with pytest.raises(InputError, match="the 3 rows .* on no mesh: .* among 5 devices"):
        cheapest_mesh(step_of("0.5B", 3), devices(5), None)


def test_memory(monkeypatch):
    """CPU devices share that of this process; others say what they have."""
    monkeypatch.setattr(devices_module, "host_memory", lambda: 16 * 10**6)
    assert memory_of(SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 5})) == 5
    assert memory_of(Device(0, "TPU v6 lite")) == 32e9 and memory_of(Device(0, "cpu")) is None
    assert 8 * memory_of(jax.local_devices()[0]) == 16e6


def test_the_least_memory_of_all_hosts_decides():
    """A host cannot ask the devices of another one."""
    config = parse_model_config(SHAPES["0.5B"])
    request = step_request(parse_args(["--batch_size", "8", "--layers_to_extract", "3"]))
    large, small = (
        build_model(dataclasses.replace(request, device_memory_bytes=memory), config)[0].layout
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
