"""The Dockerfile, step by step on this machine: no engine is needed."""

import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from cloud import REPOSITORY, script
from conftest import AS_IN_A_RUN

pytestmark = [pytest.mark.long, pytest.mark.rare]


def copy(sources, folder):
    """COPY of these names of the repository, of the files that .dockerignore lets in."""
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in lines if line.startswith("!")]
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    for file in listed.stdout.splitlines():
        first = file.split("/")[0]
        known = file in allowed or any(fnmatch(first, name) for name in allowed)
        if known and ("." in sources or file in sources):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / file, folder / file)


def replay(folder, accelerator, environment):
    """The Dockerfile's steps in order, as far as they mean anything without an engine."""
    text = re.sub(r"^#.*\n", "", (REPOSITORY / "Dockerfile").read_text(), flags=re.M)
    lines = re.sub(r"\\\n", "", text).splitlines()
    workspace, entry = None, None
    for instruction, rest in (line.split(maxsplit=1) for line in lines if line.strip()):
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


@pytest.mark.parametrize(
    "accelerator,jax", [("cpu", "jax=="), ("tpu", "jax[tpu]=="), ("gpu", "jax[cuda12]==")]
)
def test_the_image_installs_what_the_accelerator_needs(tmp_path, accelerator, jax):
    script(tmp_path / "pip", '#!/bin/sh\necho "$@" >pip_arguments\n')
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    workspace, entry, environment = replay(tmp_path, accelerator, path)
    arguments = (workspace / "pip_arguments").read_text().split()
    assert jax in (workspace / arguments[arguments.index("--requirement") + 1]).read_text()
    assert "--no-cache-dir" in arguments and environment["HF_HOME"].endswith("/cache/huggingface")
    names = {path.name for path in workspace.iterdir()}
    assert names >= {"extract_activations.py", "qwen2_jax.py", "launch_v5e64.sh"}
    assert not names & {"tests", "README.md", "benchmarks"} and os.access(entry, os.X_OK)


def test_an_unknown_accelerator_is_refused(tmp_path):
    with pytest.raises(subprocess.CalledProcessError, match="exit status 2"):
        replay(tmp_path, "gpt", dict(os.environ))


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
