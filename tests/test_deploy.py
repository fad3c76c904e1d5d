"""deploy/deploy.sh starts, follows and stops an extraction on a pod, as the README says; and
launch_v5e64.sh makes a command of the environment of a host."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from cloud import REPOSITORY, script
from command_line import WITH_SIGNALS
from test_readme import PODS, blocks, section

from activation_extraction.cli.config import parse_args

pytestmark = pytest.mark.long

LAUNCH, DEPLOY = REPOSITORY / "launch_v5e64.sh", REPOSITORY / "deploy/deploy.sh"
# Arguments that a shell would spoil.
ODD = ["a b", "it's", 'say "x"', "$HOME `id` $(id)", "two\nlines", "back\\slash", "*", "", ";&"]
IMAGE = "us-docker.pkg.dev/project/images/extraction:1"
START = ["start", "pod", "--image", IMAGE]
# Plays gcloud, the docker of the two hosts, and the interpreter on the laptop; records all calls. A
# container has no process: it runs until its exit status is written down.
STAND_IN = """#!{python} -S
import json, os, subprocess, sys, time
from pathlib import Path
root, name, words = Path("{root}"), Path(sys.argv[0]).name, sys.argv[1:]
home = Path(os.environ["HOME"])
container, status = home / "container", home / "status"
with open(root / "calls", "a") as file:
    file.write(json.dumps([home.name, name, *words]) + "\\n")
if name == "python":  # it cannot check flags
    sys.exit(words[0] == "-m")
if words[:4] == ["compute", "tpus", "tpu-vm", "ssh"]:
    (command,) = [word.removeprefix("--command=") for word in words if "--command=" in word]
    hosts = []
    for host in ("0", "1"):
        own = dict(os.environ, HOME=str(root / host), HOSTNAME="t1v-n-0a1b2c3d-w-" + host)
        hosts.append(subprocess.Popen(["sh", "-c", command], env=own, start_new_session=True))
    sys.exit(max(host.wait() for host in hosts))
if words[0] == "rm":
    status.unlink()  # fails while the container runs
    container.unlink()
if words[0] == "run":
    if container.exists():
        sys.exit("the container name extraction is already in use")
    container.touch()
    if (root / "finish").exists():
        status.write_text("0")
if words[0] == "stop":
    status.write_text("143")
    print(words[-1])
if words[0] in ("logs", "wait"):
    if words[0] == "logs":
        print("working", flush=True)
    while not status.exists() or not status.read_text():
        time.sleep(0.02)
    if words[0] == "wait":
        print(status.read_text())
