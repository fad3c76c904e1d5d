"""This module knows the machines that can be rented, by the names that their vendors give them.

A `Topology` describes the devices of a machine that is not here: enough to choose a mesh, and for
TPUs to compile programs, which needs libtpu, the TPU compiler, but no TPU.
"""

import math
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

from activation_extraction.common.errors import InputError, near_miss, one_line
from activation_extraction.model.devices import CHIPS, Chip

HERE = "here"
# Number of chips -> their arrangement, as Google Cloud rents them out.
FLAT = {
    1: "1x1",
    4: "2x2",
    8: "2x4",
    16: "4x4",
    32: "4x8",
    64: "8x8",
    128: "8x16",
    256: "16x16",
}
CUBES = {
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    256: "4x8x8",
    512: "8x8x8",
    1024: "8x8x16",
    2048: "8x16x16",
}


class Kind(NamedTuple):
    """A kind of TPU.

    chip: a name in CHIPS; arrangements: FLAT or CUBES; cores: per chip, where names of machines
    count cores; devices: of JAX, per chip; options: for the compiler's description of a topology.
    """

    chip: str
    arrangements: dict[int, str]
    cores: int = 1
    devices: int = 1
    options: tuple[tuple[str, Any], ...] = ()


TPUS = {
    "v4": Kind("TPU v4", CUBES, cores=2, options=(("chip_config_name", "megacore"),)),
    "v5e": Kind("TPU v5 lite", FLAT),
    "v5p": Kind("TPU v5", CUBES, cores=2),
    "v6e": Kind("TPU v6", FLAT),
    "tpu7x": Kind("TPU7x", CUBES, cores=2, devices=2),
}
GPUS = {"a100": "A100", "h100": "H100", "h200": "H200"}
GPUS_PER_HOST = 8
# The chips of a host -> their arrangement. Most hosts have HOST of them, those of CUBES always.
HOST = 4
HOSTS = {1: (1, 1, 1), HOST: (2, 2, 1), 8: (2, 4, 1), 16: (4, 4, 1)}
EXAMPLES = (
    "v5e:8x8 (or v5litepod-64), v6e:4x4 (v6e-16), v4:2x2x4 (v4-32), v5p:2x2x4 (v5p-32), "
    f"tpu7x:2x2x2 (tpu7x-16), h100 (h100-8: a host of eight), a100, h200, {HERE} (this machine)"
)


