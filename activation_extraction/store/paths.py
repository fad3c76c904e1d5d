"""The names of the folders of machines and hosts, if a run has several of either.

`machine_003` belongs to a machine with one host, `machine_003_host_01` to one of several hosts.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

NAME = re.compile(r"machine_([0-9]{3}|[1-9][0-9]{3,})(?:_host_([0-9]{2}|[1-9][0-9]{2,}))?")


@dataclass(frozen=True, order=True)
class HostFolder:
    """The folder of one host; `host` is None if the machine has a single host."""

    machine: int
    host: int | None = None

    @classmethod
    def of(cls, machine: int, host: int, hosts: int) -> "HostFolder":
        """The folder of host `host` of a machine with `hosts` hosts."""
        return cls(machine, host if hosts > 1 else None)

    @classmethod
    def parse(cls, name: str) -> "HostFolder | None":
        """The host whose folder has this name; None if it is not the name of a host's folder."""
        found = NAME.fullmatch(name)
        if found is None:
            return None
        return cls(int(found[1]), None if found[2] is None else int(found[2]))

    @property
    def name(self) -> str:
        host = "" if self.host is None else f"_host_{self.host:02d}"
        return f"machine_{self.machine:03d}{host}"


def names_of_machine(machine: int, hosts: int) -> list[str]:
    """The names of the folders of all hosts of a machine."""
    return [HostFolder.of(machine, host, hosts).name for host in range(hosts)]


def host_folders(names: Iterable[str]) -> dict[str, HostFolder]:
    """Those of `names` that name the folder of a host, in the same order."""
    parsed = {name: HostFolder.parse(name) for name in names}
    return {name: folder for name, folder in parsed.items() if folder is not None}