"""


class Pod:
    """A laptop, and a Cloud TPU of two hosts, whose homes are the folders 0 and 1."""

    def __init__(self, root):
        self.root, self.started = root, []
        for name in ("0", "1", "bin", "laptop"):
            (root / name).mkdir()
        for name in ("gcloud", "docker", "python"):
            script(root / "bin" / name, STAND_IN.format(python=sys.executable, root=root))
        script(root / "bin/sudo", '#!/bin/sh\nexec "$@"\n')
        self.environment = {"PATH": f"{root}/bin:{os.environ['PATH']}", "OUTPUT_DIR": "out"}
        self.environment |= {"HOME": f"{root}/laptop", "PYTHON": "python", "MODEL_PATH": "model"}

    def start(self, *arguments, **variables):
        """deploy.sh in a process group of its own, as a terminal would start it."""
        process = subprocess.Popen(
            [*WITH_SIGNALS, "bash", DEPLOY, *arguments],
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def deploy(self, *arguments, **variables):
        """(exit status, output) of deploy.sh."""
        process = self.start(*arguments, **variables)
        text = process.communicate(timeout=600)[0]
        return process.returncode, text

    def calls(self, *first):
        """[where, program, argument, ...] of the calls of a program with these words."""
        path = self.root / "calls"
        found = map(json.loads, path.read_text().splitlines() if path.exists() else ())
        return [call for call in found if call[1 : len(first) + 1] == [*first]]


@pytest.fixture
def pod(tmp_path):
    pod = Pod(tmp_path)
    yield pod
    for host in ("0", "1"):  # ends what a failed test has left running
        (tmp_path / host / "status").write_text("0")
    for process in pod.started:
        process.kill()
        process.communicate()


def read_until_it_works(process):
    assert sorted(process.stdout.readline().split("] ")[-1] for _ in range(2)) == ["working\n"] * 2


def test_all_hosts_get_the_same_image_and_any_argument(pod):
    (pod.root / "finish").touch()
    reach = ["--zone", "us-west4-a", "--tunnel-through-iap"]
    variables = {"DATASET_NAME": 'it\'s a "$set"', "HOST_ID": "1", "NUM_HOSTS": "5"}
    status, text = pod.deploy(*START, *reach, "--", "--odd", *ODD, **variables)
    assert status == 0, text
    for host in ("0", "1"):
        assert f"[{host}] working\n" in text and f"[{host}] ended with status 0\n" in text
        assert (pod.root / host / "activation-extraction").is_dir()
    runs = pod.calls("docker", "run")
    assert sorted(run[0] for run in runs) == ["0", "1"]
    flags, same = (run[run.index(IMAGE) + 1 :] for run in runs)
    assert flags == same
    assert flags[0] == "--multihost" and flags[flags.index("--odd") + 1 :] == ODD
    assert flags[flags.index("--dataset_name") + 1] == 'it\'s a "$set"'
    assert "--host_id" not in flags
    assert {"--privileged", "--net=host", "--init", "--detach"} < set(runs[0])
    assert runs[0][runs[0].index("--workdir") + 1] == "/data"
    assert f"{pod.root}/0/activation-extraction:/data" in runs[0] + runs[1]
    assert len(pod.calls("docker", "pull", "--quiet", IMAGE)) == 2
    assert len(pod.calls("gcloud", "auth", "configure-docker", "us-docker.pkg.dev")) == 2
    for call in pod.calls("gcloud", "compute"):
        assert {"--zone=us-west4-a", "--tunnel-through-iap", "--worker=all"} < set(call)
        assert "--batch-size=all" in call  # else hosts of a large pod would wait for the others


def test_ctrl_c_ends_the_following_only_and_stop_stops(pod):
    process = pod.start(*START)
    assert process.stdout.readline().startswith("the flags were not checked: ")
    assert process.stdout.readline().startswith("started; Ctrl-C ends following")
    read_until_it_works(process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(600) != 0
    status, text = pod.deploy(*START)  # what runs is not started twice
    assert status != 0 and text.count("the container name extraction is already in use") == 2
    again = pod.start("follow", "pod")
    read_until_it_works(again)
    status, text = pod.deploy("stop", "pod")
    assert status == 0 and text == "extraction\n" * 2
    text = again.communicate(timeout=600)[0]
    assert again.returncode != 0
    assert all(f"[{host}] ended with status 143\n" in text for host in range(2))
    (pod.root / "finish").touch()
    assert pod.deploy(*START)[0] == 0  # what has ended is


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ("", {}, "VERB: expected start, follow or stop"),
        ("start pod", {}, "--image: is missing"),
        ("follow pod --max_samples 4", {}, "--max_samples: unknown option; flags of"),
        ("start pod --image i", {"MODEL_PATH": ""}, "MODEL_PATH: is not set"),
        ("start pod --image i -- --top 3", {"PYTHON": sys.executable}, "unrecognized arguments"),
    ],
)
def test_bad_input_is_one_line(pod, arguments, variables, message):
    status, text = pod.deploy(*arguments.split(), **variables)
    assert status == 2 and not pod.calls("gcloud")
    assert text.startswith(f"error: {message}") and text.count("\n") == 1


def test_the_commands_of_the_readme(pod):
    """They run as written, in one shell and one folder; the answers of the cloud are stand-ins."""
    laptop = pod.root / "laptop"
    for name in ("deploy", "launch_v5e64.sh"):
        (laptop / name).symlink_to(REPOSITORY / name)
    (laptop / ".venv").symlink_to(pod.root)  # its bin/python is the stand-in
    (pod.root / "finish").touch()
    commands = "set -eux\n" + "\n".join(blocks(section(PODS)))
    variables = {"IMAGE": "registry.example/extraction:1", "BUCKET": "my-bucket"}
    variables |= {"PATH": pod.environment["PATH"], "HOME": str(laptop)}
    result = subprocess.run(
        ["bash", "-c", commands], cwd=laptop, env=variables, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert pod.calls("docker", "build") and pod.calls("docker", "push")
    assert len(pod.calls("gcloud", "compute", "tpus", "tpu-vm", "create")) == 1
    assert len(pod.calls("docker", "run")) == 2
    assert len(pod.calls("python", "extract_activations.py", "--multihost")) == 2  # the rehearsal
    for variable in re.findall(r"^([A-Z_]{4,})=", commands, flags=re.M):
        assert f" {variable}" in LAUNCH.read_text() or variable in DEPLOY.read_text()
    files = re.findall(r"deploy/[\w.]+", section(PODS))
    assert {"deploy/deploy.sh", "deploy/slurm.sbatch", "deploy/job.yaml"} < set(files)
    assert all((REPOSITORY / file).is_file() for file in files)


def launch(*arguments, **variables):
    environment = {"PATH": os.environ["PATH"], "PYTHON": "py"} | variables
    return subprocess.run(
        ["bash", LAUNCH, *arguments], env=environment, capture_output=True, text=True
    )


def typed(*arguments, **variables):
    """Returns the words of the command that a dry run prints."""
    result = launch("--dry-run", *arguments, **variables)
    assert result.returncode == 0, result.stderr
    shell = ["bash", "-c", f"printf '%s\\0' {result.stdout}"]
    command = subprocess.run(shell, capture_output=True, text=True).stdout.split("\0")[:-1]
    assert command[:2] == ["py", f"{REPOSITORY}/extract_activations.py"]
    return command[2:]


def words(text):
    """Returns variables that are written as a shell has them."""
    return dict(word.split("=", 1) for word in shlex.split(text))


# Variables of the environment, each of which is a flag.
WORDS = words("""
    MODEL_PATH=Qwen/Qwen2.5-7B DTYPE=bfloat16 DATASET_NAME='a set' TEXT_COLUMN=t MAX_SAMPLES=7
    BATCH_SIZE=2 MAX_SEQ_LENGTH=64 MACHINE_ID=0 TOTAL_MACHINES=32 MESH_TYPE=3d
    OUTPUT_DIR='/mnt/out put' GCS_BUCKET=bucket GCS_PREFIX='runs/$1' STALL_TIMEOUT=9
    UPLOAD_TIMEOUT=60 ACTIVATION_DTYPE=float16 SHARD_SIZE_GB=0.5 SHARD_FORMAT=safetensors
