"""launch_v5e64.sh: the environment of a TPU host becomes the command."""

import os
import shlex
import subprocess

import pytest
from cloud import LAUNCH, ODD, REPOSITORY


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
    from activation_extraction.cli.config import parse_args

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
