"""Runs and measures processes, and prints the figures of benchmarks.

Benchmarks end with `print_result`, so the last line that they print is one JSON object.
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
    """Returns the resident memory of a process in bytes, as Linux counts it.

    Args:
        field: "VmRSS" for the present size, "VmHWM" for the peak.
        pid: The id of the process. "self" for this one.

    Returns:
        The bytes, or None if the process has ended.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(sizes[0]) * 1024 if sizes else None


class PeakMemory:
    """Watches the peak resident memory of a process until it ends.

    Attributes:
        bytes: The peak so far; 0 before the first look.
    """

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._pid = pid
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while (peak := resident("VmHWM", self._pid)) is not None:
            self.bytes = peak
            time.sleep(0.02)


@dataclass(frozen=True)
class Finished:
    """A process that has ended with status 0.

    Attributes:
        output: Its stdout.
        lines: The lines of its stderr, each with the seconds since its start.
        seconds: The seconds from its start to its end.
        peak_bytes: Its peak resident memory.
        disturbed: The share of the machine's processor time that other processes used meanwhile.
            If it is more than a few percent, the figures mean little.
    """

    output: str
    lines: list[tuple[float, str]]
    seconds: float
    peak_bytes: int
    disturbed: float

    @property
    def result(self) -> dict[str, Any]:
        """Returns the JSON object in the last line of its stdout."""
        return json.loads(self.output.splitlines()[-1])

    def seconds_until(self, words: str) -> float:
        """Returns the seconds until its stderr first contained these words.

        Raises:
            StopIteration: If its stderr does not contain them.
        """
        return next(at for at, line in self.lines if words in line)


def run(command: Sequence[str], platform: str | None = "cpu") -> Finished:
    """Runs a command, in which Hugging Face's libraries do not use the network.

    Args:
        command: The program and its arguments.
        platform: The platform of JAX in the process. None to let JAX choose.

    Returns:
        The ended process.

    Raises:
        SystemExit: If the command fails. Its stderr is printed.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    if platform is not None:  # some computations run on the CPU, whatever the platform
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
    """Returns the processor time of all processes but this one's ended children, in seconds."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    idle, waiting = fields[3:5]
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = (sum(fields) - idle - waiting) / os.sysconf("SC_CLK_TCK")
    return busy - ours.ru_utime - ours.ru_stime


def extract(output: Path, flags: Sequence[str], platform: str = "cpu") -> dict[str, Any]:
    """Runs one extraction by this tool, on one machine with one host.

    Args:
        output: The folder of the output.
        flags: The flags of the tool, without --output_dir.
        platform: The platform of JAX.

    Returns:
        samples, tokens, bytes, shards: The totals in metadata.json.
        extraction_seconds: The seconds from the first shard's `began` until the end of the run is
            recorded.
        first_batch_seconds: The seconds from the start of the process until the log of step 1.
        compile_seconds, process_seconds: The seconds of compiling, and of the whole process.
        peak_bytes, disturbed: See `Finished`.

    Raises:
        SystemExit: If the extraction fails.
    """
    command = [sys.executable, TOOL, *flags, "--output_dir", str(output), "--verbose"]
    done = run(command, platform)
    shard = json.loads((output / "shard_0001.json").read_text())
    totals = json.loads((output / "metadata.json").read_text())
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
    """Returns a description of this machine: processor, memory, system and Python."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    pairs = [line.split(":", 1) for line in info.splitlines() if ":" in line]
    fields = {name.strip(): text.strip() for name, text in pairs}
    extensions = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "processor": fields.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "extensions": [name for name in extensions if name in fields.get("flags", "").split()],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of each figure over the rounds.

    Args:
        rounds: The figures of each round by name. All rounds have the same names.
    """
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table, in which floats have three significant digits.

    Args:
        rows: Title -> cell of each row. All rows have the same titles.
    """
    cells = [list(rows[0])]
    cells += [[_shown(cell) for cell in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(padded).rstrip(), flush=True)


def _shown(cell: Any) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def print_result(figures: Mapping[str, Any]) -> None:
    """Prints the figures of a benchmark, and a description of this machine, as one line of JSON."""
    print(json.dumps({"machine": machine(), **figures}))
