"""What the tool takes from the engine that starts it: which machine it is, which GPUs it has."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cloud import Cloud
from command_line import main
from pods import Pod, flags_for

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError
from activation_extraction.store.local_files import lock_folder

REPOSITORY = Path(__file__).parents[1]


def array(index, count, first=0, last=None):
    """What Slurm sets for a task of an array."""
    last = first + count - 1 if last is None else last
    numbers = {"ID": index, "COUNT": count, "MIN": first, "MAX": last}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in numbers.items()}


SKYPILOT = {"SKYPILOT_JOB_RANK": "4", "SKYPILOT_NUM_JOBS": "9"}
INDEX = {"JOB_COMPLETION_INDEX": "5"}
TOTAL = ["--total_machines", "256"]


@pytest.mark.parametrize(
    ("variables", "flags", "machine"),
    [
        ({}, [], (0, 1, None)),
        (array(3, 8), [], (3, 8, "SLURM_ARRAY_TASK_ID")),
        (array(3, 8), ["--multihost"], (3, 8, "SLURM_ARRAY_TASK_ID")),
        (array(3, 8), TOTAL, (3, 256, "SLURM_ARRAY_TASK_ID")),
        (array(3, 8), ["--machine_id", "0"], (0, 8, "--machine_id")),
        (array(17, 2, 3, 17), TOTAL, (17, 256, "SLURM_ARRAY_TASK_ID")),
        (array(17, 2, 3, 17), ["--machine_id", "1", *TOTAL], (1, 256, "--machine_id")),
        (array(17, 2, 3, 17), ["--status"], (0, 1, None)),
        (SKYPILOT, [], (4, 9, "SKYPILOT_JOB_RANK")),
        (SKYPILOT, ["--multihost"], (4, 9, "SKYPILOT_JOB_RANK")),
        (SKYPILOT | INDEX, [], (4, 9, "SKYPILOT_JOB_RANK")),
        ({"SKYPILOT_JOB_RANK": "0", "SKYPILOT_NUM_JOBS": "None"}, [], (0, 1, None)),
        (INDEX, TOTAL, (5, 256, "JOB_COMPLETION_INDEX")),
        (INDEX, ["--multihost", *TOTAL], (0, 256, None)),  # the index is the host's
        (INDEX, ["--machine_id", "7", *TOTAL], (7, 256, "--machine_id")),
    ],
)
def test_the_engine_says_which_machine_this_is_unless_a_flag_does(
    monkeypatch, variables, flags, machine
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = parse_args(flags)
    assert (config.machine_id, config.total_machines, config.machine_from) == machine


@pytest.mark.parametrize(
    ("variables", "flags", "message"),
    [
        (
            array(1, 8, 1),
            [],
            "--total_machines: is missing and cannot be read off this Slurm array",
        ),
        (array(2, 4, 0, 6), [], "has 4 indices from 0 to 6; expected 0 to N-1 without gaps"),
        (array(2, 1), [], "SLURM_ARRAY_TASK_ID 2: out of range for --total_machines 1;"),
        (array(300, 1, 300), TOTAL, "SLURM_ARRAY_TASK_ID 300: out of range for --total_machines"),
        ({"SLURM_ARRAY_TASK_ID": "2"}, [], "--total_machines: is missing"),
        ({**array(0, 8), "SLURM_ARRAY_TASK_ID": "x"}, [], "environment variable SLURM_ARRAY_TASK_"),
        (INDEX, [], "--total_machines: is missing; JOB_COMPLETION_INDEX says which machine"),
        ({"JOB_COMPLETION_INDEX": ""}, TOTAL, "environment variable JOB_COMPLETION_INDEX: "),
        (SKYPILOT | {"SKYPILOT_JOB_RANK": "9"}, [], "SKYPILOT_JOB_RANK 9: out of range for"),
    ],
)
def test_what_cannot_be_mapped_is_refused(monkeypatch, capsys, variables, flags, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(*flags) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_the_log_says_who_named_the_machine(monkeypatch, capsys, tmp_path):
    for name, value in array(3, 8).items():
        monkeypatch.setenv(name, value)
    wrong = ["--model_path", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    for flags, told in (
        ([], "machine 3 of 8 (SLURM_ARRAY_TASK_ID)"),
        (["--machine_id", "5"], "machine 5 of 8 (--machine_id)"),
    ):
        assert main(*wrong, *flags) == 2
        assert told in capsys.readouterr().err


JOIN = """
import jax
from activation_extraction.run.hosts import join
join(None, None, None, 60, 60)
print(jax.config._read("jax_cuda_visible_devices"))
"""


@pytest.mark.long
@pytest.mark.parametrize(("tasks", "visible"), [("1(x16)", "all"), ("1", "all"), ("2(x8)", "0")])
def test_a_task_that_is_alone_on_its_node_sees_all_gpus(tasks, visible):
    """And of several tasks on a node each has one, as JAX does it."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "127.0.0.[1-2]"}
    step |= {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": tasks, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.run(
        [sys.executable, "-c", JOIN], env=os.environ | step, capture_output=True, text=True
    )
    assert process.stdout == f"{visible}\n", process.stderr


def test_too_little_free_disk_is_refused_before_anything_is_read(monkeypatch, tmp_path, capsys):
    flags = ["--output_dir", str(tmp_path / "out"), "--model_path", str(tmp_path)]
    asked = []

    def disk_usage(path):
        asked.append(path)
        return SimpleNamespace(free=7_340_000_000)

    monkeypatch.setattr("activation_extraction.store.local_files.shutil.disk_usage", disk_usage)
    assert main(*flags, "--min_free_gb", "20") == 2
    expected = (
        f"error: --output_dir {tmp_path}/out: its disk has 7.3 GB free, --min_free_gb asks for 20; "
        "make room, or choose another disk\n"
    )
    assert capsys.readouterr().err == expected
    assert asked == [tmp_path] and not (tmp_path / "out").exists()
    assert main(*flags, "--min_free_gb", "7") == 2
    assert "min_free_gb" not in capsys.readouterr().err
    with pytest.raises(InputError, match="not a positive size"):
        parse_args(["--min_free_gb", "-1"])


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
    ("squeue", "queued", "job"),
    [
        ("echo RUNNING", True, "7"),
        ("echo COMPLETING", False, "7"),  # cancelled or preempted: Slurm decides
        ("true", False, "7"),
        ("exit 1", True, "7"),
        # The last one of an array has the number of the array.
        ('for last; do true; done; [ "$last" = 7_2 ] && echo RUNNING || echo PENDING', True, "7_2"),
    ],
)
def test_slurm_is_asked_to_queue_again_only_what_it_does_not_end(squeue, queued, job, tmp_path):
    scripts = {"srun": "exit 143", "squeue": squeue, "scontrol": f'echo "$@" > {tmp_path}/asked'}
    for name, content in scripts.items():
        Cloud.script(tmp_path / name, f"#!/bin/sh\n{content}\n")
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "2"}
    if "_" in job:
        variables |= {"SLURM_ARRAY_JOB_ID": "7", **array(2, 3)}
    done = subprocess.run(
        ["bash", "deploy/slurm.sbatch"],
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    asked = tmp_path / "asked"
    assert asked.exists() == queued and done.returncode == (0 if queued else 143)
    assert not queued or asked.read_text() == f"requeue {job}\n"
