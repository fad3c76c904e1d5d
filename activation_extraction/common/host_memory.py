"""How much memory this host has: its machine's, or its container's if that is less."""

import os
import re
from pathlib import Path

MACHINE = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
PAGE = os.sysconf("SC_PAGE_SIZE")


def host_memory() -> int:
    machine = os.sysconf("SC_PHYS_PAGES") * PAGE
    return min(machine, _container()[0] or machine)


def available_memory() -> int:
    """Returns how many bytes of memory this process can still get, as far as the system says."""
    most, used = _container()
    room = host_memory() if most is None else min(host_memory(), max(most - used, 0))
    said = MACHINE.read_text() if MACHINE.exists() else ""
    available = re.search(r"MemAvailable: *([0-9]+) kB", said)
    return min(room, int(available[1]) * 1024) if available else room


def _container() -> tuple[int | None, int]:
    """Returns the bytes that this container may take, None without a limit, and those it takes."""
    if not all(path.exists() for path in CONTAINER):
        return None, 0
    most, used = (path.read_text().strip() for path in CONTAINER)
    return int(most) if most.isdecimal() else None, int(used)
