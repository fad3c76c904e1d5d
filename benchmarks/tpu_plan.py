r"""Shows what the TPU compiler plans for a layer and for a whole step, for developers.

    JAX_PLATFORMS=cpu PYTHONPATH=.venv/libtpu .venv/bin/python -m benchmarks.tpu_plan \
        --model 30B-A3B --topology v6e:4x4 --flags "--mesh_shape 4,4 --mesh_axes data,expert"

It compiles the program as a run would, without a TPU, and parses its text (program_text.py). It
prints a line for each instruction of the loop over layers that reads, writes and sends more than
1 MB in all. A line shows the bytes of HBM that the instruction reads and writes and, for
collectives, the bytes sent, the mesh axes, and "hidden" if matrix products or kernels run
meanwhile, otherwise "exposed". Then it prints the bytes
of HBM of a whole layer, and their ratio to the bytes that move if weights and tokens move only once
(see `CostModel.memory_traffic_per_layer`).

The last line is JSON with the times of a step. The step does not run: the times are its bytes and
floating-point operations divided by a chip's peak rates.

products_ms        the matrix products that the model needs
kernel_ms          the matrix products that the kernel of gated delta nets adds
hbm_ms             reading and writing HBM
hidden_ms          sending while matrix products or kernels run
exposed_ms         sending while no matrix products or kernels run
busy               the fraction of the step's time that `products_ms` takes, at best
tokens_per_second  the tokens that all chips together compute per second, at best
memory_gb          the memory that each chip needs, in 10^9 bytes

With `--flags "--encode ..."`, the matrix products of the autoencoder are included. The time of
choosing the largest features is not included, because it is not known. tests/test_tpu.py uses the
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
from activation_extraction.model.mesh import shape_phrase
from activation_extraction.model.model_config import ModelConfig
from activation_extraction.model.model_setup import build_model, choose_hooks
from activation_extraction.model.step_cost import CostModel
from activation_extraction.run.prepare import step_request
from activation_extraction.run.topologies import topology_of
from benchmarks.inputs import SHAPES
from benchmarks.processes import print_result
from benchmarks.program_text import InstructionCost, ProgramText, total_hbm_bytes
from benchmarks.step_plan import StepPlan, StepTimes, read_step, text_of, times_of
from qwen2_jax import weight_table
from qwen2_jax_with_hooks import HookedModel

# libtpu uses a lock to keep processes from sharing a TPU. The lock is not needed, because no TPU is
# opened here.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

# An instruction is printed if the bytes that it reads from HBM, writes to HBM and sends to other
# chips are together at least this number.
MIN_PRINTED_BYTES = 1e6


class Compiled(NamedTuple):
    """The compiled step of a run, with its cost.

    Attributes:
        program: Program of the step before it was compiled: the model, its mesh, and the shapes of
            weights and batches.
        step_plan: Cost of a step on each chip.
        program_text: Parsed text of the compiled program.
        memory_analysis: Memory analysis of the compiler, as JAX returns it.
    """

    program: Program
    step_plan: StepPlan
    program_text: ProgramText
    memory_analysis: Any

    @property
    def model(self) -> HookedModel:
        return self.program.model

    @property
    def rows(self) -> int:
        """The number of rows that all chips together compute in a step."""
        return self.program.batch_shape[0] * self.program.host_rows.num_hosts

    @property
    def length(self) -> int:
        """The number of tokens of a row."""
        return self.program.batch_shape[1]


def chips(topology: str, chips_per_host: int = 4) -> list[Any]:
    """Returns the devices of a TPU topology, for which programs can be compiled without a TPU.

    Args:
        topology: The topology, as --plan takes it, such as "v5e:8x8".
        chips_per_host: The number of chips of each host.
    """
    return topology_of(topology, chips_per_host).compiler_devices()


@cache
def compile_for(
    shape: ModelConfig,
    flags: str,
    topology: str,
    effort: float = 0.0,
    chips_per_host: int = 4,
) -> Compiled:
    """Compiles the step of a run in bfloat16 from the shapes of the weights, without their values.

    Args:
        shape: The configuration of the model.
        flags: Flags of extract_activations.py in addition to "--dtype bfloat16", separated by
            spaces.
        topology: The topology, as --plan takes it, such as "v5e:8x8".
        effort: The compiler's effort to make the program fast. 0 is the effort of a run. -1 takes a
            fifth of the time.
        chips_per_host: The number of chips of each host.
    """
    config = parse_args(["--dtype", "bfloat16", *flags.split()])
    request = step_request(config, planned=chips(topology, chips_per_host))
    model, host_row_shardings = build_model(request, shape)
    hooks_and_encoders = choose_hooks(request, shape)
    program = Program(
        model, weight_table(model), host_row_shardings, request.batch_shape, *hooks_and_encoders
    )
    compiled_program = compile_unloaded(program, exec_time_optimization_effort=effort)
    return Compiled(
        program,
        step_plan=read_step(program, compiled_program),
        program_text=text_of(program, compiled_program),
        memory_analysis=compiled_program.memory_analysis(),
    )


def times(compiled: Compiled) -> StepTimes:
    """Returns the estimated times that a step takes on the chip for which it was compiled.

    They are the seconds that computing, accesses of HBM and sending to other chips take at the peak
    rates of the chip.

    Args:
        compiled: The compiled step.
    """
    devices = [*compiled.program.host_rows.mesh.devices.flat]
    chip_with_bfloat16_speed = chip_of(devices[0])
    assert chip_with_bfloat16_speed is not None
    chip_with_speed_for_model_dtype = at_dtype(
        chip_with_bfloat16_speed, compiled.model.dtype, "tpu"
    )
    return times_of(
        compiled.step_plan,
        compiled.program.layout,
        chip_with_speed_for_model_dtype,
        linked=len(devices),
    )


def layer_hbm_bytes_if_arrays_move_once(compiled: Compiled) -> float:
    """Returns the bytes of HBM that a layer on one chip would move if each array moved only once.

    The number is the average over all layers.

    Args:
        compiled: The compiled step.
    """
    program = compiled.program
    cost_model = CostModel(compiled.model, program.weight_table, compiled.rows, compiled.length)
    return cost_model.memory_traffic_per_layer(compiled.model.layout)


def model_of(name: str) -> ModelConfig:
    """Returns the configuration of a model.

    Args:
        name: A name in SHAPES (inputs.py), or the path of a config.json.

    Raises:
        InputError: If the file cannot be read, or if the model is not supported.
    """
    if name in SHAPES:
        return parse_model_config(SHAPES[name])
    return read_model_config(Path(name))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="7B",
        help=f"a config.json, or one of {', '.join(SHAPES)} (default: 7B)",
    )
    parser.add_argument(
        "--topology", default="v5e:8x8", help="the chips, as for --plan (default: v5e:8x8)"
    )
    parser.add_argument(
        "--effort", type=float, default=0.0, help="the compiler's effort; -1 is quick (default: 0)"
    )
    parser.add_argument("--flags", default="", help="flags of the tool, such as those of the mesh")
    parsed_flags = parser.parse_args()
    compiled_step = compile_for(
        model_of(parsed_flags.model), parsed_flags.flags, parsed_flags.topology, parsed_flags.effort
    )
    mesh_phrase = shape_phrase(compiled_step.model.layout.shape)
    print(f"mesh {mesh_phrase}; a layer on one chip: MB of HBM, MB sent, kind, operation")
    instruction_costs_of_layer = compiled_step.program_text.costs_of_instructions(
        compiled_step.program_text.body
    )
    for instruction_cost in sorted(
        instruction_costs_of_layer,
        key=lambda instruction_cost: instruction_cost.moved_hbm_bytes,
        reverse=True,
    ):
        if instruction_cost.moved_hbm_bytes + instruction_cost.sent_bytes > MIN_PRINTED_BYTES:
            print_instruction_cost(instruction_cost)
    moved_hbm_bytes = total_hbm_bytes(instruction_costs_of_layer)
    layer_bytes_if_arrays_move_once = layer_hbm_bytes_if_arrays_move_once(compiled_step)
    print(
        f"{moved_hbm_bytes / 1e6:8.1f} in all: "
        f"{moved_hbm_bytes / layer_bytes_if_arrays_move_once:.2f} times the "
        f"{layer_bytes_if_arrays_move_once / 1e6:.1f} of weights and tokens that move once"
    )
    step_times = times(compiled_step)
    value_by_metric_name = {
        "products_ms": 1e3 * step_times.matrix_product_seconds,
        "kernel_ms": 1e3 * step_times.kernel_seconds,
        "hbm_ms": 1e3 * step_times.hbm_seconds,
        "hidden_ms": 1e3 * step_times.overlapped_sending_seconds,
        "exposed_ms": 1e3 * step_times.exposed_sending_seconds,
        "busy": step_times.matrix_product_seconds / step_times.step_seconds,
        "tokens_per_second": compiled_step.rows * compiled_step.length / step_times.step_seconds,
    }
    memory_analysis = compiled_step.memory_analysis
    memory_bytes = memory_analysis.argument_size_in_bytes + memory_analysis.temp_size_in_bytes
    # The outputs (activations) are counted twice, because the activations of a step are copied to
    # the host while the next step is computed.
    memory_bytes += 2 * memory_analysis.output_size_in_bytes
    value_by_metric_name["memory_gb"] = memory_bytes / 1e9
    print_result(value_by_metric_name)


def print_instruction_cost(instruction_cost: InstructionCost) -> None:
    """Prints a line about an instruction that moves bytes.

    The line shows the MB that the instruction reads from HBM and writes to it, the MB that it sends
    to other chips, the mesh axes along which it sends, "hidden" if matrix products or kernels run
    meanwhile or "exposed" if not, its kind, and the name of its operation in JAX.

    Args:
        instruction_cost: The bytes that the instruction moves, with facts about the instruction.
    """
    moved_megabytes_text = f"{instruction_cost.moved_hbm_bytes / 1e6:8.1f}"
    sent_megabytes_text = f"{instruction_cost.sent_bytes / 1e6:8.1f}"
    axes_and_overlap_text = ""
    if instruction_cost.sent_bytes:
        overlap_text = "hidden" if instruction_cost.is_overlapped else "exposed"
        axes_and_overlap_text = f" along {','.join(instruction_cost.mesh_axes)}, {overlap_text}"
    print(
        f"{moved_megabytes_text} {sent_megabytes_text}{axes_and_overlap_text}  "
        f"{instruction_cost.kind:10}  {instruction_cost.jax_operation_name}"
    )


if __name__ == "__main__":
    main()
