"""This module knows the machines that can be rented: their names, devices and hosts.

A `Topology` describes the devices of a machine that is not here: enough to choose a mesh, and for
TPUs to compile programs, which needs libtpu, the TPU compiler, but no TPU.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.model.devices import CHIPS

# How the chips of a machine are arranged, as Google Cloud rents them out.
FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16"
HOSTS = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4)}  # chips of a TPU host -> their arrangement
USUAL = 4  # chips of a TPU host, always so with CUBES


class ChipKind(NamedTuple):
    """A kind of chip that can be rented.

    Attributes:
        chip: The name in CHIPS.
        shapes: How many chips machines have along each axis, of TPUs; "" for GPUs.
        units: By how much a chip raises the number in the name of a machine: v4-32 has 16 chips.
        devices: The number of JAX devices per chip.
    """

    chip: str
    shapes: str
    units: int
    devices: int


# The documentation of Cloud TPU and of Compute Engine's accelerator-optimized machines.
MACHINES = {
    "v4": ChipKind("TPU v4", CUBES, 2, 1),
    "v5e": ChipKind("TPU v5 lite", FLAT, 1, 1),
    "v5p": ChipKind("TPU v5", CUBES, 2, 1),
    "v6e": ChipKind("TPU v6", FLAT, 1, 1),
    "tpu7x": ChipKind("TPU7x", CUBES, 2, 2),
    "a100": ChipKind("A100", "", 1, 1),
    "h100": ChipKind("H100", "", 1, 1),
    "h200": ChipKind("H200", "", 1, 1),
}


@dataclass(frozen=True)
class Device:
    """A device that is only described, with the names that JAX's devices have."""

    id: int
    platform: str
    device_kind: str
    process_index: int

    def memory_stats(self) -> dict[str, float]:
        """Returns what a GPU would report: by default, JAX takes three quarters of its memory."""
        gpu = self.platform == "gpu"
        return {"bytes_limit": 0.75 * CHIPS[self.device_kind].memory} if gpu else {}


@dataclass(frozen=True)
class Topology:
    """A machine that can be rented. name: of all its names, the usual one, such as v5e:8x8."""

    name: str
    kind: ChipKind
    hosts: int
    chips: int

    @property
    def is_tpu(self) -> bool:
        return bool(self.kind.shapes)

    def described(self) -> list[Device]:
        platform, count = "tpu" if self.is_tpu else "gpu", self.chips * self.kind.devices
        hosts = [number * self.hosts // count for number in range(count)]
        return [Device(n, platform, self.kind.chip, host) for n, host in enumerate(hosts)]

    def compilable(self) -> list[Any]:
        """Returns a TPU's devices as JAX knows them, to compile for. Raises InputError."""
        from jax.experimental import topologies

        options: dict[str, Any] = {"chips_per_host_bounds": (*HOSTS[self.chips // self.hosts], 1)}
        if self.name.startswith("v4:"):
            options["chip_config_name"] = "megacore"
        try:
            described = topologies.get_topology_desc(self.name, platform="tpu", **options)
        except Exception as error:  # JAX has no class of its own for this
            raise InputError(f"--plan {self.name}: {one_line(error)}") from error
        return sorted(described.devices, key=lambda device: (device.process_index, device.id))


def topology_of(name: str, chips_per_host: int | None = None) -> Topology:
    """Returns the machine with this name. Raises InputError, with valid names or numbers.

    chips_per_host: None for the usual number.
    """
    pattern = r"([a-z]\w*)(?:-([1-9]\d{0,4})|:(\d{1,5}(?:x\d{1,5})+))?"
    found = re.fullmatch(pattern, name.lower().replace("v5litepod", "v5e"))
    key, number, shape = found.groups() if found else (name.lower(), None, None)
    kind = MACHINES.get(key)
    if kind is None or (shape and not kind.shapes):
        known = f"there are machines of {', '.join(MACHINES)}"
        raise InputError(f"--plan {name}: {known}, such as v5e:8x8, v5litepod-64, v4-32 or h100-8")
    if kind.shapes:
        sizes = {f"{math.prod(_sides(x)) * kind.units}": x for x in kind.shapes.split()}
        shape = shape or sizes.get(number or "", "0")
        sides, largest = _sides(shape), _sides(kind.shapes.split()[-1])
        if len(sides) != len(largest) or not 0 < math.prod(sides) <= math.prod(largest):
            known = ", ".join(f"{key}-{size} ({key}:{x})" for size, x in sizes.items())
            raise InputError(f"--plan {name}: no such size; there are {known}")
        known_as = f"{key}:{shape}"
        chips = math.prod(sides)
        flat = len(sides) == 2
        usual = chips if flat and chips in (1, 8) else USUAL
        hosts = [n for n in HOSTS if chips % n == 0 and (flat or n == USUAL)]
    else:
        known_as, chips = f"{key}-{number or 1}", int(number or 1)
        usual, hosts = min(chips, 8), [n for n in range(1, chips + 1) if chips % n == 0]
    per_host = usual if chips_per_host is None else chips_per_host
    if per_host not in hosts:
        known = f"its chips divide among hosts of {', '.join(map(str, hosts)) or 'no number'}"
        raise InputError(f"--plan {name} --chips_per_host {per_host}: {known}")
    return Topology(known_as, kind, chips // per_host, chips)


def _sides(shape: str) -> tuple[int, ...]:
    return tuple(map(int, shape.split("x")))
