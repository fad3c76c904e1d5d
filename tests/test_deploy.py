"""deploy/deploy.sh: an extraction on one pod is started, followed and stopped; README's commands.

One test extracts the demo; what is about starting, following and stopping has the small job.
"""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from cloud import DEPLOY, LAUNCH, ODD, REPOSITORY, Cloud
from pods import stored
from test_readme import PODS, blocks, section

pytestmark = pytest.mark.long

IMAGE = "us-docker.pkg.dev/project/images/extraction:1"
START = ["start", "pod", "--image", IMAGE]


@pytest.fixture
def pod(cloud):
    """A pod of two hosts."""
    cloud.tpu("pod", 2)
    return cloud


def test_a_pod_of_two_hosts_extracts(tmp_path):
    cloud = Cloud(tmp_path, sys.executable)
    cloud.tpu("pod", 2)
    flags = ["--demo", "--max_seq_length", "64", "--layers_to_extract", "1", "3"]
    status, text = cloud.deploy(*START, "--", *flags, MODEL_PATH=None)
    cloud.close()
    assert status == 0 and "[1] done: " in text and text.count("read it with") == 1, text
    outputs = [cloud.root / f"hosts/pod-w-{i}/activation-extraction/out" for i in range(2)]
    for folder in outputs[1].iterdir():  # every host has its own disk
        shutil.move(folder, outputs[0])
    found = stored(outputs[0])
    assert {folder for folder, _ in found} == {f"machine_000_host_{i:02d}" for i in range(2)}
    for layer in (1, 3):
        records = [r for (_, at), part in found.items() if at == layer for r in part]
        assert sorted(r["doc_id"] for r in records) == [f"<urn:demo:{n:04d}>" for n in range(300)]


def test_all_hosts_get_the_same_image_and_any_argument(pod):
    pod.finish()
    reach = ["--zone", "us-west4-a", "--tunnel-through-iap"]
    variables = {"DATASET_NAME": 'it\'s a "$set"', "HOST_ID": "1", "NUM_HOSTS": "5"}
    status, text = pod.deploy(*START, *reach, "--", "--odd", *ODD, **variables)
    assert status == 0, text
    for host in range(2):
        assert f"[{host}] working as {host}\n" in text and f"[{host}] finished\n" in text
        assert f"[{host}] ended with status 0\n" in text
    jobs = sorted(pod.lines("jobs"), key=lambda job: job["who"])
    assert [job["who"] for job in jobs] == ["0", "1"]
    for job in jobs:
        argv = job["argv"]
        assert argv[0].endswith("/extract_activations.py") and argv[1] == "--multihost"
        assert argv[argv.index("--odd") + 1 :] == ODD
        assert argv[argv.index("--dataset_name") + 1] == 'it\'s a "$set"'
        assert "--host_id" not in argv
        assert job["xla"] == os.environ["XLA_FLAGS"]  # so that hosts compile as tests do
        assert job["cwd"] == f"{pod.root}/hosts/pod-w-{job['who']}/activation-extraction"
    calls = pod.lines("calls")
    assert calls.count(["docker", "pull", "--quiet", IMAGE]) == 2
    assert calls.count(["gcloud", "auth", "configure-docker", "us-docker.pkg.dev", "--quiet"]) == 2
    runs = [call for call in calls if call[:2] == ["docker", "run"]]
    assert len(runs) == 2 and all("--privileged" in run and "--net=host" in run for run in runs)
    for call in calls:
        if call[:2] == ["gcloud", "compute"]:
            assert "--zone=us-west4-a" in call and "--tunnel-through-iap" in call