""")
HOSTS = words("COORDINATOR_ADDRESS=host0:8476 HOST_ID=3 NUM_HOSTS=4")
# Those that are written in another way, and what becomes of them.
OTHERS = words("""
    HOOK_NAMES='blocks.*.hook_mlp_out blocks.1.hook_attn_out' DELETE_LOCAL_AFTER_UPLOAD=false
    TPU_MESH_CONFIG=4,4,4 TPU_AXIS_NAMES=pipeline,data,model
""")
AS_FLAGS = {
    "hook_names": ("blocks.*.hook_mlp_out", "blocks.1.hook_attn_out"),
    "mesh_shape": (4, 4, 4),
    "mesh_axes": ("pipeline", "data", "model"),
    "delete_local_after_upload": False,
    "upload_to_gcs": True,
}


@pytest.mark.parametrize("hosts", [HOSTS, {"NUM_HOSTS": "1"}], ids=["through variables", "one"])
def test_every_variable_is_a_flag(hosts):
    """extract_activations.py itself says so."""
    config = parse_args(typed(**WORDS, **OTHERS, **hosts))
    assert config.host_options.multihost == (hosts is HOSTS)
    for name, value in (WORDS | (hosts if config.host_options.multihost else {})).items():
        assert str(config.values[name.lower()]) == value
    assert {name: config.values[name] for name in AS_FLAGS} == AS_FLAGS


BOTH = "MODEL_PATH=m OUTPUT_DIR=o"


def test_words_are_quoted_and_flags_go_behind_the_variables():
    variables = words(f"{BOTH} LAYERS_TO_EXTRACT='12 18'")
    given = typed("--", "--multihost", "--hook", *ODD, **variables)
    assert given[-1 - len(ODD) :] == ["--hook", *ODD]
    assert "--" not in given and given.count("--multihost") == 1
    assert parse_args(given[: -2 - len(ODD)]).hook_options.layers_to_extract == (12, 18)
    done = launch("--model_path", "other", **words(f"{BOTH} NUM_HOSTS=1 PYTHON=echo"))
    command = f"{REPOSITORY}/extract_activations.py --model_path m --output_dir o"
    assert done.stdout == f"{command} --model_path other\n"


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ("MODEL_PATH=m", "GCS_BUCKET: is not set"),
        (f"{BOTH} MACHINE_ID=1", "TOTAL_MACHINES: is not set; MACHINE_ID says which machine"),
        (f"{BOTH} DELETE_LOCAL_AFTER_UPLOAD=1", "DELETE_LOCAL_AFTER_UPLOAD=1: expected"),
    ],
)
def test_a_dry_run_refuses_what_is_missing_and_what_the_tool_would(variables, line):
    result = launch("--dry-run", PYTHON=sys.executable, **words(variables))
    assert result.returncode == 2 and not result.stdout
    assert result.stderr.startswith(f"error: {line}") and result.stderr.count("\n") == 1
