"""The rooms of the house: who may import whom, and which of them work without JAX."""

import ast
import subprocess
import sys
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
    "run": ("common", "cli", "text", "store", "model", "dataset", "inspect"),
}
WITHOUT_JAX = ("common", "cli", "text", "store", "dataset", "inspect")
# Of the other rooms, what configurations say and which hooks there are.
ALSO_WITHOUT_JAX = ("hooks", "model_config")

# Imports every module that is named on stdin, where JAX and Flax cannot be imported.
IMPORT = """
import importlib, sys
sys.modules.update(dict.fromkeys(("jax", "jaxlib", "flax")))
for name in sys.stdin.read().split():
    try:
        importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{name}: {error}")
"""


def modules(room: str) -> list[Path]:
    return sorted((PACKAGE / room).glob("*.py"))


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it; of packages, the submodules by name."""
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
    return found


def forbidden(room: str, path: Path) -> list[str]:
    """The imports of a file that its room does not allow."""
    ours = {name.removeprefix("activation_extraction.") for name in imported(path)}
    rooms = {name for name in ours if name.split(".")[0] in ARROWS}
    return sorted(
        name
        for name in ours
        if name in SCRIPTS
        or (
            name in rooms
            and name.split(".")[0] not in (room, *ARROWS[room])
            and name not in ARROWS[room]
        )
    )


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_imports_only_what_lies_below_it(room):
    found = {path.name: bad for path in modules(room) if (bad := forbidden(room, path))}
    assert not found


def test_every_folder_is_a_room_with_a_docstring():
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert folders == set(ARROWS)
    for room in ARROWS:
        for path in modules(room):
            assert ast.get_docstring(ast.parse(path.read_text())), path


def test_shared_types_import_nothing_but_shared_types():
    for name in SHARED:
        path = PACKAGE / f"{name.replace('.', '/')}.py"
        ours = {n for n in imported(path) if n.startswith("activation_extraction")}
        assert ours <= {f"activation_extraction.{shared}" for shared in SHARED}, name


@pytest.mark.long
def test_rooms_work_without_jax():
    names = ["activation_extraction", *(f"activation_extraction.{room}" for room in WITHOUT_JAX)]
    for room in WITHOUT_JAX:
        paths = [path for path in modules(room) if path.stem != "__init__"]
        names += [f"activation_extraction.{room}.{path.stem}" for path in paths]
    names += [f"activation_extraction.model.{name}" for name in ALSO_WITHOUT_JAX]

    def run(names: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", IMPORT],
            input=" ".join(names),
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )

    done = run(names)
    assert done.returncode == 0, done.stderr
    assert run(["activation_extraction.model.mesh"]).returncode != 0  # the refusal works
