"""A laptop and the machines that it reaches, with stand-ins for docker, gcloud and ssh.

What a host starts is extract_activations.py, or a small job in its place, which waits until the
test lets it go.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
LAUNCH, DEPLOY = REPOSITORY / "launch_v5e64.sh", REPOSITORY / "deploy.sh"
ODD = [  # arguments that a shell would spoil
    "a b",
    "it's",
    'say "x"',
    "$HOME `id` $(id)",
    "two\nlines",
    "back\\slash",
    "*",
    "",
    "é",
    ";&",
]

JOB = """#!{python} -S
import json, os, signal, sys, time
from pathlib import Path
root = Path("{root}")
if sys.argv[1] == "-m":  # as an interpreter that cannot check flags
    os._exit(1)
def end(number, _):
    if not (root / "stubborn").exists():
        print("stored", flush=True)
        os._exit(128 + number)
signal.signal(signal.SIGTERM, end)
argv = sys.argv[1:]
machine = argv[argv.index("--machine_id") + 1]
who = machine + "-" + os.environ.get("HOST_ID", "0")
at = dict(who=who, argv=argv, cwd=os.getcwd(), address=os.environ.get("COORDINATOR_ADDRESS"))
at["credentials"] = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
with open(root / "jobs.jsonl", "a") as file:
    file.write(json.dumps(at) + "\\n")
print("working as", who, flush=True)
status = root / f"status-{{who}}"
while not (root / "finish").exists() and not status.exists():
    time.sleep(0.02)
if (root / "half").exists():
    print("half a line", end="", flush=True)
    os.killpg(0, signal.SIGKILL)
print("finished", flush=True)
os._exit(int(status.read_text()) if status.exists() else 0)
"""


def ignored(path: Path) -> bool:
    """Whether .dockerignore keeps this path (relative to the repository) out of the image."""
    result = False
    for line in (REPOSITORY / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if pattern.startswith("**/"):
            matches = any(fnmatch(part, pattern[3:]) for part in path.parts)
        else:  # one name, of a file or of a folder with all that is in it
            matches = fnmatch(path.parts[0], pattern)
        if matches and not line.startswith("#"):
            result = not line.startswith("!")
    return result


def copy(sources: Sequence[str], folder: Path) -> None:
    """COPY of these names of the repository, of the files that git knows or could add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    for file in map(Path, listed.stdout.splitlines()):
        if not ignored(file) and any(source in (".", str(file)) for source in sources):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / file, folder / file)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Cloud:
    """A laptop and the machines that it reaches."""

    def __init__(self, root: Path, python: str | None = None, devices: int = 2) -> None:
        """python: what a host starts, instead of the small job; devices: of every host."""
        self.root = root
        self.laptop = root / "laptop"
        for name in ("laptop", "bin", "host_bin", "image_bin", "hosts", "tpus", "containers"):
            (root / name).mkdir()
        self.job = root / "job"
        self.script(self.job, JOB.format(python=sys.executable, root=root))
        self.python = python or str(self.job)
        self.variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        settings = {"variables": self.variables}
        (root / "settings.json").write_text(json.dumps(settings))
        for name in ("docker", "gcloud", "ssh"):
            text = (
                f'exec {sys.executable} -S {Path(__file__).parent}/stand_ins.py {root} {name} "$@"'
            )
            self.script(root / "bin" / name, f"#!/bin/sh\n{text}\n")
        self.script(root / "image_bin/python", f'#!/bin/sh\nexec {self.python} "$@"\n')
        # A Python of the hosts whose venvs need nothing installed.
        pip = 'case "$*" in *"pip install"*) exit ;; esac'
        self.script(root / "venv_python", f'#!/bin/sh\n{pip}\nexec {self.python} "$@"\n')
        make = f'mkdir -p "$3/bin" && cp {root}/venv_python "$3/bin/python"'
        self.script(root / "host_bin/python3.14", f"#!/bin/sh\n[ $1 != -m ] || {{ {make}; }}\n")
        self.script(root / "host_bin/df", "#!/bin/sh\necho Avail; echo ' 93'\n")
        copy(["."], root / "image")
        self.port = free_port()
        self.processes: list[subprocess.Popen[str]] = []

    @staticmethod
    def script(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def tpu(self, name: str, hosts: int, state: str = "READY") -> None:
        at = dict(state=state, hosts=hosts, coordinator=f"127.0.0.1:{free_port()}")
        (self.root / "tpus" / f"{name}.json").write_text(json.dumps(at))
        for worker in range(hosts):
            (self.root / "hosts" / f"{name}-w-{worker}").mkdir(exist_ok=True)

    def start(self, *arguments: str, **variables: str | None) -> "subprocess.Popen[str]":
        """deploy.sh in a process group of its own, as a terminal would start it."""
        given: dict[str, str | None] = {
            "PATH": f"{self.root}/bin:{os.environ['PATH']}",
            "HOME": str(self.laptop),
            "PYTHON": self.python,
            "COORDINATOR_PORT": str(self.port),
            "OUTPUT_DIR": "out",
            "MODEL_PATH": "some/model",
            **self.variables,
            **variables,
        }
        process = subprocess.Popen(
            ["bash", DEPLOY, arguments[0], "--min_free_gb", "0", *arguments[1:]],
            cwd=self.laptop,
            env={name: value for name, value in given.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def deploy(self, *arguments: str, **variables: str | None) -> tuple[int, str]:
        """(exit status, output) of deploy.sh."""
        process = self.start(*arguments, **variables)
        text = process.communicate(timeout=200)[0]
        return process.returncode, text

    def finish(self) -> None:
        """Lets the small jobs go."""
        (self.root / "finish").touch()

    def close(self) -> None:
        """Ends what a failed test has left running."""
        self.finish()
        for slow in self.root.glob("hosts/*/slow"):
            slow.unlink()
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def lines(self, name: str) -> list[Any]:
        """What `jobs` or `calls` have recorded."""
        path = self.root / f"{name}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    @staticmethod
    def read_until(process: "subprocess.Popen[str]", text: str, times: int = 1) -> str:
        """What deploy.sh prints until it has printed this so often."""
        seen = ""
        while seen.count(text) < times:
            line = process.stdout.readline() if process.stdout is not None else ""
            assert line, seen
            seen += line
        return seen

    def wait_for_jobs(self, count: int) -> None:
        self.wait(lambda: len(self.lines("jobs")) >= count)

    @staticmethod
    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)
