"""Lists the machines that --plan knows: rented machines with TPUs or GPUs.

A `Topology` describes the devices and hosts of one machine. With this description, estimate.py
chooses a mesh without the machine. For a TPU, estimate.py also compiles the program of a run, which
needs libtpu, the TPU compiler, but no TPU.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.model.devices import CHIPS

# Shapes in which Google Cloud arranges the chips of a TPU, as the number of chips along each axis.
FLAT = tuple("1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16".split())
CUBES = tuple("2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16".split())
# Shapes in which the chips of one TPU host are arranged, by the number of these chips.
HOST_SHAPES = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4)}
# The usual number of chips of a TPU host. In a machine whose shape is in CUBES, every host has this
# number of chips.
USUAL_HOST_CHIPS = 4


class ChipKind(NamedTuple):
    """A kind of chip that can be rented.

    Attributes:
        chip_name: The key of the chip in `model.devices.CHIPS`.
        tpu_shape_texts: The shapes of the TPUs that can be rented with this kind of chip, such as
            "4x8", from the smallest to the largest; empty for GPUs.
        number_in_machine_name_per_chip: The number in the name of a machine, divided by the number
            of the machine's chips. It is 2 for v4, because the machine v4-32 has 16 chips.
        devices_per_chip: The number of JAX devices per chip.
    """

    chip_name: str
    tpu_shape_texts: tuple[str, ...]
    number_in_machine_name_per_chip: int
    devices_per_chip: int


# Kinds of chips that can be rented, by the first part of a machine's name. The numbers are from the
# documentation of Cloud TPU and of Compute Engine's accelerator-optimized machines.
CHIP_KINDS = {
    "v4": ChipKind("TPU v4", CUBES, 2, 1),
    "v5e": ChipKind("TPU v5 lite", FLAT, 1, 1),
    "v5p": ChipKind("TPU v5", CUBES, 2, 1),
    "v6e": ChipKind("TPU v6", FLAT, 1, 1),
    "tpu7x": ChipKind("TPU7x", CUBES, 2, 2),
    "a100": ChipKind("A100", (), 1, 1),
    "h100": ChipKind("H100", (), 1, 1),
    "h200": ChipKind("H200", (), 1, 1),
}


@dataclass(frozen=True)
class Device:
    """A device of a machine that is not rented yet.

    It stands in for a JAX device, whose attributes have the same names and meanings.

    Attributes:
        id: The number of the device in the machine.
        platform: "tpu" or "gpu".
        device_kind: The key of the chip in `model.devices.CHIPS`.
        process_index: The number of the device's host.
    """

    id: int
    platform: str
    device_kind: str
    process_index: int

    def memory_stats(self) -> dict[str, float]:
        """Returns the statistics of memory that JAX would report for the device.

        Returns:
            For a GPU, "bytes_limit" in bytes, which is three quarters of its memory, JAX's default.
            Empty for a TPU.
        """
        if self.platform != "gpu":
            return {}
        return {"bytes_limit": 0.75 * CHIPS[self.device_kind].memory_bytes}


@dataclass(frozen=True)
class Topology:
    """A machine that can be rented.

    Attributes:
        name: The name of the machine. For TPUs, it contains the shape, such as v5e:8x8. For GPUs,
            it contains the number of chips, such as h100-8.
        chip_kind: The kind of the machine's chips.
        num_hosts: The number of hosts.
        num_chips: The number of chips on all hosts together.
    """

    name: str
    chip_kind: ChipKind
    num_hosts: int
    num_chips: int

    @property
    def is_tpu(self) -> bool:
        """Whether the chips are TPUs. Otherwise they are GPUs."""
        return bool(self.chip_kind.tpu_shape_texts)

    def describe_devices(self) -> list[Device]:
        """Returns stand-ins for the devices of the machine that this object describes.

        --plan uses them to choose a mesh for this machine, although the command runs on another
        machine.

        Returns:
            A `Device` for each device of the described machine, in ascending order of `Device.id`.
        """
        platform_name = "tpu" if self.is_tpu else "gpu"
        num_devices = self.num_chips * self.chip_kind.devices_per_chip
        devices_of_topology = []
        for device_number in range(num_devices):
            host_number = device_number * self.num_hosts // num_devices
            devices_of_topology.append(
                Device(device_number, platform_name, self.chip_kind.chip_name, host_number)
            )
        return devices_of_topology

    def compiler_devices(self) -> list[Any]:
        """Returns JAX's descriptions of the machine's TPU devices, to compile programs for them.

        Raises:
            InputError: If JAX cannot describe the machine, for example because libtpu is missing.
        """
        from jax.experimental import topologies

        topology_options: dict[str, Any] = {
            "chips_per_host_bounds": (*HOST_SHAPES[self.num_chips // self.num_hosts], 1)
        }
        if self.name.startswith("v4:"):
            topology_options["chip_config_name"] = "megacore"
        try:
            topology_description = topologies.get_topology_desc(
                self.name, platform="tpu", **topology_options
            )
        except Exception as error:  # JAX raises exceptions of various types
            raise InputError(f"--plan {self.name}: {one_line(error)}") from error
        return sorted(
            topology_description.devices, key=lambda device: (device.process_index, device.id)
        )


def topology_of(name: str, chips_per_host: int | None = None) -> Topology:
    """Returns the machine that the value of --plan names.

    Args:
        name: The name of a kind of chip, followed by a number or a shape, such as v5e:8x8,
            v5litepod-64, v4-32 or h100-8. The number is `ChipKind.number_in_machine_name_per_chip`
            times the number of chips. The name of a kind of GPU alone is a machine with one GPU.
        chips_per_host: The number of chips of a host. None for the usual number.

    Raises:
        InputError: If there is no machine with this name, or if its chips cannot be divided among
            hosts of `chips_per_host` chips. The message lists the valid names or numbers.
    """
    name_pattern = r"([a-z]\w*)(?:-([1-9]\d{0,4})|:(\d{1,5}(?:x\d{1,5})+))?"
    name_match = re.fullmatch(name_pattern, name.lower().replace("v5litepod", "v5e"))
    chip_kind_name, number_suffix, shape_suffix = (
        name_match.groups() if name_match else (name.lower(), None, None)
    )
    chip_kind = CHIP_KINDS.get(chip_kind_name)
    if chip_kind is None or (shape_suffix and not chip_kind.tpu_shape_texts):
        raise InputError(
            f"--plan {name}: there are machines of {', '.join(CHIP_KINDS)}, such as v5e:8x8, "
            "v5litepod-64, v4-32 or h100-8"
        )
    if chip_kind.tpu_shape_texts:
        tpu_side_lengths = _tpu_side_lengths(
            name, chip_kind_name, chip_kind, number_suffix, shape_suffix
        )
        num_chips = math.prod(tpu_side_lengths)
        is_two_dimensional = len(tpu_side_lengths) == 2
        topology_name = f"{chip_kind_name}:{'x'.join(map(str, tpu_side_lengths))}"
        usual_chips_per_host = (
            num_chips if is_two_dimensional and num_chips in (1, 8) else USUAL_HOST_CHIPS
        )
        candidate_chip_counts_per_host = (
            [*HOST_SHAPES] if is_two_dimensional else [USUAL_HOST_CHIPS]
        )
    else:
        num_chips = int(number_suffix or 1)
        topology_name = f"{chip_kind_name}-{num_chips}"
        usual_chips_per_host = min(num_chips, 8)
        candidate_chip_counts_per_host = [*range(1, num_chips + 1)]
    possible_chip_counts_per_host = [
        num_chips_of_host
        for num_chips_of_host in candidate_chip_counts_per_host
        if num_chips % num_chips_of_host == 0
    ]
    chosen_chips_per_host = usual_chips_per_host if chips_per_host is None else chips_per_host
    if chosen_chips_per_host not in possible_chip_counts_per_host:
        possible_chip_counts_phrase = (
            ", ".join(map(str, possible_chip_counts_per_host)) or "no number"
        )
        raise InputError(
            f"--plan {name} --chips_per_host {chosen_chips_per_host}: its chips divide among "
            f"hosts of {possible_chip_counts_phrase}"
        )
    return Topology(topology_name, chip_kind, num_chips // chosen_chips_per_host, num_chips)


def _tpu_side_lengths(
    name: str,
    chip_kind_name: str,
    chip_kind: ChipKind,
    number_suffix: str | None,
    shape_suffix: str | None,
) -> tuple[int, ...]:
    """Returns the number of chips along each axis of a TPU.

    Args:
        name: The value of --plan, for the message.
        chip_kind_name: The first part of the name, a key of CHIP_KINDS.
        chip_kind: The kind of the chips.
        number_suffix: The number in the name, such as 64 in v5e-64, which is
            `ChipKind.number_in_machine_name_per_chip` times the number of chips. None if the name
            has no number.
        shape_suffix: The shape in the name, such as 8x8. None if the name has no shape.

    Raises:
        InputError: If the name has neither a number nor a shape, if no TPU of this kind has this
            number in its name, if the shape does not have as many axes as the TPUs of this kind, or
            if it has more chips than the largest of them. The message lists the valid names.
    """
    # For example, the number suffix "64" of v5e-64 -> the shape "8x8".
    shape_text_by_number_suffix: dict[str, str] = {}
    for tpu_shape_text in chip_kind.tpu_shape_texts:
        side_lengths_of_shape = _side_lengths_of_shape(tpu_shape_text)
        shape_text_by_number_suffix[
            str(math.prod(side_lengths_of_shape) * chip_kind.number_in_machine_name_per_chip)
        ] = tpu_shape_text
    # The shapes are in ascending order, so the last one is the largest.
    side_lengths_of_largest_shape = side_lengths_of_shape
    requested_shape_text = shape_suffix or shape_text_by_number_suffix.get(number_suffix or "", "0")
    requested_side_lengths = _side_lengths_of_shape(requested_shape_text)
    num_chips = math.prod(requested_side_lengths)
    has_wrong_axis_count = len(requested_side_lengths) != len(side_lengths_of_largest_shape)
    if has_wrong_axis_count or not 0 < num_chips <= math.prod(side_lengths_of_largest_shape):
        machine_names = []
        for valid_suffix, shape_text in shape_text_by_number_suffix.items():
            machine_names.append(f"{chip_kind_name}-{valid_suffix} ({chip_kind_name}:{shape_text})")
        raise InputError(f"--plan {name}: no such size; there are {', '.join(machine_names)}")
    return requested_side_lengths


def _side_lengths_of_shape(shape: str) -> tuple[int, ...]:
    """Returns the number of chips along each axis of a shape such as 4x8."""
    return tuple(map(int, shape.split("x")))
