"""deploy/skypilot.yaml, as the real SkyPilot reads it, and its commands on a host."""

import json
import os
import subprocess

import pytest
from cloud import REPOSITORY, script

from activation_extraction.cli.config import parse_args

SKYPILOT = REPOSITORY / ".venv/skypilot/bin/python"  # an environment of its own
pytestmark = [
    pytest.mark.rare,
    pytest.mark.skipif(not SKYPILOT.exists(), reason="make test-all installs SkyPilot"),
]
READ = """
import json, pathlib, sys
from sky import Task
from sky.catalog.common import get_catalog_path
names = pathlib.Path(get_catalog_path("common/accelerators.csv"))  # would be downloaded
names.parent.mkdir(parents=True)
names.write_text("AcceleratorName,Clouds\\nH100,GCP\\n")
read = []
for text in json.load(sys.stdin):
    task = Task.from_yaml_str(text)
    task.validate()
    resources, = task.resources
    told = dict(setup=task.setup, run=task.run, envs=task.envs, nodes=task.num_nodes)
    told |= dict(accelerators=resources.accelerators, spot=resources.use_spot)
    told |= dict(recovery=resources.job_recovery, workers=task.service.min_replicas)
    read.append(told)
print(json.dumps(read))
"""
JOIN = "--multihost --coordinator_address 10.0.0.1:8476 --host_id 1 --num_hosts 2".split()
KINDS = {  # accelerator, nodes in the file and at the start, the first flags of a host
    "as it is": ({"tpu-v6e-8": 1}, 1, 1, []),
    "pod": ({"tpu-v6e-32": 1}, 1, 8, ["--multihost"]),
    "gpu": ({"H100": 8}, 2, 2, JOIN),
}


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """The file as it is, and changed as its comments say: one start of SkyPilot."""
    text = (REPOSITORY / "deploy/skypilot.yaml").read_text()
    gpu = text.replace("tpu-v6e-8 ", "H100:8 ").replace("ACCELERATOR: tpu", "ACCELERATOR: gpu")
    texts = [text, text.replace("tpu-v6e-8 ", "tpu-v6e-32 ")]
    home = {"HOME": str(tmp_path_factory.mktemp("home")), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    process = subprocess.run(
        [SKYPILOT, "-c", READ],
        input=json.dumps([*texts, gpu.replace("num_nodes: 1", "num_nodes: 2")]),
        env={"PATH": os.environ["PATH"], **home},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return dict(zip(KINDS, json.loads(process.stdout.splitlines()[-1]), strict=True))


def test_it_is_a_spot_job_that_recovers_from_all_but_bad_input(read):
    assert read["as it is"]["spot"] and read["as it is"]["workers"] == 4
    recovery = read["as it is"]["recovery"]
    assert recovery["max_restarts_on_errors"] == 0
    assert {1, 134, 137, 143} <= set(recovery["recover_on_exit_codes"])
    assert not {0, 2} & set(recovery["recover_on_exit_codes"])


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_host_runs(read, tmp_path, kind):
    """With a stand-in for the interpreter of the environment that `setup` makes."""
    task, (accelerator, written, nodes, flags) = read[kind], KINDS[kind]
    assert task["accelerators"] == accelerator and task["nodes"] == written
    (tmp_path / "venv/bin").mkdir(parents=True)
    script(tmp_path / "venv/bin/python", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    script(tmp_path / "python3", "#!/bin/sh\n")
    ranks = {"SKYPILOT_JOB_RANK": "17", "SKYPILOT_NUM_JOBS": "256", "SKYPILOT_NODE_RANK": "1"}
    ranks |= {"SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", **ranks}
    setup, run = (
        subprocess.run(
            ["bash", "-c", lines],
            env=environment | task["envs"],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.splitlines()
        for lines in (task["setup"], task["run"])
    )
    assert setup[-1] == f"deploy/requirements-{'gpu' if kind == 'gpu' else 'tpu'}.txt"
    assert run[0] == str(REPOSITORY / "extract_activations.py")
    assert run[1 : len(flags) + 2] == [*flags, "--model_path"]
    config = parse_args(run[1:])
    assert (config.host_options.machine_id, config.host_options.total_machines) == (17, 256)
    assert config.output_options.bucket_url == "gs://my-bucket/run-1"
