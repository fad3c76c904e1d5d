"""deploy/slurm.sbatch on a real Slurm: a machine is killed and requeued, and nothing is lost.

Its daemons run here, with nodes that are different loopback addresses.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from cloud import REPOSITORY, free_port, script
from pods import check_union, flags_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
pytestmark = [
    pytest.mark.rare,
    pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason="Slurm is not installed"),
    pytest.mark.skipif(os.getuid() != 0, reason="Slurm's daemons run as root"),
]
# The names of the nodes are addresses because JAX connects to them. It takes its port from the
# number of the job, so clusters begin with different numbers.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first}
AuthType=auth/munge
AuthInfo=socket={own}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={own}/state
SlurmdSpoolDir={own}/spool-%n
SlurmctldPidFile={own}/slurmctld.pid
SlurmdPidFile={own}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
JobRequeue=1
MailProg=/bin/true
PartitionName=all Nodes=ALL Default=YES State=UP
"""
# In the place of Python: machine 1 is killed at its first start.
PYTHON = """#!/bin/sh
[ $SLURM_ARRAY_TASK_ID:${{SLURM_RESTART_COUNT:-0}}:$SLURM_JOB_NUM_NODES = 1:0:1 ] && kill -9 $$
exec {python} "$@"
"""


class Slurm:
    """A cluster of two nodes, which share what CPUs there are. Its jobs log to `folder`."""

    def __init__(self, folder, own):
        """own: a folder for the daemons' files; paths of sockets have to be short."""
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons = []
        host, nodes = socket.gethostname(), ("127.0.0.1", "127.0.0.2")
        lines = [CONFIGURATION.format(host=host, port=free_port(), first=free_port(), own=own)]
        for name in nodes:
            lines.append(f"NodeName={name} NodeHostname={host} Port={free_port()} CPUs=4\n")
        (folder / "slurm.conf").write_text("".join(lines))
        (own / "state").mkdir()
        key = own / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = [f"--{name}-file={own}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self.start("munged", "--foreground", "--force", f"--socket={own}/munge.socket", *files)
        self.wait((own / "munge.socket").exists)
        self.start("slurmctld", "-D")
        for name in nodes:
            self.start("slurmd", "-D", "-N", name)
        states = ["sinfo", "--noheader", "--Node", "--format=%T"]
        self.wait(lambda: self.run(*states).stdout.split().count("idle") == 2)

    def start(self, *command):
        with open(self.folder / f"daemon-{len(self.daemons)}", "w") as log:
            daemon = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
            self.daemons.append(daemon)

    def run(self, *words, **variables):
        command, environment = [*map(str, words)], self.environment | variables
        return subprocess.run(
            command, env=environment, cwd=REPOSITORY, capture_output=True, text=True
        )

    def command(self, *words, **variables):
        done = self.run(*words, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def submit(self, options, flags, **variables):
        output = f"--output={self.folder}/%A_%a.log"
        command = ["sbatch", "--parsable", output, *options.split(), "deploy/slurm.sbatch", *flags]
        return self.command(*command, **variables)

    def wait(self, condition):
        deadline = time.monotonic() + 600
        while not condition():
            logs = [path.read_text() for path in self.folder.glob("*_*.log")]
            assert time.monotonic() < deadline, logs
            time.sleep(0.2)

    def ended(self):
        jobs = self.command("squeue", "--noheader", "--format=%i %r").splitlines()
        for job, reason in (line.split(maxsplit=1) for line in jobs):
            if "held" in reason:  # it began sooner than Slurm likes, because of `skip_delay`
                self.command("scontrol", "release", job)
        return not jobs

    def skip_delay(self, job):
        """A job that is requeued waits for two minutes; this one for two seconds.

        Slurm refuses to start it in the second in which it revoked the job's last credential.
        """
        asked = ("squeue", "--noheader", f"--job={job}", "--format=%r")
        self.wait(lambda: self.command(*asked) == "BeginTime")
        self.command("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def close(self):
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait()


@pytest.fixture
def slurm(tmp_path):
    with tempfile.TemporaryDirectory(prefix="slurm_") as own:
        slurm = Slurm(tmp_path, Path(own))
        yield slurm
        slurm.close()


def test_a_killed_machine_is_queued_again_and_every_document_is_stored_once(
    slurm, demo_inputs, alone_with_few, check
):
    """A machine of two nodes is queued again in the same way."""
    folder, (few, alone) = slurm.folder, alone_with_few
    script(folder / "python", PYTHON.format(python=sys.executable))
    variables = {"PYTHON": str(folder / "python"), "JAX_NUM_CPU_DEVICES": "2"}
    of_few = "--dataset_path", few, "--shard_size_gb", 1e-4, "--batch_size"
    flags = flags_for(demo_inputs, folder / "out", *of_few, 2)
    two = flags_for(demo_inputs, folder / "two", *of_few, 4)
    many = slurm.submit("--array=0-2 --cpus-per-task=2", flags, **variables)
    slurm.submit("--nodes=2", two, **variables)
    slurm.skip_delay(f"{many}_1")
    slurm.wait(slurm.ended)
    check_union(folder / "out", alone, {f"machine_{number:03d}" for number in range(3)})
    check_union(folder / "two", alone, {f"machine_000_host_{number:02d}" for number in range(2)})
    assert check(folder / "out") == check(folder / "two") == []
    log = (folder / f"{many}_1.log").read_text()
    assert "exit status 137: this machine is queued again and will continue" in log
    assert "machine 1 of 3" in log and "done: " in log
