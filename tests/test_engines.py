"""What the tool takes from the engine that starts it: which machine it is, which GPUs it has."""

import os
import subprocess
import sys
from typing import Any

import pytest
from cloud import REPOSITORY, script
from command_line import assert_refused, main
from pods import Pod, flags_for

from activation_extraction.cli.config import parse_args, variable_name_of_task_without_machine
from activation_extraction.store.local_files import lock_folder


def array(index, count, first=0, last=None):
    """What Slurm sets for a task of an array."""
    last = first + count - 1 if last is None else last
    numbers = {"ID": index, "COUNT": count, "MIN": first, "MAX": last}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in numbers.items()}


MACHINE, TOTAL = {"MACHINE_ID": "5"}, {"TOTAL_MACHINES": "256"}
MACHINES: list[tuple[Any, str, Any]] = [  # variables, flags, (machine, of how many)
    ({}, "", (0, 1)),
    (MACHINE | TOTAL, "", (5, 256)),
    (MACHINE | TOTAL, "--multihost", (5, 256)),
    (MACHINE | TOTAL, "--machine_id 0", (0, 256)),
    (MACHINE | TOTAL, "--total_machines 8", (5, 8)),
    (MACHINE, "--total_machines 8", (5, 8)),
    # Nothing is extracted, so the variables of a job do not count.
    *(
        (MACHINE, mode, (0, 1))
        for mode in ("--status", "--verify", "--report", "--plan v5e-4", "--list_hooks", "--demo")
    ),
    (MACHINE, "--export sae_lens --export_dir new", (0, 1)),
    (array(3, 8), "", (0, 1)),  # no scheduler is asked
]
REFUSED: list[tuple[Any, str, Any]] = [  # variables, flags, the message
    (MACHINE, "", "TOTAL_MACHINES: is not set; MACHINE_ID says which machine this is"),
    (MACHINE | {"TOTAL_MACHINES": "5"}, "", "--machine_id 5: out of range for --total_machines 5"),
    ({"MACHINE_ID": "None"} | TOTAL, "", "environment variable MACHINE_ID: argument --machine_id"),
]


@pytest.mark.parametrize(("variables", "flags", "expected"), MACHINES + REFUSED)
def test_variables_say_which_machine_this_is(
    variables, flags, expected, monkeypatch, tmp_path, capsys
):
    for pair in variables.items():
        monkeypatch.setenv(*pair)
    if isinstance(expected, str):
        return assert_refused(capsys, tmp_path, flags.split(), expected)
    config = parse_args(flags.split())
    assert (config.host_options.machine_id, config.host_options.total_machines) == expected


@pytest.mark.parametrize(
    ("variables", "flags", "named"),
    [
        ({}, "", None),
        (array(0, 8), "", "SLURM_ARRAY_TASK_ID"),
        (array(0, 8) | {"MACHINE_ID": "0", "TOTAL_MACHINES": "8"}, "", None),
        (array(0, 8), "--total_machines 8", None),
        ({"JOB_COMPLETION_INDEX": "5"}, "", "JOB_COMPLETION_INDEX"),
        ({"JOB_COMPLETION_INDEX": "5"}, "--multihost", None),  # it is the number of the host
    ],
)
def test_a_task_of_an_array_that_is_machine_0_of_1_is_found(variables, flags, named, monkeypatch):
    for pair in variables.items():
        monkeypatch.setenv(*pair)
    assert variable_name_of_task_without_machine(parse_args(flags.split())) == named


def test_a_task_of_an_array_that_is_machine_0_of_1_is_warned_of(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    main("--model_path", tmp_path / "none", "--output_dir", tmp_path / "out")
    warning = "SLURM_ARRAY_TASK_ID is set, but this is machine 0 of 1, as every other task"
    assert warning in capsys.readouterr().err


JOIN = """
import jax
from activation_extraction.cli.config import parse_args
from activation_extraction.run.hosts import join
join(parse_args(["--multihost", "--connect_timeout", "60"]).host_options)
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


SRUN = """#!/bin/sh
echo "$MACHINE_ID of $TOTAL_MACHINES"
"""


@pytest.mark.parametrize(
    ("task", "total", "flags", "said"),
    [
        (array(2, 3), "", "", "2 of 3"),
        (array(17, 2, 3, 17), "", "--total_machines 256", "17 of "),
        (array(17, 2, 3, 17), "", "--total_machines=256", "17 of "),
        (array(17, 2, 3, 17), "256", "", "17 of 256"),
        (array(17, 2, 3, 17), "", "", None),
        (array(1, 3, 1), "", "", None),
    ],
)
def test_the_template_for_slurm_says_which_machine_a_task_is(task, total, flags, said, tmp_path):
    """An array with gaps, as in a rerun of some machines, needs the number of all machines."""
    script(tmp_path / "srun", SRUN)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **task}
    variables |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "2", "TOTAL_MACHINES": total}
    done = subprocess.run(
        ["bash", "deploy/slurm.sbatch", *flags.split()],
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    if said is None:
        assert done.returncode == 2 and not done.stdout
        assert done.stderr.startswith("error: --total_machines: is missing, and this array has ")
        assert done.stderr.count("\n") == 1
    else:
        assert (done.returncode, done.stdout) == (0, f"{said}\n"), done.stderr


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
