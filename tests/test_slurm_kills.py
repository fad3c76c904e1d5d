"""12 machines on 3 nodes of a real Slurm, while tasks are killed and nodes fail at random."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from cloud import REPOSITORY
from command_line import main
from pods import check_union, flags_for
from slurm import missing, run_slurm

from benchmarks.kill_and_resume import shards_in

pytestmark = [pytest.mark.rare, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
SBATCH = REPOSITORY / "deploy/slurm.sbatch"
MACHINES, NODES, KILLS, FAILURES = 12, 3, 9, 3


def processes(out):
    """Extractions that write below this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # ended meanwhile
            continue
        if b"extract_activations.py" in words and str(out).encode() in words:
            if b"srun" not in words[0]:
                found.append(int(path.parent.name))
    return sorted(found)


class Saboteur:
    """With every few shards that are stored, kills a task or fails a node."""

    def __init__(self, slurm, out):
        self.slurm, self.out, self.chance = slurm, out, random.Random(5)
        self.plan = ["kill"] * KILLS + ["fail"] * FAILURES
        self.chance.shuffle(self.plan)
        self.killed = self.failed = self.seen = 0

    def step(self):
        """A machine stores its 25 shards in a tenth of a second, so it looks often."""
        for _ in range(50):
            time.sleep(0.01)
            self.look()
        self.slurm.skip_delays()
        return self.slurm.ended()

    def look(self):
        stored = len(list(self.out.glob("*/shard_*.json")))
        if self.plan and stored > self.seen:
            running = processes(self.out)
            if running and self.plan[-1] == "kill":
                os.kill(self.chance.choice(running), signal.SIGKILL)
                self.killed += 1
                self.plan.pop()
            elif running:
                node = f"127.0.0.{self.chance.randint(1, NODES)}"
                change = ("scontrol", "update", f"NodeName={node}")
                self.slurm.command(*change, "State=DOWN", "Reason=test")
                self.slurm.command(*change, "State=RESUME")
                self.failed += 1
                self.plan.pop()
            self.seen = stored


def test_every_document_is_stored_once_with_the_bytes_of_undisturbed_machines(
    tmp_path, demo_inputs, alone, check
):
    out = tmp_path / "out"
    more = ("--batch_size", 2, "--shard_size_gb", 5e-5, "--no_data_parallel")
    flags = flags_for(demo_inputs, out, *more)
    variables = {"PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)}
    variables |= {"JAX_ENABLE_COMPILATION_CACHE": "true", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    variables |= {"JAX_NUM_CPU_DEVICES": "2"}
    with run_slurm(tmp_path, NODES) as slurm:
        slurm.submit(f"--array=0-{MACHINES - 1}", "--cpus-per-task=4", SBATCH, *flags, **variables)
        saboteur = Saboteur(slurm, out)
        slurm.wait(saboteur.step, 1200)
    assert saboteur.killed == KILLS and saboteur.failed == FAILURES, slurm.logs()
    print(slurm.logs())  # pytest shows them if a machine's documents are missing
    check_union(out, alone, {f"machine_{number:03d}" for number in range(MACHINES)})
    assert check(out) == []
    for machine in range(MACHINES):
        which = ("--machine_id", machine, "--total_machines", MACHINES)
        undisturbed = flags_for(demo_inputs, tmp_path / "whole", *more, *which)
        assert main(*undisturbed) == 0
        name = f"machine_{machine:03d}"
        assert shards_in(out / name) == shards_in(tmp_path / "whole" / name)
