"""The wheel has all files, and its command runs with what it needs; the image, which is tested
without an engine, has what a run needs."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from fnmatch import fnmatch

import pytest
from cloud import REPOSITORY, script
from conftest import AS_IN_A_RUN
from extractions import extract
from packaging.requirements import Requirement

from activation_extraction import __version__

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PACKAGE = REPOSITORY / "activation_extraction"
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
PINNED = {  # an extra, or the dependencies of the rest -> the files that pin its packages
    "extract": ["requirements.txt"],
    "tpu": ["deploy/requirements-tpu.txt"],
    "gpu": ["deploy/requirements-gpu.txt"],
    "report": ["requirements.txt", "tests/requirements.txt"],
    "grain": ["requirements.txt", "tests/requirements.txt"],
    "": ["requirements.txt", "tests/requirements.txt"],
}


@pytest.mark.parametrize("extra", PINNED)
def test_an_extra_takes_the_packages_that_are_pinned(extra):
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    ranges = {re.split("[<>]", str(each))[0]: each.specifier for each in map(Requirement, lines)}
    if extra in ("tpu", "gpu"):
        assert not ranges.pop(f"{PROJECT['name']}[extract]")
    texts = [(REPOSITORY / name).read_text() for name in PINNED[extra]]
    pinned = dict(re.findall(r"^([^#\s]+)==(\S+)$", "\n".join(texts), flags=re.M))
    assert ranges.keys() <= pinned.keys() and (len(texts) > 1 or len(pinned) == len(ranges))
    for package, versions in ranges.items():
        assert pinned[package] in versions, package


@pytest.mark.rare
def test_the_wheel_and_its_command_look_at_runs_and_say_what_the_rest_needs(tmp_path):
    """The wheel holds the sources and nothing else, and is installed with its base dependencies."""
    source = tmp_path / "source"  # building leaves files behind
    shutil.copytree(PACKAGE, source / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", ".gitignore"):
        shutil.copy(REPOSITORY / name, source)
    for path in REPOSITORY.glob("*.py"):
        shutil.copy(path, source)
    subprocess.run([*PIP, "wheel", "--no-deps", "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    expected = {str(path.relative_to(REPOSITORY)) for path in PACKAGE.rglob("*.py")}
    expected |= {"extract_activations.py", "qwen2_jax.py", "qwen2_jax_with_hooks.py"}
    data = ("py.typed", "inspect/report.css", "inspect/report.jinja", "run/demo_texts.txt")
    assert names == expected | {f"{PACKAGE.name}/{name}" for name in data}

    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    subprocess.run([*PIP, "--python", python, "install", "--no-compile", wheel], check=True)
    extract(tmp_path / "run")

    def call(*flags, program=(python.parent / "extract-activations",)):
        command = [*program, *flags, "--output_dir", "run"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    for flag in ("--help", "--version", "--status", "--verify"):
        done = call(flag)
        assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr
    assert call("--version").stdout == f"activation-extraction {__version__}\n"
    for flags, told in {
        "--report": "pip install -e '.[report]'",
        "--demo": "pip install -e '.[extract]'",
        "--export specforge --export_dir x": f"needs torch; run: {python} -m pip install torch",
    }.items():
        done = call(*flags.split())
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("error: ") and told in done.stderr
    of_checkout = python, REPOSITORY / "extract_activations.py"
    for flag, status in {"--verify": 0, "--demo": 2}.items():
        done = call(flag, program=of_checkout)
        assert (done.returncode, done.stderr.count("\n")) == (status, status // 2), done.stderr


def step_that_installs():
    """The command of the Dockerfile's one RUN."""
    text = (REPOSITORY / "Dockerfile").read_text()
    (step,) = re.findall(r"^RUN ((?:.*\\\n)*.*)", text, flags=re.M)
    return step


@pytest.mark.parametrize(
    "accelerator,jax", [("tpu", "jax[tpu]=="), ("gpu", "jax[cuda12]=="), ("cpu", "jax==")]
)
def test_the_image_installs_what_the_accelerator_needs(accelerator, jax, tmp_path):
    script(tmp_path / "pip", '#!/bin/sh\necho "$@"\n')
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ACCELERATOR": accelerator}
    command = {"args": ["sh", "-c", step_that_installs()], "cwd": REPOSITORY, "text": True}
    told = subprocess.check_output(**command, env=environment)
    assert jax in (REPOSITORY / told.split()[-1]).read_text()
    environment["ACCELERATOR"] = "gpt"
    assert subprocess.run(**command, env=environment, stderr=subprocess.DEVNULL).returncode == 2


@pytest.mark.rare
def test_the_image_runs_the_demo_with_nothing_but_its_requirements(tmp_path):
    """It has the files that .dockerignore lets in."""
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in lines if line.startswith("!")]
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    workspace = tmp_path / "workspace"
    for file in listed.stdout.splitlines():
        first = file.split("/")[0]
        if file in allowed or any(fnmatch(first, name) for name in allowed):
            (workspace / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / file, workspace / file)
    # With the newest pip: the one that comes with Python 3.11 takes twice as long.
    subprocess.run([sys.executable, "-m", "venv", "--upgrade-deps", tmp_path / "venv"], check=True)
    environment = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_"))}
    environment |= {"PATH": f"{tmp_path}/venv/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    environment |= {"PIP_COMPILE": "0", **AS_IN_A_RUN}  # not compiling saves half of the time

    def run(*command):
        result = subprocess.run(
            command, cwd=workspace, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    run("env", "ACCELERATOR=cpu", "sh", "-c", step_that_installs())
    entry, shell = workspace / "deploy/entrypoint.sh", "NUM_HOSTS=1 OUTPUT_DIR=b ./launch_v5e64.sh"
    assert "done: 300 samples" in run(entry, "--demo", "--output_dir", "a")
    assert "done: 5 samples" in run(entry, "-c", f"{shell} --demo --max_samples 5")
