"""The workers of a run, one for each host of each machine, and the indices of their samples.

The data is first split between machines; the hosts of a machine then split its share. So machines
may differ in their number of hosts.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Worker:
    """Host `host` of `hosts`, on machine `machine` of `machines`."""

    machine: int = 0
    machines: int = 1
    host: int = 0
    hosts: int = 1

    def sample_idx(self, number: int) -> int:
        """The index of this worker's sample `number`, unique over all machines and hosts."""
        return (number * self.hosts + self.host) * self.machines + self.machine

    @property
    def stride(self) -> int:
        """The difference between the indices of two consecutive samples of this worker."""
        return self.hosts * self.machines
