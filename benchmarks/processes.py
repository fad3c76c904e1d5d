"""Runs processes that are measured, and prints what benchmarks have found.

Every benchmark ends with `print_result`, whose line of JSON is the last one that it prints.
"""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOOL = str(ROOT / "extract_activations.py")


def resident(field: str, pid: int | str = "self") -> int | None:
    """Bytes that a process has in memory, as Linux counts them: VmRSS now, VmHWM at the most.

    None for a process that has ended.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found[0]) * 1024 if found else None


class PeakMemory:
    """Watches the peak resident size of a process, as Linux counts it, until it ends."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._pid = pid
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while (found := resident("VmHWM", self._pid)) is not None:
            self.bytes = found
            time.sleep(0.02)


@dataclass(frozen=True)
class Finished:
    """A process that ended well.

    lines: of its stderr, each with the seconds since its start. disturbed: the share of the
    machine's time that others took meanwhile; with more than a few percent figures mean little.
    """

    output: str
    lines: list[tuple[float, str]]
    seconds: float
    peak_bytes: int
    disturbed: float

    @property
    def result(self) -> dict[str, Any]:
        """Its last line, a JSON object."""
        return json.loads(self.output.splitlines()[-1])

    def seconds_until(self, words: str) -> float:
        """When it first printed this to stderr. Raises StopIteration when it did not."""
        return next(at for at, line in self.lines if words in line)


def run(command: Sequence[str], platform: str | None = "cpu") -> Finished:
    """Runs a command without network, on one of JAX's platforms (None: which it prefers).

    Exits, showing its stderr, when it fails.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    if platform is not None:  # JAX computes some things on the CPU in any case
        environment["JAX_PLATFORMS"] = ",".join(dict.fromkeys([platform, "cpu"]))
    began, before = time.perf_counter(), _seconds_of_others()
    lines: list[tuple[float, str]] = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        peak = PeakMemory(process.pid)
        assert process.stdout is not None and process.stderr is not None
        stderr = process.stderr

        def read_lines() -> None:
            lines.extend((time.perf_counter() - began, line) for line in stderr)

        reader = threading.Thread(target=read_lines)
        reader.start()
        output = process.stdout.read()
        reader.join()
    if process.returncode:
        sys.stderr.writelines(line for _, line in lines)
        raise SystemExit(f"{' '.join(command)}: ended with status {process.returncode}")
    seconds = time.perf_counter() - began
    disturbed = max(0.0, _seconds_of_others() - before) / seconds / (os.cpu_count() or 1)
    return Finished(output, lines, seconds, peak.bytes, disturbed)


def _seconds_of_others() -> float:
    """Processor time of all that is neither idle nor a child of ours that has ended."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    idle, waiting = fields[3:5]
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = (sum(fields) - idle - waiting) / os.sysconf("SC_CLK_TCK")
    return busy - ours.ru_utime - ours.ru_stime


def extract(output: Path, flags: Sequence[str], platform: str = "cpu") -> dict[str, Any]:
    """One extraction by this tool: totals of its metadata, seconds and peak memory in bytes.

    extraction_seconds: from the opening of the folder until the end of the run is recorded.
    first_batch_seconds: from the start of the process until storage has the first batch.
    """
    command = [sys.executable, TOOL, *flags, "--output_dir", str(output), "--verbose"]
    done = run(command, platform)
    shard, totals = (
        json.loads((output / name).read_text()) for name in ("shard_0001.json", "metadata.json")
    )
    compiled = next(line for _, line in done.lines if "compiled in" in line)
    return {
        **{name: totals[name] for name in ("samples", "tokens", "bytes", "shards")},
        "extraction_seconds": totals["written"] - shard["began"],
        "process_seconds": done.seconds,
        "peak_bytes": done.peak_bytes,
        "disturbed": done.disturbed,
        "compile_seconds": float(compiled.split("compiled in")[1].split()[0]),
        "first_batch_seconds": done.seconds_until(" step 1: "),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    pairs = [line.split(":", 1) for line in info.splitlines() if ":" in line]
    fields = {name.strip(): value.strip() for name, value in pairs}
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "processor": fields.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "extensions": [name for name in wanted if name in fields.get("flags", "").split()],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median over the rounds of every figure."""
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows with the same keys as a table, numbers with three significant digits."""
    cells = [[*rows[0]], *([_shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(padded).rstrip(), flush=True)


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def print_result(result: Mapping[str, Any]) -> None:
    """Prints what a benchmark has found, and the machine that it ran on, as one line of JSON."""
    print(json.dumps({"machine": machine(), **result}))
