"""Full-size models through the real TPU compiler, which needs no TPU: do they fit, what is sent.

Compiling runs nothing: the numbers here are what the compiler plans. libtpu comes with jax[tpu].
Most plans are made with little effort, which takes a fifth of the time. What a chip holds then
differs by a few percent, and weights are copied less often; so some plans of each kind are made as
in a run.
"""

import json
import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from test_delta_kernel import shapes_of as delta_shapes
from test_families import released

from activation_extraction.cli.config import parse_args
from activation_extraction.model.automatic_mesh import StepSizes
from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.family import HookedModel
from activation_extraction.model.forward import build_model
from activation_extraction.model.kept import take
from activation_extraction.model.mesh import RULES
from activation_extraction.run.estimate import compile_elsewhere, planned_run
from benchmarks.program_text import ARRAY, COLLECTIVE, groups
from benchmarks.shapes import SHAPES
from benchmarks.tpu_plan import Compiled, chips, compile_for, main, times
from qwen2_jax_with_hooks import FAMILIES

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("optimized")]
rare = pytest.mark.rare

pytest.importorskip("libtpu")

QWEN2 = FAMILIES.by_model_type("qwen2")
QWEN_7B = FAMILIES.config(SHAPES["7B"])
EIGHT = "--layers_to_extract 6 9 12 15 18 21 24 27"
QWEN_HALF_B = FAMILIES.config(SHAPES["0.5B"])
QWEN_72B = FAMILIES.config(SHAPES["72B"])
QWEN3_8B = SHAPES["7B"] | dict(
    model_type="qwen3",
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
QWEN3_30B = FAMILIES.config(SHAPES["30B-A3B"])
QWEN3_5_35B = FAMILIES.config(released("Qwen3.5-35B-A3B"))
DELTA_KERNEL = "%gated_delta_rule"
TOPOLOGIES: dict[str, tuple[str, int, dict[str, int]]] = {  # with the 2d mesh to expect
    "v5e-64, 16 hosts": ("v5e:8x8", 4, {"data": 16, "model": 4}),
    "v5e-64, 8 hosts": ("v5e:8x8", 8, {"data": 8, "model": 8}),
    "v4-32": ("v4:2x2x4", 4, {"data": 4, "model": 4}),
    "v4-64": ("v4:2x4x4", 4, {"data": 8, "model": 4}),
    "v6e-64": ("v6e:8x8", 4, {"data": 16, "model": 4}),
    "v5e-64, 4 hosts": ("v5e:8x8", 16, {"data": 4, "model": 16}),
}
SPLIT_2D = "--mesh_type 2d"
FLAGS_72B = (
    "--mesh_shape {} --mesh_axes {} --batch_size 4 --layers_to_extract 9 19 29 39 49 59 69 79"
)
FSDP_72B = FLAGS_72B.format("16,4,4", "data,fsdp,model")
PIPELINE_72B = FLAGS_72B.format("4,16,4", "pipeline,data,model")

LITTLE, USUAL = -1.0, 0.0
compile_quickly = partial(compile_for, effort=LITTLE)


def collectives(compiled: Compiled) -> list[tuple[str, bool]]:
    """Kind of each in the loop over layers, and whether it crosses the data axis.

    An asynchronous one is several instructions with one channel, and counts once. Different ones
    may have one channel too: it crosses if any of them does.
    """
    mesh = compiled.model.layout.mesh
    assert mesh is not None
    found: dict[str, tuple[str, bool]] = {}
    for instruction in compiled.plan.layer_loop():
        if kind := COLLECTIVE.search(instruction.line):
            places = np.unravel_index(groups(instruction.line), mesh.devices.shape)
            data = places[mesh.axis_names.index("data")]
            channel = instruction.line.partition("channel_id=")[2].partition(",")[0]
            crosses = found.get(channel, ("", False))[1] or bool((data != data[:, :1]).any())
            found[channel] = kind[1], crosses
    return list(found.values())


def copied_weights(compiled: Compiled) -> int:
    """Bytes of the weights that are copied before the loop over layers, into another layout."""
    (entry,) = (
        found
        for found in compiled.plan.computations.values()
        if any(i.opcode == "while" and compiled.plan.body in i.line for i in found)
    )
    copies = [i for i in entry if i.opcode == "copy" and "op_name" not in i.line]
    return sum(math.prod(shape) * 2 for i in copies for shape in shapes(i.result))


def one_layer(model: HookedModel) -> set[tuple[int, ...]]:
    """Shapes of a layer's weight matrices as a chip's products take them; sorted, without ones.

    With fsdp that is after gathering; what is sent for it may be cut out of the stack before.
    """
    found, mesh = set(), model.layout.mesh
    assert mesh is not None
    for path, spec in FAMILIES.by_model_type(model.config.model_type).weight_table(model).items():
        if path[0] == "layers" and len(spec.shape) > 2 and path[-1] == "weight":
            split = NamedSharding(mesh, model.layout.spec(spec.axes, spec.shape, without="fsdp"))
            local = split.shard_shape(spec.shape)[1:]
            found.add(tuple(sorted(size for size in local if size > 1)))
    return found


def weights_per_chip(model: HookedModel) -> float:
    """Bytes, when every axis that should split a weight does."""
    size, total = model.layout.size, 0.0
    for path, spec in FAMILIES.by_model_type(model.config.model_type).weight_table(model).items():
        parts = size("fsdp", "model") * (1 if "self_attn" in path else size("query"))
        parts *= size("pipeline") if path[0] == "layers" else 1
        total += 2 * math.prod(spec.shape) / parts
    return total


def most_memory(compiled: Compiled) -> float:
    """Bytes of a chip: of all arrays together, or at the peak."""
    memory = compiled.memory
    given = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return max(given + memory.temp_size_in_bytes, memory.peak_memory_in_bytes)


def over_ideal(compiled: Compiled) -> float:
    """Returns the bytes of HBM that a dense layer moves, over what it cannot do without.

    These are, on a chip, the weights once, and what goes into and comes out of each product; q, k,
    v and the heads' values for the kernel; with fsdp, its shard of the weights is read, but for
    those of keys and values, and all that it gathers is written.
    """
    model, layout = compiled.model, compiled.model.layout
    size, parts, gathered = model.config.sizes, layout.size("model", "query"), layout.size("fsdp")
    tokens = compiled.rows * compiled.length // layout.size(*RULES["batch"])
    heads, queries, kv = (size[n] * size["H"] // parts for n in "NQK")
    mlp, hidden = size["F"] // parts, size["D"]
    widths = [(hidden, queries), *[(hidden, kv)] * 2, (heads, hidden)]
    widths += [*[(hidden, mlp)] * 2, (mlp, hidden)]
    weights, split = sum(a * b for a, b in widths), sum(a * b for a, b in widths if b != kv)
    needed = weights + tokens * (sum(a + b for a, b in widths) + 2 * (heads + kv))
    if gathered > 1:
        needed += split + split // gathered
    moved = sum(move.hbm for move in compiled.plan.moves(compiled.plan.body))
    return moved / (model.dtype.itemsize * needed)


quick, *others = reversed(TOPOLOGIES)


@pytest.mark.parametrize("name", [quick, *(pytest.param(name, marks=rare) for name in others)])
def test_7b_is_split_within_hosts_and_its_layers_reduce_twice_there(name):
    """Weights over the chips of a host; nothing of a layer is sent between hosts."""
    topology, per_host, mesh = TOPOLOGIES[name]
    compiled = compile_quickly(QWEN_7B, f"{SPLIT_2D} {EIGHT}", topology, chips_per_host=per_host)
    model, memory = compiled.model, compiled.memory
    assert model.layout.shape == mesh
    assert memory.argument_size_in_bytes == pytest.approx(weights_per_chip(model), rel=0.1)
    found = collectives(compiled)
    assert not [kind for kind, crosses in found if crosses]
    kinds = [kind for kind, _ in found]
    assert kinds.count("all-reduce") + kinds.count("reduce-scatter") == 2
    if model.layout.size("query") == 1:  # the rest: second halves of the two reductions
        assert kinds.count("all-gather") == len(kinds) - 2 <= 2


@rare
@pytest.mark.parametrize(
    "shape,layers,topology,memory_of_a_chip,effort",
    [
        pytest.param(QWEN3_8B, "3 7 12 16 21 26 30 35", "v5e:4x4", 16e9, USUAL, id="8B"),
        pytest.param(SHAPES["32B"], "7 15 23 31 39 47 55 63", "v6e:4x4", 32e9, LITTLE, id="32B"),
        pytest.param(released("Qwen3.5-27B"), "7 31 63", "v6e:4x4", 32e9, LITTLE, id="3.5-27B"),
    ],
)
def test_dense_models_fit_sixteen_chips(shape, layers, topology, memory_of_a_chip, effort):
    """Nothing is sent between hosts in the loop over layers, and few weights are copied for it."""
    flags = f"{SPLIT_2D} --layers_to_extract {layers}"
    compiled = compile_for(FAMILIES.config(shape), flags, topology, effort)
    model, arguments = compiled.model, compiled.memory.argument_size_in_bytes
    assert model.layout.shape == {"data": 4, "model": 4} and model.config.qk_norm
    assert arguments == pytest.approx(weights_per_chip(model), rel=0.1)
    assert most_memory(compiled) < memory_of_a_chip
    assert copied_weights(compiled) < 0.02 * arguments
    assert not [kind for kind, crosses in collectives(compiled) if crosses]


FSDP_4 = "--mesh_shape {},4 --mesh_axes data,fsdp"


def test_fsdp_exchanges_vectors_of_tokens_and_moves_little_else_than_its_products():
    compiled = compile_quickly(QWEN_7B, f"{EIGHT} {FSDP_4.format(16)}", "v5e:8x8")
    moves = compiled.plan.moves(compiled.plan.entry)
    looking_up = [move for move in moves if "embed_tokens" in move.source]
    tokens = compiled.rows * compiled.length // 64
    assert 0 < sum(move.sent for move in looking_up) < 2 * tokens * QWEN_7B.hidden_size
    table = 2 * QWEN_7B.vocab_size * QWEN_7B.hidden_size
    assert sum(move.hbm for move in looking_up) < table / 4
    assert over_ideal(compiled) < 1.4


MACHINES = "v5litepod-64", "v5e-64", "v4-32", "v4-64", "v5p-32", "v6e-64", "tpu7x:2x2x2"


@pytest.mark.parametrize("name", ["v5e-4", *(pytest.param(name, marks=rare) for name in MACHINES)])
def test_an_estimate_compiles_the_very_program_in_a_process_of_its_own(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["0.1B"]))
    flags = "--layers_to_extract 3 12 --mesh_type 1d --dtype bfloat16"
    run = planned_run(
        parse_args([*flags.split(), "--plan", name, "--model_path", str(tmp_path)]), FAMILIES
    )
    found = compile_elsewhere(run, run.request)
    assert isinstance(found, float), found
    request = replace(run.request, devices=run.topology.compilable())
    small = FAMILIES.config(SHAPES["0.1B"])
    weights = weights_per_chip(build_model(QWEN2, request, small)[0])
    assert weights < found < 12 * weights + 1e9
    if name == "v5e-4":
        memory = compile_for(small, flags, run.topology.name).memory
        given = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        assert found == given + 2 * memory.output_size_in_bytes
        said = compile_elsewhere(run, replace(run.request, batch_size=2**17))
        assert isinstance(said, str) and "RESOURCE_EXHAUSTED" in said


@pytest.mark.parametrize("flags", [FSDP_4.format(16), SPLIT_2D])
def test_what_is_sent_takes_as_long_as_formulas_say(flags):
    """Devices send weights along fsdp, or the residual stream before and after they add it up."""
    compiled = compile_for(QWEN_7B, f"{EIGHT} {flags}", "v5e:8x8")
    model, devices = compiled.model, [*compiled.program.rows.mesh.devices.flat]
    sizes = StepSizes(model, QWEN2.weight_table(model), compiled.rows, compiled.length)
    expected, found = sizes.estimate(model.layout, devices), times(compiled)
    assert found.hidden == pytest.approx(expected.gathers, rel=0.05)
    assert found.exposed == pytest.approx(expected.exchanges, rel=0.05, abs=1e-3)
    assert found.products == pytest.approx(expected.products, rel=0.01)
    # The formula leaves out what exchanges read and write, and the little that is not a product.
    assert 0.9 * expected.hbm < found.hbm < 3 * expected.hbm


def test_the_instrument_prints_the_moves_of_a_layer_and_the_times_of_a_step(
    monkeypatch, tmp_path, capsys
):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SHAPES["0.1B"]))
    flags = "--layers_to_extract 3 12 --mesh_shape 2,2 --mesh_axes data,fsdp"
    given = ["--model", str(path), "--topology", "v5e:2x2", "--effort", "-1", "--flags", flags]
    monkeypatch.setattr("sys.argv", ["tpu_plan", *given])
    main()
    first, *moves, last = capsys.readouterr().out.splitlines()
    assert first.startswith("mesh data 2 x fsdp 2; a layer, one chip: MB of HBM, MB sent")
    assert any(" along fsdp, " in line for line in moves)
    found = json.loads(last)
    names = "products_ms", "hbm_ms", "hidden_ms", "exposed_ms", "busy", "memory_gb"
    assert found.keys() == {*names, "kernel_ms"} and found["kernel_ms"] == 0
    assert found["products_ms"] > 0 < found["hbm_ms"] and 0 < found["busy"] <= 1
    assert found["hidden_ms"] + found["exposed_ms"] > 0 < found["memory_gb"]


