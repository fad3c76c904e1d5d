"""Measures how fast a run of many shards is opened: `python -m benchmarks.opening`.

It stores a run of 5,000 shards of 64 hosts, and serves the run as a bucket whose answers begin
after 30 ms (bucket_server.py). Each shard has one sample with two tokens at 14 hooks, so that
opening reads little else than the JSON files. Each of these actions runs in a new process:

- `dataset`: opens an ActivationDataset, and reads its length, hooks and statistics;
- `status`: does what --status does. --verify and --repair begin by reading the same files;
- `continue`: does what the first host does before it loads the model, if its run is started again.
  It looks for the folders of other hosts and for the metadata of the stored run, and reads its own
  commits to determine where to continue.

The last line printed is one JSON object with the seconds, the CPU seconds, the requests and the MB
of answers of each action.
"""

import argparse
import contextlib
import io
import math
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import ml_dtypes
import numpy as np

from activation_extraction import ActivationDataset
from activation_extraction.cli.flags import StorageOptions
from activation_extraction.inspect.status import show_status
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity, RunFacts
from activation_extraction.store.run_folders import RunFolders, folder_name
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Worker
from benchmarks.bucket_server import BUCKET, RATE, bucket_server, counts
from benchmarks.processes import print_result

LAYERS = 14
HOOK_NAME_BY_LAYER: dict[int | str, str] = {
    layer_number: f"blocks.{layer_number}.hook_resid_post" for layer_number in range(LAYERS)
}
# The number of values of one token at a hook.
WIDTH = 4
# The number of tokens of a sample.
TOKENS = 2
# The name of the run's folder in the bucket.
RUN = "run"
OPTIONS = StorageOptions(shard_size_gb=1e-9, shard_format="safetensors")
# OPTIONS limits the size of a shard to one byte, so every shard contains a single sample.
SAMPLES_PER_SHARD = 1


def identity_of_host(host_number: int, num_hosts: int) -> Identity:
    """Returns the identity (see `Identity`) with which a host stores its share of the run.

    Args:
        host_number: Number of the host, from 0.
        num_hosts: Number of hosts of the run.
    """
    worker = Worker(host_number=host_number, num_hosts=num_hosts)
    return Identity(
        data="files",
        activation_dtype="bfloat16",
        storage=OPTIONS,
        hooks=tuple(HOOK_NAME_BY_LAYER.values()),
        worker=worker,
    )


def store_host(root: Path, num_shards: int, num_hosts: int, host_number: int) -> None:
    """Stores the shards of one host, unless they are stored already.

    Args:
        root: Local folder that the server of bucket_server.py serves as a bucket.
        num_shards: Number of shards of the host, each with one sample.
        num_hosts: Number of hosts of the run.
        host_number: Number of the host, from 0.
    """
    host_identity = identity_of_host(host_number, num_hosts)
    host_folder = root / RUN / folder_name(host_identity.worker, in_bucket=True)
    run_facts = RunFacts(
        facts_by_hook_key={layer_number: {"width": WIDTH} for layer_number in HOOK_NAME_BY_LAYER}
    )
    activations = np.ones((TOKENS, WIDTH), ml_dtypes.bfloat16)
    token_ids = np.arange(TOKENS, dtype=np.int32)
    with ActivationStorage(
        host_folder, HOOK_NAME_BY_LAYER, OPTIONS, host_identity, facts=run_facts
    ) as storage:
        num_samples_to_store = 0 if storage.complete else num_shards * SAMPLES_PER_SHARD
        for sample_number in range(num_samples_to_store):
            for layer_number in HOOK_NAME_BY_LAYER:
                storage.add_activation(layer_number, activations, sample_number, "", token_ids)


def open_dataset(url: str, num_hosts: int) -> None:
    """Opens a run as a dataset, and reads its length, hooks and statistics, which need no shard.

    Args:
        url: URL of the run.
        num_hosts: Number of hosts. Not used, but all measured functions have the same arguments.
    """
    dataset = ActivationDataset(url)
    assert len(dataset) and len(dataset.hooks) == len(dataset.statistics) == LAYERS


