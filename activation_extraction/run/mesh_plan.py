"""What a run would take on one mesh of a machine: its times, what binds it, what fits.

The times follow from what the compiled program computes, moves and sends, and from the speeds in
the tables of devices.py and rented.py, of which a run reaches the shares in SHARES.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from activation_extraction.model.automatic_mesh import StepMemory, linked_devices, span
from activation_extraction.model.devices import USABLE, Chip
from activation_extraction.model.kept import PIECES
from activation_extraction.model.mesh import Layout
from activation_extraction.model.step_plan import StepPlan, StepTimes, times_of
from activation_extraction.run.batch_size import MOST_ROWS, STEPS_ON_HOST
from activation_extraction.run.rented import RentedHost
from activation_extraction.store.pack_rate import PackRate

FILLED = 0.99  # the share of a batch that is not padding
# The shares of the speeds in the tables that a run reaches, at worst and at best. Of products, 0.35
# to 0.71 are published for training with MaxText on v4 to v6e (its READMEs); of a host's network,
# 0.18 for uploads to Cloud Storage (gcsfuse's benchmarks). The others are assumptions.
SHARES = {
    "products": (0.4, 0.7),
    "hbm": (0.6, 0.9),
    "sent": (0.6, 0.9),
    "copy": (0.5, 0.9),
    "host": (0.6, 1.0),
    "upload": (0.15, 0.5),
}
# The same for speeds that were measured on this machine's CPU: three models reached 0.76 to 0.97 of
# its speed in products (benchmarks/planning.py).
CPU_SHARES = {name: (0.65, 0.95) for name in SHARES}
# What may bind a run, in words.
BINDS = {
    "products": "matrix products",
    "hbm": "memory bandwidth",
    "sent": "links between chips",
    "copy": "copies to the host",
    "host": "packing on the host",
    "upload": "uploads",
}
ON_DEVICE = ("products", "hbm", "sent")  # those that bind devices; the others bind hosts
Range = tuple[float, float]
# What --json prints of a mesh without a program.
UNKNOWN: dict[str, None] = dict.fromkeys(
    (
        *("memory_gb", "memory", "hbm_gb", "sent", *(f"{name}_ms" for name in BINDS)),
        *("overlapped", "binds", "tokens_per_second", "batch_size"),
    )
)


@dataclass(frozen=True)
class Machine:
    """The machine that a run is planned for.

    devices: those that the run uses, ordered by host; chips: how many are rented; chip: what one
    device can do; measured: whether that was measured here; pack: how fast one core packs.
    """

    name: str
    devices: Sequence[Any]
    chips: int
    hosts: int
    chip: Chip
    measured: bool
    host: RentedHost
    pack: PackRate

    @property
    def on_cpu(self) -> bool:
        """Returns whether the hosts' own cores compute."""
        return self.devices[0].platform == "cpu"

    @property
    def shares(self) -> dict[str, Range]:
        """Returns the shares of its speeds that a run reaches, at worst and at best."""
        return CPU_SHARES if self.on_cpu else SHARES


