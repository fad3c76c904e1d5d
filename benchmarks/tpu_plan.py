"""What the TPU compiler plans for a layer and for a whole step, in bytes, over what is needed.

    JAX_PLATFORMS=cpu PYTHONPATH=.venv/libtpu .venv/bin/python -m benchmarks.tpu_plan \\
        --topology v5e:8x8 --flags "--mesh_shape 16,4 --mesh_axes data,fsdp"

It compiles the 7B shape as a run would, without a TPU, and reads the text (program_text.py): of
the loop over layers, every instruction's reads and writes of HBM, and what collectives send, along
which axes, and whether products run meanwhile; of the step, the sums. Nothing runs, so there are no
times. The last line is JSON. tests/test_tpu.py reads plans with the same functions.

With --table, it compares the meshes of `2d` and `auto` for models and machines, 8 rows of 2,048
tokens per host and eight hooks. Below, `2d` stands with the program from before `auto` was the
default, and `auto` with the one from after. The milliseconds are the bytes and operations of a step
over a chip's peaks: of products; of HBM; of what is sent while nothing else runs, or (in
parentheses) products do. `busy` is what these leave to the products at best. The kernel of delta
nets (9B and 35B-A3B) adds products in float32, of 18, 14 and 8 ms, or 22, 17 and 10.

                  products  2d: HBM  sent   busy   GB  auto                HBM  sent     busy   GB
 0.5B    v5e:8x8     17          5     30   36 %  0.4  data 64               6  0       100 %  1.2
 7B                 280        105    165   63 %  5.0  data 32 x fsdp 2     80  0 (143) 100 %  8.5
 32B               1342         -      -  too large    data 8 x fsdp 8     301  13 (594) 99 % 10.3
 30B-A3B            130         -      -  too large    data 4 x fsdp 4 x   718  202 (13) 14 %  7.5
                                                             expert 4
 9B                 292        241    216   58 %  5.6  data 32 x fsdp 2     90  0 (152)  94 %  9.6
 35B-A3B            107         -      -  too large    data 4 x fsdp 4 x   615  158 (67) 14 %  7.5
                                                             expert 4
 0.5B    v6e:4x4      4          3     17   18 %  0.5  data 16               2  0       100 %  1.2
 7B                  60         65     83   41 %  5.0  data 16              25  0       100 % 15.2
 32B                288        255    269   52 % 18.0  data 4 x fsdp 4     179  6 (254)  98 % 18.8
 30B-A3B             28        373     81    6 % 17.2  data 4 x expert 4   380  40        7 % 19.4
 9B                  63        136    108   26 %  5.7  data 16              32  0        82 % 17.1
 35B-A3B             23        385     89    5 % 19.9  data 4 x expert 4   312  34        7 % 22.8
 0.5B    v5p:2x2x4    7          8     17   29 %  0.6  data 16               3  0       100 %  1.1
 7B                 120         39     83   59 %  4.9  data 16              16  0       100 % 14.7
 32B                576        150    269   68 % 17.8  data 16              68  0       100 % 65.0
 30B-A3B             56        236     81   18 % 17.9  data 16             121  0        46 % 62.5
 9B                 125         96    108   54 %  5.7  data 16              19  0        94 % 16.9
 35B-A3B             46        253     89   13 % 20.2  data 16             119  0        39 % 70.8
"""

import argparse
import json
import os
from dataclasses import asdict
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import jax

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import one_line
from activation_extraction.model.devices import chip_of
from activation_extraction.model.family import HookedModel
from activation_extraction.model.forward import Program, build_model, compile_unloaded
from activation_extraction.model.mesh import RULES, in_words
from activation_extraction.model.model_config import QwenConfig
from activation_extraction.model.program_text import ProgramText
from activation_extraction.model.step_plan import (
    StepPlan,
    StepTimes,
    read_step,
    text_of,
    times_of,
)
from activation_extraction.model.topologies import topology_of
from activation_extraction.run.prepare import model_request
from benchmarks.shapes import SHAPES, evenly_spaced
from qwen2_jax_with_hooks import FAMILIES

# Nothing opens a TPU here, so the lock that keeps processes from sharing one is not needed.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

QWEN_7B = FAMILIES.config(SHAPES["7B"])
EIGHT = "--layers_to_extract 6 9 12 15 18 21 24 27"
WORTH_A_LINE = 1e6  # bytes
MODELS = "0.5B", "7B", "32B", "30B-A3B", "9B", "35B-A3B"
TOPOLOGIES = "v5e:8x8", "v6e:4x4", "v5p:2x2x4"


class Compiled(NamedTuple):
    """The forward pass as a run would compile it, and what the compiler says of it."""

    program: Program
    step: StepPlan
    plan: ProgramText
    memory: Any

    @property
    def model(self) -> HookedModel:
        return self.program.model

    @property
    def rows(self) -> int:
        """Returns the rows of all chips."""
        return self.program.shape[0] * self.program.rows.hosts

    @property
    def length(self) -> int:
        return self.program.shape[1]


