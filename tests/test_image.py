"""The Dockerfile, step by step on this machine: no engine is needed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cloud import REPOSITORY, Cloud, copy
from conftest import AS_IN_A_RUN

pytestmark = pytest.mark.long


def dockerfile():
    """(instruction, rest of it) in order, continuation lines joined, comments left out."""
    text = re.sub(r"^#.*\n", "", (REPOSITORY / "Dockerfile").read_text(), flags=re.M)
    lines = re.sub(r"\\\n", "", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def replay(folder, accelerator, environment):
    """The Dockerfile's steps in order, as far as they mean anything without an engine."""
    workspace, entry = None, None
    for instruction, rest in dockerfile():
        if instruction == "FROM":
            assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", rest)
        elif instruction == "ENV":
            environment = environment | dict(pair.split("=", 1) for pair in rest.split())
        elif instruction == "WORKDIR":
            workspace = folder / rest[1:]
            workspace.mkdir()
        elif instruction == "ARG":
            environment = {**environment, rest.split("=")[0]: accelerator}
        elif instruction == "COPY":
            *sources, target = rest.split()
            assert target == "./" or all(str(Path(s).parent) == target[:-1] for s in sources)
            copy(sources, workspace)  # which keeps the names of folders
        elif instruction == "RUN":
            subprocess.run(["sh", "-c", rest], cwd=workspace, env=environment, check=True)
        else:
            assert instruction == "ENTRYPOINT"
            (entry,) = json.loads(rest)
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        environment[name] = f"{folder}{environment[name]}"
    return workspace, f"{folder}{entry}", environment


@pytest.mark.parametrize("accelerator", ["cpu", "tpu", "gpu", "gpt"])
def test_the_image_installs_what_the_accelerator_needs(tmp_path, accelerator):
    Cloud.script(tmp_path / "pip", '#!/bin/sh\necho "$@" >pip_arguments\n')
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if accelerator == "gpt":
        with pytest.raises(subprocess.CalledProcessError, match="exit status 2"):
            replay(tmp_path, accelerator, environment)
        return
    workspace, entry, environment = replay(tmp_path, accelerator, environment)
    arguments = (workspace / "pip_arguments").read_text().split()
    file = workspace / arguments[arguments.index("--requirement") + 1]
    extra = {"cpu": "jax==", "tpu": "jax[tpu]==", "gpu": "jax[cuda12]=="}[accelerator]
    assert extra in file.read_text()
    assert "--no-cache-dir" in arguments and environment["HF_HOME"].endswith("/cache/huggingface")
    names = {path.name for path in workspace.iterdir()}
    assert names >= {"extract_activations.py", "qwen2_jax.py", "launch_v5e64.sh"}
    assert not names & {"tests", "README.md", ".git", ".venv", "benchmarks"}
    deployed = {path.name for path in (workspace / "deploy").iterdir()}
    assert deployed == {"entrypoint.sh", "requirements-tpu.txt", "requirements-gpu.txt"}
    assert os.access(entry, os.X_OK)


@pytest.mark.rare
def test_the_image_runs_the_demo_with_nothing_but_what_its_steps_install(tmp_path):
    # With the newest pip: the one that comes with Python 3.11 takes twice as long.
    subprocess.run([sys.executable, "-m", "venv", "--upgrade-deps", tmp_path / "venv"], check=True)
    environment = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_"))}
    environment |= {"PATH": f"{tmp_path}/venv/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    environment |= {"PIP_COMPILE": "0", **AS_IN_A_RUN}  # not compiling saves half of the time
    workspace, entry, environment = replay(tmp_path, "cpu", environment)
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # the first start compiles, as pip did not

    def run(*arguments):
        result = subprocess.run(
            [entry, *arguments], cwd=workspace, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    shell = "which python; OUTPUT_DIR=b NUM_HOSTS=1 ./launch_v5e64.sh --demo --max_samples 5"
    assert "done: 300 samples" in run("--demo", "--output_dir", "a")
    python, *summary = run("-c", shell).splitlines()
    assert python == f"{tmp_path}/venv/bin/python" and "done: 5 samples" in summary[0]
