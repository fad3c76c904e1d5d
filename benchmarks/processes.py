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


def resident_bytes(field: str, pid: int | str = "self") -> int | None:
    """Returns the resident memory of a process in bytes, from Linux's /proc.

    Args:
        field: The field of /proc/PID/status: "VmRSS" for the present memory, "VmHWM" for the peak.
        pid: The id of the process. "self" for this process.

    Returns:
        The memory in bytes. None if the process has ended.
    """
    try:
        status_lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    kibibyte_texts = [
        status_line.split()[1]
        for status_line in status_lines
        if status_line.startswith(f"{field}:")
    ]
    return int(kibibyte_texts[0]) * 1024 if kibibyte_texts else None


class PeakMemoryMonitor:
    """Measures the peak resident memory of a process again and again until the process ends.

    A thread in the background measures the process whose id is passed to the constructor.

    Attributes:
        peak_memory_bytes: Peak resident memory of the process so far in bytes. 0 before the first
            measurement.
    """

    def __init__(self, pid: int) -> None:
        self.peak_memory_bytes = 0
        self._pid = pid
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while (peak_memory_bytes := resident_bytes("VmHWM", self._pid)) is not None:
            self.peak_memory_bytes = peak_memory_bytes
            time.sleep(0.02)


@dataclass(frozen=True)
class FinishedProcess:
    """A process that has ended with status 0.

    Attributes:
        stdout: Text that the process has written to its stdout.
        timed_stderr_lines: Tuple for each line that the process has written to its stderr. It
            contains the seconds from the start of the process to the line, and the line.
        seconds: Seconds from the start of the process to its end.
        peak_memory_bytes: Peak resident memory of the process in bytes.
        cpu_fraction_of_other_processes: Fraction of the machine's processor time that other
            processes used while this process ran. If it is more than a few percent, measured speeds
            mean little.
    """

    stdout: str
    timed_stderr_lines: list[tuple[float, str]]
    seconds: float
    peak_memory_bytes: int
    cpu_fraction_of_other_processes: float

    @property
    def result(self) -> dict[str, Any]:
        """The JSON object that the process printed as the last line of its stdout."""
        return json.loads(self.stdout.splitlines()[-1])

    def seconds_until(self, words: str) -> float:
        """Returns when the process first wrote a line with a certain text to its stderr.

        Args:
            words: The text, which may be a part of the line.

        Returns:
            The seconds from the start of the process to the line.

        Raises:
            StopIteration: If no line of stderr contains the text.
        """
        return next(
            seconds_since_start
            for seconds_since_start, stderr_line in self.timed_stderr_lines
            if words in stderr_line
        )