@dataclass(frozen=True)
class MeshPlan:
    """This is the part of a plan that one mesh has.

    rows: per host and step; tokens: of a step, of all hosts; token_bytes: the bytes that are stored
    of a token that is kept, before compression; kept: the share of such tokens. uploads: whether
    the shards go to a bucket. fails: why the program does not compile, so that `step` is by
    formula; "" if it does.
    """

    machine: Machine
    layout: Layout
    step: StepPlan
    rows: int
    tokens: int
    token_bytes: int
    kept: float
    uploads: bool
    fails: str = ""

    @property
    def memory(self) -> StepMemory:
        """Returns the bytes that a run takes on each device."""
        return self.step.memory

    @property
    def fits(self) -> bool:
        """Returns whether a run fits in the memory of a device."""
        return not self.fails and sum(self.memory) <= USABLE * self.machine.chip.memory

    @cached_property
    def times(self) -> StepTimes:
        """Returns the times of a step on the devices at their peaks, in seconds."""
        chip, linked = self.machine.chip, linked_devices(self.machine.devices)
        return times_of(self.step, self.layout, chip, linked)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Returns key of BINDS -> the seconds that it takes of a step, at its peak speed."""
        machine, times, host = self.machine, self.times, self.machine.host
        of_host = self.tokens * self.token_bytes / machine.hosts
        seconds = {
            "products": times.products + times.kernel,
            "hbm": times.hbm,
            "sent": times.hidden + times.exposed,
        }
        if host.bus:  # the host copies the kept tokens in pieces, at least one from each device
            buses = min(machine.chips, len(machine.devices)) / machine.hosts
            seconds["copy"] = of_host * max(self.kept, 1 / PIECES) / (host.bus * buses)
        if host.cores:
            packed = machine.pack.bytes_per_second * host.cores
            seconds["host"] = of_host * self.kept / packed
        if self.uploads and host.network:
            seconds["upload"] = of_host * self.kept * machine.pack.ratio / host.network
        return seconds

    @property
    def binds(self) -> str:
        """Returns the key of BINDS that takes longest, at best.

        What is sent while products run counts only as far as it outlasts them.
        """
        seconds, times = self._at_shares(1)
        hidden = max(times.hidden - max(seconds["products"], seconds["hbm"]), 0)
        seconds["sent"] = hidden + times.exposed
        return max(seconds, key=lambda name: seconds[name])

    @property
    def overlapped(self) -> float:
        """Returns the share of what is sent that is sent while products run."""
        total = sum(each.bytes for each in self.step.sent)
        return sum(each.hidden for each in self.step.sent) / total if total else 1.0

    @property
    def tokens_per_second(self) -> Range:
        """Returns how many tokens of the data all hosts compute and store, at worst and at best."""
        low, high = (self.tokens * FILLED / self._step_seconds(number) for number in (0, 1))
        return low, high

    def _step_seconds(self, number: int) -> float:
        """Returns the seconds of a step. number: see `_at_shares`."""
        seconds, times = self._at_shares(number)
        if self.machine.on_cpu:  # the same cores do all of it, one after the other
            return sum(seconds.values())
        of_host = (value for name, value in seconds.items() if name not in ON_DEVICE)
        return max(times.device, *of_host)

    def _at_shares(self, number: int) -> tuple[dict[str, float], StepTimes]:
        """Returns `seconds` and `times` with the lowest `shares` (0) or with the highest (1)."""
        share = {name: both[number] for name, both in self.machine.shares.items()}
        seconds = {name: value / share[name] for name, value in self.seconds.items()}
        return seconds, self.times.at_shares(share)

    @cached_property
    def batch_size(self) -> int:
        """Returns the most rows per host and step that fit, of those that --batch_size auto tries.

        It is 0 if none fit. What a step takes beside the weights is assumed to grow with its rows.
        """
        machine, rows = self.machine, len(self.machine.devices) // self.machine.hosts
        of_row = self.tokens * self.token_bytes / machine.hosts / self.rows
        best = 0
        while rows <= MOST_ROWS:
            device = self.memory.weights + sum(self.memory[1:]) * rows / self.rows
            host = STEPS_ON_HOST * rows * of_row
            room = machine.host.memory or math.inf
            if device > USABLE * machine.chip.memory or host > room:
                break
            best, rows = rows, 2 * rows
        return best

    def reach(self, axes: Sequence[str]) -> str:
        """Returns over which links devices send along these axes."""
        count = max((span(self.layout, axis) for axis in axes), default=1)
        if len(self.machine.devices) // self.machine.hosts % count == 0:
            return "within a host"
        linked = linked_devices(self.machine.devices)
        return "over the interconnect" if linked % count == 0 else "over the network"

    def to_json(self) -> dict[str, Any]:
        """Returns the plan of this mesh as --json prints it, with times of one step in ms."""
        if self.fails:
            return {"shape": self.layout.shape, "fits": False, "fails": self.fails} | UNKNOWN
        ms = {name: 1e3 * seconds for name, seconds in self.seconds.items()}
        return {
            "shape": self.layout.shape,
            "fits": self.fits,
            "fails": None,
            "memory_gb": sum(self.memory) / 1e9,
            "hbm_gb": self.step.hbm / 1e9,
            "memory": {name: size / 1e9 for name, size in self.memory._asdict().items()},
            "sent": [
                {
                    "axes": [*each.axes],
                    "gb": each.bytes / 1e9,
                    "overlapped": each.hidden / each.bytes,
                    "reach": self.reach(each.axes),
                }
                for each in self.step.sent
            ],
            **{f"{name}_ms": ms.get(name) for name in BINDS},
            "overlapped": self.overlapped,
            "binds": self.binds,
            "tokens_per_second": self.tokens_per_second,
            "batch_size": self.batch_size,
        }
