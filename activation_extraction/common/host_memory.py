"""Determines how many bytes of CPU memory this process can use.

The limit is the memory of the computer, or less if the process is in a control group of Linux
(cgroup). Containers, Slurm jobs and systemd units are control groups. Control groups form a
hierarchy, and each group on the path from this process's group up to the root may have a limit for
all groups below it. Version 2 of control groups has one hierarchy for all resources. Version 1 has
a separate hierarchy for memory. A computer may mount the hierarchies of both versions.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MEMORY_INFO = Path("/proc/meminfo")
# The kernel's file with the path of this process's control group (cgroup) in each cgroup hierarchy.
GROUPS = Path("/proc/self/cgroup")
# The kernel's file with the folders in which file systems are mounted. Hierarchies of control
# groups (cgroups) are mounted as file systems, too.
MOUNTS = Path("/proc/self/mountinfo")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _FileNames(NamedTuple):
    """The names of a control group's files, and of a field in its file memory.stat.

    Attributes:
        limit_file: Name of the file with the limit in bytes. Without a limit, the file contains
            "max" in version 2, and a number near 2**63 in version 1.
        usage_file: Name of the file with the bytes that the group uses, including its file cache.
        file_cache_field_name: Name of the field with the bytes of the file cache that the kernel
            reclaims first.
    """

    limit_file: str
    usage_file: str
    file_cache_field_name: str


# File system type of a mounted hierarchy of control groups, "cgroup2" or "cgroup" -> names of the
# files with the memory limit and the used memory in the folder of each control group.
FILE_NAMES = {
    "cgroup2": _FileNames("memory.max", "memory.current", "inactive_file"),
    "cgroup": _FileNames("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class _LimitedControlGroup(NamedTuple):
    """A control group whose memory is limited.

    Attributes:
        limit_bytes: Limit of the group's memory in bytes.
        used_bytes: Bytes that the group uses, without the file cache that can be reclaimed.
    """

    limit_bytes: int
    used_bytes: int


class _MountedControlGroup(NamedTuple):
    """The control group of this process in one of the mounted cgroup hierarchies.

    Attributes:
        cgroup_folder: Folder of the control group.
        mount_folder: Folder where the hierarchy is mounted. It is the folder of the control group
            or one of its ancestors.
        file_names: Names of the files in these folders.
    """

    cgroup_folder: Path
    mount_folder: Path
    file_names: _FileNames


def host_memory() -> int:
    """Returns the bytes of CPU memory that this process could use if no other process used any.

    It is the smallest of these numbers: the memory of the computer, and the limit of each control
    group that contains this process and has a limit.
    """
    control_group_limits_in_bytes = [
        control_group.limit_bytes for control_group in _limited_control_groups()
    ]
    return min([_computer_memory(), *control_group_limits_in_bytes])


def available_memory() -> int:
    """Returns the bytes of CPU memory that this process can still allocate.

    It is the smallest of these numbers: the available memory of the computer, and the unused bytes
    of each control group that contains this process and has a limit. If the system does not report
    the available memory, the whole memory of the computer is used in its place.
    """
    available_bytes = _computer_memory()
    for control_group in _limited_control_groups():
        available_bytes = min(
            available_bytes, max(control_group.limit_bytes - control_group.used_bytes, 0)
        )
    available_match = re.search(r"MemAvailable: *([0-9]+) kB", _kernel_file(MEMORY_INFO))
    if available_match is not None:
        available_bytes = min(available_bytes, int(available_match[1]) * 1024)
    return available_bytes


def _computer_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES


def _limited_control_groups() -> Iterator[_LimitedControlGroup]:
    """Yields the control groups (cgroups) of this process whose memory is limited.

    Linux may have several hierarchies of control groups. The process belongs to one group in each
    hierarchy, and to all ancestors of this group.
    """
    for cgroup_folder, mount_folder, memory_file_names in _mounted_control_groups():
        searched_folder = cgroup_folder
        while True:
            limit_text = _kernel_file(searched_folder / memory_file_names.limit_file).strip()
            if limit_text.isdecimal():
                usage_text = _kernel_file(searched_folder / memory_file_names.usage_file).strip()
                stat_lines = _kernel_file(searched_folder / "memory.stat").splitlines()
                digits_by_stat_field = dict(stat_line.split()[:2] for stat_line in stat_lines)
                reclaimable_bytes = int(
                    digits_by_stat_field.get(memory_file_names.file_cache_field_name, 0)
                )
                used_bytes = max(int(usage_text or 0) - reclaimable_bytes, 0)
                yield _LimitedControlGroup(int(limit_text), used_bytes)
            if searched_folder == mount_folder:
                break
            searched_folder = searched_folder.parent


def _mounted_control_groups() -> Iterator[_MountedControlGroup]:
    """Yields the control groups of this process that can limit its memory.

    Control groups (cgroups) form one hierarchy or several. This process is in one group of each
    hierarchy.
    """
    # File system type of a hierarchy, "cgroup2" or "cgroup" -> path of this process's control group
    # from the root of the hierarchy.
    cgroup_path_by_file_system_type = {}
    for control_group_line in _kernel_file(GROUPS).splitlines():
        hierarchy_id, comma_separated_controllers, cgroup_path = control_group_line.split(":", 2)
        if hierarchy_id == "0" and not comma_separated_controllers:
            cgroup_path_by_file_system_type["cgroup2"] = cgroup_path
        elif "memory" in comma_separated_controllers.split(","):
            cgroup_path_by_file_system_type["cgroup"] = cgroup_path
    for mount_line in _kernel_file(MOUNTS).splitlines():
        mount_text, _, file_system_text = mount_line.partition(" - ")
        root_of_mount, mount_point = (
            _unescaped(mount_field) for mount_field in mount_text.split()[3:5]
        )
        file_system_type, _, mount_options = file_system_text.split(maxsplit=2)
        if file_system_type not in cgroup_path_by_file_system_type:
            continue
        if file_system_type == "cgroup" and "memory" not in mount_options.split(","):
            continue
        mount_folder = Path(mount_point)
        relative_path = os.path.relpath(
            cgroup_path_by_file_system_type[file_system_type], root_of_mount
        )
        cgroup_folder = mount_folder / relative_path
        # A container often sees only a part of the cgroup hierarchy, namely the container's control
        # group and the groups below it. If this process's control group has no folder in the
        # mounted part, the topmost folder of the part is used instead.
        if relative_path.startswith("..") or not cgroup_folder.is_dir():
            cgroup_folder = mount_folder
        yield _MountedControlGroup(cgroup_folder, mount_folder, FILE_NAMES[file_system_type])


def _kernel_file(path: Path) -> str:
    """Returns the text of a file that the Linux kernel provides, such as /proc/meminfo.

    The text is "" if the file is missing or cannot be read.
    """
    try:
        return path.read_text()
    except OSError:
        return ""


def _unescaped(field: str) -> str:
    """Decodes a field of mountinfo, in which spaces and backslashes are octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
