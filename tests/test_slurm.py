"""deploy/slurm.sbatch on a real Slurm: machines are killed and requeued, and nothing is lost."""

import os
import signal
import sys

import pytest
from cloud import REPOSITORY, Cloud
from pods import check_union, flags_for
from slurm import missing, run_slurm

from activation_extraction.store.folder import Folder

pytestmark = [pytest.mark.long, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
SBATCH = REPOSITORY / "deploy/slurm.sbatch"

# In the place of Python: at their first start machines 5 and 7 stop after two steps until they are
# told to end, and say which process they are.
PYTHON = """#!/bin/sh
case $SLURM_ARRAY_TASK_ID:${{SLURM_RESTART_COUNT:-0}}:$SLURM_JOB_NUM_NODES in
    [57]:0:1) shift; exec {python} {folder}/hold.py {folder}/held-$SLURM_ARRAY_TASK_ID "$@" ;;
esac
exec {python} "$@"
"""
HOLD = """
import os, sys, time
from pathlib import Path
import extract_activations as script
held = Path(sys.argv[1])
extract = script.extract
def hold(*arguments):
    storage, stopped, steps = arguments[0].storage, arguments[-1], []
    add = storage.add_batch
    def add_and_hold(*batch):
        result = add(*batch)
        steps.append(1)
        if len(steps) == 2:
            held.with_suffix(".part").write_text(str(os.getpid()))
            held.with_suffix(".part").rename(held)
            while not stopped():
                time.sleep(0.02)
        return result
    storage.add_batch = add_and_hold
    return extract(*arguments)
script.extract = hold
os._exit(script.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, demo_inputs):
    """Two nodes on which 8 machines of one node and one machine of two have run to their end.

    Machine 7, the last, was killed, machine 5 requeued; a job with bad input ended, and one
    that was cancelled.
    """
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "hold.py").write_text(HOLD)
    Cloud.script(folder / "python", PYTHON.format(python=sys.executable, folder=folder))
    flags = flags_for(demo_inputs, folder / "out", "--batch_size", 2, "--shard_size_gb", 1e-4)
    variables = {"PYTHON": str(folder / "python"), "PYTHONPATH": str(REPOSITORY)}
    variables |= {"JAX_ENABLE_COMPILATION_CACHE": "true", "XDG_CACHE_HOME": str(folder / "cache")}
    variables |= {"JAX_NUM_CPU_DEVICES": "2"}
    with run_slurm(folder, 2) as slurm:
        many = slurm.submit("--array=0-7%3", "--cpus-per-task=2", SBATCH, *flags, **variables)
        two = flags_for(demo_inputs, folder / "two", "--batch_size", 4)
        slurm.submit("--nodes=2", SBATCH, *two, **variables)
        bad = slurm.submit("--array=0", SBATCH, "--machine_id", 1, "--demo", **variables)
        Cloud.script(folder / "sleeper", f"#!/bin/sh\ntouch {folder}/asleep; exec sleep 1000\n")
        cancelled = slurm.submit("--array=0", SBATCH, PYTHON=str(folder / "sleeper"))
        slurm.wait((folder / "asleep").exists)
        slurm.command("scancel", cancelled)
        slurm.wait((folder / "held-7").exists)
        os.kill(int((folder / "held-7").read_text()), signal.SIGKILL)
        slurm.wait((folder / "held-5").exists)
        before = Folder(str(folder / "out/machine_005")).files()
        slurm.command("scontrol", "requeue", f"{many}_5")
        for machine in (5, 7):
            slurm.skip_delay(f"{many}_{machine}")
        slurm.wait(slurm.ended)
        told = [slurm.command("scontrol", "show", "job", job) for job in (bad, cancelled)]
        yield folder, many, before, bad, told


def test_every_document_is_stored_once(cluster, alone, check):
    folder, *_ = cluster
    check_union(folder / "out", alone, {f"machine_{number:03d}" for number in range(8)})
    assert check(folder / "out") == []


def test_a_machine_of_two_nodes(cluster, alone, check):
    folder, *_ = cluster
    check_union(folder / "two", alone, {f"machine_000_host_{number:02d}" for number in range(2)})
    assert check(folder / "two") == []


def test_the_killed_machine_was_queued_again_by_the_script(cluster):
    folder, many, *_ = cluster
    log = (folder / f"{many}_7.log").read_text()
    assert "exit status 137: this machine is queued again and will continue" in log
    assert log.count("machine 7 of 8 (SLURM_ARRAY_TASK_ID)") == 2 and "done: " in log


def test_the_requeued_machine_stored_what_was_complete(cluster):
    """And is queued once, by Slurm: the script sees that and leaves it alone."""
    folder, many, before, *_ = cluster
    log = (folder / f"{many}_5.log").read_text()
    assert "interrupted: " in log and "done: " in log and "queued again" not in log
    assert before and "metadata.json" in before


def test_bad_input_is_not_tried_again(cluster):
    folder, *_, bad, told = cluster
    for field in ("ExitCode=2:0", "Restarts=0", "JobState=FAILED"):
        assert field in told[0]
    assert "--machine_id 1: out of range" in (folder / f"{bad}_0.log").read_text()


def test_a_cancelled_machine_is_not_queued_again(cluster):
    *_, told = cluster
    assert "JobState=CANCELLED" in told[1] and "Restarts=0" in told[1]
