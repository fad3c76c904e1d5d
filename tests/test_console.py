"""What a run says while it goes on: log lines, progress, metrics."""

import json
import logging
import re

import pytest
from command_line import main
from memory_bucket import MemoryBucket, MemoryFolder, Process
from storages import open_storage

from activation_extraction.cli import console
from activation_extraction.cli.console import Progress
from activation_extraction.common.log import log, start_logging
from activation_extraction.model import devices
from activation_extraction.store.folder import Folder
from activation_extraction.store.metadata import read_stored

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (DEBUG|INFO|WARNING) machine 3 host (\d|\?): .+")
GAUGES = {"batches_ready": 4, "shards_stored": 2, "bytes_stored": 3 * 10**9}
GAUGES |= {"shards_writing": 4, "upload_retries": 5}


@pytest.mark.parametrize(
    "host,verbose,levels",
    [
        (0, False, ["INFO", "WARNING"]),
        (None, False, ["INFO", "WARNING"]),
        (1, False, ["WARNING"]),
        (1, True, ["DEBUG", "INFO", "WARNING"]),
    ],
)
def test_log_lines_say_when_where_and_how_grave(capsys, host, verbose, levels):
    start_logging(verbose, 3, host)
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        log.log(level, "a message")
    lines = capsys.readouterr().err.splitlines()
    assert [LINE.fullmatch(line)[1] for line in lines] == levels


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when the test says so."""
    now = [100.0]
    monkeypatch.setattr(console.time, "perf_counter", lambda: now[0])
    return now


def test_a_line_of_progress_and_of_metrics_every_interval(clock, capsys):
    start_logging(False, 3, 0)
    recorded = []
    progress = Progress(100, None, (40, 900), 30, 4, 8e12, lambda: dict(GAUGES), recorded.append)
    for _ in range(10):
        clock[0] += 10
        progress.advance(samples=5, tokens=2000, flops=2e13, kept=2000)
    assert [metrics["samples"] for metrics in recorded] == [55, 70, 85]
    for metrics in recorded:
        assert metrics["tokens_per_second"] == 200 and metrics["tokens_per_second_per_chip"] == 50
        assert metrics["tflops_per_second_per_chip"] == 0.5
        assert metrics["model_flops_utilisation"] == 0.25
        assert metrics.items() >= GAUGES.items()
    for _ in range(2):
        progress.close()
        assert recorded[-1]["samples"] == 90 and len(recorded) == 4
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all(map(LINE.fullmatch, lines))
    assert lines[0].endswith(
        "55 of 100 samples, 6,900 tokens, 200 tokens/s, 25% of peak; "
        "stored 2 shards, 3.00 GB, 4 being written, retries: 5"
    )


@pytest.mark.parametrize(
    "limits,told",
    [
        ((None, None), "45 samples, 930 tokens, 200 tokens/s; stored 2 shards"),
        ((None, 990), "45 samples, 930 of 990 tokens, 200 tokens/s; stored 2 shards"),
    ],
)
def test_a_line_of_progress_counts_what_earlier_runs_stored(limits, told, clock, capsys):
    start_logging(False, 3, 0)
    progress = Progress(*limits, (40, 900), 30, 1, None, lambda: dict(GAUGES), lambda _: None)
    clock[0] += 10
    progress.advance(samples=5, tokens=2000, flops=2e13, kept=30)
    progress.close()
    assert told in capsys.readouterr().err


@pytest.mark.long
def test_metrics_lie_beside_the_shards_and_survive(inputs, tmp_path):
    flags = [*inputs, "--layers_to_extract", 1, "--output_dir", tmp_path]
    assert main(*flags, "--max_samples", 50) == 0
    first = (tmp_path / "metrics.jsonl").read_text()
    assert main(*flags) == 0
    text = (tmp_path / "metrics.jsonl").read_text()
    last = json.loads(text.splitlines()[-1])
    assert text.startswith(first) and last.keys() >= GAUGES.keys()
    assert last["samples"] == 300 and last["tflops_per_second_per_chip"] > 0
    assert main(*flags, "--max_samples", 5, "--overwrite") == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_metrics_in_a_bucket_outlive_the_disk(tmp_path):
    remote = MemoryFolder(MemoryBucket(), Process())
    for number in range(3):
        storage = open_storage(tmp_path / str(number), {0: "h"}, remote=remote)
        storage.open()
        storage.record({"model_flops_utilisation": number / 10})
        storage.finalize(complete=False)
    lines = remote.read("metrics.jsonl").splitlines()
    assert [json.loads(line)["model_flops_utilisation"] for line in lines] == [0, 0.1, 0.2]
    assert read_stored(remote).metrics == {"model_flops_utilisation": 0.2}
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n{"a": 2}\n{"a":')  # cut off
    assert read_stored(Folder(str(tmp_path))).metrics == {"a": 2}


PEAKS = {"TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5p": 459e12, "TPU v6 lite": 918e12}
PEAKS |= {"NVIDIA H100 80GB HBM3": 989e12, "cpu": 0}


@pytest.mark.parametrize("kind", PEAKS)
def test_peaks_by_the_kind_of_device(kind, monkeypatch):
    device = type("Device", (), {"device_kind": kind})
    monkeypatch.setattr(devices.jax, "local_devices", lambda: [device])
    assert devices.peak_flops(2) == (2 * PEAKS[kind] if PEAKS[kind] else None)