@rare
@pytest.mark.parametrize(
    "config,topology,data",
    [
        pytest.param(QWEN_7B, "v5e:8x8", 16, id="v5e"),
        pytest.param(QWEN_7B, "v6e:2x4", 2, id="v6e"),
        pytest.param(QWEN_7B, "v5p:2x2x4", 4, id="v5p"),
        pytest.param(QWEN_7B, "v4:2x2x4", 4, id="v4"),
        pytest.param(
            FAMILIES.config(released("Qwen3.5-9B")), "v6e:2x4", 2, id="layers of two types"
        ),
    ],
)
def test_fsdp_gathers_every_weight_beside_products(config, topology, data):
    """Each weight is gathered while the product before its own runs."""
    last = config.num_hidden_layers - 1
    flags = f"--layers_to_extract {last // 2} {last} {FSDP_4.format(data)}"
    compiled = compile_for(config, flags, topology, USUAL)
    sending = [move for move in compiled.plan.moves(compiled.plan.body) if move.sent]
    assert len(sending) >= 5
    for move in sending:
        assert move.hidden and move.axes == ("fsdp",), move
    if config == QWEN_7B:
        assert over_ideal(compiled) < 1.4


EXPERTS_8 = "v5e:8x8", "8,8 --mesh_axes data,expert --batch_size 4", 16e9
EXPERT_4, MODEL_4 = (f"4,4 --mesh_axes data,{axis}" for axis in ("expert", "model"))
PARAMETERS = {QWEN3_30B: 30.5e9, QWEN3_5_35B: 35e9}


