"""Reads from a compiled program's text how many bytes it moves in HBM and between chips.

`ProgramText` parses the text of programs that XLA compiled for TPUs. The reads and writes of HBM by
an instruction include the padding of its arrays' layouts; arrays in a chip's fast memory do not
count. The text does not show how often a Pallas kernel reads its operands and writes its result, so
a function (`Times`) has to know it. step_plan.py turns the bytes into the cost of a step.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

COLLECTIVE = re.compile(
    r" ((?:ragged-)?all-to-all|all-reduce|all-gather|reduce-scatter|collective-\w+)(?:-start)?\("
)
ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
# Opcodes and custom calls that move no bytes.
NOTHING = "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all"
NO_WORK = re.compile(r'custom_call_target="(\w*Bitcast|AllocateBuffer|AssumeGather\w*)"')

# A function that takes the name of a kernel, and the shapes of its operands and, last, of its
# result. It returns how often the kernel reads each operand and, last, writes the result, or None
# for a kernel that does each of these once.
Times = Callable[[str, list[list[int]]], list[float] | None]


class Instruction(NamedTuple):
    """One line of a computation: `name = result opcode(operands), ...`.

    Attributes:
        name: The name of the instruction, with its leading %.
        result: The dtype, shape and layout of its result, or a tuple of these.
        opcode: Its opcode, such as "fusion".
        operands: The names of the instructions that make its operands.
        line: The whole line, with its attributes.
    """

    name: str
    result: str
    opcode: str
    operands: list[str]
    line: str

    @property
    def calls(self) -> str:
        """Returns the name of the computation that a fusion or call runs; "" for other opcodes."""
        return self.named("calls") or (self.named("to_apply") if self.opcode == "call" else "")

    def named(self, attribute: str) -> str:
        """Returns the name of the computation in this attribute; "" if it is missing."""
        match = re.search(rf"\b{attribute}=(%[\w.-]+)", self.line)
        return match[1] if match else ""

    @property
    def branches(self) -> list[str]:
        """Returns the computations of which a conditional runs one, in the order of its index."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.line)
        if listed:
            return re.findall(r"%[\w.-]+", listed[1])
        either = self.named("false_computation"), self.named("true_computation")
        return [name for name in either if name]

    @property
    def source(self) -> str:
        """Returns the last three parts of the operation's name in JAX; "" if it has none."""
        match = re.search(r'op_name="([^"]*)"', self.line)
        return "/".join(match[1].split("/")[-3:]) if match else ""

    @property
    def is_collective(self) -> bool:
        return COLLECTIVE.search(f" {self.opcode}(") is not None

    @property
    def channel(self) -> str:
        """Returns the id that all instructions of one asynchronous collective share.

        It is the name of the instruction if there is no such id.
        """
        return self.line.partition("channel_id=")[2].partition(",")[0] or self.name


class Move(NamedTuple):
    """The bytes that one instruction moves on one chip.

    Attributes:
        kind: "product", "kernel", "collective", "copy" or "rest"; see `ProgramText.kind`.
        name: The name of the instruction.
        source: The operation in JAX; see `Instruction.source`.
        hbm: The bytes of HBM that it reads and writes.
        sent: The bytes that it sends to other chips.
        hidden: Whether products run while it sends: they stand between the start and the end of an
            asynchronous collective, or the collective is part of a product.
        axes: The mesh axes that it sends along.
        flops: The operations of a product, or those of the products that run beside a hidden
            collective; without those of Pallas kernels.
    """

    kind: str
    name: str
    source: str
    hbm: int
    sent: int = 0
    hidden: bool = False
    axes: tuple[str, ...] = ()
    flops: float = 0.0

    def times(self, count: float) -> "Move":
        """Returns the sum of `count` equal moves; `count` may be a fraction."""
        return self._replace(
            hbm=round(self.hbm * count),
            sent=round(self.sent * count),
            flops=round(self.flops * count),
        )


