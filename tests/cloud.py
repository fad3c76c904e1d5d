"""A laptop and the Cloud TPUs that it reaches, with stand-ins for docker and gcloud.

What a host starts is extract_activations.py, or a small job in its place, which waits until the
test lets it go.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
LAUNCH, DEPLOY = REPOSITORY / "launch_v5e64.sh", REPOSITORY / "deploy/deploy.sh"
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
    print("stored", flush=True)
    os._exit(128 + number)
signal.signal(signal.SIGTERM, end)
who, xla = os.environ.get("HOST_ID", "0"), os.environ.get("XLA_FLAGS")
with open(root / "jobs.jsonl", "a") as file:
    file.write(json.dumps(dict(who=who, argv=sys.argv[1:], cwd=os.getcwd(), xla=xla)) + "\\n")
print("working as", who, flush=True)
while not (root / "finish").exists():
    time.sleep(0.02)
print("finished", flush=True)
"""


def ignored(path: Path) -> bool:
    """Whether .dockerignore keeps this path (relative to the repository) out of the image."""
    result = False
    for line in (REPOSITORY / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if pattern.startswith("**/"):
            matches = any(fnmatch(part, pattern[3:]) for part in path.parts)
        else:  # of a file, or of a folder with all that is in it
            depth = pattern.count("/") + 1
            matches = fnmatch("/".join(path.parts[:depth]), pattern)
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
    """A laptop and the Cloud TPUs that it reaches."""

    def __init__(self, root: Path, python: str | None = None) -> None:
        """python: what a host starts, instead of the small job."""
        self.root = root
        self.laptop = root / "laptop"
        for name in ("laptop", "bin", "host_bin", "image_bin", "hosts", "tpus", "containers"):
            (root / name).mkdir()
        self.job = root / "job"
        self.script(self.job, JOB.format(python=sys.executable, root=root))
        self.python = python or str(self.job)
        variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
        variables |= {"XLA_FLAGS": os.environ["XLA_FLAGS"]}
        (root / "settings.json").write_text(json.dumps({"variables": variables}))
        for name in ("docker", "gcloud"):
            text = (
                f'exec {sys.executable} -S {Path(__file__).parent}/stand_ins.py {root} {name} "$@"'
            )
            self.script(root / "bin" / name, f"#!/bin/sh\n{text}\n")
        self.script(root / "host_bin/sudo", '#!/bin/sh\nexec "$@"\n')
        self.script(root / "image_bin/python", f'#!/bin/sh\nexec {self.python} "$@"\n')
        copy(["."], root / "image")
        self.processes: list[subprocess.Popen[str]] = []

    @staticmethod
    def script(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def tpu(self, name: str, hosts: int) -> None:
        at = dict(hosts=hosts, coordinator=f"127.0.0.1:{free_port()}")
        (self.root / "tpus" / f"{name}.json").write_text(json.dumps(at))
        for worker in range(hosts):
            (self.root / "hosts" / f"{name}-w-{worker}").mkdir(exist_ok=True)

    def start(self, *arguments: str, **variables: str | None) -> "subprocess.Popen[str]":
        """deploy.sh in a process group of its own, as a terminal would start it."""
        given: dict[str, str | None] = {
            "PATH": f"{self.root}/bin:{os.environ['PATH']}",
            "HOME": str(self.laptop),
            "OUTPUT_DIR": "out",
            "MODEL_PATH": "some/model",
            "PYTHON": self.python,
            **variables,
        }
        process = subprocess.Popen(
            ["bash", DEPLOY, *arguments],
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
        text = process.communicate(timeout=600)[0]
        return process.returncode, text

    def finish(self) -> None:
        """Lets the small jobs go."""
        (self.root / "finish").touch()

    def close(self) -> None:
        """Ends what a failed test has left running."""
        self.finish()
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
