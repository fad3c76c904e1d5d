"""StorageOptions: how an ActivationStorage stores, where that does not change what it stores or is
fixed when a run begins."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

GIGABYTE = 10**9
MOST_WAITING = 16 * GIGABYTE
MEMORY = Path("/proc/meminfo")
LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True)
class StorageOptions:
    """shard_size_gb: the activations of a shard before compression, in 10^9 bytes; a shard holds at
    least one sample. shard_format: "pickle", which `compress` gzips, or "safetensors". max_samples:
    the most samples to store. overwrite: delete what is stored already, instead of continuing it.
    keep_local: with a bucket, write local shards as well. threads: how many compress and add up;
    None: as many as there are cores. waiting_gb: the most that may wait in memory to be stored;
    None: a quarter of the memory at hand, at most 16 GB, and at least two shards.
    """

    shard_size_gb: float = 1.0
    shard_format: str = "pickle"
    compress: bool = True
    max_samples: int | None = None
    overwrite: bool = False
    keep_local: bool = False
    threads: int | None = None
    waiting_gb: float | None = None

    @property
    def shard_bytes(self) -> float:
        return self.shard_size_gb * GIGABYTE

    @property
    def waiting_bytes(self) -> float:
        """The most bytes that may wait in memory to be stored."""
        if self.waiting_gb is not None:
            return self.waiting_gb * GIGABYTE
        return max(min(memory_at_hand() / 4, MOST_WAITING), 2 * self.shard_bytes)

    @property
    def writer_threads(self) -> int:
        if hasattr(os, "sched_getaffinity"):  # the cores that this process may use
            return self.threads or len(os.sched_getaffinity(0))
        return self.threads or os.cpu_count() or 1


def memory_at_hand() -> int:
    """The bytes of memory that this process can still have, as far as the system tells."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    if MEMORY.exists() and (told := re.search(r"MemAvailable: *([0-9]+) kB", MEMORY.read_text())):
        found.append(int(told[1]) * 1024)
    if all(path.exists() for path in LIMITS):  # of a container
        limit, used = (path.read_text().strip() for path in LIMITS)
        if limit.isdecimal():
            found.append(max(int(limit) - int(used), 0))
    return min(found)
