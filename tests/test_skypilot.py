"""deploy/skypilot.yaml, as the real SkyPilot reads it, and its commands on a host."""

import json
import os
import subprocess

import pytest
from cloud import REPOSITORY, Cloud

from activation_extraction.cli.config import parse_args

FILE = REPOSITORY / "deploy/skypilot.yaml"
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
    try:
        task = Task.from_yaml_str(text)
        task.validate()
        resources, = task.resources
    except Exception as error:
        read.append(str(error))
        continue
    told = dict(setup=task.setup, run=task.run, envs=task.envs, nodes=task.num_nodes)
    told |= dict(accelerators=resources.accelerators, spot=resources.use_spot)
    told |= dict(recovery=resources.job_recovery, workers=task.service.min_replicas)
    read.append(told)
print(json.dumps(read))
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """The file as it is, and changed as its comments say: one start of SkyPilot."""
    text = FILE.read_text()
    gpu = text.replace("tpu-v6e-8 ", "H100:8 ").replace("ACCELERATOR: tpu", "ACCELERATOR: gpu")
    texts = {
        "as it is": text,
        "pod": text.replace("tpu-v6e-8 ", "tpu-v6e-32 "),
        "gpu": gpu.replace("num_nodes: 1", "num_nodes: 2"),
    }
    home = tmp_path_factory.mktemp("home")
    process = subprocess.run(
        [SKYPILOT, "-c", READ],
        input=json.dumps(list(texts.values())),
        env={
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        },
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return dict(zip(texts, json.loads(process.stdout.splitlines()[-1]), strict=True))


def test_it_is_a_spot_job_that_recovers_from_all_but_bad_input(read):
    task = read["as it is"]
    assert task["accelerators"] == {"tpu-v6e-8": 1} and task["spot"] and task["nodes"] == 1
    assert task["workers"] == 4
    recovery = task["recovery"]
    assert recovery["max_restarts_on_errors"] == 0
    assert {1, 134, 137, 143} <= set(recovery["recover_on_exit_codes"])
    assert not {0, 2} & set(recovery["recover_on_exit_codes"])


def test_pods_and_gpu_nodes(read):
    assert read["pod"]["accelerators"] == {"tpu-v6e-32": 1} and read["pod"]["nodes"] == 1
    assert read["gpu"]["accelerators"] == {"H100": 8} and read["gpu"]["nodes"] == 2


@pytest.mark.parametrize(
    ("name", "nodes", "flags"),
    [
        ("as it is", 1, []),
        ("pod", 8, ["--multihost"]),
        (
            "gpu",
            2,
            "--multihost --coordinator_address 10.0.0.1:8476 --host_id 1 --num_hosts 2".split(),
        ),
    ],
)
def test_what_a_host_runs(read, monkeypatch, tmp_path, name, nodes, flags):
    """With a stand-in for the interpreter of the environment that `setup` makes."""
    task = read[name]
    kind = "gpu" if name == "gpu" else "tpu"
    (tmp_path / "venv/bin").mkdir(parents=True)
    Cloud.script(tmp_path / "venv/bin/python", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    Cloud.script(tmp_path / "python3", "#!/bin/sh\n")
    ranks = {"SKYPILOT_JOB_RANK": "17", "SKYPILOT_NUM_JOBS": "256", "SKYPILOT_NODE_RANK": "1"}
    ranks |= {"SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", **ranks}
    environment |= task["envs"]
    printed = []
    for script in (task["setup"], task["run"]):
        process = subprocess.run(
            ["bash", "-c", script], env=environment, cwd=REPOSITORY, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr
        printed.append(process.stdout.splitlines())
    setup, run = printed
    assert (REPOSITORY / setup[-1]).is_file() and kind in setup[-1]
    assert run[0] == str(REPOSITORY / "extract_activations.py")
    given = run[1:]
    assert given[: len(flags)] == flags and given[len(flags)] == "--model_path"
    for variable, value in ranks.items():
        monkeypatch.setenv(variable, value)
    config = parse_args(given)
    assert (config.machine_id, config.total_machines) == (17, 256)
    assert config.bucket_url == "gs://my-bucket/run-1"
