"""launch_v5e64.sh, deploy.sh and the Dockerfile, with stand-ins for docker, gcloud and ssh.

What extracts for real uses the demo; what is about starting, following and stopping runs a small
job in place of extract_activations.py, which waits until the test lets it go.
"""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest
from test_hosts import stored

REPOSITORY = Path(__file__).parents[1]
LAUNCH, DEPLOY = REPOSITORY / "launch_v5e64.sh", REPOSITORY / "deploy.sh"
ODD = [
    "a b",
    "it's",
    'say "x"',
    "$HOME `id` $(id)",
    "two\nlines",
    "back\\slash",
    "*",
    "",
    "é",
    ";&",
]
DEMO = ["--demo", "--max_seq_length", "64", "--layers_to_extract", "1", "3"]

JOB = """#!{python} -S
import json, os, signal, sys, time
from pathlib import Path
root = Path("{root}")
def end(number, _):
    if not (root / "stubborn").exists():
        print("stored", flush=True)
        os._exit(128 + number)
signal.signal(signal.SIGTERM, end)
argv = sys.argv[1:]
machine = argv[argv.index("--machine_id") + 1]
who = machine + "-" + os.environ.get("HOST_ID", "0")
at = dict(who=who, argv=argv, cwd=os.getcwd(), address=os.environ.get("COORDINATOR_ADDRESS"))
at["credentials"] = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
with open(root / "jobs.jsonl", "a") as file:
    file.write(json.dumps(at) + "\\n")
print("working as", who, flush=True)
status = root / f"status-{{who}}"
while not (root / "finish").exists() and not status.exists():
    time.sleep(0.02)
if (root / "half").exists():
    print("half a line", end="", flush=True)
    os.killpg(0, signal.SIGKILL)
print("finished", flush=True)
os._exit(int(status.read_text()) if status.exists() else 0)
"""