@dataclass(frozen=True)
class Device:
    """A device that is only described, with the names that JAX's devices have."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int = 0

    def memory_stats(self) -> None:
        """Returns nothing: its kind says how much memory it has."""


@dataclass(frozen=True)
class Topology:
    """A machine that can be rented.

    name: of all its names, the one that plans show, such as v5e:8x8; kind: a key of TPUS or GPUS;
    hosts, chips: how many there are; arrangement: of a TPU's chips.
    """

    name: str
    kind: str
    hosts: int
    chips: int
    arrangement: tuple[int, ...] = ()

    @property
    def is_tpu(self) -> bool:
        return self.kind in TPUS

    @property
    def chip_name(self) -> str:
        return TPUS[self.kind].chip if self.is_tpu else GPUS[self.kind]

    @property
    def chip(self) -> Chip:
        """Returns what one device can do."""
        return CHIPS[self.chip_name]

    def described(self) -> list[Device]:
        """Returns the devices, ordered by host."""
        platform = "tpu" if self.is_tpu else "gpu"
        per_chip = TPUS[self.kind].devices if self.is_tpu else 1
        count = self.chips * per_chip
        return [
            Device(number, platform, self.chip_name, number * self.hosts // count)
            for number in range(count)
        ]

    def compilable(self) -> list[Any]:
        """Returns the devices as JAX knows them, ordered by host, to compile programs for.

        Raises InputError if libtpu knows no such topology.
        """
        from jax.experimental import topologies

        options = dict(TPUS[self.kind].options)
        options["chips_per_host_bounds"] = HOSTS[self.chips // self.hosts]
        try:
            described = topologies.get_topology_desc(self.name, platform="tpu", **options)
        except Exception as error:  # JAX has no class of its own for this
            raise InputError(f"--plan {self.name}: {one_line(error)}") from error
        return sorted(described.devices, key=lambda device: (device.process_index, device.id))


def topology_of(name: str, chips_per_host: int | None = None) -> Topology:
    """Returns the machine with this name. Raises InputError, with valid names, if there is none.

    name: of a TPU, its kind and arrangement (v5e:8x8) or its kind and size (v5litepod-64, v5e-64,
    v4-32), where those of v4, v5p and tpu7x count cores; of GPUs, kind and number (h100-16).
    chips_per_host: None for the usual number.
    """
    found = re.fullmatch(r"(\w+)(?:([:-])(\d{1,5}(?:x\d{1,5})*))?", name.lower())
    kind, sign, size = found.groups() if found else (name, "", "")
    kind = "v5e" if kind == "v5litepod" else kind
    if kind in GPUS and sign != ":" and "x" not in (size or ""):
        return _gpus(kind, int(size or 1), chips_per_host)
    if kind not in TPUS or not size or (sign == ":") != ("x" in size):
        hint = near_miss(kind, [*TPUS, *GPUS, HERE]) if kind not in {*TPUS, *GPUS} else ""
        raise InputError(f"--plan {name}: no such machine{hint}; examples: {EXAMPLES}")
    tpu = TPUS[kind]
    if sign == "-":
        sizes = {chips * tpu.cores: shape for chips, shape in tpu.arrangements.items()}
        if int(size) not in sizes:
            known = ", ".join(f"{kind}-{number}" for number in sizes)
            raise InputError(f"--plan {name}: no such size; there are {known}")
        size = sizes[int(size)]
    arrangement = tuple(map(int, size.split("x")))
    dimensions, chips = (
        len(next(iter(tpu.arrangements.values())).split("x")),
        math.prod(arrangement),
    )
    if len(arrangement) != dimensions or chips > max(tpu.arrangements) or 0 in arrangement:
        known = ", ".join(f"{kind}:{shape}" for shape in tpu.arrangements.values())
        raise InputError(f"--plan {name}: no such arrangement; there are {known}")
    return Topology(
        f"{kind}:{size}", kind, _hosts(name, arrangement, chips_per_host), chips, arrangement
    )


def _gpus(kind: str, count: int, per_host: int | None) -> Topology:
    per_host = per_host or max(min(count, GPUS_PER_HOST), 1)
    if count < 1 or count % per_host:
        raise InputError(
            f"--plan {kind}-{count}: {count} GPUs do not divide among hosts of {per_host} "
            "(--chips_per_host)"
        )
    return Topology(f"{kind}-{count}", kind, count // per_host, count)


def _hosts(name: str, arrangement: tuple[int, ...], per_host: int | None) -> int:
    """Returns the number of hosts. Raises InputError if the chips do not divide among them."""
    chips, flat = math.prod(arrangement), len(arrangement) == 2
    if per_host is None:  # one, four or eight chips of v5e or v6e are one host
        per_host = chips if flat and chips in (1, 8) else HOST
    fitting = [
        number
        for number, sides in HOSTS.items()
        if (flat or number == HOST)
        and not any(size % side for size, side in zip(arrangement, sides, strict=False))
    ]
    if per_host not in fitting:
        raise InputError(
            f"--plan {name} --chips_per_host {per_host}: the chips do not divide among such hosts; "
            f"these numbers would do: {', '.join(map(str, fitting)) or 'none'}"
        )
    return chips // per_host


def check_compiler(name: str) -> None:
    """Raises InputError if the TPU compiler is not installed."""
    if find_spec("libtpu") is None:
        raise InputError(
            f"--plan {name}: needs the TPU compiler, which runs on any Linux machine: pip install "
            "-e '.[plan]' in the folder of the checkout (or pip install libtpu)"
        )
