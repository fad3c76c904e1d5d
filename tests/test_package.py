"""The wheel: what it holds, what it needs, and the command that it makes."""

import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile

import pytest
from cloud import REPOSITORY
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


def test_every_hint_installs_what_follows_the_checkout():
    for path in [REPOSITORY / "README.md", *PACKAGE.rglob("*.py")]:
        hints = re.findall(r"pip install[ \"\n]+(?:-e[ \"\n]+)?'?\.", path.read_text())
        assert all("-e" in hint for hint in hints), path
        assert "install 'activation" not in path.read_text(), path  # a name that is not ours


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, and a virtual environment with it and its base dependencies alone."""
    root = tmp_path_factory.mktemp("package")
    source = root / "source"  # building leaves files behind
    shutil.copytree(PACKAGE, source / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", ".gitignore"):
        shutil.copy(REPOSITORY / name, source)
    for path in REPOSITORY.glob("*.py"):
        shutil.copy(path, source)
    subprocess.run([*PIP, "wheel", "--no-deps", "-w", root, source], check=True)
    (wheel,) = root.glob("*.whl")
    venv.create(root / "venv", with_pip=False)
    python = root / "venv/bin/python"
    subprocess.run([*PIP, "--python", python, "install", "--no-compile", wheel], check=True)
    return wheel, python


@pytest.mark.rare
def test_the_wheel_holds_the_sources_and_nothing_else(installed):
    with zipfile.ZipFile(installed[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {str(path.relative_to(REPOSITORY)) for path in PACKAGE.rglob("*.py")}
    expected |= {"extract_activations.py", "qwen2_jax.py", "qwen2_jax_with_hooks.py"}
    data = ("py.typed", "inspect/report.css", "inspect/report.jinja", "run/demo_texts.txt")
    assert names == expected | {f"{PACKAGE.name}/{name}" for name in data}


@pytest.mark.rare
def test_the_bare_command_looks_at_runs_and_says_what_the_rest_needs(installed, tmp_path):
    extract(tmp_path / "run")

    def call(*flags):
        command = [installed[1].parent / "extract-activations", *flags, "--output_dir", "run"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    for flag in ("--help", "--version", "--status", "--verify"):
        done = call(flag)
        assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr
    assert call("--version").stdout == f"activation-extraction {__version__}\n"
    for flags, told in {
        "--report": "pip install -e '.[report]'",
        "--demo": "pip install -e '.[extract]'",
        "--list_hooks": "pip install -e '.[extract]'",
        "--export memmap --export_dir x": "--export memmap: needs torch; run: pip install torch",
    }.items():
        done = call(*flags.split())
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("error: ") and told in done.stderr
