"""Counts the bytes that a compiled program moves in HBM and between chips, from its text.

`ProgramText` parses the text of a program that XLA compiled for TPUs. Such a program consists of
named computations, and each computation consists of instructions. An array in HBM counts with the
padding of its layout. An array in another memory, such as fast on-chip memory, does not count. The
text does not show how often a Pallas kernel reads its operands and writes its result, so the caller
supplies a function that returns these numbers (`KernelAccessCounter`). step_plan.py turns the bytes
into the cost of a step.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

# The pattern for the opcode of a collective in an instruction. For example, it matches
# " all-gather-start(", and group 1 is "all-gather".
COLLECTIVE = re.compile(
    r" ((?:ragged-)?all-to-all|all-reduce|all-gather|reduce-scatter|collective-\w+)(?:-start)?\("
)
# The pattern for an array: dtype, shape, order of dimensions (minor first) and tiling, such as
# `bf16[16,1024]{1,0:T(8,128)(2,1)}`. "S(1)" after the tiles stands for on-chip memory.
ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
# Opcodes of instructions that move no bytes. A custom call moves no bytes if it matches
# FREE_CUSTOM_CALL.
FREE_OPCODES = "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all"
FREE_CUSTOM_CALL = re.compile(r'custom_call_target="(\w*Bitcast|AllocateBuffer|AssumeGather\w*)"')
# Text that the layout of an array contains if the array is not in HBM, but in another memory, such
# as on-chip memory.
OTHER_MEMORY = "S("
# The type of a function that counts how often a Pallas kernel accesses each of its arrays. Its
# arguments are the kernel's name, and the shapes of the kernel's operands, followed by the shape of
# its result. It returns how often the kernel reads each operand, followed by how often it writes
# the result: 1 if each element is read or written once, 0.5 if only half of the elements are. It
# returns None for a kernel that it does not know. Such a kernel counts like any other instruction,
# which reads and writes each array once.
KernelAccessCounter = Callable[[str, list[list[int]]], list[float] | None]


class Instruction(NamedTuple):
    """An instruction of a computation: `name = result opcode(operands), attribute=value, ...`.

    Attributes:
        name: Name of the instruction, with its leading "%".
        result_type_text: Text of the result's dtype, shape and layout. If the result is a tuple of
            arrays, the text contains the dtype, shape and layout of each array.
        opcode: Opcode, such as "fusion".
        operand_names: Names of the instructions whose results are the operands, in order.
        line: Whole text of the instruction, with its attributes.
    """

    name: str
    result_type_text: str
    opcode: str
    operand_names: list[str]
    line: str

    @property
    def calls(self) -> str:
        """The name of the computation that a fusion or call runs. "" for other instructions."""
        if self.opcode == "call":
            return self.named("calls") or self.named("to_apply")
        return self.named("calls")

    def named(self, attribute: str) -> str:
        """Returns the name of the computation that an attribute of the instruction names.

        Args:
            attribute: The attribute, such as "body" or "condition" of a loop.

        Returns:
            The name of the computation, or "" if the instruction does not have the attribute.
        """
        attribute_match = re.search(rf"\b{attribute}=(%[\w.-]+)", self.line)
        return attribute_match[1] if attribute_match else ""

    @property
    def branches(self) -> list[str]:
        """The names of the computations that are the branches of a conditional.

        They are in the order of the conditional's index. For a boolean index, the false branch
        comes first. [] for instructions that are no conditionals.
        """
        branches_match = re.search(r"branch_computations=\{([^}]*)\}", self.line)
        if branches_match:
            return re.findall(r"%[\w.-]+", branches_match[1])
        false_branch_name = self.named("false_computation")
        true_branch_name = self.named("true_computation")
        return [branch_name for branch_name in (false_branch_name, true_branch_name) if branch_name]

    @property
    def jax_operation_name(self) -> str:
        """The last three components of the name that JAX gave to the operation. "" if unnamed."""
        op_name_match = re.search(r'op_name="([^"]*)"', self.line)
        return "/".join(op_name_match[1].split("/")[-3:]) if op_name_match else ""

    @property
    def is_collective(self) -> bool:
        return COLLECTIVE.search(f" {self.opcode}(") is not None

    @property
    def channel(self) -> str:
        """The channel id, which all instructions of one asynchronous collective share.

        For an instruction without a channel id, it is the instruction's name.
        """
        return self.line.partition("channel_id=")[2].partition(",")[0] or self.name


class InstructionCost(NamedTuple):
    """The bytes that one instruction moves between a chip and its HBM, and sends to other chips.

    Attributes:
        kind: Kind of the instruction: "product" (of matrices), "kernel", "collective", "copy" or
            "rest" (see `ProgramText.kind`).
        jax_operation_name: Name of the operation in JAX (see `Instruction.jax_operation_name`).
        moved_hbm_bytes: Bytes that the instruction reads from HBM and writes to it.
        sent_bytes: Bytes that the instruction sends to other chips.
        is_overlapped: Whether matrix products or kernels run while the instruction sends. They
            either stand between the start and the end of an asynchronous collective, or the
            collective and a product are fused into this instruction.
        mesh_axes: Mesh axes along which the instruction sends.
    """

    kind: str
    jax_operation_name: str
    moved_hbm_bytes: int
    sent_bytes: int = 0
    is_overlapped: bool = False
    mesh_axes: tuple[str, ...] = ()

    def times(self, count: float) -> "InstructionCost":
        """Returns the cost of several executions of the instruction.

        Args:
            count: The number of executions. It may be a fraction, if it is an average.

        Returns:
            A copy of this cost with `count` times its bytes.
        """
        return self._replace(
            moved_hbm_bytes=round(self.moved_hbm_bytes * count),
            sent_bytes=round(self.sent_bytes * count),
        )


class ProgramText:
    """A compiled program, parsed into its instructions.

    Attributes:
        instructions_by_computation_name: Computation name -> its instructions in order.
        instruction_by_name: Instruction name -> instruction, for all computations.
        text: Text of the compiled program.
        size_by_mesh_axis: Mesh axis -> size. Device numbers change slowest along the first axis.
        fractions_of_layers_in_branches: For each type of layer, the fraction of the model's layers
            that have this type, in the order of the branches of the conditional that chooses the
            type. Empty if the program has no such conditional.
    """

    def __init__(
        self,
        text: str,
        size_by_mesh_axis: Mapping[str, int] | None = None,
        fractions_of_layers_in_branches: Sequence[float] = (),
        count_kernel_accesses: KernelAccessCounter = lambda _name, _shapes: None,
    ) -> None:
        """Parses the text of a program.

        Args:
            text: The text of the compiled program.
            size_by_mesh_axis: Mesh axis -> size, with which the mesh axes of collectives are
                determined. Device numbers change slowest along the first axis. None if the mesh
                axes of collectives are not needed.
            fractions_of_layers_in_branches: For each type of layer, the fraction of the model's
                layers that have this type, in the order of the branches of the conditional that
                chooses the type. Empty if the program has no such conditional.
            count_kernel_accesses: The function that returns how often a Pallas kernel reads and
                writes its arrays (see `KernelAccessCounter`).
        """
        self.text = text
        self.size_by_mesh_axis = dict(size_by_mesh_axis or {})
        self.fractions_of_layers_in_branches = fractions_of_layers_in_branches
        self._count_kernel_accesses: KernelAccessCounter = count_kernel_accesses
        # On v6e, sorting is a computation with its own execution thread, which the last line of the
        # computation's text names.
        computation_end_pattern = r"\n\}(?:, execution_thread=\"\w+\")?$"
        computation_pattern = rf"^(?:ENTRY )?(%[\w.-]+) [^\n]*\{{\n(.*?){computation_end_pattern}"
        self.instructions_by_computation_name: dict[str, list[Instruction]] = {}
        self.instruction_by_name: dict[str, Instruction] = {}
        for computation_name, computation_body in re.findall(
            computation_pattern, text, re.M | re.S
        ):
            instructions = _instructions(computation_body)
            self.instructions_by_computation_name[computation_name] = instructions
            for instruction in instructions:
                self.instruction_by_name[instruction.name] = instruction

    @cached_property
    def entry(self) -> str:
        """The name of the computation at which the program starts."""
        entry_match = re.search(r"^ENTRY (%[\w.-]+) ", self.text, re.M)
        assert entry_match
        return entry_match[1]

    @cached_property
    def body(self) -> str:
        """The name of the computation that is one iteration of the loop over layers."""
        loop_pattern = r' while\(.*body=(%[\w.-]+).*op_name="[^"]*/layers/[\w.]+\._loop/while"'
        loop_body_names = re.findall(loop_pattern, self.text)
        assert len(loop_body_names) == 1, loop_body_names
        return loop_body_names[0]

    def layer(self) -> list[Instruction]:
        """Returns the instructions of one iteration of the loop over layers, in order.

        Instructions that move no bytes, such as bitcasts, are left out.
        """
        return self._without_free_instructions(self.body)

    def _without_free_instructions(self, computation_name: str) -> list[Instruction]:
        """Returns the instructions of a computation, without instructions that never move bytes.

        Args:
            computation_name: The name of the computation.
        """
        return [
            instruction
            for instruction in self.instructions_by_computation_name[computation_name]
            if instruction.opcode not in FREE_OPCODES
            and not FREE_CUSTOM_CALL.search(instruction.line)
        ]

    def layer_loop(self) -> list[Instruction]:
        """Returns all instructions that run in the loop over layers.

        They are the instructions of the loop's body, and of all computations that the body calls
        directly or indirectly. Each computation is included once.
        """
        pending_computation_names = [self.body]
        visited_computation_names: set[str] = set()
        loop_instructions: list[Instruction] = []
        while pending_computation_names:
            computation_name = pending_computation_names.pop()
            if computation_name in visited_computation_names:
                continue
            visited_computation_names.add(computation_name)
            instructions = self.instructions_by_computation_name.get(computation_name, [])
            loop_instructions += instructions
            for instruction in instructions:
                pending_computation_names += [*instruction.branches, instruction.named("body")]
                pending_computation_names += [instruction.calls, instruction.named("to_apply")]
        return loop_instructions

    def costs_of_instructions(
        self, computation_name: str, keys_of_collectives_in_flight: Collection[str] = ()
    ) -> list[InstructionCost]:
        """Returns the costs of the instructions that one execution of a computation runs, in order.

        The costs of instructions in the body of a loop are multiplied by its iteration count. If a
        conditional in the loop over layers has one branch for each type of layer, the costs in each
        branch are multiplied by the fraction of the layers that have this type. For any other
        conditional, only the branch that moves the most bytes of HBM counts.

        Args:
            computation_name: The name of the computation.
            keys_of_collectives_in_flight: The keys (see `_keys_of_started_collectives`) of
                collectives that are in flight while the computation runs. Their bytes are not
                counted again, because they count for the instructions that start the collectives.

        Returns:
            The cost of each instruction that reads or writes HBM or sends to other chips.
        """
        instruction_costs: list[InstructionCost] = []
        # Key of a collective in flight (see `_keys_of_started_collectives`) -> index in
        # `instruction_costs` of the instruction that starts the collective.
        start_index_by_collective_key: dict[str, int] = {}
        for instruction in self._without_free_instructions(computation_name):
            keys_in_flight = {*keys_of_collectives_in_flight, *start_index_by_collective_key}
            new_costs = self._costs_of_nested(computation_name, instruction, keys_in_flight)
            if new_costs is None:
                new_costs = [self._cost(instruction, keys_in_flight)]
                for collective_key in self._keys_of_started_collectives(instruction):
                    start_index_by_collective_key[collective_key] = len(instruction_costs)
                for collective_key in self._keys_of_awaited_collectives(instruction):
                    start_index_by_collective_key.pop(collective_key, None)
            if any(new_cost.kind in ("product", "kernel") for new_cost in new_costs):
                for start_index in start_index_by_collective_key.values():
                    instruction_costs[start_index] = instruction_costs[start_index]._replace(
                        is_overlapped=True
                    )
            instruction_costs += new_costs
        return [
            instruction_cost
            for instruction_cost in instruction_costs
            if instruction_cost.moved_hbm_bytes or instruction_cost.sent_bytes
        ]

    def _costs_of_nested(
        self,
        computation_name: str,
        instruction: Instruction,
        keys_of_collectives_in_flight: Collection[str],
    ) -> list[InstructionCost] | None:
        """Returns the costs of the instructions that a loop, call or conditional runs.

        `costs_of_instructions` describes how iterations and branches count.

        Args:
            computation_name: The name of the computation that contains the instruction.
            instruction: The loop, call or conditional, or any other instruction.
            keys_of_collectives_in_flight: The keys (see `_keys_of_started_collectives`) of
                collectives that are in flight while the instruction runs.

        Returns:
            The cost of each instruction that runs in the loop, call or conditional, and reads or
            writes HBM or sends to other chips. None if `instruction` is no loop, call or
            conditional.
        """
        if instruction.opcode == "while":
            iteration_count = self._iterations(instruction)
            costs_of_iteration = self.costs_of_instructions(
                instruction.named("body"), keys_of_collectives_in_flight
            )
            return [
                instruction_cost.times(iteration_count) for instruction_cost in costs_of_iteration
            ]
        if instruction.opcode == "call":
            return self.costs_of_instructions(instruction.calls, keys_of_collectives_in_flight)
        if instruction.opcode != "conditional":
            return None
        costs_of_branches = [
            self.costs_of_instructions(branch_name, keys_of_collectives_in_flight)
            for branch_name in instruction.branches
        ]
        if (
            len(costs_of_branches) != len(self.fractions_of_layers_in_branches)
            or computation_name != self.body
        ):
            return max(costs_of_branches, key=total_hbm_bytes)
        costs_of_average_layer: list[InstructionCost] = []
        for fraction_of_layers, costs_of_branch in zip(
            self.fractions_of_layers_in_branches, costs_of_branches, strict=True
        ):
            costs_of_average_layer += [
                instruction_cost.times(fraction_of_layers) for instruction_cost in costs_of_branch
            ]
        return costs_of_average_layer

    def _iterations(self, loop: Instruction) -> int:
        """Returns the iteration count of a loop that counts from 0 up to a constant."""
        condition_instructions = self.instructions_by_computation_name[loop.named("condition")]
        comparison_instruction = condition_instructions[-1]
        constant_lines = [
            instruction.line
            for instruction in condition_instructions
            if instruction.opcode == "constant"
        ]
        assert "direction=LT" in comparison_instruction.line and len(constant_lines) == 1, (
            condition_instructions
        )
        iteration_count_match = re.search(r"constant\((\d+)\)", constant_lines[0])
        assert iteration_count_match, constant_lines
        return int(iteration_count_match[1])

    def _keys_of_started_collectives(self, instruction: Instruction) -> list[str]:
        """Returns a key for each collective that an instruction starts but does not await.

        `_keys_of_awaited_collectives` returns the same key for the instruction that awaits the
        collective.

        Args:
            instruction: Any instruction.

        Returns:
            The channel (see `Instruction.channel`) of each collective that the instruction calls,
            such as the collective in a fusion. If the instruction itself is the collective, such as
            an all-gather-start, the key is the name of the instruction instead, because several
            such collectives with the same channel id may be in flight at a time, for example one
            for each direction of a ring.
        """
        is_start = instruction.opcode.endswith("-start")
        if instruction.is_collective and is_start:
            return [instruction.name]
        executed_instructions = self._executed_instructions(instruction)
        if is_start or any(
            "AsyncCollectiveStart" in executed_instruction.line
            for executed_instruction in executed_instructions
        ):
            return [
                executed_instruction.channel
                for executed_instruction in executed_instructions
                if executed_instruction.is_collective
            ]
        return []

    def _keys_of_awaited_collectives(self, instruction: Instruction) -> list[str]:
        """Returns a key for each asynchronous collective that an instruction awaits.

        `_keys_of_started_collectives` describes the keys.
        """
        if instruction.opcode.endswith("-done"):
            return self._keys_of_started_collectives(
                self.instruction_by_name[instruction.operand_names[0]]
            )
        executed_instructions = self._executed_instructions(instruction)
        if any(
            "AsyncCollectiveDone" in executed_instruction.line
            for executed_instruction in executed_instructions
        ):
            return [
                executed_instruction.channel
                for executed_instruction in executed_instructions
                if executed_instruction.is_collective
            ]
        return []

    def _cost(
        self, instruction: Instruction, counted_collective_keys: Collection[str]
    ) -> InstructionCost:
        """Returns the cost of an instruction.

        All bytes of an asynchronous collective count for the instruction that starts it.

        Args:
            instruction: The instruction, which is no loop, call or conditional.
            counted_collective_keys: The keys (see `_keys_of_started_collectives`) of asynchronous
                collectives that have started before, so their bytes have already been counted.
        """
        instruction_kind = self.kind(instruction)
        executed_instructions = self._executed_instructions(instruction)
        collectives = [
            executed_instruction
            for executed_instruction in executed_instructions
            if executed_instruction.is_collective
        ]
        uncounted_collectives = [
            collective
            for collective in collectives
            if collective.channel not in counted_collective_keys
        ]
        names_of_counted_collectives = frozenset(
            collective.name for collective in collectives if collective not in uncounted_collectives
        )
        num_bytes_moved_by_kernel = (
            self._bytes_of_kernel(instruction) if instruction_kind == "kernel" else None
        )
        if instruction.opcode.endswith("-done"):
            moved_hbm_bytes = self._bytes_of_copy(instruction)
        elif instruction.opcode.endswith("-start") and not uncounted_collectives:
            moved_hbm_bytes = 0
        elif num_bytes_moved_by_kernel is not None:
            moved_hbm_bytes = num_bytes_moved_by_kernel
        else:
            num_read_bytes = self._bytes_read(instruction, names_of_counted_collectives)
            moved_hbm_bytes = num_read_bytes + self._bytes_written(instruction)
        sent_bytes = sum(
            _bytes_sent(collective, is_fused=collective is not instruction)
            for collective in uncounted_collectives
        )
        mesh_axes_of_collectives = {
            mesh_axis
            for collective in uncounted_collectives
            for mesh_axis in self._mesh_axes(collective)
        }
        return InstructionCost(
            instruction_kind,
            instruction.jax_operation_name,
            moved_hbm_bytes,
            sent_bytes,
            is_overlapped=sent_bytes > 0 and instruction_kind == "product",
            mesh_axes=tuple(
                mesh_axis
                for mesh_axis in self.size_by_mesh_axis
                if mesh_axis in mesh_axes_of_collectives
            ),
        )

    def _bytes_of_kernel(self, kernel: Instruction) -> int | None:
        """Returns the bytes of HBM that a Pallas kernel reads and writes.

        They depend on how often the kernel reads and writes each of its arrays.

        Args:
            kernel: The instruction that calls the kernel.

        Returns:
            The number of bytes. None for a kernel that the `KernelAccessCounter` function of this
            object does not know. For such a kernel, the caller counts each operand and the result
            once, as for other instructions.
        """
        result_type_texts_of_operands = [
            self.instruction_by_name[operand_name].result_type_text
            for operand_name in kernel.operand_names
        ]
        # An operand or the result of the kernel may be no array, but for example a token of XLA,
        # which determines the order of side effects. ARRAY then matches nothing in its text.
        kernel_array_matches: list[re.Match[str]] = []
        for result_type_text in (*result_type_texts_of_operands, kernel.result_type_text):
            if array_match := ARRAY.search(result_type_text):
                kernel_array_matches.append(array_match)
        kernel_name = kernel.name.strip("%").partition(".")[0]
        # For each operand, how often the kernel reads it, then how often it writes the result.
        access_counts_of_arrays = self._count_kernel_accesses(
            kernel_name, [_shape(array_match) for array_match in kernel_array_matches]
        )
        if access_counts_of_arrays is None:
            return None
        num_transferred_bytes = 0.0
        for array_match, access_count in zip(
            kernel_array_matches, access_counts_of_arrays, strict=True
        ):
            num_transferred_bytes += _padded_hbm_bytes(array_match) * access_count
        return round(num_transferred_bytes)

    def _mesh_axes(self, collective: Instruction) -> list[str]:
        """Returns the mesh axes along which a collective communicates.

        They are the axes on which devices that communicate with each other have different
        coordinates.
        """
        if not self.size_by_mesh_axis:
            return []
        # One array for each mesh axis: the coordinate of each device on this axis. The arrays have
        # the shape (device groups of the collective, devices of a device group).
        device_coordinates_of_axes = np.unravel_index(
            device_groups(collective.line), [*self.size_by_mesh_axis.values()]
        )
        return [
            mesh_axis
            for mesh_axis, axis_coordinates in zip(
                self.size_by_mesh_axis, device_coordinates_of_axes, strict=True
            )
            if (axis_coordinates != axis_coordinates[:, :1]).any()
        ]

    def _executed_instructions(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instruction and all instructions that it calls directly or indirectly."""
        executed_instructions = [instruction]
        for instruction_of_callee in self.instructions_by_computation_name.get(
            instruction.calls, []
        ):
            executed_instructions += self._executed_instructions(instruction_of_callee)
        return executed_instructions

    def kind(self, instruction: Instruction) -> str:
        """Returns the kind of an instruction, which depends on the instructions that it calls.

        Returns:
            The first of the following kinds that applies to the instruction or to an instruction
            that it calls: "product" for a matrix product, "collective" for a collective, "kernel"
            for a call of a Pallas kernel, and "copy" for a copy, a transposition or an asynchronous
            slice. "rest" for all other instructions.
        """
        executed_instructions = self._executed_instructions(instruction)
        opcodes = {executed_instruction.opcode for executed_instruction in executed_instructions}
        if opcodes & {"convolution", "dot"}:
            return "product"
        if any(
            executed_instruction.is_collective for executed_instruction in executed_instructions
        ):
            return "collective"
        if "tpu_custom_call" in instruction.line:
            return "kernel"
        return "copy" if opcodes & {"copy", "transpose", "copy-done", "slice-done"} else "rest"

    def _bytes_read(self, instruction: Instruction, counted_names: frozenset[str]) -> int:
        """Returns the bytes of HBM that an instruction reads.

        An array that is an operand twice is read once.

        Args:
            instruction: Any instruction.
            counted_names: The names of asynchronous collectives whose bytes are already counted for
                the instructions that start these collectives. The bytes that a collective with one
                of these names reads are not counted again.
        """
        num_read_bytes = 0
        for operand_index, operand_name in enumerate(instruction.operand_names):
            array_match = ARRAY.match(self.instruction_by_name[operand_name].result_type_text)
            if array_match and operand_name not in instruction.operand_names[:operand_index]:
                operand_bytes = _padded_hbm_bytes(array_match)
                num_read_bytes += self._operand_bytes_read(
                    instruction, operand_index, operand_bytes, [], counted_names
                )
        return num_read_bytes

    def _operand_bytes_read(
        self,
        instruction: Instruction,
        position: int,
        operand_bytes: int,
        siblings: list[Instruction],
        counted_names: frozenset[str],
    ) -> int:
        """Returns the bytes that an instruction reads of one operand.

        They may be fewer than the bytes of the operand, for example if the instruction slices it.

        Args:
            instruction: The instruction.
            position: The index of the operand in the instruction's operands, from 0.
            operand_bytes: The bytes of the operand.
            siblings: All instructions of the fusion that contains this one. Empty outside fusions.
            counted_names: The names of asynchronous collectives whose bytes are already counted for
                the instructions that start these collectives. A collective with one of these names
                reads 0 bytes.
        """
        opcode = instruction.opcode
        if instruction.name in counted_names or opcode == "tuple":
            return 0
        if "AsyncCollective" in instruction.line:
            return 0
        if opcode in ("dynamic-slice", "slice", "gather") and position == 0:
            return min(operand_bytes, _unpadded_bytes(instruction.result_type_text))
        if opcode == "dynamic-update-slice" and position == 0:
            return 0
        # A bitcast, a call or a fusion does not read its operand itself. Other instructions read
        # the operand, and name it by an alias. For a bitcast, the alias is the name of the bitcast.
        # For a call or a fusion, the alias is the name of a parameter of the computation that is
        # called. An exception is a bitcast that is the result (ROOT) of a fusion: no other
        # instruction of the fusion uses this bitcast, so all bytes of its operand count as read.
        if opcode == "bitcast" and "ROOT" not in instruction.line:
            candidate_reader_instructions = siblings
            operand_alias = instruction.name
        elif instruction.calls:
            candidate_reader_instructions = self.instructions_by_computation_name[instruction.calls]
            operand_alias = next(
                instruction_of_callee.name
                for instruction_of_callee in candidate_reader_instructions
                if f" parameter({position})" in instruction_of_callee.line
            )
        else:
            return operand_bytes
        num_read_bytes = 0
        for candidate_reader in candidate_reader_instructions:
            for operand_index_in_reader, operand_name in enumerate(candidate_reader.operand_names):
                if operand_name == operand_alias:
                    num_read_bytes += self._operand_bytes_read(
                        candidate_reader,
                        operand_index_in_reader,
                        operand_bytes,
                        candidate_reader_instructions,
                        counted_names,
                    )
        return min(operand_bytes, num_read_bytes)

    def _bytes_written(self, instruction: Instruction) -> int:
        """Returns the bytes of HBM that an instruction writes.

        A result that aliases an operand is not written. An update in place writes only the slice
        that it updates.
        """
        aliasing_match = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", instruction.line)
        # The indices of the results that use the memory of an operand, as text. For example,
        # "{1}: (0, {})" in the instruction means that result 1 of its tuple of results uses the
        # memory of operand 0. The index is "" if the result is no tuple.
        aliased_result_index_texts = (
            re.findall(r"\{(\d*)\}: ", aliasing_match[1]) if aliasing_match else []
        )
        if "" in aliased_result_index_texts:
            return 0
        result_array_matches = [*ARRAY.finditer(instruction.result_type_text)]
        if instruction.opcode in ("all-gather-start", "collective-permute-start"):
            # The result of an all-gather-start or collective-permute-start begins with its
            # operands, which are not written.
            result_array_matches = result_array_matches[len(instruction.operand_names) :]
        num_written_bytes = 0
        for result_index, result_array_match in enumerate(result_array_matches):
            if str(result_index) not in aliased_result_index_texts:
                num_written_bytes += _padded_hbm_bytes(result_array_match)
        for executed_instruction in self._executed_instructions(instruction):
            if executed_instruction.opcode == "dynamic-update-slice":
                update_instruction = self.instruction_by_name[executed_instruction.operand_names[1]]
                num_written_bytes -= _unpadded_bytes(
                    executed_instruction.result_type_text
                ) - _unpadded_bytes(update_instruction.result_type_text)
        return max(num_written_bytes, 0)

    def _bytes_of_copy(self, done_instruction: Instruction) -> int:
        """Returns the bytes of HBM that an asynchronous copy reads and writes.

        Args:
            done_instruction: The instruction that ends the copy. If it ends a collective instead,
                the result is 0, because the bytes of a collective count for the instruction that
                starts it.
        """
        start_instruction = self.instruction_by_name[done_instruction.operand_names[0]]
        if self._keys_of_started_collectives(start_instruction):
            return 0
        source_instruction = self.instruction_by_name[start_instruction.operand_names[0]]
        num_arrays_in_hbm = sum(
            OTHER_MEMORY not in instruction.result_type_text
            for instruction in (done_instruction, source_instruction)
        )
        return _unpadded_bytes(done_instruction.result_type_text) * num_arrays_in_hbm


