"""The workers of a run, one for each host of each machine, and which samples are whose.

The data is split between the machines first. The hosts of a machine then split its share, so each
machine may have another number of hosts.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Worker:
    """Host `host` of the `hosts` of machine `machine`, which is one of `machines`."""

    machine: int = 0
    machines: int = 1
    host: int = 0
    hosts: int = 1

    def sample_idx(self, number: int) -> int:
        """Index of this worker's sample `number`, unique over all machines and hosts."""
        return (number * self.hosts + self.host) * self.machines + self.machine

    @property
    def stride(self) -> int:
        """The difference between the indices of two consecutive samples of this worker."""
        return self.hosts * self.machines