@rare
@pytest.mark.parametrize(
    "config,topology,axes,most,effort",
    [
        pytest.param(QWEN3_30B, *EXPERTS_8, USUAL, id="30B"),
        pytest.param(QWEN3_30B, "v6e:4x4", EXPERT_4, 32e9, LITTLE, id="expert"),
        pytest.param(QWEN3_30B, "v6e:4x4", MODEL_4, 32e9, LITTLE, id="model"),
        pytest.param(QWEN3_5_35B, *EXPERTS_8, USUAL, id="3.5-35B"),
    ],
)
def test_models_with_experts_fit_and_tokens_stay_with_them(config, topology, axes, most, effort):
    """Products are of sorted rows, not of all rows with all experts; nothing crosses `data`, and
    few weights are copied for the loop."""
    layers = f"3 31 {config.num_hidden_layers - 1}"
    flags = f"--mesh_shape {axes} --layers_to_extract {layers}"
    compiled = compile_for(config, flags, topology, effort)
    arguments = compiled.memory.argument_size_in_bytes
    assert most_memory(compiled) < most
    found = collectives(compiled)
    assert found and not [kind for kind, crosses in found if crosses]
    kernels = [i.name for i in compiled.plan.layer_loop() if "tpu_custom_call" in i.line]
    others = [name for name in kernels if not name.startswith(("%splash", DELTA_KERNEL))]
    assert len(others) >= 3 * len({*config.layer_types})
    weights = config.experts.count, config.hidden_size, config.experts.width
    local = compiled.model.layout.sharding(("experts", "embed", "mlp"), weights)
    split = math.prod(weights) / math.prod(local.shard_shape(weights))
    assert arguments < 2 * (PARAMETERS[config] / split + 3e9)
    assert copied_weights(compiled) < 0.02 * arguments