def test_ctrl_c_ends_the_following_only_and_stop_stops(pod):
    process = pod.start(*START)
    pod.read_until(process, "] working as", 2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(600) != 0
    again = pod.start("follow", "pod")
    pod.read_until(again, "] working as", 2)
    status, text = pod.deploy("stop", "pod")
    assert status == 0 and text == "extraction\n" * 2
    text = again.communicate(timeout=600)[0]
    assert again.returncode != 0 and len(pod.lines("jobs")) == 2
    for host in range(2):
        assert f"[{host}] stored\n" in text and f"[{host}] ended with status 143\n" in text


def test_what_runs_is_not_started_twice_and_what_ended_is_started_again(pod):
    process = pod.start(*START)
    pod.read_until(process, "] working as", 2)
    status, text = pod.deploy(*START)
    assert status != 0 and text.count("the container name extraction is already in use") == 2
    pod.finish()
    process.communicate(timeout=600)
    assert process.returncode == 0 and len(pod.lines("jobs")) == 2
    status, text = pod.deploy(*START)
    assert status == 0 and len(pod.lines("jobs")) == 4, text


@pytest.mark.parametrize("fault", ["down", "no_image"])
def test_nothing_starts_where_a_host_lacks_something(pod, fault):
    (pod.root / "hosts/pod-w-1" / fault).touch()
    status, text = pod.deploy(*START)
    assert status != 0 and "started" not in text and not pod.lines("jobs")


def test_paths_are_those_of_the_hosts(pod):
    data = pod.root / "data"
    flags = {"MODEL_PATH": str(data / "model"), "DATASET_PATH": str(data / "texts/*.parquet")}
    status, text = pod.deploy(*START, **flags)
    assert status != 0 and f"bind source path does not exist: {data}/model" in text
    (data / "model").mkdir(parents=True)
    (data / "texts").mkdir()
    pod.finish()
    status, text = pod.deploy(*START, "--", f"--compilation_cache={data}", **flags)
    assert status == 0, text
    run = [call for call in pod.lines("calls") if call[:2] == ["docker", "run"]][-1]
    for path in (f"{data}/model", f"{data}/texts/", data):
        assert f"type=bind,source={path},target={path}" in run


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "VERB: expected start, follow or stop"),
        (["ssh", "a"], {}, "ssh: expected start, follow or stop"),
        (["start"], {}, "TPU: is not given"),
        (["stop", "--zone", "z"], {}, "TPU: is not given"),
        (["start", "pod"], {}, "--image: is not given"),
        (["start", "pod", "--image"], {}, "--image: needs a value"),
        (["start", "pod", "other"], {}, "other: unknown"),
        (["follow", "pod", "--max_samples", "4"], {}, "--max_samples: unknown option; flags of"),
        ([*START], {"MODEL_PATH": None}, "MODEL_PATH: is not set"),
    ],
)
def test_bad_input_is_one_line(cloud, arguments, variables, message):
    status, text = cloud.deploy(*arguments, **variables)
    assert status == 2 and not cloud.lines("calls")
    assert text.startswith(f"error: {message}") and text.count("\n") == 1


def test_the_commands_of_the_readme(cloud):
    """As written, in one shell and one folder; the answers of the cloud are stand-ins."""
    names = ["deploy", "launch_v5e64.sh", *(p.name for p in REPOSITORY.glob("*.py"))]
    for name in [*names, "activation_extraction"]:
        (cloud.laptop / name).symlink_to(REPOSITORY / name)
    (cloud.laptop / ".venv/bin").mkdir(parents=True)
    (cloud.laptop / ".venv/bin/python").symlink_to(cloud.root / "image_bin/python")
    cloud.finish()
    script = "set -eux\n" + "\n".join(blocks(section(PODS)))
    environment = {"PATH": f"{cloud.root}/bin:{os.environ['PATH']}", "HOME": str(cloud.laptop)}
    environment |= {"IMAGE": "registry.example/extraction:1", "BUCKET": "my-bucket"}
    result = subprocess.run(
        ["bash", "-c", script], cwd=cloud.laptop, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    calls = cloud.lines("calls")
    assert ["docker", "push"] in [call[:2] for call in calls]
    told = [" ".join(call) for call in calls if call[0] == "gcloud"]
    assert sum("tpu-vm create" in call for call in told) == 1
    assert len(cloud.lines("jobs")) == 2 + 2  # the pod; the rehearsal
    for variable in re.findall(r"^([A-Z_]{4,})=", script, flags=re.M):
        assert f" {variable}" in LAUNCH.read_text() or variable in DEPLOY.read_text()
    files = re.findall(r"deploy/[\w.]+", section(PODS))
    assert {"deploy/deploy.sh", "deploy/slurm.sbatch", "deploy/job.yaml"} < set(files)
    assert all((REPOSITORY / file).is_file() for file in files)