class ProgramText:
    """The instructions of a compiled program.

    Attributes:
        computations: The name of a computation -> its instructions in order.
        instructions: The name of an instruction -> the instruction.
        text: The compiled text.
        mesh: Mesh axis -> size; the number of a device changes slowest along the first axis.
        shares: In models with several types of layers, the share of the layers that each type has,
            in the order of the conditional's branches.
    """

    def __init__(
        self,
        text: str,
        mesh: Mapping[str, int] | None = None,
        shares: Sequence[float] = (),
        times: Times = lambda _name, _shapes: None,
    ) -> None:
        """Parses a program.

        Args:
            text: The compiled text.
            mesh: Mesh axis -> size. None if the axes of collectives do not matter.
            shares: The shares of the types of layers; see the class.
            times: How often kernels read and write their arrays.
        """
        end = r"\n\}(?:, execution_thread=\"\w+\")?$"  # v6e has threads of its own for sorting
        computations = re.findall(
            rf"^(?:ENTRY )?(%[\w.-]+) [^\n]*\{{\n(.*?){end}", text, re.M | re.S
        )
        self.computations = {name: _instructions(body) for name, body in computations}
        self.instructions = {i.name: i for inside in self.computations.values() for i in inside}
        self.text, self.mesh, self.shares, self._times = text, dict(mesh or {}), shares, times

    @cached_property
    def entry(self) -> str:
        """Returns the name of the computation at which the program starts."""
        match = re.search(r"^ENTRY (%[\w.-]+) ", self.text, re.M)
        assert match
        return match[1]

    @cached_property
    def body(self) -> str:
        """Returns the name of the computation that is one iteration of the loop over layers."""
        loop = r' while\(.*body=(%[\w.-]+).*op_name="[^"]*/layers/[\w.]+\._loop/while"'
        body = re.findall(loop, self.text)
        assert len(body) == 1, body
        return body[0]

    def layer(self) -> list[Instruction]:
        """Returns the instructions of one iteration of the loop over layers, in order.

        Instructions that move no bytes, such as bitcasts, are left out.
        """
        return self._running(self.body)

    def _running(self, computation: str) -> list[Instruction]:
        inside = self.computations[computation]
        return [i for i in inside if i.opcode not in NOTHING and not NO_WORK.search(i.line)]

    def layer_loop(self) -> list[Instruction]:
        """Returns all instructions that run in the loop over layers.

        They are the instructions of the loop's body, and of all computations that are called from
        it, directly or indirectly. Each computation is included once.
        """
        pending, seen = [self.body], set()
        instructions: list[Instruction] = []
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                instructions += self.computations.get(name, [])
                for instruction in self.computations.get(name, []):
                    pending += [*instruction.branches, instruction.named("body")]
                    pending += [instruction.calls, instruction.named("to_apply")]
        return instructions

    def moves(self, computation: str, around: Collection[str] = ()) -> list[Move]:
        """Returns the data transfers of one run of a computation, in order.

        Transfers in the body of a loop are multiplied by its iteration count. If a conditional of
        the loop over layers has one branch for each type of layers, the transfers of each branch
        are multiplied by the share of the layers that have its type. Of any other conditional, only
        the branch with the most bytes of HBM counts.

        Args:
            computation: The name of the computation.
            around: The channels (see `Instruction.channel`) of collectives that are in flight while
                the computation runs. Their bytes are not counted here, because they are counted
                where the collectives start.

        Returns:
            A move for each instruction that reads or writes HBM or sends to other chips.
        """
        moves: list[Move] = []
        in_flight: dict[str, int] = {}  # channel -> index of its start in `moves`
        for instruction in self._running(computation):
            counted = {*around, *in_flight}
            own_moves = self._nested(computation, instruction, counted)
            if own_moves is None:
                own_moves = [self._move(instruction, counted)]
                ended = self._ended(instruction)
                in_flight |= {channel: len(moves) for channel in self._begun(instruction)}
                for channel in ended:
                    in_flight.pop(channel, None)
            if any(move.kind in ("product", "kernel") for move in own_moves):
                for index in in_flight.values():
                    flops = moves[index].flops + sum(move.flops for move in own_moves)
                    moves[index] = moves[index]._replace(hidden=True, flops=flops)
            moves += own_moves
        return [move for move in moves if move.hbm or move.sent]

    def _nested(
        self, computation: str, instruction: Instruction, around: Collection[str]
    ) -> list[Move] | None:
        """Returns the data transfers of a loop, call or conditional; None for other instructions.

        Args:
            computation: The name of the computation that contains the instruction.
            instruction: The instruction.
            around: Channels of collectives that are in flight while the instruction runs.
        """
        if instruction.opcode == "while":
            turns = self._turns(instruction)
            return [move.times(turns) for move in self.moves(instruction.named("body"), around)]
        if instruction.opcode == "call":
            return self.moves(instruction.calls, around)
        if instruction.opcode != "conditional":
            return None
        branches = [self.moves(branch, around) for branch in instruction.branches]
        if len(branches) != len(self.shares) or computation != self.body:
            return max(branches, key=lambda moves: sum(move.hbm for move in moves))
        shared = zip(self.shares, branches, strict=True)
        return [move.times(share) for share, moves in shared for move in moves]

    def _turns(self, loop: Instruction) -> int:
        """Returns the iteration count of a loop, which counts from 0 up to a constant."""
        condition = self.computations[loop.named("condition")]
        compare, limits = condition[-1], [i.line for i in condition if i.opcode == "constant"]
        assert "direction=LT" in compare.line and len(limits) == 1, condition
        match = re.search(r"constant\((\d+)\)", limits[0])
        assert match, limits
        return int(match[1])

    def _begun(self, instruction: Instruction) -> list[str]:
        """Returns the channels of the collectives that an instruction starts but does not await.

        The channel of a collective outside fusions is its name, because several collectives with
        the same channel id may be sending at a time, such as those in both directions of a ring.
        """
        if instruction.is_collective and instruction.opcode.endswith("-start"):
            return [instruction.name]
        inside = self._inside(instruction)
        begins = instruction.opcode.endswith("-start")
        begins |= any("AsyncCollectiveStart" in inner.line for inner in inside)
        return [inner.channel for inner in inside if inner.is_collective and begins]

    def _ended(self, instruction: Instruction) -> list[str]:
        """Returns the channels of the asynchronous collectives that an instruction awaits."""
        if instruction.opcode.endswith("-done"):
            return self._begun(self.instructions[instruction.operands[0]])
        inside = self._inside(instruction)
        ends = any("AsyncCollectiveDone" in inner.line for inner in inside)
        return [inner.channel for inner in inside if inner.is_collective and ends]

    def _move(self, instruction: Instruction, counted: Collection[str]) -> Move:
        """Returns the bytes that an instruction moves, and the mesh axes along which it sends.

        All bytes of an asynchronous collective count at its start.

        Args:
            instruction: The instruction, which is no loop, call or conditional.
            counted: The channels (see `Instruction.channel`) of asynchronous collectives that have
                started before, so that their bytes have been counted.
        """
        kind, inside = self.kind(instruction), self._inside(instruction)
        collectives = [inner for inner in inside if inner.is_collective]
        sending = [inner for inner in collectives if inner.channel not in counted]
        passing = frozenset(inner.name for inner in collectives if inner not in sending)
        by_kernel = self._moved_by_kernel(instruction) if kind == "kernel" else None
        if instruction.opcode.endswith("-done"):
            hbm = self._copied(instruction)
        elif instruction.opcode.endswith("-start") and not sending:
            hbm = 0
        elif by_kernel is not None:
            hbm = by_kernel
        else:
            hbm = self._read(instruction, passing) + self._written(instruction)
        sent = sum(_sent(inner, alone=inner is instruction) for inner in sending)
        along = {axis for inner in sending for axis in self._axes(inner)}
        axes = tuple(axis for axis in self.mesh if axis in along)
        flops = sum(self._flops(inner) for inner in inside)
        hidden = sent > 0 and kind == "product"
        return Move(kind, instruction.name, instruction.source, hbm, sent, hidden, axes, flops)

    def _moved_by_kernel(self, kernel: Instruction) -> int | None:
        """Returns the bytes that a Pallas kernel reads and writes; None if `Times` returns None."""
        operands = [self.instructions[name].result for name in kernel.operands]
        matches = [ARRAY.search(result) for result in (*operands, kernel.result)]
        arrays = [match for match in matches if match]
        name = kernel.name.strip("%").partition(".")[0]
        times = self._times(name, [_shape(array) for array in arrays])
        if times is None:
            return None
        pairs = zip(arrays, times, strict=True)
        return round(sum(_bytes(array) * count for array, count in pairs))

    def _flops(self, product: Instruction) -> float:
        """Returns the operations of a product (m, k) x (k, n), 2 m k n; 0 for other instructions.

        The sizes of its three arrays multiply to (m k n)**2. With a batch axis of size b, the
        result is b**0.5 times too large.
        """
        if product.opcode not in ("convolution", "dot"):
            return 0.0
        arrays = product.result, *(self.instructions[name].result for name in product.operands)
        return 2 * math.prod(_count(array) for array in arrays) ** 0.5

    def _axes(self, collective: Instruction) -> list[str]:
        """Returns the mesh axes along which a collective sends.

        They are those along which the coordinates of a group's devices differ.
        """
        if not self.mesh:
            return []
        coordinates = np.unravel_index(groups(collective.line), [*self.mesh.values()])
        by_axis = zip(self.mesh, coordinates, strict=True)
        return [axis for axis, of_axis in by_axis if (of_axis != of_axis[:, :1]).any()]

    def _inside(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instruction itself and all instructions that it calls, nested ones too."""
        instructions = [instruction]
        for inner in self.computations.get(instruction.calls, []):
            instructions += self._inside(inner)
        return instructions

    def kind(self, instruction: Instruction) -> str:
        """Returns the kind of an instruction, which depends on the instructions that it calls.

        Returns:
            "product" if there is a matrix product, else "collective", else "kernel" for a Pallas
            kernel, else "copy" for a copy, transposition or asynchronous slice, else "rest".
        """
        inside = self._inside(instruction)
        opcodes = {inner.opcode for inner in inside}
        if opcodes & {"convolution", "dot"}:
            return "product"
        if any(inner.is_collective for inner in inside):
            return "collective"
        if "tpu_custom_call" in instruction.line:
            return "kernel"
        return "copy" if opcodes & {"copy", "transpose", "copy-done", "slice-done"} else "rest"

    def _read(self, instruction: Instruction, passing: frozenset[str]) -> int:
        """Returns the bytes of HBM that an instruction reads.

        An operand that it takes twice is read once.

        Args:
            instruction: The instruction.
            passing: The names of collectives whose bytes have been counted at their start.
        """
        total = 0
        for position, name in enumerate(instruction.operands):
            array = ARRAY.match(self.instructions[name].result)
            if array and name not in instruction.operands[:position]:
                total += self._taken(instruction, position, _bytes(array), [], passing)
        return total

    def _taken(
        self,
        user: Instruction,
        position: int,
        size: int,
        beside: list[Instruction],
        passing: frozenset[str],
    ) -> int:
        """Returns the bytes that an instruction reads of one operand.

        Args:
            user: The instruction.
            position: The position of the operand.
            size: The bytes of the operand.
            beside: The instructions of the computation that contains `user`; [] outside fusions.
            passing: The names of collectives whose bytes have been counted at their start.
        """
        if user.name in passing or user.opcode == "tuple" or "AsyncCollective" in user.line:
            return 0
        if user.opcode in ("dynamic-slice", "slice", "gather") and position == 0:
            return min(size, _size_of(user.result))
        if user.opcode == "dynamic-update-slice" and position == 0:
            return 0
        if user.opcode == "bitcast" and "ROOT" not in user.line:
            name, inner = user.name, beside
        elif user.calls:
            inner = self.computations[user.calls]
            name = next(i.name for i in inner if f" parameter({position})" in i.line)
        else:
            return size
        users = [(i, n) for i in inner for n, operand in enumerate(i.operands) if operand == name]
        return min(size, sum(self._taken(i, n, size, inner, passing) for i, n in users))

    def _written(self, instruction: Instruction) -> int:
        """Returns the bytes of HBM that an instruction writes.

        A result that aliases an operand is not written, and an update in place writes only the new
        part.
        """
        aliases = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", instruction.line)
        same = re.findall(r"\{(\d*)\}: ", aliases[1]) if aliases else []
        results = [*ARRAY.finditer(instruction.result)]
        if instruction.opcode in ("all-gather-start", "collective-permute-start"):
            results = results[len(instruction.operands) :]
        total = sum(_bytes(x) for n, x in enumerate(results) if str(n) not in same)
        for update in self._inside(instruction):
            if update.opcode == "dynamic-update-slice":
                new = self.instructions[update.operands[1]]
                total -= _size_of(update.result) - _size_of(new.result)
        return 0 if "" in same else max(total, 0)

    def _copied(self, done: Instruction) -> int:
        """Returns the bytes of HBM of an asynchronous copy, which count at its end."""
        start = self.instructions[done.operands[0]]
        if self._begun(start):  # a collective, whose bytes count at its start
            return 0
        source = self.instructions[start.operands[0]]
        in_hbm = sum("S(" not in array.result for array in (done, source))  # S: another memory
        return _size_of(done.result) * in_hbm


def _sent(collective: Instruction, alone: bool) -> int:
    """Returns the bytes that each chip sends in a collective.

    Args:
        collective: The collective.
        alone: Whether it stands outside a fusion. An all-reduce inside a fusion is followed by a
            slice, so it sends only as much as a reduce-scatter.
    """
    parts, kind = groups(collective.line).shape[1], collective.opcode
    arrays = [*ARRAY.finditer(collective.result)]
    if kind in ("all-gather-start", "collective-permute-start"):
        arrays = arrays[len(collective.operands) :][: len(collective.operands)]
    size = sum(_bytes(array, everywhere=True) for array in arrays)
    if kind.startswith("collective-permute"):
        return size
    factor = 2 if kind.startswith("all-reduce") and alone else 1
    if kind.startswith("reduce-scatter"):
        factor = parts
    return round(size * factor * (parts - 1) / parts)


def _instructions(body: str) -> list[Instruction]:
    """Parses the body of a computation.

    An instruction begins at an indented line, because the attributes of kernels contain line ends.
    """
    instructions = []
    for line in re.split(r"\n(?=  )", body):
        match = re.match(r"  (?:ROOT )?(%[\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(?:,|$)", line)
        if match:
            operands = re.findall(r"%[\w.-]+", match[4])
            instructions.append(Instruction(match[1], match[2], match[3], operands, line))
    return instructions


def _bytes(array: re.Match[str], everywhere: bool = False) -> int:
    """Returns the bytes of an array in HBM, padded to the tiles of its minor dimensions.

    Args:
        array: A match of ARRAY.
        everywhere: Whether to return the bytes without padding, whatever the memory. Otherwise an
            array in another memory than HBM has 0 bytes.
    """
    kind, _, order, tiling = array.groups()
    if not everywhere and "S(" in (tiling or ""):  # another memory than HBM
        return 0
    shape = _shape(array)
    tile = re.match(r"T\(([\d,]+)\)", tiling or "")
    if tile and order and not everywhere:
        minor = [int(axis) for axis in order.split(",")]
        for axis, size in zip(minor, reversed(tile[1].split(",")), strict=False):
            shape[axis] = -(-shape[axis] // int(size)) * int(size)
    bits = 8 if kind == "pred" else int(re.sub(r"\D", "", kind))
    return math.prod(shape) * bits // 8


def _shape(array: re.Match[str]) -> list[int]:
    return [int(size) for size in array[2].split(",") if size]


def _count(result: str) -> int:
    """Returns the number of elements of an array; 0 if the result is no array."""
    array = ARRAY.search(result)
    return math.prod(_shape(array)) if array else 0


def _size_of(result: str) -> int:
    """Returns the bytes of an array without padding, whatever the memory that it is in."""
    array = ARRAY.search(result)
    return _bytes(array, everywhere=True) if array else 0


def groups(line: str) -> np.ndarray:
    """Returns the groups of devices in which a collective communicates.

    XLA writes them in three ways: as lists of numbers, as a reshaped range, or by mesh axes.

    Args:
        line: The line of the collective.

    Returns:
        The numbers of devices, (groups, devices of a group).
    """

    def numbers(text: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", text)]

    def iota(shape: list[int], order: str | None) -> np.ndarray:
        ids = np.arange(math.prod(shape)).reshape(shape)
        return ids.transpose(numbers(order)) if order else ids

    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line):
        return np.array([numbers(group) for group in match[1].split("},{")])
    transposed = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if match := re.search(rf"replica_groups=\[([\d,]+)\]<={transposed}", line):
        return iota(numbers(match[2]), match[3]).reshape(numbers(match[1]))
    ids = rf"(?:, device_ids=\({transposed}\))?"
    match = re.search(rf"replica_groups=mesh\[(.*?)\]{ids} \{{([^:]*?)\}}", line)
    assert match, line
    axes, sizes = re.findall(r"'(\w+)'", match[1]), numbers(re.sub(r"'\w+'", "", match[1]))
    of_axes = iota(numbers(match[2]) if match[2] else sizes, match[3]).reshape(sizes)
    within = [axes.index(axis) for axis in re.findall(r"'(\w+)'", match[4])]
    last = np.moveaxis(of_axes, within, range(-len(within), 0))
    return last.reshape(-1, math.prod(sizes[axis] for axis in within))