@pytest.mark.parametrize(
    "topology,name,dtype,parts",
    [
        ("v5e:2x2", "9B", "bfloat16", 4),
        ("v6e:2x2", "35B-A3B", "float32", 1),
        pytest.param("v5e:2x2", "35B-A3B", "bfloat16", 1, marks=rare),
        pytest.param("v5e:2x2", "27B", "float32", 8, marks=rare),
        pytest.param("v6e:2x2", "9B", "bfloat16", 1, marks=rare),
        pytest.param("v6e:2x2", "397B-A17B", "bfloat16", 4, marks=rare),
    ],
)
def test_the_delta_kernel_compiles_at_released_sizes(topology, name, dtype, parts):
    """It does so for several stages of a pipeline at once, too."""
    device = SingleDeviceSharding(chips(topology)[0])
    given = delta_shapes(name, jnp.dtype(dtype), parts, sharding=device)
    program = jax.jit(pallas_delta_rule).lower(*given).compile()
    assert (program.as_text() or "").count("tpu_custom_call") == 1
    stages = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype, sharding=device) for x in given]
    jax.jit(jax.vmap(pallas_delta_rule)).lower(*stages).compile()


def assert_one_delta_kernel(instructions):
    """The whole rule is one kernel: no product and no loop over chunks is left beside it."""
    (kernel,) = (i for i in instructions if i.name.startswith(DELTA_KERNEL))
    assert "tpu_custom_call" in kernel.line
    beside = [i for i in instructions if "gated_delta_rule" in i.line and i is not kernel]
    assert not [i.line for i in beside if i.opcode in ("while", "dot", "convolution")]


