"""launch_v5e64.sh: the environment of a TPU host becomes the command."""

import os
import shlex
import subprocess
import sys

import pytest
from cloud import LAUNCH, ODD, REPOSITORY, Cloud

NAMED = {"MODEL_PATH": "m", "OUTPUT_DIR": "o", "PYTHON": sys.executable}


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
    assert result.returncode == 0
    assert result.stderr.startswith("the flags were not checked: py cannot run")
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
    from activation_extraction.cli.config import parse_args

    hosts = {"COORDINATOR_ADDRESS": "host0:8476", "HOST_ID": "3", "NUM_HOSTS": "4"}
    words = {"MODEL_PATH": "m", "DTYPE": "bfloat16", "DATASET_PATH": "d", "TEXT_COLUMN": "t"}
    words |= {"MAX_SAMPLES": "7", "HOOK_NAMES": "blocks.*.hook_mlp_out blocks.1.hook_attn_out"}
    words |= {"BATCH_SIZE": "2", "MAX_SEQ_LENGTH": "64", "MESH_TYPE": "auto", "OUTPUT_DIR": "o"}
    words |= {"STALL_TIMEOUT": "9", "ACTIVATION_DTYPE": "float16", "SHARD_SIZE_GB": "0.5"}
    words |= {"SHARD_FORMAT": "safetensors"}
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


def test_a_dry_run_says_nothing_where_the_flags_are_right():
    result = launch("--dry-run", "--max_samples", "5", **NAMED)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_python_without_the_packages_checks_the_flags(tmp_path):
    python = tmp_path / "python"
    Cloud.script(python, f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    result = launch("--dry-run", **{**NAMED, "PYTHON": str(python), "BATCH_SIZE": "abc"})
    assert result.returncode == 2 and not result.stdout
    said = "error: argument --batch_size: invalid integer or auto value: 'abc'"
    assert result.stderr.startswith(said)


def test_a_python_that_cannot_run_the_tool_checks_nothing(tmp_path):
    python = tmp_path / "python"
    Cloud.script(python, f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    result = launch("--dry-run", **{**NAMED, "PYTHON": str(python), "BATCH_SIZE": "abc"})
    assert result.returncode == 0 and "--batch_size abc" in result.stdout
    assert result.stderr.startswith(f"the flags were not checked: {python} cannot run")


def test_checking_flags_needs_no_jax():
    script = (
        "import runpy, sys; sys.modules['jax'] = None; sys.argv[1:] = ['--mesh_axes', 'nonsense'];"
        "runpy.run_module('activation_extraction.cli.config', run_name='__main__')"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: argument --mesh_axes: 'nonsense' is not a list")


def test_two_dashes_are_no_flag():
    result = launch("--dry-run", "--", "--max_samples", "5", **NAMED)
    assert "--" not in shlex.split(result.stdout) and not result.returncode


def test_deploy_starts_nothing_with_flags_that_the_tool_refuses(cloud):
    cloud.tpu("pod", 1)
    start = ["start", "pod", "--image", "image", "--", "--batch_size", "abc"]
    status, text = cloud.deploy(*start, PYTHON=sys.executable)
    assert status == 2 and not cloud.lines("calls")
    assert "invalid integer or auto value: 'abc'" in text


def test_launch_starts_the_command_and_the_last_flag_wins(cloud):
    cloud.finish()
    variables = {"PYTHON": str(cloud.job), "MODEL_PATH": "m", "OUTPUT_DIR": "o", "NUM_HOSTS": "1"}
    variables |= {"MACHINE_ID": "0", "TOTAL_MACHINES": "1"}
    assert launch("--model_path", "other", **variables).returncode == 0
    assert cloud.lines("jobs")[0]["argv"][-2:] == ["--model_path", "other"]
