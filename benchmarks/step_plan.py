"""Computes the cost of a step on each TPU from the compiled program, without running it.

The cost shows how fast a run could be at best on TPUs that are not at hand. It consists of the
bytes that a TPU reads and writes in its memory, the bytes that it sends to others, and its
floating-point operations. `read_step` sums the bytes that program_text.py counts in the compiled
text, and computes the number of floating-point operations that the model needs. `times_of` divides
both by the peak rates of a chip.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from activation_extraction.common.errors import InputError
from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.devices import FLOAT32_TIME, Chip
from activation_extraction.model.expert_kernel import (
    ADDED,
    GATED,
    ROWS,
    WEIGHTED,
    columns_per_block,
)
from activation_extraction.model.forward import Program
from activation_extraction.model.mesh import RULES, Layout
from activation_extraction.model.step_cost import link_speed
from benchmarks.program_text import ProgramText, total_hbm_bytes

# Chips whose compiled programs contain collectives that program_text.py cannot parse.
UNPARSABLE_CHIPS = ("TPU7x",)
# Chips whose matrix units multiply by tiles of 256 x 256 values, not 128 x 128 as on other chips.
WIDE_TILE_CHIPS = "TPU v6 lite", "TPU7x"


class Transfers(NamedTuple):
    """The bytes that a device sends along some mesh axes in a step.

    Attributes:
        mesh_axes: Mesh axes along which the bytes are sent.
        num_bytes: Number of bytes.
        overlapped_bytes: Number of these bytes that the device sends while matrix products or
            kernels run.
    """

    mesh_axes: tuple[str, ...]
    num_bytes: float
    overlapped_bytes: float


@dataclass(frozen=True)
class StepPlan:
    """The cost of a step on each device, if the rows of the step contain no padding.

    Attributes:
        flops: Number of floating-point operations that the model and the autoencoders need in a
            step, divided by the number of devices. Operations that several devices repeat, padding
            of tiles and the bubble of a pipeline are not included. The operations of float32
            autoencoders in a bfloat16 model are multiplied by the number of passes that a float32
            product takes in a matrix unit.
        delta_kernel_flops: Number of floating-point operations that the device performs in the
            kernel of gated delta nets. They include the padding of its tiles, and all passes of its
            float32 products. `flops` counts the gated delta rule, too, but only the products in its
            definition.
        moved_hbm_bytes: Bytes of HBM that the device reads and writes. A Pallas kernel counts as
            reading each operand and writing its result once, except the kernels of experts (see
            `access_counts_of_expert_kernel`).
        transfers_along_axis_sets: Bytes that the device sends, one entry for each set of mesh axes.
    """

    flops: float
    delta_kernel_flops: float
    moved_hbm_bytes: float
    transfers_along_axis_sets: tuple[Transfers, ...]


class StepTimes(NamedTuple):
    """The seconds that the parts of a step take on each device at the device's peak rates.

    Attributes:
        matrix_product_seconds: Seconds for the matrix products that the model and the autoencoders
            need (`StepPlan.flops`). The products in the definition of the gated delta rule are
            included.
        kernel_seconds: Seconds for all matrix products that the kernel of gated delta nets
            computes, with the padding of its tiles (`StepPlan.delta_kernel_flops`).
        hbm_seconds: Seconds for reading and writing HBM.
        overlapped_sending_seconds: Seconds for sending while matrix products or kernels run. It may
            be more than the seconds of these products and kernels.
        exposed_sending_seconds: Seconds for sending while no matrix products or kernels run.
    """

    matrix_product_seconds: float
    kernel_seconds: float
    hbm_seconds: float
    overlapped_sending_seconds: float
    exposed_sending_seconds: float

    @property
    def step_seconds(self) -> float:
        """The duration in seconds of a whole step at the device's peak rates.

        Computing, reading and writing HBM, and sending while the device computes (overlapped
        sending) happen at the same time, so the longest of them counts. The time of sending while
        no matrix products or kernels run (exposed sending) is added.
        """
        computing_seconds = self.matrix_product_seconds + self.kernel_seconds
        return (
            max(computing_seconds, self.hbm_seconds, self.overlapped_sending_seconds)
            + self.exposed_sending_seconds
        )


def times_of(step: StepPlan, layout: Layout, chip: Chip, linked: int) -> StepTimes:
    """Returns the times of a step at the peak rates of a chip.

    Args:
        step: The cost of the step.
        layout: The layout of the weights and tokens on the mesh.
        chip: The peak rates of a chip.
        linked: The number of consecutive devices that fast links connect (see `link_speed`).
    """
    overlapped_sending_seconds = exposed_sending_seconds = 0.0
    for transfers_along_axis_set in step.transfers_along_axis_sets:
        # `link_speed` knows no query axis, because it counts this axis of JAX's mesh as a part of
        # the model axis, as --mesh_axes does.
        axis_names_for_users = {
            "model" if axis_name == "query" else axis_name
            for axis_name in transfers_along_axis_set.mesh_axes
        }
        slowest_link_bytes_per_second = min(
            (link_speed(layout, axis_name, chip, linked) for axis_name in axis_names_for_users),
            default=chip.link_bytes_per_second,
        )
        overlapped_sending_seconds += (
            transfers_along_axis_set.overlapped_bytes / slowest_link_bytes_per_second
        )
        exposed_sending_seconds += (
            transfers_along_axis_set.num_bytes - transfers_along_axis_set.overlapped_bytes
        ) / slowest_link_bytes_per_second
    return StepTimes(
        matrix_product_seconds=step.flops / chip.flops_per_second,
        kernel_seconds=step.delta_kernel_flops / chip.flops_per_second,
        hbm_seconds=step.moved_hbm_bytes / chip.memory_bytes_per_second,
        overlapped_sending_seconds=overlapped_sending_seconds,
        exposed_sending_seconds=exposed_sending_seconds,
    )


def read_step(program: Program, compiled: Any) -> StepPlan:
    """Computes the operations and bytes of a step on each device, from its compiled program.

    Args:
        program: The program before it was compiled: the model, its mesh, and the shapes of weights
            and batches.
        compiled: The compiled program, as JAX returns it.

    Returns:
        The operations that a device performs, and the bytes that it reads, writes and sends.

    Raises:
        InputError: If the chips of the mesh are in UNPARSABLE_CHIPS, because the text of programs
            for such chips cannot be parsed.
    """
    model, layout = program.model, program.layout
    chip_name = _chip_name(program)
    if chip_name in UNPARSABLE_CHIPS:
        raise InputError(f"the compiled text of programs for {chip_name} cannot be parsed")
    num_rows_of_step = program.batch_shape[0] * program.host_rows.num_hosts
    row_length = program.batch_shape[1]
    assert layout.mesh is not None
    # `times_of` divides all operations by the peak rate in the model's dtype. In a bfloat16 model,
    # an operation of a float32 autoencoder therefore counts as several operations.
    relative_cost_of_float32_operation = FLOAT32_TIME["tpu"] if model.dtype == jnp.bfloat16 else 1.0
    # The operations that the autoencoders need for each token.
    encoding_flops_per_token = 0.0
    for encoder in program.encoders:
        relative_cost_of_operation = (
            relative_cost_of_float32_operation if encoder.autoencoder.dtype == jnp.float32 else 1.0
        )
        encoding_flops_per_token += encoder.flops * relative_cost_of_operation
    step_flops = (
        model.flops([row_length] * num_rows_of_step)
        + encoding_flops_per_token * row_length * num_rows_of_step
    )
    program_text = text_of(program, compiled)
    instruction_costs_of_step = program_text.costs_of_instructions(program_text.entry)
    # Names of the mesh axes along which a device sends -> number of bytes that it sends. The second
    # dict counts only the bytes that are sent while matrix products or kernels run.
    sent_bytes_by_axes: dict[tuple[str, ...], float] = defaultdict(float)
    overlapped_bytes_by_axes: dict[tuple[str, ...], float] = defaultdict(float)
    for instruction_cost in instruction_costs_of_step:
        if instruction_cost.sent_bytes:
            mesh_axes, sent_bytes = instruction_cost.mesh_axes, instruction_cost.sent_bytes
            sent_bytes_by_axes[mesh_axes] += sent_bytes
            overlapped_bytes_by_axes[mesh_axes] += sent_bytes * instruction_cost.is_overlapped
    return StepPlan(
        flops=step_flops / layout.mesh.size,
        delta_kernel_flops=_flops_of_delta_rule(program),
        moved_hbm_bytes=total_hbm_bytes(instruction_costs_of_step),
        transfers_along_axis_sets=tuple(
            Transfers(mesh_axes, sent_bytes_by_axes[mesh_axes], overlapped_bytes_by_axes[mesh_axes])
            for mesh_axes in sent_bytes_by_axes
        ),
    )


def text_of(program: Program, compiled: Any) -> ProgramText:
    """Parses the text of a compiled program.

    Args:
        program: The program before it was compiled. It provides facts that the text lacks: the
            mesh, the types of layers, and the number of devices among which experts are divided.
        compiled: The compiled program, as JAX returns it.
    """
    model_config, mesh = program.model.config, program.layout.mesh
    assert mesh is not None
    # Type of layers -> number of layers. All layers of a type share one array of each weight, whose
    # first axis is the layer.
    layer_count_by_type = {
        weight_path[1]: weight_spec.shape[0]
        for weight_path, weight_spec in program.weight_table.items()
        if weight_path[0] == "layers"
    }
    layer_counts_of_types = [
        layer_count_by_type[layer_type]
        for layer_type in sorted(layer_count_by_type)
        if layer_type in model_config.layer_types
    ]
    fractions_of_layers_in_branches = [
        num_layers / sum(layer_counts_of_types) for num_layers in layer_counts_of_types
    ]
    computed_fraction_of_token_expert_pairs = 1 / program.layout.size("expert")
    count_kernel_accesses = partial(
        access_counts_of_expert_kernel,
        computed_fraction_of_token_expert_pairs=computed_fraction_of_token_expert_pairs,
    )
    return ProgramText(
        compiled.as_text() or "", mesh.shape, fractions_of_layers_in_branches, count_kernel_accesses
    )


def access_counts_of_expert_kernel(
    name: str, shapes: list[list[int]], computed_fraction_of_token_expert_pairs: float
) -> list[float] | None:
    """Returns how often a kernel of expert_kernel.py reads its operands and writes its result.

    The kernels compute only tiles that contain rows of tokens, and read only one layer of the
    weights, whose array contains all layers. So most of the returned numbers are fractions or
    averages.

    Args:
        name: The name of the kernel in the compiled text.
        shapes: The shapes of the operands, followed by the shape of the result.
        computed_fraction_of_token_expert_pairs: The fraction of all pairs of a token and one of its
            experts that this device computes. It is estimated as if all experts got equally many
            tokens.

    Returns:
        The average number of reads of each operand, followed by the number of writes of the result.
        None for a kernel of another module.
    """
    if name == ADDED:
        _, row_fetches_shape, expert_rows_shape, _ = shapes
        expected_fetched_row_count = (
            computed_fraction_of_token_expert_pairs * row_fetches_shape[0] * row_fetches_shape[-1]
        )
        return [1, 1, expected_fetched_row_count / expert_rows_shape[0], 1]
    if name not in (GATED, WEIGHTED):
        return None
    # The last operand of both expert kernels is an array of the weights of all layers. The last
    # shape is the shape of the result, so the shape of this operand comes before it.
    num_layers, num_experts, num_inputs, num_outputs = shapes[-2]
    num_operands = len(shapes) - 1
    num_result_rows = shapes[-1][0]
    # The kernel's result has room for ROWS rows of padding for each expert. Tiles that contain only
    # padding are not computed. The last tile with tokens of each expert is half full on average, so
    # ROWS / 2 rows of padding are computed for each expert.
    expected_token_row_count = computed_fraction_of_token_expert_pairs * (
        num_result_rows - num_experts * ROWS
    )
    expected_computed_row_count = expected_token_row_count + num_experts * ROWS / 2
    computed_fraction_of_rows = expected_computed_row_count / num_result_rows
    if name == WEIGHTED:
        num_column_blocks = num_outputs // columns_per_block(num_outputs, num_inputs * 2)
        mean_reads_per_row = num_column_blocks * computed_fraction_of_rows
        return [1] * (num_operands - 2) + [
            mean_reads_per_row,
            1 / num_layers,
            computed_fraction_of_rows,
        ]
    num_column_blocks = num_outputs // columns_per_block(num_outputs, 2 * num_inputs * 2)
    # The last operands of the kernel GATED are the tokens, the gate weights and the up weights.
    num_tokens = shapes[-4][0]
    mean_reads_per_token = num_column_blocks * expected_token_row_count / num_tokens
    return [1] * (num_operands - 3) + [
        mean_reads_per_token,
        1 / num_layers,
        1 / num_layers,
        computed_fraction_of_rows,
    ]


def _flops_of_delta_rule(program: Program) -> float:
    """Returns the number of operations of one device in the kernel of gated delta nets, per step.

    It is the number of floating-point operations, summed over all layers that use this kernel.

    Args:
        program: The program of the step.

    Returns:
        The number of operations. 0 for a model without gated delta nets.
    """
    model, layout = program.model, program.layout
    delta_net_config = model.config.delta
    if delta_net_config is None:
        return 0.0
    num_rows_on_device = (
        program.batch_shape[0] * program.host_rows.num_hosts // layout.size(*RULES["batch"])
    )
    row_length = program.batch_shape[1]
    num_key_heads_on_device = delta_net_config.key_heads // layout.size("model", "query")
    key_shape = num_rows_on_device, row_length, num_key_heads_on_device, delta_net_config.key_size
    gate_shape = (
        num_rows_on_device,
        row_length,
        num_key_heads_on_device,
        delta_net_config.values_per_key,
    )
    argument_shapes = [
        jax.ShapeDtypeStruct(key_shape, model.dtype),
        jax.ShapeDtypeStruct(key_shape, model.dtype),
        jax.ShapeDtypeStruct((*gate_shape, delta_net_config.value_size), model.dtype),
        jax.ShapeDtypeStruct(gate_shape, jnp.float32),
        jax.ShapeDtypeStruct(gate_shape, jnp.float32),
        jax.ShapeDtypeStruct((num_rows_on_device, row_length), jnp.int32),
    ]
    matrix_tile_size = 256 if _chip_name(program) in WIDE_TILE_CHIPS else 128
    flops_of_layer = padded_flops(pallas_delta_rule, argument_shapes, matrix_tile_size)
    num_delta_layers = sum(layer < model.num_layers for layer in delta_net_config.layers)
    return num_delta_layers * flops_of_layer / layout.size("pipeline")


def _chip_name(program: Program) -> str:
    return program.host_rows.mesh.devices.flat[0].device_kind


def padded_flops(function: Callable[..., Any], arguments: Sequence[Any], tile: int) -> float:
    """Returns the number of operations that matrix units perform for a function's Pallas kernels.

    A matrix unit multiplies the rows of the left operand by square tiles of the right operand. A
    partly filled tile takes as long as a full one, so it counts as a full tile. A float32 product
    with precision HIGHEST takes six passes, so it counts six times. Therefore, the result divided
    by a chip's peak rate is the time that the products take.

    Args:
        function: The function that calls the kernels.
        arguments: The arguments of the function, or their shapes and dtypes.
        tile: The number of rows and of columns of a tile: 256 on the chips in WIDE_TILE_CHIPS, 128
            on others.
    """
    total_flops = 0.0
    for outer_equation in equations(jax.make_jaxpr(function)(*arguments)):
        if outer_equation.primitive.name == "pallas_call":
            num_grid_steps = math.prod(outer_equation.params["grid_mapping"].grid)
            for equation in equations(outer_equation.params["jaxpr"]):
                if equation.primitive.name == "dot_general":
                    total_flops += num_grid_steps * _padded_flops_of_product(equation, tile)
    return total_flops


def _padded_flops_of_product(product: Any, tile: int) -> int:
    """Returns the number of operations of a matrix unit for one product, with those on padding.

    A matrix unit multiplies the rows of the left operand by square tiles of the right operand. The
    right operand is padded to whole tiles, and operations on this padding count, too. The
    operations of a float32 product count six times, because it takes six passes.

    Args:
        product: The equation `dot_general` of a jaxpr, which describes the product.
        tile: The number of rows and of columns of a tile.
    """
    (contracted_axes, _), _ = product.params["dimension_numbers"]
    left_operand, right_operand = (operand.aval for operand in product.invars)
    contracted_size = math.prod(left_operand.shape[axis] for axis in contracted_axes)
    num_rows, num_columns = (
        left_operand.size // contracted_size,
        right_operand.size // contracted_size,
    )
    num_tiles = -(-contracted_size // tile) * -(-num_columns // tile)
    passes_per_product = 6 if left_operand.dtype == jnp.float32 else 1
    return num_rows * num_tiles * passes_per_product * 2 * tile**2


def equations(program: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of the jaxprs nested in it.

    A Pallas kernel is one equation. The equations of its own jaxpr are not included.

    Args:
        program: A Jaxpr or a ClosedJaxpr.
    """
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for equation_parameter in jax.tree.leaves([*equation.params.values()]):
                if hasattr(equation_parameter, "eqns"):
                    yield from equations(equation_parameter)
