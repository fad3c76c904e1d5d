"""How much memory this process can use, with control groups as Slurm, Docker and systemd make them.

The files are made in a temporary folder, in the form that the kernel gives them.
"""

import os

import pytest

from activation_extraction.common import host_memory

GB = 10**9
UNLIMITED = 9223372036854771712  # what version 1 has for no limit
MOUNTED = "31 23 0:27 {root} {at} rw,nosuid shared:9 - {kind} cgroup {options}\n"


class Kernel:
    """Files of the kernel: the groups of this process, mounts, and control groups with memory."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.mounts = folder, ""
        self._patch = monkeypatch.setattr
        self.has(available=900 * GB)
        self.belongs("")
        monkeypatch.setattr(os, "sysconf", lambda name: 10**12 // host_memory.PAGE_BYTES)

    def _write(self, name, text):
        (self.folder / name).write_text(text)
        return self.folder / name

    def has(self, available):
        text = f"MemTotal: 1000000000 kB\nMemAvailable:  {available // 1024} kB\n"
        self._patch(host_memory, "MEMORY_INFO", self._write("meminfo", text))

    def belongs(self, lines):
        self._patch(host_memory, "GROUPS", self._write("cgroup", lines))

    def mount(self, at, kind="cgroup2", root="/", options="rw"):
        """Mounts a tree of groups below the temporary folder."""
        (self.folder / at).mkdir(parents=True, exist_ok=True)
        escaped = str(self.folder / at).replace(" ", r"\040")
        self.mounts += MOUNTED.format(root=root, at=escaped, kind=kind, options=options)
        self._patch(host_memory, "MOUNTS", self._write("mountinfo", self.mounts))

    def group(self, path, limit, used=0, cache=0, version=2):
        folder = self.folder / path
        folder.mkdir(parents=True, exist_ok=True)
        names = {1: ("limit_in_bytes", "usage_in_bytes"), 2: ("max", "current")}[version]
        for name, value in zip(names, (limit, used), strict=True):
            (folder / f"memory.{name}").write_text(f"{value}\n")
        total = "total_" if version == 1 else ""
        (folder / "memory.stat").write_text(f"{total}active_file 5\n{total}inactive_file {cache}\n")


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    return Kernel(tmp_path, monkeypatch)


def memory():
    return host_memory.host_memory() / GB, host_memory.available_memory() / GB


def test_without_groups_it_is_the_machine_s(kernel):
    assert memory() == (1000, pytest.approx(900, abs=1e-5))
    host_memory.GROUPS.unlink()
    host_memory.MEMORY_INFO.unlink()
    assert memory() == (1000, 1000)


def test_a_slurm_job_of_version_2_is_limited_by_a_group_above_its_task(kernel):
    """Its task has no limit of its own; the root has no files."""
    job = "sys/system.slice/slurmstepd.scope/job_7"
    kernel.mount("sys")
    kernel.belongs(f"0::/{job.removeprefix('sys/')}/step_0/user/task_0\n")
    kernel.group(f"{job}/step_0/user/task_0", "max", 5 * GB)
    kernel.group(f"{job}/step_0", "max", 6 * GB)
    kernel.group(job, 64 * GB, 20 * GB)
    kernel.group("sys/system.slice", "max", 300 * GB)
    assert memory() == (64, 44)
    # A group above may have less room left, although its limit is larger.
    kernel.group("sys/system.slice", 400 * GB, 390 * GB)
    assert memory() == (64, 10)
    # The file cache of what was read is given back; a group may be over its limit for a moment.
    kernel.group("sys/system.slice", 400 * GB, 390 * GB, cache=15 * GB)
    assert memory() == (64, 25)
    kernel.group(job, 64 * GB, 65 * GB)
    assert memory() == (64, 0)


def test_a_slurm_job_of_version_1(kernel):
    """Version 1 has a tree for each controller, and may stand beside version 2."""
    kernel.mount("c pu", "cgroup", options="rw,cpu,cpuacct")
    kernel.mount("unified")
    kernel.mount("me mory", "cgroup", options="rw,memory")
    kernel.belongs(
        "11:cpu,cpuacct:/slurm/uid_9/job_7\n5:memory:/slurm/uid_9/job_7/step_0/task_0\n"
        "1:name=systemd:/system.slice\n0::/system.slice/slurmd.service\n"
    )
    kernel.group("c pu/slurm/uid_9/job_7", 1 * GB, version=1)  # of no memory
    kernel.group("me mory", UNLIMITED, 300 * GB, version=1)
    kernel.group("me mory/slurm", UNLIMITED, 300 * GB, version=1)
    kernel.group("me mory/slurm/uid_9/job_7", 32 * GB, 12 * GB, 2 * GB, version=1)
    kernel.group("me mory/slurm/uid_9/job_7/step_0", 48 * GB, 11 * GB, version=1)
    kernel.group("me mory/slurm/uid_9/job_7/step_0/task_0", UNLIMITED, 11 * GB, version=1)
    assert memory() == (32, 22)


@pytest.mark.parametrize(
    "path, root",
    [
        ("/", "/"),  # in a namespace of its own
        ("/docker/1f", "/docker/1f"),  # the machine's path, and the tree mounted from there on
        ("/docker/1f/inner", "/docker/1f"),
        ("/../elsewhere", "/"),  # moved out of its namespace: only the mounted group is seen
        ("/docker/other", "/docker/1f"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_in_a_container_the_mounted_group_limits(path, root, version, kernel):
    kind = {1: "cgroup", 2: "cgroup2"}[version]
    kernel.mount("sys", kind, root, "rw,memory" if version == 1 else "rw,nsdelegate")
    kernel.belongs({1: f"4:memory:{path}\n", 2: f"0::{path}\n"}[version])
    kernel.group("sys", 8 * GB, 3 * GB, version=version)
    assert memory() == (8, 5)
    if path.endswith("inner"):
        kernel.group("sys/inner", 4 * GB, 1 * GB, version=version)
        assert memory() == (4, 3)


def test_the_machine_s_own_memory_may_be_the_least(kernel):
    kernel.mount("sys")
    kernel.belongs("0::/\n")
    kernel.group("sys", 5000 * GB, 10 * GB)
    kernel.has(available=7 * GB)
    assert memory() == (1000, pytest.approx(7, abs=1e-5))
