"""The rooms of the house: who may import whom, and which of them work without JAX."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cloud import REPOSITORY
from command_line import SCRIPT
from extractions import extract

PACKAGE = REPOSITORY / "activation_extraction"
# The files of the model lie at the top level, where its user asked for them; their room is model.
MODEL_FILES = "qwen2_jax", "qwen2_jax_with_hooks"

# A room -> the rooms it may import from. Small modules of shared types are named by themselves:
# the parts of the configuration, and what samples are.
SHARED = ("cli.flags", "text.batch", "text.mark", "text.sample_facts")
ARROWS = {
    "common": (),
    "cli": ("common",),
    "text": ("common",),
    "store": ("common", *SHARED),
    "dataset": ("common", "store", *SHARED),
    "inspect": ("common", "cli", "store", "dataset", *SHARED),
    "model": ("common", "store.folder", *SHARED),
    "run": ("common", "cli", "text", "store", "model"),
}
# And of the other rooms, what configurations say and which hooks there are.
WITHOUT_JAX = ("common", "cli", "text", "store", "dataset", "inspect")
ALSO_WITHOUT_JAX = ("model.family", "model.hooks", "model.model_config")

# Imports every module that is named on stdin, where JAX and Flax cannot be imported.
IMPORT = """
import importlib, sys
sys.modules.update(dict.fromkeys(("jax", "jaxlib", "flax")))
for name in sys.stdin.read().split():
    try:
        importlib.import_module("activation_extraction." + name)
    except ImportError as error:
        sys.exit(f"{name}: {error}")
"""


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it, those of the package as ROOM.MODULE."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = REPOSITORY / str(node.module).replace(".", "/")
            for alias in node.names:
                is_module = (inside / f"{alias.name}.py").exists()
                found.add(f"{node.module}.{alias.name}" if is_module else str(node.module))
    return {name.removeprefix("activation_extraction.") for name in found}


def test_a_room_imports_only_what_lies_below_it():
    rooms = {path: path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert set(rooms.values()) == set(ARROWS)
    rooms |= {REPOSITORY / f"{name}.py": "model" for name in MODEL_FILES}
    for path, room in rooms.items():
        allowed = {room, *ARROWS[room]}
        for name in imported(path):
            target = "model" if name in MODEL_FILES else name.split(".")[0]
            assert target not in ARROWS or {name, target} & allowed, f"{path}: {name}"
            assert name != "extract_activations", f"{path}: {name}"


@pytest.mark.parametrize("room", ARROWS)
def test_the_docstring_of_a_room_lists_its_modules(room):
    """One line each, by their names and with what they do."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
    listed = re.findall(r"^ {4,6}(\w+\.py) +\S", str(docstring), re.M)
    assert sorted(listed) == sorted(path.name for path in (PACKAGE / room).glob("[!_]*.py"))


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    extract(folder)
    return folder


# The command -> the large packages that it needs.
LARGE = {"jax", "jaxlib", "flax", "transformers", "datasets", "torch"}
READING = {"numpy", "pyarrow", "obstore"}
IMPORTED = {
    "--help": set(),
    "--version": set(),
    "--no_such_flag": set(),
    "--max_samples many": set(),
    "--layers_to_extract 1 --hook_names x": set(),  # refused together
    "--status --output_dir {}": READING,
    "--verify --output_dir {}": READING,
    "--report --output_dir {}": READING,
}


@pytest.mark.parametrize("flags", IMPORTED)
def test_a_command_imports_nothing_large_that_it_does_not_need(flags, finished_run):
    """JAX and what reads models and data sets take seconds of computing."""
    given = flags.format(finished_run).split()
    command = [sys.executable, "-X", "importtime", SCRIPT, *given]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 2) and "Traceback" not in done.stderr
    modules = re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.M)
    assert "argparse" in modules
    assert (LARGE | READING) & {module.split(".")[0] for module in modules} == IMPORTED[flags]


@pytest.mark.long
def test_rooms_work_without_jax():
    def run(names: list[str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", IMPORT]
        return subprocess.run(
            command, input=" ".join(names), cwd=REPOSITORY, capture_output=True, text=True
        )

    paths = [path for room in WITHOUT_JAX for path in (PACKAGE / room).glob("[!_]*.py")]
    done = run([*(f"{path.parent.name}.{path.stem}" for path in paths), *ALSO_WITHOUT_JAX])
    assert done.returncode == 0, done.stderr
    assert run(["model.mesh"]).returncode != 0  # the refusal works
