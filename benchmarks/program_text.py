"""What a compiled program moves, read from its text: bytes of HBM, and bytes sent between chips.

`ProgramText` knows the text of programs that XLA compiled for TPUs. Every instruction's reads and
writes of HBM count with the padding of their layout; what stays in a chip's fast memory counts
nothing. The text does not say what a Pallas kernel reads and writes of its operands and results:
`Times` does. step_plan.py says what the bytes mean.
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
NOTHING = "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all"
NO_WORK = re.compile(r'custom_call_target="(\w*Bitcast|AllocateBuffer|AssumeGather\w*)"')

# (a kernel's name, the shapes of its operands and of its result) -> how often it reads each operand
# and writes the result, or None for a kernel that does so once.
Times = Callable[[str, list[list[int]]], list[float] | None]


class Instruction(NamedTuple):
    """One line of a computation: `name = result opcode(operands), ...`."""

    name: str
    result: str
    opcode: str
    operands: list[str]
    line: str

    @property
    def calls(self) -> str:
        """Returns the computation that it runs; "" if it is no fusion and no call."""
        return self.named("calls") or (self.named("to_apply") if self.opcode == "call" else "")

    def named(self, attribute: str) -> str:
        """Returns the computation that is this attribute, or ""."""
        found = re.search(rf"\b{attribute}=(%[\w.-]+)", self.line)
        return found[1] if found else ""

    @property
    def branches(self) -> list[str]:
        """Returns those of which a conditional runs one, in the order of their numbers."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.line)
        if listed:
            return re.findall(r"%[\w.-]+", listed[1])
        either = self.named("false_computation"), self.named("true_computation")
        return [name for name in either if name]

    @property
    def source(self) -> str:
        """Returns its module or operation: the last parts of its name in JAX."""
        found = re.search(r'op_name="([^"]*)"', self.line)
        return "/".join(found[1].split("/")[-3:]) if found else ""

    @property
    def is_collective(self) -> bool:
        return COLLECTIVE.search(f" {self.opcode}(") is not None

    @property
    def channel(self) -> str:
        """Returns what the parts of one asynchronous collective have in common."""
        return self.line.partition("channel_id=")[2].partition(",")[0] or self.name


class Move(NamedTuple):
    """What one instruction moves, in bytes of one chip.

    hidden: whether products run while it sends: the collective is asynchronous and they are between
    its start and its end, or it is part of a product. axes: the mesh axes that it sends along.
    flops: the operations of a product, or of the products beside a hidden collective, without those
    of Pallas kernels.
    """

    kind: str  # product, kernel, collective, copy or rest
    name: str
    source: str
    hbm: int
    sent: int = 0
    hidden: bool = False
    axes: tuple[str, ...] = ()
    flops: float = 0.0

    def times(self, count: float) -> "Move":
        hbm, sent, flops = (round(x * count) for x in (self.hbm, self.sent, self.flops))
        return self._replace(hbm=hbm, sent=sent, flops=flops)


