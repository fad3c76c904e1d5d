"""Reads a share of a run from a bucket, and prints what it took: `python -m benchmarks.one_pass`.

benchmarks/many_shards.py starts it once for each figure, in a process of its own, so that the peak
of memory is that of one reader. It imports nothing of this folder, so that PYTHONPATH may name
another checkout whose reader is to be measured.
"""

import argparse
import json
import os
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

from activation_extraction import ActivationDataset

BATCH = 1024  # tokens


def counts() -> dict[str, int]:
    """Returns the totals of the bucket's server: `requests` and `bytes`."""
    address = os.environ["STORAGE_EMULATOR_HOST"]
    with urllib.request.urlopen(f"{address}/counts") as answer:
        totals: dict[str, int] = json.load(answer)
    return totals


def mask_of(samples: int, keep: float) -> list[bool]:
    """Returns a mask of samples, in which those that are left out are evenly spread.

    Args:
        samples: Number of samples.
        keep: Share of the samples to keep, less than 1.
    """
    distance = round(1 / (1 - keep))
    return [number % distance != 0 for number in range(samples)]


def measure(url: str, hook: str, options: dict[str, Any], keep: float) -> dict[str, float]:
    """Reads the batches of a run twice, with datasets of its own, and measures the second pass.

    In the first pass, the buffer is allocated, which may take longer than reading a small run.

    Args:
        url: URL of the run in the bucket.
        hook: Name of the hook to read.
        options: Options of the batches.
        keep: Share of the samples that pass the filter `where`. 1 for no filter.

    Returns:
        opening_s, opening_requests, opening_mb: Seconds, requests and MB of opening the run.
        first_s, first_requests, first_mb: Seconds, requests and MB from the call of `batches` to
            the first batch, in the first pass.
        downloaded: Bytes of all answers in the second pass, without those of opening the run, for
            each byte of the activations in batches.
        requests_per_gb, cpu_s_per_gb, mb_per_s: Requests and CPU seconds of this process for each
            GB of activations in batches, and MB of these in a second.
        peak_mb: Peak of this process's memory.
    """
    began, before = time.perf_counter(), counts()
    dataset = ActivationDataset(url, [hook])
    figures: dict[str, float] = {"opening_s": time.perf_counter() - began}
    after = counts()
    figures["opening_requests"] = after["requests"] - before["requests"]
    figures["opening_mb"] = (after["bytes"] - before["bytes"]) / 1e6
    began, before = time.perf_counter(), after
    if keep < 1:
        options["where"] = mask_of(len(dataset), keep)
    batches = dataset.batches(BATCH, **options)
    next(batches)
    figures["first_s"] = time.perf_counter() - began
    after = counts()
    figures["first_requests"] = after["requests"] - before["requests"]
    figures["first_mb"] = (after["bytes"] - before["bytes"]) / 1e6
    for _ in batches:
        pass
    dataset = ActivationDataset(url, [hook])
    began, before, cpu = time.perf_counter(), counts(), time.process_time()
    size = sum(batch[hook].nbytes for batch in dataset.batches(BATCH, **options))
    cpu = time.process_time() - cpu
    seconds = time.perf_counter() - began
    after = counts()
    figures["downloaded"] = (after["bytes"] - before["bytes"]) / size
    figures["requests_per_gb"] = (after["requests"] - before["requests"]) / size * 1e9
    figures["cpu_s_per_gb"] = cpu / size * 1e9
    figures["mb_per_s"] = size / 1e6 / seconds
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    figures["peak_mb"] = int(peak[1]) * 1024 / 1e6
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("hook")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON, of the batches")
    parser.add_argument("--keep", type=float, default=1.0, help="share of samples of `where`")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.url, arguments.hook, arguments.options, arguments.keep)))
