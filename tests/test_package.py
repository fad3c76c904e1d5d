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


@pytest.mark.parametrize(
    "extra,files",
    [
        ("extract", ["requirements.txt"]),
        ("tpu", ["deploy/requirements-tpu.txt"]),
        ("gpu", ["deploy/requirements-gpu.txt"]),
    ],
)
def test_an_extra_takes_the_packages_that_its_file_pins(extra, files):
    extras = map(Requirement, PROJECT["optional-dependencies"][extra])
    ranges = {re.split("[<>]", str(each))[0]: each.specifier for each in extras}
    if extra != "extract":
        assert not ranges.pop(f"{PROJECT['name']}[extract]")
    pinned = requirements(*files)
    assert ranges.keys() == pinned.keys()
    for package, version in pinned.items():
        assert version in ranges[package], package


def test_what_reading_and_reports_need_takes_the_pins():
    pinned = requirements("requirements.txt", "tests/requirements.txt")
    for line in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["report"]):
        each = Requirement(line)
        assert pinned[each.name] in each.specifier, line


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


@pytest.mark.rare
def test_what_messages_have_one_install_follows_the_checkout(tmp_path):
    """No second copy goes stale, and git does not see what is left beside the sources."""
    source = copy_of_the_checkout(tmp_path / "source")
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *command], cwd=source, check=True)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    pip = [*PIP, "--python", python, "install", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "-e", "."], cwd=source, check=True)
    changed = source / "activation_extraction/__init__.py"
    changed.write_text(changed.read_text().replace(__version__, "9.9.9"))
    code = "import activation_extraction.cli.config as c, activation_extraction as a; "
    code += "print(c.__file__, a.__version__)"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [f"{source}/activation_extraction/cli/config.py", "9.9.9"]
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    seen = subprocess.run(status, cwd=source, capture_output=True, text=True, check=True)
    assert [line for line in seen.stdout.splitlines() if not line.startswith("A")] == []


def test_every_hint_installs_what_follows_the_checkout():
    for path in [REPOSITORY / "README.md", *REPOSITORY.rglob("activation_extraction/**/*.py")]:
        hints = re.findall(r"pip install[ \"\n]+(?:-e[ \"\n]+)?'?\.", path.read_text())
        assert all("-e" in hint for hint in hints), path


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
def test_reading_needs_no_more_than_the_base_dependencies(installed, tmp_path):
    _, python = installed
    code = "import activation_extraction.inspect.status, sys; print('jax' in sys.modules)"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


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


def test_hints_install_from_the_checkout_and_not_by_a_name_that_is_not_ours():
    for path in [REPOSITORY / "README.md", *REPOSITORY.rglob("activation_extraction/**/*.py")]:
        assert "install 'activation" not in path.read_text(), path


def test_what_building_leaves_is_ignored():
    assert "build/" in (REPOSITORY / ".gitignore").read_text().splitlines()