@pytest.mark.parametrize(
    "name,topology,flags",
    [
        ("9B", "v6e:2x4", "--mesh_shape 8 --mesh_axes data"),
        pytest.param("9B", "v5e:2x4", "--mesh_shape 2,4 --mesh_axes data,model", marks=rare),
        pytest.param("9B", "v5e:4x4", "--mesh_shape 4,4 --mesh_axes data,fsdp", marks=rare),
        pytest.param("35B-A3B", "v6e:4x4", f"--mesh_shape {EXPERT_4}", marks=rare),
    ],
)
def test_a_layer_with_a_delta_net_moves_little_more_than_one_with_attention(name, topology, flags):
    flags = f"{flags} --layers_to_extract 3 15 31"
    compiled = compile_quickly(FAMILIES.config(released(f"Qwen3.5-{name}")), flags, topology)
    assert_one_delta_kernel(compiled.plan.layer_loop())
    (layer,) = (i for i in compiled.plan.layer() if i.branches)
    hbm = [sum(m.hbm for m in compiled.plan.moves(branch)) for branch in layer.branches]
    full, linear = hbm  # in the order of the names of the types
    assert linear <= 1.15 * full


@rare
@pytest.mark.parametrize("flags", [FSDP_72B, PIPELINE_72B], ids=["fsdp", "pipeline"])
def test_72b_fits_chips_of_16_gb(flags):
    compiled = compile_quickly(QWEN_72B, flags, "v5e:16x16")
    arguments = compiled.memory.argument_size_in_bytes
    assert arguments == pytest.approx(weights_per_chip(compiled.model), rel=0.1)
    assert most_memory(compiled) < 16e9
    if flags == FSDP_72B:
        assert not [kind for kind, crosses in collectives(compiled) if crosses]


@pytest.mark.parametrize(
    "qwen,flags,topology,per_host",
    [
        pytest.param(QWEN_7B, f"{SPLIT_2D} {EIGHT}", "v5e:8x8", 4, marks=rare),
        (QWEN_7B, f"{SPLIT_2D} {EIGHT}", "v5e:2x4", 8),
        pytest.param(QWEN_72B, FSDP_72B, "v5e:16x16", 4, marks=rare),
    ],
)
def test_layers_read_their_weights_in_place_and_never_hold_all_scores(
    qwen, flags, topology, per_host
):
    """The slice of a layer's weight out of the stack is part of the product that reads it."""
    compiled = compile_for(qwen, flags, topology, chips_per_host=per_host)
    weights, size = one_layer(compiled.model), compiled.model.layout.size
    rows = compiled.rows // size("data", "fsdp")
    scores = rows * qwen.num_attention_heads // size("model") * compiled.length**2
    inside = compiled.plan.layer_loop()
    assert len(weights) >= 3 and any("splash" in instruction.name for instruction in inside)
    if qwen == QWEN_7B:
        assert over_ideal(compiled) < 1.4
    for instruction in inside:
        if instruction.opcode not in ("parameter", "tuple", "get-tuple-element", "bitcast"):
            for shape in shapes(instruction.result):
                assert math.prod(shape) < scores, instruction.line
    for instruction in compiled.plan.layer():
        if compiled.plan.kind(instruction) not in ("product", "collective"):
            for shape in shapes(instruction.result):
                alike = tuple(sorted(size for size in shape if size > 1))
                assert alike not in weights, instruction.line


