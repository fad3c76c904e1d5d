"""Full-size models through the real TPU compiler, which needs no TPU: do they fit, what is sent.

Compiling runs nothing: the numbers here are what the compiler plans. libtpu comes with jax[tpu].
"""

import math
import os
import re
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from jax.experimental import topologies

from activation_extraction.config import parse_args
from activation_extraction.hosts import Host
from extract_activations import build_model
from qwen2_jax import QwenConfig, weight_table
from qwen2_jax_with_hooks import HookedQwen2

pytest.importorskip("libtpu")
# Nothing opens a TPU here, so the lock that keeps processes from sharing one is not needed.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

QWEN_7B = QwenConfig(152064, 3584, 18944, 28, 28, 4, 128, 1e6, 1e-6, 32768, False)
QWEN_72B = QwenConfig(152064, 8192, 29568, 80, 64, 8, 128, 1e6, 1e-6, 32768, False)
EIGHT = "--layers_to_extract 6 9 12 15 18 21 24 27"
CHIPS_8, CHIPS_16 = ({"chips_per_host_bounds": (n, 4, 1)} for n in (2, 4))
MEGACORE = {"chip_config_name": "megacore"}
TOPOLOGIES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {  # with the 2d mesh to expect
    "v5e-64, 16 hosts": ("v5e:8x8", {}, {"data": 16, "model": 4}),
    "v5e-64, 8 hosts": ("v5e:8x8", CHIPS_8, {"data": 8, "model": 8}),
    "v4-32": ("v4:2x2x4", MEGACORE, {"data": 4, "model": 4}),
    "v4-64": ("v4:2x4x4", MEGACORE, {"data": 8, "model": 4}),
    "v6e-64": ("v6e:8x8", {}, {"data": 16, "model": 4}),
    "v5e-64, 4 hosts": ("v5e:8x8", CHIPS_16, {"data": 4, "model": 16}),
}
COLLECTIVE = re.compile(
    r" ((?:ragged-)?all-to-all|all-reduce|all-gather|reduce-scatter|collective-\w+)(?:-start)?\("
)


class Compiled(NamedTuple):
    """The forward pass as a run would compile it, and the bytes of one chip."""

    model: HookedQwen2
    text: str
    memory: Any


@cache
def compile_for(qwen: QwenConfig, flags: str, topology: str, **how: Any) -> Compiled:
    """What build_model and compile_step do for these flags, with shapes in place of arrays."""
    config = parse_args(["--dtype", "bfloat16", *flags.split()])
    devices = topologies.get_topology_desc(topology, platform="tpu", **how).devices
    with patch.object(jax, "devices", return_value=devices):
        model, rows = build_model(config, qwen, Host())
    params = {}
    for path, spec in weight_table(model).items():
        split = model.layout.sharding(spec.axes, spec.shape)
        params[path] = jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16, sharding=split)
    shape = config.batch_size * rows.hosts, config.max_seq_length
    batch = [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows.incoming())] * 3
    forward = jax.jit(model.apply, out_shardings=rows.outgoing(shape[1]))
    compiled = forward.lower({"params": unflatten_dict(params)}, *batch).compile()
    return Compiled(model, compiled.as_text() or "", compiled.memory_analysis())


def layer_loop(text: str) -> list[str]:
    """The instructions of the loop over layers, those inside fusions included."""
    pending = re.findall(r' while\(.*body=(%[\w.-]+).*op_name="[^"]*/layers/while"', text)
    assert len(pending) == 1
    computations = dict(re.findall(r"^(%[\w.-]+) .*\{\n((?:  .*\n)+)\}", text, re.M))
    found: list[str] = []
    while pending:
        lines = computations.pop(pending.pop(), "")
        found += lines.splitlines()
        pending += re.findall(r"(?:calls|body|to_apply)=(%[\w.-]+)", lines)
    return found


def collectives(compiled: Compiled) -> list[tuple[str, bool]]:
    """Kind of each in the loop over layers, and whether it crosses the data axis.

    An asynchronous one is several instructions with one channel, and counts once.
    """
    mesh = compiled.model.layout.mesh
    assert mesh is not None
    found = {}
    for line in layer_loop(compiled.text):
        if kind := COLLECTIVE.search(line):
            places = np.unravel_index(groups(line), mesh.devices.shape)
            data = places[mesh.axis_names.index("data")]
            channel = line.partition("channel_id=")[2].partition(",")[0]
            found[channel] = kind[1], bool((data != data[:, :1]).any())
    return list(found.values())


