"""Runs several real processes as one run, as on a TPU pod, and compares with a single process."""

import json
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet
import pytest
from cloud import free_port
from command_line import SCRIPT, main, records_of
from forks import Forked
from test_model import INDICES, every_hook, load, rounding_of

from activation_extraction.model.family import read_model_config
from activation_extraction.text.packing import pack, samples_of
from qwen2_jax_with_hooks import create_model_with_hooks


class Alone(NamedTuple):
    """The activations that one process with one device stores.

    Attributes:
        values: (key, doc_id) -> activation.
        allowed: Key -> the largest difference from other meshes that rounding explains.
    """

    values: Mapping[tuple[Any, str], np.ndarray]
    allowed: Mapping[Any, float]


class Pod:
    """The processes of a pod, which were started together.

    Attributes:
        address: The address of the coordinator.
        logs: The file of the output of each host.
        processes: The number of a host -> its process.
    """

    def __init__(
        self, folder, hosts, devices, *flags, only=None, script=SCRIPT, of_each=(), **variables
    ):
        """Starts the processes.

        Hosts with even numbers get the coordinator's address by flags, the others by environment
        variables.

        Args:
            folder: The folder of the logs.
            hosts: The number of hosts.
            devices: The number of devices of each host.
            flags: The flags of all hosts, or a list of flags for each host.
            only: The hosts to start. None for all.
            script: The script that the processes run.
            of_each: Environment variables of each host.
            variables: Environment variables of all hosts.
        """
        self.address = f"127.0.0.1:{free_port()}"
        self.logs = [folder / f"host_{i}.log" for i in range(hosts)]
        self.processes = {}
        for i in range(hosts) if only is None else only:
            flags_of_host = flags[i] if flags and isinstance(flags[0], list) else flags
            command = [str(script), "--multihost", *map(str, flags_of_host)]
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(devices),
                "PYTHONUNBUFFERED": "1",
                "PYTHONPATH": str(SCRIPT.parent),
                "HOST_ID": str(i),
            }
            environment |= variables | (of_each[i] if of_each else {})
            if i % 2:
                environment |= {"COORDINATOR_ADDRESS": self.address, "NUM_HOSTS": str(hosts)}
            else:
                command += ["--coordinator_address", self.address]
                command += ["--num_hosts", str(hosts), "--host_id", str(i)]
            self.processes[i] = Forked(command, environment, self.logs[i])

    def wait(self):
        deadline = time.monotonic() + 600
        try:
            return [
                process.wait(max(deadline - time.monotonic(), 0.1))
                for process in self.processes.values()
            ]
        finally:
            for process in self.processes.values():
                process.kill()

    def text(self, host):
        return self.logs[host].read_text(errors="replace")

    def wait_until(self, condition):
        deadline = time.monotonic() + 600
        while not condition():
            assert time.monotonic() < deadline, [self.text(i) for i in self.processes]
            time.sleep(0.02)


LAYERS = "--layers_to_extract", 1, 3


def flags_for(demo_inputs, output, *more, hooks=LAYERS):
    return [
        "--model_path",
        demo_inputs / "model",
        "--dataset_path",
        demo_inputs / "documents.parquet",
        "--max_seq_length",
        64,
        *hooks,
        "--output_dir",
        output,
        *more,
    ]


@pytest.fixture(scope="session")
def alone_with_few(demo_inputs, tmp_path_factory):
    """Returns a file with 100 of the demo's documents, and what one device stores of them."""
    folder = tmp_path_factory.mktemp("few")
    few = first_documents(demo_inputs, folder / "few.parquet", 100)
    flags = flags_for(demo_inputs, folder / "alone", "--no_data_parallel", "--dataset_path", few)
    assert main(*flags) == 0
    stored = records_of(folder / "alone").items()
    values = {(key, r["doc_id"]): r["activation"] for key, records in stored for r in records}
    return few, Alone(values, rounding_of_run(folder / "alone", demo_inputs / "model"))


def first_documents(demo_inputs, path, count):
    documents = pyarrow.parquet.read_table(demo_inputs / "documents.parquet")
    pyarrow.parquet.write_table(documents.slice(0, count), path)
    return path


def rounding_of_run(folder, model_folder):
    """Returns the largest difference from a run's values that rounding explains, by key.

    It is computed from the first samples only, which are like the others.
    """
    facts = json.loads((folder / "metadata.json").read_text())["hooks"]
    names = {hook["name"]: hook["key"] for hook in facts}
    ids = [record["token_ids"] for record in records_of(folder)[facts[0]["key"]]]
    batch = next(pack(samples_of(ids), rows_per_batch=16, tokens_per_row=max(map(len, ids))))
    config = read_model_config(model_folder / "config.json")
    hooks = [h for h in every_hook(config) if h.name in names or h.name.endswith(INDICES)]
    model = create_model_with_hooks(config, hooks)
    arrays = batch.token_ids, batch.segment_ids, batch.positions
    allowed = rounding_of(model, load(model, model_folder), *arrays)
    return {key: allowed[name] for name, key in names.items()}


def check_union(output, alone, folders):
    """Asserts that a run stores each document once, with the values of a single device.

    Args:
        output: The folder of the run.
        alone: The values of a single device.
        folders: The names of the folders that the run must have.
    """
    records_of_folders = {folder.name: records_of(folder) for folder in output.glob("machine_*")}
    assert records_of_folders.keys() == folders
    for layer, allowed in alone.allowed.items():
        records = [record for part in records_of_folders.values() for record in part.get(layer, ())]
        assert len({r["sample_idx"] for r in records}) == len(records)
        expected = {
            doc_id: activation for (at, doc_id), activation in alone.values.items() if at == layer
        }
        assert sorted(r["doc_id"] for r in records) == sorted(expected)
        for record in records:
            error = np.abs(record["activation"] - expected[record["doc_id"]]).max()
            assert error <= allowed, f"{layer}: {error:.2e} is more than {allowed:.2e}"