def run(command: Sequence[str], platform: str | None = "cpu") -> FinishedProcess:
    """Runs a command without network access for Hugging Face's libraries, and waits for its end.

    Args:
        command: The program and its arguments.
        platform: The platform of JAX in the process. None to let JAX choose.

    Returns:
        The ended process.

    Raises:
        SystemExit: If the command fails. This function first prints the command's stderr.
    """
    module_search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process_environment = os.environ | {"PYTHONPATH": module_search_path, "HF_HUB_OFFLINE": "1"}
    if platform is not None:
        # The tool also computes on the CPU, so JAX needs the platform "cpu" as well.
        process_environment["JAX_PLATFORMS"] = platform if platform == "cpu" else f"{platform},cpu"
    start_time = time.perf_counter()
    cpu_seconds_of_other_processes_at_start = _cpu_seconds_of_other_processes()
    timed_stderr_lines: list[tuple[float, str]] = []
    with subprocess.Popen(
        command, env=process_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started_process:
        peak_memory_monitor = PeakMemoryMonitor(started_process.pid)
        assert started_process.stdout is not None and started_process.stderr is not None
        stderr_stream = started_process.stderr

        def read_lines() -> None:
            for stderr_line in stderr_stream:
                timed_stderr_lines.append((time.perf_counter() - start_time, stderr_line))

        reader_thread = threading.Thread(target=read_lines)
        reader_thread.start()
        stdout_text = started_process.stdout.read()
        reader_thread.join()
    if started_process.returncode:
        sys.stderr.writelines(stderr_line for _, stderr_line in timed_stderr_lines)
        raise SystemExit(f"{' '.join(command)}: ended with status {started_process.returncode}")
    process_seconds = time.perf_counter() - start_time
    cpu_seconds_of_other_processes = max(
        0.0, _cpu_seconds_of_other_processes() - cpu_seconds_of_other_processes_at_start
    )
    cpu_fraction_of_other_processes = (
        cpu_seconds_of_other_processes / process_seconds / (os.cpu_count() or 1)
    )
    return FinishedProcess(
        stdout_text,
        timed_stderr_lines,
        process_seconds,
        peak_memory_monitor.peak_memory_bytes,
        cpu_fraction_of_other_processes,
    )


def _cpu_seconds_of_other_processes() -> float:
    """Returns the processor time that was used by all processes except the measured ones.

    The measured processes are children of this process, so the result is the time of all processes
    minus the time of this process's ended children.

    Returns:
        The processor time in seconds since the computer was started.
    """
    all_cores_line = Path("/proc/stat").read_text().split("\n")[0]
    # Clock ticks of all cores in eight states: user, nice, system, idle, iowait, irq, softirq,
    # steal.
    tick_counts = [int(tick_field) for tick_field in all_cores_line.split()[1:9]]
    idle_ticks, io_wait_ticks = tick_counts[3:5]
    busy_seconds = (sum(tick_counts) - idle_ticks - io_wait_ticks) / os.sysconf("SC_CLK_TCK")
    children_usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return busy_seconds - children_usage.ru_utime - children_usage.ru_stime


def extract(output: Path, flags: Sequence[str], platform: str = "cpu") -> dict[str, Any]:
    """Runs extract_activations.py in another process, on one machine with one host.

    Args:
        output: The output folder.
        flags: The flags of extract_activations.py, without --output_dir.
        platform: The platform of JAX.

    Returns:
        A dict with these figures.
        samples, tokens, bytes, shards: The totals in metadata.json.
        extraction_seconds: The seconds from the time at which the process began to store shards
            (`began` in the commit of the first shard) to the last update of metadata.json
            (`written` in this file).
        first_batch_seconds: The seconds from the start of the process to its log message about
            step 1.
        compile_seconds: The seconds of compiling the step, as the log reports them.
        process_seconds: The seconds from the start of the process to its end.
        peak_bytes: The peak resident memory of the process in bytes.
        disturbed: The fraction of the machine's processor time that other processes used while the
            process ran.

    Raises:
        SystemExit: If the extraction fails.
    """
    extraction_command = [sys.executable, TOOL, *flags, "--output_dir", str(output), "--verbose"]
    extraction_process = run(extraction_command, platform)
    first_commit = json.loads((output / "shard_0001.json").read_text())
    run_metadata = json.loads((output / "metadata.json").read_text())
    compile_message = next(
        stderr_line
        for _, stderr_line in extraction_process.timed_stderr_lines
        if "compiled in" in stderr_line
    )
    return {
        "samples": run_metadata["samples"],
        "tokens": run_metadata["tokens"],
        "bytes": run_metadata["bytes"],
        "shards": run_metadata["shards"],
        "extraction_seconds": run_metadata["written"] - first_commit["began"],
        "process_seconds": extraction_process.seconds,
        "peak_bytes": extraction_process.peak_memory_bytes,
        "disturbed": extraction_process.cpu_fraction_of_other_processes,
        "compile_seconds": float(compile_message.split("compiled in")[1].split()[0]),
        "first_batch_seconds": extraction_process.seconds_until(" step 1: "),
    }


def machine() -> dict[str, Any]:
    """Describes the computer on which the benchmark runs.

    Returns:
        A dict with the model name of the processor, the number of usable cores, those vector
        extensions of the processor on which speed depends, the size of the memory in bytes, the
        operating system, and the version of Python.
    """
    cpu_info_path = Path("/proc/cpuinfo")
    cpu_info_lines = cpu_info_path.read_text().splitlines() if cpu_info_path.exists() else []
    # Field of /proc/cpuinfo -> value. The values of later cores replace the values of earlier ones,
    # which is no loss, because all cores are equal.
    cpu_info: dict[str, str] = {}
    for cpu_info_line in cpu_info_lines:
        field_name, colon, field_value = cpu_info_line.partition(":")
        if colon:
            cpu_info[field_name.strip()] = field_value.strip()
    supported_cpu_features = cpu_info.get("flags", "").split()
    reported_cpu_features = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "processor": cpu_info.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "extensions": [
            cpu_feature
            for cpu_feature in reported_cpu_features
            if cpu_feature in supported_cpu_features
        ],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of each figure over the rounds: name of the figure -> median.

    Args:
        rounds: For each round, a dict: name of a figure -> figure. All rounds have the same names.
    """
    return {
        figure_name: statistics.median(figure_by_name[figure_name] for figure_by_name in rounds)
        for figure_name in rounds[0]
    }


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table whose first line contains the titles of the columns.

    Floats are printed with three significant digits.

    Args:
        rows: For each row, a dict: title of a column -> cell. All rows have the same titles.
    """
    cells_of_lines = [list(rows[0])]
    cells_of_lines += [[_shown(cell) for cell in row.values()] for row in rows]
    column_widths = [max(map(len, column)) for column in zip(*cells_of_lines, strict=True)]
    for cells_of_line in cells_of_lines:
        padded_cells = [
            cell.ljust(column_width)
            for cell, column_width in zip(cells_of_line, column_widths, strict=True)
        ]
        print("  ".join(padded_cells).rstrip(), flush=True)


def _shown(cell: Any) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def print_result(figures: Mapping[str, Any]) -> None:
    """Prints the figures of a benchmark, and a description of this machine, as one line of JSON.

    Args:
        figures: Name -> figure. All figures can be written as JSON.
    """
    print(json.dumps({"machine": machine(), **figures}))
