"""Measures reading a share of a run from a bucket: `python -m benchmarks.one_pass`.

many_shards.py runs this script in a new process for each measurement, so that the peak of the
process's memory is the memory of one reader. The script imports no module of this folder, so that
PYTHONPATH may name another checkout whose reader is measured. The output is one JSON object with
the figures (see `measure`).
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

# The number of tokens of a batch.
BATCH = 1024


def counts() -> dict[str, int]:
    """Returns the totals of the bucket's server, "requests" and "bytes" (see `Counts`).

    `Counts` is in bucket_server.py.
    """
    address = os.environ["STORAGE_EMULATOR_HOST"]
    with urllib.request.urlopen(f"{address}/counts") as answer:
        totals: dict[str, int] = json.load(answer)
    return totals


def mask_of(samples: int, keep: float) -> list[bool]:
    """Returns a mask of samples, in which the samples that are left out are evenly spaced.

    Args:
        samples: The number of samples.
        keep: The fraction of the samples to keep, less than 1.
    """
    distance = round(1 / (1 - keep))
    return [sample % distance != 0 for sample in range(samples)]


def measure(url: str, hook: str, options: dict[str, Any], keep: float) -> dict[str, float]:
    """Reads the batches of a run twice, each time with a new dataset, and measures both passes.

    The buffer for activations is allocated in the first pass, which may take longer than reading a
    small run. Therefore, speeds are measured in the second pass.

    Args:
        url: The URL of the run in the bucket.
        hook: The name of the hook to read.
        options: The options of the batches (see `ActivationDataset.batches`).
        keep: The fraction of the samples that pass the filter `where`. 1 for no filter.

    Returns:
        A dict with these figures.
        opening_s, opening_requests, opening_mb: The seconds, the requests and the MB of answers of
            opening the run.
        first_s, first_requests, first_mb: The seconds, the requests and the MB of answers from the
            call of `batches` to the first batch, in the first pass.
        downloaded: The bytes of answers in the second pass, without opening the run, for each byte
            of activations in batches.
        requests_per_gb: The requests in the second pass for each GB of activations in batches.
        cpu_s_per_gb: The CPU seconds of this process in the second pass for each GB of activations
            in batches.
        mb_per_s: The MB of activations in batches per second of the second pass.
        peak_mb: The peak resident memory of this process in MB.
    """
    start_time, counts_before = time.perf_counter(), counts()
    dataset = ActivationDataset(url, [hook])
    figures: dict[str, float] = {"opening_s": time.perf_counter() - start_time}
    counts_after = counts()
    figures["opening_requests"] = counts_after["requests"] - counts_before["requests"]
    figures["opening_mb"] = (counts_after["bytes"] - counts_before["bytes"]) / 1e6
    start_time, counts_before = time.perf_counter(), counts_after
    if keep < 1:
        options["where"] = mask_of(len(dataset), keep)
    batches = dataset.batches(BATCH, **options)
    next(batches)
    figures["first_s"] = time.perf_counter() - start_time
    counts_after = counts()
    figures["first_requests"] = counts_after["requests"] - counts_before["requests"]
    figures["first_mb"] = (counts_after["bytes"] - counts_before["bytes"]) / 1e6
    # The first pass is completed without being measured.
    for _ in batches:
        pass
    dataset = ActivationDataset(url, [hook])
    counts_before = counts()
    start_time, cpu_start_time = time.perf_counter(), time.process_time()
    batch_bytes = sum(batch[hook].nbytes for batch in dataset.batches(BATCH, **options))
    cpu_seconds = time.process_time() - cpu_start_time
    seconds = time.perf_counter() - start_time
    counts_after = counts()
    answer_bytes = counts_after["bytes"] - counts_before["bytes"]
    num_requests = counts_after["requests"] - counts_before["requests"]
    figures["downloaded"] = answer_bytes / batch_bytes
    figures["requests_per_gb"] = num_requests / batch_bytes * 1e9
    figures["cpu_s_per_gb"] = cpu_seconds / batch_bytes * 1e9
    figures["mb_per_s"] = batch_bytes / 1e6 / seconds
    peak_match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert peak_match is not None
    figures["peak_mb"] = int(peak_match[1]) * 1024 / 1e6
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("hook")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON, of the batches")
    parser.add_argument("--keep", type=float, default=1.0, help="share of samples of `where`")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.url, arguments.hook, arguments.options, arguments.keep)))