def total_hbm_bytes(instruction_costs: Sequence[InstructionCost]) -> int:
    """Returns the bytes of HBM that some instructions read and write together."""
    return sum(instruction_cost.moved_hbm_bytes for instruction_cost in instruction_costs)


def _bytes_sent(collective: Instruction, is_fused: bool) -> int:
    """Returns the bytes that each chip sends in a collective.

    Args:
        collective: The collective.
        is_fused: Whether the collective is inside a fusion. There, an all-reduce is followed by a
            slice, so it sends only as much as a reduce-scatter.
    """
    opcode = collective.opcode
    devices_per_group = device_groups(collective.line).shape[1]
    result_array_matches = [*ARRAY.finditer(collective.result_type_text)]
    if opcode in ("all-gather-start", "collective-permute-start"):
        # The result of an all-gather-start or collective-permute-start consists of the operands,
        # one received array for each operand, and sometimes synchronisation flags. Only the
        # received arrays count.
        num_operands = len(collective.operand_names)
        result_array_matches = result_array_matches[num_operands : 2 * num_operands]
    result_bytes = sum(
        _bytes_of_elements(result_array_match) for result_array_match in result_array_matches
    )
    if opcode.startswith("collective-permute"):
        return result_bytes
    bytes_of_all_parts = result_bytes
    if opcode.startswith("all-reduce") and not is_fused:
        # An all-reduce is a reduce-scatter and an all-gather, each of which sends as many bytes.
        bytes_of_all_parts *= 2
    if opcode.startswith("reduce-scatter"):
        # The result is only the part of the reduced array that belongs to one device.
        bytes_of_all_parts *= devices_per_group
    # The array has one part for each device of a device group. A device sends all parts but one.
    return round(bytes_of_all_parts * (devices_per_group - 1) / devices_per_group)