def groups(line: str) -> np.ndarray:
    """Which devices talk: a group per row, from any of the ways in which XLA writes them."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", text)]

    def iota(shape: list[int], order: str | None) -> np.ndarray:
        ids = np.arange(math.prod(shape)).reshape(shape)
        return ids.transpose(numbers(order)) if order else ids

    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line):
        return np.array([numbers(group) for group in found[1].split("},{")])
    transposed = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if found := re.search(rf"replica_groups=\[([\d,]+)\]<={transposed}", line):
        return iota(numbers(found[2]), found[3]).reshape(numbers(found[1]))
    ids = rf"(?:, device_ids=\({transposed}\))?"
    found = re.search(rf"replica_groups=mesh\[(.*?)\]{ids} \{{([^:]*?)\}}", line)
    assert found, line
    axes, sizes = re.findall(r"'(\w+)'", found[1]), numbers(re.sub(r"'\w+'", "", found[1]))
    of_axes = iota(numbers(found[2]) if found[2] else sizes, found[3]).reshape(sizes)
    within = [axes.index(axis) for axis in re.findall(r"'(\w+)'", found[4])]
    last = np.moveaxis(of_axes, within, range(-len(within), 0))
    return last.reshape(-1, math.prod(sizes[axis] for axis in within))


def weights_per_chip(model: HookedQwen2) -> float:
    """Bytes, when every axis that should split a weight does."""
    size, total = model.layout.size, 0.0
    for path, spec in weight_table(model).items():
        parts = size("fsdp", "model") * (1 if "self_attn" in path else size("query"))
        parts *= size("pipeline") if path[0] == "layers" else 1
        total += 2 * math.prod(spec.shape) / parts
    return total


@pytest.mark.parametrize(
    "line,expected",
    [
        ("replica_groups={{0,2},{1,3}}, x", [[0, 2], [1, 3]]),
        ("source_target_pairs={{0,1},{1,0}}, x", [[0, 1], [1, 0]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a_0'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
    ],
)
def test_groups_are_read_in_every_notation(line, expected):
    assert groups(line).tolist() == expected


quick, *others = reversed(TOPOLOGIES)
every_topology = pytest.mark.parametrize(
    "name", [quick, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]
)


@every_topology
def test_7b_weights_are_split_over_the_chips_of_a_host(name):
    topology, how, mesh = TOPOLOGIES[name]
    model, _, memory = compile_for(QWEN_7B, EIGHT, topology, **how)
    assert model.layout.shape == mesh
    assert memory.argument_size_in_bytes == pytest.approx(weights_per_chip(model), rel=0.1)


@every_topology
def test_7b_layers_reduce_twice_and_never_between_hosts(name):
    topology, how, _ = TOPOLOGIES[name]
    compiled = compile_for(QWEN_7B, EIGHT, topology, **how)
    found = collectives(compiled)
    assert not [kind for kind, crosses in found if crosses]
    kinds = [kind for kind, _ in found]
    assert kinds.count("all-reduce") + kinds.count("reduce-scatter") == 2
    if compiled.model.layout.size("query") == 1:  # the rest: second halves of the two reductions
        assert kinds.count("all-gather") == len(kinds) - 2 <= 2


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["data,fsdp,model", "pipeline,data,model"])
def test_72b_fits_chips_of_16_gb(axes):
    shape = "16,4,4" if "fsdp" in axes else "4,16,4"
    flags = f"--mesh_shape {shape} --mesh_axes {axes} --batch_size 4 --layers_to_extract "
    compiled = compile_for(QWEN_72B, flags + "9 19 29 39 49 59 69 79", "v5e:16x16")
    memory, arguments = compiled.memory, compiled.memory.argument_size_in_bytes
    assert arguments == pytest.approx(weights_per_chip(compiled.model), rel=0.1)
    assert arguments + memory.output_size_in_bytes + memory.temp_size_in_bytes < 16e9
    assert memory.peak_memory_in_bytes < 16e9
    if "fsdp" in axes:
        assert not [kind for kind, crosses in collectives(compiled) if crosses]


def test_memory_grows_with_the_hooks_and_not_with_the_depth():
    def beyond_arguments(*layers: int) -> int:
        flags = f"--max_seq_length 1024 --layers_to_extract {' '.join(map(str, layers))}"
        memory = compile_for(QWEN_7B, flags, "v5e:2x4", **CHIPS_8).memory
        return memory.output_size_in_bytes + memory.temp_size_in_bytes

    deep = beyond_arguments(5, 23)
    a_hook = 8 * 1024 * QWEN_7B.hidden_size * 2 / 8  # rows, tokens, width, bytes each; chips
    assert abs(deep - beyond_arguments(5, 11)) < 0.1 * a_hook
    assert beyond_arguments(2, 5, 8, 11, 14, 17, 20, 23) - deep == pytest.approx(6 * a_hook, 0.1)