class ProgramText:
    """The compiled text as instructions.

    mesh: axis -> size, the first axis being the slowest. shares: in models with several types of
    layers, the share of the loop's layers that each type has, in the order of the branches.
    """

    def __init__(
        self,
        text: str,
        mesh: Mapping[str, int] | None = None,
        shares: Sequence[float] = (),
        times: Times = lambda _name, _shapes: None,
    ) -> None:
        end = r"\n\}(?:, execution_thread=\"\w+\")?$"  # v6e has threads of its own for sorting
        found = re.findall(rf"^(?:ENTRY )?(%[\w.-]+) [^\n]*\{{\n(.*?){end}", text, re.M | re.S)
        self.computations = {name: _instructions(body) for name, body in found}
        self.instructions = {i.name: i for inside in self.computations.values() for i in inside}
        self.text, self.mesh, self.shares, self._times = text, dict(mesh or {}), shares, times

    @cached_property
    def entry(self) -> str:
        """Returns the name of the computation that is the whole program."""
        found = re.search(r"^ENTRY (%[\w.-]+) ", self.text, re.M)
        assert found
        return found[1]

    @cached_property
    def body(self) -> str:
        """Returns the name of the computation that is one turn of the loop over layers."""
        loop = r' while\(.*body=(%[\w.-]+).*op_name="[^"]*/layers/[\w.]+\._loop/while"'
        body = re.findall(loop, self.text)
        assert len(body) == 1, body
        return body[0]

    def layer(self) -> list[Instruction]:
        """Returns the instructions of one turn of the loop, in the order in which they run."""
        return self._running(self.body)

    def _running(self, computation: str) -> list[Instruction]:
        inside = self.computations[computation]
        return [i for i in inside if i.opcode not in NOTHING and not NO_WORK.search(i.line)]

    def layer_loop(self) -> list[Instruction]:
        """Returns all instructions of the loop over layers, also inside fusions and branches."""
        pending, seen = [self.body], set()
        found: list[Instruction] = []
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                found += self.computations.get(name, [])
                for instruction in self.computations.get(name, []):
                    pending += [*instruction.branches, instruction.named("body")]
                    pending += [instruction.calls, instruction.named("to_apply")]
        return found

    def moves(self, computation: str, around: Collection[str] = ()) -> list[Move]:
        """Returns the moves of one run of this computation, in their order.

        A loop counts with all its turns. Branches for types of layers count by their shares; of
        other branches, only the one that moves most counts. around: channels that send while the
        computation runs, which are counted where they start.
        """
        found: list[Move] = []
        in_flight: dict[str, int] = {}  # channel -> place in `found`
        for each in self._running(computation):
            counted = {*around, *in_flight}
            own = self._nested(computation, each, counted)
            if own is None:
                own = [self._move(each, counted)]
                ended = self._ended(each)
                in_flight |= {channel: len(found) for channel in self._begun(each)}
                in_flight = {k: place for k, place in in_flight.items() if k not in ended}
            if any(move.kind in ("product", "kernel") for move in own):
                for place in in_flight.values():
                    flops = found[place].flops + sum(move.flops for move in own)
                    found[place] = found[place]._replace(hidden=True, flops=flops)
            found += own
        return [move for move in found if move.hbm or move.sent]

    def _nested(
        self, computation: str, instruction: Instruction, around: Collection[str]
    ) -> list[Move] | None:
        """Returns the moves of an instruction that runs others in turn; None if it does not."""
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
        """Returns how often a loop runs that counts from 0 to less than a constant."""
        condition = self.computations[loop.named("condition")]
        compare, limits = condition[-1], [i.line for i in condition if i.opcode == "constant"]
        assert "direction=LT" in compare.line and len(limits) == 1, condition
        found = re.search(r"constant\((\d+)\)", limits[0])
        assert found, limits
        return int(found[1])

    def _begun(self, instruction: Instruction) -> list[str]:
        """Returns the channels on which it starts to send, without waiting for the end.

        A collective that is no part of a fusion is its own channel: several may be under way that
        have one number, such as those in the two directions of a ring.
        """
        if instruction.is_collective and instruction.opcode.endswith("-start"):
            return [instruction.name]
        inside = self._inside(instruction)
        begins = instruction.opcode.endswith("-start")
        begins |= any("AsyncCollectiveStart" in inner.line for inner in inside)
        return [inner.channel for inner in inside if inner.is_collective and begins]

    def _ended(self, instruction: Instruction) -> list[str]:
        """Returns the channels on which it waits until all has arrived."""
        if instruction.opcode.endswith("-done"):
            return self._begun(self.instructions[instruction.operands[0]])
        inside = self._inside(instruction)
        ends = any("AsyncCollectiveDone" in inner.line for inner in inside)
        return [inner.channel for inner in inside if inner.is_collective and ends]

    def _move(self, each: Instruction, counted: Collection[str]) -> Move:
        """Returns what it moves; an asynchronous collective moves everything at its start."""
        kind, inside = self.kind(each), self._inside(each)
        collectives = [inner for inner in inside if inner.is_collective]
        sending = [inner for inner in collectives if inner.channel not in counted]
        passing = frozenset(inner.name for inner in collectives if inner not in sending)
        by_kernel = self._moved_by_kernel(each) if kind == "kernel" else None
        if each.opcode.endswith("-done"):
            hbm = self._copied(each)
        elif each.opcode.endswith("-start") and not sending:
            hbm = 0
        elif by_kernel is not None:
            hbm = by_kernel
        else:
            hbm = self._read(each, passing) + self._written(each)
        sent = sum(_sent(inner, alone=inner is each) for inner in sending)
        along = {axis for inner in sending for axis in self._axes(inner)}
        axes = tuple(axis for axis in self.mesh if axis in along)
        flops = sum(self._flops(inner) for inner in inside)
        hidden = sent > 0 and kind == "product"
        return Move(kind, each.name, each.source, hbm, sent, hidden, axes, flops)

    def _moved_by_kernel(self, kernel: Instruction) -> int | None:
        """Returns the bytes that a Pallas kernel reads and writes, if `Times` knows it."""
        operands = [self.instructions[name].result for name in kernel.operands]
        arrays = [ARRAY.search(result) for result in (*operands, kernel.result)]
        found = [array for array in arrays if array]
        times = self._times(kernel.name.strip("%").partition(".")[0], [_shape(x) for x in found])
        if times is None:
            return None
        return round(sum(_bytes(x) * each for x, each in zip(found, times, strict=True)))

    def _flops(self, product: Instruction) -> float:
        """Returns 2 m k n for a product; with an axis of b batches, b**0.5 times too many.

        The sizes of its arrays, multiplied, are (m k n)**2.
        """
        if product.opcode not in ("convolution", "dot"):
            return 0.0
        arrays = product.result, *(self.instructions[name].result for name in product.operands)
        return 2 * math.prod(_count(array) for array in arrays) ** 0.5

    def _axes(self, collective: Instruction) -> list[str]:
        """Returns the mesh axes along which the members of a group differ."""
        if not self.mesh:
            return []
        places = np.unravel_index(groups(collective.line), [*self.mesh.values()])
        differ = [bool((place != place[:, :1]).any()) for place in places]
        return [axis for axis, along in zip(self.mesh, differ, strict=True) if along]

    def _inside(self, instruction: Instruction) -> list[Instruction]:
        """Returns it and all that it calls."""
        found = [instruction]
        for inner in self.computations.get(instruction.calls, []):
            found += self._inside(inner)
        return found

    def kind(self, instruction: Instruction) -> str:
        """Returns which of the kinds of `Move` an instruction is, by what it calls."""
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
        """Returns the bytes that it reads; an operand that it takes twice is read once."""
        total = 0
        for place, name in enumerate(instruction.operands):
            found = ARRAY.match(self.instructions[name].result)
            if found and name not in instruction.operands[:place]:
                total += self._taken(instruction, place, _bytes(found), [], passing)
        return total

    def _taken(
        self,
        user: Instruction,
        place: int,
        size: int,
        beside: list[Instruction],
        passing: frozenset[str],
    ) -> int:
        """Returns the bytes that it reads of its operand number `place`, of this size.

        beside: the computation that it is in; passing: collectives that have been counted.
        """
        if user.name in passing or user.opcode == "tuple" or "AsyncCollective" in user.line:
            return 0
        if user.opcode in ("dynamic-slice", "slice", "gather") and place == 0:
            return min(size, _size_of(user.result))
        if user.opcode == "dynamic-update-slice" and place == 0:
            return 0
        if user.opcode == "bitcast" and "ROOT" not in user.line:
            name, inner = user.name, beside
        elif user.calls:
            inner = self.computations[user.calls]
            name = next(i.name for i in inner if f" parameter({place})" in i.line)
        else:
            return size
        users = [(i, n) for i in inner for n, operand in enumerate(i.operands) if operand == name]
        return min(size, sum(self._taken(i, n, size, inner, passing) for i, n in users))

    def _written(self, instruction: Instruction) -> int:
        """Returns the bytes of its new results; an update in place writes what is new."""
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
        """Returns the bytes of HBM that an asynchronous copy reads and writes."""
        start = self.instructions[done.operands[0]]
        if self._begun(start):  # a collective
            return 0
        source = self.instructions[start.operands[0]]
        return _size_of(done.result) * sum("S(" not in place.result for place in (done, source))


