"""Facts about machines that can be rented, beside those of their chips: hosts and prices.

What no source says is None, and a plan leaves out what follows from it.

Hosts: documentation of Cloud TPU (docs.cloud.google.com/tpu/docs/v5e, v5p, v6e, tpu7x) and of
Compute Engine's accelerator-optimized machines and their networks, read in November 2026. Where it
gives the network of a chip or of a larger host, the share of these chips is taken. Bus: the scaling
book, "TPUs" (jax-ml.github.io/scaling-book/tpus), and PCIe 5.0 x16 for H100.

Prices: SkyPilot's catalogue for Google Cloud (skypilot-org/skypilot-catalog, v9; hosts of GPUs
from v8), lowest and highest of regions in the USA, a GPU with its share of the host; storage:
cloud.google.com/storage/pricing, standard class, regions in the USA.
"""

from typing import NamedTuple

from activation_extraction.common.host_memory import host_memory

Range = tuple[float, float]
PRICES_OF = "November 2026"
STORAGE_PRICE = (0.020, 0.023)  # dollars for a gigabyte (10**9 bytes) and a month


class RentedHost(NamedTuple):
    """A host: a virtual machine with some chips. What is not known is None.

    cores: virtual ones; memory: in bytes; network: bytes per second that leave it; bus: bytes per
    second that each chip copies to it.
    """

    cores: int | None
    memory: float | None
    network: float | None
    bus: float | None


class Price(NamedTuple):
    """Dollars for a chip and an hour, in the cheapest region and the dearest; None if unknown."""

    on_demand: Range | None
    spot: Range | None


# (kind, chips of a host) -> the host.
TPU_HOSTS = {
    ("v4", 4): RentedHost(None, None, None, 16e9),
    ("v5e", 1): RentedHost(24, 48e9, 3.1e9, 15e9),
    ("v5e", 4): RentedHost(112, 192e9, 12.5e9, 15e9),
    ("v5e", 8): RentedHost(224, 384e9, 25e9, 15e9),
    ("v5p", 4): RentedHost(208, 448e9, 25e9, 15e9),
    ("v6e", 1): RentedHost(None, 176e9, 12.5e9, 32e9),
    ("v6e", 4): RentedHost(180, 720e9, 50e9, 32e9),
    ("v6e", 8): RentedHost(None, 1440e9, 100e9, 32e9),
    ("tpu7x", 4): RentedHost(224, 960e9, 50e9, None),
}
# An eighth of a2-ultragpu-8g and of a3-highgpu-8g: the share of each GPU.
GPU_HOSTS: dict[str, tuple[int, float, float, float | None]] = {
    "a100": (12, 170e9, 1.6e9, None),
    "h100": (26, 234e9, 15.6e9, 64e9),
}
PRICES = {
    "v4": Price((3.22, 3.22), (0.92, 0.92)),
    "v5e": Price((1.20, 1.416), (0.298, 0.654)),
    "v5p": Price((4.20, 4.779), (0.78, 1.30)),
    "v6e": Price((2.70, 2.70), (0.345, 1.276)),
    "a100": Price((5.52, 5.52), (1.70, 2.71)),
    "h100": Price((10.98, 12.37), (2.51, 5.70)),
}


def host_of(kind: str, chips: int) -> RentedHost:
    """Returns what is known of a host. kind: as in topologies.py; chips: those of the host."""
    if kind in GPU_HOSTS:
        cores, memory, network, bus = GPU_HOSTS[kind]
        return RentedHost(cores * chips, memory * chips, network * chips, bus)
    return TPU_HOSTS.get((kind, chips), RentedHost(None, None, None, None))


def this_host(cores: int) -> RentedHost:
    """Returns what is known of this machine. cores: how many the run may use."""
    return RentedHost(cores, host_memory(), None, None)
