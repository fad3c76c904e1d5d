"""What the TPU compiler plans for a layer and for a whole step: a developer's instrument.

    JAX_PLATFORMS=cpu PYTHONPATH=.venv/libtpu .venv/bin/python -m benchmarks.tpu_plan \\
        --model 30B-A3B --topology v6e:4x4 --flags "--mesh_shape 4,4 --mesh_axes data,expert"

It compiles the program as a run would, without a TPU, and reads the text (program_text.py). Of the
loop over layers, it prints every instruction's reads and writes of HBM, and what collectives send,
along which axes, and whether products run meanwhile; and the layer's bytes over those of weights
and tokens that move once, see `CostModel.moved_by_layer`. Nothing runs: the times of a step, in the
JSON of the last line, are its bytes and operations over a chip's peaks. `products_ms` are those
that the model needs, and `kernel_ms` those that the kernel of delta nets adds; `hidden_ms` is what
is sent while products run, `exposed_ms` what is sent while nothing else does; `busy` is the share
of a step that all this leaves to the products at best, and `tokens_per_second` what all chips would
compute then. With `--flags "--encode ..."`, a step has the autoencoder's products too, but for the
choice of the largest features no time is known. tests/test_tpu.py reads programs with the
same functions.
"""

import argparse
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from activation_extraction.cli.config import parse_args
from activation_extraction.model.devices import at_dtype, chip_of
from activation_extraction.model.family import parse_model_config, read_model_config
from activation_extraction.model.forward import Program, compile_unloaded
from activation_extraction.model.mesh import in_words
from activation_extraction.model.model_config import ModelConfig
from activation_extraction.model.model_setup import build_model, choose_hooks
from activation_extraction.model.step_cost import CostModel
from activation_extraction.run.prepare import step_request
from activation_extraction.run.topologies import topology_of
from benchmarks.inputs import SHAPES
from benchmarks.processes import print_result
from benchmarks.program_text import ProgramText
from benchmarks.step_plan import StepPlan, StepTimes, read_step, text_of, times_of
from qwen2_jax import weight_table
from qwen2_jax_with_hooks import HookedModel

# Nothing opens a TPU here, so the lock that keeps processes from sharing one is not needed.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

WORTH_A_LINE = 1e6  # bytes


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
    shape: ModelConfig,
    flags: str,
    topology: str,
    effort: float = 0.0,
    chips_per_host: int = 4,
) -> Compiled:
    """Does what build_model and compile_step do for these flags, with shapes in place of arrays.

    effort: the compiler's. 0 is that of a run; -1 takes a fifth of the time.
    """
    config = parse_args(["--dtype", "bfloat16", *flags.split()])
    request = step_request(config, planned=chips(topology, chips_per_host))
    model, rows = build_model(request, shape)
    asked = choose_hooks(request, shape)
    program = Program(model, weight_table(model), rows, request.shape, *asked)
    compiled = compile_unloaded(program, exec_time_optimization_effort=effort)
    step, text = read_step(program, compiled), text_of(program, compiled)
    return Compiled(program, step, text, compiled.memory_analysis())


def times(compiled: Compiled) -> StepTimes:
    """Returns the times of a step."""
    devices = [*compiled.program.rows.mesh.devices.flat]
    chip = chip_of(devices[0])
    assert chip is not None
    chip = at_dtype(chip, compiled.model.dtype, "tpu")
    return times_of(compiled.step, compiled.program.layout, chip, len(devices))


def moved_once(compiled: Compiled) -> float:
    """Returns the bytes of HBM of a layer and chip if weights and tokens move once."""
    program = compiled.program
    sizes = CostModel(compiled.model, program.weights, compiled.rows, compiled.length)
    return sizes.moved_by_layer(compiled.model.layout)


def model_of(name: str) -> ModelConfig:
    """Returns the configuration of a shape (shapes.py) or of a config.json. Raises InputError."""
    if name in SHAPES:
        return parse_model_config(SHAPES[name])
    return read_model_config(Path(name))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="7B", help=f"FILE.json, or one of {', '.join(SHAPES)}")
    parser.add_argument("--topology", default="v5e:8x8")
    parser.add_argument("--effort", type=float, default=0.0, help="the compiler's; -1 is quick")
    parser.add_argument("--flags", default="", help="of the tool, for example of its mesh")
    args = parser.parse_args()
    compiled = compile_for(model_of(args.model), args.flags, args.topology, args.effort)
    print(f"mesh {in_words(compiled.model.layout.shape)}; a layer, one chip: MB of HBM, MB sent")
    moves = compiled.plan.moves(compiled.plan.body)
    for move in sorted(moves, key=lambda move: -move.hbm):
        if move.hbm + move.sent > WORTH_A_LINE:
            beside = f" along {','.join(move.axes)}, {'hidden' if move.hidden else 'exposed'}"
            sent = f"{move.sent / 1e6:8.1f}" + (beside if move.sent else "")
            print(f"{move.hbm / 1e6:8.1f} {sent}  {move.kind:10}  {move.source}")
    found, moved, once = times(compiled), sum(move.hbm for move in moves), moved_once(compiled)
    print(f"{moved / 1e6:8.1f} in all: {moved / once:.2f} times {once / 1e6:.1f}, all of it once")
    step = {f"{name}_ms": 1e3 * seconds for name, seconds in found._asdict().items()}
    step["busy"] = found.products / found.device
    step["tokens_per_second"] = compiled.rows * compiled.length / found.device
    memory = compiled.memory
    given = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    print_result(step | {"memory_gb": (given + 2 * memory.output_size_in_bytes) / 1e9})


if __name__ == "__main__":
    main()