def make_status_report(url: str, num_hosts: int) -> None:
    """Does the work of --status for a run, so that it can be measured, and discards the report.

    Args:
        url: URL of the run.
        num_hosts: Number of hosts. Not used, but all measured functions have the same arguments.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        assert show_status(Folder(url), writes_totals=False) == 0


def plan_continued_run(url: str, num_hosts: int) -> None:
    """Determines where the first host of a stored run continues, as its process does at a restart.

    The process looks for the folders of other hosts and for the metadata of the stored run, and
    reads its own commits. As the stored run is complete, nothing is left to do.

    Args:
        url: URL of the run.
        num_hosts: Number of hosts of the run.
    """
    first_host_identity = identity_of_host(0, num_hosts)
    with tempfile.TemporaryDirectory() as local_folder:
        run_folders = RunFolders(
            first_host_identity.worker, Path(local_folder), url, upload_timeout_seconds=60
        )
        run_folders.check_stale_folders(overwrite=False)
        run_folders.earlier()
        storage = ActivationStorage(
            local_folder, HOOK_NAME_BY_LAYER, OPTIONS, first_host_identity, run_folders.remote
        )
        run_folders.check_siblings(first_host_identity)
        assert storage.complete and storage.plan.mark is None


def measure(
    action: Callable[[str, int], None], root: Path, num_hosts: int, latency: float
) -> dict[str, float]:
    """Serves the stored run as a bucket, and measures an action on it.

    Args:
        action: Function to measure. It takes the URL of the run and the number of hosts.
        root: Local folder that the server of bucket_server.py serves as a bucket.
        num_hosts: Number of hosts of the run.
        latency: Milliseconds before each answer.

    Returns:
        The figures by name:
            seconds: Seconds that the action took.
            core_seconds: CPU seconds of this process during the action.
            requests: Number of requests that the server answered.
            mb: MB of the answers.
    """
    with bucket_server(root, latency, RATE) as server_address:
        traffic_before_action = counts(server_address)
        start_time, cpu_start_time = time.perf_counter(), time.process_time()
        action(f"gs://{BUCKET}/{RUN}", num_hosts)
        seconds = time.perf_counter() - start_time
        cpu_seconds = time.process_time() - cpu_start_time
        traffic_after_action = counts(server_address)
    return {
        "seconds": round(seconds, 2),
        "core_seconds": round(cpu_seconds, 2),
        "requests": traffic_after_action.requests - traffic_before_action.requests,
        "mb": round((traffic_after_action.bytes - traffic_before_action.bytes) / 1e6, 1),
    }


ACTIONS: dict[str, Callable[[str, int], None]] = {
    "dataset": open_dataset,
    "status": make_status_report,
    "continue": plan_continued_run,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=5000, help="of the run (default: 5000)")
    parser.add_argument("--hosts", type=int, default=64, help="of the run (default: 64)")
    parser.add_argument(
        "--latency", type=float, default=30.0, help="ms before each answer (default: 30)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each action (default: 3)")
    parser.add_argument(
        "--folder", type=Path, help="keep the run in this folder (default: a temporary one)"
    )
    parsed_flags = parser.parse_args(argv)
    num_hosts = parsed_flags.hosts
    make_process_pool = partial(ProcessPoolExecutor, mp_context=get_context("spawn"))
    with tempfile.TemporaryDirectory() as temporary_folder:
        root_folder = parsed_flags.folder or Path(temporary_folder)
        with make_process_pool(2) as process_pool:
            num_shards_of_host = math.ceil(parsed_flags.shards / num_hosts)
            list(
                process_pool.map(
                    partial(store_host, root_folder, num_shards_of_host, num_hosts),
                    range(num_hosts),
                )
            )
        figures_of_rounds_by_action: dict[str, list[dict[str, float]]] = {
            action_name: [] for action_name in ACTIONS
        }
        for _ in range(parsed_flags.rounds):
            for action_name, action in ACTIONS.items():
                with make_process_pool(1) as process_pool:
                    measurement_future = process_pool.submit(
                        measure, action, root_folder, num_hosts, parsed_flags.latency
                    )
                    figures_of_rounds_by_action[action_name].append(measurement_future.result())
                print(action_name, figures_of_rounds_by_action[action_name][-1], flush=True)
    print_result({"shards": parsed_flags.shards, "hosts": num_hosts, **figures_of_rounds_by_action})


if __name__ == "__main__":
    main()