def _sent(collective: Instruction, alone: bool) -> int:
    """Returns the bytes that a chip sends. An all-reduce inside a fusion is sliced: it scatters."""
    parts, kind = groups(collective.line).shape[1], collective.opcode
    arrays = [*ARRAY.finditer(collective.result)]
    if kind in ("all-gather-start", "collective-permute-start"):
        arrays = arrays[len(collective.operands) :][: len(collective.operands)]
    size = sum(_bytes(found, everywhere=True) for found in arrays)
    if kind.startswith("collective-permute"):
        return size
    factor = 2 if kind.startswith("all-reduce") and alone else 1
    if kind.startswith("reduce-scatter"):
        factor = parts
    return round(size * factor * (parts - 1) / parts)


def _instructions(body: str) -> list[Instruction]:
    """Reads a computation. Kernels' attributes contain line ends; instructions are indented."""
    found = []
    for line in re.split(r"\n(?=  )", body):
        match = re.match(r"  (?:ROOT )?(%[\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(?:,|$)", line)
        if match:
            operands = re.findall(r"%[\w.-]+", match[4])
            found.append(Instruction(match[1], match[2], match[3], operands, line))
    return found


def _bytes(found: re.Match[str], everywhere: bool = False) -> int:
    """Counts an array's HBM bytes, padded to tiles of its two minor dimensions."""
    kind, _, order, tiling = found.groups()
    if not everywhere and "S(" in (tiling or ""):  # another memory than HBM
        return 0
    shape = _shape(found)
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
    """Returns how many numbers one array has."""
    found = ARRAY.search(result)
    return math.prod(_shape(found)) if found else 0


def _size_of(result: str) -> int:
    """Returns the bytes of one array, whatever the memory that it is in."""
    found = ARRAY.search(result)
    return _bytes(found, everywhere=True) if found else 0


def groups(line: str) -> np.ndarray:
    """Returns which devices talk, a group per row, in whichever way XLA writes them."""

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
