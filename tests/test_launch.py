"""launch_v5e64.sh: the environment of a TPU host becomes the command."""

import os
import shlex
import subprocess
import sys

import pytest
from cloud import LAUNCH, ODD, REPOSITORY, script

from activation_extraction.cli.config import parse_args


def launch(*arguments, **variables):
    environment = {"PATH": os.environ["PATH"], "PYTHON": "py"} | variables
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
BOTH = "MODEL_PATH=m OUTPUT_DIR=o"
REFUSED = [  # variables, flags, the line that must come
    ("", "", "MODEL_PATH: is not set"),
    ("MODEL_PATH=m", "", "GCS_BUCKET: is not set"),
    (f"{BOTH} GCS_PREFIX=p", "", "--gcs_prefix: needs --upload_to_gcs"),
    (f"{BOTH} MACHINE_ID=1", "", "--machine_id 1: out of range for --total_machines 1"),
    (f"{BOTH} HOST_ID=1", "", "--coordinator_address: is missing"),
    (f"{BOTH} NUM_HOSTS=2", "", "--coordinator_address: is missing"),
    (f"{BOTH} DELETE_LOCAL_AFTER_UPLOAD=1", "", "DELETE_LOCAL_AFTER_UPLOAD=1: expected"),
    (f"{BOTH} BATCH_SIZE=abc", "", "argument --batch_size: invalid integer or auto"),
    (BOTH, "--demo", "--demo and --model_path cannot be used together"),
]


def typed(*arguments, **variables):
    """Returns the words of the command that a dry run prints."""
    result = launch("--dry-run", *arguments, **variables)
    assert result.returncode == 0, result.stderr
    shell = ["bash", "-c", f"printf '%s\\0' {result.stdout}"]
    command = subprocess.run(shell, capture_output=True, text=True).stdout.split("\0")[:-1]
    assert command[:2] == ["py", f"{REPOSITORY}/extract_activations.py"]
    return command[2:]


@pytest.mark.parametrize("hosts", [HOSTS, {"NUM_HOSTS": "1"}], ids=["through variables", "one"])
def test_every_variable_is_a_flag(hosts):
    """Against extract_activations.py itself."""
    config = parse_args(typed(**WORDS, **OTHERS, **hosts))
    assert config.multihost == (hosts is HOSTS)
    for name, value in (WORDS | (hosts if config.multihost else {})).items():
        assert str(getattr(config, name.lower())) == value
    assert {name: getattr(config, name) for name in AS_FLAGS} == AS_FLAGS


def test_words_are_quoted_and_flags_go_behind_the_variables():
    variables = words(f"{BOTH} LAYERS_TO_EXTRACT='12 18'")
    given = typed("--", "--multihost", "--hook", *ODD, **variables)
    assert given[-1 - len(ODD) :] == ["--hook", *ODD]
    assert "--" not in given and given.count("--multihost") == 1
    assert parse_args(given[: -2 - len(ODD)]).layers_to_extract == (12, 18)


@pytest.mark.parametrize(("variables", "flags", "line"), REFUSED)
def test_a_dry_run_refuses_what_is_missing_and_what_the_tool_would(variables, flags, line):
    result = launch("--dry-run", *flags.split(), PYTHON=sys.executable, **words(variables))
    assert result.returncode == 2 and not result.stdout
    assert result.stderr.startswith(f"error: {line}") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("isolated", ["", "-I"])
def test_a_python_without_the_packages_checks_the_flags_if_it_can_run_the_tool(isolated, tmp_path):
    python = str(tmp_path / "python")
    script(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} {isolated} -S "$@"\n')
    result = launch("--dry-run", **words(f"{BOTH} PYTHON={python} BATCH_SIZE=abc"))
    if isolated:
        assert result.returncode == 0 and "--batch_size abc" in result.stdout
        assert result.stderr.startswith(f"the flags were not checked: {python} cannot run")
    else:
        assert result.returncode == 2 and not result.stdout
        assert result.stderr.startswith("error: argument --batch_size: invalid integer or auto")


def test_launch_starts_the_command_and_the_last_flag_wins():
    done = launch("--model_path", "other", **words(f"{BOTH} NUM_HOSTS=1 PYTHON=echo"))
    command = f"{REPOSITORY}/extract_activations.py --model_path m --output_dir o"
    assert done.stdout == f"{command} --model_path other\n"
