"""Several real processes as one run, as on a TPU pod, and what one process stores instead."""

import gzip
import os
import pickle
import socket
import time
from pathlib import Path

import forks
import numpy as np
import pyarrow.parquet
import pytest

import extract_activations

ROUNDING = 1e-5  # of the RMS of residual streams, through the few layers of the demo's model
SCRIPT = Path(extract_activations.__file__)


class Pod:
    """Processes that were started together; their exit statuses and what they printed."""

    def __init__(
        self,
        folder,
        hosts,
        devices,
        *flags,
        only=None,
        through_environment=False,
        script=SCRIPT,
        of_each=(),
        **variables,
    ):
        """of_each: variables of each host; the others are those of all."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.logs = [folder / f"host_{i}.log" for i in range(hosts)]
        self.processes = {}
        for i in range(hosts) if only is None else only:
            own = flags[i] if flags and isinstance(flags[0], list) else flags
            where = {"COORDINATOR_ADDRESS": self.address, "HOST_ID": i, "NUM_HOSTS": hosts}
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(devices),
                "PYTHONUNBUFFERED": "1",
                "PYTHONPATH": str(SCRIPT.parent),
            }
            environment |= variables | (of_each[i] if of_each else {})
            command = [str(script), "--multihost", *map(str, own)]
            if through_environment:
                environment |= {name: str(value) for name, value in where.items()}
            else:
                for name, value in where.items():
                    command += [f"--{name.lower()}", str(value)]
            with open(self.logs[i], "w") as log:
                self.processes[i] = forks.start(command, environment, log.fileno())

    def wait(self, seconds=300):
        deadline = time.monotonic() + seconds
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

    def wait_for(self, path, seconds=300):
        """Until a file is there."""
        deadline = time.monotonic() + seconds
        while not path.exists():
            assert time.monotonic() < deadline, [self.text(i) for i in self.processes]
            time.sleep(0.02)


LAYERS = "--layers_to_extract", 1, 3


def flags_for(demo_inputs, output, *more, hooks=LAYERS):
    return [
        *("--model_path", demo_inputs / "model"),
        *("--dataset_path", demo_inputs / "documents.parquet"),
        *("--max_seq_length", 64, *hooks, "--output_dir", output),
        *more,
    ]


def stored(output):
    """(folder name, layer) -> records."""
    found = {}
    for path in sorted(output.glob("machine_*/shard_*.pkl.gz")):
        for layer, records in pickle.load(gzip.open(path)).items():
            found.setdefault((path.parent.name, layer), []).extend(records)
    return found


@pytest.fixture(scope="session")
def alone(demo_inputs, tmp_path_factory):
    return stored_alone(demo_inputs, tmp_path_factory.mktemp("alone"), LAYERS)


@pytest.fixture(scope="session")
def alone_with_few(demo_inputs, tmp_path_factory):
    """A file with 100 of the documents, and what one device stores of them."""
    folder = tmp_path_factory.mktemp("few")
    few = first_documents(demo_inputs, folder / "few.parquet", 100)
    return few, stored_alone(demo_inputs, folder / "alone", LAYERS, "--dataset_path", few)


def first_documents(demo_inputs, path, count):
    every = pyarrow.parquet.read_table(demo_inputs / "documents.parquet")
    pyarrow.parquet.write_table(every.slice(0, count), path)
    return path


def stored_alone(demo_inputs, out, hooks, *more):
    """What one process with one device stores: (key, doc_id) -> activation."""
    flags = flags_for(demo_inputs, out, "--overwrite", "--no_data_parallel", *more, hooks=hooks)
    assert extract_activations.main([str(flag) for flag in flags]) == 0
    return records_of(out)


def records_of(folder):
    """(key, doc_id) -> activation."""
    return {
        (layer, record["doc_id"]): record["activation"]
        for path in folder.glob("shard_*.pkl.gz")
        for layer, records in pickle.load(gzip.open(path)).items()
        for record in records
    }


def check_union(output, alone, folders, tolerance=ROUNDING):
    """Every document once, with the values that one device gives. tolerance: of their RMS."""
    found = stored(output)
    assert {folder for folder, _ in found} == folders
    for layer in {key for key, _ in alone}:
        records = [r for (_, at), part in found.items() if at == layer for r in part]
        assert len({r["sample_idx"] for r in records}) == len(records)
        assert sorted(r["doc_id"] for r in records) == sorted(d for at, d in alone if at == layer)
        for record in records:
            expected = alone[layer, record["doc_id"]]
            error = np.abs(record["activation"] - expected).max()
            assert error / np.sqrt(np.mean(np.square(expected))) < tolerance
