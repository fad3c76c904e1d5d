"""A real Slurm on this machine: its daemons, with nodes that are different loopback addresses."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cloud import REPOSITORY, free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
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
"""


def missing() -> str | None:
    """Why there can be no Slurm here; None when there can."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return f"{program} is not installed: apt-get install slurm-wlm munge"
    return None if os.getuid() == 0 else "Slurm's daemons run as root"


class Slurm:
    """Its commands; `environment` is what they need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def command(self, *words: object, **variables: str) -> str:
        """What a command prints."""
        done = subprocess.run(
            [str(word) for word in words],
            env=self.environment | variables,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, *words: object, **variables: str) -> str:
        """Submits deploy/slurm.sbatch; `words` are options, the script's name and flags."""
        output = f"--output={self.folder}/%A_%a.log"
        return self.command("sbatch", "--parsable", output, *words, **variables).strip()

    def wait(self, condition: Callable[[], bool], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def ended(self) -> bool:
        jobs = self.command("squeue", "--noheader", "--format=%i %r").splitlines()
        for job, reason in (line.split(maxsplit=1) for line in jobs):
            if "held" in reason:  # it began sooner than Slurm likes, because of `skip_delay`
                self.command("scontrol", "release", job)
        return not jobs

    def skip_delay(self, job: str) -> None:
        """A job that is requeued waits for two minutes; this one for two seconds.

        Slurm refuses to start it in the second in which it revoked the job's last credential.
        """
        asked = ("squeue", "--noheader", f"--job={job}", "--format=%r")
        self.wait(lambda: self.command(*asked).strip() == "BeginTime")
        self.command("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def logs(self) -> str:
        return "\n".join(f"{p.name}:\n{p.read_text()}" for p in self.folder.glob("*_*.log"))


@contextmanager
def run_slurm(folder: Path, nodes: int) -> Iterator[Slurm]:
    """A cluster of so many nodes, whose jobs share what CPUs there are.

    Jobs log to `folder`. Slurm's own files lie elsewhere: paths of sockets have to be short.
    """
    with tempfile.TemporaryDirectory(prefix="slurm_") as own:
        yield from _run_slurm(folder, Path(own), nodes)


def _run_slurm(folder: Path, own: Path, nodes: int) -> Iterator[Slurm]:
    slurm = Slurm(folder)
    host = socket.gethostname()
    lines = [CONFIGURATION.format(host=host, port=free_port(), first=free_port(), own=own)]
    names = [f"127.0.0.{number}" for number in range(1, nodes + 1)]
    for name in names:
        lines.append(f"NodeName={name} NodeHostname={host} Port={free_port()} CPUs=4\n")
    lines.append("PartitionName=all Nodes=ALL Default=YES State=UP\n")
    (folder / "slurm.conf").write_text("".join(lines))
    (own / "state").mkdir()
    key = own / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = [f"--{name}-file={own}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    munged = ["munged", "--foreground", "--force", f"--socket={own}/munge.socket", *files]
    nodes_daemons = [["slurmd", "-D", "-N", name] for name in names]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (munged, ["slurmctld", "-D"], *nodes_daemons):
            with open(folder / f"daemon-{len(daemons)}", "w") as log:
                daemons.append(
                    subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=log)
                )
            if command is munged:
                slurm.wait((own / "munge.socket").exists, 20)
        slurm.wait(lambda: idle(slurm) == nodes, 60)
        yield slurm
        slurm.command("scancel", "--user=root")
        slurm.wait(slurm.ended, 60)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


def idle(slurm: Slurm) -> int:
    """How many nodes are ready; none while the controller does not answer yet."""
    states = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"],
        env=slurm.environment,
        capture_output=True,
        text=True,
    )
    return states.stdout.split().count("idle")
