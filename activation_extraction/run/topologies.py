"""Lists the machines that can be rented for --plan: their names, devices and hosts.

A `Topology` describes the devices of such a machine, which suffices to choose a mesh. For TPUs it
also suffices to compile programs; that needs libtpu, the TPU compiler, but no TPU.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.model.devices import CHIPS

# The shapes in which Google Cloud arranges the chips of a TPU: chips along each axis.
FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16"
HOSTS = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4)}  # number of chips of a TPU host -> shape
USUAL = 4  # the usual number of chips of a TPU host, and the only one for the shapes in CUBES


class ChipKind(NamedTuple):
    """A kind of chip that can be rented.

    Attributes:
        chip: The name of the chip in CHIPS.
        shapes: The shapes of the machines for TPUs, separated by spaces; "" for GPUs.
        units: The units per chip in the number of a machine's name. 2 for v4, because v4-32 has 16
            chips.
        devices: The number of JAX devices per chip.
    """

    chip: str
    shapes: str
    units: int
    devices: int


# The chips that can be rented, by the first part of a machine's name. The facts are from the
# documentation of Cloud TPU and of Compute Engine's accelerator-optimized machines.
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
    """A device of a machine that is only planned.

    The attributes have the names and meanings of those of a JAX device.

    Attributes:
        id: The number of the device in the machine.
        platform: "tpu" or "gpu".
        device_kind: The name of the chip in CHIPS.
        process_index: The number of the device's host.
    """

    id: int
    platform: str
    device_kind: str
    process_index: int

    def memory_stats(self) -> dict[str, float]:
        """Returns the statistics that the device would report in a real run.

        Returns:
            For a GPU, its `bytes_limit` in bytes, because by default JAX uses three quarters of its
            memory. Empty for a TPU.
        """
        if self.platform != "gpu":
            return {}
        return {"bytes_limit": 0.75 * CHIPS[self.device_kind].memory}


@dataclass(frozen=True)
class Topology:
    """A machine that can be rented.

    Attributes:
        name: The name with the shape for TPUs, such as v5e:8x8; with the number of chips for GPUs,
            such as h100-8.
        kind: The kind of its chips.
        hosts: The number of hosts.
        chips: The number of chips on all hosts together.
    """

    name: str
    kind: ChipKind
    hosts: int
    chips: int

    @property
    def is_tpu(self) -> bool:
        """Whether the chips are TPUs; otherwise they are GPUs."""
        return bool(self.kind.shapes)

    def described(self) -> list[Device]:
        """Returns the devices of the machine, from which a mesh can be made."""
        platform = "tpu" if self.is_tpu else "gpu"
        count = self.chips * self.kind.devices
        devices = []
        for number in range(count):
            host = number * self.hosts // count
            devices.append(Device(number, platform, self.kind.chip, host))
        return devices

    def compilable(self) -> list[Any]:
        """Returns the devices of a TPU as JAX's own objects, to compile programs for.

        Raises:
            InputError: JAX cannot describe the machine, for example because libtpu is missing.
        """
        from jax.experimental import topologies

        options: dict[str, Any] = {"chips_per_host_bounds": (*HOSTS[self.chips // self.hosts], 1)}
        if self.name.startswith("v4:"):
            options["chip_config_name"] = "megacore"
        try:
            description = topologies.get_topology_desc(self.name, platform="tpu", **options)
        except Exception as error:  # JAX raises various types
            raise InputError(f"--plan {self.name}: {one_line(error)}") from error
        return sorted(description.devices, key=lambda device: (device.process_index, device.id))


def topology_of(name: str, chips_per_host: int | None = None) -> Topology:
    """Returns the machine with a name, as --plan takes it.

    Args:
        name: The name of a kind of chip, followed by a number or a shape: v5e:8x8, v5litepod-64,
            v4-32 or h100-8. GPUs have no shapes; without a number, there is one GPU.
        chips_per_host: The number of chips of a host. None for the usual number.

    Raises:
        InputError: There is no machine with this name, or its chips cannot be divided among such
            hosts. The message lists the valid names or numbers.
    """
    pattern = r"([a-z]\w*)(?:-([1-9]\d{0,4})|:(\d{1,5}(?:x\d{1,5})+))?"
    match = re.fullmatch(pattern, name.lower().replace("v5litepod", "v5e"))
    key, number, shape = match.groups() if match else (name.lower(), None, None)
    kind = MACHINES.get(key)
    if kind is None or (shape and not kind.shapes):
        raise InputError(
            f"--plan {name}: there are machines of {', '.join(MACHINES)}, such as v5e:8x8, "
            "v5litepod-64, v4-32 or h100-8"
        )
    if kind.shapes:
        shapes = kind.shapes.split()
        shape_of_number = {f"{math.prod(_sides(sides)) * kind.units}": sides for sides in shapes}
        shape = shape or shape_of_number.get(number or "", "0")
        sides = _sides(shape)
        largest = _sides(shapes[-1])
        chips = math.prod(sides)
        if len(sides) != len(largest) or not 0 < chips <= math.prod(largest):
            names = [f"{key}-{size} ({key}:{sides})" for size, sides in shape_of_number.items()]
            raise InputError(f"--plan {name}: no such size; there are {', '.join(names)}")
        usual_name = f"{key}:{shape}"
        flat = len(sides) == 2
        usual_host = chips if flat and chips in (1, 8) else USUAL
        host_sizes = [size for size in HOSTS if chips % size == 0 and (flat or size == USUAL)]
    else:
        chips = int(number or 1)
        usual_name = f"{key}-{chips}"
        usual_host = min(chips, 8)
        host_sizes = [size for size in range(1, chips + 1) if chips % size == 0]
    host_size = usual_host if chips_per_host is None else chips_per_host
    if host_size not in host_sizes:
        sizes = ", ".join(map(str, host_sizes)) or "no number"
        raise InputError(
            f"--plan {name} --chips_per_host {host_size}: its chips divide among hosts of {sizes}"
        )
    return Topology(usual_name, kind, chips // host_size, chips)


def _sides(shape: str) -> tuple[int, ...]:
    """Returns the number of chips along each axis of a shape such as 4x8."""
    return tuple(map(int, shape.split("x")))
