"""launch_v5e64.sh: the environment of a TPU host becomes the command."""

import os
import shlex
import subprocess
import sys

import pytest
from cloud import LAUNCH, ODD, REPOSITORY, Cloud

from activation_extraction.cli.config import parse_args

NAMED = {"MODEL_PATH": "m", "OUTPUT_DIR": "o", "PYTHON": sys.executable}


def launch(*arguments, **variables):
    environment = {"PATH": os.environ["PATH"], "PYTHON": "py", **variables}
    return subprocess.run(
        ["bash", LAUNCH, *arguments], env=environment, capture_output=True, text=True
    )


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


def typed(*arguments, **variables):
    """Returns the words of the command that a dry run prints."""
    result = launch("--dry-run", *arguments, **variables)
    assert result.returncode == 0, result.stderr
    shell = ["bash", "-c", f"printf '%s\\0' {result.stdout}"]
    command = subprocess.run(shell, capture_output=True, text=True).stdout.split("\0")[:-1]
    assert command[:2] == [variables.get("PYTHON", "py"), f"{REPOSITORY}/extract_activations.py"]
    return command[2:]


@pytest.mark.parametrize("hosts", [HOSTS, {"NUM_HOSTS": "1"}], ids=["through variables", "one"])
def test_every_variable_is_a_flag(hosts):
    """Against extract_activations.py itself."""
    config = parse_args(typed(**WORDS, **OTHERS, **hosts))
    assert config.multihost == (hosts is HOSTS)
    expected = WORDS | (hosts if config.multihost else {})
    for name, value in expected.items():
        assert str(getattr(config, name.lower())) == value
    assert {name: getattr(config, name) for name in AS_FLAGS} == AS_FLAGS


def test_words_are_quoted_and_flags_go_behind_the_variables():
    given = typed("--hook", *ODD, MODEL_PATH="m", OUTPUT_DIR="o")
    assert given[-1 - len(ODD) :] == ["--hook", *ODD]
    given = typed("--", "--max_samples", "5", LAYERS_TO_EXTRACT="12 18", **NAMED)
    assert "--" not in given and parse_args(given).layers_to_extract == (12, 18)


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ("", ["MODEL_PATH", "GCS_BUCKET"]),
        ("MODEL_PATH=m GCS_PREFIX=p OUTPUT_DIR=o", ["GCS_BUCKET"]),
        ("MODEL_PATH=m OUTPUT_DIR=o MACHINE_ID=1", ["TOTAL_MACHINES"]),
        ("MODEL_PATH=m OUTPUT_DIR=o TOTAL_MACHINES=2", ["MACHINE_ID"]),
        ("MODEL_PATH=m OUTPUT_DIR=o HOST_ID=1", ["COORDINATOR_ADDRESS", "NUM_HOSTS"]),
        ("MODEL_PATH=m OUTPUT_DIR=o NUM_HOSTS=2", ["COORDINATOR_ADDRESS", "HOST_ID"]),
        ("MODEL_PATH=m OUTPUT_DIR=o TPU_AXIS_NAMES=data", ["TPU_MESH_CONFIG"]),
        (
            "MODEL_PATH=m GCS_BUCKET=b DELETE_LOCAL_AFTER_UPLOAD=1",
            ["DELETE_LOCAL_AFTER_UPLOAD=1"],
        ),
    ],
)
def test_each_missing_variable_has_a_message(variables, missing):
    result = launch("--max_samples", "1", **words(variables))
    assert result.returncode == 2 and not result.stdout
    lines = result.stderr.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == missing


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {"BATCH_SIZE": "abc"}, "argument --batch_size: invalid integer or auto value: 'abc'"),
        (["--no_such_flag"], {}, "unrecognized arguments: --no_such_flag"),
        ([], {"MACHINE_ID": "3", "TOTAL_MACHINES": "2"}, "--machine_id 3: out of range"),
        (["--demo"], {}, "--demo and --model_path cannot be used together"),
    ],
)
def test_a_dry_run_refuses_what_the_tool_would(arguments, variables, message):
    result = launch("--dry-run", *arguments, **NAMED, **variables)
    assert result.returncode == 2 and not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {message}")


@pytest.mark.parametrize("isolated", ["", "-I"])
def test_a_python_without_the_packages_checks_the_flags_if_it_can_run_the_tool(isolated, tmp_path):
    python = tmp_path / "python"
    Cloud.script(python, f'#!/bin/sh\nexec {sys.executable} {isolated} -S "$@"\n')
    result = launch("--dry-run", **{**NAMED, "PYTHON": str(python), "BATCH_SIZE": "abc"})
    if isolated:
        assert result.returncode == 0 and "--batch_size abc" in result.stdout
        assert result.stderr.startswith(f"the flags were not checked: {python} cannot run")
    else:
        assert result.returncode == 2 and not result.stdout
        said = "error: argument --batch_size: invalid integer or auto value: 'abc'"
        assert result.stderr.startswith(said)


def test_deploy_starts_nothing_with_flags_that_the_tool_refuses(cloud):
    cloud.tpu("pod", 1)
    start = ["start", "pod", "--image", "image", "--", "--batch_size", "abc"]
    status, text = cloud.deploy(*start, PYTHON=sys.executable)
    assert status == 2 and not cloud.lines("calls")
    assert "invalid integer or auto value: 'abc'" in text


def test_launch_starts_the_command_and_the_last_flag_wins(cloud):
    cloud.finish()
    variables = words("NUM_HOSTS=1 MACHINE_ID=0 TOTAL_MACHINES=1")
    done = launch("--model_path", "other", **{**NAMED, "PYTHON": str(cloud.job), **variables})
    assert done.returncode == 0
    assert cloud.lines("jobs")[0]["argv"][-2:] == ["--model_path", "other"]
