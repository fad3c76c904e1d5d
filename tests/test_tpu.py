"""Full-size models through the real TPU compiler, which needs no TPU: do they fit, what is sent.

Compiling runs nothing: the numbers here are what the compiler plans. libtpu comes with jax[tpu].
Most plans are made with little effort, which takes a fifth of the time; what a chip holds then
differs by a few percent.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_line import main as extract
from conftest import rare_but
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.devices import CHIPS
from activation_extraction.model.expert_kernel import ROWS, pallas_experts
from activation_extraction.model.experts import Stacks
from activation_extraction.model.family import parse_model_config
from activation_extraction.model.host_rows import host_rows
from activation_extraction.model.kept import gather_tokens
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.released import released_config
from activation_extraction.run.topologies import CHIP_KINDS, topology_of
from benchmarks.inputs import SHAPES
from benchmarks.program_text import COLLECTIVE, device_groups
from benchmarks.tpu_plan import (
    Compiled,
    chips,
    compile_for,
    layer_hbm_bytes_if_arrays_move_once,
    times,
)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("optimized")]
rare = pytest.mark.rare

pytest.importorskip("libtpu")

EIGHT = "--layers_to_extract 6 9 12 15 18 21 24 27"
SPLASH, DELTA, EXPERTS = "%splash", "%gated_delta_rule", "experts"
PROGRAMS = {  # shape, flags, machine, kernels of a layer
    "dense": (SHAPES["7B"], f"--mesh_type 2d {EIGHT}", "v5e:4x4", [SPLASH]),
    "delta net": (
        SHAPES["9B"],
        "--mesh_shape 8 --mesh_axes data --layers_to_extract 3 15 31",
        "v6e:2x4",
        [SPLASH, DELTA],
    ),
    "pipeline": (
        SHAPES["72B"],
        "--mesh_shape 4,16,4 --mesh_axes pipeline,data,model --batch_size 4 --layers_to_extract 79",
        "v5e:16x16",
        [SPLASH],
    ),
    "delta net and experts": (
        SHAPES["35B-A3B"],
        "--mesh_shape 8,8 --mesh_axes data,expert --batch_size 4 --layers_to_extract 3 31 39",
        "v5e:8x8",
        [SPLASH, DELTA, EXPERTS],
    ),
}


def collectives(compiled: Compiled) -> list[tuple[str, bool]]:
    """Kind of each in the loop over layers, and whether it crosses the data axis.

    An asynchronous one is several instructions with one channel, and counts once. Different ones
    may have one channel too: it crosses if any of them does.
    """
    found: dict[str, tuple[str, bool]] = {}
    for instruction in compiled.program_text.layer_loop():
        if kind := COLLECTIVE.search(instruction.line):
            channel = instruction.line.partition("channel_id=")[2].partition(",")[0]
            crosses = found.get(channel, ("", False))[1] or crosses_data(compiled, instruction.line)
            found[channel] = kind[1], crosses
    return list(found.values())


def crosses_data(compiled: Compiled, line: str) -> bool:
    mesh = compiled.model.layout.mesh
    assert mesh is not None
    places = np.unravel_index(device_groups(line), mesh.devices.shape)
    data = places[mesh.axis_names.index("data")]
    return bool((data != data[:, :1]).any())


@pytest.mark.parametrize("name", rare_but(["dense"], PROGRAMS))
def test_a_program_fits_and_sends_nothing_of_a_layer_between_hosts(name):
    """Products with experts are of sorted rows, not of all rows with all experts; layers of two
    types move about as much."""
    shape, flags, topology, kernels = PROGRAMS[name]
    compiled = compile_for(parse_model_config(shape), flags, topology, effort=-1.0)
    memory, plan = compiled.memory_analysis, compiled.program_text
    given = memory.argument_size_in_bytes + memory.output_size_in_bytes
    taken = max(given + memory.temp_size_in_bytes, memory.peak_memory_in_bytes)
    assert taken < CHIPS[topology_of(topology).chip_kind.chip_name].memory_bytes
    if name == "pipeline":
        return
    found, inside = collectives(compiled), plan.layer_loop()
    assert not [kind for kind, crosses in found if crosses]
    calls = [i.name for i in inside if "tpu_custom_call" in i.line]
    of_experts = [each for each in calls if not each.startswith((SPLASH, DELTA))]
    assert any(each.startswith(SPLASH) for each in calls)
    assert len([each for each in calls if each.startswith(DELTA)]) == (DELTA in kernels)
    types = len({*compiled.model.config.layer_types})
    assert len(of_experts) >= 3 * types if EXPERTS in kernels else not of_experts
    if name == "dense":
        kinds = [kind for kind, _ in found]
        assert kinds.count("all-reduce") + kinds.count("reduce-scatter") == 2
    if name == "delta net":
        beside = [i for i in inside if "gated_delta_rule" in i.line and i.name not in calls]
        assert not [i.line for i in beside if i.opcode in ("while", "dot", "convolution")]
        (layer,) = (i for i in plan.layer() if i.branches)
        full, linear = (
            sum(cost.moved_hbm_bytes for cost in plan.costs_of_instructions(branch))
            for branch in layer.branches
        )
        assert linear <= 1.15 * full


@rare
@pytest.mark.parametrize(
    "model,topology,shape,busy",
    [("30B-A3B", "v6e:4x4", "4,4", 0.6), ("35B-A3B", "v5e:8x8", "16,4", 0.7)],
)
def test_experts_move_little_more_than_they_must_and_send_while_they_compute(
    model, topology, shape, busy
):
    """With all its effort, the compiler lets sums travel while those of other parts are added."""
    flags = f"--mesh_shape {shape} --mesh_axes data,expert --layers_to_extract 11 23"
    compiled = compile_for(parse_model_config(SHAPES[model]), flags, topology)
    costs = compiled.program_text.costs_of_instructions(compiled.program_text.body)
    moved = sum(cost.moved_hbm_bytes for cost in costs)
    assert moved < 1.5 * layer_hbm_bytes_if_arrays_move_once(compiled)
    found = times(compiled)
    assert found.overlapped_sending_seconds > found.exposed_sending_seconds > 0
    assert found.matrix_product_seconds > busy * found.step_seconds


def test_an_estimate_compiles_the_very_program_of_a_run(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny"]))
    flags = "--layers_to_extract 3 8 --dtype bfloat16 --max_seq_length 128"
    given = [*flags.split(), "--plan", "v5e-4", "--model_path", tmp_path, "--json"]
    assert extract(*given) == 0
    (found,) = json.loads(capsys.readouterr().out)["meshes"]
    memory = compile_for(parse_model_config(SHAPES["tiny"]), flags, "v5e:2x2").memory_analysis
    expected = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    expected += 2 * memory.output_size_in_bytes
    assert found["shape"] == {"data": 4} and found["compiled_gb"] == expected / 1e9


def test_the_compiler_knows_every_machine_alike():
    """Devices, hosts and kinds are those that libtpu gives; the largest machines are left out."""
    for key, kind in CHIP_KINDS.items():
        for shape in kind.tpu_shape_texts:
            topology = topology_of(f"{key}:{shape}")
            if topology.num_chips <= 64:
                real, described = topology.compiler_devices(), topology.describe_devices()
                hosts = [device.process_index for device in real]
                assert hosts == [device.process_index for device in described]
                assert {device.platform for device in real} == {"tpu"}
                assert all(kind.chip_name in device.device_kind for device in real)


@pytest.mark.parametrize("topology", ["v5e:2x4", "v5e:4x4", "v4:2x2x4", "v4:2x4x4", "tpu7x:2x2x2"])
def test_every_mesh_keeps_the_devices_of_a_host_together(topology):
    """JAX knows where the chips of each kind are, and refuses no mesh with an unexpected error."""
    devices = topology_of(topology).compiler_devices()
    count = len(devices)
    for inner in (size for size in range(1, count + 1) if count % size == 0):
        layout = build_layout(devices, {"data": count // inner, "model": inner}, kv_heads=2)
        rows = host_rows(layout).mesh.devices
        assert [*rows.flat] == [*layout.mesh.devices.flat]
        assert all(len({device.process_index for device in host}) == 1 for host in rows)


@rare
@pytest.mark.parametrize(
    "topology,name,parts",
    [("v5e:2x2", "9B", 4), ("v6e:2x2", "397B-A17B", 4)],
)
def test_the_delta_kernel_compiles_at_released_sizes(topology, name, parts):
    """It does so for several stages of a pipeline at once, too."""
    device = SingleDeviceSharding(chips(topology)[0])
    delta, rows = parse_model_config(released_config(f"Qwen3.5-{name}") or {}).delta, (8, 2048)
    heads = delta.key_heads // parts, delta.values_per_key
    shapes = [((*rows, heads[0], delta.key_size), jnp.bfloat16)] * 2
    shapes += [((*rows, *heads, delta.value_size), jnp.bfloat16)]
    shapes += [((*rows, *heads), jnp.float32)] * 2 + [(rows, jnp.int32)]
    given = [jax.ShapeDtypeStruct(*each, sharding=device) for each in shapes]
    program = jax.jit(pallas_delta_rule).lower(*given).compile()
    assert (program.as_text() or "").count("tpu_custom_call") == 1
    stages = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype, sharding=device) for x in given]
    jax.jit(jax.vmap(pallas_delta_rule)).lower(*stages).compile()


@rare
@pytest.mark.parametrize(
    "topology,name,devices",
    [
        ("v6e:2x2", "Qwen3-30B-A3B", 4),
        ("v5e:2x2", "Qwen3-235B-A22B", 8),
        ("v6e:2x2", "Qwen3.5-397B-A17B", 16),
    ],
)
def test_the_kernels_of_experts_compile_at_released_sizes(topology, name, devices):
    """They read the experts of a layer in the stack, of which nothing is copied."""
    config = parse_model_config(released_config(name) or {})
    experts, device = config.experts, SingleDeviceSharding(chips(topology)[0])
    tokens, layers = 2048, 4
    up = layers, experts.count // devices, config.hidden_size, experts.width
    down = *up[:2], *up[:1:-1]

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    weights, chosen = (
        array(tokens, experts.per_token, dtype=dtype) for dtype in (jnp.float32, jnp.int32)
    )
    stacks = Stacks(array(dtype=jnp.int32), array(*up), array(*up), array(*down))
    given = array(tokens, up[2]), weights, chosen, stacks
    program = jax.jit(pallas_experts).lower(*given).compile()
    assert (program.as_text() or "").count('custom_call_target="tpu_custom_call"') == 3
    rows = tokens * experts.per_token + (up[1] + 1) * ROWS
    most = 2 * (tokens * up[2] + rows * (up[2] + up[3])) + 64 * rows  # bytes
    assert program.memory_analysis().temp_size_in_bytes < 1.05 * most


def test_kept_tokens_are_gathered_without_copies_of_the_others():
    """There is no collective, and no temporary memory but for the numbers of the tokens."""
    mesh = Mesh(np.array(chips("v5e:2x2")), ("device",))
    shape, split = (8, 8, 2048, 3584), NamedSharding(mesh, PartitionSpec(None, None, "device"))
    values = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split)
    split = NamedSharding(mesh, PartitionSpec("device"))
    tokens = jax.ShapeDtypeStruct((4, 256), jnp.int32, sharding=split)
    compiled = gather_tokens.lower(mesh, values, tokens).compile()
    assert not COLLECTIVE.search(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1e6 < memory.output_size_in_bytes < 2e7