def dockerfile():
    """(instruction, rest of it) in order, continuation lines joined, comments left out."""
    text = re.sub(r"^#.*\n", "", (REPOSITORY / "Dockerfile").read_text(), flags=re.M)
    lines = re.sub(r"\\\n", "", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def ignored(path):
    """Whether .dockerignore keeps this path (relative to the repository) out of the image."""
    result = False
    for line in (REPOSITORY / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if pattern.startswith("**/"):
            matches = any(fnmatch(part, pattern[3:]) for part in path.parts)
        else:  # one name, of a file or of a folder with all that is in it
            matches = fnmatch(path.parts[0], pattern)
        if matches and not line.startswith("#"):
            result = not line.startswith("!")
    return result


def copy(sources, folder):
    """COPY of these names of the repository, of the files that git knows or could add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    for file in map(Path, listed.stdout.splitlines()):
        if not ignored(file) and any(source in (".", str(file)) for source in sources):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / file, folder / file)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Cloud:
    """A laptop and the machines that it reaches."""

    def __init__(self, root, python=None, devices=2):
        self.root = root
        self.laptop = root / "laptop"
        for name in ("laptop", "bin", "host_bin", "image_bin", "hosts", "tpus", "containers"):
            (root / name).mkdir()
        self.job = root / "job"
        self.script(self.job, JOB.format(python=sys.executable, root=root))
        self.python = python or str(self.job)
        self.variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        settings = {"variables": self.variables}
        (root / "settings.json").write_text(json.dumps(settings))
        for name in ("docker", "gcloud", "ssh"):
            text = (
                f'exec {sys.executable} -S {Path(__file__).parent}/stand_ins.py {root} {name} "$@"'
            )
            self.script(root / "bin" / name, f"#!/bin/sh\n{text}\n")
        self.script(root / "image_bin/python", f'#!/bin/sh\nexec {self.python} "$@"\n')
        # A Python of the hosts whose venvs need nothing installed.
        pip = 'case "$*" in *"pip install"*) exit ;; esac'
        self.script(root / "venv_python", f'#!/bin/sh\n{pip}\nexec {self.python} "$@"\n')
        make = f'mkdir -p "$3/bin" && cp {root}/venv_python "$3/bin/python"'
        self.script(root / "host_bin/python3.14", f"#!/bin/sh\n[ $1 != -m ] || {{ {make}; }}\n")
        self.script(root / "host_bin/df", "#!/bin/sh\necho Avail; echo ' 93'\n")
        copy(["."], root / "image")
        self.port = free_port()
        self.processes = []

    @staticmethod
    def script(path, text):
        path.write_text(text)
        path.chmod(0o755)

    def tpu(self, name, hosts, state="READY"):
        at = dict(state=state, hosts=hosts, coordinator=f"127.0.0.1:{free_port()}")
        (self.root / "tpus" / f"{name}.json").write_text(json.dumps(at))
        for worker in range(hosts):
            (self.root / "hosts" / f"{name}-w-{worker}").mkdir(exist_ok=True)

    def start(self, *arguments, **variables):
        """deploy.sh in a process group of its own, as a terminal would start it."""
        environment = {
            "PATH": f"{self.root}/bin:{os.environ['PATH']}",
            "HOME": str(self.laptop),
            "PYTHON": self.python,
            "COORDINATOR_PORT": str(self.port),
            "OUTPUT_DIR": "out",
            "MODEL_PATH": "some/model",
            **self.variables,
            **variables,
        }
        environment = {name: value for name, value in environment.items() if value is not None}
        process = subprocess.Popen(
            ["bash", DEPLOY, arguments[0], "--min_free_gb", "0", *arguments[1:]],
            cwd=self.laptop,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def deploy(self, *arguments, **variables):
        """(exit status, output) of deploy.sh."""
        process = self.start(*arguments, **variables)
        text = process.communicate(timeout=200)[0]
        return process.returncode, text

    def finish(self):
        (self.root / "finish").touch()

    def close(self):
        """Ends what a failed test has left running."""
        self.finish()
        for slow in self.root.glob("hosts/*/slow"):
            slow.unlink()
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()

    def lines(self, name):
        path = self.root / f"{name}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    @staticmethod
    def read_until(process, text, times=1):
        """What deploy.sh prints until it has printed this so often."""
        seen = ""
        while seen.count(text) < times:
            line = process.stdout.readline()
            assert line, seen
            seen += line
        return seen

    def wait_for_jobs(self, count):
        self.wait(lambda: len(self.lines("jobs")) >= count)

    @staticmethod
    def wait(condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.close()


@pytest.fixture(params=[2])
def real_cloud(request, tmp_path):
    """Runs extract_activations.py, with so many devices per host."""
    cloud = Cloud(tmp_path, sys.executable, devices=request.param)
    yield cloud
    cloud.close()


def demo_documents(output):
    """Checks that every document of the demo is there once, in both layers; returns the folders."""
    found = stored(output)
    for layer in (1, 3):
        records = [r for (_, at), part in found.items() if at == layer for r in part]
        assert sorted(r["doc_id"] for r in records) == [f"<urn:demo:{n:04d}>" for n in range(300)]
        assert len({r["sample_idx"] for r in records}) == 300
    return {folder for folder, _ in found}


def hosts_of(machine, count):
    return {f"machine_{machine:03d}_host_{host:02d}" for host in range(count)}


# ---- launch_v5e64.sh


def launch(*arguments, **variables):
    environment = {"PATH": os.environ["PATH"], "PYTHON": "py", **variables}
    return subprocess.run(
        ["bash", LAUNCH, *arguments], env=environment, capture_output=True, text=True
    )


def test_variables_become_flags():
    words = {
        "MODEL_PATH": "Qwen/Qwen2.5-7B",
        "DATASET_NAME": "a set",
        "LAYERS_TO_EXTRACT": "12 18",
        "MESH_TYPE": "3d",
        "TPU_MESH_CONFIG": "4,4,4",
        "TPU_AXIS_NAMES": "pipeline,data,model",
        "MACHINE_ID": "0",
        "TOTAL_MACHINES": "32",
        "OUTPUT_DIR": "/mnt/out put",
        "GCS_BUCKET": "bucket",
        "GCS_PREFIX": "runs/$1",
        "DELETE_LOCAL_AFTER_UPLOAD": "false",
        "UPLOAD_TIMEOUT": "60",
    }
    result = launch("--dry-run", "--hook", *ODD, **words)
    assert result.returncode == 0 and not result.stderr
    quoted = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {result.stdout}"], capture_output=True, text=True
    )
    command = quoted.stdout.split("\0")[:-1]
    assert command[:2] == ["py", str(REPOSITORY / "extract_activations.py")]
    expected = "--multihost --model_path Qwen/Qwen2.5-7B --dataset_name".split() + ["a set"]
    expected += "--machine_id 0 --total_machines 32 --mesh_type 3d --output_dir".split()
    expected += ["/mnt/out put", *"--mesh_shape 4,4,4 --mesh_axes pipeline,data,model".split()]
    expected += "--layers_to_extract 12 18 --upload_to_gcs --gcs_bucket bucket".split()
    expected += ["--gcs_prefix", "runs/$1", "--upload_timeout", "60", "--keep_local"]
    assert command[2:] == [*expected, "--hook", *ODD]


@pytest.mark.parametrize("through_environment", [True, False])
def test_every_variable_is_a_flag_and_every_flag_is_known(through_environment):
    """Against extract_activations.py itself, as far as it has the flags yet."""
    from activation_extraction.config import parse_args

    hosts = {"COORDINATOR_ADDRESS": "host0:8476", "HOST_ID": "3", "NUM_HOSTS": "4"}
    words = {"MODEL_PATH": "m", "DTYPE": "bfloat16", "DATASET_PATH": "d", "TEXT_COLUMN": "t"}
    words |= {"MAX_SAMPLES": "7", "HOOK_NAMES": "blocks.*.hook_mlp_out blocks.1.hook_attn_out"}
    words |= {"BATCH_SIZE": "2", "MAX_SEQ_LENGTH": "64", "MESH_TYPE": "auto", "OUTPUT_DIR": "o"}
    words |= {"STALL_TIMEOUT": "9", "ACTIVATION_DTYPE": "float16", "SHARD_SIZE_GB": "0.5"}
    result = launch("--dry-run", **words, **(hosts if through_environment else {"NUM_HOSTS": "1"}))
    config = parse_args(shlex.split(result.stdout)[2:])
    assert config.multihost == through_environment
    assert config.hook_names == ("blocks.*.hook_mlp_out", "blocks.1.hook_attn_out")
    flags = {name.lower(): value for name, value in {**words, **hosts}.items()}
    for name in ("hook_names", *(() if through_environment else (n.lower() for n in hosts))):
        flags.pop(name)
    assert {name: str(getattr(config, name)) for name in flags} == flags


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({}, ["MODEL_PATH", "GCS_BUCKET"]),
        ({"MODEL_PATH": "m", "GCS_PREFIX": "p", "OUTPUT_DIR": "o"}, ["GCS_BUCKET"]),
        ({"MODEL_PATH": "m", "OUTPUT_DIR": "o", "MACHINE_ID": "1"}, ["TOTAL_MACHINES"]),
        ({"MODEL_PATH": "m", "OUTPUT_DIR": "o", "TOTAL_MACHINES": "2"}, ["MACHINE_ID"]),
        (
            {"MODEL_PATH": "m", "OUTPUT_DIR": "o", "HOST_ID": "1"},
            ["COORDINATOR_ADDRESS", "NUM_HOSTS"],
        ),
        (
            {"MODEL_PATH": "m", "OUTPUT_DIR": "o", "NUM_HOSTS": "2"},
            ["COORDINATOR_ADDRESS", "HOST_ID"],
        ),
        ({"MODEL_PATH": "m", "OUTPUT_DIR": "o", "TPU_AXIS_NAMES": "data"}, ["TPU_MESH_CONFIG"]),
        (
            {"MODEL_PATH": "m", "GCS_BUCKET": "b", "DELETE_LOCAL_AFTER_UPLOAD": "1"},
            ["DELETE_LOCAL_AFTER_UPLOAD=1"],
        ),
    ],
)
def test_each_missing_variable_has_a_message(variables, missing):
    result = launch("--max_samples", "1", **variables)
    assert result.returncode == 2 and not result.stdout
    lines = result.stderr.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == missing


def test_launch_starts_the_command_and_the_last_flag_wins(cloud):
    cloud.finish()
    variables = {"PYTHON": str(cloud.job), "MODEL_PATH": "m", "OUTPUT_DIR": "o", "NUM_HOSTS": "1"}
    variables |= {"MACHINE_ID": "0", "TOTAL_MACHINES": "1"}
    assert launch("--model_path", "other", **variables).returncode == 0
    assert cloud.lines("jobs")[0]["argv"][-2:] == ["--model_path", "other"]


# ---- deploy.sh, for real


@pytest.mark.parametrize("real_cloud", [16], indirect=True)
def test_a_local_pod_of_four_hosts_with_16_devices(real_cloud):
    cloud = real_cloud
    flags = [*DEMO, "--batch_size", "16"]
    status, text = cloud.deploy("local", "4", "--", *flags, MODEL_PATH=None)
    assert status == 0, text
    assert "[machine_0/3] done: " in text and text.count("read it with") == 1
    assert text.endswith("machine_0: done on all 4 hosts\n")
    assert demo_documents(cloud.laptop / "out") == hosts_of(0, 4)


@pytest.mark.parametrize("real_cloud", [16], indirect=True)
def test_a_cloud_pod_of_four_hosts_with_16_devices_in_docker(real_cloud):
    cloud = real_cloud
    cloud.tpu("pod", 4)
    image = "us-docker.pkg.dev/project/images/extraction:1"
    flags = ["--image", image, "--zone", "us-west4-a", "--", *DEMO, "--batch_size", "16"]
    status, text = cloud.deploy("gcloud", "pod", *flags, MODEL_PATH=None)
    assert status == 0, text
    assert text.endswith("pod: done on all 4 hosts\n")
    outputs = [cloud.root / f"hosts/pod-w-{i}/activation-extraction/out" for i in range(4)]
    for output in outputs[1:]:  # every host has its own disk
        for folder in output.iterdir():
            shutil.move(folder, outputs[0])
    assert demo_documents(outputs[0]) == hosts_of(0, 4)
    calls = cloud.lines("calls")
    for call in calls:
        assert call[0] != "gcloud" or call[1] == "auth" or "--zone=us-west4-a" in call
    assert calls.count(["docker", "pull", "--quiet", image]) == 4
    assert calls.count(["gcloud", "auth", "configure-docker", "us-docker.pkg.dev", "--quiet"]) == 4
    runs = [call for call in calls if call[:2] == ["docker", "run"]]
    assert len(runs) == 4 and all("--privileged" in run and "--net=host" in run for run in runs)
    assert not any("COORDINATOR_ADDRESS=" in argument for run in runs for argument in run)


def test_three_machines_and_one_is_preempted_and_restarted(real_cloud):
    """One host each, over ssh, with the code copied. What ran to its end is left alone."""
    cloud = real_cloud
    flags = ["--", *DEMO, "--batch_size", "4"]
    process = cloud.start("ssh", "a", "me@b", "c", *flags, MODEL_PATH=None)
    job = cloud.root / "hosts/b/activation-extraction/.deploy/extraction"
    cloud.wait(lambda: (job / "log").exists() and "compiled" in (job / "log").read_text())
    os.killpg(int((job / "pid").read_text()), signal.SIGKILL)
    text = process.communicate(timeout=200)[0]
    assert process.returncode == 1 and "me@b/0: killed, or its machine was" in text, text
    assert "a: done on all 1 hosts" in text and "c: done on all 1 hosts" in text
    log = cloud.root / "hosts/a/activation-extraction/.deploy/extraction/log"
    before = log.stat().st_mtime_ns
    status, text = cloud.deploy("ssh", "a", "me@b", "c", *flags, MODEL_PATH=None)
    assert status == 1 and "me@b/0: killed" in text  # not without being asked
    status, text = cloud.deploy("ssh", "a", "me@b", "c", "--restart", *flags, MODEL_PATH=None)
    assert status == 0 and "me@b: done on all 1 hosts" in text, text
    assert log.stat().st_mtime_ns == before
    for machine in "bc":
        for folder in (cloud.root / f"hosts/{machine}/activation-extraction/out").iterdir():
            shutil.move(folder, cloud.root / "hosts/a/activation-extraction/out")
    expected = {f"machine_{i:03d}" for i in range(3)}
    assert demo_documents(cloud.root / "hosts/a/activation-extraction/out") == expected


# ---- deploy.sh, with the small job


TARGETS = {
    "local": ["local", "2", "1"],
    "ssh": ["ssh", "a,b", "me@c"],
    "gcloud": ["gcloud", "pod", "single"],
    "docker": ["gcloud", "pod", "single", "--image", "image:1"],
}


@pytest.mark.parametrize("mode", TARGETS)
def test_any_argument_arrives_as_it_was_given(cloud, mode):
    cloud.tpu("pod", 2)
    cloud.tpu("single", 1)
    cloud.finish()
    status, text = cloud.deploy(*TARGETS[mode], "--", "--odd", *ODD, DATASET_NAME='it\'s a "$set"')
    assert status == 0, text
    jobs = sorted(cloud.lines("jobs"), key=lambda job: job["who"])
    assert [job["who"] for job in jobs] == ["0-0", "0-1", "1-0"]
    for job in jobs:
        argv = job["argv"]
        assert argv[argv.index("--odd") + 1 :] == ODD
        assert argv[argv.index("--dataset_name") + 1] == 'it\'s a "$set"'
        assert argv[argv.index("--total_machines") + 1] == "2"
        assert ("--multihost" in argv) == (job["who"][0] == "0" or mode in ("gcloud", "docker"))
    if mode == "ssh":
        assert jobs[0]["address"] == jobs[1]["address"] == f"a:{cloud.port}"
    assert not list((cloud.root / "containers").glob("*/*"))


def test_a_second_deploy_follows_and_two_at_once_start_once(cloud):
    both = [cloud.start("ssh", "a,b,c") for _ in range(2)]
    cloud.wait_for_jobs(3)
    third = cloud.start("ssh", "a,b,c")
    assert "a: runs already" in cloud.read_until(third, "] working as", 3)
    status, text = cloud.deploy("ssh", "a,b,c", "--", "--max_samples", "5")
    assert status == 2 and "a/0: a job with another command runs there" in text
    status, text = cloud.deploy("ssh", "d", "a,b,c")  # the same hosts as another machine
    assert status == 2 and "c/2: a job with another command runs there" in text
    cloud.finish()
    for process in (*both, third):
        text = process.communicate(timeout=60)[0]
        assert process.returncode == 0 and "a: done on all 3 hosts" in text
    assert len(cloud.lines("jobs")) == 3
    assert cloud.deploy("ssh", "a,b,c")[0] == 0 and len(cloud.lines("jobs")) == 3
    assert cloud.deploy("ssh", "a,b,c", "--", "--max_samples", "5")[0] == 0  # another job
    assert len(cloud.lines("jobs")) == 6


@pytest.mark.parametrize("mode", TARGETS)
def test_ctrl_c_stops_all_hosts(cloud, mode):
    cloud.tpu("pod", 2)
    cloud.tpu("single", 1)
    process = cloud.start(*TARGETS[mode])
    cloud.read_until(process, "] working as", 3)
    os.killpg(process.pid, signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and text.count("] stored\n") == 3, text
    assert len(re.findall(r"\] \d{4}-\d\d-\d\d [\d:]{8} ended with status 143\n", text)) == 3
    assert text.count("exit status 143") == 3


@pytest.mark.parametrize("mode", ["ssh", "docker"])
def test_a_second_ctrl_c_kills(cloud, mode):
    cloud.tpu("pod", 2)
    cloud.tpu("single", 1)
    (cloud.root / "stubborn").touch()
    process = cloud.start(*TARGETS[mode])
    cloud.read_until(process, "] working as", 3)
    os.killpg(process.pid, signal.SIGINT)
    cloud.read_until(process, "again to kill them")
    os.killpg(process.pid, signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and text.count("killed") + text.count("137") >= 3, text


@pytest.mark.parametrize("stage", ["check", "start"])
def test_ctrl_c_before_the_job_runs(cloud, stage):
    """In the check it ends at once; later, what was started is stopped."""
    slow = cloud.root / "hosts/b/slow"
    slow.parent.mkdir()
    if stage == "check":
        slow.touch()
        process = cloud.start("ssh", "a,b")
        cloud.wait(lambda: any("b" in call for call in cloud.lines("calls")))
    else:
        process = cloud.start("ssh", "a,b")
        cloud.read_until(process, "hosts: 2")
        slow.touch()
    os.killpg(process.pid, signal.SIGINT)
    if stage == "check":
        text = process.communicate(timeout=60)[0]
        slow.unlink()
        assert not cloud.lines("jobs")
    else:
        slow.unlink()
        text = process.communicate(timeout=60)[0]
    assert process.returncode == 130, text
    assert cloud.deploy("ssh", "a,b", "--stop")[0] == 0
    cloud.finish()
    status, text = cloud.deploy("ssh", "a,b", "--restart")
    assert status == 0, text


def test_detach_stop_and_only(cloud):
    status, text = cloud.deploy("local", "1", "2", "--detach")
    assert status == 0 and "started" in text
    cloud.wait_for_jobs(3)
    stop = ["--stop", "--only", "machine_1"]
    status, text = cloud.deploy("local", "1", "2", *stop, MODEL_PATH=None, OUTPUT_DIR=None)
    assert status == 0 and text == "machine_1/0: stopped\nmachine_1/1: stopped\n"
    status, text = cloud.deploy("local", "1", "2", "--only", "machine_0", "--detach")
    assert status == 0 and "machine_0: runs already" in text
    (cloud.root / "status-0-0").write_text("3")
    status, text = cloud.deploy("local", "1", "2", "--detach", "--only", "machine_1")
    assert status == 143 and "started" not in text
    status, text = cloud.deploy("local", "1", "2")
    assert status == 3 and "machine_0/0: exit status 3" in text
    assert "machine_1/0: exit status 143" in text and len(cloud.lines("jobs")) == 3


def test_closing_the_terminal_leaves_the_hosts_running(cloud):
    process = cloud.start("local", "2")
    cloud.read_until(process, "] working as", 2)
    os.killpg(process.pid, signal.SIGHUP)
    process.communicate(timeout=60)
    cloud.finish()
    status, text = cloud.deploy("local", "2")
    assert status == 0 and len(cloud.lines("jobs")) == 2, text


def test_a_host_that_fails_is_reported_and_restarted_with_its_whole_pod(cloud):
    (cloud.root / "status-0-1").write_text("3")
    process = cloud.start("ssh", "a,b", "c")
    cloud.wait_for_jobs(3)
    (cloud.root / "status-1-0").write_text("0")
    cloud.read_until(process, "\n[b/1] finished\n")
    (cloud.root / "status-0-1").unlink()
    again = cloud.start("ssh", "a,b", "c", "--restart")
    cloud.wait_for_jobs(5)
    cloud.finish()
    text = process.communicate(timeout=60)[0]
    assert process.returncode and "b/1: exit status 3" in text, text
    text = again.communicate(timeout=60)[0]
    assert again.returncode == 0 and "c: done on all 1 hosts" in text, text
    assert sorted(job["who"] for job in cloud.lines("jobs")) == ["0-0", "0-0", "0-1", "0-1", "1-0"]


def test_a_job_that_is_killed_within_a_line(cloud):
    (cloud.root / "half").touch()
    cloud.finish()
    status, text = cloud.deploy("local", "1")
    assert status == 1 and "half a line\n" in text, text
    assert "machine_0/0: killed, or its machine was" in text, text


def test_a_tpu_that_was_preempted_and_created_again_starts_alone(cloud):
    """Its disks are empty then, so it takes no --restart; the other machine is only followed."""
    for name in ("one", "two"):
        cloud.tpu(name, 1)
    first = cloud.start("gcloud", "one", "two")
    cloud.wait_for_jobs(2)
    home = cloud.root / "hosts/two-w-0"
    pid = (home / "activation-extraction/.deploy/extraction/pid").read_text()
    os.killpg(int(pid), signal.SIGKILL)
    cloud.tpu("two", 1, "PREEMPTED")
    status, text = cloud.deploy("gcloud", "one", "two")
    assert status == 2 and "error: two: is PREEMPTED, not READY" in text
    shutil.rmtree(home)
    cloud.tpu("two", 1)
    second = cloud.start("gcloud", "one", "two")
    cloud.wait_for_jobs(3)
    cloud.finish()
    text = second.communicate(timeout=60)[0]
    assert second.returncode == 0 and "one: runs already" in text, text
    assert sorted(job["who"] for job in cloud.lines("jobs")) == ["0-0", "1-0", "1-0"]
    assert "one: done on all 1 hosts" in first.communicate(timeout=60)[0] and first.returncode == 1


# JAX, which other tests use in this process, warns of every fork; this one becomes bash at once.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_ctrl_c_in_a_terminal(cloud):
    """The terminal's own way: a session, a foreground process group, the key itself."""
    script = f"cd {cloud.laptop} && exec bash {DEPLOY} local 2 --min_free_gb 0"
    variables = {"PATH": os.environ["PATH"], "PYTHON": cloud.python, "OUTPUT_DIR": "out"}
    variables |= {"MODEL_PATH": "m", "COORDINATOR_PORT": str(cloud.port), **cloud.variables}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve("/bin/bash", ["bash", "-c", script], variables)
    text = b""
    try:
        while part := os.read(terminal, 4096):
            if text.count(b"] working as") < 2 <= (text + part).count(b"] working as"):
                os.write(terminal, b"\x03")
            text += part
    except OSError:  # how a terminal says that the other side is closed
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert text.count(b"] stored") == 2, text


def test_a_host_that_differs_or_is_not_there_stops_everything_before_it_starts(cloud):
    cloud.tpu("pod", 3)
    cloud.tpu("gone", 1, "PREEMPTED")
    image = ["--image", "image:1"]
    (cloud.root / "hosts/pod-w-2/image_id").write_text("sha256:other")
    status, text = cloud.deploy("gcloud", "pod", *image)
    assert (
        status == 2
        and "error: hosts differ in version (image or code): sha256:other on pod/2" in text
    )
    (cloud.root / "hosts/pod-w-2/image_id").unlink()
    status, text = cloud.deploy("gcloud", "pod", "gone", "never", *image)
    assert status == 2 and "error: gone: is PREEMPTED, not READY" in text
    assert "error: never: is not there, not READY" in text
    status, text = cloud.deploy("gcloud", "pod", *image, "--min_free_gb", "94")
    assert status == 2 and "error: pod/0: 93 GB free for the output" in text
    (cloud.root / "hosts/pod-w-1/down").touch()
    status, text = cloud.deploy("gcloud", "pod", *image)
    assert status == 2 and "error: pod: 2 of 3 hosts passed the check" in text, text
    (cloud.root / "hosts/pod-w-1/down").unlink()
    Cloud.script(cloud.root / "host_bin/python3.14", "#!/bin/sh\nexit 1\n")
    status, text = cloud.deploy("gcloud", "pod")
    assert status == 2 and "error: pod/0: the check failed" in text
    assert "error: nothing was started" in text and not cloud.lines("jobs")


def test_what_docker_would_invent_is_refused_and_what_is_there_is_mounted(cloud):
    """A path that is missing on a host, a glob, a ~ of another home; and credentials."""
    image, data = ["--image", "image:1"], cloud.root / "data"
    flags = {"MODEL_PATH": str(data / "model"), "DATASET_PATH": str(data / "texts/*.parquet")}
    status, text = cloud.deploy("ssh", "a", *image, **flags)
    assert status == 2 and f"{data}/model: is not on this host" in text, text
    (data / "model").mkdir(parents=True)
    status, text = cloud.deploy("ssh", "a", *image, **flags)
    assert status == 2 and f"{data}/texts: is not on this host" in text, text
    (data / "texts").mkdir()
    status, text = cloud.deploy("ssh", "a", *image, OUTPUT_DIR="~/out", **flags)
    assert status == 2 and "~/out: give the whole path" in text, text
    (data / "file").touch()
    status, text = cloud.deploy("ssh", "a", *image, OUTPUT_DIR=str(data / "file/out"), **flags)
    assert status == 2 and f"cannot create directory '{data}/file'" in text, text
    assert not cloud.lines("jobs")
    key = cloud.root / "hosts/a/.config/gcloud/application_default_credentials.json"
    key.parent.mkdir(parents=True)
    key.touch()
    cloud.finish()
    status, text = cloud.deploy("ssh", "a", *image, **flags)
    assert status == 0, text
    assert cloud.lines("jobs")[0]["credentials"] == "/adc.json"
    run = next(call for call in cloud.lines("calls") if call[:2] == ["docker", "run"])
    assert f"{data}/texts:{data}/texts:ro" in run and f"{data}/model:{data}/model:ro" in run


def test_machines_without_external_addresses(cloud):
    cloud.tpu("pod", 2)
    cloud.finish()
    flags = ["--zone", "z", "--tunnel-through-iap"]
    assert cloud.deploy("gcloud", "pod", *flags)[0] == 0
    calls = [call for call in cloud.lines("calls") if call[:3] == ["gcloud", "compute", "tpus"]]
    assert {call[4] for call in calls} == {"describe", "scp", "ssh"}
    for call in calls:
        assert "--zone=z" in call
        assert ("--tunnel-through-iap" in call) == (call[4] != "describe")


def test_the_container_of_another_user_of_the_host_is_left_alone(cloud):
    other = subprocess.Popen(["sleep", "100"])
    try:
        folder = cloud.root / "containers/a/extraction"
        folder.mkdir(parents=True)
        (folder / "pid").write_text(str(other.pid))
        cloud.finish()
        status, text = cloud.deploy("ssh", "a", "--image", "image:1")
        assert status == 0 and other.poll() is None, text
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "MODE: expected gcloud, ssh or local"),
        (["slurm", "a"], {}, "slurm: expected gcloud, ssh or local"),
        (["ssh"], {}, "TARGET: none is given"),
        (["ssh", "a", "b,a"], {}, "a: is given twice"),
        (["ssh", "a,,b"], {}, "a,,b: not a target for ssh"),
        (["gcloud", "Pod;id"], {}, "Pod;id: not a target for gcloud"),
        (["local", "0"], {}, "0: not a target for local"),
        (["local", "1", "--only", "b"], {}, "--only b: is none of machine_0"),
        (["local", "1", "--max_samples", "4"], {}, "--max_samples: unknown; flags of"),
        (["local", "1", "--image"], {}, "--image: needs a value"),
        (["local", "1", "--job", "a b"], {}, "--job a b: letters"),
        (["local", "1", "--min_free_gb", "x"], {}, "--min_free_gb x: not a whole number"),
        (["local", "1"], {"MACHINE_ID": "3"}, "MACHINE_ID: is set here from the targets"),
        (["local", "1", "--", "--host_id=1"], {}, "--host_id: is set here from the targets"),
        (["local", "1"], {"COORDINATOR_PORT": "x"}, "COORDINATOR_PORT=x: not a number"),
        (["local", "1"], {"MODEL_PATH": None}, "MODEL_PATH: is not set"),
    ],
)
def test_bad_input_is_one_line(cloud, arguments, variables, message):
    environment = {"MODEL_PATH": "m", "OUTPUT_DIR": "o", **variables}
    environment = {name: value for name, value in environment.items() if value is not None}
    result = subprocess.run(
        ["bash", DEPLOY, *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        cwd=cloud.laptop,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and not result.stdout
    assert result.stderr.startswith(f"error: {message}") and result.stderr.count("\n") == 1


def test_an_old_bash_is_named():
    script = DEPLOY.read_text().replace("BASH_VERSINFO", "OLD")
    result = subprocess.run(["bash", "-c", f"OLD=(3 2)\n{script}"], capture_output=True, text=True)
    assert result.returncode == 2 and "4.4 or newer is needed" in result.stderr


# ---- Dockerfile


def replay(folder, accelerator, environment):
    """The Dockerfile's steps in order, as far as they mean anything without an engine."""
    workspace, entry = None, None
    for instruction, rest in dockerfile():
        if instruction == "FROM":
            assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", rest)
        elif instruction == "ENV":
            environment = environment | dict(pair.split("=", 1) for pair in rest.split())
        elif instruction == "WORKDIR":
            workspace = folder / rest[1:]
            workspace.mkdir()
        elif instruction == "ARG":
            environment = {**environment, rest.split("=")[0]: accelerator}
        elif instruction == "COPY":
            *sources, target = rest.split()
            assert target == "./"
            copy(sources, workspace)
        elif instruction == "RUN":
            subprocess.run(["sh", "-c", rest], cwd=workspace, env=environment, check=True)
        else:
            assert instruction == "ENTRYPOINT"
            (entry,) = json.loads(rest)
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        environment[name] = f"{folder}{environment[name]}"
    return workspace, f"{folder}{entry}", environment


@pytest.mark.parametrize("accelerator", ["cpu", "tpu", "gpu", "gpt"])
def test_the_image_installs_what_the_accelerator_needs(tmp_path, accelerator):
    Cloud.script(tmp_path / "pip", '#!/bin/sh\necho "$@" >pip_arguments\n')
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if accelerator == "gpt":
        with pytest.raises(subprocess.CalledProcessError, match="exit status 2"):
            replay(tmp_path, accelerator, environment)
        return
    workspace, entry, environment = replay(tmp_path, accelerator, environment)
    arguments = (workspace / "pip_arguments").read_text().split()
    file = workspace / arguments[arguments.index("--requirement") + 1]
    extra = {"cpu": "jax==", "tpu": "jax[tpu]==", "gpu": "jax[cuda12]=="}[accelerator]
    assert extra in file.read_text()
    assert "--no-cache-dir" in arguments and environment["HF_HOME"].endswith("/cache/huggingface")
    names = {path.name for path in workspace.iterdir()}
    assert names >= {"extract_activations.py", "qwen2_jax.py", "launch_v5e64.sh"}
    assert not names & {"tests", "README.md", ".git", ".venv", "deploy.sh", "benchmarks"}
    assert os.access(entry, os.X_OK)


@pytest.mark.slow
def test_the_image_runs_the_demo_with_nothing_but_what_its_steps_install(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    environment = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_"))}
    environment |= {"PATH": f"{tmp_path}/venv/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    environment |= {"PIP_NO_COMPILE": "1"}  # saves half of the time
    workspace, entry, environment = replay(tmp_path, "cpu", environment)

    def run(*arguments):
        result = subprocess.run(
            [entry, *arguments], cwd=workspace, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    shell = "which python; OUTPUT_DIR=b NUM_HOSTS=1 ./launch_v5e64.sh --demo --max_samples 5"
    assert "done: 300 samples" in run("--demo", "--output_dir", "a")
    python, *summary = run("-c", shell).splitlines()
    assert python == f"{tmp_path}/venv/bin/python" and "done: 5 samples" in summary[0]


# ---- README


def readme_commands():
    """The shell blocks of the section about pods, in order."""
    section = (REPOSITORY / "README.md").read_text().split("\n## Pods and many machines\n")[1]
    section = re.split(r"\n## ", section)[0]
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, flags=re.M)
    return [re.sub(r"^    ", "", block.strip("\n"), flags=re.M) for block in blocks]


def test_the_commands_of_the_readme(cloud):
    """As written, in one shell and one folder; the cloud's answers come from the stand-ins."""
    names = [
        "deploy.sh",
        "deploy_host.sh",
        "launch_v5e64.sh",
        *(p.name for p in REPOSITORY.glob("*.py")),
    ]
    for name in [*names, "activation_extraction", *(p.name for p in REPOSITORY.glob("require*"))]:
        (cloud.laptop / name).symlink_to(REPOSITORY / name)
    (cloud.laptop / ".venv/bin").mkdir(parents=True)
    (cloud.laptop / ".venv/bin/python").symlink_to(cloud.root / "image_bin/python")
    cloud.finish()
    commands = readme_commands()
    assert len(commands) == 5  # none was missed
    script = "set -eux\n" + "\n".join(commands)
    environment = {"PATH": f"{cloud.root}/bin:{os.environ['PATH']}", "HOME": str(cloud.laptop)}
    environment |= {"COORDINATOR_PORT": str(cloud.port)}
    result = subprocess.run(
        ["bash", "-c", script], cwd=cloud.laptop, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    calls = cloud.lines("calls")
    assert ["docker", "push"] in [call[:2] for call in calls]
    told = [" ".join(call) for call in calls if call[0] == "gcloud"]
    assert sum("tpu-vm create" in call for call in told) == 3
    assert len(cloud.lines("jobs")) == 2 + 2 * 2 + 3 + 2  # pod-a; pod-b, pod-c; ssh; local
    for mode in ("deploy.sh gcloud", "deploy.sh ssh", "deploy.sh local"):
        assert mode in script
    for variable in re.findall(r"^([A-Z_]{4,})=", script, flags=re.M):
        assert f" {variable}" in LAUNCH.read_text()
