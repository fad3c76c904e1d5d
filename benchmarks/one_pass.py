"""Measures how fast a run, or a part of it, is read from a bucket: `python -m benchmarks.one_pass`.

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

# The number of tokens in a batch.
BATCH_TOKENS = 1024


def server_traffic() -> dict[str, int]:
    """Asks the bucket's server for the totals of its responses since its start.

    Returns:
        A dict with these totals.
        requests: The number of answered requests, except the requests with which this function asks
            for the totals.
        bytes: The number of bytes in the bodies of the responses. A body is a page of a listing, or
            the range of an object that a client requested.
    """
    server_url = os.environ["STORAGE_EMULATOR_HOST"]
    with urllib.request.urlopen(f"{server_url}/counts") as counts_response:
        traffic_total_by_name: dict[str, int] = json.load(counts_response)
    return traffic_total_by_name


def mask_of(num_samples: int, keep: float) -> list[bool]:
    """Returns a value for the option `where` of `batches`, which keeps some samples of a run.

    Args:
        num_samples: The number of samples in the run.
        keep: The fraction of the samples to keep, less than 1.

    Returns:
        For each sample, whether it is kept. Samples that are left out are evenly spaced.
    """
    stride_of_left_out_samples = round(1 / (1 - keep))
    return [sample_number % stride_of_left_out_samples != 0 for sample_number in range(num_samples)]


def measure(url: str, hook: str, options: dict[str, Any], keep: float) -> dict[str, float]:
    """Reads the batches of a run twice, each time with a new dataset, and measures both passes.

    In the first pass, the buffer for activations is allocated. This may take longer than reading a
    small run, so speeds are measured in the second pass.

    Args:
        url: The URL of the run in the bucket.
        hook: The name of the hook to read.
        options: Keyword arguments of `ActivationDataset.batches`.
        keep: The fraction of the samples that pass the filter `where`. 1 for no filter.

    Returns:
        A dict with these figures.
        opening_s, opening_requests, opening_mb: The seconds that opening the run takes in the first
            pass, the number of its requests, and the MB of their responses.
        first_s, first_requests, first_mb: The seconds from the end of opening to the first batch of
            the first pass, the number of requests in this time, and the MB of their responses.
        downloaded: The bytes of responses in the second pass, without opening the run, for each
            byte of activations in batches.
        requests_per_gb: The requests in the second pass for each GB of activations in batches.
        cpu_s_per_gb: The CPU seconds of this process in the second pass for each GB of activations
            in batches.
        mb_per_s: The MB of activations in batches per second of the second pass.
        peak_mb: The peak resident memory of this process in MB.
    """
    start_time, traffic_totals_before_opening = time.perf_counter(), server_traffic()
    dataset = ActivationDataset(url, [hook])
    figure_by_name: dict[str, float] = {"opening_s": time.perf_counter() - start_time}
    traffic_totals_after_opening = server_traffic()
    figure_by_name["opening_requests"] = (
        traffic_totals_after_opening["requests"] - traffic_totals_before_opening["requests"]
    )
    figure_by_name["opening_mb"] = (
        traffic_totals_after_opening["bytes"] - traffic_totals_before_opening["bytes"]
    ) / 1e6
    start_time = time.perf_counter()
    if keep < 1:
        options["where"] = mask_of(len(dataset), keep)
    first_pass_batches = dataset.batches(BATCH_TOKENS, **options)
    next(first_pass_batches)
    figure_by_name["first_s"] = time.perf_counter() - start_time
    traffic_totals_after_first_batch = server_traffic()
    figure_by_name["first_requests"] = (
        traffic_totals_after_first_batch["requests"] - traffic_totals_after_opening["requests"]
    )
    figure_by_name["first_mb"] = (
        traffic_totals_after_first_batch["bytes"] - traffic_totals_after_opening["bytes"]
    ) / 1e6
    # The rest of the first pass is not measured, because the reader allocates its buffer for
    # activations in the first pass, which slows the pass down.
    for _ in first_pass_batches:
        pass
    dataset = ActivationDataset(url, [hook])
    traffic_totals_before_second_pass = server_traffic()
    start_time, cpu_start_time = time.perf_counter(), time.process_time()
    activation_bytes = sum(batch[hook].nbytes for batch in dataset.batches(BATCH_TOKENS, **options))
    cpu_seconds = time.process_time() - cpu_start_time
    pass_seconds = time.perf_counter() - start_time
    traffic_totals_after_second_pass = server_traffic()
    response_byte_count = (
        traffic_totals_after_second_pass["bytes"] - traffic_totals_before_second_pass["bytes"]
    )
    num_requests = (
        traffic_totals_after_second_pass["requests"] - traffic_totals_before_second_pass["requests"]
    )
    figure_by_name["downloaded"] = response_byte_count / activation_bytes
    figure_by_name["requests_per_gb"] = num_requests / activation_bytes * 1e9
    figure_by_name["cpu_s_per_gb"] = cpu_seconds / activation_bytes * 1e9
    figure_by_name["mb_per_s"] = activation_bytes / 1e6 / pass_seconds
    peak_memory_match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert peak_memory_match is not None
    figure_by_name["peak_mb"] = int(peak_memory_match[1]) * 1024 / 1e6
    return figure_by_name


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("hook")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON, of the batches")
    parser.add_argument(
        "--keep", type=float, default=1.0, help="fraction of samples that pass `where`"
    )
    parsed_flags = parser.parse_args()
    print(
        json.dumps(
            measure(parsed_flags.url, parsed_flags.hook, parsed_flags.options, parsed_flags.keep)
        )
    )