def shapes(result: str) -> list[list[int]]:
    """Of the arrays in the result of an instruction."""
    return [[int(n) for n in found[2].split(",") if n] for found in ARRAY.finditer(result)]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=rare), "bfloat16"])
def test_the_kernel_takes_narrow_heads_and_rows_of_any_length(dtype):
    flags = f"--dtype {dtype} --max_seq_length 1000 --layers_to_extract 10 23 {SPLIT_2D}"
    compiled = compile_quickly(QWEN_HALF_B, flags, "v5e:2x4", chips_per_host=8)
    assert compiled.model.layout.size("query") == 2
    assert any("splash" in instruction.name for instruction in compiled.plan.layer_loop())


@pytest.mark.slow
def test_layers_with_and_without_a_window_are_in_one_loop():
    """Both kernels are compiled, and neither holds all scores."""
    windows = dict(use_sliding_window=True, sliding_window=4096, max_window_layers=12)
    config = FAMILIES.config(SHAPES["0.5B"] | windows)
    compiled = compile_quickly(
        config,
        f"{SPLIT_2D} --max_seq_length 8192 --batch_size 1 --layers_to_extract 10 23",
        "v5e:2x2",
    )
    found = {line for line in compiled.plan.text.splitlines() if "custom_call_target" in line}
    kernels = {line for line in found if "splash" in line}
    assert len(kernels) == 2 * compiled.model.layout.size("query")
    heads = config.num_attention_heads // compiled.model.layout.size("model")
    assert compiled.memory.temp_size_in_bytes < 2 * heads * 8192**2


@rare
def test_7b_with_a_hook_of_each_kind_keeps_apart_what_hosts_compute():
    """Fits, and what devices exchange they exchange within their host, after the loop too."""
    compiled = compile_quickly(
        QWEN_7B, f"{SPLIT_2D} --hook_names hook_embed blocks.20.* ln_final.*", "v5e:8x8"
    )
    memory, mesh = compiled.memory, compiled.model.layout.mesh
    assert len(compiled.model.hooks) == 21 and mesh is not None
    found = [line for line in compiled.plan.text.splitlines() if COLLECTIVE.search(line)]
    found = [line for line in found if " = s32[3]" not in line]  # the votes of all hosts
    assert len(found) >= 10
    for line in found:
        data = np.unravel_index(groups(line), mesh.devices.shape)[mesh.axis_names.index("data")]
        assert (data == data[:, :1]).all(), line
    sizes = QWEN_7B.sizes
    widths = sum(hook.kind.width(sizes) for hook in compiled.model.hooks)
    captured = 2 * compiled.rows * compiled.length * widths / mesh.size
    assert memory.output_size_in_bytes == pytest.approx(captured, rel=0.01)
    assert memory.argument_size_in_bytes == pytest.approx(weights_per_chip(compiled.model), rel=0.1)
    assert memory.peak_memory_in_bytes < 16e9


def test_kept_tokens_are_gathered_without_copies_of_the_others():
    """No collective, and no temporary memory but for the numbers of the tokens."""
    mesh = Mesh(np.array(chips("v5e:2x2")), ("device",))
    shape, split = (8, 8, 2048, 3584), NamedSharding(mesh, PartitionSpec(None, None, "device"))
    values = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split)
    split = NamedSharding(mesh, PartitionSpec("device"))
    tokens = jax.ShapeDtypeStruct((4, 256), jnp.int32, sharding=split)
    compiled = take.lower(mesh, values, tokens).compile()
    assert not COLLECTIVE.search(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1e6 < memory.output_size_in_bytes < 2e7
