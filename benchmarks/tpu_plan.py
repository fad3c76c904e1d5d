"""What the TPU compiler plans for one layer, in bytes, over what a layer needs.

    JAX_PLATFORMS=cpu PYTHONPATH=.venv/libtpu .venv/bin/python -m benchmarks.tpu_plan

Compiles the 7B shape for 64 v5e chips as a run would, without a TPU, and reads the loop over layers
in the compiled text: every instruction's reads and writes of HBM (with the padding of its layout;
what stays in the chip's fast memory counts nothing), and what collectives send. Nothing runs, so
there are no times. The last line is JSON. tests/test_tpu.py reads plans with the same functions.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.experimental import topologies

from activation_extraction.cli.config import parse_args
from activation_extraction.model.family import HookedModel
from activation_extraction.model.forward import build_model
from activation_extraction.model.model_config import QwenConfig
from activation_extraction.run.prepare import model_request
from benchmarks.shapes import SHAPES
from qwen2_jax_with_hooks import FAMILIES

# Nothing opens a TPU here, so the lock that keeps processes from sharing one is not needed.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

QWEN_7B = FAMILIES.config(SHAPES["7B"])
EIGHT = "--layers_to_extract 6 9 12 15 18 21 24 27"
COLLECTIVE = re.compile(
    r" ((?:ragged-)?all-to-all|all-reduce|all-gather|reduce-scatter|collective-\w+)(?:-start)?\("
)
ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
WORTH_A_LINE = 1e6  # bytes


class Instruction(NamedTuple):
    """One line of a computation: `name = result opcode(operands), ...`."""

    name: str
    result: str
    opcode: str
    operands: list[str]
    line: str

    @property
    def calls(self) -> str:
        found = re.search(r"(?:calls|to_apply)=(%[\w.-]+)", self.line)
        return found[1] if found else ""

    @property
    def source(self) -> str:
        """The module or operation that it comes from, the last parts of its name in JAX."""
        found = re.search(r'op_name="([^"]*)"', self.line)
        return "/".join(found[1].split("/")[-3:]) if found else ""


class Move(NamedTuple):
    """What one instruction of the layer loop moves, in bytes of one chip."""

    kind: str  # product, kernel, collective, copy or rest
    name: str
    source: str
    hbm: int
    sent: int


class Plan:
    """The compiled text, as instructions."""

    def __init__(self, text: str) -> None:
        found = re.findall(r"^(?:ENTRY )?(%[\w.-]+) [^\n]*\{\n(.*?)\n\}$", text, re.M | re.S)
        self.computations = {name: _instructions(body) for name, body in found}
        self.text = text

    @cached_property
    def body(self) -> str:
        """The name of the computation that is one turn of the loop over layers."""
        loop = r' while\(.*body=(%[\w.-]+).*op_name="[^"]*/layers/[\w.]+\._loop/while"'
        body = re.findall(loop, self.text)
        assert len(body) == 1, body
        return body[0]

    def layer(self) -> list[Instruction]:
        """The instructions of one turn of the loop, which the chip runs one after the other."""
        passing = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")
        return [i for i in self.computations[self.body] if i.opcode not in passing]

    def layer_loop(self) -> list[Instruction]:
        """The instructions of the loop over layers, those inside fusions and branches included."""
        pending, seen = [self.body], set()
        found: list[Instruction] = []
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                found += self.computations.get(name, [])
                for instruction in self.computations.get(name, []):
                    listed = re.findall(r"branch_computations=\{([^}]*)\}", instruction.line)
                    pending += re.findall(r"%[\w.-]+", " ".join(listed))
                    pending += re.findall(r"(?:calls|body|to_apply)=(%[\w.-]+)", instruction.line)
        return found

    def moves(self) -> Iterator[Move]:
        """Of every instruction of a layer that moves anything."""
        known = {each.name: each for each in self.computations[self.body]}
        for each in self.layer():
            kind = self.kind(each)
            if each.opcode.endswith("-done"):
                hbm = _copied(each, known)
            elif each.opcode.endswith("-start"):
                hbm = 0
            else:
                hbm = self._read(each, known) + self._written(each)
            sent = self._sent(each) if kind == "collective" else 0
            if hbm or sent:
                yield Move(kind, each.name, each.source, hbm, sent)

    def _inside(self, instruction: Instruction) -> list[Instruction]:
        """It and all that it calls."""
        found = [instruction]
        for inner in self.computations.get(instruction.calls, []):
            found += self._inside(inner)
        return found

    def kind(self, instruction: Instruction) -> str:
        """Which of the kinds of `Move` an instruction is, by what it calls."""
        opcodes = {inner.opcode for inner in self._inside(instruction)}
        if any(COLLECTIVE.search(f" {opcode}(") for opcode in opcodes):
            return "collective"
        if opcodes & {"convolution", "dot"}:
            return "product"
        if "tpu_custom_call" in instruction.line:
            return "kernel"
        return "copy" if opcodes & {"copy", "transpose", "copy-done", "slice-done"} else "rest"

    def _sent(self, instruction: Instruction) -> int:
        inner = next(i for i in self._inside(instruction) if COLLECTIVE.search(f" {i.opcode}("))
        parts = groups(inner.line).shape[1]
        scattered = inner is not instruction or inner.opcode.startswith("reduce-scatter")
        factor = 2 if inner.opcode.startswith("all-reduce") and not scattered else 1
        if inner.opcode.startswith("reduce-scatter"):
            factor = parts
        size = sum(_bytes(found, everywhere=True) for found in ARRAY.finditer(inner.result))
        return round(size * factor * (parts - 1) / parts)

    def _read(self, instruction: Instruction, known: dict[str, Instruction]) -> int:
        total = 0
        for place, name in enumerate(dict.fromkeys(instruction.operands)):
            found = ARRAY.search(known[name].result) if name in known else None
            if found and not known[name].result.startswith("("):
                size = _bytes(found)
                total += min(size, self._part_read(instruction.calls, place, size))
        return total

    def _part_read(self, computation: str, place: int, size: int) -> int:
        """Bytes of a parameter that its computation reads: slices read a part of it."""
        inner = self.computations.get(computation, [])
        parameter = next((i.name for i in inner if f" parameter({place})" in i.line), None)
        total = 0
        for user in inner:
            if parameter not in user.operands:
                continue
            if user.opcode == "dynamic-slice":
                total += _size_of(user.result)
            elif user.opcode == "fusion":
                total += self._part_read(user.calls, user.operands.index(parameter), size)
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != parameter:
                return size
        return total if parameter else size

    def _written(self, instruction: Instruction) -> int:
        """An update in place writes what is new."""
        total = sum(_bytes(found) for found in ARRAY.finditer(instruction.result))
        inner = self.computations.get(instruction.calls, [])
        results = {i.name: i.result for i in inner}
        for update in inner:
            if update.opcode == "dynamic-update-slice":
                total -= _size_of(update.result) - _size_of(results[update.operands[1]])
        return total


def _instructions(body: str) -> list[Instruction]:
    """Of one computation. Attributes of kernels contain line ends; instructions are indented."""
    found = []
    for line in re.split(r"\n(?=  )", body):
        match = re.match(r"  (?:ROOT )?(%[\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(?:,|$)", line)
        if match:
            operands = re.findall(r"%[\w.-]+", match[4])
            found.append(Instruction(match[1], match[2], match[3], operands, line))
    return found


def _bytes(found: re.Match[str], everywhere: bool = False) -> int:
    """Of an array as it lies in HBM, padded to tiles of its two minor dimensions."""
    kind, sizes, order, tiling = found.groups()
    if not everywhere and "S(" in (tiling or ""):  # another memory than HBM
        return 0
    shape = [int(size) for size in sizes.split(",") if size]
    tile = re.match(r"T\(([\d,]+)\)", tiling or "")
    if tile and order and not everywhere:
        minor = [int(axis) for axis in order.split(",")]
        for axis, size in zip(minor, reversed(tile[1].split(",")), strict=False):
            shape[axis] = -(-shape[axis] // int(size)) * int(size)
    bits = 8 if kind == "pred" else int(re.sub(r"\D", "", kind))
    return math.prod(shape) * bits // 8


def _size_of(result: str) -> int:
    """Bytes of one array, whatever the memory that it is in."""
    found = ARRAY.search(result)
    return _bytes(found, everywhere=True) if found else 0


def _copied(done: Instruction, known: dict[str, Instruction]) -> int:
    """Bytes that an asynchronous copy reads from HBM and writes there."""
    start = known.get(done.operands[0])
    source = known.get(start.operands[0]) if start else None
    size = _size_of(done.result)
    return size * sum("S(" not in place.result for place in (done, source) if place is not None)


def groups(line: str) -> np.ndarray:
    """Which devices talk: a group per row, from any of the ways in which XLA writes them."""

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
        request = model_request(config)
        model, rows = build_model(family, request, qwen)
    params = {}
    for path, spec in family.weight_table(model).items():
        split = model.layout.sharding(spec.axes, spec.shape)
        params[path] = jax.ShapeDtypeStruct(spec.shape, model.dtype, sharding=split)
    shape = request.rows * rows.hosts, request.length
    batch = [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows.incoming())] * 3
    forward = jax.jit(model.apply, out_shardings=rows.outgoing(shape[1]))
    lowered = forward.lower({"params": unflatten_dict(params)}, *batch)
    options: Any = {"exec_time_optimization_effort": effort}
    compiled = lowered.compile(options)
    return Compiled(model, Plan(compiled.as_text() or ""), compiled.memory_analysis(), *shape)


def ideal(compiled: Compiled) -> dict[str, int]:
    """Bytes that a layer cannot do without on one chip, everything in the model's dtype.

    product: the weights once, and what goes into and comes out of each product; kernel: q, k, v and
    the heads' values; sent: a reduce-scatter and an all-gather of the residual stream around each
    half of the layer.
    """
    model, layout = compiled.model, compiled.model.layout
    size, item = model.config.sizes, model.dtype.itemsize
    parts = layout.size("model", "query")
    tokens = compiled.rows * compiled.length // layout.size("data", "fsdp")
    heads, kv = (size[n] * size["H"] // parts for n in "NK")
    mlp, hidden = size["F"] // parts, size["D"]
    widths = [(hidden, heads), *[(hidden, kv)] * 2, (heads, hidden)]
    widths += [*[(hidden, mlp)] * 2, (mlp, hidden)]
    product = sum(a * b + tokens * (a + b) for a, b in widths)
    sent = 4 * tokens * hidden * (parts - 1) // parts
    kernel = tokens * 2 * (heads + kv)
    return {"product": item * product, "kernel": item * kernel, "sent": item * sent}


def main() -> None:
    compiled = compile_for(QWEN_7B, EIGHT, "v5e:8x8")
    moves = sorted(compiled.plan.moves(), key=lambda move: -move.hbm)
    planned: dict[str, int] = {}
    print(f"mesh {compiled.model.layout.shape}; a layer, one chip: MB of HBM, MB sent")
    for move in moves:
        planned[move.kind] = planned.get(move.kind, 0) + move.hbm
        planned["sent"] = planned.get("sent", 0) + move.sent
        if move.hbm + move.sent > WORTH_A_LINE:
            print(f"{move.hbm / 1e6:8.1f} {move.sent / 1e6:8.1f}  {move.kind:10}  {move.source}")
    needed = ideal(compiled)
    over = {kind: planned[kind] - needed.get(kind, 0) for kind in planned}
    print(json.dumps({"planned": planned, "ideal": needed, "over": over}))


if __name__ == "__main__":
    main()
