"""Runs the scripts of tests/trainers in a virtual environment with the packages of trainers.

`make test-all` makes the environment; TRAINERS_PYTHON names the Python of another one. Tests that
use it are rare, and are skipped if it is missing.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cloud import REPOSITORY

PYTHON = Path(os.environ.get("TRAINERS_PYTHON", f"{sys.prefix}/trainers/bin/python"))
MARKS = [
    pytest.mark.rare,
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-all installs the trainers"),
]


def run_script(script: str, *arguments: object, folder: Path) -> str:
    """Runs a script in the trainers' environment.

    Args:
        script: The name of a file in tests/trainers.
        arguments: The arguments of the script.
        folder: The working directory of the script.

    Returns:
        The standard output of the script.
    """
    variables = {
        "PYTHONPATH": str(REPOSITORY),
        "CUDA_VISIBLE_DEVICES": "",
        # extract_activations.py turns PyTorch off for its own process, and so for the script.
        "USE_TORCH": "AUTO",
    }
    command = [str(PYTHON), str(REPOSITORY / "tests/trainers" / script), *map(str, arguments)]
    environment = {**os.environ, **variables}
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout
