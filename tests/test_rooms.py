"""The rooms of the house: who may import whom, and which of them work without JAX."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "activation_extraction"
SCRIPTS = {"extract_activations", "qwen2_jax", "qwen2_jax_with_hooks"}

# A room -> the rooms it may import from. Small modules of shared types are named by themselves.
SHARED = ("text.batch",)
ARROWS = {
    "common": (),
    "cli": ("common",),
    "text": ("common",),
    "store": ("common", *SHARED),
    "dataset": ("common", "store", *SHARED),
    "inspect": ("common", "cli", "store", "dataset", *SHARED),
    "model": ("common", "store.folder", "store.safetensors_file", *SHARED),
    "run": ("common", "cli", "text", "store", "model", "inspect"),
}
# And of the other rooms, what configurations say and which hooks there are.
WITHOUT_JAX = ("common", "cli", "text", "store", "dataset", "inspect")
ALSO_WITHOUT_JAX = ("model.hooks", "model.model_config")

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


def modules(room: str) -> list[Path]:
    return sorted((PACKAGE / room).glob("*.py"))


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it, those of the package as ROOM.MODULE."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            module = str(node.module)
            inside = REPOSITORY / module.replace(".", "/")
            found |= {
                f"{module}.{alias.name}" if (inside / f"{alias.name}.py").exists() else module
                for alias in node.names
            }
    return {name.removeprefix("activation_extraction.") for name in found}


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_imports_only_what_lies_below_it(room):
    allowed = {room, *ARROWS[room]}
    for path in modules(room):
        names = imported(path)
        ours = {name for name in names if name.split(".")[0] in ARROWS}
        bad = {name for name in ours if not {name, name.split(".")[0]} & allowed}
        assert not bad | names & SCRIPTS, path.name


def test_no_module_imports_itself_by_way_of_others():
    """Nor for a type checker, but for two: what modules need of each other lies below both."""
    graph = {f"{room}.{path.stem}": imported(path) for room in ARROWS for path in modules(room)}
    graph["model.checkpoint"].discard("model.lora")  # for a type checker: a checkpoint's adapter
    graph["dataset.paired"].discard("dataset.dataset")  # and what the runs are
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_every_folder_is_a_room_with_a_docstring():
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} == set(ARROWS)
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_shared_types_import_nothing_but_shared_types():
    for name in SHARED:
        names = imported(PACKAGE / f"{name.replace('.', '/')}.py")
        assert {each for each in names if each.split(".")[0] in ARROWS} <= set(SHARED)


@pytest.mark.long
def test_rooms_work_without_jax():
    def run(names: list[str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", IMPORT]
        return subprocess.run(
            command, input=" ".join(names), cwd=REPOSITORY, capture_output=True, text=True
        )

    paths = [path for room in WITHOUT_JAX for path in modules(room) if path.stem != "__init__"]
    done = run([*(f"{path.parent.name}.{path.stem}" for path in paths), *ALSO_WITHOUT_JAX])
    assert done.returncode == 0, done.stderr
    assert run(["model.mesh"]).returncode != 0  # the refusal works