def _instructions(body: str) -> list[Instruction]:
    """Parses the text between the braces of a computation.

    Each instruction begins with an indented line. It may have further lines without indentation,
    because attributes of kernels contain line breaks.
    """
    parsed_instructions = []
    for instruction_text in re.split(r"\n(?=  )", body):
        instruction_match = re.match(
            r"  (?:ROOT )?(%[\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(?:,|$)", instruction_text
        )
        if instruction_match:
            operand_names = re.findall(r"%[\w.-]+", instruction_match[4])
            parsed_instructions.append(
                Instruction(
                    instruction_match[1],
                    instruction_match[2],
                    instruction_match[3],
                    operand_names,
                    instruction_text,
                )
            )
    return parsed_instructions


def _padded_hbm_bytes(array_match: re.Match[str]) -> int:
    """Returns the bytes of an array in HBM, padded to the tiles of its minor dimensions.

    Args:
        array_match: A match of the pattern ARRAY in the text of the program.

    Returns:
        The number of bytes. 0 for an array in another memory.
    """
    _, _, axis_order_text, tiling_text = array_match.groups(default="")
    if OTHER_MEMORY in tiling_text:
        return 0
    padded_shape = _shape(array_match)
    tile_match = re.match(r"T\(([\d,]+)\)", tiling_text)
    if tile_match and axis_order_text:
        axes_minor_to_major = [int(axis_text) for axis_text in axis_order_text.split(",")]
        tile_sizes = [int(size_text) for size_text in tile_match[1].split(",")]
        for axis, tile_size in zip(axes_minor_to_major, reversed(tile_sizes), strict=False):
            padded_shape[axis] = -(-padded_shape[axis] // tile_size) * tile_size
    return math.prod(padded_shape) * _bits(array_match) // 8


def _bytes_of_elements(array_match: re.Match[str]) -> int:
    """Returns the number of bytes of an array's elements, without the padding between them.

    The array may be in any memory space, such as HBM or fast on-chip memory.

    Args:
        array_match: A match of the pattern ARRAY in the text of the program.
    """
    return math.prod(_shape(array_match)) * _bits(array_match) // 8


def _bits(array_match: re.Match[str]) -> int:
    """Returns the number of bits of an element of an array, such as 16 for the dtype "bf16".

    Args:
        array_match: A match of the pattern ARRAY in the text of the program.
    """
    dtype_name = array_match[1]
    return 8 if dtype_name == "pred" else int(re.sub(r"\D", "", dtype_name))


def _shape(array_match: re.Match[str]) -> list[int]:
    return [int(size_text) for size_text in array_match[2].split(",") if size_text]


def _unpadded_bytes(result_type_text: str) -> int:
    """Returns the size of the first array in an instruction's result, without padding.

    The array may be in any memory space, such as HBM or fast on-chip memory.

    Args:
        result_type_text: The text of the result (see `Instruction.result_type_text`).

    Returns:
        The size in bytes. 0 if the result contains no array.
    """
    first_array_match = ARRAY.search(result_type_text)
    return _bytes_of_elements(first_array_match) if first_array_match else 0


def device_groups(line: str) -> np.ndarray:
    """Returns the groups of devices within which a collective communicates.

    XLA writes the groups in three ways: as lists of device numbers, as a reshaped and transposed
    range of numbers, or as the axes of a mesh.

    Args:
        line: The text of the collective, as in `Instruction.line`.

    Returns:
        The device numbers (device groups, devices of a device group), int64.
    """

    def numbers_in(text: str) -> list[int]:
        return [int(number_text) for number_text in re.findall(r"\d+", text)]

    def iota_device_ids(shape: list[int], axis_order_text: str | None) -> np.ndarray:
        """Returns the device numbers 0, 1, 2, ... as an array with permuted axes.

        The text of a compiled program describes such an array (an iota) by its shape and the order
        of its axes, such as "[4,2]T(1,0)".

        Args:
            shape: The shape of the array before its axes are permuted.
            axis_order_text: The order of the axes, as numbers separated by commas. None to keep
                their order.
        """
        device_ids = np.arange(math.prod(shape)).reshape(shape)
        if not axis_order_text:
            return device_ids
        return device_ids.transpose(numbers_in(axis_order_text))

    match_of_listed_groups = re.search(
        r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line
    )
    if match_of_listed_groups:
        device_group_texts = match_of_listed_groups[1].split("},{")
        return np.array([numbers_in(device_group_text) for device_group_text in device_group_texts])
    iota_pattern = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    match_of_iota_groups = re.search(rf"replica_groups=\[([\d,]+)\]<={iota_pattern}", line)
    if match_of_iota_groups:
        device_ids = iota_device_ids(numbers_in(match_of_iota_groups[2]), match_of_iota_groups[3])
        return device_ids.reshape(numbers_in(match_of_iota_groups[1]))
    device_ids_pattern = rf"(?:, device_ids=\({iota_pattern}\))?"
    match_of_mesh_groups = re.search(
        rf"replica_groups=mesh\[(.*?)\]{device_ids_pattern} \{{([^:]*?)\}}", line
    )
    assert match_of_mesh_groups, line
    mesh_axis_names = re.findall(r"'(\w+)'", match_of_mesh_groups[1])
    mesh_shape = numbers_in(re.sub(r"'\w+'", "", match_of_mesh_groups[1]))
    iota_shape = numbers_in(match_of_mesh_groups[2]) if match_of_mesh_groups[2] else mesh_shape
    device_mesh = iota_device_ids(iota_shape, match_of_mesh_groups[3]).reshape(mesh_shape)
    # The axes of the mesh on which devices of the same device group have different coordinates.
    # These axes are moved to the end of the array, so that a reshape can merge them into one axis.
    group_axis_indices = [
        mesh_axis_names.index(mesh_axis_name)
        for mesh_axis_name in re.findall(r"'(\w+)'", match_of_mesh_groups[4])
    ]
    devices_per_group = math.prod(mesh_shape[axis_index] for axis_index in group_axis_indices)
    device_mesh = np.moveaxis(device_mesh, group_axis_indices, range(-len(group_axis_indices), 0))
    return device_mesh.reshape(-1, devices_per_group)