def chips(topology: str, chips_per_host: int = 4) -> list[Any]:
    """Returns the devices of a machine that is not here, to compile programs for."""
    return topology_of(topology, chips_per_host).compilable()


@cache
def compile_for(
    qwen: QwenConfig,
    flags: str,
    topology: str,
    effort: float = 0.0,
    chips_per_host: int = 4,
) -> Compiled:
    """Does what build_model and compile_step do for these flags, with shapes in place of arrays.

    effort: the compiler's. 0 is that of a run; -1 takes a fifth of the time.
    """
    config = parse_args(["--dtype", "bfloat16", *flags.split()])
    request = model_request(config, chips(topology, chips_per_host))
    family = FAMILIES.by_model_type(qwen.model_type)
    model, rows = build_model(family, request, qwen)
    shape = request.rows, request.length
    program = Program(model, family.weight_table(model), rows, shape)
    compiled = compile_unloaded(program, exec_time_optimization_effort=effort)
    step, text = read_step(program, compiled), text_of(program, compiled)
    return Compiled(program, step, text, compiled.memory_analysis())


def times(compiled: Compiled) -> StepTimes:
    """Returns the times of a step."""
    devices = [*compiled.program.rows.mesh.devices.flat]
    chip = chip_of(devices[0])
    assert chip is not None
    return times_of(compiled.step, compiled.program.layout, chip, len(devices))


def print_table(effort: float) -> None:
    """Prints a line for every model and machine, with the mesh `2d` and with the one of `auto`."""
    print(f"{'':31} products kernel    HBM  sent: hidden exposed   busy   memory")
    for topology, shape, mesh in product(TOPOLOGIES, MODELS, ("2d", "auto")):
        depth = SHAPES[shape]["num_hidden_layers"]
        flags = f"--mesh_type {mesh} --layers_to_extract "
        flags += " ".join(map(str, evenly_spaced(8, depth)))
        try:
            compiled = compile_for(FAMILIES.config(SHAPES[shape]), flags, topology, effort)
        except jax.errors.JaxRuntimeError as error:
            print(f"{shape:8}{topology:10}{mesh:25}{one_line(error):.100}", flush=True)
            continue
        found = times(compiled)
        ms = [1e3 * seconds for seconds in found]
        axes = in_words(compiled.model.layout.shape)
        print(
            f"{shape:8}{topology:10}{axes:25}{ms[0]:5.0f} ms {ms[1]:3.0f} ms {ms[2]:4.0f} ms "
            f"{ms[3]:9.0f} ms {ms[4]:4.0f} ms {100 * found.products / found.device:5.0f} % "
            f"{sum(compiled.step.memory) / 1e9:5.1f} GB",
            flush=True,
        )


def ideal(compiled: Compiled) -> dict[str, int]:
    """Returns the bytes that a dense layer cannot do without on one chip, in the model's dtype.

    product: the weights once, and what goes into and comes out of each product; kernel: q, k, v and
    the heads' values; collective, with fsdp: a chip's part of the weights is read, but for those of
    keys and values, and all that it gathers is written; sent: that, and a reduce-scatter and an
    all-gather of the residual stream around each half of the layer, with `model`.
    """
    model, layout = compiled.model, compiled.model.layout
    size, item = model.config.sizes, model.dtype.itemsize
    parts, gathered = layout.size("model", "query"), layout.size("fsdp")
    tokens = compiled.rows * compiled.length // layout.size(*RULES["batch"])
    heads, queries, kv = (size[n] * size["H"] // parts for n in "NQK")
    mlp, hidden = size["F"] // parts, size["D"]
    widths = [(hidden, queries), *[(hidden, kv)] * 2, (heads, hidden)]
    widths += [*[(hidden, mlp)] * 2, (mlp, hidden)]
    weights, split = sum(a * b for a, b in widths), sum(a * b for a, b in widths if b != kv)
    product = weights + tokens * sum(a + b for a, b in widths)
    sent = 4 * tokens * hidden * (parts - 1) // parts + split * (gathered - 1) // gathered
    kernel = tokens * 2 * (heads + kv)
    needed = {"product": product, "kernel": kernel, "sent": sent}
    if gathered > 1:
        needed["collective"] = split + split // gathered
    return {kind: item * count for kind, count in needed.items()}


def over_ideal(compiled: Compiled) -> float:
    """Returns the bytes of HBM that a dense layer moves, over what it cannot do without."""
    needed = sum(count for kind, count in ideal(compiled).items() if kind != "sent")
    return sum(move.hbm for move in compiled.plan.moves(compiled.plan.body)) / needed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="v5e:8x8")
    parser.add_argument("--effort", type=float, default=0.0, help="the compiler's; -1 is quick")
    parser.add_argument("--flags", default="", help="of the tool, for example of its mesh")
    parser.add_argument("--table", action="store_true", help="all models and machines: an hour")
    args = parser.parse_args()
    if args.table:
        print_table(args.effort)
        return
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
    found = {"planned": planned, "ideal": needed, "over": over, "ratio": over_ideal(compiled)}
    print(json.dumps(found | {"step": asdict(compiled.step)}))


if __name__ == "__main__":
    main()
