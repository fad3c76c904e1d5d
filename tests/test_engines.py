"""What the tool takes from the engine that starts it: which machine it is, which GPUs it has."""

import os
import subprocess
import sys
from typing import Any

import pytest
from cloud import REPOSITORY, script
from command_line import assert_refused
from pods import Pod, flags_for

from activation_extraction.cli.config import parse_args
from activation_extraction.store.local_files import lock_folder


def array(index, count, first=0, last=None):
    """What Slurm sets for a task of an array."""
    last = first + count - 1 if last is None else last
    numbers = {"ID": index, "COUNT": count, "MIN": first, "MAX": last}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in numbers.items()}


SKYPILOT = {"SKYPILOT_JOB_RANK": "4", "SKYPILOT_NUM_JOBS": "9"}
INDEX = {"JOB_COMPLETION_INDEX": "5"}
TOTAL, SLURM = "--total_machines 256", "SLURM_ARRAY_TASK_ID"
MACHINES: list[tuple[Any, str, Any]] = [  # variables, flags, (machine, of how many, who says so)
    ({}, "", (0, 1, None)),
    (array(3, 8), "", (3, 8, SLURM)),
    (array(3, 8), "--machine_id 0", (0, 8, "--machine_id")),
    (array(17, 2, 3, 17), TOTAL, (17, 256, SLURM)),
    (SKYPILOT | INDEX, "--multihost", (4, 9, "SKYPILOT_JOB_RANK")),
    ({"SKYPILOT_JOB_RANK": "0", "SKYPILOT_NUM_JOBS": "None"}, "", (0, 1, None)),
    (INDEX, TOTAL, (5, 256, "JOB_COMPLETION_INDEX")),
    (INDEX, f"--multihost {TOTAL}", (0, 256, None)),  # the index is the host's
]
REFUSED: list[tuple[Any, str, Any]] = [  # variables, flags, the message
    (array(1, 8, 1), "", "--total_machines: is missing and cannot be read off this Slurm array"),
    (array(2, 4, 0, 6), "", "has 4 indices from 0 to 6; expected 0 to N-1 without gaps"),
    (INDEX, "", "--total_machines: is missing; JOB_COMPLETION_INDEX says which machine"),
    (SKYPILOT | {"SKYPILOT_JOB_RANK": "9"}, "", "SKYPILOT_JOB_RANK 9: out of range for"),
]


@pytest.mark.parametrize(("variables", "flags", "expected"), MACHINES + REFUSED)
def test_the_engine_says_which_machine_this_is(
    variables, flags, expected, monkeypatch, tmp_path, capsys
):
    """What cannot be mapped is refused."""
    for pair in variables.items():
        monkeypatch.setenv(*pair)
    if isinstance(expected, str):
        return assert_refused(capsys, tmp_path, flags.split(), expected)
    config = parse_args(flags.split())
    assert (config.machine_id, config.total_machines, config.machine_from) == expected


JOIN = """
import jax
from activation_extraction.cli.config import parse_args
from activation_extraction.run.hosts import join
join(parse_args(["--multihost", "--connect_timeout", "60"]))
print(jax.config._read("jax_cuda_visible_devices"))
"""


@pytest.mark.long
def test_a_task_that_is_alone_on_its_node_sees_all_gpus():
    """JAX would give it one."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "127.0.0.[1-2]"}
    step |= {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x16)", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.run(
        [sys.executable, "-c", JOIN], env=os.environ | step, capture_output=True, text=True
    )
    assert process.stdout == "all\n", process.stderr


@pytest.mark.long
def test_a_folder_in_use_is_no_bad_input(demo_inputs, tmp_path):
    """An engine may start a machine while its last process still ends: status 1 on all hosts."""
    folder = tmp_path / "out/machine_000_host_01"
    folder.mkdir(parents=True)
    lock = lock_folder(folder)
    pod = Pod(tmp_path, 2, 2, *flags_for(demo_inputs, tmp_path / "out"))
    assert pod.wait() == [1, 1], [pod.text(i) for i in range(2)]
    assert "host_01: another process is writing to it" in pod.text(1)
    assert "error: host 1 failed: see the message there" in pod.text(0)
    os.close(lock)


@pytest.mark.parametrize(
    ("status", "squeue", "queued", "job"),
    [
        (143, "echo RUNNING", True, "7"),
        (143, "echo COMPLETING", False, "7"),  # cancelled or preempted: Slurm decides
        (143, "exit 1", True, "7"),
        # The last one of an array has the number of the array.
        (1, 'for last; do true; done; [ "$last" = 7_2 ] && echo RUNNING || echo GONE', True, "7_2"),
        (2, "echo RUNNING", False, "7"),
    ],
)
def test_slurm_queues_again_only_what_it_does_not_end(status, squeue, queued, job, tmp_path):
    scripts = {"srun": f"exit {status}", "squeue": squeue}
    scripts["scontrol"] = f'echo "$@" > {tmp_path}/asked'
    for name, content in scripts.items():
        script(tmp_path / name, f"#!/bin/sh\n{content}\n")
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "2"}
    variables |= {"SLURM_ARRAY_JOB_ID": "7", **array(2, 3)} if "_" in job else {}
    command, environment = ["bash", "deploy/slurm.sbatch"], {**os.environ, **variables}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True)
    asked = tmp_path / "asked"
    assert asked.exists() == queued and done.returncode == (0 if queued else status)
    assert not queued or asked.read_text() == f"requeue {job}\n"
