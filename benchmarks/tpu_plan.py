"""What the TPU compiler plans for a layer and for a whole step, in bytes, over what is needed.

    JAX_PLATFORMS=cpu PYTHONPATH=.venv/libtpu .venv/bin/python -m benchmarks.tpu_plan \\
        --topology v5e:8x8 --flags "--mesh_shape 16,4 --mesh_axes data,fsdp"

Compiles the 7B shape as a run would, without a TPU, and reads the compiled text (plan_text.py): of
the loop over layers, every instruction's reads and writes of HBM, and what collectives send, along
which axes, and whether products run meanwhile; of the step, the sums. Nothing runs, so there are no
times. The last line is JSON. tests/test_tpu.py reads plans with the same functions.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.experimental import topologies

from activation_extraction.cli.config import parse_args
from activation_extraction.model.family import HookedModel
from activation_extraction.model.forward import build_model
from activation_extraction.model.mesh import RULES
from activation_extraction.model.model_config import QwenConfig
from activation_extraction.run.prepare import model_request
from benchmarks.plan_text import Plan
from benchmarks.shapes import SHAPES
from qwen2_jax_with_hooks import FAMILIES

# Nothing opens a TPU here, so the lock that keeps processes from sharing one is not needed.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

QWEN_7B = FAMILIES.config(SHAPES["7B"])
EIGHT = "--layers_to_extract 6 9 12 15 18 21 24 27"
WORTH_A_LINE = 1e6  # bytes


class Compiled(NamedTuple):
    """The forward pass as a run would compile it, and the bytes of one chip."""

    model: HookedModel
    plan: Plan
    memory: Any
    rows: int  # of all chips
    length: int


def chips(topology: str, **how: Any) -> list[Any]:
    """The devices of a machine that is not here: programs can be compiled for them."""
    return topologies.get_topology_desc(topology, platform="tpu", **how).devices


@cache
def compile_for(
    qwen: QwenConfig, flags: str, topology: str, effort: float = 0.0, **how: Any
) -> Compiled:
    """What build_model and compile_step do for these flags, with shapes in place of arrays.

    effort: the compiler's. 0 is that of a run; -1 takes a fifth of the time.
    """
    config = parse_args(["--dtype", "bfloat16", *flags.split()])
    devices = chips(topology, **how)
    family = FAMILIES.by_model_type(qwen.model_type)
    with patch.object(jax, "devices", return_value=devices):
        model, rows = build_model(family, model_request(config), qwen)
    params, layers_of = {}, {}
    for path, spec in family.weight_table(model).items():
        split = model.layout.sharding(spec.axes, spec.shape)
        params[path] = jax.ShapeDtypeStruct(spec.shape, model.dtype, sharding=split)
        if path[0] == "layers" and path[1] in qwen.layer_types:  # layers of several types
            layers_of[path[1]] = spec.shape[0]
    shape = config.batch_size * rows.hosts, config.max_seq_length
    batch = [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows.incoming())] * 3
    forward = jax.jit(model.apply, out_shardings=rows.outgoing(shape[1]))
    lowered = forward.lower({"params": unflatten_dict(params)}, *batch)
    options: Any = {"exec_time_optimization_effort": effort}
    compiled = lowered.compile(options)
    assert model.layout.mesh is not None
    shares = [layers_of[type_] / sum(layers_of.values()) for type_ in sorted(layers_of)]
    plan = Plan(compiled.as_text() or "", model.layout.mesh.shape, shares)
    return Compiled(model, plan, compiled.memory_analysis(), *shape)


class Step(NamedTuple):
    """What one chip does in a step that is full: from token ids to activations."""

    flops: float  # its share of the operations that the model needs
    hbm: int  # bytes of HBM that it reads and writes
    hidden: int  # bytes that it sends while products run
    exposed: int  # bytes that it sends while it computes nothing
    memory: int  # bytes of HBM that it holds at most


def step_plan(compiled: Compiled) -> Step:
    """Adds up the whole step, embedding and head included.

    The operations are `model.flops`, so what several chips compute alike counts once, and what
    padded tiles or a pipeline's bubble cost counts nothing. A hidden collective may take longer
    than the products beside it: the plan has no times. Pallas kernels move their operands and
    results once here.
    """
    model, memory = compiled.model, compiled.memory
    assert model.layout.mesh is not None
    flops = model.flops([compiled.length] * compiled.rows) / model.layout.mesh.size
    moves = compiled.plan.moves(compiled.plan.entry)
    hidden = sum(move.sent for move in moves if move.hidden)
    together = memory.argument_size_in_bytes + memory.output_size_in_bytes
    together += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return Step(
        flops,
        sum(move.hbm for move in moves),
        hidden,
        sum(move.sent for move in moves) - hidden,
        max(together, memory.peak_memory_in_bytes),
    )


def padded_flops(function: Callable[..., Any], arguments: Sequence[Any], tile: int) -> float:
    """Returns what the matrix units do for the Pallas kernels of a function, in operations.

    It compares with a chip's peak: the rows of a product go through square tiles of its other
    operand, however full these are, once for each pass. Products of float32 take six passes with
    precision HIGHEST. tile: 128, or 256 on v6e.
    """
    total = 0.0
    for call in _equations(jax.make_jaxpr(function)(*arguments)):
        if call.primitive.name == "pallas_call":
            steps = math.prod(call.params["grid_mapping"].grid)
            for each in _equations(call.params["jaxpr"]):
                if each.primitive.name == "dot_general":
                    (contracted, _), _ = each.params["dimension_numbers"]
                    left, right = (operand.aval for operand in each.invars)
                    depth = math.prod(left.shape[axis] for axis in contracted)
                    tiles = -(-depth // tile) * -(-right.size // depth // tile)
                    passes = 6 if left.dtype == jnp.float32 else 1
                    total += steps * left.size // depth * tiles * passes * 2 * tile**2
    return total


def _equations(program: Any) -> Iterator[Any]:
    """Yields the equations of a program, those inside of others included."""
    for each in getattr(program, "jaxpr", program).eqns:
        yield each
        for inner in jax.tree.leaves([*each.params.values()]):
            if each.primitive.name != "pallas_call" and hasattr(inner, "eqns"):
                yield from _equations(inner)


def ideal(compiled: Compiled) -> dict[str, int]:
    """Bytes that a dense layer cannot do without on one chip, everything in the model's dtype.

    product: the weights once, and what goes into and comes out of each product; kernel: q, k, v and
    the heads' values; collective, with fsdp: a chip's part of the weights is read, and all that it
    gathers is written; sent: that, and a reduce-scatter and an all-gather of the residual stream
    around each half of the layer, with `model`.
    """
    model, layout = compiled.model, compiled.model.layout
    size, item = model.config.sizes, model.dtype.itemsize
    parts, gathered = layout.size("model", "query"), layout.size("fsdp")
    tokens = compiled.rows * compiled.length // layout.size(*RULES["batch"])
    heads, queries, kv = (size[n] * size["H"] // parts for n in "NQK")
    mlp, hidden = size["F"] // parts, size["D"]
    widths = [(hidden, queries), *[(hidden, kv)] * 2, (heads, hidden)]
    widths += [*[(hidden, mlp)] * 2, (mlp, hidden)]
    weights = sum(a * b for a, b in widths)
    product = weights + tokens * sum(a + b for a, b in widths)
    sent = 4 * tokens * hidden * (parts - 1) // parts + weights * (gathered - 1) // gathered
    kernel = tokens * 2 * (heads + kv)
    needed = {"product": product, "kernel": kernel, "sent": sent}
    if gathered > 1:
        needed["collective"] = weights + weights // gathered
    return {kind: item * count for kind, count in needed.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:8x8")
    parser.add_argument("--effort", type=float, default=0.0, help="the compiler's; -1 is quick")
    parser.add_argument("--flags", default="", help="of the tool, for example of its mesh")
    args = parser.parse_args()
    compiled = compile_for(QWEN_7B, f"{EIGHT} {args.flags}", args.topology, args.effort)
    moves = sorted(compiled.plan.moves(compiled.plan.body), key=lambda move: -move.hbm)
    planned: dict[str, int] = {}
    print(f"mesh {compiled.model.layout.shape}; a layer, one chip: MB of HBM, MB sent")
    for move in moves:
        planned[move.kind] = planned.get(move.kind, 0) + move.hbm
        planned["sent"] = planned.get("sent", 0) + move.sent
        if move.hbm + move.sent > WORTH_A_LINE:
            beside = f" along {','.join(move.axes)}, {'hidden' if move.hidden else 'exposed'}"
            sent = f"{move.sent / 1e6:8.1f}" + (beside if move.sent else "")
            print(f"{move.hbm / 1e6:8.1f} {sent}  {move.kind:10}  {move.source}")
    needed = ideal(compiled)
    over = {kind: planned[kind] - needed.get(kind, 0) for kind in planned}
    ratio = _hbm(planned) / _hbm(needed)
    step = step_plan(compiled)._asdict()
    print(
        json.dumps(
            {"planned": planned, "ideal": needed, "over": over, "ratio": ratio, "step": step}
        )
    )


def _hbm(of_kinds: dict[str, int]) -> int:
    return sum(count for kind, count in of_kinds.items() if kind != "sent")


if __name__ == "__main__":
    main()
