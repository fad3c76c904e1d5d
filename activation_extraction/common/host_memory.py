"""Determines how much memory this process can use: its machine's, or less in a control group.

Containers, Slurm jobs and systemd units are control groups (cgroups). They form a tree, and each
group on the path from this process's group up to the root may have a limit for its whole subtree.
Version 2 of control groups has one tree for all resources, version 1 has a tree for memory. A
machine may mount both.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MACHINE = Path("/proc/meminfo")
GROUPS = Path("/proc/self/cgroup")  # the group of this process in every tree
MOUNTS = Path("/proc/self/mountinfo")  # where the trees are mounted
PAGE = os.sysconf("SC_PAGE_SIZE")


class _Files(NamedTuple):
    """Names of the files of a control group, and of a field in its memory.stat.

    Attributes:
        limit: File with the limit in bytes. Without a limit it contains "max" in version 2, and a
            number near 2**63 in version 1.
        used: File with the bytes that the group uses, including its file cache.
        reclaimable: Field with the bytes of the file cache that the kernel takes back first.
    """

    limit: str
    used: str
    reclaimable: str


FILES = {
    "cgroup2": _Files("memory.max", "memory.current", "inactive_file"),
    "cgroup": _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class _Group(NamedTuple):
    """A control group with a limit.

    Attributes:
        limit: The limit in bytes.
        used: The bytes that the group uses, without the file cache that can be reclaimed.
    """

    limit: int
    used: int


def host_memory() -> int:
    """Returns the memory of the machine or the smallest limit of a group, if less, in bytes."""
    return min([_machine_memory(), *(group.limit for group in _limited_groups())])


def available_memory() -> int:
    """Returns how many more bytes this process can allocate, as far as the system tells."""
    room = min([_machine_memory(), *(max(limit - used, 0) for limit, used in _limited_groups())])
    available = re.search(r"MemAvailable: *([0-9]+) kB", _text(MACHINE))
    return min(room, int(available[1]) * 1024) if available else room


def _machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * PAGE


def _limited_groups() -> Iterator[_Group]:
    """Yields the groups with a limit to which this process belongs, in both versions."""
    for folder, top, files in _own_groups():
        while True:
            limit = _text(folder / files.limit).strip()
            if limit.isdecimal():
                used = _text(folder / files.used).strip()
                stat = dict(line.split()[:2] for line in _text(folder / "memory.stat").splitlines())
                reclaimable = int(stat.get(files.reclaimable, 0))
                yield _Group(int(limit), max(int(used or 0) - reclaimable, 0))
            if folder == top:
                break
            folder = folder.parent


def _own_groups() -> Iterator[tuple[Path, Path, _Files]]:
    """Yields this process's group in every mounted tree that controls memory.

    Yields:
        A tuple of:
            The folder of the group.
            The folder where its tree is mounted, which is the same folder or an ancestor.
            The names of the files in these folders.
    """
    paths = {}  # file system type -> path of the group
    for line in _text(GROUPS).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for line in _text(MOUNTS).splitlines():
        mount, _, file_system = line.partition(" - ")
        root, mounted = (_unescaped(field) for field in mount.split()[3:5])
        file_system_type, _, options = file_system.split(maxsplit=2)
        if file_system_type not in paths:
            continue
        if file_system_type == "cgroup" and "memory" not in options.split(","):
            continue
        # In a container, the folder may be mounted at the container's group, while the path
        # starts at the machine's root or contains ".." for another group ("/../other").
        path, top = paths[file_system_type], Path(mounted)
        inside = os.path.relpath(path, root)
        folder = top if inside.startswith("..") else top / inside
        yield (folder if folder.is_dir() else top), top, FILES[file_system_type]


def _text(path: Path) -> str:
    """Returns the content of a kernel file, or "" if it is missing or cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _unescaped(field: str) -> str:
    """Decodes a field of mountinfo, in which spaces and backslashes are octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
