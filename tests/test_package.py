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


def requirements(*names):
    """Package, with its extra, -> its version in requirements files."""
    lines = [line for name in names for line in (REPOSITORY / name).read_text().splitlines()]
    return dict(line.split("==") for line in lines if line and not line.startswith(("#", "-r ")))


PINNED = {  # an extra, or the dependencies of the rest -> the files that pin its packages
    "extract": ["requirements.txt"],
    "tpu": ["deploy/requirements-tpu.txt"],
    "gpu": ["deploy/requirements-gpu.txt"],
    "report": ["requirements.txt", "tests/requirements.txt"],
    "": ["requirements.txt", "tests/requirements.txt"],
}


@pytest.mark.parametrize("extra", PINNED)
def test_an_extra_takes_the_packages_that_are_pinned(extra):
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    ranges = {re.split("[<>]", str(each))[0]: each.specifier for each in map(Requirement, lines)}
    if extra in ("tpu", "gpu"):
        assert not ranges.pop(f"{PROJECT['name']}[extract]")
    pinned = requirements(*PINNED[extra])
    assert ranges.keys() <= pinned.keys() and (len(PINNED[extra]) > 1 or len(pinned) == len(ranges))
    for package, versions in ranges.items():
        assert pinned[package] in versions, package


def test_every_hint_installs_what_follows_the_checkout():
    for path in [REPOSITORY / "README.md", *REPOSITORY.rglob("activation_extraction/**/*.py")]:
        hints = re.findall(r"pip install[ \"\n]+(?:-e[ \"\n]+)?'?\.", path.read_text())
        assert all("-e" in hint for hint in hints), path
        assert "install 'activation" not in path.read_text(), path  # a name that is not ours


PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def copy_of_the_checkout(source):
    """What an installation needs; building leaves files behind."""
    source.mkdir()
    for path in [
        *REPOSITORY.glob("*.py"),
        *map(REPOSITORY.joinpath, ("pyproject.toml", "README.md", ".gitignore")),
    ]:
        shutil.copy(path, source)
    package = "activation_extraction"
    shutil.copytree(
        REPOSITORY / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
    )
    return source


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, and a virtual environment with it and its base dependencies alone."""
    root = tmp_path_factory.mktemp("package")
    source = copy_of_the_checkout(root / "source")
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
    package = REPOSITORY / "activation_extraction"
    expected = {str(path.relative_to(REPOSITORY)) for path in package.rglob("*.py")}
    expected |= {"extract_activations.py", "qwen2_jax.py", "qwen2_jax_with_hooks.py"}
    data = ("py.typed", "inspect/report.css", "inspect/report.jinja", "run/demo_texts.txt")
    assert names == expected | {f"{package.name}/{name}" for name in data}


@pytest.mark.rare
def test_the_bare_command_looks_at_runs_and_says_what_the_rest_needs(installed, tmp_path):
    extract(tmp_path / "run")

    def call(*flags):
        command = [installed[1].parent / "extract-activations", *flags]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    looks = [["--help"], ["--version"], ["--status"], ["--verify"]]
    for flags in looks:
        done = call(*flags, "--output_dir", "run")
        assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr
    assert call("--version").stdout == f"activation-extraction {__version__}\n"
    needs = {"--report": "[report]", "--demo": "[extract]", "--list_hooks": "[extract]"}
    for flag, extra in needs.items():
        done = call(flag, "--output_dir", "run")
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("error: ") and f"pip install -e '.{extra}'" in done.stderr
    done = call("--export", "memmap", "--export_dir", "x", "--output_dir", "run")
    assert done.returncode == 2
    assert done.stderr == "error: --export memmap: needs torch; run: pip install torch\n"
